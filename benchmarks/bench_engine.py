"""Copy bandwidth of the CPU engine beside a plain memory copy of the same bytes, interleaved in one run.

    python benchmarks/bench_engine.py

`scattered` copies pages that are contiguous on neither side; `run` copies one contiguous run. Each figure is the
median over rounds, each ratio the median of per-round ratios, so that a slow phase of the machine hits both sides.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable

import torch

from hicache_gpu import CpuEngine, KVLayout

BYTES = 32 * 1024 * 1024  # well beyond the caches, and still quick
ROUNDS = 9
LAYERS = 4
PAGE_SIZE = 16


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class _Copies:
    """Blocking loads and offloads with fresh operation ids."""

    def __init__(self, engine: CpuEngine) -> None:
        self._engine = engine
        self._op = 0
        self._answered = threading.Event()
        self._ok = True

    def _done(self, op: int, ok: bool) -> None:
        self._ok = ok
        self._answered.set()

    def _wait(self) -> None:
        self._answered.wait()
        if not self._ok:
            raise RuntimeError("a copy failed; its time means nothing")

    def load(self, staging: list[int], device: list[int]) -> None:
        self._op += 1
        self._answered.clear()
        self._engine.load(self._op, staging, device, self._done)
        self._wait()

    def offload(self, device: list[int], staging: list[int]) -> None:
        self._op += 1
        self._answered.clear()
        self._engine.offload(self._op, device, staging, self._done)
        self._wait()


def _measure(page_kib: int) -> dict[str, float]:
    page_bytes = page_kib * 1024
    layout = KVLayout(LAYERS, page_bytes // LAYERS // PAGE_SIZE, PAGE_SIZE)
    count = BYTES // page_bytes
    rng = random.Random(page_kib)
    scattered = rng.sample(range(2 * count), count), rng.sample(range(2 * count), count)
    run = list(range(count))
    source = torch.ones(BYTES, dtype=torch.uint8)
    target = torch.zeros(BYTES, dtype=torch.uint8)
    with CpuEngine(layout, 2 * count, 2 * count) as engine:
        copies = _Copies(engine)
        kinds: dict[str, Callable[[], object]] = {
            "load_scattered": lambda: copies.load(scattered[0], scattered[1]),
            "offload_scattered": lambda: copies.offload(scattered[1], scattered[0]),
            "load_run": lambda: copies.load(run, run),
            "offload_run": lambda: copies.offload(run, run),
        }
        taken: dict[str, list[float]] = {name: [] for name in ("memcpy", *kinds)}
        for round_number in range(ROUNDS + 1):
            times = {"memcpy": _seconds(lambda: target.copy_(source))}
            times |= {name: _seconds(call) for name, call in kinds.items()}
            if round_number:  # the first one warms caches and thread pools
                for name, seconds in times.items():
                    taken[name].append(seconds)
    figures = {f"{name}_{page_kib}kib_gbps": BYTES / statistics.median(taken[name]) / 1e9 for name in taken}
    for name in kinds:
        ratios = [plain / ours for plain, ours in zip(taken["memcpy"], taken[name], strict=True)]
        figures[f"{name}_{page_kib}kib_of_memcpy"] = statistics.median(ratios)
    return figures


def run() -> dict[str, float]:
    """GB/s (decimal) by direction, shape and page size, and each as a share of memcpy."""
    return _measure(4) | _measure(64)


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name:36} {value:8.2f}")
