"""A manager as a batched env of TorchRL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space

from envmgr.adapters.batches import FixedBatches
from envmgr.adapters.rows import Rows, spread
from envmgr.errors import ConfigError, EnvNotReadyError
from envmgr.manager import EnvManager
from envmgr.optional_packages import missing
from envmgr.shortcuts import create_env_manager

try:
    import torch
    from tensordict import TensorDict
    from torchrl.data import (
        Binary,
        Bounded,
        Categorical,
        Composite,
        MultiCategorical,
        MultiOneHot,
        OneHot,
        Unbounded,
    )
    from torchrl.envs import EnvBase
except ImportError as error:
    raise missing(
        "envmgr.adapters.torchrl needs torchrl>=0.9", error, package="torchrl>=0.9"
    ) from error

_FLAGS = ("done", "terminated", "truncated", "abnormal")
_KEYS = frozenset((*_FLAGS, "reward", "action"))
"""The keys that tensordicts of these envs have besides those of observations."""

__all__ = ["EnvmgrEnv", "ManagerEnv", "as_torchrl"]


def as_torchrl(
    manager: EnvManager,
    *,
    categorical_action_encoding: bool = False,
    on_failure: str | None = None,
    device: Any = "cpu",
) -> ManagerEnv:
    """Return a manager as a batched env of TorchRL, with a batch size of (env_num,).

    Args:
        manager: a manager with `auto_reset` and without `episode_num`; the first `reset` launches
            it. With kinds that gather only some timesteps, all are gathered.
        categorical_action_encoding: whether discrete actions are numbers; if not, they are one-hot,
            as in `GymWrapper`.
        on_failure: "recover": the episode of an env that fails is truncated, and the env repaired;
            "raise": the exception is raised in the trainer; None: what the manager does.
        device: the device that tensors are put on.

    Raises:
        ConfigError: the manager's config or a space does not fit; the message says what to do.
        LaunchError: an env cannot be built.
    """
    return ManagerEnv(
        manager,
        categorical_action_encoding=categorical_action_encoding,
        on_failure=on_failure,
        device=device,
    )


class ManagerEnv(EnvBase):  # type: ignore[misc]
    """All envs of a manager, in the form that TorchRL needs; see `as_torchrl`.

    Observations are in "observation" or, for a Dict space, under its keys; "abnormal" marks the
    envs that failed in a step. When an episode has ended, the next one begins while the other envs
    go on, and `reset` with a mask in "_reset" returns its first observation.

    Args:
        manager: the manager; if it is not launched, the first `reset` does that. `close` closes it.
        categorical_action_encoding: see `as_torchrl`.
        on_failure: see `as_torchrl`.
        device: see `as_torchrl`.
        adapter: the public name of this adapter, for messages.

    Attributes:
        manager: the manager.
        errors: by env_id, the latest failure of an env: its type, its message, its traceback.
    """

    def __init__(
        self,
        manager: EnvManager,
        *,
        categorical_action_encoding: bool = False,
        on_failure: str | None = None,
        device: Any = "cpu",
        adapter: str = "as_torchrl",
    ) -> None:
        batches = FixedBatches(manager, adapter=adapter, on_failure=on_failure)
        n = batches.n
        super().__init__(device=device, batch_size=torch.Size([n]))
        self.manager, self._batches = manager, batches
        self._seed: int | None = None
        self._ended: list[int] = []
        self._copies = manager.cfg.copy_on_get is not True
        self.errors: dict[int, str] = {}
        with batches.built():
            space, acted = manager.observation_space, manager.action_space
            one_hot = not categorical_action_encoding
            _refuse_keys(adapter, space)
            observed = _spec_of(adapter, space, n) if isinstance(space, Dict) else None
            self.observation_spec = observed or Composite(
                observation=_spec_of(adapter, space, n), shape=(n,)
            )
            self.observation_spec["abnormal"] = Categorical(2, shape=(n, 1), dtype=torch.bool)
            self.action_spec = _spec_of(adapter, acted, n, one_hot=one_hot)
            self.reward_spec = Unbounded(shape=(n, 1))
            self.done_spec = Composite(
                {
                    key: Categorical(2, shape=(n, 1), dtype=torch.bool)
                    for key in ("done", "terminated", "truncated")
                },
                shape=(n,),
            )
            self.to(self.device)
        self._counts = _counts(acted) if one_hot else None
        self._keys = {*self.observation_spec.keys(), *_KEYS}

    # -- resets and seeds -------------------------------------------------------------------

    def _reset(
        self,
        tensordict: Any = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Any:
        n = self._batches.n
        mask = None if tensordict is None else tensordict.get("_reset", None)
        ids = list(range(n)) if mask is None else mask.view(-1).nonzero().view(-1).tolist()
        if seed is None and mask is None:
            seed = self._seed
        self._batches.reset(ids, seed=seed, options=options, begun=self._ended)
        obs = self._batches.first_obs(ids)
        if len(ids) != n:  # TorchRL takes the rows of the mask
            obs = spread(n, [(ids, obs)])
        no = np.zeros((2, n), np.bool_)
        result = self._tensors(obs, no[0], no[1])
        if mask is None:
            self._seed = None
        self._seen(ids)
        return result

    def _seen(self, env_ids: Sequence[int]) -> None:
        """Note, last of all, that the first observations of these envs are given out."""
        self._ended = [i for i in self._ended if i not in env_ids]
        self._batches.unseen = self._batches.unseen.difference(env_ids)

    def maybe_reset(self, tensordict: Any) -> Any:
        """Reset the envs whose episodes have ended, as `EnvBase` does.

        What `EnvBase` does with masks takes several times as long as a step. Here the rows are put
        in place directly if everything is as `step` left it, which is nearly always the case.
        """
        ended, done = self._ended, tensordict.get("done")
        if not ended and not done.any():
            return tensordict
        is_plain = self._keys.issuperset(tensordict.keys())
        if not is_plain or done.view(-1).nonzero().view(-1).tolist() != ended:
            return super().maybe_reset(tensordict)
        self._batches.reset(ended, begun=ended)
        first = _tensor_of(self._batches.first_obs(ended), copies=self._copies)
        _put(tensordict, first if isinstance(first, dict) else {"observation": first}, ended)
        for key in _FLAGS:
            tensordict.set(key, torch.zeros_like(done))
        self._seen(ended)
        return tensordict

    def _set_seed(self, seed: int | None) -> None:
        self._seed = seed

    # -- steps ------------------------------------------------------------------------------

    def _step(self, tensordict: Any) -> Any:
        if tensordict.get("_step", None) is not None:
            raise ConfigError("as_torchrl steps all envs together: leave '_step' out")
        batches = self._batches
        if batches.unseen or batches.is_stepping:
            raise EnvNotReadyError(
                "the envs have to be reset before their first step, and after a step or a reset "
                "that Ctrl-C has ended: call reset()"
            )
        batches.send(self._actions(tensordict.get("action")))
        obs, rewards, terminated, truncated, infos, ended = cast("Rows", batches.receive())
        batches.refuse_several_rewards(rewards)
        infos = infos or [{}] * len(rewards)
        failed = [i for i in ended if infos[i].get("abnormal")]
        self.errors.update((i, str(infos[i].get("error"))) for i in failed)
        reward = torch.from_numpy(rewards.astype(np.float32)).view(-1, 1)
        result = self._tensors(obs, terminated, truncated, failed, reward=reward)
        self._ended = ended
        batches.step = None  # the last: they are given out
        return result

    def _actions(self, action: Any) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = action.detach().cpu().numpy()
        counts = self._counts
        if counts is None:
            return array
        if len(counts) == 1:
            numbers: npt.NDArray[Any] = array.argmax(-1)
            return numbers
        parts = np.split(array, np.cumsum(counts)[:-1], -1)
        return np.stack([part.argmax(-1) for part in parts], -1)

    def _tensors(
        self,
        obs: Any,
        terminated: npt.NDArray[np.bool_],
        truncated: npt.NDArray[np.bool_],
        failed: Sequence[int] = (),
        **further: Any,
    ) -> Any:
        """Return a tensordict of what resets and steps have in common, and `further` tensors."""
        ends, cut = (torch.from_numpy(flags).view(-1, 1) for flags in (terminated, truncated))
        abnormal = torch.zeros_like(ends)
        abnormal[list(failed)] = True
        parts = _tensor_of(obs, copies=self._copies)
        source = parts if isinstance(parts, dict) else {"observation": parts}
        flags = {"terminated": ends, "truncated": cut, "done": ends | cut, "abnormal": abnormal}
        return TensorDict({**source, **flags, **further}, self.batch_size, device=self.device)

    # -- the end ----------------------------------------------------------------------------

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all envs and the manager."""
        self._batches.close()
        super().close(raise_if_closed=raise_if_closed)


class EnvmgrEnv(ManagerEnv):
    """A replacement for `ParallelEnv(n, make_gym_env)`: a batched env from env factories.

    Args:
        env_fns: one factory of a `gymnasium.Env` for each env.
        categorical_action_encoding: see `as_torchrl`.
        on_failure: see `as_torchrl`.
        device: see `as_torchrl`.
        **cfg: keys of the manager's config, such as `num_workers=2` or `step_timeout=10`.

    Raises:
        ConfigError: a key does not exist, or a space does not fit.
        LaunchError: an env cannot be built.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        *,
        categorical_action_encoding: bool = False,
        on_failure: str | None = None,
        device: Any = "cpu",
        **cfg: Any,
    ) -> None:
        given = {"type": "subprocess", "reset_inplace": True}
        super().__init__(
            create_env_manager({**given, **cfg}, env_fn=env_fns),
            categorical_action_encoding=categorical_action_encoding,
            on_failure=on_failure,
            device=device,
            adapter="EnvmgrEnv",
        )


def _refuse_keys(adapter: str, space: Any) -> None:
    """Refuse observations under keys that tensordicts have for something else.

    Raises:
        ConfigError: there are such keys.
    """
    taken = sorted(_KEYS.intersection(space.spaces)) if isinstance(space, Dict) else []
    if taken:
        raise ConfigError(
            f"{adapter}: the observations have keys {taken}, which are TorchRL's own or the "
            "adapter's, in the same tensordict. Wrap each env so that they have other names"
        )


def _counts(space: Space[Any]) -> list[int] | None:
    """Return how many values the parts of a one-hot action have; None if it is not one-hot."""
    if isinstance(space, Discrete):
        return [int(space.n)]
    return space.nvec.tolist() if isinstance(space, MultiDiscrete) else None


def _put(tensordict: Any, rows: Mapping[str, Any], positions: list[int]) -> None:
    """Put rows into copies of tensors: the tensors themselves belong to the step, too."""
    for key, part in rows.items():
        whole = tensordict.get(key).clone()
        if isinstance(part, Mapping):
            _put(whole, part, positions)
        else:
            whole[positions] = part.to(whole.device)
        tensordict.set(key, whole)


def _tensor_of(obs: Any, *, copies: bool) -> Any:
    if isinstance(obs, Mapping):
        return {key: _tensor_of(part, copies=copies) for key, part in obs.items()}
    return torch.from_numpy(np.array(obs) if copies else obs)


def _spec_of(adapter: str, space: Space[Any], n: int, *, one_hot: bool = False) -> Any:
    """Return the spec of n rows of a space.

    Raises:
        ConfigError: there is no such spec.
    """
    if isinstance(space, Dict):
        parts = {key: _spec_of(adapter, part, n) for key, part in space.spaces.items()}
        return Composite(parts, shape=(n,))
    if isinstance(space, Discrete) and space.start == 0:
        count = int(space.n)
        return OneHot(count, shape=(n, count)) if one_hot else Categorical(count, shape=(n,))
    if isinstance(space, MultiDiscrete) and space.nvec.ndim == 1 and not space.start.any():
        counts = space.nvec.tolist()
        if one_hot:
            return MultiOneHot(counts, shape=(n, sum(counts)))
        return MultiCategorical(counts, shape=(n, len(counts)))
    if isinstance(space, MultiBinary):
        return Binary(space.shape[-1], shape=(n, *space.shape), dtype=torch.int8)
    if isinstance(space, Box):
        shape, dtype = (n, *space.shape), torch.from_numpy(np.empty(0, space.dtype)).dtype
        if not space.is_bounded():
            return Unbounded(shape=shape, dtype=dtype)
        low, high = (
            torch.from_numpy(np.broadcast_to(b, shape).copy()) for b in (space.low, space.high)
        )
        return Bounded(low=low, high=high, shape=shape, dtype=dtype)
    raise ConfigError(
        f"{adapter}: TorchRL takes Box, Discrete and MultiDiscrete (from 0), MultiBinary, and Dict "
        f"of these as observations, found {space}. Wrap each env so that it has such a space, for "
        "example in gymnasium.wrappers.FlattenObservation"
    )
