"""Replies of workers: they are matched to requests, checked, and applied to the envs.

The trainer does not trust what a worker sends or writes into the block. It checks only what it
reads itself; what it passes on to users unchanged (infos, results of calls) is the env's own
business.
"""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from envmgr.core import failures
from envmgr.core.episodes import Episodes
from envmgr.core.failures import Lost, Repair
from envmgr.core.hosts import Hosts
from envmgr.core.phases import AWAITED, Phase
from envmgr.core.setup import EnvSetup
from envmgr.core.spares import Spares
from envmgr.core.statistics import Statistics
from envmgr.core.table import NEVER, EnvTable, HostGroup, ManagedEnv, Selection
from envmgr.env.contract import info_of
from envmgr.errors import EnvFailure
from envmgr.hot import hot
from envmgr.journal import Journal
from envmgr.lifecycle import EnvState, Event
from envmgr.spaces import Array, ValueMismatchError, codec_of, same_space
from envmgr.texts import logged
from envmgr.transport.base import Arrival, Garbage, HostDied, TimedOut
from envmgr.transport.process.last_words import warn_of_fault
from envmgr.types import EnvTimestep
from envmgr.wire.arenas import Buffers
from envmgr.wire.block import (
    AFTER_BITS,
    AFTER_SHIFT,
    BUFFER_BITS,
    DONE,
    ENDING_BITS,
    ENDING_SHIFT,
    HAS_INFO,
    MAX_REQUEST_ID,
    RESETS_IN_NEXT_STEP,
    REWARD_BITS,
    REWARD_SHIFT,
    Block,
    items,
)
from envmgr.wire.info_columns import InfoColumns, columns_of
from envmgr.wire.info_forms import InfoForm, RecordBatch, RecordRow, RecordTable
from envmgr.wire.infos import InfoDecoder
from envmgr.wire.messages import (
    UNANSWERED,
    AfterStep,
    EnvDescription,
    FailureKind,
    Message,
    Op,
    RemoteFailure,
    SavedEnv,
)
from envmgr.wire.rewards import KINDS, restored

MAX_NOTICES = 100
"""The largest number of different notices that are logged for one manager."""

MAX_NOTICE_CHARACTERS = 1000

NO_NEXT_STEP = "it says that its next episode begins with a step of others, but there are none"

_LAST_AFTER_STEP = max(AfterStep)


class MalformedReplyError(ValueError):
    """A reply whose payload does not follow the protocol."""


def step_fields(payload: Any) -> tuple[Any, Any, bool, Any, int]:
    """Return the payload of STEPPED: (reference, reward, done, info, after).

    Raises:
        MalformedReplyError: the payload is something else.
    """
    fields: tuple[Any, Any, Any, Any, Any]
    fields = payload if type(payload) is tuple and len(payload) == 5 else _fields(payload, 5)
    _, _, done, info, after = fields
    if type(done) is not bool:
        raise MalformedReplyError(f"it says that done is a {type(done).__name__}")
    if not isinstance(after, int) or not 0 <= after <= _LAST_AFTER_STEP:
        raise MalformedReplyError("it says something unknown of what follows a step")
    if type(info) is not dict and not isinstance(info, (Mapping, list, tuple)):
        raise MalformedReplyError(f"its info is a {type(info).__name__}")
    return fields


def reset_fields(payload: Any) -> tuple[Any, Any]:
    """Return the payload of RESET_DONE: (reference, info).

    Raises:
        MalformedReplyError: the payload is something else.
    """
    fields: tuple[Any, Any] = _fields(payload, 2)
    if not isinstance(fields[1], Mapping):
        raise MalformedReplyError(f"the info of its reset is a {type(fields[1]).__name__}")
    return fields


def saved_of(payload: Any) -> SavedEnv:
    """Return the payload of SAVED.

    Raises:
        MalformedReplyError: the payload is something else.
    """
    if type(payload) is not SavedEnv or type(payload.state) is not bytes:
        raise MalformedReplyError("what it wants to have saved is no state of an env")
    return payload


def _fields(payload: Any, count: int) -> Any:
    if not isinstance(payload, tuple) or len(payload) != count:
        raise MalformedReplyError(f"a payload of {type(payload).__name__} is malformed")
    return payload


def description_of(payload: Any) -> EnvDescription:
    """Return the payload of HELLO, with spaces that can be compared and laid out.

    Raises:
        MalformedReplyError: the payload is something else, or a space raises when it is inspected.
    """
    flags = ("resets_alone", "is_async", "params_are_options")
    if type(payload) is not EnvDescription or any(
        type(getattr(payload, flag)) is not bool for flag in flags
    ):
        raise MalformedReplyError("its first reply does not describe an env")
    for name in ("observation_space", "action_space"):
        space = getattr(payload, name)
        try:
            bool(codec_of(space).layout)  # whether they can be laid out at all
            same_space(space, space)  # and compared
        except Exception as error:  # a space of the env's own, or half of one
            raise MalformedReplyError(
                f"its {name} cannot be looked at: {type(error).__name__}"
            ) from error
    return payload


def failure_of(payload: Any) -> RemoteFailure:
    """Return the payload of FAILED, whose texts have been checked to be strings.

    Raises:
        MalformedReplyError: the payload is something else.
    """
    if type(payload) is not RemoteFailure:
        raise MalformedReplyError("it reports a failure that is none")
    fields = vars(payload)
    texts = (fields.get(name) for name in ("during", "type_name", "message", "traceback_text"))
    if type(fields.get("kind")) is not FailureKind or any(type(text) is not str for text in texts):
        raise MalformedReplyError("it reports a failure that is malformed")
    return payload


def form_given(payload: Any) -> InfoForm:
    """Return the form that the payload of INFO_FORM describes.

    Raises:
        MalformedReplyError: the payload describes none.
    """
    try:
        return InfoForm(payload if type(payload) is tuple else ())
    except (ValueError, TypeError) as error:
        raise MalformedReplyError(f"it gives a form of infos that is none: {error}") from error


def notice_of(payload: Any) -> str:
    """Return the payload of NOTICE, cut to a reasonable length.

    Raises:
        MalformedReplyError: the payload is not a string.
    """
    if type(payload) is not str:
        raise MalformedReplyError(f"a notice of {type(payload).__name__} is malformed")
    return payload[:MAX_NOTICE_CHARACTERS]


_STEPS = (np.uint8(Phase.STEPPING), np.uint8(Phase.CANCELLING))
_RESETTING = np.uint8(Phase.RESETTING)


def after_of(flag: int) -> int:
    """Return what a host does after a step whose reply has these flags: an `AfterStep`."""
    return (flag & AFTER_BITS) >> AFTER_SHIFT


class BlockReplies:
    """A reader of replies that hosts write into the block, in place of messages.

    Args:
        buffers: the buffers that observations are in.
        may_reset_in_next_step: whether the next episode of an env may begin with a step of others.
        forms: the forms of infos that hosts may write, by number.
    """

    def __init__(
        self,
        block: Block,
        buffers: Buffers,
        may_reset_in_next_step: Callable[[int], bool],
        forms: dict[int, InfoForm],
    ) -> None:
        self._block = block
        self._buffers = buffers
        self._may_reset_in_next_step = may_reset_in_next_step
        self._of_resets = range(buffers.steps, buffers.count)
        self._reset_flags = items(block.reset_flags)
        self._decoder = InfoDecoder()
        self._forms = forms
        self._handed_over = block.plan.handed_over

    # -- who has replied ----------------------------------------------------------------------

    def has_step(self, env_id: int, token: int) -> bool:
        """Whether an env has replied to this step."""
        return bool(self._block.replies[env_id] == token)

    def has_reset(self, env_id: int, token: int) -> bool:
        """Whether an env has been reset, as this request asked for or after this step."""
        return bool(self._block.resets[env_id] == token)

    def not_reset(self, env_ids: list[int], tokens: Array) -> list[int]:
        """Return which of these envs have not been reset after the steps with these tokens."""
        missing = (self._block.resets[env_ids] != tokens).nonzero()[0].tolist()
        return [env_ids[k] for k in missing]

    def steps_of(self, table: EnvTable) -> list[int]:
        """Return the envs that have replied to steps that are tracked individually."""
        found: list[int] = []
        for phase in _STEPS:
            if phase in table.phases.column:
                found += table.answered(self._block.replies, phase).nonzero()[0].tolist()
        return found

    def resets_of(self, table: EnvTable) -> list[int]:
        """Return the envs whose awaited reset is over."""
        found = table.answered(self._block.resets, _RESETTING)
        env_ids: list[int] = found.nonzero()[0].tolist()
        return env_ids

    def running_in(self, index: int) -> int:
        """Return the env that a host says it was running when something happened to it.

        The result is -1 if it was running none. This also clears the entry of that host, which the
        next host goes on to use.
        """
        running = int(self._block.running[index]) - 1
        self._block.running[index] = 0
        return running

    # -- what they have replied ---------------------------------------------------------------

    def resets(self, env_ids: Collection[int]) -> tuple[dict[int, int], dict[int, dict[str, Any]]]:
        """Return the buffers with the observations of resets, and the resets' infos, by env_id.

        An env that is missing from the infos only has sent none; the reply of one that is missing
        from the buffers is malformed.
        """
        flags, buffers = self._reset_flags, self._of_resets
        found = {env_id: flag for env_id in env_ids if (flag := flags[env_id]) in buffers}
        infos: dict[int, dict[str, Any]] = {}
        if len(found) < len(env_ids):
            for env_id in [i for i in env_ids if i not in found]:
                with suppress(ValueMismatchError):
                    found[env_id], infos[env_id] = self.reset(env_id)
        return found, infos

    def detail(self, env_id: int, flag: int) -> tuple[Any, Any]:
        """Return the info and the reward in the reply to a step.

        Raises:
            ValueMismatchError: the reply is malformed.
        """
        if flag & BUFFER_BITS >= self._buffers.steps:
            raise ValueMismatchError(f"there is no buffer {flag & BUFFER_BITS} for steps")
        if after_of(flag) > _LAST_AFTER_STEP:
            raise ValueMismatchError("it says something unknown of what follows a step")
        if flag & AFTER_BITS == RESETS_IN_NEXT_STEP and not self._may_reset_in_next_step(env_id):
            raise ValueMismatchError(NO_NEXT_STEP)
        info: dict[str, Any] = {}
        if flag & HAS_INFO:
            info = self._info(env_id)
        kind = (flag & REWARD_BITS) >> REWARD_SHIFT
        if kind >= KINDS:
            raise ValueMismatchError(f"there is no kind {kind} of rewards")
        if kind == 0:
            return info, float(self._block.rewards[env_id])
        numbers = self._block.reward_numbers(kind, slice(env_id, env_id + 1))
        try:
            return info, restored(kind, numbers)[0]
        except (ValueError, OverflowError) as error:  # no integer is NaN or infinite
            raise ValueMismatchError(f"its reward cannot be {numbers[0]}") from error

    def step(self, env_id: int) -> tuple[int, Any, bool, Any, int]:
        """Return the reply to a step as the payload of STEPPED.

        Raises:
            ValueMismatchError: the reply is malformed.
        """
        flag = int(self._block.flags[env_id])
        info, reward = self.detail(env_id, flag)
        info = info_of((flag & ENDING_BITS) >> ENDING_SHIFT, info)
        return flag & BUFFER_BITS, reward, bool(flag & DONE), info, after_of(flag)

    def reset(self, env_id: int) -> tuple[int, dict[str, Any]]:
        """Return the reply to a reset as the payload of RESET_DONE.

        Raises:
            ValueMismatchError: the reply is malformed.
        """
        flag = int(self._block.reset_flags[env_id])
        buffer = flag & BUFFER_BITS
        if not self._buffers.steps <= buffer < self._buffers.count:
            raise ValueMismatchError(f"there is no buffer {buffer} for resets")
        if not flag & HAS_INFO:
            return buffer, {}
        return buffer, self._reset_info(env_id)

    # -- infos ----------------------------------------------------------------------------------

    def infos(
        self, selection: Selection, raw: bytes | None = None
    ) -> RecordBatch | HandedBatch | None:
        """Return the infos of steps, as far as they can be read together.

        Args:
            selection: the envs.
            raw: the flags of their replies; None if all of them say that there is an info.

        Returns:
            None if they cannot be read together, or one is malformed.
        """
        rows, handed_over = selection.rows, self._handed_over
        odd = _without_info(raw) if raw is not None and raw != raw[:2] * selection.count else []
        if handed_over is not None:
            infos = handed_over.infos
            found = infos[rows] if selection.is_slice else [infos[i] for i in selection.ids]
            return _handed_batch(found, odd)
        block = self._block
        if hot is not None and selection.is_slice and not odd:
            copied = hot.records(
                block.infos, block.info_forms, rows.start, selection.count, self._forms
            )
            if copied is not None:
                form, data, presence = copied
                return self._records(form, data, selection.count, presence)
        numbers = block.info_forms[rows].tobytes()
        number = numbers[0]
        if odd or numbers.count(number) != selection.count:
            given = bytearray(numbers)
            for position in odd:
                given[position] = _NO_FORM
            number = max(set(given) - {_NO_FORM}, key=given.count, default=_NO_FORM)
            odd = [k for k, one in enumerate(given) if one != number]
        known = self._forms.get(number)
        if known is None:
            return None
        # A copy: the data must not change while it is read.
        data = bytearray(block.infos[rows, : known.nbytes].tobytes())
        return self._records(known, data, selection.count, None, odd)

    def _records(
        self,
        form: InfoForm,
        data: bytearray,
        count: int,
        presence: int | None,
        odd: Sequence[int] = (),
    ) -> RecordBatch | None:
        try:
            return form.batch(data, count, presence, odd)
        except ValueMismatchError:
            return None

    def _info(self, env_id: int) -> dict[str, Any]:
        if self._handed_over is not None:
            info = self._handed_over.infos[env_id]
            return self._taken(info.info() if type(info) is RecordRow else info)
        return self._decoded(self._block.infos[env_id], self._block.info_forms[env_id])

    def _reset_info(self, env_id: int) -> dict[str, Any]:
        if self._handed_over is not None:
            return self._taken(self._handed_over.reset_infos[env_id])
        return self._decoded(self._block.reset_infos[env_id], self._block.reset_info_forms[env_id])

    def _taken(self, info: dict[str, Any] | None) -> dict[str, Any]:
        if info is None:
            raise ValueMismatchError("it says that there is an info, and there is none")
        return info

    def _decoded(self, data: Array, number: Any) -> dict[str, Any]:
        if number == 0:
            return self._decoder.decode(data.tobytes())
        form = self._forms.get(int(number))
        if form is None:
            raise ValueMismatchError(f"there is no form {number} of infos")
        return form.read(data.tobytes())


_NO_FORM = 255


def _without_info(raw: bytes) -> list[int]:
    """Return the positions of flags that say that there is no info."""
    flags: Any = np.frombuffer(raw, np.uint16)
    found: list[int] = (flags & np.uint16(HAS_INFO) == 0).nonzero()[0].tolist()
    return found


def _handed_batch(found: list[Any], odd: Sequence[int]) -> RecordBatch | HandedBatch:
    """Return a batch of infos that were handed over; those of vector envs may be records."""
    kinds = set(map(type, found))
    if RecordRow in kinds:
        if len(kinds) == 1 and not odd and len(tables := set(map(_table_of, found))) == 1:
            return tables.pop().batch(list(map(_row_of, found)))
        found = [one.info() if type(one) is RecordRow else one for one in found]
    return HandedBatch(found, odd)


_table_of: Callable[[RecordRow], RecordTable] = operator.attrgetter("records")
_row_of: Callable[[RecordRow], int] = operator.attrgetter("row")


class HandedBatch:
    """The infos of k rows that were handed over as they are.

    Args:
        infos: the infos.
        odd: the positions of rows that have no info.

    Attributes:
        odd: the same positions.
    """

    __slots__ = ("_infos", "odd")

    def __init__(self, infos: list[dict[str, Any]], odd: Sequence[int]) -> None:
        self._infos = infos
        self.odd = odd

    def dicts(self) -> list[dict[str, Any]]:
        """Return the infos; they are the same objects each time."""
        infos = self._infos
        for position in self.odd:
            infos[position] = {}
        return infos

    def copy(self) -> HandedBatch:
        """Return a batch with copies of the infos, which do not change when the originals do."""
        return HandedBatch(list(map(dict.copy, self.dicts())), self.odd)

    def columns(self) -> InfoColumns:
        """Return the infos as columns."""
        return columns_of(self.dicts())

    @property
    def told(self) -> list[int]:
        """The positions of infos that are not empty, ascending."""
        return [k for k, info in enumerate(self.dicts()) if info]


_IN_A_STEP = (Phase.POSTED, Phase.STEPPING)
_make_timestep = partial(tuple.__new__, EnvTimestep)


class ReplyEffects:
    """The effects that replies have on the table.

    Each method raises ValueMismatchError or MalformedReplyError if its reply does not follow the
    protocol; nothing was changed then.

    Args:
        hosts: what is awaited of which host.
        statistics: where things are counted.
        journal: the journal that the changes of each step go through.
        setup: what envs are told first.
        episodes: how episodes begin and end.
        spares: the spares, told when one of them has been reset; None if there are none.
    """

    def __init__(
        self,
        hosts: Hosts,
        statistics: Statistics,
        journal: Journal,
        setup: EnvSetup,
        episodes: Episodes,
        repair: Repair,
        spares: Spares | None,
    ) -> None:
        self._hosts = hosts
        self._table = hosts.table
        self._states = hosts.table.states
        self._statistics = statistics
        self._journal = journal
        self._setup = setup
        self._episodes = episodes
        self._repair = repair
        self._spares = spares
        self._noticed: set[str] = set()
        self._gave_up_forms = False

    def notice(self, env: ManagedEnv, payload: Any) -> None:
        """Log the payload of NOTICE, once."""
        text = notice_of(payload)
        if self._repair.quiet:
            return
        if text not in self._noticed and len(self._noticed) < MAX_NOTICES:
            self._noticed.add(text)
            logged(logging.WARNING, "observations of %s: %s (reported once)", env.name, text)

    def info_form(self, env: ManagedEnv, payload: Any) -> None:
        """Apply the payload of INFO_FORM: number the form, or log that there is none."""
        if payload is not None:
            self._setup.number(form_given(payload))
        elif not self._gave_up_forms and not self._repair.quiet:
            self._gave_up_forms = True
            logged(
                logging.INFO,
                "infos of %s have no stable form: they are written and read one by one, which "
                "takes longer (reported once)",
                env.name,
            )

    def saved(self, env: ManagedEnv, payload: Any) -> None:
        """Keep the payload of SAVED."""
        self._episodes.restorations.saved[env.env_id] = saved_of(payload)

    def hello(self, env: ManagedEnv, payload: Any) -> bool:
        """Apply the payload of HELLO; False if a renewed env has other spaces than before."""
        description = description_of(payload)
        if description.is_async and not env.group.is_async:
            self._hosts.limits.goes_on(env.group)
        fits = self._setup.fits(env, description)
        if self._table.launching and env.generation == 0:
            self._hosts.settle(env)
            return True  # the engine goes on when all of them are there
        if not fits:
            return False
        self._hosts.settle(env)
        self._setup.introduce(env)
        if env.attended:
            self._episodes.begin(env)
            return True
        if self._states[env.env_id] is EnvState.INIT:
            self._table.happened(env.env_id, Event.REPAIRED_UNATTENDED)
        self._episodes.replace_host(env.group)
        return True

    def reset_done(self, env: ManagedEnv, payload: Any) -> None:
        """Apply the payload of RESET_DONE."""
        env.group.obsolete_requests.clear()
        env.left_with = UNANSWERED
        if env.is_spare:
            self._kept(env, payload)
            return
        reference, info = reset_fields(payload)
        obs = self._table.observed.read(env.env_id, reference)
        self._episodes.count_reset(env)
        if env.again:
            self._episodes.begin(env)
            return
        self._episodes.use_up_seed(env)
        self._hosts.settle(env)
        restoration = self._episodes.restorations.succeeded(env)
        if restoration is not None and restoration.known is None:
            self._statistics.resumed += 1
        if self._statistics.failing:
            self._statistics.note_ready(env.env_id, env.generation, self._hosts.clock())
        if env.failed_while_ready is not None:
            env.fresh = (obs, info)
            return
        env.obs = obs
        self._episodes.begun(env, info)
        if restoration is not None and restoration.known is not None:
            self._episodes.restored(env, restoration.known)
            return
        failure = self._table.lost_beside(env.env_id)
        if failure is not None:  # nobody has seen this episode: it begins again with the others'
            env.failed_while_ready, env.fresh = failures.of_neighbour(env, failure), (obs, info)

    def worn(self, env: ManagedEnv, payload: Any) -> None:
        """Apply WORN: leave the requested reset to the next host, if this one can end now."""
        if env.left_with != env.request_id:
            raise MalformedReplyError("it wants to be replaced in a reset that leaves no episode")
        env.group.obsolete_requests.clear()
        self._hosts.settle(env)
        self._episodes.worn(env)

    def _kept(self, spare: ManagedEnv, payload: Any) -> None:
        if payload is not None or self._spares is None:
            raise MalformedReplyError("it hands out what it was told to keep")
        self._spares.reset_succeeded(spare)

    def stepped(self, env: ManagedEnv, payload: Any) -> None:
        """Apply the payload of STEPPED."""
        reference, reward, done, info, after = step_fields(payload)
        may_reset = self._table.may_reset_in_next_step
        if after == AfterStep.RESETS_IN_NEXT_STEP and not may_reset(env.env_id):
            raise MalformedReplyError(NO_NEXT_STEP)
        if env.phase is Phase.CANCELLING:
            self._episodes.abandon(env, after, done=done)
            return
        env.obs = obs = self._table.observed.read(env.env_id, reference)
        env.timestep = EnvTimestep(obs, reward, done, info)
        if not done:
            self._hosts.settle(env)
            self._table.happened(env.env_id, Event.STEPPED)
        else:
            self._episodes.end(env, after)

    def step_on(self, arrivals: deque[tuple[int, Arrival]]) -> None:
        """Apply the first arrivals, up to one that is not a step after which its episode goes on.

        Args:
            arrivals: the queue of what has arrived; the applied steps are removed from it.
        """
        came = list(arrivals)  # a signal handler that closes the manager changes them
        timesteps = self._ordinary(came)
        if timesteps:
            del came[len(timesteps) :]
            self._journal.do(self._step_on, (arrivals, came, timesteps))

    def _step_on(
        self,
        came: tuple[deque[tuple[int, Arrival]], list[tuple[int, Arrival]], dict[int, EnvTimestep]],
        again: bool,
    ) -> None:
        arrivals, first, timesteps = came
        self._table.arrived(timesteps)
        with suppress(IndexError):  # a signal handler has closed the manager meanwhile
            for arrival in first:
                if arrivals and arrivals[0] is arrival:  # else it has left the queue before
                    arrivals.popleft()

    def _ordinary(self, arrivals: Iterable[tuple[int, Arrival]]) -> dict[int, EnvTimestep]:
        """Return the timesteps of the first arrivals, up to one that is not an ordinary step."""
        table, groups = self._table, self._hosts.group_of_host
        tokens, phases, read = table.token_items, table.phases.column, table.observed.read
        found: dict[int, EnvTimestep] = {}
        for host_id, message in arrivals:
            group = groups.get(host_id)
            if type(message) is not Message or group is None:
                break
            op, env_id, generation, request_id, payload = message
            env = group.by_id.get(env_id)
            if op != Op.STEPPED or env is None or group.running is not None or group.is_ending:
                break
            is_awaited = generation == env.generation and phases[env_id] in _IN_A_STEP
            if not is_awaited or tokens[env_id] & MAX_REQUEST_ID != request_id or env_id in found:
                break
            try:
                reference, reward, done, info, _ = step_fields(payload)
                if done:
                    break
                obs = read(env_id, reference)
            except (ValueMismatchError, MalformedReplyError):
                break
            env.deadline = NEVER
            found[env_id] = _make_timestep((obs, reward, done, info))
        return found

    def result(self, env: ManagedEnv, payload: Any) -> None:
        """Keep the payload of RESULT, or the failure that takes its place."""
        env.result = payload
        self._repair.call_ended(env)


_NOT_BUSY = {Phase.IDLE, Phase.PAUSING, Phase.ENDING}
_STEP_PHASES = (Phase.STEPPING, Phase.CANCELLING)
AWAITED_IN: dict[int, frozenset[Phase]] = {
    Op.HELLO: frozenset((Phase.STARTING,)),
    Op.STEPPED: frozenset(_STEP_PHASES),
    Op.RESET_DONE: frozenset((Phase.RESETTING,)),
    Op.WORN: frozenset((Phase.RESETTING,)),
    Op.RESULT: frozenset((Phase.CALLING,)),
    Op.CLOSED: frozenset((Phase.ENDING,)),
    **dict.fromkeys((Op.FAILED, Op.BEGAN), frozenset(Phase) - _NOT_BUSY),
}

_ASIDE = frozenset((Op.NOTICE, Op.SAVED, Op.INFO_FORM))
_GOES_ON = frozenset((Op.BEGAN, *_ASIDE))
"""Messages that do not mean that a host has finished something. Those in `_ASIDE` do not answer
any request."""


class ReplyDispatcher:
    """A dispatcher of messages that arrive, and of replies in the block, but for posted steps.

    Args:
        hosts: which host serves which env.
        statistics: where things are counted.
        journal: the journal that the changes of each step go through.
        answers: what the answers of hosts mean.
        raise_non_finite: whether NaN or infinite values end the run.
    """

    def __init__(
        self,
        hosts: Hosts,
        statistics: Statistics,
        journal: Journal,
        answers: ReplyEffects,
        episodes: Episodes,
        repair: Repair,
        *,
        raise_non_finite: bool,
    ) -> None:
        self._hosts = hosts
        self._table = hosts.table
        self._statistics = statistics
        self._journal = journal
        self._answers = answers
        self._episodes = episodes
        self._repair = repair
        self._raise_non_finite = raise_non_finite
        self._replies: BlockReplies | None = None
        self._handlers: dict[int, Callable[[ManagedEnv, Any], None]] = {
            Op.HELLO: self._on_hello,
            Op.STEPPED: answers.stepped,
            Op.RESET_DONE: answers.reset_done,
            Op.WORN: answers.worn,
            Op.RESULT: answers.result,
            Op.FAILED: self._on_failed,
            Op.CLOSED: self._on_closed,
            Op.BEGAN: self._on_began,
            Op.NOTICE: answers.notice,
            Op.SAVED: answers.saved,
            Op.INFO_FORM: answers.info_form,
        }

    def share(self, replies: BlockReplies | None) -> None:
        """Read the replies in the block, too, from now on; with None, stop reading them."""
        self._replies = replies

    # -- messages -----------------------------------------------------------------------------

    def handle(self, host_id: int, arrival: Arrival) -> None:
        """Apply what came from a host, after what it had already replied in the block.

        Raises:
            NoMemoryYet: the arrival was not applied, and has to be handled again.
        """
        group = self._hosts.group_of_host.get(host_id)
        if group is None:
            return
        if type(arrival) is Message:
            env = group.by_id.get(arrival.env_id)
            if env is None:
                self._on_unexpected(group.blamed(), arrival)
                return
            if arrival.op not in _ASIDE:
                self._apply_replied((env,))
            self._on_message(env, arrival)
            return
        self._apply_replied(group.envs)
        self._find_running(group)
        if type(arrival) is HostDied:
            group.running = group.running or group.by_id.get(arrival.running)
            self._on_death(group, arrival)
        elif type(arrival) is TimedOut:
            for env in (s for s in group.envs if s.request_id == arrival.request_id):
                self._fail(env, failures.timeout(env, *arrival[1:]), Lost.HOST)
        elif type(arrival) is Garbage:
            self._break_off(group.blamed(), arrival.reason)

    def _on_message(self, env: ManagedEnv, message: Message) -> None:
        op, _, generation, request_id, payload = message
        group, running = env.group, env.group.running
        if running is not None and op not in _GOES_ON:
            self._hosts.limits.finished(group)
        if op in _ASIDE:
            self._checked(self._handlers[op], env, payload)
        elif group.is_ending and op != Op.CLOSED:
            self._statistics.dropped_replies += 1
        elif request_id == UNANSWERED:
            self._on_unawaited(env, op, payload)
        elif (
            request_id != env.request_id
            or generation != env.generation
            or env.phase not in AWAITED_IN.get(op, ())
        ):
            culprit = running or (group.blamed() if group.is_shared else env)
            self._on_unexpected(culprit, message)
        else:
            self._checked(self._handlers[op], env, payload)

    def _checked(
        self, handler: Callable[[ManagedEnv, Any], None], env: ManagedEnv, payload: Any
    ) -> None:
        try:
            handler(env, payload)
        except (ValueMismatchError, MalformedReplyError) as error:
            self._break_off(env, str(error))

    def _on_unexpected(self, culprit: ManagedEnv, message: Message) -> None:
        if (
            message.request_id in culprit.group.obsolete_requests
        ):  # asked of it before it changed places
            if message.op == Op.NOTICE:
                self._checked(self._answers.notice, culprit, message.payload)
            return
        self._statistics.dropped_replies += 1
        op, env_id, generation, request_id, _ = message
        self._break_off(
            culprit,
            f"an unexpected reply (operation {op} to request {request_id} of env {env_id}, "
            f"generation {generation})",
        )

    def _on_unawaited(self, env: ManagedEnv, op: int, payload: Any) -> None:
        if op == Op.BEGAN:
            self._on_began(env, payload)
        elif op == Op.FAILED and type(payload) is RemoteFailure:
            self._checked(self._on_unawaited_failure, env, payload)

    def _on_unawaited_failure(self, env: ManagedEnv, payload: Any) -> None:
        text = "repeating a request on a renewed env: %s"
        logged(logging.WARNING, text, failure_of(payload).message)

    def _on_began(self, env: ManagedEnv, payload: Any) -> None:
        if payload is True and not env.group.is_async:
            self._hosts.limits.goes_on(env.group)
        if env.group.is_shared:
            self._hosts.limits.began(env)

    def _on_hello(self, env: ManagedEnv, payload: Any) -> None:
        if not self._answers.hello(env, payload):
            reason = "a renewed env has other spaces than the one before it"
            self._fail(env, failures.protocol(env, reason, loses_host=False), Lost.ENV)

    def _on_closed(self, env: ManagedEnv, payload: Any) -> None:
        """Do nothing: the host's death follows, or the time limit for closing passes."""

    # -- failures -----------------------------------------------------------------------------

    def _on_failed(self, env: ManagedEnv, payload: Any) -> None:
        remote = failure_of(payload)
        if env.phase is Phase.CALLING and remote.kind is FailureKind.NO_ATTRIBUTE:
            self._answers.result(env, remote)
            return
        if remote.kind is FailureKind.CANCELLED:
            if env.cancelled != env.request_id:
                raise MalformedReplyError("it has cancelled what it was not told to")
            self._fail_in_time(env, remote.traceback_text, Lost.ENV)
            return
        failure = failures.reported(env, remote)
        env.group.obsolete_requests.clear()
        raises = self._raise_non_finite and not env.is_spare
        at_once = remote.kind is FailureKind.NON_FINITE and raises
        lost = Lost.ENV if remote.kind is FailureKind.EXITED else Lost.NOTHING
        lost = Lost.HOST if remote.of_batch else lost
        self._fail(env, failure, lost, remote.info, at_once=at_once)

    def _on_death(self, group: HostGroup, died: HostDied) -> None:
        was_ending, culprit = group.is_ending, group.blamed()
        if not was_ending:
            self._repair.prepare(group.envs)
        self._hosts.ended(group, lingers=died.lingers)
        if was_ending:
            warn_of_fault(died)
            self._repair.renewals.host_ended(group)
        else:
            charged = not (died.is_interrupt or died.with_others)
            self._fail(culprit, failures.crash(culprit, died), Lost.HOST, charged=charged)

    def _find_running(self, group: HostGroup) -> None:
        """Find out which env a host was running when something happened to the host."""
        if self._replies is not None and group.is_shared and not group.is_retired:
            # Called in any case, as it also clears the entry: the next host is a different one.
            running = self._replies.running_in(group.index)
            group.running = group.running or group.by_id.get(running)

    def _break_off(self, env: ManagedEnv, reason: str) -> None:
        """Fail an env whose host has broken the protocol."""
        self._apply_replied(other for other in env.group.envs if other is not env)
        self._hosts.look_after(env)
        self._fail(env, failures.protocol(env, reason), Lost.HOST)

    def time_out(self, env: ManagedEnv) -> None:
        """Time out an env that has exceeded the limit of its work, unless it has just finished."""
        before, token, group = env.phase, env.token, env.group
        self._apply_replied(group.envs)
        if env.token != token or env.phase not in (before, Phase.STEPPING):
            self._hosts.limits.finished(group)
        elif group.is_async and env.phase in AWAITED and env.cancelled != env.request_id:
            self._hosts.cancel_request(env)
        elif not group.is_ending:
            where = self._hosts.transport.whereabouts(group.host_id or 0)
            self._fail_in_time(self._holding_up(env), where, Lost.HOST)

    def _holding_up(self, env: ManagedEnv) -> ManagedEnv:
        """Return the env that blocks the host of an env: this one, or another async env there."""
        group = env.group
        if not group.is_async or group.host_id is None:
            return env
        other = group.by_id.get(self._hosts.transport.running_in(group.host_id), env)
        return other if other.cancelled == other.request_id else env

    def _fail_in_time(self, env: ManagedEnv, where: str, lost: Lost) -> None:
        """Fail an env that has exceeded the limit of what it is doing, and was at `where` then."""
        own = self._hosts.limits.own_of(env)
        name, charged = ("", True) if own is None else (own.name, own.charged)
        failure = failures.timeout(env, env.limit_s, where, name, loses_host=lost is Lost.HOST)
        self._fail(env, failure, lost, charged=charged)

    def _fail(
        self,
        env: ManagedEnv,
        failure: EnvFailure,
        lost: Lost,
        env_info: Any = None,
        *,
        charged: bool = True,
        at_once: bool = False,
    ) -> None:
        if not env.group.is_ending:  # else it has failed already, and its host is being replaced
            envs: Iterable[ManagedEnv] = (env,)
            if lost is not Lost.NOTHING or env.shares_env:  # it may be lost to all of them
                self._apply_replied(other for other in env.group.envs if other is not env)
                envs = env.group.envs
            if env.group.host_id is not None:  # else they were prepared before it was gone
                self._repair.prepare(envs)
            if at_once:
                self._repair.raise_at_once(failure)
            self._repair.fail(env, failure, lost, env_info, charged=charged)
            self._repair.shown = {}

    # -- the block ----------------------------------------------------------------------------

    def begin_episodes(self) -> bool:
        """Make envs ready that their hosts have reset, where nothing else has to be done for that.

        Returns:
            Whether that was all of them; if not, one of the resets needs more: see `collect`.
        """
        replies, table = self._replies, self._table
        n_resetting = table.phases.column.count(Phase.RESETTING)
        # Envs that are reset in the next step of others reply in that step.
        if replies is None or n_resetting == table.resets_in_next_step.count(1):
            return True
        replied = replies.resets_of(table)
        if not replied:
            return True
        begun, infos = replies.resets(replied)
        for env_id in table.observed.misread(begun):
            del begun[env_id]
            infos.pop(env_id, None)
        if table.again or table.failed_while_ready or self._statistics.failing:
            begun = {env_id: buffer for env_id, buffer in begun.items() if self._is_well(env_id)}
            infos = {env_id: info for env_id, info in infos.items() if env_id in begun}
        if begun:
            self._journal.do(self._begin, (begun, infos))
        return len(begun) == len(replied)

    def _begin(self, resets: tuple[dict[int, int], dict[int, dict[str, Any]]], again: bool) -> None:
        begun, infos = resets
        self._episodes.begun_plainly(begun)
        self._table.episodes_begun(begun, infos)

    def _is_well(self, env_id: int) -> bool:
        table = self._table
        if table.failed_while_ready and table.lost_beside(env_id) is not None:
            return False
        odd = (table.again, table.failed_while_ready, self._statistics.failing)
        return not any(env_id in some for some in odd)

    @property
    def have_replied(self) -> bool:
        """Whether `collect` finds replies in the block to steps that are tracked individually."""
        replies, column = self._replies, self._table.phases.column
        if replies is None or not (Phase.STEPPING in column or Phase.CANCELLING in column):
            return False
        return bool(replies.steps_of(self._table))

    def collect(self) -> None:
        """Apply what has arrived in the block, but for posted steps; must not be interrupted."""
        replies, envs = self._replies, self._table.envs
        if replies is None:
            return
        if not self.begin_episodes():
            for env_id in replies.resets_of(self._table):
                self._apply_reply(envs[env_id])
        for env_id in replies.steps_of(self._table):
            self._apply_reply(envs[env_id])

    def apply_alone(self, env_id: int) -> None:
        """Apply the reply to a posted step that cannot be taken with others."""
        env = self._table.envs[env_id]
        self._hosts.look_after(env)
        self._apply_reply(env)

    def apply_posted(self) -> None:
        """Track all posted steps individually, as something else precedes their collection."""
        for env_id in self._table.phases.ids_in(Phase.POSTED):
            self.apply_alone(env_id)

    def _apply_reply(self, env: ManagedEnv) -> None:
        reason = self._reply_of(env)
        if reason is not None:
            self._break_off(env, reason)

    def _apply_replied(self, envs: Iterable[ManagedEnv]) -> None:
        """Apply what envs have replied, and track their posted steps individually from now on.

        Malformed replies are ignored, as the host of these envs is about to be given up.
        """
        if self._replies is not None:
            for env in envs:
                if not env.is_spare:
                    self._hosts.look_after(env)
                    self._reply_of(env)

    def _reply_of(self, env: ManagedEnv) -> str | None:
        """Apply what an env has replied in the block, if anything; return what is wrong with it."""
        replies, env_id = self._replies, env.env_id
        if replies is None:
            return None
        try:
            if env.phase in _STEP_PHASES and replies.has_step(env_id, env.token):
                self._answers.stepped(env, replies.step(env_id))
            if env.phase is Phase.RESETTING and replies.has_reset(env_id, env.token):
                self._answers.reset_done(env, replies.reset(env_id))
        except (ValueMismatchError, MalformedReplyError) as error:
            return str(error)
        return None
