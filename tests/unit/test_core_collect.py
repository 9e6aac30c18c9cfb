"""Collecting: each timestep is handed out once, in order, whatever comes in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envmgr.core import Phase
from envmgr.core.collect import ArrayBatch, Collected, HandedOut, by_env_id
from envmgr.core.replies import BlockReplies
from envmgr.errors import EnvProtocolError
from envmgr.lifecycle import EnvState
from envmgr.wire.block import REWARD_SHIFT, Block
from envmgr.wire.messages import AfterStep, Op
from envmgr.wire.rewards import KINDS, TYPES
from tests.rig import Rig, over_routes
from tests.unit.core_rigs import assert_same

# -- steps ----------------------------------------------------------------------------------------


@over_routes
def test_a_step_is_sent_answered_and_delivered_once() -> None:
    rig = Rig(2).launch()
    rig.send({1: "left"})
    (request,) = rig.requests(Op.STEP, 1)
    assert request.payload == "left"
    assert request[1:3] == (1, 0)
    slot = rig.slot(1)
    assert (slot.phase, slot.owed, slot.timestep) == (Phase.STEPPING, True, None)
    assert rig.ready() == [0]
    assert rig.supervisor.table.owed_ids() == [1]
    assert rig.deliver() == {}
    rig.stepped(1, "next", reward=0.5, info=1)
    assert (slot.phase, slot.owed) == (Phase.IDLE, True)
    assert rig.ready() == [0]  # not before its timestep has been delivered
    delivered = rig.deliver()
    assert delivered == {1: ("next", 0.5, False, {"info": 1})}
    assert rig.ready() == [0, 1]
    assert rig.supervisor.table.owed_ids() == []
    assert rig.deliver() == {}
    assert rig.obs(slot.env_id) == "next"
    assert rig.identity_holds()
    assert rig.supervisor.statistics.timesteps == 1


@over_routes
def test_timesteps_are_delivered_in_the_order_that_was_asked_for() -> None:
    rig = Rig(3).launch()
    rig.send({0: 1, 1: 1, 2: 1})
    for env_id in (2, 0):
        rig.stepped(env_id)
    assert list(rig.deliver(2, 1, 0)) == [2, 0]
    rig.stepped(1)
    assert list(rig.deliver(0, 1)) == [1]


@over_routes
def test_the_timesteps_observation_is_the_one_that_is_ready() -> None:
    rig = Rig(has_block=False).launch()
    obs = np.zeros(2)
    rig.send(0)
    rig.stepped(0, obs)
    assert rig.deliver(0)[0].obs is rig.obs() is obs


# -- interrupts -----------------------------------------------------------------------------------


@over_routes
def test_what_an_interrupt_has_left_of_a_hand_out_is_done_again_at_every_point_of_it() -> None:
    rig = Rig(2, has_block=True).launch()
    rig.send({0: 1, 1: 1})
    told = {"terminated": True, "truncated": False}
    for env_id, done in ((0, True), (1, False)):
        after = AfterStep.RESETS if done else AfterStep.NOTHING
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, done, told if done else {}, after))
    supervisor = rig.supervisor
    collected = supervisor.collector.take(rig.selection([0, 1]))
    assert collected is not None
    supervisor.collector.timesteps(collected)
    for _ in range(2):
        returning = supervisor.journal.returning
        assert returning is not None
        assert returning.timesteps is collected
        assert [rig.phase(i) for i in range(2)] == [Phase.RESETTING, Phase.IDLE]
        assert rig.slot(0).next_episode == rig.slot(0).episode + 1
        assert (supervisor.statistics.timesteps, supervisor.statistics.episodes) == (2, 1)
        supervisor.journal.do(supervisor.collector._redo, collected)  # as after an interrupt
    rig.reset_done(0)
    assert rig.ready() == [0, 1]


class _Interrupted(BaseException):
    """As Ctrl-C."""


def _ended_in_place(**rules: Any) -> tuple[Rig, Collected]:
    """Return two envs, one of which has ended an episode and begun another, and what is taken."""
    rig = Rig(2, has_block=True, reset_inplace=True, **rules).launch()
    rig.send({0: 1, 1: 1})
    told = {"terminated": True, "truncated": False}
    rig.transport.reply(0, Op.STEPPED, ("last", 1.0, True, told, AfterStep.RESETS))
    rig.transport.reply(0, Op.RESET_DONE, ("first", {"level": 2}))
    rig.transport.reply(1, Op.STEPPED, ("next", 1.0, False, {}, AfterStep.NOTHING))
    collected = rig.supervisor.collector.take(rig.selection([0, 1]))
    assert type(collected) is Collected
    return rig, collected


@pytest.mark.parametrize("function", ["delivered", "ended_in_place", "_note_resets"])
@pytest.mark.parametrize("comes_first", [True, False])
def test_an_end_in_place_that_was_interrupted_is_noted_once(
    function: str, comes_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, collected = _ended_in_place()
    supervisor, table = rig.supervisor, rig.supervisor.table
    assert collected.begun.keys() == {0}
    before = table.episodes[0], table.episodes_done[0]
    do = getattr(table, function)

    def interrupted(*args: Any) -> None:
        monkeypatch.undo()
        if not comes_first:
            do(*args)
        raise _Interrupted

    monkeypatch.setattr(table, function, interrupted)
    with pytest.raises(_Interrupted):
        supervisor.collector.timesteps(collected)
    supervisor.journal.finish()
    for _ in range(2):
        assert (table.episodes[0], table.episodes_done[0]) == (before[0] + 1, before[1] + 1)
        assert table.next_episodes[0] == table.episodes[0]
        assert (supervisor.statistics.timesteps, supervisor.statistics.episodes) == (2, 1)
        assert [rig.phase(i) for i in range(2)] == [Phase.IDLE] * 2
        assert rig.ready() == [0, 1]
        assert (rig.obs(0), rig.obs(1)) == ("first", "next")
        assert table.reset_infos[0] == {"level": 2}
        supervisor.journal.do(supervisor.collector._redo, collected)


def test_an_end_with_more_to_it_is_noted_by_itself() -> None:
    rig, collected = _ended_in_place(episode_num=1)
    assert not collected.begun
    rig.hand_out(collected)
    assert [rig.state(i) for i in range(2)] == [EnvState.DONE, EnvState.RUN]
    for told in ("again", "failing"):
        for env_id in (0, 1):
            rig, _ = _ended_in_place()
            owner = rig.supervisor.table if told == "again" else rig.supervisor.statistics
            getattr(owner, told).add(env_id)
            taken = rig.supervisor.collector.take(rig.selection([0, 1]))
            assert taken is not None
            assert bool(taken.begun) is (env_id == 1)  # of others there may be more to know
            assert rig.hand_out(taken).keys() == {0, 1}


@over_routes
def test_what_was_handed_out_to_nobody_counts_when_it_is_delivered() -> None:
    rig = Rig(2).launch()
    rig.send({0: 1, 1: 1})
    for env_id in (0, 1):
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, False, {}, 0))
    rig.exactly(0)
    taken = rig.gather.exactly(rig.selection([1]))
    assert taken is not None

    def hand_out() -> None:
        rig.supervisor.collector.timesteps(taken)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), rig.engine.calling:
        hand_out()
    with rig.engine.calling:
        assert rig.supervisor.statistics.timesteps == 1
        assert list(rig.exactly(1)) == [1]
    assert rig.supervisor.statistics.timesteps == 2


# -- while a manager is closed --------------------------------------------------------------------


def test_what_was_taken_is_read_also_when_the_manager_was_closed_since() -> None:
    rig = Rig(2, has_block=True).launch()
    rig.send({0: 1, 1: 1})
    for env_id in range(2):
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0 + env_id, False, {}, 0))
    collected = rig.supervisor.collector.take(rig.selection([0, 1]))
    assert collected is not None
    rig.engine.close(0.0)
    timesteps = rig.supervisor.collector.timesteps(collected)
    assert {i: timestep.reward for i, timestep in timesteps.items()} == {0: 1.0, 1: 2.0}


# -- rewards --------------------------------------------------------------------------------------


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


def test_what_was_handed_out_as_arrays_is_read_by_env_id_as_well() -> None:
    rig, handed, no = Rig(2, has_block=True).launch(), HandedOut(), np.zeros(2, np.bool_)
    handed.result = ArrayBatch(
        np.arange(2), np.ones((2, 3)), np.array([1.5, 2.0]), no, no, [{}, {}]
    )
    timesteps = rig.supervisor.collector.timesteps(handed)
    assert [(i, t.reward, t.done) for i, t in timesteps.items()] == [
        (0, 1.5, False),
        (1, 2.0, False),
    ]
