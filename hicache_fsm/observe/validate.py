"""`hicache-fsm validate LOG`: replays a transition log against the request table, without the run that wrote it.

Each line (see `observe.transitions.TransitionLog`) must be a row of the table that may be taken there: it continues
where its attempt stood, its guards agree with what the attempt has spent so far, its outcome is the row's. Attempts of
a request follow each other without a gap. The log does not say how large the caps were; they are taken from the
command line, or narrowed down by the lines themselves: two lines that no value of a cap explains together are a fault.

The first line that does not fit is named. What cannot be read at all (cut off, rotated, no log) raises `LogError`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hicache_fsm.errors import HiCacheError
from hicache_fsm.lifecycle.model import Kind, Row
from hicache_fsm.lifecycle.table import REQUEST_TABLE, Event, State

FITS, MISFIT, REFUSED = 0, 1, 2
"""Exit codes."""
_FIELDS: dict[str, type] = {
    "pass": int, "rid": str, "attempt": int, "event": str, "from": str, "to": str, "argument": int, "outcome": str,
}  # fmt: skip
_STATES = {state.label: State(state.id) for state in REQUEST_TABLE.states}
_EVENTS = {event.name: Event(event.id) for event in REQUEST_TABLE.events}
_ENDS_REQUEST = frozenset((Event.FINISH, Event.ABORT, Event.REJECT))
"""Events after which the request is over; after any other end it goes on as a new attempt."""


class LogError(HiCacheError):
    """The file cannot be judged: it is missing, empty, cut off, rotated, or no transition log."""


class Misfit(NamedTuple):
    """The first line that does not fit."""

    line: int
    why: str


class Report(NamedTuple):
    """What a log contains."""

    lines: int
    requests: int  # lives of request ids, from their first attempt to their end
    attempts: int
    running: int  # requests that have not ended
    misfit: Misfit | None
    caps: dict[str, str]  # what the lines say about each cap, such as "3..8"


class _Contradiction(Exception):
    """A line that does not fit, with the reason."""


class _Cap:
    """What is known of one cap: it is above `below` and at most `top`."""

    __slots__ = ("name", "below", "top")

    def __init__(self, name: str, value: int | None, least: int) -> None:
        self.name = name
        self.below = least - 1 if value is None else value - 1
        self.top = value

    def exceeds(self, spent: int, holds: bool) -> None:
        """The line says whether `spent` stays below the cap."""
        if holds:
            if self.top is not None and spent >= self.top:
                raise _Contradiction(f"{self.name} is at most {self.top}, and {spent} is taken to be below it")
            self.below = max(self.below, spent)
        else:
            if spent <= self.below:
                raise _Contradiction(f"{self.name} is at least {self.below + 1}, and {spent} is taken to reach it")
            self.top = spent if self.top is None else min(self.top, spent)

    def surely_above(self, spent: int) -> bool:
        return spent <= self.below

    def __str__(self) -> str:
        low = self.below + 1
        return str(low) if self.top == low else f"{low}.." + ("" if self.top is None else str(self.top))


class _Life:
    """One request id, from its first attempt to its end."""

    __slots__ = ("attempt", "place", "retries", "defers", "chances", "open", "fresh", "last")

    def __init__(self) -> None:
        self.attempt = 1
        self.retries = 0
        self.last = Event.LOOKUP
        self._begin()

    def _begin(self) -> None:
        self.place = State.IDLE
        self.defers = 0
        self.chances = 0
        self.open = True
        self.fresh = True  # no transition yet

    @property
    def ended(self) -> bool:
        return REQUEST_TABLE.states[self.place].final

    def next_attempt(self) -> None:
        """A retraction starts the retry count again; a failed load costs a retry."""
        self.attempt += 1
        self.retries += self.last is Event.LOAD_FAILED
        if self.last is Event.RETRACT:
            self.retries = 0
        self._begin()


class Validator:
    """Takes the lines of one log, in order."""

    def __init__(
        self, retry_max_attempts: int | None = None, max_defers: int | None = None, park_cap: int | None = None
    ) -> None:
        self.retry = _Cap("retry_max_attempts", retry_max_attempts, 0)
        polls = None if retry_max_attempts is None else retry_max_attempts - retry_max_attempts // 2
        self.poll = _Cap("the share of retries for polls", polls, 0)
        self.defer = _Cap("max_defers", max_defers, 1)
        self.park = _Cap("park_cap", park_cap, 1)
        self.polled = False  # paced retries are on
        self.unpolled: int | None = None  # fewest retries at which a poll was refused
        self.lives: dict[str, _Life] = {}
        self.requests = 0
        self.attempts = 0
        self.pass_no = 0

    @property
    def running(self) -> int:
        return len(self.lives)

    def take(self, record: dict[str, Any]) -> str:
        """Why this line does not fit; empty if it does."""
        try:
            self._take(record)
        except _Contradiction as contradiction:
            return str(contradiction)
        return ""

    def _take(self, record: dict[str, Any]) -> None:
        if record["pass"] < self.pass_no:
            raise _Contradiction(f"pass {record['pass']} after pass {self.pass_no}")
        self.pass_no = record["pass"]
        event, source, target = _names(record)
        life = self._life(record)
        if source is not life.place:
            stood = REQUEST_TABLE.states[life.place].label
            raise _Contradiction(f"continues from {record['from']}, but stood in {stood}")
        row = _row(event, source, target, record["argument"])
        self._guards(life, row)
        expected = row.outcome if "settle" in row.effects or REQUEST_TABLE.states[row.target].final else ""
        if record["outcome"] != expected:
            raise _Contradiction(f"outcome {record['outcome']!r}, the table says {expected!r}")
        self._move(life, row)
        if life.ended and event in _ENDS_REQUEST:
            del self.lives[record["rid"]]

    def _life(self, record: dict[str, Any]) -> _Life:
        rid, number = record["rid"], record["attempt"]
        life = self.lives.get(rid)
        if life is None:
            if number != 1:
                raise _Contradiction(f"begins with attempt {number}: attempt 1 is not in this log")
            life = self.lives[rid] = _Life()
            self.requests += 1
            self.attempts += 1
        elif life.ended and number == life.attempt + 1:
            life.next_attempt()
            self.attempts += 1
        if number != life.attempt:
            state = REQUEST_TABLE.states[life.place].label
            raise _Contradiction(f"attempt {number}, but attempt {life.attempt} is {state}")
        return life

    def _guards(self, life: _Life, row: Row) -> None:
        for guard, value in row.when:
            if guard == "defers_left":
                self.defer.exceeds(life.defers + 1, value)
            elif guard == "chances_left":
                self.park.exceeds(life.chances + 1, value)
            elif guard == "may_poll":
                self._poll(life, value)
            elif guard == "may_refetch":
                self._refetch(life, value)

    def _poll(self, life: _Life, value: bool) -> None:
        """A refused poll says something about the cap only if polls are on at all, which a later line may tell."""
        if value:
            self.polled = True
            self.poll.exceeds(life.retries, True)
            self.retry.exceeds(life.retries, True)
        elif self.unpolled is None or life.retries < self.unpolled:
            self.unpolled = life.retries
        if self.polled and self.unpolled is not None:
            self.poll.exceeds(self.unpolled, False)

    def _refetch(self, life: _Life, value: bool) -> None:
        if value:
            if not life.open:
                raise _Contradiction("is armed again although storage is closed to this attempt")
            self.retry.exceeds(life.retries, True)
            self.park.exceeds(life.chances + 1, True)
        elif life.open and self.retry.surely_above(life.retries) and self.park.surely_above(life.chances + 1):
            raise _Contradiction(f"is closed with {life.retries} retries and {life.chances} chances, below both caps")

    def _move(self, life: _Life, row: Row) -> None:
        if row.event == Event.LOOKUP:
            if not life.open:
                raise _Contradiction("asks storage, which is closed to this attempt")
            if row.source == State.IDLE and not life.fresh:
                raise _Contradiction("asks storage again from idle, where only the first look-up begins")
            if row.source != State.IDLE:
                self.retry.exceeds(life.retries, True)
                life.retries += 1
        life.place = State(row.target)
        life.fresh = False
        life.last = Event(row.event)
        life.defers += "count_defer" in row.effects
        life.chances += "count_chance" in row.effects
        life.open = life.open and "close_storage" not in row.effects

    def caps(self) -> dict[str, str]:
        return {cap.name: str(cap) for cap in (self.retry, self.defer, self.park)}


def _names(record: dict[str, Any]) -> tuple[Event, State, State]:
    for field, known in (("event", _EVENTS), ("from", _STATES), ("to", _STATES)):
        if record[field] not in known:
            raise _Contradiction(f"the table has no {'event' if field == 'event' else 'state'} {record[field]!r}")
    return _EVENTS[record["event"]], _STATES[record["from"]], _STATES[record["to"]]


def _row(event: Event, source: State, target: State, argument: int) -> Row:
    """The row that this line claims to be."""
    name, at = REQUEST_TABLE.events[event].name, REQUEST_TABLE.states
    cell = REQUEST_TABLE.cell(source, event)
    rows = [row for row in cell if row.kind is Kind.TRANSITION and row.target == target]
    if not rows:
        there = sorted({at[row.target].label for row in cell if row.kind is Kind.TRANSITION})
        leads = f"leads to {' or '.join(there)}" if there else f"is no transition: {cell[0].because}"
        raise _Contradiction(f"{name} in {at[source].label} {leads}, not to {at[target].label}")
    for row in rows:
        if all(literal.value == (argument > 0) for literal in row.when if literal.guard == "usable"):
            return row
    raise _Contradiction(f"{name} with argument {argument} does not lead from {at[source].label} to {at[target].label}")


# ── files ────────────────────────────────────────────────────────────────────────────────────────────


def validate(
    lines: Iterable[str], *, retry_max_attempts: int | None = None, max_defers: int | None = None,
    park_cap: int | None = None, running: bool = False,
) -> Report:  # fmt: skip
    """Judge the lines of one log. With `running`, requests at its end may be alive still.

    Raises `LogError` if the lines are no log from its beginning to its end.
    """
    validator = Validator(retry_max_attempts, max_defers, park_cap)
    count = 0
    misfit: Misfit | None = None
    for count, text in enumerate(lines, 1):
        record = _parse(count, text)
        _begins_here(count, record)
        why = validator.take(record)
        if why:
            misfit = Misfit(count, f"request {record['rid']!r} attempt {record['attempt']}, {record['event']}: {why}")
            break
    if not count:
        raise LogError("the log is empty: no transition was written, or not flushed before the file was copied")
    if misfit is None and validator.running and not running:
        some = ", ".join(sorted(validator.lives)[:5])
        raise LogError(
            f"the log ends after line {count} while {validator.running} requests are alive ({some}): its end is "
            "missing. For a log of a run that still goes on, use --running"
        )
    return Report(count, validator.requests, validator.attempts, validator.running, misfit, validator.caps())


def _parse(number: int, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        if not text.endswith("\n"):
            why = "the file was truncated, or copied while it was written"
            raise LogError(f"line {number} is cut off: {why}") from None
        raise LogError(f"line {number} is no JSON: {text.strip()[:60]!r}; is this a transition log?") from None
    if not isinstance(record, dict) or any(type(record.get(name)) is not kind for name, kind in _FIELDS.items()):
        raise LogError(f"line {number} is no transition: it needs {', '.join(_FIELDS)}; got {text.strip()[:80]!r}")
    return record


def _begins_here(number: int, record: dict[str, Any]) -> None:
    """A log whose first line is in the middle of a life was rotated, or its head was cut."""
    if number == 1 and (record["attempt"] != 1 or _STATES.get(record["from"]) is not State.IDLE):
        raise LogError(
            f"the log begins in the middle (attempt {record['attempt']} of request {record['rid']!r} in "
            f"{record['from']}): it was rotated, or its head is missing. Put the parts together, oldest first"
        )


def add_validate_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options that `run_validate` reads."""
    parser.add_argument("log", type=Path, metavar="LOG", help="a transition log (JSON lines)")
    parser.add_argument("--running", action="store_true", help="the run goes on: requests may be alive at the end")
    for option, what in (
        ("--retry-max-attempts", "retry cap of the run"),
        ("--max-defers", "defer cap of the run"),
        ("--park-cap", "park cap of the run"),
    ):
        parser.add_argument(option, type=int, metavar="N", help=f"{what} (default: narrowed down from the log)")


def run_validate(arguments: argparse.Namespace) -> int:
    """The `validate` command; its exit code: 0 every line fits, 1 one does not, 2 the file cannot be judged."""
    path: Path = arguments.log
    try:
        with path.open(encoding="utf-8") as lines:
            report = validate(
                lines, retry_max_attempts=arguments.retry_max_attempts, max_defers=arguments.max_defers,
                park_cap=arguments.park_cap, running=arguments.running,
            )  # fmt: skip
    except OSError as error:
        print(f"hicache-fsm validate: {path}: {error.strerror}", file=sys.stderr)
        return REFUSED
    except UnicodeDecodeError:
        print(f"hicache-fsm validate: {path}: no text; is it compressed?", file=sys.stderr)
        return REFUSED
    except LogError as error:
        print(f"hicache-fsm validate: {path}: {error}", file=sys.stderr)
        return REFUSED
    if report.misfit is not None:
        print(f"{path}:{report.misfit.line}: {report.misfit.why}")
        return MISFIT
    alive = f", {report.running:,} still alive" if report.running else ""
    caps = ", ".join(f"{name} {known}" for name, known in report.caps.items())
    print(f"{report.lines:,} lines, {report.requests:,} requests, {report.attempts:,} attempts{alive}: every line fits")
    print(f"caps that explain them: {caps}")
    return FITS
