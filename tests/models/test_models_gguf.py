"""GGUF files: written from a model of transformers as llama.cpp lays them out, they read back as that model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import toy_model, toy_tokenizer

from rollmill.config.model import LoRAConfig, ModelConfig
from rollmill.errors import ModelError
from rollmill.models.from_scratch import save_policy
from rollmill.models.load import PolicyModel, build_meta_model, load_policy, read_tokenizer_and_context
from rollmill.orchestrator.eval_targets import find_eval_targets
from rollmill.orchestrator.model_fingerprints import fingerprint
from rollmill.trainer.parity import load_verified_policy

CPU = torch.device("cpu")
TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, model: Any, tokenizer: Any, *, quantized: bool = False) -> Path:
    """Writes a Llama model with a byte-level BPE tokenizer; `quantized`: its matrices in Q8_0, blocks of 32 weights."""
    gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")
    config, bpe = model.config, json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens(tokenizer))
    special = set(tokenizer.all_special_ids)
    kinds = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(len(tokenizer))]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.named_parameters():  # tied ones once
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        values = tensor.detach().float()
        if heads is not None:  # llama.cpp rotates neighbours, transformers halves
            values = values.view(heads, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized and values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values.contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokens(tokenizer: Any) -> list[str]:
    """The vocabulary in the order of its ids. transformers adds this end to byte-level vocabularies that lack it."""
    names = {tokenizer.eos_token: "<|endoftext|>"}
    return [names.get(token, token) for token in sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)]


def _gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"
    return {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }[name]


def toy(tied: bool = False) -> tuple[Any, Any]:
    tokenizer = toy_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return toy_model("llama", len(tokenizer), tie_word_embeddings=tied, **ids), tokenizer


def load(path: Path, **keys: Any) -> PolicyModel:
    return load_policy(ModelConfig(path=path, **keys), texts=[], seed=0, device=CPU)


def logits(model: Any, tokenizer: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokenizer.encode("how many apples? 12\n")])).logits
    return found


@pytest.mark.parametrize("name", ["toy.gguf", "."], ids=["file", "folder"])
def test_a_gguf_model_reads_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    model, tokenizer = toy()
    write_gguf(tmp_path / "toy.gguf", model, tokenizer)
    policy = load(tmp_path / name)
    assert torch.equal(logits(policy.model, policy.tokenizer), logits(model, tokenizer))
    assert tokens(policy.tokenizer) == tokens(tokenizer)
    assert policy.tokenizer.encode("a  b 12.\n") == tokenizer.encode("a  b 12.\n")
    assert policy.tokenizer.chat_template == TEMPLATE
    assert (policy.eos_ids, policy.pad_id, policy.context) == (frozenset([tokenizer.eos_token_id]), 0, 256)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in policy.model.parameters())


def test_quantised_weights_are_expanded_trained_and_saved(tmp_path: Path) -> None:
    model, tokenizer = toy(tied=True)
    policy = load(write_gguf(tmp_path / "toy.gguf", model, tokenizer, quantized=True))
    written = dict(model.named_parameters())
    for name, parameter in policy.model.named_parameters():
        step = written[name].detach().abs().max().item() / 127  # of Q8_0
        assert torch.allclose(parameter, written[name], atol=step, rtol=0), name
    loss = policy.model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in policy.model.parameters())
    save_policy(policy.model, policy.tokenizer, tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert torch.equal(logits(again.model, again.tokenizer), logits(policy.model, policy.tokenizer))
    assert again.tokenizer.chat_template == TEMPLATE


def test_engine_and_trainer_agree_with_a_gguf_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "toy.gguf", *toy())
    load_verified_policy(ModelConfig(path=path), texts=[], seed=0, device=CPU)
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1  # the check was made, and passed


def test_adapters_train_on_a_gguf_model(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed (extra `lora`)")
    model, tokenizer = toy()
    policy = load(write_gguf(tmp_path / "toy.gguf", model, tokenizer), lora=LoRAConfig(rank=2))
    trained = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


def test_sizes_and_tokenizer_are_read_without_the_weights(tmp_path: Path) -> None:
    model, tokenizer = toy()
    path = write_gguf(tmp_path / "toy.gguf", model, tokenizer)
    shapes = {name: parameter.shape for name, parameter in build_meta_model(path).named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in model.named_parameters()}
    read, context = read_tokenizer_and_context(path, trust=False)
    assert (tokens(read), context) == (tokens(tokenizer), 256)


def test_a_gguf_file_can_be_compared_with_others_and_is_recognised_again(tmp_path: Path) -> None:
    model, tokenizer = toy()
    path = write_gguf(tmp_path / "toy.gguf", model, tokenizer)
    [target] = find_eval_targets([path], "last")
    policy = target.load(0, CPU)  # type: ignore[union-attr]
    assert torch.equal(logits(policy.model, policy.tokenizer), logits(model, tokenizer))
    before = (target.identity(), fingerprint(path), fingerprint(tmp_path))
    assert before[1] == before[2]
    with torch.no_grad():
        for parameter in model.parameters():  # another training
            parameter.mul_(1.5)
    os.utime(write_gguf(path, model, tokenizer), ns=(0, 0))
    assert target.identity() != before[0]
    assert fingerprint(path) != before[1]


def test_several_gguf_files_are_refused(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"2 GGUF files \(a-Q4_0.gguf, a-Q8_0.gguf\); give the path of one"):
        load(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra `gguf`")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ModelError, match=r"broken.gguf: its configuration cannot be read"):
        load(tmp_path / "broken.gguf")


def test_without_the_library_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    (tmp_path / "toy.gguf").touch()
    with pytest.raises(ModelError) as error:
        load(tmp_path)
    assert str(error.value) == (
        f"{tmp_path / 'toy.gguf'} is a GGUF file, which needs the library gguf: pip install 'rollmill[gguf]'"
    )
