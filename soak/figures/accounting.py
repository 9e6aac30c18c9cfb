"""Accounting: every action gives one timestep while workers are hurt; bystanders notice nothing.

Each env signs its timesteps, and a ledger compares what was delivered with what was asked for. Some
of the workers are never hurt: what their envs deliver is compared byte for byte with the same
envs stepped in a plain loop.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Sequence
from typing import Any

from envmgr.testing import AuditedLoop, LedgerEnv, Saboteur, mark_of, without_instance
from envmgr.types import EnvTimestep, is_abnormal
from figures import Figure
from figures.loop import ledger_manager, own_actions

ENV_NUM = 64
STEPS, QUICK_STEPS = 1_000_000, 20_000
EVERY_S = 0.05
KINDS = ("kill", "segfault", "exit", "stop", "hang")
STEP_TIMEOUT_S = 1.0
WAIT_NUM = 24
HURT = 48
"""Workers of the envs 0..47 are hurt, those of the others are not."""
PACKED_WORKERS = 4
SETTLE_S = 30.0

_SEED = 7


class Bystander:
    """The checksums of what an env that is never hurt delivers, one after each of its steps."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self._sum = 0

    def take(self, obs: Any, done: bool, info: Any) -> None:
        """Take a timestep. Its mark is part of it, but for the number of the env object."""
        mark = mark_of(info)
        if mark is not None:
            mark = mark._replace(instance=0, obs=0, reward=0)
        data = without_instance(obs).tobytes() + bytes([done]) + repr(mark).encode()
        self._sum = zlib.crc32(data, self._sum)
        self.sums.append(self._sum)


def plain_loop(env_id: int, n_steps: int) -> list[int]:
    """Return the checksums of an env that is stepped here, without any manager."""
    env, bystander = LedgerEnv(env_id), Bystander()
    next_actions = own_actions(ENV_NUM)
    env.reset(seed=_SEED + env_id)
    for _ in range(n_steps):
        obs, _, terminated, _, info = env.step(next_actions([env_id])[env_id])
        bystander.take(obs, terminated, info)
        if terminated:
            env.reset()
    return bystander.sums


def measure(quick: bool) -> Sequence[Figure]:
    """Measure with a worker for each env, and with shared workers."""
    n_steps = QUICK_STEPS if quick else STEPS
    return [
        *run("a worker for each env", n_steps, {}),
        *run(f"{PACKED_WORKERS} workers", n_steps, {"num_workers": PACKED_WORKERS}),
    ]


def run(title: str, n_steps: int, cfg: dict[str, Any]) -> list[Figure]:
    """Measure with a config, until `n_steps` timesteps have arrived."""
    manager = ledger_manager(
        ENV_NUM,
        type="async_subprocess",
        wait_num=WAIT_NUM,
        seed=_SEED,
        step_timeout=STEP_TIMEOUT_S,
        reset_timeout=STEP_TIMEOUT_S,
        **cfg,
    )
    try:
        loop = AuditedLoop(manager)
        bystanders = {env_id: Bystander() for env_id in range(HURT, ENV_NUM)}
        saboteur = Saboteur(manager, rate_hz=1 / EVERY_S, kinds=KINDS, seed=_SEED)
        began = time.monotonic()
        _step(loop, saboteur, bystanders, n_steps)
        seconds = time.monotonic() - began
        saboteur.collect()
        stats = manager.stats()
    finally:
        manager.close()
    loop.ledger.end()
    return _figures(title, loop.ledger.report(), saboteur, bystanders, stats, seconds)


def _step(
    loop: AuditedLoop,
    saboteur: Saboteur,
    bystanders: dict[int, Bystander],
    n_steps: int,
) -> None:
    """Step until `n_steps` timesteps have arrived, then take those that are still under way."""
    next_actions, chosen = own_actions(ENV_NUM), random.Random(_SEED)
    arrived, due_s = 0, time.monotonic() + EVERY_S
    while arrived < n_steps:
        now = time.monotonic()
        if now >= due_s:
            due_s = max(due_s + EVERY_S, now)
            saboteur.injure(env_id=chosen.randrange(HURT))
        timesteps = loop.step(next_actions(loop.ready()))
        arrived += _take(bystanders, timesteps)
    deadline = time.monotonic() + SETTLE_S
    while loop.ledger.pending and time.monotonic() < deadline:
        _take(bystanders, loop.gather(timeout_s=1.0))


def _take(bystanders: dict[int, Bystander], timesteps: dict[int, EnvTimestep]) -> int:
    for env_id, timestep in timesteps.items():
        if env_id in bystanders:
            bystanders[env_id].take(timestep.obs, timestep.done, timestep.info)
            if is_abnormal(timestep.info):
                bystanders[env_id].sums[-1] = -1
    return len(timesteps)


def _figures(
    title: str,
    report: Any,
    saboteur: Saboteur,
    bystanders: dict[int, Bystander],
    stats: dict[str, Any],
    seconds: float,
) -> list[Figure]:
    summary = saboteur.summary()
    kinds = ", ".join(f"{n['injuries']} {kind}" for kind, n in summary.items() if kind != "all")
    measured = (
        f"{report.lost} lost, {report.repeated} repeated, {report.swapped} swapped of "
        f"{report.accepted:,} ({report.abnormal:,} abnormal); {kinds}; "
        f"{stats['renewals']:,} envs renewed; {seconds:.0f} s"
    )
    balanced = report.accepted == report.normal + report.abnormal and report.is_clean
    different = sum(
        bystander.sums != plain_loop(env_id, len(bystander.sums))
        for env_id, bystander in bystanders.items()
    )
    n_compared = sum(len(bystander.sums) for bystander in bystanders.values())
    return [
        Figure(
            f"{ENV_NUM} envs, {title}, one hurt every {EVERY_S * 1000:.0f} ms",
            measured,
            "0 lost, 0 repeated, 0 swapped",
            balanced,
        ),
        Figure(
            f"the {len(bystanders)} envs of workers never hurt, beside a plain loop",
            f"{different} differ, in {n_compared:,} timesteps",
            "0 differ",
            different == 0,
        ),
    ]
