"""Runs one async env: as `EnvRunner` does, but its resets and steps are awaited in an event loop.

Many async envs are under way at the same time in one worker. Requests to each of them go by
message, one after the other, and so do its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from envmgr.env.async_env import close_async, reset_async, step_async
from envmgr.env.contract import EnvContractError, StepResult
from envmgr.wire.messages import Message, RemoteFailure
from envmgr.worker.env_runner import EnvRunner, HostContext, as_it_is
from envmgr.worker.event_loop import NO_LOOP, EnvWork, Steps, wait_for
from envmgr.worker.sinks import MessageSink


class AsyncEnvRunner(EnvRunner):
    """Runs one async env, from its construction until it is closed.

    Args:
        env: as for `EnvRunner`.
        context: likewise.
        work: runs what is awaited, one thing at a time.

    Raises:
        EnvContractError: there is no event loop here, or the env's state is to be saved.
    """

    has_ordinary_steps: ClassVar[bool] = False
    is_async: ClassVar[bool] = True

    def __init__(self, env: Any, context: HostContext, work: EnvWork) -> None:
        if work.loop is None:
            raise EnvContractError(NO_LOOP)
        if context.settings.save_every is not None:
            raise EnvContractError(
                "async envs cannot be resumed: their state cannot be saved in the midst of what "
                "they await. Leave out snapshot_every"
            )
        self._work = work
        super().__init__(env, context)

    # -- steps ------------------------------------------------------------------------------

    def step(self, sink: MessageSink, key: Any, action: Any) -> bool:
        """Begin a step; return False, since nothing is left to be run later."""
        self._work.run(self._step(sink, key, action), key, "step")
        return False

    def _step(self, sink: MessageSink, key: Any, action: Any) -> Steps[None]:
        try:
            yield  # here too: it may be cancelled before its first turn
            step_result = yield from self._step_with(action)
        except BaseException as error:  # as in `take_step`
            self.report_exception(sink, key, error)
            return
        self.take_step(sink, key, as_it_is, step_result)

    def _step_with(self, action: Any) -> Steps[StepResult]:
        step_result = yield from wait_for(step_async(self.env, action))
        self._check_time()
        return step_result

    def _reset_with(self, params: Mapping[str, Any] | None) -> Steps[tuple[Any, dict[str, Any]]]:
        yield
        result = yield from wait_for(reset_async(self.env, params))
        self._check_time()
        return result

    def _check_time(self) -> None:
        """Raise if the trainer had the present work cancelled, whatever the env made of that."""
        if self._work.where is not None:
            raise EnvContractError("it was cancelled")

    def report_exception(self, sink: MessageSink, key: Any, error: BaseException) -> bool:
        """Report that a step has raised or was cancelled; return False, since no reset follows."""
        if not self._is_closed:
            self._messages.send(sink.failure_reply(key, self.failure_of(error, "step")))
        return False

    def failure_of(self, error: BaseException, during: str) -> RemoteFailure:
        """Return the failure to report for an exception of the env, or for its cancellation."""
        return self._work.cancelled(during) or super().failure_of(error, during)

    # -- resets -----------------------------------------------------------------------------

    def reset(self, message: Message) -> None:
        """Begin to run a RESET request."""
        self._work.run(self.reset_and_answer(message), message, "reset")

    def reset_later(self, sink: MessageSink, key: Any) -> None:
        """Begin the reset that follows an episode."""
        self._work.run(self._reset_as_planned(sink, key), key, "reset")

    def when_reset(self, then: Callable[[], None], message: Message) -> None:
        """Call `then` for a request, once the reset that is under way, if any, is over."""
        self._work.run_after(then, message, "reset")

    def _reset_as_planned(self, sink: MessageSink, key: Any) -> Steps[None]:
        try:
            observation, info = yield from self._reset_with(self.plan.params)
        except BaseException as error:  # as in `take_step`
            if not self._is_closed:
                self._messages.send(sink.failure_reply(key, self.failure_of(error, "reset")))
            return
        self.send(sink, key, self._answer_reset(sink, key, observation, info))

    # -- its end ----------------------------------------------------------------------------

    def close_async(self) -> Steps[None]:
        """Cancel what is under way and close the env, ignoring what it raises."""
        self._is_closed = True
        yield from self._work.stop()
        yield
        try:
            yield from wait_for(close_async(self.env))
        except BaseException as error:  # the env is gone either way
            self._messages.failure_of(error, "close")

    def close(self) -> None:
        """Give the env up, where nothing can be awaited any more."""
        self._is_closed = True
