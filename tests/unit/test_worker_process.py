"""What a worker process is set up with: its bell, its settings, its environment."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from envmgr.wire.frames import split_frame
from envmgr.wire.hosts import WorkerSettings, WorkerSetup
from envmgr.wire.messages import Op
from envmgr.worker import lifeline, process


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="there is no bell to ring")
def test_a_bell_counts_and_one_that_is_full_was_rung_often_enough() -> None:
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        process._ring(bell)
        process._ring(bell)
        assert os.eventfd_read(bell) == 2
        os.eventfd_write(bell, 2**64 - 2)
        process._ring(bell)
    finally:
        os.close(bell)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")
def test_a_lifeline_is_opened_anew_without_waiting_and_not_for_other_programs() -> None:
    read_end, write_end = os.pipe()
    try:
        fd = lifeline._opened_anew(read_end)
        try:
            assert not os.get_blocking(fd)
            assert not os.get_inheritable(fd)
            os.write(write_end, b"x")
            assert os.read(fd, 2) == b"x"
        finally:
            os.close(fd)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_settings_that_cannot_be_read_fail_every_env() -> None:
    sent: list[Any] = []
    orders = WorkerSetup(((3, 1, 7, 0), (4, 0, 8, 0)), (), 0, b"", WorkerSettings())
    process._report_unreadable_settings(orders, ValueError("no"), SimpleNamespace(send=sent.append))
    replies = [parsed[0].message() for parsed in map(split_frame, sent) if parsed is not None]
    assert [reply[:4] for reply in replies] == [(Op.FAILED, 3, 1, 7), (Op.FAILED, 4, 0, 8)]
    for reply in replies:
        assert "settings cannot be unpickled: ValueError: no" in reply.payload.message


def test_a_worker_gets_no_variables_of_mpi_and_capped_threads_of_libraries() -> None:
    found = {"PATH": "/bin", "OMPI_COMM_WORLD_RANK": "0", "SLURM_MPI_TYPE": "x", "A": "1"}
    shown = process.worker_environment(found, WorkerSettings(threads=2))
    assert (shown["PATH"], shown["A"], shown["OMP_NUM_THREADS"]) == ("/bin", "1", "2")
    assert not {"OMPI_COMM_WORLD_RANK", "SLURM_MPI_TYPE"} & shown.keys()
    assert process.worker_environment({"A": "1"}, WorkerSettings(threads=None)) == {"A": "1"}


def test_variables_of_a_worker_are_allowed_denied_and_set() -> None:
    found = {"PATH": "/bin", "LC_ALL": "C", "PYTHONPATH": "x", "AN": "1", "AX": "2", "B": "3"}
    settings = WorkerSettings(threads=None, allow=("A*",), deny=("AX",), set={"B": "4", "C": "5"})
    kept = {"PATH": "/bin", "LC_ALL": "C", "PYTHONPATH": "x", "AN": "1"}
    assert process.worker_environment(found, settings) == {**kept, "B": "4", "C": "5"}


def test_only_the_variables_that_differ_are_touched() -> None:
    class Environment(dict[str, str]):
        touched: list[str] = []  # noqa: RUF012 - of this one class

        def __setitem__(self, name: str, value: str) -> None:
            self.touched.append(name)
            super().__setitem__(name, value)

        def __delitem__(self, name: str) -> None:
            self.touched.append(name)
            super().__delitem__(name)

    environment = Environment({"stays": "1", "goes": "2", "changes": "3"})
    process.replace_environment(environment, {"stays": "1", "changes": "4", "new": "5"})
    assert environment == {"stays": "1", "changes": "4", "new": "5"}
    assert sorted(environment.touched) == ["changes", "goes", "new"]
