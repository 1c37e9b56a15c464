"""New models and their tokenizers."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.toys import toy_tokenizer

from rollmill.config.model import ModelConfig, NewModelConfig, TokenizerConfig
from rollmill.models.from_scratch import train_tokenizer
from rollmill.models.load import PolicyModel, load_policy

TEXTS = ["12+34=46\n", "Fünf Äpfel, 七个 🍎🍎!", "  spaces  and\ttabs , not . cleaned 's"] * 2
CHARACTERS = sorted(set("".join(TEXTS)))
BPE = toy_tokenizer()
CHAR = train_tokenizer(TokenizerConfig(kind="char"), TEXTS)


def new(seed: int = 0, kind: str = "char", **sizes: Any) -> PolicyModel:
    config = NewModelConfig.model_validate(
        {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "context": 64, "tokenizer": {"kind": kind}} | sizes
    )
    return load_policy(ModelConfig(new=config), texts=lambda: TEXTS, seed=seed, device=torch.device("cpu"))


@given(st.text())
def test_bpe_gives_back_any_text(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


@given(st.text(CHARACTERS))
def test_char_gives_back_covered_text_one_token_per_character(text: str) -> None:
    ids = CHAR.encode(text)
    assert len(ids) == len(text)
    assert CHAR.decode(ids) == text


def test_char_marks_what_it_does_not_cover() -> None:
    assert CHAR.decode(CHAR.encode("1€2")) == "1<unk>2"
    assert CHAR.get_vocab().keys() == {"<pad>", "<eos>", "<unk>", *CHARACTERS, *"system: user: assistant:\n"}


def test_bpe_merges_words_but_never_digits_and_keeps_its_bound() -> None:
    tokenizer = train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=280), ["the cat 2024 the cat 2024"] * 9)
    assert len(tokenizer) <= 280
    assert tokenizer.tokenize("the cat 2024") == ["the", "Ġcat", "Ġ", "2", "0", "2", "4"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)


def test_an_assistants_turn_of_a_chat_ends_with_the_end_token() -> None:
    chat = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "!"}]
    for tokenizer in (BPE, CHAR):
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ids.count(tokenizer.eos_token_id) == 1
        assert tokenizer.decode(ids) == "user:\n2+2\n\nassistant:\n4<eos>\n\nuser:\n!\n\nassistant:\n"


@pytest.mark.slow
def test_the_same_texts_give_the_same_tokenizer_in_another_process() -> None:
    code = (
        "import hashlib; from rollmill.models.from_scratch import train_tokenizer; "
        "from rollmill.config.model import TokenizerConfig as C; import random; r = random.Random(0); "
        "t = [''.join(r.choices('abcdef ', k=50)) for _ in range(200)]; "
        "print([hashlib.sha256(train_tokenizer(C(kind=k, vocab_size=600), t).backend_tokenizer.to_str().encode())"
        ".hexdigest() for k in ('char', 'bpe')])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(code, {})
    assert shown.stdout == here.getvalue()


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "gemma"])
@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_new_model_fits_its_recipe_and_its_tokenizer(architecture: str, kind: str) -> None:
    policy = new(kind=kind, architecture=architecture, head_dim=10, intermediate_size=50, tie_embeddings=False)
    config = policy.model.config
    assert config.model_type == architecture
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 2, 4)
    assert (config.num_key_value_heads, config.head_dim, config.intermediate_size) == (2, 10, 50)
    attention = policy.model.model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (40, 32)
    assert attention.k_proj.weight.shape == (20, 32)
    assert policy.model.get_input_embeddings().weight.shape == (len(policy.tokenizer), 32)
    assert policy.model.lm_head.weight is not policy.model.get_input_embeddings().weight
    assert (policy.eos_ids, policy.pad_id, policy.context) == (frozenset([1]), 0, 64)
    policy.model(torch.tensor([[3, 4, 5]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.model.parameters())


def test_the_seed_makes_the_weights_and_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, second, other = new(seed=4), new(seed=4), new(seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    embeddings = [policy.model.get_input_embeddings().weight for policy in (first, other)]
    assert not torch.equal(*embeddings)


def test_initial_weights_have_the_spread_asked_for() -> None:
    policy = new(hidden_size=128, initializer_range=0.06)
    assert policy.model.lm_head.weight is policy.model.get_input_embeddings().weight
    assert policy.model.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.06, rel=0.05)
