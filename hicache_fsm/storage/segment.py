"""One segment file, and the table of all of them.

Who touches what: `keys` grows only under the store's writer lock, and a slot of it becomes None only under the state
lock; `pins`, `retired`, the open file and the table change only under the state lock. A pinned segment keeps its file
open, also after it was retired and its name removed, so a reader never meets a closed or reused descriptor.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from hicache_fsm.errors import StoreError
from hicache_fsm.ports import PageKey
from hicache_fsm.storage.files import IOV_MAX, read_fully, sync_folder, write_atomic, write_fully
from hicache_fsm.storage.format import (
    SEGMENT_HEADER_BYTES,
    Layout,
    pack_record_header,
    pack_segment_header,
    pack_sidecar,
)

# Records a system call: a header and a payload buffer each.
MAX_RECORDS_PER_CALL = IOV_MAX // 2

# A store of terabytes has thousands of segments, and the usual limit on open files is 1024.
MAX_IDLE_FILES = 128


class Appended(NamedTuple):
    stored: int  # leading pages that are whole in the file
    error: OSError | None  # why the rest is not


class Segment:
    """An append-only file of equal records. `keys[slot]` is the page in a slot, None where it is unusable."""

    __slots__ = ("dirty", "file", "id", "keys", "layout", "path", "pins", "retired")

    def __init__(self, folder: Path, segment_id: int, layout: Layout, keys: list[PageKey | None]) -> None:
        self.path = segment_path(folder, segment_id)
        self.id = segment_id
        self.layout = layout
        self.keys = keys
        self.dirty = True  # the sidecar on disk does not say what `keys` says
        self.file: FileIO | None = None
        self.pins = 0
        self.retired = False

    @property
    def nbytes(self) -> int:
        return self.layout.offset(len(self.keys))

    def create(self, *, sync: bool) -> None:
        """Make the file with its header, open for appending; with `sync` its name survives a power loss.

        Raises `OSError`; the file is removed again then.
        """
        header = memoryview(pack_segment_header(self.layout, self.id))
        self.file = FileIO(self.path, "x+")
        try:
            written = write_fully(self.file.fileno(), [header], 0)
            if written.error is not None:
                raise written.error
            if sync:
                sync_folder(self.path.parent)
        except OSError:
            self.close_file()
            self.path.unlink(missing_ok=True)
            raise

    def open_file(self, *, append: bool = False) -> int:
        """Descriptor of the open file, opened if need be. Raises `OSError`."""
        if self.file is None:
            self.file = FileIO(self.path, "r+" if append else "r")
        return self.file.fileno()

    def close_file(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def append(self, keys: Sequence[PageKey], pages: Sequence[memoryview], *, sync: bool) -> Appended:
        """Write one run of records with one system call and leave the file whole whatever happens.

        With `sync` they are on the disk before they count as stored.
        """
        assert len(keys) == len(pages) <= MAX_RECORDS_PER_CALL, (len(keys), len(pages))
        assert self.file is not None, self.path
        fd, start, stride = self.file.fileno(), self.nbytes, self.layout.stride
        buffers: list[memoryview] = []
        for key, page in zip(keys, pages, strict=True):
            buffers += (memoryview(pack_record_header(self.layout, key, page)), page)
        nbytes, error = write_fully(fd, buffers, start)
        stored = nbytes // stride
        if sync and stored:
            try:
                os.fsync(fd)
            except OSError as failed:
                # What a failed fsync has written is unknown, and a later success would not cover it.
                stored, error = 0, failed
        if error is not None:
            self._cut(fd, start + stored * stride)
        self.keys += keys[:stored]
        self.dirty = True
        return Appended(stored, error)

    def _cut(self, fd: int, nbytes: int) -> None:
        try:
            os.ftruncate(fd, nbytes)
        except OSError:
            # Harmless: the next record overwrites the torn one, and an opening store cuts or skips it.
            return

    def read_run(self, slot: int, buffers: Sequence[memoryview]) -> None:
        """Read consecutive records, each into a header and a payload buffer. The segment is pinned.

        Buffers beyond the end of the file are left as they are: the caller verifies what it has. Raises `OSError`.
        """
        assert self.file is not None and self.pins, self.path
        layout = self.layout
        read_fully(self.file.fileno(), buffers, len(buffers) // 2 * layout.stride, layout.offset(slot))

    def force(self) -> None:
        """Make all records survive a power loss. Raises `OSError`."""
        # A descriptor of its own: the segment may be neither pinned nor open.
        with FileIO(self.path) as file:
            os.fsync(file.fileno())

    def write_sidecar(self, *, sync: bool) -> None:
        """Save which key is in which slot; with `sync` after `force`. Raises `OSError`."""
        keys = self.keys.copy()
        write_atomic(sidecar_path(self.path), pack_sidecar(self.layout, self.id, keys), sync=sync)
        self.dirty = keys != self.keys

    def remove_files(self) -> None:
        """Remove the names; pinned readers keep the data. Raises `OSError`."""
        sidecar_path(self.path).unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


def segment_path(folder: Path, segment_id: int) -> Path:
    return folder / f"segment-{segment_id:010d}.seg"


def segment_number(path: Path) -> int:
    """Inverse of `segment_path`. Raises `StoreError` on a name that no store has given."""
    digits = path.stem.removeprefix("segment-")
    if not digits.isdecimal():
        raise StoreError(f"{path} is not a file of this store; move it away")
    return int(digits)


def sidecar_path(segment: Path) -> Path:
    return segment.with_suffix(".idx")


def segment_slots(layout: Layout, segment_bytes: int) -> int:
    """Records of a full segment; at least one, however large the pages are. Slot numbers are 32 bits."""
    return min(max(1, (segment_bytes - SEGMENT_HEADER_BYTES) // layout.stride), 2**32 - 1)


class SegmentTable:
    """All live segments, oldest first, and which of their files are open. The caller holds the state lock."""

    __slots__ = ("_idle", "_segments", "sealed_bytes")

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._idle: OrderedDict[int, Segment] = OrderedDict()  # open and unpinned, least recently used first
        self.sealed_bytes = 0  # of all segments but the one being appended to

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def oldest(self) -> Segment | None:
        return next(iter(self._segments.values()), None)

    def add(self, segment: Segment) -> None:
        assert segment.id not in self._segments, segment.id
        self._segments[segment.id] = segment

    def seal(self, segment: Segment) -> None:
        """No more records will be appended to it."""
        self.sealed_bytes += segment.nbytes

    def pin(self, segment_id: int, *, append: bool = False) -> Segment | None:
        """The segment with its file held open until `unpin`, or None if it is gone. Raises `OSError`."""
        segment = self._segments.get(segment_id)
        if segment is None:
            return None
        segment.open_file(append=append)
        segment.pins += 1
        self._idle.pop(segment_id, None)
        return segment

    def unpin(self, segment: Segment) -> None:
        assert segment.pins > 0, segment.path
        segment.pins -= 1
        if segment.pins:
            return
        if segment.retired:
            segment.close_file()
            return
        self._idle[segment.id] = segment
        if len(self._idle) > MAX_IDLE_FILES:
            self._idle.popitem(last=False)[1].close_file()

    def blank(self, segment_id: int, slot: int) -> None:
        """Remember that a slot holds no usable page, so that a restart does not offer it again."""
        segment = self._segments.get(segment_id)
        if segment is not None:
            segment.keys[slot] = None
            segment.dirty = True

    def retire(self, segment: Segment) -> None:
        """Take a sealed segment out; its file is closed now, or when its last reader lets go."""
        del self._segments[segment.id]
        self._idle.pop(segment.id, None)
        self.sealed_bytes -= segment.nbytes
        segment.retired = True
        if not segment.pins:
            segment.close_file()
