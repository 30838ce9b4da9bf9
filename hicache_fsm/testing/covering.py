"""Covering suites: traces that together take every reachable edge of the request table, and every reachable pair.

    suite = covering_suite(scope)
    taken = measure(scope, suite.traces)          # on fresh planes, without snapshots
    assert taken.edges == suite.reachable.edges and taken.pairs == suite.reachable.pairs

An edge is (state, event, target) of one attempt; a pair is two edges that one attempt takes with none in between. The
denominator is what the explored graph of the real code reaches within the scope, not what the table could do.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from hicache_fsm.lifecycle.model import Kind
from hicache_fsm.lifecycle.table import REQUEST_TABLE
from hicache_fsm.testing.explore_scope import Scope
from hicache_fsm.testing.explore_world import Input, World
from hicache_fsm.testing.explorer import Graph, Result, RowLog, explore

Edge: TypeAlias = tuple[int, int, int]
"""(state, event, target)"""

Pair: TypeAlias = tuple[Edge, Edge]

_Node: TypeAlias = tuple[int, int, int]
"""(state of the graph, place of the followed attempt or -1, its last row or -1)"""

_Goal: TypeAlias = tuple[int, int]
"""(number of a node that was walked, edge of the graph taken from it)"""

EDGE_OF_ROW: tuple[Edge, ...] = tuple((row.source, row.event, row.target) for row in REQUEST_TABLE.rows)
ALL_EDGES: frozenset[Edge] = frozenset(
    EDGE_OF_ROW[row.id] for row in REQUEST_TABLE.rows if row.kind is Kind.TRANSITION
)


class Coverage(NamedTuple):
    edges: frozenset[Edge]
    pairs: frozenset[Pair]


class Suite(NamedTuple):
    scope: Scope
    reachable: Coverage
    traces: tuple[tuple[Input, ...], ...]

    @property
    def steps(self) -> int:
        return sum(map(len, self.traces))


def covering_suite(scope: Scope) -> Suite:
    """Explore a scope and choose traces. The scope must be small enough to be exhausted.

    Raises `ValueError` if it cannot be, or violates an invariant.
    """
    result: Result[None] = explore(scope, liveness=False, rows=True)
    if not result.exhausted:
        raise ValueError(f"no suite of a graph that is not whole: {result.stopped or result.violations}")
    ways = _Ways(result.graph)
    ways.walk()
    left_edges, left_pairs = set(ways.edges), set(ways.pairs)
    traces: list[tuple[Input, ...]] = []
    # The longest way first: it takes many others along.
    goals = sorted([*ways.edges.values(), *ways.pairs.values()], key=lambda goal: (-ways.length(goal), goal))
    brings_edges, brings_pairs = _by_goal(ways.edges), _by_goal(ways.pairs)
    for goal in goals:
        if left_edges.isdisjoint(brings_edges.get(goal, ())) and left_pairs.isdisjoint(brings_pairs.get(goal, ())):
            continue
        trace = tuple(ways.inputs(goal))
        taken = measure(scope, [trace])
        left_edges -= taken.edges
        left_pairs -= taken.pairs
        traces.append(trace)
    return Suite(scope, Coverage(frozenset(ways.edges), frozenset(ways.pairs)), tuple(traces))


W = TypeVar("W")


def _by_goal(goals: dict[W, _Goal]) -> dict[_Goal, list[W]]:
    out: dict[_Goal, list[W]] = {}
    for what, goal in goals.items():
        out.setdefault(goal, []).append(what)
    return out


def measure(scope: Scope, traces: Iterable[Sequence[Input]]) -> Coverage:
    """Edges and pairs that these traces take on fresh planes. Checks invariants and bytes after every input.

    Raises `AssertionError` with what is wrong.
    """
    edges: set[Edge] = set()
    pairs: set[Pair] = set()
    for trace in traces:
        world = World(scope)
        log = RowLog(world)
        for number, one in enumerate(trace):
            world.apply(one, world.names())
            found = world.violations()
            assert not found, f"input {number} of {[str(i) for i in trace]}: {found}"
        for rows in log.rows.values():
            taken = [EDGE_OF_ROW[row] for row in rows]
            edges.update(taken)
            pairs.update(itertools.pairwise(taken))
    return Coverage(frozenset(edges), frozenset(pairs))


def edge_text(edge: Edge) -> str:
    state, event, target = edge
    table = REQUEST_TABLE
    return f"{table.states[state].label} --{table.events[event].name}--> {table.states[target].label}"


class _Ways:
    """Breadth-first walk over the graph with one attempt followed and its last edge remembered. Merged states behave
    alike, so every way into a state goes on along every way out of it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[_Node] = [(0, -1, -1)]
        self.came: list[_Goal] = [(-1, -1)]
        self.depth: list[int] = [0]
        self.edges: dict[Edge, _Goal] = {}
        self.pairs: dict[Pair, _Goal] = {}

    def walk(self) -> None:
        graph, known = self.graph, {self.nodes[0]}
        queue = deque([0])
        while queue:
            at = queue.popleft()
            state, place, last = self.nodes[at]
            for edge in graph.edges(state):
                for node in self._after((at, edge), place, last):
                    if node not in known:
                        known.add(node)
                        queue.append(len(self.nodes))
                        self.nodes.append(node)
                        self.came.append((at, edge))
                        self.depth.append(self.depth[at] + 1)

    def _after(self, goal: _Goal, place: int, last: int) -> list[_Node]:
        """Nodes behind an edge of the graph; notes what the followed attempt does on the way."""
        graph, edge = self.graph, goal[1]
        target = graph.target[edge]
        fired = graph.all_fired[graph.fired[edge]]
        if place < 0:
            out = [(target, -1, -1)]
            for one in fired:
                if one.before < 0:
                    row = self._note(goal, -1, one.rows)
                    if one.after >= 0:
                        out.append((target, one.after, row))
            return out
        for one in fired:
            if one.before == place:
                row = self._note(goal, last, one.rows)
                return [(target, one.after, row)] if one.after >= 0 else []
        return [(target, graph.all_moves[graph.moves[edge]].places[place], last)]

    def _note(self, goal: _Goal, last: int, rows: tuple[int, ...]) -> int:
        for row in rows:
            self.edges.setdefault(EDGE_OF_ROW[row], goal)
            if last >= 0:
                self.pairs.setdefault((EDGE_OF_ROW[last], EDGE_OF_ROW[row]), goal)
            last = row
        return last

    def length(self, goal: _Goal) -> int:
        return self.depth[goal[0]] + 1

    def inputs(self, goal: _Goal) -> list[Input]:
        """The way from the initial state that ends with the goal's edge."""
        graph = self.graph
        out: list[Input] = []
        at, edge = goal
        while at >= 0:
            out.append(graph.labels[graph.label[edge]].input)
            at, edge = self.came[at]
        return out[::-1]
