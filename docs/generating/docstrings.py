"""Docstrings as markdown, and tables."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example)(?:, .+)?:$")
_ITEM = re.compile(r"^(?P<name>\*{0,2}[\w, ]+): (?P<text>.+)$", re.DOTALL)


def described(thing: Any) -> str:
    """Return a Google-style docstring as markdown: its paragraphs, then its sections as lists."""
    parts = [""]
    heading = ""
    body: list[str] = []
    for line in [*(inspect.getdoc(thing) or "").splitlines(), "End:"]:
        opening = _SECTION.match(line)
        if not opening and line != "End:":
            body.append(line)
            continue
        text = textwrap.dedent("\n".join(body)).strip("\n")
        if text:
            parts.append(_SECTIONS[heading](text))
        heading, body = opening[1] if opening else "", []
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).strip() + "\n"


def _paragraphs(text: str) -> str:
    return text.replace("``", "`") + "\n"


def _items(text: str) -> list[tuple[str, str]]:
    """Return (name, text) of the entries of a section; continuation lines are joined."""
    joined = re.sub(r"\n\s+", " ", text)
    found = []
    for line in joined.splitlines():
        item = _ITEM.match(line)
        found.append((item["name"], item["text"]) if item else ("", line))
    return found


def _names(text: str) -> str:
    names = [name.strip().lstrip("*") for name in text.split(",")]
    return ", ".join(f"`{name}`" for name in names)


def listed(text: str) -> str:
    """Return the entries of a section as a list."""
    return "\n".join(
        f"- {_names(name)}: {what}" if name else f"- {what}" for name, what in _items(text)
    )


def _raised(text: str) -> str:
    lines = []
    for name, what in _items(text):
        lines.append(f"- Raises {_names(name)}: {what}" if name else f"- Raises {what}")
    return "\n".join(lines)


def _returned(text: str) -> str:
    text = re.sub(r"\s*\n\s*", " ", text)
    return "- Returns " + re.sub(r"^(A|An|The) ", lambda word: word[0].lower(), text)


def _session(text: str) -> str:
    return f"\n```pycon\n{text}\n```\n"


_SECTIONS: Mapping[str, Callable[[str], str]] = {
    "": _paragraphs,
    "Args": listed,
    "Attributes": listed,
    "Returns": _returned,
    "Raises": _raised,
    "Example": _session,
}


def call_of(function: Callable[..., Any], *, name: str | None = None, skip_self: bool) -> str:
    """Return how a function is called: its parameters with their defaults, without types."""
    parameters = list(inspect.signature(function).parameters.values())[1 if skip_self else 0 :]
    shown, keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            keyword_only = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            shown.append("*")
            keyword_only = True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        text = f"{prefix.get(parameter.kind, '')}{parameter.name}"
        if parameter.default is not parameter.empty:
            text += f"={parameter.default!r}"
        shown.append(text)
    return f"{name or function.__name__}({', '.join(shown)})"


def summary_of(thing: Any) -> str:
    """Return the first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def member_texts(module: Any, class_name: str) -> dict[str, str]:
    """Return the docstrings that follow the members of an enum in its source."""
    tree = ast.parse(inspect.getsource(module))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return {
                member.targets[0].id: " ".join(str(text.value.value).split())
                for member, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(member, ast.Assign)
                and isinstance(member.targets[0], ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            }
    raise LookupError(f"{module.__name__} has no class {class_name}")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
