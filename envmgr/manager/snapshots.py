"""What a snapshot of a manager's envs is, and its file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from envmgr.core.validate import checked_folder
from envmgr.errors import ConfigError, SnapshotError, SnapshotMismatchError
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.spaces.reading import error_text, short_text
from envmgr.whole_files import write_whole

FORMAT = 1
"""Of snapshots; those of another one are refused."""

_MAGIC = b"envmgr snapshot\n"
_MOST_HEADER_BYTES = 1 << 28


class EnvSnapshot(NamedTuple):
    """One env.

    Attributes:
        kind: what it is, for comparison.
        record: what the manager knows of it, pickled.
        state: what its host knows, as that has pickled it.
        episodes: how many it had ended in its host.
    """

    kind: str
    record: bytes
    state: bytes
    episodes: int


@dataclass(frozen=True)
class Snapshot:
    """All envs of a manager at one moment: `manager.snapshot()` takes it, `restore` puts it back.

    A plain value, which can be pickled, and saved in a file of its own. Nothing that it holds is
    unpickled before it is restored; what is restored may run code: see docs/security.md.

    Attributes:
        envs: by env_id.
        common: what is not of one env: spaces, seeds, streams of random actions; pickled.
        format: of these parts.
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
        """Size of what it holds."""
        return sum(map(len, self._parts()))

    def _parts(self) -> list[bytes]:
        return [self.common, *(part for env in self.envs for part in (env.record, env.state))]

    def __repr__(self) -> str:
        return f"Snapshot({self.env_num} envs, {self.nbytes} bytes, format {self.format})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it into a file: whole, or not at all; a file that is there is replaced.

        Only its owner may read it.

        Raises:
            ConfigError: this is no path.
            OSError: it cannot be written; what was there before is as it was.
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
        """Read it from a file that `save` has written. Nothing in it is run.

        Raises:
            ConfigError: this is no path.
            OSError: the file cannot be read.
            SnapshotMismatchError: it is of another version.
            SnapshotError: it is no snapshot, or is damaged.
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
        SnapshotMismatchError: it is one.
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
