"""The parts of a control plane and how they are wired. Everything here is deterministic and flat.

    waiting ─ retries ─ agenda       who waits, what is due
    attempts ─ machine ─ effects     the request table at work
    prefetch ─ parked ─ accounts     the load path
    backup ─ beliefs                 the write path
    ops                              what is outstanding
    full                             device pages, staging, tree, pins, outbox
"""

from __future__ import annotations

from collections.abc import Callable

from hicache_fsm.backup.beliefs import StorageExistenceCache
from hicache_fsm.backup.pipeline import BackupPipeline
from hicache_fsm.components.full import FullComponent
from hicache_fsm.config import CacheConfig, PrefetchPolicy
from hicache_fsm.control.agenda import Agenda
from hicache_fsm.control.effects import RequestEffects
from hicache_fsm.control.waiting import WaitingQueue
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.attempts import AttemptTable
from hicache_fsm.lifecycle.machine import Machine
from hicache_fsm.lifecycle.model import Row
from hicache_fsm.lifecycle.operations import Operation, OperationTable
from hicache_fsm.lifecycle.table import CANDIDATES, REQUEST_TABLE, TIMED, State
from hicache_fsm.ports import Cancel
from hicache_fsm.prefetch.accounts import HitAccounts
from hicache_fsm.prefetch.parking import ParkedQueue
from hicache_fsm.prefetch.pipeline import PrefetchPipeline
from hicache_fsm.prefetch.retries import StoragePrefetchRetries

Observer = Callable[[Attempt, Row, int], None]
"""Called after each transition of an attempt with (attempt, row, argument); must not call back."""


class Parts:
    """Owns and wires the parts; no decisions."""

    __slots__ = (
        "config", "full", "attempts", "ops", "beliefs", "accounts", "retries", "parked", "agenda", "waiting",
        "effects", "machine", "prefetch", "backup", "now_ms", "pass_no", "storage_on", "observer", "_ready_states",
    )  # fmt: skip

    def __init__(
        self,
        config: CacheConfig,
        observer: Observer | None = None,
        effects: type[RequestEffects] = RequestEffects,
    ) -> None:
        self.config = config
        self.observer = observer
        self.now_ms = 0
        self.pass_no = 0
        self.storage_on = True
        self.full = FullComponent(config)
        self.attempts = AttemptTable(config.history_length)
        self.ops = OperationTable(self._return_rows, self._cancel)
        self.beliefs = StorageExistenceCache(config.belief_entries, config.negative_entries, config.negative_ttl_ms)
        self.accounts = HitAccounts()
        self.retries = StoragePrefetchRetries()
        self.parked = ParkedQueue()
        self.agenda = Agenda()
        self.waiting = WaitingQueue(self.attempts)
        self.effects = effects(
            config, self.full, self.ops, self.retries, self.accounts, self.parked, self.agenda, self.waiting
        )
        best_effort = config.prefetch_policy is PrefetchPolicy.BEST_EFFORT
        self._ready_states = frozenset((*CANDIDATES, *TIMED) if best_effort else CANDIDATES)
        self.machine: Machine[Attempt] = Machine(
            REQUEST_TABLE,
            self._guards(),
            self.effects.handlers(),
            listener=self._moved,
            check=Attempt.check_ownership if config.debug else None,
        )
        self.prefetch = PrefetchPipeline(
            config, self.full, self.attempts, self.accounts, self.parked, self.machine
        )
        self.backup = BackupPipeline(config, self.full, self.ops, self.beliefs)

    def set_time(self, pass_no: int, now_ms: int) -> None:
        """The agreed clock of this pass; it never goes back."""
        assert now_ms >= self.now_ms, f"the agreed clock went back from {self.now_ms} to {now_ms} ms"
        self.pass_no = pass_no
        self.now_ms = self.effects.now_ms = self.prefetch.now_ms = self.backup.now_ms = now_ms
        self.machine.pass_no = self.ops.machine.pass_no = self.backup.machine.pass_no = pass_no

    def is_candidate(self, attempt: Attempt) -> bool:
        """Whether admission may look at this attempt in its present state."""
        return attempt.keys_known and attempt.state in self._ready_states

    def may_ask(self, attempt: Attempt) -> bool:
        """Whether storage may be asked for this attempt at all."""
        return self.storage_on and attempt.storage_open and attempt.keys_known

    def _guards(self) -> dict[str, Callable[[Attempt, int], bool]]:
        cap, interval = self.config.retry_max_attempts, self.config.retry_poll_interval_passes
        # Speculative polls may use half of the attempts (at least one); the others are kept for retries that have a
        # reason, so that a long wait cannot use them all up before the prefix moves.
        polls = cap - cap // 2
        defers, chances = self.config.max_defers, self.config.park_cap
        return {
            "may_poll": lambda a, _: interval > 0 and a.retries < polls,
            "may_refetch": lambda a, _: a.storage_open and a.retries < cap and a.chances + 1 < chances,
            "usable": lambda a, pages: pages > 0,
            "defers_left": lambda a, _: a.defers + 1 < defers,
            "chances_left": lambda a, _: a.chances + 1 < chances,
            "gate_open": lambda a, _: a.gate_open,
        }

    def _moved(self, attempt: Attempt, row: Row, argument: int) -> None:
        state = REQUEST_TABLE.states[row.target]
        if not state.final and row.target < State.LOADING:
            self.waiting.set_ready(attempt, self.is_candidate(attempt))
        if self.observer is not None:
            self.observer(attempt, row, argument)

    # Effects of the operation table.

    def _return_rows(self, op: Operation, row: Row, argument: int) -> None:
        if op.lock_node:
            self.full.tree.unlock(op.lock_node)
            op.lock_node = 0
        self.full.give_read_staging(op.staging)
        self.full.give_device(op.device)
        op.staging = op.device = ()

    def _cancel(self, op: Operation, row: Row, argument: int) -> None:
        self.full.outbox.append(Cancel(op.id))
