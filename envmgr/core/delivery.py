"""What a call is about to return, kept until it has returned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # which hosts stand on, and these on calls
    from envmgr.core.selection import Selection


class Ending(NamedTuple):
    """An episode that ended with a timestep that is handed out.

    Attributes:
        env_id: the env.
        flag: of the reply.
        episodes_done: how many episodes the env has ended with it.
    """

    env_id: int
    flag: int
    episodes_done: int


make_ending = partial(tuple.__new__, Ending)


class Fate:
    """What became of timesteps that were handed out; who counts them keeps this.

    Attributes:
        given_back: an interrupt has ended the call, and they are owed again.
    """

    __slots__ = ("given_back",)

    def __init__(self) -> None:
        self.given_back = False


class Hand:
    """Timesteps that were handed out.

    Nobody keeps it longer than `Delivery` does: with the frame of the caller goes all that the
    functions around it have.

    Attributes:
        result: `{env_id: EnvTimestep}`, or an `ArrayBatch`.
        selection: the envs whose replies were taken out of the block; None if there are none.
        kept: the other envs.
        count: how many timesteps there are.
        endings: of episodes.
        odd: those of them that are to be followed up, which is not to be interrupted.
        n_before: timesteps delivered since launch, before these.
        n_episodes: episodes ended since launch, these included.
        caller: the frame of the public call that is about to return them.
        is_done: the envs were moved on.
        fate: what is to become of them, if somebody wants to know.
    """

    __slots__ = (
        "caller",
        "count",
        "endings",
        "fate",
        "is_done",
        "kept",
        "n_before",
        "n_episodes",
        "odd",
        "result",
        "selection",
    )

    def __init__(
        self,
        result: Any,
        selection: Selection | None,
        kept: Sequence[int],
        endings: Sequence[Ending],
        n_before: int,
        n_episodes: int,
        caller: FrameType | None,
    ) -> None:
        self.result = result
        self.selection = selection
        self.kept = kept
        self.count = len(kept) + (0 if selection is None else selection.count)
        self.endings = endings
        self.odd: Sequence[Ending] = ()
        self.n_before = n_before
        self.n_episodes = n_episodes
        self.caller = caller
        self.is_done = False
        self.fate: Fate | None = None


class Delivery:
    """What is in the hands of the call that is under way.

    The last thing that a public call does before it returns is to let go of it. So a call that an
    interrupt has ended has delivered nothing: what it had is found here, and given back.

    Attributes:
        caller: the frame of the public call under way; it stays after one that an interrupt has
            kept from ending as it should.
        in_hand: the timesteps; None if there are none. They stay for a moment longer than
            `caller`, until the call returns.
    """

    __slots__ = ("caller", "in_hand")

    def __init__(self) -> None:
        self.caller: FrameType | None = None
        self.in_hand: Hand | None = None

    @property
    def fate(self) -> Fate | None:
        """What is to become of the timesteps in hand."""
        hand = self.in_hand
        if hand is None:
            return None
        if hand.fate is None:
            hand.fate = Fate()
        return hand.fate

    @property
    def count(self) -> int:
        """How many timesteps that are."""
        hand = self.in_hand
        return 0 if hand is None else hand.count


def is_run(frame: FrameType | None) -> bool:
    """Whether any thread runs a function; its local variables are let go of if not.

    This is asked in one go. Who looks for the frame among those that threads run may be led astray
    by what these do meanwhile.
    """
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False
