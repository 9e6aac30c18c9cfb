"""What a config file may set each key to, and who may say otherwise."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from envmgr.cli import main
from envmgr.cli.prepare import RunOptions, folder_of
from envmgr.config import ray_tokens
from envmgr.config.checks import Refused, integer
from envmgr.config.env_factories import env_factories
from envmgr.config.file_rules import (
    ANY,
    LOOKED_UP,
    TAKES_AWAY,
    admit,
    keys_to_allow,
    plain_values,
    unless_allowed,
)
from envmgr.config.imports import FilePolicy
from envmgr.config.schema import Section, option
from envmgr.config.sections import EnvConfig
from envmgr.config.variables import HARMLESS
from envmgr.config_file import SECTIONS, load_config, resolve_config
from envmgr.errors import ConfigError, UnknownKeyError
from tests.cases import for_each
from tests.hostile_files import (
    DANGEROUS,
    FORMS,
    GOOD,
    Key,
    config_with,
    every_key,
    hostile_texts,
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory; the configs are in a folder of it."""
    monkeypatch.chdir(tmp_path)
    for name in ("ENVMGR_ALLOW", "ENVMGR_ALLOW_ENV", "ENVMGR_ALLOW_IMPORTS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "configs").mkdir()
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path


def file_with(values: dict[str, Any]) -> str:
    Path("configs/my.yaml").write_text(yaml.safe_dump(config_with(values)))
    return "configs/my.yaml"


# -- the schema -----------------------------------------------------------------------------------


def test_every_key_says_what_a_file_may_set_it_to() -> None:
    keys = list(every_key())
    assert len(keys) > 80
    assert [key.path for key in keys if key.rule is None] == []


@for_each("key", [key for key in every_key() if key.rule is ANY])
def test_keys_that_a_file_may_set_to_anything_take_no_texts(key: Key) -> None:
    for text in hostile_texts("x", Path("/x"), 1):
        for form in FORMS:
            with pytest.raises(Refused):
                key.field.metadata["check"].convert(form(text))


def test_keys_that_take_texts_only_to_compare_them() -> None:
    rules = (LOOKED_UP, TAKES_AWAY)
    found = {key.path for key in every_key() if any(key.rule is rule for rule in rules)}
    assert found == {
        "manager.env_pool.env_id",
        "manager.env_pool.infos",
        "manager.normalization.keys",
        "manager.ray.resources",
        "manager.worker_env.allow",
        "manager.worker_env.deny",
    }


@dataclass(frozen=True, slots=True)
class Forgetful(Section):
    PATH: ClassVar[str] = "manager.forgetful"

    number: int = option(1, integer(0), "a key that says nothing of files")
    other: int = option(1, integer(0), "one that says it", from_file=ANY)


def test_a_key_that_says_nothing_may_not_be_set_by_a_file() -> None:
    env = EnvConfig()
    with pytest.raises(ConfigError, match=r"manager\.forgetful\.number is 2.*--allow forgetful\."):
        admit(Forgetful, {"number": 2}, {"number": 2}, FilePolicy(), env)
    allowed = FilePolicy(keys=("forgetful.number",))
    admit(Forgetful, {"number": 2}, {"number": 2}, allowed, env)
    admit(Forgetful, {"number": 1, "other": 3}, {"number": 1, "other": 3}, FilePolicy(), env)
    admit(Forgetful, {}, {"number": 2}, FilePolicy(), env)  # an override
    assert list(keys_to_allow(Forgetful)) == ["manager.forgetful.number"]


# -- who may say otherwise ------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, Any]] = {
    "ray.address": ("manager.ray.address", "6.6.6.6:6379"),
    "ray.runtime_env": ("manager.ray.runtime_env", {"py_executable": "sh -c id; python"}),
    "metrics.port": ("manager.metrics.port", 9100),
    "env_pool.kwargs": ("manager.env_pool.kwargs", {"vzd_path": "./trap"}),
    "collect.loggers": ("collect.loggers", ["csv", "wandb"]),
}


def test_what_is_refused_can_be_allowed_by_key() -> None:
    for plain, (path, value) in REFUSED.items():
        file = file_with({path: value})
        with pytest.raises(ConfigError) as caught:
            load_config(file)
        assert f"{path} is " in str(caught.value)
        assert f"--allow {plain}, " in str(caught.value)
        assert f"load_config(..., allow=[{plain!r}])" in str(caught.value)
        for key in {plain, path}:
            found: Any = load_config(file, allow=[key])
            for part in path.split("."):
                found = found[part]
            assert found == value
        others = [other for other in REFUSED if other != plain]
        with pytest.raises(ConfigError, match=f"--allow {re.escape(plain)}"):
            load_config(file, allow=others)


def test_overrides_and_code_may_say_anything() -> None:
    for path, value in REFUSED.values():
        override = f"{path}={yaml.safe_dump(value, default_flow_style=True).split('...')[0]}"
        load_config(file_with({}), set=[override])
        load_config(file_with({path: value}), set=[override])
        load_config(config_with({path: value}))
    file = file_with({"manager.ray.runtime_env": {"pip": ["x"]}})
    load_config(file, set=["manager.ray=null"])
    with pytest.raises(ConfigError, match=r"ray\.runtime_env is \{'pip'"):
        load_config(file, set=["manager.ray.runtime_env.env_vars={A: b}"])


def test_keys_are_allowed_by_variable_and_project_too(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"manager.metrics.port": 9100, "manager.worker_env.set": {"LD_PRELOAD": "x.so"}}
    file = file_with(values)
    monkeypatch.setenv("ENVMGR_ALLOW", " metrics.port,")
    with pytest.raises(ConfigError, match="--allow-env LD_PRELOAD"):
        load_config(file)
    project = here / "pyproject.toml"
    project.write_text('[tool.envmgr]\nallow_env = ["LD_PRELOAD"]\n')
    load_config(file)
    monkeypatch.delenv("ENVMGR_ALLOW")
    with pytest.raises(ConfigError, match=r"--allow metrics\.port"):
        load_config(file)
    project.write_text(f'{project.read_text()}allow = ["manager.metrics.port"]\n')
    load_config(file)
    beside = here / "my.yaml"  # what lies beside a config may have come with it
    beside.write_text(Path(file).read_text())
    with pytest.raises(ConfigError, match="--allow-env LD_PRELOAD"):
        load_config(beside)


def test_a_key_that_cannot_be_allowed_is_not_allowed() -> None:
    for key, message in (
        ("ray.runtime_en", r"did you mean 'ray\.runtime_env'"),
        ("env.id", r"unknown key 'env\.id' in what config files are allowed"),
    ):
        with pytest.raises(UnknownKeyError, match=message):
            load_config(file_with({}), allow=[key])
    for wrong in ("ray.runtime_env", ["a b"], [3], [""]):
        with pytest.raises(ConfigError, match="allow is "):
            load_config(file_with({}), allow=wrong)  # type: ignore[arg-type]
    for wrong in ("X", ["A=B"], [""], ["*"]):
        with pytest.raises(ConfigError, match="allow_env is "):
            load_config(file_with({}), allow_env=wrong)  # type: ignore[arg-type]
    assert set(REFUSED) < {k.removeprefix("manager.") for k in keys_to_allow(*SECTIONS.values())}


# -- variables ------------------------------------------------------------------------------------


def test_harmless_variables_may_be_set() -> None:
    values = {name: GOOD.get(name, "1") for name in HARMLESS}
    found = load_config(file_with({"manager.worker_env.set": values}))
    assert found.manager.worker_env.set == values


@for_each("name", HARMLESS)
def test_harmless_variables_take_nothing_harmful(name: str) -> None:
    texts = (*hostile_texts("x", Path("/tmp/x"), 1), "../x", "x/y", "a b", "x\n", "module://x")
    for text in (*texts, "vnc", "disk", "egl;id", "1;id", "1\n", "-", "tpu", "0x1", "WebAgg"):
        if name.endswith("VISIBLE_DEVICES") and re.fullmatch(r"[\w-]*", text):
            continue  # the name of a device that is not there
        if name == "PYGAME_HIDE_SUPPORT_PROMPT" and re.fullmatch(r"\w*", text):
            continue  # any word has the same meaning
        with pytest.raises(Refused):
            HARMLESS[name].convert(text)


@for_each("name", DANGEROUS)
def test_other_variables_are_refused_by_name(name: str) -> None:
    file = file_with({"manager.worker_env.set": {"OMP_NUM_THREADS": "1", name: "1"}})
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert f"manager.worker_env.set.{name} is '1'" in str(caught.value)
    assert f"--allow-env {name}, " in str(caught.value)
    assert f"allow_env=[{name!r}]" in str(caught.value)


def test_variables_are_allowed_one_by_one() -> None:
    file = file_with({"manager.worker_env.set": {"BROWSER": "sh", "MUJOCO_GL": "no such"}})
    with pytest.raises(ConfigError, match=r"MUJOCO_GL is 'no such'.*only to: one of egl"):
        load_config(file, allow_env=["BROWSER"])
    load_config(file, allow_env=["BROWSER", "MUJOCO_GL"])
    load_config(file, set=["manager.worker_env.set={BROWSER: x}"])
    with pytest.raises(ConfigError, match="--allow-env BROWSER"):  # what is beside it stays
        load_config(file, set=["manager.worker_env.set.MUJOCO_GL=egl"])


# -- the others -----------------------------------------------------------------------------------


def test_plain_values_name_nothing() -> None:
    check = plain_values()
    for value in ({}, {"a": 1, "b": [True, [2.5], None]}):
        assert check.convert(value) == value
    for value in ({"a": "x"}, {"a": [["x"]]}, {"a": {"b": 1}}, {"a": b"x"}, [1], "x"):
        with pytest.raises(Refused):
            check.convert(value)
    load_config(file_with({"manager.env_pool.kwargs": {"img_height": 84, "full": True}}))
    assert unless_allowed("x", but=check).says == check.allowed


def test_arguments_of_vector_envs_are_those_of_their_package() -> None:
    values = {"env.id": "highway-v0", "manager.gym_vector.vector_kwargs": {"config": {"a": "b"}}}
    with pytest.raises(ConfigError, match=r"gym_vector\.vector_kwargs has config.*highway-env"):
        load_config(file_with({**values, "manager.type": "gym_vector"}))


def test_a_timeline_replaces_nothing_else(here: Path) -> None:
    (here / "mine.json").write_text('{"scripts": {}}')
    (here / "old.json").write_text('{"traceEvents":[]}')
    (here / "folder.json").mkdir()
    os.mkfifo(here / "pipe.json")
    for path, message in (
        ("train.py", "ends with .json"),
        ("mine.json", "is no timeline"),
        ("folder.json", "is no timeline"),
        ("pipe.json", "is no timeline"),
        (".git/x.json", "hidden"),
    ):
        for form in (path, {"path": path, "events": 2000}):
            with pytest.raises(ConfigError, match=rf"manager\.trace\.path is '{path}'.*{message}"):
                load_config(file_with({"manager.trace": form}))
    for path in ("old.json", "new.json"):
        load_config(file_with({"manager.trace": path}))
    load_config(file_with({}), set=["manager.trace=mine.json"])


def test_an_episode_log_is_appended_to_nothing_else(here: Path) -> None:
    (here / "mine.jsonl").write_text('{"text": "for training"}')
    (here / "old.jsonl").write_text('{"envmgr_log":1,"what":"episode"}')
    (here / "empty.jsonl").touch()
    (here / "folder.jsonl").mkdir()
    os.mkfifo(here / "pipe.jsonl")
    for path, message in (
        ("train.py", "ends with .jsonl"),
        ("mine.jsonl", "is no episode log"),
        ("folder.jsonl", "is no episode log"),
        ("pipe.jsonl", "is no episode log"),
        (".git/x.jsonl", "hidden"),
        ("../x.jsonl", "below the working directory"),
        ("/tmp/x.jsonl", "below the working directory"),
    ):
        with pytest.raises(ConfigError, match=rf"manager\.episode_log is '{path}'.*{message}"):
            load_config(file_with({"manager.episode_log": path}))
    for path in ("old.jsonl", "empty.jsonl", "new.jsonl"):
        load_config(file_with({"manager.episode_log": path}))
    load_config(file_with({}), set=["manager.episode_log=mine.jsonl"])


def test_hidden_places_are_not_for_files(here: Path) -> None:
    (here / "link").symlink_to(here / ".config")
    for path in (".config/x", "a/.b/c", "link/x"):
        for key in ("collect.output", "manager.worker_log"):
            with pytest.raises(ConfigError, match=rf"{re.escape(key)} is '{path}'.*hidden"):
                load_config(file_with({key: path}))


def test_envs_of_ones_own_that_write_are_kept_in() -> None:
    values = {"env.entry": "envmgr.testing:FaultyEnv", "env.kwargs": {"env_id": 0, "folder": "/x"}}
    with pytest.raises(ConfigError, match=r"env\.kwargs\.folder is '/x'"):
        load_config(file_with(values))
    load_config(file_with({**values, "env.kwargs": {"env_id": 0, "folder": "below"}}))
    video = {"path": "gymnasium.wrappers:RecordVideo", "kwargs": {"video_folder": "/x"}}
    with pytest.raises(ConfigError, match=r"env\.wrappers\[0\]\.kwargs\.video_folder is '/x'"):
        load_config(file_with({"env.wrappers": [video]}))


def test_arguments_are_asked_of_who_has_given_them() -> None:
    writes = file_with({"env.entry": "envmgr.testing:FaultyEnv", "env.kwargs": {"env_id": 0}})
    resolved = resolve_config(writes, set=["env.kwargs.folder=/x"])
    [factory] = env_factories(resolved.values.env, 1, policy=resolved.file_policy)
    assert factory.kwargs == {"env_id": 0, "folder": "/x"}
    there = {"env.kwargs": {"folder": "/y"}}
    entry = ["env.id=null", "env.entry=envmgr.testing:FaultyEnv"]
    with pytest.raises(ConfigError, match=r"env\.kwargs\.folder is '/y'"):
        load_config(file_with(there), set=entry)

    known = {"env.id": "highway-v0"}
    load_config(file_with(known), set=["env.kwargs.config={duration: 9}"])
    both = {**known, "env.kwargs": {"config": {"action": {"type": "os:X"}}}}
    with pytest.raises(ConfigError, match=r"env\.kwargs has config; but"):
        load_config(file_with(both), set=["env.kwargs.config.duration=9"])
    load_config(file_with(both), set=["env.kwargs={config: {duration: 9}}"])

    video = "{path: 'gymnasium.wrappers:RecordVideo', kwargs: {video_folder: /x}}"
    load_config(file_with({}), set=[f"env.wrappers=[{video}]"])


def test_names_of_modules_are_asked_of_overrides_too() -> None:
    for override in (
        "manager.preload=[json]",
        "manager.import_names=[json]",
        "collect.policy=json:loads",
        "env.wrappers=[{path: 'json:loads'}]",
        "env.id=json:X-v0",
    ):
        with pytest.raises(ConfigError, match="--allow-import json"):
            load_config(file_with({}), set=[override])
        assert load_config(file_with({}), set=[override], allow_imports=["json"])


def test_the_kind_ray_needs_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = "2.60.0"
    monkeypatch.setattr(ray_tokens, "version", lambda name: installed)
    file = file_with({"manager.type": "ray"})
    resolve_config(file)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match=r"starts Ray 2\.60\.0.*--allow type"):
        resolve_config(file)
    resolve_config(file, allow=["type"])
    resolve_config(file, set=["manager.type=ray"])
    monkeypatch.delenv("RAY_AUTH_MODE")
    installed = "2.52.1"
    with pytest.raises(ConfigError, match=r"starts Ray 2\.52\.1"):
        resolve_config(file)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    resolve_config(file)
    installed = "2.51.0"
    with pytest.raises(ConfigError, match=r"starts Ray 2\.51\.0"):
        resolve_config(file)


# -- the command line -----------------------------------------------------------------------------


def test_the_command_line_allows_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"manager.metrics.port": 9100, "manager.worker_env.set": {"MY_WORD": "a"}}
    file = file_with(values)
    assert main(["show", file]) == 2
    assert "--allow" in capsys.readouterr().err
    assert main(["show", file, "--allow", "metrics.port", "--allow-env", "MY_WORD"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"port: 9100 +# file {re.escape(file)}\n", shown)
    assert re.search(r"MY_WORD: a +# file ", shown)
    assert main(["show", file, "--set=manager.metrics=null", "--allow-env=MY_WORD"]) == 0
    assert re.search(r"metrics: null +# set\n", capsys.readouterr().out)


def test_output_replaces_what_a_file_must_not_name() -> None:
    file = file_with({"collect.output": "/elsewhere"})
    with pytest.raises(ConfigError, match="with --output on the command line"):
        RunOptions(file).resolve()
    options = RunOptions(file, output="below")
    folder = folder_of(options, options.resolve())
    assert folder is not None
    assert folder.path == Path("below")
    folder.discard()
