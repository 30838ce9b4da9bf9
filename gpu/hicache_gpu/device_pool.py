"""The device pool on the CPU: one tensor a layer, one row a token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hicache_fsm.errors import StagingError
from hicache_gpu.arena import check_pages
from hicache_gpu.layout import POISON_BYTE, KVLayout


class DevicePool:
    """KV rows of `num_pages` pages. A model reads and writes them through `layer_rows`, without a copy."""

    __slots__ = ("_rows", "layers", "layout", "num_pages")

    def __init__(self, layout: KVLayout, num_pages: int) -> None:
        if num_pages < 1:
            raise StagingError(f"a device pool needs at least one page, not {num_pages}")
        self.layout = layout
        self.num_pages = num_pages
        shape = (num_pages * layout.page_size, layout.bytes_per_token_per_layer)
        self.layers = [torch.full(shape, POISON_BYTE, dtype=torch.uint8) for _ in range(layout.num_layers)]
        self._rows: list[npt.NDArray[np.uint8]] = [tensor.numpy() for tensor in self.layers]

    def layer_rows(self, layer: int) -> npt.NDArray[np.uint8]:
        """`[num_pages * page_size, bytes_per_token_per_layer]`, sharing the pool's memory."""
        assert 0 <= layer < self.layout.num_layers, (layer, self.layout.num_layers)
        return self._rows[layer]

    def gather(self, layer: int, pages: Sequence[int]) -> npt.NDArray[np.uint8]:
        """A copy of the rows of `pages`, in order. Raises `StagingError` on an unknown page."""
        check_pages(pages, self.num_pages, "device")
        slabs = self.layer_rows(layer).reshape(self.num_pages, -1)
        return slabs[list(pages)].reshape(-1, self.layout.bytes_per_token_per_layer)

    def poison(self, pages: Sequence[int]) -> None:
        """Overwrite pages with `POISON_BYTE` in all layers. Raises `StagingError` on an unknown page."""
        check_pages(pages, self.num_pages, "device")
        chosen = list(pages)
        for rows in self._rows:
            rows.reshape(self.num_pages, -1)[chosen] = POISON_BYTE

    def layer_slabs(self, layer: int) -> torch.Tensor:
        """`[num_pages, slab_bytes]`, sharing the pool's memory."""
        return self.layers[layer].view(self.num_pages, self.layout.slab_bytes)
