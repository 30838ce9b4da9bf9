"""What an exploration covers: the bounds, with the reason for each, and the faults that may happen.

The bounds are part of every claim: "exhausted" means all states that a control plane of these pools, caps and requests
can reach under these inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hicache_fsm.config import CacheConfig, PrefetchPolicy
from hicache_fsm.errors import ConfigError

FAULTS: dict[str, str] = {
    "partial": "look-ups, reads and writes bring fewer pages than they could",
    "failed": "look-ups, copies and writes fail",
    "lost": "an executor is gone, its operation is reported as lost",
    "twice": "an operation is answered twice",
    "progress": "reads report pages before they end",
    "late": "storage gets the prompts' pages only some time later",
    "evict": "device pages that nobody locks are evicted at any moment",
    "retract": "the scheduler takes a running request back to its queue",
    "restart": "the scheduler starts a waiting request anew",
    "reject": "the scheduler turns a waiting request down",
    "chunk": "a prompt is computed in two chunks",
    "detach": "storage is detached and attached",
    "flush": "the tree is flushed",
    "hash": "page keys come with the answer to a Hash command",
}
DEFAULT_FAULTS = frozenset({"partial", "failed", "lost", "twice", "evict"})


@dataclass(frozen=True, slots=True)
class Scope:
    """Bounds of one exploration. Raises `ConfigError` on bounds that leave nothing to explore.

    Pages hold one token: no decision of the core depends on a page's inner tokens, only on whole pages and on the
    one token that is always computed.
    """

    requests: int = 2
    # One page beyond a resident one: a base to pin and to lose, and a span to fetch.
    pages: int = 2
    # Leading pages that all prompts share. Prompts that are equal make requests interchangeable.
    shared: int = 2
    # Leading pages that are on the device and in storage at the start.
    warm: int = 1
    device: int = 4
    staging: int = 1
    pins: int = 1  # tokens that holds may pin
    retry_cap: int = 1
    defer_cap: int = 2
    park_cap: int = 2
    bypass_cap: int = 1
    policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE
    faults: frozenset[str] = DEFAULT_FAULTS
    aborts: bool = True
    writes: bool = False
    # Inputs that leave operations without an owner are offered only while fewer than this many run: an executor
    # that falls behind without end would make the space infinite.
    orphans: int = 1
    deadline_ms: int = 1
    quantum_ms: int = 1
    poll_passes: int = 1

    def __post_init__(self) -> None:
        unknown = self.faults - set(FAULTS)
        if unknown:
            raise ConfigError(f"unknown faults {', '.join(sorted(unknown))}; known are {', '.join(FAULTS)}")
        if self.requests < 1 or self.pages < 1 or self.orphans < 1:
            raise ConfigError("requests, pages and orphans must be at least 1")
        if not 0 <= self.warm <= self.shared <= self.pages:
            raise ConfigError(f"0 <= warm {self.warm} <= shared {self.shared} <= pages {self.pages} must hold")
        if self.device < self.pages + 1:
            raise ConfigError(f"a prompt needs {self.pages + 1} device pages, there are {self.device}")
        if not 0 <= self.pins <= self.device - self.pages - 1:
            raise ConfigError(
                f"pins must lie in 0..{self.device - self.pages - 1}: the largest prompt must stay admittable"
            )

    @property
    def interchangeable(self) -> bool:
        """Whether all requests have the same prompt, so that only their order of arrival tells them apart."""
        return self.shared == self.pages

    def config(self) -> CacheConfig:
        return CacheConfig(
            page_size=1,
            device_pages=self.device,
            staging_pages=self.staging,
            max_context_tokens=self.device - self.pins,
            anchor_lock_cap=1.0,
            prefetch_threshold_tokens=1,
            prefetch_policy=self.policy,
            prefetch_timeout_base_ms=self.deadline_ms,
            prefetch_timeout_per_ki_token_ms=0,
            prefetch_hard_max_ms=self.deadline_ms,
            retry_max_attempts=self.retry_cap,
            retry_poll_interval_passes=self.poll_passes,
            max_defers=self.defer_cap,
            park_cap=self.park_cap,
            chance_quantum_ms=self.quantum_ms,
            bypass_cap=self.bypass_cap,
            load_pool_usage_fraction=1.0,
            write_staging_fraction=0.5,
            write_margin_fraction=0.0,
            # Without writes, whatever is published goes over the backlog at once.
            write_backlog_factor=2 if self.writes else 0,
            # Bounds that are out of reach, so that the order in which these lists forget is no part of the state.
            belief_entries=1024,
            negative_entries=1024,
            negative_ttl_ms=self.quantum_ms,
            history_length=1,
            debug=True,
            poison=True,
        )

    def prompt(self, request: int) -> tuple[str, ...]:
        """Labels of the pages of a request's prompt."""
        own = f"r{request}"
        return tuple("shared" if page < self.shared else own for page in range(self.pages))

    def group(self, request: int) -> int:
        """Requests of one group are interchangeable."""
        return 0 if self.interchangeable else request

    def describe(self) -> str:
        shown: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        shown["policy"] = self.policy.value
        shown["faults"] = ",".join(name for name in FAULTS if name in self.faults) or "none"
        return " ".join(f"{name}={value}" for name, value in shown.items())
