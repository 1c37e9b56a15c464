"""A made-up run: the files a real one would leave, with numbers from a seeded generator."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from rollmill.config.monitor import MonitorConfig
from rollmill.orchestrator.monitor import Monitor
from rollmill.trackers import wilson_interval
from rollmill.trackers.run_views import PlainView
from rollmill.types import Experience, StopReason, Turn

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
STAGES = [("sft", 20), ("rl", 40)]


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def save_tokenizer(folder: Path) -> None:
    """A one-token-per-character tokenizer, as a checkpoint would hold it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(CHARACTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def experience(
    rng: np.random.Generator, task: str, index: int, prompt: str, response: str, reward: float | None, version: int = 0
) -> Experience:
    ids = np.array(encode(prompt + response), np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    advantage = 0.0 if reward is None else 1.6 * reward - 0.9
    return Experience(
        id=f"{task}/{index}",
        task_id=task,
        group=f"{version}:{task}",
        token_ids=ids,
        action_mask=mask,
        logprobs=np.where(mask, -rng.exponential(0.8, len(ids)), 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        reward=reward,
        reward_parts={"exact": reward, "format": 1.0},
        stop_reason=StopReason.EOS,
        turns=[Turn("prompt", 0, len(prompt), prompt), Turn("assistant", len(prompt), len(ids), response)],
        prompt=prompt,
        response=response,
        timings={"queue": 0.001, "generate": 0.2, "reward": 0.01},
        info={"epoch": 0},
        advantage=np.where(mask, advantage, 0).astype(np.float32),
    )


def rollouts(rng: np.random.Generator, step: int, tasks: int = 4, group: int = 3) -> list[Experience]:
    made = []
    for t in range(tasks):
        a, b = (int(number) for number in rng.integers(100, 999, 2))
        for index in range(group):
            right = rng.random() < 0.2 + 0.013 * step
            total = a + b if right else a + b - 10
            steps = f"Add the ones: {a % 10} + {b % 10} = {a % 10 + b % 10}.\nThen the tens and the hundreds.\n"
            prompt = f"What is {a} + {b}?\n"
            task = f"sum-{step * tasks + t}"
            made.append(experience(rng, task, index, prompt, f"{steps}#### {total}", float(right), step - 1))
    return made


def training_metrics(rng: np.random.Generator, step: int) -> dict[str, float | int | str | None]:
    sft = step <= STAGES[0][1]
    at = step if sft else step - STAGES[0][1]
    reward = 1 / (1 + math.exp(-(at - 14) / 6)) + rng.normal(0, 0.04)
    metrics: dict[str, float | int | str | None] = {
        "step": step,
        "stage": "sft" if sft else "rl",
        "version": step,
        "loss": 3.2 * math.exp(-at / 9) + 0.3 + rng.normal(0, 0.05) if sft else rng.normal(0, 0.01),
        "entropy": 2.0 * math.exp(-step / 25) + 0.2 + rng.normal(0, 0.03),
        "grad_norm": 1.2 * math.exp(-at / 20) + abs(rng.normal(0, 0.1)),
        "lr": 3e-4 if sft else 5e-5 * min(1, at / 5),
        "tokens": 8192 if sft else 6100 + int(rng.normal(0, 300)),
        "completions": 0 if sft else 128,
        "tokens_per_second": 9800 + rng.normal(0, 300) if sft else 6200 + rng.normal(0, 250),
        "seconds/train": 0.8 + rng.normal(0, 0.03) if sft else 0.33 + rng.normal(0, 0.02),
    }
    if not sft:
        clipped = min(1.0, max(0.0, reward))
        metrics |= {
            "reward/mean": clipped,
            "reward/std": math.sqrt(clipped * (1 - clipped)),
            "reward/exact": clipped,
            "reward/format": min(1.0, 0.6 + at / 60),
            "kl": 0.002 * at + abs(rng.normal(0, 0.004)),
            "ratio/clip_fraction": abs(rng.normal(0.02, 0.01)),
            "length/mean": 46 + 4 * math.sin(at / 7) + rng.normal(0, 0.8),
            "staleness/mean": 0.0 if at == 1 else 1.0,
            "staleness/max": 0 if at == 1 else 1,
            "logprob_gap/mean": abs(rng.normal(2e-4, 5e-5)),
            "logprob_gap/max": abs(rng.normal(3e-3, 1e-3)),
            "policy_drift/mean": 0.02 + 0.0001 * at,
            "policy_drift/max": 0.3 + 0.001 * at,
            "seconds/rollout": 0.5 + rng.normal(0, 0.03),
            "seconds/reward": 0.06 + abs(rng.normal(0, 0.01)),
        }
    spent = sum(float(v or 0) for k, v in metrics.items() if k.startswith("seconds/"))
    return metrics | {"seconds/total": spent + 0.03}


def evaluation_metrics(step: int, n: int = 200) -> dict[str, float | int | str | None]:
    rate = min(0.97, max(0.02, 0.3 * step / 20 if step <= 20 else 0.3 + 0.7 * (step - 20) / 32))
    low, high = wilson_interval(rate * n, n)
    return {
        "step": step,
        "stage": "sft" if step <= 20 else "rl",
        "eval/greedy": min(1.0, rate + 0.03),
        "eval/sampled": rate,
        "eval/sampled_low": low,
        "eval/sampled_high": high,
        "seconds/eval": 0.4,
    }


def make_run(run_dir: Path, steps: int = 60, seed: int = 0) -> Path:
    """A run of SFT then RL, as the master would have it monitored."""
    rng = np.random.default_rng(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(
        "name: carry-repair\nmodel: {path: new}\nstages:\n- {name: sft, algorithm: {name: sft}}\n"
        "- {name: rl, algorithm: {name: grpo}}\n"
    )
    with (run_dir / "log.txt").open("w") as log:
        monitor = Monitor(run_dir, "carry-repair", STAGES, MonitorConfig(), PlainView(log))
        monitor.evaluation(evaluation_metrics(0))
        for step in range(1, steps + 1):
            monitor.step(training_metrics(rng, step), rollouts(rng, step) if step > STAGES[0][1] else [])
            if step % 5 == 0:
                monitor.evaluation(evaluation_metrics(step))
        save_tokenizer(run_dir / "checkpoints" / f"step-{steps}")
        monitor.close(
            {
                "accuracy_before": 0.33,
                "accuracy_after": 1.0,
                "seconds_by_stage": {"sft": 16.6, "rl": 38.4},
                "peak_rss_mb": 912.4,
                "tokens_per_second": 6214.5,
            }
        )
    return run_dir
