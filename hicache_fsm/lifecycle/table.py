"""The life of a request, as one table. This file is the only source of it.

Theory of operation
===================

A request waits in a queue until the scheduler admits it to a batch. Meanwhile storage may hold KV cache of
its prompt beyond what the device holds. One *attempt* is one stay of a request in the queue and in a batch;
a request that is retracted goes on as a new attempt. The table below moves attempts.

The way in. `lookup` asks storage for the pages beyond the device-resident prefix (the *base*). The answer
is a `miss` (nothing, or less than the threshold) or a hit, which is committed in one step: the base is
matched again, pinned, trimmed and given staging rows (`grant`), or it finds no room and waits its turn
(`park`), or it turns out to be useless (`covered`, `unservable`) or outdated (`base_lost`). A granted hit is
read. What has landed when the read ends, or when it is cut, becomes a *hold* (`staged`) and waits for
admission with its rows and its pin. `admit` copies it to the device.

The way out. Every wait has a bound of its own: look-ups by the retry cap, parking by chances, the time spent
waiting for storage by a deadline, a hold by its refusals (the defer cap). Each bound leads to `recomputing`:
storage is closed for the attempt, which then needs nothing but device room. `abort`, `retract`, `yield`,
`flush`, `reject` and `load_failed` end the attempt from wherever they may strike.

Ownership. A state owns exactly what `StateDef.owns` says (and may own `may_own`); `Machine` checks it after
each transition in debug mode. While bytes move, the rows they touch belong to the operation too: when an
attempt leaves before the acknowledgement, the effect `orphan` or `return_all` passes the rows to the
operation, and they come back with the acknowledgement (quarantine). So nothing is reused early, and an
ended attempt owns nothing at once.

Time. `hold_clock` and `run_clock` keep the deadline's clock running only while storage is awaited
(`querying`, `reading`, `parked`); waiting for device room does not use it up. Two budgets: the policy's, for
the store's answers (`querying`, `reading`), and the hard maximum, for all three; a parked hit waits for room,
not for the store, so that only the hard maximum (and its chances) bound it.

Identity. Completions reach this table only when their operation is the attempt's current one; all others
are counted by the operation table and change nothing here.

What diagrams cannot show: the order in which one pass offers events (completions, deadlines, parked hits,
retries, then admission) is the control plane's, see `hicache_fsm/control/plane.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from hicache_fsm.lifecycle.model import EventDef, RowMaker, StateDef, Table


class State(enum.IntEnum):
    """States of an attempt. Sub-states are flat; `StateDef.parent` groups them."""

    IDLE = 0
    PACED = 1
    REFETCH = 2
    QUERYING = 3
    READING = 4
    PARKED = 5
    STAGED = 6
    RECOMPUTING = 7
    LOADING = 8
    RESIDENT = 9
    TRANSFERRING = 10
    FINISHED = 11
    ABORTED = 12


class Event(enum.IntEnum):
    """What can happen to an attempt."""

    LOOKUP = 0
    MISS = 1
    GRANT = 2
    PARK = 3
    REFUSED = 4
    BASE_LOST = 5
    COVERED = 6
    UNSERVABLE = 7
    READ_DONE = 8
    CUT = 9
    DEADLINE = 10
    HEAD = 11
    EXHAUSTED = 12
    SHRANK = 13
    DEFER = 14
    ADMIT = 15
    LOAD_ACK = 16
    LOAD_FAILED = 17
    TRANSFER = 18
    FINISH = 19
    RETRACT = 20
    YIELD = 21
    ABORT = 22
    FLUSH = 23
    REJECT = 24
    CLOSE = 25
    DECLINED = 26


class Outcome(str, enum.Enum):
    """Why tokens that storage reported were not spliced, or why an attempt was aborted. Names follow the
    labels of SGLang's `storage_prefetch_unfulfilled_tokens_total` where the thing is the same."""

    BELOW_THRESHOLD = "below_threshold"
    HOST_CAPACITY = "host_capacity"
    DEVICE_CAPACITY = "device_capacity"
    DEVICE_COVERED = "device_covered"
    STORAGE_TRANSFER = "storage_transfer"
    DEADLINE = "deadline"
    ANCHOR_LOST = "anchor_lost"
    SHRUNK = "shrunk"
    UNSERVABLE_PREFIX = "unservable_prefix"
    CUT = "cut"
    DETACHED = "detached"
    LOAD_FAILED = "load_failed"
    CLIENT = "aborted"
    RETRACTED = "retracted"
    YIELDED = "yielded"
    FLUSHED = "flushed"
    REJECTED = "rejected"


STAGING = "staging"
PIN = "pin"
DEVICE = "device"
LOCK = "lock"


def _state(state: State, parent: str, meaning: str, owns: str = "", may: str = "", final: bool = False) -> StateDef:
    return StateDef(state, state.name.lower(), parent, meaning, frozenset(owns.split()), frozenset(may.split()), final)


STATES = (
    _state(State.IDLE, "queued", "waiting; nothing is asked of storage, which may be asked again"),
    _state(State.PACED, "queued", "waiting; a look-up missed and another is due in some passes"),
    _state(State.REFETCH, "queued", "waiting; a hit is known and is asked for again in the next pass"),
    _state(State.QUERYING, "prefetching", "a look-up is under way; nothing is owned yet"),
    _state(State.READING, "prefetching", "bytes on their way into staging", owns="staging", may="pin"),
    _state(State.PARKED, "parked", "hit known, no room for it yet; keeps its turn, owns nothing"),
    _state(State.STAGED, "staged", "bytes in staging (the hold), waiting for admission", owns="staging", may="pin"),
    _state(State.RECOMPUTING, "recomputing", "waiting; storage is closed, prefills with what the device holds"),
    _state(State.LOADING, "admitted", "in a batch; its host-to-device copy is not acknowledged", may="device lock"),
    _state(State.RESIDENT, "admitted", "in a batch; all KV it was admitted with is on the device", may="device lock"),
    _state(State.TRANSFERRING, "admitted", "prefilled; KV on its way to a decode engine", may="device lock"),
    _state(State.FINISHED, "finished", "done", final=True),
    _state(State.ABORTED, "aborted", "ended early; the outcome says why", final=True),
)

EVENTS = (
    EventDef(Event.LOOKUP, "lookup", "a look-up is issued, or a known hit is taken up again"),
    EventDef(Event.MISS, "miss", "storage holds nothing, or less than the threshold", "pages found"),
    EventDef(Event.GRANT, "grant", "base pinned (or needs no pin), staging rows allocated"),
    EventDef(Event.PARK, "park", "no room for the hit: it joins the parked queue"),
    EventDef(Event.REFUSED, "refused", "a parked hit had a chance and still found no room"),
    EventDef(Event.BASE_LOST, "base_lost", "at commit, the device no longer holds the base"),
    EventDef(Event.COVERED, "covered", "the device holds everything the hit could bring"),
    EventDef(Event.UNSERVABLE, "unservable", "the hit can never be served by these pools"),
    EventDef(Event.READ_DONE, "read_done", "the read has ended", "leading pages usable"),
    EventDef(Event.CUT, "cut", "best effort: the scheduler has reached the request", "leading pages usable"),
    EventDef(Event.DEADLINE, "deadline", "storage was awaited for too long", "leading pages usable"),
    EventDef(Event.HEAD, "head", "the request is at the head of the waiting queue"),
    EventDef(Event.EXHAUSTED, "exhausted", "a retry is due but the retry cap is used up"),
    EventDef(Event.SHRANK, "shrank", "the device prefix became shorter than the attempt relies on"),
    EventDef(Event.DEFER, "defer", "admission refused the request for capacity"),
    EventDef(Event.ADMIT, "admit", "committed to a batch", "pages loaded from the hold"),
    EventDef(Event.LOAD_ACK, "load_ack", "the host-to-device copy has landed"),
    EventDef(Event.LOAD_FAILED, "load_failed", "a copy that the attempt's rows depend on has failed"),
    EventDef(Event.TRANSFER, "transfer", "prefill disaggregation: KV leaves for the decode engine"),
    EventDef(Event.FINISH, "finish", "the request is complete"),
    EventDef(Event.RETRACT, "retract", "the scheduler takes the request back to its queue"),
    EventDef(Event.YIELD, "yield", "prefill disaggregation: an optimistic prefill gives way"),
    EventDef(Event.ABORT, "abort", "the client no longer wants the request"),
    EventDef(Event.FLUSH, "flush", "the tree is dropped; everything starts anew"),
    EventDef(Event.REJECT, "reject", "the request can never fit"),
    EventDef(Event.CLOSE, "close", "storage closes for this attempt: detached, or its keys are not to be had"),
    EventDef(Event.DECLINED, "declined", "a due retry is not worth a look-up any more: the remainder is too short"),
)

GUARDS = {
    "may_poll": "paced retries are on and their half of the retry cap is not used up",
    "may_refetch": "storage is open to the attempt, and neither the retry cap nor the park cap is used up",
    "usable": "at least one leading page has landed",
    "defers_left": "one more refusal stays below the defer cap",
    "chances_left": "one more chance stays below the park cap",
    "gate_open": "the bootstrap gate is open (always, outside prefill disaggregation)",
}

EFFECTS = {
    "issue_lookup": "send the look-up, unless the end of the hit is known",
    "issue_read": "send the read into the staging rows of the ledger",
    "disarm": "forget the retry entry",
    "arm_poll": "arm a paced retry; never overwrites an immediate one",
    "arm_refetch": "arm an immediate retry with the known end",
    "run_clock": "start or resume the deadline's clock, with the budget of the new state",
    "hold_clock": "stop the deadline's clock, keeping what is left",
    "orphan": "let the running operation go on without the attempt; rows it touches go with it",
    "keep_landed": "keep the landed rows as the hold; the others leave with the read, or return",
    "join_parked": "take the last place in the parked queue",
    "leave_parked": "leave the parked queue",
    "return_hold": "give staging rows and pin back",
    "spend_hold": "staging rows pass to the load, the pin returns",
    "settle": "close the found tokens with the row's outcome",
    "close_storage": "no further look-up in this attempt",
    "count_defer": "one refusal more",
    "count_chance": "one chance more",
    "leave_queue": "leave the waiting queue, its watches and its retry entry",
    "return_all": "walk the ledger: everything owned returns or passes to the operation that touches it",
    "zero_retries": "the retry count of the request starts again",
}

S, E = State, Event
WAITING = (S.IDLE, S.PACED, S.REFETCH, S.QUERYING, S.READING, S.PARKED, S.STAGED, S.RECOMPUTING)
ADMITTED = (S.LOADING, S.RESIDENT, S.TRANSFERRING)
FINAL = (S.FINISHED, S.ABORTED)
LIVE = (*WAITING, *ADMITTED)
ALL = tuple(State)
TIMED = (S.QUERYING, S.READING, S.PARKED)
"""States in which storage is awaited and the deadline's clock runs."""
CANDIDATES = (S.IDLE, S.PACED, S.STAGED, S.RECOMPUTING)
"""States from which admission may be tried at once."""


def _but(states: Sequence[State], *without: State) -> tuple[State, ...]:
    return tuple(s for s in states if s not in without)


def _lookup_rows(t: RowMaker) -> None:
    t.go(E.LOOKUP, (S.IDLE,), S.QUERYING, "the prompt may be in storage beyond what the device holds",
         do=("disarm", "run_clock", "issue_lookup"), topic="lookup")
    t.go(E.LOOKUP, (S.PACED,), S.QUERYING, "a due poll, or a shrunk prefix, asks again",
         do=("disarm", "run_clock", "issue_lookup"), topic="retry")
    t.go(E.LOOKUP, (S.REFETCH,), S.QUERYING, "the known hit is taken up again from the present base",
         do=("disarm", "run_clock", "issue_lookup"), topic="retry")
    t.forbid(E.LOOKUP, (S.QUERYING, S.READING, S.PARKED, S.STAGED), "one look-up or hold at a time")
    t.forbid(E.LOOKUP, (S.RECOMPUTING,), "storage is closed for this attempt")
    t.forbid(E.LOOKUP, (*ADMITTED, *FINAL), "the attempt no longer waits")

    t.go(E.MISS, (S.QUERYING,), S.PACED, "an earlier turn's write may not have landed yet: ask again, paced",
         when=("may_poll",), do=("hold_clock", "settle", "arm_poll"), outcome=Outcome.BELOW_THRESHOLD, topic="retry")
    t.go(E.MISS, (S.QUERYING,), S.IDLE, "no poll is left; a shrunk prefix may still ask",
         unless=("may_poll",), do=("hold_clock", "settle"), outcome=Outcome.BELOW_THRESHOLD, topic="lookup")
    t.forbid(E.MISS, _but(ALL, S.QUERYING), "no look-up of this attempt is under way")


def _commit_rows(t: RowMaker) -> None:
    t.go(E.GRANT, (S.QUERYING,), S.READING, "room for the whole hit", do=("issue_read",), topic="load")
    t.go(E.GRANT, (S.PARKED,), S.READING, "its turn, and room for the whole hit",
         do=("leave_parked", "hold_clock", "issue_read", "run_clock"), topic="load")
    t.forbid(E.GRANT, _but(ALL, S.QUERYING, S.PARKED), "no committed hit waits for room")

    t.go(E.PARK, (S.QUERYING,), S.PARKED, "a full hit is worth waiting for; turns are kept in order",
         do=("hold_clock", "join_parked", "run_clock"), topic="load")
    t.forbid(E.PARK, _but(ALL, S.QUERYING), "only a fresh hit can join the parked queue")

    t.go(E.REFUSED, (S.PARKED,), S.PARKED, "something changed, but not enough",
         when=("chances_left",), do=("count_chance",), topic="bounds")
    t.go(E.REFUSED, (S.PARKED,), S.RECOMPUTING, "the park cap: waiting longer costs more than computing",
         unless=("chances_left",), do=("leave_parked", "hold_clock", "settle", "close_storage"),
         outcome=Outcome.HOST_CAPACITY, topic="bounds")
    t.forbid(E.REFUSED, _but(ALL, S.PARKED), "only parked hits are refused")

    for source, do in ((S.QUERYING, ()), (S.PARKED, ("leave_parked",))):
        t.go(E.BASE_LOST, (source,), S.REFETCH, "the bytes are in storage, only their base has moved",
             when=("may_refetch",), do=(*do, "hold_clock", "settle", "arm_refetch"), outcome=Outcome.ANCHOR_LOST,
             topic="retry")
        t.go(E.BASE_LOST, (source,), S.RECOMPUTING, "a cap is reached: a base that keeps moving is not chased for ever",
             unless=("may_refetch",), do=(*do, "hold_clock", "settle", "close_storage"), outcome=Outcome.ANCHOR_LOST,
             topic="bounds")
        t.go(E.COVERED, (source,), S.IDLE, "a sibling published the span; a later shrink may ask again",
             do=(*do, "hold_clock", "settle"), outcome=Outcome.DEVICE_COVERED, topic="load")
        t.go(E.UNSERVABLE, (source,), S.RECOMPUTING, "waiting cannot help",
             do=(*do, "hold_clock", "settle", "close_storage"), outcome=Outcome.UNSERVABLE_PREFIX, topic="bounds")
    t.go(E.COVERED, (S.STAGED,), S.IDLE, "a sibling published the span while the hold waited",
         do=("return_hold", "settle"), outcome=Outcome.DEVICE_COVERED, topic="load")
    t.forbid(E.BASE_LOST, _but(ALL, S.QUERYING, S.PARKED), "only a hit being committed looks for its base")
    t.forbid(E.COVERED, _but(ALL, S.QUERYING, S.PARKED, S.STAGED), "nothing fetched could be covered")
    t.forbid(E.UNSERVABLE, _but(ALL, S.QUERYING, S.PARKED), "only a hit being committed can be unservable")


def _read_rows(t: RowMaker) -> None:
    t.go(E.READ_DONE, (S.READING,), S.STAGED, "the longest common run of pages is usable",
         when=("usable",), do=("hold_clock", "keep_landed"), outcome=Outcome.STORAGE_TRANSFER, topic="load")
    t.go(E.READ_DONE, (S.READING,), S.IDLE, "the store promised what it could not deliver",
         unless=("usable",), do=("hold_clock", "return_hold", "settle"), outcome=Outcome.STORAGE_TRANSFER,
         topic="load")
    t.forbid(E.READ_DONE, _but(ALL, S.READING), "no read of this attempt is under way")

    t.go(E.CUT, (S.QUERYING,), S.PACED, "the answer is not waited for, but may be wanted later",
         when=("may_poll",), do=("hold_clock", "orphan", "arm_poll"), outcome=Outcome.CUT, topic="cut")
    t.go(E.CUT, (S.QUERYING,), S.IDLE, "the answer is not waited for",
         unless=("may_poll",), do=("hold_clock", "orphan"), outcome=Outcome.CUT, topic="cut")
    t.go(E.CUT, (S.PARKED,), S.REFETCH, "the end of the hit is known and not thrown away",
         when=("may_refetch",), do=("leave_parked", "hold_clock", "settle", "arm_refetch"), outcome=Outcome.CUT,
         topic="cut")
    t.go(E.CUT, (S.PARKED,), S.RECOMPUTING, "no retry is left to take the hit up again",
         unless=("may_refetch",), do=("leave_parked", "hold_clock", "settle", "close_storage"), outcome=Outcome.CUT,
         topic="cut")
    t.go(E.CUT, (S.READING,), S.STAGED, "what has landed is used",
         when=("usable",), do=("hold_clock", "keep_landed"), outcome=Outcome.CUT, topic="cut")
    t.go(E.CUT, (S.READING,), S.IDLE, "nothing has landed yet",
         unless=("usable",), do=("hold_clock", "orphan", "return_hold", "settle"), outcome=Outcome.CUT, topic="cut")
    t.ignore(E.CUT, (S.IDLE, S.PACED, S.REFETCH, S.STAGED, S.RECOMPUTING), "nothing is awaited")
    t.forbid(E.CUT, (*ADMITTED, *FINAL), "the attempt no longer waits")

    t.go(E.DEADLINE, (S.QUERYING,), S.RECOMPUTING, "a lost answer must not cost more than the deadline",
         do=("orphan", "hold_clock", "settle", "close_storage"), outcome=Outcome.DEADLINE, topic="bounds")
    t.go(E.DEADLINE, (S.PARKED,), S.RECOMPUTING, "parking is waiting for storage too",
         do=("leave_parked", "hold_clock", "settle", "close_storage"), outcome=Outcome.DEADLINE, topic="bounds")
    t.go(E.DEADLINE, (S.READING,), S.STAGED, "the usable part is kept",
         when=("usable",), do=("hold_clock", "keep_landed", "close_storage"), outcome=Outcome.DEADLINE,
         topic="bounds")
    t.go(E.DEADLINE, (S.READING,), S.RECOMPUTING, "nothing has landed in time",
         unless=("usable",), do=("hold_clock", "orphan", "return_hold", "settle", "close_storage"),
         outcome=Outcome.DEADLINE, topic="bounds")
    t.forbid(E.DEADLINE, _but(ALL, *TIMED), "the clock runs only while storage is awaited")


def _retry_rows(t: RowMaker) -> None:
    t.go(E.HEAD, (S.PACED,), S.IDLE, "the head is never delayed by a speculative miss",
         do=("disarm",), topic="retry")
    t.ignore(E.HEAD, _but(WAITING, S.PACED), "only a paced poll is speculative; an armed refetch is kept")
    t.forbid(E.HEAD, (*ADMITTED, *FINAL), "the attempt is not in the queue")

    t.go(E.EXHAUSTED, (S.PACED, S.REFETCH), S.RECOMPUTING, "the retry cap is used up",
         do=("disarm", "close_storage"), topic="bounds")
    t.forbid(E.EXHAUSTED, _but(ALL, S.PACED, S.REFETCH), "no retry is armed")

    t.go(E.DECLINED, (S.PACED, S.REFETCH), S.IDLE, "the device holds nearly everything; costs no attempt",
         do=("disarm",), topic="retry")
    t.forbid(E.DECLINED, _but(ALL, S.PACED, S.REFETCH), "no retry is armed")

    t.go(E.SHRANK, (S.IDLE, S.PACED), S.REFETCH, "what left the device may be in storage: costs a chance, for the "
         "look-up may be declined", when=("may_refetch",), do=("count_chance", "arm_refetch"), topic="retry")
    t.go(E.SHRANK, (S.IDLE, S.PACED), S.RECOMPUTING, "a cap is reached: goes ahead with what is left",
         unless=("may_refetch",), do=("disarm", "close_storage"), topic="bounds")
    t.go(E.SHRANK, (S.STAGED,), S.REFETCH, "the hold's base is gone; its end is known",
         when=("may_refetch",), do=("return_hold", "settle", "arm_refetch"), outcome=Outcome.SHRUNK, topic="retry")
    t.go(E.SHRANK, (S.STAGED,), S.RECOMPUTING, "the hold's base is gone, and storage closed or a cap reached",
         unless=("may_refetch",), do=("return_hold", "settle", "close_storage"), outcome=Outcome.SHRUNK,
         topic="bounds")
    t.ignore(E.SHRANK, (S.REFETCH, *TIMED), "the base is matched again when the hit is committed or read")
    t.ignore(E.SHRANK, (S.RECOMPUTING,), "storage is closed; admission matches again")
    t.forbid(E.SHRANK, (*ADMITTED, *FINAL), "the prefix of an admitted request is locked")


def _admission_rows(t: RowMaker) -> None:
    t.go(E.DEFER, (S.STAGED,), S.STAGED, "capacity may come back",
         when=("gate_open", "defers_left"), do=("count_defer",), topic="bounds")
    t.go(E.DEFER, (S.STAGED,), S.RECOMPUTING, "the defer cap: the hold must not block staging for ever",
         when=("gate_open",), unless=("defers_left",), do=("return_hold", "settle", "close_storage"),
         outcome=Outcome.DEVICE_CAPACITY, topic="bounds")
    t.ignore(E.DEFER, (S.STAGED,), "nothing is deferred before the bootstrap gate opens", unless=("gate_open",))
    t.ignore(E.DEFER, (S.IDLE, S.PACED, S.RECOMPUTING), "no hold is kept from others while it waits")
    t.forbid(E.DEFER, (S.REFETCH, S.QUERYING, S.READING, S.PARKED), "not a candidate for admission")
    t.forbid(E.DEFER, (*ADMITTED, *FINAL), "the attempt no longer waits")

    t.go(E.ADMIT, (S.STAGED,), S.LOADING, "the hold goes to the device, the rest is computed",
         do=("leave_queue", "spend_hold"), topic="admission")
    t.go(E.ADMIT, (S.IDLE, S.PACED, S.RECOMPUTING), S.RESIDENT, "goes on with what the device holds",
         do=("leave_queue",), topic="admission")
    t.forbid(E.ADMIT, (S.REFETCH, S.QUERYING, S.READING, S.PARKED), "not a candidate for admission")
    t.forbid(E.ADMIT, (*ADMITTED, *FINAL), "the attempt no longer waits")

    t.go(E.LOAD_ACK, (S.LOADING,), S.RESIDENT, "the copy has landed", topic="admission")
    t.forbid(E.LOAD_ACK, _but(ALL, S.LOADING), "no load of this attempt is under way")
    t.go(E.TRANSFER, (S.RESIDENT,), S.TRANSFERRING, "prefill is complete", topic="admission")
    t.forbid(E.TRANSFER, _but(ALL, S.RESIDENT), "only resident KV can be sent")


def _ending_rows(t: RowMaker) -> None:
    t.go(E.FINISH, ADMITTED, S.FINISHED, "everything asked for was produced", do=("return_all",), topic="ending")
    t.forbid(E.FINISH, WAITING, "a request that was not admitted has produced nothing; abort it instead")

    t.go(E.LOAD_FAILED, ADMITTED, S.ABORTED, "its rows hold no usable bytes; the request goes on as a new attempt",
         do=("return_all",), outcome=Outcome.LOAD_FAILED, topic="ending")
    t.forbid(E.LOAD_FAILED, WAITING, "a waiting attempt reads no rows")
    t.go(E.YIELD, ADMITTED, S.ABORTED, "gives its rows to requests that can go on",
         do=("return_all",), outcome=Outcome.YIELDED, topic="ending")
    t.forbid(E.YIELD, WAITING, "only an admitted request can give way")
    t.go(E.REJECT, WAITING, S.ABORTED, "no pool of this size will ever hold it",
         do=("leave_queue", "orphan", "return_all", "settle"), outcome=Outcome.REJECTED, topic="ending")
    t.forbid(E.REJECT, ADMITTED, "an admitted request fits")

    for event, outcome, because, extra in (
        (E.ABORT, Outcome.CLIENT, "the client has gone", ()),
        (E.RETRACT, Outcome.RETRACTED, "a new attempt takes over, with a fresh retry count", ("zero_retries",)),
        (E.FLUSH, Outcome.FLUSHED, "KV of the old epoch must not be used", ()),
    ):
        t.go(event, WAITING, S.ABORTED, because, do=("leave_queue", "orphan", "return_all", "settle", *extra),
             outcome=outcome, topic="ending")
        t.go(event, ADMITTED, S.ABORTED, because, do=("return_all", *extra), outcome=outcome, topic="ending")

    for event in (E.FINISH, E.LOAD_FAILED, E.YIELD, E.REJECT, E.ABORT, E.RETRACT, E.FLUSH):
        t.ignore(event, FINAL, "already ended; ends in any order give the same result")

    t.go(E.CLOSE, (S.IDLE,), S.RECOMPUTING, "nothing more is asked of storage", do=("close_storage",), topic="close")
    t.go(E.CLOSE, (S.PACED, S.REFETCH), S.RECOMPUTING, "the armed retry has nobody to ask",
         do=("disarm", "close_storage"), topic="close")
    t.go(E.CLOSE, (S.QUERYING,), S.RECOMPUTING, "the answer is not waited for",
         do=("orphan", "hold_clock", "settle", "close_storage"), outcome=Outcome.DETACHED, topic="close")
    t.go(E.CLOSE, (S.PARKED,), S.RECOMPUTING, "the hit cannot be read any more",
         do=("leave_parked", "hold_clock", "settle", "close_storage"), outcome=Outcome.DETACHED, topic="close")
    t.go(E.CLOSE, (S.READING,), S.RECOMPUTING, "the read is given up; its rows return with its acknowledgement",
         do=("hold_clock", "orphan", "return_hold", "settle", "close_storage"), outcome=Outcome.DETACHED,
         topic="close")
    t.go(E.CLOSE, (S.STAGED,), S.STAGED, "the bytes are ours already; nothing more is asked", do=("close_storage",),
         topic="close")
    t.ignore(E.CLOSE, (S.RECOMPUTING,), "already closed")
    t.ignore(E.CLOSE, (*ADMITTED, *FINAL), "storage is not needed any more")


def _build() -> Table:
    rows = RowMaker()
    for part in (_lookup_rows, _commit_rows, _read_rows, _retry_rows, _admission_rows, _ending_rows):
        part(rows)
    return Table("request", STATES, EVENTS, GUARDS, EFFECTS, rows.rows, State.IDLE)


REQUEST_TABLE = _build()
