"""Workers without processes: real hosts behind real pipes, whose words can be changed on the way.

The trainer's side is the real one, from the transport to the supervisor. A worker runs inside of
the call that sends it something, and its clock is a fake one: nothing waits, and a seed repeats a
run.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from signal import SIGKILL
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envmgr.core import EpisodeRules, Hosts, ManagedEnv, Phase, Supervisor
from envmgr.core.call_journal import CallJournal
from envmgr.core.collect import ArrayBatch, Collected, HandedOut
from envmgr.core.engine import Engine, Gather
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy, GatherPolicy
from envmgr.spaces import Array, TextLeaf
from envmgr.transport.base import HostDied
from envmgr.transport.process.spawner import Spawner
from envmgr.transport.process.transport import ProcessTransport
from envmgr.types import EnvTimestep
from envmgr.wire.arenas import arena_arrays
from envmgr.wire.block import RING_ONCE, Block
from envmgr.wire.channel import BELL, BELL_ASKED, ChannelClosedError, FrameChannel
from envmgr.wire.frames import encode, split_frame
from envmgr.wire.hosts import HostSettings, HostSpec, WorkerSettings
from envmgr.wire.info_forms import InfoForm
from envmgr.wire.messages import UNANSWERED, Message, Op
from envmgr.worker.block_steps import BlockStepper
from envmgr.worker.host import Host
from tests.fakes import FakeClock

PIPE_BYTES = 1 << 20
STEP_LIMIT_S = 1.0
EPISODE_STEPS = 7
WINDOW_S = 1 / 64
MOST_LOOKS = 10

Mutate = Callable[["Worker", bytes], Sequence[bytes]]
"""Returns what a worker writes in place of a frame."""

Scribble = Callable[[Block, Sequence[Array]], None]
"""Writes into the block, and into texts of observations, when a worker has done so."""


class CountingEnv(gymnasium.Env[Any, Any]):
    """Observations name the env, how many of its steps there were, and the latest action."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(1 << 30)

    def __init__(self, env_id: int) -> None:
        self.env_id = env_id
        self.n_steps = 0
        self.n_episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.n_steps = 0
        self.n_episodes += 1
        return np.array([self.env_id, self.n_episodes, 0, -1], dtype=np.float64), {"first": True}

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        obs = np.array([self.env_id, self.n_episodes, self.n_steps, action], dtype=np.float64)
        odd = {"why": "x" * 300, "set": {1, 2}} if self.n_steps % 3 == 0 else {"n": self.n_steps}
        return obs, float(action), self.n_steps == EPISODE_STEPS, False, odd

    def colour(self) -> str:
        return "blue"


class GuidedEnv(CountingEnv):
    """As `CountingEnv`, whose observations have a part without a layout beside them."""

    observation_space = spaces.Dict(  # type: ignore[assignment]
        {"counts": CountingEnv.observation_space, "task": spaces.Space()}
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        counts, info = super().reset()
        return {"counts": counts, "task": [self.n_episodes]}, info

    def step(self, action: Any) -> Any:
        counts, *rest = super().step(action)
        return {"counts": counts, "task": {"n": self.n_steps}}, *rest


class ToldEnv(CountingEnv):
    """As `CountingEnv`, whose observations have a text beside them, now and then a long one."""

    observation_space = spaces.Dict(  # type: ignore[assignment]
        {"counts": CountingEnv.observation_space, "told": spaces.Space(dtype=str)}
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        counts, info = super().reset()
        return {"counts": counts, "told": f"episode {self.n_episodes}"}, info

    def step(self, action: Any) -> Any:
        counts, *rest = super().step(action)
        text = f"step {self.n_steps} " * (200 if self.n_steps == 5 else 1)
        return {"counts": counts, "told": text}, *rest


class Worker:
    """The child side of one host.

    Attributes:
        is_tainted: it has sent something of its own with valid checksums: what comes from it may
            be its own invention from now on.
        sent: some frames that it has sent before.
        block: the columns, once it has seen them.
        texts: those in observations, as bytes (buffers, rows, bytes of a text).
    """

    def __init__(self, spec: HostSpec, write_fd: int, memory_fd: int | None, wire: Wire) -> None:
        self.spec = spec
        self.is_alive = True
        self.is_tainted = False
        self.sent: list[bytes] = []
        self.block: Block | None = None
        self.texts: list[Array] = []
        self._write_fd = write_fd
        self._memory_fd = memory_fd
        self._wire = wire
        self._host: Host | None = None
        self._posted: BlockStepper | None = None
        self._unread = bytearray()

    def take(self, data: bytes) -> None:
        """Read what the trainer has sent, and answer it."""
        self._unread += data
        while self.is_alive and self._unread:
            if self._unread[:1] in (BELL, BELL_ASKED):
                del self._unread[:1]
                self.look()
                continue
            parsed = split_frame(self._unread)
            if parsed is None:
                return
            del self._unread[: parsed[1]]
            self._handle(parsed[0].message())

    def _handle(self, message: Message) -> None:
        if self._host is None:
            self._begin(message)
        elif message.op == Op.CLOSE:
            self._host.close()
            self.send(encode(message._replace(op=Op.CLOSED, payload=None)))
            self.die(0)
        else:
            self._host.handle(message)
            while self._host.pending_resets:
                self._host.run_resets(1)
            if message.op == Op.ATTACH:
                self._attach(message)

    def _begin(self, first: Message) -> None:
        orders = first.payload
        settings: HostSettings = pickle.loads(orders.settings)
        if self._memory_fd is not None:
            timed = bool(settings.announced)
            self._posted = BlockStepper(orders.host_index, lambda: None, timed=timed)
        self._host = Host(
            self.spec.factories,
            settings,
            encode=encode,
            send=self.send,
            memory=self._wire.memory,
            stepper=self._posted,
        )
        for env_id, generation, request_id, _ in orders.envs:
            if request_id != UNANSWERED:
                self._host.handle(Message(Op.HELLO, env_id, generation, request_id, None))

    def _attach(self, message: Message) -> None:
        if message.payload.block is not None:
            memory = self._wire.memory(message.payload.nbytes)
            self.block = Block(memory, message.payload.block)
            arrays = arena_arrays(memory, message.payload)
            leaves = zip(message.payload.layout.leaves, arrays, strict=True)
            found = [array for leaf, array in leaves if isinstance(leaf, TextLeaf)]
            self.texts = found or self.texts
            self.block.sleeping[self.spec.index] = 1  # so that it is rung for each posting

    def look(self) -> None:
        """Take the steps that are posted, and the resets after them."""
        if self._posted is not None and self._host is not None and self.is_alive:
            for _ in range(MOST_LOOKS):  # somebody may scribble over what says so
                taken = self._posted.take_posted()
                if taken is None and not self._host.pending_resets:
                    break
                self._host.run_resets(len(self._host.pending_resets))
            if self.block is not None:
                self._wire.scribble(self.block, self.texts)
                self.block.sleeping[:] = 1

    def send(self, frame: bytes) -> None:
        """Send a frame, or what the fuzzer makes of it."""
        for piece in self._wire.mutate(self, frame):
            self.write(piece)
        self.sent = [*self.sent[-3:], frame]

    def write(self, data: bytes) -> None:
        """Write bytes to the trainer; what finds no room is lost."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            if self.is_alive and data:
                os.write(self._write_fd, data)

    def die(self, exit_status: int) -> None:
        """End."""
        if self.is_alive:
            self.is_alive = False
            os.close(self._write_fd)
            self._wire.spawner.died.append((self.spec.host_id, HostDied(exit_status)))


class _WireChannel(FrameChannel):
    """The trainer's end: what it sends is taken at once."""

    worker: Worker

    def send(self, frame: bytes) -> None:
        if not self.worker.is_alive:
            raise ChannelClosedError("end of stream")
        self.worker.take(frame)

    @staticmethod
    def write_each(channels: Any, frames: Sequence[bytes], written: list[int]) -> None:
        for channel, frame in zip(channels, frames, strict=True):
            try:
                channel.send(frame)
                written.append(len(frame))
            except ChannelClosedError:
                written.append(-1)

    def ring(self, bell: bytes) -> None:
        self.worker.look()


class _WireSpawner(Spawner):
    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.died: list[tuple[int, HostDied]] = []
        self.workers: dict[int, Worker] = {}

    def start(self, spec: HostSpec, shared_fds: tuple[int, ...]) -> FrameChannel:
        self._bury()
        ours, theirs = os.pipe()
        fcntl.fcntl(theirs, getattr(fcntl, "F_SETPIPE_SZ", 1031), PIPE_BYTES)
        os.set_blocking(theirs, False)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        channel = _WireChannel(ours, nowhere, blocking=False)
        memory_fd = shared_fds[0] if len(shared_fds) > 1 else None
        channel.worker = Worker(spec, theirs, memory_fd, self.wire)
        self.workers[spec.host_id] = channel.worker
        return channel

    def _bury(self) -> None:
        for host_id in [i for i, worker in self.workers.items() if not worker.is_alive]:
            del self.workers[host_id]

    @property
    def pids(self) -> dict[int, int]:
        return {}

    def death_of(self, host_id: int) -> Any:
        return None

    def any_death(self) -> list[Any]:
        return []

    @property
    def has_deaths(self) -> bool:
        return bool(self.died)

    def deaths(self) -> list[tuple[int, HostDied]]:
        died, self.died = self.died, []
        return died

    def signal(self, host_id: int, number: int) -> None:
        worker = self.workers.get(host_id)
        if worker is not None:
            worker.die(-number)

    def give_up(self, host_id: int) -> None:
        self.signal(host_id, SIGKILL)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.die(-SIGKILL)


class _WireTransport(ProcessTransport):
    """Waits on a fake clock: what workers have to say they have said when they were asked."""

    wire: Wire

    def poll(self, timeout_s: float | None, *, pivot: int | None = None) -> None:
        super().poll(0.0)
        has_come = bool(self.arrivals or self.needs_attention)
        self.wire.n_polls_in_vain += not has_come
        if not has_come and timeout_s:
            self.wire.clock.advance(timeout_s)
        if self.wire.n_polls_in_vain > 10_000:
            raise AssertionError("the trainer waits for something that never comes")
        if has_come:
            self.wire.n_polls_in_vain = 0

    def await_ring(self, timeout_s: float) -> bool:
        return super().await_ring(0.0)

    def ring(self, host_ids: Iterable[int], *, asks: bool = False) -> None:
        for host_id in host_ids:
            worker = self.wire.spawner.workers.get(host_id)
            if worker is not None:
                worker.look()


class Wire:
    """A supervisor, its engine, and workers at the other end of pipes.

    Args:
        env_num: how many envs.
        num_workers: hosts that share them; None: one for each.
        shared_memory: steps through the block, or else by message.
        mutate: changes what workers send, once they are launched.
        auto_reset: whether ended envs are reset.
        reset_inplace: whether steps that end an episode wait for the next one.
        has_forms: every other env has observations that go by message, in part.
        has_texts: the others have texts in their observations.

    Attributes:
        scribble: writes into the block, when a worker has done so.
    """

    def __init__(
        self,
        env_num: int,
        *,
        num_workers: int | None,
        shared_memory: bool,
        mutate: Mutate,
        auto_reset: bool = True,
        reset_inplace: bool = False,
        has_forms: bool = False,
        has_texts: bool = False,
    ) -> None:
        self.mutate: Mutate = lambda worker, frame: (frame,)
        self.scribble: Scribble = lambda block, texts: None
        self.clock = FakeClock()
        self.spawner = _WireSpawner(self)
        self.n_polls_in_vain = self.n_handed_out = 0
        self._mapped: list[mmap.mmap] = []
        settings = WorkerSettings()
        self.transport = _WireTransport(self.spawner, settings, shared_memory=shared_memory)
        self.transport.wire = self
        limits = Deadlines(STEP_LIMIT_S, STEP_LIMIT_S, 4.0, 0.5)
        kinds = (
            ToldEnv if has_texts else CountingEnv,
            GuidedEnv if has_forms else CountingEnv,
        )
        factories = [partial(kinds[i % 2], i) for i in range(env_num)]
        hosts = Hosts(
            self.transport, factories, HostSettings(), limits, self.clock, num_workers=num_workers
        )
        # Budgets are not what is tried out here: a pause between renewals, a window shorter still.
        policy = FailurePolicy(
            max_failures=1 << 30, retry_waiting_s=2 * WINDOW_S, max_retry=2, window_s=WINDOW_S
        )
        rules = EpisodeRules(auto_reset=auto_reset, reset_inplace=reset_inplace)
        self.supervisor = Supervisor(hosts, rules, policy, CallJournal())
        self.engine = Engine(self.supervisor, self.transport, self.clock, background=False)
        self.auto_reset = auto_reset
        self._launch()
        self.mutate = mutate

    def memory(self, nbytes: int) -> mmap.mmap:
        """Return the shared memory, as workers have it."""
        fd = self.transport._shared._memory_fd
        assert fd is not None
        if not self._mapped:
            self._mapped.append(mmap.mmap(fd, nbytes))
        return self._mapped[0]

    def _launch(self) -> None:
        supervisor = self.supervisor
        slots = supervisor.envs
        supervisor.start_hosts(range(len(slots)))
        self.wait(lambda: all(slot.phase is not Phase.STARTING for slot in slots))
        supervisor.place_observations(same_spaces=False)
        supervisor.begin_episodes()
        self.wait(lambda: len(self.ready()) == len(slots))
        supervisor.table.launching = False

    def wait(self, finished: Callable[[], bool]) -> None:
        """Wait for something that happens some time on the fake clock: pauses double."""
        if not self.engine.wait_for(finished, 1e6):
            states = [(self.supervisor.states[s.env_id], s.phase) for s in self.supervisor.envs]
            raise AssertionError(f"it does not happen: {states}")

    def ready(self) -> list[int]:
        """Return the envs that take an action now."""
        return self.supervisor.table.ready_ids()

    def know_forms(self, forms: Iterable[InfoForm]) -> None:
        """Have the trainer number forms of infos, as if workers had proposed them."""
        for form in forms:
            self.supervisor._setup.number(form)

    def all_come_back(self) -> None:
        """Have every env ready again that can be, also those whose episode has ended."""
        states = self.supervisor.states

        def back() -> bool:
            if not self.auto_reset:
                for slot in self.supervisor.envs:
                    if states[slot.env_id] is EnvState.NEED_RESET and slot.phase is Phase.IDLE:
                        self.supervisor.resets.begin({slot.env_id: None})
            ready = self.ready()
            if any(slot.phase is Phase.CALLING for slot in self.supervisor.envs):
                return False
            # One that waits for a new worker waits for the episodes of its neighbours, too.
            return bool(ready) and all(
                slot.env_id in ready or (slot.waits and slot.group.is_to_be_replaced)
                for slot in self.supervisor.envs
            )

        self.wait(back)

    def step(self, actions: dict[int, int], *, as_arrays: bool = False) -> dict[int, EnvTimestep]:
        """Send actions and gather all of their timesteps, as dicts or as arrays."""
        supervisor = self.supervisor
        if not supervisor.submitter.by_id(actions, RING_ONCE):
            supervisor.submitter.checked(actions, RING_ONCE, None)
            supervisor.repair.answer_unexecuted()
        timesteps: dict[int, EnvTimestep] = {}
        policy = GatherPolicy(float("inf"), 0.0)
        gather = Gather(self.engine, policy)
        while supervisor.statistics.outstanding:
            taken = gather.some(policy, exactly=True, as_arrays=as_arrays)
            self.n_handed_out += type(taken) is HandedOut
            batch = self._batch(taken) if as_arrays else None
            if batch is not None:
                rows = map(_row_of(batch), range(len(batch.env_ids)))
                got = dict(zip(batch.env_ids.tolist(), rows, strict=True))
            else:
                got = {} if taken is None else supervisor.collector.timesteps(taken)
            supervisor.journal.returning = None
            assert not set(got) & set(timesteps), "a timestep was delivered twice"
            timesteps.update(got)
        return {i: _with_counts(timestep) for i, timestep in timesteps.items()}

    def _batch(self, taken: Any) -> ArrayBatch | None:
        """Return what was taken as arrays; None if it cannot be, or is nothing."""
        if isinstance(taken, Collected):
            return self.supervisor.collector.arrays(taken)
        return None if taken is None else taken.result

    def slots(self) -> list[ManagedEnv]:
        """Return what the supervisor remembers of the envs."""
        return self.supervisor.envs

    def worker_of(self, env_id: int) -> Worker | None:
        """Return the worker that serves an env now."""
        return self.spawner.workers.get(self.supervisor.envs[env_id].group.host_id or 0)

    def close(self) -> None:
        """End everything."""
        self.n_polls_in_vain = 0
        self.engine.close(0.0)
        for memory in self._mapped:
            with contextlib.suppress(BufferError):
                memory.close()


def _row_of(batch: ArrayBatch) -> Callable[[int], EnvTimestep]:
    """Return what gives the rows of a batch as timesteps."""

    def row(k: int) -> EnvTimestep:
        obs = batch.obs
        obs = {key: part[k] for key, part in obs.items()} if isinstance(obs, dict) else obs[k]
        done = bool(batch.terminated[k] or batch.truncated[k])
        return EnvTimestep(obs, batch.reward[k], done, batch.infos[k])

    return row


def _with_counts(timestep: EnvTimestep) -> EnvTimestep:
    """Return a timestep of any env here as one of `CountingEnv`."""
    obs = timestep.obs
    assert not isinstance(obs, dict) or isinstance(obs.get("told", ""), str)
    return timestep if not isinstance(obs, dict) else timestep._replace(obs=obs["counts"])
