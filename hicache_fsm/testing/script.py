"""What was done to a simulated plane, as a scenario that can be run again.

    sim = Sim(config, record=True)
    ...                                                    whatever is done to `sim` and to `sim.plane`
    print(to_scenario(sim.config, sim.script, "found in a test"))

`explored` does the same for the inputs of an explorer's counterexample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from hicache_fsm.config import CacheConfig
from hicache_fsm.control.plane import Admitted, Candidate, ControlPlane
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.ports import PageKey

if TYPE_CHECKING:
    from hicache_fsm.testing.explore_scope import Scope
    from hicache_fsm.testing.explore_world import Input, World


class RecordedPlane(ControlPlane):
    """A plane that writes each call of a scheduler, a client or an operator into a script, before it is made.

    Submissions, ticks and forwards are written by `Sim`, which knows labels and bytes.
    """

    __slots__ = ("script",)

    def __init__(self, config: CacheConfig, script: list[str]) -> None:
        super().__init__(config)
        self.script = script

    def consider(self, attempt: Attempt) -> Candidate | None:
        self.script.append(f"consider {attempt.rid}")
        return super().consider(attempt)

    def admit(self, candidate: Candidate, end_tokens: int) -> Admitted | None:
        self._considered(candidate, f"try admit {candidate.attempt.rid} to {end_tokens} tokens")
        return super().admit(candidate, end_tokens)

    def defer(self, candidate: Candidate) -> None:
        self._considered(candidate, f"defer {candidate.attempt.rid}")
        super().defer(candidate)

    def _considered(self, candidate: Candidate, line: str) -> None:
        """Admission and refusal consider the request themselves when they are run again."""
        if self.script[-1:] == [f"consider {candidate.attempt.rid}"]:
            self.script.pop()
        self.script.append(line)

    def extend(self, rid: str, end_tokens: int) -> bool:
        self.script.append(f"try extend {rid} to {end_tokens} tokens")
        return super().extend(rid, end_tokens)

    def finish(self, rid: str, num_tokens: int = 0, keys: tuple[PageKey, ...] = ()) -> bool:
        if num_tokens:
            self.script.append(f"# with {num_tokens} tokens and {len(keys)} keys, which a scenario cannot say:")
        self.script.append(f"finish {rid}")
        return super().finish(rid, num_tokens, keys)

    def abort(self, rid: str) -> bool:
        self.script.append(f"abort {rid}")
        return super().abort(rid)

    def reject(self, rid: str) -> bool:
        self.script.append(f"reject {rid}")
        return super().reject(rid)

    def retract(self, rid: str, num_tokens: int, keys: tuple[PageKey, ...] | None = None) -> Attempt:
        self.script.append(f"retract {rid} to {num_tokens} tokens{' hashed' if keys is None else ''}")
        return super().retract(rid, num_tokens, keys)

    def detach(self) -> None:
        self.script.append("detach")
        super().detach()

    def attach(self) -> None:
        self.script.append("attach")
        super().attach()

    def flush(self) -> None:
        self.script.append("flush")
        super().flush()


def to_scenario(config: CacheConfig, events: Iterable[str], title: str, seed: int = 0) -> str:
    """The text of a scenario of these settings and events; runs of equal events become one line."""
    from hicache_fsm.testing.scenario import Scenario, show_head  # `Sim` imports this module, scenarios run on `Sim`

    head = show_head(Scenario("script", config, title, seed=seed))
    return "\n".join([*head, "", *_folded(events)]) + "\n"


def _folded(events: Iterable[str]) -> Iterator[str]:
    for line, group in itertools.groupby(events):
        count = sum(1 for _ in group)
        yield line if count == 1 or line.startswith("#") else f"repeat {count}: {line}"


def explored(scope: Scope, inputs: Sequence[Input], title: str) -> str:
    """The scenario of an explorer's inputs: `explored(result.scope, violation.inputs, "...")`. If an input raises, it
    is the last one."""
    from hicache_fsm.testing.explore_world import World  # runs on `Sim`, which imports this module
    from hicache_fsm.testing.sim import Sim

    world = World(scope)
    sim = Sim(scope.config(), record=True)
    script = sim.script
    assert script is not None
    sim.checking = False
    world.sim, world.parts, stored = sim, sim.plane.parts, world.sim.stored
    if scope.warm:
        world._warm_up()
        sim.plane.take_restarted()
        sim.stored.clear()
        script.append("store is empty")
        sim.store_has(world.prompts[0][: scope.warm])
    if "late" not in scope.faults:
        _store_all(world)
    assert sim.stored == stored, "the explorer begins with another store"
    for one in inputs:
        if one.act == "late":
            _store_all(world)
        elif one.act == "evict":
            script.append("evict 1 pages")
        try:
            world.apply(one, world.names())
        except Exception as error:
            script.append(f"# raises {type(error).__name__}: {error}".replace("\n", " "))
            break
    return to_scenario(sim.config, script, title)


def _store_all(world: World) -> None:
    for prompt in dict.fromkeys(world.prompts):
        world.sim.store_has(prompt)
