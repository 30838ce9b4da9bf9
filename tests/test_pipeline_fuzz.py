"""The control plane against a hostile outside: books and bytes after every step, and an end for every request."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_fsm.control.termination import waiting_bound
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.table import TIMED, State
from hicache_fsm.testing.pipeline_machine import Choose, Pipeline, PipelineMachine, random_walk, small_config


class TestPipeline(PipelineMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=50)


@pytest.mark.parametrize("block", range(5))
def test_random_walks(block: int) -> None:
    """Longer runs than Hypothesis affords, of fixed seeds; what they find is not shrunk."""
    for seed in range(60 * block, 60 * block + 60):
        random_walk(seed, 100)


class Drawn:
    """Choices of Hypothesis for tests that are no state machines."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def number(self, what: str, least: int, most: int) -> int:
        return self.data.draw(st.integers(least, most), label=what)

    def of(self, what: str, options: object) -> object:
        assert isinstance(options, (list, tuple, str))
        return options[self.data.draw(st.integers(0, len(options) - 1), label=what)]


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
        match choose.of("hindrance", ("none", "evict", "grow", "answer", "fail", "progress", "park")):
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
            case "park" if plane.parts.full.staging.available and not plane.parts.full.writes.value:
                rows = plane.parts.full.take_write_staging(choose.number("rows", 1, plane.parts.full.staging.available))
                assert rows is not None
                plane.parts.full.give_write_staging(rows)

    def compute_prefix(self, choose: Choose) -> None:
        """Another request computes a prefix of the trunk, so that bases grow again."""
        rid, plane = "other", self.sim.plane
        if plane.parts.attempts.find(rid) is not None:
            return
        self.sim.submit(rid, "t" * choose.number("grown", 1, 8), priority=-1)
        plane.parts.attempts.get(rid).priority = -1
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
        if candidate is None:
            pass
        elif candidate.plan is not None:
            plane.defer(candidate)
        else:
            plane.abort(attempt.rid)  # nothing but device room is missing: that is the engine's to give
        self.sim.pump()


@settings(max_examples=120)
@given(data=st.data())
def test_no_attempt_waits_longer_than_its_bound(data: st.DataObject) -> None:
    choose = Drawn(data)
    engine = HostileEngine(choose)  # type: ignore[arg-type]
    engine.sim.submit("r", "t" * 10, hashed=False)
    tokens = engine.sim.plane.parts.attempts.get("r").num_tokens
    bound = waiting_bound(engine.config, tokens)
    took = engine.passes_of("r", choose)  # type: ignore[arg-type]
    assert took <= bound.passes(1), f"{took} passes, bound {bound}"


def test_the_bound_names_every_cap() -> None:
    """Each cap moves its own part of the bound by exactly what it is changed by."""
    base = small_config(_Least())
    bound = waiting_bound(base, 100)
    for field, part, weight in (("retry_max_attempts", "lookups", 1), ("park_cap", "chances", 1), ("max_defers", "chances", 1)):
        from dataclasses import replace

        more = waiting_bound(replace(base, **{field: getattr(base, field) + 5}), 100)
        assert getattr(more, part) == getattr(bound, part) + 5 * weight
    assert bound.storage_ms == base.read_deadline_ms(100)
    assert bound.passes(10) == bound.chances + -(-bound.storage_ms // 10) + 2 * bound.lookups
    assert TIMED == (State.QUERYING, State.READING, State.PARKED), "the states that the storage clock covers"


class _Least:
    def number(self, what: str, least: int, most: int) -> int:
        return least

    def of(self, what: str, options: object) -> object:
        assert isinstance(options, (list, tuple, str))
        return options[0]
