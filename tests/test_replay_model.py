"""The replay's model notices every kind of wrong row, and never blames a right one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_fsm.admission.adder import PrefillEntry
from hicache_fsm.errors import ConfigError
from hicache_fsm.replay.model import ReplayModel
from hicache_fsm.scheduler.batch import Batch, PrefillWork
from hicache_fsm.scheduler.requests import Request

LAYERS, WIDTH, POISON = 3, 16, 0xFF


class World:
    """A device pool of pages of `page` tokens, page tables, and a model on top."""

    def __init__(self, page: int = 4, pages: int = 32) -> None:
        self.page = page
        self.pool = [np.full((pages * page, WIDTH), POISON, dtype=np.uint8) for _ in range(LAYERS)]
        self.tables: dict[str, list[int]] = {}
        self.waited: list[tuple[tuple[int, ...], int]] = []
        self.model = ReplayModel(self.pool, page, self._ready, self.tables.__getitem__)

    def _ready(self, ops: Sequence[int], layer: int) -> None:
        self.waited.append((tuple(ops), layer))

    def request(self, rid: str, prompt: Sequence[int], pages: Sequence[int], output: int = 1) -> Request:
        self.tables[rid] = list(pages)
        return Request(rid, list(prompt), output)

    def prefill(self, request: Request, start: int, end: int, ops: tuple[int, ...] = ()) -> int:
        """Compute prompt tokens [start, end); the first token of the output, if they end the prompt."""
        entry = PrefillEntry(request.rid, start, end, request.prompt_end, start, 0, ops)
        table = self.tables[request.rid][: -(-end // self.page)]
        (token,), _ = self.model.forward(Batch(prefill=[PrefillWork(request, entry, table)]))
        request.computed = end
        if not entry.is_chunk:
            request.output.append(token)
        return token

    def decode(self, *requests: Request) -> None:
        for request in requests:
            request.last_page = self.tables[request.rid][request.computed // self.page]
        _, tokens = self.model.forward(Batch(decode=list(requests)))
        for request, token in zip(requests, tokens, strict=True):
            request.computed += 1
            request.output.append(token)

    def reads(self, prompt: Sequence[int], pages: Sequence[int], length: int) -> int:
        """Wrong rows that a new request finds which takes its first `length` tokens from these pages."""
        before = self.model.wrong_rows
        reader = self.request(f"reader{len(self.tables)}", [*prompt, 999], [*pages, 31])
        self.prefill(reader, length, len(prompt) + 1)
        return self.model.wrong_rows - before


PROMPT = list(range(100, 112))  # three pages of four tokens


def computed(page: int = 4) -> World:
    """PROMPT lies in pages 0, 1 and 2."""
    world = World(page)
    world.prefill(world.request("writer", PROMPT, range(len(PROMPT) // page)), 0, len(PROMPT))
    assert world.model.wrong_rows == 0
    return world


def test_right_rows_pass() -> None:
    world = computed()
    assert world.reads(PROMPT, [0, 1, 2], 12) == 0
    assert world.model.checked_rows == 12


def test_poison_is_wrong_in_every_layer() -> None:
    world = computed()
    for rows in world.pool:
        rows[4:8] = POISON
    assert world.reads(PROMPT, [0, 1, 2], 12) == 4 * LAYERS


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("byte", [0, 7, 8, WIDTH - 1])
def test_one_bit_is_noticed(layer: int, byte: int) -> None:
    world = computed()
    world.pool[layer][6, byte] ^= 1
    assert world.reads(PROMPT, [0, 1, 2], 12) == 1
    (error,) = world.model.errors
    assert (error.layer, error.first_token, error.rows) == (layer, 6, 1)


def test_rows_after_another_prefix_are_wrong() -> None:
    world = computed()
    other = [1, *PROMPT[1:]]  # equal tokens from position 1 on
    assert world.reads(other, [0, 1, 2], 12) == (1 + 8) * LAYERS, "its own first row, and all later pages"


def test_rows_of_another_position_are_wrong() -> None:
    world = World()
    same = [7] * 12
    world.prefill(world.request("writer", same, [0, 1, 2]), 0, 12)
    assert world.reads(same, [0, 2, 1], 12) == 8 * LAYERS


def test_rows_of_another_offset_in_the_page_are_wrong() -> None:
    world = World()
    world.prefill(world.request("writer", [7] * 4, [0]), 0, 4)
    for rows in world.pool:
        rows[:4] = np.roll(rows[:4], 1, axis=0)
    assert world.reads([7] * 4, [0], 4) == 4 * LAYERS


def test_rows_of_another_layer_are_wrong() -> None:
    world = computed()
    world.pool[2][:12] = world.pool[1][:12]
    assert world.reads(PROMPT, [0, 1, 2], 12) == 12


def test_a_neighbours_page_is_wrong() -> None:
    world = computed()
    world.prefill(world.request("neighbour", range(500, 512), [10, 11, 12]), 0, 12)
    assert world.reads(PROMPT, [0, 11, 2], 12) == 4 * LAYERS


def test_only_rows_that_are_read_are_judged() -> None:
    world = computed()
    for rows in world.pool:
        rows[8:12] = POISON
    assert world.reads(PROMPT, [0, 1, 30], 8) == 0
    assert world.model.checked_rows == 8


def test_chunks_read_what_earlier_chunks_wrote() -> None:
    world = World()
    request = world.request("r", PROMPT, [3, 4, 5])
    for start, end in ((0, 5), (5, 6), (6, 11), (11, 12)):
        world.prefill(request, start, end)
    assert world.model.wrong_rows == 0
    assert world.model.checked_rows == 5 + 6 + 11
    assert world.reads(PROMPT, [3, 4, 5], 12) == 0


@given(
    page=st.integers(1, 5),
    cuts=st.lists(st.integers(1, 22), unique=True, max_size=5).map(sorted),
    length=st.just(23),
    output=st.integers(1, 9),
)
def test_right_rows_are_never_blamed(page: int, cuts: list[int], length: int, output: int) -> None:
    """Whatever the page size and the edges of chunks, prompt and output."""
    world = World(page, pages=64)
    request = world.request("r", range(length), range(40), output)
    for start, end in zip([0, *cuts], [*cuts, length], strict=True):
        world.prefill(request, start, end)
    while request.new_tokens_left:
        world.decode(request)
    assert world.model.wrong_rows == 0
    assert world.model.checked_rows == sum(cuts) + request.computed - length
    everything = [*range(length), *request.output]
    assert world.reads(everything, range(40), request.computed) == 0


def test_page_size_one_tells_prefixes_apart() -> None:
    world = computed(page=1)
    assert world.reads(PROMPT, range(12), 12) == 0
    assert world.reads([1, *PROMPT[1:]], range(12), 12) == 12 * LAYERS


@pytest.mark.parametrize("token", range(9, 14))
def test_a_row_lost_while_decoding_is_noticed_at_the_end(token: int) -> None:
    """Rows 9 to 13 belong to the output; the request ends when row 13 has been written."""
    world = World()
    request = world.request("r", range(9), [4, 5, 6, 7], output=6)
    world.prefill(request, 0, 9)
    while request.new_tokens_left > 1:
        world.decode(request)
    if token == request.computed:  # the newest row is written and checked in one go: take its place away
        world.tables["r"][token // 4] = 20
        request.last_page = 7
        world.model.forward(Batch(decode=[request]))
    else:
        world.pool[1][(4 + token // 4) * 4 + token % 4] = POISON
        world.decode(request)
    assert world.model.wrong_rows > 0
    assert world.model.errors[0].first_token == (12 if token == 13 else token)


def test_only_the_last_decode_checks_the_output() -> None:
    world = World()
    request = world.request("r", range(4), [4, 5, 6], output=5)
    world.prefill(request, 0, 4)
    for _ in range(3):
        world.decode(request)
    assert world.model.checked_rows == 0
    world.decode(request)
    assert world.model.checked_rows == 4


def test_generated_tokens_are_unique_and_no_prompt_tokens() -> None:
    world = World(pages=128)
    requests = [world.request(f"r{i}", range(4), [10 * i, 10 * i + 1, 10 * i + 2], output=4) for i in range(3)]
    for request in requests:
        world.prefill(request, 0, 4)
    for _ in range(3):
        world.decode(*requests)
    output = [token for request in requests for token in request.output]
    assert len(set(output)) == len(output) == 12
    assert min(output) >= 1 << 31
    assert world.model.wrong_rows == 0


def test_each_layer_waits_for_the_loads_of_its_batch() -> None:
    world = World()
    world.prefill(world.request("r", PROMPT, [0, 1, 2]), 0, 12, ops=(5, 3))
    assert world.waited == [((3, 5), layer) for layer in range(LAYERS)]


def test_kept_errors_are_bounded_and_all_are_counted() -> None:
    world = computed()
    for rows in world.pool:
        rows[:] = POISON
    for _ in range(20):
        world.reads(PROMPT, [0, 1, 2], 12)
    assert world.model.wrong_rows == 20 * 12 * LAYERS
    assert len(world.model.errors) == 16


def test_forgotten_requests_are_forgotten() -> None:
    world = computed()
    world.model.forget("writer")
    world.model.forget("writer")
    assert world.reads(PROMPT, [0, 1, 2], 12) == 0


def test_rows_must_be_whole_words() -> None:
    with pytest.raises(ConfigError, match="multiple of 8"):
        ReplayModel([np.zeros((4, 12), dtype=np.uint8)], 4, lambda ops, layer: None, lambda rid: [])
