"""Actions of a call: they are posted in the block, where that can be, or sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envmgr.core.requests import prepared_steps
from envmgr.core.selection import Selection
from envmgr.core.sending import Submitted
from envmgr.core.supervisor import Supervisor
from envmgr.spaces import ActionCheck
from envmgr.spaces.columns import NUMPY_VALUES
from envmgr.spaces.interrupts import pass_interrupt_on


def post_actions(
    supervisor: Supervisor, actions: Any, ring: int, beside: Sequence[Submitted] = ()
) -> Selection | None:
    """Post one action for each of several envs, if nothing about them needs a second look.

    Args:
        supervisor: the envs.
        actions: `{env_id: action}`.
        ring: see `Posting.post`.
        beside: actions of other envs, which are sent with these, from `prepared_steps`.

    Returns:
        The envs, if they were posted. If not, nothing was changed: `prepared_steps` says why, or
        prepares them.
    """
    posting = supervisor.posting
    if posting is None or type(actions) is not dict:
        return None
    selection = _ready(supervisor, actions)
    if selection is None:
        return None
    packed: tuple[list[Any] | None, Any] | None
    try:
        if posting.kinds is None:
            packed = posting.actions.of_values(list(actions.values()))
        else:
            written = posting.kinds.write(selection.ids, list(actions.values()))
            packed = (None, NUMPY_VALUES) if written else None
    except Exception as error:  # of odd objects among the actions; `prepared_steps` says which
        pass_interrupt_on(error)
        return None
    if packed is None:
        return None
    posting.post(selection, packed[0], form=packed[1], ring=ring, beside=beside)
    return selection


def post_some(
    supervisor: Supervisor, actions: Any, ring: int, checks: Sequence[ActionCheck] | None
) -> Selection | None:
    """As `post_actions`, where steps of some of the envs cannot be posted: those are sent.

    Args:
        supervisor: the envs.
        actions: `{env_id: action}`.
        ring: see `Posting.post`.
        checks: see `prepared_steps`.

    Returns:
        All of the envs, if their actions were posted and sent; if not, nothing was changed.

    Raises:
        ActionError, EnvNotReadyError: as `prepared_steps`; nothing was posted or sent.
    """
    unposted = supervisor.record.unposted
    if not unposted or type(actions) is not dict:
        return None
    everybody = supervisor.handout.selections.of(actions)
    if everybody is None or not 0 < len(unposted.intersection(actions)) < len(actions):
        return None
    others = {i: action for i, action in actions.items() if i in unposted}
    rest = {i: action for i, action in actions.items() if i not in unposted}
    prepared = prepared_steps(supervisor, others, checks)
    return everybody if post_actions(supervisor, rest, ring, prepared) else None


def post_batch(supervisor: Supervisor, env_ids: Any, batch: Any, ring: int) -> Selection | None:
    """As `post_actions`, for a batch of actions with a row for each of `env_ids`."""
    posting = supervisor.posting
    if posting is None:
        return None
    selection = _ready(supervisor, env_ids)
    if selection is None:
        return None
    columns: Any = None
    try:
        if posting.kinds is None:
            columns = posting.actions.of_batch(batch, selection.count)
        is_written = posting.kinds is not None and posting.kinds.write_batch(selection.ids, batch)
    except Exception as error:  # as above
        pass_interrupt_on(error)
        return None
    if columns is None and not is_written:
        return None
    posting.post(selection, columns, form=NUMPY_VALUES, ring=ring)
    return selection


def _ready(supervisor: Supervisor, env_ids: Any) -> Selection | None:
    """Return envs as a selection, if all of them are ready, and have hosts for the next step."""
    selection = supervisor.handout.selections.of(env_ids)
    if selection is None or not selection.may_be_posted(supervisor.record):
        return None
    return selection
