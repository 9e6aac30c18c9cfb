"""The kind that drives an EnvPool: with a stand-in for the package, and with it if it is there."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest

from envmgr import PoolEnvManager, create_env_manager
from envmgr.env import BatchedEnvSpec
from envmgr.errors import (
    ConfigError,
    EnvNotReadyError,
    MissingDependencyError,
    NothingReadyError,
)
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
        ({"env_pool": {"batch_size": 3}}, "batch_size is 3, which does not divide the 4 envs"),
        ({"env_pool": {"batch_size": 2}, "reset_inplace": True}, "reset_inplace is true"),
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
    with pytest.raises(MissingDependencyError, match=r"pip install 'rl-env-manager\[envpool\]'"):
        pool_of()


def test_an_asynchronous_batch_is_refused_where_it_has_no_place() -> None:
    spec = BatchedEnvSpec(dict, 4, batch_size=2)
    with pytest.raises(ConfigError, match="driven by the trainer's own thread"):
        create_env_manager({"type": "subprocess"}, env_fn=[spec] * 4)
    for batch_size in (0, 3, 8, 2.0):
        with pytest.raises(ConfigError, match="does not divide its 4 rows"):
            BatchedEnvSpec(dict, 4, batch_size=batch_size)  # type: ignore[arg-type]


# -- asynchronous mode ----------------------------------------------------------------------------


@pytest.mark.usefixtures("envpool")
@pytest.mark.parametrize("least", [None, 1, 3, 6])
def test_results_come_in_the_order_of_the_pool_and_belong_to_what_was_asked(
    least: int | None,
) -> None:
    """Each timestep is that of the action its env was sent; nothing is lost or given twice."""
    rng, sent, counts = np.random.default_rng(0), dict[int, tuple[int, Any]](), [0, 0]
    with pool_of(6, {"batch_size": 2}) as manager:
        assert [*manager.ready_env] == [*range(6)]
        for _ in range(150):
            for env_id, obs in (manager.ready_obs if manager.ready_env else {}).items():
                assert env_id not in sent
                sent[env_id] = int(rng.integers(4)), obs
                manager.send({env_id: sent[env_id][0]})
            timesteps = manager.recv(least)
            counts[0] += len(timesteps) < 6
            for env_id, (obs, reward, done, _) in timesteps.items():
                action, before = sent.pop(env_id)
                assert (reward, done) == (action, action == 3)
                assert obs.tolist() == [before[0], before[1], before[2] + 1]
                counts[1] += done
        stats = manager.stats()
        assert stats["failures"] == stats["cancelled"] == 0
        assert stats["outstanding"] == len(sent)
    assert counts[1] > 50
    assert counts[0] > 50 or least == 6


@pytest.mark.usefixtures("envpool")
def test_a_pool_that_can_give_nothing_is_not_waited_for() -> None:
    with pool_of(4, {"batch_size": 2}) as manager:
        manager.send({0: 1})
        with pytest.raises(NothingReadyError, match=r"envs \[0\] have .* before 2 of"):
            manager.recv()
        assert manager.recv(timeout_s=1.0) == {}
        with pytest.raises(EnvNotReadyError, match="Name all of envs 0 to 3"):
            manager.reset({2: None})
        manager.send({1: 1, 2: 1})
        assert len(manager.recv(3)) == 2  # as many as can come
        manager.send({3: 1})
        assert len(manager.recv(2)) == 2
        assert manager.ready_env == [0, 1, 2, 3]
        manager.send(dict.fromkeys(range(4), 1))
        given = 0
        for _ in range(100):  # who does not wait gets on all the same
            given += len(manager.recv(timeout_s=0)) if given < 4 else 0
        assert given == 4


@pytest.mark.usefixtures("envpool")
def test_episodes_of_an_asynchronous_pool_end_begin_and_are_seeded() -> None:
    with pool_of(4, {"batch_size": 2}, episode_num=2) as manager:
        manager.send(dict.fromkeys(range(4), 3))
        assert len(manager.recv(4)) == 4
        assert [obs.tolist() for obs in manager.ready_arrays([0, 1, 2, 3]).obs] == [
            [10 + i, 2, 0] for i in range(4)
        ]
        manager.step({0: 3, 1: 3, 2: 3})  # those that are done are stepped when others are too few
        manager.recv()
        manager.step({3: 0})
        assert manager.env_states[3].name == "RUN"
        manager.step({3: 3})
        assert manager.done
        manager.reset()
        assert {obs[2] for obs in manager.ready_obs.values()} == {0.0}
        manager.send({0: 1})  # is under way while all are reset, with other seeds
        manager.seed(50)
        manager.reset()
        assert {i: obs.tolist() for i, obs in manager.ready_obs.items()} == {
            i: [50 + i, 1, 0] for i in range(4)
        }
        assert manager.stats()["failures"] == 0
    assert [made["seed"] for made in fake_envpool.MADE] == [10, [50, 51, 52, 53]]


@pytest.mark.usefixtures("envpool")
def test_what_goes_wrong_in_a_pool_takes_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(4, {"batch_size": 2}) as manager:
        recv = fake_envpool.Pool.recv

        def fail(pool: Any) -> Any:
            monkeypatch.setattr(fake_envpool.Pool, "recv", recv)
            raise RuntimeError("in C++")

        monkeypatch.setattr(fake_envpool.Pool, "recv", fail)
        manager.send(dict.fromkeys(range(4), 1))
        timesteps = manager.recv(4)
        assert all(t.info["abnormal"] for t in timesteps.values())
        assert "in C++" in str(timesteps[0].info["error"])
        assert [obs[2] for obs in manager.ready_arrays([0, 1, 2, 3]).obs] == [0.0] * 4
        assert len(manager.step(dict.fromkeys(range(4), 1))) == 2


@pytest.mark.usefixtures("envpool")
@pytest.mark.parametrize("after", range(1, 8))
def test_an_interrupt_in_an_asynchronous_pool_loses_nothing(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C costs what was under way in the pool an abnormal timestep; none is lost."""
    recv, calls = fake_envpool.Pool.recv, [0]

    def interrupted(pool: Any) -> Any:
        calls[0] += 1
        result = recv(pool)
        if calls[0] == after:
            raise KeyboardInterrupt
        return result

    with pool_of(4, {"batch_size": 2}) as manager:
        monkeypatch.setattr(fake_envpool.Pool, "recv", interrupted)
        sent, given = 0, 0
        for _ in range(20):
            try:
                is_due = manager.ready_env or not manager.stats()["outstanding"]
                actions = dict.fromkeys(manager.ready_obs, 1) if is_due else {}
                if actions:
                    manager.send(actions)
                sent += len(actions)
                given += len(manager.recv())
            except KeyboardInterrupt:
                continue
        assert given == sent - manager.stats()["outstanding"]
        assert given >= 20


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


@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")
def test_the_package_itself_in_asynchronous_mode() -> None:
    """Each env goes through the very episodes that a pool of it alone does."""
    envpool, rng, n = pytest.importorskip("envpool"), np.random.default_rng(0), 8
    seen: list[list[Any]] = [[] for _ in range(n)]
    section = {"env_id": "CartPole-v1", "num_threads": 2, "batch_size": 2, "infos": []}
    with PoolEnvManager({"env_num": n, "seed": 3, "env_pool": section}) as manager:
        for _ in range(500):
            ready = manager.ready_obs if manager.ready_env else {}
            actions = {i: int(rng.integers(2)) for i in ready}
            for i, obs in ready.items():
                seen[i].append((obs, actions[i]))
            manager.send(actions)
            timesteps = manager.recv()
            for i, timestep in timesteps.items():
                seen[i].append((timestep.obs, timestep.done))
        assert manager.stats()["failures"] == 0
    for i, told in enumerate(seen):
        alone = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=1, seed=[3 + i])
        obs, ended = alone.reset()[0][0], False
        for (before, action), (after, done) in zip(told[::2], told[1::2], strict=False):
            obs = alone.reset()[0][0] if ended else obs
            assert np.array_equal(before, obs)
            (obs,), _, (ended,), _, _ = alone.step(np.array([action]))
            assert np.array_equal(after, obs)
            assert done == ended
    assert sum(done for told in seen for _, done in told[1::2]) > 10
