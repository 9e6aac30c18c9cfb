"""README's picture shows what was recorded."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType
from xml.etree import ElementTree

from tests.docs.blocks import ROOT


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("picture", ROOT / "docs" / "picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PICTURE = _script()


def _shown(text: str, kind: str) -> list[ElementTree.Element]:
    return [one for one in ElementTree.fromstring(text).iter() if one.get("class") == kind]  # noqa: S314


def test_spells_end_where_timesteps_stay_away() -> None:
    assert PICTURE.spells([0.0, 0.05, 0.1, 0.3, 0.34]) == [(0.0, 0.1), (0.3, 0.34)]
    assert PICTURE.spells([]) == []


def test_all_that_happened_is_drawn() -> None:
    run = PICTURE.Record(
        seconds=1.0,
        timesteps=[(0.1, 0, False), (0.12, 1, False), (0.5, 0, True), (0.8, 0, False)],
        kills=[(0.4, 0, 11)],
        workers=[(0.0, 0, 11), (0.0, 1, 12), (0.6, 0, 13)],
        actions=4,
    )
    text = PICTURE.draw(run)
    assert len(_shown(text, "away")) == 2
    assert len(_shown(text, "steps")) == 3  # the abnormal timestep is none of them
    assert len(_shown(text, "kill")) == 1
    assert re.findall(r"pid (\d+)", text) == ["11", "13", "12"]
    assert "4 actions, 4 timesteps (1 abnormal), 1 workers killed" in text


def test_the_picture_is_of_a_run_that_lost_nothing() -> None:
    text = (ROOT / "docs" / "survival.svg").read_text(encoding="utf-8")
    found = re.search(r"([\d,]+) actions, ([\d,]+) timesteps \(\d+ abnormal\), (\d+) workers", text)
    assert found is not None
    assert found[1] == found[2]
    assert len(_shown(text, "kill")) == int(found[3]) > 0
