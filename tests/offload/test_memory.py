"""Measured: with a budget the peak is that of the largest phase, not the sum of all components."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tiny import RUN, merged
from support.toys import toy_tokenizer
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from rollmill.config.offload import PHASES

MB, GB = 1e6, 1e9
WIDE = {"hidden_size": 640, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate_size": 1280}
"""12.5 million weights: 50 MB."""
CHANGES: dict[str, Any] = {
    "model": {"new": WIDE},
    "stages": None,
    "steps": 2,
    "algorithm": {"name": "ppo", "kl": 0.1},
    "rollout": {"batch": 2, "group_size": 2, "max_new_tokens": 4},
    "evaluation": None,
    "checkpoint": {"every": 100},
    "monitor": {"report": False},
}
ROOMY = {"budget_gb": 100}
TIGHT: dict[str, Any] = {
    "budget_gb": 0.42,
    **dict.fromkeys(("optimizer", "reference", "critic", "critic_optimizer", "rewards"), "disk"),
}
PROGRAM = """
import io, sys
from rollmill.launch import run
from rollmill.trackers.run_views import PlainView
run("run.yaml", out=sys.argv[1], view=PlainView(io.StringIO()))
"""


def test_peaks_are_reset_and_remembered() -> None:
    # In a process of its own: in that of other tests, the block could take memory that they have left resident.
    program = """
from rollmill.models.cpu.host_memory import lifetime_peak_rss, peak_rss, reset_peak_rss, trim_heap
trim_heap()
reset_peak_rss()
before = peak_rss()
block = bytearray(100_000_000)
held = peak_rss()
del block
reset_peak_rss()
print(before, held, peak_rss(), lifetime_peak_rss())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, held, after, lifetime = map(float, done.stdout.split())
    assert held >= before + 90 * MB
    assert after <= before + 50 * MB
    assert lifetime >= before + 90 * MB


def rows(folder: Path, name: str, offload: Any) -> list[dict[str, Any]]:
    """Metrics of a run in a process of its own."""
    (folder / "run.yaml").write_text(yaml.safe_dump(merged(RUN, CHANGES | {"offload": offload})))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def reward_model(folder: Path) -> Path:
    """One of 60 MB."""
    tokenizer = toy_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=1536, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_peak_is_the_largest_phase_and_not_the_sum(tmp_path: Path) -> None:
    CHANGES["rewards"] = [{"name": "model", "path": str(reward_model(tmp_path / "judge"))}]
    everything, held = rows(tmp_path, "everything", ROOMY), rows(tmp_path, "held", TIGHT)
    assert [row["loss"] for row in everything] == [row["loss"] for row in held]
    weights = [(tmp_path / name / "checkpoints/step-000002/model.safetensors") for name in ("everything", "held")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    policy, judge = weights[0].stat().st_size, (tmp_path / "judge/model.safetensors").stat().st_size
    rollout, train = policy + judge, 7 * policy  # policy and critic with two moments each, and gradients of one of them
    total = train + policy + judge  # and the reference
    assert train < TIGHT["budget_gb"] * GB < total
    (roomy, tight) = ({p: row[-1][f"memory/{p}"] * GB for p in PHASES} for row in (everything, held))
    base = tight["rollout"] - rollout  # libraries, and what is running
    figures = {p: (round(roomy[p] / MB), round(tight[p] / MB)) for p in PHASES}
    print(f"peaks in MB without and with a tight budget: {figures}; policy {policy / MB:.0f}, judge {judge / MB:.0f}")
    assert max(roomy.values()) - base > 0.9 * total
    assert max(tight.values()) == tight["train"]
    assert tight["train"] - base < train + 0.6 * (total - train)
    assert roomy["train"] - tight["train"] > 0.6 * (total - train)
    assert roomy["rollout"] - tight["rollout"] > 0.8 * (total - policy - rollout)  # there are no gradients then
    assert roomy["inference"] - tight["inference"] > 0.8 * 4 * policy
