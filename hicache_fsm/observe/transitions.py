"""Observers of transitions: the log (one JSON line each) and the longest wait in each state."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import IO, NamedTuple

from hicache_fsm.control.parts import Observer
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.model import Row
from hicache_fsm.lifecycle.table import REQUEST_TABLE, State


def both(observers: Sequence[Observer]) -> Observer:
    """One observer that calls several."""

    def call(attempt: Attempt, row: Row, argument: int) -> None:
        for observer in observers:
            observer(attempt, row, argument)

    return call


class TransitionLog:
    """Writes one JSON object per line and transition: pass, rid, attempt, event, from, to, argument, outcome."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def __call__(self, attempt: Attempt, row: Row, argument: int) -> None:
        states = REQUEST_TABLE.states
        record = {
            "pass": attempt.history[-1].pass_no,
            "rid": attempt.rid,
            "attempt": attempt.number,
            "event": REQUEST_TABLE.events[row.event].name,
            "from": states[row.source].label,
            "to": states[row.target].label,
            "argument": argument,
            "outcome": row.outcome if "settle" in row.effects or states[row.target].final else "",
        }
        self._out.write(json.dumps(record, separators=(",", ":")) + "\n")


class LongestWait(NamedTuple):
    passes: int
    seconds: float
    rid: str


class StateWaits:
    """The longest stay in each state, in passes and in real seconds. Costs about a microsecond a transition."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], tuple[int, float]] = {}
        self._longest: dict[int, LongestWait] = {}

    def __call__(self, attempt: Attempt, row: Row, argument: int) -> None:
        now, pass_no = time.perf_counter(), attempt.history[-1].pass_no
        key = (attempt.rid, attempt.number)
        began = self._since.pop(key, None)
        if began is not None:
            stay = LongestWait(pass_no - began[0], now - began[1], attempt.rid)
            known = self._longest.get(row.source)
            if known is None or stay.seconds > known.seconds:
                self._longest[row.source] = stay
        if row.target < State.FINISHED:
            self._since[key] = (pass_no, now)

    def longest(self) -> dict[str, LongestWait]:
        """By state label, in the table's order."""
        states = REQUEST_TABLE.states
        return {states[state].label: self._longest[state] for state in sorted(self._longest)}
