"""`WriteSpan`: the record of a run of computed pages on its way device -> staging -> store."""

from __future__ import annotations

from collections import deque

from hicache_fsm.lifecycle.machine import Step
from hicache_fsm.lifecycle.span_table import SPAN_TABLE, SpanState
from hicache_fsm.ports import PageKey


class WriteSpan:
    """A run of page keys, leading page first. Its ledger is `staging` and `lock_node`."""

    __slots__ = ("id", "state", "history", "parent", "keys", "deps", "epoch", "op", "staging", "lock_node", "outcome")

    def __init__(
        self, span: int, parent: PageKey, keys: tuple[PageKey, ...], deps: tuple[int, ...], epoch: int
    ) -> None:
        self.id = span
        self.state: int = SpanState.QUEUED
        self.history: deque[Step] = deque(maxlen=8)  # a span has at most four transitions
        self.parent = parent  # key of the page before the first one, empty at the root
        self.keys = keys
        self.deps = deps  # loads that the bytes depend on; nothing is written before they have landed
        self.epoch = epoch
        self.op = 0
        self.staging: tuple[int, ...] = ()
        self.lock_node = 0
        self.outcome = ""

    def describe(self) -> str:
        return f"write span {self.id}"

    def check_ownership(self) -> None:
        """Assert that the ledger holds exactly what the state may own."""
        state = SPAN_TABLE.states[self.state]
        owned = {name for name, held in (("staging", self.staging), ("lock", self.lock_node)) if held}
        assert state.owns <= owned <= state.owns | state.may_own, (
            f"{self.describe()} is {state.label} and owns {sorted(owned)}; must own {sorted(state.owns)}"
        )
