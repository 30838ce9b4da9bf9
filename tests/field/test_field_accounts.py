"""Field cases of hits that are charged and not delivered, of retries, of turn order, and of ends and restarts."""

from __future__ import annotations

import pytest

from hicache_fsm.config import CacheConfig
from hicache_fsm.errors import ConfigError
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.testing.sim import Sim, chain
from tests.field.tools import answer, end_all, evict, get, look_up, make_resident, read, sim, small, stage, state

PAGES16 = "abcdefghijklmnop"


@pytest.mark.parametrize("decline", ["threshold", "staging", "nothing_read"])
def test_BC_035_a_declined_hit_is_not_charged(decline: str) -> None:
    changes = {"threshold": {"prefetch_threshold_tokens": 20}, "staging": {"staging_pages": 2}, "nothing_read": {}}
    s = Sim(small(device_pages=40, **{"staging_pages": 16, **changes[decline]}), chain(*PAGES16))
    s.submit("r", PAGES16)
    s.answer_all()
    s.tick()
    for op in s.of_kind(OpKind.READ):
        s.answer(op, 0)
    s.tick()
    candidate = s.candidates()[0]
    assert (candidate.match_pages, candidate.cached_pages, candidate.plan) == (0, 0, None)
    accounts = s.plane.parts.accounts
    assert accounts.found == sum(accounts.unfulfilled.values())
    end_all(s)


def test_BC_036_what_a_hold_counts_on_cannot_be_evicted() -> None:
    s = sim("abcdef")
    make_resident(s, "ab")
    stage(s, "r", "abcdef")
    make_resident(s, "xyz")
    evict(s, s.plane.parts.full.tree.evictable)
    candidate = s.candidates()[0]
    assert (candidate.match_pages, candidate.cached_pages) == (2, 6), "pinned base, owned staging"
    s.plane.abort("r")
    s.pump()
    assert s.plane.parts.full.tree.evictable == 2, "the claim is given back with the request"
    assert s.plane.parts.full.staging.used == 0


def test_BC_038_a_cut_read_has_as_many_keys_as_rows() -> None:
    s = sim("abcdefgh", staging_pages=5)
    s.submit("r", "abcdefgh")
    look_up(s, "r")
    command = s.outstanding[s.of_kind(OpKind.READ)[0]]
    assert (len(command.keys), len(command.pages)) == (5, 5)  # type: ignore[union-attr]
    assert s.plane.parts.accounts.unfulfilled["host_capacity"] == 3
    read(s, "r")
    attempt = get(s, "r")
    assert (attempt.base_pages, attempt.end_pages, len(attempt.staging)) == (0, 5, 5)
    assert s.admit("r")
    answer(s, OpKind.LOAD)
    s.compute("r")
    assert [s.device[page] for page in s.plane.page_table("r")[:8]] == list(chain(*"abcdefgh"))
    end_all(s)


def test_BC_039_a_whole_hit_waits_for_room_instead_of_being_cut() -> None:
    s = Sim(small(staging_pages=16, device_pages=60), [*chain(*PAGES16), *chain(*[f"x{i}" for i in range(14)])])
    stage(s, "other", [f"x{i}" for i in range(14)])  # type: ignore[arg-type]
    s.submit("r", PAGES16)
    look_up(s, "r")
    assert state(s, "r") == "parked", "2 of 16 pages are free now"
    s.plane.abort("other")
    s.tick()
    assert len(get(s, "r").staging) == 16
    read(s, "r")
    assert s.admit("r")
    answer(s, OpKind.LOAD)
    accounts = s.plane.parts.accounts
    assert (accounts.spliced, accounts.unfulfilled["host_capacity"]) == (16, 0)
    end_all(s)


def test_BC_039_a_hit_beyond_all_staging_is_cut_with_its_reason() -> None:
    s = Sim(small(staging_pages=12, device_pages=40), chain(*PAGES16))
    s.submit("r", PAGES16)
    look_up(s, "r")
    accounts = s.plane.parts.accounts
    assert (accounts.found, accounts.unfulfilled["host_capacity"], get(s, "r").unresolved) == (16, 4, 12)
    assert accounts.stats["declined_host_oversize"] == 1
    end_all(s)


@pytest.mark.parametrize("pressure", ["evicted", "branched"])
def test_BC_040_the_base_is_matched_again_at_commit_and_no_read_is_wasted(pressure: str) -> None:
    s = Sim(small(staging_pages=16), chain(*"abcdefghijkl"))
    make_resident(s, "abcd")
    before = s.plane.parts.accounts.spliced
    s.submit("r", "abcdefghijkl")
    if pressure == "evicted":
        evict(s, 2)
    else:
        s.submit("twin", "abxy")
        look_up(s, "twin")
        assert s.run("twin")
    look_up(s, "r")
    attempt = get(s, "r")
    assert state(s, "r") == "reading"
    assert attempt.base_pages == attempt.pin_tokens == (2 if pressure == "evicted" else 4)
    evict(s, s.plane.parts.full.tree.evictable)
    read(s, "r")
    assert s.admit("r"), "the pin kept the base"
    answer(s, OpKind.LOAD)
    accounts = s.plane.parts.accounts
    assert accounts.unfulfilled["anchor_lost"] == (8 if pressure == "evicted" else 0)
    assert accounts.spliced - before == 12 - attempt.base_pages
    assert accounts.unfulfilled["shrunk"] == 0, "nothing that was read was thrown away"
    end_all(s)


def test_BC_041_a_failed_load_leaves_nothing_behind_for_any_sharer() -> None:
    s = sim("abcdefgh", retry_poll_interval_passes=0)
    stage(s, "r", "abcdefgh")
    assert s.admit("r")
    s.submit("sharer", "abcdefghij")
    look_up(s, "sharer", 0)
    assert s.admit("sharer")
    assert get(s, "sharer").load_ops == get(s, "r").load_ops != ()
    answer(s, OpKind.LOAD, ok=False)
    assert sorted(s.plane.take_restarted()) == ["r", "sharer"]
    for rid in ("r", "sharer"):
        attempt = get(s, rid)
        assert (attempt.number, attempt.published_pages, attempt.device, attempt.load_ops) == (2, 0, [], ())
        assert attempt.match_pages == 0
    assert s.plane.parts.accounts.unfulfilled["load_failed"] == 8
    end_all(s)


def test_BC_041_a_failed_load_takes_loads_on_top_of_it_along() -> None:
    s = sim("abcdef")
    s.submit("first", "abc")
    s.submit("second", "abcdef")
    s.answer_all()
    s.tick()
    s.answer_all()
    s.tick()
    assert s.admit("first")
    assert s.admit("second")
    lower, upper = s.of_kind(OpKind.LOAD)
    s.answer(lower, ok=False)
    s.tick()
    assert s.plane.parts.full.tree.resident == 0
    assert s.plane.parts.full.device.used == 3, "the upper load still writes its rows: quarantine"
    s.answer(upper)
    s.tick()
    assert s.plane.parts.full.device.used == 0
    assert s.plane.parts.accounts.spliced == 0
    assert s.plane.parts.accounts.unfulfilled["load_failed"] == 6
    end_all(s)


def test_BC_041_a_late_failure_spares_what_was_computed_since() -> None:
    s = sim("abcdef", retry_poll_interval_passes=0)
    s.submit("first", "abc")
    s.submit("second", "abcdef")
    s.answer_all()
    s.tick()
    s.answer_all()
    s.tick()
    assert s.admit("first")
    assert s.admit("second")
    lower, upper = s.of_kind(OpKind.LOAD)
    s.answer(lower, ok=False)
    s.tick()
    s.plane.abort("first")
    s.plane.abort("second")
    s.submit("third", "abcdef")
    look_up(s, "third", 0)
    assert s.admit("third")
    s.compute("third")
    s.answer(upper, ok=False)
    s.tick()
    assert state(s, "third") == "resident"
    assert s.plane.parts.full.tree.match(chain(*"abcdef")) == 6
    end_all(s)


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_BC_041_a_copy_engine_that_always_fails_is_not_tried_for_ever(cap: int) -> None:
    s = sim("abcd", retry_max_attempts=cap)
    s.submit("r", "abcd")
    loads = 0
    for _ in range(60):
        for op in list(s.outstanding):
            failing = op in s.of_kind(OpKind.LOAD)
            loads += failing
            s.answer(op, ok=not failing)
        s.tick(10)
        s.admit("r")
        if state(s, "r") == "resident":
            break
    assert state(s, "r") == "resident"
    assert loads == 1 + cap
    end_all(s)


def test_BC_042_a_miss_before_the_write_is_durable_is_polled() -> None:
    s = sim(retry_poll_interval_passes=8, device_pages=14, max_context_tokens=2)
    prompt = "abcdefghijkl"
    s.submit("head", "0", priority=-1)
    s.submit("turn", prompt, 0)
    s.answer_all()
    s.tick()
    assert s.admit("turn")
    s.compute("turn")
    s.plane.finish("turn")
    s.tick()
    s.answer_all(OpKind.OFFLOAD)
    s.tick()
    evict(s, 12)
    s.submit("r", prompt)
    look_up(s, "r", 0)
    assert state(s, "r") == "paced"
    asked = [s.asked["r", 1]]
    for _ in range(20):
        s.answer_all(OpKind.LOOKUP)
        s.tick()
        asked.append(s.asked["r", 1])
    assert asked[-1] == 3, "polls come eight passes apart"
    s.settle()
    s.answer_all()
    for _ in range(9):
        s.answer_all()
        s.tick()
    assert state(s, "r") == "staged", "found at the first poll after the write had landed"
    assert s.asked["r", 1] <= 1 + 8
    end_all(s)


def test_BC_042_polls_end_at_the_cap_and_at_the_head() -> None:
    s = sim(retry_poll_interval_passes=1, retry_max_attempts=3)
    s.submit("head", "x")
    s.submit("r", "abcd")
    for _ in range(40):
        s.answer_all(OpKind.LOOKUP)
        s.tick()
    assert s.asked["r", 1] == 3, "one look-up, and polls for the larger half of the cap"
    assert s.asked["head", 1] == 1, "the head is not delayed by a speculative miss"
    assert state(s, "r") == state(s, "head") == "idle"
    end_all(s)


def test_BC_043_a_page_that_cannot_be_read_is_paid_for_once() -> None:
    s = sim("abcd", negative_ttl_ms=1000, retry_poll_interval_passes=0, staging_pages=16)
    for i in range(10):
        rid = f"r{i}"
        s.submit(rid, "abcd")
        look_up(s, rid, 4)  # the store goes on claiming it
        if i == 0:
            read(s, rid, 0)
        assert state(s, rid) == "idle", "no second request reads what nobody can deliver"
        s.tick(10)
    assert s.plane.parts.accounts.stats["negative_hits"] == 9
    assert chain(*"abcd")[0] not in s.plane.parts.beliefs, "or it would never be written anew"
    assert s.run("r1"), "computes it, and writes it anew"
    s.settle()
    evict(s, 4)
    s.submit("r11", "abcd")
    look_up(s, "r11")
    assert state(s, "r11") == "reading", "written since: found again at once"
    end_all(s)


def test_BC_043_the_negative_entry_expires() -> None:
    s = sim("abcd", negative_ttl_ms=100, retry_poll_interval_passes=0)
    s.submit("r", "abcd")
    look_up(s, "r")
    read(s, "r", 2)
    s.plane.abort("r")
    s.submit("soon", "abcd")
    look_up(s, "soon")
    assert get(s, "soon").end_pages == 2, "pages before the bad one are still had"
    s.plane.abort("soon")
    s.tick(100)
    s.submit("later", "abcd")
    look_up(s, "later")
    assert get(s, "later").end_pages == 4
    end_all(s)


def test_BC_044_look_ups_that_are_not_answered_cost_the_deadline_and_nothing_more() -> None:
    s = sim(prefetch_hard_max_ms=500, device_pages=200)
    rids = [f"r{i}" for i in range(64)]
    for rid in rids:
        s.submit(rid, [rid, "x"])
    for _ in range(49):
        s.tick(10)
        assert s.candidates() == []
    s.tick(10)
    assert len(s.candidates()) == 64, "after half a second all go on without storage"
    assert sum(s.asked.values()) == 64
    s.stored.update(chain("r0", "x"))
    for rid in rids:
        assert s.admit(rid)
    s.answer_all(OpKind.LOOKUP)
    s.tick()
    assert all(state(s, rid) == "resident" for rid in rids), "late answers change nothing"
    assert chain("r0", "x")[1] in s.plane.parts.beliefs
    end_all(s)


def test_BC_045_a_hit_without_room_goes_first_when_room_comes_back() -> None:
    prompts = {f"r{i}": [f"r{i}.{p}" for p in range(40)] for i in range(1, 5)}
    stored = [key for prompt in prompts.values() for key in chain(*prompt)]
    s = Sim(small(staging_pages=130, device_pages=300, load_pool_usage_fraction=1.0), stored)
    for rid, prompt in prompts.items():
        s.submit(rid, prompt)
    s.answer_all()
    s.tick()
    assert [state(s, rid) for rid in prompts] == ["reading"] * 3 + ["parked"]
    s.submit("new", [*prompts["r1"]])
    look_up(s, "new")
    assert state(s, "new") == "parked", "newer hits wait behind"
    s.answer_all(OpKind.READ)
    s.tick()
    assert s.admit("r1")
    answer(s, OpKind.LOAD)
    assert state(s, "r4") == "reading"
    end_all(s)
    assert s.plane.parts.accounts.unfulfilled["host_capacity"] == 0
    with pytest.raises(ConfigError, match="staging_pages"):
        CacheConfig(staging_pages=0)


@pytest.mark.parametrize("last", ["deadline", "park_cap", "defer_cap", "load_failed"])
def test_BC_046_a_request_that_must_recompute_is_there_to_be_admitted(last: str) -> None:
    caps = small(prefetch_hard_max_ms=100, park_cap=1, max_defers=1, staging_pages=4)
    s = Sim(caps, [*chain(*"abcd"), *chain(*"wxyz")])
    if last == "park_cap":
        stage(s, "big", "wxyz")
    s.submit("r", "abcd")
    match last:
        case "deadline":
            s.tick(100)
        case "park_cap":
            look_up(s, "r")
            s.tick(10)
        case "defer_cap":
            s.settle()
            s.plane.defer(s.candidates()[0])
        case "load_failed":
            s.settle()
            assert s.admit("r")
            answer(s, OpKind.LOAD, ok=False)
            s.tick(100)
    assert state(s, "r") in ("recomputing", "querying")
    if last == "load_failed":
        assert s.plane.take_restarted() == ["r"]
        s.settle()
    assert not s.plane.is_idle(), "there is work, and the engine is told so"
    assert "r" in [candidate.attempt.rid for candidate in s.candidates()]
    end_all(s)


def test_BC_048_one_read_serves_all_that_share_it() -> None:
    prompt = "abcdefghij"
    s = sim(prompt, device_pages=120, max_context_tokens=12)
    rids = [f"r{i}" for i in range(50)]
    for i, rid in enumerate(rids):
        s.submit(rid, [*prompt, f"tail{i}"], 1)
    s.answer_all(OpKind.LOOKUP)
    s.tick()
    assert [state(s, rid) for rid in rids] == ["reading"] + ["parked"] * 49
    read(s, "r0")
    assert s.admit("r0")
    s.tick()
    assert len(s.candidates()) == 49, "published: nobody waits for it any longer, even before its copy has landed"
    assert s.of_kind(OpKind.READ) == []
    assert s.plane.parts.accounts.stats["declined_device_covered"] == 49
    assert s.plane.parts.accounts.unfulfilled["device_covered"] == 490
    assert s.admit("r1")
    assert get(s, "r1").load_ops == get(s, "r0").load_ops, "its batch waits for the same layers"
    end_all(s)


def test_BC_048_followers_go_on_when_the_first_is_aborted() -> None:
    s = sim("abcdefghij", device_pages=60)
    for rid in ("r0", "r1", "r2"):
        s.submit(rid, "abcdefghij")
    s.answer_all(OpKind.LOOKUP)
    s.tick()
    s.plane.abort("r0")
    s.answer_all(OpKind.READ)
    s.tick()
    assert [state(s, "r1"), state(s, "r2")] == ["reading", "parked"]
    end_all(s)


def test_BC_049_a_parked_hit_keeps_its_turn() -> None:
    stored = [*chain(*"abcdefgh"), *(key for i in range(6) for key in chain(f"n{i}", "x"))]
    s = Sim(small(staging_pages=10), [*stored, *chain("u", "v"), *chain("w", "x"), *chain("y", "z")])
    for rid, prompt in (("h0", "uv"), ("h1", "wx"), ("h2", "yz")):
        stage(s, rid, prompt)
    s.submit("r1", "abcdefgh")
    look_up(s, "r1")
    assert state(s, "r1") == "parked", "4 of 10 pages are free"
    for i in range(2):
        s.submit(f"n{i}", [f"n{i}", "x"])
        s.plane.abort(f"h{i}")
        s.answer_all(OpKind.LOOKUP)
        s.tick()
        assert state(s, f"n{i}") == "parked", "two pages are free, and they are not the newcomer's"
    assert state(s, "r1") == "reading", "4 + 2 + 2 pages"
    end_all(s)


def test_BC_050_only_the_confirmed_head_of_a_write_is_believed() -> None:
    s = sim(retry_poll_interval_passes=0)
    prompt, keys = "abcdef", chain(*"abcdef")
    s.submit("r", prompt, 0)
    s.answer_all()
    s.tick()
    assert s.admit("r")
    s.compute("r")
    s.plane.finish("r")
    s.tick()
    s.answer_all(OpKind.OFFLOAD)
    s.tick()
    first = s.of_kind(OpKind.STORE)[0]
    s.answer(first, pages=2)
    s.tick()
    assert [key in s.plane.parts.beliefs for key in keys] == [True, True, False, False, False, False]
    s.submit("again", prompt)
    assert s.run("again"), "the next use writes the rest"
    s.settle()
    assert set(keys) <= s.stored
    end_all(s)


@pytest.mark.parametrize("delivered", [0, 3, 7, 8])
def test_BC_054_under_delivery_is_planned_again(delivered: int) -> None:
    s = sim("abcdefgh", prefetch_threshold_tokens=4)
    s.submit("r", "abcdefgh")
    look_up(s, "r")
    read(s, "r", delivered)
    candidate = s.candidates()[0]
    assert candidate.cached_pages == delivered
    assert s.plane.parts.accounts.unfulfilled["storage_transfer"] == 8 - delivered
    assert s.admit("r")
    assert len(s.plane.page_table("r")) == 9, "device rows for what is computed instead"
    end_all(s)


def test_BC_072_a_detach_releases_like_an_abort() -> None:
    s = sim("abcdefghij", staging_pages=10, device_pages=40)
    make_resident(s, "abcd")
    for rid in ("reads", "waits"):
        s.submit(rid, "abcdefghij")
    s.answer_all(OpKind.LOOKUP)
    s.tick()
    s.submit("asks", "abcdefghij")
    stage_of = {rid: state(s, rid) for rid in ("reads", "waits", "asks")}
    assert stage_of == {"reads": "reading", "waits": "parked", "asks": "querying"}
    for _ in range(2):
        s.plane.detach()
        s.pump()
        assert {state(s, rid) for rid in stage_of} == {"recomputing"}
        assert s.plane.parts.full.pinned.value == 0
        assert s.plane.parts.full.reads.value == 6, "in quarantine until the read lets go"
    s.answer_all()
    s.tick()
    assert s.plane.parts.full.reads.value == 0
    end_all(s)


def test_BC_072_a_hold_survives_a_detach_and_asks_nothing_more() -> None:
    s = sim("abcdef", anchor_lock_cap=0.0)
    make_resident(s, "ab")
    stage(s, "r", "abcdef")
    s.plane.detach()
    assert state(s, "r") == "staged", "the bytes are ours"
    evict(s, 1)
    assert s.plane.consider(get(s, "r")) is not None, "its base is gone, and nobody may be asked again"
    assert state(s, "r") == "recomputing"
    s.plane.attach()
    for _ in range(5):
        s.tick()
    assert s.outstanding == {}
    end_all(s)


@pytest.mark.parametrize("ok", [True, False])
def test_BC_075_answers_of_an_older_epoch_release_and_teach_nothing(ok: bool) -> None:
    s = sim()
    s.submit("r", "abcd")
    s.answer_all()
    s.tick()
    assert s.admit("r")
    s.compute("r")
    s.tick()
    op = s.of_kind(OpKind.OFFLOAD)[0]
    s.plane.flush()
    s.pump()
    assert s.plane.parts.full.tree.resident == 0
    assert s.plane.parts.full.device.used == 4, "the copy still reads these rows"
    s.answer(op, ok=ok)
    s.tick()
    assert s.plane.parts.full.device.used == 0
    s.answer_all()
    s.tick()
    assert not s.plane.parts.beliefs.believed
    assert s.plane.take_restarted() == ["r"]
    assert get(s, "r").published_pages == 0, "progress of the old epoch is forgotten"
    end_all(s)
    assert set(chain(*"abcd")) <= s.stored, "written again, from its first page on"


def test_BC_077_a_look_up_counts_once_however_often_it_is_deferred() -> None:
    s = sim("abcdefghi", max_defers=60)
    stage(s, "r", "abcdefghij")
    for _ in range(50):
        s.plane.defer(s.candidates()[0])
        s.tick(10)
    accounts = s.plane.parts.accounts
    assert (accounts.requested, accounts.found, accounts.stats["l3_demand_requests"]) == (10, 9, 1)
    assert s.admit("r")
    answer(s, OpKind.LOAD)
    assert (accounts.requested, accounts.found, accounts.spliced) == (10, 9, 9)
    end_all(s)


def test_BC_085_chunks_splice_once_and_write_what_they_computed() -> None:
    s = sim("abcdef", staging_pages=16)
    prompt = "abcdefghijkl"
    stage(s, "r", prompt)
    candidate = s.candidates()[0]
    assert s.plane.admit(candidate, 10) is not None
    s.pump()
    answer(s, OpKind.LOAD)
    s.compute("r", 10)
    assert s.plane.parts.accounts.spliced == 6
    writes = [span.keys for span in s.plane.parts.backup.queue]
    assert writes == [chain(*prompt)[6:10]]
    s.tick()
    assert s.plane.extend("r", 13)
    s.compute("r", 13)
    s.tick()
    assert s.asked["r", 1] == 1
    s.plane.retract("r", 13, chain(*prompt))
    end_all(s)
    assert set(chain(*prompt)) <= s.stored
    assert s.plane.parts.backup.stored_pages == 6, "pages 6 to 11, once each"


def test_BC_086_retractions_leave_no_lock_and_no_pin() -> None:
    s = sim("abcdef", retry_poll_interval_passes=0)
    make_resident(s, "ab")
    s.submit("r", "abcdef")
    keys = chain(*"abcdef")
    for round_no in range(50):
        if round_no % 2:
            s.answer_all()
            s.tick()
        if round_no % 3:
            s.answer_all()
            s.tick()
        if round_no % 5 == 0:
            s.admit("r")
        s.plane.retract("r", 7, keys)
        s.pump()
        assert s.plane.parts.full.pinned.value == 0
    s.plane.abort("r")
    s.settle()
    assert s.plane.parts.full.tree.locked == 0
    assert s.leaks() == []
