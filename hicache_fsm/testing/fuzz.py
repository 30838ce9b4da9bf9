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
        try:
            run_state_machine_as_test(seed(round_seed)(watched), settings=_settings(steps))
        except Exception as error:  # whatever a case raises is what we are here for
            done.fault = _fault(last.run, round_seed, error)
        done.seconds = time.monotonic() - began
    return done


def _settings(steps: int) -> settings:
    return settings(
        max_examples=CASES_A_ROUND,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
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


def _fault(run: Pipeline | None, round_seed: int, error: Exception) -> Fault:
    told = f"{type(error).__name__}: {error}"
    if run is None:  # the machine itself could not be started
        return Fault(round_seed, told, "", replays=False)
    title = told.splitlines()[0][:100]
    text = run.scenario(title, round_seed)
    lines = shrink(parse(text, "found"))
    if lines is None:
        return Fault(round_seed, told, text, replays=False)
    return Fault(round_seed, told, to_scenario(run.config, lines, title, round_seed), replays=True)
