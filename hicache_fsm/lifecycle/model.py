"""What a table is: rows, guards, cells; and the checks that make one total and unambiguous.

A table maps each (state, event) to a *cell*. A cell holds one or more rows; a row applies when all of its
guard literals hold. Within a cell the rows must exclude each other and cover every valuation of the guards
they name. `Table` refuses to be built otherwise, so a table that imports is a table that is total.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Kind(enum.Enum):
    """What an event means in a state."""

    TRANSITION = "transition"
    IGNORED = "ignored"  # legal, changes nothing but a counter
    ERROR = "error"  # a bug of the caller: raises, changes nothing


class Literal(NamedTuple):
    """A guard or its negation."""

    guard: str
    value: bool

    def __str__(self) -> str:
        return self.guard if self.value else f"not {self.guard}"


@dataclass(frozen=True, slots=True)
class StateDef:
    """One state. `parent` groups sub-states; `owns` and `may_own` name ledger entries (see `Attempt`)."""

    id: int
    name: str
    parent: str
    meaning: str
    owns: frozenset[str] = frozenset()
    may_own: frozenset[str] = frozenset()
    final: bool = False

    @property
    def label(self) -> str:
        return self.name if self.parent == self.name else f"{self.parent}/{self.name}"


@dataclass(frozen=True, slots=True)
class EventDef:
    """One event. `argument` says what the integer given to `fire` means, empty if it means nothing."""

    id: int
    name: str
    meaning: str
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table: in `source`, on `event`, if all of `when` hold, go to `target` and do `effects`."""

    source: int
    event: int
    kind: Kind
    target: int
    because: str
    when: tuple[Literal, ...] = ()
    effects: tuple[str, ...] = ()
    outcome: str = ""
    topic: str = ""
    id: int = -1  # position in the table; names the row in histories and logs


class TableError(AssertionError):
    """The table itself is wrong: a cell is missing, ambiguous or not covered."""


class Table:
    """An immutable, total transition table. Raises `TableError` listing every fault when it is not one."""

    def __init__(
        self,
        name: str,
        states: Sequence[StateDef],
        events: Sequence[EventDef],
        guards: Mapping[str, str],
        effects: Mapping[str, str],
        rows: Iterable[Row],
        initial: int,
    ) -> None:
        self.name = name
        self.states = tuple(states)
        self.events = tuple(events)
        self.guards = dict(guards)
        self.effects = dict(effects)
        self.initial = initial
        self.rows = tuple(
            Row(r.source, r.event, r.kind, r.target, r.because, r.when, r.effects, r.outcome, r.topic, i)
            for i, r in enumerate(rows)
        )
        cells: dict[tuple[int, int], list[Row]] = {}
        for row in self.rows:
            cells.setdefault((row.source, row.event), []).append(row)
        self.cells: dict[tuple[int, int], tuple[Row, ...]] = {k: tuple(v) for k, v in cells.items()}
        faults = [*self._ids(), *self._totality(), *self._vocabulary(), *self._exclusive()]
        if faults:
            raise TableError(f"table {name!r}:\n  " + "\n  ".join(faults))

    def cell(self, state: int, event: int) -> tuple[Row, ...]:
        return self.cells[state, event]

    def cell_guards(self, state: int, event: int) -> tuple[str, ...]:
        """Guards that this cell reads, in order of first mention."""
        return tuple(dict.fromkeys(lit.guard for row in self.cells[state, event] for lit in row.when))

    def pick(self, state: int, event: int, valuation: Mapping[str, bool]) -> Row:
        """The row that applies under a valuation of the cell's guards."""
        for row in self.cells[state, event]:
            if all(valuation[lit.guard] == lit.value for lit in row.when):
                return row
        raise AssertionError(f"{self.name}: no row for {state}, {event}, {valuation}")

    def legal_events(self, state: int) -> list[str]:
        """Names of events that are not an error in this state."""
        return [e.name for e in self.events if any(r.kind is not Kind.ERROR for r in self.cells[state, e.id])]

    def valuations(self, state: int, event: int) -> list[dict[str, bool]]:
        """Every valuation of the guards of a cell; one empty valuation when it has none."""
        names = self.cell_guards(state, event)
        return [dict(zip(names, bits, strict=True)) for bits in itertools.product((True, False), repeat=len(names))]

    def _ids(self) -> list[str]:
        out = [f"state {s.name} has id {s.id}, expected {i}" for i, s in enumerate(self.states) if s.id != i]
        return out + [f"event {e.name} has id {e.id}, expected {i}" for i, e in enumerate(self.events) if e.id != i]

    def _totality(self) -> list[str]:
        return [
            f"no cell for state {s.name}, event {e.name}"
            for s in self.states
            for e in self.events
            if (s.id, e.id) not in self.cells
        ]

    def _vocabulary(self) -> list[str]:
        out: list[str] = []
        used_effects: set[str] = set()
        used_guards: set[str] = set()
        for row in self.rows:
            where = f"{self.states[row.source].name} on {self.events[row.event].name}"
            used_effects.update(row.effects)
            used_guards.update(lit.guard for lit in row.when)
            if not row.because:
                out.append(f"{where}: no reason given")
            if row.kind is not Kind.TRANSITION and (row.effects or row.target != row.source or row.outcome):
                out.append(f"{where}: only a transition may change anything")
            if self.states[row.source].final and row.kind is Kind.TRANSITION:
                out.append(f"{where}: a final state has no way out")
        out += [f"unknown effect {e}" for e in sorted(used_effects - set(self.effects))]
        out += [f"effect {e} is never used" for e in sorted(set(self.effects) - used_effects)]
        out += [f"unknown guard {g}" for g in sorted(used_guards - set(self.guards))]
        out += [f"guard {g} is never used" for g in sorted(set(self.guards) - used_guards)]
        return out

    def _exclusive(self) -> list[str]:
        out: list[str] = []
        for (state, event), rows in self.cells.items():
            for valuation in self.valuations(state, event):
                hits = sum(all(valuation[lit.guard] == lit.value for lit in row.when) for row in rows)
                if hits != 1:
                    where = f"{self.states[state].name} on {self.events[event].name} with {valuation}"
                    out.append(f"{where}: {hits} rows apply, not one")
        return out


def _text(outcome: str) -> str:
    """Plain text of an outcome given as a member of a string enumeration."""
    return str(outcome.value) if isinstance(outcome, enum.Enum) else outcome


class RowMaker:
    """Short hand for writing rows; one call may stand for the same row in several states."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def go(
        self,
        event: int,
        sources: Sequence[int],
        to: int | None,
        because: str,
        *,
        when: Sequence[str] = (),
        unless: Sequence[str] = (),
        do: Sequence[str] = (),
        outcome: str = "",
        topic: str = "",
    ) -> None:
        """A transition; `to=None` stays in the source state (but still does its effects)."""
        literals = tuple([Literal(g, True) for g in when] + [Literal(g, False) for g in unless])
        for source in sources:
            target = source if to is None else to
            self.rows.append(
                Row(source, event, Kind.TRANSITION, target, because, literals, tuple(do), _text(outcome), topic)
            )

    def ignore(
        self, event: int, sources: Sequence[int], because: str, *, when: Sequence[str] = (), unless: Sequence[str] = ()
    ) -> None:
        literals = tuple([Literal(g, True) for g in when] + [Literal(g, False) for g in unless])
        for source in sources:
            self.rows.append(Row(source, event, Kind.IGNORED, source, because, literals))

    def forbid(self, event: int, sources: Sequence[int], because: str) -> None:
        for source in sources:
            self.rows.append(Row(source, event, Kind.ERROR, source, because))
