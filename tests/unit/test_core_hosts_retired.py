"""Hosts that cannot be killed: what they may write to after their deaths is not used any more."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from envmgr.core import Phase
from envmgr.env.batch_specs import Batch
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.transport.base import Arrival
from envmgr.wire.messages import AfterStep, FailureKind, Message, Op
from tests.fake_hosts import FakeEnvs, FakeHost
from tests.fakes import UnkillableTransport
from tests.rig import Rig

LIMITED = Deadlines(step_s=1.0, reset_s=1.0)


def unkillable(env_num: int = 3, **options: Any) -> Rig:
    """Return launched envs on hosts that cannot be killed, with a block."""
    options.setdefault("deadlines", LIMITED)
    return Rig(env_num, has_block=True, transport=UnkillableTransport, **options).launch()


def haunt(rig: Rig) -> None:
    """Have abandoned hosts do what they can."""
    assert isinstance(rig.transport, UnkillableTransport)
    rig.transport.haunt()


def posted(rig: Rig, env_id: int) -> bool:
    return rig.hosts.envs[env_id].phase is Phase.POSTED


def abandon(rig: Rig, env_id: int = 0) -> None:
    """Have a step of an env take too long, deliver its timestep, and have it come back."""
    rig.send(env_id)
    assert posted(rig, env_id)
    rig.advance(1.0)
    assert rig.deliver(env_id)[env_id].info["abnormal"]
    haunt(rig)
    rig.hello(env_id)
    haunt(rig)
    rig.reset_done(env_id, "anew")


def test_an_env_whose_host_was_abandoned_goes_on_by_message() -> None:
    rig = unkillable()
    abandon(rig)
    assert rig.supervisor.table.retired == {0}
    assert (rig.ready(), rig.obs(0)) == ([0, 1, 2], "anew")
    for number in range(4):
        rig.send(0)
        assert not posted(rig, 0)
        haunt(rig)
        rig.pump()
        assert not rig.has_arrived(0)
        rig.stepped(0, f"next {number}", reward=float(number))
        haunt(rig)
        assert rig.deliver() == {0: (f"next {number}", float(number), False, {})}
        haunt(rig)
        assert rig.obs(0) == f"next {number}"
    assert len(rig.requests(Op.ATTACH, 0)) == 1
    assert rig.identity_holds()


def test_the_others_are_posted_as_before() -> None:
    rig = unkillable()
    abandon(rig)
    rig.send({1: 1, 2: 2})
    assert posted(rig, 1)
    assert posted(rig, 2)
    haunt(rig)
    rig.stepped(1)
    rig.stepped(2)
    assert [*rig.exactly(1, 2)] == [1, 2]
    rig.send({0: 0, 1: 1, 2: 2})
    assert [posted(rig, i) for i in range(3)] == [False, True, True]
    for env_id in range(3):
        rig.stepped(env_id)
    assert [*rig.exactly(0, 1, 2)] == [0, 1, 2]


def test_its_resets_are_ordered_by_message() -> None:
    rig = unkillable()
    abandon(rig)
    assert rig.transport.shared is not None
    assert rig.transport.shared.block is not None
    orders = rig.transport.shared.block.reset_requests
    rig.reset(0)
    rig.reset(1)
    assert [bool(token) for token in orders] == [False, True, False]
    haunt(rig)
    assert rig.phase(0) is Phase.RESETTING
    rig.reset_done(0, "of the reset")
    rig.reset_done(1)
    assert rig.obs(0) == "of the reset"


def test_automatic_resets_are_answered_by_message() -> None:
    rig = unkillable()
    abandon(rig)
    rig.send(0)
    rig.stepped(0, "end", done=True, after=AfterStep.RESETS)
    haunt(rig)
    assert rig.deliver(0)[0].obs == "end"
    rig.reset_done(0, "first", x=1)
    assert (rig.ready(), rig.obs(0)) == ([0, 1, 2], "first")


def test_what_was_ready_when_its_host_was_abandoned_stays_as_it_is() -> None:
    rig = unkillable(2, num_workers=1, copy_on_get=False)
    rig.send({0: 0, 1: 1})
    rig.stepped(0, "of 0")
    rig.deliver(0)
    rig.advance(1.0)
    assert rig.supervisor.table.retired == {0, 1}
    for _ in range(3):
        haunt(rig)
        assert rig.obs(0) == "of 0"
    assert [*rig.deliver()] == [1]
    for env_id in range(2):
        rig.hello(env_id)
    for env_id in range(2):
        rig.reset_done(env_id)
    rig.send(0)
    assert rig.deliver(0)[0].obs == "of 0"
    assert rig.ready() == [0, 1]


def test_what_a_reset_has_left_in_its_place_can_still_be_read() -> None:
    rig = unkillable(2, num_workers=1)
    rig.reset(0)
    rig.reset_done(0, "of the reset")
    rig.send(1)
    rig.advance(1.0)
    haunt(rig)
    assert rig.obs(0) == "of the reset"


def test_a_death_is_blamed_as_without_a_block_where_columns_are_retired() -> None:
    rig = unkillable(2, num_workers=1)
    abandon_all(rig)
    rig.send({0: 0, 1: 1})
    haunt(rig)  # as if env 1 were running
    rig.die(0)
    assert rig.supervisor.statistics.failures_by_env == {0: 2}


def test_limits_and_blame_go_by_messages_where_the_columns_of_a_host_are_retired() -> None:
    rig = unkillable(2, num_workers=1)
    abandon_all(rig)
    rig.send({0: 0, 1: 1})
    rig.began(0)
    haunt(rig)
    rig.advance(0.5)
    rig.stepped(0)
    rig.began(1)
    rig.advance(0.75)
    haunt(rig)  # as if env 0 had just begun
    assert rig.deliver() == {0: ("next", 1.0, False, {})}
    rig.advance(0.25)
    assert "env 1 (generation 1) exceeded" in str(rig.error(1))


def abandon_all(rig: Rig) -> None:
    """As `abandon`, for two envs that share a host."""
    rig.send({0: 0, 1: 1})
    rig.advance(1.0)
    rig.deliver()
    for env_id in range(2):
        rig.hello(env_id)
    for env_id in range(2):
        rig.reset_done(env_id)
    assert rig.ready() == [0, 1]


def test_a_host_that_dies_by_itself_leaves_its_memory_to_the_next() -> None:
    rig = unkillable()
    rig.send(0)
    rig.die(0)
    rig.deliver(0)
    rig.hello(0)
    rig.reset_done(0)
    assert rig.supervisor.table.retired == set()
    rig.send(0)
    assert posted(rig, 0)


def test_a_host_that_was_not_told_of_memory_leaves_none() -> None:
    rig = Rig(2, has_block=True, transport=UnkillableTransport, deadlines=Deadlines(connect_s=1.0))
    rig.supervisor.start_hosts(range(2))
    rig.advance(1.0)
    assert len(rig.transport.killed) == 2
    assert rig.supervisor.table.retired == set()


def test_a_spare_takes_over_by_message_and_keeps_its_own_memory() -> None:
    rig = unkillable(2, spare_num=1)
    rig.send(0)
    rig.advance(1.0)
    rig.deliver(0)
    (adopted,) = rig.requests(Op.ADOPT, 0)
    assert adopted.payload is None
    haunt(rig)
    rig.reset_done(0, "of the spare")
    assert (rig.obs(0), rig.supervisor.table.retired) == ("of the spare", {0})
    rig.send(0)
    assert not posted(rig, 0)


def test_a_spare_has_nothing_to_retire() -> None:
    rig = unkillable(1, spare_num=1)
    rig.send(0)
    rig.stepped(0, done=True)
    rig.deliver()
    rig.reset_done(0)
    rig.run(1.0)  # the reset of what is the spare now
    assert len(rig.transport.killed) == 1
    assert rig.supervisor.table.retired == set()


def test_rows_of_a_batched_env_are_retired_together() -> None:
    rig = unkillable(3, batches=(Batch(0, 2, False),))
    rig.send({0: 0, 1: 1})
    rig.fail(0, kind=FailureKind.RAISED, of_batch=True)
    assert rig.supervisor.table.retired == {0, 1}


# -- whatever an abandoned host writes ------------------------------------------------------------


class Hanging(FakeEnvs):
    """Envs that never answer some of their steps."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(episode_length=4, seconds={Op.STEP: 0.125, Op.RESET: 0.25})
        self._rng = rng

    def __call__(self, host: FakeHost, message: Message) -> Iterable[tuple[float, Arrival]]:
        if message.op == Op.STEP and self._rng.random() < 0.05:
            return []
        return super().__call__(host, message)


def story(seed: int, num_workers: int | None, *, haunted: bool) -> list[Any]:
    """Return all that a trainer sees of envs whose hosts hang now and then."""
    rng = random.Random(seed)
    policy = FailurePolicy(max_failures=10**6, max_failures_total=10**6)
    rig = Rig(
        4,
        has_block=True,
        transport=UnkillableTransport,
        deadlines=LIMITED,
        num_workers=num_workers,
        policy=policy,
        answer=Hanging(rng),
    )
    rig.start()
    rig.supervisor.begin_episodes()
    rig.run(1.0)
    rig.supervisor.repair.launching = False
    if haunted:
        rig.clock.watchers.append(lambda: haunt(rig))
    seen: list[Any] = []
    for _ in range(120):
        ready = [env_id for env_id in rig.ready() if rng.random() < 0.8]
        seen.append([(i, rig.obs(i)) for i in rig.ready()])
        if ready:
            rig.send(dict.fromkeys(ready, 1))
        rig.run(rng.choice((0.125, 0.25, 1.25)))
        seen.append([(i, t.obs, t.reward, t.done) for i, t in rig.deliver().items()])
    assert rig.identity_holds()
    assert rig.supervisor.table.retired
    return seen


@pytest.mark.parametrize("num_workers", [None, 2])
def test_whatever_an_abandoned_host_writes_makes_no_difference(num_workers: int | None) -> None:
    for seed in range(6):
        expected = story(seed, num_workers, haunted=False)
        assert story(seed, num_workers, haunted=True) == expected
