"""`Attempt`: the record of one stay of a request in the queue and in a batch, with its ledger and history.

Fields are plain ints, strings and tuples, so that a snapshot is a copy of the slots. The *ledger* is the
part that owns things; nothing an attempt owns is recorded anywhere else.

    staging     staging pages of the hold or of the running read, leading page first
    pin_node    tree node whose path the hold pins (0: no pin), pin_tokens what that charges to the cap
    device      device pages computed by this attempt and not published yet, in prompt order
    lock_node   tree node whose path the admitted attempt reads (0: none)
"""

from __future__ import annotations

from collections import deque

from hicache_fsm.lifecycle.machine import Step
from hicache_fsm.lifecycle.table import DEVICE, LOCK, PIN, REQUEST_TABLE, STAGING, State
from hicache_fsm.ports import PageKey

NO_KEYS: tuple[PageKey, ...] = ()


class Attempt:
    """One attempt. Lengths named `*_pages` count whole pages from the start of the prompt."""

    __slots__ = (
        "slot",
        "rid",
        "number",
        "state",
        "history",
        "seq",
        "priority",
        "num_tokens",
        "keys",
        "keys_known",
        "match_pages",
        "relied_pages",
        "base_pages",
        "end_pages",
        "unresolved",
        "op",
        "landed_pages",
        "retries",
        "defers",
        "refused_room",
        "refused_ms",
        "chances",
        "clock_left_ms",
        "hard_left_ms",
        "clock_since_ms",
        "waiting_since_ms",
        "storage_open",
        "gate_open",
        "published_pages",
        "load_ops",
        "outcome",
        "staging",
        "pin_node",
        "pin_tokens",
        "device",
        "lock_node",
    )

    def __init__(self, slot: int, rid: str, number: int, num_tokens: int, seq: int, history_length: int) -> None:
        self.slot = slot  # small int that names the attempt while it is live; reused
        self.rid = rid
        self.number = number  # attempts of one rid count from 1
        self.state: int = State.IDLE
        self.history: deque[Step] = deque(maxlen=history_length)
        self.seq = seq  # place in the arrival order; a retracted request keeps it
        self.priority = 0  # smaller goes first
        self.num_tokens = num_tokens  # prompt length, output generated before a retraction included
        self.keys = NO_KEYS  # page keys of the prompt
        self.keys_known = False
        self.match_pages = 0  # device-resident prefix when last matched
        self.relied_pages = -1  # match length of the last look-up (-1: none yet); a shorter one asks again
        self.base_pages = 0  # where the fetched span begins
        self.end_pages = 0  # known end of the hit (0: not known)
        self.unresolved = 0  # found tokens not yet spliced or given a reason
        self.op = 0  # the one running operation that is this attempt's own (0: none)
        self.landed_pages = 0  # pages of the running read that have landed
        self.retries = 0  # re-issued look-ups, all causes
        self.defers = 0
        self.refused_room = 0  # device pages there were at the last counted refusal
        self.refused_ms = 0  # when that was
        self.chances = 0
        self.clock_left_ms = -1  # what the policy leaves for the store's answers (-1: not set)
        self.hard_left_ms = -1  # what the hard maximum leaves for all waiting for storage (-1: not set)
        self.clock_since_ms = -1  # when the clock was started (-1: it stands)
        self.waiting_since_ms = 0
        self.storage_open = True
        self.gate_open = True
        self.published_pages = 0  # leading pages of an admitted attempt that live in the tree
        self.load_ops: tuple[int, ...] = ()  # loads whose rows this attempt reads, not yet acknowledged
        self.outcome = ""
        self.staging: tuple[int, ...] = ()
        self.pin_node = 0
        self.pin_tokens = 0
        self.device: list[int] = []
        self.lock_node = 0

    def describe(self) -> str:
        return f"request {self.rid!r} attempt {self.number}"

    @property
    def state_name(self) -> str:
        return REQUEST_TABLE.states[self.state].label

    def owned(self) -> frozenset[str]:
        """Names of the ledger entries that are not empty."""
        held = ((STAGING, self.staging), (PIN, self.pin_node), (DEVICE, self.device), (LOCK, self.lock_node))
        return frozenset(name for name, entry in held if entry)

    def check_ownership(self) -> None:
        """Assert that the ledger holds exactly what the state may own."""
        state = REQUEST_TABLE.states[self.state]
        owned = self.owned()
        assert state.owns <= owned <= state.owns | state.may_own, (
            f"{self.describe()} is {state.label} and owns {sorted(owned)}; "
            f"must own {sorted(state.owns)}, may own {sorted(state.may_own)}"
        )
