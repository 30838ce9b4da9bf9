"""The mutants fit the sources, ten of them are killed here, and the campaign can tell a survivor from a kill."""

from __future__ import annotations

import ast
import shutil

import pytest

from tests.mutants import run
from tests.mutants.catalogue import BY_ID, CATALOGUE, PACKAGE, QUICK, Mutant, StaleMutant, stale
from tests.mutants.trial import CHECKS, order_for

HARMLESS = Mutant("harmless", "a docstring says something else", "backup/beliefs.py", "A flush: nothing", "Nothing")


def test_every_mutant_fits_the_sources() -> None:
    assert stale() == []


def test_the_catalogue_is_well_formed() -> None:
    assert len(CATALOGUE) >= 60
    assert len(BY_ID) == len(CATALOGUE), "ids are unique"
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in CATALOGUE}) == len(CATALOGUE), "so are faults"
    assert len(set(QUICK)) == 10
    assert set(QUICK) <= set(BY_ID)
    assert all(mutant.bug and mutant.old != mutant.new for mutant in CATALOGUE)


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda mutant: mutant.id)
def test_a_mutant_is_python(mutant: Mutant) -> None:
    """It has to be found by what it does."""
    ast.parse(mutant.applied((PACKAGE / mutant.file).read_text(encoding="utf-8")))


@pytest.mark.parametrize("source", ["a = 1\n", "a = 2\na = 2\n"])
def test_a_snippet_that_does_not_stand_there_once_is_named_by_its_mutant(source: str) -> None:
    mutant = Mutant("wrong-number", "counts wrong", "a.py", "a = 2", "a = 3")
    with pytest.raises(StaleMutant, match="'wrong-number'"):
        mutant.applied(source)


@pytest.mark.parametrize("file", ["prefetch/retries.py", "control/plane.py"])
def test_every_check_is_asked_those_of_the_own_part_first(file: str) -> None:
    order = order_for(file)
    assert sorted(order) == sorted(check.name for check in CHECKS)
    assert order[0] == {"prefetch/retries.py": "retries"}.get(file, CHECKS[0].name)


@pytest.fixture(scope="module")
def quick() -> dict[str, run.Outcome]:
    outcomes = run.campaign([BY_ID[name] for name in QUICK])
    return {outcome.mutant.id: outcome for outcome in outcomes}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_is_killed(name: str, quick: dict[str, run.Outcome]) -> None:
    assert quick[name].killed, BY_ID[name].bug


def test_an_untouched_copy_passes() -> None:
    assert run.control(("write path",)).kills == []


def test_a_mutant_that_nothing_notices_survives() -> None:
    [outcome] = run.campaign([HARMLESS], checks=("write path",))
    assert not outcome.killed


def test_a_mutant_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TRIAL_SECONDS", 5)
    old = "class HiCacheError"
    [outcome] = run.campaign([Mutant("hangs", "never ends", "errors.py", old, f"while True:\n    pass\n{old}")])
    assert [(kill.check, kill.what) for kill in outcome.verdict.kills] == [("import", "timeout")]


def test_a_trial_that_judges_something_else_is_no_verdict() -> None:
    with run.benches(1) as [bench]:
        shutil.rmtree(bench.package)
        with pytest.raises(run.CampaignError, match="not the copy"):
            bench.judge(None, ("write path",), False, 0)
