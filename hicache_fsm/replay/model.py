"""`ReplayModel`: a "model" whose KV bytes follow from the tokens, so that every row read can be checked.

The row of a token depends on the token, its offset in its page, the layer, and a running hash over all pages
before it; never on a page table. So a row that comes from another prefix, another position, another layer or
a reused page differs from what recomputing would have written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from hicache_fsm.errors import ConfigError
from hicache_fsm.replay.workload import OUTPUT_TOKEN_BASE
from hicache_fsm.scheduler.batch import Batch, PrefillWork
from hicache_fsm.scheduler.requests import Request

Words = npt.NDArray[np.uint64]
WORD = 8
TOKEN_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class WrongRows(NamedTuple):
    """Rows that a request read and that did not hold what recomputing would have written."""

    rid: str
    layer: int
    first_token: int
    rows: int


class LayerGate(Protocol):
    def __call__(self, ops: Sequence[int], layer: int) -> None:
        """Wait until these loads have written this layer."""
        ...


class Contents:
    """Expected rows of one request: its tokens so far, and the running hash before each page."""

    __slots__ = ("tokens", "length", "prompt_len", "seeds", "page")

    def __init__(self, request: Request, page: int) -> None:
        self.page = page
        self.tokens = np.zeros(request.prompt_len + request.max_new_tokens, dtype=np.uint64)
        self.tokens[: request.prompt_len] = request.prompt
        self.length = self.prompt_len = request.prompt_len
        self.seeds: list[int] = [0]

    def take(self, output: Sequence[int]) -> None:
        """Tokens generated so far."""
        new = output[self.length - self.prompt_len :]
        if new:
            self.tokens[self.length : self.length + len(new)] = new
            self.length += len(new)

    def seed(self, index: int) -> int:
        """Hash over all tokens before page `index`, which must have been taken."""
        seeds, page = self.seeds, self.page
        while len(seeds) <= index:
            done = (len(seeds) - 1) * page
            seeds.append(xxhash.xxh3_64_intdigest(self.tokens[done : done + page].data, seeds[-1]))
        return seeds[index]

    def base(self, first_page: int, end_page: int, words: int) -> Words:
        """One word per token of whole pages [first, end), each repeated `words` times: `[pages, page * words]`.
        Rows are this times constants; the flat last axis keeps the arithmetic at memory speed."""
        self.seed(end_page - 1)
        seeds = np.array(self.seeds[first_page:end_page], dtype=np.uint64)
        tokens = np.zeros((end_page - first_page) * self.page, dtype=np.uint64)
        have = self.tokens[first_page * self.page : end_page * self.page]
        tokens[: len(have)] = have
        return np.repeat(tokens.reshape(-1, self.page) * TOKEN_FACTOR + seeds[:, None], words, axis=1)


class ReplayModel:
    """Implements `scheduler.batch.Model`. `layers` are the device pool's rows of each layer,
    `[rows, bytes_per_token_per_layer]` uint8, shared memory; `page_table` gives a request's device pages.
    Single threaded."""

    def __init__(
        self,
        layers: Sequence[npt.NDArray[np.uint8]],
        page_size: int,
        layer_ready: LayerGate,
        page_table: Callable[[str], list[int]],
        kept_errors: int = 16,
    ) -> None:
        width = layers[0].shape[1]
        if width % WORD:
            raise ConfigError(f"{width} bytes per token and layer are not a multiple of {WORD}")
        self.page = page_size
        self._words = width // WORD
        self._slabs: list[Words] = [
            rows.reshape(-1, page_size * width).view(np.uint64) for rows in layers
        ]  # [pages, page * words]
        self._rows: list[Words] = [slab.reshape(-1, self._words) for slab in self._slabs]
        rng = np.random.default_rng(20240607)
        odd = rng.integers(1, 1 << 63, size=(len(layers), page_size * self._words), dtype=np.uint64)
        self._factors: Words = odd * np.uint64(2) + np.uint64(1)  # odd, so that no information is lost
        self._row_factors = self._factors.reshape(len(layers), page_size, self._words)
        self._layer_ready = layer_ready
        self._page_table = page_table
        self._contents: dict[str, Contents] = {}
        self._next_token = OUTPUT_TOKEN_BASE
        self._kept_errors = kept_errors
        self.wrong_rows = 0
        self.checked_rows = 0
        self.errors: list[WrongRows] = []

    def forget(self, rid: str) -> None:
        """The request has ended."""
        self._contents.pop(rid, None)

    def forward(self, batch: Batch) -> tuple[list[int], list[int]]:
        """See `scheduler.batch.Model`. Checks every row that a prefill reads before it writes its own."""
        ops = batch.load_ops
        prepared = [self._prepare(work) for work in batch.prefill]
        for layer in range(len(self._rows)):
            if ops:
                self._layer_ready(ops, layer)
            for work, base in zip(batch.prefill, prepared, strict=True):
                self._check(work.request.rid, layer, (0, work.entry.start), work.pages, base)
                self._write(layer, work, base)
        self._decode(batch.decode)
        first = self._tokens(len(batch.prefill))
        return first, self._tokens(len(batch.decode))

    def check_output(self, request: Request) -> None:
        """Check the rows of all generated tokens that have KV, the newest included."""
        page, written = self.page, request.num_tokens - request.prompt_len
        first = request.prompt_len // page
        start, end = request.prompt_len - first * page, request.prompt_len - first * page + written
        base = self._of(request).base(first, first - (-end // page), self._words)
        pages = self._page_table(request.rid)[first:]
        for layer in range(len(self._rows)):
            self._check(request.rid, layer, (start, end), pages, base, first * page)

    def _of(self, request: Request) -> Contents:
        contents = self._contents.get(request.rid)
        if contents is None:
            contents = self._contents[request.rid] = Contents(request, self.page)
        contents.take(request.output)
        return contents

    def _prepare(self, work: PrefillWork) -> Words:
        return self._of(work.request).base(0, len(work.pages), self._words)

    def _check(
        self, rid: str, layer: int, span: tuple[int, int], pages: Sequence[int], base: Words, offset: int = 0
    ) -> None:
        """Compare the rows of tokens [start, end) with what the model would write; `pages` and `base` begin at
        token `offset`."""
        start, end = span
        if start >= end:
            return
        last = -(-end // self.page)
        found = self._slabs[layer][list(pages[:last])]
        wanted = base[:last] * self._factors[layer]
        words = self._words
        same = found.reshape(-1)[start * words : end * words] == wanted.reshape(-1)[start * words : end * words]
        if layer == 0:
            self.checked_rows += end - start
        if not same.all():
            bad = np.flatnonzero(~same.reshape(-1, words).all(axis=1))
            self.wrong_rows += len(bad)
            if len(self.errors) < self._kept_errors:
                self.errors.append(WrongRows(rid, layer, offset + start + int(bad[0]), len(bad)))

    def _write(self, layer: int, work: PrefillWork, base: Words) -> None:
        """Write the rows of tokens [start, end): whole pages at once, the edges row by row."""
        page = self.page
        start, end = work.entry.start, work.entry.end
        first, last = -(-start // page), end // page
        if first > last:  # both edges lie in one page
            self._write_edge(layer, work, base, start, end)
            return
        if last > first:
            self._slabs[layer][list(work.pages[first:last])] = base[first:last] * self._factors[layer]
        self._write_edge(layer, work, base, start, first * page)
        self._write_edge(layer, work, base, last * page, end)

    def _write_edge(self, layer: int, work: PrefillWork, base: Words, start: int, end: int) -> None:
        """Rows of tokens [start, end), which lie in one page."""
        if start >= end:
            return
        index = start // self.page
        part = slice((start - index * self.page) * self._words, (end - index * self.page) * self._words)
        self._slabs[layer][work.pages[index], part] = base[index, part] * self._factors[layer, part]

    def _decode(self, requests: Sequence[Request]) -> None:
        """Write the row of each request's newest token."""
        if not requests:
            return
        page, known = self.page, self._contents
        seeds: list[int] = []
        for request in requests:
            contents = known[request.rid]
            at = request.computed // page
            if at >= len(contents.seeds):
                contents.take(request.output)
                contents.seed(at)
            seeds.append(contents.seeds[at])
        tokens = np.array([request.output[-1] for request in requests], dtype=np.uint64)
        base = (tokens * TOKEN_FACTOR + np.array(seeds, dtype=np.uint64))[:, None]
        offsets = np.array([request.computed for request in requests]) % page
        rows = np.array([request.last_page for request in requests]) * page + offsets
        for layer, pool in enumerate(self._rows):
            pool[rows] = base * self._row_factors[layer][offsets]
        for request in requests:
            if request.new_tokens_left <= 1:  # the token that this forward gives is its last
                self.check_output(request)

    def _tokens(self, count: int) -> list[int]:
        first = self._next_token
        self._next_token += count
        return list(range(first, first + count))
