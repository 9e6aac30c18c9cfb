"""Fds that forks of the trainer give up."""

from __future__ import annotations

import errno
import os

import pytest

from envmgr.transport.fds import forget_fd, has_pidfds, keep_from_children, parent_fds


@pytest.mark.parametrize(
    ("number", "has"),
    [(errno.ENOSYS, False), (errno.EPERM, False), (errno.EMFILE, True), (None, True)],
)
def test_whether_the_kernel_has_pidfds(
    number: int | None, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pidfd_open(pid: int) -> int:
        if number is None:
            return os.dup(0)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", pidfd_open, raising=False)
    has_pidfds.cache_clear()
    assert has_pidfds() == has
    has_pidfds.cache_clear()


def test_forks_give_up_what_is_kept_from_them_until_it_is_forgotten() -> None:
    fds = os.pipe()
    for fd in fds:
        keep_from_children(fd)
    assert {*fds} <= {*parent_fds()}
    for fd in fds:
        forget_fd(fd)
    assert not {*fds} & {*parent_fds()}
    for fd in fds:
        os.close(fd)


def test_another_file_that_has_got_the_number_of_one_that_was_closed_is_not_given_up() -> None:
    fds, others = os.pipe(), os.pipe()
    keep_from_children(fds[0])
    os.close(fds[0])
    assert fds[0] not in parent_fds()
    os.dup2(others[0], fds[0])
    assert fds[0] not in parent_fds()
    forget_fd(fds[0])
    for fd in (*fds, *others):
        os.close(fd)
