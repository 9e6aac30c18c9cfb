"""Interpreters that are started import nothing from the working directory by chance."""

from __future__ import annotations

import subprocess
import sys
import threading
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

from envmgr.interpreters import clean_children, command_of, command_of_main, path_line

TRAP = "raise SystemExit('json.py has run')\n"


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "json.py").write_text(TRAP)
    (tmp_path / "one_of_mine.py").write_text("def main(): print('main has run')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said_by(command: list[str], given: bytes = b"") -> bytes:
    ended = subprocess.run(command, input=given, capture_output=True, check=False)
    return ended.stdout + ended.stderr


def test_a_program_takes_no_module_from_there(trapped: Path) -> None:
    program = "import json; print(json.dumps([1]), sys.flags.optimize)"
    level = sys.flags.optimize + 1  # under `python -O`, too
    assert said_by(command_of(program, "-O")) == b"[1] %d\n" % level
    assert b"json.py has run" in said_by([sys.executable, "-c", program])  # it would


def test_a_main_is_found_by_the_path_of_this_process(
    trapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = command_of_main("one_of_mine")
    assert b"No module named 'one_of_mine'" in said_by(command, path_line())
    monkeypatch.setattr(sys, "path", [*sys.path, str(trapped), b"no text"])
    assert said_by(command, path_line()) == b"main has run\n"


def test_flags_of_this_interpreter_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "_args_from_interpreter_flags", lambda: ["-I", "-Wdefault"])
    said = said_by(command_of("print(sys.flags.isolated, sys.warnoptions)"))
    assert said == b"1 ['default']\n"


def test_of_multiprocessing_only_what_this_thread_starts_meanwhile_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(util, "spawnv_passfds", lambda path, args, fds: started.append(args) or 1)
    plain = [b"python", "-W", "default", "-c", "main()", "--multiprocessing-fork"]

    def start() -> Any:
        assert util.spawnv_passfds(b"python", plain, []) == 1
        return started.pop()

    with clean_children():
        with clean_children():
            pass
        *before, program, last = start()
        assert [*before, last] == [*plain[:-2], plain[-1]]
        assert program.startswith("import sys; sys.path[:] = ")
        assert program.endswith("; main()")
        other = threading.Thread(target=lambda: started.append(start()))
        other.start()
        other.join()
        assert started.pop() == plain
        assert util.spawnv_passfds(b"python", [b"python", "x.py"], []) == 1
        assert started.pop() == [b"python", "x.py"]
    assert start() == plain
