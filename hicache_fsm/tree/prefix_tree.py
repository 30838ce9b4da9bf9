"""The prefix tree of the device pool: one node per page, found by the page's chain hash.

A key names a whole prefix (see `keys`), so the tree needs no labels on its edges: one dict leads from key to node,
and a node stands for "this prefix is resident up to here". Residency is prefix-closed, so the match of a request is
a binary search over its own keys. Nodes never split; a node's id stays its own until its page leaves.

           keys of a request   k0   k1   k2   k3   k4          index: key -> node id, root = 0
                               │    │    │    │
    root 0 ─────────────────── 5 ── 2 ── 9    ·                match 3, next key k3
                                    └─── 4 ── 7                another request's tail

State is flat: parallel lists indexed by node id, and a stack of unused ids. Costs, for n pages in the tree:

    match      O(log request); 2 probes if the hint is right     insert   O(log request + new pages)
    lock       O(pages newly locked)                             evict    O(log n) a page
    touch      O(1)                                              landed   O(pages of that load)

Recency: `touch` stamps only the deepest node of a path. When a leaf leaves, its parent inherits the later of the two
stamps, and an inner node is no candidate before, so the order is the same as if each ancestor had been stamped too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hicache_fsm.ports import PageKey
from hicache_fsm.tree.checks import check_tree
from hicache_fsm.tree.eviction import EvictionOrder
from hicache_fsm.tree.watches import Watches

ROOT = 0
ABSENT = -1


class InsertResult(NamedTuple):
    node: int  # deepest node of the inserted span; what a request locks
    adopted: int  # pages that are now the tree's: the last ones of the span
    redundant: list[int]  # pages that stay the caller's: the tree had others for these keys


class Evicted(NamedTuple):
    pages: list[int]  # device pages that are the caller's again, deepest first
    keys: list[PageKey]  # their keys, in the same order


class PrefixTree:
    """Resident prefixes, their device pages, locks, and what to evict next. Lengths are pages, `now` is any clock."""

    __slots__ = (
        "_evictions",
        "_first",
        "_index",
        "_key",
        "_load",
        "_loads",
        "_locked",
        "_locks",
        "_next",
        "_order",
        "_page",
        "_parent",
        "_prev",
        "_refs",
        "_sequence",
        "_unused",
        "_watches",
    )

    def __init__(self) -> None:
        self._index: dict[PageKey, int] = {}
        # One entry a node, root first. An unused id has the values of a fresh node.
        self._key: list[PageKey] = [b""]
        self._page: list[int] = [-1]
        self._parent: list[int] = [ROOT]
        self._first: list[int] = [0]  # latest child, 0 = none; siblings are linked both ways
        self._next: list[int] = [0]
        self._prev: list[int] = [0]
        self._locks: list[int] = [0]  # own locks
        # Own locks + children with refs > 0. The root's starts at 1, so that walks upwards end there by themselves.
        self._refs: list[int] = [1]
        self._load: list[int] = [0]  # the load that still writes this page, 0 = landed
        self._order = EvictionOrder()
        self._unused: list[int] = []
        self._sequence = 0
        self._loads: dict[int, tuple[int, ...]] = {}  # load -> its nodes
        self._locked = 0
        self._evictions = 0
        self._watches = Watches()

    # ── counts ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def resident(self) -> int:
        """Pages in the tree."""
        return len(self._index)

    @property
    def locked(self) -> int:
        """Pages with a lock on them or below them."""
        return self._locked

    @property
    def evictable(self) -> int:
        """Pages that eviction could free now: the rest."""
        return len(self._index) - self._locked

    @property
    def evictions(self) -> int:
        """Pages evicted so far."""
        return self._evictions

    # ── questions ────────────────────────────────────────────────────────────────────────────────────

    def match(self, keys: Sequence[PageKey], hint: int = 0) -> int:
        """Leading pages of `keys` that are resident. Changes nothing.

        `hint` is a length that was right once; the closer, the faster. It may be wrong in both directions.
        """
        index = self._index
        low, high = 0, len(keys)  # keys[:low] are resident, keys[high] is not or does not exist
        hint = min(hint, high)
        step = 1
        if hint > 0 and keys[hint - 1] in index:
            low, probe = hint, hint + 1
            while probe <= high and keys[probe - 1] in index:
                low, probe, step = probe, probe + step, 2 * step
            high = min(high, probe - 1)
        elif hint > 0:
            high = probe = hint - 1
            while probe > 0 and keys[probe - 1] not in index:
                high, probe, step = probe - 1, probe - 1 - step, 2 * step
            low = max(0, probe)
        while low < high:
            middle = (low + high + 1) >> 1
            if keys[middle - 1] in index:
                low = middle
            else:
                high = middle - 1
        return low

    def node(self, key: PageKey) -> int:
        """The node of a key, or `ABSENT`."""
        return self._index.get(key, ABSENT)

    def deepest(self, keys: Sequence[PageKey], length: int) -> int:
        """The node that stands for the first `length` pages; the root for 0. They must be resident."""
        if length == 0:
            return ROOT
        node = self._index.get(keys[length - 1], ABSENT)
        assert node != ABSENT, f"page {length - 1} of {len(keys)} is not resident; {self.match(keys)} pages are"
        return node

    def pages(self, keys: Sequence[PageKey], start: int, end: int) -> list[int]:
        """Device pages of keys[start:end], which must be resident."""
        index, page = self._index, self._page
        assert end <= start or keys[end - 1] in index, f"pages {start}..{end} wanted, {self.match(keys)} are resident"
        return [page[index[key]] for key in keys[start:end]]

    def loads(self, keys: Sequence[PageKey], start: int, end: int) -> set[int]:
        """Loads that still write pages of keys[start:end], which must be resident."""
        if not self._loads:
            return set()
        index, load = self._index, self._load
        found = {load[index[key]] for key in keys[start:end]}
        found.discard(0)
        return found

    def parent(self, node: int) -> int:
        return self._parent[node]

    def subtree(self, node: int) -> list[int]:
        """This node and all below it, parents before children. O(their number)."""
        found = [node]
        for above in found:
            child = self._first[above]
            while child:
                found.append(child)
                child = self._next[child]
        return found

    def all_pages(self) -> list[int]:
        """Device pages of all nodes, in no order; for recounts. O(tree)."""
        return [self._page[node] for node in self._index.values()]

    def contents(self) -> list[tuple[PageKey, int, int]]:
        """(key, device page, load that still writes it or 0) of all nodes, for recounts. O(tree)."""
        return [(key, self._page[node], self._load[node]) for key, node in self._index.items()]

    def locks_held(self) -> dict[int, int]:
        """Own locks of each locked node, for recounts. O(tree)."""
        return {node: self._locks[node] for node in self._index.values() if self._locks[node]}

    def is_locked(self, node: int) -> bool:
        return self._refs[node] > 0

    def _is_page(self, node: int) -> bool:
        return 0 < node < len(self._key) and self._order.seq[node] > 0

    def can_evict(self, count: int) -> bool:
        return count <= self.evictable

    # ── growth ───────────────────────────────────────────────────────────────────────────────────────

    def insert(
        self, keys: Sequence[PageKey], start: int, pages: Sequence[int], now: int, load: int = 0, priority: int = 0
    ) -> InsertResult:
        """Make keys[start : start + len(pages)] resident in these device pages; keys[:start] must be resident.

            keys    0 ......... start ......... have ......... start + len(pages)
                    resident    │  redundant    │   adopted    │

        `load` is the operation that still writes the adopted pages, 0 if none does. That operation holds a lock on
        them until its end: eviction asserts it. `priority` raises the deepest node's own and is that of new nodes.
        """
        end = start + len(pages)
        assert 0 <= start <= end <= len(keys), f"pages {start}..{end} of a request with {len(keys)}"
        have = min(self.match(keys, start), end)
        assert have >= start, f"pages from {start} on inserted, but only {have} before them are resident"
        node = self.deepest(keys, have)
        redundant = list(pages[: have - start])
        if redundant:
            ours = set(self.pages(keys, start, have)).intersection(redundant)
            assert not ours, f"pages {sorted(ours)} are the tree's already, not the caller's to insert"
        if have < end:
            fresh = keys[have:end]
            nodes = self._grow(node, fresh, pages[have - start :], now, priority)
            node = nodes[-1]
            if load:
                self._mark_load(load, nodes)
            self._order.push(node)
            if self._watches.arrivals:
                self._announce_arrivals(fresh)
        elif node:
            self.touch(node, now)
            if priority > self._order.priority[node]:
                self._order.priority[node] = priority
        return InsertResult(node, end - have, redundant)

    def _grow(self, node: int, keys: Sequence[PageKey], pages: Sequence[int], now: int, priority: int) -> list[int]:
        """A chain of new nodes below `node`; their ids, leading page first."""
        count = len(keys)
        unused = self._unused
        if len(unused) < count:
            self._add_ids(count)
        nodes = unused[: -count - 1 : -1]
        del unused[-count:]
        index, key_of, page_of, parent = self._index, self._key, self._page, self._parent
        first, order = self._first, self._order
        last, rank, seq = order.last, order.priority, order.seq
        sequence = self._sequence
        if sibling := first[node]:
            self._next[nodes[0]] = sibling
            self._prev[sibling] = nodes[0]
        for child, key, page in zip(nodes, keys, pages, strict=True):
            sequence += 1
            index[key] = child
            key_of[child] = key
            page_of[child] = page
            parent[child] = node
            first[node] = child
            last[child] = now
            rank[child] = priority
            seq[child] = sequence
            node = child
        self._sequence = sequence
        return nodes

    def _add_ids(self, count: int) -> None:
        size = len(self._key)
        count = max(count, size)  # doubling keeps the cost of growth constant per page
        self._key.extend([b""] * count)
        self._page.extend([-1] * count)
        for links in (self._parent, self._first, self._next, self._prev, self._locks, self._refs, self._load):
            links.extend([0] * count)
        self._order.add_ids(count)
        self._unused[:0] = range(size + count - 1, size - 1, -1)

    def _mark_load(self, load: int, nodes: list[int]) -> None:
        for node in nodes:
            self._load[node] = load
        self._loads[load] = self._loads.get(load, ()) + tuple(nodes)

    def landed(self, load: int) -> int:
        """The load has ended well: its pages hold their bytes. Returns how many of them are still in the tree."""
        nodes = self._loads.pop(load, ())
        for node in nodes:
            self._load[node] = 0
        return len(nodes)

    # ── protection ───────────────────────────────────────────────────────────────────────────────────

    def lock(self, node: int) -> None:
        """Keep this page and all before it until `unlock`. Locks count. The root needs none: a no-op."""
        if node == ROOT:
            return
        refs, parent = self._refs, self._parent
        assert self._is_page(node), f"node {node} is not resident"
        self._locks[node] += 1
        refs[node] += 1
        while refs[node] == 1:
            self._locked += 1
            node = parent[node]
            refs[node] += 1

    def unlock(self, node: int) -> None:
        """Take back one `lock` of the same node."""
        if node == ROOT:
            return
        refs, parent = self._refs, self._parent
        assert self._is_page(node) and self._locks[node], f"node {node} is not locked"
        self._locks[node] -= 1
        refs[node] -= 1
        if not refs[node] and not self._first[node]:
            self._order.push(node)
        while not refs[node]:
            self._locked -= 1
            node = parent[node]
            refs[node] -= 1

    def touch(self, node: int, now: int) -> None:
        """The prefix that ends here was used."""
        assert node == ROOT or self._is_page(node), f"node {node} is not resident"
        if now > self._order.last[node]:
            self._order.last[node] = now

    def set_pending(self, nodes: Iterable[int], pending: bool) -> None:
        """Mark pages whose backup is queued: eviction takes them only when nothing else is left.

        `ABSENT` is skipped: a page that is gone needs no protection. Node ids are used again after their page has
        left, so look unlocked ones up by key.
        """
        for node in nodes:
            if node == ABSENT:
                continue
            assert self._is_page(node), f"node {node} is not resident"
            self._order.pending[node] = pending
            self._order.lowered(node)
        self._order.trim(len(self._index))

    def set_priority(self, node: int, priority: int) -> None:
        """Pages of lower priority are evicted first. A page's parent inherits the higher priority when it leaves."""
        assert self._is_page(node), f"node {node} is not resident"
        self._order.priority[node] = priority
        self._order.lowered(node)
        self._order.trim(len(self._index))

    # ── shrinking ────────────────────────────────────────────────────────────────────────────────────

    def evict(self, count: int) -> Evicted:
        """Free up to `count` unlocked pages: leaves first, then not pending, low priority, least recently used."""
        order, first, refs = self._order, self._first, self._refs
        freed = Evicted([], [])
        while count > 0 and (node := order.pop(first, refs)) is not None:
            above = self._remove(node, freed)
            if not first[above] and not refs[above]:
                order.push(above)
            count -= 1
        self._evictions += len(freed.pages)
        order.trim(len(self._index))
        if self._watches.departures:
            self._announce_departures(freed.keys)
        return freed

    def remove_subtree(self, node: int) -> Evicted:
        """Take this page and all that continues it out of the tree, for a load that failed. Nothing in it is locked."""
        assert self._is_page(node), f"node {node} is not resident"
        assert self._refs[node] == 0, f"node {node} has {self._refs[node]} locks on it or below it"
        subtree = self.subtree(node)
        self._forget_loads(subtree)
        above = self._parent[node]
        freed = Evicted([], [])
        for gone in reversed(subtree):
            self._remove(gone, freed)
        if not self._first[above] and not self._refs[above]:
            self._order.push(above)
        self._order.trim(len(self._index))
        if self._watches.departures:
            self._announce_departures(freed.keys)
        return freed

    def clear(self) -> list[int]:
        """Empty the tree, for a flush; returns all its pages. Nothing may be locked."""
        assert self._locked == 0, f"{self._locked} of {self.resident} pages are locked"
        pages: list[int] = []
        while child := self._first[ROOT]:
            pages += self.remove_subtree(child).pages
        return pages

    def _remove(self, node: int, freed: Evicted) -> int:
        """Take an unlocked leaf out; its id becomes unused. Returns its parent."""
        assert not self._load[node], f"page {self._page[node]} would leave while load {self._load[node]} writes it"
        key, above = self._key[node], self._parent[node]
        freed.pages.append(self._page[node])
        freed.keys.append(key)
        del self._index[key]
        after, before = self._next[node], self._prev[node]
        if after:
            self._prev[after] = before
            self._next[node] = 0
        if before:
            self._next[before] = after
            self._prev[node] = 0
        else:
            self._first[above] = after
        self._key[node] = b""
        self._page[node] = -1
        self._order.leave(node, above)
        self._unused.append(node)
        return above

    def _forget_loads(self, nodes: list[int]) -> None:
        if not self._loads:
            return
        gone = set(nodes)
        for load in sorted({self._load[node] for node in nodes} - {0}):
            left = tuple(node for node in self._loads[load] if node not in gone)
            if left:
                self._loads[load] = left
            else:
                del self._loads[load]
        for node in nodes:
            self._load[node] = 0

    # ── watches ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def watch_touches(self) -> int:
        """Watchers told of a change so far, each once until it was taken."""
        return self._watches.touches

    def watch(self, watcher: int, keys: Sequence[PageKey], length: int) -> None:
        """Tell `watcher` when its match of `length` pages changes: its last page leaves, or its next one arrives.

        Replaces the watcher's earlier boundary. If the match is another already, it is told at once. The watch stays
        until `unwatch`; after it was told, match and watch again.
        """
        index = self._index
        self._watches.set(watcher, keys, length)
        lost = length > 0 and keys[length - 1] not in index
        if lost or (length < len(keys) and keys[length] in index):
            self._watches.notify((watcher,))

    def unwatch(self, watcher: int) -> None:
        """Forget a watcher, and what it has not been told yet. Not watching is fine."""
        self._watches.drop(watcher)

    def take_dirty(self) -> list[int]:
        """Watchers whose boundary has changed since they last watched or were taken, in ascending order."""
        return self._watches.take_dirty()

    def _announce_arrivals(self, keys: Sequence[PageKey]) -> None:
        watched = self._watches.arrivals
        for key in keys:
            if key in watched:
                self._watches.notify(watched.of(key))

    def _announce_departures(self, keys: Sequence[PageKey]) -> None:
        watched = self._watches.departures
        for key in keys:
            if key in watched:
                self._watches.notify(watched.of(key))

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────

    def check_invariants(self) -> list[str]:
        """Every violation found by recounting the whole tree; empty when all is well."""
        return check_tree(self)
