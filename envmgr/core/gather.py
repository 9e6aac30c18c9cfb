"""Gathering timesteps: when a step may return, and what to wait for meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from envmgr.core import EnvSlot, Lanes, Selection, Supervisor, Taken
from envmgr.core.engine import Engine
from envmgr.errors import NothingReadyError
from envmgr.policy import GatherPolicy

_LOOK_EVERY_S = 0.002
"""A host of many cheap envs rings late, lest it ring for each; so long it may be overlooked."""

Gathered = Taken | Sequence[int]
"""What was gathered: replies that were taken, or envs whose timesteps can be delivered."""


class Gather:
    """One gather, inside a call that holds the engine. A failure that is urgent ends it.

    Args:
        engine: waits.
        supervisor: the envs.
    """

    def __init__(self, engine: Engine, supervisor: Supervisor) -> None:
        self._engine = engine
        self._supervisor = supervisor

    # -- all of some ------------------------------------------------------------------------

    def exactly(self, sent: Selection | Sequence[int]) -> Gathered:
        """Wait for the timesteps of all envs that were sent an action just now.

        Args:
            sent: their env_ids; or what they were posted as, if they were.

        Returns:
            Their timesteps, or their env_ids.
        """
        lanes = self._supervisor.lanes
        env_ids = sent.ids if isinstance(sent, Selection) else sent
        if lanes is not None:
            if isinstance(sent, Selection):
                taken = self._exactly_in_lanes(lanes, sent)
                if taken is not None:
                    return taken
            self._engine.undisturbed(self._supervisor.leave_lanes)
        missing = [self._supervisor.slots[i] for i in env_ids]
        repair = self._supervisor.repair

        def finished() -> bool:
            missing[:] = [s for s in missing if s.timestep is None or s.held]
            return not missing or repair.urgent

        # All of them are wanted, so waiting for one in the middle costs nothing, and the trainer
        # is woken a few times instead of once for each env.
        self._engine.wait_until(
            finished,
            pivot=None if lanes is not None else lambda: missing[len(missing) // 2].host_id,
            doing="step",
        )
        return env_ids

    def _exactly_in_lanes(self, lanes: Lanes, selection: Selection) -> Taken | None:
        repair, engine = self._supervisor.repair, self._engine
        arrived = partial(lanes.have_arrived, selection)
        spun = engine.spins and engine.spin_until(arrived)
        if not spun:
            if engine.await_rings(arrived):
                return self._take(lanes, selection)
            engine.wait_until(
                lambda: arrived() or repair.urgent or not lanes.are_stepping(selection),
                doing="step",
            )
        if repair.urgent or not lanes.are_stepping(selection):
            return None
        return self._take(lanes, selection)

    # -- some of all ------------------------------------------------------------------------

    def some(
        self, policy: GatherPolicy, *, deadline: float = math.inf, exactly: bool = False
    ) -> Gathered:
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
        supervisor = self._supervisor
        lanes = supervisor.lanes
        if lanes is not None:
            if supervisor.hosts.background:
                self._engine.collect()
            if supervisor.all_owed_in_lanes:
                gathered = self._some_in_lanes(lanes, policy, deadline, exactly=exactly)
                if gathered is not None:
                    return gathered
            self._engine.undisturbed(supervisor.leave_lanes)
        return self._some_of_slots(policy, deadline, exactly=exactly)

    def _some_in_lanes(
        self, lanes: Lanes, policy: GatherPolicy, deadline: float, *, exactly: bool
    ) -> Gathered | None:
        supervisor, engine = self._supervisor, self._engine
        outstanding, repair = lanes.outstanding, supervisor.repair
        needed = policy.needed(outstanding)
        if needed == outstanding and deadline == math.inf:
            together = lanes.all_outstanding()
            if together is not None:
                return self._exactly_in_lanes(lanes, together)
        lanes.have_all_ring()
        arrived: list[int] = []

        def satisfied() -> bool:
            arrived[:] = lanes.arrived_ids()
            if repair.urgent or lanes.outstanding != outstanding:
                return True  # one of them has left its lane
            if len(arrived) < needed:
                return False
            return exactly or len(arrived) == outstanding or lanes.any_goes_on(arrived)

        def complete() -> bool:
            arrived[:] = lanes.arrived_ids()
            return len(arrived) == outstanding or lanes.outstanding != outstanding

        look_every_s = _LOOK_EVERY_S if lanes.any_shared and needed < outstanding else math.inf
        satisfying = (
            (engine.spins and engine.spin_until(satisfied))
            or (deadline == math.inf and engine.await_rings(satisfied, look_every_s))
            or engine.wait_until(
                satisfied, deadline=deadline, look_every_s=look_every_s, doing="step"
            )
        )
        if satisfying and policy.step_wait_timeout_s > 0.0:
            until = min(deadline, engine.now() + policy.step_wait_timeout_s)
            engine.wait_until(complete, deadline=until, look_every_s=look_every_s, doing="step")
        if repair.urgent or lanes.outstanding != outstanding:
            return None
        selection = lanes.select(arrived)
        return [] if selection is None else self._take(lanes, selection)

    def _take(self, lanes: Lanes, selection: Selection) -> Taken | None:
        taken = lanes.take(selection)
        if taken is None:
            self._engine.undisturbed(lanes.set_aside)
        return taken

    def _some_of_slots(
        self, policy: GatherPolicy, deadline: float, *, exactly: bool
    ) -> Sequence[int]:
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
