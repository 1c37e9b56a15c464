"""What `auto` means in the keys that decide on memory: on a CPU fixed values, on a GPU the first settings that fit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_run

from rollmill.apps.plan.planning.presets import planned_model
from rollmill.config.loader import load_run
from rollmill.config.model import LoRAConfig, ModelConfig
from rollmill.config.run import StageConfig
from rollmill.models.gpu_kinds import GPU_KINDS, MEMORY_USABLE, nominal_memory
from rollmill.models.load import build_meta_policy
from rollmill.orchestrator.memory_choice import MemoryChoice, choose_memory, settle_run

SECTIONS: dict[str, Any] = {
    "taskset": {"path": "tasks.jsonl"},
    "algorithm": {"name": "grpo"},
    "engine": {"name": "vllm"},
    "rollout": {"batch": 16, "group_size": 8, "max_new_tokens": 768},
}


@cache
def policy(name: str, rank: int | None = None) -> Any:
    lora = None if rank is None else LoRAConfig(rank=rank)
    return build_meta_policy(planned_model(name, ModelConfig(path=Path("m"), lora=lora)))


def choose(name: str, gb: float, *, keep: str | None = None, rank: int | None = None, **sections: Any) -> MemoryChoice:
    stage = StageConfig.model_validate(SECTIONS | sections)
    [choice] = choose_memory([stage], policy(name, rank), gb * 1e9, [None], keep)
    return choice


def settings(choice: MemoryChoice) -> tuple[str, bool, int]:
    values = choice.values
    return values["param_dtype"], values["gradient_checkpointing"], values["micro_batch_tokens"]


def test_the_first_settings_that_fit_are_chosen() -> None:
    """On smaller and smaller GPUs: all at once, checkpointing, smaller micro-batches, bf16 weights, nothing."""
    sizes = range(200, 1, -3)
    found = [choose("qwen2.5-1.5b", gb) for gb in sizes]
    order = list(dict.fromkeys((settings(each), each.fits) for each in found))
    assert order[0] == (("fp32", False, 8192), True)
    assert order[1] == (("fp32", True, 8192), True)
    kinds = [each for (each, *_), _ in order]
    assert kinds == sorted(kinds, reverse=True)  # fp32 before bf16
    assert order[-1] == (("bf16", True, 1024), False)
    assert [fits for _, fits in order] == [True] * (len(order) - 1) + [False]
    for gb, each in zip(sizes, found, strict=True):
        assert each.fits == (not each.problems)
        if each.fits:
            assert each.peak <= MEMORY_USABLE * gb * 1e9


def test_the_cache_gets_what_is_left_and_no_more_than_is_needed() -> None:
    kv = 128 * (256 + 768) * 2 * 28 * 2 * 128 * 2  # completions at a time, tokens, and 2 heads of 128 in 28 layers
    roomy, tight = choose("qwen2.5-1.5b", 200), choose("qwen2.5-1.5b", 42)
    assert roomy.values["cache_gb"] == pytest.approx(kv / 2**30, abs=0.1)
    assert settings(tight) == ("fp32", True, 8192)
    assert kv / 4 <= tight.values["cache_gb"] * 2**30 <= kv
    assert choose("qwen2.5-1.5b", 200, engine={"name": "vllm", "cache_gb": 3}).values["cache_gb"] == 3


def test_what_the_run_file_sets_stays() -> None:
    given = choose("qwen2.5-1.5b", 24, trainer={"param_dtype": "fp32", "gradient_checkpointing": False})
    assert settings(given)[:2] == ("fp32", False)
    assert not given.fits
    assert settings(choose("qwen2.5-1.5b", 200, trainer={"micro_batch_tokens": 100}))[2] == 100


@pytest.mark.parametrize(
    "sections",
    [
        {"trainer": {"precision": "fp32"}},
        {"algorithm": {"name": "ppo"}},
        {"offload": {"policy": "memory"}},
        {"trainer": {"ranks": 2, "sharding": "context"}},
    ],
)
def test_weights_stay_in_fp32_where_something_needs_it(sections: dict[str, Any]) -> None:
    assert settings(choose("qwen2.5-1.5b", 20, **sections))[0] == "fp32"


def test_a_run_that_has_begun_keeps_the_type_of_its_weights() -> None:
    assert settings(choose("qwen2.5-1.5b", 20, keep="fp32"))[0] == "fp32"
    assert settings(choose("qwen2.5-1.5b", 200, keep="bf16")) == ("bf16", False, 8192)


def test_what_does_not_fit_names_the_keys_that_would_change_it() -> None:
    [problem, *_] = choose("qwen2.5-7b", 24).problems
    assert "takes" in problem
    assert "model.lora" in problem
    assert "offload" in "".join(choose("qwen3-8b", 90, algorithm={"name": "grpo", "kl": 0.1}).problems)


def test_offloading_makes_room() -> None:
    with_reference = {"algorithm": {"name": "grpo", "kl": 0.1}}
    there, moved = (choose("qwen2.5-7b", 90, **with_reference, offload=offload) for offload in (None, {}))
    assert moved.peak < there.peak


@pytest.mark.parametrize(
    ("name", "reported", "gb"),
    [
        ("NVIDIA H200", 150.1e9, 141),
        ("NVIDIA H100 80GB HBM3", 85.0e9, 80),
        ("NVIDIA A100-SXM4-40GB", 42.3e9, 40),
        ("NVIDIA A100-SXM4-80GB", 85.1e9, 80),
        ("NVIDIA L40S", 47.8e9, 48),
        ("NVIDIA GeForce RTX 4090", 25.2e9, 25.2),
        ("NVIDIA H200 MIG 1g.18gb", 17e9, 17),
    ],
)
def test_gpus_of_a_kind_have_one_size(name: str, reported: float, gb: float) -> None:
    assert nominal_memory(name, reported) == gb * 1e9
    assert all(kind.memory == nominal_memory(key.split("-")[0], kind.memory) for key, kind in GPU_KINDS.items())


def test_on_a_cpu_nothing_is_chosen(tmp_path: Path) -> None:
    loaded = load_run(tiny_run(tmp_path))
    settled, kept, messages = settle_run(loaded, torch.device("cpu"), None)
    assert kept is None
    assert not messages
    for stage in settled.stages:
        trainer = stage.trainer
        assert (trainer.param_dtype, trainer.gradient_checkpointing, trainer.micro_batch_tokens) == (
            "fp32",
            False,
            8192,
        )
    assert settled.config.trainer == settled.stages[0].trainer
    machine = {"memory": {"gpu": 80e9, "stages": [{"param_dtype": "bf16"}] * 2}}
    resumed, _, _ = settle_run(loaded, torch.device("cpu"), machine)
    assert {stage.trainer.param_dtype for stage in resumed.stages} == {"bf16"}


def test_conversations_are_not_taken_to_fill_the_context() -> None:
    found = choose("qwen2.5-1.5b", 200, workflow={"name": "reflection"})
    assert settings(found) == ("fp32", False, 8192)
    assert found.fits
