"""Launches under anything that envs and hosts may do: each ends, ready or with a typed error."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from envmgr.core.launching import begin_envs, build_envs
from envmgr.env.batch_specs import Batch
from envmgr.errors import EnvFailure, LaunchError, SpaceMismatchError
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy, StartCaps
from envmgr.transport.base import Arrival, Garbage, HostDied
from envmgr.wire.messages import UNANSWERED, FailureKind, Message, Op, RemoteFailure
from tests.fake_hosts import OTHER_SPACES, FakeEnvs, FakeHost
from tests.fakes import FakeClock
from tests.property.profiles import PROFILE
from tests.rig import Rig, over_routes

CONNECT_S, RESET_S, KILL_PATIENCE_S = 8.0, 4.0, 5.0
DURING = {Op.HELLO: "construction", Op.RENEW: "construction", Op.RESET: "reset"}
ANY_OP = (*DURING, Op.CALL)
FAULTS = (
    "raises",
    "exits",
    "dies",
    "hangs",
    "noise",
    "malformed",
    "spaces",
    "later",
    "early",
    "nan",
)


class TooLateError(AssertionError):
    """A launch goes on for longer than all that it may wait for."""


class BoundedClock(FakeClock):
    """A clock that does not go on for ever: waits that warn every 30 s would."""

    end = math.inf

    def advance_to(self, moment: float) -> None:
        """Let time pass until `moment`.

        Raises:
            TooLateError: it is beyond the end.
        """
        if moment > self.end:
            raise TooLateError(f"it is still under way at the end, {self.end}")
        super().advance_to(moment)


class FaultyEnvs(FakeEnvs):
    """Some requests of a launch do not go well, at random.

    Args:
        rng: decides.
        share: how many do not.
        kinds: what may happen in place of the good reply.
        ops: which requests.
    """

    def __init__(
        self, rng: random.Random, share: float, kinds: Iterable[str], ops: Iterable[Op]
    ) -> None:
        super().__init__()
        self.share = share
        self._rng = rng
        self._ops = frozenset(ops)
        self._kinds = list(kinds)
        self._hanging: set[int] = set()

    def __call__(self, host: FakeHost, message: Message) -> Iterable[tuple[float, Arrival]]:
        """Return the replies to a request."""
        if host.host_id in self._hanging or host.ended:
            return ()
        is_asked = message.request_id != UNANSWERED and message.op in self._ops
        if not is_asked or self._rng.random() >= self.share:
            return super().__call__(host, message)
        kind, seconds = self._rng.choice(self._kinds), self._rng.choice([0.0, 0.0, 0.5, 3.0])
        if kind == "later":  # when it has answered, and something else may be under way
            return [*super().__call__(host, message), (seconds, HostDied(-9))]
        if kind == "dies":
            return [(seconds, HostDied(self._rng.choice([0, 1, -9, -11, None])))]
        if kind == "noise":
            return [(seconds, Garbage("these bytes are no frame"))]
        if kind == "hangs":
            self._hanging.add(host.host_id)
            begun = message._replace(op=Op.BEGAN, payload=None)
            announces = message.op in host.spec.settings.announced
            return [(0.0, begun)] if announces and self._rng.random() < 0.5 else ()
        return [(seconds, self._wrong_reply(kind, message))]

    def _wrong_reply(self, kind: str, message: Message) -> Message:
        op = Op(message.op)
        if kind == "malformed":
            return message._replace(op=self._answer_to(op), payload="what?")
        if kind == "spaces" and op in (Op.HELLO, Op.RENEW):
            return message._replace(op=Op.HELLO, payload=OTHER_SPACES)
        if kind == "early":  # it answers what it was not asked
            return message._replace(op=Op.STEPPED, payload=(None, 1.0, False, {}, 0))
        during = DURING.get(op, "call")
        kinds = {"exits": FailureKind.EXITED, "nan": FailureKind.NON_FINITE}
        how = kinds.get(kind, FailureKind.RAISED)
        error = "SystemExit" if kind == "exits" else "RuntimeError"
        return message._replace(op=Op.FAILED, payload=RemoteFailure(how, during, error, "boom"))

    @staticmethod
    def _answer_to(op: Op) -> Op:
        return {Op.RESET: Op.RESET_DONE, Op.CALL: Op.RESULT}.get(op, Op.HELLO)


@dataclass(frozen=True)
class Launch:
    """One launch: the settings, and what goes wrong."""

    env_num: int
    num_workers: int | None
    spare_num: int
    is_batched: bool
    rules: dict[str, Any]
    policy: FailurePolicy
    limits_resets: bool
    kill_takes_s: float | None
    is_early: bool
    replays: bool
    caps: StartCaps
    share: float
    kinds: tuple[str, ...]
    ops: tuple[Op, ...]
    seed: int


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    env_num = draw(st.integers(1, 5))
    spare_num = draw(st.sampled_from([0, 0, 1, 2]))
    num_workers = None if spare_num else draw(st.none() | st.integers(1, env_num))
    auto_reset = draw(st.booleans())
    limits_resets = draw(st.sampled_from([True, True, False]))
    kinds = draw(st.lists(st.sampled_from(FAULTS), min_size=1, unique=True))
    if not limits_resets:  # without a limit an env that hangs is waited for
        kinds = [kind for kind in kinds if kind != "hangs"] or ["dies"]
    return Launch(
        env_num=env_num,
        num_workers=num_workers,
        spare_num=spare_num,
        is_batched=num_workers == 1 and env_num > 1 and draw(st.booleans()),
        rules={
            "auto_reset": auto_reset,
            "reset_inplace": auto_reset and draw(st.booleans()),
            "episode_num": draw(st.sampled_from([math.inf, 1, 2])),
            "raise_non_finite": draw(st.booleans()),
        },
        policy=FailurePolicy(
            recover=draw(st.booleans()),
            max_retry=draw(st.sampled_from([1, 2, 3, 3, 4])),
            renew_between_attempts=draw(st.booleans()),
            retry_waiting_s=draw(st.sampled_from([0.0, 0.25, 100.0])),
            max_failures=draw(st.sampled_from([0, 3])),
            drop_exhausted=draw(st.booleans()),
        ),
        limits_resets=limits_resets,
        kill_takes_s=draw(st.sampled_from([0.0, 0.5])),
        is_early=draw(st.sampled_from([False, False, True])),
        replays=draw(st.sampled_from([False, False, True])),
        caps=StartCaps(
            draw(st.sampled_from([None, None, 1, 2])), draw(st.sampled_from([None, None, 2, 0.5]))
        ),
        share=draw(st.sampled_from([0.1, 0.2, 0.3, 0.6])),
        kinds=tuple(kinds),
        # What fails while it is built is not tried again, so that little else would happen.
        ops=draw(st.sampled_from([(Op.RESET,), (Op.RESET,), (Op.RESET, Op.CALL), ANY_OP])),
        seed=draw(st.integers(0, 2**32)),
    )


def rig_of(launch: Launch, envs: FaultyEnvs, clock: FakeClock) -> Rig:
    """Return what is to be launched."""
    batches = (Batch(0, launch.env_num, partial_steps=True),) if launch.is_batched else ()
    return Rig(
        launch.env_num,
        answer=envs,
        policy=launch.policy,
        deadlines=Deadlines(
            step_s=2.0,
            reset_s=RESET_S if launch.limits_resets else None,
            connect_s=CONNECT_S,
            close_s=1.0,
        ),
        num_workers=launch.num_workers,
        spare_num=launch.spare_num,
        batches=batches,
        kill_takes_s=launch.kill_takes_s,
        caps=None if launch.is_batched else launch.caps,
        clock=clock,
        **launch.rules,
    )


def most_seconds(launch: Launch) -> float:
    """Return how long a launch may take at most: all attempts, one after the other."""
    count, policy = launch.env_num + launch.spare_num, launch.policy
    attempts = count * policy.max_retry + 1
    pause_s = max(60.0, policy.retry_waiting_s)
    each_s = count * (CONNECT_S + 2 * max(RESET_S, 3.0) + 3.0) + KILL_PATIENCE_S + pause_s
    waits_s = 0.0 if launch.caps.per_s is None else 3 * attempts * count / launch.caps.per_s
    return attempts * each_s * (1 if launch.caps.at_once is None else count) + waits_s + 60.0


@pytest.mark.timeout(3600)  # a failure is made small before it is reported, which takes a while
@over_routes
@settings(max_examples=400 if PROFILE == "short" else 10_000, deadline=None)
@given(launch=launches())
def test_every_launch_ends(launch: Launch) -> None:
    envs = FaultyEnvs(random.Random(launch.seed), launch.share, launch.kinds, launch.ops)
    clock = BoundedClock()
    rig = rig_of(launch, envs, clock)
    clock.end = clock() + most_seconds(launch)
    paths = [f"path {i}" for i in range(launch.env_num)] if launch.replays else None
    try:
        with rig.engine.calling:
            if launch.is_early:  # somebody has asked for the spaces before
                rig.supervisor.start_hosts([0])
                rig.engine.wait_for(lambda: False, 1.0)
            build_envs(rig.engine, same_spaces=True)
            begin_envs(rig.engine, paths)
    except SpaceMismatchError:
        event("other spaces")
        return
    except LaunchError as error:
        event("refused")
        failures: dict[int, EnvFailure] = dict(error.failures)
    else:
        failures = {}
    if failures:
        assert all(isinstance(failure, EnvFailure) for failure in failures.values())
        assert all(failure.env_id == env_id for env_id, failure in failures.items())
        return
    event(f"ready, {min(sum(rig.supervisor.statistics.failures_by_kind.values()), 3)} failures")
    clock.end, envs.share = math.inf, 0.0
    assert rig.supervisor.repair.fatal is None
    assert set(rig.supervisor.table.env_states()) == {EnvState.RUN}
    assert rig.ready() == list(range(launch.env_num))
    sent = rig.send(dict.fromkeys(range(launch.env_num), 1))
    assert sent is not None
    taken = rig.gather.exactly(sent)
    if taken is None:  # one has died since, which the settings do not allow
        assert rig.supervisor.repair.fatal is not None
        return
    assert sorted(rig.supervisor.collector.timesteps(taken)) == list(sent.ids)
    assert rig.identity_holds()
