"""Gathering compared with a description of it that looks at the whole future at once."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from envmgr.policy import GatherPolicy
from envmgr.wire.messages import Op
from tests.property.profiles import PROFILE
from tests.rig import Rig

INF = math.inf
MOMENTS = st.integers(0, 12).map(lambda n: n / 4)  # few, so that they coincide
EXAMPLES = 400 if PROFILE == "short" else 20_000


@st.composite
def futures(draw: st.DrawFn) -> list[tuple[float, bool]]:
    """When the timestep of each env comes, and whether it ends the episode."""
    return draw(st.lists(st.tuples(MOMENTS | st.just(INF), st.booleans()), min_size=1, max_size=6))


def expected_end(
    future: list[tuple[float, bool]], policy: GatherPolicy, deadline: float, *, exactly: bool
) -> float:
    """Return the first moment at which a gather may return."""
    needed = policy.needed(len(future))

    def enough(now: float) -> bool:
        arrived = [done for moment, done in future if moment <= now]
        if len(arrived) < needed:
            return False
        return exactly or len(arrived) == len(future) or not all(arrived)

    moments = sorted({0.0, *(moment for moment, _ in future if moment < INF)})
    satisfied = next((now for now in moments if enough(now)), INF)
    if satisfied > deadline:
        return deadline
    last = max(moment for moment, _ in future)
    stragglers = min(max(last, satisfied), satisfied + policy.step_wait_timeout_s)
    return min(stragglers, deadline)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    futures(),
    st.sampled_from([1, 2, 3, INF]),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from([0.0, 0.5, 2.0, 50.0]),
    st.booleans(),
)
def test_a_gather_returns_at_the_first_moment_it_may_with_all_that_is_there(
    future: list[tuple[float, bool]],
    wait_num: float,
    stragglers_s: float,
    deadline_s: float,
    exactly: bool,
) -> None:
    rig = Rig(len(future)).launch()
    rig.send(dict.fromkeys(range(len(future)), "act"))
    for env_id, (moment, done) in enumerate(future):
        if moment < INF:
            payload = (f"next of {env_id}", 1.0, done, {}, 0)
            rig.transport.reply(env_id, Op.STEPPED, payload, after_s=moment)
    policy = GatherPolicy(wait_num, stragglers_s)
    began = rig.clock()
    env_ids = rig.gather.some(policy, deadline=began + deadline_s, exactly=exactly)
    took = rig.clock() - began

    end = expected_end(future, policy, deadline_s, exactly=exactly)
    assert took == end
    assert env_ids == list(range(len(future)))
    delivered = rig.supervisor.deliver(env_ids)
    assert list(delivered) == [i for i, (moment, _) in enumerate(future) if moment <= end]
    assert all(step.obs == f"next of {i}" for i, step in delivered.items())


@settings(max_examples=EXAMPLES, deadline=None)
@given(futures(), st.data())
def test_a_gather_of_certain_envs_ends_with_the_last_of_them(
    future: list[tuple[float, bool]], data: st.DataObject
) -> None:
    coming = [i for i, (moment, _) in enumerate(future) if moment < INF]
    if not coming:
        return
    wanted = data.draw(st.lists(st.sampled_from(coming), unique=True, min_size=1))
    rig = Rig(len(future)).launch()
    rig.send(dict.fromkeys(range(len(future)), "act"))
    for env_id in coming:
        moment, done = future[env_id]
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, done, {}, 0), after_s=moment)
    began = rig.clock()
    assert rig.gather.exactly(wanted) == wanted
    assert rig.clock() - began == max(future[i][0] for i in wanted)
    assert list(rig.supervisor.deliver(wanted)) == wanted
