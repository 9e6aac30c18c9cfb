"""Faults of what this version does not have yet: F46."""

from __future__ import annotations

import pytest

from envmgr import ENV_MANAGER_REGISTRY


def test_f46_the_death_of_a_node_an_actor_or_its_owner() -> None:
    if "ray" not in ENV_MANAGER_REGISTRY:
        pytest.skip("waits for the transport over Ray")
    pytest.fail("there is a transport over Ray now: F1 and F13 have to hold for it, too")
