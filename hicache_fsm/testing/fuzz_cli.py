"""`hicache-fsm fuzz`: a randomized campaign against the control plane, until the time is up or something fails.

Exit status: 0 if nothing failed, 1 on a failure, 2 if Hypothesis is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_fsm.testing.fuzz import Campaign, Fault


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} minutes; it takes a number from 0 on")
    return value


def add_fuzz_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `fuzz`."""
    parser.add_argument("--minutes", type=_minutes, default=1.0, metavar="N", help="how long (default: 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="all choices follow from it (default: 0)")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="steps of each case (default: 50)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run_fuzz(args: argparse.Namespace) -> int:
    """Run a campaign and report; the exit status."""
    try:
        from hicache_fsm.testing.fuzz import campaign  # Hypothesis is an extra
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        print("hicache-fsm fuzz: Hypothesis is not installed: pip install 'hicache-fsm[testing]'", file=sys.stderr)
        return 2
    done = campaign(args.seed, args.minutes * 60, steps=args.steps)
    if args.json is not None:
        args.json.write_text(json.dumps(figures(done), indent=2) + "\n", encoding="utf-8")
    print(report(done))
    return 0 if done.fault is None else 1


def figures(done: Campaign) -> dict[str, Any]:
    """Everything in a form that JSON can hold."""
    from hicache_fsm.testing.fuzz import PAIRS, ROWS

    fault = done.fault
    return {
        "seed": done.seed,
        "seconds": round(done.seconds, 3),
        "rounds": done.rounds,
        "cases": done.cases,
        "steps": done.steps,
        "rows": {"fired": len(done.rows), "of": ROWS},
        "pairs": {"fired": len(done.pairs), "fitting": PAIRS},
        "failure": fault and {"seed": fault.round_seed, "error": fault.error, "scenario": fault.scenario},
    }


def report(done: Campaign) -> str:
    """Lines for a terminal."""
    shown = figures(done)
    rows, pairs = shown["rows"], shown["pairs"]
    counted = (
        f"seed {done.seed}: {done.cases} cases, {done.steps} steps in {done.seconds:.1f} s; {rows['fired']} of "
        f"{rows['of']} rows of the request table, {pairs['fired']} pairs of rows ({pairs['fitting']} fit together)"
    )
    return counted if done.fault is None else f"{counted}\n{_failure(done, done.fault)}"


def _failure(done: Campaign, fault: Fault) -> str:
    again = "run it with: hicache-fsm run-scenario FILE"
    if not fault.replays:
        again = "the scenario alone does not fail: what failed is an assertion of the machine"
    return (
        f"FAILED in round {done.rounds} (seed {fault.round_seed})\n{fault.error}\n\n"
        f"# {again}\n{fault.scenario}"
    )
