"""What every copy engine offers beside the staging port: the forward fence and the reported errors.

An engine on an accelerator has one stream where the CPU engine has one thread and queue for each direction, and
records an event on its compute stream where the CPU engine counts forwards.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from hicache_fsm.ports import StagingEngine
from hicache_gpu.layout import KVLayout


class Direction(enum.Enum):
    """One queue of copies each."""

    LOAD = "load"  # host to device
    OFFLOAD = "offload"  # device to host


class CopyEngine(StagingEngine, Protocol):
    """A staging engine with a forward fence.

    A copy starts only after every forward that began before the copy was queued has ended: a freed row may still
    be written by the forward that last used it. So queue the loads of a batch before its own forward begins.

    Copies that share a page (staging or device) keep the order in which they were queued, in both directions.
    """

    @property
    def layout(self) -> KVLayout: ...

    @property
    def errors(self) -> Sequence[BaseException]:
        """Unexpected exceptions of copies and of `done` callbacks; `close` raises the first of them."""
        ...

    def forward_begin(self) -> int:
        """A forward that may read or write any device row starts now. Returns the token that ends it."""
        ...

    def forward_end(self, token: int) -> None:
        """That forward touches no row any more. Raises `StagingError` if the token is not running."""
        ...
