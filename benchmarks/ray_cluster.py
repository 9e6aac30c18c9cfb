"""`type: ray` on a cluster of two nodes, both on this machine, beside what it is compared with.

    python benchmarks/ray_cluster.py      # needs the extra `ray`, and takes tianshou if it is there
    python benchmarks/ray_cluster.py --only sleep,recovery

sleep: 64 envs that sleep for 10 ms, with `isolation: process` and a host on each node, their steps
posted or by message (`shared_memory: false`), and with `subprocess`.
null: 64 envs that do nothing, on two hosts, and an actor for each env: tianshou's RayVectorEnv, or,
where tianshou is not installed, the same by hand.
recovery: how long after Ray has reported the loss of a node all envs are back on the others, beside
how long an actor takes to start.
images: 84x84x4 observations: how many bytes travel for each step, and how often they are copied.

Rates are medians over rounds in which all take turns.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ray
from gymnasium.spaces import Box, Discrete
from ray.cluster_utils import Cluster

from envmgr import create_env_manager

STORE_BYTES = 200 << 20
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 5,
}


class Plain(gymnasium.Env[Any, Any]):
    """Shows the same array for ever.

    Args:
        shape: of the array.
        sleep_s: how long a step takes.
    """

    action_space = Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (4,), sleep_s: float = 0.0) -> None:
        dtype: Any = np.uint8 if len(shape) > 1 else np.float32
        self.observation_space = Box(0, 255, shape, dtype)
        self._obs, self._sleep_s = np.zeros(shape, dtype), sleep_s

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        if self._sleep_s:
            time.sleep(self._sleep_s)
        return self._obs, 1.0, False, False, {}


class ActorPerEnv:
    """What others do: an actor for each env, a call for each step."""

    def __init__(self, env_fns: list[Callable[[], Any]]) -> None:
        actor = ray.remote(_Holder).options(num_cpus=0)
        self._actors = [actor.remote(env_fn) for env_fn in env_fns]
        ray.get([actor.reset.remote() for actor in self._actors])

    def step(self, actions: Any) -> Any:
        """Step all envs and stack what they give."""
        calls = zip(self._actors, actions, strict=True)
        results = ray.get([actor.step.remote(action) for actor, action in calls])
        return tuple(map(np.stack, zip(*results, strict=True)))

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor)


class _Holder:
    def __init__(self, env_fn: Callable[[], Any]) -> None:
        self._env = env_fn()

    def reset(self) -> Any:
        return self._env.reset()

    def step(self, action: Any) -> Any:
        return self._env.step(action)


@contextmanager
def two_nodes() -> Iterator[tuple[Cluster, list[Any]]]:
    """Have a cluster whose head runs no envs, and this process connected to it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(True, head_node_args={**head, "_system_config": HEALTH})
    try:
        nodes = [cluster.add_node(num_cpus=4, object_store_memory=STORE_BYTES) for _ in range(2)]
        ray.init(address=cluster.address, configure_logging=False, log_to_driver=False)
        yield cluster, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def stepping(cfg: dict[str, Any], env_fns: list[Any]) -> Iterator[Callable[[], Any]]:
    """Have a manager; what is yielded steps all of its envs."""
    n = len(env_fns)
    with create_env_manager(cfg, env_fn=env_fns) as manager:
        env_ids, actions = np.arange(n), np.zeros(n, np.int64)
        manager.get_attr("action_space")

        def step() -> Any:
            manager.send_arrays(env_ids, actions)
            return manager.recv_arrays()

        yield step


@contextmanager
def others(env_fns: list[Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Have an actor for each env; what is yielded is who has it, and what steps all."""
    actions = np.zeros(len(env_fns), np.int64)
    try:
        from tianshou.env import RayVectorEnv
    except ImportError:
        name, venv = "an actor for each env", ActorPerEnv(env_fns)
    else:
        name, venv = "tianshou RayVectorEnv", RayVectorEnv(env_fns)
        venv.reset()
    try:
        yield name, lambda: venv.step(actions)
    finally:
        venv.close()


_BEGAN = time.perf_counter()


def say(text: str) -> None:
    """Print how far it has come."""
    print(f"  [{time.perf_counter() - _BEGAN:.0f} s] {text}", flush=True)


def rates(steps: dict[str, Callable[[], Any]], n: int, rounds: int, seconds: float) -> None:
    """Print env steps per second of each, over rounds in which they take turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in steps.items():
        for _ in range(3):
            step()
        say(f"{name} has taken its first steps")
    for _ in range(rounds):
        for name, step in steps.items():
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                step()
                count += 1
            found[name].append(count * n / (time.perf_counter() - began))
        say("round: " + ", ".join(f"{name} {values[-1]:,.0f}" for name, values in found.items()))
    first = next(iter(found))
    for name, values in found.items():
        ratio = statistics.median(a / b for a, b in zip(values, found[first], strict=True))
        median = statistics.median(values)
        print(
            f"  {name:34} {median:10,.0f} steps/s (best {max(values):,.0f}); {ratio:.2f} of",
            first,
            flush=True,
        )


def sleep(args: argparse.Namespace) -> None:
    """64 envs of 10 ms."""
    env_fns = [functools.partial(Plain, sleep_s=0.01)] * 64
    options = {"type": "ray", "num_workers": 2, "ray": {"isolation": "process"}}
    here, slower = {"type": "subprocess"}, {**options, "shared_memory": False}
    with (
        two_nodes(),
        stepping(here, env_fns) as ours,
        stepping(options, env_fns) as posted,
        stepping(slower, env_fns) as sent,
    ):
        steps = {"subprocess": ours, "ray, posted": posted, "ray, by message": sent}
        rates(steps, 64, args.rounds, args.seconds)


def null(args: argparse.Namespace) -> None:
    """64 envs that do nothing."""
    env_fns = [Plain] * 64
    cfg = {"type": "ray", "num_workers": 2}
    with two_nodes():
        say("the cluster is up; an actor for each env takes some seconds of a core each")
        with others(env_fns) as (name, theirs), stepping(cfg, env_fns) as ours:
            rates({name: theirs, "ray, 2 workers": ours}, 64, args.rounds, args.seconds)


def recovery(args: argparse.Namespace) -> None:
    """A node is killed."""
    cfg = {"type": "ray", "num_workers": 2, "retry_waiting_time": 0.0, "step_timeout": 60.0}
    with two_nodes() as (cluster, nodes):
        began = time.perf_counter()
        with create_env_manager({"type": "ray"}, env_fn=[Plain]) as manager:
            start_s = time.perf_counter() - began
        with create_env_manager(cfg, env_fn=[Plain] * 64) as manager:
            manager.step(dict.fromkeys(range(64), 0))
            lost = manager.stats()["actors"][0]["node_id"]
            (node,) = [node for node in nodes if node.node_id == lost]
            began = time.perf_counter()
            node.kill_raylet()
            reported_s = back_s = None
            while back_s is None or reported_s is None:
                ready = manager.ready_obs
                if len(ready) == 64 and manager.stats()["renewals"] >= 32 and back_s is None:
                    back_s = time.perf_counter() - began
                manager.step(dict.fromkeys(ready, 0))
                alive = {n["NodeID"] for n in ray.nodes() if n["Alive"]}
                if reported_s is None and lost not in alive:
                    reported_s = time.perf_counter() - began
            print(f"  an actor's start {start_s:.2f} s; after the kill: Ray reports the node dead")
            print(f"  after {reported_s:.2f} s, all 64 envs are back after {back_s:.2f} s")
            stats = manager.stats()
            owed = stats["actions"] - stats["timesteps"] - stats["cancelled"]
            print(f"  actions without timestep: {owed}; failures charged: {stats['failures']}")
        cluster.remove_node(node, allow_graceful=False)


def _sent_over_lo() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def images(args: argparse.Namespace) -> None:
    """Observations of 28 224 bytes."""
    shape, n = (84, 84, 4), 32
    size = int(np.prod(shape))
    with two_nodes(), stepping({"type": "ray", "num_workers": 2}, [Plain] * n) as null_step:
        env_fns = [functools.partial(Plain, shape)] * n
        with stepping({"type": "ray", "num_workers": 2}, env_fns) as step:
            travelled = []
            for one in (null_step, step):
                before, began, count = _sent_over_lo(), time.perf_counter(), 0
                while time.perf_counter() - began < args.seconds * 3:
                    one()
                    count += n
                travelled.append((_sent_over_lo() - before) / count)
                rate = count / (time.perf_counter() - began)
                print(
                    f"  {rate:,.0f} steps/s, {travelled[-1]:,.0f} bytes per step over the network"
                )
            print(
                f"  {(travelled[1] - travelled[0]) / size:.2f} times the {size:,} of an observation"
            )


RUNS = {"sleep": sleep, "null": null, "recovery": recovery, "images": images}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(RUNS), help="some of: " + ", ".join(RUNS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each, in each round")
    args = parser.parse_args()
    for name in args.only.split(","):
        load = os.getloadavg()[0]
        print(f"{name} (load {load:.1f} on {os.cpu_count()} cores)", flush=True)
        RUNS[name](args)


if __name__ == "__main__":
    main()
