"""Pieces of parameters are the weights that transformers writes into a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.picture_models import FAMILIES, load_seeing
from support.toys import toy_model
from transformers.core_model_loading import revert_weight_conversion

from rollmill.weights.stored_parts import stored_parts, take_part


def require_equal(model: Any) -> int:
    """Compare all weights with transformers' own; the number of parameters that differ in a checkpoint."""
    own = {name: each.detach() for name, each in model.named_parameters()}
    parts = json.loads(json.dumps(stored_parts(model)))  # as they are sent
    taken: dict[str, torch.Tensor] = {}
    for name, weight in own.items():
        taken |= {part[0]: take_part(weight, part) for part in parts[name]} if name in parts else {name: weight}
    stored = revert_weight_conversion(model, dict(own))
    assert taken.keys() == stored.keys()
    for name, weight in stored.items():
        assert torch.equal(taken[name], weight), name
    return len(parts)


@pytest.mark.parametrize(("kind", "differ"), [("qwen3", 0), ("qwen3_moe", 4), ("mixtral", 6)])
def test_of_text_models(kind: str, differ: int) -> None:
    assert require_equal(toy_model(kind)) == differ


@pytest.mark.parametrize("family", FAMILIES)
def test_of_vision_language_models(family: str, tmp_path: Path) -> None:
    require_equal(load_seeing(tmp_path, family).model)
