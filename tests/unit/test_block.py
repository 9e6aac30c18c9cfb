"""Where the columns of the shared block are, and what tokens say."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Tuple
from hypothesis import given
from hypothesis import strategies as st

from envmgr.spaces import codec_of
from envmgr.wire.block import (
    MAX_REQUEST_ID,
    Block,
    BlockPlan,
    aligned,
    posting_of,
    request_of,
    token_of,
)

SPACES = (
    Discrete(3),
    Box(-1, 1, (), np.float32),
    Box(0, 255, (0,), np.uint8),
    Dict({"a": MultiBinary(5), "b": Tuple((Discrete(2), Box(0, 1, (3, 7), np.float64)))}),
)
plans = st.builds(
    lambda n, n_hosts, space: BlockPlan(n, n_hosts, codec_of(space).layout),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(SPACES),
)


def columns_of(block: Block) -> list[Any]:
    named = [value for value in vars(block).values() if isinstance(value, np.ndarray)]
    return [*named, *block.actions]


def address(column: Any) -> int:
    return int(column.__array_interface__["data"][0])


@given(plans)
def test_columns_neither_overlap_nor_leave_the_memory(plan: BlockPlan) -> None:
    memory = bytearray(plan.nbytes + 64)
    begin = address(np.frombuffer(memory, np.uint8))
    ends = begin
    block = Block(memory, plan)
    for column in sorted(columns_of(block), key=lambda c: (address(c), c.nbytes)):
        assert address(column) >= ends
        assert (address(column) - begin) % 64 == 0
        ends = address(column) + column.nbytes
    assert ends <= begin + plan.nbytes


@given(plans)
def test_two_views_of_a_memory_are_the_same_columns(plan: BlockPlan) -> None:
    memory = bytearray(plan.nbytes)
    one, other = Block(memory, plan), Block(memory, plan)
    for k, (mine, theirs) in enumerate(zip(columns_of(one), columns_of(other), strict=True)):
        mine[...] = k % 2 + 1
        assert (mine == theirs).all()
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    for k, column in enumerate(columns_of(other)):
        assert (column == k % 2 + 1).all()  # those written later are elsewhere


@given(st.integers(0, 1 << 20), st.integers(0, MAX_REQUEST_ID))
def test_tokens_say_which_request_of_which_generation(generation: int, request_id: int) -> None:
    token = token_of(generation, request_id)
    assert 0 <= token < 1 << 60
    assert request_of(token) == (generation % (1 << 16), request_id)
    assert token == token_of(generation, 0) + request_id  # as they are made for many envs


@given(st.integers(1, MAX_REQUEST_ID - 1), st.integers(0, 3), st.integers(0, 3))
def test_every_posting_is_another(request_id: int, ring: int, other_ring: int) -> None:
    assert posting_of(request_id, ring) != posting_of(request_id + 1, other_ring)
    assert posting_of(request_id, ring) & 3 == ring


@given(st.integers(0, 10_000))
def test_alignment(nbytes: int) -> None:
    assert aligned(nbytes) % 64 == 0
    assert 0 <= aligned(nbytes) - nbytes < 64
