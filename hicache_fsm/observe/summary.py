"""`ReplayResult`: what a replay came to. Reports read it, `replay.result` fills it in."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class ReplayResult:
    """Fields are those of the JSON file. Lengths are tokens unless the name says otherwise."""

    requests: int
    outcomes: dict[str, int]
    tokens: dict[str, int]  # prompt, device, storage, computed, redone, generated, ideal, device_only
    found: int
    spliced: int
    unfulfilled: dict[str, int]  # reason -> tokens; only reasons that occurred
    retries: int
    parks: int
    bypasses: int
    defers: int
    retractions: int
    restarts: int
    shrinks: int
    content_errors: int  # rows read that held wrong bytes, each layer counted
    checked_rows: int  # rows read and compared in all layers
    leaks: int
    passes: int
    seconds: float
    stats: dict[str, int]  # further counters of the load path
    writes: dict[str, Any]  # pages stored, and dropped by reason
    high_water: dict[str, int]  # staging and pins, beside their capacities
    longest_waits: dict[str, dict[str, Any]]  # state -> passes, seconds, rid
    store: dict[str, int]
    options: dict[str, Any]  # what the run was told, by option name
    interrupted: bool = False
    store_folder: str = ""  # empty: a temporary one, removed since
    leak_list: list[str] = field(default_factory=list)
    error_list: list[str] = field(default_factory=list)
    rejections: list[str] = field(default_factory=list)  # "rid: reason"

    @property
    def ended(self) -> int:
        return sum(self.outcomes.values())

    @property
    def reused(self) -> int:
        """Prompt tokens that came from device or storage."""
        return self.tokens["device"] + self.tokens["storage"]

    @property
    def reuse_of_ideal(self) -> float:
        """Share of the ideal's tokens that came from device or storage; above 1 on a warm store."""
        return self.reused / self.tokens["ideal"] if self.tokens["ideal"] else 1.0

    @property
    def reuse(self) -> float:
        """Share of the committed prompt tokens that came from device or storage."""
        return self.reused / self.tokens["prompt"] if self.tokens["prompt"] else 0.0

    @property
    def balanced(self) -> bool:
        return self.found == self.spliced + sum(self.unfulfilled.values())

    def failures(self) -> list[str]:
        """Why the run does not count as passed; empty if it does: all requests ended, no byte was wrong,
        nothing leaked, every found token has its place."""
        out = ["interrupted"] if self.interrupted else []
        if self.ended != self.requests:
            out.append(f"{self.requests - self.ended:,} of {self.requests:,} requests did not end")
        if self.content_errors:
            out.append(f"{self.content_errors:,} rows held wrong bytes")
        if self.leaks:
            out.append(f"{self.leaks} leaks")
        if not self.balanced:
            closed = self.spliced + sum(self.unfulfilled.values())
            out.append(f"{self.found:,} tokens found, {closed:,} accounted for")
        return out

    @property
    def passed(self) -> bool:
        return not self.failures()

    def to_json(self) -> dict[str, Any]:
        derived = {
            "passed": self.passed, "failures": self.failures(), "reuse_of_ideal": self.reuse_of_ideal,
            "reuse": self.reuse,
        }  # fmt: skip
        return {**asdict(self), **derived}
