"""`envmgr check`: the env contract of a config, with a verdict and advice."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from envmgr.cli import DONE, FAILED
from envmgr.cli.figures import STDOUT, try_to_write, write_figures
from envmgr.cli.prepare import env_name
from envmgr.cli.progress import doing, logging_to
from envmgr.cli.versions import versions
from envmgr.config.env_factories import ConfiguredEnv, env_factories
from envmgr.config_file import ResolvedConfig, resolve_config
from envmgr.errors import ConfigError
from envmgr.registry import get_env_manager_cls
from envmgr.testing.checkup import CheckOptions, Finding, Level, check_up, verdict_of
from envmgr.testing.checkup.checkup import FRAMES, METHODS
from envmgr.testing.checkup.findings import worst_of

_COLOURS = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "red"}
_INDENT = " " * 24


@dataclass(frozen=True)
class Asked:
    """What `envmgr check` was told.

    Attributes:
        config: path of the config file.
        overrides: `section.key=value`, in order.
        allow_import: modules that the config may import.
        episodes: how many the env is to endure.
        seconds: how long each part may take.
        methods: start methods to try besides the server, separated by commas.
        strict: warnings count as problems.
        json_file: where the findings go; None writes none.
    """

    config: str
    overrides: tuple[str, ...] = ()
    allow_import: tuple[str, ...] = ()
    episodes: int = 1000
    seconds: float = 60.0
    methods: str = ",".join(METHODS)
    strict: bool = False
    json_file: str | None = None


def execute(asked: Asked) -> int:
    """Check the env of a config, print what is found, and return the exit code.

    Raises:
        ConfigError: nothing was checked.
    """
    resolved = resolve_config(asked.config, set=asked.overrides, allow_imports=asked.allow_import)
    options = _options(asked, resolved)
    factory = single_factory(resolved, "check")
    try_to_write(asked.json_file)
    shows = asked.json_file != STDOUT
    if shows:
        click.echo(f"envmgr check: {env_name(resolved)}")
    findings = []
    with logging_to(logging.NullHandler()), doing(shows) as begin:
        for finding in check_up(factory, options, with_frames=_with_frames(factory), begin=begin):
            findings.append(finding)
            if shows:
                _print(finding)
    verdict = verdict_of(findings)
    if shows:
        click.secho(f"verdict: {verdict}", bold=True)
    passes = worst_of(findings) < (Level.WARNING if asked.strict else Level.PROBLEM)
    _write(asked, resolved, findings, verdict, passes)
    return DONE if passes else FAILED


def _write(
    asked: Asked, resolved: ResolvedConfig, findings: list[Finding], verdict: str, passes: bool
) -> None:
    figures: dict[str, Any] = {
        "env": env_name(resolved),
        "verdict": verdict,
        "passes": passes,
        "findings": [finding.as_dict() for finding in findings],
        "versions": versions(),
    }
    write_figures(asked.json_file, figures)


def _options(asked: Asked, resolved: ResolvedConfig) -> CheckOptions:
    methods = tuple(name.strip() for name in asked.methods.split(",") if name.strip())
    wrong = [name for name in methods if name not in METHODS]
    if wrong:
        raise ConfigError(
            f"--methods has {wrong[0]!r} in it; start methods to try are {', '.join(METHODS)} (the "
            "worker server, the default, is tried in any case)."
        )
    if sys.platform == "win32":
        methods = tuple(name for name in methods if name == "spawn")
    cfg = resolved.values.manager
    return CheckOptions(
        episodes=asked.episodes,
        limit_s=asked.seconds,
        seed=cfg.seed if isinstance(cfg.seed, int) else 0,
        methods=methods,
        close_timeout_s=cfg.close_timeout,
    )


def single_factory(resolved: ResolvedConfig, command: str) -> Callable[[], Any]:
    """Return the factory of one env of a config.

    Raises:
        ConfigError: it names none, or its kind of manager makes envs itself.
    """
    cfg = resolved.values.manager
    if getattr(get_env_manager_cls(cfg), "makes_envs", False):
        raise ConfigError(
            f"manager.type is {cfg.type!r}, which makes its envs itself: `envmgr {command}` looks "
            "at single envs that a section `env` names"
        )
    return env_factories(resolved.values.env, 1, policy=resolved.import_policy)[0]


def _with_frames(factory: Callable[[], Any]) -> Callable[[], Any]:
    if not isinstance(factory, ConfiguredEnv):
        return factory
    return dataclasses.replace(factory, kwargs={**factory.kwargs, "render_mode": FRAMES})


def _print(finding: Finding) -> None:
    level = click.style(f"{finding.level.word:<8}", fg=_COLOURS[finding.level])
    first, *more = finding.text.splitlines()
    click.echo(f"{level} {finding.part:<14} {first}")
    for line in more:
        click.echo(f"{_INDENT}  {line}")
    if finding.advice:
        click.echo(f"{_INDENT}-> {finding.advice}")
