"""Rules that only a mutant has shown to be untested (`tests/mutants`); each test states the rule that must hold."""

from __future__ import annotations

import pytest

from hicache_fsm.admission.adder import PrefillAdder, Verdict
from hicache_fsm.admission.budget import BudgetLimits, PrefillBudget
from hicache_fsm.backup.beliefs import StorageExistenceCache
from hicache_fsm.components.full import FullComponent
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.ports import Offload, ReadDone
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


def test_what_a_read_reported_counts_also_if_it_is_lost_in_the_same_pass() -> None:
    s = sim("abcd")
    s.submit("r", "abcd")
    look_up(s, "r")
    op = s.of_kind(OpKind.READ)[0]
    s.progress(op, 3)
    s.lose(op)
    s.inbox.reverse()
    s.tick()
    assert (state(s, "r"), len(get(s, "r").staging)) == ("staged", 3)
    assert s.plane.parts.ops.stale == 0
    end_all(s)


def test_a_hit_of_exactly_the_threshold_is_read() -> None:
    s = sim("abc", prefetch_threshold_tokens=3)
    s.submit("r", "abcd")
    look_up(s, "r")
    assert (state(s, "r"), get(s, "r").end_pages) == ("reading", 3)
    end_all(s)


def test_an_answer_beyond_the_question_is_cut_to_it() -> None:
    s = sim("abcd")
    s.submit("r", "abcd")
    look_up(s, "r", 99)
    assert (state(s, "r"), get(s, "r").end_pages) == ("reading", 4)
    assert s.plane.parts.accounts.stats["negative_hits"] == 0, "no key was refused"
    end_all(s)


@pytest.mark.parametrize(("hit", "cut"), [(6, 0), (7, 1)])
def test_a_hit_of_one_page_too_many_is_cut_by_one_page(hit: int, cut: int) -> None:
    prompt = "abcdefgh"
    s = sim(prompt[:hit], staging_pages=6)
    s.submit("r", prompt)
    look_up(s, "r")
    assert (state(s, "r"), len(get(s, "r").staging)) == ("reading", 6)
    assert s.plane.parts.accounts.unfulfilled["host_capacity"] == cut
    end_all(s)


def compute(s: Sim, prompt: str) -> None:
    """A request that the store knows nothing of computes a prompt to its last page, and finishes."""
    s.submit("twin", prompt, 0)
    if s.of_kind(OpKind.LOOKUP):
        look_up(s, "twin", 0)
    assert s.admit("twin")
    s.compute("twin")
    s.call(lambda plane: plane.finish("twin"))


def test_what_a_sibling_brought_and_the_device_lost_again_is_asked_for() -> None:
    s = sim(retry_poll_interval_passes=0)
    s.submit("r", "abcdef")
    look_up(s, "r", 0)
    compute(s, "abcd")
    assert s.plane.consider(get(s, "r")) is not None
    s.settle()
    evict(s, 2)
    assert s.plane.consider(get(s, "r")) is None
    s.tick()
    look_up(s, "r")
    assert len(get(s, "r").staging) == 2
    end_all(s)


@pytest.mark.parametrize("staged", [False, True])
def test_a_covered_hit_is_not_asked_for_beyond_its_end(staged: bool) -> None:
    """The store has said where it ends: pages beyond that come and go without a question."""
    s = sim("abcd", retry_poll_interval_passes=0)
    s.submit("r", "abcdefgh")
    if staged:
        look_up(s, "r")
        read(s, "r")
    compute(s, "abcdef")
    assert s.plane.parts.prefetch.boundary(get(s, "r")) == 6
    evict(s, 1)
    if not staged:
        look_up(s, "r", 4)
    candidate = s.plane.consider(get(s, "r"))
    assert candidate is not None
    assert (candidate.match_pages, state(s, "r")) == (5, "idle")
    end_all(s)


def test_a_shrunk_prefix_whose_rest_is_too_short_costs_nothing() -> None:
    s = sim(retry_poll_interval_passes=0, prefetch_threshold_tokens=3)
    make_resident(s, "abcd")
    s.submit("r", "abcde")
    evict(s, 1)
    assert s.plane.consider(get(s, "r")) is not None
    assert (get(s, "r").chances, s.plane.parts.accounts.stats["shrinks"]) == (0, 0)
    end_all(s)


# ── time and turns ───────────────────────────────────────────────────────────────────────────────────


def test_the_hard_maximum_covers_querying_and_parking_together() -> None:
    s = sim("abcdmnop", staging_pages=4, prefetch_hard_max_ms=100)
    s.stored.update(chain(*"mnop"))
    stage(s, "big", "mnop")
    s.submit("r", "abcd")
    s.tick(40)
    look_up(s, "r")
    assert state(s, "r") == "parked"
    s.tick(58)
    assert state(s, "r") == "parked"
    s.tick(1)
    assert state(s, "r") == "recomputing"
    end_all(s)


def test_a_head_that_got_its_pin_goes_before_a_hit_that_might_have_passed_it() -> None:
    s = Sim(small(max_context_tokens=18, staging_pages=4), [*chain(*"abcdef"), *chain(*"wxyzuv"), *chain(*"12")])
    make_resident(s, "abcd")
    make_resident(s, "wxyz")
    stage(s, "holds", "abcdef")
    s.submit("head", "wxyzuv")
    look_up(s, "head")
    s.submit("young", "12")
    s.answer_all(OpKind.LOOKUP)
    assert s.admit("holds"), "its pin returns, its rows not yet"
    s.tick(0)
    assert [state(s, "head"), state(s, "young")] == ["reading", "parked"]
    end_all(s)


def pin_bound_head(bypass_cap: int, staging_pages: int, *young: str) -> Sim:
    """Six tokens may be pinned and `holds` has four, so that `head` is parked; then come the young, named after their
    prompts, whose first pages are on the device if they are computed by then."""
    stored = [key for prompt in ("abcdef", "wxyzuv", *young) for key in chain(*prompt)]
    s = Sim(small(max_context_tokens=18, staging_pages=staging_pages, bypass_cap=bypass_cap), stored)
    make_resident(s, "abcd")
    make_resident(s, "wxyz")
    stage(s, "holds", "abcdef")
    s.submit("head", "wxyzuv")
    look_up(s, "head")
    assert state(s, "head") == "parked"
    return s


def test_a_parked_hit_that_needs_a_pin_does_not_pass_a_head_that_waits_for_one() -> None:
    s = pin_bound_head(8, 20, "wj")
    s.submit("wj", "wj")
    look_up(s, "wj")
    s.tick(10)
    assert (get(s, "head").chances, state(s, "wj")) == (1, "parked"), "its pin of one token would fit"
    end_all(s)


def test_a_spinning_loop_uses_up_no_chances_at_any_time() -> None:
    s = sim("mnop", staging_pages=4, chance_quantum_ms=10)
    s.stored.update(chain(*"abcd"))
    s.tick(1000)
    stage(s, "big", "mnop")
    s.submit("r", "abcd")
    look_up(s, "r")
    for _ in range(5):
        s.tick(1)
    assert get(s, "r").chances == 0
    s.tick(10)
    assert get(s, "r").chances == 1
    end_all(s)


def test_hits_that_pass_later_count_too() -> None:
    s = pin_bound_head(1, 4, "12", "34", "56")
    s.submit("56", "56")
    look_up(s, "56")  # passes, and takes the rest of staging
    s.plane.parts.parked.bypasses = 0
    for rid in ("12", "34"):
        s.submit(rid, rid)
        look_up(s, rid)
    assert [state(s, rid) for rid in ("56", "12", "34")] == ["reading", "parked", "parked"]
    s.call(lambda plane: plane.abort("56"))
    s.settle(3)
    assert [state(s, rid) for rid in ("head", "12", "34")] == ["parked", "staged", "parked"]
    assert s.plane.parts.parked.bypasses == 1
    s.call(lambda plane: plane.abort("12"))
    s.tick(10)
    assert state(s, "34") == "parked", "there is room, but one has passed"
    end_all(s)


def test_each_head_is_passed_up_to_the_cap() -> None:
    s = pin_bound_head(1, 20, "12", "34")
    s.submit("next", "wxyzuv")
    look_up(s, "next")
    s.submit("12", "12")
    look_up(s, "12")
    s.call(lambda plane: plane.abort("head"))
    s.tick()  # the next in turn waits for the same budget
    assert s.plane.parts.parked.bypasses == 0
    s.submit("34", "34")
    look_up(s, "34")
    assert [state(s, rid) for rid in ("next", "12", "34")] == ["parked", "reading", "reading"]
    end_all(s)


def test_a_hit_takes_room_that_comes_back_in_the_same_pass() -> None:
    s = sim("abcdmnop", staging_pages=4)
    s.stored.update(chain(*"mnop"))
    s.submit("r", "abcd")
    stage(s, "big", "mnop")
    assert s.admit("big")
    s.answer_all()
    s.tick()
    assert (state(s, "r"), s.plane.parts.accounts.stats["parks"]) == ("reading", 0)
    end_all(s)


def test_refusals_in_one_pass_are_one_unless_room_has_come() -> None:
    s = sim("abcd")
    stage(s, "r", "abcd")
    full = s.plane.parts.full

    def defer() -> int:
        candidate = s.plane.consider(get(s, "r"))
        assert candidate is not None
        s.plane.defer(candidate)
        return get(s, "r").defers

    s.checking = False  # pages are taken behind the back of the books
    taken = full.take_device(4)
    assert taken is not None
    assert [defer(), defer()] == [1, 1]
    full.give_device(taken)
    assert [defer(), defer()] == [2, 2]
    s.tick(s.config.chance_quantum_ms)
    assert [defer(), defer()] == [3, 3]
    s.checking = True
    end_all(s)


# ── publish, end, flush ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ok", [True, False])
def test_rows_taken_over_from_a_sibling_wait_for_the_siblings_load(ok: bool) -> None:
    s = sim("abcd", retry_poll_interval_passes=0)
    s.submit("first", "abcde")
    look_up(s, "first", 0)
    assert s.admit("first")
    s.submit("second", "abcdx")
    look_up(s, "second")
    read(s, "second")
    assert s.admit("second")
    s.compute("first")
    assert get(s, "first").load_ops == get(s, "second").load_ops != ()
    answer(s, OpKind.LOAD, ok=ok)
    assert s.plane.take_restarted() == ([] if ok else ["second", "first"])
    end_all(s)


def test_what_a_finished_request_computed_is_published() -> None:
    s = sim(retry_poll_interval_passes=0)
    s.submit("r", "ab")
    look_up(s, "r", 0)
    assert s.admit("r")
    assert s.plane.extend("r", 4)
    keys = s.prompts["r"] = chain(*"abcd")
    for page, key in zip(s.plane.page_table("r"), keys, strict=True):
        s.device[page] = key
    s.call(lambda plane: plane.finish("r", 4, keys))
    assert s.plane.parts.full.tree.match(keys) == 4
    end_all(s)


def test_a_flush_forgets_all_beliefs() -> None:
    s = sim("abcd")
    s.submit("r", "abcd")
    look_up(s, "r")
    assert chain(*"abcd")[3] in s.plane.parts.beliefs
    s.call(lambda plane: plane.flush())
    assert not s.plane.parts.beliefs.believed
    end_all(s)


def test_a_load_from_before_a_flush_is_not_spliced() -> None:
    s = sim("abcd")
    stage(s, "r", "abcd")
    assert s.admit("r")
    s.call(lambda plane: plane.flush())
    answer(s, OpKind.LOAD)
    accounts = s.plane.parts.accounts
    assert (accounts.spliced, accounts.unfulfilled["flushed"]) == (0, 4)
    end_all(s)


def test_a_pin_on_a_span_that_never_landed_returns() -> None:
    s = sim("abcdef")
    stage(s, "first", "abcd")
    assert s.admit("first")
    s.submit("pins", "abcdef")
    look_up(s, "pins")
    read(s, "pins")
    full = s.plane.parts.full
    assert (state(s, "pins"), get(s, "pins").pin_tokens, full.pinned.value) == ("staged", 4, 4)
    answer(s, OpKind.LOAD, ok=False)
    assert (get(s, "pins").pin_node, full.pinned.value, full.pins.value) == (0, 0, 0)
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


@pytest.mark.parametrize("wanted", [True, False])
def test_a_short_read_unteaches_unless_it_was_cut_short_by_us(wanted: bool) -> None:
    s = sim("abcd")
    s.submit("r", "abcd")
    look_up(s, "r")
    if not wanted:
        s.call(lambda plane: plane.abort("r"))
    answer(s, OpKind.READ, pages=1)
    beliefs = s.plane.parts.beliefs
    assert [key in beliefs for key in chain(*"abcd")] == [True] + [not wanted] * 3
    assert list(beliefs.undeliverable) == ([chain(*"abcd")[1]] if wanted else [])
    end_all(s)


# ── the write path ───────────────────────────────────────────────────────────────────────────────────


def test_pages_that_are_written_are_evicted_like_others() -> None:
    s = sim("mn", retry_poll_interval_passes=0)
    compute(s, "ab")
    s.settle()
    stage(s, "r", "mn")
    assert s.run("r")
    s.settle()
    evict(s, 2)
    tree = s.plane.parts.full.tree
    assert (tree.match(chain(*"ab")), tree.match(chain(*"mn"))) == (0, 2), "least recently used first"
    end_all(s)


def test_the_rest_of_a_span_goes_before_the_next_span() -> None:
    s = sim(io_batch_pages=2, retry_poll_interval_passes=0, staging_pages=6)
    for rid in ("abc", "xyz"):
        s.submit(rid, rid, 0)
        look_up(s, rid, 0)
        assert s.admit(rid)
    for rid in ("abc", "xyz"):
        s.compute(rid)
    offloaded: list[bytes | None] = []
    while len(offloaded) < 6:
        s.tick()
        for op in s.of_kind(OpKind.OFFLOAD):
            command = s.outstanding[op]
            assert isinstance(command, Offload)
            offloaded += [s.device[page] for page in command.device]
        s.answer_all()
    assert offloaded == [*chain(*"abc"), *chain(*"xyz")]
    end_all(s)


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
