"""`StoragePrefetchRetries` alone: pacing in passes, the head's rule, the cap, and which entry wins."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_fsm.prefetch.retries import Due, StoragePrefetchRetries


@dataclass(slots=True)
class Queue:
    """A waiting queue by hand: request ids in order."""

    order: list[str] = field(default_factory=list)
    retries: dict[str, int] = field(default_factory=dict)

    def head(self) -> str | None:
        return self.order[0] if self.order else None

    def place(self, rid: str) -> tuple[int, int] | None:
        return (0, self.order.index(rid)) if rid in self.order else None

    def retries_of(self, rid: str) -> int:
        return self.retries.get(rid, 0)


def passes(retries: StoragePrefetchRetries, queue: Queue, count: int, interval: int, cap: int = 8) -> list[list[Due]]:
    return [retries.pop_ready(queue, interval, cap) for _ in range(count)]


def test_interval_two_emits_on_the_third_pass_with_the_known_end() -> None:
    retries = StoragePrefetchRetries()
    retries.poll_miss("r", 10)
    assert passes(retries, Queue(["head", "r"]), 4, 2) == [[], [], [Due("r", 10, False)], []]


def test_interval_one_emits_on_the_second_pass() -> None:
    retries = StoragePrefetchRetries()
    retries.poll_miss("r")
    assert passes(retries, Queue(["head", "r"]), 3, 1) == [[], [Due("r", 0, False)], []]


def test_an_immediate_entry_is_due_in_the_next_pass_also_without_polls() -> None:
    retries = StoragePrefetchRetries()
    retries.refetch("r", 8)
    assert passes(retries, Queue(["r"]), 2, 0) == [[Due("r", 8, False)], []]


def test_polls_are_forgotten_when_switched_off() -> None:
    retries = StoragePrefetchRetries()
    retries.poll_miss("r")
    assert passes(retries, Queue(["head", "r"]), 5, 0) == [[]] * 5
    assert retries.pending == {}


def test_the_heads_poll_is_forgotten_and_its_refetch_kept() -> None:
    retries = StoragePrefetchRetries()
    retries.poll_miss("head")
    retries.refetch("second", 4)
    assert passes(retries, Queue(["head", "second"]), 3, 1) == [[Due("second", 4, False)], [], []]
    assert retries.pending == {}
    retries.refetch("head", 6)
    assert passes(retries, Queue(["head"]), 1, 1) == [[Due("head", 6, False)]]


def test_a_poll_never_overwrites_a_refetch_but_a_refetch_a_poll() -> None:
    retries = StoragePrefetchRetries()
    retries.refetch("r", 8)
    retries.poll_miss("r", 2)
    assert retries.pending["r"].immediate
    retries.cancel("r")
    retries.poll_miss("r", 2)
    retries.refetch("r", 8)
    assert passes(retries, Queue(["head", "r"]), 2, 5) == [[Due("r", 8, False)], []]


def test_arming_again_starts_the_pacing_anew() -> None:
    retries = StoragePrefetchRetries()
    queue = Queue(["head", "r"])
    retries.poll_miss("r")
    assert passes(retries, queue, 2, 3) == [[], []]
    retries.poll_miss("r")
    assert passes(retries, queue, 4, 3) == [[], [], [], [Due("r", 0, False)]]


@pytest.mark.parametrize(("made", "exhausted"), [(7, False), (8, True), (9, True)])
def test_at_the_cap_an_entry_comes_out_as_exhausted(made: int, exhausted: bool) -> None:
    retries = StoragePrefetchRetries()
    retries.refetch("r", 8)
    assert passes(retries, Queue(["r"], {"r": made}), 1, 2) == [[Due("r", 8, exhausted)]]
    assert retries.pending == {}


def test_a_cap_of_zero_issues_nothing() -> None:
    retries = StoragePrefetchRetries()
    retries.refetch("r", 8)
    assert passes(retries, Queue(["r"]), 1, 2, cap=0) == [[Due("r", 8, True)]]


def test_output_is_in_queue_order_not_in_arming_order() -> None:
    retries = StoragePrefetchRetries()
    for rid in ("c", "a", "b"):
        retries.refetch(rid)
    assert [due.rid for due in passes(retries, Queue(["a", "b", "c"]), 1, 2)[0]] == ["a", "b", "c"]


def test_the_clock_of_a_request_outside_the_queue_has_not_started() -> None:
    retries = StoragePrefetchRetries()
    queue = Queue(["head"])
    retries.poll_miss("r")
    retries.refetch("s", 3)
    assert passes(retries, queue, 10, 2) == [[]] * 10
    queue.order += ["r", "s"]
    assert passes(retries, queue, 3, 2) == [[Due("s", 3, False)], [], [Due("r", 0, False)]]


def test_a_request_that_left_the_queue_when_due_starts_anew_on_its_return() -> None:
    retries = StoragePrefetchRetries()
    queue = Queue(["head", "r"])
    retries.poll_miss("r")
    passes(retries, queue, 1, 2)
    queue.order.remove("r")
    assert passes(retries, queue, 4, 2) == [[]] * 4
    queue.order.append("r")
    assert passes(retries, queue, 3, 2) == [[], [], [Due("r", 0, False)]]


def test_clear_forgets_entries_and_keeps_the_step() -> None:
    retries = StoragePrefetchRetries()
    passes(retries, Queue(["head", "r"]), 3, 2)
    retries.poll_miss("r")
    retries.clear()
    assert (retries.step, retries.pending, retries.next_due()) == (3, {}, -1)
    assert passes(retries, Queue(["head", "r"]), 4, 2) == [[]] * 4
    assert retries.step == 7


def test_every_pass_counts_also_with_an_empty_queue() -> None:
    retries = StoragePrefetchRetries()
    passes(retries, Queue(), 5, 2)
    assert retries.step == 5


def test_next_due_tells_how_long_nothing_happens() -> None:
    retries = StoragePrefetchRetries()
    assert retries.next_due() == -1
    retries.poll_miss("r")
    assert retries.next_due() == 1
    passes(retries, Queue(["head", "r"]), 1, 4)
    assert retries.next_due() == 5
    retries.cancel("r")
    assert retries.next_due() == -1


ACTS = st.one_of(
    st.tuples(st.just("poll"), st.integers(0, 3)),
    st.tuples(st.just("refetch"), st.integers(0, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 3)),
    st.tuples(st.just("leave"), st.integers(0, 3)),
    st.tuples(st.just("join"), st.integers(0, 3)),
    st.tuples(st.just("pass"), st.just(0)),
)


@given(acts=st.lists(ACTS, max_size=40), interval=st.integers(0, 3))
def test_the_heap_agrees_with_a_walk_over_the_queue(acts: list[tuple[str, int]], interval: int) -> None:
    """The model is upstream's definition, walked naively each pass, with one change: a poll loses to a refetch."""
    retries, queue = StoragePrefetchRetries(), Queue()
    model: dict[str, list[int]] = {}  # rid -> [immediate, due or -1]
    step = 0
    for act, which in acts:
        rid = f"r{which}"
        match act:
            case "poll":
                retries.poll_miss(rid)
                if not model.get(rid, [0])[0]:
                    model[rid] = [0, -1]
            case "refetch":
                retries.refetch(rid)
                model[rid] = [1, -1]
            case "cancel":
                retries.cancel(rid)
                model.pop(rid, None)
            case "leave" if rid in queue.order:
                queue.order.remove(rid)
                if rid in model and model[rid][1] >= 0:
                    retries.cancel(rid)  # the plane cancels what leaves its queue; started clocks do not linger
                    del model[rid]
            case "join" if rid not in queue.order:
                queue.order.append(rid)
            case "pass":
                step += 1
                assert [due.rid for due in retries.pop_ready(queue, interval, 8)] == _walk(model, queue, step, interval)
        assert set(retries.pending) == set(model)


def _walk(model: dict[str, list[int]], queue: Queue, step: int, interval: int) -> list[str]:
    out: list[str] = []
    head = queue.head()
    if head in model and not model[head][0]:
        del model[head]
    for rid in queue.order:
        if rid not in model:
            continue
        immediate, due = model[rid]
        if not immediate and interval <= 0:
            del model[rid]
        elif not immediate and due < 0:
            model[rid][1] = step + interval
        elif immediate or due <= step:
            del model[rid]
            out.append(rid)
    return out
