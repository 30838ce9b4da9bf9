"""Exception types. Refusal is a value, an operating error is one of these, a bug is an assertion.

Every message says what to do about it.
"""

from __future__ import annotations


class HiCacheError(Exception):
    """Base of everything this library raises on purpose."""


class ConfigError(HiCacheError, ValueError):
    """A setting, or a combination of settings, that cannot work; raised before anything is started."""


class IllegalTransition(HiCacheError):
    """An event that the table forbids in the present state. Nothing was changed."""


class UnknownRequest(HiCacheError, KeyError):
    """A call named a request id that is not live."""

    def __str__(self) -> str:
        # KeyError would show the repr of the message.
        return str(self.args[0]) if self.args else ""


class DuplicateRequest(HiCacheError):
    """A request id was submitted while an earlier attempt under the same id is still live."""


class StoreError(HiCacheError):
    """A storage backend could not do what was asked (I/O error, no space, closed)."""


class StagingError(HiCacheError):
    """The staging layer could not do what was asked (wrong size, closed, not pinnable)."""


class LoadFailed(HiCacheError):
    """A host-to-device copy that the caller waits on has failed; its rows hold no usable bytes."""


class TraceError(HiCacheError):
    """A workload file that cannot be replayed; the message names file and line."""


class InvariantViolation(HiCacheError, AssertionError):
    """One or more invariants do not hold. The message lists all violations that were found."""
