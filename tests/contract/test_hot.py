"""The ordinary step in C runs where it should: in the workers of each kind, and in the trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import envmgr.hot
from envmgr import BaseEnv, EnvTimestep, create_env_manager
from envmgr.core.collect import Collector, HandedOut
from envmgr.core.submit import Submitter
from envmgr.hot import hot
from envmgr.wire.block import block_is_possible
from tests.contract.harness import ready_all, step_all

pytestmark = pytest.mark.skipif(
    hot is None or not block_is_possible(), reason=f"no C: {envmgr.hot.WHY}"
)

N = 4
OBS = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
CALLED_BY_PYTHON, CALLED_BY_C, SOMEWHERE_ELSE = 0.0, 0.5, 1.0


def caller() -> Any:
    """Return an observation that says who has called the step of this env.

    Without C that is what `EnvRunner.take_step` has called; in C nothing comes between that and the
    batch.
    """
    frame = sys._getframe(2)
    known = {
        "env_runner.py": CALLED_BY_PYTHON,
        "gymnasium_env.py": CALLED_BY_PYTHON,
        "steps.py": CALLED_BY_PYTHON,
        "block_steps.py": CALLED_BY_C,
    }
    found = known.get(Path(frame.f_code.co_filename).name, SOMEWHERE_ELSE)
    return np.full(2, found, np.float32)


class FiveEnv(gymnasium.Env[Any, Any]):
    """An env of gymnasium."""

    observation_space, action_space = OBS, gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin."""
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        """Say who has called."""
        return caller(), 1.0, False, False, {}


class FourEnv(BaseEnv):
    """An env of envmgr."""

    observation_space, action_space = OBS, gymnasium.spaces.Discrete(3)
    reward_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        """Do nothing."""

    def reset(self, **params: Any) -> Any:
        """Begin."""
        return np.zeros(2, np.float32)

    def step(self, action: Any) -> Any:
        """Say who has called."""
        return EnvTimestep(caller(), 1.0, False, {})

    def close(self) -> None:
        """Do nothing."""


ON_TWO: dict[str, Any] = {"type": "subprocess", "context": "fork", "num_workers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "inline": {"type": "base"},
    "threads": {"type": "thread"},
    "fork": {"type": "subprocess", "context": "fork", "num_workers": 2},
    "a worker each": {"type": "subprocess", "context": "fork"},
    "spawn": {"type": "subprocess", "context": "spawn", "num_workers": 2},
    "server": {"type": "subprocess", "num_workers": 2},
    "limits": {"type": "subprocess", "context": "fork", "num_workers": 2, "step_timeout": 60.0},
    "limits on threads": {"type": "thread", "step_timeout": 60.0},
    "metrics": {"type": "subprocess", "context": "fork", "num_workers": 2, "metrics": {}},
    "views": {"type": "subprocess", "context": "fork", "num_workers": 2, "copy_on_get": False},
    "in place": {"type": "subprocess", "context": "fork", "num_workers": 2, "reset_inplace": True},
    "no NaN": {"type": "subprocess", "context": "fork", "num_workers": 2, "nan_policy": "raise"},
    "limit of resets": {**ON_TWO, "reset_timeout": 60.0},
    "metrics inline": {"type": "base", "metrics": {}},
    "metrics on threads": {"type": "thread", "metrics": {}},
    "views until the next send": {**ON_TWO, "copy_on_get": "until_send"},
    "some at a time": {**ON_TWO, "type": "async_subprocess", "wait_num": N},
    "spares": {"type": "subprocess", "context": "fork", "spare_env_num": 1},
    "budget of episodes": {**ON_TWO, "episode_num": 10},
    "an episode log": {**ON_TWO, "episode_log": "episodes.jsonl"},
}


def _step(manager: Any, form: str, actions: dict[int, int]) -> Any:
    """Take a step; return the observations."""
    if form == "dict":
        return [timestep.obs for timestep in manager.step(actions).values()]
    manager.send_arrays(list(actions), np.array(list(actions.values())))
    return list(manager.recv_arrays().obs)


@pytest.mark.parametrize("form", ["dict", "arrays"])
@pytest.mark.parametrize("name", CONFIGS)
def test_c_runs_in_workers_and_in_the_trainer(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # where the log is
    if name in ("spawn", "server") and form == "arrays":
        return  # as with dicts
    ran: Counter[str] = Counter()
    post, deliver = Submitter._post_in_c, Collector._deliver_in_c
    take_arrays = Collector.take_arrays

    def posted(*args: Any) -> bool:
        done = post(*args)
        ran["posted"] += done
        return done

    def delivered(*args: Any, **options: Any) -> None:
        ran["delivered"] += 1
        deliver(*args, **options)

    def taken_in_one_go(*args: Any) -> Any:
        taken = take_arrays(*args)
        ran["delivered"] += type(taken) is HandedOut
        return taken

    monkeypatch.setattr(Submitter, "_post_in_c", posted)
    monkeypatch.setattr(Collector, "take_arrays", taken_in_one_go)
    monkeypatch.setattr(Collector, "_deliver_in_c", delivered)
    env_class = FourEnv if form == "dict" and name in ("fork", "inline") else FiveEnv
    with create_env_manager(CONFIGS[name], env_fn=[env_class] * N) as manager:
        assert manager.stats()["hot"] == "used"
        actions = dict.fromkeys(range(N), 1)
        _step(manager, form, actions)  # the first says in which form actions are
        ran.clear()
        for _ in range(3):
            assert {float(one) for obs in _step(manager, form, actions) for one in obs} == {
                CALLED_BY_C
            }
    assert ran == {"posted": 3, "delivered": 3}


class PartsEnv(FiveEnv):
    """Its observations are a dict of an array, a number and a text, as MiniGrid's."""

    observation_space = gymnasium.spaces.Dict(
        who=OBS, n=gymnasium.spaces.Discrete(3), text=gymnasium.spaces.Text(5)
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin."""
        return {"who": np.zeros(2, np.float32), "n": 0, "text": "begin"}, {}

    def step(self, action: Any) -> Any:
        """Say who has called."""
        return {"who": caller(), "n": 2, "text": "on"}, 1.0, False, False, {}


@pytest.mark.parametrize("name", ["inline", "threads", "fork", "views", "in place", "no NaN"])
def test_c_takes_steps_whose_observations_have_several_parts(name: str) -> None:
    with create_env_manager(CONFIGS[name], env_fn=[PartsEnv] * N) as manager:
        for _ in range(3):
            for timestep in manager.step(dict.fromkeys(range(N), 1)).values():
                assert timestep.obs["who"].tolist() == [CALLED_BY_C] * 2
                assert (timestep.obs["n"], timestep.obs["text"]) == (2, "on")
                assert type(timestep.obs["n"]) is np.int64


def test_without_a_compiler_all_else_is_built(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    out = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *out],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CC": str(tmp_path / "no-compiler"), "ENVMGR_PURE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no-compiler" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("_hot*.so"))


def test_without_it_the_same_test_finds_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envmgr.hot.PURE, "1")  # workers inherit it
    config = {"type": "subprocess", "context": "spawn", "num_workers": 2}
    with create_env_manager(config, env_fn=[FiveEnv] * N) as manager:
        (obs, *_) = _step(manager, "dict", dict.fromkeys(range(N), 1))
    assert obs[0] == CALLED_BY_PYTHON


class EndingEnv(FiveEnv):
    """Ends each third step; its infos say which step that is, those of its resets which episode."""

    def __init__(self) -> None:
        self.episode, self.at = 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin."""
        self.episode, self.at = self.episode + 1, 0
        return np.zeros(2, np.float32), {"episode": self.episode}

    def step(self, action: Any) -> Any:
        """Count."""
        self.at += 1
        info = {"at": self.at, "x": 0.5 * self.at, "y": np.float64(action)}
        return caller(), 1.0, self.at == 3, False, info


@pytest.mark.parametrize("form", ["dict", "arrays"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", ["subprocess", "base"])
def test_ends_among_infos_are_found_in_c(
    kind: str, inplace: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = Counter[str]()
    mixed = Collector._mixed

    def looked(*args: Any) -> Any:
        looked_at["in Python"] += 1
        return mixed(*args)

    config: dict[str, Any] = {"type": kind, "reset_inplace": inplace}
    if kind == "subprocess":
        config |= {"context": "fork", "num_workers": 2}
    with create_env_manager(config, env_fn=[EndingEnv] * N) as manager:
        for number in range(60):
            if number == 40:  # the forms of infos are known by then
                monkeypatch.setattr(Collector, "_mixed", looked)
            at = number % 3 + 1
            ready_all(manager)
            actions = dict.fromkeys(range(N), number % 3)
            if form == "dict":
                steps = step_all(manager, actions)
                infos = [steps[i].info for i in range(N)]
                ends = [steps[i].done for i in range(N)]
            else:
                manager.send_arrays(list(actions), np.array(list(actions.values())))
                batch = manager.recv_arrays(min_ready=N)
                infos, ends = list(batch.infos), list(batch.terminated)
                values, present = batch.info_columns["at"]
                assert (values.tolist(), present.all()) == ([at] * N, True)
            assert ends == [at == 3] * N
            expected = {"at": at, "x": 0.5 * at, "y": np.float64(number % 3)}
            for info in infos:
                told = {key: info[key] for key in expected}
                assert told == expected
                assert [type(value) for value in told.values()] == [int, float, np.float64]
                assert info.get("terminated", False) is (at == 3)
        assert not looked_at
        ready_all(manager)
        begun = {info["episode"] for info in manager.ready_info.values()}
        assert begun == {21}
