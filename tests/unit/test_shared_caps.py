"""Caps that managers share: who gets units, what refuses a folder, and what is left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from envmgr.errors import CapMismatchError, SharedCapError
from envmgr.shared_caps import SharedUnits, own_folder


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = tmp_path / "caps"
    path.mkdir(mode=0o700)
    return str(path)


def units(folder: str, count: int, **caps: int) -> SharedUnits:
    return SharedUnits(caps or {"browser": 4}, count, folder)


def files(folder: str) -> list[str]:
    return sorted(name.partition("@")[0] for name in os.listdir(folder) if name != ".lock")


# -- who gets units -------------------------------------------------------------------------------


def test_all_or_none_are_taken_and_what_is_given_back_is_free(folder: str) -> None:
    first, second, third = units(folder, 3), units(folder, 2), units(folder, 1)
    assert first.take()
    assert not second.take()
    assert "2 of the 4 of browser: held are 3 by process" in second.lacks
    assert third.take(), "one is left"
    assert not second.take()
    first.release()
    assert second.take()
    assert second.lacks == ""
    assert second.figures() == {"browser": {"units": 4, "held": 2}}
    second.release()
    third.release()
    assert files(folder) == []


def test_taking_twice_takes_once_and_so_does_releasing(folder: str) -> None:
    held = units(folder, 3)
    assert held.take()
    assert held.take()
    assert files(folder) == ["browser"]
    held.release()
    held.release()
    assert held.figures()["browser"]["held"] == 0
    assert held.take()
    held.release()


def test_of_several_names_all_are_had_or_none(folder: str) -> None:
    one = units(folder, 2, browser=4, gpu=2)
    other = units(folder, 1, gpu=2, browser=4)
    assert one.take()
    assert not other.take()
    assert "gpu" in other.lacks
    assert "browser" not in other.lacks
    assert files(folder) == ["browser", "gpu"]
    one.release()
    assert other.take()
    other.release()


def test_names_that_begin_alike_are_different(folder: str) -> None:
    one, other = units(folder, 1, a=1), units(folder, 1, ab=1)
    assert one.take()
    assert other.take()
    one.release()
    other.release()


def test_what_a_process_has_left_that_is_gone_is_removed(folder: str) -> None:
    for name in ("browser@7-aa", "browser@8-bb"):
        Path(folder, name).write_text("9 100 7\n")  # nobody has it locked
    held = units(folder, 4)
    assert held.take()
    assert files(folder) == ["browser"]
    held.release()


def test_while_another_looks_nothing_is_taken_and_nobody_waits(folder: str) -> None:
    held = units(folder, 1)
    fd = os.open(f"{folder}/.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert not held.take()
    assert held.lacks == "", "it has not seen what there is"
    os.close(fd)
    assert held.take()
    held.release()


# -- what is refused ------------------------------------------------------------------------------


def test_differing_numbers_for_a_name_are_an_error_that_names_both(folder: str) -> None:
    first, second = units(folder, 1, browser=4), units(folder, 1, browser=5)
    assert first.take()
    with pytest.raises(CapMismatchError) as caught:
        second.take()
    error = caught.value
    assert (error.name, error.asked, error.found, error.pid) == ("browser", 5, 4, os.getpid())
    assert "browser is 5, but 4 in the manager of process" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert not second.is_held
    first.release()
    assert second.take(), "nobody has the other number any more"
    second.release()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o702])
def test_a_folder_that_is_open_to_others_is_refused(folder: str, mode: int) -> None:
    os.chmod(folder, mode)
    with pytest.raises(SharedCapError, match=r"open to others.*0700"):
        units(folder, 1).take()


def test_a_folder_of_somebody_else_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SharedCapError, match=f"belongs to the user with the id {os.getuid()}"):
        units(folder, 1).take()


def test_a_link_or_a_file_in_place_of_the_folder_is_refused(folder: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    file = tmp_path / "file"
    file.write_text("")
    for path in (link, file, tmp_path / "not there" / "caps"):
        with pytest.raises(SharedCapError, match="cannot be used"):
            units(str(path), 1).take()


@pytest.mark.parametrize("call", ["open", "write", "listdir", "flock"])
def test_whatever_the_system_refuses_is_told_of_and_nothing_is_kept(
    folder: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ours = units(folder, 1)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl if call == "flock" else os, call, full)
        with pytest.raises(SharedCapError, match=r"cannot be used: .*No space left"):
            ours.take()
    assert files(folder) == []
    assert ours.take()
    ours.release()


def test_a_file_that_somebody_else_has_locked_is_told_of(folder: str) -> None:
    path = f"{folder}/browser@1-x"
    with open(path, "w") as file:
        file.write("what?")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SharedCapError, match=r"browser@1-x.*not by envmgr"):
            units(folder, 1).take()


def test_a_file_that_cannot_be_written_leaves_nothing(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    held = units(folder, 1, a=1, b=1)
    monkeypatch.setattr(os, "write", no_space)
    with pytest.raises(SharedCapError, match="No space left"):
        held.take()
    assert files(folder) == []
    assert not held.is_held
    monkeypatch.undo()
    assert held.take()
    held.release()


# -- which folder ---------------------------------------------------------------------------------


def test_the_folder_is_where_the_system_keeps_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert own_folder() == f"{runtime}/envmgr-caps"
    held = SharedUnits({"browser": 1}, 1)
    assert held.take()
    assert os.stat(own_folder()).st_mode & 0o777 == 0o700
    held.release()


@pytest.mark.parametrize("runtime", ["", "run", "/not/there", "open"])
def test_else_it_is_a_temporary_one_named_by_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    if runtime == "open":
        (tmp_path / "open").mkdir(mode=0o755)
        runtime = str(tmp_path / "open")
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)  # has no folder below /run/user
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert own_folder() == f"{tmp_path}/envmgr-caps-4000000"


@pytest.mark.parametrize("is_link", [False, True])
def test_one_that_somebody_else_has_made_first_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    uid = os.geteuid()
    theirs = tmp_path / f"envmgr-caps-{uid}"
    theirs.symlink_to("nowhere") if is_link else theirs.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lstat, isabs = os.lstat, os.path.isabs

    def of_somebody_else(path: Any, **options: Any) -> os.stat_result:
        about = lstat(path, **options)
        if os.fspath(path) != str(theirs):
            return about
        return os.stat_result((*about[:4], uid + 1, *about[5:]))

    monkeypatch.setattr(os, "lstat", of_somebody_else)
    monkeypatch.setattr(os.path, "isabs", lambda path: isabs(path) and "/run/user" not in path)
    folder = own_folder()
    assert folder == f"{tmp_path}/home/.cache/envmgr-caps-{socket.gethostname()}"
    held = SharedUnits({"browser": 1}, 1)
    assert held.take()
    assert not SharedUnits({"browser": 1}, 1).take()
    assert os.stat(folder).st_mode & 0o777 == 0o700
    held.release()
    theirs.unlink() if is_link else theirs.rmdir()
    assert own_folder() == str(theirs), "it is taken as soon as it can be"
