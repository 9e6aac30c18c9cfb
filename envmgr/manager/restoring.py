"""Snapshots of the envs of a manager, and going on from one."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from envmgr import pickles
from envmgr.core import Phase, Supervisor, validate
from envmgr.core.episodes import EnvRecord, hurry_to_rest, is_at_rest, record_of
from envmgr.core.submit import submit_calls
from envmgr.errors import ConfigError, EnvFailure, SnapshotError, SnapshotMismatchError
from envmgr.lifecycle import EnvState
from envmgr.manager.access import EnvAccess
from envmgr.manager.snapshots import EnvSnapshot, Snapshot, check_format
from envmgr.spaces import same_space
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.spaces.reading import error_text
from envmgr.types import EnvTimestep
from envmgr.wire.messages import Op, SavedEnv
from envmgr.worker.applied import take_state, try_state

_HostFunction = Callable[..., Any]


class _Common(NamedTuple):
    """What is not of one env."""

    spaces: list[tuple[Any, Any]]
    sampled: list[Any]
    seeds: dict[int, int | None]
    dynamic_seeds: tuple[bool | None, bool | None]
    normalization: dict[str, Any] | None


_MOVED = {("envmgr.core.restoring", "EnvRecord"): EnvRecord}
"""Where earlier versions had what they have pickled into snapshots."""


class _Unpickler(pickle.Unpickler):
    """Reads what snapshots hold, also those that an earlier version has taken."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or a function by its name."""
        return _MOVED.get((module, name)) or super().find_class(module, name)


class EnvRestoring(EnvAccess):
    """Takes snapshots of the envs and restores them; see `EnvManager`."""

    def snapshot(self) -> Snapshot:
        """Return all envs as they are now, for a run that is to go on from here, bit for bit.

        Waits for resets, repairs, and steps under way. The timesteps of these are not delivered by
        it: they are a part of it, and the next `step` or `recv` delivers them, here and after
        `restore`.

        Raises:
            SnapshotError: the state of an env cannot be taken; the message says what is missing.
                Or there are spares, whose states are not a part of it.
            EnvNotReadyError: an env has failed for good, and is gone.
            EnvFailure: an env failed in it: its own method raised, or its host died.
        """
        with self._calling() as supervisor:
            records = self._at_rest(supervisor, "snapshot")
            found = self._run_in_hosts(supervisor, take_state, [()] * self.env_num, "snapshot")
            common = self._common(supervisor)
        envs = []
        for env_id, (record, taken) in enumerate(zip(records, found, strict=True)):
            if isinstance(taken, str):
                raise SnapshotError(f"the state of env {env_id} cannot be taken: {taken}")
            pickled = _pickled(record, f"what is known of env {env_id}, its infos for example,")
            envs.append(EnvSnapshot(self._kind_of(env_id), pickled, *taken))
        return Snapshot(tuple(envs), _pickled(common, "what envs have in common"))

    def restore(self, snapshot: Snapshot | str | os.PathLike[str]) -> None:
        """Have all envs be what they were: observations, generators, counters, seeds, generations.

        All envs are restored or none. A step under way is awaited and its timestep discarded
        (counted as cancelled), as `reset` does. The first that follows is `ready_obs`, or `recv`
        for what was under way when the snapshot was taken. Attributes that `set_attr` sets on
        renewed envs, and the failures that were counted, are those of this manager.

        Args:
            snapshot: of a manager with the same envs, of whatever kind; or the file of one. Only
                those you trust: what they hold may run code.

        Raises:
            SnapshotMismatchError: it is of another version, or of other envs; nothing was changed.
            SnapshotError, EnvNotReadyError, EnvFailure: as `snapshot`; nothing was changed.
            ConfigError: what it has of `manager.normalization` does not fit; nothing was changed.
            FailuresExhaustedError: an env failed while it was restored, more often than allowed.
        """
        snapshot = self._checked_snapshot(snapshot)
        with self._calling() as supervisor:
            common, records = self._read(snapshot)
            self._at_rest(supervisor, "restore")
            states = [(env.state,) for env in snapshot.envs]
            refused = self._run_in_hosts(supervisor, try_state, states, "restore")
            for env_id, reason in enumerate(refused):
                if reason is not None:
                    raise SnapshotMismatchError(
                        f"env {env_id} cannot be restored: {reason}. Nothing was changed."
                    )
            restored = {
                env_id: (SavedEnv(env.state, record.obs, record.reset_info, env.episodes), record)
                for env_id, (env, record) in enumerate(zip(snapshot.envs, records, strict=True))
            }
            self._view.forget()
            begin = functools.partial(self._begin_restoring, supervisor, common, restored)
            self._running.uninterrupted(begin)
            repair, slots = supervisor.repair, supervisor.envs
            self._running.wait_until(
                lambda: repair.fatal is not None or all(s.phase is Phase.IDLE for s in slots),
                doing="restore",
            )
            self._surface(supervisor)

    # -- taking -----------------------------------------------------------------------------

    def _at_rest(self, supervisor: Supervisor, what: str) -> list[EnvRecord]:
        """Wait until nothing is under way; return what is known of each env then."""
        if supervisor.spares is not None:
            raise SnapshotError(
                f"{what} is not for managers with spares, whose states are not a part of snapshots "
                f"(spare_env_num is {self._config.spare_env_num}); leave it 0"
            )
        repair, record = supervisor.repair, supervisor.table
        self._running.uninterrupted(functools.partial(hurry_to_rest, supervisor.hosts))
        self._running.wait_until(lambda: repair.fatal is not None or is_at_rest(record), doing=what)
        self._surface(supervisor)
        validate.refuse_gone(record, record.all_ids, what)
        return list(map(record_of, supervisor.envs))

    def _run_in_hosts(
        self,
        supervisor: Supervisor,
        function: _HostFunction,
        arguments: Sequence[tuple[Any, ...]],
        what: str,
    ) -> list[Any]:
        """Run a function of ours on each env, and return what it returned."""
        ids = list(range(self.env_num))
        payloads = [(function, (self._config.snapshot_copy, *given)) for given in arguments]
        submit = functools.partial(
            submit_calls, supervisor.hosts, supervisor.envs, Op.APPLY, payloads, what
        )
        self._running.uninterrupted(submit)
        return self._results_of(supervisor, ids)

    def _kind_of(self, env_id: int) -> str:
        """Return what an env is, as far as its registration tells."""
        engine = self._running
        spec = getattr(engine.supervisor.descriptions[env_id], "spec", None)
        given = sorted((getattr(spec, "kwargs", None) or {}).items())
        kwargs = {name: value for name, value in given if name != "render_mode"}
        text = json.dumps(kwargs, skipkeys=True, default=_name_of_type)
        return f"{getattr(spec, 'id', None) or 'an env without registration'} {text}"

    def _common(self, supervisor: Supervisor) -> _Common:
        sampled = [] if self._samplers is None else self._samplers.spaces
        dynamic = self._dynamic_seed, supervisor.rules.dynamic_seed
        known = self._normalization
        normalization = None if known is None else known.state_dict(episodes=True)
        return _Common(self._env_spaces, sampled, self._seeds, dynamic, normalization)

    # -- putting back -----------------------------------------------------------------------

    def _checked_snapshot(self, given: Any) -> Snapshot:
        snapshot = Snapshot.load(given) if isinstance(given, (str, os.PathLike)) else given
        if not isinstance(snapshot, Snapshot):
            raise ConfigError(
                f"restore takes a Snapshot or the path of one, found a {type(given).__name__}"
            )
        check_format(snapshot.format, "the snapshot")
        if not _is_whole(snapshot):
            raise SnapshotError("the snapshot is damaged: its parts are not what `snapshot` makes")
        if snapshot.env_num != self.env_num:
            raise SnapshotMismatchError(
                f"the snapshot has {snapshot.env_num} envs, this manager has {self.env_num}. "
                "Nothing was changed."
            )
        return snapshot

    def _read(self, snapshot: Snapshot) -> tuple[_Common, list[EnvRecord]]:
        """Return what a snapshot holds, if it is of envs like these."""
        for env_id, env in enumerate(snapshot.envs):
            if env.kind != self._kind_of(env_id):
                raise SnapshotMismatchError(
                    f"env {env_id} of the snapshot is {env.kind}, here it is "
                    f"{self._kind_of(env_id)}. Nothing was changed."
                )
        try:
            # docs/security.md says who may load snapshots.
            common: _Common = _Unpickler(snapshot.common).load()
            records = [_Unpickler(env.record).load() for env in snapshot.envs]
            _check_read(common, records)
            spaces = enumerate(zip(self._env_spaces, common.spaces, strict=True))
            differ = [i for i, (one, other) in spaces if not all(map(same_space, one, other))]
        except (Exception, SystemExit) as error:  # whatever is unpickled may raise
            pass_interrupt_on(error)
            raise SnapshotMismatchError(
                f"the snapshot cannot be read: {error_text(error)}. Nothing was changed."
            ) from error
        if differ:
            env_id = differ[0]
            raise SnapshotMismatchError(
                f"env {env_id} of the snapshot has the spaces {common.spaces[env_id]}, here it has "
                f"{self._env_spaces[env_id]}. Nothing was changed."
            )
        return common, records

    def _begin_restoring(
        self,
        supervisor: Supervisor,
        common: _Common,
        restored: dict[int, tuple[SavedEnv, EnvRecord]],
    ) -> None:
        if self._normalization is not None and common.normalization is not None:
            self._normalization.load_state_dict(common.normalization)  # first: it may not fit
        elif self._normalization is not None:
            self._normalization.begin(range(self.env_num))
        self._seeds = common.seeds
        self._dynamic_seed, supervisor.rules.dynamic_seed = common.dynamic_seeds
        if self._samplers is not None:
            self._samplers.spaces = common.sampled
        supervisor.resets.restore(restored)


def _is_whole(snapshot: Snapshot) -> bool:
    """Whether a snapshot has the parts that it should have; what they hold is not looked at."""
    envs: Any = snapshot.envs
    common: Any = snapshot.common
    return (
        type(envs) is tuple
        and type(common) is bytes
        and all(
            type(env) is EnvSnapshot and tuple(map(type, env)) == (str, bytes, bytes, int)
            for env in envs
        )
    )


_INT = (int, np.integer)
_NONE = type(None)
_OF_COMMON: dict[str, Any] = {
    "seeds": dict,
    "sampled": list,
    "dynamic_seeds": tuple,
    "normalization": (dict, _NONE),
}
_OF_RECORD: dict[str, Any] = {
    "state": EnvState,
    "timestep": (EnvTimestep, _NONE),
    "doomed": (EnvFailure, _NONE),
    "fresh": (tuple, _NONE),
    "reset_info": dict,
    "reset_params": dict,
    **dict.fromkeys(("base_seed", "new_seed"), (*_INT, _NONE)),
    **dict.fromkeys(("generation", "episode", "episodes_done"), _INT),
    **dict.fromkeys(("new_generation", "attended", "waits"), bool),
}


def _check_read(common: Any, records: list[Any]) -> None:
    """Check that what was unpickled is what `snapshot` has pickled.

    Raises:
        TypeError: it is something else.
    """
    if type(common) is not _Common or any(type(record) is not EnvRecord for record in records):
        raise TypeError("it holds the pickle of something else")
    found: dict[str, Any] = common._asdict()
    fits = all(isinstance(found[name], kind) for name, kind in _OF_COMMON.items())
    fits = fits and len(found["sampled"]) in (0, len(records))
    fits = fits and [type(seed) in (bool, _NONE) for seed in found["dynamic_seeds"]] == [True] * 2
    wrong = [
        name
        for record in records
        for name, kind in _OF_RECORD.items()
        if not isinstance(getattr(record, name), kind)
    ]
    if wrong or not fits:
        raise TypeError(f"{wrong[0] if wrong else 'what envs have in common'} is of another type")


def _name_of_type(value: object) -> str:
    return type(value).__qualname__


def _pickled(value: Any, what: str) -> bytes:
    try:
        return pickles.dumps(value)
    except Exception as error:  # whatever a __reduce__ may raise
        raise SnapshotError(f"{what} cannot be pickled: {error_text(error)}") from error
