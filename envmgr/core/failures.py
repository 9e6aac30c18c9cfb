"""From what hosts report to typed failures, and to the abnormal timestep that stands for a step."""

from __future__ import annotations

import copy
import signal
from collections.abc import Mapping
from enum import Enum
from typing import Any

from envmgr.core.slots import EnvSlot, names_of
from envmgr.errors import (
    EnvCrash,
    EnvFailure,
    EnvProtocolError,
    EnvRaised,
    EnvReportedAbnormal,
    EnvTimeout,
)
from envmgr.transport.base import HostDied
from envmgr.types import EnvTimestep
from envmgr.wire.messages import FailureKind, RemoteFailure


class Lost(str, Enum):
    """What a failure of an env leaves unusable."""

    NOTHING = "nothing"
    ENV = "the env"
    """A new env is needed. It is built in the same host if others share that; else in a new one."""
    HOST = "the host"
    """It died, timed out or broke the protocol."""


def reported(slot: EnvSlot, remote: RemoteFailure) -> EnvFailure:
    """Return the failure that a host reported."""
    env_id, generation, during = slot.env_id, slot.generation, remote.during
    where = f"{slot.name} (generation {generation})"
    if remote.kind is FailureKind.ABNORMAL:
        text = f"{where} reported its own step as abnormal (info['abnormal'])"
        return EnvReportedAbnormal(text, env_id=env_id, during=during, generation=generation)
    if remote.kind is FailureKind.EXITED:
        did = f"called sys.exit({remote.message})"
        if remote.type_name != SystemExit.__name__:
            did = f"raised {remote.type_name}"
        text = f"{where} {did} in its {during}{_traceback_of(remote)}"
        return EnvCrash(text, env_id=env_id, during=during, generation=generation)
    if remote.kind in (FailureKind.PROTOCOL, FailureKind.NON_FINITE):
        text = f"{where} broke the protocol in its {during}: {remote.message}"
        return EnvProtocolError(text, env_id=env_id, during=during, generation=generation)
    text = f"{where} raised {remote.type_name} in its {during}: {remote.message}"
    text += _traceback_of(remote)
    return EnvRaised(
        text,
        env_id=env_id,
        during=during,
        generation=generation,
        type_name=remote.type_name,
        remote_message=remote.message,
        remote_traceback=remote.traceback_text,
    )


def _traceback_of(remote: RemoteFailure) -> str:
    text = remote.traceback_text.rstrip()
    return f"\n\nTraceback in its host:\n{text}" if text else ""


def crash(slot: EnvSlot, died: HostDied) -> EnvCrash:
    """Return the failure of an env whose host is gone."""
    status = died.exit_status
    if status is None:
        how = died.detail or "it cannot be told how"
    elif status < 0:
        how = f"killed by {_signal_name(-status)}"
    else:
        how = f"exit code {status}"
    hint = " (out of memory?)" if status == -getattr(signal, "SIGKILL", 9) else ""
    text = (
        f"the host of {slot.name} (generation {slot.generation}) died during "
        f"{slot.phase.label}: {how}{hint}{_neighbours(slot)}"
    )
    if died.last_words:
        text += f"\n\nThe end of its stderr:\n{died.last_words}"
    return EnvCrash(
        text,
        env_id=slot.env_id,
        during=slot.phase.label,
        generation=slot.generation,
        exit_status=status,
        stderr_tail=died.last_words,
    )


def _neighbours(slot: EnvSlot) -> str:
    """Name the envs that lose their host with this one; empty if there are none."""
    others = [other for other in slot.group.present() if other is not slot]
    if not others:
        return ""
    return f"; {names_of(others)} shared its host, and lose{'s' * (len(others) == 1)} it too"


def of_neighbour(slot: EnvSlot, failure: EnvFailure) -> EnvCrash:
    """Return the failure of an env whose host was lost by the failure of one that shared it."""
    first_line = str(failure).partition("\n")[0]
    text = (
        f"the host of {slot.name} (generation {slot.generation}) was lost during "
        f"{slot.phase.label}, because it is shared with env {failure.env_id}: {first_line}"
    )
    crash = EnvCrash(
        text,
        env_id=slot.env_id,
        during=slot.phase.label,
        generation=slot.generation,
        exit_status=getattr(failure, "exit_status", None),
        stderr_tail=getattr(failure, "stderr_tail", ""),
    )
    crash.__cause__ = failure
    return crash


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def timeout(slot: EnvSlot, limit_s: float, where: str = "") -> EnvTimeout:
    """Return the failure of an env that exceeded a time limit; `where` is `EnvTimeout.stacks`."""
    key = {"step": "step_timeout", "cancelled step": "step_timeout"}.get(slot.phase.label)
    key = key or {"construction": "connect_timeout"}.get(slot.phase.label, "reset_timeout")
    during = slot.phase.label
    if slot.host_id is None:  # a shared host that let go of it
        key, during = "close_timeout", "close"
    text = (
        f"{slot.name} (generation {slot.generation}) exceeded the {limit_s:g} s of {key} "
        f"in its {during}{_neighbours(slot)}"
    )
    if where:
        text += f"\n\nWhere it was:\n{where}"
    return EnvTimeout(
        text,
        env_id=slot.env_id,
        during=during,
        generation=slot.generation,
        limit_s=limit_s,
        stacks=where,
    )


def protocol(slot: EnvSlot, reason: str, *, loses_host: bool = True) -> EnvProtocolError:
    """Return the failure of an env whose host sent something malformed."""
    text = (
        f"the host of {slot.name} (generation {slot.generation}) broke the protocol "
        f"during {slot.phase.label}: {reason}{_neighbours(slot) if loses_host else ''}"
    )
    return EnvProtocolError(
        text, env_id=slot.env_id, during=slot.phase.label, generation=slot.generation
    )


def abnormal_timestep(slot: EnvSlot, failure: EnvFailure, env_info: Any = None) -> EnvTimestep:
    """Return the one timestep that stands for an action whose env failed.

    Args:
        slot: the env; its newest observation is the timestep's.
        failure: becomes `info["error"]`.
        env_info: what the env itself said, if it did: a dict, or a list or tuple of dicts, whose
            form is kept.
    """
    obs = copy.deepcopy(slot.obs)
    reward, terminated, truncated = slot.record.observed.lost_step(slot.env_id, obs)
    marks = {"abnormal": True, "terminated": terminated, "truncated": truncated, "error": failure}
    info: Any
    if isinstance(env_info, (list, tuple)) and env_info:
        info = type(env_info)(
            {**part, **marks} if isinstance(part, Mapping) else part for part in env_info
        )
    else:
        info = {**(env_info if isinstance(env_info, Mapping) else {}), **marks}
    return EnvTimestep(obs, reward, True, info)
