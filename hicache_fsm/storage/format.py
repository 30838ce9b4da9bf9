"""Byte layout of the file store, format 1. Pure: bytes in, bytes out. Integers are little-endian.

    segment-0000000007.seg          a segment: header, then records of equal size, appended
    ┌──────────────┬──────────┬──────────┬──────────┬ ─ ─
    │ header 4096  │ record 0 │ record 1 │ record 2 │        slot i starts at 4096 + i * (64 + page_bytes)
    └──────────────┴──────────┴──────────┴──────────┴ ─ ─
    record   magic 4 · version 2 · flags 2 · length 8 · key 32 · payload check 8 · header check 8 │ payload
    header   magic 8 · version 4 · record header 4 · page_bytes 8 · segment 8 · fingerprint 32 · 0 … · check 8
    segment-0000000007.idx          its sidecar: which key is in which slot
    sidecar  magic 8 · version 4 · 0 4 · segment 8 · covered 8 · entries 8 · fingerprint 32 · body check 8 · check 8
             then `entries` keys of 32 bytes, then `entries` slot numbers of 4 bytes

Checks are xxh3-64 in canonical (big-endian) form. That of a payload is seeded with the hash of its key, so the bytes
of one page under another page's header do not pass. In every version the segment header opens with magic and version
and ends with its check, so that an older reader can tell a newer file from a damaged one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from hicache_fsm.ports import PageKey
from hicache_fsm.storage.batch import KEY_BYTES

FORMAT_VERSION = 1
SEGMENT_HEADER_BYTES = 4096
RECORD_HEADER_BYTES = 64

_SEGMENT_MAGIC = b"HCSEGMNT"
_RECORD_MAGIC = b"HCPG"
_SIDECAR_MAGIC = b"HCSIDECR"
_SEGMENT_HEAD = struct.Struct("<8sIIQQ32s")
_SEGMENT_VERSION = struct.Struct("<8sI")
_RECORD_PREFIX = struct.Struct("<4sHHQ")
_SIDECAR_HEAD = struct.Struct("<8sIIQQQ32s8s")
_CHECK_BYTES = 8

_KEY_END = _RECORD_PREFIX.size + KEY_BYTES
EXPECTED_BYTES = _KEY_END + _CHECK_BYTES
SIDECAR_HEADER_BYTES = _SIDECAR_HEAD.size + _CHECK_BYTES
assert EXPECTED_BYTES + _CHECK_BYTES == RECORD_HEADER_BYTES


def _check(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_64_digest(data)


def payload_check(key: PageKey, payload: memoryview) -> bytes:
    """The 8 bytes that a page's header holds over its payload and key."""
    return xxhash.xxh3_64_digest(payload, xxhash.xxh3_64_intdigest(key))


@dataclass(frozen=True, slots=True)
class Layout:
    """Geometry and identity that all segments of one store share."""

    page_bytes: int
    fingerprint: bytes  # SHA-256 of what the caller gave, so that any length fits the header
    record_prefix: bytes

    @classmethod
    def of(cls, page_bytes: int, fingerprint: bytes) -> Layout:
        prefix = _RECORD_PREFIX.pack(_RECORD_MAGIC, FORMAT_VERSION, 0, page_bytes)
        return cls(page_bytes, hashlib.sha256(fingerprint).digest(), prefix)

    @property
    def stride(self) -> int:
        """Bytes from one record to the next."""
        return RECORD_HEADER_BYTES + self.page_bytes

    def offset(self, slot: int) -> int:
        return SEGMENT_HEADER_BYTES + slot * self.stride

    def slots(self, file_bytes: int) -> int:
        """Whole records that a file of this size has room for."""
        return max(0, file_bytes - SEGMENT_HEADER_BYTES) // self.stride


# ── segment header ───────────────────────────────────────────────────────────────────────────────────


class SegmentHead(NamedTuple):
    version: int
    page_bytes: int  # meaningful for our own version only, like the fields below
    segment_id: int
    fingerprint: bytes


def pack_segment_header(layout: Layout, segment_id: int) -> bytes:
    head = _SEGMENT_HEAD.pack(
        _SEGMENT_MAGIC, FORMAT_VERSION, RECORD_HEADER_BYTES, layout.page_bytes, segment_id, layout.fingerprint
    )
    head = head.ljust(SEGMENT_HEADER_BYTES - _CHECK_BYTES, b"\0")
    return head + _check(head)


def unpack_segment_header(raw: bytes) -> SegmentHead | None:
    """The header's fields, or None if it is short or damaged."""
    if len(raw) != SEGMENT_HEADER_BYTES or _check(raw[:-_CHECK_BYTES]) != raw[-_CHECK_BYTES:]:
        return None
    magic, version = _SEGMENT_VERSION.unpack_from(raw)
    if magic != _SEGMENT_MAGIC:
        return None
    _, _, _, page_bytes, segment_id, fingerprint = _SEGMENT_HEAD.unpack_from(raw)
    return SegmentHead(version, page_bytes, segment_id, fingerprint)


# ── record header ────────────────────────────────────────────────────────────────────────────────────


def pack_record_header(layout: Layout, key: PageKey, payload: memoryview) -> bytes:
    head = expected_header(layout, key, payload)
    return head + _check(head)


def record_key(layout: Layout, raw: bytes) -> PageKey | None:
    """The key of a record header, or None if the header is not one of this store or is damaged."""
    if not raw.startswith(layout.record_prefix) or _check(raw[:EXPECTED_BYTES]) != raw[EXPECTED_BYTES:]:
        return None
    return raw[_RECORD_PREFIX.size : _KEY_END]


def expected_header(layout: Layout, key: PageKey, payload: memoryview) -> bytes:
    """What the first `EXPECTED_BYTES` of a record's header are if `payload`, as read, is the page of `key`.

    They cover every payload byte and the whole identity; the header's own check adds nothing to them.
    """
    return layout.record_prefix + key + payload_check(key, payload)


# ── sidecar ──────────────────────────────────────────────────────────────────────────────────────────


def pack_sidecar(layout: Layout, segment_id: int, keys: Sequence[PageKey | None]) -> bytes:
    """Sidecar of a segment whose slot i holds `keys[i]`; None is a slot without a usable page."""
    live = [slot for slot, key in enumerate(keys) if key is not None]
    body = b"".join(key for key in keys if key is not None) + np.array(live, dtype="<u4").tobytes()
    body_check = _check(body)
    head = _SIDECAR_HEAD.pack(
        _SIDECAR_MAGIC, FORMAT_VERSION, 0, segment_id, len(keys), len(live), layout.fingerprint, body_check
    )
    return head + _check(head) + body


def unpack_sidecar(layout: Layout, segment_id: int, raw: bytes) -> list[PageKey | None] | None:
    """What `pack_sidecar` was given, or None if the sidecar is damaged or is another segment's."""
    if (
        len(raw) < SIDECAR_HEADER_BYTES
        or _check(raw[: _SIDECAR_HEAD.size]) != raw[_SIDECAR_HEAD.size : SIDECAR_HEADER_BYTES]
    ):
        return None
    magic, version, _, of_segment, covered, entries, fingerprint, body_check = _SIDECAR_HEAD.unpack_from(raw)
    body = memoryview(raw)[SIDECAR_HEADER_BYTES:]
    if (magic, version, of_segment, fingerprint) != (_SIDECAR_MAGIC, FORMAT_VERSION, segment_id, layout.fingerprint):
        return None
    if len(body) != entries * (KEY_BYTES + 4) or _check(body) != body_check:
        return None
    live: list[PageKey | None] = np.frombuffer(body, dtype=f"V{KEY_BYTES}", count=entries).tolist()
    if entries == covered:
        return live
    keys: list[PageKey | None] = [None] * covered
    slots = np.frombuffer(body, dtype="<u4", offset=entries * KEY_BYTES)
    for slot, key in zip(slots.tolist(), live, strict=True):
        keys[slot] = key
    return keys
