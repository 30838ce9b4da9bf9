"""Settings of the control plane, with their defaults, units and reasons. Names follow SGLang's."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hicache_fsm.errors import ConfigError


class PrefetchPolicy(enum.Enum):
    """How long a waiting request may hold its place for storage (`--hicache-storage-prefetch-policy`)."""

    BEST_EFFORT = "best_effort"  # cut when the scheduler reaches the request; what has landed is used
    WAIT_COMPLETE = "wait_complete"  # wait for the read, under the hard maximum only
    TIMEOUT = "timeout"  # wait up to base + per-token time, under the hard maximum


_AT_LEAST_ONE = (
    "page_size", "device_pages", "staging_pages", "max_context_tokens", "park_cap", "io_batch_pages",
    "prefetch_hard_max_ms", "chance_quantum_ms", "history_length", "belief_entries", "max_defers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """All limits of the control plane. Lengths named `*_tokens` are tokens, `*_pages` whole pages,
    `*_ms` milliseconds of the agreed clock, `*_passes` scheduler passes.

    Raises `ConfigError` on a value that cannot work.
    """

    page_size: int = 64
    device_pages: int = 8192
    staging_pages: int = 2048
    max_context_tokens: int = 131_072
    # Shorter remainders are not worth a look-up (SGLang `prefetch_threshold`).
    prefetch_threshold_tokens: int = 256
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_timeout_base_ms: int = 1000
    prefetch_timeout_per_ki_token_ms: int = 250
    # No wait for storage is longer than this, whatever the policy: a lost answer must cost one request 30 s.
    prefetch_hard_max_ms: int = 30_000
    retry_max_attempts: int = 8
    retry_poll_interval_passes: int = 8
    # Capacity refusals of one hold before it is dropped (SGLang `max_staged_admission_defers`).
    max_defers: int = 32
    # Chances that a parked hit gets before the request recomputes; SGLang has no such bound.
    park_cap: int = 1024
    # An idle loop turns thousands of times a second; a pass without news counts as a chance only this often.
    chance_quantum_ms: int = 10
    # Younger hits that may pass a parked head that waits for pin budget, so that passing cannot starve it.
    bypass_cap: int = 8
    # Share of the device pool that holds may pin (SGLang `SGLANG_HICACHE_BUFFER_ANCHOR_LOCK_CAP`).
    anchor_lock_cap: float = 0.5
    load_pool_usage_fraction: float = 0.9
    write_staging_fraction: float = 0.2
    # Kept free for loads when the write window is computed.
    write_margin_fraction: float = 0.1
    # One storage call moves at most this many pages (SGLang's storage batch).
    io_batch_pages: int = 128
    # Queued write spans are bounded by this multiple of the device pool: a leak backstop, not a load control.
    write_backlog_factor: int = 2
    belief_entries: int = 524_288
    # Keys whose read failed although the look-up found them; asked again only after this many others.
    negative_entries: int = 4096
    negative_ttl_ms: int = 10_000
    history_length: int = 64
    # Re-check ownership after each transition; costs about a microsecond.
    debug: bool = False
    # Emit `Release` commands so that the shell overwrites released rows: use after release shows as a wrong byte.
    poison: bool = False

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("retry_max_attempts", "prefetch_threshold_tokens", "bypass_cap", "write_backlog_factor"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}; 0 switches it off")
        for name in ("anchor_lock_cap", "load_pool_usage_fraction", "write_staging_fraction", "write_margin_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is a share and must lie in 0..1, not {getattr(self, name)}")

    @property
    def device_tokens(self) -> int:
        return self.device_pages * self.page_size

    @property
    def staging_tokens(self) -> int:
        return self.staging_pages * self.page_size

    @property
    def threshold_pages(self) -> int:
        """Smallest number of whole pages that is worth a look-up."""
        return max(1, -(-self.prefetch_threshold_tokens // self.page_size))

    @property
    def pin_cap_tokens(self) -> int:
        """Pins alone must never make the largest legal request unadmittable (upstream's headroom clamp)."""
        share = int(self.anchor_lock_cap * self.device_tokens)
        return max(0, min(share, self.device_tokens - self.max_context_tokens))

    def read_deadline_ms(self, requested_tokens: int) -> int:
        """Longest wait for one attempt's storage, from its first look-up on."""
        if self.prefetch_policy is not PrefetchPolicy.TIMEOUT:
            return self.prefetch_hard_max_ms
        per_token = requested_tokens * self.prefetch_timeout_per_ki_token_ms // 1024
        return min(self.prefetch_hard_max_ms, self.prefetch_timeout_base_ms + per_token)
