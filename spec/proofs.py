"""Proofs with z3 about the request table itself, for every value of every cap and any number of requests.

The rows, guards and targets are read from `REQUEST_TABLE`; only what a guard and an effect *mean* is written
here, once, as arithmetic on a ledger (`GUARDS`, `EFFECTS`), together with what the control plane does around an
event (`BEFORE`, `AFTER`). The same functions run on Python integers: `tests/test_proofs.py` compares them with the
real control plane, transition by transition. What is proved about each row, with retry cap, defer cap, park cap,
staging rows, pin budget and device pages left symbolic:

    invariant   ledgers, counters, clock, retry entry and parked place are as the state demands, and stay so
    conserved   free + owned is the same before and after, for staging, pins, device pages and found tokens
    rank        the row lowers `rank` (a second `close` of a hold, `REPEATABLE`, changes nothing at all)

and about the whole: every waiting state has an event that is owed and legal (`owed`), and every transition row
can be taken (vacuity). Why this covers any number of requests: a row touches one attempt's ledger, the free lists
and the operation that it hands rows to. What other attempts and operations own is one symbolic number, which no
row changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import z3

from hicache_fsm.lifecycle.model import Kind, Row, Table
from hicache_fsm.lifecycle.table import ADMITTED, FINAL, REQUEST_TABLE, TIMED, WAITING, Event, State

Value = Any
"""An int or bool of Python, or a term of z3: the model runs on both."""

S, E = State, Event
LOOKUP_OP, READ_OP, LOAD_OP = 1, 2, 3  # kinds of an attempt's own operation (0: none)
POLL, REFETCH = 1, 2  # kinds of its retry entry (0: none)
COUNTERS = (
    "state", "fresh", "open", "ret", "defers", "chances", "armed", "timed", "joined", "waits", "op", "rows", "got",
    "staging", "pin", "device", "lock", "unresolved",
)  # fmt: skip
SHARED = (
    "free", "op_staging", "others_staging", "pinned", "others_pinned", "dfree", "tree", "others_device",
    "found", "op_unresolved", "closed_tokens", "others_unresolved",
)  # fmt: skip
CAPS = ("retry_cap", "poll_cap", "defer_cap", "park_cap", "interval", "staging_total", "pin_cap", "device_total")
FLAGS = frozenset(("fresh", "open", "timed", "joined", "waits", "lock"))
"""`waits`: listed in the waiting queue. `fresh`: no look-up yet. `op_*`: what passed to operations. `tree`: pages
that others can match. `closed_tokens`: spliced, or unfulfilled with a reason. Tokens are counted in pages."""


# ── logic that works on Python values and on terms ───────────────────────────────────────────────────


def both(*parts: Value) -> Value:
    if all(isinstance(p, bool) for p in parts):
        return all(parts)
    return z3.And(*parts)


def either(*parts: Value) -> Value:
    if all(isinstance(p, bool) for p in parts):
        return any(parts)
    return z3.Or(*parts)


def no(part: Value) -> Value:
    return not part if isinstance(part, bool) else z3.Not(part)


def same(a: Value, b: Value) -> Value:
    return a == b


def pick(condition: Value, then: Value, otherwise: Value) -> Value:
    if isinstance(condition, bool):
        return then if condition else otherwise
    return z3.If(condition, then, otherwise)


def among(value: Value, states: Iterable[int]) -> Value:
    if isinstance(value, int):
        return value in {int(s) for s in states}
    return z3.Or(*[value == int(s) for s in states])


def number(flag: Value) -> Value:
    return pick(flag, 1, 0)


@dataclass
class World:
    """One attempt, what it shares with the others, and the caps, by name."""

    values: dict[str, Value] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Value:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def but(self, **changes: Value) -> World:
        return World({**self.values, **changes})

    def waiting_for_storage(self) -> Value:
        return among(self.state, TIMED)


def symbolic() -> World:
    """Any state of affairs."""
    make: dict[str, Value] = {name: z3.Bool(name) if name in FLAGS else z3.Int(name) for name in (*COUNTERS, *SHARED)}
    return World({**make, **{name: z3.Int(name) for name in CAPS}})


# ── what guards and effects mean ─────────────────────────────────────────────────────────────────────

GUARDS: dict[str, Callable[[World, Value], Value]] = {
    "may_poll": lambda w, _: both(w.interval > 0, w.ret < w.poll_cap),
    "may_refetch": lambda w, _: both(w.open, w.ret < w.retry_cap, w.chances + 1 < w.park_cap),
    "usable": lambda w, pages: pages > 0,
    "defers_left": lambda w, _: w.defers + 1 < w.defer_cap,
    "chances_left": lambda w, _: w.chances + 1 < w.park_cap,
    "gate_open": lambda w, _: True,
}
"""The bootstrap gate is taken as open: before it opens nothing is deferred, which spends nothing."""


def _issue_lookup(w: World, _: Value) -> World:
    """Whether the end is known is the caller's knowledge (`assumed`): a known end needs no operation."""
    return w.but(op=pick(w.values.get("assumed", False), 0, LOOKUP_OP))


def _orphan(w: World, _: Value) -> World:
    reads = w.op == READ_OP
    kept = pick(reads, w.got, w.staging)
    return w.but(op=0, op_staging=w.op_staging + pick(reads, w.rows - w.got, 0), staging=kept)


def _keep_landed(w: World, landed: Value) -> World:
    tail = w.staging - landed
    running = w.op == READ_OP
    return w.but(
        op=0, op_staging=w.op_staging + pick(running, tail, 0), free=w.free + pick(running, 0, tail), staging=landed,
        unresolved=w.unresolved - tail, closed_tokens=w.closed_tokens + tail,
    )  # fmt: skip


def _return_hold(w: World, _: Value) -> World:
    return w.but(free=w.free + w.staging, staging=0, pinned=w.pinned - w.pin, pin=0)


def _spend_hold(w: World, load: Value) -> World:
    return _return_hold(w.but(op_staging=w.op_staging + load, staging=w.staging - load), load)


def _return_all(w: World, argument: Value) -> World:
    return _return_hold(w, argument).but(dfree=w.dfree + w.device, device=0, lock=False, op=0)


def _settle(w: World, _: Value) -> World:
    return w.but(closed_tokens=w.closed_tokens + w.unresolved, unresolved=0)


EFFECTS: dict[str, Callable[[World, Value], World]] = {
    "issue_lookup": _issue_lookup,
    "issue_read": lambda w, _: w.but(op=READ_OP, rows=w.staging, got=0),
    "disarm": lambda w, _: w.but(armed=0),
    "arm_poll": lambda w, _: w.but(armed=pick(w.armed == REFETCH, REFETCH, POLL)),
    "arm_refetch": lambda w, _: w.but(armed=REFETCH),
    "run_clock": lambda w, _: w.but(timed=True),
    "hold_clock": lambda w, _: w.but(timed=False),
    "orphan": _orphan,
    "keep_landed": _keep_landed,
    "join_parked": lambda w, _: w.but(joined=True),
    "leave_parked": lambda w, _: w.but(joined=False),
    "return_hold": _return_hold,
    "spend_hold": _spend_hold,
    "settle": _settle,
    "close_storage": lambda w, _: w.but(open=False),
    "count_defer": lambda w, _: w.but(defers=w.defers + 1),
    "count_chance": lambda w, _: w.but(chances=w.chances + 1),
    "leave_queue": lambda w, _: w.but(timed=False, armed=0, joined=False, waits=False),
    "return_all": _return_all,
    "zero_retries": lambda w, _: w.but(ret=0),
}


# ── what the control plane does around an event ──────────────────────────────────────────────────────


class Around(NamedTuple):
    """The state in which `fire` finds the attempt, under a condition."""

    world: World
    condition: Value


def _answered_hit(w: World, argument: Value) -> Around:
    """`PrefetchPipeline.hit`: the look-up has ended (or was assumed), its found tokens are open."""
    hit = z3.Int("hit")
    from_querying = among(w.state, (S.QUERYING,))
    after = w.but(
        op=pick(from_querying, 0, w.op), found=w.found + pick(from_querying, hit, 0),
        unresolved=pick(from_querying, hit, w.unresolved),
    )  # fmt: skip
    return Around(after, z3.And(hit >= 0, z3.Implies(z3.And(from_querying, w.op == 0), hit > 0)))


def _before_commit(w: World, argument: Value) -> Around:
    found = _answered_hit(w, argument)
    return Around(found.world, z3.And(found.condition, z3.Implies(w.state == int(S.QUERYING), found.world.unresolved > 0)))


def _before_grant(w: World, argument: Value) -> Around:
    """`PrefetchPipeline.commit`: rows for the whole hit, and a pin within the budget or none."""
    found = _before_commit(w, argument)
    w = found.world
    rows, pin = z3.Int("rows_taken"), z3.Int("pin_taken")
    taken = w.but(free=w.free - rows, staging=rows, pin=pin, pinned=w.pinned + pin)
    fits = z3.And(rows > 0, rows <= w.free, rows <= w.unresolved, pin >= 0, z3.Implies(pin > 0, w.pinned + pin <= w.pin_cap))
    return Around(taken, z3.And(found.condition, fits))


def _before_read_done(w: World, landed: Value) -> Around:
    """`Answers._read`: the operation has ended; never less has landed than was reported."""
    return Around(w.but(op=0), z3.And(landed >= w.got, landed <= w.rows))


def _before_cut(w: World, landed: Value) -> Around:
    """`ControlPlane._landed`: what a running read has reported."""
    return Around(w, landed == z3.If(w.state == int(S.READING), w.got, 0))


def _before_lookup(w: World, argument: Value) -> Around:
    """`ControlPlane._keys_known` asks once, at the start; `_retry` asks while the cap is not used up."""
    first = z3.And(w.fresh, w.open)
    again = w.ret < w.retry_cap
    return Around(w.but(assumed=z3.Bool("assumed")), z3.If(w.state == int(S.IDLE), first, again))


def _before_admit(w: World, load: Value) -> Around:
    """`ControlPlane.admit`: device pages are taken, the hold's span is published, its load issued."""
    own, evicted = z3.Int("own_pages"), z3.Int("evicted")
    staged = w.state == int(S.STAGED)
    after = w.but(
        dfree=w.dfree + evicted - own - load, tree=w.tree - evicted + load, device=own, lock=z3.Bool("locks"),
        op=z3.If(staged, LOAD_OP, w.op), op_unresolved=w.op_unresolved + load,
        closed_tokens=w.closed_tokens + z3.If(staged, w.unresolved - load, 0),
        unresolved=z3.If(staged, 0, w.unresolved),
    )  # fmt: skip
    sizes = z3.And(own > 0, evicted >= 0, evicted <= w.tree, own + load <= w.dfree + evicted)
    return Around(after, z3.And(sizes, z3.If(staged, z3.And(load > 0, load <= w.staging), load == 0)))


def _before_load_ack(w: World, argument: Value) -> Around:
    """`Answers._loaded`: the load has ended, its rows are back, its tokens spliced."""
    rows, tokens = z3.Int("load_rows"), z3.Int("load_tokens")
    after = w.but(
        op=0, op_staging=w.op_staging - rows, free=w.free + rows, op_unresolved=w.op_unresolved - tokens,
        closed_tokens=w.closed_tokens + tokens,
    )  # fmt: skip
    return Around(after, z3.And(rows >= 0, rows <= w.op_staging, tokens >= 0, tokens <= w.op_unresolved))


def _before_shrank(w: World, argument: Value) -> Around:
    """`ControlPlane._shrank` asks only while storage is open; `plan` finds any hold's base gone."""
    return Around(w, z3.Or(w.state == int(S.STAGED), w.open))


def _before_exhausted(w: World, argument: Value) -> Around:
    return Around(w, w.ret >= w.retry_cap)


BEFORE: dict[Event, Callable[[World, Value], Around]] = {
    E.MISS: _answered_hit,
    E.GRANT: _before_grant,
    E.PARK: _before_commit,
    E.BASE_LOST: _before_commit,
    E.COVERED: _before_commit,
    E.UNSERVABLE: _before_commit,
    E.READ_DONE: _before_read_done,
    E.CUT: _before_cut,
    E.DEADLINE: _before_cut,
    E.LOOKUP: _before_lookup,
    E.ADMIT: _before_admit,
    E.LOAD_ACK: _before_load_ack,
    E.SHRANK: _before_shrank,
    E.EXHAUSTED: _before_exhausted,
}


def after(event: Event, before: World, w: World) -> World:
    """What follows the event: a look-up is the first one, or costs a retry (`ControlPlane._retry`)."""
    if event is not E.LOOKUP:
        return w
    first = before.state == int(S.IDLE)
    return w.but(fresh=False, ret=pick(first, w.ret, w.ret + 1))


# ── what must hold ───────────────────────────────────────────────────────────────────────────────────

HOLDING = (S.READING, S.STAGED)


def invariant(w: World) -> dict[str, Value]:
    """By name. `rank` and these are what `docs/termination.md` argues with."""
    in_state = lambda *states: among(w.state, states)  # noqa: E731
    return {
        "states": both(w.state >= 0, w.state <= int(S.ABORTED)),
        "caps": both(
            0 <= w.ret, w.ret <= w.retry_cap, 0 <= w.defers, w.defers < w.defer_cap, 0 <= w.chances, w.chances < w.park_cap
        ),
        "armed": both(same(w.armed == POLL, in_state(S.PACED)), same(w.armed == REFETCH, in_state(S.REFETCH)),
                      among(w.armed, (0, POLL, REFETCH)), either(w.armed == 0, w.ret < w.retry_cap)),
        "clock": same(w.timed, in_state(*TIMED)),
        "parked": same(w.joined, in_state(S.PARKED)),
        "queue": same(w.waits, in_state(*WAITING)),
        "open": either(w.open, no(in_state(S.PACED, S.REFETCH, *TIMED))),
        "closed": either(no(w.open), no(in_state(S.RECOMPUTING))),
        "fresh": either(no(w.fresh), in_state(S.IDLE, S.REFETCH, S.RECOMPUTING, *ADMITTED, *FINAL)),
        "staging": both(w.staging >= 0, same(w.staging > 0, in_state(*HOLDING))),
        "pin": both(w.pin >= 0, either(w.pin == 0, in_state(*HOLDING))),
        "device": both(w.device >= 0, either(both(w.device == 0, no(w.lock)), in_state(*ADMITTED))),
        "operation": both(
            either(w.op == 0, both(w.op == LOOKUP_OP, in_state(S.QUERYING)), both(w.op == READ_OP, in_state(S.READING)),
                   both(w.op == LOAD_OP, in_state(S.LOADING))),
            either(no(in_state(S.READING)), w.op == READ_OP),
            either(no(in_state(S.LOADING)), w.op == LOAD_OP),
            either(w.op != READ_OP, both(w.rows == w.staging, 0 <= w.got, w.got <= w.rows)),
        ),
        "tokens": both(
            w.unresolved >= 0,
            either(w.unresolved == 0, in_state(S.PARKED, *HOLDING)),
            either(no(in_state(*HOLDING)), w.staging <= w.unresolved),
            either(no(in_state(S.PARKED)), w.unresolved > 0),
        ),
        "rows": both(w.free >= 0, w.op_staging >= 0, w.others_staging >= 0),
        "budget": both(w.pinned <= w.pin_cap, w.others_pinned >= 0),
        "pages": both(w.dfree >= 0, w.tree >= 0, w.others_device >= 0),
    }  # fmt: skip


def conserved(w: World) -> dict[str, Value]:
    """One equation for each resource."""
    return {
        "staging rows": w.free + w.staging + w.op_staging + w.others_staging == w.staging_total,
        "pins": w.pin + w.others_pinned == w.pinned,
        "device pages": w.dfree + w.device + w.tree + w.others_device == w.device_total,
        "found tokens": w.unresolved + w.op_unresolved + w.others_unresolved + w.closed_tokens == w.found,
    }


def legal_caps(w: World) -> Value:
    """What `CacheConfig` demands, and that polls are a share of the retries (`Parts._guards`)."""
    return z3.And(w.retry_cap >= 0, w.poll_cap >= 0, w.poll_cap <= w.retry_cap, w.defer_cap >= 1, w.park_cap >= 1)


PHASE = {
    S.QUERYING: 7, S.PARKED: 6, S.READING: 5, S.STAGED: 4, S.REFETCH: 3, S.PACED: 2, S.IDLE: 1, S.RECOMPUTING: 0,
    S.LOADING: -1, S.RESIDENT: -2, S.TRANSFERRING: -3, S.FINISHED: -4, S.ABORTED: -4,
}  # fmt: skip
CHARGE = 7
"""One look-up, chance or defer is worth more than any way through the phases."""


def rank(w: World) -> Value:
    """What is left to an attempt; only waiting counts, admission ends it."""
    phase: Value = int(PHASE[S.ABORTED])
    for state, weight in PHASE.items():
        phase = pick(w.state == int(state), weight, phase)
    left = number(w.fresh) + (w.retry_cap - w.ret) + (w.park_cap - w.chances) + (w.defer_cap - w.defers)
    return pick(among(w.state, WAITING), CHARGE * left + number(w.open) + phase, phase)


def largest_rank(retry_cap: int, defer_cap: int, park_cap: int) -> int:
    """Most transitions of one attempt before it has left the waiting states."""
    return CHARGE * (1 + retry_cap + park_cap + defer_cap) + 1 + PHASE[S.IDLE]


# ── one row ──────────────────────────────────────────────────────────────────────────────────────────


def run_effects(row: Row, w: World, argument: Value) -> World:
    """What `Machine.fire` does for this row: first the state, then the effects in order."""
    w = w.but(state=int(row.target))
    for name in row.effects:
        w = EFFECTS[name](w, argument)
    return w


def applies(row: Row, w: World, argument: Value) -> Value:
    return both(w.state == int(row.source), *[
        GUARDS[lit.guard](w, argument) if lit.value else no(GUARDS[lit.guard](w, argument)) for lit in row.when
    ])  # fmt: skip


class Step(NamedTuple):
    """One row, symbolically."""

    before: World
    condition: Value  # of being taken, from a state that satisfies everything
    after: World


def step(row: Row) -> Step:
    w, argument = symbolic(), z3.Int("argument")
    event = Event(row.event)
    around = BEFORE.get(event, lambda v, a: Around(v, z3.BoolVal(True)))(w, argument)
    condition = z3.And(
        legal_caps(w), *invariant(w).values(), *conserved(w).values(), around.condition, applies(row, around.world, argument)
    )
    return Step(w, condition, after(event, w, run_effects(row, around.world, argument)))


REPEATABLE = ((S.STAGED, E.CLOSE),)
"""Detaching twice is the operator's act, not a way of waiting."""


def _nothing_changed(s: Step) -> Value:
    return z3.And(*[s.after.values[name] == s.before.values[name] for name in (*COUNTERS, *SHARED) if name != "rows"])


def obligations(row: Row) -> dict[str, Value]:
    """What must follow from taking this row, by name."""
    s = step(row)
    goals = {f"invariant {name}": goal for name, goal in invariant(s.after).items()}
    goals |= {f"conserved {name}": goal for name, goal in conserved(s.after).items()}
    lower = rank(s.after) < rank(s.before)
    goals["rank"] = z3.Or(_nothing_changed(s), lower) if (row.source, row.event) in REPEATABLE else lower
    goals["rank is not negative"] = z3.Or(z3.Not(among(s.after.state, WAITING)), rank(s.after) >= 0)
    return {name: z3.Implies(s.condition, goal) for name, goal in goals.items()}


def moves(table: Table = REQUEST_TABLE) -> list[Row]:
    return [row for row in table.rows if row.kind is Kind.TRANSITION]


def describe(row: Row, table: Table = REQUEST_TABLE) -> str:
    guards = ", ".join(map(str, row.when))
    return f"{table.states[row.source].name} {table.events[row.event].name} -> {table.states[row.target].name} [{guards}]"


def failures(rows: Iterable[Row], goals: Callable[[Row], Mapping[str, Value]] = obligations) -> list[str]:
    """Obligations that do not hold, each with the row it belongs to."""
    found: list[str] = []
    for row in rows:
        solver = z3.Solver()
        named = goals(row)
        solver.add(z3.Not(z3.And(*named.values())))
        if solver.check() == z3.unsat:
            continue
        for name, goal in named.items():
            one = z3.Solver()
            one.add(z3.Not(goal))
            if one.check() != z3.unsat:
                found.append(f"{describe(row)}: {name}")
    return found


def unreachable(rows: Iterable[Row]) -> list[str]:
    """Rows whose condition no state satisfies: what is proved about them is proved about nothing."""
    found = []
    for row in rows:
        solver = z3.Solver()
        solver.add(step(row).condition)
        if solver.check() != z3.sat:
            found.append(describe(row))
    return found


OWED: dict[State, tuple[tuple[Event, ...], str]] = {
    S.QUERYING: ((E.DEADLINE,), "the clock runs, and the pass fires what is due"),
    S.READING: ((E.DEADLINE,), "the clock runs, and the pass fires what is due"),
    S.PARKED: ((E.DEADLINE,), "the clock runs, and the pass fires what is due"),
    S.REFETCH: ((E.LOOKUP, E.DECLINED), "the next pass takes an armed refetch up"),
    S.STAGED: ((E.ADMIT, E.DEFER), "a candidate: the engine admits or refuses it"),
    S.IDLE: ((E.ADMIT,), "a candidate"),
    S.PACED: ((E.ADMIT,), "a candidate"),
    S.RECOMPUTING: ((E.ADMIT,), "a candidate"),
}
"""What must happen at last in each waiting state, and who owes it."""


def not_owed(table: Table = REQUEST_TABLE) -> list[str]:
    """Waiting states in which an owed event may fail to move the attempt."""
    found = [f"{state.name} is not listed" for state in WAITING if state not in OWED]
    for state, (events, _) in OWED.items():
        for event in events:
            quiet = [row for row in table.cell(state, event) if row.kind is not Kind.TRANSITION]
            w, argument = symbolic(), z3.Int("argument")
            for row in quiet:
                solver = z3.Solver()
                solver.add(legal_caps(w), *invariant(w).values(), applies(row, w, argument))
                if solver.check() != z3.unsat:
                    found.append(f"{describe(row)}: owed, and may change nothing")
    return found


def orphan_answered() -> list[str]:
    """The answer to an operation that owns rows returns them; nobody else notices."""
    w = symbolic()
    rows = z3.Int("answered_rows")
    done = w.but(free=w.free + rows, op_staging=w.op_staging - rows)
    given = z3.And(legal_caps(w), *invariant(w).values(), *conserved(w).values(), rows >= 0, rows <= w.op_staging)
    found = []
    for name, goal in {**invariant(done), **conserved(done)}.items():
        solver = z3.Solver()
        solver.add(given, z3.Not(goal))
        if solver.check() != z3.unsat:
            found.append(f"orphan answered: {name}")
    return found


def main() -> int:
    rows = moves()
    wrong = [*failures(rows), *not_owed(), *orphan_answered()]
    for fault in wrong:
        print(f"not proved: {fault}")
    idle = unreachable(rows)
    print(f"{len(rows)} rows, {sum(len(obligations(r)) for r in rows)} obligations, {len(wrong)} not proved")
    print("no state takes: " + ("; ".join(idle) if idle else "(every row can be taken)"))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
