"""Where the answers of envs go: into messages, or into the env's row of the shared block.

There is one way to answer a step or a reset, and it ends in one of these two places. What the block
has no room for (failures, large or odd infos, odd rewards, long texts) goes by message, exactly as
the answer to a request that came by message. This module also decides how an exception of env code
is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from envmgr.env.contract import EnvContractError, StepResult, info_of
from envmgr.env.vector_infos import NumberColumn
from envmgr.hot import hot
from envmgr.spaces import NonFiniteError, ValueMismatchError
from envmgr.spaces.interrupts import came_through_a_handler, pass_interrupt_on
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
from envmgr.wire.info_forms import (
    HostForms,
    InfoForm,
    InfoWriter,
    RecordTable,
    form_of_columns,
)
from envmgr.wire.infos import InfoEncoder
from envmgr.wire.messages import AfterStep, FailureKind, Message, Op, RemoteFailure, make_message
from envmgr.wire.rewards import FIRST_ARRAY, FIRST_WIDE, kind_of_reward
from envmgr.worker.copies import UNCHANGEABLE, copied_info

Send = Callable[[Any], None]


def reraise_interrupt(error: BaseException, settings: HostSettings) -> None:
    """Raise an exception that came while env code ran, if it is not the env's own.

    That is Ctrl-C, and whatever else a signal handler of the trainer raises, where envs run in the
    trainer's own thread. In workers there are no such exceptions.
    """
    if not settings.propagate:
        return
    if isinstance(error, settings.propagate) or came_through_a_handler(error):
        raise error


def failure_kind_of(error: BaseException) -> FailureKind:
    """Return the failure kind of an exception raised by env code or by a check of its results."""
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return FailureKind.EXITED
    if isinstance(error, NonFiniteError):
        return FailureKind.NON_FINITE
    if isinstance(error, (ValueMismatchError, FrameError, EnvContractError)):
        return FailureKind.PROTOCOL
    return FailureKind.RAISED


class MessageSink:
    """Answers requests by message. What the methods `answer_...` return is still to be sent.

    Each request is known by a key: here, the message that it came with.

    Args:
        encode: encodes a reply for sending; raises FrameError for one that cannot be sent.
        settings: says which operations are announced, and which exceptions are not the env's.
    """

    def __init__(
        self, encode: Callable[[Message], Any], send: Send, settings: HostSettings
    ) -> None:
        self.encode = encode
        self.send = send
        self.settings = settings

    def request(self, key: Any) -> Message:
        """Return the request as a message, which replies by message are made from."""
        request: Message = key
        return request

    def announce(self, key: Any, op: int = Op.RESET, *, goes_on: bool = False) -> None:
        """Tell the trainer that this request is being run from now on, if it wants to know.

        Args:
            key: the request.
            op: what it asks for.
            goes_on: whether other requests are run meanwhile.
        """
        if op in self.settings.announced:
            self.send(self.encode(key._replace(op=Op.BEGAN, payload=goes_on)))

    def reply(self, key: Any, op: Op, payload: Any) -> Any:
        """Return an encoded reply to a request.

        Raises:
            FrameError: the payload cannot be sent.
        """
        _, env_id, generation, request_id, _ = self.request(key)
        return self.encode(make_message((op, env_id, generation, request_id, payload)))

    def failure_reply(self, key: Any, failure: RemoteFailure) -> Any:
        """Return an encoded FAILED reply."""
        try:
            return self.reply(key, Op.FAILED, failure)
        except FrameError as error:  # an info that cannot be sent
            text = f"its info cannot be sent: {error}"
            failure = RemoteFailure(failure.kind, failure.during, message=text)
            return self.reply(key, Op.FAILED, failure)

    def refuse(self, key: Any, during: str, text: str) -> None:
        """Send a FAILED reply to a request that cannot be run at all."""
        failure = RemoteFailure(FailureKind.PROTOCOL, during, message=text)
        self.send(self.failure_reply(key, failure))

    def exception_reply(
        self, key: Any, error: BaseException, during: str, *, of_batch: bool = False
    ) -> Any:
        """Return an encoded FAILED reply that reports an exception; raise it if not the env's.

        Args:
            key: the request.
            error: the exception.
            during: as in `RemoteFailure`.
            of_batch: likewise.
        """
        failure = self.failure_of(error, during)
        if of_batch:
            failure = replace(failure, of_batch=True)
        return self.failure_reply(key, failure)

    def failure_of(self, error: BaseException, during: str) -> RemoteFailure:
        """Return the failure to report for an exception; raise it if it is not the env's."""
        reraise_interrupt(error, self.settings)
        return RemoteFailure.from_exception(error, during, failure_kind_of(error))

    def answer_step(
        self,
        key: Any,
        reference: Any,
        step_result: StepResult,
        after: AfterStep,
        begin_next: Callable[[], Sequence[Any]] | None,
    ) -> tuple[Sequence[Any], bool]:
        """Answer a step whose observation has been written.

        Args:
            key: the request.
            reference: the reference to the observation.
            step_result: what else the step gave.
            after: what this host does by itself after the step.
            begin_next: begins the next episode within this step (`reset_inplace`); None if that is
                not to happen. If the answer goes by message, the reset comes later, with a reply of
                its own, and this is not called.

        Returns:
            The messages to send, and whether `begin_next` was called.
        """
        _, reward, done, ending, info = step_result
        info = info_of(ending, info)
        try:
            reply = self.reply(key, Op.STEPPED, (reference, reward, done, info, int(after)))
        except FrameError as error:
            parts = {"observation": reference, "reward": reward, "info": info}
            raise self._blaming(parts, error) from error
        return (reply,), False

    def answer_reset(self, key: Any, reference: Any, info: Any) -> Sequence[Any]:
        """Answer a reset whose observation has been written; return the messages to send."""
        try:
            return (self.reply(key, Op.RESET_DONE, (reference, info)),)
        except FrameError as error:
            raise self._blaming({"observation": reference, "info": info}, error) from error

    def _blaming(self, parts: Mapping[str, Any], error: FrameError) -> FrameError:
        """Return an error that names the part of the reply that cannot be sent."""
        for name, part in parts.items():
            try:
                encode(Message(Op.RESULT, 0, 0, 0, part))  # not `reply`: it is not sent
            except FrameError as of_part:
                text = f"its {name}, a {type(part).__name__}, cannot be sent: {of_part}"
                return FrameError(text)
        return error


class BlockSink(MessageSink):
    """Answers in a row of the shared block; the key of a request is its token.

    Args:
        messages: sends what the block has no room for.
        note_running: called with the row when its env begins with a reset.
        forms: what the host knows of the forms of infos.

    Attributes:
        forms: likewise.
        write_info: writes the info of a step, a dict that is not empty, where it costs least;
            returns false if the info has to go another way.
        write_reset_info: likewise for a reset.
    """

    def __init__(
        self,
        block: Block,
        row: int,
        env_id: int,
        messages: MessageSink,
        note_running: Callable[[int], None],
        forms: HostForms,
    ) -> None:
        super().__init__(messages.encode, messages.send, messages.settings)
        self.block = block
        self.row = row
        self.env_id = env_id
        self.forms = forms
        self._note_running = note_running
        self._encoder = InfoEncoder(INFO_BYTES)
        self.write_info: WriteInfo
        self.write_reset_info: WriteInfo
        self._note_odd = self._note_odd_reset = _ignore
        if (handed_over := block.plan.handed_over) is not None:
            self.write_info = _handing_over(handed_over.infos, row)
            self.write_reset_info = _handing_over(handed_over.reset_infos, row)
        else:
            numbers = items(block.info_forms), items(block.reset_info_forms)
            records = items(block.infos[row]), items(block.reset_infos[row])
            of_steps = InfoWriter(forms, forms.of_steps, env_id, records[0], numbers[0], row)
            of_resets = InfoWriter(forms, forms.of_resets, env_id, records[1], numbers[1], row)
            self.write_info, self._note_odd = of_steps.function, of_steps.note_odd
            self.write_reset_info, self._note_odd_reset = of_resets.function, of_resets.note_odd
        self._reward_length = block.plan.reward_length
        self.rewards = items(block.rewards)
        self.flags = items(block.flags)
        self.replies = items(block.replies)
        self.reset_flags = items(block.reset_flags)
        self.resets = items(block.resets)

    def request(self, key: Any) -> Message:
        """Return the request that a token stands for, as a message."""
        generation, request_id = request_of(key)
        return Message(Op.STEP, self.env_id, generation, request_id, None)

    def announce(self, key: Any, op: int = Op.RESET, *, goes_on: bool = False) -> None:
        """Say in the block that the env of this row is being run from now on."""
        self._note_running(self.row)

    def answer_step(
        self,
        key: Any,
        reference: Any,
        step_result: StepResult,
        after: AfterStep,
        begin_next: Callable[[], Sequence[Any]] | None,
    ) -> tuple[Sequence[Any], bool]:
        """Write the answer into the block, the token last: from then on it counts."""
        _, reward, done, ending, info = step_result
        kind = 0 if type(reward) is float else kind_of_reward(reward, self._reward_length)
        has_room = type(reference) is int and self.has_written(info)
        if kind is None or not has_room:
            return super().answer_step(key, reference, step_result, after, begin_next)
        row = self.row
        if kind < FIRST_ARRAY:
            self.rewards[row] = float(reward)
        elif kind < FIRST_WIDE:
            self.rewards[row] = reward.item()
        else:
            self.block.wide_rewards[row, : len(reward)] = reward
        # The reward is written before the reset, in which the env may reuse its array of rewards.
        messages = () if begin_next is None else begin_next()
        flags = reference | ending << ENDING_SHIFT | int(after) << AFTER_SHIFT
        flags |= kind << REWARD_SHIFT | (DONE if done else 0)
        if info:
            flags |= HAS_INFO
        self.flags[row] = flags
        self.replies[row] = key  # last: from now on the answer counts
        return messages, begin_next is not None

    def answer_reset(self, key: Any, reference: Any, info: Any) -> Sequence[Any]:
        """Write the answer into the block, the token last."""
        flags, row = reference, self.row
        has_room = type(reference) is int and type(info) is dict
        has_info = has_room and (
            not info
            or self.write_reset_info(info)
            or self._has_encoded(info, self._note_odd_reset, self.block.reset_infos)
        )
        if not has_info:
            return super().answer_reset(key, reference, info)
        self.reset_flags[row] = flags | HAS_INFO if info else flags
        self.resets[row] = key  # last, as above
        return ()

    def has_written(self, info: Any) -> bool:
        """Write the info of a step beside the answer that follows; False if there is no room."""
        if type(info) is not dict:
            return False
        return (
            not info
            or self.write_info(info)
            or self._has_encoded(info, self._note_odd, self.block.infos)
        )

    def _has_encoded(self, info: dict[Any, Any], note_odd: Any, infos: Any) -> bool:
        """Write an info as a whole; False if there is no room for it."""
        if self.block.plan.handed_over is not None:
            return False
        note_odd(info)
        data = self._encoder.encode(info)
        if data is None:
            return False
        infos[self.row, : len(data)] = memoryview(data)
        return True


class ColumnSink:
    """Writes the infos of steps of a batch that gives them as columns.

    Args:
        sinks: the sinks of all rows of the batch, which are side by side in the block.
    """

    def __init__(self, sinks: Sequence[BlockSink]) -> None:
        first, count = sinks[0], len(sinks)
        self._forms, self._env_id = first.forms, first.env_id
        self._count = count
        self._first = first.row
        rows = slice(first.row, first.row + count)
        handed_over = first.block.plan.handed_over
        self._handed_over = None if handed_over is None else handed_over.infos
        if handed_over is None:
            self._numbers, self._infos = first.block.info_forms[rows], first.block.infos[rows]
        self._described: Any = None
        self._records: RecordTable | None = None
        self._number, self._version = 0, -1

    def write(self, columns: Sequence[NumberColumn], mask: Any) -> Any:
        """Write infos beside the answers that follow, as records.

        Args:
            columns: the infos of all rows.
            mask: (n,) bool: the rows to write for; None: all of them.

        Returns:
            (n,) bool: which of the rows have an info; True: all of them. None: nothing was written,
            and the infos have to go another way.
        """
        described = [(path, values.dtype, values.shape) for path, values, _ in columns]
        if described != self._described:
            form = form_of_columns(columns)
            self._records = None if form is None else RecordTable(form, self._count)
            self._described, self._version = described, -1
        records = self._records
        if records is None or (self._handed_over is None and not self._has_number(records.form)):
            return None
        rows: Any = slice(None) if mask is None else mask.nonzero()[0]
        records.write(columns, rows)
        if self._handed_over is None:
            self._infos[rows, : records.form.nbytes] = records.table[rows]
            self._numbers[rows] = self._number
        elif mask is None:
            self._handed_over[self._first : self._first + self._count] = records.rows
        else:
            for row in rows.tolist():
                self._handed_over[self._first + row] = records.rows[row]
        present = [one for _, _, one in columns if one is not None]
        return np.logical_or.reduce(present) if len(present) == len(columns) else True

    def _has_number(self, form: InfoForm) -> bool:
        """Return whether the trainer has numbered a form; tell it of a form it does not know."""
        forms = self._forms
        if self._version != forms.versions[0]:
            number = forms.number_of(form)
            if number is None and not forms.is_given_up:
                forms.propose(self._env_id, form)
            self._number, self._version = number or 0, forms.versions[0]
        return self._number != 0 and not forms.is_given_up


def _ignore(info: dict[Any, Any]) -> None:
    """Take no note of an info that goes as a whole."""


WriteInfo = Callable[[dict[Any, Any]], bool]


def _handing_over(infos: list[Any], row: int) -> WriteInfo:
    """Return a function that puts copies of infos where the trainer in this process finds them."""
    function: WriteInfo = partial(_hand_over, infos, row)
    if hot is not None:
        types = tuple(UNCHANGEABLE)
        function = hot.HandedInfos(infos=infos, row=row, otherwise=function, types=types)
    return function


def _hand_over(infos: list[Any], row: int, info: dict[Any, Any]) -> bool:
    """Put a copy of an info where the trainer, which is in the same process, finds it."""
    try:
        infos[row] = copied_info(info)
    except Exception as error:  # of what cannot be copied: it goes by message, if that is possible
        pass_interrupt_on(error)
        return False
    return True
