"""What scenarios expect: one entry of `QUANTITIES` for each number that can be compared, and of `EXPECTATIONS` for
each other statement about the present state."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.testing.scenario_events import one_of
from hicache_fsm.testing.scenario_grammar import Args, Pattern
from hicache_fsm.testing.scenario_play import Action, EventLine, Play, StepFailed
from hicache_fsm.testing.sim import chain

Measure: TypeAlias = Callable[[Play, Args], int]


class Quantity(NamedTuple):
    """A number that lines `expect ... = N` compare."""

    words: str
    meaning: str
    measure: Measure


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────

_OF_REQUEST: dict[str, tuple[str, Callable[[Attempt], int]]] = {
    "attempt": ("number of its present attempt, from 1 on", lambda a: a.number),
    "retries": ("look-ups that were issued again", lambda a: a.retries),
    "defers": ("refusals of its hold", lambda a: a.defers),
    "chances": ("chances that it had while it was parked or its base moved", lambda a: a.chances),
    "tokens": ("tokens of its prompt", lambda a: a.num_tokens),
    "base": ("page at which its fetched span begins", lambda a: a.base_pages),
    "end": ("page behind its fetched span, 0 if not known", lambda a: a.end_pages),
    "staging": ("staging pages that it owns", lambda a: len(a.staging)),
    "pinned": ("tokens of the prefix that it pins", lambda a: a.pin_tokens),
    "published": ("leading pages that are in the tree", lambda a: a.published_pages),
    "own": ("device pages of its own, not published yet", lambda a: len(a.device)),
    "loads": ("loads that its batch waits for", lambda a: len(a.load_ops)),
}

_OF_PLANE: tuple[tuple[str, str, Measure], ...] = (
    ("staging free", "staging pages that nobody owns", lambda p, a: p.sim.plane.parts.full.staging.available),
    ("staging used", "staging pages that somebody owns", lambda p, a: p.sim.plane.parts.full.staging.used),
    ("staging reads", "staging pages of reads, holds and loads", lambda p, a: p.sim.plane.parts.full.reads.value),
    ("staging writes", "staging pages of writes", lambda p, a: p.sim.plane.parts.full.writes.value),
    ("device free", "device pages that nobody owns", lambda p, a: p.sim.plane.parts.full.device.available),
    ("device used", "device pages that somebody owns, the tree included",
     lambda p, a: p.sim.plane.parts.full.device.used),
    ("device resident", "device pages in the tree", lambda p, a: p.sim.plane.parts.full.tree.resident),
    ("device evictable", "pages of the tree that could leave now", lambda p, a: p.sim.plane.parts.full.tree.evictable),
    ("device locked", "pages of the tree that must not leave", lambda p, a: p.sim.plane.parts.full.tree.locked),
    ("pinned tokens", "tokens that holds and reads pin together", lambda p, a: p.sim.plane.parts.full.pinned.value),
    ("requested", "tokens that storage was asked for", lambda p, a: p.sim.plane.parts.accounts.requested),
    ("found", "tokens that storage said it has", lambda p, a: p.sim.plane.parts.accounts.found),
    ("spliced", "tokens that loads brought", lambda p, a: p.sim.plane.parts.accounts.spliced),
    ("unfulfilled outcome:OUTCOME", "found tokens that were not brought, for this reason",
     lambda p, a: p.sim.plane.parts.accounts.unfulfilled[a["outcome"]]),
    ("unfulfilled", "found tokens that were not brought",
     lambda p, a: sum(p.sim.plane.parts.accounts.unfulfilled.values())),
    ("stat stat:STAT", "a counter of the load path", lambda p, a: p.sim.plane.parts.accounts.stats[a["stat"]]),
    ("stale answers", "answers to operations that had ended", lambda p, a: p.sim.plane.parts.ops.stale),
    ("queued writes", "pages that wait to be written", lambda p, a: p.sim.plane.parts.backup.queued_pages),
    ("written", "pages that the store has confirmed", lambda p, a: p.sim.plane.parts.backup.stored_pages),
    ("dropped writes reason:DROP", "pages whose write was given up, for this reason",
     lambda p, a: p.sim.plane.parts.backup.dropped_pages[a["reason"]]),
    ("outstanding kinds:KINDS", "operations of a kind that wait for an answer",
     lambda p, a: len(p.sim.of_kind(a["kinds"]))),
    ("lookups of rid:REQUEST", "look-ups that the present attempt has sent",
     lambda p, a: p.sim.asked[a["rid"], p.attempt(a["rid"]).number]),
    ("all lookups", "look-ups that were sent for requests that live, or ended last under their name",
     lambda p, a: sum(p.sim.asked.values())),
    ("pages of kind:KIND [of rid:REQUEST]", "pages of an outstanding operation",
     lambda p, a: len(getattr(p.sim.outstanding[one_of(p, a)], "keys", ()))),
    ("cached pages of rid:REQUEST", "pages that it would not compute if it were admitted now",
     lambda p, a: _cached(p, a["rid"])),
    ("resident pages of prompt:PROMPT", "leading pages of this prompt that are on the device",
     lambda p, a: p.sim.plane.parts.full.tree.match(chain(*a["prompt"]))),
    ("stored pages of prompt:PROMPT", "leading pages of this prompt that are in the store",
     lambda p, a: p.sim._stored_run(chain(*a["prompt"]))),
    ("believed pages of prompt:PROMPT", "pages of this prompt that are believed to be in the store",
     lambda p, a: sum(key in p.sim.plane.parts.beliefs for key in chain(*a["prompt"]))),
)  # fmt: skip

QUANTITIES = (
    *(Quantity(*one) for one in _OF_PLANE),
    *(
        Quantity(f"rid:REQUEST {word}", meaning, lambda p, a, of=of: of(p.attempt(a["rid"])))  # type: ignore[misc]
        for word, (meaning, of) in _OF_REQUEST.items()
    ),
)


def _cached(play: Play, rid: str) -> int:
    candidate = play.sim.plane.consider(play.attempt(rid))
    play.sim.pump()
    if candidate is None:
        raise StepFailed(f"{rid} to be a candidate", play.state(rid), rid)
    return candidate.cached_pages


def _compare(quantity: Quantity) -> Action:
    def check(play: Play, args: Args) -> None:
        found, wanted, sign = quantity.measure(play, args), args["value"], args["cmp"]
        holds = {"=": found == wanted, "<=": found <= wanted, ">=": found >= wanted}[sign]
        if not holds:
            raise StepFailed(str(wanted) if sign == "=" else f"{sign} {wanted}", str(found), args.get("rid", ""))

    return check


EXPECTATIONS: list[EventLine] = [
    EventLine(Pattern(f"expect {q.words} cmp:CMP value:N"), q.meaning, _compare(q)) for q in QUANTITIES
]


# ── other statements ─────────────────────────────────────────────────────────────────────────────────


def _expectation(pattern: str, meaning: str) -> Callable[[Action], Action]:
    def enter(check: Action) -> Action:
        EXPECTATIONS.append(EventLine(Pattern(pattern), meaning, check))
        return check

    return enter


@_expectation("expect rid:REQUEST is state:STATE [or other:STATE]", "The request is in this state; `ended`: not live.")
def is_state(play: Play, args: Args) -> None:
    found = play.state(args["rid"])
    wanted = [args["state"], *([args["other"]] if "other" in args else [])]
    if found not in wanted:
        raise StepFailed(" or ".join(wanted), found, args["rid"])


@_expectation("expect rid:REQUEST ended as how:END", "How the request, or its last attempt that ended, has ended.")
def ended_as(play: Play, args: Args) -> None:
    found = play.ends.get(args["rid"], "nothing of it has ended")
    if found != args["how"]:
        raise StepFailed(args["how"], found, args["rid"])


@_expectation("expect rid:REQUEST owns nothing", "Neither staging, pin, device pages nor lock.")
def owns_nothing(play: Play, args: Args) -> None:
    owned = play.attempt(args["rid"]).owned()
    if owned:
        raise StepFailed("nothing", " ".join(sorted(owned)), args["rid"])


def _names(play: Play, found: list[str], args: Args) -> None:
    wanted = [] if args["names"] == "none" else args["names"].split(",")
    if found != wanted:
        raise StepFailed(",".join(wanted) or "none", ",".join(found) or "none")


@_expectation("expect candidates = names:WORDS",
              "Requests that could be admitted now, in order (`r1,r2`, or `none`).")  # fmt: skip
def candidates(play: Play, args: Args) -> None:
    _names(play, [c.attempt.rid for c in play.sim.candidates()], args)


@_expectation("expect candidates count cmp:CMP value:N", "How many requests could be admitted now.")
def candidate_count(play: Play, args: Args) -> None:
    _compare(Quantity("", "", lambda p, a: len(p.sim.candidates())))(play, args)


@_expectation("expect restarted = names:WORDS",
              "Requests that were running and had to start anew since this was last asked, by name.")  # fmt: skip
def restarted(play: Play, args: Args) -> None:
    found, play.restarted = sorted([*play.restarted, *play.sim.plane.take_restarted()]), []
    _names(play, found, args)


@_expectation("expect rid:REQUEST reads prompt:PROMPT",
              "The first device pages of the admitted request hold the bytes of these pages.")  # fmt: skip
def reads(play: Play, args: Args) -> None:
    play.attempt(args["rid"])
    keys = chain(*args["prompt"])
    table = play.sim.plane.page_table(args["rid"])
    wrong = [i for i, key in enumerate(keys) if i >= len(table) or play.sim.device[table[i]] != key]
    if wrong:
        raise StepFailed(f"bytes of {len(keys)} pages", f"other bytes in pages {wrong}", args["rid"])


@_expectation("expect store has prompt:PROMPT", "All pages of this prompt are in the store.")
def store_has(play: Play, args: Args) -> None:
    keys = chain(*args["prompt"])
    missing = [i for i, key in enumerate(keys) if key not in play.sim.stored]
    if missing:
        raise StepFailed(f"{len(keys)} pages in the store", f"pages {missing} are missing")


@_expectation("expect store lacks page page:N of prompt:PROMPT", "This page (the first is 0) is not in the store.")
def store_lacks(play: Play, args: Args) -> None:
    if chain(*args["prompt"])[args["page"]] in play.sim.stored:
        raise StepFailed(f"page {args['page']} not in the store", "it is there")


@_expectation("expect cancelled kind:KIND [of rid:REQUEST]", "The operation was told that it is no longer wanted.")
def cancelled(play: Play, args: Args) -> None:
    op = one_of(play, args)
    if op not in play.sim.cancelled:
        raise StepFailed("the operation to be cancelled", "it is still wanted", args.get("rid", ""))


@_expectation("expect nothing outstanding", "No operation waits for an answer.")
def nothing_outstanding(play: Play, args: Args) -> None:
    if play.sim.outstanding:
        raise StepFailed("nothing", ", ".join(map(play.sim.name_of, play.sim.outstanding)))


@_expectation("expect idle", "Nothing lives and nothing is outstanding: the engine may be stopped.")
def idle(play: Play, args: Args) -> None:
    if not play.sim.plane.is_idle():
        raise StepFailed("idle", _busy(play))


@_expectation("expect busy", "There is work, or something outstanding.")
def busy(play: Play, args: Args) -> None:
    if play.sim.plane.is_idle():
        raise StepFailed("busy", "idle")


def _busy(play: Play) -> str:
    live = [f"{a.rid} is {a.state_name}" for a in play.sim.plane.parts.attempts]
    return "; ".join([*live, *map(play.sim.name_of, play.sim.outstanding)]) or "writes are queued"


@_expectation("expect no leaks", "Nothing lives, and all that was ever owned has come back.")
def no_leaks(play: Play, args: Args) -> None:
    found = play.sim.leaks() + play.sim.stale_entries()
    if found:
        more = [] if play.sim.plane.is_idle() else [_busy(play)]
        raise StepFailed("nothing left over", "; ".join([*found, *more]))
