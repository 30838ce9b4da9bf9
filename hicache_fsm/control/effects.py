"""What the effects named in the request table do. Each is one act on the ledger, a queue or a counter.

An effect never decides: decisions are guards or events. Effects that a state does not need are harmless
there (returning an empty ledger, stopping a clock that stands), so that rows can be read on their own.
"""

from __future__ import annotations

from collections.abc import Callable

from hicache_fsm.components.full import FullComponent
from hicache_fsm.config import CacheConfig
from hicache_fsm.control.agenda import Agenda
from hicache_fsm.control.waiting import WaitingQueue
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.model import Row
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.operations import OperationTable
from hicache_fsm.lifecycle.table import EFFECTS, State
from hicache_fsm.ports import Lookup, Read
from hicache_fsm.prefetch.accounts import HitAccounts
from hicache_fsm.prefetch.parking import ParkedQueue
from hicache_fsm.prefetch.retries import StoragePrefetchRetries

Handler = Callable[[Attempt, Row, int], None]


class RequestEffects:
    """Handlers of the request table's effects, one method each, named as in the table."""

    __slots__ = ("config", "full", "ops", "retries", "accounts", "parked", "agenda", "waiting", "now_ms")

    def __init__(
        self,
        config: CacheConfig,
        full: FullComponent,
        ops: OperationTable,
        retries: StoragePrefetchRetries,
        accounts: HitAccounts,
        parked: ParkedQueue,
        agenda: Agenda,
        waiting: WaitingQueue,
    ) -> None:
        self.config = config
        self.full = full
        self.ops = ops
        self.retries = retries
        self.accounts = accounts
        self.parked = parked
        self.agenda = agenda
        self.waiting = waiting
        self.now_ms = 0

    def handlers(self) -> dict[str, Handler]:
        return {name: getattr(self, name) for name in EFFECTS}

    # ── operations ───────────────────────────────────────────────────────────────────────────────────

    def issue_lookup(self, attempt: Attempt, row: Row, argument: int) -> None:
        if attempt.end_pages:
            return  # the end of the hit is known: the answer is assumed
        usable = max(0, attempt.num_tokens - 1) // self.config.page_size
        op = self.ops.issue(OpKind.LOOKUP)
        op.rid, op.attempt, op.slot = attempt.rid, attempt.number, attempt.slot
        op.keys = attempt.keys[attempt.base_pages : usable]
        attempt.op = op.id
        self.full.outbox.append(Lookup(op.id, attempt.rid, attempt.number, op.keys))

    def issue_read(self, attempt: Attempt, row: Row, argument: int) -> None:
        op = self.ops.issue(OpKind.READ)
        op.rid, op.attempt, op.slot = attempt.rid, attempt.number, attempt.slot
        op.keys = attempt.keys[attempt.base_pages : attempt.end_pages]
        op.rows = attempt.staging
        attempt.op = op.id
        self.full.outbox.append(Read(op.id, attempt.rid, attempt.number, op.keys, op.rows))

    def orphan(self, attempt: Attempt, row: Row, argument: int) -> None:
        op = self.ops.live.get(attempt.op)
        attempt.op = 0
        if op is None or op.kind == OpKind.LOAD:
            return  # a load is its own owner: other requests may rely on the published span
        if op.kind == OpKind.READ:
            op.staging = op.touched
            attempt.staging = attempt.staging[: op.progress]
        self.ops.orphan(op.id)

    # ── retry entries and the deadline's clock ───────────────────────────────────────────────────────

    def disarm(self, attempt: Attempt, row: Row, argument: int) -> None:
        self.retries.cancel(attempt.rid)

    def arm_poll(self, attempt: Attempt, row: Row, argument: int) -> None:
        self.retries.poll_miss(attempt.rid)

    def arm_refetch(self, attempt: Attempt, row: Row, argument: int) -> None:
        self.retries.refetch(attempt.rid, attempt.end_pages)

    def run_clock(self, attempt: Attempt, row: Row, argument: int) -> None:
        if attempt.hard_left_ms < 0:
            requested = attempt.num_tokens - attempt.base_pages * self.config.page_size
            attempt.clock_left_ms = self.config.read_deadline_ms(requested)
            attempt.hard_left_ms = self.config.prefetch_hard_max_ms
        parked = row.target == State.PARKED
        left = attempt.hard_left_ms if parked else min(attempt.clock_left_ms, attempt.hard_left_ms)
        attempt.clock_since_ms = self.now_ms
        self.agenda.set(attempt.slot, self.now_ms + left)

    def hold_clock(self, attempt: Attempt, row: Row, argument: int) -> None:
        if attempt.clock_since_ms >= 0:
            used = self.now_ms - attempt.clock_since_ms
            attempt.hard_left_ms = max(0, attempt.hard_left_ms - used)
            if row.source != State.PARKED:
                attempt.clock_left_ms = max(0, attempt.clock_left_ms - used)
            attempt.clock_since_ms = -1
        self.agenda.drop(attempt.slot)

    def zero_retries(self, attempt: Attempt, row: Row, argument: int) -> None:
        attempt.retries = 0
        attempt.relied_pages = -1

    # ── parked queue and waiting queue ───────────────────────────────────────────────────────────────

    def join_parked(self, attempt: Attempt, row: Row, argument: int) -> None:
        self.parked.join(attempt.slot)

    def leave_parked(self, attempt: Attempt, row: Row, argument: int) -> None:
        self.parked.leave(attempt.slot)

    def leave_queue(self, attempt: Attempt, row: Row, argument: int) -> None:
        self.hold_clock(attempt, row, argument)
        self.retries.cancel(attempt.rid)
        self.full.tree.unwatch(attempt.slot)
        if attempt.slot in self.parked.order:
            self.parked.leave(attempt.slot)
        self.waiting.leave(attempt)

    def count_defer(self, attempt: Attempt, row: Row, argument: int) -> None:
        attempt.defers += 1
        self.accounts.count("defers")

    def count_chance(self, attempt: Attempt, row: Row, argument: int) -> None:
        attempt.chances += 1

    def close_storage(self, attempt: Attempt, row: Row, argument: int) -> None:
        attempt.storage_open = False

    # ── the ledger ───────────────────────────────────────────────────────────────────────────────────

    def keep_landed(self, attempt: Attempt, row: Row, landed: int) -> None:
        rows = attempt.staging
        tail = rows[landed:]
        op = self.ops.live.get(attempt.op)
        attempt.op = 0
        if op is not None:
            op.staging = op.touched
            self.ops.orphan(op.id)
        elif tail:
            self.full.give_read_staging(tail)
        attempt.staging = rows[:landed]
        attempt.end_pages = attempt.base_pages + landed
        lost = len(tail) * self.config.page_size
        attempt.unresolved -= lost
        self.accounts.lose(lost, row.outcome)

    def return_hold(self, attempt: Attempt, row: Row, argument: int) -> None:
        if attempt.staging:
            self.full.give_read_staging(attempt.staging)
            attempt.staging = ()
        if attempt.pin_node:
            self.full.unpin(attempt.pin_node, attempt.pin_tokens)
            attempt.pin_node = attempt.pin_tokens = 0

    def spend_hold(self, attempt: Attempt, row: Row, load_pages: int) -> None:
        """The rows of pages that the device has by now return at once, the others with the load's answer."""
        op = self.ops.live[attempt.op]
        op.staging = op.rows = attempt.staging[-load_pages:]
        attempt.staging = attempt.staging[:-load_pages]
        self.return_hold(attempt, row, load_pages)

    def return_all(self, attempt: Attempt, row: Row, argument: int) -> None:
        self.return_hold(attempt, row, argument)
        if attempt.device:
            self.full.give_device(attempt.device)
            attempt.device = []
        if attempt.lock_node:
            self.full.tree.unlock(attempt.lock_node)
            attempt.lock_node = 0
        for op_id in attempt.load_ops:
            op = self.ops.live.get(op_id)
            if op is not None:
                op.dependents = tuple(slot for slot in op.dependents if slot != attempt.slot)
        attempt.load_ops = ()
        attempt.op = 0
        attempt.outcome = row.outcome

    def settle(self, attempt: Attempt, row: Row, argument: int) -> None:
        self.accounts.lose(attempt.unresolved, row.outcome)
        attempt.unresolved = 0
