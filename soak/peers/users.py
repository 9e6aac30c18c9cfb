"""Envs that have a user each, a thread or a coroutine, which steps it without asking the others."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from peers import LIMIT_S, Outcome

WAIT_S = LIMIT_S / 2
"""So long a round waits for users; less than a hang lasts, so that users who wait with it show."""


class User(Protocol):
    """Has one env; what fails raises from the futures."""

    env_id: int
    """Which env that is, from the end of `begin` on."""

    def begin(self) -> Future[Any]:
        """Take an env and reset it; gives the first observation."""

    def step(self, action: int) -> Future[Outcome]:
        """Take a step; first begin, if what was begun has failed."""

    def leave(self) -> Future[None]:
        """Let go of the env."""


class ThreadUser:
    """A user with a thread of its own, in which all that it does is done."""

    env_id = -1

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)

    def begin(self) -> Future[Any]:
        """Take an env and reset it; gives the first observation."""
        return self._thread.submit(self._begin)

    def step(self, action: int) -> Future[Outcome]:
        """Take a step; first begin, if what was begun has failed."""
        return self._thread.submit(self._step, action)

    def leave(self) -> Future[None]:
        """Let go of the env; the thread ends then."""
        left = self._thread.submit(self._leave)
        self._thread.shutdown(wait=False)
        return left

    def _begin(self) -> Any:
        raise NotImplementedError

    def _step(self, action: int) -> Outcome:
        raise NotImplementedError

    def _leave(self) -> None:
        """Nothing to let go of."""


class Users:
    """Tells users what to do, round by round; who is late is not waited for.

    Args:
        users: one for each env.
    """

    def __init__(self, users: Sequence[User]) -> None:
        self._users = users
        self._under_way: dict[User, tuple[int, int, Future[Outcome]]] = {}

    def start(self) -> dict[int, Any]:
        """Launch; each user takes an env and resets it."""
        self._launch()
        first = [user.begin() for user in self._users]
        obs = [future.result() for future in first]
        return {user.env_id: one for user, one in zip(self._users, obs, strict=True)}

    def ready(self) -> list[int]:
        """Return the envs whose users take an action; while all have one, wait for an answer."""
        if len(self._under_way) == len(self._users):
            self._wait(None, concurrent.futures.FIRST_COMPLETED)
        return sorted(user.env_id for user in self._users if user not in self._under_way)

    def step(self, actions: Mapping[int, int]) -> dict[int, Outcome]:
        """Have users step; gives what has come within WAIT_S, of earlier steps, too."""
        for user in self._users:
            if user not in self._under_way and user.env_id in actions:
                action = actions[user.env_id]
                self._under_way[user] = user.env_id, action, user.step(action)
        self._wait(WAIT_S, concurrent.futures.ALL_COMPLETED)
        outcomes = {}
        for user, (env_id, action, future) in list(self._under_way.items()):
            if future.done():
                del self._under_way[user]
                error = future.exception()
                outcomes[env_id] = (
                    future.result()._replace(action=action)
                    if error is None
                    else Outcome(None, 0.0, done=True, error=error)
                )
        return outcomes

    def reset(self) -> dict[int, Any]:
        """Nobody resets all envs: each user has its own."""
        raise NotImplementedError

    def close(self) -> None:
        """Have the users let go of their envs, and close; waits no longer than LIMIT_S for them."""
        left = [user.leave() for user in self._users]
        self._shut()
        concurrent.futures.wait(left, LIMIT_S)

    def _launch(self) -> None:
        """Build the envs."""
        raise NotImplementedError

    def _shut(self) -> None:
        """Close."""
        raise NotImplementedError

    def _wait(self, seconds: float | None, until: str) -> None:
        futures = [future for _, _, future in self._under_way.values()]
        concurrent.futures.wait(futures, seconds, until)
