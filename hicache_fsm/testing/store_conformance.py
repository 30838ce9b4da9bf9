"""What every `KVStore` must do, as tests that a backend's author runs against it.

    class TestMyStore(StoreConformance):
        page_bytes = 4096
        persistent = True                      # a name that is opened again still has its pages

        @pytest.fixture
        def store_factory(self, tmp_path):
            return lambda name: MyStore(tmp_path / name, self.page_bytes)

`store_factory(name)` opens an empty store for a new name. Each test closes the stores that it has opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeAlias

from hicache_fsm.errors import StoreError
from hicache_fsm.ports import KVStore, PageKey

StoreFactory: TypeAlias = Callable[[str], KVStore]


def page_key(number: int) -> PageKey:
    """A key as the tree makes them: 32 bytes that share no prefix."""
    return hashlib.sha256(b"page %d" % number).digest()


def page_bytes_of(key: PageKey, page_bytes: int) -> bytes:
    """The page that belongs to a key: bytes that follow from it, and from no other."""
    return hashlib.shake_128(key).digest(page_bytes)


class StoreConformance:
    """Subclass with a `store_factory` fixture. All tests hold for an unbounded store without faults."""

    page_bytes: ClassVar[int] = 4096
    persistent: ClassVar[bool] = False
    # A page that was put may be gone again (a bounded or leased backend): only wrong bytes fail then.
    may_lose_pages: ClassVar[bool] = False

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def opened(self, factory: StoreFactory, name: str = "store") -> Iterator[KVStore]:
        store = factory(name)
        try:
            yield store
        finally:
            store.close()

    def pages(self, keys: Sequence[PageKey]) -> list[memoryview]:
        return [memoryview(page_bytes_of(key, self.page_bytes)) for key in keys]

    def blank(self, count: int) -> list[memoryview]:
        """Buffers that hold no page: what was not read shows."""
        return [memoryview(bytearray(b"\xa5" * self.page_bytes)) for _ in range(count)]

    def put(self, store: KVStore, keys: Sequence[PageKey]) -> None:
        flags = store.put(keys, self.pages(keys))
        assert len(flags) == len(keys)
        assert all(flags) or self.may_lose_pages, flags

    def read(self, store: KVStore, keys: Sequence[PageKey]) -> list[bool]:
        """Read and compare: a page called good has its own bytes."""
        buffers = self.blank(len(keys))
        flags = store.get(keys, buffers)
        assert len(flags) == len(keys)
        for key, buffer, ok in zip(keys, buffers, flags, strict=True):
            assert not ok or bytes(buffer) == page_bytes_of(key, self.page_bytes), f"wrong bytes for {key.hex()}"
        return flags

    def refused(self, call: Callable[[], object]) -> None:
        """`call` must raise `StoreError`, with a message."""
        caught: StoreError | None = None
        result: object = None
        try:
            result = call()
        except StoreError as error:
            caught = error
        assert caught is not None, f"expected a StoreError, got {result!r}"
        assert str(caught), "a StoreError without a message helps nobody"

    # ── pages ────────────────────────────────────────────────────────────────────────────────────────

    def test_a_page_comes_back_as_it_was_put(self, store_factory: StoreFactory) -> None:
        keys = [page_key(i) for i in range(20)]
        with self.opened(store_factory) as store:
            self.put(store, keys)
            assert all(self.read(store, keys)) or self.may_lose_pages
            assert all(self.read(store, keys[::-1])) or self.may_lose_pages
            assert all(self.read(store, keys[3:17:4])) or self.may_lose_pages

    def test_an_absent_page_is_a_miss_and_leaves_its_neighbours_alone(self, store_factory: StoreFactory) -> None:
        keys = [page_key(i) for i in range(9)]
        with self.opened(store_factory) as store:
            assert not any(self.read(store, keys))
            self.put(store, keys[::2])
            flags = self.read(store, keys)
        assert not any(flags[1::2])
        assert all(flags[::2]) or self.may_lose_pages

    def test_putting_an_existing_key_is_true_and_keeps_the_old_bytes(self, store_factory: StoreFactory) -> None:
        keys = [page_key(i) for i in range(3)]
        with self.opened(store_factory) as store:
            self.put(store, keys)
            if self.may_lose_pages:
                return  # a key that was lost meanwhile would take the new bytes, rightly
            assert all(store.put(keys, self.blank(3)))
            assert all(self.read(store, keys))

    def test_a_batch_may_mix_old_and_new_keys(self, store_factory: StoreFactory) -> None:
        keys = [page_key(i) for i in range(10)]
        with self.opened(store_factory) as store:
            self.put(store, keys[3:6])
            self.put(store, keys)
            assert all(self.read(store, keys)) or self.may_lose_pages

    def test_a_key_may_stand_twice_in_a_batch(self, store_factory: StoreFactory) -> None:
        key, other = page_key(1), page_key(2)
        with self.opened(store_factory) as store:
            first = self.pages([key])[0]
            third = first if self.may_lose_pages else self.blank(1)[0]
            flags = store.put([key, other, key], [first, self.pages([other])[0], third])
            assert flags == [True] * 3 or self.may_lose_pages
            assert all(self.read(store, [key, other, key, key])) or self.may_lose_pages

    def test_the_store_keeps_a_copy(self, store_factory: StoreFactory) -> None:
        key = page_key(1)
        buffer = bytearray(page_bytes_of(key, self.page_bytes))
        with self.opened(store_factory) as store:
            assert store.put([key], [memoryview(buffer)]) == [True] or self.may_lose_pages
            buffer[:] = bytes(self.page_bytes)
            assert self.read(store, [key]) == [True] or self.may_lose_pages

    def test_neighbouring_buffers_are_not_touched(self, store_factory: StoreFactory) -> None:
        key = page_key(1)
        arena = bytearray(b"\xa5" * 3 * self.page_bytes)
        middle = memoryview(arena)[self.page_bytes : 2 * self.page_bytes]
        with self.opened(store_factory) as store:
            self.put(store, [key])
            assert store.get([key], [middle]) == [True] or self.may_lose_pages
        assert set(arena[: self.page_bytes] + arena[2 * self.page_bytes :]) == {0xA5}

    # ── exists ───────────────────────────────────────────────────────────────────────────────────────

    def test_exists_counts_the_leading_run_only(self, store_factory: StoreFactory) -> None:
        keys = [page_key(i) for i in range(8)]
        with self.opened(store_factory) as store:
            assert store.exists(keys) == 0
            self.put(store, [*keys[:3], *keys[4:]])
            assert store.exists(keys) == 3 or self.may_lose_pages
            assert store.exists(keys[3:]) == 0
            assert store.exists(keys[4:]) == 4 or self.may_lose_pages
            self.put(store, keys[3:4])
            assert store.exists(keys) == 8 or self.may_lose_pages

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────

    def test_an_empty_batch_is_nothing(self, store_factory: StoreFactory) -> None:
        with self.opened(store_factory) as store:
            assert store.exists([]) == 0
            assert store.get([], []) == []
            assert store.put([], []) == []

    def test_a_buffer_of_another_size_refuses_the_whole_batch(self, store_factory: StoreFactory) -> None:
        keys = [page_key(1), page_key(2)]
        good = self.pages(keys)
        with self.opened(store_factory) as store:
            for size in (0, self.page_bytes - 1, self.page_bytes + 1):
                bad = memoryview(bytearray(size))
                self.refused(lambda bad=bad: store.put(keys, [good[0], bad]))  # type: ignore[misc]
                self.refused(lambda bad=bad: store.get(keys, [self.blank(1)[0], bad]))  # type: ignore[misc]
            assert store.exists(keys) == 0

    def test_keys_and_buffers_must_pair_up(self, store_factory: StoreFactory) -> None:
        keys = [page_key(1), page_key(2)]
        with self.opened(store_factory) as store:
            self.refused(lambda: store.put(keys, self.pages(keys[:1])))
            self.refused(lambda: store.get(keys, self.blank(3)))
            assert store.exists(keys) == 0

    def test_pages_are_not_read_into_a_read_only_buffer(self, store_factory: StoreFactory) -> None:
        key = page_key(1)
        with self.opened(store_factory) as store:
            self.put(store, [key])
            self.refused(lambda: store.get([key], [memoryview(bytes(self.page_bytes))]))

    def test_keys_are_32_bytes(self, store_factory: StoreFactory) -> None:
        with self.opened(store_factory) as store:
            for key in (b"", b"short", page_key(1)[:31], page_key(1) + b"\0"):
                self.refused(lambda key=key: store.exists([key]))  # type: ignore[misc]
                self.refused(lambda key=key: store.put([key], self.blank(1)))  # type: ignore[misc]
                self.refused(lambda key=key: store.get([key], self.blank(1)))  # type: ignore[misc]

    # ── threads ──────────────────────────────────────────────────────────────────────────────────────

    def test_readers_see_whole_pages_while_a_writer_adds_them(self, store_factory: StoreFactory) -> None:
        readers, batch, batches = 3, 4, 25
        keys = [page_key(i) for i in range(batch * batches)]
        start = threading.Barrier(readers + 1)
        done = threading.Event()

        def write(store: KVStore) -> int:
            start.wait(30)
            try:
                for at in range(0, len(keys), batch):
                    self.put(store, keys[at : at + batch])
            finally:
                done.set()
            return 0

        def read(store: KVStore) -> int:
            start.wait(30)
            passes = 0
            while not done.is_set() or passes == 0:
                present = store.exists(keys)
                found = self.read(store, keys)
                # What a look-up has found is still there, and is whole.
                assert all(found[:present]) or self.may_lose_pages
                passes += 1
            return passes

        with self.opened(store_factory) as store, ThreadPoolExecutor(readers + 1) as pool:
            jobs = [pool.submit(write, store), *(pool.submit(read, store) for _ in range(readers))]
            assert all(job.result(timeout=60) > 0 for job in jobs[1:])
            jobs[0].result(timeout=60)
            assert all(self.read(store, keys)) or self.may_lose_pages

    def test_writers_of_the_same_keys_agree(self, store_factory: StoreFactory) -> None:
        writers = 4
        keys = [page_key(i) for i in range(40)]
        start = threading.Barrier(writers)

        def write(store: KVStore, turn: int) -> None:
            start.wait(30)
            rotated = keys[turn * 10 :] + keys[: turn * 10]
            for at in range(0, len(rotated), 5):
                self.put(store, rotated[at : at + 5])

        with self.opened(store_factory) as store, ThreadPoolExecutor(writers) as pool:
            for job in [pool.submit(write, store, turn) for turn in range(writers)]:
                job.result(timeout=60)
            assert all(self.read(store, keys)) or self.may_lose_pages
            assert store.stats().pages <= len(keys)

    # ── accounts and end ─────────────────────────────────────────────────────────────────────────────

    def test_stats_count_pages_once(self, store_factory: StoreFactory) -> None:
        keys = [page_key(i) for i in range(6)]
        with self.opened(store_factory) as store:
            assert store.stats()[:1] == (0,)
            self.put(store, keys)
            self.put(store, keys)
            stats = store.stats()
        assert stats.corrupt_pages == 0
        if not self.may_lose_pages:
            assert stats.pages == len(keys)
            assert stats.bytes >= len(keys) * self.page_bytes
            assert stats.evicted_pages == 0

    def test_close_is_idempotent_and_final(self, store_factory: StoreFactory) -> None:
        key = page_key(1)
        store = store_factory("store")
        self.put(store, [key])
        store.close()
        store.close()
        self.refused(lambda: store.exists([key]))
        self.refused(lambda: store.get([key], self.blank(1)))
        self.refused(lambda: store.put([key], self.pages([key])))

    def test_pages_outlive_the_store_object_if_it_says_so(self, store_factory: StoreFactory) -> None:
        keys = [page_key(i) for i in range(12)]
        with self.opened(store_factory) as store:
            self.put(store, keys)
        if not self.persistent:
            return
        with self.opened(store_factory) as store:
            assert store.exists(keys) == len(keys) or self.may_lose_pages
            assert all(self.read(store, keys)) or self.may_lose_pages
            self.put(store, keys)
            assert all(self.read(store, keys)) or self.may_lose_pages
