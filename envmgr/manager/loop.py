"""The loop over a manager by env_id, whatever form its kind shows batches in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gymnasium.spaces import Discrete, MultiDiscrete

from envmgr.errors import NothingReadyError
from envmgr.lifecycle import EnvState
from envmgr.manager import EnvManager
from envmgr.spaces import has_samples
from envmgr.spaces.legal import has_mask, legal_sample, mask_in
from envmgr.types import EnvTimestep, is_abnormal


class ManagerLoop:
    """The loop over a manager, with its observations and timesteps as dicts by env_id.

    What kinds with dicts return is passed through unchanged. With V2 kinds, an observation is a row
    of the stacked treetensor, and a timestep is an `EnvTimestep` of its parts: `reward` and `done`
    as Python values, `info` as a dict of arrays.

    Args:
        manager: the manager, launched before the first call.

    Attributes:
        gathered: what the manager returned to the latest `step` or `gather`, even if an interrupt
            kept that call from returning it: see `latest`.
    """

    def __init__(self, manager: EnvManager) -> None:
        self.manager = manager
        self.gathered: list[Any] = []

    def ready(self) -> dict[int, Any]:
        """Return the observations of the envs that take an action now, ascending by env_id.

        Waits for resets and repairs until at least one env is ready.

        Returns:
            `{env_id: obs}`; empty if every env's episode budget is spent.

        Raises:
            NothingReadyError: no env can become ready without another call.
        """
        manager = self.manager
        try:
            batch: Any = manager.ready_obs  # V2 kinds have a tree
        except NothingReadyError:
            if manager.done:  # V2 kinds cannot stack nothing
                return {}
            raise
        if isinstance(batch, Mapping):
            return dict(batch)
        return {env_id: batch[row] for row, env_id in enumerate(manager.ready_obs_id)}

    def random_actions(self, ready: Iterable[int]) -> dict[int, Any]:
        """Return a random action for each ready env.

        Only legal ones are drawn where observations or infos have an `action_mask`. If the action
        space cannot be sampled, each env is asked for an action.

        Args:
            ready: the ready envs, as `ready` returns them.

        Raises:
            EnvFailure: an env that was asked has failed, or has no random actions either.
        """
        manager, ids = self.manager, list(ready)
        if has_samples(manager.action_space):
            actions = manager.random_action()
            return {**actions, **self._legal_actions(actions)}
        return dict(zip(ids, manager.call("random_action", env_ids=ids), strict=True))

    def _legal_actions(self, ready: Iterable[int]) -> dict[int, Any]:
        """Return random actions for the envs whose newest info has a mask of legal ones."""
        if has_mask(self.manager.observation_space):  # which `random_action` has heeded
            return {}
        stepped = self.latest() if self.gathered else {}
        begun = [i for i in ready if i not in stepped or stepped[i].done]
        infos = dict(zip(begun, self.manager.reset_infos(begun), strict=True))
        infos.update({i: stepped[i].info for i in ready if i not in infos})
        masks = {i: mask for i, info in infos.items() if (mask := mask_in(None, info)) is not None}
        spaces = self.manager.env_spaces if masks else []
        return {
            i: legal_sample(spaces[i][1], mask)
            for i, mask in masks.items()
            if isinstance(spaces[i][1], (Discrete, MultiDiscrete)) and not has_mask(spaces[i][0])
        }

    def step(self, actions: Mapping[int, Any]) -> dict[int, EnvTimestep]:
        """Send actions and return the timesteps that the kind gathers."""
        return self._kept(map(self.manager.step, (dict(actions),)))

    def gather(
        self, min_ready: int | None = None, timeout_s: float | None = None
    ) -> dict[int, EnvTimestep]:
        """Return outstanding timesteps; the arguments are those of `recv`."""
        return self._kept(map(self.manager.recv, (min_ready,), (timeout_s,)))

    def latest(self) -> dict[int, EnvTimestep]:
        """Return the timesteps in `gathered`, as `step` and `gather` do."""
        return self._by_id(self.gathered[0])

    def waiting_for_reset(self) -> list[int]:
        """Return the envs whose episode has ended with `auto_reset` off, ascending."""
        states = self.manager.env_states
        return [i for i, state in states.items() if state is EnvState.NEED_RESET]

    def reset(self, env_ids: Iterable[int]) -> None:
        """Begin new episodes in these envs, with the reset params they have, and wait for them."""
        self.manager.reset(dict.fromkeys(env_ids))

    def _kept(self, call: Iterator[Any]) -> dict[int, EnvTimestep]:
        self.gathered.clear()
        self.gathered.extend(call)  # in one go: no interrupt comes between delivery and list
        return self.latest()

    def _by_id(self, timesteps: Any) -> dict[int, EnvTimestep]:
        if isinstance(timesteps, Mapping):
            return dict(timesteps)
        return dict(map(_from_tree, timesteps))


def _from_tree(tree: Any) -> tuple[int, EnvTimestep]:
    reward = tree.reward
    return int(tree.env_id), EnvTimestep(
        tree.obs,
        reward.item() if getattr(reward, "size", 0) == 1 else reward,
        bool(tree.done),
        tree.info.json(),
    )


def failure_text(info: Any, env_id: int, manager: EnvManager) -> str | None:
    """Return what an abnormal timestep says of the failure; None if it is not abnormal.

    The trees of V2 kinds hold arrays only, so there the text is that of the env's latest failure.
    """
    if not is_abnormal(info):
        return None
    error = error_of(info)
    if error is not None:
        return str(error)
    latest = manager.stats().get("latest_failures", ())
    mine = (text for text in reversed(latest) if f"env {env_id} (generation " in text[:60])
    return next(mine, "abnormal timestep")


def error_of(info: Any) -> Any:
    """Return the failure in an info, or in the first of a list of infos that has one, or None."""
    for part in info if isinstance(info, (list, tuple)) else [info]:
        # No generator expression: what a signal handler raises while one is closed is lost.
        if isinstance(part, Mapping) and (error := part.get("error")) is not None:
            return error
    return None
