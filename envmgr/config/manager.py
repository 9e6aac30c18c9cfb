"""The config of a manager: one schema with every key, its default, its check and its meaning.

`ManagerConfig` is the schema: the table in the docs, `default_manager_config`, the checks and the
suggestions for mistyped keys all come from its fields. A config is a mapping (dict or EasyDict) of
these keys; `ManagerConfig.from_mapping` turns it into the frozen, checked value that the engine
reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from envmgr.config.checks import (
    boolean,
    choice,
    count_or_inf,
    either,
    integer,
    list_of,
    nothing,
    number,
    or_null,
    show_value,
    text,
    word,
)
from envmgr.config.field_checks import (
    MODULE_NAME,
    affinity,
    seed_list,
    seed_mapping,
)
from envmgr.config.file_rules import EPISODE_LOG, KIND, LOG, MODULES, below, plain
from envmgr.config.kind_sections import (
    EnvPool,
    GymVector,
    Limits,
    Metrics,
    NormalizationSection,
    Ray,
    Trace,
    WorkerEnv,
    section,
    trace,
)
from envmgr.config.schema import Section, option
from envmgr.errors import ConfigError

MAX_ENV_NUM = 65536
"""The most envs of one manager; a larger number in a config is taken for a mistake."""

Seed = int | tuple[int | None, ...] | Mapping[int, int | None] | None
"""One seed, one for each env_id, or some by env_id; None leaves an env unseeded."""

_timeout = or_null(number(above=0, unit="seconds"), "no limit")


@dataclass(frozen=True, slots=True)
class ManagerConfig(Section):
    """Everything a manager can be told, checked. One field for each key of the config.

    Making one checks every field and stores the normal form: whole numbers as int (`inf` for
    `.inf`), seconds as float, lists as tuples. `dataclasses.replace` checks again.

    Raises:
        ConfigError: a value is of the wrong type or out of range, or two keys contradict each
            other; the message names the key path, the value found and what is allowed.
    """

    PATH: ClassVar[str] = "manager"
    PASSED_OVER: ClassVar[frozenset[str]] = frozenset(("cfg_type",))  # of DI-engine's configs
    MEANT: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("num_envs", "n_envs", "num_env", "n_env", "nenvs"), "env_num"),
        **dict.fromkeys(
            ("kwargs", "env_args", "render_mode"),
            "env.kwargs in a config file, and env_kwargs of `make`",
        ),
        **dict.fromkeys(
            ("max_episode_steps", "time_limit"),
            "env_kwargs={'max_episode_steps': n} of `make` (env.kwargs in a config file) for an "
            "id, or gymnasium.wrappers.TimeLimit in a function of your own",
        ),
        **dict.fromkeys(
            ("wrapper", "wrappers", "wrapper_class"),
            "env.wrappers in a config file, and wrappers of `make`",
        ),
        **dict.fromkeys(("vectorization_mode", "vec_env_cls"), "type"),
        **dict.fromkeys(
            ("vector_kwargs", "vec_env_kwargs"),
            "the manager's own keys, such as context and shared_memory",
        ),
    }

    type: str = option("base", text(), "registry key of the kind of manager", from_file=KIND)
    import_names: tuple[str, ...] = option(
        (),
        list_of(MODULE_NAME),
        "modules to import first, such as those that register kinds",
        from_file=MODULES,
    )
    env_num: int | None = plain(
        None,
        or_null(integer(1, MAX_ENV_NUM), "in code: as many as env_fn has"),
        "number of envs; null takes `len(env_fn)`; a mismatch raises",
    )
    episode_num: float = plain(math.inf, count_or_inf(), "episodes per env before it is DONE")
    max_retry: int = plain(1, integer(1), "attempts at one reset, including the first")
    retry_type: Literal["reset", "renew"] = plain(
        "reset",
        choice("reset", "renew"),
        "whether to reset or renew the env between attempts, while its worker is healthy",
    )
    retry_waiting_time: float = plain(
        0.1, number(minimum=0, unit="seconds"), "seconds between attempts, doubling at renewals"
    )
    auto_reset: bool = plain(
        True, boolean(), "false: an ended env waits in NEED_RESET for `reset({id: params})`"
    )
    reset_inplace: bool = plain(
        False,
        boolean(),
        "an ended env is reset within the request of its last step: its next `ready_obs` is there "
        "at once, and runs are reproducible step for step; the terminal observation is kept; needs "
        "`auto_reset`",
    )
    start_steps: int = plain(
        0,
        integer(0),
        "most random steps that an env takes within its first reset after a launch; the number is "
        "drawn for each env, by its seed, so that the envs' episodes do not end together",
    )
    step_timeout: float | None = plain(
        None, _timeout, "seconds one step may take; null: no limit, but a warning every 30 s"
    )
    reset_timeout: float | None = plain(
        None, _timeout, "seconds one reset may take; null: no limit, but a warning every 30 s"
    )
    episode_timeout: float | None = plain(
        None,
        _timeout,
        "seconds one episode of a leased env may take, from its reset; null: no limit; no effect "
        "without leases",
    )
    release_timeout: float = plain(
        5.0,
        number(minimum=0, unit="seconds"),
        "seconds that a step of a leased env may go on after the end of its lease, if nobody "
        "awaits it any more, before its worker is ended",
    )
    connect_timeout: float = plain(
        60.0,
        number(above=0, unit="seconds"),
        "seconds from the start of a process until its env is built and ready",
    )
    close_timeout: float = plain(
        5.0,
        number(minimum=0, unit="seconds"),
        "seconds of grace before SIGTERM, then SIGKILL; for all workers together",
    )
    shared_memory: bool = plain(
        True, boolean(), "true: data of fixed layout goes through shared memory; false: pipes only"
    )
    copy_on_get: bool | Literal["until_send", "checked"] = plain(
        True,
        either(boolean(), word("until_send"), word("checked")),
        "false: observations are views, valid through that env's next two steps; checked: the "
        "same, but using a view after that raises; until_send: views, valid until that env's next "
        "action is sent",
    )
    context: Literal["server", "fork", "spawn", "forkserver"] = plain(
        "server",
        choice("server", "fork", "spawn", "forkserver"),
        "how workers start: envmgr's own launcher (`server`), or a standard start method",
    )
    wait_num: float = plain(
        math.inf,
        count_or_inf(),
        "number of timesteps to gather, or all outstanding ones if there are fewer; `.inf`: all",
        "2 async, .inf sync",
    )
    step_wait_timeout: float = plain(
        0.0,
        or_null(number(minimum=0, unit="seconds"), "0", null_is=0.0),
        "seconds to wait for stragglers after `wait_num` is met; never shortens the wait for "
        "`wait_num`",
    )
    num_workers: int | Literal["auto"] | None = plain(
        None,
        or_null(either(integer(1), word("auto")), "one per env"),
        "number of worker processes, or threads, which share the envs in equal blocks of "
        "consecutive env_ids; null: one per env; auto: determined at launch by trying one env in a "
        "worker of its own; no effect where envs run in the trainer's own thread (`base`)",
    )
    spare_env_num: int = plain(
        0,
        integer(0, MAX_ENV_NUM),
        "number of spare envs, each in a worker of its own, that are kept reset and take the place "
        "of envs whose episodes end or whose workers fail; not with `base` or shared workers",
    )
    on_failure: Literal["recover", "raise", "resume"] = plain(
        "recover",
        choice("recover", "raise", "resume"),
        "recover: deliver an abnormal timestep and repair the env; raise: close and raise at once; "
        "resume: like recover, but an env that has lost its worker continues from where it was "
        "last saved",
    )
    snapshot_every: int | None = plain(
        None,
        or_null(integer(1), "never"),
        "save an env each time it has taken this many steps of an episode, with "
        "`on_failure: resume`",
    )
    snapshot_copy: bool = plain(
        False,
        boolean(),
        "copy envs that do not give their state themselves (`get_state` and `set_state`, or ALE's "
        "`clone_state`) for a snapshot: all of their state has to be in attributes that can be "
        "pickled",
    )
    max_failures: int = plain(
        3,
        integer(0),
        "failures allowed per env_id in the window, not counting those that its steps make up for",
    )
    max_failure_share: float = plain(
        0.05,
        number(minimum=0, maximum=1),
        "failures that one step makes up for: with 0.05, an env that fails in 1 % of its steps or "
        "less goes on for days, and one that fails in 5 % for a few hundred steps; 0: every "
        "failure counts, as with `max_failures: 0`",
    )
    max_failures_total: int | None = plain(
        None,
        or_null(integer(0), "`max(10, env_num)`"),
        "failures allowed for all env_ids together in the window, counted in the same way",
    )
    failure_window_s: float = plain(
        60.0,
        number(above=0, unit="seconds"),
        "length in seconds of the window in which failures are counted",
    )
    on_exhausted: Literal["raise", "drop"] = plain(
        "raise",
        choice("raise", "drop"),
        "when no more failures are allowed: raise (chaining the first cause), or drop the env_id "
        "(it is DONE, and that is reported)",
    )
    max_worker_rss_mb: float | None = plain(
        None,
        or_null(number(above=0), "no limit"),
        "MB of resident memory above which a worker is replaced at an episode's end",
    )
    max_episodes_per_worker: int | None = plain(
        None, or_null(integer(1), "no limit"), "episodes after which a worker is replaced"
    )
    nan_policy: Literal["allow", "abnormal", "raise"] = plain(
        "allow",
        choice("allow", "abnormal", "raise"),
        "how a NaN in an observation or reward is treated",
    )
    check_actions: bool | Literal["strict"] = plain(
        True,
        either(boolean(), word("strict")),
        "check before anything is sent: known ids, ready envs, shape and kind of actions, and "
        "bounds of Discrete-like spaces; bounds of Box only with `strict`",
    )
    strict_dtype: bool = plain(
        False,
        boolean(),
        "false: same-kind casts (float64 into float32) are made, with one warning; true: dtypes "
        "have to be exact",
    )
    same_spaces: bool = plain(True, boolean(), "all envs must have equal spaces")
    seed: Seed = plain(  # noqa: RUF009 (a field, as all others; its default is immutable)
        None,
        or_null(either(integer(0), seed_list(), seed_mapping()), "unseeded"),
        "seed or seeds, as in `manager.seed(...)`",
    )
    preload: tuple[str, ...] | Literal[False] | None = option(
        None,
        or_null(either(list_of(MODULE_NAME), nothing()), "found out"),
        "modules that the worker server imports once for all workers (`context: server`); null: "
        "those modules of installed distributions that the envs are found to need; false: none; "
        "this key, `context` and the keys for workers' threads, cores, variables and memory mean "
        "nothing to `thread`, which refuses them",
        from_file=MODULES,
    )
    limits: Limits | None = option(  # noqa: RUF009
        None,
        or_null(section(Limits), "none"),
        "how many envs may be built, reset or leased at the same time, or exist on this machine: "
        "its keys are below",
        from_file=below(Limits),
    )
    worker_threads: int = plain(1, integer(1), "math threads per worker")
    worker_affinity: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = plain(
        None,
        or_null(affinity(), "any core"),
        "cores that workers may run on; null: any, but if there are as many workers with several "
        "envs as cores, each gets one core",
    )
    worker_env: WorkerEnv | None = option(  # noqa: RUF009
        None,
        or_null(section(WorkerEnv), "all of the parent's"),
        "environment variables of workers",
        from_file=below(WorkerEnv),
    )
    worker_log: str | None = option(
        None,
        or_null(text(), "the trainer's streams"),
        "folder in which each worker process writes what its envs print and log, to a file of its "
        "own; no effect where envs run in the trainer's own thread",
        from_file=LOG,
    )
    episode_log: str | None = option(
        None,
        or_null(text(), "none"),
        "file to which a line of JSON is appended for each ended episode and for each failure",
        from_file=EPISODE_LOG,
    )
    daemon: bool = plain(True, boolean(), "false: envs may start processes of their own")
    normalize_obs: bool = plain(
        False,
        boolean(),
        "subtract the mean from observations, and divide them by their standard deviation",
    )
    normalize_reward: bool = plain(
        False, boolean(), "divide rewards by the standard deviation of the discounted returns"
    )
    episode_statistics: bool = plain(
        False, boolean(), "add `episode` to the last info of an episode: return, length and seconds"
    )
    normalization: NormalizationSection | None = option(  # noqa: RUF009
        None,
        or_null(section(NormalizationSection), "its defaults"),
        "how observations and rewards are normalised: its keys are below",
        from_file=below(NormalizationSection),
    )
    gym_vector: GymVector | None = option(  # noqa: RUF009
        None,
        or_null(section(GymVector), "as gymnasium does it"),
        "how `type: gym_vector` combines its envs into one vector env: its keys are below",
        from_file=below(GymVector),
    )
    env_pool: EnvPool | None = option(  # noqa: RUF009
        None,
        or_null(section(EnvPool), "none"),
        "which envs `type: env_pool` makes: its keys are below",
        from_file=below(EnvPool),
    )
    ray: Ray | None = option(  # noqa: RUF009
        None,
        or_null(section(Ray), "a cluster on this machine"),
        "where `type: ray` runs its hosts: its keys are below",
        from_file=below(Ray),
    )

    metrics: Metrics | None = option(  # noqa: RUF009
        None,
        or_null(section(Metrics), "nothing is measured"),
        "`{}`: measure how long steps and resets take; its keys are below",
        from_file=below(Metrics),
    )
    trace: Trace | None = option(  # noqa: RUF009
        None,
        or_null(trace(), "none"),
        "file for a timeline of what happens; its keys are below",
        from_file=below(Trace, lone="path"),
    )

    def _check_together(self) -> None:
        if self.spare_env_num:
            self._check_spares()
        self._check_resuming()
        if self.reset_inplace and not self.auto_reset:
            raise ConfigError(
                "manager.reset_inplace is true while manager.auto_reset is false, but an env that "
                "waits for reset() cannot reset inside its step. Turn one of the two off or on."
            )
        if self.env_num is None:
            return
        if self.limits is not None:
            self._check_shared_caps(self.limits, self.env_num)
        if isinstance(self.num_workers, int) and self.num_workers > self.env_num == 1:
            raise ConfigError(
                f"manager.num_workers is {self.num_workers}, but there is 1 env to run in them. "
                "Say how many there are with env_num (or env_fn=[make_env] * n), or leave "
                "num_workers out."
            )
        if isinstance(self.num_workers, int) and self.num_workers > self.env_num:
            raise ConfigError(
                f"manager.num_workers is {self.num_workers}, but there are {self.env_num} envs to "
                f"run in them. Give 1 to {self.env_num}, or null for one worker per env."
            )
        if isinstance(self.seed, tuple) and len(self.seed) != self.env_num:
            raise ConfigError(
                f"manager.seed is a list of {len(self.seed)} seeds for {self.env_num} envs. Give "
                "one seed (or null) for each env, one integer for all, or a mapping by env_id."
            )
        if isinstance(self.seed, Mapping):
            unknown = sorted(i for i in self.seed if i >= self.env_num)
            if unknown:
                raise ConfigError(
                    f"manager.seed names env_ids {show_value(unknown)}, but the {self.env_num} "
                    f"envs are 0 to {self.env_num - 1}. Leave them out, or raise manager.env_num."
                )

    def _check_shared_caps(self, limits: Limits, env_num: int) -> None:
        """Refuse a cap that is too low for all of the manager's envs."""
        total = env_num + self.spare_env_num
        for name, units in limits.shared.items():
            if units < total:
                spares = f" and {self.spare_env_num} spares" if self.spare_env_num else ""
                raise ConfigError(
                    f"manager.limits.shared.{name} is {units}, but the manager has {env_num} "
                    f"envs{spares}, each of which needs one unit for as long as it is there: it "
                    "could never be launched. Use fewer envs, or raise the cap in all managers "
                    "that name it."
                )

    def _check_spares(self) -> None:
        """Refuse spares where they cannot take the place of any env."""
        keeps = f"manager.spare_env_num is {self.spare_env_num}, but "
        if not self.auto_reset:
            raise ConfigError(
                f"{keeps}manager.auto_reset is false, and spares stand in for automatic resets. "
                "Leave it 0, or turn auto_reset on."
            )
        workers = self.num_workers
        own = workers is None or (workers != "auto" and self.env_num in (None, workers))
        if not own:
            raise ConfigError(
                f"{keeps}manager.num_workers is {workers}, and a spare can only take the place of "
                "an env that has its worker to itself. Leave one of the two out."
            )

    def _check_resuming(self) -> None:
        """Refuse `resume` where nothing could be resumed."""
        resumes = self.on_failure == "resume"
        if resumes != (self.snapshot_every is not None):
            raise ConfigError(
                f"manager.on_failure is {self.on_failure} and manager.snapshot_every is "
                f"{show_value(self.snapshot_every)}, but envs are saved to be resumed, and "
                "resumed from what was saved. Set both (on_failure: resume and a number of "
                "steps), or neither."
            )
        if resumes and (not self.auto_reset or self.spare_env_num):
            raise ConfigError(
                f"manager.on_failure is resume while manager.auto_reset is "
                f"{show_value(self.auto_reset)} and manager.spare_env_num {self.spare_env_num}, "
                "but an env that is resumed takes the place of an automatic reset, and of a "
                "spare. Turn auto_reset on and leave spares out, or use on_failure: recover."
            )

    def with_env_num(self, n: int) -> ManagerConfig:
        """Return this config for `n` envs, which is `len(env_fn)`.

        Raises:
            ConfigError: `env_num` is another number, or the seeds or hosts do not fit `n` envs.
        """
        if self.env_num is not None and self.env_num != n:
            raise ConfigError(
                f"manager.env_num is {self.env_num}, but env_fn holds {n} env factories. Give "
                f"one factory for each env, or leave manager.env_num null to take their number."
            )
        return dataclasses.replace(self, env_num=n)
