"""How fast the file store is beside the file system under it. Both sides run in the same process, in turns.

    python benchmarks/bench_store.py [FOLDER]

Reads are from the page cache: what is measured is the store's own cost, not the disk's. Put figures include the
kernel's write-back and vary with the disk. Rates are 1e9 bytes a second.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hicache_fsm.storage.batch import KEY_BYTES
from hicache_fsm.storage.file_store import FileStore
from hicache_fsm.storage.files import IOV_MAX, Fsync, write_fully
from hicache_fsm.storage.format import (
    RECORD_HEADER_BYTES,
    Layout,
    pack_segment_header,
    pack_sidecar,
)
from hicache_fsm.storage.recovery import prepare_folder
from hicache_fsm.storage.segment import segment_path, sidecar_path

ROUNDS = 9
MIB = 1 << 20


def best_of(*actions: Callable[[], object]) -> list[float]:
    """Shortest time of each action in seconds; the actions take turns, so that a busy moment hits all of them."""
    times = [float("inf")] * len(actions)
    for _ in range(ROUNDS):
        for i, action in enumerate(actions):
            start = time.perf_counter()
            action()
            times[i] = min(times[i], time.perf_counter() - start)
    return times


def pages_of(count: int, page_bytes: int) -> list[memoryview]:
    """Touched, writable page buffers side by side, like rows of a staging arena."""
    arena = memoryview(bytearray(random.Random(1).randbytes(MIB)) * -(-count * page_bytes // MIB))
    return [arena[i * page_bytes : (i + 1) * page_bytes] for i in range(count)]


def keys_of(count: int, seed: int = 0) -> list[bytes]:
    blob = random.Random(seed).randbytes(count * KEY_BYTES)
    return [blob[i : i + KEY_BYTES] for i in range(0, len(blob), KEY_BYTES)]


def _only_segment(folder: Path, layout: Layout) -> Path:
    return segment_path(folder / layout.fingerprint.hex(), 1)


def bench_large_pages(folder: Path) -> dict[str, float]:
    """64 pages of 1 MiB: verified reads beside plain preadv of the same bytes of the same file."""
    count, page_bytes = 64, MIB
    keys, pages, target = keys_of(count), pages_of(count, page_bytes), pages_of(count, page_bytes)
    total = count * page_bytes
    with FileStore(folder, page_bytes, fsync=Fsync.NEVER) as store:
        start = time.perf_counter()
        assert all(store.put(keys, pages))
        put_s = time.perf_counter() - start
        fd = os.open(_only_segment(folder, Layout.of(page_bytes, b"")), os.O_RDONLY)
        try:
            raw_s, page_by_page_s, get_s = best_of(
                lambda: _read_raw(fd, target, batch=count),
                lambda: _read_raw(fd, target, batch=1),
                lambda: store.get(keys, target),
            )
        finally:
            os.close(fd)
        assert target == pages
    raw_s = min(raw_s, page_by_page_s)
    return {
        "put_1mib_gbps": total / put_s / 1e9,
        "raw_preadv_gbps": total / raw_s / 1e9,
        "get_1mib_gbps": total / get_s / 1e9,
        "get_1mib_share_of_raw": raw_s / get_s,
    }


def _read_raw(fd: int, target: Sequence[memoryview], batch: int) -> None:
    """The payload bytes into the same buffers, headers included in the calls, nothing checked."""
    stride = RECORD_HEADER_BYTES + target[0].nbytes
    head = memoryview(bytearray(RECORD_HEADER_BYTES))
    for first in range(0, len(target), batch):
        buffers = [one for page in target[first : first + batch] for one in (head, page)]
        for at in range(0, len(buffers), IOV_MAX):
            os.preadv(fd, buffers[at : at + IOV_MAX], 4096 + first * stride + at // 2 * stride)


def bench_small_pages(folder: Path) -> dict[str, float]:
    """200 pages of 4 KiB a call: in the order they were written, and scattered over 20,000."""
    count, page_bytes, batch = 20_000, 4096, 200
    keys, pages = keys_of(count), pages_of(count, page_bytes)
    target = pages_of(batch, page_bytes)
    scattered = random.Random(2).sample(range(count), batch)
    stride = RECORD_HEADER_BYTES + page_bytes
    with FileStore(folder, page_bytes, fsync=Fsync.NEVER) as store:
        start = time.perf_counter()
        for at in range(0, count, batch):
            assert all(store.put(keys[at : at + batch], pages[at : at + batch]))
        put_s = time.perf_counter() - start
        some = [keys[i] for i in scattered]
        fd = os.open(_only_segment(folder, Layout.of(page_bytes, b"")), os.O_RDONLY)

        def read_scattered_raw() -> None:
            for page, slot in zip(target, scattered, strict=True):
                os.preadv(fd, [page], 4096 + slot * stride + RECORD_HEADER_BYTES)

        try:
            raw_s, get_s, raw_scattered_s, scattered_s = best_of(
                lambda: _read_raw(fd, target, batch=batch),
                lambda: store.get(keys[:batch], target),
                read_scattered_raw,
                lambda: store.get(some, target),
            )
        finally:
            os.close(fd)
        assert target == [pages[i] for i in scattered]
        asked = random.Random(3).sample(keys, 1000)
        (exists_s,) = best_of(lambda: store.exists(asked))
    return {
        "exists_1000_of_20k_ms": exists_s * 1e3,
        "put_4kib_gbps": count * page_bytes / put_s / 1e9,
        "get_200x4kib_ms": get_s * 1e3,
        "get_200x4kib_share_of_raw": raw_s / get_s,
        "get_200x4kib_scattered_ms": scattered_s * 1e3,
        "get_200x4kib_scattered_share_of_raw": raw_scattered_s / scattered_s,
    }


def bench_open(folder: Path, count: int = 1_400_000) -> dict[str, float]:
    """Open a cleanly closed store of many pages, then ask it for 1,000 of them."""
    page_bytes, per_segment = 64, 50_000
    layout = Layout.of(page_bytes, b"")
    keys = keys_of(count)
    home = prepare_folder(folder, layout, b"", sync=False)
    # Records are not looked at when a sidecar covers them, so their bytes may be a hole in the file.
    for segment_id, first in enumerate(range(0, count, per_segment), start=1):
        path = segment_path(home, segment_id)
        some = keys[first : first + per_segment]
        with open(path, "xb", buffering=0) as file:
            write_fully(file.fileno(), [memoryview(pack_segment_header(layout, segment_id))], 0)
            file.truncate(layout.offset(len(some)))
        sidecar_path(path).write_bytes(pack_sidecar(layout, segment_id, some))
    start = time.perf_counter()
    store = FileStore(folder, page_bytes, fsync=Fsync.NEVER, segment_bytes=layout.offset(per_segment))
    open_s = time.perf_counter() - start
    assert store.stats().pages == count
    asked = random.Random(3).sample(keys, 1000)
    (exists_s,) = best_of(lambda: store.exists(asked))
    assert store.exists(asked) == len(asked)
    store.close()
    return {"open_1400k_s": open_s, "exists_1000_of_1400k_ms": exists_s * 1e3}


def run(folder: Path | None = None) -> dict[str, float]:
    """All figures, measured in a scratch folder that is removed again."""
    figures: dict[str, float] = {}
    for bench in (bench_large_pages, bench_small_pages, bench_open):
        scratch = Path(tempfile.mkdtemp(prefix="bench_store_", dir=folder))
        try:
            figures |= bench(scratch)
        finally:
            shutil.rmtree(scratch)
    return figures


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    for name, value in run(folder).items():
        print(f"{name:40} {value:10.3f}")


if __name__ == "__main__":
    main()
