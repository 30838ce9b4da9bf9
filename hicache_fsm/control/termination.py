"""How long an attempt can wait for reasons that are the cache's own: the bound that follows from the caps.

The argument stands in `docs/termination.md`; the property test that drives random and hostile schedules
against it is `tests/test_pipeline_fuzz.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from hicache_fsm.config import CacheConfig


class WaitingBound(NamedTuple):
    """What one attempt can use up before nothing but device room stands between it and a batch."""

    lookups: int  # look-ups and known hits taken up, the first one included
    chances: int  # passes lost to armed refetches
    storage_ms: int  # agreed time in which storage is awaited (querying, reading, parked): the hard maximum
    answers_ms: int  # the part of it that may be spent on the store's answers (querying, reading): the policy's
    refusals: int  # counted refusals of its holds
    refusal_ms: int  # agreed time after which a refusal counts even if nothing has changed

    def passes(self, tick_ms: int) -> int:
        """The same in passes, if the agreed clock advances by at least `tick_ms` (>= 1) a pass.

        A storage wait ends with the first tick at or after its time, so each of them may round up by one pass.
        """
        assert tick_ms >= 1, f"a clock that advances {tick_ms} ms a pass never reaches a deadline"
        storage = -(-self.storage_ms // tick_ms) + 2 * self.lookups
        return self.chances + storage + self.refusals * -(-self.refusal_ms // tick_ms)


def waiting_bound(config: CacheConfig, num_tokens: int) -> WaitingBound:
    """Bound for an attempt of `num_tokens` tokens whose keys are known, under an engine that looks at every
    candidate once a pass and, when it takes no hold, refuses it for lack of device room only.

    * look-ups: the first is free, each further one costs a retry;
    * storage time: one clock for the whole attempt, which runs in the three timed states and is never set again. It
      has two budgets, of which the policy's stands while the hit is parked;
    * an armed refetch waits for the next tick. It follows a look-up (its base or its hold was lost, or best
      effort cut it while parked: once per look-up), or a shrunk base, which costs a chance;
    * `max_defers` refusals count, over all holds of the attempt, before the hold is dropped; one counts when the
      device has more room than at the last, and at the latest after a quantum of agreed time.
    """
    lookups = 1 + config.retry_max_attempts
    chances = lookups + config.park_cap
    answers_ms = config.read_deadline_ms(num_tokens)
    return WaitingBound(
        lookups, chances, config.prefetch_hard_max_ms, answers_ms, config.max_defers, config.chance_quantum_ms
    )
