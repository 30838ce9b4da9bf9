"""The command `hicache-fsm`. Each sub-command lives in the room that it belongs to."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from hicache_fsm.lifecycle.render_cli import add_render_arguments, run_render
from hicache_fsm.observe.validate import add_validate_arguments, run_validate
from hicache_fsm.replay.cli import add_replay_arguments, run_replay
from hicache_fsm.testing.check_cli import add_check_arguments, run_check
from hicache_fsm.testing.fuzz_cli import add_fuzz_arguments, run_fuzz
from hicache_fsm.testing.scenario_cli import add_scenario_arguments, run_scenario

BY_SIGNAL = 128


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hicache-fsm", description="The life of a request between stored KV cache and the device."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    replay = commands.add_parser(
        "replay",
        help="run a workload through cache, store and staging, and verify every byte",
        description="Runs a workload through the control plane, a real store and a real staging layer; compares every "
        "KV row that a request reads with what computing it would have given.",
        epilog="Exit codes: 0 passed; 1 wrong bytes, leaks or requests without an end; 2 refused (options, trace, "
        "store); 130 interrupted, after everything was given back.",
    )
    add_replay_arguments(replay)
    replay.set_defaults(run=run_replay)
    render = commands.add_parser("render", help="draw a lifecycle table", description="Draws a lifecycle table.")
    add_render_arguments(render)
    render.set_defaults(run=run_render)
    scenario = commands.add_parser(
        "run-scenario",
        help="run scenario files: events in, expectations out",
        description="Runs scenario files on the control plane with a simulated outside; all books are recounted and "
        "all bytes compared after every step. The format is described in docs/scenarios.md.",
        epilog="Exit codes: 0 all hold; 1 something does not; 2 a file is no scenario.",
    )
    add_scenario_arguments(scenario)
    scenario.set_defaults(run=run_scenario)
    validate = commands.add_parser(
        "validate",
        help="check the log of a run against the request table",
        description="Replays a transition log (replay --log) against the request table and names the first line that "
        "does not fit.",
        epilog="Exit codes: 0 every line fits; 1 one does not; 2 the file is no whole log.",
    )
    add_validate_arguments(validate)
    validate.set_defaults(run=run_validate)
    check = commands.add_parser(
        "check",
        help="explore every state of the real control plane within bounds",
        description="Explores the real control plane by snapshot, input and restore, breadth first: every invariant "
        "in every state, fair liveness, the shortest counterexample.",
        epilog="Exit codes: 0 exhausted without a violation; 1 a violation; 2 bad bounds; 3 a limit ended the search.",
    )
    add_check_arguments(check)
    check.set_defaults(run=run_check)
    fuzz = commands.add_parser(
        "fuzz",
        help="randomized campaign against the control plane",
        description="Drives the control plane through random acts of schedulers, clients, stores and operators, and "
        "prints a minimal scenario of what fails.",
        epilog="Exit codes: 0 nothing failed; 1 something did; 2 Hypothesis is not installed.",
    )
    add_fuzz_arguments(fuzz)
    fuzz.set_defaults(run=run_fuzz)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("hicache-fsm: interrupted", file=sys.stderr)
        return BY_SIGNAL + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output has gone; without this, Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BY_SIGNAL + signal.SIGPIPE
    return code


class _Version(argparse.Action):
    """Reads the version only when it is asked for: that takes longer than building the parser."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"hicache-fsm {version('hicache-fsm')}")
        except PackageNotFoundError:
            print("hicache-fsm, run from a folder in which it is not installed")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
