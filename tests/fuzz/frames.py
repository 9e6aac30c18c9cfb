"""Frames as no worker should send them: damaged on the way, or made up by somebody who knows how.

python -m tests.fuzz.frames 100000
"""

from __future__ import annotations

import logging
import pickletools
import random
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envmgr.core.submit import submit_calls
from envmgr.errors import EnvFailure, EnvManagerError
from envmgr.wire.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, encode, split_frame
from envmgr.wire.messages import Attribute, EnvDescription, FailureKind, Message, Op, RemoteFailure
from tests.fuzz.wire import PIPE_BYTES, WINDOW_S, Wire, Worker

MUTATED_SHARE = 0.3
"""Of the frames of a worker with one env. A new worker of five has to send twenty sound ones."""

FRAMES_PER_WIRE = 1000
SLOWEST_S = 10.0
"""CPU time that one batch of steps may take. Nothing waits here but on the fake clock."""


@dataclass
class FrameReport:
    """What came of mutated frames.

    Attributes:
        n_mutated: frames that were changed or made up.
        by_mutation: how many of each sort.
        n_steps: timesteps that were delivered, abnormal ones included.
        n_abnormal: those of them that stand for actions of envs that failed.
        failures: failures by type.
        slowest_s: the most CPU time that a batch of steps took.
        slowest_seed: of the envs that took it.
        imported: modules that were imported meanwhile.
    """

    n_mutated: int = 0
    by_mutation: Counter[str] = field(default_factory=Counter)
    n_steps: int = 0
    n_abnormal: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest_seed: int = 0
    imported: frozenset[str] = frozenset()


# -- damage: the checksums are what they were -----------------------------------------------------


def flip_bits(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return [bytes(data)]


def truncate(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    return [frame[: rng.randrange(len(frame))]]


def extend(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    return [frame + rng.randbytes(rng.choice((1, 3, HEADER_BYTES, 500)))]


def cut_out(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    begin = rng.randrange(len(frame))
    return [frame[:begin] + frame[begin + rng.randint(1, 40) :]]


def splice(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    other = rng.choice(worker.sent or [frame])
    return [frame[: rng.randrange(len(frame))] + other[rng.randrange(len(other)) :]]


def interleave(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    at = rng.randrange(len(frame))
    return [frame[:at], rng.choice(worker.sent or [frame]), frame[at:]]


def noise(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    return [rng.randbytes(rng.choice((1, 7, HEADER_BYTES, 1000)))]


def text(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    words = (
        b"Segmentation fault\n",
        b"\0\0\0\0",
        b"\1" * 9,
        b"\x80\x05.",
        b"Traceback (most recent",
    )
    return [rng.choice(words), *([frame] if rng.random() < 0.5 else [])]


def oversized(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    return [rng.randbytes(rng.randrange(PIPE_BYTES // 2))]


def wrong_length(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    length = rng.choice((0, 1, len(frame), MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES + 1, 0xFFFFFFFF))
    return [frame[:20] + struct.pack("<I", length) + frame[24:]]


def nothing(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    return []


# -- forgeries: with checksums of their own -------------------------------------------------------


def _seal(header: tuple[int, ...], body: bytes) -> bytes:
    packed = struct.pack("<HBBIIQI", *header)
    return packed + struct.pack("<II", zlib.crc32(packed), zlib.crc32(body)) + body


def _open(frame: bytes) -> tuple[list[int], bytes]:
    return list(struct.unpack_from("<HBBIIQI", frame)), frame[HEADER_BYTES:]


def twice(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    return [frame, frame]


def late(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    return [rng.choice(worker.sent or [frame]), frame]


def other_header(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    header, body = _open(frame)
    which = rng.randrange(7)
    size = (16, 8, 8, 32, 32, 64, 32)[which]
    near = header[which] + rng.choice((-1, 1))
    header[which] = rng.choice((near, rng.getrandbits(size), 0)) % (1 << size)
    return [_seal(tuple(header), body)]


def other_operation(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    header, body = _open(frame)
    header[2] = rng.choice([*Op, 0, 63, 72, 255])
    return [_seal(tuple(header), body)]


def length_of_its_own(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    header, body = _open(frame)
    header[6] = rng.choice((0, 1, len(body) - 1, len(body) + 1, MAX_PAYLOAD_BYTES, 0xFFFFFFFF))
    header[6] = max(header[6], 0)
    return [_seal(tuple(header), body)]


def other_payload(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    parsed = split_frame(frame)
    assert parsed is not None
    message = parsed[0].message()
    payload = message.payload
    if isinstance(payload, tuple) and payload and rng.random() < 0.6:  # one field of it
        fields = list(payload)
        fields[rng.randrange(len(fields))] = _thing(rng)
        payload = type(payload)(*fields) if hasattr(payload, "_fields") else tuple(fields)
    else:
        payload = _thing(rng)
    return [encode(message._replace(payload=payload))]


def other_pickle(rng: random.Random, frame: bytes, worker: Worker) -> list[bytes]:
    """Damage the pickle itself and seal it again, unless it would take all memory there is.

    Who can seal a frame can also send such a pickle: this is what the docs say of workers. (Opcode
    0x96 has CPython complain on stderr.)
    """
    header, body = _open(frame)
    damaged = bytearray(body or b"N.")
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] = rng.choice((rng.getrandbits(8), ord("R"), ord(".")))
    if b"\x96" in damaged or not _is_harmless(bytes(damaged)):
        return [frame]
    header[6] = len(damaged)
    return [_seal(tuple(header), bytes(damaged))]


def _is_harmless(data: bytes) -> bool:
    try:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if isinstance(argument, int) and argument > 10_000 and ("PUT" in name or "GET" in name):
                return False
            if name in ("GLOBAL", "INST"):
                return False
    except Exception:  # where it ends for pickle too
        return True
    return True


class _Ends:
    """Raises something when it is unpickled."""

    def __init__(self, how: type[BaseException]) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return _end, (self.how,)


def _end(how: type[BaseException]) -> None:
    raise how


class Spiteful:
    """Raises whatever is asked of it."""

    def _raise(self, *args: Any) -> Any:
        raise ZeroDivisionError

    __eq__ = __lt__ = __bool__ = __len__ = __iter__ = __str__ = __repr__ = _raise  # type: ignore
    __float__ = __int__ = __index__ = __array__ = __getitem__ = __hash__ = _raise  # type: ignore
    __deepcopy__ = __copy__ = __contains__ = __add__ = __format__ = _raise


class SpitefulDict(dict):  # type: ignore[type-arg]
    """A dict with a will of its own."""

    def _raise(self, *args: Any) -> Any:
        raise ZeroDivisionError

    get = keys = items = __iter__ = __getitem__ = copy = _raise  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return _spiteful, ("abnormal" in self,)


def _spiteful(abnormal: bool) -> SpitefulDict:
    return SpitefulDict(abnormal=True) if abnormal else SpitefulDict(a=1)


def _deep(depth: int) -> Any:
    thing: Any = []
    for _ in range(depth):
        thing = [thing]
    return thing


def _hollow(kind: type) -> Any:
    return kind.__new__(kind)


def _failure(**fields: Any) -> RemoteFailure:
    hollow: RemoteFailure = object.__new__(RemoteFailure)
    hollow.__dict__.update(fields)
    return hollow


_THINGS: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: None,
    lambda rng: rng.choice((True, -1, 0, 99, 1 << 70, -(1 << 400))),
    lambda rng: rng.choice((float("nan"), float("inf"), -0.0, 1e300)),
    lambda rng: rng.choice(("", "x" * 100_000, "\ud800", "\0")),
    lambda rng: rng.randbytes(rng.randrange(2000)),
    lambda rng: [_thing(rng) for _ in range(rng.randrange(4))],
    lambda rng: tuple(_thing(rng) for _ in range(rng.randrange(7))),
    lambda rng: {rng.choice((1, "a", None)): _thing(rng)},
    lambda rng: _deep(200),
    lambda rng: np.zeros(rng.choice(((), (4,), (5,), (0,), (2, 2)))),
    lambda rng: [bytearray(np.full(4, np.nan).data)],
    lambda rng: [bytearray(rng.randrange(65))],
    lambda rng: [np.array([object()] * 4, dtype=object)],
    lambda rng: [np.zeros(4, dtype=rng.choice(("f4", "i8", "M8[s]", "V8", "U3")))],
    lambda rng: Spiteful(),
    lambda rng: SpitefulDict(a=1),
    lambda rng: SpitefulDict(abnormal=True),
    lambda rng: _Ends(rng.choice((SystemExit, GeneratorExit, MemoryError, RecursionError))),
    lambda rng: _Ends(rng.choice((StopIteration, OSError, UnicodeError, AssertionError))),
    lambda rng: EnvDescription(*[_thing(rng) for _ in range(6)]),
    lambda rng: _hollow(RemoteFailure),
    lambda rng: _failure(kind=_thing(rng), during="step", message=_thing(rng)),
    lambda rng: _failure(kind=FailureKind(rng.randrange(6)), during=_thing(rng)),
    lambda rng: RemoteFailure(FailureKind(rng.randrange(6)), "step", "E", "m", "t", _thing(rng)),
    lambda rng: Attribute(rng.choice((True, "no")), _thing(rng)),
    lambda rng: EnvFailure("forged", env_id=0, during="step"),
    lambda rng: Message(Op.STEP, 0, 0, 1, None),
    lambda rng: type,
    lambda rng: _thing,
)


def _thing(rng: random.Random) -> Any:
    return rng.choice(_THINGS)(rng)


DAMAGE = (
    flip_bits,
    truncate,
    extend,
    cut_out,
    splice,
    interleave,
    noise,
    text,
    oversized,
    wrong_length,
    nothing,
)
FORGERIES = (
    twice,
    late,
    other_header,
    other_operation,
    length_of_its_own,
    other_payload,
    other_payload,
    other_payload,
    other_pickle,
)
"""After these, what a worker says may be its own invention; it is never more than that."""


class _Fuzzer:
    def __init__(self, seed: int, report: FrameReport, mutations: Sequence[Any]) -> None:
        self.rng = random.Random(seed)
        self.report = report
        self.mutations = mutations
        self.n_left = 0

    def __call__(self, worker: Worker, frame: bytes) -> Sequence[bytes]:
        rng = self.rng
        if rng.random() > MUTATED_SHARE / len(worker.spec.envs):
            return (frame,)
        mutation = rng.choice(self.mutations)
        pieces: Sequence[bytes] = mutation(rng, frame, worker)
        if list(pieces) == [frame]:
            return pieces
        self.report.n_mutated += 1
        self.report.by_mutation[mutation.__name__] += 1
        if mutation in FORGERIES:
            worker.is_tainted = True
        return pieces


_OF_PYTHON = {"_suggestions", "encodings.raw_unicode_escape"}
"""What formatting a traceback imports, from Python 3.13 on; a codec of texts in pickles."""


def fuzz_frames(n_mutated: int, seed: int = 0) -> FrameReport:
    """Have workers send mutated frames until there were so many.

    Every action gets its timestep, normal or abnormal; what is delivered of a worker that has not
    forged anything is what its env returned; nothing raises but errors of envmgr.

    Raises:
        AssertionError: something of this does not hold; the seed repeats it.
    """
    report = FrameReport()
    modules = frozenset(sys.modules)
    level = logging.getLogger("envmgr").level
    logging.getLogger("envmgr").setLevel(logging.CRITICAL + 1)
    try:
        number = 0
        while report.n_mutated < n_mutated:
            _fuzz_one_wire(seed * 1_000_003 + number, n_mutated, report)
            number += 1
    finally:
        logging.getLogger("envmgr").setLevel(level)
    report.imported = frozenset(sys.modules) - modules - _OF_PYTHON
    return report


def _fuzz_one_wire(seed: int, n_mutated: int, report: FrameReport) -> None:
    rng = random.Random(seed)
    mutations = rng.choice((DAMAGE, FORGERIES, DAMAGE + FORGERIES))
    until = min(report.n_mutated + FRAMES_PER_WIRE, n_mutated)
    wire = Wire(
        rng.choice((1, 2, 3, 5)),
        num_workers=rng.choice((None, 1)),
        shared_memory=rng.choice((False, False, True)),
        mutate=_Fuzzer(seed, report, mutations),
        auto_reset=rng.random() < 0.8,
        reset_inplace=rng.random() < 0.2,
        has_forms=rng.random() < 0.3,
    )
    try:
        number = 0
        while report.n_mutated < until:
            began = time.process_time()
            number = _one_round(rng, wire, number, report)
            took_s = time.process_time() - began
            if took_s > report.slowest_s:
                report.slowest_s, report.slowest_seed = took_s, seed
            assert report.slowest_s < SLOWEST_S
            wire.clock.advance(2 * WINDOW_S)
        report.failures += wire.supervisor.statistics.failures_by_kind
    except EnvManagerError as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    except Exception as error:
        raise AssertionError(f"seed {seed}: not of envmgr: {type(error).__name__}") from error
    finally:
        wire.close()


def _one_round(rng: random.Random, wire: Wire, number: int, report: FrameReport) -> int:
    wire.all_come_back()
    if rng.random() < 0.1:
        _call(rng, wire)
        wire.all_come_back()
    if rng.random() < 0.1:
        wire.supervisor.resets.begin({rng.randrange(len(wire.slots())): None})
        wire.all_come_back()
    served = {i: wire.worker_of(i) for i in range(len(wire.slots()))}
    actions = {i: number + i for i in wire.ready()}
    timesteps = wire.step(actions)
    assert timesteps.keys() == actions.keys()
    for env_id, timestep in timesteps.items():
        report.n_steps += 1
        worker = served[env_id]
        tainted = worker is None or worker.is_tainted
        if tainted:
            continue  # even whether it is abnormal it may have said itself
        if timestep.info.get("abnormal"):
            report.n_abnormal += 1
            assert isinstance(timestep.info["error"], EnvFailure)
            assert (timestep.reward, timestep.done) == (0.0, True)
        else:
            assert timestep.obs[0] == env_id, timestep
            assert timestep.obs[3] == actions[env_id], timestep
            assert timestep.reward == actions[env_id], timestep
    assert wire.supervisor.statistics.outstanding == 0
    return number + len(served)


def _call(rng: random.Random, wire: Wire) -> None:
    op, payload = rng.choice(
        (
            (Op.CALL, ("colour", ())),
            (Op.GET_ATTR, "n_steps"),
            (Op.SET_ATTR, ("shade", 1)),
            (Op.GET_ATTR, "nothing"),
        )
    )
    slots = [slot for slot in wire.slots() if slot.is_callable]
    submit_calls(wire.supervisor.hosts, slots, op, [payload] * len(slots), "it")


def main() -> None:
    """Run the long form and print what came of it."""
    n_mutated = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began = time.monotonic()
    report = fuzz_frames(n_mutated, seed)
    print(f"{report.n_mutated} mutated frames in {time.monotonic() - began:.0f} s: no exception")
    print(f"  by mutation: {dict(report.by_mutation)}")
    print(f"  timesteps: {report.n_steps}; failures: {dict(report.failures)}")
    slowest = f"{report.slowest_s:.3f} s of CPU time (seed {report.slowest_seed})"
    print(f"  the longest batch of steps took {slowest}")
    print(f"  modules imported meanwhile: {sorted(report.imported) or 'none'}")
    sys.exit(bool(report.imported))


if __name__ == "__main__":
    from tests.fuzz import frames  # so that what it pickles has a module

    frames.main()
