"""A row of a batched env: what it is asked for, its batch does for all rows together.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from envmgr.env import adapt
from envmgr.env.batched import BatchRow
from envmgr.wire.messages import AfterStep, FailureKind, Message, RemoteFailure, ResetOrder
from envmgr.worker.running import RunningEnv, Surroundings
from envmgr.worker.sinks import BlockSink, MessageSink

if TYPE_CHECKING:  # it has rows, and each of them knows it
    from envmgr.worker.batches import RunningBatch


class Step(NamedTuple):
    """A step that one row is to take."""

    running: RunningRow
    sink: MessageSink
    key: Any
    action: Any


class Reset(NamedTuple):
    """A reset of one row; `answer` is run when the env has done its part.

    Attributes:
        is_ordered: somebody has asked for it; else it follows the end of an episode.
        is_plain: it can be answered in columns.
    """

    env: BatchRow
    sink: MessageSink
    key: Any
    params: dict[str, Any]
    answer: Callable[[], None]
    is_ordered: bool
    is_plain: bool = False


class RunningRow(RunningEnv):
    """One row of a batched env, from when it is opened until it is closed.

    Args:
        env: the row.
        given: what its host gives it.
        batch: has steps and resets run.

    Attributes:
        batch: likewise.
        is_plain: it is known that its episodes end and begin with nothing to be said of them.
    """

    env: BatchRow
    is_plain = False

    def __init__(self, env: BatchRow, given: Surroundings, batch: RunningBatch) -> None:
        self.batch = batch
        super().__init__(env, given)
        self._reset_env = adapt.reset_env  # the batch is measured, not what each row has of it

    def close(self) -> None:
        """Leave the env."""
        super().close()
        self.batch.leave(self.env.row)

    @property
    def resets_alone(self) -> bool:
        """Whether the env can reset it while others are in an episode."""
        return self.env.batched.resets_alone

    @property
    def resets_inplace(self) -> bool:
        """Whether the step that ends this episode begins the next one, as far as is known."""
        return super().resets_inplace and not self.batch.is_late

    def _after_step(self) -> AfterStep:
        after = super()._after_step()
        return AfterStep.RESETS_LATE if after is AfterStep.RESETS and self.batch.is_late else after

    def end_episode(self) -> AfterStep:
        """Count the end of an episode, and return what is done after that."""
        after = self._after_step()
        self.episodes_left -= 1
        plan, is_limited = self.plan, self._given.is_worn is not None
        if plan.auto_reset and not (plan.params or is_limited):
            self.is_plain = self.env.seeds.are_used_up
        return after

    def begin(self, sink: MessageSink, key: Any) -> Sequence[Any]:
        """Begin an episode inside of a step; return what is to be sent after that is answered."""
        return self._begin(sink, key)

    def _begin(self, sink: MessageSink, key: Any) -> Sequence[Any]:
        if not isinstance(self.env.first, tuple):
            return super()._begin(sink, key)
        observation = self.env.reset()  # which only returns what has begun
        return self._begun(sink, key, observation, self.env.reset_info)

    def send(self, sink: MessageSink, key: Any, replies: Sequence[Any]) -> None:
        """Send that."""
        self._answer(sink, key, replies)

    def step(self, sink: MessageSink, key: Any, action: Any) -> bool:
        """Have a step be taken, now or later."""
        return self.batch.want_step(self.env.row, Step(self, sink, key, action))

    def fail_step(self, sink: MessageSink, key: Any, error: BaseException) -> bool:
        """Report that what the env gave for this row is of no use."""
        self.env.is_in_episode = False
        self._messages.send(sink.raised(key, error, "step", of_batch=not self.resets_alone))
        return False

    def fail_abnormal(self, sink: MessageSink, key: Any, info: Any) -> bool:
        """Report that the env has called the step of this row abnormal."""
        self.env.is_in_episode = False
        failure = RemoteFailure(
            FailureKind.ABNORMAL, "step", info=info, of_batch=not self.resets_alone
        )
        self._messages.send(sink.failed(key, failure))
        return False

    def reset(self, message: Message) -> None:
        """Have RESET be run later."""
        order: ResetOrder = message.payload
        if order.dynamic_seed is not None and not self.resets_alone:
            text = (
                "dynamic_seed has each episode of a row be seeded, which takes an env that can "
                "reset some of its rows: leave it None"
            )
            self._messages.refuse(message, "reset", text)
            return
        self.env.first = None  # what an episode was to begin with that is not begun
        self.is_plain = False
        if order.seed is not None:
            self.env.seed(order.seed, order.dynamic_seed)
        answer = partial(super().reset, message)
        reset = Reset(self.env, self._messages, message, order.params, answer, True)
        self.batch.want_resets({self.env.row: reset})

    def order_reset(self, sink: MessageSink, key: Any) -> None:
        """Have the row be reset later, as its plan says."""
        self.batch.want_resets({self.env.row: self.beginning(sink, key, is_ordered=True)})

    def go_on(self, sink: MessageSink, key: Any) -> None:
        """Have the next episode begin later."""
        self.batch.want_resets({self.env.row: self.beginning(sink, key)})

    def beginning(self, sink: MessageSink, key: Any, *, is_ordered: bool = False) -> Reset:
        """Return the reset that its plan says."""
        answer = partial(self.begin_episode, sink, key)
        return Reset(self.env, sink, key, self.plan.params, answer, is_ordered)

    def plain_reset(self, sink: BlockSink) -> Reset:
        """Return the reset that follows any of its steps, while it `is_plain`."""

        def answer() -> None:
            self.begin_episode(sink, sink.replies[sink.row])

        return Reset(self.env, sink, None, {}, answer, is_ordered=False, is_plain=True)

    def begin_episode(self, sink: MessageSink, key: Any) -> None:
        """Answer a reset that was ordered and has been run; nothing if the row was closed since."""
        if not self._is_closed:
            self._answer(sink, key, self._begin(sink, key))
