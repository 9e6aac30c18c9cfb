"""Gathering timesteps: when a step may return, and which host to wait for meanwhile."""

from __future__ import annotations

import math

from envmgr.engine import Engine
from envmgr.errors import NothingReadyError
from envmgr.policy import GatherPolicy
from envmgr.supervisor import EnvSlot, Supervisor


class Gather:
    """One gather, inside a call that holds the engine. A failure that is urgent ends it.

    Args:
        engine: waits.
        supervisor: the envs.
    """

    def __init__(self, engine: Engine, supervisor: Supervisor) -> None:
        self._engine = engine
        self._supervisor = supervisor

    def exactly(self, env_ids: list[int]) -> list[int]:
        """Wait for the timesteps of all of `env_ids`, and return these."""
        missing = [self._supervisor.slots[i] for i in env_ids]
        repair = self._supervisor.repair

        def finished() -> bool:
            missing[:] = [s for s in missing if s.timestep is None or s.held]
            return not missing or repair.urgent

        # All of them are wanted, so waiting for one in the middle costs nothing, and the trainer
        # is woken a few times instead of once for each env.
        self._engine.wait_until(
            finished,
            pivot=lambda: missing[len(missing) // 2].host_id,
            doing="step",
        )
        return env_ids

    def some(
        self, policy: GatherPolicy, *, deadline: float = math.inf, exactly: bool = False
    ) -> list[int]:
        """Wait for as many outstanding timesteps as the policy wants; return the envs that owe one.

        Goes on until one of them is not an episode's end, so that there is something to step next;
        then waits for stragglers.

        Args:
            policy: how many, and how long for stragglers.
            deadline: return what has arrived at this moment.
            exactly: be content with episodes' ends too.

        Raises:
            NothingReadyError: nothing is outstanding.
        """
        repair = self._supervisor.repair
        owed = [slot for slot in self._supervisor.slots if slot.owed]
        if not owed:
            raise NothingReadyError(
                "nothing is outstanding: send actions first, with step(actions) or send(actions)"
            )
        needed = policy.needed(len(owed))

        def satisfied() -> bool:
            arrived = [s for s in owed if s.timestep is not None and not s.held]
            if len(arrived) < needed:
                return repair.urgent
            return (
                repair.urgent or exactly or len(arrived) == len(owed) or any(map(_goes_on, arrived))
            )

        self._engine.collect()
        satisfying = self._engine.wait_until(satisfied, deadline=deadline, doing="step")
        if satisfying and policy.step_wait_timeout_s > 0.0:
            self._engine.wait_until(
                lambda: all(slot.deliverable for slot in owed),
                deadline=min(deadline, self._engine.now() + policy.step_wait_timeout_s),
                doing="step",
            )
        return [slot.env_id for slot in owed]


def _goes_on(slot: EnvSlot) -> bool:
    return slot.timestep is not None and not slot.timestep.done
