"""Public calls of a manager with another thread that calls it, too, at each of their points.

The first thread stands still meanwhile: its trace function waits for what the other one does.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from envmgr import EnvState
from envmgr.errors import StateError
from envmgr.manager.running import Running
from tests.faults.attacks import drawn
from tests.faults.interrupted_calls import ENV_NUM, SCENARIOS, Account
from tests.faults.interrupting import act_at, act_at_all

_PATIENCE_S = 40.0
_A_MOMENT_S = 0.05
"""So long the second thread may wait for the first one, which says only after it has the lock that
it is a caller."""

REFUSED: dict[str, Callable[[Any], Any]] = {
    "ready_obs": lambda m: m.ready_obs,
    "ready_arrays": lambda m: m.ready_arrays(),
    "ready_info": lambda m: m.ready_info,
    "reset_infos": lambda m: m.reset_infos([0]),
    "random_action": lambda m: m.random_action(),
    "step": lambda m: m.step(dict.fromkeys(range(ENV_NUM), 77)),
    "step({})": lambda m: m.step({}),
    "send": lambda m: m.send({0: 77}),
    "send_arrays": lambda m: m.send_arrays([0], [77]),
    "recv": lambda m: m.recv(),
    "recv_arrays": lambda m: m.recv_arrays(min_ready=1),
    "recv of a moment": lambda m: m.recv(timeout_s=0.0),
    "reset": lambda m: m.reset(),
    "seed": lambda m: m.seed(77),
    "call_async": lambda m: m.call_async("double", 2),
    "get_attr": lambda m: m.get_attr("label"),
    "set_attr": lambda m: m.set_attr("label", "of the second thread"),
    "enable_save_replay": lambda m: m.enable_save_replay("nowhere"),
    "snapshot": lambda m: m.snapshot(),
}
"""What is refused while a call is under way."""

REFUSED_IN_LAUNCH: dict[str, Callable[[Any], Any]] = {
    "launch": lambda m: m.launch(),
    "build": lambda m: m.build(),
    "env_spaces": lambda m: m.env_spaces,
    "with": lambda m: m.__enter__(),
}


class SecondThread:
    """A thread that does what it is told.

    Attributes:
        is_busy: nobody has asked yet what came of the latest.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve)
        self.is_busy = False

    def __enter__(self) -> SecondThread:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.is_busy:
            self.wait()
        self._jobs.put(None)
        self._thread.join(_PATIENCE_S)
        assert not self._thread.is_alive(), "the second thread hangs"

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._results.put(job())
            except BaseException as error:
                self._results.put(error)

    def begin(self, job: Callable[[], Any]) -> None:
        """Have it do something, once it has done all before."""
        if self.is_busy:
            self.wait()
        self.is_busy = True
        self._jobs.put(job)

    def do(self, job: Callable[[], None]) -> None:
        """Have it do something, and wait for that."""
        self.begin(job)
        found = self.wait()
        assert found is None, f"{found!r}"

    def wait(self, seconds: float = _PATIENCE_S) -> Any:
        """Return what came of it, or was raised.

        Raises:
            queue.Empty: it is not done yet.
        """
        result = self._results.get(timeout=seconds)
        self.is_busy = False
        return result


class Intruder:
    """Calls a manager on another thread, and checks that nothing comes of what is refused.

    Args:
        account: of the manager.
        other: the other thread.
        launching: the call under way is a launch.
        n_delivered: timesteps delivered before the call.

    Attributes:
        figures: points, calls that were refused, calls that waited for the first thread.
    """

    def __init__(
        self, account: Account, other: SecondThread, *, launching: bool, n_delivered: int
    ) -> None:
        self._manager = account.manager
        self._n_delivered = n_delivered
        self._other = other
        self._refused = REFUSED_IN_LAUNCH if launching else REFUSED
        self._probe = (lambda m: m.build()) if launching else (lambda m: m.ready_env)
        self._launching = launching
        self.figures = {"points": 0, "refused": 0, "waited": 0}

    def __call__(self) -> None:
        """Intrude, if a call is under way."""
        self.figures["points"] += 1
        self._look()
        if self._launching and (self._manager._alone._caller is None or not self._manager.closed):
            return  # it would launch, or find that all is done
        try:
            if self._other.is_busy:  # it waits for what is about to be done
                self._other.wait(_A_MOMENT_S)
            self._other.begin(lambda: self._try(self._probe))
            if self._other.wait(_A_MOMENT_S) is not True:
                return
        except queue.Empty:
            self.figures["waited"] += 1
            return
        self._other.do(self._all_refused)

    def _look(self) -> None:
        """Read what any thread may read, without waiting for anybody."""
        stats, states = self._manager.stats(), self._manager.env_states
        timesteps = check_accounts(stats)
        running = self._manager._running
        if isinstance(running, Running) and running.engine.caller and not self._launching:
            assert timesteps == self._n_delivered, "a call has delivered before it returns"
        assert sorted(states) == list(range(ENV_NUM))
        assert all(type(state) is EnvState for state in states.values())

    def _try(self, call: Callable[[Any], Any]) -> bool:
        """Make a call; return whether it was refused because another is under way.

        Also one between `call_async` and `call_wait`.
        """
        try:
            call(self._manager)
        except StateError:
            return True
        return False

    def _all_refused(self) -> None:
        for name, call in self._refused.items():
            assert self._try(call), f"{name} was not refused"
            self.figures["refused"] += 1


def check_accounts(stats: Mapping[str, Any]) -> int:
    """Check that the figures of actions were true at one moment; return the timesteps."""
    names = ("actions", "timesteps", "cancelled", "outstanding")
    actions, timesteps, cancelled, outstanding = (stats[name] for name in names)
    assert actions == timesteps + cancelled + outstanding, stats
    assert 0 <= outstanding <= ENV_NUM, stats
    return int(timesteps)


def run(config: Mapping[str, Any], names: tuple[str, ...] = tuple(SCENARIOS)) -> dict[str, int]:
    """Have a second thread call a manager at each point of each call; return what came of it.

    Raises:
        AssertionError: the first thread has lost something, or got it twice, or is wedged; or the
            other was not refused.
    """
    account, figures = Account(config), {"points": 0, "refused": 0, "waited": 0}
    with SecondThread() as other:
        for name in names:
            try:
                found = _intruded(account, name, other)
            except BaseException as error:
                raise AssertionError(f"with a second thread in {name}: {error!r}") from error
            figures = {what: figures[what] + found[what] for what in figures}
    account.manager.close()
    return figures


def _intruded(account: Account, name: str, other: SecondThread) -> dict[str, int]:
    account.prepare(name)
    before, results = account.manager.stats(), list[Any]()
    intruder = Intruder(account, other, launching=name == "launch", n_delivered=before["timesteps"])
    act_at_all(lambda: results.append(account.call(name)), intruder)
    account.settle(name, results, None, is_past=False)
    return intruder.figures


def run_reading(config: Mapping[str, Any]) -> int:
    """Have envs be stepped at each point of `stats`; return how many points there are.

    Raises:
        AssertionError: what `stats` says was never true.
    """
    account, n_points = Account(config), 0
    with SecondThread() as other:

        def send_or_gather() -> None:
            nonlocal n_points
            n_points += 1
            other.do(gather if account.owed else account.send)

        def gather() -> None:
            account.take(account.manager.recv(min_ready=ENV_NUM))

        for has_sent in (False, True):
            account.all_ready()
            if has_sent:
                account.send()
            found: list[dict[str, Any]] = []
            act_at_all(lambda found=found: found.append(account.manager.stats()), send_or_gather)  # type: ignore[misc]
            check_accounts(found[0])
            assert found[0]["outstanding"] in (0, ENV_NUM), "steps are sent and gathered together"
            if account.owed:
                other.do(gather)
        other.do(account.goes_on)
    account.manager.close()
    return n_points


def run_closing(config: Mapping[str, Any], count: int, seed: int = 0) -> int:
    """Have a second thread close a manager at some points of its calls; return how many raised.

    Raises:
        AssertionError: one of the threads hangs, or gets anything but StateError.
    """
    account, n_raised = Account(config), 0
    with SecondThread() as other:
        for name, point, _ in drawn(account, count, seed):
            where = f"closed in {name} at {point}"
            account.prepare(name)
            manager = account.manager

            def close(manager: Any = manager) -> None:
                other.begin(manager.close)
                running = manager._running
                while isinstance(running, Running) and not (
                    running.engine.closing or manager.closed
                ):
                    threading.Event().wait(0.001)

            try:
                act_at(point, partial(account.call, name), close)
            except StateError:  # it is closed
                n_raised += 1
            except BaseException as error:
                raise AssertionError(f"{where}: {error!r}") from error
            if other.is_busy:  # it has come to that point
                found = other.wait()
                assert found is None, f"{where}: {found!r}"
            manager.close()
            assert manager.closed, where
            stats = manager.stats()
            assert stats["actions"] == stats["timesteps"] + stats["cancelled"], (where, stats)
            account.owed.clear()
    account.manager.close()
    return n_raised
