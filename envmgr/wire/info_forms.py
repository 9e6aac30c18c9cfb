"""Infos of stable form: records in shared memory, which are read as columns.

Most envs put the same kinds of values into every info: five floats, or three integers. All that
such infos have besides the values is their form (`InfoForm`): the keys in their order, and the
exact type of each value. Both sides know the forms, so that a worker writes only the values, in one
go, and the trainer copies the values of a whole batch at once. Each row has the number of its
record's form; 0 stands for an info of any kind that is there as a whole (see `infos`).

A record begins with a word that has a bit for each value that is present (`episode` is present only
at the ends of episodes); the other values are zero. Nothing in a record is trusted: see
`InfoForm.batch`.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr.env.vector_infos import NumberColumn
from envmgr.hot import hot
from envmgr.spaces import Array, ValueMismatchError
from envmgr.wire.info_columns import InfoColumn, InfoColumns

MOST_FIELDS = 32
"""The most values that an info may have to go as a record."""

RECORD_BYTES = 1024
"""The most bytes that a record may have."""

MOST_FORMS = 15
"""The most forms that one manager may have: numbers 1 to 15."""

_LOOKED_AT = "abnormal"
"""An info with this key, which says whether its step was abnormal, goes as a whole: it has to be
looked at."""

_MOST_KEY_CHARACTERS = 200
_MOST_DEPTH = 8
_TEXT_BYTES = 64
_PRESENCE = struct.Struct("=I")
_FIRST_OFFSET = 8
_ALIGNMENT = 8
_KNOWN_VARIANTS = 64

FLOAT, INT, BOOL, TEXT, NONE, EMPTY = "float", "int", "bool", "str", "None", "{}"
"""Kinds of Python's values; EMPTY is a dict with nothing in it. All other kinds are numpy's dtypes,
in the form of `dtype.str`."""

_KIND_OF: dict[type, str] = {float: FLOAT, int: INT, bool: BOOL, str: TEXT, type(None): NONE}
_TYPE_OF: dict[str, type] = {kind: python for python, kind in _KIND_OF.items()}
_DTYPES: dict[str, str] = {FLOAT: "=f8", INT: "=i8", BOOL: "|b1"}
_DTYPE = re.compile(r"[<>]([iu][248]|f[248])|\|([iu]1|b1)")
_CODES: dict[str, str] = {"f8": "d", "b1": "?"} | {
    f"{kind}{1 << power}": code
    for kind, codes in (("i", "bhiq"), ("u", "BHIQ"))
    for power, code in enumerate(codes)
}
"""How `struct` packs numpy's numbers without changing any bit."""


class InfoField(NamedTuple):
    """A value of an info.

    Attributes:
        path: its keys, from the outermost inwards.
        kind: its exact type.
        shape: the shape of an array; None for all else.
    """

    path: tuple[str, ...]
    kind: str
    shape: tuple[int, ...] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the value in a record, where a text has its length before it."""
        if self.kind == TEXT:
            return np.dtype((np.uint8, (1 + _TEXT_BYTES,)))
        if self.kind in (NONE, EMPTY):
            return np.dtype((np.uint8, (0,)))
        return np.dtype((_DTYPES.get(self.kind, self.kind), self.shape or ()))


class InfoForm:
    """What infos have in common: their keys in order, and the exact types of their values.

    Args:
        fields: the values, in order. Those inside one dict follow each other.

    Attributes:
        fields: likewise.
        nbytes: the size of a record.
        offsets: where the values begin in a record.
        dtype: the dtype of a record, with a field for each value.
        names: the names of these fields.
        types: the types of the values.
        number_dtype: the dtype of the values, if all are numbers of one dtype; else None.
        has_objects: whether some values are neither numbers nor arrays.
        most_present: the presence word of an info that has all values.

    Raises:
        ValueError: these are not the fields of an info, or too many, or too large.
    """

    def __init__(self, fields: Sequence[InfoField]) -> None:
        self.fields = tuple(fields)
        if not 0 < len(self.fields) <= MOST_FIELDS or not all(map(_is_sound, self.fields)):
            raise ValueError("these are not the fields of an info")
        _Tree(self.fields)  # refuses those of one dict that do not follow each other
        offsets, offset = [], _FIRST_OFFSET
        for field in self.fields:
            dtype = field.dtype
            step = min(dtype.base.itemsize, _ALIGNMENT) or 1
            offset = -(-offset // step) * step
            offsets.append(offset)
            offset += dtype.itemsize
        self.nbytes = -(-offset // _ALIGNMENT) * _ALIGNMENT
        if self.nbytes > RECORD_BYTES:
            raise ValueError(f"the infos take {self.nbytes} bytes; {RECORD_BYTES} are possible")
        self.offsets = tuple(offsets)
        self.names = tuple(f"f{k}" for k in range(len(self.fields)))
        described = {
            "names": self.names,
            "formats": [field.dtype for field in self.fields],
            "offsets": offsets,
            "itemsize": self.nbytes,
        }
        self.dtype: np.dtype[Any] = np.dtype(described)  # type: ignore[call-overload]
        self.types = tuple(map(_type_of, self.fields))
        dtypes = {field.dtype for field in self.fields}
        are_numbers = len(dtypes) == 1 and all(kind in _NUMBERS for kind in self.types)
        self.number_dtype = dtypes.pop() if are_numbers else None
        self.has_objects = any(field.kind in (TEXT, NONE, EMPTY) for field in self.fields)
        self.most_present = (1 << len(self.fields)) - 1
        # What has to be checked before it is read: which bytes are bools, and which are texts.
        self._bools = [
            (offset, field.dtype.itemsize)
            for offset, field in zip(offsets, self.fields, strict=True)
            if field.kind in (BOOL, "|b1")
        ]
        self._texts = [k for k, field in enumerate(self.fields) if field.kind == TEXT]
        self._variants: dict[int, _Variant] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InfoForm) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(self.fields)

    def __reduce__(self) -> Any:
        return InfoForm, (self.fields,)

    def __repr__(self) -> str:
        return f"InfoForm({self.fields!r})"

    def variant(self, presence: int) -> _Variant:
        """Return the variant of the form for infos in which some of the values are present."""
        found = self._variants.get(presence)
        if found is None:
            if len(self._variants) >= _KNOWN_VARIANTS:
                self._variants.clear()
            there = [k for k in range(len(self.fields)) if presence >> k & 1]
            tree = _Tree([self.fields[k] for k in there])
            names, types = tuple(self.names[k] for k in there), tuple(self.types[k] for k in there)
            found = self._variants[presence] = _Variant(tree, there, names, types)
        return found

    # -- forms of infos -----------------------------------------------------------------------

    def presence_in(self, fields: Sequence[InfoField]) -> int | None:
        """Return the presence word of infos with these fields: a bit for each value that they have.

        None if they are not of this form: they have other values, or have them in another order.
        """
        presence, at = 0, 0
        for field in fields:
            try:
                at = self.fields.index(field, at)
            except ValueError:
                return None
            presence |= 1 << at
            at += 1
        return presence

    def with_all_of(self, other: InfoForm) -> InfoForm | None:
        """Return a form that covers the infos of both forms; None if there is none."""
        merged = _merged(_nested(self.fields), _nested(other.fields))
        try:
            return None if merged is None else InfoForm(list(_flat(merged)))
        except ValueError:
            return None

    # -- reading ------------------------------------------------------------------------------

    def batch(
        self,
        records: bytearray,
        count: int,
        presence: int | None = None,
        odd: Sequence[int] = (),
    ) -> RecordBatch:
        """Return the infos of copied records, after a check of the records.

        Args:
            records: k records, one after another; the batch keeps them.
            count: k.
            presence: the word that all of them begin with; None if that is not known.
            odd: positions of those that are not of this form. They are overwritten with records of
                infos without values.

        Raises:
            ValueMismatchError: one of them is malformed.
        """
        table: Any = None
        if odd or presence is None or self._bools or self._texts:
            table = np.frombuffer(records, np.uint8).reshape(count, self.nbytes)
        if odd:
            table[odd] = 0
        if presence is None or odd:
            words = table[:, : _PRESENCE.size].tobytes()
            if words == words[: _PRESENCE.size] * count:
                presences = list(_PRESENCE.unpack_from(words))
            else:
                presences = np.frombuffer(words, np.uint32).tolist()
        else:
            presences = [presence]
        if max(presences) > self.most_present:
            raise ValueMismatchError("an info in shared memory has values that its form has not")
        for offset, nbytes in self._bools:
            if (table[:, offset : offset + nbytes] > 1).any():
                raise ValueMismatchError("a bool of an info in shared memory is neither 0 nor 1")
        texts = {k: self._texts_of(table, k) for k in self._texts} if self._texts else _NO_TEXTS
        return RecordBatch(self, records, count, presences, texts, odd)

    def read(self, record: bytes) -> dict[str, Any]:
        """Return the info of one record.

        Raises:
            ValueMismatchError: it is malformed.
        """
        return self.batch(bytearray(record[: self.nbytes]), 1).dicts()[0]

    def _texts_of(self, records: npt.NDArray[np.uint8], k: int) -> list[str]:
        offset = self.offsets[k]
        found = []
        for data in records[:, offset : offset + 1 + _TEXT_BYTES]:
            length = int(data[0])
            if length > _TEXT_BYTES:
                raise ValueMismatchError(f"a text of an info cannot have {length} bytes")
            try:
                found.append(data[1 : 1 + length].tobytes().decode())
            except UnicodeDecodeError as error:
                raise ValueMismatchError(f"a text of an info is none: {error}") from error
        return found


def _is_sound(field: Any) -> bool:
    """Return whether this is a valid field; it may have come from anybody."""
    if type(field) is not InfoField or type(field.path) is not tuple:
        return False
    path, kind, shape = field
    if not 0 < len(path) <= _MOST_DEPTH or type(kind) is not str or path[0] == _LOOKED_AT:
        return False
    if any(type(key) is not str or len(key) > _MOST_KEY_CHARACTERS for key in path):
        return False
    if kind in _TYPE_OF or kind == EMPTY:
        return shape is None
    if not _DTYPE.fullmatch(kind):
        return False
    if shape is None:
        return np.dtype(kind).isnative
    if type(shape) is not tuple or len(shape) > _MOST_DEPTH:
        return False
    are_sizes = all(type(size) is int and 0 <= size <= RECORD_BYTES for size in shape)
    return are_sizes and math.prod(shape) <= RECORD_BYTES


_PYTHONS = {"b": BOOL, "i": INT, "u": INT, "f": FLOAT}
"""The kinds of values in infos of single envs, by the kind of the vector env's number column."""


def form_of_columns(columns: Sequence[NumberColumn]) -> InfoForm | None:
    """Return the form of infos that are given as columns; None if they cannot be records."""
    fields = [
        InfoField(path, _PYTHONS[values.dtype.kind])
        if values.ndim == 1
        else InfoField(path, values.dtype.str, values.shape[1:])
        for path, values, _ in columns
    ]
    try:
        return InfoForm(fields)
    except ValueError:
        return None


def form_of(info: dict[str, Any]) -> InfoForm | None:
    """Return the form of an info; None if it cannot go as a record."""
    fields = _fields_of(info)
    try:
        return None if fields is None else InfoForm(fields)
    except ValueError:
        return None


def _fields_of(info: dict[str, Any], inside: tuple[str, ...] = ()) -> list[InfoField] | None:
    if len(info) > MOST_FIELDS or len(inside) >= _MOST_DEPTH:
        return None
    found: list[InfoField] = []
    for key, value in info.items():
        if type(key) is not str:
            return None
        path = (*inside, key)
        if type(value) is dict and value:
            nested = _fields_of(value, path)
            if nested is None:
                return None
            found += nested
        else:
            field = _field_of(path, value)
            if field is None:
                return None
            found.append(field)
        if len(found) > MOST_FIELDS:
            return None
    return found


def _field_of(path: tuple[str, ...], value: Any) -> InfoField | None:
    python = type(value)
    if python is dict:
        return InfoField(path, EMPTY)
    kind, shape = _KIND_OF.get(python), None
    if kind is None:
        is_array = python is np.ndarray
        if not is_array and not isinstance(value, np.generic):
            return None
        kind, shape = value.dtype.str, value.shape if is_array else None
        # Some dtypes have two types of numbers, and only one of these comes out of a record.
        if not is_array and (not _DTYPE.fullmatch(kind) or np.dtype(kind).type is not python):
            return None
    field = InfoField(path, kind, shape)
    return field if _is_sound(field) else None


_Nest = dict[str, Any]  # of InfoFields


def _nested(fields: Iterable[InfoField]) -> _Nest:
    nest: _Nest = {}
    for field in fields:
        inner = nest
        for key in field.path[:-1]:
            inner = inner.setdefault(key, {})
        inner[field.path[-1]] = field
    return nest


def _flat(nest: _Nest) -> Iterator[InfoField]:
    for part in nest.values():
        if isinstance(part, dict):
            yield from _flat(part)
        else:
            yield part


def _merged(one: _Nest, other: _Nest) -> _Nest | None:
    """Return both merged, in an order that agrees with that of each; None if they do not fit."""
    common = [key for key in one if key in other]
    if common != [key for key in other if key in one]:
        return None
    merged: _Nest = {}
    keys, others = iter(one), iter(other)
    for last in (*common, None):
        for key in _until(keys, last):
            merged[key] = one[key]
        for key in _until(others, last):
            merged[key] = other[key]
        if last is not None:
            parts = one[last], other[last]
            both = _merged(*parts) if all(isinstance(part, dict) for part in parts) else None
            if both is None and parts[0] != parts[1]:
                return None
            merged[last] = parts[0] if both is None else both
    return merged


def _until(keys: Iterator[str], last: str | None) -> Iterator[str]:
    for key in keys:
        if key == last:
            return
        yield key


class _Tree:
    """The order of values in a nested dict.

    Args:
        fields: the fields of the values, in order.
        depth: how many keys of each path lead to this dict.

    Attributes:
        keys: the keys of the dict.
        count: how many values there are in it, those of inner dicts included.

    Raises:
        ValueError: a key comes twice, or stands for a value and for a dict.
    """

    def __init__(self, fields: Sequence[InfoField], depth: int = 0) -> None:
        self.count = len(fields)
        inside: dict[str, list[InfoField]] = {}
        latest = None
        for field in fields:
            key = field.path[depth] if len(field.path) > depth else None
            if key is None or (key != latest and key in inside):
                raise ValueError("the values of one dict do not follow each other")
            inside.setdefault(key, []).append(field)
            latest = key
        self.keys = tuple(inside)
        # The inner dicts, by position; None stands for a value.
        self.parts: list[_Tree | None] = []
        self.types: list[type] = []
        for some in inside.values():
            is_value = len(some) == 1 and len(some[0].path) == depth + 1
            self.parts.append(None if is_value else _Tree(some, depth + 1))
            self.types.append(_type_of(some[0]) if is_value else dict)
        self.is_flat = not any(self.parts)
        self._keys_list = list(self.keys)

    def values_of(self, info: dict[str, Any]) -> list[Any] | None:
        """Return the values of an info with these keys and types; None if it has others.

        Keys are compared as dicts do: who calls this has seen that those of the env are no others.
        """
        if [*info] != self._keys_list or [*map(type, info.values())] != self.types:
            return None
        if self.is_flat:
            return [*info.values()]
        found: list[Any] = []
        for part, value in zip(self.parts, info.values(), strict=True):
            if part is None:
                found.append(value)
                continue
            inner = part.values_of(value)
            if inner is None:
                return None
            found += inner
        return found

    def dicts(self, columns: Iterator[list[Any]], count: int) -> list[dict[str, Any]]:
        """Return dicts of values, whose columns are given one after another."""
        keys, parts = self.keys, self.parts
        if not keys:
            return [{} for _ in range(count)]
        each = [next(columns) if part is None else part.dicts(columns, count) for part in parts]
        if hot is not None:
            found: list[dict[str, Any]] = hot.dicts(keys, each, count)
            return found
        return [dict(zip(keys, row, strict=False)) for row in zip(*each, strict=True)]

    def nested(self, columns: Iterator[Any]) -> dict[str, Any]:
        """Return one nested dict of columns, given one after another."""
        if self.is_flat:
            return dict(zip(self.keys, columns, strict=False))  # others go on with them
        found: dict[str, Any] = {}
        for key, part in zip(self.keys, self.parts, strict=True):
            if part is None:
                found[key] = next(columns)
            else:
                inner = part.nested(columns)
                present = [column.present for column in inner.values()]
                found[key] = InfoColumns(inner, np.logical_or.reduce(present))
        return found


class _Variant(NamedTuple):
    """Infos of a form in which some of the values are present.

    Attributes:
        tree: the tree of these values.
        there: their positions among the values of the form.
        names: the names of their fields in a record.
        types: their types.
    """

    tree: _Tree
    there: Sequence[int]
    names: tuple[str, ...]
    types: tuple[type, ...]


_NO_TEXTS: dict[int, list[str]] = {}

_NUMBERS = frozenset((float, int, np.float64, np.int64, np.float32))


@functools.lru_cache(maxsize=64)
def _all_true(shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    return np.ones(shape, np.bool_)


def _type_of(field: InfoField) -> type:
    if field.kind == EMPTY:
        return dict
    if field.shape is not None:
        return np.ndarray
    return _TYPE_OF.get(field.kind) or np.dtype(field.kind).type


# -- the trainer's side -------------------------------------------------------------------------


class RecordBatch:
    """The infos of k rows that are of one form: copies of their records.

    Args:
        form: their form.
        records: the records of all of them.
        count: k.
        presences: which values each info has; one number, if that is the same for all.
        texts: the texts of those fields that are texts, by number of the field.
        odd: positions of the rows that are not of the form.

    Attributes:
        form: their form.
        odd: positions of the rows that are not of the form, and so have no values here.
    """

    __slots__ = ("_count", "_presences", "_records", "_texts", "form", "odd")

    def __init__(
        self,
        form: InfoForm,
        records: bytearray,
        count: int,
        presences: list[int],
        texts: dict[int, list[str]],
        odd: Sequence[int],
    ) -> None:
        self.form = form
        self.odd = odd
        self._records = records
        self._count = count
        self._presences = presences
        self._texts = texts

    def dicts(self) -> list[dict[str, Any]]:
        """Return the infos."""
        presences = self._presences
        if len(presences) == 1:
            return self._dicts_of(presences[0], None)
        infos: list[Any] = [None] * len(presences)
        for presence in set(presences):
            positions = [k for k, one in enumerate(presences) if one == presence]
            for k, info in zip(positions, self._dicts_of(presence, positions), strict=True):
                infos[k] = info
        return infos

    def _dicts_of(self, presence: int, positions: list[int] | None) -> list[dict[str, Any]]:
        values, count = self._values, self._count
        if positions is not None:
            values, count = values[positions], len(positions)
        columns = []
        for k, field in enumerate(self.form.fields):
            if presence >> k & 1:
                columns.append(self._listed(k, field, values, positions, count))
        return self.form.variant(presence).tree.dicts(iter(columns), count)

    @property
    def _values(self) -> Array:
        values: Array = np.ndarray(self._count, self.form.dtype, self._records)
        return values

    def _listed(
        self, k: int, field: InfoField, values: Array, positions: list[int] | None, count: int
    ) -> list[Any]:
        """Return the values of a field, one for each info, as the infos had them."""
        kind, shape = field.kind, field.shape
        if kind == TEXT:
            texts = self._texts[k]
            return texts if positions is None else [texts[position] for position in positions]
        if kind == EMPTY:
            return [{} for _ in range(count)]
        if kind == NONE:
            return [None] * count
        column = values[self.form.names[k]]
        if kind in _TYPE_OF:
            listed: list[Any] = column.tolist()
            return listed
        if shape is None:
            return list(column)
        if shape == ():
            return [np.array(value, column.dtype) for value in column]
        return [value.copy() for value in column]

    def columns(self) -> InfoColumns:
        """Return the infos as columns; without those that are of another form."""
        form, presences, count = self.form, self._presences, self._count
        if len(presences) == 1 and not form.has_objects:
            return self._array_columns(form.variant(presences[0]))
        any_present = 0
        for presence in set(presences):
            any_present |= presence
        all_present = _all_true((count,)).copy()
        values, found = self._values, list[Any]()
        for k, field in enumerate(form.fields):
            if not any_present >> k & 1:
                continue
            if len(presences) == 1:
                present = all_present.copy()
            else:
                present = np.array([presence >> k & 1 for presence in presences], np.bool_)
            if field.kind == EMPTY:
                found.append(InfoColumns({}, present))
                continue
            if field.kind in (TEXT, NONE):
                column = np.full(count, None, dtype=object)
                if field.kind == TEXT:
                    texts = self._texts[k]
                    for position in present.nonzero()[0].tolist():
                        column[position] = texts[position]
            else:
                column = values[form.names[k]].copy()
            found.append(InfoColumn.of(column, present, form.types[k]))
        return InfoColumns(form.variant(any_present).tree.nested(iter(found)), all_present)

    def _array_columns(self, variant: _Variant) -> InfoColumns:
        """Return the columns of infos that have the same values, all of them numbers or arrays."""
        form, count, dtype = self.form, self._count, self.form.number_dtype
        tree, there, names, types = variant
        rows: Sequence[Array]
        if dtype is None:
            values = self._values
            rows = [values[name].copy() for name in names]
        else:  # numbers, which are copied in one piece
            shape, strides = (len(form.names), count), (dtype.itemsize, form.nbytes)
            rows = np.ndarray(shape, dtype, self._records, form.offsets[0], strides).copy()
            if len(there) < len(form.names):
                rows = [rows[k] for k in there]
        present = _all_true((len(there) + 1, count)).copy()
        if hot is not None and tree.is_flat:
            columns = hot.columns(InfoColumn, tree.keys, rows, present, types)
        else:
            columns = tree.nested(map(InfoColumn.of, rows, present, types))
        return InfoColumns(columns, present[-1])

    @property
    def told(self) -> list[int]:
        """The positions of infos with values, ascending."""
        presences = self._presences
        if len(presences) == 1:
            return list(range(self._count)) if presences[0] else []
        return [k for k, presence in enumerate(presences) if presence]


# -- the worker's side --------------------------------------------------------------------------


class _Unlike(ValueError):
    """A value that is not quite of the type that its field has."""


class _Packer:
    """A packer of infos that have certain values of a form, and no others.

    Args:
        number: the number of the form.
        form: the form.
        presence: which of its values the infos have.

    Attributes:
        number: likewise.
        presence: likewise.
        tree: the tree of the values.
        pack_into: packs the presence and the values.
        is_plain: whether there are no dicts in the infos, and the values are packed as they are.
        codes: how each of the values is packed.
        offsets: where each of them is packed.
        nbytes: the size of a record.
    """

    __slots__ = (
        "_converters",
        "codes",
        "is_plain",
        "nbytes",
        "number",
        "offsets",
        "pack_into",
        "presence",
        "tree",
    )

    def __init__(self, number: int, form: InfoForm, presence: int) -> None:
        self.number = number
        self.presence = presence
        self.tree = form.variant(presence).tree
        self.nbytes = form.nbytes
        self.codes: list[str] = []
        self.offsets: list[int] = []
        codes, at = ["=I"], _PRESENCE.size
        converters: list[Callable[[Any], Any] | None] = []
        for k, (offset, field) in enumerate(zip(form.offsets, form.fields, strict=True)):
            size = field.dtype.itemsize
            code, convert = _code_of(field)
            if not presence >> k & 1:
                code = f"{size}x"  # which is zero in a record
            else:
                converters.append(convert)
                self.codes.append(code)
                self.offsets.append(offset)
            codes += [f"{offset - at}x", code]
            at = offset + size
        codes.append(f"{form.nbytes - at}x")
        self.pack_into: Callable[..., None] = struct.Struct("".join(codes)).pack_into
        self._converters = converters if any(converters) else None
        self.is_plain = self._converters is None and self.tree.is_flat

    def teach(self, in_c: Any, version: int) -> None:
        """Teach the C code to write the infos that this packs, which must be plain."""
        tree, codes, offsets = self.tree, "".join(self.codes), tuple(self.offsets)
        types = tuple(tree.types)
        in_c.learn(
            version, self.number, self.presence, tree.keys, types, codes, offsets, self.nbytes
        )

    def write(self, record: Any, info: dict[str, Any]) -> bool:
        """Write an info; return False if it is not one that this packs."""
        values = self.tree.values_of(info)
        if values is None:
            return False
        try:
            if self._converters is not None:
                values = [
                    value if convert is None else convert(value)
                    for convert, value in zip(self._converters, values, strict=True)
                ]
            self.pack_into(record, 0, self.presence, *values)
        except (struct.error, _Unlike, UnicodeEncodeError):  # a large integer, a long text ...
            return False
        return True


def _code_of(field: InfoField) -> tuple[str, Callable[[Any], Any] | None]:
    """Return how a value is packed, and the function that has to convert it first, or None."""
    kind, shape, dtype = field.kind, field.shape, field.dtype
    if kind == TEXT:
        return f"{1 + _TEXT_BYTES}s", _text_bytes
    if kind in (NONE, EMPTY):
        return "0s", _no_bytes_of_empty if kind == EMPTY else _no_bytes
    if kind in _TYPE_OF:
        return {FLOAT: "d", INT: "q", BOOL: "?"}[kind], None
    code = _CODES.get(kind[1:])
    if shape is None and code is not None:
        return code, None
    expected, sizes = dtype.base, shape

    def array_bytes(value: Any) -> bytes:
        if sizes is not None and (value.dtype != expected or value.shape != sizes):
            raise _Unlike
        data: bytes = value.tobytes()
        return data

    return f"{dtype.itemsize}s", array_bytes


_LENGTHS = [bytes((length,)) for length in range(_TEXT_BYTES + 1)]


def _text_bytes(text: str) -> bytes:
    data = text.encode()
    if len(data) > _TEXT_BYTES:
        raise _Unlike
    return _LENGTHS[len(data)] + data


def _no_bytes(value: Any) -> bytes:
    return b""


def _no_bytes_of_empty(value: dict[Any, Any]) -> bytes:
    if value:
        raise _Unlike
    return b""


_PATIENCE = 256
"""The most infos of no known form that a host looks at more closely."""

_PROPOSED_AFTER = 8
"""A form is proposed once it has fitted this many infos of no known form in a row."""

_MOST_ODD = 1000
"""Once this many infos of an env in a row have been of no form, its host gives up on records."""

_MOST_PACKERS = 4


class HostForms:
    """What a host knows about the forms of infos: those that the trainer has numbered.

    Args:
        propose: tells the trainer which form the infos of an env_id have; None: they have none.

    Attributes:
        numbered: the forms, by number, the oldest first.
        versions: its only item changes whenever there is a new form.
        is_given_up: whether the host no longer writes records.
        of_steps: looks at infos of steps that are of no known form.
        of_resets: likewise for resets.
    """

    def __init__(self, propose: Callable[[int, tuple[InfoField, ...] | None], None]) -> None:
        self._propose = propose
        self.numbered: dict[int, InfoForm] = {}
        self.versions = array("q", [0])
        self.is_given_up = False
        self.of_steps, self.of_resets = FormSeeker(self), FormSeeker(self)
        self._patience = _PATIENCE
        self._proposed: set[InfoForm] = set()

    def learn(self, forms: Iterable[tuple[int, tuple[InfoField, ...]]]) -> None:
        """Take note of forms that the trainer has numbered."""
        for number, fields in forms:
            if number not in self.numbered:
                self.numbered[number] = InfoForm(fields)
                self.versions[0] += 1

    def number_of(self, form: InfoForm) -> int | None:
        """Return the number of exactly this form; None if it has none."""
        for number, known in self.numbered.items():
            if known == form:
                return number
        return None

    def packer_for(self, info: dict[str, Any]) -> _Packer | None:
        """Return a packer for an info; None if the info is of none of the forms."""
        form = form_of(info) if self.numbered else None
        if form is not None:
            for number, known in reversed(self.numbered.items()):
                presence = known.presence_in(form.fields)
                if presence is not None:
                    return _Packer(number, known, presence)
        return None

    def give_up(self, env_id: int) -> None:
        """Stop writing records, because most infos of an env have no form."""
        self.is_given_up = True
        self._propose(env_id, None)

    def closer_look(self, info: dict[str, Any]) -> InfoForm | None:
        """Return the form of an info; None if it has none, or if enough infos were looked at."""
        if not self._patience:
            return None
        self._patience -= 1
        return form_of(info)

    def propose(self, env_id: int, form: InfoForm) -> None:
        """Tell the trainer of a form, once."""
        if form not in self._proposed and form not in self.numbered.values():
            self._proposed.add(form)
            self._propose(env_id, form.fields)


class FormSeeker:
    """A finder of the form of infos, of steps or of resets, that are of no known form.

    Args:
        forms: what the host knows about forms.
    """

    def __init__(self, forms: HostForms) -> None:
        self._forms = forms
        self._form: InfoForm | None = None
        self._n_seen = 0

    def look_at(self, env_id: int, info: dict[str, Any], known: InfoForm | None) -> None:
        """Look at an info; if one form fits several infos in a row, propose it.

        Args:
            env_id: the env.
            info: the info.
            known: the form of other infos of the env, which is to be a part of the proposed form.
        """
        form = self._forms.closer_look(info)
        if form is not None and known is not None:
            form = known.with_all_of(form) or form
        before = self._form
        both = form if before is None or form is None else before.with_all_of(form)
        self._n_seen = self._n_seen + 1 if both is not None else 1
        self._form = both or form
        if self._form is not None and self._n_seen >= _PROPOSED_AFTER:
            self._forms.propose(env_id, self._form)
            self._form = None
            self._n_seen = 0


class RecordTable:
    """Records of all rows of a vector env.

    Args:
        form: the form of all records.
        count: how many rows there are.

    Attributes:
        form: likewise.
        table: the records: (n, bytes) uint8.
        rows: a `RecordRow` for each row.
    """

    def __init__(self, form: InfoForm, count: int) -> None:
        self.form = form
        self.table: Array = np.zeros((count, form.nbytes), np.uint8)
        self.rows = [RecordRow(self, row) for row in range(count)]
        values = self.table.view(form.dtype)[:, 0]
        self._values: list[Array] = [values[name] for name in form.names]
        self._presences: Array = self.table[:, : _PRESENCE.size].view(np.uint32)[:, 0]

    def write(self, columns: Sequence[NumberColumn], rows: Any) -> None:
        """Write the infos of some rows, given the columns of all rows."""
        presences: Any = self.form.most_present
        for k, (target, (_, values, present)) in enumerate(zip(self._values, columns, strict=True)):
            given = values[rows]
            if present is not None:
                absent = ~present[rows]
                given = given.copy()
                given[absent] = 0
                presences = presences & ~(absent.astype(np.uint32) << np.uint32(k))
            target[rows] = given
        self._presences[rows] = presences

    def batch(self, rows: Sequence[int]) -> RecordBatch:
        """Return copies of the infos of rows."""
        return self.form.batch(bytearray(self.table[rows].tobytes()), len(rows))


class RecordRow(NamedTuple):
    """The info of a row, which is not read until it is asked for."""

    records: RecordTable
    row: int

    def info(self) -> dict[str, Any]:
        """Return the info; each time as a new dict."""
        return self.records.form.read(self.records.table[self.row].tobytes())


class InfoWriter:
    """A writer of the infos of one env, of steps or of resets, as records.

    Args:
        forms: what the env's host knows about forms.
        seeker: looks at infos of no known form.
        env_id: the env.
        record: the bytes that the env has for a record.
        numbers: the column that says of which form each record is.
        row: the env's row in that column.

    Attributes:
        function: writes an info that is not empty; returns False if it has to go in another way.
    """

    __slots__ = (
        "_env_id",
        "_forms",
        "_in_c",
        "_keys",
        "_n_odd",
        "_number",
        "_numbers",
        "_pack_into",
        "_packers",
        "_presence",
        "_record",
        "_row",
        "_seeker",
        "_types",
        "_version",
        "_versions",
        "function",
    )

    def __init__(
        self,
        forms: HostForms,
        seeker: FormSeeker,
        env_id: int,
        record: Any,
        numbers: Any,
        row: int,
    ) -> None:
        self._forms = forms
        self._seeker = seeker
        self._env_id = env_id
        self._record = record
        self._numbers = numbers
        self._row = row
        self._packers: list[_Packer] = []
        self._version = -1
        self._versions = forms.versions
        self._n_odd = 0
        # What is known of infos that only need to be packed.
        self._keys: list[str] | None = None
        self._types: list[type] = []
        self._number = self._presence = 0
        self._pack_into: Callable[..., None] = _PRESENCE.pack_into
        self._in_c: Any = None
        self.function: Callable[[dict[str, Any]], bool] = self.write
        if hot is not None:
            arguments = self._write_otherwise, record, numbers, row, forms.versions
            self.function = self._in_c = hot.PlainInfos(*arguments)

    def write(self, info: dict[str, Any]) -> bool:
        """Write an info that is not empty; return False if it has to go in another way."""
        # The same as `_Packer.write`, in one piece: every step runs this, and it is in C, too.
        if (
            self._versions[0] == self._version
            and [*info] == self._keys
            and [*map(type, info.values())] == self._types
        ):
            try:
                self._pack_into(self._record, 0, self._presence, *info.values())
            except struct.error:  # a large integer
                return False
            self._numbers[self._row] = self._number
            return True
        return self._write_otherwise(info)

    def _write_otherwise(self, info: dict[str, Any]) -> bool:
        forms, packers = self._forms, self._packers
        if forms.is_given_up:
            return False
        if self._versions[0] != self._version:
            packers.clear()
            self._keys, self._version = None, self._versions[0]
        for packer in packers:
            if packer.write(self._record, info):
                self._numbers[self._row] = packer.number
                return True
        new = forms.packer_for(info)
        if new is None or not new.write(self._record, info):
            return False
        if len(packers) >= _MOST_PACKERS:
            packers.pop()
        packers.append(new)
        if self._keys is None and new.is_plain:
            self._keys, self._types = list(new.tree.keys), new.tree.types
            self._number, self._presence = new.number, new.presence
            self._pack_into = new.pack_into
            if self._in_c is not None:
                new.teach(self._in_c, self._version)
        self._numbers[self._row] = new.number
        return True

    def note_odd(self, info: dict[str, Any]) -> None:
        """Note that an info could not be written here, and goes as a whole."""
        was_odd = self._numbers[self._row] == 0
        self._numbers[self._row] = 0
        forms = self._forms
        if forms.is_given_up:
            return
        self._n_odd = self._n_odd + 1 if was_odd else 1
        if self._n_odd >= _MOST_ODD:
            forms.give_up(self._env_id)
            return
        known = forms.numbered[self._packers[0].number] if self._packers else None
        self._seeker.look_at(self._env_id, info, known)
