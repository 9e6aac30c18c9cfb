"""What is counted and noted of a run."""

from __future__ import annotations

from envmgr.core.phases import Phase
from envmgr.core.statistics import Tracer
from envmgr.errors import EnvCrash, EnvFailure
from envmgr.policy import FailurePolicy
from tests.fakes import FakeClock
from tests.rig import Rig, over_routes


@over_routes
def test_statistics_as_plain_values() -> None:
    rig = Rig(2).launch()
    rig.send(0)
    rig.die()
    found = rig.supervisor.statistics.as_dict()
    assert found["failures"] == 1
    assert found["failures_by_kind"] == {"EnvCrash": 1}
    assert found["failures_by_env"] == {0: 1}
    assert found["latest_failures"] == [str(rig.error())]
    assert found["renewals"] == 1


@over_routes
def test_only_the_latest_failures_are_kept() -> None:
    rig = Rig(policy=FailurePolicy(max_failures=1000)).launch()
    for _ in range(120):
        rig.supervisor.statistics.count_failure(EnvCrash("x", env_id=0, during="step"))
    assert len(rig.supervisor.statistics.latest_failures) == 100
    assert rig.supervisor.statistics.failures_by_env == {0: 120}


# -- what the trainer notes for a timeline --------------------------------------------------------


def test_what_hosts_do_not_note_is_noted_by_the_trainer() -> None:
    clock = FakeClock(8.0)
    tracer = Tracer(clock, 10)
    for moment, phase in [
        (8.0, Phase.STARTING),
        (9.0, Phase.STARTING),
        (10.0, Phase.RESETTING),
        (11.0, Phase.IDLE),
        (12.0, Phase.ENDING),
    ]:
        clock.advance_to(moment)
        tracer.changed(3, phase)
    assert list(tracer._phases) == [(3, "construction", 8.0, 10.0)]


@over_routes
def test_a_log_of_failures_that_raises_keeps_no_env_from_being_repaired() -> None:
    def fail(failure: EnvFailure) -> None:
        raise OSError(28, "No space left on device")

    rig = Rig(2).launch()
    rig.supervisor.statistics.log = fail
    rig.send(0)
    rig.die()
    assert rig.supervisor.statistics.renewals == 1
    assert rig.deliver(0)[0].info["abnormal"]
