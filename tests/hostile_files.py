"""What somebody who means harm could write into a config file, for every key of the schema.

    python -m tests.hostile_files FOLDER

goes over all keys: each value either is refused, or is launched; nothing in it may be run, loaded,
imported or connected to. Prints what came of it as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import yaml

from envmgr import config_file
from envmgr.config.file_rules import Below
from envmgr.config.schema import FileRule
from envmgr.config.variables import HARMLESS
from envmgr.config_file import SECTIONS
from envmgr.errors import EnvManagerError

CONTEXTS = ("server", "spawn", "forkserver", "fork")
MODULE = "envmgr_trap"
STANDARD = ("json", "multiprocessing", "pickle", "struct", "signal", "socket")
"""Modules of Python's own that a fresh interpreter imports before it runs code of ours."""
SPRUNG = "sprung"
"""What a trap leaves in its folder."""

GOOD = {
    "MUJOCO_GL": "egl",
    "PYOPENGL_PLATFORM": "osmesa",
    "EGL_PLATFORM": "surfaceless",
    "MESA_GL_VERSION_OVERRIDE": "3.3",
    "SDL_VIDEODRIVER": "dummy",
    "SDL_AUDIODRIVER": "dummy",
    "QT_QPA_PLATFORM": "offscreen",
    "MPLBACKEND": "agg",
    "OMP_NUM_THREADS": "4,2",
    "OMP_WAIT_POLICY": "passive",
    "OMP_PROC_BIND": "close",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "HIP_VISIBLE_DEVICES": "",
    "ROCR_VISIBLE_DEVICES": "GPU-4b6c,GPU-77e1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "JAX_PLATFORMS": "cpu",
    "JAX_PLATFORM_NAME": "cuda",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
}
"""Values of harmless variables; those that are missing here take a 1."""

DANGEROUS = (
    *("PYTHONWARNINGS", "BROWSER", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT"),
    *("PYTHONBREAKPOINT", "PYTHONUSERBASE", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX", "PATH"),
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "DYLD_INSERT_LIBRARIES", "GCONV_PATH", "HOME"),
    *("BASH_ENV", "ENV", "SHELL", "PAGER", "EDITOR", "GIT_SSH_COMMAND", "PERL5OPT", "IFS", "PS4"),
    *("CUDA_INJECTION64_PATH", "CUDA_CACHE_PATH", "XLA_FLAGS", "TF_XLA_FLAGS", "JAX_PLUGINS"),
    *("MUJOCO_PLUGIN_DIR", "QT_PLUGIN_PATH", "LIBGL_DRIVERS_PATH", "VK_ICD_FILENAMES", "DISPLAY"),
    *("__EGL_VENDOR_LIBRARY_FILENAMES", "MESA_LOADER_DRIVER_OVERRIDE", "SDL_VIDEO_X11_HOST"),
    *("http_proxy", "HTTPS_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "WANDB_BASE_URL", "RAY_ADDRESS"),
    *("RAY_AUTH_MODE", "TMPDIR", "MALLOC_CONF", "ENVMGR_ALLOW", "ENVMGR_ALLOW_IMPORTS", "X", "omp"),
)
"""Variables that a file may not set; no list of all of them can be had."""


class Key(NamedTuple):
    """A key of the schema.

    Attributes:
        path: dotted.
        field: where it is declared.
        rule: what a file may set it to.
    """

    path: str
    field: Field[Any]
    rule: FileRule | None


def every_key() -> Iterator[Key]:
    """Yield each key of the schema, also those of sections below."""

    def of(schema: Any) -> Iterator[Key]:
        for field in fields(schema):
            rule = field.metadata["from_file"]
            if isinstance(rule, Below):
                yield from of(rule.schema)
            else:
                yield Key(f"{schema.PATH}.{field.name}", field, rule)

    for schema in SECTIONS.values():
        yield from of(schema)


def hostile_texts(key: str, folder: Path, port: int) -> list[str]:
    """Return texts for a key that leave a trace if they are run, loaded, imported or visited."""
    ending = "jsonl" if key == "manager.episode_log" else "json"
    return [
        f"{folder / 'trap.sh'}",
        f"{MODULE}:spring",
        f"$(touch {SPRUNG});{key}.{ending}",
        f"127.0.0.1:{port}",
    ]


PLACES = ("collect.output", "manager.worker_log", "manager.trace.path", "manager.episode_log")

FORMS: tuple[Callable[[str], Any], ...] = (
    lambda text: text,
    lambda text: [text],
    lambda text: {"trap": text},
    lambda text: {text: 1.0},
)


def hostile_values(key: str, folder: Path, port: int) -> Iterator[Any]:
    """Yield values to try on one key."""
    for text in hostile_texts(key, folder, port):
        for form in FORMS:
            yield form(text)
    if key == "manager.worker_env.set":
        for name in DANGEROUS:
            yield {name: f"{folder / 'trap.sh'}"}
        for name in HARMLESS:
            yield {name: f"{folder / 'trap.sh'}"}
    if key == "manager.metrics.port":
        yield port
    if key == "manager.ray.runtime_env":
        yield {"py_executable": "sh -c 'id > F'; python"}
        yield {"pip": ["evil"], "env_vars": {"LD_PRELOAD": "/x.so"}}
    if key == "manager.preload":
        yield [MODULE]
    if key == "manager.import_names":
        yield [MODULE]
    if key == "collect.loggers":
        yield ["wandb"]
    if key in PLACES:
        yield from ("/tmp/x.json", "../x.json", ".hidden/x.json", "~/x.json", "link/x.json")
    if key == "manager.trace.path":
        yield from ("taken.json", "x.py")


def config_with(values: Mapping[str, Any], **manager: Any) -> dict[str, Any]:
    """Return a config that has these values, by dotted keys, and else is sound."""
    tree: dict[str, Any] = {
        "env": {"id": "CartPole-v1"},
        "manager": {"type": "subprocess", "env_num": 1, **manager},
        "collect": {"steps": 2},
    }
    for path, value in values.items():
        *above, last = path.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    if "env.entry" in values:
        del tree["env"]["id"]
    return tree


class Traps:
    """A folder with traps, which is the working directory, and a port that nobody should visit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        site = folder / "site"
        site.mkdir()
        spring = f"open({str(self.folder / SPRUNG)!r}, 'w').close()\n"
        (site / f"{MODULE}.py").write_text(f"{spring}def spring(*args, **kwargs): pass\n")
        (self.folder / "startup").mkdir()
        (self.folder / "startup" / "sitecustomize.py").write_text(spring)
        for name in STANDARD:
            (self.folder / f"{name}.py").write_text(spring)
        script = self.folder / "trap.sh"
        script.write_text(f"#!/bin/sh\ntouch {self.folder / SPRUNG}\n")
        script.chmod(0o755)
        (self.folder / "taken.json").write_text("{}")
        (self.folder / "link").symlink_to(folder)
        sys.path.append(str(site))
        os.chdir(self.folder)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]

    def sprung(self) -> list[str]:
        """Return what has happened since, and forget it."""
        found = []
        with contextlib.suppress(BlockingIOError):
            self._socket.accept()[0].close()
            found.append("the port was visited")
        for path in self.folder.rglob(SPRUNG):
            path.unlink()
            found.append("a trap has sprung")
        if MODULE in sys.modules:
            found.append("the module was imported")
        return found


def read_or_refused(values: Mapping[str, Any]) -> str | None:
    """Have a config file with these values be read: None, or the error.

    What is in it is not written and parsed, which takes the most time and has tests of its own.
    """
    tree = config_with(values)
    with mock.patch.multiple(
        config_file, read_config_text=lambda file: "", config_in=lambda text, name: tree
    ):
        try:
            config_file.resolve_config("config.yaml")
        except EnvManagerError as error:
            return str(error)
    return None


def launched(values: Mapping[str, Any], *options: str, **manager: Any) -> tuple[int, str]:
    """Run a config file with these values; return the exit code and what was printed."""
    Path("config.yaml").write_text(yaml.safe_dump(config_with(values, **manager)))
    return commanded("run", "config.yaml", "--force", *options)


def commanded(*words: str) -> tuple[int, str]:
    """Run a command; return the exit code and what was printed."""
    from envmgr.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([*words])
    return code, said.getvalue()


STARTERS = (
    ("bench", "config.yaml", "--laps=1", "--seconds=0.1", "--peers=gymnasium"),
    ("tune", "config.yaml", "--seconds=0.5", "--kinds=subprocess"),
    ("check", "config.yaml", "--episodes=1"),
)
"""Commands that start interpreters of their own."""


ALONE = ("env.id", "env.kwargs", "manager.gym_vector.vector_kwargs")
"""Keys with which no env comes about, if their values are hostile ones."""


def go_over_the_schema(folder: Path) -> dict[str, Any]:
    """Try all values of all keys, launch what is let through, and return what came of it."""
    traps = Traps(folder)
    refused: dict[str, list[str]] = {}
    let_through: dict[str, list[Any]] = {}
    for key in every_key():
        for value in hostile_values(key.path, traps.folder, traps.port):
            error = read_or_refused({key.path: value})
            if error is None:
                let_through.setdefault(key.path, []).append(value)
            else:
                refused.setdefault(key.path, []).append(error)
    report: dict[str, Any] = {"refused": refused, "let_through": [*let_through], "sprung": []}
    report["sprung"] += [f"reading: {what}" for what in traps.sprung()]

    failed, n_launches = [], 0

    def launch(values: Mapping[str, Any], may_fail: bool, **manager: Any) -> None:
        nonlocal n_launches
        n_launches += 1
        code, said = launched(values, **manager)
        if code != 0 and not may_fail:
            failed.append(f"{values}: {said}")
        report["sprung"] += [f"{values}: {what}" for what in traps.sprung()]

    together = {key: values for key, values in let_through.items() if key not in ALONE}
    for key in PLACES:  # no folder can be made where there is a file
        together[key] = [value for value in together[key] if not os.path.exists(value)]
    together["manager.worker_env.set"] = [{name: GOOD.get(name, "1") for name in HARMLESS}]
    for turn in range(max(len(CONTEXTS), *map(len, together.values()))):
        context = CONTEXTS[turn % len(CONTEXTS)]
        some = {key: values[turn % len(values)] for key, values in together.items()}
        launch(some, may_fail=False, context=context)
    nothing = {"manager.worker_env.allow": [], "manager.worker_env.deny": ["*"]}
    launch(nothing, may_fail=False)
    for key in ALONE:
        kind = "gym_vector" if key.startswith("manager.gym_vector") else "subprocess"
        for value in let_through.get(key, ())[:2]:
            launch({key: value}, may_fail=True, type=kind)
    Path("config.yaml").write_text(yaml.safe_dump(config_with({})))
    for words in STARTERS:
        code, said = commanded(*words)
        if code != 0:
            failed.append(f"{words}: {said}")
        report["sprung"] += [f"{words}: {what}" for what in traps.sprung()]
    report["failed"], report["n_launches"] = failed, n_launches

    # The traps do spring: what is refused does harm where it is allowed.
    harm = {
        "PYTHONWARNINGS": "all:0:antigravity.x:0:0",
        "BROWSER": f"{traps.folder / 'trap.sh'} %s",
    }
    allowed = [f"--allow-env={name}" for name in harm]
    launched({"manager.worker_env.set": harm}, *allowed)
    report["control"] = [traps.sprung()]
    path = {"PYTHONPATH": str(traps.folder / "startup")}
    launched({"manager.worker_env.set": path}, "--allow-env=PYTHONPATH")
    report["control"] += [traps.sprung()]
    for name in STANDARD:
        subprocess.run([sys.executable, "-c", f"import {name}"], check=False)
        report["control"] += [traps.sprung()]
    socket.create_connection(("127.0.0.1", traps.port)).close()
    report["control"] += [traps.sprung()]
    importlib.import_module(MODULE)
    report["control"] += [traps.sprung()]
    return report


def main() -> None:
    """Go over the schema in a folder, and print what came of it."""
    import gymnasium

    gymnasium.logger.min_level = 50
    warnings.simplefilter("ignore")
    print(json.dumps(go_over_the_schema(Path(sys.argv[1]).resolve())))


if __name__ == "__main__":
    main()
