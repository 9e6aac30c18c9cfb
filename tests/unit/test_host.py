"""What each request does to the envs of a host, and in which order: one env, and several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, Sequence

from envmgr.env.contract import EnvContractError
from envmgr.spaces import codec_of
from envmgr.wire.arenas import COPIED, ObservationRules, plan_placements
from envmgr.wire.frames import encode
from envmgr.wire.hosts import HostSettings
from envmgr.wire.messages import (
    UNANSWERED,
    AfterStep,
    Attribute,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    ResetRequest,
)
from envmgr.worker.event_loop import WorkerLoop
from envmgr.worker.host import EnvsInUse, Host
from tests.unit.host_rigs import (
    ACTIONS,
    OBSERVATIONS,
    Harness,
    ScriptedEnv,
    failure_of,
    launched,
    numbers,
    only,
    step,
)

# -- building -------------------------------------------------------------------------------------


def test_building_describes_the_env() -> None:
    described = only(Harness(ScriptedEnv()).build(), Op.HELLO)
    assert described.observation_space == OBSERVATIONS
    assert described.action_space == ACTIONS
    assert described.reward_space is None
    assert described.metadata == {"name": "scripted"}
    assert described.render_mode is None


def test_spaces_that_the_user_gave_take_the_place_of_the_envs_own() -> None:
    mine = Box(-1, 1, (2,), np.float64)
    harness = Harness(ScriptedEnv(step()), observation_space=mine, action_space=Discrete(9))
    described = only(harness.build(), Op.HELLO)
    assert described.observation_space == mine
    assert described.action_space == Discrete(9)
    (notice, reset) = harness.reset()
    assert notice.op == Op.NOTICE
    assert len(reset.payload[0][0]) == 2 * np.dtype(np.float64).itemsize


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_a_factory_raises_is_reported(error: BaseException) -> None:
    failure = failure_of(Harness(error).build())
    assert failure.during == "construction"
    exited = not isinstance(error, Exception)
    assert failure.kind is (FailureKind.EXITED if exited else FailureKind.RAISED)


def test_what_is_no_env_is_a_breach_of_the_protocol() -> None:
    failure = failure_of(Harness(7).build())
    assert failure.kind is FailureKind.PROTOCOL
    assert "the factory of env 3 returned" in failure.message


class Refused(ScriptedEnv):
    """Is built, and cannot be run."""

    observation_space = "odd"


class NoStep:
    """Is no env at all."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class OddGym(gymnasium.Env[Any, Any]):
    """Its wrapper raises."""

    observation_space: Any = "odd"

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class AsyncScripted(ScriptedEnv):
    async def step(self, action: Any) -> Any: ...


class ClosedAsync(AsyncScripted):
    async def close(self) -> None:  # type: ignore[override]
        self.closed += 1


@pytest.mark.parametrize(
    "build", [Refused, NoStep, OddGym, AsyncScripted, ClosedAsync], ids=lambda build: build.__name__
)
def test_what_was_built_and_is_not_run_is_closed(build: Callable[[], Any]) -> None:
    harness = Harness(build())
    assert failure_of(harness.build()).kind is FailureKind.PROTOCOL
    assert harness.env.closed == 1
    harness.host.close()
    assert harness.env.closed == 1


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(3)])
def test_what_is_not_run_is_refused_whatever_its_close_raises(error: BaseException) -> None:
    env = Refused()

    def close() -> None:
        raise error

    env.close = close  # type: ignore[method-assign]
    failure = failure_of(Harness(env).build())
    assert failure.kind is FailureKind.PROTOCOL
    assert "found a value of type str" in failure.message


def test_an_async_env_that_is_not_run_is_closed_in_the_loop() -> None:
    class InLoop(AsyncScripted):
        observation_space = "odd"

        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(0)
            self.closed += 1

    loop = WorkerLoop()
    harness = Harness(InLoop(), loop=loop)
    assert harness.build() == []
    loop.finish(asyncio.sleep(0.0))
    while not harness.sent:
        loop.finish(asyncio.sleep(0.0))
    assert failure_of(harness.sent).kind is FailureKind.PROTOCOL
    assert harness.env.closed == 1
    assert loop.loop is not None
    loop.loop.close()
    asyncio.set_event_loop(None)


def test_metadata_that_cannot_be_sent_is_left_out() -> None:
    env = ScriptedEnv()
    env.metadata = {"generator": (n for n in ())}
    harness = Harness(env, encode=lambda m: (encode(m), m)[1])
    described = only(harness.build(), Op.HELLO)
    assert described.metadata is None
    assert described.observation_space == OBSERVATIONS


# -- renewing and closing -------------------------------------------------------------------------


def test_renewing_closes_the_env_and_builds_another() -> None:
    harness = launched()
    old, harness.env = harness.env, ScriptedEnv()
    only(harness.run(Op.RENEW), Op.HELLO)
    assert old.closed == 1
    assert harness.built == 2
    harness.reset()
    assert harness.env.log == [("reset", {})]


def test_a_renewed_env_has_no_plan_of_its_predecessor() -> None:
    harness = launched(step(done=True))
    harness.run(Op.RENEW)
    assert only(harness.run(Op.STEP, 0), Op.STEPPED)[4] == AfterStep.NOTHING


def test_a_renewal_that_fails_is_reported() -> None:
    harness = launched()
    harness.env = RuntimeError("no more")
    failure = failure_of(harness.run(Op.RENEW))
    assert (failure.kind, failure.during) == (FailureKind.RAISED, "construction")


def test_the_env_is_closed_once() -> None:
    harness = launched()
    harness.host.close()
    harness.host.close()
    assert harness.env.closed == 1


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_close_raises_ends_there(error: BaseException) -> None:
    harness = launched()

    def close() -> None:
        raise error

    harness.env.close = close
    harness.host.close()
    harness.env = ScriptedEnv()
    only(harness.run(Op.RENEW), Op.HELLO)


def test_closing_what_was_never_built() -> None:
    Harness(ScriptedEnv()).host.close()


# -- calls and attributes -------------------------------------------------------------------------


def test_a_call_returns_what_the_method_did() -> None:
    assert only(launched().run(Op.CALL, ("double", (4,))), Op.RESULT) == 8


@pytest.mark.parametrize(
    ("name", "kind", "type_name"),
    [
        ("raises", FailureKind.RAISED, "ValueError"),
        ("lacks", FailureKind.RAISED, "AttributeError"),
        ("nothing_of_this_name", FailureKind.RAISED, "AttributeError"),
    ],
)
def test_a_call_that_fails_is_reported_as_a_call(
    name: str, kind: FailureKind, type_name: str
) -> None:
    failure = failure_of(launched().run(Op.CALL, (name, ())))
    assert (failure.kind, failure.during, failure.type_name) == (kind, "call", type_name)


def test_a_call_that_ends_the_process_says_so() -> None:
    harness = launched()
    harness.env.leave = lambda: (_ for _ in ()).throw(SystemExit(3))
    assert failure_of(harness.run(Op.CALL, ("leave", ()))).kind is FailureKind.EXITED


def test_attributes_are_read_and_methods_only_named() -> None:
    harness = launched()
    harness.env.colour = "red"
    assert only(harness.run(Op.GET_ATTR, "colour"), Op.RESULT) == Attribute(False, "red")
    assert only(harness.run(Op.GET_ATTR, "double"), Op.RESULT) == Attribute(True, None)
    harness.env.count = len
    assert only(harness.run(Op.GET_ATTR, "count"), Op.RESULT) == Attribute(True, None)
    harness.env.plain = lambda: 1
    assert only(harness.run(Op.GET_ATTR, "plain"), Op.RESULT) == Attribute(True, None)


def test_an_attribute_that_is_not_there_has_a_kind_of_its_own() -> None:
    failure = failure_of(launched().run(Op.GET_ATTR, "colour"))
    assert failure.kind is FailureKind.NO_ATTRIBUTE
    assert "colour" in failure.message


def test_attributes_are_set() -> None:
    harness = launched()
    for colour, is_new in (("blue", True), ("red", False)):
        assert only(harness.run(Op.SET_ATTR, ("colour", colour)), Op.RESULT) is is_new
        assert harness.env.colour == colour
    failure = failure_of(harness.run(Op.SET_ATTR, ("__class__", 7)))
    assert (failure.kind, failure.during) == (FailureKind.RAISED, "call")


# -- spares ---------------------------------------------------------------------------------------


def kept_by(harness: Harness, *, seed: int | None = None) -> list[Message]:
    """Reset the env of a spare."""
    plan = EpisodePlan(False, 0, {})
    return harness.run(Op.RESET, ResetRequest({}, seed, None, plan, keeps=True))


def adopted(harness: Harness, env_id: int, placement: Any = None) -> list[Message]:
    """Have a host serve another env_id, and await what came of the reset that it kept."""
    return harness.handle(Message(Op.ADOPT, env_id, 4, 77, placement))


def test_what_a_reset_gave_is_kept_until_the_env_is_adopted() -> None:
    placements, nbytes = plan_placements([codec_of(OBSERVATIONS).layout] * 2, COPIED)
    memory = bytearray(nbytes)
    env = ScriptedEnv(step(5.0))
    env.resets, env.reset_info = [np.full(2, 7, np.float32)], {"level": 2}
    harness = Harness(env, memory=memory)
    harness.build()
    assert only(kept_by(harness, seed=8), Op.RESET_DONE) is None
    assert env.log == [("seed", 8, "not given"), ("reset", {})]
    assert not any(memory)

    (reply,) = adopted(harness, 1, placements[1])
    assert reply == Message(Op.RESET_DONE, 1, 4, 77, (2, {"level": 2}))
    rows = np.frombuffer(memory, np.float32).reshape(-1)[: 4 * 2 * 2].reshape(4, 2, 2)
    assert rows[2, 1].tolist() == [7, 7]
    (stepped,) = harness.handle(Message(Op.STEP, 1, 4, 78, 0))
    assert stepped.payload[0] == 0
    assert rows[0, 1].tolist() == [5, 5]
    (failed,) = harness.handle(Message(Op.STEP, 3, 4, 79, 0))
    assert failed.payload.kind is FailureKind.PROTOCOL
    assert env.log[2:] == [("step", 0)]


def test_what_was_kept_travels_in_the_reply_where_there_is_no_shared_memory() -> None:
    env = ScriptedEnv()
    env.resets = [np.full(2, 7, np.float32)]
    harness = Harness(env)
    harness.build()
    kept_by(harness)
    reference, info = only(adopted(harness, 0), Op.RESET_DONE)
    assert numbers(reference) == [7, 7]
    assert info == {}


@pytest.mark.parametrize("bad", [ValueError("no"), np.zeros(3, np.float32), SystemExit(2)])
def test_a_reset_that_failed_is_reported_at_once_and_again_when_the_env_is_adopted(
    bad: Any,
) -> None:
    placements, nbytes = plan_placements([codec_of(OBSERVATIONS).layout], COPIED)
    env = ScriptedEnv()
    env.resets = [bad]
    harness = Harness(env, memory=bytearray(nbytes))
    harness.build()
    failure = failure_of(kept_by(harness))
    (reply,) = adopted(harness, 0, placements[0])
    assert reply == Message(Op.FAILED, 0, 4, 77, failure)
    again = ResetRequest({}, None, None, EpisodePlan(False, 0, {}))
    (done,) = harness.handle(Message(Op.RESET, 0, 4, 78, again))
    assert done.payload[0] == 2  # it has been attached all the same


def test_a_seed_that_fails_is_the_failure_of_the_reset_that_is_kept() -> None:
    env = ScriptedEnv()
    env.seed = raising  # type: ignore[method-assign]
    harness = Harness(env)
    harness.build()
    failure = failure_of(kept_by(harness, seed=1))
    assert failure_of(adopted(harness, 0)) == failure


def raising(*args: Any) -> None:
    raise ValueError("inside")


def test_who_is_adopted_without_a_reset_says_so() -> None:
    harness = launched()
    assert failure_of(adopted(harness, 0)).kind is FailureKind.PROTOCOL


def test_an_env_that_becomes_a_spare_writes_into_shared_memory_no_more() -> None:
    placements, nbytes = plan_placements([codec_of(OBSERVATIONS).layout], COPIED)
    memory = bytearray(nbytes)
    env = ScriptedEnv()
    harness = Harness(env, memory=memory)
    harness.build()
    harness.run(Op.ATTACH, placements[0])
    harness.reset()
    env.resets = [np.full(2, 7, np.float32)]
    assert harness.handle(Message(Op.ADOPT, 9, 1, 0, None)) == []
    order = ResetRequest({}, None, None, EpisodePlan(False, 0, {}), keeps=True)
    (reply,) = harness.handle(Message(Op.RESET, 9, 1, 5, order))
    assert reply == Message(Op.RESET_DONE, 9, 1, 5, None)
    assert not any(memory)


def test_a_cast_in_a_reset_that_is_kept_is_noticed_when_the_env_is_adopted() -> None:
    env = ScriptedEnv()
    env.resets = [np.zeros(2, np.float64)]
    harness = Harness(env)
    harness.build()
    assert [reply.op for reply in kept_by(harness)] == [Op.RESET_DONE]
    assert [reply[:2] for reply in adopted(harness, 0)] == [(Op.NOTICE, 0), (Op.RESET_DONE, 0)]


# -- several envs ---------------------------------------------------------------------------------

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
        return self.run(env_id, Op.RESET, ResetRequest({}, None, None, PLAN))

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
    assert len(host.host.pending_resets) == 2
    assert host.envs[1].log == [("step", 0)]
    assert host.postponed() == [(1, first.request_id, Op.RESET_DONE)]
    assert host.envs[1].log == [("step", 0), ("reset", {"later": 1})]
    assert host.envs[0].log == [("step", 0)]
    assert [env_id for env_id, _, _ in host.postponed()] == [0]
    assert not host.host.pending_resets


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
    assert not host.host.pending_resets


def _raise() -> None:
    raise RuntimeError("no")


def test_episodes_are_counted_over_all_envs_and_a_worn_host_stays_so() -> None:
    endings = [step(done=True)] * 3
    host = SharedHost(ScriptedEnv(*endings), ScriptedEnv(*endings), max_episodes=3)
    afters = []
    for env_id in (0, 1, 0, 1):
        host.step(env_id)
        afters.append(host.replies[0].payload[4])
        while host.host.pending_resets:
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


@pytest.mark.parametrize(
    ("op", "payload", "answer"),
    [
        (Op.RENEW, None, Op.HELLO),
        (Op.STEP, 0, Op.STEPPED),
        (Op.RESET, ResetRequest({}, None, None, PLAN), Op.RESET_DONE),
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


# -- rules of observations ------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [np.nan, np.inf, np.array([1.0, np.nan]), {"a": 1, "b": np.nan}])
def test_non_finite_rewards_are_refused_only_if_so_ruled(reward: Any) -> None:
    only(launched(step(reward=reward)).run(Op.STEP, 0), Op.STEPPED)
    harness = launched(step(reward=reward), refuse_non_finite_rewards=True)
    failure = failure_of(harness.run(Op.STEP, 0))
    assert failure.kind is FailureKind.NON_FINITE
    assert "nan_policy" in failure.message


def test_finite_rewards_pass_the_rule() -> None:
    for reward in (1, 0.5, np.float32(2), np.array([1.0, 2.0]), {"a": 1}):
        harness = launched(step(reward=reward), refuse_non_finite_rewards=True)
        only(harness.run(Op.STEP, 0), Op.STEPPED)


def test_non_finite_observations_are_refused_if_so_ruled() -> None:
    harness = launched(step(np.nan), rules=ObservationRules(refuse_non_finite=True))
    assert failure_of(harness.run(Op.STEP, 0)).kind is FailureKind.NON_FINITE


def test_a_cast_is_noticed_once_before_the_reply_it_belongs_to() -> None:
    wide = step()._replace(obs=np.zeros(2))
    harness = launched(wide, wide)
    notice, stepped = harness.run(Op.STEP, 0)
    assert notice.op == Op.NOTICE
    assert "dtype float64, the space says float32" in notice.payload
    assert stepped.op == Op.STEPPED
    only(harness.run(Op.STEP, 0), Op.STEPPED)


def test_strict_dtypes_are_a_breach_of_the_protocol() -> None:
    wide = step()._replace(obs=np.zeros(2))
    harness = launched(wide, rules=ObservationRules(strict_dtype=True))
    assert failure_of(harness.run(Op.STEP, 0)).kind is FailureKind.PROTOCOL


def test_observations_without_layout_travel_as_they_are() -> None:
    env = ScriptedEnv(step()._replace(obs=(1, 2)), step()._replace(obs=(5,)))
    env.observation_space = Sequence(Discrete(3))
    env.resets = [(0,)]
    harness = Harness(env)
    harness.build()
    assert only(harness.reset(), Op.RESET_DONE)[0] == (0,)
    assert only(harness.run(Op.STEP, 0), Op.STEPPED)[0] == (1, 2)
    assert failure_of(harness.run(Op.STEP, 0)).kind is FailureKind.PROTOCOL


# -- shared memory --------------------------------------------------------------------------------


def test_after_attach_replies_name_slots() -> None:
    layout = codec_of(OBSERVATIONS).layout
    placements, nbytes = plan_placements([layout] * 2, COPIED)
    memory = bytearray(nbytes)
    harness = Harness(ScriptedEnv(*[step(n) for n in range(1, 4)]), memory=memory)
    harness.build()
    assert harness.run(Op.ATTACH, placements[1]) == []  # nobody waits for a reply
    assert only(harness.reset(), Op.RESET_DONE)[0] == 2
    slots = [only(harness.run(Op.STEP, 0), Op.STEPPED)[0] for _ in range(3)]
    assert slots == [0, 1, 0]
    rows = np.frombuffer(memory, np.float32).reshape(-1)[: 4 * 2 * 2].reshape(4, 2, 2)
    assert rows[:2, 1].tolist() == [[3, 3], [2, 2]]
    assert not rows[:, 0].any()


def test_replies_carry_what_has_a_buffer_where_the_parent_has_another_memory() -> None:
    placements, nbytes = plan_placements([codec_of(OBSERVATIONS).layout], COPIED)
    harness = Harness(ScriptedEnv(step(3)), memory=bytearray(nbytes), carries=True)
    harness.build()
    harness.run(Op.ATTACH, placements[0])
    assert only(harness.reset(), Op.RESET_DONE)[0] == [np.zeros(2, np.float32).tobytes()]
    carried = only(harness.run(Op.STEP, 0), Op.STEPPED)[0]
    assert carried == [np.full(2, 3, np.float32).tobytes()]


def test_a_renewed_env_writes_into_the_reply_until_it_is_attached_again() -> None:
    placements, nbytes = plan_placements([codec_of(OBSERVATIONS).layout], COPIED)
    harness = Harness(ScriptedEnv(), memory=bytearray(nbytes))
    harness.build()
    harness.run(Op.ATTACH, placements[0])
    assert only(harness.reset(), Op.RESET_DONE)[0] == 2
    harness.run(Op.RENEW)
    assert isinstance(only(harness.reset(), Op.RESET_DONE)[0], list)
    harness.run(Op.ATTACH, placements[0])
    assert only(harness.reset(), Op.RESET_DONE)[0] == 2


def test_attaching_where_nothing_was_built_does_nothing() -> None:
    placements, nbytes = plan_placements([codec_of(OBSERVATIONS).layout], COPIED)
    harness = Harness(RuntimeError("no"), memory=bytearray(nbytes))
    harness.build()
    assert harness.run(Op.ATTACH, placements[0]) == []


# -- env objects that are in use ------------------------------------------------------------------


class Wrapping(ScriptedEnv):
    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.unwrapped = inside


def test_one_object_serves_one_env_whatever_wraps_it() -> None:
    used, first, second = EnvsInUse(), SimpleNamespace(env_id=0), SimpleNamespace(env_id=1)
    env = ScriptedEnv()
    used.claim(env, first)
    used.claim(env, first)
    with pytest.raises(EnvContractError, match="env 1 returned the env that serves env 0"):
        used.claim(env, second)
    with pytest.raises(EnvContractError, match="a wrapper of the env ScriptedEnv that serves env"):
        used.claim(Wrapping(env), second)
    with pytest.raises(EnvContractError, match="that is that of an earlier generation"):
        used.claim(env, SimpleNamespace(env_id=0))
    used.release(first)
    used.claim(Wrapping(env), second)


def test_a_host_refuses_what_another_host_of_its_process_runs() -> None:
    shared, env = EnvsInUse(), ScriptedEnv()
    first = Harness(env, envs_in_use=shared)
    first.build()
    second = Harness(env, envs_in_use=shared)
    assert failure_of(second.build()).kind == FailureKind.PROTOCOL
    assert env.closed == 0, "the first one runs it"
    first.run(Op.RELEASE)
    assert only(second.build(), Op.HELLO)


def test_an_env_that_was_not_built_has_ended_no_episode() -> None:
    host = SharedHost(ScriptedEnv(step(done=True)), RuntimeError("boom"), max_episodes=1)
    host.step(0)
    assert host.replies[0].payload[4] == AfterStep.WANTS_RECYCLING
    host = SharedHost(ScriptedEnv(step(done=True)), RuntimeError("boom"), max_episodes=2)
    host.step(0)
    assert host.replies[0].payload[4] == AfterStep.RESETS
