"""The prefix tree: matches, locks, eviction order, watches, and that each of its invariants bites.

`test_prefix_tree_model.py` holds it against a naive tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_fsm.ports import Namespace
from hicache_fsm.tree.keys import page_keys
from hicache_fsm.tree.prefix_tree import ABSENT, ROOT, PrefixTree

Chain = tuple[bytes, ...]


def chain(*tokens: int) -> Chain:
    return page_keys(tokens, 1)


def grow(tree: PrefixTree, keys: Chain, first_page: int, now: int = 0, **options: int) -> int:
    """Insert what is missing of a chain, with pages from `first_page` on; returns its deepest node."""
    have = tree.match(keys)
    return tree.insert(keys, have, range(first_page, first_page + len(keys) - have), now, **options).node


# ── match ────────────────────────────────────────────────────────────────────────────────────────────


@given(length=st.integers(0, 40), resident=st.integers(0, 40), hint=st.integers(-3, 60))
def test_a_hint_may_be_wrong_in_both_directions(length: int, resident: int, hint: int) -> None:
    keys = page_keys(range(length), 1)
    tree = PrefixTree()
    grow(tree, keys[:resident], 0)
    assert tree.match(keys, hint) == min(length, resident)


class CountingKeys(tuple[bytes, ...]):
    """A chain that counts how many of its keys are looked at."""

    looked: int = 0

    def __getitem__(self, at: Any) -> Any:
        CountingKeys.looked += 1
        return super().__getitem__(at)


@pytest.mark.parametrize(("hint", "probes"), [(600, 2), (601, 4), (590, 10), (0, 10)])
def test_a_match_is_a_search_and_a_right_hint_two_probes(hint: int, probes: int) -> None:
    keys = page_keys(range(1000), 1)
    tree = PrefixTree()
    grow(tree, keys[:600], 0)
    CountingKeys.looked = 0
    assert tree.match(CountingKeys(keys), hint) == 600
    assert CountingKeys.looked <= probes


@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize("filled", [False, True])
def test_BC_061_every_length_from_nothing_to_two_pages_and_one(filled: bool, salt: str | None, bigram: bool) -> None:
    """Below one page there is nothing to match, and no call minds."""
    size = 4
    space = Namespace(None, salt, bigram)
    for length in range(2 * size + 2):
        tree = PrefixTree()
        if filled:
            grow(tree, page_keys(range(4 * size), size, space), 0)
        keys = page_keys(range(length), size, space)
        matched = tree.match(keys, hint=length)
        assert matched == (max(0, length - bigram) // size if filled else 0)
        node = tree.deepest(keys, matched)
        assert (node == ROOT) == (matched == 0)
        tree.lock(node)
        tree.touch(node, 1)
        assert len(tree.pages(keys, 0, matched)) == matched
        assert tree.loads(keys, 0, matched) == set()
        tree.watch(0, keys, matched)
        tree.unlock(node)
        assert tree.insert(keys, matched, range(100, 100 + len(keys) - matched), 2).adopted == len(keys) - matched
        assert tree.take_dirty() == ([0] if len(keys) > matched else [])
        assert tree.check_invariants() == []


@pytest.mark.parametrize("matched", range(11))
def test_BC_059_a_look_up_starts_at_the_matched_length(matched: int) -> None:
    """The store holds all ten pages: whatever the device matches, and wherever others branch off, it hits the rest."""
    size, total = 4, 10
    tokens = list(range(size * total))
    keys = page_keys(tokens, size)
    store = set(keys)
    tree = PrefixTree()
    grow(tree, keys[:matched], 0)
    for branch in range(matched + 1):
        grow(tree, page_keys(tokens[: branch * size] + [7] * size, size), 50 + branch)
    base = tree.match(keys)
    again = page_keys(tokens[base * size :], size, prior=keys[base - 1] if base else None)
    assert again == keys[base:]
    assert sum(key in store for key in again) == total - matched


def test_namespaces_never_share_pages() -> None:
    spaces = [Namespace(), Namespace("lora"), Namespace(None, "a"), Namespace(None, "b"), Namespace(bigram=True)]
    tree = PrefixTree()
    requests = [page_keys([1] * 9, 2, space) for space in spaces]
    for number, keys in enumerate(requests):
        assert tree.match(keys) == 0
        grow(tree, keys, 10 * number)
    assert [tree.pages(keys, 0, 1) for keys in requests] == [[0], [10], [20], [30], [40]]


# ── insert ───────────────────────────────────────────────────────────────────────────────────────────


def test_of_two_requests_with_the_same_prompt_the_later_keeps_its_pages() -> None:
    tree = PrefixTree()
    grow(tree, chain(1, 2), 0)
    result = tree.insert(chain(1, 2, 3, 4), 0, [10, 11, 12, 13], now=1)
    assert result.redundant == [10, 11]
    assert result.adopted == 2
    assert tree.pages(chain(1, 2, 3, 4), 0, 4) == [0, 1, 12, 13]


def test_inserting_the_trees_own_pages_is_a_bug() -> None:
    """They would come back as redundant, be freed, and be handed out twice."""
    tree = PrefixTree()
    grow(tree, chain(1, 2), 5)
    with pytest.raises(AssertionError, match=r"pages \[6\] are the tree's already"):
        tree.insert(chain(1, 2, 3), 1, [6, 9], now=1)
    assert tree.match(chain(1, 2, 3)) == 2


def test_a_node_id_that_is_used_again_starts_afresh() -> None:
    tree = PrefixTree()
    node = grow(tree, chain(1), 0, priority=5)
    tree.set_pending([node], True)
    tree.touch(node, 99)
    assert tree.evict(1).keys == [chain(1)[0]]
    assert tree.node(chain(1)[0]) == ABSENT
    assert grow(tree, chain(2), 0, now=3) == node
    grow(tree, chain(3), 1, now=4)
    assert tree.evict(1).keys == [chain(2)[0]]


@pytest.mark.parametrize("node", [ABSENT, 2, 10_000])
@pytest.mark.parametrize("call", ["lock", "unlock", "touch", "set_priority", "remove_subtree"])
def test_calls_on_nodes_that_are_not_resident_are_bugs(call: str, node: int) -> None:
    tree = PrefixTree()
    grow(tree, chain(1, 2), 0)
    tree.evict(1)
    arguments = (node, 1) if call in ("touch", "set_priority") else (node,)
    with pytest.raises(AssertionError, match=f"node {node} is not (resident|locked)"):
        getattr(tree, call)(*arguments)
    assert tree.check_invariants() == []


def test_the_root_is_never_locked_evicted_or_removed() -> None:
    tree = PrefixTree()
    tree.lock(ROOT)
    tree.unlock(ROOT)
    assert tree.evict(1) == ([], [])
    with pytest.raises(AssertionError, match="node 0"):
        tree.remove_subtree(ROOT)


# ── locks, loads ─────────────────────────────────────────────────────────────────────────────────────


def test_a_lock_protects_its_prefix_and_nothing_else() -> None:
    tree = PrefixTree()
    grow(tree, chain(1, 2, 3, 4), 0)
    grow(tree, chain(1, 5), 10)
    tree.lock(tree.deepest(chain(1, 2), 2))
    assert (tree.locked, tree.evictable) == (2, 3)
    assert not tree.can_evict(4)
    assert sorted(tree.evict(9).pages) == [2, 3, 10]
    assert tree.match(chain(1, 2, 3)) == 2


def test_what_a_load_writes_is_never_evicted_silently() -> None:
    tree = PrefixTree()
    node = grow(tree, chain(1, 2), 0, load=7)
    assert tree.loads(chain(1, 2), 0, 2) == {7}
    assert any("could be evicted while load 7" in text for text in tree.check_invariants())
    with pytest.raises(AssertionError, match="while load 7 writes it"):
        tree.evict(1)
    tree.lock(node)
    assert tree.evict(2).pages == []
    assert tree.landed(7) == 2
    assert tree.loads(chain(1, 2), 0, 2) == set()


def test_a_failed_load_takes_its_span_out_and_leaves_its_other_spans() -> None:
    tree = PrefixTree()
    grow(tree, chain(1), 0)
    failed = grow(tree, chain(1, 2, 3), 10, load=7)
    grow(tree, chain(1, 4), 20, load=7)
    assert tree.remove_subtree(tree.parent(failed)).pages == [11, 10]
    assert tree.match(chain(1, 2, 3)) == 1
    assert tree.loads(chain(1, 4), 0, 2) == {7}
    assert tree.landed(7) == 1


def test_a_flush_waits_for_locks() -> None:
    tree = PrefixTree()
    tree.lock(grow(tree, chain(1), 0))
    with pytest.raises(AssertionError, match="1 of 1 pages are locked"):
        tree.clear()


# ── eviction order ───────────────────────────────────────────────────────────────────────────────────


def test_touching_the_end_of_a_path_keeps_the_whole_path() -> None:
    tree = PrefixTree()
    deep = grow(tree, chain(1, 2, 3), 0, now=1)
    grow(tree, chain(4), 10, now=2)
    grow(tree, chain(5), 11, now=3)
    tree.touch(deep, 4)
    tree.evict(2)
    assert tree.match(chain(1, 2, 3)) == 3
    grow(tree, chain(6), 12, now=3)
    assert tree.evict(1).pages == [12]
    assert tree.evict(9).pages == [2, 1, 0]


def test_pages_with_a_queued_backup_go_last() -> None:
    tree = PrefixTree()
    old = grow(tree, chain(1), 0, now=1)
    grow(tree, chain(2), 1, now=2)
    tree.set_pending([old, ABSENT], True)
    assert tree.evict(1).pages == [1]
    assert tree.can_evict(1)
    assert tree.evict(1).pages == [0]


@pytest.mark.parametrize("how", ["pending", "priority"])
def test_protection_that_ended_gives_the_old_place_back(how: str) -> None:
    tree = PrefixTree()
    old = grow(tree, chain(1), 0, now=1)
    grow(tree, chain(2), 1, now=2)

    def protect(on: bool) -> None:
        if how == "pending":
            tree.set_pending([old], on)
        else:
            tree.set_priority(old, 3 * on)

    protect(True)
    grow(tree, chain(3), 2, now=3)
    assert tree.evict(1).pages == [1]  # the old page came up and was put back behind the others
    protect(False)
    assert tree.check_invariants() == []
    assert tree.evict(1).pages == [0]


def test_a_leaf_that_was_passed_over_while_locked_is_found_again() -> None:
    tree = PrefixTree()
    node = grow(tree, chain(1), 0)
    tree.lock(node)
    assert tree.evict(1).pages == []
    tree.unlock(node)
    assert tree.evict(1).pages == [0]


def test_a_parent_inherits_the_use_of_what_leaves() -> None:
    tree = PrefixTree()
    failed = grow(tree, chain(1, 2), 0, now=1)
    grow(tree, chain(3), 5, now=2)
    tree.touch(failed, 3)
    tree.remove_subtree(failed)
    assert tree.evict(2).pages == [5, 0]


def test_lower_priority_goes_first_and_a_parent_matters_as_much_as_what_it_carried() -> None:
    tree = PrefixTree()
    grow(tree, chain(1), 0, now=1)
    carried = grow(tree, chain(1, 2), 1, now=1, priority=2)
    grow(tree, chain(3), 2, now=2, priority=1)
    grow(tree, chain(4), 3, now=3)
    assert tree.evict(1).pages == [3]
    assert tree.remove_subtree(carried).pages == [1]
    assert tree.evict(2).pages == [2, 0]


def test_a_repeated_prompt_raises_the_priority_of_what_is_there() -> None:
    tree = PrefixTree()
    grow(tree, chain(1), 0, now=1)
    grow(tree, chain(2), 1, now=2)
    assert tree.insert(chain(1), 0, [7], now=1, priority=1).redundant == [7]
    assert tree.evict(2).pages == [1, 0]


@pytest.mark.parametrize("action", ["lock", "pending", "priority", "regrow"])
def test_the_heap_does_not_grow_with_what_comes_and_goes(action: str) -> None:
    tree = PrefixTree()
    grow(tree, chain(1, 2), 0)
    node = tree.deepest(chain(1, 2), 2)
    for turn in range(500):
        if action == "lock":
            tree.lock(node)
            tree.unlock(node)
        elif action == "pending":
            tree.set_pending([node], turn % 2 == 0)
            tree.evict(0)
        elif action == "priority":
            tree.set_priority(node, -turn)
        else:
            tree.remove_subtree(grow(tree, chain(1, 2, 3), 5, now=turn))
    assert tree.check_invariants() == []  # bounds the heap


# ── watches ──────────────────────────────────────────────────────────────────────────────────────────


def test_ten_thousand_watchers_cost_nothing_while_other_parts_change() -> None:
    tree = PrefixTree()
    grow(tree, chain(1, 2), 0)
    for watcher in range(10_000):
        tree.watch(watcher, chain(1, 2, 3), 2)
    for turn in range(50):
        tree.lock(grow(tree, chain(9, turn), 100 + 2 * turn, now=turn))
        tree.remove_subtree(grow(tree, chain(9, turn, 1), 500, now=turn))
    assert tree.watch_touches == 0
    tree.insert(chain(1, 2, 3), 2, [7], now=99)
    assert tree.take_dirty() == list(range(10_000))
    assert tree.watch_touches == 10_000


def test_a_watcher_is_told_once_and_not_after_it_left() -> None:
    tree = PrefixTree()
    for watcher in (5, 3, 4):
        tree.watch(watcher, chain(1, 2), 0)
    grow(tree, chain(1), 0)
    tree.evict(1)
    grow(tree, chain(1), 0)
    tree.unwatch(4)
    assert tree.take_dirty() == [3, 5]
    assert tree.watch_touches == 3


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_watchers_of_one_key_leave_in_any_order(order: tuple[int, ...]) -> None:
    tree = PrefixTree()
    for watcher in range(4):
        tree.watch(watcher, chain(1, 2), 0)
    left = set(range(4))
    for watcher in order[:3]:
        tree.unwatch(watcher)
        left.discard(watcher)
        assert tree.check_invariants() == []
    grow(tree, chain(1), 0)
    assert tree.take_dirty() == sorted(left)
    tree.unwatch(order[3])
    assert tree.check_invariants() == []


def test_watching_anew_forgets_what_the_old_boundary_had_to_tell() -> None:
    tree = PrefixTree()
    tree.watch(1, chain(1, 2), 0)
    grow(tree, chain(1), 0)
    tree.watch(1, chain(1, 2), 1)
    assert tree.take_dirty() == []
    tree.evict(1)
    assert tree.take_dirty() == [1]


def test_a_watch_on_a_boundary_that_has_moved_already_tells_at_once() -> None:
    tree = PrefixTree()
    grow(tree, chain(1), 0)
    tree.watch(1, chain(1, 2), 0)
    tree.watch(2, chain(1, 2), 2)
    assert tree.take_dirty() == [1, 2]


# ── every invariant bites ────────────────────────────────────────────────────────────────────────────


def sample() -> PrefixTree:
    """Root with two branches; a locked path, a load in flight, a watcher, an unused id.

    Node ids: 1-2-3 is chain (1, 2, 3), 4 below 1 is (1, 4), 5 is (5,), 6 is (6,), under load 9 and locked.
    """
    tree = PrefixTree()
    grow(tree, chain(1, 2, 3), 0)
    grow(tree, chain(1, 4), 3)
    grow(tree, chain(5), 4)
    tree.lock(grow(tree, chain(6), 5, load=9))
    tree.lock(tree.deepest(chain(1, 2), 2))
    tree.watch(0, chain(1, 2, 3, 4), 3)
    tree.watch(1, chain(1, 2, 3, 4), 3)
    return tree


CORRUPTIONS: dict[str, tuple[Callable[[PrefixTree], object], str]] = {
    "shared node": (lambda t: t._index.update({b"x": 1}), "keys share"),
    "lost id": (lambda t: t._unused.pop(), "do not partition"),
    "double unused": (lambda t: t._unused.append(t._unused[0]), "listed twice"),
    "wrong key": (lambda t: t._key.__setitem__(5, b"x"), "its key is another"),
    "no sequence": (lambda t: t._order.seq.__setitem__(5, 0), "has sequence 0"),
    "stale state": (lambda t: t._order.pending.__setitem__(t._unused[0], True), "has state left"),
    "stale lock": (lambda t: t._locks.__setitem__(t._unused[0], 1), "has links or locks left"),
    "wrong parent": (lambda t: t._parent.__setitem__(4, 5), "is not its child"),
    "wrong back link": (lambda t: t._prev.__setitem__(4, 5), "has back link"),
    "circle": (lambda t: t._next.__setitem__(2, 4), "as a child twice"),
    "orphan": (lambda t: t._first.__setitem__(2, 0), "its prefix is not resident"),
    "age": (lambda t: t._order.seq.__setitem__(4, 1), "older than its parent"),
    "page twice": (lambda t: t._page.__setitem__(4, 0), "page 0 is held by 2 nodes"),
    "no page": (lambda t: t._page.__setitem__(4, -1), "holds page -1"),
    "refs": (lambda t: t._refs.__setitem__(2, 2), "node 2 has refs 2, recounted 1"),
    "own locks": (lambda t: t._locks.__setitem__(3, 1), "node 3 has refs 0, recounted 1"),
    "root refs": (lambda t: t._refs.__setitem__(0, 1), "the root has refs 1, recounted 3"),
    "locked counter": (lambda t: setattr(t, "_locked", 2), "2 pages counted as locked, recounted 3"),
    "load index": (lambda t: t._loads.clear(), "which does not list it"),
    "load mark": (lambda t: t._load.__setitem__(6, 0), "is marked 0"),
    "load entry": (lambda t: t._loads.update({8: ()}), "entry of 0 nodes"),
    "load unlocked": (lambda t: t.unlock(6), "could be evicted while load 9"),
    "no candidate": (lambda t: t._order.entry.__setitem__(4, None), "evictable leaf 4 is no candidate"),
    "lost candidate": (lambda t: t._order.heap.clear(), "is not in the heap"),
    "ranked late": (lambda t: t._order.priority.__setitem__(4, -1), "later than"),
    "heap order": (lambda t: t._order.heap.reverse(), "order is broken"),
    "heap size": (lambda t: t._order.heap.extend([max(t._order.heap)] * 99), "entries for 6 pages"),
    "watch head": (lambda t: t._watches.departures._head.clear(), "watchers without a list entry"),
    "watch key": (lambda t: t._watches.arrivals._key.__setitem__(0, b"x"), "does not stand on"),
    "watch links": (lambda t: t._watches.arrivals._before.__setitem__(0, 7), "wrong back link"),
    "watch circle": (lambda t: t._watches.arrivals._after.__setitem__(0, 1), "is listed twice"),
    "watch leftovers": (lambda t: t._watches.arrivals._after.__setitem__(5, -1), "links and watchers differ"),
    "dirty stranger": (lambda t: t._watches.dirty.update({5: None}), "watches nothing"),
    "lost departure": (lambda t: t._watches.set(2, [b"x"], 1), "not told that its last page left"),
    "lost arrival": (lambda t: t._watches.set(2, chain(1), 0), "not told that its next page arrived"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_invariant_bites(name: str) -> None:
    corrupt, says = CORRUPTIONS[name]
    tree = sample()
    assert tree.check_invariants() == []
    assert tree._unused
    corrupt(tree)
    assert re.search(says, "\n".join(tree.check_invariants())), tree.check_invariants()
