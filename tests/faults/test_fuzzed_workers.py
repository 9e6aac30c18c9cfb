"""What workers send, and write into the block, may be anything: the short forms of the fuzzers.

F12 and F9, and what else there is between them: no exception, no hang, no import, one timestep for
each action. The long forms are `python -m tests.fuzz.frames` and `python -m tests.fuzz.blocks`.
"""

from __future__ import annotations

import os

import pytest

from envmgr.hot import hot
from envmgr.wire.block import block_is_possible
from tests.fuzz.blocks import COLUMNS, fuzz_block, fuzz_infos
from tests.fuzz.frames import DAMAGE, FORGERIES, fuzz_frames


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs pipes that grow")
@pytest.mark.parametrize("seed", [13, 17, 23])  # in parts, none of which takes long
def test_mutated_frames_fail_their_env_and_nothing_else(seed: int) -> None:
    report = fuzz_frames(1000, seed)
    assert report.n_mutated >= 1000
    assert set(report.by_mutation) == {m.__name__ for m in DAMAGE + FORGERIES}
    assert not report.imported
    assert report.failures["EnvProtocolError"] > 100
    assert report.failures["EnvTimeout"] > 10
    assert set(report.failures) <= {"EnvProtocolError", "EnvTimeout", "EnvCrash", "EnvRaised"} | {
        "EnvReportedAbnormal"
    }


@pytest.mark.skipif(not block_is_possible(), reason="no block on this platform")
@pytest.mark.parametrize("seed", [7, 11, 13])
def test_random_words_in_the_block_fail_envs_and_nothing_else(seed: int) -> None:
    report = fuzz_block(1400, seed)
    assert report.n_mutated >= 1400
    assert report.by_column.keys() == set(COLUMNS)
    assert report.failures["EnvProtocolError"] > 35
    assert set(report.failures) <= {"EnvProtocolError", "EnvTimeout"}
    assert report.n_handed_out > 0 or hot is None  # by C, as arrays


def test_infos_in_the_block_are_decoded_or_refused() -> None:
    outcomes = fuzz_infos(4000, seed=7)
    assert outcomes["refused"] > 2000
    assert outcomes["decoded"] > 50
