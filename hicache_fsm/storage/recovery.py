"""Opening a folder of segments: refuse what is not ours, throw away what is torn, find every page that is whole."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hicache_fsm.errors import ConfigError, StoreError
from hicache_fsm.ports import PageKey
from hicache_fsm.storage.files import read_fully, store_error, sync_folder, write_atomic
from hicache_fsm.storage.format import (
    FORMAT_VERSION,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Layout,
    record_key,
    unpack_segment_header,
    unpack_sidecar,
)
from hicache_fsm.storage.segment import Segment, segment_number, sidecar_path

_META = "meta.json"

# Headers of small records are read in blocks of this size: one call for many, and far below any memory limit.
_SCAN_BLOCK_BYTES = 4 << 20

# From this distance on, reading each header alone costs less than reading what lies between.
_SCAN_SINGLY_STRIDE = 16 << 10


class Recovered(NamedTuple):
    segments: list[Segment]  # oldest first; only the last may be appended to
    damaged_pages: int  # records, or whole segments' worth of them, that could not be used
    next_id: int  # above every segment id that was ever seen in the folder


def prepare_folder(folder: Path, layout: Layout, fingerprint: bytes, *, sync: bool) -> Path:
    """The sub-folder of this fingerprint, made if need be.

    Raises `ConfigError` if it holds pages of another size, `StoreError` if it is of a newer format or cannot
    be used; nothing was changed then.
    """
    home = folder / layout.fingerprint.hex()
    meta = home / _META
    try:
        if not meta.exists():
            folder.mkdir(exist_ok=True)
            home.mkdir(exist_ok=True)
            about = {
                "about": "KV cache pages kept by hicache_fsm; safe to delete as a whole while no process uses it",
                "format": FORMAT_VERSION,
                "page_bytes": layout.page_bytes,
                "fingerprint": fingerprint.decode("utf-8", "backslashreplace"),
            }
            write_atomic(meta, (json.dumps(about, indent=2) + "\n").encode(), sync=sync)
            return home
        raw = meta.read_bytes()
    except OSError as error:
        raise store_error("open the store in", folder, error) from error
    _check_meta(meta, raw, layout)
    return home


def _check_meta(path: Path, raw: bytes, layout: Layout) -> None:
    try:
        about = json.loads(raw)
        # First, since a newer format may mean other things by the other fields.
        _check_version(path, int(about["format"]))
        page_bytes = int(about["page_bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged; delete {path.parent} (a cache, it fills again)") from error
    _check_page_bytes(path, page_bytes, layout)


def _check_version(path: Path, version: int) -> None:
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{path} has format {version}, this release reads format {FORMAT_VERSION}; "
            f"use the release that wrote it, or name another folder"
        )


def _check_page_bytes(path: Path, page_bytes: int, layout: Layout) -> None:
    if page_bytes != layout.page_bytes:
        raise ConfigError(
            f"{path} holds pages of {page_bytes} bytes, the configuration has {layout.page_bytes}; "
            f"put what changed into the fingerprint, or name another folder"
        )


def recover(home: Path, layout: Layout, *, sync: bool) -> Recovered:
    """Find all pages in `home`, which the caller has locked. Raises `StoreError` and `ConfigError`."""
    try:
        return _recover(home, layout, sync)
    except OSError as error:
        raise store_error("open the store in", home, error) from error


def _recover(home: Path, layout: Layout, sync: bool) -> Recovered:
    found = {segment_number(path): path for path in home.glob("segment-*.seg")}
    ids = sorted(found)
    usable = {id_: _is_usable(found[id_], layout) for id_ in ids}  # of all, before the first change
    _remove_leftovers(home)
    segments: list[Segment] = []
    damaged = 0
    for segment_id, path in sorted(found.items()):
        if usable[segment_id]:
            segment, lost = _load(home, segment_id, layout, last=segment_id == ids[-1])
            segments.append(segment)
            damaged += lost
        else:
            # Its pages cannot be told from those of another model, so none of them may be served.
            damaged += layout.slots(path.stat().st_size)
            sidecar_path(path).unlink(missing_ok=True)
            path.unlink()
    if sync and not all(usable.values()):
        sync_folder(home)
    return Recovered(segments, damaged, max(ids, default=0) + 1)


def _is_usable(path: Path, layout: Layout) -> bool:
    with open(path, "rb", buffering=0) as file:
        head = unpack_segment_header(os.pread(file.fileno(), SEGMENT_HEADER_BYTES, 0))
    if head is None:
        return False
    _check_version(path, head.version)
    _check_page_bytes(path, head.page_bytes, layout)
    if head.fingerprint != layout.fingerprint:
        raise StoreError(f"{path} belongs to another fingerprint; it was moved here by hand, move it away again")
    return True


def _remove_leftovers(home: Path) -> None:
    for path in home.glob("*.tmp"):
        path.unlink()
    for path in home.glob("segment-*.idx"):
        if not path.with_suffix(".seg").exists():
            path.unlink()


def _load(home: Path, segment_id: int, layout: Layout, *, last: bool) -> tuple[Segment, int]:
    """The segment, and the number of its records that are unusable."""
    segment = Segment(home, segment_id, layout, [])
    fd = segment.open_file(append=last)
    try:
        file_bytes = os.fstat(fd).st_size
        slots = layout.slots(file_bytes)
        indexed = _load_sidecar(segment, slots)
        scanned = scan_keys(fd, layout, len(indexed), slots)
        damaged = scanned.count(None)
        if last:
            while scanned and scanned[-1] is None:
                scanned.pop()
        segment.keys = indexed + scanned
        segment.dirty = bool(scanned) or not sidecar_path(segment.path).exists()
        if last and file_bytes != segment.nbytes:
            os.ftruncate(fd, segment.nbytes)
    finally:
        segment.close_file()
    return segment, damaged


def _load_sidecar(segment: Segment, slots: int) -> list[PageKey | None]:
    """Keys of the leading slots that the sidecar covers; empty, and the sidecar gone, if it cannot be right."""
    path = sidecar_path(segment.path)
    if not path.exists():
        return []
    keys = unpack_sidecar(segment.layout, segment.id, path.read_bytes())
    if keys is None or len(keys) > slots:
        # Records appended over the lost ones would otherwise be hidden by its old entries.
        path.unlink()
        return []
    return keys


def scan_keys(fd: int, layout: Layout, first: int, end: int) -> list[PageKey | None]:
    """Keys of the slots [first, end) from their record headers; None where a header is damaged. Raises `OSError`."""
    stride = layout.stride
    if stride > _SCAN_SINGLY_STRIDE:
        return [
            record_key(layout, os.pread(fd, RECORD_HEADER_BYTES, layout.offset(slot))) for slot in range(first, end)
        ]
    keys: list[PageKey | None] = []
    per_block = _SCAN_BLOCK_BYTES // stride
    block = bytearray(per_block * stride)
    for start in range(first, end, per_block):
        count = min(per_block, end - start)
        nbytes = read_fully(fd, [memoryview(block)[: count * stride]], count * stride, layout.offset(start))
        if nbytes != count * stride:
            raise OSError(errno.EIO, "the file became shorter while it was read")
        records = np.frombuffer(block, dtype=np.uint8, count=nbytes).reshape(count, stride)
        headers = records[:, :RECORD_HEADER_BYTES].tobytes()
        for at in range(0, len(headers), RECORD_HEADER_BYTES):
            keys.append(record_key(layout, headers[at : at + RECORD_HEADER_BYTES]))
    return keys
