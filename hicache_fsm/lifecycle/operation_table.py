"""The life of an asynchronous operation (hash, look-up, read, load, offload, store), as one table.

An operation is *issued* when its command enters the outbox and *running* when the shell has taken it. Its
owner (an attempt or a write span) may leave at any moment; the operation is then *orphaned*: rows it may
still touch belong to it until its final completion (*quarantine*). There is exactly one final completion,
`ack` or `lose`; anything after it changes nothing.
"""

from __future__ import annotations

import enum

from hicache_fsm.lifecycle.model import EventDef, RowMaker, StateDef, Table


class OpState(enum.IntEnum):
    ISSUED = 0
    RUNNING = 1
    ORPHANED = 2
    ACKED = 3
    LOST = 4


class OpEvent(enum.IntEnum):
    TAKE = 0
    PROGRESS = 1
    ORPHAN = 2
    ACK = 3
    LOSE = 4


class OpKind(enum.IntEnum):
    """What an operation does; see `hicache_fsm.ports` for the rows it touches."""

    HASH = 0
    LOOKUP = 1
    READ = 2
    LOAD = 3
    OFFLOAD = 4
    STORE = 5


def _state(state: OpState, meaning: str, may: str = "", final: bool = False) -> StateDef:
    name = state.name.lower()
    return StateDef(state, name, name, meaning, frozenset(), frozenset(may.split()), final)


_STATES = (
    _state(OpState.ISSUED, "in the outbox", may="staging device lock"),
    _state(OpState.RUNNING, "taken by the shell", may="staging device lock"),
    _state(OpState.ORPHANED, "its owner has left; rows it may touch are in quarantine", may="staging device lock"),
    _state(OpState.ACKED, "answered; owns nothing", final=True),
    _state(OpState.LOST, "its executor is gone; owns nothing", final=True),
)
_EVENTS = (
    EventDef(OpEvent.TAKE, "take", "the shell takes the command from the outbox"),
    EventDef(OpEvent.PROGRESS, "progress", "more leading pages have landed", "pages"),
    EventDef(OpEvent.ORPHAN, "orphan", "the owner leaves before the answer"),
    EventDef(OpEvent.ACK, "ack", "the final answer"),
    EventDef(OpEvent.LOSE, "lose", "there will be no answer, and the rows are not touched any more"),
)
_EFFECTS = {"cancel": "tell the shell that the result is not wanted", "return_rows": "everything owned returns"}


def _build() -> Table:
    s, e, t = OpState, OpEvent, RowMaker()
    live = (s.ISSUED, s.RUNNING, s.ORPHANED)
    final = (s.ACKED, s.LOST)
    t.go(e.TAKE, (s.ISSUED,), s.RUNNING, "from now on rows may be touched")
    t.ignore(e.TAKE, (s.ORPHANED,), "cancelled before it started; the shell answers it all the same")
    t.forbid(e.TAKE, (s.RUNNING, *final), "a command is taken once")
    t.go(e.PROGRESS, (s.RUNNING,), s.RUNNING, "landed pages are not touched again")
    t.ignore(e.PROGRESS, (s.ISSUED, s.ORPHANED, *final), "nobody asks for it")
    t.go(e.ORPHAN, (s.ISSUED, s.RUNNING), s.ORPHANED, "the rows must outlive their owner", do=("cancel",))
    t.ignore(e.ORPHAN, (s.ORPHANED, *final), "it has no owner already")
    t.go(e.ACK, live, s.ACKED, "the executor has let go of all rows", do=("return_rows",))
    t.ignore(e.ACK, final, "a second answer changes nothing")
    t.go(e.LOSE, live, s.LOST, "the executor is gone and its rows with it", do=("return_rows",))
    t.ignore(e.LOSE, final, "already answered")
    return Table("operation", _STATES, _EVENTS, {}, _EFFECTS, t.rows, s.ISSUED)


OPERATION_TABLE = _build()
