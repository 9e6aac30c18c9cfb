"""The collector of records: runs a policy for steps or for episodes, and keeps no observations."""

from __future__ import annotations

from envmgr.collect.loop import CollectLoop
from envmgr.collect.records import EpisodeRecord


class Collector(CollectLoop):
    """A loop that runs a policy on a manager's envs, and accounts for every timestep delivered.

    Every timestep of a collection belongs to an episode that ended (`EpisodeRecord.length`) or to
    an unfinished one (`unfinished`); none is counted twice or left out. Whatever ends a collection,
    even an exception or Ctrl-C, `statistics` and `episodes` hold what was collected before, and the
    next `iterate` or `collect` continues from there.

    `steps` of a collection is exact: no more actions are sent than that. So is `episodes`: the
    collection consists of the first episodes to begin, not of the first ones to end, which would be
    the short ones and give a biased mean return. The price is that envs idle while the last
    episodes finish, even in the middle of an episode that an earlier collection began. An abnormal
    episode is replaced by another one. More episodes than requested can end only in steps that an
    interrupted collection left under way, and where envs are stepped together (rows of a batched
    env), as stepping one of them means stepping all.

    A collector expects every episode to begin and continue through it: after you have called the
    manager's `reset` yourself, create a new collector.

    Args:
        manager: a launched manager of any kind. The collector does not close it.
        policy: `{env_id: obs} -> {env_id: action}`; None for random actions derived from the
            manager's seed. See `envmgr.collect.policies` for what else a policy may return, and for
            policies with states.
        on_episode: called with the record of each episode that ended, in order. If a call raises,
            the next collection repeats it with the same record.
        keep_episodes: whether `episodes` keeps all records; turn it off for endless runs.
        clock: returns monotonic seconds.
        loop: reads observations and steps the envs; None for a `ManagerLoop` of the manager.
        statistics: the statistics of an earlier collection to continue from; not changed.

    Attributes:
        manager: the manager.
        policy: the policy.
        episodes: the records of the episodes that ended, if they are kept.
    """

    def collect(
        self, *, steps: int | None = None, episodes: int | None = None
    ) -> list[EpisodeRecord]:
        """Collect, and return the records of the episodes that ended during the collection.

        The arguments, the order and the errors are those of `iterate`.
        """
        ended: list[EpisodeRecord] = []
        for _ in self.iterate(steps=steps, episodes=episodes, into=ended):
            pass
        return ended
