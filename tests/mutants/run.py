"""The mutation campaign: `python -m tests.mutants.run [--ids ID...] [--quick] [--all] [--json FILE] [--write]`.

Each mutant is put into a copy of the package, and a process of its own runs the checks over the copy, cheapest first
(`trial.CHECKS`). Before the first mutant the untouched copy has to pass them all. Exit status: 0 if every mutant was
killed, 1 if some survived, 2 if the campaign itself is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants import report
from tests.mutants.catalogue import BY_ID, CATALOGUE, PACKAGE, QUICK, ROOT, Mutant, StaleMutant, stale
from tests.mutants.trial import CHECKS, JUDGE_FAILED, Kill, Request, Verdict, order_for

TRIAL_SECONDS = 400
"""A trial that takes longer hangs where no alarm reaches it. One that passes all checks takes 30 s at rest."""

SAMPLE_STEP = 12
"""Every so many mutants all killers are looked for, not only the first."""


@dataclass(slots=True)
class Outcome:
    """What became of a mutant. `complete` says that all killers were looked for."""

    mutant: Mutant
    verdict: Verdict
    complete: bool = False

    @property
    def killed(self) -> bool:
        return bool(self.verdict.kills)


class Bench:
    """A copy of the package that is mutated and restored; one per worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / PACKAGE.name
        shutil.copytree(PACKAGE, self.package, ignore=shutil.ignore_patterns("__pycache__"))

    def judge(self, mutant: Mutant | None, checks: Sequence[str], all_killers: bool, walks: int) -> Verdict:
        """The verdict of these checks (none named: of all) on the copy with this fault in it (None: as it is)."""
        order = order_for("" if mutant is None else mutant.file)
        checks = [name for name in order if not checks or name in checks]
        if mutant is None:
            return self._trial(checks, all_killers, walks)
        path = self.package / mutant.file
        source = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(source), encoding="utf-8")
        try:
            return self._trial(checks, all_killers, walks)
        finally:
            path.write_text(source, encoding="utf-8")

    def _trial(self, checks: Sequence[str], all_killers: bool, walks: int) -> Verdict:
        request, result = self.folder / "request.json", self.folder / "result.json"
        result.unlink(missing_ok=True)
        asked = Request(str(self.folder), list(checks), all_killers, walks)
        request.write_text(json.dumps(asdict(asked)), encoding="utf-8")
        # Compiled files are matched by time and size, which a mutant may share with the original.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, (self.folder, ROOT, ROOT / "gpu"))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_PROFILE": "ci",
        }
        environment.pop("PYTEST_ADDOPTS", None)
        with (self.folder / "output").open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.mutants.trial", str(request), str(result)],
                cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            status = _wait(process)
        verdict = _read(result)
        if status is None:
            verdict.kills.append(Kill(verdict.running, "timeout", f"not done after {TRIAL_SECONDS} s"))
        elif status:
            said = (self.folder / "output").read_text(encoding="utf-8")
            if status == JUDGE_FAILED or verdict.running == "import":
                raise CampaignError(f"a trial ended with status {status} in {verdict.running!r}:\n{said[-4000:]}")
            verdict.kills.append(Kill(verdict.running, "crash", said.strip().rpartition("\n")[2][:200]))
        return verdict


class CampaignError(Exception):
    """The campaign itself is broken: its figures would mean nothing."""


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """The exit status, or None if the process had to be killed."""
    try:
        return process.wait(TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def _read(result: Path) -> Verdict:
    if not result.exists():
        return Verdict()
    raw = json.loads(result.read_text(encoding="utf-8"))
    raw["kills"] = [Kill(**kill) for kill in raw["kills"]]
    return Verdict(**raw)


@contextmanager
def benches(count: int) -> Iterator[list[Bench]]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        made = []
        for number in range(count):
            place = Path(folder) / str(number)
            place.mkdir()
            made.append(Bench(place))
        yield made


def campaign(
    mutants: Sequence[Mutant],
    *,
    checks: Sequence[str] = (),
    complete: Callable[[int, Mutant], bool] = lambda number, mutant: False,
    walks: int = 0,
    workers: int = 2,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Judge the mutants, in their order. Raises what a worker raises: a stale mutant, a trial that cannot run.

    `complete` says for which mutants all killers are looked for; `tell` hears of each outcome at once.
    """
    todo: queue.SimpleQueue[tuple[int, Mutant]] = queue.SimpleQueue()
    for numbered in enumerate(mutants):
        todo.put(numbered)
    outcomes: dict[int, Outcome] = {}
    errors: list[BaseException] = []

    def work(bench: Bench) -> None:
        while not errors:
            try:
                number, mutant = todo.get_nowait()
            except queue.Empty:
                return
            try:
                every = complete(number, mutant)
                outcomes[number] = Outcome(mutant, bench.judge(mutant, checks, every, walks), every)
                tell(outcomes[number])
            except BaseException as error:
                errors.append(error)

    with benches(min(workers, len(mutants))) as made:
        threads = [threading.Thread(target=work, args=(bench,), daemon=True) for bench in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return [outcomes[number] for number in sorted(outcomes)]


def control(checks: Sequence[str] = (), walks: int = 0) -> Verdict:
    """The verdict on the untouched package. Raises `CampaignError` if any check fails on it."""
    with benches(1) as made:
        verdict = made[0].judge(None, checks, True, walks)
    if verdict.kills or verdict.oracles:
        raise CampaignError(f"the checks fail without any mutant: {verdict.kills} {verdict.oracles}")
    return verdict


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--ids", nargs="+", metavar="ID", choices=sorted(BY_ID), help="only these mutants")
    parser.add_argument("--quick", action="store_true", help="the ten that `make test` judges")
    parser.add_argument("--all", action="store_true", help="look for all killers of each mutant, not for the first")
    parser.add_argument("--walks", type=int, default=0, metavar="N",
                        help="also let N random walks tell which invariants notice each mutant")  # fmt: skip
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes at once (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--write", action="store_true", help="write docs/mutants.md; needs --walks and all mutants")
    parser.add_argument("--list", action="store_true", help="list the mutants and their bugs, and stop")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    ids = args.ids or (QUICK if args.quick else tuple(BY_ID))
    mutants = [BY_ID[name] for name in ids]
    if args.list:
        print("\n".join(f"{m.id}: {m.bug} ({m.file})" for m in mutants))
        return 0
    if args.write and (len(mutants) < len(CATALOGUE) or not args.walks):
        print("--write needs all mutants, and --walks", file=sys.stderr)
        return 2
    began = time.monotonic()
    try:
        if found := stale():
            raise StaleMutant("\n".join(found))
        control(walks=args.walks)
        outcomes = campaign(
            mutants, walks=args.walks, workers=args.workers,
            tell=lambda outcome: print(report.line(outcome), flush=True),
            complete=lambda number, mutant: args.all or (len(mutants) == len(CATALOGUE) and number % SAMPLE_STEP == 0),
        )  # fmt: skip
    except (StaleMutant, CampaignError) as error:
        print(error, file=sys.stderr)
        return 2
    seconds = time.monotonic() - began
    print("\n".join(report.summary(outcomes, [check.name for check in CHECKS], seconds)))
    if args.json is not None:
        args.json.write_text(json.dumps(report.figures(outcomes, seconds), indent=2) + "\n", encoding="utf-8")
    if not all(outcome.killed for outcome in outcomes):
        return 1
    return _write(outcomes, args.walks) if args.write else 0


def _write(outcomes: Sequence[Outcome], walks: int) -> int:
    try:
        text = report.document(outcomes, walks)
    except report.Gap as gap:
        print(gap, file=sys.stderr)
        return 2
    (ROOT / "docs" / "mutants.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
