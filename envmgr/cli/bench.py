"""`envmgr bench`: the envs of a config under envmgr and other libraries that are installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envmgr.cli.config_envs import env_name, factories_of
from envmgr.cli.exit_codes import DONE, FAILED
from envmgr.cli.figures import STDOUT, try_to_write, versions, write_figures
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
from envmgr.config import to_plain
from envmgr.config_file import resolve_config
from envmgr.errors import ConfigError
from envmgr.texts import counted
from envmgr.tuning.bench import OURS, advice, bench
from envmgr.tuning.benchmark_process import Contestant
from envmgr.tuning.peers import PEERS, Peer, installed
from envmgr.tuning.search import Measured


def execute(
    config: str,
    overrides: Sequence[str],
    allowed: Mapping[str, Sequence[str]],
    *,
    laps: int,
    seconds: float,
    peers: str,
    limit_s: float,
    json_file: str | None,
) -> int:
    """Run the envs of a config under envmgr and its peers, print a table, return the exit code.

    Args:
        config: path of the config file.
        overrides: `section.key=value`, in order.
        allowed: what the config may do, by the names of the lists in `allow_list`.
        laps: how often each library is measured.
        seconds: how long each measurement takes.
        peers: words, separated by commas: peers with one of them in their name run; empty for all.
        limit_s: how long a peer may take to start, or hang, before it is given up.
        json_file: where the figures go; None writes none.

    Raises:
        ConfigError: nothing was run.
    """
    resolved = resolve_config(config, set=overrides, **allowed)
    factories = factories_of(resolved, "`envmgr bench` runs them in several ways")
    env_num, manager = len(factories), to_plain(resolved.values.manager)
    chosen, missing = installed(_named(peers))
    try_to_write(json_file)
    shows, name = json_file != STDOUT, env_name(resolved)
    if shows:
        each = f"{counted(laps, 'lap')} of {seconds:g} s for each"
        echo(f"envmgr bench: {counted(env_num, 'env')} of {name}, {each}; load {load_text()}")
    with doing(shows) as say:
        found, errors = bench(
            chosen,
            lambda peer: Contestant(peer, factories, manager, limit_s, error_text=error_text),
            laps=laps,
            seconds=seconds,
            say=say,
        )
    figures = {"env": name, "env_num": env_num, "load": load_text(), "versions": versions()}
    rows = [_figures(one, errors) for one in found]
    write_figures(json_file, {**figures, "rows": rows, "missing": missing})
    if shows:
        _print(found, errors, missing)
        if text := advice(found, chosen, manager):
            echo(text)
    if OURS in errors:
        echo(f"envmgr: error: envmgr itself cannot run them: {errors[OURS]}", err=True)
        return FAILED
    return DONE


def _named(text: str) -> list[Peer]:
    words = listed(text.lower())
    chosen = [p for p in PEERS if not words or any(word in p.name.lower() for word in words)]
    if not chosen:
        raise ConfigError(
            f"--peers {text!r} names none of {', '.join(peer.name for peer in PEERS)}. Give words "
            "of these, separated by commas."
        )
    return chosen


def _figures(one: Measured[str], errors: dict[str, str]) -> dict[str, Any]:
    return {
        "name": one.setting,
        "steps_per_s": one.rate or None,
        "ratio": one.ratio or None,
        "spread": one.spread,
        "error": errors.get(one.setting, ""),
    }


def _print(found: list[Measured[str]], errors: dict[str, str], missing: list[str]) -> None:
    rows = []
    for one in found:
        if one.setting in errors:
            rows.append((one.setting, "cannot be run", "", "", cell(errors[one.setting])))
        else:
            ratio = f"{one.ratio:.2f} x"
            rows.append((one.setting, f"{one.rate:,.0f}", ratio, f"{one.spread:.0%}", ""))
    print_table(wide_console(), ("", "steps/s", "beside envmgr", "spread", ""), rows)
    # What envmgr itself fails with is said at the end.
    echo(cut_texts({name: errors[name] for name in errors if name != OURS}), nl=False)
    if missing:
        echo(f"not installed: {', '.join(missing)}")
