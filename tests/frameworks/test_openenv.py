"""Isolated environments: by themselves, and behind OpenEnv's own server."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from openenv.core.env_server.http_server import HTTPEnvServer, create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import ConcurrencyConfig
from starlette.testclient import TestClient

from envmgr.adapters.openenv import isolated
from envmgr.errors import (
    ConfigError,
    EnvCrash,
    EnvNotReadyError,
    EnvTimeout,
    LeaseEndedError,
    LeaseTimeoutError,
)
from tests.frameworks.openenv_envs import AsyncTalk, Said, Say, Talk, Terse

LIMITS: dict[str, Any] = {"step_timeout": 2.0, "reset_timeout": 10.0, "release_timeout": 0.2}
PATIENCE_S = 50.0

Make = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def _openenv_is_imported_once() -> Iterator[None]:
    """Keep the worker server, which has imported openenv, from one test to the next."""
    os.environ["PYTEST_CURRENT_TEST"] = "a test"  # as in each: one server has one environment
    talk = isolated(Talk, env_num=1)
    talk.manager()
    yield
    talk.shutdown()


@pytest.fixture
def make() -> Iterator[Make]:
    """Return what isolates a class for one test."""
    made: list[Any] = []

    def isolate(environment: Any = Talk, **keys: Any) -> Any:
        made.append(isolated(environment, **{"env_num": 2, **LIMITS, **keys}))
        return made[-1]

    yield isolate
    for each in made:
        each.shutdown()
    gc.collect()  # the server's executors end their threads then


def runs(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


# -- a session by itself --------------------------------------------------------------------------


@pytest.mark.parametrize("environment", [Talk, AsyncTalk])
def test_a_session_is_as_that_of_the_class(make: Make, environment: Any) -> None:
    async def main() -> None:
        session = make(environment)()
        assert isinstance(session, Environment)
        first = await session.reset_async(seed=3, episode_id="e")
        assert (type(first), first.words, session.state.step_count) == (Said, ["seed 3"], 0)
        said = await session.step_async(Say(word="a"))
        assert (said.words, said.reward, said.done) == (["seed 3", "a"], 1.0, False)
        assert session.state.step_count == 1
        assert session.count(2) == 3
        end = await session.step_async(Say(word="end"))
        assert end.done
        after = await session.step_async(Say(word="after"))  # as the class itself takes it
        assert after.words == ["seed 3", "a", "end", "after"]
        again = await session.reset_async()
        assert (again.words, again.pid) == ([], first.pid)
        session.close()

    runs(main)


def test_static_and_class_methods_are_there_as_others(make: Make) -> None:
    session = make()()
    for name in ("count", "list_splits", "num_tasks"):
        its = inspect.signature(getattr(session, name))
        assert its == inspect.signature(getattr(Talk(), name)), name
    assert (session.list_splits(), session.num_tasks("all")) == (["train"], 7)
    with served(make()) as client:
        assert client.get("/talk/splits").json()[0]["name"] == "train"
        found = client.post("/talk/num_tasks", json={"split": "all"}).json()
        assert found == {"num_tasks": 7}


def test_the_state_has_the_episode_of_its_reset(make: Make) -> None:
    session = make()()
    assert session.state.episode_id is None  # of a new one, which nobody has reset
    session.reset(episode_id="mine")
    assert session.state.episode_id == "mine"


def test_a_session_goes_from_threads_to_loops_and_back(make: Make) -> None:
    session = make()()
    session.reset()
    for _ in range(2):
        asyncio.run(session.step_async(Say(word="loop")))
        session.step(Say(word="thread"))
    assert session.step(Say()).words == ["loop", "thread"] * 2 + [""]


def test_sessions_have_nothing_in_common_at_once_or_one_after_another(make: Make) -> None:
    talk = make(env_num=2)
    one, two = talk(), talk()
    one.reset()
    two.reset()
    one.step(Say(word="one"))
    assert two.step(Say(word="two")).words == ["two"]
    assert one.step(Say()).words == ["one", ""]
    for session in (one, two):
        session.close()
    for session in (talk(), talk()):
        assert session.step(Say(word="new")).words == ["new"]  # without a reset, as for POST /step
        assert session.state.step_count == 1


def test_what_the_environment_raises_is_raised_and_costs_nothing(make: Make) -> None:
    session = make()()
    first = session.reset()
    with pytest.raises(LookupError, match="no such word") as caught:
        session.step(Say(word="wrong"))
    assert "in step" in str(caught.value.__cause__)
    with pytest.raises(ValueError, match="no such task"):
        session.reset(refuse=True)
    assert session.reset().pid == first.pid


@pytest.mark.parametrize(("word", "error"), [("die", EnvCrash), ("hang", EnvTimeout)])
def test_a_crash_or_a_hang_is_told_and_the_next_reset_works(
    make: Make, word: str, error: type[Exception]
) -> None:
    talk = make()
    session, other = talk(), talk()
    first = session.reset()
    other.reset()
    with pytest.raises(error):
        session.step(Say(word=word))
    with pytest.raises(EnvNotReadyError, match="was lost"):
        session.step(Say(word="more"))
    assert other.step(Say(word="other")).words == ["other"]
    assert session.reset().pid != first.pid
    assert session.step(Say(word="more")).words == ["more"]


def test_a_reset_that_hangs_ends_at_its_limit(make: Make) -> None:
    session = make(reset_timeout=3.0)()
    with pytest.raises(EnvTimeout):
        session.reset(hang=True)
    assert session.reset().words == []


def test_a_limit_of_one_step_is_the_shorter_one(make: Make) -> None:
    session = make(step_timeout=None)()
    session.reset()
    with pytest.raises(EnvTimeout, match=r"0\.3 s"):
        session.step(Say(word="hang"), timeout_s=0.3)


def test_a_step_that_is_cancelled_leaves_the_session_to_be_reset(make: Make) -> None:
    async def main() -> None:
        session = make(env_num=1)()
        await session.reset_async()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(session.step_async(Say(word="hang")), 0.2)
        with pytest.raises(EnvNotReadyError):
            await session.step_async(Say(word="more"))
        assert (await session.reset_async()).words == []

    runs(main)


def test_who_finds_no_free_env_is_told_how_to_have_more(make: Make) -> None:
    talk = make(env_num=1, acquire_timeout_s=2.0)
    one, two = talk(), talk()
    one.reset()
    with pytest.raises(LeaseTimeoutError, match="use more envs"):
        two.reset()
    one.close()
    assert two.reset().words == []
    del two
    gc.collect()  # nobody has closed it
    assert talk().reset().words == []


def test_arguments_of_the_class_come_with_a_partial(make: Make) -> None:
    talk = make(functools.partial(Talk, limit=3))
    assert (talk.__name__, talk.SUPPORTS_CONCURRENT_SESSIONS) == ("Talk", True)
    assert list(inspect.signature(talk().reset_async).parameters) == [
        "seed",
        "episode_id",
        "kwargs",
    ]
    terse = make(Terse)()  # a limit is ours to keep, if the environment does not take it
    assert list(inspect.signature(terse.step_async).parameters) == ["action", "timeout_s"]
    assert terse.step(Say(word="a"), timeout_s=1.0).words == ["a"]


def test_what_is_no_environment_or_no_config_is_refused_at_once(make: Make) -> None:
    with pytest.raises(ConfigError, match="subclass of OpenEnv's Environment"):
        isolated(lambda: Talk())
    with pytest.raises(ConfigError):
        isolated(Talk, step_timeout=-1)
    with pytest.raises(ConfigError):
        isolated(Talk, env_num=0)


# -- behind the server ----------------------------------------------------------------------------


def served(environment: Any, **keys: Any) -> TestClient:
    return TestClient(create_app(environment, Say, Said, env_name="talk", **keys))


def ask(socket: Any, kind: str, **data: Any) -> Any:
    socket.send_text(json.dumps({"type": kind, **({"data": data} if kind != "state" else {})}))
    return json.loads(socket.receive_text())


def test_the_routes_of_the_server_answer(make: Make) -> None:
    with served(make()) as client:
        assert client.get("/health").status_code == 200
        assert client.post("/reset", json={"seed": 4}).json()["observation"]["words"] == ["seed 4"]
        step = client.post("/step", json={"action": {"word": "a"}}).json()
        assert (step["observation"]["words"], step["reward"]) == (["a"], 1.0)
        assert client.get("/state").json()["step_count"] == 0
        assert client.get("/metadata").json()["name"] == "Talk"
        assert client.get("/schema").status_code == 200
        assert client.post("/step", json={"action": {"speak": "a"}}).status_code == 422


def test_a_crash_in_a_session_is_told_to_its_client_alone(make: Make) -> None:
    with (
        served(make(), max_concurrent_envs=2) as client,
        client.websocket_connect("/ws") as one,
        client.websocket_connect("/ws") as two,
    ):
        ask(one, "reset")
        ask(two, "reset")
        died = ask(one, "step", word="die")
        assert died["type"] == "error"
        assert "died during step" in died["data"]["message"]
        assert "was lost" in ask(one, "step", word="more")["data"]["message"]
        assert ask(two, "step", word="b")["data"]["observation"]["words"] == ["b"]
        assert ask(one, "reset")["data"]["observation"]["words"] == []
        assert ask(one, "step", word="c")["data"]["observation"]["words"] == ["c"]
        assert ask(one, "state")["data"]["step_count"] == 1


def test_64_sessions_step_at_once(make: Make) -> None:
    async def main() -> None:
        server = HTTPEnvServer(make(env_num=64), Say, Said, max_concurrent_envs=64)
        sessions = [await server._create_session() for _ in range(64)]
        await asyncio.gather(*(env.reset_async(seed=k) for k, (_, env) in enumerate(sessions)))
        began = time.monotonic()
        said = await asyncio.gather(
            *(env.step_async(Say(word=str(k), seconds=0.5)) for k, (_, env) in enumerate(sessions))
        )
        seconds = time.monotonic() - began
        assert [each.words for each in said] == [[f"seed {k}", str(k)] for k in range(64)]
        assert len({each.pid for each in said}) == 64
        assert seconds < 4.0  # one after another, they take 32 s
        for name, _ in sessions:
            await server._destroy_session(name)

    runs(main)


def test_the_reaper_ends_a_session_in_the_middle_of_a_step(make: Make) -> None:
    async def main() -> None:
        talk = make(env_num=1, step_timeout=None)
        server = HTTPEnvServer(
            talk,
            Say,
            Said,
            concurrency_config=ConcurrencyConfig(max_concurrent_envs=1, session_timeout=0.1),
        )
        _, session = await server._create_session()
        await session.reset_async()
        step = asyncio.create_task(session.step_async(Say(word="hang")))
        server._start_reaper()  # which looks each 5 s
        with pytest.raises(LeaseEndedError):
            await step
        server._stop_reaper()
        assert server.active_sessions == 0
        _, session = await server._create_session()  # has the env, once its worker was ended
        assert (await session.reset_async()).words == []
        assert talk.manager().stats()["leases"] == 2
        session.close()

    runs(main)
