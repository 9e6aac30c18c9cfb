"""envmgr and its peers with the same envs, side by side: measured in laps, compared in pairs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envmgr.tuning.measuring import Runner, Stable
from envmgr.tuning.peers import Peer
from envmgr.tuning.search import Measured, compare

OURS = "envmgr"
_AHEAD = 1.1
"""A peer's ratio to envmgr that is not above this is noise."""

Open = Callable[["Peer | None"], Runner]
"""A function that opens a contestant; None stands for envmgr."""


def bench(
    peers: Sequence[Peer],
    opened: Open,
    *,
    laps: int,
    seconds: float,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[list[Measured[str]], dict[str, str]]:
    """Return what was measured of envmgr and of each peer, and the errors of those that failed.

    Args:
        peers: the libraries that run beside envmgr.
        opened: opens a contestant.
        laps: how often each contestant is measured.
        seconds: how long each measurement takes.
        say: called with what is being done.
    """
    by_name = {OURS: None, **{peer.name: peer for peer in peers}}
    everyone = [Measured(name) for name in by_name]
    with contextlib.closing(Stable(lambda name: opened(by_name[name]), say)) as stable:
        for lap in range(laps):
            for one in reversed(everyone) if lap % 2 else everyone:
                if rate := stable.measure(one.setting, seconds):
                    one.rates[lap] = rate
    compare(everyone)
    return sorted(everyone, key=lambda one: -one.ratio), stable.errors


_IN_PROCESS = ("base", "thread", "gym_vector", "env_pool")
"""Kinds that step envs in the trainer's own process."""


def advice(found: Sequence[Measured[str]], peers: Sequence[Peer], config: Mapping[str, Any]) -> str:
    """Return what to do where a peer that steps envs in the trainer's own process is ahead.

    Args:
        found: what was measured.
        peers: the libraries that ran beside envmgr.
        config: the config of envmgr's manager.

    Returns:
        A sentence or two; empty if no such peer is clearly ahead.
    """
    in_process = {peer.name for peer in peers if peer.is_in_process}
    ahead = [one for one in found if one.setting in in_process and one.ratio > _AHEAD]
    if not ahead:
        return ""
    best = max(ahead, key=lambda one: one.ratio)
    text = (
        f"{best.setting} is ahead because it steps the envs in the trainer's own process: their "
        "steps cost less than waking a worker, and an env that crashes takes the trainer along."
    )
    if config["type"].removesuffix("_v2") in _IN_PROCESS:
        return f"{text} So does `{config['type']}`; calls for arrays (`send_arrays`) cost it least."
    if config["num_workers"] is None:
        text += " Share workers (--set manager.num_workers=auto); `envmgr tune` tries how many."
    else:
        text += " More envs (--set manager.env_num=64) share what waking a worker costs."
    return f"{text} If they never crash, --set manager.type=base steps them there, too."
