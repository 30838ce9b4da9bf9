"""The documents that are made from the tables, and the check that they are fresh.

    python -m hicache_fsm.lifecycle.derive --write     regenerate them
    python -m hicache_fsm.lifecycle.derive --check     exit 1 and name the stale ones

`docs/lifecycle.md` shows everything that the tables say; `docs/lifecycle/` holds the same as DOT and JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hicache_fsm.lifecycle import operation_table, span_table
from hicache_fsm.lifecycle import table as request_table
from hicache_fsm.lifecycle.diagrams import (
    ALL,
    OVERVIEW,
    TABLES,
    graph_of,
    markdown,
    render,
    to_mermaid,
    to_table,
    topics,
)
from hicache_fsm.lifecycle.model import Kind, Row, StateDef, Table

COMMAND = "python -m hicache_fsm.lifecycle.derive --write"
_PROSE = {"request": request_table.__doc__, "operation": operation_table.__doc__, "write_span": span_table.__doc__}
_HEAD = f"""<!-- Generated from the tables in hicache_fsm/lifecycle; do not edit. -->

# The lifecycle tables

This page is generated from the tables in `hicache_fsm/lifecycle`, which are their only source. After changing a
table, run `make render`, or without make `{COMMAND}`; `make check`
fails while this page is stale. The same content as DOT and JSON lies in [`lifecycle/`](lifecycle), and
`hicache-fsm render` draws any part of it.

A table is total: for each state and event it says *transition*, *ignored because* or *error because*. Where a
cell has several rows, their guards exclude each other and cover all cases. An ignored event only counts; an
error raises `IllegalTransition` and changes nothing. Effects run in the order in which they are listed.

"""


def derived() -> dict[str, str]:
    """All derived documents: path below the documentation folder, and text."""
    page = _HEAD + "".join(f"- [{_title(table)}](#{table.name.replace('_', '-')})\n" for table in TABLES.values())
    documents = {"lifecycle.md": page + "".join("\n" + "\n".join(_chapter(table)) for table in TABLES.values())}
    for name in TABLES:
        for extension in ("dot", "json"):
            text = render(name, extension)
            assert isinstance(text, str), f"{extension} is text"
            documents[f"lifecycle/{name}.{extension}"] = text
    return documents


def stale(docs: Path) -> list[str]:
    """Which documents in `docs` differ from what the tables say, and how."""
    wanted = derived()
    out = []
    for name, text in wanted.items():
        path = docs / name
        if not path.is_file():
            out.append(f"{path} is missing")
        elif path.read_text(encoding="utf-8") != text:
            out.append(f"{path} is stale")
    left_over = {*(docs / "lifecycle").glob("*")} - {docs / name for name in wanted}
    return out + [f"{path} is derived from no table: remove it" for path in sorted(left_over)]


def write(docs: Path) -> None:
    """Write all documents into `docs`. A file that is derived from no table is left for its owner to remove."""
    for name, text in derived().items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _title(table: Table) -> str:
    return table.name.replace("_", " ").capitalize()


def _chapter(table: Table) -> Iterator[str]:
    yield f"## {_title(table)}\n"
    yield _prose(_PROSE[table.name] or "")
    yield _mermaid(table, OVERVIEW)
    yield "### States\n"
    yield markdown(("state", "meaning", "owns", "may own"), (_state_cells(table, state) for state in table.states))
    yield "### Events\n"
    yield markdown(("event", "meaning", "argument"), ((f"`{e.name}`", e.meaning, e.argument) for e in table.events))
    if table.guards:
        yield "### Guards\n"
        yield markdown(("guard", "meaning"), ((f"`{name}`", text) for name, text in table.guards.items()))
    yield "### Effects\n"
    yield markdown(("effect", "meaning"), ((f"`{name}`", text) for name, text in table.effects.items()))
    yield from _transitions(table)
    yield from _topics(table)
    yield "### Ignored events\n"
    yield _quiet(table, Kind.IGNORED)
    yield "### Illegal events\n"
    yield _quiet(table, Kind.ERROR)


def _state_cells(table: Table, state: StateDef) -> tuple[str, ...]:
    mark = " (initial)" if state.id == table.initial else " (final)" if state.final else ""
    owns, may_own = (", ".join(sorted(names)) for names in (state.owns, state.may_own))
    return f"**{state.label}**{mark}", state.meaning, owns, may_own


def _prose(text: str) -> str:
    """A module's docstring as Markdown: an underlined title becomes a heading below the chapter's."""
    lines = text.splitlines()
    titles = {i for i, line in enumerate(lines[1:]) if line and set(line) == {"="}}
    kept = [f"### {line}" if i in titles else line for i, line in enumerate(lines) if i - 1 not in titles]
    return "\n".join(kept).strip() + "\n"


def _mermaid(table: Table, topic: str) -> str:
    return f"```mermaid\n{to_mermaid(graph_of(table, topic))}```\n"


def _transitions(table: Table) -> Iterator[str]:
    yield "### Transitions\n"
    for state in table.states:
        rows = [row for row in table.rows if row.source == state.id and row.kind is Kind.TRANSITION]
        if not rows:
            continue
        yield f"#### In {state.label}\n"
        yield to_table(table, rows, source=False)


def _topics(table: Table) -> Iterator[str]:
    named = [topic for topic in topics(table) if topic not in (OVERVIEW, ALL)]
    if named:
        yield "### Pictures by topic\n"
    for topic in named:
        yield f"#### {topic.capitalize()}\n"
        yield _mermaid(table, topic)


def _quiet(table: Table, kind: Kind) -> str:
    """Rows that change nothing, those of one event with one reason in one line."""
    merged: dict[tuple[int, tuple[str, ...], str], list[Row]] = {}
    for row in table.rows:
        if row.kind is kind:
            merged.setdefault((row.event, tuple(map(str, row.when)), row.because), []).append(row)
    return markdown(
        ("event", "in", "guards", "because"),
        (
            (f"`{table.events[event].name}`", _states(table, rows), " and ".join(when), because)
            for (event, when, because), rows in sorted(merged.items(), key=lambda item: item[0][0])
        ),
    )


def _states(table: Table, rows: Iterable[Row]) -> str:
    """Names of the source states; a group stands for its sub-states where all of them are there."""
    sources = {row.source for row in rows}
    whole = {
        group
        for group in {state.parent for state in table.states}
        if all(state.id in sources for state in table.states if state.parent == group)
    }
    names = [s.parent if s.parent in whole else s.label for s in table.states if s.id in sources]
    return ", ".join(dict.fromkeys(names))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hicache_fsm.lifecycle.derive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="exit 1 if a document is stale")
    action.add_argument("--write", action="store_true", help="regenerate the documents")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="the documentation folder (default: docs)")
    args = parser.parse_args(arguments)
    if args.write:
        write(args.docs)
        return 0
    faults = stale(args.docs)
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        print("run 'make render' and commit the result", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
