"""Live attempts, found by slot or by request id; and what belongs to a request id beyond one attempt."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from hicache_fsm.errors import DuplicateRequest, UnknownRequest
from hicache_fsm.lifecycle.attempt import Attempt


class AttemptTable:
    """At most one live attempt per request id. Slots are small ints and are reused, smallest first."""

    __slots__ = ("live", "by_rid", "numbers", "free_slots", "next_slot", "next_seq", "history_length", "touches")

    def __init__(self, history_length: int) -> None:
        self.live: dict[int, Attempt] = {}
        self.by_rid: dict[str, int] = {}
        self.numbers: dict[str, int] = {}  # last attempt number of each rid that is not forgotten
        self.free_slots: list[int] = []
        self.next_slot = 1
        self.next_seq = 0
        self.history_length = history_length
        self.touches = 0  # attempts looked at by completions, deadlines, retries and watches

    def __len__(self) -> int:
        return len(self.live)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self.live.values())

    def open(self, rid: str, num_tokens: int, seq: int = -1) -> Attempt:
        """A new attempt. `seq` keeps an earlier place in the arrival order.

        Raises `DuplicateRequest` if the id is live.
        """
        if rid in self.by_rid:
            raise DuplicateRequest(f"request {rid!r} is live; finish or abort it before submitting it again")
        if seq < 0:
            seq = self.next_seq
            self.next_seq += 1
        if self.free_slots:
            slot = heapq.heappop(self.free_slots)
        else:
            slot = self.next_slot
            self.next_slot += 1
        number = self.numbers[rid] = self.numbers.get(rid, 0) + 1
        attempt = self.live[slot] = Attempt(slot, rid, number, num_tokens, seq, self.history_length)
        self.by_rid[rid] = slot
        return attempt

    def close(self, attempt: Attempt) -> None:
        """Forget an ended attempt; its number stays until `forget`."""
        del self.live[attempt.slot]
        del self.by_rid[attempt.rid]
        heapq.heappush(self.free_slots, attempt.slot)

    def forget(self, rid: str) -> None:
        """The request has ended for good."""
        self.numbers.pop(rid, None)

    def find(self, rid: str) -> Attempt | None:
        slot = self.by_rid.get(rid)
        return None if slot is None else self.live[slot]

    def get(self, rid: str) -> Attempt:
        """The live attempt of a request; raises `UnknownRequest` if there is none."""
        slot = self.by_rid.get(rid)
        if slot is None:
            raise UnknownRequest(f"request {rid!r} is not live: it was never submitted, or has ended")
        return self.live[slot]
