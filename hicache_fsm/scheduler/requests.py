"""What the reference scheduler knows of a request: tokens, progress, and what its reuse came to."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from hicache_fsm.ports import DEFAULT_NAMESPACE, Namespace


class Phase(enum.Enum):
    """Where a request is, from the scheduler's side."""

    WAITING = "waiting"
    PREFILLING = "prefilling"  # in the middle of its prompt
    DECODING = "decoding"
    ENDED = "ended"


class Request:
    """One request. `num_tokens` counts prompt and output, `computed` those of them that have KV."""

    __slots__ = (
        "rid", "prompt", "prompt_len", "max_new_tokens", "namespace", "output", "phase", "computed", "outcome",
        "reason", "counted", "retractions", "prompt_end", "last_page", "tag",
    )  # fmt: skip

    def __init__(
        self,
        rid: str,
        prompt: Sequence[int],
        max_new_tokens: int,
        namespace: Namespace = DEFAULT_NAMESPACE,
        tag: object = None,
    ) -> None:
        self.rid = rid
        self.prompt = prompt
        self.prompt_len = len(prompt)
        self.max_new_tokens = max_new_tokens
        self.namespace = namespace
        self.output: list[int] = []
        self.phase = Phase.WAITING
        self.computed = 0
        self.outcome = ""  # finished, aborted or rejected
        self.reason = ""  # why it was rejected
        self.counted = False  # its prompt tokens have been counted, at the first commit
        self.retractions = 0
        self.prompt_end = self.prompt_len  # what the present attempt prefills: prompt and output so far
        self.last_page = -1  # device page that holds the next token's row while decoding
        self.tag = tag  # the caller's own

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + len(self.output)

    @property
    def new_tokens_left(self) -> int:
        return self.max_new_tokens - len(self.output)
