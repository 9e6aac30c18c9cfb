"""Hosts on a Ray cluster: actors, or worker processes of actors."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from envmgr.config.kind_sections import Ray
from envmgr.errors import ConfigError
from envmgr.transport.outbox import OutboxTransport
from envmgr.transport.process.worker_setup import WorkerSetupWriter
from envmgr.transport.ray.actor import ActorSettings, HostActor
from envmgr.transport.ray.actor_calls import THREADS
from envmgr.transport.ray.cluster import close_cluster, open_cluster
from envmgr.transport.ray.mirror import TrainerMirror
from envmgr.transport.ray.nodes import (
    NodeChoice,
    describe,
    options_of,
    refuse_without_capacity,
    strategy_of,
)
from envmgr.transport.ray.protocol import ActorOp, ActorRequest
from envmgr.transport.ray.trainer_calls import KILL, LOSE, RING, ActorCaller, ActorLink
from envmgr.transport.ready import Waker
from envmgr.types import EnvFactory
from envmgr.wire.block import block_is_possible
from envmgr.wire.frames import Frame, pack
from envmgr.wire.hosts import HostSpec
from envmgr.wire.messages import UNANSWERED, Message, Op

_LAST_S = 1.0
"""How long actors that were killed may take to be gone."""

_ASK_S = 0.3
"""How long an actor may take to say where a host hangs."""

_ELSEWHERE = "runs its hosts on other machines, "


class ActorPlan(NamedTuple):
    """Which actors a manager wants.

    Attributes:
        options: the section `manager.ray` of the config.
        n_actors: how many actors share the hosts.
        n_hosts: how many hosts there are, without those of spares.
        settings: what each actor needs to know, but for the modules that factories name.
    """

    options: Ray
    n_actors: int
    n_hosts: int
    settings: ActorSettings


class RayTransport(OutboxTransport):
    """Hosts on a Ray cluster; docs/decisions/0025 says how.

    Args:
        plan: see `ActorPlan`.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: the cluster has no room for the actors, or Ray refuses their options.
        LaunchError: no cluster can be reached or started.
    """

    _hosts: dict[int, ActorLink]
    kill_patience_s = 1.0
    spins = False
    is_mirrored = True
    refused: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "context": f"{_ELSEWHERE}where envmgr's own launcher starts workers",
            "worker_affinity": f"{_ELSEWHERE}whose cores it cannot name",
            "worker_log": f"{_ELSEWHERE}where Ray writes logs",
        }
    )

    def __init__(self, plan: ActorPlan) -> None:
        self._plan = plan
        self._isolated = plan.settings.isolated
        self.packs_envs = not self._isolated
        self._worker_setup = WorkerSetupWriter(plan.settings.worker, with_factories=True)
        self._named: tuple[str, ...] = ()
        self._links: dict[int, ActorLink] = {}
        self._given_up: set[int] = set()
        self._latest: tuple[Any, list[None]] = (None, [])
        self._cluster = cluster = open_cluster(plan.options.address)
        self._ray = cluster.ray
        with contextlib.ExitStack() as opened:
            opened.callback(close_cluster, cluster)
            self._actor_class = self._checked_class()
            super().__init__()
            self._deaths, outbox = Waker(), self._open_outbox()
            self._ready.add(self._deaths)
            self._node_choice = NodeChoice(self._ray, plan.options)
            self._caller = ActorCaller(self._ray, outbox, self._deaths, self._node_choice.lost)
            self._tasks: queue.SimpleQueue[Any] = self._caller.tasks
            opened.pop_all()

    def _checked_class(self) -> Any:
        """Return the actor's class for Ray, if the cluster has room for the actors."""
        plan = self._plan
        refuse_without_capacity(self._ray.nodes(), plan.options, plan.n_actors)
        self._options = {**options_of(plan.options), "max_concurrency": THREADS}
        actor_class = self._ray.remote(HostActor)
        try:
            actor_class.options(**self._options)
            return actor_class
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Ray refuses what manager.ray says of actors: {error}") from error

    # -- hosts ------------------------------------------------------------------------------

    def preload(self, factories: Sequence[EnvFactory]) -> None:
        """Pickle all factories, and note which modules they name.

        Raises:
            ConfigError: a factory cannot be pickled; nothing was started.
        """
        self._named = self._worker_setup.modules_named_by(factories)

    def start(self, specs: Sequence[HostSpec]) -> None:
        """Start hosts, in new actors where there are none for them.

        Raises:
            ConfigError: a factory cannot be pickled; nothing was started.
        """
        setup = [self._worker_setup.setup_of(spec) for spec in specs]
        for spec, payload in zip(specs, setup, strict=True):
            link = self._link_for(spec)
            self._hosts[spec.host_id] = link
            self._tasks.put((link, ActorRequest(ActorOp.START, spec.host_id, payload)))

    def _link_for(self, spec: HostSpec) -> ActorLink:
        """Return the actor of a host; hosts that share one have indexes next to each other."""
        plan, index = self._plan, spec.index
        if self._isolated:
            beyond = index - plan.n_hosts  # spares are dealt out
            index = index * plan.n_actors // plan.n_hosts if beyond < 0 else beyond % plan.n_actors
            if (link := self._links.get(index)) is not None and not link.is_over:
                return link
        self._links[index] = link = ActorLink(self._start_actor, serves_one=not self._isolated)
        return link

    def _start_actor(self) -> tuple[Any, str | None]:
        """Let Ray start an actor; return its handle and the node that was chosen."""
        settings = self._plan.settings._replace(named=self._named)
        links = list(self._links.values())
        taken = [link.node_id for link in links if link.node_id and not link.is_over]
        node_id = self._node_choice.choose(taken)
        options = {**self._options, "scheduling_strategy": strategy_of(node_id)}
        return self._actor_class.options(**options).remote(settings), node_id

    def kill(self, host_id: int) -> None:
        """Kill the host's actor, or let the actor kill the host."""
        link = self._hosts.get(host_id)
        if link is not None:
            self._killed.add(host_id)
            self._tasks.put((link, ActorRequest(ActorOp.KILL, host_id) if self._isolated else KILL))

    def give_up(self, host_id: int) -> None:
        """Let the actor do what it can; the second time, give the actor up with all its hosts."""
        link = self._hosts.get(host_id)
        if link is None:
            return
        if self._isolated and host_id not in self._given_up:
            self._given_up.add(host_id)
            self._tasks.put((link, ActorRequest(ActorOp.KILL, host_id)))
        else:
            self._given_up.discard(host_id)
            self._tasks.put((link, LOSE))

    def whereabouts(self, host_id: int) -> str:
        """Ask the host's actor, unless it failed to answer before."""
        link = self._hosts.get(host_id)
        if link is None or link.is_over or link.is_silent or not self._ray.is_initialized():
            return ""
        try:
            if link.node is None:
                has = describe(self._ray.nodes())
                return f"Ray has not started its actor. The cluster has {has}"
            return str(self._ray.get(link.handle.whereabouts.remote(host_id), timeout=_ASK_S))
        except Exception:  # no answer in time, or it has just died
            link.is_silent = True
            return ""

    def figures(self) -> dict[str, Any]:
        """Return where the actors are, and how many hosts each has."""
        return {
            "actors": [
                {**link.node._asdict(), "hosts": len(link.hosts)}
                for link in list(self._links.values())
                if link.node is not None and not link.is_over
            ]
        }

    # -- messages ---------------------------------------------------------------------------

    def prepare(self, host_id: int, message: Message) -> Frame:
        """Pickle the payload."""
        return pack(message, has_main=False)

    def send(self, host_id: int, prepared: Any) -> None:
        """Leave a request to the thread that makes calls."""
        link = self._hosts.get(host_id)
        if link is not None:
            was_put: list[None] = []
            self._latest = (prepared, was_put)
            task = (link, ActorRequest(ActorOp.SEND, host_id, prepared))
            # In one go: no signal handler comes between putting the request and noting that.
            was_put.extend(map(self._tasks.put, (task,)))

    def has_sent(self, host_id: int, prepared: Any) -> bool:
        """Return whether this very object is the last one that `send` left to the thread."""
        latest, was_put = self._latest
        return latest is prepared and bool(was_put)

    def any_death(self) -> list[Any]:
        """Return the waker that is rung for deaths only."""
        return [self._deaths]

    # -- the block --------------------------------------------------------------------------

    @property
    def has_block(self) -> bool:
        """Whether steps may be posted: here, and on all nodes that are known."""
        nodes = [link.node for link in self._links.values() if link.node is not None]
        possible = self._plan.settings.shared_memory and block_is_possible()
        return possible and all(n.posts for n in nodes)

    def place(self, nbytes: int) -> memoryview | None:
        """Allocate memory, of which each actor has a copy; see `mirror`."""
        if nbytes == 0 or not self.has_block:
            return None
        memory = memoryview(np.zeros(nbytes, np.uint8))  # type: ignore[arg-type]
        self._caller.mirror = TrainerMirror(lambda nbytes: memory)
        return memory

    def ring(self, host_ids: Iterable[int], *, asks: bool = False) -> None:
        """Let the thread that makes calls tell actors what was posted."""
        links: dict[ActorLink, None] = {}
        for host_id in host_ids:
            if (link := self._hosts.get(host_id)) is not None:
                links[link] = None
                if asks:
                    self._tasks.put((link, ActorRequest(ActorOp.ASK, host_id)))
        for link in links:
            self._tasks.put((link, RING))

    # -- the end ----------------------------------------------------------------------------

    def close(self, grace_s: float) -> None:
        """Let envs close, then kill the actors; a cluster that was started for this ends, too."""
        if self._closed:
            return
        try:
            if grace_s > 0.0 and self._ray.is_initialized():
                self._ask_to_end(grace_s)
        finally:
            self._hurried = False
            for link in self._links.values():
                self._tasks.put((link, KILL))
            if self._ray.is_initialized():  # not so when the interpreter ends
                self._await_ends(_LAST_S)
            self._caller.end(_LAST_S)
            self._closed = True
            self._release()

    def _ask_to_end(self, grace_s: float) -> None:
        if self._isolated:
            for link in self._links.values():
                self._tasks.put((link, ActorRequest(ActorOp.CLOSE, 0, grace_s)))
            grace_s += _LAST_S  # the actor sees to the time itself
        else:
            for host_id in list(self._hosts):
                self.send(host_id, pack(Message(Op.CLOSE, 0, 0, UNANSWERED, None)))
        self._await_ends(grace_s)

    def _release(self) -> None:
        self._hosts.clear()
        self._links.clear()
        self._ready.close()
        self._deaths.close()
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            outbox.bell.close()
        close_cluster(self._cluster)
        self.arrivals = deque()
