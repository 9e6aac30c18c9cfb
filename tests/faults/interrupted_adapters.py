"""Adapters as the subject of interrupts: what has to hold after each, whatever the trainer.

The contract, as of managers: after an interrupt at any point of any call the next call either goes
on, with what belongs to its own actions, or says in one typed error which method to call, and that
works. No step is executed twice, and none is lost but those that a reset discards.
"""

from __future__ import annotations

import importlib
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium.error import AlreadyPendingCallError, ResetNeeded

from envmgr import as_gymnasium, as_sb3, as_tianshou, create_env_manager
from envmgr.adapters.puffer import as_puffer
from envmgr.errors import EnvFailure, EnvNotReadyError
from tests.contract.trainers import adapter
from tests.faults.attacks import SIGNALS
from tests.faults.interrupted_calls import EPISODE_STEPS as ACCOUNTED_STEPS
from tests.faults.interrupted_calls import Account

EPISODE_STEPS = 3
N = 3
_BEGIN = -1.0
"""What the first observation of an episode says in place of an action."""

_OF_ENDED, _OF_ONE = "reset of what has ended", "reset of one"
"""Calls: resets of some envs."""

Column = npt.NDArray[Any]


class Counting(gym.Env[Any, Any]):
    """Its observation is (latest action, steps in the episode, steps ever); its infos have some."""

    observation_space = gym.spaces.Box(-1.0, 2.0**31, (3,), np.float64)
    action_space = gym.spaces.Discrete(2**31 - 1)
    render_mode = "rgb_array"
    label = "counting"

    def __init__(self) -> None:
        self._steps = self.ever = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._steps = 0
        return np.array([_BEGIN, 0.0, self.ever]), {"ever": self.ever}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Say what was asked for."""
        self._steps += 1
        self.ever += 1
        obs = np.array([float(action), self._steps, self.ever])
        info = {"ever": self.ever, "steps": self._steps}
        return obs, 1.0, self._steps >= EPISODE_STEPS, False, info

    def double(self, number: int) -> int:
        """Return a result."""
        return 2 * number

    def render(self) -> Any:
        """Return a picture."""
        return np.full((2, 2, 3), 7, np.uint8)


class Outcome(NamedTuple):
    """What a step has given, in no trainer's form.

    Attributes:
        env_ids: of the rows.
        obs: (k, 3): what the step led to, terminal observations included.
        shown: (k, 3): what the next action is for: at an episode's end what follows it.
        ended: (k,) bool.
        abnormal: (k,) bool.
    """

    env_ids: Sequence[int]
    obs: Column
    shown: Column
    ended: Column
    abnormal: Column


class Driver(ABC):
    """An adapter, as a trainer uses it.

    Attributes:
        config: of the managers that it takes.
        errors: what it refuses calls with.
        remedies: by what the text of such an error names: what is to be called then.
        begins_with_step: the step after an episode's end shows what the next one begins with.
        shows_next: with an episode's end comes what the next one begins with.
        calls: further calls, by name; those in halves are `NAME_async` and `NAME_wait`.
    """

    config: Mapping[str, Any] = {}
    errors: tuple[type[Exception], ...] = (EnvNotReadyError,)
    remedies: Mapping[str, str] = {"step_wait": "finish", "reset(": "reset"}
    begins_with_step = False
    shows_next = False
    calls: Mapping[str, Callable[[], Any]]

    @abstractmethod
    def __init__(self, manager: Any) -> None: ...

    @abstractmethod
    def reset(self) -> Any:
        """Reset all envs; return their observations."""

    @abstractmethod
    def step(self, actions: Any) -> Any:
        """Take a whole step."""

    @abstractmethod
    def outcome(self, result: Any) -> Outcome:
        """Return a step's result as an outcome."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    def begin(self, actions: Any) -> None:
        """Send actions, where steps have two halves."""
        raise NotImplementedError

    def finish(self) -> Any:
        """Return what is under way, where that can be done."""
        raise NotImplementedError

    def reset_ended(self, env_ids: list[int]) -> Mapping[int, Any]:
        """Reset envs whose episodes have ended, where the trainer does that: observations."""
        return {}

    def reset_first(self) -> Mapping[int, Any] | None:
        """Reset env 0 alone, where that can be done at any time: its observation.

        And what the others show then, where the trainer is given that, too.
        """
        return None

    @property
    def acting(self) -> Sequence[int]:
        """The envs that the next actions are for."""
        return range(N)


class Trained:
    """A driver and its account of what the envs have done: see `attacks.Subject`.

    Args:
        driver: the class.
        config: of the manager.
        seed: of what comes after each interrupt.
    """

    signals = SIGNALS[:2]
    package = "adapters"

    def __init__(
        self, driver: Callable[[Any], Driver], config: Mapping[str, Any], seed: int = 0
    ) -> None:
        self._make, self._given_config = driver, dict(config)
        self._rng = random.Random(seed)
        self.abnormal = 0
        self._action = 0
        self._begin()

    def _begin(self) -> None:
        made = partial(create_env_manager, env_fn=[Counting] * N)
        own: Mapping[str, Any] = getattr(self._make, "config", {})
        config = {"max_failures": 10**6, **own, **self._given_config}
        self._inline = config["type"] == "base"
        self.manager = made(config)
        self.driver = self._make(self.manager)
        self._ever, self._steps = [0.0] * N, [0.0] * N
        self._ended: set[int] = set()
        self._perhaps_reset: set[int] = set()
        self._sent: dict[int, float] = {}
        self._may_be_lost = False
        self._reset()

    @property
    def names(self) -> list[str]:
        """The calls."""
        # To the end of an episode, and beyond it.
        nths = [0, EPISODE_STEPS - 1, *[EPISODE_STEPS] * self.driver.begins_with_step]
        kinds = ["step"]
        if type(self.driver).begin is not Driver.begin:
            kinds += ["begin", "finish"]
        names = [f"{kind} {nth}" for kind in kinds for nth in nths]
        driver = type(self.driver)
        if driver.reset_ended is not Driver.reset_ended:
            names.append(_OF_ENDED)
        if driver.reset_first is not Driver.reset_first:
            names.append(_OF_ONE)
        return [*names, "reset", *self.driver.calls, "close"]

    # -- the account ----------------------------------------------------------------------------

    def _actions(self) -> Column:
        found = []
        for env_id in self.driver.acting:
            self._action += 1
            self._sent[env_id] = float(self._action)
            found.append(self._action)
        return np.array(found)

    def _reset(self) -> None:
        for _ in range(1 + 2 * N):
            try:
                obs = self.driver.reset()
            except self.driver.errors as error:
                self._follow(error)
                continue
            self._was_reset(dict(enumerate(obs)))
            self._sent, self._may_be_lost = {}, False
            return
        raise AssertionError("wedged: it cannot be reset")

    def _reset_one(self) -> None:
        """Reset one env alone: with a step under way that is refused, or discards it."""
        for _ in range(1 + 2 * N):
            try:
                obs = self.driver.reset_first()
            except self.driver.errors as error:
                self._follow(error)
                continue
            if obs is not None:
                self._first_was_reset(obs)
            return
        raise AssertionError("wedged: an env alone cannot be reset")

    def _first_was_reset(self, obs: Mapping[int, Any]) -> None:
        """Check what was shown with a reset of env 0 alone.

        The others show what they showed before, or begin, as after a reset that was interrupted.
        """
        begun = {i: shown for i, shown in obs.items() if i == 0 or not self._is_at(i, shown)}
        self._was_reset(begun)
        for env_id in begun:
            self._sent.pop(env_id, None)

    def _is_at(self, env_id: int, shown: Any) -> bool:
        return tuple(shown[1:]) == (self._steps[env_id], self._ever[env_id])

    def _was_reset(self, obs: Mapping[int, Any]) -> None:
        """Check the first observations of episodes that were asked for."""
        for env_id, (said, steps, ever) in obs.items():
            more = ever - self._ever[env_id]
            may_be = (0, 1) if env_id in self._sent or self._may_be_lost else (0,)
            is_new = self._inline and ever == 0
            assert more in may_be or is_new, f"env {env_id}: {more:g} steps that nobody has seen"
            assert (said, steps) == (_BEGIN, 0), f"env {env_id}: {obs[env_id]} after a reset"
            self._ever[env_id], self._steps[env_id] = ever, 0
            self._ended.discard(env_id)
            self._perhaps_reset.discard(env_id)

    def _take(self, outcome: Outcome) -> None:
        """Check what a step has given against the actions that it was given."""
        for env_id, obs, shown, ended, abnormal in zip(*outcome, strict=True):
            action = self._sent.pop(env_id, None)
            assert action is not None, f"env {env_id}: a timestep for no action"
            if abnormal:
                self.abnormal += 1
                assert self._inline, f"env {env_id} has failed"
            else:
                if env_id in self._perhaps_reset and obs[1] == 1:
                    self._steps[env_id] = 0
                expected = (action, self._steps[env_id] + 1, self._ever[env_id] + 1)
                if self.driver.begins_with_step and env_id in self._ended:
                    expected = (_BEGIN, 0, self._ever[env_id])
                    if self._inline and obs[2] == 0:  # renewed
                        expected = (_BEGIN, 0, 0)
                assert tuple(obs) == expected, f"env {env_id}: {obs}, not {expected}"
            self._steps[env_id], self._ever[env_id] = shown[1:]
            self._ended.discard(env_id)
            self._perhaps_reset.discard(env_id)
            if ended and not self.driver.shows_next:
                self._ended.add(env_id)

    def _step(self) -> None:
        """Take a step, whatever it takes: what an error names is called, and has to work."""
        told: list[str] = []
        for _ in range(1 + 2 * N):
            held = dict(self._sent)
            try:
                self._reset_ended()
                if not self.driver.acting:
                    result = self.driver.finish()
                else:
                    result = self.driver.step(self._actions())
            except self.driver.errors as error:
                self._sent = held
                told.append(str(error))
                self._follow(error)
                continue
            self._take(self.driver.outcome(result))
            return
        raise AssertionError(f"wedged: {told}")

    def _reset_ended(self) -> None:
        if self._ended:
            self._was_reset(self.driver.reset_ended(sorted(self._ended)))

    def _follow(self, error: Exception) -> None:
        """Call what an error names first; that has to work."""
        text = str(error)
        places = {name: text.find(name) for name in self.driver.remedies}
        named = [name for name, at in sorted(places.items(), key=lambda i: i[1]) if at >= 0]
        assert named, f"it does not say what to call: {text!r}"
        remedy = self.driver.remedies[named[0]]
        if remedy == "finish":
            outcome = self.driver.outcome(self.driver.finish())
            if self._may_be_lost and (outcome.obs[:, 0] == _BEGIN).all():  # the rest of a reset
                self._was_reset(dict(zip(outcome.env_ids, outcome.obs, strict=True)))
                self._sent, self._may_be_lost = {}, False
            else:
                self._take(outcome)
        elif remedy == "reset":
            self._was_reset(dict(enumerate(self.driver.reset())))
            self._sent, self._may_be_lost = {}, False
        elif remedy == "reset_wait":
            self._was_reset(dict(enumerate(self.driver.calls[remedy]())))
            self._sent, self._may_be_lost = {}, False
        else:
            self._call(remedy)

    def _call(self, name: str) -> None:
        try:
            self.driver.calls[name]()
        except EnvFailure:
            assert self._inline  # the env that was interrupted in it

    # -- as the subject of attacks --------------------------------------------------------------

    def prepare(self, name: str) -> None:
        """Have all be as a call wants it."""
        if self.manager.closed:
            self._begin()
        kind, _, nth = name.partition(" ")
        self._reset()
        if name in (_OF_ONE, _OF_ENDED):
            self._step()
            while name == _OF_ENDED and not self._ended:
                self._step()
            self._take_rest()
        elif nth:
            for _ in range(int(nth)):
                self._step()
            self._reset_ended()
            self._take_rest()
            self._reset_ended()
            self._given = self._actions()
            if kind == "finish":
                self.driver.begin(self._given)
        elif name.endswith("_wait"):
            self.driver.calls[name.replace("_wait", "_async")]()

    def _take_rest(self) -> None:
        while self._sent:  # where steps are gathered one by one
            self._take(self.driver.outcome(self.driver.finish()))

    def call(self, name: str) -> Any:
        """Make a call."""
        if name == _OF_ONE:
            return self.driver.reset_first()
        if name == _OF_ENDED:
            return self.driver.reset_ended(sorted(self._ended))
        kind = name.partition(" ")[0]
        whole = {"finish": self.driver.finish, "reset": self.driver.reset}
        whole["close"] = self.driver.close
        if kind in ("step", "begin"):
            return getattr(self.driver, kind)(self._given)
        return whole[kind]() if kind in whole else self.driver.calls[name]()

    def settle(
        self, name: str, results: list[Any], raised: BaseException | None, *, is_past: bool
    ) -> None:
        """Check what has to hold after a call."""
        if name == "close" or self.manager.closed:
            self.driver.close()
            assert self.manager.closed
            return
        self._sees_to(name, results, is_past=is_past)
        self._go_on(self._rng.choice(["step", "step", "reset", "reset one", "call"]))
        for _ in range(2):  # nothing is lost, repeated or wedged
            self._step()

    def _sees_to(self, name: str, results: list[Any], *, is_past: bool) -> None:
        """Take what a call has returned."""
        kind = name.partition(" ")[0]
        if name == _OF_ENDED:
            if results:
                self._was_reset(results[0])
        elif name == _OF_ONE:
            if results:
                self._first_was_reset(results[0])
            else:
                self._perhaps_reset.add(0)
        elif results and kind in ("step", "finish"):
            self._take(self.driver.outcome(results[0]))
        elif kind in ("reset", "reset_async", "reset_wait"):
            self._may_be_lost = True  # which step, that was discarded, is forgotten here
            if is_past:
                self._reset()
            elif results and kind != "reset_async":
                self._was_reset(dict(enumerate(results[0])))
                self._sent = {}
        elif is_past:  # what was delivered is lost on its way to us
            self._may_be_lost = True
            self._reset()

    def _go_on(self, what: str) -> None:
        """Do what a user may do next; an error that names something else has to be right."""
        if what == "reset":
            self._reset()
            return
        if what == "reset one":
            self._reset_one()
            return
        whole = [name for name in self.driver.calls if not name.endswith(("_async", "_wait"))]
        if what == "step" or not whole:
            self._step()
            return
        for _ in range(1 + 2 * N):
            try:
                self._call(self._rng.choice(whole))
                return
            except self.driver.errors as error:
                self._follow(error)
        raise AssertionError("wedged: no call of an env is taken")

    def close(self) -> None:
        """Close it."""
        self.driver.close()


def _column(infos: Any, key: str) -> Column:
    """Return a column of bools of a Gymnasium info."""
    return np.array(infos.get(key, [False] * N), np.bool_)


class InHalves(Driver):
    """An adapter whose steps are `step_async` and `step_wait`."""

    env: Any

    def step(self, actions: Any) -> Any:
        """As `Driver`."""
        return self.env.step(actions)

    def begin(self, actions: Any) -> None:
        """As `Driver`."""
        self.env.step_async(actions)

    def finish(self) -> Any:
        """As `Driver`."""
        return self.env.step_wait()


class Gymnasium(InHalves):
    """`as_gymnasium` in NEXT_STEP mode, which is the default."""

    mode = "NextStep"
    errors = (AlreadyPendingCallError, ResetNeeded, EnvNotReadyError)
    remedies: Mapping[str, str] = {
        "step_wait(": "finish",
        "call_wait(": "call_wait",
        "reset_wait(": "reset_wait",
        "reset(": "reset",
    }
    begins_with_step = True

    def __init__(self, manager: Any) -> None:
        self.env = env = as_gymnasium(manager, self.mode)
        self.calls = {
            "call": lambda: env.call("double", 3),
            "get_attr": lambda: env.get_attr("label"),
            "set_attr": lambda: env.set_attr("label", "another"),
            "render": env.render,
            "call_async": lambda: env.call_async("double", 3),
            "call_wait": env.call_wait,
            "reset_async": env.reset_async,
            "reset_wait": lambda: env.reset_wait()[0],
        }

    def reset(self) -> Any:
        """As `Driver`."""
        return self.env.reset()[0]

    def reset_first(self) -> Mapping[int, Any]:
        """As `Driver`."""
        return dict(enumerate(self.env.reset(options={"reset_mask": np.arange(N) == 0})[0]))

    def outcome(self, result: Any) -> Outcome:
        """As `Driver`."""
        obs, _, terminated, truncated, infos = result
        return Outcome(range(N), obs, obs, terminated | truncated, _column(infos, "abnormal"))

    def close(self) -> None:
        """As `Driver`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of calls that are under way
            self.env.close()


class GymnasiumSameStep(Gymnasium):
    """`as_gymnasium` in SAME_STEP mode."""

    mode = "SameStep"
    config: Mapping[str, Any] = {"reset_inplace": True}
    begins_with_step = False
    shows_next = True

    def outcome(self, result: Any) -> Outcome:
        """As `Driver`."""
        shown, _, terminated, truncated, infos = result
        ended = terminated | truncated
        obs, last = shown.copy(), infos.get("final_obs")
        for env_id in np.flatnonzero(ended).tolist():
            obs[env_id] = last[env_id]
        abnormal = _column(infos.get("final_info", {}), "abnormal")
        return Outcome(range(N), obs, shown, ended, abnormal)


class GymnasiumDisabled(Gymnasium):
    """`as_gymnasium` in DISABLED mode, in which the trainer resets the envs."""

    mode = "Disabled"
    config: Mapping[str, Any] = {"auto_reset": False}
    begins_with_step = False

    def reset_ended(self, env_ids: list[int]) -> Mapping[int, Any]:
        """As `Driver`."""
        mask = np.isin(np.arange(N), env_ids)
        obs = self.env.reset(options={"reset_mask": mask})[0]
        return {i: obs[i] for i in env_ids}


class Sb3(InHalves):
    """`as_sb3`."""

    shows_next = True

    def __init__(self, manager: Any) -> None:
        self.env = env = as_sb3(manager)
        self.calls = {
            "env_method": lambda: env.env_method("double", 3),
            "get_attr": lambda: env.get_attr("label"),
            "set_attr": lambda: env.set_attr("label", "another"),
            "get_images": env.get_images,
            "reset_infos": lambda: env.reset_infos,
        }

    def reset(self) -> Any:
        """As `Driver`."""
        return self.env.reset()

    def outcome(self, result: Any) -> Outcome:
        """As `Driver`."""
        shown, _, dones, infos = result
        obs = [info.get("terminal_observation", shown[i]) for i, info in enumerate(infos)]
        abnormal = np.array([bool(info.get("abnormal")) for info in infos])
        return Outcome(range(N), np.array(obs), shown, dones, abnormal)

    def close(self) -> None:
        """As `Driver`."""
        self.env.close()


class Sb3InPlace(Sb3):
    """`as_sb3` as `EnvmgrVecEnv` has it."""

    config: Mapping[str, Any] = {"reset_inplace": True}


class Tianshou(Driver):
    """`as_tianshou`, all envs in each step."""

    config: Mapping[str, Any] = {"auto_reset": False}
    errors = (AssertionError, RuntimeError)
    remedies: Mapping[str, str] = {"step(None)": "finish", "reset(": "reset"}
    wait_num: int | None = None

    def __init__(self, manager: Any) -> None:
        self.env = env = as_tianshou(manager, wait_num=self.wait_num)
        self.calls = {
            "get_env_attr": lambda: env.get_env_attr("label"),
            "set_env_attr": lambda: env.set_env_attr("label", "another"),
            "render": env.render,
        }

    def reset(self) -> Any:
        """As `Driver`."""
        return self.env.reset()[0]

    def step(self, actions: Any) -> Any:
        """As `Driver`."""
        return self.env.step(actions, list(self.acting))

    def finish(self) -> Any:
        """As `Driver`."""
        return self.env.step(None)

    def reset_ended(self, env_ids: list[int]) -> Mapping[int, Any]:
        """As `Driver`."""
        return dict(zip(env_ids, self.env.reset(env_ids)[0], strict=True))

    def reset_first(self) -> Mapping[int, Any]:
        """As `Driver`."""
        return self.reset_ended([0])

    def outcome(self, result: Any) -> Outcome:
        """As `Driver`."""
        obs, _, terminated, truncated, infos = result
        abnormal = np.array([bool(info.get("abnormal")) for info in infos])
        env_ids = [info["env_id"] for info in infos]
        return Outcome(env_ids, obs, obs, terminated | truncated, abnormal)

    def close(self) -> None:
        """As `Driver`."""
        self.env.close()


class TianshouSome(Tianshou):
    """`as_tianshou`, of which a step returns as soon as two envs have stepped."""

    wait_num = 2

    @property
    def acting(self) -> Sequence[int]:
        """As `Driver`."""
        ready: list[int] = sorted(self.env.ready_id)
        return ready


class Puffer(Driver):
    """`as_puffer`."""

    remedies: Mapping[str, str] = {"recv(": "finish", "async_reset(": "reset"}
    begins_with_step = True

    def __init__(self, manager: Any) -> None:
        self.env = as_puffer(manager)
        self.calls = {"notify": self.env.notify}

    def reset(self) -> Any:
        """As `Driver`."""
        return self.env.reset()[0]

    def step(self, actions: Any) -> Any:
        """As `Driver`."""
        self.env.send(actions)
        return self.env.recv()

    def begin(self, actions: Any) -> None:
        """As `Driver`."""
        self.env.send(actions)

    def finish(self) -> Any:
        """As `Driver`."""
        return self.env.recv()

    def outcome(self, result: Any) -> Outcome:
        """As `Driver`."""
        ended = result.terminals | result.truncations
        if not any(info.get("abnormal") for info in result.infos):
            abnormal = np.zeros(N, np.bool_)
        else:
            abnormal = result.truncations.copy()
        obs = result.observations
        return Outcome(range(N), obs, obs, ended, abnormal)

    def close(self) -> None:
        """As `Driver`."""
        self.env.close()


class TorchRL(Driver):
    """`as_torchrl`."""

    remedies: Mapping[str, str] = {"call reset(": "reset"}

    def __init__(self, manager: Any) -> None:
        self._torch = importlib.import_module("torch")
        self._dict = importlib.import_module("tensordict").TensorDict
        module = importlib.import_module("envmgr.adapters.torchrl")
        self.env = module.as_torchrl(manager, categorical_action_encoding=True)
        self._latest: Any = None
        self.calls = {}

    def reset(self) -> Any:
        """As `Driver`."""
        return self.env.reset().get("observation").numpy()

    def step(self, actions: Any) -> Any:
        """As `Driver`."""
        given = self._dict({"action": self._torch.from_numpy(actions)}, self.env.batch_size)
        self._latest = self.env.step(given)
        return self._latest

    def reset_ended(self, env_ids: list[int]) -> Mapping[int, Any]:
        """As `Driver`."""
        obs = self.env.maybe_reset(self._latest).get("observation").numpy()
        return {i: obs[i] for i in env_ids}

    def outcome(self, result: Any) -> Outcome:
        """As `Driver`."""
        obs = result.get("observation").numpy()
        ended, abnormal = (result.get(key).view(-1).numpy() for key in ("done", "abnormal"))
        return Outcome(range(N), obs, obs, ended, abnormal)

    def close(self) -> None:
        """As `Driver`."""
        self.env.close()


class Ding(Account):
    """A manager as one of DI-engine, which adds up the rewards of each episode."""

    package = "manager"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({"type": "base", **config}, self._created)

    def _created(self, config: Mapping[str, Any], env_fn: Any) -> Any:
        module = importlib.import_module("envmgr.adapters.ding")
        return module.KINDS[f"envmgr_{config['type']}"](env_fn, config)

    @property
    def names(self) -> list[str]:
        """The calls."""
        return ["step", "step to the end", "recv", "recv one", "reset", "call", "close"]

    def take(self, result: Any) -> None:
        """Check off what was delivered, and the returns of episodes that ended."""
        for step in result.values():
            if step.done and not step.info.get("abnormal"):
                assert step.info["eval_episode_return"] == ACCOUNTED_STEPS, step.info
        super().take(result)


DRIVERS: dict[str, type[Driver]] = {
    "as_gymnasium, NEXT_STEP": Gymnasium,
    "as_gymnasium, SAME_STEP": GymnasiumSameStep,
    "as_gymnasium, DISABLED": GymnasiumDisabled,
    "as_sb3": Sb3,
    "as_sb3, reset_inplace": Sb3InPlace,
    "as_tianshou": Tianshou,
    "as_tianshou, wait_num": TianshouSome,
    "as_puffer": Puffer,
    "as_torchrl": TorchRL,
}
"""The adapters, in each of their modes."""


@contextmanager
def trainers(*names: str) -> Iterator[None]:
    """Have trainers, or stand-ins for those that are not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            adapter(name, patch)
        yield
