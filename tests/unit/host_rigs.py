"""Hosts without a process: their envs do as they are told, and the test is the trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from envmgr import BaseEnv, EnvTimestep
from envmgr.spaces import codec_of
from envmgr.wire.arenas import arena_arrays, buffers_for, plan_placements
from envmgr.wire.block import (
    BUFFER_BITS,
    HAS_INFO,
    RESETS_ASKED,
    REWARD_BITS,
    REWARD_SHIFT,
    RING_ONCE,
    Block,
    BlockPlan,
    posting_of,
    token_of,
)
from envmgr.wire.hosts import HostSettings
from envmgr.wire.infos import InfoDecoder
from envmgr.wire.messages import (
    EpisodePlan,
    Message,
    Op,
    RemoteFailure,
    ResetRequest,
)
from envmgr.wire.rewards import restored
from envmgr.worker.block_steps import block_stepper
from envmgr.worker.event_loop import WorkerLoop
from envmgr.worker.host import EnvsInUse, Host

OBSERVATIONS = Box(-100, 100, (2,), np.float32)


ACTIONS = Discrete(3)


def numbers(reference: Any) -> list[float]:
    """Return the observation that a reply by message carries."""
    (leaf,) = reference
    found: list[float] = np.frombuffer(leaf, np.float32).tolist()
    return found


class ScriptedEnv:
    """Does what its script says: each step takes the next entry.

    An entry is an `EnvTimestep`, or an exception to raise.
    """

    observation_space: Any = OBSERVATIONS
    action_space: Any = ACTIONS
    metadata: Any = {"name": "scripted"}  # noqa: RUF012 - as gymnasium's envs have it

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.log: list[Any] = []
        self.resets: list[Any] = []
        self.reset_info: Any = {}
        self.closed = 0

    def reset(self, **params: Any) -> Any:
        self.log.append(("reset", params))
        result = self.resets.pop(0) if self.resets else np.zeros(2, np.float32)
        if isinstance(result, BaseException):
            raise result
        return result

    def step(self, action: Any) -> Any:
        self.log.append(("step", action))
        result = self.script.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result

    def seed(self, seed: int, dynamic_seed: Any = "not given") -> None:
        self.log.append(("seed", seed, dynamic_seed))

    def close(self) -> None:
        self.closed += 1

    def double(self, number: int) -> int:
        return 2 * number

    def raises(self) -> None:
        raise ValueError("inside")

    def lacks(self) -> None:
        raise AttributeError("inside")


def step(value: float = 0.0, reward: Any = 1.0, done: bool = False, info: Any = None) -> Any:
    obs = np.full(2, value, np.float32)
    return EnvTimestep(obs, reward, done, {} if info is None else info)


class Harness:
    """A host whose replies are not encoded.

    Args:
        env: what the factory returns; an exception is raised by it.
        encode: in place of the identity.
        memory: what the host finds as shared memory.
        **settings: fields of `HostSettings`.
    """

    def __init__(
        self,
        env: Any,
        *,
        encode: Callable[[Message], Any] = lambda message: message,
        memory: Any = None,
        rss_bytes: Callable[[], int] = lambda: 0,
        envs_in_use: EnvsInUse | None = None,
        loop: WorkerLoop | None = None,
        **settings: Any,
    ) -> None:
        self.env = env
        self.built = 0
        self.sent: list[Message] = []
        self.host = Host(
            {3: self._build},
            HostSettings(**settings),
            encode=encode,
            send=self.sent.append,
            memory=lambda nbytes: memory,
            rss_bytes=rss_bytes,
            envs_in_use=envs_in_use,
            loop=loop,
        )
        self._request_id = 0

    def _build(self) -> Any:
        self.built += 1
        if isinstance(self.env, BaseException):
            raise self.env
        return self.env

    def message(self, op: Op, payload: Any = None) -> Message:
        self._request_id += 1
        return Message(op, 3, 1, self._request_id, payload)

    def build(self) -> Any:
        return self.handle(self.message(Op.HELLO))

    def handle(self, message: Message) -> list[Any]:
        """Run a request, and the reset that may follow it, and return what was sent."""
        self.sent.clear()
        self.host.handle(message)
        self.host.run_resets(1)
        return list(self.sent)

    def run(self, op: Op, payload: Any = None) -> list[Message]:
        request = self.message(op, payload)
        replies = self.handle(request)
        for reply in replies:  # every reply says what it answers
            assert reply[1:4] == request[1:4]
        return replies

    def reset(
        self,
        params: dict[str, Any] | None = None,
        *,
        seed: int | None = None,
        dynamic_seed: bool | None = None,
        auto_reset: bool = True,
        left: float = float("inf"),
        later_params: dict[str, Any] | None = None,
    ) -> list[Message]:
        plan = EpisodePlan(auto_reset, left, later_params or {})
        return self.run(Op.RESET, ResetRequest(params or {}, seed, dynamic_seed, plan))


def launched(*script: Any, **options: Any) -> Harness:
    """Return a host whose env is built and has been reset."""
    harness = Harness(ScriptedEnv(*script), **options)
    harness.build()
    harness.reset()
    harness.env.log.clear()
    return harness


def only(replies: list[Message], op: Op) -> Any:
    """Return the payload of the one reply, which has to be an `op`."""
    assert [reply.op for reply in replies] == [op]
    return replies[0].payload


def failure_of(replies: list[Message]) -> RemoteFailure:
    failure = only(replies, Op.FAILED)
    assert isinstance(failure, RemoteFailure)
    return failure


OBS = Box(-9, 9, (2,), np.float32)


PLAN = EpisodePlan(True, float("inf"), {})


class BlockEnv(BaseEnv):
    """Gives what it is told to, one timestep after the other; an exception is raised."""

    observation_space, action_space = OBS, Discrete(100)
    reward_space = Box(-1, 1, (1,), np.float64)

    def __init__(self) -> None:
        self.gives: list[Any] = []
        self.resets: list[Any] = []
        self.log: list[Any] = []
        self.reset_info: dict[str, Any] = {}

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None: ...

    def reset(self, **params: Any) -> Any:
        self.log.append("reset")
        self.params = params
        given = self.resets.pop(0) if self.resets else np.zeros(2, np.float32)
        if isinstance(given, BaseException):
            raise given
        return given

    def step(self, action: Any) -> Any:
        self.log.append(action)
        given = self.gives.pop(0) if self.gives else block_step()
        if callable(given):
            given()
            given = block_step()
        if isinstance(given, BaseException):
            raise given
        return given

    def close(self) -> None: ...


def block_step(
    obs: Any = None, reward: Any = 1.0, done: bool = False, info: Any = None
) -> EnvTimestep:
    obs = np.ones(2, np.float32) if obs is None else obs
    return EnvTimestep(obs, reward, done, {} if info is None else info)


class BlockRig:
    """A host of several envs with a block in plain memory; the test is the parent."""

    def __init__(
        self,
        n: int = 1,
        *,
        timed: bool = False,
        plan: Any = PLAN,
        n_hosts: int = 1,
        measures: bool = False,
        events: int = 0,
        spin_s: float = 0.0,
        env_class: Callable[[], Any] = BlockEnv,
        observations: Any = OBS,
        **settings: Any,
    ) -> None:
        layouts: list[Any] = [codec_of(observations).structure.placed] * n
        actions = codec_of(BlockEnv.action_space).layout
        assert actions is not None
        block_plan = BlockPlan(n, n_hosts, actions, measures=measures, events=events)
        placements, nbytes = plan_placements(layouts, buffers_for(True), block_plan.nbytes)
        self.memory = bytearray(nbytes)
        self.block = Block(self.memory, block_plan)
        self.block.sleeping[-1] = 1
        self.rings = 0
        self.posted = block_stepper(0, self._ring, timed=timed, measures=measures, spin_s=spin_s)
        self.envs: dict[int, Any] = {}
        self._env_class = env_class
        self.sent: list[Message] = []
        self.host = Host(
            {i: lambda i=i: self._build(i) for i in range(n)},
            HostSettings(**settings),
            encode=lambda message: message,
            send=self.sent.append,
            memory=lambda nbytes: self.memory,
            stepper=self.posted,
        )
        self.placements = [
            dataclasses.replace(p, block=block_plan) for p in placements if p is not None
        ]
        self.arena = arena_arrays(self.memory, self.placements[0])[0]
        self.request_id = 0
        for i in range(n):
            self.ask(i, Op.HELLO)
            self.ask(i, Op.ATTACH, self.placements[i])
            self.ask(i, Op.RESET, ResetRequest({}, None, None, plan))
        self.sent.clear()
        for env in self.envs.values():
            env.log.clear()

    def _build(self, env_id: int) -> Any:
        self.envs[env_id] = self._env_class()
        return self.envs[env_id]

    def _ring(self) -> None:
        self.rings += 1

    def ask(self, env_id: int, op: Op, payload: Any = None, generation: int = 0) -> None:
        self.request_id += 1
        message = Message(op, env_id, generation, self.request_id, payload)
        self.host.handle(message)

    def post(
        self, *env_ids: int, action: int = 7, ring: int = RING_ONCE, generation: int = 0
    ) -> None:
        self.request_id += 1
        for i in env_ids:
            self.block.actions[0][i] = action
            self.block.requests[i] = token_of(generation, self.request_id)
        self.block.posted[0] = posting_of(self.request_id, ring)

    def order(self, *env_ids: int, also: tuple[int, ...] = (), generation: int = 0) -> int:
        """Order resets, and post steps together with them; return the token of the resets."""
        self.request_id += 1
        token = token_of(generation, self.request_id)
        self.block.reset_requests[list(env_ids)] = token
        self.post(*also, ring=RING_ONCE | RESETS_ASKED, generation=generation)
        return token

    def run(self, *, asked: bool = False) -> list[tuple[int, Op]]:
        """Run what is due; return who was told what by message."""
        self.sent.clear()
        waiting = len(self.host.pending_resets)
        self.posted.take_posted()
        if asked:
            self.posted.ring()
        if waiting:
            self.host.run_resets(waiting)
        return [(message.env_id, Op(message.op)) for message in self.sent]

    def step(self, given: Any) -> list[Op]:
        self.envs[0].gives.append(given)
        self.post(0)
        return [op for _, op in self.run()]

    def has_replied(self, env_id: int = 0) -> bool:
        return bool(self.block.replies[env_id] == self.block.requests[env_id])

    def has_reset(self, env_id: int = 0) -> bool:
        return bool(self.block.resets[env_id] == self.block.requests[env_id])

    def reward(self) -> Any:
        kind = (int(self.block.flags[0]) & REWARD_BITS) >> REWARD_SHIFT
        return restored(kind, self.block.reward_numbers(kind, slice(0, 1)))[0]

    def info(self) -> Any:
        if not self.block.flags[0] & HAS_INFO:
            return {}
        return InfoDecoder().decode(self.block.infos[0].tobytes())

    def obs(self) -> Any:
        return self.arena[int(self.block.flags[0]) & BUFFER_BITS, 0].tolist()
