"""Managers in one call: `create_env_manager` from a config, `make` for scripts and notebooks."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from typing_extensions import Unpack

from envmgr.config import ManagerConfig, to_easydict
from envmgr.config.checks import Check, Refused, as_items, check_value, show_value, text
from envmgr.config.env_factories import checked_env_num, env_factories, key_of, with_arguments
from envmgr.config.schema import as_mapping, with_hint
from envmgr.env.batch_specs import BatchedEnvSpec
from envmgr.errors import ConfigError, UnknownKeyError
from envmgr.launch import GIVE_A_FUNCTION, is_env
from envmgr.managers import BaseEnvManager, EnvManagerV2
from envmgr.registry import GIVE_SECTIONS, class_of_kind, default_config_of, kind_of
from envmgr.types import EnvFactory

if TYPE_CHECKING:
    from envmgr.config.keywords import ManagerKeys

logger = logging.getLogger("envmgr")

_OF_WORKERS = (
    "num_workers",
    "context",
    "preload",
    "worker_threads",
    "worker_affinity",
    "worker_env",
    "worker_log",
    "daemon",
    "max_worker_rss_mb",
)
"""Keys that mean nothing where there are no workers."""


def create_env_manager(
    cfg: Mapping[str, Any], env_fn: Sequence[EnvFactory] | None = None, **kwargs: Any
) -> BaseEnvManager:
    """Return a manager of the kind that `cfg.type` names; it is not launched yet.

    Args:
        cfg: the manager section, as a dict or EasyDict; without `type` the kind is `base`. It is
            not changed: the manager gets the kind's whole default config with these keys on top.
            For a type checker to take a V2 kind as an `EnvManagerV2`, assert that it is one.
        env_fn: one factory for each env; None for kinds that make their envs (`env_pool`).
        **kwargs: further arguments of the manager class.

    Raises:
        UnknownKeyError: there is no such kind or config key.
        ConfigError: a value is not allowed.
    """
    if isinstance(cfg, (str, Path)):
        raise ConfigError(_no_mapping_text(cfg))
    cfg = as_mapping(cfg, "manager")
    if isinstance(cfg.get("manager"), Mapping):
        raise ConfigError(f"cfg has the sections {', '.join(map(str, cfg))}: {GIVE_SECTIONS}.")
    _warn_of_no_type(cfg)
    key = kind_of(cfg)
    manager_cls = class_of_kind(key)
    config = ManagerConfig.from_mapping(cfg, default_config_of(manager_cls, key))
    manager: BaseEnvManager = manager_cls(
        env_fn=env_fn, cfg=to_easydict(config.to_dict()), **kwargs
    )
    return manager


def _no_mapping_text(cfg: str | Path) -> str:
    """Return the message that says what to give in place of a string."""
    is_kind = isinstance(cfg, str) and not _is_file(cfg)
    way = (
        "create_env_manager({'type': 'subprocess'}, env_fn=[make_env] * n), or make(env, n, "
        "type='subprocess')"
    )
    return (
        f"cfg is {show_value(cfg)}, but must be a mapping of keys to values: "
        f"{way if is_kind else GIVE_SECTIONS}"
    )


def _is_file(value: object) -> bool:
    """Return whether something looks like the path of a config file."""
    return isinstance(value, (str, Path)) and str(value).endswith((".yaml", ".yml"))


def _warn_of_no_type(cfg: Mapping[str, Any]) -> None:
    """Warn that a config without a kind is one of `base`, if it has keys for workers."""
    useless = [key for key in _OF_WORKERS if cfg.get(key) is not None]
    if useless and "type" not in cfg:
        logger.warning(
            "no type is given, so base: all envs run in this process, one after another, and %s "
            "%s nothing. Give type: subprocess",
            " and ".join(useless),
            "means" if len(useless) == 1 else "mean",
        )


@overload
def make(
    env: str | Callable[[], Any] | Sequence[Callable[[], Any]],
    env_num: int | None = None,
    *,
    type: Literal["base_v2", "subprocess_v2", "async_subprocess_v2"],
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Any] = (),
    **cfg: Unpack[ManagerKeys],
) -> EnvManagerV2: ...


@overload
def make(
    env: str | Callable[[], Any] | Sequence[Callable[[], Any]],
    env_num: int | None = None,
    type: str = "subprocess",
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Any] = (),
    **cfg: Unpack[ManagerKeys],
) -> BaseEnvManager: ...


def make(
    env: str | Callable[[], Any] | Sequence[Callable[[], Any]],
    env_num: int | None = None,
    type: str = "subprocess",
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Any] = (),
    **cfg: Any,
) -> BaseEnvManager:
    """Return a manager of `env_num` envs; it is not launched yet.

    Example:
        >>> with make("CartPole-v1", env_num=2, type="base", seed=0) as manager:
        ...     sorted(manager.ready_obs)
        [0, 1]

    Args:
        env: a gymnasium id, `package.module:callable`, a function that builds an env, or a list
            of such functions, one for each env.
        env_num: how many envs; None: one, or as many as there are functions.
        type: registry key of the kind of manager.
        env_kwargs: arguments for each env: for `gymnasium.make` if `env` is an id, else for the
            callable that builds it.
        wrappers: wrappers of each env, the innermost first: classes and functions that are given
            the env, or names as in the section `env` of a config.
        **cfg: keys of the manager's config, such as `seed=0` or `step_timeout=10`.

    Raises:
        ConfigError: something that an argument names does not exist or does not fit.
    """
    listed = None
    if isinstance(env, Sequence) and not isinstance(env, str):
        listed = check_value(_LIST, env, "env")
    if env_num is None:
        env_num = len(listed) if listed else 1
    count = checked_env_num(env_num)
    if callable(env) or listed is not None:
        given = _factories([env] * count if listed is None else listed, count)
        different = {id(build): build for build in given}
        env_fns = {key: _with(build, env_kwargs, wrappers) for key, build in different.items()}
        env_fn = [env_fns[id(build)] for build in given]
    else:
        path: str = check_value(_ENV, env, "env")
        section = {key_of(path): path, "kwargs": env_kwargs, "wrappers": wrappers}
        env_fn = env_factories(section, count)
    try:
        manager = create_env_manager({"type": type, **cfg}, env_fn=env_fn)
    except UnknownKeyError as error:
        known = BaseEnvManager.default_config()
        if cfg.keys() <= known.keys():
            raise
        unknown = next(key for key in cfg if key not in known)
        if _is_of_the_manager(unknown, known):
            raise
        if unknown in _MAPPINGS and isinstance(cfg[unknown], Mapping):
            unknown = next(iter(cfg[unknown]), "name")
        hint = f"Arguments of the env go into env_kwargs={{{unknown!r}: ...}}."
        raise with_hint(error, hint) from None
    return manager


_MAPPINGS = ("kwargs", "env_args")
"""Names that other libraries use for `env_kwargs`."""


_LIKE_A_KEY = 0.85
"""From this ratio of `difflib` on, a name is taken for a mistyped key, not for an argument."""


def _is_of_the_manager(unknown: str, known: Iterable[str]) -> bool:
    """Return whether a name is more likely meant as a key of the manager than as an argument."""
    if unknown in ManagerConfig.MEANT:
        return unknown not in (*_MAPPINGS, "render_mode")
    return bool(difflib.get_close_matches(unknown, known, n=1, cutoff=_LIKE_A_KEY))


def _with(
    build: Callable[..., Any], env_kwargs: Mapping[str, Any] | None, wrappers: Sequence[Any]
) -> EnvFactory:
    """Return a factory of an env with arguments and in wrappers; `build` itself without any.

    Raises:
        ConfigError: arguments or wrappers are wrong, or `build` builds several envs at once.
    """
    factory = with_arguments(build, env_kwargs, wrappers)
    if factory is not build and isinstance(build, BatchedEnvSpec):
        raise ConfigError(
            "env_kwargs and wrappers are of single envs, but env is a BatchedEnvSpec. Let its "
            "`build` apply them: BatchedEnvSpec(lambda: MyEnvs(size=16), ...)"
        )
    return factory


def _env_name(value: Any) -> str:
    if is_env(value):
        raise Refused(GIVE_A_FUNCTION)
    if _is_file(value) or isinstance(value, Mapping):
        raise Refused(GIVE_SECTIONS)
    name: str = text().convert(value)
    return name


_ENV = Check(
    "a gymnasium id, `package.module:callable`, a function that builds an env, or a list of such "
    "functions",
    _env_name,
)


_LIST = Check(_ENV.allowed, lambda value: list(as_items(value)))


def _factories(env: Sequence[Any], count: int) -> list[Callable[[], Any]]:
    """Return the factories that were given, one for each env.

    Raises:
        ConfigError: there are none, more or fewer than envs, or one is no function.
    """
    if not env:
        raise ConfigError("env is an empty list: give it a function for each env.")
    for index, factory in enumerate(env):
        if not callable(factory):
            what = "a list of envs is one of functions that each build an env"
            if is_env(factory):
                what = GIVE_A_FUNCTION
            raise ConfigError(
                f"env[{index}] is {show_value(factory)}, but {what}. For envs of an id, give the "
                "id and env_num."
            )
    if len(env) != count:
        raise ConfigError(
            f"env_num is {count}, but env is a list of {len(env)} functions, one for each env. "
            "Leave env_num out."
        )
    return [*env]
