"""Which env objects are in use: one that served two env_ids would mix up their episodes.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

from typing import Any, Protocol

from envmgr.env.contract import EnvContractError, env_name
from envmgr.spaces.interrupts import pass_interrupt_on


class Owner(Protocol):
    """What is served by an env."""

    env_id: int


class InService:
    """The env objects of all hosts of a manager that are in one process, and whom they serve.

    Hosts may be threads: what is done here is done in one operation of a dict.
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[Any, Owner]] = {}  # with the objects, whose ids stay theirs

    def take(self, env: Any, owner: Owner) -> None:
        """Take note that an env serves somebody, until `leave`.

        Args:
            env: what a factory returned. If it is a wrapper, the env inside counts.
            owner: whom it serves.

        Raises:
            EnvContractError: it serves another one.
        """
        inside = _inside(env)
        _, other = self._owners.setdefault(id(inside), (inside, owner))
        if other is owner:
            return
        what = "the env" if inside is env else f"a wrapper of the env {env_name(inside)}"
        before = f"serves env {other.env_id}"
        if other.env_id == owner.env_id:
            before = "is that of an earlier generation, which has not ended"
        raise EnvContractError(
            f"the factory of env {owner.env_id} returned {what} that {before}: one object cannot "
            "be two envs, whose episodes would be mixed up. A factory has to build a new env each "
            "time it is called, as in env_fn=[lambda: MyEnv()] * n, or [MyEnv] * n"
        )

    def leave(self, owner: Owner) -> None:
        """Forget the env that serves somebody."""
        taken = [key for key, (_, other) in list(self._owners.items()) if other is owner]
        for key in taken:
            self._owners.pop(key, None)


def _inside(env: Any) -> Any:
    """Return an env without its wrappers; itself if it cannot tell."""
    try:
        inside = env.unwrapped
    except Exception as error:  # plain classes have none; what a property raises is not asked here
        pass_interrupt_on(error)
        return env
    return inside if callable(getattr(inside, "step", None)) else env
