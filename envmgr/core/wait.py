"""Waiting: until envs are ready, or until enough timesteps have arrived."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from envmgr.core.collect import Collected
from envmgr.core.engine import Engine, Supervisor
from envmgr.core.table import Selection
from envmgr.errors import AllEnvsFailedError, NothingReadyError
from envmgr.lifecycle import EnvState
from envmgr.policy import GatherPolicy

_FEW = 8
"""So many envs are asked for one by one."""


def await_one_ready(engine: Engine, supervisor: Supervisor) -> bool:
    """Wait until an env is ready, or the run has failed.

    Returns:
        False if all are DONE.

    Raises:
        NothingReadyError, AllEnvsFailedError: none can become ready; the message says why.
    """
    repair, slots, record = supervisor.repair, supervisor.slots, supervisor.record

    def settled() -> bool:
        return repair.fatal is not None or any(record.is_ready(slot.env_id) for slot in slots)

    def hopeless() -> bool:
        return not any(record.is_coming(slot.env_id) for slot in slots if not slot.owed)

    engine.wait_until(lambda: settled() or hopeless(), doing="ready_obs")
    if settled():
        return True
    _refuse_to_wait(supervisor)
    return False


def unready(supervisor: Supervisor, env_ids: Sequence[int]) -> list[int]:
    """Return those of some envs that take no action now."""
    if len(env_ids) <= _FEW:
        return [env_id for env_id in env_ids if not supervisor.record.is_ready(env_id)]
    ready = set(supervisor.ready_ids())
    return [env_id for env_id in env_ids if env_id not in ready]


def await_all_ready(engine: Engine, supervisor: Supervisor, env_ids: Sequence[int]) -> None:
    """Wait until all of these envs are ready, or one of them cannot be, or the run has failed."""
    repair, record = supervisor.repair, supervisor.record

    def settled() -> bool:
        missing = unready(supervisor, env_ids)
        return repair.fatal is not None or not missing or not all(map(record.is_coming, missing))

    engine.wait_until(settled, doing="ready_arrays")


def refuse_unready(supervisor: Supervisor, env_ids: Sequence[int]) -> None:
    """Refuse envs that are not ready, and for which there is nothing to wait.

    Raises:
        NothingReadyError: one of them.
        AllEnvsFailedError: none of all envs can become ready.
    """
    missing = unready(supervisor, env_ids)
    if missing:
        _refuse_to_wait(supervisor)
        states = {i: supervisor.states[i].name for i in missing}
        raise NothingReadyError(f"envs {missing} do not become ready: they are in {states}")


def _refuse_to_wait(supervisor: Supervisor) -> None:
    """Say why nothing can become ready; return if all envs are done.

    Raises:
        NothingReadyError: for one of three reasons; AllEnvsFailedError for the last of them.
    """
    states = supervisor.record.env_states()
    owed = supervisor.record.owed_ids()
    if owed:
        raise NothingReadyError(
            f"no env is ready: envs {owed} have actions under way. Gather their timesteps with "
            "recv() or step({}) first."
        )
    late = [env_id for env_id, is_late in enumerate(supervisor.record.late) if is_late]
    if late:
        raise NothingReadyError(
            f"the next episodes of envs {late} begin with the next step of the other rows of their "
            "vector env, which are ready (autoreset mode NextStep): step those first. With "
            "reset_inplace: true they begin at once, if the vector env can reset some of its rows."
        )
    waiting = [  # some of them may still be under repair after a failure
        slot.env_id
        for slot, state in zip(supervisor.slots, states, strict=True)
        if state is EnvState.NEED_RESET or slot.is_under_way
    ]
    if waiting:
        raise NothingReadyError(
            f"no env is ready: the episodes of envs {waiting} have ended and auto_reset is off. "
            "Begin new ones with reset({env_id: params})."
        )
    failed = [i for i, state in enumerate(states) if state is not EnvState.DONE]
    if failed and EnvState.RUN not in states:
        raise AllEnvsFailedError(
            f"no env can become ready: envs {failed} have failed for good. Repair them with "
            "reset({env_id: None}), or close the manager."
        )


_NONE_READY = ". No env takes one now: ready_obs waits until one does, or says why none will"

_A_MOMENT_S = 0.001
_LOOK_EVERY_S = 0.002
"""A host of many cheap envs rings late, lest it ring for each; so long it may be overlooked."""


class Gather:
    """Gathers, inside calls that hold the engine. A failure that is urgent ends a gather.

    What it returns is to be handed out; None is nothing.

    Args:
        engine: waits.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._supervisor = supervisor = engine.supervisor
        self._collector = supervisor.collector
        self._record = supervisor.record
        self._repair = supervisor.repair

    def exactly(self, selection: Selection) -> Collected | None:
        """Wait for the timesteps of all of these envs, which were sent an action each."""
        repair, engine, collector = self._repair, self._engine, self._collector
        arrived = partial(collector.have_arrived, selection)
        while True:
            # What is held waits for a reset: what comes has to be applied, not only seen.
            if self._record.held or not engine.see_to(arrived):
                engine.wait_until(
                    lambda: repair.urgent or arrived() or collector.finds_malformed(),
                    pivot=self._pivot(selection),
                    doing="step",
                )
            if repair.urgent:
                return None
            taken = collector.take(selection) if collector.left is None else None
            if taken is not None:
                return taken
            self._set_aside()

    def _pivot(self, selection: Selection) -> partial[int | None] | None:
        """Return what says whose reply to wait for first.

        All of them are wanted, so waiting for one in the middle costs nothing, and the trainer is
        woken a few times instead of once for each env.
        """
        if self._supervisor.submitter.packer is not None:
            return None
        return partial(self._one_of_the_missing, selection)

    def _one_of_the_missing(self, selection: Selection) -> int | None:
        undelivered = self._record.undelivered
        missing = [i for i in selection.ids if i not in undelivered]
        return self._supervisor.slots[missing[len(missing) // 2]].host_id if missing else None

    def some(
        self, policy: GatherPolicy, *, deadline: float = math.inf, exactly: bool = False
    ) -> Collected | None:
        """Wait for as many outstanding timesteps as the policy wants; take all that have arrived.

        Goes on until one of them is not an episode's end, so that there is something to step next;
        then waits for stragglers.

        Args:
            policy: how many, and how long for stragglers.
            deadline: return what has arrived at this moment.
            exactly: be content with episodes' ends too.

        Raises:
            NothingReadyError: nothing is outstanding.
        """
        supervisor, submitter = self._supervisor, self._supervisor.submitter
        posts = submitter.packer is not None
        outstanding = supervisor.statistics.outstanding
        if not outstanding:
            raise NothingReadyError(
                "nothing is outstanding: send actions first, with step(actions) or send(actions)"
                + ("" if supervisor.ready_ids() else _NONE_READY)
            )
        is_limited = deadline != math.inf  # and may have passed before anybody looks
        if not posts or is_limited or supervisor.record.any_repaired:
            self._engine.collect()
        if is_limited and supervisor.record.some_at_a_time:  # which have to be waited for
            deadline = max(deadline, self._engine.now() + _A_MOMENT_S)
        if posts:
            latest = submitter.latest(outstanding)
            wants_all = policy.needed(outstanding) == outstanding and not is_limited
            if latest is not None and wants_all and not supervisor.record.some_at_a_time:
                return self.exactly(latest)
            submitter.have_all_ring()
        while True:
            arrived = self._some_ids(policy, outstanding, deadline, exactly=exactly)
            selection = self._supervisor.selections.of(arrived)
            if supervisor.repair.urgent or selection is None:
                if not is_limited:
                    self._refuse_to_wait(arrived)
                return None
            taken = self._collector.take(selection)
            if taken is not None:
                return taken
            self._set_aside()

    def _some_ids(
        self, policy: GatherPolicy, outstanding: int, deadline: float, *, exactly: bool
    ) -> list[int]:
        collector, repair, engine = self._collector, self._supervisor.repair, self._engine
        needed, may_go_on = policy.needed(outstanding), self._record.may_go_on
        arrived: list[int] = []

        def satisfied() -> bool:
            arrived[:] = collector.arrived_ids()
            if len(arrived) < needed:
                return repair.urgent or not may_go_on(arrived)
            return (
                repair.urgent
                or exactly
                or len(arrived) == outstanding
                or collector.any_goes_on(arrived)
                or not may_go_on(arrived)
            )

        def complete() -> bool:
            arrived[:] = collector.arrived_ids()
            return len(arrived) == outstanding

        submitter = self._supervisor.submitter
        packed = submitter.packer is not None and submitter.any_shared and needed < outstanding
        look_every_s = _LOOK_EVERY_S if packed else math.inf
        satisfying = (
            not self._record.held
            and engine.see_to(satisfied, look_every_s, sleeps=deadline == math.inf)
        ) or engine.wait_until(
            satisfied, deadline=deadline, look_every_s=look_every_s, doing="step"
        )
        if satisfying and policy.step_wait_timeout_s > 0.0:
            until = min(deadline, engine.now() + policy.step_wait_timeout_s)
            engine.wait_until(complete, deadline=until, look_every_s=look_every_s, doing="step")
        return arrived

    def _refuse_to_wait(self, arrived: list[int]) -> None:
        """Refuse to wait for what does not come before more actions are sent.

        Raises:
            NothingReadyError: that is so.
        """
        record, repair = self._record, self._supervisor.repair
        if arrived or not record.some_at_a_time or repair.urgent or record.may_go_on(()):
            return
        raise NothingReadyError(
            f"envs {record.owed_ids()} have actions under way, but their pool gives nothing "
            f"before {record.needed_under_way()} of its envs are (batch_size): send actions to "
            "more of them"
        )

    def _set_aside(self) -> None:
        self._engine.collect()  # what its host has sent before, for other envs, too
        self._engine.uninterrupted(self._supervisor.set_aside)
