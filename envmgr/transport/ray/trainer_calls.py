"""The trainer's side of calls to actors: one thread that makes them all.

Ray's code is never run in the thread of the trainer's loop, where a signal handler could end it
half-way: that thread leaves in a queue what is to be sent, and finds in the outbox what has come,
where threads of Ray's put it.
What is left while the courier is on its way goes with the next call, so a batch of steps makes one
call to each actor.
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

from envmgr.transport.base import Arrival, Garbage, HostDied
from envmgr.transport.outbox import Outbox
from envmgr.transport.process.threads import thread_name
from envmgr.transport.ray.actor_calls import Reply
from envmgr.transport.ray.mirror import PLACING, News, TrainerMirror
from envmgr.transport.ray.protocol import Do, Item, Node, packed, unpacked
from envmgr.transport.ready import Waker
from envmgr.wire.frames import Frame, FrameError


class Link:
    """An actor, as the courier knows it.

    Args:
        start: has Ray start it, and returns its handle and the node that was chosen.
        serves_one: it is of no use any more when its host has ended.

    Attributes:
        start: the same.
        serves_one: the same.
        handle: once it was asked for.
        hosts: those that it serves, and which of the manager's each is; in the order of their
            starts.
        rows: envs whose steps are posted for it.
        is_rung: something was posted for it that it does not know of.
        items: what the next call brings.
        node: where it is, once it has said so.
        node_id: where it is to be.
        n_calls: those that have not returned.
        is_over: it has died, or was killed: nothing is sent to it any more.
        is_gone: its death is known, and its hosts are reported dead.
        is_silent: it was asked something, and did not answer in time.
    """

    def __init__(self, start: Callable[[], tuple[Any, str | None]], *, serves_one: bool) -> None:
        self.start, self.serves_one = start, serves_one
        self.handle: Any = None
        self.hosts: dict[int, int] = {}
        self.rows: set[int] = set()
        self.is_rung = False
        self.items: list[Item] = []
        self.node: Node | None = None
        self.node_id: str | None = None
        self.is_over = self.is_gone = self.is_silent = False
        self._numbers = itertools.count()
        self._n_returned = 0
        self._early: dict[int, list[Reply]] = {}
        self.n_calls = 0

    def posted(self, mirror: TrainerMirror) -> None:
        """Have the next call bring what was posted."""
        self.is_rung = False
        indexes = np.array([*self.hosts.values()], np.int64)
        posts = mirror.posts(np.array([*self.rows], np.int64), indexes)
        if posts:
            self.items.append(Item(Do.POST, 0, posts))

    def call(self) -> Any:
        """Make a call with all that is there to be sent; return its future."""
        items, self.items = self.items, []
        if self.handle is None:
            self.handle, self.node_id = self.start()
        number = next(self._numbers)
        return self.handle.exchange.remote(number, packed(items)).future()

    def in_order(self, returned: int, replies: list[Reply]) -> list[Reply]:
        """Return the replies whose turn it is, now that these have come."""
        self.n_calls -= 1
        self._early[returned] = replies
        found: list[Reply] = []
        while (next_ones := self._early.pop(self._n_returned, None)) is not None:
            self._n_returned += 1
            found += next_ones
        return found


KILL, LOSE, RING = "kill", "lose", "ring"
"""What to do about an actor: end it; end it and wait for no word of that; tell it what was posted.
"""

Task = tuple[Link | None, Any]
"""An actor, and an item for it, one of the above, or None if it has no call; no link: that is the
end."""


class Courier:
    """Carries items to actors, and what they say to the outbox.

    Args:
        ray: the package, connected.
        outbox: where it goes.
        deaths: rung when a host has died.
        lost: told of the node of an actor that has died unasked.

    Attributes:
        mirror: where steps are posted; None where they go by message.
    """

    def __init__(
        self, ray: Any, outbox: Outbox, deaths: Waker, lost: Callable[[str], None]
    ) -> None:
        self._ray, self._lost = ray, lost
        self._outbox, self._deaths = outbox, deaths
        self.mirror: TrainerMirror | None = None
        self._links: dict[int, Link] = {}  # of the envs whose steps are posted
        self.tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._lock = threading.RLock()  # of the links; the trainer's loop does not take it
        self._thread = threading.Thread(
            target=self._run, name=thread_name("calls to Ray actors"), daemon=True
        )
        self._thread.start()

    def end(self, limit_s: float) -> None:
        """End the thread, when it has done what it was given before."""
        self.tasks.put((None, None))
        self._thread.join(limit_s)

    def _run(self) -> None:
        while True:
            touched: dict[Link, None] = {}
            task = self.tasks.get()
            while True:
                link, what = task
                if link is None:
                    return
                touched[link] = None
                with self._lock:
                    kills = self._take(link, what)
                if kills:  # without the lock: a thread of Ray's may wait for it, and Ray for that
                    self._kill(link)
                if self.tasks.empty():
                    break
                task = self.tasks.get()
            for link in touched:
                self._call(link)

    def _take(self, link: Link, what: Any) -> bool:
        """Do what can be done without Ray; return whether the actor is to be killed."""
        if type(what) is Item:
            if what.do == Do.START:
                link.hosts[what.host_id] = what.data.host_index
                if link.is_over:  # which was not known when it was given this host
                    self._report_deaths(link, [what.host_id], "its actor has ended")
            if not link.is_over:
                link.items.append(what)
                if what.do == Do.SEND and what.data.op in PLACING:
                    self._place(link, what.data)
        elif what is RING:
            link.is_rung = True
        elif what is LOSE or (what is KILL and link.handle is None and not link.is_gone):
            error = TimeoutError("it was killed, and has not said a word since")
            self._lose(link, error, is_silent=True)
        elif what is KILL:
            link.is_over = True
            link.items.clear()
            return link.handle is not None
        return False

    def _place(self, link: Link, frame: Frame) -> None:
        """Where the data of an env is, is said to its host: what is posted for it goes there."""
        if self.mirror is not None and self.mirror.place(frame):
            if (before := self._links.get(frame.env_id)) is not None:
                before.rows.discard(frame.env_id)
            self._links[frame.env_id] = link
            link.rows.add(frame.env_id)

    def _call(self, link: Link) -> None:
        """Make a call if there is anything to send, or none is in the actor that waits there."""
        with self._lock:
            if link.is_over:
                return
            if link.is_rung and self.mirror is not None:
                link.posted(self.mirror)
            if not link.items and link.n_calls:
                return
            link.n_calls += 1  # first: it may have returned before this has
        try:
            if not self._ray.is_initialized():
                raise ConnectionError("this process is not connected to Ray any more")
            future = link.call()
        except Exception as error:  # whatever Ray may raise
            with self._lock:
                self._lose(link, error)
        else:
            future.add_done_callback(partial(self._returned, link))

    def _returned(self, link: Link, future: Any) -> None:
        """On a thread of Ray's, where nothing of Ray may be called."""
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

    def _take_returned(self, link: Link, returned: int, replies: list[Reply]) -> None:
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

    def _host_ended(self, link: Link, host_id: int) -> None:
        link.hosts.pop(host_id, None)
        self._deaths.wake()
        if link.serves_one:
            self.tasks.put((link, KILL))

    def _lose(self, link: Link, error: BaseException, *, is_silent: bool = False) -> None:
        """An actor has died, or cannot be reached, which is the same: nobody waits for it."""
        link.is_gone = True
        if link.node_id is not None and (is_silent or not link.is_over):
            self._lost(link.node_id)
        link.is_over = True
        link.items.clear()
        self.tasks.put((link, KILL))  # it may live, and only be out of reach
        self._report_deaths(link, list(link.hosts), _words_of(error))

    def _report_deaths(self, link: Link, host_ids: Sequence[int], detail: str) -> None:
        for n, host_id in enumerate(host_ids):
            link.hosts.pop(host_id, None)
            self._outbox.sent.append((host_id, HostDied(None, detail, with_others=n > 0)))
        self._outbox.bell.wake()
        self._deaths.wake()

    def _kill(self, link: Link) -> None:
        with contextlib.suppress(Exception):  # it is gone already
            if self._ray.is_initialized():
                self._ray.kill(link.handle, no_restart=True)


def _opened(frame: Frame) -> Arrival:
    try:
        return frame.message()
    except FrameError as error:
        return Garbage(str(error))


def _words_of(error: BaseException) -> str:
    """Return what Ray says of the end of an actor, with where it came from."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, BaseException) else error).strip()
    return f"{type(error).__name__}: {text}"
