"""`Machine.fire`: the only place where a state changes.

The machine compiles a table into `rows[state][event]`, binds guards and effects to callables, and moves
subjects. A subject is anything with `state`, `history` and a name for messages. Dispatch costs well under a
microsecond; the `transitions` twin (`hicache_fsm.lifecycle.twin`) does the same job as executable
reference and is compared with this one cell by cell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from hicache_fsm.errors import IllegalTransition
from hicache_fsm.lifecycle.model import Kind, Row, Table


class Step(NamedTuple):
    """One entry of a history."""

    pass_no: int  # scheduler pass in which it happened
    row: int  # row of the table, gives event, target, outcome and reason
    argument: int  # what the event carried


class Subject(Protocol):
    """What a machine moves."""

    state: int
    history: deque[Step]

    def describe(self) -> str:
        """Name in messages, such as `request 'r7' attempt 2`."""
        ...


S = TypeVar("S", bound=Subject)
Guard = Callable[[S, int], bool]
Effect = Callable[[S, Row, int], None]
_Entry = tuple[bool, int, int, tuple[tuple[Guard[S], bool], ...], tuple[Effect[S], ...], Row]
"""A row made ready to fire: moves, target, row id, guard literals, effects, and the row itself."""


class Machine(Generic[S]):
    """Fires events on subjects according to one table.

    `guards` and `effects` must name exactly those of the table. `pass_no` is what histories
    record as the time; the owner of the machine sets it.
    `listener` is called after each transition with (subject, row, argument); `check` after that, for
    ownership checks in debug mode.
    """

    __slots__ = ("table", "ignored", "_cells", "listener", "check", "pass_no")

    def __init__(
        self,
        table: Table,
        guards: Mapping[str, Guard[S]],
        effects: Mapping[str, Effect[S]],
        listener: Callable[[S, Row, int], None] | None = None,
        check: Callable[[S], None] | None = None,
    ) -> None:
        for what, have, want in (("guards", guards, table.guards), ("effects", effects, table.effects)):
            missing, unknown = set(want) - set(have), set(have) - set(want)
            assert not missing and not unknown, f"{table.name} {what}: missing {missing}, unknown {unknown}"
        self.table = table
        self.ignored: dict[str, int] = {}
        self.listener = listener
        self.check = check
        self.pass_no = 0

        def ready(row: Row) -> _Entry[S]:
            when = tuple((guards[lit.guard], lit.value) for lit in row.when)
            do = tuple(effects[name] for name in row.effects)
            return row.kind is Kind.TRANSITION, row.target, row.id, when, do, row

        self._cells: tuple[tuple[tuple[_Entry[S], ...], ...], ...] = tuple(
            tuple(tuple(map(ready, table.cell(state.id, event.id))) for event in table.events)
            for state in table.states
        )

    def fire(self, subject: S, event: int, argument: int = 0) -> Row:
        """Move `subject` and do the row's effects; returns the row that applied.

        Raises `IllegalTransition`, having changed nothing, if the table calls the event an error in the
        subject's state. An ignored event is counted in `ignored` under its name.
        """
        for moves, target, row_id, when, effects, row in self._cells[subject.state][event]:  # noqa: B007 (read below)
            for guard, value in when:
                if guard(subject, argument) is not value:
                    break
            else:
                break
        else:
            raise AssertionError(f"{self.table.name}: no row applies to {subject.describe()}, event {event}")
        if not moves:
            return self._refuse(subject, row)
        subject.state = target
        # `Step(...)` without its Python-level constructor: a quarter of the whole cost of firing.
        subject.history.append(tuple.__new__(Step, (self.pass_no, row_id, argument)))
        for effect in effects:
            effect(subject, row, argument)
        if self.listener is not None:
            self.listener(subject, row, argument)
        if self.check is not None:
            self.check(subject)
        return row

    def can_fire(self, subject: S, event: int, argument: int = 0) -> bool:
        """Whether `fire` would make a transition; changes nothing."""
        for moves, _, _, when, _, _ in self._cells[subject.state][event]:
            if all(guard(subject, argument) is value for guard, value in when):
                return moves
        return False

    def _refuse(self, subject: S, row: Row) -> Row:
        event = self.table.events[row.event].name
        if row.kind is Kind.IGNORED:
            self.ignored[event] = self.ignored.get(event, 0) + 1
            return row
        state = self.table.states[row.source]
        legal = ", ".join(self.table.legal_events(row.source))
        raise IllegalTransition(
            f"{subject.describe()} is {state.label}: event {event!r} is illegal here, because {row.because}. "
            f"Legal events: {legal}"
        )
