"""Every token that a look-up reports is accounted exactly once: spliced, or unfulfilled with a reason.

The tokens not yet accounted travel with their owner (`Attempt.unresolved`, then `Operation.unresolved`);
`open_tokens` is their sum. So at any moment `found == spliced + sum(unfulfilled) + open`.
"""

from __future__ import annotations

from hicache_fsm.lifecycle.table import Outcome


class HitAccounts:
    """Counters of the load path, in tokens and in events. Kept whether or not anybody exports them."""

    __slots__ = (
        "requested", "found", "spliced", "unfulfilled", "l3_miss_tokens", "stats",
    )  # fmt: skip

    STATS = (
        "attempts", "issued", "issued_assumed_stored", "declined_too_short", "declined_rate_limited",
        "declined_anchor_lost", "declined_device_covered", "declined_unservable_prefix", "declined_host_oversize",
        "revoked_insufficient", "revoked_full_miss", "l3_demand_requests", "failed_lookups", "retries", "parks",
        "bypasses", "defers", "shrinks", "unpinned_reads", "failed_loads", "negative_hits",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requested = 0
        self.found = 0
        self.spliced = 0
        self.l3_miss_tokens = 0
        self.unfulfilled: dict[str, int] = {outcome.value: 0 for outcome in Outcome}
        self.stats: dict[str, int] = dict.fromkeys(self.STATS, 0)

    def count(self, stat: str, amount: int = 1) -> None:
        self.stats[stat] += amount

    def publish(self, requested: int, hit: int) -> None:
        """One published look-up: `requested` tokens asked for, of which `hit` are stored."""
        assert 0 <= hit <= requested, f"{hit} tokens hit of {requested} requested"
        self.requested += requested
        self.found += hit
        self.l3_miss_tokens += requested - hit
        self.count("l3_demand_requests")

    def splice(self, tokens: int) -> None:
        self.spliced += tokens

    def lose(self, tokens: int, outcome: str) -> None:
        """Close found tokens that will not reach the device through this look-up."""
        if tokens:
            self.unfulfilled[Outcome(outcome).value] += tokens

    def check(self, open_tokens: int) -> list[str]:
        closed = self.spliced + sum(self.unfulfilled.values())
        if self.found != closed + open_tokens:
            return [f"found {self.found} != spliced + unfulfilled {closed} + open {open_tokens}"]
        return []
