"""The prefix tree against a naive one: the same calls on both, and after every call they agree.

`Twins` makes the calls. Hypothesis drives it to find short failing sequences; a seeded walk drives it far, because
some faults of a lazy heap need an unlikely order of many calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from hicache_fsm.ports import DEFAULT_NAMESPACE, Namespace
from hicache_fsm.tree.keys import page_keys
from hicache_fsm.tree.prefix_tree import PrefixTree

Chain = tuple[bytes, ...]
T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]

SPACES = (DEFAULT_NAMESPACE, Namespace(cache_salt="tenant"))


@dataclass
class Page:
    page: int
    above: bytes  # parent key, empty at the root
    last: int
    priority: int
    order: int
    locks: int = 0
    pending: bool = False
    load: int = 0


class Model:
    """A dict of pages. Everything is recounted whenever it is asked for, and a touch stamps the whole path."""

    def __init__(self) -> None:
        self.pages: dict[bytes, Page] = {}
        self.made = 0

    def match(self, keys: Chain) -> int:
        length = 0
        while length < len(keys) and keys[length] in self.pages:
            length += 1
        return length

    def path(self, key: bytes) -> list[bytes]:
        found = []
        while key:
            found.append(key)
            key = self.pages[key].above
        return found

    def below(self, top: bytes) -> list[bytes]:
        """The subtree of a page, deepest first."""
        found = [key for key in self.pages if top in self.path(key)]
        return sorted(found, key=lambda key: -len(self.path(key)))

    def locked(self) -> set[bytes]:
        return {above for key, page in self.pages.items() if page.locks for above in self.path(key)}

    def touch(self, key: bytes, now: int) -> None:
        for above in self.path(key):
            self.pages[above].last = max(self.pages[above].last, now)

    def insert(self, keys: Chain, start: int, pages: Sequence[int], now: int, load: int, priority: int) -> list[int]:
        """The pages that are redundant."""
        redundant = []
        for at, page in enumerate(pages, start):
            if keys[at] in self.pages:
                redundant.append(page)
                continue
            self.made += 1
            self.pages[keys[at]] = Page(page, keys[at - 1] if at else b"", now, priority, self.made, load=load)
        if end := start + len(pages):
            deepest = self.pages[keys[end - 1]]
            self.touch(keys[end - 1], now)
            deepest.priority = max(deepest.priority, priority)
        return redundant

    def remove(self, key: bytes) -> int:
        gone = self.pages.pop(key)
        if gone.above:
            above = self.pages[gone.above]
            above.priority = max(above.priority, gone.priority)
        return gone.page

    def evict(self, count: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < count:
            inner = {page.above for page in self.pages.values()}
            leaves = [key for key, page in self.pages.items() if key not in inner and not page.locks]
            if not leaves:
                break
            freed.append(self.remove(min(leaves, key=self.rank)))
        return freed

    def rank(self, key: bytes) -> tuple[bool, int, int, int]:
        page = self.pages[key]
        return (page.pending, page.priority, page.last, page.order)


class Twins:
    """Both trees, what the callers of the real one would remember, and every call on both."""

    def __init__(self, tokens: int, depth: int) -> None:
        self.tokens, self.depth = range(tokens), range(depth + 1)
        self.tree, self.model = PrefixTree(), Model()
        self.now = self.next_page = self.next_load = 0
        self.in_flight: dict[int, Chain] = {}  # load -> the chain on whose deepest page it holds a lock
        self.watched: dict[int, tuple[Chain, int]] = {}
        self.dirty: set[int] = set()
        self.touches = 0
        self.before: set[bytes] = set()
        self.keys: Chain = ()

    def chain(self, choose: Choose[int]) -> Chain:
        tokens = [choose(self.tokens) for _ in range(choose(self.depth))]
        self.keys = page_keys(tokens, 1, SPACES[choose((0, 0, 1))])
        return self.keys

    def insert(self, choose: Choose[int]) -> None:
        """From any resident length on, some pages of a chain; every third time they are still being loaded."""
        keys = self.chain(choose)
        self.now += choose(range(3))
        have = self.model.match(keys)
        start = choose((have, have, *range(have + 1)))
        count = choose(range(len(keys) - start + 1))
        pages = list(range(self.next_page, self.next_page + count))
        self.next_page += count
        self.next_load += 1
        load, priority = choose((0, 0, self.next_load)), choose((0, 0, 0, 1, 2))
        result = self.tree.insert(keys, start, pages, self.now, load, priority)
        redundant = self.model.insert(keys, start, pages, self.now, load, priority)
        assert result == (self.tree.deepest(keys, start + count), count - len(redundant), redundant)
        if load and result.adopted:
            self.tree.lock(result.node)
            self.model.pages[keys[start + count - 1]].locks += 1
            self.in_flight[load] = keys[: start + count]

    def insert_without_parent(self, choose: Choose[int]) -> None:
        keys = self.chain(choose)
        have = self.model.match(keys)
        if have + 1 < len(keys):
            with pytest.raises(AssertionError, match=f"only {have} before them are resident"):
                self.tree.insert(keys, have + 1, [self.next_page], self.now)

    def land(self, choose: Choose[int]) -> None:
        if not self.in_flight:
            return
        load = choose(sorted(self.in_flight))
        keys = self.in_flight.pop(load)
        marked = [page for page in self.model.pages.values() if page.load == load]
        assert self.tree.landed(load) == len(marked) > 0
        assert self.tree.landed(load) == 0
        for page in marked:
            page.load = 0
        self.unlock_key(keys[-1])

    def fail(self, choose: Choose[int]) -> None:
        """The span of a failed load leaves, with all below it; but not under somebody's lock."""
        if not self.in_flight:
            return
        load = choose(sorted(self.in_flight))
        keys = self.in_flight[load]
        top = next(key for key in keys if self.model.pages[key].load == load)
        span = self.model.below(top)
        assert {self.tree.node(key) for key in span} == set(self.tree.subtree(self.tree.node(top)))
        if any(self.model.pages[key].locks > (key == keys[-1]) for key in span):
            with pytest.raises(AssertionError, match="locks on it or below it"):
                self.tree.remove_subtree(self.tree.node(top))
            return
        del self.in_flight[load]
        self.unlock_key(keys[-1])
        self.drop(top)

    def remove_subtree(self, choose: Choose[int]) -> None:
        locked = self.model.locked()
        if free := [key for key in self.model.pages if key not in locked]:
            self.drop(free[choose(range(len(free)))])

    def drop(self, top: bytes) -> None:
        freed = self.tree.remove_subtree(self.tree.node(top))
        expected = {key: self.model.remove(key) for key in self.model.below(top)}
        assert dict(zip(freed.keys, freed.pages, strict=True)) == expected
        assert len(freed.keys) == len(expected)

    def page(self, choose: Choose[int]) -> bytes | None:
        pages = list(self.model.pages)
        return pages[choose(range(len(pages)))] if pages else None

    def lock(self, choose: Choose[int]) -> None:
        if key := self.page(choose):
            self.tree.lock(self.tree.node(key))
            self.model.pages[key].locks += 1

    def unlock_key(self, key: bytes) -> None:
        self.tree.unlock(self.tree.node(key))
        self.model.pages[key].locks -= 1

    def unlock(self, choose: Choose[int]) -> None:
        """A lock that no load holds."""
        held = [keys[-1] for keys in self.in_flight.values()]
        if free := [key for key, page in self.model.pages.items() if page.locks > held.count(key)]:
            self.unlock_key(free[choose(range(len(free)))])

    def unlock_wrongly(self, choose: Choose[int]) -> None:
        if (key := self.page(choose)) and not self.model.pages[key].locks:
            with pytest.raises(AssertionError, match="is not locked"):
                self.tree.unlock(self.tree.node(key))

    def touch(self, choose: Choose[int]) -> None:
        if key := self.page(choose):
            now = self.now + choose(range(-2, 4))
            self.tree.touch(self.tree.node(key), now)
            self.model.touch(key, now)

    def set_pending(self, choose: Choose[int]) -> None:
        keys, pending = self.chain(choose), choose((0, 1)) == 1
        self.tree.set_pending([self.tree.node(key) for key in keys], pending)
        for key in keys[: self.model.match(keys)]:
            self.model.pages[key].pending = pending

    def set_priority(self, choose: Choose[int]) -> None:
        if key := self.page(choose):
            priority = choose((0, 1, 2, -1))
            self.tree.set_priority(self.tree.node(key), priority)
            self.model.pages[key].priority = priority

    def evict(self, choose: Choose[int]) -> None:
        count = choose((1, 1, 2, 3, 5, 0))
        free = len(self.model.pages) - len(self.model.locked())
        assert self.tree.can_evict(count) == (count <= free)
        keys = {page.page: key for key, page in self.model.pages.items()}
        freed = self.tree.evict(count)
        assert freed.pages == self.model.evict(count)
        assert len(freed.pages) == min(count, free)
        assert freed.keys == [keys[page] for page in freed.pages]

    def clear(self, choose: Choose[int]) -> None:
        """Seldom, and only when nothing is locked."""
        if choose(range(8)) == 0 and not self.model.locked():
            assert sorted(self.tree.clear()) == sorted(page.page for page in self.model.pages.values())
            self.model.pages.clear()

    def watch(self, choose: Choose[int]) -> None:
        """Mostly at the match, now and then elsewhere: then the watcher is told at once."""
        watcher, keys = choose(range(6)), self.chain(choose)
        match = self.model.match(keys)
        length = choose((match, match, match, *range(len(keys) + 1)))
        self.tree.watch(watcher, keys, length)
        self.watched[watcher] = (keys, length)
        self.dirty.discard(watcher)
        resident = self.model.pages
        if (length and keys[length - 1] not in resident) or (length < len(keys) and keys[length] in resident):
            self.tell(watcher)

    def tell(self, watcher: int) -> None:
        self.touches += watcher not in self.dirty
        self.dirty.add(watcher)

    def unwatch(self, choose: Choose[int]) -> None:
        watcher = choose(range(6))
        self.tree.unwatch(watcher)
        self.watched.pop(watcher, None)
        self.dirty.discard(watcher)

    def take_dirty(self, choose: Choose[int]) -> None:
        assert self.tree.take_dirty() == sorted(self.dirty)
        assert self.tree.take_dirty() == []
        self.dirty.clear()

    def match(self, choose: Choose[int]) -> None:
        keys = self.chain(choose)
        assert self.tree.match(keys, choose(range(-1, 10))) == self.model.match(keys)

    def settle(self) -> None:
        """Who must have been told of the call, by comparing what was resident before and after it; then all counts."""
        tree, model = self.tree, self.model
        after = set(model.pages)
        left, arrived = self.before - after, after - self.before
        self.before = after
        for watcher, (keys, length) in self.watched.items():
            if (length and keys[length - 1] in left) or (length < len(keys) and keys[length] in arrived):
                self.tell(watcher)
        assert tree.check_invariants() == []
        assert (tree.resident, tree.locked) == (len(after), len(model.locked()))
        assert tree.evictable == tree.resident - tree.locked
        assert tree.watch_touches == self.touches
        keys, length = self.keys, model.match(self.keys)
        pages = [model.pages[key] for key in keys[:length]]
        assert tree.match(keys) == length
        assert tree.pages(keys, 0, length) == [page.page for page in pages]
        assert tree.loads(keys, 0, length) == {page.load for page in pages} - {0}


CALLS: dict[Callable[[Twins, Choose[int]], None], int] = {  # call -> how often
    Twins.insert: 6,
    Twins.insert_without_parent: 1,
    Twins.land: 2,
    Twins.fail: 1,
    Twins.remove_subtree: 1,
    Twins.lock: 2,
    Twins.unlock: 3,
    Twins.unlock_wrongly: 1,
    Twins.touch: 3,
    Twins.set_pending: 2,
    Twins.set_priority: 1,
    Twins.evict: 4,
    Twins.clear: 1,
    Twins.watch: 4,
    Twins.unwatch: 1,
    Twins.take_dirty: 1,
    Twins.match: 1,
}


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins(tokens=2, depth=4)

    @rule(call=st.sampled_from(list(CALLS)), data=st.data())
    def step(self, call: Callable[[Twins, Choose[int]], None], data: st.DataObject) -> None:
        call(self.twins, lambda options: data.draw(st.sampled_from(options)))
        self.twins.settle()


TestTreeAgainstModel = TreeMachine.TestCase
TestTreeAgainstModel.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize(("seed", "tokens", "depth"), [(1, 2, 4), (2, 3, 6), (3, 2, 8), (4, 4, 3)])
def test_a_long_walk_keeps_the_trees_equal(seed: int, tokens: int, depth: int) -> None:
    source = random.Random(seed)
    twins = Twins(tokens, depth)
    calls, weights = list(CALLS), list(CALLS.values())
    for call in source.choices(calls, weights, k=6000):
        call(twins, source.choice)
        twins.settle()
    # The walk was worth its time: it evicted, and it woke watchers.
    assert twins.tree.evictions > 300
    assert twins.touches > 300


def test_the_whole_eviction_order_of_a_large_tree_is_that_of_the_model() -> None:
    source = random.Random(11)
    twins = Twins(tokens=3, depth=9)
    for _ in range(600):
        twins.insert(source.choice)
        twins.touch(source.choice)
    while twins.in_flight:
        twins.land(source.choice)
    assert twins.tree.evictable == twins.tree.resident > 300
    assert [twins.tree.evict(1).pages[0] for _ in range(twins.tree.resident)] == twins.model.evict(10_000)
