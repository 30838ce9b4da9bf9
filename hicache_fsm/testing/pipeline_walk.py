"""`Pipeline`: a simulation, and all acts that a hostile outside can do to it.

Each step is one act of a scheduler, a client, a store, a copy engine or an operator: requests come, are
admitted, grow, are retracted and aborted; operations are answered fully, partly, with failure, twice, late or never;
pages are evicted under waiting requests; storage loses keys, is detached and attached; the tree is flushed. After
each step all books are recounted and all bytes compared (`Sim.check`). `wind_up` answers everything outstanding, and
every request must end within the bound of `hicache_fsm.control.termination`, with nothing left owned.

`random_walk` makes the choices with a seeded generator; `pipeline_machine` leaves them to Hypothesis.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from hicache_fsm.config import CacheConfig, PrefetchPolicy
from hicache_fsm.control.termination import waiting_bound
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.table import State
from hicache_fsm.ports import Completion, HashDone, Read
from hicache_fsm.testing.script import to_scenario
from hicache_fsm.testing.sim import Sim, chain

T = TypeVar("T")
Prompt = str
"""One letter a page."""

RIDS = tuple(f"r{i}" for i in range(6))
"""Request ids are used again once their request has ended, so that long runs keep doing something."""

MAX_PROMPT_PAGES = 14


class Choose(Protocol):
    """Where choices come from: Hypothesis, or a seeded generator."""

    def number(self, what: str, least: int, most: int) -> int: ...

    def of(self, what: str, options: Sequence[T]) -> T: ...


def small_config(choose: Choose) -> CacheConfig:
    """Pools of a few pages and caps of a few units, so that every limit is met."""
    number, of = choose.number, choose.of
    page = number("page_size", 1, 4)
    device = number("device_pages", 4, 24)
    return CacheConfig(
        page_size=page,
        device_pages=device,
        staging_pages=number("staging_pages", 2, 12),
        max_context_tokens=page * number("max_context_pages", 1, device),
        prefetch_threshold_tokens=page * of("threshold_pages", (0, 1, 1, 3)),
        prefetch_policy=of("policy", tuple(PrefetchPolicy)),
        prefetch_timeout_base_ms=number("timeout_base_ms", 0, 30),
        prefetch_timeout_per_ki_token_ms=of("timeout_per_ki_token_ms", (0, 250, 4000)),
        prefetch_hard_max_ms=of("hard_max_ms", (1, 20, 1000, 1000)),
        retry_max_attempts=number("retry_max_attempts", 0, 3),
        retry_poll_interval_passes=number("poll_interval", 0, 3),
        max_defers=number("max_defers", 1, 3),
        park_cap=number("park_cap", 1, 5),
        chance_quantum_ms=number("chance_quantum_ms", 1, 10),
        bypass_cap=number("bypass_cap", 0, 2),
        anchor_lock_cap=of("anchor_lock_cap", (0.0, 0.25, 0.5, 1.0)),
        load_pool_usage_fraction=of("load_pool_usage_fraction", (0.0, 0.5, 0.9, 1.0)),
        write_staging_fraction=of("write_staging_fraction", (0.0, 0.2, 1.0)),
        write_margin_fraction=of("write_margin_fraction", (0.0, 0.1, 0.5)),
        io_batch_pages=number("io_batch_pages", 1, 6),
        write_backlog_factor=number("write_backlog_factor", 0, 2),
        belief_entries=of("belief_entries", (2, 1000)),
        negative_entries=of("negative_entries", (1, 100)),
        negative_ttl_ms=number("negative_ttl_ms", 0, 30),
        history_length=8,
        debug=True,
        poison=True,
    )


class Pipeline:
    """A simulation and the acts that can be done to it. Each act returns what it did, for the report."""

    def __init__(self, choose: Choose) -> None:
        self.config = self.configure(choose)
        self.sim = Sim(self.config, record=True)
        self.targets: dict[str, int] = {}  # request -> tokens of its prompt and output so far
        self.output = 0  # output pages made so far; their labels are unique
        for _ in range(choose.number("stored prompts", 0, 3)):
            self.sim.store_has(self.prompt(choose))
        off = choose.number("acts switched off", 0, len(ACTS) // 2)
        self.enabled = set(ACTS)
        for _ in range(off):
            self.enabled.discard(choose.of("switched off", tuple(ACTS)))

    def configure(self, choose: Choose) -> CacheConfig:
        return small_config(choose)

    @staticmethod
    def prompt(choose: Choose) -> Prompt:
        """A trunk that all prompts share, and mostly short branches."""
        trunk = choose.number("on the trunk", 0, MAX_PROMPT_PAGES - 4)
        return "t" * trunk + choose.of("branch", "ab") * choose.of("on the branch", (0, 0, 1, 2, 4))

    def scenario(self, title: str, seed: int = 0) -> str:
        """Everything that was done so far, for `hicache-fsm run-scenario`."""
        assert self.sim.script is not None
        return to_scenario(self.config, self.sim.script, title, seed)

    def step(self, choose: Choose) -> str:
        """One act of those that are possible now and switched on in this run: a swarm of its own, for rules with
        preconditions of their own would leave a third of the runs with nothing to do."""
        possible = [name for name, (_, can) in ACTS.items() if can(self)]
        wanted = [name for name in possible if name in self.enabled] or possible
        name = choose.of("act", [n for n in wanted for _ in range(_WEIGHT.get(n, 1))])
        done = ACTS[name][0](self, choose)
        self._limits()
        return f"{name}: {done}"

    def _limits(self) -> None:
        """What must hold beyond the books: no attempt asks storage more often than its caps allow."""
        lookups = 1 + self.config.retry_max_attempts
        over = {who: n for who, n in self.sim.asked.items() if n > lookups}
        for rid, _ in over:
            self.sim.say(f"expect lookups of {rid} <= {lookups}")
        assert not over, f"look-ups beyond {lookups}: {over}"

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

    def loads(self) -> list[int]:
        return self.sim.of_kind(OpKind.LOAD)

    def reads(self) -> list[int]:
        return self.sim.of_kind(OpKind.READ)

    def _one(self, choose: Choose, attempts: list[Attempt]) -> Attempt:
        rid = choose.of("request", [a.rid for a in attempts])
        return self.sim.plane.parts.attempts.get(rid)

    # ── the client and the scheduler ─────────────────────────────────────────────────────────────────

    def submit(self, choose: Choose) -> str:
        rid = choose.of("rid", self.free_rids())
        prompt = self.prompt(choose)
        extra = choose.number("extra tokens", 0 if prompt else 1, self.config.page_size)
        self.sim.submit(rid, prompt, extra, hashed=choose.of("hashed", (False, True)),
                        priority=choose.number("priority", 0, 1))  # fmt: skip
        self.targets[rid] = len(prompt) * self.config.page_size + extra
        return f"{rid} {prompt}+{extra}"

    def tick(self, choose: Choose) -> str:
        ms = choose.of("ms", (0, 1, 3, 10, 40))
        self._tick(ms)
        return f"{ms} ms"

    def _tick(self, ms: int) -> None:
        self.sim.tick(ms)
        for rid in self.sim.plane.take_restarted():
            self.targets[rid] = self.sim.plane.parts.attempts.get(rid).num_tokens

    def admit(self, choose: Choose) -> str:
        attempt = self._one(choose, self.ready())
        candidate = self.sim.plane.consider(attempt)
        self.sim.pump()
        if candidate is None:
            return f"{attempt.rid} has to wait"
        page = self.config.page_size
        least = candidate.cached_pages * page + 1
        end = choose.number("end tokens", min(least, attempt.num_tokens), attempt.num_tokens)
        admitted = self.sim.plane.admit(candidate, end)
        self.sim.pump()
        return f"{attempt.rid} up to {end} tokens: {admitted}"

    def admit_all(self, choose: Choose) -> str:
        """One batch: whatever fits, with its whole prompt."""
        admitted = [attempt.rid for attempt in self.ready() if self.sim.admit(attempt.rid)]
        return " ".join(admitted)

    def defer(self, choose: Choose) -> str:
        attempt = self._one(choose, self.ready())
        candidate = self.sim.plane.consider(attempt)
        if candidate is not None:
            self.sim.plane.defer(candidate)
        self.sim.pump()
        return attempt.rid

    def compute(self, choose: Choose) -> str:
        return self._compute(self._one(choose, self.running()))

    def _compute(self, attempt: Attempt) -> str:
        """A forward: all tokens that have device pages get their KV."""
        pages = attempt.published_pages + len(attempt.device)
        done = min(self.targets[attempt.rid], pages * self.config.page_size)
        self.sim.compute(attempt.rid, done)
        return f"{attempt.rid} up to {done} tokens"

    def extend(self, choose: Choose) -> str:
        """The next chunk of the prompt, or output."""
        attempt = self._one(choose, self.running())
        rid, page = attempt.rid, self.config.page_size
        have = (attempt.published_pages + len(attempt.device)) * page
        end = have + choose.number("tokens", 1, 3 * page)
        if not self.sim.call(lambda plane: plane.extend(rid, end)):
            return f"{rid} finds no room for {end} tokens"
        self.targets[rid] = max(self.targets[rid], end)
        while len(attempt.keys) < end // page:
            self.output += 1
            attempt.keys = self.sim.prompts[rid] = (*attempt.keys, *chain(attempt.keys, self.output)[-1:])
        return f"{rid} to {end} tokens"

    def finish(self, choose: Choose) -> str:
        rid = self._one(choose, self.running()).rid
        self.sim.call(lambda plane: plane.finish(rid))
        return rid

    def abort(self, choose: Choose) -> str:
        rid = self._one(choose, self.live()).rid
        assert self.sim.call(lambda plane: plane.abort(rid))
        assert not self.sim.call(lambda plane: plane.abort(rid)), "a second abort must find nothing"
        return rid

    def reject(self, choose: Choose) -> str:
        rid = self._one(choose, self.waiting()).rid
        self.sim.call(lambda plane: plane.reject(rid))
        return rid

    def retract(self, choose: Choose) -> str:
        attempt = self._one(choose, self.live())
        rid, tokens = attempt.rid, self.targets[attempt.rid]
        known = attempt.keys_known and choose.of("keys known", (False, True))
        keys = attempt.keys[: tokens // self.config.page_size] if known else None
        before = attempt.number
        self.sim.call(lambda plane: plane.retract(rid, tokens, keys))
        assert self.sim.plane.parts.attempts.get(rid).number == before + 1
        return rid

    # ── the outside ──────────────────────────────────────────────────────────────────────────────────

    def _any_op(self, choose: Choose) -> int:
        return choose.of("operation", list(self.sim.outstanding))

    def answer(self, choose: Choose) -> str:
        return _brief(self.sim.answer(self._any_op(choose)))

    def answer_all(self, choose: Choose) -> str:
        count = len(self.sim.outstanding)
        self.sim.answer_all()
        return f"{count} operations"

    def answer_part(self, choose: Choose) -> str:
        op = self._any_op(choose)
        keys = getattr(self.sim.outstanding[op], "keys", ())
        least = self.sim.landed.get(op, 0)
        return _brief(self.sim.answer(op, pages=choose.number("pages", least, max(least, len(keys)))))

    def answer_failed(self, choose: Choose) -> str:
        op = self._any_op(choose)
        return _brief(self.sim.answer(op, pages=self.sim.landed.get(op, 0), ok=False))

    def fail_load(self, choose: Choose) -> str:
        return _brief(self.sim.answer(choose.of("load", self.loads()), ok=False))

    def lose(self, choose: Choose) -> str:
        op = self._any_op(choose)
        self.sim.lose(op)
        return str(op)

    def progress(self, choose: Choose) -> str:
        op = choose.of("operation", self.reads())
        command = self.sim.outstanding[op]
        assert isinstance(command, Read)
        pages = choose.number("pages", 0, len(command.pages))
        self.sim.progress(op, pages)
        return f"{op}: {pages} of {len(command.pages)} pages"

    def repeat(self, choose: Choose) -> str:
        completion = self.sim.past[choose.number("completion", 0, len(self.sim.past) - 1)]
        self.sim.repeat(completion)
        return _brief(completion)

    def lose_keys(self, choose: Choose) -> str:
        prompt = self.prompt(choose)
        self.sim.store_loses(prompt)
        return f"last page of {prompt}"

    def store_keys(self, choose: Choose) -> str:
        prompt = self.prompt(choose)
        self.sim.store_has(prompt)
        return prompt

    # ── operators and pressure ───────────────────────────────────────────────────────────────────────

    def evict(self, choose: Choose) -> str:
        """Other users of the device pool take pages and give them back."""
        count = choose.number("pages", 1, self.sim.plane.parts.full.tree.evictable)
        assert self.sim.evict(count), f"{count} evictable pages were not had"
        return f"{count} pages"

    def flush(self, choose: Choose) -> str:
        numbers = {a.rid: a.number for a in self.live()}
        self.sim.call(lambda plane: plane.flush())
        assert {a.rid: a.number - 1 for a in self.live()} == numbers, "a flush restarts every live request"
        assert self.sim.plane.parts.full.tree.resident == 0
        for rid in self.sim.plane.take_restarted():
            self.targets[rid] = self.sim.plane.parts.attempts.get(rid).num_tokens
        return f"{len(numbers)} restarted"

    def detach(self, choose: Choose) -> str:
        self.sim.call(lambda plane: plane.detach())
        for attempt in self.waiting():
            assert attempt.state in (State.STAGED, State.RECOMPUTING), f"{attempt.describe()} after a detach"
        return ""

    def attach(self, choose: Choose) -> str:
        self.sim.call(lambda plane: plane.attach())
        return ""

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────

    def wind_up(self) -> None:
        """The outside becomes honest; every request ends within the bound, and nothing stays owned."""
        self._run_dry()
        self.sim.say("expect no leaks")
        found = self.sim.leaks() + self.sim.stale_entries()
        assert not found, f"left behind: {found}"

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
        self.sim.say("expect idle")
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


def _always(pipeline: Pipeline) -> bool:
    return True


def _outstanding(pipeline: Pipeline) -> bool:
    return bool(pipeline.sim.outstanding)


def _has(what: Callable[[Pipeline], list[T]]) -> Callable[[Pipeline], bool]:
    return lambda pipeline: bool(what(pipeline))


Act = Callable[[Pipeline, Choose], str]

ACTS: dict[str, tuple[Act, Callable[[Pipeline], bool]]] = {
    "submit": (Pipeline.submit, _has(Pipeline.free_rids)),
    "tick": (Pipeline.tick, _always),
    "admit": (Pipeline.admit, _has(Pipeline.ready)),
    "admit_all": (Pipeline.admit_all, _has(Pipeline.ready)),
    "defer": (Pipeline.defer, _has(Pipeline.ready)),
    "compute": (Pipeline.compute, _has(Pipeline.running)),
    "extend": (Pipeline.extend, _has(Pipeline.running)),
    "finish": (Pipeline.finish, _has(Pipeline.running)),
    "abort": (Pipeline.abort, _has(Pipeline.live)),
    "reject": (Pipeline.reject, _has(Pipeline.waiting)),
    "retract": (Pipeline.retract, _has(Pipeline.live)),
    "answer": (Pipeline.answer, _outstanding),
    "answer_all": (Pipeline.answer_all, _outstanding),
    "answer_part": (Pipeline.answer_part, _outstanding),
    "answer_failed": (Pipeline.answer_failed, _outstanding),
    "fail_load": (Pipeline.fail_load, _has(Pipeline.loads)),
    "lose": (Pipeline.lose, _outstanding),
    "progress": (Pipeline.progress, _has(Pipeline.reads)),
    "repeat": (Pipeline.repeat, lambda pipeline: bool(pipeline.sim.past)),
    "lose_keys": (Pipeline.lose_keys, _always),
    "store_keys": (Pipeline.store_keys, _always),
    "evict": (Pipeline.evict, lambda pipeline: pipeline.sim.plane.parts.full.tree.evictable > 0),
    "flush": (Pipeline.flush, _always),
    "detach": (Pipeline.detach, lambda pipeline: pipeline.sim.plane.parts.storage_on),
    "attach": (Pipeline.attach, lambda pipeline: not pipeline.sim.plane.parts.storage_on),
}
_WEIGHT = {
    "submit": 5, "tick": 12, "admit": 4, "admit_all": 4, "compute": 4, "extend": 2, "finish": 3, "answer": 5,
    "answer_all": 8, "progress": 2, "fail_load": 2, "evict": 4, "store_keys": 3,
}  # fmt: skip
"""How often an act is chosen; those that are not named have 1."""


class RandomChoices:
    """Choices of a seeded generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def number(self, what: str, least: int, most: int) -> int:
        return self.random.randint(least, most)

    def of(self, what: str, options: Sequence[T]) -> T:
        return self.random.choice(options)


def random_walk(
    seed: int, steps: int, pipeline: type[Pipeline] = Pipeline, seen: set[tuple[str, int]] | None = None
) -> None:
    """One run of `steps` acts. Raises what the run raises, with the seed and the last acts as a note; collects the
    rows that fired in `seen`, as (table, row id)."""
    choose = RandomChoices(seed)
    run = pipeline(choose)
    if seen is not None:
        watch_rows(run.sim, seen)
    done: list[str] = []
    try:
        for _ in range(steps):
            done.append(run.step(choose))
        run.wind_up()
    except BaseException as error:
        text = "\n  ".join([f"random walk of seed {seed}; {run.config}", *done[-40:]])
        scenario = run.scenario(f"random walk of seed {seed}", seed)
        raise RuntimeError(f"{text}\nAs a scenario:\n{scenario}") from error
