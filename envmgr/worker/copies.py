"""Copies of requests and replies that cross no process boundary, so that sides share no data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from envmgr.spaces.reading import error_text
from envmgr.wire.frames import FrameError
from envmgr.wire.messages import Attribute, Message, Op, RemoteFailure, ResetRequest


def copied_request(message: Message) -> Message:
    """Return a request with copies of the parts that its sender may change later.

    Raises:
        FrameError: an action cannot be copied.
    """
    if message.op == Op.STEP:
        try:
            return message._replace(payload=_copied(message.payload, copy.deepcopy))
        except Exception as error:  # whatever a __deepcopy__ may raise
            raise FrameError(f"it cannot be copied: {error_text(error)}") from error
    if message.op in (Op.CALL, Op.SET_ATTR):
        return message._replace(payload=_copied(message.payload))
    if type(message.payload) is ResetRequest:  # params alone are tried before a reset is accepted
        reset = message.payload
        plan = reset.plan._replace(params=copied_params(reset.plan.params))
        return message._replace(
            payload=reset._replace(params=copied_params(reset.params), plan=plan)
        )
    return message


def copied_reply(message: Message) -> Message:
    """Return a reply with copies of the parts that the env may change later.

    Its observation has already been copied: see `ObservationWriter`.
    """
    if message.op in (Op.STEPPED, Op.RESET_DONE) and message.payload is not None:
        reference, *rest = message.payload
        return message._replace(payload=(reference, *map(_copied, rest)))
    failure = message.payload
    if type(failure) is RemoteFailure and failure.info is not None:
        return message._replace(payload=replace(failure, info=_copied(failure.info)))
    if message.op == Op.RESULT:
        return message._replace(payload=_copied(message.payload))
    return message


def copied_params(params: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the params of a reset, of the same type: see `Once`."""
    copied = copy.copy(params)
    for name, value in params.items():
        copied[name] = _copied(value)
    return copied


def copied_arguments(payload: tuple[str, Any]) -> tuple[str, Any]:
    """Return a copy of the payload of CALL or SET_ATTR."""
    copied: tuple[str, Any] = _copied(payload)
    return copied


def copied_info(info: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of an info, as `copied_reply` makes it."""
    if UNCHANGEABLE.issuperset(map(type, info.values())):
        return info.copy()
    copied: dict[Any, Any] = _copied(info)
    return copied


UNCHANGEABLE = frozenset((float, int, bool, str, type(None), np.float64, np.float32, np.int64))
"""The types of values that an info and its copy may share."""


def _as_it_is(value: Any) -> Any:
    return value


def _copied(value: Any, of_object: Callable[[Any], Any] = _as_it_is) -> Any:
    """Return a copy of containers and arrays; `of_object` copies everything else."""
    try:
        return _copy_parts(value, of_object)
    except RecursionError:  # a container that contains itself
        return copy.deepcopy(value)


def _copy_parts(value: Any, of_object: Callable[[Any], Any]) -> Any:
    if isinstance(value, np.ndarray):
        is_plain = not value.dtype.hasobject or of_object is _as_it_is
        return value.copy() if is_plain else of_object(value)
    if type(value) is dict:
        return {key: _copy_parts(part, of_object) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy_parts(part, of_object) for part in value)
    if type(value) is Attribute:
        return value._replace(value=_copy_parts(value.value, of_object))
    return of_object(value)
