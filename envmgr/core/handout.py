"""Timesteps that have arrived: which they are, and how they are handed out."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from envmgr.core.arenas import one_of
from envmgr.core.delivery import Delivery, Ending, Hand, make_ending
from envmgr.core.episodes import Episodes
from envmgr.core.hosts import Hosts
from envmgr.core.phases import Change, Phase
from envmgr.core.replies import (
    LATE,
    LATE_END,
    PLAIN_END,
    PLAIN_END_BITS,
    BlockReplies,
    after_of,
    resets_after,
)
from envmgr.core.selection import Selection, Selections
from envmgr.core.stats import Statistics
from envmgr.core.taken import Remarks, ReplyReader, Taken
from envmgr.spaces import ValueMismatchError
from envmgr.wire.block import (
    AFTER_BITS,
    DONE,
    ORDINARY_BITS,
    PLACE_BITS,
    REWARD_BITS,
    REWARD_SHIFT,
    TOLD_BIT,
    Block,
)
from envmgr.wire.rewards import FITS_ALL


class Handout:
    """Finds what has arrived, and hands it out.

    The reply to a posted step stays in the block until it is handed out; it is read once. All
    other timesteps are in `Record.undelivered` by then.

    Args:
        hosts: whose steps.
        episodes: ends them.
        statistics: where steps are counted.
        delivery: keeps what is handed out.
        selections: envs that are stepped together.
        reset_inplace: a step that ends an episode is complete with the next one's beginning.
        has_spares: what follows an episode is decided here, not by the host.

    Attributes:
        selections: envs that are stepped together.
        left: the env whose reply `take` has found and left, because it has to be looked at by
            itself.
    """

    def __init__(
        self,
        hosts: Hosts,
        episodes: Episodes,
        statistics: Statistics,
        delivery: Delivery,
        selections: Selections,
        *,
        reset_inplace: bool,
        has_spares: bool,
    ) -> None:
        self.selections = selections
        self.left: int | None = None
        self._record = hosts.record
        self._phases = hosts.phases
        self._episodes = episodes
        self._statistics = statistics
        self._delivery = delivery
        self._reset_inplace = reset_inplace
        self._has_spares = has_spares
        self._resets_plainly = hosts.resets_need_no_looking_after
        self._block: Block | None = None
        self._reader: ReplyReader | None = None
        self._replies: BlockReplies | None = None

    def share(self, block: Block | None, replies: BlockReplies | None) -> None:
        """Look at this block from now on; None: at none any more."""
        self._block, self._replies = block, replies
        self._reader = None if block is None else ReplyReader(self._record.observed, block)
        self.selections.share(block)

    # -- what has arrived ---------------------------------------------------------------------

    def have_arrived(self, selection: Selection) -> bool:
        """Whether the timesteps of all of these envs can be handed out."""
        window = selection.window
        if window is not None and not self._record.undelivered:
            return bool(window.replies == window.tokens)
        record, rows = self._record, selection.array
        if self._block is None and not record.held:
            return all(map(record.undelivered.__contains__, selection.ids))
        if self._block is not None and not record.undelivered and selection.count > _FEW:
            return 0 not in record.answered(self._block.replies, _POSTED)[rows].tobytes()
        return all(map(self.has_arrived, selection.ids))

    def has_arrived(self, env_id: int) -> bool:
        """Whether the timestep of an env can be handed out."""
        record, block = self._record, self._block
        if env_id in record.undelivered:
            return env_id not in record.held
        if block is None or record.phases.column[env_id] != Phase.POSTED:
            return False
        return bool(block.replies[env_id] == record.token_items[env_id])

    def arrived_ids(self) -> list[int]:
        """Return the envs whose timesteps can be handed out, ascending."""
        record = self._record
        found = sorted(env_id for env_id in record.undelivered if env_id not in record.held)
        if self._block is not None:
            replied: list[int] = record.answered(self._block.replies, _POSTED).nonzero()[0].tolist()
            found = sorted(replied + found) if found else replied
        return found if record.together is None else record.together.complete(found)

    def finds_malformed(self) -> bool:
        """Whether a reply in the block is malformed; its env is `left`, others are awaited still.

        Asked while something out of the ordinary goes on: who waits for all need not wait for the
        host that has sent nonsense.
        """
        block = self._block
        if block is None:
            return False
        odd = self._record.answered(block.replies, _POSTED) & ((block.flags & _ODD_BITS) != 0)
        return not all(
            self._is_sound(env_id, 0, int(block.flags[env_id]), {})
            for env_id in odd.nonzero()[0].tolist()
        )

    def any_goes_on(self, env_ids: Sequence[int]) -> bool:
        """Whether one of these envs, whose timesteps have arrived, is ready when it has its own."""
        together = self._record.together
        return any(
            not self._is_end(env_id) and (together is None or together.goes_on(env_id))
            for env_id in env_ids
        )

    def _is_end(self, env_id: int) -> bool:
        timestep = self._record.undelivered.get(env_id)
        if timestep is not None or self._block is None:
            return timestep is None or timestep.done
        return bool(self._block.flags[env_id] & DONE)

    # -- taking it ----------------------------------------------------------------------------

    def take(self, selection: Selection) -> Taken | None:
        """Take the timesteps of envs that have arrived.

        Returns:
            What they hold; reading it hands them out. None if the reply of one, which is `left`
            then, has to be looked at by itself before: nothing was taken.
        """
        undelivered, ids = self._record.undelivered, selection.ids
        if not undelivered:
            return self._posted(selection)
        kept = {i: undelivered[i] for i in ids if i in undelivered}
        others = self.selections.of([i for i in ids if i not in kept])
        if others is None:
            return Taken(ids, None, None, None, _NO_REMARKS, kept)
        taken = self._posted(others)
        return None if taken is None else taken.beside(ids, kept)

    def _posted(self, selection: Selection) -> Taken | None:
        """As `take`, of envs whose steps are posted."""
        block, window = self._block, selection.window
        if block is None:
            return None
        if not selection.is_posted(self._phases):
            column = self._phases.column
            self.left = next(i for i in selection.ids if column[i] != Phase.POSTED)
            return None
        raw = (block.flags[selection.rows] if window is None else window.flags).tobytes()
        # What is kept there is the same for ever: what ordinary replies say, given their flags.
        ordinary = selection.ordinary.get(raw)
        return self._looked_at(selection, raw) if ordinary is None else ordinary

    def _looked_at(self, selection: Selection, raw: bytes) -> Taken | None:
        first, steps = raw[0] | raw[1] << 8, self._record.observed.places.steps
        if (
            not first & ~(ORDINARY_BITS | REWARD_BITS)
            and raw == raw[:2] * selection.count
            and (first <= ORDINARY_BITS or first >> REWARD_SHIFT in FITS_ALL)
            and first & PLACE_BITS < steps
        ):
            remarks = Remarks(first, selection.count)
            taken = Taken(selection.ids, selection, self._reader, first & PLACE_BITS, remarks)
            selection.ordinary[raw] = taken
            return taken
        return self._mixed(selection, raw, first, steps)

    def _mixed(self, selection: Selection, raw: bytes, first: int, steps: int) -> Taken | None:
        usual = first & TOLD_BIT
        if first >> REWARD_SHIFT in FITS_ALL:
            usual |= first & REWARD_BITS
        plain_end, late_end = PLAIN_END | usual & REWARD_BITS, LATE_END | usual & REWARD_BITS
        together: Container[int] = self._record.together or ()
        details: dict[int, Any] = {}
        specials: dict[int, int] = {}
        for position, flag in _others(raw, range(usual, usual + steps)):
            env_id = selection.ids[position]
            bits = flag & PLAIN_END_BITS
            is_end = bits == plain_end or (bits == late_end and env_id in together)
            is_plain = is_end and flag & PLACE_BITS < steps
            if not is_plain and not self._is_sound(env_id, position, flag, details):
                return None
            waits = self._reset_inplace and flag & DONE and flag & AFTER_BITS != LATE
            if waits and self._awaits_reset(env_id, flag):
                self.left = env_id
                return None
            specials[position] = flag
        places = raw[::2].translate(_PLACE_OF)  # they are in the lower bytes
        where = one_of(places)
        remarks = Remarks(usual, selection.count, specials, details)
        return Taken(selection.ids, selection, self._reader, where, remarks)

    def _is_sound(self, env_id: int, position: int, flag: int, details: dict[int, Any]) -> bool:
        """Look at a reply with something to it; False if it is malformed."""
        if self._replies is None:
            return False
        try:
            details[position] = self._replies.detail(env_id, flag)
        except ValueMismatchError:
            self.left = env_id
            return False
        return True

    def _awaits_reset(self, env_id: int, flag: int) -> bool:
        """Whether an end of an episode is not complete, or it takes a second look to know."""
        if self._has_spares or self._replies is None or not resets_after(flag):
            return True
        token: int = self._record.token_items[env_id]
        return not self._replies.has_reset(env_id, token)

    # -- handing it out -----------------------------------------------------------------------

    def hand_out(self, taken: Taken, result: Any) -> None:
        """Go on with envs whose timesteps were read.

        Args:
            taken: what was read.
            result: what was made of it.
        """
        statistics, selection = self._statistics, taken.selection
        endings: list[Ending] = []
        if selection is not None and (specials := taken.remarks.specials):
            endings = self._endings(selection, specials)
        self._delivery.in_hand = hand = Hand(
            result,
            selection,
            tuple(taken.kept),
            endings,
            statistics.timesteps,
            statistics.episodes + len(endings),
            self._delivery.caller,
        )
        self.move_on(hand)

    def _endings(self, selection: Selection, specials: Mapping[int, int]) -> list[Ending]:
        ids, episodes_done = selection.ids, self._record.episodes_done
        return [
            make_ending((env_id := ids[position], flag, episodes_done[env_id] + 1))
            for position, flag in specials.items()
            if flag & DONE
        ]

    def move_on(self, hand: Hand) -> None:
        """Have the envs whose timesteps were handed out be ready, or at the end of their episodes.

        Can be interrupted anywhere, and called again.
        """
        if hand.is_done:
            return
        selection, statistics = hand.selection, self._statistics
        if selection is None:
            pass
        elif selection.is_slice:
            self._phases.apply_rows(selection.rows, Change.SETTLE)
        else:
            self._phases.apply_at(selection.array, Change.SETTLE)
        for env_id in hand.kept:
            self._record.undelivered.pop(env_id, None)
        statistics.timesteps = hand.n_before + hand.count
        if hand.endings:
            hand.odd = odd = self._end_plainly(hand.endings)
            statistics.episodes = hand.n_episodes - len(odd)
        hand.is_done = True

    def _end_plainly(self, endings: Sequence[Ending]) -> Sequence[Ending]:
        """End episodes whose hosts begin the next ones by themselves; return the others."""
        return self._episodes.end_plainly(endings) if self._resets_plainly else endings

    def follow_up(self, hand: Hand) -> None:
        """Go on with the episodes that ended otherwise than most; not to be interrupted."""
        odd, hand.odd = hand.odd, ()
        for env_id, flag, _ in odd:
            self._episodes.end(self._record.slots[env_id], after_of(flag))


def _others(raw: bytes, ordinary: range) -> list[tuple[int, int]]:
    """Return the flags that are none of these, with their positions."""
    flags: Any = np.frombuffer(raw, np.uint16)
    if len(flags) <= _FEW:
        return [(k, flag) for k, flag in enumerate(flags.tolist()) if flag not in ordinary]
    found = (flags - np.uint16(ordinary.start) >= len(ordinary)).nonzero()[0]  # lesser ones wrap
    return list(zip(found.tolist(), flags[found].tolist(), strict=True))


_FEW = 16
"""So many envs are looked at one by one rather than as an array."""
_POSTED = np.uint8(Phase.POSTED)
_NO_REMARKS = Remarks(0, 0)
_PLACE_OF = bytes(byte & PLACE_BITS for byte in range(256))
_ODD_BITS = np.uint16(0xFFFF & ~TOLD_BIT)
"""Without these a reply is not malformed: it is in the first place."""
