"""The world of an exploration: a real control plane in a simulated outside, and the inputs that may come next.

Inputs name requests and operations by their place in the state (`quotient.Names`), not by their ids, so that a list of
inputs means the same in every state that was merged with another. `World.describe` gives the real names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from hicache_fsm.control import snapshot
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.table import State
from hicache_fsm.ports import Command, Load, Lookup, Offload, PageKey, Read, Store
from hicache_fsm.testing.explore_scope import Scope
from hicache_fsm.testing.quotient import Frame, Names, Outside, names_of
from hicache_fsm.testing.sim import Sim, chain


class Input(NamedTuple):
    """One input. `who` is the place of a request or an operation, `how` the variant; both may mean nothing."""

    act: str
    who: int = 0
    how: str = ""

    def __str__(self) -> str:
        return " ".join((self.act, str(self.who), self.how)).strip()


def parse_input(text: str) -> Input:
    """The reverse of `str(input)`; a comment after `#` is ignored. Raises `ValueError` on anything else."""
    words = text.partition("#")[0].split()
    if not 2 <= len(words) <= 3 or words[0] not in ACTS:
        raise ValueError(f"{text!r} is no input; expected '<act> <place> [<variant>]', acts are {', '.join(ACTS)}")
    return Input(words[0], int(words[1]), *words[2:])


Taken: TypeAlias = tuple[snapshot.Snapshot, Outside]
"""A state of the world: the plane's snapshot and the outside's."""

Actor: TypeAlias = tuple[str, int]
"""Who makes progress by an input, for fairness: what is done, and the place of the request that it is done for
(-1: none)."""


class World:
    """One control plane with its outside. Deterministic: the same inputs give the same states."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.sim = Sim(scope.config())
        self.sim.checking = False
        self.parts = self.sim.plane.parts
        self.prompts = [scope.prompt(i) for i in range(scope.requests)]
        self.everything: set[PageKey] = {key for prompt in self.prompts for key in chain(*prompt)}
        groups = {f"r{i}": scope.group(i) for i in range(scope.requests)}
        self.frame = Frame(groups, scope.quantum_ms, scope.writes)
        self.unsubmitted = tuple(range(scope.requests))
        if scope.warm:
            self._warm_up()
        self.sim.stored = set(chain(*self.prompts[0][: scope.warm]))
        if "late" not in scope.faults:
            self.sim.stored |= self.everything
        self._forget()

    def _warm_up(self) -> None:
        """Run one request over the leading pages, with all its writes."""
        self.sim.submit("warm", self.prompts[0][: self.scope.warm])
        self.sim.settle()
        assert self.sim.run("warm"), "the warm-up prompt fits every legal scope"
        self.sim.settle()

    def _forget(self) -> None:
        """Drop what the simulation only keeps for other users: it would be no part of the state."""
        self.sim.past.clear()
        self.sim.asked.clear()
        self.sim.plane.take_restarted()

    # ── states ───────────────────────────────────────────────────────────────────────────────────────

    def take(self) -> Taken:
        sim = self.sim
        outside = Outside(
            frozenset(sim.stored),
            tuple(sim.outstanding.items()),
            frozenset(sim.cancelled),
            tuple(sim.staging),
            tuple(sim.device),
            sim.now_ms,
            tuple(sim.landed.items()),
            tuple([(page, frozenset(loads)) for page, loads in sim.unsure.items()]),
            self.unsubmitted,
        )
        return snapshot.take(sim.plane), outside

    def restore(self, taken: Taken) -> None:
        state, outside = taken
        sim = self.sim
        snapshot.restore(sim.plane, state)
        sim.stored = set(outside.stored)
        sim.outstanding = dict(outside.outstanding)
        sim.cancelled = set(outside.cancelled)
        sim.inbox.clear()
        sim.staging[:] = outside.staging
        sim.device[:] = outside.device
        sim.now_ms = outside.now_ms
        sim.landed = dict(outside.landed)
        sim.unsure = {page: set(loads) for page, loads in outside.unsure}
        sim.wrong.clear()
        self.unsubmitted = outside.unsubmitted

    def look(self) -> tuple[Taken, Names]:
        """The present state, its key, and the places of requests and operations in it."""
        taken = self.take()
        return taken, names_of(*taken, self.frame)

    def names(self) -> Names:
        return self.look()[1]

    def violations(self) -> list[str]:
        """Books, bytes, and, where nothing is left to do, what has not come back."""
        sim = self.sim
        found = sim.plane.check_invariants() + sim.wrong + sim._wrong_bytes()
        outstanding = set(sim.outstanding)
        if outstanding != set(self.parts.ops.live):
            found.append(f"commands: {sorted(outstanding)} were sent, {sorted(self.parts.ops.live)} wait for answers")
        if not found and sim.plane.is_idle():
            found = [f"leak: {text}" for text in sim.leaks() + sim.stale_entries()]
        return found

    # ── what may come next ───────────────────────────────────────────────────────────────────────────

    def inputs(self, names: Names) -> list[tuple[Input, Actor]]:
        """All inputs that are possible now, and who makes progress by each."""
        attempts = [self.parts.attempts.get(rid) for rid, _ in names.attempts]
        spare = self._orphans() < self.scope.orphans
        out = list(self._submits())
        if self._news():
            out.append((Input("pass"), ("pass", -1)))
        if spare and self._next_due() is not None:
            out.append((Input("wait"), ("wait", -1)))
        owners = {attempt.op: place for place, attempt in enumerate(attempts) if attempt.op}
        for place, op in enumerate(names.operations):
            command = self.sim.outstanding[op]
            actor = (f"answer {type(command).__name__}", owners.get(op, -1))
            out += [(Input("answer", place, how), actor) for how in self._answers(op, command)]
        for place, attempt in enumerate(attempts):
            out += [(Input(act, place, how), (act, place)) for act, how in self._requests(attempt, spare)]
        return out + [(Input(act), (act, -1)) for act in self._operator(spare)]

    def _submits(self) -> Iterator[tuple[Input, Actor]]:
        seen: set[int] = set()
        for request in self.unsubmitted:
            group = self.scope.group(request)
            if group not in seen:
                seen.add(group)
                yield Input("submit", request if not self.scope.interchangeable else 0), ("submit", -1)

    def _news(self) -> bool:
        """Whether a pass without answers, at the same time, could do anything."""
        parts = self.parts
        overdue = any(at <= parts.now_ms for at in parts.agenda.due.values())
        return overdue or bool(parts.retries.pending or parts.backup.queue or parts.parked.order)

    def _orphans(self) -> int:
        """Operations that run without the attempt or write span that wanted them."""
        owned = {attempt.op for attempt in self.parts.attempts}
        owned.update(span.op for span in self.parts.backup.live.values())
        return sum(1 for op in self.parts.ops.live if op not in owned)

    def _next_due(self) -> int | None:
        """Milliseconds until something becomes due by time alone."""
        parts, quantum = self.parts, self.parts.config.chance_quantum_ms
        now = parts.now_ms
        times = [*parts.agenda.due.values(), *parts.beliefs.undeliverable.values()]
        if parts.parked.order and parts.parked.head_refusal is not None:
            times.append(parts.parked.tried_ms + quantum)
        times += [a.refused_ms + quantum for a in parts.attempts if a.defers and a.state == State.STAGED]
        later = [at - now for at in times if at > now]
        return min(later, default=None)

    def _answers(self, op: int, command: Command) -> Iterator[str]:
        faults = self.scope.faults
        yield "full"
        if "lost" in faults:
            yield "lost"
        if "twice" in faults:
            yield "twice"
        if "failed" in faults and isinstance(command, Lookup | Load | Offload):
            yield "failed"
        if isinstance(command, Lookup | Read | Store):
            least = self.sim.landed.get(op, 0)
            most = len(command.keys) if isinstance(command, Store) else self.sim._stored_run(command.keys)
            if "partial" in faults:
                yield from (f"pages:{n}" for n in range(least, most))
            elif "failed" in faults and isinstance(command, Store) and most:
                yield "pages:0"
            if "progress" in faults and isinstance(command, Read) and op not in self.sim.cancelled:
                yield from (f"progress:{n}" for n in range(least + 1, most + 1))

    def _requests(self, attempt: Attempt, spare: bool) -> Iterator[tuple[str, str]]:
        faults, parts = self.scope.faults, self.parts
        if attempt.state < State.LOADING:
            timed = attempt.state in (State.QUERYING, State.READING, State.PARKED)
            if parts.is_candidate(attempt) and (spare or not timed):
                yield "admit", ""
                if "chunk" in faults:
                    yield "admit", "chunk"
            if attempt.state == State.STAGED:
                yield "defer", ""
        else:
            owned = attempt.published_pages + len(attempt.device)
            if min(owned, len(attempt.keys)) > attempt.published_pages:
                yield "compute", ""
            elif owned < attempt.num_tokens:
                yield "extend", ""
            else:
                yield "finish", ""
        if spare:
            if self.scope.aborts:
                yield "abort", ""
            if "reject" in faults and attempt.state < State.LOADING:
                yield "reject", ""
            if ("restart" if attempt.state < State.LOADING else "retract") in faults:
                yield "retract", ""

    def _operator(self, spare: bool) -> Iterator[str]:
        faults, parts = self.scope.faults, self.parts
        if "evict" in faults and parts.full.tree.evictable:
            yield "evict"
        if "late" in faults and not self.everything <= self.sim.stored:
            yield "late"
        if "detach" in faults and (spare or not parts.storage_on):
            yield "detach" if parts.storage_on else "attach"
        if "flush" in faults and spare:
            yield "flush"

    # ── doing it ─────────────────────────────────────────────────────────────────────────────────────

    def apply(self, one: Input, names: Names) -> None:
        """Do one input; what the plane raises is let through."""
        ACTS[one.act](self, one, names)
        assert not self.sim.inbox, "every answer is applied by the pass that it comes with"
        self._forget()

    def _attempt(self, one: Input, names: Names) -> Attempt:
        return self.parts.attempts.get(names.attempts[one.who][0])

    def _submit(self, one: Input, names: Names) -> None:
        request = self.unsubmitted[0] if self.scope.interchangeable else one.who
        self.unsubmitted = tuple(r for r in self.unsubmitted if r != request)
        self.sim.submit(f"r{request}", self.prompts[request], hashed="hash" in self.scope.faults)

    def _pass(self, one: Input, names: Names) -> None:
        """One pass without news; where a paced retry is all that is awaited, as many as it takes."""
        retries = self.parts.retries
        passes = 1
        if not retries.unstarted and not self.parts.backup.queue and retries.pending:
            passes = max(1, min(entry.due for entry in retries.pending.values()) - retries.step)
        for _ in range(passes):
            self.sim.tick(0)

    def _wait(self, one: Input, names: Names) -> None:
        due = self._next_due()
        assert due is not None, "nothing is due"
        self.sim.tick(due)

    def _answer(self, one: Input, names: Names) -> None:
        sim, op = self.sim, names.operations[one.who]
        how, _, pages = one.how.partition(":")
        if how == "progress":
            sim.progress(op, int(pages))
        else:
            self._final(op, how, int(pages) if pages else None)
            sim.landed.pop(op, None)
        sim.tick(0)

    def _final(self, op: int, how: str, pages: int | None) -> None:
        sim = self.sim
        if how == "lost":
            sim.lose(op)
            return
        completion = sim.answer(op, pages=pages, ok=how != "failed")
        if how == "twice":
            sim.repeat(completion)

    def _admit(self, one: Input, names: Names) -> None:
        plane, attempt = self.sim.plane, self._attempt(one, names)
        candidate = plane.consider(attempt)
        if candidate is not None:
            end = candidate.cached_pages + 1 if one.how == "chunk" else attempt.num_tokens
            plane.admit(candidate, end)
        self.sim.pump()

    def _defer(self, one: Input, names: Names) -> None:
        plane = self.sim.plane
        candidate = plane.consider(self._attempt(one, names))
        if candidate is not None:
            plane.defer(candidate)
        self.sim.pump()

    def _compute(self, one: Input, names: Names) -> None:
        attempt = self._attempt(one, names)
        self.sim.compute(attempt.rid, min(attempt.num_tokens, attempt.published_pages + len(attempt.device)))

    def _extend(self, one: Input, names: Names) -> None:
        attempt = self._attempt(one, names)
        self.sim.call(lambda plane: plane.extend(attempt.rid, attempt.num_tokens))

    def _finish(self, one: Input, names: Names) -> None:
        rid = names.attempts[one.who][0]
        self.sim.call(lambda plane: plane.finish(rid))

    def _abort(self, one: Input, names: Names) -> None:
        rid = names.attempts[one.who][0]
        self.sim.call(lambda plane: plane.abort(rid))

    def _reject(self, one: Input, names: Names) -> None:
        rid = names.attempts[one.who][0]
        self.sim.call(lambda plane: plane.reject(rid))

    def _retract(self, one: Input, names: Names) -> None:
        attempt = self._attempt(one, names)
        keys = attempt.keys if attempt.keys_known else None
        self.sim.call(lambda plane: plane.retract(attempt.rid, attempt.num_tokens, keys))

    def _evict(self, one: Input, names: Names) -> None:
        """Another user of the device pool takes one page more than is free, and gives all back."""
        full = self.parts.full
        pages = full.take_device(full.device.available + 1)
        assert pages is not None, "an evictable page was not had"
        full.give_device(pages)
        self.sim.pump()

    def _late(self, one: Input, names: Names) -> None:
        self.sim.stored |= self.everything

    def _operate(self, one: Input, names: Names) -> None:
        self.sim.call(lambda plane: getattr(plane, one.act)())

    # ── words ────────────────────────────────────────────────────────────────────────────────────────

    def describe(self, one: Input, names: Names) -> str:
        """The input with the real names of this run."""
        if one.act == "answer":
            op = names.operations[one.who]
            command: Any = self.sim.outstanding[op]
            whose = getattr(command, "rid", None) or f"write span {getattr(command, 'span', 0)}"
            return f"answer {type(command).__name__.lower()} {op} of {whose}: {one.how}"
        if one.act == "submit":
            return f"submit r{self.unsubmitted[0] if self.scope.interchangeable else one.who}"
        if one.act in ("admit", "defer", "compute", "extend", "finish", "abort", "reject", "retract"):
            return f"{one.act} {names.attempts[one.who][0]} {one.how}".rstrip()
        return one.act


ACTS: dict[str, Callable[[World, Input, Names], None]] = {
    "submit": World._submit,
    "pass": World._pass,
    "wait": World._wait,
    "answer": World._answer,
    "admit": World._admit,
    "defer": World._defer,
    "compute": World._compute,
    "extend": World._extend,
    "finish": World._finish,
    "abort": World._abort,
    "reject": World._reject,
    "retract": World._retract,
    "evict": World._evict,
    "late": World._late,
    "detach": World._operate,
    "attach": World._operate,
    "flush": World._operate,
}
