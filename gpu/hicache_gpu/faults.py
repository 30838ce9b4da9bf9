"""Faults that a test or a replay injects into a copy engine. All are off by default.

Decisions are drawn from the seed, the direction and the operation's number within its direction, so that they do
not depend on which thread runs first. Two kinds:

    hardships        delays, gates, failures, another order of independent copies. The contract holds, and
                     whoever drives the engine must cope.
    planted faults   `early_ack`, `short_copy`, `skip_layer_wait`, `ignore_fence`, `ignore_hazards`. The engine
                     breaks its contract, and a good test or replay must notice wrong bytes.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

from hicache_fsm.errors import ConfigError, StagingError
from hicache_gpu.interface import Direction


class Gate:
    """A place where a copy thread stops until the test opens it."""

    __slots__ = ("_opened", "reached")

    def __init__(self) -> None:
        self.reached = threading.Event()  # the copy thread has come to the gate
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def wait_reached(self, timeout_s: float = 30.0) -> None:
        """Block until the copy thread stands here. Raises `StagingError` if it does not come."""
        if not self.reached.wait(timeout_s):
            raise StagingError(f"no copy came to the gate within {timeout_s} s; check its number and layer")

    def pass_through(self) -> None:
        """Called by the copy thread."""
        self.reached.set()
        self._opened.wait()


@dataclass(slots=True)
class CopyFaults:
    """What goes wrong, and when. Operations are numbered from 0 in each direction, in the order of their calls.

    Raises `ConfigError` on a probability outside 0..1 or a negative delay or layer.
    """

    seed: int = 0
    layer_delay_s: float = 0.0  # before each layer of each operation
    fail_loads: frozenset[int] = frozenset()
    fail_offloads: frozenset[int] = frozenset()
    fail_probability: float = 0.0
    fail_at_layer: int = 0  # a failing copy has moved the layers before this one
    reorder_probability: float = 0.0  # the next two queued copies change places if they share no page
    early_ack: bool = False  # `done` is called before the first byte moves
    short_copy: bool = False  # the last page of each operation is left out, and reported as copied
    skip_layer_wait: bool = False  # `layer_ready` returns at once
    ignore_fence: bool = False  # copies do not wait for running forwards
    ignore_hazards: bool = False  # copies of the two directions that share a page are not ordered
    _gates: dict[tuple[Direction, int, int], Gate] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("fail_probability", "reorder_probability"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must lie in 0..1, not {getattr(self, name)}")
        for name in ("layer_delay_s", "fail_at_layer"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}")

    def gate(self, direction: Direction, nth: int, layer: int) -> Gate:
        """Stop the nth copy of that direction before `layer`; the number of layers means: before its `done`.

        Set gates before the operation is queued.
        """
        return self._gates.setdefault((direction, nth, layer), Gate())

    def allow(self, direction: Direction, nth: int, layer: int, *, last: bool) -> bool:
        """Called by the copy thread before each layer, and once more (`last`) before a success is reported.

        Waits as the delay and the gates say; False if the operation fails here.
        """
        gate = self._gates.get((direction, nth, layer))
        if gate is not None:
            gate.pass_through()
        if self.layer_delay_s and not last:
            time.sleep(self.layer_delay_s)
        return not ((last or layer == self.fail_at_layer) and self._fails(direction, nth))

    def _fails(self, direction: Direction, nth: int) -> bool:
        chosen = self.fail_loads if direction is Direction.LOAD else self.fail_offloads
        return nth in chosen or self._chance(self.fail_probability, direction, nth, "fail")

    def swaps(self, direction: Direction, nth: int) -> bool:
        """Whether this copy lets the one queued behind it go first."""
        return self._chance(self.reorder_probability, direction, nth, "swap")

    def _chance(self, probability: float, direction: Direction, nth: int, what: str) -> bool:
        # Seeding costs microseconds and is skipped in the usual case.
        return probability > 0.0 and random.Random(f"{self.seed}/{direction.value}/{nth}/{what}").random() < probability
