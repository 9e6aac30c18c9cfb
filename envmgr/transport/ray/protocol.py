"""What a trainer and its actors say to each other.

A call to an actor takes a list of requests there, and brings a list of replies back. Each list
travels as one `bytes` object, which Ray carries unchanged; Ray would look at every part of any
other object, in Python code.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from enum import IntEnum, unique
from typing import Any, NamedTuple


@unique
class ActorOp(IntEnum):
    """What an actor is asked to do."""

    START = 1
    """Start a host. Data: its `WorkerSetup`."""
    SEND = 2
    """Pass a request on to a host. Data: its `Frame`."""
    KILL = 3
    """End a host at once; for a host that was killed before, go further than that. No data."""
    CLOSE = 4
    """Close the envs of all hosts. Data: the seconds that this may take."""
    POST = 5
    """Write what is new in the block; see `mirror`. Data: the new parts. Any host_id will do."""
    ASK = 6
    """Let a host ring when it has done what was posted for it. No data."""


class ActorRequest(NamedTuple):
    """One thing that an actor is asked to do."""

    op: int
    host_id: int
    data: Any = None


class Node(NamedTuple):
    """Where an actor runs: the first thing that it sends.

    Attributes:
        node_id: the id of the node in Ray.
        address: the address of the node in Ray.
        pid: the actor's process.
        posts: whether steps can be posted in memory there.
    """

    node_id: str
    address: str
    pid: int
    posts: bool = False


def packed(said: Sequence[Any]) -> bytes:
    """Return what one call carries, as one object."""
    return pickle.dumps(said, protocol=5)


def unpacked(data: bytes) -> Any:
    """Return what the other side has `packed`: the trainer, or an actor that it has started."""
    return pickle.loads(data)  # noqa: S301 - over the trainer's own cluster
