"""Loading checkpoint folders: what is read, and every way a folder can be wrong."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.toys import toy_checkpoint, toy_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForMaskedLM, BloomConfig, BloomForCausalLM

from rollmill.config.model import ModelConfig
from rollmill.errors import ModelError
from rollmill.models.from_scratch import save_policy
from rollmill.models.load import PolicyModel, load_policy

CPU = torch.device("cpu")
ARCHITECTURES = ["qwen2", "qwen3", "llama", "gemma", "gemma2", "qwen3_moe", "mixtral"]


def load(path: Path, **keys: Any) -> PolicyModel:
    return load_policy(ModelConfig(path=path, **keys), texts=[], seed=0, device=CPU)


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes a key."""
    content = json.loads(path.read_text()) | changes if path.is_file() else changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return toy_checkpoint(tmp_path / "toy", "qwen3")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_checkpoint_is_read_as_transformers_reads_it(architecture: str, tmp_path: Path) -> None:
    policy = load(toy_checkpoint(tmp_path / "toy", architecture))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "toy", dtype=torch.float32).train()
    tokens = torch.tensor([policy.tokenizer.encode("how many apples?")])
    assert torch.equal(policy.model(tokens).logits, plain(tokens).logits)
    assert policy.tokenizer.get_vocab() == toy_tokenizer().get_vocab()
    assert policy.tokenizer.decode(tokens[0]) == "how many apples?"
    assert (policy.eos_ids, policy.pad_id, policy.context, policy.device) == (frozenset([1]), 0, 256, CPU)
    assert policy.model.training
    assert all(p.dtype == torch.float32 and p.requires_grad for p in policy.model.parameters())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_policy_reads_back_identically(architecture: str, tmp_path: Path) -> None:
    policy = load(toy_checkpoint(tmp_path / "toy", architecture))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    save_policy(policy.model, policy.tokenizer, tmp_path / "saved")
    again = load(tmp_path / "saved")
    for (name, before), (_, after) in zip(policy.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(before, after), name
    assert again.tokenizer.backend_tokenizer.to_str() == policy.tokenizer.backend_tokenizer.to_str()
    assert again.tokenizer.chat_template == policy.tokenizer.chat_template
    assert (again.eos_ids, again.pad_id, again.context) == (policy.eos_ids, policy.pad_id, policy.context)
    if architecture != "qwen2":  # AutoTokenizer puts Qwen2's own tokenizer in the place of ours
        plain = AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert plain.encode("a  b 12.") == policy.tokenizer.encode("a  b 12.")


def test_half_precision_checkpoints_become_fp32(tmp_path: Path) -> None:
    policy = load(toy_checkpoint(tmp_path / "toy", "llama"))
    save_policy(policy.model.to(torch.bfloat16), policy.tokenizer, tmp_path / "half")
    assert load_file(tmp_path / "half" / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert {parameter.dtype for parameter in load(tmp_path / "half").model.parameters()} == {torch.float32}


def test_all_end_ids_count_and_reach_other_programs(folder: Path, tmp_path: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[5, 6])
    edit(folder / "config.json", eos_token_id=7)
    policy = load(folder)
    assert policy.eos_ids == {1, 5, 6, 7}
    save_policy(policy.model, policy.tokenizer, tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert plain.generation_config.eos_token_id == [1, 5, 6, 7]


def test_generation_settings_that_transformers_refuses_to_save_are_settled_at_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(folder / "generation_config.json", temperature=0.6, top_p=0.9)
    policy = load(folder)
    assert "set do_sample in generation_config.json" in caplog.text
    save_policy(policy.model, policy.tokenizer, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["temperature"] == 0.6


def test_without_a_padding_token_the_end_token_pads(folder: Path) -> None:
    edit(folder / "config.json", pad_token_id=None)
    edit(folder / "tokenizer_config.json", pad_token=None)
    assert load(folder).pad_id == 1


def test_a_longrope_context_ends_where_its_frequencies_would_change(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(folder).context == 256
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    edit(folder / "config.json", rope_parameters=rope | factors)
    assert load(folder).context == 64
    assert "the context is cut from 256 to 64 tokens" in caplog.text


def test_dropout_is_removed_and_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(folder / "config.json", attention_dropout=0.1)
    with caplog.at_level(logging.WARNING):
        policy = load(folder)
    assert policy.model.config.attention_dropout == 0
    tokens = torch.tensor([[5, 6, 7]])
    assert torch.equal(policy.model(tokens).logits, policy.model(tokens).logits)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "set attention_dropout to 0; reinforcement learning needs a model without dropout"
    ]


def test_weights_that_are_not_used_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"value_head.weight": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    load(folder)
    assert "Qwen3ForCausalLM does not use 1 weights of the checkpoint (value_head.weight)" in caplog.text


def remove(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def drop_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def no_end(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        edit(folder / name, eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)


def bigger_tokenizer(folder: Path) -> None:
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(folder)


def adapter(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    edit(folder / "adapter_config.json", peft_type="LORA")
    save_file({"a": torch.ones(1)}, folder / "adapter_model.safetensors")


def bert(folder: Path) -> None:
    config = BertConfig(vocab_size=300, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertForMaskedLM(config).save_pretrained(folder)


def bloom(folder: Path) -> None:
    config = BloomConfig(vocab_size=300, hidden_size=8, n_layer=1, n_head=1)
    BloomForCausalLM(config).save_pretrained(folder)


class Hostile:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self._made = str(folder / "made")

    def __reduce__(self) -> Any:
        return os.mkdir, (self._made,)


def pickled(folder: Path, content: Any) -> None:
    (folder / "model.safetensors").unlink()
    if content is None:
        (folder / "pytorch_model.bin").write_bytes(b"hello")
    else:
        torch.save(content, folder / "pytorch_model.bin")


WRONG: dict[str, tuple[Any, str]] = {
    "no config": (remove("config.json"), "has no config.json; give a folder in Hugging Face format"),
    "no weights": (remove("model.safetensors"), r"has no weights \(\*.safetensors\); the download or copy is incompl"),
    "no tokenizer": (remove("tokenizer.json"), r"has no tokenizer \(tokenizer.json\); copy the tokenizer files"),
    "adapter": (adapter, "holds an adapter; merge it into its base model"),
    "bert": (bert, "is BertForMaskedLM, not a causal language model"),
    "bloom": (bloom, "BloomForCausalLM does not use transformers' attention interface"),
    "base model": (
        lambda f: edit(f / "config.json", architectures=["Qwen3Model"]),
        "is Qwen3Model, not a causal language model",
    ),
    "vocabulary": (bigger_tokenizer, r"has ids up to 284, but the model has embeddings for 284 tokens"),
    "no end": (no_end, "names no end-of-sequence token, so no completion could end"),
    "end beyond": (
        lambda f: edit(f / "generation_config.json", eos_token_id=999),
        "the end-of-sequence id 999 is beyond the model's 284 tokens",
    ),
    "truncated weights": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
        "the weights cannot be read",
    ),
    "code in the weights": (
        lambda f: pickled(f, {"weight": Hostile(f)}),
        r"a file of PyTorch .* holds code \(posix.mkdir\); none of it was run. Get the weights as \*.safetensors$",
    ),
    "no pickle": (lambda f: pickled(f, None), "the weights cannot be read: KeyError: 101; a file is damaged"),
    "missing weight": (drop_weight, r"lacks 1 weights of Qwen3ForCausalLM \(model.layers.1.mlp.up_proj.weight\)"),
    "other sizes": (lambda f: edit(f / "config.json", intermediate_size=95), "the weights cannot be read"),
    "quantised": (
        lambda f: edit(f / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        "is quantised, which cannot be trained",
    ),
    "unknown architecture": (
        lambda f: edit(f / "config.json", model_type="nonesuch"),
        "config.json cannot be read: .*nonesuch",
    ),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "the tokenizer cannot be read"),
    "invalid generation": (
        lambda f: edit(f / "generation_config.json", early_stopping=True),
        "generation_config.json is not valid; correct or remove it: ",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_folder_says_what_is_wrong(case: str, folder: Path) -> None:
    spoil, message = WRONG[case]
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        load(folder)
    assert not (folder / "made").exists()


def test_a_folder_that_is_not_there(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match="nonesuch does not exist; give the folder of a checkpoint"):
        load(tmp_path / "nonesuch")
    with pytest.raises(ModelError, match="is a file; give the folder"):
        load(folder / "config.json")


def test_code_of_the_folder_runs_only_when_trusted(folder: Path) -> None:
    code = "from transformers import Qwen3Config\nclass MyConfig(Qwen3Config):\n    model_type = 'mine'\n"
    model = (
        "from transformers import Qwen3ForCausalLM\nfrom .configuration_mine import MyConfig\n"
        "class MyForCausalLM(Qwen3ForCausalLM):\n    config_class = MyConfig\n"
    )
    (folder / "configuration_mine.py").write_text(code)
    (folder / "modeling_mine.py").write_text(model)
    auto_map = {"AutoConfig": "configuration_mine.MyConfig", "AutoModelForCausalLM": "modeling_mine.MyForCausalLM"}
    edit(folder / "config.json", model_type="mine", architectures=["MyForCausalLM"], auto_map=auto_map)
    with pytest.raises(ModelError, match=r"model.trust_remote_code: true runs code of the folder"):
        load(folder)
    assert type(load(folder, trust_remote_code=True).model).__name__ == "MyForCausalLM"
