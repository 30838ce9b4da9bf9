"""A batch, and the model that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hicache_fsm.admission.adder import PrefillEntry
from hicache_fsm.scheduler.requests import Request


class PrefillWork(NamedTuple):
    """One request's prompt tokens [entry.start, entry.end), and the pages of tokens [0, entry.end)."""

    request: Request
    entry: PrefillEntry
    pages: Sequence[int]


@dataclass(slots=True)
class Batch:
    """What one forward computes. A decoding request reads its rows [0, computed) and writes row `computed`,
    which lies in `Request.last_page`."""

    prefill: list[PrefillWork] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)

    @property
    def load_ops(self) -> tuple[int, ...]:
        """Loads that this batch depends on; each layer waits for that layer of each of them."""
        return tuple(sorted({op for work in self.prefill for op in work.entry.load_ops}))


class Model(Protocol):
    """Computes batches. For tests and replays; an engine has its own."""

    def forward(self, batch: Batch) -> tuple[list[int], list[int]]:
        """Write the KV of the batch's tokens. Returns the next token of each prefill entry (ignored for
        chunks) and of each decoding request. Raises `LoadFailed` if a load that it depends on has failed;
        it must then be safe to call again with a smaller batch."""
        ...
