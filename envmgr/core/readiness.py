"""Waiting until envs are ready, as long as there is something to wait for."""

from __future__ import annotations

from collections.abc import Sequence

from envmgr.core.engine import Engine
from envmgr.core.supervisor import Supervisor
from envmgr.errors import AllEnvsFailedError, NothingReadyError
from envmgr.lifecycle import EnvState

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
    states = supervisor.states.snapshot()
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
