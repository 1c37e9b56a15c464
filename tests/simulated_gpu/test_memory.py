"""On a CUDA device: a step takes the bytes that are planned, and a run chooses by them what `auto` means."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_training import completions
from support.tiny import merged, metrics, tiny_run

import rollmill
from rollmill.algorithms import build_recipe
from rollmill.apps.plan.planning.estimate import estimate_run
from rollmill.config.loader import load_run
from rollmill.config.model import ModelConfig, NewModelConfig, TokenizerConfig
from rollmill.config.run import StageConfig
from rollmill.errors import ConfigError
from rollmill.models.load import build_meta_policy
from rollmill.models.storage import narrow_weights
from rollmill.orchestrator.memory_choice import choose_memory
from rollmill.orchestrator.stage_memory import StageModel, StepTokens
from rollmill.trainer import Trainer

pytestmark = pytest.mark.gpu
SHAPE = NewModelConfig(
    hidden_size=256,
    layers=6,
    heads=4,
    kv_heads=2,
    intermediate_size=768,
    tie_embeddings=False,
    tokenizer=TokenizerConfig(vocab_size=4096),
)
BASE: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "grpo"},
    "steps": 2,
    "trainer": {"precision": "bf16", "lr": 1e-3},
    "evaluation": None,
    "model": {"new": {"hidden_size": 128, "layers": 2}},
}
SETTINGS = ("param_dtype", "gradient_checkpointing", "micro_batch_tokens")


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_takes_the_bytes_that_are_planned(param_dtype: str, checkpointing: bool) -> None:
    """Of two micro-batches of 1,024 tokens; torch counts what it has allocated."""
    trainer = {"param_dtype": param_dtype, "gradient_checkpointing": checkpointing, "micro_batch_tokens": 1024}
    config = StageConfig.model_validate(
        {"taskset": {"path": "tasks.jsonl"}, "algorithm": {"name": "grpo"}, "trainer": {**trainer, "precision": "bf16"}}
    )
    meta = build_meta_policy(ModelConfig(new=SHAPE))
    if param_dtype == "bf16":
        narrow_weights(meta)
    sized = StageModel(config, meta, "cuda", "bf16", StepTokens(257, 2048.0))
    parts = sized.memory()[0]["train"].parts
    planned = sum(parts[name] for name in ("policy", "optimizer", "gradients", "work"))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = type(meta)(meta.config)
    if param_dtype == "bf16":
        narrow_weights(model)
    made = Trainer(
        model, build_recipe(config.algorithm, max_new_tokens=193), config.trainer, total_steps=4, device="cuda"
    )
    batch = completions(2, 4, 256, 193)  # two rows of 256 + 4 x 192 tokens
    made.step(batch, 0)
    torch.cuda.reset_peak_memory_stats()
    made.step(batch, 1)
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(planned, rel=0.1)


def gpu_of(monkeypatch: pytest.MonkeyPatch, total: float) -> None:
    """Lets the device say that it is one of no known kind with this many bytes."""
    properties = SimpleNamespace(**{**vars(torch.cuda.get_device_properties(0)), "name": "GPU", "total_memory": total})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total, total))


def size_for(run: Path, wanted: tuple[Any, ...]) -> float:
    """The smallest GPU on which a run chooses these settings, to a megabyte."""
    loaded = load_run(run)
    model = build_meta_policy(loaded.config.model)
    for megabytes in range(1000, 3000):
        [choice] = choose_memory(loaded.stages, model, megabytes * 1e6, [None])
        if choice.fits:
            assert tuple(choice.values[key] for key in SETTINGS) == wanted
            return megabytes * 1e6
    raise AssertionError("no GPU is large enough")


def kept(folder: Path) -> Any:
    return json.loads((folder / "machine.json").read_text())["memory"]


@pytest.mark.usefixtures("simulated")
def test_plan_and_run_choose_the_same_and_a_resumed_run_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run(tmp_path, **merged(BASE, {"checkpoint": {"every": 1}}))
    total = size_for(run, ("bf16", True, 8192))
    gpu_of(monkeypatch, total)
    out = tmp_path / "out"
    rollmill.run(run, out=out)
    said = " ".join(capsys.readouterr().out.split())
    [chosen] = kept(out)["stages"]
    assert tuple(chosen[key] for key in SETTINGS) == ("bf16", True, 8192)
    assert "param_dtype: bf16, gradient_checkpointing: true, micro_batch_tokens: 8192" in said
    [planned] = estimate_run(run, memory_gb=total / 1e9, prompt_tokens=256)
    assert dict(planned.chosen) == chosen
    assert "param_dtype: auto" in (out / "config.yaml").read_text()

    rollmill.resume(out, steps=3)  # on the same GPU
    assert kept(out)["stages"] == [chosen]
    gpu_of(monkeypatch, 100 * total)  # the weights stay in bf16, and there is room for the rest
    rollmill.resume(out, steps=4)
    [again] = kept(out)["stages"]
    assert tuple(again[key] for key in SETTINGS) == ("bf16", False, 8192)
    assert len(metrics(out)) == 4


@pytest.mark.usefixtures("simulated")
def test_a_run_that_needs_more_than_the_gpu_says_which_keys_would_change_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_of(monkeypatch, 0.5e9)
    with pytest.raises(ConfigError, match=r"phase `\w+` takes .* GB of 0\.45 GB .*model\.lora"):
        rollmill.run(tiny_run(tmp_path, **BASE), out=tmp_path / "out")
