"""Recounts a prefix tree by brute force. Reads its private state on purpose; nothing else does."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hicache_fsm.tree.eviction import HEAP_SLACK

if TYPE_CHECKING:
    from hicache_fsm.tree.prefix_tree import PrefixTree


def check_tree(tree: PrefixTree) -> list[str]:
    """All violations, from all parts."""
    found = _check_index(tree)
    if found:
        return found  # the rest reads the nodes that the index names
    for part in (_check_shape, _check_locks, _check_loads, _check_heap, _check_watches):
        found += part(tree)
    return found


def _check_index(tree: PrefixTree) -> list[str]:
    """The index, the live ids and the unused ids say the same."""
    found: list[str] = []
    size = len(tree._key)
    unused = tree._unused
    nodes = list(tree._index.values())
    if len(set(nodes)) != len(nodes):
        found.append(f"index: {len(nodes)} keys share {len(set(nodes))} nodes")
    if len(set(unused)) != len(unused):
        found.append("index: an unused id is listed twice")
    if {0, *nodes, *unused} != set(range(size)) or 1 + len(nodes) + len(unused) != size:
        found.append(f"index: root + {len(nodes)} live + {len(unused)} unused ids do not partition {size}")
        return found
    for key, node in tree._index.items():
        if tree._key[node] != key:
            found.append(f"index: node {node} is indexed under {key.hex()[:8]}, but its key is another")
    for node in nodes:
        if not 0 < tree._order.seq[node] <= tree._sequence:
            found.append(f"index: live node {node} has sequence {tree._order.seq[node]}")
    order = tree._order
    for node in unused:
        if order.seq[node] != -1 or order.entry[node] is not None or order.pending[node] or tree._load[node]:
            found.append(f"index: unused id {node} has state left")
        if tree._refs[node] or tree._locks[node] or tree._first[node] or tree._next[node] or tree._prev[node]:
            found.append(f"index: unused id {node} has links or locks left")
    return found


def _check_shape(tree: PrefixTree) -> list[str]:
    """Every resident page hangs on a resident one, in exactly one child list; no page is there twice."""
    found: list[str] = []
    live = {0, *tree._index.values()}
    listed: Counter[int] = Counter()
    for above in live:
        before, child = 0, tree._first[above]
        while child:
            listed[child] += 1
            if listed[child] > 1:
                found.append(f"shape: node {child} is listed as a child twice")
                break
            if child not in live or tree._parent[child] != above:
                found.append(f"shape: node {child} is listed below {above}, but is not its child")
            if tree._prev[child] != before:
                found.append(f"shape: node {child} has back link {tree._prev[child]}, not {before}")
            before, child = child, tree._next[child]
    for node in tree._index.values():
        if not listed[node]:
            found.append(f"shape: node {node} is in no child list; its prefix is not resident")
        elif tree._order.seq[tree._parent[node]] >= tree._order.seq[node]:
            found.append(f"shape: node {node} is older than its parent {tree._parent[node]}")
    pages = Counter(tree._page[node] for node in tree._index.values())
    found += [f"shape: device page {page} is held by {count} nodes" for page, count in pages.items() if count > 1]
    found += [f"shape: a node holds page {page}" for page in pages if page < 0]
    return found


def _check_locks(tree: PrefixTree) -> list[str]:
    """refs = own locks + children with refs, and the counters equal a recount."""
    found: list[str] = []
    refs: Counter[int] = Counter()
    # Children are younger than their parents, so descending age visits them first.
    for node in sorted(tree._index.values(), key=lambda node: -tree._order.seq[node]):
        refs[node] += tree._locks[node]
        if tree._locks[node] < 0 or refs[node] != tree._refs[node]:
            found.append(f"locks: node {node} has refs {tree._refs[node]}, recounted {refs[node]}")
        if refs[node] > 0:
            refs[tree._parent[node]] += 1
    if tree._refs[0] != 1 + refs[0]:
        found.append(f"locks: the root has refs {tree._refs[0]}, recounted {1 + refs[0]}")
    locked = sum(1 for node in tree._index.values() if refs[node] > 0)
    if tree.locked != locked:
        found.append(f"locks: {tree.locked} pages counted as locked, recounted {locked}")
    if tree.resident != tree.locked + tree.evictable:
        found.append(f"locks: {tree.resident} resident != {tree.locked} locked + {tree.evictable} evictable")
    return found


def _check_loads(tree: PrefixTree) -> list[str]:
    """Loads and nodes name each other, and what a load still writes cannot be evicted."""
    found: list[str] = []
    for load, nodes in tree._loads.items():
        if load == 0 or not nodes or len(set(nodes)) != len(nodes):
            found.append(f"loads: load {load} has an entry of {len(nodes)} nodes")
        found += [f"loads: node {n} of load {load} is marked {tree._load[n]}" for n in nodes if tree._load[n] != load]
    for node in tree._index.values():
        load = tree._load[node]
        if load and node not in tree._loads.get(load, ()):
            found.append(f"loads: node {node} is marked with load {load}, which does not list it")
        if load and not tree._refs[node]:
            found.append(f"loads: page {tree._page[node]} could be evicted while load {load} writes it")
    return found


def _check_heap(tree: PrefixTree) -> list[str]:
    """Every leaf that may be evicted is a candidate, none is ranked later than it is, and the heap is one."""
    found: list[str] = []
    heap = tree._order.heap
    entries = set(heap)
    for node in tree._index.values():
        entry = tree._order.entry[node]
        if entry is None:
            if not tree._first[node] and not tree._refs[node]:
                found.append(f"heap: evictable leaf {node} is no candidate")
            continue
        rank = tree._order.rank(node)
        if entry not in entries:
            found.append(f"heap: the entry of node {node} is not in the heap")
        if entry > rank or entry[3:] != rank[3:]:
            found.append(f"heap: node {node} is ranked {entry}, later than {rank}")
    if any(heap[(at - 1) >> 1] > heap[at] for at in range(1, len(heap))):
        found.append("heap: order is broken")
    if len(heap) > 2 * tree.resident + HEAP_SLACK:
        found.append(f"heap: {len(heap)} entries for {tree.resident} pages")
    return found


def _check_watches(tree: PrefixTree) -> list[str]:
    """The watch index is symmetric, and whoever has not been told still stands where its match ends."""
    watches = tree._watches
    found = [f"watches: {text}" for text in watches.check_invariants()]
    for watcher in watches.waiting():
        leaving, arriving = watches.departures.key_of(watcher), watches.arrivals.key_of(watcher)
        if leaving is not None and leaving not in tree._index:
            found.append(f"watches: watcher {watcher} was not told that its last page left")
        if arriving is not None and arriving in tree._index:
            found.append(f"watches: watcher {watcher} was not told that its next page arrived")
    return found
