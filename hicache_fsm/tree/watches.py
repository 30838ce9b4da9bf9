"""Watches: who wants to know when the end of its match moves.

A watcher stands on the boundary of its own keys: the last matched page may *leave*, the next key may *arrive*. Each
is one key, so a change of the tree finds its watchers by one dict probe, and a change elsewhere costs them nothing.
Watchers of one key are a doubly linked list in dicts: ten thousand requests behind one system prompt come and go in
constant time each, and the state stays flat.
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache_fsm.ports import PageKey

_NOBODY = -1


class KeyWatchers:
    """Watchers by key; each watcher stands on at most one key. Watcher ids are not negative."""

    __slots__ = ("_after", "_before", "_head", "_key")

    def __init__(self) -> None:
        self._head: dict[PageKey, int] = {}  # key -> its latest watcher
        self._key: dict[int, PageKey] = {}  # watcher -> key
        self._after: dict[int, int] = {}  # watcher -> the next one on its key, or nobody
        self._before: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._key)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._head

    def key_of(self, watcher: int) -> PageKey | None:
        return self._key.get(watcher)

    def watchers(self) -> list[int]:
        return list(self._key)

    def add(self, watcher: int, key: PageKey) -> None:
        assert watcher not in self._key, f"watcher {watcher} stands on a key already"
        head = self._head.get(key, _NOBODY)
        self._head[key] = watcher
        self._key[watcher] = key
        self._after[watcher] = head
        self._before[watcher] = _NOBODY
        if head != _NOBODY:
            self._before[head] = watcher

    def discard(self, watcher: int) -> None:
        key = self._key.pop(watcher, None)
        if key is None:
            return
        after = self._after.pop(watcher)
        before = self._before.pop(watcher)
        if after != _NOBODY:
            self._before[after] = before
        if before != _NOBODY:
            self._after[before] = after
        elif after != _NOBODY:
            self._head[key] = after
        else:
            del self._head[key]

    def of(self, key: PageKey) -> list[int]:
        """All watchers of a key, latest first."""
        found: list[int] = []
        watcher = self._head.get(key, _NOBODY)
        while watcher != _NOBODY:
            found.append(watcher)
            watcher = self._after[watcher]
        return found

    def check_invariants(self) -> list[str]:
        found: list[str] = []
        seen: set[int] = set()
        for key, head in self._head.items():
            watcher, before = head, _NOBODY
            while watcher != _NOBODY:
                if watcher in seen:
                    found.append(f"watcher {watcher} is listed twice")
                    break
                seen.add(watcher)
                if self._key.get(watcher) != key:
                    found.append(f"watcher {watcher} is listed under a key it does not stand on")
                if self._before.get(watcher) != before:
                    found.append(f"watcher {watcher} has a wrong back link")
                watcher, before = self._after.get(watcher, _NOBODY), watcher
        if seen != set(self._key):
            found.append(f"watchers without a list entry, or the reverse: {sorted(seen ^ set(self._key))[:8]}")
        if set(self._after) != set(self._key) or set(self._before) != set(self._key):
            found.append("links and watchers differ")
        return found


class Watches:
    """Boundaries under watch, and the watchers whose boundary has moved since they last looked."""

    __slots__ = ("arrivals", "departures", "dirty", "told", "touches")

    def __init__(self) -> None:
        self.departures = KeyWatchers()
        self.arrivals = KeyWatchers()
        self.dirty: dict[int, None] = {}  # moved, not yet taken
        self.told: dict[int, None] = {}  # taken, and not watching anew since
        self.touches = 0

    def set(self, watcher: int, keys: Sequence[PageKey], length: int) -> None:
        assert watcher >= 0, f"watcher ids must not be negative, not {watcher}"
        assert 0 <= length <= len(keys), f"a match of {length} pages out of {len(keys)}"
        self.drop(watcher)
        if length:
            self.departures.add(watcher, keys[length - 1])
        if length < len(keys):
            self.arrivals.add(watcher, keys[length])

    def drop(self, watcher: int) -> None:
        self.departures.discard(watcher)
        self.arrivals.discard(watcher)
        self.dirty.pop(watcher, None)
        self.told.pop(watcher, None)

    def waiting(self) -> list[int]:
        """Watchers who believe that their boundary is where it was."""
        watchers = dict.fromkeys(self.departures.watchers() + self.arrivals.watchers())
        return [watcher for watcher in watchers if watcher not in self.dirty and watcher not in self.told]

    def notify(self, watchers: Sequence[int]) -> None:
        dirty = self.dirty
        for watcher in watchers:
            if watcher not in dirty:
                dirty[watcher] = None
                self.touches += 1

    def take_dirty(self) -> list[int]:
        taken = sorted(self.dirty)
        self.told.update(self.dirty)
        self.dirty.clear()
        return taken

    def check_invariants(self) -> list[str]:
        found = [f"departures: {text}" for text in self.departures.check_invariants()]
        found += [f"arrivals: {text}" for text in self.arrivals.check_invariants()]
        for watcher in (*self.dirty, *self.told):
            if self.departures.key_of(watcher) is None and self.arrivals.key_of(watcher) is None:
                found.append(f"watcher {watcher} was told but watches nothing")
        return found
