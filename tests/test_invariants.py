"""Each invariant of `hicache_fsm.control.checks` is shown to bite: one injected fault for each name.

The fault goes into a plane that is busy in every way: running, waiting and parked requests, a hold, a read in
quarantine, loads, copies and writes. Before it, nothing is wrong; after it, the invariant of that name reports.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache_fsm.control.checks import NAMES, check_plane
from hicache_fsm.control.parts import Parts
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.operations import Operation
from hicache_fsm.testing.sim import Sim, chain
from tests.field.tools import answer, get, look_up, make_resident, read, sim, stage, state


def busy() -> Sim:
    s = sim(staging_pages=14, device_pages=40, retry_poll_interval_passes=9, max_context_tokens=20)
    for prompt in ("abcdef", "ghijkl", "uvwxyz"):
        s.stored.update(chain(*prompt))
    make_resident(s, "01")
    s.stored.update(chain(*"0123"))
    s.submit("runs", "pq")
    look_up(s, "runs", 0)
    assert s.admit("runs")
    s.compute("runs")  # its write is staged by the next tick
    s.tick()
    stage(s, "loads", "abc")
    assert s.admit("loads")
    stage(s, "holds", "0123")
    s.submit("gone", "gh")
    look_up(s, "gone")
    s.plane.abort("gone")
    s.pump()
    s.submit("reads", "ghijk")
    look_up(s, "reads")
    s.submit("parks", "uvwxyz")
    look_up(s, "parks")
    s.submit("polls", "no")
    look_up(s, "polls", 0)
    s.submit("asks", "jkl")
    wanted = {"runs": "resident", "loads": "loading", "holds": "staged", "reads": "reading", "parks": "parked",
              "polls": "paced", "asks": "querying"}  # fmt: skip
    assert {rid: state(s, rid) for rid in wanted} == wanted
    assert s.of_kind(OpKind.OFFLOAD)
    return s


def attempt_of(parts: Parts, rid: str) -> Attempt:
    return parts.attempts.get(rid)


def own_op(parts: Parts, rid: str) -> Operation:
    return parts.ops.live[attempt_of(parts, rid).op]


def free_a_held_row(parts: Parts) -> None:
    parts.full.staging._free.append(attempt_of(parts, "holds").staging[0])


def lose_a_staging_row(parts: Parts) -> None:
    attempt = attempt_of(parts, "holds")
    attempt.staging = attempt.staging[1:]


def lose_a_device_page(parts: Parts) -> None:
    attempt_of(parts, "runs").device.pop()


def touch_rows_of_another(parts: Parts) -> None:
    op = own_op(parts, "reads")
    op.rows = (*op.rows, *attempt_of(parts, "holds").staging)


def miscount_pins(parts: Parts) -> None:
    parts.full.pinned.add(1)


def leak_a_lock(parts: Parts) -> None:
    parts.full.tree.lock(parts.full.tree.node(chain(*"01")[1]))


def own_what_the_state_must_not(parts: Parts) -> None:
    attempt = attempt_of(parts, "parks")
    attempt.staging, attempt_of(parts, "holds").staging = attempt_of(parts, "holds").staging, ()


def forget_the_own_operation(parts: Parts) -> None:
    attempt_of(parts, "asks").op = 0


def forget_a_parked_hit(parts: Parts) -> None:
    parts.parked.order.clear()


def list_a_request_that_is_not_ready(parts: Parts) -> None:
    parts.waiting.set_ready(attempt_of(parts, "asks"), True)


def lose_a_retry(parts: Parts) -> None:
    parts.retries.cancel("polls")


def lose_a_deadline(parts: Parts) -> None:
    parts.agenda.drop(attempt_of(parts, "asks").slot)


def retry_beyond_the_cap(parts: Parts) -> None:
    attempt_of(parts, "polls").retries = parts.config.retry_max_attempts + 1


def splice_twice(parts: Parts) -> None:
    parts.accounts.splice(3)


def forget_a_reader(parts: Parts) -> None:
    own_op(parts, "loads").dependents = ()


def evict_under_a_lock(parts: Parts) -> None:
    node = parts.full.tree.node(chain(*"01")[1])
    parts.full.tree._refs[node] = 0


def miscount_queued_writes(parts: Parts) -> None:
    parts.backup.queued_pages += 1


INJECTIONS: dict[str, Callable[[Parts], None]] = {
    "pool": free_a_held_row,
    "staging": lose_a_staging_row,
    "device": lose_a_device_page,
    "touch": touch_rows_of_another,
    "pins": miscount_pins,
    "locks": leak_a_lock,
    "ownership": own_what_the_state_must_not,
    "identity": forget_the_own_operation,
    "parked": forget_a_parked_hit,
    "queue": list_a_request_that_is_not_ready,
    "retry": lose_a_retry,
    "clock": lose_a_deadline,
    "caps": retry_beyond_the_cap,
    "accounts": splice_twice,
    "loads": forget_a_reader,
    "tree": evict_under_a_lock,
    "backup": miscount_queued_writes,
}


def test_a_busy_plane_violates_nothing() -> None:
    assert check_plane(busy().plane.parts) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_invariant_bites(name: str) -> None:
    assert name in INJECTIONS, f"invariant {name!r} has no injected fault that shows it at work"
    parts = busy().plane.parts
    INJECTIONS[name](parts)
    assert name in {text.split(":")[0] for text in check_plane(parts)}


def test_a_page_that_is_free_twice_is_found() -> None:
    parts = busy().plane.parts
    parts.full.device._free.append(parts.full.device._free[-1])
    assert "pool" in {text.split(":")[0] for text in check_plane(parts)}


@pytest.mark.parametrize("extra", ["retries", "defers", "chances"])
def test_each_cap_is_checked(extra: str) -> None:
    parts = busy().plane.parts
    setattr(attempt_of(parts, "polls"), extra, 10_000)
    assert "caps" in {text.split(":")[0] for text in check_plane(parts)}


def test_a_pin_charged_with_too_little_is_found() -> None:
    parts = busy().plane.parts
    holds = attempt_of(parts, "holds")
    assert holds.pin_tokens == 2
    holds.pin_tokens = 1
    assert "pins" in {text.split(":")[0] for text in check_plane(parts)}


def test_wrong_bytes_are_found() -> None:
    s = busy()
    row = get(s, "holds").staging[0]
    s.staging[row] = None
    with pytest.raises(AssertionError, match="holds other bytes"):
        s.check()


def test_a_store_of_wrong_bytes_is_found() -> None:
    s = busy()
    answer(s, OpKind.OFFLOAD)
    op = s.of_kind(OpKind.STORE)[0]
    s.staging[s.outstanding[op].staging[0]] = None  # type: ignore[union-attr]
    s.answer(op)
    with pytest.raises(AssertionError, match="wrong bytes under a key"):
        s.check()


def test_quarantine_keeps_rows_from_the_next_read() -> None:
    s = busy()
    quarantined = {row for op in s.plane.parts.ops.live.values() if op.kind == OpKind.READ for row in op.staging}
    assert len(quarantined) == 2
    read(s, "reads")
    assert quarantined.isdisjoint(get(s, "reads").staging)
