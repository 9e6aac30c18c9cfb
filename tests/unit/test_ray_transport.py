"""`ray` over a stand-in for the package: what is sent, what is refused, who connects and ends."""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from envmgr import RayEnvManager, create_env_manager
from envmgr.errors import (
    ConfigError,
    EnvManagerError,
    FailuresExhaustedError,
    LaunchError,
    MissingDependencyError,
)
from envmgr.transport.base import HostDied
from envmgr.transport.outbox import Outbox
from envmgr.transport.process.server_spawner import ServerSpawner
from envmgr.transport.ray import cluster
from envmgr.transport.ray.actor import ActorSettings, HostActor
from envmgr.transport.ray.actor_calls import ActorFailedError, CallHandler
from envmgr.transport.ray.cluster import close_cluster, open_cluster
from envmgr.transport.ray.mirror import NodeMirror
from envmgr.transport.ray.protocol import ActorOp, ActorRequest, Node, packed, unpacked
from envmgr.transport.ray.trainer_calls import ActorCaller, ActorLink
from envmgr.transport.ready import Waker
from envmgr.wire.frames import pack
from envmgr.wire.hosts import WorkerSettings, WorkerSetup
from envmgr.wire.messages import Message, Op
from tests.fake_ray import Counting, FakeRay, Handle, manager_of, zeros

PATIENCE_S = 20.0


def ready_ids(manager: Any, n: int) -> list[int]:
    while len(manager.ready_obs) < n:
        pass
    return [*manager.ready_obs]


def exchanges(handle: Handle) -> list[Any]:
    return [args for name, args in handle.calls if name == "exchange"]


# -- steps ----------------------------------------------------------------------------------------


def posts(handle: Handle) -> int:
    """Return how often steps were posted."""
    items = [unpacked(packed_items) for _, packed_items in exchanges(handle)]
    return sum(item.op == ActorOp.POST for brought in items for item in brought)


def count_messages(manager: Any, ray: FakeRay, indexes: list[int]) -> bool:
    """Return whether hosts of the first actor see that they were sent messages."""
    sent = ray.actors[0].actor._mirror.block.messages_sent
    before = sent[indexes].tolist()
    manager.get_attr("metadata")
    return all(x != y for x, y in zip(before, sent[indexes].tolist(), strict=True))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_same_as_inline_and_a_few_calls_for_each_batch(
    ray: FakeRay, shared_memory: bool
) -> None:
    with (
        manager_of(seed=3, shared_memory=shared_memory) as manager,
        create_env_manager({"type": "base", "seed": 3}, env_fn=[Counting] * 4) as base,
    ):
        assert type(manager) is RayEnvManager
        assert [h.options["scheduling_strategy"] for h in ray.actors] == ["node1", "node2"]
        for k in range(12):
            expected, found = base.ready_obs, manager.ready_obs
            while len(found) < 4:  # its resets go on behind
                found = manager.ready_obs
            assert all((found[i] == expected[i]).all() for i in range(4))
            actions = {i: int(k % 4 == i) for i in range(4)}
            expected, found = base.step(actions), manager.step(actions)
            for i in range(4):
                assert (found[i].obs == expected[i].obs).all()
                assert found[i][1:] == expected[i][1:]
        assert manager.stats()["failures"] == 0
        assert [a["hosts"] for a in manager.stats()["actors"]] == [1, 1]
        assert [posts(h) >= 12 for h in ray.actors] == [shared_memory] * 2
        assert not shared_memory or count_messages(manager, ray, [0])
        ready_ids(manager, 4)  # its resets go on behind
        before = [len(exchanges(h)) for h in ray.actors]
        manager.step(zeros())
        assert max(len(exchanges(h)) - n for h, n in zip(ray.actors, before, strict=True)) <= 3
    assert all(handle.is_dead for handle in ray.actors)
    assert ray.shutdowns == 1


class Varied(gymnasium.Env[Any, Any]):
    """Gives rewards and infos of every kind, and observations of several leaves."""

    observation_space = Dict({"n": Discrete(99), "x": Box(0, 99, (2, 2), np.uint8)})
    action_space = Discrete(3)
    infos = ({}, {"k": 1}, {"large": [*range(500)]}, {"k": np.ones(2)})
    rewards = (0.5, 2, np.ones(3, np.float32), np.float64(3.0))

    def _seen(self) -> dict[str, Any]:
        return {"n": np.int64(self._n), "x": np.full((2, 2), self._n, np.uint8)}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._n = int(options["at"]) if options else 40
        return self._seen(), self.infos[(self._n + 1) % 4]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        self._n += 1 + int(action)
        return (
            self._seen(),
            self.rewards[self._n // 4 % 4],
            self._n > 52,
            False,
            self.infos[self._n % 4],
        )


@pytest.mark.parametrize("more", [{}, {"reset_inplace": True}, {"copy_on_get": False}])
def test_whatever_envs_give_is_there_by_whichever_way(ray: FakeRay, more: dict[str, Any]) -> None:
    def run(kind: str) -> list[str]:
        cfg = {"type": kind, "num_workers": 2, **more} if kind == "ray" else {"type": kind, **more}
        said = []
        with create_env_manager(cfg, env_fn=[Varied] * 4) as manager:
            for k in range(24):
                if k == 11:
                    manager.reset({1: {"at": 3}, 2: None})
                obs = {i: manager.ready_obs[i] for i in ready_ids(manager, 4)}
                said.append(repr((sorted(obs.items()), sorted(manager.ready_info.items()))))
                timesteps = manager.step({i: (k + i) % 3 for i in range(4)})
                said.append(repr(sorted(timesteps.items())))
        return said

    assert run("ray") == run("base")
    assert min(map(posts, ray.actors)) >= 24


class Missing:
    """Something that a node cannot unpickle."""

    def __reduce__(self) -> Any:
        return exec, ("import no_such_module",)


def test_a_request_that_the_node_cannot_read_is_answered(ray: FakeRay) -> None:
    with manager_of(2, num_workers=1) as manager:
        with pytest.raises(EnvManagerError, match="no_such_module"):
            manager.set_attr("thing", Missing())
        assert len(manager.step(zeros(2))) == 2


def test_a_node_where_steps_cannot_be_posted(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envmgr.transport.ray.actor.block_is_possible", lambda: False)
    with manager_of() as manager:
        assert len(manager.step(zeros())) == 4
        assert [posts(h) for h in ray.actors] == [0, 0]
    monkeypatch.undo()


def test_an_env_does_not_come_back_on_such_a_node(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def until_it_is_given_up() -> None:
        manager.step(zeros())
        while True:
            manager.step({2: 0, 3: 0})

    with manager_of() as manager:
        manager.step(zeros())
        monkeypatch.setattr("envmgr.transport.ray.actor.block_is_possible", lambda: False)
        ray.actors[0].die()
        with pytest.raises(FailuresExhaustedError):
            until_it_is_given_up()
    assert "10.0.0.1 is no Linux on x86-64" in caplog.text
    assert "shared_memory: false" in caplog.text


def test_envs_that_raise_and_arrays_and_async_gathers(ray: FakeRay) -> None:
    with manager_of(wait_num=1) as manager:
        manager.send_arrays(np.arange(4), np.array([0, 2, 0, 0]))
        got: list[int] = []
        while len(got) < 4:
            got += manager.recv_arrays().env_ids.tolist()
        assert sorted(got) == [0, 1, 2, 3]
        assert manager.stats()["failures_by_kind"] == {"EnvRaised": 1}


def test_workers_of_an_actor(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing here waits for the time at which a call looks by itself.
    monkeypatch.setattr("envmgr.transport.ray.actor_calls._MOST_LINGER_S", 1000.0)
    options = {"ray": {"isolation": "process"}, "preload": False, "max_failures_total": 2}
    with manager_of(2, num_workers=1, **options) as manager:
        assert [a["hosts"] for a in manager.stats()["actors"]] == [2]
        timesteps = manager.step({0: 1, 1: 2})
        assert [t.done for t in timesteps.values()] == [True, True]
        assert posts(ray.actors[0]) > 0
        assert count_messages(manager, ray, [0, 1])
        assert sorted(ready_ids(manager, 2)) == [0, 1]
        ray.actors[0].die()
        timesteps = manager.step(zeros(2))
        assert [bool(t.info.get("abnormal")) for t in timesteps.values()] == [True, True]
        assert sorted(ready_ids(manager, 2)) == [0, 1]
        assert manager.stats()["failures"] == 3, "two of them were one death, and charged once"


def test_what_factories_name_is_imported_once_in_an_actor(
    ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "envmgr"),
        manager_of(2, num_workers=1, ray={"isolation": "process"}) as manager,
    ):
        assert sorted(ready_ids(manager, 2)) == [0, 1]
    [text] = [r.getMessage() for r in caplog.records if "preloaded" in r.getMessage()]
    assert "gymnasium" in text, "the module of the envs imports it"


def test_an_actor_whose_node_lacks_a_listed_module_says_so_at_once(ray: FakeRay) -> None:
    cfg = {"ray": {"isolation": "process"}, "preload": ["no_such_module"], "connect_timeout": 5.0}
    manager = manager_of(2, num_workers=1, max_retry=1, **cfg)
    with pytest.raises(LaunchError, match=r"node 10\.0\.0\.1: .*names the module 'no_such_module'"):
        manager.launch()
    assert ray.shutdowns == 1


def fails(*args: Any) -> None:
    raise OSError("no process to be had")


def test_workers_are_started_though_nothing_can_be_preloaded(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerSpawner, "preload", fails)
    with manager_of(1, num_workers=1, ray={"isolation": "process"}) as manager:
        assert ready_ids(manager, 1) == [0]


def test_a_defect_in_an_actor_ends_it_and_is_told_of(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"ray": {"isolation": "process"}, "preload": False, "shared_memory": False}
    with manager_of(2, num_workers=1, **options) as manager:
        assert sorted(ready_ids(manager, 2)) == [0, 1]
        monkeypatch.setattr(ray.actors[0].actor._hosting, "_do_all", fails)
        timesteps = manager.step(zeros(2))
        errors = [timestep.info["error"] for timestep in timesteps.values()]
        assert all("no process to be had" in str(error) for error in errors)
        assert sorted(ready_ids(manager, 2)) == [0, 1]
        assert len(ray.actors) == 2


def test_an_actor_that_is_importing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    came, go = threading.Event(), threading.Event()

    def hang(self: Any, named: Any) -> None:
        came.set()
        assert go.wait(PATIENCE_S)

    monkeypatch.setattr(ServerSpawner, "preload", hang)
    settings = ActorSettings(WorkerSettings(), True, ("json",), 9.0, shared_memory=False)
    actor = HostActor(settings, Node("node1", "10.0.0.1", 1, False))
    assert came.wait(PATIENCE_S)
    assert "importing" in actor.whereabouts(1)
    actor.exchange(0, packed([ActorRequest(ActorOp.CLOSE, 0, 0.0)]))
    go.set()
    actor._hosting._thread.join(PATIENCE_S)  # type: ignore[attr-defined]
    assert actor.whereabouts(1) == ""


def test_who_is_given_to_an_actor_that_has_failed_is_told_why(ray: FakeRay) -> None:
    def start() -> Any:
        raise RuntimeError("no room")

    outbox, lost = Outbox(), list[str]()
    caller = ActorCaller(ray, outbox, Waker(), lost.append)
    ray.init()
    link = ActorLink(start, serves_one=False)
    for host_id in (1, 2):
        setup = WorkerSetup((), (), 0, b"", WorkerSettings())
        caller.tasks.put((link, ActorRequest(ActorOp.START, host_id, setup)))
        while len(outbox.sent) < host_id:
            pass
    caller.end(PATIENCE_S)
    assert [(i, died.detail) for i, died in outbox.sent if type(died) is HostDied] == [
        (host_id, "RuntimeError: no room") for host_id in (1, 2)
    ]


# -- the connection -------------------------------------------------------------------------------


def test_a_manager_whose_connection_is_gone_leaves_that_of_the_next_one_alone(ray: FakeRay) -> None:
    first = open_cluster(None)
    ray.shutdown()  # as the user of a notebook may
    second = open_cluster(None)
    close_cluster(first)
    assert ray.is_initialized()
    close_cluster(second)
    assert not ray.is_initialized()

    ray.init()
    first = open_cluster(None)  # the user's
    ray.shutdown()
    second = open_cluster(None)
    close_cluster(first)
    assert ray.is_initialized()
    ray.shutdown()
    ray.init()
    third = open_cluster(None)  # the user's as well: nobody disconnects it
    close_cluster(second)
    close_cluster(third)
    assert ray.is_initialized()


def test_the_address_of_the_first_manager_does_for_the_second(ray: FakeRay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        ray.gcs_address = f"10.0.0.1:{port}"  # of the head node, which Ray finds out by itself
        address = f"localhost:{port}"
        opened = [open_cluster(address), open_cluster(address)]
        with pytest.raises(ConfigError, match="one process can be connected to one only"):
            open_cluster(f"127.0.0.1:{port}")
        ray.gcs_address = f"127.0.0.2:{port}"  # another one of this machine
        opened.append(open_cluster(f"127.0.0.1:{port}"))
        with pytest.raises(ConfigError, match="one process can be connected to one only"):
            open_cluster(f"localhost:{port + 1}")
        for one in opened:
            assert ray.is_initialized()
            close_cluster(one)
    assert not ray.is_initialized()


def test_an_address_that_was_connected_to_before_does_not_do_for_another_cluster(
    ray: FakeRay,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"localhost:{head.getsockname()[1]}"
        before = open_cluster(address)
    ray.shutdown()
    ray.init()  # the user's own
    with pytest.raises(ConfigError, match="one process can be connected to one only"):
        open_cluster(address)
    close_cluster(before)
    assert ray.is_initialized()


# -- what is refused ------------------------------------------------------------------------------


def test_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'rl-env-manager\[ray\]'"):
        manager_of()


@pytest.mark.parametrize(
    ("cfg", "error", "said"),
    [
        ({"num_workers": "auto"}, ConfigError, "Give a number"),
        ({"context": "spawn"}, ConfigError, "other machines"),
        ({"ray": {"address": "ray://head:10001"}}, ConfigError, "manager.ray.address"),
        ({"ray": {"address": "head"}}, ConfigError, "manager.ray.address"),
        ({"ray": {"resources": {"licence": 0}}}, ConfigError, "manager.ray.resources"),
        ({"ray": {"resources": [1]}}, ConfigError, "manager.ray.resources"),
        ({"ray": {"isolation": "thread"}}, ConfigError, "manager.ray.isolation"),
        ({"ray": {"num_gpus": 1}}, ConfigError, r"GPU: 1.*no node has.*10\.0\.0\.2 {CPU: 4, lic"),
        ({"ray": {"resources": {"licence": 1}}}, ConfigError, "there is room for 1"),
        ({"ray": {"num_cpus": 8}}, ConfigError, "CPU: 8"),
        ({"ray": {"address": "127.0.0.1:1"}}, LaunchError, "no Ray cluster at"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_started(
    ray: FakeRay, cfg: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        manager_of(**cfg).launch()
    assert ray.actors == []
    assert ray.shutdowns == len(ray.inits)


def test_what_ray_refuses(ray: FakeRay) -> None:
    ray.refused = ValueError("pip is not a list")
    with pytest.raises(ConfigError, match="pip is not a list"):
        manager_of(ray={"runtime_env": {"pip": 3}}).launch()
    ray.refused, ray.init_error = None, ConnectionError("nobody there")
    with pytest.raises(LaunchError, match="nobody there"):
        manager_of(ray={"address": "auto"}).launch()
    assert (len(ray.inits), ray.shutdowns) == (2, 1)


def test_a_node_without_the_env(ray: FakeRay) -> None:
    def lacks() -> Any:
        import no_such_module  # type: ignore[import-not-found]

        return no_such_module

    with pytest.raises(LaunchError, match=r"node 10\.0\.0\.1 lacks.*runtime_env"):
        create_env_manager({"type": "ray"}, env_fn=[lacks]).launch()
    assert ray.shutdowns == 1


# -- who connects and disconnects -----------------------------------------------------------------


def test_managers_share_a_cluster_and_the_last_ends_it(ray: FakeRay) -> None:
    one, other = manager_of(), manager_of(2)
    one.launch()
    other.launch()
    assert [(i["address"], i["include_dashboard"]) for i in ray.inits] == [("local", False)]
    one.close()
    assert ray.shutdowns == 0
    assert len(other.step(zeros(2))) == 2
    other.close()
    assert ray.shutdowns == 1
    one.launch()
    one.close()
    assert ray.shutdowns == 2
    assert cluster._keeper is None


def test_a_cluster_of_the_user_stays(ray: FakeRay) -> None:
    ray.init(address="head:1")
    with pytest.raises(ConfigError, match="connected to one only"):
        manager_of(ray={"address": "head:2"}).launch()
    with manager_of(ray={"address": "10.0.0.1:6379"}) as manager:
        manager.step(zeros())
    assert ray.shutdowns == 0
    assert len(ray.inits) == 1


# -- calls and what they bring back ---------------------------------------------------------------


def request(number: int, op: Op = Op.STEP) -> ActorRequest:
    return ActorRequest(ActorOp.SEND, 7, pack(Message(op, 0, 0, number, None)))


def reply(number: int, op: Op = Op.STEPPED) -> Any:
    return pack(Message(op, 0, 0, number, None))


class Calls:
    """Calls to a handler, each on a thread of its own."""

    def __init__(self) -> None:
        self.delivered: list[Any] = []
        self.handler = CallHandler(self.delivered.extend, NodeMirror(bytearray))
        self.returned: dict[int, Any] = {}
        self.threads: dict[int, threading.Thread] = {}

    def call(self, number: int, *items: ActorRequest) -> None:
        def run() -> None:
            self.returned[number] = self.handler.call(number, items)

        self.threads[number] = thread = threading.Thread(target=run, daemon=True)
        thread.start()

    def result(self, number: int) -> Any:
        self.threads[number].join(PATIENCE_S)
        return self.returned[number]


def test_calls_are_taken_in_order_and_one_carries_a_batch() -> None:
    calls = Calls()
    calls.call(1, request(2))
    calls.call(0, request(1), request(3))
    while len(calls.delivered) < 3:
        pass
    assert [item.data.request_id for item in calls.delivered] == [1, 3, 2]
    with calls.handler._lock:  # the next time that it looks by itself never comes
        for number in (3, 1):
            calls.handler.put(7, reply(number))
        calls.handler._look_at = float("inf")
    calls.handler.put(7, reply(2))
    returned, replies = calls.result(1)
    assert returned == 0
    assert {frame.request_id for _, frame in replies} == {1, 2, 3}
    assert calls.threads[0].is_alive()
    calls.handler.put(7, reply(2, Op.RESET_DONE))  # a reset that was not asked for
    assert calls.result(0) == (1, [(7, reply(2, Op.RESET_DONE))])


def test_what_takes_long_is_told_of_in_parts() -> None:
    calls = Calls()
    calls.call(0)
    calls.call(1, request(1), request(2))
    while len(calls.delivered) < 2:
        pass
    calls.handler.put(7, reply(1))
    assert calls.result(1) == (0, [(7, reply(1))])
    calls.handler.put(7, reply(2))
    assert calls.result(0) == (1, [(7, reply(2))])


def test_no_more_than_a_few_calls_wait() -> None:
    calls = Calls()
    for number in range(3):
        calls.call(number)
    assert calls.result(0) == (0, [])
    calls.call(3, request(1))
    assert calls.result(1) == (1, [])
    for number in (3, 2):
        calls.handler.put(7, reply(1))
        assert calls.result(number)[0] == 5 - number


def test_all_calls_to_an_actor_that_has_failed_say_why() -> None:
    handler = CallHandler(lambda requests: None, NodeMirror(bytearray))
    said: list[str] = []

    def call(number: int) -> None:
        with pytest.raises(ActorFailedError) as raised:
            handler.call(number, ())
        said.append(str(raised.value))

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in (0, 1, 3)]
    for thread in threads:
        thread.start()
    while len(handler._waiting) < 2 or not handler._early:
        pass
    handler.fail("no use")
    for thread in threads:
        thread.join(PATIENCE_S)
    call(2)
    assert said == ["no use"] * 4
