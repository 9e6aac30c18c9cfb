"""The ordinary step in C under the sanitizers of addresses and of undefined behaviour.

It is compiled with them into a temporary folder, and put to the tests of tests/unit/test_hot.py and
to random cases (`tests.fuzz.hot`), with the memory of Python in the hands of malloc.

python -m tests.fuzz.sanitized 20000
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "envmgr" / "_hot.c"
FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
OPTIONS = {
    "PYTHONMALLOC": "malloc",
    # Python keeps much to its end.
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
}


def compiled(folder: str, compiler: str) -> Path:
    """Compile the module with sanitizers into a folder; return where it is."""
    made, include = Path(folder) / "_hot.abi3.so", sysconfig.get_paths()["include"]
    command = [compiler, *FLAGS.split(), "-fPIC", "-shared", f"-I{include}", str(SOURCE)]
    subprocess.run([*command, "-o", str(made)], check=True)
    return made


CHILD = """
import importlib.util, sys

path, count = sys.argv[1:]
spec = importlib.util.spec_from_file_location("envmgr._hot", path)
sys.modules["envmgr._hot"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

import pytest

status = int(pytest.main(["-q", "-p", "no:cacheprovider", "tests/unit/test_hot.py"]))
from tests.fuzz import hot

assert hot.hot is module, "another module is used"
if status == 0:
    print(f"sanitized: {sum(hot.fuzz(1, int(count)).values())} outcomes compared, all equal")
sys.exit(status)
"""
"""Has envmgr use the module, before anything of it is imported; pytest imports the tests first."""


def main() -> None:
    """Compile, and run the tests in a process that has the sanitizers."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        sys.exit("no compiler: C not tested")
    count = sys.argv[1] if len(sys.argv) > 1 else "2000"
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    with tempfile.TemporaryDirectory() as folder:
        made = compiled(folder, compiler)
        environment = {**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(libraries)}
        environment.pop("ENVMGR_PURE", None)
        command = [sys.executable, "-c", CHILD, str(made), count]
        done = subprocess.run(command, env=environment, cwd=ROOT, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
