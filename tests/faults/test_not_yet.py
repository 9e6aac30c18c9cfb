"""Faults of what this version does not have yet: F21 and F46."""

from __future__ import annotations

import pytest

from envmgr import ENV_MANAGER_REGISTRY
from envmgr.errors import ConfigError
from tests.contract.harness import ASYNC_FORK, BASE, SYNC_SERVER, Setup, World, over


@over(BASE, SYNC_SERVER, ASYNC_FORK)
def test_f21_spares_are_refused_and_not_left_out_in_silence(world: World, setup: Setup) -> None:
    with pytest.raises(ConfigError, match=r"spare_env_num is 2.* keeps no spares"):
        world.make(setup, 2, spare_env_num=2)
    assert world.journal(0) == []


def test_f46_the_death_of_a_node_an_actor_or_its_owner() -> None:
    if "ray" not in ENV_MANAGER_REGISTRY:
        pytest.skip("waits for the transport over Ray")
    pytest.fail("there is a transport over Ray now: F1 and F13 have to hold for it, too")
