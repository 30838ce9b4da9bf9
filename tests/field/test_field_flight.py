"""Field cases of double release, of rows in use by a running copy, and of late, doubled and foreign answers."""

from __future__ import annotations

import itertools

import pytest

from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.ports import LoadDone, LookupDone, ReadDone
from hicache_fsm.testing.sim import Sim, chain
from tests.field.tools import answer, end_all, evict, get, look_up, make_resident, read, sim, small, stage, state


@pytest.mark.parametrize("landed", range(9))
def test_BC_019_a_broken_read_is_released_once_wherever_it_broke(landed: int) -> None:
    s = sim("abcdefgh")
    s.submit("r", "abcdefgh")
    look_up(s, "r")
    op = s.of_kind(OpKind.READ)[0]
    s.progress(op, landed // 2)
    s.tick()
    s.answer(op, landed)
    s.repeat(ReadDone(op, landed))
    s.tick()
    assert state(s, "r") == ("staged" if landed else "idle")
    assert s.plane.parts.full.staging.used == landed
    assert s.plane.parts.accounts.unfulfilled["storage_transfer"] == 8 - landed
    end_all(s)


def test_BC_020_pages_behind_a_gap_are_neither_taken_nor_released() -> None:
    s = sim("abcd")
    s.stored.update(chain(*"abcdef")[5:])
    for i in range(100):
        rid = f"r{i}"
        s.submit(rid, "abcdef")
        look_up(s, rid)
        assert s.plane.parts.full.staging.used == 4
        read(s, rid)
        s.plane.abort(rid)
        s.pump()
        assert s.plane.parts.full.staging.available == s.config.staging_pages
    assert s.plane.parts.accounts.unfulfilled["aborted"] == 400


def test_BC_021_counters_equal_lists_through_evictions_and_loads() -> None:
    s = Sim(small(device_pages=3, staging_pages=3, max_context_tokens=2), [*chain(*"ab"), *chain(*"xy")])
    for prompt in ("ab", "xy", "ab", "xy"):
        stage(s, "r", prompt)
        assert s.run("r"), "the earlier prompt is evicted for this one"
        s.settle()
        full = s.plane.parts.full
        assert full.device.used == full.tree.resident <= 3
        assert (full.staging.available, full.reads.value, full.writes.value) == (3, 0, 0)


def test_BC_023_staging_is_not_used_again_before_its_copy_is_acknowledged() -> None:
    s = Sim(small(staging_pages=4), [*chain(*"abcd"), *chain(*"wxyz")])
    stage(s, "r", "abcd")
    s.submit("r2", "wxyz")
    look_up(s, "r2")
    assert state(s, "r2") == "parked"
    rows = get(s, "r").staging
    assert s.admit("r")
    for _ in range(3):
        s.tick(10)
        assert state(s, "r2") == "parked", "the copy still reads these rows"
    answer(s, OpKind.LOAD)
    assert set(get(s, "r2").staging) == set(rows)
    read(s, "r2")
    assert [s.device[page] for page in s.plane.page_table("r")[:4]] == list(chain(*"abcd"))
    end_all(s)


def test_BC_023_staging_of_a_failed_copy_comes_back_too() -> None:
    s = sim("abcd")
    stage(s, "r", "abcd")
    assert s.admit("r")
    answer(s, OpKind.LOAD, ok=False)
    assert s.plane.parts.full.staging.used == 0
    end_all(s)


def test_BC_024_eviction_for_a_load_takes_neither_base_nor_hold() -> None:
    s = Sim(small(device_pages=8, staging_pages=6, max_context_tokens=4), chain(*"abcdef"))
    make_resident(s, "ab")
    stage(s, "r", "abcdef")
    s.submit("v", "mnopq", 0)
    look_up(s, "v")
    s.plane.detach()  # nothing of the victims is written: eviction must not wait for it
    assert s.admit("v")
    s.compute("v")
    s.plane.finish("v")
    s.tick()
    assert s.plane.parts.full.device.available == 1
    assert s.admit("r"), "the victims leave, the base and the hold do not"
    assert s.plane.parts.full.tree.match(chain(*"mnopq")) == 1, "four victims, and none of ours"
    answer(s, OpKind.LOAD)
    assert [s.device[page] for page in s.plane.page_table("r")[:6]] == list(chain(*"abcdef"))
    end_all(s)


def test_BC_024_a_load_that_finds_no_room_changes_nothing() -> None:
    s = Sim(small(device_pages=8, staging_pages=6, max_context_tokens=4), chain(*"abcdef"))
    make_resident(s, "ab")
    stage(s, "r", "abcdef")
    s.submit("runs", "mnop")
    look_up(s, "runs")
    assert s.admit("runs")
    held = get(s, "r").staging
    assert not s.admit("r")
    assert (state(s, "r"), get(s, "r").staging, get(s, "r").pin_tokens) == ("staged", held, 2)
    end_all(s)


def _writing(device_pages: int) -> Sim:
    """`a` has finished; its two pages are being copied for the store."""
    s = sim(device_pages=device_pages, max_context_tokens=2)
    s.submit("a", "ab", 0)
    look_up(s, "a")
    assert s.admit("a")
    s.compute("a")
    s.plane.finish("a")
    s.tick()
    assert s.of_kind(OpKind.OFFLOAD)
    return s


def test_BC_025_rows_that_a_write_reads_go_to_nobody() -> None:
    s = _writing(4)
    s.submit("b", "xyz", 0)
    look_up(s, "b")
    assert not s.admit("b"), "two of four pages are being read"
    answer(s, OpKind.OFFLOAD)
    assert s.admit("b"), "the copy has its bytes: the rows may go"
    s.compute("b")
    answer(s, OpKind.STORE)
    assert set(chain(*"ab")) <= s.stored
    end_all(s)


def test_BC_026_the_last_page_is_written_from_its_own_row_or_not_at_all() -> None:
    s = Sim(small(page_size=4, device_pages=4, max_context_tokens=4))
    s.submit("a", "ab", 0)
    look_up(s, "a")
    assert s.admit("a")
    s.compute("a")
    s.plane.finish("a")
    assert s.plane.parts.backup.queued_pages == 2, "page 1 was full at the end: its write is queued at once"
    evict(s, 1)
    s.submit("b", "xyz", 0)
    look_up(s, "b")
    assert s.of_kind(OpKind.OFFLOAD), "page 0 only: page 1 has left before its turn came"
    answer(s, OpKind.OFFLOAD)
    answer(s, OpKind.STORE)
    assert chain(*"ab")[0] in s.stored
    assert chain(*"ab")[1] not in s.stored
    assert s.plane.parts.backup.dropped_pages["evicted"] == 1
    end_all(s)


def test_BC_026_a_retracted_request_does_not_take_the_rows_of_its_write() -> None:
    s = sim(device_pages=4, max_context_tokens=2)
    s.submit("a", "ab")
    look_up(s, "a")
    assert s.admit("a")
    s.compute("a")
    s.tick()
    s.plane.retract("a", 3, chain(*"ab"))
    s.pump()
    assert s.plane.parts.full.tree.locked == 2, "the copy keeps them"
    end_all(s)
    assert set(chain(*"ab")) <= s.stored


def test_BC_029_a_page_with_a_transfer_on_it_is_not_evictable() -> None:
    s = sim("abcd")
    stage(s, "r", "abcd")
    assert s.admit("r")
    s.plane.abort("r")
    s.pump()
    assert s.plane.parts.full.tree.evictable == 0, "the load writes all four pages"
    answer(s, OpKind.LOAD)
    assert s.plane.parts.full.tree.evictable == 4


def test_BC_029_pages_that_a_late_read_could_not_vouch_for_are_not_used() -> None:
    s = sim("abcd")
    s.submit("r", "abcd")
    look_up(s, "r")
    read(s, "r", pages=2)
    candidate = s.candidates()[0]
    assert candidate.cached_pages == 2
    end_all(s)


def test_BC_030_an_answer_to_an_earlier_attempt_is_not_taken_for_this_one() -> None:
    s = sim("abcdefgh", staging_pages=16)
    s.submit("r", "abcdefgh")
    look_up(s, "r")
    old = s.of_kind(OpKind.READ)[0]
    rows = get(s, "r").staging
    s.plane.retract("r", 9, chain(*"abcdefgh"))
    s.pump()
    look_up(s, "r", 4)
    assert (get(s, "r").number, state(s, "r")) == (2, "reading")
    assert set(get(s, "r").staging).isdisjoint(rows), "the rows of the old read are not the new one's"
    s.answer(old, 8)
    s.tick()
    assert state(s, "r") == "reading", "the old answer gave its rows back, and that is all"
    assert s.plane.parts.full.staging.used == 4
    read(s, "r")
    assert len(get(s, "r").staging) == 4
    assert s.plane.parts.accounts.unfulfilled["retracted"] == 8
    end_all(s)


def test_BC_030_the_load_of_an_aborted_request_is_not_that_of_the_next_in_its_place() -> None:
    s = Sim(small(staging_pages=16), [*chain(*"abcd"), *chain(*"wxyz")])
    stage(s, "old", "abcd")
    assert s.admit("old")
    slot, old = get(s, "old").slot, s.of_kind(OpKind.LOAD)[0]
    s.plane.abort("old")
    stage(s, "new", "wxyz")
    assert s.admit("new")
    assert get(s, "new").slot == slot, "records are used again"
    s.answer(old)
    s.tick()
    assert state(s, "new") == "loading"
    answer(s, OpKind.LOAD)
    assert state(s, "new") == "resident"
    end_all(s)


def test_BC_031_an_answer_for_an_unknown_request_is_counted_and_hurts_nobody() -> None:
    s = sim("abcd")
    for i in range(10):
        s.submit(f"other{i}", [f"{i}"])
    s.answer_all()
    s.tick()
    for i in range(10):
        assert s.admit(f"other{i}")
    s.submit("r", "abcd")
    look_up(s, "r")
    op = s.of_kind(OpKind.READ)[0]
    s.plane.abort("r")
    for _ in range(3):
        s.tick()
    done = s.answer(op)
    s.tick()
    assert s.plane.parts.full.reads.value == 0
    stale = s.plane.parts.ops.stale
    s.repeat(done)
    s.tick()
    assert s.plane.parts.ops.stale == stale + 1
    assert all(state(s, f"other{i}") == "resident" for i in range(10))
    end_all(s)


@pytest.mark.parametrize("when", ["staged", "admitted", "finished"])
def test_BC_032_a_second_answer_changes_nothing(when: str) -> None:
    s = sim("abcd")
    s.submit("r", "abcd")
    look_up(s, "r")
    op = s.of_kind(OpKind.READ)[0]
    s.answer(op)
    s.tick()
    load = 0
    if when != "staged":
        assert s.admit("r")
        load = s.of_kind(OpKind.LOAD)[0]
        answer(s, OpKind.LOAD)
    if when == "finished":
        s.compute("r")
        s.plane.finish("r")
        s.settle()
        s.submit("r2", "wxyz")
    before = (state(s, "r"), s.plane.parts.accounts.spliced, s.plane.parts.full.staging.used)
    stale = s.plane.parts.ops.stale
    s.repeat(ReadDone(op, 4))
    s.repeat(LoadDone(load, True))
    s.repeat(LoadDone(load, False))
    s.tick()
    assert (state(s, "r"), s.plane.parts.accounts.spliced, s.plane.parts.full.staging.used) == before
    assert s.plane.parts.ops.stale == stale + 3
    end_all(s)


@pytest.mark.parametrize("order", list(itertools.permutations(["abort", "finish", "stored", "tick"])))
def test_BC_033_abort_finish_and_answer_in_any_order_release_once(order: tuple[str, ...]) -> None:
    s = sim()
    s.submit("r", "ab")
    look_up(s, "r")
    assert s.admit("r")
    s.compute("r")
    s.tick()
    answer(s, OpKind.OFFLOAD)
    attempt = get(s, "r")
    ends = []
    for act in order:
        match act:
            case "abort":
                ends.append(s.plane.abort("r"))
            case "finish":
                ends.append(s.plane.finish("r"))
            case "stored":
                s.answer_all(OpKind.STORE)
            case "tick":
                s.tick()
    s.settle()
    assert sorted(ends) == [False, True], "the second end finds nothing to do"
    assert attempt.owned() == frozenset()
    assert set(chain(*"ab")) <= s.stored
    assert s.leaks() == []


def test_BC_034_a_deferred_hold_is_remembered_and_not_looked_up_again() -> None:
    s = sim("abcdefgh", device_pages=10, max_context_tokens=2)
    stage(s, "r", "abcdefgh")
    s.submit("runs", "xy", 0)
    look_up(s, "runs")
    assert s.admit("runs")
    held = get(s, "r").staging
    for _ in range(20):
        s.tick()
        assert not s.admit("r"), "9 pages wanted, 8 free"
        s.plane.defer(s.candidates()[0])
        assert (state(s, "r"), get(s, "r").staging, get(s, "r").number) == ("staged", held, 1)
    s.plane.finish("runs")
    assert s.admit("r")
    assert s.asked["r", 1] == 1, "one look-up in all"
    answer(s, OpKind.LOAD)
    assert s.plane.parts.accounts.spliced == 8
    end_all(s)


def test_a_lookup_answer_for_an_ended_request_teaches_beliefs_only() -> None:
    s = sim("abcd")
    s.submit("r", "abcd")
    op = s.of_kind(OpKind.LOOKUP)[0]
    s.plane.abort("r")
    s.submit("r", "abcd")
    s.inbox.append(LookupDone(op, 0, True))
    s.tick()
    assert state(s, "r") == "querying"
    s.settle()
    assert state(s, "r") == "staged"
