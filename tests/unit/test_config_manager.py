"""The schema of a manager's config: defaults, the type and range of every key, and its messages."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest
from easydict import EasyDict
from hypothesis import given
from hypothesis import strategies as st

from envmgr.config import ManagerConfig, WorkerEnv, default_manager_config, schema_markdown
from envmgr.config.kind_sections import (
    EnvPool,
    GymVector,
    Limits,
    Metrics,
    NormalizationSection,
    Ray,
    Trace,
)
from envmgr.errors import ConfigError, UnknownKeyError
from tests.cases import for_each

# DESIGN: every key with its default.
DEFAULTS = {
    "type": "base",
    "import_names": [],
    "env_num": None,
    "episode_num": math.inf,
    "max_retry": 1,
    "retry_type": "reset",
    "retry_waiting_time": 0.1,
    "auto_reset": True,
    "reset_inplace": False,
    "start_steps": 0,
    "step_timeout": None,
    "reset_timeout": None,
    "episode_timeout": None,
    "release_timeout": 5.0,
    "connect_timeout": 60,
    "close_timeout": 5,
    "shared_memory": True,
    "copy_on_get": True,
    "context": "server",
    "wait_num": math.inf,
    "step_wait_timeout": 0,
    "num_workers": None,
    "spare_env_num": 0,
    "on_failure": "recover",
    "snapshot_every": None,
    "snapshot_copy": False,
    "max_failures": 3,
    "max_failure_share": 0.05,
    "max_failures_total": None,
    "failure_window_s": 60,
    "on_exhausted": "raise",
    "max_worker_rss_mb": None,
    "max_episodes_per_worker": None,
    "nan_policy": "allow",
    "check_actions": True,
    "strict_dtype": False,
    "same_spaces": True,
    "seed": None,
    "preload": None,
    "limits": None,
    "worker_threads": 1,
    "worker_affinity": None,
    "worker_env": None,
    "worker_log": None,
    "episode_log": None,
    "daemon": True,
    "normalize_obs": False,
    "normalize_reward": False,
    "episode_statistics": False,
    "normalization": None,
    "gym_vector": None,
    "env_pool": None,
    "ray": None,
    "metrics": None,
    "trace": None,
}

BOOLEANS = [key for key, value in DEFAULTS.items() if isinstance(value, bool)]
BOOLEANS.remove("check_actions")
NOT_BOOLEANS: list[Any] = [0, 1, "true", None, [], 1.0]
NOT_NUMBERS: list[Any] = [True, False, np.True_, "1", [1], {}, math.nan]
NOT_COUNTS: list[Any] = [*NOT_NUMBERS, 0, -1, 1.5, -math.inf]
NOT_SECONDS: list[Any] = [*NOT_NUMBERS, -0.1, math.inf, -math.inf, 1e7, 10**400]


def accepted() -> list[tuple[str, Any, Any]]:
    """Each key with values it takes, and what they become."""
    rows: list[tuple[str, Any, Any]] = [
        ("type", "subprocess", "subprocess"),
        ("import_names", ["a", "b.c"], ("a", "b.c")),
        ("import_names", ("a",), ("a",)),
        ("preload", ["a", "b.c", "__main__"], ("a", "b.c", "__main__")),
        ("preload", [], ()),
        ("preload", False, False),
        ("preload", None, None),
        ("env_num", 1, 1),
        ("env_num", 65536, 65536),
        ("env_num", np.int64(4), 4),
        ("env_num", 8.0, 8),
        ("env_num", None, None),
        ("retry_type", "renew", "renew"),
        ("max_failures", 0, 0),
        ("max_failure_share", 0, 0.0),
        ("max_failure_share", 1, 1.0),
        ("max_failures_total", 0, 0),
        ("max_failures_total", 10**6, 10**6),
        ("max_failures_total", None, None),
        ("max_worker_rss_mb", 512, 512.0),
        ("max_worker_rss_mb", 0.5, 0.5),
        ("max_episodes_per_worker", 1, 1),
        ("num_workers", None, None),
        ("step_wait_timeout", None, 0.0),
        ("close_timeout", 0, 0.0),
        ("on_failure", "raise", "raise"),
        ("snapshot_every", None, None),
        ("on_exhausted", "drop", "drop"),
        ("nan_policy", "abnormal", "abnormal"),
        ("nan_policy", "raise", "raise"),
        ("check_actions", "strict", "strict"),
        ("check_actions", False, False),
        ("seed", 0, 0),
        ("seed", 2**100, 2**100),
        ("seed", [1, None, 3], (1, None, 3)),
        ("seed", range(3), (0, 1, 2)),
        ("seed", np.arange(3), (0, 1, 2)),
        ("seed", {0: 7, 3: None}, {0: 7, 3: None}),
        ("seed", {"0": 7, np.int64(3): np.int32(1)}, {0: 7, 3: 1}),
        ("worker_affinity", [0, 1], (0, 1)),
        ("worker_affinity", [[0, 1], [2]], ((0, 1), (2,))),
        ("worker_env", {"deny": ["X*"]}, WorkerEnv(deny=("X*",))),
        ("worker_env", {"allow": [], "set": {"A": "1"}}, WorkerEnv(allow=(), set={"A": "1"})),
        ("worker_env", {"set": None}, WorkerEnv()),
        ("worker_env", None, None),
        ("metrics", {}, Metrics()),
        ("limits", {}, Limits()),
        ("limits", {"starting": 8.0, "starts_per_s": 5}, Limits(8, 5.0)),
        ("limits", {"shared": {"browser": 4.0}}, Limits(shared={"browser": 4})),
        ("trace", "a.json", Trace("a.json")),
        ("trace", {"path": "a.json", "events": 1e4}, Trace("a.json", 10_000)),
        ("metrics", {"port": 9100.0}, Metrics(9100)),
        ("worker_log", "logs", "logs"),
        ("episode_log", "log.jsonl", "log.jsonl"),
        ("start_steps", 100, 100),
        ("gym_vector", {"autoreset_mode": "SameStep"}, GymVector(autoreset_mode="SameStep")),
        ("gym_vector", GymVector(), GymVector()),
        ("normalization", {"gamma": 1}, NormalizationSection(gamma=1.0)),
        ("env_pool", {"env_id": "Pong-v5", "stack_num": 4}, EnvPool(env_id="Pong-v5", stack_num=4)),
        ("ray", {"address": "auto", "num_cpus": 2}, Ray(address="auto", num_cpus=2.0)),
        ("ray", {"resources": {"big": 1}}, Ray(resources={"big": 1.0})),
    ]
    for key in BOOLEANS:
        rows += [(key, True, True), (key, False, False), (key, np.False_, False)]
    for key in ("episode_num", "wait_num"):
        rows += [(key, math.inf, math.inf), (key, np.float32("inf"), math.inf)]
        rows += [(key, 3, 3), (key, 3.0, 3)]
    for key in ("max_retry", "worker_threads", "max_episodes_per_worker"):
        rows += [(key, 2, 2), (key, np.uint8(2), 2)]
    limits = ("step_timeout", "reset_timeout", "episode_timeout", "connect_timeout")
    for key in (*limits, "failure_window_s"):
        rows += [(key, 2, 2.0), (key, 0.25, 0.25), (key, np.float32(0.5), 0.5), (key, 1e6, 1e6)]
    for key in ("step_timeout", "reset_timeout", "episode_timeout", "max_worker_rss_mb"):
        rows += [(key, None, None)]
    rows += [("max_episodes_per_worker", None, None)]
    for key in ("retry_waiting_time", "close_timeout", "step_wait_timeout", "release_timeout"):
        rows += [(key, 0, 0.0), (key, 2, 2.0)]
    rows += [("context", word, word) for word in ("server", "fork", "spawn", "forkserver")]
    return rows


def refused() -> list[tuple[str, Any]]:
    """Each key with values it does not take."""
    rows: list[tuple[str, Any]] = [("env_num", 65537), ("max_worker_rss_mb", math.inf)]
    for key in BOOLEANS:
        rows += [(key, value) for value in NOT_BOOLEANS]
    counts = ("env_num", "max_retry", "worker_threads", "max_episodes_per_worker")
    for key in (*counts, "snapshot_every"):
        rows += [(key, value) for value in [*NOT_COUNTS, math.inf]]
    for key in ("episode_num", "wait_num"):
        rows += [(key, value) for value in [*NOT_COUNTS, None, "inf", ".inf"]]
    for key in ("worker_log", "episode_log"):
        rows += [(key, value) for value in ["", " ", 1, True, ["a"]]]
    for key in ("max_failures", "spare_env_num", "start_steps"):
        rows += [(key, value) for value in [*NOT_NUMBERS, -1, 0.5, math.inf, None]]
    rows += [("max_failure_share", value) for value in [*NOT_NUMBERS, -0.1, 1.5, math.nan]]
    rows += [("max_failures_total", value) for value in [*NOT_NUMBERS, -1, 0.5, math.inf]]
    limits = ("step_timeout", "reset_timeout", "episode_timeout", "connect_timeout")
    for key in (*limits, "failure_window_s"):
        rows += [(key, value) for value in [*NOT_SECONDS, 0]]
    for key in ("retry_waiting_time", "close_timeout", "step_wait_timeout", "release_timeout"):
        rows += [(key, value) for value in NOT_SECONDS]
    for key in ("connect_timeout", "failure_window_s", "retry_waiting_time", "release_timeout"):
        rows += [(key, None)]
    rows += [("close_timeout", None)]
    rows += [("max_worker_rss_mb", value) for value in [*NOT_NUMBERS, 0, -1]]
    for key in ("retry_type", "context", "on_failure", "on_exhausted", "nan_policy"):
        rows += [(key, value) for value in ["nonsense", "", None, True, 1, ["fork"]]]
    rows += [("check_actions", value) for value in ["true", 1, None, "strictly"]]
    rows += [("num_workers", value) for value in [0, -1, True, "all", 1.5]]
    rows += [("type", value) for value in ["", "  ", None, 3, ["base"]]]
    rows += [("preload", value) for value in [True, "torch", 0, 1, [1], ["a b"], ["a:b"], {}]]
    rows += [("import_names", value) for value in ["my_pkg", None, [1], ["a b"], ["a:b"], [""]]]
    seeds = [-1, 1.5, True, "1", [], [1, -1], ["a"], {0: -1}, {-1: 0}, {"a": 1}, {0.5: 1}]
    rows += [("seed", value) for value in [*seeds, {0: 1, "0": 2}, np.zeros((2, 2)), {True: 1}]]
    cores = [0, "0", [], [[]], [-1], [0, [1]], [[0], 1], [True], {0: 1}]
    rows += [("worker_affinity", value) for value in cores]
    envs = ["X", [], {"allow": "X"}, {"deny": [1]}, {"set": ["A"]}, {"set": {"A": 1}}]
    envs += [{"set": {"": "x"}}, {"set": {"A=B": "x"}}, {"set": {"A": "\0"}}, {"set": {1: "x"}}]
    rows += [("worker_env", value) for value in envs]
    rows += [("gym_vector", 1), ("gym_vector", []), ("env_pool", True), ("normalization", True)]
    rows += [("ray", "auto"), ("ray", [])]
    rows += [("metrics", value) for value in [True, 1, [], "on"]]
    rows += [("limits", value) for value in [True, 8, [], "all"]]
    rows += [("trace", value) for value in [True, 1, []]]
    return rows


@for_each("key, value, normal", accepted())
def test_accepted_value_gets_its_normal_form(key: str, value: Any, normal: Any) -> None:
    found = getattr(ManagerConfig.from_mapping({key: value}), key)
    assert found == normal
    assert type(found) is type(normal)


@for_each("key, value", refused())
def test_refused_value_is_named_with_its_path(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ManagerConfig.from_mapping({key: value})
    message = str(caught.value)
    assert re.match(rf"manager\.{key}[\w.]* is ", message), value
    assert "must be" in message, value
    assert "\n" not in message, value


def test_every_key_is_tried_with_good_and_bad_values() -> None:
    keys = set(DEFAULTS)
    assert {row[0] for row in accepted()} | {"spare_env_num"} == keys
    assert {row[0] for row in refused()} == keys


def test_defaults_are_those_of_the_table() -> None:
    assert ManagerConfig().to_dict() == DEFAULTS
    assert list(default_manager_config()) == list(DEFAULTS)
    assert default_manager_config() == DEFAULTS
    assert ManagerConfig.from_mapping(None) == ManagerConfig.from_mapping({}) == ManagerConfig()


def test_what_resumes_has_to_be_saved() -> None:
    resumes = {"on_failure": "resume", "snapshot_every": 5}
    assert ManagerConfig.from_mapping(resumes).snapshot_every == 5
    for changed in ({"snapshot_every": None}, {"on_failure": "recover"}):
        with pytest.raises(ConfigError, match="Set both"):
            ManagerConfig.from_mapping({**resumes, **changed})
    for further in ({"auto_reset": False}, {"spare_env_num": 1}):
        with pytest.raises(ConfigError, match="takes the place of an automatic"):
            ManagerConfig.from_mapping({**resumes, **further})


def test_message_shows_value_and_what_is_allowed() -> None:
    with pytest.raises(ConfigError) as caught:
        ManagerConfig.from_mapping({"wait_num": 0})
    assert str(caught.value) == (
        "manager.wait_num is 0 (int), but must be an integer >= 1, or .inf. Correct the value, or "
        "leave the key out to get its default."
    )
    with pytest.raises(ConfigError, match=r"manager\.context is 'serve' .*did you mean 'server'"):
        ManagerConfig.from_mapping({"context": "serve"})
    with pytest.raises(ConfigError, match=r"manager\.seed is \[1, 'x'\] .*entry 1 is 'x'"):
        ManagerConfig.from_mapping({"seed": [1, "x"]})


class BrokenRepr:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "value",
    [BrokenRepr(), 10**5000, "x" * 10**6, np.zeros(10**5)],
    ids=["broken repr", "huge int", "long text", "array"],
)
def test_message_survives_values_that_cannot_be_shown(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ManagerConfig.from_mapping({"context": value})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("wait_nm", "wait_num"),
        ("envnum", "env_num"),
        ("Step_Timeout", "step_timeout"),
        ("step_timeot", "step_timeout"),
        ("shared_mem", "shared_memory"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(UnknownKeyError, match=f"unknown key '{key}' in manager.*'{nearest}'"):
        ManagerConfig.from_mapping({key: 1})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("max_episode_steps", r"env_kwargs={'max_episode_steps': n} .*wrappers\.TimeLimit"),
        ("time_limit", r"gymnasium\.wrappers\.TimeLimit"),
        ("wrapper_class", r"env\.wrappers"),
        ("vectorization_mode", "did you mean type"),
        ("vec_env_cls", "did you mean type"),
        ("vector_kwargs", "the manager's own keys"),
    ],
)
def test_names_that_others_have_are_known(key: str, meant: str) -> None:
    with pytest.raises(UnknownKeyError, match=meant) as caught:
        ManagerConfig.from_mapping({key: 1})
    assert "episode_timeout" not in str(caught.value), "it means nothing without leases"


def test_unknown_key_that_is_like_no_other_lists_the_known_ones() -> None:
    with pytest.raises(UnknownKeyError) as caught:
        ManagerConfig.from_mapping({"zzz": 1})
    assert "did you mean" not in str(caught.value)
    assert all(key in str(caught.value) for key in DEFAULTS)
    with pytest.raises(UnknownKeyError, match="unknown key 3 in manager"):
        ManagerConfig.from_mapping({3: 1})  # type: ignore[dict-item]
    with pytest.raises(UnknownKeyError, match=r"'alow' in manager\.worker_env.*'allow'"):
        ManagerConfig.from_mapping({"worker_env": {"alow": []}})
    with pytest.raises(UnknownKeyError, match="wait_num"):
        ManagerConfig.from_mapping({}, preset={"wait_nmu": 1})


@pytest.mark.parametrize("cfg", [[], "base", 3, [("type", "base")]])
def test_config_that_is_no_mapping(cfg: Any) -> None:
    with pytest.raises(ConfigError, match=r"manager is .* must be a mapping"):
        ManagerConfig.from_mapping(cfg)


def test_preset_is_below_the_users_keys_and_above_the_defaults() -> None:
    preset = {"type": "async_subprocess", "wait_num": 2}
    config = ManagerConfig.from_mapping({"max_retry": 5}, preset)
    assert (config.type, config.wait_num, config.max_retry) == ("async_subprocess", 2, 5)
    assert ManagerConfig.from_mapping({"wait_num": 7}, preset).wait_num == 7
    assert default_manager_config(preset) == {**DEFAULTS, **preset}


def test_preset_and_mapping_inside_a_key_are_merged() -> None:
    preset = {"worker_env": {"deny": ["A"], "set": {"X": "1"}}}
    config = ManagerConfig.from_mapping({"worker_env": {"set": {"Y": "2"}}}, preset)
    assert config.worker_env == WorkerEnv(deny=("A",), set={"X": "1", "Y": "2"})


def test_seeds_by_env_id_are_replaced_and_not_merged() -> None:
    config = ManagerConfig.from_mapping({"seed": {1: 5}}, {"seed": {0: 3}})
    assert config.seed == {1: 5}
    assert ManagerConfig.from_mapping({"seed": {1: 5}}, {"seed": 3}).seed == {1: 5}


def test_arguments_are_never_changed() -> None:
    cfg = EasyDict(seed=[1, 2], worker_env={"set": {"A": "1"}}, import_names=["a"])
    preset = EasyDict(worker_env={"deny": ["B"]}, wait_num=2)
    before = copy.deepcopy(cfg), copy.deepcopy(preset)
    config = ManagerConfig.from_mapping(cfg, preset)
    values = config.to_dict()
    values["worker_env"]["set"]["C"] = "3"
    values["seed"].append(9)
    assert (cfg, preset) == before
    assert config.to_dict()["seed"] == [1, 2]


def test_default_config_is_fresh_each_time() -> None:
    first = default_manager_config()
    first.import_names.append("x")
    first.env_num = 3
    assert default_manager_config() == DEFAULTS


def test_default_config_has_attributes() -> None:
    cfg = default_manager_config({"worker_env": {"set": {"A": "1"}}})
    assert isinstance(cfg, EasyDict)
    assert cfg.episode_num == math.inf
    assert cfg.worker_env.set.A == "1"


def test_config_is_frozen_and_can_be_pickled() -> None:
    config = ManagerConfig.from_mapping({"seed": {0: 1}, "worker_env": {"set": {"A": "1"}}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.env_num = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def test_to_dict_makes_the_same_config_again() -> None:
    cfg = {
        "seed": {0: 1, 1: None},
        "worker_env": {"deny": ["X"]},
        "worker_affinity": [[0], [1]],
        "import_names": ["a.b"],
    }
    config = ManagerConfig.from_mapping(cfg)
    assert config.to_dict()["worker_affinity"] == [[0], [1]]
    assert ManagerConfig.from_mapping(config.to_dict()) == config
    assert ManagerConfig.from_mapping(default_manager_config(cfg)) == config


def test_direct_construction_and_replace_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"manager\.max_retry"):
        ManagerConfig(max_retry=0)
    with pytest.raises(ConfigError, match=r"manager\.context"):
        dataclasses.replace(ManagerConfig(), context="nonsense")  # type: ignore[arg-type]


def test_reset_inplace_needs_auto_reset() -> None:
    ManagerConfig(reset_inplace=True)
    ManagerConfig(auto_reset=False)
    with pytest.raises(ConfigError, match=r"manager\.reset_inplace .* manager\.auto_reset"):
        ManagerConfig(reset_inplace=True, auto_reset=False)


def test_with_env_num_takes_the_number_of_factories() -> None:
    assert ManagerConfig().with_env_num(5).env_num == 5
    assert ManagerConfig(env_num=5).with_env_num(5).env_num == 5
    with pytest.raises(ConfigError, match=r"manager\.env_num is 4, but env_fn holds 5"):
        ManagerConfig(env_num=4).with_env_num(5)
    with pytest.raises(ConfigError, match=r"manager\.env_num is 0"):
        ManagerConfig().with_env_num(0)


def test_seeds_have_to_fit_the_envs() -> None:
    with pytest.raises(ConfigError, match=r"manager\.seed is a list of 2 seeds for 3 envs"):
        ManagerConfig(env_num=3, seed=(1, 2))
    config = ManagerConfig(seed=(1, 2))
    assert config.with_env_num(2).seed == (1, 2)
    with pytest.raises(ConfigError, match=r"2 seeds for 3 envs"):
        config.with_env_num(3)
    assert ManagerConfig(seed={1: 5}).with_env_num(2).seed == {1: 5}
    with pytest.raises(ConfigError, match=r"manager\.seed names env_ids \[2, 9\]"):
        ManagerConfig(seed={9: 1, 2: 5}).with_env_num(2)


@pytest.mark.parametrize("num_workers", [1, 2, 4, None, "auto"])
def test_envs_may_share_workers(num_workers: Any) -> None:
    config = ManagerConfig(num_workers=num_workers).with_env_num(4)
    assert config.num_workers == num_workers


def test_more_workers_than_envs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"manager\.num_workers is 5, but there are 4 envs"):
        ManagerConfig(num_workers=5).with_env_num(4)
    with pytest.raises(ConfigError, match=r"is 2, but there is 1 env .* with env_num"):
        ManagerConfig(num_workers=2, env_num=1)


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("auto_reset", False, "turn auto_reset on"),
        ("num_workers", "auto", "Leave one of the two out"),
        ("num_workers", 2, "Leave one of the two out"),
    ],
)
def test_spares_are_refused_where_they_are_of_no_use(key: str, value: Any, advice: str) -> None:
    cfg = {"type": "subprocess", "spare_env_num": 1, "env_num": 4, key: value}
    with pytest.raises(ConfigError, match=rf"manager\.spare_env_num is 1, but .*{advice}"):
        ManagerConfig.from_mapping(cfg)


def test_spares_are_accepted_where_each_env_has_a_worker() -> None:
    config = ManagerConfig(type="subprocess", spare_env_num=2, num_workers=4)
    assert config.with_env_num(4).spare_env_num == 2
    with pytest.raises(ConfigError, match=r"num_workers is 4"):
        config.with_env_num(5)


def test_markdown_table_has_a_row_for_every_key() -> None:
    lines = schema_markdown().splitlines()
    assert lines[0] == "| key | default | allowed | in a file | meaning |"
    assert [line.split("`")[1] for line in lines[2:]] == list(DEFAULTS)
    assert all(line.replace("\\|", "").count("|") == 6 for line in lines)
    assert "| `episode_num` | `.inf` | an integer >= 1, or .inf |" in schema_markdown()
    assert "| `wait_num` | `2 async, .inf sync` |" in schema_markdown()
    assert "| `import_names` | `[]` |" in schema_markdown()


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(list(DEFAULTS)) | st.text(max_size=8), _anything))
def test_no_config_gives_another_error_than_config_error(cfg: dict[str, Any]) -> None:
    try:
        config = ManagerConfig.from_mapping(cfg)
    except ConfigError:
        return
    assert ManagerConfig.from_mapping(config.to_dict()) == config


def test_the_cfg_type_of_di_engine_configs_is_passed_over() -> None:
    compiled = {"cfg_type": "BaseEnvManagerDict", "max_retry": 2}
    assert ManagerConfig.from_mapping(compiled) == ManagerConfig(max_retry=2)
    assert "cfg_type" in compiled
