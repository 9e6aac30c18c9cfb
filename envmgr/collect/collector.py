"""The collector of records: runs a policy for steps or for episodes, and keeps no observations."""

from __future__ import annotations

from envmgr.collect.loop import CollectLoop
from envmgr.collect.records import EpisodeRecord


class Collector(CollectLoop):
    """Runs a policy on the envs of a manager, and accounts for every timestep that it delivers.

    The timesteps of a collection are those of the episodes that ended (`EpisodeRecord.length`) and
    of the unfinished ones (`unfinished`), none is counted twice or left out. Whatever ends a
    collection, an exception or Ctrl-C too, `statistics` and `episodes` hold what was collected
    before, and the next `iterate` or `collect` goes on from there.

    `steps` of a collection is exact: no more actions are sent than that. So is `episodes`: they are
    the first ones to begin, not the first ones to end, since those would be the short ones, and
    their mean return would be biased. The price is that envs idle while the last episodes end, also
    in the middle of an episode that an earlier collection has begun. An abnormal episode is
    replaced by another one. Only steps that an interrupted collection has left under way may end
    more episodes than that, and envs that are stepped together (rows of a batched env): where one
    of them is to be stepped, all are.

    A collector expects every episode to begin and go on through it: after a `reset` of the manager
    by hand, make a new one.

    Args:
        manager: launched; of any kind. It is not closed here.
        policy: `{env_id: obs} -> {env_id: action}`; None for random actions that follow from the
            manager's seed. See `envmgr.collect.policies` for what else it may return, and for
            policies with states.
        on_episode: called with the record of each episode that ended, in order. Who has not
            returned, as it raised, is called with it again by the next collection.
        keep_episodes: whether `episodes` keeps all records; off for runs without end.
        clock: monotonic seconds.
        loop: reads observations and steps; None for a `ManagerLoop` of the manager.
        statistics: of an earlier collection that this one goes on with; not changed.

    Attributes:
        manager: the manager.
        policy: the policy.
        episodes: the records of the episodes that ended, if they are kept.
    """

    def collect(
        self, *, steps: int | None = None, episodes: int | None = None
    ) -> list[EpisodeRecord]:
        """Collect, and return the records of the episodes that ended meanwhile.

        The arguments, the order and the errors are those of `iterate`.
        """
        ended: list[EpisodeRecord] = []
        for _ in self.iterate(steps=steps, episodes=episodes, into=ended):
            pass
        return ended
