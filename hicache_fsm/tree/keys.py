"""Page keys: which bytes identify a page of a prompt, byte for byte as SGLang 0.5.23 computes them.

    key(page i) = SHA-256( key(page i-1), or the namespace seed, or nothing   ‖   ids of page i )

The ids are little-endian u32. A page with an id above 32 bits is written as the tag byte 0xff and little-endian
u64 instead; its neighbours keep the short form. Because every key contains the one before it, a key names the
*entire* prefix including its namespace: two pages with equal keys may share their bytes, wherever they stand.

In a bigram namespace (EAGLE) the unit is a pair of neighbouring tokens and both ids are written, so a page of P
units needs P + 1 raw tokens. Only whole pages have keys here; `chain_digests` includes the partial last page.

What makes stored bytes incompatible without showing in the keys (model, dtype, layout ...) is the `Fingerprint`.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_fsm.errors import HiCacheError
from hicache_fsm.ports import DEFAULT_NAMESPACE, Namespace, PageKey

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

DIGEST_BYTES = 32
_NAMESPACE_TAG = b"sglang-cache-namespace-v1"
_WIDE_TAG = b"\xff"
_U32_MAX = 0xFFFF_FFFF
_U64_MAX = 0xFFFF_FFFF_FFFF_FFFF


class TokenError(HiCacheError, ValueError):
    """Token ids, or a namespace, that have no key: negative, not an integer, above 64 bits, not one-dimensional."""


def num_pages(num_tokens: int, page_size: int, bigram: bool = False) -> int:
    """Whole pages in a prompt of `num_tokens` raw tokens; 0 below one page."""
    assert page_size > 0, f"page_size must be at least 1, not {page_size}"
    return max(0, num_tokens - bigram) // page_size


def namespace_seed(ns: Namespace) -> bytes | None:
    """What the chain of a namespace starts from; None when neither extra key nor salt is set.

    Raises `TokenError` if a name cannot be written as UTF-8.
    """
    salt = ns.cache_salt or None
    if ns.extra_key is None and salt is None:
        return None
    seed = hashlib.sha256(_NAMESPACE_TAG)
    for name in (ns.extra_key, salt):
        if name is None:
            seed.update(b"\x00")
            continue
        try:
            text = name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenError(f"namespace name {name!r} is not valid Unicode text: {error}; pass clean text") from error
        seed.update(b"\x01" + len(text).to_bytes(8, "little") + text)
    return seed.digest()


def page_keys(
    tokens: TokenIds,
    page_size: int,
    namespace: Namespace = DEFAULT_NAMESPACE,
    prior: bytes | None = None,
    start_page: int = 0,
) -> tuple[PageKey, ...]:
    """Keys of the whole pages of `tokens` from `start_page` on, leading page first.

    `prior` is the key of the page before the first one hashed: with `start_page` it continues a known chain of the
    same prompt, without it `tokens` begin right after that page. None starts the chain at the namespace.

    Raises `TokenError` for ids that have no key.
    """
    end = num_pages(len(tokens), page_size, namespace.bigram) * page_size
    return tuple(_digests(tokens, page_size, namespace, prior, start_page * page_size, end))


def chain_digests(
    tokens: TokenIds, page_size: int, namespace: Namespace = DEFAULT_NAMESPACE, prior: bytes | None = None
) -> tuple[bytes, ...]:
    """Like `page_keys`, and the digest of the partial last page, if there is one. No such page is ever stored."""
    assert page_size > 0, f"page_size must be at least 1, not {page_size}"
    end = max(0, len(tokens) - namespace.bigram)
    return tuple(_digests(tokens, page_size, namespace, prior, 0, end))


def _digests(
    tokens: TokenIds, page_size: int, namespace: Namespace, prior: bytes | None, start: int, end: int
) -> list[bytes]:
    """Digests of the pages over units [start, end)."""
    assert start >= 0, f"start_page must not be negative, not {start // page_size}"
    assert start == 0 or prior is not None, f"start_page {start // page_size} needs the key of the page before it"
    assert prior is None or len(prior) == DIGEST_BYTES, f"prior must be a {DIGEST_BYTES}-byte key, not {prior!r}"
    digest = prior if prior is not None else namespace_seed(namespace) or b""
    ids = _token_array(tokens)
    if start >= end:
        return []
    units = _as_pairs(ids[start : end + 1]) if namespace.bigram else ids[start:end]
    ids_per_page = 2 * page_size if namespace.bigram else page_size
    wide = _wide_pages(units, ids_per_page)
    data = units.astype("<u4").tobytes()
    page_bytes = 4 * ids_per_page
    sha256 = hashlib.sha256
    digests: list[bytes] = []
    for offset in range(0, len(data), page_bytes):
        if wide and offset // page_bytes in wide:
            first = offset // 4
            page = units[first : first + ids_per_page].astype("<u8").tobytes()
            digest = sha256(digest + _WIDE_TAG + page).digest()
        else:
            digest = sha256(digest + data[offset : offset + page_bytes]).digest()
        digests.append(digest)
    return digests


def _as_pairs(ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
    """Units of a bigram namespace, both ids of each pair in a row: abc -> ab bc."""
    pairs = np.empty(2 * (len(ids) - 1), dtype=ids.dtype)
    pairs[0::2] = ids[:-1]
    pairs[1::2] = ids[1:]
    return pairs


def _wide_pages(units: npt.NDArray[np.integer[Any]], ids_per_page: int) -> set[int]:
    """Pages that hold an id above 32 bits."""
    if units.dtype.itemsize <= 4 or int(units.max()) <= _U32_MAX:
        return set()
    return set((np.flatnonzero(units > _U32_MAX) // ids_per_page).tolist())


def _token_array(tokens: TokenIds) -> npt.NDArray[np.integer[Any]]:
    """The ids as a one-dimensional integer array without negative values."""
    if isinstance(tokens, (list, tuple)):
        return _from_list(tokens)
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise TokenError(f"token ids must be one flat sequence, not an array of shape {ids.shape}; flatten it")
    if ids.dtype.kind not in "iu":
        # An empty sequence of no particular type becomes an array of floats.
        if ids.size == 0:
            return ids.astype(np.int64)
        raise TokenError(f"token ids must be integers, not {ids.dtype}; convert them first")
    if ids.dtype.kind == "i" and ids.size and int(ids.min()) < 0:
        at = int(ids.argmin())
        raise TokenError(f"token ids must not be negative, but token {at} is {ids[at]}; strip padding first")
    return ids


def _from_list(tokens: Sequence[int]) -> npt.NDArray[np.integer[Any]]:
    # The array module converts and checks a list three times as fast as numpy does.
    try:
        return np.frombuffer(array("I", tokens), dtype=np.uint32)
    except OverflowError:
        pass
    except TypeError as error:
        raise TokenError(f"token ids must be integers: {error}; convert them first") from error
    try:
        return np.frombuffer(array("Q", tokens), dtype=np.uint64)
    except OverflowError:
        at = next(i for i, token in enumerate(tokens) if not 0 <= token <= _U64_MAX)
        hint = "strip padding first" if tokens[at] < 0 else "ids have at most 64 bits"
        raise TokenError(f"token ids must lie in 0..2**64-1, but token {at} is {tokens[at]}; {hint}") from None
    except TypeError as error:
        raise TokenError(f"token ids must be integers: {error}; convert them first") from error


assert array("I").itemsize == 4, f"unsigned int has {array('I').itemsize} bytes on {sys.platform}, 4 are needed"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What makes stored bytes unusable for another engine although the page keys are equal.

    A store keeps pages of different fingerprints apart; a change of any field is a new, empty store.
    """

    model: str  # name and revision
    dtype: str  # of the KV bytes, quantisation included
    layout: str  # order of layers, heads and tokens inside a page
    heads: str  # shape of the KV as this rank holds it, e.g. "kv8x128/tp0of2"
    page_size: int  # tokens
    layout_version: int  # of this library's page format
    weight_version: str  # raised by a weight update in place

    def digest(self) -> bytes:
        """32 bytes that differ whenever a field does."""
        whole = hashlib.sha256(b"hicache-fsm-fingerprint-v1")
        for name, value in self._items():
            for part in (name, value):
                text = part.encode("utf-8")
                whole.update(len(text).to_bytes(8, "little") + text)
        return whole.digest()

    def text(self) -> str:
        """All fields on one line, for messages and store headers."""
        return " ".join(f"{name}={value}" for name, value in self._items())

    def _items(self) -> list[tuple[str, str]]:
        return [(field.name, str(getattr(self, field.name))) for field in fields(self)]
