"""Objects that are driven by calls of their methods, without a worker."""

from __future__ import annotations

import asyncio
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from envmgr.adapters.method_calls import (
    Answer,
    CalledEnv,
    MethodCall,
    SessionEnv,
    ToolEnv,
    TracebackInWorker,
)


class TwoPart(Exception):
    """Can be pickled, and not be read again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class Thing:
    """Notes what happens to it."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.number, self.closed = type(self).made, False

    def ask(self, *args: Any, **kwargs: Any) -> Any:
        return self.number, args, kwargs

    async def later(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    def observe(self, reward: Any, done: bool) -> Any:
        return SimpleNamespace(reward=reward, done=done)

    def fail(self, error: Exception) -> None:
        raise error

    @property
    def state(self) -> Any:
        return {"number": self.number}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _none_was_made() -> None:
    Thing.made = 0


def test_a_call_gets_its_arguments_and_awaits_what_can_be_awaited() -> None:
    env = CalledEnv(Thing)
    timestep = env.step(MethodCall("ask", (1,), {"two": 2}))
    assert timestep.obs.result() == (1, (1,), {"two": 2})
    assert (timestep.reward, timestep.done) == (0.0, False)
    assert env.step(MethodCall("later", (3,))).obs.result() == 3
    assert env.step(MethodCall(None)).obs.result() is None
    env.close()


def test_what_a_method_raises_is_an_answer_that_can_be_sent() -> None:
    env = CalledEnv(Thing)
    for error, kind, text in (
        (ValueError("no"), ValueError, "no"),
        (TwoPart("no", "good"), RuntimeError, "TwoPart: no good"),
        (ValueError(lambda: None), RuntimeError, "ValueError: <function"),
    ):
        answer = env.step(MethodCall("fail", (error,))).obs
        copy = pickle.loads(pickle.dumps(answer))
        with pytest.raises(kind, match=text) as caught:
            copy.result()
        assert type(caught.value) is kind
        assert isinstance(caught.value.__cause__, TracebackInWorker)
        assert "in fail" in str(caught.value.__cause__)
    env.close()


def test_a_session_has_an_object_of_its_own_which_is_there_beforehand() -> None:
    env = SessionEnv(Thing)
    assert env.reset() == Answer()  # of the launch
    assert env.reset(MethodCall("ask", on_new=True)).result()[0] == 1
    assert env.reset(MethodCall("ask")).result()[0] == 1  # the same session
    first = env._called
    env.reset()  # it has ended
    assert first.closed
    assert Thing.made == 2
    assert env.reset(MethodCall("ask", on_new=True)).result()[0] == 2
    assert env.reset(MethodCall("ask", on_new=True)).result()[0] == 3  # somebody waited for it
    env.close()


def test_a_session_has_rewards_ends_and_states() -> None:
    env = SessionEnv(Thing)
    for reward, done, as_number in ((1, True, 1.0), (None, False, 0.0), (True, False, 1.0)):
        timestep = env.step(MethodCall("observe", (reward, done)))
        assert (timestep.reward, timestep.done) == (as_number, done)
        state = pickle.loads(timestep.obs.state)
        assert state.result() == {"number": 1}
    env.close()


class Unknown(Thing):
    """Cannot say its state."""

    @property
    def state(self) -> Any:
        raise ValueError("none yet")


class Unsendable(Thing):
    """Has a state that no other process can read."""

    @property
    def state(self) -> Any:
        return threading.Lock()


@pytest.mark.parametrize(("thing", "error"), [(Unknown, ValueError), (Unsendable, TypeError)])
def test_a_state_that_cannot_be_told_costs_nobody_a_step(
    thing: type[Thing], error: type[Exception]
) -> None:
    env = SessionEnv(thing)
    timestep = env.step(MethodCall("ask"))
    assert timestep.obs.result()[1:] == ((), {})
    with pytest.raises(error):
        pickle.loads(timestep.obs.state).result()
    env.close()


def test_tools_keep_their_object_and_end_with_the_reward() -> None:
    env = ToolEnv(Thing)
    for _ in range(2):
        env.reset()
        assert env.reset(MethodCall("ask")).result()[0] == 1
    with pytest.raises(ValueError, match="no"):
        env.reset(MethodCall("fail", (ValueError("no"),)))
    with pytest.raises(ValueError, match="no"):
        env.step(MethodCall("fail", (ValueError("no"),), ends=True))
    timestep = env.step(MethodCall("get_reward", ends=True))  # which it has not
    assert (timestep.obs.result(), timestep.reward, timestep.done) == (None, 0.0, True)
    timestep = env.step(MethodCall("later", (0.5,), ends=True))
    assert (timestep.reward, timestep.done) == (0.5, True)
    env.close()
