"""The README's examples run as they stand, and its links and options exist."""

from __future__ import annotations

import argparse
import contextlib
import io
import re

import pytest

from hicache_fsm.cli import build_parser
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SAYS = ("0 384\n", "copy is acked: event 'take' is illegal here, because")


def test_there_are_as_many_examples_as_expectations() -> None:
    assert len(EXAMPLES) == len(SAYS)


@pytest.mark.parametrize(("example", "says"), list(zip(EXAMPLES, SAYS, strict=False)))
def test_an_example_runs(example: str, says: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert printed.getvalue().startswith(says)


def test_links_into_the_repository_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_options_named_are_options() -> None:
    known: set[str] = set()
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for parser in action.choices.values():
                known |= parser._option_string_actions.keys()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert len(named) > 20
    assert named - known == set()
