"""`HiCache` with real threads, a real engine, and a store that stands still where a test wants it to.

Names with a case id refer to `tests/field/cases.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hicache_fsm.config import CacheConfig, PrefetchPolicy
from hicache_fsm.control.plane import Admitted
from hicache_fsm.errors import ConfigError, DuplicateRequest, HiCacheError, StoreError, UnknownRequest
from hicache_fsm.lifecycle.table import Outcome
from hicache_fsm.ports import DEFAULT_NAMESPACE, Namespace, PageKey
from hicache_fsm.runtime.hicache import HiCache
from hicache_fsm.storage.memory_store import MemoryStore
from hicache_fsm.testing.faulty_store import Faults, FaultyStore, Gate
from hicache_fsm.tree.keys import page_keys
from hicache_gpu.cpu_engine import CpuEngine
from hicache_gpu.layout import KVLayout

PAGE = 4
LAYOUT = KVLayout(num_layers=2, bytes_per_token_per_layer=8, page_size=PAGE)
LIMIT_S = 30.0
"""A test that waits longer has found a lost answer."""


def content(key: PageKey) -> bytes:
    """The bytes that belong under a key."""
    return (key * (LAYOUT.page_bytes // len(key) + 1))[: LAYOUT.page_bytes]


def prompt(letters: str) -> list[int]:
    """One page for each letter, and one token more."""
    return [ord(letter) * PAGE + i for letter in letters for i in range(PAGE)] + [1]


def keys_of(letters: str, namespace: Namespace = DEFAULT_NAMESPACE) -> tuple[PageKey, ...]:
    return page_keys(prompt(letters), PAGE, namespace)


class HoleyStore(MemoryStore):
    """Says that it has pages which then cannot be read, fails writes of some, and remembers what was read."""

    def __init__(self) -> None:
        super().__init__(LAYOUT.page_bytes)
        self.holes: set[PageKey] = set()
        self.refused: set[PageKey] = set()
        self.read: list[PageKey] = []

    def put(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        if not self.refused.isdisjoint(keys):
            raise StoreError("refused by the test; take the page out of `refused`")
        return super().put(keys, buffers)

    def get(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        self.read += keys
        flags = super().get(keys, buffers)
        return [flag and key not in self.holes for flag, key in zip(flags, keys, strict=True)]


class Shell:
    """A cache with its outside. `gate` holds store calls; everything is open at the end."""

    def __init__(self, gate: Gate | None = None, faults: Faults | None = None, **changes: Any) -> None:
        threads = {name: changes.pop(name) for name in ("read_threads", "drain_timeout_s") if name in changes}
        settings: dict[str, Any] = {
            "page_size": PAGE, "device_pages": 64, "staging_pages": 32, "max_context_tokens": 128,
            "prefetch_threshold_tokens": PAGE, "prefetch_policy": PrefetchPolicy.WAIT_COMPLETE, "io_batch_pages": 2,
            "debug": True, "poison": True,
        }  # fmt: skip
        self.config = CacheConfig(**{**settings, **changes})
        self.now_ms = 0
        self.gate = gate
        self.inner = HoleyStore()
        self.store = FaultyStore(self.inner, 0, faults or Faults(), gate)
        self.engine = CpuEngine(LAYOUT, self.config.staging_pages, self.config.device_pages)
        self.cache = HiCache(
            self.config, engine=self.engine, store=self.store, clock=lambda: self.now_ms, lookup_threads=1, **threads
        )
        self.plane, self.parts = self.cache.plane, self.cache.plane.parts

    def fill(self, letters: str) -> None:
        keys = keys_of(letters)
        assert all(self.inner.put(keys, [memoryview(content(key)) for key in keys]))

    def submit(self, rid: str, letters: str) -> None:
        self.cache.submit(rid, prompt(letters))

    def until(self, done: Callable[[], bool], what: str = "") -> None:
        """Tick until something holds."""
        give_up = time.monotonic() + LIMIT_S
        while not done():
            assert time.monotonic() < give_up, f"still waiting for {what or done}"
            self.cache.tick()
            if not done():
                self.cache.wait(0.01)

    def ticks(self, count: int = 20) -> None:
        for _ in range(count):
            self.cache.tick()

    def state(self, rid: str) -> str:
        attempt = self.parts.attempts.find(rid)
        return "ended" if attempt is None else attempt.state_name.split("/")[-1]

    def wait_for(self, rid: str, *states: str) -> None:
        self.until(lambda: self.state(rid) in states, f"{rid} to become {states}")

    def admit(self, rid: str) -> Admitted:
        """Admit a request that could be, with its whole prompt; its rows get their bytes."""
        candidate = next((c for c in self.cache.admissible() if c.attempt.rid == rid), None)
        assert candidate is not None, self.cache.explain(rid)
        admitted = self.plane.admit(candidate, candidate.attempt.num_tokens)
        assert admitted is not None, f"no room for {rid}"
        self.cache.launch()
        return admitted

    def compute(self, rid: str, letters: str, admitted: Admitted) -> None:
        """The forward: wait for each layer, compare what is read, write and publish the rest."""
        keys, pages = keys_of(letters), self.plane.page_table(rid)
        start = admitted.device_pages + admitted.loaded_pages
        for layer in range(LAYOUT.num_layers):
            self.cache.layer_ready(admitted.load_ops, layer)
            rows = self.engine.device.layer_rows(layer).reshape(self.config.device_pages, -1)
            for at, (key, page) in enumerate(zip(keys, pages, strict=False)):
                slab = content(key)[LAYOUT.slab_of(layer)]
                if at < start:
                    assert rows[page].tobytes() == slab, f"{rid}: page {at}, layer {layer} holds wrong bytes"
                else:
                    rows[page] = list(slab)
        self.plane.publish(rid, len(letters) * PAGE + 1)

    def run(self, rid: str, letters: str) -> Admitted:
        """Admit, compute, finish."""
        admitted = self.admit(rid)
        self.compute(rid, letters, admitted)
        assert self.cache.finish(rid)
        return admitted

    def run_new(self, rid: str, letters: str) -> Admitted:
        """A request from submit to its end."""
        self.submit(rid, letters)
        self.until(lambda: any(c.attempt.rid == rid for c in self.cache.admissible()), f"{rid} to be admissible")
        return self.run(rid, letters)

    def evict_all(self) -> None:
        """Others take all device pages that nobody uses now."""
        full = self.parts.full
        taken = full.take_device(full.room())
        assert taken is not None
        full.give_device(taken)
        assert full.tree.resident == 0

    def open_gate(self) -> None:
        if self.gate is not None:
            self.gate.open()

    def at_rest(self) -> None:
        """Everything is answered, and nothing is owned or listed any more."""
        self.open_gate()
        self.cache.drain()
        parts = self.parts
        assert self.plane.check_invariants() == []
        assert self.plane.is_idle()
        assert parts.full.staging.used == parts.full.pinned.value == parts.full.tree.locked == 0
        assert parts.full.device.used == parts.full.tree.resident
        books = {
            "prompts": self.cache._prompts, "hashing": self.cache._hashing, "cancelled": self.cache._workers._cancelled,
            "retries": parts.retries.pending, "deadlines": parts.agenda.due, "parked": parts.parked.order,
            "numbers": parts.attempts.numbers, "being written": parts.beliefs.inflight,
        }  # fmt: skip
        assert {name: len(book) for name, book in books.items() if book} == {}


def arrived(gate: Gate, count: int = 1) -> bool:
    """Whether so many calls stand at the gate, or come to it very soon."""
    try:
        gate.wait_arrived(count, timeout_s=0.01)
    except TimeoutError:
        return False
    return True


@pytest.fixture
def make() -> Iterator[Callable[..., Shell]]:
    """Makes shells, and closes them: with their gates open, that must always succeed."""
    shells: list[Shell] = []

    def build(*args: Any, **changes: Any) -> Shell:
        shells.append(Shell(*args, **changes))
        return shells[-1]

    yield build
    for shell in shells:
        shell.open_gate()
        shell.cache.close()
        shell.engine.close()


Make = Callable[..., Shell]


# ── the way of a request ─────────────────────────────────────────────────────────────────────────────


def test_from_storage_to_the_device_and_back(make: Make) -> None:
    shell = make()
    shell.fill("abcd")
    shell.submit("r", "abcdef")
    shell.wait_for("r", "staged")
    admitted = shell.run("r", "abcdef")
    assert (admitted.device_pages, admitted.loaded_pages) == (0, 4)
    shell.at_rest()
    assert shell.inner.exists(keys_of("abcdef")) == 6, "what was computed has reached the store"
    again = shell.run_new("s", "abcdef")
    assert (again.device_pages, again.loaded_pages) == (6, 0)
    shell.at_rest()


def test_namespaces_share_nothing(make: Make) -> None:
    shell = make()
    shell.fill("abcd")
    shell.cache.submit("r", prompt("abcd"), namespace=Namespace(cache_salt="tenant"))
    shell.until(lambda: shell.parts.accounts.stats["l3_demand_requests"] > 0)
    assert shell.parts.accounts.found == 0
    shell.cache.abort("r")
    shell.at_rest()


def test_without_a_store_requests_are_computed() -> None:
    config = CacheConfig(page_size=PAGE, device_pages=32, staging_pages=8, max_context_tokens=64)
    with CpuEngine(LAYOUT, 8, 32) as engine:
        cache = HiCache(config, engine=engine)
        cache.submit("r", prompt("abcd"))
        attempt = cache.plane.parts.attempts.get("r")
        give_up = time.monotonic() + LIMIT_S
        while not list(cache.admissible()):
            assert time.monotonic() < give_up
            cache.tick()
        assert attempt.state_name.endswith("recomputing")
        cache.close()


def test_refusals(make: Make) -> None:
    shell = make()
    shell.submit("r", "ab")
    with pytest.raises(DuplicateRequest):
        shell.submit("r", "cd")
    with pytest.raises(ValueError, match="at least one"):
        shell.cache.submit("empty", [])
    with pytest.raises(UnknownRequest):
        shell.cache.explain("nobody")
    assert not shell.cache.abort("nobody")
    assert not shell.cache.finish("nobody")
    with pytest.raises(HiCacheError, match="detach it before"):
        shell.cache.attach(MemoryStore(LAYOUT.page_bytes))
    assert "r#1" in shell.cache.explain("r") or "'r'" in shell.cache.explain("r")
    with CpuEngine(LAYOUT, 8, 32) as engine, pytest.raises(ConfigError, match="at least 1"):
        HiCache(shell.config, engine=engine, read_threads=0)


def test_keys_are_computed_off_the_scheduler_thread(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def spy(*args: Any, **more: Any) -> tuple[PageKey, ...]:
        seen.append(threading.current_thread().name)
        return page_keys(*args, **more)

    monkeypatch.setattr("hicache_fsm.runtime.hicache.page_keys", spy)
    shell = make()
    shell.submit("r", "abcd")
    shell.until(lambda: shell.parts.attempts.get("r").keys_known)
    assert seen == ["hicache-hash-0"]
    assert shell.parts.attempts.get("r").keys == keys_of("abcd")


def test_wait_ends_with_the_first_news(make: Make) -> None:
    gate = Gate("exists")
    shell = make(gate)
    shell.fill("ab")
    shell.submit("r", "ab")
    shell.wait_for("r", "querying")
    gate.wait_arrived()
    woken = threading.Event()
    waiter = threading.Thread(target=lambda: (shell.cache.wait(LIMIT_S), woken.set()))
    waiter.start()
    assert not woken.is_set()
    gate.let()
    assert woken.wait(LIMIT_S / 2), "an answer has come in, and nobody woke"
    waiter.join()


def test_abort_of_a_request_whose_keys_are_not_asked_for_yet(make: Make) -> None:
    """A flush opens a new attempt, which asks for its keys again; the request ends before that is executed."""
    shell = make()
    shell.submit("r", "abcd")
    shell.plane.flush()
    shell.plane.abort("r")
    shell.ticks()
    shell.at_rest()


@pytest.mark.parametrize("stage", ["exists", "get"])
def test_abort_and_submit_again_while_the_store_is_asked(make: Make, stage: str) -> None:
    gate = Gate(stage)
    shell = make(gate, read_threads=1)
    shell.fill("abcd")
    for _ in range(3):
        shell.submit("r", "abcd")
        shell.wait_for("r", "querying" if stage == "exists" else "reading")
        assert shell.cache.abort("r")
        assert shell.state("r") == "ended"
        assert not shell.cache.abort("r")
    shell.submit("r", "abcd")
    gate.open()
    shell.wait_for("r", "staged")
    assert shell.run("r", "abcd").loaded_pages == 4
    shell.at_rest()


def test_retract_goes_on_as_a_new_attempt(make: Make) -> None:
    shell = make()
    shell.submit("r", "abcd")
    shell.until(lambda: bool(list(shell.cache.admissible())))
    shell.compute("r", "abcd", shell.admit("r"))
    longer = "abcde"
    attempt = shell.cache.retract("r", prompt(longer))
    assert attempt.number == 2
    shell.until(lambda: attempt.keys_known and bool(list(shell.cache.admissible())))
    assert shell.run("r", longer).device_pages == 4
    shell.at_rest()


def test_flush_keeps_the_store_and_the_requests(make: Make) -> None:
    gate = Gate("get")
    shell = make(gate)
    shell.fill("abcd")
    shell.submit("r", "abcd")
    shell.wait_for("r", "reading")
    gate.wait_arrived()
    shell.cache.flush()
    gate.open()
    shell.wait_for("r", "staged")
    assert shell.run("r", "abcd").loaded_pages == 4
    shell.at_rest()


# ── storage goes and comes ───────────────────────────────────────────────────────────────────────────


def test_detach_and_attach_another_store(make: Make) -> None:
    shell = make()
    shell.fill("abcd")
    shell.submit("held", "abcd")
    shell.submit("waits", "xyz")
    shell.wait_for("held", "staged")
    shell.cache.detach()
    assert shell.state("waits") == "recomputing"
    assert shell.run("held", "abcd").loaded_pages == 4, "the bytes in staging are ours"
    shell.run("waits", "xyz")
    other = HoleyStore()
    keys = keys_of("mnop")
    other.put(keys, [memoryview(content(key)) for key in keys])
    shell.cache.attach(other)
    assert shell.run_new("new", "mnop").loaded_pages == 4
    shell.at_rest()
    assert shell.inner.exists(keys_of("xyz")) == 0, "nothing was written while no store was attached"


def test_a_store_that_dies_in_the_middle_of_a_read_keeps_what_has_landed(make: Make) -> None:
    gate = Gate("get")
    shell = make(gate)
    shell.fill("abcdef")
    shell.submit("r", "abcdef")
    shell.wait_for("r", "reading")
    gate.let()  # the first batch: two pages
    gate.wait_arrived(2)
    shell.store.kill()
    gate.open()
    shell.wait_for("r", "staged")
    assert shell.cache.store_errors >= 1
    assert shell.run("r", "abcdef").loaded_pages == 2
    shell.open_gate()
    shell.cache.drain()
    assert shell.parts.accounts.unfulfilled[Outcome.STORAGE_TRANSFER] == 4 * PAGE
    shell.at_rest()


def test_a_bug_in_a_worker_surfaces_and_requests_still_end(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = make()
    shell.fill("abcd")

    def broken(keys: Sequence[PageKey]) -> int:
        raise ZeroDivisionError("a bug in a backend")

    monkeypatch.setattr(shell.inner, "exists", broken)
    shell.submit("r", "abcd")
    with pytest.raises(HiCacheError, match="ZeroDivisionError") as raised:
        shell.until(lambda: False)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    monkeypatch.undo()
    shell.until(lambda: bool(list(shell.cache.admissible())))
    shell.run("r", "abcd")
    shell.at_rest()


# ── field cases ──────────────────────────────────────────────────────────────────────────────────────


def test_BC_003_a_read_that_has_not_begun_is_not_complete(make: Make) -> None:
    gate = Gate("exists", "get")
    shell = make(gate)
    letters = "abcdefghijklmnop"
    shell.fill(letters)
    shell.submit("r", letters)
    shell.wait_for("r", "querying")
    shell.ticks(50)
    assert shell.state("r") == "querying"
    assert list(shell.cache.admissible()) == []
    assert shell.parts.full.staging.used == 0
    gate.let()
    shell.wait_for("r", "reading")
    gate.wait_arrived(2)
    shell.ticks(50)
    assert shell.state("r") == "reading", "planned 16 pages, landed none: that is no completion"
    assert shell.parts.full.staging.used == 16
    gate.open()
    shell.wait_for("r", "staged")
    assert shell.run("r", letters).loaded_pages == 16
    shell.at_rest()


def test_BC_017_a_request_that_ends_before_its_look_up_leaves_nothing(make: Make) -> None:
    gate = Gate("exists")
    shell = make(gate)
    shell.fill("abcd")
    shell.submit("r", "abcd")
    shell.wait_for("r", "querying")
    gate.wait_arrived()
    shell.submit("s", "abcd")  # its look-up waits behind
    shell.wait_for("s", "querying")
    shell.cache.abort("r")
    shell.cache.abort("s")
    gate.open()
    shell.cache.drain()
    assert shell.inner.read == [], "a read for a request that has ended"
    assert shell.parts.accounts.found == shell.parts.accounts.spliced + sum(shell.parts.accounts.unfulfilled.values())
    shell.at_rest()


@pytest.mark.parametrize("good", range(9))
def test_BC_019_the_tail_of_a_broken_read_comes_back_once(make: Make, good: int) -> None:
    shell = make()
    letters = "abcdefgh"
    shell.fill(letters)
    shell.inner.holes = set(keys_of(letters)[good : good + 1])
    shell.submit("r", letters)
    accounts = shell.parts.accounts
    shell.until(lambda: accounts.found > 0 and not shell.parts.ops.live, "the read to end")
    staging = shell.parts.full.staging
    held = shell.parts.attempts.get("r").staging
    assert staging.used == len(held) == len(set(held)) == good
    assert staging.check_invariants() == []
    rest = staging.allocate(staging.available)
    assert rest is not None
    assert sorted([*rest, *held]) == list(range(staging.capacity)), "each page has one owner"
    staging.free(rest)
    shell.cache.abort("r")
    shell.at_rest()


@pytest.mark.parametrize("threads", [1, 2])
def test_BC_047_a_read_that_nobody_wants_any_more_is_skipped(make: Make, threads: int) -> None:
    """A large read stands in the store; a small one behind it passes its deadline, unless it has a thread."""
    gate = Gate("get")
    shell = make(
        gate, read_threads=threads, prefetch_policy=PrefetchPolicy.TIMEOUT, io_batch_pages=16,
        prefetch_timeout_per_ki_token_ms=100 * 1024,
    )  # fmt: skip
    large, small = "abcdefghijklmnop", "xyz"
    shell.fill(large)
    shell.fill(small)
    shell.submit("large", large)
    shell.wait_for("large", "reading")
    gate.wait_arrived()
    shell.submit("small", small)
    shell.wait_for("small", "reading")
    if threads == 2:
        gate.wait_arrived(2)
        gate.open()
        shell.wait_for("small", "staged")
        shell.wait_for("large", "staged")
        assert shell.run("small", small).loaded_pages == 3
    else:
        shell.now_ms += 3000  # beyond 1 s + 12 tokens of 0.1 s, within 1 s + 64 tokens of 0.1 s
        shell.wait_for("small", "recomputing")
        assert shell.run("small", small).loaded_pages == 0
        gate.open()
        shell.wait_for("large", "staged")
        shell.cache.drain()
        assert not set(shell.inner.read) & set(keys_of(small)), "it was read although nobody wanted it"
    assert shell.run("large", large).loaded_pages == 16
    shell.at_rest()


def test_BC_051_writers_outlive_the_first_error(make: Make) -> None:
    gate = Gate("put")
    shell = make(gate, staging_pages=64, io_batch_pages=16)  # each prompt is one write
    prompts = ["abc", "def", "ghi", "jkl", "mno"]
    shell.inner.refused = set(keys_of("abc"))
    shell.run_new("r0", prompts[0])
    shell.until(lambda: arrived(gate), "the first write")
    for i, letters in enumerate(prompts[1:], 1):
        shell.run_new(f"r{i}", letters)
    gate.open()
    shell.cache.drain()
    assert shell.cache.store_errors == 1
    assert [shell.inner.exists(keys_of(letters)) for letters in prompts] == [0, 3, 3, 3, 3]
    assert sum(shell.parts.backup.dropped_pages.values()) == 3
    shell.at_rest()


def test_BC_052_a_page_that_cannot_be_read_ends_the_hit_there(make: Make) -> None:
    shell = make(faults=Faults(fail_put=1.0))  # so that the page is not rewritten either
    letters = "abcdef"
    shell.fill(letters)
    shell.inner.holes = {keys_of(letters)[3]}
    shell.submit("r", letters)
    shell.wait_for("r", "staged")
    assert shell.run("r", letters).loaded_pages == 3
    assert shell.parts.accounts.unfulfilled[Outcome.STORAGE_TRANSFER] == 3 * PAGE
    shell.cache.drain()
    shell.evict_all()
    shell.inner.read.clear()
    assert shell.run_new("s", letters).loaded_pages == 3
    assert keys_of(letters)[3] not in shell.inner.read, "a second failing read of the same page"
    shell.at_rest()


def test_BC_073_closing_names_the_thread_that_is_stuck(make: Make) -> None:
    gate = Gate("get")
    shell = make(gate, read_threads=1, drain_timeout_s=0.2)
    shell.fill("abcd")
    shell.submit("r", "abcd")
    shell.wait_for("r", "reading")
    gate.wait_arrived()
    staging = shell.parts.full.staging.used
    before = threading.active_count()
    for stop in (shell.cache.close, shell.cache.detach, shell.cache.close):
        with pytest.raises(HiCacheError, match="hicache-read-0"):
            stop()
        assert shell.parts.full.staging.used == staging, "the stuck call may still write there"
        assert threading.active_count() <= before, "no second worker beside the stuck one"
    gate.open()
    shell.cache.close()
    assert shell.parts.full.staging.used == 0
    assert not any(thread.is_alive() for thread in shell.cache._workers._threads)


def test_BC_074_an_idle_loop_still_writes_and_cleans_up(make: Make) -> None:
    gate = Gate("get")
    shell = make(gate)
    shell.fill("xyz")
    shell.run_new("r", "abcd")
    shell.until(lambda: shell.inner.exists(keys_of("abcd")) == 4, "the write without another request")
    shell.submit("s", "xyz")
    shell.wait_for("s", "reading")
    gate.wait_arrived()
    shell.cache.abort("s")
    gate.open()
    shell.until(lambda: shell.parts.full.staging.used == 0, "staging without another request")
    shell.at_rest()


@pytest.mark.parametrize("waiting", [1, 32, 1000])
def test_BC_080_a_pass_costs_nothing_for_requests_without_news(
    make: Make, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate("exists")
    shell = make(gate)
    for i in range(waiting):
        shell.submit(f"r{i}", "abcd")
    shell.until(lambda: all(shell.state(f"r{i}") == "querying" for i in range(waiting)))
    slept: list[float] = []
    mine = threading.get_ident()
    real = time.sleep

    def spy(seconds: float) -> None:
        if threading.get_ident() == mine:
            slept.append(seconds)
        real(seconds)

    monkeypatch.setattr(time, "sleep", spy)
    touched = shell.parts.attempts.touches
    shell.ticks(50)
    assert shell.parts.attempts.touches == touched
    assert len(slept) <= 50, "one yield a pass, whatever waits"
    assert not any(slept)
    monkeypatch.undo()
    for i in range(0, waiting, 2):
        shell.cache.abort(f"r{i}")
    gate.open()
    for i in range(1, waiting, 2):
        shell.cache.abort(f"r{i}")
    shell.at_rest()


def test_BC_081_a_spinning_loop_lets_its_workers_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = make(device_pages=256, staging_pages=64)
    for i in range(40):
        shell.run_new(f"r{i}", f"{chr(200 + i)}bcd")
    yields = 0
    real = time.sleep

    def spy(seconds: float) -> None:
        nonlocal yields
        yields += 1
        real(seconds)

    monkeypatch.setattr(time, "sleep", spy)
    spins = 0
    give_up = time.monotonic() + LIMIT_S
    while not shell.plane.is_idle():
        outstanding = bool(shell.parts.ops.live)
        before = yields
        shell.cache.tick()  # and never `wait`
        spins += 1
        assert yields > before or not (outstanding and shell.parts.ops.live), "a pass that let nobody else run"
        assert time.monotonic() < give_up, f"{spins} passes, and writes are still outstanding"
    monkeypatch.undo()
    assert shell.parts.backup.stored_pages == 160
    shell.at_rest()


def test_BC_082_nothing_grows_with_the_requests_that_have_ended(make: Make) -> None:
    shell = make(belief_entries=64, negative_entries=16)
    for i in range(300):
        shell.run_new(f"r{i}", f"{chr(97 + i % 20)}{chr(97 + i % 7)}{chr(97 + i % 3)}")
    shell.at_rest()
    attempts = shell.parts.attempts
    assert attempts.next_slot <= 4, "slots are used again"
    assert len(attempts.live) == 0
    assert shell.parts.full.tree.resident <= shell.config.device_pages
    assert all(type(page) is int for page in shell.parts.full.tree.clear()), "pages are plain numbers"
