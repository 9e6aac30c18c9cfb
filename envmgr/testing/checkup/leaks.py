"""What accumulates in a process, and whether that goes on. Pure: figures in, findings out."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from envmgr.testing.checkup.findings import Finding, Level
from envmgr.testing.checkup.probes import Endured
from envmgr.testing.checkup.processes import Holdings
from envmgr.texts import counted

_NOTICED = {"rss_bytes": 2e6, "fds": 3, "threads": 3, "children": 3}
"""How much must have accumulated, over the time looked at, to be called a leak."""

_UNEXPLAINED = {"rss_bytes": 50e6, "fds": 50, "threads": 50, "children": 50}
"""How much may accumulate from the first episode on without being mentioned, if it is no leak."""

_WHAT = {
    "rss_bytes": "memory",
    "fds": "open files",
    "threads": "threads",
    "children": "child processes",
}
_GROWS = {"rss_bytes": "grows", "fds": "grow", "threads": "grow", "children": "grow"}
_HAS_GROWN = {
    "rss_bytes": "has grown",
    "fds": "have grown",
    "threads": "have grown",
    "children": "have grown",
}
_FEWEST_SAMPLES = 9


def of_endurance(found: Endured, asked: int) -> list[Finding]:
    """Judge what accumulated in a process over many episodes."""
    episodes = found.samples[-1][0]
    about = f"{counted(episodes, 'episode')}, {counted(found.n_steps, 'step')}"
    why = "its process ended before more" if found.asked < asked else "the time was over"
    if episodes < asked:
        about += f" (of {asked:,} asked for; {why})"
    if found.cut:
        about += f"; {counted(found.cut, 'episode')} cut short"
    findings = _without_end(found, episodes)
    if len(found.samples) < _FEWEST_SAMPLES:
        advice = "Give more --seconds." if episodes < asked else "Give more --episodes."
        if found.asked < asked:
            advice = "A process that ends so early hardly fills up."
        text = f"{about}: too few to tell a leak, not judged"
        return [*findings, Finding("leaks", Level.NOTE, text, advice)]
    n_before, stays = len(findings), []
    for name in _NOTICED:
        values = [getattr(one, name) for _, one in found.samples]
        if None in values:
            continue  # the system does not tell
        grown, rise = leak_of(values, _NOTICED[name]), values[-1] - values[1]
        if grown is not None:
            findings.append(_leak(name, grown / found.samples[1][0]))
        elif rise >= _UNEXPLAINED[name]:
            findings.append(_rise(name, rise, about))
        else:
            stays.append(_WHAT[name])
    if len(findings) == n_before:
        what = " and ".join(filter(None, (", ".join(stays[:-1]), stays[-1])))
        text = f"{about}: {what} stay as they are"
        findings.append(Finding("leaks", Level.OK, text))
    return findings


def _without_end(found: Endured, episodes: int) -> list[Finding]:
    if not 0 < episodes == found.cut:
        return []
    return [
        Finding(
            "episodes",
            Level.NOTE,
            f"no episode ended in {counted(found.n_steps, 'random step')}; "
            f"{counted(episodes, 'episode')} had to be cut short by a reset",
            "If episodes are to end, have `step` say so (terminated, truncated), or put "
            "gymnasium.wrappers.TimeLimit into env.wrappers.",
        )
    ]


def _leak(name: str, rate: float) -> Finding:
    return Finding(
        "leaks",
        Level.PROBLEM if name != "rss_bytes" else Level.WARNING,
        f"with every episode {_WHAT[name]} {_GROWS[name]} by {_rate(name, rate)}",
        _LEAK_ADVICE[name],
        figures={"name": name, "per_episode": rate},
    )


def _rise(name: str, rise: float, about: str) -> Finding:
    """Return the finding for something that has grown, but not as a leak does."""
    amount = f"{rise / 1e6:,.0f} MB" if name == "rss_bytes" else f"{rise:,}"
    return Finding(
        "leaks",
        Level.NOTE,
        f"{about}: {_WHAT[name]} {_HAS_GROWN[name]} by {amount}, though not as evenly as a leak",
        "Something fills up (a cache, a buffer), or leaks now and then: more --episodes tell.",
        figures={"name": name, "rise": rise},
    )


_LEAK_ADVICE = {
    "rss_bytes": "Until it is mended: max_worker_rss_mb or max_episodes_per_worker renews workers.",
    "fds": "Close what an episode opens when it ends.",
    "threads": "Join what an episode starts when it ends.",
    "children": "End and wait for the processes that an episode starts.",
}


def leak_of(values: Sequence[float | None], noticed: float) -> float | None:
    """Return by how much values grow from one to the next, if that growth goes on; else None.

    Something that fills up (a cache, a pool of an allocator) grows less and less; a leak does not.

    Args:
        values: equally spaced in episodes.
        noticed: the least growth that counts.
    """
    known = [value for value in values if value is not None]
    if len(known) < _FEWEST_SAMPLES or len(known) < len(values):
        return None
    late = known[len(known) // 4 :]
    third = len(late) // 3
    first, middle, last = (
        statistics.median(part) for part in (late[:third], late[third:-third], late[-third:])
    )
    early_growth, late_growth = middle - first, last - middle
    if early_growth <= 0 or late_growth < 0.5 * early_growth or last - first < noticed:
        return None
    return float(last - first) / (len(late) - third)


def of_rebuilding(found: Sequence[Holdings]) -> list[Finding]:
    """Judge what envs leave behind that are closed one after the other in one process."""
    if len(found) < 3:
        return []
    findings = []
    for name in ("fds", "threads", "children"):
        values = [getattr(one, name) for one in found[1:]]
        if None in values:
            continue
        rises = [b - a for a, b in itertools.pairwise(values)]
        if all(rise > 0 for rise in rises):
            left = f"{_WHAT[name]} behind: {statistics.mean(rises):g}"
            text = f"each env that is closed leaves {left}"
            advice = "Have close give back what the env took; workers that renew envs fill up."
            findings.append(Finding("closing", Level.WARNING, text, advice))
    if not findings:
        text = f"{len(found)} envs were built and closed in one process, and left nothing"
        findings.append(Finding("closing", Level.OK, text))
    return findings


def _rate(name: str, rate: float) -> str:
    if name != "rss_bytes":
        return f"{rate:.3g}"
    if not rate > 0 or math.isinf(rate):
        return f"{rate:.3g} bytes"
    unit, scale = ("MB", 1e6) if rate >= 1e6 else ("kB", 1e3)
    after = counted(max(1, round(1e9 / rate)), "episode")
    return f"{float(f'{rate / scale:.3g}'):g} {unit} (1 GB after {after})"
