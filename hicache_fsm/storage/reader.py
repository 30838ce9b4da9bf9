"""Reading one batch of located pages: adjacent records in one call, each page verified, failures told apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from hicache_fsm.ports import PageKey
from hicache_fsm.storage.format import EXPECTED_BYTES, RECORD_HEADER_BYTES, Layout, expected_header
from hicache_fsm.storage.index import slot_of
from hicache_fsm.storage.segment import MAX_RECORDS_PER_CALL, Segment

# Bytes a system call moves: what it read is still in the CPU's cache when it is verified.
CHUNK_BYTES = 2 << 20


def records_per_call(stride: int) -> int:
    """Records of `stride` bytes to read or write with one system call; at least one."""
    return max(1, min(MAX_RECORDS_PER_CALL, CHUNK_BYTES // stride))


Found: TypeAlias = tuple[int, int]
"""A page's location in the index and its position in the caller's batch."""


class BatchReader:
    """The outcome of one `get`, filled run by run. Used by one thread."""

    __slots__ = ("_buffers", "_headers", "_heads", "_keys", "bad", "error", "flags", "unread")

    def __init__(self, keys: Sequence[PageKey], buffers: Sequence[memoryview], longest_run: int) -> None:
        self._keys = keys
        self._buffers = buffers
        area = memoryview(bytearray(longest_run * RECORD_HEADER_BYTES))
        starts = range(0, len(area), RECORD_HEADER_BYTES)
        self._headers = [area[at : at + RECORD_HEADER_BYTES] for at in starts]  # of the run that is being read
        self._heads = [area[at : at + EXPECTED_BYTES] for at in starts]  # the part of each that is compared
        self.flags = [False] * len(keys)  # pages that are in their buffers, verified
        self.bad: list[Found] = []  # read, but torn, corrupt or another page
        self.unread: list[Found] = []  # the system refused to read them
        self.error: OSError | None = None  # its latest reason

    def read(self, segment: Segment, found: list[Found]) -> None:
        """Read pages that lie in `segment`, ordered by place."""
        for run in _runs(found, len(self._headers)):
            self._read_run(segment, run)

    def _read_run(self, segment: Segment, run: list[Found]) -> None:
        buffers: list[memoryview] = []
        for header, (_, position) in zip(self._headers, run, strict=False):
            buffers += (header, self._buffers[position])
        try:
            segment.read_run(slot_of(run[0][0]), buffers)
        except OSError as error:
            if len(run) == 1:
                self.refused(run, error)
            else:
                # One unreadable record must not cost its neighbours.
                for one in run:
                    self._read_run(segment, [one])
            return
        # After a short read, too: a page whose end did not arrive does not pass.
        self._verify(segment.layout, run)

    def _verify(self, layout: Layout, run: list[Found]) -> None:
        for head, found in zip(self._heads, run, strict=False):
            position = found[1]
            if head == expected_header(layout, self._keys[position], self._buffers[position]):
                self.flags[position] = True
            else:
                self.bad.append(found)

    def refused(self, found: list[Found], error: OSError) -> None:
        """The system would not let these be read."""
        self.unread += found
        self.error = error


def _runs(found: list[Found], limit: int) -> Iterator[list[Found]]:
    """Stretches of at most `limit` adjacent records."""
    run: list[Found] = []
    for one in found:
        if run and (one[0] != run[-1][0] + 1 or len(run) == limit):
            yield run
            run = []
        run.append(one)
    if run:
        yield run
