"""The data plane of the staging port: a host staging arena, the device pool, and the copies between them.

`CpuEngine` implements it with two copy threads. Everything that allocates tensors is imported on first use,
because importing torch takes about two seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_gpu.faults import CopyFaults, Gate
from hicache_gpu.interface import CopyEngine, Direction
from hicache_gpu.layout import POISON_BYTE, KVLayout

if TYPE_CHECKING:
    from hicache_gpu.arena import StagingArena
    from hicache_gpu.cpu_engine import CpuEngine
    from hicache_gpu.device_pool import DevicePool

__all__ = [
    "POISON_BYTE",
    "CopyEngine",
    "CopyFaults",
    "CpuEngine",
    "DevicePool",
    "Direction",
    "Gate",
    "KVLayout",
    "StagingArena",
]

_LAZY = {
    "CpuEngine": "hicache_gpu.cpu_engine",
    "DevicePool": "hicache_gpu.device_pool",
    "StagingArena": "hicache_gpu.arena",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(module), name)
