"""The contest of `envmgr bench`, the config of `envmgr init` and completion, without processes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from envmgr import create_env_manager
from envmgr.cli import main
from envmgr.cli.commands import envmgr
from envmgr.cli.init import _failed_text
from envmgr.config.env_factories import key_of
from envmgr.config_file import load_config
from envmgr.errors import EnvCrash, EnvManagerError
from envmgr.manager.loop import ManagerLoop
from envmgr.tuning.bench import OURS, advice, bench
from envmgr.tuning.benchmark_process import ContestantError
from envmgr.tuning.loops import GymnasiumLoop, look_at
from envmgr.tuning.measuring import Attempts, drawn_before
from envmgr.tuning.peers import PEERS, Peer, installed, loop_of
from envmgr.tuning.search import Measured
from envmgr.tuning.template import Tried, config_text

# -- bench ----------------------------------------------------------------------------------------


class Fake:
    """A contestant whose rates are known; it fails in a lap, or when it starts."""

    def __init__(self, log: list[str], name: str, rate: float, fails_in: int | None) -> None:
        self.log, self.name, self.rate, self.fails_in, self.runs = log, name, rate, fails_in, 0
        if fails_in == 0:
            raise ContestantError("no such thing")

    def run(self, seconds: float, lead_s: float = 0.0) -> float:
        self.runs += 1
        self.log.append(self.name)
        if self.runs == self.fails_in:
            raise ContestantError("it died")
        return self.rate

    def close(self) -> None:
        self.log.append(f"close {self.name}")


def test_contestants_run_in_turns_and_failures_are_theirs() -> None:
    peers, log = PEERS[:4], list[str]()
    rates = {OURS: 100.0, **{p.name: 50.0 * k for k, p in enumerate(peers, 1)}}
    fails = {peers[0].name: 2, peers[1].name: 0}

    def opened(peer: Peer | None) -> Fake:
        name = OURS if peer is None else peer.name
        return Fake(log, name, rates[name], fails.get(name))

    found, errors = bench(peers, opened, laps=3, seconds=1.0)
    assert errors == {peers[0].name: "it died", peers[1].name: "no such thing"}
    assert [one.setting for one in found[:3]] == [peers[3].name, peers[2].name, OURS]
    assert found[0].ratio == pytest.approx(2.0)
    names = [p.name for p in peers]
    assert log[:4] == [OURS, names[0], names[2], names[3]]
    assert log[4:6] == [names[3], names[2]]  # the other way round
    assert f"close {names[0]}" in log[4:-3], "as soon as it had failed"
    assert log[-3:] == [f"close {name}" for name in (OURS, names[2], names[3])]


def test_what_to_do_is_said_where_a_peer_in_the_same_process_is_ahead() -> None:
    def said(ratio: float, name: str = "gymnasium SyncVectorEnv", **config: Any) -> str:
        found = [Measured(OURS, {0: 1.0}, {0: 1.0}), Measured(name, {0: ratio}, {0: ratio})]
        return advice(found, PEERS, {"type": "subprocess", "num_workers": None, **config})

    text = said(3.3)
    assert text.startswith("gymnasium SyncVectorEnv is ahead because it steps the envs in the")
    assert "--set manager.num_workers=auto" in text
    assert "--set manager.type=base steps them there, too" in text, "not that it is as fast"
    shared = said(3.3, num_workers=2)
    assert "num_workers" not in shared
    assert "--set manager.env_num=64" in shared
    for kind in ("base", "base_v2", "thread", "gym_vector", "env_pool"):
        assert f"So does `{kind}`" in said(3.3, type=kind)
        assert "--set" not in said(3.3, type=kind)
    assert "--set manager.num_workers=auto" in said(3.3, type="async_subprocess_v2")
    assert said(1.05) == "", "that is noise"
    assert said(3.3, "gymnasium AsyncVectorEnv") == "", "workers of others are no other place"


def test_an_interrupt_ends_all_contestants() -> None:
    log: list[str] = []

    def opened(peer: Peer | None) -> Fake:
        if peer is PEERS[1]:
            raise KeyboardInterrupt
        return Fake(log, OURS if peer is None else peer.name, 1.0, None)

    with pytest.raises(KeyboardInterrupt):
        bench(PEERS[:2], opened, laps=1, seconds=1.0)
    names = [OURS, PEERS[0].name]
    assert log == [*names, *(f"close {name}" for name in names)]


def test_peers_are_those_that_are_installed() -> None:
    there, missing = installed(find=lambda name: None if name == "ding" else name)
    assert missing == ["ding"]
    assert {p.module for p in there} == {"gymnasium", "stable_baselines3", "tianshou"}


def test_a_loop_counts_steps_and_not_resets() -> None:
    sync = next(p for p in PEERS if "SyncVectorEnv" in p.cls and "Async" not in p.cls)
    loop = loop_of(sync, lambda: gymnasium.make("CartPole-v1", max_episode_steps=2), 3)
    loop.start()
    assert [loop.step() for _ in range(4)] == [3, 3, 0, 3]
    loop.close()
    with pytest.raises(TypeError, match="takes envs of gymnasium"):
        loop_of(sync, object, 1)
    assert isinstance(loop, GymnasiumLoop)
    look_at({"a": (np.zeros(2), 1)})


class Masked(gymnasium.Env[Any, Any]):
    """Says in each observation which actions are legal."""

    observation_space = gymnasium.spaces.Dict(action_mask=gymnasium.spaces.MultiBinary(2))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin."""
        return {"action_mask": np.array([0, 1], np.int8)}, {}

    def step(self, action: Any) -> Any:
        """Go on, with legal actions."""
        assert action == 1, "illegal"
        return {"action_mask": np.array([0, 1], np.int8)}, 1.0, False, False, {}


class MaskedInfos(gymnasium.Env[Any, Any]):
    """Says in each info which one of nine actions is legal now; ends now and then."""

    observation_space = gymnasium.spaces.Discrete(2)

    def __init__(self, n: int = 9) -> None:
        self.action_space = gymnasium.spaces.Discrete(n)

    def _info(self) -> dict[str, Any]:
        n = int(self.action_space.n)
        self.legal = int(self.np_random.integers(n))
        return {"action_mask": np.eye(n, dtype=np.int8)[self.legal]}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin."""
        super().reset(seed=seed)
        return 0, self._info()

    def step(self, action: Any) -> Any:
        """Go on, with legal actions."""
        assert action == self.legal, "illegal"
        return 0, 1.0, bool(self.np_random.random() < 0.2), False, self._info()


@pytest.mark.parametrize("env", [Masked, MaskedInfos])
@pytest.mark.parametrize("kind", ["base", pytest.param("base_v2", marks=pytest.mark.torch)])
def test_legal_actions_alone_are_measured(env: type, kind: str) -> None:
    if kind == "base_v2":
        pytest.importorskip("treetensor")
    with create_env_manager({"type": kind}, env_fn=[env] * 3) as manager:
        loop = ManagerLoop(manager)
        act = drawn_before(loop)
        for _ in range(20):
            loop.step(act(loop.ready()))
        assert manager.stats()["failures"] == 0


def test_a_mask_is_for_the_action_space_of_its_env() -> None:
    fns = [lambda n=n: MaskedInfos(n) for n in (2, 9)]
    with create_env_manager({"type": "base", "same_spaces": False}, env_fn=fns) as manager:
        loop = ManagerLoop(manager)
        for _ in range(20):
            loop.step(loop.random_actions(loop.ready()))
        assert manager.stats()["failures"] == 0


def test_peers_do_not_know_masks() -> None:
    with pytest.raises(TypeError, match=r"says in each observation \(action_mask\)"):
        loop_of(PEERS[1], Masked, 2)


# -- init -----------------------------------------------------------------------------------------

PROFILE = {
    "step_mean_s": 1e-5,
    "step_max_s": 3e-4,
    "reset_p50_s": 2e-3,
    "reset_max_s": 3.0,
    "episode_steps": 22.5,
}


TRIED = Tried(PROFILE, ("Box(...)", "Discrete(2)"), 8, ("rgb",))


@pytest.mark.parametrize("tried", [None, TRIED, TRIED._replace(loses_workers=True)])
def test_the_config_of_init_is_one(tried: Tried | None, tmp_path: Path) -> None:
    text = config_text("CartPole-v1", key_of("CartPole-v1"), 4, "c.yaml", tried)
    (tmp_path / "c.yaml").write_text(text)
    found = load_config(tmp_path / "c.yaml")
    assert (found.env.id, found.manager.env_num, found.manager.type) == (
        "CartPole-v1",
        4,
        "subprocess",
    )
    assert found.manager.reset_timeout == (None if tried is None else 200.0)
    alone = tried is not None and tried.loses_workers
    assert found.manager.num_workers == (None if alone else "auto")
    assert max(map(len, text.splitlines())) <= 100
    # What is a comment would be right, too.
    (tmp_path / "c.yaml").write_text(re.sub(r"^  # (\w+:)", r"  \1", text, flags=re.MULTILINE))
    assert load_config(tmp_path / "c.yaml").manager.on_failure == "recover"


def test_the_config_of_init_has_the_arguments_of_the_env(tmp_path: Path) -> None:
    kwargs = {"sutton_barto_reward": True, "sizes": [1, 2], "nested": {"a": None, "b": "x: y"}}
    text = config_text("CartPole-v1", "id", 4, "c.yaml", TRIED, kwargs)
    (tmp_path / "c.yaml").write_text(text)
    assert load_config(tmp_path / "c.yaml").env.kwargs == kwargs


def test_a_config_without_measured_times_has_limits(tmp_path: Path) -> None:
    text = config_text("CartPole-v1", "id", 4, "c.yaml", TRIED._replace(profile=None))
    assert "did not live long enough" in text
    (tmp_path / "c.yaml").write_text(text)
    manager = load_config(tmp_path / "c.yaml").manager
    assert (manager.step_timeout, manager.reset_timeout) == (10.0, 60.0)


def test_an_env_that_cannot_be_measured_is_refused_if_no_run_bears_it() -> None:
    died = [EnvCrash("w died: exit code 7", env_id=0, during="call")] * 8
    text = _failed_text([], 24, Attempts(None, 7976, died), 0.05)
    assert "8 of 8,000 steps that were tried failed (0.001 of them; a run bears 0.05" in text
    assert "no env lived long enough" in text
    assert "w died: exit code 7" in text
    with pytest.raises(EnvManagerError, match=r"none of 8 attempts .* so nothing was written"):
        _failed_text([], 24, Attempts(None, 100, died), 0.05)


def test_names_are_told_apart() -> None:
    assert [key_of(n) for n in ("CartPole-v1", "ALE/Pong-v5", "my:Env-v0")] == ["id"] * 3
    assert [key_of(n) for n in ("my_module:make", "a.b:Class")] == ["entry"] * 2


# -- completion -----------------------------------------------------------------------------------


def completed(args: list[str], incomplete: str) -> list[str]:
    shell = ShellComplete(envmgr, {}, "envmgr", "_ENVMGR_COMPLETE")
    return [item.value for item in shell.get_completions(args, incomplete)]


def test_commands_options_and_keys_are_completed() -> None:
    assert set(completed([], "")) >= {"bench", "chaos", "check", "init", "run", "show", "tune"}
    assert completed([], "tu") == ["tune"]
    assert "--episodes" in completed(["check", "c.yaml"], "--e")
    assert completed(["run", "c.yaml", "--set"], "manager.num_w") == ["manager.num_workers="]
    shell = ShellComplete(envmgr, {}, "envmgr", "_ENVMGR_COMPLETE")
    assert [item.type for item in shell.get_completions(["run"], "c")] == ["file"]


@pytest.mark.parametrize(
    ("shell", "cls"), [("bash", BashComplete), ("zsh", ZshComplete), ("fish", FishComplete)]
)
def test_there_is_a_script_for_each_shell(
    shell: str,
    cls: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(BashComplete, "_check_version", lambda *_: None)  # which would run bash
    monkeypatch.setitem(os.environ, "_ENVMGR_COMPLETE", f"{shell}_source")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    script = capsys.readouterr().out
    assert f"_ENVMGR_COMPLETE={shell}_complete" in script
    assert script.strip() == cls(envmgr, {}, "envmgr", "_ENVMGR_COMPLETE").source().strip()
