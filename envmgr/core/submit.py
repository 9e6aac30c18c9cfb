"""Submitting actions: they are checked, packed and committed, all of a call or none.

The actions of envs whose data has a fixed layout are *posted*: written into the shared block, a
batch at a time, and their workers are rung for. All others are *sent* in messages. From the
commit on, a timestep is owed for every one of them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envmgr.core.hosts import Hosts, host_of, reset_in_step_of
from envmgr.core.phases import Change, Phase
from envmgr.core.statistics import Statistics
from envmgr.core.table import ManagedEnv, Selection, Selections, Window
from envmgr.core.validate import checked_actions
from envmgr.errors import ActionError
from envmgr.hot import hot
from envmgr.journal import Journal
from envmgr.lifecycle import EnvState
from envmgr.spaces import ActionCheck, ActionColumns, Array, ValueMismatchError, split_batch
from envmgr.spaces.columns import NUMPY_VALUES
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.wire.block import (
    BUFFER_BITS,
    ENDING_GIVEN_BIT,
    GENERATION_BITS,
    HAS_INFO,
    PLAIN_END,
    PLAIN_END_BITS,
    POSTING_BITS,
    RESETS_ASKED,
    RING_EACH,
    RING_LAST,
    RING_MASK,
    RING_ONCE,
    TOKEN_BYTES,
    Block,
    fence,
    generation_of,
    items,
    posting_of,
    token_of,
)
from envmgr.wire.frames import FrameError
from envmgr.wire.messages import Op, make_message

_Packed = tuple["Sequence[Array] | None", Any]
"""Actions as columns, and in what form their envs get them: see `spaces.columns`."""

_WRITTEN: _Packed = (None, NUMPY_VALUES)
"""Stands for actions that are in the block already."""


class _Posted(NamedTuple):
    """Actions that are written into the block.

    Attributes:
        selection: the envs.
        window: their rows of the block, if they are neighbours. It is kept here because the
            selection has none any more if a signal handler closes the manager in between.
        tokens: the tokens of the requests: as bytes if the envs are neighbours, else an array, or
            the one token of all of them.
        posting: says which batch it is, and when workers ring.
    """

    selection: Selection
    window: Window | None
    tokens: Any
    posting: int


class _Sent(NamedTuple):
    """Actions that go by message.

    Attributes:
        tokens: the tokens of the requests, by env_id; empty once their replies are awaited.
        requests: what is still to be sent, and to which host.
        unexecuted: envs that are sent nothing, as their hosts are gone.
    """

    env_ids: Sequence[int]
    tokens: dict[int, int]
    requests: deque[tuple[int, Any]]
    unexecuted: Sequence[int]


class _Submitted(NamedTuple):
    """The actions of a call: all that is needed to commit them.

    Attributes:
        n_actions: how many actions were accepted since launch, these included.
        posted: those that are posted; None if there are none.
        sent: those that are sent; None if there are none.
    """

    n_actions: int
    posted: _Posted | None
    sent: _Sent | None


class Submitter:
    """Submits actions.

    Args:
        hosts: the hosts whose envs take the actions.
        statistics: where steps are counted.
        journal: the journal that commits go through.
        selections: envs that are stepped together.
        resets_inplace: whether a step that ends an episode is complete only with the beginning of
            the next one.
        has_spares: whether what follows an episode is decided by the trainer, not by the host.

    Attributes:
        posts: whether steps are posted in a block; else all go by message.
        sleeping: which hosts are asleep, and have to be rung for; the last entry is the trainer's.
            None where nothing is posted.
        own_sleep: the same entries, in which public calls note that they are asleep; None also
            where the owner of the engine sleeps in their place.
        any_shared: whether a host serves several envs.
    """

    def __init__(
        self,
        hosts: Hosts,
        statistics: Statistics,
        journal: Journal,
        selections: Selections,
        *,
        resets_inplace: bool = False,
        has_spares: bool = False,
    ) -> None:
        self.posts = False
        self._resets_inplace, self._has_spares = resets_inplace, has_spares
        self.sleeping: Any = None
        self.own_sleep: Any = None
        self._actions: ActionColumns | None = None
        self._kinds: ActionKinds | None = None
        self._form = -1  # the one in which all envs' actions are written, if there is one
        self.any_shared = any(group.is_shared for group in hosts.groups)
        self._hosts = hosts
        self._table = hosts.table
        self._statistics = statistics
        self._journal = journal
        self._selections = selections
        self._request_ids = hosts.request_ids
        self._limits = hosts.limits
        self._groups = hosts.groups
        self._transport = hosts.transport
        self._works_alone = hosts.transport.works_alone
        # By index of a host: what was posted when it was asked to reset envs.
        self._resets_asked: dict[int, int] = {}
        self._latest: Selection | None = None
        self._posted_for_last = False

    def share(
        self, block: Block, columns: Sequence[ActionColumns], kind_of: Sequence[int | None]
    ) -> None:
        """Post steps in this block from now on.

        Args:
            block: the block.
            columns: the columns that pack the actions of each kind.
            kind_of: the kind of each env; None for those whose steps are not posted.
        """
        self._use(block)
        self.posts = True
        if len(columns) == 1:
            self._actions = columns[0]
            if (
                hot is not None
                and self._actions.in_c is not None
                and not (self._table.has_batched or self._table.some_at_a_time)
                and not self._table.observed.counts
            ):
                self._selections.in_c = self._ordinary_rows
        else:
            self._kinds = ActionKinds(block, columns, kind_of)

    def _ordinary_rows(self, selection: Selection) -> Any:
        """Return the C object that posts ordinary steps of neighbours and reads their replies."""
        table, block, observed = self._table, self._block, self._table.observed
        if self._actions is None or (kind := self._actions.in_c) is None:
            return None
        is_number, low, high = kind
        return hot.OrdinaryRows(
            first=selection.ids[0],
            count=selection.count,
            empty=(
                table.undelivered,
                table.failed_while_ready,
                table.by_message,
                self._resets_asked,
            ),
            statistics=self._statistics,
            submitter=self,
            journal=self._journal,
            phases=table.phases.column,
            states=table.states.column,
            **observed.columns,
            tokens=table.tokens,
            requests=block.requests,
            replies=block.replies,
            flags=block.flags,
            ids=selection.ids,
            ndarray=np.ndarray,
            number=np.int64,
            actions=block.actions[0],
            low=low,
            high=high,
            is_number=is_number,
            postings=block.posted,
            sleeping=block.sleeping if self._works_alone else None,
            hosts=selection.hosts,
            generations=GENERATION_BITS,
            buffer_bits=BUFFER_BITS,
            ending_given_bit=ENDING_GIVEN_BIT,
            has_info=HAS_INFO,
            end_bits=PLAIN_END_BITS,
            plain_end=PLAIN_END,
            resets=block.resets if self._resets_inplace else None,
            reset_flags=block.reset_flags,
            takes_ends=not (self._resets_inplace and self._has_spares),
            n_steps=observed.buffers.steps,
            n_buffers=observed.buffers.count,
            idle=Phase.IDLE,
            posted=Phase.POSTED,
            run=EnvState.RUN,
        )

    def _post_in_c(self, in_c: Any, selection: Selection, actions: Any, ring: int) -> bool:
        """Post an ordinary step of these envs; False if nothing was changed.

        In C all of it happens at once, but for the ringing.

        Args:
            in_c: `in_c` of the selection, which has none any more if a signal handler closes the
                manager in between.
            selection: the envs.
            actions: a dict whose keys are their env_ids, or an array with a row for each.
            ring: as for `by_id`.
        """
        if self._limits.step_s is not None:
            if not in_c.may_post():
                return False
            self._limits.set_posted(selection.rows)
        request_id, for_last = next(self._request_ids), ring == RING_LAST or self._posted_for_last
        posting, note = request_id << POSTING_BITS | ring, (self._ring, selection.hosts)
        done = in_c.post(selection, actions, self._form, request_id, posting, for_last, note)
        if done > 1:
            self._journal.finish()  # rings
        return bool(done)

    def detach(self) -> None:
        """Let go of the shared memory: whoever still looks here sees an empty block."""
        if self.posts:
            plan = self._block.plan
            self._use(Block(bytearray(plan.nbytes), plan))
            self._kinds = None
        self._latest = None

    def _use(self, block: Block) -> None:
        self._block, self._form = block, -1
        self._posted, self.sleeping = items(block.posted), items(block.sleeping)
        self.own_sleep = self.sleeping

    # -- the doors --------------------------------------------------------------------------------

    def by_id(self, actions: Any, ring: int, beside: _Sent | None = None) -> Selection | None:
        """Post one action for each of several envs, if nothing about them needs a second look.

        Args:
            actions: `{env_id: action}`.
            ring: when their hosts ring. With `block.RING_LAST` one does when all have replied; a
                caller that waits for only some of them has to call `have_all_ring`.
            beside: actions of other envs, which are sent with these.

        Returns:
            The envs, if their actions were posted. If not, nothing was changed: `checked` says why,
            or submits the actions.
        """
        if not self.posts or type(actions) is not dict:
            return None
        selection = self._latest
        if (
            selection is not None
            and (in_c := selection.in_c) is not None
            and beside is None
            and self._selections.moves == self._table.moves
            and self._post_in_c(in_c, selection, actions, ring)
        ):
            return selection
        selection = self._selections.of(actions)
        if selection is None or not selection.may_be_posted(self._table):
            return None
        try:
            values = list(actions.values())
            if self._actions is not None:
                packed: _Packed | None = self._actions.of_values(values)
            else:
                packed = self._of_kinds(selection, values)
        except Exception as error:  # of odd objects among the actions; `checked` says which
            pass_interrupt_on(error)
            return None
        if packed is not None:
            self._commit(selection, packed, ring, beside)
        return None if packed is None else selection

    def rows(self, env_ids: Any, batch: Any, ring: int) -> Selection | None:
        """As `by_id`, for a batch of actions with a row for each of `env_ids`."""
        if not self.posts:
            return None
        selection = self._selections.of(env_ids)
        if selection is None:
            return None
        in_c = selection.in_c if type(batch) is np.ndarray else None
        if in_c is not None and self._post_in_c(in_c, selection, batch, ring):
            return selection
        if not selection.may_be_posted(self._table):
            return None
        packed: _Packed | None = None
        try:
            if self._actions is not None:
                columns = self._actions.of_batch(batch, selection.count)
                packed = None if columns is None else (columns, NUMPY_VALUES)
            elif self._kinds is not None and self._kinds.write_batch(selection.ids, batch):
                packed = _WRITTEN
        except Exception as error:  # as above
            pass_interrupt_on(error)
            return None
        if packed is not None:
            self._commit(selection, packed, ring)
        return None if packed is None else selection

    def _of_kinds(self, selection: Selection, values: list[Any]) -> _Packed | None:
        """Write one action for each of some envs; None if one needs a second look."""
        is_written = self._kinds is not None and self._kinds.write(selection.ids, values)
        return _WRITTEN if is_written else None

    def checked(
        self, actions: Any, ring: int, checks: Sequence[ActionCheck] | None
    ) -> Selection | None:
        """Submit one action for each of several envs, of which some or all have to be sent.

        Args:
            actions: `{env_id: action}`.
            ring: as for `by_id`.
            checks: the check of each env's actions; None if they are not to be checked.

        Returns:
            The envs; None if there are none.

        Raises:
            ActionError: not a mapping, or an action that the space refuses or that cannot be sent.
            UnknownEnvError: an env_id that does not exist.
            EnvNotReadyError: an env that cannot take an action now.
        """
        unposted, everybody = self._table.by_message, None
        if unposted and type(actions) is dict and self.posts:
            everybody = self._selections.of(actions)
        if everybody is not None and 0 < len(unposted.intersection(actions)) < len(actions):
            sent = {i: action for i, action in actions.items() if i in unposted}
            rest = {i: action for i, action in actions.items() if i not in unposted}
            others = self._encoded(checked_actions(self._table, sent, checks))
            if self.by_id(rest, ring, others) is not None:
                return everybody
        encoded = self._encoded(checked_actions(self._table, actions, checks))
        self._commit(None, None, ring, encoded)
        return self._selections.of(encoded.env_ids)

    def alone(
        self, env: ManagedEnv, action: Any, checks: Callable[[], Sequence[ActionCheck] | None]
    ) -> None:
        """Have one env that is leased, and ready, take a step that is tracked individually.

        This is called where no signal handler can interrupt it.

        Args:
            env: the env.
            action: its action.
            checks: returns the checks that `checked` takes.

        Raises:
            ActionError: the action is refused, or cannot be sent.
        """
        env_id, statistics, latest = env.env_id, self._statistics, self._latest
        selection = packed = sent = None
        if env_id in self._table.posted_alone and env_id not in self._table.failed_while_ready:
            selection = self._selections.of((env_id,))
            packed = self._packed_alone(selection, action)
        if packed is None:
            actions = checked_actions(self._table, {env_id: action}, checks(), are_ready=True)
            selection, sent = None, self._encoded(actions)
        n_actions = statistics.actions
        self._commit(selection, packed, RING_EACH, sent)
        statistics.actions = n_actions
        statistics.of_slots.actions += 1
        self._latest = latest
        self._hosts.look_after(env)

    def _packed_alone(self, selection: Selection | None, action: Any) -> _Packed | None:
        """Pack one action; None if it needs a second look."""
        if selection is None:
            return None
        try:
            if self._actions is not None:
                return self._actions.of_values([action])
            return self._of_kinds(selection, [action])
        except Exception:  # as in `by_id`
            return None

    def _encoded(self, actions: Mapping[int, Any]) -> _Sent:
        """Encode actions of envs that are ready.

        Raises:
            ActionError: one of them cannot be sent; then none is sent.
        """
        tokens, unexecuted = {}, []
        requests: deque[tuple[int, Any]] = deque()
        hosts, table = self._hosts, self._table
        try:
            for env_id, action in actions.items():
                if env_id in table.failed_while_ready:
                    unexecuted.append(env_id)
                    continue
                env, request_id = table.envs[env_id], next(self._request_ids)
                message = make_message((Op.STEP, env_id, env.generation, request_id, action))
                host_id = env.host_id or host_of(env)
                requests.append((host_id, hosts.transport.prepare(host_id, message)))
                tokens[env_id] = token_of(env.generation, request_id)
        except FrameError as error:
            raise ActionError(
                f"an action cannot be sent to its env: {error}. Nothing was sent to any env."
            ) from error
        return _Sent(list(actions), tokens, requests, unexecuted)

    # -- the commit -------------------------------------------------------------------------------

    def _commit(
        self,
        selection: Selection | None,
        packed: _Packed | None,
        ring: int,
        sent: _Sent | None = None,
    ) -> None:
        """Have ready envs take a step.

        Args:
            selection: the envs whose actions are packed.
            packed: their actions; None if none are packed.
            ring: as for `by_id`.
            sent: the other actions.
        """
        statistics, posted, count = self._statistics, None, 0
        if selection is not None and packed is not None:
            (columns, form), window = packed, selection.window
            if columns is not None:  # nobody reads them there unasked
                if window is not None:
                    for target, values in zip(window.actions, columns, strict=True):
                        target[...] = values
                else:
                    for target, values in zip(self._block.actions, columns, strict=True):
                        target[selection.rows] = values
                if type(form) is not int or form != self._form:
                    self._give_form(selection, form)
            if self._limits.step_s is not None:
                self._limits.set_posted(selection.rows)
            request_id, count = next(self._request_ids), selection.count
            tokens: Any
            if statistics.has_generations:
                tokens = self._tokens(selection, request_id)
                tokens = tokens if window is None else tokens.tobytes()
            elif window is None:
                tokens = request_id
            else:
                tokens = request_id.to_bytes(TOKEN_BYTES, sys.byteorder) * count
            selection.n_posts += 1
            posted = _Posted(selection, window, tokens, request_id << POSTING_BITS | ring)
        if sent is not None:
            count += len(sent.env_ids)
        self._journal.do(self._redo, _Submitted(statistics.actions + count, posted, sent))

    def _give_form(self, selection: Selection, form: Any) -> None:
        """Note in what form envs get the actions that were written: one for all, or one each."""
        self._form = -1  # an interrupt may come in between
        self._block.kinds[selection.rows] = form
        if type(form) is int:
            self._form = form if (self._block.kinds == form).all() else -1

    def _tokens(self, selection: Selection, request_id: int) -> Array:
        """Return the tokens of a request to envs, some of which are of later generations.

        The generation of an env is taken from the token of the request that it has answered last.
        """
        tokens: Array = generation_of(self._table.tokens[selection.rows]) + np.uint64(request_id)
        return tokens

    def _redo(self, submitted: _Submitted, again: bool) -> None:
        table = self._table
        self._statistics.actions, posted, sent = submitted
        if posted is not None:
            selection, window, tokens, posting = posted
            if window is None:
                self._block.requests[selection.rows] = tokens
            else:
                window.request_bytes[:] = tokens
            table.posted(selection, window, tokens)
            self._latest = selection
            if 1 in table.resets_in_next_step:
                reset_in_step_of(self._hosts, selection.ids)
            if table.observed.counts:
                table.observed.counted(selection.ids, posting)
            if posting & RING_MASK == RING_LAST:
                self._posted_for_last = True
            to_do, resets, hosts = self._posted, self._resets_asked, selection.hosts
            for index in hosts:
                to_do[index] = posting if index not in resets else self._with_resets(index, posting)
            if self._works_alone:
                fence()
                self._ring(hosts)
        if sent is not None:
            self._send(*sent, again)

    def _send(
        self,
        env_ids: Sequence[int],
        tokens: dict[int, int],
        requests: deque[tuple[int, Any]],
        unexecuted: Sequence[int],
        again: bool,
    ) -> None:
        table, limits = self._table, self._limits
        if 1 in table.resets_in_next_step:
            reset_in_step_of(self._hosts, env_ids)
        if table.observed.counts:
            table.observed.counted(env_ids, -self._statistics.actions)
        table.unexecuted.update(unexecuted)
        if limits.step_s is not None:
            for env_id in tokens:
                limits.set(table.envs[env_id], limits.step_s)
        table.sent(tokens)
        tokens.clear()  # before any is sent: what has been replied is not awaited again
        self._transport.send_each(requests, again=again)

    def post_resets(self, env_ids: Sequence[int]) -> None:
        """Have hosts reset idle envs by the plans that they have; must not be interrupted."""
        hosts, table, request_id = self._hosts, self._table, next(self._request_ids)
        for env_id in env_ids:
            hosts.await_reply(table.envs[env_id], Change.RESET, request_id)
            self._block.reset_requests[env_id] = table.tokens[env_id]
        indexes = dict.fromkeys(map(table.index_of.__getitem__, env_ids))
        for index in indexes:
            # The host may not have seen yet what was posted before: it still has to ring for that.
            ring = max(int(self._posted[index]) & RING_MASK, RING_ONCE)
            posting = posting_of(request_id, ring | RESETS_ASKED)
            self._posted[index] = self._resets_asked[index] = posting
        fence()
        self._ring(indexes)

    def _ring(self, indexes: Iterable[int], again: bool = False) -> None:
        """Ring for hosts that sleep, or may be about to; call this after a `fence`."""
        sleeping, groups = self.sleeping, self._groups
        self._transport.ring([groups[index].host_id or 0 for index in indexes if sleeping[index]])

    def _with_resets(self, index: int, posting: int) -> int:
        """Return what to post for a host that may not have seen the resets asked for yet."""
        if self._block.finished[index] >= self._resets_asked[index]:
            del self._resets_asked[index]
            return posting
        return posting | RESETS_ASKED

    # -- what was posted last ---------------------------------------------------------------------

    def latest(self, outstanding: int) -> Selection | None:
        """Return the selection posted last, if it is all that is outstanding, and ascends."""
        selection = self._latest
        if selection is None or selection.count != outstanding or not selection.is_ascending:
            return None
        return selection if selection.is_posted(self._table.phases) else None

    def posted_in_c(self) -> Selection | None:
        """Return the selection posted last, if it is all envs and their steps are ordinary."""
        selection = self._latest
        in_c = None if selection is None else selection.in_c
        if selection is None or in_c is None or selection.count != self._table.env_num:
            return None
        return selection if in_c.is_posted() else None

    def have_all_ring(self) -> None:
        """Have hosts ring that would stay silent, as their steps were to be gathered together.

        The steps are not gathered together when a gather waits for only some of them, after `send`
        or Ctrl-C.
        """
        if not self._posted_for_last:
            return
        hosts = self._hosts
        silent = [
            self._table.index_of[env_id]
            for env_id in self._table.phases.ids_in(Phase.POSTED)
            if hosts.may_stay_silent(env_id)
        ]
        for index in dict.fromkeys(silent):
            hosts.ask(index)
        self._posted_for_last = False


class ActionKinds:
    """Writes actions of envs whose action spaces differ into the columns of their kinds.

    Args:
        columns: the columns that pack the actions of each kind.
        kind_of: the kind of each env; None for those whose steps are not posted.
    """

    def __init__(
        self, block: Block, columns: Sequence[ActionColumns], kind_of: Sequence[int | None]
    ) -> None:
        self._block = block
        self._columns = columns
        self._kind_of = kind_of

    def write(self, env_ids: Sequence[int], values: Sequence[Any]) -> bool:
        """Write one action for each of these envs; False if one needs a second look."""
        by_kind: dict[Any, tuple[list[int], list[Any]]] = {}
        for env_id, value in zip(env_ids, values, strict=True):
            ids, actions = by_kind.setdefault(self._kind_of[env_id], ([], []))
            ids.append(env_id)
            actions.append(value)
        packed = []
        for kind, (ids, actions) in by_kind.items():
            found = self._columns[kind].of_values(actions)
            if found is None:
                return False
            packed.append((kind, ids, *found))
        for kind, ids, columns, form in packed:
            self._write(kind, ids, columns, form)
        return True

    def write_batch(self, env_ids: Sequence[int], batch: Any) -> bool:
        """As `write`, given a batch with a row for each env."""
        kind, *others = {self._kind_of[env_id] for env_id in env_ids}
        if kind is None:
            return False
        if others:
            try:
                return self.write(env_ids, split_batch(batch, len(env_ids)))
            except ValueMismatchError:
                return False
        columns = self._columns[kind].of_batch(batch, len(env_ids))
        if columns is not None:
            self._write(kind, list(env_ids), columns, NUMPY_VALUES)
        return columns is not None

    def _write(self, kind: int, ids: list[int], columns: Sequence[Any], form: Any) -> None:
        for column, values in zip(self._block.actions_of[kind], columns, strict=True):
            column[ids] = values
        self._block.kinds[ids] = form


def submit_calls(
    hosts: Hosts, envs: Sequence[ManagedEnv], op: Op, payloads: Sequence[Any], what: str
) -> None:
    """Send a call to each of these envs, or to none.

    Raises:
        ActionError: the arguments of a call cannot be sent.
    """
    try:
        prepared = [hosts.prepare(s, op, p) for s, p in zip(envs, payloads, strict=True)]
    except FrameError as error:
        raise ActionError(
            f"{what} has arguments that cannot be sent to a worker: {error}. Nothing was sent."
        ) from error
    for env, frame in zip(envs, prepared, strict=True):
        env.result, env.called = None, what
        hosts.submit(env, Change.CALL, frame)
