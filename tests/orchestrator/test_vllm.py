"""A run whose completions come from vLLM learns, with new weights there after every step, and outlives its process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.forks import Forks
from support.tiny import metrics, require_log_probs, tiny_run
from support.vllm_service import PYTHON, needs_vllm

import rollmill
from rollmill.buffer.base import version_segments
from rollmill.engines.vllm.engine import VLLMEngine
from rollmill.types import StopReason

FUNCTION = "rollmill.quickstart.addition:rows"
TASKS = {"function": FUNCTION, "options": {"size": 2000, "seed": 1, "digits": 2, "forget": 0.65}}
HELD_OUT = {"function": FUNCTION, "options": {"size": 100, "seed": 2, "digits": 2}}
MODEL = {"hidden_size": 96, "layers": 2, "heads": 3, "kv_heads": 1, "intermediate_size": 256, "initializer_range": 0.06}
ENGINE = {"name": "vllm", "python": str(PYTHON), "cache_gb": 0.25}


IMITATED, REPAIRED = 260, 30
SCHEDULE = {"lr": 3e-3, "schedule": "cosine", "warmup_steps": 20}
STAGES: list[dict[str, Any]] = [
    {"name": "imitate", "algorithm": {"name": "sft", "batch": 32}, "steps": IMITATED, "trainer": SCHEDULE},
    {
        "name": "repair",
        "algorithm": {"name": "grpo"},
        "steps": REPAIRED,
        "trainer": {"lr": 1e-4},
        "engine": ENGINE,
        "evaluation": {"taskset": HELD_OUT, "every": REPAIRED},
    },
]
"""Imitation of a forgetful teacher, then repair by rewards."""


@pytest.mark.thorough
@pytest.mark.service
@pytest.mark.timeout(900)
@needs_vllm
def test_a_run_learns_with_vllm_though_its_process_is_killed(server: Forks, tmp_path: Path) -> None:
    tiny_run(
        tmp_path,
        model={"new": MODEL},
        taskset=TASKS,
        rewards=[{"name": "exact", "after": "#"}],
        rollout={"batch": 16, "group_size": 8, "max_new_tokens": 28},
        evaluation=None,
        checkpoint={"every": 1000},
        stages=STAGES,
    )
    metrics = tmp_path / "out/metrics.jsonl"
    server.start("run", "run.yaml", "--out", "out", folder=tmp_path)

    def has_learned() -> bool:
        return metrics.is_file() and metrics.read_text().count("\n") >= IMITATED + REPAIRED // 4

    assert server.reaches(has_learned, limit_s=500)
    _kill_vllm(server.pid)
    ended = server.wait()
    assert ended.code == 0, ended.err
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    learned = [step for step in steps if step["stage"] == "repair" and "logprob_gap/mean" in step]
    assert len(learned) == REPAIRED
    assert max(step["logprob_gap/mean"] for step in learned) < 1e-3
    assert sum(step.get("engine/restarts", 0) for step in learned) == 1
    assert sum(step.get("engine/updates", 0) for step in learned) >= REPAIRED - 2
    assert max(step["staleness/max"] for step in learned) == 0
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2


@pytest.mark.thorough
@pytest.mark.service
@pytest.mark.timeout(600)
@needs_vllm
def test_a_budget_cuts_completions_and_over_sampling_and_repetition_end_them(tmp_path: Path) -> None:
    """Every token that is trained on has the log-prob of the weights it carries the version of, cut or not."""
    shape = {"hidden_size": 64, "heads": 2, "kv_heads": 1, "context": 256}
    repetition = {"period": 2, "times": 2, "tokens": 2, "penalty": 0.25}
    budget = {"name": "cut", "max_staleness": 2, "steps": 4, "rollout": {"token_budget": 700}}
    more = {"name": "more", "steps": 2, "rollout": {"oversample": 0.5, "repetition": repetition}}
    path = tiny_run(
        tmp_path,
        model={"new": shape},
        algorithm={"name": "grpo"},
        engine=ENGINE,
        rollout={"max_new_tokens": 160},
        evaluation=None,
        checkpoint={"every": 1, "keep_last": 9},
        trainer={"lr": 1e-3},
        stages=[budget, more],
    )
    rollmill.run(path, out=tmp_path / "out")
    batches = [rollmill.load_experiences(tmp_path / "out", step) for step in range(1, 7)]
    rows = metrics(tmp_path / "out")
    cut = [row for row in rows if row.get("stage") == "cut"]
    assert sum(row["rollout/partial"] for row in cut) == sum(row["rollout/continued"] for row in cut) > 0
    ids = [each.id for batch in batches[:4] for each in batch]
    assert ids == [f"cut-{number:06d}/{index}" for number in range(16) for index in range(4)]
    assert max(len(version_segments(each)) for batch in batches[:4] for each in batch) > 1
    assert max(row["staleness/max"] for row in cut) <= 2
    assert max(row["logprob_gap/max"] for row in cut) < 1e-3
    require_log_probs(tmp_path / "out", [each for batch in batches[:4] for each in batch])
    rest = [row for row in rows if row.get("stage") == "more"]
    assert sum(row["rollout/stopped"] for row in rest) == 4
    ended = [each.stop_reason is StopReason.REPETITION for batch in batches[4:] for each in batch]
    assert any(ended)
    for each, repeated in zip((each for batch in batches[4:] for each in batch), ended, strict=True):
        assert each.reward_parts["rollout/repetition"] == (-0.25 if repeated else 0.0)


@pytest.mark.thorough
@pytest.mark.service
@pytest.mark.timeout(600)
@needs_vllm
def test_it_sleeps_while_the_trainer_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; on a CPU it says that it sleeps, and keeps its memory."""
    made = VLLMEngine.__init__

    def init(engine: VLLMEngine, *arguments: Any, **options: Any) -> None:
        made(engine, *arguments, **options)
        engine.sleeps = True

    monkeypatch.setattr(VLLMEngine, "__init__", init)
    shape = {"hidden_size": 64, "heads": 2, "kv_heads": 1}
    path = tiny_run(tmp_path, model={"new": shape}, stages=None, algorithm={"name": "grpo"}, engine=ENGINE, steps=3)
    rollmill.run(path, out=tmp_path / "out")
    steps = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    learned = [step for step in steps if "engine/sleeps" in step]
    assert [step["engine/sleeps"] for step in learned] == [1, 1, 1]
    assert max(step["logprob_gap/mean"] for step in learned) < 1e-3


def _kill_vllm(owner: int) -> None:
    """Kill the process of vLLM that a process has started."""
    children = psutil.Process(owner).children(recursive=True)
    [process] = [each for each in children if "rollmill.engines.vllm.worker" in each.cmdline()[:5]]
    process.kill()
