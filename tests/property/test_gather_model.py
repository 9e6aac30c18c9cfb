"""Gathering compared with a description of it that looks at the whole future at once."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from envmgr.policy import GatherPolicy
from envmgr.wire.messages import Op
from tests.property.profiles import PROFILE
from tests.rig import Rig

ROUTES = st.sampled_from([False, True])
"""Whether there is a block."""

PACKINGS = st.sampled_from([None, 1, 2])
"""How many hosts share the envs, at most; None: one for each."""

INF = math.inf
MOMENTS = st.integers(0, 12).map(lambda n: n / 4)  # few, so that they coincide
EXAMPLES = 400 if PROFILE == "short" else 20_000


@st.composite
def futures(draw: st.DrawFn) -> list[tuple[float, bool]]:
    """When the timestep of each env comes, and whether it ends the episode."""
    return draw(st.lists(st.tuples(MOMENTS | st.just(INF), st.booleans()), min_size=1, max_size=6))


def on_the_way(
    future: list[tuple[float, bool]], *, has_block: bool, num_workers: int | None
) -> Rig:
    """Return a rig whose envs have been sent actions that have this future."""
    if num_workers is not None:
        num_workers = min(num_workers, len(future))
    rig = Rig(len(future), has_block=has_block, num_workers=num_workers).launch()
    rig.send(dict.fromkeys(range(len(future)), 1))
    for env_id, (moment, done) in sorted(enumerate(future), key=lambda item: item[1]):
        if moment < INF:
            payload = (f"next of {env_id}", 1.0, done, {}, 0)
            rig.transport.reply(env_id, Op.STEPPED, payload, after_s=moment)
    return rig


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
    ROUTES,
    PACKINGS,
)
def test_a_gather_returns_at_the_first_moment_it_may_with_all_that_is_there(
    future: list[tuple[float, bool]],
    wait_num: float,
    stragglers_s: float,
    deadline_s: float,
    exactly: bool,
    has_block: bool,
    num_workers: int | None,
) -> None:
    rig = on_the_way(future, has_block=has_block, num_workers=num_workers)
    policy = GatherPolicy(wait_num, stragglers_s)
    began = rig.clock()
    gathered = rig.gather.some(policy, deadline=began + deadline_s, exactly=exactly)
    took = rig.clock() - began

    end = expected_end(future, policy, deadline_s, exactly=exactly)
    assert took == end
    delivered = rig.hand_out(gathered)
    assert list(delivered) == [i for i, (moment, _) in enumerate(future) if moment <= end]
    assert all(step.obs == f"next of {i}" for i, step in delivered.items())


@settings(max_examples=EXAMPLES, deadline=None)
@given(futures(), st.data(), ROUTES, PACKINGS)
def test_a_gather_of_certain_envs_ends_with_the_last_of_them(
    future: list[tuple[float, bool]], data: st.DataObject, has_block: bool, num_workers: int | None
) -> None:
    coming = [i for i, (moment, _) in enumerate(future) if moment < INF]
    if not coming:
        return
    wanted = data.draw(st.lists(st.sampled_from(coming), unique=True, min_size=1))
    rig = on_the_way(future, has_block=has_block, num_workers=num_workers)
    began = rig.clock()
    assert list(rig.exactly(*wanted)) == wanted
    assert rig.clock() - began == max(future[i][0] for i in wanted)
