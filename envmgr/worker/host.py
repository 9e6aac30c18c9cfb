"""The child side: runs requests against the envs of one host, in order.

Where it runs (process, thread, in line) is not its business: it is given messages and sends encoded
replies.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from envmgr.env.batch_specs import Batch
from envmgr.types import EnvFactory
from envmgr.wire.hosts import HostSettings
from envmgr.wire.messages import Message, Op
from envmgr.worker.async_batches import RunningAsyncBatch
from envmgr.worker.batches import RunningBatch
from envmgr.worker.hosted_env import HostedEnv
from envmgr.worker.in_service import InService
from envmgr.worker.measured import MeasuredSteps
from envmgr.worker.posted import PostedSteps
from envmgr.worker.resumable import ResumableEnv
from envmgr.worker.running import RunningEnv, Surroundings
from envmgr.worker.sinks import MessageSink, Send


def _kind_of(batch: Batch) -> type[RunningBatch]:
    return RunningBatch if batch.batch_size is None else RunningAsyncBatch


class Host:
    """Runs the envs that share a host, one request at a time.

    Resets that it begins by itself, and those that are ordered through the block, are postponed:
    who drives it runs what has come for the other envs, and then `run_resets`.

    Args:
        factories: by env_id; each builds one env, when HELLO or RENEW says so.
        settings: see `HostSettings`.
        encode: turns a reply into what is sent; raises FrameError for what cannot be sent.
        send: sends it.
        memory: opens the shared memory when observations are placed in it.
        rss_bytes: resident memory of this process.
        posted: takes the steps that are posted in the block; None where there is none.
        in_service: the env objects that are in use in this process, where it has other hosts.

    Attributes:
        resets: what runs the resets that wait, the oldest first.
        is_async: it has batched envs that work on while nobody waits for them.
    """

    def __init__(
        self,
        factories: Mapping[int, EnvFactory],
        settings: HostSettings,
        *,
        encode: Callable[[Message], Any],
        send: Send,
        memory: Callable[[int], Any],
        rss_bytes: Callable[[], int] = lambda: 0,
        posted: PostedSteps | None = None,
        in_service: InService | None = None,
    ) -> None:
        in_service = in_service or InService()
        self._settings = settings
        carrying = partial(self._carrying, encode) if settings.carries else encode
        self._messages = MessageSink(carrying, send, settings)
        self._rss_bytes = rss_bytes
        self._posted = posted
        self._is_worn = False
        self.resets: deque[Callable[[], None]] = deque()
        meter = posted if isinstance(posted, MeasuredSteps) else None
        is_limited = settings.max_episodes is not None or settings.max_rss_bytes is not None
        is_worn = self._has_reached_a_limit if is_limited else None
        given = Surroundings(settings, self._messages, is_worn, self.resets.append, meter)
        run = RunningEnv if settings.save_every is None else ResumableEnv
        self._envs = {
            env_id: HostedEnv(env_id, factory, given, memory, posted, run, in_service)
            for env_id, factory in factories.items()
        }
        self._batches = [
            _kind_of(batch)(batch, factories[batch.first], given)
            for batch in settings.batches
            if batch.first in factories
        ]
        self.is_async = any(rows.is_async for rows in self._batches)
        for rows in self._batches:
            for i in rows.env_ids:
                open_row = partial(rows.open_row, i)
                self._envs[i] = HostedEnv(
                    i, open_row, given, memory, posted, rows.run_row, in_service
                )

    def _carrying(self, encode: Callable[[Message], Any], message: Message) -> Any:
        """Encode a message with the observation that it refers to."""
        env, payload = self._envs.get(message.env_id), message.payload
        if env is not None and payload is not None and message.op in (Op.STEPPED, Op.RESET_DONE):
            message = message._replace(payload=(env.carried(payload[0]), *payload[1:]))
        return encode(message)

    @property
    def has_steps(self) -> bool:
        """Whether a step of a batched env is among what waits."""
        return any(rows.steps or rows.receives for rows in self._batches)

    @property
    def receives(self) -> bool:
        """Whether all that waits is to wait for results of batched envs that work on meanwhile."""
        n_waits = sum(rows.receives for rows in self._batches)
        return 0 < n_waits == len(self.resets)

    def handle(self, message: Message) -> None:
        """Run one request and send its replies."""
        env = self._envs.get(message.env_id)
        if env is not None:
            if message.op in self._settings.announced:
                self._messages.announce(message, message.op)
            env.handle(message)
        elif message.op == Op.ADOPT:
            (env,) = self._envs.values()
            self._envs = {message.env_id: env}
            env.adopt(message)
        else:
            text = f"env {message.env_id} is not one of {list(self._envs)}, which this host runs"
            self._messages.refuse(message, "request", text)

    def run_resets(self, count: int) -> None:
        """Run so many of the resets that wait."""
        for _ in range(min(count, len(self.resets))):
            self.resets.popleft()()
        if self._posted is not None:
            self._posted.rest()
            self._posted.wake_parent()

    def close(self) -> None:
        """Close all envs; errors of their own `close` are not ours to raise."""
        self.resets.clear()
        for env in self._envs.values():
            env.close()

    def _has_reached_a_limit(self) -> bool:
        """Whether this worker wants to be replaced; once it does, it goes on to."""
        limit, rss_limit = self._settings.max_episodes, self._settings.max_rss_bytes
        self._is_worn = (
            self._is_worn
            or (limit is not None and sum(e.episodes for e in self._envs.values()) >= limit)
            or (rss_limit is not None and self._rss_bytes() > rss_limit)
        )
        return self._is_worn
