"""One env on the child side: runs its requests and says what came of them.

Replies come one at a time, so that the reply to a step is on its way before the next episode's
reset begins.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Number
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import numpy as np

from envmgr.env import adapt
from envmgr.env.contract import Outcome, info_of
from envmgr.spaces import NonFiniteError, ValueMismatchError
from envmgr.spaces.reading import short_text
from envmgr.types import EnvFactory, is_abnormal
from envmgr.wire.arenas import Placement
from envmgr.wire.block import Block
from envmgr.wire.frames import FrameError
from envmgr.wire.hosts import HostSettings
from envmgr.wire.messages import (
    UNANSWERED,
    AfterStep,
    Attribute,
    EnvDescription,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    RemoteFailure,
    ResetOrder,
)
from envmgr.worker.observations import ObservationWriter
from envmgr.worker.posted import PostedSteps
from envmgr.worker.posted_env import PostedEnv
from envmgr.worker.trial import try_env

_NOTHING_KEPT = RemoteFailure(FailureKind.PROTOCOL, "reset", message="no reset was kept")
_NO_PLAN = EpisodePlan(auto_reset=False, episodes_left=0, params={})
_METHOD_TYPES = (MethodType, FunctionType, BuiltinMethodType)


class HostedEnv:
    """Runs one env of a host.

    Args:
        env_id: the env's id.
        factory: builds the env; called by HELLO and RENEW.
        settings: see `HostSettings`.
        encode: turns a reply into what is sent; raises FrameError for what cannot be sent.
        memory: opens the shared memory when observations are placed in it.
        is_worn: asked at each episode's end whether the worker has reached a limit.
        postpone: takes the automatic reset that follows a step, to have it run by `begin_episode`
            later; None runs it at once.
        posted: the host's posted steps, which the env takes part in when its placement has a
            block; None where there are none.

    Attributes:
        env_id: the env's id.
        outcome: takes one action in the present env.
        episodes: episodes that the present env has ended.
        propagated: exceptions that are not the env's and pass through.
        checks_rewards: whether rewards are to be finite.
        notices: what is to be logged in the parent.
    """

    outcome: Callable[[Any], Outcome]

    def __init__(
        self,
        env_id: int,
        factory: EnvFactory,
        settings: HostSettings,
        *,
        encode: Callable[[Message], Any],
        memory: Callable[[int], Any],
        is_worn: Callable[[], bool],
        postpone: Callable[[HostedEnv, Message], None] | None = None,
        posted: PostedSteps | None = None,
    ) -> None:
        self.env_id = env_id
        self._factory = factory
        self._settings = settings
        self._encode = encode
        self._memory = memory
        self._is_worn = is_worn
        self._postpone = postpone
        self._posted = posted
        self.episodes = 0
        self.propagated = settings.propagate
        self.checks_rewards = settings.refuse_non_finite_rewards
        self._env: Any = None
        self._writer: ObservationWriter | None = None
        self._plan = _NO_PLAN
        self._kept: tuple[Any, dict[str, Any]] | RemoteFailure = _NOTHING_KEPT
        self.notices: list[str] = []
        self._told: set[str] = set()
        self._handlers: dict[int, Callable[[Message], Iterator[Any]]] = {
            Op.HELLO: self._renew,
            Op.STEP: self._step,
            Op.RESET: self._reset,
            Op.ATTACH: self._attach,
            Op.RENEW: self._renew,
            Op.RELEASE: self._release,
            Op.CALL: self._call,
            Op.GET_ATTR: self._get_attr,
            Op.SET_ATTR: self._set_attr,
            Op.CALIBRATE: self._calibrate,
        }

    def handle(self, message: Message) -> Iterator[Any]:
        """Run one request and yield its encoded replies as they come."""
        return self._handlers.get(message.op, self._unknown)(message)

    def _unknown(self, message: Message) -> Iterator[Any]:
        text = f"unknown operation {message.op}"
        yield self._failed(message, RemoteFailure(FailureKind.PROTOCOL, "request", message=text))

    def _build(self, message: Message) -> Any:
        """Build the env; return the reply that describes it."""
        try:
            self._env = adapt.as_base_env(self._factory(), self.env_id)
            given = self._settings
            observation_space, action_space, reward_space = adapt.spaces_of(
                self._env, given.observation_space, given.action_space
            )
            self._writer = ObservationWriter(
                observation_space, self._settings.rules, self._notice_cast
            )
            self.outcome = adapt.outcome_function(self._env)
            description = EnvDescription(
                observation_space,
                action_space,
                reward_space,
                getattr(self._env, "metadata", None),
                getattr(self._env, "spec", None),
                getattr(self._env, "render_mode", None),
            )
            return self._hello(message, description)
        except self.propagated:
            raise
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            return self.failure(message, error, "construction")

    def _hello(self, message: Message, description: EnvDescription) -> Any:
        try:
            return self.reply(message, Op.HELLO, description)
        except FrameError:  # registrations may hold what cannot be sent; nothing depends on them
            return self.reply(message, Op.HELLO, description._replace(metadata=None, spec=None))

    def close(self) -> None:
        """Close the env; errors of its own `close` are not ours to raise."""
        env, self._env, self._writer = self._env, None, None
        if self._posted is not None:
            self._posted.leave(self.env_id)
        if env is None:
            return
        try:
            adapt.close_env(env)
        except self.propagated:
            raise
        except BaseException:  # noqa: S110 - the env is gone either way
            pass

    # -- requests ---------------------------------------------------------------------------

    def _step(self, message: Message) -> Iterator[Any]:
        try:
            outcome = self.outcome(message.payload)
            _, reward, done, ending, info = outcome
            abnormal = self.abnormal(message, ending, info)
            if abnormal is not None:
                yield abnormal
                return
            reference, after = self.settle(outcome)
            payload = (reference, reward, done, info_of(ending, info), int(after))
            reply = self.reply(message, Op.STEPPED, payload)
        except self.propagated:
            raise
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            yield self.failure(message, error, "step")
            return
        yield from self.take_notices(message)
        yield reply
        if after is AfterStep.RESETS:
            if self._postpone is None:
                yield from self.begin_episode(message)
            else:
                self._postpone(self, message)

    def abnormal(self, message: Message, ending: int, info: Any) -> Any:
        """Return the encoded failure of a step that the env itself calls abnormal; else None."""
        if not info or not is_abnormal(info):
            return None
        info = info_of(ending, info)
        return self._failed(message, RemoteFailure(FailureKind.ABNORMAL, "step", info=info))

    def settle(self, outcome: Outcome) -> tuple[Any, AfterStep]:
        """Check what a step gave, and commit its observation.

        Returns:
            The reference to the observation, and what this host does after the step.

        Raises:
            ValueMismatchError: it does not fit.
        """
        obs, reward, done, _, _ = outcome
        self._check_reward(reward)
        after = self._after_step() if done else AfterStep.NOTHING
        reference = self.write_observation(obs)
        if after is AfterStep.RESETS:
            self._plan = self._plan._replace(episodes_left=self._plan.episodes_left - 1)
        return reference, after

    def begin_episode(self, message: Message) -> Iterator[Any]:
        """Run the automatic reset that follows a step.

        Args:
            message: the request of that step, which the reset answers too.
        """
        return self._begin_episode(message, self._plan.params)

    @property
    def resets_inplace(self) -> bool:
        """Whether a step that ends an episode is complete with the next one's beginning."""
        return self._plan.inplace

    def reset_again(self) -> tuple[Any, dict[str, Any]]:
        """Reset the env as its plan says; return the observation and the info."""
        return adapt.reset_env(self._env, self._plan.params)

    def _reset(self, message: Message) -> Iterator[Any]:
        order: ResetOrder = message.payload
        self._plan = order.plan
        try:
            if order.seed is not None:
                adapt.seed_env(self._env, order.seed, order.dynamic_seed)
        except self.propagated:
            raise
        except BaseException as error:  # as in _step
            self._kept = RemoteFailure.from_exception(error, "reset", _kind_of(error))
            yield self._failed(message, self._kept)
            return
        if order.keeps:
            yield self._keep_episode(message, order.params)
        else:
            yield from self._begin_episode(message, order.params)

    def _keep_episode(self, message: Message, params: Mapping[str, Any]) -> Any:
        """Reset the env, keep what came of it, and say whether that is an episode."""
        try:
            observation, info = adapt.reset_env(self._env, params)
            self.write_observation(observation, of_reset=True)  # only checks: it is not attached
            self._kept = observation, info
            return self.reply(message, Op.RESET_DONE, None)
        except self.propagated:
            raise
        except BaseException as error:  # as in _step
            self._kept = RemoteFailure.from_exception(error, "reset", _kind_of(error))
            return self._failed(message, self._kept)

    def adopt(self, message: Message) -> Iterator[Any]:
        """Serve another env_id, and answer with what came of the reset that was kept."""
        if self._posted is not None:
            self._posted.leave(self.env_id)
        self.env_id = message.env_id
        if message.payload is not None:
            yield from self._attach(message)
        elif self._writer is not None:
            self._writer.detach()
        kept, self._kept = self._kept, _NOTHING_KEPT
        if message.request_id == UNANSWERED:
            return
        if isinstance(kept, RemoteFailure):
            yield self._failed(message, kept)
        else:
            yield from self._reset_done(message, *kept)

    def _begin_episode(self, message: Message, params: Mapping[str, Any]) -> Iterator[Any]:
        try:
            observation, info = adapt.reset_env(self._env, params)
        except self.propagated:
            raise
        except BaseException as error:  # as in _step
            yield self.failure(message, error, "reset")
            return
        yield from self._reset_done(message, observation, info)

    def _reset_done(
        self, message: Message, observation: Any, info: dict[str, Any]
    ) -> Iterator[Any]:
        try:
            reference = self.write_observation(observation, of_reset=True)
            reply = self.reply(message, Op.RESET_DONE, (reference, info))
        except self.propagated:
            raise
        except BaseException as error:  # as in _step
            yield self.failure(message, error, "reset")
            return
        yield from self.take_notices(message)
        yield reply

    def _attach(self, message: Message) -> Iterator[Any]:
        placement: Placement = message.payload
        if self._writer is not None:
            memory = self._memory(placement.nbytes)
            self._writer.attach(memory, placement)
            if self._posted is not None and placement.block is not None:
                block = Block(memory, placement.block)
                self._posted.seat(PostedEnv(self, self._env, self._writer, block, placement.row))
        yield from ()  # there is no reply

    def _renew(self, message: Message) -> Iterator[Any]:
        self.close()
        self._plan = _NO_PLAN
        self._kept = _NOTHING_KEPT
        self.episodes = 0
        yield self._build(message)

    def _release(self, message: Message) -> Iterator[Any]:
        self.close()
        yield self.reply(message, Op.RESULT, None)

    def _call(self, message: Message) -> Iterator[Any]:
        name, args = message.payload
        yield from self._result(message, lambda: adapt.env_attribute(self._env, name)(*args))

    def _get_attr(self, message: Message) -> Iterator[Any]:
        def read() -> Attribute:
            value = adapt.env_attribute(self._env, message.payload)
            if isinstance(value, _METHOD_TYPES):
                return Attribute(True, None)
            return Attribute(False, value)

        yield from self._result(message, read)

    def _set_attr(self, message: Message) -> Iterator[Any]:
        name, value = message.payload
        yield from self._result(message, lambda: adapt.set_env_attribute(self._env, name, value))

    def _result(self, message: Message, run: Callable[[], Any]) -> Iterator[Any]:
        try:
            reply = self.reply(message, Op.RESULT, run())
        except self.propagated:
            raise
        except AttributeError as error:
            missing = message.op == Op.GET_ATTR
            kind = FailureKind.NO_ATTRIBUTE if missing else FailureKind.RAISED
            yield self._failed(message, RemoteFailure.from_exception(error, "call", kind))
        except BaseException as error:  # as in _step
            yield self.failure(message, error, "call")
        else:
            yield reply

    def _calibrate(self, message: Message) -> Iterator[Any]:
        try:
            given = self._settings
            _, action_space, _ = adapt.spaces_of(
                self._env, given.observation_space, given.action_space
            )
            trial = try_env(
                self._env, self.outcome, action_space, self._plan.params, message.payload
            )
            reply = self.reply(message, Op.RESULT, trial)
        except self.propagated:
            raise
        except BaseException as error:  # as in _step
            yield self.failure(message, error, "calibration")
            return
        yield reply

    # -- parts ------------------------------------------------------------------------------

    def write_observation(self, observation: Any, *, of_reset: bool = False) -> Any:
        """Check an observation and commit it; return the reference to it.

        Raises:
            ValueMismatchError: it does not fit.
        """
        if self._writer is None:
            raise ValueMismatchError("there is no env")
        return self._writer.write(observation, of_reset=of_reset)

    def _check_reward(self, reward: Any) -> None:
        if type(reward) is not float and not _is_numeric(reward):
            raise ValueMismatchError(f"the reward is {short_text(reward)}, not a number")
        if self._settings.refuse_non_finite_rewards and not _is_finite(reward):
            text = short_text(reward)
            raise NonFiniteError(f"the reward is {text} (nan_policy is not allow)")

    def _after_step(self) -> AfterStep:
        self.episodes += 1
        if self._is_worn():
            return AfterStep.WANTS_RECYCLING
        if self._plan.auto_reset and self._plan.episodes_left > 0:
            return AfterStep.RESETS
        return AfterStep.NOTHING

    def reply(self, message: Message, op: Op, payload: Any) -> Any:
        """Return an encoded reply to a request.

        Raises:
            FrameError: it cannot be sent.
        """
        return self._encode(
            Message(op, message.env_id, message.generation, message.request_id, payload)
        )

    def _failed(self, message: Message, failure: RemoteFailure) -> Any:
        try:
            return self.reply(message, Op.FAILED, failure)
        except FrameError as error:  # an info that cannot be sent
            text = f"its info cannot be sent: {error}"
            return self.reply(
                message, Op.FAILED, RemoteFailure(failure.kind, failure.during, message=text)
            )

    def failure(self, message: Message, error: BaseException, during: str) -> Any:
        """Return the encoded report of an exception."""
        return self._failed(message, RemoteFailure.from_exception(error, during, _kind_of(error)))

    def _notice_cast(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.notices.append(text)

    def take_notices(self, message: Message) -> list[Any]:
        """Return what is to be logged in the parent, encoded, once."""
        if not self.notices:
            return self.notices
        notices, self.notices = self.notices, []
        return [self.reply(message, Op.NOTICE, text) for text in notices]


def _parts(reward: Any) -> Iterable[Any] | None:
    """Return the rewards that a reward consists of; None if it is one, or an array of them."""
    if isinstance(reward, Mapping):
        return reward.values()
    return reward if isinstance(reward, (list, tuple)) else None


def _is_numeric(reward: Any) -> bool:
    parts = _parts(reward)
    if parts is not None:
        return all(map(_is_numeric, parts))
    if isinstance(reward, (np.ndarray, np.generic)):
        return reward.dtype.kind in "biufc"
    return isinstance(reward, Number) or hasattr(reward, "__array__")  # tensors, whatever device


def _is_finite(reward: Any) -> bool:
    parts = _parts(reward)
    if parts is not None:
        return all(map(_is_finite, parts))
    array = np.asarray(reward)
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _kind_of(error: BaseException) -> FailureKind:
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return FailureKind.EXITED
    if isinstance(error, NonFiniteError):
        return FailureKind.NON_FINITE
    if isinstance(error, (ValueMismatchError, FrameError, adapt.EnvContractError)):
        return FailureKind.PROTOCOL
    return FailureKind.RAISED
