"""Random schedules of a hostile outside, each drawn from one seed: what proofs and specification are compared on."""

from __future__ import annotations

import random

from hicache_fsm.config import CacheConfig, PrefetchPolicy
from hicache_fsm.control.parts import Observer
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.table import State
from hicache_fsm.ports import Read
from hicache_fsm.testing.sim import Sim, chain

RIDS = "wxyz"


def config_of(seed: int) -> CacheConfig:
    """Small pools and caps."""
    draw = random.Random(f"config {seed}")
    return CacheConfig(
        page_size=2, device_pages=draw.randint(6, 12), staging_pages=draw.randint(3, 6), max_context_tokens=4,
        prefetch_threshold_tokens=2, prefetch_policy=list(PrefetchPolicy)[seed % 3], prefetch_timeout_base_ms=12,
        prefetch_timeout_per_ki_token_ms=0, prefetch_hard_max_ms=12, retry_max_attempts=draw.randint(0, 3),
        retry_poll_interval_passes=draw.randint(0, 3), max_defers=2, park_cap=draw.randint(2, 4),
        anchor_lock_cap=draw.choice((0.0, 0.0, 0.5)), load_pool_usage_fraction=draw.choice((0.1, 0.9, 1.0, 1.0)),
        negative_ttl_ms=1, chance_quantum_ms=1, debug=True,
    )  # fmt: skip


def wander(seed: int, observer: Observer | None = None, steps: int = 250) -> None:
    """Drive one plane through `steps` random acts, then end what lives. Invariants are checked at the end only: what
    is compared here is something else, and checking takes most of the time."""
    draw = random.Random(seed)
    sim = Sim(config_of(seed), chain(*"ttaaaa")[: draw.randint(2, 6)])
    sim.plane.parts.observer = observer
    sim.checking = False
    for _ in range(steps):
        _act(sim, draw)
    for attempt in list(sim.plane.parts.attempts):
        sim.plane.abort(attempt.rid)
    sim.pump()
    sim.check()


def _act(sim: Sim, draw: random.Random) -> None:
    parts = sim.plane.parts
    live = sorted(parts.attempts, key=lambda a: a.rid)
    free = [rid for rid in RIDS if parts.attempts.find(rid) is None]
    ops = list(sim.outstanding)
    ready = [a for a in live if parts.is_candidate(a)]
    running = [a for a in live if a.state >= State.LOADING]
    waiting = [a for a in live if a.state < State.LOADING]
    match draw.randrange(15):
        case 0 | 12 if free:
            sim.submit(free[0], "tt" + draw.choice("ab") * draw.randint(0, 4))
        case 1 | 2 if ops:
            op = draw.choice(ops)
            keys = getattr(sim.outstanding[op], "keys", ())
            low = sim.landed.get(op, 0)
            sim.answer(op, pages=draw.randint(low, max(low, len(keys))), ok=draw.random() < 0.8)
        case 3 | 13 | 14 if reads := sim.of_kind(OpKind.READ):
            op = draw.choice(reads)
            command = sim.outstanding[op]
            assert isinstance(command, Read)
            sim.progress(op, draw.randint(0, len(command.keys)))
        case 4 | 5 if ready:
            sim.admit(draw.choice(ready).rid)
        case 6 if ready:
            candidate = sim.plane.consider(draw.choice(ready))
            if candidate is not None:
                sim.plane.defer(candidate)
        case 7 if running:
            sim.compute(draw.choice(running).rid)
        case 8 if running:
            sim.plane.finish(draw.choice(running).rid)
        case 9 if live and draw.random() < 0.4:
            rid = draw.choice(live).rid
            if waiting and draw.random() < 0.3:
                sim.plane.reject(draw.choice(waiting).rid)
            elif draw.random() < 0.5:
                sim.plane.abort(rid)
            else:
                sim.plane.retract(rid, parts.attempts.get(rid).num_tokens, parts.attempts.get(rid).keys)
        case 10 if draw.random() < 0.1:
            draw.choice((sim.plane.detach, sim.plane.attach, sim.plane.flush))()
        case 11 if parts.full.tree.evictable:
            pages = parts.full.take_device(parts.full.device.available + 1)
            assert pages is not None
            parts.full.give_device(pages)
        case _:
            sim.tick(draw.choice((0, 1, 5, 10)))
            return
    sim.pump()
