"""The files of workers: how they are called, and that nothing in them is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from envmgr.worker.log_file import LogFile

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (LogFile(0, [0, 1, 2], 0), "worker_0-envs_0-2-generation_0.log"),
        (LogFile(3, [7], 12), "worker_3-env_7-generation_12.log"),
    ],
)
def test_a_file_says_whose_it_is(file: LogFile, name: str) -> None:
    assert file.name == name


CODE = """
import io, logging, os, sys
from envmgr.worker.log_file import LogFile, write_to_log_file
file = LogFile(0, [4], 1)
print("before", flush=True)
write_to_log_file(sys.argv[1], file)
print("one", end=" without an end")
logging.getLogger("mine").info("told")
write_to_log_file(sys.argv[1], file)  # as a later launch does
sys.stdout = io.StringIO()  # as notebooks and test runners have it
write_to_log_file(sys.argv[1], file)
print("two")
logging.basicConfig(format="mine: %(message)s", level="DEBUG", stream=sys.stdout)
logging.debug("set up")
os._exit(0)
"""


def test_a_disk_that_is_full_ends_no_worker(tmp_path: Path) -> None:
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    code = full + CODE.partition("print(")[0] + "write_to_log_file(sys.argv[1], file); os._exit(5)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT).returncode == 5


def test_a_later_launch_writes_on(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], cwd=ROOT, capture_output=True, check=True
    )
    assert (ran.stdout.splitlines(), ran.stderr) == ([b"before"], b"")
    text = (tmp_path / "worker_0-env_4-generation_1.log").read_text()
    first, second, third = text.split("--- ")[1:]
    assert "one without an end" in first
    assert "INFO mine: told" in first
    assert len(second.splitlines()) == 1
    assert third.splitlines()[1:] == ["two", "mine: set up"]
