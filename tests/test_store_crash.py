"""Crashes and damage: whatever a file looks like when it is opened, a page is right or it is a miss."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_fsm.ports import PageKey
from hicache_fsm.storage.file_store import FileStore
from hicache_fsm.storage.files import Fsync
from hicache_fsm.storage.format import RECORD_HEADER_BYTES, SEGMENT_HEADER_BYTES, Layout
from hicache_fsm.storage.recovery import scan_keys
from hicache_fsm.testing.store_conformance import page_bytes_of, page_key

PAGE = 40
STRIDE = RECORD_HEADER_BYTES + PAGE


def put(store: FileStore, keys: list[PageKey]) -> list[bool]:
    return store.put(keys, [memoryview(page_bytes_of(key, store.page_bytes)) for key in keys])


def read(store: FileStore, keys: list[PageKey]) -> list[bool]:
    """Flags of a read whose good pages were compared with what belongs to their keys."""
    buffers = [memoryview(bytearray(store.page_bytes)) for _ in keys]
    flags = store.get(keys, buffers)
    for key, buffer, ok in zip(keys, buffers, flags, strict=True):
        assert not ok or bytes(buffer) == page_bytes_of(key, store.page_bytes), f"wrong page for {key.hex()}"
    return flags


class Image:
    """A closed store of one segment, to be damaged and opened again and again."""

    def __init__(self, folder: Path, pages: int) -> None:
        self.folder = folder
        self.keys = [page_key(i) for i in range(pages)]
        with FileStore(folder, PAGE, fsync=Fsync.NEVER) as store:
            assert all(put(store, self.keys))
        (segment,) = folder.rglob("*.seg")
        self.segment = segment
        self.sidecar = segment.with_suffix(".idx")
        self.bytes = segment.read_bytes()
        self.sidecar_bytes = self.sidecar.read_bytes()

    def open(self, segment: bytes, sidecar: bytes | None) -> FileStore:
        """The store as if a machine had come up with these files."""
        self.segment.write_bytes(segment)
        if sidecar is None:
            self.sidecar.unlink(missing_ok=True)
        else:
            self.sidecar.write_bytes(sidecar)
        return FileStore(self.folder, PAGE, fsync=Fsync.NEVER)


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path, pages=5)


# ── torn files ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("with_sidecar", [True, False])
def test_a_segment_cut_at_any_byte_of_its_last_record_keeps_all_earlier_pages(image: Image, with_sidecar: bool) -> None:
    last = SEGMENT_HEADER_BYTES + 4 * STRIDE
    for length in range(last, last + STRIDE):
        with image.open(image.bytes[:length], image.sidecar_bytes if with_sidecar else None) as store:
            assert store.exists(image.keys) == 4, length
            assert read(store, image.keys) == [True] * 4 + [False], length
            # The torn tail is gone, and the page can be stored where it was.
            assert image.segment.stat().st_size == last
            assert put(store, image.keys) == [True] * 5
            assert read(store, image.keys) == [True] * 5
        assert image.segment.read_bytes() == image.bytes


def test_a_segment_cut_anywhere_serves_the_whole_records_before_the_cut(image: Image) -> None:
    for length in range(0, len(image.bytes), 37):
        whole = max(0, length - SEGMENT_HEADER_BYTES) // STRIDE
        with image.open(image.bytes[:length], image.sidecar_bytes) as store:
            assert read(store, image.keys) == [i < whole for i in range(5)], length


def test_a_file_grown_by_a_crash_without_its_data_serves_the_records_before(image: Image) -> None:
    """After a power loss a file may have its new length and zeros in the place of data."""
    for hole in range(SEGMENT_HEADER_BYTES + 2 * STRIDE, len(image.bytes), 13):
        torn = image.bytes[:hole].ljust(len(image.bytes), b"\0")
        whole = (hole - SEGMENT_HEADER_BYTES) // STRIDE
        with image.open(torn, None) as store:
            # A record with a whole header stays until it is read; what follows without one is cut off.
            kept = whole + ((hole - SEGMENT_HEADER_BYTES) % STRIDE >= RECORD_HEADER_BYTES)
            assert image.segment.stat().st_size == SEGMENT_HEADER_BYTES + kept * STRIDE
            flags = read(store, image.keys)
            assert flags[:whole] == [True] * whole
            assert not any(flags[whole + 1 :])
            assert put(store, image.keys) == [True] * 5
            assert read(store, image.keys) == [True] * 5


def test_a_sidecar_of_records_that_were_lost_does_not_hide_those_written_after(image: Image) -> None:
    with image.open(image.bytes[: SEGMENT_HEADER_BYTES + 2 * STRIDE], image.sidecar_bytes) as store:
        new = [page_key(i) for i in range(100, 105)]
        assert all(put(store, new))
        after_crash = image.segment.read_bytes()
        sidecar = image.sidecar.read_bytes() if image.sidecar.exists() else None
    with image.open(after_crash, sidecar) as store:
        assert read(store, image.keys) == [True, True, False, False, False]
        assert all(read(store, new))


def test_records_behind_an_old_sidecar_are_found(image: Image) -> None:
    with FileStore(image.folder, PAGE, fsync=Fsync.NEVER) as store:
        new = [page_key(i) for i in range(100, 103)]
        assert all(put(store, new))
        crashed = image.segment.read_bytes()
    with image.open(crashed, image.sidecar_bytes) as store:
        assert all(read(store, image.keys + new))


def test_leftovers_of_a_crash_are_tidied_away(image: Image) -> None:
    (image.sidecar.parent / "segment-0000000001.idx.tmp").write_bytes(b"half a sidecar")
    (image.sidecar.parent / "segment-0000000077.idx").write_bytes(image.sidecar_bytes)
    with image.open(image.bytes, image.sidecar_bytes) as store:
        assert all(read(store, image.keys))
        assert sorted(p.name for p in image.segment.parent.iterdir()) == [
            "lock",
            "meta.json",
            image.sidecar.name,
            image.segment.name,
        ]


# ── damaged bytes ────────────────────────────────────────────────────────────────────────────────────


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@pytest.mark.parametrize("with_sidecar", [True, False])
def test_a_flipped_byte_in_a_record_costs_at_most_that_page_and_is_counted(image: Image, with_sidecar: bool) -> None:
    for slot in (0, 2, 4):
        for at in range(STRIDE):
            damaged = flipped(image.bytes, SEGMENT_HEADER_BYTES + slot * STRIDE + at)
            with image.open(damaged, image.sidecar_bytes if with_sidecar else None) as store:
                flags = read(store, image.keys)
                assert all(ok or i == slot for i, ok in enumerate(flags)), (slot, at)
                # The last 8 header bytes guard the scan; with a sidecar nothing reads them.
                harmless = with_sidecar and 56 <= at < RECORD_HEADER_BYTES
                assert flags[slot] == harmless, (slot, at)
                assert store.stats().corrupt_pages == (0 if harmless else 1), (slot, at)
                assert put(store, image.keys) == [True] * 5
                assert read(store, image.keys) == [True] * 5


def test_a_flipped_byte_in_a_sidecar_costs_a_scan_and_no_page(image: Image) -> None:
    for at in range(len(image.sidecar_bytes)):
        with image.open(image.bytes, flipped(image.sidecar_bytes, at)) as store:
            assert read(store, image.keys) == [True] * 5, at
            assert store.stats().corrupt_pages == 0
        assert image.sidecar.read_bytes() == image.sidecar_bytes


def test_a_sidecar_of_any_length_costs_no_page(image: Image) -> None:
    for length in range(0, len(image.sidecar_bytes), 5):
        with image.open(image.bytes, image.sidecar_bytes[:length]) as store:
            assert read(store, image.keys) == [True] * 5, length


def test_the_sidecar_of_another_segment_is_not_believed(image: Image, tmp_path: Path) -> None:
    other = Image(tmp_path / "other", pages=5)
    with FileStore(tmp_path / "third", PAGE, b"other weights", fsync=Fsync.NEVER) as store:
        put(store, [page_key(i) for i in range(50, 55)])
    (foreign,) = (tmp_path / "third").rglob("*.idx")
    with other.open(other.bytes, foreign.read_bytes()) as store:
        assert read(store, other.keys) == [True] * 5


def test_a_damaged_segment_header_costs_its_pages_and_none_is_wrong(image: Image) -> None:
    for at in [*range(80), 500, 4000, *range(4080, SEGMENT_HEADER_BYTES)]:
        with image.open(flipped(image.bytes, at), image.sidecar_bytes) as store:
            assert read(store, image.keys) == [False] * 5
            assert store.stats() == (0, 0, 5, 0)
            assert put(store, image.keys) == [True] * 5
            assert read(store, image.keys) == [True] * 5
        for path in image.segment.parent.glob("segment-*"):
            path.unlink()


def test_two_swapped_records_are_served_under_their_own_keys(image: Image) -> None:
    head, records = image.bytes[:SEGMENT_HEADER_BYTES], image.bytes[SEGMENT_HEADER_BYTES:]
    split = [records[i * STRIDE : (i + 1) * STRIDE] for i in range(5)]
    swapped = head + b"".join(split[i] for i in (1, 0, 2, 3, 4))
    with image.open(swapped, image.sidecar_bytes) as store:
        assert read(store, image.keys) == [False, False, True, True, True]
    with image.open(swapped, None) as store:
        assert read(store, image.keys) == [True] * 5


@pytest.mark.parametrize("page_bytes", [1, 40, 5000, 40_000])
def test_a_scan_finds_the_keys_however_large_the_pages_are(tmp_path: Path, page_bytes: int) -> None:
    keys = [page_key(i) for i in range(900 if page_bytes > 1000 else 70_000)]
    blank = memoryview(bytes(page_bytes))
    with FileStore(tmp_path, page_bytes, fsync=Fsync.NEVER) as store:
        assert all(store.put(keys, [blank] * len(keys)))
    (path,) = tmp_path.rglob("*.seg")
    with open(path, "rb", buffering=0) as file:
        assert scan_keys(file.fileno(), Layout.of(page_bytes, b""), 3, len(keys)) == keys[3:]


def test_a_store_of_many_segments_opens_from_its_sidecars_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [page_key(i) for i in range(5000)]
    with FileStore(tmp_path, PAGE, segment_bytes=64 << 10, fsync=Fsync.NEVER) as store:
        assert all(put(store, keys))
    scanned: list[tuple[int, int]] = []

    def no_scan(fd: int, layout: Layout, first: int, end: int) -> list[PageKey | None]:
        scanned.append((first, end))
        return scan_keys(fd, layout, first, end)

    monkeypatch.setattr("hicache_fsm.storage.recovery.scan_keys", no_scan)
    with FileStore(tmp_path, PAGE, segment_bytes=64 << 10, fsync=Fsync.NEVER) as store:
        assert all(first == end for first, end in scanned)
        assert store.exists(keys) == len(keys) == store.stats().pages
        sample = random.Random(5).sample(keys, 500)
        assert all(read(store, sample))


# ── a killed writer ──────────────────────────────────────────────────────────────────────────────────

WRITER = """
import os, signal, sys
from hicache_fsm.storage.file_store import FileStore
from hicache_fsm.testing.store_conformance import page_bytes_of, page_key

folder, first, kill, after = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
page_bytes, batch = 1000, 5
calls = 0

def dying(name, partial):
    real = getattr(os, name)
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls > after % 7:
            partial(real, args)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(os, name, call)

store = FileStore(folder, page_bytes, segment_bytes=4096 + 12 * (64 + page_bytes))
if kill == "mid_record":
    dying("pwritev", lambda real, args: real(args[0], [(data := b"".join(args[1]))[: after % len(data)]], args[2]))
elif kill == "before_rename":
    dying("replace", lambda real, args: None)
elif kill == "after_rename":
    dying("replace", lambda real, args: real(*args))
while True:
    keys = [page_key(i) for i in range(first, first + batch)]
    assert all(store.put(keys, [memoryview(page_bytes_of(key, page_bytes)) for key in keys]))
    first += batch
    os.write(1, b"%d\\n" % first)
"""


def run_writer_until_killed(folder: Path, first: int, kill: str, after: int) -> int:
    """Start a writer, let it die, and say up to which page it has acknowledged."""
    command = [sys.executable, "-c", WRITER, str(folder), str(first), kill, str(after)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        acknowledged = first
        for count, line in enumerate(child.stdout, start=1):
            acknowledged = int(line)
            if kill == "any_time" and count == after:
                child.kill()
        errors = child.stderr.read()
    assert child.returncode == -signal.SIGKILL, errors
    return acknowledged


def test_a_writer_killed_25_times_loses_nothing_it_has_acknowledged(tmp_path: Path) -> None:
    random_ = random.Random(2024)
    acknowledged: list[int] = []
    torn_tails = 0
    for turn in range(25):
        kill = ("any_time", "mid_record", "mid_record", "before_rename", "after_rename")[turn % 5]
        after = random_.randint(1, 12) if kill == "any_time" else random_.randint(1, 5 * 1064 - 1)
        first = turn * 10_000
        end = run_writer_until_killed(tmp_path, first, kill, after)
        acknowledged += range(first, end)
        torn_tails += any((p.stat().st_size - SEGMENT_HEADER_BYTES) % 1064 for p in tmp_path.rglob("*.seg"))
        if turn % 3 == 2:
            continue  # the next writer finds the folder as it was left
        with FileStore(tmp_path, 1000) as store:
            keys = [page_key(i) for i in acknowledged]
            assert store.exists(keys) == len(keys), (turn, kill)
            assert all(read(store, keys)), (turn, kill)
            # What was on its way when the kill came may be there or not, but is never wrong.
            read(store, [page_key(i) for i in range(end, end + 5)])
            assert store.stats().corrupt_pages == 0, (turn, kill)
    assert len(acknowledged) > 100
    assert torn_tails >= 5, "the kills in mid-record have left no torn record to recover from"


# ── a real limit ─────────────────────────────────────────────────────────────────────────────────────

LIMITED = """
import json, resource, sys
from hicache_fsm.errors import StoreError
from hicache_fsm.storage.file_store import FileStore
from hicache_fsm.testing.store_conformance import page_bytes_of, page_key

keys = [page_key(i) for i in range(12)]
pages = [memoryview(page_bytes_of(key, 1000)) for key in keys]
store = FileStore(sys.argv[1], 1000)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 7 * 1064 + 300, hard))
first = store.put(keys, pages)
try:
    second = store.put(keys[7:], pages[7:])
except StoreError as error:
    second = str(error)
buffers = [memoryview(bytearray(1000)) for _ in keys]
during = store.get(keys, buffers)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
third = store.put(keys, pages)
after = store.get(keys, buffers)
store.close()
print(json.dumps([first, second, during, third, after, buffers == pages]))
"""


def test_a_file_size_limit_stops_writing_and_the_store_recovers_when_it_is_lifted(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True)
    first, second, during, third, after, equal = json.loads(child.stdout)
    assert first == [True] * 7 + [False] * 5
    assert errno.errorcode[errno.EFBIG] in second
    assert "ulimit -f" in second
    assert during == first
    assert third == after == [True] * 12
    assert equal
    with FileStore(tmp_path, 1000) as store:
        assert all(read(store, [page_key(i) for i in range(12)]))


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs root to mount a small disk")
def test_a_really_full_disk_stops_writing_and_old_pages_are_still_served(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.decode().strip()}")
    try:
        filler = disk / "filler"
        filler.write_bytes(bytes(100_000))
        keys = [page_key(i) for i in range(300)]
        store = FileStore(disk, 1000, segment_bytes=50_000)
        flags = put(store, keys)
        stored = flags.count(True)
        assert 0 < stored < 300
        assert flags == [True] * stored + [False] * (300 - stored)
        assert read(store, keys) == flags
        assert "ENOSPC" in (store.last_error or "")
        filler.unlink()
        more = put(store, keys).count(True)
        assert more > stored
        store.close()
        with FileStore(disk, 1000, segment_bytes=50_000) as again:
            assert read(again, keys).count(True) == more
    finally:
        subprocess.run(["umount", str(disk)], check=True)
