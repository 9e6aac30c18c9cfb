"""What files of tests of the core share: envs in some situation, ways to fail, and to recover."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box

from envmgr.env.batch_specs import Batch
from envmgr.errors import EnvCrash, EnvProtocolError, EnvRaised, EnvReportedAbnormal, EnvTimeout
from envmgr.policy import Deadlines
from envmgr.wire.messages import AfterStep, FailureKind, Op
from tests.rig import Rig


def make_one() -> None: ...


FLOATS = Box(-1, 1, (2,), np.float32)


def recover(rig: Rig, env_id: int = 0, obs: Any = "first") -> None:
    """Have a renewed env be built and reset."""
    rig.hello(env_id)
    rig.reset_done(env_id, obs)


FAILURES = {
    "raised": (lambda rig: rig.fail(), EnvRaised, False),
    "protocol": (lambda rig: rig.fail(kind=FailureKind.PROTOCOL), EnvProtocolError, False),
    "non finite": (lambda rig: rig.fail(kind=FailureKind.NON_FINITE), EnvProtocolError, False),
    "abnormal": (lambda rig: rig.fail(kind=FailureKind.ABNORMAL), EnvReportedAbnormal, False),
    "exited": (lambda rig: rig.fail(kind=FailureKind.EXITED), EnvCrash, True),
    "died": (lambda rig: rig.die(), EnvCrash, True),
    "garbage": (lambda rig: (rig.transport.garbage(0), rig.pump()), EnvProtocolError, True),
    "timeout": (lambda rig: rig.advance(2.0), EnvTimeout, True),
    "malformed": (
        lambda rig: (rig.transport.reply(0, Op.STEPPED, "what?"), rig.pump()),
        EnvProtocolError,
        True,
    ),
    "foreign": (
        lambda rig: (
            rig.transport.reply(0, Op.RESET_DONE, ("first", {}), foreign=True),
            rig.pump(),
        ),
        EnvProtocolError,
        True,
    ),
    "no failure": (
        lambda rig: (rig.transport.reply(0, Op.FAILED, "what?"), rig.pump()),
        EnvProtocolError,
        True,
    ),
}


STEP_LIMIT = Deadlines(step_s=2.0, reset_s=2.0, connect_s=2.0)


PARTIAL, WHOLE = (Batch(0, 3, True),), (Batch(0, 3, False),)


def rows_of_batches(batches: tuple[Batch, ...] = WHOLE, env_num: int = 3, **options: Any) -> Rig:
    """Return launched rows of batched envs, the first of which has three."""
    return Rig(env_num, batches=batches, **options).launch()


RESETS_IN_NEXT_STEP = AfterStep.RESETS_IN_NEXT_STEP


def rows_reset_in_next_step(env_num: int = 3, **options: Any) -> Rig:
    """Return launched rows of a vector env, of whom row 0 has just ended its episode."""
    options = {"reset_inplace": True, **options}
    rig = Rig(env_num, batches=(Batch(0, 3, False),), **options).launch()
    rig.send(dict.fromkeys(range(3), 1))
    rig.stepped(0, "terminal", done=True, after=RESETS_IN_NEXT_STEP)
    rig.stepped(1)
    rig.stepped(2)
    delivered = rig.deliver()
    assert (delivered[0].obs, delivered[0].done) == ("terminal", True)
    return rig


def shared(env_num: int = 3, num_workers: int = 1, **options: Any) -> Rig:
    """Return launched envs that share hosts."""
    return Rig(env_num, num_workers=num_workers, **options).launch()


def recover_all(rig: Rig, *env_ids: int) -> None:
    """Have envs be built and reset, one after another."""
    for env_id in env_ids:
        rig.hello(env_id)
    for env_id in env_ids:
        rig.reset_done(env_id)


def generations(rig: Rig) -> list[int]:
    return [slot.generation for slot in rig.supervisor.envs]


def assert_same(found: Any, given: Any) -> None:
    """Check that a reward is of the same type, dtype, shape and value as another."""
    assert type(found) is type(given)
    np.testing.assert_array_equal(found, given, strict=True)
