"""The commands that try envs out before they are run, and their options; see `commands`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from envmgr.cli.commands import envmgr, reads_config

__all__ = ["envmgr"]

_F = TypeVar("_F", bound=Callable[..., Any])
_POSITIVE = click.FloatRange(min=0, min_open=True)


def _writes(what: str) -> Callable[[_F], _F]:
    """Return the option `--json` of a command that has findings or figures."""
    says = f"Write the {what}; - prints them instead."
    return click.option("--json", "json_file", metavar="FILE", help=says)


@envmgr.command(short_help="Check the env of a config before it runs for days.")
@reads_config
@click.option(
    "--episodes",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="How many episodes the env is to endure, to find leaks.",
)
@click.option(
    "--seconds",
    type=_POSITIVE,
    default=60.0,
    show_default=True,
    help="How long each part may take; an env that exceeds it hangs.",
)
@click.option(
    "--methods",
    default="fork,spawn,forkserver",
    show_default=True,
    help="Start methods to try besides the worker server; '' for none.",
)
@click.option("--strict", is_flag=True, help="Take warnings for problems.")
@_writes("findings")
def check(**options: Any) -> int:
    """Look at the env of CONFIG: would managers run it, and for long?

    Spaces and dtypes, determinism under a seed (twice, in two processes, with each start method),
    pickling, reset options, times of steps and resets, leaks over many episodes, closing, frames,
    and the end at Ctrl-C. The env runs in worker processes: a crash or a hang is a finding.

    Exit codes: 0 no problems, 1 problems, 2 bad input, 130 interrupted.
    """
    from envmgr.cli.check import execute

    return execute(**options)


@envmgr.command(short_help="Find the setting that steps the envs of a config fastest.")
@reads_config
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.5),
    default=40.0,
    show_default=True,
    help="About how long it may take.",
)
@click.option(
    "--kinds",
    default="",
    help="Registry keys to try, as in subprocess,base. Without it, those with workers.",
)
@click.option(
    "--out", type=click.Path(), metavar="FILE", help="Write the tuned config; else it is printed."
)
@click.option("--force", is_flag=True, help="Replace that file.")
@_writes("figures")
def tune(**options: Any) -> int:
    """Find the num_workers, wait_num, spare_env_num and kind that step the envs of CONFIG fastest.

    Measures one env and what managers cost on this machine, says what it expects of each setting,
    and measures the promising ones in turns. Prints a table, and CONFIG with the best setting in
    it. Run it while the machine does what it will do while training.

    Exit codes: 0 done, 1 the env cannot be run, 2 bad input, 130 interrupted.
    """
    from envmgr.cli.tune import execute

    return execute(**options)


@envmgr.command(short_help="Run the envs of a config under envmgr and its peers, side by side.")
@reads_config
@click.option(
    "--laps", type=click.IntRange(min=1), default=5, show_default=True, help="How often each runs."
)
@click.option(
    "--seconds",
    type=_POSITIVE,
    default=1.0,
    show_default=True,
    help="How long each time.",
)
@click.option(
    "--peers", default="", help="Words of the names of peers, as in async,sb3. Without it, all."
)
@click.option(
    "--limit",
    "limit_s",
    type=_POSITIVE,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a peer may take to start, or hang, before it is given up.",
)
@_writes("figures")
def bench(**options: Any) -> int:
    """Step the envs of CONFIG with envmgr, gymnasium's vector envs, and what else is installed.

    Stable-Baselines3, tianshou and DI-engine are run where they can be imported. Each has a process
    of its own; they are measured in turns, lap by lap, with random actions that were drawn before.

    Exit codes: 0 done, 1 envmgr cannot run the envs, 2 bad input, 130 interrupted.
    """
    from envmgr.cli.bench import execute

    return execute(**options)


@envmgr.command(short_help="Write a commented config for an env, having tried it.")
@click.argument("env", metavar="ENV_ID|ENTRY")
@click.option(
    "--env-num", type=click.IntRange(min=1), default=8, show_default=True, help="How many envs."
)
@click.option(
    "--out", type=click.Path(), metavar="FILE", help="Where; without it, the name of the env."
)
@click.option(
    "--allow-import", multiple=True, metavar="MODULE", help="As with `envmgr run`. Repeatable."
)
def init(**options: Any) -> int:
    """Write a commented config for a gymnasium id, or `package.module:callable`.

    The envs are launched and stepped first: what is written works. A file that is there is never
    replaced.

    Exit codes: 0 done, 1 the env cannot be launched and stepped, 2 bad input, 130 interrupted.
    """
    from envmgr.cli.init import execute

    return execute(**options)
