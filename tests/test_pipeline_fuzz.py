"""The control plane against a hostile outside: books and bytes after every step, and an end for every request."""

from __future__ import annotations

from hypothesis import settings

from hicache_fsm.testing.pipeline_machine import PipelineMachine


class TestPipeline(PipelineMachine.TestCase):
    settings = settings(max_examples=200, stateful_step_count=50)
