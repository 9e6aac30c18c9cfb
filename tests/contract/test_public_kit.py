"""The public suites pass with our own kinds and envs, and fail with wrong ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr import BaseEnvManager, create_env_manager
from envmgr.testing import LedgerEnv, LedgerError
from envmgr.testing.checkup import probes
from envmgr.testing.contract import (
    EnvContract,
    ManagerContract,
    WorkerManagerContract,
    refused,
    require,
)
from envmgr.testing.env_problems import EnvCheckError, Problem, check_env, env_problems, misfit

# -- our own --------------------------------------------------------------------------------------


class TestCartPole(EnvContract):
    def make_env(self) -> Any:
        return gymnasium.make("CartPole-v1")


class TestLedgerEnv(EnvContract):
    """Its instances differ, and so do its trajectories."""

    def make_env(self) -> Any:
        return LedgerEnv(0)

    def test_the_same_seed_gives_the_same_trajectory(self) -> None:
        with pytest.raises(AssertionError, match="differ from observation 0 on"):
            super().test_the_same_seed_gives_the_same_trajectory()


class TestBase(ManagerContract):
    def make_manager(self, env_fn: Sequence[Callable[[], Any]], **cfg: Any) -> Any:
        return create_env_manager({"type": "base", **cfg}, env_fn=env_fn)


class TestThreads(ManagerContract):
    def make_manager(self, env_fn: Sequence[Callable[[], Any]], **cfg: Any) -> Any:
        return create_env_manager({"type": "thread", "num_workers": 1, **cfg}, env_fn=env_fn)


class TestSubprocess(WorkerManagerContract):
    def make_manager(self, env_fn: Sequence[Callable[[], Any]], **cfg: Any) -> Any:
        return create_env_manager({"type": "subprocess", "context": "fork", **cfg}, env_fn=env_fn)


class TestAsyncSubprocess(WorkerManagerContract):
    gathers_all = False

    def make_manager(self, env_fn: Sequence[Callable[[], Any]], **cfg: Any) -> Any:
        return create_env_manager(
            {"type": "async_subprocess", "context": "fork", **cfg}, env_fn=env_fn
        )


@pytest.mark.v2
class TestTrees(ManagerContract):
    shows_arrays = False

    def make_manager(self, env_fn: Sequence[Callable[[], Any]], **cfg: Any) -> Any:
        return create_env_manager({"type": "base_v2", **cfg}, env_fn=env_fn)


# -- wrong managers -------------------------------------------------------------------------------


class Swapping(BaseEnvManager):
    """Gives the timesteps of two envs to each other."""

    def step(self, actions: Any) -> Any:
        steps = super().step(actions)
        return dict(zip(steps, reversed([*steps.values()]), strict=True))


class Joining(BaseEnvManager):
    """Puts rewards beside the observations of other envs."""

    def step(self, actions: Any) -> Any:
        steps = super().step(actions)
        rewards = [step.reward for step in steps.values()][::-1]
        pairs = zip(steps.items(), rewards, strict=True)
        return {i: step._replace(reward=reward) for (i, step), reward in pairs}


class Repeating(BaseEnvManager):
    """Delivers a timestep twice."""

    def step(self, actions: Any) -> Any:
        last, self._last = self.__dict__.get("_last", {}), super().step(actions)
        return {**self._last, **{i: last[i] for i in [*last][:1] if i in self._last}}


class Executing(BaseEnvManager):
    """Steps twice for one action."""

    def step(self, actions: Any) -> Any:
        steps = super().step(actions)
        if len(steps) > 1 and not any(step.done for step in steps.values()):
            super().step({0: 0})
        return steps


class Sorting(BaseEnvManager):
    """Returns timesteps in an order of its own."""

    def step(self, actions: Any) -> Any:
        return dict(sorted(super().step(actions).items()))


class Tolerant(BaseEnvManager):
    """Sends what is right of a wrong call."""

    def send(self, actions: Any) -> None:
        for env_id, action in actions.items():
            super().send({env_id: action})


class Sharing(BaseEnvManager):
    """Hands out one array of each env again and again."""

    def step(self, actions: Any) -> Any:
        steps = super().step(actions)
        arrays = self.__dict__.setdefault("_arrays", {})
        for i, step in steps.items():
            arrays.setdefault(i, step.obs)[...] = step.obs
        return {i: step._replace(obs=arrays[i]) for i, step in steps.items()}


class Losing(BaseEnvManager):
    """Resets quietly what failed, without any timestep that says so."""

    def step(self, actions: Any) -> Any:
        steps = super().step(actions)
        return {
            i: step._replace(info={**step.info, "abnormal": False}) for i, step in steps.items()
        }


class Endless(BaseEnvManager):
    """Is not closed after `close`."""

    @property
    def closed(self) -> bool:
        return False


WRONG = [
    (Swapping, "test_every_action_gives_exactly_one_timestep", "was given a timestep of env"),
    (Joining, "test_every_action_gives_exactly_one_timestep", "reward of another step"),
    (Repeating, "test_every_action_gives_exactly_one_timestep", "repeated"),
    (Executing, "test_every_action_gives_exactly_one_timestep", "lost"),
    (Sorting, "test_timesteps_come_in_order", "returned"),
    (Tolerant, "test_bad_calls_are_refused_before_anything_is_sent", "should be raised"),
    (Sharing, "test_observations_stay_as_they_are_and_belong_to_their_reader", "changed"),
    (Losing, "test_an_env_that_raises_gives_an_abnormal_timestep_and_goes_on", "do not balance"),
    (Endless, "test_close_ends_everything_and_may_be_repeated", "closed is false"),
]


@pytest.mark.parametrize(("kind", "test", "message"), WRONG, ids=lambda one: str(one)[:60])
def test_wrong_managers_are_caught(kind: type[BaseEnvManager], test: str, message: str) -> None:
    class Suite(ManagerContract):
        def make_manager(self, env_fn: Sequence[Callable[[], Any]], **cfg: Any) -> Any:
            return kind(env_fn, {"type": "base", **cfg})

    with pytest.raises((AssertionError, LedgerError), match=message):
        getattr(Suite(), test)()


# -- wrong envs -----------------------------------------------------------------------------------


class Wrong(gymnasium.Env[Any, Any]):
    """An env with one thing wrong."""

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, what: str) -> None:
        self.what = what
        if what == "no space":
            self.observation_space = None  # type: ignore[assignment]
        if what == "construction":
            raise ValueError("no licence")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=None if self.what == "unseeded" else seed)
        obs = self.np_random.random(2)
        return obs if self.what == "no reset info" else (obs, {})

    def step(self, action: Any) -> Any:
        obs = np.zeros(3) if self.what == "shape" else self.np_random.random(2)
        reward = "much" if self.what == "reward" else 1.0
        info = {"abnormal": True} if self.what == "abnormal" else {}
        return (
            (obs, reward, False, info) if self.what == "four" else (obs, reward, False, False, info)
        )

    def close(self) -> None:
        if self.what == "close":
            raise ValueError("no door")


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("no space", "spaces"),
        ("construction", "factory"),
        ("no reset info", "reset"),
        ("shape", "observation"),
        ("reward", "step"),
        ("four", "step"),
        ("abnormal", "step"),
        ("unseeded", "seed"),
        ("close", "close"),
    ],
)
def test_wrong_envs_are_caught(what: str, kind: str) -> None:
    class Suite(EnvContract):
        def make_env(self) -> Any:
            return Wrong(what)

    problems = env_problems(lambda: Wrong(what))
    assert kind in [problem.kind for problem in problems]
    failed = 0
    for name in dir(Suite):
        if name.startswith("test_"):
            try:
                getattr(Suite(), name)()
            except AssertionError:
                failed += 1
    assert failed >= 1
    assert env_problems(lambda: Wrong("nothing")) == []


def test_envmgr_check_compares_runs_in_one_place_only() -> None:
    assert probes.contract(lambda: Wrong("unseeded"), 50, 0) == []
    one, other = (probes.trajectory(lambda: Wrong("unseeded"), 50, 0, 50) for _ in range(2))
    assert one.first != other.first
    one, other = (probes.trajectory(lambda: Wrong("nothing"), 50, 0, 50) for _ in range(2))
    assert one.first == one.again == other.first


def test_a_factory_that_cannot_be_sent_is_caught() -> None:
    lock = threading.Lock()

    def factory() -> Any:
        with lock:
            return Wrong("nothing")

    with pytest.raises(EnvCheckError, match="cannot be sent to a worker process") as caught:
        check_env(factory)
    assert [problem.kind for problem in caught.value.problems] == ["factory"]
    assert isinstance(caught.value.problems[0], Problem)
    check_env(lambda: Wrong("nothing"))


def test_suites_that_define_nothing_say_what_to_define() -> None:
    with pytest.raises(TypeError, match="should define make_env"):
        EnvContract().make_env()
    with pytest.raises(TypeError, match="should define make_manager"):
        ManagerContract().make_manager([])
    with pytest.raises(AssertionError, match="and nothing was"), refused(ValueError):
        pass
    with pytest.raises(AssertionError, match="not KeyError"), refused(ValueError):
        raise KeyError
    require(True, "")


def test_misfits() -> None:
    space = gymnasium.spaces.Dict({"a": Discrete(3), "t": gymnasium.spaces.Tuple((Box(0, 1),))})
    assert misfit(space, {"a": 1, "t": ([0.5],)}) == ""
    assert "should be a dict of ['a', 't'], found a dict of ['a']" in misfit(space, {"a": 1})
    assert "should be a dict of ['a', 't'], found int" in misfit(space, 3)
    assert "value['t'] should be 1 items, found int" in misfit(space, {"a": 1, "t": 5})
    assert "the cast would lose information" in misfit(space, {"a": 1.5, "t": ([0.5],)})
    assert "'b' is not in Text" in misfit(gymnasium.spaces.Text(1, charset="a"), "b")
    assert misfit(gymnasium.spaces.Text(1, charset="a"), "a") == ""
