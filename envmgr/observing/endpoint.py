"""An OpenMetrics endpoint on the loopback interface, with `prometheus_client`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from envmgr.errors import ConfigError
from envmgr.interruptible import join_thread
from envmgr.lifecycle import EnvState
from envmgr.optional_packages import imported
from envmgr.proc import resident_bytes
from envmgr.wire.board import COUNTERS, Board
from envmgr.wire.latencies import BOUNDS, KINDS, N_BUCKETS, SUM, Numbers, quantiles, sane

ADDRESS = "127.0.0.1"
_SHOWN = (0.5, 0.99)
_PER_BUCKET = 8
"""How many buckets of a board make one of a scrape, which has one for each doubling of time."""

_MEANINGS = {
    "actions": "actions accepted",
    "timesteps": "timesteps delivered",
    "episodes": "episodes that ended",
    "failures": "failures of envs",
    "renewals": "envs renewed after failures",
}


class Endpoint:
    """A server that shows the board of a manager to whoever asks for `/metrics`.

    Args:
        board: returns the board; None once there is none.

    Attributes:
        port: the port that it listens on.

    Raises:
        MissingDependencyError: `prometheus_client` is not installed.
        ConfigError: the port is taken, or this process may not take it.
    """

    def __init__(self, port: int, board: Callable[[], Board | None]) -> None:
        prometheus_client = imported(
            "prometheus_client",
            "manager.metrics.port needs prometheus_client",
            extra="metrics",
            note=", or leave the port out",
        )
        self._board = board
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, ADDRESS, registry
            )
        except OSError as error:
            raise ConfigError(
                f"manager.metrics.port is {port}, which cannot be listened on: {error}. Give "
                "another one."
            ) from error
        self._thread.name = "envmgr-metrics"
        self.port: int = self._server.server_port

    def end(self) -> None:
        """Stop listening; idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            join_thread(self._thread)
        self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """Yield the metric families to show, for `prometheus_client`."""
        board = self._board()
        if board is not None:
            yield from families_of(board.read())


def families_of(board: Board) -> Iterator[Any]:
    """Yield what is shown of a board, as metric families of `prometheus_client`."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, value in zip(COUNTERS, board.counters.tolist(), strict=True):
        yield CounterMetricFamily(f"envmgr_{name}", _MEANINGS[name], value=value)
    n = board.plan.env_num
    states = GaugeMetricFamily("envmgr_envs", "envs in each state", labels=["state"])
    for state in EnvState:
        states.add_metric([state.name], int((board.states[:n] == state).sum()))
    yield states
    memory = GaugeMetricFamily(
        "envmgr_worker_memory_bytes", "resident memory of workers", labels=["worker"]
    )
    for index, pid in enumerate(board.pids.tolist()):
        if pid:
            memory.add_metric([str(index)], resident_bytes(pid))
    yield memory
    for name, column, meaning in (
        ("envmgr_env_failures", board.failed, "failures of each env"),
        ("envmgr_env_episodes", board.episodes, "episodes of each env that have ended"),
    ):
        counter = CounterMetricFamily(name, meaning, labels=["env_id"])
        for env_id in range(n):
            counter.add_metric([str(env_id)], int(column[env_id]))
        yield counter
    if board.plan.latencies:
        for kind, rows in zip(KINDS, board.latencies[:, :n], strict=True):
            yield from _latencies(kind, rows)


def _latencies(kind: str, rows: Numbers) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

    total = sane(rows).sum(0)
    sums = total[:N_BUCKETS].cumsum()[_PER_BUCKET - 1 :: _PER_BUCKET].tolist()
    bounds = [repr(bound) for bound in BOUNDS[_PER_BUCKET - 1 :: _PER_BUCKET].tolist()]
    yield HistogramMetricFamily(
        f"envmgr_{kind}_seconds",
        f"how long each {kind} took, of all envs",
        buckets=[*zip(bounds, sums, strict=True), ("+Inf", sums[-1])],
        sum_value=float(total[SUM]),
    )
    gauge = GaugeMetricFamily(
        f"envmgr_env_{kind}_seconds",
        f"quantiles of how long each {kind} of an env took",
        labels=["env_id", "quantile"],
    )
    for part, values in zip(_SHOWN, quantiles(rows, _SHOWN), strict=True):
        for env_id, value in enumerate(values.tolist()):
            if not np.isnan(value):
                gauge.add_metric([str(env_id), str(part)], value)
    yield gauge
