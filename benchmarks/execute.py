"""Runs measuring processes, each with a time limit, and ends whatever they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from spec import Spec

MEASURE = Path(__file__).resolve().parent / "measure.py"
LIMIT_S = 90.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_PURE = {"ENVMGR_PURE": "1"}
_LEAST_TRAINED_PER_S = 20.0
_MAX_CHARACTERS = 300


def take(spec: Spec, python: str) -> dict[str, Any]:
    """Return the figures of one measurement.

    Args:
        spec: what to measure.
        python: the interpreter that has the library.

    Returns:
        Figures, or `{"unavailable": reason}`, or `{"error": reason}`.
    """
    training_s = spec.train_steps / _LEAST_TRAINED_PER_S
    limit_s = LIMIT_S + spec.seconds + spec.warm_up_s + training_s
    with tempfile.TemporaryDirectory() as folder:  # PufferLib leaves a link where it runs
        process = subprocess.Popen(
            [python, "-W", "ignore", str(MEASURE), spec.to_json()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=folder,
            env={**os.environ, **_ONE_THREAD, **(_PURE if spec.options.get("pure") else {})},
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"error": f"not finished after {limit_s:.0f} s"}
        finally:
            _end_group(process)
    if process.returncode != 0 or not out.strip():
        return {"error": f"exit status {process.returncode}: {_last_line(errors)}"}
    result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return result


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _last_line(text: str) -> str:
    """Return the last line that says something, without the paths of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[-1] if lines else "nothing was printed"
    for path in (str(MEASURE.parents[1]), sys.prefix, str(Path.home())):
        line = line.replace(path, "...")
    return line[:_MAX_CHARACTERS]
