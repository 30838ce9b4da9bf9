"""Cost of a pass over many waiting requests, and of decode bookkeeping. Times in microseconds."""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Callable

from hicache_fsm.backup.beliefs import StorageExistenceCache
from hicache_fsm.config import CacheConfig
from hicache_fsm.control.plane import ControlPlane
from hicache_fsm.ports import LookupDone, PageKey
from hicache_fsm.scheduler.batch import Batch
from hicache_fsm.scheduler.reference import ReferenceScheduler
from hicache_fsm.scheduler.requests import Request
from hicache_fsm.testing.direct import DirectCache

WAITING = 10_000
UNRELATED = 100
PROMPT_PAGES = 16


def _keys(label: str, count: int) -> tuple[PageKey, ...]:
    return tuple(hashlib.blake2b(f"{label}/{i}".encode(), digest_size=32).digest() for i in range(count))


def _median_us(call: Callable[[], object], rounds: int) -> float:
    samples = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - began)
    return statistics.median(samples) / 1000


def waiting_plane() -> ControlPlane:
    """10,000 requests that have asked storage, missed, and wait for device room; all share one resident page."""
    plane = ControlPlane(CacheConfig(device_pages=65_536, retry_poll_interval_passes=0))
    full = plane.parts.full
    shared = _keys("shared", 1)
    pages = full.take_device(1)
    assert pages is not None
    full.tree.lock(full.tree.insert(shared, 0, pages, 0).node)
    for i in range(WAITING):
        plane.submit(f"r{i}", PROMPT_PAGES * 64 + 1, shared + _keys(f"r{i}", PROMPT_PAGES - 1))
    answers = [LookupDone(command.op, 0, True) for command in plane.take_commands()]  # type: ignore[union-attr]
    plane.tick(answers)
    return plane


def _churn(plane: ControlPlane) -> Callable[[], None]:
    """Insert and evict unrelated pages."""
    full = plane.parts.full
    numbers = itertools.count()

    def call() -> None:
        keys = _keys(f"u{next(numbers)}", UNRELATED)
        pages = full.take_device(UNRELATED)
        assert pages is not None
        full.tree.insert(keys, 0, pages, 0)
        full.give_device(full.tree.evict(UNRELATED).pages)

    return call


def bench_ticks() -> dict[str, float]:
    plane = waiting_plane()
    plane.tick()
    touches = plane.parts.attempts.touches
    quiet = _median_us(plane.tick, 2000)
    churn = _churn(plane)
    samples = []
    for _ in range(300):
        churn()
        began = time.perf_counter_ns()
        plane.tick()
        samples.append(time.perf_counter_ns() - began)
    idle_touches = plane.parts.attempts.touches - touches
    # The next page of one request's prompt appears: exactly that request's boundary has moved.
    full = plane.parts.full
    watcher = plane.parts.attempts.get("r77")
    page = full.take_device(1)
    assert page is not None
    full.tree.insert(watcher.keys, 1, page, 0)
    before = plane.parts.attempts.touches
    plane.parts.prefetch.refresh()
    return {
        f"tick_{WAITING}_waiting_us": quiet,
        f"tick_{WAITING}_waiting_{UNRELATED}_pages_churned_us": statistics.median(samples) / 1000,
        "attempts_touched_while_nothing_happened": float(idle_touches),
        "attempts_touched_by_one_inserted_page": float(plane.parts.attempts.touches - before),
    }


class _Echo:
    """A model that computes nothing, so that only the bookkeeping is measured."""

    def forward(self, batch: Batch) -> tuple[list[int], list[int]]:
        return [1] * len(batch.prefill), [1] * len(batch.decode)


def bench_decode(running: int = 200) -> dict[str, float]:
    """Bookkeeping of decoding requests, pages that they grow by included."""
    config = CacheConfig(device_pages=65_536, prefetch_threshold_tokens=1 << 30)
    cache = DirectCache(config)
    scheduler = ReferenceScheduler(cache, _Echo())
    for i in range(running):
        scheduler.submit(Request(f"r{i}", range(i * 128, i * 128 + 128), 100_000))
    while len(scheduler.running) < running:
        scheduler.step()
    cost = _median_us(scheduler.step, 1000)
    total = []
    for _ in range(3):
        began = time.perf_counter_ns()
        for _ in range(256):
            scheduler.step()
        total.append((time.perf_counter_ns() - began) / 256 / 1000)
    return {
        "decode_bookkeeping_us_per_request_and_pass": cost / running,
        "decode_bookkeeping_us_per_request_and_pass_mean": min(total) / running,
    }


def bench_beliefs(capacity: int = 65_536) -> dict[str, float]:
    """Learning a key when the beliefs are full: the oldest have to go, at a cost that must not grow with the bound."""
    beliefs = StorageExistenceCache(capacity, 1, 1)
    keys = [i.to_bytes(32, "little") for i in range(4 * capacity)]
    beliefs.add(keys[:capacity])
    began = time.perf_counter_ns()
    for start in range(capacity, len(keys), 128):
        beliefs.add(keys[start : start + 128])
    return {"belief_learnt_at_capacity_us": (time.perf_counter_ns() - began) / 1000 / (len(keys) - capacity)}


def run() -> dict[str, float]:
    return {**bench_ticks(), **bench_decode(), **bench_beliefs()}
