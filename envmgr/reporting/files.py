"""What is in the folder of a run, and in its lines."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
EnvId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]

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
    """Where a run stood at one moment; a line of `samples.jsonl`. All counts are since its begin.

    Attributes:
        elapsed_s: when.
        steps: timesteps.
        failures: of envs.
        policy_s: seconds in the policy.
        trainer_cpu_s: seconds that the trainer's main thread has computed.
        trainer_queued_s: seconds that it was queued for a core; None where the system does not say.
        env_step_s: seconds in the envs' steps, of all together; None without `manager.metrics`.
        env_reset_s: seconds in their resets, those at launch included; likewise.
        workers: worker processes.
        workers_s: seconds that there were workers, of all together.
        workers_cpu_s: seconds that they have computed; None where the system does not say.
        workers_queued_s: seconds that they were queued for a core; likewise.
        trainer_bytes: resident memory of the trainer.
        workers_bytes: that of all workers together.
        largest_bytes: that of the largest worker.
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
        cause: the name of the class of what failed.
        raised: the name of the class of what the env raised.
        exit_status: that its worker ended with; below 0, the signal that ended it.
        limit_s: which it exceeded, in seconds.
        length: timesteps; None of failures.
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


Quantities = list[Seconds | None]


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
    failures_by_kind: dict[str, Count] = {}
    failures_by_env: dict[EnvId, Count] = {}
    latest_failures: list[str] = []
    states: dict[str, Count] = {}
    renewals: Count = 0
    recycled: Count = 0
    latency: dict[str, Latency] = {}


class Began(msgspec.Struct):
    """What a report takes from `run.json`.

    Attributes:
        began_at: when the run was begun; whole seconds, rounded down.
    """

    began_at: datetime


Spread = dict[str, float | list[float | None] | None]


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
    seed: object = None
    policy: str | None = None
    began_at: str | None = None
    resumed: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    unfinished_steps: Count = 0
    returned: Spread = msgspec.field(name="return", default_factory=dict)
    length: Spread = {}
