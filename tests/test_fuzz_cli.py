"""`hicache-fsm fuzz`: a campaign counts what it did, finds a planted bug, and prints a scenario that shows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from hicache_fsm.cli import main
from hicache_fsm.control.effects import RequestEffects
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.model import Row
from hicache_fsm.testing.fuzz import CASES_A_ROUND, PAIRS, ROWS, campaign
from hicache_fsm.testing.pipeline_machine import PipelineMachine
from hicache_fsm.testing.pipeline_walk import Choose, Pipeline


def nothing(self: RequestEffects, attempt: Attempt, row: Row, argument: int) -> None:
    """An effect that somebody forgot."""


def test_a_campaign_without_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fuzz.json"
    assert main(["fuzz", "--minutes", "0", "--seed", "3", "--steps", "30", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["seed"] == 3
    assert found["failure"] is None
    assert found["cases"] >= CASES_A_ROUND
    assert found["steps"] > 5 * found["cases"]
    assert 20 < found["rows"]["fired"] < found["rows"]["of"] == ROWS
    assert found["rows"]["fired"] < found["pairs"]["fired"] < found["pairs"]["fitting"] == PAIRS
    assert f"seed 3: {found['cases']} cases, {found['steps']} steps" in capsys.readouterr().out


def test_a_seed_gives_the_same_campaign_again() -> None:
    first, again, other = (campaign(seed, 0, steps=20) for seed in (8, 8, 9))
    assert (first.cases, first.steps, first.rows, first.pairs) == (again.cases, again.steps, again.rows, again.pairs)
    assert (first.steps, first.pairs) != (other.steps, other.pairs)


def test_a_planted_bug_is_found_and_its_scenario_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestEffects, "settle", nothing)
    out = tmp_path / "fuzz.json"
    assert main(["fuzz", "--minutes", "1", "--seed", "5", "--json", str(out)]) == 1
    shown = capsys.readouterr().out
    failure = json.loads(out.read_text())["failure"]
    assert "InvariantViolation: accounts:" in failure["error"]
    assert f"(seed {failure['seed']})" in shown
    assert failure["scenario"] in shown
    path = tmp_path / "found.scenario"
    path.write_text(failure["scenario"])
    assert main(["run-scenario", str(path)]) == 1
    assert "accounts:" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(["run-scenario", str(path)]) == 0, "without the bug nothing is wrong"


def test_a_failure_that_only_the_machine_sees_is_reported_as_it_is() -> None:
    class Strict(Pipeline):
        def step(self, choose: Choose) -> str:
            text = super().step(choose)
            assert not text.startswith("flush"), "flushes are not welcome here"
            return text

    class Machine(PipelineMachine):
        pipeline = Strict

    fault = campaign(1, 60, Machine, steps=12).fault
    assert fault is not None
    assert not fault.replays
    assert "not welcome" in fault.error
    assert fault.scenario.splitlines()[-1] == "flush"


def test_a_failing_machine_prints_its_scenario(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestEffects, "return_hold", nothing)
    quick = settings(max_examples=200, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    with pytest.raises(AssertionError, match="owns") as failure:
        run_state_machine_as_test(PipelineMachine, settings=quick)
    # Newer versions of Hypothesis put its report into the notes of the exception.
    shown = "\n".join([capsys.readouterr().out, *getattr(failure.value, "__notes__", ())])
    assert "title: found by Hypothesis" in shown
    assert "answer read of" in shown


def test_without_hypothesis_the_command_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "hicache_fsm.testing.fuzz")
    assert main(["fuzz", "--minutes", "0"]) == 2
    assert "pip install 'hicache-fsm[testing]'" in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["-1", "inf", "nan", "soon"])
def test_the_time_must_be_a_number(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["fuzz", "--minutes", minutes])
    assert refused.value.code == 2
    assert "--minutes" in capsys.readouterr().err
