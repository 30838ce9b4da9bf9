"""Field cases of wedged admission and of leaked staging, pins and counters. Numbers are those of the cases."""

from __future__ import annotations

import itertools

import pytest

from hicache_fsm.config import CacheConfig
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.ports import LookupDone, ReadDone
from hicache_fsm.testing.sim import Sim, chain
from tests.field.tools import (
    BEST_EFFORT,
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


def test_BC_001_a_blocked_head_does_not_hide_finished_loads() -> None:
    s = sim(device_pages=10, staging_pages=9, max_context_tokens=8)
    prompts = {"r1": "abc", "r2": "def", "r3": "ghi"}
    for prompt in prompts.values():
        s.stored.update(chain(*prompt))
    s.submit("runs", "xy", 1)
    look_up(s, "runs")
    assert s.admit("runs")
    s.submit("H", "stuvwxyz", priority=-1)
    look_up(s, "H")
    for rid, prompt in prompts.items():
        s.submit(rid, prompt)
    s.answer_all(OpKind.LOOKUP)
    s.tick()
    s.answer_all(OpKind.READ)
    s.tick()
    assert [state(s, rid) for rid in prompts] == ["staged"] * 3, "answers count whatever stands at the head"
    assert [c.attempt.rid for c in s.candidates()] == ["H", "r1", "r2", "r3"]
    assert not s.admit("H"), "7 pages are free, the head wants 9"
    assert s.admit("r1"), "the scan goes on past a blocked head"
    end_all(s)


@pytest.mark.parametrize("policy", ["wait", "best_effort"])
def test_BC_002_a_revoked_hit_ends_the_wait_in_the_same_pass(policy: str) -> None:
    changes = {"prefetch_policy": BEST_EFFORT} if policy == "best_effort" else {}
    s = Sim(small(page_size=4, prefetch_threshold_tokens=16, **changes), chain(*"ab"))
    for rid in ("r", "again"):
        s.submit(rid, "abcdefgh", 0)
        look_up(s, rid)
        assert state(s, rid) in ("idle", "paced")
        candidate = s.plane.consider(get(s, rid))
        assert candidate is not None
        assert candidate.cached_pages == 0
    assert s.plane.parts.accounts.unfulfilled["below_threshold"] == 16
    assert s.plane.parts.accounts.stats["revoked_insufficient"] == 2
    assert s.plane.parts.full.staging.used == 0


def test_BC_003_a_read_that_is_not_planned_is_not_complete() -> None:
    prompt = "abcdefghijklmnop"
    s = Sim(small(page_size=4, staging_pages=16, device_pages=40, max_context_tokens=80), chain(*prompt))
    s.submit("r", prompt)
    for _ in range(5):
        s.tick()
        assert state(s, "r") == "querying"
        assert s.plane.consider(get(s, "r")) is None
        assert s.plane.parts.full.staging.used == 0
    look_up(s, "r")
    assert state(s, "r") == "reading"
    s.tick()
    assert state(s, "r") == "reading", "0 of 16 pages are no complete read"
    read(s, "r")
    assert len(get(s, "r").staging) == 16


def test_BC_003_an_attempt_cut_before_its_plan_takes_no_staging_later() -> None:
    s = sim("abcd", prefetch_policy=BEST_EFFORT)
    s.submit("r", "abcd")
    assert s.plane.consider(get(s, "r")) is not None
    late = s.of_kind(OpKind.LOOKUP)[0]
    s.answer(late)
    s.tick()
    assert state(s, "r") in ("idle", "paced")
    assert s.plane.parts.full.staging.used == 0
    assert s.plane.parts.beliefs.believed, "a late answer still teaches what is stored"


def test_BC_004_a_request_as_large_as_the_pool_is_admitted_alone() -> None:
    s = sim("abcdefg", device_pages=8, staging_pages=8, max_context_tokens=4)
    make_resident(s, "abcd")
    stage(s, "r", "abcdefg")
    assert s.plane.parts.full.pinned.value == 4, "its own pin must not stand in its way"
    assert get(s, "r").num_tokens == s.config.device_tokens
    assert s.admit("r")
    end_all(s)


def test_BC_004_a_fully_resident_prompt_still_computes_its_last_token() -> None:
    s = sim()
    make_resident(s, "abcd")
    s.submit("r", "abcd", 0)
    candidate = s.plane.consider(get(s, "r"))
    assert candidate is not None
    assert candidate.cached_pages == 3, "the page of the last token is computed again, or nothing could be admitted"
    assert s.admit("r")
    end_all(s)


def test_BC_005_holds_take_no_device_rows_before_admission() -> None:
    prompts = {f"r{i}": [*(f"{i}.{p}" for p in range(16))] for i in range(23)}
    config = CacheConfig(
        page_size=1, device_pages=340, staging_pages=400, max_context_tokens=100, prefetch_threshold_tokens=1,
        load_pool_usage_fraction=1.0,
    )  # fmt: skip
    s = Sim(config, (key for prompt in prompts.values() for key in chain(*prompt[:12])))
    s.checking = False
    for rid, prompt in prompts.items():
        s.submit(rid, prompt, 0)
    for kind in (OpKind.LOOKUP, OpKind.READ):
        s.answer_all(kind)
        s.tick()
    s.check()
    assert all(state(s, rid) == "staged" for rid in prompts)
    assert s.plane.parts.full.device.used == 0
    admitted = [rid for rid in prompts if s.admit(rid)]
    assert len(admitted) == 340 // 16, "12 loaded pages and 4 computed ones each, or nothing"
    refused = [rid for rid in prompts if rid not in admitted]
    assert all(state(s, rid) == "staged" and get(s, rid).owned() == {"staging"} for rid in refused)
    s.checking = True
    end_all(s)


def test_BC_006_an_answer_that_never_comes_costs_the_deadline() -> None:
    prompt = [f"p{i}" for i in range(184)]
    config = small(staging_pages=184, device_pages=200, max_context_tokens=100, prefetch_hard_max_ms=600)
    s = Sim(config, chain(*prompt))
    s.submit("r", prompt)
    look_up(s, "r")
    op = s.of_kind(OpKind.READ)[0]
    s.progress(op, 58)
    s.tick(500)
    assert state(s, "r") == "reading"
    s.tick(99)
    assert state(s, "r") == "staged", "600 ms after the look-up, one of them was the answer's"
    attempt = get(s, "r")
    assert (len(attempt.staging), attempt.storage_open) == (58, False)
    assert s.plane.parts.full.staging.used == 184, "126 pages are in quarantine: the read may still write them"
    assert op in s.cancelled
    assert s.admit("r")
    answer(s, OpKind.LOAD)
    assert s.plane.parts.full.staging.used == 126
    s.answer(op)
    s.tick()
    assert s.plane.parts.full.staging.used == 0
    assert s.plane.parts.accounts.unfulfilled["deadline"] == 126
    assert s.plane.parts.accounts.spliced == 58


def test_BC_007_writes_leave_freed_staging_to_a_parked_read() -> None:
    s = sim("abcd", staging_pages=8, device_pages=40, io_batch_pages=1, write_staging_fraction=0.2)
    for i in range(12):
        s.submit(f"w{i}", [f"w{i}"])
        s.answer_all(OpKind.LOOKUP)
        s.tick(0)
        assert s.admit(f"w{i}")
        s.compute(f"w{i}")
        s.plane.finish(f"w{i}")
    s.tick()
    s.answer_all(OpKind.OFFLOAD)
    s.tick()
    assert s.plane.parts.full.writes.value == 8, "writes may fill what nobody reads into"
    s.submit("r", "abcd")
    look_up(s, "r")
    assert state(s, "r") == "parked"
    for done in range(1, 5):
        answer(s, OpKind.STORE)
        assert s.plane.parts.full.writes.value == 8 - done, "no freed page goes to the next write"
    assert state(s, "r") == "reading", "four pages came free, and they are the reader's"
    end_all(s)
    assert s.plane.parts.backup.stored_pages == 12, "the writes were delayed, not dropped"


def test_BC_012_staging_of_a_cancelled_read_comes_back_once() -> None:
    s = sim("abcdefgh")
    for round_no in range(3):
        s.submit("r1", "abcdefgh")
        look_up(s, "r1")
        op = s.of_kind(OpKind.READ)[0]
        s.progress(op, 3)
        s.tick()
        s.plane.abort("r1")
        s.pump()
        assert op in s.cancelled
        assert s.plane.parts.full.staging.used == 5, "the read may still be writing pages 3 to 7"
        s.submit("r2", "abcdefgh")
        look_up(s, "r2")
        assert state(s, "r2") == "parked"
        s.answer(op, pages=4)
        s.tick()
        assert s.plane.parts.full.reads.value == 8, "all of it came back, and r2 has taken 8"
        assert state(s, "r2") == "reading"
        s.plane.abort("r2")
        s.settle()
        assert s.plane.parts.full.staging.used == 0, f"after round {round_no}"


@pytest.mark.parametrize("order", list(itertools.permutations(["consider", "progress", "tick", "ack"])))
def test_BC_013_no_order_of_checks_and_answers_loses_the_read(order: tuple[str, ...]) -> None:
    s = sim("abcd")
    s.submit("r", "abcd")
    look_up(s, "r")
    op = s.of_kind(OpKind.READ)[0]
    for act in order:
        match act:
            case "consider":
                s.candidates()
            case "progress" if op in s.outstanding:
                s.progress(op, 2)
            case "tick":
                s.tick()
            case "ack":
                s.answer(op)
    s.tick()
    assert state(s, "r") == "staged"
    assert len(get(s, "r").staging) == s.plane.parts.full.staging.used == 4


def test_BC_014_a_look_up_that_is_not_needed_owns_nothing() -> None:
    prompt = [f"p{i}" for i in range(25)]
    s = Sim(small(device_pages=60, staging_pages=30), chain(*prompt))
    make_resident(s, "".join(chr(65 + i) for i in range(25)))
    s.submit("writer", prompt)
    s.answer_all(OpKind.LOOKUP)
    s.tick()
    s.submit("late", prompt)  # asked before the device has it
    s.answer_all(OpKind.READ)
    s.tick()
    assert s.run("writer")
    s.submit("r", prompt)
    assert state(s, "r") == "idle", "nothing is missing: nothing is asked"
    s.settle()
    assert state(s, "late") == "idle"
    assert s.plane.parts.accounts.stats["declined_device_covered"] == 1
    assert s.plane.parts.full.pins.value == s.plane.parts.full.staging.used == 0
    s.submit("asks", [*prompt, "more"])
    s.plane.abort("asks")
    s.settle()
    end_all(s)


def test_BC_015_an_idle_tick_cleans_up_after_an_abort() -> None:
    s = sim("abcdef")
    s.submit("r", "abcdef")
    look_up(s, "r")
    s.plane.abort("r")
    s.pump()
    assert not s.plane.is_idle(), "six pages are in quarantine"
    s.answer_all()
    s.tick()
    assert s.leaks() == [], "without another request"


def test_BC_016_pages_of_an_unanswered_load_come_back_when_its_executor_is_given_up() -> None:
    s = sim("abcdef", staging_pages=24)
    ops = []
    for i in range(4):
        s.submit(f"r{i}", "abcdef")
        look_up(s, f"r{i}")
        ops += s.of_kind(OpKind.READ)[-1:]
        s.plane.abort(f"r{i}")
        s.tick(1000)
    assert s.plane.parts.full.staging.available == 0, "nothing is reused while a writer may be alive"
    for op in ops:
        s.lose(op)
    s.tick()
    assert s.plane.parts.full.staging.available == 24
    before = s.plane.parts.ops.stale
    for op in ops:
        s.inbox.append(ReadDone(op, 6))
    s.tick()
    assert s.plane.parts.ops.stale == before + 4
    assert s.leaks() == []


def test_BC_017_an_answer_to_a_job_that_is_not_registered_is_no_miss() -> None:
    s = sim("abcd")
    s.submit("r", "abcd")
    s.inbox.append(LookupDone(99, 0, True))
    s.tick()
    assert state(s, "r") == "querying"
    assert s.plane.parts.ops.stale == 1
    look_up(s, "r")
    read(s, "r")
    assert state(s, "r") == "staged"
    end_all(s)


def _staged_behind_a_base(**changes: object) -> Sim:
    """Device 4 pages, staged 4 more."""
    s = sim("abcdefgh", **changes)
    make_resident(s, "abcd")
    stage(s, "r", "abcdefgh")
    return s


def _compute_twin(s: Sim, prompt: str) -> None:
    """A sibling computes this prompt although its hit is known: storage is closed for it alone."""
    s.submit("twin", prompt, 0)
    s.answer_all(OpKind.LOOKUP)
    s.tick()
    s.answer_all(OpKind.READ)
    s.tick()
    assert s.run("twin")


def test_BC_018_a_grown_prefix_loads_the_rest_only() -> None:
    s = _staged_behind_a_base()
    spliced = s.plane.parts.accounts.spliced
    _compute_twin(s, "abcdef")
    spliced_by_twin = s.plane.parts.accounts.spliced - spliced
    candidate = s.plane.consider(get(s, "r"))
    assert candidate is not None
    assert candidate.plan is not None
    assert (candidate.match_pages, candidate.plan.load_pages) == (6, 2)
    covered = s.plane.parts.accounts.unfulfilled["device_covered"]
    assert s.admit("r")
    assert s.plane.parts.full.reads.value == 2, "the covered rows are back at once"
    answer(s, OpKind.LOAD)
    assert s.plane.parts.accounts.spliced == spliced + spliced_by_twin + 2
    assert s.plane.parts.accounts.unfulfilled["device_covered"] == covered + 2
    end_all(s)


def test_BC_018_a_shrunk_prefix_fetches_again() -> None:
    s = _staged_behind_a_base(anchor_lock_cap=0.0)
    evict(s, 1)
    assert s.plane.consider(get(s, "r")) is None
    assert s.plane.parts.full.reads.value == 0
    assert s.plane.parts.accounts.unfulfilled["shrunk"] == 4
    s.tick()
    assert state(s, "r") == "reading"
    assert get(s, "r").retries == 1
    end_all(s)


def test_BC_018_a_covered_span_is_given_back() -> None:
    s = _staged_behind_a_base()
    _compute_twin(s, "abcdefgh")
    s.submit("last", "abcdefgh", 1)
    assert s.run("last")
    candidate = s.plane.consider(get(s, "r"))
    assert candidate is not None
    assert (candidate.match_pages, candidate.plan) == (8, None)
    assert s.plane.parts.full.reads.value == 0
    end_all(s)
