"""Snapshots of a control plane: every mutable field of every object in it, as one flat hashable tuple.

    take(plane)            the snapshot; changes nothing
    restore(plane, taken)  puts a plane of the same configuration into that state

A snapshot names no object, so it can be restored into any plane that was built with an equal configuration. Records
(attempts, operations, write spans) are made anew by `restore`: references to earlier ones, a `Candidate` say, are void.

Each slot of each class stands in `FIELDS`, with the way in which it is copied, or in `WIRING`, with the reason why it
is no state. A test walks the objects of a plane and compares: a field that is skipped, or rebuilt from others, would
hide every fault in it from whoever explores states by snapshots. `take` and `restore` are compiled from these tables
once, since explorers call them for every transition.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, cast

from hicache_fsm.backup.beliefs import StorageExistenceCache
from hicache_fsm.backup.pipeline import BackupPipeline
from hicache_fsm.backup.spans import WriteSpan
from hicache_fsm.components.full import FullComponent
from hicache_fsm.control.agenda import Agenda
from hicache_fsm.control.answers import Answers
from hicache_fsm.control.effects import RequestEffects
from hicache_fsm.control.parts import Parts
from hicache_fsm.control.plane import ControlPlane
from hicache_fsm.control.waiting import WaitingQueue
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.attempts import AttemptTable
from hicache_fsm.lifecycle.machine import Machine
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.operations import Operation, OperationTable
from hicache_fsm.pools.allocator import Gauge, PageAllocator, PoolSet
from hicache_fsm.prefetch.accounts import HitAccounts
from hicache_fsm.prefetch.parking import ParkedQueue
from hicache_fsm.prefetch.pipeline import PrefetchPipeline
from hicache_fsm.prefetch.retries import StoragePrefetchRetries
from hicache_fsm.tree.eviction import EvictionOrder
from hicache_fsm.tree.prefix_tree import PrefixTree
from hicache_fsm.tree.watches import KeyWatchers, Watches

Snapshot: TypeAlias = tuple[Any, ...]
"""Positions are those of `LAYOUT`."""


class Copy(enum.Enum):
    """How a slot is copied. All contents are immutable values, except where records are named."""

    VALUE = "value"  # immutable: taken as it is
    LIST = "list"
    DICT = "dict"
    KEYS = "dict used as an ordered set"
    TALLY = "dict whose keys never change"
    HISTORY = "deque with a maximal length"
    ATTEMPTS = "dict of Attempt by slot"
    OPERATIONS = "dict of Operation by id"
    SPANS = "dict of WriteSpan by id"
    SPAN_QUEUE = "deque of WriteSpan"


_V, _L, _D, _K = Copy.VALUE, Copy.LIST, Copy.DICT, Copy.KEYS


def _fields(value: str = "", lists: str = "", dicts: str = "", keys: str = "", **others: Copy) -> dict[str, Copy]:
    found = dict.fromkeys(value.split(), _V) | dict.fromkeys(lists.split(), _L) | dict.fromkeys(dicts.split(), _D)
    return found | dict.fromkeys(keys.split(), _K) | others


FIELDS: dict[type, dict[str, Copy]] = {
    ControlPlane: _fields(lists="restarted"),
    Parts: _fields("now_ms pass_no storage_on"),
    RequestEffects: _fields("now_ms"),
    PrefetchPipeline: _fields("now_ms"),
    FullComponent: _fields("clock evicted_pages pin_version", "outbox"),
    PrefixTree: _fields(
        "_sequence _locked _evictions",
        "_key _page _parent _first _next _prev _locks _refs _load _unused",
        "_index _loads",
    ),
    EvictionOrder: _fields(lists="last priority pending seq entry heap"),
    Watches: _fields("touches", keys="dirty told"),
    KeyWatchers: _fields(dicts="_head _key _after _before"),
    PageAllocator: _fields("_version", "_free _owned"),
    Gauge: _fields("_value _high_water"),
    AttemptTable: _fields(
        "next_slot next_seq touches", "free_slots", "by_rid numbers", live=Copy.ATTEMPTS
    ),
    OperationTable: _fields("last_id epoch stale", live=Copy.OPERATIONS),
    StorageExistenceCache: _fields(dicts="inflight undeliverable", keys="believed"),
    HitAccounts: _fields("requested found spliced l3_miss_tokens", unfulfilled=Copy.TALLY, stats=Copy.TALLY),
    StoragePrefetchRetries: _fields("step", "heap", "pending", "unstarted"),
    ParkedQueue: _fields("head_refusal bypasses tried_version tried_ms", keys="order"),
    Agenda: _fields(lists="heap", dicts="due"),
    WaitingQueue: _fields(lists="waiting ready"),
    Machine: _fields("pass_no", dicts="ignored"),
    BackupPipeline: _fields(
        "queued_pages last_id stored_pages now_ms last_answer_ms", keys="pending",
        queue=Copy.SPAN_QUEUE, live=Copy.SPANS, dropped_pages=Copy.TALLY,
    ),
    Attempt: dict.fromkeys(Attempt.__slots__, _V) | {"history": Copy.HISTORY, "device": _L},
    Operation: dict.fromkeys(Operation.__slots__, _V) | {"history": Copy.HISTORY},
    WriteSpan: dict.fromkeys(WriteSpan.__slots__, _V) | {"history": Copy.HISTORY},
}  # fmt: skip


def _wires(part: str = "", config: str = "", code: str = "", words: str = "") -> dict[str, str]:
    """Slots that are no state, by the reason why not."""
    reasons = {
        "another part, covered at its own place": part,
        "set once from the configuration": config,
        "callables and tables, bound once": code,
        "words for messages": words,
    }
    return {slot: reason for reason, slots in reasons.items() for slot in slots.split()}


WIRING: dict[type, dict[str, str]] = {
    ControlPlane: _wires("parts answers", "config"),
    Parts: _wires(
        "full attempts ops beliefs accounts retries parked agenda waiting effects machine prefetch backup",
        "config _ready_states", "observer",
    ),
    Answers: _wires("parts", code="restart keys_known"),
    RequestEffects: _wires("full ops retries accounts parked agenda waiting", "config"),
    PrefetchPipeline: _wires("full attempts accounts parked machine", "config"),
    FullComponent: _wires("tree pools device staging reads writes pinned pins", "config"),
    PrefixTree: _wires("_order _watches"),
    Watches: _wires("departures arrivals"),
    PageAllocator: _wires(config="_capacity"),
    PoolSet: _wires("_pools"),
    Gauge: _wires(words="_name"),
    AttemptTable: _wires(config="history_length"),
    OperationTable: _wires("machine"),
    StorageExistenceCache: _wires(config="capacity negative_capacity negative_ttl_ms"),
    WaitingQueue: _wires("attempts"),
    Machine: _wires(code="table _cells listener check"),
    BackupPipeline: _wires("full ops beliefs machine", "config"),
}  # fmt: skip

PLACES: tuple[tuple[str, str, type], ...] = (
    ("plane", "", ControlPlane),
    ("parts", "plane.parts", Parts),
    ("effects", "parts.effects", RequestEffects),
    ("prefetch", "parts.prefetch", PrefetchPipeline),
    ("full", "parts.full", FullComponent),
    ("tree", "full.tree", PrefixTree),
    ("order", "tree._order", EvictionOrder),
    ("watches", "tree._watches", Watches),
    ("departures", "watches.departures", KeyWatchers),
    ("arrivals", "watches.arrivals", KeyWatchers),
    ("device", "full.device", PageAllocator),
    ("staging", "full.staging", PageAllocator),
    ("reads", "full.reads", Gauge),
    ("writes", "full.writes", Gauge),
    ("pinned", "full.pinned", Gauge),
    ("pins", "full.pins", Gauge),
    ("attempts", "parts.attempts", AttemptTable),
    ("ops", "parts.ops", OperationTable),
    ("beliefs", "parts.beliefs", StorageExistenceCache),
    ("accounts", "parts.accounts", HitAccounts),
    ("retries", "parts.retries", StoragePrefetchRetries),
    ("parked", "parts.parked", ParkedQueue),
    ("agenda", "parts.agenda", Agenda),
    ("waiting", "parts.waiting", WaitingQueue),
    ("machine", "parts.machine", Machine),
    ("ops_machine", "ops.machine", Machine),
    ("backup", "parts.backup", BackupPipeline),
    ("backup_machine", "backup.machine", Machine),
)
"""Every object with state: its name here, where it hangs, and its class. `Answers` and `PoolSet` have none."""


class Slot(NamedTuple):
    place: str
    name: str
    copy: Copy


def _layout() -> Iterator[Slot]:
    for place, _, cls in PLACES:
        for name, copy in FIELDS[cls].items():
            yield Slot(place, name, copy)


LAYOUT: tuple[Slot, ...] = tuple(_layout())
POSITION: dict[tuple[str, str], int] = {(slot.place, slot.name): i for i, slot in enumerate(LAYOUT)}
RECORD_FIELDS: dict[type, tuple[str, ...]] = {cls: tuple(FIELDS[cls]) for cls in (Attempt, Operation, WriteSpan)}
"""Fields of a record in a snapshot, by position."""

_TAKE = {
    Copy.VALUE: "{0}", Copy.LIST: "tuple({0})", Copy.DICT: "tuple({0}.items())", Copy.KEYS: "tuple({0})",
    Copy.TALLY: "tuple({0}.values())", Copy.HISTORY: "tuple({0})",
    Copy.ATTEMPTS: "tuple([(i, take_Attempt(r)) for i, r in {0}.items()])",
    Copy.OPERATIONS: "tuple([(i, take_Operation(r)) for i, r in {0}.items()])",
    Copy.SPANS: "tuple([(i, take_WriteSpan(r)) for i, r in {0}.items()])",
    Copy.SPAN_QUEUE: "tuple([take_WriteSpan(r) for r in {0}])",
}  # fmt: skip
_MAKE = {
    Copy.VALUE: "{0}", Copy.LIST: "[*{0}]", Copy.DICT: "dict({0})", Copy.KEYS: "dict.fromkeys({0})",
    Copy.TALLY: "dict(zip({1}, {0}))", Copy.HISTORY: "deque({0}, longest)",
    Copy.ATTEMPTS: "{{i: make_Attempt(r, plane.config.history_length) for i, r in {0}}}",
    Copy.OPERATIONS: "{{i: make_Operation(r, operation_history) for i, r in {0}}}",
    Copy.SPANS: "{{i: make_WriteSpan(r, span_history) for i, r in {0}}}",
    Copy.SPAN_QUEUE: "deque([make_WriteSpan(r, span_history) for r in {0}])",
}  # fmt: skip


def _source() -> str:
    """The text of `take` and `restore`: one attribute access a field, and no loop over fields."""
    lines: list[str] = []
    for cls, names in RECORD_FIELDS.items():
        copies = FIELDS[cls]
        taken = ", ".join(_TAKE[copies[name]].format(f"r.{name}") for name in names)
        raw = {name: f"v{i}" for i, name in enumerate(names)}
        lines += [f"def take_{cls.__name__}(r):", f"    return ({taken})"]
        lines += [f"def make_{cls.__name__}(taken, longest):", f"    r = new_{cls.__name__}({cls.__name__})"]
        lines += [f"    ({', '.join(raw.values())},) = taken"]
        lines += [f"    r.{name} = {_MAKE[copies[name]].format(raw[name], f'r.{name}')}" for name in names]
        lines += ["    return r"]
    places = [f"    {name} = {where}" for name, where, _ in PLACES if where]
    taken = ",\n        ".join(_TAKE[slot.copy].format(f"{slot.place}.{slot.name}") for slot in LAYOUT)
    lines += ["def take(plane):", *places, f"    return (\n        {taken},\n    )"]
    lines += ["def restore(plane, taken):", *places, f"    ({', '.join(f'v{i}' for i in range(len(LAYOUT)))},) = taken"]
    for i, slot in enumerate(LAYOUT):
        target = f"{slot.place}.{slot.name}"
        lines.append(f"    {target} = {_MAKE[slot.copy].format(f'v{i}', target)}")
    return "\n".join(lines) + "\n"


def _compile() -> dict[str, Any]:
    names: dict[str, Any] = {"deque": deque}
    for cls in RECORD_FIELDS:
        names[cls.__name__], names[f"new_{cls.__name__}"] = cls, cls.__new__
    names["operation_history"] = Operation(0, OpKind.HASH, 0).history.maxlen
    names["span_history"] = WriteSpan(0, b"", (), (), 0).history.maxlen
    exec(compile(_source(), f"<compiled from the tables of {__name__}>", "exec"), names)
    return names


_compiled = _compile()

take = cast("Callable[[ControlPlane], Snapshot]", _compiled["take"])
"""The state of a plane. Equal states of equal histories give equal snapshots."""

restore = cast("Callable[[ControlPlane, Snapshot], None]", _compiled["restore"])
"""Put a plane, built with an equal configuration, into a state that `take` returned."""
