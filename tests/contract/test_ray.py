"""`ray`, on a cluster of two nodes and a head on this machine: `make test-ray`. Else it is skipped.

What needs no cluster is in tests/unit/test_ray_transport.py and tests/faults/test_f46_ray.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmgr import RayEnvManager, create_env_manager
from envmgr.errors import EnvCrash, EnvRaised, EnvTimeout, LaunchError
from envmgr.testing import LedgerEnv
from envmgr.testing.audited import AuditedLoop
from tests.agents import Relay
from tests.contract.envs import Do, SampleEnv, seen
from tests.contract.harness import Setup, World, meanwhile, over, ready_all, step_all, wait_ended
from tests.contract.snapshot_runs import ENV_NUM, go_on, send_all, walker
from tests.contract.test_trajectories import EPISODE_LENGTH, SPACES, difference, managed_run

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

STORE_BYTES = 80 << 20
PATIENCE_S = 60.0
HEALTH = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 5,
}
IN_ACTORS, IN_WORKERS = Setup("ray"), Setup("ray", num_workers=2)
"""The second has worker processes; see `cfg_of`."""
each_isolation = over(IN_ACTORS, IN_WORKERS)


def cfg_of(setup: Setup) -> dict[str, Any]:
    isolated = setup is IN_WORKERS
    return {"num_workers": 2, "ray": {"isolation": "process" if isolated else "actor"}}


class Cluster:
    """Two nodes for hosts, and a head that has no CPU for them."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._cluster = RayCluster(True, head_node_args={**head, "_system_config": HEALTH})
        self.address = self._cluster.address
        self.nodes: list[Any] = []

    def fill(self) -> None:
        """Have two nodes."""
        while len(self.nodes) < 2:
            self.nodes.append(self._cluster.add_node(num_cpus=4, object_store_memory=STORE_BYTES))

    def kill(self, node_id: str) -> None:
        """Kill a node's raylet, and with it all that the node runs."""
        (node,) = [n for n in self.nodes if n.node_id == node_id]
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def _cluster() -> Iterator[Cluster]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster()
    try:
        cluster.fill()
        ray.init(address=cluster.address, configure_logging=False, log_to_driver=False)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(_cluster: Cluster) -> Cluster:
    _cluster.fill()
    return _cluster


@pytest.fixture(scope="module")
def _nothing_is_left_by_the_session(_cluster: Cluster) -> None:
    """The package keeps threads and fds for good; `make test-ray` runs nothing else."""


@pytest.fixture(autouse=True)
def _nothing_is_left_by_the_test(cluster: Cluster) -> Iterator[None]:
    """As the leak guard, but for what is Ray's: its workers, threads and fds come and go."""

    def ours() -> list[str]:
        names = [t.name for t in threading.enumerate() if t.name.startswith("envmgr")]
        ps = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        lines = [line for line in ps.stdout.splitlines() if "ray::HostActor" in line]
        return names + lines

    yield
    end = time.monotonic() + PATIENCE_S
    while (left := ours()) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []


def actors(manager: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = manager.stats()["actors"]
    return found


def zeros(n: int) -> dict[int, int]:
    return dict.fromkeys(range(n), 0)


@each_isolation
def test_trajectories_are_those_of_base(setup: Setup) -> None:
    for name in ("vector", "dict with text"):
        env_fn = [partial(SampleEnv, SPACES[name], episode_length=EPISODE_LENGTH)] * 4
        with create_env_manager({"type": "base", "seed": 5}, env_fn=env_fn) as base:
            expected = managed_run(base)
        cfg = {"type": "ray", "seed": 5, "wait_num": 1, **cfg_of(setup)}
        with create_env_manager(cfg, env_fn=env_fn) as manager:
            assert type(manager) is RayEnvManager
            assert len({actor["node_id"] for actor in actors(manager)}) == 2, "not spread"
            assert difference(expected, managed_run(manager)) is None
            assert manager.stats()["failures"] == 0


@each_isolation
def test_a_run_goes_on_here_from_a_snapshot_of_the_cluster_and_back(setup: Setup) -> None:
    env_fn, cfg = [walker] * ENV_NUM, {"snapshot_copy": True}
    with create_env_manager({**cfg, "type": "ray", **cfg_of(setup)}, env_fn=env_fn) as manager:
        go_on(manager, 4)
        send_all(manager)
        snapshot = manager.snapshot()
        expected = go_on(manager, 9)
        with create_env_manager({**cfg, "type": "base"}, env_fn=env_fn) as base:
            base.restore(snapshot)
            assert go_on(base, 9) == expected
            base.restore(snapshot)
            manager.restore(base.snapshot())
        assert go_on(manager, 9) == expected


@each_isolation
def test_agents_are_those_of_base(setup: Setup) -> None:
    found: list[list[Any]] = []
    for cfg in ({"type": "base"}, {"type": "ray", **cfg_of(setup)}):
        with create_env_manager({**cfg, "seed": 9}, env_fn=[Relay] * 3) as manager:
            found.append([])
            for _ in range(6):
                ready_all(manager)
                for timestep in step_all(manager, manager.random_action()).values():
                    obs = {agent: array.tolist() for agent, array in timestep.obs.items()}
                    found[-1].append((obs, timestep.reward, timestep.done))
    assert found[0] == found[1]


@each_isolation
def test_steps_resets_errors_arrays_and_calls(world: World, setup: Setup) -> None:
    manager = world.make(setup, 4, wait_num=1, **cfg_of(setup))
    ready_all(manager)
    timesteps = step_all(manager, {0: Do.END, 1: Do.RAISE, 2: Do.SYS_EXIT, 3: 1})
    assert [t.done for t in timesteps.values()] == [True] * 3 + [False]
    assert isinstance(timesteps[1].info["error"], EnvRaised)
    assert isinstance(timesteps[2].info["error"], EnvCrash)
    assert [seen(o).episode for o in ready_all(manager).values()] == [1, 1, 0, 0]
    manager.send_arrays(np.arange(4), np.array([1, 2, 3, 4]))
    got: dict[int, float] = {}
    while len(got) < 4:
        batch = manager.recv_arrays()
        got.update(zip(batch.env_ids.tolist(), batch.obs[:, 4].tolist(), strict=True))
    assert got == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    manager.reset({0: None, 3: None})
    assert [seen(manager.ready_obs[i]).episode for i in (0, 3)] == [2, 1]
    assert len({world.pid(i) for i in range(4)}) == (2 if setup is IN_ACTORS else 4)


@each_isolation
def test_a_process_is_killed_in_the_midst_of_a_step(world: World, setup: Setup) -> None:
    manager = world.make(setup, 4, **cfg_of(setup))
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE, 2: 1, 3: 1})
    gate.await_visit(0).kill()
    timesteps = manager.recv()
    while len(timesteps) < 3:
        timesteps.update(manager.recv())
    assert isinstance(timesteps[0].info["error"], EnvCrash)
    assert [seen(timesteps[i].obs).step for i in (2, 3)] == [1, 1]
    assert [seen(obs).build for obs in ready_all(manager).values()] == [1, 0, 0, 0]
    if setup is IN_WORKERS:
        assert "killed by SIGKILL" in str(timesteps[0].info["error"]), "the node has seen it"
    timesteps = step_all(manager, dict.fromkeys(range(4), 2))
    abnormal = [bool(t.info.get("abnormal")) for t in timesteps.values()]
    assert abnormal == [False, setup is IN_ACTORS, False, False], "1 had died while idle"
    assert manager.stats()["failures"] == 1


@each_isolation
def test_a_node_is_killed_and_nothing_is_lost(cluster: Cluster, setup: Setup) -> None:
    many = {"max_failures": 10**6, "max_failures_total": 10**6, "step_timeout": PATIENCE_S}
    cfg = {"type": "ray", "retry_waiting_time": 0.0, **many, **cfg_of(setup)}
    env_fn = [partial(LedgerEnv, i, episode_length=7) for i in range(8)]
    with create_env_manager(cfg, env_fn=env_fn) as manager:
        loop = AuditedLoop(manager)
        for number in range(60):
            if number == 20:
                cluster.kill(actors(manager)[0]["node_id"])
            if number == 40:  # what it runs on now, in the midst of steps
                loop.send(loop.ledger.fresh_actions(loop.ready()))
                os.kill(actors(manager)[-1]["pid"], signal.SIGKILL)
                while manager.stats()["outstanding"]:
                    loop.gather()
            else:
                loop.step(loop.ledger.fresh_actions(loop.ready()))
        assert sorted(ready_all(manager)) == [*range(8)]
        assert len({actor["node_id"] for actor in actors(manager)}) == 1
        stats = manager.stats()
        assert stats["failures"] >= 2
        assert stats["actions"] == stats["timesteps"] + stats["cancelled"] + stats["outstanding"]
    report = loop.settle()
    assert report.is_clean, str(report)


@each_isolation
def test_a_step_that_hangs_and_what_its_neighbours_notice(world: World, setup: Setup) -> None:
    manager = world.make(setup, 4, step_timeout=3.0, **cfg_of(setup))
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.HANG, 1: 1, 2: 1, 3: 1})
    gate.await_visit(0)
    timesteps = manager.recv()
    while len(timesteps) < 4:
        timesteps.update(manager.recv())
    error = timesteps[0].info["error"]
    assert isinstance(error, EnvTimeout)
    assert "visit" in error.stacks
    builds = [seen(obs).build for obs in ready_all(manager).values()]
    assert builds == ([1, 1, 0, 0] if setup is IN_ACTORS else [1, 0, 0, 0])


def test_a_spare_takes_over(world: World) -> None:
    options = {"ray": {"isolation": "process"}, "num_workers": None}
    manager = world.make(Setup("ray"), env_fn=world.factories(1) * 2, spare_env_num=1, **options)
    ready_all(manager)
    timesteps = step_all(manager, {0: Do.KILL, 1: 1})
    assert isinstance(timesteps[0].info["error"], EnvCrash)
    assert sorted(ready_all(manager)) == [0, 1]
    assert sorted(step_all(manager, {0: 2, 1: 2})) == [0, 1]
    assert manager.stats()["swaps"] == 1


def test_ctrl_c_loses_nothing(world: World) -> None:
    manager = world.make(IN_ACTORS, 4, **cfg_of(IN_ACTORS))
    gate = world.gate
    ready_all(manager)

    def interrupt() -> None:
        visit = gate.await_visit(1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        visit.release()

    with meanwhile(interrupt), pytest.raises(KeyboardInterrupt):
        manager.step({0: 1, 1: Do.GATE, 2: 3})
    timesteps = manager.recv()
    while len(timesteps) < 3:
        timesteps.update(manager.recv())
    assert sorted(timesteps) == [0, 1, 2]
    assert [world.actions(i) for i in range(3)] == [[1], [int(Do.GATE)], [3]]


@each_isolation
def test_closing_in_the_midst_and_launching_again(world: World, setup: Setup) -> None:
    manager = world.make(setup, 4, **cfg_of(setup))
    gate = world.gate
    ready_all(manager)
    pids = {world.pid(i) for i in range(4)} | {actor["pid"] for actor in actors(manager)}
    manager.send({0: Do.HANG, 3: 1})
    gate.await_visit(0)
    manager.close(timeout_s=0.5)
    for pid in pids:
        wait_ended(pid)
    manager.launch()
    ready_all(manager)
    step_all(manager, dict.fromkeys(range(4), 1))
    manager.close()
    assert [len(world.noted(i, "close")) for i in range(1, 4)] == [
        2 if setup is IN_WORKERS else 1
    ] + [2] * 2, "envs that can are closed"


def test_a_node_lacks_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def make():\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    with pytest.raises(LaunchError, match=r"lacks what the env needs.*only_here"):
        create_env_manager({"type": "ray"}, env_fn=[only_here.make]).launch()


_OWNER = """
import sys, time
from envmgr import create_env_manager
from tests.contract.envs import ScriptedEnv
address, folder, isolation, ending = sys.argv[1:]
options = {"address": None if address == "local" else address, "isolation": isolation}
cfg = {"type": "ray", "num_workers": 1, "ray": options}
from functools import partial
if ending == "fails":
    cfg["connect_timeout"] = 60.0
    def make(): raise ValueError("asked for")
    try:
        create_env_manager(cfg, env_fn=[make]).launch()
    except Exception as error:
        print(type(error).__name__, flush=True)
        import ray
        print(ray.is_initialized(), flush=True)
else:
    manager = create_env_manager(cfg, env_fn=[partial(ScriptedEnv, i, folder) for i in range(2)])
    manager.launch()
    print("launched", flush=True)
    if ending == "killed":
        time.sleep(1000)
"""


def owner(address: str, world: World, isolation: str, ending: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _OWNER, address, world.folder, isolation, ending]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("isolation", ["actor", "process"])
def test_the_trainer_is_killed(cluster: Cluster, world: World, isolation: str) -> None:
    with owner(cluster.address, world, isolation, "killed") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "launched\n"
        process.kill()
    for env_id in range(2):
        wait_ended(world.pid(env_id))


@pytest.mark.parametrize("ending", ["forgets", "fails"])
def test_a_cluster_that_was_started_for_it_ends_with_it(world: World, ending: str) -> None:
    before = raylets()
    with owner("local", world, "process", ending) as process:
        out, _ = process.communicate(timeout=PATIENCE_S * 2)
    assert out.split() == (["launched"] if ending == "forgets" else ["LaunchError", "False"])
    assert process.returncode == 0
    end = time.monotonic() + PATIENCE_S
    while raylets() != before and time.monotonic() < end:
        time.sleep(0.1)
    assert raylets() == before


def raylets() -> set[str]:
    ps = subprocess.run(["ps", "-eo", "pid,comm"], capture_output=True, text=True, check=True)
    return {line for line in ps.stdout.splitlines() if "raylet" in line or "gcs_server" in line}
