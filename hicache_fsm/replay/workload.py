"""Workloads: Mooncake JSONL traces, and a built-in multi-turn chat; with what caches could make of them.

A request is (arrival, input length, output length, ids of its 512-token blocks). Block ids are chained: an id
stands for its block and everything before it. Tokens are synthesized from the ids, so that equal ids give
equal tokens and different ids differ in every token.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_fsm.errors import TraceError

BLOCK_TOKENS = 512
OUTPUT_TOKEN_BASE = 1 << 31
"""Generated tokens count up from here: unique per request, and never equal to a prompt token."""
MAX_BLOCK_ID = OUTPUT_TOKEN_BASE // BLOCK_TOKENS - 1


class TraceRequest(NamedTuple):
    """One line of a trace."""

    timestamp_ms: int
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: tuple[int, ...]

    def tokens(self) -> npt.NDArray[np.uint32]:
        """The synthesized prompt."""
        starts = np.asarray(self.hash_ids, dtype=np.uint32) * np.uint32(BLOCK_TOKENS)
        blocks = starts[:, None] + np.arange(BLOCK_TOKENS, dtype=np.uint32)
        prompt: npt.NDArray[np.uint32] = blocks.reshape(-1)[: self.input_length]
        return prompt


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Requests of a Mooncake JSONL file, in its order, at most `limit`.

    Raises `TraceError` naming file and line if one cannot be replayed, or if there is none.
    """
    requests: list[TraceRequest] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip():
                    requests.append(_parse(line, f"{path}, line {number}"))
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror}; name a Mooncake JSONL file") from error
    if not requests:
        raise TraceError(f"trace {path} holds no request; expected one JSON object a line")
    return requests


def _parse(line: bytes, where: str) -> TraceRequest:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # undecodable bytes, and brackets without end
        raise TraceError(f"{where}: not a JSON object ({error}); is the file truncated?") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: expected a JSON object, found {type(record).__name__}")
    hash_ids = record.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(i) is int and 0 <= i <= MAX_BLOCK_ID for i in hash_ids):
        raise TraceError(f"{where}: hash_ids must be a list of whole numbers in 0..{MAX_BLOCK_ID}")
    timestamp, length, output = (_whole(record, name, where) for name in ("timestamp", "input_length", "output_length"))
    if length < 1 or output < 1:
        raise TraceError(f"{where}: input_length {length} and output_length {output} must be at least 1")
    if len(hash_ids) != -(-length // BLOCK_TOKENS):
        raise TraceError(f"{where}: {len(hash_ids)} hash_ids for {length} tokens, expected one per {BLOCK_TOKENS}")
    return TraceRequest(timestamp, length, output, tuple(hash_ids))


def _whole(record: dict[str, Any], name: str, where: str) -> int:
    value = record.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or value < 0:
        raise TraceError(f"{where}: {name} must be a whole number, not negative, found {value!r}")
    return value


def chat_workload(count: int, seed: int) -> list[TraceRequest]:
    """A multi-turn chat: sessions share one of four system prompts, each turn repeats the conversation so far
    and adds to it, think times are exponential. Deterministic in (count, seed)."""
    rng = random.Random(seed)
    new_id = iter(range(1, MAX_BLOCK_ID))
    systems = [[next(new_id) for _ in range(rng.randint(1, 3))] for _ in range(4)]
    requests: list[TraceRequest] = []
    started = 0.0
    while len(requests) < 2 * count:
        started += rng.expovariate(1 / 400)
        requests += _session(rng, started, rng.choice(systems), new_id)
    requests.sort(key=lambda r: r.timestamp_ms)
    return requests[:count]


def _session(rng: random.Random, at_ms: float, system: Sequence[int], new_id: Iterator[int]) -> Iterator[TraceRequest]:
    """Turns of one conversation. The last block of a turn is partial; the next turn has a full one instead."""
    blocks = list(system)
    for _ in range(min(12, 1 + int(rng.expovariate(1 / 3.5)))):
        blocks += [next(new_id) for _ in range(1 + int(rng.expovariate(1 / 2)))]
        partial = next(new_id)
        length = len(blocks) * BLOCK_TOKENS + rng.randint(1, BLOCK_TOKENS - 1)
        yield TraceRequest(int(at_ms), length, rng.randint(16, 300), (*blocks, partial))
        at_ms += rng.expovariate(1 / 20_000)


def ideal_tokens(requests: Iterable[TraceRequest]) -> int:
    """Prompt tokens that a cache without any limit would have had: whole known blocks, in arrival order."""
    seen: set[int] = set()
    hit = 0
    for request in requests:
        known = next((i for i, block in enumerate(request.hash_ids) if block not in seen), len(request.hash_ids))
        hit += min(known * BLOCK_TOKENS, request.input_length)
        seen.update(request.hash_ids)
    return hit


def device_only_tokens(requests: Iterable[TraceRequest], pool_tokens: int) -> int:
    """Prompt tokens that an LRU cache of the device pool alone would have had, each request served at once."""
    capacity = pool_tokens // BLOCK_TOKENS
    cache: OrderedDict[int, None] = OrderedDict()
    hit = 0
    for request in requests:
        blocks = request.hash_ids
        known = next((i for i, block in enumerate(blocks) if block not in cache), len(blocks))
        hit += min(known * BLOCK_TOKENS, request.input_length)
        for block in reversed(blocks):  # the leading block is used last, so that it leaves last
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hit
