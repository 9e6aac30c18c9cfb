"""Functions that adapters run on the envs in the workers, with `manager.apply`.

The workers import this module: it must not import a trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium


def has_attribute(env: Any, name: str) -> bool:
    """Return whether an env, or one of its wrappers, has an attribute.

    This runs where the env is, because the attribute may be something that cannot be sent.
    """
    try:
        env.get_wrapper_attr(name) if isinstance(env, gymnasium.Env) else getattr(env, name)
    except AttributeError:
        return False
    return True


def is_wrapped(env: Any, module: str, name: str) -> bool:
    """Return whether an env has a wrapper of a class, or of one that derives from it.

    Args:
        env: the env.
        module: the name of the module that the class is from; nothing has to be imported.
        name: the qualified name of the class.
    """
    while isinstance(env, gymnasium.Wrapper):
        if any((c.__module__, c.__qualname__) == (module, name) for c in type(env).__mro__):
            return True
        env = env.env
    return False


def rendered(env: Any, arguments: Mapping[str, Any]) -> Any:
    """Return what an env renders."""
    return env.render(**arguments)


def notify(env: Any) -> None:
    """Call the method `notify` of an env, or of one of its wrappers, if there is one."""
    if has_attribute(env, "notify"):
        (env.get_wrapper_attr("notify") if isinstance(env, gymnasium.Env) else env.notify)()
