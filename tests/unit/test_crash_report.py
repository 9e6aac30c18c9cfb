"""The file of last words: what a worker writes into its place is what is read of it, once."""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envmgr.transport.process import stacks
from envmgr.transport.process.last_words import LastWords
from envmgr.transport.process.stacks import Stacks, of_envs
from envmgr.worker import crash_report
from envmgr.worker.crash_report import STACKS_SIGNAL, CrashRecorder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kept on Linux only")


def test_they_are_kept_where_a_file_needs_no_name() -> None:
    assert crash_report.ARE_KEPT is hasattr(os, "memfd_create")


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
    monkeypatch.setattr(faulthandler, "register", lambda signum, fd: fds.append(fd))
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    yield fds
    for fd in fds:
        os.close(fd)


def record(words: LastWords, index: int, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Be the worker of an index for a while; return what its stderr is."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    words.prepare(index)
    CrashRecorder(os.dup(words.fd), index)
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


def test_what_a_process_forked_by_an_env_writes_is_not_kept(
    words: LastWords, reports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[Callable[[], None]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda after_in_child: hooks.append(after_in_child))
    stream = record(words, 0, monkeypatch)
    print("of the worker", file=sys.stderr)
    hooks[0]()
    print("of its child", file=sys.stderr)
    assert stream.getvalue() == "of the worker\nof its child\n"
    assert words.take(0) == "of the worker"


def test_hosts_have_places_of_their_own(
    words: LastWords, reports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in (0, 1, 2):
        record(words, index, monkeypatch)
        print("from", index, file=sys.stderr)
        os.write(reports[-2], f"fault of {index}\n".encode())
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
    CrashRecorder(os.dup(words.fd), 0)
    os.write(reports[0], b"fault")
    assert words.take(0) == "fault"


STACKS = f"""Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 930 in wait
  File "{Path(crash_report.__file__).parent}/process.py", line 156 in watch
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f02 (most recent call first):
  File "/home/me/pool.py", line 7 in work

Current thread 0x00007f03 (most recent call first):
  File "/home/me/game.py", line 15 in simulate
  File "/home/me/game.py", line 8 in step
  File "{Path(crash_report.__file__).parent}/env_runner.py", line 80 in step
  File "<string>", line 1 in <module>
"""

OF_ENVS = """Thread 0x00007f02 (most recent call first):
  File "/home/me/pool.py", line 7 in work

Current thread 0x00007f03 (most recent call first):
  File "/home/me/game.py", line 15 in simulate
  File "/home/me/game.py", line 8 in step"""


def test_stacks_are_shown_without_what_is_around_the_env() -> None:
    assert of_envs(STACKS) == OF_ENVS
    assert of_envs("") == ""


def test_reports_of_fatal_signals_have_the_frames_of_envs_only(
    words: LastWords, reports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(words, 0, monkeypatch)
    os.write(reports[0], f"Fatal Python error: Aborted\n\n{STACKS}".encode())
    assert words.take(0) == f"Fatal Python error: Aborted\n\n{OF_ENVS}"


def test_a_call_of_the_env_into_envmgr_is_shown_with_the_env_s() -> None:
    """As where it hangs in a write to its stderr, which a worker keeps the end of."""
    lines = STACKS.splitlines()[8:]
    kept = lines[3].replace("env_runner.py", "crash_report.py")
    shown = [lines[0], kept, *lines[1:3]]
    assert of_envs("\n".join([*shown, *lines[3:]])) == "\n".join(shown)


def test_of_a_stack_of_nothing_else_the_calls_that_serve_envs_are_shown() -> None:
    # But not how the process came to them, which is some twenty calls of the worker server.
    ours = STACKS.splitlines()[8:9] + STACKS.splitlines()[11:]
    assert "Current thread" in ours[0]
    assert of_envs("\n".join(ours)) == "\n".join(ours[:2])


def test_stacks_go_into_a_file_that_others_find_and_empty(
    words: LastWords, reports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(words, 2, monkeypatch)
    _, fd = reports
    file = stacks._file_of(os.getpid())
    assert file is not None
    for text in ("first\n", "second, which is longer\n"):
        os.ftruncate(file, 0)
        os.write(fd, text.encode())
        assert stacks._read(file) == text, "written at the end, which is the beginning again"
    os.close(file)
    assert words.take(2) == "", "they are no last words"
    assert stacks._file_of(2**22 + 1) is None, "there is no such process"


def test_a_process_that_is_no_worker_is_not_sent_the_signal() -> None:
    asker = Stacks()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = asker.of(process.pid)
        assert process.poll() is None
        process.kill()
    assert found.startswith(f"no stacks: process {process.pid} blocks the signal")
    assert "memory" in found
    assert asker.of(process.pid) == "", "it is gone"


@pytest.mark.parametrize("which", range(4))
def test_a_process_of_another_user_is_not_sent_the_signal(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [str(os.geteuid())] * 4
    status = {"State": "S", "SigCgt": f"{1 << (STACKS_SIGNAL or 1) - 1:x}"}
    monkeypatch.setattr(os, "getsid", lambda pid: pid)
    assert stacks._listens(1, {**status, "Uid": "\t".join(ids)})
    ids[which] = "4711"
    theirs = {**status, "Uid": "\t".join(ids)}
    assert not stacks._listens(1, theirs)
    monkeypatch.setattr(stacks, "status_of", lambda pid: theirs)
    monkeypatch.setattr(os, "kill", None)
    assert Stacks().of(1).startswith("no stacks: process 1 is another user's")


def pass_time_by_looking(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have every process be a worker that listens, and time pass when somebody sleeps."""
    clock = [100.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    times = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr(stacks, "time", times)
    calls = dict.fromkeys(["kill", "ftruncate", "close"], lambda *_: None)
    monkeypatch.setattr(stacks, "os", SimpleNamespace(**calls, geteuid=os.geteuid))
    monkeypatch.setattr(stacks, "_file_of", lambda pid: -1)
    monkeypatch.setattr(stacks, "_read", lambda file: "")
    monkeypatch.setattr(stacks, "status_of", lambda pid: {"State": "S"})
    monkeypatch.setattr(stacks, "_listens", lambda pid, status: True)
    monkeypatch.setattr(stacks, "_patience_s", lambda pid: 0.1)
    return clock


def test_many_that_do_not_answer_are_not_waited_for_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = pass_time_by_looking(monkeypatch)
    deaf = Stacks()
    for _ in range(100):
        assert deaf.of(1).startswith("no stacks: ")
    assert 0.5 <= clock[0] - 100.0 < 1.2, "half a second for all, and a moment for each"
    clock[0] += 5.0
    began = clock[0]
    deaf.of(1)
    assert clock[0] - began >= 0.1, "later, each is waited for again"


def test_an_answer_is_read_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = pass_time_by_looking(monkeypatch)
    written = lambda: int((clock[0] - 100.0) * 1e5)  # noqa: E731
    monkeypatch.setattr(stacks, "_read", lambda file: STACKS[: written()])
    monkeypatch.setattr(stacks, "_patience_s", lambda pid: inf if written() < len(STACKS) else 0.1)
    assert Stacks().of(1) == OF_ENVS
    assert clock[0] - 100.0 < 0.05


@pytest.mark.parametrize("shown", ["", STACKS[:80]], ids=["queued", "writing"])
def test_a_worker_that_has_no_core_is_waited_for(
    shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = pass_time_by_looking(monkeypatch)
    has_none = lambda: clock[0] < 100.3  # noqa: E731
    monkeypatch.setattr(stacks, "_patience_s", lambda pid: inf if has_none() else 0.1)
    monkeypatch.setattr(stacks, "_read", lambda file: shown if has_none() else STACKS)
    assert Stacks().of(1) == OF_ENVS
    assert 0.3 <= clock[0] - 100.0 < 0.35


def test_what_is_written_between_two_looks_at_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = pass_time_by_looking(monkeypatch)
    is_queued = [True]

    def look(while_queued: Any, later: Any) -> Any:
        found = while_queued if is_queued else later
        if clock[0] > 100.2:
            is_queued.clear()  # it gets its core after this look
        return found

    monkeypatch.setattr(stacks, "_patience_s", lambda pid: look(inf, 0.1))
    monkeypatch.setattr(stacks, "_read", lambda file: look("", STACKS))
    assert Stacks().of(1) == OF_ENVS


def test_many_that_have_no_core_are_not_waited_for_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = pass_time_by_looking(monkeypatch)
    monkeypatch.setattr(stacks, "_patience_s", lambda pid: inf)
    queued = Stacks()
    for _ in range(100):
        assert queued.of(1).startswith("no stacks: ")
    assert 0.5 <= clock[0] - 100.0 < 1.2


NEITHER, OURS, _, BOTH = (f"{bits << (STACKS_SIGNAL or 1) - 1:016x}" for bits in range(4))


@pytest.mark.parametrize(
    ("state", "pending", "blocked", "patience_s"),
    [
        ("R (running)", OURS, [NEITHER], inf),
        ("S (sleeping)", OURS, [BOTH, NEITHER], inf),
        ("S (sleeping)", OURS, [BOTH, BOTH], 0.004),  # no thread takes it
        ("S (sleeping)", NEITHER, [BOTH, OURS], inf),  # a thread is in the handler
        ("S (sleeping)", OURS, [BOTH, OURS], inf),  # the same, and somebody else has asked
        ("S (sleeping)", NEITHER, [BOTH, NEITHER], 0.1),  # it has been taken, and may be answered
        ("T (stopped)", OURS, [NEITHER], 0.004),
        ("Z (zombie)", NEITHER, [], 0.004),
    ],
)
def test_who_is_waited_for(
    state: str,
    pending: str,
    blocked: list[str],
    patience_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stacks, "status_of", lambda pid: {"State": state, "ShdPnd": pending})
    monkeypatch.setattr(stacks, "_blocked_by_threads", lambda pid: iter(blocked))
    assert stacks._patience_s(1) == patience_s


def test_a_worker_that_cannot_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = pass_time_by_looking(monkeypatch)
    monkeypatch.setattr(stacks, "_patience_s", lambda pid: 0.004)
    assert Stacks().of(1).startswith("no stacks: ")
    assert clock[0] - 100.0 < 0.01


def test_of_a_process_that_blocks_all_signals_nothing_is_awaited() -> None:
    number = STACKS_SIGNAL
    assert number is not None
    script = "import signal; signal.pthread_sigmask(0, signal.valid_signals()); print(input(1))"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"1"
        assert stacks._patience_s(process.pid) == 0.1, "no signal is pending"
        os.kill(process.pid, number)
        assert stacks._patience_s(process.pid) == 0.004, "its only thread blocks them all"
        process.kill()


def test_a_process_that_runs_a_handler_of_the_signal_is_told_from_others() -> None:
    number = STACKS_SIGNAL
    assert number is not None
    assert stacks._patience_s(os.getpid()) == 0.1
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        assert stacks._patience_s(os.getpid()) == inf
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        assert stacks._patience_s(os.getpid()) == 0.1, "it blocks them all"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
