"""The trainer's side of calls to actors: one thread makes them all.

The thread of the trainer's loop never runs Ray's code, which a signal handler could interrupt
half-way. It leaves what is to be sent in a queue, and finds what has come in the outbox, where
Ray's threads put it. All that is in the queue when the calling thread looks goes with one call, so
a batch of steps takes one call to each actor.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from envmgr.interruptible import join_thread, start_thread
from envmgr.transport.base import Arrival, Garbage, HostDied
from envmgr.transport.outbox import Outbox
from envmgr.transport.process.threads import thread_name
from envmgr.transport.ray.actor_calls import Reply
from envmgr.transport.ray.mirror import PLACING, News, TrainerMirror
from envmgr.transport.ray.protocol import ActorOp, ActorRequest, Node, packed, unpacked
from envmgr.transport.ready import Waker
from envmgr.wire.frames import Frame, FrameError


class ActorLink:
    """An actor, as the trainer knows it.

    Args:
        start: lets Ray start the actor; returns its handle and the node that was chosen.
        serves_one: whether the actor is of no use any more once its host has ended.

    Attributes:
        start: the same.
        serves_one: the same.
        handle: the actor for Ray; None before the first call.
        hosts: by host_id, the indexes of the hosts that the actor serves, in order of their starts.
        rows: the envs whose steps are posted for the actor.
        is_rung: something was posted that the actor does not know of.
        requests: what the next call brings.
        node: where the actor runs, once it has said so.
        node_id: the node that was chosen for it.
        n_calls: how many calls have not returned.
        is_over: the actor has died, or was killed: nothing is sent to it any more.
        is_gone: its death is known, and its hosts are reported dead.
        end: how it has ended, for hosts that were given to it after that.
        is_silent: it was asked where a host hangs, and did not answer in time.
    """

    def __init__(self, start: Callable[[], tuple[Any, str | None]], *, serves_one: bool) -> None:
        self.start, self.serves_one = start, serves_one
        self.handle: Any = None
        self.hosts: dict[int, int] = {}
        self.rows: set[int] = set()
        self.is_rung = False
        self.requests: list[ActorRequest] = []
        self.node: Node | None = None
        self.node_id: str | None = None
        self.is_over = self.is_gone = self.is_silent = False
        self.end = "its actor has ended"
        self._numbers = itertools.count()
        self._n_returned = 0
        self._early: dict[int, list[Reply]] = {}
        self.n_calls = 0

    def posted(self, mirror: TrainerMirror) -> None:
        """Add what was posted to the requests of the next call."""
        self.is_rung = False
        indexes = np.array([*self.hosts.values()], np.int64)
        posts = mirror.posts(np.array([*self.rows], np.int64), indexes)
        if posts:
            self.requests.append(ActorRequest(ActorOp.POST, 0, posts))

    def call(self) -> Any:
        """Make a call with all the requests; return its future."""
        requests, self.requests = self.requests, []
        if self.handle is None:
            self.handle, self.node_id = self.start()
        number = next(self._numbers)
        return self.handle.exchange.remote(number, packed(requests)).future()

    def in_order(self, returned: int, replies: list[Reply]) -> list[Reply]:
        """Return the replies whose turn it is, now that a call has returned with these."""
        self.n_calls -= 1
        self._early[returned] = replies
        found: list[Reply] = []
        while (next_ones := self._early.pop(self._n_returned, None)) is not None:
            self._n_returned += 1
            found += next_ones
        return found


KILL, LOSE, RING = "kill", "lose", "ring"
"""What to do about an actor: kill it; kill it and take it for dead; tell it what was posted."""

Task = tuple[ActorLink | None, Any]
"""An actor, and what to do: a request, one of the above, or None if a call has to wait in it.
Without an actor: end the thread."""


class ActorCaller:
    """Carries requests to actors, and puts what the actors reply into the outbox.

    Args:
        ray: the package, connected to a cluster.
        outbox: where replies go.
        deaths: is rung when a host has died.
        lost: is called with the node of an actor that has died without being killed.

    Attributes:
        mirror: the block in which steps are posted; None where they go by message.
        tasks: what the thread is to do.
    """

    def __init__(
        self, ray: Any, outbox: Outbox, deaths: Waker, lost: Callable[[str], None]
    ) -> None:
        self._ray, self._lost = ray, lost
        self._outbox, self._deaths = outbox, deaths
        self.mirror: TrainerMirror | None = None
        self._links: dict[int, ActorLink] = {}  # of the envs whose steps are posted
        self.tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._lock = threading.RLock()  # of the links; the trainer's loop does not take it
        self._thread = threading.Thread(
            target=self._run, name=thread_name("calls to Ray actors"), daemon=True
        )
        start_thread(self._thread)

    def end(self, limit_s: float) -> None:
        """End the thread once it has done all that it was given before."""
        self.tasks.put((None, None))
        join_thread(self._thread, limit_s)

    def _run(self) -> None:
        while True:
            touched: dict[ActorLink, None] = {}
            task = self.tasks.get()
            while True:
                link, what = task
                if link is None:
                    return
                touched[link] = None
                with self._lock:
                    kills = self._take(link, what)
                if kills:  # without the lock: a thread that Ray waits for may wait for it
                    self._kill(link)
                if self.tasks.empty():
                    break
                task = self.tasks.get()
            for link in touched:
                self._call(link)

    def _take(self, link: ActorLink, what: Any) -> bool:
        """Do what can be done without Ray; return whether the actor is to be killed."""
        if type(what) is ActorRequest:
            if what.op == ActorOp.START:
                link.hosts[what.host_id] = what.data.host_index
                if link.is_over:  # this was not known when the host was given to it
                    self._report_deaths(link, [what.host_id], link.end)
            if not link.is_over:
                link.requests.append(what)
                if what.op == ActorOp.SEND and what.data.op in PLACING:
                    self._note_placement(link, what.data)
        elif what is RING:
            link.is_rung = True
        elif what is LOSE or (what is KILL and link.handle is None and not link.is_gone):
            error = TimeoutError("it was killed, and has not said a word since")
            self._lose(link, error, is_silent=True)
        elif what is KILL:
            link.is_over = True
            link.requests.clear()
            return link.handle is not None
        return False

    def _note_placement(self, link: ActorLink, frame: Frame) -> None:
        """Note which actor an env's steps are posted for: its host is told where its data is."""
        if self.mirror is not None and self.mirror.note_placement(frame):
            if (before := self._links.get(frame.env_id)) is not None:
                before.rows.discard(frame.env_id)
            self._links[frame.env_id] = link
            link.rows.add(frame.env_id)

    def _call(self, link: ActorLink) -> None:
        """Make a call if there is anything to send, or if no call waits in the actor."""
        with self._lock:
            if link.is_over:
                return
            if link.is_rung and self.mirror is not None:
                link.posted(self.mirror)
            if not link.requests and link.n_calls:
                return
            link.n_calls += 1  # first: the call may return before `call` does
        try:
            if not self._ray.is_initialized():
                raise ConnectionError("this process is not connected to Ray any more")
            future = link.call()
        except Exception as error:  # whatever Ray may raise
            with self._lock:
                self._lose(link, error)
        else:
            future.add_done_callback(partial(self._returned, link))

    def _returned(self, link: ActorLink, future: Any) -> None:
        """Take what a call returned. Runs on one of Ray's threads, which must not call Ray."""
        with self._lock:
            if link.is_gone:
                return
            try:
                returned, data = future.result()
                replies = unpacked(data)
            except BaseException as error:  # the actor's death, or a defect of ours in it
                self._lose(link, error)
                return
            self._take_returned(link, returned, replies)
            if link.n_calls == 0:
                self.tasks.put((link, None))

    def _take_returned(self, link: ActorLink, returned: int, replies: list[Reply]) -> None:
        put = self._outbox.sent.append
        for host_id, reply in link.in_order(returned, replies):
            if type(reply) is Frame:
                put((host_id, _opened(reply)))
            elif type(reply) is News:
                if self.mirror is not None:
                    self.mirror.apply(reply)
            elif type(reply) is Node:
                link.node, link.node_id = reply, reply.node_id
            else:
                put((host_id, reply))
                self._host_ended(link, host_id)
        if replies:
            self._outbox.bell.wake()

    def _host_ended(self, link: ActorLink, host_id: int) -> None:
        link.hosts.pop(host_id, None)
        self._deaths.wake()
        if link.serves_one:
            self.tasks.put((link, KILL))

    def _lose(self, link: ActorLink, error: BaseException, *, is_silent: bool = False) -> None:
        """Give up an actor that has died or cannot be reached: nobody waits for it any more."""
        link.is_gone = True
        if link.node_id is not None and (is_silent or not link.is_over):
            self._lost(link.node_id)
        link.is_over = True
        link.requests.clear()
        self.tasks.put((link, KILL))  # it may be alive, and only out of reach
        link.end = _words_of(error)
        self._report_deaths(link, list(link.hosts), link.end)

    def _report_deaths(self, link: ActorLink, host_ids: Sequence[int], detail: str) -> None:
        for n, host_id in enumerate(host_ids):
            link.hosts.pop(host_id, None)
            self._outbox.sent.append((host_id, HostDied(None, detail, with_others=n > 0)))
        self._outbox.bell.wake()
        self._deaths.wake()

    def _kill(self, link: ActorLink) -> None:
        with contextlib.suppress(Exception):  # it is gone already
            if self._ray.is_initialized():
                self._ray.kill(link.handle, no_restart=True)


def _opened(frame: Frame) -> Arrival:
    try:
        return frame.message()
    except FrameError as error:
        return Garbage(str(error))


def _words_of(error: BaseException) -> str:
    """Return what Ray says of the end of an actor, with the type of the error."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, BaseException) else error).strip()
    return f"{type(error).__name__}: {text}"
