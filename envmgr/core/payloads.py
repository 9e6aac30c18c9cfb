"""What the payloads of replies have to be. What a worker sent is not trusted to be what it says.

Only what the trainer itself looks at is checked; observations are checked by their reader, and what
is handed on to users as it is (infos, results of calls) is the env's own business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envmgr.spaces import codec_of, same_space
from envmgr.wire.messages import AfterStep, EnvDescription, FailureKind, RemoteFailure, SavedEnv

MAX_NOTICES = 100
"""Most texts of notices that are logged for one manager."""

MAX_NOTICE_CHARACTERS = 1000

LATE_ALONE = "it says that its next episode begins with a step of others, but there are none"

_LAST_AFTER_STEP = max(AfterStep)


class MalformedReplyError(ValueError):
    """A reply whose payload is not what the protocol says."""


def step_fields(payload: Any) -> tuple[Any, Any, bool, Any, int]:
    """Return (reference, reward, done, info, after) of STEPPED.

    Raises:
        MalformedReplyError: it is something else.
    """
    fields: tuple[Any, Any, Any, Any, Any]
    fields = payload if type(payload) is tuple and len(payload) == 5 else _fields(payload, 5)
    _, _, done, info, after = fields
    if type(done) is not bool:
        raise MalformedReplyError(f"it says that done is a {type(done).__name__}")
    if not isinstance(after, int) or not 0 <= after <= _LAST_AFTER_STEP:
        raise MalformedReplyError("it says something unknown of what follows a step")
    if type(info) is not dict and not isinstance(info, (Mapping, list, tuple)):
        raise MalformedReplyError(f"its info is a {type(info).__name__}")
    return fields


def reset_fields(payload: Any) -> tuple[Any, Any]:
    """Return (reference, info) of RESET_DONE.

    Raises:
        MalformedReplyError: it is something else.
    """
    fields: tuple[Any, Any] = _fields(payload, 2)
    if not isinstance(fields[1], Mapping):
        raise MalformedReplyError(f"the info of its reset is a {type(fields[1]).__name__}")
    return fields


def saved_of(payload: Any) -> SavedEnv:
    """Return the payload of SAVED.

    Raises:
        MalformedReplyError: it is something else.
    """
    if type(payload) is not SavedEnv or type(payload.state) is not bytes:
        raise MalformedReplyError("what it wants to have saved is no state of an env")
    return payload


def _fields(payload: Any, count: int) -> Any:
    if not isinstance(payload, tuple) or len(payload) != count:
        raise MalformedReplyError(f"a payload of {type(payload).__name__} is malformed")
    return payload


def description_of(payload: Any) -> EnvDescription:
    """Return the payload of HELLO, with spaces that can be compared and laid out.

    Raises:
        MalformedReplyError: it is something else, or a space fails when it is looked at.
    """
    if type(payload) is not EnvDescription or type(payload.resets_alone) is not bool:
        raise MalformedReplyError("its first reply does not describe an env")
    for name in ("observation_space", "action_space"):
        space = getattr(payload, name)
        try:
            bool(codec_of(space).layout)  # whether they can be laid out at all
            same_space(space, space)  # and compared
        except Exception as error:  # a space of the env's own, or half of one
            raise MalformedReplyError(
                f"its {name} cannot be looked at: {type(error).__name__}"
            ) from error
    return payload


def failure_of(payload: Any) -> RemoteFailure:
    """Return the payload of FAILED, whose texts are texts.

    Raises:
        MalformedReplyError: it is something else.
    """
    if type(payload) is not RemoteFailure:
        raise MalformedReplyError("it reports a failure that is none")
    fields = vars(payload)
    texts = (fields.get(name) for name in ("during", "type_name", "message", "traceback_text"))
    if type(fields.get("kind")) is not FailureKind or any(type(text) is not str for text in texts):
        raise MalformedReplyError("it reports a failure that is malformed")
    return payload


def notice_of(payload: Any) -> str:
    """Return the payload of NOTICE, cut to a reasonable length.

    Raises:
        MalformedReplyError: it is no text.
    """
    if type(payload) is not str:
        raise MalformedReplyError(f"a notice of {type(payload).__name__} is malformed")
    return payload[:MAX_NOTICE_CHARACTERS]
