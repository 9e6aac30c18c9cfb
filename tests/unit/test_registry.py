"""The registry: look-ups, its three kinds of sources, and building a manager from a config."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from easydict import EasyDict

from envmgr import registry as registry_module
from envmgr.config import default_manager_config
from envmgr.config_file import load_config
from envmgr.errors import ConfigError, UnknownKeyError
from envmgr.registry import (
    Registry,
    default_config_of,
    get_env_manager_cls,
)
from envmgr.shortcuts import create_env_manager

GROUP = "cfgtest.kinds"


@pytest.fixture
def packages(tmp_path: Path) -> Iterator[Path]:
    """A folder on `sys.path` for modules and the metadata of distributions."""
    modules, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("cfgtest_"):
            del sys.modules[name]


def install(folder: Path, dist: str, module: str, text: str, entries: dict[str, str]) -> None:
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{dist}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
    lines = [f"{key} = {value}" for key, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))


class Kind:
    def __init__(self, env_fn: Any, cfg: Any, extra: int = 0) -> None:
        self.env_fn, self.cfg, self.extra = env_fn, cfg, extra

    @classmethod
    def default_config(cls) -> EasyDict:
        return default_manager_config({"type": "kind", "wait_num": 2})


class Other:
    pass


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry in place of the global one, in which the built-in kinds are already."""
    registry_module.ENV_MANAGER_REGISTRY.get("base")
    kinds = Registry("env manager")
    monkeypatch.setattr(registry_module, "ENV_MANAGER_REGISTRY", kinds)
    kinds.register("kind")(Kind)
    return kinds


def test_decorator_registers_and_returns_the_class() -> None:
    registry = Registry("thing")

    @registry.register("a")
    class Registered:
        pass

    assert registry.get("a") is Registered
    assert isinstance(registry.build("a"), Registered)
    assert registry.keys() == ["a"]
    assert list(registry) == ["a"]
    assert len(registry) == 1
    assert "a" in registry
    assert "b" not in registry
    assert registry.source("a") == f"registered by {__name__}"


def test_taken_key_names_who_has_it() -> None:
    registry = Registry("thing")
    registry.register("a")(Kind)
    registry.register("a")(Kind)  # the same again, as when a module is run twice by two names
    with pytest.raises(ConfigError, match=rf"'a' is taken by {__name__}\.Kind.*Other cannot"):
        registry.register("a")(Other)
    assert registry.get("a") is Kind
    registry.register("a", override=True)(Other)
    assert registry.get("a") is Other


@pytest.mark.parametrize("key", ["", None, 3, ["a"]])
def test_key_has_to_be_text(key: Any) -> None:
    registry = Registry("thing")
    with pytest.raises(ConfigError, match="the registry key is"):
        registry.register(key)
    with pytest.raises(ConfigError, match="the registry key is"):
        registry.get(key)
    assert key not in registry


def test_unknown_key_names_all_and_the_nearest() -> None:
    registry = Registry("env manager")
    for key in ("subprocess", "base", "async_subprocess"):
        registry.register(key)(Kind)
    with pytest.raises(UnknownKeyError) as caught:
        registry.get("subproces")
    assert str(caught.value) == (
        "no env manager is registered as 'subproces': did you mean 'subprocess'? Known keys: "
        "async_subprocess, base, subprocess. Keys of other modules are known once the module is "
        "imported (`import_names`)."
    )
    for call in (registry.source, registry.build):
        with pytest.raises(UnknownKeyError, match=r"'zzz'\. Known keys"):
            call("zzz")


def test_errors_of_a_constructor_are_passed_on_as_they_are() -> None:
    registry = Registry("thing")

    @registry.register("a")
    def build(key: str) -> None:
        raise KeyError(key)

    with pytest.raises(KeyError) as caught:
        registry.build("a", "inner")
    assert caught.value.args == ("inner",)
    with pytest.raises(TypeError):
        registry.build("a")


BUILTIN = """
from {test} import REGISTRY
@REGISTRY.register("builtin")
class Builtin: pass
"""
REGISTRY: Registry


def test_builtins_are_loaded_at_the_first_look_up(packages: Path) -> None:
    global REGISTRY
    (packages / "cfgtest_builtin.py").write_text(BUILTIN.format(test=__name__))
    REGISTRY = Registry("thing", builtin_module="cfgtest_builtin")
    assert "cfgtest_builtin" not in sys.modules
    assert REGISTRY.get("builtin").__module__ == "cfgtest_builtin"
    assert REGISTRY.source("builtin") == "cfgtest_builtin"


def test_builtin_keys_are_taken_also_before_the_first_look_up(packages: Path) -> None:
    global REGISTRY
    (packages / "cfgtest_builtin.py").write_text(BUILTIN.format(test=__name__))
    REGISTRY = Registry("thing", builtin_module="cfgtest_builtin")
    with pytest.raises(ConfigError, match="taken by cfgtest_builtin"):
        REGISTRY.register("builtin")(Kind)
    REGISTRY.register("mine")(Kind)
    assert REGISTRY.keys() == ["builtin", "mine"]


def test_builtin_module_may_be_imported_first(packages: Path) -> None:
    global REGISTRY
    (packages / "cfgtest_builtin.py").write_text(BUILTIN.format(test=__name__))
    REGISTRY = Registry("thing", builtin_module="cfgtest_builtin")
    __import__("cfgtest_builtin")
    assert REGISTRY.keys() == ["builtin"]


def test_entry_point_is_loaded_only_when_its_key_is_asked_for(packages: Path) -> None:
    install(packages, "one", "cfgtest_one", "class K: pass", {"one": "cfgtest_one:K"})
    install(packages, "two", "cfgtest_two", "class K: pass", {"two": "cfgtest_two:K"})
    registry = Registry("thing", entry_point_group=GROUP)
    registry.register("known")(Kind)
    assert registry.get("known") is Kind
    assert registry.get("one").__module__ == "cfgtest_one"
    assert "cfgtest_two" not in sys.modules
    assert registry.source("one") == "entry point one"
    assert registry.keys() == ["known", "one", "two"]
    assert registry.problems() == {}


@pytest.mark.parametrize(
    ("text", "value", "problem"),
    [
        ("1 / 0", "cfgtest_bad:K", "ZeroDivisionError"),
        ("", "cfgtest_bad:K", "AttributeError"),
        ("import cfgtest_missing", "cfgtest_bad:K", "cfgtest_missing"),
    ],
)
def test_broken_entry_point_matters_to_its_own_key_only(
    packages: Path, text: str, value: str, problem: str
) -> None:
    install(packages, "bad", "cfgtest_bad", text, {"bad": value})
    install(packages, "good", "cfgtest_good", "class K: pass", {"good": "cfgtest_good:K"})
    registry = Registry("thing", entry_point_group=GROUP)
    assert registry.keys() == ["good"]
    assert registry.get("good")
    assert "bad" not in registry
    assert list(registry.problems()) == ["bad"]
    with pytest.raises(ConfigError, match=rf"'bad' of entry point bad .*{problem}"):
        registry.get("bad")
    with pytest.raises(UnknownKeyError):
        registry.get("worse")


def test_entry_point_may_register_its_class_itself(packages: Path) -> None:
    global REGISTRY
    text = f"from {__name__} import REGISTRY\n@REGISTRY.register('one')\nclass K: pass\n"
    install(packages, "one", "cfgtest_one", text, {"one": "cfgtest_one:K"})
    REGISTRY = Registry("thing", entry_point_group=GROUP)
    assert REGISTRY.get("one").__name__ == "K"
    assert REGISTRY.source("one") == "entry point one"
    assert REGISTRY.problems() == {}


def test_key_that_two_packages_offer_goes_to_the_first_and_is_reported(packages: Path) -> None:
    install(packages, "one", "cfgtest_one", "class K: pass", {"same": "cfgtest_one:K"})
    install(packages, "two", "cfgtest_two", "class K: pass", {"same": "cfgtest_two:K"})
    registry = Registry("thing", entry_point_group=GROUP)
    assert registry.get("same")
    assert "is taken by" in registry.problems()["same"]


def test_code_wins_over_an_entry_point(packages: Path) -> None:
    install(packages, "one", "cfgtest_one", "class K: pass", {"same": "cfgtest_one:K"})
    registry = Registry("thing", entry_point_group=GROUP)
    registry.register("same")(Kind)
    assert registry.get("same") is Kind
    assert registry.problems()["same"].startswith("the thing 'same' of entry point one")
    assert registry.get("same") is Kind


def test_entry_point_without_a_distribution_is_named_by_its_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("one", f"{__name__}:Kind", GROUP)
    monkeypatch.setattr(registry_module, "entry_points", lambda group: [point])
    registry = Registry("thing", entry_point_group=GROUP)
    assert registry.source("one") == f"entry point {__name__}:Kind"


def test_config_gets_the_kinds_whole_default_under_the_users_keys(kinds: Registry) -> None:
    fns = [object, object]
    manager = create_env_manager({"type": "kind", "max_retry": 3}, env_fn=fns, extra=7)
    assert isinstance(manager, Kind)
    assert manager.env_fn is fns
    assert manager.extra == 7
    assert isinstance(manager.cfg, EasyDict)
    assert manager.cfg == {**Kind.default_config(), "max_retry": 3}
    assert manager.cfg.wait_num == 2


@pytest.mark.parametrize("form", [dict, EasyDict])
def test_config_is_not_changed(kinds: Registry, form: Any) -> None:
    cfg = form(type="kind", worker_env={"set": {"A": "1"}}, seed=[1, 2])
    before = copy.deepcopy(cfg)
    manager = create_env_manager(cfg, [object])
    manager.cfg.worker_env.set["B"] = "2"
    manager.cfg.seed.append(3)
    assert cfg == before
    assert get_env_manager_cls(cfg) is Kind
    assert cfg == before


def test_the_cfg_type_of_di_engine_configs_is_passed_over_by_every_way_in(kinds: Registry) -> None:
    class FromDing(Kind):
        @classmethod
        def default_config(cls) -> EasyDict:
            return EasyDict({**Kind.default_config(), "cfg_type": "FromDingDict"})

    kinds.register("ding")(FromDing)
    cfg = {"type": "ding", "cfg_type": "FromDingDict", "max_retry": 3}
    manager = create_env_manager(cfg, [object])
    assert manager.cfg == {**Kind.default_config(), "type": "ding", "max_retry": 3}
    loaded = load_config({"manager": {**cfg, "type": "base"}})
    assert loaded == load_config({"manager": {"type": "base", "max_retry": 3}})


def test_seeds_by_env_id_reach_the_manager(kinds: Registry) -> None:
    manager = create_env_manager({"type": "kind", "seed": {0: 5}}, [object])
    assert manager.cfg.seed == {0: 5}


def test_bad_configs_are_refused_before_anything_is_built(kinds: Registry) -> None:
    with pytest.raises(UnknownKeyError, match="no env manager is registered as 'base'"):
        create_env_manager({"env_num": 3}, [object])  # the default, which is not among these kinds
    with pytest.raises(UnknownKeyError, match="'kynd': did you mean 'kind'"):
        create_env_manager({"type": "kynd"}, [object])
    with pytest.raises(UnknownKeyError, match="'max_retyr' in manager"):
        create_env_manager({"type": "kind", "max_retyr": 3}, [object])
    with pytest.raises(ConfigError, match=r"manager\.max_retry is 0"):
        create_env_manager({"type": "kind", "max_retry": 0}, [object])
    with pytest.raises(ConfigError, match=r"env, manager.*env_factories\(cfg\.env"):
        create_env_manager({"env": {}, "manager": {"type": "kind"}})
    with pytest.raises(ConfigError, match="must be a mapping"):
        get_env_manager_cls("kind")  # type: ignore[arg-type]


def test_import_names_are_imported_before_the_look_up(kinds: Registry, packages: Path) -> None:
    text = (
        "from envmgr import registry\n"
        "@registry.ENV_MANAGER_REGISTRY.register('cfgtest_late')\nclass Late: pass\n"
    )
    (packages / "cfgtest_late.py").write_text(text)
    cfg = {"type": "cfgtest_late", "import_names": ["cfgtest_late"]}
    assert get_env_manager_cls(cfg).__name__ == "Late"
    with pytest.raises(ConfigError, match=r"manager\.import_names .*cfgtest_no"):
        get_env_manager_cls({"type": "kind", "import_names": ["cfgtest_no"]})


def test_class_without_a_default_config_gets_that_of_the_schema() -> None:
    assert default_config_of(Other, "other") == default_manager_config({"type": "other"})


def test_default_config_that_does_not_fit_is_laid_to_its_kind() -> None:
    class Odd:
        @staticmethod
        def default_config() -> dict[str, Any]:
            return {"my_key": 1}

    with pytest.raises(UnknownKeyError, match=r"'my_key' in default_config\(\) of the kind 'odd'"):
        default_config_of(Odd, "odd")


def test_builtin_kinds_are_there_under_their_keys() -> None:
    registry = registry_module.ENV_MANAGER_REGISTRY
    for key in ("base", "base_v2", "subprocess", "subprocess_v2", "async_subprocess", "gym_vector"):
        assert registry.source(key) == "envmgr"
        assert default_config_of(registry.get(key), key).type == key
    assert default_config_of(registry.get("async_subprocess"), "async_subprocess").wait_num == 2


@pytest.mark.parametrize("key", ["base", "base_v2"])
def test_kinds_that_hide_no_resets_refuse_spares(key: str) -> None:
    cfg = {"type": key, "spare_env_num": 1}
    with pytest.raises(ConfigError, match=r"spare_env_num is 1, but .*use type: subprocess"):
        create_env_manager(cfg, env_fn=[object])
    with pytest.raises(ConfigError, match=r"spare_env_num is 1, but .*use type: subprocess"):
        load_config({"env": {"id": "CartPole-v1"}, "manager": cfg})
