"""Traces are read strictly, workloads are deterministic, and what caches could make of them is counted right."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_fsm.errors import TraceError
from hicache_fsm.replay.workload import (
    BLOCK_TOKENS,
    MAX_BLOCK_ID,
    OUTPUT_TOKEN_BASE,
    TraceRequest,
    chat_workload,
    device_only_tokens,
    ideal_tokens,
    read_trace,
)

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


def write(tmp_path: Path, *lines: str | bytes) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def line(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────


def test_reads_requests_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, line(), "", line(timestamp=27000, hash_ids=[1, 3], extra="ignored"))
    assert read_trace(path) == [TraceRequest(0, 600, 5, (1, 2)), TraceRequest(27000, 600, 5, (1, 3))]


def test_limit_stops_before_later_lines_are_judged(tmp_path: Path) -> None:
    path = write(tmp_path, line(), line(), "garbage")
    assert len(read_trace(path, 2)) == 2
    with pytest.raises(TraceError, match="line 3"):
        read_trace(path, 3)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"timestamp": 0, "input_le', "not a JSON object"),
        ("[1, 2]", "expected a JSON object, found list"),
        ("7", "expected a JSON object, found int"),
        (line(hash_ids=None), "hash_ids must be a list"),
        (line(hash_ids="12"), "hash_ids must be a list"),
        (line(hash_ids=[1, "2"]), "hash_ids must be a list"),
        (line(hash_ids=[1, True]), "hash_ids must be a list"),
        (line(hash_ids=[1, 2.0]), "hash_ids must be a list"),
        (line(hash_ids=[1, -2]), "hash_ids must be a list"),
        (line(hash_ids=[1, MAX_BLOCK_ID + 1]), "hash_ids must be a list"),
        (line(hash_ids=[1, 10**30]), "hash_ids must be a list"),
        (line(hash_ids=[1]), "1 hash_ids for 600 tokens"),
        (line(hash_ids=[1, 2, 3]), "3 hash_ids for 600 tokens"),
        (line(input_length=0, hash_ids=[]), "input_length 0"),
        (line(output_length=0), "output_length 0"),
        (line(input_length="600"), "input_length must be a whole number"),
        (line(input_length=600.5), "input_length must be a whole number"),
        (line(input_length=True), "input_length must be a whole number"),
        (line(input_length=-600), "input_length must be a whole number"),
        (line(timestamp=None), "timestamp must be a whole number"),
        ('{"input_length": 600, "output_length": 5, "hash_ids": [1, 2]}', "timestamp must be a whole number"),
        (line(output_length=float("inf")), "output_length must be a whole number"),
        (line(output_length=float("nan")), "output_length must be a whole number"),
        ("[" * 100_000, "not a JSON object"),
        ("1" * 5000, "not a JSON object"),
        (b"\xff\xfe\x00\x01\x80garbage", "not a JSON object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str | bytes, says: str) -> None:
    path = write(tmp_path, line(), bad)
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert f"{path}, line 2" in str(raised.value)
    assert says in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_a_trace_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(path)


def test_a_trace_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(TraceError, match="cannot read trace"):
            read_trace(path)


@given(st.binary(max_size=200))
def test_no_content_gives_anything_but_requests_or_a_trace_error(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / f"any-{os.getpid()}.jsonl"
    path.write_bytes(content)
    try:
        requests = read_trace(path)
    except TraceError:
        return
    assert requests


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────


def test_equal_ids_give_equal_tokens_and_others_none_in_common() -> None:
    one, two = TraceRequest(0, 600, 1, (7, 8)).tokens(), TraceRequest(0, 1024, 1, (7, 9)).tokens()
    assert len(one) == 600
    assert len(two) == 1024
    assert np.array_equal(one[:BLOCK_TOKENS], two[:BLOCK_TOKENS])
    assert not set(one[BLOCK_TOKENS:].tolist()) & set(two[BLOCK_TOKENS:].tolist())


def test_the_largest_id_stays_below_the_output_tokens() -> None:
    tokens = TraceRequest(0, BLOCK_TOKENS, 1, (MAX_BLOCK_ID,)).tokens()
    assert int(tokens.max()) == OUTPUT_TOKEN_BASE - 1
    assert int(tokens.min()) == MAX_BLOCK_ID * BLOCK_TOKENS


# ── the built-in chat ────────────────────────────────────────────────────────────────────────────────


def test_the_chat_follows_from_count_and_seed() -> None:
    assert chat_workload(200, 1) == chat_workload(200, 1)
    assert chat_workload(200, 1) != chat_workload(200, 2)


@pytest.mark.parametrize("count", [1, 2, 150])
def test_the_chat_is_a_well_formed_trace(tmp_path: Path, count: int) -> None:
    requests = chat_workload(count, 3)
    assert len(requests) == count
    assert [r.timestamp_ms for r in requests] == sorted(r.timestamp_ms for r in requests)
    lines = [
        line(timestamp=r.timestamp_ms, input_length=r.input_length, output_length=r.output_length, hash_ids=r.hash_ids)
        for r in requests
    ]
    assert read_trace(write(tmp_path, *lines)) == requests


def test_the_chat_has_something_to_reuse() -> None:
    requests = chat_workload(400, 0)
    assert ideal_tokens(requests) > sum(r.input_length for r in requests) // 2


# ── what caches could make of it ─────────────────────────────────────────────────────────────────────


def request(*blocks: int, cut: int = 0) -> TraceRequest:
    """A prompt of these blocks, of which the last lacks `cut` tokens."""
    return TraceRequest(0, len(blocks) * BLOCK_TOKENS - cut, 1, blocks)


def test_ideal_counts_known_leading_blocks() -> None:
    assert ideal_tokens([request(1, 2), request(1, 2, 3), request(1, 4, 3)]) == 3 * BLOCK_TOKENS


def test_ideal_of_a_repeated_prompt_is_its_length() -> None:
    assert ideal_tokens([request(1, 2, cut=500), request(1, 2, cut=500)]) == BLOCK_TOKENS + 12


def test_device_only_evicts_the_least_recently_used_tail() -> None:
    trace = [request(1, 2), request(3), request(1, 2)]
    assert device_only_tokens(trace, 3 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS
    # Two blocks fit: 3 takes the place of 2, the tail of the older prompt; of the third request 1 is left.
    assert device_only_tokens(trace, 2 * BLOCK_TOKENS) == BLOCK_TOKENS
    assert device_only_tokens(trace, BLOCK_TOKENS - 1) == 0


def test_device_only_never_exceeds_the_ideal() -> None:
    requests = chat_workload(300, 5)
    sizes = [0, 8192, 65_536, 524_288, 1 << 40]
    reused = [device_only_tokens(requests, size) for size in sizes]
    assert reused == sorted(reused)
    assert reused[0] == 0
    assert reused[-1] == ideal_tokens(requests)


def test_the_real_trace_has_its_known_ideal(traces: Path) -> None:
    requests = read_trace(traces / "mooncake-conversation.jsonl")
    assert len(requests) == 12_031
    assert ideal_tokens(requests) == 54_098_411
    assert round(100 * 54_098_411 / sum(r.input_length for r in requests), 2) == 37.36
