"""The commands and their options; what they do is imported when they run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

_Command = Callable[..., Any]


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from envmgr.cli.figures import versions

        found = versions()
        click.echo(f"envmgr {found['envmgr']} (Python {found['python']}; hot: {found['hot']})")
        context.exit()


def _with(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Return a decorator that adds options to a command; they are shown in this order."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _keys(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the keys of a config that begin with what was typed, for shell completion."""
    from envmgr.config import CollectConfig, EnvConfig, ManagerConfig

    sections = {"env": EnvConfig, "manager": ManagerConfig, "collect": CollectConfig}
    keys = (f"{name}.{key}=" for name, cls in sections.items() for key in cls().to_dict())
    return [key for key in keys if key.startswith(incomplete)]


def _with_equals(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    """Refuse an override without a value, which the shell has passed as a separate argument."""
    for override in given:
        if "=" not in override:
            raise click.BadParameter(
                f"{override!r} has no =: write section.key=value, such as manager.env_num=16"
            )
    return given


def _allowing(command: _Command) -> _Command:
    """Pass a command all that its options allow the config to do as one argument, `allowed`."""

    @functools.wraps(command)
    def with_lists(*args: Any, **options: Any) -> Any:
        return command(*args, allowed={name: options.pop(name) for name in _LISTS}, **options)

    return with_lists


_LISTS = ("allow_imports", "allow_env", "allow")


def reads_config(command: _Command) -> _Command:
    """Let a command read a config: add the argument and options that say which one, and how."""
    return _config(_config_options(_allowing(command)))


def reads_config_or_none(command: _Command) -> _Command:
    """Let a command read a config, or else that of a run to resume."""
    return _config_or_none(_config_options(_allowing(command)))


_config = click.argument("config", metavar="CONFIG", type=click.Path())
_config_or_none = click.argument("config", metavar="CONFIG", type=click.Path(), required=False)
_config_options = _with(
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=_keys,
        callback=_with_equals,
        help="Override a key, as in --set manager.env_num=16; the value is YAML. Repeatable.",
    ),
    click.option(
        "--allow-import",
        "allow_imports",
        multiple=True,
        metavar="MODULE",
        help="Let the config import this module and those below it. Repeatable. Without it, "
        "modules of gymnasium, and those beside the config or in the working directory.",
    ),
    click.option(
        "--allow-env",
        "allow_env",
        multiple=True,
        metavar="NAME",
        help="Let the config set this environment variable in workers. Repeatable. Without it, "
        "harmless ones, such as MUJOCO_GL.",
    ),
    click.option(
        "--allow",
        "allow",
        multiple=True,
        metavar="KEY",
        help="Let the config set this key to anything, as in --allow ray.runtime_env. Repeatable. "
        "Without it, only what cannot run a command or reach the network.",
    ),
)


def _writes(what: str) -> Callable[[_Command], _Command]:
    """Return the option `--json` of a command that has findings or figures."""
    says = f"Write the {what}; - prints them instead."
    return click.option("--json", "json_file", metavar="FILE", help=says)


class _Count(click.IntRange):
    """A whole number, at least 1, which may be written like 1e6."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | Any:
        if isinstance(value, str) and "e" in value.lower():
            with contextlib.suppress(ValueError):
                number = float(value)
                value = int(number) if number.is_integer() else value
        return super().convert(value, param, ctx)


_POSITIVE = click.FloatRange(min=0, min_open=True)
_steps = click.option("--steps", type=_Count(), help="Collect exactly so many timesteps.")


class _OneCommand(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            key = _key_meant(error.option_name)
            if key is None or all(parameter.name != "overrides" for parameter in self.params):
                raise
            hint = f"{error.option_name} is no option; did you mean --set {key}=...?"
            raise click.UsageError(hint, ctx) from None


def _key_meant(option: str) -> str | None:
    """Return the config key that an option's name stands for; None if there is no such key."""
    from envmgr.config import CollectConfig, EnvConfig, ManagerConfig
    from envmgr.config.schema import checks_of

    name = option.lstrip("-").replace("-", "_")
    for schema in (ManagerConfig, EnvConfig, CollectConfig):
        known = checks_of(schema)
        key = name if name in known else schema.MEANT.get(name)
        if key in known:
            return f"{schema.PATH}.{key}"
    return None


class _Commands(click.Group):
    command_class = _OneCommand

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0].endswith((".yaml", ".yml")):
            ctx.fail(f"{args[0]!r} is no command; to run that config: envmgr run {args[0]}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Print the version.",
)
def envmgr() -> None:
    """Run many reinforcement-learning environments at once."""


def _resolve_resume(options: dict[str, Any], no_output: bool) -> None:
    """Take the config from the run to resume; refuse `--resume` with options that begin a run.

    Raises:
        UsageError: such an option is given with it, or neither it nor a config is given.
    """
    if options["resume"] is None:
        if options["config"] is None:
            raise click.MissingParameter(param_hint="'CONFIG'", param_type="argument")
        return
    names = ("config", "steps", "episodes", "seed", "output", "force")
    given = ["--no-output"] if no_output else []
    given += [name if name == "config" else f"--{name}" for name in names if options[name]]
    if given:
        what = given[0].replace("config", f"the config {options['config']}")
        raise click.UsageError(
            f"--resume goes on with what the run was begun with, so {what} cannot be given with "
            "it. --allow..., --traceback and --trace can."
        )
    from pathlib import Path

    from envmgr.reporting.files import CONFIG

    options["config"] = str(Path(options["resume"]) / CONFIG)


# -- running --------------------------------------------------------------------------------------


@envmgr.command(short_help="Collect timesteps as a config says.")
@reads_config_or_none
@click.option(
    "--resume",
    type=click.Path(),
    metavar="RUN",
    help="Go on with a run that was killed or interrupted, in place of CONFIG: its folder.",
)
@_steps
@click.option(
    "--episodes",
    type=_Count(),
    help="Collect exactly so many episodes: the first ones to begin; failed ones do not count.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), help="Seed of envs and policy, as manager.seed."
)
@click.option(
    "--trace",
    type=click.Path(),
    metavar="FILE",
    help="Write a timeline of what happens, for Perfetto or chrome://tracing, as manager.trace.",
)
@click.option(
    "--output",
    type=click.Path(),
    metavar="DIR",
    help="Folder for the results and the report of them. Without it: collect.output of "
    "the config, or a new folder runs/<config>-<date>-<time>.",
)
@click.option("--force", is_flag=True, help="Replace the results that the folder holds.")
@click.option("--no-output", is_flag=True, help="Write no files.")
@click.option(
    "--traceback",
    is_flag=True,
    help="Print where envs raise, hang or crash with the whole stacks (the written files have them "
    "in any case).",
)
@click.pass_obj
def run(process: dict[str, bool], /, no_output: bool, **options: Any) -> int:
    """Collect timesteps with the manager, the envs and the policy that CONFIG names.

    Ends after --steps, --episodes, or when every env has run manager.episode_num episodes. Ctrl-C,
    SIGTERM and a closed terminal end it, too, and what was collected is kept: --resume RUN collects
    the rest. SIGUSR1 prints what `envmgr dump` does.

    Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted.
    """
    _resolve_resume(options, no_output)
    if options["steps"] is not None and options["episodes"] is not None:
        raise click.UsageError("give --steps or --episodes, not both: a run ends with one of them")
    if no_output and (options["output"] is not None or options["force"]):
        raise click.UsageError("--no-output goes neither with --output nor with --force")
    from envmgr.cli.interrupt import Interruption

    with Interruption(last=process["exits"]) as interruption:  # before the imports that take time
        from envmgr.cli.prepare import RunOptions
        from envmgr.cli.run import execute
        from envmgr.observing.signals import dumping_on_signal, showing_crashes

        with dumping_on_signal(), showing_crashes():
            return execute(RunOptions(write=not no_output, **options), interruption)


@envmgr.command(short_help="Run a config while hurting its workers.")
@reads_config
@click.option(
    "--rate",
    "rate_hz",
    type=click.FloatRange(min=0, min_open=True, max=1000),
    default=1.0,
    show_default=True,
    metavar="HZ",
    help="Injuries per second.",
)
@_steps
@click.option(
    "--kinds",
    default="kill,stop,hang,corrupt",
    show_default=True,
    help="Kinds of injuries, drawn with equal probability: kill, segfault, abort, stop (signals), "
    "exit, hang (in C, holding the GIL), corrupt (garbage in the worker's connection).",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Seed of envs and policy, as manager.seed, and of the injuries.",
)
@_writes("figures")
@click.option(
    "--traceback", is_flag=True, help="Print what envmgr logs with the tracebacks of envs."
)
@click.pass_obj
def chaos(process: dict[str, bool], /, kinds: str, **options: Any) -> int:
    """Run CONFIG as `envmgr run` does, while killing, stopping, hanging and corrupting workers.

    Reports whether every accepted action gave exactly one timestep, the right one, and how long
    injuries took to be detected and recovered from. Ends as `envmgr run` does; writes no results.

    Exit codes: 0 nothing was lost, repeated or swapped; 1 something was, or the run failed; 2 bad
    input; 130 interrupted, and everything was in order until then.
    """
    from envmgr.cli.interrupt import Interruption

    with Interruption(last=process["exits"]) as interruption:
        from envmgr.cli.chaos import ChaosOptions, execute
        from envmgr.cli.texts import listed

        return execute(ChaosOptions(kinds=listed(kinds), **options), interruption)


# -- trying envs out before they are run --------------------------------------------------------


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

    Steps one env by itself, launches up to sixteen settings, and steps them in turns. Prints a
    table, and CONFIG with the best setting in it. Run it while the machine does what it will do
    while training.

    Exit codes: 0 done, 1 the env cannot be run or the tuned config not be written, 2 bad input, 130
    interrupted.
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
    "--kwargs",
    "arguments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Argument of the env, as in --kwargs g=9.8; the value is YAML. Or several as a mapping: "
    "--kwargs '{\"g\": 9.8}'. Repeatable.",
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


# -- looking at what runs, and at what ran ------------------------------------------------------

_target = click.argument("target", metavar="PID|RUN")


@envmgr.command(short_help="Print what every env of a trainer is doing.")
@_target
@click.option("--no-stacks", is_flag=True, help="Do not ask workers where they are.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def dump(target: str, no_stacks: bool, as_json: bool) -> None:
    """Print the state of every env of a trainer that runs on this machine, and workers' stacks.

    The trainer is the process PID, or the one whose results go into the folder RUN. It is not
    disturbed, and may be in a long wait, stopped, or hung. On Linux only.

    Exit codes: 0 done, 2 there is no such trainer.
    """
    import json

    from envmgr.observing.dump import dump_of, figures_of
    from envmgr.observing.status_boards import boards_of, pid_of

    boards = boards_of(pid_of(target))
    if as_json:
        found = [figures_of(board, stacks=not no_stacks) for board in boards]
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(dump_of(boards, stacks=not no_stacks), nl=False)


@envmgr.command(short_help="Print what is in a timeline.")
@click.argument("file", metavar="FILE", type=click.Path())
def trace(file: str) -> None:
    """Print how often things happened in a timeline that envmgr wrote, and for how long in all.

    Perfetto (https://ui.perfetto.dev) and chrome://tracing show the timeline itself.

    Exit codes: 0 done, 2 it is none, or not whole.
    """
    from envmgr.observing.timeline import read_trace, totals_of
    from envmgr.untrusted import plain_line

    totals = totals_of(read_trace(file))
    click.echo(f"{'category':<10} {'event':<22} {'how often':>10} {'in all':>14}")
    for key, (count, total_s) in totals.items():
        category, _, name = plain_line(key).partition(" ")
        click.echo(f"{category:<10} {name:<22} {count:>10,} {total_s:>12,.3f} s")


@envmgr.command(short_help="Write the report of a run, or compare several.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--out",
    type=click.Path(),
    metavar="FILE",
    help="The page; its figures go beside it, with the ending .json. Without it: report.html in "
    "the folder of the run, beside an episode log, or, of several, comparison.html.",
)
def report(runs: tuple[str, ...], out: str | None) -> None:
    """Write a page that shows how the `envmgr run` went whose results are in the folder RUN.

    `envmgr run` writes one when it ends; this makes it again, also of a run that goes on or was
    killed, or one page that compares several runs. RUN may also be the file of
    `manager.episode_log`, of any program.

    Exit codes: 0 done, 2 there is no such run, or nothing of it can be read.
    """
    from envmgr.cli.report import execute

    click.echo(execute(runs, out))


@envmgr.command(short_help="Show the envs of a trainer, live.")
@_target
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two tables.",
)
@click.option("--once", is_flag=True, help="Print one table, and end.")
@click.option(
    "--sort",
    type=click.Choice(("env", "slowest", "longest", "failures")),
    default="env",
    show_default=True,
    help="Which envs come first.",
)
def top(target: str, interval_s: float, once: bool, sort: str) -> None:
    """Show every env of a trainer that runs on this machine: state, rate, times, failures, memory.

    The trainer is named as for `envmgr dump`. Rates and times of each env need `metrics` in its
    config. On a terminal keys sort the envs (s), choose one (up and down) and show the stacks of
    its worker (enter); q or Ctrl-C ends it. It waits for a trainer that launches.
    """
    from envmgr.observing import top_screen, top_table
    from envmgr.observing.status_boards import pid_of

    pid = pid_of(target)
    if once or not top_screen.is_possible():
        top_table.print_tables(pid, interval_s=interval_s, once=once, sort=sort)
    else:
        top_screen.watch(pid, interval_s=interval_s, sort=sort)


# -- looking at configs -------------------------------------------------------------------------


@envmgr.command("list", short_help="List the kinds of managers.")
def list_managers() -> None:
    """List the kinds of managers: their registry keys, classes and sources."""
    from envmgr.cli.listing import print_managers

    print_managers()


@envmgr.command(short_help="Print a config with every key and its origin.")
@reads_config
def show(config: str, overrides: tuple[str, ...], allowed: Mapping[str, Sequence[str]]) -> None:
    """Print CONFIG with every key filled in, and where each value came from.

    What is printed is a config itself; the origins are its comments.
    """
    import sys

    from envmgr.cli.listing import annotated_yaml
    from envmgr.config_file import resolve_config
    from envmgr.untrusted import plain

    resolved = resolve_config(config, set=overrides, **allowed)
    text = annotated_yaml(resolved.values, resolved.origins)
    # In a file it is a config, which has to say exactly the same: nothing is escaped there.
    click.echo(plain(text) if sys.stdout.isatty() else text, nl=False)
