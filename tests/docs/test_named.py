"""Every extra, package, command, option, file, module, import and member that is named is there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import envmgr
from envmgr.optional_packages import DISTRIBUTION
from tests.docs import named
from tests.docs.blocks import ROOT

FILES = named.files()

# The files that its figures speak of were there when they were measured.
_OF_THEIR_TIME = {ROOT / "docs" / "reliability.md"}
# These speak of what trainers, envs and the system have.
_OF_OTHERS = [
    ROOT / "docs" / "guide",
    ROOT / "envmgr" / "config",
    ROOT / "configs",
    *(ROOT / name for name in ("benchmarks", "examples", "soak")),
]
# It says that this installs another project.
_WARNING = "`pip install envmgr` | that is another project"


def _missing(path: Path) -> Iterator[str]:
    words = named.words_of(path)
    is_ours = not any(map(path.is_relative_to, _OF_OTHERS))
    for text in words.texts:
        yield from named.unknown_extras(text)
        yield from named.unknown_packages(text.replace(_WARNING, ""))
        yield from named.unknown_commands(text)
        yield from named.unknown_targets(text)
        yield from named.unknown_names(text)
        if path != ROOT / "CHANGELOG.md":
            yield from named.unknown_members(text)
            yield from named.unknown_words(text) if is_ours else ()
        if path not in _OF_THEIR_TIME:
            yield from named.unknown_paths(text)
    yield from (name for name in words.imports if not named.is_there(name))
    yield from (f"the extra {name}" for name in words.extras if not named.extras().get(name))


def test_what_is_named_is_there() -> None:
    """One test, as reading and parsing all files is what takes the time."""
    missing = {str(path.relative_to(ROOT)): found for path in FILES if (found := [*_missing(path)])}
    assert missing == {}
    words = [named.words_of(path) for path in FILES]
    texts = [text for one in words for text in one.texts]
    assert {"metrics", "ray", "video"} <= {name for one in words for name in one.extras}
    assert sum(len(one.imports) for one in words) > 500
    assert len([*itertools.chain.from_iterable(map(named.extras_in, texts))]) > 20
    assert len([*itertools.chain.from_iterable(map(named.installed_in, texts))]) > 20


_NOT_FOR_PIP = (
    "envmgr",
    "'rl-env-manager[nothing]'",
    "'envmgr[ray]'",
    ". nothing==1",
    "nothing",
    "-r nothing.txt",
)


@pytest.mark.parametrize(
    ("find", "text"),
    [
        (named.unknown_extras, "needs the extra `nothing`"),
        (named.unknown_extras, "Install the extra nothing, in a clone"),
        (named.unknown_extras, "--editable '.[ray,nothing]'"),
        *((named.unknown_packages, f"(`pip install {words}`)") for words in _NOT_FOR_PIP),
        (named.unknown_commands, "see `envmgr rum CONFIG`"),
        (named.unknown_commands, "    envmgr run CONFIG --step 5"),
        (named.unknown_commands, "give `--allow-imports MODULE`"),
        (named.unknown_targets, "`make tests`"),
        (named.unknown_targets, "`make test JOB=3`"),
        (named.unknown_targets, "    make venv PYTHONS=python3.12"),
        (named.unknown_paths, "as in configs/nothing.yaml, say"),
        (named.unknown_paths, "as docs/decisions/9999 says"),
        (named.unknown_names, "a subclass of envmgr.testing.Nothing"),
        (named.unknown_names, "what `envmgr.nothing.at.all` has"),
        (named.unknown_names, "what `envmgr.adapters.sb3.Nothing` has"),
        (named.unknown_members, "calls `GatherPolicy.nothing` for it"),
        (named.unknown_members, "see `GatherPolicy.nothing(wait_num, 3)`"),
        (named.unknown_members, "its payload is a `messages.Nothing`"),
        (named.unknown_members, "its payload is a `nothing.Message`"),
        (named.unknown_words, "the wait (`_nothing_of_the_kind`)"),
        (named.unknown_words, "the wait of `NothingOfTheKind.step`"),
    ],
)
def test_what_is_not_there_is_noticed(find: Callable[[str], Iterator[str]], text: str) -> None:
    assert len(list(find(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "`GatherPolicy.wait_num`, of `EnvManager.step` and `messages.Message`",
        "`UnknownKeyError.args`, whose base is Python's own",  # which may have anything
        "`gymnasium.Nothing` and `np.Nothing`",
        "```\n`GatherPolicy.nothing`\n```",
    ],
)
def test_names_that_may_be_there_are_passed_over(text: str) -> None:
    assert [*named.unknown_members(text)] == []


def test_all_of_python_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        'from envmgr import make\nx = f"pip {1}" " install"  # the comment\ny = f(extra="ray")\n',
        encoding="utf-8",
    )
    words = named.words_of(file)
    assert set(words.texts) == {"pip {} install", "ray", "# the comment"}
    assert (words.imports, words.extras) == (["envmgr.make"], ["ray"])


def test_the_name_for_pip_and_the_version_stand_in_one_place_each() -> None:
    setup = named.setup()
    assert setup["metadata"]["name"] == DISTRIBUTION
    assert setup["metadata"]["version"] == "attr: envmgr.__version__"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {envmgr.__version__}" in changelog
