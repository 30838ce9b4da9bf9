"""Planted faults: the product broken on purpose, so that a replay can show that it would notice."""

from __future__ import annotations

from typing import NamedTuple

from hicache_fsm.control.effects import RequestEffects
from hicache_fsm.errors import ConfigError
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.model import Row
from hicache_fsm.replay.options import PLANTS
from hicache_gpu.faults import CopyFaults

SLOW_S = 0.002
"""Delay of each layer of each copy, so that a planted race is lost for certain."""


class EarlyRelease(RequestEffects):
    """The hold's rows go back to staging when the load is submitted, not when it has landed."""

    __slots__ = ()

    def spend_hold(self, attempt: Attempt, row: Row, load_pages: int) -> None:
        self.return_hold(attempt, row, load_pages)


class Planted(NamedTuple):
    """What to build instead of the real thing."""

    copies: CopyFaults | None
    effects: type[RequestEffects]


def plant(name: str) -> Planted:
    """Raises `ConfigError` on an unknown name; an empty one plants nothing."""
    match name:
        case "":
            return Planted(None, RequestEffects)
        case "early-staging-release":
            return Planted(CopyFaults(layer_delay_s=SLOW_S), EarlyRelease)
        case "skip-layer-wait":
            return Planted(CopyFaults(layer_delay_s=SLOW_S, skip_layer_wait=True), RequestEffects)
        case "early-ack":
            return Planted(CopyFaults(layer_delay_s=SLOW_S, early_ack=True), RequestEffects)
    raise ConfigError(f"unknown planted fault {name!r}; there are: {', '.join(PLANTS)}")
