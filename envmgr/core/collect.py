"""Collecting timesteps: which have arrived, what they say, and how they are handed out.

The reply to a posted step stays in the block until it is collected; it is read once. All other
timesteps are in the table by then (`EnvTable.undelivered`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from envmgr.core.call_journal import CallJournal, Fate, Returning
from envmgr.core.episodes import Beginning, Ending, Episodes
from envmgr.core.hosts import Hosts
from envmgr.core.observations import Arena, Arenas, one_of
from envmgr.core.phases import Phase
from envmgr.core.replies import (
    BlockReplies,
    HandedBatch,
    after_of,
)
from envmgr.core.statistics import Statistics
from envmgr.core.table import NOBODY, Selection, Selections, Window
from envmgr.env.contract import ENDING_GIVEN, TERMINATED, TRUNCATED, info_of
from envmgr.hot import hot
from envmgr.lifecycle import EnvState
from envmgr.spaces import ValueMismatchError, indexed
from envmgr.types import EnvTimestep, is_abnormal
from envmgr.wire.block import (
    AFTER_BITS,
    BUFFER_BITS,
    DONE,
    ENDING_BITS,
    ENDING_GIVEN_BIT,
    ENDING_SHIFT,
    HAS_INFO,
    NEXT_STEP_END,
    ORDINARY_BITS,
    PLAIN_END,
    PLAIN_END_BITS,
    RESETS,
    RESETS_IN_NEXT_STEP,
    REWARD_BITS,
    REWARD_SHIFT,
    Block,
)
from envmgr.wire.info_columns import OF_STEPS, InfoColumns, columns_of, without_ends
from envmgr.wire.info_forms import RecordBatch
from envmgr.wire.rewards import FIRST_WIDE, FITS_ALL, restored

_make_timestep = partial(tuple.__new__, EnvTimestep)
_make_ending = partial(tuple.__new__, Ending)
_make_returning = partial(tuple.__new__, Returning)
_EMPTY: Mapping[Any, Any] = {}  # not a MappingProxyType: who keeps a batch may pickle it


class ArrayBatch(NamedTuple):
    """Timesteps of k envs as arrays.

    Attributes:
        env_ids: (k,) int64.
        obs: (k, *shape), or a dict or tuple of such arrays; without fixed layout an object array
            (k,).
        reward: (k,) float64 if each reward is one number, also in an array of shape (1,); float64
            (k, *shape) if they are larger arrays; an object array (k,) if they are neither, or of
            different shapes.
        terminated: (k,) bool.
        truncated: (k,) bool.
        infos: k infos, as they are in timesteps. Their keys `terminated` and `truncated` are set by
            the manager if the env says how its episodes end.
    """

    env_ids: npt.NDArray[np.int64]
    obs: Any
    reward: npt.NDArray[Any]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    infos: Sequence[Any]

    @property
    def ended(self) -> npt.NDArray[np.int64]:
        """The envs whose episodes ended with these timesteps: (m,) int64."""
        if type(self.infos) is BatchInfos and self.infos.are_ordinary:
            return NOBODY
        return self.env_ids[self.terminated | self.truncated]

    @property
    def info_columns(self) -> InfoColumns:
        """The infos as columns: an `InfoColumn` for each key, or a nested dict for keys of dicts.

        `values, present = batch.info_columns["x_position"]` gives values (k,) or (k, *shape), zero
        where an info has no such key, and present (k,) bool. Values of different types or shapes,
        texts and None are objects. `terminated` and `truncated` are left out, as the batch has them
        itself. This is cheaper than looking at all infos. Whatever is set in the columns does not
        change the infos, and vice versa.
        """
        infos = self.infos
        return infos.columns() if type(infos) is BatchInfos else columns_of(_as_given(infos))

    @property
    def has_infos(self) -> bool:
        """Whether any of the infos holds more than `terminated` and `truncated`."""
        infos = self.infos
        return infos.has_any if type(infos) is BatchInfos else bool(self.told)

    @property
    def abnormal(self) -> Sequence[int]:
        """The positions of abnormal steps, ascending: those that failed, or say so themselves.

        Reading this is cheaper than looking at all infos.
        """
        infos = self.infos
        if type(infos) is BatchInfos:
            return infos.abnormal
        return [k for k, info in enumerate(_as_given(infos)) if is_abnormal(info)]

    @property
    def told(self) -> Sequence[int]:
        """The positions of infos that hold more than `terminated` and `truncated`, ascending.

        Reading this is cheaper than looking at all infos.
        """
        infos = self.infos
        if type(infos) is BatchInfos:
            return infos.told
        return [
            k
            for k, info in enumerate(_as_given(infos))
            if type(info) is not dict or info.keys() - OF_STEPS
        ]


class GivenInfos(tuple[Any, ...]):
    """Infos of timesteps that were put together one by one.

    Attributes:
        as_given: copies of the infos, as they were when they were handed out.
    """

    as_given: list[Any]

    @classmethod
    def of(cls, infos: Iterable[Any]) -> GivenInfos:
        """Return infos in this form, with copies of them in `as_given`."""
        given = cls(infos)
        given.as_given = [info.copy() if type(info) is dict else info for info in given]
        return given


def _as_given(infos: Sequence[Any]) -> Sequence[Any]:
    return infos.as_given if type(infos) is GivenInfos else infos


def by_env_id(result: Mapping[int, EnvTimestep] | ArrayBatch) -> dict[int, EnvTimestep]:
    """Return timesteps by env_id, in whatever form they were handed out."""
    if not isinstance(result, ArrayBatch):
        return dict(result)
    infos, rewards = result.infos, result.reward.tolist()
    if type(infos) is BatchInfos:
        rewards = infos.rewards(result.reward)
    return {
        env_id: EnvTimestep(indexed(result.obs, k), reward, bool(ended), info)
        for k, (env_id, reward, ended, info) in enumerate(
            zip(
                result.env_ids.tolist(),
                rewards,
                result.terminated | result.truncated,
                infos,
                strict=True,
            )
        )
    }


_make_batch = partial(tuple.__new__, ArrayBatch)

_WIDE = FIRST_WIDE << REWARD_SHIFT
"""Flags from this value on have rewards of several numbers: the reward bits are the highest."""


class ReadyBatch(NamedTuple):
    """Observations of k envs that take an action now, as arrays.

    Attributes:
        env_ids: (k,) int64.
        obs: (k, *shape), or a dict or tuple of such; without fixed layout an object array (k,).
    """

    env_ids: npt.NDArray[np.int64]
    obs: Any


class Remarks(NamedTuple):
    """What replies say besides their observations, as far as they were looked at.

    Attributes:
        usual: the flags of a reply that has nothing special about it. Rewards of this kind are read
            together.
        size: how many replies there are.
        specials: the flags of replies that have something special about them, by position.
        details: info and reward of these special replies, by position; without those of plain ends
            of episodes, whose rewards are of the usual kind.
        infos: the infos of all other replies that have one, if they can be read together.
    """

    usual: int
    size: int
    specials: Mapping[int, int] = _EMPTY
    details: Mapping[int, tuple[Any, Any]] = _EMPTY
    infos: RecordBatch | HandedBatch | None = None

    @property
    def have_rewards_of_different_shapes(self) -> bool:
        """Whether the rewards cannot be one column of an array as they are."""
        flags = (self.usual, *self.specials.values())
        kind = self.usual >> REWARD_SHIFT
        return max(flags) >= _WIDE and any(flag >> REWARD_SHIFT != kind for flag in flags)


_make_remarks = partial(tuple.__new__, Remarks)


class HandedOut:
    """Timesteps that a call is about to return.

    Attributes:
        result: `{env_id: EnvTimestep}`, or an `ArrayBatch`, once the timesteps have been read.
        count: how many timesteps there are.
        n_before: timesteps delivered since launch, before these.
        odd: ends of episodes among them that have yet to be followed up, which must not be
            interrupted.
        begun: the buffers of first observations, by env_id, if the end of every episode that ended
            among them is reported together with the beginning of the next one.
        reset_infos: the infos of those resets, by env_id, as far as there are any.
        beginnings: what is noted of these beginnings; None until that has been determined.
        n_episodes: episodes ended since launch, these included, once that has been determined.
        fate: where to note what becomes of the timesteps, if somebody wants to know.
    """

    result: Any = None
    count: int
    n_before: int
    odd: Sequence[Ending] = ()
    begun: Mapping[int, int] = _EMPTY
    reset_infos: Mapping[int, dict[str, Any]] = _EMPTY
    beginnings: Sequence[Beginning] | None = None
    n_episodes = 0
    fate: Fate | None = None


class Collected(HandedOut):
    """Timesteps that have arrived, from when they are taken until their call has returned.

    They have to be read once, before anything is sent to these envs again.

    Args:
        ids: the envs whose timesteps they are.
        selection: the envs of these whose replies are in the block; None if there are none.
        buffers: the buffer that all of their observations are in, or bytes with one for each.
        remarks: what else the replies say.
        kept: the other timesteps, by env_id.
        n_before: timesteps delivered since launch, before these.
        block: where replies are read, even if a signal handler has closed the manager since.
        arena: where observations are read, likewise.
        in_c: what hands them out in C; None where Python does.
        said: the flags of the replies that end no episode, as C has found them; None if it has not.

    Attributes:
        endings: the ends of episodes; None until they have been determined.
    """

    endings: Sequence[Ending] | None = None

    def __init__(
        self,
        ids: Sequence[int],
        selection: Selection | None,
        buffers: Any,
        remarks: Remarks,
        kept: Mapping[int, EnvTimestep],
        n_before: int,
        block: Block | None,
        arena: Arena | Arenas | None,
        in_c: Any = None,
        said: int | None = None,
    ) -> None:
        self.in_c = in_c
        self.said = said
        self.ids = ids
        self.selection = selection
        self.buffers = buffers
        self.remarks = remarks
        self.kept = kept
        self.count = len(ids)
        self.n_before = n_before
        self.block = block
        self.arena = arena


class Collector:
    """Finds what has arrived, reads it and hands it out.

    Args:
        hosts: the hosts whose steps are collected.
        episodes: ends episodes.
        statistics: where steps are counted.
        journal: keeps what is handed out until its call has returned.
        selections: envs that are stepped together.
        go_on: does what follows timesteps that were handed out.
        reset_inplace: whether a step that ends an episode is complete only with the beginning of
            the next one.
        has_spares: whether what follows an episode is decided here, not by the host.

    Attributes:
        left: the env whose reply `take` has found and left, because it has to be handled
            individually.
    """

    def __init__(
        self,
        hosts: Hosts,
        episodes: Episodes,
        statistics: Statistics,
        journal: CallJournal,
        selections: Selections,
        go_on: Callable[[HandedOut], None],
        *,
        reset_inplace: bool,
        has_spares: bool,
    ) -> None:
        self.left: int | None = None
        self._selections = selections
        self._go_on = go_on
        self._table = hosts.table
        self._episodes = episodes
        self._statistics = statistics
        self._journal = journal
        self._reset_inplace = reset_inplace
        self._has_spares = has_spares
        self._resets_plainly = hosts.resets_need_no_looking_after
        self._block: Block | None = None
        self._replies: BlockReplies | None = None

    def share(self, block: Block | None, replies: BlockReplies | None) -> None:
        """Read this block from now on; with None, stop reading any."""
        self._block, self._replies = block, replies
        self._selections.share(block)

    # -- what has arrived ---------------------------------------------------------------------

    def have_arrived(self, selection: Selection) -> bool:
        """Whether the timesteps of all of these envs can be handed out."""
        window, in_c = selection.window, selection.in_c
        if in_c is not None and in_c.arrived():
            return True
        if window is not None and not self._table.undelivered:
            return bool(window.replies == window.tokens)
        table, rows = self._table, selection.array
        block = self._block  # once: a signal handler may close the manager at any time
        if block is None and not table.awaits_reset:
            return all(map(table.undelivered.__contains__, selection.ids))
        if block is not None and not table.undelivered and selection.count > _FEW:
            return 0 not in table.answered(block.replies, _POSTED)[rows].tobytes()
        return all(map(self.has_arrived, selection.ids))

    def has_arrived(self, env_id: int) -> bool:
        """Whether the timestep of an env can be handed out."""
        table, block = self._table, self._block
        if env_id in table.undelivered:
            return env_id not in table.awaits_reset
        if block is None or table.phases.column[env_id] != Phase.POSTED:
            return False
        return bool(block.replies[env_id] == table.token_items[env_id])

    def arrived_ids(self) -> list[int]:
        """Return the envs whose timesteps can be handed out, ascending."""
        table, block = self._table, self._block
        found = sorted(env_id for env_id in table.undelivered if env_id not in table.awaits_reset)
        if block is not None:
            replied: list[int] = table.answered(block.replies, _POSTED).nonzero()[0].tolist()
            found = sorted(replied + found) if found else replied
        return table.complete(found)

    def finds_malformed(self) -> bool:
        """Whether a reply in the block is malformed, while others are awaited; its env is `left`.

        This is asked while something out of the ordinary goes on, so that a caller that waits for
        all replies need not wait for the host that has sent nonsense.
        """
        block = self._block
        if block is None:
            return False
        odd = self._table.answered(block.replies, _POSTED) & ((block.flags & _ODD_BITS) != 0)
        return not all(
            self._is_sound(env_id, 0, int(block.flags[env_id]), {})
            for env_id in odd.nonzero()[0].tolist()
        )

    def any_goes_on(self, env_ids: Sequence[int]) -> bool:
        """Whether one of these envs is ready once its timestep, which has arrived, is delivered."""
        goes_on = self._table.goes_on
        return any(not self._is_end(env_id) and goes_on(env_id) for env_id in env_ids)

    def _is_end(self, env_id: int) -> bool:
        timestep, block = self._table.undelivered.get(env_id), self._block
        if timestep is not None or block is None:
            return timestep is None or timestep.done
        return bool(block.flags[env_id] & DONE)

    # -- taking it ----------------------------------------------------------------------------

    def take(self, selection: Selection) -> Collected | None:
        """Take the timesteps of these envs, all of which have arrived.

        Returns:
            What they hold; reading it hands them out. None if the reply of one env, which is `left`
            then, has to be handled individually first: nothing was taken.
        """
        undelivered, n_before = self._table.undelivered, self._statistics.timesteps
        in_c, block, arena = selection.in_c, self._block, self._table.observed.arena
        texts = None if arena is None or not arena.has_texts else arena
        said = None if in_c is None else in_c.said()
        if type(said) is int:
            remarks = selection.ordinary.get(said) or self._remarks_of(selection, said)
            if remarks is not None:
                buffer = said & BUFFER_BITS
                if texts is not None and self._misreads(texts, selection, buffer):
                    return None
                args = selection.ids, selection, buffer, remarks, _EMPTY, n_before, block, arena
                return Collected(*args, in_c=in_c, said=said)
        elif said is not None:
            buffer, usual, ends = said
            infos = self._infos_of_all(selection) if usual & HAS_INFO else None
            if infos is not None or not usual & HAS_INFO:
                if texts is not None and self._misreads(texts, selection, buffer):
                    return None
                remarks = Remarks(usual, selection.count, ends, infos=infos)
                args = selection.ids, selection, buffer, remarks, _EMPTY, n_before, block, arena
                collected = Collected(*args, said=buffer | usual)
                self._note_beginnings(collected)
                return collected
        ids, kept = selection.ids, _EMPTY
        if undelivered:
            kept = {i: undelivered[i] for i in ids if i in undelivered}
            others = self._selections.of([i for i in ids if i not in kept])
            if others is None:
                return Collected(ids, None, None, _NO_REMARKS, kept, n_before, None, None)
            selection = others
        window = selection.window
        if block is None:
            return None
        if not selection.is_posted(self._table.phases):
            column = self._table.phases.column
            self.left = next(i for i in selection.ids if column[i] != Phase.POSTED)
            return None
        raw = (block.flags[selection.rows] if window is None else window.flags).tobytes()
        # What is kept there never changes: what ordinary replies say, given their flags.
        found = selection.ordinary.get(raw) or self._looked_at(selection, raw)
        if found is None:
            return None
        buffers, remarks = found
        if texts is not None and self._misreads(texts, selection, buffers):
            return None
        collected = Collected(ids, selection, buffers, remarks, kept, n_before, block, arena)
        if remarks.specials:
            self._note_beginnings(collected)
        return collected

    def _note_beginnings(self, collected: Collected) -> None:
        """Note whether all ends of episodes are reported with the beginnings of the next ones."""
        selection, episodes, replies = collected.selection, self._episodes, self._replies
        if not episodes.ends_in_place or selection is None or replies is None:
            return
        ended = []
        for position, flag in collected.remarks.specials.items():
            if flag & DONE:
                if flag & AFTER_BITS != RESETS:
                    return
                ended.append(selection.ids[position])
        if episodes.may_end_in_place(ended):
            begun, infos = replies.resets(ended)
            if len(begun) == len(ended) and not self._table.observed.misread(begun):
                collected.begun, collected.reset_infos = begun, infos

    def take_arrays(self, selection: Selection) -> HandedOut | None:
        """As `take`, but for arrays: ordinary timesteps are read and handed out at once."""
        in_c = selection.in_c
        handed = None if in_c is None else in_c.hand_out(selection.recipes)
        if handed is None:
            return self.take(selection)
        result: HandedOut = handed
        if result.begun:  # C has left the note of it, too
            self._journal.do(self._end_in_place, result)
        if self._has_spares or Phase.RESETTING in self._table.phases.column:
            self._go_on(result)
        return result

    def _remarks_of(self, selection: Selection, flags: int) -> Remarks | None:
        """Return what replies say that all have these flags; None if one needs a closer look."""
        if not flags & HAS_INFO:
            remarks = selection.ordinary[flags] = Remarks(flags, selection.count)
            return remarks
        infos = self._infos_of_all(selection)
        return None if infos is None else Remarks(flags, selection.count, infos=infos)

    def _infos_of_all(self, selection: Selection) -> RecordBatch | HandedBatch | None:
        """Return the infos of envs that all have one; None if they cannot be read together."""
        replies = self._replies  # once, as in `have_arrived`
        infos = None if replies is None else replies.infos(selection)
        return None if infos is None or infos.odd else infos

    def _batch_infos(self, selection: Selection, flags: int) -> BatchInfos | None:
        """As `_infos_of_all`, for a batch of envs whose replies all have these flags."""
        infos = self._infos_of_all(selection)
        if infos is None:
            selection.recipes.pop(flags, None)  # until such infos are alike again
            return None
        return BatchInfos(_make_remarks((flags, selection.count, _EMPTY, _EMPTY, infos)))

    def _misreads(self, texts: Arena | Arenas, selection: Selection, buffers: Any) -> bool:
        """Read texts of observations; return whether one makes no sense: its env is `left`."""
        odd = texts.read_texts(selection.ids, buffers)
        if odd is not None:
            self.left = odd
        return odd is not None

    def _looked_at(self, selection: Selection, raw: bytes) -> tuple[Any, Remarks] | None:
        """Return where observations are, and what else replies say, given their flags."""
        first, steps = raw[0] | raw[1] << 8, self._table.observed.buffers.steps
        bits, infos, replies = ORDINARY_BITS | REWARD_BITS, None, self._replies
        if replies is not None and raw[1::2].translate(None, _WITHOUT_INFO):
            infos = replies.infos(selection, raw)
            bits = bits if infos is None or infos.odd else bits | HAS_INFO
        if (
            not first & ~bits
            and raw == raw[:2] * selection.count
            and (first <= ORDINARY_BITS or first >> REWARD_SHIFT in FITS_ALL)
            and first & BUFFER_BITS < steps
        ):
            remarks = _make_remarks((first, selection.count, _EMPTY, _EMPTY, infos))
            said = first & BUFFER_BITS, remarks
            if infos is None:
                selection.ordinary[raw] = said
            return said
        return self._mixed(selection, raw, first, steps, infos)

    def _mixed(
        self,
        selection: Selection,
        raw: bytes,
        first: int,
        steps: int,
        infos: RecordBatch | HandedBatch | None,
    ) -> tuple[Any, Remarks] | None:
        usual, odd = first & ENDING_GIVEN_BIT, frozenset[int]()
        if infos is not None:
            usual, odd = usual | HAS_INFO, frozenset(infos.odd)
        if first >> REWARD_SHIFT in FITS_ALL:
            usual |= first & REWARD_BITS
        plain_end, next_step_end = (
            PLAIN_END | usual & REWARD_BITS,
            NEXT_STEP_END | usual & REWARD_BITS,
        )
        plain_bits = PLAIN_END_BITS
        if infos is not None:
            plain_bits &= ~HAS_INFO  # without an info there is nothing else to an end, either
        may_reset_in_next_step = self._table.may_reset_in_next_step
        details: dict[int, Any] = {}
        specials: dict[int, int] = {}
        waiting: list[int] = []
        for position, flag in _others(raw, range(usual, usual + steps), odd):
            env_id = selection.ids[position]
            bits = flag & plain_bits
            is_end = bits == plain_end or (bits == next_step_end and may_reset_in_next_step(env_id))
            is_plain = is_end and flag & BUFFER_BITS < steps
            is_plain = is_plain and not (position in odd and flag & HAS_INFO)
            if not is_plain and not self._is_sound(env_id, position, flag, details):
                return None
            if self._reset_inplace and flag & DONE and flag & AFTER_BITS != RESETS_IN_NEXT_STEP:
                if flag & AFTER_BITS != RESETS or self._has_spares:
                    self.left = env_id  # what follows is decided here
                    return None
                waiting.append(env_id)
            specials[position] = flag
        if waiting and (left := self._not_reset(waiting)):
            self.left = left[0]
            return None
        buffers = raw[::2].translate(_BUFFER_OF)  # they are in the lower bytes
        where = one_of(buffers)
        return where, Remarks(usual, selection.count, specials, details, infos)

    def _is_sound(self, env_id: int, position: int, flag: int, details: dict[int, Any]) -> bool:
        """Read a reply with something special about it; False if it is malformed."""
        replies = self._replies  # once, as in `have_arrived`
        if replies is None:
            return False
        try:
            details[position] = replies.detail(env_id, flag)
        except ValueMismatchError:
            self.left = env_id
            return False
        return True

    def _not_reset(self, env_ids: list[int]) -> list[int]:
        """Return which of these envs, whose episodes have ended, have not begun the next ones."""
        replies = self._replies  # once, as in `have_arrived`
        return (
            env_ids if replies is None else replies.not_reset(env_ids, self._table.tokens[env_ids])
        )

    # -- reading it -----------------------------------------------------------------------------

    def timesteps(self, collected: HandedOut) -> dict[int, EnvTimestep]:
        """Read what was taken, and hand it out as timesteps by env_id."""
        if not isinstance(collected, Collected):
            return by_env_id(collected.result)
        selection, block, kept = collected.selection, collected.block, collected.kept
        observed, arena = self._table.observed, collected.arena
        timesteps: dict[int, EnvTimestep] = {}
        if selection is not None and block is not None and arena is not None:
            if collected.in_c is not None:
                found = arena.rows_of(selection, collected.buffers)
                numbers = block.rewards[selection.rows].tolist()
                same = _NO_END if collected.remarks.usual & ENDING_GIVEN_BIT else _NO_INFO
                given = same if collected.remarks.infos is None else _infos_of(collected.remarks)
                timesteps = hot.timesteps(EnvTimestep, selection.ids, found, numbers, given)
                observed.taken_in_c(selection, found)
                self._deliver_in_c(collected, timesteps, in_arena=False)
                return timesteps
            usual, count, specials, details, _ = collected.remarks
            buffers = collected.buffers
            found = arena.rows_of(selection, buffers)
            kind = usual >> REWARD_SHIFT
            rewards: list[Any] = (
                restored(kind, block.reward_numbers(kind, selection.rows))
                if kind
                else block.rewards[selection.rows].tolist()
            )
            infos = _infos_of(collected.remarks)
            dones: Iterable[bool] = repeat(False)
            if specials:
                dones = [False] * count
                for position, flag in specials.items():
                    dones[position] = bool(flag & DONE)
                for position, (_, reward) in details.items():
                    rewards[position] = reward
            steps = map(_make_timestep, zip(found, rewards, dones, infos, strict=False))
            timesteps = dict(zip(selection.ids, steps, strict=True))
            observed.taken_as_rows(selection, buffers, found)
        if kept:
            timesteps = {i: kept[i] if i in kept else timesteps[i] for i in collected.ids}
        collected.result = timesteps
        self._journal.do(self._redo, collected)
        if self._has_spares or collected.odd or Phase.RESETTING in self._table.phases.column:
            self._go_on(collected)
        return timesteps

    def arrays(self, collected: Collected) -> ArrayBatch | None:
        """Read what was taken, and hand it out as arrays.

        Returns:
            None if the arrays have to be put together from `timesteps`: nothing was handed out.
        """
        selection, block, remarks = collected.selection, collected.block, collected.remarks
        odd = remarks.specials and remarks.have_rewards_of_different_shapes
        if selection is None or block is None or collected.kept or odd:
            return None
        usual, window, observed = remarks.usual, selection.window, self._table.observed
        arena = collected.arena
        obs = None if arena is None else arena.batch(selection, collected.buffers)
        if obs is None:  # they are of several layouts
            return None
        if collected.said is not None and window is not None:
            is_new = collected.said not in selection.recipes
            if is_new and arena is not None and not arena.has_texts:
                self._note_recipe(selection, window, arena, collected.said)
            if collected.in_c is not None:
                none, numbers = selection.none.copy, window.rewards.copy
                parts = selection.array, obs, numbers(), none(), none(), BatchInfos(remarks)
                batch = _make_batch(parts)
                self._deliver_in_c(collected, batch, in_arena=True)
                return batch
        if window is not None and usual < _WIDE:
            rewards = window.rewards.copy()
        else:
            rewards = block.reward_numbers(usual >> REWARD_SHIFT, selection.rows)
            rewards = rewards.copy() if selection.is_slice else rewards
        observed.taken_as_batch(selection, collected.buffers)
        batch = _make_batch((selection.array, obs, rewards, *_ends(remarks), BatchInfos(remarks)))
        collected.result = batch
        self._journal.do(self._redo, collected)
        if self._has_spares or collected.odd or Phase.RESETTING in self._table.phases.column:
            self._go_on(collected)
        return batch

    def _note_recipe(
        self, selection: Selection, window: Window, arena: Arena | Arenas, flags: int
    ) -> None:
        """Have `take_arrays` hand out later timesteps with these flags in C, ends included.

        Args:
            selection: the envs.
            window: their rows.
            arena: where their observations are; there are no texts among them.
            flags: the flags of timesteps that end no episode.
        """
        none = selection.none.copy
        obs, rewards = arena.maker(selection, flags & BUFFER_BITS), window.rewards.copy
        infos = (
            partial(self._batch_infos, selection, flags)
            if flags & HAS_INFO
            else partial(BatchInfos, Remarks(flags, selection.count))
        )
        makers = obs, rewards, none, none, infos
        ended = partial(self._ended, selection, flags) if self._episodes.ends_in_place else None
        types = HandedOut, Returning
        recipe = ArrayBatch, selection.array, makers, ended, self._end_in_place, *types
        selection.recipes[flags] = recipe

    def _ended(
        self,
        selection: Selection,
        flags: int,
        ends: Mapping[int, int],
        begun: Mapping[int, int],
    ) -> tuple[Any, Any, BatchInfos] | None:
        """Return terminated, truncated and infos of envs, some of which ended episodes in place.

        Args:
            selection: the envs.
            flags: the flags of the envs that ended none.
            ends: the flags of the envs that ended one, by position.
            begun: as in `HandedOut`.

        Returns:
            None if one of these ends needs a closer look.
        """
        if not self._episodes.may_end_in_place(begun):
            return None
        infos = self._infos_of_all(selection) if flags & HAS_INFO else None
        if infos is None and flags & HAS_INFO:
            return None
        remarks = _make_remarks((flags, selection.count, ends, _EMPTY, infos))
        return *_ends(remarks), BatchInfos(remarks)

    # -- the commit -----------------------------------------------------------------------------

    def _deliver_in_c(self, collected: Collected, result: Any, *, in_arena: bool) -> None:
        """Hand ordinary timesteps out; in C all of it happens at once."""
        journal, statistics = self._journal, self._statistics
        collected.result, collected.endings = result, ()
        collected.n_episodes = statistics.episodes
        timesteps = collected.n_before + collected.count
        returning = _make_returning((collected, journal.caller))
        if not collected.in_c.deliver(returning, collected.buffers, in_arena, timesteps):
            statistics.cancelled -= collected.count  # as in `_redo`
        if self._has_spares or Phase.RESETTING in self._table.phases.column:
            self._go_on(collected)

    def _redo(self, collected: Collected, again: bool) -> None:
        """Note that envs whose timesteps were read are ready, or at the end of their episodes."""
        journal, statistics, endings = self._journal, self._statistics, collected.endings
        if endings is None:  # so nothing was changed so far
            has_ends = collected.remarks.specials and not collected.begun
            endings = self._endings(collected) if has_ends else ()
            collected.n_episodes = statistics.episodes + len(endings)
            collected.endings = endings
        journal.returning = Returning(collected, journal.caller)
        is_closed = self._table.states.column[collected.ids[0]] == EnvState.VOID
        if is_closed and statistics.timesteps == collected.n_before:
            # A signal handler has closed it since they were taken, which cancelled them, too.
            statistics.cancelled -= collected.count
        self._table.delivered(collected.selection, collected.kept)
        statistics.timesteps = collected.n_before + collected.count
        if endings:
            # The hosts have already followed up the ends of most episodes.
            collected.odd = odd = (
                self._episodes.end_plainly(endings) if self._resets_plainly else endings
            )
            statistics.episodes = collected.n_episodes - len(odd)
        elif collected.begun:
            self._end_in_place(collected, again)

    def _end_in_place(self, handed: HandedOut, again: bool) -> None:
        """End episodes, and begin the next ones, with timesteps that were handed out."""
        beginnings = handed.beginnings
        if beginnings is None:  # so nothing of this was noted so far
            beginnings = self._episodes.beginnings(handed.begun)
            handed.n_episodes = self._statistics.episodes + len(beginnings)
            handed.beginnings = beginnings
        self._table.ended_in_place(beginnings, handed.reset_infos)
        self._statistics.episodes = handed.n_episodes

    def _endings(self, collected: Collected) -> list[Ending]:
        """Return the ends of episodes among the timesteps that were taken out of the block."""
        selection, episodes_done = collected.selection, self._table.episodes_done
        if selection is None:
            return []
        return [
            _make_ending((env_id := selection.ids[position], flag, episodes_done[env_id] + 1))
            for position, flag in collected.remarks.specials.items()
            if flag & DONE
        ]

    def follow_up(self, collected: HandedOut) -> None:
        """Follow up the ends of episodes that are not plain ones; must not be interrupted."""
        odd, collected.odd = collected.odd, ()
        for env_id, flag, _ in odd:
            self._episodes.end(self._table.envs[env_id], after_of(flag))

    def give_back(self, collected: HandedOut) -> None:
        """Have envs owe again the timesteps that were handed out by a call that has not returned.

        This must not be interrupted.
        """
        if collected.fate is not None:
            collected.fate.given_back = True
        self.follow_up(collected)
        self._table.undelivered.update(by_env_id(collected.result))
        self._statistics.timesteps = collected.n_before

    def owe(self, timesteps: Mapping[int, EnvTimestep]) -> None:
        """Have envs owe timesteps again that were handed out, except envs that owe one anyway.

        This must not be interrupted.
        """
        again = {i: each for i, each in timesteps.items() if not self._table.owes(i)}
        self._table.undelivered.update(again)
        self._statistics.timesteps -= len(again)


_TERMINATED, _TRUNCATED = TERMINATED << ENDING_SHIFT, TRUNCATED << ENDING_SHIFT


def _infos_of(remarks: Remarks) -> list[Any]:
    """Return the infos of timesteps, given what replies say."""
    usual, count, specials, details, read = remarks
    has_ending = usual >> ENDING_SHIFT & ENDING_GIVEN
    if read is not None:
        infos = read.dicts()
        if has_ending:
            for position, info in enumerate(infos):
                if position not in specials:  # of which some may not say how episodes end
                    info["terminated"] = info["truncated"] = False
    elif has_ending:
        infos = [{"terminated": False, "truncated": False} for _ in range(count)]
    else:
        infos = [{} for _ in range(count)]
    for position, flag in specials.items():
        info = details[position][0] if position in details else infos[position]
        infos[position] = info_of((flag & ENDING_BITS) >> ENDING_SHIFT, info.copy())
    return infos


_NO_END, _NO_INFO = {"terminated": False, "truncated": False}, dict[str, Any]()
"""The infos of ordinary steps, each of which gets a copy: for envs that say how episodes end, and
for those that do not."""


def _ends(remarks: Remarks) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return `terminated` and `truncated` of a batch, given what its replies say."""
    terminated, truncated = bytearray(remarks.size), bytearray(remarks.size)
    for at, flag in remarks.specials.items():
        if flag & ENDING_BITS:
            terminated[at], truncated[at] = flag & _TERMINATED != 0, flag & _TRUNCATED != 0
        else:
            terminated[at], truncated[at] = ends_of(bool(flag & DONE), remarks.details[at][0])
    return np.frombuffer(terminated, np.bool_), np.frombuffer(truncated, np.bool_)


def ends_of(done: bool, info: Any) -> tuple[bool, bool]:
    """Return (terminated, truncated) of a timestep, even if its env does not say how it ended.

    `done` decides whether the episode ended, the info only how. If the info does not say, or
    contradicts `done`, the episode counts as terminated; if the info says only that it is not
    terminated, it counts as truncated. If the info is a list or tuple of infos, it is enough that
    one of them sets a flag; where a flag is given per agent, one agent is enough, too.
    """
    if not done:
        return False, False
    terminated, truncated = _flag_of(info, "terminated"), _flag_of(info, "truncated")
    if not terminated and not truncated:
        truncated = terminated is False and truncated is None
        terminated = not truncated
    return bool(terminated), bool(truncated)


def _flag_of(info: Any, name: str) -> bool | None:
    """Return a flag of an info; None if the info does not have it."""
    if isinstance(info, dict):
        flag = info.get(name)
        if isinstance(flag, dict):
            return any(flag.values())
        return None if flag is None else bool(flag)
    given = [part[name] for part in info if name in part] if isinstance(info, (list, tuple)) else []
    return any(given) if given else None


class BatchInfos(Sequence[dict[str, Any]]):
    """The infos of steps, which are made when one of them is asked for.

    Args:
        remarks: the remarks of their replies.
    """

    __slots__ = ("_infos", "_remarks")

    def __init__(self, remarks: Remarks) -> None:
        self._remarks = remarks
        self._infos: tuple[dict[str, Any], ...] | None = None

    @property
    def are_ordinary(self) -> bool:
        """Whether none of the steps has anything special about it."""
        return not self._remarks.specials

    @property
    def has_any(self) -> bool:
        """Whether there are infos that hold more than `terminated` and `truncated`."""
        _, _, _, details, read = self._remarks
        return read is not None or any(info for info, _ in details.values())

    @property
    def told(self) -> Sequence[int]:
        """The positions of infos that hold more than `terminated` and `truncated`, ascending."""
        details, read = self._remarks.details, self._remarks.infos
        told = [position for position, (info, _) in details.items() if info]
        if read is not None:
            told = sorted({*told, *(k for k in read.told if k not in details)})
        return told

    @property
    def abnormal(self) -> Sequence[int]:
        """The positions of abnormal steps, ascending; their infos are always among the details."""
        details = self._remarks.details
        if not details:
            return []  # not (): that would index all
        return [position for position, (info, _) in details.items() if is_abnormal(info)]

    def columns(self) -> InfoColumns:
        """Return the infos as columns, as `ArrayBatch` has them."""
        details, read = self._remarks.details, self._remarks.infos
        if read is None and not details:
            return InfoColumns({}, np.ones(len(self), np.bool_))
        if type(read) is RecordBatch and not (
            read.odd and any(details[k][0] for k in read.odd if k in details)
        ):
            return without_ends(read.columns())
        infos = [_NO_INFO] * len(self) if read is None else list(read.dicts())
        for position, (info, _) in details.items():
            infos[position] = info
        return columns_of(infos)

    def rewards(self, numbers: npt.NDArray[np.float64]) -> list[Any]:
        """Return the rewards of the same steps, as the envs gave them, given their numbers."""
        rewards = restored(self._remarks.usual >> REWARD_SHIFT, numbers)
        for position, (_, reward) in self._remarks.details.items():
            rewards[position] = reward
        return rewards

    def __len__(self) -> int:
        return self._remarks.size

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self._made()[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._made())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made() == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._made())

    def _made(self) -> tuple[dict[str, Any], ...]:
        if self._infos is None:
            remarks = self._remarks
            if type(remarks.infos) is HandedBatch:  # which does not make them anew each time
                self._remarks = remarks._replace(infos=remarks.infos.copy())
            self._infos = tuple(_infos_of(remarks))
        return self._infos


def _others(raw: bytes, ordinary: range, odd: Collection[int]) -> list[tuple[int, int]]:
    """Return (position, flag) of all flags outside `ordinary`, and of those at odd positions."""
    flags: Any = np.frombuffer(raw, np.uint16)
    if len(flags) <= _FEW:
        listed = enumerate(flags.tolist())
        return [(k, flag) for k, flag in listed if flag not in ordinary or k in odd]
    found = (flags - np.uint16(ordinary.start) >= len(ordinary)).nonzero()[0]  # lesser ones wrap
    if odd:
        found = np.array(sorted({*found.tolist(), *odd}))
    return list(zip(found.tolist(), flags[found].tolist(), strict=True))


_FEW = 16
"""Up to this many envs are looked at one by one rather than as an array."""
_POSTED = np.uint8(Phase.POSTED)
_NO_REMARKS = Remarks(0, 0)
_WITHOUT_INFO = bytes(byte for byte in range(256) if not byte << 8 & HAS_INFO)
"""The upper bytes of flags that say that there is no info."""
_BUFFER_OF = bytes(byte & BUFFER_BITS for byte in range(256))
_ODD_BITS = np.uint16(0xFFFF & ~ENDING_GIVEN_BIT)
"""A reply without any of these bits is not malformed: its observation is in the first buffer."""
