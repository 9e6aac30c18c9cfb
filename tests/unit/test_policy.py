"""Policies: how many timesteps to gather, how often to fail, how long to pause."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmgr.errors import EnvCrash, EnvFailure
from envmgr.policy import Deadlines, FailureBudget, FailurePolicy, GatherPolicy

INF = math.inf


def failure(env_id: int = 0) -> EnvFailure:
    return EnvCrash("it died", env_id=env_id, during="step")


# -- gathering ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait_num", "outstanding", "needed"),
    [
        (1, 0, 0),
        (1, 1, 1),
        (1, 8, 1),
        (2, 1, 1),
        (2, 8, 2),
        (8, 8, 8),
        (9, 8, 8),
        (INF, 0, 0),
        (INF, 1, 1),
        (INF, 8, 8),
    ],
)
def test_needed_is_wait_num_but_never_more_than_is_outstanding(
    wait_num: float, outstanding: int, needed: int
) -> None:
    assert GatherPolicy(wait_num).needed(outstanding) == needed
    assert type(GatherPolicy(wait_num).needed(outstanding)) is int


def test_only_infinity_gathers_all() -> None:
    assert GatherPolicy(INF).gathers_all
    assert not GatherPolicy(10**9).gathers_all


def test_policies_are_frozen() -> None:
    for policy in (GatherPolicy(1), Deadlines(), FailurePolicy()):
        with pytest.raises(AttributeError):
            policy.max_retry = 7  # type: ignore[misc,union-attr]


# -- renewal delays -------------------------------------------------------------------------------


def test_the_first_renewal_in_a_row_does_not_pause_and_later_ones_double() -> None:
    policy = FailurePolicy(retry_waiting_s=0.25)
    delays = [policy.renewal_delay_s(n) for n in range(6)]
    assert delays == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0]


def test_a_waiting_time_of_zero_stays_zero() -> None:
    assert FailurePolicy(retry_waiting_s=0.0).renewal_delay_s(50) == 0.0


def test_delays_stop_doubling_before_they_overflow() -> None:
    policy = FailurePolicy(retry_waiting_s=0.5)
    assert policy.renewal_delay_s(17) == 0.5 * 2**16
    assert policy.renewal_delay_s(10_000) == 0.5 * 2**16


@given(st.floats(0, 100), st.integers(1, 15))
def test_each_delay_is_twice_the_one_before(waiting_s: float, renewals: int) -> None:
    policy = FailurePolicy(retry_waiting_s=waiting_s)
    assert policy.renewal_delay_s(renewals + 1) == 2 * policy.renewal_delay_s(renewals)


# -- the failure budget ---------------------------------------------------------------------------


def charges(budget: FailureBudget, *times: float, env_id: int = 0) -> list[bool]:
    """Charge one failure at each of `times`, and return which of them exceeded the budget."""
    return [budget.charge(env_id, failure(env_id), now) is not None for now in times]


def test_max_failures_are_allowed_and_one_more_is_not() -> None:
    budget = FailureBudget(FailurePolicy(max_failures=3), env_num=4)
    assert charges(budget, 0.0, 1.0, 2.0, 3.0) == [False, False, False, True]


def test_zero_allowed_failures() -> None:
    assert charges(FailureBudget(FailurePolicy(max_failures=0), 1), 5.0) == [True]


def test_failures_of_one_env_do_not_count_against_another() -> None:
    budget = FailureBudget(FailurePolicy(max_failures=1), env_num=2)
    assert charges(budget, 0.0, env_id=0) == [False]
    assert charges(budget, 0.0, env_id=1) == [False]
    assert charges(budget, 0.0, env_id=1) == [True]


def test_what_is_exactly_as_old_as_the_window_still_counts() -> None:
    policy = FailurePolicy(max_failures=1, window_s=60.0)
    assert charges(FailureBudget(policy, 1), 0.0, 60.0) == [False, True]
    assert charges(FailureBudget(policy, 1), 0.0, 60.5) == [False, False]


def test_the_window_slides() -> None:
    budget = FailureBudget(FailurePolicy(max_failures=2, window_s=10.0), env_num=1)
    assert charges(budget, 0.0, 8.0, 11.0, 18.0, 21.5) == [False, False, False, True, False]


def test_the_clause_names_the_env_the_number_and_the_setting() -> None:
    budget = FailureBudget(FailurePolicy(max_failures=1, window_s=30.0), env_num=3)
    budget.charge(2, failure(2), 0.0)
    text = budget.charge(2, failure(2), 1.0)
    assert text == "env 2 failed 2 times within 30 s (max_failures is 1)"


@pytest.mark.parametrize(("env_num", "limit"), [(1, 10), (10, 10), (11, 11), (64, 64)])
def test_the_limit_of_all_envs_is_ten_or_their_number(env_num: int, limit: int) -> None:
    policy = FailurePolicy(max_failures=1000)
    assert policy.max_failures_of_all(env_num) == limit
    budget = FailureBudget(policy, env_num)
    exceeded = [budget.charge(i % env_num, failure(), 0.0) for i in range(limit + 1)]
    assert exceeded[:-1] == [None] * limit
    assert exceeded[-1] == (
        f"all envs together failed {limit + 1} times within 60 s "
        f"(max_failures_total is {limit}, max(10, env_num))"
    )


@pytest.mark.parametrize("limit", [0, 2, 25])
def test_the_limit_of_all_envs_can_be_given(limit: int) -> None:
    policy = FailurePolicy(max_failures=1000, max_failures_total=limit)
    assert policy.max_failures_of_all(4) == limit
    budget = FailureBudget(policy, env_num=4)
    exceeded = [budget.charge(i % 4, failure(), 0.0) for i in range(limit + 1)]
    assert exceeded[:-1] == [None] * limit
    assert exceeded[-1] == (
        f"all envs together failed {limit + 1} times within 60 s (max_failures_total is {limit})"
    )


def test_the_window_of_all_envs_slides_too() -> None:
    budget = FailureBudget(FailurePolicy(max_failures=1000, window_s=10.0), env_num=20)
    for env_id in range(20):
        assert budget.charge(env_id, failure(), 0.0) is None
    assert budget.charge(0, failure(), 11.0) is None


def test_forgiving_forgets_one_env_and_not_the_others() -> None:
    budget = FailureBudget(FailurePolicy(max_failures=1), env_num=2)
    charges(budget, 0.0, env_id=0)
    charges(budget, 0.0, env_id=1)
    budget.forgive(0)
    assert charges(budget, 1.0, env_id=0) == [False]
    assert charges(budget, 1.0, env_id=1) == [True]


def test_the_first_cause_is_the_oldest_in_the_window() -> None:
    budget = FailureBudget(FailurePolicy(max_failures=1, window_s=10.0), env_num=2)
    old, first, second, other = failure(), failure(), failure(), failure(1)
    budget.charge(0, old, 0.0)
    budget.charge(1, other, 5.0)
    budget.charge(0, first, 11.0)
    budget.charge(0, second, 12.0)
    assert budget.first_cause(0) is first
    assert budget.first_cause(1) is other


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 2)), max_size=40),
    st.integers(0, 4),
    st.floats(0.5, 30),
)
def test_the_budget_counts_as_a_list_of_all_failures_does(
    gaps: list[tuple[float, int]], max_failures: int, window_s: float
) -> None:
    budget = FailureBudget(FailurePolicy(max_failures=max_failures, window_s=window_s), env_num=3)
    now, history = 0.0, []
    for gap, env_id in gaps:
        now += gap
        history.append((now, env_id))
        exceeded = budget.charge(env_id, failure(env_id), now)
        recent = [e for t, e in history if t >= now - window_s]
        over = recent.count(env_id) > max_failures or len(recent) > 10
        assert (exceeded is not None) is over
