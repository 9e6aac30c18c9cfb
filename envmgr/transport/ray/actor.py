"""The actor that runs on a node of the cluster: envs run on one of its threads, or in workers.

The actor is a plain Python object: Ray is only asked which node this is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from envmgr.errors import ConfigError, MissingDependencyError
from envmgr.proc import resident_bytes
from envmgr.transport.base import HostDied
from envmgr.transport.process.preloading import PreloadRules
from envmgr.transport.process.start_methods import make_spawner
from envmgr.transport.process.threads import thread_name
from envmgr.transport.process.transport import ProcessTransport
from envmgr.transport.ray.actor_calls import CallHandler
from envmgr.transport.ray.cluster import imported_ray
from envmgr.transport.ray.mirror import PLACING, NodeMirror
from envmgr.transport.ray.protocol import ActorOp, ActorRequest, Node, packed, unpacked
from envmgr.transport.thread import stack_of
from envmgr.wire.block import block_is_possible, items
from envmgr.wire.frames import Frame, FrameError, pack
from envmgr.wire.hosts import EnvToBuild, HostSpec, WorkerSettings, WorkerSetup
from envmgr.worker.process import set_up
from envmgr.worker.serving import QueueInbox, run_on_thread, unreadable_reply


class ActorSettings(NamedTuple):
    """What an actor needs to know before the first of its hosts.

    Attributes:
        worker: how the actor's process, or its worker processes, are set up.
        isolated: whether each host is a worker process on the node.
        preload: modules that are imported once for all workers; None: those that envs need.
        import_s: how long one import may take.
        shared_memory: whether data of fixed layout goes through the actor's copy of the block.
        named: the modules that the factories of all envs name.
    """

    worker: WorkerSettings
    isolated: bool
    preload: tuple[str, ...] | None
    import_s: float
    shared_memory: bool
    named: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeFactory:
    """Builds an env on a node; what the env needs may not be installed there.

    Attributes:
        where: the address of the node.
    """

    pickled: bytes
    where: str

    def __call__(self) -> Any:
        """Return a new env.

        Raises:
            MissingDependencyError: the node lacks a module.
        """
        try:
            return pickle.loads(self.pickled)()  # noqa: S301 - from the trainer, over its cluster
        except ImportError as error:
            raise MissingDependencyError(
                f"node {self.where} lacks what the env needs: {type(error).__name__}: {error}. "
                "Install it on every node, or name it in manager.ray.runtime_env"
            ) from error


class Hosting(Protocol):
    """The part of an actor that runs its hosts."""

    def deliver(self, requests: Sequence[ActorRequest]) -> None:
        """Do what is asked for, or begin to; does not wait."""

    def place(self, nbytes: int) -> Any:
        """Allocate the memory that hosts share with this process."""

    def count_messages(self, counts: Any) -> None:
        """See `Transport.count_messages`."""

    def ring(self, host_ids: Sequence[int]) -> None:
        """Tell hosts to look at what was posted for them."""

    def whereabouts(self, host_id: int) -> str:
        """Return what a host is doing, as `Transport.whereabouts` does."""


class HostActor:
    """The actor. The trainer calls its methods over the cluster, several at a time.

    Args:
        settings: see `ActorSettings`.
        node: where the actor runs; None asks Ray.
    """

    def __init__(self, settings: ActorSettings, node: Node | None = None) -> None:
        node = node or node_of_ray()
        self._node = node
        self._mirror = NodeMirror(self._place)
        self._calls = CallHandler(self._deliver, self._mirror)
        self._hosting: Hosting = (WorkerHosts if settings.isolated else ThreadHost)(
            settings, self._calls, node
        )
        self._calls.put(0, node)

    def _place(self, nbytes: int) -> Any:
        """Allocate memory.

        Raises:
            OSError: there is not enough of it, or no steps can be posted on this node.
        """
        if not self._node.posts:
            raise OSError(
                f"node {self._node.address} is no Linux on x86-64, where the other nodes are, and "
                "steps are posted. Set shared_memory: false, or have actors run on such nodes only"
            )
        return self._hosting.place(nbytes)

    def _deliver(self, brought: Sequence[ActorRequest]) -> None:
        """Do what a call asks for; calls take turns here."""
        rung: list[int] = []
        for op, host_id, data in brought:
            if op == ActorOp.POST:
                rung = self._mirror.post(data)
            elif op == ActorOp.START:
                self._mirror.host(host_id, data.host_index)
            elif op == ActorOp.SEND and data.op in PLACING:
                self._mirror.note_placement_for(host_id, data)
                if self._mirror.block is not None:
                    self._hosting.count_messages(self._mirror.block.messages_sent)
        self._hosting.deliver([one for one in brought if one.op != ActorOp.POST])
        if rung:
            self._hosting.ring(rung)

    def exchange(self, number: int, requests: bytes) -> tuple[int, bytes]:
        """See `CallHandler.call`; requests and replies are packed."""
        returned, replies = self._calls.call(number, unpacked(requests))
        return returned, packed(replies)

    def whereabouts(self, host_id: int) -> str:
        """See `Transport.whereabouts`."""
        return self._hosting.whereabouts(host_id)


def node_of_ray() -> Node:
    """Return where this process runs."""
    context = imported_ray().get_runtime_context()
    address = imported_ray().util.get_node_ip_address()
    return Node(context.get_node_id(), address, os.getpid(), block_is_possible())


@functools.lru_cache(256)
def _unpickled(data: bytes) -> Any:
    """Return one object for equal pickles; they are settings of hosts, which nobody changes."""
    return pickle.loads(data)  # noqa: S301 - from the trainer, over its cluster


def spec_of(host_id: int, setup: WorkerSetup, node: Node) -> HostSpec:
    """Return the host that the trainer has asked for."""
    made = [_factory(pickled, node.address) for pickled in setup.factories]
    envs = tuple(EnvToBuild(*env[:3], made[env[3]]) for env in setup.envs)
    return HostSpec(host_id, setup.host_index, envs, _unpickled(setup.settings))


@functools.lru_cache(256)
def _factory(pickled: bytes, where: str) -> NodeFactory:
    return NodeFactory(pickled, where)  # one object for all envs, so it is pickled once


class ThreadHost:
    """The only host of an actor, on a thread of the actor.

    Args:
        calls: carries what the host says to the trainer.
        node: where the actor runs.
    """

    def __init__(self, settings: ActorSettings, calls: CallHandler, node: Node) -> None:
        set_up(0, settings.worker)
        self._calls, self._node = calls, node
        self._posts = settings.shared_memory and node.posts
        self._inbox: QueueInbox | None = None
        self._thread: threading.Thread | None = None
        self._memory: npt.NDArray[np.uint8] | None = None
        self._messages_sent: Any = {}
        self._message_numbers = itertools.count(1)
        self._index = 0

    def deliver(self, requests: Sequence[ActorRequest]) -> None:
        """Start the host, or hand requests over to it; the host is killed with the actor."""
        for op, host_id, data in requests:
            if op == ActorOp.START:
                self._start(host_id, data)
            elif op == ActorOp.SEND and self._inbox is not None:
                self._hand_over(host_id, data, self._inbox)
                self._messages_sent[self._index] = next(self._message_numbers)
            elif op == ActorOp.ASK and self._inbox is not None:
                self._inbox.ring(asks=True)

    def place(self, nbytes: int) -> memoryview:
        """Allocate memory, which the thread of the host shares."""
        self._memory = np.zeros(nbytes, np.uint8)
        return self._open_memory(nbytes)

    def _open_memory(self, nbytes: int) -> memoryview:
        if self._memory is None:
            raise FrameError("observations are placed in shared memory, but there is none")
        return memoryview(self._memory)  # type: ignore[arg-type]

    def count_messages(self, counts: Any) -> None:
        """Count messages in `counts` from now on."""
        self._messages_sent = items(counts)

    def ring(self, host_ids: Sequence[int]) -> None:
        """Tell the host to look at the block."""
        if self._inbox is not None:
            self._inbox.ring(asks=False)

    def _start(self, host_id: int, setup: WorkerSetup) -> None:
        self._inbox = QueueInbox(functools.partial(self._calls.put, host_id))
        self._index = setup.host_index
        self._thread = threading.Thread(
            target=self._run, args=(host_id, setup, self._inbox), name="envmgr-envs", daemon=True
        )
        self._thread.start()

    def _hand_over(self, host_id: int, frame: Frame, inbox: QueueInbox) -> None:
        try:
            inbox.send(frame.message())
        except FrameError as error:
            self._calls.put(host_id, pack(unreadable_reply(frame, error)))

    def _run(self, host_id: int, setup: WorkerSetup, inbox: QueueInbox) -> None:
        detail = ""
        try:
            run_on_thread(
                spec_of(host_id, setup, self._node),
                inbox,
                memory=self._open_memory,
                ring=self._calls.ring if self._posts else None,
                encode=pack,
                rss_bytes=resident_bytes,
            )
        except BaseException as error:  # settings that cannot be unpickled; a defect of ours
            detail = "".join(traceback.format_exception(error))
        self._calls.put(host_id, HostDied(None, detail))

    def whereabouts(self, host_id: int) -> str:
        """Return the stack of the thread."""
        return "" if self._thread is None else stack_of(self._thread)


class WorkerHosts:
    """Hosts in worker processes, run by the transport that `type: subprocess` uses.

    One thread polls that transport and passes on what comes. Other threads only ring.

    Args:
        calls: carries what hosts say to the trainer.
        node: where the workers run.
    """

    def __init__(self, settings: ActorSettings, calls: CallHandler, node: Node) -> None:
        self._calls, self._node = calls, node
        self._worker = replace(settings.worker, affinity=None)
        rules = PreloadRules(settings.preload, settings.import_s)
        self._spawner = make_spawner("server", self._worker, (), rules)
        self._is_preloading = self._spawner.preloads
        self._transport = ProcessTransport(
            self._spawner,
            self._worker,
            shared_memory=settings.shared_memory and node.posts,
            as_arrival=_as_it_is,
        )
        self._requests: deque[ActorRequest] = deque()
        self._named = settings.named
        self._hosts: set[int] = set()
        self._killed: set[int] = set()
        self._bells = threading.Lock()  # no host is rung while it is closed
        self._thread = threading.Thread(
            target=self._run, name=thread_name("worker processes"), daemon=True
        )
        self._thread.start()

    def deliver(self, requests: Sequence[ActorRequest]) -> None:
        """Leave requests to the thread."""
        if requests:
            self._requests.extend(requests)
            self._transport.wake()

    def place(self, nbytes: int) -> Any:
        """Allocate the memory that all workers share."""
        return self._transport.place(nbytes)

    def count_messages(self, counts: Any) -> None:
        """Count messages in `counts` from now on."""
        self._transport.count_messages(counts)

    def ring(self, host_ids: Sequence[int]) -> None:
        """Ring at once: waking the thread to do it would take as long."""
        with self._bells:
            self._transport.ring(host_ids)

    def whereabouts(self, host_id: int) -> str:
        """Return the stacks of a worker, or what keeps it from being started."""
        if self._is_preloading:
            return "Its actor is still importing what all of its workers need (manager.preload)"
        return self._transport.whereabouts(host_id)

    def _run(self) -> None:
        try:
            self._preload()
            while self._do_all():
                self._pass_on(0.5)
        except ConfigError as error:  # the node lacks a module that was listed
            self._calls.fail(f"node {self._node.address}: {error}")
        except BaseException:  # a defect of ours must not vanish with the thread
            self._calls.fail(traceback.format_exc())
        with self._bells:
            self._transport.close(0.0)
        for host_id in sorted(self._hosts):
            self._calls.put(host_id, HostDied(None))

    def _preload(self) -> None:
        if self._spawner.preloads:
            with contextlib.suppress(OSError):  # `start` will say so
                self._spawner.preload(self._named)
            while not self._transport.is_prepared:
                self._pass_on(0.1)
        self._is_preloading = False

    def _do_all(self) -> bool:
        """Do what was asked for; return False after a request to end."""
        while self._requests:
            op, host_id, data = self._requests.popleft()
            with self._bells:
                if op == ActorOp.CLOSE:
                    self._transport.close(data)
                    return False
                self._do(op, host_id, data)
        return True

    def _do(self, op: int, host_id: int, data: object) -> None:
        transport = self._transport
        if op == ActorOp.START:
            self._hosts.add(host_id)
            transport.start([spec_of(host_id, data, self._node)])  # type: ignore[arg-type]
        elif op == ActorOp.ASK:
            transport.ring([host_id], asks=True)
        elif op == ActorOp.SEND:
            transport.send(host_id, data.encoded())  # type: ignore[attr-defined]
        elif host_id not in self._killed:
            self._killed.add(host_id)
            transport.kill(host_id)
        else:
            transport.give_up(host_id)

    def _pass_on(self, timeout_s: float) -> None:
        """Wait, then pass on what has come."""
        transport = self._transport
        if not (transport.has_block and transport.await_ring(timeout_s)):
            transport.poll(timeout_s)
        if transport.has_block:
            self._calls.ring()  # before messages, such as a death
        if transport.needs_attention:
            with self._bells:
                transport.attend()
        while transport.arrivals:
            host_id, arrival = transport.arrivals.popleft()
            if type(arrival) is HostDied:
                self._hosts.discard(host_id)
                self._killed.discard(host_id)
            self._calls.put(host_id, arrival)


def _as_it_is(frame: Frame) -> Frame:
    return frame
