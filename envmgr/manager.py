"""The manager: the one launch, reset, step, send, recv and close of every kind."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from easydict import EasyDict
from typing_extensions import Self

from envmgr import requests
from envmgr.config import ManagerConfig, default_manager_config, to_easydict
from envmgr.engine import Engine
from envmgr.env import adapt
from envmgr.errors import (
    ConfigError,
    EnvAttributeError,
    EnvFailure,
    LaunchError,
    ManagerClosedError,
    MethodAccessError,
    NothingReadyError,
    StateError,
)
from envmgr.gather import Gather
from envmgr.launch import build_engine, launch_envs
from envmgr.lifecycle import EnvState
from envmgr.policy import GatherPolicy
from envmgr.protocol import Attribute, EnvDescription, Op, RemoteFailure
from envmgr.seeding import Samplers, seeds_by_env
from envmgr.spaces import ActionCheck, Layout, action_check, layout_of
from envmgr.supervisor import Next, Supervisor, Work
from envmgr.transport.base import Transport
from envmgr.types import EnvFactory, EnvTimestep, monotonic
from envmgr.views import ArrayBatch, DictView, array_batch

logger = logging.getLogger("envmgr")

_COMING = frozenset((Work.STARTING, Work.RESETTING, Work.PAUSING, Work.ENDING))


class EnvManager:
    """Runs `env_num` envs; what the kinds in `envmgr.managers` have in common, which is all of it.

    A manager is built closed: nothing starts before `launch()`, or before a space is asked for.
    It serves one thread at a time; `close`, `stats` and `env_states` may be called from others.

    Args:
        env_fn: one factory for each env; each builds a `BaseEnv` or a `gymnasium.Env`.
        cfg: the manager section of a config: keys of `ManagerConfig`, unknown ones are refused.
        observation_space: in place of the envs' own.
        action_space: likewise.
        reward_space: likewise.

    Raises:
        ConfigError: the config is wrong, or does not fit the number of factories.
        MissingDependencyError: this kind needs a package that is not installed.
    """

    preset: ClassVar[Mapping[str, Any]] = {}
    """Defaults of this kind that differ from those of the schema."""

    def __init__(
        self,
        env_fn: Sequence[EnvFactory],
        cfg: Mapping[str, Any] | None = None,
        *,
        observation_space: Any = None,
        action_space: Any = None,
        reward_space: Any = None,
    ) -> None:
        self._engine: Engine | None = None
        self._launched = False
        self._env_fn = _checked_factories(env_fn)
        config = ManagerConfig.from_mapping(cfg, self.preset)
        self._config = config.with_env_num(len(self._env_fn))
        self._view = self._make_view()
        self._policy = GatherPolicy(self._config.wait_num, self._config.step_wait_timeout)
        self._given = (observation_space, action_space, reward_space)
        self._description: EnvDescription | None = None
        self._action_check: ActionCheck | None = None
        self._layout: Layout | None = None
        self._samplers: Samplers | None = None
        self._seeds: dict[int, int | None] = dict.fromkeys(range(self.env_num))
        self._dynamic_seed: bool | None = None
        self._replay_paths: list[str] | None = None
        self._called: list[int] | None = None
        self._last_stats: dict[str, Any] = {}
        self._env_ref: Any = None
        self._finalizer: Callable[[], Any] | None = None
        if self._config.seed is not None:
            self.seed(self._config.seed)

    # -- what a kind chooses ----------------------------------------------------------------

    def _make_transport(self) -> Transport:
        """Return a new transport for one launch."""
        raise TypeError(f"{type(self).__name__} has no transport; use a kind of envmgr.managers")

    def _make_view(self) -> DictView:
        """Return the form in which this kind shows batches."""
        return DictView()

    @classmethod
    def default_config(cls) -> EasyDict:
        """Return every key of this kind's config with its default, as a deep copy."""
        return default_manager_config(cls.preset)

    # -- what it is -------------------------------------------------------------------------

    @property
    def env_num(self) -> int:
        """Number of envs."""
        return len(self._env_fn)

    @property
    def cfg(self) -> EasyDict:
        """The config in force, as a copy."""
        return to_easydict(self._config.to_dict())

    @property
    def closed(self) -> bool:
        """Whether it is not launched: before `launch`, and after `close`."""
        return not self._launched

    @property
    def observation_space(self) -> Any:
        """The observation space of one env. Starts a host when asked before `launch`."""
        return self._described().observation_space

    @property
    def action_space(self) -> Any:
        """The action space of one env. Starts a host when asked before `launch`."""
        return self._described().action_space

    @property
    def reward_space(self) -> Any:
        """The reward space of one env, or None. Starts a host when asked before `launch`."""
        return self._described().reward_space

    @property
    def metadata(self) -> Any:
        """The metadata of env 0. Starts a host when asked before `launch`."""
        return self._described().metadata

    @property
    def spec(self) -> Any:
        """The gymnasium registration of env 0, or None."""
        return self._described().spec

    @property
    def render_mode(self) -> Any:
        """The render mode of env 0, or None."""
        return self._described().render_mode

    def _described(self) -> EnvDescription:
        if self._description is None:
            observation_space, action_space, reward_space = self._given
            if observation_space is not None and action_space is not None:
                return EnvDescription(observation_space, action_space, reward_space, {}, None, None)
            self._describe_early()
        if self._description is None:
            raise StateError("env 0 has not described itself yet: call launch()")
        return self._description

    def _describe_early(self) -> None:
        """Start the host of env 0 now; `launch` goes on with it."""
        engine = self._ensure_engine()
        try:
            with engine.calling() as supervisor:
                supervisor.start_hosts([0])
                failures = supervisor.repair.launch_failures
                engine.wait_until(
                    lambda: 0 in supervisor.descriptions or bool(failures), doing="reading spaces"
                )
                if failures:
                    raise LaunchError(f"the spaces cannot be read: {failures[0]}", failures)
                self._adopt(supervisor.descriptions[0])
        except BaseException:
            self._discard_engine(0.0)
            raise

    def _adopt(self, description: EnvDescription) -> None:
        given = (mine or theirs for mine, theirs in zip(self._given, description, strict=False))
        description = description._replace(
            **dict(zip(("observation_space", "action_space", "reward_space"), given, strict=True))
        )
        self._description = description
        self._layout = layout_of(description.observation_space)
        wanted = self._config.check_actions
        self._action_check = (
            action_check(description.action_space, strict=wanted == "strict") if wanted else None
        )
        self._samplers = Samplers(description.action_space, self.env_num)
        self._samplers.seed(self._seeds)

    @property
    def env_ref(self) -> Any:
        """An env of this process, built when this is first read; not one of those that run."""
        if self._env_ref is None:
            self._env_ref = adapt.as_base_env(self._env_fn[0](), 0)
        return self._env_ref

    @property
    def method_name_list(self) -> list[str]:
        """Names of the methods that managers and envs have in common."""
        return [
            "reset",
            "step",
            "seed",
            "close",
            "enable_save_replay",
            "render",
            "reward_shaping",
            "enable_save_figure",
        ]

    # -- launch and close -------------------------------------------------------------------

    def _ensure_engine(self) -> Engine:
        if self._engine is None:
            self._engine = build_engine(
                self._env_fn, self._config, self._make_transport(), self._given[:2], monotonic
            )
            # Not of the manager itself: what is dropped without close() ends with its finalizer.
            self._finalizer = weakref.finalize(self, self._engine.close, 0.0)
        return self._engine

    def _discard_engine(self, grace_s: float) -> None:
        engine, self._engine, self._launched = self._engine, None, False
        self._called = None
        self._view.forget()
        if engine is None:
            return
        engine.close(grace_s)
        self._last_stats = engine.supervisor.statistics.as_dict()
        if isinstance(self._finalizer, weakref.finalize):
            self._finalizer.detach()

    def launch(self, reset_param: Mapping[int, Mapping[str, Any] | None] | None = None) -> None:
        """Start all hosts, build all envs and reset them: all of them or none.

        Args:
            reset_param: keyword arguments of the resets, by env_id; kept for automatic resets.

        Raises:
            StateError: it is launched already.
            ConfigError: a factory cannot be sent to a worker; nothing was started.
            LaunchError: envs failed; all is closed again, and all failures are in the error.
            SpaceMismatchError: the envs have different spaces.
        """
        if self._launched:
            raise StateError("the manager is launched already; close() it before launching again")
        params = requests.checked_params(reset_param, self.env_num)
        engine = self._ensure_engine()
        try:
            with engine.calling() as supervisor:
                for slot in supervisor.slots:
                    slot.reset_params = params.get(slot.env_id) or {}
                    slot.base_seed = slot.new_seed = self._seeds[slot.env_id]
                supervisor.rules.dynamic_seed = self._dynamic_seed
                launch_envs(engine, self._config, self._replay_paths)
                self._adopt(supervisor.descriptions[0])
        except BaseException as error:
            patient = isinstance(error, Exception)  # Ctrl-C does not wait for envs to close
            self._discard_engine(self._config.close_timeout if patient else 0.0)
            raise
        self._launched = True

    def close(self, timeout_s: float | None = None, terminate: bool = False) -> None:
        """Close all envs and end all hosts. Idempotent; from any thread.

        Takes at most the grace plus about one second, however many envs hang. Timesteps that have
        not been delivered are lost and counted as cancelled.

        Args:
            timeout_s: seconds that the envs get to close, all together; None: `close_timeout`.
            terminate: do not ask the envs; terminate their hosts at once.
        """
        grace_s = self._config.close_timeout if timeout_s is None else max(timeout_s, 0.0)
        self._discard_engine(0.0 if terminate else grace_s)
        env_ref, self._env_ref = self._env_ref, None
        if env_ref is not None:
            adapt.close_env(env_ref)

    def __enter__(self) -> Self:
        """Launch it, unless it is launched already."""
        if not self._launched:
            self.launch()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""
        self.close()

    def _calling(self) -> AbstractContextManager[Supervisor]:
        if self._engine is None or not self._launched:
            raise ManagerClosedError("the manager is closed; call launch() first")
        if self._called is not None:
            raise StateError("a call_async is under way; take its result with call_wait() first")
        return self._engine.calling()

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise ManagerClosedError("the manager was closed during this call")
        return self._engine

    def _surface(self, supervisor: Supervisor) -> None:
        """Raise what failed for good, once; with `on_failure: raise`, close first."""
        fatal = supervisor.repair.take_fatal()
        if fatal is None:
            return
        if self._config.on_failure == "raise":
            self._discard_engine(self._config.close_timeout)
        raise fatal

    # -- readiness --------------------------------------------------------------------------

    @property
    def env_states(self) -> dict[int, EnvState]:
        """The state of each env_id; may be read from any thread."""
        engine = self._engine
        if engine is None or not self._launched:
            return dict.fromkeys(range(self.env_num), EnvState.VOID)
        return dict(enumerate(engine.supervisor.states.snapshot()))

    def env_state_done(self, env_id: int) -> bool:
        """Return whether an env's episode budget is spent."""
        return self.env_states[requests.checked_env_id(env_id, self.env_num)] is EnvState.DONE

    @property
    def done(self) -> bool:
        """Whether all episode budgets are spent and every timestep was delivered."""
        engine = self._engine
        if engine is None or not self._launched:
            return False
        supervisor = engine.supervisor
        return all(s is EnvState.DONE for s in supervisor.states.snapshot()) and not (
            supervisor.owed_ids()
        )

    @property
    def ready_obs(self) -> Any:
        """The observations of the envs that take an action now.

        Waits for resets and repairs, until at least one env is ready; never for steps.

        Returns:
            `{env_id: obs}`, ascending; `{}` if all envs are DONE. V2: one stacked treetensor.

        Raises:
            NothingReadyError: nothing can become ready without `recv`, or without `reset`, or at
                all; the message says which.
            FailuresExhaustedError: an env failed more often than allowed.
        """
        with self._calling() as supervisor:
            self._running.collect()
            self._surface(supervisor)
            ready = supervisor.ready_ids()
            if not ready and self._await_ready(supervisor):
                self._surface(supervisor)
                ready = supervisor.ready_ids()
            slots = supervisor.slots
            return self._view.ready({i: slots[i].obs for i in ready})

    def _await_ready(self, supervisor: Supervisor) -> bool:
        """Wait until an env is ready; False if all are done."""
        repair = supervisor.repair

        def settled() -> bool:
            return repair.fatal is not None or any(
                supervisor.is_ready(s.env_id) for s in supervisor.slots
            )

        def hopeless() -> bool:
            return not any(_is_coming(s) for s in supervisor.slots if not s.owed)

        self._running.wait_until(lambda: settled() or hopeless(), doing="ready_obs")
        if settled():
            return True
        _refuse_to_wait(supervisor)
        return False

    @property
    def ready_obs_id(self) -> list[int]:
        """The envs that take an action now, ascending; does not wait.

        V2: the envs of the rows of the last `ready_obs` that was read.
        """
        return self._view.rows(self.ready_env)

    @property
    def ready_env(self) -> list[int]:
        """The envs that take an action now, ascending; does not wait."""
        with self._calling() as supervisor:
            self._running.collect()
            return supervisor.ready_ids()

    @property
    def active_env(self) -> list[int]:
        """The envs in an episode (RUN), pending ones included, ascending; does not wait."""
        return [i for i, state in self.env_states.items() if state is EnvState.RUN]

    @property
    def ready_info(self) -> dict[int, dict[str, Any]]:
        """What the latest reset of each ready env said besides the observation."""
        with self._calling() as supervisor:
            self._running.collect()
            return {i: supervisor.slots[i].reset_info for i in supervisor.ready_ids()}

    # -- steps ------------------------------------------------------------------------------

    def step(self, actions: Any) -> Any:
        """Send actions and gather timesteps.

        Sync kinds return exactly the ids they were given, in that order. Async kinds return some
        of what is outstanding, earlier sends included, in ascending order: `wait_num` of it or
        more, see `GatherPolicy`.

        Args:
            actions: `{env_id: action}`; `{}` gathers what is outstanding. V2: a list, or a stacked
                array or tree, with one action for each row of the last `ready_obs`.

        Returns:
            `{env_id: EnvTimestep}`; V2: a list of treetensors with `obs reward done info env_id`.

        Raises:
            ActionError, EnvNotReadyError, UnknownEnvError: refused; nothing was sent to any env.
            NothingReadyError: `{}` while nothing is outstanding.
        """
        with self._calling() as supervisor:
            by_id = self._send(supervisor, actions)
            gather = Gather(self._running, supervisor)
            if by_id and self._policy.gathers_all:
                env_ids = gather.exactly(list(by_id))
            else:
                env_ids = gather.some(self._policy)
            return self._view.timesteps(self._deliver(supervisor, env_ids))

    def send(self, actions: Any) -> None:
        """Send actions and return at once; `recv` gathers the timesteps."""
        with self._calling() as supervisor:
            self._send(supervisor, actions)

    def recv(self, min_ready: int | None = None, timeout_s: float | None = None) -> Any:
        """Gather timesteps of what is outstanding, in ascending order of env_id.

        Args:
            min_ready: how many to wait for; None: as `step` of this kind does.
            timeout_s: return what has arrived after so many seconds, possibly nothing.

        Raises:
            NothingReadyError: nothing is outstanding.
        """
        with self._calling() as supervisor:
            return self._view.timesteps(self._receive(supervisor, min_ready, timeout_s))

    def _receive(
        self, supervisor: Supervisor, min_ready: int | None, timeout_s: float | None
    ) -> dict[int, EnvTimestep]:
        policy = self._policy
        if min_ready is not None:
            if min_ready < 1:
                raise ConfigError(f"min_ready is {min_ready}; it should be 1 or more")
            policy = GatherPolicy(min_ready, 0.0)
        deadline = math.inf if timeout_s is None else monotonic() + max(timeout_s, 0.0)
        if not supervisor.statistics.outstanding:
            self._surface(supervisor)
        gather = Gather(self._running, supervisor)
        env_ids = gather.some(policy, deadline=deadline, exactly=min_ready is not None)
        return self._deliver(supervisor, env_ids)

    def _send(self, supervisor: Supervisor, actions: Any) -> Mapping[int, Any]:
        by_id: Mapping[int, Any] = self._view.actions(actions, supervisor.ready_ids)
        if by_id or not isinstance(by_id, Mapping):
            self._surface(supervisor)
            prepared = requests.prepared_steps(supervisor, by_id, self._action_check)
            supervisor.submit_steps(prepared)
            self._view.forget()
        elif not supervisor.statistics.outstanding:
            self._surface(supervisor)
        return by_id

    def _deliver(self, supervisor: Supervisor, env_ids: list[int]) -> dict[int, EnvTimestep]:
        """Hand out what has arrived of `env_ids`; a failure that is urgent comes first."""
        if supervisor.repair.urgent:
            self._surface(supervisor)
        timesteps = supervisor.deliver(env_ids)
        if not timesteps:
            self._surface(supervisor)
        return timesteps

    def send_arrays(self, env_ids: Sequence[int], actions: Any) -> None:
        """Send one action to each of `env_ids`.

        Args:
            env_ids: k env_ids.
            actions: (k, *shape), or a dict or tuple of such, or a list of k actions.
        """
        ids = [requests.checked_env_id(i, self.env_num) for i in env_ids]
        by_id = requests.rows_by_id(ids, actions)
        with self._calling() as supervisor:
            self._surface(supervisor)
            supervisor.submit_steps(requests.prepared_steps(supervisor, by_id, self._action_check))

    def recv_arrays(
        self, min_ready: int | None = None, timeout_s: float | None = None
    ) -> ArrayBatch:
        """As `recv`, with the timesteps of k envs as arrays: see `ArrayBatch`."""
        with self._calling() as supervisor:
            return array_batch(self._receive(supervisor, min_ready, timeout_s), self._layout)

    # -- resets and seeds -------------------------------------------------------------------

    def reset(self, reset_param: Mapping[int, Mapping[str, Any] | None] | None = None) -> None:
        """Reset envs and wait for it. The observations come through `ready_obs`.

        A step under way is awaited and its timestep discarded (counted as cancelled). A reset
        that is running already is joined when there are no new parameters. A DONE env starts a
        new budget; an ERROR env is repaired.

        Args:
            reset_param: `{env_id: params}`: keyword arguments of this and of later automatic
                resets; None keeps those given before, `{}` clears them. Nothing at all resets
                every env.

        Raises:
            UnknownEnvError, ConfigError: refused; nothing was reset.
            FailuresExhaustedError: an env failed more often than allowed.
        """
        params = requests.checked_params(reset_param, self.env_num)
        with self._calling() as supervisor:
            supervisor.rules.dynamic_seed = self._dynamic_seed
            self._view.forget()
            for env_id, given in params.items():
                supervisor.begin_explicit_reset(env_id, given)
            slots = [supervisor.slots[i] for i in params]
            repair = supervisor.repair
            self._running.wait_until(
                lambda: (
                    repair.fatal is not None or all(s.work is Work.NONE or s.dropped for s in slots)
                ),
                doing="reset",
            )
            self._surface(supervisor)

    def seed(
        self,
        seed: int | Sequence[int | None] | Mapping[int, int | None] | None,
        dynamic_seed: bool | None = None,
    ) -> None:
        """Seed the envs; takes effect at the next explicit reset or launch.

        Args:
            seed: an int gives env i exactly `seed + i`; a list one to each; a dict one to some.
            dynamic_seed: what automatic resets after that do: None passes no seed, True one
                derived per episode, False the same again.

        Raises:
            ConfigError, UnknownEnvError: refused.
        """
        seeds = seeds_by_env(seed, self.env_num)
        self._seeds.update(seeds)
        self._dynamic_seed = dynamic_seed
        if self._samplers is not None:
            self._samplers.seed(seeds)
        if self._launched:
            with self._calling() as supervisor:
                for env_id, value in seeds.items():
                    supervisor.slots[env_id].new_seed = value

    def random_action(self) -> dict[int, Any]:
        """Return a random action for each ready env, from a seeded stream of each env."""
        samplers = self._samplers
        if samplers is None:
            raise ManagerClosedError("the manager is closed; call launch() first")
        return {i: samplers.sample(i) for i in self.ready_obs_id}

    # -- calls and attributes ---------------------------------------------------------------

    def call(self, name: str, *args: Any, env_ids: int | Iterable[int] | None = None) -> list[Any]:
        """Call a method of envs and return the results, in the order of `env_ids`.

        Waits for resets and repairs of these envs first. `reset_timeout` applies.

        Args:
            name: of the method; `reset`, `step`, `seed` and `close` are refused.
            *args: for it.
            env_ids: which envs; None for all.

        Raises:
            MethodAccessError: refused.
            EnvNotReadyError: an env has an action under way.
            EnvFailure: what the first env that failed failed with; its episode goes on if it only
                raised.
        """
        self.call_async(name, *args, env_ids=env_ids)
        return self.call_wait()

    def call_async(self, name: str, *args: Any, env_ids: int | Iterable[int] | None = None) -> None:
        """Begin a `call`; `call_wait` returns its results."""
        requests.check_method_name(name)
        ids = requests.checked_env_ids(env_ids, self.env_num)
        with self._calling() as supervisor:
            self._submit(supervisor, ids, Op.CALL, [(name, args)] * len(ids), f"call({name!r})")
            self._called = ids

    def call_wait(self, timeout_s: float | None = None) -> list[Any]:
        """Return the results of the last `call_async`.

        Args:
            timeout_s: raise TimeoutError after so many seconds; the call goes on.
        """
        ids = self._called
        if ids is None:
            raise StateError("there is no call under way: use call_async first")
        deadline = math.inf if timeout_s is None else monotonic() + timeout_s
        with self._running.calling() as supervisor:
            if not self._await_results(supervisor, ids, deadline):
                raise TimeoutError(f"the call has not ended after {timeout_s:g} s")
            self._called = None
            return self._results(supervisor, ids)

    def get_attr(self, name: str, env_ids: int | Iterable[int] | None = None) -> list[Any]:
        """Return an attribute of envs, in the order of `env_ids` (None for all).

        Raises:
            EnvAttributeError: an env has none of this name.
            MethodAccessError: it is a method; use `call`.
            EnvNotReadyError: an env has an action under way.
        """
        ids = requests.checked_env_ids(env_ids, self.env_num)
        with self._calling() as supervisor:
            what = f"reading {name!r}"
            values = self._request(supervisor, ids, Op.GET_ATTR, [name] * len(ids), what)
        for env_id, value in zip(ids, values, strict=True):
            if isinstance(value, RemoteFailure):
                raise EnvAttributeError(f"env {env_id} has no attribute {name!r}: {value.message}")
            if value.is_method:
                raise MethodAccessError(
                    f"{name!r} is a method of env {env_id}: use manager.call({name!r}, ...)"
                )
        return [value.value for value in values if isinstance(value, Attribute)]

    def set_attr(self, name: str, value: Any, env_ids: int | Iterable[int] | None = None) -> None:
        """Set an attribute of envs; repeated on envs that are renewed later.

        Args:
            name: of the attribute.
            value: one value for all, or a list with one for each of `env_ids`.
            env_ids: which envs; None for all.
        """
        ids = requests.checked_env_ids(env_ids, self.env_num)
        values = value if isinstance(value, list) else [value] * len(ids)
        if len(values) != len(ids):
            raise ConfigError(
                f"set_attr({name!r}) got a list of {len(values)} values for {len(ids)} envs; to "
                "set one list everywhere, give a list of equal lists"
            )
        payloads = [(name, one) for one in values]
        with self._calling() as supervisor:
            self._request(supervisor, ids, Op.SET_ATTR, payloads, f"setting {name!r}")
            for env_id, payload in zip(ids, payloads, strict=True):
                supervisor.replay(env_id, Op.SET_ATTR, payload)

    def __getattr__(self, name: str) -> list[Any]:
        """Return the attribute `name` of every env, as DI-engine's managers do."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if not self.__dict__.get("_launched", False):
            raise EnvAttributeError(
                f"{type(self).__name__} has no attribute {name!r}; if it is one of the envs, it "
                "can be read after launch()"
            )
        return self.get_attr(name)

    def _request(
        self, supervisor: Supervisor, ids: list[int], op: Op, payloads: list[Any], what: str
    ) -> list[Any]:
        self._submit(supervisor, ids, op, payloads, what)
        self._await_results(supervisor, ids, math.inf)
        return self._results(supervisor, ids)

    def _submit(
        self, supervisor: Supervisor, ids: list[int], op: Op, payloads: list[Any], what: str
    ) -> None:
        requests.refuse_while_pending(supervisor, ids, what)
        repair = supervisor.repair
        self._running.wait_until(
            lambda: repair.fatal is not None or all(map(supervisor.is_callable, ids)), doing=what
        )
        self._surface(supervisor)
        requests.submit_calls(supervisor, ids, op, payloads, what)

    def _await_results(self, supervisor: Supervisor, ids: list[int], deadline: float) -> bool:
        slots = [supervisor.slots[i] for i in ids]
        return self._running.wait_until(
            lambda: all(slot.work is not Work.CALLING for slot in slots),
            deadline=deadline,
            doing="a call",
        )

    def _results(self, supervisor: Supervisor, ids: list[int]) -> list[Any]:
        results = [supervisor.slots[i].result for i in ids]
        for env_id in ids:
            supervisor.slots[env_id].result = None
        for result in results:
            if isinstance(result, EnvFailure):
                raise result
        return results

    # -- pictures, replays, rewards ---------------------------------------------------------

    def render(
        self, env_ids: int | Iterable[int] | None = None, mode: str | None = None
    ) -> dict[int, Any]:
        """Return a frame of each of `env_ids` (None for all), by env_id.

        Args:
            env_ids: which envs.
            mode: such as "rgb_array"; None for the mode the env was built with.
        """
        ids = requests.checked_env_ids(env_ids, self.env_num)
        return dict(zip(ids, self.call("render", mode, env_ids=ids), strict=True))

    @property
    def ready_imgs(self) -> dict[int, Any]:
        """A frame (`rgb_array`) of each ready env, by env_id."""
        return self.render(self.ready_env, mode="rgb_array")

    def enable_save_replay(self, replay_path: str | Sequence[str]) -> None:
        """Have every env save a replay of each episode that begins from now on.

        Args:
            replay_path: a folder for all envs, or one for each.
        """
        paths = [replay_path] * self.env_num if isinstance(replay_path, str) else [*replay_path]
        if len(paths) != self.env_num:
            raise ConfigError(f"{len(paths)} replay paths for {self.env_num} envs")
        self._replay_paths = paths
        if self._launched:
            payloads = [("enable_save_replay", (path,)) for path in paths]
            ids = list(range(self.env_num))
            with self._calling() as supervisor:
                self._request(supervisor, ids, Op.CALL, payloads, "enable_save_replay")
                for env_id, payload in enumerate(payloads):
                    supervisor.replay(env_id, Op.CALL, payload)

    def enable_save_figure(self, env_id: int, figure_path: str) -> None:
        """Have one env save figures in a folder."""
        self.call("enable_save_figure", figure_path, env_ids=env_id)

    def reward_shaping(self, env_id: int, transitions: list[Any]) -> Any:
        """Return the transitions of one env's episode with their rewards shaped by the env."""
        return self.call("reward_shaping", transitions, env_ids=env_id)[0]

    # -- figures ----------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters since launch (of the last launch, once closed); from any thread.

        `actions` accepted = `timesteps` delivered + `cancelled` + `outstanding`.
        """
        engine = self._engine
        if engine is None:
            return {**self._last_stats, "states": self._states_by_name(), "outstanding": 0}
        return {
            **engine.supervisor.statistics.as_dict(),
            "states": self._states_by_name(),
            "outstanding": engine.supervisor.statistics.outstanding,
            "generations": [slot.generation for slot in engine.supervisor.slots],
        }

    def _states_by_name(self) -> dict[str, int]:
        states = list(self.env_states.values())
        return {state.name: states.count(state) for state in EnvState if state in states}


def _checked_factories(env_fn: Any) -> list[EnvFactory]:
    if callable(env_fn) or not isinstance(env_fn, Iterable):
        raise ConfigError(
            f"env_fn should be a list of functions, one for each env; found {env_fn!r}. For n "
            "equal envs: env_fn=[make_env] * n"
        )
    factories = list(env_fn)
    wrong = [i for i, factory in enumerate(factories) if not callable(factory)]
    if not factories or wrong:
        found = f"entry {wrong[0]} is {factories[wrong[0]]!r}" if wrong else "it is empty"
        raise ConfigError(f"env_fn should be a list of functions, one for each env; {found}")
    return factories


def _is_coming(slot: Any) -> bool:
    """Whether an env will be ready without anybody doing anything."""
    return slot.attended and _is_under_way(slot)


def _is_under_way(slot: Any) -> bool:
    """Whether an env is being reset or repaired, and not given up."""
    if slot.work in (Work.ENDING, Work.PAUSING) and slot.following is Next.NOTHING:
        return False
    return slot.work in _COMING


def _refuse_to_wait(supervisor: Supervisor) -> None:
    """Say why nothing can become ready; return if all envs are done.

    Raises:
        NothingReadyError: for one of three reasons.
    """
    states = supervisor.states.snapshot()
    owed = supervisor.owed_ids()
    if owed:
        raise NothingReadyError(
            f"no env is ready: envs {owed} have actions under way. Gather their timesteps with "
            "recv() or step({}) first."
        )
    waiting = [  # some of them may still be under repair after a failure
        slot.env_id
        for slot, state in zip(supervisor.slots, states, strict=True)
        if state is EnvState.NEED_RESET or _is_under_way(slot)
    ]
    if waiting:
        raise NothingReadyError(
            f"no env is ready: the episodes of envs {waiting} have ended and auto_reset is off. "
            "Begin new ones with reset({env_id: params})."
        )
    failed = [i for i, state in enumerate(states) if state is not EnvState.DONE]
    if failed:
        raise NothingReadyError(
            f"no env can become ready: envs {failed} have failed for good. Repair them with "
            "reset({env_id: None}), or close the manager."
        )
