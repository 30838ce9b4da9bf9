"""A store that fails on purpose: any `KVStore` behind a layer of seeded faults, delays and gates.

Every decision is drawn from (seed, fault, page key, how often that fault was drawn for that key), so a run fails in
the same places whatever the order in which its threads come.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import xxhash

from hicache_fsm.errors import ConfigError, StoreError
from hicache_fsm.ports import KVStore, PageKey, StoreStats


@dataclass(frozen=True, slots=True)
class Faults:
    """How often what goes wrong. Rates are probabilities in 0..1; of a call, or of a page where it says so.

    Raises `ConfigError` on a value out of range.
    """

    fail_exists: float = 0.0  # `exists` raises
    fail_get: float = 0.0  # `get` raises
    fail_put: float = 0.0  # `put` raises, nothing stored
    lie_exists: float = 0.0  # an absent page is called present (per page)
    short_get: float = 0.0  # `get` delivers only the pages before some point of the batch
    lose_get: float = 0.0  # a page is a miss although it is there (per page)
    corrupt_get: float = 0.0  # a page arrives with a flipped bit and is called good (per page)
    short_put: float = 0.0  # `put` stores only the pages before some point of the batch
    full: bool = False  # no new page is stored
    latency_s: float = 0.0  # seconds that each call takes longer
    latency_per_page_s: float = 0.0  # seconds that each page of a `get` or `put` adds

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or (not field.name.startswith("latency") and value > 1):
                raise ConfigError(
                    f"{field.name}={value} is out of range; rates lie in 0..1, latencies are not negative"
                )


NO_FAULTS = Faults()


class Gate:
    """Holds store calls until a test lets them go, and tells the test that they have come. Starts closed.

    With `ops` only these (`"exists"`, `"get"`, `"put"`) are held.
    """

    def __init__(self, *ops: str) -> None:
        self._ops = frozenset(ops or ("exists", "get", "put"))
        self._changed = threading.Condition()
        self._arrived = 0
        self._permits: int | None = 0  # None: open for all

    def __call__(self, op: str) -> None:
        """Called by the store's worker before it does anything."""
        if op not in self._ops:
            return
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._permits is None or self._permits > 0)
            if self._permits is not None:
                self._permits -= 1

    def wait_arrived(self, count: int = 1, timeout_s: float = 30.0) -> None:
        """Block until `count` calls in all have come. Raises `TimeoutError`, since a test must not hang."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived >= count, timeout_s):
                raise TimeoutError(f"{self._arrived} of {count} calls came to the gate within {timeout_s} s")

    def let(self, count: int = 1) -> None:
        """Let `count` calls pass, those that wait or the next to come."""
        with self._changed:
            if self._permits is not None:
                self._permits += count
            self._changed.notify_all()

    def open(self) -> None:
        """Let everything pass from now on."""
        with self._changed:
            self._permits = None
            self._changed.notify_all()


class FaultyStore:
    """A `KVStore` around another that behaves as `faults` say; they may be replaced at any time.

    `gate` is called with the name of the operation before each call: a `Gate`, or any function that blocks.
    `injected` counts what was done, by fault.
    """

    def __init__(
        self, inner: KVStore, seed: int = 0, faults: Faults = NO_FAULTS, gate: Callable[[str], None] | None = None
    ) -> None:
        self.inner = inner
        self.faults = faults
        self.gate = gate
        self.injected: Counter[str] = Counter()
        self._seed = seed
        self._drawn: Counter[tuple[str, PageKey]] = Counter()
        self._lock = threading.Lock()
        self._dead = False

    # ── the store's calls ────────────────────────────────────────────────────────────────────────────

    def exists(self, keys: Sequence[PageKey]) -> int:
        faults = self._enter("exists", keys, 0)
        self._maybe_raise("fail_exists", faults.fail_exists, keys)
        leading = self.inner.exists(keys)
        while leading < len(keys) and self._hits("lie_exists", faults.lie_exists, keys[leading]):
            leading += 1
            leading += self.inner.exists(keys[leading:])
        return leading

    def get(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        faults = self._enter("get", keys, len(keys))
        self._maybe_raise("fail_get", faults.fail_get, keys)
        cut = self._cut("short_get", faults.short_get, keys)
        flags = self.inner.get(keys[:cut], buffers[:cut]) if cut < len(keys) else self.inner.get(keys, buffers)
        for i, ok in enumerate(flags):
            if ok and self._hits("lose_get", faults.lose_get, keys[i]):
                flags[i] = False
            elif ok and self._hits("corrupt_get", faults.corrupt_get, keys[i]):
                page = buffers[i].cast("B")
                page[self._draw("corrupt_at", keys[i]) % len(page)] ^= 1
        return flags + [False] * (len(keys) - len(flags))

    def put(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        faults = self._enter("put", keys, len(keys))
        self._maybe_raise("fail_put", faults.fail_put, keys)
        if faults.full:
            with self._lock:
                self.injected["full"] += 1
            return [self.inner.exists([key]) == 1 for key in keys]
        cut = self._cut("short_put", faults.short_put, keys)
        if cut == len(keys):
            return self.inner.put(keys, buffers)
        return self.inner.put(keys[:cut], buffers[:cut]) + [False] * (len(keys) - cut)

    def stats(self) -> StoreStats:
        self._check_alive()
        return self.inner.stats()

    def close(self) -> None:
        """Closes the inner store, dead or alive, so that a test can clean up."""
        self.inner.close()

    # ── the test's calls ─────────────────────────────────────────────────────────────────────────────

    def kill(self) -> None:
        """From now on every call but `close` raises `StoreError`, also those that wait at the gate."""
        self._dead = True

    def revive(self) -> None:
        """Answer again; the pages are those of the inner store."""
        self._dead = False

    # ── drawing ──────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, op: str, keys: Sequence[PageKey], pages: int) -> Faults:
        """Delay the call, then see whether the store still lives; the faults that hold for this call."""
        self._check_alive()
        faults = self.faults
        if self.gate is not None:
            self.gate(op)
        delay_s = faults.latency_s + pages * faults.latency_per_page_s
        if delay_s:
            time.sleep(delay_s)
        self._check_alive()
        return faults

    def _check_alive(self) -> None:
        if self._dead:
            raise StoreError("the store was killed by its test; revive() brings it back")

    def _maybe_raise(self, fault: str, rate: float, keys: Sequence[PageKey]) -> None:
        if self._hits(fault, rate, keys[0] if keys else b""):
            raise StoreError(f"injected {fault}; lower the rate of it to see fewer")

    def _cut(self, fault: str, rate: float, keys: Sequence[PageKey]) -> int:
        """Number of leading pages that are still served."""
        if not keys or not self._hits(fault, rate, keys[0]):
            return len(keys)
        return self._draw(fault + "_at", keys[0]) % len(keys)

    def _hits(self, fault: str, rate: float, key: PageKey) -> bool:
        if rate == 0.0 or self._draw(fault, key) >= rate * 2.0**64:
            return False
        with self._lock:
            self.injected[fault] += 1
        return True

    def _draw(self, fault: str, key: PageKey) -> int:
        """64 bits that depend on the seed, the fault, the key and how often this was asked."""
        with self._lock:
            turn = self._drawn[fault, key]
            self._drawn[fault, key] += 1
        return xxhash.xxh3_64_intdigest(b"%s|%d|%s" % (fault.encode(), turn, key), self._seed % 2**64)
