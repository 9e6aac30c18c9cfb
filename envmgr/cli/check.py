"""`envmgr check`: check the env of a config against the env contract; give a verdict and advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import click

from envmgr.cli.config_envs import env_name, factories_of, quiet_workers
from envmgr.cli.exit_codes import DONE, FAILED
from envmgr.cli.figures import STDOUT, try_to_write, versions, write_figures
from envmgr.cli.progress import doing
from envmgr.cli.texts import echo, listed
from envmgr.config.env_factories import ConfiguredEnv
from envmgr.config_file import resolve_config
from envmgr.errors import ConfigError
from envmgr.testing.checkup import CheckOptions, Finding, Level, check_up, verdict_of
from envmgr.testing.checkup.checkup import FRAMES, METHODS
from envmgr.testing.checkup.findings import worst_of
from envmgr.types import EnvFactory
from envmgr.untrusted import plain

_COLOURS = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "red"}
_INDENT = " " * 24


def execute(
    config: str,
    overrides: Sequence[str],
    allowed: Mapping[str, Sequence[str]],
    *,
    episodes: int,
    seconds: float,
    methods: str,
    strict: bool,
    json_file: str | None,
) -> int:
    """Check the env of a config, print what is found, and return the exit code.

    Args:
        config: path of the config file.
        overrides: `section.key=value`, in order.
        allowed: what the config may do, by the names of the lists in `allow_list`.
        episodes: how many episodes the env has to endure.
        seconds: how long each part of the check may take.
        methods: start methods to try besides the worker server, separated by commas.
        strict: whether warnings count as problems.
        json_file: where the findings go; None writes none.

    Raises:
        ConfigError: nothing was checked.
    """
    resolved = resolve_config(config, set=overrides, **allowed)
    cfg = resolved.values.manager
    options = CheckOptions(
        episodes=episodes,
        limit_s=seconds,
        seed=cfg.seed if isinstance(cfg.seed, int) else 0,
        methods=_methods(methods),
        close_timeout_s=cfg.close_timeout,
        step_timeout_s=cfg.step_timeout,
        reset_timeout_s=cfg.reset_timeout,
    )
    factory = factories_of(resolved, "`envmgr check` looks at single envs", env_num=1)[0]
    try_to_write(json_file)
    shows = json_file != STDOUT
    if shows:
        echo(f"envmgr check: {env_name(resolved)}")
    findings = _findings(factory, options, shows)
    verdict = verdict_of(findings)
    passes = worst_of(findings) < (Level.WARNING if strict else Level.PROBLEM)
    figures = {"env": env_name(resolved), "verdict": verdict, "passes": passes}
    found = [finding.as_dict() for finding in findings]
    write_figures(json_file, {**figures, "findings": found, "versions": versions()})
    if shows:
        click.secho(f"verdict: {verdict}", bold=True)
    return DONE if passes else FAILED


def _findings(factory: EnvFactory, options: CheckOptions, shows: bool) -> list[Finding]:
    """Check an env; show each finding as it is made."""
    findings = []
    with quiet_workers() as folder, doing(shows) as begin:
        options = dataclasses.replace(options, worker_log=folder)
        for finding in check_up(factory, options, with_frames=_with_frames(factory), begin=begin):
            findings.append(finding)
            if shows:
                _print(finding)
    return findings


def _methods(given: str) -> tuple[str, ...]:
    methods = listed(given)
    wrong = [name for name in methods if name not in METHODS]
    if wrong:
        raise ConfigError(
            f"--methods has {wrong[0]!r} in it; start methods to try are {', '.join(METHODS)} (the "
            "worker server, the default, is tried in any case)."
        )
    return methods


def _with_frames(factory: EnvFactory) -> EnvFactory:
    if not isinstance(factory, ConfiguredEnv):
        return factory
    return dataclasses.replace(factory, kwargs={**factory.kwargs, "render_mode": FRAMES})


def _print(finding: Finding) -> None:
    level = click.style(f"{finding.level.word:<8}", fg=_COLOURS[finding.level])
    first, *more = finding.text.splitlines()
    click.echo(f"{level} {finding.part:<14} {plain(first)}")  # the level has a colour
    for line in more:
        echo(f"{_INDENT}  {line}")
    if finding.advice:
        echo(f"{_INDENT}-> {finding.advice}")
