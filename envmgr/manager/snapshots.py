"""Snapshots of the envs of a manager: what one holds, its file, and how it is taken and read.

`EnvManager.snapshot` and `EnvManager.restore` show the order in which these things are done.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envmgr import pickles
from envmgr.core.engine import Engine
from envmgr.core.episodes import EnvRecord, hurry_to_rest, is_at_rest
from envmgr.core.table import ManagedEnv
from envmgr.core.validate import checked_folder
from envmgr.errors import ConfigError, EnvFailure, SnapshotError, SnapshotMismatchError
from envmgr.lifecycle import EnvState
from envmgr.spaces import same_space
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.spaces.reading import error_text, short_text
from envmgr.types import EnvTimestep
from envmgr.whole_files import write_whole
from envmgr.wire.messages import EnvDescription

FORMAT = 1
"""The format of snapshots; those of another format are refused."""

_MAGIC = b"envmgr snapshot\n"
_MOST_HEADER_BYTES = 1 << 28


class EnvSnapshot(NamedTuple):
    """The snapshot of one env.

    Attributes:
        kind: what the env is, for comparison.
        record: what the manager knows of it, pickled.
        state: what its host knows, pickled by the host.
        episodes: how many episodes it had ended in its host.
    """

    kind: str
    record: bytes
    state: bytes
    episodes: int


@dataclass(frozen=True)
class Snapshot:
    """All envs of a manager at one moment: `manager.snapshot()` takes it, `restore` puts it back.

    It is a plain value that can be pickled, or saved in a file of its own. Nothing that it holds is
    unpickled before it is restored; restoring it may run code: see docs/security.md.

    Attributes:
        envs: the snapshot of each env, by env_id.
        common: what does not belong to one env (spaces, seeds, streams of random actions), pickled.
        format: the format of these parts.
    """

    envs: tuple[EnvSnapshot, ...]
    common: bytes
    format: int = FORMAT

    @property
    def env_num(self) -> int:
        """Number of envs."""
        return len(self.envs)

    @property
    def nbytes(self) -> int:
        """Size of its contents in bytes."""
        return sum(map(len, self._parts()))

    def _parts(self) -> list[bytes]:
        return [self.common, *(part for env in self.envs for part in (env.record, env.state))]

    def __repr__(self) -> str:
        return f"Snapshot({self.env_num} envs, {self.nbytes} bytes, format {self.format})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the snapshot to a file, whole or not at all; an existing file is replaced.

        Only the owner of the file may read it.

        Raises:
            ConfigError: `path` is not a path.
            OSError: the file cannot be written; what was there before is unchanged.
        """
        target = Path(_checked_path(path))
        parts = self._parts()
        header = {
            "format": self.format,
            "envs": [[env.kind, env.episodes] for env in self.envs],
            "sizes": list(map(len, parts)),
            "sha256": _digest(parts),
        }
        write_whole(target, _MAGIC, json.dumps(header).encode(), b"\n", *parts, mode=0o600)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Snapshot:
        """Read a snapshot from a file that `save` has written; no code in it is run.

        Raises:
            ConfigError: `path` is not a path.
            OSError: the file cannot be read.
            SnapshotMismatchError: the snapshot is of another version.
            SnapshotError: the file is not a snapshot, or is damaged.
        """
        name = _checked_path(path)
        with open(name, "rb") as file:
            magic, line = file.read(len(_MAGIC)), file.readline(_MOST_HEADER_BYTES)
            data = file.read()
        if magic != _MAGIC:
            raise SnapshotError(f"{name} is no snapshot of envmgr")
        try:
            header = json.loads(line)
            check_format(header["format"], name)
            return cls._of(header, data)
        except SnapshotError:
            raise
        except Exception as error:  # whatever a file may hold: too deep, too large, of other types
            pass_interrupt_on(error)
            raise SnapshotError(
                f"{name} is damaged: {error_text(error)}. Take another one."
            ) from error

    @classmethod
    def _of(cls, header: dict[str, Any], data: bytes) -> Snapshot:
        parts, end = [], 0
        for size in header["sizes"]:
            parts.append(data[end : end + size])
            end += size
        if end != len(data) or _digest(parts) != header["sha256"]:
            raise ValueError("what it holds is not what was written")
        common, *rest = parts
        records, states = rest[::2], rest[1::2]
        envs = [
            EnvSnapshot(str(kind), record, state, int(episodes))
            for (kind, episodes), record, state in zip(header["envs"], records, states, strict=True)
        ]
        return cls(tuple(envs), common, header["format"])


def check_format(found: Any, where: str) -> None:
    """Refuse snapshots of another version.

    Raises:
        SnapshotMismatchError: the format is of another version.
    """
    if type(found) is not int or found != FORMAT:
        raise SnapshotMismatchError(
            f"{where} is of format {short_text(found)}, this version of envmgr reads format "
            f"{FORMAT}. Restore it with the version that took it, or take another one."
        )


def _checked_path(path: Any) -> str:
    name = checked_folder(path, "path")
    try:
        with contextlib.suppress(OSError):  # what is wrong there is said when it is opened
            os.stat(name)
    except ValueError as error:
        raise ConfigError(f"path is {short_text(name)}, which no file has: {error}") from error
    return name


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


# -- taking one ---------------------------------------------------------------------------------


class CommonState(NamedTuple):
    """The parts of a snapshot that do not belong to one env.

    Attributes:
        spaces: the observation and the action space of each env.
        sampled: the spaces that random actions are drawn from, with their generators.
        seeds: the seed of each env, by env_id.
        dynamic_seeds: what was asked for, and what holds until the next reset.
        normalization: the running statistics, if there are any.
    """

    spaces: list[tuple[Any, Any]]
    sampled: list[Any]
    seeds: dict[int, int | None]
    dynamic_seeds: tuple[bool | None, bool | None]
    normalization: dict[str, Any] | None


def refuse_spares(what: str, spare_num: int) -> None:
    """Refuse a call that managers with spares do not support.

    Raises:
        SnapshotError: there are spares.
    """
    if spare_num:
        raise SnapshotError(
            f"{what} is not for managers with spares, whose states are not a part of snapshots "
            f"(spare_env_num is {spare_num}); leave it 0"
        )


def refuse_rows(what: str, envs: Sequence[ManagedEnv]) -> None:
    """Refuse a call that rows of batched envs do not support.

    Raises:
        SnapshotError: there are such rows.
    """
    rows = [env.env_id for env in envs if env.batch is not None]
    if rows:
        raise SnapshotError(
            f"{what} is not for rows of batched envs, which share one object (envs {rows}). Give a "
            "factory for each env"
        )


def come_to_rest(engine: Engine, what: str) -> None:
    """Wait until nothing is under way in any host, or the run has failed.

    The engine's lock is held.
    """
    supervisor = engine.supervisor
    repair, table = supervisor.repair, supervisor.table
    engine.uninterrupted(partial(hurry_to_rest, supervisor.hosts))
    engine.wait_until(lambda: repair.fatal is not None or is_at_rest(table), doing=what)


def snapshot_of(
    records: Sequence[EnvRecord],
    taken: Sequence[Any],
    descriptions: Mapping[int, EnvDescription],
    common: CommonState,
) -> Snapshot:
    """Return a snapshot.

    Args:
        records: what the manager knows of each env.
        taken: the answer of each env's host: the env's state and its count of episodes, or the
            reason why the state cannot be taken.
        descriptions: the descriptions of the envs.
        common: what does not belong to one env.

    Raises:
        SnapshotError: a state cannot be taken, or a part cannot be pickled.
    """
    envs = []
    for env_id, (record, answer) in enumerate(zip(records, taken, strict=True)):
        if isinstance(answer, str):
            raise SnapshotError(f"the state of env {env_id} cannot be taken: {answer}")
        pickled = _pickled(record, f"what is known of env {env_id}, its infos for example,")
        envs.append(EnvSnapshot(_kind_of(descriptions[env_id]), pickled, *answer))
    return Snapshot(tuple(envs), _pickled(common, "what envs have in common"))


def _kind_of(description: EnvDescription) -> str:
    """Return what an env is, as far as its registration tells."""
    spec = getattr(description, "spec", None)
    given = sorted((getattr(spec, "kwargs", None) or {}).items())
    kwargs = {name: value for name, value in given if name != "render_mode"}
    text = json.dumps(kwargs, skipkeys=True, default=_name_of_type)
    return f"{getattr(spec, 'id', None) or 'an env without registration'} {text}"


def _name_of_type(value: object) -> str:
    return type(value).__qualname__


def _pickled(value: Any, what: str) -> bytes:
    try:
        return pickles.dumps(value)
    except Exception as error:  # whatever a __reduce__ may raise
        raise SnapshotError(f"{what} cannot be pickled: {error_text(error)}") from error


# -- reading one --------------------------------------------------------------------------------


def checked_snapshot(given: Any, env_num: int) -> Snapshot:
    """Return the given snapshot, or the one in a file, if it may be one of `env_num` envs.

    Nothing that it holds is unpickled yet.

    Raises:
        ConfigError: `given` is neither a snapshot nor a path.
        OSError: the file cannot be read.
        SnapshotError: the snapshot is damaged.
        SnapshotMismatchError: it is of another version, or of another number of envs.
    """
    snapshot = Snapshot.load(given) if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(snapshot, Snapshot):
        raise ConfigError(
            f"restore takes a Snapshot or the path of one, found a {type(given).__name__}"
        )
    check_format(snapshot.format, "the snapshot")
    if not _is_whole(snapshot):
        raise SnapshotError("the snapshot is damaged: its parts are not what `snapshot` makes")
    if snapshot.env_num != env_num:
        raise SnapshotMismatchError(
            f"the snapshot has {snapshot.env_num} envs, this manager has {env_num}. "
            "Nothing was changed."
        )
    return snapshot


def read_snapshot(
    snapshot: Snapshot,
    descriptions: Mapping[int, EnvDescription],
    env_spaces: Iterable[tuple[Any, Any]],
) -> tuple[CommonState, list[EnvRecord]]:
    """Return what a snapshot holds, if it is of envs like these.

    Raises:
        SnapshotMismatchError: it is of other envs, or cannot be read.
    """
    for env_id, env in enumerate(snapshot.envs):
        kind = _kind_of(descriptions[env_id])
        if env.kind != kind:
            raise SnapshotMismatchError(
                f"env {env_id} of the snapshot is {env.kind}, here it is {kind}. "
                "Nothing was changed."
            )
    here = list(env_spaces)
    try:
        # docs/security.md says who may load snapshots.
        common: CommonState = pickle.loads(snapshot.common)  # noqa: S301
        records = [pickle.loads(env.record) for env in snapshot.envs]  # noqa: S301
        _check_read(common, records)
        spaces = enumerate(zip(here, common.spaces, strict=True))
        differ = [i for i, (one, other) in spaces if not all(map(same_space, one, other))]
    except (Exception, SystemExit) as error:  # whatever is unpickled may raise
        pass_interrupt_on(error)
        raise SnapshotMismatchError(
            f"the snapshot cannot be read: {error_text(error)}. Nothing was changed."
        ) from error
    if differ:
        env_id = differ[0]
        raise SnapshotMismatchError(
            f"env {env_id} of the snapshot has the spaces {common.spaces[env_id]}, here it has "
            f"{here[env_id]}. Nothing was changed."
        )
    return common, records


def _is_whole(snapshot: Snapshot) -> bool:
    """Return whether a snapshot has the parts that it should have, whatever these hold."""
    envs: Any = snapshot.envs
    common: Any = snapshot.common
    return (
        type(envs) is tuple
        and type(common) is bytes
        and all(
            type(env) is EnvSnapshot and tuple(map(type, env)) == (str, bytes, bytes, int)
            for env in envs
        )
    )


_INT = (int, np.integer)
_NONE = type(None)
_OF_COMMON: dict[str, Any] = {
    "seeds": dict,
    "sampled": list,
    "dynamic_seeds": tuple,
    "normalization": (dict, _NONE),
}
_OF_RECORD: dict[str, Any] = {
    "state": EnvState,
    "timestep": (EnvTimestep, _NONE),
    "doomed": (EnvFailure, _NONE),
    "fresh": (tuple, _NONE),
    "reset_info": dict,
    "reset_params": dict,
    **dict.fromkeys(("base_seed", "new_seed"), (*_INT, _NONE)),
    **dict.fromkeys(("generation", "episode", "episodes_done"), _INT),
    **dict.fromkeys(("new_generation", "attended", "waits"), bool),
}


def _check_read(common: Any, records: list[Any]) -> None:
    """Check that what was unpickled is what `snapshot` has pickled.

    Raises:
        TypeError: it is something else.
    """
    if type(common) is not CommonState or any(type(record) is not EnvRecord for record in records):
        raise TypeError("it holds the pickle of something else")
    found: dict[str, Any] = common._asdict()
    fits = all(isinstance(found[name], kind) for name, kind in _OF_COMMON.items())
    fits = fits and len(found["sampled"]) in (0, len(records))
    fits = fits and [type(seed) in (bool, _NONE) for seed in found["dynamic_seeds"]] == [True] * 2
    wrong = [
        name
        for record in records
        for name, kind in _OF_RECORD.items()
        if not isinstance(getattr(record, name), kind)
    ]
    if wrong or not fits:
        raise TypeError(f"{wrong[0] if wrong else 'what envs have in common'} is of another type")
