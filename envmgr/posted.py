"""The child side of the shared block: takes the steps that are posted there.

A step is answered in the block, without a message, and so is the reset that follows the end of an
episode. What the block has no room for (failures, large or odd infos, unusual rewards) goes by
message, exactly as the answer to a step that came by message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

from envmgr.block import (
    AFTER_SHIFT,
    DONE,
    ENDING_SHIFT,
    HAS_INFO,
    INFO_BYTES,
    NUMPY_VALUES,
    REWARD_SHIFT,
    REWARD_TYPES,
    RING_EACH,
    RING_MASK,
    Block,
    items,
    request_of,
)
from envmgr.env.contract import Outcome, info_of
from envmgr.infos import InfoEncoder
from envmgr.protocol import AfterStep, Message, Op

_REWARD_KINDS = {kind: number for number, kind in enumerate(REWARD_TYPES)}
_MOST_EXACT = 1 << 53
_RING_AT_LEAST_S = 50e-6
"""A host that rings for each env does so at most so often: a ring costs what a cheap step costs."""

_SPINS = 16
_LEAST_SHARE = 16

Send = Callable[[Any], None]


class Stepped(Protocol):
    """What this module needs of an env of a host; see `HostedEnv`."""

    env_id: int
    propagated: tuple[type[BaseException], ...]
    checks_rewards: bool
    notices: list[str]

    @property
    def outcome(self) -> Callable[[Any], Outcome]:
        """Take one action."""
        ...

    @property
    def resets_inplace(self) -> bool:
        """Whether a step that ends an episode is complete with the next one."""
        ...

    def write_observation(self, observation: Any, *, of_reset: bool = False) -> Any:
        """Commit an observation."""
        ...

    def settle(self, outcome: Outcome) -> tuple[Any, AfterStep]:
        """Check a step and commit its observation."""
        ...

    def reset_again(self) -> tuple[Any, dict[str, Any]]:
        """Reset as the plan says."""
        ...

    def abnormal(self, message: Message, ending: int, info: Any) -> Any:
        """Report a step that the env calls abnormal."""
        ...

    def reply(self, message: Message, op: Op, payload: Any) -> Any:
        """Encode a reply."""
        ...

    def failure(self, message: Message, error: BaseException, during: str) -> Any:
        """Encode the report of an exception."""
        ...

    def take_notices(self, message: Message) -> list[Any]:
        """Encode what is to be logged."""
        ...


class PostedEnv:
    """One env's row of the block.

    Args:
        env: the env.
        block: the columns.
        row: its row.

    Attributes:
        token: of the step that was taken last; what was posted before is not for this env.
    """

    def __init__(self, env: Stepped, block: Block, row: int) -> None:
        self.block = block
        self.row = row
        self.token = int(block.requests[row])
        self._env = env
        self._outcome = env.outcome
        self._write = env.write_observation
        self._plain = not env.checks_rewards
        self._encoder = InfoEncoder(INFO_BYTES)
        self._rewards = items(block.rewards)
        self._flags = items(block.flags)
        self._replies = items(block.replies)

    def step(self, token: int, action: Any) -> tuple[Sequence[Any], bool]:
        """Take a step and answer it.

        Args:
            token: of the request.
            action: what the env gets.

        Returns:
            Encoded messages to send, none for a step like any other; and whether a reset is to
            follow.
        """
        self.token = token
        try:
            outcome = self._outcome(action)
            if outcome[2] or outcome[4] or type(outcome[1]) is not float or not self._plain:
                return self._answer(token, outcome)
            slot = self._write(outcome[0])
        except self._env.propagated:
            raise
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            return [self._env.failure(self._message(token), error, "step")], False
        row = self.row
        self._rewards[row] = outcome[1]
        self._flags[row] = slot | outcome[3] << ENDING_SHIFT
        self._replies[row] = token  # last: from now on the reply counts
        if self._env.notices:
            return self._env.take_notices(self._message(token)), False
        return (), False

    def _answer(self, token: int, outcome: Outcome) -> tuple[Sequence[Any], bool]:
        """Answer a step that has something to it."""
        _, reward, done, ending, info = outcome
        env, message = self._env, self._message(token)
        abnormal = env.abnormal(message, ending, info)
        if abnormal is not None:
            return [abnormal], False
        slot, after = env.settle(outcome)
        kind, data = _reward_kind(reward), self._encoded(info)
        sent: list[Any] = []
        by_message = kind is None or data is None
        if by_message:
            payload = (slot, reward, done, info_of(ending, info), int(after))
            sent = [env.reply(message, Op.STEPPED, payload)]
        sent = [*env.take_notices(message), *sent]
        resets = after is AfterStep.RESETS
        if resets and env.resets_inplace and not by_message:  # the step counts when both are there
            sent += self.begin_episode(token)
            resets = False
        if kind is not None and data is not None:
            flags = slot | ending << ENDING_SHIFT | int(after) << AFTER_SHIFT
            flags |= kind << REWARD_SHIFT | (DONE if done else 0)
            if data:
                self.block.infos[self.row, : len(data)] = memoryview(data)
                flags |= HAS_INFO
            self._rewards[self.row] = float(reward)
            self._flags[self.row] = flags
            self._replies[self.row] = token
        return sent, resets

    def begin_episode(self, token: int) -> Sequence[Any]:
        """Run the automatic reset after a step and answer it; return messages to send."""
        env, message = self._env, self._message(token)
        try:
            observation, info = env.reset_again()
            slot = self._write(observation, of_reset=True)
            data = self._encoded(info)
            sent = [] if data is not None else [env.reply(message, Op.RESET_DONE, (slot, info))]
        except env.propagated:
            raise
        except BaseException as error:  # as in `step`
            return [env.failure(message, error, "reset")]
        if data is not None:
            flags = slot
            if data:
                self.block.reset_infos[self.row, : len(data)] = memoryview(data)
                flags |= HAS_INFO
            self.block.reset_flags[self.row] = flags
            self.block.resets[self.row] = token
        return [*env.take_notices(message), *sent]

    def _encoded(self, info: Any) -> bytes | None:
        if type(info) is not dict:
            return None
        return self._encoder.encode(info) if info else b""

    def _message(self, token: int) -> Message:
        generation, request_id = request_of(token)
        return Message(Op.STEP, self._env.env_id, generation, request_id, None)


def _reward_kind(reward: Any) -> int | None:
    """Return which of `REWARD_TYPES` a reward is; None if it is no number that is kept exactly."""
    kind = _REWARD_KINDS.get(type(reward))
    if kind is None or (type(reward) is not float and not -_MOST_EXACT < reward < _MOST_EXACT):
        return None
    return kind


class PostedSteps:
    """The posted steps of all envs of a host.

    Args:
        index: which of the manager's hosts it is.
        ring: rings the parent's doorbell.
        timed: say when each step began, because there are time limits.
        spin_s: how long to watch the block before sleeping; 0 never does.
    """

    def __init__(
        self, index: int, ring: Callable[[], None], *, timed: bool, spin_s: float = 0.0
    ) -> None:
        self._index = index
        self._ring = ring
        self._timed = timed
        self._spin_s = self._most_s = spin_s
        self._envs: list[PostedEnv] = []
        self._resets: list[tuple[PostedEnv, int]] = []
        self._seen = 0

    def seat(self, env: PostedEnv) -> None:
        """An env takes its row, in place of the one that had it before."""
        others = [other for other in self._envs if other.row != env.row]
        self._envs = sorted([*others, env], key=lambda each: each.row)
        self._resets = [(other, token) for other, token in self._resets if other.row != env.row]
        block = env.block
        self._posting = items(block.posted)
        self._requests = items(block.requests)
        self._actions = _ActionReader(block, [each.row for each in self._envs])
        self._first, self._end = self._envs[0].row, self._envs[-1].row + 1
        self._dense = self._end - self._first == len(self._envs)

    def leave(self, row: int) -> None:
        """An env is closed, and takes no steps any more."""
        self._envs = [env for env in self._envs if env.row != row]
        self._resets = [(env, token) for env, token in self._resets if env.row != row]
        if self._envs:
            self.seat(self._envs[-1])

    @property
    def is_due(self) -> bool:
        """Whether there is something to do."""
        return bool(self._envs) and (self._posting[self._index] != self._seen or bool(self._resets))

    def spin(self) -> bool:
        """Watch for something to do, for a while; return whether there is.

        How long depends on how it went before: where the parent takes its time, it is not worth it.
        """
        if not self._envs or self._spin_s <= 0.0:
            return False
        posting, index, seen = self._posting, self._index, self._seen
        end = monotonic() + self._spin_s
        while monotonic() < end:
            for _ in range(_SPINS):
                if posting[index] != seen:
                    self._spin_s = self._most_s
                    return True
        self._spin_s = max(self._spin_s / 2, self._most_s / _LEAST_SHARE)
        return False

    def run(self, send: Send, *, asked: bool) -> None:
        """Take the steps that are posted now, then begin the episodes that waited before.

        So resets wait for one more batch of steps at most.

        Args:
            send: sends a message.
            asked: the parent wants a ring when the steps are taken, whatever they came with.
        """
        waiting, self._resets = self._resets, []
        if self._envs and self._posting[self._index] != self._seen:
            self._take_steps(send)
        if asked:
            self._ring()
        if not waiting:
            return
        for env, token in waiting:
            self._begin(env)
            for message in env.begin_episode(token):
                send(message)
        self._rest()
        self._ring()

    def _take_steps(self, send: Send) -> None:
        # Read before the requests: what is posted while these run is seen the next time.
        self._seen = posting = self._posting[self._index]
        each = posting & RING_MASK == RING_EACH
        requests = self._requests[self._first : self._end].tolist()
        if not self._dense:
            requests = [requests[env.row - self._first] for env in self._envs]
        actions = self._actions.read()
        rung = monotonic() if each else 0.0
        tells = self._timed or len(self._envs) > 1
        for env, token, action in zip(self._envs, requests, actions, strict=True):
            if token == env.token:
                continue
            if tells:
                self._begin(env)
            messages, resets = env.step(token, action)
            for message in messages:
                send(message)
            if resets:
                self._resets.append((env, token))
            if each and (now := monotonic()) - rung >= _RING_AT_LEAST_S:
                self._ring()
                rung = now
        if tells:
            self._rest()
        if posting & RING_MASK:
            self._ring()

    def _begin(self, env: PostedEnv) -> None:
        if self._timed:
            env.block.since[self._index] = monotonic()
        env.block.running[self._index] = env.row + 1

    def _rest(self) -> None:
        block = self._envs[0].block
        block.running[self._index] = 0
        if self._timed:
            block.since[self._index] = monotonic()


class _ActionReader:
    """Reads the actions of rows from the block, as private copies.

    Args:
        block: the columns.
        rows: which.
    """

    def __init__(self, block: Block, rows: list[int]) -> None:
        layout = block.plan.actions
        first, end = rows[0], rows[-1] + 1
        self._places = None if end - first == len(rows) else [row - first for row in rows]
        self._columns = [column[first:end] for column in block.actions]
        self._kinds = block.kinds[first:end]
        self._layout = layout
        self._is_number = type(layout.skeleton) is int and layout.leaves[0].is_number

    def read(self) -> list[Any]:
        """Return the action of each row."""
        if self._is_number:
            actions = self._numbers()
        else:
            leaves = [
                [copy[k, ...] for k in range(len(copy))] if not leaf.is_number else list(copy)
                for leaf, copy in zip(self._layout.leaves, map(_copied, self._columns), strict=True)
            ]
            unflatten = self._layout.unflatten
            actions = [unflatten(parts) for parts in zip(*leaves, strict=True)]
        return actions if self._places is None else [actions[place] for place in self._places]

    def _numbers(self) -> list[Any]:
        (column,) = self._columns
        numbers: list[Any] = column.tolist()
        kinds = self._kinds.tobytes()
        if NUMPY_VALUES in kinds:
            typed = column.dtype.type
            return [
                typed(number) if kind == NUMPY_VALUES else number
                for number, kind in zip(numbers, kinds, strict=True)
            ]
        return numbers


def _copied(column: Any) -> Any:
    return column.copy()
