"""Patterns of lines, and what is wrong with a line that fits none.

    submit rid:REQUEST prompt:PROMPT [plus extra:N token(s)] [hashed]

A pattern is a row of elements: a word stands for itself (`token(s)` for both forms), `name:SLOT` for a value, brackets
for what may be left out, with ` | ` between alternatives. A word alone inside brackets is reported as a flag.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Args: TypeAlias = dict[str, Any]


class Slot(NamedTuple):
    """A kind of value."""

    meaning: str  # for error messages and for the documentation
    read: Callable[[str], Any]  # the value; raises `ValueError` if the word is none
    words: tuple[str, ...] = ()  # all words that fit, if they can be listed


class Word(NamedTuple):
    """A word of the pattern, in all of its forms."""

    forms: tuple[str, ...]
    flag: bool = False  # alone inside brackets


class Value(NamedTuple):
    name: str
    slot: str


class Option(NamedTuple):
    """What may be left out: one of the alternatives, or nothing."""

    alternatives: tuple[tuple[Element, ...], ...]


Element: TypeAlias = "Word | Value | Option"
_PLURAL = re.compile(r"^([a-z-]+)\(s\)$")


def words_slot(meaning: str, words: Sequence[str], values: Sequence[Any] | None = None) -> Slot:
    """A slot that takes one of these words, and gives the value in the same place."""
    known = dict(zip(words, words if values is None else values, strict=True))

    def read(word: str) -> Any:
        if word not in known:
            raise ValueError(word)
        return known[word]

    return Slot(meaning, read, tuple(words))


class Pattern:
    """A compiled pattern."""

    __slots__ = ("text", "elements")

    def __init__(self, text: str) -> None:
        self.text = text
        rest = text.replace("[", " [ ").replace("]", " ] ").split()
        self.elements = _sequence(iter(rest))[0]

    @property
    def shown(self) -> str:
        """The pattern for readers: names of values are left out."""
        return re.sub(r"\b\w+:([A-Z]+)", r"\1", self.text)

    @property
    def verb(self) -> str:
        first = self.elements[0]
        assert isinstance(first, Word), f"{self.text!r} does not begin with a word"
        return first.forms[0]


def _sequence(words: Iterator[str]) -> tuple[tuple[Element, ...], str]:
    """Elements up to the end, a closing bracket or a bar; and which of them it was."""
    out: list[Element] = []
    for word in words:
        if word in ("]", "|"):
            return tuple(out), word
        if word == "[":
            out.append(_option(words))
        elif ":" in word:
            out.append(Value(*word.split(":")))
        else:
            plural = _PLURAL.match(word)
            out.append(Word((plural[1] + "s", plural[1]) if plural else (word,)))
    return tuple(out), ""


def _option(words: Iterator[str]) -> Option:
    alternatives: list[tuple[Element, ...]] = []
    end = "|"
    while end == "|":
        elements, end = _sequence(words)
        only = elements[0] if len(elements) == 1 else None
        alternatives.append((only._replace(flag=True),) if isinstance(only, Word) else elements)
    return Option(tuple(alternatives))


class Misfit:
    """Where lines stop fitting: what each pattern would have taken, by place in the line."""

    def __init__(self) -> None:
        self.expected: dict[int, dict[str, None]] = {}  # shown to the reader
        self.words: dict[int, set[str]] = {}  # that would have fitted

    def note(self, place: int, shown: str, words: Sequence[str]) -> None:
        self.expected.setdefault(place, {})[shown] = None
        self.words.setdefault(place, set()).update(words)

    def describe(self, words: Sequence[str]) -> str:
        """What is wrong with this line, and the nearest word that would fit."""
        place = max(self.expected, default=0)
        found = repr(words[place]) if place < len(words) else "the end of the line"
        text = f"expected {', '.join(self.expected.get(place, {'nothing more': None}))}; found {found}"
        for at in sorted(self.words):
            near = self._near(words, at)
            if near:
                return f"{text}; did you mean {near!r}{'' if at == place else f' instead of {words[at]!r}'}?"
        return text

    def _near(self, words: Sequence[str], place: int) -> str:
        if place >= len(words) or words[place] in self.words[place]:
            return ""
        close = difflib.get_close_matches(words[place], sorted(self.words[place]), 1, 0.7)
        return close[0] if close else ""


class Matcher:
    """Fits lines to patterns, with the slots that these use."""

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self.slots = slots

    def fit(self, pattern: Pattern, words: Sequence[str], misfit: Misfit) -> Args | None:
        """The values of a line, or None; what did not fit is noted."""
        for place, args in self._match(pattern.elements, words, 0, misfit):
            if place == len(words):
                return args
            misfit.note(place, "the end of the line", ())
        return None

    def _match(
        self, elements: Sequence[Element], words: Sequence[str], place: int, misfit: Misfit
    ) -> Iterator[tuple[int, Args]]:
        if not elements:
            yield place, {}
            return
        for after, args in self._one(elements[0], words, place, misfit):
            for end, more in self._match(elements[1:], words, after, misfit):
                yield end, {**args, **more}

    def _one(self, element: Element, words: Sequence[str], place: int, misfit: Misfit) -> Iterator[tuple[int, Args]]:
        if isinstance(element, Option):
            for alternative in element.alternatives:
                yield from self._match(alternative, words, place, misfit)
            yield place, {}
        elif isinstance(element, Word):
            if place < len(words) and words[place] in element.forms:
                yield place + 1, {element.forms[0]: True} if element.flag else {}
            else:
                misfit.note(place, repr(element.forms[0]), element.forms)
        else:
            slot = self.slots[element.slot]
            try:
                value = slot.read(words[place])
            except (IndexError, ValueError):
                misfit.note(place, slot.meaning, slot.words)
            else:
                yield place + 1, {element.name: value}
