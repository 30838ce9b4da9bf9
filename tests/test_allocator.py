"""Page allocators: all or nothing, nothing twice, and every page either free or out."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache_fsm.pools.allocator import Gauge, PageAllocator, PoolSet
from hicache_fsm.ports import Pool


def state(pool: PageAllocator) -> tuple[list[int], list[bool], int]:
    return (list(pool._free), list(pool._owned), pool.version)


class AllocatorMachine(RuleBasedStateMachine):
    """Against a set of pages that are out."""

    @initialize(capacity=st.integers(0, 12))
    def start(self, capacity: int) -> None:
        self.pool = PageAllocator(capacity)
        self.out: list[int] = []
        self.frees = 0

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        room = self.pool.capacity - len(self.out)
        assert self.pool.can_allocate(count) == (count <= room)
        pages = self.pool.allocate(count)
        if count > room:
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == count
        assert not set(pages) & set(self.out)
        assert set(pages) <= set(range(self.pool.capacity))
        self.out += pages

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.out), unique=True)) if self.out else []
        self.pool.free(pages)
        self.out = [page for page in self.out if page not in pages]
        self.frees += bool(pages)

    @rule(data=st.data(), bad=st.integers(-2, 14))
    def free_wrongly(self, data: st.DataObject, bad: int) -> None:
        """A list with one page that is not out, or one that is named twice, changes nothing."""
        good = data.draw(st.lists(st.sampled_from(self.out), unique=True)) if self.out else []
        if bad in self.out and bad not in good:
            good.append(bad)
        before = state(self.pool)
        with pytest.raises(AssertionError, match=rf"page {bad} is (free already|not of this pool)"):
            self.pool.free([*good, bad])
        assert state(self.pool) == before

    @invariant()
    def all_is_counted(self) -> None:
        assert self.pool.check_invariants() == []
        assert self.pool.used == len(self.out)
        assert self.pool.available == self.pool.capacity - len(self.out)
        assert self.pool.version == self.frees


TestAllocator = AllocatorMachine.TestCase


def test_pages_come_out_lowest_first_and_the_last_freed_comes_first() -> None:
    pool = PageAllocator(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([0, 2])
    assert pool.allocate(3) == [0, 2, 3]


def test_the_version_tells_whether_asking_again_is_worth_it() -> None:
    pool = PageAllocator(2)
    pages = pool.allocate(2)
    assert pages == [0, 1]
    assert pool.version == 0
    pool.free([])
    assert pool.version == 0
    pool.free(pages)
    assert pool.version == 1


def corrupt_duplicate(pool: PageAllocator) -> None:
    pool._free.append(pool._free[-1])


def corrupt_owned_and_free(pool: PageAllocator) -> None:
    pool._owned[pool._free[0]] = True


def corrupt_leak(pool: PageAllocator) -> None:
    pool._free.pop()


def corrupt_lost_flag(pool: PageAllocator) -> None:
    pool._owned[0] = False


def corrupt_foreign(pool: PageAllocator) -> None:
    pool._free[0] = 99


def corrupt_capacity(pool: PageAllocator) -> None:
    pool._capacity += 1


@pytest.mark.parametrize(
    ("corrupt", "says"),
    [
        (corrupt_duplicate, "1 duplicates"),
        (corrupt_owned_and_free, "free and owned"),
        (corrupt_leak, "neither free nor owned"),
        (corrupt_lost_flag, r"2 free \+ 1 owned != capacity 4"),
        (corrupt_foreign, "outside 0..3"),
        (corrupt_capacity, "4 flags for a capacity of 5"),
    ],
)
def test_each_invariant_bites(corrupt: Callable[[PageAllocator], None], says: str) -> None:
    pool = PageAllocator(4)
    assert pool.allocate(2) == [0, 1]
    assert pool.check_invariants() == []
    corrupt(pool)
    assert re.search(says, "\n".join(pool.check_invariants()))
    assert PoolSet([PageAllocator(1), pool]).check_invariants()[0].startswith("pool 1: ")


# ── vectors of pools ─────────────────────────────────────────────────────────────────────────────────


def make_set() -> PoolSet:
    return PoolSet([PageAllocator(4), PageAllocator(2)])


def test_a_vector_is_granted_as_a_whole() -> None:
    pools = make_set()
    assert pools.allocate_all({Pool.STAGING: 2, Pool.DEVICE: 1}) == ([0], [0, 1])
    assert pools.allocate_all([2]) == ([1, 2], [])
    assert (pools[Pool.DEVICE].available, pools[Pool.STAGING].available) == (1, 0)
    pools.free_all(([0, 1, 2], [1]))
    assert (pools[Pool.DEVICE].available, pools[Pool.STAGING].available) == (4, 1)
    assert pools.check_invariants() == []


@pytest.mark.parametrize("demand", [(5, 0), (0, 3), (4, 3), {Pool.STAGING: 3}])
def test_a_vector_is_refused_as_a_whole(demand: tuple[int, ...] | dict[Pool, int]) -> None:
    pools = make_set()
    before = [state(pools[pool]) for pool in Pool]
    assert not pools.can_allocate_all(demand)
    assert pools.allocate_all(demand) is None
    assert [state(pools[pool]) for pool in Pool] == before


def test_the_shortfall_names_what_is_missing_in_each_pool() -> None:
    pools = make_set()
    assert pools.shortfall((6, 2)) == (2, 0)
    assert pools.shortfall({Pool.STAGING: 5}) == (0, 3)
    assert pools.can_allocate_all(())


def test_demands_on_pools_that_do_not_exist_are_bugs() -> None:
    pools = make_set()
    with pytest.raises(AssertionError, match="3 pools, but there are 2"):
        pools.allocate_all((1, 1, 1))
    with pytest.raises(AssertionError, match="cannot allocate"):
        pools.allocate_all((1, -1))
    with pytest.raises(AssertionError, match="3 pools, but there are 2"):
        pools.free_all(([], [], []))
    assert len(pools) == 2


# ── gauge ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_gauge_keeps_its_high_water_mark() -> None:
    gauge = Gauge("pins")
    gauge.add(5)
    gauge.sub(3)
    gauge.add(1)
    assert (gauge.value, gauge.high_water) == (3, 5)


@pytest.mark.parametrize(("call", "amount"), [("sub", 2), ("sub", -1), ("add", -1)])
def test_a_gauge_never_goes_below_zero_or_backwards(call: str, amount: int) -> None:
    gauge = Gauge("pins")
    gauge.add(1)
    with pytest.raises(AssertionError, match=rf"pins: {call}\({amount}\)"):
        getattr(gauge, call)(amount)
    assert (gauge.value, gauge.high_water) == (1, 1)
