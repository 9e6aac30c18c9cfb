"""Which modules are found to be needed: by pickling and reading sources, never by running them."""

from __future__ import annotations

import importlib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import gymnasium
import numpy
import pytest
from gymnasium.envs.registration import EnvSpec, WrapperSpec

from envmgr import pickles
from envmgr.config.env_factories import env_factories
from envmgr.errors import ConfigError
from envmgr.transport.process.needed_modules import (
    NamedModules,
    find_module,
    installed_among,
    listed_modules,
)
from envmgr.worker import imported_modules


class Modules:
    """Writes modules, installed ones and the user's own; all of them raise when they are run."""

    def __init__(self, folder: Path) -> None:
        self.installed, self.own = folder / "site-packages", folder / "work"

    def write(self, folder: Path, name: str, source: str = "") -> None:
        file = folder.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        refuse = "raise RuntimeError('run in the trainer')"
        file.write_text(textwrap.dedent(source) + f"\n{refuse}\n")

    def install(self, *names: str) -> None:
        for name in names:
            self.write(self.installed, name)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    modules = Modules(tmp_path)
    for folder in (modules.installed, modules.own):
        folder.mkdir()
        monkeypatch.syspath_prepend(str(folder))
    folders = (*imported_modules._folders(), str(modules.installed))
    monkeypatch.setattr(imported_modules, "_folders", lambda: folders)
    importlib.invalidate_caches()
    modules.install("lib_a", "lib_b", "lib_c.__init__", "lib_c.part", "lib_d")
    yield modules
    for name in [name for name in sys.modules if name.startswith(("lib_", "mine"))]:
        del sys.modules[name]


@pytest.fixture
def loaded(modules: Modules) -> Any:
    """A module that the trainer has run, with a class and a function."""
    module: Any = ModuleType("lib_a")
    module.__spec__ = find_spec_of(modules.installed, "lib_a")
    module.Env = type("Env", (), {"__module__": "lib_a"})
    module.make = lambda *args: None
    module.make.__module__, module.make.__qualname__ = "lib_a", "make"
    sys.modules["lib_a"] = module
    return module


def found_through(module: str) -> tuple[str, ...]:
    """Return what is found where a factory names a module."""
    return found_among([module])


def found_among(names: Iterable[str]) -> tuple[str, ...]:
    before = set(sys.modules)
    found = installed_among(names)
    assert {name for name in sys.modules if name.startswith(("lib_", "mine"))} <= before
    return found


def found_for(factory: Callable[[], Any]) -> tuple[str, ...]:
    named = NamedModules()
    assert pickles.dumps(factory, named.note) == pickles.dumps(factory)
    return found_among(named.names)


def test_what_a_module_is(modules: Modules) -> None:
    assert found_through("lib_a") == ("lib_a",)
    assert found_through("lib_c.part") == ("lib_c.part",)
    assert found_through("lib_none") == ()
    assert found_through("collections") == (), "the standard library is not worth it"
    assert found_through("__main__") == ()
    assert found_among([]) == ()


def test_what_is_pickled_by_name(loaded: Any) -> None:
    for factory in (loaded.Env, loaded.make, partial(loaded.make, 3), loaded.Env().__init__):
        assert found_for(factory) == ("lib_a",)
    assert found_for(partial(print, {"the": [loaded.Env()]})) == ("lib_a",)
    assert found_for(partial(print, "lib_a", b"lib_a", {"lib_b": "lib_c"})) == ()


def test_a_module_in_another_that_is_a_partial(modules: Modules) -> None:
    inner = cloudpickle.loads(cloudpickle.dumps(partial(gymnasium.make, "CartPole-v1")))
    names = found_for(partial(inner, render_mode=None))
    assert names == ("gymnasium.envs.registration", "gymnasium.envs.classic_control.cartpole")


def test_objects_that_answer_oddly_name_nothing() -> None:
    def odd() -> None: ...

    odd.__module__ = []  # type: ignore[assignment]
    named = NamedModules()
    named.note(odd)
    assert not named.names


def test_what_a_child_of_spawn_has_as_its_script_is_not_read(
    modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is pickled by value, and imports what the trainer needs."""
    modules.write(modules.own, "train", "import lib_a")
    script = ModuleType("__mp_main__")
    script.__spec__ = find_spec_of(modules.own, "train")
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    env = type("Env", (), {"__module__": "__mp_main__", "library": numpy})
    monkeypatch.setattr(script, "Env", env, raising=False)
    assert found_for(env) == ("numpy",)


def test_functions_of_the_script_bring_the_modules_that_they_use(modules: Modules) -> None:
    """Cloudpickle pickles them by value, with `subimport` for the modules among their globals."""

    def inner() -> Any:
        return numpy.zeros(3)

    def make() -> Any:
        import lib_a
        from lib_c import nothing, part

        def later() -> None:
            import lib_b

            print(lib_b)

        return lib_a, nothing, part, later, inner

    make.__module__ = inner.__module__ = "__main__"
    names = found_for(make)
    assert set(names) == {"numpy", "lib_a", "lib_b", "lib_c", "lib_c.part"}


def test_functions_that_travel_by_value_do_not_bring_what_else_their_module_imports() -> None:
    assert found_for(lambda: sys) == ()
    assert found_for(lambda: numpy) == ("numpy",)


def test_a_class_of_the_script(modules: Modules) -> None:
    class Env:
        def reset(self) -> Any:
            import lib_d

            return lib_d

    Env.__module__ = "__main__"
    assert found_for(Env) == ("lib_d",)
    assert found_for(lambda: Env()) == ("lib_d",)


def test_sources_of_the_users_own_modules_are_read(modules: Modules) -> None:
    modules.write(
        modules.own,
        "mine.envs.one",
        """
        import os, lib_a as other
        from typing import TYPE_CHECKING
        from lib_c import part, Nothing
        from . import two
        from ..deep import *
        if TYPE_CHECKING:
            import lib_never
        else:
            import lib_d

        class Env:
            def step(self):
                try:
                    import lib_b
                except ImportError:
                    import lib_not_installed
        """,
    )
    modules.write(modules.own, "mine.envs.two", "if __name__ == '__main__':\n    import lib_never")
    modules.write(modules.own, "mine.deep.__init__", "import lib_e")
    modules.write(modules.own, "mine.__init__", "import mine.envs.one, lib_f")
    modules.write(modules.own, "mine.envs.__init__")
    modules.install("lib_e", "lib_f", "lib_never")
    names = found_through("mine.envs.one")
    assert set(names) == {*(f"lib_{x}" for x in "abcdef"), "lib_c.part"}
    assert "mine.envs.one" not in names, "it may hold what workers must not share"


@pytest.mark.parametrize("source", ["import (", "\0", "# coding: nonsense\n", "from .... import a"])
def test_sources_that_cannot_be_read_name_nothing(modules: Modules, source: str) -> None:
    modules.write(modules.own, "mine", source)
    assert found_through("mine") == ()


@pytest.mark.parametrize(
    "setting",
    [
        "os.environ['LIB'] = '1'",
        "os.environ.setdefault('LIB', '1')",
        "environ.update(LIB='1')",
        "del os.environ['LIB']",
        "os.putenv('LIB', '1')",
    ],
)
def test_code_that_sets_variables_may_mean_them_for_what_it_imports(
    modules: Modules, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    modules.write(
        modules.own,
        "mine",
        f"""
        import os
        from os import environ
        def make():
            {setting}
            import lib_a
        def other():
            print(os.environ.get("LIB"))
            import lib_b
        """,
    )
    assert found_through("mine") == (), "nobody knows what is set before what"
    monkeypatch.setitem(sys.modules, "mine", type(sys)("mine"))
    monkeypatch.setattr(sys.modules["mine"], "__spec__", find_spec_of(modules.own, "mine"))
    assert found_through("mine") == ("lib_b",), "what the module itself sets is set here, too"


def find_spec_of(folder: Path, name: str) -> Any:
    return importlib.util.spec_from_file_location(name, folder / f"{name}.py")


def test_functions_of_the_script_that_set_variables(modules: Modules) -> None:
    def make() -> Any:
        import os

        os.environ["LIB"] = "1"
        import lib_a

        return lib_a

    make.__module__ = "__main__"
    assert found_for(make) == ()


def test_what_a_config_says_of_an_env(modules: Modules) -> None:
    [by_id] = env_factories({"id": "CartPole-v1", "kwargs": {"render_mode": "lib_a:x"}}, 1)
    names = found_for(by_id)
    assert "gymnasium.envs.classic_control.cartpole" in names
    assert "lib_a" not in names, "arguments of an env name no modules"
    around = WrapperSpec("Around", "lib_b:Around", None)
    spec = EnvSpec("Mine-v0", entry_point="lib_a:Env", additional_wrappers=(around,))
    assert set(found_for(partial(gymnasium.make, spec))) >= {"lib_a", "lib_b"}, "no id is known"
    thing = SimpleNamespace(entry_point="lib_a:x", path="lib_a.x")
    assert found_for(partial(print, thing)) == ()
    wrapper = {"path": "gymnasium.wrappers.TimeLimit", "kwargs": {"max_episode_steps": 3}}
    section = {"entry": "envmgr.testing:FaultyEnv", "wrappers": [wrapper]}
    names = found_for(env_factories(section, 1)[0])
    assert {"envmgr.testing", "gymnasium.wrappers"} <= set(names)


def test_ids_of_gymnasium_wherever_they_are(modules: Modules) -> None:
    pendulum = "gymnasium.envs.classic_control.pendulum"
    assert pendulum in found_for(lambda: gymnasium.make("Pendulum-v1"))
    assert pendulum in found_for(partial(gymnasium.make, id="Pendulum-v1"))
    assert pendulum in found_for(partial(gymnasium.make, "gymnasium:Pendulum-v1"))


def test_a_list_is_taken_as_it_is(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    modules.write(modules.own, "mine", "import lib_a")
    assert listed_modules(["mine", "lib_c.part", "json"]) == ("mine", "lib_c.part", "json")
    script = modules.own / "train.py"
    script.write_text("import lib_a\nimport mine\nif __name__ == '__main__':\n    import lib_b")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    assert listed_modules(["__main__", "lib_d"]) == ("lib_a", "lib_d")
    for absent in ("lib_none", "lib_c.none", "lib_a.part", "mine.x"):
        with pytest.raises(ConfigError, match=rf"manager\.preload names the module '{absent}'"):
            listed_modules(["lib_d", absent])
    assert find_module("lib_c.part") is not None
    assert "lib_c" not in sys.modules


def test_installed_is_what_lies_where_distributions_do(modules: Modules) -> None:
    assert imported_modules.is_installed(numpy.__file__)
    assert imported_modules.is_installed(imported_modules.__file__), "envmgr itself, wherever it is"
    assert imported_modules.is_installed(str(modules.installed / "lib_a.py"))
    assert not imported_modules.is_installed(str(modules.own / "mine.py"))
    assert not imported_modules.is_installed(str(modules.installed) + "-other/x.py")


def test_what_users_install_for_themselves_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("site.getusersitepackages", lambda: str(tmp_path))
    assert os.path.realpath(tmp_path) in imported_modules._folders.__wrapped__()


def test_of_a_new_package_its_parts_are_not_named() -> None:
    assert imported_modules._has_new_parent("json.decoder", set())
    assert not imported_modules._has_new_parent("json.decoder", {"json"})
    assert not imported_modules._has_new_parent("json", set())


def reported(known: set[str]) -> Any:
    read_end, write_end = os.pipe()
    imported_modules.report_imports(write_end, known)
    with os.fdopen(read_end) as file:
        return json.load(file)


def test_new_installed_packages_are_reported_and_nothing_else() -> None:
    known = {name for name in sys.modules if name.partition(".")[0] not in ("numpy", "json")}
    assert reported(known) == ["numpy"]


class Lazy(ModuleType):
    """Is loaded by whoever asks it for anything, and then it raises."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("it was loaded")


def test_modules_that_are_loaded_lazily_are_not_loaded(
    modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = Lazy("lib_a")
    spec = importlib.util.find_spec("lib_a")
    object.__setattr__(lazy, "__spec__", spec)
    monkeypatch.setitem(sys.modules, "lib_a", lazy)
    assert reported({name for name in sys.modules if name != "lib_a"}) == ["lib_a"]
    assert find_module("lib_a") is spec


class OddSpec:
    @property
    def origin(self) -> str:
        raise RuntimeError("nowhere")


def test_what_is_odd_among_the_modules_keeps_no_worker_from_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = set(sys.modules)
    odd: Any = SimpleNamespace(__spec__=OddSpec())
    monkeypatch.setitem(sys.modules, "odd_module", odd)
    read_end, write_end = os.pipe()
    imported_modules.report_imports(write_end, known)
    with os.fdopen(read_end, "rb") as file:
        assert file.read() == b""
