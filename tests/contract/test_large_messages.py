"""Large messages: they come whole, however workers are started and whatever becomes of them."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest

from envmgr import create_env_manager
from envmgr.testing import AuditedLoop
from envmgr.wire.block import block_is_possible
from envmgr.wire.large_messages import LARGE_BYTES, buffer_offset
from tests.contract.harness import ALL_BLOCK, DEFAULT, Setup, World, over, ready_all, step_all
from tests.contract.large import FORMS, LargeInfos, LargeLedger, assert_same

pytestmark = pytest.mark.skipif(not block_is_possible(), reason="no buffers on this platform")

CONTEXTS = ("server", "fork", "spawn", "forkserver")
N_FORMS = len(FORMS)


def transport_of(manager: Any) -> Any:
    return manager._running.engine.transport


def bytes_of_buffers(manager: Any) -> int:
    """Return how much memory all buffers together take."""
    shared = transport_of(manager)._shared
    laid_out = 0 if shared._memory is None else len(shared._memory)
    return int(os.fstat(shared._memory_fd).st_blocks * 512 - laid_out)


def check_all_forms(manager: Any) -> None:
    """Have each form given by both envs, one with an observation space and one without."""
    ready_all(manager)
    found = [step_all(manager, {0: k, 1: N_FORMS - 1 - k}) for k in [*range(N_FORMS)] * 2]
    for number, timesteps in enumerate(found):  # now: later ones have overwritten nothing
        k = number % N_FORMS
        for i, action in ((0, k), (1, N_FORMS - 1 - k)):
            value = [*FORMS.values()][action]()
            assert timesteps[i].info["action"] == action
            assert_same(timesteps[i].info["x"], value)
            if i == 1:
                assert_same(timesteps[i].obs, [value])
    for name in ("nested", "bytes", "text"):
        for result in manager.call("form", name):
            assert_same(result, FORMS[name]())
    manager.reset()
    ready_all(manager)
    for info in manager.ready_info.values():
        assert_same(info["first"], FORMS["by columns"]())


@over(*(Setup("subprocess", context, num_workers=1) for context in CONTEXTS))
def test_every_form_comes_whole(world: World, setup: Setup) -> None:
    env_fn = [partial(LargeInfos, has_space=True), partial(LargeInfos, has_space=False)]
    manager = world.make(setup, env_fn=env_fn, same_spaces=False)
    check_all_forms(manager)
    assert bytes_of_buffers(manager) > 8 * LARGE_BYTES


def test_where_files_may_not_be_so_large_all_goes_through_pipes(world: World) -> None:
    env_fn = [partial(LargeInfos, has_space=space, file_bytes=1 << 20) for space in (True, False)]
    manager = world.make(ALL_BLOCK, env_fn=env_fn, same_spaces=False)
    check_all_forms(manager)
    shared = transport_of(manager)._shared
    assert os.fstat(shared._memory_fd).st_size < buffer_offset(0)


def test_accounts_are_right_while_workers_are_killed() -> None:
    many = {"max_failures": 10**6, "max_failures_total": 10**6, "num_workers": 2}
    cfg = {"type": "subprocess", "context": "fork", "retry_waiting_time": 0.0, **many}
    env_fn = [partial(LargeLedger, i, episode_length=5) for i in range(4)]
    n_large, killed = 0, set()
    with create_env_manager(cfg, env_fn=env_fn) as manager:
        loop = AuditedLoop(manager)
        for number in range(60):
            loop.send(loop.ledger.fresh_actions(loop.ready()))
            if number % 8 == 7:
                killed.add(pid := min({*transport_of(manager).pids.values()} - killed))
                os.kill(pid, signal.SIGKILL)
            while manager.stats()["outstanding"]:
                for timestep in loop.gather().values():
                    if not timestep.info.get("abnormal"):
                        wanted = LargeLedger.filled(timestep.info)
                        assert_same({key: timestep.info[key] for key in wanted}, wanted)
                        n_large += len(wanted["text"]) > 0
        assert len(killed) == 7
        assert bytes_of_buffers(manager) <= 2 * 4 * (9 * 9 * LARGE_BYTES)
    report = loop.settle()
    assert report.is_clean, str(report)
    assert n_large > 100


def test_views_that_outlive_a_manager_do_not_keep_its_buffers(world: World) -> None:
    env_fn = [partial(LargeInfos, has_space=True)]
    manager = world.make(DEFAULT, env_fn=env_fn, copy_on_get=False)
    view = ready_all(manager)[0]
    fd = os.dup(transport_of(manager)._shared._memory_fd)
    for _ in range(3):
        step_all(manager, {0: 9})
    assert bytes_of_buffers(manager) > 0
    manager.close()
    assert os.fstat(fd).st_size < buffer_offset(0)
    os.close(fd)
    assert view.tolist() == [0, 0, 0]
