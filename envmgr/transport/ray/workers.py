"""The worker processes of an actor: hosts that the actor starts, supervises, and speaks for."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from envmgr.transport.base import HostDied
from envmgr.transport.process.preloading import PreloadRules
from envmgr.transport.process.start_methods import make_spawner
from envmgr.transport.process.transport import ProcessTransport
from envmgr.transport.ray.actor import ActorSettings, spec_of
from envmgr.transport.ray.exchange import Exchange
from envmgr.transport.ray.items import Do, Item, Node
from envmgr.wire.frames import Frame


class Workers:
    """Hosts in worker processes, over the transport that `subprocess` has.

    Its one thread polls that transport and passes on what comes, as it is. Others only ring.

    Args:
        settings: of the actor.
        exchange: takes what they say.
        node: where they are.
    """

    def __init__(self, settings: ActorSettings, exchange: Exchange, node: Node) -> None:
        self._exchange, self._node = exchange, node
        self._worker = replace(settings.worker, affinity=None)
        rules = PreloadRules(settings.preload, settings.import_s)
        self._spawner = make_spawner("server", self._worker, (), rules)
        self._transport = ProcessTransport(
            self._spawner,
            self._worker,
            shared_memory=settings.shared_memory and node.posts,
            as_arrival=_as_it_is,
        )
        self._items: deque[Item] = deque()
        self._pickles: tuple[bytes, ...] = settings.pickles if self._spawner.preloads else ()
        self._hosts: set[int] = set()
        self._killed: set[int] = set()
        self._bells = threading.Lock()  # nobody rings one that is being closed
        self._thread = threading.Thread(target=self._run, name="envmgr-workers", daemon=True)
        self._thread.start()

    def deliver(self, items: Sequence[Item]) -> None:
        """Leave it to the thread."""
        if items:
            self._items.extend(items)
            self._transport.wake()

    def place(self, nbytes: int) -> Any:
        """Allocate the memory that all workers share."""
        return self._transport.place(nbytes)

    def count_mail(self, mail: Any) -> None:
        """Count the messages there."""
        self._transport.count_mail(mail)

    def ring(self, host_ids: Sequence[int]) -> None:
        """Ring at once, as leaving it to the thread would take as long as waking all of them."""
        with self._bells:
            self._transport.ring(host_ids)

    def whereabouts(self, host_id: int) -> str:
        """Return the stacks of a worker."""
        return self._transport.whereabouts(host_id)

    def _run(self) -> None:
        detail = ""
        try:
            self._preload()
            while self._do_all():
                self._pass_on(0.5)
        except BaseException:  # a defect of ours must not vanish with the thread
            detail = traceback.format_exc()
        with self._bells:
            self._transport.close(0.0)
        for host_id in sorted(self._hosts):
            self._exchange.put(host_id, HostDied(None, detail))

    def _preload(self) -> None:
        if self._pickles:
            self._spawner.preload(self._pickles)
            while not self._transport.is_prepared:
                self._pass_on(0.1)

    def _do_all(self) -> bool:
        """Do what has been asked for; False if that was to end."""
        while self._items:
            do, host_id, data = self._items.popleft()
            with self._bells:
                if do == Do.CLOSE:
                    self._transport.close(data)
                    return False
                self._do(do, host_id, data)
        return True

    def _do(self, do: int, host_id: int, data: object) -> None:
        transport = self._transport
        if do == Do.START:
            self._hosts.add(host_id)
            transport.start([spec_of(host_id, data, self._node)])  # type: ignore[arg-type]
        elif do == Do.ASK:
            transport.ring([host_id], asks=True)
        elif do == Do.SEND:
            transport.send(host_id, data.encoded())  # type: ignore[attr-defined]
        elif host_id not in self._killed:
            self._killed.add(host_id)
            transport.kill(host_id)
        else:
            transport.give_up(host_id)

    def _pass_on(self, timeout_s: float) -> None:
        """Wait, and have the exchange say what has come."""
        transport = self._transport
        if not (transport.has_block and transport.await_ring(timeout_s)):
            transport.poll(timeout_s)
        if transport.has_block:
            self._exchange.ring()  # before what comes by message: a death, say
        if transport.needs_attention:
            with self._bells:
                transport.attend()
        while transport.arrivals:
            host_id, arrival = transport.arrivals.popleft()
            if type(arrival) is HostDied:
                self._hosts.discard(host_id)
                self._killed.discard(host_id)
            self._exchange.put(host_id, arrival)


def _as_it_is(frame: Frame) -> Frame:
    return frame
