"""A table that can be built is total, exclusive and connected, and a faulty one is refused with every fault named."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hicache_fsm.lifecycle.diagrams import TABLES
from hicache_fsm.lifecycle.model import EventDef, Kind, Literal, Row, RowMaker, StateDef, Table, TableError

ON, OFF, GONE = 0, 1, 2
PUSH, PULL = 0, 1

STATES = (
    StateDef(ON, "on", "lamp", "it burns"),
    StateDef(OFF, "off", "lamp", "it does not"),
    StateDef(GONE, "gone", "gone", "it was thrown away", final=True),
)
EVENTS = (EventDef(PUSH, "push", "the button"), EventDef(PULL, "pull", "the plug"))
GUARDS = {"power": "there is power"}
EFFECTS = {"click": "a sound"}


def lamp_rows() -> list[Row]:
    rows = RowMaker()
    rows.go(PUSH, (ON,), OFF, "it was on", do=("click",))
    rows.go(PUSH, (OFF,), ON, "it was off", when=("power",), do=("click",))
    rows.ignore(PUSH, (OFF,), "nothing to burn with", unless=("power",))
    rows.go(PULL, (ON, OFF), GONE, "no use any more")
    rows.forbid(PUSH, (GONE,), "there is no button")
    rows.ignore(PULL, (GONE,), "there is no plug")
    return rows.rows


def lamp(rows: Iterable[Row]) -> Table:
    return Table("lamp", STATES, EVENTS, GUARDS, EFFECTS, rows, OFF)


def without(rows: list[Row], source: int, event: int) -> list[Row]:
    return [row for row in rows if (row.source, row.event) != (source, event)]


def move(
    source: int, event: int, target: int, *when: Literal, effects: tuple[str, ...] = (), because: str = "so"
) -> Row:
    return Row(source, event, Kind.TRANSITION, target, because, when, effects)


POWER, NO_POWER = Literal("power", True), Literal("power", False)

FAULTS = {
    "missing cell": (without(lamp_rows(), ON, PULL), ["no cell for state on, event pull"]),
    "overlapping rows": (
        [*lamp_rows(), move(ON, PULL, OFF, POWER)],
        ["on on pull with {'power': True}: 2 rows apply, not one"],
    ),
    "uncovered valuation": (
        [*without(lamp_rows(), OFF, PUSH), move(OFF, PUSH, ON, POWER)],
        ["off on push with {'power': False}: 0 rows apply, not one"],
    ),
    "unknown effect": (
        [*without(lamp_rows(), ON, PULL), move(ON, PULL, GONE, effects=("bang",))],
        ["unknown effect bang"],
    ),
    "unused effect": (
        [row if not row.effects else move(row.source, row.event, row.target, *row.when) for row in lamp_rows()],
        ["effect click is never used"],
    ),
    "unknown guard": (
        [
            *without(lamp_rows(), ON, PULL),
            move(ON, PULL, GONE, Literal("luck", True)),
            move(ON, PULL, OFF, Literal("luck", False)),
        ],
        ["unknown guard luck"],
    ),
    "unused guard": ([*without(lamp_rows(), OFF, PUSH), move(OFF, PUSH, ON)], ["guard power is never used"]),
    "way out of a final state": (
        [*without(lamp_rows(), GONE, PUSH), move(GONE, PUSH, ON)],
        ["gone on push: a final state has no way out"],
    ),
    "ignored row that moves": (
        [*without(lamp_rows(), ON, PULL), Row(ON, PULL, Kind.IGNORED, GONE, "so")],
        ["on on pull: only a transition may change anything"],
    ),
    "error row with an effect": (
        [*without(lamp_rows(), GONE, PUSH), Row(GONE, PUSH, Kind.ERROR, GONE, "so", (), ("click",))],
        ["gone on push: only a transition may change anything"],
    ),
    "no reason": ([*without(lamp_rows(), ON, PULL), move(ON, PULL, GONE, because="")], ["on on pull: no reason given"]),
    "several at once": (
        [*without(without(lamp_rows(), ON, PULL), GONE, PUSH), move(GONE, PUSH, ON, effects=("bang",))],
        ["no cell for state on, event pull", "gone on push: a final state has no way out", "unknown effect bang"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_table_is_refused_with_all_its_faults(name: str) -> None:
    rows, expected = FAULTS[name]
    with pytest.raises(TableError) as caught:
        lamp(rows)
    heading, *faults = str(caught.value).split("\n  ")
    assert heading == "table 'lamp':"
    assert sorted(faults) == sorted(expected)


def test_ids_must_be_positions() -> None:
    states = (STATES[1], STATES[0], STATES[2])
    with pytest.raises(TableError, match="state off has id 1, expected 0"):
        Table("lamp", states, EVENTS, GUARDS, EFFECTS, lamp_rows(), OFF)


def test_a_sound_table_answers() -> None:
    table = lamp(lamp_rows())
    assert [row.id for row in table.rows] == list(range(len(table.rows)))
    assert table.cell_guards(OFF, PUSH) == ("power",)
    assert table.valuations(OFF, PUSH) == [{"power": True}, {"power": False}]
    assert table.valuations(ON, PULL) == [{}]
    assert table.pick(OFF, PUSH, {"power": True}).target == ON
    assert table.pick(OFF, PUSH, {"power": False}).kind is Kind.IGNORED
    assert table.legal_events(GONE) == ["pull"]


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
class TestEveryTable:
    def test_exactly_one_row_applies_to_every_state_event_and_valuation(self, table: Table) -> None:
        for state in table.states:
            for event in table.events:
                for valuation in table.valuations(state.id, event.id):
                    rows = [
                        row
                        for row in table.rows
                        if (row.source, row.event) == (state.id, event.id)
                        and all(valuation[lit.guard] == lit.value for lit in row.when)
                    ]
                    assert len(rows) == 1, f"{state.name} on {event.name} with {valuation}: {rows}"

    def test_every_state_can_be_reached(self, table: Table) -> None:
        assert closure(table, {table.initial}) == {state.id for state in table.states}

    def test_every_live_state_has_a_way_to_a_final_state(self, table: Table) -> None:
        final = {state.id for state in table.states if state.final}
        for state in table.states:
            assert closure(table, {state.id}) & final, f"{state.name} can never end"

    def test_final_states_own_nothing(self, table: Table) -> None:
        assert not any(state.owns | state.may_own for state in table.states if state.final)

    def test_every_event_moves_some_state(self, table: Table) -> None:
        moving = {row.event for row in table.rows if row.kind is Kind.TRANSITION}
        assert moving == {event.id for event in table.events}


def closure(table: Table, start: set[int]) -> set[int]:
    """States that transitions lead to from `start`, itself included."""
    reached, pending = set(start), list(start)
    while pending:
        source = pending.pop()
        targets = {row.target for row in table.rows if row.source == source and row.kind is Kind.TRANSITION}
        pending += targets - reached
        reached |= targets
    return reached


def test_states_and_events_of_a_table_have_unique_names() -> None:
    for table in TABLES.values():
        states, events = [s.name for s in table.states], [e.name for e in table.events]
        assert len(set(states)) == len(states)
        assert len(set(events)) == len(events)
