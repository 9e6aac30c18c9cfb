"""Actions of envs whose action spaces differ, as columns of the block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envmgr.spaces import ActionColumns, ValueMismatchError, split_batch
from envmgr.spaces.columns import NUMPY_VALUES
from envmgr.wire.block import Block


class ActionKinds:
    """Writes actions into the columns of their envs' kinds, where nobody reads them unasked.

    Args:
        block: the columns.
        columns: pack the actions of each kind.
        kind_of: the kind of each env; None for those whose steps are not posted.
    """

    def __init__(
        self, block: Block, columns: Sequence[ActionColumns], kind_of: Sequence[int | None]
    ) -> None:
        self._block = block
        self._columns = columns
        self._kind_of = kind_of

    def write(self, env_ids: Sequence[int], values: Sequence[Any]) -> bool:
        """Write one action for each of these envs; False if one needs a second look.

        Args:
            env_ids: which; their steps may be posted.
            values: their actions.
        """
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
