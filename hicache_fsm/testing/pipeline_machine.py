"""`PipelineMachine`: Hypothesis drives a control plane against a hostile outside.

Each step is one act of a scheduler, a client, a store, a copy engine or an operator: requests come, are
admitted, grow, are retracted and aborted; operations are answered fully, partly, with failure, twice, late or never;
pages are evicted under waiting requests; storage loses keys, is detached and attached; the tree is flushed. After
each step all books are recounted and all bytes compared (`Sim.check`). In the end everything outstanding is answered
and every request must end within the bound of `hicache_fsm.control.termination`, with nothing left owned.

    class TestPipeline(PipelineMachine.TestCase):
        settings = settings(max_examples=300, stateful_step_count=50)

Narrow it to your own settings by overriding `configs` in a subclass. The acts of a failing run are printed as notes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hypothesis import event, note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from hicache_fsm.config import CacheConfig, PrefetchPolicy
from hicache_fsm.control.termination import waiting_bound
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.table import State
from hicache_fsm.ports import Completion, HashDone, PageKey, Read
from hicache_fsm.testing.sim import Sim, chain

T = TypeVar("T")
Prompt = str
"""One letter a page."""

RIDS = tuple(f"r{i}" for i in range(6))
"""Request ids are used again once their request has ended, so that long runs keep doing something."""

MAX_PROMPT_PAGES = 14


@st.composite
def small_configs(draw: st.DrawFn) -> CacheConfig:
    """Pools of a few pages and caps of a few units, so that every limit is met."""
    page = draw(st.integers(1, 4))
    device = draw(st.integers(4, 24))
    return CacheConfig(
        page_size=page,
        device_pages=device,
        staging_pages=draw(st.integers(2, 12)),
        max_context_tokens=page * draw(st.integers(1, device)),
        prefetch_threshold_tokens=page * draw(st.integers(0, 3)),
        prefetch_policy=draw(st.sampled_from(PrefetchPolicy)),
        prefetch_timeout_base_ms=draw(st.integers(0, 30)),
        prefetch_timeout_per_ki_token_ms=draw(st.sampled_from((0, 250, 4000))),
        prefetch_hard_max_ms=draw(st.integers(1, 60)),
        retry_max_attempts=draw(st.integers(0, 3)),
        retry_poll_interval_passes=draw(st.integers(0, 3)),
        max_defers=draw(st.integers(1, 3)),
        park_cap=draw(st.integers(1, 5)),
        chance_quantum_ms=draw(st.integers(1, 10)),
        bypass_cap=draw(st.integers(0, 2)),
        anchor_lock_cap=draw(st.sampled_from((0.0, 0.25, 0.5, 1.0))),
        load_pool_usage_fraction=draw(st.sampled_from((0.0, 0.5, 0.9, 1.0))),
        write_staging_fraction=draw(st.sampled_from((0.0, 0.2, 1.0))),
        write_margin_fraction=draw(st.sampled_from((0.0, 0.1, 0.5))),
        io_batch_pages=draw(st.integers(1, 6)),
        write_backlog_factor=draw(st.integers(0, 2)),
        belief_entries=draw(st.sampled_from((2, 1000))),
        negative_entries=draw(st.sampled_from((1, 100))),
        negative_ttl_ms=draw(st.integers(0, 30)),
        history_length=8,
        debug=True,
        poison=True,
    )


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Labels of a prompt's pages: a trunk that most prompts share, and a branch."""
    length = draw(st.integers(0, MAX_PROMPT_PAGES))
    fork = draw(st.integers(0, length))
    return "t" * fork + draw(st.sampled_from("ab")) * (length - fork)


class PipelineMachine(RuleBasedStateMachine):
    """One rule does one act, drawn from those that are possible now and switched on in this run (its own swarm:
    rules with preconditions of their own would leave a third of the runs with nothing to do)."""

    configs: st.SearchStrategy[CacheConfig] = small_configs()
    rows_seen: set[tuple[str, int]] | None = None
    """Set it to collect (table, row id) of every row that fires, over all runs."""

    def __init__(self) -> None:
        super().__init__()
        self.config = CacheConfig(device_pages=1, staging_pages=1)
        self.sim = Sim(self.config)
        self.enabled: frozenset[str] = frozenset(ACTS)
        self.targets: dict[str, int] = {}  # request -> tokens of its prompt and output so far
        self.output = 0  # output pages made so far; their labels are unique

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.config = data.draw(self.configs, label="config")
        stored: set[PageKey] = set()
        for prompt in data.draw(st.lists(prompts(), max_size=3), label="stored"):
            stored.update(chain(*prompt))
        self.sim = Sim(self.config, stored)
        if self.rows_seen is not None:
            watch_rows(self.sim, self.rows_seen)
        off = data.draw(st.sets(st.sampled_from(sorted(ACTS)), max_size=len(ACTS) // 2), label="switched off")
        self.enabled = frozenset(ACTS) - off

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        possible = [name for name, (_, can) in ACTS.items() if can(self)]
        wanted = [name for name in possible if name in self.enabled] or possible
        name = data.draw(st.sampled_from([n for n in wanted for _ in range(_WEIGHT.get(n, 1))]), label="act")
        act, _ = ACTS[name]
        note(f"{name}: {act(self, data)}")
        self._limits()

    def _limits(self) -> None:
        """What must hold beyond the books: no attempt asks storage more often than its caps allow."""
        lookups = 1 + self.config.retry_max_attempts
        over = {who: n for who, n in self.sim.asked.items() if n > lookups}
        assert not over, f"look-ups beyond {lookups}: {over}"
        pinned, cap = self.plane_pinned(), self.config.pin_cap_tokens
        assert pinned <= cap, f"{pinned} tokens pinned, cap {cap}"

    def plane_pinned(self) -> int:
        return self.sim.plane.parts.full.pinned.value

    # ── who is where ─────────────────────────────────────────────────────────────────────────────────

    def live(self) -> list[Attempt]:
        return sorted(self.sim.plane.parts.attempts, key=lambda a: a.rid)

    def waiting(self) -> list[Attempt]:
        return [a for a in self.live() if a.state < State.LOADING]

    def running(self) -> list[Attempt]:
        return [a for a in self.live() if a.state >= State.LOADING]

    def ready(self) -> list[Attempt]:
        return [a for a in self.waiting() if self.sim.plane.parts.is_candidate(a)]

    def free_rids(self) -> list[str]:
        return [rid for rid in RIDS if self.sim.plane.parts.attempts.find(rid) is None]

    def reads(self) -> list[int]:
        return self.sim.of_kind(OpKind.READ)

    def _one(self, data: st.DataObject, attempts: list[Attempt]) -> Attempt:
        rid = data.draw(st.sampled_from([a.rid for a in attempts]), label="request")
        return self.sim.plane.parts.attempts.get(rid)

    # ── the client and the scheduler ─────────────────────────────────────────────────────────────────

    def submit(self, data: st.DataObject) -> str:
        rid = data.draw(st.sampled_from(self.free_rids()), label="rid")
        prompt = data.draw(prompts(), label="prompt")
        extra = data.draw(st.integers(0 if prompt else 1, self.config.page_size), label="extra tokens")
        self.sim.submit(rid, prompt, extra, hashed=data.draw(st.booleans(), label="hashed"),
                        priority=data.draw(st.integers(0, 1), label="priority"))  # fmt: skip
        self.targets[rid] = len(prompt) * self.config.page_size + extra
        return f"{rid} {prompt}+{extra}"

    def tick(self, data: st.DataObject) -> str:
        ms = data.draw(st.sampled_from((0, 1, 3, 10, 40)), label="ms")
        self._tick(ms)
        return f"{ms} ms"

    def _tick(self, ms: int) -> None:
        self.sim.tick(ms)
        for rid in self.sim.plane.take_restarted():
            self.targets[rid] = self.sim.plane.parts.attempts.get(rid).num_tokens

    def admit(self, data: st.DataObject) -> str:
        attempt = self._one(data, self.ready())
        candidate = self.sim.plane.consider(attempt)
        self.sim.pump()
        if candidate is None:
            return f"{attempt.rid} has to wait"
        page = self.config.page_size
        least = candidate.cached_pages * page + 1
        end = data.draw(st.integers(min(least, attempt.num_tokens), attempt.num_tokens), label="end tokens")
        admitted = self.sim.plane.admit(candidate, end)
        self.sim.pump()
        return f"{attempt.rid} up to {end} tokens: {admitted}"

    def defer(self, data: st.DataObject) -> str:
        attempt = self._one(data, self.ready())
        candidate = self.sim.plane.consider(attempt)
        if candidate is not None:
            self.sim.plane.defer(candidate)
        self.sim.pump()
        return attempt.rid

    def compute(self, data: st.DataObject) -> str:
        return self._compute(self._one(data, self.running()))

    def _compute(self, attempt: Attempt) -> str:
        """A forward: all tokens that have device pages get their KV."""
        pages = attempt.published_pages + len(attempt.device)
        done = min(self.targets[attempt.rid], pages * self.config.page_size)
        self.sim.compute(attempt.rid, done)
        return f"{attempt.rid} up to {done} tokens"

    def extend(self, data: st.DataObject) -> str:
        """The next chunk of the prompt, or output."""
        attempt = self._one(data, self.running())
        rid, page = attempt.rid, self.config.page_size
        have = (attempt.published_pages + len(attempt.device)) * page
        end = have + data.draw(st.integers(1, 3 * page), label="tokens")
        if not self.sim.call(lambda plane: plane.extend(rid, end)):
            return f"{rid} finds no room for {end} tokens"
        self.targets[rid] = max(self.targets[rid], end)
        while len(attempt.keys) < end // page:
            self.output += 1
            attempt.keys = self.sim.prompts[rid] = (*attempt.keys, *chain(attempt.keys, self.output)[-1:])
        return f"{rid} to {end} tokens"

    def finish(self, data: st.DataObject) -> str:
        rid = self._one(data, self.running()).rid
        self.sim.call(lambda plane: plane.finish(rid))
        return rid

    def abort(self, data: st.DataObject) -> str:
        rid = self._one(data, self.live()).rid
        assert self.sim.call(lambda plane: plane.abort(rid))
        assert not self.sim.call(lambda plane: plane.abort(rid)), "a second abort must find nothing"
        return rid

    def reject(self, data: st.DataObject) -> str:
        rid = self._one(data, self.waiting()).rid
        self.sim.call(lambda plane: plane.reject(rid))
        return rid

    def retract(self, data: st.DataObject) -> str:
        attempt = self._one(data, self.live())
        rid, tokens = attempt.rid, self.targets[attempt.rid]
        known = attempt.keys_known and data.draw(st.booleans(), label="keys known")
        keys = attempt.keys[: tokens // self.config.page_size] if known else None
        before = attempt.number
        self.sim.call(lambda plane: plane.retract(rid, tokens, keys))
        assert self.sim.plane.parts.attempts.get(rid).number == before + 1
        return rid

    # ── the outside ──────────────────────────────────────────────────────────────────────────────────

    def _any_op(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(list(self.sim.outstanding)), label="operation")

    def answer(self, data: st.DataObject) -> str:
        return _brief(self.sim.answer(self._any_op(data)))

    def answer_all(self, data: st.DataObject) -> str:
        count = len(self.sim.outstanding)
        self.sim.answer_all()
        return f"{count} operations"

    def answer_part(self, data: st.DataObject) -> str:
        op = self._any_op(data)
        keys = getattr(self.sim.outstanding[op], "keys", ())
        least = self.sim.landed.get(op, 0)
        return _brief(self.sim.answer(op, pages=data.draw(st.integers(least, max(least, len(keys))), label="pages")))

    def answer_failed(self, data: st.DataObject) -> str:
        op = self._any_op(data)
        return _brief(self.sim.answer(op, pages=self.sim.landed.get(op, 0), ok=False))

    def lose(self, data: st.DataObject) -> str:
        op = self._any_op(data)
        self.sim.lose(op)
        return str(op)

    def progress(self, data: st.DataObject) -> str:
        op = data.draw(st.sampled_from(self.reads()), label="operation")
        command = self.sim.outstanding[op]
        assert isinstance(command, Read)
        pages = data.draw(st.integers(0, len(command.pages)), label="pages")
        self.sim.progress(op, pages)
        return f"{op}: {pages} of {len(command.pages)} pages"

    def repeat(self, data: st.DataObject) -> str:
        completion = self.sim.past[data.draw(st.integers(0, len(self.sim.past) - 1), label="completion")]
        self.sim.repeat(completion)
        return _brief(completion)

    def lose_keys(self, data: st.DataObject) -> str:
        prompt = data.draw(prompts(), label="prompt")
        self.sim.stored.difference_update(chain(*prompt)[-1:])
        return f"last page of {prompt}"

    def store_keys(self, data: st.DataObject) -> str:
        prompt = data.draw(prompts(), label="prompt")
        self.sim.stored.update(chain(*prompt))
        return prompt

    # ── operators and pressure ───────────────────────────────────────────────────────────────────────

    def evict(self, data: st.DataObject) -> str:
        """Other users of the device pool take pages and give them back."""
        full = self.sim.plane.parts.full
        count = data.draw(st.integers(1, full.tree.evictable), label="pages")
        pages = full.take_device(full.device.available + count)
        assert pages is not None, f"{count} evictable pages were not had"
        full.give_device(pages)
        self.sim.pump()
        return f"{count} pages"

    def flush(self, data: st.DataObject) -> str:
        numbers = {a.rid: a.number for a in self.live()}
        self.sim.call(lambda plane: plane.flush())
        assert {a.rid: a.number - 1 for a in self.live()} == numbers, "a flush restarts every live request"
        assert self.sim.plane.parts.full.tree.resident == 0
        for rid in self.sim.plane.take_restarted():
            self.targets[rid] = self.sim.plane.parts.attempts.get(rid).num_tokens
        return f"{len(numbers)} restarted"

    def detach(self, data: st.DataObject) -> str:
        self.sim.call(lambda plane: plane.detach())
        for attempt in self.waiting():
            assert attempt.state in (State.STAGED, State.RECOMPUTING), f"{attempt.describe()} after a detach"
        return ""

    def attach(self, data: st.DataObject) -> str:
        self.sim.call(lambda plane: plane.attach())
        return ""

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────

    def teardown(self) -> None:
        """The outside becomes honest; every request ends within the bound, and nothing stays owned."""
        self._run_dry()
        found = self.sim.leaks() + self.sim.stale_entries()
        assert not found, f"left behind: {found}"
        event(f"failed loads: {min(2, self.sim.plane.parts.accounts.stats['failed_loads'])}")

    def _run_dry(self) -> None:
        config, quantum = self.config, max(1, self.config.chance_quantum_ms)
        longest = max(self.targets.values(), default=1)
        # One bound for each request in turn, one pass for it to run, and the queue of writes page by page.
        limit = (len(RIDS) + 1) * (waiting_bound(config, longest).passes(quantum) + 2) + 4 * config.device_pages
        for _ in range(limit):
            if self.sim.plane.is_idle() and not self.sim.inbox:
                return
            self.sim.answer_all()
            self._tick(quantum)
            for attempt in self.running():
                if not attempt.load_ops:
                    self._compute(attempt)
                    self.sim.plane.finish(attempt.rid)
            self._admit_all()
        raise AssertionError(f"not done after {limit} passes: {[a.describe() + a.state_name for a in self.live()]}")

    def _admit_all(self) -> None:
        """An engine that admits whatever fits, refuses holds when nothing runs, and rejects what can never fit."""
        for attempt in self.ready():
            if -(-attempt.num_tokens // self.config.page_size) > self.config.device_pages:
                self.sim.plane.reject(attempt.rid)
                continue
            candidate = self.sim.plane.consider(attempt)
            if candidate is None:
                continue
            if self.sim.plane.admit(candidate, attempt.num_tokens) is None and not self.running():
                self.sim.plane.defer(candidate)
        self.sim.pump()


def watch_rows(sim: Sim, seen: set[tuple[str, int]]) -> None:
    """Collect (table, row id) of every transition of this simulation into `seen`."""
    parts = sim.plane.parts
    parts.observer = lambda attempt, row, argument: seen.add(("request", row.id))
    parts.ops.machine.listener = lambda op, row, argument: seen.add(("operation", row.id))
    parts.backup.machine.listener = lambda span, row, argument: seen.add(("write_span", row.id))


def _brief(completion: Completion) -> str:
    shown = f"{len(completion.keys)} keys" if isinstance(completion, HashDone) else completion[1:]
    return f"{type(completion).__name__} {completion.op} {shown}"


def _always(machine: PipelineMachine) -> bool:
    return True


def _outstanding(machine: PipelineMachine) -> bool:
    return bool(machine.sim.outstanding)


def _has(what: Callable[[PipelineMachine], list[T]]) -> Callable[[PipelineMachine], bool]:
    return lambda machine: bool(what(machine))


Act = Callable[[PipelineMachine, st.DataObject], str]

ACTS: dict[str, tuple[Act, Callable[[PipelineMachine], bool]]] = {
    "submit": (PipelineMachine.submit, _has(PipelineMachine.free_rids)),
    "tick": (PipelineMachine.tick, _always),
    "admit": (PipelineMachine.admit, _has(PipelineMachine.ready)),
    "defer": (PipelineMachine.defer, _has(PipelineMachine.ready)),
    "compute": (PipelineMachine.compute, _has(PipelineMachine.running)),
    "extend": (PipelineMachine.extend, _has(PipelineMachine.running)),
    "finish": (PipelineMachine.finish, _has(PipelineMachine.running)),
    "abort": (PipelineMachine.abort, _has(PipelineMachine.live)),
    "reject": (PipelineMachine.reject, _has(PipelineMachine.waiting)),
    "retract": (PipelineMachine.retract, _has(PipelineMachine.live)),
    "answer": (PipelineMachine.answer, _outstanding),
    "answer_all": (PipelineMachine.answer_all, _outstanding),
    "answer_part": (PipelineMachine.answer_part, _outstanding),
    "answer_failed": (PipelineMachine.answer_failed, _outstanding),
    "lose": (PipelineMachine.lose, _outstanding),
    "progress": (PipelineMachine.progress, _has(PipelineMachine.reads)),
    "repeat": (PipelineMachine.repeat, lambda machine: bool(machine.sim.past)),
    "lose_keys": (PipelineMachine.lose_keys, _always),
    "store_keys": (PipelineMachine.store_keys, _always),
    "evict": (PipelineMachine.evict, lambda machine: machine.sim.plane.parts.full.tree.evictable > 0),
    "flush": (PipelineMachine.flush, _always),
    "detach": (PipelineMachine.detach, lambda machine: machine.sim.plane.parts.storage_on),
    "attach": (PipelineMachine.attach, lambda machine: not machine.sim.plane.parts.storage_on),
}
_WEIGHT = {"submit": 4, "tick": 6, "admit": 5, "compute": 3, "answer": 4, "answer_all": 3}
