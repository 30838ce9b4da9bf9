"""The real control plane behind the actions of `Prefetch.tla`, and the mapping from its state to a view.

See `spec.agreement` for what is compared and what is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hicache_fsm.config import CacheConfig, PrefetchPolicy
from hicache_fsm.control import snapshot
from hicache_fsm.control.effects import RequestEffects
from hicache_fsm.control.plane import ControlPlane
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.lifecycle.operations import Operation
from hicache_fsm.lifecycle.table import CANDIDATES, TIMED, State
from hicache_fsm.ports import LoadDone, LookupDone, PageKey, ReadDone, ReadProgress
from hicache_fsm.prefetch.parking import Refusal

View = tuple[Any, ...]
"""Requests, operations, and what they share; see `Code.view`."""

WAITING = frozenset(("idle", "paced", "refetch", "querying", "reading", "parked", "staged", "recomputing"))


Bounds = dict[str, Any]
"""Constants of a configuration file."""

DEFINED = {
    "One": (1,), "Twins": (1, 1), "AllTwins": (1, 1, 1), "Cold": (0,), "WarmBase": (1,),
    "Everything": frozenset(("abort", "retract", "detach", "evict", "partial", "progress", "miss", "loadfail",
                             "writefail", "defer", "deadline")),
}  # fmt: skip
"""Values that the configurations take from MC.tla."""


def read_bounds(config: Path) -> Bounds:
    """Constants of a .cfg file. Raises `ValueError` if it has several prompts, or writes."""
    values: dict[str, Any] = {}
    text = "\n".join(line for line in config.read_text().splitlines() if not line.startswith("\\*"))
    body = text.split("CONSTANTS", 1)[1].split("INVARIANT")[0].split("PROPERTY")[0]
    for name, arrow, value in re.findall(r"(\w+)\s*(<-|=)\s*(\{[^}]*\}|\w+)", body):
        if arrow == "<-":
            if value not in DEFINED:
                raise ValueError(f"{config.name}: {name} <- {value} is not covered by graph equality")
            values[name] = DEFINED[value]
        elif value.startswith("{"):
            values[name] = frozenset(re.findall(r'"(\w+)"', value))
        else:
            values[name] = value == "TRUE" if value in ("TRUE", "FALSE") else int(value)
    if values["Writes"]:
        raise ValueError(f"{config.name} has writes, which graph equality does not cover")
    return values


def make_config(b: Bounds) -> CacheConfig:
    return CacheConfig(
        page_size=1, device_pages=b["D"], staging_pages=b["S"], max_context_tokens=b["D"] - b["PinCap"],
        prefetch_threshold_tokens=b["Threshold"], anchor_lock_cap=1.0,
        load_pool_usage_fraction=b["ReadLimit"] / b["S"],
        prefetch_policy=PrefetchPolicy.BEST_EFFORT if b["BestEffort"] else PrefetchPolicy.WAIT_COMPLETE,
        retry_max_attempts=b["RetryCap"], retry_poll_interval_passes=b["Interval"], max_defers=b["DeferCap"],
        park_cap=b["ParkCap"], bypass_cap=b["BypassCap"], chance_quantum_ms=1, negative_ttl_ms=0,
        write_backlog_factor=0, history_length=1, debug=True,
    )  # fmt: skip


class Code:
    """A control plane that can be put into any state met before, and taken through the spec's actions."""

    def __init__(self, bounds: Bounds, effects: type[RequestEffects] = RequestEffects) -> None:
        self.b = bounds
        self.keys: tuple[PageKey, ...] = tuple(bytes([i + 1]) * 32 for i in range(bounds["L"]))
        self.plane = ControlPlane(make_config(bounds), effects=effects)
        self.retracts: int = bounds["Retracts"]
        self._warm_up(bounds["Warm"][0])

    def _warm_up(self, pages: int) -> None:
        if not pages:
            return
        plane = self.plane
        attempt = plane.submit("warm", pages + 1, self.keys[:pages])
        plane.answers.apply(LookupDone(attempt.op, 0, True))
        candidate = plane.consider(attempt)
        assert candidate is not None and plane.admit(candidate, pages + 1) is not None
        plane.finish("warm", pages + 1, self.keys[:pages])
        plane.take_commands()

    def state(self) -> tuple[snapshot.Snapshot, int]:
        return snapshot.take(self.plane), self.retracts

    def restore(self, state: tuple[snapshot.Snapshot, int]) -> None:
        snapshot.restore(self.plane, state[0])
        self.retracts = state[1]

    def attempt(self, r: int) -> Attempt | None:
        return self.plane.parts.attempts.find(f"r{r}")

    # The mapping, from a state of the code.

    def view(self) -> View:
        parts = self.plane.parts
        full, parked = parts.full, parts.parked
        requests = tuple(self._request(r) for r in range(1, self.b["N"] + 1))
        ops = tuple(sorted(self._operation(op) for op in parts.ops.live.values() if op.rid))
        length = full.tree.match(self.keys)
        loading = full.tree.loads
        tree = tuple(bool(loading(self.keys, i, i + 1)) for i in range(length))
        refused = parked.head_refusal
        why = "none" if refused is None else {Refusal.STAGING: "staging", Refusal.PIN_BUDGET: "pin"}[refused]
        news = refused is None or parked.tried_version[:2] != full.room_version()
        return (requests, ops, (tree,), full.staging.available, full.device.available, full.pinned.value,
                tuple(self._number(parts.attempts.live[slot].rid) for slot in parked.order), why, news,
                0 if refused is None else parked.tried_version[2], parked.bypasses, parts.storage_on,
                self.retracts)  # fmt: skip

    @staticmethod
    def _number(rid: str) -> int:
        return int(rid[1:])

    def _request(self, r: int) -> tuple[Any, ...]:
        a = self.attempt(r)
        if a is None:
            return ("gone" if r in self.submitted else "new", False, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        name = State(a.state).name.lower()
        asks = name in WAITING and name != "recomputing"
        based = a.state in (*TIMED, State.STAGED)
        return (name, a.storage_open, a.retries, a.defers, a.chances, a.base_pages if based else 0,
                a.end_pages if asks else 0, a.relied_pages if asks else 0, self._pace(a), len(a.staging), a.pin_tokens,
                a.published_pages, len(a.device))  # fmt: skip

    def _pace(self, a: Attempt) -> int:
        retries = self.plane.parts.retries
        if a.state != State.PACED:
            return 0
        entry = retries.pending[a.rid]
        interval: int = self.b["Interval"]
        return interval + 1 if entry.due < 0 else entry.due - retries.step

    def _operation(self, op: Operation) -> tuple[Any, ...]:
        parts = self.plane.parts
        owner = parts.attempts.live.get(op.slot)
        own = owner is not None and owner.op == op.id
        lookup, load = op.kind == OpKind.LOOKUP, op.kind == OpKind.LOAD
        a = self.keys.index(op.keys[0]) if load else 0
        rows = 0 if lookup else len(op.staging) if load else len(op.rows)
        deps = tuple(sorted(self._number(parts.attempts.live[slot].rid) for slot in op.dependents))
        asked, end = len(op.keys) if lookup else 0, a + len(op.keys) if load else 0
        return (OpKind(op.kind).name.lower(), self._number(op.rid), own, asked, rows, op.progress, len(op.staging), a,
                end, bool(op.lock_node), len(op.device), deps)  # fmt: skip

    @property
    def submitted(self) -> range:
        """Requests arrive in the order of their numbers, after the one that warmed the device."""
        first = 1 if self.b["Warm"][0] else 0
        return range(1, self.plane.parts.attempts.next_seq - first + 1)

    # The actions.

    def steps(self) -> list[tuple[str, Callable[[], object]]]:
        """Every action of the spec that may be possible now, by the spec's name."""
        plane, env = self.plane, self.b["Env"]
        out: list[tuple[str, Callable[[], object]]] = []
        done = len(self.submitted)
        if done < self.b["N"]:
            out.append(("Submit", lambda: plane.submit(f"r{done + 1}", self.b["L"] + 1, self.keys)))
        for a in list(plane.parts.attempts):
            out += self._of_attempt(a.rid, a, env)
        for op in list(plane.parts.ops.live.values()):
            out += self._answers(op, env)
        if plane.parts.parked.order:
            out.append(("Drain", self._drain))
        if any(a.state in (State.PACED, State.REFETCH) for a in plane.parts.attempts):
            out.append(("Retry", plane._retry))
        if "evict" in env and plane.parts.full.tree.evictable:
            out.append(("Evict", self._evict))
        if "detach" in env and plane.parts.storage_on:
            out.append(("Detach", plane.detach))
        return out

    def _of_attempt(self, rid: str, a: Attempt, env: frozenset[str]) -> Iterator[tuple[str, Callable[[], object]]]:
        plane, tokens = self.plane, self.b["L"] + 1
        if plane.parts.is_candidate(a):
            yield "Look", lambda: plane.consider(plane.parts.attempts.get(rid))
        if a.state in CANDIDATES:
            yield "Admit", lambda: self._admit(rid)
        if a.state == State.STAGED and "defer" in env:
            yield "Defer", lambda: self._defer(rid)
        if a.state >= State.LOADING:
            if a.published_pages < self.b["L"]:
                yield "Compute", lambda: plane.publish(rid, tokens)
            yield "Finish", lambda: plane.finish(rid)
        if a.state in TIMED and "deadline" in env:
            yield "Due", lambda: plane._deadline(plane.parts.attempts.get(rid))
        if "abort" in env:
            yield "Abort", lambda: plane.abort(rid)
        if "retract" in env and self.retracts:
            yield "Retract", lambda: self._retract(rid, tokens)

    def _answers(self, op: Operation, env: frozenset[str]) -> Iterator[tuple[str, Callable[[], object]]]:
        apply = self.plane.answers.apply
        if op.kind == OpKind.LOOKUP:
            for n in range(0 if "miss" in env else len(op.keys), len(op.keys) + 1):
                yield "LookupDone", partial(apply, LookupDone(op.id, n, True))
        elif op.kind == OpKind.READ:
            for n in range(op.progress if "partial" in env else len(op.rows), len(op.rows) + 1):
                yield "ReadDone", partial(apply, ReadDone(op.id, n))
            if "progress" in env and op.slot >= 0:
                for n in range(op.progress + 1, len(op.rows) + 1):
                    yield "ReadProgress", partial(apply, ReadProgress(op.id, n))
        elif op.kind == OpKind.LOAD:
            yield "LoadDone", partial(apply, LoadDone(op.id, True))
            if "loadfail" in env:
                yield "LoadFailed", partial(apply, LoadDone(op.id, False))

    def _quantum(self) -> None:
        """An agreed quantum of time passes: whoever waits for a chance has one."""
        parts = self.plane.parts
        parts.set_time(parts.pass_no + 1, parts.now_ms + 1)

    def _drain(self) -> None:
        self._quantum()
        self.plane.parts.prefetch.drain_parked()

    def _settled(self, rid: str) -> Any:
        """The candidate, if looking at the request changes nothing."""
        before = self.view()
        candidate = self.plane.consider(self.plane.parts.attempts.get(rid))
        return candidate if self.view() == before else None

    def _admit(self, rid: str) -> bool:
        candidate = self._settled(rid)
        return candidate is not None and self.plane.admit(candidate, self.b["L"] + 1) is not None

    def _defer(self, rid: str) -> bool:
        candidate = self._settled(rid)
        if candidate is None:
            return False
        self._quantum()
        self.plane.defer(candidate)
        return True

    def _retract(self, rid: str, tokens: int) -> None:
        self.retracts -= 1
        self.plane.retract(rid, tokens, self.keys)

    def _evict(self) -> None:
        full = self.plane.parts.full
        pages = full.take_device(full.device.available + 1)
        assert pages is not None
        full.give_device(pages)

    def settle(self) -> None:
        """After each step: what every later call would do first."""
        self.plane.parts.prefetch.refresh()
        self.plane.take_commands()
        self.plane.take_restarted()
