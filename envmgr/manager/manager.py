"""The manager: the one launch, reset, step, send, recv and close of every kind."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from typing_extensions import Never, Self

from envmgr.calibrate import WorkerCount
from envmgr.config import EasyDict, ManagerConfig, check_kind, default_manager_config, to_easydict
from envmgr.core import (
    NOBODY,
    ArrayBatch,
    Collected,
    HandedOut,
    Phase,
    ReadyBatch,
    Selection,
    Supervisor,
    validate,
)
from envmgr.core.engine import (
    Engine,
    Gather,
    OneCaller,
    await_all_ready,
    await_one_ready,
    refuse_unready,
    unready,
)
from envmgr.core.episodes import EnvRecord, record_of
from envmgr.core.launching import (
    begin_envs,
    build_envs,
    describe_first,
    preload,
    prepare_resets,
    replay_payloads,
)
from envmgr.core.owner import AwaitedCall, Owner
from envmgr.env import adapt, videos
from envmgr.env.batch_specs import batches_of
from envmgr.errors import (
    ConfigError,
    EnvAttributeError,
    EnvNotReadyError,
    LaunchError,
    ManagerClosedError,
    NothingReadyError,
    SnapshotMismatchError,
    StateError,
)
from envmgr.hot import WHY
from envmgr.launch import checked_factories, open_engine, warn_of_wait_num, with_batches
from envmgr.lifecycle import EnvState
from envmgr.manager import names
from envmgr.manager.described import DescribedEnvs
from envmgr.manager.leases import Lease, Lessor
from envmgr.manager.requests import (
    attributes_of,
    await_callable,
    await_results,
    first_failure,
    send_requests,
)
from envmgr.manager.running import CallUnderWay, NotRunning, Refusals, Running
from envmgr.manager.snapshots import (
    CommonState,
    Snapshot,
    checked_snapshot,
    come_to_rest,
    read_snapshot,
    refuse_rows,
    refuse_spares,
    snapshot_of,
)
from envmgr.manager.threads import CLOSING, LAUNCHING, in_thread
from envmgr.normalizing import Normalization, normalization_of
from envmgr.optional_packages import own_part
from envmgr.policy import GatherPolicy
from envmgr.seeding import Seeds, seeds_by_env, seeds_of_spares
from envmgr.spaces.reading import error_text
from envmgr.texts import counted, env_ids_text, logged
from envmgr.transport.base import Transport
from envmgr.types import EnvFactory, EnvIds, EnvTimestep, monotonic
from envmgr.views import DictView, array_batch
from envmgr.wire.block import RING_EACH, RING_LAST, RING_ONCE
from envmgr.wire.messages import EnvDescription, Op, SavedEnv
from envmgr.worker.applied import EnvFunction, take_state, try_state

if TYPE_CHECKING:
    from envmgr.observing.episode_log import EpisodeLog

T = TypeVar("T")

_MOST_INTERRUPTS = 10
"""How many interrupts may come while a manager is being closed."""


class EnvManager:
    """A manager of `env_num` envs: the whole interface, common to all kinds in `envmgr.managers`.

    A new manager is closed: nothing starts before `launch()`, or before a space is asked for.
    It serves one thread at a time; `close`, `stats` and `env_states` may be called from others.

    Args:
        env_fn: one factory for each env; each builds a `BaseEnv` or a `gymnasium.Env`.
        cfg: the manager section of a config: keys of `ManagerConfig`; unknown keys are refused.
        observation_space: used in place of the envs' own.
        action_space: likewise.
        reward_space: likewise.
        **keys: refused; keys of the config belong in `cfg`.

    Raises:
        ConfigError: the config is wrong or does not fit the number of factories, or one of its keys
            is given as an argument.
        MissingDependencyError: this kind needs a package that is not installed.
    """

    preset: ClassVar[Mapping[str, Any]] = {}
    """Defaults of this kind that differ from those of the schema."""

    makes_envs: ClassVar[bool] = False
    """Whether this kind makes its envs itself and takes no `env_fn`."""

    _transport_cls: ClassVar[type[Transport]] = Transport  # type: ignore[type-abstract]
    """What hosts of this kind run on; its properties say what this kind can do."""

    _closed_error: ClassVar[type[ManagerClosedError]] = ManagerClosedError
    """What calls of this kind raise while it is not launched."""

    def __init__(
        self,
        env_fn: Sequence[EnvFactory] | None,
        cfg: Mapping[str, Any] | None = None,
        *,
        observation_space: Any = None,
        action_space: Any = None,
        reward_space: Any = None,
        **keys: Never,
    ) -> None:
        names.refuse_keys_of_config(keys)
        self._refusals = Refusals(self._closed_error)
        self._running: Running | NotRunning = NotRunning(self._refusals.not_launched)
        self._alone = OneCaller()  # for launch and build, while there may be no engine
        config = ManagerConfig.from_mapping(cfg, self.preset)
        self._env_fn = self._factories_of(env_fn, config)
        kind, env_num = self._transport_cls, len(self._env_fn)
        check_kind(config, hides_resets=kind.works_alone, refused=kind.refused)
        config = with_batches(
            config.with_env_num(env_num), self._env_fn, inline=not kind.works_alone
        )
        warn_of_wait_num(config, self.preset)
        self._config = config
        self._worker_count = WorkerCount(config, env_num, packs_envs=kind.packs_envs)
        self._view = self._make_view()
        # A view of dicts changes nothing of what it is given, so calls bypass it.
        self._shows_dicts = type(self._view) is DictView
        self._normalization = normalization_of(config, env_num)
        log = config.episode_log
        self._episode_log: EpisodeLog | None = None
        if log is not None:
            part = own_part("observing.episode_log", "manager.episode_log")
            self._episode_log = part.EpisodeLog(log, env_num)
        self._given_spaces = (
            validate.checked_space(observation_space, "observation_space"),
            validate.checked_space(action_space, "action_space"),
            validate.checked_space(reward_space, "reward_space"),
        )
        self._described: DescribedEnvs | None = None  # until an env was built
        self._seeds = Seeds(dict.fromkeys(range(env_num)), [None] * config.spare_env_num)
        self._runs_envs_in_owner = False
        self._replay_paths: list[str] | None = None
        self._env_ref: Any = None
        self._warned: set[str] = set()  # of what was warned, which is done once
        if config.seed is not None:
            self.seed(config.seed)

    # -- what a kind chooses --------------------------------------------------------------

    def _make_transport(self) -> Transport:
        """Return a new transport for one launch."""
        raise TypeError(f"{type(self).__name__} has no transport; use a kind of envmgr.managers")

    def _factories_of(self, env_fn: Any, config: ManagerConfig) -> list[EnvFactory]:
        """Return a factory for each env."""
        return checked_factories(env_fn)

    def _make_view(self) -> DictView:
        """Return the form in which this kind shows batches."""
        return DictView()

    @classmethod
    def default_config(cls) -> EasyDict:
        """Return every key of this kind's config with its default, as a deep copy."""
        return default_manager_config(cls.preset)

    # -- what it was given ----------------------------------------------------------------

    @property
    def env_num(self) -> int:
        """Number of envs."""
        return len(self._env_fn)

    @property
    def cfg(self) -> EasyDict:
        """The config in force, as a copy."""
        return to_easydict(self._config.to_dict())

    @property
    def stepped_together(self) -> list[range]:
        """The env_ids that must be sent actions in one call: rows of batched envs; usually none.

        Each range is one batched env; a call has to include all of its rows that are ready.
        """
        return [b.env_ids for b in batches_of(self._env_fn) if not b.partial_steps]

    def __repr__(self) -> str:
        config, running = self._config, self.__dict__["_running"]
        state = "launched" if running.is_launched else "not launched"
        return (
            f"<{type(self).__name__}: {counted(self.env_num, 'env')}, type {config.type}, {state}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or send: that of a manager that was not launched.

        Raises:
            StateError: the envs run, or are built; they cannot be in two places.
        """
        if not isinstance(self._running, NotRunning):
            raise StateError(
                "a manager whose envs run is not copied or sent: make one there, with the same "
                "config, or close() this one first. manager.snapshot() saves its envs."
            )
        not_running = NotRunning(self._refusals.not_launched)
        return {**self.__dict__, "_running": not_running, "_described": None, "_env_ref": None}

    @property
    def env_ref(self) -> Any:
        """An env in this process, built when first read; not one of those that the manager runs."""
        if self._env_ref is None:
            self._env_ref = adapt.as_reference(self._env_fn[0])
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

    @property
    def normalization(self) -> Normalization | Any:
        """The running statistics of `normalize_obs`, `normalize_reward` and `episode_statistics`.

        None if none of these is on. (The type does not show this: whoever turns one on knows.)
        """
        return self._normalization

    # -- build ----------------------------------------------------------------------------

    def build(self) -> None:
        """Start all workers and build all envs without resetting any; `launch` goes on with them.

        Calling it is optional. It shows, before the first reset and its seeds, that all envs can be
        built and have the same spaces. It does nothing if it or `launch` was called before.

        Raises:
            ConfigError, LaunchError, SpaceMismatchError: as in `launch`; everything is closed
                again.
        """
        with self._alone:
            if self._running.is_launched:
                return
            try:
                running = self._opened()
                with running.engine.calling:
                    self._build(running)
            except BaseException as error:
                self._give_up(error)
                _refuse_without_memory(error)
                raise

    def _build(self, running: Running) -> None:
        """Build all envs, unless they are built; called inside a call of the engine."""
        if not running.is_built:
            preload(running.engine, self._env_fn)
            build_envs(running.engine, same_spaces=self._config.same_spaces)
            self._adopt(running.supervisor)
            running.is_built = True

    def _opened(self, params: Mapping[int, dict[str, Any] | None] | None = None) -> Running:
        """Return what runs; if nothing does, find the number of workers and open it first."""
        if isinstance(self._running, NotRunning):
            count = self._worker_count
            if count.is_open:
                self._config = count.asked  # `_make_transport` goes by it
                prepare = partial(prepare_resets, params=params or {}, seeds=self._seeds)
                self._config = count.find(partial(self._open_engine, self._env_fn[:1]), prepare)
            elif count.calibration is not None:  # by a copy of this manager, perhaps
                self._config = count.config_of(count.calibration)
            self._open_kept()
            self._running.itself.open_endpoint()
        return self._running.itself

    def _open_kept(self) -> None:
        """Open the engine that is kept, after the log of what will happen in it."""
        log = self._episode_log
        try:
            if log is not None:
                log.open()
            self._open_engine(self._env_fn, self._config, self._keep_engine)
        finally:
            if log is not None and isinstance(self._running, NotRunning):
                log.close()

    def _open_engine(
        self, env_fn: Sequence[EnvFactory], config: ManagerConfig, keep: Callable[[Engine], None]
    ) -> None:
        open_engine(env_fn, config, self._make_transport, self._given_spaces[:2], keep)

    def _keep_engine(self, engine: Engine) -> None:
        told = self._episode_log, self._normalization
        self._running = running = Running(engine, self._config, self, self._refusals, *told)
        if self._runs_envs_in_owner:  # from the first line of theirs on
            running.owner.await_engine()

    # -- spaces ---------------------------------------------------------------------------

    @property
    def observation_space(self) -> Any:
        """The observation space of one env. Reading it before `launch` starts a worker."""
        return self._description().observation_space

    @property
    def action_space(self) -> Any:
        """The action space of one env. Reading it before `launch` starts a worker."""
        return self._description().action_space

    @property
    def env_spaces(self) -> list[tuple[Any, Any]]:
        """The observation and action space of each env. Reading it before `launch` builds all envs.

        With `same_spaces: false` they may differ; the properties for one env show those of env 0.
        """
        self.build()
        return list(self._known.spaces)

    @property
    def reward_space(self) -> Any:
        """The reward space of one env, or None. Reading it before `launch` starts a worker."""
        return self._description().reward_space

    @property
    def metadata(self) -> Any:
        """The metadata of env 0. Reading it before `launch` starts a worker."""
        return self._description().metadata

    @property
    def spec(self) -> Any:
        """The gymnasium registration of env 0, or None."""
        return self._description().spec

    @property
    def render_mode(self) -> Any:
        """The render mode of env 0, or None."""
        return self._description().render_mode

    def _description(self) -> EnvDescription:
        """Return the description of env 0; start its host now if it is not known otherwise."""
        if self._described is None:
            if self._given_spaces[0] is not None and self._given_spaces[1] is not None:
                return self._handed_out([EnvDescription(*self._given_spaces, {}, None, None)])[0]
            self._describe_early()
        return self._known.first

    @property
    def _known(self) -> DescribedEnvs:
        """The envs as they have described themselves.

        Raises:
            StateError: they have not done so yet.
        """
        if self._described is None:
            raise StateError("env 0 has not described itself yet: call launch()")
        return self._described

    def _describe_early(self) -> None:
        """Start the host of env 0 now; `launch` goes on with it."""
        with self._alone:
            if self._described is not None:  # another thread has asked for it, just now
                return
            try:
                engine = self._opened().engine
                with engine.calling as supervisor:
                    preload(engine, self._env_fn[:1])
                    describe_first(engine)
                    self._adopt(supervisor)
            except BaseException as error:
                self._discard_engine(0.0)
                _refuse_without_memory(error)
                raise

    def _adopt(self, supervisor: Supervisor) -> None:
        """Adopt the description of env 0, or those of several different envs."""
        descriptions = supervisor.descriptions
        ours = self._handed_out([self._with_given_spaces(d) for d in descriptions.values()])
        check = self._config.check_actions
        self._described = DescribedEnvs(ours, supervisor.envs, check, self._seeds.of_envs)

    def _handed_out(self, descriptions: list[EnvDescription]) -> list[EnvDescription]:
        """Return descriptions of envs with the spaces of what is handed out."""
        normalization = self._normalization
        return descriptions if normalization is None else normalization.adopt(descriptions)

    def _with_given_spaces(self, description: EnvDescription) -> EnvDescription:
        names = ("observation_space", "action_space", "reward_space")
        given = {n: s for n, s in zip(names, self._given_spaces, strict=True) if s is not None}
        return description._replace(**given)

    # -- launch ---------------------------------------------------------------------------

    def launch(
        self,
        reset_param: Mapping[int, Mapping[str, Any] | None] | None = None,
        **others: Never,
    ) -> None:
        """Start all workers, build all envs and reset them: all of them or none.

        Args:
            reset_param: reset params by env_id: options for a gymnasium env, keyword arguments for
                a `BaseEnv`; never the seed. They are kept for automatic resets.
            **others: refused; the error says what to call instead.

        Raises:
            StateError: the manager is launched already.
            ConfigError: a factory cannot be sent to a worker, or there are other arguments, such as
                a seed; nothing was started.
            LaunchError: envs failed; everything is closed again, and the error has all failures.
            SpaceMismatchError: the envs have different spaces.
        """
        names.refuse_arguments("launch", others)
        params = validate.checked_params(reset_param, self.env_num)
        with self._alone:
            if self._running.is_launched:  # perhaps by another thread, just now
                raise StateError(
                    "the manager is launched already; close() it before launching again"
                )
            try:
                running = self._opened(params)
                with running.engine.calling as supervisor:
                    prepare_resets(supervisor, params, self._seeds)
                    self._build(running)
                    self._check_options(running.supervisor, params)
                    if self._normalization is not None:
                        self._normalization.begin(range(self.env_num))
                    begin_envs(running.engine, self._replay_paths)
                running.action_checks = self._known.action_checks
                running.launched()
            except BaseException as error:
                self._give_up(error)
                _refuse_without_memory(error)
                raise

    def __enter__(self) -> Self:
        """Launch it, unless it is launched already."""
        if not self._running.is_launched:
            self.launch()
        return self

    # -- states ---------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the manager is not launched: True before `launch` and after `close`."""
        return not self._running.is_launched

    @property
    def env_states(self) -> dict[int, EnvState]:
        """The state of each env_id; may be read from any thread."""
        running = self._running  # another thread may close it from here on
        if not running.is_launched:
            return dict.fromkeys(range(self.env_num), EnvState.VOID)
        return dict(enumerate(running.supervisor.table.env_states()))

    def env_state_done(self, env_id: int) -> bool:
        """Return whether an env's episode budget is spent."""
        return self.env_states[validate.checked_env_id(env_id, self.env_num)] is EnvState.DONE

    @property
    def done(self) -> bool:
        """Whether all episode budgets are spent and every timestep has been delivered."""
        running = self._running
        if not running.is_launched:
            return False
        supervisor = running.supervisor
        return (
            all(s is EnvState.DONE for s in supervisor.table.env_states())
            and not supervisor.table.owed_ids()
            and not supervisor.journal.count
        )

    @property
    def generations(self) -> list[int]:
        """How often each env was renewed, by env_id; empty before `launch` and after `close`."""
        return self._running.generations

    @property
    def active_env(self) -> list[int]:
        """The envs in an episode (RUN), including pending ones, ascending; does not wait."""
        return [i for i, state in self.env_states.items() if state is EnvState.RUN]

    @property
    def pending_env(self) -> list[int]:
        """The envs that owe a timestep, ascending; does not wait.

        After Ctrl-C in `step` or `send`, it shows whether the actions were accepted: all or none.
        """
        running = self._running
        if not running.is_launched:
            return []
        with running.engine.calling as supervisor:
            return supervisor.table.owed_ids()

    # -- readiness ------------------------------------------------------------------------

    @property
    def ready_obs(self) -> dict[int, Any]:
        """The observations of the envs that take an action now.

        Waits for resets and repairs until at least one env is ready; never waits for steps.

        Returns:
            `{env_id: obs}`, ascending; `{}` if all envs are DONE. V2: one stacked treetensor.

        Raises:
            NothingReadyError: no env can become ready without `recv`, without `reset`, or while
                envs are leased; the message says which.
            AllEnvsFailedError: no env can become ready at all, as all have failed for good.
            FailuresExhaustedError: an env failed more often than allowed.
        """
        with self._running.calling as supervisor:
            if supervisor.table.are_all_ready:  # so nothing is awaited of any env
                self._surface(supervisor)
                ready: Sequence[int] = supervisor.table.all_ids
            else:
                self._running.engine.collect()
                self._surface(supervisor)
                ready = self._ready_ids(supervisor)
            shown = dict(zip(ready, supervisor.table.observed.of(ready), strict=True))
            if self._normalization is not None:
                shown = self._normalization.ready(shown)
            ready_obs: dict[int, Any] = self._view.ready(shown)
            return ready_obs

    def _ready_ids(self, supervisor: Supervisor) -> list[int]:
        """Return the envs that are ready, at least one; none if all are DONE."""
        ready = supervisor.table.ready_ids()
        if not ready and await_one_ready(self._running.engine, supervisor):
            self._surface(supervisor)
            ready = supervisor.table.ready_ids()
        return ready

    @property
    def ready_obs_id(self) -> list[int]:
        """The envs that take an action now, ascending; does not wait.

        V2: the env of each row of the last `ready_obs` that was read.
        """
        return self._view.rows(self.ready_env)

    @property
    def ready_env(self) -> list[int]:
        """The envs that take an action now, ascending; does not wait."""
        with self._running.calling as supervisor:
            self._running.engine.collect()
            return supervisor.table.ready_ids()

    @property
    def ready_info(self) -> dict[int, dict[str, Any]]:
        """The info from the latest reset of each ready env, by env_id."""
        with self._running.calling as supervisor:
            self._running.engine.collect()
            return {i: supervisor.envs[i].reset_info for i in supervisor.table.ready_ids()}

    def reset_infos(self, env_ids: EnvIds) -> list[dict[str, Any]]:
        """Return the info from the latest reset of each of these envs.

        Like `ready_info`, for a few envs whose observations came from `ready_arrays`.
        """
        ids = validate.listed_env_ids(env_ids, self.env_num)
        with self._running.calling as supervisor:
            return [supervisor.envs[i].reset_info for i in ids]

    def random_action(self) -> dict[int, Any]:
        """Return a random action for each ready env, from a seeded stream of its own.

        If no env is ready, it waits for resets and repairs as `ready_obs` does, but not while there
        are timesteps to gather: then it returns `{}`, and `step({})` gathers them. It also returns
        `{}` if no env will become ready by itself; `ready_obs` says why.
        """
        ready = self.ready_obs_id
        if not ready:
            with self._running.calling as supervisor, contextlib.suppress(NothingReadyError):
                if not supervisor.statistics.outstanding:
                    ready = self._ready_ids(supervisor)
        known = self._known
        return {i: known.random_action(i) for i in ready}

    # -- steps ----------------------------------------------------------------------------

    def step(self, actions: Mapping[int, Any]) -> dict[int, EnvTimestep]:
        """Send actions and gather timesteps.

        Sync kinds return exactly the env_ids they were given, in that order. Async kinds return
        some of the outstanding timesteps, those of earlier sends included, in ascending order:
        `wait_num` or more, see `GatherPolicy`.

        Args:
            actions: `{env_id: action}`; `{}` gathers what is outstanding. V2: a list, or a stacked
                array or tree, with one action for each row of the last `ready_obs`.

        Returns:
            `{env_id: EnvTimestep}`; V2: a list of treetensors with `obs reward done info env_id`.

        Raises:
            ActionError, EnvNotReadyError, UnknownEnvError: the actions are refused; nothing was
                sent to any env.
            NothingReadyError: `actions` is `{}` while nothing is outstanding.
        """
        with self._running.calling as supervisor:
            gather = self._running.gather
            sent = self._send(supervisor, actions, RING_LAST if gather.wants_all else RING_EACH)
            if sent and gather.wants_all:
                collected = gather.exactly(sent)
            else:
                collected = self._receive(supervisor, gather)
            journal = supervisor.journal
            timesteps: dict[int, EnvTimestep] = self._deliver(supervisor, collected)
            if not self._shows_dicts:
                timesteps = self._view.timesteps(timesteps, journal)
        journal.returning = None  # the last that is done: from now on they are delivered
        return timesteps

    def send(self, actions: Mapping[int, Any]) -> None:
        """Send actions and return at once; `recv` gathers the timesteps."""
        with self._running.calling as supervisor:
            self._send(supervisor, actions, self._running.gather.ring)

    def recv(
        self, min_ready: int | None = None, timeout_s: float | None = None
    ) -> dict[int, EnvTimestep]:
        """Gather outstanding timesteps, in ascending order of env_id.

        Args:
            min_ready: how many to wait for; None: as many as `step` of this kind does.
            timeout_s: seconds after which to return what has arrived, possibly nothing.

        Raises:
            NothingReadyError: nothing is outstanding.
        """
        with self._running.calling as supervisor:
            collected = self._receive(supervisor, self._running.gather, min_ready, timeout_s)
            journal = supervisor.journal
            timesteps: dict[int, EnvTimestep] = self._deliver(supervisor, collected)
            if not self._shows_dicts:
                timesteps = self._view.timesteps(timesteps, journal)
        journal.returning = None  # as in `step`
        return timesteps

    def _receive(
        self,
        supervisor: Supervisor,
        gather: Gather,
        min_ready: int | None = None,
        timeout_s: float | None = None,
        *,
        as_arrays: bool = False,
    ) -> HandedOut | None:
        """Gather timesteps as the arguments of `recv` say."""
        wants_all, policy = gather.wants_all, gather.policy
        if wants_all:
            gather.ring = RING_LAST
        if timeout_s is None:
            posted = supervisor.submitter.posted_in_c()
            if posted is not None:
                count, needed = posted.count, min_ready
                if needed is None:
                    needed = count if wants_all else policy.needed(count)
                if type(needed) is int and needed == count:  # all that is outstanding
                    return gather.exactly(posted, as_arrays=as_arrays)
        outstanding = supervisor.statistics.outstanding
        if not outstanding:
            self._running.engine.refuse_if_closed()  # by a signal handler, in this call
            self._surface(supervisor)
        if min_ready is None and timeout_s is None:
            return gather.some(policy, as_arrays=as_arrays)
        if min_ready is not None:
            min_ready = validate.checked_min_ready(min_ready)
            policy = _exactly(min_ready)
        limit_s = math.inf if timeout_s is None else validate.checked_seconds(timeout_s)
        if wants_all and policy.needed(outstanding) < outstanding:
            gather.ring = RING_ONCE  # it leaves some most likely the next time, too
        deadline = monotonic() + limit_s
        exactly = min_ready is not None
        return gather.some(policy, deadline=deadline, exactly=exactly, as_arrays=as_arrays)

    def _send(self, supervisor: Supervisor, actions: Any, ring: int) -> Selection | None:
        """Send actions; return the envs that they were sent to, or None if there are none."""
        view = self._view
        by_id: Any = actions
        if type(actions) is not dict or not self._shows_dicts:
            by_id = view.actions(actions, supervisor.table.ready_ids)
        repair = supervisor.repair
        if (repair.fatal_errors or repair.urgent) and (
            by_id or not supervisor.statistics.outstanding
        ):
            self._surface(supervisor)
        if not by_id:
            return None
        sent = supervisor.submitter.by_id(by_id, ring)
        if sent is None:
            sent = self._send_checked(supervisor, by_id, ring)
        if self._episode_log is not None and sent is not None:
            self._episode_log.sent(supervisor.table, sent.ids)
        if not self._shows_dicts:
            view.forget()
        return sent

    def _send_checked(self, supervisor: Supervisor, actions: Any, ring: int) -> Selection | None:
        """Send actions some of which need a second look, or have to go by message."""
        submitter, table = supervisor.submitter, supervisor.table
        if table.leased:
            self._running.engine.see_ends_of_leases()
            sent = submitter.by_id(actions, ring)
            if sent is not None:
                return sent
        called = validate.envs_in_calls(table, actions)
        if called:  # which an interrupt has left under way
            self._running.engine.wait_until(
                lambda: not validate.envs_in_calls(table, called), doing="step"
            )
        sent = submitter.checked(actions, ring, self._known.action_checks)
        self._view.forget()  # before what may be interrupted: they were accepted
        if table.unexecuted:
            self._running.engine.uninterrupted(supervisor.repair.answer_unexecuted)
        return sent

    def _deliver(self, supervisor: Supervisor, collected: HandedOut | None) -> Any:
        """Hand out what was gathered; if nothing was, a failure may be the reason: raise it."""
        if collected is None:
            self._surface(supervisor)
            return {}
        timesteps = supervisor.collector.timesteps(collected)
        if self._episode_log is not None:
            self._episode_log.timesteps(timesteps, supervisor.journal.fate)
        if self._normalization is not None:
            return self._normalization.timesteps(timesteps, supervisor.journal.fate)
        return timesteps

    def _surface(self, supervisor: Supervisor) -> None:
        """Raise the error of what failed for good, once; with `on_failure: raise`, close first."""
        repair = supervisor.repair
        fatal = repair.take_fatal() if repair.fatal_errors or repair.urgent else None
        if fatal is None:
            return
        if self._config.on_failure == "raise":
            self._discard_engine(self._config.close_timeout)
        raise fatal

    # -- arrays ---------------------------------------------------------------------------

    def send_arrays(self, env_ids: EnvIds, actions: Any) -> None:
        """Send one action to each of `env_ids`.

        Args:
            env_ids: k env_ids: an array (k,), or a list.
            actions: an array (k, *shape), a dict or tuple of such arrays, or a list of k actions.
        """
        running = self._running  # once: a class with `__getattr__` is slow to read
        with running.calling as supervisor:
            repair = supervisor.repair
            if repair.fatal_errors or repair.urgent:
                self._surface(supervisor)
            ring = running.gather.ring
            sent = supervisor.submitter.rows(env_ids, actions, ring)
            if sent is None:
                ids = validate.listed_env_ids(env_ids, self.env_num)
                rows = validate.rows_by_id(ids, actions)
                sent = supervisor.submitter.by_id(rows, ring)
                if sent is None:
                    sent = self._send_checked(supervisor, rows, ring)
            if self._episode_log is not None and sent is not None:
                self._episode_log.sent(supervisor.table, sent.ids)
            if not self._shows_dicts:
                self._view.forget()

    def recv_arrays(
        self, min_ready: int | None = None, timeout_s: float | None = None
    ) -> ArrayBatch:
        """Gather as `recv` does, with the timesteps of k envs as arrays: see `ArrayBatch`."""
        running = self._running  # as in `send_arrays`
        with running.calling as supervisor:
            collected = self._receive(
                supervisor, running.gather, min_ready, timeout_s, as_arrays=True
            )
            batch: ArrayBatch | None
            if isinstance(collected, Collected):
                batch = supervisor.collector.arrays(collected)
            else:  # that was done, if there is anything
                batch = None if collected is None else collected.result
            if batch is None:
                timesteps = self._deliver(supervisor, collected)
                batch = array_batch(timesteps, self._known.forms.codec_of(timesteps))
            else:
                if self._episode_log is not None:
                    self._episode_log.batch(batch, supervisor.journal.fate)
                if self._normalization is not None:
                    batch = self._normalization.batch(batch, supervisor.journal.fate)
            journal = supervisor.journal
        journal.returning = None  # as in `step`
        return batch

    def ready_arrays(self, env_ids: EnvIds | None = None) -> ReadyBatch:
        """Return observations as `ready_obs` does, those of k envs as arrays: see `ReadyBatch`.

        This gives the first observations of the envs in `batch.ended` of `recv_arrays`.

        Args:
            env_ids: wait until all of these are ready; None: those that are ready, at least one.

        Raises:
            NothingReadyError: as in `ready_obs`; or one of `env_ids` does not become ready.
            UnknownEnvError: there is no such env.
        """
        wanted = None if env_ids is None else validate.checked_env_ids(env_ids, self.env_num)
        with self._running.calling as supervisor:
            table = supervisor.table
            all_ready = table.are_all_ready
            if not (all_ready or table.awaits_nothing) and (
                wanted is None or unready(supervisor, wanted)
            ):
                self._running.engine.collect()
            self._surface(supervisor)
            ids = self._ready_ids(supervisor) if wanted is None else wanted
            if wanted is not None and not all_ready and unready(supervisor, wanted):
                await_all_ready(self._running.engine, supervisor, wanted)
                self._surface(supervisor)
                refuse_unready(supervisor, wanted)
            rows, observed = supervisor.selections.to_read(ids) if ids else None, table.observed
            obs = None if rows is None else observed.newest_batch(rows)
            if obs is None:
                obs = self._known.forms.codec_of(ids).stack(observed.of(ids))
            if self._normalization is not None:
                obs = self._normalization.ready_batch(ids, obs)
            return ReadyBatch(NOBODY if rows is None else rows.array, obs)

    # -- leases ---------------------------------------------------------------------------

    def lease(
        self, *, episode_timeout_s: float | None = None, acquire_timeout_s: float | None = None
    ) -> Lease:
        """Lease one env to one thread (`with`) or one coroutine (`async with`).

        Any number of threads and coroutines may hold leases at once, and are served in the order
        in which they ask. Calls for batches do not see leased envs. From the first lease on, a
        thread owns the engine and hands on what arrives (`base`: it runs the code of envs).

        Args:
            episode_timeout_s: time limit in seconds for each episode of this lease; the shorter of
                this and `episode_timeout` applies.
            acquire_timeout_s: seconds to wait for a free env; None waits for ever.

        Returns:
            A context manager that waits for a free env: `with` gives a `Slot` with `reset`, `step`
            and `outcome`; `async with` gives an `AsyncSlot` with the same, to be awaited.

        Raises:
            ConfigError: envs of this manager cannot be leased; the message says why.
        """
        if self._normalization is not None:
            raise ConfigError(
                "envs of a manager with normalize_obs, normalize_reward or episode_statistics "
                "cannot be leased: these keep figures over batches. Leave them out, or wrap the "
                "envs instead."
            )
        if sum(batch.size for batch in batches_of(self._env_fn)) == self.env_num:
            raise ConfigError(
                "rows of a batched env cannot be leased one by one: they share a worker and one "
                "object. Give one factory for each env."
            )
        if self._config.context == "fork":
            raise ConfigError(
                "envs with context: fork cannot be leased: a process with threads does not fork "
                "safely. Use context: server, which is as fast."
            )
        close = partial(self._discard_engine, self._config.close_timeout)
        lessor = Lessor(self._owner, close)
        return Lease(lessor, episode_timeout_s, acquire_timeout_s)

    def _owner(self) -> Owner:
        """Return the thread that owns the engine; start it if this is the first lease."""
        self._refuse_unless_launched()
        running = self._running.itself
        running.engine.refuse_if_closed()
        running.engine.let_go()
        return running.owner

    def _refuse_unless_launched(self) -> None:
        """Refuse a call unless the manager is launched.

        Raises:
            ManagerClosedError: the manager is not launched, or was closed; the class of the error
                is that of this kind of manager.
        """
        running = self._running
        if not running.is_launched:
            with running.calling:  # which refuses all calls, and says why
                pass

    def fileno(self) -> int:
        """Return an fd that is readable while timesteps have arrived and not been gathered.

        It works with any event loop: when it is readable, `recv(timeout_s=0)` has something to
        return. It belongs to the manager, until that is closed.
        """
        return self._owner().fileno()

    # -- calls for batches, of coroutines -------------------------------------------------

    async def aready_obs(self) -> dict[int, Any]:
        """Return `ready_obs` without blocking the event loop; being cancelled loses nothing."""
        return await self._awaited(lambda: self.ready_obs)

    async def astep(self, actions: Mapping[int, Any]) -> dict[int, EnvTimestep]:
        """Send actions and gather timesteps, as `step` does.

        If this is cancelled, `pending_env` shows whether the actions were accepted: all or none.
        `arecv` then gathers their timesteps.
        """
        return await self._awaited(partial(self.step, actions))

    async def arecv(
        self, min_ready: int | None = None, timeout_s: float | None = None
    ) -> dict[int, EnvTimestep]:
        """Gather as `recv` does; being cancelled loses nothing: the next call gathers it."""
        return await self._awaited(partial(self.recv, min_ready, timeout_s))

    async def arecv_arrays(
        self, min_ready: int | None = None, timeout_s: float | None = None
    ) -> ArrayBatch:
        """Gather as `recv_arrays` does; being cancelled loses nothing, as with `arecv`."""
        return await self._awaited(partial(self.recv_arrays, min_ready, timeout_s))

    async def arrivals(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield each timestep as it arrives, as `(env_id, timestep)`, until none is outstanding.

        The loop body may `send` further actions, and the loop may be left at any time: timesteps
        that were not yielded come with the next `recv`. Envs take turns.
        """
        if self._normalization is not None:
            raise ConfigError(
                "arrivals() gives timesteps one by one, but normalize_obs, normalize_reward and "
                "episode_statistics keep figures over batches: use arecv()"
            )
        running, env_id = self._running.itself, -1
        while running.statistics.outstanding:
            came: Any = await self._awaited(partial(self._recv_one, env_id))
            if not came:  # an env was dropped meanwhile
                continue
            if isinstance(came, Mapping):
                ((env_id, timestep),) = came.items()
            else:  # V2 kinds have trees
                (timestep,) = came
                env_id = int(timestep.env_id)
            yield env_id, timestep

    def _recv_one(self, after: int) -> Any:
        """Gather one timestep, as `recv` does: that of the next env after `after` with one."""
        with self._running.calling as supervisor:
            if not supervisor.statistics.outstanding:
                self._surface(supervisor)
            collected = self._running.gather.one(after)
            journal = supervisor.journal
            timesteps: Any = self._deliver(supervisor, collected)
            if not self._shows_dicts:
                timesteps = self._view.timesteps(timesteps, journal)
        journal.returning = None  # as in `step`
        return timesteps

    async def _awaited(self, call: Callable[[], T]) -> T:
        """Make a call for batches in a thread, and wait for it."""
        owner, running = self._owner(), self._running.itself
        awaited = AwaitedCall()
        return await running.calls.run(
            partial(owner.make, call, awaited),
            partial(owner.abandon, awaited),
            partial(owner.take_back, awaited),
            partial(owner.taken, awaited),
        )

    async def __aenter__(self) -> Self:
        """Launch it without blocking the event loop, unless it is launched already.

        If this is cancelled, the manager is closed.
        """
        if not self._running.is_launched:
            self._runs_envs_in_owner = not self._transport_cls.works_alone
            close = partial(self.close, 0.0)
            # Close once more at last: the first close may come before there is anything to close.
            await in_thread(self.launch, LAUNCHING, close, at_last=close)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close it without blocking the event loop; a cancellation does not end the wait."""
        if self._running.is_launched:
            self._running.itself.engine.let_go()
        await in_thread(self.close, CLOSING)

    # -- resets and seeds -----------------------------------------------------------------

    def reset(
        self,
        reset_param: Mapping[int, Mapping[str, Any] | None] | None = None,
        **others: Never,
    ) -> None:
        """Reset envs and wait until they are reset; `ready_obs` then has the observations.

        It waits for steps under way, and discards their timesteps (counted as cancelled). A reset
        that is already running is joined if there are no new params. A DONE env starts a new
        budget; an ERROR env is repaired.

        Args:
            reset_param: `{env_id: params}`: options for a gymnasium env, keyword arguments for a
                `BaseEnv`; never the seed, which `seed` sets. They hold for this and later automatic
                resets (only for this one if they are `types.Once`); None as params keeps those
                given before, `{}` clears them. Without `reset_param`, all envs are reset except
                those that are leased.
            **others: refused; the error says what to call instead.

        Raises:
            UnknownEnvError, ConfigError: the arguments are refused; nothing was reset.
            FailuresExhaustedError: an env failed more often than allowed.
        """
        names.refuse_arguments("reset", others)
        params = validate.checked_params(reset_param, self.env_num)
        with self._running.calling as supervisor:
            self._running.engine.see_ends_of_leases()
            if supervisor.table.leased and reset_param is None:
                params = {i: None for i in params if i not in supervisor.table.leased}
            validate.refuse_leased(supervisor.table, params, "reset")
            validate.refuse_unsendable_params(supervisor.hosts.transport, params)
            validate.refuse_partial_resets(supervisor.table, params)
            self._check_options(supervisor, params)
            self._view.forget()
            if self._normalization is not None:
                self._normalization.begin(list(params))
            self._running.engine.uninterrupted(partial(self._begin_resets, supervisor, params))
            envs = [supervisor.envs[i] for i in params]
            repair = supervisor.repair
            self._running.engine.wait_until(
                lambda: (
                    repair.fatal is not None
                    or all(s.phase is Phase.IDLE or s.dropped for s in envs)
                ),
                doing="reset",
            )
            self._surface(supervisor)

    def _check_options(
        self, supervisor: Supervisor, params: Mapping[int, Mapping[str, Any] | None]
    ) -> None:
        """Refuse `options` in reset params that are options; warn, once, of a seed in them."""
        said = validate.check_options(supervisor.descriptions, params)
        if said is not None:
            self._warn_once("seed", said)

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logged(logging.WARNING, "%s", text)

    def _begin_resets(
        self, supervisor: Supervisor, params: Mapping[int, dict[str, Any] | None]
    ) -> None:
        supervisor.rules.dynamic_seed = self._seeds.dynamic
        supervisor.resets.begin(params)

    def seed(
        self,
        seed: int | Sequence[int | None] | Mapping[int, int | None] | None,
        dynamic_seed: bool | None = None,
    ) -> None:
        """Seed the envs; takes effect at the next explicit reset or launch.

        Spares are seeded, too: after an int with the seeds that follow those of the envs, else with
        derived ones.

        Args:
            seed: an int gives env i exactly `seed + i`; a list gives a seed to each env, a dict to
                some.
            dynamic_seed: what later automatic resets do: None passes no seed, True a seed derived
                for each episode, False the same seed again.

        Raises:
            ConfigError, UnknownEnvError: the arguments are refused.
        """
        seeds = seeds_by_env(seed, self.env_num)
        if dynamic_seed is not None:
            dynamic_seed = validate.checked_flag(dynamic_seed, "dynamic_seed")
        of_all = {**self._seeds.of_envs, **seeds}
        of_spares = seeds_of_spares(seed, of_all, self.env_num, self._config.spare_env_num)

        def apply(supervisor: Supervisor | None) -> None:
            self._seeds = Seeds(of_all, of_spares, dynamic_seed)
            if self._described is not None:
                self._described.seed(seeds)
            if supervisor is not None:
                supervisor.resets.seed(seeds, of_spares)

        if not self._running.is_launched:
            apply(None)
            return
        with self._running.calling as supervisor:
            self._running.engine.uninterrupted(lambda: apply(supervisor))

    # -- calls and attributes -------------------------------------------------------------

    def call(
        self, name: str, /, *args: Any, env_ids: int | EnvIds | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of envs and return the results, in the order of `env_ids`.

        Waits for resets and repairs of these envs first. `reset_timeout` applies.

        Args:
            name: name of the method; `reset`, `step`, `seed`, `close` and private ones are refused.
            *args: positional arguments for the method.
            env_ids: which envs; None for all. See `call_with` for methods that take `env_ids`.
            **kwargs: keyword arguments for the method.

        Raises:
            MethodAccessError: the method is refused.
            EnvNotReadyError: an env has an action under way.
            EnvFailure: the failure of the first env that failed; its episode goes on if its method
                only raised.
        """
        return self.call_with(name, args, kwargs, env_ids)

    def call_with(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        env_ids: int | EnvIds | None = None,
    ) -> list[Any]:
        """Call a method as `call` does; the method may have an argument `env_ids` of its own."""
        # Not by `call_async`: Ctrl-C would leave one under way that the user has not made.
        ids, payload = self._call_of(name, args, env_ids, kwargs)
        with self._running.calling as supervisor:
            return self._request(supervisor, ids, Op.CALL, [payload] * len(ids), f"call({name!r})")

    def call_async(
        self, name: str, /, *args: Any, env_ids: int | EnvIds | None = None, **kwargs: Any
    ) -> None:
        """Begin a `call`; `call_wait` returns its results."""
        self.call_async_with(name, args, kwargs, env_ids)

    def call_async_with(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        env_ids: int | EnvIds | None = None,
    ) -> None:
        """Begin a call as `call_async` does; it may have an argument `env_ids` of its own."""
        ids, payload = self._call_of(name, args, env_ids, kwargs)
        running = self._running
        with running.calling as supervisor:
            self._submit(supervisor, ids, Op.CALL, [payload] * len(ids), f"call({name!r})")
            running.calling = CallUnderWay(ids)

    def _call_of(
        self, name: str, args: Any, env_ids: int | EnvIds | None, kwargs: Any
    ) -> tuple[list[int], Any]:
        """Return the envs that a call goes to, and what is sent to each of them."""
        name = validate.checked_method(name)
        ids = validate.checked_env_ids(env_ids, self.env_num)
        return ids, (name, args, kwargs) if kwargs else (name, args)

    @property
    def call_is_pending(self) -> bool:
        """Whether a `call_async` is under way, so that `call_wait` has to come next."""
        return self._running.call_under_way is not None

    def call_wait(self, timeout_s: float | None = None) -> list[Any]:
        """Return the results of the last `call_async`.

        Args:
            timeout_s: seconds after which to raise TimeoutError; the call goes on.
        """
        running = self._running
        call = running.call_under_way
        if call is None:
            raise StateError("there is no call under way: use call_async first")
        limit_s = validate.checked_seconds(timeout_s)
        deadline = monotonic() + limit_s
        calling = running.engine.calling
        with calling as supervisor:
            if not await_results(running.engine, call.env_ids, deadline):
                raise TimeoutError(f"the call has not ended after {limit_s:g} s")
            if call.results is None:  # else this was interrupted after they were taken
                call.results = [supervisor.envs[i].result for i in call.env_ids]
            supervisor.forget_results(call.env_ids)
        failure, results = first_failure(call.results), call.results
        running.calling = calling  # the last that is done: from now on they are delivered
        if failure is not None:
            raise failure
        return results

    def apply(
        self,
        function: Callable[..., Any],
        *args: Any,
        env_ids: int | EnvIds | None = None,
    ) -> list[Any]:
        """Run a function on envs where they run, and return the results in the order of `env_ids`.

        This tells what no method of the envs does, such as whether they are wrapped in something.
        The function alone answers for what it does to an env: the manager does not learn of the
        steps and resets it makes, and does not repeat it on renewed envs. Waits as `call` does.

        Args:
            function: called with the env, as its factory built it, and `args`. Workers import the
                module that it is from; functions of a script and lambdas are sent whole.
            *args: further arguments for the function.
            env_ids: which envs; None for all.

        Raises:
            ConfigError: `function` is not callable.
            ActionError: the function or its arguments cannot be sent.
            EnvNotReadyError, EnvFailure: as in `call`.
        """
        if not callable(function):
            raise ConfigError(f"apply takes a function, found a {type(function).__name__}")
        ids = validate.checked_env_ids(env_ids, self.env_num)
        payloads = [(EnvFunction(function, args), ())] * len(ids)
        what = f"apply({getattr(function, '__name__', type(function).__name__)})"
        with self._running.calling as supervisor:
            return self._request(supervisor, ids, Op.APPLY, payloads, what)

    def get_attr(self, name: str, env_ids: int | EnvIds | None = None) -> list[Any]:
        """Return an attribute of envs, in the order of `env_ids` (None for all).

        Raises:
            EnvAttributeError: an env has no attribute of this name.
            MethodAccessError: it is a method; use `call`.
            EnvNotReadyError: an env has an action under way.
        """
        name = validate.checked_attribute(name)
        ids = validate.checked_env_ids(env_ids, self.env_num)
        with self._running.calling as supervisor:
            what = f"reading {name!r}"
            values = self._request(supervisor, ids, Op.GET_ATTR, [name] * len(ids), what)
        return attributes_of(name, ids, values)

    def set_attr(self, name: str, value: Any, env_ids: int | EnvIds | None = None) -> None:
        """Set an attribute of envs, and again on envs that are renewed later.

        If an env has wrappers, the attribute is set on the outermost one that has it. If neither a
        wrapper nor the env itself has it, it becomes a new attribute of the env, and a warning is
        logged once.

        A single value for all envs is set on the spares, too. Envs whose attributes were set in any
        other way take no spare.

        Args:
            name: name of the attribute.
            value: one value for all, or a list with one for each of `env_ids`.
            env_ids: which envs; None for all.
        """
        name = validate.checked_attribute(name)
        ids = validate.checked_env_ids(env_ids, self.env_num)
        values = validate.values_for_each(name, value, len(ids))
        if isinstance(value, list):
            payloads = [(name, one) for one in values]
        else:  # one object, which shows that it is the same for all
            payloads = [(name, value)] * len(ids)
        made = self._request_for_good(ids, Op.SET_ATTR, payloads, f"setting {name!r}")
        new_in = [i for i, is_new in zip(ids, made, strict=True) if is_new is True]
        if new_in:
            whole = len(new_in) == self.env_num
            lacked = "no env had an" if whole else f"{env_ids_text(new_in)} had no"
            self._warn_once(
                f"set_attr {name}",
                f"{lacked} attribute {name!r}: set_attr has made one. If it is mistyped, "
                "nothing in the envs reads it.",
            )

    if not TYPE_CHECKING:  # which would take every mistyped name for an attribute of the envs

        def __getattr__(self, name: str) -> list[Any]:
            """Return the attribute `name` of every env, as DI-engine's managers do.

            Type checkers know `get_attr`, which does the same.
            """
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            names.refuse_reading_of_others(name)
            running = self.__dict__.get("_running")
            if running is None or not running.is_launched:
                raise EnvAttributeError(
                    f"{type(self).__name__} has no attribute {name!r}; if it is one of the envs, "
                    f"it can be read after launch().{names.like(name, dir(type(self)))}"
                )
            try:
                return self.get_attr(name)
            except (EnvAttributeError, EnvNotReadyError) as error:
                meant = names.like(name, dir(type(self)))
                if not meant:
                    raise
                raise type(error)(f"{str(error).rstrip('.')}.{meant}") from None

        def __setattr__(self, name: str, value: Any) -> None:
            """Set a private attribute, or one that the class has.

            Any other name would be read back and change nothing, in no env. Users' subclasses may
            have attributes of their own.
            """
            cls = type(self)
            if name[:1] != "_" and not hasattr(cls, name) and cls.__module__.startswith("envmgr."):
                names.refuse_setting(name, value)
            object.__setattr__(self, name, value)

    def _request(
        self, supervisor: Supervisor, ids: list[int], op: Op, payloads: list[Any], what: str
    ) -> list[Any]:
        self._submit(supervisor, ids, op, payloads, what)
        return self._results(supervisor, ids)

    def _request_for_good(
        self, ids: list[int], op: Op, payloads: list[Any], what: str
    ) -> list[Any]:
        """Send a request to envs, and to those that take their places later.

        Returns:
            The results of the present envs.
        """
        with self._running.calling as supervisor:
            results = self._request(supervisor, ids, op, payloads, what)
            repeat = partial(supervisor.repeat, ids, op, payloads)
            self._running.engine.uninterrupted(repeat)
        return results

    def _submit(
        self, supervisor: Supervisor, ids: list[int], op: Op, payloads: list[Any], what: str
    ) -> None:
        """Send a request to each of some envs, once they can take one."""
        await_callable(self._running.engine, ids, what)
        self._surface(supervisor)
        validate.refuse_gone(supervisor.table, ids, what)
        send_requests(self._running.engine, ids, op, payloads, what)

    def _results(self, supervisor: Supervisor, ids: list[int]) -> list[Any]:
        """Wait for results without a limit and return them, or raise the first failure."""
        await_results(self._running.engine, ids, math.inf)
        results = [supervisor.envs[i].result for i in ids]
        supervisor.forget_results(ids)
        failure = first_failure(results)
        if failure is not None:
            raise failure
        return results

    # -- pictures, replays, rewards -------------------------------------------------------

    def render(
        self, env_ids: int | EnvIds | None = None, mode: str | None = None
    ) -> dict[int, Any]:
        """Return what envs render, by env_id.

        Args:
            env_ids: which envs; None for all.
            mode: such as "rgb_array"; None for whatever the env gives: frames in the mode that it
                was built with, and usually None if it was built without one.

        Returns:
            In mode "rgb_array" frames `(height, width, 3)` of uint8, in "rgb_array_list" lists of
            the frames since the last call, in "ansi" texts.
        """
        ids = validate.checked_env_ids(env_ids, self.env_num)
        frames = self.call("render", validate.checked_mode(mode), env_ids=ids)
        return dict(zip(ids, frames, strict=True))

    @property
    def ready_imgs(self) -> dict[int, Any]:
        """What each ready env renders, by env_id; `envmgr.env.tile_images` makes one image of it.

        Calls `render` with the mode that env 0 was built with, or "rgb_array" if it has none.

        Raises:
            ConfigError: the envs were built to show windows ("human"), which give no images.
        """
        mode = self.render_mode
        if mode == "human":
            raise ConfigError(
                "env 0 was built with render_mode='human', which shows a window and gives no "
                "image. Build the envs with render_mode='rgb_array' (YAML: "
                "env.kwargs.render_mode: rgb_array)"
            )
        return self.render(self.ready_env, mode=mode if isinstance(mode, str) else "rgb_array")

    def enable_save_replay(self, replay_path: str | Sequence[str]) -> None:
        """Have every env save a replay of each episode that begins from now on.

        Gymnasium envs and vector envs that were built with a render mode that gives frames save
        videos `<folder>/env_<env_id>-episode_<number>.mp4`; other envs save what they define.

        Args:
            replay_path: a folder for all envs, or one for each.

        Raises:
            EnvFailure: an env cannot save replays, for example because it gives no frames or PyAV
                (extra `video`) is not installed.
        """
        paths = validate.checked_folders(replay_path, self.env_num)
        before, self._replay_paths = self._replay_paths, paths
        if self._running.is_launched:
            ids, payloads = list(range(self.env_num)), replay_payloads(paths)
            try:
                self._request_for_good(ids, Op.CALL, payloads, "enable_save_replay")
            except StateError:  # it was refused, and nothing is saved there
                self._replay_paths = before
                raise

    def enable_save_figure(self, env_id: int, figure_path: str) -> None:
        """Have one env, and the envs that are renewed in its place, save figures in a folder.

        Gymnasium envs and vector envs save the last frame of each episode as a PNG file. If there
        are spares, an env that saves figures takes none.

        Raises:
            EnvFailure: the env cannot save figures.
        """
        folder = validate.checked_folder(figure_path, "figure_path")
        env_id = validate.checked_env_id(env_id, self.env_num)
        name = "enable_save_figure"
        self._request_for_good([env_id], Op.CALL, [(name, (folder,))], name)

    def reward_shaping(self, env_id: int, transitions: list[Any]) -> Any:
        """Return the transitions of one env's episode with their rewards shaped by the env."""
        transitions = validate.checked_transitions(transitions)
        env_id = validate.checked_env_id(env_id, self.env_num)
        return self.call("reward_shaping", transitions, env_ids=env_id)[0]

    # -- snapshots ------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the present state of all envs, from which a run can go on, bit for bit.

        Waits for resets, repairs and steps under way. The timesteps of these steps are not
        delivered here: they are part of the snapshot, and the next `step` or `recv` delivers them,
        in this run and after `restore`.

        Raises:
            SnapshotError: the state of an env cannot be taken, and the message says what is
                missing; or there are spares, whose states are not part of a snapshot.
            EnvNotReadyError: an env has failed for good and is gone.
            EnvFailure: an env failed in this call: its own method raised, or its worker died.
        """
        with self._running.calling as supervisor:
            records = self._at_rest(supervisor, "snapshot")
            found = self._run_in_hosts(supervisor, take_state, [()] * self.env_num, "snapshot")
            common = self._common_state(supervisor)
            descriptions = supervisor.descriptions
        return snapshot_of(records, found, descriptions, common)

    def restore(self, snapshot: Snapshot | str | os.PathLike[str]) -> None:
        """Restore all envs as they were: observations, generators, counters, seeds, generations.

        Either all envs are restored or none. As in `reset`, it waits for steps under way, and
        discards their timesteps (counted as cancelled). Go on with `ready_obs`, or with `recv` for
        steps that were under way when the snapshot was taken. The attributes that `set_attr` sets
        on renewed envs and the failures counted so far remain those of this manager.

        Args:
            snapshot: a snapshot, or the file of one, of a manager of any kind with the same envs.
                Restore only those you trust: what they hold may run code.

        Raises:
            SnapshotMismatchError: it is of another version or of other envs; nothing was changed.
            SnapshotError, EnvNotReadyError, EnvFailure: as in `snapshot`; nothing was changed.
            ConfigError: it is neither a snapshot nor a path, or its statistics of
                `manager.normalization` do not fit; nothing was changed.
            FailuresExhaustedError: an env failed more often than allowed while it was restored.
        """
        snapshot = checked_snapshot(snapshot, self.env_num)
        with self._running.calling as supervisor:
            descriptions = supervisor.descriptions
            common, records = read_snapshot(snapshot, descriptions, self._known.spaces)
            self._at_rest(supervisor, "restore")
            states = [(env.state,) for env in snapshot.envs]
            refused = self._run_in_hosts(supervisor, try_state, states, "restore")
            for env_id, reason in enumerate(refused):
                if reason is not None:
                    raise SnapshotMismatchError(
                        f"env {env_id} cannot be restored: {reason}. Nothing was changed."
                    )
            if not all(env.is_callable for env in supervisor.envs):
                raise EnvNotReadyError(
                    "restore: a worker has died meanwhile. Nothing was changed: call it again."
                )
            restored = {
                env_id: (SavedEnv(env.state, record.obs, record.reset_info, env.episodes), record)
                for env_id, (env, record) in enumerate(zip(snapshot.envs, records, strict=True))
            }
            self._view.forget()
            begin = partial(self._begin_restoring, supervisor, common, restored)
            self._running.engine.uninterrupted(begin)
            repair, envs = supervisor.repair, supervisor.envs
            self._running.engine.wait_until(
                lambda: repair.fatal is not None or all(e.phase is Phase.IDLE for e in envs),
                doing="restore",
            )
            self._surface(supervisor)

    def _at_rest(self, supervisor: Supervisor, what: str) -> list[EnvRecord]:
        """Wait until nothing is under way; return what is known of each env then."""
        refuse_spares(what, self._config.spare_env_num)
        refuse_rows(what, supervisor.envs)
        self._running.engine.see_ends_of_leases()
        validate.refuse_leased(supervisor.table, supervisor.table.all_ids, what)
        come_to_rest(self._running.engine, what)
        self._surface(supervisor)
        validate.refuse_gone(supervisor.table, supervisor.table.all_ids, what)
        return list(map(record_of, supervisor.envs))

    def _run_in_hosts(
        self,
        supervisor: Supervisor,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        what: str,
    ) -> list[Any]:
        """Run a function of envmgr on each env, and return its results."""
        ids = list(range(self.env_num))
        payloads = [(function, (self._config.snapshot_copy, *given)) for given in arguments]
        send_requests(self._running.engine, ids, Op.APPLY, payloads, what)
        return self._results(supervisor, ids)

    def _common_state(self, supervisor: Supervisor) -> CommonState:
        """Return the parts of a snapshot that do not belong to one env."""
        known, seeds, normalization = self._known, self._seeds, self._normalization
        return CommonState(
            spaces=known.spaces,
            sampled=known.samplers.spaces,
            seeds=seeds.of_envs,
            dynamic_seeds=(seeds.dynamic, supervisor.rules.dynamic_seed),
            normalization=(
                None if normalization is None else normalization.state_dict(episodes=True)
            ),
        )

    def _begin_restoring(
        self,
        supervisor: Supervisor,
        common: CommonState,
        restored: dict[int, tuple[SavedEnv, EnvRecord]],
    ) -> None:
        if self._normalization is not None and common.normalization is not None:
            self._normalization.load_state_dict(common.normalization)  # first: it may not fit
        elif self._normalization is not None:
            self._normalization.begin(range(self.env_num))
        dynamic, supervisor.rules.dynamic_seed = common.dynamic_seeds
        self._seeds = self._seeds._replace(of_envs=common.seeds, dynamic=dynamic)
        self._known.samplers.spaces = common.sampled
        supervisor.resets.restore(restored)

    # -- figures --------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters since launch, or of the last launch once closed; from any thread.

        At any time, `actions` accepted = `timesteps` delivered + `cancelled` + `outstanding`. With
        `num_workers: auto`, `calibration` says which number was chosen and why. While launched,
        `workers` has `{"pid": int, "env_ids": list}` for each worker process that is not known to
        be dead, and `moments` has the latest (env_id, generation, event, time_s): when envs
        "failed" and were "ready" again, in seconds of `time.monotonic`.

        With spares, `spare_env_num` is how many there are (without those that failed for good),
        `spares_ready` how many of them have been reset, `swaps` how often one took the place of
        another env, and `spare_failures` counts their failures, which `failures` does not. A worker
        without `env_ids` has a spare.

        With `metrics`, `latency` has lists for "step" and "reset", with an entry for each env:
        `count`, an estimate, and `mean`, `p50`, `p90`, `p99` and `max` in seconds, or None.

        With `limits`, `limits` says how many envs are being built or reset (`starting`), wait for
        that (`waiting_to_start`), or are `leased`, how many leases wait for an env
        (`waiting_for_lease`), and how much of each `shared` cap is held:
        `{"browser": {"units": 100, "held": 64}}`.

        Where envs run on threads, `threads_abandoned` is how many threads that were given up still
        run, in env code that hangs. It holds for the moment of the call, also after `close`.

        `hot` is "used" if ordinary steps are taken in C; otherwise it says why they are not.
        """
        running = self._running  # another thread may close it from here on
        stats: dict[str, Any] = {**running.statistics.as_dict(), "states": self._states_by_name()}
        stats["hot"] = WHY
        stats.update(running.figures())
        calibration = self._worker_count.calibration
        if calibration is not None:
            stats["calibration"] = calibration.as_dict()
        stats.update(running.stats())
        return stats

    def _states_by_name(self) -> dict[str, int]:
        states = list(self.env_states.values())
        return {state.name: states.count(state) for state in EnvState if state in states}

    # -- close ----------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None, terminate: bool = False) -> None:
        """Close all envs and end all workers; idempotent, and callable from any thread.

        Takes at most the grace period plus about one second, however many envs hang; plus two or
        three if the worker server is stopped (SIGSTOP). Timesteps that have not been delivered are
        lost and counted as cancelled. Ctrl-C, or anything else that a signal handler raises
        meanwhile, ends the grace period and is raised once everything is released.

        Args:
            timeout_s: the grace period: seconds that all envs together get to close; None:
                `close_timeout`.
            terminate: do not ask the envs to close; terminate their workers at once.
        """
        grace_s = validate.checked_grace(timeout_s, self._config.close_timeout)
        if validate.checked_flag(terminate, "terminate"):
            grace_s = 0.0
        interrupt: BaseException | None = None
        for _ in range(_MOST_INTERRUPTS):
            try:
                self._close(grace_s)
                break
            except BaseException as error:  # Ctrl-C: no more patience, but everything is released
                interrupt, grace_s = error, 0.0
                self._running.hurry()
        if interrupt is not None:
            raise interrupt

    def _close(self, grace_s: float) -> None:
        """Do what is left of closing; can be interrupted, and called again."""
        self._worker_count.stop()  # if another thread is inside launch()
        self._discard_engine(grace_s)
        env_ref, self._env_ref = self._env_ref, None
        if env_ref is not None:
            adapt.close_env(env_ref)
        videos.sweep(self._replay_paths or ())

    def _discard_engine(self, grace_s: float) -> None:
        running = self._running
        running.refuse_calls()
        self._view.forget()
        ended = running.end(grace_s)
        if self._running is running:  # kept until here: what Ctrl-C interrupts can be done again
            self._running = ended

    def _give_up(self, error: BaseException) -> None:
        patient = isinstance(error, Exception)  # Ctrl-C does not wait for envs to close
        self._discard_engine(self._config.close_timeout if patient else 0.0)

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""
        self.close()


def _refuse_without_memory(error: BaseException) -> None:
    """Say what can be done about a launch that got no memory, or no thread; all is closed.

    Raises:
        LaunchError: the launch failed for one of these reasons.
    """
    if isinstance(error, MemoryError) or str(error) == "can't start new thread":
        first = error.__context__ or error
        raise LaunchError(
            f"the trainer's process got no memory or no thread ({error_text(first)}); "
            "everything is closed again. Free memory, raise the limits of the process (ulimit -v, "
            "RLIMIT_AS, RLIMIT_NPROC, a container's), or use fewer envs or workers."
        ) from error


@functools.lru_cache(maxsize=64)
def _exactly(min_ready: int) -> GatherPolicy:
    return GatherPolicy(min_ready, 0.0)
