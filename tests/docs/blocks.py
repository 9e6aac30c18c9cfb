"""Finds the fenced code blocks of a markdown page, and what the page says about running them.

A comment `<!-- example: ... -->` above a block is for the tests only, and does not show on the
rendered page. It holds marks, separated by commas:

* `continues`: the block goes on with the variables of the Python block before it.
* `file=NAME`: the block is a file of this name, which the other examples of the page find beside
  them.
* `raises=NAME`: the block ends with an exception of this class.
* `v2`: the block needs treetensor.
* `needs=MODULE`, `needs=MODULE>=VERSION`: the block needs a trainer, and runs where there is one.

A block of language `text` right after a Python block is exactly what that one prints.

The code cells of a notebook in docs/notebooks are one program; what is kept of their output is
exactly what they print.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MARKS = frozenset(("continues", "file", "needs", "raises", "v2"))

_FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[\w-]*)\s*$")
_COMMENT = re.compile(r"^<!-- example: (?P<marks>.+) -->$")


class PageError(ValueError):
    """A page has a block that the tests cannot make sense of."""


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        page: the file it is in.
        line: the number of its first line of code.
        language: what its fence says.
        text: its content, with a newline at the end of each line.
        marks: what the comment above it says.
    """

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


@dataclass
class Program:
    """Python blocks that run one after another with the same variables.

    Attributes:
        blocks: the first one, and those that continue it.
        outputs: what each of them prints, in the same order; None if the page does not say.
    """

    blocks: list[Block]
    outputs: list[str | None]

    def __str__(self) -> str:
        return str(self.blocks[0])

    @property
    def source(self) -> str:
        """The whole program, each line with the number that it has on the page."""
        lines: list[str] = []
        for block in self.blocks:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
        return "\n".join(lines) + "\n"


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page, in their order.

    Raises:
        PageError: a fence is not closed, or a mark is not known.
    """
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    found: list[Block] = []
    fence, first, marks = "", 0, {}
    language = ""
    for number, line in enumerate(lines, start=1):
        opening = _FENCE.match(line)
        if fence:
            if opening and opening["fence"] == fence and not opening["language"]:
                content = "".join(f"{one}\n" for one in lines[first - 1 : number - 1])
                found.append(Block(page, first, language, content, marks))
                fence, marks = "", {}
        elif opening:
            fence, language, first = opening["fence"], opening["language"], number + 1
        elif comment := _COMMENT.match(line):
            marks = _marks(comment["marks"], f"{page}:{number}")
        elif line.lstrip().startswith("```"):
            raise PageError(f"{page}:{number}: a fence with indentation or words behind it")
        elif line.strip() and marks:
            raise PageError(f"{page}:{number - 1}: no block follows the comment")
    if fence:
        raise PageError(f"{page}:{first - 1}: this block is not closed")
    return found


def _marks(text: str, where: str) -> dict[str, str]:
    marks = {}
    for mark in text.split(","):
        name, _, value = mark.strip().partition("=")
        if name not in MARKS:
            raise PageError(f"{where}: unknown mark {name!r}; known are {sorted(MARKS)}")
        marks[name] = value
    return marks


def programs_of(blocks: list[Block]) -> list[Program]:
    """Return the Python programs among the blocks of a page.

    Raises:
        PageError: a block continues nothing, or is an output of nothing.
    """
    programs: list[Program] = []
    before: Block | None = None
    for block in blocks:
        if block.language == "python" and "file" not in block.marks:
            if "continues" not in block.marks:
                programs.append(Program([block], [None]))
            elif programs:
                programs[-1].blocks.append(block)
                programs[-1].outputs.append(None)
            else:
                raise PageError(f"{block}: there is no block to continue")
        elif block.language == "text":
            if before is None or before.language != "python" or "file" in before.marks:
                raise PageError(f"{block}: there is no Python block that prints this")
            programs[-1].outputs[-1] = block.text
        before = block
    return programs


def program_of(notebook: Path, text: str | None = None) -> Program:
    """Return the code cells of a notebook."""
    text = notebook.read_text(encoding="utf-8") if text is None else text
    blocks: list[Block] = []
    outputs: list[str | None] = []
    for number, cell in enumerate(json.loads(text)["cells"], start=1):
        if cell["cell_type"] == "code":
            blocks.append(Block(notebook, number, "python", "".join(cell["source"])))
            shown = ["".join(output["text"]) for output in cell["outputs"]]
            outputs.append("".join(shown) if shown else None)
    return Program(blocks, outputs)


def notebooks() -> list[Path]:
    """Return every notebook."""
    return sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def pages() -> list[Path]:
    """Return every page that users read."""
    return [
        *(page for page in sorted(ROOT.glob("*.md")) if page.name != "CONTRIBUTING.md"),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
