"""Reward models as Hugging Face folders: transformers gives the same scores, and what is no reward model is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import toy_checkpoint, toy_model, toy_tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CohereConfig,
    CohereForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from rollmill.errors import ModelError
from rollmill.models.classifier import load_classifier, require_classifier_support, save_classifier
from rollmill.trainer.reward_trainer import ScoringNetwork

CPU = torch.device("cpu")
TEXTS = ["how many apples are there?", "the answer is 12", "12"]


def write(folder: Path, architecture: str, *, end_is_padding: bool = False) -> tuple[ScoringNetwork, list[list[int]]]:
    """A scoring model written to a folder, and some ended sequences."""
    tokenizer = toy_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token if end_is_padding else tokenizer.pad_token
    policy = toy_model(architecture, len(tokenizer))
    scored = ScoringNetwork(policy)
    torch.nn.init.normal_(scored.head.weight, generator=torch.Generator().manual_seed(1))
    end: int = tokenizer.eos_token_id
    save_classifier(policy, scored.network, scored.head, tokenizer, folder, end_id=end)
    return scored, [[*tokenizer.encode(text), end] for text in TEXTS]


def own_scores(scored: ScoringNetwork, sequences: list[list[int]]) -> list[float]:
    with torch.no_grad():
        states = [scored.network(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1] for ids in sequences]
        return [float(scored.head(state)) for state in states]


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma", "gemma2", "qwen2"])
def test_transformers_gives_the_same_scores(tmp_path: Path, architecture: str) -> None:
    scored, sequences = write(tmp_path, architecture)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.config.num_labels == 1
    longest = max(map(len, sequences))
    padded = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids in sequences])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences])
    with torch.no_grad():
        found = loaded(input_ids=padded, attention_mask=mask).logits[:, 0].tolist()
    assert found == pytest.approx(own_scores(scored, sequences), abs=1e-4, rel=1e-5)
    assert max(found) - min(found) > 0.1


def test_an_end_that_is_also_padding_is_scored(tmp_path: Path) -> None:
    scored, sequences = write(tmp_path, "qwen3", end_is_padding=True)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        found = [float(loaded(input_ids=torch.tensor([ids])).logits) for ids in sequences]
    assert found == pytest.approx(own_scores(scored, sequences), abs=1e-5)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, "qwen3")
    model, tokenizer = load_classifier(tmp_path, CPU)
    assert (model.dtype, model.training, tokenizer.eos_token) == (torch.float32, False, "<eos>")
    assert not any(p.requires_grad for p in model.parameters())
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # others may read it as the umask says


def test_reading_and_writing_leave_the_random_state(tmp_path: Path) -> None:
    write(tmp_path, "qwen3")
    before = torch.get_rng_state()
    load_classifier(tmp_path, CPU)
    require_classifier_support(toy_model("qwen3"))
    assert torch.equal(torch.get_rng_state(), before)


def _two_outputs(folder: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 300}
    LlamaForSequenceClassification(LlamaConfig(**sizes, intermediate_size=16)).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)


def _causal(folder: Path) -> None:
    toy_checkpoint(folder, "qwen3")


def _without_head(folder: Path) -> None:
    toy_checkpoint(folder, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "score"}}
    (folder / "config.json").write_text(json.dumps(config))


def _damaged(folder: Path) -> None:
    write(folder, "qwen3")
    (folder / "model.safetensors").write_bytes(b"nothing")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "has no config.json; give the folder of a reward model"),
        (_causal, "is Qwen3ForCausalLM, not a sequence classifier"),
        (_two_outputs, "has 2 outputs, and a reward model has one"),
        (_without_head, r"lacks weights of Qwen3ForSequenceClassification \(score.weight\)"),
        (_damaged, "cannot be read: "),
    ],
)
def test_what_is_no_reward_model_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path)
    with pytest.raises(ModelError, match=f"reward `model`: {tmp_path}.*{message}"):
        load_classifier(tmp_path, CPU)


def test_an_architecture_without_a_classifier_is_refused() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 30}
    model = CohereForCausalLM(CohereConfig(**sizes, intermediate_size=16))
    with pytest.raises(ModelError, match="transformers has no sequence classifier for CohereForCausalLM"):
        require_classifier_support(model)
    for architecture in ("qwen3", "llama", "gemma", "gemma2", "qwen2"):
        require_classifier_support(toy_model(architecture))
