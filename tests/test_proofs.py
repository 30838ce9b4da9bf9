"""The proofs about the request table hold, are about something, notice faults, and describe the real code.

The last part compares the proof's meaning of each effect with what the control plane does, on every transition of
long random runs: the ledger after `Machine.fire` must be the one that the model computes from the ledger before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from hicache_fsm.config import CacheConfig
from hicache_fsm.control.parts import Parts
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.machine import Machine
from hicache_fsm.lifecycle.model import Kind, Row
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.table import REQUEST_TABLE, TIMED, WAITING, Event, State
from spec import proof_model as model
from spec import proofs
from spec.wander import wander
from tests.test_row_coverage import BUILDERS, END_CASES, ENDS, SCENARIOS

ROWS = proofs.moves()
NEVER_TAKEN = {
    "paced exhausted -> recomputing []": "a poll is armed only below the cap, and only issuing it counts",
    "refetch exhausted -> recomputing []": "a refetch is armed only below the cap, and only issuing it counts",
}


# ── the proofs ───────────────────────────────────────────────────────────────────────────────────────


def test_every_row_keeps_the_invariant_conserves_and_lowers_the_rank() -> None:
    assert proofs.failures(ROWS) == []


def test_every_waiting_state_has_an_owed_event_that_moves_it() -> None:
    assert proofs.not_owed() == []
    assert set(proofs.OWED) == set(WAITING)


def test_the_answer_to_an_orphan_returns_its_rows() -> None:
    assert proofs.orphan_answered() == []


def test_every_row_can_be_taken_except_those_that_are_explained() -> None:
    assert set(proofs.unreachable(ROWS)) == set(NEVER_TAKEN)


def test_the_rank_bounds_the_documented_number_of_chances() -> None:
    """`docs/termination.md`: look-ups, chances and defers are what an attempt can spend."""
    config = CacheConfig()
    bound = proofs.largest_rank(config.retry_max_attempts, config.max_defers, config.park_cap)
    assert bound == 7 * (1 + 8 + 1024 + 32) + 2


# ── the model covers the table ───────────────────────────────────────────────────────────────────────


def test_every_guard_and_effect_of_the_table_has_a_meaning_and_no_other() -> None:
    assert set(model.GUARDS) == set(REQUEST_TABLE.guards)
    assert set(model.EFFECTS) == set(REQUEST_TABLE.effects)


def test_every_transition_row_of_a_waiting_state_is_proved() -> None:
    waiting = {row.id for row in REQUEST_TABLE.rows if row.kind is Kind.TRANSITION and row.source in WAITING}
    assert waiting <= {row.id for row in ROWS}
    assert {State(REQUEST_TABLE.rows[i].source) for i in waiting} == set(WAITING)


# ── the proofs notice faults ─────────────────────────────────────────────────────────────────────────


def _row(source: State, event: Event, target: State) -> Row:
    rows = [r for r in ROWS if (r.source, r.event, r.target) == (source, event, target)]
    assert len(rows) == 1, f"{len(rows)} rows {source.name} {event.name} {target.name}"
    return rows[0]


def _without(effect: str) -> Callable[[Row], Row]:
    def change(row: Row) -> Row:
        assert effect in row.effects, f"{proofs.describe(row)} has no {effect}"
        return replace(row, effects=tuple(e for e in row.effects if e != effect))

    return change


def _ungarded(row: Row) -> Row:
    assert row.when
    return replace(row, when=())


def _to(target: State) -> Callable[[Row], Row]:
    return lambda row: replace(row, target=target)


S, E = State, Event
MUTANTS = {
    "a refusal is not counted": (S.STAGED, E.DEFER, S.STAGED, _without("count_defer"), "rank"),
    "a chance is not counted": (S.PARKED, E.REFUSED, S.PARKED, _without("count_chance"), "rank"),
    "a shrink costs nothing": (S.IDLE, E.SHRANK, S.REFETCH, _without("count_chance"), "rank"),
    "defers have no cap": (S.STAGED, E.DEFER, S.STAGED, _ungarded, "invariant caps"),
    "chances have no cap": (S.PARKED, E.REFUSED, S.PARKED, _ungarded, "invariant caps"),
    "polls have no cap": (S.QUERYING, E.MISS, S.PACED, _ungarded, "invariant armed"),
    "refetches have no cap": (S.PARKED, E.BASE_LOST, S.REFETCH, _ungarded, "invariant armed"),
    "a dropped hold keeps its rows": (S.STAGED, E.COVERED, S.IDLE, _without("return_hold"), "invariant staging"),
    "a cut read keeps its pin": (S.READING, E.CUT, S.IDLE, _without("return_hold"), "invariant pin"),
    "a cut read does not pass its rows on": (S.READING, E.CUT, S.IDLE, _without("orphan"), "invariant operation"),
    "a detach does not pass rows on": (S.READING, E.CLOSE, S.RECOMPUTING, _without("orphan"), "invariant operation"),
    "found tokens are forgotten": (S.PARKED, E.COVERED, S.IDLE, _without("settle"), "invariant tokens"),
    "the deadline leaves storage open": (
        S.PARKED, E.DEADLINE, S.RECOMPUTING, _without("close_storage"), "invariant closed",
    ),
    "the clock keeps running": (S.READING, E.READ_DONE, S.STAGED, _without("hold_clock"), "invariant clock"),
    "the clock is not started": (S.PACED, E.LOOKUP, S.QUERYING, _without("run_clock"), "invariant clock"),
    "the poll stays armed": (S.PACED, E.HEAD, S.IDLE, _without("disarm"), "invariant armed"),
    "the refetch is not armed": (S.STAGED, E.SHRANK, S.REFETCH, _without("arm_refetch"), "invariant armed"),
    "a granted hit stays parked": (S.PARKED, E.GRANT, S.READING, _without("leave_parked"), "invariant parked"),
    "a parked hit has no turn": (S.QUERYING, E.PARK, S.PARKED, _without("join_parked"), "invariant parked"),
    "a load leaves rows behind": (S.STAGED, E.ADMIT, S.LOADING, _without("spend_hold"), "invariant staging"),
    "an admitted request still waits": (S.IDLE, E.ADMIT, S.RESIDENT, _without("leave_queue"), "invariant queue"),
    "a finished request keeps pages": (S.RESIDENT, E.FINISH, S.FINISHED, _without("return_all"), "invariant device"),
    "an aborted hold keeps its rows": (S.STAGED, E.ABORT, S.ABORTED, _without("return_all"), "invariant staging"),
    "a declined poll asks at once": (S.PACED, E.DECLINED, S.IDLE, _to(S.QUERYING), "rank"),
    "a miss reads": (S.QUERYING, E.MISS, S.IDLE, _to(S.READING), "invariant staging"),
    "a read is not sent": (S.QUERYING, E.GRANT, S.READING, _without("issue_read"), "invariant operation"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_in_a_row_is_refuted(name: str) -> None:
    source, event, target, change, expected = MUTANTS[name]
    found = proofs.failures([change(_row(source, event, target))])
    assert any(expected in text for text in found), found


def test_a_look_up_that_costs_no_retry_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "after", lambda event, before, w: w)
    assert any("rank" in text for text in proofs.failures([_row(S.REFETCH, E.LOOKUP, S.QUERYING)]))


@pytest.mark.parametrize(
    ("effect", "row", "expected"),
    [
        ("return_hold", (S.STAGED, E.COVERED, S.IDLE), "conserved staging rows"),
        ("keep_landed", (S.READING, E.READ_DONE, S.STAGED), "conserved found tokens"),
        ("return_all", (S.RESIDENT, E.FINISH, S.FINISHED), "conserved device pages"),
    ],
)
def test_an_effect_that_gives_back_one_too_few_is_refuted(
    effect: str, row: tuple[State, Event, State], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = model.EFFECTS[effect]
    wrong = {
        "return_hold": lambda w, a: real(w, a).but(free=w.free + w.staging - 1),
        "keep_landed": lambda w, a: real(w, a).but(closed_tokens=w.closed_tokens),
        "return_all": lambda w, a: real(w, a).but(dfree=w.dfree),
    }[effect]
    monkeypatch.setitem(model.EFFECTS, effect, wrong)
    assert any(expected in text for text in proofs.failures([_row(*row)]))


# ── the model says what the code does ────────────────────────────────────────────────────────────────


def measure(parts: Parts, attempt: Attempt) -> dict[str, int | bool]:
    """The names of the model, read off the real books. Tokens in pages."""
    op = parts.ops.live.get(attempt.op)
    kinds = {OpKind.LOOKUP: model.LOOKUP_OP, OpKind.READ: model.READ_OP, OpKind.LOAD: model.LOAD_OP}
    entry = parts.retries.pending.get(attempt.rid)
    page = parts.config.page_size
    others = [a for a in parts.attempts if a is not attempt]
    spans = parts.backup.live.values()
    return {
        "state": int(attempt.state), "open": attempt.storage_open, "ret": attempt.retries, "defers": attempt.defers,
        "chances": attempt.chances,
        "armed": 0 if entry is None else model.REFETCH if entry.immediate else model.POLL,
        "timed": attempt.slot in parts.agenda.due, "joined": attempt.slot in parts.parked.order,
        "waits": parts.waiting.place(attempt.rid) is not None,
        "op": 0 if op is None else kinds.get(OpKind(op.kind), 0), "rows": len(op.rows) if op else 0,
        "got": op.progress if op else 0, "staging": len(attempt.staging), "pin": attempt.pin_tokens,
        "device": len(attempt.device), "lock": bool(attempt.lock_node), "unresolved": attempt.unresolved // page,
        "free": parts.full.staging.available, "op_staging": sum(len(o.staging) for o in parts.ops.live.values()),
        "others_staging": sum(len(a.staging) for a in others) + sum(len(s.staging) for s in spans),
        "pinned": parts.full.pinned.value, "others_pinned": sum(a.pin_tokens for a in others),
        "dfree": parts.full.device.available, "tree": parts.full.tree.resident,
        "others_device": sum(len(a.device) for a in others) + sum(len(o.device) for o in parts.ops.live.values()),
        "found": parts.accounts.found // page,
        "op_unresolved": sum(o.unresolved for o in parts.ops.live.values()) // page,
        "closed_tokens": (parts.accounts.spliced + sum(parts.accounts.unfulfilled.values())) // page,
        "others_unresolved": sum(a.unresolved for a in others) // page,
        "retry_cap": parts.config.retry_max_attempts,
        "poll_cap": parts.config.retry_max_attempts - parts.config.retry_max_attempts // 2,
        "defer_cap": parts.config.max_defers, "park_cap": parts.config.park_cap,
        "interval": parts.config.retry_poll_interval_passes,
        "staging_total": parts.config.staging_pages, "pin_cap": parts.config.pin_cap_tokens,
        "device_total": parts.config.device_pages,
    }  # fmt: skip


@contextmanager
def compared(seen: set[int]) -> Iterator[None]:
    """While open, every transition of a request is computed by the model too, and the results compared. `fresh` is
    the proof's own memory of the first look-up; `rows` and `got` mean nothing without a read."""
    real = Machine.fire

    def fire(machine: Machine[Attempt], subject: Attempt, event: int, argument: int = 0) -> Row:
        parts = getattr(machine.listener, "__self__", None)  # the listener is a method of the parts
        if not isinstance(parts, Parts):
            return real(machine, subject, event, argument)
        before = model.World({**measure(parts, subject), "fresh": False, "assumed": subject.end_pages > 0})
        row = real(machine, subject, event, argument)
        if row.kind is not Kind.TRANSITION:
            return row
        seen.add(row.id)
        assert model.applies(row, before, argument), f"{proofs.describe(row)}: the model's guards say otherwise"
        expected = model.run_effects(row, before, argument)
        got = measure(parts, subject)
        skipped = {"fresh"} if got["op"] == model.READ_OP else {"fresh", "rows", "got"}
        wrong = {k: (v, expected.values[k]) for k, v in got.items() if k not in skipped and v != expected.values[k]}
        assert not wrong, f"{proofs.describe(row)}: code and model differ: {wrong}"
        falls = proofs.rank(model.World({**got, "fresh": False})) < proofs.rank(before)
        assert falls or event == Event.LOOKUP or (row.source, row.event) in proofs.REPEATABLE, proofs.describe(row)
        assert all(proofs.conserved(model.World({**got, "fresh": False})).values()), proofs.describe(row)
        return row

    Machine.fire = fire  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Machine.fire = real  # type: ignore[method-assign]


def test_the_model_computes_what_the_control_plane_does() -> None:
    seen: set[int] = set()
    with compared(seen):
        for seed in range(120):
            wander(seed)
        for scenario, _ in SCENARIOS.values():
            scenario()
        for at, end, _ in END_CASES:
            ENDS[end](BUILDERS[at]())
    missing = {proofs.describe(row) for row in ROWS if row.id not in seen and row.source in WAITING}
    assert missing == NOT_MET


NOT_MET = {
    *NEVER_TAKEN,
    "parked unservable -> recomputing []",  # a pool that cannot hold a threshold's worth parks nobody
}


def test_timed_states_are_those_in_which_the_model_runs_the_clock() -> None:
    assert {State.QUERYING, State.READING, State.PARKED} == set(TIMED)
