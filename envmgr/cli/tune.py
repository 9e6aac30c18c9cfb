"""`envmgr tune`: find the setting of a config that steps its envs fastest on this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from envmgr.cli.config_envs import env_name, factories_of, quiet_workers
from envmgr.cli.exit_codes import DONE, FAILED
from envmgr.cli.figures import (
    STDOUT,
    refuse_unwritable,
    try_to_write,
    versions,
    write_figures,
    write_text,
)
from envmgr.cli.progress import doing
from envmgr.cli.texts import (
    cell,
    cut_texts,
    echo,
    error_text,
    listed,
    load_text,
    print_table,
    wide_console,
)
from envmgr.collect import make_policy, policy_seed
from envmgr.config import to_plain
from envmgr.config.checks import show_value
from envmgr.config.yaml_text import load_yaml
from envmgr.config_file import ResolvedConfig, resolve_config
from envmgr.errors import ConfigError, EnvManagerError
from envmgr.manager import EnvManager
from envmgr.registry import ENV_MANAGER_REGISTRY
from envmgr.texts import counted, short_time
from envmgr.tuning.measuring import Act, PolicyOf
from envmgr.tuning.tune import NoSettingError, Row, Tuned, tune
from envmgr.tuning.yaml_edit import edited
from envmgr.types import EnvFactory

_AHEAD = 1.1
"""How much faster envs without workers have to be to be worth a sentence."""


def execute(
    config: str,
    overrides: Sequence[str],
    allowed: Mapping[str, Sequence[str]],
    *,
    seconds: float,
    kinds: str,
    out: str | None,
    force: bool,
    json_file: str | None,
) -> int:
    """Tune a config, print the result, and return the exit code.

    Args:
        config: path of the config file.
        overrides: `section.key=value`, in order.
        allowed: what the config may do, by the names of the lists in `allow_list`.
        seconds: about how long the tuning may take.
        kinds: registry keys to try, separated by commas; empty for those with workers.
        out: where the tuned config goes; None prints it.
        force: whether to replace that file.
        json_file: where the figures go; None writes none.

    Raises:
        ConfigError: nothing was run.
        EnvManagerError: the env cannot be built and stepped; or the tuned config cannot be written
            after all, and is printed.
    """
    resolved = resolve_config(config, set=overrides, **allowed)
    factories = factories_of(resolved, "`envmgr tune` runs them in several ways")
    for kind in listed(kinds):
        ENV_MANAGER_REGISTRY.get(kind)  # raises, and names the nearest
    if out is not None:
        _try_to_write(out, force=force)
    try_to_write(json_file)
    shows = json_file != STDOUT
    try:
        tuned = _tuned(resolved, factories, seconds, listed(kinds), shows)
    except NoSettingError as error:  # whose message is made of what is shown as it stands
        echo(f"envmgr: error: {error}", err=True)
        return FAILED
    text = _tuned_text(resolved.text, overrides, tuned)
    # Files first: stdout may go to a disk that is full.
    unwritten = None if out is None else _written(out, text)
    try:
        figures = {**as_figures(tuned), "env": env_name(resolved), "config": text}
        write_figures(json_file, figures)
    finally:
        if shows:
            _print(tuned)
            is_there = out is not None and unwritten is None
            echo(f"The tuned config is in {out}.\n" if is_there else f"\n{text}", nl=False)
    if unwritten is not None:
        raise EnvManagerError(f"the tuned config cannot be written to {out!r}: {unwritten}")
    return DONE


def _tuned(
    resolved: ResolvedConfig,
    factories: Sequence[EnvFactory],
    seconds: float,
    kinds: Sequence[str],
    shows: bool,
) -> Tuned:
    """Tune the config; show meanwhile what is being run."""
    if shows:
        echo(
            f"envmgr tune: {counted(len(factories), 'env')} of {env_name(resolved)}, about "
            f"{seconds:g} s; load {load_text()}"
        )
    config = to_plain(resolved.values.manager)
    with quiet_workers() as folder, doing(shows) as say:
        return tune(
            {**config, "worker_log": config["worker_log"] or folder},
            factories,
            seconds=seconds,
            kinds=kinds,
            policy_of=_policy_of(resolved),
            say=say,
            error_text=error_text,
        )


def _policy_of(resolved: ResolvedConfig) -> PolicyOf | None:
    """Return what makes the config's policy; None for random actions, which are drawn before."""
    values = resolved.values
    if values.collect.policy == "random":
        return None

    def policy_of(manager: EnvManager) -> Act:
        spaces = (manager.observation_space, manager.action_space)
        seed = policy_seed(values.manager.seed)
        policy = make_policy(values.collect.policy, *spaces, seed, allow=resolved.file_policy)
        if hasattr(policy, "initial_state"):
            raise ConfigError(
                "collect.policy is recurrent, which `envmgr tune` does not run: give --set "
                "collect.policy=random"
            )
        return lambda obs: getattr(acted := policy(dict(obs)), "actions", acted)

    return policy_of


# -- what came of it ------------------------------------------------------------------------------


def as_figures(tuned: Tuned) -> dict[str, Any]:
    """Return the result of tuning as JSON-compatible values."""

    def row(one: Row) -> dict[str, Any]:
        return {
            "setting": to_plain(_finite(one.setting.as_config())),
            "measured": one.measured,
            "ratio": one.ratio,
            "spread": one.spread,
            "error": one.error,
            "note": one.note,
            "is_choice": one.is_choice,
        }

    return {
        "profile": tuned.profile.as_dict(),
        "worker_bytes": tuned.worker_bytes,
        "load": load_text(),
        "now": _finite(tuned.now.as_config()),
        "best": _finite(tuned.best.as_config()),
        "changes": _finite(tuned.changes),
        "rows": [row(one) for one in tuned.rows],
        "versions": versions(),
    }


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: "inf" if value == float("inf") else value for key, value in values.items()}


def _print(tuned: Tuned) -> None:
    profile = tuned.profile.as_dict()
    length, n_bytes = profile["episode_steps"], tuned.worker_bytes
    memory = "" if n_bytes is None else f"; a worker has {n_bytes / 1e6:,.0f} MB of its own"
    names = ("step_mean_s", "step_std_s", "reset_mean_s")
    step, deviation, reset = (short_time(profile[name]) for name in names)
    echo(
        f"a step takes {step} (std {deviation}), of which it waits "
        f"{profile['step_wait_share']:.0%}; a reset {reset}; "
        f"{'no episode ended' if length is None else f'{length:,.0f} steps per episode'}{memory}"
    )
    rows = [row for row in tuned.rows if row.measured is not None or row.error]
    beside = "beside now" if tuned.row_of(tuned.now).measured else "beside the slowest"
    header = ("setting", "steps/s", beside, "spread", "")
    print_table(wide_console(), header, [_cells(row, tuned) for row in rows])
    echo(cut_texts({str(row.setting): row.error for row in rows if row.error}), nl=False)
    if others := [str(row.setting) for row in tuned.rows if row not in rows]:
        echo(f"not measured, for want of time or memory: {'; '.join(others)}")
    if notes := dict.fromkeys(row.note for row in rows if row.note):
        echo(f"num_workers: auto has become {' and '.join(notes)}")
    echo(conclusion(tuned))


def _cells(row: Row, tuned: Tuned) -> Sequence[str]:
    marks = [name for name in ("best", "now") if row.setting == getattr(tuned, name)]
    name = f"{row.setting} ({', '.join(marks)})" if marks else str(row.setting)
    if row.error:
        return (name, "cannot be run", "", "", cell(row.error))
    ratio = "" if row.ratio is None else f"{row.ratio:.2f} x"
    where = "" if row.is_choice else "in the trainer's process: not to be chosen"
    if not math.isinf(row.setting.wait_num):
        where = f"a step returns {row.setting.wait_num:g} of the timesteps, or more"
    return (name, _rate(row.measured), ratio, f"{row.spread:.0%}", where)


def conclusion(tuned: Tuned) -> str:
    """Return which setting is best, and by how much; and which one without workers is faster."""
    best, now = tuned.row_of(tuned.best), tuned.row_of(tuned.now)
    ratio = best.ratio or 0.0
    if best is now:
        text = "The present setting is as good as any."
    elif now.measured is None:
        text = (
            f"{tuned.best}: {_rate(best.measured)} steps per second; the present setting cannot be "
            f"run. It changes {_changes_text(tuned)}."
        )
    else:
        text = (
            f"{tuned.best}: {ratio:.2f} x as many steps as now ({_rate(best.measured)} and "
            f"{_rate(now.measured)} per second). It changes {_changes_text(tuned)}."
        )
    if math.isinf(tuned.now.wait_num) and not math.isinf(tuned.best.wait_num):
        text += (
            f" A step then returns {tuned.best.wait_num:g} of the timesteps or more (wait_num), "
            f"and the others come with later steps; if the trainer needs all of them at each step, "
            f"give --kinds {tuned.now.kind}."
        )
    for row in tuned.rows:
        if not row.is_choice and (row.ratio or 0.0) > _AHEAD * ratio:
            text += (
                f" Without workers ({row.setting}) it would be {row.ratio:.2f} x; but an env that "
                "crashes or hangs then takes the trainer with it, so that is for you to choose: "
                f"--kinds {row.setting.kind},{tuned.now.kind}."
            )
    return text


def _changes_text(tuned: Tuned) -> str:
    before = tuned.now.as_config()
    changes = [
        f"{key} from {_shown(before[key])} to {_shown(tuned.changes[key])}" for key in tuned.changes
    ]
    return ", ".join(changes)


def _shown(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return show_value(int(value) if whole else value).strip("'")


def _tuned_text(text: str, overrides: Sequence[str], tuned: Tuned) -> str:
    """Return the text of a config with the best setting in it, and with the overrides."""
    changes: dict[tuple[str, ...], Any] = {}
    for override in overrides:
        dotted, _, value = override.partition("=")
        changes[tuple(part.strip() for part in dotted.split("."))] = load_yaml(value, override)
    notes: dict[tuple[str, ...], str] = {}
    ratio, before = tuned.row_of(tuned.best).ratio or 0.0, tuned.now.as_config()
    beside = f"{ratio:.2f} x the steps/s, with all that is marked so"
    if tuned.row_of(tuned.now).measured is None:
        beside = "with which it cannot be run, with all that is marked so"
    for key, value in tuned.changes.items():
        whole = isinstance(value, float) and value.is_integer()
        changes["manager", key] = int(value) if whole else value
        was = _shown(before[key])
        notes["manager", key] = f"tuned, was {was}: {beside}"
    return edited(text, changes, notes)


def _try_to_write(path: str, *, force: bool) -> None:
    """Find out before the tuning whether the tuned config can be written.

    Raises:
        ConfigError: it cannot be written, or the file is there and `force` is off.
    """
    if os.path.exists(path) and not force:
        raise ConfigError(
            f"{path!r} is there already, and is not replaced. Name another file with --out, "
            "or give --force."
        )
    refuse_unwritable(path, "the tuned config", "--out")


def _written(path: str, text: str) -> OSError | None:
    """Write the tuned config; return the error if it cannot be written."""
    try:
        write_text(path, text)
    except OSError as error:
        return error
    return None


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
