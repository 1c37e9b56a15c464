"""The GSM8K example as published data needs it: every task loads, and a checkpoint folder needs only model.path."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from support.toys import toy_checkpoint

from rollmill.config.loader import load_run
from rollmill.data import encode_demonstration, load_taskset
from rollmill.launch import run
from rollmill.models.from_scratch import train_tokenizer
from rollmill.orchestrator.setup import _texts
from rollmill.trackers.metrics_log import read_metrics
from rollmill.trackers.run_views import PlainView

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gsm8k.yaml"
SHORT = [
    "stages.0.steps=1", "stages.0.trainer.warmup_steps=0", "stages.0.evaluation.every=1", "stages.0.algorithm.batch=2",
    "stages.1.steps=2", "rollout.batch=2", "rollout.group_size=4", "rollout.max_new_tokens=8", "evaluation.limit=4",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [
        "qwen3",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen3_moe", "qwen2", "llama")),
    ],
)
def test_a_checkpoint_folder_needs_only_the_path(
    architecture: str, tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSM8K", str(data_dir / "gsm8k"))
    checkpoint = tmp_path / "model"
    toy_checkpoint(checkpoint, architecture, max_position_embeddings=2048)
    shown = io.StringIO()
    summary = run(EXAMPLE, [*SHORT, f"model.path={checkpoint}"], tmp_path / "run", PlainView(shown))
    assert summary["status"] == "done"
    assert "sft, 1 steps, 7473 tasks loaded, 0 left out" in shown.getvalue()
    steps = read_metrics(tmp_path / "run")
    assert [row["stage"] for row in steps if row["step"] > 0] == ["imitate", "reinforce", "reinforce"]
    assert all(key in steps[-1] for key in ("reward/math", "reward/format", "eval/greedy", "eval/sampled"))
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
def test_every_demonstration_fits_the_examples_model(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSM8K", str(data_dir / "gsm8k"))
    loaded = load_run(EXAMPLE)
    new, taskset = loaded.config.model.new, load_taskset(loaded.stages[0].taskset)
    assert new is not None
    tokenizer = train_tokenizer(new.tokenizer, _texts([taskset]))
    assert (len(taskset.tasks), len(taskset.rejected)) == (7473, 0)
    assert max(len(encode_demonstration(task, tokenizer, 0)[0]) for task in taskset.tasks) <= new.context
