"""The write path: queue, share of staging, order, beliefs, and writes whose pages leave, return or never landed."""

from __future__ import annotations

import pytest

from hicache_fsm.components.full import FullComponent
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.ports import StoreDone
from hicache_fsm.testing.sim import Sim, chain
from tests.field.tools import answer, end_all, evict, get, look_up, read, sim, small, stage, state


def compute(s: Sim, rid: str, prompt: str, extra: int = 0) -> None:
    """Compute a prompt that is not read from storage, and finish."""
    s.submit(rid, prompt, extra)
    for op in s.of_kind(OpKind.LOOKUP):
        s.answer(op, 0)
    s.tick()
    assert s.admit(rid), s.plane.explain(rid)
    s.compute(rid)
    s.plane.finish(rid)


def write(s: Sim) -> None:
    s.tick()
    s.answer_all(OpKind.OFFLOAD)
    s.tick()
    s.answer_all(OpKind.STORE)
    s.tick()


def test_device_rows_are_free_after_the_copy_and_staging_after_the_store() -> None:
    s = sim()
    compute(s, "r", "abcd")
    s.tick()
    full, backup = s.plane.parts.full, s.plane.parts.backup
    assert (full.tree.locked, full.writes.value, len(backup.pending)) == (4, 4, 4)
    answer(s, OpKind.OFFLOAD)
    assert (full.tree.locked, full.writes.value, len(backup.pending)) == (0, 4, 4)
    answer(s, OpKind.STORE)
    assert (full.writes.value, backup.stored_pages, backup.pending) == (0, 4, {})
    assert set(chain(*"abcd")) <= s.stored


def test_what_is_stored_is_not_written_again() -> None:
    s = sim()
    compute(s, "r", "abcd")
    write(s)
    compute(s, "r", "abcdef")
    assert [span.keys for span in s.plane.parts.backup.queue] == [chain(*"abcdef")[4:]]
    write(s)
    compute(s, "again", "abcdef", 1)
    assert not s.plane.parts.backup.queue


def test_one_storage_call_moves_a_batch_and_parents_go_first() -> None:
    s = sim(io_batch_pages=2)
    compute(s, "r", "abcde")
    s.tick()
    offloads = [s.outstanding[op] for op in s.of_kind(OpKind.OFFLOAD)]
    assert [len(command.device) for command in offloads] == [2, 2, 1]  # type: ignore[union-attr]
    for op in reversed(s.of_kind(OpKind.OFFLOAD)):
        s.answer(op)
    s.tick()
    assert [command.keys for command in s.outstanding.values()] == [  # type: ignore[union-attr]
        chain(*"abcde")[:2], chain(*"abcde")[2:4], chain(*"abcde")[4:],
    ]  # fmt: skip
    end_all(s)


@pytest.mark.parametrize(
    ("reads", "wanted", "room"),
    [
        (0, 0, 90),  # all but the margin of 10
        (40, 0, 50),
        (80, 0, 20),  # the floor
        (79, 0, 20),
        (0, 60, 30),  # what the parked head waits for is left alone
        (0, 80, 20),
        (0, 90, 10),  # the floor gives way where it would keep the head waiting for ever
        (0, 100, 0),
    ],
)
def test_the_write_share_is_upstreams_and_gives_way_to_a_parked_head(reads: int, wanted: int, room: int) -> None:
    full = FullComponent(small(staging_pages=100, write_staging_fraction=0.2, write_margin_fraction=0.1))
    assert full.take_read_staging(reads) is not None
    assert full.write_room(wanted) == min(room, 100 - reads)


def test_a_backlog_beyond_its_bound_is_dropped_and_written_at_the_next_use() -> None:
    s = sim(write_backlog_factor=0)
    compute(s, "r", "abcd")
    assert s.plane.parts.backup.dropped_pages["backlog"] == 4
    assert not s.plane.parts.backup.pending
    end_all(s)


def test_evicted_pages_are_swept_from_the_tail_of_their_span() -> None:
    s = sim(staging_pages=2)
    compute(s, "r", "abcd")
    evict(s, 1)
    s.tick()
    backup = s.plane.parts.backup
    assert backup.dropped_pages["evicted"] == 1
    assert [span.keys for span in backup.queue] == [chain(*"abcd")[2:3]]
    assert set(backup.pending) == set(chain(*"abc")), "no mark is left for the page that has gone"
    end_all(s)
    assert s.stored == set(chain(*"abc"))


def test_queued_pages_are_evicted_last() -> None:
    s = sim()
    compute(s, "stored", "ab")
    write(s)
    compute(s, "queued", "xy")
    compute(s, "later", "ab", 1)  # used after the queued ones
    evict(s, 2)
    assert s.plane.parts.full.tree.match(chain(*"xy")) == 2
    end_all(s)


def test_pages_of_a_failed_write_are_written_at_the_next_use() -> None:
    s = sim()
    compute(s, "r", "abcd")
    s.tick()
    answer(s, OpKind.OFFLOAD)
    answer(s, OpKind.STORE, pages=1)
    assert s.plane.parts.backup.dropped_pages["store_failed"] == 3
    compute(s, "again", "abcd", 1)
    write(s)
    assert set(chain(*"abcd")) <= s.stored


def test_a_store_that_claims_more_than_it_was_given_is_not_believed() -> None:
    s = sim()
    compute(s, "r", "ab")
    s.tick()
    answer(s, OpKind.OFFLOAD)
    op = s.of_kind(OpKind.STORE)[0]
    done = s.answer(op)
    s.inbox[-1] = StoreDone(done.op, 99)
    s.tick()
    backup = s.plane.parts.backup
    assert (backup.stored_pages, backup.dropped_pages["store_failed"]) == (2, 0)


@pytest.mark.parametrize("ok", [True, False])
def test_pages_that_a_load_brings_are_not_written_before_it_has_landed(ok: bool) -> None:
    """Computed on top of a load that is not acknowledged: whether the bytes are any good is not known yet."""
    s = sim("abcd", retry_poll_interval_passes=0)
    stage(s, "r", "abcdef")
    assert s.admit("r")
    s.compute("r")
    s.tick()
    assert s.of_kind(OpKind.OFFLOAD) == []
    answer(s, OpKind.LOAD, ok=ok)
    assert bool(s.of_kind(OpKind.OFFLOAD)) is ok
    end_all(s)


def test_a_queued_page_that_left_and_is_being_loaded_waits_for_the_load() -> None:
    s = sim(staging_pages=6, retry_poll_interval_passes=0)
    s.submit("blocks", "wxyz")
    look_up(s, "blocks", 0)
    s.stored.update(chain(*"uv"))
    stage(s, "other", "uvw")
    assert s.admit("other")
    s.compute("other")  # its span waits for its load, and all later spans behind it
    compute(s, "r", "ab")
    assert [span.keys for span in s.plane.parts.backup.queue][-1] == chain(*"ab")
    evict(s, 2)
    s.stored.update(chain(*"ab"))  # another instance has written them
    stage(s, "again", "abc")
    assert s.admit("again")
    first, second = s.of_kind(OpKind.LOAD)
    s.answer(first)
    s.tick()
    assert [command.keys for command in map(s.outstanding.get, s.of_kind(OpKind.STORE))] == []  # type: ignore[union-attr]
    reading = {page for op in s.of_kind(OpKind.OFFLOAD) for page in s.outstanding[op].device}  # type: ignore[union-attr]
    assert reading.isdisjoint(s.outstanding[second].device), "they are being written"  # type: ignore[union-attr]
    end_all(s)


def test_a_queued_page_computed_again_on_top_of_a_load_waits_for_it() -> None:
    s = sim(staging_pages=8, retry_poll_interval_passes=0)
    compute(s, "first", "ab")
    write(s)
    s.stored.update(chain(*"uv"))
    stage(s, "other", "uvw")
    assert s.admit("other")
    s.compute("other")
    compute(s, "r", "abcd")
    assert [span.keys for span in s.plane.parts.backup.queue][-1] == chain(*"abcd")[2:]
    evict(s, 4)
    s.submit("again", "abcd", 0)
    look_up(s, "again", 2)
    read(s, "again")
    assert s.admit("again")
    s.compute("again")
    first, second = s.of_kind(OpKind.LOAD)
    s.answer(first)
    s.tick()
    s.answer_all(OpKind.OFFLOAD)
    s.tick()
    assert not set(chain(*"cd")) & {key for span in s.plane.parts.backup.live.values() for key in span.keys}
    s.answer(second, ok=False)
    s.tick()
    s.settle()
    assert not set(chain(*"cd")) & s.stored, "computed on bytes that never came"
    end_all(s)


@pytest.mark.parametrize("at", ["queued", "copying", "storing"])
def test_a_flush_at_any_moment_of_a_write_leaks_nothing(at: str) -> None:
    s = sim()
    compute(s, "r", "abcd")
    if at != "queued":
        s.tick()
    if at == "storing":
        answer(s, OpKind.OFFLOAD)
    s.plane.flush()
    s.pump()
    assert s.plane.parts.full.tree.resident == 0
    assert s.plane.parts.full.device.used == (4 if at == "copying" else 0)
    compute(s, "again", "abcd", 1)
    end_all(s)
    s.submit("last", "abcd")
    end_all(s)
    assert set(chain(*"abcd")) <= s.stored


@pytest.mark.parametrize("at", ["queued", "copying", "storing"])
def test_a_detach_sees_started_writes_through(at: str) -> None:
    s = sim()
    compute(s, "r", "abcd")
    if at != "queued":
        s.tick()
    if at == "storing":
        answer(s, OpKind.OFFLOAD)
    s.plane.detach()
    s.settle()
    assert s.plane.parts.full.staging.used == 0
    assert s.plane.parts.backup.dropped_pages["detached"] == (4 if at == "queued" else 0)
    assert s.leaks() == []


def test_after_an_attach_beliefs_start_anew() -> None:
    s = sim()
    compute(s, "r", "abcd")
    write(s)
    s.plane.detach()
    s.stored.clear()
    s.plane.attach()
    compute(s, "again", "abcd", 1)
    write(s)
    assert set(chain(*"abcd")) <= s.stored, "another store does not have them"


def test_answers_of_the_store_before_an_attach_are_not_believed() -> None:
    s = sim("xyz", retry_poll_interval_passes=0)
    compute(s, "r", "abcd")
    s.tick()
    answer(s, OpKind.OFFLOAD)
    s.submit("asks", "xyz")
    s.plane.detach()
    s.plane.attach()
    s.answer_all()
    s.tick()
    assert s.plane.parts.beliefs.believed == {}, "they speak of another store"
    end_all(s)


def test_reads_have_staging_before_writes() -> None:
    s = sim("mnopqrstu", staging_pages=10, write_staging_fraction=0.2)
    stage(s, "hold", "mnopqrstu")
    compute(s, "r", "abcd")
    s.tick()
    assert s.plane.parts.full.writes.value == 1, "one page is left"
    assert state(s, "hold") == "staged"
    assert get(s, "hold").staging
    end_all(s)
    assert set(chain(*"abcd")) <= s.stored
