"""The default store: pages in append-only segment files of one folder, found through an index in memory.

How a page lives: `put` appends a checksummed record to the newest segment and then publishes its key in the index;
`get` reads straight into the caller's buffer and verifies; whole oldest segments go when `max_bytes` is reached.
Pages are immutable, so there is nothing to compact.

Locks: `_writer` serialises what appends, evicts or closes; `_state` guards index, table and counters and is held
for microseconds, never while bytes move. Order: `_writer`, then `_state`. `exists` takes no lock at all.

One process at a time may open a folder; sharing one between processes is not what this store does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, final

from hicache_fsm.errors import ConfigError, StoreError
from hicache_fsm.ports import PageKey, StoreStats
from hicache_fsm.storage.batch import KEY_BYTES, check_batch, check_page_bytes, wrong_key
from hicache_fsm.storage.files import FolderLock, Fsync, store_error
from hicache_fsm.storage.format import SEGMENT_HEADER_BYTES, Layout
from hicache_fsm.storage.index import PageIndex, segment_of, slot_of
from hicache_fsm.storage.reader import BatchReader, Found, records_per_call
from hicache_fsm.storage.recovery import prepare_folder, recover
from hicache_fsm.storage.segment import Segment, SegmentTable, segment_slots

# A terabyte is then 8,000 files, and evicting one is a short pause.
DEFAULT_SEGMENT_BYTES = 128 << 20

# Under a size cap a segment is this share of it, so that an eviction loses little at once.
_SEGMENTS_PER_CAP = 8


class _Room(NamedTuple):
    segment: Segment  # to append to
    records: int  # at most that many now


def _segment_bytes(segment_bytes: int, max_bytes: int | None, layout: Layout) -> int:
    """Size of a full segment. Raises `ConfigError` on sizes that cannot work."""
    if segment_bytes < 1:
        raise ConfigError(f"segment_bytes must be at least 1, not {segment_bytes}")
    if max_bytes is None:
        return segment_bytes
    smallest = layout.offset(1)
    if max_bytes < 2 * smallest:
        raise ConfigError(
            f"max_bytes={max_bytes} is too small for pages of {layout.page_bytes} bytes; give at least {2 * smallest}, "
            f"so that one segment can be evicted while another is written"
        )
    return max(smallest, min(segment_bytes, max_bytes // _SEGMENTS_PER_CAP))


@final
class FileStore:
    """A `KVStore` in a folder, thread safe, for one process at a time.

    `fingerprint` is the identity of model, weights, dtype and layout: pages are served only to a store opened with
    the same one. `max_bytes` bounds the segment files of that fingerprint (their sidecars add 36 bytes a page).
    `fsync` says what survives a power loss; a killed process loses no page that `put` has reported.

    Raises `ConfigError` on settings that cannot work, also when the folder holds other-sized pages of the same
    fingerprint; `StoreError` when the folder cannot be used, is locked, or is of a newer format.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        page_bytes: int,
        fingerprint: bytes = b"",
        max_bytes: int | None = None,
        *,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        fsync: Fsync = Fsync.SEAL,
    ) -> None:
        check_page_bytes(page_bytes)
        self.page_bytes = page_bytes
        self._layout = Layout.of(page_bytes, fingerprint)
        self._max_bytes = max_bytes
        self._segment_slots = segment_slots(self._layout, _segment_bytes(segment_bytes, max_bytes, self._layout))
        self._fsync = fsync
        self._writer = threading.Lock()
        self._state = threading.Lock()
        self._index = PageIndex()
        self._table = SegmentTable()
        self._next_id = 1
        self._active: Segment | None = None  # pinned while it is this
        self._corrupt_pages = 0
        self._evicted_pages = 0
        self._last_error: str | None = None
        self._closed = False
        self._home = prepare_folder(Path(folder), self._layout, fingerprint, sync=self._syncs)
        self._lock = FolderLock(self._home)
        try:
            self._open()
        except BaseException:
            self._release()
            raise

    @property
    def _syncs(self) -> bool:
        return self._fsync is not Fsync.NEVER

    def _open(self) -> None:
        found = recover(self._home, self._layout, sync=self._syncs)
        self._next_id = found.next_id
        self._corrupt_pages = found.damaged_pages
        for segment in found.segments:
            self._table.add(segment)
            self._index.publish(segment.id, 0, segment.keys)
        for segment in found.segments:
            if segment.id == found.next_id - 1 and len(segment.keys) < self._segment_slots:
                try:
                    self._active = self._table.pin(segment.id, append=True)
                except OSError as error:
                    raise store_error("append to", segment.path, error) from error
            else:
                self._table.seal(segment)
                self._save(segment)
        if self._max_bytes is not None:
            self._evict_for(0, floor=self._next_id)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────

    def exists(self, keys: Sequence[PageKey]) -> int:
        """Number of leading keys that are present. Raises `StoreError` after `close`, and on a malformed key."""
        self._check_open()
        leading = self._index.leading(keys)
        # A malformed key is never present, so only the first absent one needs a look.
        if leading < len(keys) and len(keys[leading]) != KEY_BYTES:
            raise wrong_key(leading, keys[leading])
        return leading

    def get(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        """Read each page into its buffer and verify it.

        A page that is torn, corrupt or unreadable is False, counted, and forgotten, so that it can be put again.
        Raises `StoreError` if the system could read none of the pages that should be there: then the disk, not a
        page, is at fault, and the pages stay known.
        """
        self._check_open()
        check_batch(keys, buffers, self.page_bytes, writable=True)
        places = self._index.places(keys)
        found = sorted((place, at) for at, place in enumerate(places) if place is not None)
        reader = BatchReader(keys, buffers, min(len(found), records_per_call(self._layout.stride)))
        for segment_id, group in groupby(found, key=_segment_of_page):
            self._read_segment(reader, segment_id, list(group))
        if reader.error is not None and len(reader.unread) == len(found):
            raise store_error("read pages from", self._home, reader.error) from reader.error
        self._forget(reader.bad + reader.unread, keys)
        return reader.flags

    def _read_segment(self, reader: BatchReader, segment_id: int, found: list[Found]) -> None:
        try:
            with self._state:
                segment = self._table.pin(segment_id)
        except OSError as error:
            reader.refused(found, error)
            return
        if segment is None:
            return  # evicted since the look-up
        try:
            reader.read(segment, found)
        finally:
            with self._state:
                self._table.unpin(segment)

    def _forget(self, pages: list[Found], keys: Sequence[PageKey]) -> None:
        if not pages:
            return
        with self._state:
            for place, position in pages:
                if self._index.drop(keys[position], place):
                    self._corrupt_pages += 1
                    self._table.blank(segment_of(place), slot_of(place))

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────

    def put(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        """Store each page; True is a page that can be read from now on.

        False is a page that did not fit, on the disk or under `max_bytes`: a batch never evicts its own pages.
        Raises `StoreError` if the system refused and no page of the batch is in the store.
        """
        self._check_open()
        check_batch(keys, buffers, self.page_bytes, writable=False)
        flags = self._index.present(keys)
        if all(flags):
            return flags
        with self._writer:
            self._check_open()
            error = self._append(keys, buffers)
            flags = self._index.present(keys)
        if error is not None and not any(flags):
            raise error
        return flags

    def _append(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> StoreError | None:
        """Append what is new in the batch, as far as it goes; the error that stopped it."""
        new: dict[PageKey, memoryview] = {}
        for key, buffer, present in zip(keys, buffers, self._index.present(keys), strict=True):
            if not present:
                new.setdefault(key, buffer)
        todo = list(new.items())
        floor = self._next_id if self._active is None else self._active.id
        while todo:
            try:
                room = self._make_room(floor)
            except OSError as error:
                return self._note("add a segment to", self._home, error)
            if room is None:
                return None
            run = todo[: room.records]
            done = room.segment.append(
                [key for key, _ in run], [page for _, page in run], sync=self._fsync is Fsync.ALWAYS
            )
            with self._state:
                first = len(room.segment.keys) - done.stored
                self._index.publish(room.segment.id, first, room.segment.keys[first:])
            if done.error is not None:
                return self._note("write pages to", room.segment.path, done.error)
            todo = todo[len(run) :]
        return None

    def _make_room(self, floor: int) -> _Room | None:
        """The segment to append to and how many records at once; None if the cap leaves no room.

        Segments from `floor` on are not evicted for it. Raises `OSError`.
        """
        if self._active is not None and len(self._active.keys) >= self._segment_slots:
            self._seal()
        records = records_per_call(self._layout.stride)
        if self._active is not None:
            records = min(records, self._segment_slots - len(self._active.keys))
        if self._max_bytes is not None:
            header = SEGMENT_HEADER_BYTES if self._active is None else 0
            spare = self._evict_for(header + self._layout.stride, floor) - header
            records = min(records, spare // self._layout.stride)
            if records <= 0:
                return None
        if self._active is None:
            self._active = self._new_segment()
        return _Room(self._active, min(records, self._segment_slots - len(self._active.keys)))

    def _new_segment(self) -> Segment:
        segment = Segment(self._home, self._next_id, self._layout, [])
        self._next_id += 1  # also if it cannot be made: a name is used once
        segment.create(sync=self._fsync is Fsync.ALWAYS)
        with self._state:
            self._table.add(segment)
            self._table.pin(segment.id)
        return segment

    def _seal(self) -> None:
        """Close the newest segment for appending; the next page opens another."""
        segment = self._active
        assert segment is not None
        self._save(segment)
        with self._state:
            self._active = None
            self._table.seal(segment)
            self._table.unpin(segment)

    def _save(self, segment: Segment) -> StoreError | None:
        """Force a segment to the disk and write its sidecar; the error if its pages may not survive a power loss."""
        if not segment.dirty:
            return None
        try:
            if self._syncs:
                segment.force()
        except OSError as error:
            return self._note("force to the disk", segment.path, error)
        try:
            segment.write_sidecar(sync=self._syncs)
        except OSError as error:
            # Costs a scan of its record headers on the next opening, no page.
            self._note("write the sidecar of", segment.path, error)
        return None

    def _evict_for(self, nbytes: int, floor: int) -> int:
        """Evict oldest segments below `floor` until `nbytes` fit under the cap; bytes that are free then."""
        assert self._max_bytes is not None
        while (free := self._max_bytes - self._nbytes()) < nbytes:
            with self._state:
                oldest = self._table.oldest()
                if oldest is None or oldest is self._active or oldest.id >= floor:
                    return free
                self._evicted_pages += self._index.drop_segment(oldest.id, oldest.keys)
                self._table.retire(oldest)
            try:
                oldest.remove_files()
            except OSError as error:
                self._note("remove", oldest.path, error)
        return free

    def _nbytes(self) -> int:
        return self._table.sealed_bytes + (0 if self._active is None else self._active.nbytes)

    def _note(self, doing: str, path: Path, error: OSError) -> StoreError:
        noted = store_error(doing, path, error)
        noted.__cause__ = error
        self._last_error = str(noted)
        return noted

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def last_error(self) -> str | None:
        """Latest failed write, also one that cost only some pages of a batch, or none."""
        return self._last_error

    def stats(self) -> StoreStats:
        """Pages and bytes of this fingerprint, and what was lost since opening. Raises `StoreError` after `close`."""
        self._check_open()
        with self._state:
            return StoreStats(len(self._index), self._nbytes(), self._corrupt_pages, self._evicted_pages)

    def close(self) -> None:
        """Save the index beside the pages, then let go of files and folder. Idempotent.

        Raises `StoreError`, with everything released, if pages could not be forced to the disk: they are lost only if
        the power fails before the kernel has written them.
        """
        with self._writer:
            if self._closed:
                return
            self._closed = True
            try:
                failed = [error for segment in self._table if (error := self._save(segment)) is not None]
            finally:
                self._release()
        if failed:
            raise failed[0]

    def _release(self) -> None:
        with self._state:
            if self._active is not None:
                active, self._active = self._active, None
                self._table.seal(active)
                self._table.unpin(active)
            for segment in list(self._table):
                self._table.retire(segment)
        self._lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store in {self._home} is closed; open it again")

    def __enter__(self) -> FileStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _segment_of_page(found: Found) -> int:
    return segment_of(found[0])
