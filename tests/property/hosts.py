"""Hosts that do what a test says, when it says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from envmgr.transport.base import Arrival, Garbage, HostDied
from envmgr.wire.messages import FailureKind, Message, Op
from tests.fake_hosts import OTHER_SPACES, FakeHost, HostedEnv
from tests.fakes import FakeTransport


class PlayedHosts:
    """All hosts of a transport. Give it as the transport's `answer`.

    Args:
        transport: theirs.
    """

    def __init__(self, transport: FakeTransport) -> None:
        self.transport = transport

    def __call__(self, host: FakeHost, message: Message) -> Iterable[tuple[float, Arrival]]:
        """Take a request; the answer comes when the test says so."""
        if message.op == Op.HELLO:
            hosts = self.transport.hosts.values()
            others = [h for h in hosts if h is not host and _may_write_where(host, h, message)]
            assert all(h.ended for h in others), f"{host} shares its memory with {others}"
        return [(0.0, arrival) for arrival in host.env_for(message).take(message)]

    def envs(self) -> list[HostedEnv]:
        """Return the envs of all hosts that ever were."""
        return [env for host in self.transport.hosts.values() for env in host.envs.values()]

    def alive(self) -> list[HostedEnv]:
        """Return the envs of hosts that live and were not killed."""
        return [env for env in self.envs() if env.is_alive]

    def busy(self) -> list[HostedEnv]:
        """Return those of them that may reply now: hosts run one at a time."""
        return [env for env in self.alive() if env.requests and self._may_run(env)]

    def _may_run(self, env: HostedEnv) -> bool:
        mates = env.host.envs.values()
        building = [m for m in mates if m.request is not None and m.request.op == Op.HELLO]
        begun = [m for m in mates if m.has_begun]
        first = begun[:1] or building[:1]  # a new host builds its envs in order
        return not first or first[0] is env

    def killed(self) -> list[HostedEnv]:
        """Return the killed hosts whose death is not on its way yet, one env of each."""
        found = {env.host.host_id: env for env in self.envs() if env.host.killed}
        return [env for env in found.values() if not env.host.ended]

    def of(self, key: tuple[int, int]) -> HostedEnv:
        """Return an env of a host."""
        host_id, env_id = key
        return self.transport.hosts[host_id].envs[env_id]

    # -- what a host does -------------------------------------------------------------------

    def begin(self, env: HostedEnv, after_s: float = 0.0) -> None:
        """Say that the host begins with what it was asked for this env, if it has to."""
        self._arrive(env, env.begin(), after_s)

    def reply(self, env: HostedEnv, *, after_s: float = 0.0, **how: Any) -> None:
        """Answer what a host was asked, as it should; see `HostedEnv.reply`."""
        self._arrive(env, env.reply(**how), after_s)

    def fail(self, env: HostedEnv, kind: FailureKind, after_s: float = 0.0) -> None:
        """Answer with a failure that fits what a host was asked."""
        self._arrive(env, env.fail(kind), after_s)

    def other_spaces(self, env: HostedEnv) -> None:
        """Say HELLO with other spaces than before."""
        self._arrive(env, env.reply(described=OTHER_SPACES))

    def malformed(self, env: HostedEnv) -> None:
        """Answer with the right reply, but nothing sensible in it."""
        self._arrive(env, env.malformed())

    def die(self, env: HostedEnv, exit_status: int | None, after_s: float = 0.0) -> None:
        """End."""
        self._arrive(env, [HostDied(exit_status)], after_s)

    def garbage(self, env: HostedEnv) -> None:
        """Send what is no message."""
        self._arrive(env, [Garbage("noise")])

    def foreign(self, env: HostedEnv, message: Message) -> None:
        """Send a message that answers nothing that was asked."""
        self.transport.arrive(env.host.host_id, message, foreign=True)

    def _arrive(self, env: HostedEnv, arrivals: Iterable[Arrival], after_s: float = 0.0) -> None:
        for arrival in arrivals:
            self.transport.arrive(env.host.host_id, arrival, after_s)


def _may_write_where(new: FakeHost, other: FakeHost, hello: Message) -> bool:
    """Whether a host, as long as it lives, may write where a new one will.

    Its rows of the block are those of its index. Observations of an env are written by who steps
    and resets it: no longer by a host that was told to close, which a spare may have relieved.
    """
    same_rows = other.spec.index == new.spec.index
    return same_rows or (hello.env_id in other.env_ids and not other.requests(Op.CLOSE))
