"""Whole replays on small workloads: they pass, they notice planted faults, and no fault of a store wedges them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache_fsm.config import PrefetchPolicy
from hicache_fsm.errors import ConfigError, StoreError
from hicache_fsm.observe.html import html_report
from hicache_fsm.observe.report import CONSERVED, text_report
from hicache_fsm.observe.summary import ReplayResult
from hicache_fsm.replay.driver import load_workload, replay
from hicache_fsm.replay.options import PLANTS, PoolSizes, ReplayOptions
from hicache_fsm.replay.workload import BLOCK_TOKENS, TraceRequest
from hicache_fsm.testing.faulty_store import Faults

SMALL = ReplayOptions(requests=120, seed=1, concurrency=16, pools=PoolSizes(32_768, 16_384), debug=True)
# The proportions of the `tight` preset for prompts of a few thousand tokens.
TIGHT = ReplayOptions(requests=160, seed=1, concurrency=32, pools=PoolSizes(36_864, 9_216), debug=True)


def run(options: ReplayOptions = SMALL, workload: list[TraceRequest] | None = None, **more: Any) -> ReplayResult:
    return replay(options, load_workload(options) if workload is None else workload, **more)


def assert_passed(result: ReplayResult) -> None:
    assert result.passed, result.failures() + result.leak_list + result.error_list
    assert result.outcomes["finished"] + result.outcomes["rejected"] == result.requests
    tokens = result.tokens
    assert tokens["prompt"] == tokens["device"] + tokens["storage"] + tokens["computed"]
    assert result.found == result.spliced + sum(result.unfulfilled.values())


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReplayResult]:
    """A store after one run, and that run."""
    folder = tmp_path_factory.mktemp("store")
    return folder, run(replace(SMALL, store=folder))


# ── what a run comes to ──────────────────────────────────────────────────────────────────────────────


def test_the_built_in_workload_passes(filled: tuple[Path, ReplayResult]) -> None:
    _, result = filled
    assert_passed(result)
    assert result.outcomes == {"finished": 120, "aborted": 0, "rejected": 0}
    assert result.tokens["storage"] > 0, "the pools are too large for storage to be used"
    assert result.checked_rows > result.tokens["device"] + result.tokens["storage"]
    assert result.tokens["generated"] == sum(r.output_length for r in load_workload(SMALL))
    assert 0.85 <= result.reuse_of_ideal <= 1.0


def test_a_second_run_finds_everything_in_the_store(filled: tuple[Path, ReplayResult]) -> None:
    folder, first = filled
    second = run(replace(SMALL, store=folder))
    assert_passed(second)
    assert second.reuse >= 0.95, second.tokens
    assert second.tokens["storage"] > first.tokens["storage"]
    assert second.writes["stored_pages"] < first.writes["stored_pages"]


def test_pages_of_another_layout_are_not_mixed_with_ours(filled: tuple[Path, ReplayResult]) -> None:
    folder, _ = filled
    before = run(replace(SMALL, requests=20, store=folder))
    result = run(replace(SMALL, requests=20, store=folder, page_size=32))
    assert_passed(result)
    assert before.tokens["storage"] > 0
    assert result.tokens["storage"] == 0, "the same prompts, but nothing that this layout could read"


def test_tight_pools_park_defer_retract_and_shrink() -> None:
    # Long outputs grow beyond what admission has reserved, which is what retracts.
    workload = [r._replace(output_length=4 * r.output_length) for r in load_workload(TIGHT)]
    result = run(TIGHT, workload)
    assert_passed(result)
    happened = {name: getattr(result, name) for name in ("parks", "defers", "retractions", "shrinks")}
    assert all(happened.values()), happened
    assert result.reuse_of_ideal >= 0.75
    assert result.high_water["staging_reads"] <= result.high_water["staging"]
    assert result.high_water["pinned"] <= result.high_water["pin_cap"]


def test_pages_of_one_token() -> None:
    options = ReplayOptions(
        requests=12, seed=4, page_size=1, pools=PoolSizes(12_000, 6_000), bytes_per_token=32, debug=True, concurrency=8
    )
    assert_passed(run(options))


def test_one_layer_and_wide_rows() -> None:
    assert_passed(run(replace(SMALL, requests=30, num_layers=1, bytes_per_token=256)))


def test_speed_follows_the_times_of_the_trace() -> None:
    """Arrivals far apart find the device idle: with one request at a time nothing ever waits for another."""
    workload = [TraceRequest(1000 * i, 1100, 20, (1, 2, 10 + i)) for i in range(20)]
    options = replace(SMALL, speed=10.0)
    spaced, dense = run(options, workload), run(replace(options, speed=0.0), workload)
    assert_passed(spaced)
    assert_passed(dense)
    assert spaced.passes > dense.passes, "arrivals 100 passes apart share no batch"
    assert spaced.tokens["device"] == spaced.tokens["ideal"]


def test_concurrency_bounds_what_waits_or_runs() -> None:
    result = run(replace(SMALL, requests=30, concurrency=1))
    assert_passed(result)
    assert result.longest_waits["queued/idle"]["passes"] < 40, "nobody waits behind another request"


def test_chunked_prefill_can_be_switched_off() -> None:
    assert_passed(run(replace(SMALL, requests=40, chunked_prefill_size=0, max_prefill_tokens=2048)))


def test_what_never_fits_is_rejected_with_its_reason() -> None:
    big = TraceRequest(0, 70 * BLOCK_TOKENS, 10, tuple(range(1, 71)))
    small = TraceRequest(0, 3 * BLOCK_TOKENS, 10, (1, 2, 3))
    result = run(SMALL, [small, big, small, big])
    assert_passed(result)
    assert result.outcomes == {"finished": 2, "aborted": 0, "rejected": 2}
    assert [line.split(":")[0] for line in result.rejections] == ["r1", "r3"]
    assert all("35850 tokens" in line for line in result.rejections)
    assert "r1: 35850 tokens" in text_report(result)


def test_a_workload_that_is_rejected_as_a_whole_ends() -> None:
    big = TraceRequest(0, 70 * BLOCK_TOKENS, 10, tuple(range(1, 71)))
    result = run(SMALL, [big] * 5)
    assert_passed(result)
    assert result.tokens["prompt"] == 0


def test_stopping_gives_everything_back() -> None:
    calls = iter([False] * 40)
    result = run(SMALL, stop=lambda: next(calls, True))
    assert result.interrupted
    assert result.failures()[0] == "interrupted"
    assert result.leaks == 0, result.leak_list
    assert result.outcomes["aborted"] > 0
    assert 0 < result.ended < result.requests


# ── planted faults ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("planted", PLANTS)
def test_a_planted_fault_fails_the_replay(planted: str) -> None:
    result = run(replace(SMALL, planted=planted, debug=False))
    assert not result.passed
    assert result.content_errors > 0
    assert any("wrong bytes" in reason for reason in result.failures())
    assert result.error_list


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown planted fault"):
        run(replace(SMALL, planted="nothing"))


# ── hardships ────────────────────────────────────────────────────────────────────────────────────────

HARDSHIPS: dict[str, dict[str, Any]] = {
    "no retries": {"retry_max_attempts": 0},
    "no polling": {"poll_interval": 0},
    "no pins": {"pin_cap": 0.0},
    "one defer": {"max_defers": 1},
    "one chance": {"park_cap": 1},
    "best effort": {"policy": PrefetchPolicy.BEST_EFFORT},
    "wait complete": {"policy": PrefetchPolicy.WAIT_COMPLETE},
    "slow store": {"faults": Faults(latency_s=0.02)},
    "slow store, best effort": {"faults": Faults(latency_s=0.02), "policy": PrefetchPolicy.BEST_EFFORT},
    "failing store": {"faults": Faults(fail_exists=0.3, fail_get=0.3, fail_put=0.3)},
    "losing store": {"faults": Faults(lose_get=0.3)},
    "lying store": {"faults": Faults(lie_exists=0.3, short_get=0.3, short_put=0.3)},
    "full store": {"faults": Faults(full=True)},
    "capped store": {"store_bytes": 2 << 20},
    "dead store": {"kill_store_after": 0},
    "store killed on the way": {"kill_store_after": 450},
    "one thread each": {"read_threads": 1, "lookup_threads": 1},
}


@pytest.mark.parametrize("name", HARDSHIPS)
def test_everything_ends_and_nothing_leaks(name: str) -> None:
    result = run(replace(TIGHT, **HARDSHIPS[name]))
    assert_passed(result)
    assert (result.tokens["storage"] == 0) == (name in ("dead store", "full store")), result.tokens


def test_faults_are_told() -> None:
    failing = run(replace(TIGHT, requests=60, faults=Faults(fail_put=1.0)))
    assert failing.store["errors"] > 0
    assert failing.writes["stored_pages"] == 0
    assert failing.writes["dropped_pages"]
    dead = run(replace(TIGHT, requests=60, kill_store_after=10))
    assert dead.store["dead"] == 1
    assert dead.stats["failed_lookups"] > 0


def test_a_slow_store_loses_no_hits_when_the_policy_waits(tmp_path: Path) -> None:
    """One request after the other, so that only storage decides what is reused."""
    workload = load_workload(replace(SMALL, requests=40))
    options = replace(SMALL, policy=PrefetchPolicy.WAIT_COMPLETE, concurrency=1)
    fast = run(replace(options, store=tmp_path / "fast"), workload)
    slow = run(replace(options, store=tmp_path / "slow", faults=Faults(latency_s=0.01)), workload)
    assert_passed(slow)
    assert slow.tokens["device"] + slow.tokens["storage"] >= 0.98 * fast.reused


# ── what cannot start ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "changes",
    [
        {"concurrency": 0}, {"requests": 0}, {"limit": 0}, {"speed": -1.0}, {"page_size": 0}, {"num_layers": 0},
        {"bytes_per_token": 4}, {"bytes_per_token": 60}, {"pools": PoolSizes(63, 1000)}, {"pools": PoolSizes(1000, 63)},
        {"kill_store_after": -1},
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    "changes", [{"pin_cap": 1.5}, {"max_defers": 0}, {"retry_max_attempts": -1}, {"read_threads": 0},
                {"chunked_prefill_size": -1}, {"max_prefill_tokens": 0}, {"store_bytes": 1},
                {"pools": PoolSizes(1 << 50, 1 << 20)}],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        run(replace(SMALL, **changes))


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--store"):
        run(replace(SMALL, store=tmp_path / "file"))


def test_too_little_disk_is_refused(tmp_path: Path) -> None:
    huge = TraceRequest(0, BLOCK_TOKENS, 1 << 50, (1,))
    with pytest.raises(ConfigError, match="MiB free"):
        run(replace(SMALL, store=tmp_path), [huge])


# ── reports ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_text_says_what_matters(filled: tuple[Path, ReplayResult]) -> None:
    _, result = filled
    text = text_report(result)
    assert text.endswith(f"{CONSERVED}\n\nPASSED")
    for figure in (result.tokens["prompt"], result.tokens["ideal"], result.tokens["device_only"], result.found):
        assert f"{figure:,}" in text
    for state in result.longest_waits:
        assert state in text
    assert max(len(line) for line in text.splitlines()) <= 140


def test_the_text_of_a_failed_run_names_the_reasons(filled: tuple[Path, ReplayResult]) -> None:
    _, result = filled
    broken = replace(
        result, content_errors=3, error_list=["r7: layer 0, 3 rows from token 5 on"], leaks=1, leak_list=["1 pin"],
        found=result.found + 1, outcomes={"finished": 119},
    )  # fmt: skip
    *_, last = text_report(broken).splitlines()
    assert last.startswith("FAILED: 1 of 120 requests did not end; 3 rows held wrong bytes; 1 leaks; ")
    for line in ("r7: layer 0, 3 rows from token 5 on", "1 pin"):
        assert line in text_report(broken)
        assert line in html_report(broken)
    assert CONSERVED not in text_report(broken)


def test_the_html_is_self_contained_and_escaped(filled: tuple[Path, ReplayResult]) -> None:
    _, result = filled
    page = html_report(replace(result, rejections=["r1: <script>&"], options={"trace": "<b>.jsonl"}))
    assert "&lt;script&gt;&amp;" in page
    assert "&lt;b&gt;.jsonl" in page
    for outside in ("http:", "https:", "//", "<script", "<link", "@import", "url(", "src="):
        assert outside not in page, outside


def test_the_json_can_be_written(filled: tuple[Path, ReplayResult]) -> None:
    _, result = filled
    record = json.loads(json.dumps(result.to_json()))
    assert record["passed"] is True
    assert record["options"]["policy"] == "timeout"
    assert record["options"]["device_tokens"] == 32_768
