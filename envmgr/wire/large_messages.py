"""Buffers for large messages: each worker has a part of the shared memory beside its pipe.

A pipe takes 64 KiB at a time, and each time wakes the other side. So large arrays of a reply
(pickle can leave them out), and a pickle that is large itself, are written into the worker's
buffer, and the frame says where. The parent copies them out, and then writes the number of the
message into the buffer. Once this is the number of the latest message, the buffer is empty, and is
filled from its beginning again. Messages that do not fit go through the pipe. A buffer is a hole in
a sparse file until it is written to. Once the parent has read a very large message, such as a
snapshot, it makes a hole of its memory again: the worker may have nothing to send for long. The
worker knows about the hole from the size of the message, and has the memory allocated again before
it next writes there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import struct
import zlib
from typing import Any

from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.wire.frames import Frame, FrameError, encode
from envmgr.wire.messages import Message

LARGE_BYTES = 1 << 14
"""From the first message on that is as large as this, the worker uses its buffer."""

BUFFER_BYTES = 1 << 26

HOLE_BYTES = 1 << 24
"""The memory of a message of at least this size is freed once the message has been read. The memory
of smaller ones is kept: allocating it again takes longer than copying the message."""

IN_BUFFER = 0x80
"""Bit of the operation of a frame whose payload is in the buffer of its host."""

_FIRST_BUFFER = 1 << 40  # in the file: behind all else that it may ever hold
_BEGIN = 64  # in a buffer: behind the number of the message that was read last
_PART_BYTES = 1 << 12  # smaller arrays stay in the pickle
_STEP_BYTES = 1 << 20  # of large buffers; smaller ones are doubled
_MOST_PARTS = 1000  # that one system call reads
_NUMBER = struct.Struct("<Q")
_HEAD = struct.Struct("<QQI")


def buffer_offset(host_id: int) -> int:
    """Return where in the shared memory the buffer of a host begins; no other host ever gets it."""
    return _FIRST_BUFFER + host_id * BUFFER_BYTES


class LargeMessageBuffer:
    """The buffer of a worker, as the worker writes it.

    Args:
        fd: the shared memory.
        offset: where the buffer begins.
    """

    def __init__(self, fd: int, offset: int) -> None:
        self._fd = fd
        self._offset = offset
        self._memory: mmap.mmap | None = None
        self._is_used = False
        self._has_holes = False
        self._number = 0
        self._end = _BEGIN

    def encode(self, message: Message) -> bytes:
        """Return a message as one frame, as `frames.encode` does until a message has been large.

        Raises:
            FrameError: the message cannot be sent.
        """
        if self._is_used and (frame := self._framed(message)) is not None:
            return frame
        frame = encode(message)
        self._is_used = self._is_used or len(frame) >= LARGE_BYTES
        return frame

    def _framed(self, message: Message) -> bytes | None:
        """Return a frame whose large parts are in the buffer; None if that is not possible."""
        parts: list[Any] = [b""]

        def stays(buffer: pickle.PickleBuffer) -> bool:
            part = buffer.raw()
            if part.nbytes < _PART_BYTES or len(parts) == _MOST_PARTS:
                return True
            parts.append(part)
            return False

        try:
            parts[0] = pickle.dumps(message.payload, protocol=5, buffer_callback=stays)
        except Exception as error:  # any error of an object's own __reduce__
            pass_interrupt_on(error)
            return None
        if len(parts) == 1 and len(parts[0]) < LARGE_BYTES:
            return Frame(*message[:4], parts[0]).encoded()
        start = self._write(parts)
        if start is None:
            return None
        self._number += 1
        head = _HEAD.pack(self._number, start, zlib.crc32(parts[0]))
        body = head + b"".join(_NUMBER.pack(len(part)) for part in parts)
        return Frame(message.op | IN_BUFFER, *message[1:4], body).encoded()

    def _write(self, parts: list[Any]) -> int | None:
        """Write parts into the buffer, and return where; None if there is no memory."""
        memory = self._memory
        is_empty = memory is not None and _NUMBER.unpack_from(memory)[0] == self._number
        if is_empty:
            self._end = _BEGIN
        start, end = self._end, self._end + sum(map(len, parts))
        if memory is None or end > len(memory) or (is_empty and self._has_holes):
            try:
                memory = self._memory = self._opened(end)
            except OSError:  # no memory, or no fd; or the file may not be so large
                return None
            self._has_holes = self._has_holes and not is_empty
        self._has_holes = self._has_holes or end - start >= HOLE_BYTES
        for part in parts:
            memory[self._end : self._end + len(part)] = part
            self._end += len(part)
        return start

    def _opened(self, nbytes: int) -> mmap.mmap:
        """Map `nbytes` or more of the buffer, with all pages allocated: no write can fail."""
        if nbytes > BUFFER_BYTES:
            raise OSError("the buffer is full")
        doubled = max(LARGE_BYTES, 1 << (nbytes - 1).bit_length())
        nbytes = min(doubled, -(-nbytes // _STEP_BYTES) * _STEP_BYTES)
        os.posix_fallocate(self._fd, self._offset, nbytes)
        return mmap.mmap(self._fd, nbytes, offset=self._offset)


class LargeMessageBuffers:
    """The buffers of all hosts, as the parent reads them.

    Args:
        fd: the shared memory.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def message(self, frame: Frame, host_id: int) -> Message:
        """Return the message of a frame, with its parts from the buffer; changes nothing.

        Raises:
            FrameError: the message is not there, or cannot be unpickled.
        """
        try:
            _, start, checksum = _HEAD.unpack_from(frame.body)
            lengths = [length for (length,) in _NUMBER.iter_unpack(frame.body[_HEAD.size :])]
        except struct.error as error:
            raise FrameError(f"it does not say where it is in its buffer: {error}") from error
        nbytes = sum(lengths)
        if not 0 < len(lengths) <= _MOST_PARTS or start + nbytes > BUFFER_BYTES:
            raise FrameError(f"{len(lengths)} parts at {start}, {nbytes} bytes, exceed its buffer")
        parts = [bytearray(length) for length in lengths]
        try:
            found = os.preadv(self._fd, parts, buffer_offset(host_id) + start)
        except OSError as error:
            raise FrameError(f"its buffer cannot be read: {error}") from error
        if found != nbytes or zlib.crc32(parts[0]) != checksum:
            raise FrameError(f"a damaged message in its buffer, at {start}")
        return frame._replace(op=frame.op & ~IN_BUFFER, body=parts[0]).message(parts[1:])

    def free(self, frame: Frame, host_id: int) -> None:
        """Give the host back the memory of a message, and of all messages before it; idempotent."""
        at, (number, start, _) = buffer_offset(host_id), _HEAD.unpack_from(frame.body)
        with contextlib.suppress(OSError):  # then the host uses its pipe when the buffer is full
            latest = os.pread(self._fd, _NUMBER.size, at)
            if number <= _NUMBER.unpack(latest)[0]:
                return  # the host may have something else there already
            end = start + sum(length for (length,) in _NUMBER.iter_unpack(frame.body[_HEAD.size :]))
            if end - start >= HOLE_BYTES:  # before the host knows that it may write there
                self._make_hole(at + start, at + end)
            os.pwrite(self._fd, _NUMBER.pack(number), at)

    def give_back(self, host_id: int) -> None:
        """Free the memory of the buffer of a host that is dead."""
        start = buffer_offset(host_id)
        self._make_hole(start, min(os.fstat(self._fd).st_size, start + BUFFER_BYTES))

    def _make_hole(self, start: int, end: int) -> None:
        """Free the whole pages of a part of the file."""
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = end // mmap.PAGESIZE * mmap.PAGESIZE - start
        if nbytes > 0:
            with contextlib.suppress(OSError), mmap.mmap(self._fd, nbytes, offset=start) as part:
                part.madvise(mmap.MADV_REMOVE)
