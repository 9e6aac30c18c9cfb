"""Frames: what goes in comes out, and nothing else is taken for a frame."""

from __future__ import annotations

import pickle
import struct
import threading
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmgr.wire import frames
from envmgr.wire.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameError,
    encode,
    split_frame,
)
from envmgr.wire.messages import (
    AfterStep,
    Attribute,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    RemoteFailure,
    ResetRequest,
)


def decode(data: Any) -> Message:
    parsed = split_frame(data)
    assert parsed is not None
    frame, length = parsed
    assert length == len(data)
    return frame.message()


payloads = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=6,
)
messages = st.builds(
    Message,
    st.sampled_from(Op),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    payloads,
)


# -- round trips ----------------------------------------------------------------------------------


@given(messages)
def test_what_is_encoded_is_decoded(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "payload",
    [
        ResetRequest({"level": 3}, 7, None, EpisodePlan(True, float("inf"), {"level": 3})),
        (0, 1.0, True, {"terminated": True}, AfterStep.RESETS),
        RemoteFailure(FailureKind.RAISED, "step", "ValueError", "boom", "Traceback ...", {"a": 1}),
        Attribute(True, None),
    ],
    ids=lambda p: type(p).__name__,
)
def test_payloads_of_the_protocol_keep_their_types(payload: Any) -> None:
    again = decode(encode(Message(Op.RESULT, 1, 2, 3, payload))).payload
    assert again == payload
    assert type(again) is type(payload)


def test_arrays_keep_dtype_and_shape_and_can_be_written() -> None:
    array = np.arange(6, dtype=">i2").reshape(2, 3)
    again = decode(encode(Message(Op.RESULT, 0, 0, 1, array))).payload
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)
    assert again.flags.writeable


def test_no_payload_takes_no_bytes() -> None:
    data = encode(Message(Op.CLOSED, 3, 4, 5, None))
    assert len(data) == HEADER_BYTES
    assert decode(data) == Message(Op.CLOSED, 3, 4, 5, None)


@pytest.mark.parametrize("payload", [False, 0, "", [], (), {}], ids=repr)
def test_empty_values_are_not_taken_for_no_payload(payload: Any) -> None:
    again = decode(encode(Message(Op.RESULT, 0, 0, 1, payload))).payload
    assert again == payload
    assert type(again) is type(payload)


def test_what_plain_pickle_refuses_goes_through_cloudpickle() -> None:
    class Local:
        def __call__(self) -> str:
            return "here"

    payload = (lambda x: x + 1, Local())
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(payload)
    function, instance = decode(encode(Message(Op.CALL, 0, 0, 1, payload))).payload
    assert function(1) == 2
    assert instance() == "here"


# -- what cannot be sent --------------------------------------------------------------------------


class Refuses:
    """Raises when it is pickled."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "payload",
    [Refuses(RuntimeError("not me")), (n for n in ()), threading.Lock()],
    ids=["own error", "generator", "lock"],
)
def test_what_cannot_be_pickled_is_a_frame_error(payload: Any) -> None:
    with pytest.raises(FrameError):
        encode(Message(Op.STEP, 0, 0, 1, payload))


def test_the_error_names_what_the_object_raised() -> None:
    with pytest.raises(FrameError, match="RuntimeError: not me"):
        encode(Message(Op.STEP, 0, 0, 1, {"deep": [Refuses(RuntimeError("not me"))]}))


def test_too_large_a_payload_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_PAYLOAD_BYTES", 100)
    encode(Message(Op.STEP, 0, 0, 1, "a" * 50))
    with pytest.raises(FrameError, match=r"\d+ bytes exceed the limit of 100"):
        encode(Message(Op.STEP, 0, 0, 1, "a" * 100))


# -- what cannot be read --------------------------------------------------------------------------


def test_a_truncated_frame_is_not_complete_at_any_length() -> None:
    data = encode(Message(Op.STEPPED, 1, 2, 3, {"a": list(range(20))}))
    for length in range(len(data)):
        assert split_frame(data[:length]) is None
        assert split_frame(bytearray(data[:length])) is None
        assert split_frame(memoryview(data)[:length]) is None


@given(messages, st.binary(max_size=40))
def test_bytes_after_a_frame_are_left_alone(message: Message, rest: bytes) -> None:
    data = encode(message)
    parsed = split_frame(data + rest)
    assert parsed is not None
    assert parsed[1] == len(data)
    assert parsed[0].message() == message


@given(st.binary(min_size=HEADER_BYTES, max_size=200))
def test_garbage_is_a_frame_error(data: bytes) -> None:
    refused = ""
    parsed = None
    try:
        parsed = split_frame(data)
    except FrameError as error:
        refused = str(error)
    if refused:
        assert data[:HEADER_BYTES].hex() in refused
    else:  # only what begins with the magic number and the version may pass for a frame
        assert data[:3] == encode(Message(Op.CLOSE, 0, 0, 0, None))[:3]
        assert parsed is None or parsed[1] <= len(data)


def header(**changes: int) -> bytes:
    fields = {"magic": 0xE17A, "version": 1, "op": 64, "env": 1, "gen": 2, "request": 3, "n": 0}
    data = struct.pack("<HBBIIQI", *{**fields, **changes}.values())
    return data + struct.pack("<II", zlib.crc32(data), 0)


def test_the_header_is_what_it_is_documented_to_be() -> None:
    assert encode(Message(64, 1, 2, 3, None)) == header()


@pytest.mark.parametrize(
    "changes", [{"magic": 0xE17B}, {"version": 2}, {"n": MAX_PAYLOAD_BYTES + 1}, {"n": 2**32 - 1}]
)
def test_a_header_of_another_protocol_or_an_absurd_length_is_a_frame_error(
    changes: dict[str, int],
) -> None:
    with pytest.raises(FrameError, match="not a frame: it begins with"):
        split_frame(header(**changes) + b"x" * 10)


def test_the_largest_length_is_waited_for() -> None:
    assert split_frame(header(n=MAX_PAYLOAD_BYTES) + b"x" * 10) is None


def test_a_flipped_bit_is_seen_before_anything_is_unpickled() -> None:
    frame = encode(Message(Op.RESULT, 1, 2, 3, "x" * 50))
    unseen = []
    for bit in range(8 * (HEADER_BYTES + 30)):
        data = bytearray(frame)
        data[bit // 8] ^= 1 << bit % 8
        try:
            split_frame(data)
        except FrameError as error:
            if "frame: it begins with" in str(error):
                continue
        unseen.append(bit)
    assert unseen == []


@pytest.mark.parametrize("body", [b"garbage", b"\x80\x05", b"cnowhere\nnothing\n."])
def test_a_body_that_cannot_be_unpickled_is_a_frame_error(body: bytes) -> None:
    with pytest.raises(FrameError, match="cannot be unpickled"):
        Frame(Op.RESULT, 0, 0, 1, body).message()


def _explode() -> None:
    raise KeyError("as it is unpickled")


class Explodes:
    def __reduce__(self) -> Any:
        return _explode, ()


class Ends:
    def __init__(self, how: type[BaseException]) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return _end, (self.how,)


def _end(how: type[BaseException]) -> None:
    raise how


class ShowsNothing(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("how", [SystemExit, GeneratorExit, RecursionError, ShowsNothing])
def test_no_payload_ends_the_process_that_reads_it(how: type[BaseException]) -> None:
    parsed = split_frame(encode(Message(Op.RESULT, 0, 0, 1, Ends(how))))
    assert parsed is not None
    with pytest.raises(FrameError, match=how.__name__):
        parsed[0].message()


def test_errors_of_an_objects_own_unpickling_are_frame_errors() -> None:
    data = encode(Message(Op.RESULT, 0, 0, 1, Explodes()))
    parsed = split_frame(data)
    assert parsed is not None
    assert parsed[0][:4] == (Op.RESULT, 0, 0, 1)  # who it is for can be read all the same
    with pytest.raises(FrameError, match="KeyError: 'as it is unpickled'"):
        parsed[0].message()


def test_requests_and_replies_have_numbers_of_their_own() -> None:
    assert {op for op in Op if op < 64} == {
        Op.ATTACH,
        Op.RESET,
        Op.STEP,
        Op.RENEW,
        Op.CALL,
        Op.GET_ATTR,
        Op.SET_ATTR,
        Op.CLOSE,
        Op.RELEASE,
        Op.CANCEL,
        Op.APPLY,
        Op.ADOPT,
        Op.INFO_FORMS,
    }
    assert len({*Op}) == len(Op.__members__)
    assert len({*FailureKind}) == len(FailureKind.__members__)
    assert max(Op) < 256  # one byte in the header


# -- exceptions as text ---------------------------------------------------------------------------


class TwoArgumentsError(Exception):
    """Cannot be rebuilt from its args."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"{code} at {where}")


class UnprintableError(Exception):
    """Raises when it is shown, in whatever way."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class HoldsALambdaError(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(lambda: None)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_exception_becomes_text_with_its_traceback_and_causes() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error
    except ValueError as error:
        failure = RemoteFailure.from_exception(error, "step")
    assert failure.kind is FailureKind.RAISED
    assert failure.during == "step"
    assert failure.type_name == "ValueError"
    assert failure.message == "second"
    assert "KeyError: 'first'" in failure.traceback_text
    assert "direct cause" in failure.traceback_text
    assert __file__ in failure.traceback_text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TwoArgumentsError(3, "home"), "3 at home"),
        (UnprintableError(), "<its text cannot be shown: RuntimeError>"),
        (SystemExit(3), "3"),
        (KeyboardInterrupt(), ""),
    ],
    ids=lambda x: type(x).__name__,
)
def test_odd_exceptions_become_text_and_travel(error: BaseException, message: str) -> None:
    failure = RemoteFailure.from_exception(raised(error), "reset", FailureKind.EXITED)
    assert failure.message == message
    assert failure.kind is FailureKind.EXITED
    assert __file__ in failure.traceback_text
    assert decode(encode(Message(Op.FAILED, 0, 0, 1, failure))).payload == failure


def test_local_classes_are_named_and_unpicklable_exceptions_travel() -> None:
    class LocalError(Exception):
        pass

    failure = RemoteFailure.from_exception(raised(LocalError("x")), "step")
    assert failure.type_name == (
        f"{__name__}.test_local_classes_are_named_and_unpicklable_exceptions_travel"
        ".<locals>.LocalError"
    )
    failure = RemoteFailure.from_exception(raised(HoldsALambdaError()), "step")
    assert decode(encode(Message(Op.FAILED, 0, 0, 1, failure))).payload == failure


def test_an_exception_that_was_never_raised_has_text_too() -> None:
    failure = RemoteFailure.from_exception(ValueError("x"), "step")
    assert failure.message == "x"
    assert "ValueError: x" in failure.traceback_text


def test_the_names_of_builtin_exceptions_are_short_and_others_are_qualified() -> None:
    assert RemoteFailure.from_exception(OSError("x"), "step").type_name == "OSError"
    error = TwoArgumentsError(1, "x")
    name = RemoteFailure.from_exception(error, "step").type_name
    assert name == f"{__name__}.TwoArgumentsError"
