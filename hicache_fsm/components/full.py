"""The FULL attention component: pages, pins and room of the device pool and of staging.

    component   match          demand        plan               allocate         publish
    FULL        binary search  whole pages   [match, end)       evict, then all  insert under a lock
                over the keys  per pool                         or nothing

Hybrid components (SWA windows, MAMBA states) join beside this one with the same five questions; demands are
vectors over pools already, so that one allocation stays all or nothing.

Totals kept here have one writer each: `take_*` and `give_*` below. `check_invariants` recounts them.
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache_fsm.config import CacheConfig
from hicache_fsm.pools.allocator import Gauge, PageAllocator, PoolSet
from hicache_fsm.ports import Command, Pool, Release
from hicache_fsm.tree.prefix_tree import PrefixTree


class FullComponent:
    """Device and staging pages of FULL attention, the tree that shares device pages, and the pin budget."""

    __slots__ = (
        "config", "tree", "pools", "device", "staging", "outbox", "reads", "writes", "pinned", "pins", "clock",
        "evicted_pages", "pin_version",
    )  # fmt: skip

    def __init__(self, config: CacheConfig, tree: PrefixTree | None = None) -> None:
        self.config = config
        self.tree = PrefixTree() if tree is None else tree
        self.device = PageAllocator(config.device_pages)
        self.staging = PageAllocator(config.staging_pages)
        self.pools = PoolSet((self.device, self.staging))
        self.outbox: list[Command] = []
        self.reads = Gauge("staging pages of reads, holds and loads")
        self.writes = Gauge("staging pages of writes")
        self.pinned = Gauge("pinned tokens")
        self.pins = Gauge("pins")
        self.clock = 0  # recency for the tree: one more on each use
        self.evicted_pages = 0
        self.pin_version = 0  # rises when pin budget comes back

    # ── staging ──────────────────────────────────────────────────────────────────────────────────────

    def take_read_staging(self, count: int) -> list[int] | None:
        """Pages for a whole hit, or None: all or nothing, within the share that reads may fill.

        The rest of staging stays with writes, so that holds which wait for admission cannot stop the write
        path.
        """
        if self.reads.value + count > self.read_limit:
            return None
        return self._take_staging(count, self.reads)

    def give_read_staging(self, pages: Sequence[int]) -> None:
        self._give_staging(pages, self.reads)

    def take_write_staging(self, count: int) -> list[int] | None:
        return self._take_staging(count, self.writes)

    def give_write_staging(self, pages: Sequence[int]) -> None:
        self._give_staging(pages, self.writes)

    def write_room(self, wanted_by_reads: int) -> int:
        """Pages that writes may still take.

        The share is max(20 %, what reads leave minus 10 %), as upstream. `wanted_by_reads` is what the
        parked head waits for; where the floor would keep it waiting for ever, the floor gives way.
        """
        capacity = self.staging.capacity
        floor = int(self.config.write_staging_fraction * capacity)
        margin = int(self.config.write_margin_fraction * capacity)
        left = capacity - self.reads.value - wanted_by_reads
        share = max(floor, left - margin)
        if wanted_by_reads > capacity - floor:
            share = max(0, capacity - wanted_by_reads)
        return max(0, min(share - self.writes.value, self.staging.available))

    @property
    def read_limit(self) -> int:
        """Most staging pages that reads may hold together, and so the largest hit that can be served whole."""
        return int(self.config.load_pool_usage_fraction * self.staging.capacity)

    def _take_staging(self, count: int, owner: Gauge) -> list[int] | None:
        pages = self.staging.allocate(count)
        if pages is not None:
            owner.add(count)
        return pages

    def _give_staging(self, pages: Sequence[int], owner: Gauge) -> None:
        if pages:
            self.staging.free(pages)
            owner.sub(len(pages))
            self._announce(Pool.STAGING, pages)

    # ── device ───────────────────────────────────────────────────────────────────────────────────────

    def room(self) -> int:
        """Device pages that could be had now: free and evictable."""
        return self.device.available + self.tree.evictable

    def take_device(self, count: int) -> list[int] | None:
        """Device pages, evicting what is needed; None (and nothing evicted) if there is not enough."""
        short = count - self.device.available
        if short > 0:
            if not self.tree.can_evict(short):
                return None
            freed = self.tree.evict(short).pages
            self.evicted_pages += len(freed)
            self.give_device(freed)
        return self.device.allocate(count)

    def give_device(self, pages: Sequence[int]) -> None:
        if pages:
            self.device.free(pages)
            self._announce(Pool.DEVICE, pages)

    def tick_clock(self) -> int:
        self.clock += 1
        return self.clock

    # ── pins: FULL-only protection of a base, within a budget ────────────────────────────────────────

    def pin_fits(self, tokens: int) -> bool:
        return self.pinned.value + tokens <= self.config.pin_cap_tokens

    def pin_ever_fits(self, tokens: int) -> bool:
        return tokens <= self.config.pin_cap_tokens

    def pin(self, node: int, tokens: int) -> None:
        """Protect the path to `node`, which is `tokens` long."""
        assert self.pin_fits(tokens), f"pin of {tokens} tokens beyond the cap, {self.pinned.value} pinned"
        self.tree.lock(node)
        self.pins.add(1)
        self.pinned.add(tokens)

    def unpin(self, node: int, tokens: int) -> None:
        self.tree.unlock(node)
        self.pins.sub(1)
        self.pinned.sub(tokens)
        self.pin_version += 1

    def room_version(self) -> tuple[int, int]:
        """Changes whenever a parked hit that was refused could be granted now."""
        return self.staging.version, self.pin_version

    def _announce(self, pool: Pool, pages: Sequence[int]) -> None:
        if self.config.poison:
            self.outbox.append(Release(pool, tuple(pages)))
