"""Running statistics of what is handed out: compared with numpy over all that was seen."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple

from envmgr import make
from envmgr.config import ManagerConfig
from envmgr.core import ArrayBatch
from envmgr.core.call_journal import Fate
from envmgr.errors import ConfigError, UnknownKeyError
from envmgr.normalizing import Normalization, normalization_of
from envmgr.normalizing.moments import no_moments
from envmgr.normalizing.state import no_state
from envmgr.types import EnvTimestep
from envmgr.wire.messages import EnvDescription

RNG = np.random.default_rng(0)
SPACE = Box(-100.0, 100.0, (2,), np.float64)


def described(space: Any, reward_space: Any = None) -> EnvDescription:
    return EnvDescription(space, Discrete(2), reward_space, {}, None, None)


def normalization(n: int = 3, space: Any = SPACE, **keys: Any) -> Normalization:
    made = normalization_of(ManagerConfig.from_mapping(keys), n)
    assert made is not None
    made.adopt([described(space)])
    return made


def fate() -> Fate:
    return Fate()


def step(obs: Any, reward: Any = 1.0, done: bool = False, **info: Any) -> EnvTimestep:
    return EnvTimestep(obs, reward, done, {"terminated": done, "truncated": False, **info})


def as_arrays(timesteps: dict[int, EnvTimestep]) -> ArrayBatch:
    steps = list(timesteps.values())
    return ArrayBatch(
        np.array(list(timesteps)),
        np.stack([s.obs for s in steps]),
        np.array([s.reward for s in steps]),
        np.array([s.done for s in steps]),
        np.zeros(len(steps), np.bool_),
        tuple(s.info for s in steps),
    )


def test_moments_are_those_of_all_rows() -> None:
    rows = RNG.normal(5.0, 3.0, (50, 2, 3))
    moments = no_moments((2, 3))
    assert moments.variance.tolist() == np.ones((2, 3)).tolist()
    for a, b in ((0, 1), (1, 1), (1, 20), (20, 50)):
        moments = moments.seen(rows[a:b].astype(np.float32))
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.variance, rows.var(0), rtol=1e-5)
    bad = rows[:2].copy()
    bad[0, 0, 0] = np.nan
    assert moments.seen(bad).n_seen == 51


def test_of_an_episode_only_rewards_that_are_no_numbers_are_not_counted() -> None:
    state = no_state(2, 0.0)
    ids, going = np.arange(2), np.zeros(2, np.bool_)
    rewards = [[np.nan, 4.0], [1.0, -np.inf], [2.0, 8.0]]
    for pair in rewards:
        state = state.with_rewards(ids, np.array(pair), ~going, going, 0.5)
    assert state.reward.n_seen == 4
    assert state.discounted.tolist() == [2.5, 9.0]
    assert state.reward.mean == np.mean([4.0, 1.0, 2.5, 9.0])


def test_timesteps_and_arrays_give_the_same_numbers() -> None:
    keys = {"normalize_obs": True, "normalize_reward": True, "episode_statistics": True}
    by_id, arrays = normalization(**keys), normalization(**keys)
    seen, returns, discounted = [], [], np.zeros(3)
    first = RNG.normal(size=(3, 2))
    seen += list(first)
    shown = by_id.ready(dict(enumerate(first)))
    assert list(shown) == [0, 1, 2]
    batch = arrays.ready_batch([0, 1, 2], first)
    assert np.array_equal(np.stack(list(shown.values())), batch)
    for t in range(1, 30):
        obs = RNG.normal(3.0, 2.0, (3, 2))
        rewards = RNG.normal(size=3)
        timesteps = {
            i: step(obs[i], rewards[i], done=t % (5 + i) == 0) for i in range(3) if t % 7 != i
        }
        seen += [obs[i] for i in timesteps]
        for i, one in timesteps.items():
            discounted[i] = discounted[i] * 0.99 + rewards[i]
            returns.append(discounted[i])
            discounted[i] *= not one.done
        one, other = by_id.timesteps(timesteps, fate()), arrays.batch(as_arrays(timesteps), fate())
        assert np.array_equal(np.stack([s.obs for s in one.values()]), other.obs)
        assert [s.reward for s in one.values()] == other.reward.tolist()
        ended = [i for i, s in one.items() if s.done]
        assert [i for i, s in one.items() if "episode" in s.info] == ended
        for given in ([i for i in one if i not in ended], ended):  # ended: first observations
            if given:
                seen += [obs[i] for i in given] if given == ended else []
                again = by_id.ready({i: obs[i] for i in given})
                assert np.array_equal(
                    np.stack(list(again.values())), arrays.ready_batch(given, obs[given])
                )
        mean, var = np.mean(seen, 0), np.var(seen, 0)
        np.testing.assert_allclose(by_id.obs_mean[""], mean)
        np.testing.assert_allclose(by_id.obs_variance[""], var)
        np.testing.assert_allclose(by_id.return_variance, np.var(returns))
        if given:
            expected = np.clip((obs[given] - mean) / np.sqrt(var + 1e-8), -10, 10)
            np.testing.assert_allclose(np.stack(list(again.values())), expected, rtol=1e-5)
    assert all(s.obs.dtype == np.float32 for s in one.values())


def test_episodes_have_the_sums_of_what_the_envs_gave() -> None:
    made = normalization(1, normalize_reward=True, episode_statistics=True)
    for length in (3, 1):
        for t in range(length):
            obs = np.zeros(2)
            (told,) = made.timesteps({0: step(obs, 2.5, done=t == length - 1)}, fate()).values()
            assert told.obs is obs  # they are not normalised
        episode = told.info["episode"]
        assert (episode["r"], episode["l"]) == (2.5 * length, length)
        assert episode["t"] >= 0
        assert type(told.reward) is float
    info = made.timesteps({0: step(obs, 1.0)}, fate())[0].info
    assert "episode" not in info


def test_abnormal_timesteps_are_normalised_and_not_counted() -> None:
    keys = {"normalize_obs": True, "normalize_reward": True, "episode_statistics": True}
    for arrays in (False, True):
        made = normalization(2, **keys)
        for _ in range(2):
            made.timesteps({0: step(np.ones(2), 4.0), 1: step(np.zeros(2), 2.0)}, fate())
        before = made.state_dict()
        failed = {0: step(np.full(2, 50.0), 0.0, done=True, abnormal=True)}
        if arrays:
            told = made.batch(as_arrays(failed), fate())
            obs, reward, info = told.obs[0], told.reward[0], told.infos[0]
        else:
            (obs, reward, _, info) = made.timesteps(failed, fate())[0]
        assert obs.tolist() == [10.0, 10.0]
        assert reward == 0.0
        assert "episode" not in info
        assert pickle.dumps(made.state_dict()) == pickle.dumps(before)
        # The next episode begins anew: its return, and its first observation, which is counted.
        made.ready({0: np.ones(2), 1: np.ones(2)})
        assert made.state_dict()["obs"][""]["n_seen"] == 5
        told = made.timesteps({0: step(np.ones(2), 7.0, done=True)}, fate())[0]
        assert told.info["episode"]["r"] == 7.0


def test_what_an_interrupted_call_gives_back_is_counted_once() -> None:
    made = normalization(1, normalize_obs=True, normalize_reward=True, episode_statistics=True)
    timesteps = {0: step(np.ones(2), 1.0, done=True)}
    before = made.state_dict(episodes=True)
    lost = fate()
    first = made.timesteps(timesteps, lost)
    lost.given_back = True
    assert pickle.dumps(made.state_dict(episodes=True)) == pickle.dumps(before)
    again = made.timesteps(timesteps, fate())
    assert again[0].info["episode"]["r"] == first[0].info["episode"]["r"] == 1.0
    assert made.state_dict()["obs"][""]["n_seen"] == 1


def test_what_is_owed_after_it_was_counted_is_not_counted_again() -> None:
    keys = {"normalize_obs": True, "normalize_reward": True, "episode_statistics": True}
    for as_handed in (lambda steps: steps, as_arrays):
        made, plain = normalization(2, **keys), normalization(2, **keys)
        steps = {0: step(np.ones(2), 1.0, done=True), 1: step(np.full(2, 3.0), 2.0)}
        others = {0: step(np.zeros(2), 5.0), 1: step(np.zeros(2), 4.0, done=True)}

        def hand_out(which: Normalization, given: Any, form: Any = as_handed) -> Any:
            batch = form(given)
            told = which.batch if form is as_arrays else which.timesteps
            found: Any = told(batch, fate())
            infos = found.infos if form is as_arrays else [one.info for one in found.values()]
            return [info.get("episode", {}).get("r") for info in infos]

        assert hand_out(plain, steps) == hand_out(made, steps) == [1.0, None]
        made.owed([0])
        made.owed([1])
        assert hand_out(made, {0: steps[0]}) == [1.0]
        both = {1: steps[1], 0: others[0]}  # one of them once more
        assert hand_out(made, both) == [None, None]
        assert hand_out(made, {1: others[1]}) == hand_out(plain, others)[1:] == [6.0]
        found, expected = made.state_dict(), plain.state_dict()
        for name in ("n_seen", "mean"):
            np.testing.assert_allclose(found["obs"][""][name], expected["obs"][""][name])
        assert found["reward"]["n_seen"] == expected["reward"]["n_seen"] == 4
        made.owed([0])
        made.begin([0])  # by a reset: nothing of it is handed out any more
        hand_out(made, {0: others[0]})
        assert made.state_dict()["reward"]["n_seen"] == 5


def test_a_manager_has_its_normalization_told_of_what_is_owed_again() -> None:
    with make("CartPole-v1", 1, type="base", episode_statistics=True) as manager:
        assert manager._running.owner._on_owed == [manager.normalization.owed]


def test_frozen_statistics_stay_and_are_used() -> None:
    trained = normalization(3, normalize_obs=True, normalize_reward=True)
    rows = RNG.normal(2.0, 3.0, (3, 2))
    trained.timesteps({i: step(row, float(i)) for i, row in enumerate(rows)}, fate())
    saved = pickle.loads(pickle.dumps(trained.state_dict()))
    config = ManagerConfig.from_mapping(
        {"normalize_obs": True, "normalize_reward": True, "normalization": {"frozen": True}}
    )
    evaluated = Normalization(config, 1)
    evaluated.load_state_dict(saved)  # before the spaces are known
    evaluated.adopt([described(SPACE)])
    obs = evaluated.ready({0: np.array([2.0, 2.0])})[0]
    expected = (2.0 - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-8)
    np.testing.assert_allclose(obs, expected, rtol=1e-5)
    told = evaluated.timesteps({0: step(np.full(2, 80.0), 3.0)}, fate())[0]
    np.testing.assert_allclose(told.reward, 3.0 / np.sqrt(np.var([0.0, 1.0, 2.0]) + 1e-8))
    assert pickle.dumps(evaluated.state_dict()) == pickle.dumps(saved)
    evaluated.frozen = False
    evaluated.timesteps({0: step(np.zeros(2))}, fate())
    assert evaluated.state_dict()["obs"][""]["n_seen"] == 4


def test_what_was_loaded_before_the_launch_is_there() -> None:
    keys = {"normalize_obs": True, "normalize_reward": True}
    trained = normalization(2, **keys)
    trained.timesteps({i: step(np.full(2, i), float(i)) for i in range(2)}, fate())
    saved = trained.state_dict()
    made = Normalization(ManagerConfig.from_mapping(keys), 2)
    made.load_state_dict(saved)
    assert pickle.dumps(made.state_dict()) == pickle.dumps(saved)
    assert made.obs_mean[""].tolist() == [0.5, 0.5]
    assert made.return_variance == trained.return_variance
    for _ in range(2):  # nothing is forgotten by a launch that refuses it
        with pytest.raises(ConfigError, match="do not fit"):
            made.adopt([described(Box(-1, 1, (3,)))])
        assert pickle.dumps(made.state_dict()) == pickle.dumps(saved)
    made.adopt([described(SPACE)])
    assert pickle.dumps(made.state_dict()) == pickle.dumps(saved)


def test_a_run_goes_on_from_its_state() -> None:
    keys = {"normalize_obs": True, "normalize_reward": True, "episode_statistics": True}
    one, other = normalization(2, **keys), normalization(2, **keys)
    both = {0: step(np.ones(2), 1.0), 1: step(np.zeros(2), 2.0)}
    one.timesteps(both, fate())
    other.load_state_dict(one.state_dict(episodes=True))
    told = [made.timesteps({1: step(np.ones(2), 3.0)}, fate())[1] for made in (one, other)]
    assert told[0].reward == told[1].reward
    assert pickle.dumps(one.state_dict(episodes=True)) == pickle.dumps(
        other.state_dict(episodes=True)
    )


def test_boxes_in_nested_observations_are_normalised_and_the_rest_is_left() -> None:
    space = Dict(
        pixels=Box(0, 255, (2, 2), np.uint8),
        goal=Tuple([Box(-1.0, 1.0, (3,), np.float32), Discrete(4)]),
        text=Text(5),
    )
    obs = {
        "pixels": np.full((2, 2), 7, np.uint8),
        "goal": (np.ones(3, np.float32), np.int64(3)),
        "text": "hello",
    }
    made = normalization(2, space, normalize_obs=True)
    (shown,) = made.adopt([described(space)])
    assert shown.observation_space["pixels"] == Box(-10.0, 10.0, (2, 2), np.float32)
    assert shown.observation_space["goal"][1] == Discrete(4)
    assert list(shown.observation_space) == list(space)  # policies join values in this order
    told = made.timesteps({1: step(obs)}, fate())[1].obs
    assert told["text"] == "hello"
    assert told["goal"][1] == 3
    assert told["pixels"].dtype == told["goal"][0].dtype == np.float32
    assert told["pixels"].tolist() == [[0, 0], [0, 0]]
    assert sorted(made.obs_mean) == ["['goal'][0]", "['pixels']"]
    keyed = normalization(
        2, space, normalize_obs=True, normalization={"keys": ["pixels"], "clip_obs": 1}
    )
    assert keyed.timesteps({1: step(obs)}, fate())[1].obs["goal"][0].tolist() == [1, 1, 1]


def test_rewards_keep_their_form() -> None:
    made = normalization(2, normalize_reward=True)
    shaped = np.array([2.0], np.float32)
    told = made.timesteps({0: step(np.zeros(2), shaped), 1: step(np.zeros(2), 3)}, fate())
    assert told[0].reward.shape == (1,)
    assert told[0].reward.dtype == np.float32
    assert type(told[1].reward) is float


def test_nothing_asked_for_is_nothing() -> None:
    assert normalization_of(ManagerConfig(), 2) is None


@pytest.mark.parametrize(
    "space", [Discrete(3), Text(3), Dict(a=Discrete(2)), Box(0, 1, (2,), bool)]
)
def test_observations_without_numbers_are_refused(space: Any) -> None:
    with pytest.raises(ConfigError, match="there is no Box to normalise"):
        normalization(1, space, normalize_obs=True)


def test_keys_that_observations_do_not_have_are_named() -> None:
    keys, space = {"keys": ["speed", "camra"]}, Dict(camera=Box(0, 1, (2,)), speed=Box(0, 1))
    with pytest.raises(UnknownKeyError, match=r"'camra' in .*\.keys: did you mean 'camera'\?"):
        normalization(1, space, normalize_obs=True, normalization=keys)
    with pytest.raises(ConfigError, match=r"no Box to normalise .* under \['speed', 'camra'\]"):
        normalization(1, normalize_obs=True, normalization=keys)


def test_what_cannot_be_normalised_is_refused() -> None:
    made = normalization(2, normalize_obs=True, normalize_reward=True)
    with pytest.raises(ConfigError, match="different observation spaces"):
        made.adopt([described(SPACE), described(Box(0, 1, (3,)))])
    with pytest.raises(ConfigError, match=r"rewards have the shape \(2,\)"):
        made.adopt([described(SPACE, Box(0, 1, (2,)))])
    for reward in (np.zeros(2), {"a": 1.0}, None):
        with pytest.raises(ConfigError, match="rewards that are one number"):
            made.timesteps({0: step(np.zeros(2), reward)}, fate())
    with pytest.raises(ConfigError, match="rewards that are one number"):
        made.batch(as_arrays({0: step(np.zeros(2), np.zeros(2))}), fate())


def test_states_that_do_not_fit_change_nothing() -> None:
    made = normalization(2, normalize_obs=True)
    good = made.state_dict(episodes=True)
    larger = normalization(3, normalize_obs=True).state_dict(episodes=True)
    other = normalization(2, Box(0, 1, (3,)), normalize_obs=True).state_dict()
    without = normalization(2, normalize_reward=True).state_dict()
    for bad in ({}, {**good, "version": 2}, larger, other, without, {**good, "obs": None}, 3):
        with pytest.raises(ConfigError, match="these statistics do not fit"):
            made.load_state_dict(bad)  # type: ignore[arg-type]
    assert pickle.dumps(made.state_dict(episodes=True)) == pickle.dumps(good)
