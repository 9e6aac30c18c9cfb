"""What a host is told before it starts: its envs, its settings, and the settings of its process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from envmgr.env.batch_specs import Batch
from envmgr.types import EnvFactory
from envmgr.wire.arenas import ObservationRules
from envmgr.wire.messages import UNANSWERED, Message, Op


@dataclass(frozen=True)
class HostSettings:
    """What a host needs to know besides its envs.

    Attributes:
        rules: how observations are checked.
        refuse_non_finite_rewards: treat NaN and infinite rewards as malformed.
        observation_space: the user's space in place of the env's own; None keeps the env's.
        action_space: likewise.
        max_episodes: after how many episodes, of all envs of the host together, the worker asks to
            be replaced; None: never.
        max_rss_bytes: at how much resident memory the worker asks to be replaced; None: never.
        propagate: exceptions that are not the env's and pass through (Ctrl-C, in the trainer).
        announced: operations that the host announces with BEGAN before it runs one.
        batches: which env_ids of the manager are the rows of batched envs; one host serves all
            rows of a batch.
        start_steps: the most random steps that an env takes within its first reset.
        measures: whether the durations of steps and resets are written into the block.
        events: how many events each host records there.
        save_every: after how many steps the state of an env is saved, to resume from; None: never.
        copies_states: whether envs that do not give their state themselves are copied instead.
        carries: whether replies by message carry even observations that have a place in an arena.
    """

    rules: ObservationRules = field(default_factory=ObservationRules)
    refuse_non_finite_rewards: bool = False
    observation_space: Any = None
    action_space: Any = None
    max_episodes: int | None = None
    max_rss_bytes: int | None = None
    propagate: tuple[type[BaseException], ...] = ()
    announced: frozenset[int] = frozenset()
    batches: tuple[Batch, ...] = ()
    start_steps: int = 0
    measures: bool = False
    events: int = 0
    save_every: int | None = None
    copies_states: bool = False
    carries: bool = False


@dataclass(frozen=True)
class WorkerSettings:
    """How worker processes are set up.

    Attributes:
        threads: math threads of each worker (OpenMP, MKL, OpenBLAS, torch); None leaves their
            number as it is.
        affinity: the cores of each worker, by its index; None leaves the affinity as it is.
        allow: glob patterns of the environment variables that workers keep.
        deny: glob patterns of the environment variables that workers do not keep.
        set: environment variables that are set in workers.
        daemon: whether envs are refused child processes of multiprocessing.
        spin_s: how long a worker watches the block before it sleeps; only where cores are free.
        log: the folder of the files that workers print to; None: they print to the trainer's
            streams.
    """

    threads: int | None = 1
    affinity: tuple[tuple[int, ...], ...] | None = None
    allow: tuple[str, ...] = ("*",)
    deny: tuple[str, ...] = ()
    set: Mapping[str, str] = field(default_factory=dict)
    daemon: bool = True
    spin_s: float = 0.0
    log: str | None = None


class EnvToBuild(NamedTuple):
    """One env of a host that is to be started.

    Attributes:
        env_id: the env.
        generation: its generation.
        request_id: request id of its HELLO. If this is UNANSWERED, the host does not build the env
            yet: a RENEW has it built.
        factory: builds the env.
    """

    env_id: int
    generation: int
    request_id: int
    factory: EnvFactory


@dataclass(frozen=True)
class HostSpec:
    """A host that is to be started.

    Attributes:
        host_id: unique for the life of the transport.
        index: its index among the manager's hosts; a host that replaces it has the same index.
        envs: the envs it serves, in the order in which it builds them.
        settings: what the host needs to know.
    """

    host_id: int
    index: int
    envs: tuple[EnvToBuild, ...]
    settings: HostSettings

    @property
    def factories(self) -> dict[int, EnvFactory]:
        """The factories of its envs, by env_id."""
        return {env.env_id: env.factory for env in self.envs}


class WorkerSetup(NamedTuple):
    """The first message to a worker.

    Attributes:
        envs: (env_id, generation, request id of its HELLO, index of its factory in `factories`) of
            each env, in the order in which they are built.
        factories: the pickled factories, each once; not used by a process that got them otherwise.
        host_index: the index of the host.
        settings: the settings of the host, pickled.
        worker: the settings of the process.
        buffer: where its buffer for large messages begins; None if it has none.
    """

    envs: tuple[tuple[int, int, int, int], ...]
    factories: tuple[bytes, ...]
    host_index: int
    settings: bytes
    worker: WorkerSettings
    buffer: int | None = None


def hellos(envs: Iterable[tuple[int, int, int, Any]]) -> Iterator[Message]:
    """Yield the requests to build those envs that are to be built now."""
    for env_id, generation, request_id, _ in envs:
        if request_id != UNANSWERED:
            yield Message(Op.HELLO, env_id, generation, request_id, None)
