"""`make`: a manager in one call, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envmgr.config import EnvConfig
from envmgr.config.checks import check_value, text
from envmgr.config.env_factories import checked_env_num, env_factories, key_of
from envmgr.errors import ConfigError, UnknownKeyError
from envmgr.managers import BaseEnvManager
from envmgr.registry import create_env_manager


def make(
    env: str | Callable[[], Any],
    env_num: int = 1,
    type: str = "subprocess",
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Any] = (),
    **cfg: Any,
) -> BaseEnvManager:
    """Return a manager of `env_num` equal envs; it is not launched yet.

    Example:
        >>> with make("CartPole-v1", env_num=2, type="base", seed=0) as manager:
        ...     sorted(manager.ready_obs)
        [0, 1]

    Args:
        env: a gymnasium id, `package.module:callable`, or a function that builds an env.
        env_num: how many.
        type: registry key of the kind of manager.
        env_kwargs: arguments of the env.
        wrappers: as in the section `env` of a config, the innermost first.
        **cfg: keys of the manager's config.

    Raises:
        ConfigError: something of this does not exist or does not fit.
    """
    count = checked_env_num(env_num)
    if not callable(env):
        path: str = check_value(text(), env, "env")
        section = {key_of(path): path, "kwargs": env_kwargs, "wrappers": wrappers}
        env_fn = env_factories(section, count)
    else:
        given = EnvConfig.from_mapping({"kwargs": env_kwargs, "wrappers": wrappers})
        if given.kwargs or given.wrappers:
            raise ConfigError(
                "env_kwargs and wrappers go with an id, but env is a function: let it apply them"
            )
        env_fn = [env] * count
    try:
        manager: BaseEnvManager = create_env_manager({"type": type, **cfg}, env_fn=env_fn)
    except UnknownKeyError as error:
        if cfg.keys() <= BaseEnvManager.default_config().keys():
            raise
        raise UnknownKeyError(f"{error}\nArguments of the env go into env_kwargs.") from None
    return manager
