"""`HiCache`: the shell. Threads, an inbox and executors around a `ControlPlane`; it holds no decisions.

    scheduler thread          every method of this class; the only one that touches the plane
    worker threads            storage and hashing (`runtime.workers`)
    engine threads            copies (`hicache_gpu`)

Workers and engine post completions to the inbox; `tick` applies them. The scheduler thread never waits for
IO, except in the calls that say so (`wait`, `wait_for_loads`, `drain`, `close`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from hicache_fsm.config import CacheConfig
from hicache_fsm.control.parts import Observer
from hicache_fsm.control.plane import Candidate, ControlPlane
from hicache_fsm.errors import ConfigError, HiCacheError, StagingError
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.ports import (
    DEFAULT_NAMESPACE,
    Cancel,
    Command,
    Completion,
    Hash,
    KVStore,
    Load,
    LoadDone,
    Lost,
    Namespace,
    Offload,
    OffloadDone,
    PageKey,
    Release,
    StagingEngine,
)
from hicache_fsm.runtime.workers import Workers
from hicache_fsm.tree.keys import page_keys

Clock = Callable[[], int]


def monotonic_ms() -> int:
    """The default clock. Ranks that must agree pass one that they have agreed on."""
    return time.monotonic_ns() // 1_000_000


class HiCache:
    """A storage-backed KV cache for one scheduler. Raises `ConfigError` if the parts do not fit together."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        engine: StagingEngine,
        store: KVStore | None = None,
        clock: Clock = monotonic_ms,
        observer: Observer | None = None,
        plane: ControlPlane | None = None,
        lookup_threads: int = 2,
        read_threads: int = 4,
        write_threads: int = 2,
        drain_timeout_s: float = 30.0,
    ) -> None:
        if min(lookup_threads, read_threads, write_threads) < 1:
            raise ConfigError("lookup_threads, read_threads and write_threads must be at least 1")
        self.config = config
        self.engine = engine
        self._plane = ControlPlane(config, observer) if plane is None else plane
        self._clock = clock
        self._start_ms = clock()
        self._drain_timeout_s = drain_timeout_s
        self._inbox: deque[Completion] = deque()
        self._news = threading.Event()
        self._prompts: dict[str, tuple[Sequence[int], Namespace]] = {}  # until the keys are known to the plane
        self._hashing: dict[int, tuple[Sequence[int], Namespace]] = {}  # operation -> its prompt
        self._closed = False
        self._workers = Workers(
            self._post, store, engine, self._keys_of,
            batch_pages=config.io_batch_pages, lookup_threads=lookup_threads, read_threads=read_threads,
            write_threads=write_threads,
        )  # fmt: skip
        if store is None:
            self._plane.detach()

    @property
    def plane(self) -> ControlPlane:
        return self._plane

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, rid: str, tokens: Sequence[int], *, namespace: Namespace = DEFAULT_NAMESPACE, priority: int = 0
    ) -> Attempt:
        """Queue a request; its page keys are computed on a worker thread, then storage is asked.

        Raises `DuplicateRequest` if the id is live, `ValueError` on an empty prompt.
        """
        attempt = self._plane.submit(rid, len(tokens), priority=priority)
        self._prompts[rid] = (tokens, namespace)
        self._execute()  # finds the prompt for the hash command
        return attempt

    def abort(self, rid: str) -> bool:
        """End a request wherever it is; False if it is not live."""
        self._prompts.pop(rid, None)
        return self._plane.abort(rid)

    def finish(self, rid: str, num_tokens: int = 0, keys: tuple[PageKey, ...] = ()) -> bool:
        """A running request is complete; see `ControlPlane.finish`. False if it is not live."""
        return self._plane.finish(rid, num_tokens, keys)

    def retract(
        self, rid: str, tokens: Sequence[int], *, namespace: Namespace = DEFAULT_NAMESPACE
    ) -> Attempt:
        """Take a request back to the queue as a new attempt of `tokens` (prompt and output so far); its keys
        are computed on a worker thread again. Raises `UnknownRequest` if it is not live."""
        attempt = self._plane.retract(rid, len(tokens))
        self._prompts[rid] = (tokens, namespace)
        self._execute()
        return attempt

    def admissible(self) -> Iterator[Candidate]:
        """Requests that could be admitted now, in queue order. Each is looked at when it is reached, so that
        admitting one may change what the next can get."""
        place = None
        while (found := self._plane.next_candidate(place)) is not None:
            place, candidate = found
            if candidate is not None:
                yield candidate

    def explain(self, rid: str) -> str:
        """Where a request is and why. Raises `UnknownRequest` if it is not live."""
        return self._plane.explain(rid)

    # ── the pass ─────────────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """The safe point, once per pass: apply what has come in, execute what follows from it."""
        self.raise_failures()
        inbox = []
        self._news.clear()
        while self._inbox:
            inbox.append(self._inbox.popleft())
        self._plane.tick(inbox, self._clock() - self._start_ms)
        for completion in inbox:
            self._workers.forget(completion.op)
            self._hashing.pop(completion.op, None)
        self._forget_prompts()
        self._execute()
        if self._plane.parts.ops.live:
            time.sleep(0)  # let go of the interpreter lock: a spinning scheduler would starve its workers

    def launch(self) -> None:
        """The batch is closed: send the loads that its admissions have caused."""
        self._execute()

    def layer_ready(self, ops: Sequence[int], layer: int) -> None:
        """Wait until these loads have written this layer. Raises `LoadFailed` if one has failed."""
        for op in ops:
            self.engine.layer_ready(op, layer)

    def wait(self, timeout_s: float) -> None:
        """Sleep until something comes in, or the time is over: for passes that could launch nothing."""
        self._news.wait(timeout_s)

    def wait_for_loads(self, ops: Sequence[int]) -> None:
        """Tick until these loads are answered. Raises `StagingError` if that takes longer than draining may."""
        self._tick_until(lambda: not any(op in self._plane.parts.ops.live for op in ops), f"loads {tuple(ops)}")

    # ── storage as a whole ───────────────────────────────────────────────────────────────────────────

    def drain(self) -> None:
        """Tick until nothing is outstanding and all queued writes have been answered.

        Raises `HiCacheError` if that takes longer than `drain_timeout_s` without any answer coming in.
        """
        backup = self._plane.parts.backup
        self._tick_until(
            lambda: not (self._plane.parts.ops.live or backup.queue or backup.live), "outstanding operations"
        )

    def flush(self) -> None:
        """Drop tree and beliefs; the store keeps its pages; live requests go on as new attempts."""
        self._plane.flush()
        self._execute()

    def detach(self) -> None:
        """Close storage: waiting requests go on without it. Returns when no storage call is running."""
        self._plane.detach()
        self._execute()
        self.drain()
        self._workers.swap_store(None)

    def attach(self, store: KVStore) -> None:
        """Use a store from now on. Raises `HiCacheError` while another one is attached."""
        if self._plane.parts.storage_on:
            raise HiCacheError("a store is attached; detach it before attaching another")
        self._workers.swap_store(store)
        self._plane.attach()

    def close(self) -> None:
        """Abort what lives, wait for what runs, stop the threads. A second call is a no-op.

        Raises `HiCacheError` if a thread is stuck; the engine is then left open, as its rows are in use.
        """
        if self._closed:
            return
        for attempt in list(self._plane.parts.attempts):
            self.abort(attempt.rid)
        self._plane.detach()
        self._execute()
        self.drain()
        self._closed = True
        stuck = self._workers.close(self._drain_timeout_s)
        if stuck:
            raise HiCacheError(f"threads {stuck} did not stop within {self._drain_timeout_s} s")
        self.raise_failures()

    def raise_failures(self) -> None:
        """Raise what broke in a worker other than storage errors: such a thing is a bug."""
        if self._workers.failures:
            failures, self._workers.failures = self._workers.failures, []
            raise HiCacheError(f"{len(failures)} worker failures, the first: {failures[0]!r}") from failures[0]

    @property
    def store_errors(self) -> int:
        """Storage calls that failed so far; each cost one operation its result."""
        return self._workers.store_errors

    # ── executing commands ───────────────────────────────────────────────────────────────────────────

    def _execute(self) -> None:
        for command in self._plane.take_commands():
            self._run(command)

    def _run(self, command: Command) -> None:
        match command:
            case Release(pool, pages):
                self.engine.poison(pool, pages)
            case Cancel(op):
                if op in self._plane.parts.ops.live:  # its answer may have come in since
                    self._workers.cancel(op)
            case Hash(op, rid):
                prompt = self._prompts.get(rid)
                if prompt is None:  # the request ended before this command was taken
                    self._post(Lost(op))
                    return
                self._hashing[op] = prompt
                self._workers.submit(command)
            case Load(op, _, _, staging, device):
                self._copy(self.engine.load, op, staging, device, LoadDone)
            case Offload(op, _, device, staging):
                self._copy(self.engine.offload, op, device, staging, OffloadDone)
            case _:
                self._workers.submit(command)

    def _copy(
        self,
        start: Callable[[int, Sequence[int], Sequence[int], Callable[[int, bool], None]], None],
        op: int,
        source: Sequence[int],
        target: Sequence[int],
        answer: Callable[[int, bool], Completion],
    ) -> None:
        try:
            start(op, source, target, lambda done, ok: self._post(answer(done, ok)))
        except StagingError:
            # Refused in our thread, nothing was queued: the operation has failed and is answered like one.
            self._post(answer(op, False))

    def _post(self, completion: Completion) -> None:
        self._inbox.append(completion)
        self._news.set()

    def _keys_of(self, job: Hash) -> tuple[PageKey, ...]:
        """Runs on the hash thread; reads an entry that was written before the job was queued."""
        tokens, namespace = self._hashing[job.op]
        return page_keys(tokens, self.config.page_size, namespace)

    def _forget_prompts(self) -> None:
        """Tokens are kept only until the plane knows the keys, or the request has ended."""
        attempts = self._plane.parts.attempts
        for rid in list(self._prompts):
            attempt = attempts.find(rid)
            if attempt is None or attempt.keys_known:
                del self._prompts[rid]

    def _tick_until(self, done: Callable[[], bool], what: str) -> None:
        """Tick until `done`, as long as answers keep coming in."""
        last = time.monotonic()
        while not done():
            if self._inbox:
                last = time.monotonic()
            elif time.monotonic() - last > self._drain_timeout_s:
                busy = ", ".join(self._workers.busy()) or "no worker thread"
                raise HiCacheError(f"{what}: no answer for {self._drain_timeout_s} s; stuck in a call: {busy}")
            self.tick()
            if not self._inbox and not done():
                self.wait(0.01)
