"""A store from one line of configuration."""

from __future__ import annotations

import os
import re

from hicache_fsm.errors import ConfigError
from hicache_fsm.ports import KVStore
from hicache_fsm.storage.file_store import FileStore
from hicache_fsm.storage.memory_store import MemoryStore

# At least two letters, so that a drive letter is not taken for a scheme.
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):(.*)", re.DOTALL)


def open_store(
    spec: str | os.PathLike[str], page_bytes: int, fingerprint: bytes = b"", max_bytes: int | None = None
) -> KVStore:
    """Open what `spec` names: a folder, `file:FOLDER`, or `memory:`.

    `fingerprint` identifies model, weights and layout; a memory store ends with its process and needs none.
    Raises `ConfigError` on an unknown scheme or sizes that cannot work, `StoreError` if the store cannot be opened.
    """
    text = os.fspath(spec)
    match = _SCHEME.fullmatch(text) if isinstance(spec, str) else None
    if match is None:
        return FileStore(_folder(text), page_bytes, fingerprint, max_bytes)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        return FileStore(_folder(rest), page_bytes, fingerprint, max_bytes)
    if scheme == "memory":
        if rest:
            raise ConfigError(f"memory: takes nothing after the colon, not {rest!r}")
        return MemoryStore(page_bytes, max_bytes)
    raise ConfigError(f"unknown store {scheme!r} in {text!r}; there are: a folder, file:FOLDER, memory:")


def _folder(path: str) -> str:
    if not path:
        raise ConfigError("the store has no folder; name one, or use memory:")
    return path
