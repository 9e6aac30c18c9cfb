"""`normalize_obs`, `normalize_reward` and `episode_statistics`, on every kind and in every form."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr import as_gymnasium, create_env_manager, make
from envmgr.errors import ConfigError, LaunchError

ALL = {"normalize_obs": True, "normalize_reward": True, "episode_statistics": True, "seed": 0}


class Walk(gymnasium.Env[Any, Any]):
    """A random walk of 4 steps, or one that raises when it is told to."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.x = 0, self.np_random.normal(size=2).astype(np.float32)
        return self.x.copy(), {}

    def step(self, action: Any) -> Any:
        if action:
            raise RuntimeError("told to")
        self.t += 1
        self.x += self.np_random.normal(size=2).astype(np.float32)
        return self.x.copy(), float(self.x[0]), self.t == 4, False, {}


def run(cfg: dict[str, Any], *, arrays: bool) -> list[Any]:
    """Return all that a manager hands out in 20 steps, the third of which fails for env 1."""
    seen: list[Any] = []
    with create_env_manager({**ALL, **cfg}, env_fn=[Walk] * 3) as manager:
        assert manager.observation_space == Box(-10.0, 10.0, (2,), np.float32)
        for t in range(20):
            actions = [0, int(t == 2), 0]
            if arrays:
                seen.append(manager.ready_arrays([0, 1, 2]).obs.tolist())
                manager.send_arrays([0, 1, 2], actions)
                batch = manager.recv_arrays()
                infos, rest = list(batch.infos), (batch.obs.tolist(), batch.reward.tolist())
            else:
                manager.ready_arrays([0, 1, 2])
                seen.append([obs.tolist() for obs in manager.ready_obs.values()])
                steps = manager.step(dict(enumerate(actions))).values()
                infos = [step.info for step in steps]
                rest = [step.obs.tolist() for step in steps], [step.reward for step in steps]
            seen.append(rest)
            seen.append([(i.get("abnormal"), i.get("episode", {}).get("r")) for i in infos])
        assert manager.normalization is not None
        saved = manager.normalization.state_dict()
        assert saved["reward"]["n_seen"] == 20 * 3 - 1
        seen.append(str(saved))
        values = np.concatenate([np.ravel(part) for part in seen[1:-1:3] for part in part[:1]])
        assert 0.3 < values.std() < 2
    return seen


def test_it_is_the_same_in_every_form_and_on_every_kind() -> None:
    inplace = {"type": "base", "reset_inplace": True}
    expected = run(inplace, arrays=False)
    assert {failed for part in expected[2::3] for failed, _ in part} == {None, True}
    assert len({r for part in expected[2::3] for _, r in part}) > 5
    assert run(inplace, arrays=True) == expected
    assert run({**inplace, "type": "subprocess", "num_workers": 1}, arrays=True) == expected
    assert run({**inplace, "shared_memory": False, "type": "thread"}, arrays=False) == expected


def test_a_reset_by_hand_begins_anew_and_a_relaunch_goes_on() -> None:
    manager = create_env_manager({**ALL, "type": "base"}, env_fn=[Walk] * 2)
    with manager:
        manager.step({0: 0, 1: 0})
        assert manager.ready_obs.keys() == {0, 1}
        manager.reset({0: None})
        assert manager.ready_obs.keys() == manager.ready_obs.keys()  # counted once
        for _ in range(4):
            info = manager.step({0: 0})[0].info
        assert info["episode"]["l"] == 4
        assert _n_seen(manager) == 2 + 1 + 4 + (2 - 2)
    with manager:
        assert len(manager.ready_obs) == 2
        assert _n_seen(manager) == 9


def _n_seen(manager: Any) -> int:
    return int(manager.normalization.state_dict()["obs"][""]["n_seen"])


def test_what_an_interrupted_step_took_is_counted_when_it_is_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(timesteps: Any, delivery: Any) -> Any:
        raise KeyboardInterrupt

    with create_env_manager({**ALL, "type": "base"}, env_fn=[Walk]) as manager:
        for _ in range(3):
            manager.step({0: 0})
        with monkeypatch.context() as patched:
            patched.setattr(manager, "_shows_dicts", False)
            patched.setattr(manager._view, "timesteps", interrupted)
            with pytest.raises(KeyboardInterrupt):
                manager.step({0: 0})
        assert _n_seen(manager) == 4 - 1
        assert manager.recv()[0].info["episode"]["l"] == 4
        assert _n_seen(manager) == 4


@pytest.mark.parametrize("keys", [{}, ALL], ids=["plain", "normalised"])
def test_a_manager_keeps_nothing_of_the_functions_that_called_it(keys: dict[str, Any]) -> None:
    class Batch:
        pass

    def train() -> weakref.ref[Batch]:
        batch = Batch()
        manager.step({0: 0})
        manager.send_arrays([0], [0])
        manager.recv_arrays()
        return weakref.ref(batch)

    gc.disable()
    try:
        with create_env_manager({**keys, "type": "base"}, env_fn=[Walk]) as manager:
            assert train()() is None
    finally:
        gc.enable()


def test_adapters_show_what_is_handed_out() -> None:
    manager = create_env_manager({**ALL, "type": "base"}, env_fn=[Walk] * 2)
    envs = as_gymnasium(manager)
    try:
        obs, _ = envs.reset()
        assert envs.single_observation_space.high[0] == 10.0
        for _ in range(4):
            obs, _, ended, _, infos = envs.step(np.zeros(2, np.int64))
        assert obs.dtype == np.float32
        assert ended.all()
        assert infos["episode"]["l"].tolist() == [4, 4]
    finally:
        envs.close()


def test_what_cannot_be_normalised_fails_the_launch() -> None:
    class Numbered(Walk):
        observation_space = Discrete(3)  # type: ignore[assignment]

    manager = create_env_manager({**ALL, "type": "base"}, env_fn=[Numbered])
    with pytest.raises((ConfigError, LaunchError), match="no Box to normalise"):
        manager.launch()
    assert manager.closed
    plain = create_env_manager({"type": "base"}, env_fn=[Walk])
    assert plain.normalization is None


def test_the_first_episode_does_not_last_since_before_envs_were_built() -> None:
    built_s: list[float] = []

    class Slow(Walk):
        def __init__(self) -> None:
            time.sleep(0.05)
            built_s.append(time.monotonic())

    with make(Slow, type="base", episode_statistics=True) as manager:
        for _ in range(4):
            timestep = manager.step({0: 0})[0]
        assert 0.0 < timestep.info["episode"]["t"] <= time.monotonic() - built_s[-1]
