"""The tables on the migration pages name what there is: in envmgr, and in the trainers."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib.metadata import version

import pytest
from packaging.version import Version

import envmgr
from envmgr import ENV_MANAGER_REGISTRY, BaseEnvManager, EnvTimestep, env, types
from envmgr.config import EnvConfig, ManagerConfig
from envmgr.core import ArrayBatch
from tests.docs.blocks import ROOT

PAGES = {
    "Gymnasium": "migrating-from-gymnasium.md",
    "Stable-Baselines3": "migrating-from-stable-baselines3.md",
    "tianshou": "migrating-from-tianshou.md",
    "ALF": "migrating-from-alf.md",
}
SOURCES = {
    "Gymnasium": (
        *("gymnasium.vector.vector_env", "gymnasium.vector.async_vector_env"),
        *("gymnasium.vector.sync_vector_env", "gymnasium.envs.registration"),
    ),
    "Stable-Baselines3": (
        *("stable_baselines3.common.vec_env", "stable_baselines3.common.vec_env.base_vec_env"),
        *("stable_baselines3.common.env_util", "stable_baselines3.common.vec_env.subproc_vec_env"),
    ),
    "tianshou": ("tianshou.env", "tianshou.env.venvs", "tianshou.env.worker.subproc"),
}
OWNERS = {"batch": ArrayBatch, "timestep": EnvTimestep, "env": env, "types": types}
_CODE = re.compile(r"`([^`]+)`")
_WORDS = re.compile(r"[A-Za-z_]\w+")


def rows(trainer: str) -> list[list[str]]:
    """Return the first two cells of the rows of all mapping tables of a page."""
    found, inside = [], False
    for line in (ROOT / "docs" / "guide" / PAGES[trainer]).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[:2] == [trainer, "manager"]:
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            found.append(cells[:2])
    return found


def is_ours(code: str) -> bool:
    """Return whether a piece of code in the second column names something that envmgr has."""
    code = code.removeprefix("envmgr.")
    owner, dot, rest = code.partition(".")
    name = _WORDS.match(rest if dot and owner in ("manager", *OWNERS) else code)
    if name is None:
        return False
    if dot and owner == "manager":
        return hasattr(BaseEnvManager, name.group())
    if dot and owner in OWNERS:
        return hasattr(OWNERS[owner], name.group())
    key, colon, value = code.partition(": ")
    known = {*ManagerConfig.__dataclass_fields__, *EnvConfig.__dataclass_fields__}
    known |= {"env_fn", "env_kwargs", "env_ids"}  # arguments
    if colon and key == "type":
        return value in ENV_MANAGER_REGISTRY
    return name.group() in known or ("(" in code and hasattr(envmgr, name.group()))


@pytest.mark.parametrize("trainer", PAGES)
def test_what_is_said_to_be_ours_is_there(trainer: str) -> None:
    mapped = rows(trainer)
    assert len(mapped) > 20
    for old, new in mapped:
        named = _CODE.findall(new)
        assert named or new.startswith(("none", "any")), f"{old} is mapped to nothing"
        assert all(map(is_ours, named)), f"{old}: {new}"


@pytest.mark.parametrize("trainer", SOURCES)
def test_what_is_said_to_be_theirs_is_there(trainer: str) -> None:
    try:
        modules = [importlib.import_module(name) for name in SOURCES[trainer]]
    except ImportError as error:
        pytest.skip(str(error))
    if trainer == "Gymnasium" and Version(version("gymnasium")) < Version("1.4"):
        pytest.skip("an older Gymnasium than that of the page")
    sources = "\n".join(map(inspect.getsource, modules))
    for old, _ in rows(trainer):
        for code in _CODE.findall(old):
            for word in _WORDS.findall(re.sub(r"=.*", "", code)):
                assert re.search(rf"\b{word}\b", sources), f"{code}: no {word} in {trainer}"


def test_the_page_of_kinds_says_of_each_of_ours_when_not() -> None:
    page = (ROOT / "docs" / "guide" / "kinds.md").read_text()
    _, _, part = page.partition("\n## When not\n")
    cells = " ".join(row.split("|")[1] for row in part.splitlines() if row.startswith("|"))
    ours = [key for key in ENV_MANAGER_REGISTRY if ENV_MANAGER_REGISTRY.source(key) == "envmgr"]
    assert [key for key in ours if f"`{key}`" not in cells] == []
