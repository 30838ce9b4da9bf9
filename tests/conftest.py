"""What all tests share: Hypothesis profiles, and the place of real workload traces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT.parent / "shared" / "traces"

# Derandomised: a gate must not fail by luck. The explain phase takes several times as long as finding and
# shrinking a failure, and the shrunk steps say enough.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    phases=_PHASES,
    suppress_health_check=[HealthCheck.too_slow],
)
# Randomised and long: this one finds what the gate cannot.
settings.register_profile(
    "nightly",
    derandomize=False,
    deadline=None,
    print_blob=True,
    max_examples=5000,
    phases=_PHASES,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of real workload traces; skips where it does not lie beside the repository."""
    if not TRACES.is_dir():
        pytest.skip(f"real traces are not part of the repository, and there are none in {TRACES}")
    return TRACES
