"""Lines and blocks of a scenario, and the plain runs that they unfold into."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple, TypeAlias

from hicache_fsm.errors import HiCacheError

MOST_RUNS = 1000
MOST_STEPS = 100_000
"""Bounds of one file, so that a slip of the pen is refused instead of running for hours."""

class ScenarioError(HiCacheError):
    """A scenario that cannot be read. The message names file and line, what was expected, and the nearest word."""


class Line(NamedTuple):
    """A line, or one statement of it, before its variables are filled in."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Block:
    """`repeat`, `each`, `any order` or `either`, with the lines below it."""

    number: int
    kind: str
    bodies: tuple[tuple[Node, ...], ...]  # one, or the alternatives of `either`
    name: str = ""
    values: tuple[str, ...] = ("",)


Node: TypeAlias = "Line | Block"


class Run(NamedTuple):
    """One way through a scenario: lines with all variables filled in, and which variant this is."""

    variant: str  # empty if there is only one
    lines: tuple[Line, ...]


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for the end of a message, if some known word is close."""
    close = difflib.get_close_matches(word, list(known), 1, 0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def unfold(name: str, nodes: Sequence[Node]) -> list[Run]:
    """All variants. Raises `ScenarioError` if they are too many, or a variable is not known."""
    return [Run(variant, tuple(lines)) for variant, lines in _Unfold(name).sequence(nodes, {})]


_VARIABLE = re.compile(r"\{(\w+)(?:([-+*])(\w+))?\}")
_Ways: TypeAlias = list[tuple[str, list[Line]]]


class _Unfold:
    """Expands blocks into plain runs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def sequence(self, nodes: Sequence[Node], values: dict[str, str]) -> _Ways:
        """All ways through these nodes, one after the other."""
        return self._join((self._ways(node, values) for node in nodes), nodes[0].number if nodes else 1)

    def _join(self, parts: Iterable[_Ways], number: int) -> _Ways:
        ways: _Ways = [("", [])]
        for part in parts:
            if len(part) == 1:
                for _, lines in ways:
                    lines += part[0][1]
            else:
                ways = [(_and(a, b), [*first, *second]) for a, first in ways for b, second in part]
            if len(ways) > MOST_RUNS:
                raise ScenarioError(f"{self.name}:{number}: more than {MOST_RUNS} variants; write several scenarios")
            if sum(len(lines) for _, lines in ways) > MOST_STEPS:
                raise ScenarioError(f"{self.name}:{number}: more than {MOST_STEPS} steps in all variants together")
        return ways

    def _ways(self, node: Node, values: dict[str, str]) -> _Ways:
        if isinstance(node, Line):
            return [("", [Line(node.number, self._fill(node, values))])]
        bodies, number = node.bodies, node.number
        match node.kind:
            case "repeat":
                rounds = (self.sequence(bodies[0], self._with(node, values, value)) for value in node.values)
                return self._join(rounds, number)
            case "each":
                every = [
                    (_and(f"{node.name}={value}", variant), lines)
                    for value in node.values
                    for variant, lines in self.sequence(bodies[0], self._with(node, values, value))
                ]
                return self._join([every], number)
            case "any order":
                orders = permutations([self._named_ways(one, values) for one in bodies[0]])
                if len(bodies[0]) > 6:
                    raise ScenarioError(f"{self.name}:{number}: more than 6 lines have too many orders")
                ways = [
                    (_and(f"order: {' / '.join(names)}", variant), lines)
                    for names, order in (zip(*one, strict=True) for one in orders)
                    for variant, lines in self._join(order, number)
                ]
                return self._join([ways], number)
            case _:
                ways = [
                    (_and(f"line {(body[0]).number}", variant), lines)
                    for body in bodies
                    for variant, lines in self.sequence(body, values)
                ]
                return self._join([ways], number)

    def _named_ways(self, node: Node, values: dict[str, str]) -> tuple[str, _Ways]:
        name = self._fill(node, values) if isinstance(node, Line) else f"line {node.number}"
        return name, self._ways(node, values)

    @staticmethod
    def _with(node: Block, values: dict[str, str], value: str) -> dict[str, str]:
        return {**values, node.name: value} if node.name else values

    def _fill(self, line: Line, values: dict[str, str]) -> str:
        def replaced(match: re.Match[str]) -> str:
            name, sign, other = match.groups()
            first, second = (values.get(word, word) for word in (name, other or ""))
            if name not in values and not name.isdigit():
                raise ScenarioError(f"{self.name}:{line.number}: expected a variable of a block above; found "
                                    f"{name!r}{nearest(name, values)}")  # fmt: skip
            if not sign:
                return first
            if not (first.isdigit() and second.isdigit()):
                raise ScenarioError(f"{self.name}:{line.number}: {match[0]} counts with what is no number")
            a, b = int(first), int(second)
            return str({"+": a + b, "-": a - b, "*": a * b}[sign])

        return _VARIABLE.sub(replaced, line.text)


def _and(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
