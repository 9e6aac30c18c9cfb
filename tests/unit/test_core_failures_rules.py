"""The tables of what follows failures: exactly these rules, and what happens is what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from envmgr.core import Phase, failures
from envmgr.core.failures import (
    ANSWERS,
    ANY_LOSS,
    ANY_STATE,
    ANYWHERE,
    COUNTS,
    EPISODES,
    LOSSES,
    USER_GETS,
    Answer,
    Condition,
    Follows,
    Gets,
    Lost,
    Raises,
    Repair,
    Rule,
    Situation,
    decide,
)
from envmgr.core.phases import Next
from envmgr.core.table import ManagedEnv
from envmgr.env.batch_specs import Batch
from envmgr.errors import EnvFailure, FailuresExhaustedError
from envmgr.lifecycle import EnvState, Event
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.transport.base import HostDied
from envmgr.wire.messages import FailureKind, Op
from tests.rig import Rig

N, V, H = Lost.NOTHING, Lost.ENV, Lost.HOST
I, B, R, S, X, C, W = (  # noqa: E741 - letters keep the tables below readable as tables
    Phase.IDLE,
    Phase.STARTING,
    Phase.RESETTING,
    Phase.STEPPING,
    Phase.CANCELLING,
    Phase.CALLING,
    Phase.PAUSING,
)
INIT, RUN, RESET, NEED, DONE, ERROR = (
    EnvState.INIT,
    EnvState.RUN,
    EnvState.RESET,
    EnvState.NEED_RESET,
    EnvState.DONE,
    EnvState.ERROR,
)
ANY: tuple[Any, ...] = ()

# What is lost, phases, states, what else holds, and what is decided then, in the order in which the
# rules are asked. Written out a second time on purpose: whoever changes the tables has to change
# these, too. ANY: whatever it is, so far as an env can fail there.
Row = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], str, Any]

EXPECTED_LOSSES: Sequence[Row] = (
    ((V,), ANY, ANY, "SHARES_ENV", H),
    ((N,), (B,), ANY, "SHARES_ENV", H),
    ((N,), (R,), ANY, "SHARES_ENV LAST_ATTEMPT", H),
    ((N,), (S, X, B, R, W), ANY, "SHARES_ENV RENEWS", H),
    ((V,), ANY, ANY, "ALONE", H),
    ((N,), ANY, ANY, "", N),
    ((V,), ANY, ANY, "", V),
    ((H,), ANY, ANY, "", H),
)
EXPECTED_GETS: Sequence[Row] = (
    (ANY, ANY, ANY, "RELEASED", ""),
    ((N,), (C,), ANY, "", "RESULT"),
    ((N,), (R,), ANY, "ATTEMPTS_LEFT", ""),
    (ANY, (S,), ANY, "", "TIMESTEP ERROR"),
    (ANY, (X,), ANY, "", ""),
    (ANY, (C,), ANY, "FAILED_BEFORE", "RESULT NO_OBSERVATION"),
    (ANY, (C,), (RUN,), "LAUNCHING", "RESULT ERROR"),
    (ANY, (C,), (RUN,), "", "RESULT WITH_NEXT_ACTION"),
    (ANY, (C,), (INIT, RESET), "", "RESULT ERROR"),
    (ANY, (C,), (NEED, DONE, ERROR), "", "RESULT"),
    (ANY, ANY, ANY, "FAILED_BEFORE", "NO_OBSERVATION"),
    (ANY, ANY, (RUN,), "LAUNCHING", "ERROR"),
    (ANY, ANY, (RUN,), "", "WITH_NEXT_ACTION"),
    (ANY, ANY, (INIT, RESET), "", "ERROR"),
    (ANY, ANY, (NEED, DONE, ERROR), "", ""),
)
EXPECTED_EPISODES: Sequence[Row] = (
    (ANY, ANY, ANY, "RELEASED", None),
    ((N,), (C,), ANY, "", None),
    (ANY, ANY, (RESET,), "", None),
    (ANY, (I, C, S), ANY, "LAUNCHING", True),
    (ANY, (I, C, S), ANY, "AUTO_RESET", True),
    (ANY, (I, C, S), ANY, "", False),
    (ANY, ANY, ANY, "", None),
)
EXPECTED_COUNTS: Sequence[Row] = (
    (ANY, ANY, ANY, "MARKED", False),
    (ANY, ANY, ANY, "INTERRUPTED", False),
    (ANY, ANY, ANY, "", True),
)
# What follows, whether it is charged, what is raised.
EXPECTED_ANSWERS: Sequence[Row] = (
    ((N,), (C,), ANY, "", ("CALL_ENDS", False, "NOTHING")),
    ((H,), ANY, ANY, "RELEASED", ("NOTHING", False, "NOTHING")),
    ((H,), ANY, ANY, "NEIGHBOUR LAUNCH_FAILED", ("STAYS", False, "LAUNCH_ERROR")),
    ((H,), ANY, ANY, "NEIGHBOUR RAISED", ("STAYS", False, "NOTHING")),
    (ANY, ANY, (DONE,), "", ("STAYS", False, "NOTHING")),
    ((H,), ANY, ANY, "NEIGHBOUR", ("NEW_HOST", False, "NOTHING")),
    ((N,), (R,), ANY, "ATTEMPTS_LEFT RENEWS", ("ENV_AGAIN", False, "NOTHING")),
    ((N,), (R,), ANY, "ATTEMPTS_LEFT", ("RESET_AGAIN", False, "NOTHING")),
    ((V,), (R,), ANY, "LAUNCHING ATTEMPTS_LEFT", ("ENV_AGAIN", False, "NOTHING")),
    ((H,), (R,), ANY, "LAUNCHING ATTEMPTS_LEFT", ("HOST_AGAIN", False, "NOTHING")),
    (ANY, ANY, ANY, "LAUNCHING", ("STAYS", False, "LAUNCH_ERROR")),
    (ANY, ANY, ANY, "RAISES", ("STAYS", False, "FAILURE")),
    (ANY, ANY, ANY, "EXHAUSTED IS_SPARE", ("CLOSES", True, "SPARE_DROPPED")),
    (ANY, ANY, ANY, "EXHAUSTED DROPS", ("CLOSES", True, "DROPPED")),
    (ANY, ANY, ANY, "EXHAUSTED", ("CLOSES", True, "EXHAUSTED")),
    ((H,), ANY, ANY, "", ("NEW_HOST", True, "NOTHING")),
    ((N,), (S,), ANY, "SPARES EPISODE_BEGINS RENEWS", ("SPARE_AND_RENEW", True, "NOTHING")),
    ((N,), (S,), ANY, "SPARES EPISODE_BEGINS", ("SPARE_AND_RESET", True, "NOTHING")),
    ((N,), (S, X), ANY, "RENEWS", ("RENEW_ENV", True, "NOTHING")),
    ((N,), (S, X), ANY, "EPISODE_BEGINS", ("RESET", True, "NOTHING")),
    ((N,), (S, X), ANY, "", ("AWAIT_USER", True, "NOTHING")),
    ((N,), (B, R), ANY, "ALONE", ("CLOSE_AND_NEW_HOST", True, "NOTHING")),
    ((N, V), (B, R, S, X, C), ANY, "", ("NEW_ENV", True, "NOTHING")),
)


def plain(then: Any) -> Any:
    """Return a decision as it stands in the tables above."""
    if isinstance(then, Answer):
        return then.follows.name, then.charged, then.raises.name
    if isinstance(then, tuple):
        return " ".join(each.name for each in then)
    return then


def row_of(rule: Rule[Any]) -> Row:
    return (
        ANY if rule.lost == ANY_LOSS else rule.lost,
        ANY if rule.at == ANYWHERE else rule.at,
        ANY if rule.states == ANY_STATE else rule.states,
        " ".join(condition.name for condition in rule.when),
        plain(rule.then),
    )


TABLES: Mapping[str, tuple[Sequence[Rule[Any]], Sequence[Row]]] = {
    "LOSSES": (LOSSES, EXPECTED_LOSSES),
    "USER_GETS": (USER_GETS, EXPECTED_GETS),
    "EPISODES": (EPISODES, EXPECTED_EPISODES),
    "COUNTS": (COUNTS, EXPECTED_COUNTS),
    "ANSWERS": (ANSWERS, EXPECTED_ANSWERS),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_rules_are_these(name: str) -> None:
    rules, expected = TABLES[name]
    assert [row_of(rule) for rule in rules] == list(expected)


def test_an_env_can_fail_wherever_no_step_is_posted_and_no_host_ends() -> None:
    assert set(ANYWHERE) == set(Phase) - {Phase.POSTED, Phase.ENDING}
    assert (set(ANY_LOSS), set(ANY_STATE)) == (set(Lost), set(EnvState))


def test_the_first_rule_that_applies_decides() -> None:
    rules = (
        Rule("step", at=(S,), when=(Condition.RENEWS,)),
        Rule("env", lost=(V,), states=(RUN,)),
        Rule("last", lost=(V, H)),
    )
    renews = frozenset((Condition.RENEWS, Condition.SPARES))
    assert decide(rules, Situation(V, S, RUN, renews)) == "step"
    assert decide(rules, Situation(V, S, RUN)) == "env"
    assert decide(rules, Situation(V, S, RESET)) == "last"
    assert decide(rules, Situation(V, C, RUN, renews)) == "env"


@pytest.mark.parametrize("phase", [Phase.POSTED, Phase.ENDING])
def test_a_situation_that_no_rule_fits_is_a_defect(phase: Phase) -> None:
    for rules, _ in TABLES.values():
        with pytest.raises(
            RuntimeError, match=f"lost in {phase.name} and RUN .with RENEWS.*defect"
        ):
            decide(rules, Situation(N, phase, RUN, frozenset((Condition.RENEWS,))))


def test_every_condition_is_asked_for() -> None:
    asked = {condition for rules, _ in TABLES.values() for rule in rules for condition in rule.when}
    assert asked == set(Condition)


# -- what happens is what the rules say ---------------------------------------------------------

WAIT_S = 0.5
AGAIN = FailurePolicy(max_retry=2, retry_waiting_s=WAIT_S, max_failures=100)
RENEW = FailurePolicy(
    max_retry=2, retry_waiting_s=WAIT_S, max_failures=100, renew_between_attempts=True
)
RAISE = FailurePolicy(recover=False)
NONE_ALLOWED = FailurePolicy(max_failures=0)
DROP = FailurePolicy(max_failures=0, drop_exhausted=True)
LIMITS = Deadlines(step_s=20.0, close_s=2.0)
ROWS = (Batch(0, 2, True),)


def begin(rig: Rig, *, begins: bool = True) -> Rig:
    """Have a launch go as far as to the first resets, or to the construction of envs."""
    env_num = len(rig.supervisor.envs)
    rig.supervisor.start_hosts(range(len(rig.hosts.envs)))
    if begins:
        for env_id in range(env_num):
            rig.hello(env_id)
        rig.supervisor.place_observations(same_spaces=True)
        rig.supervisor.begin_episodes()
    return rig


def interrupt(rig: Rig) -> None:
    rig.transport.arrive(
        rig.transport.host_of(0).host_id, HostDied(None, "interrupted", is_interrupt=True)
    )
    rig.settle(0)


def play(rig: Rig, *deeds: Callable[[Rig], object]) -> None:
    for deed in deeds:
        deed(rig)


def send(env_id: int = 0) -> Callable[[Rig], object]:
    return lambda rig: rig.send(env_id)


def fail(
    during: str = "step", env_id: int = 0, kind: FailureKind = FailureKind.RAISED
) -> Callable[[Rig], object]:
    return lambda rig: rig.fail(env_id, during, kind=kind)


def exits(during: str = "step") -> Callable[[Rig], object]:
    return fail(during, kind=FailureKind.EXITED)


def again(rig: Rig) -> None:
    rig.advance(WAIT_S)


die, hello, reset, reset_done, call = Rig.die, Rig.hello, Rig.reset, Rig.reset_done, Rig.call


def ends(rig: Rig) -> None:
    rig.stepped(0, done=True)
    rig.deliver(0)


def hang_as_it_is_let_go_of(rig: Rig) -> None:
    host = rig.transport.host_of(0)
    release = rig.requests(Op.RELEASE, 0)[0]
    rig.transport.arrive(host.host_id, release._replace(op=Op.BEGAN))
    rig.pump()
    rig.advance(10.0)


def spared(policy: FailurePolicy = AGAIN) -> Rig:
    return Rig(1, spare_num=1, policy=policy, spares_in_order=False).launch()


def shared(policy: FailurePolicy = AGAIN, **options: Any) -> Rig:
    return Rig(2, num_workers=1, policy=policy, **options).launch()


def alone(policy: FailurePolicy = AGAIN, **rules: Any) -> Rig:
    return Rig(1, policy=policy, **rules).launch()


def rows(policy: FailurePolicy = AGAIN) -> Rig:
    return Rig(2, batches=ROWS, policy=policy).launch()


# By name: what follows for the env that fails last, then for those that lose their host with it.
SCENARIOS: Mapping[str, tuple[str, Callable[[], None]]] = {
    # in a step
    "raises in a step": ("RESET", lambda: play(alone(), send(), fail())),
    "raises in a step, retry_type renew": ("RENEW_ENV", lambda: play(alone(RENEW), send(), fail())),
    "raises in a step, auto_reset off": (
        "AWAIT_USER",
        lambda: play(alone(auto_reset=False), send(), fail()),
    ),
    "raises in a step, with spares": ("SPARE_AND_RESET", lambda: play(spared(), send(), fail())),
    "raises in a step, with spares, renew": (
        "SPARE_AND_RENEW",
        lambda: play(spared(RENEW), send(), fail()),
    ),
    "marks its step": ("RESET", lambda: play(alone(), send(), fail(kind=FailureKind.ABNORMAL))),
    "exits in a step": ("NEW_HOST", lambda: play(alone(), send(), exits())),
    "exits in a step, shared": ("NEW_ENV", lambda: play(shared(), send(), exits())),
    "dies in a step": ("NEW_HOST", lambda: play(alone(), send(), die)),
    "dies in a step, with a spare": ("NEW_HOST", lambda: play(spared(), send(), die)),
    "dies in a step, both": ("NEW_HOST NEW_HOST", lambda: play(shared(), send(0), send(1), die)),
    "is interrupted": ("NEW_HOST", lambda: play(alone(), send(), interrupt)),
    "raises, cancelled": ("RESET", lambda: play(alone(), send(), reset, fail())),
    "raises, cancelled, renew": ("RENEW_ENV", lambda: play(alone(RENEW), send(), reset, fail())),
    "dies, cancelled": ("NEW_HOST", lambda: play(alone(), send(), reset, die)),
    # in a call
    "a call raises": ("CALL_ENDS", lambda: play(alone(), call, fail("call"))),
    "a call raises, reset meanwhile": (
        "CALL_ENDS",
        lambda: play(alone(), call, reset, fail("call")),
    ),
    "a call dies": ("NEW_HOST", lambda: play(alone(), call, die)),
    "a call exits, shared": ("NEW_ENV", lambda: play(shared(), call, exits("call"))),
    "a call dies, failed before": (
        "NEW_HOST",
        lambda: play(alone(), die, hello, reset_done, call, die),
    ),
    "a call dies after an episode": (
        "NEW_HOST",
        lambda: play(alone(auto_reset=False), send(), ends, call, die),
    ),
    "a call dies, reset meanwhile": ("NEW_HOST", lambda: play(alone(), call, reset, die)),
    "a call dies in launch": (
        "STAYS",
        lambda: play(begin(Rig(1, policy=AGAIN)), reset_done, call, die),
    ),
    # between steps
    "dies idle": ("NEW_HOST", lambda: play(alone(), die)),
    "dies idle, auto_reset off": ("NEW_HOST", lambda: play(alone(auto_reset=False), die)),
    "dies idle again": ("NEW_HOST", lambda: play(alone(), die, hello, reset_done, die)),
    "dies after an episode": ("NEW_HOST", lambda: play(alone(auto_reset=False), send(), ends, die)),
    "dies when done": ("STAYS", lambda: play(alone(episode_num=1), send(), ends, die)),
    "dies when done, both": (
        "NEW_HOST STAYS",
        lambda: play(shared(episode_num=1), send(), ends, send(1), die),
    ),
    # in a reset and in a construction
    "reset again": ("RESET_AGAIN", lambda: play(alone(), reset, fail("reset"))),
    "reset again, renew": ("ENV_AGAIN", lambda: play(alone(RENEW), reset, fail("reset"))),
    "resets used up": (
        "CLOSE_AND_NEW_HOST",
        lambda: play(alone(), reset, fail("reset"), again, fail("reset")),
    ),
    "resets used up, shared": (
        "NEW_ENV",
        lambda: play(shared(), reset, fail("reset"), again, fail("reset")),
    ),
    "dies in a reset": ("NEW_HOST", lambda: play(alone(), reset, die)),
    "dies in a pause": ("NEW_HOST", lambda: play(alone(), reset, fail("reset"), die)),
    "construction raises": (
        "CLOSE_AND_NEW_HOST",
        lambda: play(alone(), send(), die, fail("construction")),
    ),
    "construction raises, shared": (
        "NEW_ENV",
        lambda: play(shared(), send(), exits(), fail("construction")),
    ),
    # rows of batched envs
    "a row exits": ("NEW_HOST NEW_HOST", lambda: play(rows(), send(), exits())),
    "a row cannot be built": ("NEW_HOST NEW_HOST", lambda: play(rows(), die, fail("construction"))),
    "a row's resets used up": (
        "NEW_HOST NEW_HOST",
        lambda: play(rows(), reset, fail("reset"), again, fail("reset")),
    ),
    "a row raises, renew": ("NEW_HOST NEW_HOST", lambda: play(rows(RENEW), send(), fail())),
    "a row raises": ("RESET", lambda: play(rows(), send(), fail())),
    # in launch
    "launch, construction": (
        "STAYS",
        lambda: play(begin(Rig(1), begins=False), fail("construction")),
    ),
    "launch, dies in construction": (
        "STAYS STAYS",
        lambda: play(begin(Rig(2, num_workers=1), begins=False), die),
    ),
    "launch, reset again": (
        "RESET_AGAIN",
        lambda: play(begin(Rig(1, policy=AGAIN)), fail("reset")),
    ),
    "launch, exits in a reset, shared": (
        "ENV_AGAIN",
        lambda: play(begin(Rig(2, num_workers=1, policy=AGAIN)), exits("reset")),
    ),
    "launch, dies in a reset": ("HOST_AGAIN", lambda: play(begin(Rig(1, policy=AGAIN)), die)),
    "launch, dies after its reset": ("STAYS", lambda: play(begin(Rig(1)), reset_done, die)),
    # the end
    "on_failure raise": ("STAYS", lambda: play(alone(RAISE), send(), fail())),
    "on_failure raise, both": (
        "STAYS STAYS",
        lambda: play(shared(RAISE), send(0), send(1), die),
    ),
    "exhausted": ("CLOSES", lambda: play(alone(NONE_ALLOWED), send(), fail())),
    "exhausted, shared": ("CLOSES", lambda: play(shared(NONE_ALLOWED), send(), exits())),
    "exhausted, cancelled": ("CLOSES", lambda: play(alone(NONE_ALLOWED), send(), reset, fail())),
    "exhausted, dies": ("CLOSES", lambda: play(alone(NONE_ALLOWED), send(), die)),
    "dropped": ("CLOSES", lambda: play(alone(DROP), send(), fail())),
    "dropped, shared": ("CLOSES", lambda: play(shared(DROP), send(), fail())),
    "dropped while ready": ("CLOSES", lambda: play(alone(DROP), die)),
    "a spare dies, on_failure raise": (
        "NEW_HOST",
        lambda: play(spared(RAISE), lambda rig: rig.die(1)),
    ),
    "resets used up, with a spare": (
        "CLOSE_AND_NEW_HOST",
        lambda: play(spared(FailurePolicy()), reset, fail("reset")),
    ),
    "resets are counted anew": (
        "RESET_AGAIN",
        lambda: play(
            alone(), reset, fail("reset"), again, fail("reset"), die, hello, fail("reset")
        ),
    ),
    "a spare is dropped": ("CLOSES", lambda: play(spared(NONE_ALLOWED), lambda rig: rig.die(1))),
    "released": (
        "NOTHING NEW_HOST",
        lambda: play(
            shared(DROP, deadlines=LIMITS), send(), fail(), Rig.deliver, hang_as_it_is_let_go_of
        ),
    ),
}


class Before:
    """What there was before an env failed."""

    def __init__(self, repair: Repair, env: ManagedEnv) -> None:
        self.state, self.phase = repair._states[env.env_id], env.phase
        self.result, self.timestep, self.fresh = env.result, env.timestep, env.fresh
        self.known, self.attended = env.failed_while_ready, env.attended
        self.charged = n_charged(repair, env)
        self.generation, self.host_id, self.group = env.generation, env.host_id, env.group
        self.group_host = env.group.host_id
        self.fatal, self.launch = list(repair.fatal_errors), dict(repair.launch_failures)
        self.retries, self.swaps = repair._statistics.reset_retries, repair._statistics.swaps
        self.failures = sum(repair._statistics.failures_by_kind.values())
        self.failures += repair._statistics.spare_failures
        self.dropped, self.abnormal = env.dropped, repair._statistics.abnormal
        self.killed = list(repair._hosts.transport.killed)  # type: ignore[attr-defined]


def n_charged(repair: Repair, env: ManagedEnv) -> int:
    return len(repair._budget._of_env[env.env_id].failures)


class Witness:
    """Notes which rules decide, and looks whether what happens is what they say."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.used: set[tuple[str, int]] = set()
        self.answers: list[str] = []  # of each env that the last failure concerned
        self._decided: dict[int, dict[str, Any]] = {}
        self._events: list[tuple[int, Event]] = []
        self._current: list[int] = []
        self._names = {id(rules): name for name, (rules, _) in TABLES.items()}
        own, neighbour = Repair.fail, Repair._lose_host_of_neighbour
        patch.setattr(failures, "decide", self._decide)

        def failing(repair: Repair, env: ManagedEnv, *args: Any, **options: Any) -> None:
            before = {each.env_id: Before(repair, each) for each in repair._hosts.envs}
            self._decided, self._events = {}, []
            table = repair._table
            happened = type(table).happened

            def noted(table: Any, env_id: int, event: Event) -> None:
                self._events.append((env_id, event))
                happened(table, env_id, event)

            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(type(table), "happened", noted)
                self._under(env, lambda: own(repair, env, *args, **options))
            found = self._decided.values()
            self.answers = [decided["ANSWERS"].follows.name for decided in found]
            for env_id, decided in self._decided.items():
                look(repair, repair._hosts.envs[env_id], before[env_id], decided, self._events)

        def losing(repair: Repair, env: ManagedEnv, *args: Any) -> None:
            self._under(env, lambda: neighbour(repair, env, *args))

        patch.setattr(Repair, "fail", failing)
        patch.setattr(Repair, "_lose_host_of_neighbour", losing)

    def _under(self, env: ManagedEnv, act: Callable[[], None]) -> None:
        self._current.append(env.env_id)
        act()
        self._current.pop()

    def _decide(self, rules: Sequence[Rule[Any]], situation: Situation) -> Any:
        then = decide(rules, situation)
        index = next(i for i, rule in enumerate(rules) if rule.applies(situation))
        name = self._names[id(rules)]
        self.used.add((name, index))
        decided = self._decided.setdefault(self._current[-1], {})
        decided[name], decided["lost"] = then, situation.lost  # the last one holds
        return then


def look(
    repair: Repair,
    env: ManagedEnv,
    before: Before,
    decided: Mapping[str, Any],
    events: Sequence[tuple[int, Event]],
) -> None:
    """Look whether what has become of an env is what was decided."""
    answer: Answer = decided["ANSWERS"]
    own = [event for env_id, event in events if env_id == env.env_id]
    if "LOSSES" in decided:  # it has failed itself, and is not a neighbour
        assert decided["lost"] is decided["LOSSES"]
        killed = before.group_host in repair._hosts.transport.killed  # type: ignore[attr-defined]
        assert (decided["lost"] is H) is (killed or before.group_host is None)
        counted = sum(repair._statistics.failures_by_kind.values())
        counted += repair._statistics.spare_failures
        assert counted == before.failures + (answer.follows is not Follows.CALL_ENDS)
        is_charged = answer.charged and decided["COUNTS"]
        assert n_charged(repair, env) == before.charged + is_charged
    if not env.group.is_shared:  # else a neighbour may get one, too
        n_abnormal = int(Gets.TIMESTEP in decided["USER_GETS"])
        assert repair._statistics.abnormal == before.abnormal + n_abnormal
    look_at_user(env, before, decided["USER_GETS"], own, answer)
    expected = decided["EPISODES"]
    assert env.attended is (before.attended if expected is None else expected)
    look_at_raised(repair, env, before, answer.raises)
    CHECKS[answer.follows](repair, env, before, decided["lost"])


def look_at_user(
    env: ManagedEnv, before: Before, gets: Sequence[Gets], events: Sequence[Event], answer: Answer
) -> None:
    """Look whether the user of an env gets what was decided, and nothing else."""
    if Gets.RESULT in gets:
        assert isinstance(env.result, EnvFailure)
    else:
        assert env.result is before.result
    if Gets.TIMESTEP in gets:
        assert env.timestep is not None
        assert env.timestep.info["abnormal"]
    else:
        assert env.timestep is before.timestep
    if Gets.WITH_NEXT_ACTION in gets:
        assert before.known is None
        assert isinstance(env.failed_while_ready, EnvFailure)
    else:
        assert env.failed_while_ready is before.known
    assert env.fresh is (None if Gets.NO_OBSERVATION in gets else before.fresh)
    if answer.follows is not Follows.CLOSES:
        assert events.count(Event.FAILED) == gets.count(Gets.ERROR)
    else:
        assert events.count(Event.FAILED) == (env.failed_while_ready is None)


def look_at_raised(repair: Repair, env: ManagedEnv, before: Before, raises: Raises) -> None:
    """Look whether what was decided is raised, and nothing else."""
    raised = list(repair.fatal_errors)[len(before.fatal) :]
    if raises is Raises.FAILURE:
        assert repair.urgent
        assert [type(error) is not FailuresExhaustedError for error in raised] == [True]
    elif raises is Raises.EXHAUSTED:
        assert not repair.urgent
        assert [type(error) for error in raised] == [FailuresExhaustedError]
    else:
        assert raised == [] or repair.urgent  # by the failure of a neighbour
    is_new = env.env_id in repair.launch_failures and env.env_id not in before.launch
    assert is_new is (raises is Raises.LAUNCH_ERROR)
    is_dropped = raises in (Raises.DROPPED, Raises.SPARE_DROPPED)
    assert env.dropped is (is_dropped or before.dropped)
    if raises is Raises.DROPPED:
        assert (repair._states[env.env_id] is DONE) is (env.failed_while_ready is None)
    elif raises is Raises.SPARE_DROPPED:
        assert repair._states[env.env_id] is ERROR


def ops(repair: Repair, op: Op, host_id: int | None) -> int:
    """Return how many requests of one operation a host was sent."""
    sent = repair._hosts.transport.sent  # type: ignore[attr-defined]
    return sum(message.op == op for to, message in sent if to == host_id)


def is_call_over(repair: Repair, env: ManagedEnv, before: Before, lost: Lost) -> None:
    is_reset = before.state is RESET
    assert env.phase is (R if is_reset else I)
    assert env.generation == before.generation


def is_left_out(repair: Repair, env: ManagedEnv, before: Before, lost: Lost) -> None:
    assert (env.phase, env.host_id) == (before.phase, None)


def stays_as_it_is(repair: Repair, env: ManagedEnv, before: Before, lost: Lost) -> None:
    assert env.generation == before.generation
    assert env.is_gone is (lost is not N)
    if lost is N:
        assert (env.phase, env.host_id) == (I, before.host_id)


def is_closed(repair: Repair, env: ManagedEnv, before: Before, lost: Lost) -> None:
    assert env.generation == before.generation
    assert env.is_gone
    if lost is not H:
        asked = ops(repair, Op.RELEASE, before.host_id) + ops(repair, Op.CLOSE, before.host_id)
        assert asked == 1


def pauses(follow_up: Next, *, retries: bool) -> Callable[..., None]:
    def check(repair: Repair, env: ManagedEnv, before: Before, lost: Lost) -> None:
        assert (env.phase, env.follow_up) == (W, follow_up)
        assert env.host_id == before.host_id
        assert env.generation == before.generation
        pause_s = WAIT_S if retries else repair._policy.renewal_delay_s(env.renewals_in_a_row)
        assert env.deadline == repair._hosts.clock() + pause_s
        counts = retries and lost is N
        assert repair._statistics.reset_retries == before.retries + counts

    return check


def gets_new_host(repair: Repair, env: ManagedEnv, before: Before, lost: Lost) -> None:
    if repair._statistics.swaps > before.swaps:  # a spare has come
        assert env.group is not before.group
        assert env.generation == before.generation + 1
    elif env.phase is B:
        assert env.generation == before.generation + 1
        assert env.host_id not in (None, before.host_id)
    else:
        assert env.phase in (Phase.ENDING, W)
        assert env.follow_up is Next.RENEW_HOST


def gets_new_host_after_waiting(
    repair: Repair, env: ManagedEnv, before: Before, lost: Lost
) -> None:
    assert env.phase in (Phase.ENDING, W)
    assert (env.follow_up, env.pause_s) == (Next.RENEW_HOST, WAIT_S)
    assert repair._statistics.reset_retries == before.retries


def gets_new_host_in_peace(repair: Repair, env: ManagedEnv, before: Before, lost: Lost) -> None:
    assert ops(repair, Op.CLOSE, before.host_id) == 1
    assert env.attempts == 0
    if repair._spares is not None:  # one has come
        assert repair._statistics.swaps == before.swaps + 1
        env = before.group.envs[0]
    assert (env.phase, env.follow_up) == (Phase.ENDING, Next.RENEW_HOST)


def is_reset(repair: Repair, env: ManagedEnv, before: Before, lost: Lost) -> None:
    assert (env.phase, env.host_id) == (R, before.host_id)
    assert env.generation == before.generation


def is_renewed(repair: Repair, env: ManagedEnv, before: Before, lost: Lost) -> None:
    assert (env.phase, env.host_id) == (B, before.host_id)
    assert env.generation == before.generation + 1


def awaits_user(repair: Repair, env: ManagedEnv, before: Before, lost: Lost) -> None:
    assert (env.phase, env.host_id) == (I, before.host_id)
    assert repair._states[env.env_id] is NEED


def gets_spare(then: Phase) -> Callable[..., None]:
    def check(repair: Repair, env: ManagedEnv, before: Before, lost: Lost) -> None:
        assert repair._statistics.swaps == before.swaps + 1
        assert env.host_id != before.host_id
        spare = before.group.envs[0]
        assert (spare.is_spare, spare.phase, spare.host_id) == (True, then, before.host_id)

    return check


CHECKS: Mapping[Follows, Callable[[Repair, ManagedEnv, Before, Lost], None]] = {
    Follows.CALL_ENDS: is_call_over,
    Follows.NOTHING: is_left_out,
    Follows.STAYS: stays_as_it_is,
    Follows.CLOSES: is_closed,
    Follows.RESET_AGAIN: pauses(Next.RESET, retries=True),
    Follows.ENV_AGAIN: pauses(Next.RENEW_ENV, retries=True),
    Follows.HOST_AGAIN: gets_new_host_after_waiting,
    Follows.RESET: is_reset,
    Follows.RENEW_ENV: is_renewed,
    Follows.SPARE_AND_RESET: gets_spare(R),
    Follows.SPARE_AND_RENEW: gets_spare(B),
    Follows.AWAIT_USER: awaits_user,
    Follows.NEW_ENV: pauses(Next.RENEW_ENV, retries=False),
    Follows.NEW_HOST: gets_new_host,
    Follows.CLOSE_AND_NEW_HOST: gets_new_host_in_peace,
}


def test_what_happens_is_what_the_rules_say_and_all_of_them_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    witness = Witness(monkeypatch)
    for name, (expected_answers, scenario) in SCENARIOS.items():
        try:
            scenario()
            assert " ".join(witness.answers) == expected_answers
        except BaseException:
            print(f"in the scenario {name!r}")  # pytest shows it below the traceback
            raise
    missing = [
        (name, expected[index])
        for name, (rules, expected) in TABLES.items()
        for index in range(len(rules))
        if (name, index) not in witness.used
    ]
    assert missing == []
