"""Benchmarks end to end on a tiny model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bench_command import ROOT, bench
from support.gguf_files import write_gguf
from support.toys import toy_model, toy_tokenizer
from support.vllm_service import needs_vllm

from bench import machine
from bench.harness import Measured
from bench.models import Shape
from bench.packing import lengths
from bench.roof import Batch, rollout_seconds, training_seconds, weights
from rollmill.errors import ModelError
from rollmill.models.cpu.int8 import require_int8_products


@pytest.mark.thorough
@pytest.mark.slow
def test_rollout_against_transformers(tmp_path: Path) -> None:
    line = bench(str(tmp_path), "rollout", "--models", "tiny", "--without", "vllm", "--rounds", "1")
    assert line["peer_name"] == "transformers"
    assert line["ratio"] == pytest.approx(line["ours"] / line["peer"], rel=1e-2)


@pytest.mark.thorough
@pytest.mark.slow
def test_rollouts_in_8_bits_against_bf16(tmp_path: Path) -> None:
    try:
        require_int8_products(torch.device("cpu"))
    except ModelError as error:
        pytest.skip(str(error))
    line = bench(str(tmp_path), "int8", "--models", "tiny", "--tasks", "sorting", "--seeds", "0", "--steps", "5")
    assert (line["case"], line["peer_name"]) == ("rollouts tiny", "bf16")
    cases = {case["case"]: case for case in json.loads((tmp_path / "int8.json").read_text())["cases"]}
    assert cases["rollouts tiny"]["update_s"].keys() == {"int8", "bf16"}
    gaps = [cases[f"sorting, {bits} bits, uncorrected"]["gap"][0] for bits in (8, 4)]
    assert 0 < gaps[0] < gaps[1]


@pytest.mark.thorough
@pytest.mark.slow
def test_shares_of_the_roof(tmp_path: Path) -> None:
    line = bench(str(tmp_path), "roof", "--models", "tiny")
    cases = json.loads((tmp_path / "roof.json").read_text())["cases"]
    assert [case["case"] for case in cases] == ["tiny rollout", "tiny train"]
    for case in cases:
        assert 0 < case["share"] == pytest.approx(case["peer"] / case["ours"], abs=1e-3)
    assert line["ratio"] == min(case["ratio"] for case in cases)


def test_the_roof_counts_every_product_and_byte_once() -> None:
    shape = Shape(8, 2, 4, 2, 16, 32, 4, 0.05)  # q 8x16, k and v 8x8, o 16x8, three of 8x16
    assert weights(shape) == (2 * (128 + 64 + 64 + 128 + 3 * 128), 32 * 8)
    batch = Batch(prompts=1, prompt=3, group=2, new_tokens=2)
    fast_memory = Measured("roof", {}, [{"fp32": 1e-9, "read_gb_s": 1e9}])  # one operation a second
    assert training_seconds(shape, batch, "fp32", fast_memory) == pytest.approx(6 * ((3 + 4) * 1536 + 4 * 256))
    prefill, decode = 2 * (3 * 1536 + 256), 2 * 2 * (1536 + 256)  # of two tokens the first comes from the prompt
    assert rollout_seconds(shape, batch, "fp32", fast_memory) == (pytest.approx(prefill + decode), "products")
    slow_memory = Measured("roof", {}, [{"fp32": 1e30, "read_gb_s": 1e-9}])  # one byte a second
    kept = 2 * 2 * 2 * 4  # keys and values of a token: layers, heads, width
    read = 4 * (1536 + 256 + 2 * 32 + kept * (3 + 2))
    assert rollout_seconds(shape, batch, "fp32", slow_memory) == (pytest.approx(read), "memory")


@pytest.mark.thorough
@pytest.mark.slow
def test_step_against_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    line = bench(str(tmp_path), "step", "--models", "tiny", "--rounds", "1", "--trl", "fp32 static cache", "bf16")
    assert line["unit"] == "s"
    assert line["peer_name"].startswith("trl")
    case = json.loads((tmp_path / "step.json").read_text())["cases"][0]
    assert list(case["peer_settings"]) == ["trl fp32 static cache", "trl bf16"]


@pytest.mark.thorough
@pytest.mark.slow
def test_each_side_of_before_has_the_sources_of_its_checkout(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier"
    shutil.copytree(ROOT / "bench", earlier / "bench", ignore=shutil.ignore_patterns("results", "__pycache__"))
    (earlier / "src" / "rollmill").mkdir(parents=True)
    (earlier / "src" / "rollmill" / "__init__.py").write_text("earlier = 2.5")
    (earlier / "bench" / "ours" / "sampling.py").write_text(
        "import rollmill\nfrom bench.worker import Channel, serve\n"
        "serve(Channel(), lambda: {'ms': rollmill.earlier}, versions={})"
    )
    line = bench(str(tmp_path), "before", str(earlier), "--only", "sampling", "--rounds", "1")
    assert (line["case"], line["peer"], line["unit"]) == ("sampling", 2.5, "ms")
    assert 0.99 * line["ratio_min"] <= 2.5 / line["ours"] <= 1.01 * line["ratio_max"]
    refused = subprocess.run(
        [sys.executable, "-m", "bench", "before", str(earlier), "--only", "sampling,sampled"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode != 0
    assert "no case `sampled`; there are rollout m3" in refused.stderr


@pytest.mark.thorough
@pytest.mark.slow
def test_memory_of_a_run_against_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    ways = ["fp32 weights", "bf16 weights", "LoRA over bf16 weights"]
    line = bench(str(tmp_path), "memory", "--model", "tiny", "--ways", *ways)
    cases = json.loads((tmp_path / "memory.json").read_text())["cases"]
    assert [case["case"] for case in cases] == ways
    assert line["unit"] == "GiB"
    assert all(0.1 < case["ours"] < 4 and case["seconds"] > 0 for case in cases)


@pytest.mark.thorough
@pytest.mark.slow
def test_bookings_of_a_toy_in_place_of_the_pretrained_model(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    tokenizer = toy_tokenizer()
    ids: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = toy_model("llama", len(tokenizer), max_position_embeddings=1024, **ids)
    small = {
        "model.path": write_gguf(tmp_path / "toy.gguf", model, tokenizer),
        **{"stages.0.steps": 1, "stages.1.steps": 1, "stages.0.algorithm.batch": 2, "evaluation.limit": 5},
        **{"rollout.batch": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 4},
        **{f"stages.{stage}.trainer.precision": "bf16" for stage in (0, 1)},
    }
    settings = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    trl = ("--trl", "bf16, 64 a pass", "bf16 weights, 16 a pass")
    rounds = ("--rounds", "1", "--warmups", "0")
    line = bench(str(tmp_path), "real", "--seeds", "4", "--runs", str(tmp_path), *rounds, *trl, *settings)
    assert line["peer_name"].startswith("trl bf16")
    [case] = json.loads((tmp_path / "real.json").read_text())["cases"]
    assert list(case["steps"]) == ["ours", "trl bf16, 64 a pass", "trl bf16 weights, 16 a pass"]
    assert all(0 < each["tokens"][0] <= 16 for each in case["steps"].values())
    [run] = case["learned"]
    assert (run["seed"], run["steps"], run["accuracy"], run["precision"]) == (
        4,
        2,
        {"0": 0.0, "1": 0.0, "2": 0.0},
        "bf16",
    )
    assert run["cpu_s"] > 0


@pytest.mark.thorough
@pytest.mark.slow
def test_curriculum_against_the_uniform_sampler(tmp_path: Path) -> None:
    options = ("--seeds", "0", "--samplers", "posterior", "--tasks", "60", "--held-out", "30", "--target", "0")
    line = bench(str(tmp_path), "curriculum", *options, "--svg", str(tmp_path / "curves.svg"))
    assert (line["peer_name"], line["unit"], line["ratio"]) == ("shuffled", "completions", 1.0)
    assert (tmp_path / "curves.svg").read_text().count("<path") > 2


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shares_by_need_against_equal_ones(tmp_path: Path) -> None:
    line = bench(str(tmp_path), "mixing", "--seeds", "0", "--steps", "8", "--warm-steps", "40", "--target", "0")
    assert (line["peer_name"], line["unit"]) == ("weight", "completions")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_reward_that_is_wrong_in_a_fifth_of_all_cases(tmp_path: Path) -> None:
    options = ("--seeds", "0", "--steps", "5", "--held-out", "60")
    line = bench(str(tmp_path), "verify", *options, "--svg", str(tmp_path / "curves.svg"))
    assert (line["peer_name"], line["unit"]) == ("not verified", "share")
    assert (tmp_path / "curves.svg").read_text().count("<path") > 3


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.service
def test_a_long_run_is_opened_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    line = bench(str(tmp_path), "ui", "--rounds", "1", "--steps", "120", "--tokens", "12000")
    assert (line["peer_name"], line["unit"]) == ("TensorBoard", "s")
    case = json.loads((tmp_path / "ui.json").read_text())["cases"][0]
    assert (case["steps"], case["tokens"]) == (120, 12_000)
    assert len(case["one_completion_s"]) == 1


@pytest.mark.thorough
@pytest.mark.slow
def test_a_server_that_is_watched_under_load(tmp_path: Path) -> None:
    line = bench(str(tmp_path), "serve", "--rounds", "1", "--seconds", "1", "--megabytes", "0.3")
    assert (line["peer_name"], line["unit"]) == ("plain FastAPI", "ms")
    assert len(json.loads((tmp_path / "serve.json").read_text())["cases"]) == 4


@pytest.mark.thorough
@pytest.mark.slow
def test_sampling(tmp_path: Path) -> None:
    line = bench(str(tmp_path), "sampling", "--rows", "8", "--vocab", "4096", "--rounds", "1")
    assert line["unit"] == "ms"


@pytest.mark.thorough
@pytest.mark.slow
def test_overlap_against_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    line = bench(str(tmp_path), "overlap", "--model", "tiny", "--rounds", "1")
    assert line["unit"] == "x the longer part"
    cases = json.loads((tmp_path / "overlap.json").read_text())["cases"]
    assert [case["case"] for case in cases] == ["rewards computing", "rewards waiting"]
    assert all(case["seconds"]["ours"]["together_s"] > 0 for case in cases)


@pytest.mark.thorough
@pytest.mark.slow
def test_grade_against_math_verify(tmp_path: Path, data_dir: Path) -> None:
    line = bench(str(tmp_path), "grade", "--count", "200", "--rounds", "1")
    assert line["unit"] == "answers/s"
    [case] = json.loads((tmp_path / "grade.json").read_text())["cases"]
    assert case["correct"]["ours"] == case["expected_correct"] == 100


@pytest.mark.thorough
@pytest.mark.slow
def test_sandbox_against_bubblewrap(tmp_path: Path) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    line = bench(str(tmp_path), "sandbox", "--programs", "5", "--rounds", "1")
    assert line["case"].startswith("namespaces, ")
    cases = json.loads((tmp_path / "sandbox.json").read_text())["cases"]
    assert len(cases) == 8
    assert all(case["execute_ms"] > 0 for case in cases)


@pytest.mark.thorough
@pytest.mark.slow
def test_see_against_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    line = bench(str(tmp_path), "see", "--models", "tiny", "--rounds", "1", "--trl", "fp32", "--without", "vllm")
    assert line["peer_name"] == "trl fp32"
    cases = json.loads((tmp_path / "see.json").read_text())["cases"]
    assert [case["case"] for case in cases] == ["tiny", "tiny tower"]
    assert all(case["ratio"] == pytest.approx(case["peer"] / case["ours"], rel=1e-2) for case in cases)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.service
@needs_vllm
def test_rollouts_with_pictures_against_vllm(tmp_path: Path) -> None:
    line = bench(str(tmp_path), "see", "--models", "tiny", "--rounds", "1", "--without", "trl")
    assert line["peer_name"].startswith("vllm")
    assert line["unit"] == "tokens per processor second"
    record = json.loads((tmp_path / "see.json").read_text())
    assert [case["case"] for case in record["cases"]] == ["tiny rollout"]
    rounds = [one["rounds"][0] for one in record["raw"]]
    assert len(rounds) == 3
    assert {(each["tokens"], each["prompt_tokens"]) for each in rounds} == {(4096, 8 * 87)}


@pytest.mark.thorough
@pytest.mark.slow
def test_what_the_example_with_pictures_learns(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    steps = ("stages.0.steps=2", "stages.0.trainer.warmup_steps=1", "stages.0.evaluation.every=2", "stages.1.steps=2")
    sizes = ("evaluation.every=2", "rollout.batch=4", "stages.0.taskset.options.size=64")
    few = [f"evaluation.sets.{name}.limit=4" for name in ("count", "locate", "add", "blank")]
    settings = [part for each in (*steps, *sizes, *few) for part in ("--set", each)]
    bench(str(tmp_path), "see", "--learn", "--seeds", "3", "--runs", str(tmp_path / "runs"), *settings)
    cases = {case["case"]: case for case in json.loads((tmp_path / "see_learn.json").read_text())["cases"]}
    assert cases.keys() == {"count", "locate", "add", "blank"}
    rows = [json.loads(line) for line in (tmp_path / "runs/seed-3/metrics.jsonl").read_text().splitlines()]
    assert cases["count"]["greedy_before"] == [rows[1]["eval/count/greedy"]]
    assert cases["add"]["sampled_after"] == [rows[3]["eval/add/sampled"]]


@pytest.mark.thorough
@pytest.mark.slow
def test_train_step_against_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    settings = ("fp32, 32 a pass", "bf16, 8 a pass")
    options = ("--models", "tiny", "--rounds", "1", "--new-tokens", "64", "256", "--trl", *settings)
    line = bench(str(tmp_path), "train_step", *options)
    assert line["unit"] == "s"
    assert line["peer_name"].startswith("trl")
    record = json.loads((tmp_path / "train_step.json").read_text())
    assert [case["case"] for case in record["cases"]] == ["tiny", "tiny, 256 tokens"]
    assert list(record["cases"][0]["peer_settings"]) == [f"trl {each}" for each in settings]
    assert list(record["cases"][1]["peer_settings"]) == ["trl bf16, 8 a pass"]
    counted = {
        (one["rounds"][0]["tokens"], one["rounds"][0]["learned"])
        for one in record["raw"]
        if "learned" in one["rounds"][0]
    }
    assert counted == {(4096, 64), (4096, 16)}


@pytest.mark.thorough
@pytest.mark.slow
def test_prefix(tmp_path: Path) -> None:
    options = ("--model", "tiny", "--prompt", "32", "--new-tokens", "8", "--group", "4", "--rounds", "1")
    line = bench(str(tmp_path), "prefix", *options)
    assert line["ratio"] == pytest.approx(line["peer"] / line["ours"], rel=1e-2)
    case = json.loads((tmp_path / "prefix.json").read_text())["cases"][0]
    assert case["bound"] == round(4 * (32 + 7) / (32 + 4 * 7), 3)


@pytest.mark.thorough
@pytest.mark.slow
def test_packing(tmp_path: Path) -> None:
    options = ("--model", "tiny", "--completions", "8", "--median", "8", "--longest", "24", "--rounds", "1")
    line = bench(str(tmp_path), "packing", *options)
    assert line["peer_name"].startswith("padded")
    case = json.loads((tmp_path / "packing.json").read_text())["cases"][0]
    inputs = [prompt + completion - 1 for prompt, (completion,) in lengths(8, 8, 24)]
    assert case["token_ratio"] == round(8 * max(inputs) / sum(inputs), 3)


@pytest.mark.thorough
@pytest.mark.slow
def test_logprob_at_fewer_tokens(tmp_path: Path) -> None:
    line = bench(
        str(tmp_path), "logprob", "--tokens", "128", "--naive-tokens", "64", "--vocab", "5000", "--rounds", "1"
    )
    assert line["unit"] == "MiB"
    assert line["case"] == "64 tokens x 5000"
    case = json.loads((tmp_path / "logprob.json").read_text())["cases"][0]
    assert list(case["ours_by_tokens"]) == ["128", "64"]


@pytest.mark.slow
def test_gpu_check_without_a_gpu(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for options, code in (([], 1), (["--allow-missing"], 0)):
        done = subprocess.run(
            [sys.executable, "-m", "bench", "gpu_check", *options], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == code
        assert "no CUDA device" in done.stdout


@pytest.mark.thorough
@pytest.mark.slow
def test_buffer_against_ray_and_pickled_rows(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    line = bench(str(tmp_path), "buffer", "--batches", "2", "--rounds", "1")
    assert line["unit"] == "experiences/s"
    cases = json.loads((tmp_path / "buffer.json").read_text())["cases"]
    assert len(cases) == 6
    assert cases[-1]["bytes_each"] > 8 * 1000


@pytest.mark.thorough
@pytest.mark.slow
def test_spec_against_plain_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_BENCH_CACHE", str(tmp_path / "cache"))
    options = ("--digits", "3", "--warm-steps", "40", "--batches", "2", "--steps", "1", "--rounds", "1")
    line = bench(str(tmp_path), "spec", *options)
    assert (line["peer_name"], line["unit"]) == ("plain sampling", "tokens/s")
    [case] = json.loads((tmp_path / "spec.json").read_text())["cases"]
    assert 0 < case["accepted"] <= 1
    assert all(abs(z) < 5 for z in case["score_z_reuse"] + case["score_z_plain"])


@pytest.mark.thorough
@pytest.mark.slow
def test_two_ranks_against_ddp(tmp_path: Path) -> None:
    if len(machine.cores()) < 2:
        pytest.skip("one core")
    line = bench(str(tmp_path), "ranks", "--models", "tiny", "--sharding", "none", "--passes", "32", "--rounds", "1")
    assert (line["unit"], line["case"]) == ("tokens/s", "tiny, 2 ranks, none")
    assert line["peer_name"].startswith("DDP, 2")
    cases = json.loads((tmp_path / "ranks.json").read_text())["cases"]
    assert [case["case"] for case in cases] == ["tiny, 1 rank", "tiny, 2 ranks, none"]
    assert cases[0]["speedup"] == 1


@pytest.mark.thorough
@pytest.mark.slow
def test_two_ranks_that_share_a_row_against_one(tmp_path: Path) -> None:
    if len(machine.cores()) < 2:
        pytest.skip("one core")
    line = bench(str(tmp_path), "context", "--models", "tiny", "--tokens", "1024", "--kinds", "completion")
    assert (line["peer_name"], line["unit"]) == ("1 rank", "GiB")
    cases = json.loads((tmp_path / "context.json").read_text())["cases"]
    names = [f"tiny, {what} of 1024 tokens" for what in ("completion", "prefill")]
    assert [case["case"] for case in cases] == [f"{names[0]}, 2 ranks"] * 2 + [names[1]] * 2
    assert cases[2]["cache_gib"] >= cases[2]["keys_and_values_gib"] > 0


@pytest.mark.thorough
@pytest.mark.slow
def test_checkpoint_against_loading_unverified(tmp_path: Path) -> None:
    line = bench(str(tmp_path), "checkpoint", "--model", "tiny", "--rounds", "1")
    assert (line["peer_name"], line["unit"]) == ("unverified", "s")
    cases = {case["case"]: case for case in json.loads((tmp_path / "checkpoint.json").read_text())["cases"]}
    assert set(cases) == {"bfloat16", "float32"}
    assert "sha256, 2 threads" in cases["float32"]["hash_gb_per_s"]


@pytest.mark.thorough
@pytest.mark.slow
def test_start_with_an_environment_that_is_there(tmp_path: Path) -> None:
    line = bench(str(tmp_path), "start", "--rounds", "1", "--python", sys.executable)
    assert line["unit"] == "s"
    found = json.loads((tmp_path / "start.json").read_text())["cases"]
    assert [case["case"].partition(",")[0] for case in found] == ["import", "first token"]
    quickstart = found[0]["quickstart"]
    assert 0 < quickstart["first_step_s"] < quickstart["before_s"] < quickstart["rising_s"] <= quickstart["whole_s"]
    assert quickstart["better"] > quickstart["before"]
    assert found[0]["plan_s"] > 0
