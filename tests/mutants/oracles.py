"""What notices a fault when no test knows the right answer: invariants, bytes, the code's own assertions, the end.

`ablation` runs random walks in which nothing that an oracle finds ends the run, so that each of them has its chance.
An oracle is the *sole* one of a fault if no other would have noticed it in any walk: with it switched off, all walks
pass.
"""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType

from hicache_fsm.control.checks import NAMES
from hicache_fsm.errors import IllegalTransition
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.testing.pipeline_walk import random_walk
from hicache_fsm.testing.sim import Sim

STEPS = 80
WALK_SECONDS = 4
OTHERS = {
    "bytes": "pages of the tree, holds and stored pages hold the bytes of their keys (the simulation's own check)",
    "assertion": "an assertion of the code itself, or an error of Python's in it",
    "illegal event": "an event that the table forbids in this state",
    "leaks": "when all is answered and ended, nothing is owned and no book lists anything",
    "end": "every request ends within the bound, and asks storage no more often than its caps allow",
    "walk": "an expectation of the walk itself",
}


def ablation(walks: int) -> dict[str, int]:
    """In how many of the walks each oracle noticed something."""
    noticed: Counter[str] = Counter()
    for seed in range(walks):
        noticed.update(_walk(seed))
    return dict(sorted(noticed.items()))


def _walk(seed: int) -> set[str]:
    found: set[str] = set()

    def record(sim: Sim) -> None:
        found.update(text.partition(":")[0] for text in sim.plane.check_invariants())
        if sim.wrong or sim._wrong_bytes():
            found.add("bytes")

    def record_ownership(attempt: Attempt) -> None:
        try:
            check_ownership(attempt)
        except AssertionError:
            found.add("ownership")

    check, check_ownership = Sim.check, Attempt.check_ownership
    Sim.check, Attempt.check_ownership = record, record_ownership  # type: ignore[method-assign, assignment]
    before = signal.signal(signal.SIGALRM, _ring)
    signal.alarm(WALK_SECONDS)
    try:
        random_walk(seed, STEPS)
    except RuntimeError as error:
        found.add(_classify(error.__cause__ or error))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        Sim.check, Attempt.check_ownership = check, check_ownership  # type: ignore[method-assign]
    assert found <= {*NAMES, *OTHERS}, f"unknown oracles: {found}"
    return found


def _ring(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("a walk hangs")


def _classify(error: BaseException) -> str:
    """Which oracle an exception is."""
    text = str(error)
    if isinstance(error, IllegalTransition):
        return "illegal event"
    if text.startswith("left behind"):
        return "leaks"
    if isinstance(error, TimeoutError) or text.startswith(("not done after", "look-ups beyond")):
        return "end"
    where = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return "walk" if where.name in ("pipeline_walk.py", "sim.py") else "assertion"
