"""A vision-language policy in every mode of a run: what is trained is what was sampled, pictures included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.picture_models import picture_checkpoint, picture_run

import rollmill
from rollmill.cli import main
from rollmill.launch import resume

ROLLOUT = {"batch": 2, "group_size": 4, "max_new_tokens": 8}
GRPO = {"name": "grpo", "kl": {"coefficient": 0.01}}
LATE = {
    "max_staleness": 2,
    "rollout": ROLLOUT | {"max_new_tokens": 12, "token_budget": 40},
    "buffer": {"replay": {"groups": 1}},
}
MODES: dict[str, dict[str, Any]] = {
    "over-sampling": {"rollout": ROLLOUT | {"oversample": 0.5}},
    "drafts": {"rollout": ROLLOUT | {"reuse": {}, "ngram_draft": {}}},
    "bf16": {"trainer": {"lr": 1e-3, "precision": "bf16"}},
    "lora": {"model": {"lora": {"rank": 4}}, "trainer": {"lr": 1e-2}},
    "ranks": {"trainer": {"lr": 1e-3, "ranks": 2}},
    "fsdp": {"trainer": {"lr": 1e-3, "ranks": 2, "sharding": "fsdp"}},
    "context": {"trainer": {"lr": 1e-3, "ranks": 2, "sharding": "context"}},
    "offload": {"offload": "auto"},
    "whole model": {"trainer": {"lr": 1e-3, "gradient_checkpointing": True, "freeze": []}},
    "mix": {"algorithm": {"name": "mix"}},
    "critic": {"algorithm": {"name": "ppo"}},
    "critic of ranks": {"algorithm": {"name": "ppo"}, "trainer": {"lr": 1e-3, "ranks": 2, "sharding": "fsdp"}},
    "teacher": {"algorithm": {"name": "distill", "teacher": ""}},
    "teacher of ranks": {"algorithm": {"name": "distill", "teacher": ""}, "trainer": {"lr": 1e-3, "ranks": 2}},
    "own teacher": {"algorithm": {"name": "self_distill", "context": "answer", "weights": "ema"}},
    "ray": {"placement": {"name": "ray", "explorers": 2}},
}
PICKED = {"lora", "fsdp", "own teacher"}


def one_stage(folder: Path, family: str = "qwen2_vl", **changes: Any) -> Path:
    """A run of three steps on pictures, with one stage."""
    own: dict[str, Any] = {"algorithm": GRPO, "steps": 3, "rollout": ROLLOUT, "trainer": {"lr": 1e-3}}
    model = changes.pop("model", {})
    path = picture_run(folder, family, stages=None, **(own | changes))
    run = yaml.safe_load(path.read_text())
    run["model"] |= model
    path.write_text(yaml.safe_dump(run))
    return path


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def gaps(out: Path) -> list[float]:
    """Largest difference between engine and trainer, of each step."""
    return [line["logprob_gap/max"] for line in metrics(out) if "logprob_gap/max" in line]


def weights(out: Path, step: int = 3) -> dict[str, torch.Tensor]:
    folder = out / f"checkpoints/step-{step:06d}"
    adapter = folder / "adapter/adapter_model.safetensors"
    return load_file(adapter if adapter.is_file() else folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [m if m in PICKED else pytest.param(m, marks=pytest.mark.thorough) for m in MODES])
def test_a_policy_that_sees_trains_in(mode: str, tmp_path: Path) -> None:
    out, changes = tmp_path / "out", dict(MODES[mode])
    if "teacher" in changes.get("algorithm", {}):
        teacher = picture_checkpoint(tmp_path / "teacher", "qwen2_vl", seed=1)
        changes["algorithm"] = changes["algorithm"] | {"teacher": str(teacher)}
    rollmill.run(one_stage(tmp_path, **changes), out=out)
    assert len(gaps(out)) == 3
    # other pictures, or none, would move log-probs of this model by whole nats
    assert max(gaps(out)) < (0.3 if mode == "bf16" else 1e-4)
    before = load_file(tmp_path / "model/model.safetensors")
    after = weights(out)
    if mode == "lora":
        assert all("language_model" in name for name in after)
        assert any(bool(each.any()) for name, each in after.items() if "lora_B" in name)
    else:
        assert any(not torch.equal(before[name], after[name]) for name in before if "visual" not in name)
    if mode == "whole model":
        assert any(not torch.equal(before[name], after[name]) for name in before if "visual.blocks" in name)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", pytest.param("paligemma", marks=pytest.mark.thorough)])
def test_late_partial_and_replayed_rollouts_see_and_resume_bit_equal(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = family != "paligemma"
    held_out = {"taskset": {"path": str(tmp_path / "data/rows.jsonl"), "chat": chat}, "every": 5, "samples": 2}
    path = one_stage(tmp_path, family, steps=5, evaluation=held_out, **LATE)
    rollmill.run(path, out=tmp_path / "whole")
    lines = metrics(tmp_path / "whole")
    assert max(gaps(tmp_path / "whole")) < 1e-4
    assert any(line.get("staleness/max", 0) > 0 for line in lines)
    assert any(line.get("replay/groups", 0) > 0 for line in lines)
    rollmill.run(path, out=tmp_path / "parts")
    for step in (3, 4, 5):  # as if it had been killed after its second step
        (tmp_path / f"parts/checkpoints/step-{step:06d}").rename(tmp_path / f"gone-{step}")
    resume(tmp_path / "parts")
    whole, parts = (weights(tmp_path / name, 5) for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    capsys.readouterr()
    assert main(["bench", str(tmp_path / "parts"), "--out", str(tmp_path / "bench"), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    own = json.loads((tmp_path / "whole/evaluations/step-000005.json").read_text())["metrics"]
    assert {each["measure"] for each in results} == {"greedy", "sampled"}
    assert all(each["value"] == own[f"eval/{each['measure']}"] for each in results)


@pytest.mark.slow
def test_preferences_of_pictures_are_learned(tmp_path: Path) -> None:
    path = one_stage(tmp_path, algorithm={"name": "dpo"}, rewards=None, rollout=None, steps=4, trainer={"lr": 1e-2})
    rows = tmp_path / "data/rows.jsonl"
    found = [json.loads(line) | {"rejected": "9"} for line in rows.read_text().splitlines()]
    rows.write_text("".join(json.dumps(row) + "\n" for row in found))
    rollmill.run(path, out=tmp_path / "out")
    losses = [line["loss"] for line in metrics(tmp_path / "out")]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.5
