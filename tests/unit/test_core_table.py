"""The table of envs: what is asked of it, who shares a host, and which envs go together."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

import envmgr.core
from envmgr.core import EnvTable, Phase, Selection
from envmgr.core.phases import BEFORE_THE_CALLER, BEHIND_THE_CALLER, CHANGES, REPAIRED, Change
from envmgr.core.table import host_groups
from envmgr.env.batch_specs import Batch
from envmgr.errors import EnvNotReadyError
from envmgr.lifecycle import EnvState, Event, TransitionTable
from envmgr.policy import FailurePolicy
from envmgr.transport.base import Arrival
from envmgr.wire.messages import AfterStep, FailureKind, Message, Op, RemoteFailure
from tests.fake_hosts import FakeEnvs, FakeHost
from tests.rig import Rig, over_routes
from tests.unit.core_rigs import recover_all, rows_of_batches


def table_of(*phases: Phase) -> EnvTable:
    """Return a table of envs whose hosts are in these phases."""
    table = EnvTable(len(phases))
    table.phases.column[:] = bytes(phases)
    return table


@pytest.mark.parametrize("phase", Phase, ids=lambda x: x.name)
def test_what_goes_on_behind_the_caller_is_found_in_the_column(phase: Phase) -> None:
    table = table_of(Phase.IDLE, phase)
    assert bool(table.phases.column.translate(None, BEFORE_THE_CALLER)) is (
        phase in BEHIND_THE_CALLER
    )
    assert table.any_repaired is (phase in REPAIRED)


def test_the_states_of_spares_are_asked_for_one_by_one_and_not_listed() -> None:
    table = EnvTable(2, 1)
    table.launched(range(3))
    table.happened(2, Event.BEGIN_RESET)
    assert table.states[2] is EnvState.RESET
    assert table.env_states() == (EnvState.INIT, EnvState.INIT)


def test_a_list_of_states_does_not_change_afterwards() -> None:
    table = EnvTable(1)
    table.launched([0])
    states = table.env_states()
    table.happened(0, Event.FAILED)
    assert (states, table.states[0]) == ((EnvState.INIT,), EnvState.ERROR)


def test_what_is_out_of_the_ordinary_about_a_reset_is_forgotten_when_that_has_succeeded() -> None:
    table = EnvTable(2)
    table.launched(range(2))
    for env_id in range(2):
        table.happened(env_id, Event.BEGIN_RESET)
        table.changed(env_id, Change.RESET)
    env = table.envs[0]
    env.seed, env.attempts, env.renewals_in_a_row, env.new_generation = 7, 1, 2, True
    table.observed.began = lambda buffers: None  # type: ignore[method-assign]
    table.episodes_begun({0: 0, 1: 0}, {1: {"level": 3}})
    assert not table.next_resets
    assert (env.seed, env.attempts, env.new_generation) == (None, 0, False)
    assert [s.reset_info for s in table.envs] == [{}, {"level": 3}]
    assert table.env_states() == (EnvState.RUN,) * 2


def test_nobody_else_applies_a_transition() -> None:
    transitions = {"apply", "apply_all", "apply_at", "apply_rows"}
    callers = {
        module.name
        for module in Path(envmgr.core.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(module.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in transitions
    }
    assert callers == {"table.py"}


# -- envs that are stepped together ---------------------------------------------------------------


@pytest.mark.parametrize("ids", [[1, 2], [2, 0]])
def test_posted_are_those_whose_steps_are_all_posted(ids: list[int]) -> None:
    selection = Selection(ids)
    phases = TransitionTable(CHANGES, Phase, 3)
    for i in ids:
        assert not selection.is_posted(phases)
        phases.apply(i, Change.POST)
    assert selection.is_posted(phases)


@pytest.mark.parametrize(
    ("ids", "is_slice"), [([1, 2], True), ([2], True), ([0, 2], False), ([2, 1], False)]
)
def test_neighbours_are_a_slice(ids: list[int], is_slice: bool) -> None:
    selection = Selection(ids)
    assert selection.is_slice is is_slice
    assert [0, 1, 2][selection.rows] == ids if is_slice else selection.rows.tolist() == ids


def test_the_rows_of_neighbours_are_cut_out_where_steps_are_posted() -> None:
    rig = Rig(3, has_block=True).launch()
    assert rig.selection([1, 2]).window is not None
    assert rig.selection([2, 1]).window is None
    assert Rig(2, has_block=False).launch().selection([0, 1]).window is None


def test_an_interrupt_leaves_none_with_the_hosts_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(2, spare_num=1).launch()
    before = rig.selection([0])

    def interrupt() -> None:
        raise KeyboardInterrupt

    rig.hosts.table.moves += 1  # a spare has taken somebody's place
    with monkeypatch.context() as patch:
        patch.setattr(rig.supervisor.selections, "_forget", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.selection([0])
    assert rig.selection([0]) is not before


# -- what is asked of an env ----------------------------------------------------------------------


@over_routes
def test_an_env_without_host_or_with_work_is_not_callable() -> None:
    rig = Rig(kill_takes_s=None).launch()
    rig.send(0)
    assert not rig.slot(0).is_callable
    rig.transport.garbage(0)
    rig.pump()
    assert not rig.slot(0).is_callable
    rig.die()
    assert not rig.slot(0).is_callable
    rig.hello()
    rig.deliver()
    assert not rig.slot(0).is_callable
    rig.reset_done()
    assert rig.slot(0).is_callable


@over_routes
@pytest.mark.parametrize(
    ("n_hosts", "sizes"), [(None, [2, 1, 3, 1, 2]), (1, [9]), (2, [6, 3]), (3, [3, 4, 2])]
)
def test_the_rows_of_a_batch_share_a_host(n_hosts: int | None, sizes: list[int]) -> None:
    slots = EnvTable(9).envs
    for batch in (Batch(0, 2, True), Batch(3, 3, True), Batch(7, 2, True)):
        for env_id in batch.env_ids:
            slots[env_id].batch = batch
    groups = host_groups(slots, n_hosts)
    assert [len(group.envs) for group in groups] == sizes
    assert [slot for group in groups for slot in group.envs] == slots


# -- rows that are stepped together ---------------------------------------------------------------


@over_routes
def test_rows_are_handed_out_and_ready_together() -> None:
    rig = rows_of_batches(env_num=4)
    rig.send({i: i for i in range(4)})
    rig.stepped(0)
    rig.stepped(3)
    assert [*rig.deliver()] == [3]
    assert rig.ready() == [3]
    rig.stepped(2)
    rig.stepped(1)
    assert [*rig.deliver()] == [0, 1, 2]
    assert rig.ready() == [0, 1, 2, 3]


@over_routes
def test_a_row_that_is_reset_keeps_the_others_from_being_ready() -> None:
    rig = rows_of_batches()
    rig.reset(1)
    assert rig.ready() == []
    with pytest.raises(EnvNotReadyError, match="env 0 cannot take an action"):
        rig.send({0: 1, 2: 2})
    rig.reset_done(1)
    assert rig.ready() == [0, 1, 2]


@over_routes
def test_rows_in_no_episode_are_not_waited_for() -> None:
    rig = rows_of_batches(auto_reset=False)
    rig.send({i: i for i in range(3)})
    rig.stepped(0, done=True)
    rig.stepped(1)
    rig.stepped(2)
    assert len(rig.deliver()) == 3
    assert rig.state(0) is EnvState.NEED_RESET
    assert rig.ready() == [1, 2]
    rig.send({1: 1, 2: 2})
    rig.stepped(1, done=True)
    rig.stepped(2)
    assert [*rig.deliver()] == [1, 2]
    assert rig.ready() == [2]


@over_routes
def test_in_place_rows_wait_for_the_reset_of_one_of_them() -> None:
    rig = rows_of_batches(reset_inplace=True)
    rig.send({i: i for i in range(3)})
    rig.stepped(1, done=True, after=AfterStep.RESETS)
    rig.stepped(0)
    rig.stepped(2)
    assert rig.deliver() == {}
    rig.reset_done(1, "new")
    assert [*rig.deliver()] == [0, 1, 2]
    assert rig.ready() == [0, 1, 2]
    assert rig.obs(1) == "new"


@over_routes
def test_a_row_that_had_replied_before_its_host_died_waits_with_the_others() -> None:
    rig = rows_of_batches()
    rig.send({i: i for i in range(3)})
    rig.stepped(0)
    rig.die(1)
    delivered = rig.deliver()
    assert ["abnormal" in delivered[i].info for i in range(3)] == [False, True, True]
    assert rig.ready() == []
    recover_all(rig, 0, 1, 2)
    assert rig.ready() == [0, 1, 2]
    rig.send(dict.fromkeys(range(3), 4))
    assert ["abnormal" in t.info for t in rig.deliver().values()] == [True] * 3
    assert rig.identity_holds()


@over_routes
def test_a_row_that_is_given_up_is_not_waited_for() -> None:
    rig = rows_of_batches(policy=FailurePolicy(max_failures=0, drop_exhausted=True))
    rig.send({i: i for i in range(3)})
    rig.fail(0, of_batch=True)
    assert len(rig.deliver()) == 3
    recover_all(rig, 1, 2)
    assert rig.state(0) is EnvState.DONE
    assert rig.ready() == [1, 2]
    rig.send({1: 1, 2: 2})
    assert len(rig.requests(Op.STEP, 2)) == 2


@over_routes
def test_a_row_that_is_reset_while_others_take_a_step_waits_for_them() -> None:
    rig = rows_of_batches(auto_reset=False)
    rig.send({i: i for i in range(3)})
    for env_id in range(3):
        rig.stepped(env_id, done=env_id == 0)
    rig.deliver()
    rig.send({1: 1, 2: 2})
    rig.reset(0)
    rig.reset_done(0)
    assert rig.state(0) is EnvState.RUN
    assert rig.ready() == []
    with pytest.raises(EnvNotReadyError, match="it is in RUN"):
        rig.send(0)
    rig.stepped(1)
    rig.stepped(2)
    assert [*rig.deliver()] == [1, 2]
    assert rig.ready() == [0, 1, 2]


class Rows(FakeEnvs):
    """Envs that know which of them are in an episode, and that fail or die now and then.

    Attributes:
        in_episode: (host_id, env_id) of rows that would be waited for.
        stepped: of rows that were sent an action, since this was last emptied.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(episode_length=4, seconds={Op.STEP: 0.125, Op.RESET: 0.25})
        self.in_episode: set[tuple[int, int]] = set()
        self.stepped: set[tuple[int, int]] = set()
        self._rng = rng

    def __call__(self, host: FakeHost, message: Message) -> Iterable[tuple[float, Arrival]]:
        row, replies = (host.host_id, message.env_id), list(super().__call__(host, message))
        chance = self._rng.random()
        if message.op == Op.RESET:
            self.in_episode.add(row)
        elif message.op == Op.STEP:
            self.stepped.add(row)
            if chance < 0.04:
                self.in_episode.discard(row)
                failure = RemoteFailure(FailureKind.PROTOCOL, "step", of_batch=chance < 0.02)
                return [(0.125, message._replace(op=Op.FAILED, payload=failure))]
            if host.envs[message.env_id].step < 0:
                self.in_episode.discard(row)
        return replies


@over_routes
@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_all_rows_in_an_episode_are_always_stepped_together(seed: int, auto_reset: bool) -> None:
    rng = random.Random(seed)
    envs = Rows(rng)
    rig = Rig(
        5,
        batches=(Batch(0, 3, False), Batch(3, 2, False)),
        policy=FailurePolicy(max_failures=10**6, max_failures_total=10**6),
        answer=envs,
        auto_reset=auto_reset,
        reset_inplace=auto_reset,
    )
    rig.start()
    rig.supervisor.begin_episodes()
    rig.run(1.0)
    rig.supervisor.table.launching = False
    n_calls = 0
    for _ in range(200):
        ready = rig.ready()
        chosen = [i for batch in (range(3), range(3, 5)) if rng.random() < 0.7 for i in batch]
        envs.stepped.clear()
        before = set(envs.in_episode)
        if actions := {i: 1 for i in ready if i in chosen}:
            rig.send(actions)
            n_calls += 1
        serving = {host_id for host_id, _ in envs.stepped}
        assert envs.stepped == {row for row in before if row[0] in serving}
        if rng.random() < 0.1:
            idle = [i for i in range(5) if not rig.supervisor.table.owes(i)]
            rig.supervisor.resets.begin(dict.fromkeys(rng.sample(idle, len(idle) // 2)))
        host = rig.transport.host_of(rng.randrange(5))
        if rng.random() < 0.05 and not host.ended and not host.killed:
            rig.transport.die(host.env_id)
        if not auto_reset:
            ended = rig.supervisor.states.ids_in(EnvState.NEED_RESET)
            rig.supervisor.resets.begin(dict.fromkeys(i for i in ended if rng.random() < 0.5))
        rig.run(rng.choice((0.125, 0.25, 1.0)))
        rig.deliver()
    assert n_calls > 50
    assert rig.identity_holds()


# -- who shares a host ----------------------------------------------------------------------------


@over_routes
@pytest.mark.parametrize(
    ("env_num", "n_hosts", "sizes"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (3, 3, [1, 1, 1]), (4, 1, [4])],
)
def test_groups_are_contiguous_and_as_equal_as_can_be(
    env_num: int, n_hosts: int, sizes: list[int]
) -> None:
    slots = EnvTable(env_num).envs
    groups = host_groups(slots, n_hosts)
    assert [len(group.envs) for group in groups] == sizes
    assert [group.index for group in groups] == list(range(n_hosts))
    assert [slot for group in groups for slot in group.envs] == slots
    assert all(slot.group.by_id[slot.env_id] is slot for slot in slots)
