"""Changes values in the text of a YAML file; all else stays, comments too. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from envmgr.config.yaml_text import dump_yaml, load_yaml
from envmgr.errors import ConfigError

_Path = tuple[str, ...]


def edited(text: str, changes: Mapping[_Path, Any], notes: Mapping[_Path, str]) -> str:
    """Return a config's text with some values changed or added.

    Where the text cannot be edited so that it says just that (anchors, odd layouts), all of it is
    written anew, without its comments.

    Args:
        text: YAML that `load_config` reads.
        changes: new values by the path of their keys.
        notes: comments for changed lines, likewise.

    Raises:
        ConfigError: the text is not YAML of a mapping.
    """
    wanted = load_yaml(text, "the config")
    wanted = {} if wanted is None else wanted
    for path, value in changes.items():
        _set(wanted, path, value)
    found = text if text.endswith("\n") or not text else f"{text}\n"
    try:
        for path, value in changes.items():
            found = _with_value(found, path, value, notes.get(path, ""))
        if load_yaml(found, "the config") == wanted:
            return found
    except (ConfigError, yaml.YAMLError, KeyError):
        pass  # said below, in another way
    return "# Written anew: the comments of the file could not be kept.\n" + dump_yaml(wanted)


def _set(values: Any, path: _Path, value: Any) -> None:
    for part in path[:-1]:
        if values.get(part) is None:
            values[part] = {}
        values = values[part]
    values[path[-1]] = value


def _with_value(text: str, path: _Path, value: Any, note: str) -> str:
    """Return the text with one value changed, or added in the innermost mapping that is there."""
    node, depth = yaml.compose(text, Loader=yaml.SafeLoader), 0
    parent, key_node = None, None
    while depth < len(path) and isinstance(node, yaml.MappingNode):
        pair = next(((k, v) for k, v in node.value if k.value == path[depth]), None)
        if pair is None:
            break
        parent, (key_node, node), depth = node, pair, depth + 1
    if node is None:
        raise KeyError(path)
    if depth == len(path):
        line = node.start_mark.line if key_node is None else key_node.start_mark.line
        return _replaced(text, node, line, value, note)
    if not isinstance(node, yaml.MappingNode):  # `manager:` with nothing below it
        if parent is None or parent.flow_style or key_node is None or node.value:
            raise KeyError(path)
        indent = key_node.start_mark.column + 2
        line = node.end_mark.line
        return _inserted(text, line, line, indent, path[depth:], value, note)
    if node.flow_style:
        end = text.rindex("}", 0, node.end_mark.index)
        comma = ", " if node.value else ""
        return f"{text[:end]}{comma}{_flow(path[depth:], value)}{text[end:]}"
    last_key, last = node.value[-1]
    line = last.end_mark.line if last.end_mark.column == 0 else last.end_mark.line + 1
    lines = text.split("\n")
    while line - 1 > last_key.start_mark.line and lines[line - 1].partition("#")[0].strip() == "":
        line -= 1  # what stands before the next section belongs to that
    indent = node.value[0][0].start_mark.column
    first = 0 if key_node is None else key_node.start_mark.line
    return _inserted(text, first, line - 1, indent, path[depth:], value, note)


def _replaced(text: str, node: yaml.Node, line: int, value: Any, note: str) -> str:
    """Return the text with another value of the key in a line.

    The note stands behind the value, or above the key where the user has a comment behind it, which
    may go on in the next line.
    """
    begin, end = node.start_mark.index, node.end_mark.index
    after = text[end:]
    rest, newline, more = after.partition("\n")
    if note and not rest.strip():
        rest = f"  # {note}"
    elif note and rest.lstrip().startswith("#"):
        *above, own = text[:begin].split("\n")[: line + 1]
        indent = " " * (len(own) - len(own.lstrip()))
        begun = "\n".join([*above, f"{indent}# {note}", *text[:begin].split("\n")[line:]])
        return f"{begun}{_scalar(value)}{after}"
    return f"{text[:begin]}{_scalar(value)}{rest}{newline}{more}"


def _inserted(
    text: str, first: int, last: int, indent: int, path: _Path, value: Any, note: str
) -> str:
    """Return the text with lines for a path added to a mapping, by default behind its last line.

    If the key stands as a comment, in the mapping or behind it, the lines take that line's place.
    """
    lines = text.split("\n")
    new = [f"{' ' * (indent + 2 * k)}{part}:" for k, part in enumerate(path)]
    new[-1] += f" {_scalar(value)}" + (f"  # {note}" if note else "")
    is_key = re.compile(rf" {{{indent}}}# *{re.escape(path[0])}:( |$)").match
    for at in range(first, len(lines)):
        if at > last and lines[at].strip() and not lines[at].startswith(f"{' ' * indent}#"):
            break  # the comments behind the last key end here
        if is_key(lines[at]):
            return "\n".join([*lines[:at], *new, *lines[at + 1 :]])
    return "\n".join([*lines[: last + 1], *new, *lines[last + 1 :]])


def _flow(path: _Path, value: Any) -> str:
    head, *rest = path
    inner = _flow(tuple(rest), value) if rest else None
    return f"{head}: {{{inner}}}" if inner is not None else f"{head}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    """Return a value as YAML in one line."""
    text = dump_yaml({"value": value}) if not isinstance(value, (dict, list)) else ""
    if text:
        return text.partition(":")[2].strip()
    flow: str = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return flow.strip()
