"""The episode log: a file with a line of JSON for each episode that ended, and for each failure.

A line is appended with one write, so readers and other writers never see a part of one. It says
what has become of an episode, and nothing of what was done in it: neither actions nor options, and
no texts of failures, which may quote them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import stat
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envmgr.config.paths import BEGINNING_OF_LINES
from envmgr.core import ArrayBatch, EnvTable
from envmgr.core.call_journal import Fate
from envmgr.errors import ConfigError, EnvCrash, EnvFailure, EnvRaised, EnvTimeout
from envmgr.outcomes import Outcome, OutcomeStatus, failure_in, status_of, summed
from envmgr.texts import logged
from envmgr.types import Clock, EnvTimestep, is_abnormal, monotonic

_MOST_OF_A_NAME = 200
"""How many characters of an exception's class name are written: envs choose that name."""


class _Accounts(NamedTuple):
    """What is known of the episodes that calls for batches have under way; replaced as a whole.

    Attributes:
        returns: the sum of rewards by env_id; None before the first.
        lengths: number of timesteps by env_id.
        counted: envs whose next timestep was counted already, and is handed out once more.
        taken: what is to become of the latest timesteps, and which envs they are of.
        lines: what is to be written; empty once it was written.
        n_bytes: number of bytes in `lines`.
    """

    returns: list[Any]
    lengths: list[int]
    counted: frozenset[int]
    taken: tuple[Fate | None, Sequence[int]]
    lines: list[bytes]
    n_bytes: int


class EpisodeLog:
    """The writer that appends to the file of `episode_log`.

    Calls for batches tell it what they send and hand out; whoever has the engine tells it of
    failures and of the episodes of leases. A timestep that an interrupted call hands out once more
    is counted once.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, path: str, env_num: int, clock: Clock = monotonic) -> None:
        self._path = path
        self._env_num = env_num
        self._clock = clock
        self._fd: int | None = None
        self._closing: Any = None
        self._is_torn = self._has_failed = False
        self._written: list[int] = []
        self._begin()

    def _begin(self) -> None:
        n = self._env_num
        # Of each env's episode: its number, the env's generation at its begin, and when that was.
        self._episodes, self._generations = [-1] * n, [0] * n
        self._began_s = [self._clock()] * n
        self._accounts = _Accounts([None] * n, [0] * n, frozenset(), (None, ()), [], 0)

    def open(self) -> None:
        """Open the file for a launch.

        Raises:
            ConfigError: it cannot be written, or is not a regular file.
        """
        if self._fd is not None:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:  # a pipe that nobody reads is refused rather than waited for
            fd = os.open(self._path, flags | os.O_NONBLOCK, 0o666)
        except (OSError, ValueError) as error:  # ValueError: a NUL
            raise self._refused(str(error)) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise self._refused("it is no file")
        self._closing = weakref.finalize(self, os.close, fd)
        self._is_torn = self._has_failed = False
        self._begin()
        self._fd = fd

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"manager.episode_log is {self._path!r}, which cannot be appended to: {why}. Name "
            "another file, in a folder that is there."
        )

    def close(self) -> None:
        """Close the file; nothing is written from then on."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._flush()
            self._fd = None
            self._closing()

    # -- calls for batches ----------------------------------------------------------------------

    def sent(self, table: EnvTable, env_ids: Iterable[int]) -> None:
        """Note that a call for batches has sent actions to these envs."""
        episodes, known = table.episodes, self._episodes
        begun = [i for i in env_ids if episodes[i] != known[i]]
        if not begun:
            return
        now, accounts = self._clock(), self._settled()
        returns, lengths = accounts.returns.copy(), accounts.lengths.copy()
        for env_id in begun:
            returns[env_id], lengths[env_id] = None, 0
            self._generations[env_id] = table.envs[env_id].generation
            self._began_s[env_id] = now
        counted = accounts.counted.difference(begun)
        self._accounts = accounts._replace(returns=returns, lengths=lengths, counted=counted)
        for env_id in begun:
            known[env_id] = episodes[env_id]

    def timesteps(self, timesteps: Mapping[int, EnvTimestep], fate: Fate | None) -> None:
        """Note that these timesteps are handed out.

        Args:
            timesteps: by env_id.
            fate: what is to become of them, once that is known.
        """
        ended = {i: step.info for i, step in timesteps.items() if step.done}
        for env_id, step in timesteps.items():
            if is_abnormal(step.info):
                ended[env_id] = step.info
        rewards = [step.reward for step in timesteps.values()]
        self._count(list(timesteps), rewards, ended, fate)

    def batch(self, batch: ArrayBatch, fate: Fate | None) -> None:
        """Do the same as `timesteps`, with arrays."""
        ids, reward = batch.env_ids.tolist(), batch.reward
        ended: dict[int, Any] = {env_id: {} for env_id in batch.ended.tolist()}
        for k in batch.abnormal:
            ended[ids[k]] = batch.infos[k]
        rewards = reward.tolist() if reward.ndim == 1 else list(reward.copy())
        self._count(ids, rewards, ended, fate)

    def owed(self, env_ids: Iterable[int]) -> None:
        """Note that timesteps of these envs that were handed out will be handed out again."""
        accounts = self._settled()
        self._accounts = accounts._replace(counted=accounts.counted.union(env_ids))

    def _count(
        self, ids: list[int], rewards: list[Any], ended: Mapping[int, Any], fate: Fate | None
    ) -> None:
        accounts = self._settled()
        returns, lengths = accounts.returns.copy(), accounts.lengths.copy()
        counted = accounts.counted
        for env_id, reward in zip(ids, rewards, strict=True):
            if env_id not in counted:
                lengths[env_id] += 1
                total = returns[env_id]
                returns[env_id] = reward if total is None else summed(total, reward)
        lines = []
        for env_id, info in ended.items():
            if env_id not in counted:
                lines.append(self._line_of(env_id, info, returns[env_id], lengths[env_id]))
                returns[env_id], lengths[env_id] = None, 0
        data = [b"".join(lines)] if lines else []
        n_bytes = sum(map(len, data))
        left = counted.difference(ids) if counted else counted
        self._accounts = _Accounts(returns, lengths, left, (fate, ids), data, n_bytes)
        if data:
            self._flush()

    def _settled(self) -> _Accounts:
        """Return the accounts, updated with what has become of the latest timesteps."""
        self._flush()
        accounts = self._accounts
        fate, ids = accounts.taken
        if fate is not None and fate.given_back:
            counted = accounts.counted.union(ids)
            self._accounts = accounts = accounts._replace(counted=counted, taken=(None, ()))
        return accounts

    def _line_of(self, env_id: int, info: Any, total: Any, length: int) -> bytes:
        """Return the line of an episode that has ended with this info."""
        now, cause = self._clock(), failure_in(info)
        # If a step failed before it was sent, its failure is one of something other than a step.
        status = status_of(cause, was_sent=cause is None or cause.during == "step")
        if cause is None and is_abnormal(info):
            status = OutcomeStatus.FAILED
        outcome = Outcome(
            status=status,
            during="episode",
            env_id=env_id,
            generation=self._generations[env_id] if cause is None else cause.generation,
            attempt=0,
            began_s=min(self._began_s[env_id], now),
            ended_s=now,
            reward=total if status is OutcomeStatus.COMPLETED else None,
            cause=cause,
        )
        return _line("episode", outcome, length=length, attempt=None)

    # -- whoever has the engine -----------------------------------------------------------------

    def episode(self, outcome: Outcome, length: int) -> None:
        """Note that an episode of a lease has ended.

        Args:
            outcome: the outcome of the episode.
            length: its number of timesteps.
        """
        self._write(_line("episode", outcome, length=length, attempt=outcome.attempt))

    def failed(self, failure: EnvFailure) -> None:
        """Note that an env, or a spare, has failed."""
        outcome = Outcome(
            status=status_of(failure),
            during=failure.during,
            env_id=failure.env_id,
            generation=failure.generation,
            attempt=0,
            began_s=0.0,
            ended_s=0.0,
            cause=failure,
        )
        self._write(_line("failure", outcome, length=None, attempt=None))

    # -- writing --------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Write the lines of a call for batches.

        They are taken and written in one go: an interrupt comes before both or after both.
        """
        accounts, fd, written = self._accounts, self._fd, self._written
        if not accounts.lines or fd is None:
            return
        written.clear()
        try:
            self._mend(fd)
            written.extend(map(os.write, (fd,), map(list.pop, (accounts.lines,))))
        except OSError as error:
            accounts.lines.clear()
            self._failed(error)
            return
        self._look_at(written[0], accounts.n_bytes)

    def _write(self, line: bytes) -> None:
        fd = self._fd
        if fd is None:
            return
        try:
            self._mend(fd)
            self._look_at(os.write(fd, line), len(line))
        except OSError as error:
            self._failed(error)

    def _mend(self, fd: int) -> None:
        """End a line that was only written in part; if that fails, no other line follows it."""
        if self._is_torn:
            os.write(fd, b"\n")
            self._is_torn = False

    def _look_at(self, n_written: int, n_bytes: int) -> None:
        if n_written != n_bytes:
            self._is_torn = True
            self._failed(OSError(f"{n_written} of {n_bytes} bytes were written"))

    def _failed(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            logged(
                logging.ERROR,
                "lines are missing in the episode log %r: %s. Make room for it; the run goes on.",
                self._path,
                error,
            )


def _line(what: str, outcome: Outcome, *, length: int | None, attempt: int | None) -> bytes:
    """Return a line; it begins as `check_log` wants it."""
    cause, is_episode = outcome.cause, what == "episode"
    raised = cause.type_name[:_MOST_OF_A_NAME] if isinstance(cause, EnvRaised) else None
    said = {
        "what": what,
        "time": round(time.time(), 6),
        "env_id": outcome.env_id,
        "generation": outcome.generation,
        "attempt": attempt,
        "during": getattr(cause, "during", None),
        "outcome": outcome.status.value,
        "cause": None if cause is None else type(cause).__name__,
        "raised": raised,
        "exit_status": cause.exit_status if isinstance(cause, EnvCrash) else None,
        "limit_s": plain(cause.limit_s) if isinstance(cause, EnvTimeout) else None,
        "return": plain(outcome.reward),
        "length": length,
        "seconds": round(outcome.seconds, 6) if is_episode else None,
    }
    text = json.dumps(said, allow_nan=False, separators=(",", ":"))
    return BEGINNING_OF_LINES + text[1:].encode() + b"\n"


def plain(reward: Any) -> Any:
    """Return a return as JSON can hold it: numbers, lists and mappings of them; else None."""
    if isinstance(reward, Mapping):
        return {str(name): plain(one) for name, one in reward.items()}
    if isinstance(reward, (list, tuple)):
        return [plain(one) for one in reward]
    if isinstance(reward, (np.ndarray, np.generic)) and reward.dtype.kind in "biuf":
        return plain(reward.tolist())
    if isinstance(reward, (bool, int, float)):
        number = float(reward)
        return number if math.isfinite(number) else None
    return None
