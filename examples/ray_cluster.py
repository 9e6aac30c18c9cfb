"""A run on a Ray cluster of two nodes, one of which is killed midway; `make demo-cluster`.

Both nodes are on this machine, as `ray.cluster_utils` has them, and so is the head, which runs no
envs. The run is that of `envmgr run configs/ray.yaml`, with the address of this cluster.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from envmgr.cli import main

CONFIG = Path(__file__).parents[1] / "configs" / "ray.yaml"
STORE_BYTES = 80 << 20
STEPS = 40_000
EPISODES_BEFORE = 400
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 5,
}


def cluster_of_two() -> tuple[Cluster, list[Any]]:
    """Return a cluster, and its nodes without the head."""
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(True, head_node_args={**head, "_system_config": HEALTH})
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES) for _ in range(2)]
    return cluster, nodes


def kill_later(cluster: Cluster, node: Any, episodes: Path, over: threading.Event) -> None:
    """Kill a node when so many episodes were written, unless the run is over before."""
    while not over.is_set():
        if episodes.exists() and episodes.read_bytes().count(b"\n") >= EPISODES_BEFORE:
            print(f"\n==> killing node {node.node_id[:8]}, and all that it runs", flush=True)
            cluster.remove_node(node, allow_graceful=False)
            return
        time.sleep(0.05)


def run() -> int:
    """Run the demonstration and return the exit code of the run."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    print("==> starting a Ray cluster of two nodes", flush=True)
    cluster, nodes = cluster_of_two()
    over = threading.Event()
    try:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "run"
            given = (cluster, nodes[0], output / "episodes.jsonl", over)
            killer = threading.Thread(target=kill_later, args=given)
            killer.start()
            address = f"--set=manager.ray.address={cluster.address}"
            try:
                return main(["run", str(CONFIG), address, f"--steps={STEPS}", f"--output={output}"])
            finally:
                over.set()
                killer.join()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(run())
