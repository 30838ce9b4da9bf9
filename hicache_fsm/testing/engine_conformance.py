"""What every staging engine must do, as a test class to inherit from.

    class TestMyEngine(EngineConformance):
        @pytest.fixture
        def engine(self) -> Iterator[EngineUnderTest]:
            mine = MyEngine(...)
            yield EngineUnderTest(mine, staging_pages=16, device_pages=16, read_device=..., write_device=...,
                                  forward_begin=mine.forward_begin, forward_end=mine.forward_end)
            mine.close()

The kit sees an engine only through the port and these few hooks, so one suite serves engines with and without an
accelerator. Whole device pages cross the hooks in staging order (`[layer][token][bytes]`). Pools of 12 to 64 pages
are enough; every test writes all bytes that it later compares.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_fsm.errors import StagingError
from hicache_fsm.ports import Pool, StagingEngine

MIN_PAGES = 12
# A test that waits longer than this for an answer has found a lost one.
ANSWER_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """An engine and what the kit needs beside the port."""

    port: StagingEngine
    staging_pages: int
    device_pages: int
    read_device: Callable[[Sequence[int]], list[bytes]]  # whole pages in staging order, after pending kernels
    write_device: Callable[[Sequence[int], Sequence[bytes]], None]
    forward_begin: Callable[[], int]
    forward_end: Callable[[int], None]

    def read_staging(self, pages: Sequence[int]) -> list[bytes]:
        return [bytes(view) for view in self.port.staging_views(pages)]

    def write_staging(self, pages: Sequence[int], contents: Sequence[bytes]) -> None:
        for view, content in zip(self.port.staging_views(pages), contents, strict=True):
            view[:] = content

    def fill(self, rng: random.Random) -> tuple[list[bytes], list[bytes]]:
        """Give every page of both pools its own random bytes; returns staging and device contents."""
        staging = [rng.randbytes(self.port.page_bytes) for _ in range(self.staging_pages)]
        device = [rng.randbytes(self.port.page_bytes) for _ in range(self.device_pages)]
        self.write_staging(range(self.staging_pages), staging)
        self.write_device(range(self.device_pages), device)
        return staging, device

    def contents(self) -> tuple[list[bytes], list[bytes]]:
        return self.read_staging(range(self.staging_pages)), self.read_device(range(self.device_pages))

    def slab_of(self, page: bytes, layer: int) -> bytes:
        size = self.port.page_bytes // self.port.num_layers
        return page[layer * size : (layer + 1) * size]


class Answers:
    """Collects `done` calls. `wait` returns when the named operations have been answered."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.calls: list[tuple[int, bool]] = []
        self.threads: set[int] = set()

    def __call__(self, op: int, ok: bool) -> None:
        with self._changed:
            self.calls.append((op, ok))
            self.threads.add(threading.get_ident())
            self._changed.notify_all()

    def wait(self, *ops: int) -> dict[int, bool]:
        """The verdicts so far. Raises `AssertionError` if an answer is missing for too long or came twice."""
        wanted = set(ops)
        with self._changed:
            come = self._changed.wait_for(lambda: wanted <= {op for op, _ in self.calls}, ANSWER_LIMIT_S)
            assert come, f"no answer for {sorted(wanted - {op for op, _ in self.calls})}"
            assert len(self.calls) == len(dict(self.calls)), f"answered twice: {self.calls}"
            return dict(self.calls)


class Copy(NamedTuple):
    to_device: bool
    staging: tuple[int, ...]
    device: tuple[int, ...]


def _copies() -> st.SearchStrategy[list[Copy]]:
    # Few pages and many copies, so that most copies collide with another one.
    page = st.integers(0, 5)
    pairs = st.lists(st.tuples(page, page), min_size=1, max_size=4)
    loads = pairs.map(lambda p: {device: staging for staging, device in p})
    offloads = pairs.map(dict)
    as_load = loads.map(lambda m: Copy(True, tuple(m.values()), tuple(m)))
    as_offload = offloads.map(lambda m: Copy(False, tuple(m), tuple(m.values())))
    return st.lists(st.one_of(as_load, as_offload), min_size=2, max_size=12)


def _page_sets(shape: str, rng: random.Random, staging_pages: int, device_pages: int) -> tuple[list[int], list[int]]:
    count = min(staging_pages, device_pages) // 2
    run = list(range(1, count + 1))
    scattered = rng.sample(range(staging_pages), count), rng.sample(range(device_pages), count)
    shapes = {
        "one": ([rng.randrange(staging_pages)], [rng.randrange(device_pages)]),
        "runs": (run, [page + 1 for page in run]),
        "gather": (scattered[0], run),
        "scatter": (run, scattered[1]),
        "indexed": scattered,
        "repeated source": ([3] * count, scattered[1]),
    }
    return shapes[shape]


SHAPES = ("one", "runs", "gather", "scatter", "indexed", "repeated source")


class EngineConformance:
    """Inherit, override `engine`, and run under pytest."""

    @pytest.fixture
    def engine(self) -> EngineUnderTest:
        raise NotImplementedError("override the `engine` fixture and yield an EngineUnderTest")

    @pytest.fixture
    def answers(self) -> Answers:
        return Answers()

    # ── bytes ────────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("shape", SHAPES)
    def test_load_writes_its_pages_and_no_other(self, engine: EngineUnderTest, answers: Answers, shape: str) -> None:
        rng = random.Random(shape)
        staging, expected = engine.fill(rng)
        sources, targets = _page_sets(shape, rng, engine.staging_pages, engine.device_pages)
        engine.port.load(1, sources, targets, answers)
        assert answers.wait(1) == {1: True}
        for source, target in zip(sources, targets, strict=True):
            expected[target] = staging[source]
        assert engine.contents() == (staging, expected)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_offload_writes_its_pages_and_no_other(self, engine: EngineUnderTest, answers: Answers, shape: str) -> None:
        rng = random.Random(shape)
        expected, device = engine.fill(rng)
        targets, sources = _page_sets(shape, rng, engine.device_pages, engine.staging_pages)[::-1]
        engine.port.offload(1, sources, targets, answers)
        assert answers.wait(1) == {1: True}
        for source, target in zip(sources, targets, strict=True):
            expected[target] = device[source]
        assert engine.contents() == (expected, device)

    def test_round_trip_is_bit_exact(self, engine: EngineUnderTest, answers: Answers) -> None:
        rng = random.Random(0)
        _, device = engine.fill(rng)
        half = engine.device_pages // 2
        staging_ids = rng.sample(range(engine.staging_pages), min(half, engine.staging_pages))
        origin, target = list(range(len(staging_ids))), list(range(half, half + len(staging_ids)))
        engine.port.offload(1, origin, staging_ids, answers)
        engine.port.load(2, staging_ids, target, answers)
        assert answers.wait(1, 2) == {1: True, 2: True}
        assert engine.read_device(target) == [device[page] for page in origin]

    def test_no_pages_is_a_copy_that_succeeds(self, engine: EngineUnderTest, answers: Answers) -> None:
        engine.port.load(1, [], [], answers)
        engine.port.offload(2, [], [], answers)
        assert answers.wait(1, 2) == {1: True, 2: True}

    def test_views_share_the_arena(self, engine: EngineUnderTest) -> None:
        first, second = engine.port.staging_views([2, 2])
        assert len(first) == engine.port.page_bytes
        assert not first.readonly
        first[:] = bytes([7]) * len(first)
        assert bytes(second) == bytes([7]) * len(first)
        first.release()
        assert engine.read_staging([2]) == [bytes(second)], "a released view must not spoil later ones"

    def test_poison_covers_the_pages_and_no_other(self, engine: EngineUnderTest) -> None:
        staging, device = engine.fill(random.Random(1))
        engine.port.poison(Pool.STAGING, [1, 4])
        engine.port.poison(Pool.DEVICE, [0, 3])
        staging_now, device_now = engine.contents()
        for before, now, poisoned in ((staging, staging_now, (1, 4)), (device, device_now, (0, 3))):
            assert all(len(set(now[page])) == 1 for page in poisoned)
            assert all(now[page] == before[page] for page in range(len(now)) if page not in poisoned)

    # ── layers ───────────────────────────────────────────────────────────────────────────────────────

    def test_bc_083_each_layer_can_be_read_once_it_is_ready(self, engine: EngineUnderTest, answers: Answers) -> None:
        staging, _ = engine.fill(random.Random(2))
        ops = range(1, 5)
        for op in ops:
            engine.port.load(op, [op, op + 4], [2 * op, 2 * op + 1], answers)
        for layer in range(engine.port.num_layers):
            for op in ops:
                engine.port.layer_ready(op, layer)
                pages = engine.read_device([2 * op, 2 * op + 1])
                got = [engine.slab_of(page, layer) for page in pages]
                assert got == [engine.slab_of(staging[page], layer) for page in (op, op + 4)], (op, layer)
        answers.wait(*ops)

    def test_acknowledged_and_unknown_loads_are_ready(self, engine: EngineUnderTest, answers: Answers) -> None:
        engine.port.load(1, [0], [0], answers)
        answers.wait(1)
        for op in (1, 999):
            for layer in range(engine.port.num_layers):
                engine.port.layer_ready(op, layer)

    @pytest.mark.parametrize("from_end", [-1, 0])
    def test_a_layer_that_does_not_exist_is_refused(self, engine: EngineUnderTest, from_end: int) -> None:
        layer = -1 if from_end else engine.port.num_layers
        with pytest.raises(StagingError, match="layer"):
            engine.port.layer_ready(1, layer)

    # ── order and ownership ──────────────────────────────────────────────────────────────────────────

    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(copies=_copies(), seed=st.integers(0, 2**16))
    def test_bc_028_queued_copies_act_as_if_run_one_by_one(
        self, engine: EngineUnderTest, copies: list[Copy], seed: int
    ) -> None:
        """Read after write, write after read and write after write, within and across directions and pools."""
        staging, device = engine.fill(random.Random(seed))
        answers = Answers()
        for op, copy in enumerate(copies):
            if copy.to_device:
                engine.port.load(op, copy.staging, copy.device, answers)
                for source, target in zip(copy.staging, copy.device, strict=True):
                    device[target] = staging[source]
            else:
                engine.port.offload(op, copy.device, copy.staging, answers)
                for source, target in zip(copy.device, copy.staging, strict=True):
                    staging[target] = device[source]
        assert all(answers.wait(*range(len(copies))).values())
        assert engine.contents() == (staging, device)

    def test_bc_022_load_waits_for_a_forward_that_began_before_it(
        self, engine: EngineUnderTest, answers: Answers
    ) -> None:
        staging, _ = engine.fill(random.Random(3))
        token = engine.forward_begin()
        engine.port.load(1, [0, 1], [5, 6], answers)
        engine.write_device([5, 6], [bytes(engine.port.page_bytes)] * 2)  # the forward's late write into freed rows
        engine.forward_end(token)
        assert answers.wait(1) == {1: True}
        assert engine.read_device([5, 6]) == staging[:2]

    def test_offload_sees_what_a_forward_that_began_before_it_writes(
        self, engine: EngineUnderTest, answers: Answers
    ) -> None:
        engine.fill(random.Random(4))
        late = bytes([9]) * engine.port.page_bytes
        token = engine.forward_begin()
        engine.port.offload(1, [5], [0], answers)
        engine.write_device([5], [late])
        engine.forward_end(token)
        assert answers.wait(1) == {1: True}
        assert engine.read_staging([0]) == [late]

    def test_a_later_forward_holds_no_copy_back(self, engine: EngineUnderTest, answers: Answers) -> None:
        first = engine.forward_begin()
        engine.port.load(1, [0], [0], answers)
        second = engine.forward_begin()
        engine.forward_end(first)
        assert answers.wait(1) == {1: True}
        engine.port.layer_ready(1, engine.port.num_layers - 1)
        engine.forward_end(second)

    def test_bc_023_staging_can_be_overwritten_once_answered(self, engine: EngineUnderTest) -> None:
        staging, _ = engine.fill(random.Random(5))
        answers = Answers()

        def reuse_at_once(op: int, ok: bool) -> None:
            engine.write_staging([0, 1], [bytes(engine.port.page_bytes)] * 2)
            answers(op, ok)

        engine.port.load(1, [0, 1], [3, 7], reuse_at_once)
        assert answers.wait(1) == {1: True}
        assert engine.read_device([3, 7]) == staging[:2]

    def test_bc_027_arguments_can_be_reused_after_the_call(self, engine: EngineUnderTest, answers: Answers) -> None:
        staging, device = engine.fill(random.Random(6))
        sources, targets = [0, 1], [4, 9]
        token = engine.forward_begin()  # holds the copies back until the lists have new contents
        engine.port.load(1, sources, targets, answers)
        sources[:], targets[:] = [2, 3], [5, 6]
        engine.port.offload(2, targets, sources, answers)
        sources.clear()
        targets.clear()
        engine.forward_end(token)
        assert answers.wait(1, 2) == {1: True, 2: True}
        assert engine.read_device([4, 9]) == staging[:2]
        assert engine.read_staging([2, 3]) == device[5:7]

    def test_directions_run_side_by_side(self, engine: EngineUnderTest, answers: Answers) -> None:
        staging, device = engine.fill(random.Random(7))
        half = MIN_PAGES // 2
        ops = range(0, 60, 2)
        for op in ops:
            page = op // 2 % half
            engine.port.load(op, [page], [page], answers)
            engine.port.offload(op + 1, [half + page], [half + page], answers)
        assert all(answers.wait(*range(60)).values())
        assert engine.read_device(range(half)) == staging[:half]
        assert engine.read_staging(range(half, MIN_PAGES)) == device[half:MIN_PAGES]

    # ── answers, refusals, end ───────────────────────────────────────────────────────────────────────

    def test_answers_come_from_another_thread(self, engine: EngineUnderTest, answers: Answers) -> None:
        engine.port.load(1, [0], [0], answers)
        engine.port.offload(2, [1], [1], answers)
        answers.wait(1, 2)
        assert threading.get_ident() not in answers.threads

    def test_an_answer_may_queue_the_next_copy(self, engine: EngineUnderTest, answers: Answers) -> None:
        staging, _ = engine.fill(random.Random(8))

        def go_on(op: int, ok: bool) -> None:
            if op < 5:
                engine.port.load(op + 1, [op + 1], [op + 1], go_on)
            answers(op, ok)

        engine.port.load(0, [0], [0], go_on)
        assert all(answers.wait(*range(6)).values())
        assert engine.read_device(range(6)) == staging[:6]

    @pytest.mark.parametrize(
        ("staging", "device"),
        [([0, 1], [0]), ([-1], [0]), ([10**6], [0]), ([0], [-1]), ([0], [10**6]), ([0, 1], [10**6, 0])],
    )
    def test_pages_that_do_not_fit_are_refused_at_once(
        self, engine: EngineUnderTest, answers: Answers, staging: list[int], device: list[int]
    ) -> None:
        before = engine.fill(random.Random(9))
        with pytest.raises(StagingError):
            engine.port.load(1, staging, device, answers)
        with pytest.raises(StagingError):
            engine.port.offload(1, device, staging, answers)
        engine.port.load(1, [], [], answers)  # the refused id is still free, and nothing stands before it
        assert answers.wait(1) == {1: True}
        assert engine.contents() == before

    def test_a_target_named_twice_is_refused(self, engine: EngineUnderTest, answers: Answers) -> None:
        with pytest.raises(StagingError, match="more than once"):
            engine.port.load(1, [0, 1], [3, 3], answers)
        with pytest.raises(StagingError, match="more than once"):
            engine.port.offload(1, [0, 1], [3, 3], answers)
        assert answers.calls == []

    @pytest.mark.parametrize("page", [-1, 10**6])
    def test_unknown_pages_have_no_view_and_no_poison(self, engine: EngineUnderTest, page: int) -> None:
        with pytest.raises(StagingError):
            engine.port.staging_views([0, page])
        for pool in Pool:
            with pytest.raises(StagingError):
                engine.port.poison(pool, [0, page])

    def test_a_live_operation_id_is_refused(self, engine: EngineUnderTest, answers: Answers) -> None:
        token = engine.forward_begin()
        engine.port.load(1, [0], [0], answers)
        with pytest.raises(StagingError, match="operation 1"):
            engine.port.offload(1, [1], [1], answers)
        engine.forward_end(token)
        assert answers.wait(1) == {1: True}

    def test_a_forward_ends_once(self, engine: EngineUnderTest) -> None:
        token = engine.forward_begin()
        engine.forward_end(token)
        with pytest.raises(StagingError, match="forward"):
            engine.forward_end(token)

    def test_a_raising_answer_stops_nobody_and_is_raised_at_close(
        self, engine: EngineUnderTest, answers: Answers
    ) -> None:
        def raises(op: int, ok: bool) -> None:
            answers(op, ok)
            raise RuntimeError("callback of the caller")

        engine.port.load(1, [0], [0], raises)
        engine.port.load(2, [1], [1], answers)
        engine.port.offload(3, [1], [1], raises)
        engine.port.offload(4, [0], [0], answers)
        assert all(answers.wait(1, 2, 3, 4).values())
        with pytest.raises(StagingError, match="callback of the caller"):
            engine.port.close()
        engine.port.close()

    def test_close_answers_every_copy_once(self, engine: EngineUnderTest, answers: Answers) -> None:
        staging, _ = engine.fill(random.Random(10))
        token = engine.forward_begin()  # keeps all of them queued
        for op in range(0, 10, 2):
            engine.port.load(op, [0], [op], answers)
            engine.port.offload(op + 1, [op], [1], answers)
        engine.port.close()
        engine.forward_end(token)
        verdicts = answers.wait(*range(10))
        assert len(answers.calls) == 10
        assert not any(verdicts.values()), f"nothing could start, so nothing may claim success: {staging[0][:4]!r}"

    def test_a_closed_engine_refuses_everything(self, engine: EngineUnderTest, answers: Answers) -> None:
        engine.port.close()
        engine.port.close()
        calls: list[Callable[[], object]] = [
            lambda: engine.port.load(1, [0], [0], answers),
            lambda: engine.port.offload(1, [0], [0], answers),
            lambda: engine.port.staging_views([0]),
            lambda: engine.port.poison(Pool.DEVICE, [0]),
            lambda: engine.port.layer_ready(1, 0),
            engine.forward_begin,
        ]
        for call in calls:
            with pytest.raises(StagingError, match="closed"):
                call()
        assert answers.calls == []
