"""`copy_on_get: checked`: views of observations that refuse to be used after their time.

A view into shared memory is valid through its env's next two steps; after that it shows another
observation. These raise instead. They cost time: they are for finding such a mistake, not for runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from envmgr.errors import StaleViewError
from envmgr.spaces import rebuilt

STEPS = 2
"""Steps of its env that a view outlives."""


class ViewGuard:
    """Counts the steps of envs, and hands out views that know how old they are.

    Args:
        env_num: number of envs.
    """

    def __init__(self, env_num: int) -> None:
        self._sent = [(0, 0)] * env_num

    def count(self, env_ids: Iterable[int], request: int) -> None:
        """Each of these envs was sent an action; once, however often this is said of a request."""
        for env_id in env_ids:
            n, latest = self._sent[env_id]
            if request != latest:
                self._sent[env_id] = n + 1, request

    def wrap(self, env_ids: Sequence[int], view: Any) -> Any:
        """Return a view that raises when one of these envs has gone too far.

        Args:
            env_ids: the envs whose observations it shows.
            view: it; a number is returned as it is.
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
    """An array of no env's."""


def _plain(value: Any) -> Any:
    """Return a value with its checked views checked, as ordinary arrays."""
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
        check: raises StaleViewError if it is too old.
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
    """Return a method that is that of an ordinary array."""

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
# or they read the memory without a question.
for _name in (
    *(name for name in dir(np.ndarray) if name[0] != "_" and callable(getattr(np.ndarray, name))),
    *("__setitem__", "__contains__", "__repr__", "__str__", "__format__"),
    *("__float__", "__int__", "__index__", "__bool__", "__complex__"),
    *("__reduce__", "__copy__", "__deepcopy__", "__array__"),
):
    if _name not in _GIVE_VIEWS:
        setattr(CheckedView, _name, _of_plain(_name))
