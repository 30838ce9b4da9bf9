"""Invariants of the whole control plane, recounted by brute force from allocators, tree and ledgers.

Each has a name, so that a fault which trips one can be told from its message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hicache_fsm.control.parts import Parts
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.table import CANDIDATES, REQUEST_TABLE, TIMED, State

NAMES = {
    "pool": "free list and owned flags of each pool agree",
    "staging": "free + owned by attempts, operations and spans = capacity; one owner a page",
    "device": "free + tree + own pages of attempts + quarantine = capacity; one owner a page",
    "touch": "no page that a running operation may touch is free, or another's",
    "pins": "pins and pinned tokens equal those in the ledgers, and stay below the cap",
    "locks": "locks in the tree equal those in the ledgers",
    "ownership": "each state owns exactly what the table says",
    "identity": "an attempt's own operation is live, names it, and is of the kind its state needs",
    "parked": "the parked queue holds exactly the parked attempts",
    "queue": "the waiting queue holds exactly the waiting attempts, the ready list exactly the candidates",
    "retry": "a retry entry belongs to a paced or refetching attempt, and each refetching attempt has one",
    "clock": "a deadline is set exactly while storage is awaited",
    "caps": "retries, defers and chances stay within their caps",
    "accounts": "found = spliced + unfulfilled + open",
    "loads": "dependents of a load and load_ops of its readers mirror each other",
    "tree": "the prefix tree's own invariants",
    "backup": "the write path's own invariants",
}


def check_plane(parts: Parts) -> list[str]:
    """All violations, each with the name of its invariant in front."""
    found: list[str] = []
    for name, check in _CHECKS.items():
        found += [f"{name}: {text}" for text in check(parts)]
    return found


def _pool(parts: Parts) -> list[str]:
    return parts.full.pools.check_invariants()


def _owners(what: str, owned: Counter[int], capacity: int, free: int) -> list[str]:
    found = [f"{what} page {page} has {n} owners" for page, n in sorted(owned.items()) if n > 1]
    if len(owned) + free != capacity:
        found.append(f"{free} free + {len(owned)} owned {what} pages != capacity {capacity}")
    return found


def _staging(parts: Parts) -> list[str]:
    reads: Counter[int] = Counter()
    for attempt in parts.attempts:
        reads.update(attempt.staging)
    for op in parts.ops.live.values():
        reads.update(op.staging)
    writes: Counter[int] = Counter()
    for span in parts.backup.live.values():
        writes.update(span.staging)
    pool = parts.full.staging
    found = _owners("staging", reads + writes, pool.capacity, pool.available)
    for gauge, owned in ((parts.full.reads, reads), (parts.full.writes, writes)):
        if gauge.value != owned.total():
            found.append(f"gauge says {gauge.value} staging pages, ledgers hold {owned.total()}")
    return found


def _device(parts: Parts) -> list[str]:
    tree = parts.full.tree
    owned: Counter[int] = Counter(page for page in tree.all_pages())
    for attempt in parts.attempts:
        owned.update(attempt.device)
    for op in parts.ops.live.values():
        owned.update(op.device)
    return _owners("device", owned, parts.full.device.capacity, parts.full.device.available)


def _touch(parts: Parts) -> list[str]:
    found: list[str] = []
    staging, device = parts.full.staging, parts.full.device
    for op in parts.ops.live.values():
        free = [page for page in op.touched if not staging.is_owned(page)]
        if free:
            found.append(f"{op.describe()} may touch free staging pages {free[:8]}")
        free = [page for page in op.device_rows if not device.is_owned(page)]
        if free:
            found.append(f"{op.describe()} may touch free device pages {free[:8]}")
        found += _foreign_rows(parts, op.id, set(op.touched))
    return found


def _foreign_rows(parts: Parts, op_id: int, touched: set[int]) -> list[str]:
    """Rows that one operation may touch must not be another attempt's or operation's."""
    found: list[str] = []
    for attempt in parts.attempts:
        if attempt.op != op_id and touched.intersection(attempt.staging):
            found.append(f"operation {op_id} may touch staging pages of {attempt.describe()}")
    for other in parts.ops.live.values():
        if other.id != op_id and touched.intersection(other.staging):
            found.append(f"operation {op_id} may touch staging pages of {other.describe()}")
    return found


def _pins(parts: Parts) -> list[str]:
    pinned = [a.pin_tokens for a in parts.attempts if a.pin_node]
    full = parts.full
    found: list[str] = []
    if sum(pinned) != full.pinned.value:
        found.append(f"{sum(pinned)} tokens pinned by attempts, counted {full.pinned.value}")
    if len(pinned) != full.pins.value:
        found.append(f"{len(pinned)} pins held by attempts, counted {full.pins.value}")
    if full.pinned.value > full.config.pin_cap_tokens:
        found.append(f"{full.pinned.value} tokens pinned, cap {full.config.pin_cap_tokens}")
    return found


def _locks(parts: Parts) -> list[str]:
    held: Counter[int] = Counter()
    for attempt in parts.attempts:
        held.update(node for node in (attempt.pin_node, attempt.lock_node) if node)
    for op in parts.ops.live.values():
        held.update([op.lock_node] if op.lock_node else [])
    for span in parts.backup.live.values():
        held.update([span.lock_node] if span.lock_node else [])
    counted = parts.full.tree.locks_held()
    if dict(held) != counted:
        return [f"ledgers lock {dict(held)}, the tree counts {counted}"]
    return []


def _ownership(parts: Parts) -> list[str]:
    found: list[str] = []
    for attempt in parts.attempts:
        state, owned = REQUEST_TABLE.states[attempt.state], attempt.owned()
        if state.final:
            found.append(f"{attempt.describe()} has ended and is still listed")
        if not state.owns <= owned <= state.owns | state.may_own:
            found.append(f"{attempt.describe()} is {state.label} and owns {sorted(owned)}")
    return found


_OWN_OPERATION = {
    State.QUERYING: OpKind.LOOKUP,
    State.READING: OpKind.READ,
    State.LOADING: OpKind.LOAD,
}


def _identity(parts: Parts) -> list[str]:
    found: list[str] = []
    for attempt in parts.attempts:
        op = parts.ops.live.get(attempt.op)
        expected = _OWN_OPERATION.get(State(attempt.state))
        if expected is None and not attempt.keys_known:
            expected = OpKind.HASH
        if expected is None:
            if attempt.op:
                found.append(f"{attempt.describe()} is {attempt.state_name} with operation {attempt.op}")
        elif op is None or op.kind != expected or (op.rid, op.attempt) != (attempt.rid, attempt.number):
            found.append(f"{attempt.describe()} is {attempt.state_name} without its own {expected.name.lower()}")
    return found


def _parked(parts: Parts) -> list[str]:
    parked = {a.slot for a in parts.attempts if a.state == State.PARKED}
    listed = set(parts.parked.order)
    return [] if parked == listed else [f"parked slots {sorted(parked)}, listed {sorted(listed)}"]


def _queue(parts: Parts) -> list[str]:
    waiting = sorted(parts.waiting.place_of(a) for a in parts.attempts if a.state < State.LOADING)
    ready = [parts.waiting.place_of(a) for a in parts.attempts if a.state < State.LOADING and parts.is_candidate(a)]
    found: list[str] = []
    if waiting != parts.waiting.waiting:
        found.append(f"{len(waiting)} attempts wait, {len(parts.waiting.waiting)} are listed")
    if sorted(ready) != parts.waiting.ready:
        found.append(f"candidates {sorted(ready)}, listed {parts.waiting.ready}")
    return found


def _retry(parts: Parts) -> list[str]:
    found: list[str] = []
    for rid, entry in parts.retries.pending.items():
        attempt = parts.attempts.find(rid)
        expected = State.REFETCH if entry.immediate else State.PACED
        if attempt is None or attempt.state != expected:
            found.append(f"retry entry of {rid!r} without a {expected.name.lower()} attempt")
    armed = parts.retries.pending
    for attempt in parts.attempts:
        if attempt.state in (State.PACED, State.REFETCH) and attempt.rid not in armed:
            found.append(f"{attempt.describe()} is {attempt.state_name} with no retry armed")
    return found


def _clock(parts: Parts) -> list[str]:
    timed = {a.slot for a in parts.attempts if a.state in TIMED}
    due = set(parts.agenda.due)
    return [] if timed == due else [f"slots {sorted(timed)} await storage, deadlines are set for {sorted(due)}"]


def _caps(parts: Parts) -> list[str]:
    config = parts.config
    found: list[str] = []
    for a in parts.attempts:
        if a.retries > config.retry_max_attempts:
            found.append(f"{a.describe()} made {a.retries} retries, cap {config.retry_max_attempts}")
        if a.defers >= config.max_defers or a.chances >= config.park_cap:
            found.append(f"{a.describe()} has {a.defers} defers and {a.chances} chances")
    return found


def _accounts(parts: Parts) -> list[str]:
    open_tokens = sum(a.unresolved for a in parts.attempts) + sum(o.unresolved for o in parts.ops.live.values())
    return parts.accounts.check(open_tokens)


def _loads(parts: Parts) -> list[str]:
    readers = {(op_id, a.slot) for a in parts.attempts for op_id in a.load_ops}
    listed = {(op.id, slot) for op in parts.ops.live.values() for slot in op.dependents}
    return [] if readers == listed else [f"load readers differ: {sorted(readers ^ listed)}"]


_CHECKS: dict[str, Callable[[Parts], list[str]]] = {
    "pool": _pool,
    "staging": _staging,
    "device": _device,
    "touch": _touch,
    "pins": _pins,
    "locks": _locks,
    "ownership": _ownership,
    "identity": _identity,
    "parked": _parked,
    "queue": _queue,
    "retry": _retry,
    "clock": _clock,
    "caps": _caps,
    "accounts": _accounts,
    "loads": _loads,
    "tree": lambda parts: parts.full.tree.check_invariants(),
    "backup": lambda parts: parts.backup.check_invariants(),
}
assert set(_CHECKS) == set(NAMES) and set(CANDIDATES).isdisjoint(TIMED)
