"""The waiting queue: who waits, in which order, and who could be admitted now.

Order is (priority, arrival). The *ready* list holds those whose state is a candidate for admission; it is
kept sorted as states change, so that a pass touches only requests that it can do something with.
"""

from __future__ import annotations

import bisect

from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.attempts import AttemptTable

Place = tuple[int, int, int]
"""(priority, arrival, slot)"""


class WaitingQueue:
    """Sorted places of waiting and of ready attempts. Implements `prefetch.retries.RetryQueue`."""

    __slots__ = ("attempts", "waiting", "ready")

    def __init__(self, attempts: AttemptTable) -> None:
        self.attempts = attempts
        self.waiting: list[Place] = []
        self.ready: list[Place] = []

    def __len__(self) -> int:
        return len(self.waiting)

    @staticmethod
    def place_of(attempt: Attempt) -> Place:
        return (attempt.priority, attempt.seq, attempt.slot)

    def join(self, attempt: Attempt) -> None:
        bisect.insort(self.waiting, self.place_of(attempt))

    def leave(self, attempt: Attempt) -> None:
        self.set_ready(attempt, False)
        self._remove(self.waiting, self.place_of(attempt))

    def set_ready(self, attempt: Attempt, ready: bool) -> None:
        place = self.place_of(attempt)
        at = bisect.bisect_left(self.ready, place)
        listed = at < len(self.ready) and self.ready[at] == place
        if ready and not listed:
            self.ready.insert(at, place)
        elif listed and not ready:
            del self.ready[at]

    def next_ready(self, after: Place | None) -> Place | None:
        """The first ready place beyond `after`; the list may change between calls."""
        at = 0 if after is None else bisect.bisect_right(self.ready, after)
        return self.ready[at] if at < len(self.ready) else None

    def head(self) -> str | None:
        return self.attempts.live[self.waiting[0][2]].rid if self.waiting else None

    def place(self, rid: str) -> tuple[int, int] | None:
        attempt = self.attempts.find(rid)
        if attempt is None:
            return None
        place = self.place_of(attempt)
        at = bisect.bisect_left(self.waiting, place)
        return place[:2] if at < len(self.waiting) and self.waiting[at] == place else None

    def retries_of(self, rid: str) -> int:
        return self.attempts.get(rid).retries

    @staticmethod
    def _remove(places: list[Place], place: Place) -> None:
        at = bisect.bisect_left(places, place)
        assert at < len(places) and places[at] == place, f"{place} does not wait"
        del places[at]
