"""What a call is about to return, kept until it has returned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

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


class Hand:
    """Timesteps that were handed out.

    Attributes:
        result: `{env_id: EnvTimestep}`, or an `ArrayBatch`.
        selection: the envs whose replies were taken out of the block; None if there are none.
        kept: the other envs.
        count: how many timesteps there are.
        endings: of episodes.
        odd: those of them that are to be followed up, which is not to be interrupted.
        n_delivered: timesteps delivered since launch, these included.
        n_episodes: episodes ended since launch, these included.
        is_done: the envs were moved on.
        given_back: an interrupt has ended the call, and they are owed again.
    """

    __slots__ = (
        "count",
        "endings",
        "given_back",
        "is_done",
        "kept",
        "n_delivered",
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
        n_delivered: int,
        n_episodes: int,
    ) -> None:
        self.result = result
        self.selection = selection
        self.kept = kept
        self.count = len(kept) + (0 if selection is None else selection.count)
        self.endings = endings
        self.odd: Sequence[Ending] = ()
        self.n_delivered = n_delivered
        self.n_episodes = n_episodes
        self.is_done = False
        self.given_back = False


class Delivery:
    """What is in the hands of the call that is under way.

    The last thing that a public call does before it returns is to let go of it. So a call that an
    interrupt has ended has delivered nothing: what it had is found here, and given back.

    Attributes:
        in_hand: the timesteps; None if there are none.
    """

    __slots__ = ("in_hand",)

    def __init__(self) -> None:
        self.in_hand: Hand | None = None

    @property
    def count(self) -> int:
        """How many timesteps that are."""
        hand = self.in_hand
        return 0 if hand is None else hand.count
