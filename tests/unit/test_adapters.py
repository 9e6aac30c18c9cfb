"""What all adapters share: batches of fixed width, and what becomes of failures."""

import contextlib
import importlib
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmgr import as_gymnasium, create_env_manager
from envmgr.adapters.batches import FixedBatches
from envmgr.adapters.on_failure import plain_info, raise_in_trainer, raises
from envmgr.adapters.rows import Rows, joined
from envmgr.errors import (
    ConfigError,
    EnvCrash,
    EnvManagerError,
    EnvRaised,
    FailuresExhaustedError,
    LaunchError,
    MissingDependencyError,
)
from envmgr.outcomes import failure_in
from envmgr.spaces import indexed, put_rows


def raised(type_name: str = "ValueError", message: str = "too far") -> EnvRaised:
    return EnvRaised(
        f"env 1 raised {type_name}\n\nTraceback: its line 7",
        env_id=1,
        during="step",
        type_name=type_name,
        remote_message=message,
        remote_traceback="its line 7",
    )


def batches(**cfg: object) -> FixedBatches:
    manager = create_env_manager({"type": "base", **cfg}, env_fn=[lambda: None] * 2)
    return FixedBatches(manager, adapter="as_x")


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        ({"on_exhausted": "drop"}, "Take on_exhausted: raise"),
        ({"episode_num": 3}, "episode_num: 3"),
        ({"auto_reset": False}, "auto_reset: true"),
    ],
)
def test_managers_that_may_lose_rows_are_refused(cfg: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=r"as_x needs .*" + says):
        batches(**cfg)


@pytest.mark.parametrize(
    ("adapter", "lacking"),
    [
        ("sb3", "stable_baselines3.common.vec_env.base_vec_env"),
        ("tianshou", "tianshou.env"),
        ("torchrl", "torch"),
    ],
)
def test_a_trainer_that_is_not_there_is_said_of_what_was_imported(
    adapter: str, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"envmgr.adapters.{adapter}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, lacking, None)
    with pytest.raises(MissingDependencyError, match=rf"^{name} needs .*Install it: pip install"):
        importlib.import_module(name)


def test_what_is_no_manager_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"as_x takes a manager, .* found list"):
        FixedBatches([], adapter="as_x")  # type: ignore[arg-type]


def test_the_policy_is_the_managers_unless_the_user_asks() -> None:
    assert raises(None, "raise")
    assert raises("raise", "recover")
    assert not raises(None, "recover")
    assert not raises("recover", "recover")
    with pytest.raises(ConfigError, match="build it with on_failure: recover"):
        raises("recover", "raise")
    with pytest.raises(ConfigError, match="on_failure is 'ignore'"):
        raises("ignore", "recover")


def raised_for(error: EnvManagerError) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011 - which one is looked at by the test
        raise_in_trainer(error)
    return found.value


def test_a_builtin_exception_of_one_string_is_raised_as_what_it_was() -> None:
    failure = raised()
    for error in (failure, FailuresExhaustedError("too often", failure)):
        found = raised_for(error)
        assert type(found) is ValueError
        assert str(found) == "too far"
        assert found.__cause__ is failure


@pytest.mark.parametrize("key", ["level", 3, ("a", 1), object])
def test_a_key_error_has_the_key_that_was_missing(key: object) -> None:
    found = raised_for(raised("KeyError", str(KeyError(key))))
    assert type(found) is KeyError
    assert found.args == (key if key is not object else repr(object),)


@pytest.mark.parametrize(
    "type_name", ["UnicodeDecodeError", "KeyboardInterrupt", "mine.ValueError", "print", "__doc__"]
)
def test_other_exceptions_are_raised_as_env_raised(type_name: str) -> None:
    failure = raised(type_name)
    assert raised_for(failure) is failure
    assert failure.__cause__ is None


def test_the_cause_of_what_ends_a_manager_is_what_is_raised() -> None:
    crash = EnvCrash("died", env_id=0, during="step")
    assert raised_for(FailuresExhaustedError("too often", crash)) is crash
    assert raised_for(LaunchError("no", {1: raised(), 0: crash})) is crash
    nothing = LaunchError("no")
    assert raised_for(nothing) is nothing


def test_infos_are_those_of_the_env_with_errors_as_text() -> None:
    info = {"x": 1, "terminated": False, "truncated": True, "abnormal": True, "error": raised()}
    plain = plain_info(info)
    assert plain.pop("error").startswith("EnvRaised: env 1 raised ValueError\n\nTraceback")
    assert plain == {"x": 1, "abnormal": True}
    assert plain_info([info])["info"][0]["x"] == 1
    assert failure_in([{}, info]) is info["error"]
    assert failure_in({"error": "an env's own"}) is None


def test_rows_that_came_one_after_the_other_are_joined_in_order() -> None:
    def rows(ids: list[int], infos: list[dict[str, int]] | None, ended: list[int]) -> Rows:
        column = np.array(ids)
        obs = {"a": column * 1.0, "b": (np.stack([column, column]).T,)}
        return Rows(obs, column * 2.0, column > 1, column > 2, infos, ended)

    first, second = rows([0, 3], None, [3]), rows([1, 2], [{}, {"k": 2}], [2])
    whole = joined([(np.array([0, 3]), first), (np.array([1, 2]), second)])
    assert whole.obs["a"].tolist() == [0, 1, 2, 3]
    assert whole.obs["b"][0].tolist() == [[i, i] for i in range(4)]
    assert whole.rewards.tolist() == [0, 2, 4, 6]
    assert whole.terminated.tolist() == [False, False, True, True]
    assert whole.truncated.tolist() == [False, False, False, True]
    assert whole.infos == [{}, {}, {"k": 2}, {}]
    assert whole.ended == [2, 3]
    put_rows(whole.obs, [1, 2], {"a": np.zeros(2), "b": (np.zeros((2, 2)),)})
    assert indexed(whole.obs, 1)["b"][0].tolist() == [0, 0]
    assert whole.obs["a"].tolist() == [0, 0, 0, 3]


def test_what_was_received_comes_again_until_something_is_sent() -> None:
    manager = create_env_manager({"type": "base"}, env_fn=[lambda: gymnasium.make("CartPole-v1")])
    it = FixedBatches(manager, adapter="as_x")
    it.reset(seed=0)
    it.send(np.array([0]))
    rows = it.receive()
    assert rows is not None
    assert it.receive() is rows
    it.send(np.array([1]))
    assert it.receive() is not rows
    it.send(np.array([1]))
    it.reset(seed=0)  # which cancels the step
    it.send(np.array([0]))
    again = it.receive()
    assert again is not None
    np.testing.assert_array_equal(again.obs, rows.obs)
    it.close()


class Short(gymnasium.Env[Any, Any]):
    """Has episodes of two steps, which count on."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    n = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.left, self.n = 2, self.n + 10
        return np.array([self.n], np.float64), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        self.n += 1
        return np.array([self.n], np.float64), 1.0, self.left == 0, False, {}


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_step_that_ctrl_c_ends_while_resets_are_awaited_is_not_lost(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(interrupted: bool) -> list[Any]:
        with monkeypatch.context() as patch:
            env = as_gymnasium(create_env_manager({"type": "base"}, env_fn=[Short] * 2), mode)
            env.reset(seed=0)
            ready_arrays, results = env.manager.ready_arrays, []

            def interrupt(env_ids: Any) -> Any:
                patch.setattr(env.manager, "ready_arrays", ready_arrays)
                raise KeyboardInterrupt

            for _ in range(6):
                env.step_async(np.array([0, 1]))
                if interrupted:
                    patch.setattr(env.manager, "ready_arrays", interrupt)
                    with contextlib.suppress(KeyboardInterrupt):
                        results.append(env.step_wait()[0].tolist())
                        continue
                results.append(env.step_wait()[0].tolist())
            env.close()
        return results

    assert steps(interrupted=True) == steps(interrupted=False)
