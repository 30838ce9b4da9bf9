"""The write path: computed pages go device -> staging -> store, parents before children.

    publish -> queue of spans -> (share of staging) -> offload -> store -> believed

Loads have priority: what writes may hold of staging shrinks with what reads hold and with what the parked
head waits for (`FullComponent.write_room`). Device eviction never waits for a queued span, but it takes pages
that still have to be written last.
"""

from __future__ import annotations

from collections import deque

from hicache_fsm.backup.beliefs import StorageExistenceCache
from hicache_fsm.backup.spans import WriteSpan
from hicache_fsm.components.full import FullComponent
from hicache_fsm.config import CacheConfig
from hicache_fsm.lifecycle.machine import Machine
from hicache_fsm.lifecycle.model import Row
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.operations import Operation, OperationTable
from hicache_fsm.lifecycle.span_table import SPAN_TABLE, Drop, SpanEvent, SpanState
from hicache_fsm.ports import Offload, PageKey, Store


class BackupPipeline:
    """Queue and ledger of write spans. Counters are pages."""

    __slots__ = (
        "config", "full", "ops", "beliefs", "machine", "queue", "live", "pending", "queued_pages", "last_id",
        "stored_pages", "dropped_pages", "now_ms", "last_answer_ms",
    )  # fmt: skip

    def __init__(
        self, config: CacheConfig, full: FullComponent, ops: OperationTable, beliefs: StorageExistenceCache
    ) -> None:
        self.config = config
        self.full = full
        self.ops = ops
        self.beliefs = beliefs
        effects = {
            "issue_offload": self._issue_offload,
            "issue_store": self._issue_store,
            "return_all": self._return_all,
            "believe": self._believe,
            "count_dropped": self._count_dropped,
        }
        check = WriteSpan.check_ownership if config.debug else None
        self.machine: Machine[WriteSpan] = Machine(
            SPAN_TABLE, {"usable": lambda span, stored: stored > 0}, effects, check=check
        )
        self.queue: deque[WriteSpan] = deque()
        self.live: dict[int, WriteSpan] = {}  # copying or storing
        self.pending: dict[PageKey, None] = {}  # queued, copying or storing
        self.queued_pages = 0
        self.last_id = 0
        self.now_ms = 0
        self.last_answer_ms = 0  # when the store last answered a write
        self.stored_pages = 0
        self.dropped_pages: dict[str, int] = {drop.value: 0 for drop in Drop}

    # ── intents ──────────────────────────────────────────────────────────────────────────────────────

    def enqueue(self, parent: PageKey, keys: tuple[PageKey, ...], deps: tuple[int, ...]) -> None:
        """Queue what of a run of resident pages is neither believed stored nor on its way."""
        beliefs, pending = self.beliefs, self.pending
        run: list[PageKey] = []
        before = parent
        if deps and pending:
            self._defer_queued(keys, deps)
        for key in keys:
            if key in pending or key in beliefs:
                self._queue_run(before, run, deps)
                run = []
                before = key
            else:
                run.append(key)
        self._queue_run(before, run, deps)

    def _defer_queued(self, keys: tuple[PageKey, ...], deps: tuple[int, ...]) -> None:
        """Pages that were queued, evicted, and computed again on top of a load: their spans wait for it too."""
        again = self.pending.keys() & set(keys)
        if again:
            for span in self.queue:
                if not again.isdisjoint(span.keys):
                    span.deps = tuple(dict.fromkeys((*span.deps, *deps)))

    def enqueue_uncovered(self, keys: tuple[PageKey, ...], length: int, deps: tuple[int, ...]) -> None:
        """A used prefix whose end is not stored: queue it from the last covered page on (an earlier write of
        it was dropped or failed). Costs one probe when the end is covered."""
        start = length
        while start > 0 and keys[start - 1] not in self.pending and keys[start - 1] not in self.beliefs:
            start -= 1
        if start < length:
            self.enqueue(keys[start - 1] if start else b"", keys[start:length], deps)

    def _queue_run(self, parent: PageKey, run: list[PageKey], deps: tuple[int, ...]) -> None:
        if not run:
            return
        if self.queued_pages + len(run) > self.config.write_backlog_factor * self.config.device_pages:
            self.dropped_pages[Drop.BACKLOG.value] += len(run)
            return
        self.last_id += 1
        self.queue.append(WriteSpan(self.last_id, parent, tuple(run), deps, self.ops.epoch))
        self.queued_pages += len(run)
        self.pending.update(dict.fromkeys(run))
        self._mark(run, True)

    def outruns_store(self, limit_pages: int, patience_ms: int) -> bool:
        """Whether more pages than `limit_pages` wait to be written to a store that is answering. A store that
        has not answered for `patience_ms` is not worth waiting for."""
        behind = self.queued_pages > limit_pages
        return behind and bool(self.live) and self.now_ms - self.last_answer_ms < patience_ms

    # ── staging, at the end of each tick ─────────────────────────────────────────────────────────────

    def flush(self, wanted_by_reads: int) -> None:
        """Stage queued spans in order, as far as the write share allows."""
        while self.queue:
            span = self.queue[0]
            if any(op in self.ops.live for op in span.deps):
                return  # its bytes are not certain yet; a load is answered soon
            resident = self._resident(span)
            if not resident:
                self._drop(SpanEvent.SWEEP)
                continue
            if resident < len(span.keys):
                self._cut(span, resident)
            if span.parent and not self.beliefs.covered(span.parent):
                self._drop(SpanEvent.ORPHANED)
            elif self.full.tree.loads(span.keys, 0, resident):
                return  # evicted while it was queued, and on its way back: its pages are being written
            else:
                room = min(self.full.write_room(wanted_by_reads), self.config.io_batch_pages)
                if room <= 0:
                    return
                self._stage(span, room)

    def _resident(self, span: WriteSpan) -> int:
        """Leading pages of the span that are still on the device; eviction takes them from its end."""
        keys, tree = span.keys, self.full.tree
        resident = len(keys)
        while resident and tree.node(keys[resident - 1]) < 0:
            resident -= 1
        return resident

    def _cut(self, span: WriteSpan, length: int) -> None:
        self._forget(span.keys[length:])
        self.dropped_pages[Drop.EVICTED.value] += len(span.keys) - length
        span.keys = span.keys[:length]

    def _stage(self, span: WriteSpan, room: int) -> None:
        """Stage the first `room` pages; the rest of the span stays at the head as a span of its own."""
        self.queue.popleft()
        if len(span.keys) > room:
            self.last_id += 1
            rest = WriteSpan(self.last_id, span.keys[room - 1], span.keys[room:], span.deps, span.epoch)
            self.queue.appendleft(rest)
            span.keys = span.keys[:room]
        rows = self.full.take_write_staging(len(span.keys))
        assert rows is not None, f"write room of {room} pages, but {self.full.staging.available} are free"
        self.queued_pages -= len(span.keys)
        span.staging = tuple(rows)
        span.lock_node = self.full.tree.node(span.keys[-1])
        self.full.tree.lock(span.lock_node)
        self.live[span.id] = span
        self.machine.fire(span, SpanEvent.STAGE)

    def _drop(self, event: SpanEvent) -> None:
        span = self.queue.popleft()
        self._forget(span.keys)
        self.machine.fire(span, event)

    def close(self, event: SpanEvent) -> None:
        """Storage is detached, or everything is flushed: what was not started is dropped."""
        while self.queue:
            self._drop(event)
        for span in self.live.values():
            self.machine.fire(span, event)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────

    def copied(self, op: Operation, ok: bool) -> None:
        span = self.live[op.span]
        self.machine.fire(span, SpanEvent.COPIED if ok else SpanEvent.COPY_FAILED)
        if not ok:
            self._end(span)

    def answered(self, op: Operation, stored: int) -> None:
        span = self.live[op.span]
        self.last_answer_ms = self.now_ms
        self.machine.fire(span, SpanEvent.ANSWERED, stored)
        self._end(span)

    def _end(self, span: WriteSpan) -> None:
        del self.live[span.id]
        self.beliefs.untrack_inflight(span.keys)
        for key in span.keys:
            self.pending.pop(key, None)
        self._mark(span.keys, False)

    # ── effects ──────────────────────────────────────────────────────────────────────────────────────

    def _issue_offload(self, span: WriteSpan, row: Row, argument: int) -> None:
        op = self.ops.issue(OpKind.OFFLOAD)
        op.span, op.keys, op.rows = span.id, span.keys, span.staging
        op.device_rows = tuple(self.full.tree.pages(span.keys, 0, len(span.keys)))
        span.op = op.id
        self.beliefs.track_inflight(span.keys)
        self.full.outbox.append(Offload(op.id, span.id, op.device_rows, span.staging))

    def _issue_store(self, span: WriteSpan, row: Row, argument: int) -> None:
        self._unlock(span)
        op = self.ops.issue(OpKind.STORE)
        op.span, op.keys, op.rows = span.id, span.keys, span.staging
        span.op = op.id
        self.full.outbox.append(Store(op.id, span.id, span.keys, span.staging))

    def _return_all(self, span: WriteSpan, row: Row, argument: int) -> None:
        self._unlock(span)
        self.full.give_write_staging(span.staging)
        span.staging = ()

    def _believe(self, span: WriteSpan, row: Row, stored: int) -> None:
        self.stored_pages += stored
        if span.epoch == self.ops.epoch:
            self.beliefs.add(span.keys[:stored])

    def _count_dropped(self, span: WriteSpan, row: Row, stored: int) -> None:
        kept = stored if row.event == SpanEvent.ANSWERED else 0
        self.dropped_pages[row.outcome] += len(span.keys) - kept
        span.outcome = row.outcome

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────────

    def _unlock(self, span: WriteSpan) -> None:
        if span.lock_node:
            self.full.tree.unlock(span.lock_node)
            span.lock_node = 0

    def _forget(self, keys: tuple[PageKey, ...]) -> None:
        self.queued_pages -= len(keys)
        for key in keys:
            self.pending.pop(key, None)
        self._mark(keys, False)

    def _mark(self, keys: list[PageKey] | tuple[PageKey, ...], pending: bool) -> None:
        nodes = [node for node in map(self.full.tree.node, keys) if node >= 0]
        if nodes:
            self.full.tree.set_pending(nodes, pending)

    def check_invariants(self) -> list[str]:
        found: list[str] = []
        queued = sum(len(span.keys) for span in self.queue)
        if queued != self.queued_pages:
            found.append(f"{queued} pages in the write queue, counted {self.queued_pages}")
        staged = sum(len(span.staging) for span in self.live.values())
        if staged != self.full.writes.value:
            found.append(f"{staged} staging pages owned by write spans, counted {self.full.writes.value}")
        on_way = {key for span in (*self.queue, *self.live.values()) for key in span.keys}
        if on_way != set(self.pending):
            found.append(f"pending keys differ from the spans' keys by {len(on_way ^ set(self.pending))}")
        states = (SpanState.COPYING, SpanState.STORING)
        found += [f"{s.describe()} is live in state {s.state}" for s in self.live.values() if s.state not in states]
        return found
