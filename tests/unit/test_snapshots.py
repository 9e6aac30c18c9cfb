"""Snapshots of managers that run their envs inline, and the files of snapshots."""

from __future__ import annotations

import json
import os
import pickle
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmgr import Snapshot, create_env_manager
from envmgr.errors import (
    ConfigError,
    EnvNotReadyError,
    EnvRaised,
    FailuresExhaustedError,
    ManagerClosedError,
    SnapshotError,
    SnapshotMismatchError,
)
from envmgr.manager.snapshots import EnvSnapshot
from tests.unit.test_env_states import Given
from tests.walkers import Walker


@pytest.fixture
def make() -> Iterator[Any]:
    """Return what launches managers inline, which are closed in the end."""
    managers = []

    def make(*env_fn: Any, **config: Any) -> Any:
        config = {"type": "base", "snapshot_copy": True, "seed": 3, **config}
        managers.append(create_env_manager(config, env_fn=list(env_fn) or [Walker] * 3))
        managers[-1].launch()
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


def played(manager: Any, n_steps: int) -> list[Any]:
    """Return all that there is to see in a run."""
    found: list[Any] = []
    for _ in range(n_steps):
        ended = [i for i, state in manager.env_states.items() if state.name == "NEED_RESET"]
        if ended:
            manager.reset(dict.fromkeys(ended))
        ready = manager.ready_obs
        found.append({i: obs.tolist() for i, obs in ready.items()})
        found.append(manager.ready_info)
        timesteps = manager.step(manager.random_action())
        found.append({i: (t.obs.tolist(), *t[1:]) for i, t in timesteps.items()})
        found.append(manager.env_states)
        if manager.done:
            break
    return found


class Stumbling(Walker):
    """Raises now and then, and is renewed."""

    def step(self, action: Any) -> Any:
        if self._n == 4 and action == 2:
            raise RuntimeError("stumbled")
        return super().step(action)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"auto_reset": False},
        {"episode_num": 2},
        {"reset_inplace": True, "normalize_obs": True, "episode_statistics": True},
        {"max_episodes_per_worker": 2},
        {"retry_type": "renew", "max_failures": 100, "max_failures_total": 1000},
    ],
)
def test_a_run_goes_on_bit_for_bit(make: Any, config: dict[str, Any]) -> None:
    env_fn = [Stumbling if "retry_type" in config else Walker] * 3
    manager, other = make(*env_fn, **config), make(*env_fn, **{**config, "seed": 70})
    manager.seed(5, dynamic_seed=True)
    manager.reset()
    for n_before in (4, 3, 5):
        played(manager, n_before)
        manager.seed(9)  # for the next reset that is asked for
        snapshot = manager.snapshot()
        expected = _comparable(played(manager, 12))
        figures = [manager.stats()[name] for name in ("generations", "resets", "states")]
        for again in (manager, other):
            again.restore(pickle.loads(pickle.dumps(snapshot)))
            assert _comparable(played(again, 12)) == expected
            stats = again.stats()
            assert [stats[name] for name in ("generations", "resets", "states")] == figures
            assert stats["actions"] == stats["timesteps"] + stats["cancelled"]
        if manager.done:
            break


@pytest.mark.parametrize("limit", [1, 1000, None])
def test_who_waits_for_a_new_worker_waits_on(make: Any, limit: int | None) -> None:
    """Also where the worker in which the run is restored has not reached a limit, or has none."""
    config = {"type": "thread", "num_workers": 1, "max_episodes_per_worker": 1}
    manager = make(Walker, Walker, **config)
    other = make(Walker, Walker, **{**config, "max_episodes_per_worker": limit})
    manager.reset({1: {"longer": 9}})
    while not manager.step({0: 0, 1: 0})[0].done:
        pass
    snapshot = manager.snapshot()
    assert [state.name for state in manager.env_states.values()] == ["RESET", "RUN"]
    for again in (manager, other):
        again.restore(snapshot)
        assert again.ready_env == [1]
        while not again.step({1: 0})[1].done:
            pass
        assert list(again.ready_arrays([0, 1]).obs[:, 1]) == [0, 0]
        assert again.stats()["generations"] == [1, 1]


def _comparable(found: list[Any]) -> list[Any]:
    """Return what was seen, without durations, and with what errors say in place of them."""
    for part in found:
        for info in (seen[3] for seen in part.values() if isinstance(seen, tuple)):
            if "error" in info:
                info["error"] = str(info["error"])
            info.get("episode", {}).pop("t", None)
    return found


def test_steps_under_way_are_a_part_of_it(make: Any) -> None:
    manager, other = make(), make(seed=8)
    played(manager, 2)
    manager.send({0: 1, 2: 3})
    snapshot = manager.snapshot()
    assert manager.stats()["outstanding"] == 2
    expected = {i: t.obs.tolist() for i, t in manager.recv().items()}
    assert list(expected) == [0, 2]
    other.send({0: 0, 1: 0})
    other.restore(snapshot)
    stats = other.stats()
    assert (stats["outstanding"], stats["cancelled"]) == (2, 2)
    assert other.ready_env == [1]
    with pytest.raises(EnvNotReadyError):
        other.step({0: 1})
    found = other.step({})
    assert {i: t.obs.tolist() for i, t in found.items()} == expected
    assert played(other, 20) == played(manager, 20)


def test_other_envs_are_refused_before_anything_is_changed(make: Any) -> None:
    class Narrow(Walker):
        """Walks elsewhere."""

        action_space = gymnasium.spaces.Discrete(2)

    def longer() -> Any:
        return gymnasium.wrappers.TimeLimit(Walker(), 50)

    manager = make()
    played(manager, 2)
    snapshot = manager.snapshot()
    refused: list[tuple[Any, str]] = [
        (make(Walker).snapshot(), "has 1 envs, this manager has 3"),
        (make(Narrow, Narrow, Narrow).snapshot(), "env 0 of the snapshot has the spaces"),
        (make(Walker, longer, Walker).snapshot(), "env 1 cannot be restored: .*TimeLimit"),
        (Snapshot(snapshot.envs, snapshot.common, 2), "format 2, this version .* format 1"),
        (Snapshot(snapshot.envs, b"no pickle"), "cannot be read"),
        (_of_kind(snapshot, "Pong-v5 {}"), "env 1 of the snapshot is Pong-v5"),
    ]
    expected = played(manager, 3)
    for other, reason in refused:
        manager.restore(snapshot)
        played(manager, 1)
        before = manager.env_states, manager.ready_obs[1].tolist(), manager.stats()
        with pytest.raises(SnapshotMismatchError, match=reason):
            manager.restore(other)
        assert (manager.env_states, manager.ready_obs[1].tolist(), manager.stats()) == before
    manager.restore(snapshot)
    assert played(manager, 3) == expected
    for nothing in (None, 3, b"bytes"):
        with pytest.raises(ConfigError, match="Snapshot or the path of one"):
            manager.restore(nothing)


def _of_kind(snapshot: Snapshot, kind: str) -> Snapshot:
    first, second, third = snapshot.envs
    return Snapshot((first, second._replace(kind=kind), third), snapshot.common)


def test_registered_envs_are_told_by_what_they_were_made_with(make: Any) -> None:
    def cart_pole(**kwargs: Any) -> Any:
        return make(lambda: gymnasium.make("CartPole-v1", **kwargs))

    snapshot = cart_pole(sutton_barto_reward=True).snapshot()
    with pytest.raises(SnapshotMismatchError, match=r'CartPole-v1 {"sutton_barto_reward": true}'):
        cart_pole().restore(snapshot)
    cart_pole(sutton_barto_reward=True, render_mode=None).restore(snapshot)


def test_envs_that_cannot_be_saved_say_what_is_missing(make: Any) -> None:
    def locked() -> Any:
        env = Walker()
        env.lock = threading.Lock()  # type: ignore[attr-defined]
        return env

    with pytest.raises(SnapshotError, match=r"env 1 cannot be taken: .*'lock' .lock. of Walker"):
        make(Walker, locked).snapshot()
    with pytest.raises(SnapshotError, match=r"env 0 .*get_state.*snapshot_copy: true"):
        make(Walker, snapshot_copy=False).snapshot()
    make(Given, snapshot_copy=False).snapshot()

    class Odd(Walker):
        """Its info cannot be saved."""

        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"lock": threading.Lock()}

    manager = make(Odd)
    manager.send({0: 1})
    with pytest.raises(SnapshotError, match="env 0, its infos for example, cannot be pickled"):
        manager.snapshot()
    assert manager.recv()[0].info["lock"]
    with pytest.raises(SnapshotError, match=r"rows of batched envs"):
        make(Walker, Walker, type="gym_vector").snapshot()


class Fragile(Given):
    """Its own methods raise, if they are told to."""

    fails: Any = None

    def get_state(self) -> Any:
        if self.fails == "get":
            raise ValueError("not now")
        return super().get_state()

    def set_state(self, state: Any) -> None:
        if self.fails == "set":
            self._n = -1
            raise ValueError("not so")
        super().set_state(state)


def test_what_an_envs_own_methods_raise_is_its_failure(make: Any) -> None:
    manager = make(Fragile, Fragile)
    manager.step({0: 1, 1: 1})
    snapshot = manager.snapshot()
    manager.set_attr("fails", "get", env_ids=1)
    with pytest.raises(EnvRaised, match="not now"):
        manager.snapshot()
    manager.set_attr("fails", "set", env_ids=1)
    before = manager.ready_obs[0].tolist()
    with pytest.raises(EnvRaised, match="not so"):
        manager.restore(snapshot)
    assert manager.ready_obs[0].tolist() == before
    manager.set_attr("fails", None)
    manager.restore(snapshot)


def test_envs_that_are_gone_and_managers_that_are_not_there(make: Any) -> None:
    class Fatal(Walker):
        """Cannot be reset again."""

        def reset(self, **kwargs: Any) -> Any:
            if getattr(self, "_n", 0):
                raise RuntimeError("no more")
            return super().reset(**kwargs)

    manager = make(Fatal, Walker, max_failures=0)
    snapshot = manager.snapshot()
    while True:
        try:
            manager.step(dict.fromkeys(manager.ready_env, 3))
            manager.ready_arrays([0, 1])
        except FailuresExhaustedError:
            break
    for call in (manager.snapshot, lambda: manager.restore(snapshot)):
        with pytest.raises(EnvNotReadyError, match=r"envs \[0\] have failed for good"):
            call()
    manager.reset({0: None})
    manager.restore(snapshot)
    manager.close()
    for call in (manager.snapshot, lambda: manager.restore(snapshot)):
        with pytest.raises(ManagerClosedError):
            call()


# -- files ------------------------------------------------------------------------------------


def a_snapshot(text: bytes = b"state") -> Snapshot:
    envs = (EnvSnapshot("Pong {}", b"record", text, 3), EnvSnapshot("Pong {}", b"", b"", 0))
    return Snapshot(envs, b"common")


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.snapshot"
    first, second = a_snapshot(), a_snapshot(b"\n" * 1000)
    first.save(path)
    assert Snapshot.load(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def fail(*args: Any) -> None:
        raise OSError("the disk is full")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail)
            with pytest.raises(OSError, match="disk is full"):
                second.save(str(path))
        assert Snapshot.load(str(path)) == first
        assert os.listdir(tmp_path) == ["run.snapshot"]
    second.save(path)
    assert Snapshot.load(path) == second == pickle.loads(pickle.dumps(second))
    assert (second.env_num, second.nbytes) == (2, 1012)
    with pytest.raises(FileNotFoundError):
        second.save(tmp_path / "nowhere" / "run.snapshot")
    with pytest.raises(FileNotFoundError):
        Snapshot.load(tmp_path / "other")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.snapshot"
    a_snapshot().save(path)
    data = path.read_bytes()
    for k in range(0, len(data), 3):
        path.write_bytes(data[:k] + bytes([data[k] ^ 1]) + data[k + 1 :])
        try:
            loaded = Snapshot.load(path)
        except SnapshotError:
            continue
        assert loaded != a_snapshot()  # in the header: of another kind, which restore refuses
        assert [env.state for env in loaded.envs] == [b"state", b""]
    for cut in (b"", data[:5], data[:-1], data + b"x", b"{}", data.split(b"\n")[0] + b"\n{}\n"):
        path.write_bytes(cut)
        with pytest.raises(SnapshotError):
            Snapshot.load(path)
    path.write_bytes(data.replace(b'"format": 1', b'"format": 7'))
    with pytest.raises(SnapshotMismatchError, match="format 7"):
        Snapshot.load(path)


def test_a_file_of_anything_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.snapshot"
    a_snapshot().save(path)
    magic, line, data = path.read_bytes().split(b"\n", 2)
    header = json.loads(line)
    odd = [None, 1e400, -1, "x", [], {}, 1 << 70, [1e400], [["k", 1e400]] * 2, [["k", "7" * 9000]]]
    others = [{**header, key: value} for key in header for value in odd]
    lines = [json.dumps(each).encode() for each in (*others, *odd)]
    lines += [b"[" * 200_000, b'{"a":' * 200_000, b"9" * 100_000, b"\xff\xfe"]
    for each in lines:
        path.write_bytes(b"\n".join((magic, each, data)))
        with pytest.raises(SnapshotError):
            Snapshot.load(path)


class _Exit:
    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def test_restoring_what_is_no_snapshot_of_these_envs_changes_nothing() -> None:
    config = {"type": "base", "snapshot_copy": True, "seed": 3}
    with create_env_manager(config, env_fn=[Walker] * 2) as manager:
        good = manager.snapshot()
        first, second = good.envs
        common, record = pickle.loads(good.common), pickle.loads(first.record)
        things = [1, None, "a", [1], {"a": 1}, (1, 2), _Exit(), Walker]
        pickles = [*map(pickle.dumps, things), b"", b"noise", b"(" * 100_000]
        wrong: list[Any] = []
        for each in pickles:
            wrong += [
                Snapshot(good.envs, each),
                Snapshot((first._replace(record=each), second), good.common),
                Snapshot((first._replace(state=each), second), good.common),
            ]
        for name in common._fields:
            odd = pickle.dumps(common._replace(**{name: object}))
            wrong.append(Snapshot(good.envs, odd))
        for name in vars(record).keys() - {"obs"}:  # which the space of the env decides
            odd = pickle.dumps(replace(record, **{name: object}))
            wrong.append(Snapshot((first._replace(record=odd), second), good.common))
        for value in (5, None, (1, 2), "xx"):
            wrong += [Snapshot(value, good.common), Snapshot(good.envs, value)]  # type: ignore[arg-type]
            wrong += [Snapshot((first._replace(episodes=[]), second), good.common)]  # type: ignore[arg-type]
        wrong += [Snapshot(good.envs, first.record), Snapshot(good.envs, first.state)]
        for snapshot in wrong:
            with pytest.raises(SnapshotError):
                manager.restore(snapshot)
        assert manager.generations == [0, 0]
        after = played(manager, 5)
        manager.restore(good)
        assert played(manager, 5) == after


def test_loading_a_file_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.snapshot"
    bomb = b"cos\n_exit\n(I1\ntR."
    Snapshot((EnvSnapshot("", bomb, bomb, 0),), bomb).save(path)
    assert Snapshot.load(path).envs[0].state == bomb


def test_arrays_come_back_as_they_were(make: Any, tmp_path: Path) -> None:
    manager = make()
    obs = manager.ready_obs[0]
    manager.snapshot().save(tmp_path / "a")
    obs[:] = 7.0
    manager.restore(tmp_path / "a")
    found = manager.ready_obs[0]
    assert not np.array_equal(found, obs)
    assert found.dtype == np.float64
    assert found.flags.writeable
