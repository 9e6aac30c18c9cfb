"""Checks of what callers ask for, before anything is sent or changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from envmgr.core.arguments import actions_by_id, checked_env_id
from envmgr.core.engine import Supervisor
from envmgr.core.phases import Change, Phase
from envmgr.core.submit import Submitted
from envmgr.core.table import Selection
from envmgr.errors import ActionError, ConfigError, EnvNotReadyError
from envmgr.lifecycle import EnvState
from envmgr.spaces import ActionCheck, ValueMismatchError, split_batch
from envmgr.spaces.columns import NUMPY_VALUES, PLAIN, without_tensors
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.spaces.reading import error_text, short_text
from envmgr.wire.frames import FrameError
from envmgr.wire.messages import Message, Op

_ADVICE = {
    EnvState.VOID: "call launch() first",
    EnvState.INIT: "it is being repaired; it will be in ready_obs when it is ready",
    EnvState.RESET: "it is being reset; it will be in ready_obs when it is ready",
    EnvState.NEED_RESET: "its episode ended and auto_reset is off: call reset({ID: params})",
    EnvState.DONE: "its episode budget is spent: call reset({ID: None}) for a new one",
    EnvState.ERROR: "it failed; it is being repaired, or reset({ID: None}) repairs it",
}


def prepared_steps(
    supervisor: Supervisor, actions: Any, checks: Sequence[ActionCheck] | None
) -> list[Submitted]:
    """Check actions and encode them, without sending any.

    Args:
        supervisor: the envs.
        actions: `{env_id: action}`.
        checks: the check of each env's actions; None if they are not to be checked.

    Raises:
        ActionError: not a mapping, or an action that the space refuses or that cannot be sent.
        UnknownEnvError: an env_id that does not exist.
        EnvNotReadyError: an env that cannot take an action now.
    """
    actions = actions_by_id(actions)
    env_num, record = len(supervisor.slots), supervisor.record
    ready, slots = record.are_all_ready, supervisor.slots
    checked: dict[int, Any] = {}
    for key, action in actions.items():
        env_id = key if type(key) is int and 0 <= key < env_num else checked_env_id(key, env_num)
        if not ready and (not record.is_ready(env_id) or slots[env_id].phase is Phase.CALLING):
            raise _not_ready(supervisor, env_id)
        if type(action) not in PLAIN:
            action = _plain_action(env_id, action)
        try:
            reason = None if checks is None else checks[env_id](action)
        except Exception as error:  # what odd objects raise when they are looked at
            reason = f"{short_text(action)} cannot be checked: {error_text(error)}"
        if reason is not None:
            raise ActionError(
                f"the action of env {env_id} is refused: {reason}. Nothing was sent to any env."
            )
        checked[env_id] = action
    _refuse_without(record.missing_beside([*checked]))
    if len(checked) != len(actions):  # an integer of a class of its own is no equal key
        raise ActionError(f"the actions name an env twice: {short_text([*actions])}")
    prepare = supervisor.sending.prepare
    try:
        return [prepare(slots[env_id], action) for env_id, action in checked.items()]
    except FrameError as error:
        raise ActionError(
            f"an action cannot be sent to its env: {error}. Nothing was sent to any env."
        ) from error


def _refuse_without(missing: Sequence[int]) -> None:
    """Refuse actions of a batched env that lack those of some of its rows.

    Raises:
        EnvNotReadyError: there are such.
    """
    if missing:
        raise EnvNotReadyError(
            f"envs {list(missing)} were sent no action, but they are stepped together with envs "
            "that were: all rows of a batched env take one in the same call, unless its "
            "BatchedEnvSpec says partial_steps. Nothing was sent to any env."
        )


def envs_in_calls(supervisor: Supervisor, env_ids: Any) -> list[int]:
    """Return which of these envs run a call; what does not list any is left to be refused."""
    if Phase.CALLING not in supervisor.record.phases.column:
        return []
    if not isinstance(env_ids, (Mapping, list)):
        return []
    busy = [slot.env_id for slot in supervisor.slots if slot.phase is Phase.CALLING]
    return [env_id for env_id in busy if env_id in env_ids]


def _plain_action(env_id: int, action: Any) -> Any:
    try:
        return without_tensors(action)
    except Exception as error:  # what tensors raise that need gradients, or are on a device
        raise ActionError(
            f"the action of env {env_id} ({type(action).__name__}) cannot be made an array: "
            f"{error_text(error)}. Nothing was sent to any env."
        ) from error


def _not_ready(supervisor: Supervisor, env_id: int) -> EnvNotReadyError:
    state = supervisor.states[env_id]
    if supervisor.slots[env_id].phase is Phase.CALLING:
        advice = "a call of it has not ended: try again when it has, or reset it"
    elif supervisor.record.owes(env_id):
        advice = "an action of it is under way: gather its timestep with recv() or step({}) first"
    else:
        advice = _ADVICE.get(state, "it takes no action now").replace("ID", str(env_id))
    return EnvNotReadyError(
        f"env {env_id} cannot take an action: it is in {state.name}; {advice}. "
        f"Ready now: {supervisor.ready_ids()}. Nothing was sent to any env."
    )


def refuse_while_pending(supervisor: Supervisor, env_ids: Iterable[int], what: str) -> None:
    """Refuse calls to envs that are executing a step.

    Raises:
        EnvNotReadyError: one of them is.
    """
    pending = [i for i in env_ids if supervisor.record.owes(i)]
    if pending:
        raise EnvNotReadyError(
            f"{what} needs envs without an action under way, but envs {pending} have one: gather "
            "their timesteps with recv() or step({}) first"
        )


def refuse_gone(supervisor: Supervisor, env_ids: Iterable[int], what: str) -> None:
    """Refuse calls to envs that failed for good and have no host any more.

    Raises:
        EnvNotReadyError: one of them is.
    """
    gone = [i for i in env_ids if supervisor.slots[i].is_gone]
    if gone:
        states = {i: supervisor.states[i].name for i in gone}
        raise EnvNotReadyError(
            f"{what} cannot be done: envs {gone} have failed for good and are gone ({states}). "
            f"Repair them with reset({{{gone[0]}: None}}), or leave them out with env_ids."
        )


def submit_calls(
    supervisor: Supervisor, env_ids: Sequence[int], op: Op, payloads: Sequence[Any], what: str
) -> None:
    """Send a call to each of `env_ids`, or to none.

    Raises:
        ActionError: its arguments cannot be sent.
    """
    hosts, slots = supervisor.hosts, [supervisor.slots[i] for i in env_ids]
    try:
        prepared = [hosts.prepare(s, op, p) for s, p in zip(slots, payloads, strict=True)]
    except FrameError as error:
        raise ActionError(
            f"{what} has arguments that cannot be sent to a worker: {error}. Nothing was sent."
        ) from error
    for slot, frame in zip(slots, prepared, strict=True):
        slot.result = None
        hosts.submit(slot, Change.CALL, frame)


def rows_by_id(env_ids: Sequence[int], actions: Any, each: str = "") -> dict[int, Any]:
    """Pair the rows of a batch of actions with env_ids.

    Args:
        env_ids: k env_ids.
        actions: k rows: see `split_batch`.
        each: what the rows are for, if not just for these envs.

    Raises:
        ActionError: there is not one row for each, or an env is named twice.
    """
    try:
        rows = split_batch(actions, len(env_ids))
    except Exception as error:  # no rows; or what odd objects raise when they are read
        reason = error if isinstance(error, ValueMismatchError) else error_text(error)
        raise ActionError(
            f"one action for {each or f'each of envs {short_text([*env_ids])}'} is needed: "
            f"{reason}. Nothing was sent to any env."
        ) from error
    by_id = dict(zip(env_ids, rows, strict=True))
    if len(by_id) != len(env_ids):
        raise ActionError(f"env_ids {short_text([*env_ids])} name an env twice")
    return by_id


def refuse_partial_resets(
    supervisor: Supervisor, params: Mapping[int, Mapping[str, Any] | None]
) -> None:
    """Refuse the reset of some rows of a batched env that can only reset all of them together.

    Raises:
        EnvNotReadyError: others of its rows are in an episode.
        ConfigError: its rows are given different params.
    """
    for env_id in params:
        batch = supervisor.slots[env_id].batch
        if batch is None or supervisor.slots[env_id].resets_alone:
            continue
        in_run = (i for i in batch.env_ids if supervisor.states[i] is EnvState.RUN)
        missing = [i for i in in_run if i not in params]
        if missing:
            raise EnvNotReadyError(
                f"env {env_id} cannot be reset while envs {missing} are in an episode: they are "
                "rows of a vector env that resets all of them together. Name all of envs "
                f"{batch.first} to {batch.first + batch.size - 1}. No env was reset."
            )
        given = [params.get(i) or {} for i in batch.env_ids if i in params]
        if any(other != given[0] for other in given):
            raise ConfigError(
                f"envs {batch.first} to {batch.first + batch.size - 1} are rows of a vector env "
                "that resets all of them together, and so with the same params. No env was reset."
            )


def refuse_unsendable_params(
    supervisor: Supervisor, params: Mapping[int, Mapping[str, Any] | None]
) -> None:
    """Refuse reset params that cannot be sent to a worker, before any env is reset.

    Raises:
        ConfigError: those of one env cannot.
    """
    for env_id, given in params.items():
        if not given:
            continue
        try:
            supervisor.hosts.transport.prepare(0, Message(Op.RESET, env_id, 0, 0, given))
        except FrameError as error:
            raise ConfigError(
                f"the reset params of env {env_id} cannot be sent to its worker: {error}. No env "
                "was reset."
            ) from error


def post_actions(
    supervisor: Supervisor, actions: Any, ring: int, beside: Sequence[Submitted] = ()
) -> Selection | None:
    """Post one action for each of several envs, if nothing about them needs a second look.

    Args:
        supervisor: the envs.
        actions: `{env_id: action}`.
        ring: see `Posting.post`.
        beside: actions of other envs, which are sent with these, from `prepared_steps`.

    Returns:
        The envs, if they were posted. If not, nothing was changed: `prepared_steps` says why, or
        prepares them.
    """
    posting = supervisor.posting
    if posting is None or type(actions) is not dict:
        return None
    selection = _ready(supervisor, actions)
    if selection is None:
        return None
    packed: tuple[list[Any] | None, Any] | None
    try:
        if posting.kinds is None:
            packed = posting.actions.of_values(list(actions.values()))
        else:
            written = posting.kinds.write(selection.ids, list(actions.values()))
            packed = (None, NUMPY_VALUES) if written else None
    except Exception as error:  # of odd objects among the actions; `prepared_steps` says which
        pass_interrupt_on(error)
        return None
    if packed is None:
        return None
    posting.post(selection, packed[0], form=packed[1], ring=ring, beside=beside)
    return selection


def post_some(
    supervisor: Supervisor, actions: Any, ring: int, checks: Sequence[ActionCheck] | None
) -> Selection | None:
    """As `post_actions`, where steps of some of the envs cannot be posted: those are sent.

    Args:
        supervisor: the envs.
        actions: `{env_id: action}`.
        ring: see `Posting.post`.
        checks: see `prepared_steps`.

    Returns:
        All of the envs, if their actions were posted and sent; if not, nothing was changed.

    Raises:
        ActionError, EnvNotReadyError: as `prepared_steps`; nothing was posted or sent.
    """
    unposted = supervisor.record.unposted
    if not unposted or type(actions) is not dict:
        return None
    everybody = supervisor.handout.selections.of(actions)
    if everybody is None or not 0 < len(unposted.intersection(actions)) < len(actions):
        return None
    others = {i: action for i, action in actions.items() if i in unposted}
    rest = {i: action for i, action in actions.items() if i not in unposted}
    prepared = prepared_steps(supervisor, others, checks)
    return everybody if post_actions(supervisor, rest, ring, prepared) else None


def post_batch(supervisor: Supervisor, env_ids: Any, batch: Any, ring: int) -> Selection | None:
    """As `post_actions`, for a batch of actions with a row for each of `env_ids`."""
    posting = supervisor.posting
    if posting is None:
        return None
    selection = _ready(supervisor, env_ids)
    if selection is None:
        return None
    columns: Any = None
    try:
        if posting.kinds is None:
            columns = posting.actions.of_batch(batch, selection.count)
        is_written = posting.kinds is not None and posting.kinds.write_batch(selection.ids, batch)
    except Exception as error:  # as above
        pass_interrupt_on(error)
        return None
    if columns is None and not is_written:
        return None
    posting.post(selection, columns, form=NUMPY_VALUES, ring=ring)
    return selection


def _ready(supervisor: Supervisor, env_ids: Any) -> Selection | None:
    """Return envs as a selection, if all of them are ready, and have hosts for the next step."""
    selection = supervisor.handout.selections.of(env_ids)
    if selection is None or not selection.may_be_posted(supervisor.record):
        return None
    return selection
