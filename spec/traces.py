"""Checks logs of real runs against `Lifecycle.tla`, all in one TLC run.

    python -m spec.traces LOG... [--retry-max-attempts N ...]     caps of the runs (defaults: those of CacheConfig)

A log is cut into lives: the lines of one request id, from its first attempt to its end. Each life carries the caps of
its run. A line that the specification does not explain is named by log, line and request.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hicache_fsm.config import CacheConfig
from spec.run import HERE, Outcome, run_tlc

ENDINGS = frozenset(("finish", "abort", "reject"))


class Line(NamedTuple):
    """One transition, as Trace.tla reads it."""

    event: str
    argument: int
    attempt: int
    to: str  # state without its parent
    number: int  # in its log


class Life(NamedTuple):
    """One request id of one run."""

    log: str
    rid: str
    caps: tuple[int, int, int, int]  # retry cap, poll interval, defer cap, park cap
    lines: tuple[Line, ...]


class Verdict(NamedTuple):
    """What TLC said about a set of lives."""

    lives: int
    lines: int
    unexplained: str  # the first line that no step explains; empty if all are explained
    outcome: Outcome


def caps_of(config: CacheConfig) -> tuple[int, int, int, int]:
    return config.retry_max_attempts, config.retry_poll_interval_passes, config.max_defers, config.park_cap


def lives(name: str, log: Iterable[str], caps: tuple[int, int, int, int]) -> list[Life]:
    """The lives of a log, in the order of their first lines."""
    open_: dict[str, list[Line]] = {}
    out: list[tuple[str, list[Line]]] = []
    for number, text in enumerate(log, 1):
        record = json.loads(text)
        rid = record["rid"]
        if rid not in open_:
            open_[rid] = []
            out.append((rid, open_[rid]))
        to = record["to"].rpartition("/")[2]
        open_[rid].append(Line(record["event"], record["argument"], record["attempt"], to, number))
        if record["event"] in ENDINGS:
            del open_[rid]
    return [Life(name, rid, caps, tuple(lines)) for rid, lines in out]


def module(traces: Sequence[Life]) -> str:
    """TraceData.tla."""
    bodies = []
    for life in traces:
        retry, interval, defer, park = life.caps
        polls = retry - retry // 2
        caps = f"retry |-> {retry}, poll |-> {polls}, interval |-> {interval}, defer |-> {defer}, park |-> {park}"
        lines = ", ".join(f'<<"{x.event}", {x.argument}, {x.attempt}, "{x.to}">>' for x in life.lines)
        bodies.append(f"  [caps |-> [{caps}], lines |-> <<{lines}>>]")
    body = ",\n".join(bodies)
    return f"---- MODULE TraceData ----\nEXTENDS Naturals, Sequences\nTraces == <<\n{body}\n>>\n====\n"


_AT = re.compile(r"/\\ (k|l) = (\d+)")


def check(traces: Sequence[Life]) -> Verdict:
    """One TLC run over all lives."""
    with tempfile.TemporaryDirectory(prefix="traces-") as name:
        folder = Path(name)
        for part in ("Lifecycle.tla", "Trace.tla", "Trace.cfg"):
            shutil.copy(HERE / part, folder)
        (folder / "TraceData.tla").write_text(module(traces))
        outcome = run_tlc("Trace", folder / "Trace.cfg", folder=folder, deadlock=True)
    unexplained = ""
    if outcome.violated:
        at = dict(_AT.findall(outcome.output))  # the last state that TLC prints comes last
        life = traces[int(at["k"]) - 1]
        line = life.lines[int(at["l"]) - 1]
        who = f"request {life.rid!r} attempt {line.attempt}"
        unexplained = f"{life.log}:{line.number}: {who}, {line.event} -> {line.to}"
    return Verdict(len(traces), sum(len(life.lines) for life in traces), unexplained, outcome)


def main() -> int:
    default = CacheConfig()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG")
    for name in ("retry_max_attempts", "retry_poll_interval_passes", "max_defers", "park_cap"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name), metavar="N")
    options = parser.parse_args()
    caps = (options.retry_max_attempts, options.retry_poll_interval_passes, options.max_defers, options.park_cap)
    traces: list[Life] = []
    for path in options.logs:
        with path.open(encoding="utf-8") as lines:
            traces += lives(str(path), lines, caps)
    verdict = check(traces)
    said = f"not explained: {verdict.unexplained}" if verdict.unexplained else "every line is explained"
    print(f"{verdict.lives:,} lives, {verdict.lines:,} lines, {verdict.outcome.seconds:.1f} s: {said}")
    return 1 if verdict.unexplained else 0


if __name__ == "__main__":
    raise SystemExit(main())
