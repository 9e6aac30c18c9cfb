"""What the parent and a host say to each other: operations, replies, and their payloads."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import IntEnum, unique
from functools import partial
from typing import Any, NamedTuple

UNANSWERED = 0
"""Request id of messages whose replies are not awaited."""


@unique
class Op(IntEnum):
    """Operations: requests (parent to host) below 64, and replies (host to parent) from 64 on."""

    ATTACH = 1
    """Where observations go. Payload: `arenas.Placement`. No reply."""
    RESET = 2
    """Payload: `ResetRequest`. Reply: RESET_DONE or FAILED, or WORN if `leaves` is set."""
    STEP = 3
    """Payload: the action. Reply: STEPPED (then perhaps RESET_DONE) or FAILED."""
    RENEW = 4
    """Close the env, if there is one, and build a new one. Reply: HELLO or FAILED."""
    CALL = 5
    """Payload: (name, args). Reply: RESULT or FAILED."""
    GET_ATTR = 6
    """Payload: the name. Reply: RESULT (`Attribute`) or FAILED."""
    SET_ATTR = 7
    """Payload: (name, value). Reply: RESULT (None) or FAILED."""
    CLOSE = 8
    """Close every env of the host and end. Reply: CLOSED."""
    RELEASE = 9
    """Close one env of a host that goes on without it. Reply: RESULT (None), not awaited."""
    APPLY = 10
    """Run a function on the env in its host. Payload: (function, args); the function gets an
    `applied.AppliedEnv` and the args. Reply: RESULT (what it returned) or FAILED."""
    INFO_FORMS = 12
    """All envs of the host may write infos in these forms. Payload: `(number, fields)` of each. No
    reply."""
    CANCEL = 13
    """Cancel what the request with this request id has begun, in an async env. Payload: what it has
    begun, as `during` of a `RemoteFailure`. The reply to that request follows: FAILED, of the kind
    CANCELLED, unless it was over before. CANCEL itself has no reply."""
    ADOPT = 11
    """Serve the env_id of this message from now on, in place of the one before; only for hosts of
    one env. Payload: `arenas.Placement`, or None where observations go by message or nowhere.
    Reply, if it is awaited: the result of the reset that was kept, as if that reset had been
    requested now: RESET_DONE or FAILED."""

    HELLO = 64
    """The env is built. Payload: `EnvDescription`."""
    RESET_DONE = 65
    """Payload: (observation reference, reset info); None if they are kept: see `ResetRequest`."""
    STEPPED = 66
    """Payload: (observation reference, reward, done, info, `AfterStep`)."""
    RESULT = 67
    """Payload: whatever was asked for."""
    FAILED = 68
    """Payload: `RemoteFailure`. The host itself is healthy unless the failure says otherwise."""
    NOTICE = 69
    """Something to log once. Payload: text."""
    CLOSED = 70
    """The host has closed its envs and ends now."""
    BEGAN = 71
    """A host of several envs begins with this request now; its reply follows when it is done.
    Payload: whether the host goes on with its other envs meanwhile."""
    SAVED = 72
    """The state of an env after a step, to resume from. Payload: `SavedEnv`."""
    INFO_FORM = 73
    """Infos of this env have this form. Payload: fields of an `InfoForm`; None: the infos have no
    form, and all of them are written as they are."""
    WORN = 74
    """The worker has reached a limit with the episode that was left: the env was not reset, so that
    the worker can be replaced first. Payload: None."""


@unique
class AfterStep(IntEnum):
    """What the host does by itself after the step that it reports."""

    NOTHING = 0
    RESETS = 1
    """The episode ended and the host has begun the next one: RESET_DONE or FAILED follows."""
    WANTS_RECYCLING = 2
    """The episode ended and the worker has reached a limit: replace it before the next reset."""
    RESETS_IN_NEXT_STEP = 3
    """The episode ended, and the next one begins with the next step of the other rows of its batch,
    some of which are in an episode: then RESET_DONE or FAILED follows."""


class Message(NamedTuple):
    """One request or reply."""

    op: int
    env_id: int
    generation: int
    request_id: int
    payload: Any


make_message = partial(tuple.__new__, Message)
"""Makes a message from a tuple of its fields, at half the cost of calling the class."""


class EpisodePlan(NamedTuple):
    """What a host does by itself when an episode ends.

    Attributes:
        auto_reset: whether the host begins the next episode at once.
        episodes_left: how many more episodes may be begun like this; `inf` for no limit.
        params: keyword arguments of those resets.
        inplace: whether a step that ends an episode is complete only when the next episode has
            begun; if not, it is answered before that.
    """

    auto_reset: bool
    episodes_left: float
    params: dict[str, Any]
    inplace: bool = False


class SavedEnv(NamedTuple):
    """The saved state of an env, and what goes with it.

    Attributes:
        state: the state, as `env.states` takes it.
        obs: the observation that the env shows.
        info: what `ready_info` shows of it.
        episodes: how many episodes it had ended.
        episode: how many of its resets had succeeded; only where a host saves the env by itself.
    """

    state: bytes
    obs: Any
    info: dict[str, Any]
    episodes: int = 0
    episode: int = 0


class ResetRequest(NamedTuple):
    """Payload of RESET.

    Attributes:
        params: keyword arguments of the env's reset.
        seed: the seed to set before the reset, or None.
        dynamic_seed: as in `BaseEnv.seed`.
        plan: what follows at the end of the episode that begins.
        keeps: whether the host keeps the result until it is told to ADOPT an env_id.
        saved: the state that the env gets, instead of being reset.
        episode: how many resets have succeeded, this one included.
        leaves: whether the env has taken steps in an episode, which is left and ends with this
            reset.
    """

    params: dict[str, Any]
    seed: int | None
    dynamic_seed: bool | None
    plan: EpisodePlan
    keeps: bool = False
    saved: SavedEnv | None = None
    episode: int = 0
    leaves: bool = False


class EnvDescription(NamedTuple):
    """Payload of HELLO.

    Attributes:
        resets_alone: whether it can be reset while other rows of its batched env are in an episode.
        converts_actions: whether it takes actions in any form and converts them as its space says.
        is_async: whether its host has an event loop for it, and goes on with other envs while this
            one is stepped or reset, or, if only the code that builds it is async, while it is
            built. Nothing is posted for such a host.
        params_are_options: whether the params of its resets become the `options` of gymnasium's
            `reset`.
    """

    observation_space: Any
    action_space: Any
    reward_space: Any
    metadata: Any
    spec: Any
    render_mode: Any
    resets_alone: bool = True
    converts_actions: bool = False
    is_async: bool = False
    params_are_options: bool = False


class Attribute(NamedTuple):
    """Payload of the reply to GET_ATTR; methods are not sent."""

    is_method: bool
    value: Any


@unique
class FailureKind(IntEnum):
    """Why a host reports FAILED."""

    RAISED = 0
    """The env's code raised."""
    PROTOCOL = 1
    """What the env returned does not fit its spaces, or cannot be sent."""
    ABNORMAL = 2
    """The env marked its step with `info["abnormal"]`."""
    EXITED = 3
    """The env's code called `sys.exit` or raised KeyboardInterrupt: it is not to be used again."""
    NON_FINITE = 5
    """It returned NaN or infinite values, and `nan_policy` is not `allow`."""
    NO_ATTRIBUTE = 4
    """There is no attribute of that name."""
    CANCELLED = 6
    """The trainer had the operation cancelled. The stack says where the env was then."""


@dataclass(frozen=True)
class RemoteFailure:
    """A failure in a host, as text: exceptions are never rebuilt by class in the parent.

    Attributes:
        during: "construction", "reset", "step", "call" or "close".
        type_name: qualified name of the exception's class; empty if there was none.
        traceback_text: the formatted traceback, with causes; empty if there was none.
        info: the env's own info, for ABNORMAL.
        of_batch: whether a whole batched env has failed, and all of its rows with this one.
    """

    kind: FailureKind
    during: str
    type_name: str = ""
    message: str = ""
    traceback_text: str = ""
    info: Any = None
    of_batch: bool = False

    @classmethod
    def from_exception(
        cls, error: BaseException, during: str, kind: FailureKind = FailureKind.RAISED
    ) -> RemoteFailure:
        """Describe an exception, whatever its class does when printed or pickled."""
        message = text_of(error)
        if isinstance(error, SystemExit) and type(error.code) is str:
            message = repr(error.code)  # `sys.exit('no licence')`
        try:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        except Exception:  # the same, inside the formatter
            text = "".join(traceback.format_tb(error.__traceback__))
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        return cls(kind, during, name, message, text)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, whatever its class does when printed."""
    try:
        return str(error)
    except Exception as second:
        return f"<its text cannot be shown: {type(second).__name__}>"
