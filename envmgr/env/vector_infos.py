"""Infos of vector envs, `{key: values, "_key": mask}`, as infos of single envs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np


class RowInfos(Sequence[Mapping[str, Any]]):
    """The infos of rows; made when one of them is asked for.

    Args:
        infos: as the vector env gave them.
        rows: which rows, in this order.
        num_envs: how many the env has.
        hidden: keys that are not the rows' own.
        instead: the infos of some rows, in place of theirs.
    """

    def __init__(
        self,
        infos: Mapping[str, Any],
        rows: Sequence[int],
        num_envs: int,
        hidden: frozenset[str] = frozenset(),
        instead: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self._instead = instead or {}
        self._infos = {
            key: value
            for key, value in infos.items()
            if key not in hidden and not _is_mask_of_another(key, infos)
        }
        self._masks = infos
        self._rows = rows
        self._num_envs = num_envs

    @property
    def told(self) -> list[int]:
        """The positions of infos that are not empty, ascending."""
        instead = self._instead
        if not self._infos:
            return [k for k, row in enumerate(self._rows) if instead.get(row)] if instead else []
        masks: list[Any] = [self._masks.get(f"_{key}") for key in self._infos]
        if any(mask is None for mask in masks):  # each of them has something
            masks = [np.ones(self._num_envs, np.bool_)]
        told = np.logical_or.reduce(masks)
        return [k for k, row in enumerate(self._rows) if instead.get(row, told[row])]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(len(self))[index]]
        row = self._rows[index]
        if row in self._instead:
            return dict(self._instead[row])
        return _row_of(self._infos, self._masks, row, self._num_envs)


def _is_mask_of_another(key: str, infos: Mapping[str, Any]) -> bool:
    return key.startswith("_") and key[1:] in infos


def _row_of(
    infos: Mapping[str, Any], masks: Mapping[str, Any], row: int, num_envs: int
) -> dict[str, Any]:
    info: dict[str, Any] = {}
    for key, value in infos.items():
        mask = masks.get(f"_{key}")
        if mask is not None and not mask[row]:
            continue
        if isinstance(value, Mapping):
            inner = {k: v for k, v in value.items() if not _is_mask_of_another(k, value)}
            info[key] = _row_of(inner, value, row, num_envs)
        elif isinstance(value, (np.ndarray, list, tuple)) and len(value) == num_envs:
            info[key] = _own(value[row])
        else:  # of the whole env
            info[key] = value
    return info


def _own(value: Any) -> Any:
    """Return a number as Python's, as envs of one's own give them, and an array as a copy."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.item() if isinstance(value, (np.number, np.bool_)) else value
