"""Whether the nodes of a cluster have room for a manager's actors, and which node each goes to."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from envmgr.config.kind_sections import Ray
from envmgr.errors import ConfigError

_OWN = ("node:", "object_store_memory", "memory", "bundle_group")


def options_of(options: Ray) -> dict[str, Any]:
    """Return the options with which Ray is asked for an actor."""
    asked: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0}
    for key in ("num_cpus", "num_gpus"):
        if (value := getattr(options, key)) is not None:
            asked[key] = value
    if options.resources:
        asked["resources"] = dict(options.resources)
    if options.runtime_env is not None:
        asked["runtime_env"] = dict(options.runtime_env)
    return asked


def refuse_without_capacity(
    nodes: Sequence[Mapping[str, Any]], options: Ray, n_actors: int
) -> None:
    """Refuse actors that Ray would never start.

    Args:
        nodes: as `ray.nodes()` returns them.
        options: what each actor takes.
        n_actors: how many actors there are to be.

    Raises:
        ConfigError: no node has what one actor takes, or all nodes have too little for all actors.
    """
    wanted = _wanted(options)
    capacity = [_actors_that_fit(node["Resources"], wanted) for node in nodes if node["Alive"]]
    if sum(capacity) < n_actors:
        what = ", ".join(f"{name}: {amount:g}" for name, amount in wanted.items()) or "nothing"
        least = (
            "no node has as much" if not any(capacity) else f"there is room for {sum(capacity):g}"
        )
        raise ConfigError(
            f"manager.ray asks for {{{what}}} for each of {n_actors} hosts, but {least}. The "
            f"cluster has {describe(nodes)}. Ask for less, give a smaller manager.num_workers, or "
            "add nodes first"
        )


def _wanted(options: Ray) -> dict[str, float]:
    asked = {"CPU": options.num_cpus, "GPU": options.num_gpus, **options.resources}
    return {name: amount for name, amount in asked.items() if amount}


class NodeChoice:
    """Chooses the node of each actor.

    Ray's own strategy SPREAD leaves actors that take no CPU on one node, and does not avoid nodes
    on which actors have just died.

    Args:
        ray: the package, connected.
        options: what each actor takes.
    """

    def __init__(self, ray: Any, options: Ray) -> None:
        self._ray, self._options = ray, options
        self._lost: Counter[str] = Counter()

    def lost(self, node_id: str) -> None:
        """Note that an actor has died on a node, which may be gone: other nodes are preferred."""
        self._lost[node_id] += 1

    def choose(self, taken: Iterable[str]) -> str | None:
        """Return the node for a new actor; None leaves it to Ray.

        Args:
            taken: the nodes of the existing actors.
        """
        if self._options.scheduling == "pack":
            return None
        wanted = {"CPU": 1.0, **_wanted(self._options)}  # an actor takes one while it starts
        lost, loads = self._lost, Counter(taken)
        fitting = [
            node["NodeID"]
            for node in self._ray.nodes()
            if node["Alive"] and _actors_that_fit(node["Resources"], wanted) >= 1.0
        ]
        return min(fitting, key=lambda i: (loads[i] + lost[i], lost[i]), default=None)


def strategy_of(node_id: str | None) -> Any:
    """Return the strategy that asks Ray for a node; Ray takes another if that is gone or full."""
    if node_id is None:
        return "DEFAULT"
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(node_id, soft=True, _spill_on_unavailable=True)


def _actors_that_fit(has: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    each = (math.floor(has.get(name, 0.0) / amount + 1e-9) for name, amount in wanted.items())
    return min(each, default=math.inf)


def describe(nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return what a cluster has, in words."""
    alive = [node for node in nodes if node["Alive"]]
    texts = []
    for node in alive:
        has = {k: v for k, v in node["Resources"].items() if not k.startswith(_OWN)}
        amounts = ", ".join(f"{name}: {amount:g}" for name, amount in sorted(has.items()))
        texts.append(f"{node['NodeManagerAddress']} {{{amounts}}}")
    return f"{len(alive)} node{'s' * (len(alive) != 1)}: {'; '.join(texts)}"
