"""What a replay came to: counters, the conservation check, and whether it counts as passed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hicache_fsm.ports import KVStore
from hicache_fsm.observe.transitions import StateWaits
from hicache_fsm.replay.model import ReplayModel
from hicache_fsm.replay.options import ReplayOptions
from hicache_fsm.replay.workload import TraceRequest, device_only_tokens, ideal_tokens
from hicache_fsm.runtime.hicache import HiCache
from hicache_fsm.scheduler.reference import ReferenceScheduler


@dataclass(slots=True)
class ReplayResult:
    """Fields are those of the JSON file. Lengths are tokens unless the name says otherwise."""

    requests: int
    outcomes: dict[str, int]
    tokens: dict[str, int]  # prompt, device, storage, computed, redone, generated, ideal, device_only
    found: int
    spliced: int
    unfulfilled: dict[str, int]  # reason -> tokens; only reasons that occurred
    retries: int
    parks: int
    defers: int
    retractions: int
    restarts: int
    shrinks: int
    content_errors: int  # rows read that held wrong bytes
    checked_rows: int  # rows read and compared
    leaks: int
    passes: int
    seconds: float
    stats: dict[str, int]  # further counters of the load path
    writes: dict[str, Any]  # pages stored and dropped
    high_water: dict[str, int]
    longest_waits: dict[str, dict[str, Any]]  # state -> passes, seconds, rid
    store: dict[str, int]
    interrupted: bool = False
    store_folder: str = ""
    leak_list: list[str] = field(default_factory=list)
    error_list: list[str] = field(default_factory=list)
    rejections: list[str] = field(default_factory=list)

    @property
    def ended(self) -> int:
        return sum(self.outcomes.values())

    @property
    def reuse_of_ideal(self) -> float:
        """Share of the ideal's tokens that came from device or storage; above 1 on a warm store."""
        ideal = self.tokens["ideal"]
        return (self.tokens["device"] + self.tokens["storage"]) / ideal if ideal else 1.0

    @property
    def reuse(self) -> float:
        """Share of the committed prompt tokens that came from device or storage."""
        prompt = self.tokens["prompt"]
        return (self.tokens["device"] + self.tokens["storage"]) / prompt if prompt else 0.0

    @property
    def balanced(self) -> bool:
        return self.found == self.spliced + sum(self.unfulfilled.values())

    @property
    def passed(self) -> bool:
        """All requests ended, no byte was wrong, nothing leaked, every found token has its place."""
        whole = not self.interrupted and self.ended == self.requests
        return whole and not self.content_errors and not self.leaks and self.balanced

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed, "reuse_of_ideal": self.reuse_of_ideal, "reuse": self.reuse}


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
) -> ReplayResult:
    """Read all counters of a run that has been drained."""
    parts, tally = cache.plane.parts, scheduler.tally
    leaks = find_leaks(cache)
    stats = dict(parts.accounts.stats)
    page = options.page_size
    return ReplayResult(
        requests=len(workload),
        outcomes=dict(tally.outcomes),
        tokens={
            "prompt": tally.prompt,
            "device": tally.device,
            "storage": tally.storage,
            "computed": tally.computed,
            "redone": tally.redone,
            "generated": tally.generated,
            "ideal": ideal_tokens(workload),
            "device_only": device_only_tokens(workload, options.pools.device_tokens),
        },
        found=parts.accounts.found,
        spliced=parts.accounts.spliced,
        unfulfilled={reason: n for reason, n in parts.accounts.unfulfilled.items() if n},
        retries=stats["retries"],
        parks=stats["parks"],
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
        high_water={
            "staging_reads": parts.full.reads.high_water * page,
            "staging_writes": parts.full.writes.high_water * page,
            "staging": options.pools.staging_tokens,
            "pinned": parts.full.pinned.high_water,
            "pin_cap": cache.config.pin_cap_tokens,
        },
        longest_waits={
            state: {"passes": wait.passes, "seconds": round(wait.seconds, 3), "rid": wait.rid}
            for state, wait in waits.longest().items()
        },
        store={"errors": cache.store_errors},
        interrupted=interrupted,
        leak_list=leaks[:32],
        error_list=[f"{e.rid}: layer {e.layer}, {e.rows} rows from token {e.first_token} on" for e in model.errors],
    )
