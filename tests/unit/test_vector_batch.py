"""A vector env of gymnasium's kind as a batched env: modes, seeds, infos, and what it cannot do."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete

from envmgr.env import BatchedEnvSpec, EnvContractError, VectorBatch
from envmgr.env.vector_infos import RowInfos
from envmgr.wire.info_columns import columns_of
from envmgr.wire.info_forms import RecordTable, form_of_columns
from tests.values import same_values
from tests.walkers import MODES, OneGenerator, Walker, vector_of

NONE: list[int | None] = [None] * 3


def begun(mode: str = "NextStep", seed: int | None = 4, **options: Any) -> VectorBatch:
    """Return three walkers, whose rows were reset."""
    batch = VectorBatch(vector_of(3, mode), **options)
    batch.reset([0, 1, 2], [None if seed is None else seed + i for i in range(3)], [{}] * 3)
    return batch


def until_one_ends(batch: VectorBatch) -> tuple[int, Any, list[int]]:
    """Step all rows until one ends; return it, its observation, and the others."""
    while True:
        obs, _, terminated, truncated, _ = batch.step([0, 1, 2], [0, 0, 0])
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            row = int(ended[0])
            return row, obs[row].copy(), [i for i in range(3) if i not in ended]


@pytest.mark.parametrize("mode", MODES)
def test_the_terminal_observation_and_the_next_first_one(mode: str) -> None:
    batch = begun(mode)
    row, terminal, others = until_one_ends(batch)
    assert terminal[0] == terminal[1]  # as many steps as were drawn
    is_late = mode == "NextStep"
    assert list(batch.resettable({row: False}, others=True)) == ([] if is_late else [row])
    if is_late:
        assert len(batch.step(others, [1] * len(others))[0]) == len(others)
        assert list(batch.resettable({row: False}, others=True)) == [row]
    (first,), (info,) = batch.reset([row], [None], [{}])
    assert (first[1], first[2]) == (0, -1)
    assert info == {"length": first[0]}


def test_a_seed_or_params_begin_an_episode_of_their_own() -> None:
    for mode in MODES:
        batch = begun(mode)
        row, _, others = until_one_ends(batch)
        if mode == "NextStep":
            batch.step(others, [1] * len(others))
        (first,), _ = batch.reset([row], [77], [{"longer": 50}])
        assert first[0] == np.random.default_rng(77).integers(2, 9) + 50


@pytest.mark.parametrize("mode", MODES)
def test_seeds_and_params_are_for_the_rows_that_they_are_given_for(mode: str) -> None:
    batch = VectorBatch(vector_of(3, mode))
    (first,), _ = batch.reset([1], [None], [{"longer": 50}])
    others, _ = batch.reset([0, 2], [None] * 2, [{}] * 2)
    assert [obs[0] > 50 for obs in (others[0], first, others[1])] == [False, True, False]
    for row in range(3):  # as if all had ended
        batch.leave(row)
    drawn = set()
    for _ in range(8):
        (first,), _ = batch.reset([0], [77], [{"longer": 50}])
        assert first[0] == np.random.default_rng(77).integers(2, 9) + 50
        (other,), _ = batch.reset([1], [None], [{}])
        drawn.add(float(other[0]))
        batch.leave(0)
        batch.leave(1)
    assert max(drawn) < 50
    assert len(drawn) > 1, "it goes on with its own generator"


def test_a_seed_counts_though_the_row_had_it_in_an_episode_that_nobody_has_seen() -> None:
    for seed in range(5, 15):
        batch = VectorBatch(vector_of(3, "NextStep"))
        batch.reset([0, 1], [seed, seed + 1], [{}, {}])  # row 2 is begun with `seed + 2`
        ended = False
        while not ended:  # and begins another one
            _, _, terminated, truncated, _ = batch.step([0, 1, 2], [0, 0, 0])
            ended = bool((terminated | truncated)[2])
        batch.step([0, 1], [0, 0])
        (first,), _ = batch.reset([2], [seed + 2], [{}])
        assert first[0] == np.random.default_rng(seed + 2).integers(2, 9)


def test_rows_that_nobody_has_reset_take_any_action() -> None:
    batch = begun("Disabled")
    row, _, others = until_one_ends(batch)
    for _ in range(30):  # the row ends many times
        obs, *_ = batch.step(others, [2] * len(others))
        assert len(obs) == len(others)
        assert set(obs[:, 2]) == {2.0}
        others = [i for i in others if not batch._ended[i]]
        if not others:
            break
    assert row not in others


def test_a_batch_that_is_reset_in_two_bunches_is_reset_once() -> None:
    env = OneGenerator(4)
    batch = VectorBatch(env)
    early, _ = batch.reset([0, 1], [5, 6], [{}, {}])
    late, infos = batch.reset([2, 3], [7, 8], [{}, {}])
    assert env.calls == [("reset", 5)]
    assert [obs[0] for obs in (*early, *late)] == [0, 1, 2, 3]
    assert infos is not None
    assert infos[1] == {"drawn": late[1][1]}
    batch.step([0, 1, 2, 3], np.zeros(4, np.int64))
    with pytest.raises(EnvContractError, match=r"cannot reset rows \[1\] and leave the others"):
        batch.reset([1], [None], [{}])


def test_seeds_are_given_in_the_form_that_the_env_takes() -> None:
    given: list[Any] = []

    class Noting(OneGenerator):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            given.append(seed)
            return super().reset(seed=seed, options=options)

    for seeds in ([5, 6, 7], [9, 3, 1], NONE):
        VectorBatch(Noting(3)).reset([0, 1, 2], seeds, [{}] * 3)
    VectorBatch(Noting(3)).reset([1, 2], [6, 7], [{}] * 2)  # row 0 is reset with them
    assert given == [5, 9, None, 5]
    listed = begun(seed=None)
    firsts, _ = listed.reset([0, 2], [9, 3], [{}, {}])
    assert [obs[0] for obs in firsts] == [np.random.default_rng(s).integers(2, 9) for s in (9, 3)]


def test_what_is_refused() -> None:
    with pytest.raises(EnvContractError, match=r"should say in metadata\['autoreset_mode'\]"):
        VectorBatch(OneGenerator(2, "Sometimes"))
    with pytest.raises(EnvContractError, match="at once"):
        VectorBatch(OneGenerator(2), at_once=True)
    batch = VectorBatch(OneGenerator(2, "SameStep"))
    batch.reset([0, 1], [None, None], [{}, {}])
    with pytest.raises(EnvContractError, match="says that it begins episodes in the step"):
        batch.step([0, 1], np.array([3, 3]))
    for size in (2, 4):
        with pytest.raises(EnvContractError, match=f"3 rows, but its size is {size}"):
            BatchedEnvSpec(lambda: vector_of(3, "SameStep"), size)()
    with pytest.raises(EnvContractError, match=r"not a BatchedEnv or a gymnasium\.vector"):
        BatchedEnvSpec(Walker, 1)()


class SomeAtATime(OneGenerator):
    """Gives results of two rows at a time, as `AtariVectorEnv` with a batch_size."""

    is_closed = False

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        obs, _ = super().reset(seed=seed, options=options)
        return obs[:2], {}

    def step(self, actions: Any) -> Any:
        obs, rewards, terminated, truncated, _ = super().step(actions)
        return obs[:2], rewards[:2], terminated[:2], truncated[:2], {}

    def close(self) -> None:
        self.is_closed = True


def test_a_vector_env_that_gives_some_rows_at_a_time_is_refused() -> None:
    named = SomeAtATime(4)
    named.batch_size = 2
    with pytest.raises(EnvContractError, match=r"batch_size=2 for 4 rows.*async_subprocess"):
        BatchedEnvSpec(lambda: named, 4)()
    assert named.is_closed
    wrapped = gymnasium.wrappers.vector.ClipReward(named, -1, 2)
    with pytest.raises(EnvContractError, match="batch_size=2"):
        VectorBatch(wrapped)
    silent = VectorBatch(SomeAtATime(4))
    with pytest.raises(EnvContractError, match=r"reset of .* all its 4 rows, it returned 2"):
        silent.reset([0, 1, 2, 3], [None] * 4, [{}] * 4)
    silent.env.reset = super(SomeAtATime, silent.env).reset
    silent.reset([0, 1, 2, 3], [None] * 4, [{}] * 4)
    for rows in ([0, 1, 2, 3], [1, 2]):
        with pytest.raises(EnvContractError, match=r"step of .* all its 4 rows, it returned 2"):
            silent.step(rows, np.zeros(len(rows), np.int64))


def test_a_vector_env_that_lacks_what_others_have_is_refused() -> None:
    class OfAgents(gymnasium.vector.VectorEnv[Any, Any, Any]):
        """Has the spaces of one agent for its own, as the vector envs of SuperSuit."""

        num_envs = 2
        observation_space, action_space = Discrete(3), Discrete(2)

    with pytest.raises(EnvContractError, match="no single_observation_space and no single_action"):
        VectorBatch(OfAgents())


def test_wrappers_and_attributes() -> None:
    wrapped = gymnasium.wrappers.vector.ClipReward(vector_of(2, "SameStep"), -1, 2)
    batch = VectorBatch(wrapped)
    firsts, _ = batch.reset([0, 1], [1, 2], [{}, {}])
    assert firsts[0][1] == 0
    assert batch.step([0, 1], [3, 1])[1].tolist() == [2.0, 1.0]
    batch.set_attribute(1, "colour", "red")
    assert [batch.attribute(row, "colour") for row in (0, 1)] == ["grey", "red"]
    assert batch.attribute(0, "action_space") == Walker.action_space
    batch.set_attribute(1, "fresh", 1)
    assert vars(wrapped.unwrapped.envs[1].unwrapped)["fresh"] == 1  # type: ignore[attr-defined]


# -- infos ----------------------------------------------------------------------------------------


def test_infos_of_rows() -> None:
    infos = {
        "score": np.array([1, 2, 3]),
        "_score": np.array([True, False, True]),
        "deep": {"x": np.array([0.0, 5.0, 0.0]), "_x": np.array([False, True, False])},
        "_deep": np.array([False, True, False]),
        "vector": np.arange(6).reshape(3, 2),
        "_vector": np.array([False, False, True]),
    }
    loss = RowInfos({"loss": np.array(0.5), "names": ["a", "b"]}, [0, 1], 3)  # of all rows
    assert loss[1] == {"loss": np.array(0.5), "names": ["a", "b"]}
    rows = RowInfos(infos, [0, 1, 2], 3)
    assert rows.told == [0, 1, 2]
    assert rows[0] == {"score": 1}
    assert type(rows[0]["score"]) is int
    assert rows[1] == {"deep": {"x": 5.0}}
    assert rows[2]["vector"].tolist() == [4, 5]
    assert not np.shares_memory(rows[2]["vector"], infos["vector"])
    assert RowInfos({k: infos[k] for k in ("deep", "_deep")}, [0, 2], 3).told == []
    assert RowInfos({"lives": np.array([3, 2])}, [0, 1], 2)[0:2] == [{"lives": 3}, {"lives": 2}]
    assert RowInfos({}, [0, 1], 2, instead={1: {"a": 1}}).told == [1]
    hidden = RowInfos(infos, [0, 1], 3, hidden=frozenset(("deep", "vector")), instead={0: {}})
    assert (hidden.told, hidden[0]) == ([], {})
    assert RowInfos(infos, [0, 1], 3, hidden=frozenset(infos), instead={1: {"a": 1}}).told == [1]
    assert RowInfos({"score": infos["score"]}, [0, 1], 3, instead={0: {}}).told == [1]


def random_vector_infos(random: np.random.Generator, n: int) -> dict[str, Any]:
    """Return infos as vector envs give them: numbers, arrays of them, of all rows or of some."""
    dtypes = "?", "i1", "u2", "i4", "u4", "i8", "f2", "f4", "f8"
    infos: dict[str, Any] = {}
    for k in range(random.integers(1, 5)):
        shape = (n, *random.integers(0, 3, random.integers(0, 3)))
        values = (random.normal(size=shape) * 50).astype(random.choice(dtypes))
        infos[f"k{k}"] = values
        if random.random() < 0.6:
            infos[f"_k{k}"] = random.random(n) < random.choice([0.0, 0.5, 1.0])
    if random.random() < 0.3:
        infos["deep"] = {"x": np.arange(n, dtype=np.float32), "_x": np.ones(n, bool)}
        if random.random() < 0.5:
            infos["_deep"] = np.ones(n, bool)
    return infos


@pytest.mark.parametrize("seed", range(40))
def test_infos_as_records_are_those_that_rows_have_one_by_one(seed: int) -> None:
    random, n = np.random.default_rng(seed), 30
    infos = random_vector_infos(random, n)
    rows = RowInfos(infos, range(n), n)
    columns = rows.numbers()
    assert columns is not None
    form = form_of_columns(columns)
    assert form is not None
    records = RecordTable(form, n)
    records.write([(path, values[::-1], None) for path, values, _ in columns], slice(None))
    some = random.permutation(n)[:20]
    records.write(columns, some)
    expected = [rows[row] for row in some]
    batch = records.batch(some.tolist())
    assert same_values(batch.dicts(), expected)
    assert same_values([records.rows[row].info() for row in some], expected)
    assert same_values(batch.columns(), columns_of(expected))
    before = records.table.copy()
    records.write(columns, some[:3])
    assert np.array_equal(records.table, before), "what others have was written over"


@pytest.mark.parametrize(
    "infos",
    [
        {"text": np.array(["a"] * 30)},
        {"object": np.array([None] * 30)},
        {"large": np.full(30, 2**63, np.uint64)},
        {"long": np.zeros(30, np.longdouble)},
        {"of the env": 3},
        {"listed": [0] * 30},
        {"deep": {"x": np.zeros(30)}, "_deep": np.arange(30) < 4},
        {"deep": {"x": np.zeros(30), "_x": np.arange(30) < 4}},
        {"deep": {}},
        {"short": np.zeros(30), "_short": np.ones(29, bool)},
    ],
    ids=lambda infos: next(iter(infos)),
)
def test_infos_that_are_no_columns_of_numbers(infos: dict[str, Any]) -> None:
    assert RowInfos(infos, range(30), 30).numbers() is None
    assert RowInfos({"x": np.zeros(30)}, range(30), 30, instead={1: {}}).numbers() is None
    abnormal = RowInfos({"abnormal": np.zeros(30, bool)}, range(30), 30).numbers()
    assert abnormal is not None
    assert form_of_columns(abnormal) is None
