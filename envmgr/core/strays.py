"""What still arrives in the shared block for envs that have left their lanes."""

from __future__ import annotations

from collections.abc import Sequence

from envmgr.core.arrivals import Arrivals
from envmgr.core.replies import BlockReplies, resets_after
from envmgr.core.slots import EnvSlot, Work
from envmgr.spaces import ValueMismatchError
from envmgr.wire.block import Block, token_of

_STEPS = (Work.STEPPING, Work.CANCELLING)
_RESETS = (Work.RESETTING,)


class Strays:
    """Applies replies in the block to the slots of envs, as if they had come by message.

    Args:
        slots: of all envs.
        arrivals: applies them.
    """

    def __init__(self, slots: Sequence[EnvSlot], arrivals: Arrivals) -> None:
        self._slots = slots
        self._arrivals = arrivals
        # By env_id: the token of the step that is awaited, or that the awaited reset follows.
        self._steps: dict[int, int] = {}
        self._resets: dict[int, int] = {}

    @property
    def are_awaited(self) -> bool:
        """Whether there is anything to `collect`."""
        return bool(self._steps or self._resets)

    @property
    def have_arrived(self) -> bool:
        """Whether `collect` has something to apply."""
        block = self._block
        return any(block.replies[i] == token for i, token in self._steps.items()) or any(
            block.resets[i] == token for i, token in self._resets.items()
        )

    def bind(self, block: Block, replies: BlockReplies) -> None:
        """Look at this block from now on."""
        self._block = block
        self._replies = replies

    def await_step(self, env_id: int, token: int) -> None:
        """Look out for the reply to a step, and for the reset that the host may begin after it."""
        self._steps[env_id] = self._resets[env_id] = token

    def await_reset(self, env_id: int, token: int) -> None:
        """Look out for the reset that the host has begun after a step."""
        self._resets[env_id] = token

    def break_off(self, env_id: int, reason: str) -> None:
        """An env's reply to a step is malformed: do not look at it again."""
        self._steps.pop(env_id, None)
        self._arrivals.break_off(self._slots[env_id], reason)

    def collect(self) -> None:
        """Apply what has arrived.

        What makes no sense ends its host, and that collects what it has replied for the others: so
        an env may be looked after already when its turn comes.
        """
        if self._steps:
            for env_id, token in list(self._steps.items()):
                if self._steps.get(env_id) == token:
                    self._collect_step(env_id, token)
        if self._resets:
            for env_id, token in list(self._resets.items()):
                if self._resets.get(env_id) == token:
                    self._collect_reset(env_id, token)

    def _collect_step(self, env_id: int, token: int) -> None:
        slot = self._slots[env_id]
        if not _is_awaited(slot, token, _STEPS):
            del self._steps[env_id]  # it came by message, or its host is gone
        elif self._block.replies[env_id] == token:
            del self._steps[env_id]
            if resets_after(int(self._block.flags[env_id])):
                self._resets[env_id] = token
            try:
                payload = self._replies.step(env_id)
            except ValueMismatchError as error:
                self._arrivals.break_off(slot, str(error))
            else:
                self._arrivals.stepped(slot, payload)

    def _collect_reset(self, env_id: int, token: int) -> None:
        slot = self._slots[env_id]
        if not _is_awaited(slot, token, _RESETS):
            if not _is_awaited(slot, token, _STEPS):
                del self._resets[env_id]
        elif self._block.resets[env_id] == token:
            del self._resets[env_id]
            try:
                payload = self._replies.reset(env_id)
            except ValueMismatchError as error:
                self._arrivals.break_off(slot, str(error))
            else:
                self._arrivals.reset_done(slot, payload)


def _is_awaited(slot: EnvSlot, token: int, works: Sequence[Work]) -> bool:
    return slot.work in works and token_of(slot.generation, slot.request_id) == token
