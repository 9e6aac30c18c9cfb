"""Lanes: envs in their ordinary course, stepped through the shared block and in batches.

An env is in its lane while nothing about it needs a decision: it is ready, or takes a step. Then a
few columns say all there is to say about it, and a batch of steps costs a few array operations.
Whatever is out of the ordinary (a failure, a message, a deadline, a call, an explicit reset) takes
the env out of its lane first: what the columns say is written into its `EnvSlot`, and everything
goes on there, env by env. It comes back when it is ready again.

So an env's slot is right while the env is out of its lane, and its lane while it is in it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmgr.core.arrivals import Arrivals
from envmgr.core.delivery import Delivery, Ending, Hand
from envmgr.core.episodes import Episodes
from envmgr.core.hosts import Hosts
from envmgr.core.observed import Observed
from envmgr.core.replies import (
    PLAIN_END,
    PLAIN_END_BITS,
    BlockReplies,
    after_of,
    resets_after,
)
from envmgr.core.selection import (
    IDLE,
    OUT,
    RESETTING,
    STEPPING,
    Selection,
    Window,
)
from envmgr.core.slots import NEVER, EnvSlot, HostGroup, Work
from envmgr.core.stats import Statistics
from envmgr.core.strays import Strays
from envmgr.core.taken import Taken
from envmgr.lifecycle import EnvState, StateTable
from envmgr.spaces import ActionColumns, Array, ValueMismatchError
from envmgr.transport.base import Arrival, HostDied
from envmgr.wire.block import (
    DONE,
    HAS_INFO,
    NO_TOKEN,
    NUMPY_VALUES,
    ORDINARY_BITS,
    PLACE_BITS,
    PYTHON_NUMBERS,
    RING_LAST,
    RING_MASK,
    TOKEN_BYTES,
    TOLD_BIT,
    Block,
    fence,
    items,
    posting_of,
    request_of,
    token_of,
)
from envmgr.wire.messages import Message, Op

_KNOWN_SELECTIONS = 256
_MANY = 4
"""Of so many envs at least one has to be ready for a look at each of them to cost less."""
_ALL_IDLE, _ALL_STEPPING = {IDLE}, {STEPPING}


def _awaits_nothing(env_id: int, flag: int) -> bool:
    """Return whether a step is complete only with a reset, where none is."""
    return False


_PLAIN_SEQUENCES = frozenset((dict, list, tuple, type({}.keys())))
"""What can be read without running code of its own, and comes to an end."""


class Lanes:
    """The envs that are in their lanes.

    Args:
        block: the columns.
        actions: packs actions, whose space has a fixed layout.
        observed: the arenas of observations, and what of them is handed out.
        slots: of all envs.
        states: of all envs.
        hosts: rings their doorbells.
        statistics: where steps are counted.
        episodes: ends them.
        arrivals: applies what is out of the ordinary.
        delivery: keeps what is handed out.
        reset_inplace: a step that ends an episode is complete with the next one's beginning.

    Attributes:
        any_shared: whether a host serves several envs.
    """

    def __init__(
        self,
        block: Block,
        actions: ActionColumns,
        observed: Observed,
        slots: Sequence[EnvSlot],
        states: StateTable,
        hosts: Hosts,
        statistics: Statistics,
        episodes: Episodes,
        arrivals: Arrivals,
        delivery: Delivery,
        *,
        reset_inplace: bool,
    ) -> None:
        n = len(slots)
        self.actions = actions
        self.observed = observed
        self._slots = slots
        self._states = states
        self._hosts = hosts
        self._statistics = statistics
        self._episodes = episodes
        self._delivery = delivery
        self._reset_inplace = reset_inplace
        self._lane = bytearray(n)
        self._all_idle = bytes([IDLE]) * n
        self.any_shared = any(group.is_shared for group in hosts.groups)
        hosts.look = self._look
        arrivals.take_out = self._take_out
        self._bases = np.zeros(n, dtype=np.uint64)
        # The base of all envs, as long as none has been renewed.
        self._base: int | None = token_of(0, 0)
        self._expected = np.full(n, NO_TOKEN, dtype=np.uint64)
        # What is to be the case when a batch has been posted, also if Ctrl-C comes in between.
        self._unfinished: tuple[Selection, Any, int, int] | None = None
        # The env whose reply `take` has found and left, and what is wrong with it, if anything is.
        self._left: tuple[int, str | None] | None = None
        self._posted_last: Selection | None = None
        self._posted_for_last = False
        self._groups = hosts.groups
        self._ring = hosts.transport.ring
        self._kinds = -1
        self._posted_at = np.full(n, NEVER)
        self._limit_s = hosts.step_limit_s
        self.earliest_deadline = NEVER
        self._selections: dict[tuple[int, ...], Selection] = {}
        self._latest: Selection | None = None
        self._latest_array: Any = None
        self._strays = Strays(slots, arrivals)
        # Envs in their lanes that their hosts reset: the token of the step before that, and how
        # many resets the env has had with this one.
        self._awaited: dict[int, tuple[int, int]] = {}
        self._resets_in_lanes = hosts.resets_need_no_looking_after

        self._bind(block)

    def _bind(self, block: Block) -> None:
        self._block = block
        self._replies = BlockReplies(block, self.observed.places)
        self._strays.bind(block, self._replies)
        self._posting = items(block.posted)
        self._sleeping = items(block.sleeping)
        self._reset_tokens = items(block.resets)
        self._reset_flags = items(block.reset_flags)

    def forget_selections(self) -> None:
        """Make all selections anew, since an env has another host now."""
        self._let_go_of_memory()
        self._selections.clear()
        self._latest = self._latest_array = None

    def _let_go_of_memory(self) -> None:
        for selection in self._selections.values():
            selection.window = None
            selection.arenas.clear()

    def detach(self) -> None:
        """Let go of the shared memory: who still looks at this looks at nothing."""
        self._lane[:] = bytes(len(self._lane))
        self._awaited.clear()
        self._let_go_of_memory()
        plan = self._block.plan
        self._bind(Block(bytearray(plan.nbytes), plan))

    # -- who is where -----------------------------------------------------------------------

    def select(self, env_ids: Any) -> Selection | None:
        """Return envs as a selection; mostly the same object for the same envs.

        Args:
            env_ids: a sequence or an array of env_ids.

        Returns:
            None if there are none, or these are not all different env_ids.
        """
        if env_ids is self._latest_array:
            return self._latest
        kind = type(env_ids)
        if kind is np.ndarray and env_ids.ndim == 1:
            key = tuple(env_ids.tolist())
        elif kind in _PLAIN_SEQUENCES or (kind is range and self._spans(env_ids)):
            key = tuple(env_ids)
        else:
            return None
        if set(map(type, key)) != {int}:  # asked first: True and 1.0 are found as 1 is
            return None
        selection = self._selections.get(key)
        if selection is None:
            known = self._hosts.index_of
            if min(key) < 0 or max(key) >= len(known):
                return None
            if len(set(key)) < len(key):
                return None
            if len(self._selections) >= _KNOWN_SELECTIONS:
                self._selections.clear()
            selection = self._selections[key] = Selection(list(key), known)
            if selection.is_slice:
                rows = selection.rows
                selection.window = Window(self._block, rows, self._bases, self._expected)
        self._latest, self._latest_array = selection, selection.array
        return selection

    def _spans(self, env_ids: range) -> bool:
        """Whether a range lies within the env_ids; others may be too long to be read."""
        n = len(self._lane)
        return 0 <= env_ids.start <= n and -1 <= env_ids.stop <= n

    def are_idle(self, selection: Selection) -> bool:
        """Whether all of these envs are in their lanes and ready."""
        lane = self._lane
        if selection.is_slice:
            return bool(lane[selection.rows] == selection.idle)
        return self.hold_idle(selection.ids)

    def are_stepping(self, selection: Selection) -> bool:
        """Whether all of these envs are in their lanes and take a step."""
        lane = self._lane
        if selection.is_slice:
            return bool(lane[selection.rows] == selection.stepping)
        return set(map(lane.__getitem__, selection.ids)) == _ALL_STEPPING

    def hold_idle(self, env_ids: Sequence[int]) -> bool:
        """As `are_idle`, for env_ids that are known to exist."""
        lane = self._lane
        return lane == self._all_idle or set(map(lane.__getitem__, env_ids)) == _ALL_IDLE

    @property
    def outstanding(self) -> int:
        """Steps of envs in their lanes that are under way, or have arrived and were not taken."""
        return self._lane.count(STEPPING)

    @property
    def has_resets(self) -> bool:
        """Whether envs in their lanes are being reset."""
        return bool(self._awaited)

    def is_resetting(self, env_id: int) -> bool:
        """Whether an env is in its lane and being reset."""
        return self._lane[env_id] == RESETTING

    @property
    def are_all_idle(self) -> bool:
        """Whether all envs are in their lanes and ready: then nothing is awaited of any."""
        return self._lane == self._all_idle

    def idle_ids(self) -> list[int]:
        """Return the envs in their lanes that are ready, ascending."""
        lane = self._lane
        count = lane.count(IDLE)
        if count == len(lane):
            return list(range(count))
        if count * _MANY > len(lane):
            return [env_id for env_id, at in enumerate(lane) if at == IDLE]
        found, at = [], -1
        for _ in range(count):
            at = lane.find(IDLE, at + 1)
            found.append(at)
        return found

    @property
    def are_all_in(self) -> bool:
        """Whether all envs are in their lanes."""
        return OUT not in self._lane

    def is_stepping(self, env_id: int) -> bool:
        """Whether an env is in its lane and takes a step."""
        return self._lane[env_id] == STEPPING

    def is_in(self, env_id: int) -> bool:
        """Whether an env is in its lane."""
        return self._lane[env_id] != OUT

    def enter(self) -> None:
        """Take every env that is ready into its lane."""
        lane = self._lane
        if OUT not in lane:
            return
        for env_id, at in enumerate(lane):
            if at == OUT and self._may_enter(env_id):
                slot = self._slots[env_id]
                base = token_of(slot.generation, 0)
                self._bases[env_id] = base
                if base != self._base:
                    self._base = None
                self._expected[env_id] = NO_TOKEN
                self.observed.keep(env_id, slot.obs)
                lane[env_id] = IDLE  # last: who comes here after an interrupt does it all again

    def _may_enter(self, env_id: int) -> bool:
        slot = self._slots[env_id]
        return (
            slot.work is Work.NONE
            and not slot.owed
            and slot.doomed is None
            and slot.host_id is not None
            and self._states[env_id] is EnvState.RUN
        )

    def leave(self, env_id: int) -> None:
        """Write what is known of an env into its slot; from now on that is right."""
        at = self._lane[env_id]
        if at == OUT:
            return
        slot = self._slots[env_id]
        slot.obs = self.observed.newest(env_id)
        if at == RESETTING:
            token, _ = self._awaited.pop(env_id)
            self._strays.await_reset(env_id, token)
            slot.request_id = request_of(token)[1]
            slot.attended = True
            self._hosts.begin(slot, Work.RESETTING)
        elif at == STEPPING:
            token = int(self._expected[env_id])
            self._expected[env_id] = NO_TOKEN
            self._strays.await_step(env_id, token)
            slot.owed = True
            self._hosts.take_over_step(slot, request_of(token)[1], float(self._posted_at[env_id]))
            if self._may_stay_silent(env_id, token):
                self._ask(self._hosts.index_of[env_id])
        self._lane[env_id] = OUT

    def _may_stay_silent(self, env_id: int, token: int) -> bool:
        """Return whether an env's host may not ring for its step, which has not replied."""
        posting = self._posting[self._hosts.index_of[env_id]]
        return posting & RING_MASK == RING_LAST and bool(self._block.replies[env_id] != token)

    def _ask(self, index: int) -> None:
        """Have a host ring when it has done what was posted."""
        self._ring((self._groups[index].host_id or 0,), asks=True)

    def have_all_ring(self) -> None:
        """Have every host ring that need not, because its steps were to be gathered together.

        They are not when a gather waits for some of them, after `send` or Ctrl-C.
        """
        if not self._posted_for_last:
            return
        silent = [
            self._hosts.index_of[env_id]
            for env_id, at in enumerate(self._lane)
            if at == STEPPING and self._may_stay_silent(env_id, int(self._expected[env_id]))
        ]
        for index in dict.fromkeys(silent):
            self._ask(index)
        self._posted_for_last = False

    def leave_all(self) -> None:
        """Take every env out of its lane."""
        for env_id in range(len(self._lane)):
            self.leave(env_id)

    # -- steps ------------------------------------------------------------------------------

    def post(
        self,
        selection: Selection,
        actions: Sequence[Array],
        *,
        python_numbers: bool,
        ring: int,
    ) -> None:
        """Have idle envs take a step.

        Args:
            selection: which.
            actions: per leaf (k, *shape).
            python_numbers: the envs are to get Python's own numbers, not numpy's.
            ring: when their hosts ring: see `block.RING_LAST`. With that, somebody does when all
                have replied; who waits for some of them has to call `have_all_ring`.
        """
        rows, window = selection.rows, selection.window
        if window is None:
            for column, values in zip(self._block.actions, actions, strict=True):
                column[rows] = values
        else:
            for target, values in zip(window.actions, actions, strict=True):
                target[...] = values
        kind = PYTHON_NUMBERS if python_numbers else NUMPY_VALUES
        if kind != self._kinds:
            self._set_kinds(rows, kind)
        if self._limit_s is not None:
            self._set_deadline(rows, self._limit_s)
        self.observed.counted(selection.ids)
        request_id = self._hosts.next_request_id()
        tokens: Any
        if window is None:
            tokens = self._bases[rows] + np.uint64(request_id)
        elif self._base is None:
            tokens = (window.bases + np.uint64(request_id)).tobytes()
        else:
            token = self._base + request_id
            tokens = token.to_bytes(TOKEN_BYTES, sys.byteorder) * selection.count
        self._unfinished = (
            selection,
            tokens,
            posting_of(request_id, ring),
            self._statistics.actions + selection.count,
        )
        self.finish_posting()

    def finish_posting(self) -> None:
        """Do what is left of a `post` that was interrupted; nothing if there is none."""
        unfinished = self._unfinished
        if unfinished is None:
            return
        selection, tokens, posting, self._statistics.actions = unfinished
        window = selection.window
        if window is None:
            self._expected[selection.rows] = tokens
            self._block.requests[selection.rows] = tokens
            self._lane[:] = self._moved(selection, STEPPING)
        else:
            window.expected_bytes[:] = tokens
            window.request_bytes[:] = tokens
            self._lane[selection.rows] = selection.stepping
        self._posted_last = selection
        if posting & RING_MASK == RING_LAST:
            self._posted_for_last = True
        hosts, posted, sleeping = selection.hosts, self._posting, self._sleeping
        for index in hosts:
            posted[index] = posting
        fence()
        groups = self._groups
        self._ring([groups[index].host_id or 0 for index in hosts if sleeping[index]])
        self._unfinished = None

    def _moved(self, selection: Selection, to: int) -> bytearray:
        """Return where all envs are once these have moved."""
        lane = bytearray(self._lane)
        for env_id in selection.ids:
            lane[env_id] = to
        return lane

    def _set_kinds(self, rows: Any, kind: int) -> None:
        self._block.kinds[rows] = kind
        self._kinds = kind if (self._block.kinds == kind).all() else -1

    def _set_deadline(self, rows: Any, limit_s: float) -> None:
        now = self._hosts.clock()
        self._posted_at[rows] = now
        self.earliest_deadline = min(self.earliest_deadline, now + limit_s)

    def sleep(self, *, soon: bool) -> None:
        """Say whether the caller is about to sleep, and has to be rung for."""
        self._sleeping[-1] = soon
        if soon:
            fence()

    def all_outstanding(self) -> Selection | None:
        """Return what is outstanding as a selection, if it was posted together and ascends."""
        selection = self._posted_last
        if selection is None or selection.count != self.outstanding or not selection.is_ascending:
            return None
        return selection if self.are_stepping(selection) else None

    def newest_batch(self, env_ids: Sequence[int]) -> Any:
        """Return the newest observations of envs, if all of them are in their lanes and ready.

        Returns:
            Per leaf (k, *shape); None if they are not, or were handed out one by one.
        """
        if not self.hold_idle(env_ids):
            return None
        found = self.observed.newest_few(env_ids)
        if found is not None:
            return found
        selection = self.select(env_ids)
        return None if selection is None else self.observed.newest_batch(selection)

    def have_arrived(self, selection: Selection) -> bool:
        """Whether all of these envs, which take a step, have replied."""
        window = selection.window
        if window is not None:
            return bool(window.replies == window.expected)
        rows = selection.rows
        return bool((self._block.replies[rows] == self._expected[rows]).all())

    def arrived_ids(self) -> list[int]:
        """Return the envs in their lanes whose steps have replied, ascending."""
        (found,) = (self._block.replies == self._expected).nonzero()
        arrived: list[int] = found.tolist()
        return arrived

    def any_goes_on(self, ids: Sequence[int]) -> bool:
        """Whether one of these envs, which have replied, has not ended its episode."""
        flags = self._block.flags
        return any(not flags[i] & DONE for i in ids)

    def take(self, selection: Selection) -> Taken | None:
        """Take the replies of envs that have arrived.

        Returns:
            What they hold; reading it makes the envs idle. None if one of them is out of the
            ordinary in such a way that it has to leave its lane: then nothing was taken, and
            `set_aside` is to be called.
        """
        window = selection.window
        flags = self._block.flags[selection.rows] if window is None else window.flags
        raw = flags.tobytes()
        first = raw[0] | raw[1] << 8
        ordinary = not first & ~ORDINARY_BITS and raw == raw[:2] * selection.count
        if ordinary and first & PLACE_BITS < self.observed.places.steps:
            return Taken(self, selection, self._block.rewards, first & PLACE_BITS, first, {}, {})
        return self._take_mixed(selection, np.frombuffer(raw, dtype=np.uint16))

    def _take_mixed(self, selection: Selection, flags: Array) -> Taken | None:
        found: list[int] = flags.tolist()
        usual, steps = found[0] & TOLD_BIT, self.observed.places.steps
        slots = [flag & PLACE_BITS for flag in found]
        details: dict[int, Any] = {}
        specials: dict[int, int] = {}
        awaits = self._awaits_reset if self._reset_inplace else _awaits_nothing
        for position, (flag, slot) in enumerate(zip(found, slots, strict=True)):
            if flag - slot == usual and slot < steps:
                continue
            env_id = selection.ids[position]
            is_plain = flag & PLAIN_END_BITS == PLAIN_END and slot < steps
            if not (is_plain and not awaits(env_id, flag)) and not self._is_sound(
                env_id, position, flag, details
            ):
                return None
            specials[position] = flag
        one_slot = slots.count(slots[0]) == len(slots)
        where: Any = slots[0] if one_slot else slots
        return Taken(self, selection, self._block.rewards, where, usual, specials, details)

    def _is_sound(self, env_id: int, position: int, flag: int, details: dict[int, Any]) -> bool:
        """Look at a reply with something to it; False if the env has to leave its lane for it."""
        try:
            details[position] = self._replies.detail(env_id, flag)
        except ValueMismatchError as error:
            self._left = env_id, str(error)
            return False
        if flag & DONE and self._reset_inplace and self._awaits_reset(env_id, flag):
            self._left = env_id, None
            return False
        return True

    def set_aside(self) -> None:
        """Take the env out of its lane whose reply `take` has found and left."""
        left, self._left = self._left, None
        if left is None:
            return
        env_id, reason = left
        self.leave(env_id)
        if reason is None:
            self.collect()
        else:
            self._strays.break_off(env_id, reason)

    def hand_out(self, selection: Selection, specials: Mapping[int, int], result: Any) -> None:
        """Go on with envs whose replies were taken and read.

        Args:
            selection: which.
            specials: the flags of replies with something to them, by position.
            result: what was made of the replies.
        """
        statistics, endings = self._statistics, []
        for position, flag in specials.items():
            if flag & DONE:
                env_id = selection.ids[position]
                done = self._slots[env_id].episodes_done + 1
                endings.append(Ending(env_id, flag, int(self._expected[env_id]), done))
        self._delivery.in_hand = hand = Hand(
            result,
            selection,
            endings,
            statistics.timesteps + selection.count,
            statistics.episodes + len(endings),
        )
        self.move_on(hand)
        if self._awaited:
            self.begin_episodes()

    def move_on(self, hand: Hand) -> None:
        """Have the envs whose timesteps were handed out be ready, or at the end of their episodes.

        Can be interrupted anywhere, and called again.
        """
        selection = hand.selection
        if hand.is_done or selection is None:
            return
        window = selection.window
        if window is None:
            self._expected[selection.rows] = NO_TOKEN
            self._lane[:] = self._moved(selection, IDLE)
        else:
            window.expected_bytes[:] = window.nothing
            self._lane[selection.rows] = selection.idle
        self._statistics.timesteps = hand.n_delivered
        odd = [ending for ending in hand.endings if not self._end_plainly(ending)]
        self._statistics.episodes = hand.n_episodes - len(odd)
        hand.endings = odd  # what is left is not to be interrupted
        hand.is_done = True

    def follow_up(self, hand: Hand) -> None:
        """Go on with the episodes that ended otherwise than most; not to be interrupted."""
        endings, hand.endings = hand.endings, ()
        for ending in endings:
            self._end_episode(ending)
        if endings:
            self._episodes.relieve()

    def _awaits_reset(self, env_id: int, flag: int) -> bool:
        if self._episodes.keeps_spares:
            return True
        return resets_after(flag) and bool(self._block.resets[env_id] != self._expected[env_id])

    def _end_plainly(self, ending: Ending) -> bool:
        """End an episode whose host begins the next one in the block; False if it does not."""
        env_id, flag, token, episodes_done = ending
        slot = self._slots[env_id]
        if not (resets_after(flag) and self._resets_in_lanes):
            return False
        if not self._episodes.goes_on(slot, episodes_done):
            return False
        self._awaited[env_id] = (token, slot.episode + 1)
        self._lane[env_id] = RESETTING
        return True

    def _end_episode(self, ending: Ending) -> None:
        env_id, flag, token, _ = ending
        slot = self._slots[env_id]
        self._lane[env_id] = OUT
        slot.obs = self.observed.newest(env_id)
        if self._episodes.keeps_spares:
            self.observed.note(env_id)  # the env that comes next goes on behind it
        slot.request_id = request_of(token)[1]
        slot.work = Work.STEPPING
        if resets_after(flag):
            self._strays.await_reset(env_id, token)
        self._episodes.end(slot, after_of(flag))

    def collect(self) -> None:
        """Apply what has arrived in the block besides replies of envs in their lanes."""
        while not self.begin_episodes():
            self.leave_odd_resets()
        self._strays.collect()

    @property
    def strays_have_arrived(self) -> bool:
        """Whether envs out of their lanes have replied in the block."""
        return self._strays.are_awaited and self._strays.have_arrived

    def begin_episodes(self) -> bool:
        """Have envs in their lanes be ready whose hosts have reset them.

        Can be interrupted anywhere, and called again.

        Returns:
            Whether all is said; if not, one of the resets has more to it: `collect` looks at it.
        """
        if not self._awaited:
            return True
        begun = [
            self._begin_episode(env_id, episode)
            for env_id, (token, episode) in list(self._awaited.items())
            if self._reset_tokens[env_id] == token
        ]
        return all(begun)

    def _begin_episode(self, env_id: int, episode: int) -> bool:
        """The host has reset an env in its lane."""
        flag = self._reset_flags[env_id]
        place = flag & PLACE_BITS
        places = self.observed.places
        if flag & HAS_INFO or not places.steps <= place < places.count:
            return False
        self._episodes.gone_on(self._slots[env_id], episode)
        self.observed.began(env_id, place)
        self._lane[env_id] = IDLE
        del self._awaited[env_id]  # last, as in `enter`
        return True

    def leave_odd_resets(self) -> None:
        """Take the envs out of their lanes whose resets have more to them."""
        for env_id, (token, _) in list(self._awaited.items()):
            if self._reset_tokens[env_id] == token:
                self.leave(env_id)

    # -- time -------------------------------------------------------------------------------

    def expire(self) -> None:
        """Take the envs whose steps have taken too long out of their lanes."""
        now, limit_s = self._hosts.clock(), self._limit_s
        if limit_s is None or now < self.earliest_deadline:
            return
        under_way = self._block.replies != self._expected
        under_way &= self._expected != NO_TOKEN
        late = under_way & (self._posted_at + limit_s <= now)
        for env_id in np.flatnonzero(late).tolist():
            self.leave(env_id)
        waiting = self._posted_at[under_way & ~late]
        self.earliest_deadline = float(waiting.min()) + limit_s if len(waiting) else NEVER

    def _look(self, group: HostGroup) -> None:
        """Find out what a shared host is running."""
        running = int(self._block.running[group.index])
        since = float(self._block.since[group.index])
        if not since <= self._hosts.clock():  # NaN too: nobody may put off a deadline
            since = group.quiet_since
        slot = group.by_id.get(running - 1)
        if slot is None or self._steps(slot):
            posted, finished = self._posting[group.index], int(self._block.finished[group.index])
            if self._hosts.limits.is_passed_over(group, posted, finished, self._hosts.clock()):
                group.running = None
                return
            if slot is not None and self._limit_s is None:  # it may be at that for ever
                slot, since = None, self._hosts.clock()
        if slot is None:
            group.running = None
            group.quiet_since = max(group.quiet_since, since)
            return
        self.leave(slot.env_id)
        group.running = slot
        group.deadline = since + self._hosts.limit_of(slot)

    def _steps(self, slot: EnvSlot) -> bool:
        return self._lane[slot.env_id] == STEPPING or slot.work in (Work.STEPPING, Work.CANCELLING)

    # -- arrivals ---------------------------------------------------------------------------

    def _take_out(self, group: HostGroup) -> None:
        """Take all envs of a host out of their lanes, and apply what they have replied."""
        if group.is_spare:
            return
        out = [slot.env_id for slot in group.slots if self._lane[slot.env_id] != OUT]
        for env_id in out:
            self.leave(env_id)
        if out:
            self.collect()

    def make_way(self, host_id: int, arrival: Arrival) -> None:
        """Take the envs that an arrival is about out of their lanes.

        What their host replied in the block before is applied first.
        """
        group = self._hosts.group_of(host_id)
        if group is None or group.is_spare:
            return
        if type(arrival) is Message:
            if arrival.env_id in group.by_id and arrival.op != Op.NOTICE:
                self.leave(arrival.env_id)
                self.collect()
            return
        self._take_out(group)
        self.collect()
        if group.is_shared and group.running is None:
            group.running = group.by_id.get(int(self._block.running[group.index]) - 1)
        if type(arrival) is HostDied:
            self._block.running[group.index] = 0  # the host that replaces it runs nothing yet
