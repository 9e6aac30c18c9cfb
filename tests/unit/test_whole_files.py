"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from envmgr.whole_files import write_whole


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, b"o", b"ld")

    def fail(fd: int) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="on fire"):
        write_whole(path, b"new")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
