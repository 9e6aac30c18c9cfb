"""An env's seat at the shared block: what is posted in its row reaches the env through it.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from envmgr.env.contract import TOLD
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.env.steps import step_in_two
from envmgr.spaces import Layout
from envmgr.types import EnvTimestep
from envmgr.wire.block import ENDING_SHIFT, REWARD_SHIFT
from envmgr.wire.rewards import kind_of_reward
from envmgr.worker.batches import RunningBatch
from envmgr.worker.rows import RunningRow
from envmgr.worker.running import RunningEnv
from envmgr.worker.sinks import BlockSink

_FIELDS = EnvTimestep._fields
_Codes = dict[np.dtype[Any], list[int]]
"""Flags of replies by place, for each dtype of an array that is the reward."""

Step = Callable[[int, Any], bool | None]
"""Takes a step and answers it, given its token and the action; true if a reset follows later."""


@dataclass(frozen=True, eq=False)
class Seat:
    """One env's row of the block.

    Attributes:
        sink: answers there.
        step: takes a step.
        order_reset: has the env reset after the steps of this batch, and the token answered.
        takes_any_number: an action that is a number is converted by the env in any case.
        running: the env.
        action_kind: which of the kinds of actions in the block it takes.
    """

    sink: BlockSink
    step: Step
    order_reset: Callable[[BlockSink, int], None]
    takes_any_number: bool
    running: RunningEnv
    action_kind: int = 0

    @property
    def batch(self) -> RunningBatch | None:
        """The batched env that it is a row of; None for an env of its own."""
        return self.running.batch if isinstance(self.running, RunningRow) else None

    @property
    def row(self) -> int:
        """Where it is."""
        return self.sink.row


def seat_of(running: RunningEnv, sink: BlockSink, action_kind: int = 0) -> Seat:
    """Return the seat of an env, whose writer is attached."""
    actions = sink.block.plan.layouts[action_kind]
    step = _shortcut(running, sink, actions) or partial(running.step, sink)
    takes_any = isinstance(running.env, GymnasiumEnv)
    return Seat(sink, step, running.order_reset, takes_any, running, action_kind)


def _shortcut(running: RunningEnv, sink: BlockSink, actions: Layout) -> Step | None:
    """Return a short `step` for envs whose observation is one array; None for others.

    It does at once what `take_step` does in several functions, and leaves odd steps to that.
    """
    writer = running.writer
    if writer.lone is None or type(running) is not RunningEnv or _converts(running, actions):
        return None
    take_step, fail_step = running.take_step, running.fail_step
    row, rewards, flags, replies = sink.row, sink.rewards, sink.flags, sink.replies
    dtype, shape, targets, _, _, after, finite = writer.lone
    env, step_result_of, gives_five = step_in_two(running.env)
    codes = [place | (TOLD << ENDING_SHIFT if gives_five else 0) for place in range(len(after))]
    codes_of_arrays = {} if gives_five else _with_arrays(codes)
    ndarray, isfinite, any_reward = np.ndarray, math.isfinite, not running.refuses_non_finite

    def step(token: int, action: Any) -> bool | None:
        try:
            result = env.step(action)
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            return fail_step(sink, token, error)
        if gives_five and type(result) is tuple and len(result) == 5:
            obs, reward, terminated, truncated, info = result
        elif not gives_five and getattr(result, "_fields", None) == _FIELDS:
            (obs, reward, terminated, info), truncated = result, False
        else:
            return take_step(sink, token, step_result_of, result)
        if (
            terminated is truncated is False
            and type(info) is dict
            and not info
            and type(obs) is ndarray
            and obs.dtype == dtype
            and obs.shape == shape
            and (finite is None or finite(obs) == 0.0)
        ):
            code: list[int] | None = codes
            if type(reward) is not float:
                reward, code = _number_of(reward, codes_of_arrays)
            if code and (any_reward or isfinite(reward)):
                place = writer.step_place
                targets[place][...] = obs
                writer.step_place = after[place]
                rewards[row] = reward
                flags[row] = code[place]
                replies[row] = token  # last: from now on the reply counts
                return None
        return take_step(sink, token, step_result_of, result)

    return step


def _number_of(reward: Any, codes: _Codes) -> tuple[Any, list[int] | None]:
    """Return the number in an array of one, and the flags for it; None if it is no such array."""
    found = None
    if type(reward) is np.ndarray and reward.shape == (1,):
        found = codes.get(reward.dtype)
    return (reward.item() if found else reward), found


def _converts(running: RunningEnv, actions: Layout) -> bool:
    """Whether the env expects Python's numbers where actions in the block have numpy's."""
    is_gymnasium = type(running.env) is GymnasiumEnv
    return is_gymnasium and any(leaf.is_number and leaf.path for leaf in actions.leaves)


def _with_arrays(codes: list[int]) -> _Codes:
    """Return the flags of the same replies, if the reward is an array of one number of a dtype."""
    arrays = [np.zeros(1, dtype) for dtype in (np.float32, np.float64)]
    return {
        array.dtype: [code | (kind_of_reward(array) or 0) << REWARD_SHIFT for code in codes]
        for array in arrays
    }
