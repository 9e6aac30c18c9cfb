"""The file of last words: what a worker writes into its place is what is read of it, once."""

from __future__ import annotations

import faulthandler
import io
import os
import sys
from collections.abc import Iterator

import pytest

from envmgr.transport.process.last_words import LastWords
from envmgr.worker import last_words
from envmgr.worker.last_words import Recorder

pytestmark = pytest.mark.skipif(not last_words.ARE_KEPT, reason="kept on Linux only")


@pytest.fixture
def words() -> Iterator[LastWords]:
    words = LastWords()
    try:
        yield words
    finally:
        words.close()


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Where faulthandler was told to report to; this process's own stays as it is."""
    fds: list[int] = []
    monkeypatch.setattr(faulthandler, "enable", lambda *given: fds.extend(given))
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    yield fds
    for fd in fds:
        os.close(fd)


def record(words: LastWords, index: int, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Be the worker of an index for a while; return what its stderr is."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    words.prepare(index)
    Recorder(os.dup(words.fd), index)
    return stream


def test_the_end_of_stderr_and_the_report_are_read_once(
    words: LastWords, reports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = record(words, 3, monkeypatch)
    print("one", file=sys.stderr)
    print("two", file=sys.stderr)
    os.write(reports[0], b"Fatal Python error: Segmentation fault\n\n  File x\n")
    assert stream.getvalue() == "one\ntwo\n", "it has to go where it went before"
    assert words.take(2) == ""
    text = "one\ntwo\nFatal Python error: Segmentation fault\n\n  File x"
    assert words.take(3) == text
    assert words.take(3) == ""


def test_hosts_have_places_of_their_own(
    words: LastWords, reports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in (0, 1, 2):
        record(words, index, monkeypatch)
        print("from", index, file=sys.stderr)
        os.write(reports[-1], f"fault of {index}\n".encode())
    assert [words.take(i) for i in (2, 0, 1)] == [f"from {i}\nfault of {i}" for i in (2, 0, 1)]


def test_only_the_last_whole_lines_are_kept(
    words: LastWords, reports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(words, 0, monkeypatch)
    for k in range(1000):
        print(f"line {k} ä", file=sys.stderr)
    lines = words.take(0).splitlines()
    assert lines == [f"line {k} ä" for k in range(1000 - len(lines), 1000)]
    assert 20 < len(lines) <= 40
    sys.stderr.write("x" * 100_000)
    assert words.take(0) == "x" * 2048


def test_text_that_cannot_be_encoded_is_kept_as_far_as_possible(
    words: LastWords, reports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(words, 0, monkeypatch)
    print("half a pair: \udc80", file=sys.stderr)
    assert words.take(0) == "half a pair: \\udc80"
    with pytest.raises(TypeError):
        sys.stderr.write(b"bytes")  # type: ignore[arg-type]


def test_a_worker_without_stderr_reports_faults_all_the_same(
    words: LastWords, reports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    words.prepare(0)
    Recorder(os.dup(words.fd), 0)
    os.write(reports[0], b"fault")
    assert words.take(0) == "fault"
