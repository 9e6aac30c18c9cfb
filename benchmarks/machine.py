"""Describes the machine and the libraries, without names of hosts or paths."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from install import ALONE

# library -> (module to import, distribution on PyPI)
PACKAGES = {
    "envmgr": ("envmgr", "rl-env-manager"),
    "gymnasium": ("gymnasium", "gymnasium"),
    "sb3": ("stable_baselines3", "stable-baselines3"),
    "tianshou": ("tianshou", "tianshou"),
    "pufferlib": ("pufferlib", "pufferlib"),
    "ding": ("ding", "DI-engine"),
    "torchrl": ("torchrl", "torchrl"),
    "rllib": ("ray.rllib", "ray"),
    "ale": ("ale_py", "ale-py"),
    "envpool": ("envpool", "envpool"),
}
_ASK = """
import importlib.metadata as m, importlib.util as u, json, sys
module, names = sys.argv[1], sys.argv[2:]
found = {}
for name in names if u.find_spec(module) else ():
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        found[name] = "of unknown version"
print(json.dumps(found))
"""


def describe() -> dict[str, Any]:
    """Return CPU, cores, memory, kernel and Python."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def when() -> dict[str, str]:
    """Return the date, and the commit of this checkout: both go with what is measured."""
    found = {"date": datetime.date.today().isoformat()}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        changed = _git("diff", "--name-only", "HEAD", "--", ":/envmgr")
        found["commit"] = _git("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")
    return found


def when_text(measured: Mapping[str, Any]) -> str:
    """Return in words what `when` has noted; `+` says that envmgr had been changed since."""
    commit = measured.get("commit")
    return f"{measured['date']}, commit {commit}" if commit else str(measured["date"])


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


class Watch:
    """How much of the machine others have taken since it was made: what was measured says so."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._own, self._all, self._host = _own_cpu_s(), *_cpu_s()

    def taken(self) -> dict[str, float]:
        """Return shares of all cores: those of `others`, and of the other guests of the `host`.

        Others are processes beside this one and those that it has started. Both are 0 where there
        is no /proc/stat.
        """
        capacity = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        everything, host = _cpu_s()
        others = everything - self._all - (_own_cpu_s() - self._own)
        shares = {"others": others / capacity, "host": (host - self._host) / capacity}
        return {name: round(max(share, 0.0), 3) for name, share in shares.items()}


def _own_cpu_s() -> float:
    """Return the CPU time of this process and of all that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _cpu_s() -> tuple[float, float]:
    """Return the CPU time of all processes, and what the host gave to its other guests."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0, 0.0
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, path.read_text().split()[1:11])
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / ticks, steal / ticks


def library_versions(library: str, python: str) -> dict[str, str]:
    """Return the versions of a library and of its numpy; empty if it is not installed."""
    module, distribution = PACKAGES[library]
    command = [python, "-c", _ASK, module, distribution, "numpy", "gymnasium"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    versions: dict[str, str] = json.loads(answer.stdout)
    return versions


def reason_missing(library: str, environment: Path) -> str:
    """Return why `install.py` could not install a library, or a package, into an environment."""
    notes = environment / "peers.json"
    reasons = json.loads(notes.read_text()) if notes.exists() else {}
    otherwise = "not installed in this environment; `make bench` or `make scoreboard` installs it"
    return str(reasons.get(library, otherwise))


def default_python(library: str) -> str:
    """Return this interpreter, or for those of ALONE that of the environment beside this one."""
    if library not in ALONE:
        return sys.executable
    prefix = Path(sys.prefix)
    return str(prefix.with_name(f"{prefix.name}-{library}") / "bin" / "python")


def _field(path: Path, name: str) -> str:
    if path.exists():
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
