"""Steps that are posted in the block: each is taken once, in order, and the trainer is rung for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from envmgr.spaces.columns import NUMBERS_IN_ARRAYS, NUMPY_VALUES, PYTHON_NUMBERS
from envmgr.wire.block import (
    AFTER_SHIFT,
    BUFFER_BITS,
    DONE,
    RING_EACH,
    RING_LAST,
    RING_ONCE,
    request_of,
    token_of,
)
from envmgr.wire.messages import AfterStep, Message, Op, ResetRequest
from tests.fuzz.hot import FiveEnv, FourEnv
from tests.unit.host_rigs import OBS, PLAN
from tests.unit.host_rigs import BlockRig as Rig
from tests.unit.host_rigs import block_step as step


def test_a_step_is_taken_once() -> None:
    rig = Rig(2)
    rig.post(0)
    for _ in range(3):
        rig.run()
    rig.post(1)
    rig.run()
    assert (rig.envs[0].log, rig.envs[1].log) == ([7], [7])


def test_the_next_episode_begins_after_one_more_batch_at_most() -> None:
    rig = Rig(3)
    rig.envs[0].gives.append(step(done=True))
    rig.post(0, 1)
    rig.run()
    flags = int(rig.block.flags[0])
    assert flags & DONE
    assert flags >> AFTER_SHIFT & 3 == AfterStep.RESETS
    assert not rig.has_reset()
    assert rig.host.pending_resets
    rig.envs[2].gives.append(step(done=True))
    rig.post(1, 2)
    rig.run()
    assert rig.has_reset()
    assert rig.envs[0].log == [7, "reset"]
    assert rig.block.reset_flags[0] & BUFFER_BITS >= 2
    assert rig.envs[2].log == [7]
    rig.run()
    assert rig.envs[2].log == [7, "reset"]
    assert rig.posted.take_posted() is None


def test_a_new_env_does_not_do_what_was_posted_for_the_one_before() -> None:
    rig = Rig(2)
    rig.post(0, 1)
    rig.ask(0, Op.RENEW, generation=1)
    rig.ask(0, Op.ATTACH, rig.placements[0], generation=1)
    rig.run()
    assert rig.envs[0].log == []
    assert rig.envs[1].log == [7]
    rig.ask(0, Op.RESET, ResetRequest({}, None, None, PLAN), generation=1)
    rig.post(0, generation=1)
    rig.run()
    assert rig.envs[0].log == ["reset", 7]


def test_an_env_that_is_gone_takes_no_steps() -> None:
    rig = Rig(2)
    rig.envs[0].gives.append(step(done=True))
    rig.post(0)
    rig.run()
    rig.ask(0, Op.RELEASE)
    rig.post(0, 1)
    rig.run()
    assert rig.envs[0].log == [7]
    assert rig.envs[1].log == [7]


@pytest.mark.parametrize(
    ("ring", "asked", "rings"), [(RING_LAST, False, 0), (RING_ONCE, False, 1), (RING_LAST, True, 1)]
)
def test_when_a_host_rings(ring: int, asked: bool, rings: int) -> None:
    rig = Rig(2, n_hosts=2)
    rig.post(0, 1, ring=ring)
    rig.block.posted[1] = rig.block.posted[0]
    rig.run(asked=asked)
    assert rig.rings == rings


@pytest.mark.parametrize("n", [1, 2])
def test_the_last_host_of_a_batch_rings(n: int) -> None:
    rig = Rig(n, n_hosts=3)
    rig.post(*range(n), ring=RING_LAST)
    posting = rig.block.posted[0]
    rig.block.posted[1] = rig.block.finished[1] = posting
    rig.block.posted[2] = posting - 8  # something else was posted for this one
    assert rig.block.finished[0] != posting
    rig.run()
    assert rig.block.finished[0] == posting
    assert rig.rings == 1


def test_nobody_rings_for_a_parent_that_is_awake() -> None:
    rig = Rig()
    rig.block.sleeping[-1] = 0
    rig.post(0)
    rig.run()
    assert rig.rings == 0


@pytest.mark.parametrize("ring", [RING_EACH, RING_EACH | RING_ONCE])
def test_a_host_rings_for_each_env_in_good_time(monkeypatch: pytest.MonkeyPatch, ring: int) -> None:
    moments = iter(range(1000))
    monkeypatch.setattr("envmgr.worker.block_steps.monotonic", lambda: float(next(moments)))
    rig = Rig(3)
    heard: list[int] = []
    note: Callable[[], None] = lambda: heard.append(rig.rings)  # noqa: E731
    for env in rig.envs.values():
        env.gives.append(note)
    rig.post(0, 1, 2, ring=ring)
    rig.run()
    assert heard == [0, 1, 2]  # before the next one is stepped
    assert rig.rings >= 3


@pytest.mark.parametrize("n", [1, 2])
def test_it_says_whom_it_runs(n: int) -> None:
    rig = Rig(n, timed=True)
    seen: list[int] = []
    for env in rig.envs.values():
        env.gives.append(lambda: seen.append(int(rig.block.running[0])))
    rig.post(*range(n))
    rig.run()
    assert seen == [1, 2][:n]
    assert rig.block.running[0] == 0
    assert rig.block.since[0] > 0


def test_after_a_batch_it_runs_none_also_where_nobody_looks_at_the_time() -> None:
    rig = Rig(2)
    rig.post(0, 1)
    rig.run()
    assert rig.block.running[0] == 0


def test_an_env_that_changes_places_takes_no_step_that_is_for_the_one_in_its_place() -> None:
    rig = Rig()
    rig.step(step())
    rig.sent.clear()
    rig.host.handle(Message(Op.ADOPT, 5, 0, 0, None))  # it is a spare now
    rig.ask(5, Op.RESET, ResetRequest({}, None, None, PLAN, keeps=True))
    assert [(m.op, m.env_id) for m in rig.sent] == [(Op.RESET_DONE, 5)]
    rig.post(0)
    assert rig.posted.take_posted() is None
    assert rig.run() == []
    assert not rig.has_replied()

    rig.ask(0, Op.ADOPT, rig.placements[0])
    rig.run()
    assert not rig.has_replied()  # that step was for the one before
    rig.post(0)
    rig.run()
    assert rig.has_replied()
    assert rig.envs[0].log == [7, "reset", 7]


@pytest.mark.parametrize("n", [1, 3])
def test_an_ordered_reset_is_answered_with_its_own_token(n: int) -> None:
    rig = Rig(n, plan=PLAN._replace(auto_reset=False, params={"level": 2}))
    rig.envs[0].resets.append(np.array([5, 6], np.float32))
    token = rig.order(0)
    assert rig.run() == []
    assert rig.run() == []
    assert rig.block.resets[0] == token
    assert rig.arena[int(rig.block.reset_flags[0]) & BUFFER_BITS, 0].tolist() == [5, 6]
    assert rig.envs[0].log == ["reset"]
    assert rig.envs[0].params == {"level": 2}, "those of the present plan"
    assert rig.rings == 2, "once for what was posted, once for the reset"
    rig.run()
    assert rig.envs[0].log == ["reset"], "an order is carried out once"


def test_the_steps_of_a_batch_come_before_the_resets_ordered_with_it() -> None:
    rig = Rig(3)
    order: list[str] = []
    for env in rig.envs.values():
        env.gives.append(lambda: order.append("step"))
    rig.envs[1].reset = lambda **_: (order.append("reset"), np.zeros(2, np.float32))[1]  # type: ignore[method-assign]
    rig.order(1, also=(0, 2))
    rig.run()
    rig.run()
    assert order == ["step", "step", "reset"]


def test_resets_are_not_looked_at_unless_it_says_so() -> None:
    rig = Rig(2)
    rig.block.reset_requests[:] = token_of(0, 99)
    rig.post(0)
    rig.run()
    rig.run()
    assert [env.log for env in rig.envs.values()] == [[7], []]


def test_an_ordered_reset_that_fails_or_has_an_odd_info_is_answered_by_message() -> None:
    rig = Rig()
    rig.envs[0].resets.append(ValueError("no"))
    generation, request_id = request_of(rig.order(0))
    rig.run()
    assert rig.run() == [(0, Op.FAILED)]
    assert rig.sent[0][1:4] == (0, generation, request_id)
    assert rig.sent[0].payload.during == "reset"
    rig.envs[0].reset_info = {"odd": [1]}
    rig.order(0)
    rig.run()
    assert rig.run() == [(0, Op.RESET_DONE)]


def test_an_order_for_the_env_before_is_not_for_the_one_that_takes_its_place() -> None:
    rig = Rig(2)
    rig.order(0)
    rig.ask(0, Op.RENEW, generation=1)
    rig.ask(0, Op.ATTACH, rig.placements[0], generation=1)
    rig.run()
    rig.run()
    assert rig.envs[0].log == []
    token = rig.order(0, generation=1)
    rig.run()
    rig.run()
    assert rig.block.resets[0] == token


def test_an_ordered_reset_begins_an_episode_of_the_same_budget() -> None:
    """As with a new plan: only episodes that have ended count."""
    rig = Rig(plan=PLAN._replace(episodes_left=2))
    after = []
    for _ in range(3):
        rig.order(0)
        rig.run()
        rig.run()
        rig.step(step(done=True))
        after.append(int(rig.block.flags[0]) >> AFTER_SHIFT & 3)
        rig.run()
    assert after == [AfterStep.RESETS, AfterStep.RESETS, AfterStep.NOTHING]


def test_an_ordered_reset_says_whom_it_runs() -> None:
    rig = Rig(2, timed=True)
    seen: list[int] = []
    rig.envs[1].reset = lambda **_: (  # type: ignore[method-assign]
        seen.append(int(rig.block.running[0])),
        np.zeros(2, np.float32),
    )[1]
    rig.order(1)
    rig.run()
    rig.run()
    assert (seen, int(rig.block.running[0])) == ([2], 0)


def test_it_says_whether_resets_follow() -> None:
    rig = Rig(2)
    rig.post(0, 1)
    assert rig.posted.take_posted() is False
    assert rig.posted.take_posted() is None, "nothing was posted"
    rig.order(1, also=(0,))
    assert rig.posted.take_posted() is True


def test_a_host_watches_for_less_time_when_watching_was_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, clock, watched = Rig(2, spin_s=16.0), [0.0], list[float]()

    def tick() -> float:
        clock[0] += 0.5
        return clock[0]

    def sleep() -> bool:
        watched.append(clock[0])
        clock[0] = 0.0
        return len(watched) < 7

    monkeypatch.setattr("envmgr.worker.block_steps.monotonic", tick)
    assert rig.posted.run(sleep) is None
    assert watched == sorted(watched, reverse=True)
    assert (watched[0], watched[-1]) == (pytest.approx(16.0, abs=1.5), pytest.approx(1.0, abs=1.5))


def test_who_is_interrupted_in_a_batch_is_known_and_the_others_take_their_steps_later() -> None:
    rig = Rig(3, propagate=(KeyboardInterrupt,))
    rig.envs[1].gives.append(KeyboardInterrupt())
    rig.post(0, 1, 2)
    with pytest.raises(KeyboardInterrupt):
        rig.posted.take_posted()
    assert rig.posted.interrupted_env_id == 1
    assert [env.log for env in rig.envs.values()] == [[7], [7], []]
    rig.posted.take_posted()
    assert [env.log for env in rig.envs.values()] == [[7], [7], [7]]
    assert [rig.has_replied(i) for i in range(3)] == [True, False, True]


@pytest.mark.parametrize("n", [2, 4])
def test_each_env_of_a_host_gets_actions_as_it_takes_them(n: int) -> None:
    kinds = iter([FiveEnv, FourEnv] * n)
    rig = Rig(n, env_class=lambda: next(kinds)(OBS))
    if n == 4:  # the rows that are left do not lie side by side
        rig.ask(1, Op.RELEASE)
    for action, form in enumerate((PYTHON_NUMBERS, NUMPY_VALUES, NUMBERS_IN_ARRAYS)):
        rig.block.kinds[:] = form
        for env in rig.envs.values():
            is_of_gymnasium = isinstance(env, FiveEnv)
            obs = np.zeros(2, np.float32)
            env.gives.append((obs, 0.0, False, False, {}) if is_of_gymnasium else step(obs))
        rig.post(*range(n), action=action)
        rig.run()
    logs = [repr(env.log) for env in rig.envs.values()]
    taken = ["[0, 1, 2]", f"[0, {np.int64(1)!r}, {np.array([2])!r}]"]
    expected = taken * (n // 2)
    if n == 4:
        expected[1] = "[]"
    assert logs == expected
