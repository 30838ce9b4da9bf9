"""Worker threads for storage calls and hashing: they execute one kind of command and post completions.

    thread      takes            touches                        posts
    hash        Hash             the request's tokens           HashDone
    lookup-n    Lookup           nothing                        LookupDone
    read-n      Read             staging rows of its read       ReadProgress, ReadDone
    store-n     Store            staging rows of its span       StoreDone

Every command is answered exactly once, whatever happens: a `StoreError` is a miss or a failed write of that
one operation; any other exception is a bug, answered in the same way and kept in `failures` so that it
surfaces (`HiCache.raise_failures`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from hicache_fsm.errors import HiCacheError, StoreError
from hicache_fsm.ports import (
    Completion,
    Hash,
    HashDone,
    KVStore,
    Lookup,
    LookupDone,
    Lost,
    PageKey,
    Read,
    ReadDone,
    ReadProgress,
    StagingEngine,
    Store,
    StoreDone,
)

MAX_WRITE_PAGES = 1024
"""Most pages of one write call, so that the first span of a batch is not kept waiting for all of staging."""

log = logging.getLogger("hicache_fsm")
Post = Callable[[Completion], None]
Job = Hash | Lookup | Read | Store


class Workers:
    """Threads that serve one store. `keys_of` computes the page keys that a `Hash` asks for."""

    def __init__(
        self,
        post: Post,
        store: KVStore | None,
        engine: StagingEngine,
        keys_of: Callable[[Hash], tuple[PageKey, ...]],
        *,
        batch_pages: int,
        lookup_threads: int,
        read_threads: int,
        write_threads: int,
    ) -> None:
        self._post = post
        self._store = store
        self._engine = engine
        self._keys_of = keys_of
        self._batch_pages = batch_pages
        self._cancelled: set[int] = set()  # written by the scheduler thread only; workers look between batches
        self.failures: list[BaseException] = []
        self.store_errors = 0
        self._busy: dict[str, Job] = {}  # thread -> the job that it is in; each thread writes its own entry
        self._counts: dict[type[Job], int] = {Hash: 1, Lookup: lookup_threads, Read: read_threads, Store: write_threads}
        self._queues: dict[type[Job], queue.SimpleQueue[Job | None]] = {
            kind: queue.SimpleQueue() for kind in self._counts
        }
        self._threads = [
            threading.Thread(target=self._serve, args=(kind,), name=f"hicache-{kind.__name__.lower()}-{i}", daemon=True)
            for kind, count in self._counts.items()
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        self._queues[type(job)].put(job)

    def cancel(self, op: int) -> None:
        """Its result is not wanted: a queued job is answered at once, a running read stops after its batch."""
        self._cancelled.add(op)

    def forget(self, op: int) -> None:
        """Its answer has been applied."""
        self._cancelled.discard(op)

    def swap_store(self, store: KVStore | None) -> None:
        """Use another store from the next job on; the caller has made sure that none is running."""
        self._store = store

    def close(self, timeout_s: float) -> list[str]:
        """Stop after the queued jobs; names of threads that did not stop in time (stuck in a store call)."""
        for kind, count in self._counts.items():
            for _ in range(count):
                self._queues[kind].put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        return [thread.name for thread in self._threads if thread.is_alive()]

    def busy(self) -> list[str]:
        """Threads that are in a job now, with the operation that they serve."""
        return [f"{name} (operation {job.op})" for name, job in sorted(self._busy.copy().items())]

    def _next(self, jobs: queue.SimpleQueue[Job | None]) -> Job | None:
        name = threading.current_thread().name
        self._busy.pop(name, None)
        job = jobs.get()
        if job is not None:
            self._busy[name] = job
        return job

    def _serve(self, kind: type[Job]) -> None:
        jobs = self._queues[kind]
        while (job := self._next(jobs)) is not None:
            if isinstance(job, Store):
                stop = self._write_all(job)
                if stop:
                    return
                continue
            try:
                completion = self._run(job)
            except Exception as error:  # a worker must outlive every job; bugs surface through `failures`
                completion = self._failed(job, error)
            self._post(completion)

    def _write_all(self, first: Store) -> bool:
        """One store call for all writes that are queued by now, in order, up to a bound: a slow store is then
        paid once a batch. Returns whether the end of the queue was among them."""
        batch, pages, stop = [first], len(first.keys), False
        jobs = self._queues[Store]
        while pages < MAX_WRITE_PAGES:
            try:
                job = jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                stop = True
                break
            assert isinstance(job, Store), f"{job} is not a write"
            batch.append(job)
            pages += len(job.keys)
        try:
            answers = self._write(batch)
        except Exception as error:  # as above
            answers = [self._failed(job, error) for job in batch]
        for answer in answers:
            self._post(answer)
        return stop

    def _failed(self, job: Job, error: Exception) -> Completion:
        if isinstance(error, StoreError):
            self.store_errors += 1
            log.warning("storage: %s for %s failed: %s", type(job).__name__.lower(), job.op, error)
        else:
            self.failures.append(error)
            log.exception("worker: %s %s failed", type(job).__name__, job.op, exc_info=error)
        match job:
            case Lookup(op):
                return LookupDone(op, 0, False)
            case Read(op):
                return ReadDone(op, 0)
            case Store(op):
                return StoreDone(op, 0)
            case Hash(op):
                return Lost(op)

    def _run(self, job: Job) -> Completion:
        match job:
            case Hash(op):
                return HashDone(op, self._keys_of(job))
            case Lookup(op, _, _, keys):
                if op in self._cancelled:
                    return LookupDone(op, 0, False)
                return LookupDone(op, self._open_store().exists(keys), True)
            case Read():
                return ReadDone(job.op, self._read(job))
            case Store():
                raise AssertionError("writes are batched, see _write_all")

    def _open_store(self) -> KVStore:
        if self._store is None:
            raise StoreError("no store is attached; attach one before asking it")
        return self._store

    def _read(self, job: Read) -> int:
        """Read in batches, posting progress, until a page is missing or the read is cancelled."""
        store, done, total = self._open_store(), 0, len(job.keys)
        while done < total and job.op not in self._cancelled:
            end = min(done + self._batch_pages, total)
            try:
                landed = leading_run(
                    store.get(job.keys[done:end], self._engine.staging_views(job.pages[done:end]))
                )
            except HiCacheError as error:
                self.store_errors += 1
                log.warning("storage: read %s stopped after %s pages: %s", job.op, done, error)
                return done
            done += landed
            if done < end:
                return done
            if done < total:
                self._post(ReadProgress(job.op, done))
        return done

    def _write(self, batch: Sequence[Store]) -> list[Completion]:
        keys = [key for job in batch for key in job.keys]
        rows = [page for job in batch for page in job.staging]
        flags = self._open_store().put(keys, self._engine.staging_views(rows))
        answers: list[Completion] = []
        start = 0
        for job in batch:
            end = start + len(job.keys)
            answers.append(StoreDone(job.op, leading_run(flags[start:end])))
            start = end
        return answers


def leading_run(flags: Sequence[bool]) -> int:
    """Number of leading true flags: pages are usable only without a gap."""
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))
