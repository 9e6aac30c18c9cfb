"""Steps whose hosts need not ring, when something else than expected gathers them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from envmgr import make
from envmgr.errors import EnvManagerError
from envmgr.wire.block import RING_LAST, block_is_possible

N = 4


class WithPid:
    """A factory of CartPoles that know the process they run in."""

    def __call__(self) -> Any:
        import gymnasium

        env = gymnasium.make("CartPole-v1")
        env.unwrapped.worker_pid = os.getpid()  # type: ignore[attr-defined]
        return env


@pytest.mark.skipif(not block_is_possible(), reason="steps go by message here")
def test_an_interrupted_gather_has_every_host_ring() -> None:
    with make(WithPid(), N, type="subprocess", seed=0) as manager:
        pids = manager.get_attr("worker_pid")
        asked: list[int] = []
        with manager._running.calling as supervisor:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            # What `step` does before it waits; Ctrl-C would end it here.
            assert supervisor.submitter.by_id(dict.fromkeys(range(N), 0), RING_LAST)
            transport = supervisor.hosts.transport
            ring = transport.ring

            def noted(host_ids: Sequence[int], *, asks: bool = False) -> None:
                if asks:
                    asked.extend(host_ids)
                ring(host_ids, asks=asks)

            transport.ring = noted  # type: ignore[method-assign]
        assert manager.recv(min_ready=1, timeout_s=0.0) == {}
        assert len(asked) == len(set(asked)) == N
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        received: dict[int, Any] = {}
        while len(received) < N:
            received.update(manager.recv(min_ready=1))
        assert sorted(received) == list(range(N))


@pytest.mark.parametrize("key", [True, 1.0])
def test_what_only_equals_an_env_id_is_refused_whatever_was_stepped_before(key: Any) -> None:
    with make("CartPole-v1", 2, type="subprocess", seed=0) as manager:
        manager.step({1: 0})
        with pytest.raises(EnvManagerError):
            manager.step({key: 0})
        with pytest.raises(EnvManagerError):
            manager.send_arrays([key], [0])
