"""What texts name that has to be there: pages, messages, docstrings, comments and configs."""

from __future__ import annotations

import ast
import builtins
import configparser
import functools
import importlib
import importlib.util
import itertools
import json
import keyword
import re
import shlex
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

import click
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envmgr.cli.commands import envmgr as commands
from envmgr.config.known_envs import KNOWN_PACKAGES
from envmgr.optional_packages import DISTRIBUTION
from tests.docs.blocks import ROOT

TRAINERS = frozenset(
    {"di-engine", "pufferlib", "stable-baselines3", "tianshou", "torch", "torchrl"}
)
"""What users have beside envmgr."""

_FOLDERS = ("benchmarks", "configs", "docs", "envmgr", "examples", "soak")
_COMMENT = re.compile(r"#.*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_MEMBER = re.compile(r"\bself\.(\w+)|\b(?:def|class) (\w+)|^ +(\w+)\s*[:=]", re.MULTILINE)
_ENDINGS = {".cfg", ".ipynb", ".md", ".py", ".toml", ".txt", ".yaml"}


def files() -> list[Path]:
    """Return every file whose words users or contributors read, but for the tests."""
    inside = [path for name in _FOLDERS for path in (ROOT / name).rglob("*")]
    found = [path for path in (*ROOT.iterdir(), *inside) if path.suffix in _ENDINGS]
    return sorted([ROOT / "Makefile", *found])


class Words(NamedTuple):
    """What a file says.

    Attributes:
        texts: all of it; of Python its comments and each string: neighbours are one, and have `{}`
            for what is filled in.
        imports: what it imports of envmgr, with dots.
        extras: what it gives functions as their argument `extra`.
        foreign: what it imports from elsewhere, by the names that it has for that.
        names: what its code calls things, and words of the strings in it that are not docstrings.
        classes: what its classes are made of.
        defined: what can be had of it as a module: what it defines, and what `__all__` lists.
    """

    texts: list[str]
    imports: list[str]
    extras: list[str]
    foreign: set[str]
    names: set[str]
    classes: list[Class]
    defined: set[str]


class Class(NamedTuple):
    """A class, as far as that is seen without running it.

    Attributes:
        name: its own.
        bases: the names of those that it derives from, without their modules.
        attributes: names that may be its attributes.
    """

    name: str
    bases: list[str]
    attributes: set[str]


@functools.cache
def words_of(path: Path) -> Words:
    """Return what a file says."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return _words_of_python(text)
    if path.suffix == ".ipynb":
        text = "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return Words([text], [], [], set(), set(), [], set())


def _words_of_python(text: str) -> Words:
    words = Words(["\n".join(_COMMENT.findall(text))], [], [], set(), set(), [], set())
    parts: set[int] = set()
    docstrings: set[int] = set()
    tree = ast.parse(text)
    for statement in tree.body:
        words.defined.update(_defined_by(statement))
    for node in ast.walk(tree):
        words.names.update(_names_of(node))
        if isinstance(node, ast.Expr):
            docstrings.add(id(node.value))
        elif isinstance(node, ast.ClassDef):
            words.classes.append(_class_of(node, text))
        elif isinstance(node, ast.JoinedStr):  # its parts come later
            parts.update(map(id, node.values))
            values = [str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values]
            words.texts.append("".join(values))
        elif isinstance(node, ast.Constant):
            if type(node.value) is str and id(node) not in parts:
                words.texts.append(node.value)
            if type(node.value) is str and id(node) not in docstrings:
                words.names.update(_WORD.findall(node.value))
        elif isinstance(node, ast.Import):
            words.imports.extend(one.name for one in node.names if _is_ours(one.name))
            others = (one for one in node.names if not _is_ours(one.name))
            words.foreign.update(one.asname or one.name.partition(".")[0] for one in others)
        elif isinstance(node, ast.ImportFrom):
            if _is_ours(node.module):
                words.imports.extend(f"{node.module}.{one.name}" for one in node.names)
            else:
                words.foreign.update(one.asname or one.name for one in node.names)
        elif isinstance(node, ast.keyword) and node.arg == "extra":
            given = [node.value] if isinstance(node.value, ast.Constant) else []
            words.extras.extend(str(one.value) for one in given)
    return words


def _names_of(node: ast.AST) -> list[str]:
    """Return the names in a node of code, without those below it."""
    if isinstance(node, ast.alias):
        return [*node.name.split("."), node.asname or ""]
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")
    field = _NAMED_IN.get(type(node))
    name = None if field is None else getattr(node, field)
    return [] if name is None else [name]


_NAMED_IN: dict[type[ast.AST], str] = {
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.keyword: "arg",
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
}


def _defined_by(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield statement.name
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        nodes = list(ast.walk(statement))
        names = [node.id for node in nodes if isinstance(node, ast.Name)]
        yield from names
        if "__all__" in names:
            yield from (node.value for node in nodes if isinstance(node, ast.Constant))


def _class_of(node: ast.ClassDef, text: str) -> Class:
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    names = [getattr(base, "attr", getattr(base, "id", "")) for base in bases]
    code = "\n".join(text.splitlines()[node.lineno : node.end_lineno])
    return Class(node.name, names, {name for match in _MEMBER.findall(code) for name in match})


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "envmgr"


# -- packages -----------------------------------------------------------------------------------

_PIP = re.compile(r"(?<![\w-])pip install (?P<what>[^`\n;()]+)")
_EXTRA = re.compile(r"\bextras? `(?P<name>[\w-]+)`|\b[Ii]nstall the extra (?P<bare>[a-z]+)\b")
_PIECE = re.compile(r"(?:\.|\benvmgr|\brl-env-manager)\[(?P<names>[a-z][\w,-]*)\]")


@functools.cache
def extras() -> dict[str, list[Requirement]]:
    """Return the extras of setup.cfg, and what each of them brings."""
    section = setup()["options.extras_require"]
    return {name: [Requirement(line) for line in lines(text)] for name, text in section.items()}


def lines(text: str) -> list[str]:
    """Return the lines of a text that say something."""
    stripped = (line.partition(" #")[0].strip() for line in text.splitlines())
    return [line for line in stripped if line and line[0] not in "#-"]


@functools.cache
def setup() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg", encoding="utf-8")
    return found


@functools.cache
def distributions() -> frozenset[str]:
    """Return what a text may have pip install: what a file for pip names, and trainers."""
    found = [one for some in extras().values() for one in some]
    found += [Requirement(line) for line in lines(setup()["options"]["install_requires"])]
    for path in (
        *ROOT.glob("benchmarks/requirements*"),
        *ROOT.glob("tests/trainers/requirements*"),
    ):
        found += [Requirement(line) for line in lines(path.read_text(encoding="utf-8"))]
    names = {canonicalize_name(one.name) for one in found}
    names |= {canonicalize_name(package.distribution) for package in KNOWN_PACKAGES}
    names.add(DISTRIBUTION)
    return frozenset(names | TRAINERS)


def extras_in(text: str) -> Iterator[str]:
    """Return the extras that a text names."""
    for match in _EXTRA.finditer(text):
        yield match["name"] or match["bare"]
    for match in _PIECE.finditer(text):
        yield from match["names"].split(",")


def unknown_extras(text: str) -> Iterator[str]:
    """Return the extras that a text names and that are not there."""
    yield from (f"the extra {name}" for name in extras_in(text) if name not in extras())


def unknown_packages(text: str) -> Iterator[str]:
    """Return what a text has pip install and should not."""
    for words in installed_in(text):
        try:
            check_pip(words)
        except AssertionError as error:
            yield str(error)


def installed_in(text: str) -> Iterator[list[str]]:
    """Return what each `pip install` of a text is to install."""
    for match in _PIP.finditer(text):
        try:
            yield shlex.split(match["what"], comments=True)
        except ValueError:  # the quote of the string that it is in
            yield match["what"].split()


def check_pip(words: list[str]) -> None:
    """Check what follows `pip install`, up to what is no requirement.

    Raises:
        AssertionError: it is not what a text of ours may have pip install.
    """
    for number, word in enumerate(words):
        word = word.rstrip(",.'\":")
        if number and words[number - 1] == "-r":
            assert (ROOT / word).is_file(), f"there is no {word!r}"
        if word.startswith("-") or (ROOT / word).is_file():
            continue
        local = re.fullmatch(r"\.?(?:\[(?P<extras>[\w,-]+)\])?", word)
        if local:
            assert set((local["extras"] or "dev").split(",")) <= set(extras()), f"no extra {word!r}"
            continue
        if "{" in word:  # filled in: those who fill it in are looked at by themselves
            continue
        try:
            requirement = Requirement(word)
        except InvalidRequirement:
            name = ""
        else:
            name = canonicalize_name(requirement.name)
            if name == DISTRIBUTION:
                assert requirement.extras <= set(extras()), f"no extra {word!r}"
        if number and name not in distributions() and not re.search(r"[<>=\[-]", word):
            return  # a word of the sentence
        assert name != "envmgr", "the envmgr on PyPI is another project"
        assert name in distributions(), f"pip install {word!r}: nothing of this project names that"


# -- commands ------------------------------------------------------------------------------------

_COMMAND = re.compile(r"(?<![\w./-])envmgr (?P<name>[a-z]+)\b(?P<rest>[^`\n]*)")
_CODE = re.compile(r"`{1,2}envmgr (?P<name>[a-z]+)\b")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_OPTION_FIRST = re.compile(r"`(?P<name>--[a-z][\w-]*)")
_MAKE = re.compile(r"`make (?P<words>[^`]+)`|^ {4,}make (?P<bare>.+)$", re.MULTILINE)


@functools.cache
def options_of(command: str) -> frozenset[str]:
    """Return the options of a command of `envmgr`."""
    parameters: list[click.Parameter] = commands.commands[command].params
    return frozenset(
        {"-h", "--help", *(o for p in parameters for o in (*p.opts, *p.secondary_opts))}
    )


@functools.cache
def options_of_scripts() -> frozenset[str]:
    """Return the options of the scripts of this repository, all of them."""
    scripts = [
        *ROOT.glob("benchmarks/**/*.py"),
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("docs/**/*.py"),
    ]
    scripts += [*ROOT.glob("soak/**/*.py"), *ROOT.glob("tests/trainers/*.py")]
    found = [text for path in scripts for text in words_of(path).texts if _OPTION.fullmatch(text)]
    return frozenset(found)


def unknown_commands(text: str) -> Iterator[str]:
    """Return what a text names as a command of `envmgr`, or an option, and that is none."""
    for match in _CODE.finditer(text):
        if match["name"] not in commands.commands:
            yield match[0]
    for match in _COMMAND.finditer(text):
        if match["name"] in commands.commands:
            known = options_of(match["name"])
            yield from (
                f"{match['name']} {option}"
                for option in _OPTION.findall(match["rest"])
                if option not in known
            )
    everything = options_of_scripts().union(*map(options_of, commands.commands), _OF_OTHERS)
    for match in _OPTION_FIRST.finditer(text):
        if match["name"] not in everything:
            yield match["name"]


_OF_OTHERS = frozenset({"--version", "--head", "--address", "--init", "--index-url"})
"""Options of `envmgr` without a command, of `ray start`, of `docker run`, and of pip."""


@functools.cache
def targets() -> frozenset[str]:
    """Return the targets of the Makefile, and its variables with a `=` behind them."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    variables = re.findall(r"^(\w+) \??=", makefile, re.MULTILINE)
    return frozenset((*phony.split(), *(f"{name}=" for name in variables)))


def unknown_targets(text: str) -> Iterator[str]:
    """Return what a text has `make` do that the Makefile does not know."""
    for match in _MAKE.finditer(text):
        for word in (match["words"] or match["bare"]).split():
            if not re.fullmatch(r"[a-z-]+|[A-Z_]+=.*", word):
                break  # the rest is not for make: a comment, or more of a value
            name, assigned, _ = word.partition("=")
            if name + assigned not in targets():
                yield f"make {word}"


# -- files and modules --------------------------------------------------------------------------

_PATH = re.compile(
    r"(?<![\w./<$-])(?:envmgr|tests|docs|configs|benchmarks|soak|examples)/[\w./-]*\w(?![\w*{])"
)
_DOTTED = re.compile(r"(?<![\w./@-])envmgr(?:\.[A-Za-z_]\w*)+(?![\w-])")

_OF_FILES = frozenset({".css"})


def unknown_paths(text: str) -> Iterator[str]:
    """Return paths of this repository that a text names, and that are not there.

    Of a numbered decision the number is enough.
    """
    for path in _PATH.findall(text):
        if not (ROOT / path).exists() and not any(ROOT.glob(f"{path}-*")):
            yield path


def unknown_names(text: str) -> Iterator[str]:
    """Return modules of envmgr, and names in these, that a text names and that are not there."""
    names = (name for name in _DOTTED.findall(text) if Path(name).suffix not in _OF_FILES)
    yield from (name for name in names if not is_there(name))


@functools.cache
def is_there(name: str) -> bool:
    """Return whether something of envmgr has this name; a trainer that it needs may be missing."""
    module, _, rest = name, "", ""
    while not (found := _source_of(module)):
        module, _, last = module.rpartition(".")
        rest = f"{last}.{rest}" if rest else last
    if not rest:
        return True
    try:
        thing = importlib.import_module(module)
    except ImportError:
        return rest in _bound_in(found)
    for part in rest.split("."):
        if not hasattr(thing, part):
            return part in getattr(thing, "__annotations__", {})
        thing = getattr(thing, part)
    return True


def _source_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py", path.with_suffix(".c"))
    return next((one for one in found if one.is_file()), None)


_CODE_NAME = re.compile(r"(?<!`)`(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\([^`\n]*\))?`(?!`)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

_OF_ELSEWHERE = frozenset(
    {
        *("AsyncCollector", "DependencyNotInstalled", "GymWrapper", "ParallelEnv"),
        *("AsyncGRPOTrainer", "GRPOTrainer", "create_app", "environment_factory"),
        *("O_ASYNC", "PR_SET_CHILD_SUBREAPER", "PR_SET_PDEATHSIG", "SCHED_BATCH", "nohup"),
        *("PyThreadState_SetAsyncExc", "basicConfig", "set_forkserver_preload"),
        *("BROWSER", "LD_PRELOAD", "PYTHONWARNINGS", "WANDB_MODE", "XLA_FLAGS"),
        *("minetest_dir", "py_executable", "savedir", "vzd_path", "xml_file"),
    }
)
"""Names that texts speak of, and that no code of ours has."""


def unknown_members(text: str) -> Iterator[str]:
    """Return `Class.name` and `module.Name` of a text whose class or module of envmgr has no such.

    A module that is not there at all counts, too, unless code imports one of that name.
    """
    for name in _code_names(text):
        parts = name.split(".")
        if parts[0] == "envmgr" or parts[0] in _foreign():  # of envmgr: `unknown_names`
            continue
        if not all(itertools.starmap(_may_have, itertools.pairwise(parts))):
            yield name


def unknown_words(text: str) -> Iterator[str]:
    """Return names of code in a text that no code has, whatever they stand for there."""
    for name in _code_names(text):
        parts = name.split(".")
        if name in ("_s", "n_"):  # what names end or begin with
            continue
        is_foreign = parts[0] in _foreign() or parts[0] in sys.stdlib_module_names
        if not is_foreign and not _names_in_code().issuperset(parts):
            yield name


def _code_names(text: str) -> Iterator[str]:
    names = (match["name"] for match in _CODE_NAME.finditer(_FENCED.sub("", text)))
    return (name for name in names if not (ROOT / name).exists())


def _may_have(owner: str, name: str) -> bool:
    """Return whether something has an attribute, as far as that can be told."""
    if owner in _classes():
        return name in _attributes_of(owner)
    if not owner.islower() or not name[:1].isupper():
        return True
    return name in _names_in_modules().get(owner, ())


@functools.cache
def _attributes_of(name: str) -> Container[str]:
    """Return the attributes of a class, of those that it derives from, and of those below it."""
    found: set[str] = set()
    ahead, seen = [name], set[str]()
    while ahead:
        one = ahead.pop()
        if one in seen or one in _PLAIN:
            continue
        seen.add(one)
        if one not in _classes():
            return _Anything()  # it derives from a class of others
        for cls in _classes()[one]:
            found |= cls.attributes
            ahead.extend(cls.bases)
    below = (cls for some in _classes().values() for cls in some if name in cls.bases)
    return found.union(*(cls.attributes for cls in below))


_PLAIN = frozenset({"ABC", "Generic", "Protocol", "object"})
"""Classes that give those below them no attributes that a text would name."""


class _Anything:
    def __contains__(self, name: object) -> bool:
        return True


@functools.cache
def _ours() -> list[tuple[Path, Words]]:
    return [(path, words_of(path)) for path in files() if path.suffix == ".py"]


@functools.cache
def _classes() -> dict[str, list[Class]]:
    """Return the classes of envmgr by their names."""
    found: dict[str, list[Class]] = {}
    for path, words in _ours():
        if path.is_relative_to(ROOT / "envmgr"):
            for one in words.classes:
                found.setdefault(one.name, []).append(one)
    return found


@functools.cache
def _names_in_modules() -> dict[str, set[str]]:
    """Return what is named in modules of envmgr, by the last part of the names of these."""
    found: dict[str, set[str]] = {}
    for path, words in _ours():
        name = path.parent.name if path.stem == "__init__" else path.stem
        found.setdefault(name, set()).update(words.defined)
    return found


@functools.cache
def _foreign() -> frozenset[str]:
    """Return what code imports from elsewhere, and what else no module of envmgr is meant by."""
    named = {"error", "gym", "package"}  # the first is gymnasium's, the last stands for any
    return frozenset(named.union(*(words.foreign for _, words in _ours())))


@functools.cache
def _names_in_code() -> frozenset[str]:
    """Return every name and word that occurs in code, configs and names of files."""
    found = {*dir(builtins), *keyword.kwlist, *sys.stdlib_module_names, *_OF_ELSEWHERE}.union(
        *(words.names for _, words in _ours())
    )
    others = (path for path in files() if path.suffix in (".cfg", ".toml", ".yaml", ""))
    for path in others:
        found.update(_WORD.findall(path.read_text(encoding="utf-8")))
    for folder in (*_FOLDERS, "tests"):
        paths = (ROOT / folder).rglob("*.py")
        found.update(
            part for path in paths for part in path.relative_to(ROOT).with_suffix("").parts
        )
    return frozenset(found)


def _bound_in(path: Path) -> set[str]:
    """Return the names that a module binds, as far as that is seen without running it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    names = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    aliases = (
        one for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names
    )
    return found.union(names, (one.asname or one.name for one in aliases))
