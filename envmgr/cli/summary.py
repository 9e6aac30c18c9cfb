"""The summary of a run: as values for its file, and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from envmgr.cli.resume import Earlier
from envmgr.cli.samples import total_s
from envmgr.cli.texts import failures_text, print_table, states_text
from envmgr.collect import Collector, CollectStatistics
from envmgr.config import to_plain
from envmgr.manager import EnvManager
from envmgr.texts import counted, how_often, number, short_time
from envmgr.untrusted import plain

if TYPE_CHECKING:
    from rich.console import Console


class Ending(str, Enum):
    """How a run ended."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


def summary_of(
    collector: Collector | None,
    manager: EnvManager,
    *,
    ending: Ending,
    error: str | None,
    states: Mapping[str, int],
    about: Mapping[str, Any],
    earlier: Earlier | None = None,
) -> dict[str, Any]:
    """Return the summary of a run as JSON-compatible values.

    Args:
        collector: the collector of the run; None if collecting had not begun.
        manager: the manager, closed.
        ending: how the run ended.
        error: why it ended so, unless it is done.
        states: how many envs were in each state before they were closed.
        about: what was run.
        earlier: what is known from before the run was resumed; None if it was not.
    """
    if collector is not None:
        statistics = collector.statistics
    else:
        statistics = CollectStatistics() if earlier is None else earlier.statistics
    stats = manager.stats() if earlier is None else earlier.count_in(manager.stats())
    unfinished = {} if collector is None else collector.unfinished
    return {
        "ending": ending.value,
        "error": error,
        **to_plain(about),
        **statistics.as_dict(),
        "unfinished_episodes": len(unfinished),
        "unfinished_steps": sum(unfinished.values()),
        "stats": {**stats, "states": dict(states)},
    }


def print_summary(
    console: Console, summary: Mapping[str, Any], *, title: str, where: str | None
) -> None:
    """Print a summary as a table."""
    returns, lengths, stats = summary["return"], summary["length"], summary["stats"]
    part = " (of the last part)" if summary.get("resumed") else ""  # nobody knows of those before
    rows = [
        ("steps", f"{summary['steps']:,} in {summary['elapsed_s']:,.1f} s"),
        ("steps/s", number(summary["steps_per_s"], 0)),
        ("episodes", f"{summary['episodes']:,}"),
        ("mean return", _spread(returns)),
        ("mean length", _spread(lengths)),
    ]
    if summary["episodes"] > 100:
        rows.insert(4, ("of the last 100", number(returns["mean_of_last_100"])))
    if time_of_resets := _resets_text(stats):
        rows.append(("resets", time_of_resets + part))
    if summary["unfinished_episodes"]:
        steps = counted(summary["unfinished_steps"], "step")
        rows.append(
            ("unfinished", f"{counted(summary['unfinished_episodes'], 'episode')}, {steps}")
        )
    if summary["abnormal_episodes"]:
        rows.append(("abnormal", counted(summary["abnormal_episodes"], "episode")))
    if stats["states"]:
        rows.append(("envs", states_text(stats["states"])))
    if "calibration" in stats:
        rows.append(("workers", f"{stats['num_workers']} (auto: {stats['calibration']['reason']})"))
    rows.append(("failures", failures_text(stats)))
    if stats.get("swaps"):
        rows.append(("swaps", f"{stats['swaps']:,} (a spare took an env's place){part}"))
    if stats.get("recycled"):
        recycled = counted(stats["recycled"], "worker")
        rows.append(("recycled", f"{recycled} that reached a limit{part}"))
    if summary.get("resumed"):
        latest = summary["resumed"][-1]["at"]
        rows.append(("resumed", f"{how_often(len(summary['resumed']))}, the last time at {latest}"))
    rows.append(("results", where or "not written"))
    title = plain(f"{title}: {summary['ending']}")
    console.print(title, style="bold", markup=False, highlight=False)
    print_table(console, (), rows)


def _resets_text(stats: Mapping[str, Any]) -> str:
    """Return how much of their time envs spent in resets; empty where it was not measured."""
    reset_s, step_s = total_s(stats, "reset"), total_s(stats, "step")
    if reset_s is None or step_s is None or not reset_s + step_s:
        return ""
    n, share = int(sum(stats["latency"]["reset"]["count"])), reset_s / (reset_s + step_s)
    return f"{counted(n, 'reset')} took {short_time(reset_s)}: {share:.0%} of the envs' own time"


def _spread(figures: Mapping[str, Any]) -> str:
    if figures["mean"] is None:
        return "-"
    low, high = (number(figures[name]).replace(".00", "") for name in ("min", "max"))
    return f"{number(figures['mean'])} (std {number(figures['std'])}, {low} to {high})"
