"""Timesteps as DI-engine reads them: complete at an episode's end, failures as text."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from envmgr.adapters.on_failure import plain_info
from envmgr.errors import EnvFailure
from envmgr.outcomes import failure_in
from envmgr.types import EnvTimestep, is_abnormal
from envmgr.views import DictView, TreeView

_RETURN = "eval_episode_return"
"""The key that DI-engine's collectors and evaluators read in an episode's last info."""


class _Known(NamedTuple):
    """What has been seen of episodes so far.

    Attributes:
        failures: the latest failure of each env that has failed.
        so_far: the sum of the rewards of each env's episode.
        form: a return that an env itself has given, whose form is used; None if none has.
        n_infos: how many infos an env gives, if it gives a list with one for each of its agents;
            else 0.
        zero: a zero reward in the form of the envs' own; a float until one of these was seen.
    """

    failures: dict[int, EnvFailure]
    so_far: dict[int, Any]
    form: Any
    n_infos: int
    zero: Any = 0.0


class Fate(Protocol):
    """What became of timesteps.

    Attributes:
        given_back: whether they were not delivered because Ctrl-C ended the call: then they come
            again.
    """

    given_back: bool


class Delivery(Protocol):
    """A delivery of timesteps."""

    @property
    def fate(self) -> Fate | None:
        """What becomes of the timesteps."""
        ...


class Ends:
    """The completion of episodes' last timesteps, for which the rewards of each env are added up.

    What is known is replaced as a whole, and counts only when the timesteps that it comes from have
    been delivered: Ctrl-C may end the call that completes them, and then they come again.
    """

    def __init__(self) -> None:
        self._known = _Known({}, {}, None, 0)
        self._pending: tuple[Fate | None, _Known] = None, self._known

    @property
    def failures(self) -> dict[int, EnvFailure]:
        """The latest failure of each env that has failed."""
        fate, known = self._pending
        return (self._known if fate is None or fate.given_back else known).failures

    def forget(self, env_ids: Iterable[int], *, failures: bool = False) -> None:
        """Start over with envs whose episodes were cut short.

        Args:
            env_ids: these envs.
            failures: whether to forget all failures, too.
        """
        known = self._settled()
        so_far = {**known.so_far}
        for env_id in env_ids:
            so_far[env_id] = _zero_like(so_far.get(env_id, 0.0))
        kept = {} if failures else known.failures
        self._known = known._replace(so_far=so_far, failures=kept)

    def _settled(self) -> _Known:
        """Return what is known from the timesteps that were delivered."""
        fate, known = self._pending
        if fate is not None and not fate.given_back:
            self._known = known
        self._pending = None, self._known
        return self._known

    def complete(
        self, timesteps: Mapping[int, EnvTimestep], fate: Fate | None = None
    ) -> dict[int, EnvTimestep]:
        """Return the timesteps, completed; those that are passed in stay as they are.

        At an episode's end, the info has `eval_episode_return`: the env's own value, or else the
        sum of its rewards. After a failure, the reward is a zero in the form of the env's own, and
        `error` is text.

        Args:
            timesteps: timesteps by env_id.
            fate: what becomes of them; None if they are delivered in any case.
        """
        known = self._settled()
        known = known._replace(so_far={**known.so_far}, zero=_zero_of(timesteps, known.zero))
        so_far = known.so_far
        found = dict(timesteps)
        for env_id, (_, reward, done, _) in timesteps.items():
            if done:
                found[env_id], known = self._completed(env_id, timesteps[env_id], known)
                continue
            try:
                so_far[env_id] = so_far.get(env_id, 0.0) + reward
            except (TypeError, ValueError):  # there are rewards that have no sum
                so_far[env_id] = 0.0
        if fate is None:
            self._known = known
        self._pending = fate, known
        return found

    def _completed(
        self, env_id: int, timestep: EnvTimestep, known: _Known
    ) -> tuple[EnvTimestep, _Known]:
        total, info = known.so_far.get(env_id, known.zero), _copied(timestep.info)
        zero = known.so_far[env_id] = _zero_like(total)
        if not is_abnormal(info):
            if isinstance(info, (list, tuple)):
                known = known._replace(n_infos=len(info))
            elif _RETURN in info:
                known = known._replace(form=info[_RETURN])
            try:
                total = total + timestep.reward
            except (TypeError, ValueError):
                total = 0.0
        else:
            failure = failure_in(info)
            if failure is not None:
                known = known._replace(failures={**known.failures, env_id: failure})
            if known.n_infos and isinstance(info, MutableMapping):
                info = [dict(info) for _ in range(known.n_infos)]
            timestep = timestep._replace(reward=zero)
        infos = info if isinstance(info, (list, tuple)) else [info]
        self._complete_infos(infos, total, known.form)
        return timestep._replace(info=info), known

    def _complete_infos(self, infos: Sequence[Any], total: Any, form: Any) -> None:
        is_shared = len(infos) > 1 and np.size(total) == len(infos)
        for k, info in enumerate(infos):
            if isinstance(info, MutableMapping):
                info.update(plain_info(info))
                share = np.ravel(total)[k] if is_shared else total
                info.setdefault(_RETURN, _in_form_of(form, share))


def _copied(info: Any) -> Any:
    """Return a copy of an info, or of a list of them, to change: the env's own may come again."""
    if isinstance(info, (list, tuple)):
        return type(info)(map(_copied, info)) if type(info) in (list, tuple) else info
    return copy.copy(info) if isinstance(info, MutableMapping) else info


def _zero_like(total: Any) -> Any:
    return np.zeros_like(total) if isinstance(total, np.ndarray) else 0.0


def _zero_of(timesteps: Mapping[int, EnvTimestep], known: Any) -> Any:
    """Return a zero in the form of the envs' own rewards, as far as one was seen."""
    if isinstance(known, np.ndarray):
        return known
    rewards = (t.reward for t in timesteps.values() if not is_abnormal(t.info))
    return next((np.zeros_like(r) for r in rewards if isinstance(r, np.ndarray)), known)


def _in_form_of(form: Any, total: Any) -> Any:
    """Return a sum of rewards in the form of the envs' returns, so that they can be averaged."""
    if np.size(total) != 1:
        return total
    if isinstance(form, np.ndarray):
        return np.full(form.shape, np.ravel(total)[0], np.result_type(form.dtype, np.float64))
    return total if form is None else float(np.ravel(total)[0])


class CompletedDicts(DictView):
    """Timesteps by env_id, completed.

    Args:
        ends: completes them.
    """

    def __init__(self, ends: Ends) -> None:
        self._ends = ends

    def timesteps(self, timesteps: dict[int, EnvTimestep], delivery: Delivery | None = None) -> Any:
        """Return what `step` returns."""
        return self._ends.complete(timesteps, delivery.fate if delivery else None)


class CompletedTrees(TreeView):
    """Timesteps as treetensors, completed.

    Args:
        ends: completes them.
    """

    def __init__(self, ends: Ends) -> None:
        super().__init__()
        self._ends = ends

    def timesteps(
        self, timesteps: dict[int, EnvTimestep], delivery: Delivery | None = None
    ) -> list[Any]:
        """Return a treetensor with `obs reward done info env_id` for each timestep."""
        return super().timesteps(
            self._ends.complete(timesteps, delivery.fate if delivery else None)
        )
