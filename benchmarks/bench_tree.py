"""Time the prefix tree and its page keys, in microseconds an operation.

    python -m benchmarks.bench_tree [--json]

The workload has the shape of a document-chat service: a few system prompts, documents below them, unique tails.
Each figure is the best of several runs, because other work on the machine can only add time.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Sequence

from hicache_fsm.ports import PageKey
from hicache_fsm.tree.keys import page_keys
from hicache_fsm.tree.prefix_tree import PrefixTree

Prompts = list[list[int]]
Chains = list[tuple[PageKey, ...]]


def make_prompts(
    count: int = 2000, system: int = 512, document: int = 768, tail: int = 768, systems: int = 8, documents: int = 200
) -> Prompts:
    """Shuffled prompts; each is one of the system prompts, one of its documents, and a tail of its own."""
    source = random.Random(7)

    def text(length: int) -> list[int]:
        return [source.randrange(128_000) for _ in range(length)]

    heads = [text(system) for _ in range(systems)]
    bodies = [heads[number % systems] + text(document) for number in range(documents)]
    prompts = [bodies[number % documents] + text(tail) for number in range(count)]
    source.shuffle(prompts)
    return prompts


class Stopwatch:
    """Microseconds a unit over several runs of a figure; keeps the best run."""

    def __init__(self) -> None:
        self.best: dict[str, float] = {}

    def measure(self, name: str, units: int, body: Callable[[], None]) -> None:
        gc.collect()
        begin = time.perf_counter()
        body()
        self.record(name, units, time.perf_counter() - begin)

    def record(self, name: str, units: int, seconds: float) -> None:
        value = 1e6 * seconds / units
        self.best[name] = min(self.best.get(name, value), value)


def fill(tree: PrefixTree, chains: Chains, watch: Stopwatch) -> float:
    """Match, then insert, request by request, as a scheduler does; returns the share of pages that were matched."""
    clock = time.perf_counter
    matching = inserting = 0.0
    hits = adopted = page = 0
    for now, keys in enumerate(chains):
        begin = clock()
        length = tree.match(keys)
        matching += clock() - begin
        pages = range(page, page + len(keys) - length)
        begin = clock()
        result = tree.insert(keys, length, pages, now)
        inserting += clock() - begin
        hits += length
        adopted += result.adopted
        page += result.adopted
    watch.record("match_while_filling", len(chains), matching)
    watch.record("insert", len(chains), inserting)
    watch.record("insert_per_page", adopted, inserting)
    return hits / sum(map(len, chains))


def one_round(prompts: Prompts, chains: Chains, page_size: int, watch: Stopwatch) -> float:
    """Every figure once, on a tree of its own; returns the hit rate."""
    count = len(prompts)
    tree = PrefixTree()
    hit_rate = fill(tree, chains, watch)
    nodes = [tree.deepest(keys, len(keys)) for keys in chains]

    def match_cold() -> None:
        for tokens in prompts:
            tree.match(page_keys(tokens, page_size))

    def match_keys() -> None:
        for keys in chains:
            tree.match(keys)

    def match_hint() -> None:
        for keys in chains:
            tree.match(keys, len(keys))

    def collect() -> None:
        for keys in chains:
            tree.pages(keys, 0, len(keys))

    def lock_pair() -> None:
        for node in nodes:
            tree.lock(node)
            tree.unlock(node)

    watch.measure("match_cold_with_hashing", count, match_cold)
    watch.measure("match_keys_at_hand", count, match_keys)
    watch.measure("match_with_hint", count, match_hint)
    watch.measure("collect_pages", count, collect)
    watch.measure("lock_unlock_fresh_path", count, lock_pair)
    for node in nodes:
        tree.lock(node)
    watch.measure("lock_unlock_locked_path", count, lock_pair)
    for node in nodes:
        tree.unlock(node)
    resident = tree.resident
    watch.measure("evict_per_page", resident, lambda: drain(tree))
    assert tree.resident == 0, f"{tree.resident} pages left after evicting all"
    return hit_rate


def drain(tree: PrefixTree) -> None:
    """Evict everything in the portions that a batch would ask for."""
    while tree.evict(32).pages:
        pass


def run(page_size: int = 64, rounds: int = 3, count: int = 2000) -> dict[str, float]:
    """All figures, and the hit rate of the workload, a share."""
    prompts = make_prompts(count)
    chains = [page_keys(tokens, page_size) for tokens in prompts]
    watch = Stopwatch()
    hit_rate = 0.0
    for _ in range(rounds):
        hit_rate = one_round(prompts, chains, page_size, watch)
    return {"hit_rate": hit_rate, **{f"{name}_us": value for name, value in watch.best.items()}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time the prefix tree.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    figures = run(options.page_size, options.rounds)
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:28s} {value:10.3f}")


if __name__ == "__main__":
    main()
