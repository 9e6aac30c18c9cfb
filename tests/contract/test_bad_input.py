"""What is wrong is refused with a typed error that says what was found and what to do.

Before anything is sent or lost: after each refusal the manager goes on as if nothing had been said.
"""

from __future__ import annotations

import pkgutil
import re
import threading
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete

from envmgr import create_env_manager, load_config, make
from envmgr.errors import (
    ActionError,
    ConfigError,
    EnvAttributeError,
    EnvFailure,
    EnvManagerError,
    EnvNotReadyError,
    EnvRaised,
    LaunchError,
    ManagerClosedError,
    MethodAccessError,
    NothingReadyError,
    SpaceMismatchError,
    StateError,
    UnknownEnvError,
    UnknownKeyError,
)
from envmgr.managers import BaseEnvManager
from tests.contract.envs import Do, ScriptedEnv, seen
from tests.contract.harness import (
    ALL_BLOCK,
    INLINE,
    SOME_BLOCK,
    Setup,
    World,
    every_setup,
    over,
    ready_all,
    step_all,
)


def check_text(error: BaseException, *parts: str) -> None:
    """Check that an error is ours and says certain things in its first paragraph."""
    assert isinstance(error, EnvManagerError)
    paragraph = str(error).partition("\n\n")[0]
    for part in parts:
        assert part in paragraph, f"{part!r} is missing in: {paragraph}"


class Wrong(NamedTuple):
    """A config that is wrong.

    Attributes:
        cfg: of a manager of two envs.
        error: what it raises.
        says: what the message has to say.
    """

    cfg: dict[str, Any]
    error: type[Exception]
    says: tuple[str, ...]


WRONG_CONFIGS = [
    Wrong({"type": "subproces"}, UnknownKeyError, ("subproces", "subprocess")),
    Wrong({"type": "nonsense"}, UnknownKeyError, ("nonsense", "base", "async_subprocess")),
    Wrong({"type": 5}, ConfigError, ("5",)),
    Wrong({"step_timout": 1}, UnknownKeyError, ("step_timout", "step_timeout")),
    Wrong({"episode_nums": 1}, UnknownKeyError, ("episode_nums", "episode_num")),
    Wrong({"step_timeout": "5"}, ConfigError, ("manager.step_timeout", "'5'")),
    Wrong({"step_timeout": 0}, ConfigError, ("manager.step_timeout", "0")),
    Wrong({"step_timeout": -1.0}, ConfigError, ("manager.step_timeout", "-1")),
    Wrong({"episode_num": 0}, ConfigError, ("manager.episode_num", "0")),
    Wrong({"episode_num": 1.5}, ConfigError, ("manager.episode_num", "1.5")),
    Wrong({"max_retry": 0}, ConfigError, ("manager.max_retry", "0")),
    Wrong({"retry_type": "renwe"}, ConfigError, ("manager.retry_type", "renwe", "renew")),
    Wrong({"context": "thread"}, ConfigError, ("manager.context", "thread", "forkserver")),
    Wrong({"auto_reset": 1}, ConfigError, ("manager.auto_reset", "1")),
    Wrong({"wait_num": 0}, ConfigError, ("manager.wait_num", "0")),
    Wrong({"env_num": 3}, ConfigError, ("manager.env_num", "3", "2")),
    Wrong({"seed": "abc"}, ConfigError, ("manager.seed", "abc")),
    Wrong({"seed": [1, 2, 3]}, ConfigError, ("manager.seed", "3")),
    Wrong({"nan_policy": "no"}, ConfigError, ("manager.nan_policy", "abnormal")),
    Wrong({"check_actions": "loose"}, ConfigError, ("manager.check_actions", "strict")),
    Wrong({"on_failure": "ignore"}, ConfigError, ("manager.on_failure", "recover")),
    Wrong({"import_names": ["no_such_module_anywhere"]}, ConfigError, ("no_such_module_anywhere",)),
    Wrong({"worker_env": {"denied": []}}, ConfigError, ("worker_env", "denied")),
    Wrong({"num_workers": 3}, ConfigError, ("manager.num_workers", "3", "2 envs")),
    Wrong({"spare_env_num": 1, "num_workers": 1}, ConfigError, ("manager.spare_env_num", "1")),
]


@pytest.mark.parametrize("wrong", WRONG_CONFIGS, ids=lambda wrong: str(wrong.cfg))
def test_wrong_configs_are_refused_before_anything_starts(world: World, wrong: Wrong) -> None:
    with pytest.raises(wrong.error) as raised:
        create_env_manager({"type": "subprocess", **wrong.cfg}, env_fn=world.factories(2))
    check_text(raised.value, *wrong.says)
    assert world.journal(0) == []


def test_configs_that_are_no_mappings_are_refused(world: World) -> None:
    for wrong in ("base", 5, [("type", "base")]):
        with pytest.raises(ConfigError):
            create_env_manager(wrong, env_fn=world.factories(1))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "nowhere.yaml")
    check_text(raised.value, "nowhere.yaml")


def test_make_says_what_does_not_exist() -> None:
    for env, says in (
        ("CartPol-v1", "CartPole"),
        ("CartPole-v77", "CartPole"),
        ("no_such_module_anywhere:make", "no_such_module_anywhere"),
    ):
        with pytest.raises(ConfigError) as raised:
            make(env, env_num=2)
        check_text(raised.value, says)
    with pytest.raises(UnknownKeyError) as raised:
        make("CartPole-v1", env_num=2, step_timout=1)
    check_text(raised.value, "step_timeout")
    with pytest.raises(UnknownKeyError) as raised:
        make("CartPole-v1", render_mode="rgb_array")
    check_text(raised.value, "Arguments of the env go into env_kwargs={'render_mode': ...}.")
    with pytest.raises(UnknownKeyError) as raised:
        make("CartPole-v1", type="subproces")
    assert "env_kwargs" not in str(raised.value)
    with pytest.raises(UnknownKeyError, match=r"'async': did you mean 'async_subprocess'\?"):
        make("CartPole-v1", type="async")


class Plain(gymnasium.Env[Any, Any]):
    """An env that is never stepped."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)


def test_arguments_of_the_env_are_not_keys_and_it_is_said_where_they_go_before_all_keys() -> None:
    for env, given, says in (
        (Plain, {"p_raise": 0.1}, "go into env_kwargs={'p_raise': ...}."),
        ("CartPole-v1", {"p_raise": 0.1}, "go into env_kwargs={'p_raise': ...}."),
        ("CartPole-v1", {"kwargs": {"p_raise": 0.1}}, "go into env_kwargs={'p_raise': ...}."),
    ):
        with pytest.raises(UnknownKeyError) as raised:
            make(env, env_num=2, **given)
        text = str(raised.value)
        assert says in text.partition("Known keys:")[0], text
        assert ("Known keys:" in text) == ("p_raise" in given), "only where no key is near"
    with pytest.raises(UnknownKeyError, match="did you mean 'step_timeout'") as raised:
        make("CartPole-v1", step_timout=1)
    assert "Known keys" not in str(raised.value)


def test_an_env_in_place_of_a_function_is_told_of_functions() -> None:
    env = Plain()
    for build in (
        lambda: make(env),  # type: ignore[call-overload]
        lambda: make([env]),  # type: ignore[list-item]
        lambda: BaseEnvManager([env], {"env_num": 1}),  # type: ignore[list-item]
    ):
        with pytest.raises(ConfigError, match=r"give a function that builds one, such as lambda:"):
            build()
    with pytest.raises(ConfigError) as raised:
        make(7)  # type: ignore[call-overload]
    assert "builds one" not in str(raised.value)


def test_calls_before_a_launch_and_after_the_end_are_told_apart() -> None:
    manager = make("CartPole-v1", type="base")

    def leased() -> None:
        with manager.lease():
            pass

    calls: list[Callable[[], Any]] = [
        lambda: manager.ready_obs,
        lambda: manager.step({0: 0}),
        leased,
    ]
    for call in calls:
        with pytest.raises(ManagerClosedError, match=r"is not launched: use `with manager:`"):
            call()
    _ = manager.observation_space  # which opens it, and launches nothing
    for call in calls:
        with pytest.raises(ManagerClosedError, match=r"is not launched: use `with manager:`"):
            call()
    with manager:
        assert manager.ready_obs
    for call in calls:
        with pytest.raises(ManagerClosedError, match=r"was closed; call launch\(\)"):
            call()


def test_a_module_that_does_not_exist_is_not_offered_to_be_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stones_env.py").write_text("")
    pkgutil.get_importer("")  # it knows the folder that is the current one now, for good
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    says = r"there is no module 'stones_envv': did you mean 'stones_env'\?"
    for key, text in (
        ("env.entry", "env: {entry: 'stones_envv:MyEnv'}"),
        ("collect.policy", "env: {id: CartPole-v1}\ncollect: {policy: 'stones_envv:P', steps: 1}"),
        ("manager.import_names", "env: {id: CartPole-v1}\nmanager: {import_names: [stones_envv]}"),
    ):
        file.write_text(f"{text}\n")
        with pytest.raises(ConfigError, match=says) as raised:
            load_config(file)
        assert str(raised.value).startswith(key) or key in str(raised.value)
        assert "--allow-import" not in str(raised.value)
    file.write_text("env: {entry: 'nothing_like_it:MyEnv'}\n")
    with pytest.raises(ConfigError, match=r"there is no module 'nothing_like_it'\. Looked in"):
        load_config(file)
    (tmp_path / "sub").mkdir()
    file = file.rename(tmp_path / "sub" / "config.yaml")
    looked = re.escape(f"Looked in {file.parent} and in {tmp_path} and where Python looks.")
    with pytest.raises(ConfigError, match=f"{looked}.* or run where it lies"):
        load_config(file)
    with pytest.raises(ConfigError, match=r"there is no 'stones_envv': did you mean 'stones_env'"):
        make("stones_envv:MyEnv")
    with pytest.raises(ConfigError, match=r"there is no 'email\.mesage': did .* 'email\.message'"):
        make("email.mesage:Message")


def test_a_dot_in_place_of_the_colon_is_told_of_the_colon() -> None:
    with pytest.raises(ConfigError, match=r"write 'my_pkg\.env:MyEnv'"):
        make("my_pkg.env.MyEnv")


# -- calls ----------------------------------------------------------------------------------------


class BadCall(NamedTuple):
    """A call that a running manager refuses.

    Attributes:
        call: what is called.
        error: what it raises.
        says: what the message has to say.
    """

    call: Callable[[Any], Any]
    error: type[Exception]
    says: tuple[str, ...]


# Env 0 waits for an action, 1 has one under way, 2 has ended (auto_reset off), 3 is DONE.
BAD_CALLS = {
    "unknown env": BadCall(lambda m: m.step({9: 0}), UnknownEnvError, ("9", "0 to 3")),
    "negative env": BadCall(lambda m: m.send({-1: 0}), UnknownEnvError, ("-1",)),
    "pending env": BadCall(lambda m: m.step({0: 1, 1: 1}), EnvNotReadyError, ("env 1", "recv")),
    "ended env": BadCall(lambda m: m.step({0: 1, 2: 1}), EnvNotReadyError, ("env 2", "reset")),
    "done env": BadCall(lambda m: m.step({0: 1, 3: 1}), EnvNotReadyError, ("env 3", "reset")),
    "action": BadCall(lambda m: m.step({0: 64}), ActionError, ("env 0", "64", "Nothing was sent")),
    "no action": BadCall(lambda m: m.step({0: None}), ActionError, ("env 0", "None")),
    "a list": BadCall(lambda m: m.step([1]), ActionError, ("{env_id: action}", "list")),
    "a number": BadCall(lambda m: m.send(1), ActionError, ("{env_id: action}", "int")),
    "min_ready": BadCall(lambda m: m.recv(min_ready=0), ConfigError, ("min_ready", "1 or more")),
    "rows": BadCall(lambda m: m.send_arrays([0], [1, 2]), ActionError, ("one action for each",)),
    "arrays": BadCall(lambda m: m.send_arrays([0, 0], np.array([1, 2])), ActionError, ("twice",)),
    "reset": BadCall(lambda m: m.reset({0: None, 7: None}), UnknownEnvError, ("7",)),
    "reset params": BadCall(lambda m: m.reset({0: [1]}), ConfigError, ("env 0", "dict", "[1]")),
    "reset list": BadCall(lambda m: m.reset([0]), ConfigError, ("{env_id: params or None}",)),
    "launch": BadCall(lambda m: m.launch(), StateError, ("launched already", "close()")),
    "seed": BadCall(lambda m: m.seed(-3), ConfigError, ("-3", "0 or more")),
    "seed of nobody": BadCall(lambda m: m.seed({8: 1}), UnknownEnvError, ("8",)),
    "attribute": BadCall(lambda m: m.get_attr("xx", 0), EnvAttributeError, ("xx", "env 0")),
    "pending attribute": BadCall(lambda m: m.label, EnvNotReadyError, ("[1]", "recv")),
    "method": BadCall(lambda m: m.get_attr("scaled", 0), MethodAccessError, ("scaled", "call")),
    "call reset": BadCall(lambda m: m.call("reset"), MethodAccessError, ("reset",)),
    "call nobody": BadCall(lambda m: m.call("scaled", 1, env_ids=9), UnknownEnvError, ("9",)),
    "call": BadCall(
        lambda m: m.call("scaled", threading.Lock(), env_ids=0), ActionError, ("cannot be sent",)
    ),
    "call_wait": BadCall(lambda m: m.call_wait(), StateError, ("call_async",)),
    "state of nobody": BadCall(lambda m: m.env_state_done(4), UnknownEnvError, ("4",)),
    "render": BadCall(lambda m: m.render(env_ids=6), UnknownEnvError, ("6",)),
    "replay": BadCall(lambda m: m.enable_save_replay(["a"]), ConfigError, ("1", "4")),
}


@over(ALL_BLOCK, SOME_BLOCK)
def test_bad_calls_are_refused_and_change_nothing(world: World, setup: Setup) -> None:
    manager = world.make(setup, 4, auto_reset=False, episode_num=2)
    gate = world.gate
    ready_all(manager)
    step_all(manager, {2: Do.END, 3: Do.END})
    manager.reset({3: None})
    step_all(manager, {3: Do.END})
    manager.send({1: Do.GATE})
    visit = gate.await_visit(1)
    stats, states = manager.stats(), manager.env_states
    journals = [world.journal(i) for i in range(4)]
    for name, bad in BAD_CALLS.items():
        with pytest.raises(bad.error) as raised:
            bad.call(manager)
        check_text(raised.value, *bad.says)
        assert (manager.stats(), manager.env_states) == (stats, states), name
        assert [world.journal(i) for i in range(4)] == journals, name
    visit.release()
    assert seen(manager.recv(min_ready=1)[1].obs)[:5] == (1, 0, 0, 1, Do.GATE)
    assert seen(step_all(manager, {0: 5})[0].obs)[:5] == (0, 0, 0, 1, 5)


@over(ALL_BLOCK)
def test_an_env_that_there_is_not_is_refused_wherever_it_stands_among_others(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 4)
    ready_all(manager)
    stats = manager.stats()
    for nobody in (-1, 4):
        for env_ids in permutations((0, 2, nobody)):
            with pytest.raises(UnknownEnvError) as raised:
                manager.send_arrays([*env_ids], np.zeros(3, np.int64))
            check_text(raised.value, str(nobody), "0 to 3")
    assert manager.stats() == stats
    assert sorted(step_all(manager, dict.fromkeys(range(4), 5))) == [0, 1, 2, 3]


CALLS_OF_A_RUNNING_MANAGER: dict[str, Callable[[Any], Any]] = {
    "step": lambda m: m.step({0: 0}),
    "empty step": lambda m: m.step({}),
    "send": lambda m: m.send({0: 0}),
    "recv": lambda m: m.recv(),
    "send_arrays": lambda m: m.send_arrays([0], [0]),
    "recv_arrays": lambda m: m.recv_arrays(),
    "reset": lambda m: m.reset(),
    "ready_obs": lambda m: m.ready_obs,
    "ready_env": lambda m: m.ready_env,
    "call": lambda m: m.call("scaled", 1),
    "set_attr": lambda m: m.set_attr("knob", 1),
}


@over(INLINE, ALL_BLOCK)
def test_calls_before_launch_and_after_close_are_refused(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, launch=False)
    for moment in ("before launch", "after close"):
        for call in CALLS_OF_A_RUNNING_MANAGER.values():
            with pytest.raises(ManagerClosedError) as raised:
                call(manager)
            check_text(raised.value, "launch()")
        if moment == "before launch":
            assert world.journal(0) == []
            manager.launch()
            manager.close()


# -- envs -----------------------------------------------------------------------------------------


def not_an_env() -> Any:
    return {"an": "env?"}


def broken() -> Any:
    raise FileNotFoundError("the simulator is not installed")


@pytest.mark.parametrize(
    ("factory", "kind", "says"),
    [
        (not_an_env, EnvFailure, "reset"),
        (broken, EnvRaised, "the simulator is not installed"),
        (partial(broken, "too", "many"), EnvRaised, "argument"),
        (lambda: ScriptedEnv, EnvFailure, "class ScriptedEnv"),
    ],
    ids=["not an env", "broken", "wrong arguments", "a class"],
)
@every_setup
def test_envs_that_cannot_be_created_fail_the_launch(
    world: World, setup: Setup, factory: Any, kind: type[EnvFailure], says: str
) -> None:
    good = world.factories(1)[0]
    manager = world.make(setup, launch=False, env_fn=[good, factory])
    with pytest.raises(LaunchError) as raised:
        manager.launch()
    check_text(raised.value, "1 of 2", "env 1", says)
    [failure] = raised.value.failures.values()
    assert isinstance(failure, kind)
    assert (failure.env_id, failure.during) == (1, "construction")
    assert raised.value.__cause__ is failure
    assert manager.closed
    if factory is broken:
        assert "FileNotFoundError" in str(failure)
        assert "in broken" in failure.remote_traceback  # type: ignore[attr-defined]


@every_setup
def test_envs_whose_spaces_differ_fail_the_launch(world: World, setup: Setup) -> None:
    manager = world.make(
        setup, launch=False, env_fn=[*world.factories(2), OtherSpace(world.folder)]
    )
    with pytest.raises(SpaceMismatchError) as raised:
        manager.launch()
    check_text(raised.value, "env 2", "Discrete(5)", "Discrete(64)", "same_spaces: false")
    assert manager.closed
    assert [world.noted(i, "reset") for i in range(3)] == [[], [], []]


class OtherSpace:
    """Builds an env with another action space."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self) -> Any:
        env = ScriptedEnv(2, self.folder)
        env.action_space = Discrete(5)  # type: ignore[misc]
        return env


@every_setup
def test_a_wrong_shaped_observation_costs_its_own_step_only(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    timesteps = step_all(manager, {0: Do.BAD_SHAPE, 1: 3})
    check_text(timesteps[0].info["error"], "env 0", "(7,)", "(6,)")
    assert seen(timesteps[1].obs)[:5] == (1, 0, 0, 1, 3)
    assert seen(ready_all(manager)[0])[2:4] == (1, 0)


@over(INLINE, ALL_BLOCK)
def test_nothing_ready_names_the_way_out(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, auto_reset=False)
    ready_all(manager)
    for prepare, says in (
        (lambda: manager.send({0: 1}), "recv()"),
        (lambda: step_all_and_end(manager), "reset({env_id: params})"),
    ):
        prepare()
        with pytest.raises(NothingReadyError) as raised:
            _ = manager.ready_obs
        check_text(raised.value, says)


def step_all_and_end(manager: Any) -> None:
    manager.recv()
    step_all(manager, {0: Do.END})
