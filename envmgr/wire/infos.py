"""Small infos in a few bytes of shared memory: what goes beside an observation, without pickling.

The bytes are MessagePack's. Numbers, bools, None, texts, numpy numbers and small arrays of them, in
nested dicts with text keys, come out as they went in, with the same types. For all else `encode`
returns None: such infos go by message. Infos of a stable form do not come here: see `info_forms`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import MsgspecError
from msgspec.msgpack import Decoder, Encoder, Ext

from envmgr.spaces import ValueMismatchError

_LENGTH = struct.Struct("<H")
_PLAIN = frozenset((float, int, bool, str, type(None)))
_NUMPY_KINDS = "biuf"
_ARRAY, _NUMBER = 1, 2  # kinds of what MessagePack has no type for
_DTYPE = re.compile(rf"[<>|][{_NUMPY_KINDS}]\d{{1,2}}")


class InfoEncoder:
    """The encoder of infos, on the env's side.

    Args:
        max_bytes: the most bytes that an info may take.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = min(max_bytes, 0xFFFF)
        self._encode = Encoder(enc_hook=_extension).encode

    def encode(self, info: Mapping[Any, Any]) -> bytes | None:
        """Return the bytes of an info, or None if it does not fit or has other types in it."""
        try:
            if not _comes_out_as_it_is(info, self._max_bytes):
                return None
            data = self._encode(dict(info))
        # An integer of more than 64 bits; half of a surrogate pair; a dict that contains itself.
        except (OverflowError, UnicodeEncodeError, RecursionError):
            return None
        return (
            _LENGTH.pack(len(data)) + data if _LENGTH.size + len(data) <= self._max_bytes else None
        )


def _comes_out_as_it_is(info: Mapping[Any, Any], max_bytes: int) -> bool:
    """Return whether all entries are read back as the same types; a tuple would become a list.

    Arrays that are too large by themselves are refused here: converting them to bytes takes long.
    """
    for key, value in info.items():
        if type(key) is not str:
            return False
        kind = type(value)
        if kind in _PLAIN or (kind is dict and _comes_out_as_it_is(value, max_bytes)):
            continue
        is_array = kind is np.ndarray
        if not (is_array or isinstance(value, np.generic)) or (
            is_array and value.nbytes > max_bytes
        ):
            return False
        if value.dtype.kind not in _NUMPY_KINDS:
            return False
    return True


def _extension(value: Any) -> Ext:
    """Return the MessagePack extension that stands for a numpy number or array."""
    code = _ARRAY if type(value) is np.ndarray else _NUMBER
    head = f"{value.dtype.str};{','.join(map(str, value.shape))};"
    return Ext(code, head.encode() + value.tobytes())


def _restored(code: int, data: memoryview) -> Any:
    dtype, sizes, values = bytes(data).split(b";", 2)
    if code not in (_ARRAY, _NUMBER) or not _DTYPE.fullmatch(name := dtype.decode()):
        raise ValueError(f"an array of {dtype!r} is not written into shared memory")
    shape = [int(size) for size in sizes.split(b",") if size]
    array = np.frombuffer(values, name).reshape(shape)
    return array.copy() if code == _ARRAY else array[()]


class InfoDecoder:
    """The decoder of infos, on the parent's side."""

    def __init__(self) -> None:
        self._decode = Decoder(dict[str, Any], ext_hook=_restored).decode

    def decode(self, data: bytes) -> dict[str, Any]:
        """Return the info that `encode` turned into `data`, which may have more bytes after it.

        Raises:
            ValueMismatchError: these are not the bytes of an info.
        """
        try:
            (length,) = _LENGTH.unpack_from(data)
            return self._decode(data[_LENGTH.size : _LENGTH.size + length])
        except (
            MsgspecError,
            ValueError,
            TypeError,
            OverflowError,
            RecursionError,
            struct.error,
        ) as error:
            raise ValueMismatchError(f"an info in shared memory is malformed: {error}") from error
