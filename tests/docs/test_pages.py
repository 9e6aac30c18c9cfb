"""What the pages say of names, links and generated parts is so."""

from __future__ import annotations

import builtins
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from envmgr import ENV_MANAGER_REGISTRY, errors, testing
from envmgr.config import CollectConfig, EnvConfig, ManagerConfig
from envmgr.config.kind_sections import EnvPool, GymVector, NormalizationSection, Ray
from envmgr.config.observing import Metrics, Trace
from tests.docs.blocks import ROOT, pages

_LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE_WORD = re.compile(r"`([^`]+)`")


def _prose(page: Path) -> str:
    return _CODE.sub("", page.read_text(encoding="utf-8"))


def _anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _page_params() -> list[object]:
    return [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in pages()]


@pytest.mark.parametrize("page", _page_params())
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


@pytest.mark.parametrize("page", _page_params())
def test_every_page_can_be_reached(page: Path) -> None:
    if page.name in ("README.md", "CHANGELOG.md"):
        return
    linked = {
        (other.parent / target.partition("#")[0]).resolve()
        for other in pages()
        for target in _LINK.findall(_prose(other))
        if "://" not in target
    }
    assert page.resolve() in linked, "no other page links to this one"


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


@pytest.mark.parametrize("page", _page_params())
def test_tables_of_keys_name_keys_that_exist(page: Path) -> None:
    known = {
        name
        for schema in (
            ManagerConfig,
            GymVector,
            EnvPool,
            Ray,
            NormalizationSection,
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
    table = dict(_tables(ROOT / "README.md"))["registry key"]
    listed = [_CODE_WORD.findall(cell)[0] for cell in table]
    ours = [k for k in ENV_MANAGER_REGISTRY if ENV_MANAGER_REGISTRY.source(k) == "envmgr"]
    assert sorted(listed) == ours
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for key in ours:
        assert f"| `{key}` | `{ENV_MANAGER_REGISTRY.get(key).__name__}` |" in readme


def test_errors_that_the_pages_name_exist() -> None:
    pattern = re.compile(r"`((?:[A-Z][a-z]+)+(?:Error|Crash|Timeout|Raised|Abnormal))`")
    for page in pages():
        for name in pattern.findall(_prose(page)):
            known = any(hasattr(module, name) for module in (errors, testing, builtins))
            assert known, f"{page.name}: there is no {name}"


_PATH = re.compile(r"(?:envmgr|tests|docs|configs|benchmarks|soak|examples)/[\w./-]*")


@pytest.mark.parametrize("page", _page_params())
def test_paths_that_the_pages_name_exist(page: Path) -> None:
    for word in _CODE_WORD.findall(_prose(page)):
        if _PATH.fullmatch(word):
            assert (ROOT / word).exists(), f"there is no {word}"


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = _generator()


@pytest.mark.parametrize("name", sorted(GENERATOR.PAGES))
def test_generated_pages_are_up_to_date(name: str) -> None:
    present = (GENERATOR.FOLDER / name).read_text(encoding="utf-8")
    assert present == GENERATOR.page(name), (
        f"docs/reference/{name} is out of date. Make it anew and commit it: python docs/generate.py"
    )


def test_a_page_that_is_out_of_date_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GENERATOR, "FOLDER", tmp_path)
    assert GENERATOR.main(["--check"]) == 1
    assert GENERATOR.main([]) == 0
    assert GENERATOR.main(["--check"]) == 0
    (tmp_path / "config.md").write_text("old", encoding="utf-8")
    assert GENERATOR.main(["--check"]) == 1
    assert "config.md" in capsys.readouterr().out
