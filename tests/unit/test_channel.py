"""Frames over real pipes, both ends in this process: parts of frames, many at once, the end."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmgr.wire.channel import ChannelClosedError, FrameChannel
from envmgr.wire.frames import FrameError, encode, split_frame
from envmgr.wire.messages import Message, Op

GARBAGE = b"this is not a frame at all, it is text"


def message(number: int = 1, payload: Any = "hello") -> Message:
    return Message(Op.STEP, 1, 2, number, payload)


def two_ends(*, other_blocks: bool = True) -> tuple[FrameChannel, FrameChannel]:
    """Return the parent's end, which never blocks, and the host's."""
    (down_out, down_in), (up_out, up_in) = os.pipe(), os.pipe()
    parent = FrameChannel(up_out, down_in, blocking=False)
    return parent, FrameChannel(down_out, up_in, blocking=other_blocks)


@pytest.fixture
def ends() -> Iterator[tuple[FrameChannel, FrameChannel]]:
    pair = two_ends()
    yield pair
    for end in pair:
        end.close()


def received(channel: Any) -> list[Message]:
    return [frame.message() for frame in channel.receive()]


def write(channel: FrameChannel, data: bytes) -> None:
    """Write bytes past the channel's own `send`."""
    assert os.write(channel.write_fd, data) == len(data)


# -- whole frames ---------------------------------------------------------------------------------


def test_a_frame_arrives_whole_in_both_directions(ends: Any) -> None:
    parent, host = ends
    parent.send(encode(message(1)))
    assert received(host) == [message(1)]
    host.send(encode(message(2, None)))
    assert received(parent) == [message(2, None)]


def test_many_frames_at_once_arrive_in_order(ends: Any) -> None:
    parent, host = ends
    sent = [message(number, "a" * number) for number in range(1, 100)]
    for one in sent:
        parent.send(encode(one))
    assert received(host) == sent


def test_an_end_that_never_blocks_finds_nothing(ends: Any) -> None:
    parent, _ = ends
    assert received(parent) == []
    assert received(parent) == []


def test_the_fd_becomes_readable_when_a_frame_is_there(ends: Any) -> None:
    parent, host = ends
    assert parent.fileno() in parent.fds
    host.send(encode(message()))
    os.set_blocking(parent.fileno(), False)
    assert os.read(parent.fileno(), 4) == encode(message())[:4]


# -- parts of frames ------------------------------------------------------------------------------


def test_a_frame_that_arrives_byte_by_byte_is_put_together(ends: Any) -> None:
    parent, host = ends
    data = encode(message())
    for index in range(len(data) - 1):
        write(host, data[index : index + 1])
        assert received(parent) == []
    write(host, data[-1:])
    assert received(parent) == [message()]


def test_a_frame_and_a_half_and_the_other_half(ends: Any) -> None:
    parent, host = ends
    first, second, third = (encode(message(number)) for number in (1, 2, 3))
    write(host, first + second[:30])
    assert received(parent) == [message(1)]
    assert received(parent) == []
    write(host, second[30:] + third)
    assert received(parent) == [message(2), message(3)]


@given(st.lists(st.integers(0, 200), min_size=1, max_size=8), st.data())
def test_frames_survive_any_cutting_of_the_stream(sizes: list[int], data: st.DataObject) -> None:
    sent = [message(number, "x" * size) for number, size in enumerate(sizes)]
    stream = b"".join(map(encode, sent))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    parent, host = two_ends()
    try:
        found: list[Message] = []
        for begin, end in itertools.pairwise([0, *cuts, len(stream)]):
            if end > begin:
                write(host, stream[begin:end])
                found += received(parent)
        assert found == sent
    finally:
        parent.close()
        host.close()


# -- frames larger than the pipe ------------------------------------------------------------------


@pytest.mark.parametrize("n_bytes", [65_536, 1 << 18, (1 << 18) + 1, 3_000_000])
def test_a_large_frame_is_sent_in_parts_and_never_blocks(ends: Any, n_bytes: int) -> None:
    parent, host = ends
    big, after = message(1, b"b" * n_bytes), message(2)
    parent.send(encode(big))
    assert parent.has_unsent  # more than a pipe takes, and nobody reads yet
    parent.send(encode(after))  # waits behind what is kept
    found: list[Message] = []
    while len(found) < 2:
        found += received(host)
        parent.flush()
    assert found == [big, after]
    assert not parent.has_unsent
    parent.flush()  # nothing to do


def test_what_is_kept_keeps_its_order_when_the_pipe_takes_more_in_between(ends: Any) -> None:
    parent, host = ends
    sent = [message(number, b"b" * 50_000) for number in range(8)]
    found: list[Message] = []
    for one in sent:
        parent.send(encode(one))
        found += received(host)
    while len(found) < len(sent):
        parent.flush()
        found += received(host)
    assert found == sent


def test_a_full_pipe_is_no_error_and_keeps_everything(ends: Any) -> None:
    parent, host = ends
    frame = encode(message(1, b"b" * 1000))
    n_sent = 0
    while not parent.has_unsent:
        parent.send(frame)
        n_sent += 1
    for _ in range(5):
        parent.send(frame)
        parent.flush()
        n_sent += 1
    found = 0
    while found < n_sent:
        found += len(host.receive())
        parent.flush()
    assert found == n_sent


def test_what_is_kept_is_not_copied_again_for_each_part_that_is_taken(ends: Any) -> None:
    parent, host = ends
    big, small = [message(k, b"b" * 2_000_000) for k in (1, 2)], message(3)
    for one in (*big, small):
        parent.send(encode(one))
    found: list[Message] = []
    tracemalloc.start()
    while len(found) < 3:
        parent.flush()  # part by part, as much as the pipe takes
        at_most = tracemalloc.get_traced_memory()[0] + 1_000_000
        tracemalloc.reset_peak()
        parent.flush()
        assert tracemalloc.get_traced_memory()[1] < at_most
        found += received(host)
    tracemalloc.stop()
    assert found == [*big, small]
    assert not parent.has_unsent


def test_many_small_frames_are_sent_in_few_writes(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, host = ends
    frames = [encode(message(k)) for k in range(1, 5_001)]
    for one in frames:
        parent.send(one)  # until the pipe is full, each by itself
    writes, write = list[int](), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (writes.append(fd), write(fd, data))[1])
    found = 0
    while found < len(frames):
        parent.flush()
        found += len(received(host))
    assert not parent.has_unsent
    n_parts = sum(map(len, frames)) / (1 << 16)
    assert len(writes) < 10 * n_parts + 10


def test_a_large_frame_from_the_host_is_put_together(ends: Any) -> None:
    parent, host = ends
    os.set_blocking(host.write_fd, False)  # a host's end blocks; here nobody else would read
    big = message(1, b"b" * 1_000_000)
    host.send(encode(big))
    found: list[Message] = []
    while not found:
        found += received(parent)
        host.flush()
    assert found == [big]


# -- the end --------------------------------------------------------------------------------------


def test_what_was_sent_before_the_end_still_arrives(ends: Any) -> None:
    parent, host = ends
    host.send(encode(message(1)))
    host.send(encode(message(2)))
    host.close()
    assert received(parent) == [message(1), message(2)]
    for _ in range(2):
        with pytest.raises(ChannelClosedError):
            parent.receive()


def test_half_a_frame_before_the_end_is_no_frame(ends: Any) -> None:
    parent, host = ends
    write(host, encode(message(1)) + encode(message(2))[:-1])
    host.close()
    assert received(parent) == [message(1)]
    with pytest.raises(ChannelClosedError, match="end of stream"):
        parent.receive()


def test_sending_to_an_end_that_is_gone(ends: Any) -> None:
    parent, host = ends
    host.close()
    with pytest.raises(ChannelClosedError):
        parent.send(encode(message()))


def test_flushing_to_an_end_that_is_gone(ends: Any) -> None:
    parent, host = ends
    parent.send(encode(message(1, b"b" * 1_000_000)))
    host.close()
    with pytest.raises(ChannelClosedError):
        parent.flush()


def test_a_blocking_end_learns_of_the_end(ends: Any) -> None:
    parent, host = ends
    parent.send(encode(message()))
    parent.close()
    assert received(host) == [message()]
    with pytest.raises(ChannelClosedError):
        host.receive()


def test_closing_twice_closes_no_fd_of_somebody_else(ends: Any) -> None:
    parent, _ = ends
    fds = parent.fds
    parent.close()
    assert parent.fileno() == -1
    assert parent.write_fd == -1
    others = os.pipe()
    assert set(others) <= {*fds, *others}
    parent.close()
    for fd in others:
        os.close(fd)  # OSError if the channel had closed it


# -- garbage --------------------------------------------------------------------------------------


def test_garbage_is_a_frame_error_and_stays_one(ends: Any) -> None:
    parent, host = ends
    write(host, GARBAGE)
    for _ in range(2):
        with pytest.raises(FrameError, match="not a frame"):
            parent.receive()


def test_frames_before_garbage_are_returned_first(ends: Any) -> None:
    parent, host = ends
    write(host, encode(message(1)) + encode(message(2)) + GARBAGE)
    assert received(parent) == [message(1), message(2)]
    with pytest.raises(FrameError):
        parent.receive()
    write(host, encode(message(3)))
    with pytest.raises(FrameError):  # nothing of this stream is believed any more
        parent.receive()


def test_a_garbled_header_after_half_a_frame_is_found(ends: Any) -> None:
    parent, host = ends
    write(host, encode(message(1))[:30])
    assert received(parent) == []
    write(host, encode(message(1))[30:] + GARBAGE)
    assert received(parent) == [message(1)]
    with pytest.raises(FrameError):
        parent.receive()


def test_frames_are_bytes_of_their_own() -> None:
    data = bytearray(encode(message(1, "x")))
    parsed = split_frame(data)
    assert parsed is not None
    data[:] = bytes(len(data))
    assert parsed[0].message() == message(1, "x")


# -- what an interrupt leaves ---------------------------------------------------------------------


def test_a_bell_does_not_come_into_the_midst_of_a_frame(ends: Any) -> None:
    parent, host = ends
    parent.send(encode(message(1, b"b" * 300_000)))
    found = list(host.receive())
    assert parent.has_unsent, "there is room in the pipe, and a part of the frame is still to come"
    parent.ring(b"\0")
    while parent.has_unsent:
        parent.flush()
        found += host.receive()
    assert [one.message().payload for one in found] == [b"b" * 300_000]


def test_a_frame_that_comes_in_many_pieces_with_bells_before_it_is_one_frame(ends: Any) -> None:
    parent, host = ends
    frame = encode(message(1, b"b" * 300_000))
    os.write(parent.write_fd, b"\0\0")
    assert list(host.receive()) == []
    os.write(parent.write_fd, b"\0" + frame[:5])
    found = list(host.receive())
    for start in range(5, len(frame), 4096):
        os.write(parent.write_fd, frame[start : start + 4096])
        found += host.receive()
    assert [one.message().payload for one in found] == [b"b" * 300_000]


def test_several_are_written_to_and_read_from_at_once() -> None:
    pairs = [two_ends() for _ in range(3)]
    try:
        parents = [parent for parent, _ in pairs]
        frames = [encode(message(number, b"b" * number)) for number in range(3)]
        written: list[int] = []
        FrameChannel.write_each(parents, frames, written)
        assert written == [len(frame) for frame in frames]
        assert [received(host) for _, host in pairs] == [[message(n, b"b" * n)] for n in range(3)]
        pairs[1][1].send(frames[1])
        pairs[2][1].close()
        found: list[bytes | None] = []
        FrameChannel.read_each(parents, found)
        assert found == [None, frames[1], b""]
        written.clear()
        while 0 not in written:  # until one is full
            written.clear()
            FrameChannel.write_each(parents, [b"\0" * 4096] * 3, written)
        assert written[2] == -1
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


def test_writing_and_reading_go_on_where_an_interrupt_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [two_ends() for _ in range(3)]
    n_calls = itertools.count()

    def interrupted(call: Any) -> Any:
        def run(fd: int, what: Any) -> Any:
            if next(n_calls) == 1:
                raise KeyboardInterrupt  # as a handler does, when a system call is interrupted
            return call(fd, what)

        return run

    try:
        parents = [parent for parent, _ in pairs]
        frames = [encode(message(number)) for number in range(3)]
        written: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", interrupted(os.write))
            with pytest.raises(KeyboardInterrupt):
                FrameChannel.write_each(parents, frames, written)
        assert len(written) == 1
        FrameChannel.write_each(parents, frames, written)
        FrameChannel.write_each(parents, frames, written)  # nothing is left to do
        assert [received(host) for _, host in pairs] == [[message(n)] for n in range(3)]
        for frame, (_, host) in zip(frames, pairs, strict=True):
            host.send(frame)
        n_calls, found = itertools.count(), list[bytes | None]()
        with monkeypatch.context() as patch:
            patch.setattr(os, "read", interrupted(os.read))
            with pytest.raises(KeyboardInterrupt):
                FrameChannel.read_each(parents, found)
        assert found == frames[:1]
        FrameChannel.read_each(parents, found)
        FrameChannel.read_each(parents, found)
        assert found == frames
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


def test_a_frame_is_kept_once_and_behind_those_that_are_kept(ends: Any) -> None:
    parent, host = ends
    first, second = encode(message(1, b"b" * 5000)), encode(message(2))
    os.write(parent.write_fd, first[:100])
    for _ in range(2):  # as after an interrupt
        parent.keep(first, 100)
        assert parent.has_unsent
    for _ in range(2):
        parent.keep(second, 0)
    parent.flush()
    assert not parent.has_unsent
    assert received(host) == [message(1, b"b" * 5000), message(2)]


def test_frames_are_told_apart_again_until_what_is_left_was_noted(ends: Any) -> None:
    parent, _ = ends
    data = encode(message(1)) + encode(message(2))[:30]
    for _ in range(2):  # as after an interrupt
        frames, incoming = parent.split(data)
        assert [frame.message() for frame in frames] == [message(1)]
    parent.incoming = incoming
    frames, parent.incoming = parent.split(encode(message(2))[30:])
    assert [frame.message() for frame in frames] == [message(2)]
