"""The TLA+ specification: a small set of its configurations, its agreement with the request table, and traces.

Without Java or the TLC jar these tests are skipped, except under CI, where they fail: `make spec` runs everything.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
from pathlib import Path

import pytest

from hicache_fsm.cli import main
from hicache_fsm.config import CacheConfig
from hicache_fsm.lifecycle.model import Kind
from hicache_fsm.lifecycle.table import REQUEST_TABLE
from hicache_fsm.observe.transitions import TransitionLog
from spec import run, traces, witness
from spec.tlc_graph import read_dump
from spec.wander import config_of, wander


def _missing() -> str:
    try:
        run.find_tools()
    except run.ToolMissing as missing:
        return str(missing)
    return ""


needs_tlc = pytest.mark.skipif(bool(_missing()) and not os.environ.get("CI"), reason=_missing() or "TLC is there")


# ── the runner ───────────────────────────────────────────────────────────────────────────────────────


def test_every_configuration_file_is_run_by_make_spec_or_soak() -> None:
    assert run.unlisted() == []
    for config in run.CONFIGS:
        assert config.path.exists()
        assert config.sets <= {"test", "spec", "soak"} and config.sets


def test_every_configuration_says_why_its_bounds_are_sound() -> None:
    for config in run.CONFIGS:
        head = [line for line in config.path.read_text().splitlines() if line.startswith("\\*")]
        wanted = "Must fail. " if config.refuted else ""
        assert head and head[0].startswith("\\* " + wanted), config.name
        assert config.refuted or head[1].startswith("\\* Bounds: "), f"{config.name} gives no reason for its bounds"


def test_a_missing_tool_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(run.ToolMissing, match="apt-get install default-jre-headless"):
        run.find_tools()
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/java")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(run.ToolMissing, match="pip install"):
        run.find_tools()
    assert run.main([]) != 0


def test_a_wrong_count_and_a_claim_that_holds_are_faults() -> None:
    outcome = run.Outcome(generated=9, distinct=7, depth=3, violated="", seconds=0.1, output="")
    assert "7 states" in run.judge(run.Config("MC_x", frozenset(), distinct=8, depth=3), outcome)
    assert run.judge(run.Config("MC_x", frozenset(), distinct=7, depth=3), outcome) == ""
    reach = run.Config("reach/X", frozenset(), refuted="NeverX")
    assert "not reachable any more" in run.judge(reach, outcome)
    assert run.judge(reach, outcome._replace(violated="NeverX")) == ""
    assert "not reachable any more" in run.judge(reach, outcome._replace(violated="Safety"))


# ── TLC ──────────────────────────────────────────────────────────────────────────────────────────────

SMALL = [config for config in run.CONFIGS if "test" in config.sets]


@needs_tlc
@pytest.mark.parametrize("config", SMALL, ids=lambda config: config.name)
def test_configuration_ends_as_expected(config: run.Config) -> None:
    outcome = run.run_tlc("MC", config.path)
    assert run.judge(config, outcome) == ""
    if config.refuted:
        assert witness.check(config, outcome.output) == "", "the code cannot follow TLC's trace"


FAULTS = {
    "a cut read leaves its rows to nobody": (
        "MC_one", "{[o EXCEPT !.own = Touched(o)]}, !.hold[r] = First(@, o.got)]", "{o}, !.hold[r] = First(@, o.got)]",
    ),
    "a pin is not returned": (
        "MC_one", "ReturnHold(s, r) == Unpin(GiveRows([s EXCEPT !.hold[r] = <<>>], Range(s.hold[r])), r)",
        "ReturnHold(s, r) == GiveRows([s EXCEPT !.hold[r] = <<>>], Range(s.hold[r]))",
    ),
    "a pin comes back without news": ("MC_strangers", "!.pin[r] = 0, !.news = TRUE]", "!.pin[r] = 0]"),
}  # fmt: skip


@needs_tlc
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_spec_breaks_an_invariant(name: str, tmp_path: Path) -> None:
    """The invariants bite: a configuration with one thing done wrong is refuted."""
    config, old, new = FAULTS[name]
    text = (run.HERE / "Prefetch.tla").read_text()
    assert text.count(old) == 1, f"{text.count(old)} places to break"
    (tmp_path / "Prefetch.tla").write_text(text.replace(old, new))
    (tmp_path / "MC.tla").write_text((run.HERE / "MC.tla").read_text())
    assert run.run_tlc("MC", run.HERE / f"{config}.cfg", folder=tmp_path).violated == "Safety"


# ── Lifecycle.tla and the request table ──────────────────────────────────────────────────────────────


@needs_tlc
def test_the_lifecycle_and_the_table_have_the_same_steps(tmp_path: Path) -> None:
    dump = tmp_path / "graph.dot"
    outcome = run.run_tlc(
        "Lifecycle", run.HERE / "Lifecycle.cfg", extra=("-dump", "dot,actionlabels", str(dump))
    )
    assert outcome.violated == ""
    states, edges = read_dump(dump.read_text())
    spec = {(states[a]["ph"], states[b]["last"], states[b]["ph"]) for a, b, _ in edges}
    name = [state.name for state in REQUEST_TABLE.states]
    table = {
        (name[row.source], REQUEST_TABLE.events[row.event].name, name[row.target])
        for row in REQUEST_TABLE.rows
        if row.kind is Kind.TRANSITION
    }
    never = {(source, "exhausted", "recomputing") for source in ("paced", "refetch")}
    assert spec - table == set(), "only spec"
    assert table - spec == never, "only table"


# ── real runs ────────────────────────────────────────────────────────────────────────────────────────

LIVES = 500


@pytest.fixture(scope="module")
def real_lives(tmp_path_factory: pytest.TempPathFactory) -> list[traces.Life]:
    """A replay with threads and a staging engine, and hostile random schedules."""
    log = tmp_path_factory.mktemp("log") / "replay.jsonl"
    assert main(["replay", "--requests", "60", "--seed", "7", "--log", str(log)]) == 0
    found = traces.lives("replay", log.read_text().splitlines(), traces.caps_of(CacheConfig()))
    seed = 0
    while len(found) < LIVES:
        out = io.StringIO()
        wander(seed, TransitionLog(out))
        found += traces.lives(f"wander {seed}", out.getvalue().splitlines(), traces.caps_of(config_of(seed)))
        seed += 1
    return found


@needs_tlc
def test_logs_of_real_runs_are_behaviours_of_the_lifecycle(real_lives: list[traces.Life]) -> None:
    verdict = traces.check(real_lives)
    assert verdict.unexplained == ""
    assert verdict.lives >= LIVES


@needs_tlc
def test_the_first_line_that_is_not_explained_is_named(real_lives: list[traces.Life]) -> None:
    some = real_lives[:40]
    at = next(i for i, life in enumerate(some) if len(life.lines) > 4)
    life = some[at]
    wrong = life.lines[2]._replace(to="parked" if life.lines[2].to != "parked" else "idle")
    broken = life._replace(lines=(*life.lines[:2], wrong, *life.lines[3:]))
    verdict = traces.check([*some[:at], broken, *some[at + 1 :]])
    assert verdict.unexplained.startswith(f"{life.log}:{wrong.number}: request {life.rid!r} attempt {wrong.attempt}")
