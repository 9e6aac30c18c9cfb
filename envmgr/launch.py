"""Launching: from a config and factories to a running engine, all envs or none."""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from envmgr.config import ManagerConfig, WorkerEnv, check_kind
from envmgr.config.kind_sections import Limits, Ray
from envmgr.core import EpisodeRules, Hosts, Supervisor
from envmgr.core.board_writer import BoardWriter
from envmgr.core.call_journal import CallJournal, SignalFreeThread
from envmgr.core.engine import Engine
from envmgr.core.spares import all_factories, spare_factory, takers_of
from envmgr.core.statistics import Tracer
from envmgr.env.batch_specs import Batch, batches_of
from envmgr.errors import ConfigError, LaunchError
from envmgr.optional_packages import own_part
from envmgr.policy import Deadlines, FailurePolicy, StartCaps
from envmgr.shared_caps import SharedUnits
from envmgr.spaces.reading import Unreadable, read_list, short_text
from envmgr.transport.base import Transport
from envmgr.transport.process.preflight import cpu_quota
from envmgr.transport.process.preloading import say_that_nothing_is_preloaded
from envmgr.types import Clock, EnvFactory, monotonic
from envmgr.wire.arenas import ObservationRules
from envmgr.wire.hosts import HostSettings, WorkerSettings

if TYPE_CHECKING:
    from envmgr.transport.ray.transport import ActorPlan

logger = logging.getLogger("envmgr")

_SPIN_S = 1e-3


GIVE_A_FUNCTION = (
    "it is an env: give a function that builds one, such as lambda: gymnasium.make(...)"
)


def is_env(value: Any) -> bool:
    """Return whether something is an env, and not a function that builds one."""
    methods = (getattr(type(value), name, None) for name in ("reset", "step"))
    return all(map(callable, methods)) and not callable(value)


def checked_factories(env_fn: Any) -> list[EnvFactory]:
    """Return a list of functions as a new list.

    Raises:
        ConfigError: it is something else, or empty.
    """
    if env_fn is None:
        raise ConfigError(
            "env_fn is missing: a list of functions, one for each env. For n equal envs: "
            "env_fn=[make_env] * n"
        )
    if hasattr(type(env_fn), "ready_obs"):
        raise ConfigError(
            f"env_fn should be a list of functions, one for each env, but {short_text(env_fn)} is "
            "a manager. For a trainer: as_gymnasium(manager), as_sb3(manager) or "
            "as_tianshou(manager)"
        )
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
        if wrong and is_env(factories[wrong[0]]):
            found += f"; {GIVE_A_FUNCTION}"
        raise ConfigError(f"env_fn should be a list of functions, one for each env; {found}")
    for factory in {id(factory): factory for factory in factories}.values():
        needed = _needed_arguments(factory)
        if needed:
            raise ConfigError(
                f"{short_text(factory)} of env_fn needs the argument{'s' if needed[1:] else ''} "
                f"{', '.join(map(repr, needed))}, but is called without any. Give them beforehand: "
                f"env_fn=[functools.partial(make_env, {needed[0]}) for {needed[0]} in range(n)]"
            )
    return factories


def _needed_arguments(factory: EnvFactory) -> list[str]:
    """Return the names of the arguments that a call needs; none where they cannot be read."""
    try:  # what a decorator has put around a function may need less than that
        parameters = inspect.signature(factory, follow_wrapped=False).parameters.values()
    except Exception:  # also what objects of others raise
        return []
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in open_ended]


def deadlines_of(config: ManagerConfig) -> Deadlines:
    """Return the time limits of a config."""
    return Deadlines(
        step_s=config.step_timeout,
        reset_s=config.reset_timeout,
        connect_s=config.connect_timeout,
        close_s=config.close_timeout,
    )


def usable_cores(affinity: tuple[tuple[int, ...], ...] | None) -> int:
    """Return how many cores workers may use at one time.

    A container's share of the machine (`docker run --cpus 4`) counts, too: watching the block on a
    core beyond that share makes the whole container stand still for a while.

    Args:
        affinity: the cores of each worker, by its index; None: the cores of this process.
    """
    if affinity is not None:
        cores = len({core for cores in affinity for core in cores})
    elif hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else min(cores, math.ceil(quota))


def cores_of(config: ManagerConfig) -> int:
    """Return how many cores the workers of a config may use."""
    return usable_cores(_affinity_of(config))


def spin_s_of(config: ManagerConfig) -> float:
    """Return how long to watch the block before sleeping: 0 unless there are cores to spare.

    Every host and the trainer need a core of their own. With fewer cores, those that watch the
    block keep others from working.
    """
    n_hosts = n_hosts_of(config)
    if n_hosts is None or n_hosts + config.spare_env_num >= usable_cores(None):
        return 0.0
    return _SPIN_S


def _affinity_of(config: ManagerConfig) -> tuple[tuple[int, ...], ...] | None:
    """Return the cores of each worker; None leaves them to the kernel.

    If there are as many cores as workers with several envs, each worker gets a core of its own: all
    are woken at once, and otherwise the kernel often has two of them wait for each other on one
    core.
    """
    affinity: Any = config.worker_affinity
    if affinity is not None:
        return affinity if isinstance(affinity[0], tuple) else (affinity,)
    n_hosts = n_hosts_of(config)
    packed = n_hosts is not None and config.env_num is not None and n_hosts < config.env_num
    if not packed or n_hosts == 1 or not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    return tuple((core,) for core in cores) if n_hosts == len(cores) else None


def worker_settings_of(config: ManagerConfig) -> WorkerSettings:
    """Return the settings of worker processes that a config asks for.

    Raises:
        ConfigError: the folder of the workers' logs cannot be made.
    """
    rules = config.worker_env or WorkerEnv()
    return WorkerSettings(
        threads=config.worker_threads,
        affinity=_affinity_of(config),
        allow=rules.allow,
        deny=rules.deny,
        set=rules.set,
        daemon=config.daemon,
        spin_s=spin_s_of(config),
        log=None if config.worker_log is None else _folder_of_logs(config.worker_log),
    )


def _folder_of_logs(path: str) -> str:
    folder = os.path.abspath(os.path.expanduser(path))
    try:
        os.makedirs(folder, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"manager.worker_log is {path!r}, but that folder cannot be made: {error}. Name "
            "another."
        ) from error
    return folder


def _refuse_nowhere(path: str) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):  # else that is only found out at the end of the run
        raise ConfigError(
            f"manager.trace is {path!r}, but there is no folder {folder!r} to write it into. Make "
            "it, or name another file."
        )


def actor_plan_of(config: ManagerConfig, factories: Sequence[EnvFactory]) -> ActorPlan:
    """Return the plan of the actors of a Ray cluster that a config asks for."""
    options = config.ray or Ray()
    n_units = len(factories) - sum(batch.size - 1 for batch in batches_of(factories))
    isolated = options.isolation == "process"
    if config.preload and not isolated:
        say_that_nothing_is_preloaded("manager.ray.isolation: actor")
    n_actors = n_units if config.spare_env_num and not isolated else n_hosts_of(config) or n_units
    ray = own_part("transport.ray.transport", "type: ray")
    settings = ray.ActorSettings(
        worker=replace(worker_settings_of(config), affinity=None, spin_s=0.0),
        isolated=isolated,
        preload=() if config.preload is False else config.preload,
        import_s=config.connect_timeout,
        shared_memory=config.shared_memory,
    )
    plan: ActorPlan = ray.ActorPlan(
        options, n_actors if isolated else n_actors + config.spare_env_num, n_units, settings
    )
    return plan


def host_settings_of(
    config: ManagerConfig,
    given_spaces: tuple[Any, Any],
    transport: Transport,
    batches: tuple[Batch, ...],
) -> HostSettings:
    """Return what a transport's hosts need to know of a config and of the other arguments."""
    finite = config.nan_policy != "allow"
    rss_mb = config.max_worker_rss_mb
    trace = None if transport.is_mirrored else config.trace  # what is measured does not travel
    return HostSettings(
        rules=ObservationRules(config.strict_dtype, finite, transport.shares_objects),
        refuse_non_finite_rewards=finite,
        observation_space=given_spaces[0],
        action_space=given_spaces[1],
        max_episodes=config.max_episodes_per_worker,
        max_rss_bytes=None if rss_mb is None else int(rss_mb * 1e6),
        propagate=transport.propagated,
        batches=batches,
        start_steps=config.start_steps,
        measures=trace is not None or (config.metrics is not None and not transport.is_mirrored),
        events=0 if trace is None else trace.events,
        save_every=config.snapshot_every,
        copies_states=config.snapshot_copy,
        carries=transport.is_mirrored,
    )


def build_engine(
    factories: Sequence[EnvFactory],
    config: ManagerConfig,
    transport: Transport,
    given_spaces: tuple[Any, Any],
    clock: Clock,
    thread: SignalFreeThread | None = None,
) -> Engine:
    """Return an engine whose envs are all VOID.

    Args:
        factories: the factories of the envs.
        config: the config of the manager.
        transport: how hosts are reached.
        given_spaces: the spaces of observations and actions, in place of the envs' own.
        clock: monotonic seconds.
        thread: see `CallJournal`.

    Raises:
        ConfigError: spares are asked for where no reset can be hidden, or a timeline is to be
            written into a folder that does not exist.
    """
    check_kind(config, hides_resets=transport.works_alone, refused=transport.refused)
    settings = host_settings_of(config, given_spaces, transport, batches_of(factories))
    limits = config.limits or Limits()
    spare = spare_factory(factories) if config.spare_env_num else None
    hosts = Hosts(
        transport,
        all_factories(factories, config.spare_env_num),
        settings,
        deadlines_of(config),
        clock,
        num_workers=n_hosts_of(config) if transport.packs_envs and not spare else None,
        spare_num=config.spare_env_num,
        caps=StartCaps(limits.starting, limits.starts_per_s),
    )
    if config.trace is not None:
        _refuse_nowhere(config.trace.path)
        hosts.tracer = Tracer(clock, config.trace.events)
    rules = _rules_of(config, () if spare is None else takers_of(factories, spare))
    supervisor = Supervisor(hosts, rules, _failure_policy_of(config), CallJournal(thread))
    alone, spin_s = transport.works_alone, spin_s_of(config) if transport.spins else 0.0
    engine = Engine(
        supervisor,
        transport,
        clock,
        background=alone,
        spin_s=spin_s,
        units=SharedUnits(limits.shared, len(hosts.envs)) if limits.shared else None,
    )
    watch = BoardWriter(config.type, clock)
    watch.begin(engine)
    engine.watch = watch
    return engine


def open_engine(
    factories: Sequence[EnvFactory],
    config: ManagerConfig,
    make_transport: Callable[[], Transport],
    given_spaces: tuple[Any, Any],
    keep: Callable[[Engine], None],
) -> None:
    """Build an engine and keep it: either both are done, or neither is.

    Args:
        factories: as in `build_engine`; so are `config` and `given_spaces`.
        config: the config of the manager.
        make_transport: returns a new transport.
        given_spaces: the spaces of observations and actions.
        keep: called with the engine. An interrupt that comes before `open_engine` returns may be
            raised after this call.

    Raises:
        ConfigError, MissingDependencyError: as in `build_engine` and the transport.
        LaunchError: the system refused what the transport needs.
    """
    thread = SignalFreeThread()

    def build() -> Engine:
        try:
            transport = make_transport()
            try:
                return build_engine(factories, config, transport, given_spaces, monotonic, thread)
            except BaseException:
                transport.close(0.0)
                raise
        except OSError as error:
            raise LaunchError(f"nothing was started: {error}") from error

    try:
        thread.run(lambda: keep(build()))
    except BaseException:  # Ctrl-C too: it may have come before the engine was begun with
        thread.end()
        raise


def _rules_of(config: ManagerConfig, spare_takers: tuple[bool, ...]) -> EpisodeRules:
    return EpisodeRules(
        episode_num=config.episode_num,
        auto_reset=config.auto_reset,
        reset_inplace=config.reset_inplace,
        copy_on_get=config.copy_on_get,
        check_actions=config.check_actions,
        raise_non_finite=config.nan_policy == "raise",
        spare_takers=spare_takers,
        spares_in_order=math.isinf(config.wait_num),
    )


def _failure_policy_of(config: ManagerConfig) -> FailurePolicy:
    return FailurePolicy(
        recover=config.on_failure != "raise",
        max_retry=config.max_retry,
        renew_between_attempts=config.retry_type == "renew",
        retry_waiting_s=config.retry_waiting_time,
        max_failures=config.max_failures,
        max_failure_share=config.max_failure_share,
        max_failures_total=config.max_failures_total,
        window_s=config.failure_window_s,
        drop_exhausted=config.on_exhausted == "drop",
    )


def n_hosts_of(config: ManagerConfig) -> int | None:
    """Return how many hosts a config asks for."""
    return config.num_workers if isinstance(config.num_workers, int) else config.env_num


def _gathering_some(
    config: ManagerConfig, batches: Sequence[Batch], *, inline: bool
) -> ManagerConfig:
    """Return a config for batched envs that give the results of some rows at a time."""
    if not inline:
        raise ConfigError(
            f"manager.type is {config.type}, but a BatchedEnvSpec has a batch_size: its env works "
            "while nobody waits for it, and is driven by the trainer's own thread. Use type: base"
        )
    if config.reset_inplace:
        raise ConfigError(
            "manager.reset_inplace is true, but the envs are those of a pool with a batch_size, "
            "whose resets come later than its steps. Leave it false, or batch_size null."
        )
    least = min(batch.batch_size for batch in batches if batch.batch_size)
    return replace(config, wait_num=least) if math.isinf(config.wait_num) else config


def warn_of_wait_num(config: ManagerConfig, preset: Mapping[str, Any]) -> None:
    """Warn of a `wait_num` that is given and above the number of envs, and so means all of them.

    Args:
        config: the config, with its number of envs.
        preset: the kind's own defaults, which may be above that number.
    """
    wanted, env_num = config.wait_num, config.env_num or 0
    if env_num < wanted < math.inf and wanted != preset.get("wait_num"):
        logger.warning(
            "manager.wait_num is %d, but there %s: every step waits for all that are under way. "
            "Give less, or .inf if that is meant.",
            wanted,
            f"are only {env_num} envs" if env_num > 1 else "is only 1 env",
        )


def with_batches(
    config: ManagerConfig, factories: Sequence[EnvFactory], *, inline: bool
) -> ManagerConfig:
    """Return a config for envs some of which are rows of batched envs, which share a host.

    Args:
        config: the config, as it was given.
        factories: the factories of all envs.
        inline: whether the envs run in the caller's thread.

    Raises:
        ConfigError: a batched env lacks rows, or does not support what the config asks for.
    """
    batches = batches_of(factories)
    if not batches:
        return config
    size, asked = batches[0].size, config.num_workers
    n_units = len(factories) - sum(batch.size - 1 for batch in batches)
    if config.limits not in (None, Limits()):
        raise ConfigError(
            "manager.limits is given, but env_fn has batched envs, whose rows are built, reset and "
            "stepped together: there is nothing to count. Leave it out."
        )
    if config.spare_env_num:
        raise ConfigError(
            f"manager.spare_env_num is {config.spare_env_num}, but env_fn has batched envs, and a "
            f"spare, which is one env, cannot take the place of {size} rows. Leave it 0."
        )
    if config.start_steps:
        raise ConfigError(
            f"manager.start_steps is {config.start_steps}, but env_fn has batched envs, whose rows "
            "are stepped together and cannot begin with different numbers of steps. Leave it 0."
        )
    if config.on_failure == "resume":
        raise ConfigError(
            "manager.on_failure is resume, but env_fn has batched envs, whose rows have no state "
            "of their own. Use on_failure: recover."
        )
    if asked == "auto":
        raise ConfigError(
            "manager.num_workers is auto, which tries out one env, but env_fn has batched envs. "
            f"Give a number, 1 to {n_units}."
        )
    if asked is not None and asked > n_units:
        raise ConfigError(
            f"manager.num_workers is {asked}, but the rows of a batched env share a worker, and "
            f"with that env_fn names {n_units} envs. Give 1 to {n_units}, or null."
        )
    if any(batch.batch_size for batch in batches):
        config = _gathering_some(config, batches, inline=inline)
    # Rows that are stepped together wait for each other's resets in any case.
    together = not all(batch.partial_steps for batch in batches)
    inplace = config.reset_inplace or (together and config.auto_reset)
    return replace(config, num_workers=asked or n_units, reset_inplace=inplace)
