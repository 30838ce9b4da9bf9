"""`Machine.fire` beside its `transitions` twin: the same event with one guard, one effect and a history entry.

A parked hit is refused: the guard `chances_left` is asked, the effect `count_chance` runs, a step is recorded.
"""

from __future__ import annotations

import timeit
from collections import deque
from collections.abc import Callable

from hicache_fsm.lifecycle.machine import Machine, Step
from hicache_fsm.lifecycle.model import Row
from hicache_fsm.lifecycle.table import REQUEST_TABLE, Event, State
from hicache_fsm.lifecycle.twin import TwinModel, build_machine

EVENT = REQUEST_TABLE.events[Event.REFUSED].name
REPEATS = 15
MIN_RATIO = 10.0  # below this there would be little reason to have a machine of our own


class Parked:
    """A subject with the slots that firing touches."""

    __slots__ = ("chances", "history", "state")

    def __init__(self) -> None:
        self.state: int = State.PARKED
        self.history: deque[Step] = deque(maxlen=64)
        self.chances = 0

    def describe(self) -> str:
        return "parked hit"


def _yes(subject: object, argument: int) -> bool:
    return True


def _nothing(subject: object, row: Row, argument: int) -> None:
    return None


def _count(subject: Parked, row: Row, argument: int) -> None:
    subject.chances += 1


def machine_job() -> tuple[Callable[[], object], Callable[[], int]]:
    """One event on the machine, and how many were fired so far."""
    effects: dict[str, Callable[[Parked, Row, int], None]] = dict.fromkeys(REQUEST_TABLE.effects, _nothing)
    machine = Machine(REQUEST_TABLE, dict.fromkeys(REQUEST_TABLE.guards, _yes), {**effects, "count_chance": _count})
    subject, event, fire = Parked(), Event.REFUSED, machine.fire
    return (lambda: fire(subject, event, 0)), (lambda: subject.chances)


def twin_job() -> tuple[Callable[[], object], Callable[[], int]]:
    """The same on the twin."""
    counter = Parked()

    def count(model: TwinModel, row: Row, argument: int) -> None:
        counter.chances += 1

    effects: dict[str, Callable[[TwinModel, Row, int], None]] = dict.fromkeys(REQUEST_TABLE.effects, _nothing)
    model = TwinModel(dict.fromkeys(REQUEST_TABLE.guards, _yes), {**effects, "count_chance": count})
    machine = build_machine(REQUEST_TABLE, model)
    machine.set_state(REQUEST_TABLE.states[State.PARKED].name, model)
    trigger = machine.events[EVENT].trigger
    return (lambda: trigger(model, 0)), (lambda: counter.chances)


def microseconds(job: Callable[[], object], number: int) -> float:
    """Cost of one call: the best of several rounds, since whatever else runs can only add to it."""
    return min(timeit.repeat(job, number=number, repeat=REPEATS)) / number * 1e6


def run() -> dict[str, float]:
    """Microseconds per event (the call through a lambda included), and how many times cheaper the machine is.

    Asserts that both did the job on each call, and that the machine is at least `MIN_RATIO` times cheaper.
    """
    results = {}
    for name, (job, fired), number in (("machine_fire_us", machine_job(), 20_000), ("twin_fire_us", twin_job(), 1_000)):
        results[name] = microseconds(job, number)
        assert fired() == number * REPEATS, f"{name}: {fired()} effects in {number * REPEATS} calls"
    ratio = results["twin_fire_us"] / results["machine_fire_us"]
    assert ratio >= MIN_RATIO, f"the machine is only {ratio:.1f} times cheaper than its twin: {results}"
    return results | {"ratio": ratio}
