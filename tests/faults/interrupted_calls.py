"""Public calls of managers, as the subject of interrupts: what has to hold after each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from envmgr import create_env_manager
from envmgr.errors import EnvFailure
from tests.faults import attacks

EPISODE_STEPS = 3
ENV_NUM = 3
_PATIENCE_S = 40.0

PROCESS_KINDS: dict[str, dict[str, Any]] = {
    "a worker each, in the block": {"type": "subprocess"},
    "shared workers, some at a time": {"type": "async_subprocess", "num_workers": 2},
    "by message": {"type": "subprocess", "shared_memory": False},
    "by message, shared, some at a time": {
        "type": "async_subprocess",
        "shared_memory": False,
        "num_workers": 2,
    },
}
"""Kinds with worker processes, by how steps reach them and are gathered."""

TWO_FORMS = {"type": "subprocess", "context": "fork", "num_workers": 2, "same_spaces": False}
"""Of a call's steps some are posted and some sent."""

LARGE_INFOS = {"type": "subprocess", "context": "fork", "num_workers": 2, "large_infos": True}
"""Infos hold an array that travels beside the pipe. (The last is no key of managers.)"""

THREAD_KINDS: dict[str, dict[str, Any]] = {
    "a thread each": {"type": "thread"},
    "shared threads, by message, some at a time": {
        "type": "thread",
        "num_workers": 2,
        "shared_memory": False,
        "wait_num": 2,
    },
}


LEASES = ("lease", "close after a lease")
"""The scenarios with a leased env."""


class Echo(gym.Env[Any, Any]):
    """Its observation is the latest action: what was executed can be told from what comes back."""

    observation_space = gym.spaces.Box(-1.0, 2.0**31, (2,), np.float64)
    action_space = gym.spaces.Discrete(2**31 - 1)
    label = "echo"
    render_mode = "rgb_array"

    def __init__(self) -> None:
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._steps = 0
        return np.array([-1.0, 0.0]), {"steps": 0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Say what was asked for."""
        self._steps += 1
        obs = np.array([float(action), self._steps])
        info = {"steps": self._steps, "action": int(action)}
        return obs, 1.0, self._steps >= EPISODE_STEPS, False, info

    def double(self, number: int) -> int:
        """Return a result."""
        return 2 * number

    def render(self) -> Any:
        """Return a picture."""
        return np.full((2, 2, 3), 7, np.uint8)

    def reward_shaping(self, transitions: list[Any]) -> list[Any]:
        """Return transitions shaped."""
        return [2 * one for one in transitions]


class EchoOfObject(Echo):
    """As `Echo`, with observations that are no arrays to anybody else."""

    observation_space = gym.spaces.Tuple((gym.Space(), gym.spaces.Discrete(9)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        _, info = super().reset()
        return (-1, 0), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Say what was asked for."""
        (said, _), *rest = super().step(action)
        return (said, self._steps), *rest


class EchoWithPages(Echo):
    """As `Echo`; its infos say 3 000 times what was asked for."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Say what was asked for."""
        *rest, info = super().step(action)
        info["pages"] = np.full(3_000, float(action))
        return *rest, info


class Account:
    """A manager, and which actions it still owes an answer to.

    Args:
        config: of the manager.
        create: makes it.
    """

    signals = attacks.SIGNALS
    package = "manager"

    def __init__(
        self, config: Mapping[str, Any], create: Callable[..., Any] = create_env_manager
    ) -> None:
        self._create = create
        self._before: Mapping[str, Any] = {}
        self._actions: dict[int, int] = {}
        self._config = {"max_failures": 10**6, "snapshot_copy": True, **config}
        self._kinds: list[type[Echo]] = [Echo]
        if self._config.pop("large_infos", False):
            self._kinds = [EchoWithPages]
        elif not self._config.get("same_spaces", True):
            self._kinds = [Echo, EchoOfObject]
        self.manager: Any = None
        self.owed: dict[int, int] = {}
        self.abnormal = 0
        self.snapshot: Any = None
        self._action = 0
        self.renew()

    def renew(self) -> None:
        """Launch a manager in place of one that was closed."""
        env_fn = [self._kinds[i % len(self._kinds)] for i in range(ENV_NUM)]
        self.manager = self._create(self._config, env_fn=env_fn)
        self.owed = {}
        self.manager.launch()

    def actions(self) -> dict[int, int]:
        """Return a new action for each ready env."""
        found = {}
        for env_id in self.manager.ready_env:
            self._action += 1
            found[env_id] = self._action
        return found

    def send(self) -> None:
        """Have every env take a step, and do not gather it."""
        self.all_ready()
        actions = self.actions()
        self.manager.send(actions)
        self.owed.update(actions)

    def all_ready(self) -> None:
        """Wait until every env takes an action."""
        self.manager.ready_arrays(list(range(ENV_NUM)))

    def take(self, result: Any) -> None:
        """Check off what was delivered, in whatever form."""
        if isinstance(result, list):  # treetensors
            pairs = [(int(t.env_id), np.asarray(t.obs), dict(t.info)) for t in result]
        elif isinstance(result, dict):
            pairs = [(i, step.obs, step.info) for i, step in result.items()]
        else:
            pairs = list(zip(result.env_ids.tolist(), result.obs, result.infos, strict=True))
        for env_id, obs, info in pairs:
            action = self.owed.pop(env_id, None)
            assert action is not None, f"env {env_id}: a timestep for no action"
            if info.get("abnormal"):
                self.abnormal += 1
            else:
                assert int(obs[0]) == action, f"env {env_id}: {obs} answers {action}"
                assert info["action"] == action, f"env {env_id}: {info} answers {action}"
                assert np.all(info.get("pages", action) == action), f"env {env_id}: {info}"

    def goes_on(self) -> None:
        """Check that nothing is lost, repeated or wedged, and take two more steps."""
        while self.manager.stats()["outstanding"]:
            found = self.manager.recv(timeout_s=_PATIENCE_S)
            assert found, f"nothing comes: {self.manager.stats()}"
            self.take(found)
        assert not self.owed, f"lost: {self.owed}"
        for _ in range(2):
            self.send()
            while self.owed:
                self.take(self.manager.recv(timeout_s=_PATIENCE_S))
        stats = self.manager.stats()
        assert stats["actions"] == stats["timesteps"] + stats["cancelled"]
        assert not stats["outstanding"]

    # -- as the subject of attacks ------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The calls."""
        is_forked = self._config.get("context") == "fork"  # whose envs cannot be leased
        return [name for name in SCENARIOS if name not in LEASES or not is_forked]

    def prepare(self, name: str) -> None:
        """Have all be as a call wants it."""
        if self.manager.closed:
            self.renew()
        self.all_ready()
        scenario = SCENARIOS[name]
        scenario.prepare(self)
        self._actions = self.actions() if scenario.sends else {}
        self._before = self.manager.stats()

    def call(self, name: str) -> Any:
        """Make a call."""
        return SCENARIOS[name].call(self, self._actions)

    def settle(
        self, name: str, results: list[Any], raised: BaseException | None, *, is_past: bool
    ) -> None:
        """Check what has to hold after a call."""
        scenario, manager = SCENARIOS[name], self.manager
        actions, before = self._actions, self._before
        if scenario.delivers and is_past and not results and not manager.closed:
            # What was delivered is lost on its way to us.
            while manager.stats()["outstanding"] and manager.recv(timeout_s=_PATIENCE_S):
                pass
            self.owed.clear()
            actions = {}
        if manager.closed:
            self.owed.clear()
            return
        if name in LEASES:  # until it has been given back, what is under way in it is outstanding
            self.all_ready()
        stats = manager.stats()
        if scenario.sends and actions:
            accepted = stats["actions"] - before["actions"]
            assert accepted in (0, len(actions)), "some of the actions were accepted"
            if accepted:
                self.owed.update(actions)
        if scenario.delivers and results:
            self.take(results[0])
        for env_id in list(self.owed)[: stats["cancelled"] - before["cancelled"]]:
            del self.owed[env_id]  # those of `reset`, which names the first
        if scenario.in_halves and manager.call_is_pending:
            with suppress(EnvFailure):  # inline, the env that was interrupted in it
                assert manager.call_wait()[0] in (4, 8)
        self.goes_on()
        if name in LEASES:  # calls go by way of a thread from now on, which is another matter
            manager.close()

    def close(self) -> None:
        """Close the manager."""
        self.manager.close()


class Scenario(NamedTuple):
    """A public call.

    Attributes:
        call: makes it.
        sends: whether it sends actions.
        prepare: comes before it; all envs are ready then.
        delivers: whether it returns timesteps.
        in_halves: whether it is one of `call_async` and `call_wait`.
    """

    call: Callable[[Account, dict[int, int]], Any]
    sends: bool = False
    prepare: Callable[[Account], None] = lambda account: None
    delivers: bool = False
    in_halves: bool = False


def _stepped(account: Account, times: int) -> None:
    account.manager.reset()  # else some steps end an episode, and what comes next finds none ready
    for _ in range(times):
        account.send()
        while account.owed:
            account.take(account.manager.recv())


def _called(account: Account) -> None:
    account.manager.call_async("double", 4)


def _saved(account: Account) -> None:
    account.snapshot = account.manager.snapshot()


def _saved_and_sent(account: Account) -> None:
    _saved(account)
    account.send()


def _leased(manager: Any) -> None:
    with manager.lease() as env:
        try:
            env.reset()
            timestep = env.step(5)
        except BaseException:
            if not manager.closed:  # by the handler of SIGTERM
                env.reset()  # who caught it goes on in the same lease: nothing holds it any more
            raise
        assert timestep.obs.tolist() == [5.0, 1.0]
        assert timestep.info["steps"] == 1


def _built(manager: Any) -> None:
    manager.build()
    manager.launch()


def _ended(account: Account) -> None:
    _stepped(account, EPISODE_STEPS)


def _sent(account: Account) -> None:
    account.send()


def _sent_last(account: Account) -> None:
    _stepped(account, EPISODE_STEPS - 1)
    account.send()


SCENARIOS: dict[str, Scenario] = {
    "ready_obs": Scenario(lambda a, _: a.manager.ready_obs, prepare=_ended),
    "ready_arrays": Scenario(lambda a, _: a.manager.ready_arrays(), prepare=_ended),
    "ready_info": Scenario(lambda a, _: a.manager.ready_info),
    "step": Scenario(lambda a, actions: a.manager.step(actions), sends=True, delivers=True),
    "step to the end": Scenario(
        lambda a, actions: a.manager.step(actions),
        sends=True,
        delivers=True,
        prepare=lambda a: _stepped(a, EPISODE_STEPS - 1),
    ),
    "send": Scenario(lambda a, actions: a.manager.send(actions), sends=True),
    "send_arrays": Scenario(
        lambda a, actions: a.manager.send_arrays(list(actions), np.array(list(actions.values()))),
        sends=True,
    ),
    "recv": Scenario(lambda a, _: a.manager.recv(), prepare=_sent, delivers=True),
    "recv one": Scenario(
        lambda a, _: a.manager.recv(min_ready=1), prepare=_sent_last, delivers=True
    ),
    "recv_arrays": Scenario(lambda a, _: a.manager.recv_arrays(), prepare=_sent, delivers=True),
    "recv_arrays at the end": Scenario(
        lambda a, _: a.manager.recv_arrays(), prepare=_sent_last, delivers=True
    ),
    "reset": Scenario(lambda a, _: a.manager.reset({0: None, 1: {}})),
    "reset of what is stepped": Scenario(lambda a, _: a.manager.reset({0: None}), prepare=_sent),
    "seed": Scenario(lambda a, _: a.manager.seed(5)),
    "call": Scenario(lambda a, _: a.manager.call("double", 2)),
    "call_async": Scenario(lambda a, _: a.manager.call_async("double", 4), in_halves=True),
    "call_wait": Scenario(lambda a, _: a.manager.call_wait(), prepare=_called, in_halves=True),
    "apply": Scenario(lambda a, _: a.manager.apply(repr)),
    "render": Scenario(lambda a, _: a.manager.render()),
    "ready_imgs": Scenario(lambda a, _: a.manager.ready_imgs),
    "reward_shaping": Scenario(lambda a, _: a.manager.reward_shaping(1, [1, 2])),
    "reset_infos": Scenario(lambda a, _: a.manager.reset_infos([0, 1])),
    "pending_env": Scenario(lambda a, _: a.manager.pending_env, prepare=_sent),
    "get_attr": Scenario(lambda a, _: a.manager.get_attr("label")),
    "set_attr": Scenario(lambda a, _: a.manager.set_attr("label", "other")),
    "snapshot": Scenario(lambda a, _: a.manager.snapshot()),
    "snapshot of what is stepped": Scenario(lambda a, _: a.manager.snapshot(), prepare=_sent_last),
    "restore": Scenario(lambda a, _: a.manager.restore(a.snapshot), prepare=_saved),
    "restore of what is stepped": Scenario(
        lambda a, _: a.manager.restore(a.snapshot), prepare=_saved_and_sent
    ),
    "random_action": Scenario(lambda a, _: a.manager.random_action()),
    "close": Scenario(lambda a, _: a.manager.close()),
    "launch": Scenario(lambda a, _: a.manager.launch(), prepare=lambda a: a.manager.close()),
    "build": Scenario(lambda a, _: _built(a.manager), prepare=lambda a: a.manager.close()),
    LEASES[0]: Scenario(lambda a, _: _leased(a.manager)),
    LEASES[1]: Scenario(lambda a, _: a.manager.close(), prepare=lambda a: _leased(a.manager)),
    "env_spaces": Scenario(lambda a, _: a.manager.env_spaces),
}


def run(
    config: Mapping[str, Any],
    count: int | None = None,
    seed: int = 0,
    *,
    within: str = "",
    **how: Any,
) -> dict[str, int]:
    """Attack a manager at points of its calls; return what came of it: see `attacks.run`."""
    return attacks.run(partial(Account, config, **how), count, seed, within=within)


def run_at_random(config: Mapping[str, Any], count: int, seed: int = 0, **how: Any) -> int:
    """Attack a manager at random moments of its calls; return how many calls were ended by it."""
    return attacks.run_at_random(
        partial(Account, config, **how), count, seed, without=("build", "close", "launch")
    )
