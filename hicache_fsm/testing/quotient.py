"""Which states are one: the quotient of a snapshot under which an exploration merges.

`RULES` says for every field of a snapshot (all of `snapshot.LAYOUT`, and the fields of its records) what becomes of
it in the key, and why states that differ in nothing else behave alike. `names_of` computes the key accordingly; a test
changes each field in turn and compares.

    kept      stands in the key as it is
    named     ids are replaced by names: requests by (prompt, arrival), operations, pages and slots in the order in
              which the walk below first mentions them, tree nodes by their page keys. Any such naming is one to one, so
              equal keys mean states that differ in names only; and the core compares ids for equality, nothing else,
              but for the exceptions given with the rule
    relative  stands in the key as the distance from the present time, step, epoch, or version
    dropped   no decision reads it, now or later

Behaviour that depends on the order of ids: a tick applies its completions in the order of their operations. An
exploration gives one answer per tick, so that order is never used.
"""

from __future__ import annotations

import enum
import marshal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from hicache_fsm.backup.spans import WriteSpan
from hicache_fsm.control.snapshot import LAYOUT, POSITION, RECORD_FIELDS, Snapshot
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.operations import Operation
from hicache_fsm.lifecycle.table import ADMITTED, State
from hicache_fsm.ports import Command, PageKey


class How(enum.Enum):
    KEPT = "kept"
    NAMED = "named"
    RELATIVE = "relative"
    DROPPED = "dropped"


class Rule(NamedTuple):
    how: How
    fields: str  # `place.field`, or `Record.field`
    why: str


RULES: tuple[Rule, ...] = (
    Rule(How.KEPT, "parts.storage_on plane.restarted full.outbox", "decisions read them"),
    Rule(How.KEPT, "reads._value writes._value pinned._value pins._value tree._locked backup.queued_pages",
         "totals that the ledgers imply; kept, so that a wrong one is a state of its own"),
    Rule(How.KEPT, "beliefs.believed beliefs.inflight backup.pending",
         "as sets: their order only says what a full list forgets first, and the bounds are out of reach; only writes "
         "ask for beliefs, so they are dropped where the backlog admits none"),
    Rule(How.KEPT, "parked.head_refusal parked.bypasses", "decisions read them"),
    Rule(How.KEPT, "Attempt.state Attempt.priority Attempt.num_tokens Attempt.keys Attempt.keys_known "
         "Attempt.unresolved Attempt.retries Attempt.gate_open Attempt.published_pages Attempt.pin_tokens",
         "decisions read them"),
    Rule(How.KEPT, "Attempt.match_pages Attempt.relied_pages Attempt.end_pages Attempt.defers Attempt.chances "
         "Attempt.storage_open",
         "while the attempt may still ask storage; once it recomputes or runs, only the match of the former is read, "
         "and no row of the table leads back"),
    Rule(How.KEPT, "Attempt.base_pages Attempt.landed_pages",
         "from the look-up to the hold; each look-up sets them anew"),
    Rule(How.KEPT, "Operation.kind Operation.state Operation.keys Operation.progress Operation.unresolved",
         "decisions read them"),
    Rule(How.KEPT, "WriteSpan.state WriteSpan.parent WriteSpan.keys", "decisions read them"),
    Rule(How.NAMED, "tree._index tree._key tree._page tree._locks tree._refs tree._load tree._loads order.pending",
         "one entry a page, in the order of the page keys; a key implies its parent's"),
    Rule(How.NAMED, "order.last order.seq order.priority tree._parent",
         "as the order in which leaves would go, and only where the tree has two branches: else nothing is to choose"),
    Rule(How.NAMED, "device._free device._owned staging._free staging._owned",
         "their counts: free pages are alike, and which pages are out is told by whoever holds them"),
    Rule(How.NAMED, "attempts.live attempts.by_rid waiting.waiting waiting.ready parked.order agenda.due "
         "retries.pending retries.unstarted watches.dirty watches.told departures._key arrivals._key",
         "with their attempt; of orders only those of the queues are read"),
    Rule(How.NAMED, "ops.live backup.live backup.queue", "with whom they serve; the order of queued spans is kept"),
    Rule(How.NAMED, "Attempt.rid Attempt.seq Attempt.op Attempt.load_ops Attempt.staging Attempt.pin_node "
         "Attempt.device Attempt.lock_node Operation.id WriteSpan.id Operation.span Operation.device_rows "
         "Operation.staging Operation.device Operation.lock_node Operation.dependents WriteSpan.op "
         "WriteSpan.staging WriteSpan.lock_node", "ids"),
    Rule(How.NAMED, "Operation.rows",
         "their number, and those that may still be touched: the others can be free, or somebody else's"),
    Rule(How.NAMED, "Operation.slot",
         "as the attempt whose own operation it is: an answer to any other finds no owner"),
    Rule(How.NAMED, "WriteSpan.deps", "those that still run: only they are asked for"),
    Rule(How.RELATIVE, "effects.now_ms prefetch.now_ms backup.now_ms", "copies of the agreed time"),
    Rule(How.RELATIVE, "Attempt.clock_left_ms Attempt.hard_left_ms Attempt.clock_since_ms",
         "as what is left of both budgets, and whether the clock runs; while storage may be asked"),
    Rule(How.RELATIVE, "Attempt.refused_room Attempt.refused_ms",
         "as the room, and the time since then, within the quantum; without a refusal, after the quantum, or once "
         "storage is closed, neither is read"),
    Rule(How.RELATIVE, "parked.tried_version parked.tried_ms staging._version full.pin_version",
         "as whether anything has changed since the try, and the time since then up to the quantum; a head that was "
         "never tried needs neither"),
    Rule(How.RELATIVE, "beliefs.undeliverable", "as time to expiry; an expired entry is as good as none"),
    Rule(How.RELATIVE, "Operation.epoch WriteSpan.epoch ops.epoch", "as whether it is of the present epoch"),
    Rule(How.DROPPED, "backup.last_answer_ms",
         "a scheduler asks for it when it chooses whom to admit; here every choice is tried"),
    Rule(How.RELATIVE, "parts.now_ms retries.step", "the origin from which times and steps are measured"),
    Rule(How.DROPPED, "parts.pass_no machine.pass_no ops_machine.pass_no backup_machine.pass_no Attempt.history "
         "Operation.history WriteSpan.history Attempt.waiting_since_ms Attempt.outcome WriteSpan.outcome",
         "read by explanations only"),
    Rule(How.DROPPED, "full.evicted_pages tree._evictions watches.touches reads._high_water writes._high_water "
         "pinned._high_water pins._high_water attempts.touches ops.stale accounts.stats machine.ignored "
         "ops_machine.ignored backup_machine.ignored backup.stored_pages backup.dropped_pages", "counters for people"),
    Rule(How.DROPPED, "accounts.requested accounts.found accounts.spliced accounts.l3_miss_tokens accounts.unfulfilled",
         "monotone; their difference, the open tokens, is checked in every state and kept with its owners"),
    Rule(How.DROPPED, "full.clock tree._sequence attempts.next_slot attempts.next_seq attempts.free_slots ops.last_id "
         "backup.last_id attempts.numbers Attempt.number Attempt.slot Operation.rid Operation.attempt "
         "device._version tree._unused",
         "names not yet given, or of what the key names otherwise; new ones differ from all in use"),
    Rule(How.DROPPED, "tree._first tree._next tree._prev order.entry order.heap departures._head "
         "departures._after departures._before arrivals._head arrivals._after arrivals._before agenda.heap "
         "retries.heap",
         "indexes of what is kept, lazily cleaned; the tree's are recounted in every new state"),
)  # fmt: skip


class Outside(NamedTuple):
    """State of the simulated outside."""

    stored: frozenset[PageKey]
    outstanding: tuple[tuple[int, Command], ...]
    cancelled: frozenset[int]  # dropped from the key: an executor may ignore a cancellation
    staging: tuple[PageKey | None, ...]  # bytes of each page, as the key that they belong to
    device: tuple[PageKey | None, ...]
    now_ms: int
    landed: tuple[tuple[int, int], ...]  # leading pages that running reads have reported
    unsure: tuple[tuple[int, frozenset[int]], ...]  # device page -> loads that its bytes were computed on
    unsubmitted: tuple[int, ...]


class Names(NamedTuple):
    key: bytes  # 16-byte digest: two of a million states collide with probability 2^-89
    attempts: tuple[tuple[str, int], ...]  # (rid, number) by place
    operations: tuple[int, ...]  # ids by place


_ASKS = frozenset(State) - {State.RECOMPUTING, *ADMITTED}
_HAS_BASE = frozenset({State.QUERYING, State.READING, State.PARKED, State.STAGED})

Records: TypeAlias = list[tuple[int, tuple[Any, ...]]]
"""Attempts as a snapshot has them: (slot, fields)."""


class Frame(NamedTuple):
    """What stays the same throughout an exploration."""

    groups: Mapping[str, int]  # request id -> group of interchangeable requests
    quantum_ms: int  # `chance_quantum_ms` of the configuration
    writes: bool  # whether its write backlog admits any page


_A = {name: i for i, name in enumerate(RECORD_FIELDS[Attempt])}
_RID, _NUMBER, _SEQ, _OWN = _A["rid"], _A["number"], _A["seq"], _A["op"]


def _pick(cls: type, names: str) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Reads these fields out of a record."""
    return itemgetter(*[RECORD_FIELDS[cls].index(name) for name in names.split()])


_ALWAYS = _pick(Attempt, "priority num_tokens keys keys_known retries published_pages pin_tokens gate_open unresolved")
_WAITING = _pick(Attempt, "match_pages relied_pages end_pages defers chances storage_open")
_COMMITTED = _pick(Attempt, "base_pages landed_pages")
_REST = _pick(Attempt, "rid state op clock_left_ms hard_left_ms clock_since_ms refused_room refused_ms load_ops "
              "staging pin_node device lock_node")
_OPERATION = _pick(Operation, "kind state span keys epoch rows device_rows progress staging device lock_node "
                   "unresolved dependents")
_ORPHAN_ORDER = _pick(Operation, "kind keys progress id")
_SPAN = _pick(WriteSpan, "keys state parent deps epoch op staging lock_node id")


def _at(place: str, name: str) -> int:
    return POSITION[place, name]


class _Walk:
    """Gives names in the order of first mention."""

    __slots__ = ("state", "out", "place", "device", "staging", "op_name", "op_order", "epoch")

    def __init__(self, state: Snapshot, out: Outside, places: dict[int, int]) -> None:
        self.state = state
        self.out = out
        self.place = places  # slot -> place
        self.device: dict[int, int] = {}
        self.staging: dict[int, int] = {}
        self.op_name: dict[int, int] = {0: -1}
        self.op_order: list[int] = []
        self.epoch = state[_EPOCH]

    def ops(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Names of operations; ids of ended ones stay as they are, negative: nothing live may refer to one."""
        return tuple([self.op(op) for op in ids])

    def op(self, op: int) -> int:
        name = self.op_name.get(op)
        if name is None:
            name = self.op_name[op] = len(self.op_order)
            self.op_order.append(op)
        return name

    def on_device(self, pages: Iterable[int]) -> tuple[int, ...]:
        names = self.device
        return tuple([names.setdefault(page, len(names)) for page in pages])

    def on_staging(self, pages: Iterable[int]) -> tuple[int, ...]:
        names = self.staging
        return tuple([names.setdefault(page, len(names)) for page in pages])


_NOW, _STEP, _EPOCH = _at("parts", "now_ms"), _at("retries", "step"), _at("ops", "epoch")
_LIVE, _OPS, _SPANS, _QUEUE = _at("attempts", "live"), _at("ops", "live"), _at("backup", "live"), _at("backup", "queue")
_TREE = tuple(_at("tree", name) for name in ("_index", "_page", "_locks", "_refs", "_load", "_loads", "_key"))
_ORDER = tuple(_at("order", name) for name in ("priority", "last", "seq"))
_PENDING_PAGES = _at("order", "pending")
_QUEUES = tuple(_at("waiting", name) for name in ("waiting", "ready"))
_WATCHES = (_at("departures", "_key"), _at("arrivals", "_key"), _at("watches", "dirty"), _at("watches", "told"))
_RETRIES = (_at("agenda", "due"), _at("retries", "pending"), _at("retries", "unstarted"))
_PARKED = tuple(_at("parked", name) for name in ("order", "head_refusal", "bypasses", "tried_version", "tried_ms"))
_VERSIONS = (_at("staging", "_version"), _at("full", "pin_version"))
_BELIEFS = tuple(_at("beliefs", name) for name in ("believed", "inflight", "undeliverable"))
_KEPT = tuple(
    _at(place, name)
    for rule in RULES if rule.how is How.KEPT and "Attempt" not in rule.fields and "Operation" not in rule.fields
    for place, name in (field.split(".") for field in rule.fields.split())
    if place not in ("WriteSpan", "beliefs", "parked") and name != "pending"
)  # fmt: skip
_BACKLOG = _at("backup", "pending")
_POOLS = tuple((_at(pool, "_free"), _at(pool, "_owned")) for pool in ("device", "staging"))
_COPIES_OF_NOW = tuple(_at(place, "now_ms") for place in ("effects", "prefetch", "backup"))
_BY_RID = _at("attempts", "by_rid")


def names_of(state: Snapshot, out: Outside, frame: Frame) -> Names:
    """Key and names of a state."""
    groups = frame.groups
    live = sorted(state[_LIVE], key=lambda item: (groups[item[1][_RID]], item[1][_SEQ]))
    walk = _Walk(state, out, {slot: place for place, (slot, _) in enumerate(live)})
    key = (
        _attempts(walk, live, frame),
        _spans(walk),
        _operations(walk, live),
        _tree(walk),
        _parked(walk, frame.quantum_ms),
        _books(walk, frame.writes),
        _outside(walk),
    )
    digest = blake2b(marshal.dumps(key, 2), digest_size=16).digest()
    alive = dict(state[_OPS])
    operations = tuple([op for op in walk.op_order if op in alive])
    return Names(digest, tuple([(record[_RID], record[_NUMBER]) for _, record in live]), operations)


def _attempts(walk: _Walk, live: Records, frame: Frame) -> tuple[Any, ...]:
    state = walk.state
    now, step, node_key = state[_NOW], state[_STEP], state[_TREE[6]]
    due, pending, unstarted = dict(state[_RETRIES[0]]), dict(state[_RETRIES[1]]), state[_RETRIES[2]]
    leaving, arriving = dict(state[_WATCHES[0]]), dict(state[_WATCHES[1]])
    dirty, told, by_rid = state[_WATCHES[2]], state[_WATCHES[3]], dict(state[_BY_RID])
    out: list[Any] = []
    for slot, record in live:
        rid, where, op, left, hard, since, room, refused, load_ops, staging, pin, device, lock = _REST(record)
        entry = pending.get(rid)
        asks = (
            _WAITING(record), left if since < 0 or where == State.PARKED else left - (now - since),
            hard if since < 0 else hard - (now - since), since < 0,
            (room, now - refused) if record[_A["defers"]] and now - refused < frame.quantum_ms else None,
        ) if where in _ASKS else None  # fmt: skip
        out.append((
            frame.groups[rid], int(where), _ALWAYS(record), asks, _COMMITTED(record) if where in _HAS_BASE else None,
            record[_A["match_pages"]] if where == State.RECOMPUTING else None, walk.op(op), walk.ops(load_ops),
            walk.on_staging(staging), node_key[pin], walk.on_device(device), node_key[lock],
            due[slot] - now if slot in due else None, by_rid.get(rid) == slot,
            entry and (entry.immediate, entry.hit_end, entry.due - step if entry.due >= 0 else -1), rid in unstarted,
            leaving.get(slot), arriving.get(slot), slot in dirty, slot in told,
        ))  # fmt: skip
    arrivals = tuple([walk.place[slot] for slot, _ in sorted(live, key=lambda item: item[1][_SEQ])])
    listed = tuple([tuple([walk.place.get(place[2], -1) for place in state[queue]]) for queue in _QUEUES])
    strays = len(due) + len(pending) + len(unstarted) + len(dirty) + len(told) + len(leaving) + len(arriving)
    return tuple(out), arrivals, listed, strays, len(by_rid)


def _spans(walk: _Walk) -> tuple[Any, ...]:
    state, alive = walk.state, dict(walk.state[_OPS])
    node_key = state[_TREE[6]]
    queued: list[Any] = []
    for record in state[_QUEUE]:
        keys, where, parent, deps, epoch, *_ = _SPAN(record)
        queued.append((int(where), parent, keys, walk.ops(op for op in deps if op in alive), epoch == walk.epoch))
    running: list[Any] = []
    for record in sorted([_SPAN(span) for _, span in state[_SPANS]]):
        keys, where, parent, deps, epoch, op, staging, lock, _ = record
        waits = walk.ops(dep for dep in deps if dep in alive)
        running.append((
            keys, int(where), parent, waits, epoch == walk.epoch, walk.op(op), walk.on_staging(staging), node_key[lock]
        ))  # fmt: skip
    return tuple(queued), tuple(running)


_DEAD = -2


def _operations(walk: _Walk, live: Records) -> tuple[Any, ...]:
    """Those that an attempt or a span has named first, then the others by what they do."""
    state = walk.state
    records = dict(state[_OPS])
    owner = {record[_OWN]: place for place, (_, record) in enumerate(live)}
    span_name = {span[-1]: i for i, span in enumerate(sorted([_SPAN(span) for _, span in state[_SPANS]]))}
    node_key, landed, sent = state[_TREE[6]], dict(walk.out.landed), dict(walk.out.outstanding)
    for *_, op in sorted([_ORPHAN_ORDER(record) for op, record in state[_OPS] if op not in walk.op_name]):
        walk.op(op)
    out: list[Any] = []
    for op in walk.op_order:
        if op not in records:
            out.append(_DEAD)
            continue
        (what, where, span, its_keys, epoch, rows, device_rows, done, staging, device, lock, unresolved,
         dependents) = _OPERATION(records[op])  # fmt: skip
        out.append((
            int(what), int(where), owner.get(op, -1), span_name.get(span, -1) if span else None, its_keys,
            epoch == walk.epoch, len(rows), walk.on_staging(rows[done:]), walk.on_device(device_rows), done,
            walk.on_staging(staging), walk.on_device(device), node_key[lock], unresolved,
            tuple(sorted([walk.place.get(slot, -1) for slot in dependents])), landed.get(op), op in sent,
        ))  # fmt: skip
    return tuple(out)


def _tree(walk: _Walk) -> tuple[Any, ...]:
    state = walk.state
    index, page, locks, refs, load, loads, _ = (state[at] for at in _TREE)
    pending = state[_PENDING_PAGES]
    nodes = sorted(index)
    out = [
        (key, walk.on_device((page[node],)), locks[node], refs[node], walk.op(load[node]) if load[node] else -1,
         pending[node])
        for key, node in nodes
    ]  # fmt: skip
    marked = tuple(sorted([(walk.op(op), len(marks)) for op, marks in loads]))
    return tuple(out), marked, _leaving_order(state, nodes)


def _leaving_order(state: Snapshot, nodes: list[tuple[PageKey, int]]) -> tuple[int, ...]:
    """Places of the pages in the order of their ranks, if any node has two children.

    A page goes only after all below it and takes over their rank when they go, so each counts with the latest rank
    below it.
    """
    parent = state[_at("tree", "_parent")]
    children = [parent[node] for _, node in nodes]
    if len(set(children)) == len(children):
        return ()
    priority, last, seq = (state[at] for at in _ORDER)
    rank = {node: (priority[node], last[node], seq[node]) for _, node in nodes}
    for node in sorted(rank, key=lambda node: -seq[node]):  # children are younger than their parents
        above = parent[node]
        if above in rank:
            rank[above] = (max(rank[above][0], rank[node][0]), max(rank[above][1], rank[node][1]), rank[above][2])
    places = range(len(nodes))
    return tuple(sorted(places, key=lambda at: rank[nodes[at][1]]))


def _parked(walk: _Walk, quantum_ms: int) -> tuple[Any, ...]:
    state = walk.state
    order, refusal, bypasses, version, tried_ms = (state[at] for at in _PARKED)
    places = tuple([walk.place.get(slot, -1) for slot in order])
    if refusal is None:
        return places, None, bypasses
    same = version == (state[_VERSIONS[0]], state[_VERSIONS[1]])
    return places, refusal.value, bypasses, same, min(state[_NOW] - tried_ms, quantum_ms)


def _books(walk: _Walk, writes: bool) -> tuple[Any, ...]:
    state, now = walk.state, walk.state[_NOW]
    believed, inflight, undeliverable = (state[at] for at in _BELIEFS)
    waiting = sorted([(key, until - now) for key, until in undeliverable if until > now])
    pools = tuple([(len(state[free]), sum(state[owned])) for free, owned in _POOLS])
    copies = tuple([state[at] - now for at in _COPIES_OF_NOW])
    kept = tuple([state[at] for at in _KEPT])
    backlog = tuple(sorted(state[_BACKLOG]))
    known = tuple(sorted(believed)) if writes else None
    return known, tuple(sorted(inflight)), tuple(waiting), backlog, pools, copies, kept


def _outside(walk: _Walk) -> tuple[Any, ...]:
    """Bytes of the pages that somebody holds; those of free pages are overwritten before they are read."""
    out = walk.out
    unsure = dict(out.unsure)
    staging = tuple([out.staging[page] for page in walk.staging])
    device = tuple([
        (out.device[page], tuple(sorted([walk.op(op) for op in unsure.get(page, ()) if op in walk.op_name])))
        for page in walk.device
    ])  # fmt: skip
    return tuple(sorted(out.stored)), staging, device, out.unsubmitted


def _all_fields() -> set[str]:
    names = {f"{slot.place}.{slot.name}" for slot in LAYOUT}
    return names | {f"{cls.__name__}.{name}" for cls, record in RECORD_FIELDS.items() for name in record}


def undeclared() -> list[str]:
    """Fields without exactly one rule, and rules for fields that do not exist."""
    listed = Counter(field for rule in RULES for field in rule.fields.split())
    fields = _all_fields()
    return sorted(fields - set(listed)) + sorted(f for f, n in listed.items() if n > 1 or f not in fields)
