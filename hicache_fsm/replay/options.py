"""What a replay can be told. The command line and tests fill it in."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hicache_fsm.config import PrefetchPolicy
from hicache_fsm.errors import ConfigError
from hicache_fsm.testing.faulty_store import NO_FAULTS, Faults


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Tokens of the device pool and of staging."""

    device_tokens: int
    staging_tokens: int


POOLS = {
    "default": PoolSizes(524_288, 131_072),
    "tight": PoolSizes(262_144, 65_536),
}
"""Presets. `tight` makes parking, deferring, retraction and shrinking happen."""

PLANTS = ("early-staging-release", "skip-layer-wait", "early-ack")
"""Faults that `replay.planted` can build in."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Raises `ConfigError` on values that cannot work."""

    trace: Path | None = None
    requests: int = 400  # of the built-in workload
    seed: int = 0
    limit: int | None = None
    speed: float = 0.0  # trace time over virtual time; 0: as fast as `concurrency` allows
    concurrency: int = 64  # requests that wait or run
    page_size: int = 64
    bytes_per_token: int = 64
    num_layers: int = 4
    pools: PoolSizes = POOLS["default"]
    store: Path | None = None  # None: a temporary folder, removed at the end
    store_bytes: int | None = None
    policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    retry_max_attempts: int = 8
    poll_interval: int = 8
    max_defers: int = 32
    pin_cap: float = 0.5
    park_cap: int = 1024
    chunked_prefill_size: int = 8192
    max_prefill_tokens: int = 16_384
    max_running_requests: int = 256
    max_context_tokens: int | None = None  # None: what the workload needs
    read_threads: int = 8
    lookup_threads: int = 4
    write_threads: int = 4
    faults: Faults = field(default_factory=lambda: NO_FAULTS)
    kill_store_after: int | None = None  # store calls after which every call fails
    planted: str = ""  # a fault of the staging layer or the core that the replay must notice: one of PLANTS
    pass_ms: int = 1  # virtual time of one pass
    debug: bool = False

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.requests < 1 or self.pass_ms < 1:
            raise ConfigError("concurrency, requests and pass_ms must be at least 1")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit {self.limit} leaves nothing to replay; it must be at least 1")
        if self.speed < 0:
            raise ConfigError(f"speed {self.speed} is negative; 0 means as fast as concurrency allows")
        if self.page_size < 1 or self.num_layers < 1:
            raise ConfigError("page_size and num_layers must be at least 1")
        if self.bytes_per_token < 8 or self.bytes_per_token % (8 * self.num_layers):
            raise ConfigError(
                f"bytes_per_token {self.bytes_per_token} must be a multiple of 8 bytes in each of "
                f"{self.num_layers} layers"
            )
        for name in ("device_tokens", "staging_tokens"):
            if getattr(self.pools, name) < self.page_size:
                raise ConfigError(f"{name} must hold at least one page of {self.page_size} tokens")
        if self.kill_store_after is not None and self.kill_store_after < 0:
            raise ConfigError(f"kill_store_after {self.kill_store_after} is negative; it counts store calls")

    @property
    def source(self) -> str:
        """The workload in words."""
        return f"the built-in chat workload, seed {self.seed}" if self.trace is None else str(self.trace)

    def to_json(self) -> dict[str, Any]:
        """All options with plain values, nested ones flattened; faults only where there are any."""
        out = {name: value for name, value in asdict(self).items() if name not in ("pools", "faults")}
        out.update(asdict(self.pools), policy=self.policy.value)
        out.update({name: rate for name, rate in asdict(self.faults).items() if rate})
        return {name: str(value) if isinstance(value, Path) else value for name, value in out.items()}
