"""Completions: what each answer means for its operation, its owner and the beliefs.

An answer whose operation is unknown or answered already changes nothing but `OperationTable.stale`. An
answer to an orphaned operation gives back what the operation owns, and may teach the beliefs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hicache_fsm.control.parts import Parts
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.operation_table import OpEvent, OpKind
from hicache_fsm.lifecycle.operations import Operation
from hicache_fsm.lifecycle.table import Event, Outcome, State
from hicache_fsm.ports import (
    Completion,
    HashDone,
    LoadDone,
    LookupDone,
    Lost,
    OffloadDone,
    PageKey,
    ReadDone,
    ReadProgress,
    StoreDone,
)


def agreed_order(completions: Iterable[Completion]) -> list[Completion]:
    """The order in which a tick applies completions: by operation, progress before the end. Independent of
    arrival, so that ranks which have the same set apply the same sequence."""
    return sorted(completions, key=lambda c: (c.op, not isinstance(c, ReadProgress), c[1:] if len(c) > 1 else ()))


class Answers:
    """Applies completions. `restart` is called for each attempt that ended because of a failed load."""

    __slots__ = ("parts", "restart", "keys_known")

    def __init__(
        self,
        parts: Parts,
        restart: Callable[[Attempt], None],
        keys_known: Callable[[Attempt, tuple[PageKey, ...]], None],
    ) -> None:
        self.parts = parts
        self.restart = restart
        self.keys_known = keys_known

    def is_hit(self, completion: Completion) -> bool:
        """Whether this answer may take room: such answers come after those that give room back."""
        return isinstance(completion, LookupDone | HashDone)

    def apply(self, completion: Completion) -> None:
        op = self.parts.ops.get(completion.op)
        if op is None:
            return
        match completion:
            case HashDone(_, keys):
                self._hashed(op, keys)
            case LookupDone(_, hit_pages, ok):
                self._looked_up(op, hit_pages, ok)
            case ReadProgress(_, pages):
                self._progress(op, pages)
            case ReadDone(_, pages):
                self._read(op, pages)
            case LoadDone(_, ok):
                self._loaded(op, ok)
            case OffloadDone(_, ok):
                self.parts.ops.end(op)
                self.parts.backup.copied(op, ok)
            case StoreDone(_, stored):
                self.parts.ops.end(op)
                self.parts.backup.answered(op, min(max(stored, 0), len(op.keys)))
            case Lost():
                self._lost(op)

    def _owner(self, op: Operation) -> Attempt | None:
        """The attempt whose own running operation this is."""
        attempt = self.parts.attempts.live.get(op.slot)
        if attempt is None or attempt.op != op.id:
            return None
        self.parts.attempts.touches += 1
        return attempt

    def _lost(self, op: Operation) -> None:
        match OpKind(op.kind):
            case OpKind.HASH:
                self._hashed(op, None)
            case OpKind.LOOKUP:
                self._looked_up(op, 0, False)
            case OpKind.READ:
                self._read(op, op.progress)
            case OpKind.LOAD:
                self._loaded(op, False)
            case OpKind.OFFLOAD:
                self.parts.ops.end(op, lost=True)
                self.parts.backup.copied(op, False)
            case OpKind.STORE:
                self.parts.ops.end(op, lost=True)
                self.parts.backup.answered(op, 0)

    def _hashed(self, op: Operation, keys: tuple[PageKey, ...] | None) -> None:
        attempt = self._owner(op)
        self.parts.ops.end(op, lost=keys is None)
        if attempt is None:
            return
        attempt.op = 0
        if keys is None:
            self.parts.machine.fire(attempt, Event.CLOSE)
        self.keys_known(attempt, keys or ())

    def _looked_up(self, op: Operation, hit_pages: int, ok: bool) -> None:
        parts = self.parts
        attempt = self._owner(op)
        parts.ops.end(op)
        hit = min(hit_pages, len(op.keys)) if ok else 0
        # What a read could not bring stays refused, and unbelieved so that it is written anew, whatever a look-up says.
        deliverable = parts.beliefs.deliverable(op.keys[:hit], parts.now_ms)
        if ok and op.epoch == parts.ops.epoch:
            parts.beliefs.add(op.keys[:deliverable])
            parts.beliefs.invalidate_beyond(op.keys, deliverable)
        if attempt is None:
            return
        attempt.op = 0
        if not ok:
            parts.accounts.count("failed_lookups")
        if deliverable < hit:
            parts.accounts.count("negative_hits")
        parts.prefetch.hit(attempt, len(op.keys), deliverable)

    def _progress(self, op: Operation, pages: int) -> None:
        attempt = self._owner(op)
        self.parts.ops.machine.fire(op, OpEvent.PROGRESS, pages)
        if attempt is not None:
            op.progress = min(max(op.progress, pages), len(op.rows))
            attempt.landed_pages = op.progress

    def _read(self, op: Operation, pages: int) -> None:
        parts = self.parts
        attempt = self._owner(op)
        parts.ops.end(op)
        landed = min(max(pages, op.progress), len(op.keys))
        if op.epoch == parts.ops.epoch:
            parts.beliefs.add(op.keys[:landed])
            if landed < len(op.keys) and attempt is not None:
                parts.beliefs.invalidate_beyond(op.keys, landed)
                parts.beliefs.refuse(op.keys[landed], parts.now_ms)
        if attempt is None:
            return
        attempt.op = 0
        attempt.landed_pages = landed
        parts.machine.fire(attempt, Event.READ_DONE, landed)
        if not landed:
            attempt.end_pages = 0  # what cannot be delivered is not a known hit

    def _loaded(self, op: Operation, ok: bool) -> None:
        if not ok:
            self._load_failed(op)
            return
        parts = self.parts
        attempt = self._owner(op)
        parts.ops.end(op)
        parts.full.tree.landed(op.id)
        if op.epoch == parts.ops.epoch:
            parts.accounts.splice(op.unresolved)
        else:
            parts.accounts.lose(op.unresolved, Outcome.FLUSHED)
        for slot in op.dependents:
            reader = parts.attempts.live[slot]
            reader.load_ops = tuple(other for other in reader.load_ops if other != op.id)
        if attempt is not None and attempt.state == State.LOADING:
            attempt.op = 0
            parts.machine.fire(attempt, Event.LOAD_ACK)

    def _load_failed(self, op: Operation) -> None:
        """The span was published but never landed: take it, and all that was computed or loaded on top of it, out of
        the tree; those who read it start anew, those who pinned it lose the pin and will see a shorter base."""
        parts = self.parts
        readers = [parts.attempts.live[slot] for slot in op.dependents]
        for reader in readers:
            parts.machine.fire(reader, Event.LOAD_FAILED)
        parts.accounts.lose(op.unresolved, Outcome.LOAD_FAILED)
        parts.accounts.count("failed_loads")
        published = not op.device  # else a flush or a failure below has taken its span out already
        parts.ops.end(op)
        if published:
            self._withdraw(op)
        for reader in readers:
            self.restart(reader)

    def _withdraw(self, failed: Operation) -> None:
        """Take the span of a failed load out of the tree, with everything below it."""
        parts = self.parts
        tree = parts.full.tree
        root = tree.node(failed.keys[0])
        assert root >= 0, f"{failed.describe()} had its span locked, and it is gone"
        below = set(tree.subtree(root))
        for attempt in parts.attempts:
            if attempt.pin_node in below:
                parts.full.unpin(attempt.pin_node, attempt.pin_tokens)
                attempt.pin_node = attempt.pin_tokens = 0
        quarantined: set[int] = set()
        for op in parts.ops.of_kind(OpKind.LOAD):
            if op.lock_node in below:
                tree.unlock(op.lock_node)
                op.lock_node = 0
                op.device = op.device_rows
                quarantined.update(op.device_rows)
                parts.accounts.lose(op.unresolved, Outcome.LOAD_FAILED)
                op.unresolved = 0
        pages = tree.remove_subtree(root).pages
        parts.full.give_device([page for page in pages if page not in quarantined])
