"""Imports run down the layers, and the core can be loaded without torch, threads or a clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import layers

PLANTED = {
    "upward": ("hicache_fsm/tree/a.py", "from hicache_fsm.control import plane", "control is a lower layer than tree"),
    "upward in a function": (
        "hicache_fsm/pools/a.py",
        "def f():\n    import hicache_fsm.scheduler.loop",
        "scheduler is a lower layer than pools",
    ),
    "upward for types only": (
        "hicache_fsm/ports.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hicache_fsm.tree.keys import Key",
        "tree is a lower layer than ports",
    ),
    "upward, relative": ("hicache_fsm/tree/a.py", "from ..runtime import shell", "runtime is a lower layer than tree"),
    "errors know nothing": ("hicache_fsm/errors.py", "import hicache_fsm.ports", "ports is a lower layer than errors"),
    "torch in the core": ("hicache_fsm/components/full.py", "import torch", "the core is deterministic"),
    "clock in the core": ("hicache_fsm/control/plane.py", "import time", "the core is deterministic"),
    "threads in the core": ("hicache_fsm/prefetch/a.py", "from threading import Lock", "the core is deterministic"),
    "randomness in the core": ("hicache_fsm/scheduler/a.py", "import random", "the core is deterministic"),
    "files in the core": ("hicache_fsm/admission/a.py", "with open('x') as f:\n    pass", "no IO in the core"),
    "the data plane in the core": ("hicache_fsm/backup/a.py", "import hicache_gpu.arena", "the core is deterministic"),
    "a tool in the core": (
        "hicache_fsm/control/plane.py",
        "from hicache_fsm.lifecycle.twin import build_twin",
        "a tool (executable reference for tests, built on transitions)",
    ),
    "heavy root": ("hicache_fsm/__init__.py", "from hicache_fsm.runtime import shell", "the root must stay light"),
    "root from within": ("hicache_fsm/tree/a.py", "import hicache_fsm", "the root is the face of the library"),
    "unknown layer": ("hicache_fsm/utils/a.py", "import hicache_fsm.errors", "utils has no place in the layers"),
    "core from the data plane": (
        "gpu/hicache_gpu/a.py",
        "from hicache_fsm.config import CacheConfig",
        "hicache_gpu may import hicache_fsm.errors and hicache_fsm.ports only",
    ),
}

ALLOWED = {
    "downward": ("hicache_fsm/control/plane.py", "from hicache_fsm.tree import keys\nimport heapq, numpy"),
    "within a layer": ("hicache_fsm/tree/a.py", "from . import keys\nfrom .keys import Key"),
    "torch in the shell": ("hicache_fsm/runtime/a.py", "import torch, threading, hicache_gpu.arena"),
    "lazy root": ("hicache_fsm/__init__.py", "def __getattr__(name):\n    from hicache_fsm.runtime import shell"),
    "ports in the data plane": ("gpu/hicache_gpu/a.py", "import torch\nfrom hicache_fsm.ports import Load"),
}


def plant(root: Path, name: str, text: str) -> list[str]:
    for known in ("hicache_fsm/tree/keys.py", "hicache_fsm/lifecycle/twin.py", name):
        path = root / known
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if known == name else "")
    return layers.violations(root)


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_breach_is_found(case: str, tmp_path: Path) -> None:
    name, text, reason = PLANTED[case]
    found = plant(tmp_path, name, text)
    assert len(found) == 1, found
    assert found[0].startswith(f"{name}:")
    assert reason in found[0]


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_allowed_passes(case: str, tmp_path: Path) -> None:
    assert plant(tmp_path, *ALLOWED[case]) == []


def test_the_repository_keeps_its_layers() -> None:
    assert layers.sources(layers.ROOT), "the check looks at no file"
    assert layers.violations(layers.ROOT) == []


def test_exemptions_name_modules_that_exist() -> None:
    known = {layers.module_name(path, layers.ROOT) for path in layers.sources(layers.ROOT)}
    assert set(layers.DERIVED_TOOLS) <= known


def test_the_core_loads_without_heavy_modules() -> None:
    modules = [layers.module_name(path, layers.ROOT) for path in layers.sources(layers.ROOT)]
    core = [module for module in modules if layers.is_core(module)]
    assert "hicache_fsm.scheduler" in core
    script = (
        f"import importlib, sys\nfor module in {core!r}: importlib.import_module(module)\n"
        "heavy = {'torch', 'transitions', 'graphviz', 'rich', 'hypothesis', 'hicache_gpu', 'hicache_fsm.runtime'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=layers.ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
