"""Rollouts that multiply in 8 bits: exact products of rounded numbers, recorded log-probs of the rounded model, and new
weights after each update. All need a processor with VNNI or AMX."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import metrics, outcome, ran, tiny_run
from support.toys import sampled_completions, toy_checkpoint, toy_model
from torch import nn
from transformers import JetMoeConfig, JetMoeForCausalLM

import rollmill
from rollmill.cli import main
from rollmill.config.loader import load_run
from rollmill.config.model import LoRAConfig, ModelConfig
from rollmill.engines.native import NativeEngine
from rollmill.engines.native.weights import EngineWeights
from rollmill.errors import ConfigError, ModelError
from rollmill.launch import resume
from rollmill.models.cpu.int8 import Int8Linear, int8_linears, require_int8_products
from rollmill.models.load import load_policy
from rollmill.models.lora import adapted_layers, merged_weight
from rollmill.offload.plan import estimate_component_sizes
from rollmill.trackers.run_views import PlainView
from rollmill.types import Completion

CPU = torch.device("cpu")


def has_int8() -> bool:
    try:
        require_int8_products(CPU)
    except ModelError:
        return False
    return True


needs_int8 = pytest.mark.skipif(not has_int8(), reason="this processor has no exact products in 8 bits (VNNI or AMX)")


def rounded(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of rows: the largest magnitude is 127."""
    scale = np.maximum(np.abs(values).max(-1, keepdims=True), np.finfo(np.float32).tiny) / np.float32(127)
    return np.rint(values / scale).astype(np.int64), scale


@needs_int8
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (2, 3, 48), (130, 48)])
def test_a_product_is_that_of_the_rounded_numbers(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 40, bias=bias).requires_grad_(False)
    x = torch.randn(shape) * torch.logspace(0, 3, shape[-2])[:, None]
    if shape[-2] > 1:
        x[..., 0, :] = 0  # a row without any value
    own = Int8Linear(layer, lambda: layer.weight)
    own.load()
    inputs, x_scale = rounded(x.numpy())
    weights, w_scale = rounded(layer.weight.numpy())
    expected = (inputs @ weights.T) * x_scale * w_scale[:, 0] + (layer.bias.numpy() if bias else 0)
    np.testing.assert_allclose(own(x).numpy(), expected, rtol=1e-5, atol=1e-6)
    error = (own(x) - layer(x)).norm() / layer(x).norm()
    assert 1e-4 < error < 0.02
    assert own(x.bfloat16()).dtype == torch.bfloat16
    assert (own(x.bfloat16()).float() - layer(x)).norm() / layer(x).norm() < 0.03


@needs_int8
def test_the_largest_numbers_do_not_overflow() -> None:
    layer = nn.Linear(4096, 3, bias=False).requires_grad_(False)
    layer.weight.copy_(torch.tensor([[1.0], [-1.0], [0.5]]).expand(3, 4096))
    own = Int8Linear(layer, lambda: layer.weight)
    own.load()
    torch.testing.assert_close(own(torch.full((2, 4096), 3.0)), torch.tensor([[12288.0, -12288.0, 6144.0]] * 2))


@torch.no_grad()
def gaps(model: Any, completions: list[Completion]) -> torch.Tensor:
    """Differences of recorded log-probs and the model's own."""
    found = []
    for completion in completions:
        tokens = torch.tensor([[*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]])
        logits = model(tokens, use_cache=False).logits[0, len(completion.prompt_ids) - 1 : -1]
        new = torch.tensor(completion.token_ids.astype(np.int64))
        own = logits.float().log_softmax(-1).gather(1, new[:, None])[:, 0]
        found.append((torch.from_numpy(completion.logprobs) - own).abs())
    return torch.cat(found)


@needs_int8
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "qwen3_moe"])
def test_recorded_logprobs_are_those_of_the_rounded_model_after_each_update(architecture: str) -> None:
    model = toy_model(architecture)
    engine = NativeEngine(model, context=256, int8=True)
    torch.manual_seed(3)
    for version in range(3):
        found = sampled_completions(engine)
        own, trained = gaps(engine.core.weights.model, found), gaps(model, found)
        # a code of an input may differ by one where a sum was rounded in another order
        assert own.mean() < trained.mean() / 8
        assert 1e-3 < trained.mean() < 0.2
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        if version == 1:
            engine.core.destroy_weights()
            assert engine.core.weights.bytes() == 0
        engine.weights_updated(version + 1)


def test_layers_that_choose_or_predict_are_not_rounded() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = JetMoeForCausalLM(JetMoeConfig(**sizes, kv_channels=16, vocab_size=90, num_local_experts=4))
    linears = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    left_out = {"lm_head", "model.layers.0.mlp.router.layer", "model.layers.0.self_attention.experts.router.layer"}
    assert left_out < linears
    assert set(int8_linears(model)) == linears - left_out


@needs_int8
def test_the_copy_has_layers_in_8_bits_and_nothing_without_memory() -> None:
    weights = EngineWeights(toy_model("qwen3_moe"), torch.bfloat16, int8=True)
    kinds = {name.split(".")[-1]: type(module) for name, module in weights.model.named_modules()}
    assert kinds["q_proj"] is kinds["o_proj"] is Int8Linear
    assert kinds["lm_head"] is nn.Linear
    assert not any(parameter.is_meta for parameter in weights.model.parameters())


@needs_int8
@pytest.mark.parametrize("merge", [True, False])
def test_adapters_are_in_the_rounded_weights_if_they_are_merged(tmp_path: Path, merge: bool) -> None:
    folder = toy_checkpoint(tmp_path / "toy", "qwen3")
    config = ModelConfig(path=folder, lora=LoRAConfig(rank=4, merge=merge))
    policy = load_policy(config, texts=[], seed=0, device=CPU, dtype=torch.float32)
    torch.manual_seed(1)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    weights = EngineWeights(policy.model, torch.float32, int8=True)
    weights.refresh()
    layers = {name: each for name, each in weights.model.named_modules() if isinstance(each, Int8Linear)}
    assert len(layers) == len(adapted_layers(policy.model)) == 14
    for name, layer in adapted_layers(policy.model).items():
        own = layers[name if merge else f"{name}.base_layer"]
        expected = merged_weight(layer) if merge else layer.base_layer.weight
        torch.testing.assert_close(
            own(torch.eye(own.in_features)).T, expected, rtol=0, atol=float(expected.abs().max()) / 120
        )
    tokens = torch.arange(2, 12)[None]
    own, trained = weights.model(tokens).logits, policy.model(tokens).logits
    assert 1e-4 < (own - trained).norm() / trained.norm() < 0.05


@needs_int8
@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4), LoRAConfig(rank=4, merge=False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_of_the_copy_is_its_size(tmp_path: Path, dtype: torch.dtype, lora: LoRAConfig | None) -> None:
    config = ModelConfig(path=toy_checkpoint(tmp_path / "toy", "llama"), lora=lora)
    policy = load_policy(config, texts=[], seed=0, device=CPU, dtype=torch.float32)
    weights = EngineWeights(policy.model, dtype, int8=True)
    weights.refresh()
    stage = load_run(tiny_run(tmp_path, **stages(INT8, CORRECTED))).stages[1]
    sizes = estimate_component_sizes(stage, policy, "bf16" if dtype == torch.bfloat16 else "fp32")
    assert sizes["cast"] == weights.bytes() > 0


def stages(engine: dict[str, Any], algorithm: dict[str, Any]) -> dict[str, Any]:
    """A warm start and four steps of practice."""
    warm = {"name": "warm", "algorithm": {"name": "sft", "batch": 8}, "steps": 6, "trainer": {"lr": 3e-3}}
    return {"stages": [warm, {"name": "repair", "algorithm": algorithm, "steps": 4, "trainer": {"lr": 1e-3}, **engine}]}


INT8: dict[str, Any] = {"engine": {"name": "native", "weights": "int8"}}
CORRECTED: dict[str, Any] = {"name": "grpo", "corrections": ["tis"]}


@pytest.mark.slow
@needs_int8
def test_a_run_reports_the_mismatch_and_resumes(tmp_path: Path) -> None:
    whole = ran({}, tmp_path, "whole", **stages(INT8, CORRECTED))
    gap = [row["logprob_gap/mean"] for row in metrics(whole) if "logprob_gap/mean" in row]
    assert len(gap) == 4
    assert all(1e-4 < each < 0.1 for each in gap)
    plain = ran({}, tmp_path, "plain", **stages({}, CORRECTED))
    assert all(row["logprob_gap/mean"] < 1e-5 for row in metrics(plain) if "logprob_gap/mean" in row)
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-000010")
    assert resume(cut, view=PlainView(io.StringIO()))["status"] == "done"
    assert outcome(cut) == outcome(whole)


def test_check_warns_of_rounded_rollouts_without_a_correction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tiny_run(tmp_path, **stages(INT8, {"name": "grpo"})))]) == 0
    assert "stages.1.engine.weights: tokens are sampled from the rounded weights" in capsys.readouterr().err
    assert main(["check", str(tiny_run(tmp_path, **stages(INT8, CORRECTED)))]) == 0
    assert "rounded" not in capsys.readouterr().err


def test_quantised_weights_are_not_rounded_once_more(tmp_path: Path) -> None:
    folder = toy_checkpoint(tmp_path / "toy", "qwen3")
    model = {"path": str(folder), "new": None, "lora": {"rank": 4}, "quantization": "int8"}
    with pytest.raises(ConfigError, match=r"model.quantization.*would round them once more \(engine.weights\)"):
        rollmill.run(tiny_run(tmp_path, model=model, **stages(INT8, CORRECTED)), out=tmp_path / "out")


def test_it_is_refused_without_products_or_layers_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="int8 is for CPUs, and the engine is on meta"):
        require_int8_products(torch.device("meta"))
    model = toy_model("llama")
    for layer in model.model.layers:
        layer.self_attn, layer.mlp = nn.Identity(), nn.Identity()
    with pytest.raises(ModelError, match="LlamaForCausalLM has no linear layers for it"):
        int8_linears(model)
    monkeypatch.setattr(Int8Linear, "load", lambda self: None)
    monkeypatch.setattr(Int8Linear, "product", lambda self, codes, scale: torch.full((1, 2), 100.0))  # saturated
    with pytest.raises(ModelError, match="no exact products"):
        require_int8_products(CPU)
