"""The explorer: it exhausts small scopes, merges only what behaves alike, and finds seeded faults."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hicache_fsm.cli import main
from hicache_fsm.components.full import FullComponent
from hicache_fsm.config import PrefetchPolicy
from hicache_fsm.control import snapshot
from hicache_fsm.control.answers import Answers
from hicache_fsm.control.effects import RequestEffects
from hicache_fsm.control.parts import Parts
from hicache_fsm.control.waiting import WaitingQueue
from hicache_fsm.errors import ConfigError
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.model import Row
from hicache_fsm.lifecycle.operations import Operation
from hicache_fsm.pools.allocator import Gauge
from hicache_fsm.prefetch.retries import Entry, StoragePrefetchRetries
from hicache_fsm.testing import check_cli, quotient
from hicache_fsm.testing.explore_scope import Scope
from hicache_fsm.testing.explore_world import Input, Taken, World, parse_input
from hicache_fsm.testing.explorer import Label, Limits, Moves, Result, explore, replay
from hicache_fsm.testing.quotient import How, Names

ONE = Scope(requests=1)
ALONE = Scope(requests=1, staging=2, writes=True, faults=frozenset({"partial", "failed", "lost", "progress", "evict"}))
COLD = {"pages": 1, "shared": 1, "warm": 0, "device": 2, "pins": 0}
TWO = Scope(**COLD, faults=frozenset({"failed", "lost", "evict"}))  # type: ignore[arg-type]
FORKED = Scope(shared=1, faults=frozenset({"failed"}), defer_cap=1, aborts=False)


def look(world: World) -> tuple[Taken, Names]:
    return world.look()


@cache
def explored(scope: Scope) -> Result[tuple[Taken, Names]]:
    result = explore(scope, view=look)
    assert result.exhausted, result.stopped
    assert not result.violations, result.violations[0]
    return result


# ── spaces of known size ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("scope", "states", "transitions", "depth"),
    [
        (ONE, 146, 621, 12),
        (Scope(requests=1, faults=frozenset(), aborts=False), 20, 32, 6),
        (Scope(requests=1, policy=PrefetchPolicy.BEST_EFFORT), 171, 809, 12),
        (TWO, 2758, 13752, 18),
        (Scope(requests=3, **COLD, faults=frozenset()), 2263, 11235, 20),  # type: ignore[arg-type]
    ],
    ids=["one", "one-calm", "one-best-effort", "two", "three-calm"],
)
def test_space_of_known_size(scope: Scope, states: int, transitions: int, depth: int) -> None:
    """A change of these figures is a change of behaviour, or of the quotient: say which in the commit that makes it."""
    result = explored(scope)
    assert (result.states, result.transitions, result.depth) == (states, transitions, depth)


def test_more_faults_and_larger_caps_only_add_states() -> None:
    small = explored(Scope(requests=1, faults=frozenset()))
    assert explored(ONE).states > small.states
    assert explored(Scope(requests=1, retry_cap=2)).states > explored(ONE).states


def test_interchangeable_requests_are_explored_once() -> None:
    """Prompts that fork at their last page tell the requests apart: a larger space, in which the same happens."""
    calm: dict[str, Any] = {"faults": frozenset(), "aborts": False}
    merged = explored(Scope(shared=2, **calm))
    apart = explored(Scope(shared=1, **calm))
    assert merged.states < apart.states
    assert {label.input.act for label in merged.graph.labels} <= {label.input.act for label in apart.graph.labels}


def test_merged_states_are_sound_in_what_the_key_drops() -> None:
    """With `check_merged`, indexes and counters that the key drops are recounted in every state, merged or not."""
    result: Result[None] = explore(TWO, Limits(check_merged=True))
    assert result.exhausted
    assert not result.violations
    assert result.states == explored(TWO).states


# ── states are real ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scope", [ALONE, TWO, FORKED], ids=["alone", "two", "forked"])
def test_a_replay_without_snapshots_reaches_the_explored_state(scope: Scope) -> None:
    """Every field, counters and histories included, is what the inputs give on a plane that was never restored."""
    result = explored(scope)
    for state in range(0, result.states, max(1, result.states // 60)):
        world = World(scope)
        for one in result.graph.path(state):
            world.apply(one, world.names())
        taken, names = world.look()
        assert taken == result.views[state][0], f"state {state}"
        assert names == result.views[state][1]


@pytest.mark.parametrize("scope", [ALONE, TWO, FORKED], ids=["alone", "two", "forked"])
def test_merged_states_behave_alike(scope: Scope) -> None:
    """The quotient is a congruence: a state that was merged away has the inputs of its representative, and each leads
    to the same state, with the attempts in the same places."""
    result = explored(scope)
    graph = result.graph
    merged = [
        (state, edge) for state in range(result.states) for edge in graph.edges(state)
        if graph.via[graph.target[edge]] != edge
    ]  # fmt: skip
    for state, edge in merged[:: max(1, len(merged) // 250)]:
        representative = graph.target[edge]
        world = World(scope)
        for one in (*graph.path(state), graph.labels[graph.label[edge]].input):
            world.apply(one, world.names())
        expected = {
            graph.labels[graph.label[e]]: (result.views[graph.target[e]][1].key, graph.all_moves[graph.moves[e]])
            for e in graph.edges(representative)
        }
        assert successors(world) == expected, [str(i) for i in graph.path(state)]


def successors(world: World) -> dict[Label, tuple[bytes, Moves]]:
    taken, names = world.look()
    found: dict[Label, tuple[bytes, Moves]] = {}
    for one, actor in world.inputs(names):
        world.apply(one, names)
        now = world.names()
        places = {who: place for place, who in enumerate(now.attempts)}
        found[Label(one, actor)] = (now.key, Moves(tuple([places.get(who, -1) for who in names.attempts])))
        world.restore(taken)
    return found


def test_an_idle_pass_that_is_not_offered_changes_nothing() -> None:
    result = explored(TWO)
    world = World(TWO)
    for state in range(0, result.states, 7):
        taken, names = result.views[state]
        world.restore(taken)
        if Input("pass") not in [one for one, _ in world.inputs(names)]:
            world.sim.tick(0)
            assert world.names().key == names.key


# ── the quotient is what its table says ──────────────────────────────────────────────────────────────


def test_every_field_has_one_rule() -> None:
    assert quotient.undeclared() == []
    assert all(rule.why for rule in quotient.RULES)


def changed(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1000
        case str() | bytes():
            return value + value[:1]
        case tuple():
            return (*value, *value[-1:])
        case _:
            return value


def keys_after_change(field: str, views: list[tuple[Taken, Names]], world: World) -> set[bool]:
    """Whether a change of this field changes the key, over the states of which it is not empty."""
    place, _, name = field.partition(".")
    out: set[bool] = set()
    records = {cls.__name__: (cls, names) for cls, names in snapshot.RECORD_FIELDS.items()}
    where = {"Attempt": ("attempts", "live"), "Operation": ("ops", "live"), "WriteSpan": ("backup", "live")}
    for (state, outside), names in views:
        altered = list(state)
        if place in records:
            at = snapshot.POSITION[where[place]]
            column = records[place][1].index(name)
            altered[at] = tuple([
                (i, (*record[:column], changed(record[column]), *record[column + 1 :])) for i, record in state[at]
            ])  # fmt: skip
        else:
            at = snapshot.POSITION[place, name]
            altered[at] = changed(state[at])
        if altered[at] != state[at]:
            out.add(quotient.names_of(tuple(altered), outside, world.frame).key != names.key)
    return out


def rules(how: How) -> list[str]:
    return [field for rule in quotient.RULES if rule.how is how for field in rule.fields.split()]


def test_dropped_fields_do_not_enter_the_key() -> None:
    views = explored(ALONE).views[::97]
    world = World(ALONE)
    assert [field for field in rules(How.DROPPED) if True in keys_after_change(field, views, world)] == []


def test_kept_fields_enter_the_key() -> None:
    views = explored(ALONE).views[::23]
    world = World(ALONE)
    silent = [field for field in rules(How.KEPT) if keys_after_change(field, views, world) == {False}]
    assert silent == []


# ── seeded faults ────────────────────────────────────────────────────────────────────────────────────


def forget_wake(self: StoragePrefetchRetries, rid: str, hit_end: int = 0) -> None:
    """Lost wake-up: the entry is there, and no pass will look at it."""
    self.pending[rid] = Entry(True, hit_end, -1)


def free_twice(self: RequestEffects, attempt: Attempt, row: Row, argument: int) -> None:
    """Double free: the rows return, and stay in the ledger."""
    if attempt.staging:
        self.full.give_read_staging(attempt.staging)
    if attempt.pin_node:
        self.full.unpin(attempt.pin_node, attempt.pin_tokens)
        attempt.pin_node = attempt.pin_tokens = 0


def leak(self: Parts, op: Operation, row: Row, argument: int) -> None:
    """Leak: an orphaned operation ends, and its staging rows do not return."""
    if op.lock_node:
        self.full.tree.unlock(op.lock_node)
        op.lock_node = 0
    op.staging = op.device = ()


def any_owner(self: Answers, op: Operation) -> Attempt | None:
    """No identity check: whoever lives in the slot takes the answer."""
    return self.parts.attempts.by_rid.get(op.rid) and self.parts.attempts.get(op.rid)  # type: ignore[return-value]


def keep_budget(self: FullComponent, node: int, tokens: int) -> None:
    """Pin not returned: the page is unlocked, the budget stays charged."""
    self.tree.unlock(node)
    self.pin_version += 1


def never_ready(self: WaitingQueue, attempt: Attempt, ready: bool) -> None:
    """A candidate that no scan finds."""


def low_water(self: Gauge, amount: int) -> None:
    """A total that is taken from once too little."""
    self._value -= max(0, amount - 1)


SEEDED: list[tuple[type, str, Callable[..., Any], Scope, str]] = [
    (StoragePrefetchRetries, "refetch", forget_wake, ONE, "waits end: an attempt stays refetch"),
    (RequestEffects, "return_hold", free_twice, ONE, "crash: AssertionError"),
    (Parts, "_return_rows", leak, ONE, "staging: "),
    (Answers, "_owner", any_owner, Scope(requests=1, faults=frozenset({"restart"})), "crash: IllegalTransition"),
    (FullComponent, "unpin", keep_budget, ONE, "pins: "),
    (WaitingQueue, "set_ready", never_ready, ONE, "queue: "),
    (Gauge, "sub", low_water, ONE, "pins: "),
]


@pytest.mark.parametrize(("cls", "name", "fault", "scope", "what"), SEEDED, ids=[one[2].__name__ for one in SEEDED])
def test_a_seeded_fault_is_found_and_its_counterexample_replays(
    monkeypatch: pytest.MonkeyPatch, cls: type, name: str, fault: Callable[..., Any], scope: Scope, what: str
) -> None:
    monkeypatch.setattr(cls, name, fault)
    result: Result[None] = explore(scope)
    assert result.violations, "not found"
    violation = result.violations[0]
    assert any(what in text for text in violation.what), violation.what
    assert len(violation.inputs) <= 12
    assert outcome(scope, (*violation.inputs, *violation.cycle)) >= {what.partition(":")[0]}
    text = "\n".join(check_cli.describe(scope, violation))
    inputs = [parse_input(line) for line in text.splitlines() if line[0] not in "V#"]
    assert tuple(inputs) == (*violation.inputs, *violation.cycle)

    monkeypatch.undo()
    assert outcome(scope, violation.inputs) <= {"waits end"}, "the sound plane survives the same inputs"


def outcome(scope: Scope, inputs: tuple[Input, ...]) -> set[str]:
    """What a replay ends with: names of violated invariants, a crash, or a request that waits (a trap of liveness)."""
    found: set[str] = set()

    def check(world: World) -> None:
        found.update(text.partition(":")[0] for text in world.violations())

    try:
        for _ in replay(scope, inputs, check):
            pass
    except Exception:
        found.add("crash")
    return found or {"waits end"}


def test_the_shortest_counterexample_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullComponent, "unpin", keep_budget)
    result: Result[None] = explore(ONE)
    # No shorter way exists: submit, the look-up's answer (which pins), and the first thing that ends the read.
    assert [one.act for one in result.violations[0].inputs[:2]] == ["submit", "answer"]
    assert len(result.violations[0].inputs) == 3


# ── limits and the command line ──────────────────────────────────────────────────────────────────────


def test_limits_end_a_search_and_say_so() -> None:
    result: Result[None] = explore(Scope(), Limits(states=300))
    assert not result.exhausted
    assert not result.violations
    assert "300 states" in result.stopped
    timed: Result[None] = explore(Scope(), Limits(seconds=1e-9))
    assert "time limit" in timed.stopped
    full: Result[None] = explore(Scope(), Limits(memory_mb=1))
    assert "memory limit" in full.stopped


@pytest.mark.parametrize(
    "bad",
    [{"requests": 0}, {"device": 2}, {"pins": 2}, {"warm": 3}, {"faults": frozenset({"gremlins"})}],
    ids=str,
)
def test_a_scope_that_cannot_be_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Scope(**bad)


def check(*options: str) -> int:
    parser = argparse.ArgumentParser()
    check_cli.add_check_arguments(parser)
    return check_cli.run_check(parser.parse_args(options))


def test_check_reports_and_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert check("--requests", "1", "--json", str(out)) == 0
    figures = json.loads(out.read_text())
    result = explored(ONE)
    assert (figures["states"], figures["transitions"]) == (result.states, result.transitions)
    assert figures["exhausted"] is True
    assert figures["violations"] == []
    assert f"{result.states} states" in capsys.readouterr().out


def test_check_prints_a_counterexample_that_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FullComponent, "unpin", keep_budget)
    assert check("--requests", "1") == 1
    said = capsys.readouterr().out
    assert "VIOLATION pins: " in said
    lines = [line for line in said.splitlines() if " # " in line or line.startswith(("submit", "answer"))]
    trace = tmp_path / "trace.txt"
    trace.write_text("\n".join(lines))
    assert check("--requests", "1", "--replay", str(trace)) == 1
    assert "VIOLATION pins: " in capsys.readouterr().out
    monkeypatch.undo()
    assert check("--requests", "1", "--replay", str(trace)) == 0


def test_check_writes_a_counterexample_as_a_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario fails on the faulty code, and holds on the code as it is."""
    file = tmp_path / "found.scenario"
    with monkeypatch.context() as faulty:
        faulty.setattr(FullComponent, "unpin", keep_budget)
        assert main(["check", "--scenario", str(file)]) == 1
        assert main(["run-scenario", str(file)]) == 1
    assert main(["run-scenario", str(file)]) == 0


def test_check_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--requests", "0") == 2
    assert check("--replay", str(tmp_path / "none")) == 2
    with pytest.raises(SystemExit):
        check("--faults", "gremlins")
    assert "known: partial" in capsys.readouterr().err


def test_a_limit_is_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--time-limit", "0.000001") == 3
    assert "not exhausted (time limit" in capsys.readouterr().out


def test_inputs_are_text_and_back() -> None:
    result = explored(ALONE)
    for label in result.graph.labels:
        assert parse_input(f"{label.input}  # a comment") == label.input
    with pytest.raises(ValueError, match="is no input"):
        parse_input("dance 0")
