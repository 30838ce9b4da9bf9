"""Makes a failing scenario as short as it will go: lines are left out as long as it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hicache_fsm.testing.scenario import Scenario
from hicache_fsm.testing.scenario_run import Failure, compile_scenario, play
from hicache_fsm.testing.scenario_text import Line, ScenarioError


def shrink(scenario: Scenario, most_tries: int = 3000) -> list[str] | None:
    """Lines of a shortest failing scenario with this head, such that none can be left out; fewer tries may leave some.
    None if the first variant of the scenario does not fail, or only for want of time to end."""
    lines = [line.text for line in scenario.runs()[0].lines]
    failure = _failure(scenario, lines)
    if failure is None or failure.text == "expect idle":
        return None  # what has not ended yet: any shorter scenario fails in this way too
    lines = lines[: failure.line]
    wanted = _likeness(failure)
    size = max(1, len(lines) // 2)
    tries = 0
    while True:
        at, shorter = 0, False
        while at < len(lines) and tries < most_tries:
            tries += 1
            rest = lines[:at] + lines[at + size :]
            found = _failure(scenario, rest) if rest else None
            if found is not None and _likeness(found) == wanted:
                lines, shorter = rest[: found.line], True
            else:
                at += size
        if tries >= most_tries or (size == 1 and not shorter):
            return lines
        size = max(1, size // 2)


def _failure(scenario: Scenario, lines: Sequence[str]) -> Failure | None:
    """How these lines fail; line numbers count them from 1. A line that means nothing any more is no failure."""
    nodes = tuple(Line(number, text) for number, text in enumerate(lines, 1))
    try:
        return play(compile_scenario(replace(scenario, nodes=nodes))[0])
    except ScenarioError:
        return None


def _likeness(failure: Failure) -> tuple[str, str]:
    """What two failures have in common if they are the same: everything but numbers and names of requests."""
    first = failure.found.splitlines()[0] if failure.found else ""
    return failure.expected, re.sub(r"\d+|'[^']*'", "", first)
