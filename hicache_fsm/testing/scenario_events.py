"""What happens in scenarios: one entry of `EVENTS` for each kind of event, with its words, meaning and action.

An action gets the play and the values of the line. It raises `StepFailed` if what the line says did not happen.
"""

from __future__ import annotations

from hicache_fsm.control.plane import Candidate
from hicache_fsm.lifecycle.operation_table import OpKind
from hicache_fsm.ports import Completion, HashDone, LoadDone, LookupDone, OffloadDone, ReadDone, StoreDone
from hicache_fsm.testing.scenario_grammar import Args
from hicache_fsm.testing.scenario_play import EVENTS as EVENTS
from hicache_fsm.testing.scenario_play import Play, StepFailed, event
from hicache_fsm.testing.sim import chain

# ── clients and the scheduler ────────────────────────────────────────────────────────────────────────


@event("submit rid:REQUEST prompt:PROMPT [plus extra:N token(s)] [hashed] [priority priority:N]",
       "A request comes. Its prompt has these whole pages and N tokens more (1 if not said). `hashed`: its page keys "
       "come with the answer to a hash operation. Smaller priorities go first (0 if not said).")  # fmt: skip
def submit(play: Play, args: Args) -> None:
    extra = args.get("extra", 1)
    play.sim.submit(args["rid"], args["prompt"], extra, hashed="hashed" in args, priority=args.get("priority", 0))


@event("tick [ms:N ms]", "One pass: answers are applied, deadlines and retries come due, N ms have gone by (1).")
def tick(play: Play, args: Args) -> None:
    play.sim.tick(args.get("ms", 1))
    play.restarted += play.sim.plane.take_restarted()


@event("consider rid:REQUEST", "The scheduler reaches the request in its queue, and leaves it there.")
def consider(play: Play, args: Args) -> None:
    _consider(play, args["rid"])


def _consider(play: Play, rid: str) -> Candidate | None:
    candidate = play.sim.plane.consider(play.attempt(rid))
    play.sim.pump()
    return candidate


def _admit(play: Play, args: Args) -> str:
    """Admits; the reason if it was refused."""
    rid = args["rid"]
    attempt = play.attempt(rid)
    candidate = _consider(play, rid)
    if candidate is None:
        return f"it is {attempt.state_name}, no candidate"
    admitted = play.sim.plane.admit(candidate, args.get("end", attempt.num_tokens))
    play.sim.pump()
    return "" if admitted is not None else f"no room: {play.sim.plane.parts.full.room()} device pages can be had"


@event("admit rid:REQUEST [to end:N token(s)]",
       "The scheduler admits the request to a batch, with its prompt up to N tokens (all of it); it must be "
       "possible.")  # fmt: skip
def admit(play: Play, args: Args) -> None:
    refused = _admit(play, args)
    if refused:
        raise StepFailed(f"{args['rid']} to be admitted", refused, args["rid"])


@event("cannot admit rid:REQUEST [to end:N token(s)]", "The scheduler tries to admit the request; it must be refused.")
def cannot_admit(play: Play, args: Args) -> None:
    if not _admit(play, args):
        raise StepFailed(f"{args['rid']} to be refused", "it was admitted", args["rid"])


@event("try admit rid:REQUEST [to end:N token(s)]", "The scheduler tries to admit the request; either result will do.")
def try_admit(play: Play, args: Args) -> None:
    _admit(play, args)


@event("defer rid:REQUEST", "The scheduler refuses the request for capacity, if it is a candidate.")
def defer(play: Play, args: Args) -> None:
    candidate = _consider(play, args["rid"])
    if candidate is not None:
        play.sim.plane.defer(candidate)
        play.sim.pump()


@event("compute rid:REQUEST [to end:N token(s)]",
       "A forward of an admitted request: tokens up to N (its prompt) have KV, whole pages are published.")  # fmt: skip
def compute(play: Play, args: Args) -> None:
    play.attempt(args["rid"])
    play.sim.compute(args["rid"], args.get("end", 0))


def _extend(play: Play, args: Args) -> bool:
    rid, end = args["rid"], args["end"]
    attempt = play.attempt(rid)
    if not play.sim.call(lambda plane: plane.extend(rid, end)):
        return False
    while len(attempt.keys) < end // play.config.page_size:
        play.grown += 1
        attempt.keys = play.sim.prompts[rid] = (*attempt.keys, *chain(attempt.keys, play.grown)[-1:])
    return True


@event("extend rid:REQUEST to end:N token(s)",
       "An admitted request gets device pages up to N tokens, for its next chunk or output; there must be "
       "room.")  # fmt: skip
def extend(play: Play, args: Args) -> None:
    if not _extend(play, args):
        raise StepFailed(f"{args['rid']} to be extended", "no room on the device", args["rid"])


@event("cannot extend rid:REQUEST to end:N token(s)", "The same, and it must find no room.")
def cannot_extend(play: Play, args: Args) -> None:
    if _extend(play, args):
        raise StepFailed(f"{args['rid']} to find no room", "it was extended", args["rid"])


@event("try extend rid:REQUEST to end:N token(s)", "The same, and either result will do.")
def try_extend(play: Play, args: Args) -> None:
    _extend(play, args)


@event("finish rid:REQUEST", "An admitted request is complete. Nothing happens if it has ended.")
def finish(play: Play, args: Args) -> None:
    play.sim.call(lambda plane: plane.finish(args["rid"]))


@event("abort rid:REQUEST", "The client gives up. Nothing happens if the request has ended.")
def abort(play: Play, args: Args) -> None:
    play.sim.call(lambda plane: plane.abort(args["rid"]))


@event("reject rid:REQUEST", "The scheduler ends a waiting request that can never fit.")
def reject(play: Play, args: Args) -> None:
    play.sim.call(lambda plane: plane.reject(args["rid"]))


@event("retract rid:REQUEST [to end:N token(s)] [hashed]",
       "The scheduler takes the request back to its queue, as a new attempt of N tokens (as many as before). `hashed`: "
       "its page keys are asked for anew.")  # fmt: skip
def retract(play: Play, args: Args) -> None:
    attempt = play.attempt(args["rid"])
    tokens = args.get("end", attempt.num_tokens)
    known = attempt.keys_known and "hashed" not in args
    keys = attempt.keys[: tokens // play.config.page_size] if known else None
    play.sim.call(lambda plane: plane.retract(args["rid"], tokens, keys))


# ── storage and copies ───────────────────────────────────────────────────────────────────────────────


@event("store has prompt:PROMPT", "Storage holds all pages of this prompt from now on.")
def store_has(play: Play, args: Args) -> None:
    play.sim.store_has(args["prompt"])


@event("store has page page:N of prompt:PROMPT", "Storage holds this page (the first is 0), whatever it holds before.")
def store_has_page(play: Play, args: Args) -> None:
    play.sim.stored.add(_page(args))


@event("store loses page page:N of prompt:PROMPT", "Storage has lost this page (the first is 0).")
def store_loses_page(play: Play, args: Args) -> None:
    play.sim.stored.discard(_page(args))


def _page(args: Args) -> bytes:
    keys = chain(*args["prompt"])
    if args["page"] >= len(keys):
        raise StepFailed(f"page {args['page']} of the prompt", f"it has {len(keys)} pages")
    return keys[args["page"]]


@event("store is empty", "Storage has lost everything.")
def store_is_empty(play: Play, args: Args) -> None:
    play.sim.stored.clear()


_WHICH = "kind:KIND [nth:N] [of span span:N | of rid:REQUEST]"


def one_of(play: Play, args: Args) -> int:
    """The outstanding operation that a line means."""
    sim, kind = play.sim, args["kind"]
    nth: int = args.get("nth", 1)
    found = sim.select(kind, args.get("rid", ""), args.get("span", 0))
    if not 1 <= nth <= len(found):
        listed = ", ".join(sim.name_of(op) for op in sim.outstanding) or "nothing"
        whose = args.get("rid") or (f"span {args['span']}" if "span" in args else "anybody")
        raise StepFailed(f"{kind.name.lower()} {nth} of {whose} to be outstanding",
                         f"outstanding: {listed}", args.get("rid", ""))  # fmt: skip
    return found[nth - 1]


@event(f"answer {_WHICH} [with pages:N page(s) | failed | lost] [twice]",
       "An operation ends; the next tick applies it. The oldest of its kind, or the Nth, of anybody or of one request "
       "or write span. It is answered truthfully unless it is said that N leading pages were found, read or written, "
       "that it failed, that its executor is gone (`lost`), or that it is answered a second time at once.")  # fmt: skip
def answer(play: Play, args: Args) -> None:
    sim, op = play.sim, one_of(play, args)
    note, command = play.close(op), sim.outstanding[op]
    if "lost" in args:
        sim.lose(op)
        late = _late(args["kind"], op, len(getattr(command, "keys", ())))
        note(late)
        sim.inbox += [late] * ("twice" in args)
        return
    if "pages" in args and args["kind"] not in (OpKind.LOOKUP, OpKind.READ, OpKind.STORE):
        raise StepFailed("a number of pages for a lookup, a read or a store only", f"a {args['kind'].name.lower()}")
    _within(play, op, args.get("pages", 0))
    pages = sim.landed.get(op, 0) if "failed" in args else args.get("pages")
    done = sim.answer(op, pages, ok="failed" not in args)
    note(done)
    if "twice" in args:
        sim.repeat(done)


def _within(play: Play, op: int, pages: int) -> None:
    """A read or an answer of more pages than there are is a slip of the pen, not a fault of the store."""
    most = len(getattr(play.sim.outstanding[op], "keys", ()))
    if pages > most:
        raise StepFailed(f"at most {most} pages", f"{pages} pages")


def _late(kind: OpKind, op: int, pages: int) -> Completion:
    """What an executor that was given up for lost would say after all."""
    match kind:
        case OpKind.HASH:
            return HashDone(op, ())
        case OpKind.LOOKUP:
            return LookupDone(op, pages, True)
        case OpKind.READ:
            return ReadDone(op, pages)
        case OpKind.LOAD:
            return LoadDone(op, True)
        case OpKind.OFFLOAD:
            return OffloadDone(op, True)
        case OpKind.STORE:
            return StoreDone(op, pages)


@event("answer all [kinds:KINDS] [shuffled]",
       "All outstanding operations (of a kind) are answered truthfully, oldest first, or in an order that the seed "
       "decides.")  # fmt: skip
def answer_all(play: Play, args: Args) -> None:
    ops = play.sim.of_kind(args["kinds"]) if "kinds" in args else list(play.sim.outstanding)
    if "shuffled" in args:
        play.random.shuffle(ops)
    for op in ops:
        play.close(op)(play.sim.answer(op))


@event("progress [read] [nth:N] of rid:REQUEST to pages:N page(s)",
       "The first N pages of a read have landed; the read goes on.")  # fmt: skip
def progress(play: Play, args: Args) -> None:
    op = one_of(play, {**args, "kind": OpKind.READ})
    _within(play, op, args["pages"])
    play.sim.progress(op, args["pages"])


@event("again kind:KIND [of span span:N | of rid:REQUEST]",
       "The last operation of this kind that was answered or lost is answered once more.")  # fmt: skip
def again(play: Play, args: Args) -> None:
    for one in reversed(play.closed):
        fits = one.rid == args.get("rid", one.rid) and one.span == args.get("span", one.span)
        if one.kind is args["kind"] and fits:
            play.sim.inbox.append(one.answer)
            return
    raise StepFailed(f"a {args['kind'].name.lower()} that was answered", "none", args.get("rid", ""))


@event("again back:N back", "The Nth last answer (1: the last) is given once more.")
def again_back(play: Play, args: Args) -> None:
    past = play.sim.past
    if not 1 <= args["back"] <= len(past):
        raise StepFailed(f"{args['back']} answers", f"{len(past)} were given")
    play.sim.repeat(past[-args["back"]])


@event("stray kind:KIND op:N", "An answer comes to an operation of a number that was never given out.")
def stray(play: Play, args: Args) -> None:
    if args["op"] in play.sim.plane.parts.ops.live:
        raise StepFailed(f"no operation {args['op']}", "it is outstanding; use `answer`")
    play.sim.inbox.append(_late(args["kind"], args["op"], 0))


# ── operators and pressure ───────────────────────────────────────────────────────────────────────────


@event("evict pages:N page(s)",
       "Other users of the device pool take N pages that nobody locks, least recently used first.")  # fmt: skip
def evict(play: Play, args: Args) -> None:
    if not play.sim.evict(args["pages"]):
        raise StepFailed(f"{args['pages']} pages to evict", f"{play.sim.plane.parts.full.tree.evictable}")


@event("evict all", "The tree loses every page that it does not lock.")
def evict_all(play: Play, args: Args) -> None:
    play.sim.evict(play.sim.plane.parts.full.tree.evictable)


@event("flush", "The tree is dropped; every live request starts anew.")
def flush(play: Play, args: Args) -> None:
    play.sim.call(lambda plane: plane.flush())
    play.restarted += play.sim.plane.take_restarted()


@event("detach", "Storage is closed.")
def detach(play: Play, args: Args) -> None:
    play.sim.call(lambda plane: plane.detach())


@event("attach", "Storage is opened again.")
def attach(play: Play, args: Args) -> None:
    play.sim.call(lambda plane: plane.attach())


@event("spoil hold of rid:REQUEST", "A page of the request's hold gets other bytes: nothing in the core does this.")
def spoil(play: Play, args: Args) -> None:
    rows = play.attempt(args["rid"]).staging
    if not rows:
        raise StepFailed(f"{args['rid']} to hold staging pages", "none", args["rid"])
    play.sim.staging[rows[0]] = None
    play.sim.check()


# ── several events in one line ───────────────────────────────────────────────────────────────────────


def _answer_own(play: Play, kind: OpKind, rid: str) -> None:
    """The request's own operations of a kind are answered in full, and applied."""
    for op in play.sim.select(kind, rid):
        play.close(op)(play.sim.answer(op))
    tick(play, {})


@event("stage rid:REQUEST prompt:PROMPT [plus extra:N token(s)]",
       "Submits the request and answers its look-up and its read; it must then be staged.")  # fmt: skip
def stage(play: Play, args: Args) -> None:
    rid = args["rid"]
    submit(play, args)
    _answer_own(play, OpKind.LOOKUP, rid)
    _answer_own(play, OpKind.READ, rid)
    if play.state(rid) != "staged":
        raise StepFailed(f"{rid} to be staged", play.state(rid), rid)


@event("run rid:REQUEST", "Admits the request, answers its load, computes its prompt and finishes it.")
def run(play: Play, args: Args) -> None:
    rid = args["rid"]
    admit(play, args)
    _answer_own(play, OpKind.LOAD, rid)
    compute(play, args)
    finish(play, args)


@event("warm prompt:PROMPT",
       "Another request computes this prompt, so that its pages are on the device; writes are answered.")  # fmt: skip
def warm(play: Play, args: Args) -> None:
    rid = "warm"
    submit(play, {**args, "rid": rid})
    _answer_own(play, OpKind.LOOKUP, rid)
    _answer_own(play, OpKind.READ, rid)
    run(play, {"rid": rid})
    backup = play.sim.plane.parts.backup
    for _ in range(4 * (backup.queued_pages + len(backup.live)) + 4):
        for kind in (OpKind.OFFLOAD, OpKind.STORE):
            play.sim.answer_all(kind)
            tick(play, {})
        if not (backup.queue or backup.live):
            return
    raise StepFailed("all writes to end", f"{backup.queued_pages} pages are still queued")


@event("settle", "Everything outstanding is answered, pass after pass, until nothing is.")
def settle(play: Play, args: Args) -> None:
    play.sim.settle()
    play.restarted += play.sim.plane.take_restarted()


@event("end all", "Everything is answered, admitted, computed and finished, within 500 passes; nothing may stay owned.")
def end_all(play: Play, args: Args) -> None:
    sim, plane = play.sim, play.sim.plane
    for _ in range(500):
        sim.answer_all()
        tick(play, {"ms": play.config.chance_quantum_ms})
        for attempt in sorted(plane.parts.attempts, key=lambda a: a.seq):
            if not attempt.state_name.startswith("admitted"):
                sim.admit(attempt.rid)
            elif not attempt.load_ops and plane.extend(attempt.rid, attempt.num_tokens):
                sim.compute(attempt.rid)
                plane.finish(attempt.rid)
                sim.pump()
        if plane.is_idle() and not sim.inbox:
            break
    found = sim.leaks() + sim.stale_entries()
    if found:
        live = [f"{a.rid} is {a.state_name}" for a in plane.parts.attempts]
        raise StepFailed("nothing left over", "; ".join([*found, *live]))
