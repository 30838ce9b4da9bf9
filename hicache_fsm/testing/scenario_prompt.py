"""Prompts as scenarios write them: `abcd` is four pages, `t10a4` fourteen, `(r1)40` forty of a label of their own.

Each page has a label; its key stands for all labels up to its own, so that prompts share the pages of a common
beginning and no others. A label is a letter, or any word in parentheses; a number behind it repeats it. `-` is the
empty prompt.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

_ITEM = re.compile(r"([A-Za-z]|\([^()]+\))(\d*)")


def parse_prompt(text: str) -> tuple[str, ...]:
    """Labels of the pages. Raises `ValueError` if the text is no prompt."""
    if text == "-":
        return ()
    labels: list[str] = []
    place = 0
    while item := _ITEM.match(text, place):
        labels += [item[1].strip("()")] * int(item[2] or 1)
        place = item.end()
    if place != len(text) or not text:
        raise ValueError(f"{text!r} is no prompt")
    return tuple(labels)


def show_prompt(labels: Sequence[object]) -> str:
    """The shortest way to write these labels; the reverse of `parse_prompt`. Raises `ValueError` on a label that
    cannot be written."""
    return "".join(_items(map(str, labels))) or "-"


def _items(labels: Iterable[str]) -> Iterable[str]:
    for label, group in itertools.groupby(labels):
        if not label or set(label) & set("()\n#{};") or label.split() != [label]:
            raise ValueError(f"{label!r} is no label of a page")
        count = sum(1 for _ in group)
        shown = label if re.fullmatch("[A-Za-z]", label) else f"({label})"
        yield shown * count if count < 3 and len(shown) == 1 else f"{shown}{count if count > 1 else ''}"
