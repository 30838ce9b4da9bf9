"""Page allocators: who may hand out which page of a pool.

An allocator gives out page ids, all or nothing, and knows which are out. It does not know who holds them: that is
the ledgers' business. Refusal is `None`; a page freed twice or never given out is a bug and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache_fsm.ports import Pool


class PageAllocator:
    """Hands out the pages 0 .. capacity-1 of one pool. The page freed last is given out first: its bytes are warm."""

    __slots__ = ("_capacity", "_free", "_owned", "_version")

    def __init__(self, capacity: int) -> None:
        assert capacity >= 0, f"a pool cannot have {capacity} pages"
        self._capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))  # a stack, next page last
        self._owned = [False] * capacity
        self._version = 0

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self._capacity - len(self._free)

    @property
    def version(self) -> int:
        """Rises whenever pages come back. Who was refused at one version need not ask again at the same."""
        return self._version

    def is_owned(self, page: int) -> bool:
        """Whether the page is out."""
        return self._owned[page]

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None if there are not that many."""
        assert count >= 0, f"cannot allocate {count} pages"
        free = self._free
        if count > len(free):
            return None
        if count == 0:
            return []
        pages = free[: -count - 1 : -1]
        del free[-count:]
        owned = self._owned
        for page in pages:
            owned[page] = True
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back. One that is not out, foreign or named twice is an `AssertionError`, and none is taken."""
        owned = self._owned
        capacity = self._capacity
        for position, page in enumerate(pages):
            if 0 <= page < capacity and owned[page]:
                owned[page] = False
                continue
            for taken in pages[:position]:
                owned[taken] = True
            reason = "is free already" if 0 <= page < capacity else "is not of this pool"
            raise AssertionError(f"page {page} {reason} (capacity {capacity}, position {position} of {len(pages)})")
        if pages:
            # Reversed, so that the same pages come out in the same order again.
            self._free.extend(pages[::-1])
            self._version += 1

    def check_invariants(self) -> list[str]:
        """Every violation found by recounting from the free list and the flags; empty when all is well."""
        found: list[str] = []
        free = set(self._free)
        owned = {page for page, flag in enumerate(self._owned) if flag}
        if len(free) != len(self._free):
            found.append(f"free list has {len(self._free) - len(free)} duplicates")
        if len(self._owned) != self._capacity:
            found.append(f"{len(self._owned)} flags for a capacity of {self._capacity}")
        if both := free & owned:
            found.append(f"pages free and owned: {sorted(both)[:8]}")
        if missing := set(range(self._capacity)) - free - owned:
            found.append(f"pages neither free nor owned: {sorted(missing)[:8]}")
        if foreign := (free | owned) - set(range(self._capacity)):
            found.append(f"pages outside 0..{self._capacity - 1}: {sorted(foreign)[:8]}")
        if self.available + len(owned) != self._capacity:
            found.append(f"{self.available} free + {len(owned)} owned != capacity {self._capacity}")
        return found


Demand = Mapping[Pool, int] | Sequence[int]
"""Pages wanted of each pool; as a sequence, indexed by `Pool`. Pools that are not named want nothing."""


class PoolSet:
    """The vector of pools, indexed by `Pool`. Hybrid models add pools; demands stay vectors."""

    __slots__ = ("_pools",)

    def __init__(self, pools: Sequence[PageAllocator]) -> None:
        self._pools = tuple(pools)

    def __getitem__(self, pool: Pool) -> PageAllocator:
        return self._pools[pool]

    def __len__(self) -> int:
        return len(self._pools)

    def vector(self, demand: Demand) -> tuple[int, ...]:
        """The demand as one count per pool of this set."""
        if isinstance(demand, Mapping):
            counts = [0] * len(self._pools)
            for pool, count in demand.items():
                counts[pool] = count
        else:
            counts = [*demand, *([0] * (len(self._pools) - len(demand)))]
        assert len(counts) == len(self._pools), f"a demand on {len(counts)} pools, but there are {len(self._pools)}"
        return tuple(counts)

    def shortfall(self, demand: Demand) -> tuple[int, ...]:
        """Pages that are missing in each pool; all 0 when `allocate_all` would succeed."""
        wanted = self.vector(demand)
        return tuple(max(0, count - pool.available) for count, pool in zip(wanted, self._pools, strict=True))

    def can_allocate_all(self, demand: Demand) -> bool:
        return not any(self.shortfall(demand))

    def allocate_all(self, demand: Demand) -> tuple[list[int], ...] | None:
        """The pages of each pool, or None and no change if any pool cannot serve its part."""
        wanted = self.vector(demand)
        assert min(wanted, default=0) >= 0, f"cannot allocate {wanted} pages"
        if not self.can_allocate_all(wanted):
            return None
        grants: list[list[int]] = []
        for count, pool in zip(wanted, self._pools, strict=True):
            pages = pool.allocate(count)
            assert pages is not None, f"{count} pages refused with {pool.available} available"
            grants.append(pages)
        return tuple(grants)

    def free_all(self, pages: Sequence[Sequence[int]]) -> None:
        """Take back the pages of each pool, in the shape that `allocate_all` gave."""
        assert len(pages) <= len(self._pools), f"pages of {len(pages)} pools, but there are {len(self._pools)}"
        for pool, part in zip(self._pools, pages, strict=False):
            pool.free(part)

    def check_invariants(self) -> list[str]:
        return [f"pool {i}: {text}" for i, pool in enumerate(self._pools) for text in pool.check_invariants()]


class Gauge:
    """A running total, with its high-water mark. One writer: the acquire or release that writes the ledger."""

    __slots__ = ("_high_water", "_name", "_value")

    def __init__(self, name: str) -> None:
        self._name = name
        self._value = 0
        self._high_water = 0

    @property
    def value(self) -> int:
        return self._value

    @property
    def high_water(self) -> int:
        """The largest value so far."""
        return self._high_water

    def add(self, amount: int) -> None:
        assert amount >= 0, f"{self._name}: add({amount}); use sub to take away"
        self._value += amount
        if self._value > self._high_water:
            self._high_water = self._value

    def sub(self, amount: int) -> None:
        assert 0 <= amount <= self._value, f"{self._name}: sub({amount}) from {self._value}"
        self._value -= amount
