"""The child side: which replies follow a request, in which order, and what failures become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, Text

from envmgr.core.observations import ObservationReader
from envmgr.spaces import codec_of
from envmgr.types import EnvTimestep
from envmgr.wire.arenas import COPIED, ObservationRules, plan_placements
from envmgr.wire.frames import FrameError, encode
from envmgr.wire.hosts import HostSettings
from envmgr.wire.messages import (
    AfterStep,
    Attribute,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    RemoteFailure,
    ResetOrder,
)
from envmgr.worker.applied import AppliedEnv
from envmgr.worker.host import Host

OBSERVATIONS = Box(-100, 100, (2,), np.float32)
ACTIONS = Discrete(3)


def numbers(reference: Any) -> list[float]:
    """Return the observation that a reply by message carries."""
    found: list[float] = ObservationReader(OBSERVATIONS).read(reference).tolist()
    return found


class ScriptedEnv:
    """Does what its script says: each step takes the next entry.

    An entry is an `EnvTimestep`, or an exception to raise.
    """

    observation_space: Any = OBSERVATIONS
    action_space: Any = ACTIONS
    metadata: Any = {"name": "scripted"}  # noqa: RUF012 - as gymnasium's envs have it

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.log: list[Any] = []
        self.resets: list[Any] = []
        self.reset_info: Any = {}
        self.closed = 0

    def reset(self, **params: Any) -> Any:
        self.log.append(("reset", params))
        result = self.resets.pop(0) if self.resets else np.zeros(2, np.float32)
        if isinstance(result, BaseException):
            raise result
        return result

    def step(self, action: Any) -> Any:
        self.log.append(("step", action))
        result = self.script.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result

    def seed(self, seed: int, dynamic_seed: Any = "not given") -> None:
        self.log.append(("seed", seed, dynamic_seed))

    def close(self) -> None:
        self.closed += 1

    def double(self, number: int) -> int:
        return 2 * number

    def raises(self) -> None:
        raise ValueError("inside")

    def lacks(self) -> None:
        raise AttributeError("inside")


def step(value: float = 0.0, reward: Any = 1.0, done: bool = False, info: Any = None) -> Any:
    obs = np.full(2, value, np.float32)
    return EnvTimestep(obs, reward, done, {} if info is None else info)


class Harness:
    """A host whose replies are not encoded.

    Args:
        env: what the factory returns; an exception is raised by it.
        encode: in place of the identity.
        memory: what the host finds as shared memory.
        **settings: fields of `HostSettings`.
    """

    def __init__(
        self,
        env: Any,
        *,
        encode: Callable[[Message], Any] = lambda message: message,
        memory: Any = None,
        rss_bytes: Callable[[], int] = lambda: 0,
        **settings: Any,
    ) -> None:
        self.env = env
        self.built = 0
        self.sent: list[Message] = []
        self.host = Host(
            {3: self._build},
            HostSettings(**settings),
            encode=encode,
            send=self.sent.append,
            memory=lambda nbytes: memory,
            rss_bytes=rss_bytes,
        )
        self._request_id = 0

    def _build(self) -> Any:
        self.built += 1
        if isinstance(self.env, BaseException):
            raise self.env
        return self.env

    def message(self, op: Op, payload: Any = None) -> Message:
        self._request_id += 1
        return Message(op, 3, 1, self._request_id, payload)

    def build(self) -> Any:
        return self.handle(self.message(Op.HELLO))

    def handle(self, message: Message) -> list[Any]:
        """Run a request, and the reset that may follow it, and return what was sent."""
        self.sent.clear()
        self.host.handle(message)
        self.host.run_resets(1)
        return list(self.sent)

    def run(self, op: Op, payload: Any = None) -> list[Message]:
        request = self.message(op, payload)
        replies = self.handle(request)
        for reply in replies:  # every reply says what it answers
            assert reply[1:4] == request[1:4]
        return replies

    def reset(
        self,
        params: dict[str, Any] | None = None,
        *,
        seed: int | None = None,
        dynamic_seed: bool | None = None,
        auto_reset: bool = True,
        left: float = float("inf"),
        later_params: dict[str, Any] | None = None,
    ) -> list[Message]:
        plan = EpisodePlan(auto_reset, left, later_params or {})
        return self.run(Op.RESET, ResetOrder(params or {}, seed, dynamic_seed, plan))


def launched(*script: Any, **options: Any) -> Harness:
    """Return a host whose env is built and has been reset."""
    harness = Harness(ScriptedEnv(*script), **options)
    harness.build()
    harness.reset()
    harness.env.log.clear()
    return harness


def only(replies: list[Message], op: Op) -> Any:
    """Return the payload of the one reply, which has to be an `op`."""
    assert [reply.op for reply in replies] == [op]
    return replies[0].payload


def failure_of(replies: list[Message]) -> RemoteFailure:
    failure = only(replies, Op.FAILED)
    assert isinstance(failure, RemoteFailure)
    return failure


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


def test_metadata_that_cannot_be_sent_is_left_out() -> None:
    env = ScriptedEnv()
    env.metadata = {"generator": (n for n in ())}
    harness = Harness(env, encode=lambda m: (encode(m), m)[1])
    described = only(harness.build(), Op.HELLO)
    assert described.metadata is None
    assert described.observation_space == OBSERVATIONS


# -- resets ---------------------------------------------------------------------------------------


def test_a_reset_passes_params_and_returns_observation_and_info() -> None:
    harness = launched()
    harness.env.resets = [np.array([1, 2], np.float32)]
    harness.env.reset_info = {"level": 3}
    reference, info = only(harness.reset({"level": 3}), Op.RESET_DONE)
    assert numbers(reference) == [1, 2]
    assert info == {"level": 3}
    assert harness.env.log == [("reset", {"level": 3})]


def test_a_seed_is_set_before_the_reset() -> None:
    harness = launched()
    harness.reset(seed=7)
    harness.reset(seed=8, dynamic_seed=True)
    harness.reset(seed=0, dynamic_seed=False)
    assert harness.env.log == [
        ("seed", 7, "not given"),
        ("reset", {}),
        ("seed", 8, True),
        ("reset", {}),
        ("seed", 0, False),
        ("reset", {}),
    ]


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (RuntimeError("boom"), FailureKind.RAISED),
        (SystemExit(3), FailureKind.EXITED),
        (KeyboardInterrupt(), FailureKind.EXITED),
        (GeneratorExit(), FailureKind.RAISED),
        (np.zeros(3, np.float32), FailureKind.PROTOCOL),
        (None, FailureKind.PROTOCOL),
        ("text", FailureKind.PROTOCOL),
    ],
    ids=lambda x: str(x)[:20],
)
def test_a_reset_that_fails_is_reported_and_the_next_one_works(
    result: Any, kind: FailureKind
) -> None:
    harness = launched()
    harness.env.resets = [result]
    failure = failure_of(harness.reset())
    assert (failure.kind, failure.during) == (kind, "reset")
    only(harness.reset(), Op.RESET_DONE)


def test_an_error_in_seed_counts_as_the_resets() -> None:
    harness = launched()
    harness.env.seed = _raise_type_error
    failure = failure_of(harness.reset(seed=7))
    assert (failure.kind, failure.during) == (FailureKind.RAISED, "reset")
    assert failure.type_name == "TypeError"
    assert harness.env.log == []


def _raise_type_error(*args: Any) -> None:
    raise TypeError("no seeds here")


# -- steps ----------------------------------------------------------------------------------------


def test_a_step_returns_what_the_env_did() -> None:
    harness = launched(step(5, 0.25, False, {"k": 1}))
    reference, reward, done, info, after = only(harness.run(Op.STEP, 2), Op.STEPPED)
    assert numbers(reference) == [5, 5]
    assert (reward, done, info) == (0.25, False, {"k": 1})
    assert after == AfterStep.NOTHING
    assert harness.env.log == [("step", 2)]


@pytest.mark.parametrize("done", [np.bool_(True), 1, np.array([True])])
def test_done_is_a_bool_whatever_the_env_gives(done: Any) -> None:
    harness = Harness(ScriptedEnv(step(done=done)))
    harness.build()
    harness.reset(auto_reset=False)
    payload = only(harness.run(Op.STEP, 0), Op.STEPPED)
    assert payload[2] is True


@pytest.mark.parametrize(
    ("result", "kind", "text"),
    [
        (ValueError("boom"), FailureKind.RAISED, "boom"),
        (SystemExit("bye"), FailureKind.EXITED, "bye"),
        (KeyboardInterrupt(), FailureKind.EXITED, ""),
        (7, FailureKind.PROTOCOL, "should return an EnvTimestep"),
        (step()._replace(obs=np.zeros(3)), FailureKind.PROTOCOL, "has shape (3,)"),
        (step()._replace(obs=None), FailureKind.PROTOCOL, "value is None"),
        (step()._replace(reward=None), FailureKind.PROTOCOL, "the reward is None"),
        (step()._replace(info=7), FailureKind.PROTOCOL, "should be a dict"),
        (step()._replace(done="?", obs=None), FailureKind.PROTOCOL, ""),
        (step(info={"abnormal": True, "why": "lost"}), FailureKind.ABNORMAL, ""),
        (step(done=True, info={"abnormal": 1}), FailureKind.ABNORMAL, ""),
        (step(info=[{}, {"abnormal": True}]), FailureKind.ABNORMAL, ""),
        (step(info={"abnormal": True})._replace(obs=None), FailureKind.ABNORMAL, ""),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_step_that_fails_is_reported_once_and_nothing_follows(
    result: Any, kind: FailureKind, text: str
) -> None:
    harness = launched(result, step(5))
    failure = failure_of(harness.run(Op.STEP, 0))
    assert (failure.kind, failure.during) == (kind, "step")
    assert text in failure.message
    assert harness.env.log == [("step", 0)]
    only(harness.run(Op.STEP, 1), Op.STEPPED)


def test_the_info_of_a_step_that_the_env_calls_abnormal_travels() -> None:
    info = {"abnormal": True, "why": "lost"}
    assert failure_of(launched(step(info=info)).run(Op.STEP, 0)).info == info


def test_a_step_before_anything_was_built_is_reported() -> None:
    harness = Harness(RuntimeError("no"))
    harness.build()
    assert failure_of(harness.run(Op.STEP, 0)).during == "step"
    assert failure_of(harness.reset()).during == "reset"


def test_a_function_is_applied_to_the_env_and_what_is_known_of_it() -> None:
    harness = launched(step(4))
    harness.reset(later_params={"level": 2})

    def look(applied: AppliedEnv, number: int) -> Any:
        obs, *_ = applied.step_result(1)
        same = applied.env is harness.env
        return same, applied.action_space, dict(applied.reset_params), obs[0] + number

    (reply,) = harness.run(Op.APPLY, (look, (3,)))
    assert reply.op == Op.RESULT
    assert reply.payload == (True, ACTIONS, {"level": 2}, 7)


@pytest.mark.parametrize("error", [ValueError("no"), AttributeError("no"), SystemExit(3)])
def test_what_an_applied_function_raises_is_reported(error: BaseException) -> None:
    def fail(applied: AppliedEnv) -> None:
        raise error

    failure = failure_of(launched().run(Op.APPLY, (fail, ())))
    assert (failure.during, failure.type_name) == ("call", type(error).__name__)


def test_an_unknown_operation_is_reported() -> None:
    request = Message(42, 3, 1, 9, None)
    (reply,) = launched().handle(request)
    assert reply[:4] == (Op.FAILED, 3, 1, 9)
    assert reply.payload.kind is FailureKind.PROTOCOL
    assert "unknown operation 42" in reply.payload.message


# -- the end of an episode ------------------------------------------------------------------------


def test_the_reply_to_a_step_is_out_before_the_next_reset_runs() -> None:
    harness = launched(step(9, done=True))
    harness.sent.clear()
    harness.host.handle(harness.message(Op.STEP, 0))
    assert [reply.op for reply in harness.sent] == [Op.STEPPED]
    assert harness.env.log == [("step", 0)]  # nothing has been reset yet
    harness.host.run_resets(1)
    assert [reply.op for reply in harness.sent] == [Op.STEPPED, Op.RESET_DONE]
    assert harness.env.log == [("step", 0), ("reset", {})]
    assert not harness.host.resets


def test_an_episodes_end_resets_with_the_plans_params_and_answers_the_same_request() -> None:
    harness = launched(step(9, done=True))
    harness.reset({"first": 1}, later_params={"later": 2})
    harness.env.log.clear()
    harness.env.resets = [np.array([1, 1], np.float32)]
    stepped, reset = harness.run(Op.STEP, 0)
    assert numbers(stepped.payload[0]) == [9, 9]  # the terminal observation
    assert stepped.payload[4] == AfterStep.RESETS
    assert reset.op == Op.RESET_DONE
    assert numbers(reset.payload[0]) == [1, 1]  # the next episode's first
    assert harness.env.log == [("step", 0), ("reset", {"later": 2})]


def test_no_seed_is_set_at_automatic_resets() -> None:
    harness = launched(step(done=True))
    harness.reset(seed=7)
    harness.env.log.clear()
    harness.run(Op.STEP, 0)
    assert [entry[0] for entry in harness.env.log] == ["step", "reset"]


def test_without_auto_reset_nothing_follows_an_episodes_end() -> None:
    harness = launched(step(done=True))
    harness.reset(auto_reset=False)
    assert only(harness.run(Op.STEP, 0), Op.STEPPED)[4] == AfterStep.NOTHING


@pytest.mark.parametrize("left", [0, 1, 3])
def test_the_plan_counts_the_episodes_that_may_still_begin(left: int) -> None:
    harness = launched(*[step(done=True)] * (left + 1))
    harness.reset(left=left)
    afters = []
    for _ in range(left + 1):
        stepped, *_ = harness.run(Op.STEP, 0)
        afters.append(stepped.payload[4])
    assert afters == [AfterStep.RESETS] * left + [AfterStep.NOTHING]


def test_a_new_reset_order_replaces_the_plan() -> None:
    harness = launched(step(done=True), step(done=True))
    harness.reset(left=0)
    harness.reset(left=1)
    stepped, _ = harness.run(Op.STEP, 0)
    assert stepped.payload[4] == AfterStep.RESETS
    assert only(harness.run(Op.STEP, 0), Op.STEPPED)[4] == AfterStep.NOTHING


def test_a_reset_that_fails_after_a_step_leaves_the_steps_reply_as_it_was() -> None:
    harness = launched(step(9, done=True))
    harness.env.resets = [RuntimeError("boom")]
    stepped, failed = harness.run(Op.STEP, 0)
    assert stepped.op == Op.STEPPED
    assert failed.op == Op.FAILED
    assert failed.payload.during == "reset"
    only(harness.reset(), Op.RESET_DONE)  # the retry


def test_a_step_that_fails_at_an_episodes_end_begins_no_episode() -> None:
    harness = launched(step(done=True)._replace(reward=None))
    failure_of(harness.run(Op.STEP, 0))
    assert harness.env.log == [("step", 0)]


# -- recycling ------------------------------------------------------------------------------------


def test_a_worker_asks_to_be_replaced_after_so_many_episodes() -> None:
    harness = launched(*[step(done=True)] * 3, max_episodes=3)
    afters = [harness.run(Op.STEP, 0)[0].payload[4] for _ in range(3)]
    assert afters == [AfterStep.RESETS, AfterStep.RESETS, AfterStep.WANTS_RECYCLING]
    assert harness.env.log[-1] == ("step", 0)  # it does not reset what is to be replaced


def test_a_worker_asks_to_be_replaced_when_it_is_too_large_and_only_at_an_episodes_end() -> None:
    rss = [100]
    script = [step(), step(done=True), step(), step(done=True)]
    harness = launched(*script, max_rss_bytes=100, rss_bytes=lambda: rss[0])
    assert harness.run(Op.STEP, 0)[0].payload[4] == AfterStep.NOTHING
    assert harness.run(Op.STEP, 0)[0].payload[4] == AfterStep.RESETS
    rss[0] = 101
    assert harness.run(Op.STEP, 0)[0].payload[4] == AfterStep.NOTHING
    assert only(harness.run(Op.STEP, 0), Op.STEPPED)[4] == AfterStep.WANTS_RECYCLING


def test_a_worker_asks_without_auto_reset_too() -> None:
    harness = launched(step(done=True), max_episodes=1)
    harness.reset(auto_reset=False)
    assert only(harness.run(Op.STEP, 0), Op.STEPPED)[4] == AfterStep.WANTS_RECYCLING


def test_a_renewed_env_counts_its_own_episodes() -> None:
    harness = launched(*[step(done=True)] * 4, max_episodes=2)
    harness.run(Op.STEP, 0)
    harness.run(Op.RENEW)
    harness.reset()
    assert harness.run(Op.STEP, 0)[0].payload[4] == AfterStep.RESETS
    assert harness.run(Op.STEP, 0)[0].payload[4] == AfterStep.WANTS_RECYCLING


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
    assert only(harness.run(Op.SET_ATTR, ("colour", "blue")), Op.RESULT) is None
    assert harness.env.colour == "blue"
    failure = failure_of(harness.run(Op.SET_ATTR, ("__class__", 7)))
    assert (failure.kind, failure.during) == (FailureKind.RAISED, "call")


# -- what cannot be sent --------------------------------------------------------------------------


def unsendable(message: Message) -> Message:
    """Encode as workers do, and hand the message on."""
    encode(message)
    return message


@pytest.mark.parametrize(
    ("op", "payload", "during"),
    [(Op.CALL, ("give", ()), "call"), (Op.GET_ATTR, "held", "call")],
)
def test_results_that_cannot_be_sent_are_reported(op: Op, payload: Any, during: str) -> None:
    harness = launched(encode=unsendable)
    harness.env.awaits_reset = (n for n in ())
    harness.env.give = lambda: harness.env.awaits_reset
    failure = failure_of(harness.run(op, payload))
    assert (failure.kind, failure.during) == (FailureKind.PROTOCOL, during)


def test_infos_that_cannot_be_sent_are_reported() -> None:
    harness = launched(step(info={"g": (n for n in ())}), encode=unsendable)
    failure = failure_of(harness.run(Op.STEP, 0))
    assert (failure.kind, failure.during) == (FailureKind.PROTOCOL, "step")
    harness.env.reset_info = {"g": (n for n in ())}
    failure = failure_of(harness.reset())
    assert (failure.kind, failure.during) == (FailureKind.PROTOCOL, "reset")


def test_an_abnormal_info_that_cannot_be_sent_is_still_an_abnormal_step() -> None:
    info = {"abnormal": True, "g": (n for n in ())}
    failure = failure_of(launched(step(info=info), encode=unsendable).run(Op.STEP, 0))
    assert failure.kind is FailureKind.ABNORMAL
    assert failure.info is None
    assert "its info cannot be sent" in failure.message


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
    env = ScriptedEnv(step()._replace(obs="abc"), step()._replace(obs="too long"))
    env.observation_space = Text(5)
    env.resets = ["first"]
    harness = Harness(env)
    harness.build()
    assert only(harness.reset(), Op.RESET_DONE)[0] == "first"
    assert only(harness.run(Op.STEP, 0), Op.STEPPED)[0] == "abc"
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


def test_replies_carry_what_has_a_place_where_the_parent_has_another_memory() -> None:
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


# -- spares ---------------------------------------------------------------------------------------


def kept_by(harness: Harness, *, seed: int | None = None) -> list[Message]:
    """Reset the env of a spare."""
    plan = EpisodePlan(False, 0, {})
    return harness.run(Op.RESET, ResetOrder({}, seed, None, plan, keeps=True))


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
    again = ResetOrder({}, None, None, EpisodePlan(False, 0, {}))
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
    order = ResetOrder({}, None, None, EpisodePlan(False, 0, {}), keeps=True)
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


# -- what passes through --------------------------------------------------------------------------


class Interrupted(BaseException):
    """Stands for what the in-line transport raises in env code."""


@pytest.mark.parametrize("where", ["step", "reset", "seed", "call", "close", "build"])
def test_what_is_not_the_envs_passes_through(where: str) -> None:
    harness = launched(Interrupted(), propagate=(Interrupted,))

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise Interrupted

    if where == "build":
        harness.env = Interrupted()
    elif where != "step":
        setattr(harness.env, where, interrupt)
    requests: dict[str, Callable[[], Any]] = {
        "step": lambda: harness.run(Op.STEP, 0),
        "reset": harness.reset,
        "seed": lambda: harness.reset(seed=1),
        "call": lambda: harness.run(Op.CALL, ("call", ())),
        "close": harness.host.close,
        "build": harness.build,
    }
    with pytest.raises(Interrupted):
        requests[where]()


def test_frame_errors_of_the_protocol_itself_are_not_hidden() -> None:
    def refuse(message: Message) -> Any:
        raise FrameError("nothing can be sent")

    with pytest.raises(FrameError):
        Harness(ScriptedEnv(), encode=refuse).build()
