"""Hosts on threads of the trainer's own process: for envs that release the GIL, or wait.

A thread cannot be killed. One that is given up while it runs env code goes on: it is a daemon,
keeps the memory that it uses (docs/decisions/0023), and ends when the env's code returns.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr.interruptible import frames_of_threads, join_thread, start_thread
from envmgr.transport.alarm import stack_text
from envmgr.transport.base import HostDied
from envmgr.transport.outbox import Outbox, OutboxTransport
from envmgr.wire.block import block_is_possible, items
from envmgr.wire.hosts import HostSpec
from envmgr.wire.messages import UNANSWERED, Message, Op
from envmgr.worker.copies import copied_request
from envmgr.worker.host import EnvsInUse
from envmgr.worker.serving import QueueInbox, run_on_thread

_LAST_S = 0.5
"""How long threads may take to end after the grace: they still have to close their envs."""

_PROCESS = "runs its envs on threads of the trainer's process, "


class _Entry(NamedTuple):
    """A host: its index, where its requests go, and its thread."""

    host_index: int
    inbox: QueueInbox
    thread: threading.Thread


class ThreadTransport(OutboxTransport):
    """Hosts on daemon threads.

    Args:
        shared_memory: whether observations of fixed layout are written where they are read, and
            steps may be posted; if not, everything goes by message.
    """

    _hosts: dict[int, _Entry]
    kill_patience_s = 0.1
    shares_objects = True
    spins = False
    refused: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "context": f"{_PROCESS}and starts none",
            "preload": f"{_PROCESS}where whatever is imported is imported once",
            "worker_threads": f"{_PROCESS}whose math threads all of it shares",
            "worker_env": f"{_PROCESS}whose environment all of it shares",
            "worker_affinity": f"{_PROCESS}which it does not bind to cores",
            "worker_log": f"{_PROCESS}whose streams all of it shares",
            "max_worker_rss_mb": f"{_PROCESS}whose memory cannot be told apart",
        }
    )

    def __init__(self, *, shared_memory: bool) -> None:
        super().__init__()
        self._given_up: list[threading.Thread] = []
        self._envs_in_use = EnvsInUse()
        self._has_memory = shared_memory
        self._memory: npt.NDArray[np.uint8] | None = None
        self._messages_sent: Any = None
        self._message_numbers = itertools.count(1)

    # -- hosts ------------------------------------------------------------------------------

    def start(self, specs: Sequence[HostSpec]) -> None:
        """Start a thread for each host."""
        outbox = self._open_outbox()
        ring = outbox.bell.wake if self.has_block else None
        for spec in specs:
            inbox = QueueInbox(partial(outbox.put, spec.host_id))
            env_ids = ",".join(str(env.env_id) for env in spec.envs)
            thread = threading.Thread(
                target=_run,
                args=(spec, inbox, outbox),
                kwargs={
                    "memory": self._open_memory,
                    "ring": ring,
                    "envs_in_use": self._envs_in_use,
                },
                name=f"envmgr-envs-{env_ids}",
                daemon=True,
            )
            try:
                start_thread(thread)
            except RuntimeError as error:
                self.arrivals.append((spec.host_id, HostDied(None, f"not started: {error}")))
                continue
            self._hosts[spec.host_id] = _Entry(spec.index, inbox, thread)

    def kill(self, host_id: int) -> None:
        """Tell a host to end as soon as it is not running env code."""
        entry = self._hosts.get(host_id)
        if entry is not None:
            self._killed.add(host_id)
            entry.inbox.end()

    def give_up(self, host_id: int) -> None:
        """Abandon a host that does not end."""
        entry = self._hosts.pop(host_id, None)
        if entry is not None:
            self._given_up = [*filter(threading.Thread.is_alive, self._given_up), entry.thread]
            self.arrivals.append((host_id, HostDied(None, lingers=True)))

    def whereabouts(self, host_id: int) -> str:
        """Return the stack of a thread, without envmgr's calls around the env's."""
        entry = self._hosts.get(host_id)
        return "" if entry is None else stack_of(entry.thread)

    def figures(self) -> dict[str, Any]:
        """Count the threads that were given up and still run."""
        return {"threads_abandoned": sum(thread.is_alive() for thread in self._given_up)}

    # -- messages ---------------------------------------------------------------------------

    def prepare(self, host_id: int, message: Message) -> Message:
        """Return the message with arrays and containers of its own."""
        return copied_request(message)

    def send(self, host_id: int, prepared: Any) -> None:
        """Hand a request over to the thread of a host."""
        entry = self._hosts.get(host_id)
        if entry is not None:
            entry.inbox.send(prepared)
            self._count(entry)

    def has_sent(self, host_id: int, prepared: Any) -> bool:
        """Ask the host's inbox whether it was sent."""
        entry = self._hosts.get(host_id)
        if entry is None or not entry.inbox.has_sent(prepared):
            return False
        self._count(entry)  # which the interrupt may have kept from being done
        return True

    def count_messages(self, counts: Any) -> None:
        """Count messages in `counts` from now on."""
        self._messages_sent = items(counts)

    def _count(self, entry: _Entry) -> None:
        if self._messages_sent is not None:
            self._messages_sent[entry.host_index] = next(self._message_numbers)

    # -- the block --------------------------------------------------------------------------

    @property
    def has_block(self) -> bool:
        """Whether steps may be posted: there is a block, and writes to it keep their order."""
        return self._has_memory and block_is_possible()

    def ring(self, host_ids: Iterable[int], *, asks: bool = False) -> None:
        """Have hosts look at the block."""
        hosts = self._hosts
        for host_id in host_ids:
            entry = hosts.get(host_id)
            if entry is not None:
                entry.inbox.ring(asks=asks)

    def place(self, nbytes: int) -> memoryview | None:
        """Allocate private memory."""
        if not self._has_memory:
            return None
        self._memory = np.zeros(nbytes, np.uint8)
        return memoryview(self._memory)  # type: ignore[arg-type]

    def _open_memory(self, nbytes: int) -> memoryview:
        # A view for each env, so that nothing relies on a count that several threads change.
        return memoryview(self._memory)  # type: ignore[arg-type]

    # -- the end ----------------------------------------------------------------------------

    def close(self, grace_s: float) -> None:
        """Ask threads to end, then give up those that are still in env code."""
        if self._closed:
            return
        threads = [entry.thread for entry in self._hosts.values()]
        try:
            if grace_s > 0.0:
                for host_id in list(self._hosts):
                    self.send(host_id, Message(Op.CLOSE, 0, 0, UNANSWERED, None))
                self._await_ends(grace_s)
        finally:  # also when Ctrl-C cuts the grace short
            for entry in self._hosts.values():
                entry.inbox.end()
            self._hurried = False
            self._await_ends(_LAST_S)
            self._release(threads)
            self._closed = True

    def _release(self, threads: Sequence[threading.Thread]) -> None:
        """Release everything that no thread can touch any more.

        Args:
            threads: those that were told to end.
        """
        hanging = {entry.thread for entry in self._hosts.values()}
        end = time.monotonic() + _LAST_S
        for thread in threads:
            if thread not in hanging:  # it has said that it ends
                join_thread(thread, max(end - time.monotonic(), 0.0))
        self._given_up = [*self._given_up, *hanging]
        self._hosts.clear()
        self._ready.close()
        outbox, self._outbox = self._outbox, None
        if outbox is not None and not any(thread.is_alive() for thread in self._given_up):
            outbox.bell.close()  # else with the last of them
        self.arrivals = deque()
        self._memory = self._messages_sent = None


def _run(spec: HostSpec, inbox: QueueInbox, outbox: Outbox, **given: Any) -> None:
    """Run a host; this is what its thread does."""
    detail = ""
    try:
        run_on_thread(spec, inbox, **given)
    except BaseException as error:  # a defect of ours must not vanish with the thread
        detail = "".join(traceback.format_exception(error))
    outbox.put(spec.host_id, HostDied(None, detail))


def stack_of(thread: threading.Thread) -> str:
    """Return the stack of a thread that runs envs, without envmgr's calls around the env's."""
    frame = frames_of_threads().get(thread.ident or 0)
    return "" if frame is None else stack_text(traceback.extract_stack(frame))
