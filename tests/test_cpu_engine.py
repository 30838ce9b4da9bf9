"""The CPU engine: the conformance suite, then what only gates and injected faults can show."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from hicache_fsm.errors import ConfigError, LoadFailed, StagingError
from hicache_fsm.testing.engine_conformance import ANSWER_LIMIT_S, Answers, EngineConformance, EngineUnderTest
from hicache_gpu import CopyFaults, CpuEngine, Direction, KVLayout
from hicache_gpu.cpu_engine import MAX_FAILED_KEPT

LAYOUT = KVLayout(num_layers=4, bytes_per_token_per_layer=48, page_size=8)
PAGES = 12
ZEROS = bytes(LAYOUT.page_bytes)


def under_test(engine: CpuEngine) -> EngineUnderTest:
    layout = engine.layout

    def read(pages: Sequence[int]) -> list[bytes]:
        layers = [engine.device.gather(layer, pages).reshape(len(pages), -1) for layer in range(layout.num_layers)]
        return [row.tobytes() for row in np.concatenate(layers, axis=1)] if len(pages) else []

    def write(pages: Sequence[int], contents: Sequence[bytes]) -> None:
        for page, content in zip(pages, contents, strict=True):
            rows = slice(page * layout.page_size, (page + 1) * layout.page_size)
            for layer in range(layout.num_layers):
                slab = np.frombuffer(content[layout.slab_of(layer)], dtype=np.uint8)
                engine.device.layer_rows(layer)[rows] = slab.reshape(layout.page_size, -1)

    return EngineUnderTest(
        port=engine,
        staging_pages=engine.arena.num_pages,
        device_pages=engine.device.num_pages,
        read_device=read,
        write_device=write,
        forward_begin=engine.forward_begin,
        forward_end=engine.forward_end,
    )


def make(faults: CopyFaults | None = None, *, wait_limit_s: float = ANSWER_LIMIT_S) -> EngineUnderTest:
    return under_test(CpuEngine(LAYOUT, PAGES, PAGES, faults=faults, wait_limit_s=wait_limit_s))


@pytest.fixture
def answers() -> Answers:
    return Answers()


class TestCpuEngine(EngineConformance):
    @pytest.fixture(params=[LAYOUT, KVLayout(3, 5, 1), KVLayout(2, 32_768, 8)], ids=["16", "odd bytes", "large slabs"])
    def engine(self, request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
        engine = CpuEngine(request.param, PAGES, PAGES + 2)
        yield under_test(engine)
        engine.close()


class TestCpuEngineReordered(EngineConformance):
    """The contract holds although independent copies overtake each other."""

    @pytest.fixture
    def engine(self) -> Iterator[EngineUnderTest]:
        engine = CpuEngine(LAYOUT, PAGES, PAGES, faults=CopyFaults(seed=1, reorder_probability=0.5))
        yield under_test(engine)
        engine.close()


# ── layers ───────────────────────────────────────────────────────────────────────────────────────────


def test_bc_083_layer_0_is_readable_while_layer_1_is_on_its_way(answers: Answers) -> None:
    faults = CopyFaults()
    gate = faults.gate(Direction.LOAD, 0, 1)
    engine = make(faults)
    staging, device = engine.fill(random.Random(0))
    engine.port.load(1, [2, 5], [7, 3], answers)
    gate.wait_reached()
    engine.port.layer_ready(1, 0)
    page = engine.read_device([7])[0]
    assert engine.slab_of(page, 0) == engine.slab_of(staging[2], 0)
    assert engine.slab_of(page, 1) == engine.slab_of(device[7], 1)
    assert answers.calls == []
    gate.open()
    engine.port.layer_ready(1, LAYOUT.num_layers - 1)
    assert engine.read_device([7, 3]) == [staging[2], staging[5]]
    answers.wait(1)
    engine.port.close()


def test_bc_083_loads_queued_together_move_layer_by_layer(answers: Answers) -> None:
    """Layer 0 of the last load of a batch must not wait for all layers of the first."""
    faults = CopyFaults()
    first_layer_1 = faults.gate(Direction.LOAD, 0, 1)
    engine = make(faults)
    staging, _ = engine.fill(random.Random(1))
    token = engine.forward_begin()
    for op in range(4):
        engine.port.load(op, [op], [op], answers)
    engine.forward_end(token)
    first_layer_1.wait_reached()
    for op in range(4):
        engine.port.layer_ready(op, 0)
        assert engine.slab_of(engine.read_device([op])[0], 0) == engine.slab_of(staging[op], 0)
    first_layer_1.open()
    answers.wait(*range(4))
    assert answers.calls == [(op, True) for op in range(4)]
    engine.port.close()


def test_a_waiter_sleeps_until_its_layer_is_written(answers: Answers) -> None:
    faults = CopyFaults()
    gate = faults.gate(Direction.LOAD, 0, 2)
    engine = make(faults)
    order: list[str] = []
    engine.port.load(1, [0], [0], answers)
    gate.wait_reached()

    def wait_for_layer_2() -> None:
        engine.port.layer_ready(1, 2)
        order.append("layer 2 ready")

    waiter = threading.Thread(target=wait_for_layer_2)
    waiter.start()
    waiter.join(0.05)
    order.append("gate opened")
    gate.open()
    waiter.join(ANSWER_LIMIT_S)
    assert order == ["gate opened", "layer 2 ready"]
    engine.port.close()


def test_a_forward_that_waits_for_a_load_behind_itself_is_told_so(answers: Answers) -> None:
    engine = make()
    token = engine.forward_begin()
    engine.port.load(1, [0], [0], answers)
    with pytest.raises(StagingError, match="before its forward begins"):
        engine.port.layer_ready(1, 0)
    engine.forward_end(token)
    engine.port.layer_ready(1, 0)
    engine.port.close()


def test_a_wait_has_a_limit(answers: Answers) -> None:
    faults = CopyFaults()
    gate = faults.gate(Direction.LOAD, 0, 0)
    engine = make(faults, wait_limit_s=0.05)
    engine.port.load(1, [0], [0], answers)
    with pytest.raises(StagingError, match="did not reach layer 0"):
        engine.port.layer_ready(1, 0)
    gate.open()
    answers.wait(1)
    engine.port.close()


def test_an_offload_has_no_layers_to_wait_for(answers: Answers) -> None:
    faults = CopyFaults()
    gate = faults.gate(Direction.OFFLOAD, 0, 0)
    engine = make(faults)
    engine.port.offload(1, [0], [0], answers)
    with pytest.raises(StagingError, match="is an offload"):
        engine.port.layer_ready(1, 0)
    gate.open()
    answers.wait(1)
    engine.port.close()


# ── order and ownership ──────────────────────────────────────────────────────────────────────────────


def late_write(faults: CopyFaults, answers: Answers) -> tuple[list[bytes], list[bytes]]:
    """A forward writes rows late that were freed and loaded meanwhile; returns (staged, found) bytes."""
    before_ack = faults.gate(Direction.LOAD, 0, LAYOUT.num_layers)
    engine = make(faults)
    staging, _ = engine.fill(random.Random(2))
    token = engine.forward_begin()
    engine.port.load(1, [0, 1], [4, 8], answers)
    if faults.ignore_fence:
        before_ack.wait_reached()  # all bytes have moved beside the running forward
    else:
        assert not before_ack.reached.wait(0.05)
    engine.write_device([8], [ZEROS])
    engine.forward_end(token)
    before_ack.open()
    answers.wait(1)
    engine.port.close()
    return staging[:2], engine.read_device([4, 8])


def test_bc_022_the_fence_keeps_a_late_write_out_of_loaded_rows(answers: Answers) -> None:
    staged, found = late_write(CopyFaults(), answers)
    assert found == staged


def test_bc_022_without_the_fence_the_late_write_shows(answers: Answers) -> None:
    staged, found = late_write(CopyFaults(ignore_fence=True), answers)
    assert found == [staged[0], ZEROS]


def offload_behind_load(faults: CopyFaults, answers: Answers) -> tuple[bytes, bytes, bytes]:
    """Load device page 6 and offload it at once; returns (staged, old device, offloaded) bytes."""
    held = faults.gate(Direction.LOAD, 0, 1)
    engine = make(faults)
    staging, device = engine.fill(random.Random(3))
    engine.port.load(1, [0], [6], answers)
    held.wait_reached()
    engine.port.offload(2, [6], [9], answers)
    if faults.ignore_hazards:
        answers.wait(2)
    held.open()
    answers.wait(1, 2)
    offloaded = engine.read_staging([9])[0]
    engine.port.close()
    return staging[0], device[6], offloaded


def test_bc_028_an_offload_waits_for_the_load_of_its_page(answers: Answers) -> None:
    staged, _, offloaded = offload_behind_load(CopyFaults(), answers)
    assert offloaded == staged
    assert answers.calls == [(1, True), (2, True)]


def test_bc_028_unordered_directions_show_as_a_mixed_page(answers: Answers) -> None:
    staged, old, offloaded = offload_behind_load(CopyFaults(ignore_hazards=True), answers)
    assert offloaded[LAYOUT.slab_of(0)] == staged[LAYOUT.slab_of(0)]
    assert offloaded[LAYOUT.slab_bytes :] == old[LAYOUT.slab_bytes :]


def test_bc_028_same_ids_in_different_pools_do_not_order_each_other(answers: Answers) -> None:
    faults = CopyFaults()
    held = faults.gate(Direction.LOAD, 0, 0)
    engine = make(faults)
    engine.port.load(1, [0], [1], answers)
    held.wait_reached()
    engine.port.offload(2, [0], [1], answers)  # device 0 and staging 1: neither is touched by the load
    assert answers.wait(2) == {2: True}
    held.open()
    answers.wait(1)
    engine.port.close()


def reuse_on_ack(faults: CopyFaults) -> tuple[list[bytes], list[bytes]]:
    """The next owner overwrites staging pages as soon as the load is answered; returns (staged, found) bytes."""
    engine = make(faults)
    staging, _ = engine.fill(random.Random(4))
    answers = Answers()

    def next_owner(op: int, ok: bool) -> None:
        engine.write_staging([0, 1], [ZEROS, ZEROS])
        answers(op, ok)

    engine.port.load(1, [0, 1], [3, 5], next_owner)
    assert answers.wait(1) == {1: True}
    engine.port.close()
    assert len(answers.calls) == 1
    return staging[:2], engine.read_device([3, 5])


def test_bc_023_an_answer_comes_after_the_last_read_of_staging() -> None:
    staged, found = reuse_on_ack(CopyFaults())
    assert found == staged


def test_bc_023_an_early_answer_shows_as_wrong_bytes() -> None:
    _, found = reuse_on_ack(CopyFaults(early_ack=True))
    assert found == [ZEROS, ZEROS]


def test_a_held_load_is_not_answered_before_its_last_byte(answers: Answers) -> None:
    faults = CopyFaults()
    last_layer = faults.gate(Direction.LOAD, 0, LAYOUT.num_layers - 1)
    engine = make(faults)
    staging, _ = engine.fill(random.Random(5))
    engine.port.load(1, [0], [0], answers)
    last_layer.wait_reached()
    assert answers.calls == []
    assert engine.read_device([0]) != [staging[0]]
    last_layer.open()
    answers.wait(1)
    assert engine.read_device([0]) == [staging[0]]
    engine.port.close()


@pytest.mark.parametrize("held", list(Direction))
def test_a_held_direction_does_not_stop_the_other(held: Direction, answers: Answers) -> None:
    faults = CopyFaults()
    gate = faults.gate(held, 0, 0)
    engine = make(faults)
    staging, device = engine.fill(random.Random(6))
    engine.port.load(1, [0], [0], answers)
    engine.port.offload(2, [1], [1], answers)
    gate.wait_reached()
    free = 2 if held is Direction.LOAD else 1
    assert answers.wait(free) == {free: True}
    gate.open()
    answers.wait(1, 2)
    assert (engine.read_device([0]), engine.read_staging([1])) == ([staging[0]], [device[1]])
    engine.port.close()


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────


def test_reordered_copies_are_answered_out_of_order_with_right_bytes(answers: Answers) -> None:
    faults = CopyFaults(reorder_probability=1.0)
    gate = faults.gate(Direction.OFFLOAD, 0, 0)
    engine = make(faults)
    _, device = engine.fill(random.Random(7))
    for op in range(4):
        engine.port.offload(op, [op], [op], answers)
        gate.wait_reached()
    gate.open()
    answers.wait(*range(4))
    assert [op for op, _ in answers.calls] == [0, 2, 1, 3], "each is passed once at most"
    assert engine.read_staging(range(4)) == device[:4]
    engine.port.close()


def test_copies_of_one_target_are_never_reordered(answers: Answers) -> None:
    faults = CopyFaults(reorder_probability=1.0)
    gate = faults.gate(Direction.OFFLOAD, 0, 0)
    engine = make(faults)
    _, device = engine.fill(random.Random(8))
    for op in range(3):
        engine.port.offload(op, [op], [11], answers)
        gate.wait_reached()
    gate.open()
    answers.wait(0, 1, 2)
    assert [op for op, _ in answers.calls] == [0, 1, 2]
    assert engine.read_staging([11]) == [device[2]]
    engine.port.close()


@pytest.mark.parametrize("at_layer", [0, 2, LAYOUT.num_layers])
def test_a_failed_load_is_answered_raised_and_passed_by(at_layer: int, answers: Answers) -> None:
    engine = make(CopyFaults(fail_loads=frozenset({1}), fail_at_layer=at_layer))
    staging, device = engine.fill(random.Random(9))
    for op in range(3):
        engine.port.load(op, [op], [op], answers)
    assert answers.wait(0, 1, 2) == {0: True, 1: False, 2: True}
    with pytest.raises(LoadFailed, match="load 1"):
        engine.port.layer_ready(1, 0)
    engine.port.layer_ready(0, 3)
    page = engine.read_device([1])[0]
    expected = [staging[1] if layer < at_layer else device[1] for layer in range(LAYOUT.num_layers)]
    assert page == b"".join(engine.slab_of(source, layer) for layer, source in enumerate(expected))
    assert engine.read_device([0, 2]) == [staging[0], staging[2]]
    engine.port.close()


def test_a_waiter_inside_is_told_of_the_failure(answers: Answers) -> None:
    faults = CopyFaults(fail_loads=frozenset({0}), fail_at_layer=2)
    gate = faults.gate(Direction.LOAD, 0, 2)
    engine = make(faults)
    caught: list[BaseException] = []

    def forward() -> None:
        try:
            for layer in range(LAYOUT.num_layers):
                engine.port.layer_ready(1, layer)
        except LoadFailed as error:
            caught.append(error)

    engine.port.load(1, [0], [0], answers)
    gate.wait_reached()
    model = threading.Thread(target=forward)
    model.start()
    gate.open()
    model.join(ANSWER_LIMIT_S)
    assert len(caught) == 1
    assert answers.wait(1) == {1: False}
    engine.port.close()


def test_a_failed_offload_leaves_the_rest_alone(answers: Answers) -> None:
    engine = make(CopyFaults(fail_offloads=frozenset({0})))
    staging, device = engine.fill(random.Random(10))
    engine.port.offload(1, [0], [0], answers)
    engine.port.offload(2, [1], [1], answers)
    assert answers.wait(1, 2) == {1: False, 2: True}
    assert engine.read_staging([0, 1]) == [staging[0], device[1]]
    engine.port.close()


def test_a_copy_that_raises_is_answered_and_raised_at_close(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    from hicache_gpu.copy_plan import Mover

    engine = make()
    real = Mover.copy

    def broken(self: Mover, plan: object, layer: int) -> None:
        raise MemoryError("no scratch")

    monkeypatch.setattr(Mover, "copy", broken)
    engine.port.load(1, [0], [0], answers)
    assert answers.wait(1) == {1: False}
    monkeypatch.setattr(Mover, "copy", real)
    engine.port.load(2, [0], [0], answers)
    assert answers.wait(1, 2) == {1: False, 2: True}
    with pytest.raises(StagingError, match="no scratch"):
        engine.port.close()


def test_random_failures_depend_on_the_seed_and_not_on_threads() -> None:
    def verdicts(seed: int) -> dict[int, bool]:
        answers = Answers()
        engine = make(CopyFaults(seed=seed, fail_probability=0.5))
        for op in range(40):
            if op % 2:
                engine.port.load(op, [0], [0], answers)
            else:
                engine.port.offload(op, [1], [1], answers)
        result = answers.wait(*range(40))
        engine.port.close()
        return result

    first = verdicts(3)
    assert verdicts(3) == first
    assert verdicts(4) != first
    assert {True, False} == set(first.values())


def test_a_short_copy_shows_as_wrong_bytes(answers: Answers) -> None:
    engine = make(CopyFaults(short_copy=True))
    staging, device = engine.fill(random.Random(11))
    engine.port.load(1, [0, 1], [4, 5], answers)
    assert answers.wait(1) == {1: True}
    assert engine.read_device([4, 5]) == [staging[0], device[5]]
    engine.port.close()


def test_a_skipped_layer_wait_shows_as_wrong_bytes(answers: Answers) -> None:
    faults = CopyFaults(skip_layer_wait=True)
    gate = faults.gate(Direction.LOAD, 0, 0)
    engine = make(faults)
    _, device = engine.fill(random.Random(12))
    engine.port.load(1, [0], [0], answers)
    gate.wait_reached()
    engine.port.layer_ready(1, 3)
    assert engine.read_device([0]) == [device[0]]
    gate.open()
    answers.wait(1)
    engine.port.close()


def test_delays_change_no_byte(answers: Answers) -> None:
    engine = make(CopyFaults(layer_delay_s=0.001))
    staging, _ = engine.fill(random.Random(13))
    engine.port.load(1, [0], [0], answers)
    engine.port.layer_ready(1, 3)
    assert engine.read_device([0]) == [staging[0]]
    engine.port.close()
    assert answers.calls == [(1, True)]


@pytest.mark.parametrize(
    "wrong", [{"fail_probability": 1.5}, {"reorder_probability": -0.1}, {"layer_delay_s": -1.0}, {"fail_at_layer": -1}]
)
def test_faults_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CopyFaults(**wrong)  # type: ignore[arg-type]


# ── end ──────────────────────────────────────────────────────────────────────────────────────────────


def test_close_ends_the_running_copy_and_fails_the_queued_ones(answers: Answers) -> None:
    faults = CopyFaults()
    gate = faults.gate(Direction.LOAD, 0, 2)
    engine = make(faults)
    staging, device = engine.fill(random.Random(14))
    engine.port.load(1, [0], [0], answers)
    gate.wait_reached()
    engine.port.load(2, [1], [1], answers)
    engine.port.offload(3, [0], [5], answers)  # behind load 1, which writes its source
    closer = threading.Thread(target=engine.port.close)
    closer.start()
    assert answers.wait(3) == {3: False}  # so closing has begun
    gate.open()
    closer.join(ANSWER_LIMIT_S)
    assert answers.wait(1, 2, 3) == {1: True, 2: False, 3: False}
    assert engine.read_device([0, 1]) == [staging[0], device[1]]


def test_close_wakes_a_waiter_of_a_queued_load(answers: Answers) -> None:
    faults = CopyFaults()
    gate = faults.gate(Direction.LOAD, 0, 0)
    engine = make(faults)
    caught: list[str] = []
    engine.port.load(1, [0], [0], answers)
    gate.wait_reached()
    engine.port.load(2, [1], [1], answers)
    engine.port.offload(3, [0], [5], answers)  # behind load 1, so only closing answers it now

    def forward() -> None:
        try:
            engine.port.layer_ready(2, 0)
        except LoadFailed as error:
            caught.append(str(error))

    model = threading.Thread(target=forward)
    model.start()
    closer = threading.Thread(target=engine.port.close)
    closer.start()
    answers.wait(3)
    gate.open()
    for thread in (model, closer):
        thread.join(ANSWER_LIMIT_S)
        assert not thread.is_alive()
    assert answers.wait(1, 2, 3) == {1: True, 2: False, 3: False}
    assert len(caught) == 1
    assert "load 2" in caught[0]


def test_close_names_a_stuck_thread_and_can_be_repeated(answers: Answers) -> None:
    faults = CopyFaults()
    gate = faults.gate(Direction.OFFLOAD, 0, 1)
    engine = make(faults, wait_limit_s=0.05)
    engine.port.offload(7, [0], [0], answers)
    gate.wait_reached()
    with pytest.raises(StagingError, match=r"hicache-offload did not end, unanswered: \[7\]"):
        engine.port.close()
    gate.open()
    answers.wait(7)
    under = engine.port
    assert isinstance(under, CpuEngine)
    for thread in under._threads:
        thread.join(ANSWER_LIMIT_S)
    engine.port.close()
    assert answers.calls == [(7, True)]


def test_close_from_a_callback_is_refused(answers: Answers) -> None:
    engine = make()
    caught: list[str] = []

    def close_inside(op: int, ok: bool) -> None:
        try:
            engine.port.close()
        except StagingError as error:
            caught.append(str(error))
        answers(op, ok)

    engine.port.load(1, [0], [0], close_inside)
    answers.wait(1)
    assert len(caught) == 1
    assert "callback" in caught[0]
    engine.port.close()


def test_ended_operations_are_forgotten_and_failures_kept_within_bounds(answers: Answers) -> None:
    count = MAX_FAILED_KEPT + 10
    with CpuEngine(KVLayout(1, 8, 1), 2, 2, faults=CopyFaults(fail_loads=frozenset(range(count)))) as engine:
        for op in range(count):
            engine.load(op, [0], [0], answers)
        engine.load(count, [0], [0], answers)
        engine.offload(count + 1, [0], [0], answers)
        answers.wait(count - 1, count, count + 1)
        with pytest.raises(LoadFailed):
            engine.layer_ready(count - 1, 0)
        assert len(engine._failed) == MAX_FAILED_KEPT
        assert (engine._live, engine._loads.unfinished, engine._offloads.unfinished) == ({}, {}, {})


def test_a_chain_of_collisions_keeps_no_ended_operation_alive(answers: Answers) -> None:
    faults = CopyFaults()
    gate = faults.gate(Direction.LOAD, 1, 0)
    engine = CpuEngine(LAYOUT, PAGES, PAGES, faults=faults)
    engine.load(0, [0], [0], answers)
    engine.offload(1, [0], [0], answers)
    engine.load(2, [0], [0], answers)
    gate.wait_reached()
    assert engine._live[2].after == []
    gate.open()
    engine.close()
