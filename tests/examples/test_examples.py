"""Every example does what its first lines say, from scratch, on one core."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.forks import Forks, send
from support.tiny import outcome
from transformers import AutoModelForCausalLM

from rollmill import load_experiences
from rollmill.trackers.rollout_log import RolloutLog
from rollmill.types import Experience, ExperienceSource, StopReason

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT_SFT = ["stages.0.steps=3", "stages.0.trainer.warmup_steps=0", "stages.0.evaluation.every=3", "evaluation.limit=4"]
VLLM = Path(__file__).resolve().parents[2] / ".venv-vllm/bin/python"
CHORD = "{name: chord, expert_ratio: 0.1, warmup: 5, decay: 10, peak: 0.3, valley: 0.05}"


def run(server: Forks, folder: Path, example: str, out: str, *settings: str) -> list[dict[str, Any]]:
    """Run an example in `folder` to its end; the rows of metrics.jsonl."""
    words = [word for setting in settings for word in ("--set", setting)]
    ended = server.run("run", EXAMPLES / example, "--out", out, *words, folder=folder)
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]


def greedy(rows: list[dict[str, Any]]) -> list[float]:
    return [row["eval/greedy"] for row in rows if "eval/greedy" in row]


@pytest.fixture(scope="module")
def imitated(server: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which examples/sft.yaml was run."""
    folder = tmp_path_factory.mktemp("imitated")
    run(server, folder, "sft.yaml", "runs/sft")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sft_imitates_a_forgetful_teacher(imitated: Path) -> None:
    """Held-out sums: right where there is no carry to forget, which is 55 % of them, and hardly beyond."""
    rows = [json.loads(line) for line in (imitated / "runs/sft/metrics.jsonl").read_text().splitlines()]
    assert greedy(rows)[0] == 0
    assert 0.4 < greedy(rows)[-1] < 0.8
    assert rows[-1]["loss"] < 0.05 < rows[1]["loss"]
    assert not any(row.get("completions") for row in rows)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ppo_learns_with_a_critic(server: Forks, tmp_path: Path) -> None:
    rows = run(server, tmp_path, "ppo.yaml", "out")
    before, *_, after = greedy(rows)
    assert before < 0.8
    assert after > before + 0.15
    ppo = [row for row in rows if row["stage"] == "reinforce" and "version" in row]
    warm, trained = ppo[:15], ppo[15:]
    assert all(row["grad_norm"] == 0 and row["value/grad_norm"] > 0 for row in warm)
    assert all(row["grad_norm"] > 0 for row in trained)
    explained = [row["value/explained_variance"] for row in ppo]
    assert explained[0] == pytest.approx(0, abs=1e-3)
    assert mean(explained[-5:]) > 0.1
    assert trained[-1]["kl_ref"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_data_is_mixed_verified_refilled_and_replayed(server: Forks, imitated: Path, tmp_path: Path) -> None:
    """From the weights of sft.yaml, which its first stage would give again."""
    there = f"model.path={imitated / 'runs/sft/checkpoints/step-000300'}"
    again = ("steps=1", "trainer.lr=1e-6", "trainer.warmup_steps=0", "evaluation.every=1")
    rows = run(server, tmp_path, "data.yaml", "out", there, *(f"stages.0.{each}" for each in again))
    before, *_, after = greedy(rows)
    assert before < 0.8
    assert after > before + 0.15
    repair = [row for row in rows if row["stage"] == "repair" and "version" in row]
    assert len(repair) == 20
    assert all(row["completions"] == 128 for row in repair), "no batch is short"
    assert sum(row["pipeline/group_variance/dropped"] for row in repair) > 0
    assert all(row["pipeline/group_variance/dropped"] == 8 * (row["raw/groups"] - 16) for row in repair)
    confirmed, changed = (sum(row[f"pipeline/verify/{key}"] for row in repair) for key in ("confirmed", "changed"))
    assert confirmed > 100
    assert changed < 0.05 * confirmed, "both rules say the same, but of odd texts such as `#9r`"
    assert [row["replay/groups"] for row in repair] == [0] + [4] * 19
    assert repair[-1]["tasks/large/share"] == pytest.approx(0.75, abs=0.01)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_dpo_prefers_right_carries(server: Forks, tmp_path: Path) -> None:
    rows = run(server, tmp_path, "dpo.yaml", "out")
    before, *_, after = greedy(rows)
    assert before < 0.8
    assert after > before + 0.15
    pairs = load_experiences(tmp_path / "out", step=301)
    assert Counter(each.reward for each in pairs) == {1.0: 32, 0.0: 32}
    for pair in zip(pairs[::2], pairs[1::2], strict=True):
        truth = sum(map(int, pair[0].prompt.split("+")))
        right, wrong = (int(each.response.partition("#")[2]) for each in pair)
        assert right == truth != wrong


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mix_learns_from_rollouts_and_from_an_expert(server: Forks, tmp_path: Path) -> None:
    rows = run(server, tmp_path, "mix.yaml", "out")
    before, *_, after = greedy(rows)
    assert before < 0.8
    assert after > before + 0.15
    check_experts(tmp_path / "out", range(301, 321))


@pytest.mark.slow
def test_chord_follows_its_schedule(server: Forks, tmp_path: Path) -> None:
    short = [*SHORT_SFT, "rollout.max_new_tokens=4", "stages.1.steps=18"]
    rows = run(server, tmp_path, "mix.yaml", "out", *short, f"stages.1.algorithm={CHORD}")
    chord = [row for row in rows if row["stage"] == "mix" and "version" in row]
    rise = [0.3 * step / 5 for step in range(5)]
    fall = [0.05 + 0.25 * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
    assert [row["weight/sft"] for row in chord] == pytest.approx([*rise, *fall, 0.05, 0.05, 0.05], abs=1e-12)
    assert [row["weight/policy"] for row in chord] == pytest.approx([1 - row["weight/sft"] for row in chord], abs=1e-12)
    check_experts(tmp_path / "out", range(4, 22))


def check_experts(out: Path, steps: range) -> None:
    """ceil(0.1 * 16 * 8) = 13 worked solutions, all right, join the 16 groups of 8 of every step."""
    for step in steps:
        batch = load_experiences(out, step=step)
        assert Counter(each.source for each in batch) == {ExperienceSource.ROLLOUT: 128, ExperienceSource.EXPERT: 13}
        shown = [each for each in batch if each.source is ExperienceSource.EXPERT]
        assert all(each.response.endswith(f"#{sum(map(int, each.prompt.split('+')))}") for each in shown)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lora_trains_adapters_and_saves_merged_weights(server: Forks, imitated: Path) -> None:
    rows = run(server, imitated, "lora.yaml", "lora", "steps=15", "evaluation.every=15", "trainer.precision=fp32")
    before, after = greedy(rows)
    assert after > before + 0.15
    steps = [row for row in rows if "version" in row]
    assert steps[0]["kl_ref"] == 0 < steps[-1]["kl_ref"]
    assert all(row["logprob_gap/max"] < 1e-4 for row in steps)
    folder = imitated / "lora/checkpoints/step-000015"
    check_only_adapters_moved(imitated / "runs/sft/checkpoints/step-000300", folder)
    check_greedy_completions(folder, imitated / "lora/evaluations/step-000015.jsonl")


def check_only_adapters_moved(base: Path, trained: Path) -> None:
    """The linear layers moved, each by a matrix of rank 8, and nothing else did; adapter/ holds the factors."""
    before, after = (load_file(folder / "model.safetensors") for folder in (base, trained))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "_proj" in name}
    for name in moved:
        singular = torch.linalg.svdvals((after[name] - before[name]).double())
        assert singular[8] < 1e-4 * singular[0], name
    factors = load_file(trained / "adapter/adapter_model.safetensors")
    assert len(factors) == 2 * len(moved)
    assert {min(factor.shape) for factor in factors.values()} == {8}


def check_greedy_completions(checkpoint: Path, evaluation: Path) -> None:
    """transformers generates from the merged weights what the engine did at the last evaluation."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for line in evaluation.read_text().splitlines()[:20]:
        stored = json.loads(line)
        start = stored["action_mask"].index(1)
        prompt = torch.tensor([stored["token_ids"][:start]])
        generated = model.generate(prompt, do_sample=False, max_new_tokens=28)[0]
        assert generated.tolist() == stored["token_ids"]


LORA_SHORT = [
    "steps=6", "rollout.batch=4", "evaluation.limit=8", "evaluation.every=3", "checkpoint.every=2",
    "trainer.precision=fp32",
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_lora_resumes_with_the_same_numbers(
    server: Forks, imitated: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    shutil.copytree(imitated / "runs/sft/checkpoints/step-000300", tmp_path / "model")
    settings = [*LORA_SHORT, f"model.path={tmp_path / 'model'}", "max_staleness=1"]
    run(server, tmp_path, "lora.yaml", "whole", *settings)
    words = [word for setting in settings for word in ("--set", setting)]
    server.start("run", EXAMPLES / "lora.yaml", "--out", "out", *words, folder=tmp_path)
    assert server.reaches((tmp_path / "out/checkpoints/step-000002").exists)
    assert send(server.pid, number)
    assert server.wait().code == code
    ended = server.run("resume", "out", folder=tmp_path)
    assert ended.code == 0, ended.err
    found, expected = (outcome(tmp_path / name) | {"checkpoints": None} for name in ("out", "whole"))
    assert found == expected
    adapters = [
        tmp_path / name / "checkpoints/step-000006/adapter/adapter_model.safetensors" for name in ("out", "whole")
    ]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("staleness", [0, 1])
def test_lora_in_bf16(server: Forks, imitated: Path, staleness: int) -> None:
    settings = [*LORA_SHORT[:-1], "trainer.precision=bf16", f"max_staleness={staleness}"]
    rows = run(server, imitated, "lora.yaml", f"bf16-{staleness}", *settings)
    steps = [row for row in rows if "version" in row]
    assert [row["staleness/max"] for row in steps] == [min(staleness, step) for step in range(6)]
    assert any(row["grad_norm"] > 0 for row in steps)
    assert steps[0]["logprob_gap/mean"] < 0.02


def stored(text: str, reward: float | None, stop: StopReason = StopReason.EOS, prompt: str = "12+13\n") -> Experience:
    tokens = np.arange(len(prompt) + len(text), dtype=np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    return Experience(
        id=f"g/{text}",
        task_id="rows:1",
        group="g",
        token_ids=tokens,
        action_mask=tokens >= len(prompt),
        logprobs=zeros,
        versions=np.zeros(len(tokens), np.int32),
        reward=reward,
        stop_reason=stop,
        prompt=prompt,
        response=text,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shortest_correct_completions_and_pairs_train(
    server: Forks, imitated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [
        stored("2+3 #25", 1.0),
        stored("#25", 1.0, StopReason.LENGTH),  # cut off: not a solution
        stored("2+3 1+1 #25", 1.0),  # 11 characters: at least 1.5 times 7
        stored("2+3+1 #25", 1.0),  # 9 characters: not longer enough
        stored("#2", 0.0),  # wrong, but shorter
        stored("2+3+1 #26", 0.0),
        stored("2+3 #26", None),  # not judged
    ]
    second = [stored("2+3+1 #26", 0.0), stored("2 #25", 0.5), stored("#9", 0.0, prompt="4+5\n")]
    store = RolloutLog(tmp_path / "runs/mine/rollouts")
    store.write(1, first)
    store.write(2, second)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["shortest.py", "runs/mine", "--sft", "short.jsonl", "--pairs", "pairs.jsonl"])
    runpy.run_path(str(EXAMPLES / "shortest.py"), run_name="__main__")
    assert capsys.readouterr().out == "short.jsonl: 1 rows\npairs.jsonl: 2 rows\n"
    rows, pairs = (
        [json.loads(line) for line in Path(name).read_text().splitlines()] for name in ("short.jsonl", "pairs.jsonl")
    )
    assert rows == [{"prompt": "12+13\n", "response": "2+3 #25"}]
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [
        ("2+3 #25", "2+3+1 #26"),
        ("2+3 #25", "2+3 1+1 #25"),
    ]
    model = imitated / "runs/sft/checkpoints/step-000300"
    for name, file in (("sft", "short.jsonl"), ("dpo", "pairs.jsonl")):
        words = (
            f"model: {{path: {model}}}\ntaskset: {{path: {file}}}\nsteps: 2\nalgorithm: {{name: {name}, batch: 2}}\n"
        )
        Path(f"{name}.yaml").write_text(words)
        ended = server.run("run", f"{name}.yaml", "--out", name, folder=tmp_path)
        assert ended.code == 0, ended.err
        assert {each.response for each in load_experiences(name)} <= {"2+3 #25", "2+3+1 #26", "2+3 1+1 #25"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_distillation_is_rewarded_by_a_teacher_alone(server: Forks, imitated: Path) -> None:
    teacher = "stages.1.algorithm.teacher=runs/sft/checkpoints/step-000300"
    rows = run(server, imitated, "distill.yaml", "distilled", *SHORT_SFT, teacher, "stages.1.steps=3")
    distilled = [row for row in rows if row["stage"] == "distill" and "version" in row]
    assert len(distilled) == 3
    assert all(row["loss/distill"] > 0 and row["grad_norm"] > 0 and row["judged"] == 64 for row in distilled)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_distillation_learns_what_the_teacher_knows(server: Forks, tmp_path: Path) -> None:
    run(server, tmp_path, "sft.yaml", "runs/teacher", "taskset.options.forget=0")
    rows = run(server, tmp_path, "distill.yaml", "out")
    before, *_, after = greedy(rows)
    assert before < 0.7
    assert after > before + 0.15


@pytest.mark.slow
def test_an_unmodified_program_is_rolled_out_through_the_endpoint(server: Forks, tmp_path: Path) -> None:
    """agent.py knows the openai client alone."""
    assert "rollmill" not in (EXAMPLES / "agent.py").read_text()
    few = ["steps=1", "rollout.batch=2", "rollout.group_size=2"]
    [row] = [row for row in run(server, tmp_path, "agent_program.yaml", "out", *few) if "reward/mean" in row]
    assert row["experiences"] >= 4


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_unmodified_program_is_trained_through_the_endpoint(server: Forks, tmp_path: Path) -> None:
    """With fewer rollouts, each of which is a process, and larger steps."""
    fewer = ["steps=6", "rollout.batch=4", "rollout.group_size=4", "trainer.lr=3e-2", "workflow.at_once=2"]
    rows = run(server, tmp_path, "agent_program.yaml", "out", *fewer)
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert mean(rewards[-2:]) > mean(rewards[:2]) + 0.15
    for one in load_experiences(tmp_path / "out"):
        assert {turn.role for turn in one.turns} <= {"prompt", "assistant", "observation"}
        assert one.action_tokens >= len([turn for turn in one.turns if turn.role == "assistant"]) > 0


@pytest.mark.slow
def test_episodes_longer_than_the_context_are_learned_from_by_segments(server: Forks, tmp_path: Path) -> None:
    """A few steps of the example."""
    sizes = ["stages.0.taskset.options.size=400", "evaluation.taskset.options.size=4"]
    fewer = [*SHORT_SFT, "stages.1.steps=3", *sizes]
    practice = [row for row in run(server, tmp_path, "compaction.yaml", "out", *fewer) if row["stage"] == "practice"]
    assert all(row["episode/compactions"] > 0 for row in practice)
    found = load_experiences(tmp_path / "out", step=practice[-1]["step"])
    assert max(one.info.get("branch", 0) for one in found) >= 1
    assert max(len(one.token_ids) for one in found) <= 64


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_self_play_finds_perfect_moves(server: Forks, tmp_path: Path) -> None:
    """From random moves, within fewer steps than the example has."""
    rows = run(server, tmp_path, "nim.yaml", "out", "stages.1.steps=30")
    before, *_, after = greedy(rows)
    assert before < 0.5
    assert after >= 0.75
    played = [row for row in rows if row.get("stage") == "play" and "role/first/reward" in row]
    for row in played:
        assert row["role/first/completions"] == 240
        assert 0 < row["role/second/completions"] < 200  # in half of the games: the others are against the past
    found = load_experiences(tmp_path / "out", step=played[-1]["step"])
    games: dict[str, dict[str, Experience]] = {}
    for each in found:
        if each.action_tokens:
            games.setdefault(each.id.partition(".")[0], {})[each.role] = each
    both = [sides for sides in games.values() if len(sides) == 2]
    assert both
    for sides in both:
        assert sides["first"].reward + sides["second"].reward == 1  # type: ignore[operator]
        stones, left = (int(each.prompt.removesuffix(">")) for each in (sides["first"], sides["second"]))
        assert stones - int(sides["first"].response) == left
    past = torch.load(tmp_path / "out/checkpoints/step-000090/trainer.pt", weights_only=True)["frozen"]["past"]
    assert list(past["opponent"]) == [0, 10, 20, 30]


OWN_ENGINE = [
    "stages.1.engine=native",
    "stages.1.offload={policy: disk, optimizer: disk, reference: disk, cast: destroyed, cache: destroyed}",
    "trainer.precision=bf16",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "generates"),
    [
        ("native", {"cast", "cache"}),
        pytest.param("vllm", {"engine"}, marks=[pytest.mark.service, pytest.mark.thorough]),
    ],
)
def test_every_phase_of_deepseeks_loop_holds_its_own_components(
    server: Forks, tmp_path: Path, engine: str, generates: set[str]
) -> None:
    if engine == "vllm" and not VLLM.exists():
        pytest.skip("vLLM is not installed: make vllm-setup")
    own = OWN_ENGINE if engine == "native" else [f"stages.1.engine.python={VLLM}", "trainer.precision=fp32"]
    short = ["stages.0.steps=20", "stages.1.steps=2", "stages.0.evaluation.every=20", "evaluation.limit=4"]
    run(server, tmp_path, "deepseek.yaml", "out", *short, *own, "monitor.timeline_every=1")
    line = json.loads((tmp_path / "out/timeline.jsonl").read_text().splitlines()[-1])
    held: dict[str, set[str]] = {}
    for kind in line["bytes"]:
        _, phase, name = kind.split("/")
        held.setdefault(phase, set()).add(name)
    assert held == {
        "rollout": generates,
        "inference": {"policy", "reference"},
        "train": {"policy", "optimizer", "gradients"},
    } | ({"eval": generates} if "eval" in held else {})
    moments = 2 * line["bytes"]["device/train/policy"]
    assert moments <= line["bytes"]["device/train/optimizer"] < 1.01 * moments  # and counts of steps
    assert line["bytes"]["device/inference/reference"] == line["bytes"]["device/inference/policy"]
    report = (tmp_path / "out/report.html").read_text()
    for name in ("policy", "optimizer", "reference", *generates):
        assert f">{name}</text>" in report
    assert "on the device, " in report
