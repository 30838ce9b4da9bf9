"""The same tables as `transitions` machines: an executable reference that shares no code with `Machine.fire`.

`transitions` picks the row, asks the guards (as `conditions` and `unless`) and runs the effects (as `after`
callbacks). A row that ignores its event becomes an internal transition, which changes nothing but a counter; a
row that calls its event an error has no transition at all, so that `transitions` raises its `MachineError`.
One event costs about twenty times what `Machine.fire` does, so the twin is for tests and pictures only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from transitions import EventData, Machine, MachineError, Transition

from hicache_fsm.lifecycle.machine import Step
from hicache_fsm.lifecycle.model import Kind, Row, Table

TwinGuard = Callable[["TwinModel", int], bool]
TwinEffect = Callable[["TwinModel", Row, int], None]


class Fired(NamedTuple):
    """What one event did."""

    target: int  # state afterwards; the source itself if the event was ignored or an error
    effects: tuple[str, ...]  # in the order in which they ran
    kind: Kind
    row: int  # row of the table that applied, -1 for an error


class RowTransition(Transition):
    """A transition that knows the row it stands for."""

    def __init__(self, *args: Any, row: Row, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.row = row


class RowMachine(Machine):
    transition_cls = RowTransition


class TwinModel:
    """A subject of the twin. `state` is the name of a state, kept by `transitions`.

    `guards` and `effects` take the arguments that `Machine` gives to its own, with this model as the subject.
    """

    state: str

    def __init__(
        self,
        guards: Mapping[str, TwinGuard],
        effects: Mapping[str, TwinEffect],
        history_length: int = 64,
    ) -> None:
        self.history: deque[Step] = deque(maxlen=history_length)
        self.ignored: dict[str, int] = {}
        self.applied: Row | None = None
        self.pass_no = 0
        for name, guard in guards.items():
            setattr(self, f"guard_{name}", partial(self._ask, guard))
        for name, effect in effects.items():
            setattr(self, f"effect_{name}", partial(self._do, effect))

    def _ask(self, guard: TwinGuard, data: EventData) -> bool:
        return guard(self, _argument(data))

    def _do(self, effect: TwinEffect, data: EventData) -> None:
        effect(self, _row(data), _argument(data))

    def record(self, data: EventData) -> None:
        """Enter the row that applies into the history, or into the counts of ignored events."""
        row = self.applied = _row(data)
        if row.kind is Kind.IGNORED:
            self.ignored[data.event.name] = self.ignored.get(data.event.name, 0) + 1
        else:
            self.history.append(Step(self.pass_no, row.id, _argument(data)))


def _argument(data: EventData) -> int:
    argument = next(iter(data.args), 0)
    assert isinstance(argument, int), f"events carry an int, not {argument!r}"
    return argument


def _row(data: EventData) -> Row:
    assert isinstance(data.transition, RowTransition), f"{data.transition!r} stands for no row"
    return data.transition.row


def build_machine(table: Table, model: TwinModel) -> RowMachine:
    """A `transitions` machine of `table` that moves `model`, which starts in the initial state."""
    machine = RowMachine(
        model=model,
        states=[state.name for state in table.states],
        initial=table.states[table.initial].name,
        auto_transitions=False,
        send_event=True,
    )
    for row in table.rows:
        if row.kind is Kind.ERROR:
            continue
        machine.add_transition(
            table.events[row.event].name,
            table.states[row.source].name,
            table.states[row.target].name if row.kind is Kind.TRANSITION else None,
            conditions=[f"guard_{lit.guard}" for lit in row.when if lit.value],
            unless=[f"guard_{lit.guard}" for lit in row.when if not lit.value],
            after=["record", *(f"effect_{name}" for name in row.effects)],
            row=row,
        )
    return machine


class Twin:
    """The reference of one table. Guards answer from a valuation, effects are logged in the order they run."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._valuation: Mapping[str, bool] = {}
        self._log: list[str] = []
        self._ids = {state.name: state.id for state in table.states}
        self.model = TwinModel(
            {name: partial(self._answer, name) for name in table.guards},
            {name: partial(self._note, name) for name in table.effects},
        )
        self._machine = build_machine(table, self.model)

    def fire(self, state: int, event: int, valuation: Mapping[str, bool], argument: int = 0) -> Fired:
        """What `event` does in `state` when the guards answer as `valuation` says.

        Raises `KeyError` if a guard is asked that the valuation does not name.
        """
        self._valuation = valuation
        self._log.clear()
        self.model.applied = None
        self._machine.set_state(self.table.states[state].name, self.model)
        trigger = self._machine.events.get(self.table.events[event].name)
        try:
            if trigger is None:  # an error in every state
                raise MachineError(f"no state takes event {event}")
            trigger.trigger(self.model, argument)
        except MachineError:
            return Fired(self._ids[self.model.state], tuple(self._log), Kind.ERROR, -1)
        row = self.model.applied
        assert row is not None, f"{self.table.name}: no row for state {state}, event {event}, {dict(valuation)}"
        return Fired(self._ids[self.model.state], tuple(self._log), row.kind, row.id)

    def _answer(self, name: str, model: TwinModel, argument: int) -> bool:
        return self._valuation[name]

    def _note(self, name: str, model: TwinModel, row: Row, argument: int) -> None:
        self._log.append(name)


def build_twin(table: Table) -> Twin:
    """The executable reference of any table."""
    return Twin(table)
