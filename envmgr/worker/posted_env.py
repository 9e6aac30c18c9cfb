"""One env's row of the shared block, on the child side: takes a step and answers it there.

A step is answered in the block, without a message, and so is the reset that follows the end of an
episode. What the block has no room for (failures, large or odd infos, unusual rewards) goes by
message, exactly as the answer to a step that came by message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from envmgr.env.contract import TOLD, Outcome, info_of
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.wire.block import (
    AFTER_SHIFT,
    DONE,
    ENDING_SHIFT,
    HAS_INFO,
    INFO_BYTES,
    REWARD_SHIFT,
    REWARD_TYPES,
    Block,
    items,
    request_of,
)
from envmgr.wire.infos import InfoEncoder
from envmgr.wire.messages import AfterStep, Message, Op
from envmgr.worker.observations import LoneLeaf, ObservationWriter

_REWARD_KINDS = {kind: number for number, kind in enumerate(REWARD_TYPES)}
_MOST_EXACT = 1 << 53

Answer = tuple[Sequence[Any], bool] | None
"""What follows a step besides what is in the block: see `PostedEnv`."""


class Stepped(Protocol):
    """What this module needs of an env of a host; see `HostedEnv`."""

    env_id: int
    propagated: tuple[type[BaseException], ...]
    checks_rewards: bool
    notices: list[str]

    @property
    def outcome(self) -> Callable[[Any], Outcome]:
        """Take one action."""
        ...

    @property
    def resets_inplace(self) -> bool:
        """Whether a step that ends an episode is complete with the next one."""
        ...

    def write_observation(self, observation: Any, *, of_reset: bool = False) -> Any:
        """Commit an observation."""
        ...

    def settle(self, outcome: Outcome) -> tuple[Any, AfterStep]:
        """Check a step and commit its observation."""
        ...

    def reset_again(self) -> tuple[Any, dict[str, Any]]:
        """Reset as the plan says."""
        ...

    def abnormal(self, message: Message, ending: int, info: Any) -> Any:
        """Report a step that the env calls abnormal."""
        ...

    def reply(self, message: Message, op: Op, payload: Any) -> Any:
        """Encode a reply."""
        ...

    def failure(self, message: Message, error: BaseException, during: str) -> Any:
        """Encode the report of an exception."""
        ...

    def take_notices(self, message: Message) -> list[Any]:
        """Encode what is to be logged."""
        ...


class PostedEnv:
    """One env's row of the block.

    Args:
        host_env: runs the env.
        env: the env itself, as `adapt.as_base_env` returned it.
        writer: writes its observations; attached.
        block: the columns.
        row: its row.

    Attributes:
        env_id: the env's.
        step: takes a step and answers it: see `_general_step`, of which it may be a shortcut.
        takes_any_number: an action that is a number is converted by the env in any case.
        first_token: what was posted in this row before, and is not for this env.
    """

    def __init__(
        self, host_env: Stepped, env: Any, writer: ObservationWriter, block: Block, row: int
    ) -> None:
        self.block = block
        self.row = row
        self.env_id = host_env.env_id
        self.first_token = int(block.requests[row])
        self.takes_any_number = isinstance(env, GymnasiumEnv)
        self._env = host_env
        self._outcome = host_env.outcome
        self._write = host_env.write_observation
        self._encoder = InfoEncoder(INFO_BYTES)
        self._rewards = items(block.rewards)
        self._flags = items(block.flags)
        self._replies = items(block.replies)
        self.step: Callable[[int, Any], Answer] = self._general_step
        # Numbers inside of dicts and tuples are numpy's here; such envs expect Python's.
        converts = any(leaf.is_number and leaf.path for leaf in block.plan.actions.leaves)
        plain = type(env) is GymnasiumEnv and not converts
        if plain and writer.lone is not None:
            self.step = self._shortcut(env, writer, writer.lone)

    def _shortcut(self, env: GymnasiumEnv, writer: ObservationWriter, lone: LoneLeaf) -> Any:
        """Return a `step` for gymnasium envs whose observation is one array.

        It does in one function what `_general_step` does in a dozen, for steps without anything to
        them, and leaves all others to `_answered`. Actions in the block are what the env expects.
        """
        row, rewards, flags, replies = self.row, self._rewards, self._flags, self._replies
        dtype, shape, targets, after, finite = lone
        takes_any_reward, isfinite = not self._env.checks_rewards, math.isfinite
        codes = [slot | TOLD << ENDING_SHIFT for slot in range(len(after))]
        ndarray, answered = np.ndarray, self._answered

        def step(token: int, action: Any) -> Answer:
            try:
                result = env.env.step(action)
            except BaseException as error:  # as in `_general_step`
                return self._raised(token, error)
            if type(result) is tuple and len(result) == 5:
                obs, reward, terminated, truncated, info = result
                if (
                    terminated is False
                    and truncated is False
                    and type(reward) is float
                    and type(info) is dict
                    and not info
                    and type(obs) is ndarray
                    and obs.dtype == dtype
                    and obs.shape == shape
                    and (finite is None or finite(obs) == 0.0)
                    and (takes_any_reward or isfinite(reward))
                ):
                    slot = writer.step_slot
                    targets[slot][...] = obs
                    writer.step_slot = after[slot]
                    rewards[row] = reward
                    flags[row] = codes[slot]
                    replies[row] = token  # last: from now on the reply counts
                    return None
            return answered(token, env.outcome_of, result)

        return step

    def _general_step(self, token: int, action: Any) -> Answer:
        """Take a step and answer it.

        Args:
            token: of the request.
            action: what the env gets.

        Returns:
            None for a step like any other; else encoded messages to send, and whether a reset is to
            follow.
        """
        return self._answered(token, self._outcome, action)

    def _answered(self, token: int, outcome_of: Callable[[Any], Outcome], argument: Any) -> Answer:
        try:
            return self._answer(token, outcome_of(argument))
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            return self._raised(token, error)

    def _raised(self, token: int, error: BaseException) -> Answer:
        if isinstance(error, self._env.propagated):
            raise error
        return [self._env.failure(self._message(token), error, "step")], False

    def _answer(self, token: int, outcome: Outcome) -> Answer:
        _, reward, done, ending, info = outcome
        env = self._env
        if info:
            abnormal = env.abnormal(self._message(token), ending, info)
            if abnormal is not None:
                return [abnormal], False
        slot, after = env.settle(outcome)
        kind, data = _reward_kind(reward), self._encoded(info)
        sent: list[Any] = []
        by_message = kind is None or data is None
        if by_message:
            payload = (slot, reward, done, info_of(ending, info), int(after))
            sent = [env.reply(self._message(token), Op.STEPPED, payload)]
        if env.notices:
            sent = [*env.take_notices(self._message(token)), *sent]
        resets = after is AfterStep.RESETS
        if resets and env.resets_inplace and not by_message:  # the step counts when both are there
            sent += self.begin_episode(token)
            resets = False
        if kind is not None and data is not None:
            flags = slot | ending << ENDING_SHIFT | int(after) << AFTER_SHIFT
            flags |= kind << REWARD_SHIFT | (DONE if done else 0)
            if data:
                self.block.infos[self.row, : len(data)] = memoryview(data)
                flags |= HAS_INFO
            self._rewards[self.row] = float(reward)
            self._flags[self.row] = flags
            self._replies[self.row] = token
        return sent, resets

    def begin_episode(self, token: int) -> Sequence[Any]:
        """Run the automatic reset after a step and answer it; return messages to send."""
        env, sent = self._env, []
        try:
            observation, info = env.reset_again()
            slot = self._write(observation, of_reset=True)
            data = self._encoded(info)
            if data is None:
                sent = [env.reply(self._message(token), Op.RESET_DONE, (slot, info))]
        except env.propagated:
            raise
        except BaseException as error:  # as in `step`
            return [env.failure(self._message(token), error, "reset")]
        if data is not None:
            flags = slot
            if data:
                self.block.reset_infos[self.row, : len(data)] = memoryview(data)
                flags |= HAS_INFO
            self.block.reset_flags[self.row] = flags
            self.block.resets[self.row] = token
        if env.notices:
            sent = [*env.take_notices(self._message(token)), *sent]
        return sent

    def _encoded(self, info: Any) -> bytes | None:
        if type(info) is not dict:
            return None
        return self._encoder.encode(info) if info else b""

    def _message(self, token: int) -> Message:
        generation, request_id = request_of(token)
        return Message(Op.STEP, self._env.env_id, generation, request_id, None)


def _reward_kind(reward: Any) -> int | None:
    """Return which of `REWARD_TYPES` a reward is; None if it is no number that is kept exactly."""
    kind = _REWARD_KINDS.get(type(reward))
    if kind is None or (type(reward) is not float and not -_MOST_EXACT < reward < _MOST_EXACT):
        return None
    return kind
