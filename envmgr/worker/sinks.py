"""Where the answers of envs go: into messages, or into the env's row of the shared block.

What the block has no room for (failures, large or odd infos, odd rewards) goes by message,
exactly as the answer to a request that came by message.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envmgr.env.contract import StepResult, info_of
from envmgr.wire.block import (
    AFTER_SHIFT,
    DONE,
    ENDING_SHIFT,
    HAS_INFO,
    INFO_BYTES,
    REWARD_SHIFT,
    Block,
    items,
    request_of,
)
from envmgr.wire.frames import FrameError, encode
from envmgr.wire.hosts import HostSettings
from envmgr.wire.infos import InfoEncoder
from envmgr.wire.messages import AfterStep, FailureKind, Message, Op, RemoteFailure, make_message
from envmgr.wire.rewards import FIRST_ARRAY, FIRST_WIDE, kind_of_reward
from envmgr.worker.checks import kind_of
from envmgr.worker.interrupts import pass_on

Send = Callable[[Any], None]


class MessageSink:
    """Answers requests by message. What its methods return is to be sent.

    Each request is known by a key: here the message that it came with.

    Args:
        encode: turns a reply into what is sent; raises FrameError for what cannot be sent.
        send: sends it.
        settings: say which operations are announced, and which exceptions are not the env's.
    """

    def __init__(
        self, encode: Callable[[Message], Any], send: Send, settings: HostSettings
    ) -> None:
        self.encode = encode
        self.send = send
        self.settings = settings

    def request(self, key: Any) -> Message:
        """Return the request, for replies by message."""
        request: Message = key
        return request

    def announce(self, key: Any, op: int = Op.RESET) -> None:
        """Say that a request is run from now on, if anybody wants to know."""
        if op in self.settings.announced:
            self.send(self.encode(key._replace(op=Op.BEGAN, payload=None)))

    def reply(self, key: Any, op: Op, payload: Any) -> Any:
        """Return an encoded reply.

        Raises:
            FrameError: it cannot be sent.
        """
        _, env_id, generation, request_id, _ = self.request(key)
        return self.encode(make_message((op, env_id, generation, request_id, payload)))

    def failed(self, key: Any, failure: RemoteFailure) -> Any:
        """Return an encoded FAILED."""
        try:
            return self.reply(key, Op.FAILED, failure)
        except FrameError as error:  # an info that cannot be sent
            text = f"its info cannot be sent: {error}"
            failure = RemoteFailure(failure.kind, failure.during, message=text)
            return self.reply(key, Op.FAILED, failure)

    def refuse(self, key: Any, during: str, text: str) -> None:
        """Send a FAILED: this request cannot be run."""
        failure = RemoteFailure(FailureKind.PROTOCOL, during, message=text)
        self.send(self.failed(key, failure))

    def raised(self, key: Any, error: BaseException, during: str, *, of_batch: bool = False) -> Any:
        """Return an encoded FAILED that reports an exception; raise it if it is not the env's.

        Args:
            key: the request.
            error: the exception.
            during: as in `RemoteFailure`.
            of_batch: likewise.
        """
        failure = self.failure_of(error, during)
        return self.failed(key, replace(failure, of_batch=of_batch) if of_batch else failure)

    def failure_of(self, error: BaseException, during: str) -> RemoteFailure:
        """Return what is reported of an exception of env code; raise it if it is not the env's."""
        pass_on(error, self.settings)
        return RemoteFailure.from_exception(error, during, kind_of(error))

    def stepped(
        self,
        key: Any,
        reference: Any,
        step_result: StepResult,
        after: AfterStep,
        complete: Callable[[], Sequence[Any]] | None,
    ) -> tuple[Sequence[Any], bool]:
        """Answer a step whose observation has been committed.

        Args:
            key: the request.
            reference: to the observation.
            step_result: what else the step gave.
            after: what this host does by itself after it.
            complete: begins the next episode, without which the step is not complete; None if it
                is. By message it is left to be run later: the reply to it tells.

        Returns:
            The replies, and whether `complete` was run.
        """
        _, reward, done, ending, info = step_result
        info = info_of(ending, info)
        try:
            reply = self.reply(key, Op.STEPPED, (reference, reward, done, info, int(after)))
        except FrameError as error:
            parts = {"observation": reference, "reward": reward, "info": info}
            raise self._blaming(parts, error) from error
        return (reply,), False

    def begun(self, key: Any, reference: Any, info: Any) -> Sequence[Any]:
        """Answer a reset whose observation has been committed; return the replies."""
        try:
            return (self.reply(key, Op.RESET_DONE, (reference, info)),)
        except FrameError as error:
            raise self._blaming({"observation": reference, "info": info}, error) from error

    def _blaming(self, parts: Mapping[str, Any], error: FrameError) -> FrameError:
        """Return an error that names the part of a reply that cannot be sent."""
        for name, part in parts.items():
            try:
                encode(Message(Op.RESULT, 0, 0, 0, part))  # not `reply`: it is not sent
            except FrameError as of_part:
                text = f"its {name}, a {type(part).__name__}, cannot be sent: {of_part}"
                return FrameError(text)
        return error


class BlockSink(MessageSink):
    """Answers in a row of the block, where there is room; the key of a request is its token.

    Args:
        block: the columns.
        row: which.
        env_id: the env.
        messages: how what there is no room for is sent.
        announce: told that the env of the row begins with a reset.
    """

    def __init__(
        self,
        block: Block,
        row: int,
        env_id: int,
        messages: MessageSink,
        announce: Callable[[int], None],
    ) -> None:
        super().__init__(messages.encode, messages.send, messages.settings)
        self.block = block
        self.row = row
        self.env_id = env_id
        self._begin = announce
        self._encoder = InfoEncoder(INFO_BYTES)
        self._room = block.plan.reward_room
        self.rewards = items(block.rewards)
        self.flags = items(block.flags)
        self.replies = items(block.replies)

    def request(self, key: Any) -> Message:
        """Return the request of a token."""
        generation, request_id = request_of(key)
        return Message(Op.STEP, self.env_id, generation, request_id, None)

    def announce(self, key: Any, op: int = Op.RESET) -> None:
        """Say so in the block."""
        self._begin(self.row)

    def stepped(
        self,
        key: Any,
        reference: Any,
        step_result: StepResult,
        after: AfterStep,
        complete: Callable[[], Sequence[Any]] | None,
    ) -> tuple[Sequence[Any], bool]:
        """Write the answer; it counts when it is complete."""
        _, reward, done, ending, info = step_result
        kind = 0 if type(reward) is float else kind_of_reward(reward, self._room)
        data = self._encoded(info)
        if kind is None or data is None:
            return super().stepped(key, reference, step_result, after, complete)
        row = self.row
        if kind < FIRST_ARRAY:
            self.rewards[row] = float(reward)
        elif kind < FIRST_WIDE:
            self.rewards[row] = reward.item()
        else:
            self.block.wide_rewards[row, : len(reward)] = reward
        # Not before: the env may use its array of rewards again.
        replies = () if complete is None else complete()
        flags = reference | ending << ENDING_SHIFT | int(after) << AFTER_SHIFT
        flags |= kind << REWARD_SHIFT | (DONE if done else 0)
        if data:
            self.block.infos[row, : len(data)] = memoryview(data)
            flags |= HAS_INFO
        self.flags[row] = flags
        self.replies[row] = key  # last: from now on the answer counts
        return replies, complete is not None

    def begun(self, key: Any, reference: Any, info: Any) -> Sequence[Any]:
        """Write the answer."""
        data = b"" if type(info) is dict and not info else self._encoded(info)
        if data is None:
            return super().begun(key, reference, info)
        flags, row = reference, self.row
        if data:
            self.block.reset_infos[row, : len(data)] = memoryview(data)
            flags |= HAS_INFO
        self.block.reset_flags[row] = flags
        self.block.resets[row] = key
        return ()

    def _encoded(self, info: Any) -> bytes | None:
        if type(info) is not dict:
            return None
        return self._encoder.encode(info) if info else b""
