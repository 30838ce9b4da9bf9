"""Reads what TLC prints: values, and the labelled graph that `-dump dot,actionlabels` writes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

_TOKEN = re.compile(r'\s*(<<|>>|\|->|:>|@@|[\[\]{}(),]|"[^"]*"|-?\d+\.\.-?\d+|-?\d+|\w+)')


def parse_value(text: str) -> Any:
    """A TLA+ value as TLC prints it: records become dicts, sequences tuples, sets frozensets."""
    tokens = deque(_TOKEN.findall(text))

    def items(end: str) -> Iterator[Any]:
        while tokens[0] != end:
            yield value()
            if tokens[0] == ",":
                tokens.popleft()
        tokens.popleft()

    def record() -> Record:
        out: dict[str, Any] = {}
        while tokens[0] != "]":
            name = tokens.popleft()
            assert tokens.popleft() == "|->"
            out[name] = value()
            if tokens[0] == ",":
                tokens.popleft()
        tokens.popleft()
        return Record(out)

    def value() -> Any:
        token = tokens.popleft()
        if token == "[":
            return record()
        if token == "<<":
            return tuple(items(">>"))
        if token == "{":
            return frozenset(items("}"))
        if token.startswith('"'):
            return token[1:-1]
        if token in ("TRUE", "FALSE"):
            return token == "TRUE"
        if ".." in token:
            low, high = token.split("..")
            return frozenset(range(int(low), int(high) + 1))
        return int(token)

    return value()


class Record(dict[str, Any]):
    """A dict that can be a member of a set."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items(), key=lambda item: item[0])))


_NODE = re.compile(r'^(-?\d+) \[label="(.*?)"(?:,style = filled)?\]', re.MULTILINE | re.DOTALL)
_EDGE = re.compile(r'^(-?\d+) -> (-?\d+) \[label="(\w+)"', re.MULTILINE)


class Dump(NamedTuple):
    """A labelled graph. States are values of the variable `st`."""

    states: dict[str, Any]
    edges: list[tuple[str, str, str]]  # source, target, action


def read_dump(text: str) -> Dump:
    """The graph of a specification whose one variable is `st`. TLC names actions without their parameters."""
    states: dict[str, Any] = {}
    for node, label in _NODE.findall(text):
        body = label.replace("\\n", " ").replace('\\"', '"').replace("\\\\", "\\")
        states[node] = parse_value(body.split("st = ", 1)[1])
    return Dump(states, _EDGE.findall(text))
