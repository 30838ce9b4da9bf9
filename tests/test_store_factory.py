"""Opening a store by name, and the memory store's cap."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_fsm.errors import ConfigError
from hicache_fsm.storage.factory import open_store
from hicache_fsm.storage.file_store import FileStore
from hicache_fsm.storage.memory_store import MemoryStore
from hicache_fsm.testing.store_conformance import page_bytes_of, page_key

PAGE = 64


def keys_and_pages(*numbers: int) -> tuple[list[bytes], list[memoryview]]:
    keys = [page_key(i) for i in numbers]
    return keys, [memoryview(page_bytes_of(key, PAGE)) for key in keys]


def test_a_path_a_string_and_a_file_scheme_name_the_same_folder(tmp_path: Path) -> None:
    keys, pages = keys_and_pages(1, 2)
    first = open_store(tmp_path / "kv", PAGE, b"model")
    assert isinstance(first, FileStore)
    assert all(first.put(keys, pages))
    first.close()
    for spec in (str(tmp_path / "kv"), f"file:{tmp_path}/kv"):
        again = open_store(spec, PAGE, b"model")
        assert again.exists(keys) == 2
        again.close()


def test_the_cap_reaches_the_store(tmp_path: Path) -> None:
    store = open_store(tmp_path, PAGE, b"", 20_000)
    keys, pages = keys_and_pages(*range(500))
    for key, page in zip(keys, pages, strict=True):
        store.put([key], [page])
    assert store.stats().bytes <= 20_000
    assert store.stats().evicted_pages > 0
    store.close()


def test_a_relative_folder_with_a_colon_in_a_path_object_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    open_store(Path("memory:"), PAGE).close()
    assert (tmp_path / "memory:").is_dir()


@pytest.mark.parametrize("spec", ["mooncake://host:1", "s3://bucket", "memory:x", "file:", ""])
def test_a_spec_that_names_no_store_is_a_config_error(spec: str) -> None:
    with pytest.raises(ConfigError):
        open_store(spec, PAGE)


def test_an_unknown_scheme_is_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"unknown store 'mooncake'.*a folder, file:FOLDER, memory:"):
        open_store("mooncake://host:1", PAGE)


def test_a_memory_store_evicts_the_least_recently_used() -> None:
    store = open_store("memory:", PAGE, max_bytes=3 * PAGE + 5)
    assert isinstance(store, MemoryStore)
    keys, pages = keys_and_pages(0, 1, 2, 3, 4)
    assert all(store.put(keys[:3], pages[:3]))
    assert store.get(keys[:1], [memoryview(bytearray(PAGE))]) == [True]
    assert store.exists(keys[1:2]) == 1  # a look-up is no use
    assert store.put(keys[3:4], pages[3:4]) == [True]
    assert [store.exists([key]) for key in keys] == [1, 0, 1, 1, 0]
    assert store.put(keys[2:3], pages[2:3]) == [True]  # storing an old page is use
    assert store.put(keys[4:], pages[4:]) == [True]
    assert [store.exists([key]) for key in keys] == [0, 0, 1, 1, 1]
    assert store.stats() == (3, 3 * PAGE, 0, 2)


def test_a_memory_store_never_evicts_pages_of_the_same_batch() -> None:
    store = MemoryStore(PAGE, 3 * PAGE)
    keys, pages = keys_and_pages(*range(6))
    store.put(keys[4:], pages[4:])
    assert store.put(keys, pages) == [True, True, True, False, False, False]
    assert [store.exists([key]) for key in keys] == [1, 1, 1, 0, 0, 0]


def test_sizes_that_hold_no_page_are_config_errors() -> None:
    for page_bytes, max_bytes in ((0, None), (PAGE, PAGE - 1)):
        with pytest.raises(ConfigError):
            MemoryStore(page_bytes, max_bytes)
