"""`Machine.fire` does what the table says and what `transitions` makes of it, and nothing else changes a state."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from hicache_fsm.errors import IllegalTransition
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.diagrams import TABLES
from hicache_fsm.lifecycle.machine import Machine, Step
from hicache_fsm.lifecycle.model import EventDef, Kind, Row, RowMaker, StateDef, Table
from hicache_fsm.lifecycle.table import REQUEST_TABLE, Event, State
from hicache_fsm.lifecycle.twin import Fired, Twin, build_twin
from tests.layers import ROOT

PACKAGE = ROOT / "hicache_fsm"


class Probe:
    """A subject that notes what is done to it."""

    def __init__(self, state: int, history_length: int = 64) -> None:
        self.state = state
        self.history: deque[Step] = deque(maxlen=history_length)
        self.done: list[tuple[str, int, int, int]] = []  # effect, row, argument, state at that moment
        self.valuation: Mapping[str, bool] = {}
        self.asked: list[tuple[str, int]] = []

    def describe(self) -> str:
        return f"probe in state {self.state}"


def ask(name: str, probe: Probe, argument: int) -> bool:
    probe.asked.append((name, argument))
    return probe.valuation[name]


def do(name: str, probe: Probe, row: Row, argument: int) -> None:
    probe.done.append((name, row.id, argument, probe.state))


def machine_of(table: Table) -> Machine[Probe]:
    return Machine(
        table,
        {name: partial(ask, name) for name in table.guards},
        {name: partial(do, name) for name in table.effects},
    )


def cases(table: Table) -> Iterator[tuple[int, int, dict[str, bool]]]:
    """Every state, event and valuation of all guards of the table that the cell reads."""
    for state in table.states:
        for event in table.events:
            for valuation in table.valuations(state.id, event.id):
                yield state.id, event.id, valuation


def fired_by(machine: Machine[Probe], probe: Probe, event: int, argument: int) -> Fired:
    try:
        row = machine.fire(probe, event, argument)
    except IllegalTransition:
        return Fired(probe.state, tuple(name for name, *_ in probe.done), Kind.ERROR, -1)
    return Fired(probe.state, tuple(name for name, *_ in probe.done), row.kind, row.id)


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
class TestEveryTable:
    def test_machine_twin_and_table_agree_on_every_state_event_and_valuation(self, table: Table) -> None:
        machine, twin = machine_of(table), build_twin(table)
        rows_fired = set()
        for state, event, valuation in cases(table):
            probe = Probe(state)
            probe.valuation = valuation
            mine, reference = fired_by(machine, probe, event, 7), twin.fire(state, event, valuation, 7)
            where = f"{table.states[state].name} on {table.events[event].name} with {valuation}"
            assert mine == reference, where
            row = table.pick(state, event, valuation)
            assert mine[:3] == (row.target, row.effects, row.kind), where
            rows_fired.add(row.id)
        assert rows_fired == {row.id for row in table.rows}, "the valuations reach every row"

    def test_machine_and_twin_agree_on_history_and_counts(self, table: Table) -> None:
        machine, twin, history = machine_of(table), build_twin(table), deque[Step](maxlen=64)
        machine.pass_no = twin.model.pass_no = 3
        for state, event, valuation in cases(table):
            probe = Probe(state)
            probe.valuation = valuation
            fired_by(machine, probe, event, event)
            history += probe.history
            twin.fire(state, event, valuation, event)
        assert list(history) == list(twin.model.history)
        assert machine.ignored == twin.model.ignored

    def test_effects_see_the_new_state_the_row_and_the_argument(self, table: Table) -> None:
        machine = machine_of(table)
        for state, event, valuation in cases(table):
            row = table.pick(state, event, valuation)
            if row.kind is not Kind.TRANSITION:
                continue
            probe = Probe(state)
            probe.valuation = valuation
            machine.fire(probe, event, 5)
            assert probe.done == [(name, row.id, 5, row.target) for name in row.effects]
            assert list(probe.history) == [Step(0, row.id, 5)]
            assert all(isinstance(step, Step) for step in probe.history)
            assert all(argument == 5 for _, argument in probe.asked)

    def test_an_error_raises_and_changes_nothing(self, table: Table) -> None:
        machine = machine_of(table)
        illegal = [row for row in table.rows if row.kind is Kind.ERROR]
        assert illegal
        for row in illegal:
            probe = Probe(row.source)
            with pytest.raises(IllegalTransition):
                machine.fire(probe, row.event, 9)
            assert (probe.state, list(probe.history), probe.done) == (row.source, [], [])
        assert machine.ignored == {}

    def test_an_ignored_event_only_counts(self, table: Table) -> None:
        machine = machine_of(table)
        counts: dict[str, int] = {}
        for state, event, valuation in cases(table):
            row = table.pick(state, event, valuation)
            if row.kind is not Kind.IGNORED:
                continue
            probe = Probe(state)
            probe.valuation = valuation
            assert machine.fire(probe, event) is row
            assert (probe.state, list(probe.history), probe.done) == (state, [], [])
            name = table.events[event].name
            counts[name] = counts.get(name, 0) + 1
        assert counts
        assert machine.ignored == counts

    def test_can_fire_says_what_fire_would_do_and_changes_nothing(self, table: Table) -> None:
        machine = machine_of(table)
        for state, event, valuation in cases(table):
            probe = Probe(state)
            probe.valuation = valuation
            expected = table.pick(state, event, valuation).kind is Kind.TRANSITION
            assert machine.can_fire(probe, event) is expected
            assert (probe.state, list(probe.history), probe.done, machine.ignored) == (state, [], [], {})

    def test_guards_and_effects_must_be_exactly_those_of_the_table(self, table: Table) -> None:
        guards = {name: partial(ask, name) for name in table.guards}
        effects = {name: partial(do, name) for name in table.effects}
        name = next(iter(effects))
        with pytest.raises(AssertionError, match=rf"{table.name} effects: missing \{{'{name}'\}}"):
            Machine(table, guards, {other: effect for other, effect in effects.items() if other != name})
        with pytest.raises(AssertionError, match=rf"{table.name} guards: .*unknown \{{'luck'\}}"):
            Machine(table, {**guards, "luck": partial(ask, "luck")}, effects)


def test_an_illegal_event_is_explained() -> None:
    machine: Machine[Attempt] = Machine(
        REQUEST_TABLE,
        {name: lambda attempt, argument: True for name in REQUEST_TABLE.guards},
        {name: lambda attempt, row, argument: None for name in REQUEST_TABLE.effects},
    )
    attempt = Attempt(slot=0, rid="r7", number=2, num_tokens=640, seq=0, history_length=4)
    machine.fire(attempt, Event.LOOKUP)
    with pytest.raises(IllegalTransition) as caught:
        machine.fire(attempt, Event.READ_DONE)
    message = str(caught.value)
    for part in ("request 'r7' attempt 2", "prefetching/querying", "'read_done'", "no read of this attempt"):
        assert part in message
    assert message.endswith("Legal events: " + ", ".join(REQUEST_TABLE.legal_events(State.QUERYING)))
    assert attempt.state == State.QUERYING
    assert len(attempt.history) == 1


def test_history_is_bounded_and_keeps_the_latest() -> None:
    machine = machine_of(REQUEST_TABLE)
    probe = Probe(State.PARKED, history_length=5)
    probe.valuation = {"chances_left": True}
    for number in range(12):
        machine.pass_no = number
        machine.fire(probe, Event.REFUSED, number * 10)
    row = REQUEST_TABLE.pick(State.PARKED, Event.REFUSED, probe.valuation)
    assert list(probe.history) == [Step(number, row.id, number * 10) for number in range(7, 12)]


def test_listener_and_check_run_after_the_effects_of_a_transition_only() -> None:
    calls: list[tuple[str, int, int]] = []
    machine = machine_of(REQUEST_TABLE)
    machine.listener = lambda probe, row, argument: calls.append(("listener", row.id, len(probe.done)))
    machine.check = lambda probe: calls.append(("check", probe.state, len(probe.done)))
    probe = Probe(State.IDLE)
    row = machine.fire(probe, Event.LOOKUP)
    assert calls == [("listener", row.id, len(row.effects)), ("check", State.QUERYING, len(row.effects))]
    machine.fire(probe, Event.HEAD)  # ignored
    with pytest.raises(IllegalTransition):
        machine.fire(probe, Event.LOOKUP)
    assert len(calls) == 2


class TestTwin:
    """The comparison above is worth what the twin is worth, so its own edges are looked at."""

    EVENTS = (EventDef(0, "stay", "s"), EventDef(1, "never", "n"))
    STATES = (StateDef(0, "a", "a", "first"), StateDef(1, "b", "b", "last", final=True))

    def table(self) -> Table:
        rows = RowMaker()
        rows.go(0, (0,), None, "does its effects in place", do=("one", "two"), when=("yes",))
        rows.go(0, (0,), 1, "moves", do=("two", "one"), unless=("yes",))
        rows.ignore(0, (1,), "over")
        rows.forbid(1, (0, 1), "an error everywhere")
        return Table("tiny", self.STATES, self.EVENTS, {"yes": "y"}, {"one": "1", "two": "2"}, rows.rows, 0)

    def test_every_kind_of_row(self) -> None:
        twin = build_twin(self.table())
        assert twin.fire(0, 0, {"yes": True}) == Fired(0, ("one", "two"), Kind.TRANSITION, 0)
        assert twin.fire(0, 0, {"yes": False}) == Fired(1, ("two", "one"), Kind.TRANSITION, 1)
        assert twin.fire(1, 0, {}) == Fired(1, (), Kind.IGNORED, 2)
        assert twin.fire(0, 1, {}) == Fired(0, (), Kind.ERROR, -1)

    def test_a_guard_that_the_valuation_does_not_name_is_not_guessed(self) -> None:
        with pytest.raises(KeyError, match="yes"):
            build_twin(self.table()).fire(0, 0, {})

    @pytest.mark.parametrize("field", ["target", "effects", "guards"])
    def test_a_machine_that_differs_from_the_twin_is_noticed(self, field: str) -> None:
        table = self.table()
        rows = list(table.rows)
        first, second = rows[0], rows[1]
        if field == "target":
            rows[0] = Row(0, 0, Kind.TRANSITION, 1, first.because, first.when, first.effects)
        elif field == "effects":
            rows[0] = Row(0, 0, Kind.TRANSITION, 0, first.because, first.when, first.effects[::-1])
        else:
            rows[0] = Row(0, 0, Kind.TRANSITION, 0, first.because, second.when, first.effects)
            rows[1] = Row(0, 0, Kind.TRANSITION, 1, second.because, first.when, second.effects)
        other = Table("other", self.STATES, self.EVENTS, table.guards, table.effects, rows, 0)
        machine, twin = machine_of(other), Twin(table)
        differ = 0
        for state, event, valuation in cases(table):
            probe = Probe(state)
            probe.valuation = valuation
            differ += fired_by(machine, probe, event, 0) != twin.fire(state, event, valuation)
        assert differ


def state_assignments(path: Path) -> list[str]:
    """Places that set an attribute named `state`, other than in a constructor on `self`."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    constructed = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    places = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "state" and not isinstance(node.ctx, ast.Load):
            if id(node) not in constructed:
                places.append(f"{path.name}:{node.lineno}")
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func).split(".")[-1].strip("_")
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if function in ("setattr", "delattr") and "state" in names:
                places.append(f"{path.name}:{node.lineno}")
    return places


def test_nobody_sets_a_state_outside_machine_fire() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): state_assignments(path) for path in sorted(PACKAGE.rglob("*.py"))}
    for path, why in {
        "lifecycle/machine.py": "fire",
        "testing/lifecycle_machine.py": "the generated machine opens attempts in every state, to fire every cell",
    }.items():
        assert len(found.pop(path)) == 1, f"one assignment in {path}: {why}"
    assert {path: places for path, places in found.items() if places} == {}


@pytest.mark.parametrize(
    "line",
    [
        "subject.state = 3",
        "subject.state += 1",
        "subject.state: int = 3",
        "a, subject.state = 1, 2",
        "for subject.state in range(3): pass",
        "del subject.state",
        "setattr(subject, 'state', 3)",
        "object.__setattr__(subject, 'state', 3)",
        "class C:\n    def move(self):\n        self.state = 3",
        "class C:\n    def __init__(self, other):\n        other.state = 3",
    ],
)
def test_an_assignment_to_a_state_is_found(line: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(line)
    assert len(state_assignments(path)) == 1


def test_reading_and_constructing_are_no_assignments(tmp_path: Path) -> None:
    path = tmp_path / "fine.py"
    path.write_text("class C:\n    def __init__(self):\n        self.state = 0\nprint(C().state == 3)")
    assert state_assignments(path) == []
