"""Graph equality: the states and labelled steps of `Prefetch.tla` against those of the real control plane.

    python -m spec.agreement MC_one MC_loads

TLC dumps the labelled graph of a configuration. The same bounds are given to a real `ControlPlane`, and every action
of the spec is taken on it in every state (`Code.steps`), by snapshot and restore. Both graphs are seen through a view
(`spec_view`, `Code.view`), the refinement mapping; their sets of (view, action, view) must be equal. What is only in
one of them is named.

What the mapping leaves out, and why nothing can hide there:

    identity of rows and pages   counts are compared here; that a row has one owner is checked in every state on both
                                 sides (`Safety` in the spec, `check_invariants` in the code)
    attempt and operation ids    an operation is seen as its attempt's own, or as orphaned
    clocks                       a deadline may strike at any time, on both sides
    beliefs                      they decide about writes only, and these graphs have none

Two ways to one view may differ in what is left out. Each view is therefore expanded from the first two snapshots that
have it, and both must have the same successors.

The steps are the parts of a pass (`ControlPlane.tick` runs them in a fixed order), so the graph has more orders than a
pass has. Not covered: writes, several prompts with eviction (the spec leaves open whose page goes), page keys that
come later, flush.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from hicache_fsm.control.effects import RequestEffects
from spec.code_side import Bounds, Code, View, read_bounds
from spec.run import HERE, run_tlc
from spec.tlc_graph import read_dump

Edge = tuple[View, str, View]

RUNNING_KIND = {"querying": "lookup", "reading": "read", "loading": "load"}


# ── the spec's side ──────────────────────────────────────────────────────────────────────────────────


def spec_graph(name: str, n: int) -> tuple[set[Edge], int]:
    """Labelled edges of a configuration, as views, and the number of states before the mapping."""
    with tempfile.TemporaryDirectory(prefix="dump-") as folder:
        dump = Path(folder) / "graph.dot"
        run_tlc("MC", HERE / f"{name}.cfg", extra=("-dump", "dot,actionlabels", str(dump)))
        graph = read_dump(dump.read_text())
    views = {node: spec_view(st, n) for node, st in graph.states.items()}
    edges = {(views[a], action, views[b]) for a, b, action in graph.edges if views[a] != views[b]}
    return edges, len(views)


def spec_view(st: dict[str, Any], n: int) -> View:
    """The mapping, from a state of the spec."""
    ops = []
    for o in st["ops"]:
        r = o["r"] - 1
        own = o["ep"] == (st["att"][r], st["ret"][r]) and RUNNING_KIND.get(st["ph"][r]) == o["k"]
        ops.append((o["k"], o["r"], own, o["n"], len(o["rows"]), o["got"], len(o["own"]), o["a"], o["b"], o["lock"],
                    o["dq"], tuple(sorted(o["deps"]))))  # fmt: skip
    requests = tuple(
        (st["ph"][i], *(st[k][i] for k in ("open", "ret", "def", "chn", "base", "end", "rel", "pace")),
         len(st["hold"][i]), *(st[k][i] for k in ("pin", "lock", "own")))
        for i in range(n)
    )  # fmt: skip
    tree = tuple(tuple(mark != (0, 0, 0) for mark in chain) for chain in st["tree"])
    return (requests, tuple(sorted(ops)), tree, len(st["free"]), st["dfree"], st["pinned"], st["parked"], st["why"],
            st["news"], st["tried"], st["byp"], st["on"], st["retracts"])  # fmt: skip


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────

REPRESENTATIVES = 2
"""Snapshots of one view that are expanded."""


def code_graph(bounds: Bounds, effects: type[RequestEffects] = RequestEffects) -> tuple[set[Edge], list[str]]:
    """Labelled edges of the real control plane, as views; and what was wrong on the way. `effects` is for tests that
    break one on purpose."""
    code = Code(bounds, effects)
    code.settle()
    first = code.view()
    work = deque([(first, code.state())])
    met = {first: 1}
    known: dict[View, frozenset[tuple[str, View]]] = {}
    wrong: list[str] = []
    while work:
        view, state = work.popleft()
        successors: set[tuple[str, View]] = set()
        code.restore(state)
        for i in range(len(code.steps())):
            code.restore(state)
            name, act = code.steps()[i]
            if act() is False:
                continue
            code.settle()
            target = code.view()
            if target == view:
                continue
            successors.add((name, target))
            if met.get(target, 0) < REPRESENTATIVES:
                met[target] = met.get(target, 0) + 1
                wrong += code.plane.check_invariants()
                work.append((target, code.state()))
        if known.setdefault(view, frozenset(successors)) != successors:
            wrong.append(f"two states with one view differ in their steps: {sorted(n for n, _ in successors)}")
    return {(view, name, target) for view, found in known.items() for name, target in found}, wrong


class Comparison(NamedTuple):
    """Both graphs."""

    spec_states: int  # before the mapping
    views: int
    edges: int
    only_spec: list[Edge]
    only_code: list[Edge]
    wrong: list[str]
    seconds: float


def compare(name: str) -> Comparison:
    began = time.perf_counter()
    bounds = read_bounds(HERE / f"{name}.cfg")
    spec, states = spec_graph(name, bounds["N"])
    code, wrong = code_graph(bounds)
    views = {edge[0] for edge in spec | code} | {edge[2] for edge in spec | code}
    key = lambda edge: (edge[1], repr(edge))  # noqa: E731
    return Comparison(states, len(views), len(spec & code), sorted(spec - code, key=key), sorted(code - spec, key=key),
                      wrong, time.perf_counter() - began)  # fmt: skip


FIELDS = (
    "state", "open", "retries", "defers", "chances", "base", "end", "relied", "pace", "hold", "pin", "lock", "own",
)  # fmt: skip


def describe(edge: Edge) -> str:
    """An edge as what changes in it."""
    source, action, target = edge
    lines = [f"{action}:"]
    for r, (a, b) in enumerate(zip(source[0], target[0], strict=True), 1):
        changed = {f: (x, y) for f, x, y in zip(FIELDS, a, b, strict=True) if x != y}
        lines.append(f"    request {r} {a[0]}: {changed or a}")
    lines.append(f"    ops {source[1]} -> {target[1]}")
    lines.append(f"    rest {source[2:]} -> {target[2:]}")
    return "\n".join(lines)


def report(name: str, result: Comparison, shown: int = 3) -> list[str]:
    """Lines that say what differs; empty if nothing does."""
    out = [f"{name}: {text}" for text in result.wrong[:shown]]
    for where, edges in (("only spec", result.only_spec), ("only code", result.only_code)):
        if edges:
            out.append(f"{name}: {len(edges)} steps {where}")
            out += [f"  {where}: {describe(edge)}" for edge in edges[:shown]]
    return out


DEFAULT = ["MC_one", "MC_loads", "MC_retract", "MC_best_effort"]
"""What `make spec` compares."""


def main(names: list[str]) -> int:
    failed = False
    for name in names or DEFAULT:
        result = compare(name)
        print(f"{name}: {result.spec_states:,} states, {result.views:,} views, {result.edges:,} steps in both, "
              f"{result.seconds:.1f} s")  # fmt: skip
        lines = report(name, result)
        print("\n".join(lines))
        failed = failed or bool(lines)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
