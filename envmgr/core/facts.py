"""Attributes of an `EnvSlot` that are read and written where the record keeps them for all envs.

So what is done at the end and the beginning of episodes is done for many envs in one go, without
looking at the slot of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:  # it has these
    from envmgr.core.slots import EnvSlot

T = TypeVar("T")


class Item:
    """A number that the record has for every env.

    Args:
        column: the list of them.
    """

    def __init__(self, column: str) -> None:
        self._column = column

    def __get__(self, slot: EnvSlot, kind: Any = None) -> int:
        number: int = getattr(slot.record, self._column)[slot.env_id]
        return number

    def __set__(self, slot: EnvSlot, number: int) -> None:
        getattr(slot.record, self._column)[slot.env_id] = number


class Member:
    """What is true of few envs.

    Args:
        members: the set of them.
    """

    def __init__(self, members: str) -> None:
        self._members = members

    def __get__(self, slot: EnvSlot, kind: Any = None) -> bool:
        return slot.env_id in getattr(slot.record, self._members)

    def __set__(self, slot: EnvSlot, is_true: bool) -> None:
        members: set[int] = getattr(slot.record, self._members)
        if is_true:
            members.add(slot.env_id)
        else:
            members.discard(slot.env_id)


class Kept(Generic[T]):
    """What there is of few envs.

    Args:
        kept: where it is, by env_id.
        nothing: returns what stands for nothing, and is not kept.
    """

    def __init__(self, kept: str, nothing: Callable[[], T]) -> None:
        self._kept = kept
        self._nothing = nothing

    def __get__(self, slot: EnvSlot, kind: Any = None) -> T:
        found: T | None = getattr(slot.record, self._kept).get(slot.env_id)
        return self._nothing() if found is None else found

    def __set__(self, slot: EnvSlot, value: T) -> None:
        kept: dict[int, T] = getattr(slot.record, self._kept)
        if value:
            kept[slot.env_id] = value
        else:
            kept.pop(slot.env_id, None)


class Passing(Generic[T]):
    """What holds for few envs, and no longer than until their next reset has succeeded.

    Args:
        otherwise: what holds for the others.
    """

    def __init__(self, otherwise: T) -> None:
        self._otherwise = otherwise
        self._name = ""

    def __set_name__(self, kind: Any, name: str) -> None:
        self._name = name

    def __get__(self, slot: EnvSlot, kind: Any = None) -> T:
        facts = slot.record.passing.get(slot.env_id)
        found: T = self._otherwise if facts is None else facts.get(self._name, self._otherwise)
        return found

    def __set__(self, slot: EnvSlot, value: T) -> None:
        passing = slot.record.passing
        if value != self._otherwise:
            passing.setdefault(slot.env_id, {})[self._name] = value
        elif slot.env_id in passing:
            passing[slot.env_id].pop(self._name, None)
