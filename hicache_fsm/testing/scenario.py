"""Scenarios: events in, expectations out, as a text file. `docs/scenarios.md` describes the format for its users.

    scenario = parse(text, "deadline.scenario")     raises `ScenarioError`, naming file and line
    for run in scenario.runs():                     a scenario with variants is several runs
        ...                                         see `hicache_fsm.testing.scenario_run`

This module reads: the head, blocks, variants. What lines mean stands in `scenario_events` and `scenario_expect`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from hicache_fsm.config import CacheConfig, PrefetchPolicy
from hicache_fsm.errors import ConfigError
from hicache_fsm.lifecycle.table import EFFECTS
from hicache_fsm.testing.scenario_text import Block, Line, Node, Run, ScenarioError, nearest, unfold

DEFAULTS: dict[str, Any] = {
    "page_size": 1,
    "device_pages": 24,
    "staging_pages": 12,
    "max_context_tokens": 12,
    "prefetch_threshold_tokens": 1,
    "prefetch_policy": PrefetchPolicy.WAIT_COMPLETE,
    "write_staging_fraction": 0.25,
    "load_pool_usage_fraction": 1.0,
    "debug": True,
    "poison": True,
}
"""Settings that differ from `CacheConfig`'s: pools of a few one-token pages, nothing too short to ask for."""

HEAD: dict[str, str] = {
    "title": "what must hold, in one line (required)",
    "case": "the field case that this stands for, such as BC-013",
    "seed": "seed of every random order in the file (default 0), and where it was found",
    "pin_cap_tokens": "tokens that holds may pin; sets `anchor_lock_cap` and `max_context_tokens`",
    "break": "an effect of the request table that is left out on purpose, for scenarios that must fail",
}
"""Lines of the head beside the settings of `CacheConfig`."""


@dataclass(slots=True)
class Scenario:
    """A scenario that was read. Its lines are checked by `scenario_run.compile_run`."""

    name: str  # file name, for messages
    config: CacheConfig = field(default_factory=lambda: CacheConfig(**DEFAULTS))
    title: str = ""
    case: str = ""
    seed: int = 0
    broken: str = ""
    nodes: tuple[Node, ...] = ()

    def runs(self) -> list[Run]:
        """All variants. Raises `ScenarioError` if they are too many, or a variable is not known."""
        return unfold(self.name, self.nodes)


def load(path: Path) -> Scenario:
    """Read a scenario file. Raises `ScenarioError`, also if the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from error
    return parse(text, str(path))


def parse(text: str, name: str = "scenario") -> Scenario:
    """Read a scenario. Raises `ScenarioError`."""
    head, body = _split(text, name)
    scenario = _read_head(head, name)
    reader = _Blocks(name, body)
    scenario.nodes = reader.block(0)
    if not scenario.nodes:
        raise ScenarioError(f"{name}: expected events and expectations after the head; found none")
    return scenario


# ── the head ─────────────────────────────────────────────────────────────────────────────────────────

_HEAD_LINE = re.compile(r"([A-Za-z_]+):\s+(\S.*)$")
_COMMENT = re.compile(r"(^|\s)#.*")


def _split(text: str, name: str) -> tuple[list[Line], list[Line]]:
    """Head and body, without comments and blank lines; indentation is kept."""
    head: list[Line] = []
    body: list[Line] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = _COMMENT.sub("", raw).rstrip()
        if not line:
            continue
        if "\t" in line:
            raise ScenarioError(f"{name}:{number}: found a tab; indent with spaces")
        is_head = _HEAD_LINE.match(line) is not None
        if is_head and body:
            raise ScenarioError(f"{name}:{number}: expected an event or an expectation; {line!r} belongs into the "
                                "head, before the first of them")  # fmt: skip
        (head if is_head else body).append(Line(number, line))
    return head, body


def _read_head(lines: Sequence[Line], name: str) -> Scenario:
    scenario, settings = Scenario(name), dict(DEFAULTS)
    seen: set[str] = set()
    types = get_type_hints(CacheConfig)
    for number, text in lines:
        match = _HEAD_LINE.match(text)
        assert match is not None, text
        key, value = match[1], match[2]
        where = f"{name}:{number}"
        if key in seen:
            raise ScenarioError(f"{where}: {key!r} is given twice")
        seen.add(key)
        if key in HEAD:
            _head_value(scenario, settings, key, value, where)
        elif key in types:
            settings[key] = _setting(types[key], key, value, where)
        else:
            raise ScenarioError(f"{where}: expected a line of the head; found {key!r}{nearest(key, (*HEAD, *types))}")
    if not scenario.title:
        raise ScenarioError(f"{name}:1: expected a line 'title: ...' in the head; found none")
    clash = sorted(seen & {"anchor_lock_cap", "max_context_tokens"}) if "pin_cap_tokens" in seen else []
    if clash:
        raise ScenarioError(f"{name}: pin_cap_tokens sets {clash[0]}; give one of them")
    scenario.config = _config(settings, name)
    return scenario


def _config(settings: dict[str, Any], name: str) -> CacheConfig:
    pins = settings.pop("pin_cap_tokens", None)
    try:
        if pins is not None:
            tokens = settings["device_pages"] * settings["page_size"]
            settings |= {"anchor_lock_cap": 1.0, "max_context_tokens": tokens - pins}
        return CacheConfig(**settings)
    except ConfigError as error:
        raise ScenarioError(f"{name}: the settings of the head cannot work: {error}") from error


def _head_value(scenario: Scenario, settings: dict[str, Any], key: str, value: str, where: str) -> None:
    match key:
        case "title":
            scenario.title = value
        case "case":
            if not re.fullmatch(r"BC-\d{3}", value):
                raise ScenarioError(f"{where}: expected a case such as BC-013; found {value!r}")
            scenario.case = value
        case "seed":
            scenario.seed = _setting(int, key, value, where)
        case "pin_cap_tokens":
            settings[key] = _setting(int, key, value, where)
        case "break":
            if value not in EFFECTS:
                raise ScenarioError(f"{where}: expected an effect; found {value!r}{nearest(value, EFFECTS)}")
            scenario.broken = value
        case _:
            raise AssertionError(f"{key} is in HEAD and is not read")


def _setting(kind: type, key: str, value: str, where: str) -> Any:
    words = {"true": True, "false": False} if kind is bool else {p.value: p for p in PrefetchPolicy}
    if kind in (bool, PrefetchPolicy):
        if value not in words:
            raise ScenarioError(f"{where}: {key} is {' or '.join(words)}; found {value!r}{nearest(value, words)}")
        return words[value]
    try:
        return kind(value)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ScenarioError(f"{where}: {key} is {wanted}; found {value!r}") from None


def show_head(scenario: Scenario) -> Iterator[str]:
    """Lines of the head that give this scenario's settings where they differ from the defaults."""
    yield f"title: {scenario.title}"
    if scenario.case:
        yield f"case: {scenario.case}"
    yield f"seed: {scenario.seed}"
    if scenario.broken:
        yield f"break: {scenario.broken}"
    usual = CacheConfig(**DEFAULTS)
    for one in fields(CacheConfig):
        value = getattr(scenario.config, one.name)
        if value != getattr(usual, one.name):
            shown = value.value if isinstance(value, PrefetchPolicy) else str(value).lower()
            yield f"{one.name}: {shown}"


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────────

_INLINE = re.compile(r"(repeat\s[^:]*|each\s[^:]*):\s+(\S.*)$")
_OPENING = re.compile(r"(?P<kind>repeat|each|any order|either|or)\b\s*(?P<rest>[^:]*):$")
_LOOP = re.compile(r"(?:(?P<count>\d+)|(?P<name>[a-z]\w*) in (?P<values>\S.*))$")


class _Blocks:
    """Reads lines into nodes, by their indentation."""

    def __init__(self, name: str, lines: Sequence[Line]) -> None:
        self.name = name
        self.lines = list(lines)
        self.at = 0

    def block(self, indent: int) -> tuple[Node, ...]:
        """All lines of this indentation from here on, with what is below them."""
        nodes: list[Node] = []
        while self.at < len(self.lines):
            number, text = self.lines[self.at]
            found = len(text) - len(text.lstrip())
            if found < indent:
                break
            if found > indent:
                raise ScenarioError(f"{self.name}:{number}: expected {indent} spaces before the line; found {found}")
            self.at += 1
            nodes += self._nodes(number, text.strip(), indent)
        return tuple(nodes)

    def _nodes(self, number: int, text: str, indent: int) -> list[Node]:
        inline = _INLINE.match(text)
        if inline is not None:
            body = tuple(Line(number, part) for part in _statements(inline[2]))
            return [self._block(number, f"{inline[1]}:", (body,))]
        opening = _OPENING.match(text)
        if opening is None:
            return [Line(number, part) for part in _statements(text)]
        if opening["kind"] == "or":
            raise ScenarioError(f"{self.name}:{number}: 'or:' without 'either:' above it at the same indentation")
        bodies = [self._below(number, indent)]
        while opening["kind"] == "either" and self._next_is_or(indent):
            line = self.lines[self.at]
            self.at += 1
            bodies.append(self._below(line.number, indent))
        return [self._block(number, text, tuple(bodies))]

    def _next_is_or(self, indent: int) -> bool:
        return self.at < len(self.lines) and self.lines[self.at].text == " " * indent + "or:"

    def _below(self, number: int, indent: int) -> tuple[Node, ...]:
        following = self.lines[self.at].text if self.at < len(self.lines) else ""
        deeper = len(following) - len(following.lstrip())
        if deeper <= indent:
            raise ScenarioError(f"{self.name}:{number}: expected lines below it that are indented more; found none")
        return self.block(deeper)

    def _block(self, number: int, text: str, bodies: tuple[tuple[Node, ...], ...]) -> Block:
        opening = _OPENING.match(text)
        assert opening is not None, text
        kind, rest = opening["kind"], opening["rest"].strip()
        if kind in ("any order", "either"):
            if rest:
                raise ScenarioError(f"{self.name}:{number}: expected '{kind}:'; found {text!r}")
            return Block(number, kind, bodies)
        loop = _LOOP.match(rest)
        if loop is None or (kind == "each" and loop["count"]):
            form = "'repeat N:' or 'repeat i in 1..9:'" if kind == "repeat" else "'each i in 1..9:' or 'each x in a b:'"
            raise ScenarioError(f"{self.name}:{number}: expected {form}; found {text!r}")
        values = ("",) * int(loop["count"]) if loop["count"] else _values(loop["values"])
        return Block(number, kind, bodies, loop["name"] or "", values)


def _statements(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def _values(text: str) -> tuple[str, ...]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", text.strip())
    return tuple(map(str, range(int(span[1]), int(span[2]) + 1))) if span else tuple(text.split())
