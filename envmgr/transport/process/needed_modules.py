"""Which modules envs need, found without running any of their code.

The pickles of the factories name modules. The user's own modules among these are read for import
statements, which are followed until they lead to modules of installed distributions: these are the
result. A string counts only if it is an id that gymnasium knows, or part of what a config says
about an env, so a config file can name nothing here that it may not name elsewhere.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import importlib.util
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from gymnasium.envs.registration import EnvSpec, WrapperSpec, registry

from envmgr import pickles
from envmgr.config.env_factories import ConfiguredEnv, ConfiguredWrapper
from envmgr.errors import ConfigError
from envmgr.worker.imported_modules import is_installed, spec_of

_MOST_FILES = 100
"""How many of the user's own files are read at most."""

_NAMELESS = frozenset((int, float, bool, bytes, tuple, list, dict, type(None)))
"""Types of values that by themselves name nothing; factories may hold millions of these."""


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
    """Return the installed modules among these, and those that the user's own modules import."""
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
        found: ModuleSpec | None = spec_of(sys.modules.get(name))
        return found
    return spec


# -- what is pickled ------------------------------------------------------------------------------


class NamedModules:
    """Collects the modules that factories name, while the factories are pickled.

    Attributes:
        names: the names of the modules, in order.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def note(self, value: Any) -> None:
        """Note what a pickled object names: a factory, or something that a factory refers to."""
        if type(value) in _NAMELESS:
            return
        with contextlib.suppress(Exception):  # objects of others may answer anything
            for name in _named_by(value):
                if isinstance(name, str) and not name.startswith("cloudpickle."):  # which pickles
                    self.names[name] = None


def _named_by(value: Any) -> Iterable[Any]:
    if isinstance(value, str):
        known = registry.get(value) or registry.get(value.rpartition(":")[2])
        return () if known is None else _entries_in(known)
    if isinstance(value, ModuleType):
        return (value.__name__,)
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return (value.__module__,) if _travels_by_name(value) else ()
    if isinstance(value, CodeType):
        return _imports_of_code(value)
    if isinstance(value, (EnvSpec, WrapperSpec, ConfiguredEnv, ConfiguredWrapper)):
        return _entries_in(value)
    return ()


def _travels_by_name(value: Any) -> bool:
    """Return whether a class or function is pickled as a name, and not with all that is in it."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value and not pickles.is_of_script(value)


def _entries_in(value: Any) -> Iterator[Any]:
    """Yield the modules that a registration, or the config of an env, names."""
    for name in ("entry_point", "source", "module", "path"):
        entry = getattr(value, name, None)
        if isinstance(entry, str):
            module, colon, _ = entry.partition(":")
            yield module
            if not colon:
                yield module.rpartition(".")[0]
        elif callable(entry):
            yield getattr(entry, "__module__", None)


def _imports_of_code(code: CodeType) -> Iterator[str]:
    """Yield what the import statements of a function import; not those of functions in it."""
    if "environ" in code.co_names:  # what it sets may be meant for what it imports
        return
    level = attributes = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME" and level == 0:
            yield from _names_of(instruction.argval, attributes or ())
        elif instruction.opname != "EXTENDED_ARG":
            level, attributes = attributes, instruction.argval


# -- sources --------------------------------------------------------------------------------------


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _imports_of_file(path: str | None, package: str, *, loaded: bool) -> list[str]:
    """Return what a file imports; nothing if it cannot be read, or is no Python source.

    Args:
        path: the path of the file.
        package: the package that its relative imports start from.
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

    Code that sets environment variables may mean them for what it then imports: these imports are
    left out, unless the code has already run.
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
    """Return the modules of `from module import attributes`; not all of them need to exist."""
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
