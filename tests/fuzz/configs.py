"""Config files as somebody might write them who means harm, or cannot type.

    python -m tests.fuzz.configs 10000

Each is read, and a manager is built from it, without launching it. An audit hook sees what is
imported, written, started and connected meanwhile. It stays for the life of the process, so the
suite runs this in one of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import yaml

from envmgr.cli.config_envs import manager_of
from envmgr.cli.prepare import RunOptions, folder_of, goal_of
from envmgr.config_file import resolve_config
from envmgr.errors import EnvManagerError
from envmgr.registry import ENV_MANAGER_REGISTRY

CONFIGS = Path(__file__).parents[2] / "configs"
SLOWEST_S = 10.0
MOST_GROWTH_MIB = 400
LONGEST_MESSAGE = 20_000
ALLOWED = ("envmgr", "gymnasium")


@dataclass
class ConfigReport:
    """What came of mutated configs.

    Attributes:
        n_configs: how many were read.
        outcomes: "built", or the type of the error.
        violations: what must not be, with the config's number; the seed repeats it.
        slowest_s: the most CPU time that one of them took.
        growth_mib: by how much the peak of resident memory has grown.
    """

    n_configs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    growth_mib: float = 0.0


# -- values ---------------------------------------------------------------------------------------

FORGED = "highway_env"
"""A well-known package that lies beside the configs, and is not installed."""
NAMES = (
    *("os:system", "logging.os:system", "logging:os.system", "logging.os.system", "posix:system"),
    *("subprocess:Popen", "builtins:exec", "builtins:eval", "importlib:import_module", "this:s"),
    *("antigravity:fly", "turtle:done", "pty:spawn", "os.path:os.system", "..os:system", ":", "a:"),
    *("shimmy", FORGED, "minigrid.wrappers:ViewSizeWrapper"),
    *("canary:run", "canary.deep:run", "canary.deep.run", "canary", "canary.deep", "__main__:main"),
    *("gymnasium:make", "gymnasium.envs.registration:load_env_creator", "gymnasium:Env.__class__"),
    *("gymnasium:Env.__subclasses__", "gymnasium.core:np.f2py.main", "gymnasium:core.np.load"),
    *("gymnasium:error.__builtins__", "gymnasium:logger.warnings.sys.modules", "gymnasium:Env"),
    *("gymnasium.wrappers:RecordVideo", "gymnasium.wrappers:TimeLimit", "gymnasium:nothing"),
    *(
        "envmgr.config.env_factories:import_object",
        "envmgr.config.env_factories:ConfiguredEnv",
        "envmgr:launch.os.system",
    ),
    *("envmgr.testing.injuries:send_signal", "envmgr.config.imports:importlib.import_module"),
    *("envmgr.env.figures:os.system", "envmgr.collect.policies:RandomPolicy", "random", "\u00aa:b"),
    *("gymnasium:" + "a." * 500 + "b", "a" * 5000 + ":b", "canary:run.__globals__", "canary:Env()"),
)
IDS = ("highway-v0", "GymV26Environment-v0", "ALEE/Pong-v5")
IDS += ("CartPole-v1", "CartPole-v0", "CartPole", "canary:CartPole-v1", "os:X-v0", "this:Foo-v0")
IDS += (
    "a/b/c-v1",
    "-v1",
    "CartPole-v99999999999999999999",
    "\ud83d-v1",
    "x" * 3000,
    "CartPole-v1\0",
)
PATHS = ("/etc/cron.d", "../x", "~root/x", "a/../../x", "link/x", "out", "\0", "~/x", "/", "", ".")
HOSTS = ("auto", "6.6.6.6:6379", "ray://127.0.0.1:1", "localhost:1", "", None, 3)
KEYS = ("env", "manager", "collect", "type", "id", "entry", "kwargs", "wrappers", "path", "output")
KEYS += ("env_num", "seed", "import_names", "worker_env", "allow", "deny", "set", "policy", "steps")
KEYS += ("num_workers", "worker_affinity", "episode_num", "items", "__class__", "__dict__", "keys")
KEYS += ("ray", "runtime_env", "address", "metrics", "port", "trace", "env_pool", "worker_log")
KEYS += ("preload", "update", "__init__", "<<", "", "a b", "\u00e9", "x" * 2000, "self", "0")


def _number(rng: random.Random) -> Any:
    numbers = (0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**300, 10**900, 65536, 65537, True)
    floats = (float("nan"), float("inf"), -float("inf"), -0.0, 1e308, 1e-320, 0.1, 3.0)
    return rng.choice((*numbers, *floats))


def _value(rng: random.Random, depth: int = 0) -> Any:
    makers: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: _number(rng),
        lambda: rng.choice(NAMES),
        lambda: rng.choice(IDS),
        lambda: rng.choice(PATHS),
        lambda: rng.choice(ENV_MANAGER_REGISTRY.keys()),
        lambda: rng.choice(
            ("auto", "fork", "recover", "drop", "checked", "*", "yes", "\u2028", "{}")
        ),
        lambda: rng.choice((b"bytes", {1, 2}, (1, 2))),
    )
    if depth < 4 and rng.random() < 0.35:
        if rng.random() < 0.5:
            return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        keys = (_number(rng), None, *rng.choices(KEYS, k=4))
        return {rng.choice(keys): _value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice(makers)()


# -- mutations of the tree ------------------------------------------------------------------------


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a tree."""
    entries: Any = ()
    if isinstance(tree, dict):
        entries = tree.items()
    elif isinstance(tree, list):
        entries = enumerate(tree)
    for key, value in list(entries):
        yield tree, key
        yield from _places(value)


def _mutated_tree(rng: random.Random, texts: list[str]) -> str:
    tree = yaml.safe_load(rng.choice(texts))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(tree))
        if not places:
            break
        container, key = rng.choice(places)
        sort = rng.randrange(7)
        if sort == 0 and isinstance(container, dict):
            container[rng.choice(KEYS)] = container.pop(key)
        elif sort == 1 and isinstance(container, dict):
            container[rng.choice(KEYS)] = _value(rng)
        elif sort == 2:
            del container[key]
        elif sort == 3:
            _name_something(rng, tree)
        else:
            container[key] = _value(rng)
    return yaml.safe_dump(tree, allow_unicode=rng.random() < 0.5)


def _name_something(rng: random.Random, tree: Any) -> None:
    """Put a hostile name where names belong."""
    if not isinstance(tree, dict):
        return
    where = rng.randrange(9)
    if where == 7:
        ray = {"address": rng.choice(HOSTS), "runtime_env": {"py_executable": rng.choice(NAMES)}}
        tree["manager"] = {"type": rng.choice(("ray", "base")), "env_num": 2, "ray": ray}
    elif where == 8:
        manager = {
            "trace": rng.choice(PATHS) + ".json",
            "episode_log": rng.choice(PATHS) + ".jsonl",
            "metrics": {"port": rng.choice((80, 9100))},
        }
        tree["manager"] = {"type": "base", "env_num": 2, rng.choice(KEYS): None, **manager}
    elif where == 0:
        tree["env"] = {"entry": rng.choice(NAMES), "kwargs": {"name": "os:system", "path": "/x"}}
    elif where == 1:
        tree["env"] = {"id": rng.choice(IDS)}
    elif where == 2:
        kwargs = {"video_folder": rng.choice(PATHS), "name_prefix": rng.choice(PATHS)}
        wrapper = {"path": rng.choice(NAMES).replace(":", "."), "kwargs": kwargs}
        tree["env"] = {"id": "CartPole-v1", "wrappers": [wrapper]}
    elif where == 3:
        tree["collect"] = {"policy": rng.choice(NAMES), "steps": 10}
    elif where == 4:
        tree["collect"] = {"output": rng.choice(PATHS), "steps": 10}
    elif where == 5:
        names = [rng.choice(NAMES).partition(":")[0] for _ in range(2)]
        key = rng.choice(("import_names", "preload"))
        tree["manager"] = {"type": "base", "env_num": 2, key: names}
    else:
        names = (*KEYS, "A=B", "MUJOCO_GL", "LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS")
        variables = {rng.choice(names): rng.choice((*PATHS, "\ud800", 3, "egl", "1"))}
        tree["manager"] = {"type": "base", "env_num": 2, "worker_env": {"set": variables}}


# -- mutations of the text ------------------------------------------------------------------------

PIECES = (
    *("&a ", "*a", "<<: *a\n", "? ", "- ", ": ", "|\n", ">-\n", "'", '"', "{", "[", "}", "]", "%"),
    *("!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!!binary aGk=\n"),
    *("!!python/object/new:canary.Env {}", "!!python/module:canary", "!!python/tuple [1, 2]"),
    *("!!set {a, b}", "!!omap [a: 1]", "!!int ''", "!!float x", "!!timestamp 2001-99-99", "!<x> y"),
    *("\t", "\0", "\ufeff", "\x85", "\u2028", "\r\n", "\x7f", "---\n", "...\n", "%YAML 9.9\n", "#"),
    *("9" * 5000, "1" + ":1" * 3000, "0x" + "f" * 5000, "1e999999", ".nan", "0b1", "1_0", "0o7"),
    *(
        "[" * 60,
        "{a: " * 60,
        "\n" + " " * 200,
        "x" * 10_000,
        "\ud83d\ude00",
        "=",
        "~",
        "2001-01-01",
    ),
)


def _mutated_text(rng: random.Random, texts: list[str]) -> str:
    text = rng.choice(texts)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, sort = rng.randrange(len(text) + 1), rng.randrange(6)
        lines = text.split("\n")
        if sort == 0:
            text = text[:at] + text[at + rng.randint(1, 20) :]
        elif sort == 1:
            text = (
                text[:at] + chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) + text[at:]
            )
        elif sort == 2:
            line = rng.randrange(len(lines))
            lines.insert(rng.randrange(len(lines)), lines[line] * rng.choice((1, 1, 2)))
            text = "\n".join(lines)
        elif sort == 3:
            line = rng.randrange(len(lines))
            lines[line] = " " * rng.randrange(5) + lines[line]
            text = "\n".join(lines)
        elif sort == 4:
            other = rng.choice(texts)
            text = text[:at] + other[rng.randrange(len(other)) :]
        else:
            text = text[:at] + rng.choice(PIECES) + text[at:]
    return text


def _bomb(rng: random.Random, texts: list[str]) -> str:
    sort = rng.randrange(5)
    if sort == 0:  # each alias ten times the one before
        layers = [f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]" for i in range(12)]
        return "a0: &a0 [x, x]\n" + "\n".join(layers)
    if sort == 1:
        return "env: {kwargs: {a: " + rng.choice("[{") * rng.randrange(20, 3000)
    if sort == 2:
        return "manager: {" + ", ".join(f"k{i}: {i}" for i in range(rng.randrange(3000))) + "}"
    if sort == 3:
        return "env: &a {kwargs: {b: *a}}\n"
    return "manager: {seed: {" + ", ".join(f"{i}: {i}" for i in range(rng.randrange(2000))) + "}}"


def mutated_config(rng: random.Random, texts: list[str]) -> bytes:
    """Return a config file that is not what it should be."""
    mutate = rng.choices((_mutated_tree, _mutated_text, _bomb), (60, 38, 2))[0]
    data = mutate(rng, texts).encode("utf-8", "surrogatepass")
    if rng.random() < 0.02:
        damaged = bytearray(data)
        damaged[rng.randrange(len(damaged))] = rng.getrandbits(8)
        data = bytes(damaged)
    return data


# -- what goes on meanwhile -----------------------------------------------------------------------


class _Watch:
    """Notes what a config must not bring about. Put in place once, and for good."""

    def __init__(self, folder: Path) -> None:
        self.is_on = False
        self.seen: list[str] = []
        self._folder = str(folder)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on or event not in _WATCHED:
            return
        self.is_on = False  # what is done here is not looked at
        try:
            if not _WATCHED[event](arguments, self._folder):
                self.seen.append(f"{event}{arguments!r}"[:300])
        finally:
            self.is_on = True


def _never(arguments: tuple[Any, ...], folder: str) -> bool:
    return False


def _inside(arguments: tuple[Any, ...], folder: str) -> bool:
    path = arguments[0]
    if not isinstance(path, (str, bytes, os.PathLike)):
        return True  # an fd that was opened before
    return os.path.realpath(os.fsdecode(path)).startswith(folder)


def _reads(arguments: tuple[Any, ...], folder: str) -> bool:
    flags = arguments[2]
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    return not flags & writes or _inside(arguments, folder)


_WATCHED: dict[str, Callable[[tuple[Any, ...], str], bool]] = {
    "open": _reads,
    "os.mkdir": _inside,
    "os.remove": _inside,
    "os.rename": _inside,
    "os.rmdir": _inside,
    "os.chmod": _inside,
    "os.symlink": _never,
    **dict.fromkeys(("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn"), _never),
    **dict.fromkeys(("subprocess.Popen", "os.kill", "os.putenv", "os.spawn", "pty.spawn"), _never),
    **dict.fromkeys(("socket.connect", "socket.bind", "webbrowser.open", "ctypes.dlopen"), _never),
}

CANARY = """\
import sys
sys.canary_has_sung = True
def run(*args, **kwargs): pass
class Env: pass
"""


def fuzz_configs(n_configs: int, seed: int = 0, folder: Path | None = None) -> ConfigReport:
    """Read mutated configs, and build managers from those that pass.

    Args:
        n_configs: how many.
        seed: repeats them.
        folder: where they are written; becomes the working directory. None makes one.

    Returns:
        What came of them. There should be no violations.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        return _fuzz_in(folder, n_configs, seed, stack)


def _fuzz_in(folder: Path, n: int, seed: int, stack: contextlib.ExitStack) -> ConfigReport:
    report = ConfigReport()
    site, work = folder / "site", folder / "work"
    for package in (site / "canary" / "deep", work):
        package.mkdir(parents=True)
    (site / "canary" / "__init__.py").write_text(CANARY)
    (site / "canary" / "deep" / "__init__.py").write_text(CANARY)
    (work / f"{FORGED}.py").write_text(CANARY)
    (work / "link").symlink_to(site)
    (work / f"{FORGED}-1.0.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {FORGED}\nVersion: 1.0\n"
    (work / f"{FORGED}-1.0.dist-info" / "METADATA").write_text(metadata)
    (work / "pyproject.toml").write_text('[tool.envmgr]\nallow_imports = ["canary", "os"]\n')
    sys.path.append(str(site))
    stack.callback(sys.path.remove, str(site))
    stack.callback(os.chdir, Path.cwd())
    os.chdir(work)
    texts = [path.read_text() for path in sorted(CONFIGS.glob("*.yaml"))]
    _warm_up(work)
    watch, modules, before_mib = _Watch(work), frozenset(sys.modules), _peak_mib()
    rng = random.Random(seed)
    for number in range(n):
        data = mutated_config(rng, texts)
        _read_one(work, number, data, watch, report)
        report.violations += [f"config {number}: {what}" for what in watch.seen]
        watch.seen.clear()
    new = {
        name for name in frozenset(sys.modules) - modules if name.partition(".")[0] not in ALLOWED
    }
    report.violations += [f"imported {name}" for name in sorted(new)]
    if hasattr(sys, "canary_has_sung"):
        report.violations.append("a module that was not allowed has run")
    report.growth_mib = _peak_mib() - before_mib
    if report.growth_mib > MOST_GROWTH_MIB:
        report.violations.append(f"{report.growth_mib:.0f} MiB more are in use")
    return report


def _warm_up(work: Path) -> None:
    """Import what sound configs need: the kinds of managers, and the modules beside the configs."""
    gymnasium.logger.min_level = logging.CRITICAL
    file = work / "sound.yaml"
    env = {"id": "CartPole-v1", "wrappers": ["gymnasium.wrappers.TimeLimit"]}
    texts = [path.read_text() for path in CONFIGS.glob("*.yaml")]
    managers = [{"type": key, "env_num": 2} for key in ENV_MANAGER_REGISTRY]
    texts += [yaml.safe_dump({"env": env, "manager": manager}) for manager in managers]
    for module in CONFIGS.glob("*.py"):
        shutil.copy(module, work)
    for text in texts:
        file.write_text(text)
        with contextlib.suppress(EnvManagerError):  # nothing says when such a run ends
            _build(file)


def _read_one(work: Path, number: int, data: bytes, watch: _Watch, report: ConfigReport) -> None:
    file = work / "config.yaml"
    file.write_bytes(data)
    began = time.process_time()
    watch.is_on = True
    try:
        outcome = _build(file)
    except EnvManagerError as error:
        outcome = type(error).__name__
        if len(str(error)) > LONGEST_MESSAGE:
            report.violations.append(f"config {number}: a long message: {str(error)[:200]}")
    except BaseException as error:
        outcome = f"not of envmgr: {type(error).__name__}"
        report.violations.append(f"config {number}: {type(error).__name__}: {error} {data[:200]!r}")
    finally:
        watch.is_on = False
    took_s = time.process_time() - began
    report.slowest_s = max(report.slowest_s, took_s)
    if took_s > SLOWEST_S:
        report.violations.append(f"config {number} took {took_s:.1f} s")
    report.n_configs += 1
    report.outcomes[outcome] += 1


def _build(file: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resolved = resolve_config(file)
        manager = manager_of(resolved)
        manager.close()
        goal_of(resolved)
        folder = folder_of(RunOptions(str(file), force=True), resolved)
    if folder is not None:
        folder.discard()
    return "built"


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Run the long form, print what came of it, and fail if that should not be."""
    n_configs = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    logging.getLogger("envmgr").setLevel(logging.CRITICAL + 1)
    began = time.monotonic()
    report = fuzz_configs(n_configs, seed)
    print(f"{report.n_configs} mutated configs in {time.monotonic() - began:.0f} s")
    print(f"  outcomes: {dict(report.outcomes)}")
    print(f"  the slowest took {report.slowest_s:.2f} s of CPU time")
    print(f"  resident memory has grown by {report.growth_mib:.0f} MiB")
    print(f"  violations: {len(report.violations)}")
    for violation in report.violations[:20]:
        print(f"    {violation}")
    sys.exit(bool(report.violations))


if __name__ == "__main__":
    main()
