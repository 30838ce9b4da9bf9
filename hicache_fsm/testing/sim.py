"""`Sim`: a control plane with a simulated outside, for tests without a thread in sight.

The simulated store is a set of keys. Commands are collected and answered when the test says so, in any
order, fully, partly, never, twice or late. Content is simulated too: each staging and device page holds the
key of the page whose bytes it would hold, so that a row which is reused too early shows as a wrong key.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence, Sized

from hicache_fsm.config import CacheConfig
from hicache_fsm.control.plane import Candidate, ControlPlane
from hicache_fsm.errors import InvariantViolation
from hicache_fsm.lifecycle.attempt import Attempt
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.ports import (
    Cancel,
    Command,
    Completion,
    Hash,
    HashDone,
    Load,
    LoadDone,
    Lookup,
    LookupDone,
    Lost,
    Offload,
    OffloadDone,
    PageKey,
    Pool,
    Read,
    ReadDone,
    ReadProgress,
    Release,
    Store,
    StoreDone,
)
from hicache_fsm.testing.scenario_prompt import show_prompt
from hicache_fsm.testing.script import RecordedPlane


def chain(*labels: object) -> tuple[PageKey, ...]:
    """Page keys of a prompt whose pages have these labels: each key stands for all labels up to its own."""
    keys: list[PageKey] = []
    digest = b""
    for label in labels:
        digest = hashlib.blake2b(digest + repr(label).encode(), digest_size=32).digest()
        keys.append(digest)
    return tuple(keys)


class Sim:
    """Drives one `ControlPlane`. Every step is followed by `check`, which recounts all invariants.

    With `record`, `script` has each step as a line of a scenario (`hicache_fsm.testing.script.to_scenario`).
    """

    def __init__(self, config: CacheConfig, stored: Iterable[PageKey] = (), *, record: bool = False) -> None:
        self.config = config
        self.script: list[str] | None = [] if record else None
        self.plane = ControlPlane(config) if self.script is None else RecordedPlane(config, self.script)
        self.stored = set(stored)
        self.outstanding: dict[int, Command] = {}
        self.cancelled: set[int] = set()
        self.inbox: list[Completion] = []
        self.staging: list[PageKey | None] = [None] * config.staging_pages
        self.device: list[PageKey | None] = [None] * config.device_pages
        self.prompts: dict[str, tuple[PageKey, ...]] = {}
        self.now_ms = 0
        self.past: deque[Completion] = deque(maxlen=32)  # final answers given, for second ones that come late
        self.unsure: dict[int, set[int]] = {}  # device page -> loads, not landed, that its bytes were computed on
        self.asked: Counter[tuple[str, int]] = Counter()  # look-ups by (request, attempt)
        self.landed: dict[int, int] = {}  # leading pages of running reads that were reported
        self.wrong: list[str] = []
        self.checking = True

    # ── scheduler's side ─────────────────────────────────────────────────────────────────────────────

    def submit(
        self, rid: str, labels: Sequence[object], extra_tokens: int = 1, *, hashed: bool = False, priority: int = 0
    ) -> Attempt:
        """A request of `len(labels)` whole pages and `extra_tokens` tokens more. With `hashed`, its keys come
        with a `Hash` command's answer."""
        if self.script is not None:
            self.say(f"submit {rid} {show_prompt(labels)} plus {extra_tokens} tokens{' hashed' if hashed else ''}"
                     f"{f' priority {priority}' if priority else ''}")  # fmt: skip
        for earlier in [who for who in self.asked if who[0] == rid]:
            del self.asked[earlier]  # attempt numbers of an id that has ended start anew
        keys = self.prompts[rid] = chain(*labels)
        tokens = len(keys) * self.config.page_size + extra_tokens
        attempt = self.plane.submit(rid, tokens, None if hashed else keys, priority=priority)
        self.pump()
        return attempt

    def tick(self, ms: int = 1) -> None:
        """One pass: apply the inbox, collect commands, check."""
        self.say(f"tick {ms} ms")
        self.now_ms += ms
        inbox, self.inbox = self.inbox, []
        self.plane.tick(inbox, self.now_ms)
        self.pump()

    def candidates(self) -> list[Candidate]:
        """All that could be admitted now, in order."""
        out: list[Candidate] = []
        place = None
        while (found := self.plane.next_candidate(place)) is not None:
            place, candidate = found
            if candidate is not None:
                out.append(candidate)
        self.pump()
        return out

    def admit(self, rid: str) -> bool:
        """Admit one request with its whole prompt, if the scheduler could; computes and publishes its pages
        at once when no load is under way, else at `compute`."""
        attempt = self.plane.parts.attempts.find(rid)
        if attempt is None or not self.plane.parts.is_candidate(attempt):
            return False
        candidate = self.plane.consider(attempt)
        if candidate is None:
            self.pump()
            return False
        admitted = self.plane.admit(candidate, attempt.num_tokens)
        self.pump()
        return admitted is not None

    def compute(self, rid: str, num_tokens: int = 0) -> None:
        """The forward of an admitted request up to `num_tokens` (0: its prompt): its own pages get their bytes
        and are published."""
        self.say(f"compute {rid} to {num_tokens} tokens" if num_tokens else f"compute {rid}")
        attempt = self.plane.parts.attempts.get(rid)
        self._write_own(attempt)
        self.plane.publish(rid, num_tokens or attempt.num_tokens)
        self.pump()

    def _write_own(self, attempt: Attempt) -> None:
        table = self.plane.page_table(attempt.rid)
        flying = {op for op in attempt.load_ops if op in self.outstanding}
        for page, key in zip(table[attempt.published_pages :], attempt.keys[attempt.published_pages :], strict=False):
            self.device[page] = key
            self.unsure[page] = set(flying)

    def run(self, rid: str) -> bool:
        """Admit, compute and finish; False if it cannot be admitted now."""
        if not self.admit(rid):
            return False
        self.answer_all(OpKind.LOAD)
        self.tick()
        self.compute(rid)
        self.plane.finish(rid)
        self.pump()
        return True

    def evict(self, pages: int) -> bool:
        """Other users of the device take so many pages from the tree, least recently used leaves first, and give
        them back; False if so many cannot be evicted."""
        self.say(f"evict {pages} pages")
        full = self.plane.parts.full
        taken = full.take_device(full.device.available + pages)
        if taken is None:
            return False
        full.give_device(taken)
        self.pump()
        return True

    def store_has(self, labels: Sequence[object]) -> None:
        """From now on the store holds all pages of this prompt."""
        if labels:
            self.say(f"store has {show_prompt(labels)}")
            self.stored.update(chain(*labels))

    def store_loses(self, labels: Sequence[object]) -> None:
        """The store loses the last page of this prompt."""
        if labels:
            self.say(f"store loses page {len(labels) - 1} of {show_prompt(labels)}")
            self.stored.discard(chain(*labels)[-1])

    def say(self, line: str) -> None:
        """Put a line into the script, if there is one."""
        if self.script is not None:
            self.script.append(line)

    def call(self, action: Callable[[ControlPlane], object]) -> object:
        """Any call on the plane, followed by collecting its commands."""
        result = action(self.plane)
        self.pump()
        return result

    # ── the outside ──────────────────────────────────────────────────────────────────────────────────

    def pump(self) -> None:
        """Collect commands; releases overwrite their pages at once, as the shell does."""
        for command in self.plane.take_commands():
            if isinstance(command, Release):
                target = self.device if command.pool is Pool.DEVICE else self.staging
                for page in command.pages:
                    target[page] = None
                    if command.pool is Pool.DEVICE:
                        self.unsure.pop(page, None)
            elif isinstance(command, Cancel):
                self.cancelled.add(command.op)
            else:
                self._note(command)
                self.outstanding[command.op] = command
        if self.checking:
            self.check()

    def _note(self, command: Command) -> None:
        """What must hold when a command is issued."""
        if isinstance(command, Lookup):
            self.asked[command.rid, command.attempt] += 1
        if isinstance(command, Offload):
            targets = {page for c in self.outstanding.values() if isinstance(c, Load) for page in c.device}
            unsure = [page for page in command.device if page in targets or self.unsure.get(page)]
            if unsure:
                self.wrong.append(f"offload {command.op} reads device pages {unsure}, which wait for a load")

    def of_kind(self, kind: OpKind) -> list[int]:
        """Outstanding operations of a kind, oldest first."""
        return [op for op, command in self.outstanding.items() if _KINDS[type(command)] is kind]

    def select(self, kind: OpKind, rid: str = "", span: int = 0) -> list[int]:
        """Outstanding operations of a kind, of a request or of a write span if one is named, oldest first."""
        chosen = [op for op in self.of_kind(kind) if not rid or getattr(self.outstanding[op], "rid", "") == rid]
        return [op for op in chosen if not span or getattr(self.outstanding[op], "span", 0) == span]

    def name_of(self, op: int) -> str:
        """An outstanding operation in the words of a scenario: kind, place among several, and whose it is."""
        command = self.outstanding[op]
        kind, rid, span = _KINDS[type(command)], getattr(command, "rid", ""), getattr(command, "span", 0)
        place = self.select(kind, rid, span).index(op) + 1
        return f"{kind.name.lower()}{f' {place}' if place > 1 else ''} of {rid or f'span {span}'}"

    def answer(self, op: int, pages: int | None = None, ok: bool = True) -> Completion:
        """Answer one operation, truthfully unless `pages` or `ok` say otherwise; applied by the next tick."""
        if self.script is not None:
            counted = pages is not None and isinstance(self.outstanding[op], Lookup | Read | Store)
            how = "failed" if not ok else f"with {pages} pages" if counted else ""
            self.say(f"answer {self.name_of(op)} {how}".rstrip())
        command = self.outstanding.pop(op)
        self.cancelled.discard(op)
        completion = self._completion(command, pages, ok)
        self.inbox.append(completion)
        self.past.append(completion)
        return completion

    def repeat(self, completion: Completion) -> None:
        """A second answer to the same operation."""
        if self.script is not None and completion in self.past:
            self.say(f"again {len(self.past) - self.past.index(completion)} back")
        else:
            self.say(f"# an answer that no operation waits for: {completion}")
        self.inbox.append(completion)

    def answer_all(self, kind: OpKind | None = None) -> None:
        for op in list(self.outstanding) if kind is None else self.of_kind(kind):
            self.answer(op)

    def lose(self, op: int) -> None:
        """The executor is gone."""
        if self.script is not None:
            self.say(f"answer {self.name_of(op)} lost")
        del self.outstanding[op]
        self.cancelled.discard(op)
        self.inbox.append(Lost(op))

    def progress(self, op: int, pages: int) -> None:
        """Leading pages of a read have landed; the read goes on."""
        if self.script is not None:
            self.say(f"progress {self.name_of(op)} to {pages} pages")
        command = self.outstanding[op]
        assert isinstance(command, Read)
        self._land(command, pages)
        self.landed[op] = max(pages, self.landed.get(op, 0))  # these rows are not touched again
        self.inbox.append(ReadProgress(op, pages))

    def settle(self, passes: int = 64) -> None:
        """Answer everything until nothing is outstanding, at most `passes` times."""
        for _ in range(passes):
            self.answer_all()
            self.tick()
            if not self.outstanding and not self.inbox:
                return

    def _completion(self, command: Command, pages: int | None, ok: bool) -> Completion:
        match command:
            case Hash(op, rid):
                return HashDone(op, self.prompts[rid])
            case Lookup(op, _, _, keys):
                return LookupDone(op, self._stored_run(keys) if pages is None else pages, ok)
            case Read(op, _, _, keys):
                landed = self._stored_run(keys) if pages is None else pages
                self._land(command, landed)
                return ReadDone(op, landed)
            case Load(op, _, _, staging, device):
                if ok:
                    for source, target in zip(staging, device, strict=True):
                        self.device[target] = self.staging[source]
                        self.unsure.pop(target, None)
                    for loads in self.unsure.values():
                        loads.discard(op)
                return LoadDone(op, ok)
            case Offload(op, _, device, staging):
                if ok:
                    for source, target in zip(device, staging, strict=True):
                        self.staging[target] = self.device[source]
                return OffloadDone(op, ok)
            case Store(op, _, keys, staging):
                return StoreDone(op, self._store(op, keys, staging, len(keys) if pages is None else pages))
        raise AssertionError(f"{command} has no answer")

    def _stored_run(self, keys: Sequence[PageKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.stored), len(keys))

    def _land(self, read: Read, pages: int) -> None:
        """The first pages hold their bytes; what a broken read leaves in the others is nothing to rely on."""
        for at in range(self.landed.get(read.op, 0), len(read.pages)):
            row, key = read.pages[at], read.keys[at]
            if at < pages:
                self.staging[row] = key
            elif self.staging[row] != key:
                self.staging[row] = None

    def _store(self, op: int, keys: Sequence[PageKey], staging: Sequence[int], pages: int) -> int:
        for key, row in zip(keys[:pages], staging[:pages], strict=True):
            if self.staging[row] != key:
                self.wrong.append(f"store {op} wrote wrong bytes under a key, from staging page {row}")
            self.stored.add(key)
        return pages

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raise `InvariantViolation` with everything that is wrong: books and bytes."""
        found = self.plane.check_invariants() + self.wrong + self._wrong_bytes()
        if found:
            raise InvariantViolation("\n".join(found))

    def _wrong_bytes(self) -> list[str]:
        """Every landed page of the tree, and every hold, must hold the bytes of its key."""
        parts = self.plane.parts
        found = []
        for key, page, load in parts.full.tree.contents():
            if not load and self.device[page] != key:
                found.append(f"bytes: device page {page} does not hold the bytes of its key")
        for attempt in parts.attempts:
            if attempt.state_name != "staged":
                continue
            for row, key in zip(attempt.staging, attempt.keys[attempt.base_pages :], strict=False):
                if self.staging[row] != key:
                    found.append(f"bytes: staging page {row} of {attempt.describe()} holds other bytes")
        return found

    def leaks(self) -> list[str]:
        """What is still owned; empty when everything has come back."""
        parts = self.plane.parts
        rows = parts.full.staging.used
        found = [f"{rows} staging pages are still owned"] if rows else []
        if parts.full.device.used != parts.full.tree.resident:
            found.append(f"{parts.full.device.used} device pages used, {parts.full.tree.resident} in the tree")
        if parts.full.pinned.value or parts.full.tree.locked:
            found.append(f"{parts.full.pinned.value} tokens pinned, {parts.full.tree.locked} pages locked")
        return found if self.plane.is_idle() else [*found, "not idle"]


    def stale_entries(self) -> list[str]:
        """Books that still list something when nothing lives any more; empty at rest."""
        parts = self.plane.parts
        books: dict[str, Sized] = {
            "retry entries": parts.retries.pending,
            "deadlines": parts.agenda.due,
            "parked hits": parts.parked.order,
            "waiting places": parts.waiting.waiting,
            "keys in flight": parts.beliefs.inflight,
            "pending writes": parts.backup.pending,
        }
        return [f"{len(book)} {name}" for name, book in books.items() if book]


_KINDS = {
    Hash: OpKind.HASH,
    Lookup: OpKind.LOOKUP,
    Read: OpKind.READ,
    Load: OpKind.LOAD,
    Offload: OpKind.OFFLOAD,
    Store: OpKind.STORE,
}
