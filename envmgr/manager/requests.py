"""Requests to envs besides steps and resets: calls, functions, attributes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from envmgr.core import Phase, validate
from envmgr.core.engine import Engine
from envmgr.core.submit import submit_calls
from envmgr.errors import (
    EnvAttributeError,
    EnvFailure,
    EnvNotReadyError,
    EnvProtocolError,
    MethodAccessError,
)
from envmgr.wire.messages import Attribute, Op, RemoteFailure


def await_callable(engine: Engine, env_ids: Sequence[int], what: str) -> None:
    """Wait for resets and repairs of envs, until they can take a request.

    The wait also ends when an env is gone, or the run has failed. The engine's lock is held, here
    and in the functions below.

    Raises:
        EnvNotReadyError: an env has an action under way, or waits for a step of others.
    """
    supervisor = engine.supervisor
    engine.see_ends_of_leases()
    validate.refuse_while_pending(supervisor.table, env_ids, what)
    repair, envs = supervisor.repair, [supervisor.envs[i] for i in env_ids]

    def waiting_rows() -> list[int]:
        rows = supervisor.table.rows_in_next_step(env_ids)
        return [i for i in rows if not supervisor.table.is_coming(i)]

    def settled() -> bool:
        if repair.fatal is not None or any(env.is_gone for env in envs):
            return True
        return all(env.is_callable for env in envs) or bool(waiting_rows())

    engine.wait_until(settled, doing=what)
    rows = waiting_rows()
    if rows and repair.fatal is None:
        raise EnvNotReadyError(
            f"{what}: the next episodes of envs {rows} begin with the next step of the other rows "
            "of their vector env (autoreset mode NextStep), which they wait for. Step those first, "
            "or reset these. Nothing was sent to any env."
        )


def send_requests(
    engine: Engine, env_ids: Sequence[int], op: Op, payloads: Sequence[Any], what: str
) -> None:
    """Send a request to each of some envs, which can take one now: to all or to none."""
    supervisor = engine.supervisor
    envs = [supervisor.envs[i] for i in env_ids]
    engine.uninterrupted(partial(submit_calls, supervisor.hosts, envs, op, payloads, what))


def await_results(engine: Engine, env_ids: Sequence[int], deadline: float) -> bool:
    """Wait for the results of requests; return whether they came before a deadline."""
    envs = [engine.supervisor.envs[i] for i in env_ids]
    return engine.wait_until(
        lambda: all(env.phase is not Phase.CALLING for env in envs),
        deadline=deadline,
        doing="a call",
    )


def first_failure(results: Sequence[Any]) -> EnvFailure | None:
    """Return the first result of requests that is a failure; None if there is none."""
    return next((result for result in results if isinstance(result, EnvFailure)), None)


def attributes_of(name: str, env_ids: Sequence[int], answers: Sequence[Any]) -> list[Any]:
    """Return the attributes that envs have answered with.

    Raises:
        EnvAttributeError: an env has no attribute of this name.
        MethodAccessError: the attribute is a method.
        EnvProtocolError: a host has answered something else.
    """
    for env_id, answer in zip(env_ids, answers, strict=True):
        if isinstance(answer, RemoteFailure):
            raise EnvAttributeError(f"env {env_id} has no attribute {name!r}: {answer.message}")
        if not isinstance(answer, Attribute):
            raise EnvProtocolError(
                f"the worker of env {env_id} answered the reading of {name!r} with a "
                f"{type(answer).__name__}, which is no attribute; do not write into the "
                "connection of a worker",
                env_id=env_id,
                during="call",
            )
        if answer.is_method:
            raise MethodAccessError(
                f"{name!r} is a method of env {env_id}: use manager.call({name!r}, ...)"
            )
    return [answer.value for answer in answers]
