"""Spares: envs that are kept reset, and take the place of those whose episodes end or hosts die.

A spare is an env like any other, in a host of its own, behind an id that nobody sees: env_num and
those that follow. Its host keeps the result of its reset. When it takes the place of an env, the
two exchange their hosts: the spare's host is told to ADOPT the env_id, and it answers with the
reset that it has kept, or as soon as that is done; the env's host is told to ADOPT the spare's id,
and the reset takes place there. So to everybody else the env is being reset, only not for long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from envmgr import pickles
from envmgr.core.hosts import Hosts
from envmgr.core.phases import Change, Next, Phase
from envmgr.core.setup import EnvSetup
from envmgr.core.statistics import Statistics
from envmgr.core.table import NEVER, ManagedEnv
from envmgr.lifecycle import EnvState, Event
from envmgr.texts import logged
from envmgr.types import EnvFactory
from envmgr.wire.messages import UNANSWERED, Op

NO_SPARES = {"spare_env_num": 0, "spares_ready": 0}
"""The figures of a manager that has no spares."""


class Spares:
    """The spares of a manager, and which of them is next.

    Their order is that of their latest resets, whether these are over or not. So which of them
    takes the place of which env does not depend on how long a reset takes.

    Args:
        hosts: to exchange hosts.
        statistics: where they are counted.
        setup: knows what envs were told, and where their observations go.
        takers: by env_id: whether the env was built by the function that builds spares.
        in_order: whether envs whose steps are under way together get their successors together, by
            ascending env_id, when all these steps are over. Else each gets its successor as soon as
            its episode ends; leased envs do in any case.

    Attributes:
        envs: the spares.
    """

    def __init__(
        self,
        hosts: Hosts,
        statistics: Statistics,
        setup: EnvSetup,
        takers: tuple[bool, ...],
        *,
        in_order: bool,
    ) -> None:
        self.envs = hosts.envs[hosts.env_num :]
        self._hosts = hosts
        self._states = hosts.table.states
        self._statistics = statistics
        self._setup = setup
        self._takers = takers
        self._in_order = in_order
        self._queue: list[ManagedEnv] = []
        # By env_id: what is done with an ended env, in its own place or in that of its successor.
        self._waiting: dict[int, Callable[[ManagedEnv], None]] = {}

    # -- spares -----------------------------------------------------------------------------

    def is_ready(self, spare: ManagedEnv) -> bool:
        """Return whether a spare has been reset."""
        return (
            spare.phase is Phase.IDLE
            and spare.host_id is not None
            and self._states[spare.env_id] is EnvState.RESET
        )

    def figures(self) -> dict[str, int]:
        """Return how many spares there are, and how many of them are ready; from any thread."""
        kept = [spare for spare in self.envs if not spare.dropped]
        return {"spare_env_num": len(kept), "spares_ready": sum(map(self.is_ready, kept))}

    def reset_begins(self, env: ManagedEnv) -> None:
        """Note that the reset of an env, or of a spare, begins."""
        self._waiting.pop(env.env_id, None)
        if env.is_spare:
            if env in self._queue:
                self._queue.remove(env)
            self._queue.append(env)

    def reset_succeeded(self, spare: ManagedEnv) -> None:
        """Note that the reset of a spare has succeeded."""
        spare.renewals_in_a_row = 0
        self._use_up(spare)

    def _use_up(self, spare: ManagedEnv) -> None:
        """Clear what was meant for a spare's reset, which is over, or is another env's now."""
        spare.attempts = 0
        spare.episode += 1
        spare.seed = None
        spare.new_generation = False
        self._hosts.settle(spare)

    def reseed(self, begin: Callable[[ManagedEnv], None]) -> None:
        """Reset the spares that were given a seed which has not been used yet."""
        for spare in self.envs:
            if spare.new_seed is None or spare.dropped:
                continue
            spare.seed, spare.new_seed = spare.new_seed, None
            spare.base_seed = spare.seed
            if self.is_ready(spare):
                begin(spare)
            elif spare.phase is Phase.RESETTING:
                self._reset_again(spare, begin)

    def _reset_again(self, spare: ManagedEnv, begin: Callable[[ManagedEnv], None]) -> None:
        """Have a spare reset once more after the reset that is under way."""
        spare.group.obsolete_requests.add(spare.request_id)
        before, limit_s = spare.deadline, spare.limit_s
        begin(spare)
        if limit_s != NEVER:  # its limit counts from the end of that reset's
            self._hosts.limits.set_until(spare, before + limit_s, limit_s)

    # -- who takes whose place --------------------------------------------------------------

    def ended(self, env: ManagedEnv, then: Callable[[ManagedEnv], None]) -> None:
        """Have a spare take the place of an env whose episode is over, if one can.

        Args:
            env: the env, whose host is well.
            then: what is done next: called with the env, or with the spare that took its place.
        """
        self._hosts.settle(env)
        self._waiting[env.env_id] = then
        if not self._in_order or env.env_id in self._hosts.table.leased:
            self._replace_ended(env)

    def failed(self, env: ManagedEnv) -> None:
        """Have an env that has failed wait for no successor: it is repaired instead."""
        self._waiting.pop(env.env_id, None)

    @property
    def are_wanted(self) -> bool:
        """Whether an env waits for its successor."""
        return bool(self._waiting)

    def look(self) -> None:
        """Give ended envs their successors, if no step is under way any more."""
        if self._waiting and not self._hosts.table.is_executing:
            self.replace_ended()

    def replace_ended(self) -> None:
        """Give ended envs their successors, by ascending env_id."""
        for env_id in sorted(self._waiting):
            self._replace_ended(self._hosts.envs[env_id])

    def _replace_ended(self, env: ManagedEnv) -> None:
        then = self._waiting.get(env.env_id)
        if then is not None and env.phase is Phase.IDLE:
            spare = self._successor_of(env)
            if spare is None:
                then(env)
            else:
                self._replace(spare, env)
                self._hosts.tell(spare, Op.ADOPT, None)
                then(spare)
        self._waiting.pop(env.env_id, None)

    def take_over(self, env: ManagedEnv) -> ManagedEnv:
        """Have a spare take the place of an env whose host is gone, or ends well.

        Returns:
            The one that has this host now, which is to be replaced: the spare, or the env itself if
            there is no spare for it.
        """
        spare = None if env.is_spare or not env.attended else self._successor_of(env)
        if spare is None:
            return env
        pause_s = env.pause_s
        env.generation += 1
        env.renewals_in_a_row += 1
        env.follow_up = Next.NOTHING
        self._replace(spare, env)
        self._hosts.leave(spare, Next.RENEW_HOST, pause_s)
        return spare

    def _successor_of(self, env: ManagedEnv) -> ManagedEnv | None:
        """Return the spare whose turn it is, if it may take the place of an env."""
        if env.reset_params or env.seed is not None or not self._takers[env.env_id]:
            return None
        spare = next((spare for spare in self._queue if self._can_come(spare)), None)
        if spare is None or not self._setup.are_alike(env.env_id, spare.env_id):
            return None
        return spare

    def _can_come(self, spare: ManagedEnv) -> bool:
        if spare.host_id is None or spare.group.is_ending:
            return False
        if spare.phase is Phase.RESETTING:  # which may be about to fail, or to be another host's
            return spare.request_id not in (spare.cancelled, spare.left_with)
        return self.is_ready(spare)

    def _replace(self, spare: ManagedEnv, env: ManagedEnv) -> None:
        """Exchange the hosts of a spare and an env, and await the reset of the spare there."""
        under_way = spare.phase is Phase.RESETTING
        deadline, limit_s = spare.deadline, spare.limit_s
        self._exchange(env, spare)
        if under_way:
            self._use_up(spare)
        self._queue.remove(spare)
        self._waiting.pop(env.env_id, None)
        self._statistics.swaps += 1
        self._statistics.has_generations = True
        env.again = env.waits = env.leaves = False
        if env.failed_while_ready is None:
            self._hosts.table.happened(env.env_id, Event.BEGIN_RESET)
        placement = self._setup.placement_of(env)
        self._hosts.request(env, Op.ADOPT, placement, Change.RESET)
        if under_way:
            self._hosts.limits.set_until(env, deadline, limit_s)

    def _exchange(self, env: ManagedEnv, spare: ManagedEnv) -> None:
        """Exchange the places of an env and a spare, each of which has a host to itself.

        The caller tells their hosts with ADOPT, and settles what is under way in them.
        """
        ours, theirs = env.group, spare.group
        for group, before in ((ours, env), (theirs, spare)):
            group.obsolete_requests.update((before.request_id, UNANSWERED))
        ours.serve((spare,))
        theirs.serve((env,))
        env.host_id, spare.host_id = spare.host_id, env.host_id
        env.has_plan = spare.has_plan = False
        self._hosts.table.index_of[env.env_id] = theirs.index
        self._hosts.table.moves += 1


def all_factories(factories: Sequence[EnvFactory], spare_num: int) -> list[EnvFactory]:
    """Return the factories of all envs, and then of the spares."""
    return [*factories, *([spare_factory(factories)] * spare_num if spare_num else [])]


def spare_factory(factories: Sequence[EnvFactory]) -> EnvFactory:
    """Return the factory that builds the spares: that of most envs; of several, the first."""
    kinds = _kinds_of(factories)
    return factories[kinds.index(max(kinds, key=kinds.count))]


def takers_of(factories: Sequence[EnvFactory], spare: EnvFactory) -> tuple[bool, ...]:
    """Return, for each env, whether it is built as the spares are."""
    kind, *kinds = _kinds_of([spare, *factories])
    alone = [env_id for env_id, other in enumerate(kinds) if other != kind]
    if alone:
        logged(
            logging.WARNING,
            "envs %s take no spare: their env_fn is another than that of the spares. Give all envs "
            "one function, as in env_fn=[make_env] * n",
            alone,
        )
    return tuple(other == kind for other in kinds)


def _kinds_of(factories: Sequence[EnvFactory]) -> list[Any]:
    """Return keys of factories, equal if they build the same env: one object, or equal pickles."""
    known: dict[int, Any] = {}
    for factory in factories:
        if id(factory) not in known:
            try:
                known[id(factory)] = pickles.dumps(factory)
            except Exception:  # whatever a __reduce__ may raise: with `fork` it need not be sent
                known[id(factory)] = id(factory)
    return [known[id(factory)] for factory in factories]
