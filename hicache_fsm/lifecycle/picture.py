"""DOT and SVG of a graph, drawn by a `transitions` graph machine.

`transitions` walks the states and transitions and makes the Graphviz document; `_Drawing` decides how a node and
an arrow look. DOT needs Python packages only, SVG the program `dot` of Graphviz too.
"""

from __future__ import annotations

import shutil
from typing import Any

import graphviz
from transitions.extensions.diagrams import HierarchicalGraphMachine
from transitions.extensions.diagrams_graphviz import NestedGraph
from transitions.extensions.nesting import NestedState

from hicache_fsm.errors import HiCacheError
from hicache_fsm.lifecycle.diagrams import Graph, Node

_FONT = {"fontname": "Helvetica", "fontsize": "12"}
_SMALL = {**_FONT, "fontsize": "10"}
_PLAIN = {"shape": "box", "style": "rounded,filled", "fillcolor": "#eef3fb", "color": "#3b5b92"}
_FINAL = {**_PLAIN, "fillcolor": "#e9e9e9", "color": "#555555", "peripheries": "2"}
_SEVERAL = {**_SMALL, "shape": "box", "style": "dashed", "color": "#8a97b0"}
_GROUP = {**_SMALL, "style": "rounded,dashed", "color": "#8a97b0", "labeljust": "l"}
_LAYOUT = {
    "rankdir": "LR",
    "compound": "true",  # arrows may end at the frame of a group
    "labelloc": "t",
    "nodesep": "0.35",
    "ranksep": "0.6",
    **_FONT,
}
_STYLES: dict[str, Any] = {
    "node": {"default": _FONT},
    "edge": {"default": {"color": "#555555", "arrowsize": "0.7", **_SMALL}},
    "graph": {},
}


def to_dot(graph: Graph) -> str:
    """The DOT text of a graph."""
    return str(_digraph(graph).source)


def to_svg(graph: Graph) -> bytes:
    """The picture. Raises `HiCacheError` if the program `dot` is not installed."""
    if shutil.which("dot") is None:
        raise HiCacheError(
            "SVG needs the program 'dot', which is not installed: run 'apt-get install graphviz' (or your system's "
            "equivalent), or use --format dot"
        )
    svg: bytes = _digraph(graph).pipe(format="svg")
    return svg


def _digraph(graph: Graph) -> graphviz.Digraph:
    return _Picture(graph).get_combined_graph()


class _State(NestedState):
    separator = "/"


class _Drawing(NestedGraph):
    """Draws nodes and arrows: states with tool tips, groups as frames, several states as one dashed box."""

    machine: Any

    def _add_nested_nodes(self, states: Any, container: Any, prefix: str, default_style: str) -> None:
        for state in states:
            path = prefix + state["name"]
            node: Node = self.machine.shown[state["name"]]
            if not node.children:
                container.node(path, **_node_attributes(node))
                continue
            with container.subgraph(name=f"cluster_{path}", graph_attr={"label": node.name, **_GROUP}) as frame:
                if path in self.machine.ends:
                    # An arrow must end at a node; it is clipped at the frame.
                    frame.node(path, shape="point", style="invis", width="0", height="0")
                self._add_nested_nodes(state["children"], frame, f"{path}/", default_style)

    def _add_edges(self, transitions: Any, container: Any) -> None:
        for transition in transitions:
            source, target = transition["source"], transition["dest"]
            attributes: dict[str, str] = {}
            for key, end in (("ltail", source), ("lhead", target)):
                if end in self.machine.shown and self.machine.shown[end].children:
                    attributes[key] = f"cluster_{end}"
            container.edge(source, target, label=transition["label"], **attributes)


def _node_attributes(node: Node) -> dict[str, str]:
    if node.stands_for:
        return {"label": r"any of\n" + r"\n".join(node.stands_for), "tooltip": node.meaning, **_SEVERAL}
    style = _FINAL if node.final else _PLAIN
    return {"label": node.name, "tooltip": node.meaning, **style, **({"penwidth": "2.4"} if node.initial else {})}


class _Picture(HierarchicalGraphMachine):
    """A `transitions` machine that is only drawn, never moved."""

    state_cls = _State
    machine_attributes = _LAYOUT
    style_attributes = _STYLES

    def __init__(self, graph: Graph) -> None:
        tops = {node.name: node.name for node in graph.nodes}
        paths = tops | {leaf.name: f"{top.name}/{leaf.name}" for top in graph.nodes for leaf in top.children}
        self.shown = {node.name: node for top in graph.nodes for node in (top, *top.children)}
        self.ends = {paths[end] for edge in graph.edges for end in (edge.source, edge.target)}
        super().__init__(
            states=[_config(node) for node in graph.nodes],
            initial=next(paths[name] for name, node in self.shown.items() if not node.children),
            transitions=[
                {
                    "trigger": f"arrow_{number}",
                    "source": paths[edge.source],
                    "dest": paths[edge.target],
                    "label": r"\n".join(edge.labels),
                }
                for number, edge in enumerate(graph.edges)
            ],
            title=graph.title,
            auto_transitions=False,
            graph_engine="graphviz",
        )

    def _init_graphviz_engine(self, graph_engine: str) -> type[_Drawing]:
        return _Drawing


def _config(node: Node) -> dict[str, Any]:
    children = {"children": [_config(child) for child in node.children]} if node.children else {}
    return {"name": node.name, **children}
