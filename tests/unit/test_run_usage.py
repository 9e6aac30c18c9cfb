"""What `envmgr run` says of other settings, from the figures of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envmgr.cli.resource_usage import Usage, advice_of

# Eight CartPoles with a process each on two cores, as on an idle machine.
CARTPOLES = Usage(
    is_plain=True,
    env_num=8,
    n_workers=8,
    cores=2,
    steps=200_000,
    wall_s=10.0,
    trainer_s=6.2,
    workers_s=7.6,
    queued_s=10.0,
)
# Eight envs that sleep 10 ms in each step, in two workers.
WAITING = Usage(
    is_plain=True,
    env_num=8,
    n_workers=2,
    cores=2,
    steps=2_000,
    wall_s=10.0,
    trainer_s=0.1,
    workers_s=0.2,
    queued_s=0.1,
)


def test_cheap_envs_with_a_process_each_should_share() -> None:
    assert advice_of(CARTPOLES).startswith("num_workers: auto would be about 1.")


def test_envs_that_wait_should_not_share() -> None:
    assert "a worker for each env, would be up to 4.0 x" in advice_of(WAITING)


@pytest.mark.parametrize(
    "usage",
    [
        replace(CARTPOLES, wall_s=0.5),
        replace(CARTPOLES, steps=100),
        replace(CARTPOLES, is_plain=False),
        replace(CARTPOLES, env_num=2, n_workers=2),  # a core for each
        replace(CARTPOLES, cores=8),
        replace(CARTPOLES, workers_s=13.0),  # steps that compute
        replace(CARTPOLES, workers_s=2.0, trainer_s=2.0),  # other programs, or waiting
        replace(CARTPOLES, trainer_s=9.5, workers_s=5.0),  # a policy that takes its time
        replace(WAITING, policy_waits=True),
        replace(WAITING, queued_s=5.0),  # a busy machine
        replace(WAITING, workers_s=19.0),  # envs that compute
        replace(WAITING, trainer_s=8.0),
        replace(WAITING, n_workers=7),
        replace(WAITING, workers_s=3.0, trainer_s=1.9, n_workers=8, env_num=10),
    ],
)
def test_it_is_silent_where_it_might_be_wrong(usage: Usage) -> None:
    assert advice_of(usage) == ""
