"""Replays a workload through the whole product with real bytes, and proves each of them.

Control plane, storage and staging are the real ones; only the model is made up (`replay.model`). Time is
virtual: a pass takes `pass_ms`, a pass that can launch nothing takes as long as it really waits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from hicache_fsm.admission.budget import BudgetLimits
from hicache_fsm.config import CacheConfig
from hicache_fsm.control.parts import Observer
from hicache_fsm.control.plane import ControlPlane
from hicache_fsm.errors import ConfigError, StoreError
from hicache_fsm.observe.summary import ReplayResult
from hicache_fsm.observe.transitions import StateWaits, TransitionLog, both
from hicache_fsm.ports import KVStore
from hicache_fsm.replay.model import ReplayModel
from hicache_fsm.replay.options import ReplayOptions
from hicache_fsm.replay.planted import plant
from hicache_fsm.replay.result import collect
from hicache_fsm.replay.workload import TraceRequest, chat_workload, read_trace
from hicache_fsm.runtime.hicache import HiCache
from hicache_fsm.scheduler.reference import ReferenceScheduler
from hicache_fsm.scheduler.requests import Request
from hicache_fsm.storage.file_store import FileStore
from hicache_fsm.testing.faulty_store import NO_FAULTS, FaultyStore
from hicache_fsm.tree.keys import Fingerprint
from hicache_gpu.cpu_engine import CpuEngine
from hicache_gpu.layout import KVLayout

Progress = Callable[[int, int], None]
"""Called now and then with (requests ended, requests in all)."""
IDLE_WAIT_S = 0.01
"""Longest sleep of a pass that could launch nothing; an agreed chance comes as often."""
WRITE_BACKLOG_PART = 8
"""Prefill holds back while an eighth of the device pool waits to be written: the made-up model computes faster than
any real one."""
DISK_RESERVE = 1.1
"""Segment headers and index beside the pages themselves."""


class VirtualClock:
    """Milliseconds that pass with scheduler passes."""

    def __init__(self) -> None:
        self.now_ms = 0

    def __call__(self) -> int:
        return self.now_ms


def load_workload(options: ReplayOptions) -> list[TraceRequest]:
    """Raises `TraceError` if the trace cannot be replayed."""
    if options.trace is not None:
        return read_trace(options.trace, options.limit)
    return chat_workload(options.requests, options.seed)[: options.limit]


def cache_config(options: ReplayOptions, workload: list[TraceRequest]) -> CacheConfig:
    page = options.page_size
    longest = max(r.input_length + r.output_length for r in workload)
    context = options.max_context_tokens or min(longest, options.pools.device_tokens)
    return CacheConfig(
        page_size=page,
        device_pages=options.pools.device_tokens // page,
        staging_pages=options.pools.staging_tokens // page,
        max_context_tokens=context,
        prefetch_policy=options.policy,
        retry_max_attempts=options.retry_max_attempts,
        retry_poll_interval_passes=options.poll_interval,
        max_defers=options.max_defers,
        park_cap=options.park_cap,
        anchor_lock_cap=options.pin_cap,
        poison=True,
        debug=options.debug,
    )


def replay(
    options: ReplayOptions,
    workload: list[TraceRequest],
    *,
    progress: Progress | None = None,
    log: IO[str] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> ReplayResult:
    """Run the workload to its end. `stop` is asked between passes, and ends it early: what lives is aborted,
    everything is given back, and the result says `interrupted`.

    Raises `ConfigError`, `StoreError` or `StagingError` if the parts cannot be set up.
    """
    config = cache_config(options, workload)
    layout = KVLayout(options.num_layers, options.bytes_per_token // options.num_layers, options.page_size)
    waits = StateWaits()
    observers: list[Observer] = [waits] if log is None else [waits, TransitionLog(log)]
    clock = VirtualClock()
    with _open_store(options, layout, workload) as store:
        planted = plant(options.planted)
        _check_memory(config, layout)
        engine = CpuEngine(layout, config.staging_pages, config.device_pages, faults=planted.copies)
        plane = ControlPlane(config, both(observers), planted.effects)
        cache = HiCache(
            config, engine=engine, store=store, clock=clock, plane=plane,
            lookup_threads=options.lookup_threads, read_threads=options.read_threads,
            write_threads=options.write_threads,
        )  # fmt: skip
        layers = [engine.device.layer_rows(layer) for layer in range(layout.num_layers)]
        model = ReplayModel(layers, options.page_size, cache.layer_ready, plane.page_table)
        limits = BudgetLimits(
            options.max_prefill_tokens, options.chunked_prefill_size, options.max_running_requests,
            max_write_backlog_pages=config.device_pages // WRITE_BACKLOG_PART,
        )  # fmt: skip
        run = _Run(options, workload, cache, ReferenceScheduler(cache, model, limits), model, clock, progress)
        interrupted = run.to_the_end(stop)
        cache.drain()
        result = collect(
            options, workload, cache, run.scheduler, model, waits, store, run.seconds, interrupted, run.rejections
        )
        cache.close()
        engine.close()
        return result


class _Run:
    """The loop: arrivals, passes, ends."""

    def __init__(
        self,
        options: ReplayOptions,
        workload: list[TraceRequest],
        cache: HiCache,
        scheduler: ReferenceScheduler,
        model: ReplayModel,
        clock: VirtualClock,
        progress: Progress | None,
    ) -> None:
        self.options = options
        self.workload = workload
        self.cache = cache
        self.scheduler = scheduler
        self.model = model
        self.clock = clock
        self.progress = progress
        self.next = 0
        self.ended = 0
        self.seconds = 0.0
        self.rejections: list[str] = []

    def to_the_end(self, stop: Callable[[], bool]) -> bool:
        """Run until every request has ended; whether it was interrupted."""
        started = time.perf_counter()
        interrupted = False
        while self.next < len(self.workload) or self.scheduler.has_work():
            if stop():
                interrupted = True
                self._abort_all()
                break
            self._arrivals()
            self._pass()
        self.seconds = time.perf_counter() - started
        return interrupted

    def _abort_all(self) -> None:
        for rid in list(self.scheduler.requests):
            self.scheduler.abort(rid)
        self._ends()

    def _arrivals(self) -> None:
        """Submit what has arrived, in trace order, as long as fewer than `concurrency` wait or run."""
        live = self.scheduler.requests
        while self.next < len(self.workload) and len(live) < self.options.concurrency:
            request = self.workload[self.next]
            if self.options.speed:
                due_ms = int(request.timestamp_ms / self.options.speed)
                if due_ms > self.clock.now_ms:
                    if live:
                        return
                    self.clock.now_ms = due_ms  # nobody waits or runs: nothing happens until then
            rid = f"r{self.next}"
            tokens = cast("Sequence[int]", request.tokens())  # an array is one in all that we use of it
            self.scheduler.submit(Request(rid, tokens, request.output_length))
            self.next += 1

    def _pass(self) -> None:
        launched = self.scheduler.step()
        self.clock.now_ms += self.options.pass_ms
        if not launched:
            began = time.perf_counter()
            self.cache.wait(IDLE_WAIT_S)
            self.clock.now_ms += int(1000 * (time.perf_counter() - began))
        self._ends()

    def _ends(self) -> None:
        ended = self.scheduler.take_ended()
        for request in ended:
            self.model.forget(request.rid)
            if request.reason:
                self.rejections.append(f"{request.rid}: {request.reason}")
        self.ended += len(ended)
        if ended and self.progress is not None:
            self.progress(self.ended, len(self.workload))


class _KillAfter:
    """Kills a store when it has served so many calls."""

    def __init__(self, store: FaultyStore, calls: int) -> None:
        self._store = store
        self._left = itertools.count(calls, -1)  # `next` is atomic

    def __call__(self, op: str) -> None:
        if next(self._left) <= 0:
            self._store.kill()


@contextlib.contextmanager
def _open_store(
    options: ReplayOptions, layout: KVLayout, workload: list[TraceRequest]
) -> Iterator[KVStore]:
    """The file store, behind injected faults if there are any; a temporary folder is removed at the end."""
    with contextlib.ExitStack() as stack:
        folder = options.store
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-replay-")))
        else:
            _make_folder(folder)
        _check_space(folder, options, workload)
        fingerprint = Fingerprint(
            model="replay", dtype="u8", layout="page_first", heads=f"layers{layout.num_layers}",
            page_size=layout.page_size, layout_version=1, weight_version="1",
        )  # fmt: skip
        store: KVStore = FileStore(folder, layout.page_bytes, fingerprint.digest(), options.store_bytes)
        stack.callback(store.close)
        if options.faults != NO_FAULTS or options.kill_store_after is not None:
            faulty = FaultyStore(store, options.seed, options.faults)
            if options.kill_store_after is not None:
                faulty.gate = _KillAfter(faulty, options.kill_store_after)
            store = faulty
        yield store


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise StoreError(f"cannot use {folder} as a store: {reason}; give --store another folder") from error


def _check_space(folder: Path, options: ReplayOptions, workload: list[TraceRequest]) -> None:
    """Refuse to start what the disk cannot hold: every prompt and output page could be written once."""
    blocks = {block for request in workload for block in request.hash_ids}
    outputs = sum(request.output_length for request in workload)
    need = int((len(blocks) * 512 + outputs) * options.bytes_per_token * DISK_RESERVE)
    if options.store_bytes is not None:
        need = min(need, options.store_bytes)
    used = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    free = shutil.disk_usage(folder).free
    if free < need - used:
        raise ConfigError(
            f"{folder} has {free >> 20} MiB free, the replay may write {need - used >> 20} MiB; "
            "use --store with another folder, --store-bytes, --limit or fewer --bytes-per-token"
        )


def _check_memory(config: CacheConfig, layout: KVLayout) -> None:
    """Refuse pools that this machine cannot hold, before it begins to swap or kills us."""
    need = (config.device_pages + config.staging_pages) * layout.page_bytes
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > have:
        raise ConfigError(
            f"the pools need {need >> 20} MiB, this machine has {have >> 20} MiB of memory; "
            "use fewer --device-tokens, --staging-tokens or --bytes-per-token"
        )
