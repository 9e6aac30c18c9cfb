"""A config file alone runs nothing: all keys of the schema, with values that would tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile_files import STANDARD, every_key

LET_THROUGH = {
    "env.id": "looked up in gymnasium's registry",
    "env.kwargs": "handed to an env whose package is known to do no harm with them",
    "manager.worker_env.allow": "compared with names of variables",
    "manager.worker_env.deny": "compared with names of variables",
    "manager.worker_log": "a folder below the working directory",
    "manager.episode_log": "a new .jsonl file below the working directory",
    "manager.normalization.keys": "compared with keys of observations",
    "manager.gym_vector.vector_kwargs": "as env.kwargs",
    "manager.env_pool.env_id": "looked up among the tasks of envpool",
    "manager.env_pool.infos": "compared with names of infos",
    "manager.ray.resources": "compared with what the nodes have",
    "manager.trace.path": "a new .json file below the working directory",
    "collect.output": "a folder below the working directory",
}
"""Keys that take texts from anybody, and what becomes of these."""


@pytest.mark.timeout(150)
def test_every_key_refuses_what_could_do_harm_or_does_none_with_it(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if "ENVMGR" not in name}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.hostile_files", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env=clean,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report["sprung"] == []
    assert report["failed"] == []  # so that it is known to have been tried
    assert report["n_launches"] >= 10
    assert [bool(sprung) for sprung in report["control"]] == [True] * (
        4 + len(STANDARD)
    )  # the traps do spring
    assert set(report["let_through"]) == set(LET_THROUGH)
    refused = report["refused"]
    for path, _, rule in every_key():
        assert refused.get(path), path
        if rule is None or rule.can_be_allowed:
            plain = path.removeprefix("manager.")
            found = [e for e in refused[path] if f"--allow {plain}, " in e and "allow=[" in e]
            assert found or path == "manager.type", path  # kinds that are not there are unknown
    for error in refused["manager.worker_env.set"]:
        assert "--allow-env " in error or "is not a string" in error or "must be" in error, error
