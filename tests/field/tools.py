"""Settings and short cuts for tests on `Sim`: pools of a few one-token pages, and caps that tests can reach."""

from __future__ import annotations

from typing import Any

from hicache_fsm.config import CacheConfig, PrefetchPolicy
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.testing.sim import Sim, chain

BEST_EFFORT = PrefetchPolicy.BEST_EFFORT
TIMEOUT = PrefetchPolicy.TIMEOUT


def small(**changes: Any) -> CacheConfig:
    """One token a page; pins up to 12 pages; nothing too short to ask for; waits until the hard maximum."""
    settings: dict[str, Any] = {
        "page_size": 1,
        "device_pages": 24,
        "staging_pages": 12,
        "max_context_tokens": 12,
        "prefetch_threshold_tokens": 1,
        "prefetch_policy": PrefetchPolicy.WAIT_COMPLETE,
        "write_staging_fraction": 0.25,
        "load_pool_usage_fraction": 1.0,
        "debug": True,
        "poison": True,
    }
    return CacheConfig(**{**settings, **changes})


def sim(stored: str = "", **changes: Any) -> Sim:
    """A simulation whose store holds the pages of the prompt `stored`, one letter a page."""
    return Sim(small(**changes), chain(*stored))


def get(s: Sim, rid: str) -> Attempt:
    return s.plane.parts.attempts.get(rid)


def state(s: Sim, rid: str) -> str:
    """State of a request, or its absence."""
    attempt = s.plane.parts.attempts.find(rid)
    return "ended" if attempt is None else attempt.state_name.split("/")[-1]


def answer(s: Sim, kind: OpKind, rid: str = "", pages: int | None = None, ok: bool = True) -> None:
    """Answer the oldest operation of a kind (of one request), and apply it."""
    for op in s.of_kind(kind):
        if not rid or getattr(s.outstanding[op], "rid", "") == rid:
            s.answer(op, pages, ok)
            s.tick()
            return
    raise AssertionError(f"no {kind.name.lower()} of {rid!r} is outstanding")


def look_up(s: Sim, rid: str, pages: int | None = None) -> None:
    answer(s, OpKind.LOOKUP, rid, pages)


def read(s: Sim, rid: str, pages: int | None = None) -> None:
    answer(s, OpKind.READ, rid, pages)


def stage(s: Sim, rid: str, prompt: str) -> None:
    """Submit, look up and read: the request is left with its hold."""
    s.submit(rid, prompt)
    look_up(s, rid)
    read(s, rid)
    assert state(s, rid) == "staged", s.plane.explain(rid)


def make_resident(s: Sim, prompt: str) -> None:
    """Compute a prompt, so that its pages are on the device, whatever storage holds; writes are answered."""
    s.submit("warm", prompt)
    s.answer_all(OpKind.LOOKUP)
    s.tick()
    s.answer_all(OpKind.READ)
    s.tick()
    assert s.run("warm"), s.plane.explain("warm")
    s.settle()


def evict(s: Sim, pages: int) -> None:
    """Other users of the device take so many pages from the tree, least recently used leaves first."""
    full = s.plane.parts.full
    taken = full.take_device(full.device.available + pages)
    assert taken is not None, f"{pages} pages wanted, {full.tree.evictable} are evictable"
    full.give_device(taken)
    s.pump()


def end_all(s: Sim) -> None:
    """Everything is answered, admitted and finished; nothing may be left owned."""
    for _ in range(400):
        s.answer_all()
        s.tick(s.config.chance_quantum_ms)
        for attempt in sorted(s.plane.parts.attempts, key=lambda a: a.seq):
            if attempt.state_name.startswith("admitted") and not attempt.load_ops:
                s.compute(attempt.rid)
                s.plane.finish(attempt.rid)
            else:
                s.admit(attempt.rid)
        s.pump()
        if s.plane.is_idle() and not s.inbox:
            break
    assert s.leaks() == []
    assert s.stale_entries() == []
