"""Where bytes lie, how copies are planned, and what the package imports."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hicache_gpu
from hicache_fsm.errors import ConfigError, StagingError
from hicache_gpu import POISON_BYTE, CopyFaults, CpuEngine, DevicePool, KVLayout, StagingArena
from hicache_gpu.copy_plan import MIN_RUN_BYTES, SCRATCH_BYTES, CopyPlan, Method, Mover, make_plan, page_ids

LAYOUT = KVLayout(num_layers=3, bytes_per_token_per_layer=6, page_size=4)


def test_sizes_add_up() -> None:
    assert (LAYOUT.token_bytes, LAYOUT.slab_bytes, LAYOUT.page_bytes) == (18, 24, 72)
    assert [LAYOUT.slab_of(layer) for layer in range(3)] == [slice(0, 24), slice(24, 48), slice(48, 72)]


@pytest.mark.parametrize("name", ["num_layers", "bytes_per_token_per_layer", "page_size"])
def test_empty_layouts_are_refused(name: str) -> None:
    sizes = {"num_layers": 3, "bytes_per_token_per_layer": 6, "page_size": 4, name: 0}
    with pytest.raises(ConfigError, match=name):
        KVLayout(**sizes)


def test_bytes_lie_as_the_picture_says() -> None:
    """Byte (page, layer, token, i) of staging lands in row `page * page_size + token` of that layer's tensor."""
    with CpuEngine(LAYOUT, 2, 3) as engine:
        content = np.arange(72, dtype=np.uint8)
        engine.staging_views([1])[0][:] = content.tobytes()
        engine.load(1, [1], [2], lambda op, ok: None)
        for layer in range(3):
            engine.layer_ready(1, layer)
            for token in range(4):
                start = (layer * 4 + token) * 6
                row = engine.device.layer_rows(layer)[2 * 4 + token]
                assert row.tolist() == list(range(start, start + 6))


# ── arena and device pool ────────────────────────────────────────────────────────────────────────────


def test_arena_views_are_writable_windows_of_whole_pages() -> None:
    arena = StagingArena(LAYOUT, 4)
    assert not arena.pinned
    views = arena.views([3, 0])
    assert [len(view) for view in views] == [72, 72]
    views[0][:] = bytes(range(72))
    assert arena.tensor[3].tolist() == list(range(72))
    assert arena.layer_slabs(1)[3].tolist() == list(range(24, 48))


def test_fresh_pools_hold_poison_and_no_number() -> None:
    arena, device = StagingArena(LAYOUT, 2), DevicePool(LAYOUT, 2)
    assert set(arena.tensor.flatten().tolist()) == {POISON_BYTE}
    for layer in range(3):
        assert (device.layer_rows(layer) == POISON_BYTE).all()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        assert torch.full((4,), POISON_BYTE, dtype=torch.uint8).view(dtype).float().isnan().all(), dtype


def test_device_rows_share_memory_and_gathered_rows_do_not() -> None:
    device = DevicePool(LAYOUT, 3)
    device.layer_rows(1)[4:8] = 5
    assert (device.layers[1][4:8] == 5).all()
    copy = device.gather(1, [1, 0])
    assert copy.tolist() == [[5] * 6] * 4 + [[POISON_BYTE] * 6] * 4
    device.poison([1])
    assert (copy[:4] == 5).all()
    assert (device.layer_rows(1) == POISON_BYTE).all()


@pytest.mark.parametrize("pages", [[-1], [4], [0, 9]])
def test_unknown_pages_are_refused(pages: list[int]) -> None:
    arena, device = StagingArena(LAYOUT, 4), DevicePool(LAYOUT, 4)
    for call in (arena.views, arena.poison, device.poison, lambda ids: device.gather(0, ids)):
        with pytest.raises(StagingError, match="pages 0 to 3"):
            call(pages)


def test_empty_pools_are_refused() -> None:
    for pool in (StagingArena, DevicePool):
        with pytest.raises(StagingError, match="at least one page"):
            pool(LAYOUT, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinned memory can be had here")
def test_pinned_memory_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(StagingError, match="pin=False"):
        StagingArena(LAYOUT, 2, pin=True)


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────


def plan(sources: list[int], targets: list[int], slab_bytes: int, num_pages: int = 12) -> CopyPlan:
    return make_plan(page_ids(sources, num_pages, "source"), page_ids(targets, num_pages, "target"), slab_bytes)


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    slab_bytes = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 24, 48, MIN_RUN_BYTES // 2, MIN_RUN_BYTES]))
    targets = draw(st.lists(st.integers(0, 11), unique=True, max_size=12))
    shifted = st.integers(0, 11).map(lambda shift: [(page + shift) % 12 for page in targets])
    anywhere = st.lists(st.integers(0, 11), min_size=len(targets), max_size=len(targets))
    return draw(st.one_of(shifted, anywhere)), targets, slab_bytes


@settings(deadline=None, max_examples=200)
@given(copy=copies(), seed=st.integers(0, 1000))
def test_a_plan_moves_the_bytes_it_was_asked_to(copy: tuple[list[int], list[int], int], seed: int) -> None:
    sources, targets, slab_bytes = copy
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, (12, 2, slab_bytes), dtype=np.uint8)
    target = rng.integers(0, 256, (12, slab_bytes), dtype=np.uint8)
    expected = target.copy()
    expected[targets] = source[sources, 1]
    layers = torch.from_numpy(source)
    mover = Mover(
        [layers[:, 0], layers[:, 1]], [torch.zeros(12, slab_bytes, dtype=torch.uint8), torch.from_numpy(target)]
    )
    mover.copy(plan(sources, targets, slab_bytes), 1)
    assert (target == expected).all()


@pytest.mark.parametrize(
    ("sources", "targets", "slab_bytes", "method"),
    [
        ([4, 5, 6], [1, 2, 3], 16, Method.RUNS),
        ([6, 4, 5], [3, 1, 2], 16, Method.RUNS),  # the same run in another order
        ([4, 9, 5], [1, 2, 3], 16, Method.GATHER),
        ([4, 5, 6], [1, 7, 9], 16, Method.SCATTER),
        ([4, 9, 5], [1, 7, 3], 16, Method.INDEXED),
        ([4, 9, 5], [1, 7, 3], MIN_RUN_BYTES, Method.RUNS),
        ([], [], 16, Method.RUNS),
    ],
)
def test_the_method_follows_the_runs(sources: list[int], targets: list[int], slab_bytes: int, method: Method) -> None:
    assert plan(sources, targets, slab_bytes).method is method


def test_a_copy_by_index_larger_than_its_scratch_buffer_is_whole() -> None:
    slab_bytes = 4096
    pages = 3 * SCRATCH_BYTES // slab_bytes
    rng = random.Random(0)
    sources, targets = rng.sample(range(pages), pages // 2), rng.sample(range(pages), pages // 2)
    source = torch.arange(pages * slab_bytes // 8, dtype=torch.int64).view(torch.uint8).view(pages, slab_bytes)
    target = torch.zeros_like(source)
    by_index = plan(sources, targets, slab_bytes, pages)
    assert by_index.method is Method.INDEXED
    assert len(by_index.chunks) == 2
    Mover([source], [target]).copy(by_index, 0)
    expected = torch.zeros_like(source)
    expected[targets] = source[sources]
    assert torch.equal(target, expected)


def test_plans_that_depend_on_order_are_refused() -> None:
    with pytest.raises(StagingError, match=r"\[3\] are named more than once"):
        plan([0, 1, 2], [3, 5, 3], 16)
    with pytest.raises(StagingError, match="2 source pages for 1 target"):
        plan([0, 1], [3], 16)


# ── the package ──────────────────────────────────────────────────────────────────────────────────────


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import hicache_gpu, sys; hicache_gpu.CopyFaults(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_every_exported_name_exists() -> None:
    assert all(getattr(hicache_gpu, name) is not None for name in hicache_gpu.__all__)
    assert CopyFaults is hicache_gpu.CopyFaults
    with pytest.raises(AttributeError, match="nothing_here"):
        hicache_gpu.nothing_here  # noqa: B018


def test_the_data_plane_knows_only_ports_and_errors() -> None:
    files = sorted(Path(hicache_gpu.__file__).parent.glob("**/*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            ours = {name for name in names if name.split(".")[0] == "hicache_fsm"}
            assert ours <= {"hicache_fsm.ports", "hicache_fsm.errors"}, (file.name, ours)
