"""What the hosts of a `FakeTransport` do in the shared block: they read steps and write replies.

It follows what a worker does, without running anything: which replies fit into the block, in which
order its columns are written, and when the parent is rung for. Observations are numbers there, so
that tests may observe whatever they like: see `FakeBlock.observations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete

from envmgr.env.contract import ENDING_GIVEN, TERMINATED, TRUNCATED
from envmgr.wire.arenas import Placement, buffer_arrays
from envmgr.wire.block import (
    AFTER_SHIFT,
    DONE,
    ENDING_SHIFT,
    HAS_INFO,
    INFO_BYTES,
    RESETS_ASKED,
    REWARD_SHIFT,
    RING_EACH,
    RING_MASK,
    Block,
    request_of,
    token_of,
)
from envmgr.wire.infos import InfoEncoder
from envmgr.wire.messages import Message, Op, ResetRequest
from envmgr.wire.rewards import FIRST_WIDE, kind_of_reward

NUMBERED = Discrete(1 << 62)
"""The observation space of envs whose observations are numbered."""

ACTIONS = Discrete(1 << 31)
"""Their action space."""


@dataclass
class Batch:
    """Steps of one host that it found posted together, as far as they were not answered.

    Attributes:
        posting: what it was rung with.
        requests: of each env.
    """

    posting: int
    requests: dict[int, Message]


@dataclass
class EnvRow:
    """One env's row of the block.

    Attributes:
        placement: where its observations go.
        buffers: those of its observations.
        taken: the token of the step that it has taken last.
        ordered: the token of the reset that it was ordered last.
        step_buffer: where its next observation of a step goes.
        reset_buffer: likewise, of a reset.
    """

    placement: Placement
    buffers: Any
    taken: int
    ordered: int
    step_buffer: int
    reset_buffer: int

    @property
    def row(self) -> int:
        """Its row."""
        return self.placement.row

    def next_buffer(self, *, of_reset: bool) -> int:
        """Return the buffer that an observation takes."""
        buffer = self.reset_buffer if of_reset else self.step_buffer
        if of_reset:
            self.reset_buffer = self.placement.buffers.after(buffer)
        else:
            self.step_buffer = self.placement.buffers.after(buffer)
        return buffer


@dataclass
class HostInBlock:
    """What one host knows of the block.

    Attributes:
        index: which of the manager's hosts it is.
        rows: by env_id.
        batches: steps that it has not answered.
        posted: the step or the reset that was posted last for an env, by env_id: an automatic reset
            answers a step, too.
        plans: what an env was told by its latest reset by message: one that is ordered is like it.
        asked: it is to ring when it has done what was posted.
    """

    index: int
    rows: dict[int, EnvRow] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    posted: dict[int, Message] = field(default_factory=dict)
    plans: dict[int, ResetRequest] = field(default_factory=dict)
    asked: bool = False

    def answers_posted(self, message: Message) -> bool:
        """Whether a reply answers what was posted."""
        posted = self.posted.get(message.env_id)
        return posted is not None and posted[1:4] == message[1:4]


class FakeBlock:
    """The memory of one launch, as its hosts see it.

    Args:
        memory: what the parent was given.
        ring: rings for the parent.

    Attributes:
        block: the columns; None until the first host is told of them.
        observations: what the numbers in the arena stand for.
    """

    def __init__(self, memory: memoryview, ring: Callable[[], None]) -> None:
        self.block: Block | None = None
        self.observations: list[Any] = []
        self._memory = memory
        self._ring = ring
        self._encoder = InfoEncoder(INFO_BYTES)

    # -- who is where -----------------------------------------------------------------------

    def add_row(self, host: HostInBlock, env_id: int, placement: Placement) -> None:
        """An env is told where its row is."""
        plan = placement.block
        (buffers,) = buffer_arrays(self._memory, placement)
        taken = ordered = 0
        if plan is not None:
            if self.block is None:
                self.block = Block(self._memory, plan)
            self.block.sleeping[host.index] = 1  # for good: it looks when it is rung
            taken = int(self.block.requests[placement.row])
            ordered = int(self.block.reset_requests[placement.row])
        first = placement.step_buffer, placement.reset_buffer
        env_row = EnvRow(placement, buffers, taken, ordered, *first)
        host.rows[env_id] = env_row

    def leave(self, host: HostInBlock, env_id: int) -> None:
        """An env is closed, and answers nothing any more."""
        host.rows.pop(env_id, None)
        host.posted.pop(env_id, None)
        for batch in list(host.batches):
            self._answered(host, batch, env_id)

    # -- steps ------------------------------------------------------------------------------

    def look(self, host: HostInBlock, *, asks: bool) -> Iterator[Message]:
        """A host is rung: return the steps and resets that it finds, as requests."""
        block = self.block
        if block is None:
            return
        batch = Batch(int(block.posted[host.index]), {})
        for env_id, env_row in sorted(host.rows.items()):
            token = int(block.requests[env_row.row])
            if env_row.placement.block is not None and token != env_row.taken:
                env_row.taken = token
                action = [leaf[env_row.row].tolist() for leaf in block.actions]
                batch.requests[env_id] = Message(
                    Op.STEP, env_id, *request_of(token), block.plan.actions.unflatten(action)
                )
        host.posted.update(batch.requests)
        requests = list(batch.requests.values())
        if requests:
            host.batches.append(batch)
        host.asked = host.asked or asks
        if host.asked and not host.batches:
            host.asked = False
            self._ring()
        yield from requests
        if batch.posting & RESETS_ASKED:
            yield from self._ordered(block, host)

    def _ordered(self, block: Block, host: HostInBlock) -> Iterator[Message]:
        for env_id, env_row in sorted(host.rows.items()):
            token = int(block.reset_requests[env_row.row])
            if env_row.placement.block is not None and token != env_row.ordered:
                env_row.ordered = token
                order = host.plans[env_id]._replace(seed=None)
                request = Message(Op.RESET, env_id, *request_of(token), order)
                host.posted[env_id] = request
                yield request
        block.finished[host.index] = max(block.finished[host.index], block.posted[host.index])

    # -- replies ----------------------------------------------------------------------------

    def has_room_for(self, host: HostInBlock, message: Message) -> bool:
        """Whether a reply goes into the block: it answers a posted step, and is not odd."""
        if not host.answers_posted(message):
            return False
        if message.op == Op.BEGAN:
            return True
        payload = message.payload
        if message.op == Op.STEPPED and type(payload) is tuple and len(payload) == 5:
            _, reward, _, info, _ = payload
            return kind_of_reward(reward) is not None and self._encoded(_told(info)[1]) is not None
        if message.op == Op.RESET_DONE and type(payload) is tuple and len(payload) == 2:
            return self._encoded(payload[1]) is not None
        return False

    def write(self, host: HostInBlock, message: Message, now: float) -> None:
        """Write a reply that the block has room for; the env may have been closed meanwhile."""
        block, env_row = self.block, host.rows.get(message.env_id)
        if block is None or env_row is None or not host.answers_posted(message):
            return
        block.since[host.index] = now
        block.running[host.index] = env_row.row + 1 if message.op == Op.BEGAN else 0
        if message.op == Op.STEPPED:
            self._write_step(block, env_row, message.payload)
            block.replies[env_row.row] = env_row.taken
            self.sent(host, message)
        elif message.op == Op.RESET_DONE:
            obs, info = message.payload
            flags = self._write_info(block.reset_infos, env_row, info)
            block.reset_flags[env_row.row] = flags | self._observe(env_row, obs, of_reset=True)
            block.resets[env_row.row] = token_of(message.generation, message.request_id)
            self._wake_parent()

    def _write_step(self, block: Block, env_row: EnvRow, payload: Any) -> None:
        obs, reward, done, info, after = payload
        ending, info = _told(info)
        kind = kind_of_reward(reward) or 0
        flags = self._observe(env_row, obs, of_reset=False) | ending << ENDING_SHIFT
        flags |= int(after) << AFTER_SHIFT | kind << REWARD_SHIFT | (DONE if done else 0)
        if kind < FIRST_WIDE:
            block.rewards[env_row.row] = np.asarray(reward).item()
        else:
            block.wide_rewards[env_row.row, : len(reward)] = reward
        block.flags[env_row.row] = flags | self._write_info(block.infos, env_row, info)

    def _write_info(self, column: Any, env_row: EnvRow, info: Any) -> int:
        data = self._encoded(info)
        if not data:
            return 0
        column[env_row.row, : len(data)] = memoryview(data)
        return HAS_INFO

    def _encoded(self, info: Any) -> bytes | None:
        if type(info) is not dict:
            return None
        return self._encoder.encode(info) if info else b""

    def _observe(self, env_row: EnvRow, obs: Any, *, of_reset: bool) -> int:
        """Put an observation into the arena; return its buffer."""
        buffer = env_row.next_buffer(of_reset=of_reset)
        self.observations.append(obs)
        env_row.buffers[buffer] = len(self.observations) - 1
        return buffer

    def placed(self, host: HostInBlock, message: Message) -> Message:
        """Return a reply by message as it arrives: its observation is in the arena."""
        env_row, payload = host.rows.get(message.env_id), message.payload
        lengths: dict[int, int] = {Op.STEPPED: 5, Op.RESET_DONE: 2}
        length = lengths.get(message.op)
        if type(payload) is not tuple or len(payload) != length:
            return message
        if env_row is None:  # the reply has the observation itself
            self.observations.append(payload[0])
            leaf = bytearray(np.array(len(self.observations) - 1).data)
            return message._replace(payload=([leaf], *payload[1:]))
        buffer = self._observe(env_row, payload[0], of_reset=message.op == Op.RESET_DONE)
        return message._replace(payload=(buffer, *payload[1:]))

    # -- rings ------------------------------------------------------------------------------

    def sent(self, host: HostInBlock, message: Message) -> None:
        """A reply to a step is there, in the block or by message."""
        if message.op == Op.BEGAN or not host.answers_posted(message):
            return
        for batch in list(host.batches):
            request = batch.requests.get(message.env_id)
            if request is not None and request[1:4] == message[1:4]:
                self._answered(host, batch, message.env_id)

    def _answered(self, host: HostInBlock, batch: Batch, env_id: int) -> None:
        block = self.block
        if block is None or batch.requests.pop(env_id, None) is None:
            return
        if batch.posting & RING_EACH:
            self._wake_parent()
        if batch.requests:
            return
        host.batches.remove(batch)
        block.finished[host.index] = batch.posting
        if batch.posting & RING_MASK or self._is_last(block, batch.posting):
            self._wake_parent()
        if host.asked and not host.batches:
            host.asked = False
            self._ring()

    def _is_last(self, block: Block, posting: int) -> bool:
        return not bool(((block.posted == posting) & (block.finished != posting)).any())

    def _wake_parent(self) -> None:
        if self.block is not None and self.block.sleeping[-1]:
            self._ring()


def _told(info: Any) -> tuple[int, Any]:
    """Return how an info says that the episode ended, and what else is in it."""
    if type(info) is not dict or not {"terminated", "truncated"} <= info.keys():
        return 0, info
    ending = ENDING_GIVEN | (TERMINATED if info["terminated"] else 0)
    ending |= TRUNCATED if info["truncated"] else 0
    left = {key: value for key, value in info.items() if key not in ("terminated", "truncated")}
    return ending, left
