"""What a trainer and its actors say to each other: lists of these, one list with each call.

A list goes as one `bytes`, which Ray carries as it is: at the parts of anything else it has code in
Python look.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from enum import IntEnum, unique
from typing import Any, NamedTuple


@unique
class Do(IntEnum):
    """What an actor is to do with an item."""

    START = 1
    """Start a host. Data: `Orders`."""
    SEND = 2
    """Have a host run a request. Data: `Frame`."""
    KILL = 3
    """End a host at once, or go further than that if it was killed before. No data."""
    CLOSE = 4
    """Have all hosts close their envs. Data: seconds that this may take."""
    POST = 5
    """Have steps be posted. Data: what is new in the block, see `mirror`. For no host."""
    ASK = 6
    """Have a host ring when it has done what was posted. No data."""


class Item(NamedTuple):
    """Something for an actor to do."""

    do: int
    host_id: int
    data: Any = None


class Node(NamedTuple):
    """Where an actor is: its first words.

    Attributes:
        node_id: as Ray names it.
        address: likewise.
        pid: of the actor's process.
        posts: steps can be posted there.
    """

    node_id: str
    address: str
    pid: int
    posts: bool = False


def packed(said: Sequence[Any]) -> bytes:
    """Return what is said with one call, in one piece."""
    return pickle.dumps(said, protocol=5)


def unpacked(data: bytes) -> Any:
    """Return what was `packed` by the other side: the trainer, or an actor that it has started."""
    return pickle.loads(data)  # noqa: S301 - over the trainer's own cluster
