"""What tensor parallelism asks of a model. (Its results: test_ranks.py and test_ranked.py.)"""

from __future__ import annotations

from typing import Any

import pytest

from rollmill.errors import ConfigError
from rollmill.trainer.distributed.tensor_parallel import tensor_parallel_plan


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gemma", "gemma2"])
def test_every_matrix_of_a_layer_is_cut(toy: Any, architecture: str) -> None:
    model = toy(architecture)
    styles = tensor_parallel_plan(model, 2)
    matrices = {name for name, each in model.base_model.layers.named_parameters() if each.ndim == 2}
    assert {f"layers.{name.removesuffix('.weight')}" for name in matrices} <= styles.keys()


@pytest.mark.parametrize(
    ("architecture", "changes", "ranks", "said"),
    [
        ("qwen3_moe", {}, 2, "the plan of qwen3_moe for tensor parallelism has parts that rollmill cannot cut"),
        ("qwen3", {}, 4, r"trainer.ranks: 4 cannot share 2 \(num_key_value_heads of the model\)"),
        ("qwen3", {"intermediate_size": 49}, 2, r"2 cannot share 49 \(out_features of layers.0.mlp.gate_proj"),
    ],
)
def test_a_model_that_cannot_be_cut_is_an_error(
    toy: Any, architecture: str, changes: dict[str, Any], ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*use sharding: fsdp or none"):
        tensor_parallel_plan(toy(architecture, **changes), ranks)


def test_a_model_without_a_plan_is_an_error(toy: Any) -> None:
    model = toy("llama")
    model.config.base_model_tp_plan = None
    with pytest.raises(ConfigError, match="transformers has no plan for tensor parallelism of llama"):
        tensor_parallel_plan(model, 2)
