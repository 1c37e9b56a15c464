"""The reward of a reward model: tokens or text, batches, one model in memory, what goes wrong."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.chat_templates import templated
from support.reward_helpers import task
from support.toys import toy_checkpoint, toy_model, toy_tokenizer
from transformers import AutoModelForSequenceClassification

from rollmill.cli import main
from rollmill.data import encode_demonstration, encode_prompt
from rollmill.errors import ModelError, RewardError
from rollmill.models.classifier import save_classifier
from rollmill.rewards import build_reward_manager
from rollmill.rewards.builtin import model as model_module
from rollmill.rewards.builtin.exact import ExactReward
from rollmill.rewards.builtin.model import ModelReward
from rollmill.trainer.reward_trainer import ScoringNetwork
from rollmill.types import Completion, Message, StopReason, Task

WORDS = ["12", "the answer is 12", "how many apples", "are there?", "12 apples 12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "model"
    return written(path)


def written(path: Path, *, end_is_padding: bool = False) -> Path:
    tokenizer = toy_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token if end_is_padding else tokenizer.pad_token
    policy = toy_model("qwen3", len(tokenizer))
    scored = ScoringNetwork(policy)
    torch.nn.init.normal_(scored.head.weight, generator=torch.Generator().manual_seed(1))
    end: int = tokenizer.eos_token_id
    save_classifier(policy, scored.network, scored.head, tokenizer, path, end_id=end)
    return path


def reward(path: Path, **keys: Any) -> ModelReward:
    return ModelReward(name="model", path=path, **keys)


def completions(tokenizer: Any, texts: Sequence[str] = WORDS, ended: bool = True) -> list[Completion]:
    """Of the prompt of `task`, in a tokenizer's tokens."""
    prompt = np.array(tokenizer.encode("question"), np.int32)
    found = []
    for index, text in enumerate(texts):
        ids = np.array([*tokenizer.encode(text), *([tokenizer.eos_token_id] if ended else [])], np.int32)
        zeros, reason = np.zeros(len(ids), np.float32), StopReason.EOS if ended else StopReason.LENGTH
        found.append(Completion(prompt, ids, zeros, ids, zeros, text, reason, seed=0, index=index))
    return found


def plain(path: Path, sequences: Sequence[Sequence[int]]) -> list[float]:
    """By transformers alone, one sequence at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([list(ids)])).logits) for ids in sequences]


def group(configs: list[Any], found: list[Completion], tokenizer: Any) -> list[Any]:
    with build_reward_manager(configs, tokenizer=tokenizer, device="cpu") as judge:
        return asyncio.run(judge.score_group(task("12"), found))


@pytest.mark.parametrize("batch_tokens", [1, 30, 8192])
def test_scores_are_those_of_the_tokens(folder: Path, batch_tokens: int) -> None:
    tokenizer = toy_tokenizer()
    found = completions(tokenizer)
    found[1].text = "another text"  # tokens are the truth
    judged = group([reward(folder, batch_tokens=batch_tokens, weight=0.5)], found, tokenizer)
    expected = plain(folder, [[*each.prompt_ids, *each.token_ids] for each in found])
    assert [each.parts["model"] for each in judged] == pytest.approx(expected, abs=1e-4, rel=1e-5)
    assert [each.reward for each in judged] == pytest.approx([value / 2 for value in expected], abs=1e-4)


def test_another_vocabulary_reads_the_text(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = toy_tokenizer()
    with caplog.at_level(logging.WARNING):
        for ended in (True, False):
            found = completions(toy_tokenizer("char"), ended=ended)
            judged = group([reward(folder), reward(folder)], found, toy_tokenizer("char"))
            end = [own.eos_token_id] if ended else []
            expected = plain(folder, [[*own.encode("question"), *own.encode(text), *end] for text in WORDS])
            assert [each.parts["model#2"] for each in judged] == pytest.approx(expected, abs=1e-4, rel=1e-5)
            gc.collect()
    said = [record.message for record in caplog.records if "reads completions as text" in record.message]
    assert len(said) == 2  # once per model in memory


@pytest.mark.parametrize("shared", [True, False])
def test_reasoning_is_no_part_of_what_is_scored(folder: Path, shared: bool) -> None:
    own, tokenizer = toy_tokenizer(), toy_tokenizer() if shared else toy_tokenizer("char")
    found = completions(
        tokenizer, ["<think>how many</think>12 apples", "how many</think>12 apples", "<think>12 apples"]
    )
    judged = group([reward(folder)], found, tokenizer)
    end = own.eos_token_id
    answer = [*own.encode("question"), *own.encode("12 apples", add_special_tokens=False), end]
    expected = plain(folder, [answer, answer, [*own.encode("question"), end]])
    assert [each.reward for each in judged] == pytest.approx(expected, abs=1e-4, rel=1e-5)
    assert [each.outcomes["model"] for each in judged] == ["ok", "ok", "no_answer"]


def test_reasoning_that_the_prompt_has_opened_is_closed(folder: Path) -> None:
    tokenizer = toy_tokenizer()
    [opened] = completions(tokenizer, ["how many</think>12 apples"])
    opened.prompt_ids = np.array(tokenizer.encode("question <think>\n"), np.int32)
    [judged] = group([reward(folder)], [opened], tokenizer)
    answer = tokenizer.encode("</think>\n\n12 apples", add_special_tokens=False)
    [expected] = plain(folder, [[*opened.prompt_ids, *answer, tokenizer.eos_token_id]])
    assert judged.reward == pytest.approx(expected, abs=1e-4, rel=1e-5)


def test_without_padding_sequences_go_one_by_one(tmp_path: Path) -> None:
    path, tokenizer = written(tmp_path / "model", end_is_padding=True), toy_tokenizer()
    found = completions(tokenizer)
    judged = group([reward(path)], found, tokenizer)
    expected = plain(path, [[*each.prompt_ids, *each.token_ids] for each in found])
    assert [each.reward for each in judged] == pytest.approx(expected, abs=1e-5)


def test_rewards_of_a_folder_share_one_model(folder: Path) -> None:
    judges = [build_reward_manager([reward(folder)], device="cpu") for _ in range(2)]
    models = {id(each._model) for judge in judges for each in judge._groupwise.values()}  # type: ignore[attr-defined]
    assert len(models) == 1
    del judges
    gc.collect()
    assert not model_module._loaded_models


def test_a_completion_beyond_the_context_ends_the_run(folder: Path) -> None:
    tokenizer = toy_tokenizer()
    found = completions(tokenizer, ["12 " * 300])
    with pytest.raises(
        RewardError, match=r"reward `model` failed on task `t1`: ValueError: prompt and completion have"
    ):
        group([reward(folder)], found, tokenizer)


def test_threads_of_torch_stay_as_they_are(folder: Path) -> None:
    seen: list[int] = []
    with build_reward_manager([reward(folder)], device="cpu") as judge:
        scorer = judge._groupwise["model"]._model  # type: ignore[attr-defined]
        asyncio.run(judge.score(task("12"), completions(toy_tokenizer())[0]))
        scorer.thread.submit(lambda: seen.append(torch.get_num_threads())).result()
    assert seen == [torch.get_num_threads()]


def test_no_torch_without_a_reward_model() -> None:
    program = (
        "import sys\n"
        "from rollmill.rewards.builtin.exact import ExactReward\n"
        "from rollmill.rewards import build_reward_manager\n"
        "build_reward_manager([ExactReward(name='exact')]).close()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_causal_model_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Qwen3ForCausalLM, not a sequence classifier"):
        build_reward_manager([ExactReward(name="exact"), reward(toy_checkpoint(tmp_path, "qwen3"))])


def test_grade_scores_texts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "question", "response": text}) + "\n" for text in WORDS))
    argv = ["grade", "--reward", "model", "--input", str(rows), "--option", f"path={folder}"]
    assert main(argv) == 0
    found = [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()]
    tokenizer = toy_tokenizer()
    sequences = [[*tokenizer.encode("question"), *tokenizer.encode(text), tokenizer.eos_token_id] for text in WORDS]
    assert found == pytest.approx(plain(folder, sequences), abs=1e-4, rel=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_a_chat_ends_as_in_training(tmp_path: Path, shared: bool) -> None:
    own = copy.deepcopy(templated("qwen3")[0])
    own.eos_token = "<eos>"  # a base model's, whose template ends turns with another token
    path = tmp_path / "model"
    policy = toy_model("qwen3", len(own))
    scored = ScoringNetwork(policy)
    torch.nn.init.normal_(scored.head.weight, generator=torch.Generator().manual_seed(1))
    save_classifier(policy, scored.network, scored.head, own, path, end_id=own.eos_token_id)
    chat = Task("t", [Message(role="user", content="how many")], answer="12", response="12 apples")
    ids, _ = encode_demonstration(chat, own, own.eos_token_id)
    assert ids[-1] == own.convert_tokens_to_ids("<|im_end|>") != own.eos_token_id
    tokenizer = own if shared else toy_tokenizer("char")
    prompt = np.array(encode_prompt(chat, own) if shared else tokenizer.encode("how many"), np.int32)
    end = ids[-1] if shared else tokenizer.eos_token_id
    token_ids = np.array([*tokenizer.encode("<think>are</think>12 apples", add_special_tokens=False), end], np.int32)
    zeros = np.zeros(len(token_ids), np.float32)
    found = Completion(
        prompt, token_ids, zeros, token_ids, zeros, "<think>are</think>12 apples", StopReason.EOS, seed=0, index=0
    )
    with build_reward_manager([reward(path)], tokenizer=tokenizer, device="cpu") as judge:
        [judged] = asyncio.run(judge.score_group(chat, [found]))
    answer = own.encode("12 apples", add_special_tokens=False)
    assert judged.reward == pytest.approx(plain(path, [[*encode_prompt(chat, own), *answer, ids[-1]]])[0], abs=1e-4)
