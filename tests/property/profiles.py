"""How long the property tests search: some seconds, or minutes with `HYPOTHESIS_PROFILE=long`.

What fails is printed as the steps that lead there, and as a line `@reproduce_failure(...)` that
replays it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
MACHINES = {
    "short": settings(max_examples=600, stateful_step_count=40),
    "long": settings(max_examples=6000, stateful_step_count=80),
}
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "short")


def machine_settings() -> settings:
    """Return the settings of stateful tests under the present profile."""
    return settings(
        MACHINES[PROFILE], deadline=None, print_blob=True, suppress_health_check=_SLOW_IS_FINE
    )
