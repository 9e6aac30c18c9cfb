"""Public calls that are interrupted at one of their points, and what has to hold after each."""

from __future__ import annotations

import dis
import functools
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from envmgr import create_env_manager
from envmgr.errors import ConfigError, EnvFailure
from tests.faults.interrupting import Interrupted, Point, handlers, interrupt_at, points_of

EPISODE_STEPS = 3
ENV_NUM = 3
_PATIENCE_S = 40.0
_SOON_S, _LATE_S = 5e-6, 1e-3

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


class Echo(gym.Env[Any, Any]):
    """Its observation is the latest action: what was executed can be told from what comes back."""

    observation_space = gym.spaces.Box(-1.0, 2.0**31, (2,), np.float64)
    action_space = gym.spaces.Discrete(2**31 - 1)
    label = "echo"

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
        return obs, 1.0, self._steps >= EPISODE_STEPS, False, {"steps": self._steps}

    def double(self, number: int) -> int:
        """Return a result."""
        return 2 * number


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
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
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
        self.manager = create_env_manager(self._config, env_fn=env_fn)
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
        if isinstance(result, dict):
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


class Scenario(NamedTuple):
    """A public call.

    Attributes:
        call: makes it.
        sends: whether it sends actions.
        prepare: comes before it; all envs are ready then.
        delivers: whether it returns timesteps.
    """

    call: Callable[[Account, dict[int, int]], Any]
    sends: bool = False
    prepare: Callable[[Account], None] = lambda account: None
    delivers: bool = False


def _stepped(account: Account, times: int) -> None:
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
    "call_wait": Scenario(lambda a, _: a.manager.call_wait(), prepare=_called),
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
}

SIGNALS = (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)


class Strike(NamedTuple):
    """How a call is interrupted.

    Attributes:
        number: the signal.
        run: runs the call, and has the signal come into it.
        is_past: whether what came of that was raised when the call had done all it does.
    """

    number: int
    run: Callable[[Callable[[], None]], Any]
    is_past: Callable[[BaseException], bool]


def at_point(point: Point, number: int) -> Strike:
    """Return a strike at a point of the call."""
    is_past = _is_past_delivery(point)
    return Strike(number, lambda call: interrupt_at(point, call, number), lambda error: is_past)


def _is_past_delivery(point: Point) -> bool:
    """Whether a point comes after the store by which a public function has delivered."""
    instructions = dis.get_instructions(point.code)
    stores = [i.offset for i in instructions if i.opname == "STORE_ATTR" and i.argval == "in_hand"]
    if point.code.co_name not in ("step", "recv", "recv_arrays") or not stores:
        return False
    at = point.at
    if not point.is_opcode:
        at = next(start for start, _, line in point.code.co_lines() if line == point.at)
    return at > max(stores)


def after(seconds: float, manager: Any) -> Strike:
    """Return a strike by an alarm, which may come too late."""

    def run(call: Callable[[], None]) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def is_past(error: BaseException) -> bool:
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_locals.get("self") is manager:
                return False
            traceback = traceback.tb_next
        return True

    return Strike(signal.SIGALRM, run, is_past)


def prepared(account: Account, scenario: Scenario) -> tuple[dict[int, int], Mapping[str, Any]]:
    """Have all be as a scenario wants it; return the actions to send, and the figures before."""
    if account.manager.closed:
        account.renew()
    account.all_ready()
    scenario.prepare(account)
    actions = account.actions() if scenario.sends else {}
    return actions, account.manager.stats()


def points_in(account: Account, scenario: Scenario) -> list[Point]:
    """Return the points of a call."""
    actions, before = prepared(account, scenario)
    results: list[Any] = []
    points = points_of(lambda: results.append(scenario.call(account, actions)))
    settle(account, scenario, actions, before, results)
    return points


def attack(account: Account, scenario: Scenario, strike: Strike) -> BaseException | None:
    """Make a call that is interrupted, and check what has to hold after it.

    Args:
        account: of the manager, which goes on or is replaced.
        scenario: the call.
        strike: what comes into it.

    Returns:
        What the call has raised.
    """
    actions, before = prepared(account, scenario)
    manager, raised = account.manager, None
    results: list[Any] = []
    with handlers(manager.close) as raises:
        try:
            strike.run(lambda: results.append(scenario.call(account, actions)))
        except (KeyboardInterrupt, Interrupted, SystemExit) as error:
            raised = error
        except ConfigError as error:  # reading an argument, whatever that raises, refuses it
            raised = _root_of(error)
    if raised is not None:
        assert isinstance(raised, raises[strike.number]), f"{raised!r} came of {strike.number}"
        is_past = scenario.delivers and strike.is_past(raised) and not manager.closed
        if is_past and not results:  # what was delivered is lost on its way to us
            while manager.stats()["outstanding"] and manager.recv(timeout_s=_PATIENCE_S):
                pass
            account.owed.clear()
            actions = {}
    settle(account, scenario, actions, before, results)
    return raised


def _root_of(error: BaseException) -> BaseException:
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def settle(
    account: Account,
    scenario: Scenario,
    actions: dict[int, int],
    before: Mapping[str, Any],
    results: list[Any],
) -> None:
    """Check what has to hold after a call.

    Args:
        account: of the manager.
        scenario: what was called.
        actions: what it has sent.
        before: the figures before it.
        results: what it returned, if it did.
    """
    manager = account.manager
    if manager.closed:
        account.owed.clear()
        return
    stats = manager.stats()
    if scenario.sends and actions:
        accepted = stats["actions"] - before["actions"]
        assert accepted in (0, len(actions)), "some of the actions were accepted"
        if accepted:
            account.owed.update(actions)
    if scenario.delivers and results:
        account.take(results[0])
    for env_id in list(account.owed)[: stats["cancelled"] - before["cancelled"]]:
        del account.owed[env_id]  # those of `reset`, which names the first
    if manager._called is not None:
        with suppress(EnvFailure):  # in line, the env that was interrupted in it
            assert manager.call_wait()[0] in (4, 8)
    account.goes_on()


def drawn(
    config: Mapping[str, Any], count: int | None, seed: int
) -> Iterator[tuple[str, Point, int]]:
    """Return points of all scenarios with the signals to raise there: all of them, or some."""
    found = _all_points(tuple(sorted(config.items())))
    rng = random.Random(seed)
    yield from found if count is None else rng.sample(found, min(count, len(found)))


@functools.cache
def _all_points(config: tuple[tuple[str, Any], ...]) -> list[tuple[str, Point, int]]:
    account = Account(dict(config))
    found: list[tuple[str, Point, int]] = []
    for name, scenario in SCENARIOS.items():
        points = points_in(account, scenario)
        found += [(name, point, number) for point in points for number in SIGNALS]
    account.manager.close()
    return found


def run(config: Mapping[str, Any], count: int | None = None, seed: int = 0) -> dict[str, int]:
    """Attack a manager at points of its calls; return what came of it.

    Raises:
        AssertionError: something was lost, repeated or wedged; it says where.
    """
    account = Account(config)
    figures = {"points": 0, "raised": 0}
    for name, point, number in drawn(config, count, seed):
        where = f"{name}, {signal.Signals(number).name} at {point}"
        try:
            raised = attack(account, SCENARIOS[name], at_point(point, number))
        except BaseException as error:
            raise AssertionError(f"after an interrupt in {where}: {error!r}") from error
        figures["points"] += 1
        figures["raised"] += raised is not None
    account.manager.close()
    return {**figures, "abnormal": account.abnormal}


def run_at_random(config: Mapping[str, Any], count: int, seed: int = 0) -> int:
    """Attack a manager at random moments of its calls; return how many calls were ended by it.

    Raises:
        AssertionError: as `run`.
    """
    account, rng = Account(config), random.Random(seed)
    names = [name for name in SCENARIOS if name not in ("close", "launch")]
    n_raised = 0
    for _ in range(count):
        name, seconds = rng.choice(names), rng.uniform(_SOON_S, _LATE_S)
        try:
            raised = attack(account, SCENARIOS[name], after(seconds, account.manager))
        except BaseException as error:
            where = f"{name}, {seconds * 1e6:.0f} us after its beginning"
            raise AssertionError(f"after an interrupt in {where}: {error!r}") from error
        n_raised += raised is not None
    account.manager.close()
    return n_raised
