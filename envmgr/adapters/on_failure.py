"""`on_failure` of adapters: a failed env's episode is truncated, or the failure raised."""

from __future__ import annotations

import ast
import builtins
import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn

from envmgr.config.checks import check_value, choice, or_null
from envmgr.errors import (
    ConfigError,
    EnvManagerError,
    EnvRaised,
    FailuresExhaustedError,
    LaunchError,
)

_POLICY = or_null(choice("raise", "recover"), "as the manager")

_OWN_KEYS = ("terminated", "truncated")
"""Keys that managers add to infos; trainers get their values separately."""


def plain_info(info: Any) -> dict[str, Any]:
    """Return an env's info as trainers expect it.

    `terminated` and `truncated`, which are the manager's, are left out. An `error` that is an
    exception becomes text: its type, its message and the traceback from the worker; `abnormal`
    stays. A list of infos becomes `{"info": [...]}`.
    """
    if type(info) is not dict and not isinstance(info, Mapping):
        each = isinstance(info, (list, tuple))
        return {"info": [plain_info(part) for part in info] if each else info}
    plain = {key: value for key, value in info.items() if key not in _OWN_KEYS}
    error = plain.get("error")
    if isinstance(error, BaseException):
        plain["error"] = f"{type(error).__name__}: {error}"
    return plain


def raises(on_failure: str | None, of_manager: str) -> bool:
    """Return whether failures are raised in the trainer.

    Args:
        on_failure: what the user of the adapter asks for; None: what the manager does.
        of_manager: `on_failure` of the manager's config.

    Raises:
        ConfigError: the value is unknown, or contradicts the manager's `on_failure`.
    """
    check_value(_POLICY, on_failure, "on_failure")
    if on_failure == "recover" and of_manager == "raise":
        raise ConfigError(
            'on_failure="recover" was asked for, but the manager raises: build it with '
            "on_failure: recover"
        )
    return (on_failure or of_manager) == "raise"


def raise_in_trainer(error: EnvManagerError) -> NoReturn:
    """Raise the failure of an env in the trainer.

    An exception of the env's own code is raised with its own class, if that is a builtin one that
    can be built from one string; nothing is imported or unpickled for it. Its cause is the
    `EnvRaised` with the traceback from the worker. Everything else is raised as it is:
    `EnvRaised`, `EnvCrash` ...

    Args:
        error: an `EnvFailure`, or the error that a manager raises because of one.
    """
    failure: Exception = error
    if isinstance(error, FailuresExhaustedError):
        failure = error.failure
    elif isinstance(error, LaunchError) and error.failures:
        failure = error.failures[min(error.failures)]
    if isinstance(failure, EnvRaised):
        own = _builtin_exception(failure.type_name, failure.remote_message)
        if own is not None:
            raise own from failure
    raise failure from failure.__cause__


def _builtin_exception(name: str, message: str) -> Exception | None:
    cls = getattr(builtins, name.removeprefix("builtins."), None)
    if not isinstance(cls, type) or not issubclass(cls, Exception):
        return None
    try:
        if cls is KeyError:  # the text of one shows its key, as `repr` does
            with contextlib.suppress(ValueError, SyntaxError):
                return cls(ast.literal_eval(message))
        return cls(message)
    except TypeError:  # such as UnicodeDecodeError, which is built of five values
        return None
