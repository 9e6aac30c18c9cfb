"""The envs and the manager of a config, for commands."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from envmgr.config.env_factories import env_factories
from envmgr.config_file import ResolvedConfig
from envmgr.errors import ConfigError
from envmgr.manager import EnvManager
from envmgr.registry import get_env_manager_cls
from envmgr.shortcuts import create_env_manager
from envmgr.texts import counted
from envmgr.types import EnvFactory


def env_name(resolved: ResolvedConfig) -> str | None:
    """Return the name that a config gives its env; None if it gives none."""
    env, pool = resolved.values.env, resolved.values.manager.env_pool
    name: str | None = env.id or env.entry or (None if pool is None else pool.env_id)
    return name


def manager_of(
    resolved: ResolvedConfig,
    wrapped: Callable[[list[EnvFactory]], list[EnvFactory]] | None = None,
) -> EnvManager:
    """Return the manager of a config, not launched.

    Args:
        resolved: the config.
        wrapped: given the factories of the envs, returns those to use in their place.

    Raises:
        ConfigError: the config does not say which envs, or how many.
        MissingDependencyError: the kind needs a package that is not installed.
    """
    env_fn: list[EnvFactory] | None = None
    if wrapped is not None:
        env_fn = wrapped(factories_of(resolved, "they cannot be wrapped for this"))
    elif not _makes_envs(resolved):
        env_fn = factories_of(resolved, "")
    manager: EnvManager = create_env_manager(resolved.values.manager, env_fn=env_fn)
    return manager


def factories_of(
    resolved: ResolvedConfig, why: str, *, env_num: int | None = None
) -> list[EnvFactory]:
    """Return the factories of the envs of a config.

    Args:
        resolved: the config.
        why: why a kind of manager that makes its envs itself will not do, for the error.
        env_num: how many envs; None for as many as the config says.

    Raises:
        ConfigError: the config does not say which envs, or how many; or its kind of manager makes
            them itself.
    """
    cfg = resolved.values.manager
    env_num = cfg.env_num if env_num is None else env_num
    if env_num is None:
        raise ConfigError(
            "manager.env_num is null, so nothing says how many envs to run. Set it in the config, "
            "or with --set manager.env_num=8."
        )
    if _makes_envs(resolved):
        raise ConfigError(f"manager.type is {cfg.type!r}, which makes its envs itself: {why}")
    return env_factories(resolved.values.env, env_num, policy=resolved.file_policy)


def _makes_envs(resolved: ResolvedConfig) -> bool:
    return getattr(get_env_manager_cls(resolved.values.manager), "makes_envs", False)


@contextlib.contextmanager
def quiet_workers() -> Iterator[str]:
    """Provide a temporary folder for `worker_log`, which keeps what tried envs print out of sight.

    If they printed anything, a line on stderr says how much; it is deleted with the folder.
    """
    with tempfile.TemporaryDirectory(prefix="envmgr-") as folder:
        yield folder
        lines = b"".join(file.read_bytes() for file in Path(folder).iterdir()).splitlines()
        n_lines = sum(not line.startswith(b"--- ") for line in lines)  # what each file begins with
    if n_lines:
        print(
            f"envmgr: {counted(n_lines, 'line')} that envs printed while they were tried are left "
            "out; manager.worker_log keeps them in a run",
            file=sys.stderr,
        )
