"""Arguments that a config file gives to envs of well-known packages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envmgr.config.imports import FilePolicy, module_of
from envmgr.config.known_envs import package_around, package_of_id

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec


def check_env_arguments(
    env_id: str, kwargs: Mapping[str, Any], policy: FilePolicy, key: str
) -> None:
    """Refuse arguments in a file for envs of known packages that may do anything with them.

    Args:
        env_id: the id of the env.
        kwargs: its arguments.
        policy: what the file may do.
        key: the config key of the arguments.

    Raises:
        ConfigError: the arguments are not allowed; the message says what would allow them.
    """
    if not kwargs:
        return
    import gymnasium  # not for configs without arguments

    module, colon, name = env_id.partition(":")
    name = _without_version(name if colon else env_id)
    known = {package_of_id(name), package_of_id(f"{name}-v0"), package_around(module)}
    for spec in gymnasium.registry.values():  # whoever else has had them registered
        if _without_version(spec.id) == name:
            known.add(package_around(_registrar(spec)))
    for package in known:
        if package is not None:
            policy.admit_arguments(package, kwargs, env_id, key)


def _without_version(name: str) -> str:
    return re.sub(r"-v\d+$", "", name)


def _registrar(spec: EnvSpec) -> str:
    """Return the module of the class or function that builds an env."""
    build = spec.entry_point
    return build.partition(":")[0] if isinstance(build, str) else module_of(build)
