"""Checkpoints held against their own forward pass at load: right ones pass, wrong ones are refused and say where."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forks import Forks
from support.toys import toy_checkpoint, toy_model
from transformers import AttentionInterface

import rollmill.models.attention as hook
from bench.tiny_architectures import tiny_model
from rollmill.config.model import LoRAConfig, ModelConfig
from rollmill.engines.native import prefill
from rollmill.errors import ModelError
from rollmill.models.hf_forward import decoder_layers, shrink_model
from rollmill.models.load import load_policy
from rollmill.trainer import attention, attention_blocks
from rollmill.trainer.parity import check_parity, load_verified_policy, require_parity

CPU = torch.device("cpu")
FOLDER = Path("a folder")
SUPPORTED = {
    "gpt_oss": "attention sinks, sliding windows",
    "granite_swa": "sinks",
    "llama4_text": "chunked attention, positions counted by the layer",
    "phimoe": "a window that is in the mask alone, experts drawn in training mode",
    "qwen3_next": "gated delta rule",
    "qwen3_5_text": "gated delta rule",
    "lfm2": "short convolutions",
    "falcon_h1": "Mamba 2 beside attention",
    "bamba": "Mamba 2",
    "zamba2": "Mamba 2 with a least step size, which transformers' own decoding leaves out",
    "jamba": "Mamba 1, which cannot go on from a state with several tokens",
    "minimax": "lightning attention",
    "hrm_text": "layers that are run several times",
    "jetmoe": "experts of attention",
    "gemma2": "softcap",
    "deepseek_v3": "latent attention",
}


QUICK = ("gpt_oss", "llama4_text", "phimoe", "qwen3_next", "lfm2", "falcon_h1", "zamba2", "deepseek_v3")
"""One of each kind; `python -m bench architectures` runs all that transformers has."""


@pytest.mark.parametrize(
    "architecture",
    [
        name if name in QUICK else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.thorough])
        for name in SUPPORTED
    ],
)
def test_engine_and_trainer_compute_what_the_model_computes(architecture: str) -> None:
    gaps = check_parity(tiny_model(architecture), FOLDER)
    assert [gap.path.split(":")[0] for gap in gaps] == ["engine", "trainer", "trainer"]
    assert all(gap.value < 1e-4 and not gap.layer for gap in gaps), gaps


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("doge", "hands attention_mask to its attention, which rollmill's attention does not know"),
        ("inkling_text", "hands position_bias to its attention"),
        ("deepseek_v32", r"rollmill cannot run DeepseekV32ForCausalLM \(TypeError: .*; choose another architecture"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(architecture: str, message: str) -> None:
    with pytest.raises(ModelError, match=f"^model.path: a folder: .*{message}"):
        check_parity(tiny_model(architecture), FOLDER)


def test_what_is_computed_otherwise_is_refused(tmp_path: Path) -> None:
    """BERT's output layer is more than a matrix: the trainer's log-probs would be wrong."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ModelError, match=r"BertLMHeadModel would not be computed as .*: trainer: log-probs [1-9]\S* off"
    ):
        require_parity(tiny_model("bert"), tmp_path)


@pytest.mark.parametrize("architecture", ["gpt_oss", "llama4_text", "gemma2", "phimoe"])
def test_long_rows_are_attended_to_in_pieces_that_change_nothing(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks, chunks, soft-cap with a window, a window: as if masks and scores of a few tokens were too large."""
    cut: list[int] = []
    split = attention.split_queries

    def counted(*args: Any, **kwargs: Any) -> Any:
        pieces = split(*args, **kwargs)
        cut.append(len(pieces or ()))
        return pieces

    for name, value in {"MASK_ELEMENTS": 200, "SCORES": 800, "LEAST_PIECE": 5}.items():
        monkeypatch.setattr(attention_blocks, name, value)
        monkeypatch.setattr(prefill, name, value, raising=False)
    monkeypatch.setattr(attention, "split_queries", counted)
    gaps = check_parity(tiny_model(architecture), FOLDER)
    assert max(cut) > 2
    assert all(gap.value < 1e-4 and not gap.layer for gap in gaps), gaps


SCALED = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize(
    "kind",
    ["yarn", *(pytest.param(each, marks=[pytest.mark.slow, pytest.mark.thorough]) for each in ("linear", "llama3"))],
)
def test_scaled_positions_are_the_models_own_past_the_original_length(kind: str) -> None:
    """Prompts and completions of 35 and more tokens of models that were trained on 16."""
    rope = {"rope_type": kind, "rope_theta": 100.0, **SCALED[kind]}
    model = toy_model("llama", max_position_embeddings=128, rope_parameters=rope)
    gaps = check_parity(model, FOLDER)
    assert all(gap.value < 1e-4 and not gap.layer for gap in gaps), gaps
    plain = toy_model(
        "llama", max_position_embeddings=128, rope_parameters={"rope_type": "default", "rope_theta": 100.0}
    )
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert (model(input_ids=ids).logits[0, 30:] - plain(input_ids=ids).logits[0, 30:]).abs().max() > 0.01


def _without_sinks(*args: Any, s_aux: Any = None, **kwargs: Any) -> Any:
    return hook._attention(*args, **kwargs)


def test_attention_that_leaves_something_out_is_seen_with_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine and trainer agree with each other here: both leave the sinks out."""
    monkeypatch.setitem(AttentionInterface._global_mapping, hook.ATTENTION_IMPLEMENTATION, _without_sinks)
    engine, trainer, gradient = check_parity(tiny_model("gpt_oss"), FOLDER)
    assert min(engine.value, trainer.value, gradient.value) > 0.01
    assert engine.layer == trainer.layer == "model.layers.0 (GptOssDecoderLayer)"
    assert not engine.right
    assert not gradient.right


def test_an_unknown_argument_of_attention_is_an_error() -> None:
    model = tiny_model("llama")
    layer: Any = decoder_layers(model)[0].self_attn
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs, tilt=torch.ones(1))  # eager attention ignores it
    with pytest.raises(ModelError, match="LlamaAttention hands tilt to its attention, which rollmill's attention does"):
        check_parity(model, FOLDER)


def _without_gradient_of_queries(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return hook._attention(module, query.detach(), *args, **kwargs)


def test_a_gradient_that_is_cut_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, hook.ATTENTION_IMPLEMENTATION, _without_gradient_of_queries)
    engine, trainer, gradient = check_parity(tiny_model("llama"), FOLDER)
    assert engine.right
    assert trainer.right
    assert not gradient.right
    assert gradient.layer.startswith("model.")


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = tiny_model("gpt_oss").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_json_string()
    check_parity(model, FOLDER)
    assert model.training
    assert model.config.to_json_string() == config
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_frozen_model_is_checked_and_stays_frozen() -> None:
    """A teacher, whose folder another run may train."""
    model = tiny_model("qwen3").requires_grad_(False)
    assert all(gap.right for gap in check_parity(model, FOLDER))
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())


def test_large_models_are_checked_with_two_layers_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.models.hf_forward._SMALL", 0)
    model: Any = tiny_model("lfm2")
    layers, kinds = len(model.model.layers), list(model.config.layer_types)
    monkeypatch.setattr("rollmill.models.hf_forward._KEPT", 1)
    with shrink_model(model):
        assert len(model.model.layers) < layers
        assert len(model.model.layers) >= len(set(kinds))
        assert len(model.config.layer_types) == model.config.num_hidden_layers == len(model.model.layers)
    assert len(model.model.layers) == layers
    assert model.config.layer_types == kinds
    assert all(gap.right for gap in check_parity(model, FOLDER))


def test_windows_count_however_long_they_are() -> None:
    """The sequences of the check are shorter than this window, so it is narrowed for the time of the check."""
    model: Any = tiny_model("mistral")
    for module in (model.config, *(layer.self_attn for layer in model.model.layers)):
        module.sliding_window = 4000
    with shrink_model(model):
        assert model.config.sliding_window == 8
    assert model.config.sliding_window == 4000
    assert all(gap.right for gap in check_parity(model, FOLDER))


def test_a_checkpoint_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "cache"))
    config = ModelConfig(path=toy_checkpoint(tmp_path / "toy", "llama"))
    load_verified_policy(config, texts=[], seed=0, device=CPU)
    (note,) = (tmp_path / "cache" / "models").iterdir()
    assert [each["path"].split(":")[0] for each in json.loads(note.read_text())] == ["engine", "trainer", "trainer"]
    monkeypatch.setattr("rollmill.trainer.parity.check_parity", lambda *_: pytest.fail("checked again"))
    load_verified_policy(config, texts=[], seed=0, device=CPU)
    changed = json.loads((tmp_path / "toy" / "config.json").read_text()) | {"rms_norm_eps": 0.01}
    (tmp_path / "toy" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(pytest.fail.Exception, match="checked again"):
        load_verified_policy(config, texts=[], seed=0, device=CPU)


def test_a_checkpoint_whose_own_code_has_changed_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that `trust_remote_code` runs may compute something else with the same configuration."""
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "cache"))
    folder = toy_checkpoint(tmp_path / "toy", "llama")
    checked: list[Path] = []
    monkeypatch.setattr("rollmill.trainer.parity.check_parity", lambda model, folder: checked.append(folder) or [])
    model = load_policy(ModelConfig(path=folder), texts=[], seed=0, device=CPU).model
    for code in (None, "SCALE = 1\n", "SCALE = 1\n", "SCALE = 2\n"):
        if code is not None:
            (folder / "modeling_own.py").write_text(code)
        require_parity(model, folder)
    assert checked == [folder] * 3


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "cache"))
    folder = toy_checkpoint(tmp_path / "toy", "llama")
    assert load_verified_policy(ModelConfig(path=folder), texts=[], seed=0, device=CPU).model is not None


def test_models_with_adapters_are_checked(tmp_path: Path) -> None:
    folder = toy_checkpoint(tmp_path / "toy", "llama")
    policy = load_policy(ModelConfig(path=folder, lora=LoRAConfig(rank=2)), texts=[], seed=0, device=CPU)
    assert all(gap.right for gap in check_parity(policy.model, folder))


@pytest.mark.slow
def test_the_command_prints_the_table(tmp_path: Path, server: Forks) -> None:
    folder = toy_checkpoint(tmp_path / "toy", "qwen3")
    done = server.run("check", "--model", folder, folder=tmp_path)
    assert done.code == 0, done.err
    assert "Qwen3ForCausalLM" in done.out
    assert [re.split(" {2,}", line)[3] for line in done.out.splitlines()[2:]] == ["right"] * 3
    answer = json.loads(server.run("check", "--model", folder, "--json", folder=tmp_path).out)
    assert answer["right"]
    assert len(answer["gaps"]) == 3
    neither = server.run("check", folder=tmp_path)
    assert (neither.code, "give a run file, or --model" in neither.err) == (2, True)
    missing = server.run("check", "--model", tmp_path / "nonesuch", folder=tmp_path)
    assert missing.code == 1
    assert "does not exist" in missing.err
