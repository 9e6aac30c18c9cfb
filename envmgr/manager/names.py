"""Names that a manager does not have: the errors for reading, setting or passing one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from envmgr.config import ManagerConfig
from envmgr.config.checks import nearest
from envmgr.config.schema import checks_of
from envmgr.errors import ConfigError, EnvAttributeError
from envmgr.spaces.reading import short_text

_OF_OTHERS = {
    "num_envs": "env_num",
    "single_action_space": "action_space",
    "single_observation_space": "observation_space",
    "envs": "get_attr, call and apply",
    "env_method": "call",
    "step_async": "send",
    "step_wait": "recv",
}
"""Names of gymnasium's and Stable-Baselines3's vector envs, and what managers have instead."""


def refuse_reading_of_others(name: str) -> None:
    """Refuse a name from another library for which a manager has a different one.

    Raises:
        EnvAttributeError: the name is one of these.
    """
    ours = _OF_OTHERS.get(name)
    if ours is not None:
        raise EnvAttributeError(
            f"a manager has no {name!r}; it has {ours}. Trainers that ask for {name!r} take what "
            "as_gymnasium(manager) or as_sb3(manager) returns. Where it is an attribute of the "
            f"envs: get_attr({name!r})."
        )


def like(name: str, names: Iterable[str]) -> str:
    """Return a sentence with the public name that is most like `name`; empty if none is."""
    found = nearest(name, (known for known in names if not known.startswith("_")))
    return "" if found is None else f" The manager has {found!r}: is that meant?"


def refuse_setting(name: str, value: object) -> None:
    """Refuse to set a public name that a manager does not have.

    Raises:
        ConfigError: the name is a key of the config.
        EnvAttributeError: it may be an attribute of the envs, which would not be set in them.
    """
    shown = short_text(value)
    if name in checks_of(ManagerConfig):
        raise ConfigError(
            f"{name!r} is a key of the config, and fixed when the manager is made: "
            f"make(..., {name}={shown}). Nothing was set."
        )
    raise EnvAttributeError(
        f"manager.{name} = {shown} would set nothing in the envs: use "
        f"manager.set_attr({name!r}, {shown})."
    )


def refuse_keys_of_config(given: Mapping[str, object]) -> None:
    """Refuse arguments that no manager has, and say where keys of the config go.

    Raises:
        ConfigError: an argument is a key of the config.
        TypeError: an argument is not a key of the config.
    """
    for name, value in given.items():
        if name not in checks_of(ManagerConfig):
            raise TypeError(f"a manager has no argument {name!r}")
        raise ConfigError(
            f"{name} is a key of the config, no argument of a manager: "
            f"create_env_manager({{..., {name!r}: {short_text(value)}}}, env_fn=...)"
        )


def refuse_arguments(method: str, others: Mapping[str, object]) -> None:
    """Refuse keyword arguments of gymnasium's `reset` for `reset` and `launch` of a manager.

    Raises:
        ConfigError: there are some.
    """
    if others:
        found = ", ".join(f"{name}={short_text(value)}" for name, value in others.items())
        raise ConfigError(
            f"{method} takes reset params by env_id and nothing else, found {found}. Seeds: "
            f"manager.seed(3), then {method}(). Options: {method}({{env_id: {{...}}}}). It returns "
            "nothing: observations are in manager.ready_obs, infos in manager.ready_info."
        )
