"""Each module of the core has its file of tests, and each such file its module."""

from __future__ import annotations

from pathlib import Path

import envmgr.core

PREFIX = "test_core_"
MODULES = {path.stem for path in Path(envmgr.core.__path__[0]).glob("[a-z]*.py")}
FILES = {path.stem.removeprefix(PREFIX) for path in Path(__file__).parent.glob(f"{PREFIX}*.py")}


def test_each_module_has_its_file() -> None:
    assert not MODULES - FILES


def test_each_file_is_about_a_module_or_a_part_of_one() -> None:
    of_modules = {n for n in FILES for m in MODULES if n == m or n.startswith(f"{m}_")}
    assert FILES - of_modules == {"files"}
