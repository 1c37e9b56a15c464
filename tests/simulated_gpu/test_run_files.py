"""Runs of every kind train on a CUDA device: engine and trainer agree, gradients flow, decode steps are captured."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import merged, metrics, tiny_run
from support.toys import toy_checkpoint

import rollmill

pytestmark = pytest.mark.gpu

BF16_GAP = 0.03
"""Mean difference of a token's log-prob between engine and trainer in bf16, in nats: both round each layer's output."""
BASE: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "grpo"},
    "steps": 3,
    "rewards": [{"name": "format", "pattern": "(?s).*[!-Oa-m]"}],  # of about half of all texts
    "trainer": {"precision": "bf16", "lr": 1e-4},
    "evaluation": {"every": 3},
    "checkpoint": {"every": 1},
}
KL = {"algorithm": {"name": "grpo", "kl": 0.01}}
LORA = {"lora": {"rank": 4, "alpha": 8}}
OFFLOADED = {"reference": "disk", "policy": "disk", "optimizer": "disk", "cast": "destroyed", "cache": "destroyed"}
RUNS: dict[str, dict[str, Any]] = {
    "fp32": {"trainer": {"precision": "fp32"}},
    "bf16": {},
    "KL, entropy and two updates": {
        "algorithm": {"name": "grpo", "kl": {"coefficient": 0.01}, "entropy": 0.01},
        "trainer": {"updates_per_batch": 2, "epochs_per_batch": 2},
    },
    "PPO": {
        "algorithm": {
            "name": "ppo",
            "critic": {"lr": 1e-3, "warmup_steps": 1},
            "kl": {"coefficient": 0.01, "estimator": "k1", "where": "reward"},
        },
        "trainer": {"updates_per_batch": 2},
    },
    "weights in bf16": {"trainer": {"param_dtype": "bf16"}},
    "AdamW in 8 bits": {"trainer": {"optimizer": "adamw_8bit"}},
    "weights in bf16, AdamW in 8 bits": {"trainer": {"optimizer": "adamw_8bit", "param_dtype": "bf16"}},
    "gradient checkpointing": {"trainer": {"gradient_checkpointing": True}},
    "LoRA": KL | {"checkpoint_of": "qwen3", "model": LORA},
    "truncated sampling": {"rollout": {"temperature": 0.8, "top_p": 0.8, "top_k": 20, "min_p": 0.01}},
    "n-gram drafts": {"rollout": {"ngram_draft": {"length": 2, "tokens": 4}}},
    "reuse of rollouts": {"rollout": {"reuse": {}}, "steps": 6},
    "asynchronous": {"max_staleness": 2, "steps": 5},
    "asynchronous, old keys and values kept": {
        "max_staleness": 2,
        "steps": 5,
        "engine": {"name": "native", "after_update": "keep"},
    },
    "token budget": {"rollout": {"token_budget": 60}, "max_staleness": 2, "steps": 5},
    "offloading chosen by a budget": KL | {"offload": {"budget_gb": 0.0008}},
    "SFT": {"algorithm": {"name": "sft", "batch": 8}, "rollout": {"batch": None, "group_size": None}},
    "MIX": {"algorithm": {"name": "mix", "mu": 0.1}},
    "CHORD": {"algorithm": {"name": "chord"}},
    "repetition": {"rollout": {"repetition": {"period": 1, "times": 3, "tokens": 3, "penalty": 0.25}}},
    "LoRA, offloaded": KL | {"checkpoint_of": "qwen3", "model": LORA, "offload": OFFLOADED | {"reference": "auto"}},
    "several turns": {"plugins": ["turns.py"], "workflow": "turns", "rewards": None, "rollout": {"max_new_tokens": 8}},
    "mixture of experts": {"checkpoint_of": "qwen3_moe"},
    "sliding window and soft cap": KL | {"checkpoint_of": "gemma2"},
    "Mixtral": {"checkpoint_of": "mixtral"},
    "Gemma": {"checkpoint_of": "gemma"},
}
if os.environ.get("SIMULATED_CUDA") != "1" and find_spec("vllm") is not None:
    RUNS |= {
        "vLLM": {"checkpoint_of": "qwen3", "engine": "vllm"},
        "vLLM that sleeps": {"checkpoint_of": "qwen3", "engine": {"name": "vllm", "sleep": True}},
    }
TURNS = """
import rollmill


@rollmill.workflow
async def turns(task, policy):
    first = await policy.complete(task.prompt)
    second = await policy.complete(task.prompt + first.text + "+1=")
    return float(sum((first.text + second.text).count(each) for each in "02468"))
"""
EAGER = {"SFT", "several turns", "vLLM", "vLLM that sleeps"}
"""Runs without decode steps that could be captured."""
LOOSE = {"asynchronous, old keys and values kept"}
"""Runs whose engine computes with older keys and values on purpose."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = dict(RUNS[name])
    if (architecture := changes.pop("checkpoint_of", None)) is not None:
        path = str(toy_checkpoint(tmp_path / "model", architecture))
        changes["model"] = changes.get("model", {}) | {"path": path, "new": None}
    (tmp_path / "turns.py").write_text(TURNS)
    without = dict.fromkeys(["stages", *(key for key, value in changes.items() if value is None)])
    run_file = tiny_run(tmp_path, **merged(merged({}, BASE), changes) | without)
    with caplog.at_level(logging.WARNING, "rollmill"):
        rollmill.run(run_file, out=tmp_path / "out")
    updates = [each for each in metrics(tmp_path / "out") if "grad_norm" in each]
    assert len(updates) == changes.get("steps", BASE["steps"])
    norms = [each["grad_norm"] for each in updates]
    assert np.isfinite(norms).all()
    assert max(norms) > 0  # not in every step: the rewards of all groups may be equal
    gaps = [each["logprob_gap/mean"] for each in updates if "logprob_gap/mean" in each]
    assert bool(gaps) == (name != "SFT")
    if name not in LOOSE:
        assert max(gaps, default=0.0) < (1e-4 if name == "fp32" else BF16_GAP)
    assert not [each.getMessage() for each in caplog.records if "cannot be captured" in each.getMessage()]
    assert name in EAGER or max(each.get("rollout/captured/share", 0.0) for each in updates) > 0
