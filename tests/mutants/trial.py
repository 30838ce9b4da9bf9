"""Judges one copy of the package, in a process of its own: `python -m tests.mutants.trial REQUEST RESULT`.

The copy is first on the path. Checks run cheapest first; without `all_killers`, the first that fails ends the trial.
The result is rewritten after each check, so that a process that hangs or dies has said how far it came.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEMORY_BYTES = 3 << 30
"""A mutant that collects without end dies of this instead of taking the machine along."""

TEST_SECONDS = 40
"""Far more than any test here takes, also on a busy machine; what hangs is killed."""


JUDGES_TEXT = "tests/test_machine.py::test_nobody_sets_a_state_outside_machine_fire"
"""Not asked: it reads the sources instead of running them."""

JUDGE_FAILED = 3
"""Exit status of a trial whose judge is broken, so that its verdict would mean nothing."""


class JudgeError(Exception):
    """The judge is broken, not the mutant."""


class Check(NamedTuple):
    """One judge: tests, by file or name, or a function that returns what is wrong."""

    name: str
    tests: tuple[str, ...] = ()
    function: Callable[[], list[str]] | None = None


def random_walks() -> list[str]:
    """Random walks of fixed seeds, ended by the first that fails."""
    from hicache_fsm.testing.pipeline_walk import random_walk

    for seed in range(40):
        try:
            with _alarm(TEST_SECONDS):
                random_walk(seed, 100)
        except Exception as error:
            return [f"walk {seed}: {_cause(error)}"]
    return []


def small_explorations() -> list[str]:
    """All states of one request under all faults, and the first states of two."""
    from hicache_fsm.testing.explore_scope import FAULTS, Scope
    from hicache_fsm.testing.explorer import Limits, Result, explore

    scopes = (
        (Scope(requests=1, faults=frozenset(FAULTS)), Limits()),
        (Scope(requests=2), Limits(states=6000)),
    )
    for scope, limits in scopes:
        with _alarm(4 * TEST_SECONDS):
            result: Result[None] = explore(scope, limits)
        if result.violations:
            violation = result.violations[0]
            return [f"explorer, {len(violation.inputs)} inputs: {violation.what[0].splitlines()[0]}"]
    return []


CHECKS = (
    Check("load path", ("tests/test_load_path.py",)),
    Check("write path", ("tests/test_write_path.py",)),
    Check("killers", ("tests/test_kill_mutants.py",)),
    Check("rows", ("tests/test_row_coverage.py",)),
    Check("field cases", ("tests/field",)),
    Check("retries", ("tests/test_retries.py",)),
    Check("table", ("tests/test_table.py",)),
    Check("tree", ("tests/test_prefix_tree.py",)),
    Check("machine", ("tests/test_machine.py",)),
    Check("walks", function=random_walks),
    Check("allocator", ("tests/test_allocator.py",)),
    Check("covering suite", ("tests/test_covering.py",)),
    Check("explorer", function=small_explorations),
    Check("bound", ("tests/test_pipeline_fuzz.py::test_no_attempt_waits_longer_than_its_bound",)),
)
"""Cheapest first. Tests of threads, stores, documents and the specification are not asked."""

_OWN = {
    "prefetch/retries.py": "retries",
    "prefetch/parking.py": "load path",
    "pools/": "allocator",
    "tree/": "tree",
    "backup/": "write path",
    "lifecycle/": "rows",
    "admission/": "killers",
}


def order_for(file: str) -> list[str]:
    """Names of all checks, those of a file's own part first: they are the likeliest to notice."""
    own = {check for part, check in _OWN.items() if file.startswith(part)}
    names = [check.name for check in CHECKS]
    return sorted(names, key=lambda name: name not in own)


@dataclass(slots=True)
class Kill:
    """What noticed the mutant."""

    check: str
    what: str  # the test that failed, or what is wrong
    message: str = ""


@dataclass(slots=True)
class Verdict:
    """What a trial found. `running` names the check that had not ended when this was written."""

    kills: list[Kill] = field(default_factory=list)
    running: str = "import"
    seconds: float = 0.0
    oracles: dict[str, int] = field(default_factory=dict)  # see `oracles.ablation`


class _Failures:
    """A pytest plugin: which tests failed, and with what."""

    def __init__(self, check: str) -> None:
        self.check = check
        self.kills: list[Kill] = []

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash is not None else report.longreprtext.strip().rpartition("\n")[2]
            self.kills.append(Kill(self.check, report.nodeid, (text.splitlines() or [""])[0][:200]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)


def _run_tests(check: Check, package: Path, first_only: bool) -> list[Kill]:
    failures = _Failures(check.name)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"--timeout={TEST_SECONDS}", "--tb=short"]
    options += ["--deselect", JUDGES_TEXT]
    options += [f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml"), "-o", f"pythonpath={package}"]
    if first_only:
        options.append("-x")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = pytest.main([*options, *[str(ROOT / test) for test in check.tests]], plugins=[failures])
    if (status == pytest.ExitCode.OK) == bool(failures.kills):
        raise JudgeError(f"pytest ended with {status!r} and {failures.kills}:\n{out.getvalue()}")
    return failures.kills


def _run(check: Check, package: Path, first_only: bool) -> list[Kill]:
    if check.function is None:
        return _run_tests(check, package, first_only)
    try:
        return [Kill(check.name, what) for what in check.function()]
    except Exception as error:  # whatever a mutant raises
        return [Kill(check.name, _cause(error))]


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


@contextlib.contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass(slots=True)
class Request:
    package: str  # folder that holds the copy of `hicache_fsm`
    checks: list[str]  # names, in the order in which they run
    all_killers: bool = False
    walks: int = 0  # for the ablation of invariants; 0: none


def _import(package: Path) -> list[Kill]:
    """The cheapest check: the sources compile, and the tables are total and unambiguous."""
    try:
        import hicache_fsm
        import hicache_fsm.control.plane
    except Exception as error:
        return [Kill("import", _cause(error))]
    found = Path(hicache_fsm.__file__).resolve()
    if not found.is_relative_to(package.resolve()):
        raise JudgeError(f"judging {found}, which is not the copy in {package}")
    return []


def judge(request: Request, verdict: Verdict, save: Callable[[], None]) -> None:
    package = Path(request.package)
    verdict.kills += _import(package)
    if verdict.kills:
        return
    by_name = {check.name: check for check in CHECKS}
    for check in [by_name[name] for name in request.checks]:
        verdict.running = check.name
        save()
        verdict.kills += _run(check, package, not request.all_killers)
        if verdict.kills and not request.all_killers:
            break
    if request.walks:
        from tests.mutants.oracles import ablation

        verdict.running = "ablation"
        save()
        verdict.oracles = ablation(request.walks)


def main(request_file: str, result_file: str) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    request = Request(**json.loads(Path(request_file).read_text(encoding="utf-8")))
    verdict, result, began = Verdict(), Path(result_file), time.monotonic()

    def save() -> None:
        verdict.seconds = time.monotonic() - began
        result.write_text(json.dumps(asdict(verdict)), encoding="utf-8")

    try:
        judge(request, verdict, save)
    except JudgeError as error:
        print(error)
        return JUDGE_FAILED
    verdict.running = ""
    save()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
