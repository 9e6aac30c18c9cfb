"""Checks of what callers ask for, before anything is sent or changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from envmgr.core import EnvSlot, Lanes, Selection, Supervisor, Work
from envmgr.errors import (
    ActionError,
    ConfigError,
    EnvNotReadyError,
    MethodAccessError,
    UnknownEnvError,
)
from envmgr.lifecycle import EnvState
from envmgr.spaces import ActionCheck, ValueMismatchError, split_batch
from envmgr.wire.frames import FrameError
from envmgr.wire.messages import Message, Op

NOT_CALLABLE = frozenset(("reset", "step", "seed", "close"))
"""Methods of envs that only the manager itself may call: its states depend on them."""

_ADVICE = {
    EnvState.VOID: "call launch() first",
    EnvState.INIT: "it is being repaired; it will be in ready_obs when it is ready",
    EnvState.RESET: "it is being reset; it will be in ready_obs when it is ready",
    EnvState.NEED_RESET: "its episode ended and auto_reset is off: call reset({ID: params})",
    EnvState.DONE: "its episode budget is spent: call reset({ID: None}) for a new one",
    EnvState.ERROR: "it failed; it is being repaired, or reset({ID: None}) repairs it",
}


def checked_env_id(env_id: Any, env_num: int) -> int:
    """Return an env_id as int.

    Raises:
        UnknownEnvError: there is no such env.
    """
    if type(env_id) is int and 0 <= env_id < env_num:
        return env_id
    if isinstance(env_id, (int, np.integer)) and not isinstance(env_id, bool):
        number = int(env_id)
        if 0 <= number < env_num:
            return number
    raise UnknownEnvError(f"there is no env {env_id!r}; the env_ids are 0 to {env_num - 1}")


def checked_env_ids(env_ids: int | Iterable[int] | None, env_num: int) -> list[int]:
    """Return env_ids as a list; None means all of them.

    Raises:
        UnknownEnvError: one does not exist, or occurs twice.
    """
    if env_ids is None:
        return list(range(env_num))
    if isinstance(env_ids, np.ndarray) and env_ids.ndim == 1 and env_ids.dtype.kind == "i":
        env_ids = env_ids.tolist()
    given = [env_ids] if isinstance(env_ids, (int, np.integer)) else list(env_ids)
    ids = [checked_env_id(env_id, env_num) for env_id in given]
    if len(set(ids)) != len(ids):
        raise UnknownEnvError(f"env_ids {ids} name an env twice")
    return ids


def prepared_steps(
    supervisor: Supervisor, actions: Any, checks: Sequence[ActionCheck] | None
) -> list[tuple[EnvSlot, tuple[int, Any] | None]]:
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
    if not isinstance(actions, Mapping):
        raise ActionError(
            f"actions should be a dict {{env_id: action}}, found {type(actions).__name__}"
        )
    env_num, states, run = len(supervisor.slots), supervisor.states, EnvState.RUN
    checked: list[tuple[EnvSlot, Any]] = []
    for key, action in actions.items():
        env_id = checked_env_id(key, env_num)
        slot = supervisor.slot_of(env_id)
        if slot.owed or states[env_id] is not run or slot.work is Work.CALLING:
            raise _not_ready(supervisor, env_id)
        if type(action) not in _PLAIN:
            action = _plain_action(env_id, action)
        if checks is not None and (reason := checks[env_id](action)) is not None:
            raise ActionError(
                f"the action of env {env_id} is refused: {reason}. Nothing was sent to any env."
            )
        checked.append((slot, action))
    if len({slot.env_id for slot, _ in checked}) != len(checked):  # 1 and True, say
        raise ActionError(f"the actions name an env twice: {list(actions)}")
    try:
        return [(slot, supervisor.prepare_step(slot, action)) for slot, action in checked]
    except FrameError as error:
        raise ActionError(
            f"an action cannot be sent to its env: {error}. Nothing was sent to any env."
        ) from error


def post_actions(supervisor: Supervisor, actions: Any, ring: int) -> Selection | None:
    """Post one action for each of several envs, if nothing about them needs a second look.

    Args:
        supervisor: the envs.
        actions: `{env_id: action}`.
        ring: see `Lanes.post`.

    Returns:
        The envs, if they were posted. If not, nothing was changed: `prepared_steps` says why, or
        prepares them.
    """
    lanes = supervisor.lanes
    if lanes is None or type(actions) is not dict:
        return None
    selection = _idle(lanes, actions)
    packed = None if selection is None else lanes.actions.of_values(list(actions.values()))
    if selection is not None and packed is not None:
        lanes.post(selection, packed[0], python_numbers=packed[1], ring=ring)
        return selection
    return None


def post_batch(supervisor: Supervisor, env_ids: Any, batch: Any, ring: int) -> Selection | None:
    """As `post_actions`, for a batch of actions with a row for each of `env_ids`."""
    lanes = supervisor.lanes
    if lanes is None:
        return None
    selection = _idle(lanes, env_ids)
    columns = None if selection is None else lanes.actions.of_batch(batch, selection.count)
    if selection is not None and columns is not None:
        lanes.post(selection, columns, python_numbers=False, ring=ring)
        return selection
    return None


def _idle(lanes: Lanes, env_ids: Any) -> Selection | None:
    """Return envs as a selection, if all of them are in their lanes and ready."""
    lanes.enter()
    selection = lanes.select(env_ids)
    return selection if selection is not None and lanes.are_idle(selection) else None


_PLAIN = frozenset((int, float, str, np.ndarray, np.int64, np.float32, np.float64))


def _plain_action(env_id: int, action: Any) -> Any:
    try:
        return _plain(action)
    except Exception as error:  # what tensors raise that need gradients, or are on a device
        raise ActionError(
            f"the action of env {env_id} ({type(action).__name__}) cannot be made an array: "
            f"{type(error).__name__}: {error}. Nothing was sent to any env."
        ) from error


def _plain(action: Any) -> Any:
    """Return tensors of other libraries as arrays: workers need not have those libraries."""
    if type(action) in _PLAIN:
        return action
    if isinstance(action, Mapping):
        return {key: _plain(part) for key, part in action.items()}
    if type(action) in (tuple, list):
        return type(action)(map(_plain, action))
    if isinstance(action, np.generic) or not hasattr(action, "__array__"):
        return action
    return np.asarray(action)


def _not_ready(supervisor: Supervisor, env_id: int) -> EnvNotReadyError:
    state = supervisor.states[env_id]
    if supervisor.slots[env_id].work is Work.CALLING:
        advice = "a call of it has not ended: try again when it has, or reset it"
    elif supervisor.slots[env_id].owed:
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
    pending = [i for i in env_ids if supervisor.owes(i)]
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
    gone = [i for i in env_ids if supervisor.is_gone(i)]
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
    try:
        supervisor.submit_calls(env_ids, op, payloads)
    except FrameError as error:
        raise ActionError(
            f"{what} has arguments that cannot be sent to a worker: {error}. Nothing was sent."
        ) from error


def rows_by_id(env_ids: Sequence[int], actions: Any) -> dict[int, Any]:
    """Pair the rows of a batch of actions with env_ids.

    Raises:
        ActionError: there is not one row for each, or an env is named twice.
    """
    try:
        rows = split_batch(actions, len(env_ids))
    except (ValueMismatchError, TypeError) as error:
        raise ActionError(f"one action for each of envs {[*env_ids]} is needed: {error}") from error
    by_id = dict(zip(env_ids, rows, strict=True))
    if len(by_id) != len(env_ids):
        raise ActionError(f"env_ids {[*env_ids]} name an env twice")
    return by_id


def check_method_name(name: Any) -> None:
    """Refuse methods that `call` must not run.

    Raises:
        MethodAccessError: it is one of `reset`, `step`, `seed`, `close`, or private.
    """
    if not isinstance(name, str) or name in NOT_CALLABLE or name.startswith("_"):
        raise MethodAccessError(
            f"call({name!r}) is refused: reset, step, seed and close would go past the states of "
            "the manager (use its own methods), and private methods are the env's own business"
        )


def checked_params(reset_param: Any, env_num: int) -> dict[int, dict[str, Any] | None]:
    """Return reset params by env_id; None means all envs with None.

    Raises:
        UnknownEnvError: an env_id that does not exist.
        ConfigError: not a mapping of env_id to a dict or None.
    """
    if reset_param is None:
        return dict.fromkeys(range(env_num))
    if not isinstance(reset_param, Mapping):
        raise ConfigError(
            "reset takes {env_id: params or None}, or nothing for all envs; found "
            f"{type(reset_param).__name__}"
        )
    checked: dict[int, dict[str, Any] | None] = {}
    for key, params in reset_param.items():
        env_id = checked_env_id(key, env_num)
        if params is not None and not (
            isinstance(params, Mapping) and all(isinstance(name, str) for name in params)
        ):
            raise ConfigError(
                f"the reset params of env {env_id} should be a dict of keyword arguments or None, "
                f"found {params!r}"
            )
        checked[env_id] = None if params is None else dict(params)
    return checked


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
