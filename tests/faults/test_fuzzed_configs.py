"""Configs may be anything: the short form of the fuzzer, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_mutated_configs_are_read_or_refused_and_bring_nothing_about() -> None:
    # In one process: what it imports before it begins takes as long as 250 configs.
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.configs", "400", "7"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("400 mutated configs")
    assert "violations: 0" in ended.stdout


def test_the_watch_sees_what_it_should(tmp_path: Path) -> None:
    """A config that may import anything has the canary sing, and files written elsewhere."""
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tests.fuzz import configs\n"
        "real = configs.resolve_config\n"
        "configs.resolve_config = lambda file: real(file, allow_imports=['canary', 'os'])\n"
        "def mutated(rng, texts):\n"
        '    return b\'env: {entry: "canary:run"}\\nmanager: {env_num: 1}\\n'
        "collect: {steps: 1, output: out}\\n'\n"
        "configs.mutated_config = mutated\n"
        "folder = Path(sys.argv[1]).resolve()\n"
        "build = configs._build\n"
        "def building(file):\n"
        "    open(folder / 'elsewhere', 'w').close()\n"
        "    os.system('true')\n"
        "    return build(file)\n"
        "configs._warm_up = lambda work: None\n"
        "configs._build = building\n"
        "found = configs.fuzz_configs(1, folder=folder).violations\n"
        "print(found)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
    )
    for what in ("imported canary", "has run", "elsewhere", "os.system"):
        assert what in ended.stdout, ended.stdout + ended.stderr
