"""Safe YAML within limits: reading configs that may come from anywhere, and writing them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import yaml

from envmgr.config.checks import show_value
from envmgr.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_NODES = 100_000
"""The most values of one document, each alias counted as all that it stands for."""
MAX_CHARACTERS = 4 << 20
"""The most characters of all its scalars, counted in the same way."""

MAX_DIGITS = 1000
"""The most characters of one number. In base 60 (`1:30:00`) reading one takes quadratic time."""

MAX_KEY = 1 << 31
"""Numbers that are keys have to be nearer to zero. The hashes of numbers are no secret: among
larger numbers, so many with the same hash can be found that a mapping of them takes minutes."""
MAX_TUPLE_KEYS = 100
"""The most keys of a mapping that may be tuples, for the same reason."""

_TUPLE_TAG = "tag:yaml.org,2002:python/tuple"
_FLOAT_TAG = "tag:yaml.org,2002:float"
_NUMBER_TAGS = ("tag:yaml.org,2002:int", _FLOAT_TAG)
_MERGE_TAG = "tag:yaml.org,2002:merge"

_NULL_OF_PYTHON = "None"

# YAML 1.1, which PyYAML follows, takes `1e3` and `2.5e-4` without a sign or a dot for strings.
_EXPONENT_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")

# What PyYAML's constructors raise for scalars that their tag does not fit, such as `!!int ""`.
_CONSTRUCTION_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)


def load_yaml(text: str, name: str) -> Any:
    """Return the value of a YAML document: dicts, lists, tuples and scalars, no other objects.

    Floats such as `1e3` are read as floats, `!!python/tuple` makes a tuple, other `!!python` tags
    are refused, and so are duplicate keys, more than one document and anything beyond the limits
    above.

    Args:
        text: the document; an empty one gives None.
        name: what to call it in messages.

    Raises:
        ConfigError: the document is refused; the message names `name`, line and column.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(
            f"{name} has {len(text)} characters, but a config may have at most {MAX_BYTES}. Leave "
            "data out of it and name a file instead."
        )
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{name}, {_position(text, error.position)}: {error.reason}. Save the file as UTF-8 "
            "text without control characters."
        ) from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{name}, {_describe(error)}") from None


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return `values` as YAML that `load_yaml` reads back equal within its limits, keys in order.

    Infinity is written `.inf`, None `null`, a tuple with its tag; numpy scalars become numbers.

    Raises:
        ConfigError: a value is of a type that YAML does not hold; the message names its key.
    """
    plain = _dumpable(values, "")
    return yaml.dump(
        plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )


class _Size(NamedTuple):
    """How large a node is, with every alias in it expanded."""

    n_nodes: int
    n_characters: int
    depth: int


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with limits while reading, and errors that say where they are.

    Documents are counted as they are composed, each alias as all that it stands for: nested aliases
    grow exponentially.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._n_nodes = 0
        self._sizes: dict[yaml.Node, _Size] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self._depth += 1
        self._n_nodes += 1
        self._check_size(_Size(self._n_nodes, 0, self._depth), event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and node not in self._sizes:
            if isinstance(event, yaml.AliasEvent):
                raise _refusal("an anchor that contains itself", node.start_mark)
            self._sizes[node] = size = self._size_of(node)
            self._check_size(size, node.start_mark)
        return node

    def _size_of(self, node: yaml.Node) -> _Size:
        if isinstance(node, yaml.ScalarNode):
            return _Size(1, len(node.value), 1)
        children = list(node.value)
        if isinstance(node, yaml.MappingNode):
            self._refuse_duplicates(node)
            children = [child for pair in node.value for child in pair]
        sizes = [self._sizes[child] for child in children]
        return _Size(
            1 + sum(size.n_nodes for size in sizes),
            sum(size.n_characters for size in sizes),
            1 + max((size.depth for size in sizes), default=0),
        )

    def _check_size(self, size: _Size, mark: Any) -> None:
        if size.depth > MAX_DEPTH:
            raise _refusal(f"nested more than {MAX_DEPTH} levels deep", mark)
        if size.n_nodes > MAX_NODES or size.n_characters > MAX_CHARACTERS:
            raise _refusal(
                f"too large with its aliases expanded (at most {MAX_NODES} values and "
                f"{MAX_CHARACTERS} characters are allowed)",
                mark,
            )

    def _refuse_duplicates(self, node: yaml.MappingNode) -> None:
        # This is done before construction, because merging (`<<`) rewrites the pairs, in which a
        # mapping's own key may then stand beside the merged one.
        seen, n_tuples = set(), 0
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                n_tuples += 1
                if n_tuples > MAX_TUPLE_KEYS:
                    problem = f"more than {MAX_TUPLE_KEYS} keys of a mapping are collections"
                    raise _refusal(problem, key_node.start_mark)
                continue
            is_merge = key_node.tag == _MERGE_TAG
            key = _MERGE_TAG if is_merge else self.construct_object(key_node)
            if not isinstance(key, Hashable):
                raise _refusal("found unhashable key", key_node.start_mark)
            if isinstance(key, (int, float)) and not abs(key) < MAX_KEY:
                problem = f"the key {show_value(key)} is a number beyond {MAX_KEY:,}: quote it"
                raise _refusal(problem, key_node.start_mark)
            if key in seen:
                raise _refusal(f"the key {key_node.value!r} occurs twice", key_node.start_mark)
            seen.add(key)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag in _NUMBER_TAGS and len(node.value) > MAX_DIGITS:
            problem = f"{show_value(node.value)} has more than {MAX_DIGITS} digits"
            raise _refusal(problem, node.start_mark)
        if node.value == _NULL_OF_PYTHON and isinstance(node, yaml.ScalarNode) and not node.style:
            problem = "None is a text in YAML, and so true: write null, or 'None' in quotes"
            raise _refusal(problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except _CONSTRUCTION_ERRORS as error:
            problem = f"{show_value(node.value)} does not fit its YAML type ({error})"
            raise _refusal(problem, node.start_mark) from error

    def construct_python_tuple(self, node: yaml.SequenceNode) -> tuple[Any, ...]:
        return tuple(self.construct_sequence(node, deep=True))


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_python_tuple(self, data: tuple[Any, ...]) -> yaml.Node:
        return self.represent_sequence(_TUPLE_TAG, data, flow_style=True)

    def represent_text(self, data: str) -> yaml.Node:
        # Unless they are escaped, PyYAML reads these Unicode line breaks back as spaces.
        breaks = any(char in data for char in "\x85\u2028\u2029")
        style = '"' if breaks or data == _NULL_OF_PYTHON else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Loader.add_constructor(_TUPLE_TAG, _Loader.construct_python_tuple)
_Dumper.add_representer(tuple, _Dumper.represent_python_tuple)
_Dumper.add_representer(str, _Dumper.represent_text)
# The dumper resolves as well, to know which strings it has to quote.
_Loader.add_implicit_resolver(_FLOAT_TAG, _EXPONENT_FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver(_FLOAT_TAG, _EXPONENT_FLOAT, list("-+.0123456789"))


def _refusal(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def _describe(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = f"{error.problem}"
    if error.context:
        begun = error.context_mark
        since = (
            f" (begun in line {begun.line + 1})"
            if begun and mark and begun.line < mark.line
            else ""
        )
        problem = f"{error.context}{since}: {problem}"
    if "'\\t'" in problem:
        problem += " (YAML is indented with spaces, not with tabs)"
    return f"{where}{problem}."


def _position(text: str, position: int) -> str:
    before = text[:position]
    return f"line {before.count(chr(10)) + 1}, column {position - before.rfind(chr(10))}"


def _dumpable(value: Any, path: str) -> Any:
    """Return `value` in the exact types that the dumper knows."""
    if isinstance(value, Mapping):
        return {
            _dumpable(key, path): _dumpable(item, f"{path}.{key}" if path else str(key))
            for key, item in dict(value).items()
        }
    if type(value) in (list, tuple):
        return type(value)(_dumpable(item, f"{path}[{i}]") for i, item in enumerate(value))
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, bytes, datetime.date)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return {_dumpable(item, path) for item in value}
    raise ConfigError(
        f"{path} is {show_value(value)} ({type(value).__name__}), which YAML cannot hold. Use "
        "numbers, strings, lists and mappings in configs that are to be written."
    )
