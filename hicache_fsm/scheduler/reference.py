"""`ReferenceScheduler`: a small, complete scheduler on top of the control plane.

One pass: tick, pages for those that decode (retracting under pressure), the next chunk or new admissions,
launch, forward, publish. Prefill and decode share a batch. It shows how a scheduler embeds the library, and
drives replays and tests; it is deterministic as long as its cache and model are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hicache_fsm.admission.adder import PrefillAdder, Verdict
from hicache_fsm.admission.budget import CLIP_MAX_NEW_TOKENS, BudgetLimits, BudgetState, PrefillBudget
from hicache_fsm.control.plane import ControlPlane
from hicache_fsm.errors import LoadFailed
from hicache_fsm.ports import DEFAULT_NAMESPACE, Namespace, PageKey
from hicache_fsm.scheduler.batch import Batch, Model, PrefillWork
from hicache_fsm.scheduler.requests import Phase, Request
from hicache_fsm.tree.keys import page_keys


class Cache(Protocol):
    """What the scheduler needs besides the plane; `runtime.HiCache` is one."""

    @property
    def plane(self) -> ControlPlane: ...

    def submit(
        self, rid: str, tokens: Sequence[int], *, namespace: Namespace = DEFAULT_NAMESPACE, priority: int = 0
    ) -> object:
        """Queue a request; its keys are computed off this thread."""
        ...

    def tick(self) -> None:
        """The safe point: apply completions, execute commands."""
        ...

    def launch(self) -> None:
        """The batch is closed: execute the commands that admission has caused."""
        ...

    def wait_for_loads(self, ops: Sequence[int]) -> None:
        """Tick until these loads have been answered."""
        ...


@dataclass(slots=True)
class Tally:
    """What a run came to, in requests and tokens."""

    outcomes: dict[str, int] = field(default_factory=lambda: {"finished": 0, "aborted": 0, "rejected": 0})
    prompt: int = 0  # prompt tokens of requests that were committed, each request once
    device: int = 0  # of these: found on the device
    storage: int = 0  # of these: loaded from storage
    computed: int = 0  # of these: computed
    redone: int = 0  # tokens computed again after a retraction or a failed load
    generated: int = 0
    retractions: int = 0
    restarts: int = 0
    passes: int = 0
    batches: int = 0


class GrowthEstimate:
    """Share of the remaining output that admission reserves for. Rises after a retraction, then decays, as
    SGLang's new-token ratio does: reserving all would leave memory idle, reserving none would thrash."""

    __slots__ = ("ratio",)
    INITIAL, MINIMUM, DECAY, AFTER_RETRACTION = 0.7, 0.1, 0.001, 0.3

    def __init__(self) -> None:
        self.ratio = self.INITIAL

    def decay(self) -> None:
        self.ratio = max(self.MINIMUM, self.ratio - self.DECAY)

    def retracted(self) -> None:
        self.ratio = min(1.0, self.ratio + self.AFTER_RETRACTION)


class ReferenceScheduler:
    """See the module. `max_candidates` bounds the scan of one pass, so that a pass over many blocked requests
    stays short."""

    def __init__(
        self, cache: Cache, model: Model, limits: BudgetLimits | None = None, max_candidates: int = 64
    ) -> None:
        self.cache = cache
        self.plane = cache.plane
        self.model = model
        self.limits = limits or BudgetLimits()
        self.max_candidates = max_candidates
        self.page = self.plane.config.page_size
        self.requests: dict[str, Request] = {}
        self.running: dict[str, Request] = {}  # decoding
        self.chunked: Request | None = None
        self.growth = GrowthEstimate()
        self.tally = Tally()
        self.ended: list[Request] = []  # since the caller last took them

    # ── requests come and go ─────────────────────────────────────────────────────────────────────────

    def never_fits(self, request: Request) -> str:
        """Why no pool of this size will ever hold the request; empty if it can fit."""
        config = self.plane.config
        total = request.prompt_len + request.max_new_tokens
        if total > config.max_context_tokens:
            return f"{total} tokens are more than max_context_tokens {config.max_context_tokens}"
        if -(-total // self.page) > config.device_pages:
            return f"{total} tokens need more than the {config.device_pages} pages of the device pool"
        return ""

    def submit(self, request: Request) -> bool:
        """Queue a request; one that can never fit ends at once as `rejected`, and False is returned."""
        self.requests[request.rid] = request
        reason = self.never_fits(request)
        if reason:
            self._ended(request, "rejected", reason)
            return False
        self.cache.submit(request.rid, request.prompt, namespace=request.namespace)
        return True

    def abort(self, rid: str) -> None:
        """End a request wherever it is. An id that is not live is ignored: it may just have finished."""
        request = self.requests.get(rid)
        if request is not None:
            self.plane.abort(rid)
            self._ended(request, "aborted")

    def flush(self) -> None:
        """Drop the tree: whoever runs goes back to the queue with what it has generated."""
        for request in self._admitted():
            self._retract(request)
        self.plane.flush()
        self.plane.take_restarted()

    def has_work(self) -> bool:
        return bool(self.requests)

    def take_ended(self) -> list[Request]:
        out, self.ended = self.ended, []
        return out

    def _ended(self, request: Request, outcome: str, reason: str = "") -> None:
        request.phase = Phase.ENDED
        request.outcome, request.reason = outcome, reason
        self.tally.outcomes[outcome] += 1
        del self.requests[request.rid]
        self._leave_batch(request)
        self.ended.append(request)

    def _leave_batch(self, request: Request) -> None:
        self.running.pop(request.rid, None)
        if self.chunked is request:
            self.chunked = None

    # ── the pass ─────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """One pass. False if nothing could be launched."""
        self.tally.passes += 1
        self.cache.tick()
        self._take_restarted()
        batch = Batch()
        self._grow()
        self._fill(batch)
        self.cache.launch()
        batch.decode = [r for r in self.running.values() if r.phase is Phase.DECODING]
        if not batch:
            return False
        self.tally.batches += 1
        self.growth.decay()
        self._forward(batch)
        return True

    def _grow(self) -> None:
        """A new page for each decoding request whose next token begins one; retract while there is none."""
        page = self.page
        for request in [r for r in self.running.values() if r.computed % page == 0]:
            while request.rid in self.running and not self.plane.extend(request.rid, request.computed + 1):
                self._retract(self._victim())
                self.growth.retracted()
            if request.rid in self.running:
                request.last_page = self.plane.parts.attempts.get(request.rid).device[-1]

    def _admitted(self) -> list[Request]:
        return [*self.running.values(), *([self.chunked] if self.chunked is not None else [])]

    def _victim(self) -> Request:
        """The admitted request that came last: those before it have waited longer."""
        attempts = self.plane.parts.attempts
        return max(self._admitted(), key=lambda r: (attempts.get(r.rid).priority, attempts.get(r.rid).seq))

    def _fill(self, batch: Batch) -> None:
        """The next chunk of the request in the middle of its prompt, then new admissions in queue order."""
        if self.chunked is None and self.plane.parts.waiting.next_ready(None) is None:
            return
        if len(self.running) >= self.limits.max_running_requests and self.chunked is None:
            return
        backlog = self.limits.max_write_backlog_pages
        if backlog and self.plane.parts.backup.outruns_store(backlog, self.limits.write_patience_ms):
            return
        budget = PrefillBudget(self.plane.parts.full, self.limits, self._expected_growth())
        adder = PrefillAdder(self.plane, budget, idle=not self._admitted())
        chunked = self.chunked
        blocked = False
        if chunked is not None:
            rest = chunked.new_tokens_left
            blocked = not adder.continue_chunk(chunked.rid, chunked.computed, chunked.prompt_end, rest)
        if not blocked:
            self._admit(adder)
        for entry in adder.entries:
            request = self.requests[entry.rid]
            batch.prefill.append(PrefillWork(request, entry, self.plane.page_table(entry.rid)))
            request.phase = Phase.PREFILLING
            if entry.is_chunk:
                self.chunked = request
            elif self.chunked is request:
                self.chunked = None

    def _admit(self, adder: PrefillAdder) -> None:
        place = None
        for _ in range(self.max_candidates):
            if adder.budget.state() is BudgetState.OTHER:
                return
            if len(self.running) + len(adder.entries) >= self.limits.max_running_requests:
                return
            found = self.plane.next_candidate(place)
            if found is None:
                return
            place, candidate = found
            if candidate is None:
                continue
            match adder.add(candidate, self.requests[candidate.attempt.rid].new_tokens_left):
                case Verdict.STOP:
                    return
                case Verdict.SKIP | Verdict.ADMITTED:
                    pass

    def _expected_growth(self) -> int:
        left = sum(min(r.new_tokens_left, CLIP_MAX_NEW_TOKENS) for r in self.running.values())
        return int(left * self.growth.ratio)

    # ── the forward ──────────────────────────────────────────────────────────────────────────────────

    def _forward(self, batch: Batch) -> None:
        """Compute the batch. If a load that it needs fails, the requests that depend on it start anew, and
        the others are computed without them."""
        while batch:
            try:
                first_tokens, next_tokens = self.model.forward(batch)
            except LoadFailed:
                self.cache.wait_for_loads(batch.load_ops)
                gone = self._take_restarted()
                assert gone, f"loads {batch.load_ops} failed, but nobody depended on them"
                batch.prefill = [work for work in batch.prefill if work.request.rid not in gone]
                batch.decode = [request for request in batch.decode if request.rid not in gone]
                continue
            self._apply_prefill(batch.prefill, first_tokens)
            self._apply_decode(batch.decode, next_tokens)
            return

    def _apply_prefill(self, work: Sequence[PrefillWork], tokens: Sequence[int]) -> None:
        for (request, entry, _), token in zip(work, tokens, strict=True):
            self._count(request, entry.device_tokens, entry.storage_tokens, entry.end - entry.start)
            request.computed = entry.end
            self.plane.publish(request.rid, entry.end)
            if entry.is_chunk:
                continue
            request.phase = Phase.DECODING
            self.running[request.rid] = request
            request.output.append(token)
            self.tally.generated += 1
            device = self.plane.parts.attempts.get(request.rid).device
            request.last_page = device[-1] if device else -1
            if request.new_tokens_left <= 0:
                self._finish(request)

    def _count(self, request: Request, device: int, storage: int, computed: int) -> None:
        """Sources of the prompt, at the first commit; what is computed later is the rest or work redone."""
        tally = self.tally
        if not request.counted:
            request.counted = True
            tally.prompt += request.prompt_len
            tally.device += device
            tally.storage += storage
            tally.computed += request.prompt_len - device - storage
        elif request.retractions:
            tally.redone += computed

    def _apply_decode(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        self.tally.generated += len(requests)
        done: list[Request] = []
        for request, token in zip(requests, tokens, strict=True):
            request.computed += 1
            request.output.append(token)
            if len(request.output) >= request.max_new_tokens:
                done.append(request)
        for request in done:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        self.plane.finish(request.rid, request.computed, self._all_keys(request))
        self._ended(request, "finished")

    def _all_keys(self, request: Request) -> tuple[PageKey, ...]:
        """Keys of all whole pages, output included: the prompt's, continued over the output."""
        keys = self.plane.parts.attempts.get(request.rid).keys
        done = len(keys) * self.page
        tail = [*request.prompt[done:], *request.output[max(0, done - request.prompt_len) :]]
        prior = keys[-1] if keys else None
        return keys + page_keys(tail, self.page, request.namespace, prior=prior)

    # ── back to the queue ────────────────────────────────────────────────────────────────────────────

    def _retract(self, request: Request) -> None:
        """Give the request's rows up; what it has computed stays in the tree as long as nobody needs room."""
        self.tally.retractions += 1
        keys = self._all_keys(request)
        self.plane.publish(request.rid, request.computed, keys)
        self.plane.retract(request.rid, request.num_tokens, keys)
        self._waits_again(request)

    def _waits_again(self, request: Request) -> None:
        self._leave_batch(request)
        request.phase = Phase.WAITING
        request.retractions += 1
        request.computed = 0
        request.prompt_end = request.num_tokens
        request.last_page = -1

    def _take_restarted(self) -> set[str]:
        """Requests whose attempt has ended under them (a failed load) wait again."""
        gone = set(self.plane.take_restarted())
        for rid in gone:
            request = self.requests[rid]
            self.tally.restarts += 1
            self._waits_again(request)
            attempt = self.plane.parts.attempts.get(rid)
            if attempt.num_tokens != request.num_tokens:
                self.plane.retract(rid, request.num_tokens, self._all_keys(request))
        return gone
