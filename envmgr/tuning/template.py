"""The config that `envmgr init` writes: its keys, and comments from what was measured. No I/O."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from envmgr.config.yaml_text import dump_yaml
from envmgr.texts import short_time

_WIDTH = 96
_LEAST_STEP_LIMIT_S, _LEAST_RESET_LIMIT_S = 10.0, 60.0
_PATIENCE = 50
"""A step or a reset may take this many times as long as the longest one that was seen."""


_SHARED_WORKERS = "num_workers: auto             # auto tries one env first; null: a process each"
_WORKER_EACH = "num_workers: null             # a process each: this env has ended its own"


class Tried(NamedTuple):
    """What was seen of an env.

    Attributes:
        profile: figures of a `Profile`; None if the env did not live long enough to be measured.
        spaces: spaces of observations and actions, as text.
        n_steps: how many steps were taken through a manager.
        allow_import: modules that had to be allowed.
        loses_workers: whether the env has ended its process, or had to be ended with it.
        where: a sentence that says where the config can be run; empty if that is everywhere.
    """

    profile: Mapping[str, Any] | None
    spaces: tuple[str, str]
    n_steps: int
    render_modes: tuple[str, ...] = ()
    allow_import: tuple[str, ...] = ()
    loses_workers: bool = False
    where: str = ""


def config_text(
    name: str,
    key: str,
    env_num: int,
    path: str,
    tried: Tried | None,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return a commented config.

    Args:
        name: name of the env.
        key: key of the section `env` under which the name belongs.
        env_num: how many envs.
        path: path of the file, for the commands in its comments.
        tried: what was seen of the env; None if it is still to be tried.
        kwargs: arguments of the env.
    """
    env = dump_yaml({key: name}).strip()
    step_s = reset_s = None
    if tried is not None:
        profile = tried.profile or {"step_max_s": 0.0, "reset_max_s": 0.0}
        step_s = step_limit_s(profile["step_max_s"])
        reset_s = _limit(profile["reset_max_s"], _LEAST_RESET_LIMIT_S)
    modes = tried.render_modes if tried is not None else ()
    workers = _SHARED_WORKERS if tried is None or not tried.loses_workers else _WORKER_EACH
    example = f"{{render_mode: {modes[-1]}}}" if modes else "{}"
    arguments = f"# kwargs: {example:<20} # arguments of the env"
    if kwargs:
        arguments = textwrap.indent(dump_yaml({"kwargs": dict(kwargs)}), "  ").strip()
    return f"""{_head(name, path, tried)}
env:
  {env}
  {arguments}
  # wrappers: []                # `module:Class`, or a dot for the colon; the innermost first

manager:
  type: subprocess              # `envmgr list` has the others; async_subprocess for uneven steps
  env_num: {env_num}
  {workers}
  seed: 0                       # env i gets seed + i; null: no seeds
  step_timeout: {_text(step_s):<15} # seconds; an env that takes longer is replaced
  reset_timeout: {_text(reset_s):<14} # seconds
  # spare_env_num: 0            # envs kept reset, to hide slow resets; with num_workers: null
  # on_failure: recover         # raise: end the run at the first failure

collect:
  steps: 10_000                 # or episodes: N; --steps and --episodes override both
  # policy: random              # or `module:factory`
"""


def _head(name: str, path: str, tried: Tried | None) -> str:
    if tried is None:
        return f"# {name}"
    observations, actions = tried.spaces
    about = (
        f"{name}: written by `envmgr init`, which launched and stepped it. Observations "
        f"{observations}, actions {actions}. {_times(tried.profile)} {tried.where}"
    )
    allowed = "".join(f" --allow-import {shlex.quote(module)}" for module in tried.allow_import)
    rest = f"{shlex.quote(str(path))}{allowed}"
    commands = {
        f"envmgr check {rest}": "is the env fit to run for days?",
        f"envmgr tune {rest}": "workers, kind and spares that step it fastest",
        f"envmgr run {rest}": "collect timesteps",
        f"envmgr show {rest}": "every other key, with its default",
    }
    widest = max(map(len, commands))
    lines = textwrap.wrap(" ".join(about.split()), _WIDTH, break_on_hyphens=False)
    lines += ["", *(f"  {command:<{widest}}  # {why}" for command, why in commands.items()), ""]
    return "\n".join(f"# {line}".rstrip() for line in lines)


def _times(profile: Mapping[str, Any] | None) -> str:
    if profile is None:
        return "It did not live long enough for its steps and resets to be measured."
    length = profile["episode_steps"]
    episodes = "no episode ended"
    if length is not None:
        episodes = f"an episode of random actions {length:,.0f} steps"
    return (
        f"A step took {short_time(profile['step_mean_s'])}, a reset "
        f"{short_time(profile['reset_p50_s'])} (median); {episodes}."
    )


def step_limit_s(longest_s: float) -> float:
    """Return a time limit for steps that no sound env exceeds, given the longest step seen."""
    return _limit(longest_s, _LEAST_STEP_LIMIT_S)


def _limit(longest_s: float, least_s: float) -> float:
    """Return a time limit that no sound env exceeds: a round number of seconds."""
    wanted = max(least_s, _PATIENCE * longest_s)
    scale = 10 ** math.floor(math.log10(wanted))
    return float(math.ceil(wanted / scale) * scale)


def _text(limit_s: float | None) -> str:
    return "null" if limit_s is None else f"{limit_s:g}"
