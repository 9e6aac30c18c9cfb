"""Policies: how many timesteps to gather, how often to fail, how long to pause."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmgr.errors import EnvCrash, EnvFailure
from envmgr.policy import Deadlines, FailureBudget, FailurePolicy, GatherPolicy
from envmgr.texts import counted

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


def test_no_delay_is_longer_than_a_minute_or_what_was_asked_for() -> None:
    policy = FailurePolicy(retry_waiting_s=0.5)
    assert policy.renewal_delay_s(7) == 32.0
    assert policy.renewal_delay_s(8) == 60.0
    assert policy.renewal_delay_s(10_000) == 60.0
    assert FailurePolicy(retry_waiting_s=300.0).renewal_delay_s(5) == 300.0


@given(st.floats(0, 100), st.integers(1, 40))
def test_each_delay_is_twice_the_one_before_up_to_a_minute(waiting_s: float, n: int) -> None:
    policy = FailurePolicy(retry_waiting_s=waiting_s)
    twice = 2 * policy.renewal_delay_s(n)
    assert policy.renewal_delay_s(n + 1) == min(twice, max(60.0, waiting_s))


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
        f"all envs together failed {counted(limit + 1, 'time')} within 60 s "
        f"(max_failures_total is {limit})"
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


# -- what steps make up for -----------------------------------------------------------------------


def steps_until_exceeded(share: float, n_steps: int, rng: random.Random, **policy: Any) -> int:
    """Have an env fail in a share of its steps, 1000 in a second; return how many it made."""
    budget, steps = FailureBudget(FailurePolicy(**policy), env_num=1), 0
    while steps < n_steps:
        steps += 1 if share == 1.0 else 1 + int(math.log(1.0 - rng.random()) / math.log(1 - share))
        now = steps / 1000.0
        if budget.charge(0, failure(), now, steps=steps, steps_of_all=steps) is not None:
            return steps
    return n_steps


def test_an_env_that_fails_in_few_of_its_steps_goes_on_for_ever() -> None:
    rng = random.Random(0)
    for share in (0.001, 0.004, 0.01):
        assert steps_until_exceeded(share, 1_000_000, rng) == 1_000_000, share


def test_an_env_that_fails_in_many_of_its_steps_is_given_up_soon() -> None:
    rng = random.Random(0)
    for share, soon in ((0.1, 1000), (0.2, 200), (0.5, 50), (1.0, 4)):
        for _ in range(100):
            assert steps_until_exceeded(share, 10 * soon, rng) <= soon, share


def test_without_a_share_every_failure_counts() -> None:
    rng = random.Random(0)
    assert steps_until_exceeded(0.004, 10**6, rng, max_failure_share=0.0) < 10_000


def test_an_env_that_does_nothing_but_fail_has_saved_nothing() -> None:
    """Whatever it has done before: it takes as many failures as at the beginning."""
    for steps_each in (0, 1):  # in its resets, and in the first step after each
        budget = FailureBudget(FailurePolicy(max_failures=3), env_num=1)
        at = [10_000 + i * steps_each for i in range(5)]
        exceeded = [budget.charge(0, failure(), 0.0, steps=n, steps_of_all=n) for n in at]
        assert [text is not None for text in exceeded] == [False, False, False, False, True]


def test_what_is_saved_is_no_more_than_ten_failures() -> None:
    budget = FailureBudget(FailurePolicy(max_failures=3, max_failures_total=1000), env_num=1)
    exceeded = [budget.charge(0, failure(), 0.0, steps=10**9 + 2 * i) for i in range(20)]
    # The first is made up for by the steps just before it; then ten that were saved, and three.
    assert [text is not None for text in exceeded].index(True) == 1 + 10 + 3


def test_the_steps_of_all_make_up_for_the_failures_of_all() -> None:
    policy = FailurePolicy(max_failures_total=2)
    budget = FailureBudget(policy, env_num=100)
    steps = [40 * (env_id + 1) for env_id in range(100)]
    texts = [budget.charge(i, failure(i), 0.0, steps_of_all=n) for i, n in enumerate(steps)]
    assert texts == [None] * 100
    budget = FailureBudget(policy, env_num=100)
    texts = [budget.charge(i, failure(i), 0.0, steps_of_all=2 * i) for i in range(100)]
    assert next(text for text in texts if text) == (
        "all envs together failed 3 times within 60 s (max_failures_total is 2)"
    )
    assert texts.index(next(text for text in texts if text)) == 2


def test_the_clause_says_what_does_not_count() -> None:
    budget = FailureBudget(FailurePolicy(max_failures=1), env_num=1)
    texts = [budget.charge(0, failure(), 0.0, steps=40) for _ in range(3)]
    assert texts == [
        None,
        None,
        "env 0 failed 2 times within 60 s, not counting those that steps make up for "
        "(max_failures is 1; max_failure_share 0.05)",
    ]


def test_where_no_failure_is_allowed_steps_make_up_for_none() -> None:
    budget = FailureBudget(FailurePolicy(max_failures=0), env_num=1)
    assert budget.charge(0, failure(), 0.0, steps=10**6) == (
        "env 0 failed 1 time within 60 s (max_failures is 0)"
    )
    budget = FailureBudget(FailurePolicy(max_failures_total=0), env_num=1)
    assert budget.charge(0, failure(), 0.0, steps=10**6, steps_of_all=10**6) is not None


def test_the_first_cause_is_that_of_others_if_an_envs_own_failures_are_made_up_for() -> None:
    budget = FailureBudget(FailurePolicy(max_failures_total=0), env_num=2)
    first = failure(1)
    assert budget.charge(1, first, 0.0) is not None
    assert budget.charge(0, failure(0), 0.0, steps=100) is not None
    assert budget.first_cause(0) is first
