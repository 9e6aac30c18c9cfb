"""Replies of single envs, read from the shared block. What a worker wrote there is not trusted."""

from __future__ import annotations

from collections.abc import Collection, Container
from contextlib import suppress
from typing import Any

import numpy as np

from envmgr.core.payloads import LATE_ALONE
from envmgr.core.phases import Phase
from envmgr.core.slots import Record
from envmgr.env.contract import info_of
from envmgr.spaces import ValueMismatchError
from envmgr.wire.arenas import Places
from envmgr.wire.block import (
    AFTER_BITS,
    AFTER_SHIFT,
    DONE,
    ENDING_BITS,
    ENDING_SHIFT,
    HAS_INFO,
    PLACE_BITS,
    REWARD_BITS,
    REWARD_SHIFT,
    TOLD_BIT,
    Block,
    items,
)
from envmgr.wire.infos import InfoDecoder
from envmgr.wire.messages import AfterStep
from envmgr.wire.rewards import KINDS, restored

PLAIN_END = DONE | TOLD_BIT | AfterStep.RESETS << AFTER_SHIFT
LATE = AfterStep.RESETS_LATE << AFTER_SHIFT
LATE_END = DONE | TOLD_BIT | LATE
PLAIN_END_BITS = DONE | TOLD_BIT | AFTER_BITS | HAS_INFO | REWARD_BITS
"""An episode has ended, and its host begins the next one, soon or late: with these bits and none of
the others there is nothing else to the reply, if its reward is a float, as kind 0 is."""

_RESETS = (AfterStep.RESETS, AfterStep.RESETS_LATE)
_STEPS = (np.uint8(Phase.STEPPING), np.uint8(Phase.CANCELLING))
_RESETTING = np.uint8(Phase.RESETTING)


def after_of(flag: int) -> int:
    """Return what a host does after the step with these flags: an `AfterStep`."""
    return (flag & AFTER_BITS) >> AFTER_SHIFT


def resets_after(flag: int) -> bool:
    """Return whether a host resets the env after the step with these flags."""
    return after_of(flag) in _RESETS


class BlockReplies:
    """Reads what messages would carry out of the block.

    Args:
        block: the columns.
        places: where observations are.
        together: the envs whose next episodes may begin late.
    """

    def __init__(self, block: Block, places: Places, together: Container[int] = ()) -> None:
        self._block = block
        self._places = places
        self._together = together
        self._of_resets = range(places.steps, places.count)
        self._reset_flags = items(block.reset_flags)
        self._decoder = InfoDecoder()

    # -- who has replied ----------------------------------------------------------------------

    def has_step(self, env_id: int, token: int) -> bool:
        """Whether an env has replied to this step."""
        return bool(self._block.replies[env_id] == token)

    def has_reset(self, env_id: int, token: int) -> bool:
        """Whether an env has been reset: as was asked for, or after this step."""
        return bool(self._block.resets[env_id] == token)

    def steps_of(self, record: Record) -> list[int]:
        """Return the envs that have replied to steps that are looked after by themselves."""
        found: list[int] = []
        for phase in _STEPS:
            found += record.answered(self._block.replies, phase).nonzero()[0].tolist()
        return found

    def resets_of(self, record: Record) -> list[int]:
        """Return the envs whose reset is awaited, and is over."""
        found = record.answered(self._block.resets, _RESETTING)
        env_ids: list[int] = found.nonzero()[0].tolist()
        return env_ids

    def running_in(self, index: int) -> int:
        """Return the env that a host says it was running when something happened to it.

        It is -1 for none. From now on that host runs nothing: the next one goes on there.
        """
        running = int(self._block.running[index]) - 1
        self._block.running[index] = 0
        return running

    # -- what they have replied ---------------------------------------------------------------

    def resets(self, env_ids: Collection[int]) -> tuple[dict[int, int], dict[int, dict[str, Any]]]:
        """Return where the observations of resets are, and their infos, by env_id.

        Who says nothing has no info; who is missing has replied what is malformed.
        """
        flags, places = self._reset_flags, self._of_resets
        found = {env_id: flag for env_id in env_ids if (flag := flags[env_id]) in places}
        infos: dict[int, dict[str, Any]] = {}
        if len(found) < len(env_ids):
            for env_id in [i for i in env_ids if i not in found]:
                with suppress(ValueMismatchError):
                    found[env_id], infos[env_id] = self.reset(env_id)
        return found, infos

    def detail(self, env_id: int, flag: int) -> tuple[Any, Any]:
        """Return the info of a step's reply and its reward.

        Raises:
            ValueMismatchError: the reply is malformed.
        """
        if flag & PLACE_BITS >= self._places.steps:
            raise ValueMismatchError(f"there is no place {flag & PLACE_BITS} for steps")
        if after_of(flag) > max(AfterStep):
            raise ValueMismatchError("it says something unknown of what follows a step")
        if flag & AFTER_BITS == LATE and env_id not in self._together:
            raise ValueMismatchError(LATE_ALONE)
        info: dict[str, Any] = {}
        if flag & HAS_INFO:
            info = self._decoder.decode(self._block.infos[env_id].tobytes())
        kind = (flag & REWARD_BITS) >> REWARD_SHIFT
        if kind >= KINDS:
            raise ValueMismatchError(f"there is no kind {kind} of rewards")
        if kind == 0:
            return info, float(self._block.rewards[env_id])
        numbers = self._block.reward_numbers(kind, slice(env_id, env_id + 1))
        try:
            return info, restored(kind, numbers)[0]
        except (ValueError, OverflowError) as error:  # no integer is NaN or infinite
            raise ValueMismatchError(f"its reward cannot be {numbers[0]}") from error

    def step(self, env_id: int) -> tuple[int, Any, bool, Any, int]:
        """Return the reply to a step as the payload of STEPPED.

        Raises:
            ValueMismatchError: the reply is malformed.
        """
        flag = int(self._block.flags[env_id])
        info, reward = self.detail(env_id, flag)
        info = info_of((flag & ENDING_BITS) >> ENDING_SHIFT, info)
        return flag & PLACE_BITS, reward, bool(flag & DONE), info, after_of(flag)

    def reset(self, env_id: int) -> tuple[int, dict[str, Any]]:
        """Return the reply to a reset as the payload of RESET_DONE.

        Raises:
            ValueMismatchError: the reply is malformed.
        """
        flag = int(self._block.reset_flags[env_id])
        place = flag & PLACE_BITS
        if not self._places.steps <= place < self._places.count:
            raise ValueMismatchError(f"there is no place {place} for resets")
        if not flag & HAS_INFO:
            return place, {}
        return place, self._decoder.decode(self._block.reset_infos[env_id].tobytes())
