"""What the pages say of names, links and generated parts is so."""

from __future__ import annotations

import builtins
import functools
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from envmgr import ENV_MANAGER_REGISTRY, errors, testing
from envmgr.cli import commands
from envmgr.config import CollectConfig, EnvConfig, ManagerConfig, WorkerEnv
from envmgr.config.kind_sections import (
    EnvPool,
    GymVector,
    Limits,
    Metrics,
    NormalizationSection,
    Ray,
    Trace,
)
from tests.cases import for_each
from tests.docs.blocks import ROOT, notebooks, pages

PAGES = [*pages(), *notebooks()]

_LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE_WORD = re.compile(r"`([^`]+)`")


@functools.cache
def _prose(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return _CODE.sub("", text)


def _anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@for_each("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(_prose(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{target}: no such file"
        if anchor:
            anchors = {_anchor(title) for title in _HEADING.findall(_prose(path))}
            assert anchor in anchors, f"{target}: no such heading"


@for_each("page", PAGES)
def test_every_page_can_be_reached(page: Path) -> None:
    if page.name in ("README.md", "CHANGELOG.md"):
        return
    assert page.resolve() in _linked(), "no other page links to this one"


@functools.cache
def _linked() -> set[Path]:
    return {
        (page.parent / target.partition("#")[0]).resolve()
        for page in pages()
        for target in _LINK.findall(_prose(page))
        if "://" not in target
    }


def _tables(page: Path) -> list[tuple[str, list[str]]]:
    """Return the first header cell of each table and the first cells of its rows."""
    tables: list[tuple[str, list[str]]] = []
    inside = False
    for line in _prose(page).splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cell = line.strip("|").split("|")[0].strip()
        if not inside:
            tables.append((cell, []))
        elif not set(cell) <= {"-", ":"}:
            tables[-1][1].append(cell)
        inside = True
    return tables


@for_each("page", PAGES)
def test_tables_of_keys_name_keys_that_exist(page: Path) -> None:
    known = {
        name
        for schema in (
            ManagerConfig,
            GymVector,
            EnvPool,
            Ray,
            NormalizationSection,
            WorkerEnv,
            Limits,
            Metrics,
            Trace,
            EnvConfig,
            CollectConfig,
        )
        for name in schema.__dataclass_fields__
    }
    for header, cells in _tables(page):
        if header == "key":
            for cell in cells:
                names = _CODE_WORD.findall(cell)
                assert names, f"{cell!r} names no key"
                assert set(names) <= known, f"{cell!r} is not a key of the config"


def test_the_table_of_kinds_is_that_of_the_registry() -> None:
    page = ROOT / "docs" / "guide" / "kinds.md"
    table = dict(_tables(page))["registry key"]
    listed = [_CODE_WORD.findall(cell)[0] for cell in table]
    ours = [k for k in ENV_MANAGER_REGISTRY if ENV_MANAGER_REGISTRY.source(k) == "envmgr"]
    assert sorted(listed) == ours
    text = page.read_text(encoding="utf-8")
    for key in ours:
        assert f"| `{key}` | `{ENV_MANAGER_REGISTRY.get(key).__name__}` |" in text


def test_errors_that_the_pages_name_exist() -> None:
    pattern = re.compile(r"`((?:[A-Z][a-z]+)+(?:Error|Crash|Timeout|Raised|Abnormal))`")
    for page in pages():
        for name in pattern.findall(_prose(page)):
            known = any(hasattr(module, name) for module in (errors, testing, builtins))
            assert known, f"{page.name}: there is no {name}"


_PATH = re.compile(r"(?:envmgr|tests|docs|configs|benchmarks|soak|examples)/[\w./-]*")


@for_each("page", PAGES)
def test_paths_that_the_pages_name_exist(page: Path) -> None:
    for word in _CODE_WORD.findall(_prose(page)):
        if _PATH.fullmatch(word):
            assert (ROOT / word).exists(), f"there is no {word}"


def test_files_that_decisions_name_exist() -> None:
    for page in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        for word in re.findall(r"`(envmgr/[\w./]+|\w+\.py)`", _prose(page)):
            found = (ROOT / word).exists() or any(ROOT.glob(f"envmgr/**/{word}"))
            assert found or word == "ale_py.py", f"{page.name}: there is no {word}"


def _script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "docs" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = _script("generate.py")
SITE = _script("site/pages.py")
CHECKED = _script("site/checked.py")


@pytest.mark.parametrize("name", sorted(GENERATOR.PAGES))
def test_generated_pages_are_up_to_date(name: str) -> None:
    present = (GENERATOR.FOLDER / name).read_text(encoding="utf-8")
    assert present == GENERATOR.page(name), (
        f"docs/reference/{name} is out of date. Make it anew and commit it: python docs/generate.py"
    )


def test_keywords_of_make_are_those_of_the_schema() -> None:
    assert GENERATOR.KEYWORDS.read_text(encoding="utf-8") == GENERATOR.keywords_module(), (
        "envmgr/config/keywords.py is out of date. Make it anew and commit it: make docs"
    )


def test_a_page_that_is_out_of_date_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GENERATOR, "FOLDER", tmp_path)
    monkeypatch.setattr(GENERATOR, "KEYWORDS", tmp_path / "keywords.py")
    assert GENERATOR.main(["--check"]) == 1
    assert GENERATOR.main([]) == 0
    assert GENERATOR.main(["--check"]) == 0
    (tmp_path / "config.md").write_text("old", encoding="utf-8")
    assert GENERATOR.main(["--check"]) == 1
    assert "config.md" in capsys.readouterr().out


def test_every_page_is_in_the_navigation_once() -> None:
    listed = [page for s in SITE.sections() for _, items in s.groups for _, page in items]
    of_the_repository = {ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
    of_the_repository |= {ROOT / "benchmarks" / "README.md", ROOT / "soak" / "README.md"}
    docs = {page for page in PAGES if page.is_relative_to(SITE.DOCS)} - {SITE.CONTENTS}
    assert sorted(listed) == sorted(docs | of_the_repository)


def test_the_readme_is_short_and_begins_with_code() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert "```python" in lines[:40]


COME_WITH = (
    "crash",
    "hang",
    "freeze",
    "slow resets",
    "browsers",
    "batches GPU",
    "cluster",
    "tools",
    "LLM agents",
    "multi-agent",
    "resume",
    "checkpoint",
    "memory leak",
    "timeout",
    "reproducible",
    "docker",
    "which kind",
)
"""What people type into a search, which finds pages that have all words of it."""


def test_a_search_for_what_people_come_with_finds_the_page_for_it() -> None:
    page = ROOT / "docs" / "guide" / "by-problem.md"
    assert page in [found for s in SITE.sections() for _, items in s.groups for _, found in items]
    words = set(re.findall(r"[a-z]+", _prose(page).lower()))
    for query in COME_WITH:
        assert words.issuperset(re.findall(r"[a-z]+", query.lower())), query


def test_pages_of_the_site_link_to_each_other(tmp_path: Path) -> None:
    stage = SITE.Stage(tmp_path, lambda source, folder, top: f"![]({top}/index.md)")
    stage.put("configs", "# Configs\n", ROOT / "configs" / "README.md")
    stage.write({"Project": [("Configs", "configs")]})
    written = list(tmp_path.rglob("*.md"))
    assert len(written) > len(PAGES)
    for page in written:
        text = page.read_text(encoding="utf-8")
        for target in _LINK.findall(_CODE.sub("", text)):
            path = page.parent / target.partition("#")[0]
            assert "://" in target or path.exists(), f"{page.name}: {target}"
    trees = re.findall(r"^(?:.* <)?/([\w/.-]+)>?$", "".join(p.read_text() for p in written), re.M)
    assert set(trees) == {p.relative_to(tmp_path).with_suffix("").as_posix() for p in written} - {
        "index"
    }


def test_a_site_with_a_mistake_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<p id="x"><a href="a.html#x">', encoding="utf-8")
    (tmp_path / "a.html").write_text('<p id="x"><a href="b.html#x">', encoding="utf-8")
    assert CHECKED.problems(tmp_path) == []
    mistakes = ('<a href="b.html#y">', '<a href="c.html">', '<script src="https://a.b/c.js">')
    (tmp_path / "a.html").write_text('<p id="x">' + "".join(mistakes), encoding="utf-8")
    (tmp_path / "a.css").write_text("@import 'https://a.b/c.css'", encoding="utf-8")
    found = CHECKED.problems(tmp_path)
    assert len(found) == 4
    assert all(any(word in line for line in found) for word in ("#y", "c.html", "c.js", "a.css"))


def test_the_page_of_the_command_line_lists_every_command() -> None:
    page = (ROOT / "docs/guide/command-line.md").read_text(encoding="utf-8")
    rows = "".join(line for line in page.splitlines() if line.startswith("| `envmgr"))
    assert commands.envmgr.commands.keys() <= set(re.findall(r"`envmgr (\w+)", rows))
