"""Packages that a config file may have imported: which ids are theirs, and that they are those."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

from envmgr.config import EnvConfig, imports, known_envs
from envmgr.config.allow_list import Allowed, allowed_by_user
from envmgr.config.env_factories import env_factories
from envmgr.config.file_rules import admit
from envmgr.config.imports import (
    FilePolicy,
    check_env_id,
    file_policy,
    import_modules,
    import_object,
)
from envmgr.config.known_envs import (
    KNOWN_PACKAGES,
    KnownPackage,
    nearest_package,
    package_of_id,
)
from envmgr.errors import ConfigError, MissingDependencyError, UnknownKeyError

IDS = {
    "ALE/Pong-v5": "ale-py",
    "PongNoFrameskip-v4": "ale-py",
    "Breakout-v4": "ale-py",
    "Pong-ram-v0": "ale-py",
    "MiniGrid-Empty-5x5-v0": "minigrid",
    "BabyAI-GoToObj-v0": "minigrid",
    "MiniWorld-Hallway-v0": "miniworld",
    "FetchReachDense-v4": "gymnasium-robotics",
    "PointMaze_UMaze-v3": "gymnasium-robotics",
    "Meta-World/MT1": "metaworld",
    "dm_control/cartpole-balance-v0": "shimmy",
    "mo-hopper-v5": "mo-gymnasium",
    "highway-fast-v0": "highway-env",
    "VizdoomBasic-v1": "vizdoom",
    "PandaReachDense-v3": "panda-gym",
    "AntBulletEnv-v0": "pybullet-envs-gymnasium",
    "PyFlyt/QuadX-Hover-v4": "PyFlyt",
    "SafetyPointGoal1Gymnasium-v0": "safety-gymnasium",
    "gym_pusht/PushT-v0": "gym-pusht",
    "NetHackScore-v0": "nle",
    "MiniHack-Room-15x15-v0": "minihack",
}

ENV = """
import gymnasium
class Env(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space = action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, render_mode=None, **kwargs): self.render_mode = render_mode
def make_env(**kwargs): return Env()
for name in ("Cfgtest/One-v0", "Cfgtest-Two-v0", "cfgtest-other-v0"):
    if name not in gymnasium.registry:
        gymnasium.register(name, entry_point="cfgtest_known:Env")
"""
LOOSE = KnownPackage("cfgtest_known", "cfgtest-known", "", ("Cfgtest",), ("Cfgtest-*",), False)
PLAIN = KnownPackage(
    "cfgtest_known", "cfgtest-known", "", ("Cfgtest",), ("Cfgtest-*",), True, ("cfgtest_known",)
)


@pytest.fixture(autouse=True)
def _all_is_undone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(known_envs, "KNOWN_PACKAGES", (*KNOWN_PACKAGES, PLAIN))
    monkeypatch.setattr(imports, "_OF_CLASSES", (*imports._OF_CLASSES, "cfgtest_known"))
    monkeypatch.delenv("ENVMGR_ALLOW_IMPORTS", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield
    sys.modules.pop("cfgtest_known", None)
    for name in [name for name in gymnasium.registry if "cfgtest" in name.lower()]:
        del gymnasium.registry[name]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Where packages are installed."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    sys.path.append(str(folder))
    return folder


@pytest.fixture
def policy(tmp_path: Path) -> FilePolicy:
    """Of a config in a folder of its own."""
    (tmp_path / "own").mkdir()
    return file_policy({}, tmp_path / "own" / "run.yaml")


def put_module(folder: Path, text: str = ENV) -> None:
    (folder / "cfgtest_known.py").write_text(text)
    importlib.invalidate_caches()


def put_metadata(folder: Path, url: dict[str, object] | None = None) -> None:
    info = folder / "cfgtest_known-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cfgtest-known\nVersion: 1.0\n")
    if url is not None:
        (info / "direct_url.json").write_text(json.dumps(url))


def install(site: Path, text: str = ENV) -> None:
    put_module(site, text)
    put_metadata(site)


def build(policy: FilePolicy | None, env_id: str = "Cfgtest/One-v0", /, **kwargs: object) -> str:
    """Return what the env of a config is, which is a file's if there is a policy."""
    section = {"id": env_id, "kwargs": kwargs}
    if policy is not None:
        admit(EnvConfig, section, section, policy, EnvConfig.from_mapping(section))
    (make,) = env_factories(section, 1, policy=policy)
    return type(make().unwrapped).__name__


# -- the table ------------------------------------------------------------------------------------


def test_ids_are_known_by_namespace_or_pattern() -> None:
    assert {env_id: package_of_id(env_id).distribution for env_id in IDS} == IDS  # type: ignore[union-attr]
    for other in ("Pong/ALE-v5", "ALE", "alE/Pong-v5", "Pong-v5", "MiniGridX-v0", "Ant-v2", ""):
        assert package_of_id(other) is None


def test_gymnasiums_own_ids_are_in_nobodys_name() -> None:
    own = [s.id for s in gymnasium.registry.values() if "gymnasium.envs" in str(s.entry_point)]
    assert len(own) > 30
    # Two are placeholders for those of shimmy.
    taken = [env_id for env_id in own if package_of_id(env_id) and "GymV2" not in env_id]
    assert taken == []


def test_entries_are_in_good_order() -> None:
    namespaces = [name for known in KNOWN_PACKAGES for name in known.namespaces]
    assert len(namespaces) == len(set(namespaces))
    modules = [known.top for known in KNOWN_PACKAGES]
    assert len(modules) == len(set(modules))
    for known in KNOWN_PACKAGES:
        assert known.namespaces or known.ids
        repository, _, file = known.source.partition(": ")
        assert repository.count("/") == 1
        assert file.split("/")[0]
        assert all(module.startswith(f"{known.top}.") for module in known.class_modules)


@pytest.mark.parametrize(
    ("env_id", "begins", "distribution"),
    [
        ("ALEE/Pong-v5", "ALE", "ale-py"),
        ("MiniGird-Empty-5x5-v0", "MiniGrid", "minigrid"),
        ("dm_controll/cartpole-balance-v0", "dm_control", "shimmy"),
        ("metaworld/MT1", "Meta-World", "metaworld"),
    ],
)
def test_the_nearest_is_named(env_id: str, begins: str, distribution: str) -> None:
    found = nearest_package(env_id)
    assert found is not None
    assert (found[0], found[1].distribution) == (begins, distribution)
    with pytest.raises(ConfigError, match=f"begin with '{begins}' are of .*{distribution}"):
        build(None, env_id)


# -- what is imported by it -----------------------------------------------------------------------


def test_an_installed_package_needs_neither_list_nor_name(site: Path, policy: FilePolicy) -> None:
    install(site)
    assert build(policy) == "Env"
    assert build(policy, "Cfgtest-Two-v0", depth=3) == "Env"
    assert build(None, "Cfgtest/One-v0") == "Env"
    with pytest.raises(ConfigError, match=r"nearest ids are .*Cfgtest/One-v0"):
        build(policy, "Cfgtest/Onn-v0")


def admit_registering(name: str, policy: FilePolicy) -> None:
    policy.admit_registering(name, name, "manager.import_names")


def test_its_name_is_allowed_where_all_is_in_the_import(site: Path, policy: FilePolicy) -> None:
    install(site)
    check_env_id("cfgtest_known:Cfgtest/One-v0", policy)
    admit_registering("cfgtest_known", policy)
    assert "cfgtest_known" not in sys.modules
    import_modules(["cfgtest_known"])
    assert "cfgtest_known" in sys.modules
    admit_registering("gymnasium.envs.classic_control", policy)
    admit_registering("envmgr.testing", policy)
    (site / "cfgtest.py").write_text("")
    for name in ("cfgtest_known.more", "cfgtest"):
        with pytest.raises(ConfigError, match="may not import"):
            admit_registering(name, policy)


def test_what_is_not_installed_is_named(policy: FilePolicy) -> None:
    for each in (policy, None):
        with pytest.raises(MissingDependencyError, match="pip install cfgtest-known"):
            build(each)
    with pytest.raises(MissingDependencyError, match=r"manager\.import_names is 'cfgtest_known'"):
        admit_registering("cfgtest_known", policy)
    with pytest.raises(MissingDependencyError, match="pip install cfgtest-known"):
        check_env_id("cfgtest_known:Cfgtest/One-v0", policy)


@pytest.mark.parametrize("place", ["own", "work"])
@pytest.mark.parametrize("on_path", [True, False])
def test_a_file_of_that_name_is_not_the_package(
    tmp_path: Path, policy: FilePolicy, place: str, on_path: bool
) -> None:
    """Beside the config or in the working directory, with forged metadata too."""
    put_module(tmp_path / place, "raise SystemExit('the stranger ran')")
    put_metadata(tmp_path / place)
    if on_path:
        sys.path.insert(0, str(tmp_path / place))
    with pytest.raises(MissingDependencyError, match="not installed"):
        build(policy)
    with pytest.raises(MissingDependencyError, match="not installed"):
        admit_registering("cfgtest_known", policy)
    assert "cfgtest_known" not in sys.modules


def test_a_file_that_hides_the_package_is_not_imported(
    tmp_path: Path, site: Path, policy: FilePolicy
) -> None:
    install(site)
    put_module(tmp_path / "work", "raise SystemExit('the stranger ran')")
    sys.path.insert(0, "")  # as `python -m` has it
    for each in (policy, None):
        with pytest.raises(ConfigError, match=r"finds the module 'cfgtest_known' in .*work"):
            build(each)
    sys.path.remove("")
    importlib.invalidate_caches()
    assert build(policy) == "Env"  # where the file hides nothing it does no harm


def test_a_folder_that_mixes_itself_into_the_package_is_noticed(
    tmp_path: Path, site: Path, policy: FilePolicy
) -> None:
    """Packages without an `__init__.py` are all folders of that name together."""
    put_metadata(site)
    for place in (site, tmp_path / "work"):
        (place / "cfgtest_known").mkdir()
    sys.path.insert(0, str(tmp_path / "work"))
    with pytest.raises(ConfigError, match=r"in .*work and in .*site-packages"):
        build(policy)


def test_an_editable_install_is_the_package(tmp_path: Path, site: Path, policy: FilePolicy) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    put_module(project / "src")
    put_metadata(site, {"url": (tmp_path / "other").as_uri(), "dir_info": {"editable": True}})
    sys.path.append(str(project / "src"))
    with pytest.raises(ConfigError, match="finds the module"):
        build(policy)
    file = site / "cfgtest_known-1.0.dist-info" / "direct_url.json"
    file.write_text(json.dumps({"url": project.as_uri(), "dir_info": {}}))
    with pytest.raises(ConfigError, match="finds the module"):
        build(policy)
    file.write_text(json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}}))
    assert build(policy) == "Env"


def test_what_the_list_has_may_come_from_anywhere(tmp_path: Path) -> None:
    put_module(tmp_path / "work")
    sys.path.insert(0, str(tmp_path / "work"))
    assert build(FilePolicy(("cfgtest_known",), folders=(tmp_path / "work",))) == "Env"


def test_classes_of_envs_can_be_named_where_the_table_says_so(
    site: Path, policy: FilePolicy
) -> None:
    install(site)
    assert import_object("cfgtest_known:Env", allow=policy)(depth=1)
    for name in ("cfgtest_known:make_env", "cfgtest_known:gymnasium.make"):
        with pytest.raises(ConfigError, match="may not import"):
            import_object(name, allow=policy)


def test_classes_of_a_package_that_is_not_there(policy: FilePolicy) -> None:
    with pytest.raises(MissingDependencyError, match=r"env\.entry is 'cfgtest_known:Env'"):
        import_object("cfgtest_known:Env", allow=policy)


# -- arguments ------------------------------------------------------------------------------------


def test_arguments_are_refused_where_they_can_name_code(
    site: Path, policy: FilePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_envs, "KNOWN_PACKAGES", (LOOSE,))
    install(site)
    refused = r"env\.kwargs has config, path; but .*cfgtest-known.*--allow-import cfgtest_known"
    arguments = {"config": "os.system", "path": "x"}
    with pytest.raises(ConfigError, match=refused):
        build(policy, **arguments)
    assert "cfgtest_known" not in sys.modules
    with pytest.raises(ConfigError, match=refused):
        build(policy, "cfgtest_known:cfgtest-other-v0", **arguments)
    assert build(policy, render_mode="rgb_array") == "Env"
    import_modules(["cfgtest_known"])
    for other in ("cfgtest-other-v0", "cfgtest-other", "Cfgtest-Two", "Cfgtest/One-v7"):
        with pytest.raises(ConfigError, match=refused):  # by who has registered it
            build(policy, other, **arguments)
    assert build(FilePolicy(("cfgtest_known",), folders=policy.folders), **arguments) == "Env"
    assert build(None, **arguments) == "Env"


def test_an_env_of_the_old_gym_is_not_imported_through_shimmy(policy: FilePolicy) -> None:
    with pytest.raises(ConfigError, match="can name code"):
        build(policy, "GymV26Environment-v0", env_id="os:X")


# -- lists that hold for all configs --------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The working directory's `pyproject.toml`."""
    return tmp_path / "work" / "pyproject.toml"


def test_the_variable_and_the_project_allow(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "own"
    assert allowed_by_user(config) == Allowed()
    monkeypatch.setenv("ENVMGR_ALLOW_IMPORTS", " my_a, my_b.c ,")
    project.write_text('[tool.other]\nx = 1\n[tool.envmgr]\nallow_imports = ["my_d"]\n')
    assert allowed_by_user(config) == Allowed(("my_a", "my_b.c", "my_d"))
    assert file_policy({"allow_imports": ["my_e"]}, config / "x.yaml").imports == (
        "my_e",
        "my_a",
        "my_b.c",
        "my_d",
    )
    assert file_policy({}, Path("configs") / "x.yaml").imports == ("my_a", "my_b.c", "my_d")


def test_a_project_file_beside_the_config_allows_nothing(tmp_path: Path, project: Path) -> None:
    project.write_text('[tool.envmgr]\nallow_imports = ["os"]\n')
    assert file_policy({}, Path("run.yaml")).imports == ()  # the working directory is that folder
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "work")
    assert file_policy({}, link / "run.yaml").imports == ()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "pyproject.toml").write_text("[tool.envmgr]\nwrong = 1\n")
    assert file_policy({}, tmp_path / "own" / "run.yaml").imports == ("os",)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[tool.envmgr]\nallow_import = []\n", UnknownKeyError, "did you mean 'allow_imports'"),
        ("[tool.envmgr]\nallow_imports = 'os'\n", ConfigError, r"tool\.envmgr\.allow_imports"),
        ("[tool.envmgr]\nallow_imports = ['a b']\n", ConfigError, r"tool\.envmgr\.allow_imports"),
        ("tool.envmgr = 3\n", ConfigError, "cannot be read"),
        ("[tool.envmgr\n", ConfigError, "cannot be read"),
    ],
)
def test_a_malformed_project_file_is_refused(
    tmp_path: Path, project: Path, text: str, error: type[Exception], message: str
) -> None:
    project.write_text(text)
    with pytest.raises(error, match=message):
        allowed_by_user(tmp_path)


def test_a_project_file_without_a_word_of_envmgr_is_not_read(tmp_path: Path, project: Path) -> None:
    project.write_text("[tool.other\n")
    assert allowed_by_user(tmp_path) == Allowed()


def test_a_malformed_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVMGR_ALLOW_IMPORTS", "os:system")
    with pytest.raises(ConfigError, match=r"\$ENVMGR_ALLOW_IMPORTS is "):
        allowed_by_user(tmp_path)
