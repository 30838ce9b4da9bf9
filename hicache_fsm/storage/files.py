"""File helpers: vectored reads and writes that finish or say how far they came, atomic files, errors with advice."""

from __future__ import annotations

import enum
import errno
import fcntl
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from hicache_fsm.errors import StoreError

# Buffers that one vectored call takes, on Linux and the BSDs.
IOV_MAX = 1024

_ADVICE = {
    errno.ENOSPC: "free space on that disk, or reopen the store with a smaller max_bytes",
    errno.EDQUOT: "raise the disk quota, or reopen the store with a smaller max_bytes",
    errno.EFBIG: "raise the file size limit (ulimit -f), or reopen the store with smaller segment_bytes",
    errno.EACCES: "give this user read and write permission there, or name another folder",
    errno.EPERM: "give this user read and write permission there, or name another folder",
    errno.EROFS: "remount the file system writable, or name another folder",
    errno.ENOENT: "create the folder or mount its disk first",
    errno.EEXIST: "name a folder, not a file",
    errno.ENOTDIR: "name a folder, not a file",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit on open files",
    errno.EIO: "check the disk; pages that cannot be read are recomputed",
}


class Fsync(enum.Enum):
    """When written pages are forced to the disk. A crash of the process alone never loses a stored page."""

    NEVER = "never"  # the kernel decides; after a power loss pages may be missing, never wrong
    SEAL = "seal"  # when a segment is full and on close
    ALWAYS = "always"  # before `put` returns


def store_error(doing: str, path: Path, error: OSError) -> StoreError:
    """A `StoreError` that names the file, the system's reason and what to do."""
    advice = _ADVICE.get(error.errno or 0, "check that folder and its disk")
    code = errno.errorcode.get(error.errno or 0, str(error.errno))
    return StoreError(f"could not {doing} {path}: {error.strerror or error} ({code}); {advice}")


class Written(NamedTuple):
    nbytes: int  # bytes that are in the file
    error: OSError | None  # why it is fewer than asked


def _advance(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What remains of `buffers` after their first `nbytes`."""
    for position, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            return [buffer.cast("B")[nbytes:], *buffers[position + 1 :]]
        nbytes -= buffer.nbytes
    return []


def write_fully(fd: int, buffers: Sequence[memoryview], offset: int) -> Written:
    """Write at most `IOV_MAX` buffers one after the other; short writes are continued."""
    total = sum(buffer.nbytes for buffer in buffers)
    done = 0
    while done < total:
        try:
            count = os.pwritev(fd, buffers, offset + done)
        except OSError as error:
            return Written(done, error)
        if count == 0:
            return Written(done, OSError(errno.EIO, "the system wrote nothing"))
        done += count
        if done < total:
            buffers = _advance(buffers, count)
    return Written(done, None)


def read_fully(fd: int, buffers: Sequence[memoryview], total: int, offset: int) -> int:
    """Fill at most `IOV_MAX` buffers of `total` bytes; fewer are read only at the end of the file. Raises `OSError`."""
    done = os.preadv(fd, buffers, offset)
    count = done
    while done < total and count:
        buffers = _advance(buffers, count)
        count = os.preadv(fd, buffers, offset + done)
        done += count
    return done


def sync_folder(folder: Path) -> None:
    """Make created, renamed and removed names in `folder` survive a power loss. Raises `OSError`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes, *, sync: bool) -> None:
    """Replace `path` by `data`: a reader sees the old file or the whole new one. Raises `OSError`."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb", buffering=0) as file:
            written = write_fully(file.fileno(), [memoryview(data)], 0)
            if written.error is not None:
                raise written.error
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


class FolderLock:
    """Keeps a second writer out of a folder for as long as this object is held. Freed by the system on exit."""

    __slots__ = ("_file",)

    def __init__(self, folder: Path) -> None:
        path = folder / "lock"
        try:
            self._file = FileIO(path, "a")
        except OSError as error:
            raise store_error("open the lock file", path, error) from error
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise store_error("lock", path, error) from error
            raise StoreError(
                f"the store in {folder} is already open for writing, by another process or by this one; "
                f"close it there, or give each process its own folder"
            ) from error

    def release(self) -> None:
        """Idempotent. Unlocks for forked children that inherited the file, too."""
        if not self._file.closed:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)
            self._file.close()
