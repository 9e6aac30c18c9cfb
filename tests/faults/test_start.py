"""Factories that cannot get to a worker: F32."""

from __future__ import annotations

import multiprocessing.util
import os
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from envmgr.errors import ConfigError
from tests.contract.envs import ScriptedEnv
from tests.contract.harness import PATIENCE_S, Setup, World, over, ready_all

ROOT = Path(__file__).parents[2]
pickling = over(
    *(Setup("subprocess", context, True) for context in ("server", "spawn", "forkserver")),
    Setup("async_subprocess", "server", False, num_workers=1),
)


class Holder:
    """A factory that holds something."""

    def __init__(self, folder: str, thing: Any) -> None:
        self._folder = folder
        self._thing = thing

    def __call__(self) -> Any:
        return ScriptedEnv(1, self._folder)


class RefusesToBePickled:
    def __reduce__(self) -> Any:
        raise RuntimeError("not this one")


@pytest.mark.parametrize("thing", ["a lock", "a generator", "an object of its own mind"])
@pickling
def test_f32_a_factory_that_cannot_be_pickled_is_refused_before_any_process(
    world: World, setup: Setup, thing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **options: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", refuse)
    things = {"a lock": threading.Lock(), "a generator": (number for number in range(3))}
    env_fn = [
        partial(ScriptedEnv, 0, world.folder),
        Holder(world.folder, things.get(thing, RefusesToBePickled())),
    ]
    manager = world.make(setup, launch=False, env_fn=env_fn)
    with pytest.raises(ConfigError, match=r"env_fn of env 1 .* cannot be sent"):
        manager.launch()
    assert world.journal(0) == [], "an env was built"
    assert manager.closed


@over(Setup("subprocess", "fork", True))
def test_f32_fork_needs_no_pickling(world: World, setup: Setup) -> None:
    env_fn = [
        partial(ScriptedEnv, 0, world.folder),
        Holder(world.folder, threading.Lock()),
    ]
    assert [*ready_all(world.make(setup, env_fn=env_fn))] == [0, 1]


MAIN = """
import sys
from functools import partial
from envmgr import create_env_manager
from envmgr.errors import ConfigError
from tests.contract.envs import ScriptedEnv

sys.modules["__main__"].__file__ = "/nowhere/trainer.py"
env_fn = [partial(ScriptedEnv, 0, sys.argv[1])]
manager = create_env_manager({"type": "subprocess", "context": sys.argv[2]}, env_fn=env_fn)
try:
    manager.launch()
    print("launched")
except ConfigError as error:
    print("refused:", error)
manager.close()
"""


@pytest.mark.parametrize("context", ["server", "fork", "spawn", "forkserver"])
def test_f32_a_main_script_that_is_gone_is_named_by_those_who_need_it(
    tmp_path: Path, context: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MAIN), str(tmp_path), context],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    if context in ("server", "fork"):
        assert done.stdout == "launched\n"
    else:
        assert done.stdout.startswith(f"refused: context: {context} ")
        assert "/nowhere/trainer.py" in done.stdout
        assert "context: server" in done.stdout
        assert not list(tmp_path.iterdir()), "an env was built"


CHILD = """
import multiprocessing
import runpy
import sys
from dataclasses import dataclass

import gymnasium

from envmgr import create_env_manager


@dataclass
class Note:
    text: str


class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(9)
    action_space = gymnasium.spaces.Discrete(9)
    kept = None

    def reset(self, *, seed=None, options=None):
        return 0, {"note": helper(options["note"].text if options else "begun")}

    def step(self, action):
        return int(action), 1.0, False, False, {"note": helper("stepped")}

    def keep(self, note):
        self.kept = note
        return isinstance(note, Note)


def helper(text):
    return Note(text)


def train():
    cfg = {"type": "subprocess", "num_workers": 1, "context": CONTEXT, "snapshot_copy": True}
    with create_env_manager(cfg, env_fn=[Env, lambda: Env()]) as manager:
        notes = [type(info["note"]) for info in manager.ready_info.values()]
        notes += [type(t.info["note"]) for t in manager.step({0: 3, 1: 4}).values()]
        kept = manager.call("keep", Note("kept"))
        manager.reset({0: {"note": Note("asked")}})
        manager.ready_obs
        asked = manager.ready_info[0]["note"]
        manager.restore(manager.snapshot())
        notes += map(type, manager.get_attr("kept"))
        print(Env.__module__, {*notes} == {Note}, kept, asked == Note("asked"), flush=True)


CONTEXT = sys.argv[2]
if __name__ == "__main__":
    method = sys.argv[1]
    child = multiprocessing.get_context(method).Process(target=train)
    child.start()
    child.join()
elif __name__ == "<run_path>":
    train()
"""


@pytest.mark.parametrize("context", ["server", "spawn"])
@pytest.mark.parametrize("way", ["spawn", "forkserver", "spawn -m", "run_path"])
def test_f32_classes_of_a_script_that_runs_by_another_name_than_main(
    tmp_path: Path, way: str, context: str
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "script.py").write_text(CHILD)
    method, _, module = way.partition(" ")
    if context == "spawn" and (way in ("forkserver", "run_path")):
        pytest.skip("as by spawn; or it imports a script that is not there")
    code = f"import runpy; runpy.run_path({str(package / 'script.py')!r})"
    command = ["-c", code] if way == "run_path" else [str(package / "script.py")]
    done = subprocess.run(
        [sys.executable, *(["-m", "package.script"] if module else command), method, context],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
        check=False,
    )
    name = "<run_path>" if way == "run_path" else "__mp_main__"
    assert (done.stdout, done.stderr) == (f"{name} True [True, True] True\n", "")
