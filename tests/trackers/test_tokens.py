from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.run_factory import encode, experience, save_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rollmill.trackers.token_texts import advantage_levels, load_decoder, surprise_levels, token_texts


def test_the_newest_checkpoint_gives_the_tokenizer(tmp_path: Path) -> None:
    assert load_decoder(tmp_path) is None
    save_tokenizer(tmp_path / "checkpoints" / "step-9")
    (tmp_path / "checkpoints" / "step-10.tmp").mkdir()
    (tmp_path / "checkpoints" / "step-10.tmp" / "tokenizer.json").write_text("{")
    decode = load_decoder(tmp_path)
    assert decode is not None
    assert decode(encode("a <b> c\n")) == "a <b> c\n"


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 5, trainer)
    return tokenizer


@pytest.mark.parametrize(
    "text", ["the cat", " the  mat\n", "naïve 日本語 🙂 end", "🙂", "", "broken \ufffd\ufffd\ufffd mark"]
)
def test_token_texts_join_to_the_text(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text).ids
    one = experience(np.random.default_rng(0), "t", 0, "", "x" * len(ids), 1.0)
    one.token_ids = np.array(ids, np.int32)
    texts = token_texts(one, byte_level.decode)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_a_completion_cut_within_a_character_shows_so(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a🙂").ids[:-1]
    one = experience(np.random.default_rng(0), "t", 0, "", "x" * len(ids), 1.0)
    one.token_ids = np.array(ids, np.int32)
    assert "".join(token_texts(one, byte_level.decode)).startswith("a\ufffd")


def test_levels_follow_advantage_and_surprise_where_tokens_count() -> None:
    one = experience(np.random.default_rng(0), "t", 0, "p", "abcd", 1.0)
    one.advantage = np.array([9.0, 2.0, -1.0, 0.0, 0.01], np.float32)
    assert advantage_levels(one) == [0, 4, -2, 0, 1]
    one.advantage = None
    assert advantage_levels(one) == [0] * 5
    one.logprobs = np.array([-5.0, 0.0, np.log(0.5), np.log(1 / 1024), -np.inf], np.float32)
    assert surprise_levels(one) == [0, 0, 1, 6, 6]
