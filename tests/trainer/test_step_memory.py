"""What a step is said to take is what it takes: the trainer's own step on fake tensors, which have no memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from support.fake_training import FakePeak, completions, fake_steps
from torch.testing._internal.distributed.fake_pg import FakeStore

from rollmill.apps.plan.planning.presets import planned_model
from rollmill.config.model import LoRAConfig, ModelConfig
from rollmill.config.run import StageConfig
from rollmill.models.gpu_kinds import GPU_KINDS
from rollmill.models.load import build_meta_policy
from rollmill.orchestrator.memory_choice import MemoryChoice, choose_memory
from rollmill.orchestrator.stage_memory import StageModel, StepTokens

pytestmark = pytest.mark.slow
CLOSE = 0.1


def stage(**sections: Any) -> StageConfig:
    rollout = {"batch": 16, "group_size": 8, "max_new_tokens": 993}
    section = {"taskset": {"path": "tasks.jsonl"}, "algorithm": {"name": "grpo"}, "rollout": rollout}
    return StageConfig.model_validate(section | sections)


def chosen(model: ModelConfig, config: StageConfig, *, explorers: list[StageConfig] | None = None) -> MemoryChoice:
    """What a run chooses on H200s."""
    [choice] = choose_memory([config], build_meta_policy(model), GPU_KINDS["h200"].memory, [explorers])
    return choice


def require_close(choice: MemoryChoice, found: FakePeak) -> None:
    """Weights, moments and the peak of the update are those that the plan counts; the rest of a GPU is the engine's."""
    others = ("cast", "cache", "process", "engine")
    parts = {name: size for name, size in choice.phases["train"].parts.items() if name not in others}
    assert found.weights == pytest.approx(parts["policy"], rel=0.01)
    assert found.between == pytest.approx(parts["policy"] + parts["optimizer"], rel=0.01)
    assert found.peak == pytest.approx(sum(parts.values()), rel=CLOSE)


def test_full_fine_tuning_of_8b_on_one_h200() -> None:
    model = planned_model("qwen3-8b", ModelConfig())
    choice = chosen(model, stage())
    assert choice.fits
    assert choice.values["param_dtype"] == "bf16"
    require_close(choice, fake_steps(model, choice.stage, completions(2, 8, 256, 993)))


@pytest.mark.thorough
def test_adapters_on_32b_on_one_h200() -> None:
    model = planned_model("qwen3-32b", ModelConfig(path="m", lora=LoRAConfig(rank=16, merge=False)))
    choice = chosen(model, stage())
    assert choice.fits
    require_close(choice, fake_steps(model, choice.stage, completions(2, 8, 256, 993)))


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """This process is rank 0 of eight that compute nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.thorough
def test_shards_of_70b_on_eight_h200(eight_ranks: None) -> None:
    """Per rank; rollouts are made elsewhere."""
    model = planned_model("llama-3.1-70b", ModelConfig())
    config = stage(trainer={"ranks": 8, "sharding": "fsdp"})
    choice = chosen(model, config, explorers=[])
    assert choice.fits
    require_close(choice, fake_steps(model, choice.stage, completions(16, 8, 256, 993), ranks=8))


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("batch", [8, pytest.param(16, marks=pytest.mark.thorough)])
def test_fp32_weights(checkpointing: bool, batch: int) -> None:
    """Of one micro-batch, whose gradients come while its activations go, and of several."""
    trainer = {"precision": "bf16", "param_dtype": "fp32", "gradient_checkpointing": checkpointing}
    model = planned_model("qwen3-0.6b", ModelConfig())
    config = stage(
        trainer={**trainer, "micro_batch_tokens": 8192},
        rollout={"batch": batch, "group_size": 4, "max_new_tokens": 192},
    )
    found = fake_steps(model, config, completions(batch, 4, 64, 192))
    sized = StageModel(config, build_meta_policy(model), "cuda", "bf16", StepTokens(256, batch * (64 + 4 * 192.0)))
    parts = {
        name: size
        for name, size in sized.memory()[0]["train"].parts.items()
        if name not in ("cast", "cache", "process")
    }
    assert found.peak == pytest.approx(sum(parts.values()), rel=CLOSE)
