"""Values of every kind that a caller may give by mistake, the hostile ones included."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np


class Trouble(Exception):
    """What hostile values raise; never to be seen by a caller of envmgr, but as a cause."""


def _raise(*_: Any) -> Any:
    raise Trouble("this value raises")


def hostile(*methods: str, base: type = object) -> Any:
    """Return an object (of a subclass of `base`) whose `methods` raise."""
    body: dict[str, Any] = dict.fromkeys(methods, _raise)
    if "__eq__" in body and "__hash__" not in body:
        body["__hash__"] = lambda self: hash("turn")
    return type("Hostile", (base,), body)()


class OddMapping(Mapping[Any, Any]):
    """A mapping of one's own, over pairs that need not be consistent."""

    def __init__(self, *pairs: tuple[Any, Any], length: int | None = None) -> None:
        self._pairs = pairs
        self._length = len(pairs) if length is None else length

    def __getitem__(self, key: Any) -> Any:
        for known, value in self._pairs:
            if known is key or known == key:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._pairs)

    def __len__(self) -> int:
        return self._length


class RaisingMapping(OddMapping):
    """A mapping whose values cannot be had."""

    def __getitem__(self, key: Any) -> Any:
        raise Trouble("no value")


def _zero_dim_object() -> Any:
    array = np.empty((), dtype=object)
    array[()] = {}
    return array


def _self_containing() -> Any:
    knot: list[Any] = []
    knot.append(knot)
    return knot


ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "zero": lambda: 0,
    "one": lambda: 1,
    "minus one": lambda: -1,
    "huge": lambda: 10**400,
    "minus huge": lambda: -(10**400),
    "2**63": lambda: 2**63,
    "half": lambda: 0.5,
    "1.0": lambda: 1.0,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "complex": lambda: 1j,
    "empty text": lambda: "",
    "text": lambda: "x",
    "digits": lambda: "01",
    "surrogate": lambda: "\ud800",
    "long text": lambda: "x" * 100_000,
    "bytes": lambda: b"\x00\x01",
    "bytearray": lambda: bytearray(b"\x00\x01"),
    "memoryview": lambda: memoryview(b"\x00\x01"),
    "path": lambda: Path("/nowhere/x"),
    "empty list": lambda: [],
    "list": lambda: [0, 1],
    "short list": lambda: [0],
    "list of three": lambda: [0, 1, 2],
    "list twice": lambda: [1, 1],
    "ragged": lambda: [[0], [0, 1]],
    "list of None": lambda: [None, None],
    "list of text": lambda: ["0", "1"],
    "list of hostile": lambda: [hostile("__hash__"), hostile("__repr__", "__eq__")],
    "knot": _self_containing,
    "tuple": lambda: (0, 1),
    "empty tuple": lambda: (),
    "range": lambda: range(2),
    "endless range": lambda: range(10**18),
    "set": lambda: {0, 1},
    "frozenset": lambda: frozenset((0, 7)),
    "generator": lambda: (i for i in range(2)),
    "failing generator": lambda: (_raise() for _ in range(2)),
    "endless generator": lambda: itertools.count(),
    "class": lambda: int,
    "function": lambda: _raise,
    "ellipsis": lambda: ...,
    "object": object,
    "empty dict": dict,
    "dict": lambda: {0: 0, 1: 0},
    "dict of True": lambda: {True: 0},
    "dict of 0.0": lambda: {0.0: 0},
    "dict of text": lambda: {"0": 0},
    "dict of None": lambda: {None: 0},
    "dict of tuple": lambda: {(0, 1): 0},
    "dict of -1": lambda: {-1: 0},
    "dict of 9": lambda: {9: 0},
    "dict of huge": lambda: {10**400: 0},
    "dict of nan": lambda: {math.nan: 0},
    "dict of hostile": lambda: {hostile("__eq__", "__repr__"): 0},
    "dict of None values": lambda: {0: None},
    "dict of lists": lambda: {0: [1], 1: [[2]]},
    "mapping": lambda: OddMapping((0, 0)),
    "mapping twice": lambda: OddMapping((0, 0), (np.int64(0), 0)),
    "mapping of unhashables": lambda: OddMapping(([], 0)),
    "lying mapping": lambda: OddMapping((0, 0), length=7),
    "empty mapping": lambda: OddMapping(),
    "raising mapping": lambda: RaisingMapping((0, 0)),
    "negative length": lambda: OddMapping((0, 0), length=-1),
    "np.int64": lambda: np.int64(1),
    "np.uint8": lambda: np.uint8(1),
    "np.float64": lambda: np.float64(0.5),
    "np.nan": lambda: np.float32(np.nan),
    "np.bool": lambda: np.bool_(True),
    "np.str": lambda: np.str_("x"),
    "np.bytes": lambda: np.bytes_(b"x"),
    "np.datetime": lambda: np.datetime64("2020-01-01"),
    "np.complex": lambda: np.complex64(1j),
    "array": lambda: np.array([0, 1]),
    "short array": lambda: np.array([0]),
    "empty array": lambda: np.array([]),
    "0-d array": lambda: np.array(0),
    "2-d array": lambda: np.array([[0], [1]]),
    "float array": lambda: np.array([0.5, np.nan]),
    "bool array": lambda: np.array([True, False]),
    "uint array": lambda: np.array([0, 1], dtype=np.uint64),
    "object array": lambda: np.array([0, None], dtype=object),
    "0-d object array": _zero_dim_object,
    "text array": lambda: np.array(["0", "1"]),
    "complex array": lambda: np.array([0j, 1j]),
    "record array": lambda: np.array([(0, 1.0)], dtype=[("a", "i4"), ("b", "f4")]),
    "datetime array": lambda: np.array(["2020-01-01", "2020-01-02"], dtype="M8[D]"),
    "raising __iter__": lambda: hostile("__iter__"),
    "raising __len__": lambda: hostile("__len__", "__iter__", "__getitem__"),
    "raising __getitem__": lambda: hostile("__getitem__"),
    "raising __array__": lambda: hostile("__array__"),
    "raising __eq__": lambda: hostile("__eq__", "__ne__"),
    "raising __bool__": lambda: hostile("__bool__"),
    "raising __hash__": lambda: hostile("__hash__"),
    "raising __index__": lambda: hostile("__index__", "__int__", "__float__"),
    "raising __repr__": lambda: hostile("__repr__", "__str__"),
    "raising __getattr__": lambda: hostile("__getattr__"),
    "raising json": lambda: hostile("json"),
    "raising list": lambda: hostile("__iter__", "__len__", "__repr__", base=list),
    "raising dict": lambda: hostile("__iter__", "__len__", "keys", "items", base=dict),
    "raising text": lambda: hostile("__eq__", "__hash__", "__repr__", base=str),
    "raising int": lambda: hostile("__eq__", "__lt__", "__le__", "__repr__", base=int),
    "raising __fspath__": lambda: hostile("__fspath__"),
}


def _torch() -> Any:
    return importlib.import_module("torch")


OF_TORCH: dict[str, Callable[[], Any]] = {
    "0-d tensor": lambda: _torch().tensor(0),
    "tensor": lambda: _torch().tensor([0, 1]),
    "2-d tensor": lambda: _torch().tensor([[0.0], [1.0]]),
    "tensor with gradient": lambda: _torch().tensor([0.0, 1.0], requires_grad=True),
    "0-d tensor with gradient": lambda: _torch().tensor(0.0, requires_grad=True),
    "tensor on no device": lambda: _torch().empty(2, device="meta"),
    "list of tensors": lambda: [_torch().tensor(0.0, requires_grad=True)] * 2,
    "dict of tensors": lambda: {_torch().tensor(0): _torch().tensor(1.0, requires_grad=True)},
}
"""Those of them that import PyTorch when they are made."""

if importlib.util.find_spec("torch") is not None:
    ODD |= OF_TORCH
