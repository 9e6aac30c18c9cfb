"""Sections of the manager's config that are about one kind of manager, or one feature, only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from envmgr.config.checks import (
    Check,
    Refused,
    boolean,
    choice,
    integer,
    list_of,
    named,
    number,
    or_null,
    show_value,
    text,
)
from envmgr.config.field_checks import free_mapping, variables
from envmgr.config.file_rules import (
    ARGUMENTS,
    LOOKED_UP,
    TAKES_AWAY,
    TIMELINE,
    VARIABLES,
    plain,
    plain_values,
    unless_allowed,
)
from envmgr.config.schema import Section, option
from envmgr.errors import ConfigError

_S = TypeVar("_S", bound=Section)
_flag = or_null(boolean(), "envpool's default")


def _is_address(name: str) -> bool:
    _, colon, port = name.rpartition(":")
    return name == "auto" or (bool(colon) and "//" not in name and port.isdigit())


def _amounts() -> Check:
    """Return a check for amounts by name, each more than 0; null is none."""
    amount = number(above=0)

    def convert(value: Any) -> dict[str, float]:
        if not isinstance(value, Mapping):
            raise Refused
        try:
            return {text().convert(name): amount.convert(value[name]) for name in value}
        except Refused as refusal:
            raise Refused(f"an amount is not {amount.allowed}") from refusal

    return or_null(Check("a mapping of names to numbers above 0", convert), null_is={})


_count = or_null(integer(1), "envpool's default")


@dataclass(frozen=True, slots=True)
class GymVector(Section):
    """How `type: gym_vector` makes one vector env of its envs.

    Attributes:
        vectorization_mode: as in `gymnasium.make_vec`; None takes the vector form that the env is
            registered with, if it has one and no wrappers, else `sync`.
        autoreset_mode: the mode of `sync` and `async`; None resets rows as the manager says.
        vector_kwargs: further arguments of the vector env's class, or of the registered vector
            form.
    """

    PATH: ClassVar[str] = "manager.gym_vector"

    vectorization_mode: Literal["sync", "async", "vector_entry_point"] | None = plain(
        None,
        or_null(choice("sync", "async", "vector_entry_point"), "as registered, else sync"),
        "as in `gymnasium.make_vec`",
    )
    autoreset_mode: Literal["NextStep", "SameStep", "Disabled"] | None = plain(
        None,
        or_null(choice("NextStep", "SameStep", "Disabled"), "Disabled"),
        "for `sync` and `async`: when the vector env starts episodes by itself",
    )
    vector_kwargs: Mapping[str, Any] = option(
        None, free_mapping(), "further arguments for the vector env", "{}", from_file=ARGUMENTS
    )


@dataclass(frozen=True, slots=True)
class EnvPool(Section):
    """Which envs `type: env_pool` makes; names are those of DI-engine, and of envpool.

    Attributes:
        env_id: a task of envpool, such as `Pong-v5`.
        batch_size: how many envs give their results at a time, those that are done first; a
            divisor of `env_num`. None, or `env_num`: all that were given actions, together.
        num_threads: threads of the pool; None is as many as there are cores.
        episodic_life: whether a lost life ends the episode; for Atari's envs, as are the next four
            keys; None leaves envpool's default.
        reward_clip: whether rewards are -1, 0 or 1.
        stack_num: frames in an observation.
        gray_scale: whether frames are grey.
        frame_skip: frames for each action.
        infos: which of the pool's infos timesteps have; None: all that are not about the pool.
        kwargs: further arguments of `envpool.make`.
    """

    PATH: ClassVar[str] = "manager.env_pool"

    env_id: str | None = option(
        None, or_null(text()), "envpool task, such as `Pong-v5`", from_file=LOOKED_UP
    )
    batch_size: int | None = plain(
        None,
        or_null(integer(1), "env_num"),
        "number of envs whose results come at a time, those that are done first: a divisor of "
        "`env_num`; null: those of all envs that were given actions, together",
    )
    num_threads: int | None = plain(None, or_null(integer(1), "all cores"), "threads of the pool")
    episodic_life: bool | None = plain(None, _flag, "Atari: a lost life ends the episode")
    reward_clip: bool | None = plain(None, _flag, "Atari: rewards are -1, 0 or 1")
    stack_num: int | None = plain(None, _count, "Atari: frames in an observation")
    gray_scale: bool | None = plain(None, _flag, "Atari: frames are grey")
    frame_skip: int | None = plain(None, _count, "Atari: frames for each action")
    infos: tuple[str, ...] | None = option(
        None,
        or_null(list_of(text()), "all that are not about the pool"),
        "the pool's infos to put into timesteps; each costs some microseconds per env and step",
        from_file=LOOKED_UP,
    )
    kwargs: Mapping[str, Any] = option(
        None,
        free_mapping(),
        "further arguments for `envpool.make`",
        "{}",
        from_file=unless_allowed("can name programs, files and folders", but=plain_values()),
    )


@dataclass(frozen=True, slots=True)
class NormalizationSection(Section):
    """How `normalize_obs` and `normalize_reward` normalise.

    Attributes:
        keys: which keys of a Dict observation are normalised; None: all that hold boxes.
        clip_obs: the largest absolute value in normalised observations.
        clip_reward: the largest absolute value of a normalised reward.
        gamma: the discount of the returns by whose spread rewards are divided.
        epsilon: added to variances.
        frozen: whether the statistics stay as they are.
    """

    PATH: ClassVar[str] = "manager.normalization"

    keys: tuple[str, ...] | None = option(
        None,
        or_null(list_of(text(), at_least=1), "all"),
        "keys of Dict observations to normalise",
        from_file=LOOKED_UP,
    )
    clip_obs: float = plain(10.0, number(above=0), "largest absolute value in observations")
    clip_reward: float = plain(10.0, number(above=0), "largest absolute value of a reward")
    gamma: float = plain(
        0.99, number(minimum=0), "discount of the returns by whose spread rewards are divided"
    )
    epsilon: float = plain(1e-8, number(above=0), "added to variances")
    frozen: bool = plain(
        False, boolean(), "keep the statistics as they are, or as they were loaded: for evaluation"
    )


@dataclass(frozen=True, slots=True)
class Ray(Section):
    """Where `type: ray` runs its hosts, and what each of them takes of the cluster.

    Attributes:
        address: the address of the head node, `host:port`; `auto` is the cluster that this machine
            belongs to; None the one that this process is connected to, else a new one on this
            machine.
        num_cpus: CPUs that each host takes; None, as with Ray: one to be started, none to run.
        num_gpus: GPUs that each host takes.
        resources: further resources of the cluster that each host takes, by name.
        scheduling: whether hosts go to as many nodes as there are, or to few.
        runtime_env: the `runtime_env` of the hosts, in Ray's form: packages, files, variables.
        isolation: with `process`, each env is in a worker process of its node.
    """

    PATH: ClassVar[str] = "manager.ray"

    address: str | None = option(
        None,
        or_null(named("`host:port`, or `auto`", _is_address), "a cluster on this machine"),
        "head node of the cluster (`ray start --head` prints it); `auto`: the cluster that this "
        "machine belongs to",
        from_file=unless_allowed("has this process connect to a cluster, which can run code in it"),
    )
    num_cpus: float | None = plain(
        None,
        or_null(number(minimum=0), "one to be started, none to run"),
        "CPUs of the cluster that each host takes",
    )
    num_gpus: float | None = plain(
        None, or_null(number(minimum=0), "none"), "GPUs that each host takes"
    )
    resources: Mapping[str, float] = option(
        None,
        _amounts(),
        "other resources of the cluster that each host takes",
        "{}",
        from_file=LOOKED_UP,
    )
    scheduling: Literal["spread", "pack"] = plain(
        "spread", choice("spread", "pack"), "whether to place hosts on many nodes or on few"
    )
    runtime_env: Mapping[str, Any] | None = option(
        None,
        or_null(free_mapping(), "as the nodes are"),
        "packages, files and variables of the hosts, in the form of Ray's `runtime_env`",
        from_file=unless_allowed(
            "has nodes run programs, fetch packages and files, and set variables"
        ),
    )
    isolation: Literal["actor", "process"] = plain(
        "actor",
        choice("actor", "process"),
        "`actor`: the envs of a host run in its actor's process; `process`: each env has a worker "
        "process, which the actor starts and supervises",
    )


def section(kind: type[_S]) -> Check:
    """Return a check for a section as a key of another, which is kept as a value of its class."""

    def convert(value: Any) -> _S:
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise Refused
        return kind.from_mapping(value)

    return Check("a mapping of its own keys ({} for their defaults)", convert)


def _file_of_trace() -> Check:
    """Return a check for a file's name without a default: the error says so if it is missing."""
    named = text()

    def convert(value: Any) -> Any:
        if value == "":
            raise ConfigError(
                "manager.trace names no file, but a timeline is written to one. Name it: "
                "`manager.trace.path: timeline.json`."
            )
        return named.convert(value)

    return Check(named.allowed, convert)


@dataclass(frozen=True, slots=True)
class Trace(Section):
    """The timeline of what happens from launch to close.

    Attributes:
        path: the path of the file that `close` writes; an existing file is replaced.
        events: how many events of workers, and how many of the trainer's calls, are kept: the
            newest.
    """

    PATH: ClassVar[str] = "manager.trace"

    path: str = option(
        "",
        _file_of_trace(),
        "file that `close` writes, in the Chrome trace event format",
        "needed",
        from_file=TIMELINE,
    )
    events: int = plain(
        200_000,
        integer(1000, 10_000_000),
        "number of the newest worker events to keep, and of the newest calls of the trainer",
    )


def trace() -> Check:
    """Return a check for the section, or for the path alone."""

    def convert(value: Any) -> Trace:
        return Trace(value) if isinstance(value, str) else section(Trace).convert(value)

    return Check("a path, or a mapping of its own keys", convert)


_CAP_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MAX_UNITS = 65536


def _shared_caps() -> Check:
    """Return a check for numbers of units by name, a part of a file's name; null is none."""
    units = integer(1, MAX_UNITS)

    def convert(value: Any) -> dict[str, int]:
        if not isinstance(value, Mapping):
            raise Refused
        for name, number_of in value.items():
            if not isinstance(name, str) or not _CAP_NAME.fullmatch(name):
                raise Refused(f"{show_value(name)} cannot name a cap")
            try:
                units.convert(number_of)
            except Refused:
                raise Refused(f"{name} is {show_value(number_of)}") from None
        return {name: units.convert(value[name]) for name in value}

    allowed = (
        "a mapping of names (letters, digits, `_`, `-` and `.`; 64 at most) to integers >= 1 "
        f"and <= {MAX_UNITS}"
    )
    return or_null(Check(allowed, convert), null_is={})


@dataclass(frozen=True, slots=True)
class Limits(Section):
    """How many envs may do something at one time.

    Attributes:
        starting: how many may be built or reset.
        starts_per_s: how many may begin to be built or reset in a second.
        running: how many may be leased.
        shared: how many there may be, by the name of a cap, in all managers of this user on this
            machine.
    """

    PATH: ClassVar[str] = "manager.limits"
    MEANT: ClassVar[Mapping[str, str]] = {
        "browser": "shared: {browser: 4}",
        "starts_per_second": "starts_per_s",
    }

    starting: int | None = plain(
        None,
        or_null(integer(1), "all"),
        "number of envs that may be built or reset at the same time; others wait, first come, "
        "first served",
    )
    starts_per_s: float | None = plain(
        None,
        or_null(number(above=0), "no limit"),
        "number of envs that may begin to be built or reset in any second; 0.5: one in two seconds",
    )
    running: int | None = plain(
        None,
        or_null(integer(1), "all"),
        "number of envs that may be leased at the same time; other leases wait, first come, first "
        "served; calls for batches are not counted",
    )
    shared: Mapping[str, int] = plain(
        None,
        _shared_caps(),
        "`{browser: 100}`: all managers of this user on this machine that name `browser` have at "
        "most 100 envs together, spares included; a launch waits until there are units for all of "
        "its envs",
        "{}",
    )


@dataclass(frozen=True, slots=True)
class Metrics(Section):
    """What is measured of steps and resets, and who is shown it.

    Attributes:
        port: the port of 127.0.0.1 on which an OpenMetrics endpoint is opened; None opens none.
    """

    PATH: ClassVar[str] = "manager.metrics"

    port: int | None = option(
        None,
        or_null(integer(1, 65535), "no endpoint"),
        "port of an OpenMetrics endpoint on 127.0.0.1 (extra `metrics`)",
        from_file=unless_allowed("opens a port to listen on"),
    )


@dataclass(frozen=True, slots=True)
class WorkerEnv(Section):
    """Which environment variables a worker gets.

    Attributes:
        allow: glob patterns (`OMP_*`); variables of the parent that match one are passed on.
        deny: glob patterns; variables that match one are not passed on, whatever `allow` says.
        set: variables set in the worker, after `allow` and `deny`.
    """

    PATH: ClassVar[str] = "manager.worker_env"

    allow: tuple[str, ...] = option(
        ("*",), list_of(text()), "patterns of variables to pass on", '["*"]', from_file=TAKES_AWAY
    )
    deny: tuple[str, ...] = option(
        (), list_of(text()), "patterns of variables not to pass on", from_file=TAKES_AWAY
    )
    set: Mapping[str, str] = option(
        None, variables(), "variables to set in addition", "{}", from_file=VARIABLES
    )
