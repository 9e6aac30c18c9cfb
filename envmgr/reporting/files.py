"""The files in the folder of a run, and what their lines hold."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from envmgr.config import MAX_ENV_NUM

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
EnvId = Annotated[int, Meta(ge=0, lt=2 * MAX_ENV_NUM)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
Named = Annotated[dict[str, Count], Meta(max_length=1000)]
Seed = int | None | list[int | None] | dict[str, int | None]
"""What `manager.seed` may be, as JSON has it."""

EPISODES, CONFIG, SUMMARY = "episodes.jsonl", "config.yaml", "summary.json"
SAMPLES, VIDEOS = "samples.jsonl", "videos"
TENSORBOARD, WANDB = "tensorboard", "wandb"
PAGE, FIGURES = "report.html", "report.json"
METRICS = "metrics.csv"

RUN = "run.json"
"""Name of the file that says when a run was begun and resumed; see `envmgr.cli.resume`."""

RESULTS = (EPISODES, CONFIG, SUMMARY, SAMPLES, METRICS, PAGE, FIGURES, RUN)
"""What a run leaves behind. As long as it goes on, `process.json` and a lock are there too."""


class Sample(msgspec.Struct, gc=False, frozen=True):
    """Where a run stood at one moment; a line of `samples.jsonl`. Counts are since the run began.

    Attributes:
        elapsed_s: the moment, in seconds of the run.
        steps: number of timesteps.
        policy_s: seconds in the policy.
        trainer_cpu_s: seconds that the trainer's main thread has computed.
        trainer_queued_s: seconds that it was queued for a core; None where the system does not say.
        env_step_s: seconds in steps, summed over all envs; None without `manager.metrics`.
        env_reset_s: seconds in resets, those at launch included; likewise.
        workers: number of worker processes.
        workers_s: seconds that workers were alive, summed over all of them.
        workers_cpu_s: seconds that workers have computed; None where the system does not say.
        workers_queued_s: seconds that workers were queued for a core; likewise.
        trainer_bytes: resident memory of the trainer.
        workers_bytes: resident memory of all workers together.
        largest_bytes: resident memory of the largest worker.
    """

    elapsed_s: Seconds
    steps: Count
    failures: Count
    policy_s: Seconds
    trainer_cpu_s: Seconds
    trainer_queued_s: Seconds | None
    env_step_s: Seconds | None
    env_reset_s: Seconds | None
    workers: Count
    workers_s: Seconds
    workers_cpu_s: Seconds | None
    workers_queued_s: Seconds | None
    trainer_bytes: Count
    workers_bytes: Count
    largest_bytes: Count


class Episode(msgspec.Struct, gc=False, frozen=True):
    """What a report takes from a line of `episodes.jsonl`; see `EpisodeRecord`."""

    env_id: EnvId
    length: Count
    abnormal: bool
    ended_s: Seconds
    failure: str | None
    returned: float | list[float | None] | None = msgspec.field(name="return")


class LogLine(msgspec.Struct, gc=False, frozen=True):
    """What a report takes from a line of an episode log; see `EpisodeLog`.

    Attributes:
        log: the version of the format.
        what: "episode" or "failure".
        time: seconds since 1970.
        outcome: completed, failed or unresolved.
        cause: the class name of the failure.
        raised: the class name of the exception that the env raised.
        exit_status: exit status of the env's worker; below 0, the signal that ended the worker.
        limit_s: the time limit that the env exceeded, in seconds.
        length: number of timesteps; None for failures.
        returned: the return, as one number; None if there is none.
    """

    log: Literal[1] = msgspec.field(name="envmgr_log")
    what: Literal["episode", "failure"]
    time: Seconds
    env_id: EnvId
    outcome: Literal["completed", "failed", "unresolved"]
    cause: str | None = None
    raised: str | None = None
    exit_status: int | None = None
    limit_s: Seconds | None = None
    during: str | None = None
    generation: Count = 0
    length: Count | None = None
    returned: Any = msgspec.field(name="return", default=None)

    def __post_init__(self) -> None:
        """Refuse an invalid return: the reader of the log counts lines that cannot be decoded."""
        msgspec.structs.force_setattr(self, "returned", sum_of(self.returned))


def sum_of(returned: Any) -> float | None:
    """Return an episode's return, whatever its form, as one number; None if it has none.

    Raises:
        ValueError: it is too large.
        RecursionError: it is nested too deeply.
    """
    if isinstance(returned, list):
        parts = [sum_of(one) for one in returned]
        return None if None in parts else float(sum(part for part in parts if part is not None))
    try:
        return float(returned) if isinstance(returned, (int, float)) else None
    except OverflowError as error:
        raise ValueError("a return is too large") from error


Quantities = Annotated[list[Seconds | None], Meta(max_length=MAX_ENV_NUM)]


class Latency(msgspec.Struct):
    """How long steps, or resets, of each env took; see `EnvManager.stats`."""

    count: Quantities
    mean: Quantities
    p50: Quantities
    p90: Quantities
    p99: Quantities
    max: Quantities


class Stats(msgspec.Struct):
    """What a report takes from the `stats` of a summary."""

    num_workers: Count = 0
    failures: Count = 0
    failures_by_kind: Named = {}
    failures_by_env: dict[EnvId, Count] = {}
    latest_failures: Annotated[list[str], Meta(max_length=1000)] = []
    states: Named = {}
    renewals: Count = 0
    recycled: Count = 0
    latency: Annotated[dict[str, Latency], Meta(max_length=100)] = {}


class Failures(msgspec.Struct):
    """Failures of envs in the parts of a run that have ended.

    Attributes:
        count: how many.
        by_kind: how many by class name, and by `envmgr.cli.resume.UNKNOWN`.
        by_env: how many by env_id, as far as that is known.
    """

    count: Count = 0
    by_kind: Named = msgspec.field(default_factory=dict)
    by_env: dict[EnvId, Count] = msgspec.field(default_factory=dict)


class Resumption(msgspec.Struct):
    """One time that a run was resumed.

    Attributes:
        at: when the run was resumed.
        seed: what took the place of `manager.seed`.
        steps: timesteps that counted then.
        episodes: episodes that counted then, those that failed included.
        failures: failures until then.
    """

    at: str
    seed: Seed
    steps: Count
    episodes: Count
    failures: Failures


Resumptions = Annotated[list[Resumption], Meta(max_length=10_000)]


class Began(msgspec.Struct):
    """What a report takes from `run.json`.

    Attributes:
        began_at: when the run was begun; whole seconds, rounded down.
    """

    began_at: datetime


Spread = Annotated[dict[str, float | list[float | None] | None], Meta(max_length=100)]


class Summary(msgspec.Struct):
    """What a report takes from `summary.json`."""

    ending: str
    steps: Count
    elapsed_s: Seconds
    steps_per_s: Seconds
    episodes: Count
    abnormal_episodes: Count
    stats: Stats
    error: str | None = None
    config: str | None = None
    env: str | None = None
    manager: str | None = None
    env_num: Count | None = None
    seed: Seed = None
    policy: str | None = None
    began_at: str | None = None
    resumed: Resumptions = []
    versions: Annotated[dict[str, str], Meta(max_length=100)] = {}
    unfinished_steps: Count = 0
    returned: Spread = msgspec.field(name="return", default_factory=dict)
    length: Spread = {}
