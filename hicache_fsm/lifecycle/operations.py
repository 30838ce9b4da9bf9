"""Outstanding operations: the records, and the table of those not answered yet.

An operation's ledger is `staging` and `device` (pages it owns: quarantine) and `lock_node` (tree path it keeps
from eviction). `rows` are the staging pages it may touch, owned by it or by its attempt or span, and
`touched` says which still; `device_rows` are the device pages it may touch, owned by the tree under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from hicache_fsm.lifecycle.machine import Machine, Step
from hicache_fsm.lifecycle.model import Row
from hicache_fsm.lifecycle.operation_table import OPERATION_TABLE, OpEvent, OpKind, OpState
from hicache_fsm.ports import PageKey


class Operation:
    """One asynchronous operation, from its command to its answer."""

    __slots__ = (
        "id", "kind", "state", "history", "rid", "attempt", "slot", "span", "keys",
        "epoch", "rows", "device_rows", "progress", "staging", "device", "lock_node", "unresolved", "dependents",
    )  # fmt: skip

    def __init__(self, op: int, kind: OpKind, epoch: int) -> None:
        self.id = op
        self.epoch = epoch  # of the tree; answers to an older one teach nothing
        self.kind: int = kind
        self.state: int = OpState.ISSUED
        self.history: deque[Step] = deque(maxlen=8)  # an operation has at most five transitions
        self.rid = ""
        self.attempt = 0
        self.slot = -1  # attempt that it works for (-1: none)
        self.span = 0  # write span that it works for (0: none)
        self.keys: tuple[PageKey, ...] = ()
        self.rows: tuple[int, ...] = ()
        self.device_rows: tuple[int, ...] = ()
        self.progress = 0  # leading rows that are not touched any more
        self.staging: tuple[int, ...] = ()
        self.device: tuple[int, ...] = ()
        self.lock_node = 0
        self.unresolved = 0  # found tokens that a load will splice
        self.dependents: tuple[int, ...] = ()  # slots of attempts that read rows of this load

    def describe(self) -> str:
        return f"operation {self.id} ({OpKind(self.kind).name.lower()} for {self.rid or f'span {self.span}'!r})"

    @property
    def touched(self) -> tuple[int, ...]:
        """Staging rows that this operation may still read or write."""
        return self.rows[self.progress :]


class OperationTable:
    """All operations that have not been answered. `return_rows` gives an ended operation's ledger back, and
    `cancel` tells the shell; both are the control plane's."""

    __slots__ = ("live", "machine", "last_id", "epoch", "stale")

    def __init__(
        self, return_rows: Callable[[Operation, Row, int], None], cancel: Callable[[Operation, Row, int], None]
    ) -> None:
        self.live: dict[int, Operation] = {}
        self.machine: Machine[Operation] = Machine(
            OPERATION_TABLE, {}, {"return_rows": return_rows, "cancel": cancel}
        )
        self.last_id = 0
        self.epoch = 0  # one more with each flush
        self.stale = 0  # completions whose operation was unknown or answered already

    def issue(self, kind: OpKind) -> Operation:
        self.last_id += 1
        op = self.live[self.last_id] = Operation(self.last_id, kind, self.epoch)
        return op

    def get(self, op_id: int) -> Operation | None:
        """The operation, or None (counted as stale) if it is unknown or was answered before."""
        op = self.live.get(op_id)
        if op is None:
            self.stale += 1
        return op

    def take(self, op_id: int) -> None:
        op = self.live.get(op_id)
        if op is not None:
            self.machine.fire(op, OpEvent.TAKE)

    def end(self, op: Operation, *, lost: bool = False) -> None:
        """The final completion: everything that the operation owns returns, and it is forgotten."""
        self.machine.fire(op, OpEvent.LOSE if lost else OpEvent.ACK)
        del self.live[op.id]

    def orphan(self, op_id: int) -> None:
        op = self.live.get(op_id)
        if op is not None:
            op.slot = -1
            self.machine.fire(op, OpEvent.ORPHAN)

    def of_kind(self, kind: OpKind) -> Iterator[Operation]:
        return (op for op in self.live.values() if op.kind == kind)
