"""Runs scenarios: each line is compiled before the first one is played, so that a slip is refused at once.

    for run in compile_scenario(load(path)):     raises `ScenarioError`
        failure = play(run)                      None if everything holds

After every step `Sim` recounts all books and compares all bytes; what it finds is a failure of that step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hicache_fsm.control import snapshot
from hicache_fsm.errors import DuplicateRequest, HiCacheError, IllegalTransition
from hicache_fsm.testing.scenario import Scenario
from hicache_fsm.testing.scenario_events import EVENTS
from hicache_fsm.testing.scenario_expect import EXPECTATIONS
from hicache_fsm.testing.scenario_grammar import Args, Matcher, Misfit, Pattern
from hicache_fsm.testing.scenario_play import SLOTS, Action, EventLine, Play, StepFailed
from hicache_fsm.testing.scenario_text import Line, ScenarioError, nearest

REFUSALS: dict[str, tuple[type[HiCacheError], str]] = {
    "illegal": (IllegalTransition, "The event raises `IllegalTransition`, and nothing changes."),
    "duplicate": (DuplicateRequest, "The event raises `DuplicateRequest`, and nothing changes."),
}
"""`expect illegal: EVENT` and its like."""



def _fire(play: Play, args: Args) -> None:
    play.sim.plane.parts.machine.fire(play.attempt(args["rid"]), args["event"], 0)


FIRE = EventLine(
    Pattern("event event:EVENT for rid:REQUEST"),
    "An event of the request table, where it must be refused (behind `expect illegal:` only).",
    _fire,
)
VIOLATION = "expect violation WORDS"
VIOLATION_MEANING = (
    "The event in the line above trips an invariant whose message contains these words; for scenarios that must fail. "
    "Nothing can follow."
)


class Step(NamedTuple):
    """One line, ready to be played."""

    line: Line
    act: Action
    args: Args
    violation: str = ""  # words of the invariant that this event is expected to trip


@dataclass(frozen=True, slots=True)
class CompiledRun:
    """One variant of a scenario, ready to be played."""

    scenario: Scenario
    variant: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """What did not hold, and where."""

    file: str
    line: int
    variant: str
    text: str
    expected: str
    found: str
    explanation: str = ""  # the history of the request that is concerned

    def __str__(self) -> str:
        lines = [f"{self.file}:{self.line}: {self.text}", f"  expected: {self.expected}", f"  found:    {self.found}"]
        if self.variant:
            lines.append(f"  variant:  {self.variant}")
        return "\n".join(lines + [f"  {text}" for text in self.explanation.splitlines()])


# ── compiling ────────────────────────────────────────────────────────────────────────────────────────

_MATCHER = Matcher(SLOTS)
_FIRST_WORDS = sorted({one.pattern.verb for one in EVENTS} | {"expect", "repeat", "each", "any", "either"})
_REFUSED = re.compile(rf"expect ({'|'.join(REFUSALS)}): (.+)$")
_NEW = ("submit", "stage")


def compile_scenario(scenario: Scenario) -> list[CompiledRun]:
    """All runs of a scenario. Raises `ScenarioError` on a line that means nothing, or names an unknown request."""
    runs = []
    for variant, lines in scenario.runs():
        steps = tuple(_steps(scenario.name, lines))
        _check_names(scenario.name, steps)
        runs.append(CompiledRun(scenario, variant, steps))
    return runs


def _steps(name: str, lines: Sequence[Line]) -> Iterator[Step]:
    for i, line in enumerate(lines):
        words = line.text.split()
        if words[:2] == ["expect", "violation"]:
            if i == 0 or lines[i - 1].text.startswith("expect") or i + 1 < len(lines) or not words[2:]:
                raise ScenarioError(f"{name}:{line.number}: expected '{VIOLATION}' as the last line, behind an event")
            continue
        following = lines[i + 1].text.split() if i + 1 < len(lines) else []
        violation = " ".join(following[2:]) if following[:2] == ["expect", "violation"] else ""
        try:
            act, args = _compile(line.text)
        except ValueError as error:
            raise ScenarioError(f"{name}:{line.number}: {error}") from None
        yield Step(line, act, args, violation)


@lru_cache(maxsize=4096)
def _compile(text: str) -> tuple[Action, Args]:
    """Action and values of a line; raises `ValueError` with what is wrong."""
    refused = _REFUSED.match(text)
    if refused is not None:
        kind, inner = refused.groups()
        act, args = _fit(inner, [*EVENTS, FIRE])
        return _refused(REFUSALS[kind][0], act), args
    words = text.split()
    if words[0] == "expect":
        return _fit(text, EXPECTATIONS)
    if words[0] not in _FIRST_WORDS:
        hint = nearest(words[0], _FIRST_WORDS) or f"; known are {', '.join(_FIRST_WORDS)}"
        raise ValueError(f"expected an event or 'expect'; found {words[0]!r}{hint}")
    return _fit(text, EVENTS)


def _fit(text: str, lines: Sequence[EventLine]) -> tuple[Action, Args]:
    words, misfit = text.split(), Misfit()
    for one in lines:
        args = _MATCHER.fit(one.pattern, words, misfit)
        if args is not None:
            return one.act, args
    raise ValueError(misfit.describe(words))


def _refused(error: type[HiCacheError], act: Action) -> Action:
    def check(play: Play, args: Args) -> None:
        before = snapshot.take(play.sim.plane)
        try:
            act(play, args)
        except error:
            if snapshot.take(play.sim.plane) != before:
                raise StepFailed("nothing to change", "a change of the plane", args.get("rid", "")) from None
        else:
            raise StepFailed(f"{error.__name__}", "the event was legal", args.get("rid", ""))

    return check


def _check_names(name: str, steps: Sequence[Step]) -> None:
    """Requests are named only after they were submitted."""
    known = {"warm"}
    for step in steps:
        rid: str = step.args.get("rid", "")
        if step.line.text.split()[0] in _NEW:
            known.add(rid)
        elif rid and rid not in known:
            raise ScenarioError(f"{name}:{step.line.number}: expected a request that was submitted above; found "
                                f"{rid!r}{nearest(rid, known)}")  # fmt: skip


# ── playing ──────────────────────────────────────────────────────────────────────────────────────────


def play(run: CompiledRun, watch: Callable[[Step, Play], None] | None = None) -> Failure | None:
    """Play one run to its end or its first failure; `watch` is called behind each step that went well."""
    scenario = run.scenario
    stage = Play(scenario.config, scenario.seed, scenario.broken)
    for step in run.steps:
        failure = _play_step(run, step, stage)
        if failure is not None:
            return failure
        if watch is not None:
            watch(step, stage)
    return None


def _play_step(run: CompiledRun, step: Step, stage: Play) -> Failure | None:
    try:
        step.act(stage, step.args)
    except StepFailed as error:
        return _failure(run, step, stage, error.expected, error.found, error.rid)
    except AssertionError as error:  # an invariant, or a bug that an assertion of the core has caught
        if step.violation and step.violation in str(error):
            return None
        expected = f"a violation with {step.violation!r}" if step.violation else "no violation"
        return _failure(run, step, stage, expected, str(error) or type(error).__name__)
    except HiCacheError as error:
        return _failure(run, step, stage, "a legal event", f"{type(error).__name__}: {error}")
    except Exception as error:  # whatever else the core raises on a legal event is a defect of it
        return _failure(run, step, stage, "no crash", f"{type(error).__name__}: {error}")
    if step.violation:
        return _failure(run, step, stage, f"a violation with {step.violation!r}", "none")
    return None


def _failure(run: CompiledRun, step: Step, stage: Play, expected: str, found: str, rid: str = "") -> Failure:
    explanation = _explain(stage, rid or step.args.get("rid", ""))
    name = run.scenario.name
    return Failure(name, step.line.number, run.variant, step.line.text, expected, found, explanation)


def _explain(stage: Play, rid: str) -> str:
    if not rid:
        return ""
    if stage.sim.plane.parts.attempts.find(rid) is None:
        return f"{rid} has ended: {stage.ends[rid]}" if rid in stage.ends else ""
    return stage.sim.plane.explain(rid)
