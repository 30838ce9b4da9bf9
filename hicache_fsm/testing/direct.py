"""`DirectCache`: the scheduler's view of a control plane without threads, IO or copies.

Storage is not attached and keys are computed in place. For tests and measurements of a scheduler alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache_fsm.config import CacheConfig
from hicache_fsm.control.plane import ControlPlane
from hicache_fsm.ports import DEFAULT_NAMESPACE, Namespace
from hicache_fsm.tree.keys import page_keys


class DirectCache:
    """Implements `scheduler.reference.Cache` on a control plane alone. A tick is a millisecond."""

    def __init__(self, config: CacheConfig) -> None:
        self._plane = ControlPlane(config)
        self._plane.detach()
        self._now_ms = 0

    @property
    def plane(self) -> ControlPlane:
        return self._plane

    def submit(
        self, rid: str, tokens: Sequence[int], *, namespace: Namespace = DEFAULT_NAMESPACE, priority: int = 0
    ) -> object:
        keys = page_keys(tokens, self._plane.config.page_size, namespace)
        return self._plane.submit(rid, len(tokens), keys, priority=priority)

    def tick(self) -> None:
        self._now_ms += 1
        self._plane.tick((), self._now_ms)

    def launch(self) -> None:
        """Nothing is loaded without storage; releases need no poison here."""
        self._plane.take_commands()

    def wait_for_loads(self, ops: Sequence[int]) -> None:
        assert not ops, f"loads {tuple(ops)} without storage"
