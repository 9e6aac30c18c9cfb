"""The rows of the tables: what is measured of each library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

OWN = "envmgr"
IDEAL = "plain"
BARE = "bare"


@dataclass(frozen=True)
class Row:
    """One library in one form.

    Attributes:
        key: short name, used in results.json.
        library: module of `adapters`, and name for `--libraries`.
        label: name in the tables.
        options: what the adapter needs to know.
        again: key of the row that this one measures again; how far apart the two are is chance.
        is_native: whether it steps envs of its own in C++, not those that the others step.
    """

    key: str
    library: str
    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    again: str | None = None
    is_native: bool = False


def _own(
    key: str,
    label: str,
    form: str,
    pipelined: bool = False,
    no_gil: bool = False,
    pure: bool = False,
    **cfg: Any,
) -> Row:
    cfg.setdefault("type", "subprocess")
    if form == "arrays" or pipelined:
        cfg["reset_inplace"] = True
    options = {"form": form, "pipelined": pipelined, "no_gil": no_gil, "pure": pure, "cfg": cfg}
    return Row(key, OWN, f"envmgr, {label}", options)


def _bare(key: str, label: str, processes: int | None, **options: Any) -> Row:
    return Row(key, BARE, f"no library: {label}", {"processes": processes, **options})


_LIMITS: dict[str, Any] = {
    "step_timeout": 10.0,
    "reset_timeout": 10.0,
    "check_actions": "strict",
    "nan_policy": "abnormal",
    "strict_dtype": True,
}

_ON_TWO = _own("hosts2-arrays", "2 workers, arrays", "arrays", num_workers=2)

_ROWS = (
    Row("plain-all", IDEAL, "plain loop over all envs, one core", {"processes": None}),
    Row("plain-1", IDEAL, "plain loop, one core", {"processes": 1}),
    Row("plain-2", IDEAL, "plain loops, two cores", {"processes": 2}),
    _bare("bare-each", "a process per env", None),
    _bare("bare-each-own", "a process per env, each on its own", None, together=False),
    _bare("bare-1", "1 process, spinning", 1, spins=True),
    _bare("bare-2", "2 processes", 2),
    _bare("bare-2-own", "2 processes, each on its own", 2, together=False),
    _own("base", "`base` (in the trainer's process), dict", "dict", type="base"),
    _own("base-arrays", "`base` (in the trainer's process), arrays", "arrays", type="base"),
    _own(
        "base-pure",
        "`base` (in the trainer's process), arrays, without C",
        "arrays",
        pure=True,
        type="base",
    ),
    _own(
        "base-until-send",
        "`base` (in the trainer's process), arrays, views until the next send",
        "arrays",
        type="base",
        copy_on_get="until_send",
    ),
    _own("subprocess", "a worker per env, dict", "dict"),
    _own("thread", "`thread`, one per env, dict", "dict", type="thread"),
    _own("thread-1", "`thread`, one for all, dict", "dict", type="thread", num_workers=1),
    _own("thread-no-gil", "`thread` without a GIL, dict", "dict", no_gil=True, type="thread"),
    _own("subprocess-ring", "a worker per env, dict, two-step views", "dict", copy_on_get=False),
    _own("subprocess-v2", "a worker per env, V2", "v2", type="subprocess_v2"),
    _own("hosts1-dict", "1 worker, dict", "dict", num_workers=1),
    _own("hosts1-arrays", "1 worker, arrays", "arrays", num_workers=1),
    _own("hosts2-dict", "2 workers, dict", "dict", num_workers=2),
    _ON_TWO,
    replace(_ON_TWO, key="again", label=f"{_ON_TWO.label}, measured once more", again=_ON_TWO.key),
    _own("hosts4-arrays", "4 workers, arrays", "arrays", num_workers=4),
    _own("each-arrays", "a worker per env, arrays", "arrays"),
    _own("auto-arrays", "`num_workers: auto`, arrays", "arrays", num_workers="auto"),
    _own(
        "hosts2-limits",
        "2 workers, arrays, `step_timeout` and `metrics`",
        "arrays",
        num_workers=2,
        step_timeout=10.0,
        metrics={},
    ),
    _own("hosts2-v2", "2 workers, V2", "v2", type="subprocess_v2", num_workers=2),
    _own("hosts2-rollout", "2 workers, `RolloutCollector`", "rollout", num_workers=2),
    _own("hosts2-dict-pipelined", "2 workers, dict, pipelined", "dict", True, num_workers=2),
    _own("hosts2-arrays-pipelined", "2 workers, arrays, pipelined", "arrays", True, num_workers=2),
    _own(
        "hosts1-ring",
        "1 worker, arrays, two-step views",
        "arrays",
        num_workers=1,
        copy_on_get=False,
    ),
    _own(
        "hosts2-ring",
        "2 workers, arrays, two-step views",
        "arrays",
        num_workers=2,
        copy_on_get=False,
    ),
    _own(
        "hosts1-until-send",
        "1 worker, arrays, views until the next send",
        "arrays",
        num_workers=1,
        copy_on_get="until_send",
    ),
    _own(
        "hosts2-until-send",
        "2 workers, arrays, views until the next send",
        "arrays",
        num_workers=2,
        copy_on_get="until_send",
    ),
    _own(
        "hosts2-checked",
        "2 workers, arrays, all checks and deadlines",
        "arrays",
        num_workers=2,
        **_LIMITS,
    ),
    _own(
        "hosts2-unchecked",
        "2 workers, arrays, no checks of actions, no deadlines",
        "arrays",
        num_workers=2,
        check_actions=False,
    ),
    _own(
        "as-gymnasium-base",
        "`base` (in the trainer's process), `as_gymnasium`",
        "NextStep",
        type="base",
    ),
    _own("as-gymnasium", "2 workers, `as_gymnasium`", "NextStep", num_workers=2),
    _own("as-gymnasium-each", "a worker per env, `as_gymnasium`", "NextStep"),
    _own(
        "as-gymnasium-auto", "`num_workers: auto`, `as_gymnasium`", "NextStep", num_workers="auto"
    ),
    _own(
        "as-gymnasium-same",
        "2 workers, `as_gymnasium` in SAME_STEP mode",
        "SameStep",
        num_workers=2,
        reset_inplace=True,
    ),
    _own(
        "as-sb3-base",
        "`base` (in the trainer's process), `as_sb3`",
        "sb3",
        type="base",
        reset_inplace=True,
    ),
    _own("as-sb3", "2 workers, `as_sb3`", "sb3", num_workers=2, reset_inplace=True),
    _own(
        "as-sb3-auto",
        "`num_workers: auto`, `as_sb3`",
        "sb3",
        num_workers="auto",
        reset_inplace=True,
    ),
    _own("as-tianshou", "2 workers, `as_tianshou`", "tianshou", num_workers=2, auto_reset=False),
    _own(
        "async-1",
        "`async_subprocess`, `wait_num: 1`",
        "dict",
        type="async_subprocess",
        wait_num=1,
    ),
    _own("async", "`async_subprocess`", "dict", type="async_subprocess"),
    Row("gymnasium-async", "gymnasium", "Gymnasium AsyncVectorEnv", {"kind": "async"}),
    Row(
        "gymnasium-async-nocopy",
        "gymnasium",
        "Gymnasium AsyncVectorEnv, `copy=False`",
        {"kind": "async", "copy": False},
    ),
    Row(
        "gymnasium-async-pipes",
        "gymnasium",
        "Gymnasium AsyncVectorEnv, `shared_memory=False`",
        {"kind": "async", "shared_memory": False},
    ),
    Row("gymnasium-sync", "gymnasium", "Gymnasium SyncVectorEnv (in process)", {"kind": "sync"}),
    Row("sb3-subproc", "sb3", "Stable-Baselines3 SubprocVecEnv", {"kind": "subproc"}),
    Row("sb3-dummy", "sb3", "Stable-Baselines3 DummyVecEnv (in process)", {"kind": "dummy"}),
    Row("tianshou-shmem", "tianshou", "tianshou ShmemVectorEnv"),
    Row("tianshou-one", "tianshou", "tianshou ShmemVectorEnv, `wait_num=1`", {"wait_share": 0.0}),
    Row(
        "tianshou-half", "tianshou", "tianshou ShmemVectorEnv, `wait_num=n/2`", {"wait_share": 0.5}
    ),
    Row("pufferlib-1", "pufferlib", "PufferLib, 1 worker, zero-copy", {"workers": 1}),
    Row("pufferlib-2", "pufferlib", "PufferLib, 2 workers, zero-copy", {"workers": 2}),
    Row("pufferlib-serial", "pufferlib", "PufferLib Serial (in process)"),
    Row("ding-subprocess", "ding", "DI-engine `subprocess`", {"kind": "subprocess"}),
    Row("ding-subprocess-v2", "ding", "DI-engine `subprocess_v2`", {"kind": "subprocess_v2"}),
    Row("ding-async", "ding", "DI-engine `async_subprocess`", {"kind": "async_subprocess"}),
    Row("ale-vector", "ale", "AtariVectorEnv of ale-py (C++)", is_native=True),
    Row("envpool", "envpool", "EnvPool (C++)", is_native=True),
)

ROWS: Mapping[str, Row] = {row.key: row for row in _ROWS}
LIBRARIES = tuple(dict.fromkeys(row.library for row in _ROWS))
