"""What is believed to be in storage: advisory, bounded, healed by what look-ups and reads report.

A wrong positive skips a write until a shortfall heals it; a wrong negative costs one idempotent write. Keys
are content hashes, so beliefs survive eviction and recomputation. `undeliverable` is the opposite list:
keys that a look-up reported and a read could not bring; they are not asked for again for a while.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hicache_fsm.ports import PageKey


class StorageExistenceCache:
    """Bounded LRU of believed keys, keys in flight, and a bounded negative list with expiry."""

    __slots__ = ("capacity", "believed", "inflight", "negative_capacity", "negative_ttl_ms", "undeliverable")

    def __init__(self, capacity: int, negative_capacity: int, negative_ttl_ms: int) -> None:
        self.capacity = capacity
        self.believed: dict[PageKey, None] = {}  # oldest first
        self.inflight: dict[PageKey, int] = {}  # writes past their device copy, per key
        self.negative_capacity = negative_capacity
        self.negative_ttl_ms = negative_ttl_ms
        self.undeliverable: dict[PageKey, int] = {}  # key -> agreed time when it may be asked for again

    def add(self, keys: Sequence[PageKey]) -> None:
        believed, negative = self.believed, self.undeliverable
        for key in keys:
            believed.pop(key, None)
            believed[key] = None
            if negative:
                negative.pop(key, None)
        surplus = len(believed) - self.capacity
        if surplus > 0:
            # Some more than needed: the first key of a dict is behind the holes of all that were deleted before it, so
            # taking them out one at a time would walk over these holes each time.
            for key in list(itertools.islice(believed, surplus + self.capacity // 64)):
                del believed[key]

    def __contains__(self, key: PageKey) -> bool:
        return key in self.believed

    def covered(self, key: PageKey) -> bool:
        """Believed to be stored, or on its way."""
        return key in self.believed or key in self.inflight

    def invalidate_beyond(self, chain: Sequence[PageKey], keep: int) -> None:
        for key in chain[keep:]:
            self.believed.pop(key, None)

    def track_inflight(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self.inflight[key] = self.inflight.get(key, 0) + 1

    def untrack_inflight(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            left = self.inflight[key] - 1
            if left:
                self.inflight[key] = left
            else:
                del self.inflight[key]

    def refuse(self, key: PageKey, now_ms: int) -> None:
        """A look-up said this key is there, a read did not bring it."""
        self.undeliverable.pop(key, None)
        self.undeliverable[key] = now_ms + self.negative_ttl_ms
        while len(self.undeliverable) > self.negative_capacity:
            del self.undeliverable[next(iter(self.undeliverable))]

    def deliverable(self, keys: Sequence[PageKey], now_ms: int) -> int:
        """Number of leading keys that are not on the negative list."""
        if not self.undeliverable:
            return len(keys)
        for i, key in enumerate(keys):
            until = self.undeliverable.get(key)
            if until is None:
                continue
            if until > now_ms:
                return i
            del self.undeliverable[key]
        return len(keys)

    def clear(self) -> None:
        """A flush: nothing is known any more. Keys in flight stay until their answers."""
        self.believed.clear()
        self.undeliverable.clear()
