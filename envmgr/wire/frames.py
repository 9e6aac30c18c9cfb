"""The form of messages on the wire.

A frame is a fixed header and a pickled payload. The header carries env_id, generation and request
id, so that a late or foreign reply is recognised without looking at the payload; magic, version and
a cap on the length make garbage visible at once. Two checksums, of the header and of the payload,
show damage before the receiver waits for a wrong length or unpickles anything: one flipped bit can
make a pickle import another module or take 64 GiB of memory. The checksums do not protect against
anybody who means harm (see docs/security.md).
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from envmgr import pickles
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.wire.messages import Message, make_message, text_of

MAX_PAYLOAD_BYTES = 1 << 30

_MAGIC = 0xE17A

_VERSION = 1

_HEADER = struct.Struct("<HBBIIQI")

_CHECKSUMS = struct.Struct("<II")

_BOTH = struct.Struct(_HEADER.format + _CHECKSUMS.format[1:])

HEADER_BYTES = _BOTH.size


class FrameError(ValueError):
    """Bytes that are not a frame of this protocol, or a message that cannot become one."""


def encode(message: Message, *, has_main: bool = True) -> bytes:
    """Return a message as one frame.

    Objects that plain pickle refuses (lambdas, classes defined in functions) go through
    cloudpickle.

    Args:
        message: the message.
        has_main: whether the receiver has the same `__main__`. If not, objects from there go
            through cloudpickle, too, which recreates them, or finds them again, on the other side.

    Raises:
        FrameError: the payload cannot be pickled, or is larger than `MAX_PAYLOAD_BYTES`.
    """
    op, env_id, generation, request_id, payload = message
    return _framed(op, env_id, generation, request_id, _body_of(payload, has_main))


def pack(message: Message, *, has_main: bool = True) -> Frame:
    """Return a message as a frame that is not bytes yet, for transports that carry objects.

    Args:
        message: the message.
        has_main: as for `encode`.

    Raises:
        FrameError: as `encode`.
    """
    op, env_id, generation, request_id, payload = message
    return Frame(op, env_id, generation, request_id, _body_of(payload, has_main))


def _framed(
    op: int, env_id: int, generation: int, request_id: int, body: bytes | bytearray | memoryview
) -> bytes:
    header = _HEADER.pack(_MAGIC, _VERSION, op, env_id, generation, request_id, len(body))
    return header + _CHECKSUMS.pack(zlib.crc32(header), zlib.crc32(body)) + body


def _body_of(payload: Any, has_main: bool) -> bytes:
    if payload is None:
        return b""
    try:
        body = pickle.dumps(payload, protocol=5)
        if not has_main and pickles.names_script(body):
            body = pickles.dumps(payload)
    except Exception as first:  # any error of an object's own __reduce__; cloudpickle comes last
        pass_interrupt_on(first)
        body = _by_cloudpickle(payload)
    if len(body) > MAX_PAYLOAD_BYTES:
        raise FrameError(f"{len(body)} bytes exceed the limit of {MAX_PAYLOAD_BYTES}")
    return body


def _by_cloudpickle(payload: Any) -> bytes:
    try:
        return pickles.dumps(payload)
    except Exception as error:
        pass_interrupt_on(error)
        raise FrameError(f"{type(error).__name__}: {text_of(error)}") from error


class Frame(NamedTuple):
    """A frame whose payload is still pickled.

    Attributes:
        op: an `Op`.
        env_id: the env it is for, or from.
        generation: which env of that id.
        request_id: the number of the request.
        body: the pickled payload.
    """

    op: int
    env_id: int
    generation: int
    request_id: int
    body: bytes | bytearray | memoryview

    def encoded(self) -> bytes:
        """Return the frame as bytes, as `encode` does."""
        return _framed(*self)

    def message(self, buffers: Sequence[bytearray] = ()) -> Message:
        """Unpickle the payload.

        Args:
            buffers: the buffers that are not part of the pickle, in order.

        Raises:
            FrameError: the payload cannot be unpickled, or would end this process.
        """
        op, env_id, generation, request_id, body = self
        if not body:
            return Message(op, env_id, generation, request_id, None)
        try:
            payload = pickle.loads(body, buffers=buffers) if buffers else pickle.loads(body)  # noqa: S301
            return make_message((op, env_id, generation, request_id, payload))
        except KeyboardInterrupt:
            raise  # the user's, as far as anybody can tell
        except BaseException as error:  # whatever a __setstate__ may raise, SystemExit included
            pass_interrupt_on(error)
            raise FrameError(
                f"the payload cannot be unpickled: {type(error).__name__}: {text_of(error)}"
            ) from error


_make_frame = partial(tuple.__new__, Frame)


def split_frame(data: bytes | bytearray | memoryview) -> tuple[Frame, int] | None:
    """Return the first frame in `data` and its length in bytes, or None if it is not complete.

    Raises:
        FrameError: `data` does not begin with a frame.
    """
    if len(data) < HEADER_BYTES:
        return None
    (magic, version, op, env_id, generation, request_id, length, of_header, of_body) = (
        _BOTH.unpack_from(data)
    )
    is_whole = zlib.crc32(data[: _HEADER.size]) == of_header
    if magic != _MAGIC or version != _VERSION or length > MAX_PAYLOAD_BYTES or not is_whole:
        raise FrameError(f"not a frame: it begins with {bytes(data[:HEADER_BYTES]).hex()}")
    end = HEADER_BYTES + length
    if len(data) < end:
        return None
    body = bytes(data[HEADER_BYTES:end])
    if zlib.crc32(body) != of_body:
        raise FrameError(f"a damaged frame: it begins with {bytes(data[:HEADER_BYTES]).hex()}")
    return _make_frame((op, env_id, generation, request_id, body)), end


def needed_for(data: bytes) -> int:
    """Return the least size in bytes of a frame that begins with `data`, which was found sound."""
    if len(data) < HEADER_BYTES:
        return HEADER_BYTES
    length: int = _HEADER.unpack_from(data)[6]
    return HEADER_BYTES + length
