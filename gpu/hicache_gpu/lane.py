"""The queue of one direction and the operations in it. Guarded by the engine's lock; runs no copies itself."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

from hicache_gpu.copy_plan import CopyPlan, Mover
from hicache_gpu.faults import CopyFaults
from hicache_gpu.interface import Direction


class State(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"  # touches no row any more


class Ticket:
    """One load or offload on its way."""

    __slots__ = (
        "after",
        "after_forward",
        "answered",
        "device",
        "direction",
        "done",
        "layers_done",
        "nth",
        "ok",
        "op",
        "plan",
        "staging",
        "state",
        "swapped",
    )

    def __init__(
        self,
        op: int,
        direction: Direction,
        plan: CopyPlan,
        staging: frozenset[int],
        device: frozenset[int],
        done: Callable[[int, bool], None],
    ) -> None:
        self.op = op
        self.direction = direction
        self.plan = plan
        # Kept apart, because staging page 0 and device page 0 are different places.
        self.staging = staging
        self.device = device
        self.done = done
        self.nth = -1  # number within its direction, given when it is queued
        self.after: list[Ticket] = []  # unfinished copies of the other direction that must end first
        self.after_forward = 0  # the last forward that had begun when this was queued
        self.state = State.QUEUED
        self.ok = False
        self.layers_done = 0  # leading layers that a load has written
        self.answered = False
        self.swapped = False

    def shares_page(self, other: Ticket) -> bool:
        return not (self.staging.isdisjoint(other.staging) and self.device.isdisjoint(other.device))

    def end(self, ok: bool) -> None:
        assert self.state is not State.ENDED, (self.op, self.state)
        self.state, self.ok = State.ENDED, ok


class Lane:
    """Operations of one direction, first in, first out: the counterpart of a stream."""

    __slots__ = ("direction", "max_burst", "mover", "queue", "submitted", "unfinished")

    def __init__(self, direction: Direction, mover: Mover, max_burst: int) -> None:
        self.direction = direction
        self.mover = mover
        self.max_burst = max_burst
        self.queue: deque[Ticket] = deque()
        self.unfinished: dict[int, Ticket] = {}  # queued or running, by operation
        self.submitted = 0

    def enqueue(self, ticket: Ticket) -> None:
        ticket.nth = self.submitted
        self.submitted += 1
        self.queue.append(ticket)
        self.unfinished[ticket.op] = ticket

    def take_burst(self, startable: Callable[[Ticket], bool]) -> list[Ticket]:
        """The leading operations that may start, at most `max_burst`; they run from now on."""
        burst: list[Ticket] = []
        while self.queue and len(burst) < self.max_burst and startable(self.queue[0]):
            ticket = self.queue.popleft()
            ticket.state = State.RUNNING
            ticket.after.clear()  # an ended chain of operations must not be kept alive by its last one
            burst.append(ticket)
        return burst

    def take_all(self) -> list[Ticket]:
        tickets = list(self.queue)
        self.queue.clear()
        return tickets

    def reorder(self, faults: CopyFaults, startable: Callable[[Ticket], bool]) -> None:
        """Let the second operation pass the first if the faults say so, at most once for each first.

        Only a startable one that shares no page: another order of those would be a broken contract.
        """
        if len(self.queue) < 2 or not faults.reorder_probability:
            return
        first, second = self.queue[0], self.queue[1]
        if first.swapped or first.shares_page(second) or not startable(second):
            return
        first.swapped = True
        if faults.swaps(self.direction, first.nth):
            self.queue[0], self.queue[1] = second, first
