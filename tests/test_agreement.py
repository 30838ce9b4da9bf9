"""The real control plane and `spec/Prefetch.tla` have the same graph: every state, every labelled step.

The mapping and its limits stand in `spec/agreement.py`; `make spec` compares the larger configurations. A fault put
into the code must show as a difference, also one that no invariant notices.
"""

from __future__ import annotations

import pytest

from hicache_fsm.control.effects import RequestEffects
from hicache_fsm.errors import HiCacheError
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.model import Row
from spec import agreement
from spec.agreement import Edge, code_graph, report, spec_graph
from spec.code_side import read_bounds
from spec.run import HERE
from spec.tlc_graph import Record, parse_value
from tests.test_spec import needs_tlc

BOUNDS = read_bounds(HERE / "MC_one.cfg")


@pytest.fixture(scope="module")
def spec_edges() -> set[Edge]:
    edges, _ = spec_graph("MC_one", BOUNDS["N"])
    return edges


@needs_tlc
def test_spec_and_code_have_the_same_graph(spec_edges: set[Edge]) -> None:
    code, wrong = code_graph(BOUNDS)
    key = repr
    result = agreement.Comparison(
        0, 0, len(code & spec_edges), sorted(spec_edges - code, key=key), sorted(code - spec_edges, key=key), wrong, 0.0
    )
    assert report("MC_one", result) == []
    assert len(code) == 4_814


# ── faults in the code that the comparison must notice ───────────────────────────────────────────────


class DeferNotCounted(RequestEffects):
    def count_defer(self, attempt: Attempt, row: Row, argument: int) -> None:
        pass


class ChanceNotCounted(RequestEffects):
    def count_chance(self, attempt: Attempt, row: Row, argument: int) -> None:
        pass


class StorageStaysOpen(RequestEffects):
    def close_storage(self, attempt: Attempt, row: Row, argument: int) -> None:
        pass


class EndForgotten(RequestEffects):
    def arm_refetch(self, attempt: Attempt, row: Row, argument: int) -> None:
        attempt.end_pages = 0
        super().arm_refetch(attempt, row, argument)


class PollOverwrites(RequestEffects):
    def arm_poll(self, attempt: Attempt, row: Row, argument: int) -> None:
        super().arm_refetch(attempt, row, argument)


class TailReturnsEarly(RequestEffects):
    """Rows that a read may still touch go back to the pool: the read's own ledger is emptied."""

    def keep_landed(self, attempt: Attempt, row: Row, landed: int) -> None:
        op = self.ops.live.get(attempt.op)
        super().keep_landed(attempt, row, landed)
        if op is not None:
            self.full.give_read_staging(op.staging)
            op.staging = ()


MUTANTS = (DeferNotCounted, ChanceNotCounted, StorageStaysOpen, EndForgotten, PollOverwrites, TailReturnsEarly)


@needs_tlc
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_fault_in_the_code_is_a_difference(mutant: type[RequestEffects], spec_edges: set[Edge]) -> None:
    assert first_difference(mutant, spec_edges), "the graphs are the same, fault or not"


def first_difference(mutant: type[RequestEffects], spec_edges: set[Edge]) -> str:
    """A step that only one side has, or why the code could not be explored: it noticed itself."""
    try:
        code, wrong = code_graph(BOUNDS, mutant)
    except (AssertionError, HiCacheError) as error:
        return f"the code noticed itself: {error!r}"
    different = sorted(code ^ spec_edges, key=repr)
    return agreement.describe(different[0]) if different else "; ".join(wrong[:1])


# ── the reader of TLC's values ───────────────────────────────────────────────────────────────────────


VALUES: tuple[tuple[str, object], ...] = (
    ('[ a |-> 1, b |-> "x y" ]', {"a": 1, "b": "x y"}),
    ("<< >>", ()),
    ("<<<<1, -2>>, <<>>>>", ((1, -2), ())),
    ("{<<1>>, <<2>>}", frozenset({(1,), (2,)})),
    ("1..3", frozenset({1, 2, 3})),
    ("[ on |-> TRUE, s |-> { [ k |-> 1 ] } ]", {"on": True, "s": frozenset({Record({"k": 1})})}),
)


@pytest.mark.parametrize(("text", "value"), VALUES, ids=str)
def test_values_of_tlc_are_read(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_a_configuration_that_the_mapping_does_not_cover_is_refused() -> None:
    with pytest.raises(ValueError, match="writes"):
        read_bounds(HERE / "MC_writes.cfg")
    with pytest.raises(ValueError, match="Strangers"):
        read_bounds(HERE / "MC_strangers.cfg")
