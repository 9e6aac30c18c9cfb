"""What holds for every test: the leak guard, hypothesis' settings, when V2 tests are skipped."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.leak_guard import LeakGuard

# The machine under the tests is slow or busy now and then: only pytest's own timeout counts.
hypothesis.settings.register_profile("envmgr", deadline=None, print_blob=True)
hypothesis.settings.load_profile("envmgr")

_TESTS = Path(__file__).resolve().parent

# The asserts of helpers say what they found, and count under `python -O`, as those of tests do.
_helpers = {f"tests.{path.stem}" for path in _TESTS.iterdir()} - sys.modules.keys()
pytest.register_assert_rewrite(*_helpers)

_SOAK, _BENCHMARKS = _TESTS.parent / "soak", _TESTS.parent / "benchmarks"
_guard = LeakGuard()

# Workers that multiprocessing's fork server forks need not import the same again, each by itself.
multiprocessing.set_forkserver_preload(
    ["tests.contract.envs", "envmgr.transport.process.multiprocessing_spawner"]
)
_MANY_MODULES = 100
_n_modules_frozen = 0


def _freeze_what_stays() -> None:
    """Have no collection look at modules any more, neither here nor in what is forked from here.

    A worker's last collection copies every page with an object on it: a fork of this process takes
    twice as long to end without this, and three times as long with PyTorch in it.
    """
    global _n_modules_frozen
    if len(sys.modules) >= _n_modules_frozen + _MANY_MODULES:
        gc.collect()
        gc.freeze()
        _n_modules_frozen = len(sys.modules)


def pytest_collection(session: pytest.Session) -> None:
    """Rewrite the asserts of a share of the modules; the processes beside this one do the others.

    Rewriting them is what collecting all tests takes time for, and each process collects them all.
    """
    config = session.config
    share = getattr(config, "workerinput", None)
    if share is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    apart = ("trainers", "frameworks")
    modules = [p for p in sorted(_TESTS.glob("*/test_*.py")) if p.parent.name not in apart]
    for path in modules[int(share["workerid"][2:]) :: share["workercount"]]:
        # What it raises it raises again where it is collected.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(f"tests.{path.parent.name}.{path.stem}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have no stacks printed of a test that may take longer: pyproject.toml says why."""
    if item.get_closest_marker("timeout") is not None:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    """Give what tests start the same variables in each: managers share a server only then."""
    os.environ["PYTEST_CURRENT_TEST"] = "a test"  # not taken out: pytest takes it out later on


@pytest.fixture(scope="session", autouse=True)
def _signals_are_heard() -> Iterator[None]:
    """Have tests, and what they start, hear the signals that were ignored when this was started.

    In background jobs of a shell, under `nohup` and by some CI runners they are, and processes pass
    that on to those that they start.
    """
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        is_python_s = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_python_s else signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_by_the_session() -> Iterator[None]:
    """Fail if a fixture of wider scope than a test leaves anything behind."""
    before = _guard.snapshot()
    yield
    _fail_on_leaks(_guard.wait_until_clean(before))


@pytest.fixture(autouse=True)
def _nothing_is_left_by_the_test(
    request: pytest.FixtureRequest, _nothing_is_left_by_the_session: None
) -> Iterator[None]:
    """Fail the test if it leaves anything behind; `leak_guard` says what counts."""
    _freeze_what_stays()
    # What the test before has left is what there is: looking costs as much as most tests.
    before = _guard.latest or _guard.snapshot()
    had_torch = "torch" in sys.modules
    yield
    _fail_on_leaks(_guard.wait_until_clean(before))
    if "torch" in sys.modules and not (had_torch or _imports_torch(request.node)):
        pytest.fail(
            "it imports PyTorch, and is not marked to run last: see `torch` in pyproject.toml"
        )


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Look again where a fixture of wider scope may have begun something."""
    if fixturedef.scope != "function":
        _guard.latest = None


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Look again where a fixture of wider scope may have ended something."""
    if fixturedef.scope != "function":
        _guard.latest = None


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return what imports a module of `soak/`, as its scripts do."""
    yield from _imports_from(_SOAK, monkeypatch)


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return what imports a module of `benchmarks/`, as its scripts do."""
    yield from _imports_from(_BENCHMARKS, monkeypatch)


def _imports_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(folder) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def _fail_on_leaks(leaks: list[str]) -> None:
    if leaks:
        pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _imports_torch(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("torch", "v2"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what imports PyTorch last; skip V2 tests where treetensor cannot be had, or else fail.

    A process with PyTorch in it takes three times as long to fork: `make test` has processes take
    the tests in this order.
    """
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:  # each process of `make test` has another name for them, and so none would be run
        raise pytest.UsageError(f"addresses in the names of tests: {unstable}")
    # Those of properties take longest: nobody waits for the one process that has them at the end.
    items.sort(key=lambda item: (_imports_torch(item), "property" not in item.path.parts))
    if importlib.util.find_spec("treetensor") is not None:
        return
    if sys.version_info >= (3, 13):
        reason = "treevalue, which treetensor needs, has no wheels for this Python"
    elif os.environ.get("ENVMGR_TEST_V2") == "no":
        reason = "left out by make V2=no"
    else:
        return
    for item in items:
        if item.get_closest_marker("v2") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
