"""How many random examples a property test tries: a fixed number that is the same in every run, or many new ones.

`make test` is repeatable: examples are derived from the test's own code (hypothesis calls that derandomised).
`make test-random` sets RLLIB_LLM_RANDOM_FACTOR: that many times as many, from a seed that is printed.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("RLLIB_LLM_RANDOM_FACTOR", "0"))


def load_profile() -> None:
    """Make one of the two kinds the default. No test has a deadline: a slow machine is no fault of an example."""
    settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
    settings.register_profile(
        "random",
        derandomize=False,
        deadline=None,
        print_blob=True,
        max_examples=100 * max(FACTOR, 1),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("random" if FACTOR else "repeatable")


def examples(count: int) -> settings:
    """Decorator for `count` examples where hypothesis's 100 are too slow or too few."""
    return settings(max_examples=count * max(FACTOR, 1))
