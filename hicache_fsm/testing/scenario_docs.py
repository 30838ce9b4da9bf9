"""The lists of words in `docs/scenarios.md`, from the parser's own tables.

    python -m hicache_fsm.testing.scenario_docs --write docs/scenarios.md     replaces what stands between the marks
    python -m hicache_fsm.testing.scenario_docs --check docs/scenarios.md     exit 1 if that would change anything
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from hicache_fsm.config import CacheConfig, PrefetchPolicy
from hicache_fsm.testing.scenario import DEFAULTS, HEAD
from hicache_fsm.testing.scenario_events import EVENTS
from hicache_fsm.testing.scenario_expect import EXPECTATIONS
from hicache_fsm.testing.scenario_play import SLOTS, EventLine
from hicache_fsm.testing.scenario_run import FIRE, REFUSALS, VIOLATION, VIOLATION_MEANING

BEGIN = "<!-- from the parser's tables: python -m hicache_fsm.testing.scenario_docs --write docs/scenarios.md -->"
END = "<!-- end of the tables -->"


def render() -> str:
    """All tables, as Markdown."""
    refusals = [(f"expect {word}: EVENT", meaning) for word, (_, meaning) in REFUSALS.items()]
    fire = [(f"expect illegal: {FIRE.pattern.shown}", FIRE.meaning)]
    parts = [
        "### Head",
        _table(("line", "meaning"), [(f"{key}: ...", meaning) for key, meaning in HEAD.items()]),
        "Settings, and what they are in a scenario that does not name them:",
        _table(("setting", "default"), _settings()),
        "### Events",
        _table(("line", "meaning"), _lines(EVENTS)),
        "### Expectations",
        _table(("line", "meaning"), [*_lines(EXPECTATIONS), *refusals, *fire, (VIOLATION, VIOLATION_MEANING)]),
        "### Words",
        _table(("in the tables", "stands for"), _slots()),
    ]
    return "\n\n".join(parts)


def _lines(lines: Iterable[EventLine]) -> list[tuple[str, str]]:
    return [(one.pattern.shown, one.meaning) for one in lines]


def _settings() -> Iterator[tuple[str, str]]:
    usual = CacheConfig(**DEFAULTS)
    for one in fields(CacheConfig):
        shown = _shown(getattr(usual, one.name))
        yield one.name, f"{shown} (in the library: {_shown(one.default)})" if one.name in DEFAULTS else shown


def _shown(value: object) -> str:
    return value.value if isinstance(value, PrefetchPolicy) else str(value).lower()


def _slots() -> Iterator[tuple[str, str]]:
    for name, slot in SLOTS.items():
        words = f": {', '.join(f'`{word}`' for word in slot.words)}" if slot.words else ""
        yield name, slot.meaning + words


def _table(head: Sequence[str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{_escaped(left)}` | {_escaped(right)} |" for left, right in rows)])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def inserted(document: str) -> str:
    """The document with the present tables. Raises `ValueError` if it has no place for them."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document needs the two lines\n{BEGIN}\n{END}")
    return f"{before}{BEGIN}\n\n{render()}\n\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in ("--write", "--check"):
        print(__doc__, file=sys.stderr)
        return 2
    path = Path(arguments[1])
    document = path.read_text(encoding="utf-8")
    fresh = inserted(document)
    if arguments[0] == "--write":
        path.write_text(fresh, encoding="utf-8")
    elif fresh != document:
        print(f"{path} is stale: run 'make render' and commit the result", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
