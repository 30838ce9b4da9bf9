"""Worker threads for storage calls and hashing: they execute one kind of command and post completions.

    thread      takes            touches                        posts
    hash        Hash             the request's tokens           HashDone
    lookup-n    Lookup           nothing                        LookupDone
    read-n      Read             staging rows of its read       ReadProgress, ReadDone
    write       Store            staging rows of its span       StoreDone

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
    ) -> None:
        self._post = post
        self._store = store
        self._engine = engine
        self._keys_of = keys_of
        self._batch_pages = batch_pages
        self._cancelled: set[int] = set()  # written by the scheduler thread only; workers look between batches
        self.failures: list[BaseException] = []
        self.store_errors = 0
        self._counts: dict[type[Job], int] = {Hash: 1, Lookup: lookup_threads, Read: read_threads, Store: 1}
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

    def _serve(self, kind: type[Job]) -> None:
        jobs = self._queues[kind]
        while (job := jobs.get()) is not None:
            try:
                completion = self._run(job)
            except Exception as error:  # a worker must outlive every job; bugs surface through `failures`
                completion = self._failed(job, error)
            self._post(completion)

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
            case Store(op, _, keys, pages):
                return StoreDone(op, self._write(keys, pages))

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

    def _write(self, keys: Sequence[PageKey], pages: Sequence[int]) -> int:
        return leading_run(self._open_store().put(keys, self._engine.staging_views(pages)))


def leading_run(flags: Sequence[bool]) -> int:
    """Number of leading true flags: pages are usable only without a gap."""
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))
