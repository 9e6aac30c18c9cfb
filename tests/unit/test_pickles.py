"""What a script defines travels in pickles, whatever name the script runs by."""

from __future__ import annotations

import pickle
import sys
import threading
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from envmgr import pickles
from tests.faults.interrupting import at_each_point

SOURCE = "class Thing:\n    number = 3\ndef make():\n    return Thing()\n"


@pytest.fixture(params=["__mp_main__", "<run_path>"])
def script(request: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(request.param)
    exec(SOURCE, vars(module))  # noqa: S102 - as those who run scripts do
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def test_what_it_defines_is_read_where_it_is_not(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = cloudpickle.dumps(script.make)
    whole = pickles.dumps(script.make)
    assert pickles.names_script(pickle.dumps(script.Thing()))
    assert pickles.is_of_script(script.Thing)
    assert cloudpickle.dumps(script.make) == by_name, "others' pickles are as before"
    monkeypatch.delitem(sys.modules, script.__name__)
    made = pickle.loads(whole)()
    assert made.number == 3
    with pytest.raises(Exception, match=r"No module named|Can't get attribute"):
        pickle.loads(by_name)


def test_a_module_that_is_pickled_whole_anyway_stays_so(script: Any) -> None:
    cloudpickle.register_pickle_by_value(script)
    try:
        pickles.dumps(script.make)
        assert script.__name__ in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(script)


def test_a_reduce_that_pickles_by_itself(script: Any) -> None:
    class Nested:
        def __reduce__(self) -> Any:
            return pickle.loads, (pickles.dumps(script.make),)

    found = pickle.loads(pickles.dumps([Nested(), script.make]))
    assert [make().number for make in found] == [3, 3]


def test_an_interrupt_anywhere_leaves_it_to_others(script: Any) -> None:
    """As does a Ctrl-C in a trainer that `multiprocessing` has started by spawn."""
    pickled: list[bytes] = []

    def in_another_thread() -> None:
        pickled.append(pickles.dumps(script.make))

    def by_value() -> None:
        pickles.dumps(script.make)

    for point in at_each_point(lambda: None, by_value):
        assert script.__name__ not in cloudpickle.list_registry_pickle_by_value(), point
        pickled.clear()
        thread = threading.Thread(target=in_another_thread, daemon=True)
        thread.start()
        thread.join(10.0)
        assert pickled, f"a lock is held after an interrupt at {point}"


def test_code_keeps_the_name_of_its_file() -> None:
    code = compile("def fails():\n    return (lambda: 1 / 0)()\n", "/home/me/game.py", "exec")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)  # noqa: S102 - as those who run scripts do
    with pytest.raises(ZeroDivisionError) as raised:
        pickle.loads(pickles.dumps(names["fails"]))()
    assert [str(one.path) for one in raised.traceback][1:] == ["/home/me/game.py"] * 2


def test_modules_are_named_as_ever() -> None:
    assert pickles.dumps(pickle.loads) == cloudpickle.dumps(pickle.loads, protocol=5)
    assert not pickles.is_of_script(cloudpickle.Pickler)
