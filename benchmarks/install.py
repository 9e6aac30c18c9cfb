"""Installs the peers, each as far as it goes: `python install.py ENVIRONMENT [--only PEER]`.

A peer that cannot be installed is named, with the reason, and the others go on. The reasons are
kept in `peers.json` in the environment, where `run.py` finds them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS_DING = HERE / "requirements-ding.txt"
NOTES = "peers.json"

TREETENSOR = "DI-treetensor>=0.5"
SB3 = "stable-baselines3>=2.9,<3"
TIANSHOU = "tianshou>=2,<3"
DING = "DI-engine==0.5.3"
PUFFERLIB = "pufferlib==3.0.0"
TORCHRL = "torchrl>=0.14,<0.15"
RLLIB = "ray[rllib]>=2.60,<3"
# The envs of other packages, and what has envs of its own. By the names that `machine.PACKAGES` and
# `envs.NEEDS` have for them.
GAMES = {
    "ale": ("ale-py>=0.11",),
    "opencv-python-headless": ("opencv-python-headless",),
    "mujoco": ("gymnasium[mujoco]>=1.0",),
    "minigrid": ("minigrid>=3.0",),
    "envpool": ("envpool>=1.2",),
}
# What PufferLib imports besides gymnasium, numpy and psutil.
PUFFERLIB_NEEDS = ("gym==0.23.1", "pettingzoo", "shimmy", "imageio", "psutil")
PUFFERLIB_BUILD = ("setuptools", "wheel", "Cython", "numpy")
# PufferLib's own games need downloads and a compiler and are not measured: its setup can leave them
# out, but then uses a list that it has not made. This makes it.
_SITECUSTOMIZE = "import builtins\nbuiltins.c_extension_paths = []\n"
_WITHOUT_GAMES = {"NO_OCEAN": "1", "NO_TRAIN": "1"}


class InstallError(RuntimeError):
    """pip failed; the message is what it said."""


def pip_install(python: Path, arguments: Sequence[str], extra_env: dict[str, str]) -> None:
    """Run `pip install`.

    Raises:
        InstallError: it failed.
    """
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **extra_env}
    )
    if done.returncode != 0:
        raise InstallError(_reason(done.stderr))


def _reason(errors: str) -> str:
    """Return the line of pip's output that says most."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if "rror:" in line and not line.startswith("error: subprocess")]
    return (named or lines or ["pip failed and said nothing"])[-1][:300]


def install_pufferlib(python: Path) -> None:
    """Install PufferLib's vectorization: its Python code, without its games and its trainer.

    Its metadata wants an older numpy and gymnasium than the peers share; it runs with theirs.
    """
    pip_install(python, [*PUFFERLIB_BUILD, *PUFFERLIB_NEEDS], {})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        pip_install(
            python,
            ["--no-deps", "--no-build-isolation", PUFFERLIB],
            {**_WITHOUT_GAMES, "PYTHONPATH": folder},
        )


def install_ding(python: Path) -> None:
    """Install DI-engine."""
    pip_install(python, ["-r", str(REQUIREMENTS_DING)], {})
    pip_install(python, ["--no-deps", DING], {})


def install_sb3(python: Path) -> None:
    """Install Stable-Baselines3."""
    pip_install(python, [SB3], {})


def install_tianshou(python: Path) -> None:
    """Install tianshou."""
    pip_install(python, [TIANSHOU], {})


def install_torchrl(python: Path) -> None:
    """Install TorchRL."""
    pip_install(python, [TORCHRL], {})


def install_rllib(python: Path) -> None:
    """Install Ray with RLlib."""
    pip_install(python, [RLLIB], {})


def install_treetensor(python: Path) -> None:
    """Install what envmgr's own V2 kinds need besides PyTorch."""
    pip_install(python, [TREETENSOR], {})


PEERS: dict[str, Callable[[Path], None]] = {
    "treetensor": install_treetensor,
    "sb3": install_sb3,
    "tianshou": install_tianshou,
    "torchrl": install_torchrl,
    "pufferlib": install_pufferlib,
    **{
        name: functools.partial(pip_install, arguments=packages, extra_env={})
        for name, packages in GAMES.items()
    },
}
# Each in an environment of its own: DI-engine needs numpy below 2, RLlib one certain gymnasium.
ALONE: dict[str, Callable[[Path], None]] = {"ding": install_ding, "rllib": install_rllib}


def main() -> None:
    """Install the peers of one environment and note what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--torch", default="torch", help="what to tell pip to get PyTorch")
    parser.add_argument("--only", choices=ALONE, help="whose environment it is; else of the others")
    options = parser.parse_args()
    peers = {options.only: ALONE[options.only]} if options.only else PEERS
    environment: Path = options.environment
    python = environment / "bin" / "python"
    failed: dict[str, str] = {}
    print(f"==> installing PyTorch into {environment}, for peers that import it", flush=True)
    try:
        pip_install(python, options.torch.split(), {})
    except InstallError as error:
        # A peer may bring another PyTorch with it, which is very large: better go without the peer.
        without = [name for name in peers if name not in GAMES]
        failed = dict.fromkeys(without, f"PyTorch: {error}")
    for name, install in peers.items():
        if name in failed:
            continue
        print(f"==> installing {name} into {environment}", flush=True)
        try:
            install(python)
        except InstallError as error:
            failed[name] = str(error)
    for name, reason in failed.items():
        print(f"==> {name} cannot be installed and is left out: {reason}", flush=True)
    (environment / NOTES).write_text(json.dumps(failed, indent=1) + "\n")


if __name__ == "__main__":
    main()
