"""Tables of a mutation campaign: for a terminal, as JSON, and as `docs/mutants.md`."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.mutants.run import Outcome


def line(outcome: Outcome) -> str:
    """One line as soon as a mutant is judged."""
    kills = outcome.verdict.kills
    found = f"{kills[0].check}: {kills[0].what.rpartition('/')[2]}" if kills else "SURVIVES"
    oracles = f" [{', '.join(outcome.verdict.oracles)}]" if outcome.verdict.oracles else ""
    return f"{outcome.mutant.id:<40} {outcome.verdict.seconds:5.1f} s  {found}{oracles}"


def summary(outcomes: Sequence[Outcome], checks: Sequence[str], seconds: float) -> Iterator[str]:
    """Mutants by first killer, the table of those for which all killers were looked for, and the survivors."""
    first = Counter(outcome.verdict.kills[0].check for outcome in outcomes if outcome.killed)
    yield ""
    yield "first killer: " + ", ".join(f"{name} {first[name]}" for name in ("import", *checks) if first[name])
    complete = [outcome for outcome in outcomes if outcome.complete]
    if complete:
        yield ""
        yield "all killers (number of failures):"
        yield f"{'':<40} " + " ".join(f"{name[:11]:>11}" for name in checks)
        for outcome in complete:
            counts = Counter(kill.check for kill in outcome.verdict.kills)
            yield f"{outcome.mutant.id:<40} " + " ".join(f"{counts[name] or '.':>11}" for name in checks)
    survivors = [outcome.mutant for outcome in outcomes if not outcome.killed]
    yield ""
    yield f"{len(outcomes)} mutants, {len(outcomes) - len(survivors)} killed, {seconds:.0f} s"
    for mutant in survivors:
        yield f"SURVIVES {mutant.id}: {mutant.bug} (hicache_fsm/{mutant.file})"


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    return {
        "mutants": len(outcomes),
        "killed": sum(outcome.killed for outcome in outcomes),
        "survivors": [outcome.mutant.id for outcome in outcomes if not outcome.killed],
        "seconds": round(seconds, 1),
        "outcomes": [
            {
                "id": outcome.mutant.id,
                "bug": outcome.mutant.bug,
                "file": outcome.mutant.file,
                "complete": outcome.complete,
                "seconds": round(outcome.verdict.seconds, 2),
                "kills": [{"check": k.check, "what": k.what, "message": k.message} for k in outcome.verdict.kills],
                "oracles": outcome.verdict.oracles,
            }
            for outcome in outcomes
        ],
    }


EXPLAINED: dict[str, str] = {
    "staging": "a page that nobody owns is missing at the end too (*leaks*), one with two owners comes back twice "
    "(*assertion* of the allocator); the invariant names the step that did it",
    "device": "as for staging",
    "locks": "a lock that stays is there at the end too (*leaks*), one that is taken back without having been taken is "
    "an *assertion* of the tree; the invariant names the step that did it",
    "parked": "a place without its attempt becomes the head sooner or later and is granted what the table forbids "
    "(*illegal event*), an attempt without its place fails when it leaves (*assertion*)",
    "loads": "who waits for a load that has ended waits for ever (*end*), a load that knows a reader which has ended "
    "fails when it is answered (*assertion*)",
}
"""Why an invariant is the only one to notice no mutant."""


class Gap(Exception):
    """An invariant is neither the sole killer of a mutant nor explained."""


def document(outcomes: Sequence[Outcome], walks: int) -> str:
    """`docs/mutants.md`. Raises `Gap` if an invariant has nothing to show for itself."""
    from hicache_fsm.control.checks import NAMES

    sole: dict[str, list[str]] = {name: [] for name in NAMES}
    noticed: Counter[str] = Counter()
    for outcome in outcomes:
        found = outcome.verdict.oracles
        noticed.update(found.keys())
        if len(found) == 1 and (only := next(iter(found))) in sole:
            sole[only].append(outcome.mutant.id)
    gaps = [name for name, ids in sole.items() if not ids and name not in EXPLAINED]
    if gaps:
        raise Gap(f"invariants that are the sole killer of no mutant, and not explained: {', '.join(gaps)}")
    parts = (_head(outcomes, walks), _killers(outcomes), _complete(outcomes), _invariants(sole, noticed), _equivalent())
    return "\n".join(line for part in parts for line in part) + "\n"


def _head(outcomes: Sequence[Outcome], walks: int) -> Iterator[str]:
    killed = sum(outcome.killed for outcome in outcomes)
    yield "# Mutants"
    yield ""
    yield (
        f"Written by `python -m tests.mutants.run --walks {walks} --write` on {datetime.date.today().isoformat()}: "
        f"{len(outcomes)} small faults of the control plane, {killed} killed."
    )
    yield ""
    yield (
        "Each fault is put into a copy of the real sources; the tests of the control plane, random walks and the "
        "explorer run over the copy until one of them notices. *First killer* is that one. *Noticed* is a second, "
        f"separate question: of {walks} random walks that know no right answer, what do invariants, bytes, the code's "
        "own assertions and the demand that all ends notice? Numbers are walks."
    )


def _killers(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield ""
    yield "| mutant | bug | first killer | noticed |"
    yield "|---|---|---|---|"
    for outcome in outcomes:
        kills = outcome.verdict.kills
        killer = f"{kills[0].check}: `{_short(kills[0].what)}`" if kills else "**survives**"
        noticed = ", ".join(f"{name} {count}" for name, count in outcome.verdict.oracles.items())
        yield f"| {outcome.mutant.id} | {outcome.mutant.bug} | {killer} | {noticed or '-'} |"


def _short(what: str) -> str:
    return what.rpartition("::")[2].partition("[")[0].replace("|", "/")[:100]


def _complete(outcomes: Sequence[Outcome]) -> Iterator[str]:
    from tests.mutants.trial import CHECKS

    names = [check.name for check in CHECKS]
    yield ""
    yield "## All killers of a sample"
    yield ""
    yield "Failures by check; a check that ends with its first failure counts 1."
    yield ""
    yield f"| mutant | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for outcome in outcomes:
        if outcome.complete:
            counts = Counter(kill.check for kill in outcome.verdict.kills)
            yield f"| {outcome.mutant.id} | {' | '.join(str(counts[name] or '') for name in names)} |"


def _invariants(sole: dict[str, list[str]], noticed: Counter[str]) -> Iterator[str]:
    from hicache_fsm.control.checks import NAMES
    from tests.mutants.oracles import OTHERS

    yield ""
    yield "## What each invariant is worth"
    yield ""
    yield (
        "*Noticed* counts mutants. *Sole* names those that nothing else notices in the walks: without this invariant "
        "all walks would pass."
    )
    yield ""
    yield "| invariant | says | noticed | sole |"
    yield "|---|---|---|---|"
    for name, meaning in NAMES.items():
        yield f"| {name} | {meaning} | {noticed[name]} | {', '.join(sole[name]) or f'none: {EXPLAINED[name]}'} |"
    yield ""
    yield "| other | says | noticed |"
    yield "|---|---|---|"
    for name, meaning in OTHERS.items():
        yield f"| {name} | {meaning} | {noticed[name]} |"


def _equivalent() -> Iterator[str]:
    from tests.mutants.catalogue import EQUIVALENT

    yield ""
    yield "## Not in the catalogue"
    yield ""
    yield "Faults that no input can tell from the original:"
    yield ""
    for bug, reason in EQUIVALENT:
        yield f"- {bug}: {reason}."
