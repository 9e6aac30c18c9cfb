"""The accounts of the episodes that a rollout collector has seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr.collect.records import EpisodeRecord, as_return
from envmgr.collect.rollout_arrays import Ends, Ints, RolloutArrays
from envmgr.collect.statistics import CollectStatistics


class Tally(NamedTuple):
    """Where the episodes under way began, and what was collected before; never changed in place.

    Attributes:
        begins: (n,): the step of this rollout that is the first of each env's episode; 0 if it
            began earlier.
        returns: (n, ...): what the episodes had given before this rollout.
        earlier: (n,): how many steps they had had.
        began_s: (n,): when they began, on the clock.
        n_ended: (n,): how many have ended.
        statistics: of what was collected before this rollout, and of all episodes that ended.
    """

    begins: Ints
    returns: npt.NDArray[Any]
    earlier: Ints
    began_s: npt.NDArray[np.float64]
    n_ended: Ints
    statistics: CollectStatistics

    @classmethod
    def of(cls, n: int, now: float, statistics: CollectStatistics) -> Tally:
        """Return the tally of n envs whose episodes begin now."""
        nothing = np.zeros(n, np.int64)
        return cls(nothing, np.zeros(n), nothing, np.full(n, now), nothing, statistics)

    def after(self, rollout: RolloutArrays, steps: int) -> Tally:
        """Return the tally with which the next rollout begins.

        Args:
            rollout: the one that is complete.
            steps: how many there are in it.
        """
        statistics = self.statistics.copied()
        statistics.steps += steps
        returns, lengths = self.returns, rollout.lengths
        if rollout.rewards is not None:
            given = _summed(rollout.rewards, self.begins, lengths)
            returns = given if returns.shape != given.shape else returns + given
        nothing = np.zeros_like(self.begins)
        earlier = self.earlier + lengths - self.begins
        return Tally(nothing, returns, earlier, self.began_s, self.n_ended, statistics)

    def ended(
        self,
        rollout: RolloutArrays,
        ends: Ends,
        failures: Mapping[int, str],
        seeds: Mapping[int, int | None],
        now: float,
        elapsed_s: float,
    ) -> tuple[Tally, list[EpisodeRecord]]:
        """Return the tally after ends of episodes, and the records of these.

        Args:
            rollout: holds the steps up to their ends.
            ends: which.
            failures: those that were no ordinary ends, by env_id.
            seeds: of all envs.
            now: on the clock.
            elapsed_s: seconds of the collection so far.
        """
        begins, returns, earlier, began_s, n_ended = (column.copy() for column in self[:5])
        statistics = self.statistics.copied()
        records = []
        for step, i in zip(ends.steps.tolist(), ends.env_ids.tolist(), strict=True):
            begin = int(self.begins[i])
            given = rollout.rewards[begin : step + 1, i].sum(axis=0)
            carried = self.returns[i] if self.earlier[i] else 0.0
            failure = failures.get(i)
            record = EpisodeRecord(
                number=statistics.n_ended,
                env_id=i,
                nth=int(self.n_ended[i]),
                seed=seeds.get(i),
                generation=None,
                episode_return=as_return(given + carried),
                length=int(self.earlier[i]) + step + 1 - begin,
                terminated=bool(rollout.terminated[step, i]),
                truncated=bool(rollout.truncated[step, i]),
                abnormal=failure is not None,
                failure=failure,
                duration_s=now - float(self.began_s[i]),
                ended_s=elapsed_s,
            )
            statistics.add(record)
            records.append(record)
        begins[ends.env_ids] = ends.steps + 1
        earlier[ends.env_ids] = 0
        returns[ends.env_ids] = 0.0
        began_s[ends.env_ids] = now
        n_ended[ends.env_ids] += 1
        return Tally(begins, returns, earlier, began_s, n_ended, statistics), records


def _summed(rewards: npt.NDArray[Any], begins: Ints, ends: Ints) -> npt.NDArray[Any]:
    """Return (n, ...): the sums of `rewards[begins[i]:ends[i], i]`."""
    if not begins.any() and (ends == len(rewards)).all():
        total: npt.NDArray[Any] = rewards.sum(axis=0)
        return total
    t = np.arange(len(rewards))[:, None]
    counts = (t >= begins) & (t < ends)
    summed: npt.NDArray[Any] = rewards.sum(
        axis=0, where=counts.reshape(*counts.shape, *(1,) * (rewards.ndim - 2))
    )
    return summed
