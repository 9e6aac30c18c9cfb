"""What a manager is: its config and spaces, its one launch and close, states and statistics."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

from easydict import EasyDict
from typing_extensions import Self

from envmgr.calibrate import Calibration, trial_config_of, try_out
from envmgr.config import ManagerConfig, check_kind, default_manager_config, to_easydict
from envmgr.core import Supervisor, arguments, requests
from envmgr.core.engine import Engine
from envmgr.core.shelter import Shelter
from envmgr.core.stats import Statistics
from envmgr.env import adapt
from envmgr.errors import (
    ConfigError,
    LaunchError,
    ManagerClosedError,
    StateError,
)
from envmgr.launch import build_engine, launch_envs
from envmgr.lifecycle import EnvState
from envmgr.policy import GatherPolicy
from envmgr.seeding import Samplers, seeds_by_env, seeds_of_spares
from envmgr.spaces import ActionCheck, codec_of
from envmgr.spaces.reading import Unreadable, read_list, short_text
from envmgr.transport.base import Transport
from envmgr.types import EnvFactory, monotonic
from envmgr.views import DictView
from envmgr.wire.messages import EnvDescription

_MOST_INTERRUPTS = 10
"""So many of them may come while a manager is closed."""


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


class ManagerLifetime:
    """What a manager is, when it runs, and the states of its envs; see `EnvManager`."""

    preset: ClassVar[Mapping[str, Any]] = {}
    """Defaults of this kind that differ from those of the schema."""

    _transport_cls: ClassVar[type[Transport]] = Transport  # type: ignore[type-abstract]
    """What hosts of this kind run on; its properties say what this kind can do."""

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
        check_kind(config, hides_resets=self._transport_cls.works_alone)
        self._config = self._asked_config = config.with_env_num(len(self._env_fn))
        self._calibration: Calibration | None = None
        self._trial: Engine | None = None
        self._view = self._make_view()
        self._policy = GatherPolicy(self._config.wait_num, self._config.step_wait_timeout)
        self._given = (
            arguments.checked_space(observation_space, "observation_space"),
            arguments.checked_space(action_space, "action_space"),
            arguments.checked_space(reward_space, "reward_space"),
        )
        self._gathers_some = False
        self._description: EnvDescription | None = None
        self._action_checks: list[ActionCheck] | None = None
        self._codec = codec_of(None)
        self._samplers: Samplers | None = None
        self._seeds: dict[int, int | None] = dict.fromkeys(range(self.env_num))
        self._spare_seeds: list[int | None] = [None] * self._config.spare_env_num
        self._dynamic_seed: bool | None = None
        self._replay_paths: list[str] | None = None
        self._called: Called | None = None
        self._statistics = Statistics()
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
        try:
            engine = self._ensure_engine()
            with engine.calling() as supervisor:
                supervisor.start_hosts([0])
                failures = supervisor.repair.launch_failures
                engine.wait_until(
                    lambda: 0 in supervisor.descriptions or bool(failures), doing="reading spaces"
                )
                if failures:
                    raise LaunchError(f"the spaces cannot be read: {failures[0]}", failures)
                self._adopt(supervisor.descriptions)
        except BaseException:
            self._discard_engine(0.0)
            raise

    def _adopt(self, descriptions: Mapping[int, EnvDescription]) -> None:
        """Take over what env 0, or each of several different envs, said of itself."""
        ours = [self._with_given_spaces(descriptions[i]) for i in sorted(descriptions)]
        self._description = ours[0]
        codecs = [codec_of(d.observation_space) for d in ours]
        alike = all(codec.layout == codecs[0].layout for codec in codecs)
        self._codec = codecs[0] if alike else codec_of(None)
        action_spaces = [d.action_space for d in ours]
        if all(space == action_spaces[0] for space in action_spaces):
            action_spaces = [action_spaces[0]] * self.env_num
        wanted = self._config.check_actions
        if wanted:
            codec = {id(s): codec_of(s, strict=wanted == "strict") for s in action_spaces}
            self._action_checks = [codec[id(space)].refusal for space in action_spaces]
        self._samplers = Samplers(action_spaces)
        self._samplers.seed(self._seeds)

    def _with_given_spaces(self, description: EnvDescription) -> EnvDescription:
        names = ("observation_space", "action_space", "reward_space")
        given = {n: s for n, s in zip(names, self._given, strict=True) if s is not None}
        return description._replace(**given)

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

    def _ensure_engine(self, params: Mapping[int, dict[str, Any] | None] | None = None) -> Engine:
        if self._engine is None:
            self._resolve_num_workers(params or {})
            self._build_engine(self._env_fn, self._config, self._keep_engine)
        return self._running

    def _keep_engine(self, engine: Engine) -> None:
        self._engine = engine
        self._statistics = engine.supervisor.statistics
        # Not of the manager itself: what is dropped without close() ends with its finalizer.
        self._finalizer = weakref.finalize(self, engine.close, 0.0)

    def _build_engine(
        self, env_fn: Sequence[EnvFactory], config: ManagerConfig, keep: Callable[[Engine], None]
    ) -> None:
        """Build an engine and keep it: either both are done, or nothing is."""
        shelter = Shelter()
        try:
            shelter.run(lambda: keep(self._open_engine(env_fn, config, shelter)))
        except Exception:
            shelter.end()
            raise

    def _open_engine(
        self, env_fn: Sequence[EnvFactory], config: ManagerConfig, shelter: Shelter
    ) -> Engine:
        try:
            transport = self._make_transport()
            try:
                return build_engine(env_fn, config, transport, self._given[:2], monotonic, shelter)
            except BaseException:
                transport.close(0.0)
                raise
        except OSError as error:
            raise LaunchError(f"nothing was started: {error}") from error

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
        self._config = config
        self._build_engine(self._env_fn[:1], trial_config_of(config), self._keep_trial)
        engine = self._trial
        if engine is None:
            raise ManagerClosedError("the manager was closed during this call")
        try:
            with engine.calling() as supervisor:
                self._prepare(supervisor, params)
                self._calibration = found = try_out(engine, config, self.env_num)
                engine.close(0.0 if found.trial is None else config.close_timeout)
        finally:
            engine.close(0.0)
            self._trial = None
        self._config = replace(config, num_workers=found.choice.num_workers)

    def _prepare(self, supervisor: Supervisor, params: Mapping[int, dict[str, Any] | None]) -> None:
        """Give envs that are not launched yet their reset params and seeds."""
        requests.refuse_unsendable_params(supervisor, params)
        for slot in supervisor.slots:
            slot.reset_params = params.get(slot.env_id) or {}
            slot.base_seed = slot.new_seed = self._seeds[slot.env_id]
        for slot, seed in zip(supervisor.spare_slots, self._spare_seeds, strict=True):
            slot.base_seed = slot.new_seed = seed
        supervisor.rules.dynamic_seed = self._dynamic_seed

    def _discard_engine(self, grace_s: float) -> None:
        engine, finalizer = self._engine, self._finalizer
        self._launched = False
        self._called = None
        self._view.forget()
        if engine is None:
            return
        engine.close(grace_s)
        if self._engine is engine:  # kept until here: what Ctrl-C interrupts can be done again
            self._engine = None
        if isinstance(finalizer, weakref.finalize):
            finalizer.detach()

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
        params = arguments.checked_params(reset_param, self.env_num)
        try:
            engine = self._ensure_engine(params)
            with engine.calling() as supervisor:
                self._prepare(supervisor, params)
                launch_envs(engine, self._config, self._replay_paths)
                self._adopt(supervisor.descriptions)
        except BaseException as error:
            patient = isinstance(error, Exception)  # Ctrl-C does not wait for envs to close
            self._discard_engine(self._config.close_timeout if patient else 0.0)
            raise
        self._launched = True

    def close(self, timeout_s: float | None = None, terminate: bool = False) -> None:
        """Close all envs and end all hosts. Idempotent; from any thread.

        Takes at most the grace plus about one second, however many envs hang. Timesteps that have
        not been delivered are lost and counted as cancelled. Ctrl-C, and whatever else a signal
        handler raises in it, ends the grace, and is raised when everything is released.

        Args:
            timeout_s: seconds that the envs get to close, all together; None: `close_timeout`.
            terminate: do not ask the envs; terminate their hosts at once.
        """
        grace_s = arguments.checked_grace(timeout_s, self._config.close_timeout)
        if arguments.checked_flag(terminate, "terminate"):
            grace_s = 0.0
        interrupt: BaseException | None = None
        for _ in range(_MOST_INTERRUPTS):
            try:
                self._close(grace_s)
                break
            except BaseException as error:  # Ctrl-C: no more patience, but everything is released
                interrupt, grace_s = error, 0.0
                if self._engine is not None:
                    self._engine.transport.hurry()
        if interrupt is not None:
            raise interrupt

    def _close(self, grace_s: float) -> None:
        """Do what is left of closing; can be interrupted, and called again."""
        trial = self._trial
        if trial is not None:  # another thread is inside launch()
            trial.close(0.0)
        self._discard_engine(grace_s)
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
            dynamic_seed = arguments.checked_flag(dynamic_seed, "dynamic_seed")
        of_all = {**self._seeds, **seeds}
        of_spares = seeds_of_spares(seed, of_all, self.env_num, self._config.spare_env_num)

        def apply(supervisor: Supervisor | None) -> None:
            self._seeds, self._spare_seeds, self._dynamic_seed = of_all, of_spares, dynamic_seed
            if self._samplers is not None:
                self._samplers.seed(seeds)
            if supervisor is not None:
                supervisor.seed(seeds, of_spares)

        if not self._launched:
            apply(None)
            return
        with self._calling() as supervisor:
            self._running.undisturbed(lambda: apply(supervisor))

    # -- states and figures -----------------------------------------------------------------

    @property
    def env_states(self) -> dict[int, EnvState]:
        """The state of each env_id; may be read from any thread."""
        engine = self._engine
        if engine is None or not self._launched:
            return dict.fromkeys(range(self.env_num), EnvState.VOID)
        return dict(enumerate(engine.supervisor.states.snapshot()))

    def env_state_done(self, env_id: int) -> bool:
        """Return whether an env's episode budget is spent."""
        return self.env_states[arguments.checked_env_id(env_id, self.env_num)] is EnvState.DONE

    @property
    def done(self) -> bool:
        """Whether all episode budgets are spent and every timestep was delivered."""
        engine = self._engine
        if engine is None or not self._launched:
            return False
        supervisor = engine.supervisor
        return (
            all(s is EnvState.DONE for s in supervisor.states.snapshot())
            and not supervisor.owed_ids()
            and not supervisor.delivery.count
        )

    def stats(self) -> dict[str, Any]:
        """Return counters since launch (of the last launch, once closed); from any thread.

        `actions` accepted = `timesteps` delivered + `cancelled` + `outstanding`. With
        `num_workers: auto`, `calibration` says what it has become and why. While launched,
        `workers` has `{"pid": int, "env_ids": list}` for each worker process that is not known to
        be dead, and `moments` the latest (env_id, generation, event, time_s): when envs "failed"
        and were "ready" again, in seconds of `time.monotonic`.

        With spares, `spare_env_num` is how many there are (those that failed for good are none any
        more), `spares_ready` how many of them have been reset, `swaps` how often one took the place
        of another env, and `spare_failures` counts what they failed; `failures` does not. A worker
        without `env_ids` has a spare.
        """
        engine, statistics = self._engine, self._statistics
        stats: dict[str, Any] = {
            **statistics.as_dict(),
            "states": self._states_by_name(),
            "outstanding": statistics.outstanding,
        }
        if engine is not None:  # what no call has returned yet is not delivered
            in_hand = engine.supervisor.delivery.count
            stats["timesteps"] -= in_hand
            stats["outstanding"] += in_hand
        if self._calibration is not None:
            stats["calibration"] = self._calibration.as_dict()
        if engine is not None:
            stats["generations"] = [slot.generation for slot in engine.supervisor.slots]
            stats["workers"] = _workers(engine)
            stats.update(engine.supervisor.spare_figures())
            stats["moments"] = list(engine.supervisor.statistics.moments.copy())
        return stats

    def _states_by_name(self) -> dict[str, int]:
        states = list(self.env_states.values())
        return {state.name: states.count(state) for state in EnvState if state in states}


def _workers(engine: Engine) -> list[dict[str, Any]]:
    """Return the pid and the envs of each worker process; nothing where envs run in this one."""
    pids = engine.transport.pids
    return [
        {"pid": pid, "env_ids": [slot.env_id for slot in group.slots if not slot.is_spare]}
        for group in engine.supervisor.hosts.groups
        if group.host_id is not None and (pid := pids.get(group.host_id)) is not None
    ]


def _checked_factories(env_fn: Any) -> list[EnvFactory]:
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
