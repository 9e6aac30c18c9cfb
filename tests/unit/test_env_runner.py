"""How an env is stepped and reset, how its episodes end, and what its failures become."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete

import envmgr
from envmgr import BaseEnv
from envmgr.hot import hot
from envmgr.types import EnvTimestep
from envmgr.wire.arenas import ObservationRules
from envmgr.wire.frames import FrameError
from envmgr.wire.messages import (
    AfterStep,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    ResetRequest,
    SavedEnv,
)
from envmgr.worker.applied import AppliedEnv
from envmgr.worker.env_runner import EnvRunner
from tests.unit.host_rigs import (
    ACTIONS,
    OBS,
    PLAN,
    BlockEnv,
    BlockRig,
    Harness,
    ScriptedEnv,
    block_step,
    failure_of,
    launched,
    numbers,
    only,
    step,
)

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
    assert not harness.host.pending_resets


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


def leaving(harness: Any) -> list[Message]:
    """Have an env be reset in the midst of an episode."""
    plan = EpisodePlan(True, float("inf"), {})
    return list(harness.run(Op.RESET, ResetRequest({}, None, None, plan, leaves=True)))


def test_an_episode_that_is_left_is_one_of_those_after_which_a_worker_is_replaced() -> None:
    harness = launched(step(), step(), max_episodes=2)
    harness.run(Op.STEP, 0)
    assert leaving(harness)[0].op == Op.RESET_DONE
    harness.run(Op.STEP, 0)
    assert only(leaving(harness), Op.WORN) is None
    assert harness.env.log[-1] == ("step", 0)  # it does not reset what is to be replaced
    assert harness.reset()[0].op == Op.RESET_DONE  # but if it is told to, its neighbours play on


def test_a_worker_that_is_too_large_says_so_when_an_episode_is_left() -> None:
    harness = launched(step(), max_rss_bytes=100, rss_bytes=lambda: 101)
    harness.run(Op.STEP, 0)
    assert only(leaving(harness), Op.WORN) is None


def test_a_renewed_env_counts_its_own_episodes() -> None:
    harness = launched(*[step(done=True)] * 4, max_episodes=2)
    harness.run(Op.STEP, 0)
    harness.run(Op.RENEW)
    harness.reset()
    assert harness.run(Op.STEP, 0)[0].payload[4] == AfterStep.RESETS
    assert harness.run(Op.STEP, 0)[0].payload[4] == AfterStep.WANTS_RECYCLING


# -- what passes through --------------------------------------------------------------------------


class Interrupted(BaseException):
    """Stands for what the inline transport raises in env code."""


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


# -- states that are saved ------------------------------------------------------------------------


class Counting(BaseEnv):
    """Its state is how many steps it has taken; action 1 ends the episode, 2 fails."""

    observation_space, action_space = OBS, Discrete(3)
    reward_space = None
    can_save = True

    def __init__(self) -> None:
        self.n_steps = 0

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None: ...

    def reset(self, **params: Any) -> Any:
        self.n_steps = 0
        return np.zeros(2, np.float32)

    def step(self, action: Any) -> EnvTimestep:
        if action == 2:
            raise ValueError("no")
        self.n_steps += 1
        return EnvTimestep(np.full(2, self.n_steps, np.float32), 1.0, action == 1, {})

    def close(self) -> None: ...

    def get_state(self) -> int:
        if not self.can_save:
            raise ValueError("not now")
        return self.n_steps

    def set_state(self, state: int) -> None:
        self.n_steps = state


def saving(**options: Any) -> Harness:
    harness = Harness(Counting(), save_every=2, copies_states=True, **options)
    harness.build()
    harness.reset()
    return harness


def saved_by(harness: Harness, action: int = 0) -> SavedEnv | None:
    replies = harness.run(Op.STEP, action)
    payloads = [reply.payload for reply in replies if reply.op == Op.SAVED]
    assert replies[-1].op == Op.SAVED or not payloads, "first the answer, then the state"
    return payloads[0] if payloads else None


def test_the_state_is_saved_every_so_many_steps_of_an_episode() -> None:
    harness = saving()
    found = [saved_by(harness) for _ in range(5)]
    assert [saved is not None for saved in found] == [False, True, False, True, False]
    assert [saved.obs.tolist() for saved in found if saved] == [[2, 2], [4, 4]]
    assert all(saved.info == {"resumed": True} for saved in found if saved)


@pytest.mark.parametrize("action", [1, 2])
def test_an_episode_that_has_ended_or_failed_is_not_saved_and_the_next_counts_anew(
    action: int,
) -> None:
    harness = saving()
    saved_by(harness)
    assert saved_by(harness, action) is None, "it would be the second step"
    if action == 2:
        harness.reset()
    episodes = [saved.episode for saved in (saved_by(harness), saved_by(harness)) if saved]
    assert episodes == [1 if action == 1 else 0]


def test_an_env_goes_on_where_it_was_saved() -> None:
    first, second = saving(), saving()
    saved_by(first)
    saved = saved_by(first)
    assert saved is not None
    plan = EpisodePlan(True, float("inf"), {})
    order = ResetRequest({}, None, None, plan, saved=saved._replace(episodes=3))
    reference, info = only(second.run(Op.RESET, order), Op.RESET_DONE)
    assert (numbers(reference), info) == ([2, 2], {"resumed": True})
    assert second.env.n_steps == 2
    assert second.run(Op.APPLY, (lambda applied: applied.episodes, ()))[0].payload == 3


def test_a_state_that_cannot_be_saved_is_told_of_once_and_the_steps_go_on() -> None:
    harness = saving()
    harness.env.can_save = False
    saved_by(harness)
    told = [[reply.op for reply in harness.run(Op.STEP, 0)] for _ in range(4)]
    assert told == [[Op.STEPPED], [Op.NOTICE, Op.STEPPED], [Op.STEPPED], [Op.STEPPED]]


def test_an_env_without_a_state_is_not_built() -> None:
    harness = Harness(launched().env, save_every=2)
    failure = failure_of(harness.build())
    assert (failure.during, harness.env.closed) == ("construction", 1)


# -- ordinary steps -------------------------------------------------------------------------------


def test_an_ordinary_step_is_answered_in_the_block_alone() -> None:
    rig = BlockRig()
    assert rig.step(block_step(np.array([3, 4], np.float32), 0.5)) == []
    assert rig.has_replied()
    assert (rig.obs(), rig.reward(), rig.info()) == ([3, 4], 0.5, {})
    assert rig.envs[0].log == [7]
    assert rig.rings == 1
    assert rig.posted.take_posted() is None


@pytest.mark.parametrize(
    "given", [block_step(np.full(2, np.nan, np.float32)), block_step(reward=float("inf"))]
)
def test_what_is_not_finite_is_refused_if_it_should_be(given: Any) -> None:
    strict = BlockRig(
        rules=ObservationRules(refuse_non_finite=True), refuse_non_finite_rewards=True
    )
    assert strict.step(given) == [Op.FAILED]
    assert strict.sent[0].payload.kind is FailureKind.NON_FINITE
    assert BlockRig().step(given) == []


def test_casts_are_told_of_once() -> None:
    rig = BlockRig()
    assert rig.step(block_step(np.ones(2))) == [Op.NOTICE]
    assert rig.has_replied()
    assert rig.step(block_step(np.ones(2))) == []


class GymBlockEnv(gymnasium.Env[Any, Any]):
    """As `BlockEnv`, in gymnasium's form; `info` of a reset is the env's `reset_info`."""

    observation_space, action_space = OBS, Discrete(100)

    def __init__(self) -> None:
        self.inner = BlockEnv()
        self.gives, self.resets, self.log = self.inner.gives, self.inner.resets, self.inner.log
        self.seeds: list[int | None] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        obs = self.inner.reset(**(options or {}))
        return obs, self.inner.reset_info

    def step(self, action: Any) -> Any:
        given = self.inner.step(action)
        if not isinstance(given, EnvTimestep):
            return given
        truncated = given.done and given.reward == 3.0
        return given.obs, given.reward, given.done and not truncated, truncated, given.info


MOST_FRAMES_OF_AN_END = 7


def in_both_ways(steps: Callable[[BlockRig], Iterator[None]], **options: Any) -> list[list[Any]]:
    """Return what a host has answered after each step, with the shortcut and without it."""
    both: list[list[Any]] = []
    for has_shortcut in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(EnvRunner, "has_ordinary_steps", has_shortcut)
            rig, answers = BlockRig(**options), list[Any]()
            runner = rig.posted._block_rows[0].runner
            for _ in steps(rig):
                block = rig.block
                columns = (
                    *(block.rewards, block.flags, block.replies, block.reset_flags, block.resets),
                    *(block.infos, block.reset_infos, block.wide_rewards, rig.arena),
                )
                sent = [(*m[:4], getattr(m.payload, "kind", m.payload)) for m in rig.sent]
                counts = (runner.episodes, runner.episodes_left, len(rig.host.pending_resets))
                written = b"".join(column.tobytes() for column in columns)
                answers.append((written, repr(sent), counts, len(rig.envs[0].log)))
            both.append(answers)
    return both


ENDS: dict[str, dict[str, Any]] = {
    "in place": {"plan": PLAN._replace(inplace=True)},
    "later": {},
    "by hand": {"plan": PLAN._replace(auto_reset=False)},
    "with a budget": {"plan": PLAN._replace(episodes_left=2, inplace=True)},
    "with params": {"plan": PLAN._replace(params={"level": 1}, inplace=True)},
    "with a limit": {"plan": PLAN._replace(inplace=True), "max_episodes": 2},
    "finite": {
        "plan": PLAN._replace(inplace=True),
        "rules": ObservationRules(refuse_non_finite=True),
        "refuse_non_finite_rewards": True,
    },
    "measured": {"plan": PLAN._replace(inplace=True), "measures": True},
}


@pytest.mark.parametrize("env_class", [BlockEnv, GymBlockEnv])
@pytest.mark.parametrize("name", ENDS)
def test_the_shortcut_answers_as_every_other_step_is_answered(name: str, env_class: Any) -> None:
    """What there is in steps and resets, at random; with ends, failures, casts and infos."""
    nan = np.full(2, np.nan, np.float32)
    many_obs = [None] * 9 + [nan, np.ones(2), np.zeros(3, np.float32), "nothing"]
    rewards = [*[0.5] * 6, 3.0, 3.0, 1, np.float32(2), np.ones(1), np.nan, None, "much", np.ones(3)]
    infos = [*[None] * 9, {"a": 1}, {"abnormal": True}, {"a": [1]}, "no info"]
    dones = [False, False, True, True, True, np.bool_(True), np.bool_(False), 1, 0, None]
    many_resets = [None] * 6 + [ValueError("no"), np.ones(2), np.zeros(3, np.float32), nan]
    for seed in range(4):

        def steps(rig: BlockRig, seed: int = seed) -> Iterator[None]:
            random, env = Random(seed), rig.envs[0]
            inner = getattr(env, "inner", env)
            for _ in range(40):
                obs, reward = random.choice(many_obs), random.choice(rewards)
                given: Any = block_step(obs, reward, random.choice(dones), random.choice(infos))
                if random.random() < 0.1:
                    given = random.choice(
                        [ValueError("no"), SystemExit(3), None, (1, 2), given[:3]]
                    )
                reset = random.choice(many_resets)
                inner.resets[:] = [] if reset is None else [reset]
                inner.reset_info = random.choice([{}, {}, {"n": 1}, {"n": [1]}])
                rig.step(given)
                yield
                rig.run()
                yield

        with_shortcut, without = in_both_ways(steps, env_class=env_class, **ENDS[name])
        assert with_shortcut == without, seed


@pytest.mark.skipif(hot is None, reason="Python takes each step by itself")
@pytest.mark.parametrize("env_class", [BlockEnv, GymBlockEnv])
def test_ordinary_steps_and_ends_enter_few_frames(env_class: Any) -> None:
    """A worker that has slept pays about a microsecond for each function that it calls."""
    rig = BlockRig(2, plan=PLAN._replace(inplace=True), env_class=env_class)
    package = os.path.dirname(envmgr.__file__) + os.sep

    def frames(*gives: EnvTimestep) -> list[str]:
        for env, given in zip(rig.envs.values(), gives, strict=True):
            env.gives.append(given)
        rig.post(0, 1)
        entered: list[str] = []

        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(package):
                entered.append(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            rig.posted.take_posted()
        finally:
            sys.setprofile(None)
        assert rig.has_replied(0)
        assert rig.has_replied(1)
        return entered

    plain = frames(block_step(), block_step())
    assert len(plain) <= 10, plain
    ended = frames(block_step(), block_step(done=True))
    assert rig.has_reset(1)
    assert len(ended) - len(plain) <= MOST_FRAMES_OF_AN_END, ended
