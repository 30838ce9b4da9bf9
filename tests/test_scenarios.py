"""Scenario files: all of them hold, the parser refuses what means nothing, and what was recorded can be run again."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_fsm.cli import main
from hicache_fsm.config import CacheConfig
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.table import EFFECTS
from hicache_fsm.testing import scenario_docs
from hicache_fsm.testing.explore_scope import DEFAULT_FAULTS, Scope
from hicache_fsm.testing.explore_world import World
from hicache_fsm.testing.explorer import Limits, Result, explore
from hicache_fsm.testing.pipeline_walk import Pipeline, RandomChoices
from hicache_fsm.testing.scenario import DEFAULTS, Scenario, load, parse
from hicache_fsm.testing.scenario_prompt import parse_prompt, show_prompt
from hicache_fsm.testing.scenario_run import Failure, Step, compile_scenario, play
from hicache_fsm.testing.scenario_shrink import failure_of, shrink
from hicache_fsm.testing.scenario_text import ScenarioError
from hicache_fsm.testing.script import explored, to_scenario
from hicache_fsm.testing.sim import Sim
from tests.conftest import ROOT

FOLDER = ROOT / "tests" / "scenarios"
FILES = sorted(FOLDER.glob("*.scenario"))
DOCUMENT = ROOT / "docs" / "scenarios.md"


@cache
def scenario_of(path: Path) -> Scenario:
    return load(path)


def run_all(scenario: Scenario) -> list[Failure]:
    return [failure for run in compile_scenario(scenario) if (failure := play(run)) is not None]


def run_text(text: str) -> list[Failure]:
    return run_all(parse(f"title: test\n{text}", "test.scenario"))


# ── the field cases ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    failures = run_all(scenario_of(path))
    assert not failures, f"{len(failures)} variants fail, the first:\n{failures[0]}"


def test_files_are_named_after_their_case() -> None:
    assert len(FILES) > 50
    wrong = [path.name for path in FILES if not path.name.startswith(f"{scenario_of(path).case}-")]
    assert not wrong


def test_the_index_has_every_field_case_once() -> None:
    rows = re.findall(r"^\| BC-(\d{3}) \| .+ \| (.+) \|$", (FOLDER / "INDEX.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 87))
    listed = {match[1] for _, where in rows if (match := re.match(r"\[.*\]\((.*)\)$", where))}
    assert listed == {path.name for path in FILES}
    assert all(where.strip() for _, where in rows)


@pytest.mark.parametrize("effect", EFFECTS)
def test_some_scenario_fails_without(effect: str) -> None:
    """Leaving out one effect of the request table must show in the scenarios, or they would expect too little."""
    assert any(run_all(replace(scenario_of(path), broken=effect)) for path in FILES)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────

WRONG = {
    "submit r abc plus 2 tokns": "'tokns'; did you mean 'tokens'?",
    "submit r ab+": "expected a prompt",
    "submit": "expected the name of a request; found the end of the line",
    "tick 5": "expected 'ms'; found the end of the line",
    "tick 5 ms now": "expected the end of the line; found 'now'",
    "anser lookup of q": "expected an event or 'expect'; found 'anser'; did you mean 'answer'?",
    "answer lookup of rr": "expected a request that was submitted above; found 'rr'; did you mean 'r'?",
    "expect r is stagd": "expected a state; found 'stagd'; did you mean 'staged'?",
    "expect r retrys = 1": "found 'retrys'; did you mean 'retries'?",
    "expect stagin free = 8": "did you mean 'staging' instead of 'stagin'?",
    "expect unfulfilled shrnk = 8": "did you mean 'shrunk'?",
    "expect r is": "expected a state; found the end of the line",
    "expect staging free == 8": "expected a comparison; found '=='",
    "expect illegal: finsh r": "did you mean 'finish'?",
    "expect r is querying; expect violation pins": "expected 'expect violation WORDS' as the last line",
    "page_size: 2": "belongs into the head",
    "repeat x: tick": "expected 'repeat N:'",
    "each 3: tick": "expected 'each i in 1..9:'",
    "any order:": "expected lines below it that are indented more; found none",
    "or:": "'or:' without 'either:'",
    "  tick": "expected 0 spaces before the line; found 2",
    "\ttick": "found a tab",
    "repeat i in 1..2: submit r{j} ab": "expected a variable of a block above; found 'j'",
    "repeat i in a b: tick {i+1} ms": "counts with what is no number",
    "repeat 100001: tick": "more than 100000 steps",
    "each i in 1..40: each j in 1..40: tick": "expected",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_refused_with_its_place(line: str) -> None:
    with pytest.raises(ScenarioError) as refusal:
        run_text(f"submit r ab\n{line}")
    assert WRONG[line] in str(refusal.value)
    assert str(refusal.value).startswith("test.scenario:3:")


WRONG_HEADS = {
    "": "test:1: expected a line 'title: ...'",
    "title: a\ntitle: b": "test:2: 'title' is given twice",
    "title: a\npage_sise: 2": "test:2: expected a line of the head; found 'page_sise'; did you mean 'page_size'?",
    "title: a\npage_size: two": "test:2: page_size is a whole number; found 'two'",
    "title: a\nanchor_lock_cap: x": "test:2: anchor_lock_cap is a number; found 'x'",
    "title: a\ndebug: yes": "test:2: debug is true or false; found 'yes'",
    "title: a\nprefetch_policy: best_efort": "did you mean 'best_effort'?",
    "title: a\ncase: 13": "test:2: expected a case such as BC-013; found '13'",
    "title: a\nbreak: setle": "test:2: expected an effect; found 'setle'; did you mean 'settle'?",
    "title: a\ndevice_pages: 0": "cannot work: device_pages must be at least 1",
    "title: a\npin_cap_tokens: 3\nanchor_lock_cap: 0.5": "pin_cap_tokens sets anchor_lock_cap",
}


@pytest.mark.parametrize("head", WRONG_HEADS)
def test_a_wrong_head_is_refused_with_its_place(head: str) -> None:
    with pytest.raises(ScenarioError) as refusal:
        parse(f"{head}\n\ntick\n", "test")
    assert WRONG_HEADS[head] in str(refusal.value)


def test_a_scenario_without_events_is_refused() -> None:
    with pytest.raises(ScenarioError, match="expected events"):
        parse("title: a\n# nothing\n", "test")


def test_blocks_unfold_into_runs() -> None:
    text = """title: blocks
each n in 1..2:
    repeat i in a b:
        submit {i}{n} x   # a comment
either:
    any order:
        tick {n} ms
        flush
or:
    repeat 2: tick; attach
"""
    text = text.replace("tick {n} ms", "tick 7 ms")
    runs = [(run.variant, [line.text for line in run.lines]) for run in parse(text).runs()]
    starts = {1: ["submit a1 x", "submit b1 x"], 2: ["submit a2 x", "submit b2 x"]}
    ends = {
        "line 6, order: tick 7 ms / flush": ["tick 7 ms", "flush"],
        "line 6, order: flush / tick 7 ms": ["flush", "tick 7 ms"],
        "line 10": ["tick", "attach", "tick", "attach"],
    }
    assert runs == [(f"n={n}, {end}", [*starts[n], *ends[end]]) for n in (1, 2) for end in ends]


def test_variables_count() -> None:
    run = parse("title: a\nrepeat i in 2..3: tick {i} ms; tick {i+1} ms; tick {9-i} ms; tick {i*i} ms").runs()[0]
    assert [line.text.split()[1] for line in run.lines] == ["2", "3", "7", "4", "3", "4", "6", "9"]


def test_settings_of_the_head_reach_the_plane() -> None:
    config = parse("title: a\npage_size: 4\nprefetch_policy: best_effort\npin_cap_tokens: 8\n\ntick").config
    assert config == replace(CacheConfig(**{**DEFAULTS, "page_size": 4, "anchor_lock_cap": 1.0}),
                             prefetch_policy=type(config.prefetch_policy)("best_effort"),
                             max_context_tokens=24 * 4 - 8)  # fmt: skip
    assert config.pin_cap_tokens == 8


labels = st.lists(st.sampled_from(["a", "b", "Z", "tail7", "3", "x.y"]), max_size=12)


@given(labels)
def test_prompts_are_written_as_they_are_read(pages: list[str]) -> None:
    assert parse_prompt(show_prompt(pages)) == tuple(pages)


# ── playing ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_failure_names_place_values_and_history() -> None:
    failure = run_text("submit r ab\nanswer lookup of r; tick\nexpect r is staged")[0]
    assert (failure.line, failure.expected, failure.found) == (4, "staged", "idle")
    assert "lookup -> prefetching/querying" in failure.explanation
    assert str(failure).startswith("test.scenario:4: expect r is staged")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("answer read of r", "outstanding: lookup of r"),
        ("admit r", "no candidate"),
        ("evict 1 page", "0"),
        ("answer lookup of r with 9 pages", "9 pages"),
        ("finish r", "IllegalTransition"),
        ("submit r ab", "DuplicateRequest"),
        ("expect no leaks", "not idle"),
        ("expect r retries >= 1", "0"),
        ("expect illegal: abort r", "the event was legal"),
        ("expect candidates = r", "none"),
        ("stage q ab", "paced"),
    ],
)
def test_an_event_that_does_not_happen_is_a_failure(line: str, found: str) -> None:
    failures = run_text(f"submit r ab\n{line}")
    assert len(failures) == 1
    assert found in failures[0].found


def test_refused_events_change_nothing() -> None:
    assert not run_text(
        "submit r ab\nexpect illegal: finish r\nexpect illegal: event load_ack for r\n"
        "expect duplicate: submit r ab\nexpect r is querying"
    )


MUST_FAIL = "store has ab\nstage r ab\nspoil hold of r\n"


def test_a_violation_can_be_expected_and_is_a_failure_otherwise() -> None:
    assert not run_text(f"{MUST_FAIL}expect violation holds other bytes")
    assert run_text(MUST_FAIL)[0].expected == "no violation"
    assert "holds other bytes" in run_text(f"{MUST_FAIL}expect violation pins")[0].found
    assert run_text("submit r ab\ntick\nexpect violation pins")[0].found == "none"


def test_an_effect_can_be_left_out() -> None:
    lines = "store has ab\nstage r ab\nabort r"
    assert run_text(f"break: settle\n\n{lines}\nexpect violation accounts: found 2") == []
    assert run_text(f"{lines}\nexpect no leaks") == []


# ── the command ──────────────────────────────────────────────────────────────────────────────────────


def test_the_command_runs_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["run-scenario", *map(str, FILES[:2]), "--verbose", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "2 scenarios, none failed" in shown
    assert "r1:staged" in shown
    results = json.loads(out.read_text())
    assert results["failed"] == 0
    assert [one["case"] for one in results["scenarios"]] == ["BC-001", "BC-002"]
    assert all(one["steps"] > 10 and one["failures"] == [] for one in results["scenarios"])


def test_the_command_tells_what_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "a.scenario", tmp_path / "out.json"
    path.write_text("title: fails\n\nsubmit r ab\neither:\n    tick\nor:\n    abort r\nexpect r is ended\n")
    assert main(["run-scenario", str(path), str(FILES[0]), "--json", str(out)]) == 1
    shown = capsys.readouterr().out
    assert f"{path}:8: expect r is ended\n  expected: ended\n  found:    querying\n  variant:  line 5" in shown
    assert "1 of 2 variants" in shown
    assert "2 scenarios, 1 failed" in shown
    assert [len(one["failures"]) for one in json.loads(out.read_text())["scenarios"]] == [1, 0]


@pytest.mark.parametrize("text", ["title: a\n\nsubmitt r ab\n", None, b"\xff\xfe"])
def test_the_command_refuses_what_is_no_scenario(
    text: str | bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.scenario"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert main(["run-scenario", str(FILES[0]), str(path)]) == 2
    done = capsys.readouterr()
    assert str(path) in done.err
    assert done.out == "", "nothing runs before everything is read"


# ── the document ─────────────────────────────────────────────────────────────────────────────────────


def test_the_document_has_the_tables_of_the_parser() -> None:
    text = DOCUMENT.read_text()
    assert scenario_docs.inserted(text) == text, "run: python -m hicache_fsm.testing.scenario_docs --write " + str(
        DOCUMENT.relative_to(ROOT)
    )


def test_the_example_of_the_document_holds() -> None:
    example = DOCUMENT.read_text().split("```")[1]
    assert not run_all(parse(example.lstrip("\n"), "example"))


# ── recorded scripts ─────────────────────────────────────────────────────────────────────────────────


def last_sim(scenario: Scenario) -> Sim:
    """Play the only run; the simulation as it is at the end."""
    sims: list[Sim] = []
    (run,) = compile_scenario(scenario)
    failure = play(run, lambda step, stage: sims.append(stage.sim))
    assert failure is None, str(failure)
    return sims[-1]


def books(sim: Sim) -> dict[str, object]:
    """What two simulations that went the same way have in common, whatever their keys are."""
    parts = sim.plane.parts
    accounts = {name: getattr(parts.accounts, name) for name in parts.accounts.__slots__}
    return {
        **accounts,
        "states": sorted((a.rid, a.number, a.state_name) for a in parts.attempts),
        "pages": (parts.full.device.available, parts.full.staging.available, parts.full.tree.resident),
        "operations": (parts.ops.last_id, parts.ops.stale),
        "written": (parts.backup.stored_pages, parts.backup.dropped_pages),
        "stored": len(sim.stored),
        "clock": (parts.pass_no, parts.now_ms),
    }


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_a_recorded_walk_plays_the_same(seed: int) -> None:
    choose = RandomChoices(seed)
    walk = Pipeline(choose)
    for _ in range(100):
        walk.step(choose)
    middle = parse(walk.scenario("in the middle", seed))
    assert books(last_sim(middle)) == books(walk.sim)
    walk.wind_up()
    assert books(last_sim(parse(walk.scenario("to the end", seed)))) == books(walk.sim)


OTHER_FAULTS = frozenset({"late", "hash", "retract", "chunk", "flush", "progress"})


@pytest.mark.parametrize("faults", [DEFAULT_FAULTS, OTHER_FAULTS], ids=["default", "other"])
def test_inputs_of_the_explorer_become_a_scenario(faults: frozenset[str]) -> None:
    scope = Scope(faults=faults)
    result: Result[None] = explore(scope, Limits(states=1500), liveness=False)
    for state in range(len(result.graph) - 1, 0, -len(result.graph) // 8):
        inputs = result.graph.path(state)
        world = World(scope)
        for one in inputs:
            world.apply(one, world.names())
        assert books(last_sim(parse(explored(scope, inputs, "found")))) == books(world.sim)


def test_a_script_can_be_written_by_any_test() -> None:
    sim = Sim(CacheConfig(**DEFAULTS), record=True)
    sim.store_has("abcd")
    sim.submit("r", "abcd")
    sim.answer_all()
    sim.tick()
    first = sim.answer(sim.of_kind(OpKind.READ)[0], pages=2)
    sim.repeat(first)
    sim.tick()
    sim.tick()
    assert sim.admit("r")
    sim.plane.abort("r")
    text = to_scenario(sim.config, sim.script or (), "by hand")
    assert text.splitlines()[3:] == [
        "store has abcd", "submit r abcd plus 1 tokens", "answer lookup of r", "tick 1 ms",
        "answer read of r with 2 pages", "again 1 back", "repeat 2: tick 1 ms", "try admit r to 5 tokens", "abort r",
    ]  # fmt: skip
    assert books(last_sim(parse(text))) == books(sim)


# ── shrinking ────────────────────────────────────────────────────────────────────────────────────────


def test_a_failing_scenario_is_shrunk_to_what_it_takes() -> None:
    noise = "submit x{i} xyz; answer all; tick; abort x{i}"
    text = f"""title: shrink
page_size: 2
break: settle

repeat i in 1..5: {noise}
store has ab
submit r ab hashed; answer hash of r; tick; answer lookup of r; tick
repeat i in 6..9: {noise}
evict all
abort r
repeat i in 10..12: {noise}
"""
    short = shrink(parse(text))
    assert short is not None
    assert short.config.page_size == 1
    lines = [line.text for line in short.runs()[0].lines]
    assert not [line for line in lines if line.split()[1:2] == ["x"] or line in ("answer all", "evict all")]
    assert failure_of(short, lines) is not None
    for left_out in range(len(lines)):
        found = failure_of(short, lines[:left_out] + lines[left_out + 1 :])
        assert found is None or "accounts" not in found.found, f"{lines[left_out]} is not needed"


def test_what_does_not_fail_is_not_shrunk() -> None:
    assert shrink(parse("title: a\nsubmit r ab\ntick")) is None
    assert shrink(parse("title: a\nsubmit r ab\nexpect idle")) is None


def test_steps_are_watched_in_order() -> None:
    seen: list[Step] = []
    (run,) = compile_scenario(parse("title: a\nsubmit r ab\ntick; abort r"))
    assert play(run, lambda step, stage: seen.append(step)) is None
    assert [(step.line.number, step.line.text) for step in seen] == [(2, "submit r ab"), (3, "tick"), (3, "abort r")]


def test_the_seed_decides_a_shuffled_order() -> None:
    text = "title: a\nseed: {}\n\nrepeat i in 1..6: submit r{{i}} (p{{i}})\nanswer all lookups shuffled"
    orders = {seed: [c.op for c in last_sim(parse(text.format(seed))).inbox] for seed in range(4)}
    assert orders == {seed: [c.op for c in last_sim(parse(text.format(seed))).inbox] for seed in range(4)}
    assert all(sorted(order) == sorted(orders[0]) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) > 1
