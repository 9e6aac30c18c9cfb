"""`num_workers: auto`: what is decided from which figures, and how the figures are got."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from envmgr.calibrate import (
    COSTLY_STEP_S,
    LATE_S,
    LEAST_TRIPS,
    PATIENCE_S,
    ROUND_TRIPS,
    STEPPING_S,
    TYPICAL,
    WAKING_S,
    Calibration,
    Choice,
    WakeUp,
    WorkerCount,
    choose,
    measure_wake_up,
    trial_config_of,
    try_out,
)
from envmgr.config import ManagerConfig
from envmgr.config.kind_sections import Limits
from envmgr.core.engine import Engine
from envmgr.errors import ConfigError, ManagerClosedError
from envmgr.launch import build_engine, usable_cores
from envmgr.transport.base import Arrival, Garbage, HostDied
from envmgr.wire.messages import FailureKind, Message, Op, RemoteFailure
from envmgr.worker.profiling import Trial, try_env
from tests.fake_hosts import FakeEnvs, FakeHost
from tests.fakes import KILLED, FakeClock, FakeTransport

US = 1e-6


def trial(
    step_us: float, wait_us: float = 0.0, reset_us: float = 0.0, length: int | None = None
) -> Trial:
    """Return what is measured of 1000 steps; without length, no episode ended in them."""
    n_episodes = 0 if length is None else 1000 // length
    n_resets = max(n_episodes, 1)
    return Trial(
        1000,
        1000 * step_us * US,
        1000 * wait_us * US,
        n_episodes,
        n_resets,
        n_resets * reset_us * US,
    )


# -- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_num", "cores", "figures", "num_workers"),
    [
        pytest.param(64, 2, trial(4, 0, 10, 22), 2, id="cheap-fill-the-cores"),
        pytest.param(8, 2, trial(100), 2, id="a-step-longer-than-a-wake-up"),
        pytest.param(64, 2, trial(0.3), 1, id="a-batch-shorter-than-a-wake-up"),
        pytest.param(8, 2, trial(4), 1, id="a-small-batch-of-cheap-steps"),
        pytest.param(256, 64, trial(4), 13, id="as-many-as-have-enough-to-do"),
        pytest.param(64, 2, trial(60, 40), 2, id="waits-shorter-than-a-wake-up"),
        pytest.param(64, 2, trial(100, 60), 64, id="waits"),
        pytest.param(64, 2, trial(1000, 990), 64, id="sleeps"),
        pytest.param(64, 2, trial(20, 0, 100_000, 500), 64, id="resets-block-the-neighbours"),
        pytest.param(64, 2, trial(20, 0, 10_000, 500), 2, id="resets-that-are-rare-enough"),
        pytest.param(64, 2, trial(20, 0, 60_000), 64, id="a-long-reset-and-no-episode-ended"),
        pytest.param(64, 2, trial(20, 30, 15_000, 500), 64, id="waits-and-resets-add-up"),
        pytest.param(3, 2, trial(100), 2, id="uneven"),
        pytest.param(4, 2, trial(1990), 2, id="just-cheap-enough"),
        pytest.param(4, 2, trial(2010), 4, id="costly"),
        pytest.param(4, 1, trial(1000), 1, id="one-core"),
        pytest.param(2, 4, trial(1000, 990), 2, id="a-core-for-each"),
        pytest.param(2, 4, trial(1), 1, id="cores-to-spare-and-nothing-to-do-for-them"),
    ],
)
def test_how_many_workers(env_num: int, cores: int, figures: Trial, num_workers: int) -> None:
    assert choose(env_num, cores, figures, TYPICAL).num_workers == num_workers


@pytest.mark.parametrize(
    ("wake_up_us", "env_num", "figures", "num_workers"),
    [
        pytest.param((5, 4), 8, trial(9), 2, id="fast-and-worth-a-second-worker"),
        pytest.param((500, 40), 8, trial(90), 1, id="slow-and-not-worth-it"),
        pytest.param((500, 40), 8, trial(140), 2, id="slow-and-worth-it"),
        pytest.param((500, 40), 8, trial(500, 100), 8, id="waits-less-than-a-slow-round-trip"),
        pytest.param((500, 40), 8, trial(500, 60), 2, id="waits-less-than-is-computed"),
        pytest.param((120, 120), 8, trial(500, 100), 2, id="a-machine-that-computes-slowly"),
        pytest.param((5, 4), 8, trial(500, 40), 8, id="a-machine-that-computes-fast"),
    ],
)
def test_what_waking_a_worker_costs_decides(
    wake_up_us: tuple[float, float], env_num: int, figures: Trial, num_workers: int
) -> None:
    round_trip_us, cpu_us = wake_up_us
    wake_up = WakeUp(round_trip_us * US, cpu_us * US)
    assert choose(env_num, 2, figures, wake_up).num_workers == num_workers


@pytest.mark.parametrize(
    ("cores", "figures", "is_faster"),
    [
        (2, trial(4), True),
        (1, trial(1000), True),
        (2, trial(100), False),
        (2, trial(1000, 990), False),
        (1, trial(1000, 990), False),
        (2, trial(5000), False),
    ],
)
def test_where_base_would_be_faster_the_reason_says_so(
    cores: int, figures: Trial, is_faster: bool
) -> None:
    choice = choose(8, cores, figures, TYPICAL)
    assert choice.reason.endswith("without isolation, `type: base` would be faster") is is_faster
    assert choice.num_workers >= 1


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (trial(4), "its steps are cheap and need a core"),
        (trial(100, 90), "its steps wait: sharing would cost 90 us per step"),
        (trial(10, 0, 1e6, 100), "its resets would keep neighbours waiting: sharing would cost 10"),
        (trial(COSTLY_STEP_S / US * 1.01), "a step takes so long that 50 us do not matter"),
    ],
)
def test_the_reason_names_what_decided(figures: Trial, reason: str) -> None:
    assert choose(5, 2, figures, TYPICAL).reason.startswith(reason)


def test_an_env_that_keeps_up_with_the_cores_needs_no_other_reason() -> None:
    assert choose(2, 2, trial(100), TYPICAL) == Choice(2, "there is a core for each env")


def test_cores_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores(((0, 1), (1, 2), (0,))) == 3
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 5, 6}, raising=False)
    assert usable_cores(None) == 3
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    assert usable_cores(None) == 7
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert usable_cores(None) == 1


def test_what_stats_and_the_log_say() -> None:
    wake_up = WakeUp(45e-6, 20e-6)
    found = Calibration(64, 2, Choice(2, "for a reason"), 0.25, trial(4, 0.5, 10, 20), wake_up)
    assert found.as_dict() == {
        "num_workers": 2,
        "reason": "for a reason",
        "usable_cores": 2,
        "construction_s": 0.25,
        "step_s": pytest.approx(4e-6),
        "step_wait_s": pytest.approx(0.5e-6),
        "reset_s": pytest.approx(10e-6),
        "n_steps": 1000,
        "n_episodes": 50,
        "wake_up_s": 45e-6,
        "wake_up_cpu_s": 20e-6,
    }
    assert str(found) == (
        "num_workers: auto: 2 workers for 64 envs on 2 usable cores: for a reason (a step takes "
        "4 us, of which it waits 0.5 us; a reset 10 us; measured over 1,000 steps and 50 episodes; "
        "waking a worker takes 45 us, and 20 us of CPU time; built in 250 ms)"
    )
    one = Calibration(8, 2, Choice(1, "r"), 1.25, trial(4000))
    assert "auto: 1 worker for 8" in str(one)
    assert "takes 4 ms" in str(one)
    assert "waking a worker was not measured; built in 1.25 s" in str(one)
    assert one.as_dict()["wake_up_s"] is one.as_dict()["wake_up_cpu_s"] is None
    failed = Calibration(8, 2, Choice(8, "it failed"))
    assert str(failed).endswith("one worker per env for 8 envs on 2 usable cores: it failed")
    assert failed.as_dict()["construction_s"] is None
    assert "step_s" not in failed.as_dict()


# -- the conversation -----------------------------------------------------------------------------


class Worker(FakeEnvs):
    """Answers as a worker does, with a fault in place of one answer.

    Args:
        fault_in: what is not answered well.
        fault: what comes instead; None for nothing.
        seconds: how long everything takes.
        measured: what the trial gives.
    """

    def __init__(
        self,
        fault_in: Op | None = None,
        fault: Any = None,
        seconds: float = 0.125,
        measured: Any = None,
    ) -> None:
        super().__init__(seconds=dict.fromkeys(Op, seconds), observe=lambda *_: None)
        self._fault_in, self._fault, self._takes_s = fault_in, fault, seconds
        self._measured = trial(100) if measured is None else measured

    def __call__(self, host: FakeHost, message: Message) -> Iterable[tuple[float, Arrival]]:
        def reply(op: Op, payload: Any) -> tuple[float, Arrival]:
            return self._takes_s, message._replace(op=op, payload=payload)

        if message.op == self._fault_in:
            if isinstance(self._fault, RemoteFailure):
                return [reply(Op.FAILED, self._fault)]
            return [] if self._fault is None else [(self._takes_s, self._fault)]
        if message.op == Op.APPLY:
            return [reply(Op.RESULT, self._measured)]
        replies = super().__call__(host, message)
        return [reply(Op.NOTICE, "a cast"), *replies] if message.op == Op.RESET else replies


def config(**keys: Any) -> ManagerConfig:
    return ManagerConfig(type="subprocess", num_workers="auto", **keys).with_env_num(8)


def launched(answer: Worker, wanted: ManagerConfig) -> tuple[Engine, FakeTransport, FakeClock]:
    """Return an engine whose env is to be tried out."""
    clock = FakeClock()
    transport = FakeTransport(clock, answer=answer)
    made = build_engine([make_one], trial_config_of(wanted), transport, (None, None), clock)
    (slot,) = made.supervisor.envs
    slot.reset_params, slot.new_seed, slot.base_seed = {"level": 3}, 7, 7
    return made, transport, clock


def make_one() -> None: ...


def tried(engine: Engine, wanted: ManagerConfig) -> Calibration:
    try:
        with engine.calling:
            return try_out(engine, wanted, 8, cores=2)
    finally:
        engine.close(0.0)


def test_it_is_refused_where_starts_are_limited_which_a_trial_would_exceed() -> None:
    limited = replace(config(), limits=Limits(starts_per_s=2))
    with pytest.raises(ConfigError, match=r"starts_per_s is 2\. Give a number"):
        WorkerCount(limited, 8, packs_envs=True)
    for env_num, packs_envs, n_workers in ((8, False, "auto"), (1, True, "auto"), (8, True, 2)):
        asked = replace(limited, num_workers=n_workers)  # nothing is tried out
        assert not WorkerCount(asked, env_num, packs_envs=packs_envs).is_open


def test_a_trial_that_ctrl_c_ends_as_it_is_opened_is_closed() -> None:
    engine, _, _ = launched(Worker(), config())
    count = WorkerCount(config(), 8, packs_envs=True)

    def open_trial(config: ManagerConfig, keep: Callable[[Engine], None]) -> None:
        keep(engine)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        count.find(open_trial, lambda supervisor: None)
    assert engine.closing
    assert count.is_open, "the next launch tries again"


def test_a_trial_whose_end_ctrl_c_interrupts_does_not_keep_the_next_one_from_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = config()
    engine, _, _ = launched(Worker(), wanted)
    count = WorkerCount(wanted, 8, packs_envs=True)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    def open_trial(config: ManagerConfig, keep: Callable[[Engine], None]) -> None:
        keep(engine)
        monkeypatch.setattr(engine, "close", interrupted)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        count.find(open_trial, lambda supervisor: None)
    monkeypatch.undo()
    another, _, _ = launched(Worker(), wanted)
    found = count.find(lambda config, keep: keep(another), lambda supervisor: None)
    assert engine.closing
    assert found.num_workers == 2


def test_an_env_is_built_reset_and_stepped(caplog: pytest.LogCaptureFixture) -> None:
    engine, transport, _ = launched(Worker(), config())
    with caplog.at_level(logging.INFO, "envmgr"):
        found = tried(engine, config())
    assert found == Calibration(8, 2, choose(8, 2, trial(100), TYPICAL), 0.125, trial(100))
    assert found.choice.num_workers == 2
    (host,) = transport.hosts.values()
    (_, reset, calibrate) = host.received
    assert (reset.op, reset.payload.params, reset.payload.seed) == (Op.RESET, {"level": 3}, 7)
    assert (calibrate.op, calibrate.payload) == (Op.APPLY, (try_env, (STEPPING_S,)))
    assert [(r.levelname, r.message) for r in caplog.records] == [("INFO", str(found))]


def test_what_waking_the_worker_costs_is_measured_before_it_is_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, transport, _ = launched(Worker(), config())
    slow = WakeUp(1000 * US, 40 * US)

    def measured(asked: Engine) -> WakeUp:
        (host,) = transport.hosts.values()
        assert asked is engine
        assert [message.op for message in host.received] == [Op.HELLO]
        return slow

    monkeypatch.setattr("envmgr.calibrate.measure_wake_up", measured)
    found = tried(engine, config())
    assert found.wake_up == slow
    assert found.choice == choose(8, 2, trial(100), slow)
    assert found.choice.num_workers == 1


def test_a_worker_that_dies_while_its_waking_is_measured_means_one_worker_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = config(max_retry=3)
    engine, transport, _ = launched(Worker(), wanted)

    def measured(asked: Engine) -> None:
        transport.die(0)
        asked.collect()

    monkeypatch.setattr("envmgr.calibrate.measure_wake_up", measured)
    found = tried(engine, wanted)
    assert found.choice.num_workers == 8
    assert "killed by SIGKILL" in found.choice.reason


@pytest.mark.parametrize("during", [Op.HELLO, Op.RESET, Op.APPLY])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (RemoteFailure(FailureKind.RAISED, "reset", "ValueError", "no"), "ValueError in its reset"),
        (RemoteFailure(FailureKind.EXITED, "step", "SystemExit", "3"), "called sys.exit(3)"),
        (HostDied(KILLED), "killed by SIGKILL"),
        (Garbage("these bytes"), "these bytes"),
        (None, " s "),
    ],
    ids=["raises", "exits", "dies", "garbage", "hangs"],
)
def test_an_env_that_fails_means_one_worker_each(
    during: Op, fault: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = config(max_retry=3, connect_timeout=20.0)
    engine, transport, _ = launched(Worker(during, fault), wanted)
    with caplog.at_level(logging.INFO, "envmgr"):
        found = tried(engine, wanted)
    assert found.choice.num_workers == 8
    assert found.choice.reason.startswith("an env could not be tried out: ")
    assert text in found.choice.reason
    assert "\n" not in str(found)
    assert found.trial is None
    assert (found.construction_s is None) is (during is Op.HELLO)
    assert len(transport.hosts) == 1
    assert [r.message for r in caplog.records] == [str(found)]


@pytest.mark.parametrize(
    ("during", "limits", "limit_s", "text"),
    [
        (Op.HELLO, {"connect_timeout": 20.0}, 20.0, "the 20 s of connect_timeout"),
        (Op.RESET, {}, PATIENCE_S, "not answered 5 s into the first reset"),
        (Op.RESET, {"reset_timeout": 0.5}, 0.5, "not answered 0.5 s into the first reset"),
        (Op.RESET, {"reset_timeout": 100.0}, PATIENCE_S, "not answered 5 s into the first reset"),
        (Op.APPLY, {}, STEPPING_S + PATIENCE_S, "not answered 5.3 s into its steps"),
        (Op.APPLY, {"step_timeout": 0.25, "reset_timeout": 0.5}, STEPPING_S + 1.5, "1.8 s"),
        (Op.APPLY, {"step_timeout": 0.25}, STEPPING_S + 1.5, "1.8 s"),
        (Op.APPLY, {"step_timeout": 100.0, "reset_timeout": 0.5}, STEPPING_S + 5.0, "5.3 s"),
    ],
)
def test_patience_has_an_end(
    during: Op, limits: dict[str, float], limit_s: float, text: str
) -> None:
    engine, _, clock = launched(Worker(during, seconds=0.0), config(**limits))
    began = clock()
    found = tried(engine, config(**limits))
    assert clock() - began == pytest.approx(limit_s)
    assert text in found.choice.reason


@pytest.mark.parametrize(
    "answer", ["not a trial", trial(100)._replace(n_steps=0), trial(100)._replace(resets_s=-1.0)]
)
def test_an_answer_that_is_no_trial(answer: Any) -> None:
    engine, _, _ = launched(Worker(measured=answer), config())
    found = tried(engine, config())
    assert found.choice.reason.endswith("something else than a trial")
    assert found.choice.num_workers == 8


def test_it_is_given_up_when_the_manager_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    engine, transport, clock = launched(Worker(Op.APPLY), config())
    began = clock()
    transport.call_after(1.0, lambda: engine.close(0.0))
    with pytest.raises(ManagerClosedError, match="closed by another thread"):
        tried(engine, config())
    assert clock() - began == 1.0
    assert not caplog.records


def test_a_wait_is_never_without_end() -> None:
    engine, transport, _ = launched(Worker(Op.HELLO), config())
    tried(engine, config())
    assert all(poll.timeout_s is not None for poll in transport.polls)


# -- waking a worker ------------------------------------------------------------------------------


class Doorbells(FakeTransport):
    """A worker that rings back after so many seconds, and a trainer that computes for each ring.

    Args:
        clock: moved by it.
        trips_us: microseconds until it rings back, in order, the last one for ever; None: something
            else comes first, and the ring is lost in it. No ring is seen before that is read.
        computes_us: of the trainer, likewise.
    """

    def __init__(
        self, clock: FakeClock, trips_us: Iterable[float | None], computes_us: Iterable[float]
    ) -> None:
        super().__init__(clock, answer=Worker(seconds=0.0))
        self._trips_us, self._computes_us = iter(trips_us), iter(computes_us)
        self._trip_us: float | None = None
        self._compute_us = self.cpu_s = 0.0
        self.n_rings = 0
        self._has_unread = False

    @property
    def has_block(self) -> bool:
        return True

    def ring(self, host_ids: Iterable[int], *, asks: bool = False) -> None:
        assert asks, "else nobody rings back"
        assert list(host_ids) == list(self.hosts)
        self.n_rings += 1
        self._trip_us = next(self._trips_us, self._trip_us)
        self._compute_us = next(self._computes_us, self._compute_us)

    def await_ring(self, timeout_s: float) -> bool:
        self.cpu_s += self._compute_us * US
        self._has_unread = self._has_unread or self._trip_us is None
        if self._has_unread or self._trip_us is None:
            return False
        self.clock.advance(min(self._trip_us * US, timeout_s))
        return self._trip_us * US <= timeout_s

    def poll(self, timeout_s: float | None, *, pivot: int | None = None) -> None:
        super().poll(timeout_s, pivot=pivot)
        self._has_unread = False


def woken(
    trips_us: Iterable[float | None], computes_us: Iterable[float] = (10,)
) -> tuple[WakeUp | None, Doorbells, float]:
    """Return what is measured, the doorbells, and how long it took."""
    clock = FakeClock()
    transport = Doorbells(clock, trips_us, computes_us)
    engine = ringing(transport, clock)
    began = clock()
    with engine.calling:
        found = measure_wake_up(engine, lambda: transport.cpu_s)
    took_s = clock() - began
    engine.close(0.0)
    return found, transport, took_s


def ringing(transport: Doorbells, clock: FakeClock) -> Engine:
    engine = build_engine([make_one], trial_config_of(config()), transport, (None, None), clock)
    engine.supervisor.start_hosts([0])
    return engine


def test_a_hundred_round_trips_are_taken() -> None:
    found, transport, took_s = woken([50])
    assert found == pytest.approx((50 * US, 20 * US))  # the worker computes as much
    assert transport.n_rings == 1 + ROUND_TRIPS
    assert took_s == pytest.approx(transport.n_rings * 50 * US)


def test_the_quickest_quarter_counts() -> None:
    found, _, _ = woken([50] + [4000] * 3 + [50], [10] + [900] * 3 + [10])
    assert found == pytest.approx((50 * US, 20 * US))
    found, _, _ = woken([50] * 6 + [4000], [10] * 6 + [900])
    assert found == pytest.approx((50 * US, 20 * US))
    found, _, _ = woken([50] * 2 + [4000], [10] * 2 + [900])  # one that is unlike all others
    assert found == pytest.approx((4000 * US, 1800 * US))


def test_slow_round_trips_are_fewer() -> None:
    found, transport, took_s = woken([500])
    assert found is not None
    assert found.round_trip_s == pytest.approx(500 * US)
    assert transport.n_rings == pytest.approx(1 + WAKING_S / (500 * US), abs=1)
    assert took_s == pytest.approx(WAKING_S, abs=501 * US * 2)


def test_but_not_too_few_to_tell() -> None:
    found, transport, took_s = woken([4000])
    assert found is not None
    assert found.round_trip_s == pytest.approx(4000 * US)
    assert transport.n_rings == 1 + LEAST_TRIPS
    assert took_s == pytest.approx(transport.n_rings * 4000 * US)


def test_a_worker_that_is_still_starting_is_waited_for() -> None:
    late = [None] * 3 + [1e9] * 50
    found, transport, took_s = woken([*late, 50])
    assert found == pytest.approx((50 * US, 20 * US))
    assert transport.n_rings == len(late) + 1 + ROUND_TRIPS
    assert took_s == pytest.approx(50 * LATE_S + (1 + ROUND_TRIPS) * 50 * US)


def test_a_round_trip_that_something_else_comes_into_does_not_count() -> None:
    found, transport, _ = woken([50, None, 50, 1e9, 50])
    assert found == pytest.approx((50 * US, 20 * US))
    assert transport.n_rings == 1 + ROUND_TRIPS + 2


def test_a_worker_that_does_not_ring_back_is_not_waited_for_in_vain() -> None:
    found, _, took_s = woken([1e9])
    assert found is None
    assert took_s == pytest.approx(2 * ROUND_TRIPS * LATE_S)
    found, transport, took_s = woken([None])  # a transport that waits for no rings
    assert found is None
    assert (transport.n_rings, took_s) == (2 * ROUND_TRIPS, 0.0)


def test_nothing_is_measured_where_there_are_no_doorbells() -> None:
    engine, transport, clock = launched(Worker(), config())
    began = clock()
    with engine.calling:
        assert measure_wake_up(engine) is None
    assert clock() == began
    assert not transport.sent
    engine.close(0.0)


def test_doorbells_that_are_closed_meanwhile_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    transport = Doorbells(clock, [50], [10])
    engine = ringing(transport, clock)

    def fails(timeout_s: float) -> bool:
        raise ValueError("I/O operation on closed epoll object")

    monkeypatch.setattr(transport, "await_ring", fails)
    with engine.calling:
        with pytest.raises(ValueError, match="closed epoll"):
            measure_wake_up(engine)
        engine.closing = True  # by a signal handler
        assert measure_wake_up(engine) is None
    engine.close(0.0)
