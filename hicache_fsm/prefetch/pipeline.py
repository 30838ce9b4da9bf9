"""The load path: look-up, commit, parking, read, hold, plan.

Each step decides and then fires one event; what follows from the event is the table's business. Nothing
here waits, and nothing is allocated before the hit is known.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from hicache_fsm.components.full import FullComponent
from hicache_fsm.config import CacheConfig
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.attempts import AttemptTable
from hicache_fsm.lifecycle.machine import Machine
from hicache_fsm.lifecycle.table import Event, Outcome, State
from hicache_fsm.prefetch.accounts import HitAccounts
from hicache_fsm.prefetch.parking import ParkedQueue, Refusal


class Plan(NamedTuple):
    """What of a hold must reach the device, against the tree of this moment. A local value of one admission.

        0 ......... base ......... match ......... end ......... prompt
        device      │ staged, but   │ staged and    │ computed
                    │ covered now   │ to be loaded  │
    """

    match_pages: int  # device-resident prefix
    end_pages: int  # end of the staged span

    @property
    def load_pages(self) -> int:
        return self.end_pages - self.match_pages


class PrefetchPipeline:
    """Decisions of the load path for FULL attention. One object per control plane."""

    __slots__ = ("config", "full", "attempts", "accounts", "parked", "machine", "now_ms")

    def __init__(
        self,
        config: CacheConfig,
        full: FullComponent,
        attempts: AttemptTable,
        accounts: HitAccounts,
        parked: ParkedQueue,
        machine: Machine[Attempt],
    ) -> None:
        self.config = config
        self.full = full
        self.attempts = attempts
        self.accounts = accounts
        self.parked = parked
        self.machine = machine
        self.now_ms = 0

    # ── look-up ──────────────────────────────────────────────────────────────────────────────────────

    def usable_pages(self, attempt: Attempt) -> int:
        """Most pages that may come from a cache: the last token is always computed."""
        return min(len(attempt.keys), max(0, attempt.num_tokens - 1) // self.config.page_size)

    def issue(self, attempt: Attempt, known_end: int = 0) -> bool:
        """Ask storage for what the device does not hold; whether a look-up was issued.

        With a known end the answer is assumed: a page is stored only below a stored parent, so a suffix
        known to be there implies all before it.
        """
        match = self.boundary(attempt)
        end = self.usable_pages(attempt)
        assumed = match < known_end <= end
        if assumed:
            end = known_end
        if end > match:
            self.accounts.count("attempts")
        attempt.relied_pages = match
        if (end - match) < self.config.threshold_pages:
            if end > match:
                self.accounts.count("declined_too_short")
            if attempt.state in (State.PACED, State.REFETCH):
                self.machine.fire(attempt, Event.DECLINED)
            return False
        attempt.base_pages = match
        attempt.end_pages = end if assumed else 0
        self.machine.fire(attempt, Event.LOOKUP)
        self.accounts.count("issued")
        if assumed:
            self.accounts.count("issued_assumed_stored")
            self.hit(attempt, end - match, end - match)
        return True

    # ── boundaries: what the device holds, kept up to date by watches ────────────────────────────────

    def watch(self, attempt: Attempt) -> None:
        """Match once; from now on the tree tells when the boundary moves."""
        tree = self.full.tree
        attempt.match_pages = tree.match(attempt.keys, attempt.match_pages)
        tree.watch(attempt.slot, attempt.keys, attempt.match_pages)

    def refresh(self) -> None:
        """Match those again whose boundary has moved, and only those."""
        for slot in self.full.tree.take_dirty():
            attempt = self.attempts.live.get(slot)
            if attempt is not None:
                self.attempts.touches += 1
                self.watch(attempt)
                if 0 <= attempt.relied_pages < attempt.match_pages:
                    # A sibling has brought more: if that leaves again, it is worth a look-up.
                    attempt.relied_pages = attempt.match_pages

    def boundary(self, attempt: Attempt) -> int:
        """Device-resident prefix of a waiting attempt, in pages, as of this moment."""
        self.refresh()
        return attempt.match_pages

    # ── the answer ───────────────────────────────────────────────────────────────────────────────────

    def hit(self, attempt: Attempt, requested_pages: int, hit_pages: int) -> None:
        """The published answer of the attempt's own look-up."""
        page = self.config.page_size
        self.accounts.publish(requested_pages * page, hit_pages * page)
        attempt.unresolved = hit_pages * page
        attempt.end_pages = attempt.base_pages + hit_pages
        if hit_pages < self.config.threshold_pages:
            attempt.end_pages = 0
            self.accounts.count("revoked_insufficient" if hit_pages else "revoked_full_miss")
            self.machine.fire(attempt, Event.MISS, hit_pages)
            return
        self._cut_to_staging(attempt)
        if self.parked.order and not self._may_pass(attempt):
            self._park(attempt, Refusal.STAGING)
            return
        passing = bool(self.parked.order)
        refusal = self.commit(attempt)
        if refusal is not None:
            self._park(attempt, refusal)
        elif passing and attempt.state == State.READING:
            self.parked.bypassed()
            self.accounts.count("bypasses")

    def _cut_to_staging(self, attempt: Attempt) -> None:
        """A hit larger than all that reads may hold is cut at once, so that its head is still used."""
        surplus = attempt.end_pages - attempt.base_pages - self.full.read_limit
        if surplus > 0:
            tokens = surplus * self.config.page_size
            attempt.end_pages -= surplus
            attempt.unresolved -= tokens
            self.accounts.lose(tokens, Outcome.HOST_CAPACITY)
            self.accounts.count("declined_host_oversize")

    def _park(self, attempt: Attempt, refusal: Refusal) -> None:
        self.accounts.count("parks")
        self.accounts.count("declined_rate_limited")
        self.machine.fire(attempt, Event.PARK)
        if self.parked.head() == attempt.slot:
            self.parked.refused(refusal, self._news(), self.now_ms)

    # ── commit ───────────────────────────────────────────────────────────────────────────────────────

    def commit(self, attempt: Attempt) -> Refusal | None:
        """Turn a known hit into a running read, or end it; a refusal leaves everything as it was.

        The order is upstream's once the pools can serve anything at all: base, cover, pin, trim, allocate. Trimming is
        worked out anew at each try and written down only with the grant, so that an eviction in between costs nothing.
        """
        config, full = self.config, self.full
        if full.read_limit < config.threshold_pages:
            self.accounts.count("declined_unservable_prefix")
            self.machine.fire(attempt, Event.UNSERVABLE)
            return None
        match = self.boundary(attempt)
        if match < attempt.base_pages:
            self.accounts.count("declined_anchor_lost")
            self.machine.fire(attempt, Event.BASE_LOST)
            return None
        if match >= attempt.end_pages:
            self.accounts.count("declined_device_covered")
            attempt.relied_pages = match
            self.machine.fire(attempt, Event.COVERED)
            return None
        tokens = match * config.page_size
        pinnable = tokens > 0 and full.pin_ever_fits(tokens)
        if pinnable and not full.pin_fits(tokens):
            return Refusal.PIN_BUDGET
        rows = full.take_read_staging(attempt.end_pages - match)
        if rows is None:
            return Refusal.STAGING
        if pinnable:
            attempt.pin_node = full.tree.deepest(attempt.keys, match)
            attempt.pin_tokens = tokens
            full.pin(attempt.pin_node, tokens)
        elif tokens:
            self.accounts.count("unpinned_reads")
        attempt.base_pages = match
        attempt.staging = tuple(rows)
        attempt.landed_pages = 0
        self.machine.fire(attempt, Event.GRANT)
        return None

    def needs_pin(self, attempt: Attempt) -> bool:
        tokens = self.boundary(attempt) * self.config.page_size
        return tokens > 0 and self.full.pin_ever_fits(tokens)

    def _may_pass(self, attempt: Attempt) -> bool:
        return self.parked.may_bypass(self.config.bypass_cap) and not self.needs_pin(attempt)

    # ── parked hits ──────────────────────────────────────────────────────────────────────────────────

    def wanted_by_parked(self) -> int:
        """Staging pages that the parked head waits for; writes leave them alone."""
        slot = self.parked.head()
        if slot is None or self.parked.head_refusal is Refusal.PIN_BUDGET:
            return 0
        attempt = self.attempts.live[slot]
        return max(0, attempt.end_pages - max(attempt.base_pages, attempt.match_pages))

    def _news(self) -> tuple[int, ...]:
        """Changes whenever another try of the parked head could end otherwise."""
        slot = self.parked.head()
        return () if slot is None else (*self.full.room_version(), self.boundary(self.attempts.live[slot]))

    def drain_parked(self) -> None:
        """Give the head its turn as long as it finds room; then let pin-free hits pass, within the cap."""
        parked = self.parked
        while parked.may_try(self._news(), self.now_ms, self.config.chance_quantum_ms):
            slot = parked.head()
            assert slot is not None
            attempt = self.attempts.live[slot]
            self.attempts.touches += 1
            refusal = self.commit(attempt)
            if refusal is not None:
                parked.refused(refusal, self._news(), self.now_ms)
                self.machine.fire(attempt, Event.REFUSED)
                if attempt.state == State.PARKED:
                    self._let_pass()
                    return

    def _let_pass(self) -> None:
        """Look at a bounded number of hits behind a head that waits for pin budget."""
        parked = self.parked
        if not parked.may_bypass(self.config.bypass_cap):
            return
        for slot in list(itertools.islice(parked.order, 1, 1 + self.config.bypass_cap)):
            attempt = self.attempts.live[slot]
            self.attempts.touches += 1
            if not parked.may_bypass(self.config.bypass_cap):
                return
            if self.needs_pin(attempt) or self.commit(attempt) is not None:
                continue
            if attempt.state == State.READING:
                parked.bypassed()
                self.accounts.count("bypasses")

    # ── the hold ─────────────────────────────────────────────────────────────────────────────────────

    def plan(self, attempt: Attempt) -> Plan | None:
        """The plan of a staged attempt, or None if it is not staged any more: covered, or its base shrank."""
        match = self.boundary(attempt)
        if match >= attempt.end_pages:
            attempt.relied_pages = match
            self.machine.fire(attempt, Event.COVERED)
            return None
        if match < attempt.base_pages:
            self.accounts.count("shrinks")
            self.machine.fire(attempt, Event.SHRANK)
            return None
        return Plan(match, attempt.end_pages)
