"""The launch: all envs are built and reset, or it fails with everything that went wrong."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from envmgr.core import validate
from envmgr.core.engine import Engine
from envmgr.core.phases import Phase
from envmgr.core.submit import submit_calls
from envmgr.core.supervisor import Supervisor
from envmgr.core.table import ManagedEnv
from envmgr.errors import EnvFailure, LaunchError
from envmgr.lifecycle import EnvState
from envmgr.proc import resident_bytes
from envmgr.seeding import Seeds
from envmgr.texts import counted, env_ids_text, logged
from envmgr.types import EnvFactory
from envmgr.wire.messages import Op
from envmgr.worker.copies import copied_params

_LOOK_EVERY_S = 0.1
"""How often to look whether an import takes too long."""

_OTHERS_S = 5.0
"""How long a launch that has failed waits for the other envs, to report all failures at once."""


def preload(engine: Engine, factories: Sequence[EnvFactory]) -> None:
    """Do what can be done once for all hosts, before the first of them is started.

    The engine's lock is held.
    """
    transport = engine.transport
    engine.uninterrupted(lambda: transport.preload(factories))
    doing = "launch (importing what envs need)"
    engine.wait_until(lambda: transport.is_prepared, look_every_s=_LOOK_EVERY_S, doing=doing)


_LOOK_FOR_UNITS_S = 0.25
"""How often to look whether other managers have given units back: nothing announces that."""


def await_units(engine: Engine) -> None:
    """Wait until there are units for all envs of an engine, where managers share a cap.

    Raises:
        SharedCapError: no units can be had, or another manager has another number for it.
    """
    units = engine.units
    if units is None:
        return
    told = False

    def are_had() -> bool:
        nonlocal told
        if engine.uninterrupted(units.take):
            return True
        if units.lacks and not told:
            told = True
            logged(logging.WARNING, "the launch waits for %s", units.lacks)
        return False

    if not are_had():
        engine.wait_until(are_had, look_every_s=_LOOK_FOR_UNITS_S, doing="launch (limits.shared)")


def describe_first(engine: Engine) -> None:
    """Start the host of env 0, and wait until it has described its env.

    The engine's lock is held.

    Raises:
        LaunchError: env 0 has failed.
    """
    await_units(engine)
    supervisor = engine.supervisor
    failures = supervisor.repair.launch_failures
    engine.uninterrupted(partial(supervisor.start_hosts, [0]))
    engine.wait_until(
        lambda: 0 in supervisor.descriptions or bool(failures), doing="reading spaces"
    )
    if failures:
        raise LaunchError(f"the spaces cannot be read: {failures[0]}", failures)


def prepare_resets(
    supervisor: Supervisor, params: Mapping[int, dict[str, Any] | None], seeds: Seeds
) -> None:
    """Give envs that were not reset yet the params and the seeds of their first reset.

    Raises:
        ConfigError: params cannot be sent to a host.
    """
    validate.refuse_unsendable_params(supervisor.hosts.transport, params)
    for env in supervisor.envs:
        env.reset_params = copied_params(params.get(env.env_id) or {})
        env.base_seed = env.new_seed = seeds.of_envs[env.env_id]
    spares = () if supervisor.spares is None else supervisor.spares.envs
    for env, seed in zip(spares, seeds.of_spares, strict=True):
        env.base_seed = env.new_seed = seed
    supervisor.rules.dynamic_seed = seeds.dynamic


def build_envs(engine: Engine, *, same_spaces: bool) -> None:
    """Build all envs of an engine and lay out the memory for what they give.

    The engine's lock is held.

    Args:
        engine: the engine, whose envs are VOID.
        same_spaces: refuse envs whose spaces differ.

    Raises:
        LaunchError: envs failed; the error has all failures.
        SpaceMismatchError, ConfigError: see `Supervisor`.
    """
    build_all(engine)
    place_observations = partial(engine.supervisor.place_observations, same_spaces=same_spaces)
    engine.uninterrupted(place_observations)


def begin_envs(engine: Engine, replay_paths: Sequence[str] | None) -> None:
    """Reset all envs of an engine, which are built. The engine's lock is held.

    Raises:
        LaunchError: envs failed; the error has all failures.
    """
    if replay_paths is not None:
        _enable_replays(engine, replay_paths)
    reset_all(engine)
    engine.supervisor.table.launching = False
    _warn_of_memory(engine)


def _warn_of_memory(engine: Engine) -> None:
    """Warn if new workers already use more memory than they may, and so are replaced for ever."""
    limit = engine.supervisor.hosts.settings.max_rss_bytes
    if limit is None:
        return
    largest = max(map(resident_bytes, engine.transport.pids.values()), default=0)
    if largest > limit:
        logged(
            logging.WARNING,
            "manager.max_worker_rss_mb is %g, but a worker has %.0f MB as soon as it is launched, "
            "so that it is replaced after each episode. Set it well above that, or leave it out.",
            limit / 1e6,
            largest / 1e6,
        )


def build_all(engine: Engine) -> None:
    """Start all hosts of an engine and wait until their envs are built.

    Raises:
        LaunchError: envs failed; the error has all failures.
        ConfigError: a factory cannot be sent to a host; nothing was started.
    """
    await_units(engine)
    supervisor = engine.supervisor
    # A host that was started before, for its spaces, may have failed: then no other is started.
    if not supervisor.repair.launch_failures:
        env_ids = [env.env_id for env in supervisor.hosts.envs]
        engine.uninterrupted(partial(supervisor.start_hosts, env_ids))
    _await_built(engine)


def _await_built(engine: Engine) -> None:
    envs, starts = engine.supervisor.hosts.envs, engine.supervisor.hosts.starts
    failures = engine.supervisor.repair.launch_failures

    def is_over(env: ManagedEnv) -> bool:
        if starts is not None and starts.waits(env):
            return bool(failures)  # nobody has a turn any more
        return env.phase is not Phase.STARTING

    await_all(engine, lambda: all(map(is_over, envs)), "building")


def reset_all(engine: Engine, limit_s: float = math.inf) -> None:
    """Have all envs reset for the first time, and wait for it.

    Raises:
        LaunchError: envs failed, and the error has all failures; or it takes longer than `limit_s`.
    """
    supervisor = engine.supervisor
    states, spares, starts = supervisor.states, supervisor.spares, supervisor.hosts.starts
    failures = supervisor.repair.launch_failures
    _await_built(engine)  # a worker may have died since, while others answered calls
    engine.uninterrupted(supervisor.begin_episodes)
    await_all(
        engine,
        lambda: all(
            s.env_id in failures
            or (failures and starts is not None and starts.waits(s))
            or (
                spares is not None and spares.is_ready(s)
                if s.is_spare
                else states[s.env_id] is EnvState.RUN
            )
            for s in supervisor.hosts.envs
        ),
        "the first reset",
        limit_s,
    )


def _enable_replays(engine: Engine, paths: Sequence[str]) -> None:
    supervisor = engine.supervisor
    envs = supervisor.envs
    payloads = replay_payloads(paths)
    ids = list(range(len(envs)))
    submit_calls(supervisor.hosts, envs, Op.CALL, payloads, "enable_save_replay")
    await_all(engine, lambda: all(s.phase is not Phase.CALLING for s in envs), "enable_save_replay")
    failed = {s.env_id: s.result for s in envs if isinstance(s.result, EnvFailure)}
    if failed:
        raise _launch_error(failed, len(envs))
    for env in envs:
        env.result = None
    supervisor.repeat(ids, Op.CALL, payloads)


def replay_payloads(paths: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the payloads of the calls that enable replays; one object for equal paths."""
    payloads = {path: ("enable_save_replay", (path,)) for path in paths}
    return [payloads[path] for path in paths]


def await_all(
    engine: Engine, finished: Callable[[], bool], doing: str, limit_s: float = math.inf
) -> None:
    """Wait for envs that are being launched.

    Raises:
        LaunchError: envs failed, and the error has all failures; or it takes longer than `limit_s`.
    """
    failures = engine.supervisor.repair.launch_failures
    in_time = engine.wait_until(
        lambda: bool(failures) or finished(),
        deadline=engine.now() + limit_s,
        doing=f"launch ({doing})",
    )
    if failures:
        engine.wait_for(finished, _OTHERS_S)
        raise _launch_error(failures, len(engine.supervisor.hosts.envs))
    if not in_time:
        raise LaunchError(f"it has not answered {limit_s:g} s into {doing}")


def _launch_error(failures: dict[int, EnvFailure], env_num: int) -> LaunchError:
    first = failures[min(failures)]
    causes = _by_cause(failures)
    texts = "\n".join(f"- {text}" for text in list(causes.values())[:_MOST_CAUSES])
    left = [env_id for env_ids in list(causes)[_MOST_CAUSES:] for env_id in env_ids]
    more = ""
    if left:
        more = f"\n- and {len(left)} more ({env_ids_text(left)}), in the `failures` of this error"
    error = LaunchError(
        f"{len(failures)} of {counted(env_num, 'env')} could not be launched; everything is closed "
        f"again:\n"
        f"{texts}{more}",
        failures,
    )
    error.__cause__ = first
    return error


_MOST_CAUSES = 3
"""How many causes of a failed launch are reported in full."""


def _by_cause(failures: Mapping[int, EnvFailure]) -> dict[tuple[int, ...], str]:
    """Return the texts of failures, each once, by the envs that failed in the same way."""
    ids_of: dict[tuple[type, str], list[int]] = {}
    for env_id, failure in sorted(failures.items()):
        cause = re.sub(rf"\benv {env_id}\b", "\0", str(failure), count=1)  # its own name
        ids_of.setdefault((type(failure), cause), []).append(env_id)
    return {
        tuple(ids): (cause if len(ids) == 1 else _in_plural(cause)).replace("\0", env_ids_text(ids))
        for (_, cause), ids in ids_of.items()
    }


def _in_plural(cause: str) -> str:
    """Return the text of one env's failure, put in the plural; stacks below it are unchanged."""
    said, blank, rest = cause.partition("\n\n")
    if " was lost during " not in said:  # that of another env, which they shared with it
        said = said.replace("the worker of \0", "the workers of \0", 1)
    return said.replace(" in its ", " in their ", 1) + blank + rest
