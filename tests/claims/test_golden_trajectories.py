"""Loss and gradient norm of ten training steps are those in golden_trajectories.json: what users reproduce stays.

After a change that is meant to move them, rewrite the file and say in the commit why they moved:

    python tests/claims/test_golden_trajectories.py --write

Weights and batches are drawn by numpy's RandomState, whose streams are frozen. TOLERANCE leaves room for other
processors and torch versions, which round differently: float64 arithmetic, or weights that are all off by 1e-6 (eight
units in float32's last place), use up less than a fifth of it. See `test_rounding_stays_far_below_the_tolerance`.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollmill.algorithms import build_recipe
from rollmill.config.algorithms import known_algorithms
from rollmill.config.trainer import TrainerConfig
from rollmill.trainer import Trainer
from rollmill.types import Experience, ExperienceSource

pytestmark = pytest.mark.net
FILE = Path(__file__).with_name("golden_trajectories.json")
STEPS, VOCAB, LIMIT, TOLERANCE = 10, 23, 16, 5e-4
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl": 0.05, "entropy": 0.01},
    "dapo": {"overlong_buffer": 6},
    "gspo": {},
    "ppo": {"advantage": {"lam": 0.9}, "critic": {"lr": 1e-3}},
    "mix": {"mu": 0.3},
    "dpo": {"sft": 0.1},
}
CHANGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "learning rate": ("grpo", {}, {"lr": 1.02e-3}),
    "clip bound": ("grpo", {"loss": {"clip_high": 0.22}}, {}),
    "clip bound of sequences": ("gspo", {"loss": {"clip_high": 0.05}}, {}),
    "lambda": ("ppo", {"advantage": {"lam": 0.92}}, {}),
    "critic's learning rate": ("ppo", {"critic": {"lr": 1.1e-3}}, {}),
    "imitation": ("mix", {"mu": 0.31}, {}),
    "beta": ("dpo", {"beta": 0.102}, {}),
}

Trajectory = dict[str, list[float]]


def _model(dtype: torch.dtype, disturbance: float) -> Any:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model, rng = Qwen3ForCausalLM(config), np.random.RandomState(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(0.15 * rng.standard_normal(tuple(parameter.shape))))
            parameter.mul_(1 + disturbance * torch.from_numpy(rng.standard_normal(tuple(parameter.shape))))
    return model.to(dtype).eval()


def _experience(rng: np.random.RandomState, prompt: Any, name: str, index: int, source: ExperienceSource) -> Experience:
    length = rng.randint(3, LIMIT + 1)
    mask = np.arange(len(prompt) + length) >= len(prompt)
    usual = source is ExperienceSource.ROLLOUT
    return Experience(
        id=f"{name}-{index}",
        task_id=name,
        group=name,
        token_ids=np.concatenate([prompt, rng.randint(2, VOCAB, length)]).astype(np.int32),
        action_mask=mask,
        logprobs=np.where(mask & usual, rng.normal(-3.2, 0.3, len(mask)), 0).astype(np.float32),
        versions=np.where(mask & usual, 0, -1).astype(np.int32),
        reward=None if source is ExperienceSource.EXPERT else float(index == 0 or (usual and rng.randint(3) == 0)),
        source=source,
    )


def _batch(algorithm: str, step: int) -> list[Experience]:
    """Four groups of four and, for MIX, three demonstrations; for DPO six pairs."""
    rng = np.random.RandomState(100 + step)
    kinds = {
        "dpo": [(ExperienceSource.PREFERENCE, 6, 2)],
        "mix": [(ExperienceSource.ROLLOUT, 4, 4), (ExperienceSource.EXPERT, 3, 1)],
    }
    batch = []
    for source, groups, size in kinds.get(algorithm, [(ExperienceSource.ROLLOUT, 4, 4)]):
        for g in range(groups):
            prompt = rng.randint(2, VOCAB, rng.randint(2, 8))
            batch += [_experience(rng, prompt, f"{source}-{g}", i, source) for i in range(size)]
    return batch


def _trajectory(
    algorithm: str,
    keys: Any = None,
    config: Any = None,
    *,
    dtype: torch.dtype = torch.float32,
    disturbance: float = 0.0,
) -> Trajectory:
    options = known_algorithms()[algorithm].model_validate({"name": algorithm, **ALGORITHMS[algorithm], **(keys or {})})
    settings = {"lr": 1e-3, "precision": "fp32", "updates_per_batch": 2, "micro_batch_tokens": 100, **(config or {})}
    recipe = build_recipe(options, max_new_tokens=LIMIT)
    trainer = Trainer(_model(dtype, disturbance), recipe, TrainerConfig(**settings), total_steps=STEPS)
    steps = [trainer.step(_batch(algorithm, step), 0) for step in range(STEPS)]
    return {name: [float(f"{each[name]:.7g}") for each in steps] for name in ("loss", "grad_norm")}


@cache
def _golden() -> dict[str, Trajectory]:
    golden: dict[str, Trajectory] = json.loads(FILE.read_text())
    return golden


def _off(got: Trajectory, golden: Trajectory) -> float:
    """The greatest difference, relative to the mean magnitude of the trajectory."""
    return max(
        float(np.abs(np.subtract(got[name], golden[name])).max() / np.abs(golden[name]).mean()) for name in golden
    )


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_trajectories_are_the_stored_ones(algorithm: str) -> None:
    assert _off(_trajectory(algorithm), _golden()[algorithm]) < TOLERANCE


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_rounding_stays_far_below_the_tolerance(algorithm: str) -> None:
    for other in ({"dtype": torch.float64}, {"disturbance": 1e-6}):
        assert _off(_trajectory(algorithm, **other), _golden()[algorithm]) < TOLERANCE / 5


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_changed_setting_would_be_noticed(change: str) -> None:
    """Control: so small a change is far beyond the tolerance."""
    algorithm, keys, config = CHANGES[change]
    assert _off(_trajectory(algorithm, keys, config), _golden()[algorithm]) > 10 * TOLERANCE


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Golden trajectories of six algorithms.")
    parser.add_argument("--write", action="store_true", required=True, help=f"rewrite {FILE.name}")
    parser.parse_args()
    torch.set_num_threads(1)
    FILE.write_text(json.dumps({name: _trajectory(name) for name in ALGORITHMS}, indent=1) + "\n")
