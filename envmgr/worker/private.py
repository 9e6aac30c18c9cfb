"""What crosses no process boundary: requests and replies with arrays and containers of their own.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from envmgr.wire.messages import Attribute, Message, Op


def private_request(message: Message) -> Message:
    """Return a request that its sender may go on to change what it was made of."""
    if message.op in (Op.STEP, Op.CALL, Op.SET_ATTR):
        return message._replace(payload=_own(message.payload))
    return message


def private_reply(message: Message) -> Message:
    """Return a reply that the env may go on to change what it was made of.

    Its observation has been copied before: see `ObservationWriter`.
    """
    if message.op in (Op.STEPPED, Op.RESET_DONE) and message.payload is not None:
        reference, *rest = message.payload
        return message._replace(payload=(reference, *map(_own, rest)))
    if message.op == Op.RESULT:
        return message._replace(payload=_own(message.payload))
    return message


def _own(value: Any) -> Any:
    try:
        return _copied(value)
    except RecursionError:  # a container that contains itself
        return copy.deepcopy(value)


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is Attribute:
        return value._replace(value=_copied(value.value))
    return value
