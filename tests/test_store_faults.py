"""Fault injection: what is asked for happens, to the same pages in every run, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import pytest

from hicache_fsm.errors import ConfigError, StoreError
from hicache_fsm.ports import PageKey
from hicache_fsm.storage.memory_store import MemoryStore
from hicache_fsm.testing.faulty_store import Faults, FaultyStore, Gate
from hicache_fsm.testing.store_conformance import page_bytes_of, page_key

PAGE = 64
KEYS = [page_key(i) for i in range(200)]
PAGES = [memoryview(page_bytes_of(key, PAGE)) for key in KEYS]


def filled(seed: int = 0, faults: Faults | None = None, gate: Gate | None = None) -> FaultyStore:
    inner = MemoryStore(PAGE)
    assert all(inner.put(KEYS, PAGES))
    return FaultyStore(inner, seed, faults or Faults(), gate)


def blank(count: int) -> list[memoryview]:
    return [memoryview(bytearray(PAGE)) for _ in range(count)]


def get(store: FaultyStore, keys: Sequence[PageKey] = KEYS) -> tuple[list[bool], list[bytes]]:
    buffers = blank(len(keys))
    flags = store.get(keys, buffers)
    return flags, [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize("op", ["exists", "get", "put"])
def test_a_failing_call_raises_and_the_others_do_not(op: str) -> None:
    store = filled(faults=replace(Faults(), **dict[str, Any]({f"fail_{op}": 1.0})))
    calls: dict[str, Callable[[], object]] = {
        "exists": lambda: store.exists(KEYS),
        "get": lambda: get(store),
        "put": lambda: store.put(KEYS, PAGES),
    }
    for name, call in calls.items():
        if name == op:
            with pytest.raises(StoreError, match=f"injected fail_{op}"):
                call()
        else:
            call()
    assert store.injected == {f"fail_{op}": 1}


def test_lost_pages_are_misses_about_as_often_as_asked() -> None:
    flags, _ = get(filled(faults=Faults(lose_get=0.3)))
    assert 30 <= flags.count(False) <= 90


def test_the_same_seed_fails_in_the_same_places_whatever_the_order_of_calls() -> None:
    faults = Faults(lose_get=0.3)
    at_once, _ = get(filled(7, faults))
    one_by_one = filled(7, faults)
    backwards = [get(one_by_one, [key])[0][0] for key in KEYS[::-1]]
    threaded = filled(7, faults)
    with ThreadPoolExecutor(4) as pool:
        mixed = list(pool.map(lambda key: get(threaded, [key])[0][0], KEYS))
    other, _ = get(filled(8, faults))
    assert at_once == backwards[::-1] == mixed != other


def test_each_try_is_drawn_anew() -> None:
    store = filled(faults=Faults(lose_get=0.5))
    assert get(store)[0] != get(store)[0]


def test_corrupt_pages_are_called_good_and_differ_in_one_bit() -> None:
    flags, got = get(filled(faults=Faults(corrupt_get=1.0)))
    assert all(flags)
    for page, buffer in zip(PAGES, got, strict=True):
        differing = int.from_bytes(page, "big") ^ int.from_bytes(buffer, "big")
        assert differing.bit_count() == 1


def test_short_batches_end_somewhere_and_have_no_holes() -> None:
    faults = Faults(short_get=1.0, short_put=1.0)
    flags, got = get(filled(faults=faults))
    delivered = flags.count(True)
    assert flags == [True] * delivered + [False] * (200 - delivered)
    assert got == [bytes(page) for page in PAGES[:delivered]] + [bytes(PAGE)] * (200 - delivered)
    assert delivered < 200
    store = FaultyStore(MemoryStore(PAGE), 3, faults)
    stored = store.put(KEYS, PAGES).count(True)
    assert store.inner.exists(KEYS) == stored < 200


def test_a_lie_claims_absent_pages_only() -> None:
    inner = MemoryStore(PAGE)
    inner.put(KEYS[:10], PAGES[:10])
    assert FaultyStore(inner, faults=Faults(lie_exists=1.0)).exists(KEYS) == 200
    assert inner.exists(KEYS) == 10
    liar = FaultyStore(inner, 4, Faults(lie_exists=0.9))
    claimed = liar.exists(KEYS)
    assert claimed > 10
    assert liar.injected["lie_exists"] == claimed - 10


def test_a_full_store_keeps_what_it_has() -> None:
    inner = MemoryStore(PAGE)
    inner.put(KEYS[:2], PAGES[:2])
    store = FaultyStore(inner, faults=Faults(full=True))
    assert store.put(KEYS[:4], PAGES[:4]) == [True, True, False, False]
    store.faults = Faults()
    assert store.put(KEYS[:4], PAGES[:4]) == [True] * 4


def test_a_killed_store_answers_nothing_until_it_is_revived() -> None:
    store = filled()
    store.kill()
    for call in (lambda: store.exists(KEYS), lambda: get(store), lambda: store.put(KEYS, PAGES), store.stats):
        with pytest.raises(StoreError, match="killed"):
            call()
    store.revive()
    assert all(get(store)[0])
    store.kill()
    store.close()


def test_latency_is_spent_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("hicache_fsm.testing.faulty_store.time.sleep", slept.append)
    store = filled(faults=Faults(latency_s=0.5, latency_per_page_s=0.25))
    store.exists(KEYS[:2])
    get(store, KEYS[:2])
    assert slept == [0.5, 1.0]


def test_a_gate_holds_the_calls_it_names_and_lets_them_go_one_by_one() -> None:
    gate = Gate("get")
    store = filled(gate=gate)
    assert store.exists(KEYS) == 200
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(get, store, [key]) for key in KEYS[:3]]
        gate.wait_arrived(3)
        assert not any(job.done() for job in jobs)
        gate.let(1)
        done, held = wait(jobs, timeout=30, return_when=FIRST_COMPLETED)
        assert (len(done), len(held)) == (1, 2)
        gate.open()
        assert all(job.result(30)[0] == [True] for job in jobs)
    with pytest.raises(TimeoutError, match="3 of 4"):
        gate.wait_arrived(4, timeout_s=0.01)


def test_a_call_that_waits_when_its_store_is_killed_fails() -> None:
    gate = Gate()
    store = filled(gate=gate)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(store.exists, KEYS)
        gate.wait_arrived()
        store.kill()
        gate.open()
        with pytest.raises(StoreError, match="killed"):
            job.result(30)


@pytest.mark.parametrize("fault", [{"lose_get": 1.5}, {"fail_put": -0.1}, {"latency_s": -1.0}])
def test_rates_out_of_range_are_config_errors(fault: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        Faults(**fault)  # type: ignore[arg-type]
