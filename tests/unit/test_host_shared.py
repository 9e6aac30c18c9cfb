"""The child side with several envs: who is asked, in which order things run, and what is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from envmgr.wire.hosts import HostSettings
from envmgr.wire.messages import (
    UNANSWERED,
    AfterStep,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    ResetOrder,
)
from envmgr.worker.host import Host
from tests.unit.test_host import ScriptedEnv, numbers, step

PLAN = EpisodePlan(True, float("inf"), {"later": 1})


class SharedHost:
    """A host of several scripted envs, built and reset; replies are not encoded.

    Args:
        *envs: what the factories return; an exception is raised.
        **settings: fields of `HostSettings`.
    """

    def __init__(self, *envs: Any, **settings: Any) -> None:
        self.envs = list(envs)
        factories = {i: lambda i=i: self._build(i) for i in range(len(envs))}
        self.replies: list[Message] = []
        self.host = Host(
            factories,
            HostSettings(**settings),
            encode=lambda message: message,
            send=lambda message: self.replies.append(message),
            memory=lambda n: None,
        )
        self._request_id = 0
        for env_id, env in enumerate(envs):
            self.run(env_id, Op.HELLO)
            self.reset(env_id)
            if isinstance(env, ScriptedEnv):
                env.log.clear()

    def _build(self, env_id: int) -> Any:
        if isinstance(self.envs[env_id], BaseException):
            raise self.envs[env_id]
        return self.envs[env_id]

    def run(self, env_id: int, op: Op, payload: Any = None, *, answered: bool = True) -> list[Op]:
        """Run a request, and return the operations of its replies, which all answer it."""
        self._request_id += 1
        request_id = self._request_id if answered else UNANSWERED
        self.replies = []
        self.host.handle(Message(op, env_id, 0, request_id, payload))
        assert all(reply[1:4] == (env_id, 0, request_id) for reply in self.replies)
        return [Op(reply.op) for reply in self.replies]

    def reset(self, env_id: int) -> list[Op]:
        return self.run(env_id, Op.RESET, ResetOrder({}, None, None, PLAN))

    def step(self, env_id: int) -> list[Op]:
        return self.run(env_id, Op.STEP, 0)

    def postponed(self) -> list[tuple[int, int, Op]]:
        """Run the oldest postponed reset: env_id, request id and operation of each reply."""
        self.replies = []
        self.host.run_resets(1)
        return [(r.env_id, r.request_id, Op(r.op)) for r in self.replies]


def test_requests_go_to_the_env_they_are_for() -> None:
    host = SharedHost(ScriptedEnv(step(1)), ScriptedEnv(step(2)))
    assert host.step(1) == [Op.STEPPED]
    assert numbers(host.replies[0].payload[0]) == [2, 2]
    assert host.envs[0].log == []
    assert host.envs[1].log == [("step", 0)]


def test_a_request_for_a_strange_env_is_refused() -> None:
    host = SharedHost(ScriptedEnv(), ScriptedEnv())
    assert host.run(7, Op.STEP, 0) == [Op.FAILED]
    failure = host.replies[0].payload
    assert failure.kind is FailureKind.PROTOCOL
    assert "env 7 is not one of [0, 1]" in failure.message


def test_an_env_that_cannot_be_built_or_fails_leaves_the_others_alone() -> None:
    host = SharedHost(RuntimeError("no"), ScriptedEnv(SystemExit(3), step()), ScriptedEnv(step()))
    assert host.step(0) == [Op.FAILED]
    assert host.step(1) == [Op.FAILED]
    assert host.replies[0].payload.kind is FailureKind.EXITED
    assert host.step(2) == [Op.STEPPED]
    assert host.step(1) == [Op.STEPPED]


def test_automatic_resets_wait_for_what_has_arrived_for_the_others() -> None:
    ending = step(9, done=True)
    host = SharedHost(ScriptedEnv(ending), ScriptedEnv(ending, ending), ScriptedEnv(step()))
    assert host.step(1) == [Op.STEPPED]
    first = host.replies[0]
    assert first.payload[4] == AfterStep.RESETS
    assert host.step(0) == [Op.STEPPED]
    assert host.step(2) == [Op.STEPPED]
    assert len(host.host.resets) == 2
    assert host.envs[1].log == [("step", 0)]
    assert host.postponed() == [(1, first.request_id, Op.RESET_DONE)]
    assert host.envs[1].log == [("step", 0), ("reset", {"later": 1})]
    assert host.envs[0].log == [("step", 0)]
    assert [env_id for env_id, _, _ in host.postponed()] == [0]
    assert not host.host.resets


def test_a_postponed_reset_that_fails_is_reported_for_its_env() -> None:
    host = SharedHost(ScriptedEnv(step(done=True)), ScriptedEnv())
    host.envs[0].resets = [RuntimeError("boom")]
    host.step(0)
    assert [op for _, _, op in host.postponed()] == [Op.FAILED]


def test_a_renewed_env_is_not_reset_for_the_one_before_it() -> None:
    host = SharedHost(ScriptedEnv(step(done=True)), ScriptedEnv())
    host.step(0)
    host.run(0, Op.RENEW)
    host.envs[0].log.clear()
    assert host.postponed() == []
    assert host.envs[0].log == []


def test_one_env_is_let_go_of_and_may_be_built_again() -> None:
    host = SharedHost(ScriptedEnv(), ScriptedEnv(step()))
    assert host.run(0, Op.RELEASE, answered=False) == [Op.RESULT]
    assert [env.closed for env in host.envs] == [1, 0]
    assert host.step(1) == [Op.STEPPED]
    assert host.step(0) == [Op.FAILED]
    assert host.run(0, Op.RENEW) == [Op.HELLO]
    assert host.reset(0) == [Op.RESET_DONE]


def test_closing_closes_all_and_forgets_what_was_postponed() -> None:
    host = SharedHost(ScriptedEnv(step(done=True)), ScriptedEnv())
    host.step(0)
    host.envs[0].close = _raise
    host.host.close()
    assert host.envs[1].closed == 1
    assert not host.host.resets


def _raise() -> None:
    raise RuntimeError("no")


# -- limits of the worker -------------------------------------------------------------------------


def test_episodes_are_counted_over_all_envs_and_a_worn_host_stays_so() -> None:
    endings = [step(done=True)] * 3
    host = SharedHost(ScriptedEnv(*endings), ScriptedEnv(*endings), max_episodes=3)
    afters = []
    for env_id in (0, 1, 0, 1):
        host.step(env_id)
        afters.append(host.replies[0].payload[4])
        while host.host.resets:
            host.postponed()
    wants = AfterStep.WANTS_RECYCLING
    assert afters == [AfterStep.RESETS, AfterStep.RESETS, wants, wants]
    host.run(0, Op.RENEW)
    host.reset(0)
    host.step(1)
    assert host.replies[0].payload[4] == wants


class _Calls(list[Message]):
    """Calls a function with what is appended."""

    def __init__(self, function: Callable[[Message], None]) -> None:
        super().__init__()
        self.append = function  # type: ignore[method-assign, assignment]


# -- announcements --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "payload", "answer"),
    [
        (Op.RENEW, None, Op.HELLO),
        (Op.STEP, 0, Op.STEPPED),
        (Op.RESET, ResetOrder({}, None, None, PLAN), Op.RESET_DONE),
        (Op.CALL, ("double", (2,)), Op.RESULT),
        (Op.RELEASE, None, Op.RESULT),
    ],
)
def test_work_is_announced_before_it_begins(op: Op, payload: Any, answer: Op) -> None:
    host = SharedHost(ScriptedEnv(step()), ScriptedEnv(), announced=frozenset((op,)))
    env = host.envs[0]
    env.log.clear()
    done: list[Any] = []

    def send(message: Message) -> None:
        done.append((message.op, list(env.log), env.closed))

    host.replies = _Calls(send)
    host.host.handle(Message(op, 0, 0, 99, payload))
    (began, *before), (answered, *_) = done
    assert (began, *before) == (Op.BEGAN, [], 0)
    assert answered == answer


def test_a_postponed_reset_is_announced() -> None:
    announced = frozenset((Op.STEP, Op.RESET))
    host = SharedHost(ScriptedEnv(step(done=True)), ScriptedEnv(), announced=announced)
    assert host.step(0) == [Op.BEGAN, Op.STEPPED]
    assert [op for _, _, op in host.postponed()] == [Op.BEGAN, Op.RESET_DONE]


def test_what_is_not_to_be_announced_is_not() -> None:
    host = SharedHost(ScriptedEnv(step()), ScriptedEnv(), announced=frozenset((Op.RENEW,)))
    assert host.step(0) == [Op.STEPPED]
