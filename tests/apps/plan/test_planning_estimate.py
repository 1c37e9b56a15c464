"""`rollmill plan` without building the model: estimates on the meta device, presets, and numbers of GPUs of a kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_run
from support.toys import toy_checkpoint

from rollmill.apps.plan.planning.cluster_costs import read_cluster_model
from rollmill.apps.plan.planning.estimate import Machine, estimate_run, estimate_stage
from rollmill.apps.plan.planning.presets import MODEL_SHAPES, planned_model
from rollmill.cli import main
from rollmill.config.model import LoRAConfig, ModelConfig
from rollmill.config.run import StageConfig
from rollmill.errors import ConfigError
from rollmill.models.cpu.host_memory import peak_rss, reset_peak_rss

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "minimal.yaml"
SIX_BILLION = (
    "model={new: {hidden_size: 4096, layers: 26, heads: 32, kv_heads: 8, head_dim: 128, intermediate_size: 12288, "
    "tie_embeddings: false, tokenizer: {kind: bpe, vocab_size: 151936}}}"
)


def words_of(captured: str) -> str:
    return " ".join(captured.split())


def test_a_model_that_does_not_fit_is_estimated_and_never_allocated(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", str(EXAMPLE), "--estimate"])  # imports what a plan needs
    capsys.readouterr()
    reset_peak_rss()
    before = peak_rss()
    # nothing under a terabyte of memory fits 6.3 billion weights with such a batch
    words = ["--set", SIX_BILLION, "--set", "rollout.max_sequences=100000", "--set", "rollout.batch=4096"]
    assert main(["plan", str(EXAMPLE), *words, "--memory-gb", "64"]) == 0
    said = words_of(capsys.readouterr().out)
    assert peak_rss() - before < 1e9 < 4 * 6.26e9
    assert said.startswith("not measured: ")
    assert "6.26B parameters" in said
    assert "does not fit: stage train: phase `train` takes" in said
    assert "plan --gpus 8xH200" in said


def test_an_estimate_has_the_sizes_of_the_components(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, stages=None, algorithm={"name": "grpo", "kl": 0.1}, steps=4, evaluation=None)
    [found] = estimate_run(run, model="qwen2.5-7b", memory_gb=80, prompt_tokens=100, mean_tokens=50)
    assert found.parameters == found.trained == pytest.approx(7.62e9, rel=0.01)
    train = found.memory["train"].parts
    weights = 4 * found.parameters
    assert train["policy"] == train["reference"] == train["gradients"] == weights
    assert train["optimizer"] == pytest.approx(2 * weights, rel=1e-6)
    assert found.least["rollout"].total < found.memory["rollout"].total
    assert len(found.too_large) == len(found.memory)
    assert found.seconds["total"] == found.seconds["rollout"] + found.seconds["train"] > 0
    assert "GB of cpu are free" in (found.obstacle or "")
    json.dumps(found.to_json())


def test_types_of_weights_and_moments_count(tmp_path: Path) -> None:
    """Bytes of each weight, whatever type the folder's configuration names; the peaks fall in this order."""
    folder = toy_checkpoint(tmp_path / "model", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    run = tiny_run(tmp_path, stages=None, algorithm={"name": "grpo"}, model={"path": str(folder), "new": None})
    bf16 = ["trainer.precision=bf16", "trainer.param_dtype=bf16"]
    adapters = [*bf16, "model.lora={rank: 2, merge: false}", "trainer.gradient_checkpointing=true"]
    ways = [
        ["trainer.precision=bf16"],
        ["trainer.precision=bf16", "trainer.optimizer=adamw_8bit"],
        bf16,
        [*bf16, "trainer.optimizer=adamw_8bit"],
        adapters,
        [*adapters, "model.quantization=int8"],
        [*adapters, "model.quantization=nf4"],
    ]
    found = [estimate_run(run, way, prompt_tokens=8)[0] for way in ways]
    parts = [each.memory["train"].parts for each in found]
    count = found[0].parameters
    assert [each["policy"] / count for each in parts[:4]] == [4, 4, 2, 2]
    assert [each["gradients"] / count for each in parts[:4]] == [4, 4, 2, 2]
    assert [each["optimizer"] / count for each in parts[:4]] == pytest.approx([8, 2, 4, 2], rel=0.05)
    assert parts[4]["cast"] == parts[4]["gradients"] / 2  # adapters in bf16
    totals = [each.memory["train"].total for each in found]
    assert totals == sorted(totals, reverse=True)
    assert all(each["process"] > 1e8 for each in parts)


def test_activations_of_the_first_micro_batch_go_while_gradients_come(tmp_path: Path) -> None:
    def train(batch: int, *words: str) -> dict[str, float]:
        run = tiny_run(tmp_path, stages=None, algorithm={"name": "grpo"}, steps=4, evaluation=None)
        sizes = [f"rollout.batch={batch}", "rollout.group_size=4", "trainer.micro_batch_tokens=592"]
        words = ("trainer.precision=bf16", *sizes, *words)
        [found] = estimate_run(run, words, model="qwen3-0.6b", prompt_tokens=20, mean_tokens=32)
        return found.memory["train"].parts

    for words in ([], ["model.lora={}"]):
        one, more, two, three = (train(batch, *words) for batch in (4, 5, 8, 12))  # 592 tokens, 148 more, twice, thrice
        assert one["work"] == two["work"] - two["gradients"] > 0
        assert one["work"] <= more["work"] < two["work"] == three["work"]


def test_gradients_of_weights_are_summed_apart_where_products_of_bf16_are_not_native(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(native: bool, *words: str) -> float:
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
        run = tiny_run(tmp_path, stages=None, algorithm={"name": "grpo"}, steps=4, evaluation=None)
        [found] = estimate_run(run, words, model="qwen3-0.6b", prompt_tokens=20, mean_tokens=32)
        return found.memory["train"].parts["work"]

    sizes = ["trainer.precision=bf16", "rollout.batch=9", "rollout.group_size=4", "trainer.micro_batch_tokens=592"]
    assert work(False, *sizes) - work(True, *sizes) == 4 * 151_936 * 1024  # of the output layer, the largest
    sizes.append("model.lora={}")
    assert work(False, *sizes) == work(True, *sizes)


def test_kept_turns_of_conversations_count() -> None:
    def cache(**changes: Any) -> float:
        section = {"taskset": {"path": "tasks.jsonl"}, "algorithm": {"name": "grpo"}, **changes}
        model = read_cluster_model(
            planned_model("llama-3.2-1b", ModelConfig()), StageConfig.model_validate(section), 64, None
        )
        return estimate_stage(model, Machine.here(torch.device("cpu"))).memory["rollout"].parts["cache"]

    turns: dict[str, Any] = {"workflow": {"name": "reflection"}}
    assert cache(**turns, engine={"name": "native", "prefix_cache_gb": 0}) == cache()
    assert cache(**turns) == cache() + 2**30
    assert cache(**turns, engine={"name": "native", "prefix_cache_gb": 1e6}) == pytest.approx(2 * cache())


def test_adapters_take_less(tmp_path: Path) -> None:
    stage = StageConfig.model_validate({"taskset": {"path": "tasks.jsonl"}, "algorithm": {"name": "grpo"}})
    own = ModelConfig(path=tmp_path, lora=LoRAConfig(rank=8))
    cpu = Machine.here(torch.device("cpu"))
    alone, adapted = (
        estimate_stage(read_cluster_model(planned_model("llama-3.2-1b", each), stage, 64, None), cpu)
        for each in (ModelConfig(), own)
    )
    assert alone.parameters == pytest.approx(1.236e9, rel=0.01)
    assert adapted.trained < 0.01 * adapted.parameters
    assert adapted.memory["train"].parts["optimizer"] < 0.01 * alone.memory["train"].parts["optimizer"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.19),
        ("llama-3.1-8b", 8.03),
        ("qwen2.5-72b", 72.7),
        ("smollm2-135m", 0.1345),
    ],
)
def test_presets_have_the_published_sizes(name: str, billions: float) -> None:
    stage = StageConfig.model_validate({"taskset": {"path": "tasks.jsonl"}})
    model = read_cluster_model(planned_model(name, ModelConfig()), stage, 64, None)
    assert model.parameters == pytest.approx(1e9 * billions, rel=0.005)


def test_unknown_models_are_refused() -> None:
    assert "qwen3-8b" in MODEL_SHAPES
    with pytest.raises(
        ConfigError, match="--model qwen9-8b: neither a checkpoint's folder, hf://ORG/NAME nor a known model; known"
    ):
        planned_model("qwen9-8b", ModelConfig())


def test_gpus_name_their_kind(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        str(EXAMPLE),
        "--model",
        "qwen3-8b",
        "--set",
        "rollout.max_new_tokens=64",
        "--set",
        "rollout.batch=2",
        "--json",
    ]
    assert main([*words, "--gpus", "8xH200"]) == 0
    done: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert done["cluster"] == "h200"
    [plan] = done["plans"]
    assert plan["gpus"] == 8
    assert 8e9 * 16 / plan["trainer_ranks"] < plan["trainer_memory"] < 141e9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "8xH200,8xA100"], "of several kinds: a100, h200; plan one after the other"),
        (["--gpus", "8"], "of which kind?"),
        (["--gpus", "H200"], "nor GPUs of a kind, such as 8xH200"),
        (["--gpus", "8xH200", "--cluster", "h100"], "of several kinds"),
        (["--measure", "--model", "qwen3-8b"], "a preset has no weights to measure"),
    ],
)
def test_wrong_numbers_of_gpus_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLE), *words]) == 2
    assert said in words_of(capsys.readouterr().err.replace("│", " "))


def test_one_gpu_of_a_kind_has_the_choices_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(EXAMPLE), "--model", "qwen3-8b", "--set", "engine=vllm", "--gpus", "1xH200"]
    assert main([*words, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["estimates"]
    assert found["device"] == "one h200"
    assert found["chosen"]["param_dtype"] == "bf16"
    assert found["too_large"] == []
    assert all(each["total"] < 0.9 * 141e9 for each in found["memory"].values())
    assert main(words) == 0
    said = words_of(capsys.readouterr().out)
    assert "estimated for one process on one h200 in bf16" in said
    assert "chosen: param_dtype: bf16, gradient_checkpointing: true, micro_batch_tokens: 8192, cache_gb: " in said
    assert main([*words, "--measure"]) == 2
