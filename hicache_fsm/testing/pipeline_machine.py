"""`PipelineMachine`: Hypothesis drives a control plane against a hostile outside, and shrinks what goes wrong.

    class TestPipeline(PipelineMachine.TestCase):
        settings = settings(max_examples=300, stateful_step_count=50)

The acts and what must hold are those of `pipeline_walk.Pipeline`. Narrow it to your own settings by overriding
`configure` in a subclass of `Pipeline`, and name that as `pipeline` in a subclass of the machine. The acts of a failing
run are printed, and once more as a scenario that `hicache-fsm run-scenario` runs again. `random_walk` does the same
acts without Hypothesis: many times faster, reproducible by its seed, but a failure is not shrunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from hicache_fsm.testing.pipeline_walk import Pipeline

T = TypeVar("T")


class DrawnChoices:
    """Choices of Hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def number(self, what: str, least: int, most: int) -> int:
        return self.data.draw(st.integers(least, most), label=what)

    def of(self, what: str, options: Sequence[T]) -> T:
        return options[self.data.draw(st.integers(0, len(options) - 1), label=what)]


class PipelineMachine(RuleBasedStateMachine):
    """The acts of a `Pipeline`, chosen and shrunk by Hypothesis."""

    pipeline: type[Pipeline] = Pipeline
    run: Pipeline | None = None
    failed = False

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.run = self.pipeline(DrawnChoices(data))
        note(str(self.run.config))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        assert self.run is not None
        run = self.run
        note(self._watched(lambda: run.step(DrawnChoices(data))))

    def teardown(self) -> None:
        if self.run is not None and not self.failed:
            self._watched(self.run.wind_up)

    def _watched(self, act: Callable[[], T]) -> T:
        """Do something; if it fails, the report has the scenario."""
        assert self.run is not None
        try:
            return act()
        except Exception:
            # Also raised by Hypothesis itself, to end a run that it does not want; nothing is printed then.
            self.failed = True
            note(self.run.scenario("found by Hypothesis"))
            raise
