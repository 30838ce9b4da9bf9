"""Makes a failing scenario as short as it will go: lines are left out, and settings of the head put back to their
defaults, as long as it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace

from hicache_fsm.config import CacheConfig
from hicache_fsm.testing.scenario import DEFAULTS, Scenario
from hicache_fsm.testing.scenario_run import Failure, compile_scenario, play
from hicache_fsm.testing.scenario_text import Line, ScenarioError

_PASSES = (64, 32, 16, 8, 4, 3, 2, 1)
"""How many lines are left out at once; what is left in the end can spare no one to four neighbours."""


def shrink(scenario: Scenario, most_tries: int = 20_000) -> Scenario | None:
    """A shortest scenario that fails like this one; fewer tries may leave more of it. None if the first variant of the
    scenario does not fail, or only for want of time to end."""
    found = failure_of(scenario, [line.text for line in scenario.runs()[0].lines])
    if found is None or found.text == "expect idle":
        return None  # what has not ended yet: any shorter scenario fails in this way too
    return _Shrinking(scenario, found, most_tries).run()


class _Shrinking:
    """One search; keeps the shortest that was found so far."""

    def __init__(self, scenario: Scenario, failure: Failure, most_tries: int) -> None:
        self.scenario = scenario
        self.lines = [line.text for line in scenario.runs()[0].lines][: failure.line]
        self.wanted = _likeness(failure)
        self.tries = most_tries

    def run(self) -> Scenario:
        before = -1
        while before != len(self.lines) and self.tries > 0:
            before = len(self.lines)
            for size in _PASSES:
                self._leave_out(size)
            self._plain_settings()
        return replace(self.scenario, nodes=_nodes(self.lines))

    def _fails(self, scenario: Scenario, lines: Sequence[str]) -> int:
        """How many of these lines it takes to fail in the wanted way; 0 if they do not."""
        self.tries -= 1
        found = failure_of(scenario, lines) if lines and self.tries >= 0 else None
        return found.line if found is not None and _likeness(found) == self.wanted else 0

    def _leave_out(self, size: int) -> None:
        at = max(0, len(self.lines) - size)
        while True:
            rest = self.lines[:at] + self.lines[at + size :]
            needed = self._fails(self.scenario, rest)
            if needed:
                self.lines = rest[:needed]
            if at == 0:
                return
            # Small groups are tried at every place: a request's coming and its end go together or not at all.
            at = max(0, min(at, len(self.lines)) - (1 if size <= 4 else size))

    def _plain_settings(self) -> None:
        usual = CacheConfig(**DEFAULTS)
        for one in fields(CacheConfig):
            value = getattr(usual, one.name)
            if getattr(self.scenario.config, one.name) != value:
                plainer = replace(self.scenario, config=replace(self.scenario.config, **{one.name: value}))
                needed = self._fails(plainer, self.lines)
                if needed:
                    self.scenario, self.lines = plainer, self.lines[:needed]


def failure_of(scenario: Scenario, lines: Sequence[str]) -> Failure | None:
    """How these lines fail under this head; its line counts them from 1. None if they do not, or mean nothing."""
    try:
        return play(compile_scenario(replace(scenario, nodes=_nodes(lines)))[0])
    except ScenarioError:
        return None


def _nodes(lines: Sequence[str]) -> tuple[Line, ...]:
    return tuple(Line(number, text) for number, text in enumerate(lines, 1))


def _likeness(failure: Failure) -> tuple[str, str]:
    """What two failures have in common if they are the same: everything but numbers and names of requests."""
    first = failure.found.splitlines()[0] if failure.found else ""
    return failure.expected, re.sub(r"\d+|'[^']*'", "", first)
