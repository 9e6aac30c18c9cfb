"""Observations that are read while others are being written: never one that is half old, half new.

    python -m tests.fuzz.torn 10000000

Envs fill their observations with the action that they were given. One worker writes them into the
shared block as fast as it can, while the trainer takes each as soon as its token says that it is
whole.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envmgr import create_env_manager
from envmgr.spaces import codec_of
from envmgr.wire.arenas import Placement, arena_arrays, buffers_for, plan_placements
from envmgr.wire.block import (
    BUFFER_BITS,
    HAS_INFO,
    RING_LAST,
    Block,
    BlockPlan,
    posting_of,
    token_of,
)
from envmgr.wire.hosts import HostSettings
from envmgr.wire.infos import InfoDecoder
from envmgr.wire.messages import EpisodePlan, Message, Op, ResetRequest
from envmgr.worker.block_steps import BlockStepper
from envmgr.worker.host import Host

ENV_NUM = 64


class Filled(gymnasium.Env[Any, Any]):
    """An env whose observations are full of one number: the action, or minus the reset's number.

    Args:
        n: numbers in an observation.
    """

    action_space = spaces.Discrete(1 << 40)

    def __init__(self, n: int) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (n,), np.float64)
        self._n = n
        self._n_resets = self._n_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._n_resets += 1
        self._n_steps = 0
        return np.full(self._n, -float(self._n_resets)), {"number": self._n_resets}

    def step(self, action: Any) -> Any:
        self._n_steps += 1
        obs = np.full(self._n, float(action))
        info = {"action": float(action)} if self._n_steps % 8 == 0 else {}
        return obs, float(action), False, False, info


@dataclass
class TornReport:
    """What was read.

    Attributes:
        n_reads: observations of steps that were taken.
        n_contended: those of them that were taken while the writer had others to write.
        n_torn: those that were not of their own action throughout, or whose reward or info was not.
    """

    n_reads: int = 0
    n_contended: int = 0
    n_torn: int = 0


def contend(n_reads: int, *, n: int = 64) -> TornReport:
    """Read observations in contention with the process that writes them.

    The writer is the real one; the reader does what the trainer does: a token that is there says
    that what belongs to it is whole.

    Args:
        n_reads: how many, while the writer had others to write.
        n: numbers in an observation.
    """
    layouts = [codec_of(Filled(n).observation_space).layout] * ENV_NUM
    actions = codec_of(Filled.action_space).layout
    assert actions is not None
    plan = BlockPlan(ENV_NUM, 1, actions)
    placements, nbytes = plan_placements(layouts, buffers_for(True), plan.nbytes)
    placed = [replace(p, block=plan) for p in placements if p is not None]
    memory = mmap.mmap(-1, nbytes)
    context = multiprocessing.get_context("fork")
    attached = context.Event()
    writer = context.Process(target=_write, args=(memory, placed, n, attached))
    writer.start()
    try:
        assert attached.wait(30.0)  # what is posted before is not for these envs
        return _read(memory, plan, placed, n_reads)
    finally:
        writer.kill()
        writer.join()
        writer.close()
        gc.collect()  # columns are views of the memory
        memory.close()


def _write(memory: Any, placements: Sequence[Placement], n: int, attached: Any) -> None:
    """Be the worker: take what is posted, without end."""
    posted = BlockStepper(0, lambda: None, timed=False)
    factories = dict.fromkeys(range(ENV_NUM), lambda: Filled(n))
    host = Host(
        factories,
        HostSettings(),
        encode=lambda message: message,
        send=lambda message: None,
        memory=lambda nbytes: memory,
        stepper=posted,
    )
    endless = EpisodePlan(auto_reset=False, episodes_left=0, params={})
    requests = (
        (Op.HELLO, None),
        (Op.ATTACH, None),
        (Op.RESET, ResetRequest({}, None, None, endless)),
    )
    for env_id in range(ENV_NUM):
        for number, (op, payload) in enumerate(requests):
            placed = placements[env_id] if op is Op.ATTACH else payload
            host.handle(Message(op, env_id, 0, number + 1, placed))
    attached.set()
    trainer = os.getppid()
    while os.getppid() == trainer:
        for _ in range(1000):
            posted.take_posted()


def _read(memory: Any, plan: BlockPlan, placements: Sequence[Placement], n: int) -> TornReport:
    block, (arena,) = Block(memory, plan), arena_arrays(memory, placements[0])
    report, decoder = TornReport(), InfoDecoder()
    rows = np.arange(ENV_NUM)
    request_id = 10
    while report.n_contended < n:
        request_id += 1
        tokens = np.full(ENV_NUM, token_of(0, request_id), dtype=np.uint64)
        wanted = request_id * ENV_NUM + rows
        block.actions[0][...] = wanted
        block.requests[...] = tokens
        block.posted[0] = posting_of(request_id, RING_LAST)
        missing = rows
        while len(missing):
            there = block.replies[missing] == tokens[missing]
            arrived, missing = missing[there], missing[~there]
            if not len(arrived):
                continue
            flags = block.flags[arrived]
            obs = arena[flags & BUFFER_BITS, arrived]
            right = wanted[arrived].astype(np.float64)
            wrong = (obs != right[:, None]).any(axis=1) | (block.rewards[arrived] != right)
            for position in np.flatnonzero(flags & HAS_INFO).tolist():
                info = decoder.decode(block.infos[arrived[position]].tobytes())
                wrong[position] |= info["action"] != right[position]
            report.n_reads += len(arrived)
            report.n_contended += len(arrived) if len(missing) else 0
            report.n_torn += int(wrong.sum())
    return report


@dataclass
class KilledReport:
    """What came of workers that were killed while they wrote.

    Attributes:
        n_kills: how many.
        n_abnormal: actions whose worker did not live to answer them.
        n_torn: observations that were handed out and were not whole.
        n_lost: actions without a timestep, or with one that is neither theirs nor abnormal.
    """

    n_kills: int = 0
    n_abnormal: int = 0
    n_torn: int = 0
    n_lost: int = 0


def kill_writers(n_kills: int, seed: int = 0, *, n: int = 1 << 18) -> KilledReport:
    """Kill workers at random moments of their steps, most of which is writing an observation.

    Args:
        n_kills: how many.
        seed: of the moments.
        n: numbers in an observation.
    """
    rng = random.Random(seed)
    report = KilledReport()
    cfg = {"type": "subprocess", "context": "fork", "max_failures": 10, "failure_window_s": 1e-3}
    cfg["episode_num"] = float("inf")
    with create_env_manager(cfg, env_fn=[lambda: Filled(n)] * 3) as manager:
        number = 0
        step_s = _step_s(manager)
        while report.n_kills < n_kills:
            ready = _all_ready(manager)
            report.n_torn += sum(_is_mixed(obs) for obs in ready.values())
            actions = {i: (number := number + 1) for i in ready}
            pids = [worker["pid"] for worker in manager.stats()["workers"]]
            victim = rng.choice(pids)
            manager.send(actions)
            moment = time.perf_counter() + rng.random() * step_s
            while time.perf_counter() < moment:
                pass
            with contextlib.suppress(ProcessLookupError):  # killed before, and not known to be dead
                os.kill(victim, signal.SIGKILL)
                report.n_kills += 1
            timesteps = manager.recv()
            report.n_lost += len(actions.keys() ^ timesteps.keys())
            for env_id, timestep in timesteps.items():
                report.n_torn += _is_mixed(timestep.obs)
                if timestep.info.get("abnormal"):
                    report.n_abnormal += 1
                    report.n_lost += not np.array_equal(timestep.obs, ready[env_id])
                else:
                    report.n_lost += int(timestep.obs[0] != actions[env_id])
    return report


def _all_ready(manager: Any) -> dict[int, Any]:
    ready: dict[int, Any] = {}
    while len(ready) < manager.env_num:
        ready = manager.ready_obs
    return ready


def _step_s(manager: Any) -> float:
    actions = dict.fromkeys(_all_ready(manager), 1)
    began = time.perf_counter()
    manager.step(actions)
    return time.perf_counter() - began


def _is_mixed(obs: Any) -> bool:
    return bool((obs != obs[0]).any())


def main() -> None:
    """Run the long form and print what came of it."""
    n_reads = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    n_kills = int(sys.argv[2]) if len(sys.argv) > 2 else 500
    began = time.monotonic()
    report = contend(n_reads)
    print(f"{report.n_contended} contended reads in {time.monotonic() - began:.0f} s")
    print(f"  torn: {report.n_torn} (of {report.n_reads} in all)")
    killed = kill_writers(n_kills)
    print(
        f"{killed.n_kills} workers killed while they wrote: {killed.n_abnormal} abnormal timesteps"
    )
    print(f"  torn: {killed.n_torn}; lost or wrong: {killed.n_lost}")
    sys.exit(bool(report.n_torn or killed.n_torn or killed.n_lost))


if __name__ == "__main__":
    main()
