"""The control plane against a hostile outside: books and bytes after every step, and an end for every request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_fsm.config import CacheConfig
from hicache_fsm.control.termination import WaitingBound, waiting_bound
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.table import TIMED, State
from hicache_fsm.testing.pipeline_machine import DrawnChoices, PipelineMachine
from hicache_fsm.testing.pipeline_walk import Choose, Pipeline, RandomChoices, random_walk, small_config


class TestPipeline(PipelineMachine.TestCase):  # type: ignore[valid-type, misc]
    settings = settings(max_examples=150, stateful_step_count=50)


@pytest.mark.parametrize("block", range(5))
def test_random_walks(block: int) -> None:
    """Longer runs than Hypothesis affords, of fixed seeds; what they find is not shrunk."""
    for seed in range(60 * block, 60 * block + 60):
        random_walk(seed, 100)


class HostileEngine(Pipeline):
    """Storage answers when it likes, bases move in every pass, and holds are refused for as long as that is legal.
    The engine takes a request only when it comes without a hold."""

    def passes_of(self, rid: str, choose: Choose) -> int:
        """Passes until `rid` leaves the waiting states."""
        plane = self.sim.plane
        for passed in range(1, 100_000):
            self.hinder(choose)
            self.sim.tick(1)
            self.hinder(choose)
            attempt = plane.parts.attempts.find(rid)
            if attempt is None or attempt.state >= State.LOADING:
                return passed
            if plane.parts.is_candidate(attempt):
                self.offer(attempt)
        raise AssertionError("an attempt waits for ever")

    def hinder(self, choose: Choose) -> None:
        plane, sim = self.sim.plane, self.sim
        match choose.of("hindrance", ("none", "evict", "grow", "answer", "fail", "progress", "news")):
            case "evict" if plane.parts.full.tree.evictable:
                self.evict(choose)
            case "grow":
                self.compute_prefix(choose)
            case "answer" if sim.outstanding:
                self.answer(choose)
            case "fail" if sim.outstanding:
                self.answer_failed(choose)
            case "progress" if self.reads():
                self.progress(choose)
            case "news" if plane.parts.full.staging.available:
                rows = plane.parts.full.take_write_staging(1)  # staging comes back: a parked head is tried again
                assert rows is not None
                plane.parts.full.give_write_staging(rows)

    def compute_prefix(self, choose: Choose) -> None:
        """Another request computes a prefix of the trunk, so that bases grow again."""
        rid, plane = "other", self.sim.plane
        if plane.parts.attempts.find(rid) is not None:
            return
        self.sim.submit(rid, "t" * choose.number("grown", 1, 8))
        if self.sim.admit(rid):
            if not plane.parts.attempts.get(rid).load_ops:
                self.sim.compute(rid)
            plane.finish(rid)
        else:
            plane.abort(rid)
        self.sim.pump()

    def offer(self, attempt: Attempt) -> None:
        plane = self.sim.plane
        candidate = plane.consider(attempt)
        if candidate is not None and candidate.plan is not None:
            plane.defer(candidate)
        elif candidate is not None:
            plane.abort(attempt.rid)  # nothing but device room is missing: that is the engine's to give
        self.sim.pump()


@settings(max_examples=120)
@given(data=st.data())
def test_no_attempt_waits_longer_than_its_bound(data: st.DataObject) -> None:
    choose = DrawnChoices(data)
    engine = HostileEngine(choose)
    engine.sim.submit("r", "t" * 10)
    tokens = engine.sim.plane.parts.attempts.get("r").num_tokens
    bound = waiting_bound(engine.config, tokens)
    took = engine.passes_of("r", choose)
    assert took <= bound.passes(1), f"{took} passes, bound {bound}"


def test_the_bound_moves_with_every_cap() -> None:
    base = small_config(RandomChoices(1))
    bound = waiting_bound(base, 100)

    def more(**changes: Any) -> WaitingBound:
        return waiting_bound(replace(base, **changes), 100)

    retries = base.retry_max_attempts + 5
    assert more(retry_max_attempts=retries).lookups == 1 + retries
    assert more(retry_max_attempts=retries).chances == bound.chances + 5
    assert more(park_cap=base.park_cap + 5).chances == bound.chances + 5
    assert more(max_defers=base.max_defers + 5).refusals == bound.refusals + 5
    assert (bound.storage_ms, bound.answers_ms) == (base.prefetch_hard_max_ms, base.read_deadline_ms(100))
    assert TIMED == (State.QUERYING, State.READING, State.PARKED), "the states that the storage clock covers"


def test_the_bound_of_the_documentation() -> None:
    bound = waiting_bound(CacheConfig(), 32_768)
    assert bound == WaitingBound(9, 1033, storage_ms=30_000, answers_ms=9000, refusals=32, refusal_ms=10)
    assert bound.passes(10) == 1033 + 3000 + 18 + 32
