"""Field cases: failures that control planes of this kind had in the field, by id, and where each is tested.

`where` says which part of the project a case belongs to:

    sim        the control plane: FULL attention on one rank, on the simulated outside
    runtime    needs real threads, the scheduler or the shell
    store      belongs to the storage backends
    keys       belongs to page keys and namespaces
    gpu        needs real streams
    rank       needs several ranks or pipeline stages
    hybrid     needs window or state components
    metrics    belongs to the exported metrics

Cases without a test yet are marked `tested=False`. `test_field_cases.py` compares the rest with the names of all tests.
"""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    number: int
    kind: str
    title: str
    where: str
    tested: bool = True


CASES = (
    Case(1, "wedge", "a blocked head hides loads that are done", "sim"),
    Case(2, "wedge", "a hit below the threshold leaves no terminal mark", "sim"),
    Case(3, "wedge", "an unplanned read counts as complete", "sim"),
    Case(4, "wedge", "rounding refuses a request that fits", "sim"),
    Case(5, "wedge", "queued requests pin the whole device", "sim"),
    Case(6, "wedge", "an answer that never comes", "sim"),
    Case(7, "wedge", "writes starve reads of staging", "sim"),
    Case(8, "rank", "a rank returns early for a request it does not track", "rank", tested=False),
    Case(9, "rank", "stages consume different numbers of answers", "rank", tested=False),
    Case(10, "rank", "ranks size their pools from local facts", "rank", tested=False),
    Case(11, "rank", "the wrong group agrees", "rank", tested=False),
    Case(12, "leak", "a cancelled read keeps its staging", "sim"),
    Case(13, "leak", "an entry is removed before a check bails out", "sim"),
    Case(14, "leak", "a look-up pins what the device already has", "sim"),
    Case(15, "leak", "clean-up waits for the next request", "sim"),
    Case(16, "leak", "an aborted load waits for a signal that never comes", "sim"),
    Case(17, "leak", "a job not registered yet counts as a miss", "sim"),
    Case(18, "leak", "the device prefix has outgrown the plan", "sim"),
    Case(19, "double-free", "two layers release the tail of a broken read", "sim"),
    Case(20, "double-free", "unused pages are released twice", "sim"),
    Case(21, "double-free", "a page is counted on the wrong list", "sim"),
    Case(22, "in-flight", "a load overtakes the last writer of its rows", "gpu", tested=False),
    Case(23, "in-flight", "staging is used again while a copy reads it", "sim"),
    Case(24, "in-flight", "eviction for a load takes what is being loaded", "sim"),
    Case(25, "in-flight", "a row is given away while a write reads it", "sim"),
    Case(26, "in-flight", "the last page is written after its row changed hands", "sim"),
    Case(27, "in-flight", "the arguments of a queued copy are overwritten", "gpu", tested=False),
    Case(28, "in-flight", "two copies into one row are not ordered", "gpu", tested=False),
    Case(29, "in-flight", "a page leaves while a transfer of it is queued", "sim"),
    Case(30, "stale-ack", "the state of an earlier attempt is taken for the present one", "sim"),
    Case(31, "stale-ack", "an answer for an unknown request", "sim"),
    Case(32, "stale-ack", "two answers to one load", "sim"),
    Case(33, "stale-ack", "abort and finish in one step", "sim"),
    Case(34, "stale-ack", "a deferred hold is looked up again", "sim"),
    Case(35, "accounting", "the hit of a declined read is charged", "sim"),
    Case(36, "accounting", "what the look-up found is evicted before it is claimed", "sim"),
    Case(37, "accounting", "the window gate forgets what the load takes", "hybrid", tested=False),
    Case(38, "accounting", "a shortened read keeps its long key", "sim"),
    Case(39, "accounting", "a hit is silently cut to the room of the moment", "sim"),
    Case(40, "accounting", "a read without its base is launched and thrown away", "sim"),
    Case(41, "accounting", "leftovers of a failed load", "sim"),
    Case(42, "retry", "one look-up, before the earlier turn is written", "sim"),
    Case(43, "retry", "a page that is present and cannot be read", "sim"),
    Case(44, "retry", "asked again without bound", "sim"),
    Case(45, "retry", "a hit without room is never tried again", "sim"),
    Case(46, "retry", "nobody wakes a request that must recompute", "sim"),
    Case(47, "starvation", "a large read blocks small ones until their deadline", "runtime"),
    Case(48, "starvation", "a convoy behind one shared load", "sim"),
    Case(49, "starvation", "a parked hit loses its turn to newer ones", "sim"),
    Case(50, "backend", "a partly failed write counts as written", "sim"),
    Case(51, "backend", "a worker dies of a storage error", "runtime"),
    Case(52, "backend", "a truncated page kills the reader", "store"),
    Case(53, "backend", "a read outlives its lease", "store"),
    Case(54, "backend", "fewer pages than promised", "sim"),
    Case(55, "backend", "a breaker that never closes", "store", tested=False),
    Case(56, "content", "keys without their namespace", "keys", tested=False),
    Case(57, "content", "pages of older weights", "keys"),
    Case(58, "content", "keys differ between processes", "keys", tested=False),
    Case(59, "content", "a look-up from the wrong parent", "keys"),
    Case(60, "content", "the head of a prefix is not stored", "store", tested=False),
    Case(61, "content", "a prompt shorter than a page", "sim"),
    Case(62, "eagle", "written in pairs, asked for singly", "keys", tested=False),
    Case(63, "eagle", "a span of pairs is inserted as a plain one", "keys", tested=False),
    Case(64, "swa", "window pages leave without a copy", "hybrid", tested=False),
    Case(65, "swa", "the distance to the last gap is wrong", "hybrid", tested=False),
    Case(66, "swa", "more is kept than was looked up", "hybrid", tested=False),
    Case(67, "swa", "the escape hatch opens under plain pressure", "hybrid", tested=False),
    Case(68, "mamba", "KV without its sidecar", "hybrid", tested=False),
    Case(69, "mamba", "a missing state drops too much or too little", "hybrid", tested=False),
    Case(70, "mamba", "an evicted state hides its subtree", "hybrid", tested=False),
    Case(71, "mamba", "one mark for several loads of a node", "hybrid", tested=False),
    Case(72, "lifecycle", "teardown keeps pins and miscounts", "sim"),
    Case(73, "lifecycle", "a reset waits for a stuck worker", "runtime"),
    Case(74, "lifecycle", "events are drained only with new work", "runtime"),
    Case(75, "lifecycle", "answers of an older epoch", "sim"),
    Case(76, "lifecycle", "tickets of a retracted request", "rank", tested=False),
    Case(77, "metrics", "a deferred request counts once a pass", "sim"),
    Case(78, "metrics", "tiers that do not add up", "metrics", tested=False),
    Case(79, "metrics", "a gauge of the last reporter", "metrics", tested=False),
    Case(80, "cpu-memory", "a sleep per waiting request", "runtime"),
    Case(81, "cpu-memory", "a spinning loop starves the workers", "runtime"),
    Case(82, "cpu-memory", "handles keep old pools alive", "runtime"),
    Case(83, "cpu-memory", "the forward waits behind a burst of copies", "gpu", tested=False),
    Case(84, "chunk-retract", "a full batch stays full", "runtime", tested=False),
    Case(85, "chunk-retract", "each chunk counts as a finished prefix", "sim"),
    Case(86, "chunk-retract", "a requeued request keeps its old lock", "sim"),
)
