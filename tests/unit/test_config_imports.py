"""What a config may import: everything if code gave it, little if a file did."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gymnasium
import pytest

from envmgr.config.imports import (
    FilePolicy,
    check_env_id,
    file_policy,
    import_modules,
    import_object,
)
from envmgr.errors import ConfigError

WriteModule = Callable[..., Path]


@pytest.fixture(autouse=True)
def _imports_are_undone() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("cfgtest_"):
            del sys.modules[name]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder on `sys.path`, as that of installed packages."""
    folder = tmp_path / "installed"
    folder.mkdir()
    sys.path.append(str(folder))
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The folder of a config file; not on `sys.path`."""
    folder = tmp_path / "own"
    folder.mkdir()
    return folder


@pytest.fixture
def policy(own: Path) -> FilePolicy:
    """Nothing listed; the folder of the config file."""
    return FilePolicy(folders=(own.resolve(),))


def write(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


MAKE = "class Env: pass\ndef make_env(): return Env()\nnumber = 3\n"


def listed(*modules: str) -> FilePolicy:
    return FilePolicy(modules)


def test_code_may_import_anything(installed: Path) -> None:
    write(installed, "cfgtest_a/b.py", MAKE)
    assert import_object("cfgtest_a.b:make_env")().__class__.__name__ == "Env"
    assert import_object("cfgtest_a.b.make_env") is import_object("cfgtest_a.b:make_env")
    assert import_object("cfgtest_a.b:Env.mro")()[1] is object


def test_list_allows_a_module_and_those_below_it(installed: Path) -> None:
    write(installed, "cfgtest_a/b.py", MAKE)
    write(installed, "cfgtest_ab.py", MAKE)
    assert import_object("cfgtest_a.b:make_env", allow=listed("cfgtest_a"))
    assert import_object("cfgtest_a.b:make_env", allow=listed("x", "cfgtest_a.b"))
    for allow in ([], ["cfgtest_ab"], ["cfgtest_a.b.c"], ["cfgtest"], ["b"]):
        with pytest.raises(ConfigError, match="may not import"):
            import_object("cfgtest_a.b:make_env", allow=listed(*allow))
    with pytest.raises(ConfigError, match="may not import"):
        import_object("cfgtest_ab:make_env", allow=listed("cfgtest_a"))


def test_refusal_comes_before_the_import_and_names_the_way_out(installed: Path) -> None:
    write(installed, "cfgtest_evil/x.py", "raise SystemExit('ran')")
    with pytest.raises(ConfigError) as caught:
        import_object("cfgtest_evil.x:run", allow=listed("cfgtest_a"), key="collect.policy")
    message = str(caught.value)
    assert message.startswith("collect.policy is 'cfgtest_evil.x:run'")
    assert "may not import that (but cfgtest_a" in message
    assert "--allow-import cfgtest_evil" in message
    assert "allow_imports=['cfgtest_evil']" in message
    assert "cfgtest_evil" not in sys.modules


@pytest.mark.parametrize(
    "name",
    [
        "cfgtest_a:os.system",
        "cfgtest_a:os",
        "cfgtest_a:run",
        "cfgtest_a:partly",
        "cfgtest_a:evaluate",
        "cfgtest_a:Env.__subclasses__",
        "cfgtest_a:Env.__class__",
        "cfgtest_a:deep",
    ],
)
def test_object_of_another_module_is_refused_whatever_it_was_reached_through(
    installed: Path, own: Path, policy: FilePolicy, name: str
) -> None:
    text = (
        "import os, functools, json\nclass Env: pass\nrun = os.system\nevaluate = eval\n"
        "partly = functools.partial(functools.partial(os.system), 'true')\ndeep = json.loads\n"
    )
    write(installed, "cfgtest_a.py", text)
    with pytest.raises(ConfigError, match="may not import"):
        import_object(name, allow=listed("cfgtest_a"))
    del sys.modules["cfgtest_a"]
    sys.path.remove(str(installed))
    write(own, "cfgtest_a.py", text)
    assert import_object("cfgtest_a:Env", allow=policy)
    with pytest.raises(ConfigError, match="may not import"):
        import_object(name, allow=policy)


def test_alias_in_the_standard_library_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"belongs to module 'os'"):
        import_object("logging:os.system", allow=listed("logging"))


def test_a_module_that_is_not_allowed_is_not_even_looked_into(installed: Path) -> None:
    write(installed, "cfgtest_a.py", "import cfgtest_lazy\n")
    lazy = "def __getattr__(name):\n    raise SystemExit('it was asked')\n"
    write(installed, "cfgtest_lazy.py", lazy)
    with pytest.raises(ConfigError, match="--allow-import cfgtest_lazy"):
        import_object("cfgtest_a:cfgtest_lazy.more", allow=listed("cfgtest_a"))
    with pytest.raises(ConfigError, match="belongs to module 'numpy'"):
        import_object("gymnasium.core:np.f2py.run_main", allow=listed())


def test_object_of_another_allowed_module_passes(installed: Path) -> None:
    write(installed, "cfgtest_a.py", "from cfgtest_b import make_env\n")
    write(installed, "cfgtest_b.py", MAKE)
    assert import_object("cfgtest_a:make_env", allow=listed("cfgtest_a", "cfgtest_b"))
    with pytest.raises(ConfigError, match="--allow-import cfgtest_b"):
        import_object("cfgtest_a:make_env", allow=listed("cfgtest_a"))


def test_partial_over_an_allowed_function_passes(installed: Path) -> None:
    text = MAKE + "import functools\nready = functools.partial(make_env)\n"
    write(installed, "cfgtest_a.py", text)
    assert import_object("cfgtest_a:ready", allow=listed("cfgtest_a"))()


def test_instance_with_call_belongs_to_its_class(installed: Path) -> None:
    text = "class Policy:\n    def __call__(self): return 5\npolicy = Policy()\n"
    write(installed, "cfgtest_a.py", text)
    assert import_object("cfgtest_a:policy", allow=listed("cfgtest_a"))() == 5


def test_gymnasium_classes_need_no_list_but_its_functions_do() -> None:
    allow = listed()
    found = import_object("gymnasium.wrappers:TimeLimit", allow=allow)
    assert found is gymnasium.wrappers.TimeLimit
    assert import_object("gymnasium.envs.classic_control.CartPoleEnv", allow=allow)
    for name in ("gymnasium:make", "gymnasium:logger.warn", "gymnasium:spaces.Box"):
        with pytest.raises(ConfigError, match="may not import"):
            import_object(name, allow=allow)
    assert import_object("gymnasium:make", allow=listed("gymnasium")) is gymnasium.make


def test_own_machinery_is_not_allowed_to_files() -> None:
    with pytest.raises(ConfigError, match="may not import"):
        import_object("envmgr.config.imports:import_object", allow=listed())
    with pytest.raises(ConfigError, match="may not import"):
        import_object("envmgr.env:GymnasiumEnv.__init__.__globals__.get", allow=listed())


@pytest.mark.parametrize(
    "name",
    [
        "envmgr.config.env_factories:import_object",  # would import what its arguments name
        "envmgr.config.env_factories:ConfiguredEnv",
        "envmgr.collect.policies:make_policy",
        "envmgr.testing.injuries:send_signal",
        "envmgr.testing.chaos:Saboteur",
        "envmgr.testing.faulty:segfault",
        "envmgr.env.figures:write_png",
        "envmgr.env:videos.os.system",
    ],
)
def test_of_envmgr_only_envs_and_policies_are_allowed_to_files(name: str) -> None:
    with pytest.raises(ConfigError, match="may not import"):
        import_object(name, allow=listed())


def test_envs_and_policies_of_envmgr_need_no_list() -> None:
    assert import_object("envmgr.testing:FaultyEnv", allow=listed())
    assert import_object("envmgr.collect.policies:RandomPolicy", allow=listed())


def test_module_beside_the_file_is_found_and_its_folder_stays_on_the_path(
    own: Path, policy: FilePolicy
) -> None:
    write(own, "cfgtest_mine.py", MAKE)
    write(own, "cfgtest_pkg/__init__.py", "")
    write(own, "cfgtest_pkg/envs.py", MAKE)
    write(own, "cfgtest_space/envs.py", MAKE)
    before = list(sys.path)
    for name in ("cfgtest_mine:make_env", "cfgtest_pkg.envs:Env", "cfgtest_space.envs:Env"):
        assert import_object(name, allow=policy)
    # Last, so that it shadows nothing, and once; workers import the module by the same path.
    assert sys.path == [*before, str(own)]


def test_module_beside_the_file_is_found_if_it_is_in_the_list_too(own: Path) -> None:
    write(own, "cfgtest_mine.py", MAKE)
    policy = FilePolicy(("cfgtest_mine", "cfgtest_absent"), folders=(own,))
    assert import_object("cfgtest_mine:make_env", allow=policy)
    with pytest.raises(ConfigError, match="there is no 'cfgtest_absent'"):
        import_object("cfgtest_absent:make_env", allow=policy)


def test_a_list_lets_no_module_of_the_folder_take_the_place_of_another(
    own: Path, installed: Path
) -> None:
    write(installed, "cfgtest_same.py", MAKE)
    write(own, "cfgtest_same.py", "raise SystemExit('the wrong one ran')")
    before = list(sys.path)
    policy = FilePolicy(("cfgtest_same",), folders=(own,))
    assert import_object("cfgtest_same:make_env", allow=policy)
    assert sys.path == before


def test_the_name_that_is_missing_is_not_suggested(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(own, "cfgtest_mine.py", MAKE)
    monkeypatch.chdir(own)  # which is not where Python looks
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with pytest.raises(ConfigError, match="there is no 'cfgtest_mine'") as caught:
        import_object("cfgtest_mine:make_env")
    assert "did you mean" not in str(caught.value)


def test_path_is_left_alone_when_nothing_of_the_folder_is_used(
    own: Path, policy: FilePolicy
) -> None:
    write(own, "logging/extra.txt", "")
    before = list(sys.path)
    with pytest.raises(ConfigError, match="may not import"):
        import_object("calendar:month", allow=policy)
    with pytest.raises(ConfigError, match="there is no module 'cfgtest_elsewhere'"):
        import_object("cfgtest_elsewhere:make", allow=policy)
    with pytest.raises(ConfigError, match="another module of that name first"):
        import_object("logging:getLogger", allow=policy)
    assert sys.path == before


def test_module_that_is_shadowed_by_an_installed_one_is_refused(
    own: Path, installed: Path, policy: FilePolicy
) -> None:
    write(installed, "cfgtest_same.py", "raise SystemExit('the wrong one ran')")
    write(own, "cfgtest_same.py", MAKE)
    with pytest.raises(ConfigError, match=r"env\.entry names .*another module .*Rename yours"):
        import_object("cfgtest_same:make_env", allow=policy)
    assert "cfgtest_same" not in sys.modules


def test_packages_below_a_trusted_folder_are_not_its_own_modules(
    own: Path, policy: FilePolicy
) -> None:
    # A virtual environment inside the project's folder.
    site = own / "venv" / "site-packages"
    write(site, "cfgtest_lib.py", MAKE)
    write(own, "cfgtest_mine.py", "from cfgtest_lib import make_env\n")
    sys.path.append(str(site))
    for name in ("cfgtest_lib:make_env", "cfgtest_mine:make_env"):
        with pytest.raises(ConfigError, match="--allow-import cfgtest_lib"):
            import_object(name, allow=policy)


def test_file_policy_trusts_the_files_folder_and_the_working_directory(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = file_policy({"allow_imports": ["a.b"]}, Path("own") / "my.yaml")
    assert policy == FilePolicy(("a.b",), folders=(own.resolve(), tmp_path.resolve()))
    assert file_policy({}, Path("my.yaml")) == FilePolicy(folders=(tmp_path.resolve(),))


@pytest.mark.parametrize("allow", ["my_pkg", ["a b"], [1], [""], {"a": 1}])
def test_malformed_list_is_refused(allow: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^allow_imports is "):
        file_policy({"allow_imports": allow}, Path("x.yaml"))


@pytest.mark.parametrize("name", ["", "os", ":x", "os:", "os:a:b", "a b:c", "..x", 3, None])
def test_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^env\.entry is .*package\.module:callable"):
        import_object(name)


def test_missing_module_says_where_it_was_looked_for(installed: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        import_object("cfgtest_none.x:f", key="env.wrappers[0]")
    message = str(caught.value)
    assert message.startswith("env.wrappers[0] names the module 'cfgtest_none.x'")
    assert "no 'cfgtest_none'" in message
    assert str(installed) in message


def test_missing_requirement_of_a_module_is_told_from_a_missing_module(installed: Path) -> None:
    write(installed, "cfgtest_a.py", "import cfgtest_requirement")
    with pytest.raises(ConfigError, match=r"'cfgtest_a', which needs .*'cfgtest_requirement'"):
        import_object("cfgtest_a:f")


@pytest.mark.parametrize("text", ["1 / 0", "import sys; sys.exit(3)", "def f(:"])
def test_module_that_fails_is_reported_with_its_error(installed: Path, text: str) -> None:
    write(installed, "cfgtest_a.py", text)
    with pytest.raises(ConfigError, match=r"import failed with \w+(Error|Exit)") as caught:
        import_object("cfgtest_a:f")
    assert caught.value.__cause__ is not None


def test_missing_attribute_names_the_nearest(installed: Path) -> None:
    write(installed, "cfgtest_a.py", MAKE)
    with pytest.raises(ConfigError) as caught:
        import_object("cfgtest_a:make_enw")
    assert "'cfgtest_a' has no 'make_enw': did you mean 'make_env'?" in str(caught.value)
    assert str(installed / "cfgtest_a.py") in str(caught.value)
    with pytest.raises(ConfigError, match=r"'Env' has no 'zzz'\. Looked in"):
        import_object("cfgtest_a:Env.zzz")


def test_what_cannot_be_called_is_refused(installed: Path) -> None:
    write(installed, "cfgtest_a.py", MAKE)
    with pytest.raises(ConfigError, match="is a int and cannot be called"):
        import_object("cfgtest_a:number")


def test_import_names_of_a_file_have_to_be_listed(own: Path, installed: Path) -> None:
    write(installed, "cfgtest_kinds.py", "")
    write(own, "cfgtest_mine.py", "")
    policy = FilePolicy(("cfgtest_kinds",), folders=(own.resolve(),))
    policy.admit_registering("cfgtest_kinds", "cfgtest_kinds", "manager.import_names")
    with pytest.raises(ConfigError, match=r"manager\.import_names .*--allow-import cfgtest_mine"):
        policy.admit_registering("cfgtest_mine", "cfgtest_mine", "manager.import_names")
    allowing = FilePolicy(("cfgtest_mine",), folders=(own.resolve(),))
    allowing.admit_registering("cfgtest_mine", "cfgtest_mine", "manager.import_names")
    import_modules(["cfgtest_mine"])
    with pytest.raises(ConfigError, match=r"manager\.import_names names the module 'cfgtest_no'"):
        import_modules(["cfgtest_no"])


def test_gymnasium_id_with_a_module_is_checked(own: Path, policy: FilePolicy) -> None:
    write(own, "cfgtest_mine.py", "")
    check_env_id("CartPole-v1", policy)
    check_env_id("ALE/Pong-v5", policy)
    check_env_id("cfgtest_mine:Mine-v0", policy)
    check_env_id("cfgtest_a.b:Env-v0", FilePolicy(("cfgtest_a",)))
    with pytest.raises(ConfigError, match=r"env\.id .*--allow-import antigravity"):
        check_env_id("antigravity:Env-v0", policy)
    with pytest.raises(ConfigError, match=r"^env\.id is "):
        check_env_id(":Env-v0", policy)


def test_a_folder_of_its_name_does_not_make_an_installed_namespace_package_the_users(
    own: Path, installed: Path, policy: FilePolicy
) -> None:
    write(installed, "cfgtest_nsp/inner.py", MAKE)
    (own / "cfgtest_nsp").mkdir()
    before = list(sys.path)
    with pytest.raises(ConfigError, match="another module of that name"):
        import_object("cfgtest_nsp.inner:make_env", allow=policy)
    sys.path.insert(0, str(own))  # as the working directory is, whose part then comes first
    with pytest.raises(ConfigError, match="another module of that name"):
        import_object("cfgtest_nsp.inner:make_env", allow=policy)
    assert sys.path == [str(own), *before]
    assert "cfgtest_nsp.inner" not in sys.modules
    write(own, "cfgtest_mine/inner.py", MAKE)
    assert import_object("cfgtest_mine.inner:make_env", allow=policy)
