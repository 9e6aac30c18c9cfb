"""Which modules envs need, found without running any of their code.

The pickles of the factories name modules; those of the user's own are read for import statements,
as far as they lead to modules of installed distributions, which are what is found. Modules that the
pickles merely mention in a string count only if it is an id that gymnasium knows, or what a config
says of an env: so a config file can name nothing here that it may not name elsewhere.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import importlib.util
import io
import pickle
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType
from typing import Any

from gymnasium.envs.registration import registry

from envmgr.errors import ConfigError
from envmgr.worker.imported_modules import is_installed

_MOST_FILES = 100
"""How many files of the user's own are read at most."""

_MOST_NOTES = 20_000
"""How many objects of a pickle are looked at at most, and items of each container."""

_ENTRIES = ("envmgr.config.env_factories", "gymnasium.envs.registration")
"""Modules whose objects hold strings that name modules."""


def needed_modules(pickles: Iterable[bytes]) -> tuple[str, ...]:
    """Return the modules of installed distributions that pickled factories need.

    Args:
        pickles: by cloudpickle; never unpickled here.
    """
    reader = _Reader()
    for data in pickles:
        reader.read(data)
    return installed_among(reader.modules)


def listed_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that a list names, with `__main__` standing for what the script imports.

    Raises:
        ConfigError: there is no such module.
    """
    found: dict[str, None] = {}
    for name in names:
        if name == "__main__":
            path = getattr(sys.modules["__main__"], "__file__", None)
            found.update(dict.fromkeys(installed_among(_imports_of_file(path, "", loaded=True))))
        elif find_module(name) is None:
            looked_in = ", ".join(entry or "." for entry in sys.path)
            raise ConfigError(
                f"manager.preload names the module {name!r}, which is not there; looked in "
                f"{looked_in}. Nothing was started. Install it, or correct the name."
            )
        else:
            found[name] = None
    return tuple(found)


def installed_among(names: Iterable[str]) -> tuple[str, ...]:
    """Return the installed modules among these, and those that the user's own ones import."""
    queue, seen = deque(names), set[str]()
    found: dict[str, None] = {}
    n_files = 0
    while queue:
        name = queue.popleft()
        top = name.partition(".")[0]
        if name in seen or not top or top in sys.stdlib_module_names or top == "__main__":
            continue
        seen.add(name)
        spec = find_module(name)
        if spec is None:
            continue
        places = [spec.origin or "", *(spec.submodule_search_locations or ())]
        if any(is_installed(place) for place in places if place):
            found[name] = None
            continue
        queue.extend(_parents(name))
        n_files += 1
        if n_files <= _MOST_FILES:
            is_package = spec.submodule_search_locations is not None
            package = name if is_package else name.rpartition(".")[0]
            queue.extend(_imports_of_file(spec.origin, package, loaded=name in sys.modules))
    return tuple(found)


def find_module(name: str) -> ModuleSpec | None:
    """Return where a module is, without importing it or the packages that it is in."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
        for part in rest:
            if spec is None:
                return None
            top = f"{top}.{part}"
            spec = PathFinder.find_spec(top, list(spec.submodule_search_locations or ()))
    except Exception:  # a module without a spec, a namespace package in a package not yet imported
        return getattr(sys.modules.get(name), "__spec__", None)
    return spec


# -- pickles --------------------------------------------------------------------------------------


class _Enough(Exception):
    """A pickle has more objects than are worth looking at."""


class _Reader:
    """Collects the modules that pickles name.

    Attributes:
        modules: their names, in order.
    """

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self._seen: dict[int, Any] = {}

    def read(self, data: bytes) -> None:
        """Read a pickle, with a stand-in for all that it would import, make or call."""
        self._seen.clear()
        with contextlib.suppress(Exception):  # what cannot be read so names nothing
            _Unpickler(data, self).load()

    def name(self, module: str) -> None:
        """Note a module."""
        self.modules[module] = None

    def note(self, value: Any, *, is_entry: bool = False) -> None:
        """Note what a value names that an object is made of.

        Args:
            value: anything.
            is_entry: whether strings in it name modules.
        """
        if isinstance(value, str):
            self._note_string(value, is_entry)
        elif isinstance(value, CodeType):
            self._note_code(value)
        elif isinstance(value, (tuple, list, set, frozenset, dict)) and id(value) not in self._seen:
            self._seen[id(value)] = value
            if len(self._seen) > _MOST_NOTES:
                raise _Enough
            for item in list(value.values() if isinstance(value, dict) else value)[:_MOST_NOTES]:
                # What a config says of an env is not nested: its arguments are.
                self.note(item, is_entry=is_entry and isinstance(item, str))

    def _note_string(self, text: str, is_entry: bool) -> None:
        known = registry.get(text) or registry.get(text.rpartition(":")[2])
        if known is not None:
            entry = known.entry_point
            self.name(_module_in(entry) if isinstance(entry, str) else _module_of(entry))
        elif is_entry:
            for module in (_module_in(text), text):  # the second one, if it names nothing in it
                self.name(module)

    def _note_code(self, code: CodeType) -> None:
        """Note the import statements of a function, and of those in it."""
        if "environ" not in code.co_names:  # what it sets may be meant for what it imports
            level = attributes = None
            for instruction in dis.get_instructions(code):
                if instruction.opname == "IMPORT_NAME" and level == 0:
                    for name in _names_of(instruction.argval, attributes or ()):
                        self.name(name)
                elif instruction.opname != "EXTENDED_ARG":
                    level, attributes = attributes, instruction.argval
        self.note(code.co_consts)


def _module_in(entry: str) -> str:
    module, colon, _ = entry.partition(":")
    return module if colon else entry.rpartition(".")[0]


def _module_of(entry: Any) -> str:
    module = getattr(entry, "__module__", None)
    return module if isinstance(module, str) else ""


class _Unpickler(pickle.Unpickler):
    """Unpickles only plain values and code; everything that is named gets a stand-in."""

    def __init__(self, data: bytes, reader: _Reader) -> None:
        super().__init__(io.BytesIO(data))
        self._reader = reader
        self._stand_ins: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Note the module, and return something that can be called, filled and given a state."""
        known = self._stand_ins.get((module, name))
        if known is None:
            known = self._stand_ins[module, name] = self._stand_in(module, name)
        return known

    def _stand_in(self, module: str, name: str) -> Any:
        if module.startswith("cloudpickle"):
            if name == "subimport":
                return self._reader.name
            if name == "_builtin_type":
                return lambda kind: CodeType if kind == "CodeType" else _StandIn.of(self._note)
        else:
            self._reader.name(module)
        is_entry = module in _ENTRIES
        return _StandIn.of(lambda value: self._reader.note(value, is_entry=is_entry))

    def _note(self, value: Any) -> None:
        self._reader.note(value)


class _StandIn(type):
    """A class that stands for any class or function, and for all that those return."""

    note: Any

    @classmethod
    def of(cls, note: Any) -> Any:
        """Return one that passes on what it is given."""
        return cls("StandIn", (_StandInBase,), {"note": staticmethod(note)})

    def __setitem__(cls, key: Any, value: Any) -> None:
        cls.note([value])


class _StandInBase:
    note: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.note([*args, kwargs])
        return cls

    @classmethod
    def __setstate__(cls, state: Any) -> None:
        cls.note(state)

    @classmethod
    def append(cls, item: Any) -> None:
        cls.note([item])

    @classmethod
    def extend(cls, items: Any) -> None:
        cls.note(items)

    add = append


# -- sources --------------------------------------------------------------------------------------


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _imports_of_file(path: str | None, package: str, *, loaded: bool) -> list[str]:
    """Return what a file imports; nothing if it cannot be read, or is no Python source.

    Args:
        path: of the file.
        package: that its relative imports start from.
        loaded: whether this process has run it, and so has the environment variables that it sets.
    """
    if path is None or not path.endswith(".py"):
        return []
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    return [*_imports_of(tree, package, trusts=loaded)]


def _imports_of(node: ast.AST, package: str, *, trusts: bool) -> Iterator[str]:
    """Yield what is imported in and below a node of the source.

    Code that sets environment variables may mean them for what it imports then: that is left out,
    unless it has run already.
    """
    is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    if (is_function or (isinstance(node, ast.Module) and not trusts)) and _sets_variables(node):
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = "." * child.level + (child.module or "")
            with contextlib.suppress(ImportError):  # beyond the top
                base = importlib.util.resolve_name(module, package) if child.level else module
                yield from _names_of(base, [alias.name for alias in child.names])
        elif isinstance(child, ast.If) and _is_for_others(child.test):
            for statement in child.orelse:
                yield from _imports_of(ast.Module([statement], []), package, trusts=True)
        else:
            yield from _imports_of(child, package, trusts=trusts)


def _names_of(module: str, attributes: Iterable[str]) -> list[str]:
    """Return the modules of `from module import attributes`; not all of them need to be there."""
    return [module, *(f"{module}.{attribute}" for attribute in attributes if attribute != "*")]


def _is_for_others(test: ast.expr) -> bool:
    """Return whether a condition holds for type checkers only, or for the main script only."""
    names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    names |= {n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute)}
    return bool(names & {"TYPE_CHECKING", "__name__"})


def _sets_variables(node: ast.AST) -> bool:
    for item in ast.walk(node):
        if isinstance(item, ast.Subscript) and isinstance(item.ctx, (ast.Store, ast.Del)):
            target: ast.expr | None = item.value
        elif isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute):
            if item.func.attr == "putenv":
                return True
            changes = item.func.attr in ("setdefault", "update", "pop")
            target = item.func.value if changes else None
        else:
            continue
        if getattr(target, "attr", getattr(target, "id", None)) == "environ":
            return True
    return False
