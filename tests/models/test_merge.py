"""Averages of checkpoints: the numbers, the files, and checkpoints that do not fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.toys import toy_checkpoint, toy_model, toy_tokenizer
from transformers import AutoModelForCausalLM

from rollmill.config.model import ModelConfig
from rollmill.errors import ModelError
from rollmill.models.from_scratch import save_policy
from rollmill.models.load import load_policy
from rollmill.models.merge import merge_checkpoints

EQUAL = [0.5, 0.5]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, whatever its files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite the weights of an unsharded checkpoint."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def generated(model: Any) -> list[list[int]]:
    """Greedy continuations of every pair of 20 tokens."""
    prompts = torch.arange(2, 42).view(20, 2)
    tokens: list[list[int]] = model.generate(prompts, max_new_tokens=24, do_sample=False).tolist()
    return tokens


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    """Two checkpoints of one architecture, not tied."""
    return [toy_checkpoint(tmp_path / name, "qwen3", seed) for name, seed in (("a", 1), ("b", 2))]


@pytest.fixture
def tied(tmp_path: Path) -> list[Path]:
    """Two checkpoints with tied embeddings, saved once."""
    return [
        toy_checkpoint(tmp_path / name, "qwen3", seed, tie_word_embeddings=True) for name, seed in (("a", 1), ("b", 2))
    ]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gemma", "gemma2"])
def test_the_average_computes_what_a_model_averaged_by_hand_computes(architecture: str, tmp_path: Path) -> None:
    folders = [toy_checkpoint(tmp_path / str(seed), architecture, seed) for seed in (1, 2)]
    merge_checkpoints(folders, tmp_path / "out", EQUAL)
    first, second = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    with torch.no_grad():
        for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
            ours.copy_(((ours.double() + theirs.double()) / 2).float())
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(merged(tokens).logits, first(tokens).logits)
    assert generated(merged) == generated(first) != generated(second)
    policy = load_policy(ModelConfig(path=tmp_path / "out"), texts=[], seed=0, device=torch.device("cpu"))
    assert generated(policy.model.eval()) == generated(first)
    assert policy.tokenizer.get_vocab() == toy_tokenizer().get_vocab()


def test_shares_weigh_the_checkpoints_in_their_order(pair: list[Path], tmp_path: Path) -> None:
    third = toy_checkpoint(tmp_path / "c", "qwen3", 3)
    merge_checkpoints([*pair, third], tmp_path / "out", [0.5, 0.75, -0.25])
    a, b, c = (weights(folder) for folder in (*pair, third))
    for name, tensor in weights(tmp_path / "out").items():
        expected = 0.5 * a[name].double() + 0.75 * b[name].double() - 0.25 * c[name].double()
        assert torch.equal(tensor, expected.float()), name


@pytest.mark.parametrize("method", ["linear", "slerp"])
def test_shares_of_one_and_zero_give_one_checkpoint_bit_for_bit(method: str, pair: list[Path], tmp_path: Path) -> None:
    change(pair[0], lambda tensors: tensors[EMBEDDING][0].fill_(-0.0))
    change(pair[1], lambda tensors: tensors[EMBEDDING][1].fill_(math.nan))  # what counts for nothing is not read
    merge_checkpoints(pair, tmp_path / "first", [1.0, 0.0], method=method)
    assert (tmp_path / "first" / WEIGHTS).read_bytes() == (pair[0] / WEIGHTS).read_bytes()
    change(pair[1], lambda tensors: tensors[EMBEDDING][1].fill_(1))
    merge_checkpoints(pair, tmp_path / "second", [0.0, 1.0], method=method)
    assert (tmp_path / "second" / WEIGHTS).read_bytes() == (pair[1] / WEIGHTS).read_bytes()


def test_the_average_of_equal_checkpoints_is_that_checkpoint(pair: list[Path], tmp_path: Path) -> None:
    merge_checkpoints([pair[0]] * 3, tmp_path / "out", [1 / 3] * 3)
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (pair[0] / WEIGHTS).read_bytes()


def test_tensors_larger_than_a_piece(pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merge_checkpoints(pair, tmp_path / "whole", [0.3, 0.7])
    monkeypatch.setattr("rollmill.models.merge._PIECE", 1000)
    merge_checkpoints(pair, tmp_path / "pieces", [0.3, 0.7])
    assert (tmp_path / "pieces" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


def test_slerp_keeps_to_the_arc(pair: list[Path], tmp_path: Path) -> None:
    along = torch.zeros(64)
    for folder, place in zip(pair, (0, 1), strict=True):
        vector = along.clone()
        vector[place] = 2.0
        change(folder, lambda tensors, vector=vector: tensors.update({"model.norm.weight": vector}))
    change(pair[1], lambda tensors: tensors.update({HEAD: 3 * weights(pair[0])[HEAD]}))
    merge_checkpoints(pair, tmp_path / "out", [2 / 3, 1 / 3], method="slerp")
    merged, a = weights(tmp_path / "out"), weights(pair[0])
    expected = along.clone()
    expected[:2] = torch.tensor([2 * math.cos(math.pi / 6), 2 * math.sin(math.pi / 6)])
    torch.testing.assert_close(merged["model.norm.weight"], expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(merged[HEAD], a[HEAD] * 5 / 3, rtol=1e-6, atol=1e-7)  # parallel: the line


def test_the_first_checkpoint_decides_on_the_type(pair: list[Path], tmp_path: Path) -> None:
    half = AutoModelForCausalLM.from_pretrained(pair[0]).bfloat16()
    save_policy(half, toy_tokenizer(), tmp_path / "half")
    first = merge_checkpoints([tmp_path / "half", pair[1]], tmp_path / "out", EQUAL)
    assert first["dtypes"] == ["bfloat16"]
    a, b, merged = weights(tmp_path / "half"), weights(pair[1]), weights(tmp_path / "out")
    for name, tensor in merged.items():
        assert torch.equal(tensor, ((a[name].double() + b[name].double()) / 2).bfloat16()), name
    assert merge_checkpoints([pair[1], tmp_path / "half"], tmp_path / "wide", EQUAL)["dtypes"] == ["float32"]


def test_another_type_can_be_chosen(pair: list[Path], tmp_path: Path) -> None:
    assert merge_checkpoints(pair, tmp_path / "out", EQUAL, dtype="bf16")["dtypes"] == ["bfloat16"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    change(pair[0], lambda tensors: tensors[EMBEDDING][0].fill_(1e6))
    with pytest.raises(ModelError, match=r"embed_tokens.weight: the average is beyond the largest torch.float16"):
        merge_checkpoints(pair, tmp_path / "small", EQUAL, dtype="fp16")


def test_sharded_checkpoints_keep_their_files(pair: list[Path], tmp_path: Path) -> None:
    merge_checkpoints(pair, tmp_path / "plain", EQUAL)
    shard(pair[0])
    summary = merge_checkpoints(pair, tmp_path / "out", EQUAL)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in pair[0].iterdir()}
    expected, index = weights(tmp_path / "plain"), json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * summary["parameters"] == sum(t.nbytes for t in expected.values())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "out").items())
    merge_checkpoints(pair[::-1], tmp_path / "joined", EQUAL)
    assert (tmp_path / "joined" / WEIGHTS).read_bytes() == (tmp_path / "plain" / WEIGHTS).read_bytes()
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "plain"))
    assert generated(one) == generated(two)


def shard(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    assert (folder / INDEX).is_file()


@pytest.mark.parametrize("doubled", [(), (0,), (1,), (0, 1)])
def test_tied_embeddings_stay_tied_however_they_are_saved(
    doubled: tuple[int, ...], tied: list[Path], tmp_path: Path
) -> None:
    assert HEAD not in weights(tied[0])
    expected = (weights(tied[0])[EMBEDDING].double() + weights(tied[1])[EMBEDDING].double()) / 2
    for index in doubled:
        change(tied[index], lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    merge_checkpoints(tied, tmp_path / "out", EQUAL)
    assert set(weights(tmp_path / "out")) == set(weights(tied[0]))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, expected.float())


def test_a_head_of_its_own_is_not_taken_for_a_tied_one(pair: list[Path], tied: list[Path], tmp_path: Path) -> None:
    own = toy_checkpoint(tmp_path / "own", "qwen3", 3)
    with pytest.raises(ModelError, match=r"b lacks 1 tensors that .*own has \(lm_head.weight\)"):
        merge_checkpoints([own, tied[1]], tmp_path / "out", EQUAL)
    with pytest.raises(ModelError, match=r"b lacks 1 tensors that .*own has \(lm_head.weight\)"):
        merge_checkpoints([tied[1], own], tmp_path / "out", EQUAL)


def test_settings_come_from_the_first_and_a_runs_state_from_none(pair: list[Path], tmp_path: Path) -> None:
    for folder, end in zip(pair, (5, 6), strict=True):
        edit_json(folder / "generation_config.json", eos_token_id=[1, end])
        for name in ("state.json", "trainer.pt", "README.md"):
            (folder / name).write_text("{}")
    (pair[0] / "additional_chat_templates").mkdir()
    (pair[0] / "additional_chat_templates" / "tools.jinja").write_text("x")
    merge_checkpoints(pair, tmp_path / "out", EQUAL)
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {
        *("config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "additional_chat_templates/tools.jinja"),
    }
    for name in files - {WEIGHTS}:
        assert (tmp_path / "out" / name).read_bytes() == (pair[0] / name).read_bytes()


def test_integers_are_taken_over_and_must_agree(pair: list[Path], tmp_path: Path) -> None:
    for folder in pair:
        change(folder, lambda tensors: tensors.update(positions=torch.arange(5)))
    merge_checkpoints(pair, tmp_path / "out", EQUAL, dtype="bf16")
    assert torch.equal(weights(tmp_path / "out")["positions"], torch.arange(5))
    change(pair[1], lambda tensors: tensors.update(positions=torch.zeros(5, dtype=torch.int64)))
    with pytest.raises(ModelError, match=r"b: positions \(torch.int64\) differs from that of .*a; only floating-point"):
        merge_checkpoints(pair, tmp_path / "other", EQUAL)


def test_tokenizers_without_tokenizer_json_are_compared(tmp_path: Path) -> None:
    folders = [toy_checkpoint(tmp_path / str(seed), "qwen2", seed) for seed in (1, 2)]
    for folder in folders:
        inner = json.loads((folder / "tokenizer.json").read_text())["model"]
        (folder / "vocab.json").write_text(json.dumps(inner["vocab"]))
        (folder / "merges.txt").write_text("".join(" ".join(merge) + "\n" for merge in inner["merges"]))
        (folder / "tokenizer.json").unlink()
    merge_checkpoints(folders, tmp_path / "out", EQUAL)
    assert (tmp_path / "out" / "merges.txt").is_file()
    vocabulary = json.loads((folders[1] / "vocab.json").read_text())
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folders[1] / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ModelError, match=r"2: the tokenizer differs from that of .*1 in 2 tokens \('a', 'b'\)"):
        merge_checkpoints(folders, tmp_path / "other", EQUAL)


def other_tokenizer(folder: Path) -> None:
    toy_tokenizer("char").save_pretrained(folder)


def wider(folder: Path) -> None:
    save_policy(toy_model("qwen3", 320), toy_tokenizer(), folder)


def other_type(folder: Path) -> None:
    toy_checkpoint(folder, "llama")


def unindexed(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).unlink()


def list_as_index(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).write_text("[]")


def lost_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00007.safetensors").unlink()


def emptied_shard(folder: Path) -> None:
    shard(folder)
    save_file({}, folder / "model-00002-of-00007.safetensors")


def outside(folder: Path) -> None:
    shard(folder)
    edit_json(folder / INDEX, weight_map={EMBEDDING: "../a/model.safetensors"})


def truncated(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **values)


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (
        remove("config.json"),
        r"b is not a checkpoint \(no config.json\); give a folder in Hugging Face format",
    ),
    "no weights": (remove(WEIGHTS), r"b has neither model.safetensors nor .*index.json; the copy is incomplete, or of"),
    "no index": (unindexed, r"b has neither model.safetensors nor .*index.json; the copy is incomplete"),
    "no tokenizer": (remove("tokenizer.json"), r"b has no tokenizer \(tokenizer.json\); copy the tokenizer files"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), r"b: the tokenizer cannot be read: "),
    "broken config": (lambda f: (f / "config.json").write_text("{"), r"b cannot be read: .*; fix it or copy it again"),
    "config that is a list": (lambda f: (f / "config.json").write_text("[]"), r"b cannot be read: 'list' object"),
    "index that is a list": (list_as_index, r"b cannot be read: list indices must be integers"),
    "truncated": (truncated, r"b cannot be read: .*; fix it or copy it again"),
    "lost shard": (lost_shard, r"b lacks the weight files model-00002-of-00007.safetensors; the download or copy is"),
    "emptied shard": (
        emptied_shard,
        r"b: model.safetensors.index.json names tensors that no file holds \(model.embed_tokens.weight\)",
    ),
    "file outside": (outside, r"b lacks the weight files ../a/model.safetensors"),
    "adapter": (adapter, r"b holds an adapter; merge it into its base model and give that folder"),
    "quantised": (config(quantization_config={"bits": 4}), r"b is quantised, which cannot be averaged; give the unqua"),
    "architecture": (
        other_type,
        r"b: config.json: architectures is \['LlamaForCausalLM'\], but \['Qwen3ForCausalLM'\]",
    ),
    "heads": (config(num_attention_heads=2), r"b: config.json: num_attention_heads is 2, but 4 in .*a; only"),
    "rotation": (
        config(rope_parameters=None, rope_theta=5.0),
        r"b: config.json: rope_theta is 5.0, but 10000.0 in .*a",
    ),
    "scaled rotation": (
        config(rope_parameters={"rope_theta": 10000.0, "rope_type": "yarn", "factor": 2}),
        r"b: config.json: rope_type is yarn, but default in .*a",
    ),
    "vocabulary size": (wider, r"b: lm_head.weight has shape \[320, 64\], but \[284, 64\] in .*a; only checkpoints of"),
    "missing tensor": (
        lambda f: change(f, lambda tensors: tensors.pop("model.norm.weight")),
        r"b lacks 1 tensors that .*a has \(model.norm.weight\); only checkpoints with the same tensors",
    ),
    "tensor of its own": (
        lambda f: change(f, lambda tensors: tensors.update(value_head=torch.ones(3))),
        r"a lacks 1 tensors that .*b has \(value_head\)",
    ),
    "tokenizer": (
        other_tokenizer,
        r"b: the tokenizer differs from that of .*a in \d+ tokens \(.*, \.\.\.\); if the model",
    ),
    "not finite": (
        lambda f: change(f, lambda tensors: tensors["model.norm.weight"][3:4].fill_(math.inf)),
        r"b: model.norm.weight holds values that are not finite; that checkpoint is broken",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_checkpoint_that_does_not_fit_is_named(case: str, pair: list[Path], tmp_path: Path) -> None:
    spoil, message = WRONG[case]
    spoil(pair[1])
    with pytest.raises(ModelError, match=message):
        merge_checkpoints(pair, tmp_path / "out", EQUAL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]  # nothing is left behind


def test_folders_that_are_not_there(pair: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nonesuch does not exist; give the folder of a checkpoint"):
        merge_checkpoints([pair[0], tmp_path / "nonesuch"], tmp_path / "out", EQUAL)
    with pytest.raises(ModelError, match=r"config.json is a file; give the folder"):
        merge_checkpoints([pair[0] / "config.json", pair[1]], tmp_path / "out", EQUAL)
