"""The kind that drives an EnvPool: with a stand-in for the package, and with it if it is there."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest

from envmgr import PoolEnvManager, create_env_manager
from envmgr.errors import ConfigError, MissingDependencyError
from tests import fake_envpool


@pytest.fixture
def envpool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", fake_envpool)
    fake_envpool.MADE.clear()


def pool_of(n: int = 4, env_pool: Any = None, **cfg: Any) -> Any:
    section = {"env_id": "Pong-v5", "infos": [], **(env_pool or {})}
    cfg = {"type": "env_pool", "env_num": n, "seed": 10, "env_pool": section, **cfg}
    return create_env_manager(cfg)


@pytest.mark.usefixtures("envpool")
def test_each_env_of_a_pool_is_an_env() -> None:
    with pool_of(episode_num=2) as manager:
        assert isinstance(manager, PoolEnvManager)
        assert {i: obs.tolist() for i, obs in manager.ready_obs.items()} == {
            i: [10 + i, 1, 0] for i in range(4)
        }
        timesteps = manager.step({0: 1, 1: 3, 2: 2, 3: 0})
        assert [t.obs.tolist() for t in timesteps.values()] == [[10 + i, 1, 1] for i in range(4)]
        assert [t.reward for t in timesteps.values()] == [1.0, 3.0, 2.0, 0.0]
        assert timesteps[1].info == {"terminated": True, "truncated": False}
        assert manager.ready_obs[1].tolist() == [11, 2, 0]
        assert [*manager.step({2: 1, 0: 3})] == [2, 0]  # some of them
        assert manager.ready_obs[0].tolist() == [10, 2, 0]
        manager.reset({3: None})
        assert manager.ready_obs[3].tolist() == [13, 2, 0]
        manager.step({1: 3})
        assert manager.env_states[1].name == "DONE"
        manager.seed(50)
        manager.reset()
        assert [obs.tolist() for obs in manager.ready_obs.values()] == [
            [50 + i, 1, 0] for i in range(4)
        ]
        assert manager.stats()["failures"] == 0
    assert [made["seed"] for made in fake_envpool.MADE] == [10, [50, 51, 52, 53]]


@pytest.mark.usefixtures("envpool")
def test_what_a_pool_is_made_with_and_what_it_tells() -> None:
    options = {"frame_skip": 4, "gray_scale": False, "infos": None, "kwargs": {"ram": 1}}
    with pool_of(env_pool=options, seed=[5, 9, 2, 7]) as manager:
        assert [obs[0] for obs in manager.ready_obs.values()] == [5, 9, 2, 7]
        assert manager.step({2: 0})[2].info["lives"] == 2
    first, second = fake_envpool.MADE
    assert first == {
        "task_id": "Pong-v5",
        "env_type": "gymnasium",
        "seed": 0,
        "frame_skip": 4,
        "gray_scale": False,
        "ram": 1,
    }
    assert second["seed"] == [5, 9, 2, 7]


@pytest.mark.usefixtures("envpool")
@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        ({"env_pool": {"batch_size": 2}}, "batch_size is 2, but there are 4 envs"),
        ({"env_pool": {"env_id": "Pnog-v5"}}, "did you mean 'Pong-v5'"),
        ({"env_pool": {"env_id": None}}, "env_id which"),
        ({"n": None}, "in manager.env_num how many"),
        ({"spare_env_num": 1}, "spare_env_num is 1"),
    ],
)
def test_what_is_refused(cfg: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        pool_of(**cfg)


@pytest.mark.usefixtures("envpool")
def test_a_pool_takes_no_factories_and_no_reset_params() -> None:
    with pytest.raises(ConfigError, match="makes its envs itself, but env_fn has 1"):
        create_env_manager({"type": "env_pool", "env_num": 1}, env_fn=[dict])
    with (
        pool_of(max_failures=0) as manager,
        pytest.raises(Exception, match="takes no reset params"),
    ):
        manager.reset({0: {"level": 3}})


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[envpool\]'"):
        pool_of()


@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")
def test_the_package_itself() -> None:
    envpool = pytest.importorskip("envpool")
    reference = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, seed=3)
    cfg = {"env_id": "CartPole-v1", "num_threads": 1}
    with PoolEnvManager({"env_num": 4, "seed": 3, "env_pool": cfg}) as manager:
        assert np.array_equal(manager.ready_arrays().obs, reference.reset()[0])
        for _ in range(5):
            manager.send_arrays([0, 1, 2, 3], np.ones(4, np.int64))
            found, expected = manager.recv_arrays(), reference.step(np.ones(4, np.int64))
            assert np.array_equal(found.obs, expected[0])
        while not (ended := manager.recv_arrays().ended.tolist() if sent(manager) else []):
            pass
        assert all(abs(manager.ready_obs[i][0]) <= 0.05 for i in ended)
        assert manager.stats()["failures"] == 0
    assert importlib.import_module("envpool") is envpool


def sent(manager: Any) -> bool:
    manager.send_arrays([0, 1, 2, 3], np.ones(4, np.int64))
    return True
