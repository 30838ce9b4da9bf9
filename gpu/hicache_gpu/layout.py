"""How the KV bytes of pages lie in host staging and on the device.

Staging is page-first, so that one page is one contiguous piece for the store; the device pool is per layer,
because that is how attention reads it. A *slab* is one layer's part of one page: the unit that a copy moves.

    staging arena   [page][layer][token][bytes]

        page 0                              page 1
        | layer 0  | layer 1  | layer 2  || layer 0  | layer 1  | layer 2  || ...
        |t0 t1 t2 t3|                          ^ slab: page_size * bytes_per_token_per_layer
        |<------------ page_bytes ------->|

    device pool     [layer][page * page_size + token][bytes]

        layer 0   | page 0: t0 t1 t2 t3 | page 1: t0 t1 t2 t3 | ...    one tensor a layer,
        layer 1   | page 0: t0 t1 t2 t3 | page 1: t0 t1 t2 t3 | ...    one row a token
        layer 2   | page 0: t0 t1 t2 t3 | page 1: t0 t1 t2 t3 | ...
"""

from __future__ import annotations

from dataclasses import dataclass

from hicache_fsm.errors import ConfigError

POISON_BYTE = 0xFF
"""Fills fresh and released rows. All ones is a NaN in fp32, bf16, fp16 and both fp8 formats, so a model that
reads a poisoned row cannot mistake it for a result."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Sizes of the KV cache of one rank. `bytes_per_token_per_layer` counts K and V together.

    Raises `ConfigError` if a size is below 1.
    """

    num_layers: int
    bytes_per_token_per_layer: int
    page_size: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "bytes_per_token_per_layer", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.num_layers * self.bytes_per_token_per_layer

    @property
    def slab_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return self.page_size * self.bytes_per_token_per_layer

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.num_layers * self.slab_bytes

    def slab_of(self, layer: int) -> slice:
        """Where the slab of `layer` lies inside a staging page, in bytes."""
        assert 0 <= layer < self.num_layers, (layer, self.num_layers)
        return slice(layer * self.slab_bytes, (layer + 1) * self.slab_bytes)
