"""`hicache-fsm run-scenario FILE...`: run scenario files and say what does not hold.

Exit status: 0 if all hold, 1 if something did not, 2 if a file is no scenario.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_fsm.testing.scenario_play import Play
    from hicache_fsm.testing.scenario_run import CompiledRun, Failure, Step


@dataclass(frozen=True, slots=True)
class Report:
    """What one file gave."""

    file: str
    title: str
    case: str
    runs: int  # variants that were played
    steps: int  # lines in all of them together
    failures: tuple[Failure, ...]


def add_scenario_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `run-scenario`."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="scenario files; see docs/scenarios.md")
    parser.add_argument("--verbose", action="store_true", help="print every step, and where it leaves the requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")


def run_scenario(args: argparse.Namespace) -> int:
    """Run the files; the exit status. All files are read before the first one is run."""
    from hicache_fsm.testing.scenario import load  # building the command's parser needs none of this
    from hicache_fsm.testing.scenario_run import compile_scenario
    from hicache_fsm.testing.scenario_text import ScenarioError

    try:
        compiled = [(path, compile_scenario(load(path))) for path in args.files]
    except ScenarioError as error:
        print(f"hicache-fsm run-scenario: {error}", file=sys.stderr)
        return 2
    reports = [_run_file(path, runs, args.verbose) for path, runs in compiled]
    failed = [report for report in reports if report.failures]
    if args.json is not None:
        args.json.write_text(json.dumps(_figures(reports), indent=2) + "\n", encoding="utf-8")
    print(f"{len(reports)} scenario{'' if len(reports) == 1 else 's'}, {len(failed) or 'none'} failed")
    return 1 if failed else 0


def _run_file(path: Path, runs: list[CompiledRun], verbose: bool) -> Report:
    from hicache_fsm.testing.scenario_run import play

    failures = []
    for run in runs:
        if verbose:
            print(f"--- {path}{f' ({run.variant})' if run.variant else ''}")
        failure = play(run, _show if verbose else None)
        if failure is not None:
            failures.append(failure)
    scenario, steps = runs[0].scenario, sum(len(run.steps) for run in runs)
    many = f", {len(runs)} variants" if len(runs) > 1 else ""
    if failures:
        print(f"FAIL {path}: {len(failures)} of {len(runs)} variants" if many else f"FAIL {path}")
        print(failures[0])
    else:
        print(f"ok   {path}: {steps} steps{many}")
    return Report(str(path), scenario.title, scenario.case, len(runs), steps, tuple(failures))


def _show(step: Step, stage: Play) -> None:
    states = " ".join(f"{a.rid}:{a.state_name}" for a in sorted(stage.sim.plane.parts.attempts, key=lambda a: a.seq))
    print(f"{step.line.number:>4}  {step.line.text:<44} {states}".rstrip())


def _figures(reports: list[Report]) -> dict[str, Any]:
    return {
        "scenarios": [asdict(report) for report in reports],
        "failed": sum(1 for report in reports if report.failures),
    }
