"""The lifetime of a manager: its spaces, its one launch and close, states and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from typing_extensions import Self

from envmgr.core import Supervisor, validate
from envmgr.core.engine import Engine
from envmgr.core.launching import begin_envs, build_envs
from envmgr.core.spares import NO_SPARES
from envmgr.env import adapt, videos
from envmgr.env.batch_specs import batches_of
from envmgr.errors import LaunchError, StateError
from envmgr.lifecycle import EnvState
from envmgr.manager.engine_owner import EngineOwner
from envmgr.seeding import Samplers
from envmgr.spaces import codec_of, same_space
from envmgr.spaces.agents import action_check
from envmgr.spaces.reading import error_text
from envmgr.views import Forms
from envmgr.wire.messages import EnvDescription

_MOST_INTERRUPTS = 10
"""So many of them may come while a manager is closed."""


class ManagerLifetime(EngineOwner):
    """Launches and closes envs, and says what they are and what has become of them."""

    # -- what it is -------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it is not launched: before `launch`, and after `close`."""
        return not self._launched

    @property
    def observation_space(self) -> Any:
        """The observation space of one env. Starts a host when asked before `launch`."""
        return self._described().observation_space

    @property
    def action_space(self) -> Any:
        """The action space of one env. Starts a host when asked before `launch`."""
        return self._described().action_space

    @property
    def env_spaces(self) -> list[tuple[Any, Any]]:
        """The observation and the action space of each env. Builds all when asked before `launch`.

        With `same_spaces: false` they may differ; the properties for one env show those of env 0.
        """
        self.build()
        return list(self._env_spaces)

    @property
    def reward_space(self) -> Any:
        """The reward space of one env, or None. Starts a host when asked before `launch`."""
        return self._described().reward_space

    @property
    def metadata(self) -> Any:
        """The metadata of env 0. Starts a host when asked before `launch`."""
        return self._described().metadata

    @property
    def stepped_together(self) -> list[range]:
        """The env_ids that have to be sent actions in one call: rows of batched envs, mostly none.

        Of these, all that are ready.
        """
        return [b.env_ids for b in batches_of(self._env_fn) if not b.partial_steps]

    @property
    def spec(self) -> Any:
        """The gymnasium registration of env 0, or None."""
        return self._described().spec

    @property
    def render_mode(self) -> Any:
        """The render mode of env 0, or None."""
        return self._described().render_mode

    def _described(self) -> EnvDescription:
        if self._description is None:
            if self._given[0] is not None and self._given[1] is not None:
                return self._handed_out([EnvDescription(*self._given, {}, None, None)])[0]
            self._describe_early()
        if self._description is None:
            raise StateError("env 0 has not described itself yet: call launch()")
        return self._description

    def _describe_early(self) -> None:
        """Start the host of env 0 now; `launch` goes on with it."""
        with self._alone:
            if self._description is not None:  # another thread has asked for it, just now
                return
            try:
                engine = self._ensure_engine()
                with engine.calling as supervisor:
                    self._preload(engine, self._env_fn[:1])
                    engine.uninterrupted(partial(supervisor.start_hosts, [0]))
                    failures = supervisor.repair.launch_failures
                    engine.wait_until(
                        lambda: 0 in supervisor.descriptions or bool(failures),
                        doing="reading spaces",
                    )
                    if failures:
                        raise LaunchError(f"the spaces cannot be read: {failures[0]}", failures)
                    self._adopt(supervisor.descriptions)
            except BaseException as error:
                self._discard_engine(0.0)
                _refuse_without_memory(error)
                raise

    def _adopt(self, descriptions: Mapping[int, EnvDescription]) -> None:
        """Take over what env 0, or each of several different envs, said of itself."""
        given = [self._with_given_spaces(descriptions[i]) for i in sorted(descriptions)]
        ours = self._handed_out(given)
        self._description = ours[0]
        self._env_spaces = [(d.observation_space, d.action_space) for d in ours[: self.env_num]]
        self._forms = Forms([d.observation_space for d in ours])
        action_spaces = [d.action_space for d in ours]
        if all(same_space(space, action_spaces[0]) for space in action_spaces):
            action_spaces = [action_spaces[0]] * self.env_num
        if wanted := self._config.check_actions:
            codec = {id(s): codec_of(s, strict=wanted == "strict") for s in action_spaces}
            self._action_checks = [
                action_check(space, codec[id(space)].refusal, self._newest(env_id))
                for env_id, space in enumerate(action_spaces[: self.env_num])
            ]
        self._samplers = Samplers(action_spaces)
        self._samplers.seed(self._seeds)

    def _handed_out(self, descriptions: list[EnvDescription]) -> list[EnvDescription]:
        """Return what envs say of themselves, with the spaces of what is handed out."""
        normalization = self._normalization
        return descriptions if normalization is None else normalization.adopt(descriptions)

    def _with_given_spaces(self, description: EnvDescription) -> EnvDescription:
        names = ("observation_space", "action_space", "reward_space")
        given = {n: s for n, s in zip(names, self._given, strict=True) if s is not None}
        return description._replace(**given)

    @property
    def env_ref(self) -> Any:
        """An env of this process, built when this is first read; not one of those that run."""
        if self._env_ref is None:
            self._env_ref = adapt.as_reference(self._env_fn[0])
        return self._env_ref

    @property
    def method_name_list(self) -> list[str]:
        """Names of the methods that managers and envs have in common."""
        return [
            "reset",
            "step",
            "seed",
            "close",
            "enable_save_replay",
            "render",
            "reward_shaping",
            "enable_save_figure",
        ]

    # -- launch and close -------------------------------------------------------------------

    def launch(self, reset_param: Mapping[int, Mapping[str, Any] | None] | None = None) -> None:
        """Start all hosts, build all envs and reset them: all of them or none.

        Args:
            reset_param: keyword arguments of the resets, by env_id; kept for automatic resets.

        Raises:
            StateError: it is launched already.
            ConfigError: a factory cannot be sent to a worker; nothing was started.
            LaunchError: envs failed; all is closed again, and all failures are in the error.
            SpaceMismatchError: the envs have different spaces.
        """
        params = validate.checked_params(reset_param, self.env_num)
        with self._alone:
            if self._launched:  # perhaps by another thread, just now
                raise StateError(
                    "the manager is launched already; close() it before launching again"
                )
            try:
                engine = self._ensure_engine(params)
                with engine.calling as supervisor:
                    self._prepare(supervisor, params)
                    self._build(engine, supervisor)
                    if self._normalization is not None:
                        self._normalization.begin(range(self.env_num))
                    begin_envs(engine, self._replay_paths)
            except BaseException as error:
                self._give_up(error)
                _refuse_without_memory(error)
                raise
            self._launched = True

    def build(self) -> None:
        """Start all hosts and build all envs, without resetting any; `launch` goes on with them.

        Nobody has to call it. Who does knows before the first reset, and its seeds, that all envs
        can be built and have the same spaces. Nothing is done if it was called or launched before.

        Raises:
            ConfigError, LaunchError, SpaceMismatchError: as `launch`; all is closed again.
        """
        with self._alone:
            if self._launched:
                return
            try:
                engine = self._ensure_engine()
                with engine.calling as supervisor:
                    self._build(engine, supervisor)
            except BaseException as error:
                self._give_up(error)
                _refuse_without_memory(error)
                raise

    def _build(self, engine: Engine, supervisor: Supervisor) -> None:
        if not self._built:
            self._preload(engine, self._env_fn)
            build_envs(engine, same_spaces=self._config.same_spaces)
            self._adopt(supervisor.descriptions)
            self._built = True

    def _give_up(self, error: BaseException) -> None:
        patient = isinstance(error, Exception)  # Ctrl-C does not wait for envs to close
        self._discard_engine(self._config.close_timeout if patient else 0.0)

    def close(self, timeout_s: float | None = None, terminate: bool = False) -> None:
        """Close all envs and end all hosts. Idempotent; from any thread.

        Takes at most the grace plus about one second, however many envs hang; two or three if the
        server of the workers is stopped (SIGSTOP). Timesteps that have not been delivered are lost
        and counted as cancelled. Ctrl-C, and whatever else a signal handler raises in it, ends the
        grace, and is raised when everything is released.

        Args:
            timeout_s: seconds that the envs get to close, all together; None: `close_timeout`.
            terminate: do not ask the envs; terminate their hosts at once.
        """
        grace_s = validate.checked_grace(timeout_s, self._config.close_timeout)
        if validate.checked_flag(terminate, "terminate"):
            grace_s = 0.0
        interrupt: BaseException | None = None
        for _ in range(_MOST_INTERRUPTS):
            try:
                self._close(grace_s)
                break
            except BaseException as error:  # Ctrl-C: no more patience, but everything is released
                interrupt, grace_s = error, 0.0
                engine = self._engine
                if engine is not None:
                    engine.transport.hurry()
        if interrupt is not None:
            raise interrupt

    def _close(self, grace_s: float) -> None:
        """Do what is left of closing; can be interrupted, and called again."""
        trial = self._trial
        if trial is not None:  # another thread is inside launch()
            trial.close(0.0)
        self._discard_engine(grace_s)
        env_ref, self._env_ref = self._env_ref, None
        if env_ref is not None:
            adapt.close_env(env_ref)
        videos.sweep(self._replay_paths or ())

    def __enter__(self) -> Self:
        """Launch it, unless it is launched already."""
        if not self._launched:
            self.launch()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""
        self.close()

    # -- states and figures -----------------------------------------------------------------

    @property
    def env_states(self) -> dict[int, EnvState]:
        """The state of each env_id; may be read from any thread."""
        engine = self._engine
        if engine is None or not self._launched:
            return dict.fromkeys(range(self.env_num), EnvState.VOID)
        return dict(enumerate(engine.supervisor.table.env_states()))

    def env_state_done(self, env_id: int) -> bool:
        """Return whether an env's episode budget is spent."""
        return self.env_states[validate.checked_env_id(env_id, self.env_num)] is EnvState.DONE

    @property
    def done(self) -> bool:
        """Whether all episode budgets are spent and every timestep was delivered."""
        engine = self._engine
        if engine is None or not self._launched:
            return False
        supervisor = engine.supervisor
        return (
            all(s is EnvState.DONE for s in supervisor.table.env_states())
            and not supervisor.table.owed_ids()
            and not supervisor.journal.count
        )

    def stats(self) -> dict[str, Any]:
        """Return counters since launch (of the last launch, once closed); from any thread.

        `actions` accepted = `timesteps` delivered + `cancelled` + `outstanding`, at any time. With
        `num_workers: auto`, `calibration` says what it has become and why. While launched,
        `workers` has `{"pid": int, "env_ids": list}` for each worker process that is not known to
        be dead, and `moments` the latest (env_id, generation, event, time_s): when envs "failed"
        and were "ready" again, in seconds of `time.monotonic`.

        With spares, `spare_env_num` is how many there are (those that failed for good are none any
        more), `spares_ready` how many of them have been reset, `swaps` how often one took the place
        of another env, and `spare_failures` counts what they failed; `failures` does not. A worker
        without `env_ids` has a spare.

        With `metrics`, `latency` has lists for "step" and "reset", with an entry for each env:
        `count`, an estimate, and `mean`, `p50`, `p90`, `p99` and `max` in seconds, or None.

        Where envs run on threads, `threads_abandoned` is how many threads were given up that still
        run: in env code that hangs. It is true of this moment, also after `close`.
        """
        engine, statistics = self._engine, self._statistics
        stats: dict[str, Any] = {**statistics.as_dict(), "states": self._states_by_name()}
        stats.update(self._figures())
        if self._calibration is not None:
            stats["calibration"] = self._calibration.as_dict()
        if engine is not None:
            stats["generations"] = [env.generation for env in engine.supervisor.envs]
            stats["workers"] = _workers(engine)
            spares = engine.supervisor.spares
            stats.update(NO_SPARES if spares is None else spares.figures())
            stats["moments"] = list(engine.supervisor.statistics.moments.copy())
        return stats

    def _states_by_name(self) -> dict[str, int]:
        states = list(self.env_states.values())
        return {state.name: states.count(state) for state in EnvState if state in states}


def _refuse_without_memory(error: BaseException) -> None:
    """Say what can be done about a launch that got no memory, or no thread; all is closed.

    Raises:
        LaunchError: it was one.
    """
    if isinstance(error, MemoryError) or str(error) == "can't start new thread":
        first = error.__context__ or error
        raise LaunchError(
            f"the trainer's process got no memory or no thread ({error_text(first)}); "
            "everything is closed again. Free memory, raise the limits of the process (ulimit -v, "
            "RLIMIT_AS, RLIMIT_NPROC, a container's), or use fewer envs or workers."
        ) from error


def _workers(engine: Engine) -> list[dict[str, Any]]:
    """Return the pid and the envs of each worker process; nothing where envs run in this one."""
    pids = engine.transport.pids
    return [
        {"pid": pid, "env_ids": [env.env_id for env in group.envs if not env.is_spare]}
        for group in engine.supervisor.hosts.groups
        if group.host_id is not None and (pid := pids.get(group.host_id)) is not None
    ]
