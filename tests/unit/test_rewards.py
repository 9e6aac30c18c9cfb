"""Kinds of rewards in the block, and how long arrays may be."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.spaces import Discrete

from envmgr.spaces import codec_of
from envmgr.wire.block import REWARD_BITS, REWARD_SHIFT, Block, BlockPlan
from envmgr.wire.rewards import FIRST_ARRAY, FIRST_WIDE, FITS_ALL, KINDS, kind_of_reward, restored
from tests.unit.core_rigs import assert_same


@pytest.mark.parametrize("kind", sorted(FITS_ALL))
def test_any_numbers_are_rewards_of_most_kinds(kind: int) -> None:
    numbers = np.array([np.nan, -np.inf, 1e300, 5e-324])
    if kind >= FIRST_ARRAY:
        numbers = np.repeat(numbers[:, None], 1 + (kind - FIRST_ARRAY) // 2, axis=1)
    assert [kind_of_reward(reward, 9) for reward in restored(kind, numbers)] == [kind] * 4


def test_a_kind_needs_no_bits_but_its_own() -> None:
    assert (KINDS - 1) << REWARD_SHIFT <= 0xFFFF


def test_arrays_may_be_as_long_as_the_room_that_a_plan_has() -> None:
    plan = BlockPlan(2, 1, codec_of(Discrete(2)).layout, 20)  # type: ignore[arg-type]
    block = Block(bytearray(plan.nbytes), plan)
    for row, given in enumerate((np.arange(20) / 8, np.arange(20, dtype=np.float32))):
        kind = kind_of_reward(given, plan.reward_length)
        assert kind is not None
        assert FIRST_WIDE <= kind < KINDS <= 1 + (REWARD_BITS >> REWARD_SHIFT)
        block.wide_rewards[row] = given
        assert_same(restored(kind, block.reward_numbers(kind, slice(row, row + 1)))[0], given)
        assert kind_of_reward(given) is None
        assert kind_of_reward(given[:9], plan.reward_length) is None
    assert kind_of_reward(np.zeros(0), plan.reward_length) is None
    assert Block(bytearray(plan.nbytes), BlockPlan(2, 1, plan.actions)).wide_rewards.shape == (2, 8)
