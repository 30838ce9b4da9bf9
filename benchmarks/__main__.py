"""Run every benchmark: `python -m benchmarks [--only NAME] [--json FILE]`.

A benchmark is a module `bench_NAME` of this package with `run() -> dict[str, float]`; a unit stands at the end of
each result's name. A benchmark that raises is reported and fails the run, the others still run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import benchmarks

PREFIX = "bench_"


def names() -> list[str]:
    modules = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name.removeprefix(PREFIX) for name in modules if name.startswith(PREFIX))


def measure(name: str) -> dict[str, float] | None:
    """Results of one benchmark; None, with the traceback on standard error, if it failed."""
    try:
        results: dict[str, float] = importlib.import_module(f"benchmarks.{PREFIX}{name}").run()
    except Exception:  # whatever it is, it is shown, and the exit code says that something failed
        traceback.print_exc()
        return None
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=names(), metavar="NAME", help=f"one of {', '.join(names())}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    args = parser.parse_args(arguments)
    measured = {}
    for name in args.only or names():
        results = measured[name] = measure(name)
        print(f"{name}{'' if results is not None else ': failed'}")
        for key, value in (results or {}).items():
            print(f"    {key:<44} {value:>14,.3f}", flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    return 1 if None in measured.values() else 0


if __name__ == "__main__":
    sys.exit(main())
