"""Test of `bench architectures` for vision-language models.

Families that are trained are tested as tiny checkpoints, by the check that a run makes at load, with pictures of
different sizes. Other types are only refused, for the reason that a run gives.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.ours.architectures import Finding, guarded, without_folder
from bench.tiny_pictures import FAMILIES, picture_checkpoint, picture_tokenizer
from rollmill.config.model import ModelConfig
from rollmill.engines.native.parity_check import parity_error
from rollmill.models.hf_forward import picture_prompts
from rollmill.models.load import load_policy
from rollmill.trainer.parity import check_parity


@dataclass
class PictureFinding(Finding):
    """Result for one type. The rollout gap includes chunked prefill."""

    picture_tokens: list[int] = field(default_factory=list)  #: of each prompt that was compared


def picture_types() -> dict[str, str]:
    """Class of every type that AutoModelForImageTextToText knows, without those that are judged as text models."""
    from transformers.models.auto import modeling_auto

    text = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return {kind: name for kind, name in found.items() if not (name == text.get(kind) and "ForCausalLM" in name)}


def judge_pictures(kind: str, folder: Path) -> Finding:
    """Load a checkpoint of this type from `folder` as a run does, and compare with the model's own forward pass.

    A family that is trained is `wrong` where a gap is not a rounding error: a run would refuse it at load. Of another
    type there is only a config.json, which is enough to be refused.
    """
    finding = PictureFinding(kind, model=picture_types()[kind])
    if kind in FAMILIES:
        picture_checkpoint(folder, kind)
    else:
        _write_config(kind, finding.model, folder)
    config = ModelConfig(path=folder)
    policy = guarded(
        finding, "load", lambda: load_policy(config, texts=[], seed=0, device=torch.device("cpu"), pictures=True)
    )
    if policy is None:
        return without_folder(folder, finding)
    model = policy.model
    finding.parameters = sum(parameter.numel() for parameter in model.parameters())
    token = model.picture_processor.image_token_id
    finding.picture_tokens = [prompt.token_ids.count(token) for prompt in picture_prompts(model)]
    gaps = guarded(finding, "load", lambda: check_parity(model, folder))
    if gaps is not None:
        finding.rollout_gap, finding.training_gap, finding.gradient = (gap.value for gap in gaps)
        if wrong := [gap for gap in gaps if not gap.right]:
            finding.verdict, finding.why = "wrong", str(parity_error(folder, model, wrong))
    return without_folder(folder, finding)


def _write_config(kind: str, name: str, folder: Path) -> None:
    """Write a folder with the type's default configuration, a tokenizer, and a file in place of weights."""
    config = {"model_type": kind, "architectures": [name], "quantization_config": None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    picture_tokenizer("<image>").save_pretrained(folder)
