"""The staging engine without an accelerator: one copy thread and one queue for each direction.

Threads and what they own. Callers (any thread) validate, plan and enqueue; the load thread and the offload thread
copy, each in the order of its queue, as a stream would. All shared state below `_changed` is read and written under
that one lock; a copy itself runs outside it. `done` is called without the lock, so it may queue the next copy.

A load moves layer after layer, and loads that are queued together move as a burst, layer-major: the first layer of a
batch is then ready after the first layers of its members and not behind all layers of all but the last of them.

    queued ──▶ startable ──▶ running ──▶ ended ──▶ done(op, ok)
           fence: forwards that began before it was queued have ended
           hazards: earlier copies of the other direction that share a page have ended
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hicache_fsm.errors import LoadFailed, StagingError
from hicache_fsm.ports import Pool
from hicache_gpu.arena import StagingArena
from hicache_gpu.copy_plan import CopyPlan, Ids, Mover, make_plan, page_ids
from hicache_gpu.device_pool import DevicePool
from hicache_gpu.faults import CopyFaults
from hicache_gpu.interface import Direction
from hicache_gpu.lane import Lane, State, Ticket
from hicache_gpu.layout import KVLayout

# Loads that move as one burst. Their staging rows are held until the burst has ended, so it must be bounded; an
# iteration seldom admits more requests than this.
MAX_BURST = 16
# Failed loads that `layer_ready` still answers with `LoadFailed`. The core applies a failure at its next safe point
# and never asks again, so this only has to outlive the failures between two safe points.
MAX_FAILED_KEPT = 4096
# Unexpected exceptions that are kept; the first says what is wrong, the rest repeat it.
MAX_ERRORS_KEPT = 16
# Longest wait for a layer, and for the threads at `close`. A whole arena of 64 GiB moves in half of it at 2 GB/s.
WAIT_LIMIT_S = 60.0


class CpuEngine:
    """`hicache_fsm.ports.StagingEngine` and `hicache_gpu.CopyEngine` on host memory alone.

    `load` and `offload` raise `StagingError` in the caller's thread, with nothing queued, if a page does not exist,
    the lengths differ, a target is named twice, the operation is already live, or the engine is closed.
    """

    def __init__(
        self,
        layout: KVLayout,
        staging_pages: int,
        device_pages: int,
        *,
        faults: CopyFaults | None = None,
        wait_limit_s: float = WAIT_LIMIT_S,
    ) -> None:
        self.layout = layout
        self.arena = StagingArena(layout, staging_pages)
        self.device = DevicePool(layout, device_pages)
        self.errors: list[BaseException] = []
        self._faults = faults if faults is not None else CopyFaults()
        self._wait_limit_s = wait_limit_s
        self._changed = threading.Condition(threading.Lock())
        self._live: dict[int, Ticket] = {}
        self._failed: dict[int, None] = {}
        self._forwards: dict[int, int] = {}  # running forward -> thread that began it
        self._last_forward = 0
        self._closing = False
        self._errors_raised = False
        layers = range(layout.num_layers)
        staging = [self.arena.layer_slabs(layer) for layer in layers]
        device = [self.device.layer_slabs(layer) for layer in layers]
        self._loads = Lane(Direction.LOAD, Mover(staging, device), MAX_BURST)
        self._offloads = Lane(Direction.OFFLOAD, Mover(device, staging), 1)
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"hicache-{lane.direction.value}", daemon=True)
            for lane in (self._loads, self._offloads)
        ]
        for thread in self._threads:
            thread.start()

    # ── the port ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    @property
    def num_layers(self) -> int:
        return self.layout.num_layers

    def staging_views(self, pages: Sequence[int]) -> list[memoryview]:
        """Writable views of whole staging pages. Raises `StagingError` on an unknown page or after `close`."""
        self._check_open()
        return self.arena.views(pages)

    def load(self, op: int, staging: Sequence[int], device: Sequence[int], done: Callable[[int, bool], None]) -> None:
        sources, targets = self._staging_ids(staging), self._device_ids(device)
        plan = self._plan(sources, targets)
        self._submit(self._loads, self._offloads, op, plan, staging, device, done)

    def offload(
        self, op: int, device: Sequence[int], staging: Sequence[int], done: Callable[[int, bool], None]
    ) -> None:
        sources, targets = self._device_ids(device), self._staging_ids(staging)
        plan = self._plan(sources, targets)
        self._submit(self._offloads, self._loads, op, plan, staging, device, done)

    def layer_ready(self, op: int, layer: int) -> None:
        """Block until that load has written `layer`; ready at once if the load has been acknowledged.

        Raises `LoadFailed` if the load failed, and `StagingError` if it made no progress within the wait limit,
        if it can never start because the calling thread runs a forward that it waits for, or after `close`.
        """
        if not 0 <= layer < self.layout.num_layers:
            raise StagingError(f"layer {layer} does not exist; the layout has layers 0 to {self.layout.num_layers - 1}")
        ticket = self._live.get(op)
        if self._faults.skip_layer_wait or (ticket is not None and ticket.layers_done > layer):
            return  # the usual case in a long forward, without the lock: a layer never becomes unwritten
        with self._changed:
            ticket = self._live.get(op)
            if ticket is not None:
                self._wait_layer(ticket, layer)
                failed = ticket.state is State.ENDED and not ticket.ok
            else:
                failed = op in self._failed
                if self._closing and not failed:
                    raise StagingError("the engine is closed; stop the forwards before closing it")
        if failed:
            raise LoadFailed(f"load {op} failed; drop the batch and run its requests as new attempts")

    def poison(self, pool: Pool, pages: Sequence[int]) -> None:
        """Overwrite released pages at once. Raises `StagingError` on an unknown page or after `close`."""
        self._check_open()
        match pool:
            case Pool.STAGING:
                self.arena.poison(pages)
            case Pool.DEVICE:
                self.device.poison(pages)

    def close(self) -> None:
        """End the running copies, answer the queued ones with `ok=False`, and join the threads.

        A second call is a no-op. Raises `StagingError` if a thread does not end within the wait limit (call again
        once it can), or if a copy or a `done` callback has raised: see `errors`.
        """
        if threading.current_thread() in self._threads:
            raise StagingError("close was called from a done callback; call it from another thread")
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + self._wait_limit_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            with self._changed:
                unanswered = sorted(self._live)[:8]
            raise StagingError(f"{' and '.join(stuck)} did not end, unanswered: {unanswered}; close again later")
        assert not self._live, f"operations without an answer: {sorted(self._live)}"
        if self.errors and not self._errors_raised:
            self._errors_raised = True
            raise StagingError(f"a copy or its callback raised {self.errors[0]!r}; see `errors`") from self.errors[0]

    def __enter__(self) -> CpuEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── the forward fence ────────────────────────────────────────────────────────────────────────────

    def forward_begin(self) -> int:
        """A forward that may read or write any device row starts now. Raises `StagingError` after `close`."""
        with self._changed:
            self._check_open()
            self._last_forward += 1
            self._forwards[self._last_forward] = threading.get_ident()
            return self._last_forward

    def forward_end(self, token: int) -> None:
        """That forward touches no row any more. Raises `StagingError` if it is not running."""
        with self._changed:
            if self._forwards.pop(token, None) is None:
                raise StagingError(f"forward {token} is not running; end each forward once")
            self._changed.notify_all()

    @contextmanager
    def forward(self) -> Iterator[int]:
        token = self.forward_begin()
        try:
            yield token
        finally:
            self.forward_end(token)

    # ── callers' side ────────────────────────────────────────────────────────────────────────────────

    def _check_open(self) -> None:
        if self._closing:
            raise StagingError("the engine is closed; make a new one")

    def _staging_ids(self, pages: Sequence[int]) -> Ids:
        return page_ids(pages, self.arena.num_pages, "staging")

    def _device_ids(self, pages: Sequence[int]) -> Ids:
        return page_ids(pages, self.device.num_pages, "device")

    def _plan(self, sources: Ids, targets: Ids) -> CopyPlan:
        plan = make_plan(sources, targets, self.layout.slab_bytes)
        if self._faults.short_copy and len(sources):
            return make_plan(sources[:-1], targets[:-1], self.layout.slab_bytes)
        return plan

    def _submit(
        self,
        lane: Lane,
        other: Lane,
        op: int,
        plan: CopyPlan,
        staging: Sequence[int],
        device: Sequence[int],
        done: Callable[[int, bool], None],
    ) -> None:
        with self._changed:
            self._check_open()
            if op in self._live:
                raise StagingError(f"operation {op} is still running; operation ids are used once")
            ticket = Ticket(op, lane.direction, plan, frozenset(staging), frozenset(device), done)
            ticket.after_forward = self._last_forward
            ticket.after = [earlier for earlier in other.unfinished.values() if earlier.shares_page(ticket)]
            self._live[op] = ticket
            lane.enqueue(ticket)
            self._changed.notify_all()

    def _wait_layer(self, ticket: Ticket, layer: int) -> None:
        if ticket.direction is not Direction.LOAD:
            raise StagingError(f"operation {ticket.op} is an offload; only loads have layers to wait for")
        if ticket.state is State.QUEUED and not self._faults.ignore_fence:
            mine = threading.get_ident()
            if any(token <= ticket.after_forward and who == mine for token, who in self._forwards.items()):
                raise StagingError(
                    f"load {ticket.op} waits for a forward of this thread, which waits for the load; "
                    "queue the loads of a batch before its forward begins"
                )
        ready = self._changed.wait_for(
            lambda: ticket.layers_done > layer or ticket.state is State.ENDED, timeout=self._wait_limit_s
        )
        if not ready:
            raise StagingError(f"load {ticket.op} did not reach layer {layer} within {self._wait_limit_s} s")

    # ── copy threads' side ───────────────────────────────────────────────────────────────────────────

    def _run(self, lane: Lane) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or (lane.queue and self._startable(lane.queue[0])))
                if self._closing:
                    refused = lane.take_all()
                    break
                lane.reorder(self._faults, self._startable)
                burst = lane.take_burst(self._startable)
            self._copy_burst(lane, burst)
        for ticket in refused:
            self._finish(lane, ticket, ok=False)

    def _startable(self, ticket: Ticket) -> bool:
        if not self._faults.ignore_hazards and any(earlier.state is not State.ENDED for earlier in ticket.after):
            return False
        # Both directions wait: a load must not be overwritten by an earlier forward, and an offload must not read
        # what an earlier forward has yet to write.
        return self._faults.ignore_fence or all(token > ticket.after_forward for token in self._forwards)

    def _copy_burst(self, lane: Lane, burst: list[Ticket]) -> None:
        if self._faults.early_ack:
            for ticket in burst:
                self._answer(ticket, ok=True)
        for layer in range(self.layout.num_layers + 1):
            burst = [ticket for ticket in burst if self._step(lane, ticket, layer)]
        assert not burst, [ticket.op for ticket in burst]

    def _step(self, lane: Lane, ticket: Ticket, layer: int) -> bool:
        """Copy and publish one layer, or end the operation after its last. Whether it goes on."""
        last = layer == self.layout.num_layers
        try:
            ok = self._faults.allow(lane.direction, ticket.nth, layer, last=last)
            if ok and not last:
                lane.mover.copy(ticket.plan, layer)
        except BaseException as error:  # the thread must live on, and the failure is answered and raised at close
            self._keep_error(error)
            ok = False
        if last or not ok:
            self._finish(lane, ticket, ok)
            return False
        if lane.direction is Direction.LOAD:
            with self._changed:
                ticket.layers_done = layer + 1
                self._changed.notify_all()
        return True

    def _finish(self, lane: Lane, ticket: Ticket, ok: bool) -> None:
        with self._changed:
            ticket.end(ok)
            del self._live[ticket.op], lane.unfinished[ticket.op]
            if not ok and lane.direction is Direction.LOAD:
                self._failed[ticket.op] = None
                if len(self._failed) > MAX_FAILED_KEPT:
                    del self._failed[next(iter(self._failed))]
            self._changed.notify_all()
        self._answer(ticket, ok)

    def _answer(self, ticket: Ticket, ok: bool) -> None:
        if ticket.answered:
            return  # only after an injected early acknowledgement
        ticket.answered = True
        try:
            ticket.done(ticket.op, ok)
        except BaseException as error:  # the caller's mistake must not stop the copies of others; raised at close
            self._keep_error(error)

    def _keep_error(self, error: BaseException) -> None:
        if len(self.errors) < MAX_ERRORS_KEPT:
            self.errors.append(error)
