"""What `envmgr list` and `envmgr show` print."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from envmgr.cli.texts import echo, print_table, wide_console
from envmgr.config.origins import Origin
from envmgr.config.yaml_text import dump_yaml
from envmgr.config_file import name_of
from envmgr.registry import ENV_MANAGER_REGISTRY

_MAX_COLUMN = 44
"""Comments are aligned, but not further right than this."""


def print_managers() -> None:
    """Print a table of all kinds of managers, and what is wrong with those that are unusable."""
    rows = []
    for key in ENV_MANAGER_REGISTRY.keys():  # noqa: SIM118 - no dict; its keys() loads entry points
        build = ENV_MANAGER_REGISTRY.get(key)
        name = getattr(build, "__name__", repr(build))
        about = (inspect.getdoc(build) or "").partition("\n")[0]
        rows.append((key, name, ENV_MANAGER_REGISTRY.source(key), about))
    print_table(wide_console(), ("key", "class", "source", "what it does"), rows)
    for problem in ENV_MANAGER_REGISTRY.problems().values():
        echo(f"envmgr: warning: {problem}", err=True)


def annotated_yaml(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> str:
    """Return a config as YAML with the origin of every value in a comment."""
    lines = list(_lines(values, origins, ()))
    widest = max((len(text) for text, origin in lines if origin), default=0)
    column = min(widest, _MAX_COLUMN)
    return "".join(
        f"{text:<{column}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines
    )


def _lines(
    values: Mapping[Any, Any], origins: Mapping[str, Origin], path: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield lines of YAML, each with the origin to be written behind it, or none."""
    indent = "  " * len(path)
    for key, value in dict(values).items():
        here = (*path, name_of(key))
        if isinstance(value, Mapping) and value:
            yield f"{indent}{dump_yaml({key: None}).rpartition(': null')[0]}:", ""
            yield from _lines(value, origins, here)
            continue
        first, *others = dump_yaml({key: value}).rstrip("\n").split("\n")
        origin = str(origins[".".join(here)])
        if others and not isinstance(value, (list, tuple)):  # a comment would end up in the string
            yield f"{indent}# {origin}:", ""
            origin = ""
        yield f"{indent}{first}", origin
        yield from ((f"{indent}{other}", "") for other in others)
