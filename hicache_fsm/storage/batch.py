"""Checks that every backend makes before it touches anything: a batch is refused whole or tried whole."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_fsm.errors import ConfigError, StoreError
from hicache_fsm.ports import PageKey

KEY_BYTES = 32


def check_page_bytes(page_bytes: int) -> None:
    """Raise `ConfigError` unless `page_bytes` can be the size of a page."""
    if page_bytes < 1:
        raise ConfigError(f"page_bytes must be at least 1, not {page_bytes}; give the staging engine's page_bytes")


def check_keys(keys: Sequence[PageKey]) -> None:
    """Raise `StoreError` if a key is not a 32-byte digest."""
    if set(map(len, keys)) <= {KEY_BYTES}:
        return
    position = next(i for i, key in enumerate(keys) if len(key) != KEY_BYTES)
    raise wrong_key(position, keys[position])


def wrong_key(position: int, key: PageKey) -> StoreError:
    return StoreError(
        f"key {position} has {len(key)} bytes; keys are {KEY_BYTES}-byte digests, make them with hicache_fsm.tree.keys"
    )


def check_batch(keys: Sequence[PageKey], buffers: Sequence[memoryview], page_bytes: int, *, writable: bool) -> None:
    """Raise `StoreError` unless there is one contiguous buffer of exactly `page_bytes` for each key."""
    if len(keys) != len(buffers):
        raise StoreError(f"{len(keys)} keys but {len(buffers)} buffers; give one page buffer for each key")
    check_keys(keys)
    for position, buffer in enumerate(buffers):
        if buffer.nbytes != page_bytes or not buffer.c_contiguous:
            raise StoreError(
                f"buffer {position} has {buffer.nbytes} bytes (contiguous: {buffer.c_contiguous}); this store holds "
                f"pages of {page_bytes} contiguous bytes, open it with the staging engine's page_bytes"
            )
        if writable and buffer.readonly:
            raise StoreError(f"buffer {position} is read-only; pages are read into it, give a writable memoryview")
