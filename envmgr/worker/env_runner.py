"""Runs one env: takes its steps, resets it, ends its episodes, and has all of that answered.

`EnvRunner.take_step` is the one way in which a step is taken and answered, whatever the env is and
wherever its answer goes (see `sinks`). `ordinary_steps` does the same in C where nothing about a
step is out of the ordinary. A `BlockRow` is the env's row of the shared block, where actions are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Number
from typing import Any, ClassVar, Protocol

import numpy as np

from envmgr.env import adapt, states
from envmgr.env.contract import (
    ENDING_GIVEN,
    TERMINATED,
    TRUNCATED,
    EnvContractError,
    StepResult,
    env_name,
    info_of,
)
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.env.steps import step_function, step_in_two
from envmgr.hot import hot
from envmgr.spaces import Layout, NonFiniteError, ValueMismatchError, has_floats
from envmgr.spaces.agents import random_action
from envmgr.spaces.layouts import has_buffer
from envmgr.spaces.reading import short_text
from envmgr.types import EnvTimestep, is_abnormal
from envmgr.wire.block import AFTER_SHIFT, DONE, ENDING_SHIFT, HAS_INFO, REWARD_SHIFT
from envmgr.wire.hosts import HostSettings
from envmgr.wire.info_forms import HostForms
from envmgr.wire.messages import (
    UNANSWERED,
    AfterStep,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    RemoteFailure,
    ResetRequest,
    SavedEnv,
)
from envmgr.wire.rewards import kind_of_reward
from envmgr.worker.event_loop import Steps, done, finish
from envmgr.worker.observations import ObservationWriter
from envmgr.worker.sinks import BlockSink, MessageSink, reraise_interrupt

_NOTHING_KEPT = RemoteFailure(FailureKind.PROTOCOL, "reset", message="no reset was kept")
_START_KEY = (0x57A27,)
"""Makes a random stream from an env's seed that differs from all that the env itself uses."""
_NO_PLAN = EpisodePlan(auto_reset=False, episodes_left=0, params={})
_FIELDS = EnvTimestep._fields

StepFunction = Callable[[int, Any], bool | None]
"""Takes a step that was posted in the block and answers it, given its token and the action; returns
true if a reset is to be run later."""


class ResetTimer(Protocol):
    """Measures how long resets take."""

    def reset_env(self, env: Any, params: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Reset an env as `adapt.reset_env` does, and measure it."""

    def note_reset(self, env: Any, seconds: float) -> None:
        """Count a reset that the caller has measured."""


@dataclass(frozen=True)
class HostContext:
    """What the runner of an env gets from its host.

    Attributes:
        settings: see `HostSettings`.
        messages: answers requests by message.
        wants_recycling: asked at each episode's end whether the worker has reached a limit; None if
            it has none.
        run_later: takes a function that runs a reset, and has it run after the requests that have
            come meanwhile.
        forms: what the host knows of the forms of infos.
        reset_timer: is told how long resets take; None if nobody wants to know.
    """

    settings: HostSettings
    messages: MessageSink
    wants_recycling: Callable[[], bool] | None
    run_later: Callable[[Callable[[], None]], None]
    forms: HostForms
    reset_timer: ResetTimer | None = None


class EnvRunner:
    """Runs one env, from its construction until it is closed.

    If the constructor raises, so that there is no runner, its caller closes the env.

    Args:
        env: the env, as `adapt.as_base_env` returned it.
        context: what its host gives it.

    Attributes:
        spaces: the spaces of observations, actions and rewards.
        step_result: takes one action in the env.
        reset_env: resets the env, given the env and its reset params, as `adapt.reset_env` does.
        plan: what the host does by itself when an episode ends.
        episodes: how many episodes have ended.
        episodes_left: after how many more ends the host begins the next episode by itself.
        refuses_non_finite: whether rewards have to be finite.
        has_ordinary_steps: whether `ordinary_steps` may be used: not if a subclass does more at a
            step.
        is_async: whether resets and steps are awaited, while other envs go on.

    Raises:
        Exception: what the env raises when it is asked for its spaces.
    """

    has_ordinary_steps: ClassVar[bool] = True
    is_async: ClassVar[bool] = False

    def __init__(self, env: Any, context: HostContext) -> None:
        settings, timer = context.settings, context.reset_timer
        self.env = env
        self.plan = _NO_PLAN
        self.episodes = 0
        self.episodes_left = 0.0
        self.refuses_non_finite = settings.refuse_non_finite_rewards
        self._context = context
        self._messages = context.messages
        self._kept_reset: tuple[Any, dict[str, Any]] | RemoteFailure = _NOTHING_KEPT
        self._notices: list[str] = []
        self._all_notices: set[str] = set()
        self._is_closed = False
        self._start_steps = settings.start_steps
        self.reset_env = adapt.reset_env if timer is None else timer.reset_env
        self.spaces = adapt.spaces_of(env, settings.observation_space, settings.action_space)
        self.step_result = step_function(env)
        self.writer = ObservationWriter(self.spaces[0], settings.rules, self._notice)

    def close(self) -> None:
        """Close the env, and ignore what its own `close` raises."""
        self._is_closed = True
        try:
            adapt.close_env(self.env)
        except BaseException as error:  # the env is gone either way
            reraise_interrupt(error, self._context.settings)

    def close_async(self) -> Steps[None]:
        """Close the env as `close` does; an async env may have to wait for it."""
        self.close()
        return done(None)

    @property
    def resets_alone(self) -> bool:
        """Whether the env can be reset whatever other envs of its host do."""
        return True

    @property
    def resets_inplace(self) -> bool:
        """Whether the step that ends this episode begins the next one, as far as is known."""
        plan = self.plan
        return plan.inplace and plan.auto_reset and self.episodes_left > 0

    # -- steps ------------------------------------------------------------------------------

    def step(self, sink: MessageSink, key: Any, action: Any) -> bool:
        """Take an action in the env; see `take_step`."""
        return self.take_step(sink, key, self.step_result, action)

    def take_step(
        self,
        sink: MessageSink,
        key: Any,
        step_result_of: Callable[[Any], StepResult],
        argument: Any,
    ) -> bool:
        """Take a step, check what it gave, answer it, and see to the reset that follows it.

        Args:
            sink: answers the step.
            key: the request, as the sink knows it.
            step_result_of: returns what the step gave; runs the env's code, or only reads what that
                has returned.
            argument: the argument of `step_result_of`.

        Returns:
            Whether a reset is to be run later.
        """
        after, has_begun = AfterStep.NOTHING, False
        try:
            step_result = step_result_of(argument)
            obs, reward, done, ending, info = step_result
            if info and is_abnormal(info):
                return self.report_abnormal(sink, key, info_of(ending, info))
            if type(reward) is not float or self.refuses_non_finite:
                check_reward(reward, refuse_non_finite=self.refuses_non_finite)
            reference = self.writer.write(obs)
            begin_next = None
            if done:
                after = self.end_episode()
                if after is AfterStep.RESETS and self.plan.inplace:
                    begin_next = partial(self.begin_episode, sink, key)
            messages, has_begun = sink.answer_step(key, reference, step_result, after, begin_next)
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            return self.report_exception(sink, key, error)
        self.send(sink, key, messages)
        if has_begun or (
            after is not AfterStep.RESETS and after is not AfterStep.RESETS_IN_NEXT_STEP
        ):
            return False
        self.begin_episode_later(sink, key)
        return True

    def report_exception(self, sink: MessageSink, key: Any, error: BaseException) -> bool:
        """Report that a step has raised; return False, since no reset follows."""
        # This step's notices are sent, too: the next step may be an ordinary one in C, which sends
        # none.
        self.send(sink, key, (sink.exception_reply(key, error, "step"),))
        return False

    def report_abnormal(self, sink: MessageSink, key: Any, info: Any) -> bool:
        """Report that the env called its step abnormal; return False, since no reset follows."""
        failure = RemoteFailure(FailureKind.ABNORMAL, "step", info=info)
        self._messages.send(sink.failure_reply(key, failure))
        return False

    def end_episode(self) -> AfterStep:
        """Count the end of an episode, and return what the host does after that."""
        left = self.episodes_left
        self.episodes += 1
        self.episodes_left = left - 1
        wants_recycling = self._context.wants_recycling
        if wants_recycling is not None and wants_recycling():
            return AfterStep.WANTS_RECYCLING
        return AfterStep.RESETS if self.plan.auto_reset and left > 0 else AfterStep.NOTHING

    # -- resets -----------------------------------------------------------------------------

    def begin_episode_later(self, sink: MessageSink, key: Any) -> None:
        """Have the next episode begin later, since one has ended; see `reset_later`."""
        self.reset_later(sink, key)

    def reset_later(self, sink: MessageSink, key: Any) -> None:
        """Have the env reset later, as its plan says.

        Args:
            sink: answers the reset.
            key: the request that the reset answers, or a part of it.
        """
        self._context.run_later(partial(self.run_reset, sink, key))

    def run_reset(self, sink: MessageSink, key: Any) -> None:
        """Reset the env as its plan says, and answer; do nothing if it was closed since."""
        if not self._is_closed:
            sink.announce(key)
            self.send(sink, key, self.begin_episode(sink, key))

    def begin_episode(self, sink: MessageSink, key: Any) -> Sequence[Any]:
        """Reset the env as its plan says; return the messages that answer the reset."""
        try:
            observation, info = self.reset_env(self.env, self.plan.params)
            return sink.answer_reset(key, self.writer.write(observation, of_reset=True), info)
        except BaseException as error:  # as in `take_step`
            return (sink.exception_reply(key, error, "reset"),)

    def reset(self, message: Message) -> None:
        """Run a RESET request and answer it."""
        finish(self.reset_and_answer(message))

    def reset_and_answer(self, message: Message) -> Steps[None]:
        """Do what `reset` does; an async env may have to wait for it."""
        wanted: ResetRequest = message.payload
        if wanted.leaves and self.end_episode() is AfterStep.WANTS_RECYCLING:
            self._messages.send(self._messages.reply(message, Op.WORN, None))
            return
        self.plan, self.episodes_left = wanted.plan, wanted.plan.episodes_left
        try:
            observation, info = yield from self._reset_as_ordered(message)
            if wanted.keeps:
                self.writer.write(observation, of_reset=True)  # only checks: it is not attached
        except BaseException as error:  # as in `take_step`
            self._kept_reset = self.failure_of(error, "reset")
            self._messages.send(self._messages.failure_reply(message, self._kept_reset))
            return
        if wanted.keeps:
            self._kept_reset = observation, info
            self._messages.send(self._messages.reply(message, Op.RESET_DONE, None))
        else:
            replies = self._answer_reset(self._messages, message, observation, info)
            self.send(self._messages, message, replies)

    def when_reset(self, then: Callable[[], None], message: Message) -> None:
        """Call `then` for a request, once the reset that is under way, if any, is over."""
        then()

    def answer_with_kept_reset(self, message: Message) -> None:
        """Answer with the result of the reset that was kept, unless nobody wants an answer."""
        kept, self._kept_reset = self._kept_reset, _NOTHING_KEPT
        if message.request_id == UNANSWERED:
            return
        if isinstance(kept, RemoteFailure):
            self._messages.send(self._messages.failure_reply(message, kept))
        else:
            replies = self._answer_reset(self._messages, message, *kept)
            self.send(self._messages, message, replies)

    def _reset_with(self, params: Mapping[str, Any] | None) -> Steps[tuple[Any, dict[str, Any]]]:
        """Reset the env; an async env may have to wait for it."""
        return done(self.reset_env(self.env, params))

    def _step_with(self, action: Any) -> Steps[StepResult]:
        """Take one action in the env; an async env may have to wait for it."""
        return done(self.step_result(action))

    def failure_of(self, error: BaseException, during: str) -> RemoteFailure:
        """Return the failure to report for an exception; raise it if it is not the env's."""
        return self._messages.failure_of(error, during)

    def _reset_as_ordered(self, message: Message) -> Steps[tuple[Any, dict[str, Any]]]:
        wanted: ResetRequest = message.payload
        if wanted.saved is not None:
            states.put(self.env, wanted.saved.state)
            adapt.finish_video(self.env)
            self.episodes, self._start_steps = wanted.saved.episodes, 0
            return wanted.saved.obs, wanted.saved.info
        if wanted.seed is not None:
            adapt.seed_env(self.env, wanted.seed, wanted.dynamic_seed)
        observation, info = yield from self._reset_with(wanted.params)
        if self._start_steps and message.generation == 0:
            observation, info = yield from self._take_start_steps(wanted, observation, info)
        return observation, info

    def _take_start_steps(
        self, wanted: ResetRequest, observation: Any, info: dict[str, Any]
    ) -> Steps[tuple[Any, dict[str, Any]]]:
        """Take the random steps that a launch begins with; return what the episode begins with."""

        def newest() -> Any:
            return observation

        random = np.random.default_rng(np.random.SeedSequence(wanted.seed, spawn_key=_START_KEY))
        action_space = copy.deepcopy(self.spaces[1])
        action_space.seed(int(random.integers(1 << 31)))
        for _ in range(int(random.integers(self._start_steps, endpoint=True))):
            action = random_action(action_space, newest)
            observation, _, done, _, step_info = yield from self._step_with(action)
            if step_info and is_abnormal(step_info):
                raise EnvContractError(
                    f"a step of {env_name(self.env)} that start_steps asks for was abnormal"
                )
            if done:
                observation, info = yield from self._reset_with(wanted.params)
        self._start_steps = 0
        return observation, info

    def _answer_reset(
        self, sink: MessageSink, key: Any, observation: Any, info: dict[str, Any]
    ) -> Sequence[Any]:
        try:
            return sink.answer_reset(key, self.writer.write(observation, of_reset=True), info)
        except BaseException as error:  # as in `take_step`
            return (sink.exception_reply(key, error, "reset"),)

    # -- messages ---------------------------------------------------------------------------

    def send(self, sink: MessageSink, key: Any, messages: Sequence[Any]) -> None:
        """Send the messages that answer a request, after any new notices for the trainer's log."""
        if self._notices:
            notices, self._notices = self._notices, []
            for text in notices:
                sink.send(sink.reply(key, Op.NOTICE, text))
        for message in messages:
            sink.send(message)

    def _notice(self, text: str) -> None:
        if text not in self._all_notices:
            self._all_notices.add(text)
            self._notices.append(text)


class CheckpointingEnvRunner(EnvRunner):
    """Saves the state of its env in the manager every `save_every` steps of an episode.

    An env that takes the place of this one goes on from the state that was saved last.

    Args:
        env: as for `EnvRunner`.
        context: likewise.

    Raises:
        NoStateError: there is no way to take the env's state.
    """

    has_ordinary_steps = False

    def __init__(self, env: Any, context: HostContext) -> None:
        super().__init__(env, context)
        self._save_every: float = context.settings.save_every or math.inf
        self._copies_states = context.settings.copies_states
        self._step_env = self.step_result
        self.step_result = self._remember_observation
        self._newest_obs: Any = None
        self._episode = 0
        self._n_steps = 0
        states.refuse(env, copies=self._copies_states)

    def _remember_observation(self, action: Any) -> StepResult:
        step_result = self._step_env(action)
        self._newest_obs = step_result[0]
        return step_result

    def take_step(
        self,
        sink: MessageSink,
        key: Any,
        step_result_of: Callable[[Any], StepResult],
        argument: Any,
    ) -> bool:
        """Take a step as `EnvRunner` does, and save the env's new state if that is due."""
        self._n_steps += 1
        follows = super().take_step(sink, key, step_result_of, argument)
        if self._n_steps and self._n_steps % self._save_every == 0:
            self._save(sink, key)
        return follows

    def _save(self, sink: MessageSink, key: Any) -> None:
        try:
            state = states.take(self.env, copies=self._copies_states)
            obs = copy.deepcopy(self._newest_obs)
            saved = SavedEnv(state, obs, {"resumed": True}, episode=self._episode)
            sink.send(sink.reply(key, Op.SAVED, saved))
        except Exception as error:  # of its own methods, of what is pickled or sent
            reraise_interrupt(error, self._context.settings)
            self._save_every = math.inf
            self._notice(f"its state cannot be saved, it will not be resumed: {error}")

    # An episode that has ended, or failed, is not saved any more; the next one counts from 0 again.

    def end_episode(self) -> AfterStep:
        """Count the end of an episode, and return what the host does after that."""
        self._n_steps = 0
        return super().end_episode()

    def report_exception(self, sink: MessageSink, key: Any, error: BaseException) -> bool:
        """Report that a step has raised; return False, since no reset follows."""
        self._n_steps = 0
        return super().report_exception(sink, key, error)

    def report_abnormal(self, sink: MessageSink, key: Any, info: Any) -> bool:
        """Report that the env called its step abnormal; return False, since no reset follows."""
        self._n_steps = 0
        return super().report_abnormal(sink, key, info)

    def reset(self, message: Message) -> None:
        """Run a RESET request and answer it."""
        self._episode, self._n_steps = message.payload.episode, 0
        super().reset(message)

    def begin_episode(self, sink: MessageSink, key: Any) -> Sequence[Any]:
        """Reset the env as its plan says; return the messages that answer the reset."""
        self._episode += 1
        self._n_steps = 0
        return super().begin_episode(sink, key)


# -- rewards ------------------------------------------------------------------------------------


def as_it_is(step_result: StepResult) -> StepResult:
    """Return the result of a step that has already been taken, for `take_step`."""
    return step_result


def check_reward(reward: Any, *, refuse_non_finite: bool) -> None:
    """Check that a reward is a number, or consists of numbers.

    Raises:
        ValueMismatchError: the reward is neither.
        NonFiniteError: a number is not finite, which is refused.
    """
    if type(reward) is not float and not _is_numeric(reward):
        raise ValueMismatchError(f"the reward is {short_text(reward)}, not a number")
    if refuse_non_finite and not _is_finite(reward):
        text = short_text(reward)
        raise NonFiniteError(f"the reward is {text} (nan_policy is not allow)")


def _parts(reward: Any) -> Iterable[Any] | None:
    """Return the rewards that a reward consists of; None if it is a single one, or an array."""
    if isinstance(reward, Mapping):
        return reward.values()
    return reward if isinstance(reward, (list, tuple)) else None


def _is_numeric(reward: Any) -> bool:
    if isinstance(reward, (np.ndarray, np.generic)):
        return reward.dtype.kind in "biufc"
    parts = _parts(reward)
    if parts is not None:
        return all(map(_is_numeric, parts))
    return isinstance(reward, Number) or hasattr(reward, "__array__")  # tensors, whatever device


def _is_finite(reward: Any) -> bool:
    parts = _parts(reward)
    if parts is not None:
        return all(map(_is_finite, parts))
    array = np.asarray(reward)
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


# -- steps that are posted in the block ---------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BlockRow:
    """One env's row of the block: what is posted there reaches the env through this.

    Attributes:
        sink: answers in the block.
        step: takes a step.
        takes_any_number: whether the env converts an action that is a number in any case.
        runner: runs the env.
        action_kind: which of the kinds of actions in the block the env takes.
    """

    sink: BlockSink
    step: StepFunction
    takes_any_number: bool
    runner: EnvRunner
    action_kind: int = 0

    @property
    def row(self) -> int:
        """The index of the row."""
        return self.sink.row


def block_row_of(runner: EnvRunner, sink: BlockSink, action_kind: int) -> BlockRow:
    """Return the row of an env whose writer is attached to the block's memory."""
    actions = sink.block.plan.layouts[action_kind]
    step: StepFunction | None = None
    if runner.has_ordinary_steps and not _converts_actions(runner, actions):
        step = ordinary_steps(runner, sink)
    takes_any_number = isinstance(runner.env, GymnasiumEnv)
    step = step or partial(runner.step, sink)
    return BlockRow(sink, step, takes_any_number, runner, action_kind)


def _converts_actions(runner: EnvRunner, actions: Layout) -> bool:
    """Return whether the env expects Python's numbers where actions in the block have NumPy's."""
    is_gymnasium = type(runner.env) is GymnasiumEnv
    return is_gymnasium and any(leaf.is_number and leaf.path for leaf in actions.leaves)


def ordinary_steps(runner: EnvRunner, sink: BlockSink) -> StepFunction | None:
    """Return a step function in C, if the env's observations have room in shared memory.

    Return None without the C extension, for arrays that have no buffer (C knows arrays only by
    their buffers), for observations of very many parts, and for floats of unusual size if they
    are to be tested for NaN.

    The C code does what `EnvRunner.take_step` does for steps about which nothing is out of the
    ordinary: gymnasium's five values, or a timestep; arrays that fit, numbers and texts, nested as
    the space is; a number as the reward, an info that can be written at once. It leaves all other
    steps to `EnvRunner.take_step`, with what the env has returned. Ends of episodes come back here.
    """
    writer, placed = runner.writer, runner.writer.placed
    if hot is None or placed is None or len(placed.leaves) > hot.MOST_LEAVES:
        return None
    if not all(map(has_buffer, placed.dtypes)):
        return None
    is_tested = any(leaf.tests_finite for leaf in placed.leaves)
    if is_tested and any(has_floats(d) and d not in _TESTED_IN_C for d in placed.dtypes):
        return None
    single, after_step = writer.single_array, placed.after
    row, reset_flags, resets = sink.row, sink.reset_flags, sink.resets
    after_reset, reset_env = writer.after, runner.reset_env
    env, step_result_of, gives_five = step_in_two(runner.env)
    codes = [
        buffer | (ENDING_GIVEN << ENDING_SHIFT if gives_five else 0)
        for buffer in range(len(after_step))
    ]
    codes_of_arrays = _codes_of_arrays(codes)
    terminated_bits, truncated_bits = (
        (bit << ENDING_SHIFT if gives_five else 0) for bit in (TERMINATED, TRUNCATED)
    )
    codes_of_after = {after: int(after) << AFTER_SHIFT | DONE for after in AfterStep}

    def end_episode(token: int, code: int, terminated: bool, truncated: bool) -> bool:
        after = runner.end_episode()
        is_inplace = after is AfterStep.RESETS and runner.plan.inplace
        messages: Sequence[Any] | None = None
        if is_inplace:
            try:
                obs, info = reset_env(runner.env, runner.plan.params)
                if (
                    single is not None
                    and type(obs) is np.ndarray
                    and obs.dtype == single.dtype
                    and obs.shape == single.shape
                    and (single.finite is None or single.finite(obs) == 0.0)
                    and (not info or (type(info) is dict and sink.write_reset_info(info)))
                ):
                    buffer = writer.reset_buffer
                    single.targets[buffer][...] = obs
                    writer.reset_buffer = after_reset[buffer]
                    reset_flags[row] = buffer | HAS_INFO if info else buffer
                    resets[row] = token
                else:
                    reference = writer.write(obs, of_reset=True)
                    messages = sink.answer_reset(token, reference, info)
            except BaseException as error:  # as in `take_step`
                messages = (sink.exception_reply(token, error, "reset"),)
        if terminated:
            code |= terminated_bits
        if truncated:
            code |= truncated_bits
        sink.flags[row] = code | codes_of_after[after]
        sink.replies[row] = token  # last: from now on the reply counts
        if messages is not None:  # and notices, of a cast
            runner.send(sink, token, messages)
        if is_inplace or after is not AfterStep.RESETS:
            return False
        runner.begin_episode_later(sink, token)
        return True

    def fail(token: int, error: BaseException, has_ended: bool = False) -> bool:
        if has_ended:
            runner.end_episode()
        return runner.report_exception(sink, token, error)

    step: StepFunction = hot.OrdinaryStep(
        env=env,
        step_buffer=writer.step_buffer_cell,
        rest=lambda token, result: runner.take_step(sink, token, step_result_of, result),
        failed=fail,
        end=end_episode,
        write_info=sink.write_info,
        after=after_step,
        ndarray=np.ndarray,
        float64=np.float64,
        fields=None if gives_five else _FIELDS,
        skeleton=placed.skeleton,
        leaves=placed.leaves,
        targets=placed.targets,
        rewards=sink.rewards,
        flags=sink.flags,
        replies=sink.replies,
        row=row,
        codes=codes,
        codes_of_float32=codes_of_arrays[np.dtype(np.float32)],
        codes_of_float64=codes_of_arrays[np.dtype(np.float64)],
        refuses_non_finite=runner.refuses_non_finite,
        has_info=HAS_INFO,
    )
    return step


_TESTED_IN_C = (np.dtype(np.float32), np.dtype(np.float64))

_Codes = dict[np.dtype[Any], list[int]]
"""Flags of replies by buffer, for each dtype of a reward that is an array."""


def _codes_of_arrays(codes: list[int]) -> _Codes:
    """Return, by dtype, the flags of the same replies whose reward is an array of one number."""
    arrays = [np.zeros(1, dtype) for dtype in (np.float32, np.float64)]
    return {
        array.dtype: [code | (kind_of_reward(array) or 0) << REWARD_SHIFT for code in codes]
        for array in arrays
    }
