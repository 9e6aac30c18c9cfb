"""The ledger finds every way in which a manager could lose, repeat or mix up timesteps."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, Text, Tuple

from envmgr import BaseEnv, EnvTimestep
from envmgr.env import adapt
from envmgr.env.async_env import as_blocking
from envmgr.env.steps import step_env
from envmgr.errors import EnvCrash
from envmgr.testing import (
    ANY_ENV,
    Ledger,
    Ledgered,
    LedgerEnv,
    LedgerError,
    LedgerWrapper,
    ledgered,
    mark_of,
    without_instance,
)
from envmgr.testing.checksums import UNKNOWN, checksum_of, reward_checksum
from envmgr.testing.ledger_env import reward_of

N = 2


class Loop:
    """Two envs in this thread and their ledger; stands for a manager that does all right."""

    def __init__(self, make: Callable[[int], Any] = LedgerEnv) -> None:
        self.make = make
        self.envs = [adapt.as_base_env(make(i), i) for i in range(N)]
        space = self.envs[0].observation_space
        self.ledger = Ledger(N, space, self.envs[0].action_space)
        self.obs: dict[int, Any] = {}
        for i in range(N):
            self.reset(i)

    def reset(self, env_id: int) -> None:
        self.obs[env_id], info = adapt.reset_env(self.envs[env_id], None)
        self.ledger.observed({env_id: self.obs[env_id]}, {env_id: info})

    def renew(self, env_id: int) -> None:
        self.envs[env_id] = adapt.as_base_env(self.make(env_id), env_id)

    def take(self, *env_ids: int) -> dict[int, EnvTimestep]:
        """Have actions accepted and executed; return the timesteps without delivering them."""
        actions = self.ledger.fresh_actions(env_ids)
        self.ledger.accepted(actions)
        return {i: step_env(self.envs[i], action) for i, action in actions.items()}

    def step(self, *env_ids: int) -> dict[int, EnvTimestep]:
        timesteps = self.take(*env_ids)
        self.deliver(timesteps)
        return timesteps

    def deliver(self, timesteps: dict[int, EnvTimestep]) -> None:
        self.ledger.delivered(timesteps)
        self.obs.update({i: step.obs for i, step in timesteps.items()})
        for i, step in timesteps.items():
            if step.done:
                self.reset(i)

    def found(self) -> tuple[int, int, int]:
        report = self.ledger.report()
        total = report.normal + report.abnormal + report.cancelled + report.outstanding
        assert report.accepted == total + report.unanswered
        assert report.is_clean == (not report.findings)
        return report.lost, report.repeated, report.swapped


def abnormal(obs: Any) -> EnvTimestep:
    error = EnvCrash("it died", env_id=0, during="step")
    return EnvTimestep(obs, 0.0, True, {"abnormal": True, "error": error})


def test_what_is_right_is_clean() -> None:
    loop = Loop(lambda i: LedgerEnv(i, episode_length=3))
    for _ in range(10):
        loop.step(0, 1)
        loop.step(1)
        loop.ledger.observed(loop.obs)
    loop.ledger.end()
    report = loop.ledger.check()
    assert (report.accepted, report.normal, report.abnormal) == (30, 30, 0)


def test_an_action_that_is_never_answered_is_lost() -> None:
    loop = Loop()
    loop.take(0)
    loop.step(1)
    assert loop.ledger.pending == [0]
    loop.ledger.end()
    assert loop.found() == (1, 0, 0)
    with pytest.raises(LedgerError, match="the action of env 0 was never answered"):
        loop.ledger.check()


def test_what_close_gave_up_is_cancelled() -> None:
    loop = Loop()
    loop.take(0, 1)
    loop.ledger.end(n_cancelled=2)
    assert loop.found() == (0, 0, 0)
    assert loop.ledger.report().cancelled == 2


def test_a_second_action_before_the_timestep_loses_the_first() -> None:
    loop = Loop()
    loop.take(0)
    loop.ledger.accepted({0: 5})
    assert loop.found()[0] == 1


def test_a_step_that_nobody_was_given_is_lost() -> None:
    loop = Loop()
    loop.step(0)
    step_env(loop.envs[0], 77)
    loop.step(0)
    assert loop.found() == (1, 0, 0)


def test_a_timestep_without_action_is_repeated() -> None:
    loop = Loop()
    timesteps = loop.step(0)
    loop.ledger.delivered(timesteps)
    assert loop.found() == (0, 1, 0)


def test_an_earlier_timestep_for_a_later_action_is_repeated() -> None:
    loop = Loop()
    timesteps = loop.step(0)
    loop.take(0)
    loop.ledger.delivered(timesteps)
    assert loop.found() == (0, 1, 0)


@pytest.mark.parametrize("n_before", [0, 1])
def test_a_late_timestep_of_an_object_that_was_replaced_is_noticed(n_before: int) -> None:
    loop = Loop()
    for _ in range(n_before):
        loop.step(0)
    late = loop.take(0)
    loop.ledger.delivered({0: abnormal(loop.obs[0])})
    loop.renew(0)
    loop.reset(0)
    loop.step(0)
    loop.take(0)
    loop.ledger.delivered(late)
    # An object that had delivered nothing is not known; but an action and a place of its own are.
    assert loop.found()[1:] == ((0, 1) if n_before == 0 else (1, 0))


def test_timesteps_of_other_envs_are_swapped() -> None:
    loop = Loop()
    timesteps = loop.take(0, 1)
    loop.ledger.delivered({0: timesteps[1], 1: timesteps[0]})
    assert loop.found() == (0, 0, 2)


@pytest.mark.parametrize("part", ["obs", "reward"])
def test_parts_of_another_env_are_swapped(part: str) -> None:
    loop = Loop()
    timesteps = loop.take(0, 1)
    foreign = {part: getattr(timesteps[1], part)}
    loop.ledger.delivered({**timesteps, 0: timesteps[0]._replace(**foreign)})
    assert loop.found() == (0, 0, 1)
    assert part in loop.ledger.report().findings[0]


def test_the_answer_to_another_action_is_swapped() -> None:
    loop = Loop()
    loop.ledger.accepted({0: 5})
    loop.ledger.delivered({0: step_env(loop.envs[0], 6)})
    assert loop.found() == (0, 0, 1)
    assert "action" in loop.ledger.report().findings[0]


def test_a_timestep_without_mark_is_swapped() -> None:
    loop = Loop()
    timesteps = loop.take(0)
    loop.ledger.delivered({0: timesteps[0]._replace(info={})})
    assert loop.found() == (0, 0, 1)


def test_a_reset_that_nobody_saw_is_swapped() -> None:
    loop = Loop()
    loop.step(0)
    adapt.reset_env(loop.envs[0], None)
    loop.step(0)
    assert loop.found() == (0, 0, 1)


def test_another_object_in_the_midst_of_an_episode_is_swapped() -> None:
    loop = Loop()
    loop.step(0)
    loop.renew(0)
    adapt.reset_env(loop.envs[0], None)
    loop.step(0)
    assert loop.found() == (0, 0, 1)


def test_a_foreign_observation_in_ready_obs_is_swapped() -> None:
    loop = Loop()
    loop.step(0, 1)
    loop.ledger.observed({0: loop.obs[1]})
    assert loop.found() == (0, 0, 1)


def test_a_foreign_first_observation_is_swapped() -> None:
    loop = Loop()
    loop.ledger.reset([0])
    assert loop.ledger.begins_episode(0)
    obs, info = adapt.reset_env(loop.envs[1], None)
    loop.ledger.observed({0: obs}, {0: info})
    assert loop.found() == (0, 0, 1)


def test_abnormal_timesteps_excuse_what_was_executed_and_hold_the_last_observation() -> None:
    loop = Loop()
    loop.step(0)
    loop.take(0)  # executed, and then the host died
    loop.deliver({0: abnormal(loop.obs[0])})
    loop.step(0)
    assert loop.found() == (0, 0, 0)
    assert loop.ledger.report().failures == {"EnvCrash": 1}
    loop.step(0, 1)
    loop.take(0)
    loop.deliver({0: abnormal(loop.obs[1])})
    assert loop.found() == (0, 0, 1)


def test_reset_gives_up_what_is_under_way() -> None:
    loop = Loop()
    loop.take(0)
    loop.ledger.reset([0, 1])
    loop.reset(0)
    loop.reset(1)
    loop.step(0, 1)
    assert loop.found() == (0, 0, 0)
    assert loop.ledger.report().cancelled == 1


def test_the_same_seed_and_actions_give_the_same_but_for_the_instance() -> None:
    def run() -> list[bytes]:
        env = LedgerEnv(1)
        first, _ = env.reset(seed=3)
        obs, reward, *_ = env.step(5)
        assert reward == reward_of(obs)
        return [without_instance(part).tobytes() for part in (first, obs)]

    assert run() == run()
    assert LedgerEnv(1).signer.instance != LedgerEnv(1).signer.instance


class Plain(BaseEnv):
    observation_space = Dict({"x": Box(-1, 1, (2,), np.float32), "n": Discrete(5)})
    action_space = Discrete(2**31)

    def __init__(self, many: bool = False) -> None:
        self._many = many
        self._count = 0

    def reset(self, **params: Any) -> Any:
        return {"x": np.zeros(2), "n": 0}

    def step(self, action: Any) -> EnvTimestep:
        self._count += 1
        info = {"count": self._count}
        many = [info, {"agent": 1}] if self._many else info
        obs = {"x": np.full(2, self._count / 100), "n": self._count % 5}
        return EnvTimestep(obs, np.float32(0.1), self._count % 3 == 0, many)

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        pass

    def close(self) -> None:
        pass


class PlainGym(gymnasium.Env[Any, Any]):
    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(2**31)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2), {}

    def step(self, action: Any) -> Any:
        return np.full(2, 0.1), 1, False, False, {"own": True}


@pytest.mark.parametrize(
    "make",
    [lambda i: Plain(), lambda i: Plain(many=True), lambda i: PlainGym()],
    ids=["base", "base, infos in a list", "gymnasium"],
)
def test_envs_of_any_style_can_be_made_to_sign(make: Callable[[int], Any]) -> None:
    loop = Loop(lambda i: ledgered(make(i), i))
    for _ in range(7):
        timesteps = loop.step(0, 1)
    assert loop.found() == (0, 0, 0)
    mark = mark_of(timesteps[1].info)
    assert mark is not None
    assert (mark.env_id, mark.sequence) == (1, 7)
    timesteps = loop.take(0, 1)
    loop.ledger.delivered({0: timesteps[1], 1: timesteps[0]})
    assert loop.found()[2] == 2


class AsyncPlainGym(PlainGym):
    """An env whose reset and step are coroutines."""

    async def reset(self, **arguments: Any) -> Any:  # type: ignore[override]
        return super().reset(**arguments)

    async def step(self, action: Any) -> Any:
        return super().step(action)


async def built_later() -> Any:
    return AsyncPlainGym()


@pytest.mark.parametrize("make", [AsyncPlainGym, built_later])
def test_async_envs_can_be_made_to_sign(make: Any) -> None:
    env = as_blocking(pickle.loads(pickle.dumps(Ledgered(make, 2)))())
    env.reset()
    mark = mark_of(env.step(1).info)
    assert mark is not None
    assert (mark.env_id, mark.step) == (2, 1)
    env.close()


def test_signing_leaves_observations_and_own_infos_alone() -> None:
    env = LedgerWrapper(PlainGym(), 3)
    _, info = env.reset()
    assert mark_of(info) is not None
    obs, reward, _, _, info = env.step(1)
    assert obs.tolist() == [0.1, 0.1]
    assert reward == 1
    assert info["own"]
    broken = PlainGym()
    broken.step = lambda action: "nonsense"  # type: ignore[method-assign]
    assert LedgerWrapper(broken, 3).step(1) == "nonsense"
    for odd in (None, np.zeros(2), (np.zeros(2), None)):
        broken.reset = lambda odd=odd, **params: odd  # type: ignore[method-assign, misc]
        assert LedgerWrapper(broken, 3).reset() is odd
    assert isinstance(pickle.loads(pickle.dumps(Ledgered(PlainGym, 2)))(), LedgerWrapper)


@pytest.mark.parametrize(
    ("space", "value", "same", "other"),
    [
        (Box(-1, 1, (2,), np.float32), np.array([0.1, 0.2]), [0.1, 0.2], [0.1, 0.3]),
        (Discrete(5), 3, np.array([3]), 4),
        (MultiBinary(2), [1, 0], np.array([1, 0], np.int8), [0, 1]),
        (Tuple((Discrete(3), Text(5))), (1, "a"), [1, "a"], (1, "b")),
        (Dict({"a": Discrete(3)}), {"a": 1}, {"a": np.int64(1)}, {"a": 2}),
    ],
)
def test_checksums_depend_on_values_as_their_space_holds_them(
    space: Any, value: Any, same: Any, other: Any
) -> None:
    of = checksum_of(space)
    assert of(value) == of(same) != UNKNOWN
    assert of(other) not in (UNKNOWN, of(value))


def test_what_has_no_checksum() -> None:
    graph = Graph(Discrete(2), None)
    assert checksum_of(graph)(graph.sample()) == UNKNOWN
    assert checksum_of(Box(-1, 1, (2,)))(None) != checksum_of(Box(-1, 1, (2,)))([0, 0])
    assert checksum_of(Discrete(3))("x") == UNKNOWN
    assert checksum_of(Box(0, 255, (2,), np.uint8))(1 << 70) == UNKNOWN
    assert checksum_of(Dict({"a": Discrete(3)}))(None) == UNKNOWN
    assert reward_checksum("x") == UNKNOWN
    assert reward_checksum(np.float32(0.5)) == reward_checksum(0.5) == reward_checksum([0.5])


class Moving(Loop):
    """Envs that serve whoever needs one: each end of an episode brings the next of a queue."""

    def __init__(self, n_spares: int = 1) -> None:
        super().__init__(lambda i: LedgerEnv(ANY_ENV, episode_length=3))
        self.spares = [adapt.as_base_env(self.make(0), 0) for _ in range(n_spares)]

    def reset(self, env_id: int) -> None:
        if hasattr(self, "spares"):
            self.spares.append(self.envs[env_id])
            self.envs[env_id] = self.spares.pop(0)
        super().reset(env_id)


def test_envs_that_take_turns_are_clean() -> None:
    loop = Moving()
    for _ in range(20):
        loop.step(0, 1)
        loop.step(1)
        loop.ledger.observed(loop.obs)
    loop.ledger.end()
    assert loop.ledger.check().normal == 60


def test_an_env_that_moves_in_the_midst_of_an_episode_is_swapped() -> None:
    loop = Moving()
    loop.step(0, 1)
    loop.envs.reverse()
    loop.step(0)
    assert loop.found() == (0, 0, 1)


def test_an_episode_that_goes_on_under_another_id_is_swapped() -> None:
    loop = Moving()
    loop.step(0)
    loop.envs[1] = loop.envs[0]  # it has taken one step of its episode
    loop.step(1)
    assert loop.found() == (0, 0, 1)


def test_a_timestep_of_an_env_that_moves_is_delivered_once() -> None:
    loop = Moving()
    for _ in range(3):
        timesteps = loop.step(0)
    loop.ledger.accepted(loop.ledger.fresh_actions([1]))
    loop.ledger.delivered({1: timesteps[0]})
    assert loop.found() == (0, 1, 0)


def test_a_step_of_an_env_that_moves_is_lost_unless_something_answers_for_it() -> None:
    loop = Moving()
    loop.take(0)
    loop.ledger.delivered({0: abnormal(loop.obs[0])})
    loop.reset(0)
    for _ in range(6):  # each of the three serves env 1 once
        loop.step(1)
    assert loop.found() == (0, 0, 0)
    loop.envs[1].step(0)  # for nobody
    loop.envs[1].reset()
    loop.step(1)
    assert loop.found()[0] == 1
