"""Values that do not fit, on their way from the env or to it: F9 to F11, and F38."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Sequence, Tuple

from envmgr import EnvState
from envmgr.errors import (
    ActionError,
    EnvCrash,
    EnvFailure,
    EnvProtocolError,
    FailuresExhaustedError,
    LaunchError,
    UnknownEnvError,
)
from tests.contract.envs import Do, ScriptedEnv, seen
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_BLOCK_SHARED,
    INLINE,
    SOME_BLOCK,
    SOME_MESSAGE,
    SOME_MESSAGE_SHARED,
    Setup,
    World,
    over,
    ready_all,
    step_all,
)
from tests.faults.others import check_each
from tests.faults.traffic import sent_by

PACKED = ALL_BLOCK._replace(num_workers=2)
processes = over(ALL_BLOCK, SOME_MESSAGE, SOME_BLOCK, PACKED)
everywhere = over(INLINE, ALL_BLOCK, SOME_BLOCK, SOME_MESSAGE_SHARED)
# Inline, through the shared block, and by messages: these take ways of their own in the code.
# By fork, which starts fastest: what started a worker has no part in this.
SETUPS = (
    INLINE,
    Setup("subprocess", "fork", True),
    Setup("async_subprocess", "fork", False),
    Setup("subprocess", "fork", True, num_workers=1),
)
each_way = over(*SETUPS)


# -- F9: pickling ---------------------------------------------------------------------------------

PICKLES: dict[Do, tuple[type[EnvFailure], bool, str]] = {
    Do.KILL_IN_PICKLE: (EnvCrash, True, "killed by SIGKILL"),
    Do.EXIT_IN_PICKLE: (EnvCrash, True, "sys.exit(5)"),
    Do.UNPICKLABLE_INFO: (EnvProtocolError, False, "this cannot be pickled"),
    Do.ERROR_IN_UNPICKLE: (EnvProtocolError, True, "this cannot be unpickled"),
    Do.EXIT_IN_UNPICKLE: (EnvProtocolError, True, "SystemExit"),
}


@pytest.mark.parametrize("host_lost", [True, False], ids=["and-its-host", "alone"])
@over(ALL_BLOCK, SOME_MESSAGE, SOME_BLOCK)
def test_f09_an_info_that_does_harm_on_its_way_costs_its_env(
    tmp_path: Path, setup: Setup, host_lost: bool
) -> None:
    actions = [action for action, (_, lost, _) in PICKLES.items() if lost is host_lost]
    found = check_each(tmp_path, setup, actions, host_lost=host_lost)
    for action, timestep in found.items():
        kind, _, text = PICKLES[action]
        assert type(timestep.info["error"]) is kind, action
        assert text in str(timestep.info["error"])


class OddSpaces(ScriptedEnv):
    """Has a space that cannot be sent, or fails where it arrives."""

    metadata: dict[str, Any] = {}  # noqa: RUF012 - as envs have it

    def __init__(self, env_id: int, folder: str, what: str) -> None:
        super().__init__(env_id, folder)
        space = copy.deepcopy(ScriptedEnv.observation_space)
        space.odd = _Odd(what)  # type: ignore[attr-defined]
        self.observation_space = space


class _Odd:
    def __init__(self, what: str) -> None:
        self._what = what

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        if self._what == "pickle":
            raise TypeError("this cannot be pickled")
        return _fail, ()


def _fail() -> Any:
    raise TypeError("this cannot be unpickled")


@pytest.mark.parametrize("what", ["pickle", "unpickle"])
@over(ALL_BLOCK, SOME_MESSAGE)
def test_f09_a_space_that_cannot_be_sent_fails_the_launch(
    world: World, setup: Setup, what: str
) -> None:
    good, _ = world.factories(2)
    env_fn = [good, partial(OddSpaces, 1, world.folder, what)]
    manager = world.make(setup, launch=False, env_fn=env_fn)
    with pytest.raises(LaunchError, match=f"cannot be {what}d") as raised:
        manager.launch()
    assert [*raised.value.failures] == [1]
    assert isinstance(raised.value.failures[1], EnvProtocolError)


# -- F10: observations ----------------------------------------------------------------------------

MALFORMED = (
    Do.BAD_SHAPE,
    Do.BAD_DTYPE,
    Do.BAD_STRUCTURE,
    Do.NO_OBSERVATION,
    Do.NOT_A_TIMESTEP,
)


@everywhere
def test_f10_a_malformed_step_costs_its_env_one_timestep(tmp_path: Path, setup: Setup) -> None:
    for action, timestep in check_each(tmp_path, setup, MALFORMED, host_lost=False).items():
        error = timestep.info["error"]
        assert (type(error), error.during) == (EnvProtocolError, "step"), action


SPACES: dict[str, Any] = {
    "vector": Box(-1.0, 1.0, (3,), np.float32),
    "scalar": Box(-1.0, 1.0, (), np.float64),
    "number": Discrete(5),
    "dict": Dict({"x": Box(-1.0, 1.0, (2,), np.float32), "n": Discrete(3)}),
    "free form": Tuple((Sequence(Discrete(4)), Box(-np.inf, np.inf, (2,), np.float64))),
}
BAD: dict[str, dict[str, Any]] = {
    "vector": {
        "shape": np.zeros(4, np.float32),
        "one for all": np.zeros(1, np.float32),
        "dtype": np.zeros(3, np.complex64),
        "structure": {"x": np.zeros(3, np.float32)},
        "text": "north",
        "none": None,
    },
    "scalar": {"shape": np.zeros(1), "none": None},
    "number": {"dtype": 0.5, "none": None},
    "dict": {
        "shape": {"x": np.zeros(3, np.float32), "n": 1},
        "missing": {"x": np.zeros(2, np.float32)},
        "more": {"x": np.zeros(2, np.float32), "n": 1, "m": 2},
        "structure": (np.zeros(2, np.float32), 1),
        "none inside": {"x": None, "n": 1},
        "none": None,
    },
    "free form": {"structure": ((1,),), "shape": ((1,), np.zeros(3)), "none": None},
}


class Odd(gymnasium.Env[Any, Any]):
    """Returns one odd observation, in its second episode: from a step, or from the reset.

    Args:
        space: what its observations should be of.
        odd: the observation.
        where: "step" or "reset".
    """

    action_space = Discrete(2)

    def __init__(self, space: Any, odd: Any, where: str) -> None:
        self.observation_space = copy.deepcopy(space)
        self.observation_space.seed(0)
        self._odd = odd
        self._where = where
        self._episode = -1
        self._step = 0

    def _observe(self, where: str) -> Any:
        odd = (self._episode, self._step) == (1, 1 if where == "step" else 0)
        return self._odd if odd and where == self._where else self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._episode += 1
        self._step = 0
        return self._observe("reset"), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._observe("step"), float(self._episode), self._step == 2, False, {}


def failures_with(manager: Any, n_steps: int = 6) -> dict[int, list[Any]]:
    """Step all envs so often; return the errors of their abnormal timesteps, by env_id."""
    errors: dict[int, list[Any]] = {i: [] for i in range(manager.env_num)}
    for _ in range(n_steps):
        timesteps = step_all(manager, dict.fromkeys(ready_all(manager), 0))
        for i, timestep in timesteps.items():
            if "abnormal" in timestep.info:
                errors[i].append(timestep.info["error"])
    ready_all(manager)
    return errors


def failures_with_arrays(manager: Any, n_steps: int = 6) -> dict[int, list[Any]]:
    """As `failures_with`, by arrays."""
    env_ids = np.arange(manager.env_num)
    errors: dict[int, list[Any]] = {i: [] for i in range(manager.env_num)}
    for _ in range(n_steps):
        manager.ready_arrays(env_ids=env_ids.tolist())
        manager.send_arrays(env_ids, np.zeros_like(env_ids))
        found: dict[int, Any] = {}
        while len(found) < manager.env_num:
            batch = manager.recv_arrays()
            found.update(zip(batch.env_ids.tolist(), batch.infos, strict=True))
        for i, info in found.items():
            if "abnormal" in info:
                errors[i].append(info["error"])
    manager.ready_arrays(env_ids=env_ids.tolist())
    return errors


def check_failures(manager: Any, errors: dict[int, list[Any]], wheres: list[str]) -> None:
    """Check that every env has failed where its odd value was: "step", "reset" or "nowhere"."""
    stats = manager.stats()
    for i, where in enumerate(wheres):
        # After a failed step the object goes on, and is not odd again; after a failed reset there
        # is a new one, which is odd in its second episode as well.
        found = [(type(error), error.during) for error in errors[i]]
        assert found == ([(EnvProtocolError, "step")] if where == "step" else []), f"env {i}"
        assert (i in stats["failures_by_env"]) == (where != "nowhere"), f"env {i}"
    assert stats["failures_by_kind"].keys() == {"EnvProtocolError"}


@pytest.mark.parametrize("space", BAD)
@each_way
def test_f10_malformed_observations_of_any_space_are_refused(
    world: World, setup: Setup, space: str
) -> None:
    cases = [(bad, where) for bad in BAD[space].values() for where in ("step", "reset")]
    cases.append((None, "nowhere"))
    env_fn = [partial(Odd, SPACES[space], bad, where) for bad, where in cases]
    manager = world.make(setup, env_fn=env_fn, max_failures=99, failure_window_s=0.001)
    check_failures(manager, failures_with(manager), [where for _, where in cases])


WAYS: dict[str, dict[str, Any]] = {
    "arrays": {},
    "inplace": {"reset_inplace": True},
    "views": {"copy_on_get": False},
}


WHERES = ["step", "reset", "nowhere"]


def some_of(names: list[str], setup: Setup, way: str) -> list[str]:
    """Return every other one where there are workers: each meets every way and every setup."""
    first = (SETUPS.index(setup) + ["plain", *WAYS].index(way)) % 2
    return names if setup is INLINE else names[first::2]


@pytest.mark.parametrize("way", WAYS)
@each_way
def test_f10_on_every_way_to_the_trainer(world: World, setup: Setup, way: str) -> None:
    for space in some_of(["vector", "dict"], setup, way):
        env_fn = [partial(Odd, SPACES[space], BAD[space]["shape"], where) for where in WHERES]
        manager = world.make(setup, env_fn=env_fn, max_failures=9, **WAYS[way])
        run = failures_with_arrays if way == "arrays" else failures_with
        check_failures(manager, run(manager), WHERES)
        manager.close()


@over(ALL_BLOCK, SOME_BLOCK, ALL_BLOCK_SHARED)
def test_f10_nothing_of_it_reaches_the_shared_memory(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, copy_on_get=False, max_failures=99)
    for k, action in enumerate(MALFORMED):
        ready_all(manager)
        view = step_all(manager, {0: 1, 1: 2})[0].obs
        before = view.tobytes()
        timestep = step_all(manager, {0: action, 1: 3})[0]
        assert timestep.obs.tobytes() == before, action
        assert view.tobytes() == before, f"the slot of the newest observation was written: {action}"
        assert seen(ready_all(manager)[0])[2:4] == (k + 1, 0)
        assert seen(ready_all(manager)[1])[2:5] == (0, 2 * k + 2, 3)


# -- F11: numbers, rewards, infos -----------------------------------------------------------------

NON_FINITE = (
    Do.NAN_OBSERVATION,
    Do.INF_OBSERVATION,
    Do.NAN_REWARD,
    Do.INF_REWARD,
    Do.ARRAY_REWARD,
)


def is_finite(timestep: Any) -> bool:
    return bool(np.isfinite(timestep.obs).all() and np.isfinite(timestep.reward).all())


@each_way
def test_f11_non_finite_numbers_are_delivered_by_default(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1)
    ready_all(manager)
    for action in NON_FINITE:
        timestep = step_all(manager, {0: action})[0]
        assert not timestep.done, action
        assert not is_finite(timestep), action


@everywhere
def test_f11_non_finite_numbers_are_failures_of_their_env(tmp_path: Path, setup: Setup) -> None:
    found = check_each(tmp_path, setup, NON_FINITE, host_lost=False, nan_policy="abnormal")
    for action, timestep in found.items():
        error = timestep.info["error"]
        assert (type(error), error.during) == (EnvProtocolError, "step"), action
        assert "nan_policy" in str(error)


@over(INLINE, SOME_BLOCK, ALL_BLOCK_SHARED)
def test_f11_non_finite_numbers_are_raised(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, nan_policy="raise", max_failures=99)
    for action in NON_FINITE:
        ready_all(manager)
        with pytest.raises(EnvProtocolError, match=r"env 0.*nan_policy"):
            step_all(manager, {0: action})
        assert not manager.closed, action
        assert manager.recv()[0].info["abnormal"], f"the action has lost its timestep: {action}"
        ready_all(manager)
        assert "abnormal" not in step_all(manager, {1: 1})[1].info, action


NAN = float("nan")
ODD_NUMBERS: dict[str, Any] = {
    "vector": np.array([0.0, np.inf, 0.0], np.float32),
    "scalar": np.array(NAN),
    "dict": {"x": np.array([NAN, 0.0], np.float32), "n": 1},
    "free form": ((1,), np.array([0.0, -np.inf])),
}


OPEN = Box(-np.inf, np.inf, (3,), np.float32)
"""Without bounds, so that the number is all there is to object to."""


@pytest.mark.parametrize("way", ["plain", *WAYS])
@each_way
def test_f11_in_observations_of_any_space_of_steps_and_resets(
    world: World, setup: Setup, way: str
) -> None:
    for name in some_of([*ODD_NUMBERS], setup, way):
        odd = ODD_NUMBERS[name]
        space = {**SPACES, "vector": OPEN}[name]
        env_fn = [partial(Odd, space, odd, where) for where in WHERES]
        cfg = {"max_failures": 9, **WAYS.get(way, {})}
        run = failures_with_arrays if way == "arrays" else failures_with
        manager = world.make(setup, env_fn=env_fn, nan_policy="abnormal", **cfg)
        check_failures(manager, run(manager), WHERES)
        manager.close()


@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize("way", ["plain", "arrays", "inplace"])
@over(INLINE, SOME_BLOCK)
def test_f11_raised_where_it_is_noticed(world: World, setup: Setup, way: str, where: str) -> None:
    env_fn = [partial(Odd, SPACES["scalar"], np.array(NAN), each) for each in (where, "nowhere")]
    manager = world.make(setup, env_fn=env_fn, nan_policy="raise", **WAYS.get(way, {}))
    with pytest.raises(EnvProtocolError, match=r"env 0.*nan_policy"):
        (failures_with_arrays if way == "arrays" else failures_with)(manager)
    assert not manager.closed


@over(INLINE, ALL_BLOCK, SOME_MESSAGE)
def test_f11_a_first_observation_that_is_not_finite_fails_the_launch(
    world: World, setup: Setup
) -> None:
    class AlwaysNan(Odd):
        def _observe(self, where: str) -> Any:
            return np.array(NAN)

    env_fn = [partial(AlwaysNan, SPACES["scalar"], None, "nowhere")]
    for policy in ("abnormal", "raise"):
        manager = world.make(setup, env_fn=env_fn, launch=False, nan_policy=policy)
        with pytest.raises(LaunchError, match="nan_policy"):
            manager.launch()
        assert manager.env_states == {0: EnvState.VOID}


ODD_RESULTS = {
    Do.TEXT_REWARD: "the reward is 'much', not a number",
    Do.NO_REWARD: "the reward is None",
    Do.INFO_NOT_A_DICT: "info",
}


@everywhere
def test_f11_rewards_that_are_no_numbers_and_infos_that_are_no_dicts(
    tmp_path: Path, setup: Setup
) -> None:
    for action, timestep in check_each(tmp_path, setup, [*ODD_RESULTS], host_lost=False).items():
        error = timestep.info["error"]
        assert (type(error), error.during) == (EnvProtocolError, "step"), action
        assert ODD_RESULTS[action] in str(error)


class OddReset(Odd):
    """Has a reset whose info is no dict."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = super().reset(seed=seed, options=options)
        return obs, ("no dict" if self._episode == 1 else info)


@each_way
def test_f11_an_info_of_a_reset_that_is_no_dict(world: World, setup: Setup) -> None:
    env_fn = [partial(kind, SPACES["vector"], None, "nowhere") for kind in (OddReset, Odd)]
    manager = world.make(setup, env_fn=env_fn, max_failures=9)
    check_failures(manager, failures_with(manager), ["reset", "nowhere"])


@over(INLINE, ALL_BLOCK)
def test_f11_an_env_that_never_gives_numbers_ends_as_the_budget_says(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 1, nan_policy="abnormal", max_failures=2)
    for _ in range(3):
        ready_all(manager)
        step_all(manager, {0: Do.NAN_REWARD})
    with pytest.raises(FailuresExhaustedError, match="nan_policy"):
        _ = manager.ready_obs


# -- F38: actions ---------------------------------------------------------------------------------


class TakesAnything(gymnasium.Env[Any, Any]):
    """Has the action space that it is given."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float64)

    def __init__(self, action_space: Any) -> None:
        self.action_space = copy.deepcopy(action_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        return np.ones(1), 1.0, False, False, {}


PUSH = Box(-1.0, 1.0, (2,), np.float32)
ACTIONS: dict[str, tuple[Any, Any, Any]] = {  # space, a good action, a bad one
    "number outside": (Discrete(3), 2, 3),
    "negative": (Discrete(3), 2, -1),
    "NaN for a number": (Discrete(3), 2, NAN),
    "text": (Discrete(3), 2, "left"),
    "none": (Discrete(3), 2, None),
    "shape": (PUSH, np.zeros(2, np.float32), np.zeros(3, np.float32)),
    "dtype": (PUSH, np.zeros(2, np.float32), np.array(["a", "b"])),
    "missing key": (Dict({"a": Discrete(2), "b": PUSH}), {"a": 0, "b": np.zeros(2)}, {"a": 0}),
}
STRICT: dict[str, tuple[Any, Any, Any]] = {
    "NaN": (PUSH, np.zeros(2, np.float32), np.array([0.0, NAN], np.float32)),
    "infinite": (PUSH, np.zeros(2, np.float32), np.array([np.inf, 0.0], np.float32)),
    "out of bounds": (PUSH, np.zeros(2, np.float32), np.array([0.0, 1.5], np.float32)),
}


@pytest.mark.parametrize(
    ("case", "check"),
    [*((case, True) for case in ACTIONS), *((case, "strict") for case in STRICT)],
    ids=str,
)
@over(INLINE, ALL_BLOCK)
def test_f38_an_action_that_does_not_fit_is_refused_before_any_is_sent(
    world: World, setup: Setup, case: str, check: Any
) -> None:
    space, good, bad = {**ACTIONS, **STRICT}[case]
    env_fn = [partial(TakesAnything, space)] * 2
    manager = world.make(setup, env_fn=env_fn, check_actions=check)
    ready_all(manager)
    for attempt in (
        lambda: manager.step({0: good, 1: bad}),
        lambda: manager.send({0: good, 1: bad}),
        lambda: manager.send_arrays([0, 1], [good, bad]),
    ):
        with sent_by(manager) as sent, pytest.raises(ActionError):
            attempt()
        assert sent == []
    assert manager.stats()["actions"] == 0
    assert len(step_all(manager, {0: good, 1: good})) == 2


@over(INLINE, ALL_BLOCK)
def test_f38_a_wrong_count_of_actions_is_refused(world: World, setup: Setup) -> None:
    manager = world.make(setup, env_fn=[partial(TakesAnything, PUSH)] * 3)
    ready_all(manager)
    rows = np.zeros((3, 2), np.float32)
    for env_ids, batch, error in (
        ([0, 1], rows, ActionError),
        ([0, 1, 2], rows[:2], ActionError),
        ([0, 1, 1], rows, ActionError),
        ([0, 1, 3], rows, UnknownEnvError),
        ([0, 1, 2], None, ActionError),
    ):
        with sent_by(manager) as sent, pytest.raises(error):
            manager.send_arrays(env_ids, batch)
        assert sent == []
    assert manager.stats()["actions"] == 0
