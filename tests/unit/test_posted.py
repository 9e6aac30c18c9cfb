"""The child side of the block: what is posted is taken once, and answered there or by message."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr import BaseEnv, EnvTimestep
from envmgr.spaces import codec_of
from envmgr.wire.arenas import ObservationRules, arena_arrays, places_for, plan_placements
from envmgr.wire.block import (
    AFTER_SHIFT,
    DONE,
    HAS_INFO,
    ORDERS,
    PLACE_BITS,
    REWARD_BITS,
    REWARD_SHIFT,
    RING_EACH,
    RING_LAST,
    RING_ONCE,
    Block,
    BlockPlan,
    posting_of,
    request_of,
    token_of,
)
from envmgr.wire.hosts import HostSettings
from envmgr.wire.infos import InfoDecoder
from envmgr.wire.messages import AfterStep, EpisodePlan, FailureKind, Message, Op, ResetOrder
from envmgr.wire.rewards import restored
from envmgr.worker.host import Host
from envmgr.worker.measured import posted_steps

OBS = Box(-9, 9, (2,), np.float32)
PLAN = EpisodePlan(True, float("inf"), {})


class Env(BaseEnv):
    """Gives what it is told to, one timestep after the other; an exception is raised."""

    observation_space, action_space = OBS, Discrete(100)
    reward_space = Box(-1, 1, (1,), np.float64)

    def __init__(self) -> None:
        self.gives: list[Any] = []
        self.resets: list[Any] = []
        self.log: list[Any] = []
        self.reset_info: dict[str, Any] = {}

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None: ...

    def reset(self, **params: Any) -> Any:
        self.log.append("reset")
        self.params = params
        given = self.resets.pop(0) if self.resets else np.zeros(2, np.float32)
        if isinstance(given, BaseException):
            raise given
        return given

    def step(self, action: Any) -> Any:
        self.log.append(action)
        given = self.gives.pop(0) if self.gives else step()
        if callable(given):
            given()
            given = step()
        if isinstance(given, BaseException):
            raise given
        return given

    def close(self) -> None: ...


def step(obs: Any = None, reward: Any = 1.0, done: bool = False, info: Any = None) -> EnvTimestep:
    obs = np.ones(2, np.float32) if obs is None else obs
    return EnvTimestep(obs, reward, done, {} if info is None else info)


class Rig:
    """A host of several envs with a block in plain memory; the test is the parent."""

    def __init__(
        self,
        n: int = 1,
        *,
        timed: bool = False,
        plan: Any = PLAN,
        n_hosts: int = 1,
        measures: bool = False,
        events: int = 0,
        **settings: Any,
    ) -> None:
        layouts: list[Any] = [codec_of(OBS).layout] * n
        actions = codec_of(Env.action_space).layout
        assert actions is not None
        block_plan = BlockPlan(n, n_hosts, actions, measures=measures, events=events)
        placements, nbytes = plan_placements(layouts, places_for(True), block_plan.nbytes)
        self.memory = bytearray(nbytes)
        self.block = Block(self.memory, block_plan)
        self.block.sleeping[-1] = 1
        self.rings = 0
        self.posted = posted_steps(0, self._ring, timed=timed, measures=measures)
        self.envs: dict[int, Env] = {}
        self.sent: list[Message] = []
        self.host = Host(
            {i: lambda i=i: self._build(i) for i in range(n)},
            HostSettings(**settings),
            encode=lambda message: message,
            send=self.sent.append,
            memory=lambda nbytes: self.memory,
            posted=self.posted,
        )
        self.placements = [
            dataclasses.replace(p, block=block_plan) for p in placements if p is not None
        ]
        self.arena = arena_arrays(self.memory, self.placements[0])[0]
        self.request_id = 0
        for i in range(n):
            self.ask(i, Op.HELLO)
            self.ask(i, Op.ATTACH, self.placements[i])
            self.ask(i, Op.RESET, ResetOrder({}, None, None, plan))
        self.sent.clear()
        for env in self.envs.values():
            env.log.clear()

    def _build(self, env_id: int) -> Env:
        self.envs[env_id] = Env()
        return self.envs[env_id]

    def _ring(self) -> None:
        self.rings += 1

    def ask(self, env_id: int, op: Op, payload: Any = None, generation: int = 0) -> None:
        self.request_id += 1
        message = Message(op, env_id, generation, self.request_id, payload)
        self.host.handle(message)

    def post(
        self, *env_ids: int, action: int = 7, ring: int = RING_ONCE, generation: int = 0
    ) -> None:
        self.request_id += 1
        for i in env_ids:
            self.block.actions[0][i] = action
            self.block.requests[i] = token_of(generation, self.request_id)
        self.block.posted[0] = posting_of(self.request_id, ring)

    def order(self, *env_ids: int, also: tuple[int, ...] = (), generation: int = 0) -> int:
        """Order resets, and post steps together with them; return the token of the resets."""
        self.request_id += 1
        token = token_of(generation, self.request_id)
        self.block.orders[list(env_ids)] = token
        self.post(*also, ring=RING_ONCE | ORDERS, generation=generation)
        return token

    def run(self, *, asked: bool = False) -> list[tuple[int, Op]]:
        """Run what is due; return who was told what by message."""
        self.sent.clear()
        waiting = len(self.host.resets)
        self.posted.run(None)
        if asked:
            self.posted.ring()
        if waiting:
            self.host.run_resets(waiting)
        return [(message.env_id, Op(message.op)) for message in self.sent]

    def step(self, given: Any) -> list[Op]:
        self.envs[0].gives.append(given)
        self.post(0)
        return [op for _, op in self.run()]

    def has_replied(self, env_id: int = 0) -> bool:
        return bool(self.block.replies[env_id] == self.block.requests[env_id])

    def has_reset(self, env_id: int = 0) -> bool:
        return bool(self.block.resets[env_id] == self.block.requests[env_id])

    def reward(self) -> Any:
        kind = (int(self.block.flags[0]) & REWARD_BITS) >> REWARD_SHIFT
        return restored(kind, self.block.reward_numbers(kind, slice(0, 1)))[0]

    def info(self) -> Any:
        if not self.block.flags[0] & HAS_INFO:
            return {}
        return InfoDecoder().decode(self.block.infos[0].tobytes())

    def obs(self) -> Any:
        return self.arena[int(self.block.flags[0]) & PLACE_BITS, 0].tolist()


def test_an_ordinary_step_is_answered_in_the_block_alone() -> None:
    rig = Rig()
    assert rig.step(step(np.array([3, 4], np.float32), 0.5)) == []
    assert rig.has_replied()
    assert (rig.obs(), rig.reward(), rig.info()) == ([3, 4], 0.5, {})
    assert rig.envs[0].log == [7]
    assert rig.rings == 1
    assert not rig.posted.is_due


def test_a_step_is_taken_once() -> None:
    rig = Rig(2)
    rig.post(0)
    for _ in range(3):
        rig.run()
    rig.post(1)
    rig.run()
    assert (rig.envs[0].log, rig.envs[1].log) == ([7], [7])


@pytest.mark.parametrize(
    "reward",
    [0.5, -0.0, 3, -(1 << 52), np.float64(1.5), np.float32("inf"), np.int64(5), True],
    ids=repr,
)
def test_rewards_come_out_as_they_were(reward: Any) -> None:
    rig = Rig()
    assert rig.step(step(reward=reward)) == []
    assert type(rig.reward()) is type(reward)
    assert rig.reward() == reward


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 8])
def test_arrays_of_rewards_come_out_as_they_were(n: int, dtype: Any) -> None:
    reward = np.linspace(-0.1, 9.0, 2 * n, dtype=dtype)[::2]
    reward[-1] = np.nan if n == 2 else 0.1
    reward.flags.writeable = False
    rig = Rig()
    assert rig.step(step(reward=reward)) == []
    assert type(rig.reward()) is np.ndarray
    assert rig.reward().dtype == dtype
    np.testing.assert_array_equal(rig.reward(), reward)


@pytest.mark.parametrize("n", [1, 3])
def test_an_env_may_use_its_array_of_rewards_again_in_its_next_reset(n: int) -> None:
    rig = Rig(plan=PLAN._replace(inplace=True))
    reward = np.ones(n)

    class Reset:
        """An observation whose making zeroes the reward."""

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            reward[:] = 0.0
            return np.zeros(2, np.float32)

    rig.envs[0].resets.append(Reset())
    assert rig.step(step(reward=reward, done=True)) == []
    assert (reward.tolist(), rig.reward().tolist()) == ([0.0] * n, [1.0] * n)


@pytest.mark.parametrize(
    "reward",
    [
        *(1 << 53, -(1 << 60), np.int64(1 << 60), np.float16(1), {"a": 1.0}, [1.0]),
        *(np.array(1.0), np.ones(1, int), np.ones(1, ">f8"), np.ones((1, 1)), np.ones(0)),
        *(np.ones(9), np.ma.ones(1)),
    ],
    ids=repr,
)
def test_odd_rewards_go_by_message(reward: Any) -> None:
    rig = Rig()
    assert rig.step(step(reward=reward)) == [Op.STEPPED]
    assert not rig.has_replied()
    assert rig.sent[0].payload[1] is reward
    assert rig.sent[0][1:4] == (0, 0, rig.request_id)


def test_infos_in_the_block_and_beside_it() -> None:
    rig = Rig()
    assert rig.step(step(info={"a": 1, "b": np.float32(2)})) == []
    assert rig.info() == {"a": 1, "b": np.float32(2)}
    for odd in ({"a": [1]}, {1: 2}, {"a": "x" * 300}, [{"agent": 0}]):
        assert rig.step(step(info=odd)) == [Op.STEPPED]
        assert rig.sent[0].payload[3] == odd
    assert rig.step(step()) == []
    assert rig.info() == {}


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (ValueError("no"), FailureKind.RAISED),
        (KeyboardInterrupt(), FailureKind.EXITED),
        (SystemExit(3), FailureKind.EXITED),
        (step(np.zeros(3, np.float32)), FailureKind.PROTOCOL),
        (step(reward=None), FailureKind.PROTOCOL),
        (step(info={"abnormal": True}), FailureKind.ABNORMAL),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures_go_by_message(given: Any, kind: FailureKind) -> None:
    rig = Rig()
    assert rig.step(given) == [Op.FAILED]
    assert rig.sent[0].payload.kind is kind
    assert not rig.has_replied()
    assert rig.step(step()) == []
    assert rig.has_replied()


@pytest.mark.parametrize("given", [step(np.full(2, np.nan, np.float32)), step(reward=float("inf"))])
def test_what_is_not_finite_is_refused_if_it_should_be(given: Any) -> None:
    strict = Rig(rules=ObservationRules(refuse_non_finite=True), refuse_non_finite_rewards=True)
    assert strict.step(given) == [Op.FAILED]
    assert strict.sent[0].payload.kind is FailureKind.NON_FINITE
    assert Rig().step(given) == []


def test_casts_are_told_of_once() -> None:
    rig = Rig()
    assert rig.step(step(np.ones(2))) == [Op.NOTICE]
    assert rig.has_replied()
    assert rig.step(step(np.ones(2))) == []


def test_the_next_episode_begins_after_one_more_batch_at_most() -> None:
    rig = Rig(3)
    rig.envs[0].gives.append(step(done=True))
    rig.post(0, 1)
    rig.run()
    flags = int(rig.block.flags[0])
    assert flags & DONE
    assert flags >> AFTER_SHIFT & 3 == AfterStep.RESETS
    assert not rig.has_reset()
    assert rig.host.resets
    rig.envs[2].gives.append(step(done=True))
    rig.post(1, 2)
    rig.run()
    assert rig.has_reset()
    assert rig.envs[0].log == [7, "reset"]
    assert rig.block.reset_flags[0] & PLACE_BITS >= 2
    assert rig.envs[2].log == [7]
    rig.run()
    assert rig.envs[2].log == [7, "reset"]
    assert not rig.posted.is_due


def test_a_reset_that_fails_or_has_an_odd_info_goes_by_message() -> None:
    rig = Rig()
    rig.envs[0].resets.append(ValueError("no"))
    rig.step(step(done=True))
    assert rig.run() == [(0, Op.FAILED)]
    assert rig.sent[0].payload.during == "reset"
    assert not rig.has_reset()
    rig.envs[0].reset_info = {"odd": [1]}
    rig.step(step(done=True))
    assert rig.run() == [(0, Op.RESET_DONE)]
    assert not rig.has_reset()


def test_a_step_in_place_counts_when_the_next_episode_has_begun() -> None:
    rig = Rig(plan=PLAN._replace(inplace=True))
    seen: list[bool] = []
    rig.envs[0].reset = lambda **_: (seen.append(rig.has_replied()), np.zeros(2, np.float32))[1]  # type: ignore[method-assign]
    rig.step(step(done=True))
    assert seen == [False]
    assert rig.has_replied()
    assert rig.has_reset()


def test_a_new_env_does_not_do_what_was_posted_for_the_one_before() -> None:
    rig = Rig(2)
    rig.post(0, 1)
    rig.ask(0, Op.RENEW, generation=1)
    rig.ask(0, Op.ATTACH, rig.placements[0], generation=1)
    rig.run()
    assert rig.envs[0].log == []
    assert rig.envs[1].log == [7]
    rig.ask(0, Op.RESET, ResetOrder({}, None, None, PLAN), generation=1)
    rig.post(0, generation=1)
    rig.run()
    assert rig.envs[0].log == ["reset", 7]


def test_an_env_that_is_gone_takes_no_steps() -> None:
    rig = Rig(2)
    rig.envs[0].gives.append(step(done=True))
    rig.post(0)
    rig.run()
    rig.ask(0, Op.RELEASE)
    rig.post(0, 1)
    rig.run()
    assert rig.envs[0].log == [7]
    assert rig.envs[1].log == [7]


@pytest.mark.parametrize(
    ("ring", "asked", "rings"), [(RING_LAST, False, 0), (RING_ONCE, False, 1), (RING_LAST, True, 1)]
)
def test_when_a_host_rings(ring: int, asked: bool, rings: int) -> None:
    rig = Rig(2, n_hosts=2)
    rig.post(0, 1, ring=ring)
    rig.block.posted[1] = rig.block.posted[0]
    rig.run(asked=asked)
    assert rig.rings == rings


@pytest.mark.parametrize("n", [1, 2])
def test_the_last_host_of_a_batch_rings(n: int) -> None:
    rig = Rig(n, n_hosts=3)
    rig.post(*range(n), ring=RING_LAST)
    posting = rig.block.posted[0]
    rig.block.posted[1] = rig.block.finished[1] = posting
    rig.block.posted[2] = posting - 8  # something else was posted for this one
    assert rig.block.finished[0] != posting
    rig.run()
    assert rig.block.finished[0] == posting
    assert rig.rings == 1


def test_nobody_rings_for_a_parent_that_is_awake() -> None:
    rig = Rig()
    rig.block.sleeping[-1] = 0
    rig.post(0)
    rig.run()
    assert rig.rings == 0


@pytest.mark.parametrize("ring", [RING_EACH, RING_EACH | RING_ONCE])
def test_a_host_rings_for_each_env_in_good_time(monkeypatch: pytest.MonkeyPatch, ring: int) -> None:
    moments = iter(range(1000))
    monkeypatch.setattr("envmgr.worker.posted.monotonic", lambda: float(next(moments)))
    rig = Rig(3)
    heard: list[int] = []
    note: Callable[[], None] = lambda: heard.append(rig.rings)  # noqa: E731
    for env in rig.envs.values():
        env.gives.append(note)
    rig.post(0, 1, 2, ring=ring)
    rig.run()
    assert heard == [0, 1, 2]  # before the next one is stepped
    assert rig.rings >= 3


@pytest.mark.parametrize("n", [1, 2])
def test_it_says_whom_it_runs(n: int) -> None:
    rig = Rig(n, timed=True)
    seen: list[int] = []
    for env in rig.envs.values():
        env.gives.append(lambda: seen.append(int(rig.block.running[0])))
    rig.post(*range(n))
    rig.run()
    assert seen == [1, 2][:n]
    assert rig.block.running[0] == 0
    assert rig.block.since[0] > 0


def test_after_a_batch_it_runs_none_also_where_nobody_looks_at_the_time() -> None:
    rig = Rig(2)
    rig.post(0, 1)
    rig.run()
    assert rig.block.running[0] == 0


def test_an_env_that_changes_places_takes_no_step_that_is_for_the_one_in_its_place() -> None:
    rig = Rig()
    rig.step(step())
    rig.sent.clear()
    rig.host.handle(Message(Op.ADOPT, 5, 0, 0, None))  # it is a spare now
    rig.ask(5, Op.RESET, ResetOrder({}, None, None, PLAN, keeps=True))
    assert [(m.op, m.env_id) for m in rig.sent] == [(Op.RESET_DONE, 5)]
    rig.post(0)
    assert not rig.posted.is_due
    assert rig.run() == []
    assert not rig.has_replied()

    rig.ask(0, Op.ADOPT, rig.placements[0])
    rig.run()
    assert not rig.has_replied()  # that step was for the one before
    rig.post(0)
    rig.run()
    assert rig.has_replied()
    assert rig.envs[0].log == [7, "reset", 7]


# -- resets that are ordered through the block ----------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_an_ordered_reset_is_answered_with_its_own_token(n: int) -> None:
    rig = Rig(n, plan=PLAN._replace(auto_reset=False, params={"level": 2}))
    rig.envs[0].resets.append(np.array([5, 6], np.float32))
    token = rig.order(0)
    assert rig.run() == []
    assert rig.run() == []
    assert rig.block.resets[0] == token
    assert rig.arena[int(rig.block.reset_flags[0]) & PLACE_BITS, 0].tolist() == [5, 6]
    assert rig.envs[0].log == ["reset"]
    assert rig.envs[0].params == {"level": 2}, "those of the present plan"
    assert rig.rings == 2, "once for what was posted, once for the reset"
    rig.run()
    assert rig.envs[0].log == ["reset"], "an order is carried out once"


def test_the_steps_of_a_batch_come_before_the_resets_ordered_with_it() -> None:
    rig = Rig(3)
    order: list[str] = []
    for env in rig.envs.values():
        env.gives.append(lambda: order.append("step"))
    rig.envs[1].reset = lambda **_: (order.append("reset"), np.zeros(2, np.float32))[1]  # type: ignore[method-assign]
    rig.order(1, also=(0, 2))
    rig.run()
    rig.run()
    assert order == ["step", "step", "reset"]


def test_orders_are_not_looked_at_unless_it_says_so() -> None:
    rig = Rig(2)
    rig.block.orders[:] = token_of(0, 99)
    rig.post(0)
    rig.run()
    rig.run()
    assert [env.log for env in rig.envs.values()] == [[7], []]


def test_an_ordered_reset_that_fails_or_has_an_odd_info_is_answered_by_message() -> None:
    rig = Rig()
    rig.envs[0].resets.append(ValueError("no"))
    generation, request_id = request_of(rig.order(0))
    rig.run()
    assert rig.run() == [(0, Op.FAILED)]
    assert rig.sent[0][1:4] == (0, generation, request_id)
    assert rig.sent[0].payload.during == "reset"
    rig.envs[0].reset_info = {"odd": [1]}
    rig.order(0)
    rig.run()
    assert rig.run() == [(0, Op.RESET_DONE)]


def test_an_order_for_the_env_before_is_not_for_the_one_that_takes_its_place() -> None:
    rig = Rig(2)
    rig.order(0)
    rig.ask(0, Op.RENEW, generation=1)
    rig.ask(0, Op.ATTACH, rig.placements[0], generation=1)
    rig.run()
    rig.run()
    assert rig.envs[0].log == []
    token = rig.order(0, generation=1)
    rig.run()
    rig.run()
    assert rig.block.resets[0] == token


def test_an_ordered_reset_begins_an_episode_of_the_same_budget() -> None:
    """As with a new plan: only episodes that have ended count."""
    rig = Rig(plan=PLAN._replace(episodes_left=2))
    after = []
    for _ in range(3):
        rig.order(0)
        rig.run()
        rig.run()
        rig.step(step(done=True))
        after.append(int(rig.block.flags[0]) >> AFTER_SHIFT & 3)
        rig.run()
    assert after == [AfterStep.RESETS, AfterStep.RESETS, AfterStep.NOTHING]


def test_an_ordered_reset_says_whom_it_runs() -> None:
    rig = Rig(2, timed=True)
    seen: list[int] = []
    rig.envs[1].reset = lambda **_: (  # type: ignore[method-assign]
        seen.append(int(rig.block.running[0])),
        np.zeros(2, np.float32),
    )[1]
    rig.order(1)
    rig.run()
    rig.run()
    assert (seen, int(rig.block.running[0])) == ([2], 0)
