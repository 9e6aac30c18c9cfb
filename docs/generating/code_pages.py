"""The pages of errors, of the public names and of `envmgr.testing`, from their docstrings."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import envmgr
from envmgr import collect, errors, testing
from envmgr.core import ArrayBatch
from envmgr.env import (
    BatchedEnv,
    BatchedEnvSpec,
    EpisodePictures,
    VectorBatch,
    tile_images,
    write_png,
)
from envmgr.manager import EnvManager
from envmgr.manager.leases import AsyncSlot, Slot
from envmgr.normalizing import Normalization
from envmgr.registry import ENV_MANAGER_REGISTRY, Registry
from envmgr.testing import contract, faulty, injuries
from generating.config_page import own_kinds
from generating.docstrings import call_of, described, listed, summary_of, table


def errors_page() -> str:
    """Return the page of errors: the exception tree, from the classes."""
    lines = []

    def walk(cls: type, depth: int) -> None:
        others = [b.__name__ for b in cls.__bases__ if not issubclass(b, errors.EnvManagerError)]
        also = f" ({', '.join(others)})" if others and depth else ""
        lines.append(f"{'    ' * depth}- `{cls.__name__}`{also}: {summary_of(cls)}")
        for child in cls.__subclasses__():
            if child.__module__ == errors.__name__:
                walk(child, depth + 1)

    walk(errors.EnvManagerError, 0)
    with_attributes = [
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and "Attributes:" in (cls.__doc__ or "")
    ]
    attributes = "\n".join(
        f"### `{cls.__name__}`\n\n{_attributes_of(cls)}" for cls in with_attributes
    )
    tree = "\n".join(lines)
    return f"""# Errors

Every error that envmgr raises on purpose is an `EnvManagerError`, from `envmgr.errors`. The
brackets name the builtin class that an error also inherits from, so that `except ValueError` and
the like work. What to do about errors is in [troubleshooting](../guide/troubleshooting.md).

{tree}

## Attributes

The failures of envs have the attributes of `EnvFailure` besides their own.

{attributes}"""


def _attributes_of(cls: type) -> str:
    text = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    return listed(textwrap.dedent(text)) + "\n"


_GROUPS: Mapping[str, Sequence[str]] = {
    "Launch and close": ("launch", "close", "closed", "__enter__", "__exit__"),
    "Which envs are ready": (
        "ready_obs",
        "ready_info",
        "ready_obs_id",
        "ready_arrays",
        "ready_env",
        "active_env",
        "done",
        "env_state_done",
        "env_states",
        "generations",
    ),
    "Steps": (
        "step",
        "send",
        "recv",
        "send_arrays",
        "recv_arrays",
        "random_action",
        "stepped_together",
    ),
    "Leases, and calls of coroutines": (
        "lease",
        "__aenter__",
        "__aexit__",
        "aready_obs",
        "astep",
        "arecv",
        "arecv_arrays",
        "arrivals",
        "fileno",
    ),
    "Normalising": ("normalization",),
    "Resets and seeds": ("reset", "seed", "reset_infos"),
    "Snapshots": ("snapshot", "restore"),
    "Calls and attributes of envs": (
        "call",
        "call_async",
        "call_wait",
        "apply",
        "get_attr",
        "set_attr",
        "__getattr__",
        "reward_shaping",
    ),
    "Pictures and replays": ("render", "ready_imgs", "enable_save_replay", "enable_save_figure"),
    "What it is": (
        "env_num",
        "cfg",
        "default_config",
        "preset",
        "observation_space",
        "action_space",
        "reward_space",
        "metadata",
        "spec",
        "render_mode",
        "env_ref",
        "method_name_list",
        "stats",
    ),
    "For kinds of your own": ("build", "env_spaces", "makes_envs"),
}
_NOT_LISTED = frozenset(
    ("__enter__", "__exit__", "__aenter__", "__aexit__", "makes_envs", "preset")
)


def api_page() -> str:
    """Return the page of the public names, from their docstrings."""
    kinds = [ENV_MANAGER_REGISTRY.get(key) for key in own_kinds()]
    rows = [(f"`{kind.preset['type']}`", f"`{kind.__name__}`", summary_of(kind)) for kind in kinds]
    return f"""# API reference

This page is generated from the docstrings. `from envmgr import ...` gives the names under
"Building", the managers, and `BaseEnv`, `EnvTimestep` and `Outcome`; `from envmgr.env import ...`
gives `BatchedEnv`, `BatchedEnvSpec`, `EpisodePictures`, `VectorBatch`, `tile_images` and
`write_png`. You meet objects of the other types as results of calls.

## Building

{_functions(envmgr.make, envmgr.create_env_manager, envmgr.get_env_manager_cls, envmgr.load_config)}
### `ENV_MANAGER_REGISTRY`

`@ENV_MANAGER_REGISTRY.register("key")` adds a kind, which a config can then name in `manager.type`.
Packages add kinds through the entry-point group `envmgr.managers`, with entries
`key = package.module:Class`.

{_members(Registry, ("register", "get", "build", "source", "keys", "problems"), level=4)}
{_functions(envmgr.dump_on_signal)}
## Kinds

{table(("registry key", "class", "what it does"), rows)}
`SubprocessEnvManagerV2` is a `SyncSubprocessEnvManager`, which is an `AsyncSubprocessEnvManager`,
which is a `BaseEnvManager`, as in DI-engine.

## The manager

All kinds share this interface.

{described(EnvManager)}
{_manager_members()}
## Types

{_classes(envmgr.EnvTimestep, envmgr.BaseEnv, BatchedEnv, BatchedEnvSpec, level=3)}
{_classes(VectorBatch, ArrayBatch, level=3)}
{_classes(Slot, AsyncSlot, envmgr.Outcome, level=3)}
{_classes(EpisodePictures, Normalization, level=3)}
{_functions(tile_images, write_png)}
`EnvState` is described in the [lifecycle](lifecycle.md), and the errors in [errors](errors.md).

## Collection: `envmgr.collect`

{_classes(collect.Collector, collect.CollectLoop, level=3)}
{_classes(collect.EpisodeRecord, collect.CollectStatistics, level=3)}
{_classes(collect.StepCollector, collect.EpisodeCollector, collect.Trajectory, level=3)}
{_classes(collect.RolloutCollector, collect.RolloutBuffer, collect.Advantages, level=3)}
{_classes(collect.PolicyStep, collect.RandomPolicy, level=3)}
{_functions(collect.gae, collect.by_env, collect.make_policy)}"""


def testing_page() -> str:
    """Return the page of `envmgr.testing`, from its docstrings."""
    accounts = (testing.Ledger, testing.LedgerReport, testing.Mark, testing.LedgerEnv)
    wrappers = (testing.LedgerWrapper, testing.Ledgered)
    return f"""# Reference of `envmgr.testing`

This page is generated from the docstrings. The guide is [Testing](../guide/testing.md).

## Accounts

{_classes(*accounts, *wrappers, level=3)}
{_functions(testing.ledgered, testing.mark_of, testing.without_instance)}
## Faults

{_classes(testing.FaultyEnv, testing.Fault, level=3)}
Kinds of faults: {", ".join(f"`{kind}`" for kind in faulty.KINDS)}.

## Injuries

{_classes(testing.Saboteur, testing.Injury, level=3)}
{_functions(testing.vulnerable)}
Kinds of injuries: {", ".join(f"`{kind}`" for kind in injuries.KINDS)}.

## Envs before they run

{_functions(testing.check_env, testing.env_problems)}
{_classes(testing.Problem, level=3)}
## Suites: `envmgr.testing.contract`

{_classes(contract.EnvContract, contract.ManagerContract, level=3)}
{_classes(contract.WorkerManagerContract, level=3)}"""


def _functions(*functions: Callable[..., Any]) -> str:
    return "\n".join(
        f"### `{call_of(function, skip_self=False)}`\n\n{described(function)}"
        for function in functions
    )


def _classes(*classes: type, level: int) -> str:
    texts = []
    for cls in classes:
        names = [
            name
            for name, value in vars(cls).items()
            if not name.startswith("_")
            and (inspect.isfunction(value) or isinstance(value, (property, classmethod)))
        ]
        texts.append(
            f"{'#' * level} `{cls.__name__}`\n\n{described(cls)}\n"
            f"{_members(cls, names, level=level + 1)}"
        )
    return "\n".join(texts)


def _members(cls: type, names: Iterable[str], *, level: int) -> str:
    return "\n".join(
        f"{'#' * level} `{_title(cls, n)}`\n\n{described(_raw(cls, n))}" for n in names
    )


def _raw(cls: type, name: str) -> Any:
    found = inspect.getattr_static(cls, name)
    return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found


def _title(cls: type, name: str) -> str:
    raw = _raw(cls, name)
    if name == "__getattr__":
        return "manager.<name>"
    return call_of(raw, name=name, skip_self=True) if inspect.isfunction(raw) else name


def _manager_members() -> str:
    public = {n for n in dir(EnvManager) if not n.startswith("_")} | {"__getattr__"}
    placed = {name for names in _GROUPS.values() for name in names}
    groups = dict(_GROUPS)
    if public - placed:
        groups["Others"] = sorted(public - placed)
    texts = []
    for title, names in groups.items():
        members = [n for n in names if n in public and n not in _NOT_LISTED]
        texts.append(f"### {title}\n\n{_members(EnvManager, members, level=4)}")
    return "\n".join(texts)
