"""The conformance kit on every backend of ours, and broken backends on the kit: each must be caught."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hicache_fsm.errors import StoreError
from hicache_fsm.ports import KVStore, PageKey, StoreStats
from hicache_fsm.storage.file_store import FileStore
from hicache_fsm.storage.files import Fsync
from hicache_fsm.storage.memory_store import MemoryStore
from hicache_fsm.testing.faulty_store import FaultyStore
from hicache_fsm.testing.store_conformance import StoreConformance, StoreFactory


class TestFileStore(StoreConformance):
    persistent = True

    @pytest.fixture
    def store_factory(self, tmp_path: Path) -> StoreFactory:
        return lambda name: FileStore(tmp_path / name, self.page_bytes)


class TestFileStoreOfSmallSegments(StoreConformance):
    """Three odd-sized pages a segment, so that every test crosses segment borders."""

    page_bytes = 777
    persistent = True

    @pytest.fixture
    def store_factory(self, tmp_path: Path) -> StoreFactory:
        segment_bytes = 4096 + 3 * (64 + self.page_bytes)
        return lambda name: FileStore(
            tmp_path / name, self.page_bytes, b"model", segment_bytes=segment_bytes, fsync=Fsync.NEVER
        )


class TestCappedFileStore(StoreConformance):
    page_bytes = 512
    persistent = True
    may_lose_pages = True

    @pytest.fixture
    def store_factory(self, tmp_path: Path) -> StoreFactory:
        return lambda name: FileStore(tmp_path / name, self.page_bytes, max_bytes=40_000, fsync=Fsync.NEVER)


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store_factory(self) -> StoreFactory:
        return lambda name: MemoryStore(self.page_bytes)


class TestCappedMemoryStore(StoreConformance):
    may_lose_pages = True

    @pytest.fixture
    def store_factory(self) -> StoreFactory:
        return lambda name: MemoryStore(self.page_bytes, 7 * self.page_bytes)


class TestFaultyStoreWithoutFaults(StoreConformance):
    @pytest.fixture
    def store_factory(self) -> StoreFactory:
        return lambda name: FaultyStore(MemoryStore(self.page_bytes), seed=1)


# ── the kit catches ──────────────────────────────────────────────────────────────────────────────────


class Relay:
    """A store that passes everything on; the broken ones below override one call."""

    def __init__(self, page_bytes: int) -> None:
        self.inner = MemoryStore(page_bytes)

    def exists(self, keys: Sequence[PageKey]) -> int:
        return self.inner.exists(keys)

    def get(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        return self.inner.get(keys, buffers)

    def put(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        return self.inner.put(keys, buffers)

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()


class CountsAllPresent(Relay):
    def exists(self, keys: Sequence[PageKey]) -> int:
        return sum(self.inner.exists([key]) for key in keys)


class MissesAfterFirstMiss(Relay):
    def get(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        present = self.inner.exists(keys)
        return self.inner.get(keys[:present], buffers[:present]) + [False] * (len(keys) - present)


class CallsEverythingGood(Relay):
    def get(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        self.inner.get(keys, buffers)
        return [True] * len(keys)


class Overwrites(Relay):
    def put(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        fresh = MemoryStore(self.inner.page_bytes)
        flags = fresh.put(keys[::-1], buffers[::-1])
        for key in set(self.inner._pages) - set(fresh._pages):
            fresh._pages[key] = self.inner._pages[key]
        self.inner = fresh
        return flags


class RefusesExistingKeys(Relay):
    def put(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        old = [self.inner.exists([key]) == 1 for key in keys]
        flags = self.inner.put(keys, buffers)
        return [ok and not was for ok, was in zip(flags, old, strict=True)]


class KeepsAView(Relay):
    def put(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        flags = self.inner.put(keys, buffers)
        for key, buffer in zip(keys, buffers, strict=True):
            self.inner._pages[key] = buffer  # type: ignore[assignment]
        return flags


class TakesShortBuffers(Relay):
    def put(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        padded = [memoryview(bytes(b).ljust(self.inner.page_bytes, b"\0")) for b in buffers]
        return self.inner.put(keys, padded)


class ForgetsToRefuseKeys(Relay):
    def exists(self, keys: Sequence[PageKey]) -> int:
        try:
            return self.inner.exists(keys)
        except StoreError:
            return 0


class ReopensAfterClose(Relay):
    def close(self) -> None:
        pass


class LosesALastPage(Relay):
    def put(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        flags = self.inner.put(keys[:-1], buffers[:-1])
        return flags + [True] * (len(keys) - len(flags))


class PublishesHalfPages(Relay):
    """The first half is visible before the second is written; an added page passes through the torn state."""

    def put(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        torn = [memoryview(bytes(b)[: len(b) // 2] + bytes(len(b) - len(b) // 2)) for b in buffers]
        return self.inner.put(keys, torn)


class CountsTwice(Relay):
    puts = 0

    def put(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        self.puts += len(keys)
        return self.inner.put(keys, buffers)

    def stats(self) -> StoreStats:
        return self.inner.stats()._replace(pages=self.puts)


BROKEN = [
    CountsAllPresent,
    MissesAfterFirstMiss,
    CallsEverythingGood,
    Overwrites,
    RefusesExistingKeys,
    KeepsAView,
    TakesShortBuffers,
    ForgetsToRefuseKeys,
    ReopensAfterClose,
    LosesALastPage,
    PublishesHalfPages,
    CountsTwice,
]


def failures(make: Callable[[int], KVStore]) -> list[str]:
    """Names of the kit's tests that a backend fails."""
    failed = []
    for name, test in inspect.getmembers(StoreConformance, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        try:
            test(StoreConformance(), lambda _: make(StoreConformance.page_bytes))
        except (AssertionError, StoreError):
            failed.append(name)
    return failed


@pytest.mark.parametrize("broken", BROKEN)
def test_the_kit_catches_a_broken_backend(broken: type[Relay]) -> None:
    assert failures(broken)


def test_the_kit_passes_the_relay_that_the_broken_ones_are_made_of() -> None:
    assert failures(Relay) == []


def test_a_persistent_backend_that_forgets_is_caught() -> None:
    class Forgets(StoreConformance):
        persistent = True

    with pytest.raises(AssertionError):
        Forgets().test_pages_outlive_the_store_object_if_it_says_so(lambda _: MemoryStore(4096))
