"""What scenarios are played on: the simulation of one run, the values that lines may have, and the table of events."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, TypeAlias

from hicache_fsm.config import CacheConfig
from hicache_fsm.control.effects import RequestEffects
from hicache_fsm.control.plane import ControlPlane
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.model import Row
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.span_table import Drop
from hicache_fsm.lifecycle.table import REQUEST_TABLE, Outcome, State
from hicache_fsm.ports import Completion
from hicache_fsm.prefetch.accounts import HitAccounts
from hicache_fsm.testing.scenario_grammar import Args, Pattern, Slot, words_slot
from hicache_fsm.testing.scenario_prompt import parse_prompt
from hicache_fsm.testing.sim import Sim


class StepFailed(Exception):
    """A step did not go as its line says."""

    def __init__(self, expected: str, found: str, rid: str = "") -> None:
        super().__init__(f"expected {expected}; found {found}")
        self.expected = expected
        self.found = found
        self.rid = rid  # whose history explains it, if anybody's


class Closed(NamedTuple):
    """An operation that was answered or lost, for second answers."""

    kind: OpKind
    rid: str
    span: int
    answer: Completion


@dataclass(slots=True)
class Play:
    """A simulation on which one run of a scenario is played."""

    config: CacheConfig
    seed: int = 0
    broken: str = ""
    sim: Sim = field(init=False)
    random: Random = field(init=False)
    ends: dict[str, str] = field(default_factory=dict)  # how each request ended that did
    closed: list[Closed] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    grown: int = 0  # pages of output so far, each with a label of its own

    def __post_init__(self) -> None:
        self.sim = Sim(self.config)
        if self.broken:
            self.sim.plane = ControlPlane(self.config, effects=_without(self.broken))
        self.sim.plane.parts.observer = self._note_end
        self.random = Random(self.seed)

    def _note_end(self, attempt: Attempt, row: Row, argument: int) -> None:
        if REQUEST_TABLE.states[row.target].final:
            self.ends[attempt.rid] = row.outcome or "finished"

    def attempt(self, rid: str) -> Attempt:
        """A live request; `StepFailed` if it has ended."""
        found = self.sim.plane.parts.attempts.find(rid)
        if found is None:
            raise StepFailed(f"{rid} to be live", f"it has ended ({self.ends.get(rid, 'never submitted')})", rid)
        return found

    def state(self, rid: str) -> str:
        found = self.sim.plane.parts.attempts.find(rid)
        return "ended" if found is None else State(found.state).name.lower()

    def close(self, op: int) -> Callable[[Completion], None]:
        """Note an operation before it is answered; give the answer to what this returns."""
        kind = next(kind for kind in OpKind if op in self.sim.of_kind(kind))
        command: Any = self.sim.outstanding[op]
        rid, span = getattr(command, "rid", ""), getattr(command, "span", 0)
        return lambda answer: self.closed.append(Closed(kind, rid, span, answer))


def _without(effect: str) -> type[RequestEffects]:
    """Effects of the request table of which one is left out."""

    def nothing(self: RequestEffects, attempt: Attempt, row: Row, argument: int) -> None:
        return None

    return type("BrokenEffects", (RequestEffects,), {"__slots__": (), effect: nothing})


def name_slot(text: str) -> str:
    """A request's name."""
    if not re.fullmatch(r"[A-Za-z_][\w.-]*", text):
        raise ValueError(text)
    return text


def number_slot(text: str) -> int:
    """A whole number, zero included."""
    if not text.isdigit():
        raise ValueError(text)
    return int(text)


_MANY = ("hashes", "lookups", "reads", "loads", "offloads", "stores")
_KINDS = tuple(kind.name.lower() for kind in OpKind)

SLOTS: dict[str, Slot] = {
    "REQUEST": Slot("the name of a request", name_slot),
    "PROMPT": Slot("a prompt (`abcd`, `t10a4`, `(r1)40`, `-`)", parse_prompt),
    "N": Slot("a number", number_slot),
    "CMP": words_slot("a comparison", ("=", "<=", ">=")),
    "KIND": words_slot("a kind of operation", _KINDS, tuple(OpKind)),
    "KINDS": words_slot("kinds of operations", _MANY, tuple(OpKind)),
    "STATE": words_slot("a state", (*(s.name.lower() for s in State if s < State.FINISHED), "ended")),
    "END": words_slot("a way to end", ("finished", *(o.value for o in Outcome))),
    "OUTCOME": words_slot("an outcome", tuple(o.value for o in Outcome)),
    "STAT": words_slot("a counter", HitAccounts.STATS),
    "DROP": words_slot("a reason of a dropped write", tuple(d.value for d in Drop)),
    "EVENT": words_slot("an event of the request table", tuple(e.name for e in REQUEST_TABLE.events),
                        tuple(e.id for e in REQUEST_TABLE.events)),
    "WORDS": Slot("words", str),
}  # fmt: skip

Action: TypeAlias = Callable[[Play, Args], None]


class EventLine(NamedTuple):
    """One kind of event."""

    pattern: Pattern
    meaning: str
    act: Action


EVENTS: list[EventLine] = []


def event(pattern: str, meaning: str) -> Callable[[Action], Action]:
    """Enter an action into the table."""

    def enter(act: Action) -> Action:
        EVENTS.append(EventLine(Pattern(pattern), meaning, act))
        return act

    return enter
