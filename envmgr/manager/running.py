"""What a manager has while envs run, and what stands in its place while none do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

from envmgr.config import ManagerConfig
from envmgr.core import Supervisor
from envmgr.core.board_writer import figures_of
from envmgr.core.engine import CLOSED, Engine, Gather
from envmgr.core.owner import Owner
from envmgr.core.slots import SlotRules, Slots
from envmgr.core.spares import NO_SPARES
from envmgr.core.statistics import Statistics
from envmgr.errors import EnvManagerError, LeaseError, ManagerClosedError, StateError
from envmgr.manager.threads import CallThread
from envmgr.optional_packages import own_part
from envmgr.policy import GatherPolicy
from envmgr.spaces import ActionCheck

if TYPE_CHECKING:
    from envmgr.normalizing import Normalization
    from envmgr.observing.episode_log import EpisodeLog


class Refusal(AbstractContextManager[Supervisor]):
    """The context that a public call enters while none is allowed: it raises an error."""

    def __init__(self, kind: type[EnvManagerError], text: str) -> None:
        self._kind = kind
        self._text = text

    def __enter__(self) -> NoReturn:
        raise self._kind(self._text)

    def __exit__(self, *details: object) -> None:
        """Never called."""


class Refusals:
    """The contexts that public calls enter while a manager is not launched.

    Attributes:
        not_launched: the context before the launch.
        closed: the context after the end.
    """

    def __init__(self, kind: type[EnvManagerError]) -> None:
        self.not_launched = Refusal(
            kind, "the manager is not launched: use `with manager:`, or call launch()"
        )
        self.closed = Refusal(kind, CLOSED)


class CallUnderWay(Refusal):
    """A `call_async` whose results have not been taken: other calls are refused until then.

    Args:
        env_ids: the envs that were called.

    Attributes:
        results: what they answered, once that has been read.
    """

    def __init__(self, env_ids: list[int]) -> None:
        super().__init__(
            StateError, "a call_async is under way; take its result with call_wait() first"
        )
        self.env_ids = env_ids
        self.results: list[Any] | None = None


class NotRunning:
    """What a manager has before its envs are started, and after they were closed.

    It answers what may be asked at any time, and refuses the rest: if a call that was let in comes
    upon this object, a signal handler has closed the manager during the call.

    Args:
        calling: refuses public calls.
        statistics: what the last launch has counted.
        figures: gives what else is known of the last launch.
    """

    is_built = False
    is_launched = False
    call_under_way = None

    def __init__(
        self,
        calling: Refusal,
        statistics: Statistics | None = None,
        figures: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.calling: AbstractContextManager[Supervisor] = calling
        self.statistics = Statistics() if statistics is None else statistics
        self.figures = figures

    @property
    def itself(self) -> Running:
        """What runs. Nothing does, so this property and those that use it raise.

        Raises:
            ManagerClosedError: always.
        """
        raise ManagerClosedError("the manager was closed during this call")

    @property
    def engine(self) -> Engine:
        """There is none."""
        return self.itself.engine

    @property
    def gather(self) -> Gather:
        """There is none."""
        return self.itself.gather

    @property
    def owner(self) -> Owner:
        """There is none."""
        return self.itself.owner

    @property
    def supervisor(self) -> Supervisor:
        """There is none."""
        return self.itself.supervisor

    @property
    def generations(self) -> list[int]:
        """How often each env was built anew; empty, as there are no envs."""
        return []

    def stats(self) -> dict[str, Any]:
        """Return nothing: `stats` shows more only while there are envs and workers."""
        return {}

    def hurry(self) -> None:
        """Do nothing: nothing is being ended."""

    def refuse_calls(self) -> None:
        """Do nothing: calls are refused already."""

    def end(self, grace_s: float) -> NotRunning:
        """Do nothing: there is nothing to end."""
        return self


class Running:
    """An engine of a manager, from its opening to its end.

    Args:
        engine: runs the envs.
        config: says where metrics and a timeline go.
        owner: the manager. If it is dropped without having been closed, the engine is closed with
            it; so nothing here refers to it.
        refusals: refuse public calls before the launch and after the end.
        log: told of episodes and failures; None if there is none.
        normalization: told of what is handed out once more; None if there is none.

    Attributes:
        engine: runs the envs.
        supervisor: keeps the envs.
        gather: waits for their timesteps.
        statistics: what is counted since the launch.
        figures: gives what else is known of the launch; also after the end.
        calling: the context that a public call enters. Once launched, it is that of the engine, or
            one that refuses calls as long as a `call_async` is under way.
        slot_rules: the rules for leases.
        action_checks: the check of each env's actions; None if they are not to be checked.
        calls: makes calls for batches on behalf of coroutines.
        is_built: whether all envs are built.
        is_launched: whether all envs were reset, and nobody has closed them.
    """

    _owner: Owner | None = None

    def __init__(
        self,
        engine: Engine,
        config: ManagerConfig,
        owner: object,
        refusals: Refusals,
        log: EpisodeLog | None = None,
        normalization: Normalization | None = None,
    ) -> None:
        self.engine = engine
        self.supervisor = engine.supervisor
        self.gather = Gather(engine, GatherPolicy(config.wait_num, config.step_wait_timeout))
        self.statistics = engine.supervisor.statistics
        self.figures = figures_of(engine)
        self.calling: AbstractContextManager[Supervisor] = refusals.not_launched
        self.is_built = False
        self.is_launched = False
        self._closed = refusals.closed
        self._config = config
        self.slot_rules = SlotRules(
            config.step_timeout,
            config.reset_timeout,
            config.episode_timeout,
            config.release_timeout,
            lambda: self.action_checks,
            None if log is None else log.episode,
            None if config.limits is None else config.limits.running,
        )
        self._log = log
        self._on_owed = [each.owed for each in (log, normalization) if each is not None]
        if log is not None:
            self.statistics.log = log.failed
        self.action_checks: Sequence[ActionCheck] | None = None
        self.calls = CallThread()
        self._finalizer = weakref.finalize(owner, engine.close, 0.0)

    def open_endpoint(self) -> None:
        """Open the endpoint of metrics, if the config wants one.

        Raises:
            MissingDependencyError, ConfigError: it cannot be opened.
        """
        metrics, watch = self._config.metrics, self.engine.watch
        if metrics is not None and metrics.port is not None and watch is not None:
            endpoint = own_part("observing.endpoint", "manager.metrics.port").Endpoint
            watch.followers.append(endpoint(metrics.port, lambda: watch.board))

    @property
    def owner(self) -> Owner:
        """The thread that owns the engine while envs are leased; reading this starts it.

        Raises:
            LeaseError: no thread can be started.
        """
        owner = self._owner
        if owner is None:
            engine = self.engine
            slots = Slots(self.supervisor, self.slot_rules)
            made = Owner(engine, engine.lock, slots, self._on_owed)
            owner = self.__dict__.setdefault("_owner", made)  # of two threads, the first one's
            if owner is not made:
                made.end()
        try:
            owner.start()
        except RuntimeError as error:
            raise LeaseError(f"no thread can be had that owns the envs: {error}") from error
        return owner

    def launched(self) -> None:
        """Let public calls in."""
        self.calling = self.engine.calling
        self.is_launched = True

    @property
    def itself(self) -> Running:
        """What runs: this object."""
        return self

    @property
    def call_under_way(self) -> CallUnderWay | None:
        """The `call_async` whose results have not been taken, if there is one."""
        calling = self.calling
        return calling if type(calling) is CallUnderWay else None

    # -- what may be asked at any time, from any thread -----------------------------------

    @property
    def generations(self) -> list[int]:
        """How often each env was built anew, by env_id."""
        return [env.generation for env in self.supervisor.envs]

    def stats(self) -> dict[str, Any]:
        """Return what `stats` shows of envs and workers while there are some."""
        supervisor = self.supervisor
        spares = supervisor.spares
        return {
            "generations": self.generations,
            "workers": self._workers(),
            **(NO_SPARES if spares is None else spares.figures()),
            "moments": list(supervisor.statistics.moments.copy()),
            **self._limits(),
        }

    def _limits(self) -> dict[str, Any]:
        """Return how much of each cap is in use or waited for; empty if there are no caps."""
        if self._config.limits is None:
            return {}
        starts, units, owner = self.supervisor.hosts.starts, self.engine.units, self._owner
        leases = (0, 0) if owner is None else owner.slots.counts
        return {
            "limits": {
                **({} if starts is None else starts.figures()),
                "leased": leases[0],
                "waiting_for_lease": leases[1],
                "shared": {} if units is None else units.figures(),
            }
        }

    def _workers(self) -> list[dict[str, Any]]:
        """Return the pid and the envs of each worker process; empty if envs run in this one."""
        pids = self.engine.transport.pids
        return [
            {"pid": pid, "env_ids": [env.env_id for env in group.envs if not env.is_spare]}
            for group in self.supervisor.hosts.groups
            if group.host_id is not None and (pid := pids.get(group.host_id)) is not None
        ]

    # -- the end --------------------------------------------------------------------------

    def refuse_calls(self) -> None:
        """Let no public call in any more: the end is near."""
        self.is_launched = self.is_built = False
        self.calling = self._closed

    def hurry(self) -> None:
        """Have an end that is under way wait for nobody any more."""
        self.engine.transport.hurry()

    def end(self, grace_s: float) -> NotRunning:
        """Close the engine; can be interrupted, and called again.

        Args:
            grace_s: seconds that envs get to close.

        Returns:
            What takes the place of this object from now on.
        """
        self.figures()  # for the last time with what hosts have measured
        if self._config.trace is not None:
            timeline = own_part("observing.timeline", "manager.trace")
            timeline.write_trace(self._config.trace.path, self.engine)
        self.engine.close(grace_s)
        if self._owner is not None:
            self._owner.end()
        self.calls.end()
        if self._log is not None:
            self._log.close()
        self._finalizer.detach()
        return NotRunning(self._closed, self.statistics, self.figures)
