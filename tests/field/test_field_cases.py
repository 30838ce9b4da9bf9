"""The list of field cases is whole, and the tests that carry case ids are those that the list promises."""

from __future__ import annotations

import re
from pathlib import Path

from tests.field.cases import CASES

TESTS = Path(__file__).resolve().parent.parent
PLACES = {"sim", "runtime", "store", "keys", "gpu", "rank", "hybrid", "metrics"}
ONE_RANK_KINDS = {"wedge", "leak", "double-free", "in-flight", "stale-ack", "accounting", "retry", "starvation"}


def test_the_list_is_whole() -> None:
    assert [case.number for case in CASES] == list(range(1, 87))
    assert {case.where for case in CASES} <= PLACES
    assert all(case.title and case.kind for case in CASES)


def test_names_of_tests_and_list_agree() -> None:
    named: set[int] = set()
    for path in sorted(TESTS.rglob("test_*.py")):
        named |= {int(number) for number in re.findall(r"^def test_BC_(\d{3})_\w+", path.read_text(), re.MULTILINE)}
    assert named == {case.number for case in CASES if case.tested}


def test_what_is_left_out_of_the_main_kinds_has_its_reason() -> None:
    elsewhere = {case.number: case.where for case in CASES if case.kind in ONE_RANK_KINDS and case.where != "sim"}
    assert elsewhere == {22: "gpu", 27: "gpu", 28: "gpu", 37: "hybrid", 47: "runtime"}
