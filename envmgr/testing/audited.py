"""A loop over a manager that reports every action and timestep to a ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from envmgr.manager import EnvManager
from envmgr.manager.loop import ManagerLoop
from envmgr.testing.ledger import Ledger, LedgerReport
from envmgr.types import EnvTimestep


class AuditedLoop(ManagerLoop):
    """A `ManagerLoop` that enters everything in a ledger, for `Collector` or for use by itself.

    Args:
        manager: a launched manager, whose envs sign their timesteps.

    Attributes:
        ledger: the ledger with the accounts.
    """

    def __init__(self, manager: EnvManager) -> None:
        super().__init__(manager)
        self.ledger = Ledger(manager.env_num, manager.observation_space, manager.action_space)
        self._sending: Mapping[int, Any] = {}

    def ready(self) -> dict[int, Any]:
        """See `ManagerLoop.ready`."""
        observations = super().ready()
        begin = any(map(self.ledger.begins_episode, observations))
        self.ledger.observed(observations, self.manager.ready_info if begin else None)
        return observations

    def send(self, actions: Mapping[int, Any]) -> None:
        """Send actions without waiting for timesteps."""
        self.manager.send(dict(actions))
        self.ledger.accepted(actions)

    def step(self, actions: Mapping[int, Any]) -> dict[int, EnvTimestep]:
        """See `ManagerLoop.step`."""
        self._sending = actions
        timesteps = super().step(actions)
        self.ledger.accepted(actions)
        self._sending = {}
        self.ledger.delivered(timesteps)
        return timesteps

    def gather(
        self, min_ready: int | None = None, timeout_s: float | None = None
    ) -> dict[int, EnvTimestep]:
        """See `ManagerLoop.gather`."""
        timesteps = super().gather(min_ready, timeout_s)
        self.ledger.delivered(timesteps)
        return timesteps

    def reset(self, env_ids: Iterable[int]) -> None:
        """See `ManagerLoop.reset`."""
        env_ids = list(env_ids)
        self.ledger.reset(env_ids)
        super().reset(env_ids)

    def settle(self) -> LedgerReport:
        """Return the accounts once the manager is closed: timesteps under way will not come."""
        stats = self.manager.stats()
        if stats["actions"] == self.ledger.n_accepted + len(self._sending):
            self.ledger.accepted(self._sending)  # by a step that was interrupted
            self._sending = {}
        self.ledger.end(stats["cancelled"])
        return self.ledger.report()
