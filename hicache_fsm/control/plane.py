"""`ControlPlane`: the deterministic core as one object.

Inputs: the scheduler's calls, completions, and an agreed clock. Outputs: commands in an outbox. The same
inputs give the same outputs, on every rank and in every replay.

One pass of a scheduler is one `tick`, then any number of `next_candidate` / `admit` / `extend` / `publish` /
`finish`. A tick does, in this order:

    1  completions that give room back: progress, reads, loads, offloads, stores
    2  parked hits, in their turn
    3  answers that may take room: look-ups, hashes
    4  deadlines
    5  retries: the head's paced poll is dropped, then what is due is issued
    6  queued writes, within their share

Loads and releases that admission causes leave with `take_commands` when the batch closes.

The module is long because it is the one face of the core: every call that a scheduler may make stands here, and
each is short.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hicache_fsm.config import CacheConfig
from hicache_fsm.control.answers import Answers, agreed_order
from hicache_fsm.control.effects import RequestEffects
from hicache_fsm.control.parts import Observer, Parts
from hicache_fsm.control.waiting import Place
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.span_table import SpanEvent
from hicache_fsm.lifecycle.table import REQUEST_TABLE, TIMED, Event, Outcome, State
from hicache_fsm.ports import Command, Completion, Hash, Load, PageKey
from hicache_fsm.prefetch.pipeline import Plan

NO_EPOCH = -1
"""Of answers that teach nothing about the present store."""


class Candidate(NamedTuple):
    """A request that could be admitted now, and with what. Valid until the next call that changes anything."""

    attempt: Attempt
    match_pages: int  # resident on the device
    plan: Plan | None  # of its hold, if it has one

    @property
    def cached_pages(self) -> int:
        """Pages that need no computing."""
        return self.plan.end_pages if self.plan is not None else self.match_pages


class Admitted(NamedTuple):
    """What an admission gave."""

    device_pages: int  # prefix found on the device
    loaded_pages: int  # prefix on its way from the hold
    load_ops: tuple[int, ...]  # loads whose layers the batch must wait for


class ControlPlane:
    """See the module. Not thread safe: everything is called from the scheduler's thread."""

    __slots__ = ("config", "parts", "answers", "restarted")

    def __init__(
        self,
        config: CacheConfig,
        observer: Observer | None = None,
        effects: type[RequestEffects] = RequestEffects,
    ) -> None:
        """`effects` is for tests that break an effect on purpose, to see that the checks notice."""
        self.config = config
        self.parts = Parts(config, observer, effects)
        self.answers = Answers(self.parts, self._restart, self._keys_known)
        self.restarted: list[str] = []  # requests that were running and wait again; see `take_restarted`

    # ── requests come ────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, rid: str, num_tokens: int, keys: tuple[PageKey, ...] | None = None, *, priority: int = 0
    ) -> Attempt:
        """Queue a request of `num_tokens` prompt tokens. Without `keys` (its page keys) a `Hash` command asks
        for them, and the request is no candidate before they are there; with them, the first look-up is
        issued at once. Smaller `priority` goes first.

        Raises `DuplicateRequest` if the id is live, `ValueError` on an empty prompt.
        """
        if num_tokens < 1:
            raise ValueError(f"request {rid!r} has {num_tokens} tokens; a prompt needs at least one")
        return self._open(rid, num_tokens, keys, priority=priority)

    def _open(
        self, rid: str, num_tokens: int, keys: tuple[PageKey, ...] | None, *, priority: int, seq: int = -1,
        retries: int = 0, closed: bool = False,
    ) -> Attempt:  # fmt: skip
        parts = self.parts
        attempt = parts.attempts.open(rid, num_tokens, seq)
        attempt.priority = priority
        attempt.retries = retries
        attempt.waiting_since_ms = parts.now_ms
        parts.waiting.join(attempt)
        if closed or not parts.storage_on:
            parts.machine.fire(attempt, Event.CLOSE)
        if keys is None:
            op = parts.ops.issue(OpKind.HASH)
            op.rid, op.attempt, op.slot = rid, attempt.number, attempt.slot
            attempt.op = op.id
            parts.full.outbox.append(Hash(op.id, rid, attempt.number))
        else:
            self._keys_known(attempt, keys)
        return attempt

    def _keys_known(self, attempt: Attempt, keys: tuple[PageKey, ...]) -> None:
        parts = self.parts
        attempt.keys = keys
        attempt.keys_known = True
        parts.prefetch.watch(attempt)
        if parts.may_ask(attempt):
            parts.prefetch.issue(attempt)
        parts.waiting.set_ready(attempt, parts.is_candidate(attempt))

    # ── requests go ──────────────────────────────────────────────────────────────────────────────────

    def abort(self, rid: str) -> bool:
        """End a request wherever it is. False if it is not live: ends in any order give the same result."""
        return self._end(rid, Event.ABORT)

    def reject(self, rid: str) -> bool:
        """End a waiting request that can never fit."""
        return self._end(rid, Event.REJECT)

    def finish(self, rid: str, num_tokens: int = 0, keys: tuple[PageKey, ...] = ()) -> bool:
        """A running request is complete. `keys` are those of all its whole pages, output included, and
        `num_tokens` how many of its tokens have KV; given both, they are published first.

        Raises `IllegalTransition` if it was never admitted. False if it is not live.
        """
        attempt = self.parts.attempts.find(rid)
        if attempt is None:
            return False
        if num_tokens and attempt.state >= State.LOADING:
            self.publish(rid, num_tokens, keys)
        return self._end(rid, Event.FINISH)

    def retract(self, rid: str, num_tokens: int, keys: tuple[PageKey, ...] | None = None) -> Attempt:
        """Take a request back to the queue as a new attempt of `num_tokens` tokens (output so far included).
        It keeps its place in the arrival order and starts with a fresh retry count."""
        attempt = self.parts.attempts.get(rid)
        self.parts.machine.fire(attempt, Event.RETRACT)
        return self._reopen(attempt, num_tokens, keys)

    def _end(self, rid: str, event: Event) -> bool:
        attempt = self.parts.attempts.find(rid)
        if attempt is None:
            return False
        self.parts.machine.fire(attempt, event)
        self.parts.attempts.close(attempt)
        self.parts.attempts.forget(rid)
        return True

    def _restart(self, attempt: Attempt) -> None:
        """A load failed under an attempt: it goes on as a new one, which is reported. That costs a retry, and
        without one left storage stays closed: a copy engine that always fails is not tried for ever."""
        self.restarted.append(attempt.rid)
        self._reopen(attempt, attempt.num_tokens, attempt.keys if attempt.keys_known else None, failed=True)

    def _reopen(
        self, old: Attempt, num_tokens: int, keys: tuple[PageKey, ...] | None, *, failed: bool = False
    ) -> Attempt:
        self.parts.attempts.close(old)
        retries = old.retries + failed
        cap = self.config.retry_max_attempts
        return self._open(
            old.rid, num_tokens, keys, priority=old.priority, seq=old.seq, retries=min(retries, cap),
            closed=retries > cap,
        )  # fmt: skip

    def take_restarted(self) -> list[str]:
        """Requests that were running and wait again since the last call (a failed load, a flush)."""
        out, self.restarted = self.restarted, []
        return out

    # ── the pass ─────────────────────────────────────────────────────────────────────────────────────

    def tick(self, completions: Iterable[Completion] = (), now_ms: int | None = None) -> None:
        """The safe point, once per pass. `now_ms` is the agreed clock; it must not go back."""
        parts = self.parts
        parts.set_time(parts.pass_no + 1, parts.now_ms if now_ms is None else now_ms)
        batch = agreed_order(completions)
        hits = [c for c in batch if self.answers.is_hit(c)]
        for completion in batch:
            if not self.answers.is_hit(completion):
                self.answers.apply(completion)
        parts.prefetch.drain_parked()
        for completion in hits:
            self.answers.apply(completion)
        for slot in parts.agenda.pop_due(parts.now_ms):
            self._deadline(parts.attempts.live[slot])
        self._retry()
        if parts.storage_on:
            parts.backup.flush(parts.prefetch.wanted_by_parked())

    def _deadline(self, attempt: Attempt) -> None:
        self.parts.attempts.touches += 1
        self.parts.machine.fire(attempt, Event.DEADLINE, self._landed(attempt))

    def _landed(self, attempt: Attempt) -> int:
        return attempt.landed_pages if attempt.state == State.READING else 0

    def _retry(self) -> None:
        parts = self.parts
        head = parts.waiting.head()
        if head is not None and parts.retries.is_paced(head):
            parts.machine.fire(parts.attempts.get(head), Event.HEAD)
        config = self.config
        for due in parts.retries.pop_ready(
            parts.waiting, config.retry_poll_interval_passes, config.retry_max_attempts
        ):
            attempt = parts.attempts.get(due.rid)
            parts.attempts.touches += 1
            if due.exhausted:
                parts.machine.fire(attempt, Event.EXHAUSTED)
            elif parts.prefetch.issue(attempt, due.hit_end):
                attempt.retries += 1
                parts.accounts.count("retries")

    def take_commands(self) -> list[Command]:
        """Empty the outbox; the caller executes the commands in this order."""
        out = self.parts.full.outbox
        if out:
            self.parts.full.outbox = []
            for command in out:
                op = getattr(command, "op", 0)
                if op:
                    self.parts.ops.take(op)
        return out

    # ── admission ────────────────────────────────────────────────────────────────────────────────────

    def next_candidate(self, after: Place | None = None) -> tuple[Place, Candidate | None] | None:
        """The next request beyond `after` that could be admitted, or None at the end of the queue. A place
        with no candidate was looked at and has to wait (its base shrank, or best effort cut its read)."""
        place = self.parts.waiting.next_ready(after)
        if place is None:
            return None
        return place, self.consider(self.parts.attempts.live[place[2]])

    def consider(self, attempt: Attempt) -> Candidate | None:
        """The scheduler has reached this request: settle what it can be admitted with, at this moment."""
        parts = self.parts
        if not parts.is_candidate(attempt):
            return None
        if attempt.state in TIMED:
            parts.machine.fire(attempt, Event.CUT, self._landed(attempt))
        plan = parts.prefetch.plan(attempt) if attempt.state == State.STAGED else None
        match = parts.prefetch.boundary(attempt)
        if attempt.state in (State.IDLE, State.PACED) and match < attempt.relied_pages:
            self._shrank(attempt, match)
        if not parts.is_candidate(attempt):
            return None
        # The last token is always computed, so a page that holds it is no cached page even where it is resident.
        return Candidate(attempt, min(match, parts.prefetch.usable_pages(attempt)), plan)

    def _shrank(self, attempt: Attempt, match: int) -> None:
        """The device lost pages since the last look-up: look once more if that can bring anything."""
        parts = self.parts
        worthwhile = parts.prefetch.usable_pages(attempt) - match >= self.config.threshold_pages
        if worthwhile and parts.may_ask(attempt):
            parts.accounts.count("shrinks")
            parts.machine.fire(attempt, Event.SHRANK)
        else:
            attempt.relied_pages = match

    def admit(self, candidate: Candidate, end_tokens: int) -> Admitted | None:
        """Commit a candidate: device pages for what is loaded and for tokens up to `end_tokens`, all or none.

            0 ........ match ........ cached ........ end_tokens
            device     │ loaded from  │ computed in this batch
            (locked)   │ the hold     │ (own pages)

        None if the device has no room now; nothing has changed then.
        """
        parts, tree = self.parts, self.parts.full.tree
        attempt, match, plan = candidate
        load = plan.load_pages if plan is not None else 0
        own = -(-end_tokens // self.config.page_size) - match - load
        assert own > 0, f"{attempt.describe()}: nothing left to compute before token {end_tokens}"
        node = tree.deepest(attempt.keys, match)
        tree.lock(node)  # eviction for the new pages must not take the prefix
        pages = parts.full.take_device(load + own)
        if pages is None:
            tree.unlock(node)
            return None
        now = parts.full.tick_clock()
        if plan is not None:
            node = self._start_load(attempt, plan, node, pages[:load], now)
        else:
            tree.touch(node, now)
        attempt.lock_node = node
        attempt.device = pages[load:]
        attempt.published_pages = match + load
        parts.machine.fire(attempt, Event.ADMIT, load)
        self._depend(attempt, tree.loads(attempt.keys, 0, attempt.published_pages))
        if parts.storage_on and not load:
            parts.backup.enqueue_uncovered(attempt.keys, match, attempt.load_ops)
        return Admitted(match, load, attempt.load_ops)

    def _start_load(self, attempt: Attempt, plan: Plan, node: int, pages: list[int], now: int) -> int:
        """Publish the hold's span and send its copy; returns the deepest node, locked for the attempt."""
        parts, tree = self.parts, self.parts.full.tree
        first = plan.match_pages - attempt.base_pages
        op = parts.ops.issue(OpKind.LOAD)
        op.rid, op.attempt, op.slot = attempt.rid, attempt.number, attempt.slot
        op.keys = attempt.keys[plan.match_pages : plan.end_pages]
        op.device_rows = tuple(pages)
        inserted = tree.insert(attempt.keys, plan.match_pages, pages, now, load=op.id)
        assert not inserted.redundant, f"{attempt.describe()}: plan overlaps {len(inserted.redundant)} resident pages"
        op.lock_node = inserted.node
        tree.lock(inserted.node)
        tree.lock(inserted.node)
        tree.unlock(node)
        op.unresolved = plan.load_pages * self.config.page_size
        parts.accounts.lose(attempt.unresolved - op.unresolved, Outcome.DEVICE_COVERED)
        attempt.unresolved = 0
        attempt.op = op.id
        parts.full.outbox.append(Load(op.id, attempt.rid, attempt.number, attempt.staging[first:], op.device_rows))
        return inserted.node

    def _depend(self, attempt: Attempt, loads: set[int]) -> None:
        for op_id in sorted(loads.difference(attempt.load_ops)):
            op = self.parts.ops.live[op_id]
            op.dependents = (*op.dependents, attempt.slot)
            attempt.load_ops = (*attempt.load_ops, op_id)

    def defer(self, candidate: Candidate) -> None:
        """Admission refused this candidate for capacity. Counts against the defer cap only if the device has
        more room than at the last count, or an agreed quantum of time has passed: spins are not chances."""
        attempt, parts = candidate.attempt, self.parts
        room = parts.full.room()
        since = parts.now_ms - attempt.refused_ms
        if attempt.defers and room <= attempt.refused_room and since < self.config.chance_quantum_ms:
            return
        attempt.refused_room = room
        attempt.refused_ms = parts.now_ms
        parts.machine.fire(attempt, Event.DEFER)

    # ── running requests ─────────────────────────────────────────────────────────────────────────────

    def extend(self, rid: str, end_tokens: int) -> bool:
        """Own device pages up to `end_tokens`; False (and nothing changed) if the device has no room."""
        attempt = self.parts.attempts.get(rid)
        need = -(-end_tokens // self.config.page_size) - attempt.published_pages - len(attempt.device)
        if need <= 0:
            return True
        pages = self.parts.full.take_device(need)
        if pages is None:
            return False
        attempt.device += pages
        return True

    def publish(self, rid: str, num_tokens: int, keys: tuple[PageKey, ...] = ()) -> int:
        """The first `num_tokens` tokens have KV: whole pages go to the tree and towards storage. `keys`
        replace the prompt's when output pages are to be published too. Returns pages published so far.

        A page that a sibling published first stays the sibling's; ours returns to the pool, and the page
        table changes accordingly (`page_table`).
        """
        parts, tree = self.parts, self.parts.full.tree
        attempt = parts.attempts.get(rid)
        if keys:
            attempt.keys = keys
        start = attempt.published_pages
        end = min(len(attempt.keys), num_tokens // self.config.page_size)
        if end <= start:
            return start
        pages = attempt.device[: end - start]
        assert len(pages) == end - start, f"{attempt.describe()} owns {len(pages)} pages of {end - start} to publish"
        inserted = tree.insert(attempt.keys, start, pages, parts.full.tick_clock())
        tree.lock(inserted.node)
        tree.unlock(attempt.lock_node)
        attempt.lock_node = inserted.node
        attempt.device = attempt.device[end - start :]
        attempt.published_pages = end
        parts.full.give_device(inserted.redundant)
        if inserted.redundant:
            self._depend(attempt, tree.loads(attempt.keys, start, end))
        fresh = end - inserted.adopted
        if parts.storage_on and inserted.adopted:
            parent = attempt.keys[fresh - 1] if fresh else b""
            parts.backup.enqueue(parent, attempt.keys[fresh:end], attempt.load_ops)
        return end

    def page_table(self, rid: str) -> list[int]:
        """Device page of each page of the request's sequence, from its first token on."""
        attempt = self.parts.attempts.get(rid)
        return self.parts.full.tree.pages(attempt.keys, 0, attempt.published_pages) + attempt.device

    # ── storage and tree as a whole ──────────────────────────────────────────────────────────────────

    def detach(self) -> None:
        """Close storage: running operations are seen through, everything else that needs it is closed.
        Holds stay: their bytes are ours. A second call changes nothing."""
        self.parts.storage_on = False
        for attempt in list(self.parts.attempts):
            self.parts.machine.fire(attempt, Event.CLOSE)
        self.parts.backup.close(SpanEvent.CLOSE)

    def attach(self) -> None:
        """Open storage again, for attempts that start from now on; what another store holds is not known."""
        parts = self.parts
        parts.storage_on = True
        parts.beliefs.clear()
        # Answers that are still to come speak of the store that was there before.
        for op in parts.ops.live.values():
            if op.kind in (OpKind.LOOKUP, OpKind.READ):
                op.epoch = NO_EPOCH
        for span in parts.backup.live.values():
            span.epoch = NO_EPOCH

    def flush(self) -> None:
        """Drop the tree and all beliefs; the store keeps its pages. Every live request goes on as a new
        attempt. Rows of running copies stay in quarantine until their answers."""
        parts = self.parts
        attempts = list(parts.attempts)
        running = [a for a in attempts if a.state >= State.LOADING]
        for attempt in attempts:
            parts.machine.fire(attempt, Event.FLUSH)
        parts.backup.close(SpanEvent.FLUSH)
        parts.ops.epoch += 1
        parts.beliefs.clear()
        self._clear_tree()
        self.restarted += [a.rid for a in running]
        for attempt in attempts:
            self._reopen(attempt, attempt.num_tokens, attempt.keys if attempt.keys_known else None)

    def _clear_tree(self) -> None:
        parts = self.parts
        for op in parts.ops.live.values():
            if op.lock_node:
                parts.full.tree.unlock(op.lock_node)
                op.lock_node = 0
        for span in parts.backup.live.values():
            if span.lock_node:
                parts.full.tree.unlock(span.lock_node)
                span.lock_node = 0
        touched: set[int] = set()
        for op in parts.ops.live.values():
            if op.epoch == parts.ops.epoch - 1 and op.kind in (OpKind.LOAD, OpKind.OFFLOAD):
                op.device = op.device_rows
                touched.update(op.device_rows)
        pages = parts.full.tree.clear()
        parts.full.give_device([page for page in pages if page not in touched])

    # ── what it looks like ───────────────────────────────────────────────────────────────────────────

    def is_idle(self) -> bool:
        """Nothing lives, nothing is outstanding, nothing is owned outside the tree."""
        parts = self.parts
        return not (parts.attempts.live or parts.ops.live or parts.backup.queue or parts.backup.live)

    def check_invariants(self) -> list[str]:
        """Every violation found by brute force; empty when all is well. See `control.checks`."""
        from hicache_fsm.control.checks import check_plane

        return check_plane(self.parts)

    def explain(self, rid: str) -> str:
        """Where a request is and why, from its history. Raises `UnknownRequest` if it is not live."""
        attempt = self.parts.attempts.get(rid)
        lines = [f"{attempt.describe()} is {attempt.state_name}: {REQUEST_TABLE.states[attempt.state].meaning}"]
        for step in attempt.history:
            row = REQUEST_TABLE.rows[step.row]
            event = REQUEST_TABLE.events[row.event]
            carried = f" ({step.argument} {event.argument})" if event.argument else ""
            outcome = f" [{row.outcome}]" if "settle" in row.effects else ""
            target = REQUEST_TABLE.states[row.target].label
            lines.append(f"  pass {step.pass_no}: {event.name}{carried} -> {target}{outcome}: {row.because}")
        return "\n".join(lines)
