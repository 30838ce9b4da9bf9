"""`campaign`: the pipeline machine under ever new seeds, until the time is up or something fails. Needs Hypothesis."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from random import Random

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.model import Kind, Row
from hicache_fsm.lifecycle.table import REQUEST_TABLE
from hicache_fsm.testing.pipeline_machine import PipelineMachine
from hicache_fsm.testing.pipeline_walk import Choose, Pipeline
from hicache_fsm.testing.scenario import parse
from hicache_fsm.testing.scenario_shrink import shrink
from hicache_fsm.testing.script import to_scenario

CASES_A_ROUND = 20
"""Each round has a seed of its own, from which it can be run again; small, so that the time limit is kept."""

_MOVES = [row for row in REQUEST_TABLE.rows if row.kind is Kind.TRANSITION]
ROWS = len(_MOVES)
"""Transition rows of the request table."""
PAIRS = sum(1 for first in _MOVES for second in _MOVES if first.target == second.source)
"""Pairs of rows that fit together, reachable or not."""


@dataclass(slots=True)
class Fault:
    """A failure: the seed of its round, what was raised, and the shortest scenario that shows it."""

    round_seed: int
    error: str
    scenario: str
    replays: bool  # whether the scenario alone fails in this way


@dataclass(slots=True)
class Campaign:
    """What a campaign has done."""

    seed: int
    cases: int = 0
    steps: int = 0
    rounds: int = 0
    seconds: float = 0.0
    rows: set[int] = field(default_factory=set)
    pairs: set[tuple[int, int]] = field(default_factory=set)
    fault: Fault | None = None


def campaign(
    campaign_seed: int, seconds: float, machine: type[PipelineMachine] = PipelineMachine, steps: int = 50
) -> Campaign:
    """Rounds of cases of `steps` steps until `seconds` have gone by or a case fails; at least one round."""
    done = Campaign(campaign_seed)
    last = _LastFailed()
    watched = _watched(machine, done, last)
    began = time.monotonic()
    while done.fault is None and (done.rounds == 0 or done.seconds < seconds):
        round_seed = Random(f"{campaign_seed} {done.rounds}").getrandbits(64)
        done.rounds += 1
        error = _round(watched, round_seed, _settings(steps))
        if error is not None:
            done.fault = _replayable(last.run, round_seed, error)
            if done.fault is None:  # only the machine sees it, so that lines cannot be left out
                done.fault = _in_fewest_steps(watched, last, _as_it_is(last.run, round_seed, error), steps)
        done.seconds = time.monotonic() - began
    return done


def _round(machine: type[PipelineMachine], round_seed: int, chosen: settings) -> Exception | None:
    """What the first failing case of a round raises."""
    try:
        run_state_machine_as_test(seed(round_seed)(machine), settings=chosen)
    except Exception as error:  # whatever a case raises is what we are here for
        return error
    return None


def _settings(steps: int) -> settings:
    return settings(
        max_examples=CASES_A_ROUND,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=False,
        phases=(Phase.generate,),  # scenarios are shrunk by leaving out lines, which takes seconds instead of minutes
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(slots=True)
class _LastFailed:
    """The pipeline that failed last: when Hypothesis is done, the one of the smallest failing case."""

    run: Pipeline | None = None


def _watched(machine: type[PipelineMachine], done: Campaign, last: _LastFailed) -> type[PipelineMachine]:
    """The machine, on a pipeline that counts into `done`."""

    class Watched(machine.pipeline):  # type: ignore[name-defined, misc]
        def __init__(self, choose: Choose) -> None:
            super().__init__(choose)
            done.cases += 1
            self.sim.plane.parts.observer = _Follow(done)

        def step(self, choose: Choose) -> str:
            done.steps += 1
            try:
                text: str = super().step(choose)
            except Exception:
                last.run = self
                raise
            return text

        def wind_up(self) -> None:
            try:
                super().wind_up()
            except Exception:
                last.run = self
                raise

    return type(machine.__name__, (machine,), {"pipeline": Watched})


class _Follow:
    """Notes which rows fire, and which one behind which."""

    def __init__(self, done: Campaign) -> None:
        self.done = done
        self.last: dict[tuple[str, int], int] = {}

    def __call__(self, attempt: Attempt, row: Row, argument: int) -> None:
        if row.kind is not Kind.TRANSITION:
            return
        who = attempt.rid, attempt.number
        before = self.last.get(who)
        self.done.rows.add(row.id)
        if before is not None:
            self.done.pairs.add((before, row.id))
        self.last[who] = row.id


def _replayable(run: Pipeline | None, round_seed: int, error: Exception) -> Fault | None:
    """The failure with the shortest scenario that fails alike; None if the scenario alone does not fail."""
    if run is None:
        return None
    short = shrink(parse(run.scenario(_title(error), round_seed), "found"))
    if short is None:
        return None
    lines = [line.text for line in short.runs()[0].lines]
    return Fault(round_seed, _told(error), to_scenario(short.config, lines, short.title, round_seed), replays=True)


def _as_it_is(run: Pipeline | None, round_seed: int, error: Exception) -> Fault:
    scenario = "" if run is None else run.scenario(_title(error), round_seed)
    return Fault(round_seed, _told(error), scenario, replays=False)


def _in_fewest_steps(machine: type[PipelineMachine], last: _LastFailed, fault: Fault, steps: int) -> Fault:
    """The fault in a case of fewer steps, if cases of the same seed show one."""
    fewer = 1
    while fewer < steps:
        error = _round(machine, fault.round_seed, _settings(fewer))
        if error is not None:
            return _as_it_is(last.run, fault.round_seed, error)
        fewer *= 2
    return fault


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _title(error: Exception) -> str:
    """The first line of the error, without what would begin a comment."""
    return _told(error).splitlines()[0][:100].replace("#", "")
