"""Where each page is: one dict from key to location. The store's lock is held for changes; look-ups need none.

A location is one int, segment id above slot, so that 1.4 million pages cost a dict and nothing per page beside it
and a sealed segment is loaded by zipping its keys with a range.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from hicache_fsm.ports import PageKey

_SLOT_BITS = 32


def location(segment_id: int, slot: int) -> int:
    return segment_id << _SLOT_BITS | slot


def segment_of(place: int) -> int:
    return place >> _SLOT_BITS


def slot_of(place: int) -> int:
    return place & ((1 << _SLOT_BITS) - 1)


class PageIndex:
    """Pages that can be read now. A key that is published again moves to its newest place."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        # None appears only inside `publish`: a slot without a page, thrown out again before it returns.
        self._places: dict[PageKey | None, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def leading(self, keys: Sequence[PageKey]) -> int:
        """Number of leading keys that are present; stops at the first that is not."""
        return len(list(takewhile(self._places.__contains__, keys)))

    def places(self, keys: Iterable[PageKey]) -> list[int | None]:
        return list(map(self._places.get, keys))

    def present(self, keys: Iterable[PageKey]) -> list[bool]:
        return list(map(self._places.__contains__, keys))

    def publish(self, segment_id: int, first_slot: int, keys: Sequence[PageKey | None]) -> None:
        """Make the pages of consecutive slots visible; None marks a slot without a usable page."""
        first = location(segment_id, first_slot)
        self._places.update(zip(keys, range(first, first + len(keys)), strict=True))
        self._places.pop(None, None)

    def drop(self, key: PageKey, place: int) -> bool:
        """Forget `key` if it is still at `place`; whether it was."""
        if self._places.get(key) != place:
            return False
        del self._places[key]
        return True

    def drop_segment(self, segment_id: int, keys: Sequence[PageKey | None]) -> int:
        """Forget the pages of a segment, not those that have moved on; number of pages forgotten."""
        first = location(segment_id, 0)
        return sum(key is not None and self.drop(key, first + slot) for slot, key in enumerate(keys))
