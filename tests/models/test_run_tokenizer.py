"""A run's tokenizer beside the run: the same tokens for whoever reads it later."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.toys import toy_tokenizer
from transformers import LlamaTokenizerFast

from rollmill.config.model import TokenizerConfig
from rollmill.errors import ModelError
from rollmill.models.from_scratch import train_tokenizer
from rollmill.models.run_tokenizer import (
    compute_fingerprint,
    load_run_fingerprint,
    load_run_tokenizer,
    save_run_tokenizer,
)

TEXTS = ["how many?\n", "  12 + 3 = 15 ", "é 你好 🙂", "<eos>", ""]


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_what_is_read_encodes_as_what_was_written(kind: str, tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(kind)
    save_run_tokenizer(tmp_path, tokenizer, 1)
    read = load_run_tokenizer(tmp_path)
    assert (read.end_id, read.fingerprint) == (1, compute_fingerprint(tokenizer))
    assert [read.tokenizer.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    chat = [{"role": "user", "content": "hi"}]
    assert read.tokenizer.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(
        chat, tokenize=False
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer"]


def test_special_tokens_in_front_are_kept(tmp_path: Path) -> None:
    """A class that adds a beginning of sequence by itself."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "b": 5}
    tokenizer = LlamaTokenizerFast(vocab=vocabulary, merges=[])
    save_run_tokenizer(tmp_path, tokenizer, 2)
    assert load_run_tokenizer(tmp_path).tokenizer.encode("ab") == tokenizer.encode("ab")


def test_the_fingerprint_is_that_of_the_vocabulary() -> None:
    texts = ["abc 123"]
    one, same, other = (train_tokenizer(TokenizerConfig(kind="char"), found) for found in (texts, texts, ["abc 124 é"]))
    assert compute_fingerprint(one) == compute_fingerprint(same) != compute_fingerprint(other)
    same.add_tokens(["<think>"])
    assert compute_fingerprint(one) != compute_fingerprint(same)


def test_a_resumed_run_leaves_it_and_another_vocabulary_replaces_it(tmp_path: Path) -> None:
    first, second = toy_tokenizer("bpe"), toy_tokenizer("char")
    save_run_tokenizer(tmp_path, first, 1)
    written = (tmp_path / "tokenizer/run.json").stat().st_mtime_ns
    save_run_tokenizer(tmp_path, first, 1)
    assert (tmp_path / "tokenizer/run.json").stat().st_mtime_ns == written
    save_run_tokenizer(tmp_path, second, 1)
    assert load_run_fingerprint(tmp_path) == compute_fingerprint(second)


def test_changed_files_are_noticed(tmp_path: Path) -> None:
    save_run_tokenizer(tmp_path, toy_tokenizer("char"), 1)
    path = tmp_path / "tokenizer/tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="does not encode text as it did when the run wrote it"):
        load_run_tokenizer(tmp_path)
    path.write_text("{")
    with pytest.raises(ModelError, match="the tokenizer cannot be read"):
        load_run_tokenizer(tmp_path)


def test_a_run_without_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no tokenizer/run\.json"):
        load_run_tokenizer(tmp_path)
    save_run_tokenizer(tmp_path, toy_tokenizer(), 1)
    (tmp_path / "tokenizer/run.json").write_text("{")
    with pytest.raises(ModelError, match=r"run\.json is not a JSON object"):
        load_run_fingerprint(tmp_path)


def test_no_torch_is_imported(tmp_path: Path) -> None:
    save_run_tokenizer(tmp_path, toy_tokenizer(), 1)
    code = (
        "import sys; from pathlib import Path; from rollmill.models.run_tokenizer import load_run_tokenizer; "
        f"load_run_tokenizer(Path({str(tmp_path)!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
