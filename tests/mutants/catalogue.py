"""Small faults of the control plane, each a bug that somebody could write, as a replacement in the real sources.

A mutant names its file and a snippet of it. The snippet must stand there exactly once: a change of the code that it
was cut from breaks the mutant loudly, with its id, and whoever made the change decides what the bug looks like now.
Mutants that no input can tell from the original do not belong here (see the end of `docs/mutants.md`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hicache_fsm"


class Mutant(NamedTuple):
    id: str
    bug: str  # what somebody got wrong, in one sentence
    file: str  # below the package
    old: str  # stands exactly once in the file
    new: str

    def applied(self, source: str) -> str:
        """The source with the fault. Raises `StaleMutant` if the snippet does not stand there exactly once."""
        found = source.count(self.old)
        if found != 1:
            raise StaleMutant(
                f"mutant {self.id!r}: its snippet stands {found} times in hicache_fsm/{self.file}, not once; "
                f"cut it anew from the present code:\n{self.old}"
            )
        return source.replace(self.old, self.new)


class StaleMutant(Exception):
    """A mutant no longer fits the sources."""


def _catalogue() -> tuple[Mutant, ...]:
    from tests.mutants import faults_core, faults_load, faults_tables, faults_write

    parts = (faults_tables, faults_core, faults_load, faults_write)
    return tuple(Mutant(*entry) for part in parts for entry in part.FAULTS)


CATALOGUE = _catalogue()
BY_ID = {mutant.id: mutant for mutant in CATALOGUE}

QUICK = (
    "table-park-clock-stands",
    "table-close-forgets-parked",
    "pool-double-free-unnoticed",
    "caps-defers-off-by-one",
    "parked-bypass-unlimited",
    "retry-poll-overwrites-refetch",
    "hold-tail-not-quarantined",
    "answers-no-identity-check",
    "plane-redundant-pages-leak",
    "write-failed-pages-believed",
)
"""A cross-section that is small enough for every run of the tests."""


EQUIVALENT = (
    ("the head goes idle and its poll stays armed", "the same pass forgets the poll of the head in `pop_ready`"),
    ("rows of a lost operation are not returned by the row `lose`",
     "only offloads and stores end by it, whose rows belong to their span; others end by `ack`"),
    ("an orphaned operation still names its slot",
     "the attempt's own operation is compared besides, and it is another by then"),
    ("an attempt that closes storage at its deadline or at the defer cap leaves it open, without a hold",
     "nothing asks storage for a recomputing attempt"),
    ("a due poll is not disarmed by its look-up", "`pop_ready` has taken the entry out before"),
)  # fmt: skip
"""Faults that were tried, that no check noticed, and that no input can tell from the original: (bug, reason)."""


def stale() -> list[str]:
    """Messages of all mutants that do not fit the sources any more."""
    found: list[str] = []
    for mutant in CATALOGUE:
        try:
            mutant.applied((PACKAGE / mutant.file).read_text(encoding="utf-8"))
        except (StaleMutant, OSError) as error:
            found.append(str(error))
    return found
