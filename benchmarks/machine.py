"""Describes the machine and the libraries, without names of hosts or paths."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

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
# With an environment of their own: DI-engine needs numpy below 2, RLlib one certain gymnasium.
ALONE = ("ding", "rllib")
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
