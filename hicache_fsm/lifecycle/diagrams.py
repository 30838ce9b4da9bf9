"""Pictures of a table: a neutral graph of one topic, and its renderings.

A *topic* says which part of a table a picture shows, so that it stays legible:

    overview   one node per group of sub-states, one edge per pair of groups
    all        every transition
    <topic>    the transitions whose rows carry that topic (`Row.topic`)

Two things keep arrows few. What all sub-states of a group do alike is drawn once, from the group; and where
many states reach a final state in the same way, one dashed box that names them stands for all. Nodes, edges
and labels follow the order of the table, so that the same table always gives the same text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hicache_fsm.errors import HiCacheError
from hicache_fsm.lifecycle.model import Kind, Row, StateDef, Table
from hicache_fsm.lifecycle.operation_table import OPERATION_TABLE
from hicache_fsm.lifecycle.span_table import SPAN_TABLE
from hicache_fsm.lifecycle.table import REQUEST_TABLE

TABLES: Mapping[str, Table] = {table.name: table for table in (REQUEST_TABLE, OPERATION_TABLE, SPAN_TABLE)}
FORMATS = ("svg", "dot", "mermaid", "json", "table")
OVERVIEW = "overview"
ALL = "all"
SHARED_FROM = 4
"""Fewer arrows are easier to follow than a box that stands for their sources."""


class Node(NamedTuple):
    """A state, a group of sub-states, or a box that stands for several states."""

    name: str
    meaning: str  # shown as a tool tip
    final: bool = False
    initial: bool = False
    stands_for: tuple[str, ...] = ()  # nodes of which this is only another picture
    children: tuple[Node, ...] = ()  # shown sub-states, if this is a group


class Edge(NamedTuple):
    """One arrow; its ends are names of nodes at any depth."""

    source: str
    target: str
    labels: tuple[str, ...]  # one event each, with its guards


class Graph(NamedTuple):
    """What a picture shows, before any format."""

    title: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


Labels = dict[tuple[str, str], tuple[str, ...]]


def topics(table: Table) -> tuple[str, ...]:
    """What `graph_of` can show of this table."""
    return (OVERVIEW, ALL, *dict.fromkeys(row.topic for row in table.rows if row.topic))


def graph_of(table: Table, topic: str = OVERVIEW) -> Graph:
    """The neutral graph of one topic. Raises `HiCacheError` that lists the choices if there is no such topic."""
    rows = moves(table, topic)
    groups = _groups(table)
    flat = len(groups) == len(table.states)
    by_group = topic == OVERVIEW and not flat
    labels: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        source, target = table.states[row.source], table.states[row.target]
        pair = (source.parent, target.parent) if by_group else (source.name, target.name)
        label = table.events[row.event].name if by_group else row_label(table, row)
        labels.setdefault(pair, {})[label] = None
    arrows: Labels = {pair: tuple(names) for pair, names in labels.items()}
    for group, members in () if by_group else groups.items():
        _hoist(arrows, group, [state.name for state in members])
    shown = {end for pair in arrows for end in pair}
    nodes = [_group_node(table, *item) for item in groups.items()] if by_group else [*_nodes(table, groups, shown)]
    order = _order(table)
    nodes += _share_exits(arrows, [state.name for state in table.states if state.final], order)
    return Graph(f"{table.name}: {topic}", tuple(_without_orphans(nodes, arrows)), _edges(arrows, order))


def moves(table: Table, topic: str) -> list[Row]:
    """The rows of one topic that are transitions. Raises `HiCacheError` if the table has no such topic."""
    if topic not in topics(table):
        raise HiCacheError(f"table {table.name!r} has no topic {topic!r}; choose one of {', '.join(topics(table))}")
    return [row for row in table.rows if row.kind is Kind.TRANSITION and topic in (OVERVIEW, ALL, row.topic)]


def row_label(table: Table, row: Row) -> str:
    return table.events[row.event].name + (f" [{' and '.join(map(str, row.when))}]" if row.when else "")


def _groups(table: Table) -> dict[str, list[StateDef]]:
    groups: dict[str, list[StateDef]] = {}
    for state in table.states:
        groups.setdefault(state.parent, []).append(state)
    return groups


def _hoist(arrows: Labels, group: str, members: Sequence[str]) -> None:
    """Let what all members of a group do alike leave from the group itself."""
    if len(members) < 2:
        return
    for target in dict.fromkeys(target for source, target in arrows if source in members and target not in members):
        each = [arrows.get((member, target), ()) for member in members]
        common = tuple(label for label in each[0] if all(label in labels for labels in each))
        if not common:
            continue
        arrows[group, target] = common
        for member, labels in zip(members, each, strict=True):
            arrows[member, target] = tuple(label for label in labels if label not in common)
            if not arrows[member, target]:
                del arrows[member, target]


def _share_exits(arrows: Labels, finals: Iterable[str], order: Mapping[str, int]) -> Iterable[Node]:
    """Replace many like arrows into a final state by one, from a box that names their sources."""
    for final in finals:
        alike: dict[tuple[str, ...], list[str]] = {}
        for (source, target), labels in arrows.items():
            if target == final:
                alike.setdefault(labels, []).append(source)
        for labels, sources in alike.items():
            if len(sources) < SHARED_FROM:
                continue
            for source in sources:
                del arrows[source, final]
            sources.sort(key=order.__getitem__)
            box = Node(f"any_to_{final}", f"any of {', '.join(sources)}", stands_for=tuple(sources))
            arrows[box.name, final] = labels
            yield box


def _nodes(table: Table, groups: Mapping[str, Sequence[StateDef]], shown: set[str]) -> Iterable[Node]:
    """The ends of all arrows; a group whose members do nothing of their own is a plain node."""
    for group, members in groups.items():
        leaves = tuple(_leaf(table, state) for state in members if state.name in shown)
        if len(members) == 1:
            yield from leaves
        elif leaves:
            yield _group_node(table, group, members)._replace(children=leaves)
        elif group in shown:
            yield _group_node(table, group, members)


def _leaf(table: Table, state: StateDef) -> Node:
    return Node(state.name, state.meaning, state.final, state.id == table.initial)


def _group_node(table: Table, group: str, members: Sequence[StateDef]) -> Node:
    meaning = "; ".join(f"{state.name}: {state.meaning}" if len(members) > 1 else state.meaning for state in members)
    return Node(group, meaning, all(s.final for s in members), any(s.id == table.initial for s in members))


def _without_orphans(nodes: Iterable[Node], arrows: Labels) -> Iterable[Node]:
    """Nodes that still have an arrow after `_share_exits` has taken some away."""
    ends = {end for pair in arrows for end in pair}
    for node in nodes:
        children = tuple(child for child in node.children if child.name in ends)
        if children or node.name in ends:
            yield node._replace(children=children)


def _order(table: Table) -> dict[str, int]:
    """Places of groups and states, in the order of the table."""
    names = dict.fromkeys(name for state in table.states for name in (state.parent, state.name))
    return {name: place for place, name in enumerate(names)}


def _edges(arrows: Labels, order: Mapping[str, int]) -> tuple[Edge, ...]:
    last = len(order)  # boxes of `_share_exits` come last

    def place(pair: tuple[str, str]) -> tuple[int, int]:
        return order.get(pair[0], last), order[pair[1]]

    return tuple(Edge(*pair, arrows[pair]) for pair in sorted(arrows, key=place))


# ── formats ──────────────────────────────────────────────────────────────────────────────────────────


def render(table_name: str, output_format: str, topic: str | None = None) -> str | bytes:
    """One table in one format: bytes for `svg`, text for the others.

    Without a topic, pictures show the overview, `json` and `table` the whole table. Raises `HiCacheError`
    that lists the choices on an unknown table, format or topic, and if SVG is asked for without Graphviz.
    """
    table = find_table(table_name)
    match output_format:
        case "json":
            return to_json(table, topic or ALL)
        case "table":
            return to_table(table, moves(table, topic or ALL))
        case "mermaid":
            return to_mermaid(graph_of(table, topic or OVERVIEW))
        case "dot" | "svg":
            # Imported here because `transitions` takes longer to load than everything else together.
            from hicache_fsm.lifecycle import picture

            graph = graph_of(table, topic or OVERVIEW)
            return picture.to_dot(graph) if output_format == "dot" else picture.to_svg(graph)
        case _:
            raise HiCacheError(f"unknown format {output_format!r}; choose one of {', '.join(FORMATS)}")


def find_table(name: str) -> Table:
    """Raises `HiCacheError` that lists the choices if there is no such table."""
    if name not in TABLES:
        raise HiCacheError(f"unknown table {name!r}; choose one of {', '.join(TABLES)}")
    return TABLES[name]


def to_mermaid(graph: Graph) -> str:
    """A `stateDiagram-v2`; groups are composite states."""
    lines = ["stateDiagram-v2", "    direction LR"]
    for node in graph.nodes:
        if node.children:
            lines.append(f"    state {node.name} {{")
            lines += [f"        {child.name}" for child in node.children]
            lines.append("    }")
        elif node.stands_for:
            lines.append(f'    state "{node.meaning}" as {node.name}')
        else:
            lines.append(f"    {node.name}")
    leaves = [leaf for node in graph.nodes for leaf in node.children or (node,)]
    lines += [f"    [*] --> {node.name}" for node in leaves if node.initial]
    lines += [f"    {edge.source} --> {edge.target}: {'<br/>'.join(edge.labels)}" for edge in graph.edges]
    lines += [f"    {node.name} --> [*]" for node in leaves if node.final]
    return "\n".join(lines) + "\n"


def to_table(table: Table, rows: Iterable[Row], *, source: bool = True) -> str:
    """Transitions as a Markdown table, one line each; without the column of sources where a heading names it."""
    columns = ("from", "event", "guards", "to", "effects", "outcome", "because")
    lines = (
        (
            table.states[row.source].label,
            f"`{table.events[row.event].name}`",
            " and ".join(map(str, row.when)),
            table.states[row.target].label,
            ", ".join(row.effects),
            _plain(row.outcome),
            row.because,
        )
        for row in rows
    )
    start = 0 if source else 1
    return markdown(columns[start:], (line[start:] for line in lines))


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. Bars inside cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def to_json(table: Table, topic: str = ALL) -> str:
    """Everything the table says; `rows` of one topic only, unless it is `all`, which has ignored and illegal
    events too."""
    rows = table.rows if topic == ALL else moves(table, topic)
    content: dict[str, Any] = {
        "name": table.name,
        "initial": table.states[table.initial].name,
        "states": [
            {
                "name": s.name,
                "parent": s.parent,
                "meaning": s.meaning,
                "owns": sorted(s.owns),
                "may_own": sorted(s.may_own),
                "final": s.final,
            }
            for s in table.states
        ],
        "events": [{"name": e.name, "meaning": e.meaning, "argument": e.argument} for e in table.events],
        "guards": table.guards,
        "effects": table.effects,
    }
    lines = [json.dumps(_row_content(table, row), ensure_ascii=False) for row in rows]
    head = json.dumps(content, indent=1, ensure_ascii=False).removesuffix("\n}")
    # One row a line: a change of the table then shows as a change of that line.
    return head + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def _row_content(table: Table, row: Row) -> dict[str, Any]:
    return {
        "id": row.id,
        "from": table.states[row.source].name,
        "event": table.events[row.event].name,
        "kind": row.kind.value,
        "guards": {lit.guard: lit.value for lit in row.when},
        "to": table.states[row.target].name,
        "effects": list(row.effects),
        "outcome": _plain(row.outcome),
        "topic": row.topic,
        "because": row.because,
    }


def _plain(outcome: str) -> str:
    """The plain text of an outcome, which may be a member of a string enum."""
    return str.__str__(outcome)
