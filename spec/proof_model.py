"""What the guards and effects of the request table mean, as arithmetic on a ledger; and what the control plane does
around an event. Runs on Python values and on terms of z3: see `spec.proofs`, and `tests/test_proofs.py`, which
compares it with the real control plane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import z3  # type: ignore[import-untyped]

from hicache_fsm.lifecycle.model import Row
from hicache_fsm.lifecycle.table import TIMED, Event, State

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


def integer(name: str) -> Value:
    return z3.Int(name)


def boolean(name: str) -> Value:
    return z3.Bool(name)


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
    make: dict[str, Value] = {name: boolean(name) if name in FLAGS else integer(name) for name in (*COUNTERS, *SHARED)}
    return World({**make, **{name: integer(name) for name in CAPS}})


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


def as_it_is(w: World, argument: Value) -> Around:
    """Nothing is done before the event."""
    return Around(w, True)


def _answered_hit(w: World, argument: Value) -> Around:
    """`PrefetchPipeline.hit`: the look-up has ended (or was assumed), its found tokens are open."""
    hit = integer("hit")
    from_querying = among(w.state, (S.QUERYING,))
    after = w.but(
        op=pick(from_querying, 0, w.op), found=w.found + pick(from_querying, hit, 0),
        unresolved=pick(from_querying, hit, w.unresolved),
    )  # fmt: skip
    return Around(after, z3.And(hit >= 0, z3.Implies(z3.And(from_querying, w.op == 0), hit > 0)))


def _before_commit(w: World, argument: Value) -> Around:
    found = _answered_hit(w, argument)
    hit = z3.Implies(w.state == int(S.QUERYING), found.world.unresolved > 0)
    return Around(found.world, z3.And(found.condition, hit))


def _before_grant(w: World, argument: Value) -> Around:
    """`PrefetchPipeline.commit`: rows for the whole hit, and a pin within the budget or none."""
    found = _before_commit(w, argument)
    w = found.world
    rows, pin = integer("rows_taken"), integer("pin_taken")
    taken = w.but(free=w.free - rows, staging=rows, pin=pin, pinned=w.pinned + pin)
    fits = z3.And(rows > 0, rows <= w.free, rows <= w.unresolved)
    budget = z3.And(pin >= 0, z3.Implies(pin > 0, w.pinned + pin <= w.pin_cap))
    return Around(taken, z3.And(found.condition, fits, budget))


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
    return Around(w.but(assumed=boolean("assumed")), z3.If(w.state == int(S.IDLE), first, again))


def _before_admit(w: World, load: Value) -> Around:
    """`ControlPlane.admit`: device pages are taken, the hold's span is published, its load issued."""
    own, evicted = integer("own_pages"), integer("evicted")
    staged = w.state == int(S.STAGED)
    after = w.but(
        dfree=w.dfree + evicted - own - load, tree=w.tree - evicted + load, device=own, lock=boolean("locks"),
        op=z3.If(staged, LOAD_OP, w.op), op_unresolved=w.op_unresolved + load,
        closed_tokens=w.closed_tokens + z3.If(staged, w.unresolved - load, 0),
        unresolved=z3.If(staged, 0, w.unresolved),
    )  # fmt: skip
    sizes = z3.And(own > 0, evicted >= 0, evicted <= w.tree, own + load <= w.dfree + evicted)
    return Around(after, z3.And(sizes, z3.If(staged, z3.And(load > 0, load <= w.staging), load == 0)))


def _before_load_ack(w: World, argument: Value) -> Around:
    """`Answers._loaded`: the load has ended, its rows are back, its tokens spliced."""
    rows, tokens = integer("load_rows"), integer("load_tokens")
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
