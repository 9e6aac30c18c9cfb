"""Many threads with a lease each, over envs that crash, hang and are killed."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

from envmgr import create_env_manager
from envmgr.errors import EnvFailure
from tests.contract.leased import DIE, END, HANG, RAISE, Told

LIMIT_S = 0.3


@dataclass
class Found:
    """What a run has found.

    Attributes:
        steps: answered.
        leases: how many there were.
        failures: of steps and resets.
        wrong: what was lost, repeated or mixed up, in words.
    """

    steps: int = 0
    leases: int = 0
    failures: int = 0
    wrong: list[str] = field(default_factory=list)


def stress(
    cfg: dict[str, Any],
    *,
    env_num: int,
    n_threads: int,
    n_steps: int,
    seed: int,
    steps: int = 8,
    faults: float = 0.01,
    kill_every_s: float = 0.2,
) -> Found:
    """Have threads play in leased envs, some of which fail.

    Args:
        cfg: of the manager.
        env_num: how many envs.
        n_threads: how many threads.
        n_steps: they go on until so many steps were answered.
        seed: of what is done.
        steps: at most, in each lease.
        faults: the share of steps that raise; as many end the worker, and half as many hang.
        kill_every_s: how often a worker is killed from outside.
    """
    found, lock, ended = Found(), threading.Lock(), threading.Event()
    keys = {"max_failures": 10**6, "max_failures_total": 10**6, "retry_waiting_time": 0.0}
    with create_env_manager({**cfg, **keys}, env_fn=[Told] * env_num) as manager:

        def rollout(rng: random.Random, number: int) -> tuple[int, int]:
            answered = n_failures = 0
            with manager.lease() as env:
                try:
                    obs, _ = env.reset(seed=number, timeout_s=20.0)
                except EnvFailure:
                    return 0, 1
                if obs.tolist() != [number, 0.0, -1.0]:
                    found.wrong.append(f"episode {number} begins with {obs}")
                for k in range(1, rng.randint(2, steps)):
                    fault = rng.random()
                    action = RAISE if fault < faults else DIE if fault < 2 * faults else k
                    action = HANG if 2 * faults < fault < 2.5 * faults else action
                    action = END if fault > 0.95 else action
                    timestep = env.step(action, timeout_s=LIMIT_S if action == HANG else 20.0)
                    answered += 1
                    if timestep.info.get("abnormal"):
                        if timestep.reward is not None or env.outcome.is_completed:
                            found.wrong.append(f"episode {number}: a failure with a reward")
                        return answered, 1
                    if timestep.obs.tolist() != [number, k, action] or timestep.reward != action:
                        found.wrong.append(f"episode {number}, step {k}: {timestep}")
                    if timestep.done:
                        return answered, n_failures
            return answered, n_failures

        def work(index: int) -> None:
            rng = random.Random(seed + index)
            turns = itertools.count()
            while found.steps < n_steps:
                answered, n_failures = rollout(rng, index * 100_000 + next(turns))
                with lock:
                    found.leases += 1
                    found.steps += answered
                    found.failures += n_failures

        def kill() -> None:
            rng = random.Random(seed)
            while not ended.wait(kill_every_s):
                workers = manager.stats()["workers"]
                if workers:
                    try:
                        os.kill(rng.choice(workers)["pid"], signal.SIGKILL)
                    except ProcessLookupError:  # it has died meanwhile
                        continue

        threads = [threading.Thread(target=work, args=(k,)) for k in range(n_threads)]
        killer = threading.Thread(target=kill)
        for thread in (*threads, killer):
            thread.start()
        for thread in threads:
            thread.join()
        ended.set()
        killer.join()
        stats = manager.stats()
        if stats["actions"] != stats["timesteps"] + stats["cancelled"] or stats["outstanding"]:
            found.wrong.append(f"accounts: {stats}")
        if stats["timesteps"] != found.steps:
            found.wrong.append(f"{stats['timesteps']} timesteps, of which {found.steps} came")
    return found
