"""Modes: the tests under flags of the interpreter, and many envs under a low limit of fds."""

from __future__ import annotations

import resource
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

from envmgr.testing import Saboteur
from envmgr.types import is_abnormal
from figures import Figure
from figures.commands import run_tests
from figures.loop import ledger_manager

ENV_NUM, QUICK_ENV_NUM = 300, 20
FDS = 1024
ROUNDS = 3
FEW_TESTS = ("tests/unit/test_asserts.py", "tests/contract/test_semantics_steps.py")

# Pytest warns under -O that asserts outside of test modules do not count. Those of the helpers do:
# tests/conftest.py has them rewritten, and tests/unit/test_asserts.py checks that.
_OPTIMIZED = ("-W", "ignore:assertions not in test modules:pytest.PytestConfigWarning")
MODES = {
    "python -O": (("-O",), _OPTIMIZED),
    "python -X dev -W error": (("-X", "dev", "-W", "error"), ()),
}
JOBS = 4
"""So many processes share the tests out, as in `make test`."""


def measure(quick: bool) -> Sequence[Figure]:
    """Run all tests in each mode (quick: a few), and many envs with few fds."""
    which, chosen = ("a few tests", FEW_TESTS) if quick else ("all tests", ())
    figures = []
    for mode, (flags, options) in MODES.items():
        python = shlex.join([sys.executable, *flags])  # xdist would leave out the flags
        jobs = ("--dist", "load", "--maxschedchunk", "10", "--tx", f"{JOBS}*popen//python={python}")
        ran = run_tests(*options, *jobs, *chosen, flags=flags)
        figures.append(Figure(f"{which}, `{mode}`", ran.summary, "all pass", ran.passed))
    figures.append(many_envs(QUICK_ENV_NUM if quick else ENV_NUM))
    return figures


def many_envs(env_num: int, fds: int = FDS) -> Figure:
    """Launch, step, lose a tenth of the workers, go on, and close."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fds, limits[1]))
    lost = env_num // 10
    try:
        with ledger_manager(env_num, type="subprocess") as manager:
            n_steps, n_abnormal = _rounds(manager, lost)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return Figure(
        f"{env_num} envs, a worker each, RLIMIT_NOFILE {fds}",
        f"{n_steps} timesteps, {n_abnormal} abnormal",
        f"{ROUNDS * env_num} timesteps, {lost} abnormal ({lost} workers are killed)",
        (n_steps, n_abnormal) == (ROUNDS * env_num, lost),
    )


def _rounds(manager: Any, lost: int) -> tuple[int, int]:
    """Step all envs a few times, some without their workers; return timesteps and abnormal ones."""
    n_steps = n_abnormal = 0
    saboteur = Saboteur(manager, kinds=("kill",), seed=0)
    for number in range(ROUNDS):
        while len(manager.ready_obs) < manager.env_num:
            time.sleep(0.001)
        if number == 1:
            for env_id in range(lost):
                saboteur.injure(env_id=env_id)
        for timestep in manager.step(dict.fromkeys(range(manager.env_num), number)).values():
            n_steps += 1
            n_abnormal += is_abnormal(timestep.info)
    return n_steps, n_abnormal
