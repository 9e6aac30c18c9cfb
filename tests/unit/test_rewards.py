"""Rewards in the block are handed out as what they were, and all of one kind together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete

from envmgr.core.collect import by_env_id
from envmgr.core.replies import BlockReplies
from envmgr.errors import EnvProtocolError
from envmgr.spaces import codec_of
from envmgr.wire.block import REWARD_BITS, REWARD_SHIFT, Block, BlockPlan
from envmgr.wire.messages import AfterStep, Op
from envmgr.wire.rewards import (
    FIRST_ARRAY,
    FIRST_WIDE,
    FITS_ALL,
    KINDS,
    TYPES,
    kind_of_reward,
    restored,
)
from tests.rig import Rig

REWARDS: dict[str, list[Any]] = {
    "float": [0.5, -0.0, float("nan")],
    "float64": [np.float64(0.5), np.float64(-1.5), np.float64("inf")],
    "float32": [np.float32(0.1), np.float32(0.2), np.float32("nan")],
    "bool": [True, False, True],
    "(1,) float32": [np.full(1, x, np.float32) for x in (0.1, -2.0, np.nan)],
    "(1,) float64": [np.full(1, x) for x in (0.1, -2.0, np.inf)],
    "(3,) float32": [np.arange(3, dtype=np.float32) * x for x in (0.1, -2.0, 3.0)],
    "(8,) float64": [np.arange(8) * x for x in (0.1, -2.0, np.nan)],
}
"""Of kinds that are read together."""

INTEGERS: dict[str, list[Any]] = {"int": [3, -4, 0], "int64": [np.int64(3), np.int64(-4), 5]}
MIXED: dict[str, list[Any]] = {
    "one number": [np.full(1, 0.1), 0.5, np.full(1, 0.1, np.float32)],
    "wide and float": [np.arange(3.0), 0.5, np.arange(3.0)],
    "float and wide": [0.5, np.arange(3.0), 7],
    "wide ones": [np.arange(3.0), np.arange(2.0), np.arange(3, dtype=np.float32)],
}
EVERY = {**REWARDS, **INTEGERS, **MIXED}


def assert_same(found: Any, given: Any) -> None:
    """Check that a reward is of the same type, dtype, shape and value as another."""
    assert type(found) is type(given)
    np.testing.assert_array_equal(found, given, strict=True)


@pytest.fixture
def no_details(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at a single reply is an error."""

    def detail(*args: Any) -> Any:
        raise AssertionError("a reply was looked at by itself")

    monkeypatch.setattr(BlockReplies, "detail", detail)


def block_of(rig: Rig) -> Block:
    """Return the columns."""
    assert rig.transport.shared is not None
    assert rig.transport.shared.block is not None
    return rig.transport.shared.block


def replied(rewards: list[Any], dones: tuple[bool, ...] = (), *infos: Any) -> Rig:
    """Return a rig of three envs whose steps are answered in the block."""
    rig = Rig(3, has_block=True).launch()
    rig.send(dict.fromkeys(range(3), 0))
    for i, reward in enumerate(rewards):
        done = dones[i] if dones else False
        after = AfterStep.RESETS if done else AfterStep.NOTHING
        info = infos[i] if infos else {}
        rig.transport.reply(i, Op.STEPPED, ("obs", reward, done, info, after))
    block = block_of(rig)
    assert (block.replies == block.requests).all(), "one went by message"
    return rig


def arrays_of(rig: Rig) -> Any:
    taken = rig.supervisor.collector.take(rig.selection([0, 1, 2]))
    assert taken is not None
    return rig.supervisor.collector.arrays(taken)


@pytest.mark.usefixtures("no_details")
@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)
class TestTogether:
    def test_as_timesteps(self, rewards: list[Any]) -> None:
        timesteps = replied(rewards).exactly(0, 1, 2)
        for given, timestep in zip(rewards, timesteps.values(), strict=True):
            assert_same(timestep.reward, given)

    def test_as_arrays(self, rewards: list[Any]) -> None:
        batch = arrays_of(replied(rewards))
        expected = np.array(rewards, np.float64).reshape(3, -1).squeeze()
        np.testing.assert_array_equal(batch.reward, expected, strict=True)

    def test_where_an_episode_ends(self, rewards: list[Any]) -> None:
        ends = (False, True, False)
        told = [{"terminated": end, "truncated": False} for end in ends]
        timesteps = replied(rewards, ends, *told).exactly(0, 1, 2)
        assert [timestep.done for timestep in timesteps.values()] == [False, True, False]
        for given, timestep in zip(rewards, timesteps.values(), strict=True):
            assert_same(timestep.reward, given)


@pytest.mark.parametrize("infos", [(), ({"n": 1}, {}, {"n": 2})], ids=["bare", "with infos"])
@pytest.mark.parametrize("rewards", EVERY.values(), ids=EVERY)
def test_rewards_are_handed_out_as_they_were(rewards: list[Any], infos: Any) -> None:
    timesteps = replied(rewards, (True, False, False), *infos).exactly(0, 1, 2)
    for given, timestep in zip(rewards, timesteps.values(), strict=True):
        assert_same(timestep.reward, given)


@pytest.mark.parametrize("infos", [(), ({"n": 1}, {}, {"n": 2})], ids=["bare", "with infos"])
@pytest.mark.parametrize("rewards", EVERY.values(), ids=EVERY)
def test_a_batch_of_arrays_can_be_read_as_timesteps_again(rewards: list[Any], infos: Any) -> None:
    batch = arrays_of(replied(rewards, (True, False, False), *infos))
    if batch is None:  # to be put together from timesteps
        assert any(rewards is mixed for mixed in MIXED.values())
        return
    for given, timestep in zip(rewards, by_env_id(batch).values(), strict=True):
        assert_same(timestep.reward, given)


def test_arrays_say_how_each_episode_ends() -> None:
    told = [{"terminated": t, "truncated": not t} for t in (False, True, False)]
    batch = arrays_of(replied([0.5, 0.5, 0.5], (False, True, True), {}, *told[1:]))
    assert batch.terminated.tolist() == [False, True, False]
    assert batch.truncated.tolist() == [False, False, True]


def test_arrays_of_rewards_are_nobody_elses() -> None:
    rig = replied(REWARDS["(3,) float32"])
    timesteps = rig.exactly(0, 1, 2)
    copies = [timestep.reward.copy() for timestep in timesteps.values()]
    block_of(rig).wide_rewards[:] = 9.0
    timesteps[0].reward[:] = 7.0
    for k in (1, 2):
        assert_same(timesteps[k].reward, copies[k])
    wide = replied(REWARDS["(3,) float32"])
    batch = arrays_of(wide)
    block_of(wide).wide_rewards[:] = 9.0
    assert not (batch.reward == 9.0).any()


@pytest.mark.parametrize("n", [1, 3], ids=["one", "all"])
@pytest.mark.parametrize(
    ("kind", "number"),
    [(KINDS, 1.0), (31, 1.0), (TYPES.index(int), np.nan), (TYPES.index(np.int64), 1e300)],
)
def test_what_is_no_reward_fails_its_env(kind: int, number: float, n: int) -> None:
    rig = replied([0.5] * 3)
    block = block_of(rig)
    block.rewards[:n] = number
    block.flags[:n] |= kind << REWARD_SHIFT
    timesteps = rig.exactly(0, 1, 2)
    failed = [isinstance(t.info.get("error"), EnvProtocolError) for t in timesteps.values()]
    assert failed == [i < n for i in range(3)]
    assert [t.reward for t in timesteps.values()] == [0.0 if bad else 0.5 for bad in failed]


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
        kind = kind_of_reward(given, plan.reward_room)
        assert kind is not None
        assert FIRST_WIDE <= kind < KINDS <= 1 + (REWARD_BITS >> REWARD_SHIFT)
        block.wide_rewards[row] = given
        assert_same(restored(kind, block.reward_numbers(kind, slice(row, row + 1)))[0], given)
        assert kind_of_reward(given) is None
        assert kind_of_reward(given[:9], plan.reward_room) is None
    assert kind_of_reward(np.zeros(0), plan.reward_room) is None
    assert Block(bytearray(plan.nbytes), BlockPlan(2, 1, plan.actions)).wide_rewards.shape == (2, 8)
