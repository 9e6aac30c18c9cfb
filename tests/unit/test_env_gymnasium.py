"""gymnasium envs as BaseEnvs: seeds, infos, actions, rewards, rendering."""

from __future__ import annotations

import signal
import struct
import zlib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr.env import adapt
from envmgr.env.contract import EnvContractError, as_flag, scalar_reward
from envmgr.env.figures import write_png
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.env.seeds import EpisodeSeeds
from envmgr.errors import ConfigError
from envmgr.testing.checkup.probes import trajectory
from envmgr.testing.env_problems import env_problems


class Scripted(gymnasium.Env[Any, Any]):
    """Returns what it was given and remembers what it got."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(self, result: Any = None, reset_result: Any = None, render: Any = None) -> None:
        self.observation_space = Box(0, 1, (2,), np.float32)
        self.action_space = Discrete(3)
        self.result = result
        self.reset_result = reset_result
        self.render_mode = None if render is None else "rgb_array"
        self.frame = render
        self.resets: list[tuple[int | None, Any]] = []
        self.actions: list[Any] = []
        self.color = "red"
        self._hidden = 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets.append((seed, options))
        return (
            (np.zeros(2, np.float32), {"n": len(self.resets)})
            if (self.reset_result is None)
            else self.reset_result
        )

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        return self.result

    def render(self) -> Any:
        return self.frame

    def greet(self, name: str) -> str:
        return f"hello {name}"


OBS = np.ones(2, np.float32)


# -- against real envs ------------------------------------------------------------------------


def test_cartpole_gives_what_gymnasium_gives() -> None:
    plain = gymnasium.make("CartPole-v1")
    env = GymnasiumEnv(gymnasium.make("CartPole-v1"))
    env.seed(7)
    expected, _ = plain.reset(seed=7)
    np.testing.assert_array_equal(env.reset(), expected)
    for step in range(200):
        action = step % 2
        obs, reward, terminated, truncated, _ = plain.step(action)
        timestep = env.step(np.array([action]))
        np.testing.assert_array_equal(timestep.obs, obs)
        assert timestep.reward == reward
        assert type(timestep.reward) is float
        assert timestep.done is (terminated or truncated)
        assert timestep.info["terminated"] is terminated
        assert timestep.info["truncated"] is truncated
        if timestep.done:
            break
    assert timestep.done
    env.close()
    plain.close()


def test_a_time_limit_ends_an_episode_as_truncated() -> None:
    env = GymnasiumEnv(gymnasium.make("CartPole-v1", max_episode_steps=2))
    env.seed(0)
    env.reset()
    assert not env.step(0).done
    last = env.step(1)
    assert last.done
    assert last.info == {"terminated": False, "truncated": True}


def test_tuple_observations_of_blackjack_stay_tuples() -> None:
    env = GymnasiumEnv(gymnasium.make("Blackjack-v1"))
    env.seed(3)
    obs = env.reset()
    assert isinstance(obs, tuple)
    assert env.observation_space.contains(obs)
    timestep = env.step(np.int64(0))
    assert env.observation_space.contains(timestep.obs)


def test_frozen_lake_takes_numpy_actions() -> None:
    env = GymnasiumEnv(gymnasium.make("FrozenLake-v1", is_slippery=False))
    env.seed(1)
    assert int(env.reset()) == 0
    assert int(env.step(np.array(2)).obs) == 1
    assert env.reset_info == {"prob": 1}
    assert isinstance(env.step(np.int32(1)).reward, float)


def test_spec_metadata_and_the_rest_are_those_of_the_env() -> None:
    inner = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    env = GymnasiumEnv(inner)
    assert env.spec.id == "CartPole-v1"
    assert env.metadata["render_fps"] == 50
    assert env.render_mode == "rgb_array"
    assert env.unwrapped is inner.unwrapped
    assert env.observation_space is inner.observation_space
    assert env.action_space is inner.action_space
    assert "CartPole" in repr(env)


# -- resets and seeds -------------------------------------------------------------------------


def test_params_become_options_and_the_info_is_kept() -> None:
    inner = Scripted()
    env = GymnasiumEnv(inner)
    assert env.reset_info == {}
    env.reset()
    assert inner.resets == [(None, None)]
    assert env.reset_info == {"n": 1}
    env.reset(level=3)
    assert inner.resets[1] == (None, {"level": 3})
    assert env.reset_info == {"n": 2}


class Frugal(Scripted):
    """Its `reset` takes nothing."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class Seeded(Frugal):
    """Its `reset` takes a seed only."""

    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return Scripted.reset(self, seed=seed)


class SeededBefore(Frugal):
    """It has a method for its seed, as envs of the old gym."""

    def seed(self, seed: int) -> None:
        self.resets.append((seed, "by seed()"))


class Demanding(Scripted):
    """Its `reset` has no defaults."""

    def reset(self, seed: Any, options: Any) -> Any:  # type: ignore[override]
        return super().reset(seed=seed, options=options)


class Forwarding(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Passes on what it is given, as the `Monitor` of Stable-Baselines3 does."""

    def reset(self, **kwargs: Any) -> Any:
        return self.env.reset(**kwargs)


@pytest.mark.parametrize("wrap", [lambda env: env, Forwarding])
@pytest.mark.parametrize("cls", [Frugal, Seeded, SeededBefore, Demanding])
def test_a_reset_is_given_what_was_asked_for_and_nothing_else(cls: Any, wrap: Any) -> None:
    inner = cls()
    env = GymnasiumEnv(wrap(inner))
    env.reset()
    env.reset()
    assert inner.resets == [(None, None)] * 2, "with nothing asked for, it is not even named"


@pytest.mark.parametrize("wrap", [lambda env: env, Forwarding])
def test_a_seed_or_options_that_a_reset_does_not_take_are_named(wrap: Any) -> None:
    seeded, before = Seeded(), SeededBefore()
    for inner in (seeded, before):
        env = GymnasiumEnv(wrap(inner))
        env.seed(5)
        env.reset()
        with pytest.raises(EnvContractError, match=r"takes no `options`, .*{'level': 3}"):
            env.reset(level=3)
        env.reset()
    assert seeded.resets == [(5, None), (None, None)]
    assert before.resets == [(5, "by seed()"), (None, None), (None, None)]
    env = GymnasiumEnv(wrap(Frugal()))
    env.seed(5)
    with pytest.raises(EnvContractError, match=r"Frugal takes no `seed`, .* seeded with 5"):
        env.reset()
    env.seed(None)
    env.reset()


def test_a_checkup_seeds_what_can_be_seeded() -> None:
    def results(obs: Any) -> Any:
        return obs, 1.0, True, False, {}

    assert not trajectory(lambda: Frugal(results(OBS)), 3, seed=5, whole=3).is_seeded
    assert env_problems(lambda: Frugal(results(OBS))) == []
    for cls in (Seeded, SeededBefore, Scripted):
        assert trajectory(lambda cls=cls: cls(results(OBS)), 3, seed=5, whole=3).is_seeded


@pytest.mark.parametrize(
    ("dynamic_seed", "later"),
    [(None, [None, None]), (False, [5, 5])],
)
def test_the_first_reset_uses_the_seed_exactly(
    dynamic_seed: bool | None, later: list[int | None]
) -> None:
    inner = Scripted()
    env = GymnasiumEnv(inner)
    env.reset()
    env.seed(np.int64(5), dynamic_seed)  # type: ignore[arg-type]
    for _ in range(3):
        env.reset()
    assert [seed for seed, _ in inner.resets] == [None, 5, *later]
    env.seed(6)
    env.reset()
    assert inner.resets[-1][0] == 6


def test_dynamic_seeds_are_one_per_episode_and_repeatable() -> None:
    inner = Scripted()
    env = GymnasiumEnv(inner)
    for _ in range(2):
        env.seed(5, True)
        for _ in range(3):
            env.reset()
    seeds = [seed for seed, _ in inner.resets]
    expected = [int(np.random.SeedSequence((5, n)).generate_state(1)[0]) for n in (1, 2)]
    assert seeds == [5, *expected] * 2
    assert len(set(expected)) == 2


def test_a_failed_reset_is_tried_again_with_the_same_seed() -> None:
    inner = Scripted(reset_result="nonsense")
    env = GymnasiumEnv(inner)
    env.seed(9)
    with pytest.raises(EnvContractError):
        env.reset()
    inner.reset_result = None
    env.reset()
    env.reset()
    assert [seed for seed, _ in inner.resets] == [9, 9, None]


def test_the_reset_info_is_a_copy() -> None:
    own = {"n": 1}
    env = GymnasiumEnv(Scripted(reset_result=(OBS, own)))
    env.reset()
    own["n"] = 2
    assert env.reset_info == {"n": 1}


def test_a_reset_with_its_info_gives_a_copy_of_that() -> None:
    env = GymnasiumEnv(Scripted(reset_result=(OBS, {"n": 1})))
    obs, info = adapt.reset_env(env, {"level": 1})
    assert obs is OBS
    assert env.env.resets == [(None, {"level": 1})]
    info["n"] = 2
    assert env.reset_info == {"n": 1}


def test_seeding_none_takes_the_seed_back() -> None:
    inner = Scripted()
    env = GymnasiumEnv(inner)
    env.seed(4)
    env.seed(None)
    env.reset()
    assert inner.resets == [(None, None)]


def test_bad_seeds_are_refused_at_once() -> None:
    seeds = EpisodeSeeds()
    with pytest.raises(ValueError, match="-1"):
        seeds.begin(-1, None)
    with pytest.raises(TypeError):
        seeds.begin(1.5, None)  # type: ignore[arg-type]
    assert seeds.due() is None


def test_the_seed_makes_random_actions_repeat() -> None:
    env = GymnasiumEnv(gymnasium.make("CartPole-v1"))
    env.seed(11)
    first = [int(env.random_action()) for _ in range(30)]
    env.seed(11)
    assert [int(env.random_action()) for _ in range(30)] == first
    assert set(first) == {0, 1}


@pytest.mark.parametrize("result", [OBS, (OBS,), (OBS, None), (OBS, {}, 1), None])
def test_a_reset_that_gives_something_else_is_named(result: Any) -> None:
    inner = Scripted(reset_result=result if result is not None else 0)
    with pytest.raises(EnvContractError, match="Scripted should return \\(obs, info\\)"):
        GymnasiumEnv(inner).reset()


# -- steps ------------------------------------------------------------------------------------


def test_the_info_is_a_new_dict_and_the_envs_own_stays_unchanged() -> None:
    own = {"x": 1, "TimeLimit.truncated": True}
    env = GymnasiumEnv(Scripted((OBS, 1.0, np.bool_(True), False, own)))
    first, second = env.step(0), env.step(0)
    assert own == {"x": 1, "TimeLimit.truncated": True}
    expected = {"x": 1, "TimeLimit.truncated": True, "terminated": True, "truncated": False}
    assert first.info == expected
    assert type(first.info["terminated"]) is bool
    assert first.info is not second.info
    assert first.done is True


@pytest.mark.parametrize("key", ["TimeLimit.truncated", "abnormal", "error"])
def test_nothing_but_the_two_flags_is_added_to_the_info(key: str) -> None:
    timestep = GymnasiumEnv(Scripted((OBS, 0.0, False, True, {}))).step(0)
    assert key not in timestep.info
    assert timestep.done


@pytest.mark.parametrize(
    "result",
    [
        None,
        OBS,
        (OBS, 1.0, False, {}),
        (OBS, 1.0, False, False, {}, 1),
        (OBS, 1.0, False, False, None),
        (OBS, 1.0, np.array([True, False]), False, {}),
        (OBS, 1.0, False, None, {}),
        (OBS, None, False, False, {}),
        (OBS, "1.0", False, False, {}),
        (OBS, np.array(["a"]), False, False, {}),
    ],
)
def test_a_malformed_step_is_a_contract_error(result: Any) -> None:
    with pytest.raises(EnvContractError):
        GymnasiumEnv(Scripted(result)).step(0)


def test_a_four_tuple_is_answered_with_what_to_do() -> None:
    with pytest.raises(EnvContractError, match=r"tuple of 4.*BaseEnv") as caught:
        GymnasiumEnv(Scripted((OBS, 1.0, False, {}))).step(0)
    assert "Scripted" in str(caught.value)


def test_an_abnormal_step_may_lack_a_reward() -> None:
    timestep = GymnasiumEnv(Scripted((None, None, True, False, {"abnormal": True}))).step(0)
    assert timestep.reward is None
    assert timestep.info["abnormal"] is True


@pytest.mark.parametrize(
    "reward",
    [
        2,
        2.0,
        np.float32(2),
        np.int64(2),
        np.array(2.0),
        np.array([2]),
        np.array([[2.0]]),
        [2],
        (2.0,),
    ],
)
def test_one_number_as_reward_becomes_a_float(reward: Any) -> None:
    value = scalar_reward(reward)
    assert type(value) is float
    assert value == 2.0


def test_several_rewards_stay_an_array() -> None:
    rewards = np.array([1.0, 2.0])
    assert scalar_reward(rewards) is rewards


def test_several_rewards_in_a_list_become_an_array_of_their_own() -> None:
    own = [1, 0]  # as tianshou's PettingZooEnv has them, which uses its list again
    reward = GymnasiumEnv(Scripted((OBS, own, False, False, {}))).step(0).reward
    own[:] = 7, 7
    np.testing.assert_array_equal(reward, np.array([1, 0]), strict=True)
    np.testing.assert_array_equal(scalar_reward((0.5, 1)), np.array([0.5, 1.0]), strict=True)
    for wrong in (["a", "b"], [1, [2, 3]], [None, 1], {"a": 1.0}):
        with pytest.raises(EnvContractError, match=f"a number, .* {type(wrong).__name__}"):
            scalar_reward(wrong)


def test_flags() -> None:
    assert as_flag(np.bool_(True), "done") is True
    assert as_flag(0, "done") is False
    assert as_flag(np.array([True]), "done") is True
    with pytest.raises(EnvContractError, match="`done`"):
        as_flag(None, "done")


# -- actions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "action", [1, np.int64(1), np.uint8(1), np.array(1), np.array([1]), [1], np.array([[1]])]
)
def test_one_integer_in_any_form_becomes_an_int(action: Any) -> None:
    inner = Scripted((OBS, 0.0, False, False, {}))
    GymnasiumEnv(inner).step(action)
    assert type(inner.actions[0]) is int
    assert inner.actions[0] == 1


# -- spaces and attributes --------------------------------------------------------------------


def test_the_reward_space_comes_from_the_env_or_is_unbounded() -> None:
    inner = Scripted()
    space = GymnasiumEnv(inner).reward_space
    assert space == Box(-np.inf, np.inf, (), np.float64)
    inner.reward_range = (-1, 5)  # type: ignore[attr-defined]
    space = GymnasiumEnv(gymnasium.wrappers.OrderEnforcing(inner)).reward_space
    assert space == Box(-1.0, 5.0, (), np.float64)
    own = Box(0, 1, (2,), np.float32)
    inner.reward_space = own  # type: ignore[attr-defined]
    assert GymnasiumEnv(inner).reward_space is own


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward_space", "odd"),
        ("reward_space", ValueError("not yet")),
        ("reward_range", ("low", "high")),
        ("reward_range", (1.0, -1.0)),
        ("reward_range", ValueError("not yet")),
    ],
)
def test_an_env_whose_rewards_are_oddly_described_is_run(name: str, value: Any) -> None:
    def read(env: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    env = type("Odd", (Scripted,), {name: property(read)})()
    assert GymnasiumEnv(env).reward_space == Box(-np.inf, np.inf, (), np.float64)


def test_an_interrupt_in_describing_rewards_is_passed_on() -> None:
    class Interrupted(Scripted):
        @property
        def reward_space(self) -> Any:
            signal.raise_signal(signal.SIGUSR1)

    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("of the user")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError, match="of the user"):
            GymnasiumEnv(Interrupted())
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_a_space_that_an_env_does_not_have_is_that_of_any_object(name: str) -> None:
    inner = Scripted()
    delattr(inner, name)
    env = GymnasiumEnv(inner)
    assert type(getattr(env, name)) is gymnasium.Space
    env.seed(1)


def test_own_random_action_and_reward_shaping_are_used() -> None:
    inner = Scripted()
    inner.random_action = lambda: 2  # type: ignore[attr-defined]
    inner.reward_shaping = lambda transitions: transitions[:1]  # type: ignore[attr-defined]
    env = GymnasiumEnv(gymnasium.wrappers.OrderEnforcing(inner))
    assert env.random_action() == 2
    assert env.reward_shaping([{}, {}]) == [{}]
    assert GymnasiumEnv(Scripted()).reward_shaping([{}, {}]) == [{}, {}]


def test_close_closes_the_env() -> None:
    inner = Scripted()
    closed: list[bool] = []
    inner.close = lambda: closed.append(True)  # type: ignore[method-assign]
    GymnasiumEnv(gymnasium.wrappers.OrderEnforcing(inner)).close()
    assert closed == [True]


# -- rendering, replays, figures --------------------------------------------------------------

FRAME = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


def test_rendering_gives_the_frame() -> None:
    env = GymnasiumEnv(Scripted(render=FRAME))
    assert env.render() is FRAME
    assert env.render("rgb_array") is FRAME


def test_rendering_without_the_mode_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"without a render mode.*env\.kwargs\.render_mode"):
        GymnasiumEnv(Scripted()).render("rgb_array")
    with pytest.raises(ConfigError, match=r"with render_mode='rgb_array'.*'human'"):
        GymnasiumEnv(Scripted(render=FRAME)).render("human")
    with pytest.raises(EnvContractError, match="should render an array"):
        GymnasiumEnv(Scripted(render="frame")).render()


def test_figures_are_the_last_frames_of_episodes(tmp_path: Path) -> None:
    inner = Scripted((OBS, 0.0, False, False, {}), render=FRAME)
    env = GymnasiumEnv(inner, env_id=2)
    env.enable_save_figure(str(tmp_path / "figures"))
    env.enable_save_figure(str(tmp_path / "figures"))  # as DI-engine's evaluator does, again
    env.reset()
    env.step(0)
    assert list((tmp_path / "figures").iterdir()) == []
    inner.result = (OBS, 0.0, False, True, {})
    env.step(0)
    env.step(0)
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert len(names) == 2
    assert all(name.startswith("env_2-") for name in names)
    assert names[0].endswith("-000000.png")
    _assert_png_holds(tmp_path / "figures" / names[0], FRAME)


def test_figures_need_frames(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot save figures"):
        GymnasiumEnv(Scripted()).enable_save_figure(str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()
    for frame in (FRAME[0], FRAME.astype(float), FRAME[:, :, :2], FRAME[:0]):
        with pytest.raises(ValueError, match="a frame should be"):
            write_png(str(tmp_path / "x.png"), frame)
    assert list(tmp_path.iterdir()) == []


def _assert_png_holds(path: Path, frame: Any) -> None:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, position = {}, 8
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        kind = data[position + 4 : position + 8]
        body = data[position + 8 : position + 8 + length]
        (checksum,) = struct.unpack(">I", data[position + 8 + length : position + 12 + length])
        assert checksum == zlib.crc32(kind + body)
        chunks[kind] = body
        position += 12 + length
    height, width, _ = frame.shape
    assert chunks[b"IHDR"] == struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    np.testing.assert_array_equal(rows[:, 1:].reshape(frame.shape), frame)
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
