"""Small infos in a few bytes of shared memory: what goes beside an observation, without pickling.

An info is written as a description of its entries (keys, types, sizes) and their values. Steps
after steps have the same entries, so both sides keep what they made of a description: then writing
an info is one `struct.pack`, and reading it one `struct.unpack`.

Numbers, bools, None, short texts, numpy numbers and small arrays of them, in nested dicts with text
keys, come out as they went in. For all else `encode` returns None: such infos go by message.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envmgr.spaces import ValueMismatchError

_LENGTHS = struct.Struct("<HH")
_MAX_KNOWN = 1024
_PLAIN = {float: "d", int: "q", bool: "?"}
_NUMPY_KINDS = "biuf"
_DTYPE = re.compile(rf"[<>|][{_NUMPY_KINDS}]\d{{1,2}}")

Path = tuple[str, ...]


class InfoEncoder:
    """The env's side.

    Args:
        room: bytes that an info may take.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._known: dict[Any, tuple[bytes, struct.Struct]] = {}

    def encode(self, info: Mapping[Any, Any]) -> bytes | None:
        """Return the bytes of an info, or None if it does not fit or has other things in it."""
        types = tuple(map(type, info.values()))
        key: Any = (*info, *map(type, info), *types)
        known = self._known.get(key)
        if known is not None:  # a flat info of numbers, as the one before
            return self._pack(known, tuple(info.values()))
        entries = _entries(info, ())
        if entries is None:
            return None
        description = [[path, code] for path, code, _ in entries]
        if not all(map(_PLAIN.__contains__, types)):
            key = json.dumps(description)
        known = self._known.get(key) or self._describe(key, description)
        return self._pack(known, tuple(value for _, code, value in entries if code not in "n{}"))

    def _describe(self, key: Any, description: list[list[Any]]) -> tuple[bytes, struct.Struct]:
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[key] = known = self._head(description)
        return known

    def _head(self, description: list[list[Any]]) -> tuple[bytes, struct.Struct]:
        layout = struct.Struct("<" + "".join(_format(code) for _, code in description))
        header = json.dumps(description).encode()
        if len(header) + layout.size > min(self._room, 0xFFFF):
            return b"", layout
        return _LENGTHS.pack(len(header), layout.size) + header, layout

    def _pack(self, known: tuple[bytes, struct.Struct], values: tuple[Any, ...]) -> bytes | None:
        head, layout = known
        if not head or len(head) + layout.size > self._room:
            return None
        try:
            return head + layout.pack(*values)
        except struct.error:  # an integer of more than 64 bits
            return None


def _entries(info: Mapping[Any, Any], path: Path) -> list[tuple[Path, str, Any]] | None:
    """Return (path, code, what is packed) of every entry; None if one cannot be written."""
    found: list[tuple[Path, str, Any]] = []
    for key, value in info.items():
        if type(key) is not str:
            return None
        here = (*path, key)
        if type(value) is dict and value:
            inner = _entries(value, here)
            if inner is None:
                return None
            found += inner
            continue
        coded = _coded(value)
        if coded is None:
            return None
        found.append((here, *coded))
    return found


def _coded(value: Any) -> tuple[str, Any] | None:
    plain = _PLAIN.get(type(value))
    if plain is not None:
        return plain, value
    if value is None:
        return "n", None
    if type(value) is dict:
        return "{}", None
    if type(value) is str:
        text = value.encode("utf-8", "surrogatepass")
        return f"u{len(text)}", text
    if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
        return f"g{value.dtype.str}", value.tobytes()
    if type(value) is np.ndarray and value.dtype.kind in _NUMPY_KINDS:
        shape = ",".join(map(str, value.shape))
        return f"a{value.dtype.str};{shape}", value.tobytes()
    return None


def _format(code: str) -> str:
    if code in "n{}":
        return ""
    if code[0] in "dq?":
        return code
    if code[0] == "u":
        return f"{int(code[1:])}s"
    dtype, shape = _array_code(code)
    return f"{int(np.prod(shape, dtype=np.int64)) * dtype.itemsize}s"


def _array_code(code: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    name, _, sizes = code[1:].partition(";")
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"an array of {name!r} is not written into shared memory")
    dtype = np.dtype(name)
    return dtype, tuple(int(size) for size in sizes.split(",") if size)


_MALFORMED = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OverflowError,
    RecursionError,
    struct.error,
)


class InfoDecoder:
    """The parent's side."""

    def __init__(self) -> None:
        self._known: dict[bytes, Callable[[bytes], dict[str, Any]]] = {}

    def decode(self, data: bytes) -> dict[str, Any]:
        """Return the info that `encode` made `data` of; more bytes may follow it.

        Raises:
            ValueMismatchError: these are not the bytes of an info.
        """
        try:
            header_bytes, values_bytes = _LENGTHS.unpack_from(data)
            begin = _LENGTHS.size + header_bytes
            header = data[_LENGTHS.size : begin]
            read = self._known.get(header)
            if read is None:
                read = _reader(json.loads(header))
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[header] = read
            return read(data[begin : begin + values_bytes])
        except _MALFORMED as error:
            raise ValueMismatchError(f"an info in shared memory is malformed: {error}") from error


def _reader(description: Any) -> Callable[[bytes], dict[str, Any]]:
    """Return a function that makes infos of one description from their values."""
    entries: list[tuple[list[str], str]] = [(path, code) for path, code in description]
    if not all(type(part) is str for path, _ in entries for part in path):
        raise ValueError("a key is not a text")
    unpack = struct.Struct("<" + "".join(_format(code) for _, code in entries)).unpack
    if all(len(path) == 1 and code in _PLAIN.values() for path, code in entries):
        names = [path[0] for path, _ in entries]
        return lambda data: dict(zip(names, unpack(data), strict=True))
    restore = [_restorer(code) for _, code in entries]

    def read(data: bytes) -> dict[str, Any]:
        values = iter(unpack(data))
        info: dict[str, Any] = {}
        for (path, code), restored in zip(entries, restore, strict=True):
            place = info
            for part in path[:-1]:
                place = place.setdefault(part, {})
            place[path[-1]] = restored(None if code in "n{}" else next(values))
        return info

    return read


def _restorer(code: str) -> Callable[[Any], Any]:
    if code == "{}":
        return lambda value: {}
    if code[0] == "u":
        return lambda value: value.decode("utf-8", "surrogatepass")
    if code[0] == "g":
        dtype, _ = _array_code(code)
        return lambda value: np.frombuffer(value, dtype)[0]
    if code[0] == "a":
        dtype, shape = _array_code(code)
        return lambda value: np.frombuffer(value, dtype).reshape(shape).copy()
    return lambda value: value
