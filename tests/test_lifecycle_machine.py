"""The generated lifecycle machine: it has a rule for every cell of the table, and finds what breaks one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from hicache_fsm.errors import IllegalTransition
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.machine import Machine
from hicache_fsm.lifecycle.model import Kind
from hicache_fsm.lifecycle.table import REQUEST_TABLE, Event, State
from hicache_fsm.testing import lifecycle_machine
from hicache_fsm.testing.covering import ALL_EDGES, EDGE_OF_ROW
from hicache_fsm.testing.lifecycle_machine import LifecycleBase, LifecycleMachine, machine_for

ERRORS = [
    (state, event) for state in REQUEST_TABLE.states for event in REQUEST_TABLE.events
    if REQUEST_TABLE.cell(state.id, event.id)[0].kind is Kind.ERROR
]  # fmt: skip


class TestLifecycle(LifecycleMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=40, stateful_step_count=50)


def rules_of(machine: type[LifecycleBase]) -> set[str]:
    return {name for name in dir(machine) if name.startswith(("fire_", "illegal_")) and name != "fire_illegal"}


def test_every_illegal_pair_and_every_event_has_its_rule() -> None:
    names = rules_of(LifecycleMachine)
    illegal = {f"illegal_{state.name}_{event.name}" for state, event in ERRORS}
    assert names == illegal | {f"fire_{event.name}" for event in REQUEST_TABLE.events}
    assert len(illegal) == len(ERRORS) > 100


def test_names_are_stable_from_build_to_build() -> None:
    again = machine_for(REQUEST_TABLE, "LifecycleMachine")
    for attribute in ("__name__", "__qualname__", "__module__"):
        assert getattr(again, attribute) == getattr(LifecycleMachine, attribute)
    assert rules_of(again) == rules_of(LifecycleMachine)
    for name in rules_of(again):
        assert getattr(again, name).__qualname__ == f"LifecycleMachine.{name}"


@pytest.mark.parametrize(("state", "event"), ERRORS, ids=lambda d: d.name)
def test_every_illegal_pair_raises_and_changes_nothing(state: Any, event: Any) -> None:
    """The generated negative rules, each run once: a fuzz run may miss some."""
    machine = LifecycleMachine()
    machine.open(16, 0)
    attempt = machine.attempts[0]
    attempt.state = state.id
    getattr(machine, f"illegal_{state.name}_{event.name}")(0)
    assert attempt.state == state.id


def test_fuzzing_takes_most_edges(capsys: pytest.CaptureFixture[str]) -> None:
    """Measured against all transitions of the table. Swarm leaves some out; the covering suite takes every one."""

    class Counted(LifecycleMachine):  # type: ignore[valid-type, misc]
        seen: ClassVar[set[tuple[int, int]]] = set()

    run_state_machine_as_test(Counted, settings=settings(max_examples=100, stateful_step_count=50, derandomize=True))
    edges = {EDGE_OF_ROW[row] for _, row in Counted.seen}
    with capsys.disabled():
        print(f"\nlifecycle machine: {len(edges)} of {len(ALL_EDGES)} edges, {len(Counted.seen)} pairs of rows")
    assert len(edges) >= 0.5 * len(ALL_EDGES)


def found(machine: type[LifecycleBase]) -> None:
    quick = settings(
        max_examples=200, stateful_step_count=30, derandomize=True, database=None,
        phases=(Phase.generate,), report_multiple_bugs=False,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=quick)


def accept_finish(fire: Callable[..., Any]) -> Callable[..., Any]:
    def patched(self: Machine[Attempt], subject: Attempt, event: int, argument: int = 0) -> Any:
        try:
            return fire(self, subject, event, argument)
        except IllegalTransition:
            if event == Event.FINISH:
                subject.state = State.FINISHED
                return None
            raise

    return patched


def change_and_raise(fire: Callable[..., Any]) -> Callable[..., Any]:
    def patched(self: Machine[Attempt], subject: Attempt, event: int, argument: int = 0) -> Any:
        subject.landed_pages += event == Event.MISS
        return fire(self, subject, event, argument)

    return patched


@pytest.mark.parametrize("broken", [accept_finish, change_and_raise])
def test_a_broken_machine_is_found(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Any]) -> None:
    monkeypatch.setattr(Machine, "fire", broken(Machine.fire))
    with pytest.raises(AssertionError):
        found(LifecycleMachine)


def test_a_ledger_that_is_not_walked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lifecycle_machine.LEDGER, "return_hold", lambda attempt: None)
    with pytest.raises(AssertionError, match="owns"):
        found(LifecycleMachine)
