"""The life of a write span (computed pages on their way device -> staging -> store), as one table.

A span is queued in the order of publishing and holds nothing while it waits: device eviction never waits
for it, and pages that leave are swept from its tail. When its turn comes and the write share of staging has
room, its device pages are locked and copied (`copying`), then written (`storing`). Staging returns with
the store's answer; what the answer confirms, and only that, is believed to be stored.
"""

from __future__ import annotations

import enum

from hicache_fsm.lifecycle.model import EventDef, RowMaker, StateDef, Table


class SpanState(enum.IntEnum):
    QUEUED = 0
    COPYING = 1
    STORING = 2
    STORED = 3
    DROPPED = 4


class SpanEvent(enum.IntEnum):
    STAGE = 0
    COPIED = 1
    COPY_FAILED = 2
    ANSWERED = 3
    SWEEP = 4
    ORPHANED = 5
    CLOSE = 6
    FLUSH = 7


class Drop(str, enum.Enum):
    """Why a span, or the rest of one, was not written."""

    COPY_FAILED = "copy_failed"
    STORE_FAILED = "store_failed"
    EVICTED = "evicted"
    PARENT_MISSING = "parent_missing"
    BACKLOG = "backlog"
    DETACHED = "detached"
    FLUSHED = "flushed"


def _state(state: SpanState, meaning: str, owns: str = "", may: str = "", final: bool = False) -> StateDef:
    name = state.name.lower()
    return StateDef(state, name, name, meaning, frozenset(owns.split()), frozenset(may.split()), final)


_STATES = (
    _state(SpanState.QUEUED, "waits for its turn; owns nothing"),
    _state(SpanState.COPYING, "device to staging under way", owns="staging lock"),
    _state(SpanState.STORING, "staging to store under way", owns="staging"),
    _state(SpanState.STORED, "answered; what it confirmed is believed", final=True),
    _state(SpanState.DROPPED, "not written; the outcome says why", final=True),
)
_EVENTS = (
    EventDef(SpanEvent.STAGE, "stage", "staging rows granted within the write share"),
    EventDef(SpanEvent.COPIED, "copied", "the device-to-host copy has landed"),
    EventDef(SpanEvent.COPY_FAILED, "copy_failed", "the device-to-host copy has failed or was lost"),
    EventDef(SpanEvent.ANSWERED, "answered", "the store has answered", "leading pages stored"),
    EventDef(SpanEvent.SWEEP, "sweep", "no page of the span is on the device any more"),
    EventDef(SpanEvent.ORPHANED, "orphaned", "the page before it is neither stored nor on its way"),
    EventDef(SpanEvent.CLOSE, "close", "storage is detached"),
    EventDef(SpanEvent.FLUSH, "flush", "the tree and all beliefs are dropped"),
)
_GUARDS = {"usable": "at least one page was stored"}
_EFFECTS = {
    "issue_offload": "lock the pages and send the device-to-host copy",
    "issue_store": "unlock the pages and send the write",
    "return_all": "staging rows and lock return",
    "believe": "the confirmed pages are believed to be stored",
    "count_dropped": "count the pages that were not written, with the row's outcome",
}


def _build() -> Table:
    s, e, t = SpanState, SpanEvent, RowMaker()
    final = (s.STORED, s.DROPPED)
    t.go(e.STAGE, (s.QUEUED,), s.COPYING, "its turn, and room within the share", do=("issue_offload",))
    t.forbid(e.STAGE, (s.COPYING, s.STORING, *final), "a span is staged once")
    t.go(e.COPIED, (s.COPYING,), s.STORING, "the device rows are not needed any more", do=("issue_store",))
    t.forbid(e.COPIED, (s.QUEUED, s.STORING, *final), "no copy of this span is under way")
    t.go(e.COPY_FAILED, (s.COPYING,), s.DROPPED, "nothing usable in staging",
         do=("return_all", "count_dropped"), outcome=Drop.COPY_FAILED)
    t.forbid(e.COPY_FAILED, (s.QUEUED, s.STORING, *final), "no copy of this span is under way")
    t.go(e.ANSWERED, (s.STORING,), s.STORED, "only what the store confirmed is believed", when=("usable",),
         do=("return_all", "believe", "count_dropped"), outcome=Drop.STORE_FAILED)
    t.go(e.ANSWERED, (s.STORING,), s.DROPPED, "a failed write teaches nothing", unless=("usable",),
         do=("return_all", "count_dropped"), outcome=Drop.STORE_FAILED)
    t.forbid(e.ANSWERED, (s.QUEUED, s.COPYING, *final), "no write of this span is under way")
    t.go(e.SWEEP, (s.QUEUED,), s.DROPPED, "eviction does not wait for queued writes",
         do=("count_dropped",), outcome=Drop.EVICTED)
    t.forbid(e.SWEEP, (s.COPYING,), "its pages are locked")
    t.ignore(e.SWEEP, (s.STORING, *final), "the bytes have left the device already")
    t.go(e.ORPHANED, (s.QUEUED,), s.DROPPED, "a page without its parent can never be reached",
         do=("count_dropped",), outcome=Drop.PARENT_MISSING)
    t.forbid(e.ORPHANED, (s.COPYING, s.STORING, *final), "the parent is looked at when the span is staged")
    for event, outcome in ((e.CLOSE, Drop.DETACHED), (e.FLUSH, Drop.FLUSHED)):
        t.go(event, (s.QUEUED,), s.DROPPED, "nothing was started", do=("count_dropped",), outcome=outcome)
        t.ignore(event, (s.COPYING, s.STORING), "what was started is seen through; its answer frees the rows")
        t.ignore(event, final, "already ended")
    return Table("write_span", _STATES, _EVENTS, _GUARDS, _EFFECTS, t.rows, s.QUEUED)


SPAN_TABLE = _build()
