"""Rules that only a mutant has shown to be untested (`tests/mutants`); each test states the rule that must hold."""

from __future__ import annotations

import pytest

from hicache_fsm.admission.adder import PrefillAdder, Verdict
from hicache_fsm.admission.budget import BudgetLimits, PrefillBudget
from hicache_fsm.backup.beliefs import StorageExistenceCache
from hicache_fsm.components.full import FullComponent
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.ports import ReadDone
from hicache_fsm.testing.sim import Sim, chain
from tests.field.tools import answer, end_all, evict, get, look_up, make_resident, read, sim, small, stage, state

# ── records and queues ───────────────────────────────────────────────────────────────────────────────


def test_slots_and_numbers_of_requests_that_have_ended_are_used_again() -> None:
    s = sim()
    for rid, prompt in (("a", "pq"), ("b", "rs"), ("a", "tu"), ("b", "vw")):
        s.submit(rid, prompt)
        look_up(s, rid, 0)
        assert s.run(rid)
    attempts = s.plane.parts.attempts
    assert (attempts.next_slot, attempts.numbers) == (2, {})
    end_all(s)


def test_a_retracted_request_keeps_its_place_also_when_it_was_the_first() -> None:
    s = sim()
    for rid in "abc":
        s.submit(rid, f"{rid}x")
        look_up(s, rid, 0)
    for rid in "abc":
        s.call(lambda plane, rid=rid: plane.retract(rid, 3, get(s, rid).keys))  # type: ignore[misc]
    waiting = s.plane.parts.waiting.waiting
    assert [s.plane.parts.attempts.live[slot].rid for _, _, slot in waiting] == ["a", "b", "c"]
    end_all(s)


def test_a_retraction_gives_fresh_retries_and_a_flush_does_not() -> None:
    s = sim()
    s.submit("r", "abcd")
    get(s, "r").retries = 3
    s.call(lambda plane: plane.flush())
    assert get(s, "r").retries == 3
    s.call(lambda plane: plane.retract("r", 5, get(s, "r").keys))
    assert get(s, "r").retries == 0
    end_all(s)


def test_priority_goes_before_arrival() -> None:
    s = sim(retry_poll_interval_passes=0)
    for rid, priority in (("late", 1), ("soon", 0), ("last", 1)):
        s.submit(rid, f"{rid}x", priority=priority)
        look_up(s, rid, 0)
    assert [c.attempt.rid for c in s.candidates()] == ["soon", "late", "last"]
    assert s.plane.parts.waiting.head() == "soon"
    end_all(s)


def test_who_has_left_the_queue_is_not_told_of_boundaries_any_more() -> None:
    s = sim(retry_poll_interval_passes=0)
    s.submit("gone", "abcd")
    look_up(s, "gone", 0)
    s.submit("runs", "abcd")
    look_up(s, "runs", 0)
    s.plane.abort("gone")
    assert s.admit("runs")
    tree = s.plane.parts.full.tree
    before = tree.watch_touches
    s.compute("runs")
    assert tree.watch_touches == before
    end_all(s)


# ── pools and budgets ────────────────────────────────────────────────────────────────────────────────


def test_released_pages_of_both_pools_are_announced() -> None:
    s = sim("abcd")
    stage(s, "r", "abcd")
    rows = get(s, "r").staging
    assert None not in [s.staging[row] for row in rows]
    s.call(lambda plane: plane.abort("r"))
    assert [s.staging[row] for row in rows] == [None] * 4, "the shell overwrites what it is told of"
    make_resident(s, "xy")
    pages = s.plane.parts.full.tree.pages(chain(*"xy"), 0, 2)
    evict(s, 2)
    assert [s.device[page] for page in pages] == [None] * 2


def test_pins_fill_their_cap_exactly() -> None:
    full = FullComponent(small(max_context_tokens=12))
    cap = full.config.pin_cap_tokens
    full.pinned.add(5)
    assert (full.pin_fits(cap - 5), full.pin_fits(cap - 4)) == (True, False)
    assert (full.pin_ever_fits(cap), full.pin_ever_fits(cap + 1)) == (True, False)


def test_reads_fill_their_share_exactly() -> None:
    full = FullComponent(small(staging_pages=10, load_pool_usage_fraction=0.5))
    assert full.take_read_staging(6) is None
    assert full.take_read_staging(5) is not None
    assert full.take_read_staging(1) is None


def test_a_demand_that_cannot_be_met_evicts_nothing() -> None:
    s = sim()
    make_resident(s, "abcd")
    full = s.plane.parts.full
    assert full.take_device(full.config.device_pages + 1) is None
    assert (full.tree.resident, full.evicted_pages) == (4, 0)


def test_writes_leave_room_for_what_they_hold_already() -> None:
    full = FullComponent(small(staging_pages=100, write_staging_fraction=0.2, write_margin_fraction=0.1))
    assert full.take_write_staging(50) is not None
    assert full.write_room(0) == 40


# ── look-up and read ─────────────────────────────────────────────────────────────────────────────────


def test_a_hit_below_the_threshold_is_closed_at_once_also_without_polls() -> None:
    s = sim(retry_poll_interval_passes=0, prefetch_threshold_tokens=3)
    s.submit("r", "abcd")
    look_up(s, "r", 2)
    assert (state(s, "r"), get(s, "r").unresolved) == ("idle", 0)
    assert s.plane.parts.accounts.unfulfilled["below_threshold"] == 2
    end_all(s)


def test_a_read_keeps_what_it_has_reported_whatever_it_says_later() -> None:
    s = sim("abcd")
    s.submit("r", "abcd")
    look_up(s, "r")
    op = s.of_kind(OpKind.READ)[0]
    s.progress(op, 3)
    s.tick()
    s.progress(op, 1)
    s.tick()
    assert get(s, "r").landed_pages == 3
    del s.outstanding[op]
    s.inbox.append(ReadDone(op, 1))
    s.tick()
    assert (state(s, "r"), len(get(s, "r").staging)) == ("staged", 3)
    end_all(s)


def test_progress_of_an_earlier_read_is_none_of_the_next() -> None:
    s = sim("abcdef", anchor_lock_cap=0.0, prefetch_hard_max_ms=100)
    make_resident(s, "ab")
    s.submit("r", "abcdef")
    look_up(s, "r")
    read(s, "r")
    evict(s, 1)
    assert s.plane.consider(get(s, "r")) is None, "its base is gone; it asks again"
    s.tick()
    assert (state(s, "r"), get(s, "r").landed_pages) == ("reading", 0)
    s.tick(100)
    assert state(s, "r") == "recomputing", "nothing of this read has landed"
    end_all(s)


# ── beliefs ──────────────────────────────────────────────────────────────────────────────────────────


def test_beliefs_are_bounded_and_forget_the_oldest() -> None:
    beliefs = StorageExistenceCache(3, 2, 10)
    a, b, c, d = chain(*"abcd")
    beliefs.add((a, b, c))
    beliefs.add((a,))
    beliefs.add((d,))
    assert list(beliefs.believed) == [c, a, d]


def test_refused_keys_are_bounded_expire_and_are_healed_by_a_write() -> None:
    beliefs = StorageExistenceCache(10, 2, 10)
    a, b, c = chain(*"abc")
    for key in (a, b, c):
        beliefs.refuse(key, 100)
    assert list(beliefs.undeliverable) == [b, c]
    assert beliefs.deliverable((a, b, c), 109) == 1
    beliefs.add((b,))
    assert beliefs.deliverable((a, b, c), 109) == 2
    assert beliefs.deliverable((a, b, c), 110) == 3


# ── the write path ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("pages", "dropped"), [(12, 0), (13, 13)])
def test_the_write_queue_is_filled_to_its_bound(pages: int, dropped: int) -> None:
    s = sim(write_backlog_factor=1, staging_pages=1, load_pool_usage_fraction=0.0)
    for rid, count in (("first", 12), ("second", pages)):
        s.plane.parts.backup.enqueue(b"", chain(*((rid, page) for page in range(count))), ())
    assert s.plane.parts.backup.dropped_pages["backlog"] == dropped


def test_prefill_waits_for_a_slow_store_and_not_for_a_silent_one() -> None:
    s = sim(retry_poll_interval_passes=0)
    s.submit("r", "abcd", 0)
    look_up(s, "r", 0)
    assert s.admit("r")
    backup = s.plane.parts.backup
    s.compute("r")
    assert not backup.outruns_store(0, 1000), "no write has been started: there is nothing to wait for"
    s.tick()
    backup.enqueue(b"", chain("x", "y"), ())
    assert backup.outruns_store(1, 1000)
    assert not backup.outruns_store(2, 1000)
    s.now_ms += 2000
    s.plane.parts.set_time(s.plane.parts.pass_no, s.now_ms)
    assert not backup.outruns_store(1, 1000), "it has not answered for two seconds"


# ── admission ────────────────────────────────────────────────────────────────────────────────────────


def _adder(s: Sim, *, idle: bool, growth: int = 0, requests: int = 8) -> PrefillAdder:
    limits = BudgetLimits(max_running_requests=requests)
    return PrefillAdder(s.plane, PrefillBudget(s.plane.parts.full, limits, growth), idle=idle)


def _add(s: Sim, adder: PrefillAdder, rid: str, max_new: int = 1) -> Verdict:
    candidate = s.plane.consider(get(s, rid))
    assert candidate is not None
    verdict = adder.add(candidate, max_new)
    s.pump()
    return verdict


def _waiting(*prompts: str, running: int = 0) -> Sim:
    """Requests named after their prompts, looked up in vain; one more runs on so many of 24 device pages."""
    s = sim(retry_poll_interval_passes=0, max_context_tokens=24)
    if running:
        s.submit("runs", [f"own {page}" for page in range(running)], 0)
        look_up(s, "runs", 0)
        assert s.admit("runs")
    for prompt in prompts:
        s.submit(prompt, prompt)
        look_up(s, prompt, 0)
    return s


def test_a_blocked_head_does_not_stop_the_scan_while_nothing_runs() -> None:
    s = _waiting("abcdef", "x", running=20)
    adder = _adder(s, idle=True)
    assert (_add(s, adder, "abcdef"), _add(s, adder, "x")) == (Verdict.SKIP, Verdict.ADMITTED)
    assert [entry.rid for entry in adder.entries] == ["x"]


def test_the_lock_of_the_selection_ends_with_it() -> None:
    s = sim(retry_poll_interval_passes=0)
    make_resident(s, "abcd")
    s.submit("r", "abcd")
    assert _add(s, _adder(s, idle=True), "r") is Verdict.ADMITTED
    s.call(lambda plane: plane.finish("r"))
    assert s.plane.parts.full.tree.locked == 0


def test_a_batch_takes_as_many_requests_as_may_run() -> None:
    s = _waiting("a", "b", "c")
    adder = _adder(s, idle=True, requests=2)
    assert [_add(s, adder, rid) for rid in "abc"] == [Verdict.ADMITTED, Verdict.ADMITTED, Verdict.STOP]


def test_the_growth_of_what_is_admitted_is_reserved() -> None:
    s = _waiting("abc", "xyz")
    adder = _adder(s, idle=False)
    assert _add(s, adder, "abc", max_new=12) is Verdict.ADMITTED
    assert adder.budget.reserved == 13, "twelve tokens of output and the page they begin in"
    assert _add(s, adder, "xyz", max_new=4) is Verdict.STOP, "7 of 24 are left: 4 for the prompt, 5 for its growth"


@pytest.mark.parametrize(("running", "defers"), [(16, 0), (21, 1)])
def test_a_refusal_while_others_run_counts_only_if_the_load_itself_has_no_room(running: int, defers: int) -> None:
    s = _waiting(running=running)
    s.stored.update(chain(*"abcdef"))
    s.submit("r", "abcdef")
    answer(s, OpKind.LOOKUP, "r")
    read(s, "r")
    assert _add(s, _adder(s, idle=False), "r", max_new=20) is Verdict.STOP
    assert get(s, "r").defers == defers
