"""LoRA: adapters that start as nothing, merged copies that compute the same, checkpoints that give them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import tiny_run
from support.toys import toy_checkpoint, toy_model
from transformers import AutoModelForCausalLM

from rollmill.cli.check import command as check
from rollmill.config.model import LoRAConfig, ModelConfig
from rollmill.engines.native.weights import EngineWeights
from rollmill.errors import ModelError
from rollmill.models.from_scratch import save_policy
from rollmill.models.load import PolicyModel, load_policy
from rollmill.models.lora import ADAPTER_FOLDER, adapted_layers, add_lora, load_adapter, merged_model

CPU = torch.device("cpu")
IDS = torch.arange(2, 12)[None]


@pytest.fixture(params=["qwen3", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return toy_checkpoint(tmp_path / "toy", request.param)


def policy_of(folder: Path, seed: int = 0, **keys: Any) -> PolicyModel:
    config = ModelConfig(path=folder, lora=LoRAConfig(**({"rank": 4} | keys)))
    return load_policy(config, texts=[], seed=seed, device=CPU)


def trained(policy: PolicyModel) -> PolicyModel:
    """With adapters that do something."""
    torch.manual_seed(1)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return policy


def test_adapters_start_as_nothing_and_only_they_are_trained(folder: Path) -> None:
    base = load_policy(ModelConfig(path=folder), texts=[], seed=0, device=CPU).model
    model = policy_of(folder).model
    assert type(model) is type(base)
    assert torch.equal(model(IDS).logits, base(IDS).logits)
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    changed = trained(policy_of(folder)).model
    assert not torch.equal(changed(IDS).logits, base(IDS).logits)
    changed.disable_adapters()
    assert torch.equal(changed(IDS).logits, base(IDS).logits)


def test_the_merged_model_computes_the_same_and_shares_what_is_not_adapted(folder: Path) -> None:
    model = trained(policy_of(folder)).model
    merged = merged_model(model)
    torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert adapted_layers(merged) == {}
    own = {parameter.data_ptr() for parameter in model.parameters()}
    adapted = {f"{name}.weight" for name in adapted_layers(model)}
    copied = {name for name, parameter in merged.named_parameters() if parameter.data_ptr() not in own}
    assert copied == adapted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_decodes_with_merged_weights_of_the_moment(folder: Path, dtype: torch.dtype) -> None:
    model = policy_of(folder).model
    weights = EngineWeights(model, dtype)
    weights.refresh()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    weights.updated()
    weights.refresh()
    merged = merged_model(model).to(dtype)
    for (name, ours), (_, theirs) in zip(weights.model.named_parameters(), merged.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert weights.model(IDS).logits.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_merging_the_engine_copies_adapters_only(folder: Path, dtype: torch.dtype) -> None:
    """Its adapters are those of the last refresh: the trainer swaps its own for those of a reference."""
    config = ModelConfig(path=folder, lora=LoRAConfig(rank=4, merge=False))
    model = load_policy(config, texts=[], seed=0, device=CPU, dtype=dtype).model
    weights = EngineWeights(model, dtype)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    weights.updated()
    weights.refresh()
    expected = model(IDS).logits.float()
    adapters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert weights.bytes() == sum(dtype.itemsize * each.numel() for each in adapters.values())
    for each in adapters.values():
        each.data = torch.zeros_like(each)
    gap = (weights.model(IDS).logits.float() - expected).abs().mean()
    effect = (model(IDS).logits.float() - expected).abs().mean()
    assert gap < effect * (1e-4 if dtype == torch.float32 else 0.05)
    weights.updated()
    weights.destroy()
    assert weights.bytes() == 0
    weights.refresh()
    torch.testing.assert_close(weights.model(IDS).logits.float(), model(IDS).logits.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_stored_in_their_own_type(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """As transformers stores the merged copy, whose tied weights are one."""
    config = ModelConfig(path=folder, lora=LoRAConfig(rank=4))
    policy = trained(load_policy(config, texts=[], seed=0, device=CPU, dtype=dtype))
    save_policy(policy.model, policy.tokenizer, tmp_path / "ours")
    merged_model(policy.model).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == dtype for name in theirs)
    files = [{each.name for each in (tmp_path / name).iterdir()} for name in ("ours", "theirs")]
    assert files[1] <= files[0]
    assert all(
        (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
        for name in files[1] - {"model.safetensors"}
    )


def test_a_checkpoint_is_merged_for_others_and_exact_for_us(folder: Path, tmp_path: Path) -> None:
    policy = trained(policy_of(folder))
    expected = policy.model(IDS).logits
    save_policy(policy.model, policy.tokenizer, tmp_path / "saved")
    others = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    torch.testing.assert_close(others(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    again = policy_of(folder, seed=7)
    load_adapter(again.model, tmp_path / "saved" / ADAPTER_FOLDER)
    assert torch.equal(again.model(IDS).logits, expected)
    with pytest.raises(ModelError, match=r"of another model\.lora"):
        load_adapter(policy_of(folder, rank=2).model, tmp_path / "saved" / ADAPTER_FOLDER)
    (tmp_path / "saved" / ADAPTER_FOLDER / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="the adapter cannot be read"):
        load_adapter(again.model, tmp_path / "saved" / ADAPTER_FOLDER)


def test_named_targets_and_wrong_ones(folder: Path) -> None:
    names = adapted_layers(policy_of(folder, targets=["q_proj", "down_proj"], rslora=True).model)
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "down_proj"}
    with pytest.raises(ModelError, match=r"model\.lora\.targets: the output layer cannot be adapted"):
        policy_of(folder, targets=["lm_head", "q_proj"])
    with pytest.raises(ModelError, match=r"model\.lora\.targets: Target modules .*nope.* use all-linear"):
        policy_of(folder, targets=["nope"])


def test_layers_with_the_same_weight_are_refused(tmp_path: Path) -> None:
    for tie in (True, False):
        path = toy_checkpoint(tmp_path / str(tie), "llama", tie_word_embeddings=tie)
        if tie:
            with pytest.raises(ModelError, match=r"`model\.embed_tokens` has the same weight as `lm_head`"):
                policy_of(path, targets=["embed_tokens", "q_proj"])
            continue
        model = trained(policy_of(path, targets=["embed_tokens", "q_proj"])).model
        torch.testing.assert_close(merged_model(model)(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)

    model = toy_model("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.v_proj.weight = first.k_proj.weight
    with pytest.raises(ModelError, match=r"k_proj` has the same weight as `model\.layers\.1\.self_attn\.v_proj`"):
        add_lora(model, LoRAConfig(targets=["k_proj"]), seed=0)


def test_check_refuses_adapters_that_the_run_would_refuse(tmp_path: Path) -> None:
    folder = toy_checkpoint(tmp_path / "toy", "llama", tie_word_embeddings=True)
    for targets in (["embed_tokens"], ["nope"], ["lm_head"]):
        path = tiny_run(tmp_path, model={"path": str(folder), "new": None, "lora": {"targets": targets}})
        with pytest.raises(ModelError, match=r"model\.lora\.targets"):
            check(path)


def test_of_a_mixture_of_experts_only_the_other_layers_are_adapted(tmp_path: Path) -> None:
    path = toy_checkpoint(tmp_path / "toy", "qwen3_moe")
    for targets in ("all-linear", ["q_proj", "down_proj"]):
        with pytest.raises(ModelError, match=r"model\.lora\.targets: the experts and the router .* \[q_proj, k_proj"):
            policy_of(path, targets=targets)
    model = trained(policy_of(path, targets=["q_proj", "o_proj"])).model
    torch.testing.assert_close(merged_model(model)(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
