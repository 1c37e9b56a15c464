"""QLoRA: quantised layers compute with their dequantised weights, runs train adapters over them and resume, and
checkpoints merge adapters into the weights as they were."""

from __future__ import annotations

import copy
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import metrics, outcome, ran, tiny_run
from support.toys import toy_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

from rollmill.apps.plan.planning.cluster_costs import read_cluster_model
from rollmill.cli import main
from rollmill.config.loader import load_run
from rollmill.config.model import LoRAConfig, ModelConfig
from rollmill.engines.native.weights import EngineWeights
from rollmill.errors import ConfigError, ModelError
from rollmill.launch import resume
from rollmill.models.from_scratch import save_policy
from rollmill.models.load import PolicyModel, load_policy
from rollmill.models.lora import adapted_layers, merged_weights
from rollmill.models.quantization import QuantizedLinear, count_weights, full_weight, is_quantized
from rollmill.offload.plan import estimate_component_sizes
from rollmill.trainer.parity import check_parity

CPU = torch.device("cpu")
IDS = torch.arange(2, 12)[None]
LIBRARY = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="nf4 needs the extra `quantization`")
KINDS = ["int8", pytest.param("nf4", marks=LIBRARY)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_checkpoint(tmp_path_factory.mktemp("toy") / "toy", "qwen3")


def policy_of(folder: Path, kind: Any, dtype: torch.dtype = torch.float32) -> PolicyModel:
    """With adapters that do something."""
    config = ModelConfig(path=folder, lora=LoRAConfig(rank=4), quantization=kind)
    policy = load_policy(config, texts=[], seed=0, device=CPU, dtype=dtype)
    torch.manual_seed(1)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return policy


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.01), pytest.param("nf4", 0.11, marks=LIBRARY)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_with_its_dequantised_weight(kind: Any, error: float, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(192, 128, bias=bias)
    original = layer.weight.detach().clone()
    quantized = QuantizedLinear(layer, kind)
    assert float((quantized.dequantized() - original).norm() / original.norm()) < error
    assert quantized.weight.nbytes == original.nbytes / (4 if kind == "int8" else 8)
    plain = nn.Linear(192, 128, bias=bias)
    plain.weight.data = quantized.dequantized()
    if bias:
        plain.bias.data = layer.bias.data
    x = torch.randn(5, 192, requires_grad=True)
    y = x.detach().clone().requires_grad_(True)
    torch.testing.assert_close(quantized(x), plain(y), rtol=1e-4, atol=1e-5)
    quantized(x).sin().sum().backward()
    plain(y).sin().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    assert copy.deepcopy(quantized) is quantized
    with torch.autocast("cpu", torch.bfloat16):
        assert quantized(x).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine_and_trainer_compute_what_the_model_computes(folder: Path, kind: Any, dtype: torch.dtype) -> None:
    policy = policy_of(folder, kind, dtype)
    gaps = check_parity(policy.model, folder)
    assert [gap.path for gap in gaps] == ["engine: prefill and decode", "trainer: log-probs", "trainer: gradient"]
    assert all(gap.right for gap in gaps)
    assert {each.dtype for each in policy.model.parameters() if each.is_floating_point()} <= {dtype, torch.float32}


def test_the_engine_shares_quantised_weights(folder: Path) -> None:
    model = policy_of(folder, "int8").model
    weights = EngineWeights(model, torch.float32)
    weights.refresh()
    shared = {id(each) for each in model.modules() if isinstance(each, QuantizedLinear)}
    assert {id(each) for each in weights.model.modules() if isinstance(each, QuantizedLinear)} == shared
    torch.testing.assert_close(weights.model(IDS).logits, model(IDS).logits)


def test_other_engines_get_dequantised_and_merged_weights(folder: Path) -> None:
    model = policy_of(folder, "int8").model
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = merged_weights(model)
    assert found.keys() == dict(whole.named_parameters()).keys()
    assert all(found[name].shape == each.shape for name, each in whole.named_parameters())
    whole.load_state_dict(found, strict=False)
    torch.testing.assert_close(whole(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_has_adapters_on_the_weights_as_they_were(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    stored = tmp_path / "base"
    shutil.copytree(folder, stored)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    whole.save_pretrained(stored)
    policy = policy_of(stored, "int8")
    save_policy(policy.model, policy.tokenizer, tmp_path / "saved")
    found, original = (load_file(path / "model.safetensors") for path in (tmp_path / "saved", stored))
    layers = adapted_layers(policy.model)
    assert found.keys() == original.keys()
    assert layers
    for name, weight in original.items():
        layer = layers.get(name.removesuffix(".weight"))
        wanted = weight if layer is None else (weight.float() + layer.get_delta_weight("default")).to(dtype)
        assert torch.equal(found[name], wanted)


QLORA: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "grpo"},
    "steps": 4,
    "evaluation": None,
    "checkpoint": {"every": 2, "keep_last": 2},
    "rollout": {"max_new_tokens": 8},
    "rewards": [{"name": "format", "pattern": ".*[a-m].*"}],
    "trainer": {"lr": 3e-2, "param_dtype": "bf16", "precision": "auto", "optimizer": "adamw_8bit"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_adapters_resumes_and_is_exported(folder: Path, tmp_path: Path, kind: str) -> None:
    model = {"path": str(folder), "new": None, "lora": {"rank": 2}, "quantization": kind}
    whole = ran(QLORA | {"model": model}, tmp_path, "whole")
    rows = [row for row in metrics(whole) if "loss" in row]
    assert all(row["logprob_gap/mean"] < 0.02 for row in rows)
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints/step-000004")
    resume(cut)
    assert outcome(cut) == outcome(whole)
    adapters = [load_file(run / "checkpoints/step-000004/adapter/adapter_model.safetensors") for run in (cut, whole)]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[1])
    assert any(each.any() for name, each in adapters[1].items() if "lora_B" in name)
    assert main(["export", str(whole), "--adapter-only", "--out", str(tmp_path / "adapter")]) == 0
    assert main(["export", str(whole), "--out", str(tmp_path / "merged")]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(IDS).logits.isfinite().all()


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_its_size_is_known_before(folder: Path, tmp_path: Path, kind: Any) -> None:
    """Of a model on the meta device, which needs no library."""
    model = {"path": str(folder), "new": None, "lora": {"rank": 2}, "quantization": kind}
    loaded = load_run(tiny_run(tmp_path, **QLORA | {"model": model}))
    estimate = read_cluster_model(loaded.config.model, loaded.stages[0], 4, None)
    whole = AutoModelForCausalLM.from_pretrained(folder)
    quantized = {name for name, each in estimate.model.named_modules() if isinstance(each, QuantizedLinear)}
    packed = sum(full_weight(each).numel() for name, each in whole.named_modules() if f"{name}.base_layer" in quantized)
    rest = count_weights(whole) - packed
    adapters = sum(each.numel() for each in estimate.model.parameters() if each.requires_grad)
    assert is_quantized(estimate.model)
    assert count_weights(estimate.model) == count_weights(whole) + adapters
    policy: Any = type("Policy", (), {"model": estimate.model, "device": CPU})
    sizes = estimate_component_sizes(loaded.stages[0], policy, "bf16")
    assert sizes["policy"] == packed / (1 if kind == "int8" else 2) + 2 * rest + 4 * adapters
    assert sizes["cast"] == 2 * adapters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"lora": None}}, r"model.quantization: quantised weights are not trained; add `lora`"),
        ({"model": {}, "algorithm": {"name": "ppo"}}, r"model.quantization: .*critic would train a copy"),
        ({"model": {}, "trainer": {"ranks": 2}}, r"model.quantization: is not supported with several trainer.ranks"),
    ],
)
def test_what_needs_whole_weights_is_refused(folder: Path, tmp_path: Path, changes: Any, message: str) -> None:
    model = {"path": str(folder), "new": None, "lora": {"rank": 2}, "quantization": "int8"} | changes["model"]
    with pytest.raises(ConfigError, match=message):
        load_run(tiny_run(tmp_path, **QLORA | {"trainer": {}} | changes | {"model": model}))


def test_experts_in_another_layout_are_refused(tmp_path: Path) -> None:
    path = toy_checkpoint(tmp_path / "toy", "qwen3_moe")
    config = ModelConfig(path=path, lora=LoRAConfig(targets=["q_proj"]), quantization="int8")
    with pytest.raises(ModelError, match=r"model.quantization: the files of .* hold other tensors"):
        load_policy(config, texts=[], seed=0, device=CPU)


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="the extra `quantization` is installed")
def test_a_missing_library_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"pip install 'rollmill\[quantization\]', or use int8"):
        policy_of(folder, "nf4")


def test_check_says_what_is_trained(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"path": str(folder), "new": None, "lora": {"rank": 2}, "quantization": "int8"}
    assert main(["check", str(tiny_run(tmp_path, **QLORA | {"model": model}))]) == 0
    assert "adapters of rank 2, over weights in int8" in " ".join(capsys.readouterr().out.split())
