"""Reads what a replay came to: counters, and the conservation check."""

from __future__ import annotations

from hicache_fsm.errors import StoreError
from hicache_fsm.observe.summary import ReplayResult
from hicache_fsm.observe.transitions import StateWaits
from hicache_fsm.ports import KVStore
from hicache_fsm.replay.model import ReplayModel
from hicache_fsm.replay.options import ReplayOptions
from hicache_fsm.replay.workload import TraceRequest, device_only_tokens, ideal_tokens
from hicache_fsm.runtime.hicache import HiCache
from hicache_fsm.scheduler.reference import ReferenceScheduler, Tally


def find_leaks(cache: HiCache) -> list[str]:
    """The brute-force recount at the end of a run, when nothing should be owned any more."""
    parts = cache.plane.parts
    full = parts.full
    found = cache.plane.check_invariants()
    if not cache.plane.is_idle():
        found.append(f"not idle: {len(parts.attempts)} attempts, {len(parts.ops.live)} operations live")
    for what, count in (
        ("staging pages still owned", full.staging.used),
        ("tokens still pinned", full.pinned.value),
        ("tree pages still locked", full.tree.locked),
        ("device pages owned outside the tree", full.device.used - full.tree.resident),
        ("retry entries left", len(parts.retries.pending)),
        ("deadlines left", len(parts.agenda.due)),
        ("keys still marked as being written", len(parts.backup.pending) + len(parts.beliefs.inflight)),
    ):
        if count:
            found.append(f"{count} {what}")
    return found


def collect(
    options: ReplayOptions,
    workload: list[TraceRequest],
    cache: HiCache,
    scheduler: ReferenceScheduler,
    model: ReplayModel,
    waits: StateWaits,
    store: KVStore,
    seconds: float,
    interrupted: bool,
    rejections: list[str],
) -> ReplayResult:
    """Read all counters of a run that has been drained."""
    parts, tally = cache.plane.parts, scheduler.tally
    leaks = find_leaks(cache)
    stats = dict(parts.accounts.stats)
    return ReplayResult(
        requests=len(workload),
        outcomes=dict(tally.outcomes),
        tokens=_token_figures(options, workload, scheduler.tally),
        found=parts.accounts.found,
        spliced=parts.accounts.spliced,
        unfulfilled={reason: n for reason, n in parts.accounts.unfulfilled.items() if n},
        retries=stats["retries"],
        parks=stats["parks"],
        bypasses=stats["bypasses"],
        defers=stats["defers"],
        retractions=tally.retractions,
        restarts=tally.restarts,
        shrinks=stats["shrinks"],
        content_errors=model.wrong_rows,
        checked_rows=model.checked_rows,
        leaks=len(leaks),
        passes=tally.passes,
        seconds=round(seconds, 3),
        stats=stats,
        writes={
            "stored_pages": parts.backup.stored_pages,
            "dropped_pages": {why: n for why, n in parts.backup.dropped_pages.items() if n},
        },
        high_water=_high_water(options, cache),
        longest_waits={
            state: {"passes": wait.passes, "seconds": round(wait.seconds, 3), "rid": wait.rid}
            for state, wait in waits.longest().items()
        },
        store=_store_figures(cache, store),
        options=options.to_json(),
        interrupted=interrupted,
        store_folder="" if options.store is None else str(options.store),
        leak_list=leaks[:32],
        error_list=[f"{e.rid}: layer {e.layer}, {e.rows} rows from token {e.first_token} on" for e in model.errors],
        rejections=rejections,
    )


def _token_figures(options: ReplayOptions, workload: list[TraceRequest], tally: Tally) -> dict[str, int]:
    """Where the prompt tokens came from, beside what other caches could have made of them."""
    return {
        "prompt": tally.prompt,
        "device": tally.device,
        "storage": tally.storage,
        "computed": tally.computed,
        "redone": tally.redone,
        "generated": tally.generated,
        "ideal": ideal_tokens(workload),
        "device_only": device_only_tokens(workload, options.pools.device_tokens),
    }


def _high_water(options: ReplayOptions, cache: HiCache) -> dict[str, int]:
    """The most that was held at any time, in tokens, beside what there was."""
    full, page = cache.plane.parts.full, options.page_size
    return {
        "staging_reads": full.reads.high_water * page,
        "staging_writes": full.writes.high_water * page,
        "staging": options.pools.staging_tokens,
        "pinned": full.pinned.high_water,
        "pin_cap": cache.config.pin_cap_tokens,
    }


def _store_figures(cache: HiCache, store: KVStore) -> dict[str, int]:
    """What the store says of itself; a dead one says nothing."""
    figures = {"errors": cache.store_errors}
    try:
        figures.update(store.stats()._asdict())
    except StoreError:
        figures["dead"] = 1
    return figures
