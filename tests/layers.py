"""Checks which module may import which: `python -m tests.layers` from the root of the repository.

    1. Imports run down the list `LAYERS`, never up. Imports inside functions and under TYPE_CHECKING count.
    2. The core, down to `scheduler`, is deterministic: of the standard library it may import `CORE_STDLIB` only, of
       other libraries `CORE_LIBRARIES`, and it uses no `FORBIDDEN_BUILTINS`. `DERIVED_TOOLS` are exempt, and the rest
       of the core must not import them.
    3. `hicache_gpu` knows the ports and the exceptions of `hicache_fsm`, and the core does not know `hicache_gpu`.
    4. Packages are entered lightly: an `__init__` at the root imports nothing of the package when it is loaded.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

LAYERS = (
    "errors",
    "config",
    "ports",
    "lifecycle",
    "tree",
    "pools",
    "components",
    "prefetch",
    "backup",
    "control",
    "admission",
    "scheduler",
    # Above this line: deterministic, no torch, no IO, no clock, no threads.
    "storage",
    "runtime",
    "observe",
    "testing",
    "replay",
    "cli",
)
CORE = LAYERS[: LAYERS.index("storage")]

# `sys` is there for `sys.byteorder`.
CORE_STDLIB = frozenset({
    "__future__", "abc", "array", "bisect", "collections", "copy", "dataclasses", "enum", "functools", "hashlib",
    "heapq", "itertools", "json", "math", "operator", "string", "struct", "sys", "textwrap", "types", "typing",
})
CORE_LIBRARIES = {"numpy": "byte order and vector arithmetic of page keys; it keeps no state"}
DERIVED_TOOLS = {
    "hicache_fsm.lifecycle.twin": "executable reference for tests, built on transitions",
    "hicache_fsm.lifecycle.picture": "draws diagrams with transitions and Graphviz",
    "hicache_fsm.lifecycle.render_cli": "the render command: reads options, writes a file",
    "hicache_fsm.lifecycle.derive": "regenerates and compares documents",
    "hicache_fsm.lifecycle.diagrams": "loads picture when a picture is asked for",
}
FORBIDDEN_BUILTINS = frozenset({"breakpoint", "input", "open", "print"})
GPU_MAY_IMPORT = ("hicache_fsm.errors", "hicache_fsm.ports")


class Import(NamedTuple):
    """One imported module."""

    module: str
    line: int
    lazy: bool  # inside a function


def module_name(path: Path, base: Path) -> str:
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, base: Path, known: frozenset[str]) -> Iterator[Import]:
    """What a file imports; `from package import name` counts as the module `package.name` if there is one."""
    package = module_name(path, base).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf-8"), str(path)), False)]
    while pending:
        node, lazy = pending.pop()
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        pending += [(child, lazy) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                yield Import(full if full in known else origin, node.lineno, lazy)


def violations(root: Path) -> list[str]:
    """All breaches below `root`, one line each with file, line and rule."""
    files = [(path, base) for base in (root, root / "gpu") for path in sources(base)]
    known = frozenset(module_name(path, base) for path, base in files)
    out = []
    for path, base in files:
        module = module_name(path, base)
        for imported in imports_of(path, base, known):
            fault = judge(module, imported)
            if fault:
                out.append(f"{path.relative_to(root)}:{imported.line}: {module} imports {imported.module}: {fault}")
        if is_core(module):
            where = path.relative_to(root)
            out += [f"{where}:{line}: {module} uses {name}: no IO in the core" for name, line in io_of(path)]
    return sorted(out)


def is_core(module: str) -> bool:
    parts = module.split(".")
    return parts[0] == "hicache_fsm" and len(parts) > 1 and parts[1] in CORE and module not in DERIVED_TOOLS


def io_of(path: Path) -> list[tuple[str, int]]:
    """Uses of built-in functions that do IO."""
    names = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name))
    return [(name.id, name.lineno) for name in names if name.id in FORBIDDEN_BUILTINS]


def sources(base: Path) -> list[Path]:
    return sorted(path for package in ("hicache_fsm", "hicache_gpu") for path in (base / package).rglob("*.py"))


def judge(module: str, imported: Import) -> str:
    """Why `module` must not import that, or nothing."""
    own, other = module.split("."), imported.module.split(".")
    if own[0] == "hicache_gpu":
        allowed = other[0] != "hicache_fsm" or imported.module in GPU_MAY_IMPORT
        return "" if allowed else f"hicache_gpu may import {' and '.join(GPU_MAY_IMPORT)} only"
    if len(own) == 1:
        return "" if imported.lazy or other[0] not in ("hicache_fsm", "hicache_gpu") else "the root must stay light"
    if own[1] not in LAYERS:
        return f"{own[1]} has no place in the layers {', '.join(LAYERS)}"
    if other[0] == "hicache_fsm":
        return _judge_inside(module, own[1], imported.module, other)
    return _judge_outside(module, other[0])


def _judge_inside(module: str, layer: str, target: str, other: list[str]) -> str:
    if len(other) == 1:
        return "the root is the face of the library, not a part of it" if layer in CORE else ""
    if other[1] not in LAYERS:
        return f"{other[1]} has no place in the layers {', '.join(LAYERS)}"
    if LAYERS.index(other[1]) > LAYERS.index(layer):
        return f"{other[1]} is a lower layer than {layer}; imports go down the list only"
    if target in DERIVED_TOOLS and is_core(module):
        return f"a tool ({DERIVED_TOOLS[target]}), which is no part of the core"
    return ""


def _judge_outside(module: str, library: str) -> str:
    if not is_core(module) or library in CORE_STDLIB or library in CORE_LIBRARIES:
        return ""
    allowed = ", ".join(sorted({*CORE_STDLIB, *CORE_LIBRARIES}))
    return f"the core is deterministic; of other modules it may import only {allowed}"


def main() -> int:
    faults = violations(ROOT)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
