"""Fair liveness over an explored graph.

    waits end      an attempt does not await storage for ever, whatever the others, eviction and storage do
    no loop        no cycle of inputs leads one waiting attempt through two states: every way on spends something
    attempts end   an attempt does not live for ever, if requests are no longer retracted and the tree not flushed
    all returns    once no request lives, the plane becomes idle

A *trap* is a set of states, strongly connected (one state counts, by stuttering), in which the goal is never met and
in which a fair run may stay: each fair action is disabled somewhere in it, or taken inside it. Fairness is weak, and
owed by work and answers only: passes, time, answers of any kind, admission, computing, finishing. None is owed
by aborts, retractions, eviction, faults or operators.

Attempts are followed along the edges by their place, since interchangeable requests are not told apart in a state.
An answer's owner counts as "mine" or "another's": that lumps the others' answers together, so a run counts as
fair sooner than it is, and a trap is never missed.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from hicache_fsm.lifecycle.table import State
from hicache_fsm.testing.quotient import Names

if TYPE_CHECKING:
    from hicache_fsm.testing.explore_world import Input, World
    from hicache_fsm.testing.explorer import Graph, Violation

FAIR = frozenset({"pass", "wait", "admit", "compute", "extend", "finish"})
RESTARTS = frozenset({"retract", "flush"})
STORAGE_WAITS = frozenset({State.REFETCH, State.QUERYING, State.READING, State.PARKED})


class Facts:
    """What liveness asks of each state: the states of its attempts by place, and whether the plane is idle."""

    def __init__(self) -> None:
        self.idle = bytearray()
        self.which = array("H")
        self.states: list[tuple[int, ...]] = []
        self._known: dict[tuple[int, ...], int] = {}

    def note(self, world: World, names: Names) -> None:
        states = tuple([int(world.parts.attempts.get(rid).state) for rid, _ in names.attempts])
        found = self._known.get(states)
        if found is None:
            found = self._known[states] = len(self.states)
            self.states.append(states)
        self.which.append(found)
        self.idle.append(world.sim.plane.is_idle())

    def of(self, state: int) -> tuple[int, ...]:
        return self.states[self.which[state]]


class _Followed:
    """The graph with one attempt followed: a node is state * width + place. With width 1, nobody is followed."""

    def __init__(self, graph: Graph, facts: Facts, wanted: Callable[[int, int], bool], without: frozenset[str]) -> None:
        self.graph = graph
        self.facts = facts
        self.allowed = [label.input.act not in without for label in graph.labels]
        self.width = max((len(states) for states in facts.states), default=0) or 1
        self.inside = bytearray(len(graph) * self.width)
        for state in range(len(graph)):
            for place in range(len(facts.of(state))):
                self.inside[state * self.width + place] = wanted(state, place)

    def next(self, node: int) -> Iterator[tuple[int, int]]:
        """(edge, node) of all allowed edges that stay inside."""
        graph, width = self.graph, self.width
        state, place = divmod(node, width)
        for edge in graph.edges(state):
            if self.allowed[graph.label[edge]]:
                to = graph.all_moves[graph.moves[edge]].places[place]
                if to >= 0:
                    target = graph.target[edge] * width + to
                    if self.inside[target]:
                        yield edge, target

    def fair(self, node: int) -> set[tuple[str, bool]]:
        """Fair actions that change anything here."""
        graph = self.graph
        state, place = divmod(node, self.width)
        return {
            self.actor(edge, place) for edge in graph.edges(state)
            if graph.target[edge] != state and self.is_fair(edge)
        }  # fmt: skip

    def is_fair(self, edge: int) -> bool:
        act = self.graph.labels[self.graph.label[edge]].actor[0]
        return act in FAIR or act.startswith("answer")

    def actor(self, edge: int, place: int) -> tuple[str, bool]:
        act, whose = self.graph.labels[self.graph.label[edge]].actor
        return act, whose == place

    def is_trap(self, component: list[int]) -> bool:
        if len(component) == 1:
            # Any fair action that does something leads out of it.
            return not self.fair(component[0])
        inside = set(component)
        always = set.intersection(*[self.fair(node) for node in component])
        taken = {
            self.actor(edge, node % self.width)
            for node in component for edge, target in self.next(node) if target in inside and self.is_fair(edge)
        }  # fmt: skip
        return always <= taken

    def components(self) -> Iterator[list[int]]:
        """Strongly connected components (Tarjan, without recursion)."""
        order = array("q", bytes(8 * len(self.inside)))
        low = array("q", bytes(8 * len(self.inside)))
        open_ = bytearray(len(self.inside))
        count = 0
        for root in range(len(self.inside)):
            if not self.inside[root] or order[root]:
                continue
            stack: list[int] = []
            calls: list[tuple[int, Iterator[tuple[int, int]]]] = []
            count = self._enter(root, count, order, low, open_, stack, calls)
            while calls:
                node, edges = calls[-1]
                for _, target in edges:
                    if not order[target]:
                        count = self._enter(target, count, order, low, open_, stack, calls)
                        break
                    if open_[target] and order[target] < low[node]:
                        low[node] = order[target]
                else:
                    calls.pop()
                    if calls and low[node] < low[calls[-1][0]]:
                        low[calls[-1][0]] = low[node]
                    if low[node] == order[node]:
                        yield _close(node, open_, stack)

    def _enter(
        self, node: int, count: int, order: array[int], low: array[int], open_: bytearray, stack: list[int],
        calls: list[tuple[int, Iterator[tuple[int, int]]]],
    ) -> int:  # fmt: skip
        count += 1
        order[node] = low[node] = count
        open_[node] = 1
        stack.append(node)
        calls.append((node, self.next(node)))
        return count

    def cycle(self, component: list[int]) -> tuple[Input, ...]:
        """Inputs of a cycle through a component's first node, and through another state of the attempt if any."""
        inside, first = set(component), min(component)
        there = self._way(first, inside, lambda node: self.state_of(node) != self.state_of(first))
        if there is None:
            back = self._way(first, inside, lambda node: node == first)
            return tuple(back[0]) if back else ()
        back = self._way(there[1], inside, lambda node: node == first)
        assert back is not None, "a component is strongly connected"
        return (*there[0], *back[0])

    def state_of(self, node: int) -> int:
        return self.facts.of(node // self.width)[node % self.width]

    def _way(self, start: int, inside: set[int], goal: Callable[[int], bool]) -> tuple[list[Input], int] | None:
        """A shortest way of at least one edge from a node to a goal, inside a set."""
        came: dict[int, tuple[int, int]] = {}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for edge, target in self.next(node):
                if target not in inside or (target in came and target != start) or (target == start and start in came):
                    continue
                came[target] = (node, edge)
                if goal(target):
                    return self._back(start, target, came), target
                queue.append(target)
        return None

    def _back(self, start: int, end: int, came: dict[int, tuple[int, int]]) -> list[Input]:
        out: list[Input] = []
        node = end
        while True:
            node, edge = came[node]
            out.append(self.graph.labels[self.graph.label[edge]].input)
            if node == start:
                return out[::-1]


def _close(node: int, open_: bytearray, stack: list[int]) -> list[int]:
    component: list[int] = []
    while True:
        member = stack.pop()
        open_[member] = 0
        component.append(member)
        if member == node:
            return component


class _Found(NamedTuple):
    what: str
    graph: _Followed
    component: list[int]


def find_traps(graph: Graph, facts: Facts) -> list[Violation]:
    """One violation, with the shortest way there, for each property that does not hold."""
    from hicache_fsm.testing.explorer import Violation

    shortest: dict[str, _Found] = {}
    for found in (*_waits(graph, facts), *_endings(graph, facts)):
        name = found.what.partition(":")[0]
        if name not in shortest or min(found.component) < min(shortest[name].component):
            shortest[name] = found
    violations = [
        Violation((f.what,), tuple(graph.path(min(f.component) // f.graph.width)), f.graph.cycle(f.component))
        for f in shortest.values()
    ]  # fmt: skip
    return violations + list(_returns(graph, facts))


def _waits(graph: Graph, facts: Facts) -> Iterator[_Found]:
    followed = _Followed(graph, facts, lambda state, place: facts.of(state)[place] < State.LOADING, frozenset())
    for component in followed.components():
        states = {followed.state_of(node) for node in component}
        if len(states) > 1:
            names = ", ".join(sorted(State(state).name.lower() for state in states))
            yield _Found(f"no loop: one attempt goes round {names}", followed, component)
        elif states <= STORAGE_WAITS and followed.is_trap(component):
            yield _Found(f"waits end: an attempt stays {State(states.pop()).name.lower()}", followed, component)


def _endings(graph: Graph, facts: Facts) -> Iterator[_Found]:
    followed = _Followed(graph, facts, lambda state, place: True, RESTARTS)
    for component in followed.components():
        if followed.is_trap(component):
            names = ", ".join(sorted({State(followed.state_of(node)).name.lower() for node in component}))
            yield _Found(f"attempts end: an attempt stays {names}", followed, component)


def _returns(graph: Graph, facts: Facts) -> Iterator[Violation]:
    """States with no request must lead to an idle one by fair actions alone."""
    from hicache_fsm.testing.explorer import Violation

    busy = _Busy(graph, facts)
    traps = [component for component in busy.components() if busy.is_trap(component)]
    if traps:
        state = min(min(component) for component in traps)
        yield Violation(("all returns: no request lives, and the plane never becomes idle",), tuple(graph.path(state)))


class _Busy(_Followed):
    """Nobody is followed: states in which nothing lives and something is still outstanding."""

    def __init__(self, graph: Graph, facts: Facts) -> None:
        super().__init__(graph, facts, lambda state, place: False, frozenset())
        self.width = 1
        self.inside = bytearray(
            [not facts.of(state) and not facts.idle[state] for state in range(len(graph))]
        )

    def next(self, node: int) -> Iterator[tuple[int, int]]:
        for edge in self.graph.edges(node):
            if self.inside[self.graph.target[edge]]:
                yield edge, self.graph.target[edge]
