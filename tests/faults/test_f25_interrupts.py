"""F25: a signal at any point of any public call loses, repeats, hangs and wedges nothing.

Here the kinds that run envs inline or on threads are attacked at many points, others at some;
`make soak` attacks all of them, and at random moments.
"""

from __future__ import annotations

import signal
import threading
import weakref
from typing import Any

import pytest

from tests.faults.interrupted_calls import LARGE_INFOS, PROCESS_KINDS, THREAD_KINDS, TWO_FORMS, run
from tests.faults.interrupting import Interrupted, handlers


def test_f25_inline_an_interrupt_costs_no_more_than_the_env_that_was_in_it() -> None:
    figures = run({"type": "base"}, 400, seed=25)
    assert figures["points"] == 400
    assert figures["raised"] > 300


@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_f25_an_interrupt_anywhere_loses_and_repeats_nothing(kind: str) -> None:
    # Some of the calls end with the manager closed, and another one is launched: by fork, which is
    # quickest. Launches by other methods are interrupted in test_interruptions.
    figures = run({**PROCESS_KINDS[kind], "context": "fork"}, 75)
    assert (figures["points"], figures["abnormal"]) == (75, 0)
    assert figures["raised"] > 30


def test_f25_of_steps_that_are_posted_and_sent_by_one_call_all_are_accepted_or_none() -> None:
    figures = run(TWO_FORMS, 25, seed=25)
    assert (figures["points"], figures["abnormal"]) == (25, 0)
    assert figures["raised"] > 10


def test_f25_arrays_that_travel_beside_the_pipe_are_delivered_once_and_whole() -> None:
    figures = run(LARGE_INFOS, 50, seed=25)
    assert (figures["points"], figures["abnormal"]) == (50, 0)
    assert figures["raised"] > 20


@pytest.mark.parametrize("kind", THREAD_KINDS)
def test_f25_on_threads_an_interrupt_comes_into_no_env(kind: str) -> None:
    figures = run(THREAD_KINDS[kind], 60, seed=25)
    assert (figures["points"], figures["abnormal"]) == (60, 0)
    assert figures["raised"] > 30


@pytest.mark.parametrize(
    "config",
    [{"type": "base"}, {"type": "thread"}, {"type": "subprocess", "context": "fork"}],
    ids=lambda config: config["type"],
)
def test_f25_where_threads_are_started_and_waited_for_an_interrupt_comes_through(
    config: dict[str, Any],
) -> None:
    """What a handler raises within a condition of `threading` would be another error there."""
    figures = run(config, 60, seed=25, within=threading.__file__)
    assert figures["points"] == 60
    assert figures["raised"] > 30


@pytest.mark.torch
def test_f25_with_treetensors_it_is_the_same() -> None:
    pytest.importorskip("treetensor")
    figures = run({"type": "base_v2"}, 60, seed=25)
    assert figures["points"] == 60
    assert figures["raised"] > 40


class _Thing:
    """Something that can be referred to weakly."""


def test_what_a_handler_raises_in_a_callback_of_a_weak_reference_is_no_error_of_a_test() -> None:
    seen = []

    def interrupted(reference: object) -> None:
        seen.append(reference)
        signal.raise_signal(signal.SIGALRM)

    with handlers(lambda: None):
        thing = _Thing()
        reference = weakref.ref(thing, interrupted)
        del thing  # what its callback raises is lost, and pytest would report it
        assert seen == [reference]
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGALRM)
