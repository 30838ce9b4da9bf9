"""Ctrl-C and termination as a wish that a run can grant between two passes."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\nstopping: what runs is given back first; once more stops at once\n"


class StopSignals:
    """While entered, the first signal only sets `received`; the second has its usual effect.

    An exception raised at any point, as Python does by default, could leave the core in the middle of a change.
    """

    def __init__(self) -> None:
        self.received = 0
        self._usual: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in SIGNALS:
            self._usual[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def wanted(self) -> bool:
        return self.received != 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()
        os.write(2, NOTICE)

    def _restore(self) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)
        self._usual = {}
