"""Which leaf of the tree goes next: not pending, low priority, least recently used, oldest.

The heap is lazy. Each node has at most one live entry, never later than its present rank: a node whose rank has risen
is put back when it comes up, and one that is locked or has children is dropped then, and pushed again when that ends.
So touching, locking and growing cost nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import TypeAlias

HEAP_SLACK = 64  # dead entries that are never worth a sweep

Rank: TypeAlias = tuple[bool, int, int, int, int]  # pending, priority, last access, sequence, node


class EvictionOrder:
    """Rank of every node, and the heap of candidates. Lists are indexed by node id."""

    __slots__ = ("entry", "heap", "last", "pending", "priority", "seq")

    def __init__(self) -> None:
        # The root is node 0. An unused id has sequence -1, which no live node has: entries of an earlier life of an
        # id are told apart by it.
        self.last: list[int] = [0]
        self.priority: list[int] = [0]
        self.pending: list[bool] = [False]
        self.seq: list[int] = [0]
        self.entry: list[Rank | None] = [None]  # the node's live entry in the heap
        self.heap: list[Rank] = []

    def add_ids(self, count: int) -> None:
        self.last.extend([0] * count)
        self.priority.extend([0] * count)
        self.pending.extend([False] * count)
        self.seq.extend([-1] * count)
        self.entry.extend([None] * count)

    def rank(self, node: int) -> Rank:
        return (self.pending[node], self.priority[node], self.last[node], self.seq[node], node)

    def push(self, node: int) -> None:
        """Make an unlocked leaf a candidate, unless it is one."""
        if self.entry[node] is None:
            self.entry[node] = rank = self.rank(node)
            heappush(self.heap, rank)

    def lowered(self, node: int) -> None:
        """The rank of a node may have fallen: its entry must not be later."""
        entry = self.entry[node]
        if entry is not None and self.rank(node) < entry:
            self.entry[node] = None
            self.push(node)

    def pop(self, child: Sequence[int], refs: Sequence[int]) -> int | None:
        """The next leaf to go, which stops being a candidate; None if every page left is locked."""
        heap, live = self.heap, self.entry
        pending, priority, last = self.pending, self.priority, self.last
        while heap:
            entry = heappop(heap)
            node = entry[4]
            if live[node] != entry:
                continue
            live[node] = None
            if child[node] or refs[node]:
                continue
            rank = (pending[node], priority[node], last[node], entry[3], node)
            if rank == entry:
                return node
            live[node] = rank
            heappush(heap, rank)
        return None

    def leave(self, node: int, above: int) -> None:
        """A leaf goes; its parent was used whenever it was, and matters at least as much."""
        if self.last[node] > self.last[above]:
            self.last[above] = self.last[node]
        if self.priority[node] > self.priority[above]:
            self.priority[above] = self.priority[node]
        self.seq[node] = -1
        self.pending[node] = False
        self.entry[node] = None

    def trim(self, live: int) -> None:
        """Sweep dead entries once they outnumber the `live` pages; making them cost more than that does."""
        if len(self.heap) > 2 * live + HEAP_SLACK:
            self.heap = [entry for entry in dict.fromkeys(self.heap) if self.entry[entry[4]] == entry]
            heapify(self.heap)
