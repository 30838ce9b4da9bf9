"""Page keys: byte for byte what SGLang computes, the same in every process, and never shared by mistake."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_fsm.errors import HiCacheError
from hicache_fsm.ports import DEFAULT_NAMESPACE, Namespace
from hicache_fsm.tree.keys import Fingerprint, TokenError, chain_digests, namespace_seed, num_pages, page_keys

ROOT = Path(__file__).resolve().parents[1]
VECTORS: dict[str, Any] = json.loads((ROOT / "tests/data/hash-vectors.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = VECTORS["cases"]

# Every form in which an engine may hold its token ids.
FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": lambda tokens: array("q", tokens),
    "int64": lambda tokens: np.array(tokens, dtype=np.int64),
    "uint64": lambda tokens: np.array(tokens, dtype=np.uint64),
    "big-endian": lambda tokens: np.array(tokens, dtype=">i8"),
    "strided": lambda tokens: np.repeat(np.array(tokens, dtype=np.int64), 2)[::2],
}


def namespace_of(case: dict[str, Any]) -> Namespace:
    return Namespace(case["extra_key"], case["cache_salt"], case["bigram"])


def prior_of(case: dict[str, Any]) -> bytes | None:
    return bytes.fromhex(case["prior"]) if case["prior"] else None


def reference_digests(tokens: Sequence[int], page_size: int, ns: Namespace, prior: bytes | None) -> list[bytes]:
    """The rule written down again, one page at a time and without numpy."""
    units: list[tuple[int, ...]] = list(pairwise(tokens)) if ns.bigram else [(token,) for token in tokens]
    digest = prior if prior is not None else namespace_seed(ns) or b""
    found = []
    for start in range(0, len(units), page_size):
        ids = [token for unit in units[start : start + page_size] for token in unit]
        if max(ids) < 2**32:
            digest = hashlib.sha256(digest + struct.pack(f"<{len(ids)}I", *ids)).digest()
        else:
            digest = hashlib.sha256(digest + b"\xff" + struct.pack(f"<{len(ids)}Q", *ids)).digest()
        found.append(digest)
    return found


# ── golden vectors ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_vectors_in_every_form_of_tokens(case: dict[str, Any], form: str) -> None:
    tokens = FORMS[form](case["tokens"])
    ns, prior, size = namespace_of(case), prior_of(case), case["page_size"]
    digests = [digest.hex() for digest in chain_digests(tokens, size, ns, prior)]
    assert digests == case["hashes"]
    whole = num_pages(len(case["tokens"]), size, case["bigram"])
    assert [key.hex() for key in page_keys(tokens, size, ns, prior)] == case["hashes"][:whole]


@pytest.mark.parametrize("seed", VECTORS["seeds"], ids=str)
def test_golden_namespace_seeds(seed: dict[str, str | None]) -> None:
    found = namespace_seed(Namespace(seed["extra_key"], seed["cache_salt"]))
    assert (found.hex() if found else None) == seed["seed"]


@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_keys_do_not_depend_on_the_process(hash_seed: str) -> None:
    case = next(case for case in CASES if case["name"] == "utf-8 names")
    program = (
        "from hicache_fsm.ports import Namespace; from hicache_fsm.tree.keys import page_keys;"
        f"ns = Namespace({case['extra_key']!r}, {case['cache_salt']!r});"
        f"print(' '.join(key.hex() for key in page_keys({case['tokens']}, {case['page_size']}, ns)))"
    )
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.split() == case["hashes"]


# ── against the rule ─────────────────────────────────────────────────────────────────────────────────

names = st.one_of(st.none(), st.text(max_size=4))
namespaces = st.builds(Namespace, names, names, st.booleans())
ids = st.one_of(st.integers(0, 5), st.sampled_from([2**32 - 1, 2**32, 2**63 - 1]), st.integers(0, 2**63 - 1))


@given(tokens=st.lists(ids, max_size=20), size=st.integers(1, 6), ns=namespaces, prior=st.booleans())
def test_digests_follow_the_rule(tokens: list[int], size: int, ns: Namespace, prior: bool) -> None:
    before = hashlib.sha256(b"before").digest() if prior else None
    expected = reference_digests(tokens, size, ns, before)
    for form in ("list", "int64", "uint64"):
        assert list(chain_digests(FORMS[form](tokens), size, ns, before)) == expected


@given(tokens=st.lists(ids, max_size=20), size=st.integers(1, 4), ns=namespaces, data=st.data())
def test_a_chain_continues_from_any_page(tokens: list[int], size: int, ns: Namespace, data: st.DataObject) -> None:
    keys = page_keys(tokens, size, ns)
    page = data.draw(st.integers(0, len(keys)))
    prior = keys[page - 1] if page else None
    assert page_keys(tokens, size, ns, prior, start_page=page) == keys[page:]
    assert page_keys(tokens[page * size :], size, ns, prior) == keys[page:]


def test_continuing_needs_the_key_before() -> None:
    with pytest.raises(AssertionError, match="start_page 1 needs"):
        page_keys([1, 2, 3], 1, start_page=1)
    with pytest.raises(AssertionError, match="32-byte"):
        page_keys([1, 2, 3], 1, prior=b"short")


@given(tokens=st.lists(st.integers(0, 3), max_size=12), other=st.lists(st.integers(0, 3), max_size=12))
def test_equal_keys_mean_equal_prefixes(tokens: list[int], other: list[int]) -> None:
    left, right = page_keys(tokens, 2), page_keys(other, 2)
    for page in range(min(len(left), len(right))):
        end = 2 * (page + 1)
        assert (left[page] == right[page]) == (tokens[:end] == other[:end])


def test_ids_above_63_bits_are_hashed_as_such() -> None:
    top = 2**64 - 1
    expected = tuple(reference_digests([top, 1], 1, DEFAULT_NAMESPACE, None))
    assert page_keys([top, 1], 1) == expected
    assert page_keys(np.array([top, 1], dtype=np.uint64), 1) == expected


# ── lengths and namespaces ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_BC_061_every_length_from_nothing_to_two_pages_and_one(form: str, bigram: bool) -> None:
    size = 4
    for length in range(2 * size + 2):
        expected = max(0, length - bigram) // size
        keys = page_keys(FORMS[form](list(range(length))), size, Namespace("lora", "tenant", bigram))
        assert len(keys) == expected == num_pages(length, size, bigram)


def test_namespaces_never_share_a_key() -> None:
    spaces = [
        Namespace(extra, salt, bigram)
        for extra in (None, "", "a", "ab", "\x00")
        for salt in (None, "b", "a", "\x00")
        for bigram in (False, True)
    ]
    chains = {ns: set(page_keys([1, 2, 3, 4, 5, 6, 7], 2, ns)) for ns in spaces}
    for left, right in combinations(spaces, 2):
        assert not chains[left] & chains[right], f"{left} and {right} share keys"


def test_an_empty_salt_is_no_salt_but_an_empty_extra_key_is_one() -> None:
    assert page_keys([1, 2], 1, Namespace(None, "")) == page_keys([1, 2], 1)
    assert page_keys([1, 2], 1, Namespace("", None)) != page_keys([1, 2], 1)


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1, -1], "token 1 is -1"),
        ((3, 2**64), "token 1 is 18446744073709551616"),
        ([2**32, -7], "token 1 is -7"),
        (np.array([4, 5, -6]), "token 2 is -6"),
        (array("q", [-1]), "token 0 is -1"),
        ([1, 2.0], "must be integers"),
        ([2**32, 2.0], "must be integers"),
        ([1, None], "must be integers"),
        (["1"], "must be integers"),
        ("12", "flat sequence"),
        (np.array([1.0, 2.0]), "must be integers, not float64"),
        (np.array([True, False]), "must be integers, not bool"),
        (np.array([[1, 2], [3, 4]]), r"shape \(2, 2\)"),
        (range(-1, 3), "token 0 is -1"),
    ],
    ids=str,
)
def test_what_is_no_token_is_refused(tokens: Any, says: str) -> None:
    with pytest.raises(TokenError, match=says) as caught:
        page_keys(tokens, 1)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, HiCacheError)


def test_bad_tokens_are_refused_below_one_page_too() -> None:
    with pytest.raises(TokenError, match="token 0 is -1"):
        page_keys([-1], 64)


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(TokenError, match="not valid Unicode"):
        page_keys([1], 1, Namespace(cache_salt="\ud800"))


@pytest.mark.parametrize("tokens", [[], (), np.array([]), array("q"), range(0)], ids=repr)
def test_an_empty_prompt_has_no_keys(tokens: Any) -> None:
    assert page_keys(tokens, 1) == ()
    assert chain_digests(tokens, 1, Namespace(bigram=True)) == ()


# ── fingerprint ──────────────────────────────────────────────────────────────────────────────────────

PRINT = Fingerprint("llama@1", "fp8_e4m3", "layer_first", "kv8x128", 64, 1, "w0")


@pytest.mark.parametrize("name", [field.name for field in fields(Fingerprint)])
def test_every_field_enters_the_fingerprint(name: str) -> None:
    value = getattr(PRINT, name)
    changed: dict[str, Any] = {name: value + 1 if isinstance(value, int) else value + "x"}
    other = replace(PRINT, **changed)
    assert other.digest() != PRINT.digest()
    assert other.text() != PRINT.text()
    assert f"{name}={value}" in PRINT.text()


def test_a_fingerprint_is_stable_and_its_fields_do_not_run_together() -> None:
    assert len(PRINT.digest()) == 32
    assert replace(PRINT).digest() == PRINT.digest()
    left = replace(PRINT, model="ab", dtype="c")
    right = replace(PRINT, model="a", dtype="bc")
    assert left.digest() != right.digest()
