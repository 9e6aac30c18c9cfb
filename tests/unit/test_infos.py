"""Infos as bytes: what comes out is what went in, in type too; and garbage is recognised."""

from __future__ import annotations

import datetime
import decimal
import enum
import math
import struct
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envmgr.spaces import ValueMismatchError
from envmgr.wire.infos import InfoDecoder, InfoEncoder
from tests.cases import for_each

ROOM = 248


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in type, order of keys, dtype, shape and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


NUMBER_DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
)
ARRAYS = NUMBER_DTYPES.flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    )
)
NUMPY_NUMBERS = NUMBER_DTYPES.flatmap(hnp.from_dtype).filter(lambda x: isinstance(x, np.generic))
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=12),
    NUMPY_NUMBERS,
    ARRAYS,
)
KEYS = st.text(max_size=6)
INFOS = st.recursive(
    st.dictionaries(KEYS, VALUES, max_size=4),
    lambda inner: st.dictionaries(KEYS, VALUES | inner, max_size=4),
    max_leaves=8,
)


class TestRoundTrips:
    @given(INFOS)
    def test_what_comes_out_is_what_went_in(self, info: dict[str, Any]) -> None:
        data = InfoEncoder(1 << 15).encode(info)
        assert data is not None
        assert same(InfoDecoder().decode(data), info)

    @given(st.lists(INFOS, max_size=6), st.binary(max_size=9))
    def test_of_many_infos_by_the_same_pair(self, infos: list[Any], behind: bytes) -> None:
        encoder, decoder = InfoEncoder(1 << 15), InfoDecoder()
        for info in [*infos, *reversed(infos)]:
            data = encoder.encode(info)
            assert data is not None
            assert same(decoder.decode(data + behind), info)

    @given(INFOS, st.integers(0, ROOM))
    def test_nothing_is_longer_than_its_room(self, info: dict[str, Any], room: int) -> None:
        encoder = InfoEncoder(room)
        for _ in range(2):  # the second time it is known
            data = encoder.encode(info)
            if data is not None:
                assert len(data) <= room
                assert same(InfoDecoder().decode(data.ljust(room, b"\xff")), info)

    @pytest.mark.parametrize(
        "value",
        [
            0,
            -1,
            True,
            False,
            None,
            0.0,
            -0.0,
            math.inf,
            math.nan,
            (1 << 64) - 1,
            -(1 << 63),
            1 << 53,
            5e-324,
            "",
            "text",
            "\x00",
            "ä€😀",
            {},
            {"a": {}},
            {"a": {"b": {"c": 1}}, "d": 2},
            np.float32(0.1),
            np.float64(0.1),
            np.float16(0.1),
            np.int64(-3),
            np.uint8(255),
            np.bool_(True),
            np.array(3.5),
            np.zeros((0, 3)),
            np.arange(6, dtype=">i2").reshape(2, 3),
            np.arange(12).reshape(3, 4).T,
            np.array([True, False]),
        ],
        ids=repr,
    )
    def test_of_certain_values(self, value: Any) -> None:
        encoder, decoder = InfoEncoder(ROOM), InfoDecoder()
        for info in ({"x": value}, {"x": value, "y": 1.5}, {"in": {"x": value}}):
            for _ in range(2):
                data = encoder.encode(info)
                assert data is not None
                assert same(decoder.decode(data), info)

    def test_types_of_the_same_key_do_not_mix(self) -> None:
        encoder, decoder = InfoEncoder(ROOM), InfoDecoder()
        values: list[Any] = [1, 1.0, True, None, "1", np.int64(1), np.float32(1), np.ones(1), {}]
        for value in [*values, *values]:
            data = encoder.encode({"x": value, "y": 2})
            assert data is not None
            assert same(decoder.decode(data), {"x": value, "y": 2})

    def test_the_order_of_keys_is_kept(self) -> None:
        encoder, decoder = InfoEncoder(ROOM), InfoDecoder()
        for keys in ("abc", "cba", "bac", "abc"):
            info = dict.fromkeys(keys, 1.0)
            assert [*decoder.decode(encoder.encode(info) or b"")] == [*keys]

    def test_arrays_are_private_and_writable(self) -> None:
        given_array = np.arange(3)
        data = bytearray(InfoEncoder(ROOM).encode({"x": given_array}) or b"")
        decoder = InfoDecoder()
        one = decoder.decode(bytes(data))["x"]
        other = decoder.decode(bytes(data))["x"]
        one[:] = 7
        data[:] = bytes(len(data))
        assert other.tolist() == given_array.tolist() == [0, 1, 2]
        assert one.flags.owndata or one.base is not None
        assert other.flags.writeable

    def test_the_same_dict_twice_is_two_dicts(self) -> None:
        data = InfoEncoder(ROOM).encode({"a": {"b": 1}, "e": {}}) or b""
        decoder = InfoDecoder()
        one, other = decoder.decode(data), decoder.decode(data)
        one["a"]["b"] = 2
        one["e"]["x"] = 3
        assert other == {"a": {"b": 1}, "e": {}}

    def test_more_kinds_than_are_remembered(self) -> None:
        encoder, decoder = InfoEncoder(ROOM), InfoDecoder()
        for k in [*range(3000), *range(20)]:
            info = {f"key {k}": k, "x": None} if k % 2 else {f"key {k}": float(k)}
            assert decoder.decode(encoder.encode(info) or b"") == info

    def test_what_an_encoder_remembers_of_large_infos_does_no_harm(self) -> None:
        encoder = InfoEncoder(ROOM)
        large = {f"a long key {k}": float(k) for k in range(50)}
        assert encoder.encode(large) is None
        assert encoder.encode(large) is None
        assert same(InfoDecoder().decode(encoder.encode({"a": 1}) or b""), {"a": 1})


class Number(int):
    """Not an int that would come out as what it was."""


class Text(str):
    """Likewise."""


class Mapped(dict[str, Any]):
    """Likewise."""


class Colour(enum.Enum):
    """Likewise."""

    RED = 1


@dataclass
class Point:
    """Likewise."""

    x: int


class TestRefusals:
    @for_each(
        "value",
        [
            1 << 64,
            -(1 << 63) - 1,
            1 << 200,
            Number(1),
            Text("a"),
            Mapped(a=1),
            OrderedDict(a=1),
            MappingProxyType({"a": 1}),
            "half of a surrogate pair: \ud800",
            1j,
            b"bytes",
            [1],
            (1, 2),
            {1},
            bytearray(b"bytes"),
            memoryview(b"bytes"),
            datetime.date(2020, 1, 1),
            decimal.Decimal(1),
            uuid.UUID(int=1),
            Colour.RED,
            Point(1),
            msgspec.msgpack.Ext(1, b"<f8;;12345678"),
            msgspec.Raw(b"\x01"),
            object(),
            ValueError("no"),
            lambda: None,
            np.complex64(1),
            np.str_("a"),
            np.bytes_(b"a"),
            np.datetime64("2020-01-01"),
            np.array(["a"]),
            np.array([None]),
            np.array([1j]),
            np.zeros(2, dtype=[("a", "f4")]),
            np.array(["2020"], dtype="M8[D]"),
            np.ma.masked_array([1.0]),
            np.zeros(1, dtype=[("a", "f4")]).view(np.recarray),
            np.zeros(1000),
            "x" * 300,
        ],
    )
    def test_of_values(self, value: Any) -> None:
        for info in ({"x": value}, {"a": 1, "in": {"x": value}, "z": 2.0}):
            encoder = InfoEncoder(ROOM)
            for _ in range(2):
                assert encoder.encode(info) is None
            assert encoder.encode({"x": 1}) is not None

    @pytest.mark.parametrize("key", [1, None, True, b"a", ("a",), Text("a"), 1.5], ids=repr)
    def test_of_keys(self, key: Any) -> None:
        encoder = InfoEncoder(ROOM)
        for value in (1.0, "text", {"a": 1}):
            assert encoder.encode({key: value}) is None
            assert encoder.encode({"x": {key: value}}) is None

    def test_keys_that_are_equal_to_known_ones(self) -> None:
        encoder = InfoEncoder(ROOM)
        assert encoder.encode({"a": 1.0}) is not None
        assert encoder.encode({Text("a"): 1.0}) is None

    def test_a_large_integer_after_small_ones(self) -> None:
        encoder = InfoEncoder(ROOM)
        assert encoder.encode({"x": 1}) is not None
        assert encoder.encode({"x": 1 << 64}) is None
        assert encoder.encode({"x": 2}) is not None

    def test_texts_that_grow(self) -> None:
        encoder, decoder = InfoEncoder(64), InfoDecoder()
        for n in range(64):
            data = encoder.encode({"x": "y" * n})
            assert data is None or decoder.decode(data) == {"x": "y" * n}
        assert encoder.encode({"x": "y" * 64}) is None

    def test_a_dict_that_holds_itself(self) -> None:
        info: dict[str, Any] = {}
        info["me"] = info
        assert InfoEncoder(ROOM).encode(info) is None  # it goes by message


def decoded(data: bytes) -> Any:
    """Decode what may be anything: an info, or the one error that says it is none."""
    try:
        info = InfoDecoder().decode(data)
    except ValueMismatchError:
        return None
    assert type(info) is dict
    return info


def framed(packed: bytes) -> bytes:
    """Bytes whose length is right, whatever they are."""
    return struct.pack("<H", len(packed)) + packed


def packed(value: Any) -> bytes:
    """What a worker may write whose code is not ours."""
    return framed(msgspec.msgpack.encode(value))


def extended(data: bytes, code: int = 1) -> bytes:
    """An info with a value that says of itself which number or array it is."""
    return packed({"x": msgspec.msgpack.Ext(code, data)})


EXTENSIONS = st.builds(
    msgspec.msgpack.Ext,
    st.integers(-128, 127),
    st.binary(max_size=24)
    | st.builds(
        lambda *parts: b";".join(parts),
        st.sampled_from([b"<f4", b">i2", b"|u1", b"|b1", b"|O8", b"<M8[D]", b"<f3", b"", b"f8"]),
        st.text(st.sampled_from("0123456789,- x"), max_size=8).map(str.encode),
        st.binary(max_size=16),
    ),
)
PACKABLE = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=8) | EXTENSIONS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)


class TestGarbage:
    @given(st.binary(max_size=ROOM))
    def test_of_any_kind(self, data: bytes) -> None:
        decoded(data)

    @given(st.binary(max_size=ROOM - 2))
    def test_with_the_right_length(self, data: bytes) -> None:
        decoded(framed(data))

    @given(PACKABLE)
    def test_of_other_things_than_infos(self, value: Any) -> None:
        decoded(packed(value))

    @given(INFOS, st.data())
    def test_of_an_info_with_bytes_that_were_changed(self, info: Any, data: Any) -> None:
        encoded = bytearray(InfoEncoder(1 << 12).encode(info) or b"\0\0")
        for place in data.draw(st.lists(st.integers(0, len(encoded) - 1), max_size=4)):
            encoded[place] = data.draw(st.integers(0, 255))
        decoded(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))

    @for_each(
        "data",
        [
            b"",
            b"\x00",
            b"\xff" * ROOM,
            bytes(ROOM),
            framed(b""),
            framed(b"\x81"),
            framed(b"\x91" * 200),
            framed(b"\x81\xa1x" * 60),
            framed(b"\xdf\xff\xff\xff\xff"),  # more entries than there is memory
            framed(b"\x81\xa1x\xdd\xff\xff\xff\xff"),
            framed(b"\x81\xa1x\xdb\xff\xff\xff\xff"),
            framed(b"\x81\xa1x\xc9\xff\xff\xff\xff\x01"),
            framed(b"\x81\x80\x01"),  # a key that is a dict
            framed(b"\x81\xa1x\x81\x80\x01"),
            framed(b"\x81\xa2\xff\xff\x01"),
            packed(None),
            packed(5),
            packed("ab"),
            packed([1]),
            packed({1: 2}),
            packed({"x": 1})[:-1],
            packed({"x": 1, "y": "text"})[:-2],
            extended(b""),
            extended(b"<f8"),
            extended(b"<f8;"),
            extended(b"<f8;1;"),
            extended(b"<f8;;1234567"),
            extended(b"|O8;;12345678"),
            extended(b"|O8;1;12345678"),
            extended(b"<M8[D];1;12345678"),
            extended(b"i4,i4;1;12345678"),
            extended(b"\xff\xff;1;12345678"),
            extended(b"<f8;-1,-1;12345678"),
            extended(b"<f8;x;12345678"),
            extended(b"<f8;4294967296,4294967296;12345678"),
            extended(b"<f8;99999999999999999999;12345678"),
            extended(b"<f8;1000000000;12345678"),
            extended(b"<f8;" + b"1," * 100 + b";12345678"),
            extended(b"<f8;1;12345678", code=3),
            extended(b"<f8;1;12345678", code=-2),
        ],
    )
    def test_is_refused(self, data: bytes) -> None:
        with pytest.raises(ValueMismatchError, match="malformed"):
            InfoDecoder().decode(data)

    def test_garbage_leaves_no_trace(self) -> None:
        decoder = InfoDecoder()
        good = InfoEncoder(ROOM).encode({"x": "text", "y": 1}) or b""
        for _ in range(3):
            with pytest.raises(ValueMismatchError):
                decoder.decode(extended(b"|O8;;12345678"))
            with pytest.raises(ValueMismatchError):
                decoder.decode(good[:-1])
            assert decoder.decode(good) == {"x": "text", "y": 1}
