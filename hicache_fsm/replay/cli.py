"""The `replay` command: options, the run, its summary and files."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_fsm.config import PrefetchPolicy
from hicache_fsm.errors import HiCacheError, IllegalTransition, InvariantViolation
from hicache_fsm.replay.options import PLANTS, POOLS, PoolSizes, ReplayOptions
from hicache_fsm.testing.faulty_store import Faults

if TYPE_CHECKING:
    from hicache_fsm.observe.summary import ReplayResult
    from hicache_fsm.replay.outputs import OutputFile

PASSED, FAILED, REFUSED = 0, 1, 2
BY_SIGNAL = 128
"""Exit codes; a run ended by signal N gives 128 + N."""
DEFAULT = ReplayOptions()


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options that `run_replay` reads."""
    parser.add_argument(
        "trace", nargs="?", type=Path, metavar="TRACE",
        help="a Mooncake trace (JSONL); without it, a built-in multi-turn chat is replayed",
    )  # fmt: skip
    _workload(parser.add_argument_group("workload"))
    _memory(parser.add_argument_group("memory and storage"))
    _waiting(parser.add_argument_group("waiting for storage"))
    _scheduling(parser.add_argument_group("scheduling"))
    _faults(parser.add_argument_group("faults, all off by default"))
    _output(parser.add_argument_group("output"))


Group = argparse._ArgumentGroup


def _workload(group: Group) -> None:
    _number(group, "--requests", DEFAULT.requests, "requests of the built-in workload")
    _number(group, "--seed", DEFAULT.seed, "of the built-in workload, and of random faults")
    group.add_argument("--limit", type=int, metavar="N", help="replay only the first N requests")
    group.add_argument(
        "--speed", type=float, default=DEFAULT.speed, metavar="X",
        help="trace time over virtual time; 0: as fast as --concurrency allows (default: 0)",
    )  # fmt: skip
    _number(group, "--concurrency", DEFAULT.concurrency, "requests that wait or run at a time")


def _memory(group: Group) -> None:
    _number(group, "--page-size", DEFAULT.page_size, "tokens of a page")
    _number(group, "--bytes-per-token", DEFAULT.bytes_per_token, "over all layers")
    _number(group, "--layers", DEFAULT.num_layers, "layers of the made-up model")
    group.add_argument("--pools", choices=tuple(POOLS), default="default", help="both sizes (default: default)")
    group.add_argument("--device-tokens", type=int, metavar="N", help="device pool, instead of the preset's")
    group.add_argument("--staging-tokens", type=int, metavar="N", help="staging, instead of the preset's")
    group.add_argument("--store", type=Path, metavar="FOLDER", help="keep pages here (default: a temporary folder)")
    group.add_argument("--store-bytes", type=int, metavar="N", help="evict old pages beyond this size")
    _number(group, "--read-threads", DEFAULT.read_threads, "threads that read pages")
    _number(group, "--lookup-threads", DEFAULT.lookup_threads, "threads that look pages up")
    _number(group, "--write-threads", DEFAULT.write_threads, "threads that write pages")


def _waiting(group: Group) -> None:
    group.add_argument(
        "--policy", "--hicache-storage-prefetch-policy", dest="policy", default=DEFAULT.policy.value,
        choices=[policy.value for policy in PrefetchPolicy],
        help=f"how long a request waits for its read (default: {DEFAULT.policy.value})",
    )  # fmt: skip
    for short, long, name, help_text in (
        ("--retry-max-attempts", "retry-max-attempts", "retry_max_attempts", "look-ups again after a miss; 0: none"),
        ("--poll-interval", "retry-poll-interval", "poll_interval", "passes between paced look-ups; 0: none"),
    ):
        group.add_argument(
            short, f"--hicache-storage-prefetch-{long}", dest=name, type=int, metavar="N",
            default=getattr(DEFAULT, name), help=f"{help_text} (default: {getattr(DEFAULT, name)})",
        )  # fmt: skip
    group.add_argument(
        "--pin-cap", type=float, default=DEFAULT.pin_cap, metavar="SHARE",
        help=f"share of the device pool that waiting hits may pin, 0 to 1 (default: {DEFAULT.pin_cap})",
    )  # fmt: skip
    _number(group, "--max-defers", DEFAULT.max_defers, "refusals before a staged hit is dropped")
    _number(group, "--park-cap", DEFAULT.park_cap, "chances of a hit that waits for room")


def _scheduling(group: Group) -> None:
    _number(group, "--chunked-prefill-size", DEFAULT.chunked_prefill_size, "prompt tokens a pass; 0: no chunks")
    _number(group, "--max-prefill-tokens", DEFAULT.max_prefill_tokens, "prompt tokens of new requests a pass")
    _number(group, "--max-running-requests", DEFAULT.max_running_requests, "requests that run at a time")
    group.add_argument(
        "--max-context-tokens", type=int, metavar="N",
        help="longer requests are rejected (default: the longest request, at most the device pool)",
    )  # fmt: skip


def _faults(group: Group) -> None:
    rate = {"type": float, "default": 0.0, "metavar": "P"}
    group.add_argument("--store-latency-ms", type=float, default=0.0, metavar="MS", help="added to each store call")
    group.add_argument("--store-fail-rate", **rate, help="share of store calls that fail")  # type: ignore[arg-type]
    group.add_argument("--store-lose-rate", **rate, help="share of pages read that are lost")  # type: ignore[arg-type]
    group.add_argument("--store-full", action="store_true", help="no page can be written")
    group.add_argument("--store-kill-after", type=int, metavar="N", help="every store call fails after the Nth")
    group.add_argument("--plant", choices=PLANTS, default="", help="break the product; the replay must notice and fail")


def _output(group: Group) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    group.add_argument("--report", type=Path, metavar="FILE", help="write the result as one HTML file")
    group.add_argument("--log", type=Path, metavar="FILE", help="write one JSON line for each transition of a request")
    group.add_argument("--debug", action="store_true", help="check ownership after each transition")
    group.add_argument("--quiet", action="store_true", help="print the verdict only")


def _number(group: Group, name: str, default: int, help_text: str) -> None:
    group.add_argument(name, type=int, default=default, metavar="N", help=f"{help_text} (default: {default})")


def options_of(args: argparse.Namespace) -> ReplayOptions:
    """Raises `ConfigError` on values that cannot work."""
    pools = POOLS[args.pools]
    device = pools.device_tokens if args.device_tokens is None else args.device_tokens
    staging = pools.staging_tokens if args.staging_tokens is None else args.staging_tokens
    same = (
        "trace", "requests", "seed", "limit", "speed", "concurrency", "page_size", "bytes_per_token", "store",
        "store_bytes", "retry_max_attempts", "poll_interval", "max_defers", "pin_cap", "park_cap",
        "chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "max_context_tokens", "read_threads",
        "lookup_threads", "write_threads", "debug",
    )  # fmt: skip
    fail = args.store_fail_rate
    return ReplayOptions(
        **{name: getattr(args, name) for name in same},
        num_layers=args.layers,
        pools=PoolSizes(device, staging),
        policy=PrefetchPolicy(args.policy),
        faults=Faults(
            fail_exists=fail, fail_get=fail, fail_put=fail, lose_get=args.store_lose_rate, full=args.store_full,
            latency_s=args.store_latency_ms / 1000,
        ),
        kill_store_after=args.store_kill_after,
        planted=args.plant,
    )  # fmt: skip


def run_replay(args: argparse.Namespace) -> int:
    """Replay as the options say; the exit code. Operating errors are told on standard error."""
    try:
        return _run(args, options_of(args))
    except (IllegalTransition, InvariantViolation):
        raise  # bugs, which need their traceback
    except HiCacheError as error:
        print(f"hicache-fsm replay: {error}", file=sys.stderr)
        return REFUSED


def _run(args: argparse.Namespace, options: ReplayOptions) -> int:
    from hicache_fsm.observe.progress import progress_bar
    from hicache_fsm.replay.outputs import output_files

    with ExitStack() as stack:
        stack.enter_context(few_warnings())
        json_file, report_file, log = stack.enter_context(output_files(args.json, args.report, args.log))
        # Loaded late: torch takes a second, which help and refusals need not wait for.
        from hicache_fsm.replay.driver import load_workload, replay
        from hicache_fsm.replay.signals import StopSignals

        workload = load_workload(options)
        if not args.quiet:
            print(f"replaying {len(workload):,} requests of {options.source}", flush=True)
        signals = stack.enter_context(StopSignals())
        with progress_bar(len(workload), wanted=not args.quiet) as bar:
            result = replay(
                options, workload, progress=bar, log=None if log is None else log.stream, stop=signals.wanted
            )
        _write(result, json_file, report_file, log)
        _print(result, quiet=args.quiet)
        if result.interrupted:
            return BY_SIGNAL + signals.received
        return PASSED if result.passed else FAILED


@contextmanager
def few_warnings(shown: int = 5) -> Iterator[None]:
    """Show the first warnings of the library on standard error; a store that fails on purpose has thousands,
    and the summary counts them."""
    numbers = itertools.count(1)  # `next` is atomic: warnings come from several threads

    def show(record: logging.LogRecord) -> bool:
        number = next(numbers)
        if number == shown + 1:
            print("(further warnings are counted only)", file=sys.stderr)
        return number <= shown

    handler = logging.StreamHandler()
    handler.addFilter(show)
    logger = logging.getLogger("hicache_fsm")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _write(
    result: ReplayResult, json_file: OutputFile | None, report_file: OutputFile | None, log: OutputFile | None
) -> None:
    if json_file is not None:
        json.dump(result.to_json(), json_file.stream, indent=1)
        json_file.stream.write("\n")
        json_file.commit()
    if report_file is not None:
        from hicache_fsm.observe.html import html_report

        report_file.stream.write(html_report(result))
        report_file.commit()
    if log is not None:
        log.commit()


def _print(result: ReplayResult, *, quiet: bool) -> None:
    from hicache_fsm.observe.report import text_report, verdict

    print(verdict(result) if quiet else "\n" + text_report(result), flush=True)
