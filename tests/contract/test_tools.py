"""`as_trl` without TRL: what its trainers would do with what it gives."""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import threading
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

from envmgr import make
from envmgr.adapters.trl import as_trl, tool_env
from envmgr.errors import ConfigError, EnvCrash, EnvNotReadyError, EnvTimeout, LeaseTimeoutError
from tests.tool_envs import Counter, Silent

TOOLS = [Counter.increment, Counter.decrement]
LIMITS: dict[str, Any] = {"step_timeout": 3.0, "reset_timeout": 3.0, "max_failures": 1000}


def manager_of(env_class: Any = Counter, env_num: int = 1, **keys: Any) -> Any:
    return make(
        tool_env(env_class), env_num=env_num, **{**LIMITS, "max_failures_total": 1000, **keys}
    )


@pytest.fixture
def manager() -> Iterator[Any]:
    with manager_of() as manager:
        yield manager


def test_a_rollout_calls_its_tools_in_a_worker_and_ends_with_its_reward(manager: Any) -> None:
    env = as_trl(manager, TOOLS)()
    assert env.reset(goal=4, prompt=[{"role": "user", "content": "Go."}]) is None
    assert (env.increment(step=3), env.decrement(step=1), env.increment(2)) == (3, 2, 4)
    assert env.outcome is None
    assert env.get_reward() == 1.0
    assert env.outcome.is_completed
    assert env.get_reward() == 1.0  # told again, not asked again


def test_what_a_reset_returns_is_for_the_prompt(manager: Any) -> None:
    assert as_trl(manager, TOOLS)().reset(goal=2, tell=True) == " Count to 2."


def test_nothing_but_tools_reset_and_reward_is_public(manager: Any) -> None:
    env = as_trl(manager, TOOLS)()
    public = [n for n, _ in inspect.getmembers(type(env), inspect.isfunction) if n[0] != "_"]
    assert public == ["decrement", "get_reward", "increment", "reset"]
    assert [n for n, _ in inspect.getmembers(env, inspect.ismethod) if n[0] != "_"] == public
    assert type(env).__name__ == "Counter"


def test_a_tool_looks_as_the_method_does(manager: Any) -> None:
    tool = as_trl(manager, TOOLS)().increment
    assert str(inspect.signature(tool)) == "(step: 'int') -> 'int'"
    assert get_type_hints(tool) == {"step": int, "return": int}
    assert inspect.getdoc(tool) == inspect.getdoc(Counter.increment)
    assert not inspect.iscoroutinefunction(as_trl(manager, TOOLS)().decrement)


class Static:
    """Has tools without `self`."""

    def reset(self, **row: Any) -> None:
        """Begin."""

    @staticmethod
    def repeat(word: str, n: int = 1) -> str:
        """Repeat a word."""
        return word * n

    @staticmethod
    def ping() -> str:
        """Answer."""
        return "pong"


def test_a_tool_may_be_static() -> None:
    with manager_of(Static, type="base") as manager:
        env = as_trl(manager, [Static.repeat, Static.ping])()
        env.reset()
        for tool in (env.repeat, env.ping):
            assert inspect.signature(tool) == inspect.signature(getattr(Static, tool.__name__))
        assert (env.repeat(word="a", n=2), env.repeat("b"), env.ping()) == ("aa", "b", "pong")


def test_what_a_tool_raises_is_for_the_model_and_no_failure(manager: Any) -> None:
    env = as_trl(manager, TOOLS)()
    env.reset(goal=1)
    with pytest.raises(ValueError, match="up, not down"):
        env.increment(step=-1)
    assert env.increment(step=1) == 1
    assert env.get_reward() == 1.0


@pytest.mark.parametrize(("step", "error"), [(666, EnvCrash), (777, EnvTimeout)])
def test_a_rollout_whose_env_dies_or_hangs_has_no_reward(
    manager: Any, step: int, error: type[Exception]
) -> None:
    env = as_trl(manager, TOOLS)()
    env.reset(goal=1)
    env.increment(step=1)
    with pytest.raises(error):
        env.increment(step=step)
    with pytest.raises(EnvNotReadyError, match="next reset"):
        env.increment(step=1)
    assert env.get_reward() is None
    assert not env.outcome.is_completed
    assert isinstance(env.outcome.cause, error)
    env.reset(goal=2)
    env.increment(step=2)
    assert env.get_reward() == 1.0


@pytest.mark.parametrize("trouble", ["hang", "raise"])
def test_a_reset_that_fails_stops_nobody_and_gives_no_reward(manager: Any, trouble: str) -> None:
    env = as_trl(manager, TOOLS)()
    assert env.reset(goal=1, trouble=trouble) is None
    assert not env.outcome.is_completed
    assert env.get_reward() is None
    env.reset(goal=1)
    assert env.get_reward() == 0.0


def test_a_reward_that_cannot_be_told_is_none(manager: Any) -> None:
    env = as_trl(manager, TOOLS)()
    env.reset(goal=1)
    env.increment(step=99)
    assert env.get_reward() is None
    assert not env.outcome.is_completed


def test_an_env_without_a_reward_gives_none_though_it_is_completed() -> None:
    with manager_of(Silent) as manager:
        env = as_trl(manager, [Silent.look])()
        env.reset()
        assert env.look().startswith("process ")
        assert env.get_reward() is None
        assert env.outcome.is_completed


def test_the_lease_ends_with_the_reward_the_next_reset_or_the_object(manager: Any) -> None:
    factory = as_trl(manager, TOOLS)
    first, second = factory(), factory()
    first.reset(goal=1)
    with pytest.raises(LeaseTimeoutError):
        as_trl(manager, TOOLS, acquire_timeout_s=0.2)().reset(goal=1)
    first.reset(goal=1)  # its own env
    first.get_reward()
    second.reset(goal=1)
    del second
    gc.collect()
    first.reset(goal=1)
    assert first.get_reward() == 0.0


def test_rollouts_in_threads_have_an_env_each() -> None:
    with manager_of(env_num=4) as manager:
        factory = as_trl(manager, TOOLS)
        rewards: dict[int, Any] = {}

        def rollout(k: int) -> None:
            env = factory()
            env.reset(goal=100)
            for _ in range(k):
                env.increment(step=1)
            rewards[k] = env.get_reward()

        threads = [threading.Thread(target=rollout, args=(k,)) for k in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert rewards == {k: pytest.approx(k / 100) for k in range(12)}


def test_a_factory_goes_to_another_process_only_if_it_can_make_its_manager(manager: Any) -> None:
    with pytest.raises(ConfigError, match="function that makes it"):
        pickle.dumps(as_trl(manager, TOOLS))
    build = functools.partial(make, tool_env(Counter), env_num=1, type="base")
    factory = pickle.loads(pickle.dumps(as_trl(build, TOOLS)))
    env = factory()
    env.reset(goal=1)
    env.increment(step=1)
    assert env.get_reward() == 1.0
    factory.lease.__self__._manager.close()


def bare(self: Any, step):  # type: ignore[no-untyped-def]
    """Add to the count."""


def mute(self: Any, step: int) -> int:
    return step


def test_what_is_no_tool_is_refused_at_once(manager: Any) -> None:
    for tools, why in (
        ([], "list of methods"),
        (["increment"], "one is 'increment'"),
        ([Counter.get_reward], "cannot be a tool"),
        ([Counter.increment, Counter.increment], "cannot be a tool"),
        ([bare], "no annotation of step"),
        ([mute], "no docstring"),
        ([Silent.look], "Counter has no method look"),
    ):
        with pytest.raises(ConfigError, match=why):
            as_trl(manager, tools)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tool_env"):
        as_trl(make("CartPole-v1", env_num=1), TOOLS)
    with pytest.raises(ConfigError, match="a manager"):
        as_trl("CartPole-v1", TOOLS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a class or a function"):
        tool_env("Counter")  # type: ignore[arg-type]
