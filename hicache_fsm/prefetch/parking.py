"""Parked hits: one FIFO ahead of newer hits.

The head is tried again when something that it waits for has changed (room, pin budget, or the end of its device
prefix), or when an agreed quantum of time has passed. A younger hit may pass only while the head waits for pin budget
and the younger needs no pin; `bypass_cap` times per head, so that passing cannot starve it.
"""

from __future__ import annotations

import enum


class Refusal(enum.Enum):
    """Why a hit found no room."""

    STAGING = "staging"
    PIN_BUDGET = "pin_budget"


class ParkedQueue:
    """Slots of parked attempts in the order of parking."""

    __slots__ = ("order", "head_refusal", "bypasses", "tried_version", "tried_ms")

    def __init__(self) -> None:
        self.order: dict[int, None] = {}  # insertion-ordered set
        self.head_refusal: Refusal | None = None
        self.bypasses = 0  # hits that have passed the present head
        self.tried_version: tuple[int, ...] = ()  # news that the head has been tried with
        self.tried_ms = 0

    def __len__(self) -> int:
        return len(self.order)

    def head(self) -> int | None:
        return next(iter(self.order), None)

    def join(self, slot: int) -> None:
        assert slot not in self.order, f"slot {slot} is parked already"
        if not self.order:
            self._new_head()
        self.order[slot] = None

    def leave(self, slot: int) -> None:
        """Take a hit out; a new head has not been tried yet and starts with a clean bypass count."""
        was_head = self.head() == slot
        del self.order[slot]
        if was_head:
            self._new_head()

    def may_try(self, version: tuple[int, ...], now_ms: int, quantum_ms: int) -> bool:
        """Whether the head has a chance now: never tried, or something changed, or the quantum has passed."""
        if not self.order:
            return False
        return self.head_refusal is None or version != self.tried_version or now_ms - self.tried_ms >= quantum_ms

    def refused(self, refusal: Refusal, version: tuple[int, ...], now_ms: int) -> None:
        self.head_refusal = refusal
        self.tried_version = version
        self.tried_ms = now_ms

    def may_bypass(self, cap: int) -> bool:
        return self.head_refusal is Refusal.PIN_BUDGET and self.bypasses < cap

    def bypassed(self) -> None:
        self.bypasses += 1

    def _new_head(self) -> None:
        self.head_refusal = None
        self.bypasses = 0
        self.tried_version = ()
