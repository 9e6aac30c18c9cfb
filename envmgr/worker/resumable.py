"""An env whose state is saved in its manager now and then, for one that takes its place.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

from envmgr.env import states
from envmgr.env.contract import StepResult
from envmgr.wire.messages import AfterStep, Message, Op, SavedEnv
from envmgr.worker.interrupts import pass_on
from envmgr.worker.running import RunningEnv, Surroundings
from envmgr.worker.sinks import MessageSink


class ResumableEnv(RunningEnv):
    """Saves its state every `save_every` steps of an episode.

    Args:
        env: as of `RunningEnv`.
        given: likewise.

    Raises:
        NoStateError: there is no way to take its state.
    """

    def __init__(self, env: Any, given: Surroundings) -> None:
        super().__init__(env, given)
        self._every: float = given.settings.save_every or math.inf
        self._copies = given.settings.copies_states
        self._take_action = self.step_result
        self.step_result = self._noted
        self._obs: Any = None
        self._episode = 0
        self._n_steps = 0
        try:
            states.refuse(env, copies=self._copies)
        except states.NoStateError:
            self.close()
            raise

    def _noted(self, action: Any) -> StepResult:
        step_result = self._take_action(action)
        self._obs = step_result[0]
        return step_result

    def take_step(
        self,
        sink: MessageSink,
        key: Any,
        step_result_of: Callable[[Any], StepResult],
        argument: Any,
    ) -> bool:
        """Take a step, as `RunningEnv` does, and save what has come of it if that is due."""
        self._n_steps += 1
        follows = super().take_step(sink, key, step_result_of, argument)
        if self._n_steps and self._n_steps % self._every == 0:
            self._save(sink, key)
        return follows

    def _save(self, sink: MessageSink, key: Any) -> None:
        try:
            state = states.take(self.env, copies=self._copies)
            obs = copy.deepcopy(self._obs)
            saved = SavedEnv(state, obs, {"resumed": True}, episode=self._episode)
            sink.send(sink.reply(key, Op.SAVED, saved))
        except Exception as error:  # of its own methods, of what is pickled or sent
            pass_on(error, self._given.settings)
            self._every = math.inf
            self._notice_cast(f"its state cannot be saved, it will not be resumed: {error}")

    # An episode that has ended, or failed, is not saved any more; the next one counts anew.

    def _after_step(self) -> AfterStep:
        self._n_steps = 0
        return super()._after_step()

    def fail_step(self, sink: MessageSink, key: Any, error: BaseException) -> bool:
        """Report that a step has raised."""
        self._n_steps = 0
        return super().fail_step(sink, key, error)

    def fail_abnormal(self, sink: MessageSink, key: Any, info: Any) -> bool:
        """Report that the env has called its step abnormal."""
        self._n_steps = 0
        return super().fail_abnormal(sink, key, info)

    def reset(self, message: Message) -> None:
        """Run RESET and answer it."""
        self._episode, self._n_steps = message.payload.episode, 0
        super().reset(message)

    def _begin(self, sink: MessageSink, key: Any) -> Sequence[Any]:
        self._episode += 1
        return super()._begin(sink, key)
