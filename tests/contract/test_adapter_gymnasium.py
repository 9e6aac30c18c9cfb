"""A manager as a Gymnasium vector env behaves as Gymnasium's own, and better when envs fail."""

import contextlib
import functools
import gc
import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, OneOf, Sequence, Text, Tuple
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import SyncVectorEnv

from envmgr import create_env_manager
from envmgr.errors import ActionError, ConfigError, EnvCrash, EnvRaised
from tests.cases import for_each
from tests.contract.envs import SampleEnv

pytest.importorskip("gymnasium", minversion="1.1")

from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
    ResetNeeded,
)
from gymnasium.vector import AutoresetMode

from envmgr import as_gymnasium, interruptible
from envmgr.adapters.gymnasium import (
    EnvmgrVectorEnv,
    ManagerVectorEnv,
    RecordEpisodeStatistics,
    vector_entry_point,
)

RAISE, EXIT = 5, 6


class ShortEnv(gymnasium.Env[Any, Any]):
    """Draws all it gives from its own generator; its episodes are short and of different lengths.

    Args:
        gate: a named pipe; a step or a reset reads it, as told by `waits`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012 - as envs have it
    observation_space = Dict({"x": Box(-10, 10, (2,), np.float64), "n": Discrete(100)})
    action_space = Discrete(8)
    render_mode = "rgb_array"

    def __init__(self, gate: Path | None = None) -> None:
        self.gate = gate
        self.waits = ""
        self.colour = 3

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._wait("reset")
        self.steps = 0
        self.length = int(self.np_random.integers(2, 5)) + (options or {}).get("longer", 0)
        return self._obs(), {"length": self.length}

    def step(self, action: Any) -> Any:
        self._wait("step")
        if action == RAISE:
            raise ValueError("of the env")
        if action == EXIT:
            os._exit(3)
        self.steps += 1
        ended = self.steps >= self.length
        info = {"at": self.steps, "deep": {"draw": float(self.np_random.random())}}
        if self.steps % 2:
            info = {"text": "odd", "array": np.arange(self.steps, self.steps + 2)}
        return self._obs(), float(action), ended and action < 2, ended and action >= 2, info

    def _obs(self) -> Any:
        return {"x": self.np_random.uniform(-1, 1, 2), "n": self.steps}

    def _wait(self, where: str) -> None:
        if self.waits == where:
            assert self.gate is not None
            self.gate.read_bytes()

    def render(self) -> Any:
        return np.full((2, 2, 3), self.colour, np.uint8)

    def painted(self, colour: int, *, more: int = 0) -> int:
        return colour + more

    def told(self, **arguments: Any) -> dict[str, Any]:
        return arguments

    @property
    def square(self) -> Any:
        return functools.partial(pow, self.colour, 2)


class Bounded(ShortEnv):
    def __init__(self, high: float) -> None:
        super().__init__()
        self.observation_space = Dict({"x": Box(-high, high, (2,), np.float64), "n": Discrete(100)})


class Told(gymnasium.Env[Any, Any]):
    """Says what it is told to say, in episodes of a given length."""

    observation_space = Box(0, 100, (1,), np.float64)
    action_space = Discrete(2)
    render_mode = None

    def __init__(
        self, length: int = 1, reward: Any = 1.0, begins: Any = None, steps: Any = None
    ) -> None:
        self.length, self.reward, self.begins, self.steps = length, reward, begins, steps

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return self.np_random.uniform(0, 1, 1), dict(self.begins or {})

    def step(self, action: Any) -> Any:
        self.at += 1
        ended = self.at >= self.length
        return np.ones(1), self.reward, ended, False, dict(self.steps or {})

    def render(self) -> Any:
        return f"after step {self.at}"

    def close(self) -> None:
        CLOSED.append(self)


CLOSED: list[Told] = []


N = 3
_LEAVES: list[Any] = [
    Box(-1, 1, (2,), np.float32),
    Box(-1, 1, (0,), np.float32),
    Discrete(5),
    MultiBinary(3),
    Text(4),
    Graph(Box(-1, 1, (2,)), Discrete(3)),
    Graph(Discrete(4), None),
]


def random_space(chance: random.Random, depth: int = 2) -> Any:
    """Return a space of any class, within others of any class."""
    kind = chance.choice([None, Tuple, Dict, Sequence, OneOf]) if depth else None
    if kind is None:
        return chance.choice(_LEAVES)
    parts = [random_space(chance, depth - 1) for _ in range(chance.randint(1, 3))]
    if kind is Dict:
        return Dict(dict(zip("abc", parts, strict=False)))
    return kind(parts[0] if kind is Sequence else parts)


SPACES = [
    *_LEAVES,
    *(Tuple((leaf,)) for leaf in _LEAVES),
    *(Sequence(leaf) for leaf in _LEAVES),
    *(Dict({"a": leaf, "b": Discrete(2)}) for leaf in _LEAVES),
    *(random_space(random.Random(seed)) for seed in range(25)),
]


class Sampled(SampleEnv):
    """Gives numbers where its space has a number of a fixed place, as most envs do."""

    def _sample(self) -> Any:
        return with_numbers(self.observation_space, super()._sample())


def with_numbers(space: Any, value: Any) -> Any:
    if isinstance(space, Discrete):
        return int(value)
    if isinstance(space, Dict):
        return {key: with_numbers(part, value[key]) for key, part in space.items()}
    if isinstance(space, Tuple):
        return tuple(map(with_numbers, space, value))
    return value


@pytest.fixture
def vector_env() -> Iterator[Callable[..., ManagerVectorEnv]]:
    made: list[ManagerVectorEnv] = []

    def make(
        cfg: dict[str, Any] | None = None,
        mode: str = "NextStep",
        *,
        env: Callable[[], Any] = ShortEnv,
        n: int = N,
        **kwargs: Any,
    ) -> ManagerVectorEnv:
        given = {"type": "base", "auto_reset": mode != "Disabled", **(cfg or {})}
        envs = as_gymnasium(create_env_manager(given, env_fn=[env] * n), mode, **kwargs)
        made.append(envs)
        return envs

    yield make
    for envs in made:
        envs.close()


def same(ours: Any, theirs: Any) -> bool:
    return bool(data_equivalence(ours, theirs, exact=True))


@pytest.mark.parametrize(
    ("cfg", "mode"),
    [
        ({}, "NextStep"),
        ({}, "SameStep"),
        ({}, "Disabled"),
        ({"type": "subprocess", "num_workers": 2}, "NextStep"),
        ({"type": "subprocess", "reset_inplace": True, "copy_on_get": False}, "SameStep"),
        ({"type": "async_subprocess", "num_workers": 1}, "NextStep"),
    ],
)
def test_everything_is_bit_for_bit_what_gymnasiums_own_gives(
    vector_env: Callable[..., ManagerVectorEnv], cfg: dict[str, Any], mode: str
) -> None:
    ours = vector_env(cfg, mode)
    theirs = SyncVectorEnv([ShortEnv] * N, autoreset_mode=AutoresetMode(mode))
    assert ours.observation_space == theirs.observation_space
    assert ours.single_action_space == theirs.single_action_space
    assert ours.action_space == theirs.action_space
    assert ours.metadata == theirs.metadata
    actions = np.random.default_rng(0)
    assert same(ours.reset(seed=3), theirs.reset(seed=3))
    ended, resets = np.zeros(N, dtype=bool), 0
    for step in range(60):
        if step > 20 and not resets and ended.any() and not ended.all():
            if mode == "NextStep":  # its resets have ended by now
                ours.manager.ready_arrays(range(N))
            assert same(ours.reset(), theirs.reset())  # without a seed: no env is reset twice
            ended[:] = False
            resets += 1
        if step == 40:
            seeds = [7, None, 9]
            assert same(ours.reset(seed=seeds), theirs.reset(seed=seeds))
            ended[:] = False
        if mode == "Disabled" and ended.any():
            results = [v.reset(options={"reset_mask": ended.copy()}) for v in (ours, theirs)]
            assert same(*results)
        batch = actions.integers(0, 5, N)
        found, expected = ours.step(batch), theirs.step(batch)
        assert same(found, expected), (step, found, expected)
        assert found[1].dtype == np.float64
        ended = found[2] | found[3]
    assert resets == 1
    theirs.close()


def test_a_mask_resets_some_envs_and_stays_the_callers(
    vector_env: Callable[..., ManagerVectorEnv],
) -> None:
    for mode in ("NextStep", "SameStep", "Disabled"):
        ours = vector_env(mode=mode)
        theirs = SyncVectorEnv([ShortEnv] * N, autoreset_mode=AutoresetMode(mode))
        mask = np.array([True, False, True])
        options = {"reset_mask": mask, "longer": 2}
        for envs in (ours, theirs):
            envs.reset(seed=1)
            envs.step([0, 1, 2])
        first = ours.reset(seed=[4, 5, 6], options=options)
        assert options == {"reset_mask": mask, "longer": 2}
        assert same(first, theirs.reset(seed=[4, 5, 6], options=dict(options)))
        for bad, error in (
            ([True] * N, TypeError),
            (mask[:2], ValueError),
            (np.ones(N), TypeError),
            (np.zeros(N, bool), ValueError),
        ):
            with pytest.raises(error, match="reset_mask"):
                ours.reset(options={"reset_mask": bad})
        theirs.close()


def test_infos_can_have_the_form_of_029(vector_env: Callable[..., ManagerVectorEnv]) -> None:
    envs = vector_env(mode="SameStep", info_format="gym029")
    envs.reset(seed=0)
    for _ in range(5):
        obs, _, terminated, truncated, infos = envs.step([0, 0, 0])
        ended = terminated | truncated
        if ended.any():
            break
    assert infos["_final_info"].tolist() == ended.tolist()
    for i in np.flatnonzero(ended):
        last = infos["final_observation"][i]
        assert last["n"] == infos["final_info"][i].get("at", last["n"]) > obs["n"][i] == 0
    assert [info is None for info in infos["final_info"]] == (~ended).tolist()
    silent = vector_env(mode="SameStep", info_format="gym029", env=Told)
    silent.reset()
    first, second, _ = silent.step([0, 0, 0])[4]["final_info"]
    assert first == second == {}
    assert first is not second
    for mode, form in (("NextStep", "gym029"), ("SameStep", "gym1")):
        with pytest.raises(ConfigError, match="info_format"):
            vector_env(mode=mode, info_format=form)


def test_spaces_without_layout_come_as_gymnasium_batches_them(
    vector_env: Callable[..., ManagerVectorEnv],
) -> None:
    class Wordy(gymnasium.Env[Any, Any]):
        observation_space = Text(9)
        action_space = Text(9)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return "begins", {}

        def step(self, action: Any) -> Any:
            return action, 1, action == "end", False, {}

    for mode in ("NextStep", "SameStep"):
        ours = vector_env(mode=mode, env=Wordy)
        theirs = SyncVectorEnv([Wordy] * N, autoreset_mode=AutoresetMode(mode))
        assert same(ours.reset(), theirs.reset())
        for actions in (("a", "b", "c"), ("a", "end", "c"), ("a", "b", "end")):
            assert same(ours.step(actions), theirs.step(actions))
        theirs.close()


@for_each("space", SPACES)
def test_observations_of_any_space_are_those_of_gymnasiums_own_in_the_same_step(
    space: Any,
) -> None:
    envs = [functools.partial(Sampled, space, episode_length=2 + k % 2) for k in range(N)]
    theirs = SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP)
    ours = as_gymnasium(create_env_manager({"type": "base"}, env_fn=envs), "SameStep")
    try:
        assert same(ours.reset(seed=1), theirs.reset(seed=1))
        n_final = 0
        for step in range(6):
            found, expected = ours.step([0] * N), theirs.step([0] * N)
            assert same(found, expected), (step, found, expected)
            final = [obs for obs in found[-1].get("final_obs", ()) if obs is not None]
            assert all(space.contains(obs) for obs in final)
            n_final += len(final)
        assert n_final == 8
    finally:
        ours.close()
        theirs.close()


def test_failures_are_truncated_episodes(vector_env: Callable[..., ManagerVectorEnv]) -> None:
    for mode in ("NextStep", "SameStep"):
        envs = vector_env(mode=mode)
        first, _ = envs.reset(seed=0)
        obs, rewards, terminated, truncated, infos = envs.step([1, RAISE, 1])
        assert rewards.tolist() == [1, 0, 1]
        assert (terminated.tolist(), truncated.tolist()) == ([False] * 3, [False, True, False])
        if mode == "SameStep":
            assert infos["final_obs"][1]["x"].tolist() == first["x"][1].tolist()
            infos = infos["final_info"]
        else:
            assert obs["x"][1].tolist() == first["x"][1].tolist()
        assert infos["_abnormal"].tolist() == [False, True, False]
        assert infos["error"][1].startswith("EnvRaised: env 1")
        assert 'raise ValueError("of the env")' in infos["error"][1]
        obs, *_ = envs.step([1, 1, 1])
        assert obs["n"].tolist() == [2, 0 if mode == "NextStep" else 1, 2]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "gym029"])
def test_statistics_leave_out_what_failures_have_cut_short(
    vector_env: Callable[..., ManagerVectorEnv], mode: str
) -> None:
    old, mode = mode == "gym029", "NextStep" if mode == "NextStep" else "SameStep"
    kwargs = {"info_format": "gym029"} if old else {}
    envs = RecordEpisodeStatistics(vector_env(mode=mode, **kwargs))
    plain = vector_env(mode=mode)
    envs.reset(seed=0)
    plain.reset(seed=0)
    counts, n_episodes = np.zeros((2, N)), 0
    resetting = np.zeros(N, bool)
    for step in range(20):
        actions = np.array([1, RAISE if step % 7 == 2 else 3, 4])
        _, rewards, terminated, truncated, infos = envs.step(actions)
        _, _, _, _, known = plain.step(actions)
        failed = known.get("final_info", known).get("_abnormal", np.zeros(N, bool))
        counts += np.where(resetting, 0, [rewards, np.ones(N)])
        ended = terminated | truncated
        whole = ended & ~failed
        assert ("episode" in infos) == whole.any()
        if whole.any():
            assert infos["_episode"].tolist() == whole.tolist()
            assert infos["episode"]["r"].tolist() == np.where(whole, counts[0], 0).tolist()
            assert infos["episode"]["l"].tolist() == np.where(whole, counts[1], 0).tolist()
        n_episodes += int(whole.sum())
        counts[:, ended] = 0
        resetting = ended & (mode == "NextStep")
    assert envs.episode_count == len(envs.return_queue) == len(envs.length_queue) == n_episodes
    assert min(envs.length_queue) >= 2, "an episode has two steps at least, unless it fails"


def test_crashes_are_too_or_are_raised(vector_env: Callable[..., ManagerVectorEnv]) -> None:
    envs = vector_env({"type": "subprocess"}, n=2)
    envs.reset(seed=0)
    _, _, _, truncated, infos = envs.step([1, EXIT])
    assert truncated.tolist() == [False, True]
    assert "exit code 3" in infos["error"][1]
    obs, *_ = envs.step([1, 1])
    assert obs["n"].tolist() == [2, 0]
    raising = as_gymnasium(envs.manager, on_failure="raise")
    raising.reset()
    with pytest.raises(EnvCrash, match="exit code 3"):
        raising.step([EXIT, 1])
    raising.reset()
    with pytest.raises(ValueError, match="of the env") as raised:
        raising.step([1, RAISE])
    assert isinstance(raised.value.__cause__, EnvRaised)
    assert "Traceback" in raised.value.__cause__.remote_traceback
    raising.close()
    assert envs.manager.closed


def test_what_a_step_that_was_raised_has_ended_is_shown_to_nobody_as_going_on(
    vector_env: Callable[..., ManagerVectorEnv],
) -> None:
    envs = vector_env({"type": "base"}, n=2)
    raising = as_gymnasium(envs.manager, on_failure="raise")
    raising.reset(options={"reset_mask": np.array([True, False])})  # the first shows all of them
    raising.step([1, 1])
    with pytest.raises(ValueError, match="of the env"):
        raising.step([RAISE, 1])
    raising.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(ResetNeeded):  # who knows how env 1 has ended?
        raising.step([1, 1])
    raising.reset(options={"reset_mask": np.array([False, True])})
    raising.step([1, 1])
    raising.close()


def test_a_manager_that_raises_ends_and_can_be_closed(
    vector_env: Callable[..., ManagerVectorEnv],
) -> None:
    envs = vector_env({"on_failure": "raise"})
    envs.reset()
    with pytest.raises(ValueError, match="of the env"):
        envs.step([RAISE, 1, 1])
    envs.close()
    with pytest.raises(ConfigError, match="on_failure: recover"):
        vector_env({"on_failure": "raise"}, on_failure="recover")


def test_actions_that_do_not_fit_are_refused_whole(
    vector_env: Callable[..., ManagerVectorEnv],
) -> None:
    envs = vector_env()
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="2 actions were given for 3 envs"):
        envs.step(np.array([1, 1]))
    with pytest.raises(TypeError):
        envs.step(0)
    with pytest.raises(ActionError):
        envs.step([1, 8, 1])
    obs, *_ = envs.step(envs.action_space.sample() * 0)
    assert obs["n"].tolist() == [1, 1, 1]
    while not any((outcome := envs.step([0, 0, 0]))[2]):
        pass
    with pytest.raises(ValueError, match="4 actions were given for 3 envs"):  # some begin anew
        envs.step([0, 0, 0, 0])
    assert (envs.step([0, 0, 0])[0]["n"] == np.where(outcome[2], 0, outcome[0]["n"] + 1)).all()


def test_halves_of_calls(vector_env: Callable[..., ManagerVectorEnv], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    env = functools.partial(ShortEnv, gate)
    envs = vector_env({"type": "async_subprocess", "wait_num": 1}, env=env, n=2)
    with pytest.raises(ResetNeeded):
        envs.step([0, 0])
    for name in ("reset", "step", "call"):
        with pytest.raises(NoAsyncCallError, match=f"`{name}_async`"):
            getattr(envs, f"{name}_wait")()
    envs.set_attr("waits", ["", "step"])
    envs.reset(seed=0)
    envs.step_async([0, 1])
    with pytest.raises(TimeoutError):
        envs.step_wait(timeout=0.05)
    with pytest.raises(multiprocessing.TimeoutError, match="`step_wait` again"):
        envs.step_wait(timeout=0)
    for refused in (envs.step, envs.step_async, envs.get_attr):
        with pytest.raises(AlreadyPendingCallError, match="pending call to `step`"):
            refused("colour")
    with pytest.raises(AlreadyPendingCallError, match="`reset_async`"):
        envs.reset()
    gate.write_bytes(b"")
    obs, rewards, *_ = envs.step_wait()
    assert (obs["n"].tolist(), rewards.tolist()) == ([1, 1], [0, 1])

    envs.set_attr("waits", ("reset", ""))
    envs.reset_async(seed=5)
    with pytest.raises(TimeoutError, match="`reset_wait`"):
        envs.reset_wait(timeout=0.05)
    gate.write_bytes(b"")
    obs, infos = envs.reset_wait()
    assert obs["n"].tolist() == [0, 0]
    assert infos["_length"].all()
    envs.call_async("painted", 4, more=2)
    assert envs.call_wait(timeout=60) == (6, 6)

    envs.reset_async()
    with pytest.warns(UserWarning, match="pending call to `reset`"):
        envs.close(terminate=True)
    for call in (envs.reset, envs.step_wait, lambda: envs.call("painted", 1)):
        with pytest.raises(ClosedEnvironmentError, match="ManagerVectorEnv"):
            call()


def test_attributes_frames_and_wrappers(vector_env: Callable[..., ManagerVectorEnv]) -> None:
    envs = vector_env()
    assert envs.call("painted", 1, more=1) == (2, 2, 2)
    assert envs.get_attr("colour") == (3, 3, 3)
    envs.set_attr("colour", [1, 2, 3])
    assert envs.get_attr("colour") == (1, 2, 3)
    with pytest.raises(ValueError, match="Got `2` values for 3"):
        envs.set_attr("colour", [1, 2])
    frames = envs.render()
    assert frames is not None
    assert [frame.max() for frame in frames] == [1, 2, 3]
    with pytest.raises(AttributeError):
        envs.get_attr("nothing")
    assert envs.get_attr("square") == (1, 4, 9), "what can be called is called, as there"
    odd = {"env_ids": [0], "args": 1}
    assert envs.call("told", **odd) == (odd,) * N
    envs.call_async("told", **odd)
    assert envs.call_wait() == (odd,) * N
    envs.reset(seed=10)
    assert envs.np_random_seed == (10, 11, 12)
    assert len(envs.np_random) == N
    if gymnasium.__version__.startswith("1.1."):
        return  # its own vector envs cannot be wrapped by both, either
    counted = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
    listed = gymnasium.wrappers.vector.DictInfoToList(counted)
    listed.reset(seed=0)
    seen: list[Any] = []
    while not seen:
        *_, infos = listed.step(np.zeros(N, dtype=np.int64))
        seen = [info["episode"]["l"] for info in infos if "episode" in info]
    assert min(seen) >= 2


def test_the_drop_in_class_and_entry_points() -> None:
    envs = EnvmgrVectorEnv([ShortEnv], type="base", max_concurrency=8)
    assert envs.manager.cfg.num_workers == 1, "no more than envs"
    envs.close()
    envs = EnvmgrVectorEnv([ShortEnv] * 2, False, copy=False, max_concurrency=1)
    assert envs.manager.cfg.num_workers == 1
    assert envs.reset(seed=1)[0]["n"].tolist() == [0, 0]
    assert envs.step([0, 0])[0]["n"].tolist() == [1, 1]
    envs.close()
    with pytest.raises(RuntimeError, match="spaces are not equivalent"):
        EnvmgrVectorEnv([ShortEnv, lambda: Bounded(2.0)], type="base")
    with pytest.raises(RuntimeError, match="action spaces of all envs must be equal"):
        EnvmgrVectorEnv([ShortEnv, lambda: gymnasium.make("CartPole-v1")], type="base")
    with pytest.raises(ConfigError, match="worker should be None"):
        EnvmgrVectorEnv([ShortEnv], worker=print)  # type: ignore[arg-type]
    gymnasium.register(
        "Ours/CartPole-v1",
        vector_entry_point="envmgr.adapters.gymnasium:vector_entry_point",
        kwargs={"env": "CartPole-v1", "manager": {"type": "base"}},
    )
    made = gymnasium.make_vec("Ours/CartPole-v1", num_envs=3, render_mode="rgb_array")
    assert (made.num_envs, made.render_mode) == (3, "rgb_array")
    assert made.spec is not None
    assert made.spec.id == "Ours/CartPole-v1"
    assert "CartPole" in repr(made)
    made.close()
    del gymnasium.registry["Ours/CartPole-v1"]
    made = vector_entry_point(2, env=ShortEnv, autoreset_mode="SameStep", manager={"type": "base"})
    assert made.reset()[0]["n"].tolist() == [0, 0]
    made.close()


def test_entry_points_take_what_gymnasium_makes_and_limit_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registers_told.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Told-v1', entry_point='tests.contract.test_adapter_gymnasium:Told')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    base = {"type": "base"}
    for env, warned in (
        ("registers_told:Told-v1", contextlib.nullcontext()),
        ("Told", pytest.warns(UserWarning, match="'Told-v1' is used")),
    ):
        with warned:
            made = vector_entry_point(2, env=env, manager=base, length=3)
        assert made.get_attr("length") == (3, 3)
        made.close()

    def build(**kwargs: Any) -> Told:
        assert not kwargs
        return Told(length=9)

    def limited(max_episode_steps: int) -> Told:
        return Told(max_episode_steps)

    entry = "envmgr.adapters.gymnasium:vector_entry_point"
    for env_fn, given in ((build, {}), (limited, {}), (build, {"max_episode_steps": 3})):
        kwargs = {"env": env_fn, "manager": base}
        limit = {} if given else {"max_episode_steps": 3}
        gymnasium.register("Ours/Told-v1", vector_entry_point=entry, kwargs=kwargs, **limit)
        made = gymnasium.make_vec("Ours/Told-v1", num_envs=2, **given)  # type: ignore[assignment]
        made.reset()
        steps = [made.step([0, 0]) for _ in range(3)]
        assert [bool((ended | cut).all()) for _, _, ended, cut, _ in steps] == [False, False, True]
        made.close()
        del gymnasium.registry["Ours/Told-v1"]
    del gymnasium.registry["Told-v1"]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_infos_of_resets_may_have_any_keys(mode: str) -> None:
    envs = [
        functools.partial(Told, length, 1.0, {7: 1, "deep": {(): 2}}, {"a": 1, "deep": {"b": 1}})
        for length in (1, 2, 3)
    ]
    theirs = SyncVectorEnv(envs, autoreset_mode=AutoresetMode(mode))
    ours = as_gymnasium(create_env_manager({"type": "base"}, env_fn=envs), mode)
    with contextlib.closing(ours), contextlib.closing(theirs):
        assert same(ours.reset(seed=0), theirs.reset(seed=0))
        for _ in range(6):
            found, expected = ours.step([0] * N), theirs.step([0] * N)
            assert same(found, expected), (found, expected)


def test_a_vector_env_that_is_not_used_any_more_leaves_its_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closing(envs: Any) -> None:  # as in Gymnasium before 1.4
        if not getattr(envs, "closed", True):
            envs.close()

    monkeypatch.setattr(gymnasium.vector.VectorEnv, "__del__", closing, raising=False)
    with create_env_manager({"type": "base"}, env_fn=[Told] * 2) as manager:
        as_gymnasium(manager)
        with pytest.raises(ValueError, match="observation_mode"):
            as_gymnasium(manager, observation_mode="nope")
        with pytest.raises(ConfigError, match="info_format"):  # which would be said of `__del__`
            as_gymnasium(manager, info_format="nope")
        gc.collect()
        assert not manager.closed


def test_a_vector_env_that_is_refused_closes_what_it_has_built() -> None:
    manager = create_env_manager({"type": "base"}, env_fn=[Told] * 2)
    CLOSED.clear()
    with pytest.raises(ValueError, match="observation_mode"):
        as_gymnasium(manager, observation_mode="nope")
    assert len(CLOSED) == 2


def test_a_reset_that_ctrl_c_has_ended_is_not_begun_by_close(
    monkeypatch: pytest.MonkeyPatch, vector_env: Callable[..., ManagerVectorEnv]
) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    envs = vector_env(env=Told)
    with monkeypatch.context() as patch:
        patch.setattr(interruptible, "start_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            envs.reset_async()
    with pytest.warns(UserWarning, match="pending call to `reset`"):
        envs.close()
    assert envs.manager.closed


def test_a_reset_that_begins_while_its_vector_env_is_closed_leaves_nothing_running(
    monkeypatch: pytest.MonkeyPatch, vector_env: Callable[..., ManagerVectorEnv]
) -> None:
    envs = vector_env(env=Told)
    begun, closed = threading.Event(), threading.Event()
    launch, close = envs.manager.launch, envs.manager.close

    def launched_late(*args: Any) -> None:
        begun.set()
        assert closed.wait(60)
        launch(*args)

    def noted(*args: Any) -> None:
        close(*args)
        closed.set()

    monkeypatch.setattr(envs.manager, "launch", launched_late)
    monkeypatch.setattr(envs.manager, "close", noted)
    envs.reset_async()
    assert begun.wait(60)
    with pytest.warns(UserWarning, match="pending call to `reset`"):
        envs.close()
    assert envs.manager.closed


def test_frames_are_what_envs_give_without_a_render_mode() -> None:
    ours = EnvmgrVectorEnv([Told] * 2, type="base")
    ours.reset()
    assert ours.render() == ("after step 0",) * 2
    ours.close()


def test_rewards_keep_their_shape_where_all_envs_begin_at_once() -> None:
    envs = EnvmgrVectorEnv([functools.partial(Told, 1, np.array([1.0, 2.0]))] * 2, type="base")
    envs.reset()
    rewards = [envs.step([0, 0])[1].tolist() for _ in range(4)]
    assert rewards == [[[1, 2]] * 2, [[0, 0]] * 2] * 2
    envs.close()


def test_an_env_that_has_begun_anew_is_not_reset_again_for_the_seed_of_another() -> None:
    envs = [functools.partial(Told, length) for length in (1, 2)]
    ours, theirs = EnvmgrVectorEnv(envs, type="base"), SyncVectorEnv(envs)
    for one in (ours, theirs):
        one.reset(seed=1)
        one.step([0, 0])
    ours.manager.ready_arrays(range(2))
    assert same(ours.reset(seed=[None, 5]), theirs.reset(seed=[None, 5]))
    ours.close()
    theirs.close()


def test_what_setting_an_attribute_raises_is_raised_as_what_it_was() -> None:
    class Fixed(Told):
        @property
        def size(self) -> int:
            return 1

        @size.setter
        def size(self, size: int) -> None:
            raise LookupError(size)

    envs = EnvmgrVectorEnv([Fixed], type="base", on_failure="raise")
    with contextlib.closing(envs), pytest.raises(LookupError, match="3"):
        envs.set_attr("size", 3)


def test_bounds_may_differ(vector_env: Callable[..., ManagerVectorEnv]) -> None:
    fns = [functools.partial(Bounded, high) for high in (1.0, 2.0)]
    with EnvmgrVectorEnv(fns, observation_mode="different", type="base").manager as manager:
        envs = as_gymnasium(manager, observation_mode="different")
        assert envs.observation_space["x"].high.tolist() == [[1, 1], [2, 2]]  # type: ignore[index]
        assert envs.reset(seed=0)[0]["x"].shape == (2, 2)
    with pytest.raises(ValueError, match="Invalid `observation_mode`") as theirs:
        SyncVectorEnv([ShortEnv], observation_mode="equal")
    with pytest.raises(ValueError, match="Invalid `observation_mode`") as ours:
        vector_env(observation_mode="equal")
    assert str(ours.value) == str(theirs.value), "their suite compares it"
