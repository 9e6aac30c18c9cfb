"""TRL's own trainer, with rollouts in envs of a manager.

Its model is tiny and initialised at random, and says what it is told to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

from envmgr import make
from envmgr.adapters.trl import as_trl, tool_env
from tests.tool_envs import Counter

TAGS = [
    "<|im_start|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]


def tokenizer() -> Any:
    """A tokenizer of single bytes, with the chat template of a model that calls tools."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    made = PreTrainedTokenizerFast(tokenizer_object=plain, **special)
    made.add_tokens(TAGS)
    templates = Path(trl.__file__).parent / "chat_templates"
    made.chat_template = (templates / "qwen3.jinja").read_text()
    return made


def model(vocabulary: int) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


def call(step: Any, tool: str = "increment") -> str:
    arguments = f'{{"name": "{tool}", "arguments": {{"step": {step}}}}}'
    return f"<tool_call>\n{arguments}\n</tool_call><|im_end|>"


class Training:
    """Trains on groups of rollouts, in which the model says what it is told.

    Args:
        folder: for the trainer.
        factory: the environment factory.
        says: for each rollout of a group, what the model says in its turns.
        rows: the data set.
    """

    def __init__(
        self, folder: Path, factory: Any, says: list[list[str]], rows: list[dict[str, Any]]
    ) -> None:
        self._tokenizer = tokenizer()
        self._says = says
        self.rewards: list[list[float]] = []
        arguments = GRPOConfig(
            output_dir=str(folder),
            learning_rate=0.1,
            per_device_train_batch_size=len(says),
            num_generations=len(says),
            max_completion_length=400,
            max_steps=2,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            shuffle_dataset=False,
            disable_tqdm=True,
            save_strategy="no",
        )
        prompt = [{"role": "user", "content": "Count."}]
        self.trainer = GRPOTrainer(
            model=model(len(self._tokenizer)),
            args=arguments,
            processing_class=self._tokenizer,
            train_dataset=Dataset.from_list([{"prompt": prompt, **row} for row in rows]),
            environment_factory=factory,
        )

    def run(self) -> None:
        scored = self.trainer._calculate_rewards

        def note(*args: Any, **kwargs: Any) -> Any:
            rewards = scored(*args, **kwargs)
            self.rewards.append(rewards[:, 0].tolist())
            return rewards

        with (
            patch.object(self.trainer.model, "generate", side_effect=self._generate),
            patch.object(self.trainer, "_calculate_rewards", side_effect=note),
        ):
            self.trainer.train()

    def _generate(self, input_ids: Any, **kwargs: Any) -> Any:
        """Say for each prompt what comes after as many turns as it has."""
        said = []
        for k, ids in enumerate(input_ids):
            turn = self._tokenizer.decode(ids).count("<tool_response>")
            line = self._of(k, turn, len(input_ids))
            said.append(self._tokenizer(line, return_tensors="pt").input_ids[0])
        longest = max(len(ids) for ids in said)
        pad = self._tokenizer.pad_token_id
        rows = [torch.nn.functional.pad(ids, (0, longest - len(ids)), value=pad) for ids in said]
        return torch.cat([input_ids, torch.stack(rows)], dim=-1)

    def _of(self, k: int, turn: int, n_prompts: int) -> str:
        """Return what the k-th of those says that are asked in this turn."""
        asked = [says for says in self._says if len(says) > turn]
        assert len(asked) == n_prompts
        return asked[k][turn]


@pytest.fixture
def manager() -> Iterator[Any]:
    keys: dict[str, Any] = {"step_timeout": 2.0, "reset_timeout": 1.0, "max_failures": 1000}
    with make(tool_env(Counter), env_num=4, max_failures_total=1000, **keys) as manager:
        yield manager


DONE = "Done!<|im_end|>"


def test_the_trainer_learns_from_rollouts_and_leaves_out_those_whose_env_died(
    manager: Any, tmp_path: Path
) -> None:
    says = [
        [call(4), DONE],
        [call(2), call(1), DONE],
        [call(666), DONE],  # its worker ends
        [call(-1), DONE],  # is told that this was wrong
    ]
    training = Training(tmp_path, as_trl(manager, [Counter.increment]), says, [{"goal": 4}] * 2)
    before = {n: p.clone() for n, p in training.trainer.model.named_parameters()}
    training.run()
    for rewards in training.rewards:
        assert rewards[:2] == [1.0, 0.75]
        assert math.isnan(rewards[2])
        assert rewards[3] == 0.0
    assert len(training.rewards) == 2
    log = training.trainer.state.log_history[0]
    assert log["rewards/Counter/mean"] == pytest.approx(1.75 / 3)
    assert log["tools/call_frequency"] == pytest.approx(5 / 4)
    assert log["tools/failure_frequency"] == pytest.approx(2 / 5)
    assert any(not torch.equal(p, before[n]) for n, p in training.trainer.model.named_parameters())


def test_a_reset_that_hangs_does_not_stop_the_trainer(manager: Any, tmp_path: Path) -> None:
    rows = [{"goal": 1, "trouble": "hang"}, {"goal": 1, "trouble": "none"}]
    says = [[call(1), DONE]] * 4
    training = Training(tmp_path, as_trl(manager, [Counter.increment]), says, rows)
    training.run()
    assert all(map(math.isnan, training.rewards[0]))
    assert training.rewards[1] == [1.0] * 4


def test_the_model_is_told_of_a_tool_what_its_method_says(manager: Any) -> None:
    env = as_trl(manager, [Counter.increment, Counter.decrement])()
    for tool in (env.increment, env.decrement):
        schema = get_json_schema(tool)["function"]
        assert schema == get_json_schema(getattr(Counter(), tool.__name__))["function"]
        assert schema["parameters"]["properties"]["step"]["type"] == "integer"
