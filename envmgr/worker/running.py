"""An env that is built: takes steps, is reset, and has both answered.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from envmgr.env import adapt, states
from envmgr.env.contract import EnvContractError, StepResult, env_name, info_of
from envmgr.env.steps import step_function
from envmgr.spaces.agents import random_action
from envmgr.types import is_abnormal
from envmgr.wire.hosts import HostSettings
from envmgr.wire.messages import (
    UNANSWERED,
    AfterStep,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    RemoteFailure,
    ResetOrder,
)
from envmgr.worker.checks import check_reward
from envmgr.worker.interrupts import pass_on
from envmgr.worker.observations import ObservationWriter
from envmgr.worker.sinks import MessageSink

_NOTHING_KEPT = RemoteFailure(FailureKind.PROTOCOL, "reset", message="no reset was kept")
_START_KEY = (0x57A27,)
"""Makes another stream of an env's seed than any of those that the env itself uses."""
_NO_PLAN = EpisodePlan(auto_reset=False, episodes_left=0, params={})


class Meter(Protocol):
    """Measures how long resets take."""

    def reset_env(self, env: Any, params: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """As `adapt.reset_env`, measured."""

    def note_reset(self, env: Any, seconds: float) -> None:
        """Take note of a reset that was measured otherwise."""


@dataclass(frozen=True)
class Surroundings:
    """What an env is given by its host.

    Attributes:
        settings: see `HostSettings`.
        messages: answers by message.
        is_worn: asked at each episode's end whether the worker has reached a limit; None if it has
            none.
        postpone: takes what runs a reset that the host begins by itself, to have it run later.
        meter: is told how long resets take; None where nobody wants to know.
    """

    settings: HostSettings
    messages: MessageSink
    is_worn: Callable[[], bool] | None
    postpone: Callable[[Callable[[], None]], None]
    meter: Meter | None = None


class RunningEnv:
    """One env, from its construction until it is closed.

    Args:
        env: the env, as `adapt.as_base_env` returned it.
        given: what its host gives it.

    Attributes:
        env: the env.
        spaces: those of observations, actions and rewards.
        step_result: takes one action in the env, returns what that gave.
        writer: writes its observations.
        plan: what the host does by itself when an episode ends.
        episodes: how many have ended.
        episodes_left: after how many more ends the host begins the next episode by itself.
        refuses_non_finite: rewards have to be finite.

    Raises:
        Exception: what the env raises when it is asked for its spaces.
    """

    def __init__(self, env: Any, given: Surroundings) -> None:
        settings = given.settings
        self.env = env
        self.plan = _NO_PLAN
        self.episodes = 0
        self.episodes_left = 0.0
        self.refuses_non_finite = settings.refuse_non_finite_rewards
        self._messages = given.messages
        self._given = given
        self._kept: tuple[Any, dict[str, Any]] | RemoteFailure = _NOTHING_KEPT
        self._notices: list[str] = []
        self._told: set[str] = set()
        self._is_closed = False
        self._start_steps = settings.start_steps
        self._reset_env = adapt.reset_env if given.meter is None else given.meter.reset_env
        try:
            self.spaces = adapt.spaces_of(env, settings.observation_space, settings.action_space)
        except BaseException:  # whatever the env's code may raise, SystemExit included
            self.close()
            raise
        self.step_result = step_function(env)
        self.writer = ObservationWriter(self.spaces[0], settings.rules, self._notice_cast)

    def close(self) -> None:
        """Close the env; errors of its own `close` are not ours to raise."""
        self._is_closed = True
        try:
            adapt.close_env(self.env)
        except BaseException as error:  # the env is gone either way
            pass_on(error, self._given.settings)

    @property
    def resets_alone(self) -> bool:
        """Whether it can be reset whatever other envs of its host do."""
        return True

    @property
    def resets_inplace(self) -> bool:
        """Whether the step that ends this episode begins the next one, as far as is known."""
        plan = self.plan
        return plan.inplace and plan.auto_reset and self.episodes_left > 0

    # -- steps ------------------------------------------------------------------------------

    def take_step(
        self,
        sink: MessageSink,
        key: Any,
        step_result_of: Callable[[Any], StepResult],
        argument: Any,
    ) -> bool:
        """Take a step, answer it, and see to the reset that follows it.

        Args:
            sink: answers.
            key: the request, as the sink knows it.
            step_result_of: gives what the step came to; runs the env's code.
            argument: of that.

        Returns:
            Whether a reset is to be run later.
        """
        after, completed = AfterStep.NOTHING, False
        try:
            step_result = step_result_of(argument)
            obs, reward, done, ending, info = step_result
            if info and is_abnormal(info):
                return self.fail_abnormal(sink, key, info_of(ending, info))
            if type(reward) is not float or self.refuses_non_finite:
                check_reward(reward, refuse_non_finite=self.refuses_non_finite)
            if done:
                after = self._after_step()
            reference = self.writer.write(obs)
            complete = self._end_episode(sink, key, after) if done else None
            sent, completed = sink.stepped(key, reference, step_result, after, complete)
        except BaseException as error:  # as above
            return self.fail_step(sink, key, error)
        self._answer(sink, key, sent)
        if completed or (after is not AfterStep.RESETS and after is not AfterStep.RESETS_LATE):
            return False
        self.go_on(sink, key)
        return True

    def step(self, sink: MessageSink, key: Any, action: Any) -> bool:
        """Take an action, as `take_step`."""
        return self.take_step(sink, key, self.step_result, action)

    def fail_step(self, sink: MessageSink, key: Any, error: BaseException) -> bool:
        """Report that a step has raised; as `take_step`."""
        self._messages.send(sink.raised(key, error, "step"))
        return False

    def fail_abnormal(self, sink: MessageSink, key: Any, info: Any) -> bool:
        """Report that the env has called its step abnormal; as `take_step`."""
        failure = RemoteFailure(FailureKind.ABNORMAL, "step", info=info)
        self._messages.send(sink.failed(key, failure))
        return False

    def _after_step(self) -> AfterStep:
        self.episodes += 1
        if self._given.is_worn is not None and self._given.is_worn():
            return AfterStep.WANTS_RECYCLING
        if self.plan.auto_reset and self.episodes_left > 0:
            return AfterStep.RESETS
        return AfterStep.NOTHING

    def _end_episode(
        self, sink: MessageSink, key: Any, after: AfterStep
    ) -> Callable[[], Sequence[Any]] | None:
        """Count an episode; return what completes its last step, if that takes another one."""
        self.episodes_left -= 1
        if after is AfterStep.RESETS and self.plan.inplace:
            return partial(self._begin, sink, key)
        return None

    # -- resets -----------------------------------------------------------------------------

    def go_on(self, sink: MessageSink, key: Any) -> None:
        """Have the env reset later, because its episode has ended; as `order_reset`."""
        self.order_reset(sink, key)

    def order_reset(self, sink: MessageSink, key: Any) -> None:
        """Have the env reset later, as its plan says.

        Args:
            sink: answers.
            key: the request that this is the reply to, or a part of it.
        """
        self._given.postpone(partial(self.begin_episode, sink, key))

    def begin_episode(self, sink: MessageSink, key: Any) -> None:
        """Run a reset that was ordered, and answer it; nothing if the env was closed since."""
        if not self._is_closed:
            sink.announce(key)
            self._answer(sink, key, self._begin(sink, key))

    def reset(self, message: Message) -> None:
        """Run RESET and answer it."""
        order: ResetOrder = message.payload
        self.plan, self.episodes_left = order.plan, order.plan.episodes_left
        try:
            observation, info = self._as_ordered(message)
            if order.keeps:
                self.writer.write(observation, of_reset=True)  # only checks: it is not attached
        except BaseException as error:  # as in `take_step`
            self._kept = self._messages.failure_of(error, "reset")
            self._messages.send(self._messages.failed(message, self._kept))
            return
        if order.keeps:
            self._kept = observation, info
            self._messages.send(self._messages.reply(message, Op.RESET_DONE, None))
        else:
            replies = self._begun(self._messages, message, observation, info)
            self._answer(self._messages, message, replies)

    def _started(
        self, order: ResetOrder, observation: Any, info: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Take the random steps that a launch begins with; return what the episode begins with."""

        def newest() -> Any:
            return observation

        random = np.random.default_rng(np.random.SeedSequence(order.seed, spawn_key=_START_KEY))
        action_space = copy.deepcopy(self.spaces[1])
        action_space.seed(int(random.integers(1 << 31)))
        for _ in range(int(random.integers(self._start_steps, endpoint=True))):
            action = random_action(action_space, newest)
            observation, _, done, _, told = self.step_result(action)
            if told and is_abnormal(told):
                raise EnvContractError(
                    f"a step of {env_name(self.env)} that start_steps asks for was abnormal"
                )
            if done:
                observation, info = adapt.reset_env(self.env, order.params)
        self._start_steps = 0
        return observation, info

    def _as_ordered(self, message: Message) -> tuple[Any, dict[str, Any]]:
        order: ResetOrder = message.payload
        if order.saved is not None:
            states.put(self.env, order.saved.state)
            self.episodes, self._start_steps = order.saved.episodes, 0
            return order.saved.obs, order.saved.info
        if order.seed is not None:
            adapt.seed_env(self.env, order.seed, order.dynamic_seed)
        observation, info = self._reset_env(self.env, order.params)
        if self._start_steps and message.generation == 0:
            observation, info = self._started(order, observation, info)
        return observation, info

    def _begin(self, sink: MessageSink, key: Any) -> Sequence[Any]:
        try:
            observation, info = self._reset_env(self.env, self.plan.params)
        except BaseException as error:  # as in `take_step`
            return (sink.raised(key, error, "reset"),)
        return self._begun(sink, key, observation, info)

    def _begun(
        self, sink: MessageSink, key: Any, observation: Any, info: dict[str, Any]
    ) -> Sequence[Any]:
        try:
            return sink.begun(key, self.writer.write(observation, of_reset=True), info)
        except BaseException as error:  # as in `take_step`
            return (sink.raised(key, error, "reset"),)

    def hand_over(self, message: Message) -> None:
        """Answer with what came of the reset that was kept; nobody may want an answer."""
        kept, self._kept = self._kept, _NOTHING_KEPT
        if message.request_id == UNANSWERED:
            return
        if isinstance(kept, RemoteFailure):
            self._messages.send(self._messages.failed(message, kept))
        else:
            self._answer(self._messages, message, self._begun(self._messages, message, *kept))

    # -- parts ------------------------------------------------------------------------------

    def _notice_cast(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._notices.append(text)

    def _answer(self, sink: MessageSink, key: Any, replies: Sequence[Any]) -> None:
        """Send replies to a request; before them, once, what is to be logged in the parent."""
        if self._notices:
            notices, self._notices = self._notices, []
            for text in notices:
                sink.send(sink.reply(key, Op.NOTICE, text))
        for reply in replies:
            sink.send(reply)
