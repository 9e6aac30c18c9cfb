"""Texts in observations: each belongs to the rest of its observation, whatever has come between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from envmgr import as_gymnasium, create_env_manager
from envmgr.wire.block import block_is_possible
from tests.contract.forms import Told, is_told
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_BLOCK_SHARED,
    ALL_MESSAGE,
    INLINE,
    SOME_BLOCK_SHARED,
    THREADS,
    Setup,
    World,
    over,
    ready_all,
    step_all,
)
from tests.faults.traffic import sent_by

N = 3
EACH_WAY = (INLINE, THREADS, ALL_BLOCK, ALL_MESSAGE, ALL_BLOCK_SHARED, SOME_BLOCK_SHARED)
HANDED_OUT = ((True, False), (False, True), ("until_send", True), ("checked", False))
"""How observations are handed out, each with and without `reset_inplace`."""
needs_block = pytest.mark.skipif(not block_is_possible(), reason="no block on this platform")


def told(n: int = N, **how: Any) -> list[Any]:
    return [partial(Told, i, **how) for i in range(n)]


def action(env_id: int, k: int) -> int:
    """Return an action of an env: every few steps its episode ends, of some envs together."""
    return Told.END if (k + env_id // 2) % 4 == 0 else k % 3


def all_told(observations: Any) -> bool:
    return all(map(is_told, observations))


@over(*EACH_WAY)
def test_each_text_belongs_to_its_observation(world: World, setup: Setup) -> None:
    texts: list[list[Any]] = []
    for handed_out, inplace in HANDED_OUT:
        cfg = {"reset_inplace": inplace, "copy_on_get": handed_out, "seed": 5}
        manager = world.make(setup, env_fn=told(), **cfg)
        texts.append([])
        before: list[Any] = []
        for k in range(9):
            ready = ready_all(manager)
            assert all_told(ready.values())
            found = step_all(manager, {i: action(i, k) for i in range(N)})
            assert sorted(found) == [*range(N)]
            assert all_told(timestep.obs for timestep in found.values())
            shown = [*ready.values(), *(timestep.obs for timestep in found.values())]
            # Views are valid through two steps, or until the next one is sent.
            assert handed_out == "until_send" or all_told(before)
            before = shown
            texts[-1] += [obs["mission"] for obs in shown]
        manager.close()
    assert all(run == texts[0] for run in texts), "the same texts, however they are handed out"
    assert len(set(texts[0])) > 3 * 9
    assert len(max(texts[0])) < 2000 < len(max(texts[0], key=len))


@over(*EACH_WAY)
def test_arrays_have_the_texts_of_their_rows(world: World, setup: Setup) -> None:
    for handed_out, inplace in HANDED_OUT:
        cfg = {"reset_inplace": inplace, "copy_on_get": handed_out}
        manager = world.make(setup, env_fn=told(), **cfg)
        kept: list[tuple[Any, list[str]]] = []
        for k in range(9):
            ready = manager.ready_arrays(env_ids=range(N))
            assert rows_are_told(ready.obs)
            manager.send_arrays(ready.env_ids, np.array([action(i, k) for i in range(N)]))
            n_missing = N
            while n_missing:
                batch = manager.recv_arrays()
                n_missing -= len(batch.env_ids)
                assert rows_are_told(batch.obs)
                assert batch.env_ids.tolist() == batch.obs["image"][:, 0, 0].tolist()
                kept.append((batch.obs["mission"], batch.obs["mission"].tolist()))
            kept.append((ready.obs["mission"], ready.obs["mission"].tolist()))
        assert all(texts.tolist() == as_they_were for texts, as_they_were in kept)
        manager.close()


def rows_are_told(obs: Any) -> bool:
    texts = obs["mission"]
    assert type(texts) is np.ndarray
    assert texts.dtype == object
    rows = zip(*(obs[key] for key in ("direction", "image", "mission")), strict=True)
    return all_told(dict(zip(("direction", "image", "mission"), row, strict=True)) for row in rows)


@needs_block
@over(ALL_BLOCK_SHARED, SOME_BLOCK_SHARED)
def test_only_texts_without_room_go_by_message(world: World, setup: Setup) -> None:
    for has_long in (False, True):
        manager = world.make(setup, env_fn=told(has_long=has_long), reset_inplace=True, seed=5)
        observed = manager._running.engine.supervisor.table.observed
        ready_all(manager)
        read: Callable[[int, Any], Any] = observed.read
        found: list[tuple[bool, int]] = []  # of each: is it in its place, and how long is its text

        def noted_read(env_id: int, reference: Any, read: Any = read, found: Any = found) -> Any:
            obs = read(env_id, reference)
            found.append((type(reference) is int, len(obs["mission"])))
            return obs

        observed.read = noted_read
        with sent_by(manager) as sent:
            shown = [step_all(manager, {i: action(i, k) for i in range(N)}) for k in range(9)]
            assert all_told(manager.ready_obs.values())
        assert all_told(timestep.obs for timesteps in shown for timestep in timesteps.values())
        assert not [what for what, *_ in sent if what == "frame"], "actions are posted in any case"
        assert all(is_placed == (length < 1000) for is_placed, length in found)
        assert has_long == any(not is_placed for is_placed, _ in found)
        manager.close()


@over(ALL_BLOCK, ALL_MESSAGE, SOME_BLOCK_SHARED)
def test_no_old_text_is_shown_after_a_reset_that_cancels_a_step(world: World, setup: Setup) -> None:
    for has_long in (False, True):
        manager = world.make(setup, env_fn=told(has_long=has_long), copy_on_get=False)
        for k in range(8):
            ready_all(manager)
            manager.send({i: action(i, k) for i in range(N)})
            manager.reset({1: None} if k % 2 else None)
            if k % 2:
                rest = {}
                while len(rest) < N - 1:
                    rest.update(manager.recv())
                assert all_told(timestep.obs for timestep in rest.values())
            ready = ready_all(manager)
            assert sorted(ready) == [*range(N)]
            assert all_told(ready.values())
        assert manager.stats()["cancelled"] == 4 * N + 4
        manager.close()


@over(INLINE, ALL_BLOCK, SOME_BLOCK_SHARED)
def test_no_old_text_is_shown_by_envs_that_take_the_place_of_others(
    world: World, setup: Setup
) -> None:
    manager = world.make(
        setup,
        env_fn=told(),
        retry_type="renew",
        retry_waiting_time=0,
        max_failures=99,
        max_failures_total=99,
        copy_on_get=False,
    )
    fatal = Told.EXIT if setup.has_processes else Told.RAISE
    for k, odd in enumerate((Told.RAISE, fatal, 0, Told.RAISE, fatal)):
        ready = ready_all(manager)
        assert all_told(ready.values())
        found = step_all(manager, {0: action(0, k), 1: odd, 2: action(2, k)})
        assert all_told(timestep.obs for timestep in found.values())
        if odd:
            assert found[1].info["abnormal"]
            assert found[1].obs["mission"] == ready[1]["mission"], "the last good one"


@over(ALL_BLOCK, ALL_MESSAGE)
def test_no_old_text_is_shown_by_spares(world: World, setup: Setup) -> None:
    env_fn = [partial(Told, 7)] * N  # spares have to be built by the function of the envs
    manager = world.make(setup, env_fn=env_fn, spare_env_num=2, copy_on_get="checked")
    for k in range(12):
        ready = ready_all(manager)
        assert all_told(ready.values())
        found = step_all(manager, {i: action(i, k) for i in range(N)})
        assert all_told(timestep.obs for timestep in found.values())
    assert manager.stats()["swaps"] > 0


@over(INLINE, ALL_BLOCK, ALL_MESSAGE)
def test_a_snapshot_has_the_texts(world: World, setup: Setup) -> None:
    manager = world.make(setup, env_fn=told(), snapshot_copy=True, seed=3)

    def go_on(first: int) -> list[str]:
        texts: list[str] = []
        for k in range(first, first + 6):
            ready = ready_all(manager)
            found = step_all(manager, {i: action(i, k) for i in range(N)})
            shown = [*ready.values(), *(timestep.obs for timestep in found.values())]
            assert all_told(shown)
            texts += [obs["mission"] for obs in shown]
        return texts

    go_on(0)
    snapshot = manager.snapshot()
    expected = go_on(6)
    go_on(1)
    manager.restore(snapshot)
    assert go_on(6) == expected


def test_missions_as_gymnasium_batches_them() -> None:
    for setup in (INLINE, ALL_BLOCK_SHARED):
        manager = create_env_manager(setup.cfg, env_fn=told())
        envs = as_gymnasium(manager, "SameStep")
        obs, _ = envs.reset(seed=1)
        for k in range(9):
            assert type(obs["mission"]) is tuple
            rows = zip(*(obs[key] for key in ("direction", "image", "mission")), strict=True)
            keys = ("direction", "image", "mission")
            assert all_told(dict(zip(keys, row, strict=True)) for row in rows)
            actions = np.array([action(i, k) for i in range(N)])
            obs, _, terminated, _, infos = envs.step(actions)
            for i in np.flatnonzero(terminated):
                assert is_told(infos["final_obs"][i])
        envs.close()
