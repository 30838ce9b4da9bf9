"""`StoragePrefetchRetries`: paces new look-ups. Method names and meaning are SGLang's.

Pacing counts scheduler passes, never time, so that all ranks agree. Two kinds of entry: *paced* (a look-up
missed; ask again some passes later) and *immediate* (a hit is known, only its base moved; ask in the next
pass). Where SGLang differs, see `docs/differences.md`: a paced entry never overwrites an immediate one, and
a pass where nothing is due costs a constant.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple, Protocol


class Entry(NamedTuple):
    immediate: bool
    hit_end: int  # known end of the hit in pages (0: not known)
    due: int  # step at which it is due (-1: clock not started; immediate entries are always due)


class Due(NamedTuple):
    rid: str
    hit_end: int
    exhausted: bool  # the retry cap is used up: not to be issued


class RetryQueue(Protocol):
    """What `pop_ready` needs to know about the waiting queue."""

    def head(self) -> str | None:
        """The request at the head, None if the queue is empty."""
        ...

    def place(self, rid: str) -> tuple[int, int] | None:
        """Sort key of a waiting request, None if it does not wait."""
        ...

    def retries_of(self, rid: str) -> int:
        """Look-ups re-issued so far for this request."""
        ...


class StoragePrefetchRetries:
    """At most one entry per request id. `step` counts passes and is never reset."""

    __slots__ = ("step", "pending", "unstarted", "heap")

    def __init__(self) -> None:
        self.step = 0
        self.pending: dict[str, Entry] = {}
        self.unstarted: dict[str, None] = {}  # armed since the last pass, in arming order
        self.heap: list[tuple[int, str]] = []  # (due, rid); stale ones are dropped when they surface

    def poll_miss(self, rid: str, hit_end: int = 0) -> None:
        """Arm a paced retry. An immediate one that is already armed wins."""
        entry = self.pending.get(rid)
        if entry is None or not entry.immediate:
            self.pending[rid] = Entry(False, hit_end, -1)
            self.unstarted[rid] = None

    def refetch(self, rid: str, hit_end: int = 0) -> None:
        """Arm an immediate retry; replaces a paced one."""
        self.pending[rid] = Entry(True, hit_end, -1)
        self.unstarted[rid] = None

    def cancel(self, rid: str) -> None:
        self.pending.pop(rid, None)
        self.unstarted.pop(rid, None)

    def clear(self) -> None:
        """Forget all entries; the step counter keeps its value."""
        self.pending.clear()
        self.unstarted.clear()
        self.heap.clear()

    def is_paced(self, rid: str) -> bool:
        entry = self.pending.get(rid)
        return entry is not None and not entry.immediate

    def pop_ready(self, queue: RetryQueue, interval: int, max_attempts: int) -> list[Due]:
        """Entries due in this pass, in queue order. Counts a pass on every call.

        A paced entry of the queue head is forgotten (the head is never delayed by a speculative miss); its
        immediate entry is kept. Entries of requests that do not wait keep an unset clock. With
        `interval <= 0` paced entries are forgotten; immediate ones are not affected. A due entry of a
        request with no attempt left is returned as `exhausted`, so that its owner can close storage.
        """
        self.step += 1
        head = queue.head()
        if head is None or not self.pending:
            return []
        if self.is_paced(head):
            self.cancel(head)
        ready = self._start_clocks(queue, interval)
        while self.heap and self.heap[0][0] <= self.step:
            due, rid = heapq.heappop(self.heap)
            entry = self.pending.get(rid)
            if entry is None or entry.due != due or entry.immediate:
                continue
            if queue.place(rid) is None:
                self._rearm(rid, entry)
            else:
                ready.append(rid)
        out = [(queue.place(rid), rid, self.pending.pop(rid)) for rid in ready]
        out.sort()
        return [Due(rid, e.hit_end, queue.retries_of(rid) >= max_attempts) for _, rid, e in out]

    def next_due(self) -> int:
        """Step of the earliest due entry; `step + 1` if a clock has yet to start, -1 if nothing is armed."""
        if self.unstarted:
            return self.step + 1
        while self.heap:
            due, rid = self.heap[0]
            entry = self.pending.get(rid)
            if entry is not None and entry.due == due:
                return due
            heapq.heappop(self.heap)
        return -1

    def _start_clocks(self, queue: RetryQueue, interval: int) -> list[str]:
        """Start the clock of what was armed since the last pass; returns immediate ones, which are due now."""
        ready: list[str] = []
        for rid in list(self.unstarted):
            if queue.place(rid) is None:
                continue  # not in the queue yet: its clock starts when it shows up
            del self.unstarted[rid]
            entry = self.pending[rid]
            if entry.immediate:
                ready.append(rid)
            elif interval <= 0:
                del self.pending[rid]
            else:
                self.pending[rid] = entry._replace(due=self.step + interval)
                heapq.heappush(self.heap, (self.step + interval, rid))
        return ready

    def _rearm(self, rid: str, entry: Entry) -> None:
        self.pending[rid] = entry._replace(due=-1)
        self.unstarted[rid] = None
