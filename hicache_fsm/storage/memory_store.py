"""A store in ordinary memory: for tests, for one process without a disk, and as the plainest model of the others."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from hicache_fsm.errors import ConfigError, StoreError
from hicache_fsm.ports import PageKey, StoreStats
from hicache_fsm.storage.batch import KEY_BYTES, check_batch, check_page_bytes, wrong_key


class MemoryStore:
    """A `KVStore` in a dict. With `max_bytes` the least recently used pages go first; look-ups do not count as use.

    Raises `ConfigError` on settings that cannot work.
    """

    def __init__(self, page_bytes: int, max_bytes: int | None = None) -> None:
        check_page_bytes(page_bytes)
        if max_bytes is not None and max_bytes < page_bytes:
            raise ConfigError(f"max_bytes={max_bytes} holds no page; give at least page_bytes={page_bytes}")
        self.page_bytes = page_bytes
        self._max_pages = None if max_bytes is None else max_bytes // page_bytes
        self._lock = threading.Lock()
        self._pages: OrderedDict[PageKey, bytes] = OrderedDict()  # least recently used first
        self._evicted_pages = 0
        self._closed = False

    def exists(self, keys: Sequence[PageKey]) -> int:
        """Number of leading keys that are present. Raises `StoreError` after `close`, and on a malformed key."""
        with self._lock:
            self._check_open()
            leading = len(list(takewhile(self._pages.__contains__, keys)))
        if leading < len(keys) and len(keys[leading]) != KEY_BYTES:
            raise wrong_key(leading, keys[leading])
        return leading

    def get(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        """Copy each page into its buffer. Raises `StoreError` after `close`, and on a malformed batch."""
        check_batch(keys, buffers, self.page_bytes, writable=True)
        with self._lock:
            self._check_open()
            pages = [self._pages.get(key) for key in keys]
            for key, page in zip(keys, pages, strict=True):
                if page is not None:
                    self._pages.move_to_end(key)
        for page, buffer in zip(pages, buffers, strict=True):
            if page is not None:
                buffer.cast("B")[:] = page
        return [page is not None for page in pages]

    def put(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        """Copy each page in; False is a page that did not fit: a batch never evicts its own pages.

        Raises `StoreError` after `close`, and on a malformed batch.
        """
        check_batch(keys, buffers, self.page_bytes, writable=False)
        with self._lock:
            self._check_open()
            own: set[PageKey] = set()
            flags = []
            for key, buffer in zip(keys, buffers, strict=True):
                stored = key in self._pages or self._make_room(own)
                if stored:
                    if key not in self._pages:
                        self._pages[key] = bytes(buffer)
                    self._pages.move_to_end(key)
                    own.add(key)
                flags.append(stored)
            return flags

    def _make_room(self, own: set[PageKey]) -> bool:
        if self._max_pages is None or len(self._pages) < self._max_pages:
            return True
        if len(own) >= self._max_pages:
            return False
        # The batch's own pages are the most recently used, so the first one is not among them.
        self._pages.popitem(last=False)
        self._evicted_pages += 1
        return True

    def stats(self) -> StoreStats:
        """Raises `StoreError` after `close`."""
        with self._lock:
            self._check_open()
            return StoreStats(len(self._pages), len(self._pages) * self.page_bytes, 0, self._evicted_pages)

    def close(self) -> None:
        """Forget all pages. Idempotent."""
        with self._lock:
            self._closed = True
            self._pages.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the memory store is closed and its pages are gone; open another")
