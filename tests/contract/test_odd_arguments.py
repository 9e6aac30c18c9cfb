"""Every public call with every odd value: refused by a typed error, before anything happens.

The table says which odd values a call takes, as they are what it asks for. All others have to raise
an error of ours whose text can be read, and to leave the manager as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from envmgr import (
    ENV_MANAGER_REGISTRY,
    BaseEnvManager,
    Snapshot,
    as_gymnasium,
    create_env_manager,
    dump_on_signal,
    get_env_manager_cls,
    load_config,
    make,
)
from envmgr.adapters.gymnasium import EnvmgrVectorEnv
from envmgr.adapters.puffer import as_puffer
from envmgr.env import AgentRows, tile_images
from envmgr.errors import EnvFailure, EnvManagerError, LaunchError
from tests.agents import Relay
from tests.contract.envs import journal_path
from tests.contract.family import ACTIONS
from tests.contract.harness import Setup, World, over, ready_all
from tests.contract.odd_values import ODD, OF_TORCH, OddMapping

pytestmark = pytest.mark.torch

_MOST_CHARACTERS = 1500


class Call(NamedTuple):
    """A public call with one argument left open.

    Attributes:
        run: calls it; of a manager of two envs and the argument.
        takes: names of the odd values that it takes.
    """

    run: Callable[[Any, Any], Any]
    takes: frozenset[str] = frozenset()


def takes(*names: str | frozenset[str]) -> frozenset[str]:
    return frozenset().union(*({name} if isinstance(name, str) else name for name in names))


NOTHING = takes("empty list", "empty tuple", "empty array")
EMPTY = takes("empty dict", "empty mapping")
ONE_ENV = takes("zero", "one", "np.int64", "np.uint8", "raising int")
BY_ENV = takes("dict", "dict of lists", "mapping", "lying mapping", "negative length")
ENVS = takes(
    *(ONE_ENV, BY_ENV, NOTHING, EMPTY, "None", "list", "short list", "tuple", "range", "set"),
    *("generator", "dict of None values", "raising mapping", "array", "short array", "uint array"),
)
SECONDS = takes(
    *("None", "zero", "one", "minus one", "2**63", "half", "1.0", "inf", "-inf"),
    *("np.int64", "np.uint8", "np.float64", "raising int"),
)
COUNT = takes("None", "one", "2**63", "huge", "np.int64", "np.uint8", "raising int")
FLAG = takes("None", "True", "np.bool")
NAME = takes("text", "np.str")
FOLDER = takes("text", "digits", "surrogate", "path", "np.str")
SEEDS = takes("None", "zero", "one", "huge", "2**63", "np.int64", "np.uint8", "raising int")
NUMBER = takes(ONE_ENV, "short list", "short array", "0-d array", "0-d tensor")
EACH_SEED = BY_ENV - {"dict of lists"} | takes(
    "list", "list twice", "list of None", "tuple", "range", "dict of None values"
)
ROWS = takes(
    *("list", "list twice", "range", "generator", "array", "2-d array", "uint array", "tensor"),
)

CALLS = {
    "step": Call(lambda m, v: m.step(v), BY_ENV),
    "step, action": Call(lambda m, v: m.step({0: v}), NUMBER),
    "step, actions": Call(lambda m, v: m.step({0: v, 1: v}), NUMBER),
    "step, env_id": Call(lambda m, v: m.step(OddMapping((v, 1))), ONE_ENV),
    "send": Call(lambda m, v: m.send(v), takes(BY_ENV, EMPTY)),
    "recv, min_ready": Call(lambda m, v: m.recv(min_ready=v), COUNT),
    "recv, timeout_s": Call(lambda m, v: m.recv(timeout_s=v), SECONDS),
    "recv_arrays, min_ready": Call(lambda m, v: m.recv_arrays(min_ready=v), COUNT),
    "recv_arrays, timeout_s": Call(lambda m, v: m.recv_arrays(timeout_s=v), SECONDS),
    "send_arrays, env_ids": Call(lambda m, v: m.send_arrays(v, [99, 99])),
    "send_arrays, env_id": Call(
        lambda m, v: m.send_arrays([0, v], [1, 1]), takes("one", "np.int64", "np.uint8")
    ),
    "send_arrays, actions": Call(lambda m, v: m.send_arrays([0, 1], v), ROWS),
    "send_arrays, action": Call(lambda m, v: m.send_arrays([0, 1], [v, v]), NUMBER),
    "ready_arrays": Call(lambda m, v: m.ready_arrays(v), ENVS),
    "reset": Call(lambda m, v: m.reset(v), takes(EMPTY, "None", "dict of None values")),
    "reset, env_id": Call(lambda m, v: m.reset(OddMapping((v, None))), ONE_ENV),
    "reset, params": Call(lambda m, v: m.reset({0: v}), takes(EMPTY, "None", "dict of text")),
    "reset, name": Call(
        lambda m, v: m.reset({0: OddMapping((v, 1))}),
        takes(FOLDER - {"path"}, "empty text", "long text"),
    ),
    "seed": Call(lambda m, v: m.seed(v), takes(SEEDS, EMPTY, EACH_SEED)),
    "seed, env_id": Call(lambda m, v: m.seed(OddMapping((v, 1))), ONE_ENV),
    "seed, of one": Call(lambda m, v: m.seed({0: v}), SEEDS),
    "seed, of each": Call(lambda m, v: m.seed([v, v]), SEEDS),
    "seed, dynamic_seed": Call(lambda m, v: m.seed(0, dynamic_seed=v), FLAG),
    "call": Call(lambda m, v: m.call(v), NAME),
    "call, env_ids": Call(lambda m, v: m.call("scaled", 1, env_ids=v), ENVS),
    "apply": Call(lambda m, v: m.apply(v), takes("class", "function")),
    "apply, env_ids": Call(lambda m, v: m.apply(id, env_ids=v), ENVS),
    "call_async": Call(lambda m, v: m.call_async(v), NAME),
    "call_async, env_ids": Call(lambda m, v: m.call_async("scaled", 1, env_ids=v), ENVS),
    "get_attr": Call(lambda m, v: m.get_attr(v), NAME),
    "get_attr, env_ids": Call(lambda m, v: m.get_attr("knob", v), ENVS),
    "set_attr": Call(lambda m, v: m.set_attr(v, 1), NAME),
    "set_attr, list": Call(
        lambda m, v: m.set_attr("knob", v) if isinstance(v, list) else m.set_attr(v, 1),
        takes(NAME, "list", "list twice", "ragged", "list of None", "list of text")
        | takes("list of hostile", "list of tensors"),
    ),
    "set_attr, env_ids": Call(lambda m, v: m.set_attr("knob", 1, v), ENVS),
    "render": Call(lambda m, v: m.render(v), ENVS),
    "render, mode": Call(lambda m, v: m.render(None, v), takes(FOLDER - {"path"}, "None")),
    "env_state_done": Call(lambda m, v: m.env_state_done(v), ONE_ENV),
    "enable_save_replay": Call(
        lambda m, v: m.enable_save_replay(v), takes(FOLDER, "list of text", "text array")
    ),
    "enable_save_replay, one": Call(lambda m, v: m.enable_save_replay([v, v]), FOLDER),
    "enable_save_figure, env_id": Call(lambda m, v: m.enable_save_figure(v, "x"), ONE_ENV),
    "enable_save_figure": Call(lambda m, v: m.enable_save_figure(0, v), FOLDER),
    "restore": Call(lambda m, v: m.restore(v), FOLDER),
    "reset_infos": Call(
        lambda m, v: m.reset_infos(v),
        ENVS - ONE_ENV - takes("None") | takes("list twice", "mapping twice"),
    ),
    "reward_shaping, env_id": Call(lambda m, v: m.reward_shaping(v, []), ONE_ENV),
    "reward_shaping": Call(
        lambda m, v: m.reward_shaping(0, v),
        takes("memoryview", "range", "endless range", "tuple", "empty tuple", "list of tensors")
        | {name for name in ODD.keys() - OF_TORCH.keys() if isinstance(ODD[name](), list)},
    ),
    "launch": Call(lambda m, v: m.launch(v)),
    "close": Call(lambda m, v: m.close(v), SECONDS),
    "close, terminate": Call(lambda m, v: m.close(terminate=v), FLAG - {"None"}),
}

# Of the V2 kinds: `step` and `send` take a row of a batch for each env that was read.
ROW_CALLS = {
    **CALLS,
    "step": Call(lambda m, v: m.step(v), takes(ROWS, BY_ENV)),
    "send": Call(lambda m, v: m.send(v), takes(ROWS, BY_ENV, EMPTY)),
    "step, env_id": Call(lambda m, v: m.step(OddMapping((v, 1))), ONE_ENV),
}


_TAKEN = "was taken"


def refused(call: Callable[[], Any]) -> str | None:
    """Return what is wrong with how a call is refused; None if it is as it should be."""
    try:
        call()
    except EnvManagerError as error:
        if isinstance(error, (EnvFailure, LaunchError)):
            return f"went as far as an env: {error}"
        text = str(error)
        return None if 20 < len(text) <= _MOST_CHARACTERS else f"says {text[:200]!r}"
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error)[:200]}"
    return _TAKEN


def problems_of(
    calls: dict[str, Call],
    manager: Any,
    state: Callable[[], Any],
    settle: Callable[[], Any] | None = None,
) -> list[str]:
    """Return what is wrong when all calls get all odd values that they do not take.

    With `settle` they may take any; it is called then, and the state may have changed.
    """
    problems = []
    before = state()
    for call_name, call in calls.items():
        assert call.takes <= ODD.keys() | OF_TORCH.keys(), call_name
        for name, odd in ODD.items():
            if name in call.takes:
                continue
            value = odd()
            wrong = refused(lambda call=call, value=value: call.run(manager, value))
            if wrong == _TAKEN and settle is not None:
                settle()
                wrong, before = None, state()
            if wrong is None and (after := state()) != before:
                wrong = f"changed {before} to {after}"
            if wrong is not None:
                problems.append(f"{call_name}({name}): {wrong}")
                before = state()
    return problems


KINDS = over(Setup("base"), Setup("subprocess"))
V2_KINDS = over(Setup("base_v2"), Setup("subprocess_v2"))


def check_a_running_manager(world: World, setup: Setup, calls: dict[str, Call]) -> None:
    manager = world.make(setup, 2)
    first = manager.ready_obs

    def state() -> Any:
        written = [os.stat(journal_path(world.folder, i)).st_size for i in range(2)]
        return manager.stats(), manager.env_states, manager.ready_obs_id, written

    assert problems_of(calls, manager, state) == []
    assert first is not None
    manager.step({0: 1, 1: 2})
    assert [world.actions(i) for i in range(2)] == [[1], [2]]
    manager.close()


@KINDS
def test_odd_arguments_are_refused(world: World, setup: Setup) -> None:
    check_a_running_manager(world, setup, CALLS)


@pytest.mark.v2
@V2_KINDS
def test_odd_arguments_are_refused_by_v2_kinds(world: World, setup: Setup) -> None:
    check_a_running_manager(world, setup, ROW_CALLS)


@KINDS
def test_odd_arguments_while_an_action_is_under_way(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)

    def state() -> Any:
        return manager.stats()["outstanding"], manager.stats()["timesteps"], manager.env_states

    receiving = {name: call for name, call in CALLS.items() if name.startswith("recv")}
    for sent in ({1: 3}, {0: 3, 1: 3}):  # one of them, and all
        ready_all(manager)
        manager.send(sent)
        assert problems_of(receiving, manager, state) == []
        assert [*manager.recv(len(sent))] == [*sent]
    manager.call_async("scaled", 2)
    waiting = {"call_wait": Call(lambda m, v: m.call_wait(v), SECONDS)}
    assert problems_of(waiting, manager, state) == []
    assert len(manager.call_wait()) == 2


class Still(gymnasium.Env[Any, Any]):
    """Nothing ever happens in it, whatever the action."""

    observation_space = Box(0.0, 1.0, (2,), np.float32)

    def __init__(self, action: str) -> None:
        self.action_space = ACTIONS[action]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.ones(2, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("action", ["dict", "tuple", "box"])
@KINDS
def test_odd_actions_of_other_spaces_are_refused(world: World, setup: Setup, action: str) -> None:
    manager = world.make(setup, env_fn=[partial(Still, action)] * 2)
    ready_all(manager)
    parts = ("turn", "push")
    calls = {
        "step": Call(lambda m, v: m.step({0: v})),
        "step, parts": Call(lambda m, v: m.step({0: dict.fromkeys(parts, v)})),
        "step, keys": Call(lambda m, v: m.step({0: OddMapping((v, 0), ("push", v))})),
        "step, tuple": Call(lambda m, v: m.step({0: (v, v)})),
        "send_arrays": Call(lambda m, v: m.send_arrays([0, 1], v)),
        "send_arrays, parts": Call(lambda m, v: m.send_arrays([0, 1], dict.fromkeys(parts, v))),
        "send_arrays, tuple": Call(lambda m, v: m.send_arrays([0, 1], (v, v))),
    }

    def state() -> Any:
        return manager.stats(), manager.env_states

    def settle() -> None:
        while manager.stats()["outstanding"]:
            manager.recv()

    assert problems_of(calls, manager, state, settle) == []
    manager.step(manager.random_action())


def test_odd_arguments_of_adapters_and_statistics_are_refused_or_taken() -> None:
    config = {"type": "base", "normalize_obs": True}
    manager = create_env_manager(config, env_fn=[partial(Still, "box")] * 2)
    vector, statistics = as_gymnasium(manager), manager.normalization
    vector.reset(seed=0)
    puffer = as_puffer(create_env_manager({"type": "base"}, env_fn=[partial(Still, "box")] * 2))
    puffer.async_reset(0)
    puffer.recv()
    good = statistics.state_dict(episodes=True)

    def changed(key: str, value: Any) -> dict[str, Any]:
        return {**good, "reward": {**good["reward"], key: value}}

    calls = {
        "reset, seed": Call(lambda m, v: vector.reset(seed=v)),
        "reset, options": Call(lambda m, v: vector.reset(options=v)),
        "step": Call(lambda m, v: vector.step([v, v])),
        "puffer, send": Call(lambda m, v: puffer.send(v)),
        "puffer, seed": Call(lambda m, v: puffer.async_reset(v)),
        "load": Call(lambda m, v: statistics.load_state_dict(v)),
        **{
            f"load, {key}": Call(lambda m, v, key=key: statistics.load_state_dict({**good, key: v}))
            for key in good
        },
        "load, n_seen": Call(lambda m, v: statistics.load_state_dict(changed("n_seen", v))),
        "load, mean": Call(lambda m, v: statistics.load_state_dict(changed("mean", v))),
    }

    def state() -> Any:
        return manager.stats()["outstanding"], manager.env_states, repr(statistics.state_dict())

    assert problems_of(calls, manager, state, lambda: None) == []
    vector.close()
    puffer.close()


# -- before there is a manager --------------------------------------------------------------------

UNUSED = BaseEnvManager([int])
NORMALIZED = BaseEnvManager([int], {"normalize_obs": True})
FRAME = np.zeros((2, 3, 3), np.uint8)


def created(**arguments: Any) -> Any:
    return create_env_manager(**{"cfg": {"type": "base"}, "env_fn": [int], **arguments})


CALLABLE = takes("class", "function")
NO_LIST = takes("empty list", "empty tuple", "empty array", "None")
FREE_CALLS = {
    "launch": Call(lambda m, v: UNUSED.launch(v), takes(EMPTY, "None", "dict of None values")),
    "create_env_manager": Call(lambda m, v: created(cfg=v), takes(EMPTY, "None")),
    "create_env_manager, type": Call(lambda m, v: created(cfg={"type": v})),
    "create_env_manager, key": Call(lambda m, v: created(cfg=OddMapping(("type", "base"), (v, 1)))),
    "create_env_manager, env_fn": Call(lambda m, v: created(env_fn=v)),
    "create_env_manager, env_fn of one": Call(lambda m, v: created(env_fn=[v]), CALLABLE),
    "create_env_manager, observation_space": Call(
        lambda m, v: created(observation_space=v), takes("None")
    ),
    "create_env_manager, action_space": Call(lambda m, v: created(action_space=v), takes("None")),
    "create_env_manager, reward_space": Call(lambda m, v: created(reward_space=v), takes("None")),
    "BaseEnvManager": Call(lambda m, v: BaseEnvManager(v)),
    "BaseEnvManager, cfg": Call(lambda m, v: BaseEnvManager([int], v), takes(EMPTY, "None")),
    "get_env_manager_cls": Call(lambda m, v: get_env_manager_cls(v)),
    "get_env_manager_cls, type": Call(lambda m, v: get_env_manager_cls({"type": v})),
    "get_env_manager_cls, import_names": Call(
        lambda m, v: get_env_manager_cls({"type": "base", "import_names": v}), NO_LIST
    ),
    "make": Call(lambda m, v: make(v, 2, "base"), CALLABLE),
    "make, env_num": Call(
        lambda m, v: make(int, v, "base"), takes("None", "one", "np.int64", "np.uint8")
    ),
    "make, env_num of an id": Call(
        lambda m, v: make("CartPole-v1", v, "base"), takes("None", "one", "np.int64", "np.uint8")
    ),
    "make, type": Call(lambda m, v: make(int, 2, v)),
    "make, env_kwargs": Call(
        lambda m, v: make("CartPole-v1", 2, "base", env_kwargs=v), takes(EMPTY, "None")
    ),
    "make, env_kwargs of a function": Call(
        lambda m, v: make(int, 2, "base", env_kwargs=v), takes(EMPTY, "None")
    ),
    "make, wrappers": Call(lambda m, v: make("CartPole-v1", 2, "base", wrappers=v), NO_LIST),
    "make, wrapper": Call(lambda m, v: make("CartPole-v1", 2, "base", wrappers=[v]), CALLABLE),
    "make, wrappers of a function": Call(lambda m, v: make(int, 2, "base", wrappers=v), NO_LIST),
    "load_config": Call(lambda m, v: load_config(v), EMPTY),
    "load_config, section": Call(lambda m, v: load_config(OddMapping((v, {})))),
    "load_config, manager": Call(lambda m, v: load_config({"manager": v}), takes(EMPTY, "None")),
    "load_config, env": Call(lambda m, v: load_config({"env": v}), takes(EMPTY, "None")),
    "load_config, collect": Call(lambda m, v: load_config({"collect": v}), takes(EMPTY, "None")),
    "load_config, set": Call(lambda m, v: load_config({}, set=v), takes(NOTHING, EMPTY)),
    "load_config, set one": Call(lambda m, v: load_config({}, set=[v])),
    "load_config, allow_imports": Call(
        lambda m, v: load_config("configs/base.yaml", allow_imports=v), NO_LIST
    ),
    "load_config, allow_imports one": Call(
        lambda m, v: load_config("configs/base.yaml", allow_imports=[v]), NAME
    ),
    "Snapshot.load": Call(lambda m, v: Snapshot.load(v), FOLDER),
    "Snapshot.save": Call(lambda m, v: Snapshot((), b"").save(v), FOLDER),
    "restore": Call(lambda m, v: UNUSED.restore(v), FOLDER),
    "load_state_dict": Call(lambda m, v: NORMALIZED.normalization.load_state_dict(v)),
    "dump_on_signal": Call(
        lambda m, v: dump_on_signal(v), takes("None", "True", "one", "np.int64", "np.uint8")
    ),
    "dump_on_signal, file": Call(lambda m, v: dump_on_signal(file=v), takes(FOLDER, "None")),
    "tile_images": Call(lambda m, v: tile_images(v)),
    "tile_images, one": Call(lambda m, v: tile_images({0: FRAME, 1: v})),
    "tile_images, columns": Call(
        lambda m, v: tile_images([FRAME], v), takes("None", "one", "huge", "2**63")
    ),
    "AgentRows, reward": Call(lambda m, v: AgentRows(Relay(), v)),
    "as_gymnasium, autoreset_mode": Call(lambda m, v: as_gymnasium(UNUSED, v)),
    "as_gymnasium, on_failure": Call(
        lambda m, v: as_gymnasium(UNUSED, on_failure=v), takes("None")
    ),
    "as_gymnasium, info_format": Call(lambda m, v: as_gymnasium(UNUSED, info_format=v)),
    "EnvmgrVectorEnv": Call(lambda m, v: EnvmgrVectorEnv(v, type="base")),
    "EnvmgrVectorEnv, context": Call(lambda m, v: EnvmgrVectorEnv([int], context=v), takes("None")),
    "register": Call(lambda m, v: ENV_MANAGER_REGISTRY.register(v), FOLDER - {"path"}),
    "register, what": Call(lambda m, v: ENV_MANAGER_REGISTRY.register("base")(v)),
    "registry, get": Call(lambda m, v: ENV_MANAGER_REGISTRY.get(v)),
    "registry, build": Call(lambda m, v: ENV_MANAGER_REGISTRY.build(v)),
    "registry, source": Call(lambda m, v: ENV_MANAGER_REGISTRY.source(v)),
}


def test_odd_arguments_of_what_makes_managers_are_refused() -> None:
    def state() -> Any:
        return ENV_MANAGER_REGISTRY.keys(), UNUSED.stats(), UNUSED.closed

    assert problems_of(FREE_CALLS, None, state) == []


@pytest.mark.parametrize("part", range(4))
def test_odd_values_of_config_keys_are_refused_or_taken(part: int) -> None:
    calls = {
        key: Call(lambda m, v, key=key: created(cfg={"type": "base", key: v}, env_fn=[int] * 2))
        for key in list(BaseEnvManager.default_config())[part::4]
    }
    assert calls
    assert problems_of(calls, None, lambda: None, lambda: None) == []
