"""The judge of all architectures: what it finds right, refused and wrong, and that nothing is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forks import ForkedPopen
from support.sources import PYTHONPATH, ROOT

from bench.architectures import BEGIN, END, PAGE, judged, matrix
from bench.harness import BenchError, with_matrix
from bench.ours.architectures import judge
from bench.ours.vision_architectures import judge_pictures, picture_types
from bench.tiny_architectures import WINDOW, tiny_model
from bench.tiny_pictures import FAMILIES
from rollmill.config.checks.pictures import VISION_MODELS
from rollmill.models import hf_forward
from rollmill.models.load import load_policy
from rollmill.trainer.attention import PackedAttention


def bench(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON line of `python -m bench architectures`, in a process of its own: it forks."""
    command = [sys.executable, "-m", "bench", "architectures", *arguments]
    environment, pipe = os.environ | {"PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{ROOT}"}, subprocess.PIPE
    process = ForkedPopen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)
    out, err = process.communicate()
    assert out, err
    return process.returncode, json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_three_architectures() -> None:
    code, line = bench("--only", "llama", "bloom", "qwen3", "--json")
    assert code == 0
    findings = {finding["name"]: finding for finding in line["findings"]}
    assert {name: finding["verdict"] for name, finding in findings.items()} == {
        "llama": "right",
        "bloom": "refused",
        "qwen3": "right",
    }
    assert (findings["bloom"]["stage"], line["right"], line["refused"]) == ("load", 2, 1)
    for name in ("llama", "qwen3"):
        assert 0 < max(findings[name][key] for key in ("rollout_gap", "chunked_gap", "training_gap")) < 1e-4
        assert 0 < findings[name]["gradient"] < 1e-3


@pytest.mark.slow
def test_two_families_that_see_and_one_that_is_refused() -> None:
    code, line = bench("--pictures", "--only", "qwen2_5_vl", "idefics2", "paligemma", "--json")
    assert (code, line["right"], line["refused"]) == (0, 2, 1)
    findings = {finding["name"]: finding for finding in line["findings"]}
    assert "Idefics2ForConditionalGeneration, which sees pictures" in findings["idefics2"]["why"]
    for name in ("qwen2_5_vl", "paligemma"):
        assert findings[name]["verdict"] == "right"
        assert 0 < max(findings[name][key] for key in ("rollout_gap", "training_gap", "gradient")) < 2e-5
        assert all(findings[name]["picture_tokens"])


@pytest.mark.slow
def test_other_pictures_than_the_reference_sees_are_found_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = hf_forward._picture_arguments

    def darker(*given: Any) -> dict[str, Any]:
        return {k: v * 0.5 if v.is_floating_point() else v for k, v in arguments(*given).items()}

    monkeypatch.setattr(hf_forward, "_picture_arguments", darker)
    finding = judge_pictures("qwen2_vl", tmp_path)
    assert finding.verdict == "wrong"
    assert finding.rollout_gap is not None
    assert finding.rollout_gap > 1e-3
    assert "engine: prefill and decode" in finding.why


def test_every_family_that_is_trained_has_a_tiny_checkpoint_and_a_right_finding() -> None:
    recorded = json.loads((ROOT / "bench" / "results" / "architectures.json").read_text())["vision"]["findings"]
    right = {finding["name"] for finding in recorded if finding["verdict"] == "right"}
    assert right == set(FAMILIES) == VISION_MODELS
    assert {finding["name"] for finding in recorded} == set(picture_types())


def test_the_page_is_that_of_the_last_result() -> None:
    record = json.loads((ROOT / "bench" / "results" / "architectures.json").read_text())
    assert with_matrix(PAGE.read_text(), matrix(record), BEGIN, END) == PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_next", "nemotron_h"])
def test_recurrent_models_decode_what_they_train(architecture: str, tmp_path: Path) -> None:
    """transformers' own functions are off by 3e-4 in both: see rollmill/models/recurrent_functions.py."""
    finding = judge(architecture, tmp_path)
    assert finding.verdict == "right"
    gaps = finding.rollout_gap, finding.chunked_gap, finding.training_gap
    assert all(gap is not None and gap < 1e-4 for gap in gaps)
    assert finding.gradient is not None
    assert finding.gradient < 1e-4


@pytest.mark.slow
def test_a_trainer_that_ignores_windows_is_found_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PackedAttention.attend

    def without_window(self: PackedAttention, *args: Any, **kwargs: Any) -> Any:
        *tensors, options = args
        return attend(self, *tensors, replace(options, sliding_window=None), **kwargs)

    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(PackedAttention, "attend", without_window)
    assert judge("qwen3", tmp_path / "checked").verdict == "refused"
    monkeypatch.setattr("bench.ours.architectures.load_verified_policy", load_policy)
    finding = judge("qwen3", tmp_path / "unchecked")
    assert finding.verdict == "wrong"
    assert finding.rollout_gap is not None
    assert finding.rollout_gap < 1e-4
    assert finding.training_gap is not None
    assert finding.training_gap > 1e-2
    assert finding.why.startswith("training ")


def test_an_error_in_the_trainer_is_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr(PackedAttention, "attend", broken)
    monkeypatch.setattr("bench.ours.architectures.load_verified_policy", load_policy)
    finding = judge("llama", tmp_path)
    assert (finding.verdict, finding.stage) == ("traceback", "training")
    assert "KeyError: 'broken'" in finding.why


def test_an_architecture_that_is_not_known_is_named() -> None:
    with pytest.raises(BenchError, match="no causal language model of type lama"):
        judged(["llama", "lama"], workers=1, progress=False)
    with pytest.raises(BenchError, match="no vision-language model of type llama"):
        judged(["llama", "llava"], workers=1, progress=False, pictures=True)


def test_tiny_models_use_windows_and_leave_no_norm_at_one() -> None:
    model: Any = tiny_model("qwen3")
    assert model.config.sliding_window == WINDOW
    assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    assert all(float((p.detach() - 1).abs().max()) > 0.01 for name, p in model.named_parameters() if "norm" in name)
    again: Any = tiny_model("qwen3")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_the_matrix_goes_between_its_markers() -> None:
    gaps = {"rollout_gap": 1e-6, "chunked_gap": 2e-6, "training_gap": 3e-6, "gradient": 4e-7}
    findings = [
        {"name": "llama", "model": "LlamaForCausalLM", "verdict": "right", "why": "", **gaps},
        {"name": "bloom", "model": "", "verdict": "refused", "why": "model.path: /tmp/x is | not\nsupported"},
        {"name": "gemma3", "model": "Gemma3ForConditionalGeneration", "verdict": "refused", "why": "not causal"},
    ]
    families = [
        {"name": "gemma3", "model": "Gemma3", "verdict": "right", "why": "", **gaps, "picture_tokens": [8, 4]},
        {"name": "aria", "model": "Aria", "verdict": "refused", "why": "the folder is Aria; of those models, ..."},
    ]
    vision = {"versions": {"transformers": "5.1"}, "architectures": 2, "findings": families}
    record = {"versions": {"transformers": "5.0"}, "architectures": 3, "findings": findings, "vision": vision}
    page = with_matrix(f"before\n{BEGIN}\nold\n{END}\nafter\n", matrix(record), BEGIN, END)
    assert page.startswith(f"before\n{BEGIN}\n\ntransformers 5.0, 3 architectures: 1 right, 2 refused.")
    assert page.endswith(f"{END}\nafter\n")
    assert "| llama | 1e-06 | 2e-06 | 3e-06 | 4e-07 |" in page
    assert "| bloom | is \\| not supported |" in page
    assert "| gemma3 | sees pictures: see [Vision-language models](#vision-language-models) |" in page
    assert "### Vision-language models\n\ntransformers 5.1, 2 architectures: 1 right, 1 refused." in page
    assert "| gemma3 | 1e-06 | 3e-06 | 4e-07 | 8, 4 |" in page
    assert "| aria | the folder is Aria |" in page
    assert "\nold\n" not in page
    assert with_matrix(page, matrix(record), BEGIN, END) == page
    assert matrix(record) in page
    with pytest.raises(BenchError, match="lacks the markers"):
        with_matrix("no markers", matrix(record), BEGIN, END)


#: One of each kind: plain, with windows, chunks, sinks or convolutions, recurrent, with experts, with norms of its own.
KINDS = (
    *("gpt2", "cohere2", "gemma3_text", "llama4_text", "gpt_oss", "lfm2", "falcon_h1", "mamba"),
    *("qwen3_moe", "deepseek_v3", "glm_moe_dsa", "minimax"),
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_architectures_of_every_kind_are_as_recorded() -> None:
    recorded = json.loads((ROOT / "bench" / "results" / "architectures.json").read_text())["findings"]
    _, line = bench("--only", *KINDS, "--json")
    found = {finding["name"]: finding["verdict"] for finding in line["findings"]}
    assert found == {finding["name"]: finding["verdict"] for finding in recorded if finding["name"] in KINDS}
    assert set(found) == set(KINDS)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_architecture_is_wrong(tmp_path: Path) -> None:
    _, line = bench("--json", "--folder", str(tmp_path))
    record = json.loads((tmp_path / "architectures.json").read_text())
    findings = record["findings"] + record["vision"]["findings"]
    bad = [f"{f['name']}: {f['verdict']}, {f['why']}" for f in findings if f["verdict"] in ("wrong", "traceback")]
    assert not bad, "\n".join(bad)
    assert line["right"] >= 60
    assert line["not_built"] <= 10
