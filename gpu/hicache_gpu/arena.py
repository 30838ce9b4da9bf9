"""The staging arena: page-first host memory that storage reads and writes in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hicache_fsm.errors import StagingError
from hicache_gpu.layout import POISON_BYTE, KVLayout


def check_pages(pages: Sequence[int], num_pages: int, pool: str) -> None:
    """Raise `StagingError` unless all ids lie in the pool; a negative id would silently name a page from its end."""
    if len(pages) and (min(pages) < 0 or max(pages) >= num_pages):
        bad = [page for page in pages if not 0 <= page < num_pages]
        raise StagingError(f"{pool} pages {bad[:8]} do not exist; the pool has pages 0 to {num_pages - 1}")


class StagingArena:
    """`num_pages` whole pages in one tensor, allocated and touched once so that no copy pays for page faults.

    With `pin`, the memory is page-locked for an accelerator; `StagingError` if that is impossible, because an
    engine that silently copies from pageable memory loses both its overlap and its bandwidth.
    """

    __slots__ = ("_pages", "layout", "num_pages", "pinned", "tensor")

    def __init__(self, layout: KVLayout, num_pages: int, *, pin: bool = False) -> None:
        if num_pages < 1:
            raise StagingError(f"a staging arena needs at least one page, not {num_pages}")
        self.layout = layout
        self.num_pages = num_pages
        self.tensor = _allocate(num_pages, layout.page_bytes, pin)
        self.pinned: bool = pin
        self.tensor.fill_(POISON_BYTE)
        whole = self.tensor.numpy().reshape(-1).data
        size = layout.page_bytes
        self._pages = [whole[page * size : (page + 1) * size] for page in range(num_pages)]

    def views(self, pages: Sequence[int]) -> list[memoryview]:
        """Writable views of whole pages, sharing the arena's memory. Raises `StagingError` on an unknown page."""
        check_pages(pages, self.num_pages, "staging")
        kept = self._pages
        # A fresh slice each: a caller may release its view, and a released cached one would be dead for everyone.
        return [kept[page][:] for page in pages]

    def poison(self, pages: Sequence[int]) -> None:
        """Overwrite pages with `POISON_BYTE`. Raises `StagingError` on an unknown page."""
        check_pages(pages, self.num_pages, "staging")
        self.tensor.numpy()[list(pages)] = POISON_BYTE

    def layer_slabs(self, layer: int) -> torch.Tensor:
        """`[num_pages, slab_bytes]`, a strided view of one layer's slabs."""
        return self.tensor[:, self.layout.slab_of(layer)]


def _allocate(num_pages: int, page_bytes: int, pin: bool) -> torch.Tensor:
    try:
        return torch.empty((num_pages, page_bytes), dtype=torch.uint8, pin_memory=pin)
    except RuntimeError as error:
        kind = "pinned " if pin else ""
        advice = "make an accelerator visible, or ask for pageable memory with pin=False" if pin else "use fewer pages"
        raise StagingError(f"cannot allocate {num_pages * page_bytes} bytes of {kind}staging: {advice}") from error
