"""Covering suites take every reachable edge of the request table, and every reachable pair, without snapshots."""

from __future__ import annotations

from functools import cache

import pytest

from hicache_fsm.config import PrefetchPolicy
from hicache_fsm.testing import covering
from hicache_fsm.testing.covering import ALL_EDGES, Suite, covering_suite, edge_text, measure
from hicache_fsm.testing.explore_scope import Scope
from hicache_fsm.testing.explore_world import Input

ENDS = frozenset({"retract", "restart", "flush", "detach", "reject"})
COLD = {"pages": 1, "shared": 1, "warm": 0, "device": 2, "pins": 0}

SCOPES: dict[str, Scope] = {
    "alone": Scope(
        requests=1, staging=2,
        faults=ENDS | {"partial", "failed", "lost", "progress", "evict", "chunk", "hash"},
    ),
    "best effort": Scope(
        requests=1, policy=PrefetchPolicy.BEST_EFFORT, faults=ENDS | {"partial", "failed", "progress", "evict"}
    ),
    "two": Scope(**COLD, faults=frozenset({"failed", "lost", "evict"})),  # type: ignore[arg-type]
    "two best effort": Scope(
        **COLD, policy=PrefetchPolicy.BEST_EFFORT, faults=frozenset({"failed", "evict"})  # type: ignore[arg-type]
    ),
    "two that end": Scope(**COLD, aborts=False, faults=ENDS),  # type: ignore[arg-type]
    "two that ask early": Scope(**COLD, aborts=False, faults=ENDS - {"retract"} | {"late"}),  # type: ignore[arg-type]
    "two that shrink": Scope(faults=frozenset({"late", "evict"}), aborts=False),
    "two without chances": Scope(faults=frozenset({"late", "evict"}), aborts=False, park_cap=1),
    "base lost": Scope(aborts=False, faults=frozenset({"evict"})),
}  # fmt: skip

NOT_OFFERED = ("transfer", "--yield--", "--unservable--")
"""Prefill disaggregation is not part of the explored world, and no legal scope has pools too small for any hit."""


@cache
def suite(name: str) -> Suite:
    return covering_suite(SCOPES[name])


@pytest.mark.parametrize("name", SCOPES)
def test_a_suite_takes_all_that_its_scope_can_reach(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    built = suite(name)
    taken = measure(built.scope, built.traces)
    with capsys.disabled():
        print(
            f"\n{name}: {len(taken.edges)}/{len(built.reachable.edges)} edges, "
            f"{len(taken.pairs)}/{len(built.reachable.pairs)} pairs, {len(built.traces)} traces, {built.steps} inputs"
        )
    assert taken == built.reachable


def test_all_suites_together_cover_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """What no suite takes is reachable in none of the scopes; each such edge is accounted for here."""
    edges = frozenset().union(*[suite(name).reachable.edges for name in SCOPES])
    pairs = frozenset().union(*[suite(name).reachable.pairs for name in SCOPES])
    missing = {edge_text(edge) for edge in ALL_EDGES - edges}
    with capsys.disabled():
        print(f"\nall suites: {len(edges)} of {len(ALL_EDGES)} edges of the table, {len(pairs)} pairs; not reached:")
        print("\n".join(f"  {text}" for text in sorted(missing)))
    explained = {text for text in missing if any(word in text for word in NOT_OFFERED)}
    assert missing - explained == set(NOT_REACHED)


NOT_REACHED = {
    "queued/paced --exhausted--> recomputing": "a poll is armed below its cap only, and nothing counts while it waits",
    "queued/refetch --exhausted--> recomputing": "the same for a refetch",
    "queued/paced --declined--> queued/idle": "takes a third request: of two, the one that still waits is the head, "
    "whose poll is dropped",
}


def test_a_trace_that_is_missing_shows() -> None:
    built = suite("two best effort")
    taken = measure(built.scope, built.traces[1:])
    assert taken.edges < built.reachable.edges or taken.pairs < built.reachable.pairs


def test_measuring_checks_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covering.World, "violations", lambda world: ["something is wrong"])
    with pytest.raises(AssertionError, match="something is wrong"):
        measure(SCOPES["two"], [(Input("submit"),)])


def test_no_suite_of_a_space_that_violates_an_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_fsm.testing.explore_world.World.violations", lambda world: ["something is wrong"])
    with pytest.raises(ValueError, match="not whole"):
        covering_suite(SCOPES["two"])
