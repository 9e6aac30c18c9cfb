"""What a trainer and its actors say to each other: lists of these, one list with each call."""

from __future__ import annotations

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


class Item(NamedTuple):
    """Something for an actor to do."""

    do: int
    host_id: int
    data: Any = None


class Node(NamedTuple):
    """Where an actor is: its first words."""

    node_id: str
    address: str
    pid: int
