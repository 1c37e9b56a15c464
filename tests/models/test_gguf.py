"""GGUF files: written from a model of transformers as llama.cpp lays them out, they read back as that model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import TEMPLATE, tokens, write_gguf
from support.toys import toy_model, toy_tokenizer

from rollmill.config.model import LoRAConfig, ModelConfig
from rollmill.errors import ModelError
from rollmill.models.from_scratch import save_policy
from rollmill.models.load import PolicyModel, build_meta_model, load_policy, read_tokenizer_and_context
from rollmill.orchestrator.eval_targets import find_eval_targets
from rollmill.orchestrator.model_fingerprints import fingerprint
from rollmill.trainer.parity import load_verified_policy

CPU = torch.device("cpu")


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
