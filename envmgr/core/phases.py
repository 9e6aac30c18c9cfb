"""What an env's worker is busy with, and the one table of how that changes.

The second diagram in ``docs/reference/lifecycle.md`` is generated from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from types import MappingProxyType


class Phase(IntEnum):
    """What an env's worker is busy with: at most one thing at a time."""

    IDLE = 0
    """Nothing is under way, or the env has no worker."""
    STARTING = 1
    """The worker builds the env."""
    RESETTING = 2
    """The worker resets the env: on its own, or because a reset was requested."""
    POSTED = 3
    """A step was posted in the block; its timestep is looked for there when it is gathered."""
    STEPPING = 4
    """A step is looked after individually: it went by message, or something came in between."""
    CANCELLING = 5
    """A step is under way whose timestep nobody wants any more, because `reset` was called."""
    CALLING = 6
    """The worker calls a method of the env, or accesses an attribute of it."""
    ENDING = 7
    """The worker was killed or asked to end; what follows begins when it is gone."""
    PAUSING = 8
    """The env waits for its deadline; what follows begins then."""

    @property
    def label(self) -> str:
        """What the phase is called in messages."""
        return _LABELS[self]


_P = Phase
_LABELS = {
    _P.IDLE: "idle",
    _P.STARTING: "construction",
    _P.RESETTING: "reset",
    _P.POSTED: "step",
    _P.STEPPING: "step",
    _P.CANCELLING: "cancelled step",
    _P.CALLING: "call",
    _P.ENDING: "close",
    _P.PAUSING: "pause",
}

FAILS_DURING: Mapping[Phase, str] = {
    phase: _LABELS[_P.STEPPING if phase is _P.CANCELLING else phase]
    for phase in (_P.STARTING, _P.RESETTING, _P.STEPPING, _P.CANCELLING, _P.CALLING)
}
"""The names by which a worker that reports a failure says what it was doing in these phases."""


class Change(str, Enum):
    """What changes a phase. The value is the label in the diagram."""

    BUILD = "construction is asked for"
    RESET = "reset is asked for, or follows a step"
    POST = "step is posted"
    STEP = "step is sent"
    TAKE_OVER = "posted step is looked after"
    CANCEL = "its timestep is not wanted"
    CALL = "call is sent"
    END = "worker is ended"
    PAUSE = "something is to follow later"
    SETTLE = "nothing is awaited any more"


CHANGES: Mapping[Change, Mapping[Phase, Phase]] = MappingProxyType(
    {
        Change.BUILD: dict.fromkeys(
            (_P.IDLE, _P.STEPPING, _P.CANCELLING, _P.ENDING, _P.PAUSING), _P.STARTING
        ),
        Change.RESET: dict.fromkeys(
            (_P.IDLE, _P.RESETTING, _P.STEPPING, _P.CANCELLING, _P.ENDING, _P.PAUSING),
            _P.RESETTING,
        ),
        # What an interrupt has left half done is done again: from POSTED to POSTED, say.
        Change.POST: dict.fromkeys((_P.IDLE, _P.POSTED), _P.POSTED),
        Change.STEP: dict.fromkeys((_P.IDLE, _P.STEPPING), _P.STEPPING),
        Change.TAKE_OVER: {_P.POSTED: _P.STEPPING},
        Change.CANCEL: {_P.STEPPING: _P.CANCELLING},
        Change.CALL: {_P.IDLE: _P.CALLING},
        Change.END: dict.fromkeys(Phase, _P.ENDING),
        Change.PAUSE: dict.fromkeys(Phase, _P.PAUSING),
        Change.SETTLE: dict.fromkeys(Phase, _P.IDLE),
    }
)

REPAIRED = (_P.STARTING, _P.CANCELLING, _P.ENDING, _P.PAUSING)
BEHIND_THE_CALLER = (_P.RESETTING, *REPAIRED)
"""Phases that go on while no step is gathered, and that somebody has to look after."""

BEFORE_THE_CALLER = bytes(set(Phase) - set(BEHIND_THE_CALLER))
"""All other phases: once they are deleted from a column, it is empty unless something goes on."""

ENDS = frozenset((_P.ENDING, _P.PAUSING))
COMING = frozenset((_P.STARTING, _P.RESETTING, _P.CANCELLING, *ENDS))
"""Phases of an env that will be in an episode, if it is not given up."""

AWAITED = frozenset((_P.STARTING, _P.RESETTING, _P.STEPPING, _P.CANCELLING, _P.CALLING))
"""Phases in which a reply is awaited."""


class Next(str, Enum):
    """What follows a pause, or the end of a host.

    A str because the hash of a plain Enum is computed in Python: slow.
    """

    NOTHING = "nothing"
    RESET = "a reset"
    RENEW_ENV = "a new env in the same worker"
    RENEW_HOST = "a new worker"
    BUILD = "its construction"
