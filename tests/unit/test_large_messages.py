"""Buffers for large messages: what goes in comes out, nothing else does, and buffer comes back."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from envmgr.spaces import Array
from envmgr.transport.process.connections import Connections
from envmgr.transport.ready import ReadySet
from envmgr.wire import large_messages
from envmgr.wire.block import block_is_possible
from envmgr.wire.channel import FrameChannel
from envmgr.wire.frames import Frame, FrameError, split_frame
from envmgr.wire.large_messages import (
    BUFFER_BYTES,
    HOLE_BYTES,
    IN_BUFFER,
    LARGE_BYTES,
    LargeMessageBuffer,
    LargeMessageBuffers,
    buffer_offset,
)
from envmgr.wire.messages import Message, Op
from tests.contract.large import FORMS, LARGE, assert_same
from tests.faults.interrupting import Interrupted, handlers, interrupt_at, points_of

pytestmark = pytest.mark.skipif(not block_is_possible(), reason="no buffers on this platform")

HOST = 0


def arrays(nbytes: int = LARGE, fill: int = 1) -> Array:
    return np.full(nbytes, fill, np.uint8)


def message(payload: Any, number: int = 1) -> Message:
    return Message(Op.STEPPED, 1, 2, number, payload)


def frame_of(data: bytes) -> Frame:
    parsed = split_frame(data)
    assert parsed is not None
    return parsed[0]


class Both:
    """A buffer, and what reads it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("buffers")
        self.buffers = LargeMessageBuffers(self.fd)
        self.buffer = LargeMessageBuffer(self.fd, buffer_offset(HOST))
        self.buffer.encode(message(arrays()))  # from now on it is used

    def sent(self, payload: Any) -> Frame:
        return frame_of(self.buffer.encode(message(payload)))

    def read(self, frame: Frame) -> Any:
        return self.buffers.message(frame, HOST).payload

    def through(self, payload: Any) -> Any:
        frame = self.sent(payload)
        if not frame.op & IN_BUFFER:
            return frame.message().payload
        out = self.read(frame)
        self.buffers.free(frame, HOST)
        return out

    @property
    def nbytes(self) -> int:
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        del self.buffer  # which has the memory mapped
        os.close(self.fd)


@pytest.fixture
def both() -> Iterator[Both]:
    made = Both()
    yield made
    made.close()


@pytest.mark.parametrize("name", FORMS)
def test_what_is_written_is_read_bit_for_bit(both: Both, name: str) -> None:
    for _ in range(2):
        assert_same(both.through({"x": FORMS[name](), "n": 1}), {"x": FORMS[name](), "n": 1})


def test_what_was_read_is_private_and_writable(both: Both) -> None:
    given = arrays()
    found = [both.through(given) for _ in range(2)]
    given[:] = 7
    found[0][:] = 8
    both.through(arrays(fill=9))
    assert found[0].tolist() == [8] * LARGE
    assert found[1].tolist() == [1] * LARGE


def test_nothing_is_taken_before_a_message_was_large() -> None:
    fd = os.memfd_create("buffers")
    buffer = LargeMessageBuffer(fd, buffer_offset(HOST))
    for nbytes in (10, LARGE_BYTES // 2, LARGE):
        assert not frame_of(buffer.encode(message(arrays(nbytes)))).op & IN_BUFFER
        assert os.fstat(fd).st_size == 0
    assert not frame_of(buffer.encode(message("small"))).op & IN_BUFFER
    assert os.fstat(fd).st_size == 0
    assert frame_of(buffer.encode(message(arrays()))).op & IN_BUFFER
    assert os.fstat(fd).st_blocks * 512 < 4 * LARGE
    os.close(fd)


def test_a_room_is_filled_from_its_beginning_when_all_was_read(both: Both) -> None:
    for i in range(3):
        waiting = [both.sent(arrays(fill=k)) for k in range(5)]
        before = both.nbytes
        assert [both.read(frame)[0] for frame in waiting] == [0, 1, 2, 3, 4]
        for frame in waiting[:4]:
            both.buffers.free(frame, HOST)
        assert both.read(both.sent(arrays(fill=i)))[0] == i  # behind the one that was not
        assert both.read(waiting[4])[0] == 4
        both.buffers.free(both.sent(arrays()), HOST)  # and all before
        assert both.nbytes <= 2 * max(before, 8 * LARGE)


def test_what_finds_no_place_goes_through_the_pipe_until_there_is_some(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_messages, "BUFFER_BYTES", 1 << 18)
    frames = [both.sent(arrays(fill=k)) for k in range(6)]
    in_buffer = [bool(frame.op & IN_BUFFER) for frame in frames]
    assert in_buffer == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    assert [both.read(frame)[0] for frame in frames[:3]] == [0, 1, 2]
    assert [frame.message().payload[0] for frame in frames[3:]] == [3, 4, 5]
    both.buffers.free(frames[2], HOST)
    assert not both.sent(arrays(1 << 18)).op & IN_BUFFER  # and what is larger than all of it, ever
    assert both.sent(arrays()).op & IN_BUFFER


def test_without_memory_all_goes_through_the_pipe(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        assert not both.sent(arrays()).op & IN_BUFFER
        assert_same(both.through(arrays()), arrays())
    assert both.sent(arrays()).op & IN_BUFFER


def test_what_pickle_refuses_goes_through_cloudpickle_or_is_refused(both: Both) -> None:
    found = both.through({"f": lambda: 5, "a": arrays()})
    assert found["f"]() == 5
    with pytest.raises(FrameError, match="generator"):
        both.sent({"a": arrays(), "g": (i for i in ())})
    assert_same(both.through(arrays()), arrays())


def body(number: int, place: int, checksum: int, *lengths: int) -> bytes:
    head = struct.pack("<QQI", number, place, checksum)
    return head + struct.pack(f"<{len(lengths)}Q", *lengths)


NONE = zlib.crc32(pickle.dumps(None))
FORGED = {
    "no body": b"",
    "half a head": body(1, 64, 0)[:-1],
    "half a length": body(1, 64, 0, 4)[:-1],
    "no parts": body(1, 64, 0),
    "too many parts": body(1, 64, 0, *[1] * 1001),
    "behind the buffer": body(1, BUFFER_BYTES, 0, 1),
    "across its end": body(1, 64, 0, BUFFER_BYTES),
    "behind everything": body(1, (1 << 64) - 1, 0, 1),
    "larger than anything": body(1, 64, 0, (1 << 64) - 1, (1 << 64) - 1),
    "where nothing was written": body(1, BUFFER_BYTES // 2, NONE, 4),
    "a wrong checksum": body(1, 64, 0, 4),
    "no pickle": body(1, 64, zlib.crc32(b"\1" * 4), 4),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_no_room_holds_is_garbage(both: Both, name: str) -> None:
    both.sent([])
    os.pwrite(both.fd, b"\1" * 99, buffer_offset(HOST) + 64)
    with pytest.raises(FrameError):
        both.read(Frame(Op.STEPPED | IN_BUFFER, 1, 2, 3, FORGED[name]))


def test_a_damaged_pickle_is_not_unpickled(both: Both) -> None:
    frame = both.sent("x" * LARGE)
    os.pwrite(both.fd, b"?", buffer_offset(HOST) + 100)
    with pytest.raises(FrameError, match="damaged"):
        both.read(frame)


def test_buffers_that_are_missing_are_garbage(both: Both) -> None:
    given = [arrays(fill=1), arrays(fill=2)]
    frame = both.sent(given)
    with pytest.raises(FrameError, match="unpickled"):
        both.read(frame._replace(body=frame.body[:-8]))


def test_the_memory_of_dead_hosts_is_given_back_and_that_of_others_is_not(both: Both) -> None:
    other = LargeMessageBuffer(both.fd, buffer_offset(HOST + 1))
    other.encode(message(arrays()))
    kept = frame_of(other.encode(message(arrays(fill=5))))
    both.through(arrays(10 * LARGE))
    before = both.nbytes
    both.buffers.give_back(HOST)
    both.buffers.give_back(HOST + 7)
    assert both.nbytes <= before - 10 * LARGE
    assert both.buffers.message(kept, HOST + 1).payload[0] == 5


def test_the_memory_of_a_very_large_message_is_free_once_it_was_read(both: Both) -> None:
    small = both.sent(arrays(fill=3))
    large = both.sent(arrays(3 * HOLE_BYTES, fill=5))
    last = both.sent(arrays(fill=7))
    assert both.nbytes > 3 * HOLE_BYTES
    assert both.read(large)[-1] == 5
    assert both.nbytes > 3 * HOLE_BYTES
    assert both.read(small)[0] == 3
    both.buffers.free(small, HOST)
    both.buffers.free(large, HOST)
    assert both.nbytes < 1 << 21, "without another message"
    assert both.read(last)[0] == 7
    both.buffers.free(last, HOST)
    for n in (HOLE_BYTES - 1000, HOLE_BYTES, 2 * HOLE_BYTES):
        frame = both.sent(arrays(n, fill=9))
        assert frame.op & IN_BUFFER
        assert both.nbytes > n, "no write finds no memory"
        assert both.read(frame).all()
        both.buffers.free(frame, HOST)
    assert both.nbytes < 1 << 21


def test_memory_is_not_freed_twice(both: Both) -> None:
    frames = [both.sent(arrays(n)) for n in (HOLE_BYTES, LARGE, HOLE_BYTES, LARGE)]
    for frame in frames:
        both.buffers.free(frame, HOST)
    again = both.sent(arrays(2 * HOLE_BYTES, fill=5))
    for frame in frames:  # after an interrupt
        both.buffers.free(frame, HOST)
    assert (both.read(again) == 5).all()


def test_holes_that_no_memory_is_left_for_are_not_written_to(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    both.through(arrays(HOLE_BYTES))
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        for _ in range(2):
            assert not both.sent(arrays()).op & IN_BUFFER
    both.through(arrays())
    assert both.sent(arrays()).op & IN_BUFFER
    assert both.nbytes < 1 << 21


# -- interrupts -----------------------------------------------------------------------------------


class Connected:
    """A worker's end of a connection, and the parent's."""

    def __init__(self) -> None:
        (down_out, down_in), (up_out, up_in) = os.pipe(), os.pipe()
        self.parent = FrameChannel(up_out, down_in, blocking=False)
        self.worker = FrameChannel(down_out, up_in, blocking=True)
        self.both = Both()
        self.ready = ReadySet()
        self.connections = Connections(self.ready, buffers=self.both.buffers)
        self.connections.add(HOST, 0, self.parent)

    def write(self, numbers: list[int]) -> None:
        for number in numbers:
            payload = arrays(fill=number % 256) if number % 3 else "small"
            self.worker.send(self.both.buffer.encode(message(payload, number)))

    def read(self) -> None:
        self.connections.read([self.parent])

    def taken(self) -> list[Any]:
        found = [arrival for _, arrival in self.connections.arrivals]
        self.connections.arrivals.clear()
        return found

    def close(self) -> None:
        self.connections.drop(HOST)
        self.worker.close()
        self.ready.close()
        self.both.close()


@pytest.fixture
def connected() -> Iterator[Connected]:
    made = Connected()
    yield made
    made.close()


def test_interrupts_anywhere_lose_nothing_repeat_nothing_and_free_all(
    connected: Connected,
) -> None:
    numbers, more = [1, 2, 3, 4], [5, 7, 8]
    connected.write(numbers)
    points = points_of(connected.read)
    assert len(points) > 40
    connected.taken()
    with handlers(lambda: None):
        for point in points:
            connected.write(numbers)
            with contextlib.suppress(Interrupted):
                interrupt_at(point, connected.read, signal.SIGALRM)
                pytest.fail(f"{point} was not reached")
            connected.write(more)  # over the others, if they were freed too early
            connected.connections.finish()
            connected.read()
            found = connected.taken()
            assert [arrival.request_id for arrival in found] == numbers + more, point
            for arrival in found:
                if arrival.request_id % 3:
                    assert arrival.payload.tolist() == [arrival.request_id] * LARGE
            first = connected.both.sent(arrays())
            assert struct.unpack_from("<QQ", first.body)[1] == 64, point  # all was freed
            connected.both.buffers.free(first, HOST)
    assert not connected.connections.ruined


def test_garbage_in_place_of_a_reference_ruins_the_host(connected: Connected) -> None:
    connected.worker.send(
        Frame(Op.STEPPED | IN_BUFFER, 1, 2, 3, FORGED["behind the buffer"]).encoded()
    )
    connected.read()
    assert "buffer" in connected.connections.ruined[HOST].reason
    assert not connected.connections.arrivals
