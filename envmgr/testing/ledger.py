"""The trainer's side of the accounts: every action and timestep is reported to a `Ledger`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envmgr.errors import EnvManagerError
from envmgr.manager.loop import error_of
from envmgr.testing.checksums import UNKNOWN, checksum_of, reward_checksum
from envmgr.testing.ledger_env import ANY_ENV, N_ACTIONS, Mark, mark_of
from envmgr.types import EnvTimestep, is_abnormal

_KEPT_FINDINGS = 20


class LedgerError(EnvManagerError, AssertionError):
    """The accounts do not balance: a timestep was lost, repeated or swapped."""


@dataclass
class LedgerReport:
    """The report of what a ledger found.

    `accepted = normal + abnormal + cancelled + outstanding + unanswered` always holds.

    Attributes:
        accepted: actions that the manager accepted.
        normal: timesteps that were not abnormal.
        abnormal: timesteps that stand for actions whose env failed.
        cancelled: actions whose timestep `reset` or `close` gave up.
        outstanding: actions whose timestep may still come.
        unanswered: actions whose timestep never came.
        lost: unanswered actions, and steps that an env executed but that were never delivered.
        repeated: timesteps without an action, or of a step that was delivered before.
        swapped: timesteps with a part that belongs to another env, step or action.
        unchecked: timesteps whose observation has no checksum (a space without fixed layout).
        failures: the number of abnormal timesteps by the type of their error.
        findings: the first problems found, in words.
    """

    accepted: int = 0
    normal: int = 0
    abnormal: int = 0
    cancelled: int = 0
    outstanding: int = 0
    unanswered: int = 0
    lost: int = 0
    repeated: int = 0
    swapped: int = 0
    unchecked: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost, repeated or swapped."""
        return not (self.lost or self.repeated or self.swapped)

    def __str__(self) -> str:
        text = (
            f"{self.accepted} actions accepted = {self.normal} normal + {self.abnormal} abnormal + "
            f"{self.cancelled} cancelled + {self.outstanding} outstanding + {self.unanswered} "
            f"unanswered; {self.lost} lost, {self.repeated} repeated, {self.swapped} swapped"
        )
        return "\n- ".join((text, *self.findings))


@dataclass(slots=True)
class _Account:
    """What is known of one env_id.

    Attributes:
        pending: whether an action is under way.
        action: the checksum of the newest action.
        latest: the mark of the newest normal timestep.
        obs: checksum of the newest observation; UNKNOWN between episodes.
        begins: whether the next timestep is the first of an episode.
        excused: steps that may have been executed without a normal timestep, since `latest`.
        retired: instances that were replaced, and do not come back.
    """

    env_id: int
    pending: bool = False
    action: int = UNKNOWN
    latest: Mark | None = None
    obs: int = UNKNOWN
    begins: bool = True
    excused: int = 0
    retired: set[int] = field(default_factory=set)

    def end_episode(self) -> None:
        """Note that the next timestep is the first of an episode."""
        self.begins, self.obs = True, UNKNOWN


class Ledger:
    """Detector of lost, repeated, swapped and mis-joined timesteps of envs that sign them.

    The envs are `LedgerEnv`s, or any envs in a `LedgerWrapper` (`ledgered`, `Ledgered`). The ledger
    is told what happens by an `AuditedLoop`, or by a loop of your own, with `observed`, `accepted`,
    `delivered` and, when nothing more will come, `end`.

    Envs that take each other's places, as spares do, sign with `ANY_ENV`. Then an env_id has to be
    served by one object throughout an episode, and each step that is delivered has to be the next
    one of its object, never one that was delivered before.

    The ledger is not part of the manager and believes nothing that the manager says: what it knows
    comes from the marks. Each call costs a few microseconds per env.

    Args:
        env_num: number of envs.
        observation_space: observation space of one env.
        action_space: action space of one env.
    """

    def __init__(self, env_num: int, observation_space: Any, action_space: Any) -> None:
        self._accounts = [_Account(env_id) for env_id in range(env_num)]
        self._obs_checksum = checksum_of(observation_space)
        self._action_checksum = checksum_of(action_space)
        self._so_far = LedgerReport()
        self._next_action = 0
        # The newest mark of each env object; and how many steps may be missing of objects that move
        # between env_ids.
        self._latest_of: dict[int, Mark] = {}
        self._excused = 0

    # -- what it is told --------------------------------------------------------------------

    def fresh_actions(self, env_ids: Iterable[int]) -> dict[int, int]:
        """Return an action for each of these `LedgerEnv`s; actions repeat only after 2**31."""
        first = self._next_action
        actions = {env_id: (first + k) % N_ACTIONS for k, env_id in enumerate(env_ids)}
        self._next_action = first + len(actions)
        return actions

    def accepted(self, actions: Mapping[int, Any]) -> None:
        """Record that the manager has accepted these actions: its `step` or `send` returned."""
        checksum = self._action_checksum
        for env_id, action in actions.items():
            account = self._accounts[env_id]
            if account.pending:
                self._find("lost", f"env {env_id} took an action while another one was under way")
                self._so_far.unanswered += 1
            account.pending = True
            account.action = checksum(action)
        self._so_far.accepted += len(actions)

    def observed(
        self, observations: Mapping[int, Any], infos: Mapping[int, Any] | None = None
    ) -> None:
        """Check the observations that `ready_obs` shows, and remember them.

        In the middle of an episode, each has to be the observation of the env's newest timestep.

        Args:
            observations: `{env_id: obs}`.
            infos: `ready_info` of the envs that begin an episode; its marks are checked.
        """
        for env_id, obs in observations.items():
            account = self._accounts[env_id]
            obs_sum = self._obs_checksum(obs)
            if account.obs == UNKNOWN:
                account.obs = obs_sum
                mark = mark_of((infos or {}).get(env_id))
                if mark is not None and (
                    not _is_of(mark, env_id) or _differ(mark.obs, obs_sum) or mark.step
                ):
                    self._find(
                        "swapped", f"the first observation of env {env_id} is not that of {mark}"
                    )
            elif _differ(account.obs, obs_sum):
                self._find("swapped", f"ready_obs of env {env_id} is not its newest observation")
                account.obs = obs_sum

    def begins_episode(self, env_id: int) -> bool:
        """Return whether the first observation of an env's episode is yet to be recorded."""
        return self._accounts[env_id].obs == UNKNOWN

    def delivered(self, timesteps: Mapping[int, EnvTimestep]) -> None:
        """Check timesteps that the manager has delivered."""
        for env_id, timestep in timesteps.items():
            account = self._accounts[env_id]
            if not account.pending:
                self._find("repeated", f"a timestep of env {env_id}, which was given no action")
                continue
            account.pending = False
            if is_abnormal(timestep.info):
                self._take_abnormal(account, timestep)
            else:
                self._take_normal(account, timestep)

    def reset(self, env_ids: Iterable[int]) -> None:
        """Record that the manager's `reset` was called for these envs.

        The reset gives up the timesteps that are under way (they count as cancelled).
        """
        for env_id in env_ids:
            account = self._accounts[env_id]
            if account.pending:
                account.pending = False
                self._excuse(account)
                self._so_far.cancelled += 1
            account.end_episode()

    def end(self, n_cancelled: int = 0) -> None:
        """Record that nothing more will come: the manager is closed, or has nothing outstanding.

        Args:
            n_cancelled: how many actions `close` gave up; all others under way are lost.
        """
        left = [account for account in self._accounts if account.pending]
        for account in left:
            account.pending = False
        self._so_far.cancelled += min(n_cancelled, len(left))
        for account in left[n_cancelled:]:
            self._so_far.unanswered += 1
            self._find("lost", f"the action of env {account.env_id} was never answered")

    # -- what it says -----------------------------------------------------------------------

    @property
    def pending(self) -> list[int]:
        """The envs with an action under way, in ascending order."""
        return [account.env_id for account in self._accounts if account.pending]

    @property
    def n_accepted(self) -> int:
        """How many actions were accepted."""
        return self._so_far.accepted

    def report(self) -> LedgerReport:
        """Return the accounts as they are now."""
        report = copy.deepcopy(self._so_far)
        report.outstanding = len(self.pending)
        return report

    def check(self) -> LedgerReport:
        """Return the report if nothing was lost, repeated or swapped.

        Raises:
            LedgerError: a timestep was lost, repeated or swapped.
        """
        report = self.report()
        if not report.is_clean:
            raise LedgerError(f"the accounts do not balance: {report}")
        return report

    # -- one timestep -----------------------------------------------------------------------

    def _take_abnormal(self, account: _Account, timestep: EnvTimestep) -> None:
        self._so_far.abnormal += 1
        error = error_of(timestep.info)
        self._so_far.failures["unknown" if error is None else type(error).__name__] += 1
        if _differ(account.obs, self._obs_checksum(timestep.obs)):
            self._find(
                "swapped",
                f"the abnormal timestep of env {account.env_id} does not hold its last observation",
            )
        self._excuse(account)
        account.end_episode()

    def _excuse(self, account: _Account) -> None:
        """Note that a step may have been executed whose timestep nobody is given."""
        account.excused += 1
        self._excused += 1

    def _take_normal(self, account: _Account, timestep: EnvTimestep) -> None:
        self._so_far.normal += 1
        obs_sum = self._obs_checksum(timestep.obs)
        mark = mark_of(timestep.info)
        if mark is None:
            self._find("swapped", f"a timestep of env {account.env_id} without a mark")
        else:
            self._check_mark(account, mark, obs_sum, reward_checksum(timestep.reward))
        self._so_far.unchecked += obs_sum == UNKNOWN
        account.begins = timestep.done
        account.obs = UNKNOWN if timestep.done else obs_sum

    def _check_mark(self, account: _Account, mark: Mark, obs: int, reward: int) -> None:
        env_id, latest = account.env_id, account.latest
        before = self._latest_of.get(mark.instance)
        if not _is_of(mark, env_id):
            self._find("swapped", f"env {env_id} was given a timestep of env {mark.env_id}: {mark}")
            return
        if mark.instance in account.retired or (
            before is not None and mark.sequence <= before.sequence
        ):
            self._find("repeated", f"env {env_id}: {mark} comes after {before or latest}")
            return
        wrong = [
            name
            for name, said, found in (
                ("action", mark.action, account.action),
                ("obs", mark.obs, obs),
                ("reward", mark.reward, reward),
            )
            if _differ(said, found)
        ]
        if wrong:
            self._find("swapped", f"env {env_id}: {', '.join(wrong)} of another step than {mark}")
        else:
            self._check_sequence(account, mark, before)
        if latest is not None and latest.instance != mark.instance and mark.env_id != ANY_ENV:
            account.retired.add(latest.instance)
        account.latest = self._latest_of[mark.instance] = mark
        account.excused = 0

    def _check_sequence(self, account: _Account, mark: Mark, before: Mark | None) -> None:
        """Compare a mark with the one before it of the same env object, if there was one."""
        missing = self._missing(account, mark, 0 if before is None else before.sequence)
        if missing > 0:
            self._find("lost", f"env {account.env_id}: {missing} steps before {mark}", missing)
        goes_on = account.latest is not None and account.latest.instance == mark.instance
        if not account.begins and not goes_on:
            text = f"env {account.env_id}: another object in the midst of an episode: {mark}"
            self._find("swapped", text)
            return
        expected = 1 if account.begins or before is None else before.step + 1
        if mark.step != expected and missing <= 0:
            text = f"env {account.env_id}: step {expected} of its episode was due, not {mark}"
            self._find("swapped", text)

    def _missing(self, account: _Account, mark: Mark, n_before: int) -> int:
        """Return how many steps of an env object nobody was given, beyond those excused."""
        missing = mark.sequence - n_before - 1
        if mark.env_id != ANY_ENV:
            return missing - account.excused
        excused = min(missing, self._excused)  # by whomever: nobody can say whose steps they were
        self._excused -= excused
        return missing - excused

    def _find(self, what: str, text: str, n: int = 1) -> None:
        so_far = self._so_far
        setattr(so_far, what, getattr(so_far, what) + n)
        if len(so_far.findings) < _KEPT_FINDINGS:
            so_far.findings.append(f"{what}: {text}")


def _is_of(mark: Mark, env_id: int) -> bool:
    return mark.env_id in (env_id, ANY_ENV)


def _differ(one: int, other: int) -> bool:
    return one != other and one != UNKNOWN and other != UNKNOWN
