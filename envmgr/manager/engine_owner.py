"""The engine of a manager, and what it is built from: factories, config and seeds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

from envmgr.calibrate import Calibration, trial_config_of, try_out
from envmgr.config import EasyDict, ManagerConfig, check_kind, default_manager_config, to_easydict
from envmgr.core import Supervisor, validate
from envmgr.core.board_writer import figures_of
from envmgr.core.engine import Engine, Gather, OneCaller
from envmgr.core.journal import SignalFreeThread
from envmgr.core.statistics import Statistics
from envmgr.errors import ConfigError, LaunchError, ManagerClosedError, StateError
from envmgr.launch import build_engine, cores_of, with_batches
from envmgr.normalizing import normalization_of
from envmgr.observing.endpoint import Endpoint
from envmgr.observing.timeline import write_trace
from envmgr.policy import GatherPolicy
from envmgr.seeding import Samplers, seeds_by_env, seeds_of_spares
from envmgr.spaces import ActionCheck
from envmgr.spaces.reading import Unreadable, read_list, short_text
from envmgr.transport.base import Transport
from envmgr.types import EnvFactory, monotonic
from envmgr.views import DictView, Forms
from envmgr.wire.messages import EnvDescription

_LOOK_EVERY_S = 0.1
"""How often to look whether an import takes too long."""


class Called:
    """A call that is under way.

    Args:
        env_ids: whose.

    Attributes:
        results: once they are there.
    """

    def __init__(self, env_ids: list[int]) -> None:
        self.env_ids = env_ids
        self.results: list[Any] | None = None


class EngineOwner:
    """Builds the engine of a manager, lets calls in, and ends it; see `EnvManager`."""

    preset: ClassVar[Mapping[str, Any]] = {}
    """Defaults of this kind that differ from those of the schema."""

    makes_envs: ClassVar[bool] = False
    """This kind makes its envs itself, and is given no `env_fn`."""

    _transport_cls: ClassVar[type[Transport]] = Transport  # type: ignore[type-abstract]
    """What hosts of this kind run on; its properties say what this kind can do."""

    def __init__(
        self,
        env_fn: Sequence[EnvFactory] | None,
        cfg: Mapping[str, Any] | None = None,
        *,
        observation_space: Any = None,
        action_space: Any = None,
        reward_space: Any = None,
    ) -> None:
        self._alone = OneCaller()
        self._engine: Engine | None = None
        self._gather: Gather | None = None
        self._built = False
        self._launched = False
        config = ManagerConfig.from_mapping(cfg, self.preset)
        self._env_fn = self._factories_of(env_fn, config)
        kind = self._transport_cls
        check_kind(config, hides_resets=kind.works_alone, refused=kind.refused)
        config, in_line = config.with_env_num(len(self._env_fn)), not kind.works_alone
        config = with_batches(config, self._env_fn, in_line=in_line)
        self._config = self._asked_config = config
        self._calibration: Calibration | None = None
        self._trial: Engine | None = None
        self._view = self._make_view()
        self._shows_dicts = (
            type(self._view) is DictView
        )  # which changes nothing of what it is given
        self._normalization = normalization_of(config, self.env_num)
        self._policy = GatherPolicy(self._config.wait_num, self._config.step_wait_timeout)
        self._given = (
            validate.checked_space(observation_space, "observation_space"),
            validate.checked_space(action_space, "action_space"),
            validate.checked_space(reward_space, "reward_space"),
        )
        self._gathers_some = False
        self._description: EnvDescription | None = None
        self._env_spaces: list[tuple[Any, Any]] = []
        self._action_checks: list[ActionCheck] | None = None
        self._forms = Forms([])
        self._samplers: Samplers | None = None
        self._seeds: dict[int, int | None] = dict.fromkeys(range(self.env_num))
        self._spare_seeds: list[int | None] = [None] * self._config.spare_env_num
        self._dynamic_seed: bool | None = None
        self._replay_paths: list[str] | None = None
        self._called: Called | None = None
        self._statistics = Statistics()
        self._figures: Callable[[], dict[str, Any]] = dict
        self._env_ref: Any = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        if self._config.seed is not None:
            self.seed(self._config.seed)

    # -- what a kind chooses ----------------------------------------------------------------

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

    @property
    def env_num(self) -> int:
        """Number of envs."""
        return len(self._env_fn)

    @property
    def cfg(self) -> EasyDict:
        """The config in force, as a copy."""
        return to_easydict(self._config.to_dict())

    # -- the engine -------------------------------------------------------------------------

    def _ensure_engine(self, params: Mapping[int, dict[str, Any] | None] | None = None) -> Engine:
        if self._engine is None:
            self._resolve_num_workers(params or {})
            self._build_engine(self._env_fn, self._config, self._keep_engine)
            self._open_endpoint(self._running)
        return self._running

    def _keep_engine(self, engine: Engine) -> None:
        self._engine = engine
        self._gather = Gather(engine)
        self._statistics = engine.supervisor.statistics
        self._figures = figures_of(engine)
        # Not of the manager itself: what is dropped without close() ends with its finalizer.
        self._finalizer = weakref.finalize(self, engine.close, 0.0)

    def _build_engine(
        self, env_fn: Sequence[EnvFactory], config: ManagerConfig, keep: Callable[[Engine], None]
    ) -> None:
        """Build an engine and keep it: either both are done, or nothing is."""
        thread = SignalFreeThread()
        try:
            thread.run(lambda: keep(self._open_engine(env_fn, config, thread)))
        except BaseException:  # Ctrl-C too: it may have come before the engine was begun with
            thread.end()
            raise

    def _open_engine(
        self, env_fn: Sequence[EnvFactory], config: ManagerConfig, thread: SignalFreeThread
    ) -> Engine:
        try:
            transport = self._make_transport()
            try:
                return build_engine(env_fn, config, transport, self._given[:2], monotonic, thread)
            except BaseException:
                transport.close(0.0)
                raise
        except OSError as error:
            raise LaunchError(f"nothing was started: {error}") from error

    def _open_endpoint(self, engine: Engine) -> None:
        """Open the endpoint of metrics, if the config wants one.

        Raises:
            MissingDependencyError, ConfigError: it cannot be had.
        """
        metrics, watch = self._config.metrics, engine.watch
        if metrics is not None and metrics.port is not None and watch is not None:
            watch.followers.append(Endpoint(metrics.port, lambda: watch.board))

    def _keep_trial(self, engine: Engine) -> None:
        self._trial = engine

    def _resolve_num_workers(self, params: Mapping[int, dict[str, Any] | None]) -> None:
        """Have `num_workers: auto` be a number, from here on.

        What is found holds for later launches, too; if env 0 could not be tried out, the next one
        tries again.
        """
        config, known = self._asked_config, self._calibration
        asked = config.num_workers == "auto" and self._transport_cls.packs_envs
        if not asked or self.env_num == 1 or (known is not None and known.trial is not None):
            return
        self._config, cores = config, cores_of(config)
        self._build_engine(self._env_fn[:1], trial_config_of(config), self._keep_trial)
        engine = self._trial
        if engine is None:
            raise ManagerClosedError("the manager was closed during this call")
        try:
            with engine.calling as supervisor:
                self._prepare(supervisor, params)
                self._calibration = found = try_out(engine, config, self.env_num, cores)
                engine.close(0.0 if found.trial is None else config.close_timeout)
        finally:
            engine.close(0.0)
            self._trial = None
        self._config = replace(config, num_workers=found.choice.num_workers)

    def _preload(self, engine: Engine, env_fn: Sequence[EnvFactory]) -> None:
        """Have done what can be done once for all hosts, before the first of them is started."""
        transport = engine.transport
        engine.uninterrupted(lambda: transport.preload(env_fn))
        doing = "launch (importing what envs need)"
        engine.wait_until(lambda: transport.is_prepared, look_every_s=_LOOK_EVERY_S, doing=doing)

    def _prepare(self, supervisor: Supervisor, params: Mapping[int, dict[str, Any] | None]) -> None:
        """Give envs that are not launched yet their reset params and seeds."""
        validate.refuse_unsendable_params(supervisor.hosts.transport, params)
        for env in supervisor.envs:
            env.reset_params = params.get(env.env_id) or {}
            env.base_seed = env.new_seed = self._seeds[env.env_id]
        spares = () if supervisor.spares is None else supervisor.spares.envs
        for env, seed in zip(spares, self._spare_seeds, strict=True):
            env.base_seed = env.new_seed = seed
        supervisor.rules.dynamic_seed = self._dynamic_seed

    def _discard_engine(self, grace_s: float) -> None:
        engine, finalizer = self._engine, self._finalizer
        self._launched = self._built = False
        self._called = None
        self._view.forget()
        if engine is None:
            return
        self._figures()  # for the last time with what hosts have measured
        if self._config.trace is not None:
            write_trace(self._config.trace.path, engine)
        engine.close(grace_s)
        if self._engine is engine:  # kept until here: what Ctrl-C interrupts can be done again
            self._engine = self._gather = None
        if finalizer is not None:
            finalizer.detach()

    def _calling(self) -> AbstractContextManager[Supervisor]:
        engine = self._engine  # another thread may close it from here on
        if engine is None or not self._launched:
            raise ManagerClosedError("the manager is closed; call launch() first")
        if self._called is not None:
            raise StateError("a call_async is under way; take its result with call_wait() first")
        return engine.calling

    @property
    def _gathering(self) -> Gather:
        gather = self._gather
        if gather is None:
            raise ManagerClosedError("the manager was closed during this call")
        return gather

    @property
    def _running(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise ManagerClosedError("the manager was closed during this call")
        return engine

    def _newest(self, env_id: int) -> Callable[[], Any]:
        """Return what gives the observation that an env shows."""
        env = self._running.supervisor.envs[env_id]  # not of the manager: see `_keep_engine`
        return lambda: env.obs

    def _surface(self, supervisor: Supervisor) -> None:
        """Raise what failed for good, once; with `on_failure: raise`, close first."""
        repair = supervisor.repair
        fatal = repair.take_fatal() if repair.fatal_errors or repair.urgent else None
        if fatal is None:
            return
        if self._config.on_failure == "raise":
            self._discard_engine(self._config.close_timeout)
        raise fatal

    # -- seeds ------------------------------------------------------------------------------

    def seed(
        self,
        seed: int | Sequence[int | None] | Mapping[int, int | None] | None,
        dynamic_seed: bool | None = None,
    ) -> None:
        """Seed the envs; takes effect at the next explicit reset or launch.

        Spares get seeds, too: after an int those that follow the envs', else derived ones.

        Args:
            seed: an int gives env i exactly `seed + i`; a list one to each; a dict one to some.
            dynamic_seed: what automatic resets after that do: None passes no seed, True one
                derived per episode, False the same again.

        Raises:
            ConfigError, UnknownEnvError: refused.
        """
        seeds = seeds_by_env(seed, self.env_num)
        if dynamic_seed is not None:
            dynamic_seed = validate.checked_flag(dynamic_seed, "dynamic_seed")
        of_all = {**self._seeds, **seeds}
        of_spares = seeds_of_spares(seed, of_all, self.env_num, self._config.spare_env_num)

        def apply(supervisor: Supervisor | None) -> None:
            self._seeds, self._spare_seeds, self._dynamic_seed = of_all, of_spares, dynamic_seed
            if self._samplers is not None:
                self._samplers.seed(seeds)
            if supervisor is not None:
                supervisor.resets.seed(seeds, of_spares)

        if not self._launched:
            apply(None)
            return
        with self._calling() as supervisor:
            self._running.uninterrupted(lambda: apply(supervisor))


def checked_factories(env_fn: Any) -> list[EnvFactory]:
    """Return a list of functions as a list of its own.

    Raises:
        ConfigError: it is something else, or empty.
    """
    try:
        factories = read_list(env_fn)
    except Unreadable as error:
        raise ConfigError(
            f"env_fn should be a list of functions, one for each env, but {error}. For n equal "
            "envs: env_fn=[make_env] * n"
        ) from error
    wrong = [i for i, factory in enumerate(factories) if not callable(factory)]
    if not factories or wrong:
        found = f"entry {wrong[0]} is {short_text(factories[wrong[0]])}" if wrong else "it is empty"
        raise ConfigError(f"env_fn should be a list of functions, one for each env; {found}")
    return factories
