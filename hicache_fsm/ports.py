"""The seams: what the deterministic core says to the outside, and what the outside says back.

Commands leave the core in an outbox; completions come back through an inbox and are applied in `tick()`.
Both are flat tuples of ints, strings and tuples, so that they can be logged, replayed and compared.

Who may touch which rows, by operation (`op` is unique for the life of a control plane):

    Lookup   nothing
    Read     writes staging rows [0, n), leading page first, until its ReadDone
    Load     reads staging rows and writes device rows until its LoadDone
    Offload  reads device rows and writes staging rows until its OffloadDone
    Store    reads staging rows until its StoreDone

Every operation is answered by exactly one final completion, or by `Lost` when its executor is gone and can
never touch the rows again. A second answer is counted and otherwise ignored.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

PageKey: TypeAlias = bytes
"""32-byte chain hash of a page (SHA-256, see `hicache_fsm.tree.keys`)."""


class Pool(enum.IntEnum):
    """A memory pool that rows are allocated from. Demands are vectors indexed by this."""

    DEVICE = 0
    STAGING = 1


# ── commands: core -> shell ──────────────────────────────────────────────────────────────────────────


class Hash(NamedTuple):
    """Compute the page keys of a request off the scheduler thread. The core handles lengths and keys only;
    the shell finds the tokens by the request id."""

    op: int
    rid: str
    attempt: int


class Lookup(NamedTuple):
    """Ask the store how many leading keys it holds."""

    op: int
    rid: str
    attempt: int
    keys: tuple[PageKey, ...]


class Read(NamedTuple):
    """Read the pages of `keys` into the staging rows of `pages`, in order."""

    op: int
    rid: str
    attempt: int
    keys: tuple[PageKey, ...]
    pages: tuple[int, ...]


class Load(NamedTuple):
    """Copy staging pages to device pages (host to device), layer by layer."""

    op: int
    rid: str
    attempt: int
    staging: tuple[int, ...]
    device: tuple[int, ...]


class Offload(NamedTuple):
    """Copy device pages to staging pages (device to host) for a write span."""

    op: int
    span: int
    device: tuple[int, ...]
    staging: tuple[int, ...]


class Store(NamedTuple):
    """Write staging pages to the store under their keys, leading page first."""

    op: int
    span: int
    keys: tuple[PageKey, ...]
    staging: tuple[int, ...]


class Cancel(NamedTuple):
    """The result of this operation is no longer wanted: stop at the next page boundary, then answer as usual."""

    op: int


class Release(NamedTuple):
    """These pages went back to their pool. Sent only when poisoning is on; overwrite them."""

    pool: Pool
    pages: tuple[int, ...]


Command: TypeAlias = Hash | Lookup | Read | Load | Offload | Store | Cancel | Release


# ── completions: shell -> core ───────────────────────────────────────────────────────────────────────


class HashDone(NamedTuple):
    op: int
    keys: tuple[PageKey, ...]


class LookupDone(NamedTuple):
    op: int
    hit_pages: int  # leading keys present
    ok: bool  # False: the store could not be asked; hit_pages is then 0


class ReadProgress(NamedTuple):
    op: int
    pages: int  # leading pages that have landed so far and will not be touched again


class ReadDone(NamedTuple):
    op: int
    pages: int  # leading pages that have landed; the worker has let go of all rows


class LoadDone(NamedTuple):
    op: int
    ok: bool


class OffloadDone(NamedTuple):
    op: int
    ok: bool


class StoreDone(NamedTuple):
    op: int
    stored: int  # leading pages that are now in the store


class Lost(NamedTuple):
    op: int


Completion: TypeAlias = HashDone | LookupDone | ReadProgress | ReadDone | LoadDone | OffloadDone | StoreDone | Lost


# ── values shared by several ports ───────────────────────────────────────────────────────────────────


class Namespace(NamedTuple):
    """Where keys live. `extra_key` (a LoRA name, say) and `cache_salt` (a tenant) enter the chain seed;
    `bigram` keys (EAGLE) hash token pairs. An empty salt equals no salt."""

    extra_key: str | None = None
    cache_salt: str | None = None
    bigram: bool = False


DEFAULT_NAMESPACE = Namespace()


# ── protocols ────────────────────────────────────────────────────────────────────────────────────────


class StoreStats(NamedTuple):
    pages: int  # pages that can be read now
    bytes: int  # bytes they occupy
    corrupt_pages: int  # pages that failed their checksum when read, and are misses since
    evicted_pages: int


class KVStore(Protocol):
    """A storage backend (L3). Called from worker threads, several at once; must be thread safe.

    Methods raise `StoreError` when the backend cannot answer; the caller treats the batch as missed or not
    stored. A page is visible only when it is whole.
    """

    def exists(self, keys: Sequence[PageKey]) -> int:
        """Number of leading keys that are present."""
        ...

    def get(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        """Read each page into its buffer (exactly one page long). One flag a key; a missing, torn or
        corrupt page is False, and what its buffer then holds is undefined."""
        ...

    def put(self, keys: Sequence[PageKey], buffers: Sequence[memoryview]) -> list[bool]:
        """Store each page. One flag a key; a key that exists is a no-op and True."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Flush and release. A second call is a no-op; other calls after it raise `StoreError`."""
        ...


class StagingEngine(Protocol):
    """The data plane: a host staging arena, the device pool, and copies between them.

    `load` and `offload` return at once; `done(op, ok)` is called exactly once from another thread when the
    copy has ended and touches no row any more. Page ids are those of the core's pools.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        ...

    @property
    def num_layers(self) -> int: ...

    def staging_views(self, pages: Sequence[int]) -> list[memoryview]:
        """Writable views of whole staging pages, for zero-copy storage reads and writes."""
        ...

    def load(
        self, op: int, staging: Sequence[int], device: Sequence[int], done: Callable[[int, bool], None]
    ) -> None: ...

    def offload(
        self, op: int, device: Sequence[int], staging: Sequence[int], done: Callable[[int, bool], None]
    ) -> None: ...

    def layer_ready(self, op: int, layer: int) -> None:
        """Block until that load has written this layer. Raises `LoadFailed` if the load failed.
        An operation that has been acknowledged and forgotten counts as ready."""
        ...

    def poison(self, pool: Pool, pages: Sequence[int]) -> None:
        """Overwrite released pages with a pattern no model writes."""
        ...

    def close(self) -> None: ...
