"""`hicache-fsm check`: explore the real control plane exhaustively, within bounds that the options give.

Exit status: 0 if the space was exhausted without a violation, 1 on a violation, 3 if a limit ended the search before.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hicache_fsm.config import PrefetchPolicy
from hicache_fsm.errors import ConfigError
from hicache_fsm.testing.explore_scope import DEFAULT_FAULTS, FAULTS, Scope
from hicache_fsm.testing.explore_world import World, parse_input
from hicache_fsm.testing.explorer import Limits, Result, Violation, explore, replay
from hicache_fsm.testing.script import explored

_DEFAULT = Scope()
_NUMBERS = (
    ("requests", "requests that are submitted, each once"),
    ("pages", "whole pages of each prompt; a page is one token here"),
    ("shared", "leading pages that all prompts share (default: all, so that requests are interchangeable)"),
    ("warm", "leading pages that are on the device and in storage at the start"),
    ("staging", "pages of staging"),
    ("device", "pages of the device pool"),
    ("pins", "tokens that holds may pin"),
    ("retry-cap", "look-ups issued again, per request"),
    ("defer-cap", "refusals after which a hold is dropped"),
    ("park-cap", "chances after which a parked hit recomputes"),
    ("orphans", "operations that may run without an owner when the next is cut off"),
)


def _faults(text: str) -> frozenset[str]:
    names = {"all": frozenset(FAULTS), "none": frozenset[str](), "default": DEFAULT_FAULTS}
    if text in names:
        return names[text]
    chosen = frozenset(text.split(","))
    if chosen - set(FAULTS):
        raise argparse.ArgumentTypeError(
            f"unknown: {', '.join(sorted(chosen - set(FAULTS)))}; known: {', '.join(FAULTS)}, all, none, default"
        )
    return chosen


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `check`."""
    for name, meaning in _NUMBERS:
        default = None if name == "shared" else getattr(_DEFAULT, name.replace("-", "_"))
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=meaning + shown)
    parser.add_argument("--policy", choices=[p.value for p in PrefetchPolicy], default=_DEFAULT.policy.value,
                        help=f"prefetch policy (default: {_DEFAULT.policy.value})")  # fmt: skip
    listed = "; ".join(f"{name}: {meaning}" for name, meaning in FAULTS.items())
    parser.add_argument("--faults", type=_faults, default=DEFAULT_FAULTS, metavar="LIST",
                        help=f"which may happen, by commas, or all, none (default: "
                        f"{','.join(n for n in FAULTS if n in DEFAULT_FAULTS)}). {listed}")  # fmt: skip
    parser.add_argument("--aborts", action=argparse.BooleanOptionalAction, default=_DEFAULT.aborts,
                        help="whether clients abort")  # fmt: skip
    parser.add_argument("--writes", action=argparse.BooleanOptionalAction, default=_DEFAULT.writes,
                        help="whether computed pages are written to storage")  # fmt: skip
    parser.add_argument("--liveness", action=argparse.BooleanOptionalAction, default=True,
                        help="whether fair liveness is checked at the end")  # fmt: skip
    parser.add_argument("--thorough", action="store_true", help="check merged states too; slower")
    parser.add_argument("--time-limit", type=float, default=0.0, metavar="S", help="seconds (default: none)")
    parser.add_argument("--memory-limit", type=int, default=0, metavar="MIB", help="MiB of memory (default: none)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--scenario", type=Path, metavar="FILE",
                        help="write a counterexample there as a scenario for run-scenario")  # fmt: skip
    parser.add_argument("--replay", type=Path, metavar="FILE",
                        help="instead of exploring, run the inputs of this file, one a line")  # fmt: skip


def scope_of(args: argparse.Namespace) -> Scope:
    """The scope that the options ask for. Raises `ConfigError` if it is none."""
    numbers = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name, _ in _NUMBERS}
    if numbers["shared"] is None:
        numbers["shared"] = numbers["pages"]
    return Scope(**numbers, policy=PrefetchPolicy(args.policy), faults=args.faults, aborts=args.aborts,
                 writes=args.writes)  # fmt: skip


def run_check(args: argparse.Namespace) -> int:
    """Explore, or replay, and report; returns the exit status."""
    try:
        scope = scope_of(args)
        if args.replay is not None:
            return _replay(scope, args.replay)
    except (ConfigError, ValueError, OSError) as error:
        print(f"hicache-fsm check: {error}", file=sys.stderr)
        return 2
    limits = Limits(args.time_limit, args.memory_limit, check_merged=args.thorough)
    result: Result[None] = explore(scope, limits, liveness=args.liveness)
    print("\n".join(report(result)))
    if args.json is not None:
        args.json.write_text(json.dumps(figures(result), indent=2) + "\n", encoding="utf-8")
    if result.violations:
        if args.scenario is not None:
            violation = result.violations[0]
            inputs = (*violation.inputs, *violation.cycle)
            args.scenario.write_text(explored(scope, inputs, violation.what[0]), encoding="utf-8")
        return 1
    return 0 if result.exhausted else 3


def figures(result: Result[Any]) -> dict[str, Any]:
    """Everything in a form that JSON can hold."""
    scope = asdict(result.scope)
    scope["policy"], scope["faults"] = result.scope.policy.value, sorted(result.scope.faults)
    return {
        "states": result.states,
        "transitions": result.transitions,
        "depth": result.depth,
        "exhausted": result.exhausted,
        "violations": [
            {"what": list(v.what), "inputs": [str(one) for one in v.inputs], "cycle": [str(one) for one in v.cycle]}
            for v in result.violations
        ],
        "seconds": round(result.seconds, 3),
        "stopped": result.stopped,
        "scope": scope,
    }


def report(result: Result[Any]) -> Iterator[str]:
    """Lines for a terminal."""
    yield f"scope: {result.scope.describe()}"
    for violation in result.violations:
        yield from describe(result.scope, violation)
    ended = "exhausted" if result.exhausted else f"not exhausted ({result.stopped or 'ended at the first violation'})"
    count = len(result.violations)
    yield (
        f"{result.states} states, {result.transitions} transitions, depth {result.depth}: {ended}, "
        f"{count or 'no'} violation{'' if count == 1 else 's'}, {result.seconds:.1f} s"
    )


def describe(scope: Scope, violation: Violation) -> Iterator[str]:
    """A counterexample: what is wrong, and inputs that `--replay` takes, each with what it does."""
    for what in violation.what:
        yield f"VIOLATION {what}"
    yield from _steps(scope, violation)


def _steps(scope: Scope, violation: Violation) -> Iterator[str]:
    inputs = (*violation.inputs, *violation.cycle)
    steps = replay(scope, inputs)
    for number, one in enumerate(inputs):
        if number == len(violation.inputs):
            yield "# from here on again and again:"
        try:
            step = next(steps)
        except Exception as error:
            yield f"{one!s:<24}# raises {type(error).__name__}: {error}"
            return
        yield f"{one!s:<24}# {step.text} -> {' '.join(step.states) or 'nothing lives'}"
    if not violation.cycle:
        yield f"# {len(inputs)} inputs"


def _replay(scope: Scope, path: Path) -> int:
    lines = path.read_text(encoding="utf-8").splitlines()
    inputs = [parse_input(line) for line in lines if line.partition("#")[0].strip()]
    wrong: list[str] = []

    def check(world: World) -> None:
        wrong[:] = world.violations()

    for step in replay(scope, inputs, check):
        print(f"{step.input!s:<24}# {step.text} -> {' '.join(step.states) or 'nothing lives'}")
        if wrong:
            print("\n".join(f"VIOLATION {text}" for text in wrong))
            return 1
    return 0
