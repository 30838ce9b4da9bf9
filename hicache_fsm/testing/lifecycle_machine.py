"""`LifecycleMachine`: Hypothesis fires the request table's events, legal and illegal, on a few attempts.

    class TestLifecycle(LifecycleMachine.TestCase):
        settings = settings(max_examples=200, stateful_step_count=50)

Its rules are generated from `REQUEST_TABLE`: `fire_<event>` for each event, on any attempt in whose state the event is
no error, and `illegal_<state>_<event>` for each forbidden pair, which must raise `IllegalTransition` and change
nothing. There are eight times as many of these, so they get every fourth step. Guards are drawn, effects act on the
ledger of a real `Attempt` and on nothing else, so this is the lifecycle alone; `pipeline_machine` drives the whole
control plane. New attempts take the place of ended and of old ones.

A table of your own gets its machine from `machine_for`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from hypothesis import event as count
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache_fsm.errors import IllegalTransition
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.machine import Machine
from hicache_fsm.lifecycle.model import Kind, Row, StateDef, Table
from hicache_fsm.lifecycle.table import DEVICE, LOCK, PIN, REQUEST_TABLE, STAGING, Event

ATTEMPTS = 4


def everything_of(attempt: Attempt) -> tuple[Any, ...]:
    """All fields, containers by content."""
    fields = [getattr(attempt, slot) for slot in Attempt.__slots__]
    return tuple([tuple(field) if hasattr(field, "append") else field for field in fields])


class LifecycleBase(RuleBasedStateMachine):
    """What the generated rules call. `table` and `seen` are class attributes: `seen` collects (row before, row) of
    every attempt, over all runs, if it is set to a set."""

    table: Table = REQUEST_TABLE
    seen: set[tuple[int, int]] | None = None

    def __init__(self) -> None:
        super().__init__()
        table = self.table
        self.valuation: Mapping[str, bool] = {}
        self.done: list[str] = []
        self.opened = 0
        self.attempts: list[Attempt] = []
        self.present = 0  # states in which attempts are, one bit each: preconditions are asked for hundreds of rules
        self.steps = 0
        self.machine: Machine[Attempt] = Machine(
            table,
            {name: partial(self._guard, name) for name in table.guards},
            {name: partial(self._effect, name) for name in table.effects},
            check=Attempt.check_ownership,
        )

    @rule(where=st.integers(0, 31), bits=st.integers(0, 63))
    @precondition(lambda self: bool(self.steps & 3) or not self.attempts)
    def open(self, where: int, bits: int) -> None:
        """A new attempt, in the place of one that has ended or else of the oldest. It begins in any state, with a
        ledger that the state may have: what holds on every step from there holds however it was reached."""
        self.opened += 1
        states = [state for state in self.table.states if not state.final]
        attempt = Attempt(self.opened, f"r{self.opened}", 1, 8, self.opened, history_length=4)
        attempt.state = self.table.initial if where & 16 else states[where % len(states)].id
        grant(attempt, self.table.states[attempt.state], bits)
        live = self.live()
        self.attempts = [*(live if len(live) < ATTEMPTS else live[1:]), attempt]
        self._moved()

    def _moved(self) -> None:
        self.steps += 1
        self.present = 0
        for attempt in self.attempts:
            self.present |= 1 << attempt.state

    def live(self) -> list[Attempt]:
        return [a for a in self.attempts if not self.table.states[a.state].final]

    def among(self, states: frozenset[int]) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.state in states]

    # ── guards and effects ───────────────────────────────────────────────────────────────────────────

    def _guard(self, name: str, attempt: Attempt, argument: int) -> bool:
        return self.valuation[name]

    def _effect(self, name: str, attempt: Attempt, row: Row, argument: int) -> None:
        self.done.append(name)
        act = LEDGER.get(name)
        if act is not None:
            act(attempt)

    # ── rules ────────────────────────────────────────────────────────────────────────────────────────

    def fire(self, event: int, attempt: Attempt, bits: int) -> None:
        """Fire a legal event; the row that applies under the drawn guards, and only its effects, must come about."""
        table = self.table
        self.valuation = {name: bool(bits >> at & 1) for at, name in enumerate(table.guards)}
        expected = table.pick(attempt.state, event, self.valuation)
        if expected.kind is Kind.TRANSITION:
            acquire(attempt, event, bool(bits & 1))
        before, ignored = everything_of(attempt), self.machine.ignored.get(table.events[event].name, 0)
        last = attempt.history[-1].row if attempt.history else -1
        self.done = []
        row = self.machine.fire(attempt, event, bits & 3)
        self._moved()
        assert row is expected, f"row {row.id} applied, not {expected.id}"
        if row.kind is Kind.IGNORED:
            assert everything_of(attempt) == before
            assert self.machine.ignored[table.events[event].name] == ignored + 1
            return
        assert attempt.state == row.target
        assert tuple(self.done) == row.effects
        assert attempt.history[-1].row == row.id
        if self.seen is not None:
            self.seen.add((last, row.id))
        count(table.states[row.target].label)

    def fire_illegal(self, event: int, attempt: Attempt) -> None:
        """Fire a forbidden event: it must raise, name state and event, and change nothing."""
        before, ignored, self.done = everything_of(attempt), dict(self.machine.ignored), []
        state, name = self.table.states[attempt.state].label, self.table.events[event].name
        message = ""
        try:
            self.machine.fire(attempt, event)
        except IllegalTransition as error:
            message = str(error)
        self._moved()
        assert state in message, f"{name} in {state} is an error by the table; the machine says {message!r}"
        assert repr(name) in message, f"the message must name the event: {message!r}"
        assert everything_of(attempt) == before
        assert (self.done, self.machine.ignored) == ([], ignored)

    @invariant()
    def ended_attempts_own_nothing(self) -> None:
        for attempt in self.attempts:
            if self.table.states[attempt.state].final:
                assert not attempt.owned(), f"{attempt.describe()} has ended and owns {attempt.owned()}"


def grant(attempt: Attempt, state: StateDef, bits: int) -> None:
    """Give an attempt what the state must own, and of what it may own what the bits say."""
    for at, (name, field, value) in enumerate(LEDGER_ENTRIES):
        if name in state.owns or (name in state.may_own and bits >> at & 1):
            setattr(attempt, field, value.copy() if isinstance(value, list) else value)


LEDGER_ENTRIES = ((STAGING, "staging", (1, 2)), (PIN, "pin_node", 1), (DEVICE, "device", [3]), (LOCK, "lock_node", 4))


def acquire(attempt: Attempt, event: int, pinned: bool) -> None:
    """What the control plane enters in the ledger before it fires these events."""
    if event == Event.GRANT:
        attempt.staging = (1, 2)
        attempt.pin_node = int(pinned)
    elif event == Event.ADMIT:
        attempt.device = [3]
        attempt.lock_node = 4


def _return_hold(attempt: Attempt) -> None:
    attempt.staging = ()
    attempt.pin_node = 0


def _return_all(attempt: Attempt) -> None:
    _return_hold(attempt)
    attempt.device = []
    attempt.lock_node = 0


def _keep_first(attempt: Attempt) -> None:
    attempt.staging = attempt.staging[:1]


LEDGER: dict[str, Callable[[Attempt], None]] = {
    "return_hold": _return_hold,
    "spend_hold": _return_hold,
    "return_all": _return_all,
    "keep_landed": _keep_first,
}
"""Effects that act on the ledger; the others are somebody else's books."""


def _legal_rule(owner: str, event: int, name: str, states: frozenset[int]) -> Callable[..., None]:
    def fire(self: LifecycleBase, which: int, bits: int) -> None:
        found = self.among(states)
        self.fire(event, found[which % len(found)], bits)

    mask = _mask(states)
    possible = precondition(lambda self: bool(self.present & mask))
    arguments = rule(which=st.integers(0, ATTEMPTS - 1), bits=st.integers(0, 63))
    return _named(owner, f"fire_{name}", fire, arguments, possible)


def _illegal_rule(owner: str, event: int, name: str, state: int) -> Callable[..., None]:
    states = frozenset({state})

    def fire(self: LifecycleBase, which: int) -> None:
        found = self.among(states)
        self.fire_illegal(event, found[which % len(found)])

    mask = _mask(states)
    possible = precondition(lambda self: bool(self.present & mask) and not self.steps & 3)
    return _named(owner, f"illegal_{name}", fire, rule(which=st.integers(0, ATTEMPTS - 1)), possible)


def _mask(states: frozenset[int]) -> int:
    return sum(1 << state for state in states)


def _named(owner: str, name: str, body: Callable[..., None], *decorators: Callable[..., Any]) -> Callable[..., None]:
    """A rule under a name of its own: Hypothesis keys its swarm, and prints a failing run, by name."""
    body.__name__ = name
    body.__qualname__ = f"{owner}.{name}"
    made: Any = body
    for decorator in decorators:
        made = decorator(made)
    return cast("Callable[..., None]", made)


def machine_for(table: Table, name: str, module: str = __name__) -> type[LifecycleBase]:
    """The machine of a request-like table. `name` and `module` are those of the class, for stored examples."""
    rules: dict[str, Any] = {}
    for event in table.events:
        legal = frozenset(s.id for s in table.states if table.cell(s.id, event.id)[0].kind is not Kind.ERROR)
        if legal:
            rules[f"fire_{event.name}"] = _legal_rule(name, event.id, event.name, legal)
        for state in table.states:
            if state.id not in legal:
                pair = f"{state.name}_{event.name}"
                rules[f"illegal_{pair}"] = _illegal_rule(name, event.id, pair, state.id)
    return cast(
        "type[LifecycleBase]",
        type(name, (LifecycleBase,), {"table": table, "__module__": module, "__qualname__": name, **rules}),
    )


LifecycleMachine = machine_for(REQUEST_TABLE, "LifecycleMachine")
