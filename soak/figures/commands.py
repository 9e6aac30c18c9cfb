"""Runs tests and fuzzers as separate commands, and reads their output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_SHORT = 90
_SUMMARY = re.compile(r"^=* ?((?:\d+ [a-z]+,? ?)+) in [\d.]+s", re.MULTILINE)


class Ran(NamedTuple):
    """The outcome of a command.

    Attributes:
        passed: whether its exit status was 0.
        output: what it printed to stdout; if it failed, to stderr too.
    """

    passed: bool
    output: str

    @property
    def summary(self) -> str:
        """Pytest's summary, or the short lines of anything else; the last line if it failed."""
        found = _SUMMARY.findall(self.output)
        if found:
            return str(found[-1])
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        if not lines:
            return "nothing was printed"
        if not self.passed:
            return lines[-1][:200].replace(str(ROOT), "...")
        return "; ".join(line for line in lines if len(line) <= _SHORT) or lines[0][:200]


def run(arguments: Sequence[str], limit_s: float, **variables: str) -> Ran:
    """Run this Python with `arguments`, from the root of the project.

    Args:
        arguments: the arguments of the interpreter.
        limit_s: seconds after which the command is ended, and counts as failed.
        **variables: environment variables to set.
    """
    env: Mapping[str, str] = {**os.environ, **variables}
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ran(False, f"not finished after {limit_s:.0f} s")
    if done.returncode == 0:
        return Ran(True, done.stdout)
    print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr, flush=True)
    return Ran(False, done.stdout + done.stderr)


def run_tests(
    *arguments: str, flags: Sequence[str] = (), limit_s: float = 3600.0, **variables: str
) -> Ran:
    """Run pytest with `arguments`, in an interpreter with `flags`."""
    command = [*flags, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return run(command, limit_s, **variables)
