"""Checks the types of all Python of README, guides and notebooks, as users' checkers would.

    python -m tests.docs.typed

It is part of `make lint`. The examples are modules of a package `pages` in build/, so that mypy and
basedpyright, in its mode `standard`, have one run for all of them. What functions of an example
leave without types is so by intent; what envmgr says of its own types has to fit them all the same.
What they have to find is in `mistakes.py`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.blocks import ROOT, Block, blocks_of, notebooks, pages, program_of, programs_of

FOLDER = ROOT / "build" / "typed" / "pages"
MISTAKES = Path(__file__).with_name("mistakes.py")

_PYRIGHT = {
    "include": [FOLDER.name],
    "extraPaths": [str(ROOT)],
    "typeCheckingMode": "standard",
    # Trainers and optional packages, of which not all are there.
    "reportMissingImports": False,
    "reportMissingModuleSource": False,
    # A loop over `range(50)` is run.
    "reportPossiblyUnboundVariable": False,
    # What was to be a mistake is none.
    "reportUnnecessaryTypeIgnoreComment": True,
    "enableTypeIgnoreComments": False,
}


def modules() -> dict[str, str]:
    """Return the Python of all pages, by the names of modules; lines are those of the page."""
    found: dict[str, str] = {}
    for page in pages():
        blocks = blocks_of(page)
        programs = [(p.blocks[0], p.source) for p in programs_of(blocks)]
        files = [b for b in blocks if b.language == "python" and "file" in b.marks]
        programs += [(block, "\n" * (block.line - 1) + block.text) for block in files]
        found.update((_module(block), source) for block, source in programs)
    for notebook in notebooks():
        blocks = program_of(notebook).blocks
        found[_module(blocks[0])] = "\n".join(block.text for block in blocks)
    found["mistakes"] = MISTAKES.read_text(encoding="utf-8")
    return found


def _module(block: Block) -> str:
    path = block.page.relative_to(ROOT).with_suffix("").as_posix()
    return re.sub(r"\W", "_", f"{path}_{block.line}")


def write(folder: Path) -> None:
    """Write the modules; those that are as they were are left alone, for the checkers' caches."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {f"{name}.py": text for name, text in modules().items()}
    for path in folder.iterdir():
        if path.name not in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, text in found.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    config = folder.parent / "pyrightconfig.json"
    config.write_text(json.dumps(_PYRIGHT, indent=2), encoding="utf-8")


def main() -> int:
    """Check all of them; return the exit code."""
    write(FOLDER)
    programs = Path(sys.executable).parent
    # envmgr is named, too: so its modules are those that mypy has in its cache from checking them.
    mypy = [str(programs / "mypy"), "--explicit-package-bases", "envmgr", str(FOLDER)]
    pyright = [str(programs / "basedpyright"), "--project", str(FOLDER.parent)]
    pyright += ["--pythonpath", sys.executable]
    codes = [
        subprocess.run(command, cwd=ROOT, check=False).returncode for command in (mypy, pyright)
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
