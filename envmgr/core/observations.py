"""Observations on the trainer's side: where they are, how they are read, how long views are good.

Workers write observations into shared memory, or send them. This module turns what a reply refers
to into what users get: one observation, or a batch of them, copied or as views; and it knows which
observation of each env is the newest one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from envmgr.errors import StaleViewError
from envmgr.spaces import (
    Array,
    Layout,
    Leaf,
    TextLeaf,
    TextReader,
    ValueMismatchError,
    codec_of,
    merged_axes,
    objects,
    rebuilt,
)
from envmgr.spaces.agents import lost_step
from envmgr.types import EnvTimestep
from envmgr.wire.arenas import COPIED, Buffers, Placement, buffer_arrays
from envmgr.wire.block import BUFFER_BITS

STEPS = 2
"""How many more steps of its env a view stays valid through."""


class ViewGuard:
    """Counts the steps of envs, and hands out views that know how old they are."""

    def __init__(self, env_num: int) -> None:
        self._sent = [(0, 0)] * env_num

    def count(self, env_ids: Iterable[int], request: int) -> None:
        """Count an action sent to each of these envs, but only once for each request."""
        for env_id in env_ids:
            n, latest = self._sent[env_id]
            if request != latest:
                self._sent[env_id] = n + 1, request

    def wrap(self, env_ids: Sequence[int], view: Any) -> Any:
        """Return a view that raises when one of these envs has gone too far.

        Args:
            env_ids: the envs whose observations it shows.
            view: the view; a number is returned as it is.
        """
        if not isinstance(view, np.ndarray):
            return view
        sent = self._sent
        until = {env_id: sent[env_id][0] + STEPS for env_id in env_ids}

        def check() -> None:
            for env_id, last in until.items():
                n = sent[env_id][0]
                if n > last:
                    raise StaleViewError(
                        f"this observation of env {env_id} is a view that was valid through the "
                        f"env's next {STEPS} steps, and {n - last + STEPS} actions were "
                        "sent to it since. Copy what is to be kept, or set copy_on_get: true."
                    )

        checked = view.view(CheckedView)
        checked.check = check
        return checked


def _nothing() -> None:
    """Check nothing: the array belongs to no env."""


def _plain(value: Any) -> Any:
    """Check the views in a value, and return it with ordinary arrays in their place."""
    if isinstance(value, CheckedView):
        value.check()
        return np.ndarray.view(value, np.ndarray)
    if isinstance(value, (list, tuple)):
        return rebuilt(value, map(_plain, value))
    return value


class CheckedView(np.ndarray[Any, Any]):
    """An array that checks its age whenever numpy or Python reads it.

    What is computed from it is an ordinary array; parts of it are checked as well. Libraries that
    read memory without asking (`torch.from_numpy`) are not noticed.

    Attributes:
        check: raises StaleViewError if the array is too old.
    """

    check: Callable[[], None]

    def __array_finalize__(self, source: Any) -> None:
        self.check = getattr(source, "check", _nothing)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if "out" in kwargs:
            kwargs["out"] = _plain(kwargs["out"])
        return getattr(ufunc, method)(*_plain(inputs), **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return function(*_plain(args), **{name: _plain(value) for name, value in kwargs.items()})

    def __getitem__(self, key: Any) -> Any:
        self.check()
        return super().__getitem__(key)


def _of_plain(name: str) -> Callable[..., Any]:
    """Return a method that checks the view and calls the same method of an ordinary array."""

    def method(self: CheckedView, *args: Any, **kwargs: Any) -> Any:
        return getattr(_plain(self), name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"As `numpy.ndarray.{name}`, of an array that is not too old."
    return method


_GIVE_VIEWS = frozenset(
    ("view", "reshape", "ravel", "transpose", "swapaxes", "squeeze", "diagonal", "getfield")
)
"""Methods whose results are checked when they are used, as they share the memory."""

# numpy's own methods go on to __array_ufunc__, and keep the array alive for ever when that raises;
# or they read the memory without a check.
for _name in (
    *(name for name in dir(np.ndarray) if name[0] != "_" and callable(getattr(np.ndarray, name))),
    *("__setitem__", "__contains__", "__repr__", "__str__", "__format__"),
    *("__float__", "__int__", "__index__", "__bool__", "__complex__"),
    *("__reduce__", "__copy__", "__deepcopy__", "__array__"),
):
    if _name not in _GIVE_VIEWS:
        setattr(CheckedView, _name, _of_plain(_name))


_LARGE_BYTES = 4096
"""Observations of this size or more are copied one by one, so that keeping one does not keep a
whole batch in memory."""

_KNOWN_PARTS = 256

Rows = Any
"""What indexes rows: a slice of neighbours, or an array of their numbers."""


Where = int | bytes
"""The one buffer that all observations are in, or bytes with the buffer of each of them."""


def one_of(buffers: bytes) -> Where:
    """Return buffers as one number if they are all the same, else as they are."""
    return buffers[0] if buffers.count(buffers[:1]) == len(buffers) else buffers


class RowsOfArena(Protocol):
    """Rows that are read together.

    Attributes:
        ids: their numbers.
        rows: what indexes them.
        is_slice: whether they are neighbours.
        arenas: if they are neighbours, their rows of the arenas, by buffer, as far as these were
            asked for.
    """

    ids: list[int]
    rows: Rows
    is_slice: bool
    arenas: dict[int, list[Array]]


class RowsToRead:
    """Some rows that are read together once, in the order in which they were named.

    Args:
        ids: the numbers of the rows: at least one, and all different.

    Attributes:
        array: the same, as a read-only array (k,) int64.
    """

    def __init__(self, ids: list[int]) -> None:
        first, count = ids[0], len(ids)
        self.ids = ids
        self.array: npt.NDArray[np.int64] = np.array(ids, np.int64)
        self.array.flags.writeable = False
        # For most, the last id alone shows that they are not neighbours.
        self.is_slice = ids[-1] - first == count - 1 and ids == list(range(first, first + count))
        self.rows: Rows = slice(first, first + count) if self.is_slice else self.array
        self.arenas: dict[int, list[Array]] = {}


class ObservedEnvs(RowsOfArena, Protocol):
    """Envs whose observations are read together.

    Attributes:
        count: how many there are.
        fresh: the bytes that say, for all of them, that the newest observation is in the arena.
        stale: the bytes that say that it is not.
    """

    count: int
    fresh: bytes
    stale: bytes


class _Texts:
    """The texts of one leaf of an arena, which are read when their observations have arrived.

    Args:
        bytes_of_all: the leaf (buffers, rows, bytes of a text).

    Attributes:
        column: what was read: an array of objects (buffers, rows).
    """

    def __init__(self, bytes_of_all: Array, leaf: TextLeaf) -> None:
        n_buffers, self._n_rows, self._nbytes = bytes_of_all.shape
        self._memory = bytes_of_all.data.cast("B")
        self._read = TextReader(leaf).read_each
        self.column = np.empty((n_buffers, self._n_rows), object)
        self._flat = self.column.reshape(-1)

    def read(self, ids: Sequence[int], buffers: Where) -> None:
        """Read the texts of some rows, given as for `Arena.read_texts`.

        Raises:
            ValueMismatchError: the bytes of one text make no sense; none was taken.
        """
        n, nbytes, flat = self._n_rows, self._nbytes, self._flat
        if isinstance(buffers, int):
            first = buffers * n
            at = [first + row for row in ids]
        else:
            at = [buffer * n + row for buffer, row in zip(buffers, ids, strict=True)]
        texts = self._read(self._memory, [where * nbytes for where in at])
        for where, text in zip(at, texts, strict=True):
            flat[where] = text


class Arena:
    """The observations of envs of one layout.

    Texts among them are taken out of the shared memory by `read_texts`, before anything else of an
    observation is read, and only once: what makes no sense is found before it can do harm.

    Args:
        arrays: per leaf (buffers, rows, *shape).
        buffers: how many buffers there are, of which kind.
        env_ids: the envs whose rows they are.
        copies: whether observations are copied out of the arrays.
        guard: wraps views that are handed out; None leaves them.

    Attributes:
        has_texts: whether `read_texts` has to be called.
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        layout: Layout,
        buffers: Buffers,
        env_ids: Sequence[int],
        *,
        copies: bool,
        guard: ViewGuard | None,
    ) -> None:
        pairs = list(zip(layout.leaves, arrays, strict=True))
        texts = {
            j: _Texts(a, leaf) for j, (leaf, a) in enumerate(pairs) if isinstance(leaf, TextLeaf)
        }
        self._texts = list(texts.values())
        self.has_texts = bool(texts)
        self._are_texts = [j in texts for j in range(len(arrays))]
        arrays = [texts[j].column if j in texts else array for j, array in enumerate(arrays)]
        self._arrays = arrays
        self._env_ids = env_ids
        self._guard = guard
        self._by_buffer = [[array[buffer] for array in arrays] for buffer in range(buffers.count)]
        self._flat = [merged_axes(array) for array in arrays]
        self._copies = copies
        self._is_lone = type(layout.skeleton) is int
        self._unflatten = layout.unflatten
        # In a batch each of these observations is one object as a whole: see `Codec.stack`.
        self._are_objects = not self._is_lone and all(self._are_texts)
        self._are_no_arrays = [leaf.is_number or j in texts for j, leaf in enumerate(layout.leaves)]
        self._large = [leaf.nbytes >= _LARGE_BYTES for leaf in layout.leaves]
        # Of shape () and yet an array: iterating over a batch would turn it into a number.
        self._pointlike = [leaf.shape == () and not leaf.is_number for leaf in layout.leaves]
        odd = any(self._large) or any(self._pointlike)
        self._are_rows_of_a_copy = copies and self._is_lone and not odd

    def read_texts(self, ids: Sequence[int], buffers: Where) -> int | None:
        """Read the texts among observations; the texts handed out later are those read here.

        Args:
            ids: numbers of rows.
            buffers: the buffers that the observations are in.

        Returns:
            The env whose text makes no sense; None if all do.
        """
        try:
            for texts in self._texts:
                texts.read(ids, buffers)
        except ValueMismatchError:
            if len(ids) == 1:
                return self._env_ids[ids[0]]
        else:
            return None
        each = repeat(buffers) if isinstance(buffers, int) else buffers
        found = (self.read_texts([i], buffer) for i, buffer in zip(ids, each, strict=False))
        return next((env_id for env_id in found if env_id is not None), None)

    def rows_of(self, selection: RowsOfArena, buffers: Where) -> list[Any]:
        """Return observations one by one, as `rows` does."""
        if self._are_rows_of_a_copy and type(buffers) is int and selection.is_slice:
            leaves = selection.arenas.get(buffers)  # the ordinary case, as in `batch`
            return list(self.batch(selection, buffers) if leaves is None else leaves[0].copy())
        return self.rows(selection.ids, selection.rows, buffers)

    def rows(self, ids: Sequence[int], rows: Rows, buffers: Where) -> list[Any]:
        """Return observations one by one.

        Args:
            ids: numbers of rows.
            rows: the same, as an index.
            buffers: the buffers that the observations are in.
        """
        leaves = [self._leaf_rows(j, ids, rows, buffers) for j in range(len(self._arrays))]
        if self._guard is not None:
            wrap, env_ids = self._guard.wrap, self._env_ids
            leaves = [
                [wrap([env_ids[i]], view) for i, view in zip(ids, leaf, strict=True)]
                for leaf in leaves
            ]
        if self._is_lone:
            return leaves[0]
        return list(map(self._unflatten, zip(*leaves, strict=True)))

    def _leaf_rows(self, j: int, ids: Sequence[int], rows: Rows, buffers: Where) -> list[Any]:
        if self._copies and not self._large[j]:
            batch = self._leaf_batch(j, rows, buffers)
            if self._pointlike[j]:
                return [batch[k, ...] for k in range(len(ids))]
            return list(batch)
        if isinstance(buffers, int) and isinstance(rows, slice) and not self._pointlike[j]:
            found = list(self._by_buffer[buffers][j][rows])
        else:
            each = [buffers] * len(ids) if isinstance(buffers, int) else buffers
            arena = self._arrays[j]
            if self._are_no_arrays[j]:
                return [arena[buffer, i] for buffer, i in zip(each, ids, strict=True)]
            found = [arena[buffer, i, ...] for buffer, i in zip(each, ids, strict=True)]
        return [view.copy() for view in found] if self._copies else found

    def batch(self, selection: RowsOfArena, buffers: Where) -> Any:
        """Return observations as one batch: per leaf (k, *shape), nested as the space.

        The batch is a view if nothing has to be copied and it is one slice of the arena; else it is
        a copy.

        Args:
            selection: the rows.
            buffers: the buffers that the observations are in.
        """
        rows = selection.rows
        if self._are_objects:
            return objects(self.rows(selection.ids, rows, buffers))
        if type(buffers) is int and selection.is_slice:
            leaves = selection.arenas.get(buffers)
            if leaves is None:
                leaves = [arena[rows] for arena in self._by_buffer[buffers]]
                selection.arenas[buffers] = leaves
            if self._copies and self._is_lone:
                return leaves[0].copy()
            copies = self._copies
            leaves = [leaf.copy() for leaf in leaves] if copies else self._shown(leaves, rows)
        elif self._is_lone:
            return self._leaf_batch(0, rows, buffers)
        else:
            leaves = [self._leaf_batch(j, rows, buffers) for j in range(len(self._arrays))]
        return leaves[0] if self._is_lone else self._unflatten(leaves)

    def maker(self, selection: RowsOfArena, buffer: int) -> Callable[[], Any]:
        """Return a function that makes what `batch` returns, by a single copy if that is enough."""
        leaves = selection.arenas.get(buffer)
        if leaves is not None and self._copies and self._is_lone:
            return leaves[0].copy
        return partial(self.batch, selection, buffer)

    def _shown(self, leaves: Sequence[Array], rows: slice) -> list[Array]:
        """Return views as they are handed out, and texts as copies that nobody else has."""
        env_ids, guard = self._env_ids[rows], self._guard
        return [
            leaf.copy() if is_text else leaf if guard is None else guard.wrap(env_ids, leaf)
            for leaf, is_text in zip(leaves, self._are_texts, strict=True)
        ]

    def _leaf_batch(self, j: int, rows: Rows, buffers: Where) -> Array:
        if not isinstance(buffers, int):
            ids = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            each = np.frombuffer(buffers, np.uint8).astype(np.intp)
            where = each * self._arrays[j].shape[1] + ids
            batch: Array = self._flat[j].take(where, axis=0)
            return batch
        arena: Array = self._by_buffer[buffers][j]
        if not isinstance(rows, slice):
            taken: Array = arena.take(rows, axis=0)
            return taken
        return arena[rows].copy() if self._copies else arena[rows]


class _Part(RowsToRead):
    """The part of several envs whose observations have the same layout."""

    def __init__(self, arena: Arena, positions: list[int], ids: list[int]) -> None:
        super().__init__(ids)
        self.arena = arena
        self.positions = positions


class Arenas:
    """The observations of envs of different layouts; as an `Arena` whose rows are the env_ids.

    Args:
        arena_of: the arena of each env, and its row there; None for those that are in none.
    """

    def __init__(self, arena_of: Sequence[tuple[Arena, int] | None]) -> None:
        self._arena_of = arena_of
        self._known: dict[tuple[int, ...], list[_Part]] = {}
        self.has_texts = any(entry is not None and entry[0].has_texts for entry in arena_of)

    def read_texts(self, ids: Sequence[int], buffers: Where) -> int | None:
        """Read the texts among observations; as `Arena.read_texts`."""
        for part in self._parts(ids):
            odd = part.arena.read_texts(part.ids, _buffers_of(part, buffers))
            if odd is not None:
                return odd
        return None

    def rows_of(self, selection: RowsOfArena, buffers: Where) -> list[Any]:
        """Return observations one by one."""
        return self.rows(selection.ids, selection.rows, buffers)

    def rows(self, ids: Sequence[int], rows: Rows, buffers: Where) -> list[Any]:
        """Return observations one by one; as `Arena.rows`."""
        found: list[Any] = [None] * len(ids)
        for part in self._parts(ids):
            of_part = part.arena.rows_of(part, _buffers_of(part, buffers))
            for position, observation in zip(part.positions, of_part, strict=True):
                found[position] = observation
        return found

    def batch(self, selection: RowsOfArena, buffers: Where) -> Any:
        """Return observations as one batch; None if they are of several layouts."""
        part, *others = self._parts(selection.ids)
        return None if others else part.arena.batch(part, buffers)

    def maker(self, selection: RowsOfArena, buffer: int) -> Callable[[], Any]:
        """Return a function that makes what `batch` returns, for envs of one layout."""
        (part,) = self._parts(selection.ids)
        return part.arena.maker(part, buffer)

    def _parts(self, ids: Sequence[int]) -> list[_Part]:
        key = tuple(ids)
        parts = self._known.get(key)
        if parts is None:
            if len(self._known) >= _KNOWN_PARTS:
                self._known.clear()
            parts = self._known[key] = self._made(key)
        return parts

    def _made(self, ids: tuple[int, ...]) -> list[_Part]:
        found: dict[Arena, tuple[list[int], list[int]]] = {}
        for position, env_id in enumerate(ids):
            entry = self._arena_of[env_id]
            if entry is None:
                raise RuntimeError(
                    f"env {env_id} has no arena: a defect of envmgr, please report it"
                )
            positions, rows = found.setdefault(entry[0], ([], []))
            positions.append(position)
            rows.append(entry[1])
        return [_Part(arena, positions, rows) for arena, (positions, rows) in found.items()]


def _buffers_of(part: _Part, buffers: Where) -> Where:
    if isinstance(buffers, int):
        return buffers
    return one_of(bytes([buffers[position] for position in part.positions]))


Guard = Callable[[Array], Array]
"""Wraps a view that is handed out."""


class ObservationReader:
    """The trainer's side: turns the reference in a reply into an observation, a copy or a view.

    Args:
        space: the observation space; None if unknown.

    Attributes:
        lost_step: see `spaces.agents.lost_step`.
        latest_step: the buffer of the newest observation of a step that is in use; -1 for none.
        latest_reset: likewise, of a reset.
    """

    def __init__(self, space: Any) -> None:
        self.lost_step = partial(lost_step, space)
        self._structure = codec_of(space).structure
        self._layout = self._structure.placed
        self._buffers = COPIED
        self.latest_step = self.latest_reset = -1
        self._found_at: list[tuple[Array, bool, TextReader | None]] | None = None
        self._copy = True
        self._guard: Guard | None = None

    @property
    def layout(self) -> Layout | None:
        """The layout of what goes to shared memory: all of it, or a part; None if nothing does."""
        return self._layout

    def attach(
        self,
        memory: Any,
        placement: Placement,
        *,
        copy_on_get: bool,
        guard: Guard | None = None,
    ) -> None:
        """Read from shared memory from now on.

        Args:
            memory: the buffer.
            placement: where this env's buffers are.
            copy_on_get: whether to copy observations; else views are handed out, which are valid
                through the env's next two steps.
            guard: wraps views that are handed out; None leaves them as they are.
        """
        self._guard = guard
        leaves = placement.layout.leaves if self._layout is None else self._layout.leaves
        self._buffers = placement.buffers
        buffers = buffer_arrays(memory, placement)
        # Indexing by a buffer alone makes a number, not an array, of what has shape ().
        plain = [leaf.is_number or leaf.shape != () for leaf in leaves]
        texts = [TextReader(leaf) if isinstance(leaf, TextLeaf) else None for leaf in leaves]
        self._found_at = list(zip(buffers, plain, texts, strict=True))
        self._copy = copy_on_get

    def read(self, reference: Any) -> Any:
        """Return the observation that `reference` names.

        Raises:
            ValueMismatchError: the reference is not one that a writer makes.
        """
        structure, layout = self._structure, self._layout
        lone = structure.lone if self._found_at is None else None
        if lone is not None and type(reference) is list and len(reference) == 1:
            return lone.from_bytes(reference[0])  # the ordinary case of a reply by message
        if layout is None:
            return reference
        if structure.is_fixed or (structure.is_placed and type(reference) is int):
            return structure.unflatten(self._leaves(reference))
        free = reference[1] if type(reference) is tuple and len(reference) == 2 else None
        if type(free) is not list or len(free) + len(structure.arrays) != len(structure.leaves):
            raise ValueMismatchError(f"{type(reference).__name__} is not a buffer with objects")
        if structure.is_placed and type(reference[0]) is not list:
            raise ValueMismatchError("there is no buffer for a part of it")
        return structure.join(self._leaves(reference[0]), free)

    def _leaves(self, reference: Any) -> list[Any]:
        """Return the leaves that are in a buffer, or the arrays that came in the reply itself."""
        if self._found_at is None or type(reference) is list:  # of what is not in the arena
            arrays = self._structure.arrays
            if not isinstance(reference, list) or len(reference) != len(arrays):
                raise ValueMismatchError(f"{type(reference).__name__} is not a list of leaves")
            return list(map(Leaf.from_bytes, arrays, reference))
        if type(reference) is not int or not 0 <= reference < self._buffers.count:
            shown = reference if type(reference) is int else f"a {type(reference).__name__}"
            raise ValueMismatchError(f"{shown} is not a buffer of 0..{self._buffers.count - 1}")
        self.note(reference)
        return [
            self._shown(buffers[reference] if plain else buffers[reference, ...], text)
            for buffers, plain, text in self._found_at
        ]

    def _shown(self, view: Any, text: TextReader | None) -> Any:
        """Return a leaf as it is handed out, given a view of where it is."""
        if text is not None:
            return text.read(view.data)
        if self._copy:
            return view.copy()
        return view if self._guard is None else self._guard(view)

    def note(self, buffer: int) -> None:
        """Remember that the newest observation of its kind is in `buffer`."""
        if buffer < self._buffers.steps:
            self.latest_step = buffer
        else:
            self.latest_reset = buffer

    def placed_anew(self, placement: Placement) -> Placement:
        """Return the placement for a new env: it goes on after the buffers that are in use."""
        buffers = placement.buffers
        step, reset = self.latest_step, self.latest_reset
        return replace(
            placement,
            step_buffer=placement.step_buffer if step < 0 else buffers.after(step),
            reset_buffer=placement.reset_buffer if reset < 0 else buffers.after(reset),
        )

    def detach(self) -> None:
        """Let go of the shared memory."""
        self._found_at = None


_NO_BUFFER = 255
_BYTES = [bytes((buffer,)) for buffer in range(BUFFER_BITS + 1)]


class Observed:
    """The newest observations of all envs, and of batches of them.

    Args:
        count: envs and spares.

    Attributes:
        buffers: how many buffers there are, of which kind.
        arena: where observations are in shared memory; None if they are only known one by one.
        counts: whether it matters which envs are sent actions.
    """

    def __init__(self, count: int) -> None:
        self.buffers = COPIED
        self.arena: Arena | Arenas | None = None
        self.counts = False
        self._readers: Sequence[ObservationReader] = ()
        self._guard: ViewGuard | None = None
        self._buffer_bytes = bytearray((_NO_BUFFER,)) * count
        self._buffer_of: npt.NDArray[np.uint8] = np.frombuffer(self._buffer_bytes, dtype=np.uint8)
        self._kept: list[Any] = [None] * count
        self._in_arena = bytearray(count)
        self._is_in_arena: npt.NDArray[np.uint8] = np.frombuffer(self._in_arena, dtype=np.uint8)
        self._none_in_arena = bytes(count)

    def open(self, readers: Sequence[ObservationReader], guard: ViewGuard | None = None) -> None:
        """Read what replies refer to, from now on.

        Args:
            readers: the reader of each env.
            guard: wraps views that are handed out; None leaves them.
        """
        self._readers = readers
        self._guard = guard
        self.counts = guard is not None

    @property
    def columns(self) -> dict[str, bytearray]:
        """The columns that say where the newest observations are, for C code that writes them."""
        return {"buffers": self._buffer_bytes, "in_arena": self._in_arena}

    def taken_in_c(self, selection: ObservedEnvs, found: Sequence[Any]) -> None:
        """As `taken_as_rows`, where C writes the columns."""
        self._kept[selection.rows] = found

    @property
    def is_open(self) -> bool:
        """Whether hosts may have been told where observations go."""
        return bool(self._readers)

    def lay_out(self, arena: Arena | Arenas, buffers: Buffers) -> None:
        """Read batches of observations from shared memory, from now on.

        Args:
            arena: where the observations are.
            buffers: how many buffers there are, of which kind.
        """
        self.arena = arena
        self.buffers = buffers

    # -- what is newest ---------------------------------------------------------------------

    def read(self, env_id: int, reference: Any) -> Any:
        """Return the observation that a reply by message refers to.

        Raises:
            ValueMismatchError: it refers to none.
        """
        if self._buffer_bytes[env_id] != _NO_BUFFER:
            self._note(env_id)
        return self._readers[env_id].read(reference)

    def lost_step(self, env_id: int, observation: Any) -> tuple[Any, Any, Any]:
        """Return reward, terminated and truncated of a step that an env has lost.

        Args:
            env_id: the env.
            observation: the newest observation that it has shown.
        """
        return self._readers[env_id].lost_step(observation)

    def keep(self, env_id: int, observation: Any) -> None:
        """Keep the newest observation of an env, in the form in which its user gets it."""
        self._kept[env_id] = observation
        self._in_arena[env_id] = 0
        self._buffer_bytes[env_id] = _NO_BUFFER

    def keep_each(self, timesteps: Mapping[int, EnvTimestep]) -> None:
        """Keep the observations of timesteps, as `keep` does, given the timesteps by env_id."""
        kept, in_arena, buffers = self._kept, self._in_arena, self._buffer_bytes
        for env_id, timestep in timesteps.items():
            kept[env_id] = timestep.obs
            in_arena[env_id] = 0
            buffers[env_id] = _NO_BUFFER

    def began(self, buffers: Mapping[int, int]) -> None:
        """Note that the newest observations are those of resets, in these buffers, by env_id."""
        readers, buffer_bytes, in_arena = self._readers, self._buffer_bytes, self._in_arena
        n_steps = self.buffers.steps
        for env_id, buffer in buffers.items():
            reader, before = readers[env_id], buffer_bytes[env_id]
            if before < n_steps:
                reader.latest_step = before  # its view may be in use
            reader.latest_reset = buffer  # now: the next to be read may be that of a step
            buffer_bytes[env_id] = buffer
            in_arena[env_id] = 1

    def misread(self, buffers: Mapping[int, int]) -> list[int]:
        """Read the texts among observations that are in these buffers, by env_id.

        Returns:
            The envs whose texts make no sense.
        """
        arena = self.arena
        if arena is None or not arena.has_texts:
            return []
        return [i for i, buffer in buffers.items() if arena.read_texts((i,), buffer) is not None]

    def _note(self, env_id: int) -> None:
        """Note that the newest observation of an env stays in use when there is a newer one."""
        buffer = self._buffer_bytes[env_id]
        if buffer != _NO_BUFFER:
            self._readers[env_id].note(buffer)

    def placed_anew(self, env_id: int, placement: Placement) -> Placement:
        """Return the placement for a new env: it goes on after the buffers that are in use."""
        self._note(env_id)
        return self._readers[env_id].placed_anew(placement)

    def retire(self, env_id: int) -> None:
        """Expect observations of an env in its replies from now on; the newest stays where it is.

        The buffer that holds it is used neither for the next observation nor for the one after
        that.
        """
        self.of((env_id,))
        self._buffer_bytes[env_id] = _NO_BUFFER  # what is written there now is nobody's
        self._readers[env_id].detach()

    def of(self, env_ids: Sequence[int]) -> list[Any]:
        """Return the newest observations of envs; each is the same object every time."""
        kept, in_arena = self._kept, self._in_arena
        if in_arena != self._none_in_arena:
            missing = [i for i in env_ids if in_arena[i]]
            if missing:
                self._fetch(missing)
        return [kept[i] for i in env_ids]

    def shown_again(self, env_id: int) -> Any:
        """Return the newest observation of an env once more, as an object of its own.

        If it came through shared memory, it is as the env gave it; else it is as its user has left
        it, and even the user's own object if that refuses to be copied, or there is no memory for a
        copy.

        Raises:
            MemoryError: there is not even memory to read it once.
        """
        if self._buffer_bytes[env_id] != _NO_BUFFER and self.arena is not None:
            (observation,) = self._read_rows([env_id])
        else:
            observation = self._kept[env_id]
        with contextlib.suppress(Exception):
            observation = copy.deepcopy(observation)
        return observation

    def _fetch(self, env_ids: list[int]) -> None:
        for env_id, observation in zip(env_ids, self._read_rows(env_ids), strict=True):
            self._kept[env_id] = observation
            self._in_arena[env_id] = 0

    def _read_rows(self, env_ids: list[int]) -> list[Any]:
        array, arena = np.array(env_ids, dtype=np.int64), self.arena
        if arena is None:
            raise RuntimeError("buffers without an arena: a defect of envmgr, please report it")
        return arena.rows(env_ids, array, self._buffer_of[array].tobytes())

    def taken_as_rows(self, selection: ObservedEnvs, buffers: Where, found: Sequence[Any]) -> None:
        """Note that newest observations are in `buffers`, and were handed out one by one."""
        each = _BYTES[buffers] * selection.count if isinstance(buffers, int) else buffers
        if selection.is_slice:
            self._buffer_bytes[selection.rows] = each
            self._kept[selection.rows] = found
            self._in_arena[selection.rows] = selection.stale
            return
        self._buffer_of[selection.rows] = np.frombuffer(each, np.uint8)
        for env_id, observation in zip(selection.ids, found, strict=True):
            self._kept[env_id] = observation
            self._in_arena[env_id] = 0

    def taken_as_batch(self, selection: ObservedEnvs, buffers: Where) -> None:
        """Note that newest observations are in `buffers`, and were handed out as a batch."""
        each = _BYTES[buffers] * selection.count if isinstance(buffers, int) else buffers
        if selection.is_slice:
            self._buffer_bytes[selection.rows] = each
            self._in_arena[selection.rows] = selection.fresh
        else:
            self._buffer_of[selection.rows] = np.frombuffer(each, np.uint8)
            self._is_in_arena[selection.rows] = 1

    # -- reading ----------------------------------------------------------------------------

    def newest_batch(self, selection: RowsOfArena) -> Any:
        """Return the newest observations of envs as one batch, as an arena does.

        The result is None if some of them did not come through shared memory.
        """
        buffers = self._buffer_of[selection.rows].tobytes()
        if self.arena is None or _NO_BUFFER in buffers:
            return None
        return self.arena.batch(selection, one_of(buffers))

    def counted(self, env_ids: Iterable[int], request: int) -> None:
        """Count an action sent to each of these envs; the same request counts once."""
        if self._guard is not None:
            self._guard.count(env_ids, request)

    def detach(self) -> None:
        """Let go of the shared memory, and of what was handed out of it."""
        for reader in self._readers:
            reader.detach()
        self.arena = None
        self._kept = [None] * len(self._kept)
        self._in_arena[:] = self._none_in_arena
