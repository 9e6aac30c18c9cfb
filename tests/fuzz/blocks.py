"""The shared block as no worker should write it: any word of it may be anything.

python -m tests.fuzz.blocks 100000
"""

from __future__ import annotations

import logging
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import msgpack
from msgspec.msgpack import Ext

from envmgr.errors import EnvFailure
from envmgr.spaces import ValueMismatchError
from envmgr.wire.block import DONE, HAS_INFO, INFO_BYTES, Block
from envmgr.wire.info_forms import form_of
from envmgr.wire.infos import InfoDecoder, InfoEncoder
from tests.fuzz.wire import WINDOW_S, Wire, Worker

MUTATED_SHARE = 0.4
WORDS_PER_WIRE = 500
SLOWEST_S = 10.0
MOST_IN_VAIN = 1_000
"""After so many rounds in which nothing was written, nothing more will be."""


@dataclass
class BlockReport:
    """What came of words that were written into the block.

    Attributes:
        n_mutated: how many.
        by_column: in which columns.
        n_steps: timesteps that were delivered, abnormal ones included.
        failures: failures by type.
        n_handed_out: batches of arrays that were handed out in C.
        slowest_s: the most CPU time that a batch of steps took.
    """

    n_mutated: int = 0
    by_column: Counter[str] = field(default_factory=Counter)
    n_steps: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    n_handed_out: int = 0
    slowest_s: float = 0.0


TEXTS = "texts"
COLUMNS = (
    TEXTS,
    TEXTS,
    "replies",
    "resets",
    "requests",
    "flags",
    "flags",
    "flags",
    "reset_flags",
    "rewards",
    "wide_rewards",
    "infos",
    "infos",
    "reset_infos",
    "info_forms",
    "reset_info_forms",
    "kinds",
    "running",
    "since",
    "posted",
    "sleeping",
)


class _Scribbler:
    """Writes into columns behind a worker's back, after its steps."""

    def __init__(self, seed: int, report: BlockReport) -> None:
        self.rng = random.Random(seed)
        self.report = report

    def __call__(self, block: Block, texts: Sequence[Any]) -> None:
        rng = self.rng
        while rng.random() < MUTATED_SHARE:
            name = rng.choice(COLUMNS)
            if name == TEXTS:
                if texts:
                    self._write_text(rng.choice(texts))
                continue
            column: Any = getattr(block, name)
            if name == "wide_rewards":
                column = column.reshape(-1)
            row = rng.randrange(len(column))
            if column.ndim == 2:
                data = np.frombuffer(info_bytes(rng), np.uint8)
                column[row, : len(data)] = data
                if rng.random() < 0.5:
                    self._scribble_record(block, name, row)
                if name == "infos" and rng.random() < 0.8:
                    block.flags[row] |= HAS_INFO
            else:
                column[row] = self._word(column, row)
            self.report.n_mutated += 1
            self.report.by_column[name] += 1

    def _scribble_record(self, block: Block, name: str, row: int) -> None:
        """Have an info be read as a record, whose presence may be right."""
        rng, record = self.rng, getattr(block, name)[row]
        forms = block.info_forms if name == "infos" else block.reset_info_forms
        number = rng.randrange(len(FORMS) + 2)
        forms[row] = number
        if rng.random() < 0.8:
            record[:8] = np.frombuffer(rng.randrange(1 << 8).to_bytes(8, "little"), np.uint8)
        if rng.random() < 0.8:
            record[8:] &= 1
        if rng.random() < 0.5:
            block.flags[:] |= np.uint16(HAS_INFO)
            forms[:] = number

    def _write_text(self, texts: Any) -> None:
        for row in range(texts.shape[1]):
            text = texts[self.rng.randrange(len(texts)), row]
            data = np.frombuffer(text_bytes(self.rng, len(text)), np.uint8)
            text[: len(data)] = data
        self.report.n_mutated += 1
        self.report.by_column[TEXTS] += 1

    def _word(self, column: Any, row: int) -> Any:
        rng, dtype = self.rng, column.dtype
        raw = int.from_bytes(column[row : row + 1].tobytes(), "little")
        bits = 8 * dtype.itemsize
        changed = rng.choice(
            (
                raw ^ 1 << rng.randrange(bits),
                raw + rng.choice((-1, 1)),
                rng.getrandbits(bits),
                0,
                (1 << bits) - 1,
                raw | DONE,
                int.from_bytes(column[rng.randrange(len(column)) :][:1].tobytes(), "little"),
            )
        )
        return np.frombuffer((changed % (1 << bits)).to_bytes(bits // 8, "little"), dtype)[0]


FORMS = tuple(
    form
    for info in (
        {"a": 1.5, "b": {"c": "text", "d": np.arange(3)}, "e": True, "f": None},
        {"a": np.bool_(True), "m": np.array([True, False]), "n": 7, "t": "text"},
        {"abnormal words": "", "terminated": True, "truncated": 1, "in": {"in": {"e": {}}}},
    )
    if (form := form_of(info)) is not None
)
"""What infos may be read as besides what they are."""

_DTYPES = (
    b"<f8",
    b"<f4",
    b"|O8",
    b"<f99",
    b"<U9",
    b"|V8",
    b">i2",
    b"<M8",
    b"<f1",
    b"<i3",
    b"",
    b"\xff",
)
_SHAPES = (
    *(b"", b"2", b"-1", b"2,2", b"99999999", b";;", b"x", b"4294967296,4294967296"),
    *(b"99999999999999999999", b"0,99999999999999", b"9223372036854775807,2"),
)
_KEYS: tuple[Any, ...] = ("a", "b", "", "abnormal", "terminated", "error", "x" * 50, 1, None, (1,))


def _made_up(rng: random.Random, depth: int = 0) -> Any:
    """Return a value that MessagePack holds, whether or not it could be (part of) an info."""
    sort = rng.randrange(5)
    if sort == 0 and depth < 3:
        return {rng.choice(_KEYS): _made_up(rng, depth + 1) for _ in range(rng.randrange(4))}
    if sort == 1 and depth < 3:
        return [_made_up(rng, depth + 1) for _ in range(rng.randrange(4))]
    if sort == 2:
        return rng.choice((None, True, 3, -1, 1 << 63, 1.5, "x", b"x"))
    parts = rng.choice(_DTYPES), rng.choice(_SHAPES), rng.randbytes(8 * rng.randrange(4))
    return Ext(rng.choice((1, 1, 2, 2, 0, 3, -1)), b";".join(parts))


def info_bytes(rng: random.Random) -> bytes:
    """Return bytes of an info that is damaged, or made up."""
    sort = rng.randrange(5)
    if sort == 0:
        return rng.randbytes(INFO_BYTES)
    sound = InfoEncoder(INFO_BYTES).encode({"a": 1.5, "b": {"c": "text", "d": np.arange(3)}})
    assert sound is not None
    if sort == 1:
        data = bytearray(sound)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.getrandbits(8)
        return bytes(data)
    if sort == 2:
        return _framed(rng.choice((b"\x91", b"\x81\xa1x")) * rng.choice((10, 100)), rng)
    value = _made_up(rng) if sort == 3 else {"a": _made_up(rng), "b": {"c": _made_up(rng)}}
    return _framed(msgpack.encode(value), rng)


def text_bytes(rng: random.Random, nbytes: int) -> bytes:
    """Return bytes of a text that is damaged, or made up, or sound."""
    data = rng.choice(
        (rng.randbytes(rng.randrange(9)), "ü€\ud800".encode("utf-8", "surrogatepass"))
    )
    data = data[: rng.randrange(len(data) + 1)]
    lengths = (len(data), len(data), len(data) + 1, nbytes - 4, nbytes - 3, 0, rng.getrandbits(32))
    return struct.pack("<I", rng.choice(lengths)) + data


def _framed(packed: bytes, rng: random.Random) -> bytes:
    length = len(packed)
    if rng.random() < 0.2:
        length = rng.choice((0, 1, 0xFFFF, length + 1, max(length - 1, 0)))
    return (struct.pack("<H", length) + packed)[:INFO_BYTES]


def fuzz_infos(n: int, seed: int = 0) -> Counter[str]:
    """Decode infos that are damaged or made up; each is a dict, or is refused.

    Returns:
        How many were which.
    """
    rng = random.Random(seed)
    decoder = InfoDecoder()
    outcomes: Counter[str] = Counter()
    for _ in range(n):
        data = info_bytes(rng).ljust(INFO_BYTES, b"\0")
        try:
            info = decoder.decode(data)
        except ValueMismatchError:
            outcomes["refused"] += 1
        else:
            assert type(info) is dict
            outcomes["decoded"] += 1
    return outcomes


def fuzz_block(n_mutated: int, seed: int = 0) -> BlockReport:
    """Write random words into the block while envs are stepped.

    Every action gets one timestep, normal or abnormal, and nothing raises.

    Raises:
        AssertionError: something of this does not hold; the seed repeats it.
    """
    report = BlockReport()
    level = logging.getLogger("envmgr").level
    logging.getLogger("envmgr").setLevel(logging.CRITICAL + 1)
    try:
        number = 0
        while report.n_mutated < n_mutated:
            _fuzz_one_wire(seed * 1_000_003 + number, n_mutated, report)
            number += 1
    finally:
        logging.getLogger("envmgr").setLevel(level)
    return report


def _fuzz_one_wire(seed: int, n_mutated: int, report: BlockReport) -> None:
    rng = random.Random(seed)
    until = min(report.n_mutated + WORDS_PER_WIRE, n_mutated)
    wire = Wire(
        rng.choice((1, 2, 3, 5)),
        num_workers=rng.choice((None, 1, 1)),
        shared_memory=True,
        mutate=_as_it_is,
        auto_reset=rng.random() < 0.8,
        reset_inplace=rng.random() < 0.2,
        has_forms=rng.random() < 0.3,
        has_texts=seed % 2 == 0,
    )
    assert wire.supervisor.submitter.posts
    wire.know_forms(FORMS)
    wire.scribble = _Scribbler(seed, report)
    as_arrays = rng.random() < 0.5
    try:
        number, in_vain = 0, 0
        # An untrue word may have an env wait for a new worker that its neighbours do not want, and
        # nothing more be posted: then the next wire has its turn.
        while report.n_mutated < until and in_vain < MOST_IN_VAIN:
            before = report.n_mutated
            began = time.process_time()
            number = _one_round(wire, number, report, as_arrays=as_arrays)
            report.slowest_s = max(report.slowest_s, time.process_time() - began)
            assert report.slowest_s < SLOWEST_S
            in_vain = in_vain + 1 if report.n_mutated == before else 0
            wire.clock.advance(2 * WINDOW_S)
        report.failures += wire.supervisor.statistics.failures_by_kind
        report.n_handed_out += wire.n_handed_out
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    finally:
        wire.close()


def _as_it_is(worker: Worker, frame: bytes) -> Sequence[bytes]:
    return (frame,)


def _one_round(wire: Wire, number: int, report: BlockReport, *, as_arrays: bool) -> int:
    wire.all_come_back()
    actions = {i: number + i for i in wire.ready()}
    timesteps = wire.step(actions, as_arrays=as_arrays)
    assert timesteps.keys() == actions.keys()
    for env_id, timestep in timesteps.items():
        report.n_steps += 1
        assert timestep.obs.shape == (4,)
        assert timestep.obs.dtype == np.float64
        assert isinstance(timestep.info, dict)
        if timestep.info.get("abnormal"):
            error = timestep.info.get("error")
            assert error is None or isinstance(error, (EnvFailure, int, float, str)), env_id
    assert wire.supervisor.statistics.outstanding == 0
    return number + len(actions)


def main() -> None:
    """Run the long form and print what came of it."""
    n_mutated = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began = time.monotonic()
    report = fuzz_block(n_mutated, seed)
    print(f"{report.n_mutated} mutated words in {time.monotonic() - began:.0f} s: no exception")
    print(f"  by column: {dict(report.by_column)}")
    print(f"  timesteps: {report.n_steps}; failures: {dict(report.failures)}")
    print(f"  the longest batch of steps took {report.slowest_s:.3f} s of CPU time")
    print(f"  infos: {dict(fuzz_infos(n_mutated, seed))}")


if __name__ == "__main__":
    main()
