"""Pickles that another process can read even if it lacks the script that this process runs.

cloudpickle takes along the functions and classes that a script defines, if the script runs as
`__main__`. In processes that `multiprocessing` has started by spawn or forkserver, it is another
module.
"""

from __future__ import annotations

import io
import sys
import threading
from collections import ChainMap
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle

from envmgr.interruptible import Lock, let_go, take

_OTHER_MAINS = ("__mp_main__", "<run_path>")
"""What the standard library calls a script that it runs, besides `__main__`: in children started by
spawn or forkserver, and in `runpy.run_path`. No other process can import these."""

_changing = threading.RLock()


def is_of_script(value: Any) -> bool:
    """Return whether a class or function is defined by a script rather than by a module."""
    return getattr(value, "__module__", None) in ("__main__", *_OTHER_MAINS)


def names_script(pickled: bytes) -> bool:
    """Return whether a pickle may refer to what a script defines, without containing it."""
    return b"_main__" in pickled or b"<run_path>" in pickled


_NO_FILE = "<dynamic-code>"
"""What cloudpickle 3.1.3 and later call the file of all code that they take along."""


def _reduced(code: CodeType) -> Any:
    """Reduce code as cloudpickle does, with the name of its file, which tracebacks show."""
    constructor, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return constructor, tuple(
        code.co_filename if isinstance(one, str) and one == _NO_FILE else one for one in arguments
    )


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler of cloudpickle's for which code keeps the name of its file.

    Args:
        file: where the pickle goes.
    """

    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduced}, cloudpickle.Pickler.dispatch_table
    )

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)


class _NotingPickler(Pickler):
    """A pickler that shows each object to `note`, and pickles it as usual."""

    def __init__(self, file: io.BytesIO, note: Callable[[Any], None]) -> None:
        super().__init__(file)
        self._note = note

    def persistent_id(self, value: Any) -> None:
        """Show an object, and return None, so that it is pickled by value."""
        self._note(value)


def dumps(value: Any, note: Callable[[Any], None] | None = None) -> bytes:
    """Return the pickle of a value, including what it needs of the script's definitions.

    Args:
        value: the value to pickle.
        note: called with each object that the pickle is made of, down to numbers and strings.

    Raises:
        Exception: whatever pickling raises.
    """
    there = [sys.modules[name] for name in _OTHER_MAINS if name in sys.modules]
    # `__mp_main__` is another name of `__main__`, in the first process.
    mains = [module for module in there if module.__name__ in _OTHER_MAINS]
    return _dumped_by_value(mains, value, note) if mains else _dumped(value, note)


def _dumped(value: Any, note: Callable[[Any], None] | None) -> bytes:
    file = io.BytesIO()
    (Pickler(file) if note is None else _NotingPickler(file, note)).dump(value)
    return file.getvalue()


def _dumped_by_value(
    modules: list[ModuleType], value: Any, note: Callable[[Any], None] | None
) -> bytes:
    """Have cloudpickle take along what these modules define, but not in pickles of other code."""
    held, registered = list[Lock](), list[ModuleType]()
    try:
        try:
            take(_changing, held)
            known = cloudpickle.list_registry_pickle_by_value()
            registered += [module for module in modules if module.__name__ not in known]
            for module in registered:
                cloudpickle.register_pickle_by_value(module)
            return _dumped(value, note)
        finally:
            _unregister(registered, held)
    except BaseException:
        _unregister(registered, held)  # if an interrupt has kept that from being done
        raise


def _unregister(modules: list[ModuleType], held: list[Lock]) -> None:
    if held:
        for module in modules:
            if module.__name__ in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(module)
    let_go(held)
