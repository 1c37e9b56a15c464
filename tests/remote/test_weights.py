"""What travels to explorers on Ray: adapters alone, where there are adapters; and nothing twice, where vLLM decodes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors import safe_open
from support.tiny import SFT, metrics, ran, rolled_out
from support.vllm_service import PYTHON, needs_vllm

pytest.importorskip("ray", reason="needs the extra `ray`")

LORA = {"rank": 4, "targets": ["q_proj", "v_proj"]}
GRPO: dict[str, Any] = {"stages": None, "steps": 3, "algorithm": {"name": "grpo"}}
VLLM = {"name": "vllm", "python": str(PYTHON), "cache_gb": 0.1}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_of_a_model_with_adapters_the_adapters_alone_travel(tmp_path: Path) -> None:
    alone = {"evaluation": None, "rewards": None, "rollout": None}
    warm = ran(GRPO, tmp_path, "warm", steps=40, algorithm=SFT["algorithm"], trainer=SFT["trainer"], **alone)
    model: dict[str, Any] = {"path": str(warm / "checkpoints/step-000040"), "new": None, "lora": LORA}
    trainer = {"lr": 1e-2, "precision": "fp32"}
    here = ran(GRPO, tmp_path, "here", model=model, trainer=trainer)
    placement = {"name": "ray", "explorers": 1, "weights": "folder"}
    there = ran(GRPO, tmp_path, "there", model=model, trainer=trainer, placement=placement)
    assert rolled_out(there) == rolled_out(here)
    losses = [[row.get("loss") for row in metrics(run)] for run in (here, there)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert len({row["grad_norm"] for row in metrics(here) if "grad_norm" in row}) == 3  # the adapters moved
    sent = sorted((there / "weights").rglob("*.safetensors"))
    assert len(sent) == 4
    with safe_open(sent[0], "pt") as whole:
        names = list(whole.keys())
        count = sum(whole.get_tensor(name).numel() for name in names)
    assert names
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert count == 4 * (32 + 32) + 4 * (32 + 16)  # rank * (inputs + outputs) of q_proj and of v_proj
    assert all(file.stat().st_size < 4 * count + 4000 for file in sent)


@pytest.mark.service
@pytest.mark.timeout(900)
@needs_vllm
@pytest.mark.parametrize("explorers", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_every_explorer_has_a_vllm_of_its_own_which_reads_the_shared_weights(tmp_path: Path, explorers: int) -> None:
    model = {"new": {"hidden_size": 96, "heads": 3}}
    placement = {"name": "ray", "explorers": explorers, "cpus": 0.5}
    changes: dict[str, Any] = {"engine": VLLM, "model": model, "placement": placement, "steps": 4, "max_staleness": 1}
    out = ran(GRPO, tmp_path, "run", **changes)
    assert [row["step"] for row in metrics(out)] == [0, 1, 2, 3, 4]
    steps = [row for row in metrics(out) if "logprob_gap/mean" in row]  # the others had nothing to learn
    assert max(row["logprob_gap/mean"] for row in steps) < 1e-3
    assert max(row["staleness/max"] for row in steps) <= 1
    assert max(row["grad_norm"] for row in steps) > 0
    left = [each for each in psutil.process_iter(["cmdline"]) if _is_ours(each)]
    assert not psutil.wait_procs(left, timeout=30)[1]
    assert not list(Path("/dev/shm").glob(f"rollmill-{json.loads((out / 'machine.json').read_text())['run_id']}*"))


_OURS = ("ROLLMILL_CACHE", "PYTEST_XDIST_WORKER")
"""Variables that together only the processes of this process of pytest have; see conftest.py."""


def _is_ours(process: psutil.Process) -> bool:
    """Whether this process, and not another one that runs tests, has started a vLLM."""
    if "rollmill.engines.vllm.worker" not in (process.info["cmdline"] or [])[:5]:
        return False
    try:
        return all(process.environ().get(name) == os.environ.get(name) for name in _OURS)
    except psutil.Error:
        return False
