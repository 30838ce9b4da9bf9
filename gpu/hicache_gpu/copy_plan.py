"""How one operation moves its slabs: planned once, then applied to every layer.

A copy thread shares the interpreter lock with the scheduler, and each tensor call, a slice too, gives the lock away
and must win it back, which can take a switch interval (5 ms) beside a busy thread. So few large calls beat many small
ones, and everything that does not depend on the layer is computed once, in the caller's thread. Measured with 16 KiB
slabs on two cores, GB/s: one slice 12, gather or scatter in one pass 16, both by index 8, slab by slab 2.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hicache_fsm.errors import StagingError
from hicache_gpu.arena import check_pages

Ids: TypeAlias = npt.NDArray[np.int64]

# A run is copied on its own if the second pass that it saves costs more than its extra call (about 5 us, at
# roughly 15 GB/s), with a margin of two for winning the lock back.
MIN_RUN_BYTES = 128 * 1024
# Bounds the memory of a copy by index; measured no slower than one buffer for the whole operation.
SCRATCH_BYTES = 4 * 1024 * 1024
# Views of the scratch memory that are kept: more than one burst of operations uses.
MAX_BUFFERS = 32
# Tensor indexing moves whole elements, and wide ones three times faster than bytes. Moves keep every bit.
_WIDEST_FIRST = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)


class Method(enum.Enum):
    RUNS = "runs"  # contiguous on both sides: slices
    GATHER = "gather"  # the target is one run: one pass, straight into it
    SCATTER = "scatter"  # the source is one run: one pass, straight out of it
    INDEXED = "indexed"  # scattered on both sides: two passes through a scratch buffer


class Run(NamedTuple):
    source: slice  # of pages
    target: slice


class Chunk(NamedTuple):
    sources: torch.Tensor  # page ids, at most as many as the scratch buffer holds
    targets: torch.Tensor


class CopyPlan(NamedTuple):
    """Holds no reference to the caller's arguments, which may be reused at once. Pages are in target order."""

    method: Method
    runs: tuple[Run, ...]  # RUNS: contiguous on both sides
    sources: torch.Tensor  # page ids
    targets: torch.Tensor
    source_span: slice  # SCATTER: the run of all sources
    target_span: slice  # GATHER: the run of all targets
    chunks: tuple[Chunk, ...]  # INDEXED


def page_ids(pages: Sequence[int], num_pages: int, pool: str) -> Ids:
    """The ids as an array of their own. Raises `StagingError` unless all lie in the pool."""
    ids = np.array(pages, dtype=np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= num_pages):
        check_pages(pages, num_pages, pool)
    return ids


def make_plan(sources: Ids, targets: Ids, slab_bytes: int) -> CopyPlan:
    """Plan the copy of `sources[i]` to `targets[i]`.

    Raises `StagingError` if the lengths differ or a target is named twice: its bytes would depend on the order.
    """
    if len(sources) != len(targets):
        raise StagingError(f"{len(sources)} source pages for {len(targets)} target pages; name one for each")
    order = np.argsort(targets, kind="stable")
    source, target = sources[order], targets[order]  # copies
    steps, source_steps = np.diff(target), np.diff(source)
    if not steps.all():
        twice = sorted(set(target[:-1][steps == 0].tolist()))
        raise StagingError(f"target pages {twice[:8]} are named more than once; copy each page once")
    breaks = np.flatnonzero((steps != 1) | (source_steps != 1)) + 1
    if len(breaks) == 0 or (len(breaks) + 1) * MIN_RUN_BYTES <= len(target) * slab_bytes:
        method = Method.RUNS
    elif bool((steps == 1).all()):
        method = Method.GATHER
    else:
        method = Method.SCATTER if bool((source_steps == 1).all()) else Method.INDEXED
    source_ids, target_ids = torch.from_numpy(source), torch.from_numpy(target)
    return CopyPlan(
        method,
        _runs(source, target, breaks) if method is Method.RUNS else (),
        source_ids,
        target_ids,
        _span(source) if method is Method.SCATTER else slice(0),
        _span(target) if method is Method.GATHER else slice(0),
        _chunks(source_ids, target_ids, slab_bytes) if method is Method.INDEXED else (),
    )


def _span(ids: Ids) -> slice:
    return slice(int(ids[0]), int(ids[0]) + len(ids))


def _runs(source: Ids, target: Ids, breaks: Ids) -> tuple[Run, ...]:
    if len(target) == 0:
        return ()
    bounds = [0, *breaks.tolist(), len(target)]
    return tuple(Run(_span(source[start:end]), _span(target[start:end])) for start, end in pairwise(bounds))


def _scratch_pages(slab_bytes: int) -> int:
    return max(1, SCRATCH_BYTES // slab_bytes)


def _chunks(sources: torch.Tensor, targets: torch.Tensor, slab_bytes: int) -> tuple[Chunk, ...]:
    size = _scratch_pages(slab_bytes)
    starts = range(0, len(sources), size)
    return tuple(Chunk(sources[start : start + size], targets[start : start + size]) for start in starts)


class Mover:
    """Applies plans between two lists of per-layer `[pages, slab_bytes]` tensors. Used by one thread."""

    __slots__ = ("_buffers", "_scratch", "_source_rows", "_sources", "_target_rows", "_targets")

    def __init__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        slab_bytes = sources[0].shape[1]
        element = next(kind for kind in _WIDEST_FIRST if slab_bytes % kind.itemsize == 0)
        self._sources = [tensor.view(element) for tensor in sources]
        self._targets = [tensor.view(element) for tensor in targets]
        # The same memory for slices, which cost no hand-over of the lock in NumPy.
        self._source_rows: list[npt.NDArray[np.uint8]] = [tensor.numpy() for tensor in sources]
        self._target_rows: list[npt.NDArray[np.uint8]] = [tensor.numpy() for tensor in targets]
        self._scratch = torch.empty((_scratch_pages(slab_bytes), slab_bytes), dtype=torch.uint8).view(element)
        self._buffers: dict[int, torch.Tensor] = {}

    def copy(self, plan: CopyPlan, layer: int) -> None:
        """Move all slabs of one layer."""
        source, target = self._sources[layer], self._targets[layer]
        match plan.method:
            case Method.RUNS:
                source_rows, target_rows = self._source_rows[layer], self._target_rows[layer]
                for run in plan.runs:
                    np.copyto(target_rows[run.target], source_rows[run.source])
            case Method.GATHER:
                torch.index_select(source, 0, plan.sources, out=target[plan.target_span])
            case Method.SCATTER:
                target.index_copy_(0, plan.targets, source[plan.source_span])
            case Method.INDEXED:
                for chunk in plan.chunks:
                    buffer = self._buffer(len(chunk.sources))
                    torch.index_select(source, 0, chunk.sources, out=buffer)
                    target.index_copy_(0, chunk.targets, buffer)

    def _buffer(self, pages: int) -> torch.Tensor:
        """The start of the scratch memory; kept, because each layer of an operation asks for the same length."""
        if pages not in self._buffers:
            if len(self._buffers) >= MAX_BUFFERS:
                self._buffers.clear()
            self._buffers[pages] = self._scratch[:pages]
        return self._buffers[pages]
