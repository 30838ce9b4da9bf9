"""Replays TLC's traces on the real control plane: witnesses of `reach/*.cfg`, and counterexamples if there are any.

    python -m spec.witness              every situation that must be reachable is reached by the code, step by step

Each step of the trace must be a step of the code, from the view that the trace has to the view that it has next (see
`spec.agreement` for views). A trace that the code does not have is a difference between the two.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

from spec.agreement import spec_view
from spec.code_side import Bounds, Code, View, read_bounds
from spec.run import CONFIGS, Config, run_tlc
from spec.tlc_graph import parse_value

_STATE = re.compile(r"^State \d+: <(\w+)[^>]*>\nst = (.*?)\n\n", re.MULTILINE | re.DOTALL)

NOT_MAPPED = {
    "reach/Bypass": "several prompts: `tests/test_load_path.py` has this case",
    "reach/WriteYields": "writes: `tests/test_write_path.py` has this case",
}
"""Witnesses outside what the mapping covers."""


class Step(NamedTuple):
    action: str
    st: dict[str, Any]


def trace_of(output: str) -> list[Step]:
    """The behaviour that TLC printed; the first step is `Initial`."""
    return [Step(action, parse_value(body)) for action, body in _STATE.findall(output)]


def replay(bounds: Bounds, trace: list[Step]) -> str:
    """Why the code cannot follow this trace; empty if it can."""
    code = Code(bounds)
    code.settle()
    if code.view() != spec_view(trace[0].st, bounds["N"]):
        return "the initial states differ"
    for number, step in enumerate(trace[1:], 2):
        if not _follow(code, step.action, spec_view(step.st, bounds["N"])):
            return f"state {number}: the code has no {step.action} that leads there"
    return ""


def _follow(code: Code, action: str, target: View) -> bool:
    """Take the step that leads to this view, if there is one."""
    state = code.state()
    for at in range(len(code.steps())):
        code.restore(state)
        name, act = code.steps()[at]
        if name == action and act() is not False:
            code.settle()
            if code.view() == target:
                return True
    return False


def check(config: Config, output: str) -> str:
    """Why the witness of a refuted claim is no behaviour of the code; empty if it is one, or is not mapped."""
    if config.name in NOT_MAPPED:
        return ""
    trace = trace_of(output)
    if len(trace) < 2:
        return f"TLC printed {len(trace)} states"
    return replay(read_bounds(config.path), trace)


def main() -> int:
    wrong = 0
    for config in CONFIGS:
        if not config.refuted:
            continue
        outcome = run_tlc("MC", config.path)
        fault = check(config, outcome.output)
        steps = len(trace_of(outcome.output)) - 1
        said = fault or NOT_MAPPED.get(config.name) or f"the code takes the same {steps} steps"
        print(f"{config.name:<26}{said}", flush=True)
        wrong += bool(fault)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
