"""Rows of batched envs whose next episodes begin with the next step of the others."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from envmgr.core import validate
from envmgr.core.engine import await_all_ready, refuse_unready
from envmgr.env.batch_specs import Batch
from envmgr.errors import ConfigError, EnvNotReadyError, EnvProtocolError, NothingReadyError
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.transport.base import Arrival
from envmgr.wire.messages import AfterStep, FailureKind, Message, Op, RemoteFailure
from tests.fake_hosts import FakeEnvs, FakeHost, ObsTag
from tests.rig import Rig, over_routes

pytestmark = over_routes

LATE = AfterStep.RESETS_LATE


def rows(env_num: int = 3, **options: Any) -> Rig:
    """Return launched rows of a vector env, of whom row 0 has just ended its episode."""
    options = {"reset_inplace": True, **options}
    rig = Rig(env_num, batches=(Batch(0, 3, False),), **options).launch()
    rig.send(dict.fromkeys(range(3), 1))
    rig.stepped(0, "terminal", done=True, after=LATE)
    rig.stepped(1)
    rig.stepped(2)
    delivered = rig.deliver()
    assert (delivered[0].obs, delivered[0].done) == ("terminal", True)
    return rig


@pytest.mark.parametrize("reset_comes_first", [True, False])
def test_others_are_ready_without_it_and_with_it_after_their_step(reset_comes_first: bool) -> None:
    rig = rows()
    assert (rig.ready(), rig.state(0)) == ([1, 2], EnvState.RESET)
    rig.send({1: 1, 2: 2})
    replies = [lambda: rig.reset_done(0, "new"), lambda: (rig.stepped(1), rig.stepped(2))]
    for reply in replies if reset_comes_first else reversed(replies):
        assert rig.ready() == []
        reply()
    assert [*rig.deliver()] == [1, 2]
    assert (rig.ready(), rig.obs(0)) == ([0, 1, 2], "new")
    rig.send(dict.fromkeys(range(3), 1))
    assert len(rig.requests(Op.STEP, 0)) == 2
    assert rig.identity_holds()


def test_nobody_is_ready_between_the_step_of_the_others_and_its_reset() -> None:
    rig = rows()
    rig.send({1: 1, 2: 2})
    rig.stepped(1)
    rig.stepped(2)
    rig.deliver()
    assert rig.ready() == []
    with pytest.raises(EnvNotReadyError):
        rig.send({1: 1, 2: 2})
    rig.reset_done(0)
    assert rig.ready() == [0, 1, 2]


@pytest.mark.parametrize("batches", [(), (Batch(0, 3, False),)])
def test_who_has_no_others_cannot_begin_with_their_steps(batches: tuple[Batch, ...]) -> None:
    rig = Rig(4, batches=batches).launch()
    rig.send(dict.fromkeys(range(4), 1))
    for env_id, after in enumerate([*[AfterStep.NOTHING] * 3, LATE]):
        ends = {"terminated": env_id == 3, "truncated": False}
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, env_id == 3, ends, after))
    timesteps = rig.hand_out(rig.gather.exactly(rig.selection(range(4))))
    error = timesteps[3].info["error"]
    assert isinstance(error, EnvProtocolError)
    assert "others" in str(error)
    assert [t.info.get("error") for t in timesteps.values()] == [None, None, None, error]


def test_when_all_have_ended_they_are_waited_for() -> None:
    rig = rows()
    rig.send({1: 1, 2: 2})
    rig.reset_done(0)
    for env_id in (1, 2):
        rig.stepped(env_id, done=True, after=LATE)
    assert sorted(rig.deliver()) == [1, 2]
    record = rig.supervisor.table
    rig.send(0)  # the only one in an episode
    for env_id in (1, 2):
        rig.reset_done(env_id)
    rig.stepped(0)
    rig.deliver()
    rig.send(dict.fromkeys(range(3), 1))
    for env_id in range(3):
        rig.stepped(env_id, done=True, after=AfterStep.RESETS)
    rig.reset_done(1)
    assert (rig.deliver(), rig.ready()) == ({}, [])
    rig.reset_done(0)
    rig.reset_done(2)
    assert sorted(rig.deliver()) == [0, 1, 2]
    assert (rig.ready(), 1 in record.begins_with_step) == ([0, 1, 2], False)


def test_who_waits_for_it_is_told_that_others_have_to_be_stepped() -> None:
    rig = rows()
    assert not rig.supervisor.table.is_coming(0)
    await_all_ready(rig.engine, rig.supervisor, [0, 1])
    with pytest.raises(NothingReadyError, match=r"envs \[0\] begin with the next step"):
        refuse_unready(rig.supervisor, [0, 1])


def test_time_limits_begin_with_the_step_of_the_others() -> None:
    rig = rows(deadlines=Deadlines(step_s=1.0, reset_s=1.0))
    rig.advance(50.0)
    assert rig.transport.killed == []
    rig.send({1: 1, 2: 2})
    rig.advance(0.5)
    assert rig.transport.killed == []
    rig.stepped(1)
    rig.stepped(2)
    rig.advance(5.0)
    assert len(rig.transport.killed) == 1
    assert rig.supervisor.statistics.failures_by_env == {0: 1}


def test_it_is_lost_with_the_others() -> None:
    rig = rows()
    rig.send({1: 1, 2: 2})
    rig.die(1)
    assert ["abnormal" in t.info for t in rig.deliver().values()] == [True, True]
    for env_id in range(3):
        rig.hello(env_id)
    for env_id in range(3):
        rig.reset_done(env_id)
    assert (rig.ready(), 1 in rig.supervisor.table.begins_with_step) == ([0, 1, 2], False)


def test_what_waits_for_a_step_of_others_and_is_lost_with_them_is_waited_for() -> None:
    rig = rows()
    rig.die(1)
    assert rig.ready() == []  # 1 and 2 are shown when 0 is there, too
    for env_id in range(3):
        rig.hello(env_id)
    assert rig.ready() == []
    for env_id in range(3):
        rig.reset_done(env_id)
    assert rig.ready() == [0, 1, 2]


def test_resets_of_some_rows_are_refused_where_all_are_reset_together() -> None:
    rig = rows()
    for slot in rig.supervisor.envs:
        slot.resets_alone = False
    with pytest.raises(EnvNotReadyError, match=r"while envs \[2\] are in an episode"):
        validate.refuse_partial_resets(rig.supervisor.table, {0: None, 1: None})
    with pytest.raises(ConfigError, match="the same params"):
        validate.refuse_partial_resets(rig.supervisor.table, {0: {"a": 1}, 1: None, 2: None})
    validate.refuse_partial_resets(rig.supervisor.table, {0: {"a": 1}, 1: {"a": 1}, 2: {"a": 1}})


class LateRows(FakeEnvs):
    """Rows of one vector env that begin episodes late, and that fail or die now and then.

    Attributes:
        in_episode: (host_id, env_id) of rows whose actions are waited for.
        asked: of those that were sent one for the present step.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.in_episode: set[tuple[int, int]] = set()
        self.asked: dict[tuple[int, int], Message] = {}
        self._waiting: dict[tuple[int, int], Message] = {}
        self._rng = rng

    def __call__(self, host: FakeHost, message: Message) -> Iterable[tuple[float, Arrival]]:
        row = (host.host_id, message.env_id)
        if message.op == Op.RESET:
            self.in_episode.add(row)
        if message.op != Op.STEP:
            return super().__call__(host, message)
        assert row in self.in_episode
        self.asked[row] = message
        mine = {r for r in self.in_episode if r[0] == host.host_id}
        if not mine <= self.asked.keys():
            return []
        steps = [self.asked.pop(r) for r in sorted(mine)]
        if self._rng.random() < 0.03:
            self._forget(host.host_id)
            failure = RemoteFailure(FailureKind.RAISED, "step", of_batch=True)
            return [(0.125, steps[0]._replace(op=Op.FAILED, payload=failure))]
        begun = self._begin(host.host_id)
        ended = [m for m in steps if self._rng.random() < 0.3]
        self.in_episode -= {(host.host_id, m.env_id) for m in ended}
        late = any(r[0] == host.host_id for r in self.in_episode)
        after = LATE if late else AfterStep.RESETS
        replies: list[tuple[float, Arrival]] = [
            (0.125, self._stepped(m, after if m in ended else None)) for m in steps
        ]
        self._waiting |= {(host.host_id, m.env_id): m for m in ended}
        seconds = self._rng.choice((0.125, 0.5))  # first or last, as it comes
        if not late:
            replies += [(0.25, self._begun(m)) for m in self._begin(host.host_id)]
        return replies + [(seconds, self._begun(m)) for m in begun]

    def _begin(self, host_id: int) -> list[Message]:
        begun = [r for r in self._waiting if r[0] == host_id]
        self.in_episode.update(begun)
        return [self._waiting.pop(r) for r in begun]

    def _stepped(self, message: Message, after: AfterStep | None) -> Message:
        obs = ObsTag(*message[1:4], "terminal" if after else "next")
        payload = (obs, 1.0, after is not None, {}, after or AfterStep.NOTHING)
        return message._replace(op=Op.STEPPED, payload=payload)

    def _begun(self, message: Message) -> Message:
        payload = (ObsTag(*message[1:4], "first"), {})
        return message._replace(op=Op.RESET_DONE, payload=payload)

    def _forget(self, host_id: int) -> None:
        self.in_episode = {r for r in self.in_episode if r[0] != host_id}
        self.asked = {r: m for r, m in self.asked.items() if r[0] != host_id}
        self._waiting = {r: m for r, m in self._waiting.items() if r[0] != host_id}


@pytest.mark.parametrize("seed", range(3))
def test_all_that_are_ready_are_those_whose_actions_are_waited_for(seed: int) -> None:
    rng = random.Random(seed)
    envs = LateRows(rng)
    rig = Rig(
        5,
        batches=(Batch(0, 3, False), Batch(3, 2, False)),
        policy=FailurePolicy(max_failures=10**6, max_failures_total=10**6),
        deadlines=Deadlines(step_s=100.0, reset_s=100.0),
        answer=envs,
        reset_inplace=True,
    )
    rig.start()
    rig.supervisor.begin_episodes()
    rig.run(1.0)
    rig.supervisor.table.launching = False
    n_late = 0
    for _ in range(200):
        ready = rig.ready()
        chosen = [i for batch in (range(3), range(3, 5)) if rng.random() < 0.7 for i in batch]
        if actions := {i: 1 for i in ready if i in chosen}:
            rig.send(actions)
            assert not envs.asked  # the env has taken them: none is waited for
        host = rig.transport.host_of(rng.randrange(5))
        if rng.random() < 0.03 and not host.ended and not host.killed:
            envs._forget(host.host_id)
            rig.transport.die(host.env_id)
        rig.run(rng.choice((0.125, 0.25, 1.0)))
        rig.deliver()
        n_late += rig.supervisor.table.begins_with_step.count(1)
    assert n_late > 30
    assert rig.identity_holds()
