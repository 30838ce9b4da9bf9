"""Output files: known to be writable before a run starts, and whole or not there at all afterwards."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hicache_fsm.errors import ConfigError


class OutputFile:
    """One file to be written at the end of a run. It is prepared beside its final place and renamed into it;
    what exists there and is no ordinary file (a pipe, a terminal) is opened and written directly.

    Raises `ConfigError` if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._draft: Path | None = None
        try:
            self.stream: IO[str] = self._open()
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"cannot write {path}: {reason}; name another file") from error

    def _open(self) -> IO[str]:
        if self.path.is_dir() or (self.path.exists() and not self.path.is_file()):
            return self.path.open("w", encoding="utf-8")  # a folder is refused here
        if self.path.exists():
            with self.path.open("a"):
                pass  # renaming would replace a file that we are not allowed to write
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.", suffix=".tmp")
        self._draft = Path(name)
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(handle, 0o666 & ~mask)  # what an ordinary open would have given
        return os.fdopen(handle, "w", encoding="utf-8")

    def commit(self) -> None:
        """All has been written: put it in place. A second call is a no-op."""
        self.stream.close()
        if self._draft is not None:
            self._draft.replace(self.path)
            self._draft = None

    def discard(self) -> None:
        """Remove what was not committed."""
        with contextlib.suppress(OSError):  # a reader that has gone away
            self.stream.close()
        if self._draft is not None:
            self._draft.unlink(missing_ok=True)
            self._draft = None


@contextlib.contextmanager
def output_files(*paths: Path | None) -> Iterator[list[OutputFile | None]]:
    """Open all of them before anything else happens; those not committed are removed at the end.

    Raises `ConfigError` if one cannot be written, or if two are the same.
    """
    named = [path.resolve() for path in paths if path is not None]
    for path in named:
        if named.count(path) > 1 and (path.is_file() or not path.exists()):
            raise ConfigError(f"{path} is named for two outputs; give each its own file")
    with contextlib.ExitStack() as stack:
        files: list[OutputFile | None] = []
        for wanted in paths:
            file = None if wanted is None else OutputFile(wanted)
            if file is not None:
                stack.callback(file.discard)
            files.append(file)
        yield files
