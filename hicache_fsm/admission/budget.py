"""How much one prefill batch may still take. Plain FULL pools; hybrid budgets join beside.

    total    device tokens that are free or evictable now, less what running requests are expected to grow
    input    prompt tokens that this batch may still compute
    chunk    prompt tokens of the current chunk, when prompts are cut

Device rows are taken at admission, so `total` is read from the pools each time and needs no charge for them;
only the expected growth is kept here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hicache_fsm.components.full import FullComponent
from hicache_fsm.errors import ConfigError

CLIP_MAX_NEW_TOKENS = 4096
"""Longest output that is reserved for: longer ones are rare, and growth is backed by retraction (SGLang's clip)."""


class BudgetState(enum.Enum):
    """Whether the next candidate may be tried."""

    CONTINUE = "continue"
    NO_TOKEN = "no_token"  # device memory is exhausted
    OTHER = "other"  # the batch is full for another reason: input or chunk budget


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """Limits of every prefill batch, in tokens and requests. `chunked_prefill_size` 0 switches chunking off."""

    max_prefill_tokens: int = 16_384
    chunked_prefill_size: int = 8_192
    max_running_requests: int = 256
    exact_chunk_fill: bool = False  # fill the chunk to the token; its end need not be a whole page
    # Prefill holds back while more pages than this wait to be written (0: never): computing faster than the store
    # takes pages would only evict them before they are stored.
    max_write_backlog_pages: int = 0
    write_patience_ms: int = 1000  # a store that has not answered a write for so long does not hold prefill back

    def __post_init__(self) -> None:
        if self.max_prefill_tokens < 1 or self.max_running_requests < 1 or self.chunked_prefill_size < 0:
            raise ConfigError(
                f"max_prefill_tokens {self.max_prefill_tokens} and max_running_requests {self.max_running_requests} "
                f"must be at least 1, chunked_prefill_size {self.chunked_prefill_size} at least 0"
            )


class PrefillBudget:
    """Budget of one pass."""

    __slots__ = ("full", "limits", "reserved", "input", "chunk", "admitted")

    def __init__(self, full: FullComponent, limits: BudgetLimits, growth: int) -> None:
        self.full = full
        self.limits = limits
        self.reserved = growth  # tokens that running requests are expected to need
        self.input = limits.max_prefill_tokens
        self.chunk = limits.chunked_prefill_size or None
        self.admitted = 0  # requests given work in this pass

    @property
    def page(self) -> int:
        return self.full.config.page_size

    @property
    def total(self) -> int:
        """Device tokens left for new work and its growth."""
        return self.full.room() * self.page - self.reserved

    def ceil_page(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def state(self) -> BudgetState:
        if self.total <= 0:
            return BudgetState.NO_TOKEN
        if self.input <= 0 or (self.chunk is not None and self.chunk <= 0):
            return BudgetState.OTHER
        return BudgetState.CONTINUE

    def cut(self, start: int, end: int) -> int:
        """Where this batch stops computing tokens [start, end): `end`, an earlier page boundary, or `start`
        if nothing fits. The fit test uses whole pages, as rows are allocated in pages."""
        extend = end - start
        if self.chunk is None:
            fits = self.admitted == 0 or self.ceil_page(extend) < self.input
            return end if fits else start
        limit = min(self.chunk, self.input) if self.admitted else self.chunk
        if (extend if self.limits.exact_chunk_fill else self.ceil_page(extend)) <= limit:
            return end
        stop = start + limit
        return stop if self.limits.exact_chunk_fill else max(start, stop // self.page * self.page)

    def charge(self, computed: int, growth: int) -> None:
        """Commit `computed` prompt tokens to this batch, and expect `growth` tokens later."""
        cost = computed if self.limits.exact_chunk_fill else self.ceil_page(computed)
        self.input -= cost
        if self.chunk is not None:
            self.chunk -= cost
        self.reserved += growth
        self.admitted += 1
