"""Every example of the README and of docs/ works as it stands there."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import envmgr
from envmgr import load_config
from envmgr.cli import main
from envmgr.config.allow_list import Allowed, allowed_by_user
from envmgr.errors import EnvManagerError
from tests.docs import named, typed
from tests.docs.blocks import (
    ROOT,
    Block,
    PageError,
    Program,
    blocks_of,
    notebooks,
    pages,
    program_of,
    programs_of,
)

BLOCKS = {page: blocks_of(page) for page in pages()}
README = ROOT / "README.md"
SCRIPTS = programs_of(BLOCKS[README])
PROGRAMS = [p for page, blocks in BLOCKS.items() if page != README for p in programs_of(blocks)]
N_PYTHON_FILES = sum(
    block.language == "python" and "file" in block.marks
    for blocks in BLOCKS.values()
    for block in blocks
)
STEPS = 40
"""How many steps the commands on the pages run here, whatever the pages say."""
MOST_AUDITED_PER_S = 50_000
"""How many steps of CartPole `envmgr chaos` takes in a second, on a fast machine."""


IMPORT_TORCH = ("stable_baselines3", "tianshou", "torch", "torchrl", "tree")
"""What imports PyTorch; `tree` comes with RLlib, whose own module comes with Ray."""


def _params(things: list[Any]) -> list[Any]:
    return [pytest.param(thing, id=str(thing), marks=[*_needs(thing)]) for thing in things]


def _needs(thing: Any) -> Iterator[pytest.MarkDecorator]:
    for block in thing.blocks if isinstance(thing, Program) else [thing]:
        if "v2" in block.marks:
            yield pytest.mark.v2
        trainer = block.marks.get("needs")
        if trainer is not None:
            if trainer.partition(">=")[0] in IMPORT_TORCH:
                yield pytest.mark.torch
            yield pytest.mark.skipif(not _is_installed(trainer), reason=f"{trainer} is not there")


def _is_installed(requirement: str) -> bool:
    name, _, at_least = requirement.partition(">=")
    if importlib.util.find_spec(name) is None:
        return False
    return not at_least or Version(metadata.version(name)) >= Version(at_least)


def _of_language(*languages: str) -> list[Block]:
    return [block for blocks in BLOCKS.values() for block in blocks if block.language in languages]


def go_to(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Have this process be as one that was started in a folder, for whatever test."""
    patch.chdir(folder)
    patch.setattr(sys, "path", [str(folder), *sys.path])
    patch.delenv("PYTEST_CURRENT_TEST", raising=False)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of all examples, with a manager that is open beside theirs.

    So they share a worker server, and need not start one each: it takes longer than most of them.
    """
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        go_to(folder, patch)
        manager = envmgr.make("CartPole-v1", 1)
        manager.launch()
    with manager:
        yield folder


@pytest.fixture
def folder(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of an example, empty; modules found in it are forgotten afterwards."""
    go_to(shared_folder, monkeypatch)
    known = set(sys.modules)
    yield shared_folder
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(shared_folder)):
            del sys.modules[name]
    importlib.invalidate_caches()
    for path in shared_folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_files(page: Path, folder: Path) -> None:
    """Put the files that a page shows where its examples find them."""
    for block in BLOCKS[page]:
        if "file" in block.marks:
            path = folder / block.marks["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")


def run_program(program: Program, page: Path) -> None:
    """Run the blocks of a program and compare what they print.

    Raises:
        AssertionError: a block prints something else, or does not raise what its page says.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block, expected in zip(program.blocks, program.outputs, strict=True):
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
        printed = io.StringIO()
        raised = None
        with contextlib.redirect_stdout(printed):
            try:
                exec(code, namespace)  # noqa: S102 - this is what the pages are for
            except Exception as error:
                if type(error).__name__ != block.marks.get("raises"):
                    raise
                raised = error
        if "raises" in block.marks:
            assert raised is not None, f"{block} does not raise {block.marks['raises']}"
        if expected is not None:
            assert printed.getvalue() == expected, f"{block} prints something else"


@pytest.mark.parametrize("program", _params(PROGRAMS))
def test_a_python_example_runs(program: Program, folder: Path) -> None:
    page = program.blocks[0].page
    write_files(page, folder)
    run_program(program, page)


@pytest.mark.parametrize("notebook", notebooks(), ids=lambda notebook: notebook.stem)
def test_a_notebook_runs(notebook: Path, folder: Path) -> None:
    run_program(program_of(notebook), notebook)


@pytest.mark.parametrize("program", _params(SCRIPTS))
def test_an_example_of_the_readme_is_a_whole_script(program: Program, folder: Path) -> None:
    """Without a `__main__` guard, although its envs run in processes."""
    write_files(program.blocks[0].page, folder)
    (folder / "script.py").write_text(program.source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    if any(output is not None for output in program.outputs):
        assert done.stdout == "".join(output or "" for output in program.outputs)


@pytest.mark.parametrize("block", _params(_of_language("yaml")))
def test_a_config_loads(block: Block, folder: Path) -> None:
    write_files(block.page, folder)
    file = folder / block.marks.get("file", "config.yaml")
    file.write_text(block.text, encoding="utf-8")
    try:
        load_config(file)
    except EnvManagerError as error:
        if type(error).__name__ != block.marks.get("raises"):
            raise
    else:
        assert "raises" not in block.marks, f"{block} is not refused"


@pytest.mark.parametrize("block", _params(_of_language("toml")))
def test_a_project_file_allows_something(block: Block, folder: Path) -> None:
    (folder / "pyproject.toml").write_text(block.text, encoding="utf-8")
    assert allowed_by_user(folder / "configs") != Allowed()


@pytest.mark.parametrize("block", _params(_of_language("pycon")))
def test_a_session_gives_what_it_shows(block: Block, folder: Path) -> None:
    public = {name: getattr(envmgr, name) for name in envmgr.__all__}
    test = doctest.DocTestParser().get_doctest(block.text, public, str(block), str(block.page), 0)
    report = io.StringIO()
    doctest.DocTestRunner(verbose=False).run(test, out=report.write)
    assert not report.getvalue()


@pytest.mark.parametrize("block", _params(_of_language("sh")))
def test_a_command_works(block: Block, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(block.page, folder)
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "examples").symlink_to(ROOT / "examples")
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            run_command(words, folder)


MAKES_VENV = shlex.split("python -m venv .venv && . .venv/bin/activate")
"""The one line that stands for itself."""


def run_command(words: list[str], folder: Path) -> None:
    """Run or check one line of a shell example.

    Raises:
        AssertionError: it fails, or nobody here knows what to do with it.
    """
    program, *arguments = words
    if program == "envmgr":
        if "--resume" in arguments:
            _cut_off(Path(arguments[arguments.index("--resume") + 1]))
        assert main(_shortened(arguments)) == 0
    elif program == "make":
        check_make(arguments)
    elif program == "pip":
        check_pip(arguments)
    elif program == "python":
        if words != MAKES_VENV:
            check_script(arguments)
    elif program == "cd":
        assert len(arguments) == 1
    else:
        raise AssertionError(f"nothing here runs or checks {program!r}")


def _cut_off(run: Path) -> None:
    """Make the folder of a run look as if it had been killed in the middle of a line."""
    (run / "summary.json").unlink()
    episodes = run / "episodes.jsonl"
    episodes.write_bytes(episodes.read_bytes()[:-10])


def _shortened(arguments: list[str]) -> list[str]:
    """Return the arguments of `envmgr` with a small number of steps instead of a large one."""
    if arguments[:1] == ["check"]:
        return [*arguments, "--episodes", "2", "--methods", ""]
    if arguments[:1] == ["bench"]:
        return [*arguments, "--laps", "1", "--seconds", "0.02", "--set", "manager.env_num=2"]
    if arguments[:1] == ["tune"]:
        fewer = ["--set", "manager.env_num=2", "--kinds", "subprocess"]
        return [*arguments, "--seconds", "0.5", *fewer]
    if arguments[:1] not in (["run"], ["chaos"]) or "--resume" in arguments:
        return arguments
    if arguments[0] == "chaos":
        given = {"--rate": "1", **dict(itertools.pairwise(arguments))}
        n_injuries = int(given["--steps"]) * float(given["--rate"]) / MOST_AUDITED_PER_S
        assert n_injuries >= 1, "it ends before a worker is hurt"
    shortened = list(arguments)
    for option, number in (("--steps", str(STEPS)), ("--episodes", "2")):
        if option in shortened:
            shortened[shortened.index(option) + 1] = number
            return shortened
    return [*shortened, "--steps", str(STEPS)]


def check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for argument in arguments:
        name, assigned, _ = argument.partition("=")
        pattern = rf"^{name} \??= " if assigned else rf"^{name}:"
        assert re.search(pattern, makefile, re.MULTILINE), f"the Makefile has no {name}"


def check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    named.check_pip(arguments[1:])


def check_script(arguments: list[str]) -> None:
    script = ROOT / arguments[0]
    assert script.is_file(), f"there is no {arguments[0]}"
    if len(arguments) > 1:
        shown = subprocess.run(
            [sys.executable, str(script), "--help"], capture_output=True, text=True, check=True
        )
        for option in arguments[1:]:
            if option.startswith("-"):
                assert option in shown.stdout


def test_the_types_of_every_example_are_checked() -> None:
    modules = typed.modules()
    with_mistakes = len(PROGRAMS) + len(SCRIPTS) + len(notebooks()) + N_PYTHON_FILES + 1
    assert len(modules) == with_mistakes
    assert all(compile(source, name, "exec") for name, source in modules.items())
    lines = modules[f"README_{SCRIPTS[0].blocks[0].line}"].splitlines()
    assert lines[SCRIPTS[0].blocks[0].line - 1] == SCRIPTS[0].blocks[0].text.splitlines()[0]


def test_every_block_is_of_a_language_that_is_tested() -> None:
    tested = {"python", "yaml", "sh", "pycon", "text", "toml"}
    untested = {"mermaid"}  # a diagram
    found = {block.language for blocks in BLOCKS.values() for block in blocks}
    assert found <= tested | untested


# -- the tests of the tests -------------------------------------------------------------------


def _page(*lines: str) -> list[Block]:
    return blocks_of(ROOT / "docs" / "page.md", "\n".join(lines))


def _run(*lines: str) -> None:
    for program in programs_of(_page(*lines)):
        run_program(program, ROOT / "docs" / "page.md")


def test_a_block_that_continues_another_sees_its_variables() -> None:
    _run("```python", "a = 1", "```", "<!-- example: continues -->", "```python", "a + 1", "```")
    with pytest.raises(NameError):
        _run("```python", "b = 1", "```", "```python", "b + 1", "```")


def test_a_block_that_fails_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        _run("```python", "1 / 0", "```")
    with pytest.raises(AssertionError, match="does not raise"):
        _run("<!-- example: raises=ValueError -->", "```python", "1", "```")
    with pytest.raises(ZeroDivisionError):
        _run("<!-- example: raises=ValueError -->", "```python", "1 / 0", "```")


def test_what_a_block_prints_is_compared() -> None:
    _run("```python", "print(1)", "```", "", "```text", "1", "```")
    with pytest.raises(AssertionError, match="prints something else"):
        _run("```python", "print(2)", "```", "```text", "1", "```")


def test_a_notebook_is_a_program() -> None:
    stream = {"output_type": "stream", "name": "stdout", "text": ["1\n"]}
    cells = [
        {"cell_type": "code", "source": ["a = 1\n", "b = 2"], "outputs": []},
        {"cell_type": "markdown", "source": ["words"]},
        {"cell_type": "code", "source": ["print(a)"], "outputs": [stream]},
    ]
    notebook = ROOT / "docs" / "notebooks" / "one.ipynb"
    program = program_of(notebook, json.dumps({"cells": cells}))
    assert [block.line for block in program.blocks] == [1, 3]
    run_program(program, notebook)
    program.outputs[1] = "2\n"
    with pytest.raises(AssertionError, match="prints something else"):
        run_program(program, notebook)


def test_line_numbers_are_those_of_the_page() -> None:
    (program,) = programs_of(_page("", "```python", "a = 1", "```"))
    assert program.source.splitlines().index("a = 1") + 1 == program.blocks[0].line == 3


@pytest.mark.parametrize(
    "lines",
    [
        ("```python", "a = 1"),
        ("<!-- example: continue -->", "```python", "```"),
        ("<!-- example: v2 -->", "words", "```python", "```"),
        ("<!-- example: continues -->", "```python", "```"),
        ("```sh", "```", "```text", "```"),
    ],
)
def test_a_page_with_a_mistake_is_refused(lines: tuple[str, ...]) -> None:
    with pytest.raises(PageError):
        programs_of(_page(*lines))


def test_an_unknown_command_is_refused(tmp_path: Path) -> None:
    for line in (
        "wget x",
        "make nothing",
        "pip install other",
        "python docs/nothing.py",
        "python -m venv x",
    ):
        with pytest.raises(AssertionError):
            run_command(shlex.split(line), tmp_path)
