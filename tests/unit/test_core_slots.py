"""Leases over fakes: who gets which env, what its calls give, and what becomes of what is left."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import pytest

from envmgr.core import Phase
from envmgr.core.episodes import record_of
from envmgr.core.slots import SlotCall, SlotRules, Slots, Tenancy
from envmgr.core.validate import checked_actions, refuse_leased, refuse_while_pending
from envmgr.errors import (
    AllEnvsFailedError,
    EnvCallAbandoned,
    EnvCrash,
    EnvLeasedError,
    EnvNotReadyError,
    EnvProtocolError,
    EnvRaised,
    EnvTimeout,
    FailuresExhaustedError,
    LeaseEndedError,
    ManagerClosedError,
    NothingReadyError,
)
from envmgr.lifecycle import EnvState
from envmgr.outcomes import OutcomeStatus
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.seeding import derived_seed
from envmgr.wire.messages import AfterStep, FailureKind, Op, SavedEnv
from tests.rig import Rig, over_routes, route

__all__ = ["route"]

pytestmark = over_routes


class Leases:
    """Leases over a rig, which are served when the test says so."""

    def __init__(self, rig: Rig, rules: SlotRules = SlotRules()) -> None:  # noqa: B008 - frozen
        self.rig = rig
        self.slots = Slots(rig.supervisor, rules)
        self.told: list[Any] = []
        self.is_loop_closed = False

    def tell(self, what: Any) -> bool:
        """Tell a user of something."""
        self.told.append(what)
        return not self.is_loop_closed

    def serve(self, **how: bool) -> None:
        """Do as the owner does."""
        self.slots.obey()
        self.rig.pump()
        self.slots.serve(**how)
        self.slots.notify_all()

    def ask(self, episode_s: float | None = None) -> Tenancy:
        """Ask for an env."""
        tenancy = Tenancy(lambda: self.tell(tenancy), episode_s)
        self.slots.ask(tenancy)
        return tenancy

    def lease(self, episode_s: float | None = None) -> Tenancy:
        """Ask for an env that is free."""
        tenancy = self.ask(episode_s)
        self.serve()
        assert tenancy.env_id is not None
        return tenancy

    def call(self, tenancy: Tenancy, during: str, limit_s: float | None = None, **what: Any) -> Any:
        """Begin a call."""
        call = SlotCall(lambda: self.tell(call), during, limit_s, **what)
        self.slots.call(tenancy, call)
        self.serve()
        return call

    def reset(self, tenancy: Tenancy, **what: Any) -> SlotCall:
        """Reset an env, which answers at once if it is asked."""
        n_sent = len(self.rig.transport.sent)
        call: SlotCall = self.call(tenancy, "reset", **what)
        if len(self.rig.transport.sent) > n_sent:
            self.rig.reset_done(tenancy.env_id or 0)
            self.serve()
        assert call.is_over
        return call

    def step(self, tenancy: Tenancy, action: int = 1, limit_s: float | None = None) -> SlotCall:
        """Begin a step."""
        call: SlotCall = self.call(tenancy, "step", limit_s, action=action)
        return call

    def begun(self) -> Tenancy:
        """Lease an env and begin an episode."""
        tenancy = self.lease()
        self.reset(tenancy)
        return tenancy


def leases(env_num: int = 1, rules: SlotRules | None = None, **rig: Any) -> Leases:
    return Leases(Rig(env_num, **rig).launch(), rules or SlotRules())


def steps_sent(of: Leases, env_id: int = 0) -> int:
    """Return how many steps an env was ever asked for, by whatever way."""
    return of.rig.supervisor.selections.steps_of(env_id)


# -- who gets which env ----------------------------------------------------------------------------


def test_envs_are_leased_in_order_of_asking() -> None:
    of = leases(2)
    asked = [of.ask() for _ in range(5)]
    of.serve()
    assert [t.env_id for t in asked] == [0, 1, None, None, None]
    assert of.told == asked[:2]
    of.slots.give_back(asked[3])  # it waits no longer
    of.slots.give_back(asked[1])
    of.serve()
    assert [t.env_id for t in asked] == [0, 1, 1, None, None]
    of.slots.give_back(asked[0])
    of.serve()
    assert [t.env_id for t in asked] == [0, 1, 1, None, 0]
    assert of.rig.supervisor.statistics.of_slots.leases == 4


def test_calls_for_batches_do_not_see_leased_envs() -> None:
    of = leases(3)
    tenancy = of.lease()
    table = of.rig.supervisor.table
    assert of.rig.ready() == [1, 2]
    assert not table.are_all_ready
    assert not table.is_coming(0)
    with pytest.raises(EnvLeasedError, match=r"envs \[0\].*leased.*leave them out"):
        checked_actions(table, {0: 1, 1: 1}, None)
    with pytest.raises(EnvLeasedError, match="cannot take part in reset"):
        refuse_leased(table, [0, 2], "reset")
    with pytest.raises(EnvLeasedError):
        refuse_while_pending(table, [0], "call('x')")
    assert of.rig.supervisor.submitter.by_id({0: 1}, 0) is None, "nor by the short way"
    of.reset(tenancy)
    call = of.step(tenancy)
    assert table.owed_ids() == []
    assert of.rig.supervisor.statistics.outstanding == 0
    of.rig.stepped(0)
    assert of.rig.supervisor.statistics.accounts()["outstanding"] == 1
    of.serve()
    assert call.is_over
    of.slots.give_back(tenancy)
    of.serve()
    of.rig.reset_done(0)
    assert of.rig.ready() == [0, 1, 2]
    assert table.are_all_ready


def test_no_env_is_leased_while_a_call_waits_for_envs_that_it_names() -> None:
    of = leases()
    tenancy = of.ask()
    of.serve(may_lease=False)
    assert tenancy.env_id is None
    of.serve()
    assert tenancy.env_id == 0


def test_envs_that_owe_a_timestep_to_a_batch_are_not_leased() -> None:
    of = leases(2)
    of.rig.send({0: 1})
    assert of.lease().env_id == 1
    waiting = of.ask()
    of.rig.stepped(0)
    of.serve()
    assert waiting.env_id is None, "it has arrived, and was not delivered"
    of.rig.deliver(0)
    of.serve()
    assert waiting.env_id == 0


def test_who_waits_is_told_if_no_env_will_ever_be_free() -> None:
    of = leases(episode_num=1)
    tenancy = of.begun()
    of.step(tenancy)
    of.rig.stepped(0, done=True)
    of.serve()
    of.slots.give_back(tenancy)
    waiting = of.ask()
    of.serve()
    assert waiting.is_over
    assert isinstance(waiting.error, NothingReadyError)
    assert not isinstance(waiting.error, AllEnvsFailedError)


# -- the beginning of a lease ----------------------------------------------------------------------


def test_a_fresh_env_is_not_reset_again() -> None:
    of = leases()
    tenancy = of.lease()
    n_resets = len(of.rig.reset_requests())
    call = of.reset(tenancy)
    assert call.result[1] == {"params": {}}
    assert len(of.rig.reset_requests()) == n_resets
    of.slots.give_back(tenancy)
    of.serve()
    assert of.rig.state() is EnvState.RESET, "somebody has seen that episode: another one begins"
    of.rig.reset_done()
    second = of.lease()
    n_resets = len(of.rig.reset_requests())
    of.reset(second)
    assert len(of.rig.reset_requests()) == n_resets


def test_seeds_and_parameters_are_for_one_reset() -> None:
    of = leases()
    tenancy = of.lease()
    of.reset(tenancy, seed=5, params={"level": 3})
    asked = of.rig.reset_requests()[-1]
    assert (asked.seed, dict(asked.params)) == (5, {"level": 3})
    of.slots.give_back(tenancy)
    of.serve()
    asked = of.rig.reset_requests()[-1]
    assert (asked.seed, dict(asked.params)) == (None, {})


def test_later_generations_do_not_follow_from_the_seed_of_a_lease() -> None:
    of = Leases(Rig().launch(seeds={0: 5}))
    tenancy = of.lease()
    of.reset(tenancy, seed=123)
    of.rig.die()
    of.rig.hello()
    assert of.rig.reset_requests()[-1].seed == derived_seed(5, 0, 1, 2)


def test_a_seed_that_the_manager_was_given_is_no_less_that_of_later_generations() -> None:
    of = Leases(Rig().launch(seeds={0: 5}))
    tenancy = of.lease()
    of.rig.slot().new_seed = 6
    of.reset(tenancy, seed=123)
    assert of.rig.reset_requests()[-1].seed == 123
    assert (of.rig.slot().base_seed, of.rig.slot().new_seed) == (6, None)


def test_a_used_env_is_reset_once_if_somebody_waits_for_it() -> None:
    of = leases()
    first = of.begun()
    of.step(first)
    of.rig.stepped()
    of.serve()
    second = of.ask()
    of.serve()
    n_resets = len(of.rig.reset_requests())
    of.slots.give_back(first)
    of.serve()
    assert second.env_id == 0
    early = of.step(second)
    assert isinstance(early.error, EnvNotReadyError)
    assert "reset() first" in str(early.error)
    of.reset(second, seed=7)
    assert len(of.rig.reset_requests()) == n_resets + 1


@pytest.mark.parametrize("why", ["one waits", "it is gone", "a fresh one", "none may be leased"])
def test_an_env_that_is_not_handed_on_after_all_begins_anew(why: str) -> None:
    """Nobody steps the episode of somebody else."""
    of = leases(3)
    tenancies = [of.begun(), of.begun()]
    others = [] if why == "a fresh one" else [of.lease()]
    for tenancy in tenancies:
        of.step(tenancy)
        of.rig.stepped(tenancy.env_id or 0)
    of.serve()
    waiting = of.ask()
    if why != "a fresh one":
        of.serve()
    for tenancy in tenancies:
        of.slots.give_back(tenancy)
    if why == "it is gone":
        of.slots.give_back(waiting)
    of.serve(may_lease=why != "none may be leased")
    expected = {"one waits": 0, "a fresh one": 2}.get(why)
    assert waiting.env_id == expected
    assert of.rig.ready() == [], "they are in no episode that somebody has left"
    for env_id in {0, 1} - {expected}:
        assert of.rig.state(env_id) is EnvState.RESET
        of.rig.reset_done(env_id)
    of.serve()
    assert len(others) + len(of.rig.ready()) + (waiting.env_id is not None) == 3


def test_what_a_batch_has_used_is_not_fresh() -> None:
    of = leases()
    of.rig.send({0: 1})
    of.rig.stepped()
    of.rig.deliver()
    tenancy, n_resets = of.lease(), len(of.rig.reset_requests())
    of.reset(tenancy)
    assert len(of.rig.reset_requests()) == n_resets + 1


def resumed(of: Leases, tenancy: Tenancy) -> None:
    """Have an env that is leased take two steps, in whose second it dies, and be resumed."""
    of.step(tenancy)
    of.rig.stepped()
    episode = of.rig.slot().episode
    saved = SavedEnv(b"the state after one step", "next", {"resumed": True}, episode=episode)
    of.rig.transport.reply(0, Op.SAVED, saved)
    of.serve()
    of.step(tenancy)
    of.rig.die()
    of.serve()
    of.rig.hello()
    assert of.rig.reset_requests()[-1].saved == saved
    of.rig.reset_done(0, "next", resumed=True)
    of.serve()
    assert of.rig.supervisor.statistics.resumed == 1


def test_a_reset_resets_what_was_resumed_in_the_midst_of_an_episode() -> None:
    of = leases(policy=FailurePolicy(retry_waiting_s=0.0))
    tenancy = of.begun()
    resumed(of, tenancy)
    assert of.reset(tenancy).result[1] == {}
    assert of.rig.reset_requests()[-1].saved is None


def test_the_next_lease_resets_what_was_resumed_in_the_midst_of_an_episode() -> None:
    of = leases(policy=FailurePolicy(retry_waiting_s=0.0))
    tenancy = of.begun()
    resumed(of, tenancy)
    of.slots.give_back(tenancy)
    tenancy = of.lease()
    assert of.reset(tenancy).result[1] == {}
    of.slots.give_back(tenancy)
    of.serve()
    of.rig.reset_done()
    tenancy, n_resets = of.lease(), len(of.rig.reset_requests())
    of.reset(tenancy)
    assert len(of.rig.reset_requests()) == n_resets, "that is an episode from its beginning"


def test_a_lease_resets_what_was_restored_from_a_snapshot() -> None:
    of = leases()
    env = of.rig.slot()
    saved = SavedEnv(b"a state", "in the midst", {}, episode=env.episode)
    of.rig.supervisor.resets.restore({0: (saved, record_of(env))})
    of.rig.reset_done(0, "in the midst", is_restored=True)
    tenancy = of.lease()
    assert of.reset(tenancy).result[1] == {}


# -- steps -----------------------------------------------------------------------------------------


def test_a_step_and_what_has_become_of_it() -> None:
    of = leases()
    tenancy = of.begun()
    assert (tenancy.outcome.during, tenancy.outcome.status) == ("reset", "completed")  # type: ignore[union-attr]
    began = of.rig.clock()
    call = of.step(tenancy)
    assert not call.is_over
    of.rig.advance(2.0)
    of.rig.stepped(reward=3.0)
    of.serve()
    assert of.told[-1] is call
    assert (call.result.reward, call.result.done) == (3.0, False)
    outcome = tenancy.outcome
    assert outcome is not None
    assert (outcome.status, outcome.reward, outcome.cause) == ("completed", 3.0, None)
    assert (outcome.env_id, outcome.generation, outcome.attempt) == (0, 0, 1)
    assert (outcome.began_s, outcome.ended_s) == (began, began + 2.0)
    assert tenancy.episode_outcome is None
    of.step(tenancy)
    of.rig.stepped(reward=4.0, done=True, after=AfterStep.RESETS)
    of.serve()
    episode = tenancy.episode_outcome
    assert episode is not None
    assert (episode.during, episode.status, episode.reward) == ("episode", "completed", 7.0)
    assert isinstance(of.step(tenancy).error, EnvNotReadyError), "the episode has ended"


def test_a_failed_step_has_no_reward() -> None:
    of = leases()
    tenancy = of.begun()
    call = of.step(tenancy)
    of.rig.fail()
    of.serve()
    assert call.error is None
    assert call.result.reward is None
    assert call.result.info["abnormal"]
    assert isinstance(call.result.info["error"], EnvRaised)
    for outcome in (tenancy.outcome, tenancy.episode_outcome):
        assert outcome is not None
        assert (outcome.status, outcome.reward) == (OutcomeStatus.FAILED, None)
        assert outcome.cause is call.result.info["error"]


def test_after_a_death_it_is_not_known_whether_the_step_was_taken() -> None:
    of = leases()
    tenancy = of.begun()
    call = of.step(tenancy)
    of.rig.die()
    of.serve()
    assert isinstance(call.result.info["error"], EnvCrash)
    assert tenancy.outcome is not None
    assert tenancy.outcome.status is OutcomeStatus.UNRESOLVED


def test_a_step_that_an_env_was_not_sent_has_failed() -> None:
    of = leases()
    tenancy = of.begun()
    of.rig.die()
    of.serve()
    call = of.step(tenancy)
    assert isinstance(call.result.info["error"], EnvCrash)
    assert tenancy.outcome is not None
    assert tenancy.outcome.status is OutcomeStatus.FAILED
    assert steps_sent(of) == 0


def test_failures_raise_where_the_config_says_so() -> None:
    of = leases(policy=FailurePolicy(recover=False))
    tenancy = of.begun()
    call = of.step(tenancy)
    of.rig.fail()
    of.serve()
    assert isinstance(call.error, EnvRaised)
    assert call.closes
    assert of.rig.supervisor.repair.fatal is None, "it is raised once"


def test_too_many_failures_are_raised_by_the_next_call_of_that_lease() -> None:
    of = leases(2, policy=FailurePolicy(max_failures=0))
    tenancy, other = of.begun(), of.begun()
    of.step(tenancy)
    of.rig.fail()
    of.serve()
    assert of.step(other).error is None
    call = of.call(tenancy, "reset")
    assert isinstance(call.error, FailuresExhaustedError)
    assert call.error.env_id == 0
    assert of.rig.supervisor.repair.fatal is None


def test_a_number_that_is_not_finite_is_raised_by_who_has_seen_it_and_by_nobody_else() -> None:
    of = leases(raise_non_finite=True)
    first = of.begun()
    call = of.step(first)
    of.rig.fail(kind=FailureKind.NON_FINITE)
    of.serve()
    assert isinstance(call.result.info["error"], EnvProtocolError)
    assert isinstance(of.step(first).error, EnvProtocolError)
    of.rig.reset_done()
    of.reset(first)
    of.step(first)
    of.rig.fail(kind=FailureKind.NON_FINITE)
    of.serve()
    of.slots.give_back(first)
    second = of.ask()
    of.serve()
    of.rig.reset_done()
    of.serve()
    assert second.env_id == 0
    assert of.reset(second).error is None
    assert of.step(second).error is None
    assert of.rig.supervisor.repair.fatal is None, "nor by calls for batches"


def test_what_an_env_was_given_up_for_before_its_lease_is_raised_by_calls_for_batches() -> None:
    of = leases(2, policy=FailurePolicy(max_failures=0))
    of.rig.die(0)
    repair = of.rig.supervisor.repair
    assert isinstance(repair.fatal, FailuresExhaustedError)
    tenancy = of.lease()
    assert tenancy.env_id == 1
    of.reset(tenancy)
    waiting = of.ask()
    of.serve()
    assert (waiting.env_id, waiting.error) == (None, None), "nobody revives the other one"
    of.rig.supervisor.resets.begin({0: None})
    of.rig.run(0.5)
    of.rig.hello()
    of.serve(may_lease=False)
    of.rig.reset_done()
    of.serve()
    assert waiting.env_id == 0
    assert of.reset(waiting).error is None
    assert isinstance(repair.fatal, FailuresExhaustedError)


def test_an_env_that_was_dropped_is_not_revived_by_who_waits() -> None:
    of = leases(policy=FailurePolicy(max_failures=0, drop_exhausted=True))
    of.rig.die()
    waiting = of.ask()
    of.serve()
    of.rig.run(0.5)
    of.serve()
    assert isinstance(waiting.error, AllEnvsFailedError)
    assert of.rig.supervisor.repair.fatal is None


def test_what_an_env_fails_with_while_it_is_given_back_is_raised_by_calls_for_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = leases(policy=FailurePolicy(max_failures=0))
    tenancy = of.begun()
    begin = of.rig.supervisor.resets.begin

    def fails(params: Any, **how: Any) -> None:
        begin(params, **how)
        of.rig.transport.fail(0, "reset")
        of.rig.engine.collect()

    monkeypatch.setattr(of.rig.supervisor.resets, "begin", fails)
    of.slots.give_back(tenancy)
    of.serve()
    assert isinstance(of.rig.supervisor.repair.fatal, FailuresExhaustedError)


def test_an_error_is_of_the_lease_in_which_it_came_up() -> None:
    """Though that one ends before it was looked at, and somebody else has the env since."""
    of = leases(policy=FailurePolicy(max_failures=0))
    first = of.begun()
    of.call(first, "reset")
    of.rig.fail(during="reset")
    of.slots.give_back(first)
    of.slots.obey()
    assert isinstance(of.rig.supervisor.repair.fatal, FailuresExhaustedError)
    assert not of.rig.supervisor.repair.fatal_of_leases


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_all", "of_call", "of_episode", "counts", "name"),
    [
        (2.0, None, None, 2.0, "step_timeout"),
        (2.0, 1.0, None, 1.0, "timeout_s"),
        (1.0, 2.0, None, 1.0, "step_timeout"),
        (None, 1.0, None, 1.0, "timeout_s"),
        (2.0, 3.0, 1.0, 1.0, "episode_timeout_s"),
    ],
)
def test_the_shortest_limit_counts(
    of_all: float | None,
    of_call: float | None,
    of_episode: float | None,
    counts: float,
    name: str,
) -> None:
    of = leases(rules=SlotRules(step_s=of_all), deadlines=Deadlines(step_s=of_all))
    tenancy = of.lease(of_episode)
    of.reset(tenancy)
    call = of.step(tenancy, limit_s=of_call)
    of.rig.advance(counts - 0.25)
    of.serve()
    assert not call.is_over
    of.rig.advance(0.25)
    of.serve()
    error = call.result.info["error"]
    assert isinstance(error, EnvTimeout)
    assert error.limit_s == counts
    assert f"{counts:g} s of {name}" in str(error)
    assert of.rig.supervisor.hosts.limits.own == {}
    assert tenancy.outcome is not None
    assert tenancy.outcome.status is OutcomeStatus.UNRESOLVED


def test_an_episode_that_is_too_long_between_its_steps_ends_with_the_next() -> None:
    of = leases()
    tenancy = of.lease(3.0)
    of.reset(tenancy)
    of.rig.advance(4.0)
    call = of.step(tenancy)
    assert isinstance(call.result.info["error"], EnvTimeout)
    assert call.result.reward is None
    assert steps_sent(of) == 0
    assert tenancy.outcome is not None
    assert tenancy.outcome.status is OutcomeStatus.FAILED
    assert of.rig.supervisor.statistics.failures_by_env == {}, "nothing is charged for it"


def test_a_reset_that_hangs_is_ended_and_may_be_tried_again() -> None:
    of = leases()
    tenancy = of.lease()
    call = of.call(tenancy, "reset", 1.0, seed=4)
    of.rig.advance(1.0)
    of.serve()
    assert isinstance(call.error, EnvTimeout)
    assert "1 s of timeout_s" in str(call.error)
    assert tenancy.outcome is not None
    assert (tenancy.outcome.during, tenancy.outcome.attempt) == ("reset", 1)
    again = of.call(tenancy, "reset", seed=4)
    of.rig.run(0.5)
    of.rig.hello()
    of.rig.reset_done()
    of.serve()
    assert again.error is None
    assert (tenancy.outcome.attempt, tenancy.outcome.generation) == (2, 1)


def test_a_reset_of_which_attempts_are_left_has_not_failed() -> None:
    of = leases(policy=FailurePolicy(max_retry=2))
    tenancy = of.lease()
    call = of.call(tenancy, "reset", seed=4)
    of.rig.fail(during="reset")
    of.serve()
    assert not call.is_over
    of.rig.run(0.5)
    of.rig.reset_done()
    of.serve()
    assert call.error is None


@pytest.mark.parametrize("wishes", [{"seed": 123}, {"params": {"level": 3}}])
@pytest.mark.parametrize("hangs", [False, True])
def test_the_repair_after_a_reset_that_failed_has_not_its_wishes(
    wishes: dict[str, Any], hangs: bool
) -> None:
    of = leases(policy=FailurePolicy(max_retry=2, retry_waiting_s=0.0))
    tenancy = of.lease()
    call = of.call(tenancy, "reset", 1.0, **wishes)
    if not hangs:
        of.rig.fail(during="reset")
        assert of.rig.reset_requests()[-2] == of.rig.reset_requests()[-1], "the next attempt"
        of.rig.fail(during="reset")
        of.rig.transport.reply(0, Op.CLOSED)
        of.serve()
        assert isinstance(call.error, EnvRaised)
        of.rig.die(exit_status=0)
    else:
        of.rig.advance(1.0)
        of.serve()
        assert isinstance(call.error, EnvTimeout)
        of.rig.run(0.5)
    of.rig.hello()
    repair = of.rig.reset_requests()[-1]
    assert (repair.seed, dict(repair.params)) == (None, {})
    of.rig.reset_done()
    assert of.rig.state() is EnvState.RUN


def test_the_reset_of_a_lease_that_ended_goes_on_without_its_seed() -> None:
    of = leases(policy=FailurePolicy(max_retry=2, retry_waiting_s=0.0))
    tenancy = of.lease()
    of.call(tenancy, "reset", seed=123)
    of.slots.give_back(tenancy)
    of.serve()
    of.rig.fail(during="reset")
    assert [asked.seed for asked in of.rig.reset_requests()[-2:]] == [123, None]


def test_whatever_beginning_a_call_raises_is_told_to_who_called() -> None:
    def checks() -> Any:
        raise ZeroDivisionError("in an action space of somebody's own")

    of = leases(rules=SlotRules(checks=checks))
    tenancy = of.begun()
    call: SlotCall = of.call(tenancy, "step", action=object())
    assert isinstance(call.error, ZeroDivisionError)
    assert of.told[-1] is call


# -- what nobody awaits ----------------------------------------------------------------------------


def test_what_was_sent_is_never_sent_again() -> None:
    of = leases()
    tenancy = of.begun()
    call = of.step(tenancy)
    of.slots.abandon(tenancy, call)
    of.serve()
    assert tenancy.outcome is not None
    assert tenancy.outcome.status is OutcomeStatus.UNRESOLVED
    assert isinstance(tenancy.outcome.cause, EnvCallAbandoned)
    assert isinstance(of.step(tenancy).error, EnvNotReadyError), "it is dirty"
    again = of.call(tenancy, "reset")
    assert of.rig.phase() is Phase.CANCELLING
    of.rig.stepped(reward=9.0)
    of.rig.reset_done()
    of.serve()
    assert again.error is None
    assert steps_sent(of) == 1
    of.step(tenancy)
    of.rig.stepped(reward=1.0)
    of.serve()
    slots = of.rig.supervisor.statistics.of_slots
    assert (slots.actions, slots.timesteps, slots.cancelled) == (2, 1, 1)
    assert of.rig.identity_holds()


@pytest.mark.parametrize(
    ("left", "then", "asked_for"),
    [
        ({"params": {"level": 3}}, {"seed": 2}, (2, {})),
        ({"params": {"level": 3}}, {}, (None, {})),
        ({"seed": 1}, {"params": {"level": 4}}, (None, {"level": 4})),
        ({"seed": 1}, {}, (None, {})),
    ],
)
def test_the_wishes_of_a_reset_that_nobody_awaits_are_those_of_no_other(
    left: dict[str, Any], then: dict[str, Any], asked_for: tuple[Any, dict[str, Any]]
) -> None:
    of = leases()
    tenancy = of.begun()
    call = of.call(tenancy, "reset", **left)
    of.slots.abandon(tenancy, call)
    again = of.call(tenancy, "reset", **then)
    of.rig.reset_done()
    of.serve()
    assert not again.is_over, "that was the episode of the first one"
    asked = of.rig.reset_requests()[-1]
    assert (asked.seed, dict(asked.params)) == asked_for
    of.rig.reset_done()
    of.serve()
    assert again.error is None


def test_a_reset_without_wishes_that_nobody_awaits_is_joined() -> None:
    of = leases()
    tenancy = of.begun()
    call = of.call(tenancy, "reset")
    of.slots.abandon(tenancy, call)
    again = of.call(tenancy, "reset")
    of.rig.reset_done()
    of.serve()
    assert again.is_over
    assert again.error is None


def test_a_call_that_its_user_could_not_abandon_is_abandoned_with_the_next() -> None:
    """A second interrupt has come before the first one was seen to."""
    of = leases()
    tenancy = of.begun()
    of.step(tenancy)
    assert isinstance(of.step(tenancy).error, EnvNotReadyError)
    of.call(tenancy, "reset")
    of.rig.stepped()
    of.rig.reset_done()
    of.serve()
    slots = of.rig.supervisor.statistics.of_slots
    assert (slots.actions, slots.timesteps, slots.cancelled) == (1, 0, 1)


@pytest.mark.parametrize(("own_s", "ends_after_s"), [(None, 5.0), (30.0, 5.0), (2.0, 2.0)])
def test_the_step_of_a_lease_that_has_ended_is_bounded(
    own_s: float | None, ends_after_s: float
) -> None:
    of = leases(policy=FailurePolicy(max_failures=0))
    tenancy = of.begun()
    call = of.step(tenancy, limit_s=own_s)
    of.slots.abandon(tenancy, call)
    of.slots.give_back(tenancy)
    of.serve()
    assert of.rig.state() is EnvState.RESET
    of.rig.advance(ends_after_s - 0.25)
    of.serve()
    assert of.rig.phase() is Phase.CANCELLING
    of.rig.advance(0.25)
    of.serve()
    assert of.rig.phase() is not Phase.CANCELLING
    assert of.rig.supervisor.hosts.limits.own == {}
    if ends_after_s == own_s:
        assert isinstance(of.rig.supervisor.repair.fatal, FailuresExhaustedError), "it counts"
        return
    assert of.rig.supervisor.repair.fatal is None, "its user has left it, and it is not charged"
    of.rig.run(0.5)
    of.rig.hello()
    of.rig.reset_done()
    of.serve()
    fresh = of.lease()
    n_resets = len(of.rig.reset_requests())
    of.reset(fresh)
    assert len(of.rig.reset_requests()) == n_resets


def test_an_answer_that_came_and_was_not_taken_leaves_the_env_dirty() -> None:
    of = leases()
    tenancy = of.begun()
    call = of.step(tenancy)
    of.rig.stepped()
    of.serve()
    of.slots.abandon(tenancy, call)  # its coroutine was cancelled before it went on
    of.serve()
    assert isinstance(of.step(tenancy).error, EnvNotReadyError)


def test_a_lease_that_has_ended_is_refused() -> None:
    of = leases()
    tenancy = of.begun()
    of.slots.give_back(tenancy)
    of.slots.give_back(tenancy)
    of.serve()
    assert isinstance(of.step(tenancy).error, LeaseEndedError)


def test_a_call_that_is_under_way_when_its_lease_ends() -> None:
    of = leases()
    tenancy = of.begun()
    call = of.step(tenancy)
    of.slots.give_back(tenancy)
    of.serve()
    assert isinstance(call.error, LeaseEndedError)
    assert tenancy.outcome is not None
    assert tenancy.outcome.status is OutcomeStatus.UNRESOLVED


@pytest.mark.parametrize("told", ["of its env", "of an answer"])
def test_the_lease_of_a_loop_that_was_closed_ends(told: str) -> None:
    of = leases()
    if told == "of an answer":
        tenancy = of.begun()
        of.step(tenancy)
        of.rig.stepped()
    else:
        tenancy = of.ask()
    of.is_loop_closed = True
    of.serve()
    of.serve()
    assert tenancy.is_over
    assert not of.rig.supervisor.table.leased


def test_who_was_told_is_not_kept() -> None:
    """A loop may be closed before the coroutine goes on: it is dropped then, and its lease too."""
    of = leases()
    tenancy = of.ask()
    asked = weakref.ref(tenancy.notify)
    of.serve()
    call = SlotCall(lambda: of.tell(call), "reset", None)
    called = weakref.ref(call.notify)
    of.slots.call(tenancy, call)
    of.serve()
    assert of.told == [tenancy, call]
    assert (asked(), called()) == (None, None)
    assert tenancy.outcome is not None


def test_everybody_is_answered_at_the_end() -> None:
    of = leases(2)
    tenancy, idle = of.begun(), of.begun()
    call, waiting = of.step(tenancy), of.ask()
    of.serve()
    of.told.clear()
    of.slots.shut(ManagerClosedError("closed"))
    of.slots.notify_all()
    assert {id(one) for one in of.told} == {id(call), id(waiting)}
    assert isinstance(call.error, ManagerClosedError)
    assert isinstance(waiting.error, ManagerClosedError)
    late, later = of.ask(), SlotCall(lambda: True, "step", None, action=1)
    of.slots.call(idle, later)
    assert isinstance(late.error, ManagerClosedError), "nobody has to come for it"
    assert isinstance(later.error, ManagerClosedError)


# -- spares ----------------------------------------------------------------------------------------


def test_a_spare_serves_the_next_lease() -> None:
    of = leases(spare_num=1)
    first = of.begun()
    of.step(first)
    of.rig.stepped()
    of.serve()
    second = of.ask()
    of.slots.give_back(first)
    of.serve()
    assert of.rig.supervisor.statistics.swaps == 1
    adopted = of.rig.requests(Op.ADOPT, 0) or of.rig.requests(Op.ADOPT, 1)
    assert adopted
    assert second.env_id is None
    of.rig.transport.reply(0, Op.RESET_DONE, ("first", {}))
    of.serve()
    assert second.env_id == 0


def test_a_spare_comes_though_other_leases_are_always_in_a_step() -> None:
    of = leases(2, spare_num=1)
    ending, other = of.begun(), of.begun()
    of.step(other)
    of.step(ending)
    of.rig.stepped(0, done=True)
    of.serve()
    assert of.rig.supervisor.statistics.swaps == 1
    call = of.call(ending, "reset")
    assert not call.is_over
    of.rig.reset_done(0)
    of.serve()
    assert call.error is None
    assert len(of.rig.requests(Op.ADOPT, 0)) == 1
    assert other.call is not None


@pytest.mark.parametrize("inplace", [False, True])
def test_a_spare_comes_for_a_batch_though_a_lease_is_always_in_a_step(inplace: bool) -> None:
    of = leases(3, spare_num=2, reset_inplace=inplace)
    tenancy = of.begun()
    of.step(tenancy)
    of.rig.send({1: 1, 2: 1})
    of.rig.stepped(2, done=True)
    of.serve()
    assert of.rig.supervisor.statistics.swaps == 0, "in one order, and env 1 is in a step"
    of.rig.stepped(1, done=True)
    of.serve()
    assert of.rig.supervisor.statistics.swaps == 2
    assert tenancy.call is not None
    assert [
        message.env_id
        for _, message in of.rig.transport.sent
        if message.request_id and message.op == Op.ADOPT
    ] == [1, 2]


def test_an_env_that_ended_in_its_lease_does_not_hasten_those_of_batches() -> None:
    of = leases(3, spare_num=2)
    tenancy = of.begun()
    of.step(tenancy)
    of.rig.send({1: 1, 2: 1})
    of.rig.stepped(2, done=True)
    of.rig.stepped(0, done=True)
    of.serve()
    assert of.rig.requests(Op.ADOPT, 0)
    assert not of.rig.requests(Op.ADOPT, 2)


# -- episodes that are left, and workers that want to be replaced ----------------------------------


def recycled(env_num: int = 1, **rig: Any) -> Leases:
    """Leases of envs whose workers have a limit."""
    of = leases(env_num, **rig)
    of.rig.hosts.settings = replace(of.rig.hosts.settings, max_episodes=9)
    return of


def stepped(of: Leases, tenancy: Tenancy, **how: Any) -> None:
    """Have a leased env take a step."""
    of.step(tenancy)
    of.rig.stepped(tenancy.env_id or 0, **how)
    of.serve()


def worn(of: Leases, env_id: int = 0) -> None:
    """The worker of an env that is to be reset wants to be replaced."""
    of.rig.transport.reply(env_id, Op.WORN)
    of.serve()


def leave_by_reset(of: Leases, tenancy: Tenancy) -> None:
    of.call(tenancy, "reset")


def leave_by_the_end(of: Leases, tenancy: Tenancy) -> None:
    of.slots.give_back(tenancy)
    of.serve()


def leave_to_the_next(of: Leases, tenancy: Tenancy) -> None:
    waiting = of.ask()
    of.serve()
    of.slots.give_back(tenancy)
    of.serve()
    of.call(waiting, "reset")


def leave_in_a_step(of: Leases, tenancy: Tenancy) -> None:
    of.slots.abandon(tenancy, of.step(tenancy))
    of.slots.give_back(tenancy)
    of.serve()
    of.rig.stepped()


LEAVES = [leave_by_reset, leave_by_the_end, leave_to_the_next, leave_in_a_step]


@pytest.mark.parametrize("leave", LEAVES)
def test_a_worker_is_told_of_an_episode_that_was_left(leave: Any) -> None:
    of = recycled()
    tenancy = of.begun()
    stepped(of, tenancy)
    leave(of, tenancy)
    assert [asked.leaves for asked in of.rig.reset_requests()] == [False, True]


@pytest.mark.parametrize("leave", LEAVES[:2])
def test_an_episode_without_steps_is_none_that_was_left(leave: Any) -> None:
    of = recycled()
    leave(of, of.begun())
    assert [asked.leaves for asked in of.rig.reset_requests()] == [False, False]


def test_an_episode_that_ended_is_none_that_was_left() -> None:
    of = recycled()
    tenancy = of.begun()
    stepped(of, tenancy, done=True, after=AfterStep.RESETS)
    of.rig.reset_done()
    of.call(tenancy, "reset", seed=3)
    assert [asked.leaves for asked in of.rig.reset_requests()] == [False, False]


def test_a_step_that_nobody_awaits_may_end_the_episode() -> None:
    of = recycled()
    tenancy = of.begun()
    of.slots.abandon(tenancy, of.step(tenancy))
    of.call(tenancy, "reset", seed=3)
    of.rig.stepped(done=True, after=AfterStep.NOTHING)
    assert not of.rig.reset_requests()[-1].leaves


def test_workers_without_a_limit_are_told_nothing() -> None:
    of = leases()
    tenancy = of.begun()
    stepped(of, tenancy)
    of.call(tenancy, "reset")
    assert not of.rig.reset_requests()[-1].leaves


@pytest.mark.parametrize("leave", LEAVES)
def test_a_worn_worker_is_replaced_before_the_next_reset(leave: Any) -> None:
    of = recycled()
    tenancy = of.begun()
    stepped(of, tenancy)
    leave(of, tenancy)
    worn(of)
    assert of.rig.phase() is Phase.ENDING
    of.rig.die(exit_status=0)
    of.rig.hello()
    assert not of.rig.reset_requests()[-1].leaves
    of.rig.reset_done()
    of.serve()
    assert of.rig.state() is EnvState.RUN
    statistics = of.rig.supervisor.statistics
    assert (statistics.recycled, statistics.renewals) == (1, 1)
    assert statistics.failures_by_env == {}


def test_the_wishes_of_a_reset_are_those_of_the_new_worker() -> None:
    of = recycled()
    tenancy = of.begun()
    stepped(of, tenancy)
    call = of.call(tenancy, "reset", seed=4, params={"level": 3})
    worn(of)
    of.rig.die(exit_status=0)
    of.rig.hello()
    asked = of.rig.reset_requests()[-1]
    assert (asked.seed, dict(asked.params)) == (4, {"level": 3})
    of.rig.reset_done()
    of.serve()
    assert call.is_over
    assert call.error is None


def test_limits_of_a_reset_and_of_its_episode_count_from_when_the_worker_was_replaced() -> None:
    of = recycled(rules=SlotRules(reset_s=3.0))
    tenancy = of.lease(4.0)
    of.reset(tenancy)
    stepped(of, tenancy)
    call = of.call(tenancy, "reset", 2.0)
    worn(of)
    of.rig.advance(2.0)
    of.serve()
    assert of.slots.until == math.inf
    of.rig.die(exit_status=0)
    of.rig.advance(10.0)
    of.serve()
    assert not call.is_over
    of.rig.hello()
    of.serve()
    of.rig.advance(1.5)
    of.serve()
    of.rig.reset_done()
    of.serve()
    assert call.error is None
    of.rig.advance(2.0)
    assert of.step(tenancy).error is None
    of.rig.stepped()
    of.serve()
    of.rig.advance(1.0)
    assert isinstance(of.step(tenancy).result.info["error"], EnvTimeout)


def test_a_reset_in_the_new_worker_has_its_limit() -> None:
    of = recycled()
    tenancy = of.begun()
    stepped(of, tenancy)
    call = of.call(tenancy, "reset", 2.0)
    worn(of)
    of.rig.die(exit_status=0)
    of.rig.advance(10.0)
    of.rig.hello()
    of.serve()
    of.rig.advance(2.0)
    of.serve()
    assert isinstance(call.error, EnvTimeout)


def test_a_new_worker_that_dies_at_its_start_fails_the_reset() -> None:
    of = recycled()
    tenancy = of.begun()
    stepped(of, tenancy)
    call = of.call(tenancy, "reset", 2.0)
    worn(of)
    of.rig.die(exit_status=0)
    of.rig.die()
    of.serve()
    assert isinstance(call.error, EnvCrash)
    again = of.call(tenancy, "reset", 2.0)
    of.rig.advance(2.0)
    of.serve()
    assert isinstance(again.error, EnvTimeout), "that is a repair"


def test_a_worker_that_wants_to_be_replaced_where_no_episode_was_left_is_at_fault() -> None:
    of = recycled()
    tenancy = of.begun()
    call = of.call(tenancy, "reset")
    worn(of)
    assert isinstance(call.error, EnvProtocolError)
    assert of.rig.supervisor.statistics.recycled == 0


def test_a_shared_worker_is_replaced_when_its_envs_have_left_their_episodes() -> None:
    of = recycled(2, num_workers=1)
    first, second = of.begun(), of.begun()
    stepped(of, first)
    stepped(of, second)
    call = of.call(first, "reset")
    worn(of)
    of.rig.reset_done()
    of.serve()
    assert call.error is None, "its user does not wait for the neighbour"
    stepped(of, first)
    of.slots.give_back(first)
    waiting = of.ask()
    of.serve()
    assert of.rig.state(0) is EnvState.RESET
    assert len(of.rig.reset_requests(0)) == 3, "it is not reset in the worker that is to go"
    assert of.rig.phase(0) is Phase.IDLE
    stepped(of, second)
    of.slots.give_back(second)
    of.serve()
    assert of.rig.phase(0) is of.rig.phase(1) is Phase.ENDING
    of.rig.die(exit_status=0)
    for env_id in (0, 1):
        of.rig.hello(env_id)
    for env_id in (0, 1):
        of.rig.reset_done(env_id)
    of.serve()
    assert waiting.env_id == 0
    assert of.rig.supervisor.statistics.recycled == 1


@pytest.mark.parametrize("in_time", [True, False])
def test_a_worn_worker_is_replaced_behind_the_spare(in_time: bool) -> None:
    of = recycled(2, spare_num=1)
    first, second = of.begun(), of.begun()
    stepped(of, first)
    of.slots.give_back(first)
    of.serve()
    assert of.rig.supervisor.statistics.swaps == 1
    (asked,) = of.rig.reset_requests(2)[1:]
    assert (asked.keeps, asked.leaves) == (True, True)
    if in_time:
        worn(of, 2)
    stepped(of, second, done=True)
    assert of.rig.supervisor.statistics.swaps == 1, "this one may give no episode"
    if not in_time:
        worn(of, 2)
    of.rig.reset_done(0)
    of.rig.reset_done(1)
    of.rig.die(2, exit_status=0)
    of.rig.hello(2)
    of.rig.transport.reply(2, Op.RESET_DONE, None)
    of.serve()
    assert of.rig.supervisor.spares is not None
    assert of.rig.supervisor.spares.figures()["spares_ready"] == 1
    assert of.rig.supervisor.statistics.recycled == 1
