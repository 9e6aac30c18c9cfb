"""`envmgr init`: a commented config for an env, written after it was launched and stepped."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from envmgr.cli.exits import DONE
from envmgr.cli.prepare import manager_of
from envmgr.cli.progress import doing, logging_to
from envmgr.config.env_factories import key_of
from envmgr.config_file import resolve_config
from envmgr.errors import ConfigError
from envmgr.tuning.measuring import profiled
from envmgr.tuning.template import Tried, config_text
from envmgr.worker.profiling import Profile

TRIED_STEPS = 3
PROFILE_S = 0.3


def execute(env: str, env_num: int, out: str | None, allow_import: Sequence[str]) -> int:
    """Write a config, having tried it, and return the exit code.

    Args:
        env: a gymnasium id, or `package.module:callable`.
        env_num: how many.
        out: where the config goes; None names it after the env.
        allow_import: modules that the config may import.

    Raises:
        ConfigError: the file is there already, or the env cannot be named so.
        EnvManagerError: the env cannot be launched and stepped.
    """
    path = Path(out or f"{_slug(env)}.yaml")
    if path.exists():
        raise ConfigError(
            f"{str(path)!r} is there already, and is not replaced. Name another file with --out."
        )
    with logging_to(logging.NullHandler()), doing() as say:
        say(f"trying {env}")
        tried = _tried(env, env_num, path, allow_import)
    text = config_text(env, key_of(env), env_num, str(path), tried)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"the config cannot be written to {str(path)!r}: {error}") from error
    click.echo(
        f"envmgr init: {path}: {env_num} envs were launched, and stepped "
        f"{tried.n_steps} times. Next: envmgr check {path}"
    )
    return DONE


def _slug(env: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", env.rpartition(":")[2].rpartition("/")[2].lower()).strip("-")


def _tried(env: str, env_num: int, path: Path, allow_import: Sequence[str]) -> Tried:
    """Launch what will be written, take some steps, and measure one env."""
    text = config_text(env, key_of(env), env_num, str(path), None)
    with _beside(path, text) as file:  # what may be imported depends on where the config is
        resolved = resolve_config(file, allow_imports=allow_import or None)
    manager = manager_of(resolved)
    n_steps = 0
    with manager:
        for _ in range(TRIED_STEPS):
            if manager.ready_obs:
                n_steps += len(manager.step(manager.random_action()))
        profile: Profile = manager.apply(profiled, PROFILE_S, env_ids=0)[0]
        spaces = (str(manager.observation_space), str(manager.action_space))
        metadata: Any = manager.metadata or {}
    modes = tuple(map(str, metadata.get("render_modes", ())))
    return Tried(profile.as_dict(), spaces, n_steps, modes, tuple(allow_import))


@contextlib.contextmanager
def _beside(path: Path, text: str) -> Iterator[str]:
    """Keep a file with this text in the folder of another file, for a while."""
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
