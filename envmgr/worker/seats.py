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

from envmgr.env import adapt
from envmgr.env.contract import TOLD
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.types import EnvTimestep
from envmgr.wire.block import ENDING_SHIFT, REWARD_SHIFT
from envmgr.wire.rewards import kind_of_reward
from envmgr.worker.batches import RunningBatch
from envmgr.worker.rows import RunningRow
from envmgr.worker.running import RunningEnv
from envmgr.worker.sinks import BlockSink

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
    """

    sink: BlockSink
    step: Step
    order_reset: Callable[[BlockSink, int], None]
    takes_any_number: bool
    running: RunningEnv

    @property
    def batch(self) -> RunningBatch | None:
        """The batched env that it is a row of; None for an env of its own."""
        return self.running.batch if isinstance(self.running, RunningRow) else None

    @property
    def row(self) -> int:
        """Where it is."""
        return self.sink.row


def seat_of(running: RunningEnv, sink: BlockSink) -> Seat:
    """Return the seat of an env, whose writer is attached."""
    step = _shortcut(running, sink) or partial(running.step, sink)
    return Seat(sink, step, running.order_reset, isinstance(running.env, GymnasiumEnv), running)


def _shortcut(running: RunningEnv, sink: BlockSink) -> Step | None:
    """Return a short `step` for envs whose observation is one array; None for others.

    It does in one function what `take_step` does in several, for steps without anything to them,
    and leaves all others to that. Actions in the block are what the env expects.
    """
    writer, is_gymnasium = running.writer, type(running.env) is GymnasiumEnv
    # Numbers inside of dicts and tuples are numpy's here; gymnasium envs expect Python's.
    converts = any(leaf.is_number and leaf.path for leaf in sink.block.plan.actions.leaves)
    is_odd = type(running) is not RunningEnv or (is_gymnasium and converts)
    if is_odd or writer.lone is None:
        return None
    take_step, fail_step = running.take_step, running.fail_step
    takes_any_reward = not running.refuses_non_finite
    row, rewards, flags, replies = sink.row, sink.rewards, sink.flags, sink.replies
    dtype, shape, targets, _, after, finite = writer.lone
    env, outcome_of, gives_five = adapt.step_in_two(running.env)
    codes = [place | (TOLD << ENDING_SHIFT if gives_five else 0) for place in range(len(after))]
    codes_of_arrays, fields = _with_arrays(codes), EnvTimestep._fields
    ndarray, isfinite = np.ndarray, math.isfinite

    def step(token: int, action: Any) -> bool | None:
        try:
            result = env.step(action)
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            return fail_step(sink, token, error)
        if gives_five and type(result) is tuple and len(result) == 5:
            obs, reward, terminated, truncated, info = result
        elif not gives_five and getattr(result, "_fields", None) == fields:
            (obs, reward, terminated, info), truncated = result, False
        else:
            return take_step(sink, token, outcome_of, result)
        if (
            terminated is False
            and truncated is False
            and type(info) is dict
            and not info
            and type(obs) is ndarray
            and obs.dtype == dtype
            and obs.shape == shape
            and (finite is None or finite(obs) == 0.0)
        ):
            code: list[int] | None = codes
            if type(reward) is not float:
                is_one = not gives_five and type(reward) is ndarray and reward.shape == (1,)
                code = codes_of_arrays.get(reward.dtype) if is_one else None
                reward = reward.item() if code else reward
            if code and (takes_any_reward or isfinite(reward)):
                place = writer.step_place
                targets[place][...] = obs
                writer.step_place = after[place]
                rewards[row] = reward
                flags[row] = code[place]
                replies[row] = token  # last: from now on the reply counts
                return None
        return take_step(sink, token, outcome_of, result)

    return step


def _with_arrays(codes: list[int]) -> dict[np.dtype[Any], list[int]]:
    """Return the flags of the same replies, if the reward is an array of one number of a dtype."""
    arrays = [np.zeros(1, dtype) for dtype in (np.float32, np.float64)]
    return {
        array.dtype: [code | (kind_of_reward(array) or 0) << REWARD_SHIFT for code in codes]
        for array in arrays
    }
