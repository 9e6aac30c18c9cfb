"""Time limits: whatever hangs, and whatever its host shows then, is given up in time."""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from envmgr.core import Phase
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.transport.base import Arrival
from envmgr.wire.messages import Message, Op
from tests.fake_hosts import FakeEnvs, FakeHost
from tests.fakes import FakeClock
from tests.rig import Rig, over_routes

STEP_S, RESET_S = 0.5, 1.0
ROUNDS = 3
LONG_S = 60.0


class TickingClock(FakeClock):
    """Goes on a little whenever it is read, as clocks do."""

    tick_s = 0.0

    def __call__(self) -> float:
        self._now += self.tick_s
        return super().__call__()

    def advance_to(self, moment: float) -> None:
        """Let time pass until `moment`, if that is not past."""
        super().advance_to(max(moment, self._now))


class Hangs(FakeEnvs):
    """Some steps never end, nor does their host do anything else.

    What it shows of itself in the block then may be anything: of who stopped just there, and of
    who wrote it.
    """

    def __init__(self, rng: random.Random, *, lies: bool) -> None:
        super().__init__(episode_length=rng.choice([None, 1, 2, 3]))
        self.share = 0.0
        self._rng = rng
        self._lies = lies
        self._hanging: set[int] = set()
        self.rig: Rig | None = None

    def __call__(self, host: FakeHost, message: Message) -> Iterable[tuple[float, Arrival]]:
        """Return the replies to a request."""
        if host.host_id in self._hanging:
            return ()
        if message.op == Op.STEP and self._rng.random() < self.share:
            self._hanging.add(host.host_id)
            if self._lies:
                self._lie(host)
            return ()
        return super().__call__(host, message)

    def _lie(self, host: FakeHost) -> None:
        assert self.rig is not None
        shared, rng = self.rig.transport.shared, self._rng
        if shared is None or shared.block is None:
            return
        index, now = host.in_block.index, self.rig.clock()
        # Not those that may be at something without a limit: nobody is given up for that.
        idle = [s.env_id + 1 for s in self.rig.supervisor.envs if s.phase is Phase.IDLE]
        shared.block.running[index] = rng.choice([0, 99, *idle])
        shared.block.since[index] = rng.choice([float("inf"), float("nan"), now, now - 5.0, 0.0])


@over_routes
@given(
    seed=st.integers(0, 2**32),
    env_num=st.integers(1, 5),
    n_hosts=st.sampled_from([None, 1, 2]),
    share=st.sampled_from([0.2, 0.5]),
    tick_s=st.sampled_from([0.0, 1e-3, 0.03]),
    limits_resets=st.booleans(),
)
def test_whatever_hangs_is_given_up_in_time(
    seed: int,
    env_num: int,
    n_hosts: int | None,
    share: float,
    tick_s: float,
    limits_resets: bool,
) -> None:
    rng = random.Random(seed)
    envs = Hangs(rng, lies=rng.random() < 0.5)
    clock = TickingClock()
    rig = Rig(
        env_num,
        num_workers=min(n_hosts, env_num) if n_hosts else None,
        deadlines=Deadlines(step_s=STEP_S, reset_s=RESET_S if limits_resets else None, close_s=1.0),
        policy=FailurePolicy(max_failures=10**6, max_failures_total=10**6, retry_waiting_s=0.0),
        clock=clock,
    )
    envs.rig, rig.transport.answer = rig, envs
    rig.launch(envs=envs)
    envs.share, clock.tick_s = share, tick_s
    owed: set[int] = set()
    for _ in range(ROUNDS):
        ready = [i for i in rig.ready() if i not in owed and rng.random() < 0.7]
        if ready:
            rig.send(dict.fromkeys(ready, 1))
            owed.update(ready)
        rig.run(rng.choice([0.0, 0.25, STEP_S]))
        owed.difference_update(rig.deliver())
    rig.run(LONG_S)
    assert owed <= rig.deliver().keys()
    assert not rig.supervisor.statistics.outstanding
