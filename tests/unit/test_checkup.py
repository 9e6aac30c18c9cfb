"""What `envmgr check` thinks of what it has found, without any process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest

import envmgr
from envmgr.errors import EnvCrash, EnvManagerError, EnvRaised, EnvTimeout
from envmgr.manager.tally import ATTEMPTS, EnvHang, Tally
from envmgr.testing.checkup import (
    Finding,
    Level,
    checkup,
    laboratory,
    leaks,
    probes,
    verdict_of,
    verdicts,
)
from envmgr.testing.checkup.interrupting import Interrupted
from envmgr.testing.checkup.laboratory import Laboratory, ProbeResult, own_frames
from envmgr.testing.checkup.probes import Description, Endured, Trajectory
from envmgr.testing.checkup.processes import Holdings
from envmgr.worker.profiling import run_profile

HAS = Holdings(10_000_000, 8, 1, 0)


def levels(findings: Sequence[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


def description(**changes: Any) -> Description:
    plain = Description("E", ("Box", "Discrete"), (), "", 0.01, HAS, HAS, (), None, ())
    return plain._replace(**changes)


@pytest.mark.parametrize(
    ("values", "goes_on"),
    [
        ([10.0] * 40, False),
        ([float(n) for n in range(40)], True),
        ([min(n, 12.0) for n in range(40)], False),  # a cache that is full
        ([40.0 * (1 - 0.8**n) for n in range(40)], False),  # one that is nearly so
        ([10.0 + n % 2 for n in range(40)], False),
        ([0.01 * n for n in range(40)], False),  # less than what counts
        ([float(n) for n in range(5)], False),  # too few
        ([None] * 40, False),
    ],
)
def test_a_leak_goes_on_and_a_cache_does_not(values: list[float | None], goes_on: bool) -> None:
    assert (leaks.leak_of(values, 2.0) is not None) == goes_on


def test_each_thing_that_leaks_is_named_with_its_rate() -> None:
    samples = [(25 * k, HAS._replace(fds=8 + 25 * k)) for k in range(41)]
    (finding,) = leaks.of_endurance(Endured(1000, 9000, 0, tuple(samples)), 1000)
    assert finding.level is Level.PROBLEM
    assert "open files" in finding.text
    assert finding.figures["per_episode"] == pytest.approx(1.0)
    clean = [(25 * k, HAS) for k in range(41)]
    assert levels(leaks.of_endurance(Endured(1000, 9000, 0, tuple(clean)), 1000)) == [Level.OK]
    (cut,) = leaks.of_endurance(Endured(1000, 10, 2, tuple(clean[:3])), 1000)
    assert cut.level is Level.NOTE
    assert "of 1,000 asked for" in cut.text
    assert "cut short" in cut.text
    assert "not judged" in cut.text
    assert "--seconds" in cut.advice
    (few,) = leaks.of_endurance(Endured(50, 10, 0, tuple(clean[:3])), 50)
    assert few.level is Level.NOTE
    assert "--episodes" in few.advice


def test_episodes_that_never_end_are_noted() -> None:
    samples = tuple((k, HAS) for k in range(21))
    endless, judged = leaks.of_endurance(Endured(20, 20_000, 20, samples), 20)
    assert (endless.part, endless.level) == ("episodes", Level.NOTE)
    assert "no episode ended in 20,000 random steps" in endless.text
    assert judged.level is Level.OK
    assert len(leaks.of_endurance(Endured(20, 20_000, 19, samples), 20)) == 1


class Astray(gymnasium.Env[Any, Any]):
    """Its observations leave their Box in one part, the farther the more steps there were."""

    observation_space = gymnasium.spaces.Dict(
        {
            "far": gymnasium.spaces.Box(-1.0, np.array([1.0, np.inf]), (2,), np.float64),
            "near": gymnasium.spaces.Box(0, 255, (2,), np.uint8),
        }
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.n = 0
        return self.seen(), {}

    def seen(self) -> Any:
        return {"far": np.array([-0.5 * self.n, 1e9]), "near": np.full(2, 255, np.uint8)}

    def step(self, action: Any) -> Any:
        self.n += 1
        return self.seen(), 0.0, self.n == 5, False, {}


def test_observations_outside_of_their_box_are_found() -> None:
    found = probes.describe(Astray, 10)
    assert found.outside == {"observation['far']": probes.Outside(6, 1.5, -2.5, -1.0)}
    (finding,) = (one for one in verdicts.of_description(found) if one.part == "bounds")
    assert finding.level is Level.WARNING
    assert finding.text == (
        "observation['far'] is outside of its Box in 6 of 11 observations: -2.5 at the farthest, "
        "where low is -1"
    )


def test_a_process_that_dies_early_is_no_matter_of_time() -> None:
    samples = tuple((k, HAS) for k in range(16))
    (finding,) = leaks.of_endurance(Endured(15, 90, 0, samples), 1000)
    assert "of 1,000 asked for; its process ended before more" in finding.text
    (finding,) = leaks.of_endurance(Endured(1, 9, 0, samples[:2]), 1000)
    assert "not judged" in finding.text
    assert "Give more" not in finding.advice


def test_deaths_are_counted_and_judged_by_their_share_of_the_steps() -> None:
    crash = ProbeResult(failure=EnvCrash("w died: exit code 7", env_id=0, during="call"))
    died = {"n_died": verdicts.Losses((crash,) * 9, 9), "n_hung": verdicts.Losses()}
    (finding,) = verdicts.of_failures(probes.Plays(), died, 30, 900)
    assert finding.level is Level.WARNING
    assert finding.text.startswith("in 9 of 30 trials its process died: exit code 7")
    assert "in about one of 100 random steps" in finding.text
    (finding,) = verdicts.of_failures(probes.Plays(), died, 30, 45)
    assert finding.level is Level.PROBLEM
    assert "max_failure_share" in finding.advice
    (finding,) = verdicts.of_failures(probes.Plays(), died, 9, 9)
    assert "in most random steps" in finding.text
    assert verdicts.of_failures(probes.Plays(), {"n_died": verdicts.Losses()}, 30, 900) == []


def hang(stacks: str = "") -> EnvHang:
    return EnvHang("w hung", env_id=0, during="call", limit_s=4.0, stacks=stacks)


def test_hangs_are_judged_as_deaths_are() -> None:
    hung = ProbeResult(failure=hang('  File "/e/sim.py", line 7 in step'))
    (finding,) = verdicts.of_failures(
        probes.Plays(), {"n_hung": verdicts.Losses((hung,) * 3, 2)}, 30, 1000
    )
    assert finding.level is Level.WARNING
    assert finding.text.startswith(
        "in 3 of 30 trials it hung: nothing came within 4 s; in about one of 500 random steps\n"
        '  File "/e/sim.py"'
    )
    assert "step_timeout" in finding.advice
    assert finding.figures == {"n_tries": 30, "n_hung": 3, "share_of_steps": 0.002}


class FakeLaboratory:
    """Runs probes in this process; the env is lost in the first attempts."""

    def __init__(self, failures: Sequence[EnvManagerError]) -> None:
        self.failures = list(failures)
        self.efforts: list[Any] = []

    def run(
        self, probe: Any, path: str, what: Any, factory: Any, *args: Any, place: int, tally: Tally
    ) -> ProbeResult:
        self.efforts.append(args[0])
        for _ in range(100):
            tally.step_begins()
        if self.failures:
            return ProbeResult(failure=self.failures.pop())
        return ProbeResult(("value", probes.Plays(100)))


def check_with(laboratory: Any, tally: Tally) -> checkup._Check:
    return checkup._Check(laboratory, Astray, checkup.CheckOptions(), None, tally)


def test_a_probe_that_hangs_is_tried_again_with_less_to_do() -> None:
    died = EnvCrash("w died: exit code 7", env_id=0, during="call")
    laboratory = FakeLaboratory([died, hang(), hang()])
    with closing(Tally()) as tally:
        check = check_with(laboratory, tally)
        assert check._try(probes.pace, Astray, effort=640).value == "value"
        findings = check.now_and_then()
    assert laboratory.efforts == [640, 80, 10, 1]
    assert not check.is_over
    assert [one.figures.get("n_died") for one in findings] == [1, None]
    assert [one.figures.get("n_hung") for one in findings] == [None, 2]
    assert findings[1].figures["share_of_steps"] == 2 / 400


def test_what_hangs_at_each_attempt_is_over_at_the_second_probe() -> None:
    laboratory = FakeLaboratory([hang() for _ in range(2 * ATTEMPTS)])
    with closing(Tally()) as tally:
        check = check_with(laboratory, tally)
        for n in (1, 2):
            assert not check.is_over
            assert isinstance(check._try(probes.pace, Astray, effort=640).failure, EnvHang)
            assert len(laboratory.efforts) == n * ATTEMPTS
    assert "hangs" in check.is_over


def test_a_hang_outside_of_steps_and_resets_is_not_tried_again() -> None:
    hung = EnvTimeout("w hung", env_id=0, during="call", limit_s=60.0)
    laboratory = FakeLaboratory([hung])
    with closing(Tally()) as tally:
        assert check_with(laboratory, tally)._try(probes.rendered, Astray, 0).failure is hung
    assert len(laboratory.efforts) == 1


def test_what_has_grown_does_not_stay_as_it_is_though_it_is_no_leak() -> None:
    def judged(*mb: float) -> Finding:
        n = 25 * (len(mb) - 1)
        samples = [(25 * k, HAS._replace(rss_bytes=int(1e6 * one))) for k, one in enumerate(mb)]
        (finding,) = leaks.of_endurance(Endured(n, 9000, 0, tuple(samples)), n)
        return finding

    for mb in ([*range(0, 80, 4), *([80] * 20)], [0] * 30 + [60] * 10):
        assert judged(*mb).level is Level.NOTE
        assert "memory has grown by" in judged(*mb).text
        assert "stay" not in judged(*mb).text
    assert judged(0, *([200] * 39)).level is Level.OK  # what the first episode imports
    assert judged(*[0.2 * k for k in range(40)]).level is Level.WARNING


def test_what_the_system_does_not_tell_is_not_said_to_stay() -> None:
    samples = tuple((k, Holdings(None, None, 1, None)) for k in range(30))
    (finding,) = leaks.of_endurance(Endured(29, 90, 0, samples), 29)
    assert finding.level is Level.OK
    assert finding.text.endswith(": threads stay as they are")


class Leaking(gymnasium.Env[Any, Any]):
    """Keeps a block of memory of each of its episodes, which end after three steps."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, n_bytes: int) -> None:
        self.kept: list[Any] = []
        self.n_bytes = n_bytes

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.n = 0
        self.kept.append(np.ones(self.n_bytes, np.uint8))
        return 0, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.n += 1
        return 0, 0.0, self.n == 3, False, {}


@pytest.mark.skipif(sys.platform != "linux", reason="nothing tells of memory elsewhere")
@pytest.mark.parametrize(("n_bytes", "episodes"), [(50_000, 1000), (100_000, 300), (3_000_000, 20)])
def test_memory_that_was_freed_before_hides_no_leak(n_bytes: int, episodes: int) -> None:
    """The allocator keeps what the env of the probe before had leaked, and gives it out again."""
    make = functools.partial(Leaking, n_bytes)
    with closing(Laboratory()) as laboratory, closing(Tally()) as tally:
        for probe, *args in ((probes.pace, 0.3), (probes.endure, episodes, 20.0)):
            result = laboratory.run(probes.counted_plays, tally.path, probe, make, *args)
        n_steps = tally.n
    endured, plays = result.value
    assert n_steps > plays.n_steps == endured.n_steps == 3 * episodes
    assert len(endured.samples) >= min(episodes, probes.MOST_SAMPLES // 2)
    (finding,) = leaks.of_endurance(endured, episodes)
    assert finding.figures["per_episode"] == pytest.approx(n_bytes, rel=0.1)


def test_envs_that_are_closed_leave_nothing() -> None:
    kept = [HAS._replace(fds=8 + k) for k in range(6)]
    assert levels(leaks.of_rebuilding(kept)) == [Level.WARNING]
    assert levels(leaks.of_rebuilding([HAS] * 6)) == [Level.OK]
    assert leaks.of_rebuilding([HAS] * 2) == []


def run(*values: int, again: tuple[int, ...] | None = None, seeded: bool = True) -> ProbeResult:
    return ProbeResult(Trajectory(seeded, values, values if again is None else again))


def test_trajectories_are_compared_with_the_first() -> None:
    same = {"in a worker": run(1, 2, 3), "with spawn": run(1, 2, 3)}
    assert levels(verdicts.of_trajectories(same)) == [Level.OK]
    (finding,) = verdicts.of_trajectories({**same, "with fork": run(1, 9, 3)})
    assert finding.level is Level.PROBLEM
    assert "with fork than in a worker, from value 1 on" in finding.text
    (finding,) = verdicts.of_trajectories({"in a worker": run(1, 2, again=(1, 3))})
    assert finding.level is Level.WARNING
    (finding,) = verdicts.of_trajectories({"in a worker": run(1, again=(2,), seeded=False)})
    assert "takes no seeds" in finding.text
    (finding,) = verdicts.of_trajectories({"in a worker": run(1, 2), "with fork": run(1)})
    assert "from value 1 on" in finding.text
    crashed = ProbeResult(failure=EnvCrash("host died: killed by SIGSEGV", env_id=0, during="call"))
    found = verdicts.of_trajectories({"in a worker": crashed, "with fork": run(1)})
    assert levels(found) == [Level.PROBLEM]
    assert "its process died: killed by SIGSEGV" in found[0].text


class Slow(Astray):
    """Reads a clock that each of its steps moves on by a second."""

    clock = 0.0

    def step(self, action: Any) -> Any:
        type(self).clock += 1.0
        return super().step(action)


def test_slow_steps_are_fewer_and_do_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: Slow.clock)
    assert probes.describe(Slow, 200, 3.0).n_observations == 4
    assert probes.contract(Slow, 200, 0, 3.0) is not None
    assert Slow.clock == 6.0
    found = probes.trajectory(Slow, 200, 0, 200, 3.0)
    assert Slow.clock == 12.0
    assert (len(found.first), len(found.again)) == (5, 5)
    assert found.first[-1] == probes.CUT
    (finding,) = verdicts.of_trajectories(
        {"in a worker": run(1, 2, 3, probes.CUT, again=(1, 2, -1))}
    )
    assert finding.level is Level.OK
    assert finding.text.startswith("2 values")


def _traceback_through(path: str) -> str:
    """Return one of an env that opens something, in a probe that opens the env."""
    return (
        "Traceback of it:\n"
        f'  File "{laboratory.__file__}", line 1, in probe\n'
        "    with env_of(factory) as env:\n"
        f'  File "{path}", line 137, in __enter__\n'
        "    return next(self.gen)\n"
        f'  File "{laboratory.__file__}", line 2, in env_of\n'
        "    env = factory()\n"
        '  File "/home/me/sim.py", line 3, in __init__\n'
        "    with opened():\n"
        f'  File "{path}", line 137, in __enter__\n'
        "    return next(self.gen)\n"
        "ValueError: no\n"
    )


def test_failures_say_where_in_the_code_of_the_env_they_happened() -> None:
    stack = (
        "Current thread 0x1 (most recent call first):\n"
        '  File "/home/me/sim.py", line 7 in step\n'
        f'  File "{envmgr.__path__[0]}/env/steps.py", line 31 in step_env\n'
    )
    hung = EnvTimeout("x", env_id=0, during="call", limit_s=4.0, stacks=stack)
    finding = verdicts.failed("leaks", ProbeResult(failure=hung), "running episodes")
    assert "it hung: nothing came within 4 s" in finding.text
    assert "/home/me/sim.py" in finding.text
    assert "steps.py" not in finding.text
    assert own_frames("words\n") == "words"
    assert own_frames(_traceback_through(contextlib.__file__)) == (
        "Traceback of it:\n"
        '  File "/home/me/sim.py", line 3, in __init__\n'
        "    with opened():\n"
        f'  File "{contextlib.__file__}", line 137, in __enter__\n'
        "    return next(self.gen)\n"
        "ValueError: no"
    )
    raised = EnvRaised("x", env_id=0, during="call", type_name="ValueError", remote_message="no\n1")
    assert ProbeResult(failure=raised).text == "it raised ValueError: no 1"


def test_what_an_env_is_may_be_worth_a_warning() -> None:
    assert levels(verdicts.of_description(description())) == [Level.OK, Level.OK]
    odd = description(
        handlers=("SIGINT",),
        casts=("observation is float64, its space float32",),
        unpicklable="TypeError: a lock",
        after=HAS._replace(children=2),
    )
    found = {finding.part: finding.level for finding in verdicts.of_description(odd)}
    assert found == {
        "construction": Level.OK,
        "signals": Level.WARNING,
        "processes": Level.NOTE,
        "dtypes": Level.NOTE,
        "pickling": Level.PROBLEM,
    }


def test_the_contract_is_kept_or_not() -> None:
    assert levels(verdicts.of_contract([])) == [Level.OK]
    broken = [("observation", "value has shape (3,)"), ("spaces", "they have no fixed layout")]
    assert levels(verdicts.of_contract(broken)) == [Level.PROBLEM, Level.WARNING]


def test_resets_frames_and_start_methods() -> None:
    failure = ProbeResult(failure=EnvRaised("x", env_id=0, during="call", type_name="TypeError"))
    assert verdicts.of_reset_options(ProbeResult(), ProbeResult()).level is Level.OK
    assert verdicts.of_reset_options(ProbeResult(), failure).level is Level.NOTE
    assert verdicts.of_reset_options(failure, ProbeResult()).level is Level.PROBLEM
    frame = ProbeResult(("an array (4, 4, 3) of uint8", 0.01))
    modes = description(render_modes=("rgb_array",))
    assert verdicts.of_rendering(description(), None, None).level is Level.OK
    tried = verdicts.of_rendering(modes, frame, "rgb_array")
    assert (tried.level, tried.advice) == (Level.OK, "")
    assert "render_mode rgb_array (env.kwargs has none): an array (4, 4, 3)" in tried.text
    assert verdicts.of_rendering(modes, failure, "rgb_array").level is Level.NOTE
    configured = modes._replace(render_mode="rgb_array")
    assert verdicts.of_rendering(configured, failure, "rgb_array").level is Level.WARNING
    assert verdicts.of_methods({}).level is Level.OK
    assert "spawn: no main" in verdicts.of_methods({"spawn": "no\nmain"}).text


def test_the_end_at_ctrl_c() -> None:
    assert verdicts.of_interrupt(Interrupted(took_s=0.2), 5.0).level is Level.OK
    assert verdicts.of_interrupt(Interrupted(took_s=5.2), 5.0).level is Level.WARNING
    assert verdicts.of_interrupt(Interrupted(left=1), 5.0).level is Level.PROBLEM
    assert verdicts.of_interrupt(Interrupted(problem="it hangs"), 5.0).level is Level.PROBLEM


def test_times_come_with_advice() -> None:
    def profiled(step_s: float, reset_s: float) -> dict[str, Any]:
        clock = itertools.count()
        now = [0.0]

        def take(action: int) -> bool:
            now[0] += step_s
            return next(clock) % 10 == 9

        def reset() -> None:
            now[0] += reset_s

        return run_profile(
            take,
            reset,
            lambda: 0,
            100 * step_s + 5 * reset_s,
            now_s=lambda: now[0],
            cpu_s=lambda: now[0],
            queued_s=lambda: 0.0,
        ).as_dict()

    cheap, slow = profiled(1e-5, 1e-5), profiled(2e-3, 0.2)
    assert cheap["step_mean_s"] == pytest.approx(1e-5)
    assert cheap["step_std_s"] == pytest.approx(0.0, abs=1e-9)
    assert cheap["step_wait_share"] == pytest.approx(0.0)
    assert slow["episode_steps"] == 10, "of whole episodes"
    assert slow["reset_mean_s"] == pytest.approx(0.2)
    assert "num_workers: auto" in verdicts.of_pace(cheap)[0].advice
    assert verdicts.of_pace(slow)[0].text.startswith("a step takes 2 ms (median 2 ms")
    assert "spare_env_num" in verdicts.of_pace(slow)[0].advice
    uneven = {**slow, "step_p99_s": 0.5, "reset_mean_s": 0.0}
    assert "async_subprocess" in verdicts.of_pace(uneven)[0].advice


def test_the_verdict_is_that_of_the_worst() -> None:
    def found(*levels: Level) -> str:
        return verdict_of([Finding("part", level, "text") for level in levels])

    assert found(Level.OK, Level.NOTE).startswith("ready")
    assert found(Level.OK, Level.WARNING) == "it runs, with 1 warning"
    assert found(Level.PROBLEM, Level.WARNING) == "not ready: 1 problem, 1 warning"
    assert found() == found(Level.OK)


class Telling(gymnasium.Env[Any, Any]):
    """Has something in its infos."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, told: Any) -> None:
        self._told = told

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0, {"told": self._told}

    def step(self, action: Any) -> Any:
        return 0, 0.0, False, False, {}


def test_infos_are_pickled_as_in_a_run() -> None:
    assert not probes.describe(lambda: Telling(lambda: 1), 20).unpicklable
    assert "lock" in probes.describe(lambda: Telling(threading.Lock()), 20).unpicklable
