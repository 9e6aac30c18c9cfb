"""F24: envs that print when nobody reads any more, and trainers without stdout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.harness import PATIENCE_S
from tests.faults.test_trainers import PREAMBLE, ROOT

# By our own server, and by multiprocessing, whose methods all end workers in the same way. One of
# them forks the trainer, with what its buffers hold.
contexts = pytest.mark.parametrize("context", ["server", "fork"])

_BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
CHATTY = """
import os, threading

class Buffering(ScriptedEnv):
    def step(self, action):
        sys.stdout.write("kept in the buffer until the end")
        return super().step(action)

class Chatty(ScriptedEnv):
    def __init__(self, *args):
        super().__init__(*args)
        threading.Thread(target=self._talk, daemon=True).start()

    def _talk(self):
        while True:
            print("still talking")

if __name__ == "__main__":
    env_fn = [partial(ENV, i, FOLDER) for i in range(2)]
    manager = create_env_manager({"type": "subprocess", "context": CONTEXT}, env_fn=env_fn)
    manager.launch()
    print("launched", flush=True)
    WAIT
    for _ in range(3):
        timesteps = manager.step({0: 1, 1: 1})
        assert not any("abnormal" in t.info for t in timesteps.values()), timesteps
    manager.close()
    with open(FOLDER + "/done", "w") as file:
        file.write("done")
"""


def _start(
    folder: Path, context: str, env: str, wait: str = "", shell: str = ""
) -> subprocess.Popen[bytes]:
    path = folder / "trainer.py"
    path.write_text(PREAMBLE + CHATTY.replace("ENV", env, 1).replace("WAIT", wait))
    command = [sys.executable, str(path), str(folder), context]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    return subprocess.Popen(
        command,
        env={**_BUFFERED, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@contexts
def test_f24_envs_that_print_while_and_after_the_manager_closes(
    tmp_path: Path, context: str
) -> None:
    process = _start(tmp_path, context, "Chatty")
    _, err = process.communicate(timeout=PATIENCE_S * 2)
    assert (process.returncode, err) == (0, b"")


@contexts
def test_f24_what_envs_have_printed_finds_no_reader_any_more(tmp_path: Path, context: str) -> None:
    process = _start(tmp_path, context, "Buffering", "sys.stdin.read(1)")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        assert process.stdout.readline() == b"launched\n"
        process.stdout.close()
        process.stdin.write(b"go")
        process.stdin.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (0, b"")
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("context", "closed"),
    [
        # What is opened next gets the number of a stream.
        *((context, "<&- >&- 2>&-") for context in ("server", "fork", "spawn", "forkserver")),
        *(("server", closed) for closed in (">&-", "2>&-")),
    ],
)
def test_f24_trainers_without_standard_streams(tmp_path: Path, context: str, closed: str) -> None:
    process = _start(tmp_path, context, "Buffering", shell=closed)
    _, err = process.communicate(timeout=PATIENCE_S * 2)
    assert (process.returncode, err) == (0, b"")
    assert (tmp_path / "done").exists()
