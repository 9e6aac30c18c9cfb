"""The child side: runs requests against the envs of one host, in order.

Where it runs (process, thread, in line) is not its business: it is given messages and hands back
encoded replies, one at a time.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from envmgr.types import EnvFactory
from envmgr.wire.hosts import HostSettings
from envmgr.wire.messages import FailureKind, Message, Op, RemoteFailure
from envmgr.worker.hosted_env import HostedEnv
from envmgr.worker.posted import PostedSteps


class Host:
    """Runs the envs that share a host, one request at a time.

    With several envs, automatic resets are postponed: what has already arrived for the others runs
    first. Whoever reads the messages calls `next_postponed` when nothing more has arrived. An env
    that has its host to itself is reset at once.

    Args:
        factories: by env_id; each builds one env, when HELLO or RENEW says so.
        settings: see `HostSettings`.
        encode: turns a reply into what is sent; raises FrameError for what cannot be sent.
        memory: opens the shared memory when observations are placed in it.
        rss_bytes: resident memory of this process.

    Attributes:
        postponed: automatic resets that wait, the oldest first.
    """

    def __init__(
        self,
        factories: Mapping[int, EnvFactory],
        settings: HostSettings,
        *,
        encode: Callable[[Message], Any],
        memory: Callable[[int], Any],
        rss_bytes: Callable[[], int] = lambda: 0,
        posted: PostedSteps | None = None,
    ) -> None:
        self._settings = settings
        self._announced = settings.announced
        self._encode = encode
        self._rss_bytes = rss_bytes
        self._is_worn = False
        self.postponed: deque[tuple[HostedEnv, Message]] = deque()
        self._envs = {
            env_id: HostedEnv(
                env_id,
                factory,
                settings,
                encode=encode,
                memory=memory,
                is_worn=self._has_reached_a_limit,
                postpone=self._postpone if len(factories) > 1 else None,
                posted=posted,
            )
            for env_id, factory in factories.items()
        }

    def handle(self, message: Message) -> Iterator[Any]:
        """Run one request and yield its encoded replies as they come."""
        env = self._envs.get(message.env_id)
        if env is None:
            return self._adopt(message) if message.op == Op.ADOPT else self._unknown(message)
        if message.op in self._announced:
            return self._announce(message, env.handle(message))
        return env.handle(message)

    def next_postponed(self) -> Iterator[Any]:
        """Run the automatic reset that has waited longest, as `handle` runs a request."""
        env, message = self.postponed.popleft()
        if Op.RESET in self._announced:
            return self._announce(message, env.begin_episode(message))
        return env.begin_episode(message)

    def close(self) -> None:
        """Close all envs; errors of their own `close` are not ours to raise."""
        self.postponed.clear()
        for env in self._envs.values():
            env.close()

    def _announce(self, message: Message, replies: Iterator[Any]) -> Iterator[Any]:
        yield self._encode(message._replace(op=Op.BEGAN, payload=None))
        yield from replies

    def _adopt(self, message: Message) -> Iterator[Any]:
        """Have the one env of this host serve another env_id."""
        (env,) = self._envs.values()
        self._envs = {message.env_id: env}
        return env.adopt(message)

    def _unknown(self, message: Message) -> Iterator[Any]:
        text = f"env {message.env_id} is not one of {list(self._envs)}, which this host runs"
        failure = RemoteFailure(FailureKind.PROTOCOL, "request", message=text)
        yield self._encode(message._replace(op=Op.FAILED, payload=failure))

    def _postpone(self, env: HostedEnv, message: Message) -> None:
        self.postponed.append((env, message))

    def _has_reached_a_limit(self) -> bool:
        """Whether this worker wants to be replaced; once it does, it goes on to."""
        limit, rss_limit = self._settings.max_episodes, self._settings.max_rss_bytes
        self._is_worn = (
            self._is_worn
            or (limit is not None and sum(e.episodes for e in self._envs.values()) >= limit)
            or (rss_limit is not None and self._rss_bytes() > rss_limit)
        )
        return self._is_worn
