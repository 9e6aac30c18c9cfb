"""The page of the config's keys."""

from __future__ import annotations

from collections.abc import Iterator

from envmgr.config import CollectConfig, EnvConfig, ManagerConfig, WorkerEnv, schema_markdown
from envmgr.config.checks import show_value
from envmgr.config.kind_sections import (
    EnvPool,
    GymVector,
    Limits,
    Metrics,
    NormalizationSection,
    Ray,
    Trace,
)
from envmgr.config.known_envs import KNOWN_PACKAGES
from envmgr.config.variables import HARMLESS
from envmgr.registry import ENV_MANAGER_REGISTRY
from generating.docstrings import table


def config_page() -> str:
    """Return the page of the keys of a config, from the schema."""
    presets = []
    for key in own_kinds():
        preset = ENV_MANAGER_REGISTRY.get(key).preset
        shown = [f"`{k}: {show_value(v)}`" for k, v in preset.items() if k != "type"]
        presets.append((f"`{key}`", ", ".join(shown)))
    return f"""# Config reference

A config has three sections, all of which may be left out: `manager`, `env` and `collect`. Unknown
keys are refused. [The guide](../guide/configs.md) says how configs are written and merged, and
[`envmgr show`](../guide/configs.md#inspecting-the-resolved-config) prints one with every key filled
in.

The column "in a file" says what a config file may set a key to, which is limited for some keys
because a file may come from anywhere; the command line and code may set everything that is allowed.
[The guide](../guide/configs.md#what-a-file-may-set) says how to allow a file more.

## `manager`

{schema_markdown(ManagerConfig)}
### `manager.limits`

{schema_markdown(Limits)}
### `manager.worker_env`

{schema_markdown(WorkerEnv)}
#### Variables that a file may set

{table(("variable", "in a file"), _variables())}
### `manager.gym_vector`

{schema_markdown(GymVector)}
### `manager.normalization`

{schema_markdown(NormalizationSection)}
### `manager.env_pool`

{schema_markdown(EnvPool)}
### `manager.ray`

{schema_markdown(Ray)}
### `manager.metrics`

{schema_markdown(Metrics)}
### `manager.trace`

{schema_markdown(Trace)}
The default of `wait_num` depends on the kind:

{table(("kind", "its own defaults"), presets)}
## `env`

Give one of `id` and `entry`. These keys are only for config files and for `make`; a manager that is
built by `create_env_manager` gets its envs as `env_fn`.

{schema_markdown(EnvConfig)}
### Well-known packages

envmgr imports the package of an env whose id has one of these namespaces, which end with a slash,
or matches one of these patterns: see [the guide](../guide/configs.md#envs-of-well-known-packages).
Where `kwargs` is "no", a config file may give the env no arguments except `render_mode`, unless the
module is allowed.

{table(("ids", "`pip install`", "module", "`kwargs`", "registered in"), _known_packages())}
## `collect`

This section says what `envmgr run` does. The options `--steps`, `--episodes` and `--output` replace
the keys of the same name. Give at most one of `steps` and `episodes`.

{schema_markdown(CollectConfig)}"""


def _variables() -> Iterator[tuple[str, ...]]:
    for name, check in HARMLESS.items():
        yield f"`{name}`", check.allowed


def _known_packages() -> Iterator[tuple[str, ...]]:
    for known in KNOWN_PACKAGES:
        n_shown = 12  # of Atari's old ids there are many
        ids = [*(f"{name}/" for name in known.namespaces), *known.ids]
        more = f" and {len(ids) - n_shown} more" if len(ids) > n_shown else ""
        yield (
            " ".join(f"`{name}`" for name in ids[:n_shown]) + more,
            f"`{known.distribution}`",
            f"`{known.module}`",
            "yes" if known.plain_arguments else "no",
            known.source,
        )


def own_kinds() -> list[str]:
    """Return the registry keys of the kinds that envmgr itself provides."""
    return [k for k in ENV_MANAGER_REGISTRY if ENV_MANAGER_REGISTRY.source(k) == "envmgr"]
