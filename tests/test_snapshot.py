"""Snapshots cover every mutable field: what they skip, whoever explores by them cannot see."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from hicache_fsm.config import CacheConfig
from hicache_fsm.control import snapshot
from hicache_fsm.control.plane import ControlPlane
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.operations import Operation
from hicache_fsm.testing.sim import Sim, chain

CONFIG = CacheConfig(
    page_size=1, device_pages=12, staging_pages=6, max_context_tokens=4, prefetch_threshold_tokens=1, debug=True,
    poison=True, retry_poll_interval_passes=2,
)  # fmt: skip


def busy_sim() -> Sim:
    """A plane with something in nearly every book: attempts in several states, operations of all kinds, write spans."""
    sim = Sim(CONFIG)
    sim.submit("first", "tab")
    sim.settle()
    assert sim.run("first")
    sim.tick()
    for op in sim.of_kind(OpKind.OFFLOAD):
        sim.answer(op)
    sim.tick()
    sim.stored.update((*chain(*"tL"), *chain(*"tR")))
    sim.submit("loads", "tL")
    sim.submit("reads", "tR")
    for op in sim.of_kind(OpKind.LOOKUP):
        sim.answer(op)
    sim.tick()
    sim.answer(sim.of_kind(OpKind.READ)[0])
    sim.tick()
    assert sim.admit("loads")
    sim.submit("polls", "tP")
    sim.submit("asks", "tA")
    sim.answer(sim.of_kind(OpKind.LOOKUP)[0])
    sim.tick()
    sim.submit("hashes", "tH", hashed=True)
    assert sim.admit("polls")
    sim.compute("polls")
    sim.tick()
    sim.call(lambda plane: plane.abort("reads"))
    return sim


def objects(root: object) -> Iterator[tuple[str, object]]:
    """Everything of this package that hangs on a plane, each once, with the way there."""
    seen: set[int] = set()
    queue: deque[tuple[str, object]] = deque([("plane", root)])
    while queue:
        path, thing = queue.popleft()
        if id(thing) in seen or isinstance(thing, type | enum.Enum):
            continue
        seen.add(id(thing))
        if isinstance(thing, dict):
            queue.extend((f"{path}[{key!r}]", value) for key, value in thing.items())
        elif isinstance(thing, list | tuple | deque | set | frozenset):
            queue.extend((f"{path}[{at}]", value) for at, value in enumerate(thing))
        elif type(thing).__module__.startswith("hicache_fsm.") and not callable(thing):
            yield path, thing
            queue.extend((f"{path}.{slot}", getattr(thing, slot)) for slot in slots(type(thing)))


def slots(cls: type) -> list[str]:
    found = [slot for base in cls.__mro__ for slot in getattr(base, "__slots__", ())]
    return [slot for slot in found if slot not in ("__weakref__", "__dict__", "__orig_class__")]


IMMUTABLE = ("hicache_fsm.lifecycle.model", "hicache_fsm.lifecycle.table", "hicache_fsm.config", "hicache_fsm.ports")
"""Tables, configurations and messages are values: nothing in them changes."""


def parts_with_state(plane: ControlPlane) -> dict[str, object]:
    return {
        path: thing for path, thing in objects(plane)
        if not type(thing).__module__.startswith(IMMUTABLE) and not isinstance(thing, tuple)
    }  # fmt: skip


def test_every_slot_of_every_object_is_covered_or_wiring() -> None:
    found = parts_with_state(busy_sim().plane)
    classes = {type(thing) for thing in found.values()}
    assert {Attempt, Operation, ControlPlane} <= classes, "the walk must reach the records"
    for cls in classes:
        covered, wiring = set(snapshot.FIELDS.get(cls, ())), set(snapshot.WIRING.get(cls, ()))
        assert not covered & wiring, f"{cls.__name__}: {covered & wiring} cannot be both"
        known, have = covered | wiring, set(slots(cls))
        assert known == have, f"{cls.__name__}: not covered {have - known}, unknown {known - have}"
        assert all(not hasattr(thing, "__dict__") for thing in found.values() if type(thing) is cls)


def test_every_object_has_a_place() -> None:
    plane = busy_sim().plane
    objects_of: dict[str, object] = {"plane": plane}
    for name, where, cls in snapshot.PLACES[1:]:
        head, _, rest = where.partition(".")
        objects_of[name] = getattr(objects_of[head], rest)
        assert type(objects_of[name]) is cls
    placed = {id(thing) for thing in objects_of.values()}
    for path, thing in parts_with_state(plane).items():
        if snapshot.FIELDS.get(type(thing)) and type(thing) not in snapshot.RECORD_FIELDS:
            assert id(thing) in placed, f"{path} has state and no place"


def test_no_container_is_shared_by_two_slots() -> None:
    """Restoring makes new containers: one that two slots share would come apart."""
    owners: dict[int, str] = {}
    for path, thing in parts_with_state(busy_sim().plane).items():
        for slot in snapshot.FIELDS.get(type(thing), {}):
            value = getattr(thing, slot)
            if isinstance(value, list | dict | deque | set):
                assert id(value) not in owners, f"{path}.{slot} is {owners[id(value)]}"
                owners[id(value)] = f"{path}.{slot}"


def test_wiring_never_changes() -> None:
    sim = busy_sim()
    before = [
        (path, slot, getattr(thing, slot)) for path, thing in parts_with_state(sim.plane).items()
        for slot in snapshot.WIRING.get(type(thing), ())
    ]  # fmt: skip
    sim.settle()
    sim.call(lambda plane: plane.flush())
    sim.settle()
    after = parts_with_state(sim.plane)
    for path, slot, value in before:
        if path in after:
            assert getattr(after[path], slot) is value, f"{path}.{slot} was replaced"


def test_taking_changes_nothing_and_a_snapshot_is_hashable() -> None:
    sim = busy_sim()
    taken = snapshot.take(sim.plane)
    assert hash(taken) == hash(snapshot.take(sim.plane))
    assert len(taken) == len(snapshot.LAYOUT)
    kinds = {OpKind(op.kind) for op in sim.plane.parts.ops.live.values()}
    assert {OpKind.LOOKUP, OpKind.READ, OpKind.LOAD, OpKind.HASH} <= kinds, "the sample must be a rich one"


def test_restoring_into_a_fresh_plane_gives_the_same_state_and_future() -> None:
    sim = busy_sim()
    taken = snapshot.take(sim.plane)
    other = ControlPlane(CONFIG)
    assert snapshot.take(other) != taken
    snapshot.restore(other, taken)
    assert snapshot.take(other) == taken
    assert other.check_invariants() == []
    answers = [sim.answer(op) for op in list(sim.outstanding)]
    for plane in (sim.plane, other):
        plane.tick(answers, sim.now_ms + 5)
        plane.abort("loads")
        plane.tick((), sim.now_ms + 40_000)
    assert snapshot.take(sim.plane) == snapshot.take(other)
    assert sim.plane.take_commands() == other.take_commands()


def test_a_snapshot_does_not_change_with_the_plane() -> None:
    sim = busy_sim()
    taken = snapshot.take(sim.plane)
    before = hash(taken)
    sim.settle()
    sim.call(lambda plane: plane.flush())
    assert hash(taken) == before
    snapshot.restore(sim.plane, taken)
    assert snapshot.take(sim.plane) == taken


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return value + "x"
        case bytes():
            return value + b"x"
        case tuple():
            return (*value, 7)
        case None:
            return 7
        case _:
            return f"not {value!r}"


def _change(thing: object, slot: str, copy: snapshot.Copy) -> None:
    """Change one field in place, in the way in which the code changes it."""
    value: Any = getattr(thing, slot)
    if copy is snapshot.Copy.VALUE:
        setattr(thing, slot, _other(value))
    elif isinstance(value, list):
        value.append(7)
    elif isinstance(value, deque):
        value.append(value[-1]) if copy is snapshot.Copy.SPAN_QUEUE and value else value.append((1, 2, 3))
    elif copy is snapshot.Copy.TALLY:
        value[next(iter(value))] += 1
    elif copy in (snapshot.Copy.DICT, snapshot.Copy.KEYS):
        value["x"] = 7
    else:
        del value[next(iter(value))]


@pytest.mark.parametrize("slot", [s for s in snapshot.LAYOUT if s.copy is not snapshot.Copy.SPAN_QUEUE], ids=str)
def test_a_change_of_any_field_shows(slot: snapshot.Slot) -> None:
    plane = busy_sim().plane
    places: dict[str, object] = {"plane": plane}
    for name, where, _ in snapshot.PLACES[1:]:
        head, _, rest = where.partition(".")
        places[name] = getattr(places[head], rest)
    before = snapshot.take(plane)
    if slot.copy is snapshot.Copy.SPANS and not getattr(places[slot.place], slot.name):
        pytest.skip("no span is under way in the sample")
    _change(places[slot.place], slot.name, slot.copy)
    after = snapshot.take(plane)
    at = snapshot.POSITION[slot.place, slot.name]
    assert before[at] != after[at]
    assert before[:at] == after[:at]
    assert before[at + 1 :] == after[at + 1 :]
