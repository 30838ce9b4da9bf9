"""The load path, value by value: look-up, commit, parking, read, hold, plan, and what each counts."""

from __future__ import annotations

import pytest

from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.ports import Lookup, Read
from hicache_fsm.testing.sim import Sim, chain
from tests.field.tools import (
    TIMEOUT,
    answer,
    end_all,
    evict,
    get,
    look_up,
    make_resident,
    read,
    sim,
    small,
    stage,
    state,
)


def stats(s: Sim) -> dict[str, int]:
    return s.plane.parts.accounts.stats


# ── look-up ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_round_trip_counts_one_attempt_and_publishes_before_the_copy_lands() -> None:
    s = sim("abcdef")
    s.submit("r", "abcdef")
    assert (stats(s)["attempts"], stats(s)["issued"]) == (1, 1)
    look_up(s, "r")
    read(s, "r")
    tree, full = s.plane.parts.full.tree, s.plane.parts.full
    assert (full.device.used, tree.match(chain(*"abcdef")), full.staging.used) == (0, 0, 6), "staged: not matchable"
    assert s.plane.consider(get(s, "r")) == s.plane.consider(get(s, "r")), "a candidate is stable"
    assert s.admit("r")
    assert tree.match(chain(*"abcdef")) == 6, "matchable before any answer"
    rows = s.plane.page_table("r")[:6]
    answer(s, OpKind.LOAD)
    assert s.plane.page_table("r")[:6] == rows
    assert full.staging.used == 0
    accounts = s.plane.parts.accounts
    assert (accounts.found, accounts.spliced, sum(accounts.unfulfilled.values())) == (6, 6, 0)
    assert (stats(s)["l3_demand_requests"], accounts.l3_miss_tokens) == (1, 0)
    end_all(s)


@pytest.mark.parametrize(("tokens", "asked"), [(256, False), (257, True)])
def test_the_threshold_counts_whole_pages_before_the_last_token(tokens: int, asked: bool) -> None:
    s = Sim(small(page_size=64, device_pages=16, prefetch_threshold_tokens=256))
    pages, extra = divmod(tokens, 64)
    s.submit("r", "a" * pages, extra)
    assert bool(s.of_kind(OpKind.LOOKUP)) is asked
    assert stats(s)["declined_too_short"] == (0 if asked else 1)
    assert s.plane.parts.retries.pending == {}, "too short arms nothing"


@pytest.mark.parametrize("tokens", range(1, 10))
def test_prompts_around_a_page_are_accepted(tokens: int) -> None:
    s = Sim(small(page_size=4), chain(*"ab"))
    pages, extra = divmod(tokens, 4)
    s.submit("r", "ab"[:pages], extra)
    command = s.outstanding.get(1)
    assert (len(command.keys) if isinstance(command, Lookup) else 0) == (tokens - 1) // 4
    end_all(s)


def test_only_what_the_device_lacks_is_asked() -> None:
    s = sim("abcdef")
    make_resident(s, "abcd")
    s.submit("r", "abcdef")
    command = s.outstanding[s.of_kind(OpKind.LOOKUP)[0]]
    assert isinstance(command, Lookup)
    assert command.keys == chain(*"abcdef")[4:]


def test_misses_are_counted_from_the_published_answer() -> None:
    s = Sim(small(page_size=2, prefetch_threshold_tokens=4))
    for rid, pages in (("none", 0), ("one", 1)):
        s.submit(rid, ["p0", "p1", "p2", rid])
        look_up(s, rid, pages)
    assert (stats(s)["revoked_full_miss"], stats(s)["revoked_insufficient"]) == (1, 1)
    assert s.plane.parts.accounts.l3_miss_tokens == 14
    assert s.plane.parts.accounts.unfulfilled["below_threshold"] == 2


def test_a_failed_look_up_is_a_miss_that_teaches_nothing() -> None:
    s = sim("abcd")
    s.plane.parts.beliefs.add(chain(*"abcd"))
    s.submit("r", "abcd")
    answer(s, OpKind.LOOKUP, "r", ok=False)
    assert stats(s)["failed_lookups"] == 1
    assert chain(*"abcd")[3] in s.plane.parts.beliefs
    assert state(s, "r") == "idle"


def test_a_look_up_heals_beliefs_in_both_directions() -> None:
    s = sim("ab")
    s.plane.parts.beliefs.add(chain(*"abcd")[2:])
    s.submit("r", "abcd")
    look_up(s, "r")
    assert [key in s.plane.parts.beliefs for key in chain(*"abcd")] == [True, True, False, False]


def test_keys_that_come_late_start_the_look_up() -> None:
    s = sim("abcd")
    s.submit("r", "abcd", hashed=True)
    assert s.candidates() == [], "nothing is known about it yet"
    answer(s, OpKind.HASH)
    assert state(s, "r") == "querying"
    end_all(s)


def test_keys_of_an_aborted_request_start_nothing() -> None:
    s = sim("abcd")
    s.submit("r", "abcd", hashed=True)
    s.plane.abort("r")
    s.submit("r", "abcd", hashed=True)
    old, new = s.of_kind(OpKind.HASH)
    s.answer(old)
    s.tick()
    assert not get(s, "r").keys_known
    s.answer(new)
    s.tick()
    assert state(s, "r") == "querying"


# ── commit: base, cover, pin, trim, allocate ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(("context", "cap"), [(24 - 1, 1), (24, 0), (4, 12), (30, 0)])
def test_pins_alone_never_stop_the_largest_request(context: int, cap: int) -> None:
    assert small(max_context_tokens=context).pin_cap_tokens == cap


def test_a_base_within_the_cap_is_pinned_until_the_load_is_inserted() -> None:
    s = sim("abcdef")
    make_resident(s, "abcd")
    stage(s, "r", "abcdef")
    full = s.plane.parts.full
    assert (full.pins.value, full.pinned.value, full.tree.evictable) == (1, 4, 0)
    assert s.admit("r")
    assert (full.pins.value, full.pinned.value) == (0, 0)
    end_all(s)


def test_a_base_beyond_the_cap_is_read_unpinned() -> None:
    s = sim("abcdef", max_context_tokens=21)
    make_resident(s, "abcd")
    stage(s, "r", "abcdef")
    assert (s.plane.parts.full.pins.value, stats(s)["unpinned_reads"]) == (0, 1)
    end_all(s)


def test_a_base_that_fits_later_parks() -> None:
    s = Sim(small(max_context_tokens=18, staging_pages=20), [*chain(*"abcdef"), *chain(*"wxyzuv")])
    make_resident(s, "abcd")
    make_resident(s, "wxyz")
    stage(s, "first", "abcdef")
    s.submit("second", "wxyzuv")
    look_up(s, "second")
    assert state(s, "second") == "parked", "4 of 6 tokens of pin budget are taken"
    assert (stats(s)["declined_rate_limited"], get(s, "second").owned()) == (1, frozenset())
    for _ in range(3):
        s.tick(10)
    assert stats(s)["declined_rate_limited"] == 1, "counted once, whatever the number of tries"
    assert s.admit("first")
    s.tick()
    assert state(s, "second") == "reading"
    end_all(s)


def test_what_the_device_has_by_now_is_trimmed_and_an_eviction_undoes_it() -> None:
    s = Sim(small(staging_pages=12, retry_poll_interval_passes=0), [*chain(*"mnopqrstuvwx"), *chain(*"abcdef")])
    s.submit("r", "abcdef")
    stage(s, "big", "mnopqrstuvwx")
    look_up(s, "r")
    assert state(s, "r") == "parked"
    s.submit("twin", "abcd", 0)
    look_up(s, "twin", 0)
    assert s.run("twin")
    s.tick(10)
    assert (get(s, "r").base_pages, get(s, "r").match_pages) == (0, 4), "trimming is not written down"
    s.settle()
    evict(s, 3)
    s.plane.abort("big")
    s.tick()
    assert state(s, "r") == "reading"
    assert (get(s, "r").base_pages, len(get(s, "r").staging), get(s, "r").pin_tokens) == (1, 5, 1)
    assert stats(s)["declined_anchor_lost"] == 0, "the base was never lost"
    end_all(s)


def test_a_span_that_is_resident_when_the_answer_comes_is_declined() -> None:
    s = sim("abcd")
    s.submit("r", "abcd")
    stage(s, "twin", "abcd")
    assert s.run("twin")
    look_up(s, "r")
    assert (stats(s)["declined_device_covered"], state(s, "r")) == (1, "idle")
    assert s.plane.parts.retries.pending == {}
    assert s.plane.parts.accounts.unfulfilled["device_covered"] == 4
    end_all(s)


# ── parking ──────────────────────────────────────────────────────────────────────────────────────────


def _pin_bound(bypass_cap: int) -> Sim:
    """A head that waits for pin budget, with staging to spare; ten small hits without a base come after it."""
    small_hits = [key for i in range(10) for key in chain(f"s{i}", "x")]
    stored = [*chain(*"abcdef"), *chain(*"wxyzuv"), *small_hits]
    s = Sim(small(max_context_tokens=18, staging_pages=40, bypass_cap=bypass_cap), stored)
    make_resident(s, "abcd")
    make_resident(s, "wxyz")
    stage(s, "holds", "abcdef")
    s.submit("head", "wxyzuv")
    look_up(s, "head")
    assert state(s, "head") == "parked"
    for i in range(10):
        s.submit(f"s{i}", [f"s{i}", "x"])
        look_up(s, f"s{i}")
    return s


@pytest.mark.parametrize("cap", [0, 3, 8])
def test_younger_hits_pass_a_pin_bound_head_up_to_the_cap(cap: int) -> None:
    s = _pin_bound(cap)
    states = [state(s, f"s{i}") for i in range(10)]
    assert states == ["reading"] * cap + ["parked"] * (10 - cap)
    assert stats(s)["bypasses"] == cap
    s.plane.abort("holds")
    s.tick()
    assert state(s, "head") == "reading"
    assert {state(s, f"s{i}") for i in range(10)} == {"reading"}, "the rest follows its head"
    end_all(s)


def test_nobody_passes_a_head_that_waits_for_staging() -> None:
    s = Sim(small(staging_pages=8), [*chain(*"mnopqr"), *chain(*"abcd"), *chain(*"xy")])
    stage(s, "big", "mnopqr")
    for rid, prompt in (("head", "abcd"), ("young", "xy")):
        s.submit(rid, prompt)
        look_up(s, rid)
    assert [state(s, "head"), state(s, "young")] == ["parked", "parked"], "two pages are free"
    s.plane.abort("head")
    s.tick()
    assert state(s, "young") == "reading", "the next in turn is tried at once"
    end_all(s)


def test_a_spinning_loop_uses_up_no_chances() -> None:
    s = Sim(small(staging_pages=4, park_cap=3, chance_quantum_ms=10), [*chain(*"mnop"), *chain(*"abcd")])
    stage(s, "big", "mnop")
    s.submit("r", "abcd")
    look_up(s, "r")
    for _ in range(500):
        s.tick(0)
    assert (state(s, "r"), get(s, "r").chances) == ("parked", 0)
    for chances in (1, 2):
        s.tick(10)
        assert get(s, "r").chances == chances
    s.tick(10)
    assert state(s, "r") == "recomputing"


def test_a_parked_hit_notices_that_the_device_has_its_span() -> None:
    s = Sim(small(staging_pages=4), [*chain(*"mnop"), *chain(*"abcd")])
    stage(s, "big", "mnop")
    s.submit("r", "abcd")
    look_up(s, "r")
    s.submit("twin", "abcd")
    look_up(s, "twin", 0)
    assert s.admit("twin")
    s.compute("twin")
    s.tick(0)
    assert state(s, "r") == "idle", "news of its base is a chance, without waiting for the quantum"
    end_all(s)


# ── deadline ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_timeout_grows_with_the_tokens_asked_for() -> None:
    config = small(prefetch_policy=TIMEOUT, prefetch_timeout_base_ms=1000, prefetch_timeout_per_ki_token_ms=250)
    assert config.read_deadline_ms(4096) == 2000
    assert config.read_deadline_ms(1 << 30) == config.prefetch_hard_max_ms == 30_000
    assert small().read_deadline_ms(4096) == 30_000, "wait_complete has a hard maximum too"


def test_a_deadline_of_zero_ms_means_the_next_pass() -> None:
    s = sim("abcd", prefetch_policy=TIMEOUT, prefetch_timeout_base_ms=0, prefetch_timeout_per_ki_token_ms=0)
    s.submit("r", "abcd")
    s.answer_all()
    s.tick(0)
    assert state(s, "r") == "recomputing"
    s.answer_all()
    s.tick(0)
    assert s.plane.parts.full.staging.used == 0
    end_all(s)


def test_a_parked_hit_outlasts_the_policy_but_not_the_hard_maximum() -> None:
    config = small(
        staging_pages=4, prefetch_policy=TIMEOUT, prefetch_timeout_base_ms=50, prefetch_timeout_per_ki_token_ms=0,
        prefetch_hard_max_ms=300,
    )  # fmt: skip
    s = Sim(config, [*chain(*"mnop"), *chain(*"abcd")])
    stage(s, "big", "mnop")
    for rid in ("r", "late"):
        s.submit(rid, "abcd")
        look_up(s, rid)
    s.tick(200)
    assert state(s, "r") == "parked", "it waits for room, not for the store"
    s.plane.abort("big")
    s.tick()
    assert (state(s, "r"), state(s, "late")) == ("reading", "parked")
    s.tick(45)
    assert state(s, "r") == "reading"
    s.tick(5)
    assert state(s, "r") == "recomputing", "what the look-up left of the policy's 50 ms is used up"
    s.tick(100)
    assert state(s, "late") == "recomputing"
    end_all(s)


def test_the_clock_goes_on_across_refetches_and_stands_while_a_hold_waits() -> None:
    s = sim("abcdef", anchor_lock_cap=0.0, prefetch_hard_max_ms=100)
    make_resident(s, "ab")
    s.submit("r", "abcdef")
    s.tick(30)
    look_up(s, "r")  # 31 ms used
    s.tick(30)
    read(s, "r")  # 62 ms used
    s.tick(1000)
    assert state(s, "r") == "staged", "waiting for device room uses up nothing"
    assert get(s, "r").clock_left_ms == 38
    evict(s, 1)
    assert s.plane.consider(get(s, "r")) is None
    s.tick()
    assert state(s, "r") == "reading"
    s.tick(37)
    assert state(s, "r") == "reading"
    s.tick(1)
    assert state(s, "r") == "recomputing"
    end_all(s)


def test_the_deadline_of_a_kept_hold_closes_storage_also_for_its_refetch() -> None:
    s = sim("abcdef", anchor_lock_cap=0.0, prefetch_hard_max_ms=100)
    make_resident(s, "ab")
    s.submit("r", "abcdef")
    look_up(s, "r")
    s.progress(s.of_kind(OpKind.READ)[0], 2)
    s.tick(100)
    assert state(s, "r") == "staged"
    evict(s, 1)
    assert s.plane.consider(get(s, "r")) is not None
    assert state(s, "r") == "recomputing", "an immediate refetch would ask again after the deadline"
    end_all(s)


# ── hold and plan ────────────────────────────────────────────────────────────────────────────────────


def test_a_growing_prefix_shortens_the_plan_and_keeps_the_hold() -> None:
    s = sim("abcdefgh", retry_poll_interval_passes=0)
    make_resident(s, "ab")
    stage(s, "r", "abcdefgh")
    plans = []
    for prompt in ("ab", "abcdef"):
        if prompt != "ab":
            s.submit("twin", prompt, 0)
            look_up(s, "twin", 0)
            assert s.run("twin")
        candidate = s.plane.consider(get(s, "r"))
        assert candidate is not None
        assert candidate.plan is not None
        plans.append(candidate.plan.load_pages)
    assert plans == [6, 2]
    assert len(get(s, "r").staging) == 6
    assert s.plane.parts.retries.pending == {}
    end_all(s)


def test_a_prefix_that_shrank_to_nothing_issues_one_refetch_with_the_known_end() -> None:
    s = sim("abcdefgh", anchor_lock_cap=0.0, retry_poll_interval_passes=0)
    make_resident(s, "ab")
    stage(s, "r", "abcdefgh")
    evict(s, s.plane.parts.full.tree.evictable)
    assert s.plane.consider(get(s, "r")) is None
    assert s.plane.parts.retries.pending["r"].hit_end == 8
    assert s.plane.parts.full.staging.used == 0
    s.tick()
    command = s.outstanding[s.of_kind(OpKind.READ)[0]]
    assert isinstance(command, Read)
    assert command.keys == chain(*"abcdefgh"), "assumed stored: no second look-up"
    assert stats(s)["issued_assumed_stored"] == 1
    assert not s.of_kind(OpKind.LOAD)
    end_all(s)


@pytest.mark.parametrize(("made", "after"), [(7, "reading"), (8, "recomputing")])
def test_the_last_attempt_is_still_made(made: int, after: str) -> None:
    s = sim("abcdefgh", anchor_lock_cap=0.0)
    make_resident(s, "ab")
    stage(s, "r", "abcdefgh")
    get(s, "r").retries = made
    evict(s, 1)
    s.plane.consider(get(s, "r"))
    s.tick()
    assert state(s, "r") == after
    end_all(s)


def test_a_refetch_of_what_is_gone_ends_as_a_miss() -> None:
    s = sim("abcdef", anchor_lock_cap=0.0)
    make_resident(s, "ab")
    stage(s, "r", "abcdef")
    s.stored.clear()
    evict(s, 1)
    s.plane.consider(get(s, "r"))
    s.tick()
    s.answer_all(OpKind.READ)
    s.tick()
    assert state(s, "r") == "idle"
    assert get(s, "r").end_pages == 0, "what was not delivered is no known end"
    end_all(s)


def test_a_base_that_oscillates_below_the_threshold_is_not_chased_for_ever() -> None:
    s = sim("", park_cap=6, prefetch_threshold_tokens=3, retry_poll_interval_passes=0)
    make_resident(s, "abcd")
    s.submit("r", "abcdef")
    for _ in range(s.config.park_cap + 1):
        evict(s, 2)
        s.plane.consider(get(s, "r"))
        if state(s, "r") == "recomputing":
            break
        assert state(s, "r") == "refetch"
        s.submit("twin", "abcd", 0)
        assert s.admit("twin")
        s.compute("twin")
        s.plane.finish("twin")
        s.tick()
        assert state(s, "r") == "idle", "declined: the base is back"
    assert state(s, "r") == "recomputing", "a declined look-up costs no retry, so the shrink costs a chance"
    assert (get(s, "r").chances, get(s, "r").retries) == (s.config.park_cap - 1, 0)
    end_all(s)


def test_an_admitted_request_shrinks_no_more() -> None:
    s = sim("abcdef")
    make_resident(s, "ab")
    stage(s, "r", "abcdef")
    assert s.admit("r")
    assert s.plane.parts.full.tree.evictable == 0
    assert s.plane.parts.full.take_device(s.plane.parts.full.device.available + 1) is None
    end_all(s)


def test_a_page_that_a_sibling_published_first_stays_the_siblings() -> None:
    s = sim(retry_poll_interval_passes=0)
    for rid in ("a", "b"):
        s.submit(rid, "xyz", 0)
        look_up(s, rid)
        assert s.admit(rid)
    assert s.plane.parts.full.device.used == 6
    s.compute("a")
    s.compute("b")
    assert s.plane.parts.full.device.used == 3
    assert s.plane.page_table("a") == s.plane.page_table("b")
    end_all(s)


def test_smaller_priority_goes_first_and_arrival_breaks_ties() -> None:
    s = sim()
    for rid, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        s.submit(rid, rid, priority=priority)
    s.answer_all()
    s.tick()
    assert [candidate.attempt.rid for candidate in s.candidates()] == ["d", "b", "a", "c"]
    s.plane.retract("a", 2, chain("a"))
    s.settle()
    assert [candidate.attempt.rid for candidate in s.candidates()] == ["d", "b", "a", "c"], "a keeps its place"


def test_a_request_that_is_no_candidate_is_not_considered() -> None:
    s = sim("abcd")
    s.submit("r", "abcd")
    assert s.plane.consider(get(s, "r")) is None
    assert state(s, "r") == "querying", "only best effort cuts"
