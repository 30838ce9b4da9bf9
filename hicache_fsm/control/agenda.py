"""What is due at an agreed time: deadlines of storage waits. A heap with lazy deletion."""

from __future__ import annotations

import heapq


class Agenda:
    """At most one deadline per slot. Stale heap entries are dropped when they surface."""

    __slots__ = ("due", "heap")

    def __init__(self) -> None:
        self.due: dict[int, int] = {}  # slot -> time in ms
        self.heap: list[tuple[int, int]] = []

    def set(self, slot: int, at_ms: int) -> None:
        self.due[slot] = at_ms
        heapq.heappush(self.heap, (at_ms, slot))

    def drop(self, slot: int) -> None:
        self.due.pop(slot, None)

    def pop_due(self, now_ms: int) -> list[int]:
        """Slots whose time has come, earliest first."""
        out: list[int] = []
        while self.heap and self.heap[0][0] <= now_ms:
            at_ms, slot = heapq.heappop(self.heap)
            if self.due.get(slot) == at_ms:
                del self.due[slot]
                out.append(slot)
        return out

    def next_ms(self) -> int | None:
        """Time of the earliest deadline, None if there is none."""
        while self.heap:
            at_ms, slot = self.heap[0]
            if self.due.get(slot) == at_ms:
                return at_ms
            heapq.heappop(self.heap)
        return None
