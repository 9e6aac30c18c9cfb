"""`envmgr init`: a commented config for an env, written after it was launched and stepped."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from envmgr.cli.config_envs import manager_of, quiet_workers
from envmgr.cli.exit_codes import DONE
from envmgr.cli.progress import doing
from envmgr.cli.texts import echo, paragraph
from envmgr.config.checks import show_value
from envmgr.config.env_factories import key_of
from envmgr.config.imports import left_behind
from envmgr.config.schema import as_mapping
from envmgr.config.yaml_text import load_yaml
from envmgr.config_file import resolve_config
from envmgr.errors import ConfigError, EnvCrash, EnvFailure, EnvManagerError, EnvTimeout
from envmgr.manager.loop import ManagerLoop
from envmgr.outcomes import failure_in
from envmgr.texts import counted
from envmgr.tuning.measuring import MANY, Attempts, measure_one
from envmgr.tuning.template import Tried, config_text, step_limit_s
from envmgr.untrusted import plain_line

TRIED_STEPS = 3
LIMIT_S = 60.0
"""How long a step, a reset, or measuring one env may take before it is reported as a hang."""

PROFILE_S = 0.3
"""For how long an env is measured; less where it does not live as long."""


def execute(
    env: str,
    env_num: int,
    out: str | None,
    allow_import: Sequence[str],
    arguments: Sequence[str] = (),
) -> int:
    """Write a config, having tried it, and return the exit code.

    Args:
        env: a gymnasium id, or `package.module:callable`.
        env_num: how many envs.
        out: where the config goes; None names it after the env.
        allow_import: modules that the config may import.
        arguments: arguments of the env: `key=value`, or mappings, as YAML.

    Raises:
        ConfigError: the file is there already, or `env` cannot name an env.
        EnvManagerError: the env cannot be launched and stepped.
    """
    path = Path(out or f"{_slug(env)}.yaml")
    if path.exists():
        raise ConfigError(
            f"{str(path)!r} is there already, and is not replaced. Name another file with --out."
        )
    kwargs = _kwargs_of(arguments)

    def text_of(tried: Tried | None) -> str:
        return config_text(env, key_of(env), env_num, str(path), tried, kwargs)

    with doing() as say:
        say(f"trying {env}")
        tried, failed = _tried(text_of(None), path, allow_import)
    where = _where(env, path, allow_import)
    text = text_of(tried._replace(where=where))
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"the config cannot be written to {str(path)!r}: {error}") from error
    echo(
        f"envmgr init: {path}: {counted(env_num, 'env')} launched, and stepped "
        f"{tried.n_steps} times. Next: envmgr check {shlex.quote(str(path))}"
    )
    for warning in filter(None, (failed, where)):
        echo(f"envmgr: warning: {warning}", err=True)
    return DONE


def _where(env: str, path: Path, allow_import: Sequence[str]) -> str:
    """Return where to run a config if its env's module lies here, not beside it; else ""."""
    module, colon, _ = env.partition(":")
    top, here = module.partition(".")[0], Path.cwd()
    is_here = colon and left_behind([top], here, allow_import)
    if not is_here or left_behind([top], path.parent, ()):
        return ""
    return (
        f"The module {top!r} lies in {here}, not beside {path}: run envmgr there, or with "
        f"PYTHONPATH={shlex.quote(str(here))} and --allow-import {top}."
    )


def _slug(env: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", env.rpartition(":")[2].rpartition("/")[2].lower()).strip("-")


def _kwargs_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Return arguments of an env as the command line gives them.

    Raises:
        ConfigError: one is neither `key=value` nor a mapping.
    """
    kwargs: dict[str, Any] = {}
    for text in arguments:
        where = f"--kwargs {show_value(text)}"
        if text.lstrip().startswith("{"):
            kwargs |= as_mapping(load_yaml(text, where), where)
            continue
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"{where} is not of the form KEY=VALUE, such as g=9.8, and no mapping, such as "
                '{"g": 9.8}.'
            )
        kwargs[key.strip()] = load_yaml(value, where)
    return kwargs


def _tried(text: str, path: Path, allow_import: Sequence[str]) -> tuple[Tried, str]:
    """Launch the config that will be written, take some steps, and measure one env.

    Args:
        text: text of the config.
        path: where the config will be written.
        allow_import: modules that the config may import.

    Returns:
        What was seen of the env, and what failed, in words.

    Raises:
        EnvManagerError: the envs cannot be launched, or every step fails, or so many that no run
            bears it.
    """
    with _beside(path, text) as file:  # what may be imported depends on where the config is
        resolved = resolve_config(file, allow_imports=allow_import or None)
    config = resolved.values.manager
    config.max_failures = config.max_failures_total = MANY  # they are counted here
    config.step_timeout = config.reset_timeout = LIMIT_S
    failures: list[EnvFailure] = []
    n_steps = 0
    with quiet_workers() as config.worker_log, manager_of(resolved) as manager:
        loop = ManagerLoop(manager)
        longest_s = 0.0
        for _ in range(TRIED_STEPS):
            if ready := loop.ready():
                began = time.monotonic()
                timesteps = loop.step(loop.random_actions(ready)).values()
                failed = [one for one in (failure_in(t.info) for t in timesteps) if one is not None]
                n_steps += len(timesteps)
                failures += failed
                if not failed:
                    longest_s = max(longest_s, time.monotonic() - began)
        if n_steps == len(failures):
            error = failures[0] if failures else None
            raise EnvManagerError(
                f"each of the {n_steps} steps that were tried failed, so nothing was written. The "
                f"first: {'no env was ever ready' if error is None else paragraph(error)}"
            ) from error
        # Half of the limit of the whole call: a step or a reset that hangs is found as such.
        most_s = LIMIT_S / 2
        measured = measure_one(manager, PROFILE_S, min(most_s, step_limit_s(longest_s)), most_s)
        observations, actions = manager.observation_space, manager.action_space
        spaces = (plain_line(str(observations)), plain_line(str(actions)))
        metadata: Any = manager.metadata or {}
    failed_text = _failed_text(failures, n_steps, measured, config.max_failure_share)
    modes = tuple(map(str, metadata.get("render_modes", ())))
    profile = measured.profile
    tried = Tried(
        None if profile is None else profile.as_dict(),
        spaces,
        n_steps,
        modes,
        tuple(allow_import),
        loses_workers=any(
            isinstance(failure, (EnvCrash, EnvTimeout))
            for failure in (*failures, *measured.failures)
        ),
    )
    return tried, failed_text


def _failed_text(
    failures: Sequence[EnvFailure], n_steps: int, measured: Attempts, bears: float
) -> str:
    """Return in words what failed; empty if nothing did.

    Args:
        failures: failures of the steps that were taken through a manager.
        n_steps: how many these steps were.
        measured: what came of measuring one env.
        bears: the share of failures that a run bears.

    Raises:
        EnvManagerError: the env could not be measured, and fails too often for a run.
    """
    n_failed, n_steps = len(failures) + measured.n_failed, n_steps + measured.n_steps
    if not n_failed:
        return ""
    if lost := [*failures, *measured.failures]:
        first = paragraph(lost[0])
    else:
        first = "" if measured.profile is None else measured.profile.failure.splitlines()[-1]
    share = n_failed / n_steps
    text = (
        f"{n_failed} of {n_steps:,} steps that were tried failed ({share:.2g} of them; a run bears "
        f"{bears:g}, see max_failure_share)"
    )
    if measured.profile is not None:
        return f"{text}, and the envs went on. The first: {first}"
    if share > bears:
        raise EnvManagerError(
            f"{text}, and none of {counted(len(measured.failures), 'attempt')} to measure an env "
            f"came to its end, so nothing was written. The first: {first}"
        ) from measured.failures[0]
    return f"{text}, and no env lived long enough to be measured. The first: {first}"


@contextlib.contextmanager
def _beside(path: Path, text: str) -> Iterator[str]:
    """Provide a temporary file with this text in the folder of another file."""
    try:
        handle, name = tempfile.mkstemp(".yaml", ".envmgr-init-", path.parent)
    except OSError as error:
        raise ConfigError(f"nothing can be written to {str(path.parent)!r}: {error}") from error
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        yield name
    finally:
        os.unlink(name)
