"""Each transition row of the three tables is fired by a little scenario here, or listed as unreachable.

A row has a name such as `querying cut -> idle [not may_poll]`. A new row without a scenario fails
`test_every_transition_row_has_a_scenario`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hicache_fsm.errors import IllegalTransition
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.diagrams import TABLES
from hicache_fsm.lifecycle.model import Kind, Row, Table
from hicache_fsm.lifecycle.operation_table import OPERATION_TABLE, OpKind
from hicache_fsm.lifecycle.span_table import SPAN_TABLE
from hicache_fsm.lifecycle.table import REQUEST_TABLE, Event, State
from hicache_fsm.ports import LookupDone, Lost
from hicache_fsm.testing.pipeline_walk import watch_rows
from hicache_fsm.testing.sim import Sim, chain
from tests.field.tools import BEST_EFFORT, answer, end_all, evict, get, look_up, make_resident, read, sim, stage, state

UNREACHABLE = {
    "request: parked unservable -> recomputing []": "a pool that cannot hold a threshold's worth parks nobody: the "
    "hit is found unservable when it is answered",
    "request: paced exhausted -> recomputing []": "a poll is armed only below the cap, and only issuing it counts",
    "request: refetch exhausted -> recomputing []": "a refetch is armed only below the cap, and only issuing it counts",
}


def row_name(table: Table, row: Row) -> str:
    when = ", ".join(map(str, row.when))
    source, target = table.states[row.source].name, table.states[row.target].name
    return f"{table.name}: {source} {table.events[row.event].name} -> {target} [{when}]"


ALL_ROWS = {
    (table.name, row.id): row_name(table, row)
    for table in TABLES.values()
    for row in table.rows
    if row.kind is Kind.TRANSITION
}


# ── one attempt in each state ────────────────────────────────────────────────────────────────────────


def idle() -> Sim:
    s = sim()
    s.submit("r", "ab")
    look_up(s, "r")
    return s


def paced() -> Sim:
    s = sim()
    s.submit("head", "xy")
    s.submit("r", "ab")
    look_up(s, "r")
    return s


def hold_on_lost_base() -> Sim:
    """`r` has a hold beyond two unpinned pages, of which the second has left."""
    s = sim("abcd", anchor_lock_cap=0.0)
    make_resident(s, "ab")
    stage(s, "r", "abcd")
    evict(s, 1)
    return s


def refetch() -> Sim:
    s = hold_on_lost_base()
    assert s.plane.consider(get(s, "r")) is None
    return s


def querying() -> Sim:
    s = sim("abcd")
    s.submit("r", "abcd")
    return s


def reading() -> Sim:
    s = querying()
    look_up(s, "r")
    return s


def parked() -> Sim:
    s = sim("abcdefghijkl", retry_max_attempts=2)
    stage(s, "big", "abcdefghijkl")
    s.submit("r", "abcd")
    look_up(s, "r")
    return s


def staged() -> Sim:
    s = reading()
    read(s, "r")
    return s


def recomputing() -> Sim:
    s = sim()
    s.plane.detach()
    s.submit("r", "ab")
    return s


def loading() -> Sim:
    s = staged()
    assert s.admit("r")
    return s


def resident() -> Sim:
    s = idle()
    assert s.admit("r")
    return s


def transferring() -> Sim:
    s = resident()
    s.plane.parts.machine.fire(get(s, "r"), Event.TRANSFER)
    return s


BUILDERS: dict[State, Callable[[], Sim]] = {
    State.IDLE: idle,
    State.PACED: paced,
    State.REFETCH: refetch,
    State.QUERYING: querying,
    State.READING: reading,
    State.PARKED: parked,
    State.STAGED: staged,
    State.RECOMPUTING: recomputing,
    State.LOADING: loading,
    State.RESIDENT: resident,
    State.TRANSFERRING: transferring,
}


@pytest.mark.parametrize("at", BUILDERS, ids=lambda at: at.name.lower())
def test_builder_reaches_its_state(at: State) -> None:
    s = BUILDERS[at]()
    assert get(s, "r").state == at, s.plane.explain("r")
    end_all(s)


# ── every end from every state ───────────────────────────────────────────────────────────────────────


def machine_end(s: Sim, event: Event) -> None:
    """Ends that belong to prefill disaggregation, whose scheduler is not part of this: fired directly."""
    attempt = get(s, "r")
    s.plane.parts.machine.fire(attempt, event)
    s.plane.parts.attempts.close(attempt)
    s.plane.parts.attempts.forget("r")
    s.pump()


ENDS: dict[str, Callable[[Sim], object]] = {
    "abort": lambda s: s.call(lambda plane: plane.abort("r")),
    "reject": lambda s: s.call(lambda plane: plane.reject("r")),
    "finish": lambda s: s.call(lambda plane: plane.finish("r")),
    "retract": lambda s: s.call(lambda plane: plane.retract("r", get(s, "r").num_tokens, get(s, "r").keys)),
    "flush": lambda s: s.call(lambda plane: plane.flush()),
    "close": lambda s: s.call(lambda plane: plane.detach()),
    "yield": lambda s: machine_end(s, Event.YIELD),
}
_END_EVENTS = {event.name: event.id for event in REQUEST_TABLE.events if event.name in ENDS}
END_CASES = [
    (at, name, row)
    for at in BUILDERS
    for name in ENDS
    for row in REQUEST_TABLE.cell(at, _END_EVENTS[name])
    if row.kind is Kind.TRANSITION
]


@pytest.mark.parametrize(("at", "name", "row"), END_CASES, ids=[f"{at.name.lower()}-{n}" for at, n, _ in END_CASES])
def test_end_from_every_state_returns_everything(at: State, name: str, row: Row) -> None:
    s = BUILDERS[at]()
    attempt = get(s, "r")
    fired: set[tuple[str, int]] = set()
    watch_rows(s, fired)
    ENDS[name](s)
    assert ("request", row.id) in fired
    if row.target in (State.FINISHED, State.ABORTED):
        assert attempt.owned() == frozenset(), "an ended attempt owns nothing at once"
        assert attempt.outcome == row.outcome
    # What is still on its way is answered late, and the rest of the requests end as well.
    end_all(s)


# ── scenarios for the rows between ───────────────────────────────────────────────────────────────────

SCENARIOS: dict[str, tuple[Callable[[], Sim | None], tuple[str, ...]]] = {}
SEEN: set[tuple[str, int]] = set()
"""Rows that the running scenario has fired; filled by `watched`."""


def fires(*rows: str) -> Callable[[Callable[[], Sim]], Callable[[], Sim]]:
    """This scenario is the reason why these rows count as covered."""

    def register(scenario: Callable[[], Sim]) -> Callable[[], Sim]:
        SCENARIOS[scenario.__name__] = scenario, rows
        return scenario

    return register


def watched(s: Sim) -> Sim:
    watch_rows(s, SEEN)
    return s


@fires(
    "request: idle lookup -> querying []",
    "request: querying grant -> reading []",
    "request: reading read_done -> staged [usable]",
    "request: staged admit -> loading []",
    "request: loading load_ack -> resident []",
    "request: resident transfer -> transferring []",
    "operation: issued take -> running []",
    "operation: running ack -> acked []",
)
def the_whole_way_through() -> Sim:
    s = watched(sim("abcd"))
    stage(s, "r", "abcd")
    s.admit("r")
    answer(s, OpKind.LOAD)
    s.plane.parts.machine.fire(get(s, "r"), Event.TRANSFER)
    assert s.device[s.plane.page_table("r")[3]] == get(s, "r").keys[3]
    return s


@fires("request: querying miss -> idle [not may_poll]", "request: idle admit -> resident []")
def a_miss_without_polls_is_final() -> Sim:
    s = watched(sim(retry_poll_interval_passes=0))
    s.submit("r", "ab")
    look_up(s, "r")
    assert state(s, "r") == "idle"
    assert s.admit("r")
    return s


@fires(
    "request: querying miss -> paced [may_poll]",
    "request: paced lookup -> querying []",
    "request: paced head -> idle []",
)
def a_miss_is_polled_until_the_head_is_reached() -> Sim:
    s = watched(sim(retry_poll_interval_passes=2))
    s.submit("head", "xy")
    s.submit("r", "ab")
    look_up(s, "r")
    assert state(s, "r") == "paced"
    s.tick()
    s.tick()
    assert state(s, "r") == "querying"
    look_up(s, "r")
    s.plane.abort("head")
    s.tick()
    assert state(s, "r") == "idle"
    return s


@fires("request: paced admit -> resident []")
def admission_does_not_wait_for_a_poll() -> Sim:
    s = watched(paced())
    assert s.admit("r")
    return s


@fires("request: recomputing admit -> resident []", "request: idle close -> recomputing []")
def recomputes_without_storage() -> Sim:
    s = watched(sim("ab"))
    s.plane.detach()
    s.submit("r", "ab")
    assert s.admit("r")
    return s


@fires("request: paced declined -> idle []")
def a_poll_that_the_device_has_answered_is_declined() -> Sim:
    s = watched(sim(retry_poll_interval_passes=5))
    s.submit("head", "xy")
    s.submit("r", "ab")
    look_up(s, "r")
    s.submit("twin", "ab")
    look_up(s, "twin")
    assert s.run("twin")
    for _ in range(3):
        assert state(s, "r") == "paced"
        s.tick()
    assert state(s, "r") == "idle", s.plane.explain("r")
    assert get(s, "r").retries == 0
    return s


@fires(
    "request: staged shrank -> refetch [may_refetch]",
    "request: refetch lookup -> querying []",
)
def a_hold_whose_base_left_is_fetched_again() -> Sim:
    s = watched(hold_on_lost_base())
    stats = s.plane.parts.accounts.stats
    assert s.plane.consider(get(s, "r")) is None
    s.tick()
    assert state(s, "r") == "reading", "the end is known: no second look-up"
    assert stats["issued_assumed_stored"] == 1
    read(s, "r")
    assert (get(s, "r").base_pages, get(s, "r").end_pages) == (1, 4)
    return s


@fires("request: refetch declined -> idle []")
def a_refetch_that_the_device_has_answered_is_declined() -> Sim:
    s = watched(refetch())
    s.submit("twin", "abcd", priority=-1)
    assert state(s, "r") == "refetch", "no pass has begun since"
    s.plane.parts.machine.fire(get(s, "twin"), Event.CLOSE)
    assert s.admit("twin")
    s.compute("twin")
    s.tick()
    assert state(s, "r") == "idle"
    assert get(s, "r").retries == 0, "a look-up that could not be issued costs no attempt"
    return s


def _shrink_idle(**changes: Any) -> Sim:
    s = sim(retry_poll_interval_passes=0, **changes)
    make_resident(s, "abcd")
    s.submit("r", "abcdef")
    look_up(s, "r", 0)
    evict(s, 2)
    watched(s)
    s.plane.consider(get(s, "r"))
    return s


@fires("request: idle shrank -> refetch [may_refetch]")
def a_shrunk_base_is_looked_up_once_more() -> Sim:
    s = _shrink_idle()
    assert state(s, "r") == "refetch"
    assert get(s, "r").chances == 1
    return s


@fires("request: idle shrank -> recomputing [not may_refetch]")
def a_shrunk_base_without_retries_is_computed() -> Sim:
    s = _shrink_idle(retry_max_attempts=0)
    assert state(s, "r") == "recomputing"
    return s


def _shrink_paced(**changes: Any) -> Sim:
    s = sim(retry_poll_interval_passes=9, **changes)
    make_resident(s, "abcd")
    s.submit("head", "xy")
    s.submit("r", "abcdef")
    look_up(s, "r", 0)
    assert state(s, "r") == "paced"
    evict(s, 2)
    watched(s)
    s.plane.consider(get(s, "r"))
    return s


@fires("request: paced shrank -> refetch [may_refetch]")
def a_shrunk_base_overtakes_a_poll() -> Sim:
    s = _shrink_paced()
    assert state(s, "r") == "refetch"
    return s


@fires("request: paced shrank -> recomputing [not may_refetch]")
def a_shrunk_base_without_chances_is_computed() -> Sim:
    s = _shrink_paced(park_cap=1)
    assert state(s, "r") == "recomputing"
    return s


@fires("request: staged shrank -> recomputing [not may_refetch]")
def a_lost_hold_without_retries_is_computed() -> Sim:
    s = sim("abcd", anchor_lock_cap=0.0, retry_max_attempts=0)
    make_resident(s, "ab")
    stage(s, "r", "abcd")
    evict(s, 1)
    watched(s)
    s.plane.consider(get(s, "r"))
    assert state(s, "r") == "recomputing"
    assert s.plane.parts.full.staging.used == 0
    return s


@fires("request: staged covered -> idle []")
def a_hold_that_a_sibling_published_is_dropped() -> Sim:
    s = watched(sim("abcd"))
    stage(s, "r", "abcd")
    stage(s, "twin", "abcd")
    assert s.run("twin")
    s.plane.consider(get(s, "r"))
    assert state(s, "r") == "idle"
    assert s.plane.parts.accounts.unfulfilled["device_covered"] == 4
    return s


@fires("request: querying covered -> idle []")
def an_answer_that_a_sibling_has_overtaken_is_dropped() -> Sim:
    s = watched(sim("abcd"))
    s.submit("r", "abcd")
    stage(s, "twin", "abcd")
    assert s.run("twin")
    look_up(s, "r")
    assert state(s, "r") == "idle"
    return s


def _lose_base(**changes: Any) -> Sim:
    s = sim("abcd", **changes)
    make_resident(s, "ab")
    s.submit("r", "abcd")
    evict(s, 1)
    watched(s)
    look_up(s, "r")
    return s


@fires("request: querying base_lost -> refetch [may_refetch]")
def an_answer_without_its_base_is_taken_up_again() -> Sim:
    s = _lose_base()
    assert state(s, "r") == "reading", "the refetch was issued in the same pass"
    return s


@fires("request: querying base_lost -> recomputing [not may_refetch]")
def an_answer_without_its_base_and_without_retries_is_computed() -> Sim:
    s = _lose_base(retry_max_attempts=0)
    assert state(s, "r") == "recomputing"
    return s


@fires("request: querying unservable -> recomputing []")
def a_threshold_beyond_staging_is_unservable() -> Sim:
    s = watched(sim("abcdef", staging_pages=2, prefetch_threshold_tokens=4))
    s.submit("r", "abcdef")
    look_up(s, "r")
    assert state(s, "r") == "recomputing"
    return s


def _park_behind(stored: str, prompt: str, **changes: Any) -> Sim:
    """`big` fills staging with its hold; `r` is parked with a hit of its own."""
    s = Sim(sim(**changes).config, [*chain(*"mnopqrstuvwx"), *chain(*stored)])
    stage(s, "big", "mnopqrstuvwx")
    watched(s)
    s.submit("r", prompt)
    look_up(s, "r")
    assert state(s, "r") == "parked", s.plane.explain("r")
    return s


@fires("request: querying park -> parked []", "request: parked grant -> reading []")
def a_parked_hit_gets_its_turn() -> Sim:
    s = _park_behind("abcd", "abcd")
    s.plane.abort("big")
    s.tick()
    assert state(s, "r") == "reading"
    return s


@fires(
    "request: parked refused -> parked [chances_left]",
    "request: parked refused -> recomputing [not chances_left]",
)
def a_parked_hit_is_refused_until_its_chances_are_used_up() -> Sim:
    s = _park_behind("abcd", "abcd", park_cap=2)
    s.tick(10)
    assert state(s, "r") == "parked"
    s.tick(10)
    assert state(s, "r") == "recomputing"
    assert s.plane.parts.accounts.unfulfilled["host_capacity"] == 4
    return s


def _park_on_base(**changes: Any) -> Sim:
    """`r` is parked with a hit beyond a resident base of two pages."""
    s = Sim(sim(**changes).config, [*chain(*"mnopqrstuvwx"), *chain(*"abcd")])
    make_resident(s, "ab")
    stage(s, "big", "mnopqrstuvwx")
    s.submit("r", "abcd")
    look_up(s, "r")
    assert state(s, "r") == "parked", s.plane.explain("r")
    watched(s)
    return s


@fires("request: parked base_lost -> refetch [may_refetch]")
def a_parked_hit_whose_base_left_is_taken_up_again() -> Sim:
    s = _park_on_base()
    evict(s, 2)
    s.tick(10)
    assert state(s, "r") == "parked", "taken up again in the same pass, from the shorter base"
    assert (get(s, "r").base_pages, get(s, "r").end_pages, get(s, "r").retries) == (0, 4, 1)
    return s


@fires("request: parked base_lost -> recomputing [not may_refetch]")
def a_parked_hit_whose_base_left_without_retries_is_computed() -> Sim:
    s = _park_on_base(retry_max_attempts=0)
    evict(s, 2)
    s.tick(10)
    assert state(s, "r") == "recomputing"
    return s


@fires("request: parked covered -> idle []")
def a_parked_hit_that_a_sibling_computed_is_dropped() -> Sim:
    s = _park_on_base(retry_poll_interval_passes=0)
    s.submit("twin", "abcd")
    look_up(s, "twin", 0)
    assert s.run("twin")
    s.tick(10)
    assert state(s, "r") == "idle"
    return s


@fires("request: reading read_done -> idle [not usable]")
def a_read_that_brings_nothing_is_a_miss() -> Sim:
    s = watched(sim("abcd"))
    s.submit("r", "abcd")
    look_up(s, "r")
    read(s, "r", 0)
    assert state(s, "r") == "idle"
    assert s.plane.parts.accounts.unfulfilled["storage_transfer"] == 4
    return s


@fires("request: querying cut -> paced [may_poll]")
def best_effort_does_not_wait_for_an_answer() -> Sim:
    s = watched(sim("abcd", prefetch_policy=BEST_EFFORT))
    s.submit("r", "abcd")
    assert s.plane.consider(get(s, "r")) is not None
    assert state(s, "r") == "paced"
    return s


@fires("request: querying cut -> idle [not may_poll]")
def best_effort_without_polls_does_not_wait_either() -> Sim:
    s = watched(sim("abcd", prefetch_policy=BEST_EFFORT, retry_poll_interval_passes=0))
    s.submit("r", "abcd")
    assert s.plane.consider(get(s, "r")) is not None
    assert state(s, "r") == "idle"
    return s


@fires("request: parked cut -> refetch [may_refetch]")
def best_effort_keeps_the_known_end_of_a_parked_hit() -> Sim:
    s = _park_behind("abcd", "abcd", prefetch_policy=BEST_EFFORT)
    assert s.plane.consider(get(s, "r")) is None
    assert state(s, "r") == "refetch"
    assert s.plane.parts.retries.pending["r"].hit_end == 4
    return s


@fires("request: parked cut -> recomputing [not may_refetch]")
def best_effort_without_retries_computes_a_parked_hit() -> Sim:
    s = _park_behind("abcd", "abcd", prefetch_policy=BEST_EFFORT, retry_max_attempts=0)
    assert s.plane.consider(get(s, "r")) is not None
    assert state(s, "r") == "recomputing"
    return s


@fires("request: reading cut -> staged [usable]", "operation: running progress -> running []")
def best_effort_uses_what_has_landed() -> Sim:
    s = watched(sim("abcd", prefetch_policy=BEST_EFFORT))
    s.submit("r", "abcd")
    look_up(s, "r")
    s.progress(s.of_kind(OpKind.READ)[0], 3)
    s.tick()
    candidate = s.plane.consider(get(s, "r"))
    assert candidate is not None
    assert candidate.cached_pages == 3
    return s


@fires(
    "request: reading cut -> idle [not usable]",
    "operation: running orphan -> orphaned []",
    "operation: orphaned ack -> acked []",
)
def best_effort_without_bytes_leaves_the_read_alone() -> Sim:
    s = watched(sim("abcd", prefetch_policy=BEST_EFFORT))
    s.submit("r", "abcd")
    look_up(s, "r")
    assert s.plane.consider(get(s, "r")) is not None
    assert state(s, "r") == "idle"
    assert s.plane.parts.full.staging.used == 4, "in quarantine until the read lets go"
    read(s, "r")
    assert s.plane.parts.full.staging.used == 0
    return s


@fires("request: querying deadline -> recomputing []")
def a_lost_look_up_costs_the_deadline() -> Sim:
    s = watched(sim("abcd", prefetch_hard_max_ms=20))
    s.submit("r", "abcd")
    s.tick(19)
    assert state(s, "r") == "querying"
    s.tick(1)
    assert state(s, "r") == "recomputing"
    return s


@fires("request: parked deadline -> recomputing []")
def a_parked_hit_waits_for_storage_too() -> Sim:
    s = _park_behind("abcd", "abcd", prefetch_hard_max_ms=20)
    s.tick(20)
    assert state(s, "r") == "recomputing"
    return s


@fires("request: reading deadline -> staged [usable]")
def the_deadline_keeps_what_has_landed() -> Sim:
    s = watched(sim("abcd", prefetch_hard_max_ms=20))
    s.submit("r", "abcd")
    look_up(s, "r")
    s.progress(s.of_kind(OpKind.READ)[0], 1)
    s.tick(19)
    assert state(s, "r") == "staged"
    assert not get(s, "r").storage_open
    return s


@fires("request: reading deadline -> recomputing [not usable]")
def the_deadline_gives_up_a_read_without_bytes() -> Sim:
    s = watched(sim("abcd", prefetch_hard_max_ms=20))
    s.submit("r", "abcd")
    look_up(s, "r")
    s.tick(19)
    assert state(s, "r") == "recomputing"
    return s


@fires(
    "request: staged defer -> staged [gate_open, defers_left]",
    "request: staged defer -> recomputing [gate_open, not defers_left]",
)
def a_hold_is_refused_until_its_defers_are_used_up() -> Sim:
    s = watched(sim("abcd", max_defers=3))
    stage(s, "r", "abcd")
    for refusals in (1, 2):
        s.plane.defer(s.candidates()[0])
        s.tick(10)
        assert (state(s, "r"), get(s, "r").defers) == ("staged", refusals)
    s.plane.defer(s.candidates()[0])
    assert state(s, "r") == "recomputing"
    assert s.plane.parts.accounts.unfulfilled["device_capacity"] == 4
    return s


@fires(
    "request: loading load_failed -> aborted []",
    "request: resident load_failed -> aborted []",
    "request: transferring load_failed -> aborted []",
)
def a_failed_load_restarts_all_its_readers() -> Sim:
    s = watched(sim("abcd", retry_poll_interval_passes=0))
    stage(s, "r", "abcd")
    assert s.admit("r")
    for rid in ("reader", "sender"):
        s.submit(rid, "abcd")
        assert s.admit(rid)
    s.plane.parts.machine.fire(get(s, "sender"), Event.TRANSFER)
    answer(s, OpKind.LOAD, ok=False)
    assert sorted(s.plane.take_restarted()) == ["r", "reader", "sender"]
    assert s.plane.parts.full.tree.resident == 0
    return s


@fires("operation: issued ack -> acked []")
def an_answer_may_come_before_the_command_was_taken() -> Sim:
    s = watched(sim())
    s.plane.submit("r", 3, chain(*"ab"))
    s.plane.tick([LookupDone(1, 0, True)], 1)
    s.plane.take_commands()
    return s


@fires("operation: issued orphan -> orphaned []")
def an_abort_may_come_before_the_command_was_taken() -> Sim:
    s = watched(sim())
    s.plane.submit("r", 3, chain(*"ab"))
    s.plane.abort("r")
    s.pump()
    return s


@fires("operation: issued lose -> lost []", "operation: orphaned lose -> lost []", "operation: running lose -> lost []")
def a_hash_may_be_lost_at_any_time() -> Sim:
    s = watched(sim())
    s.plane.submit("early", 3)
    s.plane.tick([Lost(1)], 1)
    s.plane.take_commands()
    s.submit("r", "ab", hashed=True)
    s.submit("gone", "ab", hashed=True)
    s.plane.abort("gone")
    for op in s.of_kind(OpKind.HASH):
        s.lose(op)
    s.tick()
    assert state(s, "early") == state(s, "r") == "recomputing", "no keys, no storage"
    return s


@fires(
    "write_span: queued stage -> copying []",
    "write_span: copying copied -> storing []",
    "write_span: storing answered -> stored [usable]",
)
def computed_pages_reach_the_store() -> Sim:
    s = watched(sim())
    make_resident(s, "ab")
    assert set(chain(*"ab")) <= s.stored
    return s


def _computed(prompt: str = "ab", **changes: Any) -> Sim:
    """A prompt has been computed; its write is queued, or staged by the tick that follows."""
    s = watched(sim(retry_poll_interval_passes=0, **changes))
    s.submit("warm", prompt)
    look_up(s, "warm")
    assert s.admit("warm")
    s.compute("warm")
    s.plane.finish("warm")
    return s


@fires("write_span: copying copy_failed -> dropped []")
def a_failed_copy_drops_the_span() -> Sim:
    s = _computed()
    s.tick()
    answer(s, OpKind.OFFLOAD, ok=False)
    assert s.plane.parts.backup.dropped_pages["copy_failed"] == 2
    assert s.plane.parts.full.staging.used == 0
    return s


@fires("write_span: storing answered -> dropped [not usable]")
def a_failed_write_teaches_nothing() -> Sim:
    s = _computed()
    s.tick()
    answer(s, OpKind.OFFLOAD)
    answer(s, OpKind.STORE, pages=0)
    assert s.plane.parts.backup.dropped_pages["store_failed"] == 2
    assert not s.plane.parts.beliefs.believed
    return s


@fires("write_span: queued sweep -> dropped []")
def eviction_does_not_wait_for_queued_writes() -> Sim:
    s = _computed()
    evict(s, 2)
    s.tick()
    assert s.plane.parts.backup.dropped_pages["evicted"] == 2
    return s


@fires("write_span: queued orphaned -> dropped []")
def a_page_without_its_parent_is_not_written() -> Sim:
    s = _computed("abcd", staging_pages=2)
    s.tick()
    answer(s, OpKind.OFFLOAD, ok=False)
    s.settle()
    assert s.plane.parts.backup.dropped_pages["parent_missing"] == 2
    assert not s.stored
    return s


@fires("write_span: queued close -> dropped []")
def a_detach_drops_queued_writes() -> Sim:
    s = _computed()
    s.plane.detach()
    assert s.plane.parts.backup.dropped_pages["detached"] == 2
    return s


@fires("write_span: queued flush -> dropped []")
def a_flush_drops_queued_writes() -> Sim:
    s = _computed()
    s.plane.flush()
    assert s.plane.parts.backup.dropped_pages["flushed"] == 2
    return s


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_fires_the_rows_it_is_for(name: str) -> None:
    SEEN.clear()
    scenario, rows = SCENARIOS[name]
    s = scenario()
    assert s is not None
    s.pump()
    assert set(rows) <= {ALL_ROWS[row] for row in SEEN}
    end_all(s)


def test_every_transition_row_has_a_scenario() -> None:
    claimed = {row for _, rows in SCENARIOS.values() for row in rows}
    claimed |= {row_name(REQUEST_TABLE, row) for _, _, row in END_CASES}
    assert claimed.isdisjoint(UNREACHABLE), "a row that is fired is not unreachable"
    assert claimed | set(UNREACHABLE) == set(ALL_ROWS.values())


# ── rows that change nothing ─────────────────────────────────────────────────────────────────────────


def snapshot(attempt: Attempt) -> dict[str, object]:
    return {name: getattr(attempt, name) for name in Attempt.__slots__ if name != "history"}


def quiet_cells(kind: Kind) -> list[tuple[State, Event]]:
    """Cells of live states in which every row is of this kind."""
    return [
        (at, Event(event.id))
        for at in BUILDERS
        for event in REQUEST_TABLE.events
        if all(row.kind is kind for row in REQUEST_TABLE.cell(at, event.id))
    ]


def _cell_id(value: State | Event) -> str:
    return value.name.lower()


@pytest.mark.parametrize(("at", "event"), quiet_cells(Kind.ERROR), ids=_cell_id)
def test_an_illegal_event_names_itself_and_changes_nothing(at: State, event: Event) -> None:
    s = BUILDERS[at]()
    attempt = get(s, "r")
    before = snapshot(attempt)
    with pytest.raises(IllegalTransition, match="'r'.*" + event.name.lower()):
        s.plane.parts.machine.fire(attempt, event, 1)
    assert snapshot(attempt) == before
    s.check()


@pytest.mark.parametrize(("at", "event"), quiet_cells(Kind.IGNORED), ids=_cell_id)
def test_an_ignored_event_is_counted_and_changes_nothing(at: State, event: Event) -> None:
    s = BUILDERS[at]()
    attempt = get(s, "r")
    before, ignored = snapshot(attempt), s.plane.parts.machine.ignored.get(event.name.lower(), 0)
    s.plane.parts.machine.fire(attempt, event, 1)
    assert snapshot(attempt) == before
    assert s.plane.parts.machine.ignored[event.name.lower()] == ignored + 1
    s.check()


def test_a_hold_is_not_deferred_before_the_gate_opens() -> None:
    s = staged()
    get(s, "r").gate_open = False
    for _ in range(s.config.max_defers + 1):
        s.plane.defer(s.candidates()[0])
    assert (state(s, "r"), get(s, "r").defers) == ("staged", 0)


@pytest.mark.parametrize("event", Event, ids=_cell_id)
@pytest.mark.parametrize("end", ["abort", "finish"])
def test_an_ended_attempt_stays_as_it_is(end: str, event: Event) -> None:
    s = resident()
    attempt = get(s, "r")
    ENDS[end](s)
    before = snapshot(attempt)
    row = REQUEST_TABLE.cell(attempt.state, event)[0]
    if row.kind is Kind.ERROR:
        with pytest.raises(IllegalTransition):
            s.plane.parts.machine.fire(attempt, event)
    else:
        assert row.kind is Kind.IGNORED
        s.plane.parts.machine.fire(attempt, event)
    assert snapshot(attempt) == before


def test_ignored_and_illegal_rows_of_operations_and_spans_change_nothing() -> None:
    """These machines have few cells; every quiet one is fired on a subject that has been put there."""
    for table, subject, fire in _small_machines():
        for row in table.rows:
            if row.kind is Kind.TRANSITION:
                continue
            subject.state = row.source
            if row.kind is Kind.ERROR:
                with pytest.raises(IllegalTransition):
                    fire(row.event)
            else:
                fire(row.event)
            assert subject.state == row.source


def _small_machines() -> list[tuple[Table, Any, Callable[[int], Row]]]:
    s = _computed()
    s.tick()
    parts = s.plane.parts
    op = parts.ops.live[s.of_kind(OpKind.OFFLOAD)[0]]
    span = parts.backup.live[op.span]
    return [
        (OPERATION_TABLE, op, lambda event: parts.ops.machine.fire(op, event)),
        (SPAN_TABLE, span, lambda event: parts.backup.machine.fire(span, event)),
    ]
