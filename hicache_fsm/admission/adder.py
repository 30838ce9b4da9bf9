"""`PrefillAdder`: builds one prefill batch, candidate by candidate.

    select   decides the shape against the budgets, under a lock on the candidate's prefix; allocates nothing
    load     device pages for span and chunk, evicting what is needed, all or none; the hold's copy is queued
    commit   charges the budgets, once

Load and commit are one step of the control plane (`ControlPlane.admit`): there is no moment at which a hold
has been consumed and its request has not been admitted.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from hicache_fsm.admission.budget import CLIP_MAX_NEW_TOKENS, BudgetState, PrefillBudget
from hicache_fsm.control.plane import Candidate, ControlPlane


class Verdict(enum.Enum):
    """What became of one candidate, and with it of the scan."""

    ADMITTED = "admitted"
    SKIP = "skip"  # this one has to wait; the next may be tried
    STOP = "stop"  # nothing more fits this pass; the candidate keeps its place


class PrefillEntry(NamedTuple):
    """Tokens that one request computes in this batch."""

    rid: str
    start: int  # tokens whose KV is there or on its way
    end: int  # tokens whose KV is there afterwards
    prompt_end: int  # the whole prompt; `end` is smaller while it is computed in chunks
    device_tokens: int  # prefix found on the device (0 for later chunks)
    storage_tokens: int  # prefix loaded from storage (0 for later chunks)
    load_ops: tuple[int, ...]  # loads whose layers must be there first

    @property
    def is_chunk(self) -> bool:
        return self.end < self.prompt_end


class PrefillAdder:
    """One batch. `idle` says that nothing runs: capacity will then not come back by itself, so a refused hold
    is deferred (counted) and the scan goes on past it, lest a blocked head hide requests that fit."""

    __slots__ = ("plane", "budget", "idle", "entries")

    def __init__(self, plane: ControlPlane, budget: PrefillBudget, *, idle: bool) -> None:
        self.plane = plane
        self.budget = budget
        self.idle = idle
        self.entries: list[PrefillEntry] = []

    def add(self, candidate: Candidate, max_new_tokens: int) -> Verdict:
        """Try one candidate, which is to generate at most `max_new_tokens` more tokens."""
        if self.budget.state() is BudgetState.OTHER or self.budget.admitted >= self.budget.limits.max_running_requests:
            return Verdict.STOP
        tree = self.plane.parts.full.tree
        node = tree.deepest(candidate.attempt.keys, candidate.match_pages)
        tree.lock(node)  # takes the prefix out of what counts as evictable
        try:
            return self._select(candidate, min(max_new_tokens, CLIP_MAX_NEW_TOKENS))
        finally:
            tree.unlock(node)

    def _select(self, candidate: Candidate, max_new: int) -> Verdict:
        budget, attempt = self.budget, candidate.attempt
        page = budget.page
        start = candidate.cached_pages * page
        load = (candidate.cached_pages - candidate.match_pages) * page
        end = budget.cut(start, attempt.num_tokens)
        if end == start:
            return Verdict.STOP  # the batch is full; not this candidate's fault
        rest = attempt.num_tokens - end
        rows = load + budget.ceil_page(end - start)
        growth = budget.ceil_page(rest) + max_new + page
        alone = self.idle and not self.entries
        room = budget.full.room() * page if alone else budget.total
        # Alone, a request needs room for what it computes now; its growth was checked against the whole pool.
        fits = rows <= room if alone else rows + growth < room
        admitted = self.plane.admit(candidate, end) if fits else None
        if admitted is None:
            return self._no_room(candidate, load_fails=load > 0 and rows > budget.full.room() * page)
        budget.charge(end - start, growth)
        device, storage = admitted.device_pages * page, admitted.loaded_pages * page
        entry = PrefillEntry(attempt.rid, start, end, attempt.num_tokens, device, storage, admitted.load_ops)
        self.entries.append(entry)
        return Verdict.ADMITTED

    def _no_room(self, candidate: Candidate, load_fails: bool) -> Verdict:
        """A hold that could not be loaded even without regard to growth is deferred in any case. Other
        refusals count only while nothing runs: else what runs, or was just admitted, will give room back."""
        alone = self.idle and not self.entries
        if alone or load_fails:
            self.plane.defer(candidate)
        return Verdict.SKIP if alone else Verdict.STOP

    def continue_chunk(self, rid: str, start: int, prompt_end: int, max_new_tokens: int) -> bool:
        """Give the next chunk to a request that is in the middle of its prompt, or as much of it as the device
        has room for. False if there is no room at all."""
        budget = self.budget
        end = budget.cut(start, prompt_end)
        most = start // budget.page * budget.page + budget.full.room() * budget.page
        if budget.ceil_page(end) > most:
            end = most
        if end <= start or not self.plane.extend(rid, end):
            return False
        rest = prompt_end - end
        budget.charge(end - start, budget.ceil_page(rest) + min(max_new_tokens, CLIP_MAX_NEW_TOKENS))
        loads = self.plane.parts.attempts.get(rid).load_ops
        self.entries.append(PrefillEntry(rid, start, end, prompt_end, 0, 0, loads))
        return True
