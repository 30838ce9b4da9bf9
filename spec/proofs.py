"""Proofs with z3 about the request table itself, for every value of every cap and any number of requests.

The rows, guards and targets are read from `REQUEST_TABLE`; only what a guard and an effect *mean* is written by hand,
in `spec.proof_model`, together with what the control plane does around an event. The same functions run on Python
integers: `tests/test_proofs.py` compares them with the real control plane, transition by transition. What is proved
about each row, with retry cap, defer cap, park cap, staging rows, pin budget and device pages left symbolic:

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
from typing import NamedTuple

import z3  # type: ignore[import-untyped]

from hicache_fsm.lifecycle.model import Kind, Row, Table
from hicache_fsm.lifecycle.table import ADMITTED, FINAL, REQUEST_TABLE, TIMED, WAITING, Event, State
from spec.proof_model import (
    BEFORE,
    COUNTERS,
    LOAD_OP,
    LOOKUP_OP,
    POLL,
    READ_OP,
    REFETCH,
    SHARED,
    Value,
    World,
    after,
    among,
    applies,
    as_it_is,
    both,
    either,
    integer,
    no,
    number,
    pick,
    run_effects,
    same,
    symbolic,
)

S, E = State, Event

# ── what must hold ───────────────────────────────────────────────────────────────────────────────────

HOLDING = (S.READING, S.STAGED)


def invariant(w: World) -> dict[str, Value]:
    """By name. `rank` and these are what `docs/termination.md` argues with."""

    def in_state(*states: State) -> Value:
        return among(w.state, states)

    return {
        "states": both(w.state >= 0, w.state <= int(S.ABORTED)),
        "caps": both(
            w.ret >= 0, w.ret <= w.retry_cap, w.defers >= 0, w.defers < w.defer_cap, w.chances >= 0,
            w.chances < w.park_cap,
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
            either(w.op != READ_OP, both(w.rows == w.staging, w.got >= 0, w.got <= w.rows)),
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


class Step(NamedTuple):
    """One row, symbolically."""

    before: World
    condition: Value  # of being taken, from a state that satisfies everything
    after: World


def step(row: Row) -> Step:
    w, argument = symbolic(), integer("argument")
    event = Event(row.event)
    around = BEFORE.get(event, as_it_is)(w, argument)
    given = z3.And(legal_caps(w), *invariant(w).values(), *conserved(w).values())
    condition = z3.And(given, around.condition, applies(row, around.world, argument))
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
    source, target = table.states[row.source].name, table.states[row.target].name
    return f"{source} {table.events[row.event].name} -> {target} [{guards}]"


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
            w, argument = symbolic(), integer("argument")
            for row in quiet:
                solver = z3.Solver()
                solver.add(legal_caps(w), *invariant(w).values(), applies(row, w, argument))
                if solver.check() != z3.unsat:
                    found.append(f"{describe(row)}: owed, and may change nothing")
    return found


def orphan_answered() -> list[str]:
    """The answer to an operation that owns rows returns them; nobody else notices."""
    w = symbolic()
    rows = integer("answered_rows")
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
