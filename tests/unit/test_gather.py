"""When a gather returns, and what: sync and async, stragglers, ends of episodes, failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from envmgr.core import Selection
from envmgr.core.engine import NARROW_S
from envmgr.errors import NothingReadyError
from envmgr.policy import Deadlines, FailurePolicy, GatherPolicy
from envmgr.wire.block import RING_LAST, RING_ONCE
from envmgr.wire.messages import AfterStep, Op
from tests.rig import Rig, over_routes

pytestmark = over_routes

INF = float("inf")


def outstanding(after_s: Mapping[int, float], *, done: tuple[int, ...] = (), **options: Any) -> Rig:
    """Return a rig whose envs have actions under way.

    Args:
        after_s: when the timestep of each env comes; None of an env: never.
        done: envs whose timestep ends the episode.
        **options: of the rig.
    """
    rig = Rig(len(after_s), **options).launch()
    rig.send(dict.fromkeys(after_s, 1))
    for env_id, seconds in after_s.items():
        if seconds < INF:
            after = AfterStep.RESETS if env_id in done else AfterStep.NOTHING
            payload = (f"next of {env_id}", 1.0, env_id in done, {}, after)
            rig.transport.reply(env_id, Op.STEPPED, payload, after_s=seconds)
    return rig


def some(rig: Rig, wait_num: float, timeout_s: float = 0.0, **how: Any) -> tuple[list[int], float]:
    """Gather, deliver, and return the env_ids delivered with the seconds that it took."""
    began = rig.clock()
    gathered = rig.gather.some(GatherPolicy(wait_num, timeout_s), **how)
    took = rig.clock() - began
    return list(rig.hand_out(gathered)), took


# -- exactly these --------------------------------------------------------------------------------


def test_all_that_were_asked_for_are_awaited_and_returned_in_their_order() -> None:
    rig = outstanding({0: 3.0, 1: 1.0, 2: 2.0})
    began = rig.clock()
    assert list(rig.exactly(2, 0, 1)) == [2, 0, 1]
    assert rig.clock() == began + 3.0


def test_others_are_not_awaited() -> None:
    rig = outstanding({0: INF, 1: 1.0})
    assert list(rig.exactly(1)) == [1]
    assert rig.deliver() == {}


def test_what_is_there_already_is_not_awaited() -> None:
    rig = outstanding({0: 0.0, 1: 0.0})
    rig.pump()
    polls = len(rig.transport.polls)
    rig.exactly(0, 1)
    assert len(rig.transport.polls) == polls


def test_the_pivot_is_one_of_those_that_are_missing() -> None:
    after_s = {env_id: NARROW_S * (env_id + 1) / 5 for env_id in range(4)}
    rig = outstanding(after_s, has_block=False)
    del rig.transport.polls[:]
    rig.gather.exactly(rig.selection([0, 1, 2, 3]))
    hosts = [slot.host_id for slot in rig.supervisor.envs]
    assert rig.transport.polls[0].pivot == hosts[2]
    assert all(poll.pivot in hosts[2:] for poll in rig.transport.polls)


@pytest.mark.parametrize(
    ("num_workers", "ring"), [(None, RING_LAST), (2, RING_LAST), (1, RING_ONCE)]
)
def test_one_ring_says_that_all_have_replied(num_workers: int | None, ring: int) -> None:
    rig = Rig(4, num_workers=num_workers, has_block=True).launch()
    sent = rig.send(dict.fromkeys(range(4), 1), ring)
    for env_id in range(4):
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=env_id + 1.0)
    rings = rig.transport.rings
    began = rig.clock()
    assert isinstance(sent, Selection)
    assert list(rig.hand_out(rig.gather.exactly(sent))) == [0, 1, 2, 3]
    assert (rig.clock() - began, rig.transport.rings - rings) == (4.0, 1)


def test_what_was_posted_last_is_known_while_nothing_else_is_outstanding() -> None:
    rig = Rig(3, has_block=True).launch()
    submitter = rig.supervisor.submitter
    sent = rig.send({0: 1, 1: 1})
    assert submitter.latest(2) is sent
    assert submitter.latest(3) is None
    rig.transport.reply(1, Op.STEPPED, ("next", 1.0, False, {}, 0))
    rig.exactly(1)
    assert submitter.latest(1) is submitter.latest(2) is None


def test_hosts_that_need_not_ring_are_asked_to_when_some_of_all_are_awaited() -> None:
    rig = Rig(3, has_block=True).launch()
    rig.send(dict.fromkeys(range(3), 1), RING_LAST)
    for env_id in range(3):
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=env_id + 1.0)
    assert some(rig, 1) == ([0], 1.0)
    assert some(rig, 2) == ([1, 2], 2.0)


def test_an_env_that_fails_is_no_longer_missing() -> None:
    rig = outstanding({0: 5.0, 1: INF, 2: INF}, deadlines=Deadlines(step_s=8.0))
    rig.transport.die(1, after_s=1.0)
    began = rig.clock()
    delivered = rig.exactly(0, 1, 2)
    assert rig.clock() == began + 8.0
    assert ["abnormal" in delivered[i].info for i in (0, 1, 2)] == [False, True, True]


def test_a_timestep_held_for_its_reset_is_missing_still() -> None:
    rig = outstanding({0: 1.0}, done=(0,), reset_inplace=True)
    began = rig.clock()
    rig.transport.call_after(2.0, lambda: rig.transport.reply(0, Op.RESET_DONE, ("first", {})))
    assert rig.exactly(0)[0].obs == "next of 0"
    assert rig.clock() == began + 2.0
    assert rig.ready() == [0]


def test_a_failure_that_is_to_be_raised_at_once_ends_the_wait() -> None:
    rig = outstanding({0: 100.0, 1: INF}, policy=FailurePolicy(recover=False))
    rig.transport.die(1, after_s=1.0)
    began = rig.clock()
    rig.exactly(0, 1)
    assert rig.clock() == began + 1.0
    assert rig.supervisor.repair.urgent


# -- some of them ---------------------------------------------------------------------------------


def test_a_gather_that_does_not_wait_takes_what_has_come_by_message() -> None:
    rig = Rig(2).launch()
    rig.send({0: 1, 1: 1})
    odd = {"list": [1]}  # goes by message in any case
    rig.transport.reply(0, Op.STEPPED, ("next", 1.0, False, odd, AfterStep.NOTHING))
    assert some(rig, 1, deadline=rig.clock(), exactly=True) == ([0], 0.0)


@pytest.mark.parametrize(
    ("wait_num", "found", "took"),
    [(1, [2], 1.0), (2, [1, 2], 2.0), (3, [1, 2, 3], 3.0), (4, [0, 1, 2, 3], 4.0),
     (9, [0, 1, 2, 3], 4.0), (INF, [0, 1, 2, 3], 4.0)],
)  # fmt: skip
def test_as_many_as_wanted_in_ascending_order(
    wait_num: float, found: list[int], took: float
) -> None:
    rig = outstanding({0: 4.0, 1: 2.0, 2: 1.0, 3: 3.0})
    assert some(rig, wait_num) == (found, took)


def test_all_that_arrived_together_are_returned_together() -> None:
    rig = outstanding({0: 1.0, 1: 1.0, 2: 2.0})
    assert some(rig, 1) == ([0, 1], 1.0)
    assert some(rig, 1) == ([2], 1.0)


def test_what_has_arrived_before_counts_and_is_collected_first() -> None:
    rig = outstanding({0: 0.0, 1: 0.5, 2: 5.0})
    rig.clock.advance(1.0)
    assert some(rig, 1) == ([0, 1], 0.0)


def test_earlier_sends_are_outstanding_too() -> None:
    rig = outstanding({0: 4.0, 1: 1.0})
    assert some(rig, 1) == ([1], 1.0)
    rig.send(1)
    rig.transport.reply(1, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=10.0)
    assert some(rig, 1) == ([0], 3.0)
    assert some(rig, 1) == ([1], 7.0)


def test_nothing_outstanding_is_an_error_that_names_send() -> None:
    rig = Rig(2).launch()
    with pytest.raises(NothingReadyError, match=r"send actions first"):
        rig.gather.some(GatherPolicy(1))


def test_fewer_outstanding_than_wanted_are_awaited_all() -> None:
    rig = Rig(3).launch()
    rig.send(1)
    rig.transport.reply(1, Op.STEPPED, ("next", 1.0, False, {}, 0), after_s=2.0)
    assert some(rig, 2) == ([1], 2.0)


# -- stragglers -----------------------------------------------------------------------------------


def test_stragglers_are_awaited_for_so_long_after_enough_have_come() -> None:
    rig = outstanding({0: 4.0, 1: 1.0, 2: 1.5, 3: 2.5})
    assert some(rig, 1, timeout_s=1.0) == ([1, 2], 2.0)


def test_a_straggler_at_the_very_end_of_the_wait_is_taken() -> None:
    rig = outstanding({0: 4.0, 1: 1.0, 2: 2.0})
    assert some(rig, 1, timeout_s=1.0) == ([1, 2], 2.0)


def test_the_wait_for_stragglers_ends_when_there_are_none() -> None:
    rig = outstanding({0: 1.0, 1: 1.5})
    assert some(rig, 1, timeout_s=60.0) == ([0, 1], 1.5)


def test_a_long_wait_for_enough_is_not_shortened() -> None:
    rig = outstanding({0: 100.0, 1: 50.0})
    assert some(rig, 2, timeout_s=0.5) == ([0, 1], 100.0)


def test_gathering_all_has_no_stragglers() -> None:
    rig = outstanding({0: 1.0, 1: 2.0})
    assert some(rig, INF, timeout_s=60.0) == ([0, 1], 2.0)


# -- ends of episodes -----------------------------------------------------------------------------


def test_it_goes_on_until_there_is_something_to_step_next() -> None:
    rig = outstanding({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}, done=(0, 1))
    assert some(rig, 1) == ([0, 1, 2], 3.0)


def test_it_stops_when_nothing_more_is_outstanding() -> None:
    rig = outstanding({0: 1.0, 1: 2.0}, done=(0, 1))
    assert some(rig, 1) == ([0, 1], 2.0)


def test_abnormal_timesteps_are_ends_of_episodes() -> None:
    rig = outstanding({0: INF, 1: 2.0, 2: 9.0})
    rig.transport.die(0, after_s=1.0)
    assert some(rig, 1) == ([0, 1], 2.0)


def test_a_number_that_was_asked_for_is_kept_to_exactly() -> None:
    rig = outstanding({0: 1.0, 1: 2.0, 2: 3.0}, done=(0,))
    assert some(rig, 1, exactly=True) == ([0], 1.0)


def test_held_timesteps_do_not_count() -> None:
    rig = outstanding({0: 1.0, 1: 3.0}, done=(0,), reset_inplace=True)
    assert some(rig, 1, exactly=True) == ([1], 3.0)
    rig.transport.reply(0, Op.RESET_DONE, ("first", {}), after_s=1.0)
    assert some(rig, 1, exactly=True) == ([0], 1.0)


# -- deadlines ------------------------------------------------------------------------------------


def test_at_the_deadline_it_returns_what_has_arrived() -> None:
    rig = outstanding({0: 1.0, 1: 3.0, 2: 9.0})
    assert some(rig, 3, deadline=rig.clock() + 4.0) == ([0, 1], 4.0)


def test_possibly_nothing() -> None:
    rig = outstanding({0: 9.0})
    assert some(rig, 1, deadline=rig.clock() + 2.0) == ([], 2.0)
    assert rig.supervisor.table.owed_ids() == [0]
    assert some(rig, 1) == ([0], 7.0)


def test_a_deadline_of_now_looks_once() -> None:
    rig = outstanding({0: 0.0, 1: 1.0})
    assert some(rig, 2, deadline=rig.clock()) == ([0], 0.0)


def test_the_wait_for_stragglers_ends_at_the_deadline_too() -> None:
    rig = outstanding({0: 1.0, 1: 9.0})
    assert some(rig, 1, timeout_s=5.0, deadline=rig.clock() + 2.0) == ([0], 2.0)


def test_a_reply_at_the_very_deadline_is_taken() -> None:
    rig = outstanding({0: 2.0, 1: 9.0})
    assert some(rig, 2, deadline=rig.clock() + 2.0) == ([0], 2.0)


# -- urgent failures ------------------------------------------------------------------------------


def test_an_urgent_failure_ends_it_whatever_is_missing() -> None:
    rig = outstanding({0: 100.0, 1: INF}, policy=FailurePolicy(recover=False))
    rig.transport.die(1, after_s=1.0)
    began = rig.clock()
    rig.gather.some(GatherPolicy(2))
    assert rig.clock() == began + 1.0


def test_an_exhausted_budget_is_no_reason_to_return_early() -> None:
    rig = outstanding({0: 4.0, 1: INF}, policy=FailurePolicy(max_failures=0))
    rig.transport.die(1, after_s=1.0)
    assert some(rig, 2) == ([0, 1], 4.0)
    assert rig.supervisor.repair.fatal is not None
