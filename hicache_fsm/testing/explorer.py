"""Breadth-first exploration of the real control plane: every state under every input, within a `Scope`.

    result = explore(Scope(requests=2))
    assert result.exhausted and not result.violations

The plane is not modelled: each transition restores a snapshot into a real `ControlPlane`, calls it, and takes the next
snapshot. States are merged under the quotient that `quotient.RULES` declares. All invariants and all bytes are checked
in every new state, what must come back in every idle one, and fair liveness (`liveness`) over the whole graph. Since
the search is breadth first, a counterexample is a shortest one; it is a list of inputs that `replay` runs on a fresh
plane, without snapshots.
"""

from __future__ import annotations

import gc
import resource
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.model import Row
from hicache_fsm.testing.explore_scope import Scope
from hicache_fsm.testing.explore_world import Actor, Input, Taken, World
from hicache_fsm.testing.quotient import Names, undeclared

V = TypeVar("V")


class Label(NamedTuple):
    """What an edge of the graph is: the input, and who makes progress by it."""

    input: Input
    actor: Actor


class Moves(NamedTuple):
    """Where the attempts of the source state are in the target: their place, or -1 if the attempt has ended."""

    places: tuple[int, ...]


class Fired(NamedTuple):
    """What one input did to one attempt: the rows of the request table that fired, in order. A place of -1 before
    means that the attempt is new, after that it has ended."""

    before: int
    after: int
    rows: tuple[int, ...]


class Graph:
    """States by number, in the order in which they were found, and the edges between them. Compact: a million edges
    take 20 MB. `fired` is filled only if the search records rows."""

    def __init__(self) -> None:
        self.parent = array("q")  # the state from which each was found first, -1 for the initial one
        self.via = array("q")  # and the edge
        self.depth = array("H")
        self.start = array("q")  # first edge of each state; edges of one state are adjacent
        self.target = array("q")
        self.label = array("H")
        self.moves = array("H")
        self.fired = array("H")
        self.all_fired: list[tuple[Fired, ...]] = []
        self.labels: list[Label] = []
        self.all_moves: list[Moves] = []
        self._label_id: dict[Label, int] = {}
        self._moves_id: dict[Moves, int] = {}
        self._fired_id: dict[tuple[Fired, ...], int] = {}

    def __len__(self) -> int:
        return len(self.parent)

    def add_state(self, parent: int) -> int:
        self.parent.append(parent)
        self.via.append(len(self.target) if parent >= 0 else -1)
        self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)
        return len(self.parent) - 1

    def add_edge(self, target: int, label: Label, moves: Moves) -> None:
        self.target.append(target)
        self.label.append(_intern(label, self._label_id, self.labels))
        self.moves.append(_intern(moves, self._moves_id, self.all_moves))

    def add_fired(self, fired: tuple[Fired, ...]) -> None:
        self.fired.append(_intern(fired, self._fired_id, self.all_fired))

    def edges(self, state: int) -> range:
        """Edges of a state that was expanded; empty for one that was not."""
        if state >= len(self.start):
            return range(0)
        end = self.start[state + 1] if state + 1 < len(self.start) else len(self.target)
        return range(self.start[state], end)

    def path(self, state: int) -> list[Input]:
        """Inputs of a shortest way to a state."""
        out: list[Input] = []
        while self.parent[state] >= 0:
            out.append(self.labels[self.label[self.via[state]]].input)
            state = self.parent[state]
        return out[::-1]


T = TypeVar("T")


def _intern(value: T, known: dict[T, int], values: list[T]) -> int:
    found = known.get(value)
    if found is None:
        found = known[value] = len(values)
        values.append(value)
    return found


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong, and the inputs that lead there. `cycle` is empty, or repeats for ever after `inputs`."""

    what: tuple[str, ...]
    inputs: tuple[Input, ...]
    cycle: tuple[Input, ...] = ()


@dataclass(slots=True)
class Result(Generic[V]):
    """What an exploration found. `views` has one entry a state if a view was asked for."""

    scope: Scope
    graph: Graph
    depth: int = 0
    exhausted: bool = False
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0
    stopped: str = ""  # why it ended before it was exhausted
    views: list[V] = field(default_factory=list)

    @property
    def states(self) -> int:
        return len(self.graph)

    @property
    def transitions(self) -> int:
        return len(self.graph.target)


@dataclass(frozen=True, slots=True)
class Limits:
    """When to give up. `check_merged` also checks states that are merged with known ones: slower, and the way to see
    that the fields which the key drops are never wrong."""

    seconds: float = 0.0  # 0: none
    memory_mb: int = 0  # resident memory of the process; 0: none
    states: int = 0
    check_merged: bool = False


def explore(
    scope: Scope,
    limits: Limits = Limits(),
    *,
    view: Callable[[World], V] | None = None,
    liveness: bool = True,
    rows: bool = False,
) -> Result[V]:
    """Explore all states of a scope, or as many as the limits allow. Ends at the first violation of safety.

    `view` is called in every state, in the order of their numbers, and fills `Result.views`. With `rows`, the graph
    says which rows of the request table each edge fired.
    """
    from hicache_fsm.testing.liveness import find_traps  # reads the graph that is defined here

    began = time.monotonic()
    assert not undeclared(), f"fields with no rule in `quotient.RULES`: {undeclared()}"
    search = _Search(scope, limits, view, rows)
    result = search.result
    search.run(began)
    if liveness and result.exhausted and not result.violations:
        result.violations += find_traps(result.graph, search.facts)
    result.depth = max(result.graph.depth, default=0)
    result.seconds = time.monotonic() - began
    return result


class RowLog:
    """Collects which rows fire on which attempt, as the observer of a world's plane."""

    def __init__(self, world: World) -> None:
        self.rows: dict[tuple[str, int], list[int]] = {}
        world.parts.observer = self._note

    def _note(self, attempt: Attempt, row: Row, argument: int) -> None:
        self.rows.setdefault((attempt.rid, attempt.number), []).append(row.id)

    def fired(self, before: Names, after: Names) -> tuple[Fired, ...]:
        """One entry for each attempt on which a row fired or which is new."""
        source = {who: place for place, who in enumerate(before.attempts)}
        target = {who: place for place, who in enumerate(after.attempts)}
        whose = [*self.rows, *(who for who in after.attempts if who not in source and who not in self.rows)]
        return tuple([
            Fired(source.get(who, -1), target.get(who, -1), tuple(self.rows.get(who, ()))) for who in whose
        ])  # fmt: skip


class _Search(Generic[V]):
    """One breadth-first search."""

    def __init__(self, scope: Scope, limits: Limits, view: Callable[[World], V] | None, rows: bool) -> None:
        from hicache_fsm.testing.liveness import Facts

        self.world = World(scope)
        self.log: RowLog | None = RowLog(self.world) if rows else None
        self.limits = limits
        self.view = view
        self.result: Result[V] = Result(scope, Graph())
        self.facts = Facts()
        self.known: dict[bytes, int] = {}
        self.frontier: deque[tuple[Taken, Names]] = deque()

    def run(self, began: float) -> None:
        found = self.world.violations()
        if found:
            self.result.violations.append(Violation(tuple(found), ()))
        self._new(-1, *self.world.look())
        collecting = gc.isenabled()
        gc.disable()  # states hold no cycles; looking for some would take half of the time
        try:
            self._search(began)
        finally:
            if collecting:
                gc.enable()

    def _search(self, began: float) -> None:
        result, graph = self.result, self.result.graph
        expanded = 0
        while self.frontier and not result.violations:
            if expanded % 256 == 0 and self._over(began):
                return
            taken, names = self.frontier.popleft()
            graph.start.append(len(graph.target))
            self._expand(expanded, taken, names)
            expanded += 1
        result.exhausted = not result.violations

    def _over(self, began: float) -> bool:
        limits, result = self.limits, self.result
        if limits.seconds and time.monotonic() - began > limits.seconds:
            result.stopped = f"time limit of {limits.seconds:g} s"
        elif limits.memory_mb and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10 > limits.memory_mb:
            result.stopped = f"memory limit of {limits.memory_mb} MiB"
        elif limits.states and result.states > limits.states:
            result.stopped = f"limit of {limits.states} states"
        return bool(result.stopped)

    def _expand(self, state: int, taken: Taken, names: Names) -> None:
        """Take every input once from one state."""
        world, graph, known = self.world, self.result.graph, self.known
        world.restore(taken)
        for one, actor in world.inputs(names):
            if self.log is not None:
                self.log.rows.clear()
            try:
                world.apply(one, names)
                after, now = world.look()
                target = known.get(now.key, -1)
                found = world.violations() if target < 0 or self.limits.check_merged else []
            except Exception as error:  # whatever the plane raises on a legal input is a defect
                found = [f"crash: {type(error).__name__}: {error}"]
            if found:
                self.result.violations.append(Violation(tuple(found), (*graph.path(state), one)))
                return
            if target < 0:
                target = self._new(state, after, now)
            places = {who: place for place, who in enumerate(now.attempts)}
            graph.add_edge(target, Label(one, actor), Moves(tuple([places.get(who, -1) for who in names.attempts])))
            if self.log is not None:
                graph.add_fired(self.log.fired(names, now))
            world.restore(taken)

    def _new(self, parent: int, taken: Taken, names: Names) -> int:
        """Number a new state, note what liveness asks of it, and queue it."""
        state = self.known[names.key] = self.result.graph.add_state(parent)
        self.facts.note(self.world, names)
        if self.view is not None:
            self.result.views.append(self.view(self.world))
        self.frontier.append((taken, names))
        return state


class Replayed(NamedTuple):
    """One step of a replay."""

    input: Input
    text: str  # with the real names of requests and operations
    states: tuple[str, ...]  # of the live requests, afterwards


def replay(
    scope: Scope, inputs: Sequence[Input], after: Callable[[World], None] | None = None
) -> Iterator[Replayed]:
    """Run inputs on a fresh plane, with no snapshot restored; `after` is called behind each of them.

    Lets through what the plane raises.
    """
    world = World(scope)
    for one in inputs:
        names = world.names()
        text = world.describe(one, names)
        world.apply(one, names)
        if after is not None:
            after(world)
        states = tuple([f"{a.rid}:{a.state_name}" for a in sorted(world.parts.attempts, key=lambda a: a.seq)])
        yield Replayed(one, text, states)
