"""Checks of what callers ask for, before anything is sent or changed.

Actions of ordinary steps are checked in `envmgr.spaces.columns`, and come here if they do not fit.

Invalid arguments, including objects that raise when they are inspected, are refused with an error
of `envmgr.errors` that says what was found, what is expected and what to do. Valid ones are
returned as values of one plain type.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from envmgr.config.checks import MAX_SECONDS, MAX_TEXT, boolean, check_value, or_null, text
from envmgr.core.phases import Phase
from envmgr.core.table import EnvTable
from envmgr.env.contract import EnvContractError
from envmgr.env.gym_spaces import convert_space
from envmgr.errors import (
    ActionError,
    ConfigError,
    EnvAttributeError,
    EnvLeasedError,
    EnvNotReadyError,
    MethodAccessError,
    UnknownEnvError,
)
from envmgr.lifecycle import EnvState
from envmgr.spaces import ActionCheck, ValueMismatchError, split_batch
from envmgr.spaces.columns import PLAIN, without_tensors
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.spaces.reading import Unreadable, error_text, read_dict, read_list, short_text
from envmgr.transport.base import Transport
from envmgr.types import EnvIds, Once
from envmgr.wire.frames import FrameError
from envmgr.wire.messages import EnvDescription, Message, Op

_NUMBERS = (int, float, np.integer, np.floating)

NOT_CALLABLE = frozenset(("reset", "step", "seed", "close"))
"""Methods of envs that only the manager itself may call: its states depend on them."""


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
    raise UnknownEnvError(
        f"there is no env {short_text(env_id)}; the env_ids are 0 to {env_num - 1}"
    )


def checked_env_ids(env_ids: int | EnvIds | None, env_num: int) -> list[int]:
    """Return env_ids as a list; None means all of them.

    Raises:
        UnknownEnvError: one does not exist, or occurs twice.
    """
    if env_ids is None:
        return list(range(env_num))
    if isinstance(env_ids, (int, np.integer)):
        return [checked_env_id(env_ids, env_num)]
    ids = listed_env_ids(env_ids, env_num)
    if len(set(ids)) != len(ids):
        raise UnknownEnvError(f"env_ids {short_text(ids)} name an env twice")
    return ids


def listed_env_ids(env_ids: Any, env_num: int) -> list[int]:
    """Return several env_ids as a list; an env may be in it twice.

    Raises:
        UnknownEnvError: `env_ids` is not a list of env_ids, or one of them does not exist.
    """
    if type(env_ids) is np.ndarray and env_ids.ndim == 1 and env_ids.dtype.kind in "iu":
        env_ids = env_ids.tolist()
        if env_ids and _are_below(env_num, env_ids):
            listed: list[int] = env_ids  # the ordinary case
            return listed
    try:
        given = read_list(env_ids)
    except Unreadable as error:
        raise UnknownEnvError(
            f"env_ids should be a list of the env_ids 0 to {env_num - 1}, but {error}"
        ) from error
    if set(map(type, given)) == {int} and _are_below(env_num, given):
        return given
    return [checked_env_id(env_id, env_num) for env_id in given]


def _are_below(env_num: int, numbers: list[int]) -> bool:
    return min(numbers) >= 0 and max(numbers) < env_num


def actions_by_id(actions: Any) -> dict[Any, Any]:
    """Return actions as a dict; its keys are not checked.

    Raises:
        ActionError: the actions are not a mapping, or it cannot be read.
    """
    if type(actions) is dict:
        return actions
    if isinstance(actions, Mapping):
        try:
            return read_dict(actions)
        except Unreadable as error:
            raise ActionError(f"the actions {error}. Nothing was sent to any env.") from error
    raise ActionError(
        f"actions should be a dict {{env_id: action}}, found {type(actions).__name__} "
        f"({short_text(actions)}). For arrays there is send_arrays(env_ids, actions)."
    )


def checked_min_ready(min_ready: Any) -> int:
    """Return a number of timesteps to wait for.

    Raises:
        ConfigError: `min_ready` is not an integer of 1 or more.
    """
    if isinstance(min_ready, (int, np.integer)) and not isinstance(min_ready, bool):
        number = int(min_ready)
        if number >= 1:
            return number
    raise ConfigError(
        f"min_ready is {short_text(min_ready)}; it should be 1 or more, an integer, or None to "
        "gather as step() of this kind does"
    )


def checked_seconds(timeout_s: Any) -> float:
    """Return a time limit: None and infinity mean no limit, and a negative one becomes 0.

    Raises:
        ConfigError: `timeout_s` is not a number.
    """
    if timeout_s is None:
        return math.inf
    number = math.nan
    if isinstance(timeout_s, _NUMBERS) and not isinstance(timeout_s, bool):
        try:
            number = float(timeout_s)
        except Exception as error:  # an int beyond all floats, or a class of the caller's own
            pass_interrupt_on(error)
            number = math.nan
    if math.isnan(number):
        raise ConfigError(
            f"timeout_s is {short_text(timeout_s)}; it should be a number of seconds, or None for "
            "the default"
        )
    return max(number, 0.0)


def checked_grace(timeout_s: Any, default_s: float) -> float:
    """Return the seconds that envs get to close; None means `default_s`.

    Raises:
        ConfigError: `timeout_s` is not a number.
    """
    return default_s if timeout_s is None else min(checked_seconds(timeout_s), MAX_SECONDS)


def checked_flag(flag: Any, name: str) -> bool:
    """Return a bool.

    Raises:
        ConfigError: `flag` is something else.
    """
    checked: bool = check_value(boolean(), flag, name)
    return checked


def checked_attribute(name: Any) -> str:
    """Return the name of an attribute.

    Raises:
        EnvAttributeError: no attribute can have that name.
    """
    plain = _identifier(name)
    if plain is None:
        raise EnvAttributeError(
            f"no env has an attribute {short_text(name)}: the name of an attribute is a string "
            "such as 'spec'. Nothing was sent."
        )
    return plain


def checked_method(name: Any) -> str:
    """Return the name of a method that `call` may run.

    Raises:
        MethodAccessError: it is `reset`, `step`, `seed` or `close`, is private, or is not a name.
    """
    plain = _identifier(name)
    if plain is None:
        raise MethodAccessError(
            f"call({short_text(name)}) is refused: no method can have that name. Give the name of "
            "one as a string, such as 'render'."
        )
    if plain in NOT_CALLABLE or plain.startswith("_"):
        raise MethodAccessError(
            f"call({plain!r}) is refused: reset, step, seed and close would go past the states of "
            "the manager (use its own methods), and private methods are the env's own business"
        )
    return plain


def _identifier(name: Any) -> str | None:
    plain = str.__str__(name) if isinstance(name, str) else ""  # without its class's own methods
    return plain if plain.isidentifier() and len(plain) <= MAX_TEXT else None


def checked_mode(mode: Any) -> str | None:
    """Return a render mode.

    Raises:
        ConfigError: it is neither a string nor None.
    """
    checked: str | None = check_value(or_null(text()), mode, "mode")
    return checked


def checked_folder(folder: Any, name: str) -> str:
    """Return a path as a string.

    Raises:
        ConfigError: `folder` is not a path.
    """
    try:
        folder = os.fspath(folder)
    except Exception as error:  # what it is then is said below
        pass_interrupt_on(error)
        folder = None if isinstance(folder, str) else folder
    checked: str = check_value(text(), folder, name)
    return checked


def checked_folders(folders: Any, env_num: int) -> list[str]:
    """Return one path for each env from `replay_path`: a list of paths, or one for all envs.

    Raises:
        ConfigError: they are not paths, or their number is another one.
    """
    if isinstance(folders, (str, bytes, os.PathLike)):
        return [checked_folder(folders, "replay_path")] * env_num
    try:
        given = read_list(folders)
    except Unreadable as error:
        raise ConfigError(
            f"replay_path should be one folder, or a list with one for each env, but {error}"
        ) from error
    if len(given) != env_num:
        raise ConfigError(f"replay_path: {len(given)} paths for {env_num} envs; give one for each")
    return [checked_folder(folder, f"replay_path[{i}]") for i, folder in enumerate(given)]


def checked_transitions(transitions: Any) -> Any:
    """Return the transitions of an episode.

    Raises:
        ConfigError: they are not a sequence.
    """
    if isinstance(transitions, Sequence) and not isinstance(transitions, (str, bytes, bytearray)):
        return transitions
    raise ConfigError(
        f"transitions is {short_text(transitions)}; it should be a list of the transitions of one "
        "episode. Nothing was sent."
    )


def values_for_each(name: str, value: Any, count: int) -> list[Any]:
    """Return the value of an attribute for each of `count` envs.

    Args:
        name: the name of the attribute.
        value: one for all, or a list with one for each.
        count: number of envs.

    Raises:
        ConfigError: a list of another length, or one that cannot be read.
    """
    if not isinstance(value, list):
        return [value] * count
    try:
        values = read_list(value)
    except Unreadable as error:
        raise ConfigError(f"set_attr({name!r}) got a list, but {error}") from error
    if len(values) != count:
        raise ConfigError(
            f"set_attr({name!r}) got a list of {len(values)} values for {count} envs; to set one "
            "list everywhere, give a list of equal lists"
        )
    return values


def checked_params(reset_param: Any, env_num: int) -> dict[int, dict[str, Any] | None]:
    """Return reset params by env_id; None means all envs with None.

    Raises:
        UnknownEnvError: an env_id that does not exist.
        ConfigError: not a mapping of env_id to a dict or None.
    """
    if reset_param is None:
        return dict.fromkeys(range(env_num))
    by_key = _dict_of(reset_param)
    if by_key is None:
        raise ConfigError(
            "reset takes {env_id: params or None}, or nothing for all envs; found "
            f"{type(reset_param).__name__} ({short_text(reset_param)})"
        )
    return {
        (env_id := checked_env_id(key, env_num)): _checked_keywords(env_id, params)
        for key, params in by_key.items()
    }


def _checked_keywords(env_id: int, params: Any) -> dict[str, Any] | None:
    if params is None:
        return None
    keywords = _dict_of(params)
    if keywords is None or not all(isinstance(name, str) for name in keywords):
        raise ConfigError(
            f"the reset params of env {env_id} should be a dict of keyword arguments or None, "
            f"found {short_text(params)}"
        )
    checked = {str.__str__(name): value for name, value in keywords.items()}
    return Once(checked) if isinstance(params, Once) else checked


def _dict_of(value: Any) -> dict[Any, Any] | None:
    """Return a mapping as a dict; None if the value is not a mapping, or cannot be read."""
    try:
        return read_dict(value) if isinstance(value, Mapping) else None
    except Unreadable:
        return None


def checked_space(space: Any, name: str) -> Any:
    """Return a space as a gymnasium space; None stays None.

    Raises:
        ConfigError: it is neither a gymnasium space nor one of the old gym package.
    """
    if space is None:
        return None
    try:
        return convert_space(space)
    except Exception as error:  # also what a space of the old package raises that is broken
        reason = error if isinstance(error, EnvContractError) else error_text(error)
        raise ConfigError(
            f"{name} is {short_text(space)}, which cannot be used: {reason}. Nothing was built."
        ) from error


# -- what envs can do now -------------------------------------------------------------------------

_ADVICE = {
    EnvState.VOID: "call launch() first",
    EnvState.INIT: "it is being repaired; it will be in ready_obs when it is ready",
    EnvState.RESET: "it is being reset; it will be in ready_obs when it is ready",
    EnvState.NEED_RESET: "its episode ended and auto_reset is off: call reset({ID: params})",
    EnvState.DONE: "its episode budget is spent: call reset({ID: None}) for a new one",
    EnvState.ERROR: "it failed; it is being repaired, or reset({ID: None}) repairs it",
}


def checked_actions(
    table: EnvTable,
    actions: Any,
    checks: Sequence[ActionCheck] | None,
    *,
    are_ready: bool = False,
) -> dict[int, Any]:
    """Return actions by env_id that, as far as can be told, can be submitted.

    Args:
        table: the envs.
        actions: `{env_id: action}`.
        checks: the check of each env's actions; None if they are not to be checked.
        are_ready: whether the caller knows that the envs take an action now, because they are
            leased.

    Raises:
        ActionError: not a mapping, or an action that the space refuses.
        UnknownEnvError: an env_id that does not exist.
        EnvNotReadyError: an env that cannot take an action now.
    """
    actions = actions_by_id(actions)
    env_num, envs = table.env_num, table.envs
    ready = are_ready or table.are_all_ready
    checked: dict[int, Any] = {}
    for key, action in actions.items():
        env_id = key if type(key) is int and 0 <= key < env_num else checked_env_id(key, env_num)
        if not ready and (not table.is_ready(env_id) or envs[env_id].phase is Phase.CALLING):
            raise _not_ready(table, env_id)
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
    _refuse_without(table.missing_beside([*checked]))
    if len(checked) != len(actions):  # an integer of a class of its own is no equal key
        raise ActionError(f"the actions name an env twice: {short_text([*actions])}")
    return checked


def _refuse_without(missing: Sequence[int]) -> None:
    """Refuse actions of a batched env that lack those of some of its rows.

    Raises:
        EnvNotReadyError: there are rows without an action.
    """
    if missing:
        raise EnvNotReadyError(
            f"envs {list(missing)} were sent no action, but they are stepped together with envs "
            "that were: all rows of a batched env take one in the same call, unless its "
            "BatchedEnvSpec says partial_steps. Nothing was sent to any env."
        )


def envs_in_calls(table: EnvTable, env_ids: Any) -> list[int]:
    """Return which of these envs run a call; what is no list of envs is refused elsewhere."""
    if Phase.CALLING not in table.phases.column:
        return []
    if not isinstance(env_ids, (Mapping, list)):
        return []
    busy = [i for i in table.all_ids if table.phases[i] is Phase.CALLING]
    return [env_id for env_id in busy if env_id in env_ids]


def _plain_action(env_id: int, action: Any) -> Any:
    try:
        return without_tensors(action)
    except Exception as error:  # what tensors raise that need gradients, or are on a device
        raise ActionError(
            f"the action of env {env_id} ({type(action).__name__}) cannot be made an array: "
            f"{error_text(error)}. Nothing was sent to any env."
        ) from error


_LOOP = (
    " Act on the envs and observations of ready_obs in each step: a timestep with done has the end "
    "of its episode."
)


def _not_ready(table: EnvTable, env_id: int) -> EnvNotReadyError:
    state = table.states[env_id]
    if env_id in table.leased:
        return _is_leased([env_id], "cannot be stepped with others")
    if table.envs[env_id].phase is Phase.CALLING:
        advice = "a call of it has not ended: try again when it has, or reset it"
    elif table.owes(env_id):
        advice = "an action of it is under way: gather its timestep with recv() or step({}) first"
    else:
        advice = _ADVICE.get(state, "it takes no action now").replace("ID", str(env_id))
    is_coming = state in (EnvState.INIT, EnvState.RESET)  # who has looked at `done` goes on with it
    return EnvNotReadyError(
        f"env {env_id} cannot take an action: it is in {state.name}; {advice}. "
        f"Ready now: {table.ready_ids()}. Nothing was sent to any env.{_LOOP * is_coming}"
    )


def _is_leased(env_ids: Sequence[int], what: str) -> EnvLeasedError:
    return EnvLeasedError(
        f"envs {list(env_ids)} {what}: they are leased, each to one coroutine or thread. Use them "
        "there (env.step, env.reset), leave them out of this call, or make it when the leases have "
        "ended. Nothing was sent to any env."
    )


def refuse_leased(table: EnvTable, env_ids: Iterable[int], what: str) -> None:
    """Refuse calls for batches that name envs which are leased.

    Raises:
        EnvLeasedError: one of them is.
    """
    leased = [i for i in env_ids if i in table.leased] if table.leased else []
    if leased:
        raise _is_leased(leased, f"cannot take part in {what}")


def refuse_while_pending(table: EnvTable, env_ids: Iterable[int], what: str) -> None:
    """Refuse calls to envs that are executing a step.

    Raises:
        EnvNotReadyError: one of them is.
    """
    refuse_leased(table, env_ids, what)
    pending = [i for i in env_ids if table.owes(i)]
    if pending:
        raise EnvNotReadyError(
            f"{what} needs envs without an action under way, but envs {pending} have one: gather "
            "their timesteps with recv() or step({}) first"
        )


def refuse_gone(table: EnvTable, env_ids: Iterable[int], what: str) -> None:
    """Refuse calls to envs that failed for good and have no host any more.

    Raises:
        EnvNotReadyError: one of them is.
    """
    gone = [i for i in env_ids if table.envs[i].is_gone]
    if gone:
        states = {i: table.states[i].name for i in gone}
        raise EnvNotReadyError(
            f"{what} cannot be done: envs {gone} have failed for good and are gone ({states}). "
            f"Repair them with reset({{{gone[0]}: None}}), or leave them out with env_ids."
        )


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


def refuse_partial_resets(table: EnvTable, params: Mapping[int, Mapping[str, Any] | None]) -> None:
    """Refuse the reset of some rows of a batched env that can only reset all of them together.

    Raises:
        EnvNotReadyError: others of its rows are in an episode.
        ConfigError: its rows are given different params.
    """
    for env_id in params:
        rows = table.reset_with(env_id)
        in_run = (i for i in rows if table.states[i] is EnvState.RUN)
        missing = [i for i in in_run if i not in params]
        if missing:
            raise EnvNotReadyError(
                f"env {env_id} cannot be reset while envs {missing} are in an episode: they are "
                "rows of a vector env that resets all of them together. Name all of envs "
                f"{rows[0]} to {rows[-1]}. No env was reset."
            )
        given = [params.get(i) or {} for i in rows if i in params]
        if any(other != given[0] for other in given):
            raise ConfigError(
                f"envs {rows[0]} to {rows[-1]} are rows of a vector env "
                "that resets all of them together, and so with the same params. No env was reset."
            )


def check_options(
    descriptions: Mapping[int, EnvDescription], params: Mapping[int, Mapping[str, Any] | None]
) -> str | None:
    """Refuse reset params that are written like arguments of gymnasium's `reset`.

    Args:
        descriptions: what each env has said of itself.
        params: checked params; an env that is not a gymnasium env may name its own as it likes.

    Returns:
        A message about a `seed` among them, which may be intended: an option can have any name.

    Raises:
        ConfigError: the params of an env are nothing but `options`, which they become anyway.
    """
    seeded: int | None = None
    for env_id, given in params.items():
        if not given or not descriptions[env_id].params_are_options:
            continue
        if given.keys() == {"options"} and isinstance(given["options"], (Mapping, type(None))):
            inner = given["options"] or {}
            raise ConfigError(
                f"the reset params of env {env_id} are {short_text(given)}, but those of a "
                f"gymnasium env are its options themselves: give {{{env_id}: {short_text(inner)}}}."
                " No env was reset."
            )
        seeded = env_id if seeded is None and "seed" in given else seeded
    if seeded is None:
        return None
    seed = short_text(params[seeded]["seed"])  # type: ignore[index]
    return (
        f"the 'seed' in the reset params of env {seeded} goes to the env as an option. To seed it: "
        f"manager.seed({{{seeded}: {seed}}}), then manager.reset({{{seeded}: None}})."
    )


def refuse_unsendable_params(
    transport: Transport, params: Mapping[int, Mapping[str, Any] | None]
) -> None:
    """Refuse reset params that cannot be sent to a worker, before any env is reset.

    Raises:
        ConfigError: the params of one env cannot be sent.
    """
    for env_id, given in params.items():
        if not given:
            continue
        try:
            transport.prepare(0, Message(Op.RESET, env_id, 0, 0, given))
        except FrameError as error:
            raise ConfigError(
                f"the reset params of env {env_id} cannot be sent to its worker: {error}. No env "
                "was reset."
            ) from error
