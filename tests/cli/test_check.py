"""`rollmill check` and what all commands share."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.picture_models import picture_checkpoint, picture_rows
from support.sources import PYTHONPATH
from support.toys import toy_model

import rollmill
from bench.chat_templates.corpus import template
from bench.chat_templates.tokenizers import stand_in
from rollmill.cli import COMMANDS, build_app, handle_errors, main
from rollmill.config.describe import estimate_parameters
from rollmill.config.loader import load_run
from rollmill.config.model import NewModelConfig, TokenizerConfig
from rollmill.errors import ConfigError, TrainingError
from rollmill.models.from_scratch import save_policy

ENVIRONMENT = os.environ | {"PYTHONPATH": PYTHONPATH}

HI, FIVE = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is 5."}
RUN = """\
name: sums
model: {new: {hidden_size: 32, layers: 2, tokenizer: {kind: char}}}
taskset: {path: tasks.jsonl}
rewards: [{name: exact}]
rollout: {batch: 4, group_size: 2, stop: ["\\n"]}
evaluation: {taskset: {path: tasks.jsonl}, limit: 2}
stages:
  - {name: warm, steps: 3, algorithm: {name: sft, batch: 5}}
  - {name: rl, steps: 6, max_staleness: 1, trainer: {lr: 2e-4}}
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN, encoding="utf-8")
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "response": str(i + 1)} for i in range(7)]
    Path("tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_check_prints_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.yaml", "--out", "there"]) == 0
    text = capsys.readouterr().out
    for part in (
        "sums (run.yaml)",
        "there/",
        "2 layers x 32",
        "stage 1 of 2: warm",
        "3, each 5 demonstrations",
        "stage 2 of 2: rl",
        "6, each 4 tasks x 2 completions = 8",
        "max_staleness 1",
        "1 x exact",
        "grpo: advantage grpo (scale group, ddof 1); loss ppo_clip (clip_low 0.2,",
        "lr 0.0002",
        "7 tasks (0 left out)",
        "limit 2",
        "stop ['\\n']",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 120


def test_check_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.yaml", "--json", "--set", "stages.1.steps=8"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["config"]["stages"][1]["steps"] == 8
    assert {"stage": "rl", "section": "evaluation", "tasks": 7, "rejected": 0, "left_out": {}} in answer["tasks"]
    assert answer["out"] == "runs/sums"
    assert answer["parameters"] > 10_000


def test_check_yaml_is_a_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.yaml", "--yaml", "--no-data"]) == 0
    text = capsys.readouterr().out
    Path("resolved.yaml").write_text(text, encoding="utf-8")
    assert yaml.safe_load(text)["stages"][0]["algorithm"] == {"name": "sft", "batch": 5, "aggregation": "token-mean"}
    assert load_run(Path("resolved.yaml")).stages == load_run(Path("run.yaml")).stages


def warnings(capsys: pytest.CaptureFixture[str], *changes: str) -> list[str]:
    assert main(["check", "run.yaml", "--json", *(word for each in changes for word in ("--set", each))]) == 0
    return [str(each) for each in json.loads(capsys.readouterr().out)["warnings"]]


def test_check_warns_of_what_can_hardly_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert warnings(capsys) == []
    [found] = warnings(capsys, "stages.1.trainer.lr=50")
    assert found.startswith("stages.1.trainer.lr: 50 is far above what a model of this size stands")
    assert main(["check", "run.yaml", "--set", "stages.1.trainer.lr=50"]) == 0
    assert capsys.readouterr().err == f"warning: {found}\n"


def test_check_compares_completions_with_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    fits = ("model.new.context=64", "rollout.max_new_tokens=60")  # prompts have 4 characters, which are as many tokens
    assert warnings(capsys, *fits) == []
    found = warnings(capsys, fits[0], "rollout.max_new_tokens=61")
    assert found[0].startswith(
        "stages.0.rollout.max_new_tokens: 61 tokens and the longest prompt (4 tokens) do not fit into the model's "
        "context of 64, where completions end"
    )


def test_check_reads_the_context_of_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    facts = {"text_config": {"max_position_embeddings": 256, "hidden_size": 1024}}
    Path("model/config.json").write_text(json.dumps(facts), encoding="utf-8")
    Path("run.yaml").write_text(
        RUN.replace("{new: {hidden_size: 32, layers: 2, tokenizer: {kind: char}}}", "{path: model}")
    )
    assert warnings(capsys, "rollout.max_new_tokens=200") == []
    long, lr = warnings(
        capsys, "rollout.max_new_tokens=200", "evaluation.sampling.max_new_tokens=4000", "stages.1.trainer.lr=0.01"
    )[1:]
    assert long.startswith("stages.1.evaluation.sampling.max_new_tokens: 4000 tokens and the longest prompt (about 1")
    assert lr.startswith("stages.1.trainer.lr: 0.01 is far above")


def test_check_finds_bad_data(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tasks.jsonl").write_text('{"prompt": "1+1="\n', encoding="utf-8")
    assert main(["check", "run.yaml"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("stage warm: taskset: ")
    assert "tasks.jsonl" in message


def test_check_finds_empty_references(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": " "}, {"prompt": "?", "answer": None}]
    Path("empty.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    text = "model: {new: {}}\ntaskset: {path: empty.jsonl}\nrewards: [{name: math}]\nsteps: 1\n"
    Path("empty.yaml").write_text(text, encoding="utf-8")
    assert main(["check", "empty.yaml"]) == 2
    message = capsys.readouterr().err
    assert "taskset: 1 of 3 tasks have an empty answer (`empty:1`), which the reward `math` cannot" in message
    assert main(["run", "empty.yaml", "--out", "out"]) == 2
    assert "have an empty answer (`empty:1`)" in capsys.readouterr().err
    assert main(["check", "empty.yaml", "--set", "rewards.0.name=exact"]) == 0


def test_check_imports_reward_functions(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("def score(task, completion):\n    return 1.0\n", encoding="utf-8")
    Path("run.yaml").write_text(RUN.replace("name: exact", "name: python, function: 'mine.py:scor'"), encoding="utf-8")
    assert main(["check", "run.yaml"]) == 2
    assert "mine.py defines no `scor`; did you mean `score`?" in capsys.readouterr().err
    assert main(["check", "run.yaml", "--set", "rewards.0.function=mine.py:score"]) == 0
    Path("other.py").write_text("def score(completion):\n    return 1.0\n", encoding="utf-8")
    assert main(["check", "run.yaml", "--set", "rewards.0.function=other.py:score"]) == 2
    assert "is called with (task, completion) and no options, which it does not take" in capsys.readouterr().err


def test_check_gsm8k(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "model: {new: {}}\ntaskset: {preset: gsm8k}\nrewards: [{name: math}]\n"
    Path("run.yaml").write_text(text, encoding="utf-8")
    assert main(["check", "run.yaml", "--set", f"taskset.path={data_dir / 'gsm8k' / 'train.jsonl'}"]) == 0
    assert "7473 tasks (0 left out)" in capsys.readouterr().out


def test_json_or_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.yaml", "--json", "--yaml"]) == 2
    assert "give --json or --yaml, not both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["chekc"], "No such command 'chekc'"),
        (["check"], "give a run file, or --model with the folder of a checkpoint"),
        (["check", "run.yaml", "--jsn"], "--jsn"),
        (["check", "run.yaml", "--set"], "--set"),
    ],
)
def test_wrong_usage(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("say this"), 2), (TrainingError("say this"), 1), (KeyboardInterrupt(), 130)]
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise error

    app = build_app()
    app.command("fail")(handle_errors(command))
    with pytest.raises(SystemExit) as end:
        app(["fail"])
    assert end.value.code == code
    assert capsys.readouterr().err == ("interrupted\n" if code == 130 else "say this\n")


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ROLLMILL_TRACEBACK", "1")
    assert main(["check", "nowhere.yaml"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("Traceback")
    assert "nowhere.yaml: no such file" in message


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rollmill {rollmill.__version__}\n"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert rollmill.__version__ == project["version"]


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, rollmill, rollmill.config.loader\nfrom rollmill.cli import main\n"
        "code = main(['--help'])\nheavy = {'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert all(name in done.stdout for name in ("check", "init"))


@pytest.mark.slow
def test_program_exits_with_the_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollmill", "check", "nowhere.yaml"], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("nowhere.yaml: no such file")


def test_no_command_is_missing() -> None:
    assert set(COMMANDS) == {
        "eval",
        "import-config",
        "run",
        "resume",
        "check",
        "init",
        "quickstart",
        "show",
        "grade",
        "testcases",
        "feedback",
        "merge",
        "export",
        "plan",
        "status",
        "ui",
        "report",
        "scale",
        "algorithms",
        "explain",
        "checkpoints",
        "bench",
        "audit",
        "serve",
    }


@pytest.mark.parametrize("tie", [True, False])
def test_estimate_is_close_to_the_real_size(tie: bool) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    new = NewModelConfig(hidden_size=64, layers=3, tie_embeddings=tie, tokenizer=TokenizerConfig(vocab_size=300))
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=192,
        tie_word_embeddings=tie,
    )
    real = sum(parameter.numel() for parameter in Qwen3ForCausalLM(config).parameters())
    assert estimate_parameters(new) == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize(
    ("name", "messages", "said"),
    [
        ("qwen3", [{"role": "developer", "content": "Be kind."}, HI, FIVE], "task rows:1: "),
        ("gemma3", [HI, FIVE | {"reasoning_content": "Two and three."}], "task rows:1: .*reasoning"),
        ("qwen3", [HI, {"role": "assistant", "content": "The end is <|im_end|>, is it?"}], "task rows:1: .*<\\|im_end"),
        ("qwen3", None, "chat_template_kwargs has `enable_thinkin`"),
    ],
)
def test_check_refuses_a_chat_that_the_template_cannot_show(
    name: str, messages: list[dict[str, str]] | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl", reason="real chat templates are in the package trl, which is not installed")
    tokenizer, ends = stand_in(template(name))
    model = toy_model("llama", len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=4096)
    model.generation_config.eos_token_id = sorted(ends)
    save_policy(model, tokenizer, Path("model"))
    rows = [[HI, FIVE], [HI, FIVE] if messages is None else messages]
    Path("rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    run: dict[str, object] = {"model": {"path": "model"}, "taskset": {"path": "rows.jsonl"}}
    run["stages"] = [{"name": "warm", "steps": 2, "algorithm": {"name": "sft", "batch": 2}}]
    Path("chats.yaml").write_text(json.dumps(run))
    assert main(["check", "chats.yaml", "--set", "taskset.limit=1"]) == 0
    wrong = ["--set", "taskset.chat_template_kwargs={enable_thinkin: false}"] if messages is None else []
    capsys.readouterr()
    for command in ("check", "run"):
        assert main([command, "chats.yaml", *wrong]) == (2 if command == "check" else 1)
        assert re.search(said, capsys.readouterr().err)
    assert not list(Path("runs").glob("**/metrics*"))  # no step was made


DOMAINS = """\
model: {new: {hidden_size: 32, layers: 2, tokenizer: {kind: char}}}
max_staleness: 3
sync_interval: 2
mode: train
rollout: {batch: 4, group_size: 2, token_budget: 300}
domains:
  a: {taskset: {path: tasks.jsonl}, rewards: [{name: exact}], evaluation: {taskset: {path: tasks.jsonl}}}
  b: {taskset: {path: tasks.jsonl}, rewards: [{name: exact}]}
"""


def test_check_prints_what_domains_have_in_common(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(DOMAINS)
    assert main(["check", "run.yaml"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "group_size 2" in text
    assert "token_budget 300, partial (learn all), max_staleness 3, sync_interval 2" in text


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("evaluation.samples=3", "write it into `evaluation` of the domains (domains.NAME.evaluation)"),
        (
            "domains.a.rollout.token_budget=9",
            "a domain has no `token_budget`: `rollout.token_budget` of the stage",
        ),
        ("domains.a.rollout.batch=9", "a domain has no `batch`"),
    ],
)
def test_keys_that_a_domain_lacks_point_to_where_they_count(
    key: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(DOMAINS)
    assert main(["check", "run.yaml", "--set", key]) == 2
    assert says in capsys.readouterr().err


def test_the_name_of_an_algorithm_will_do() -> None:
    def algorithm(*overrides: str) -> Any:
        return load_run(Path("run.yaml"), [*overrides]).stages[1].algorithm

    assert algorithm("algorithm=rloo") == algorithm("algorithm.name=rloo")
    assert algorithm("algorithm=rloo", "algorithm.kl=0.2").kl.coefficient == 0.2
    text = RUN.replace("name: rl,", "name: rl, algorithm: {kl: 0.3},").replace(
        "name: sums", "name: sums\nalgorithm: gspo"
    )
    Path("run.yaml").write_text(text)
    assert (algorithm().name, algorithm().kl.coefficient) == ("gspo", 0.3)


@pytest.mark.parametrize(("family", "code"), [("qwen2_vl", 2), ("idefics3", 0)])
def test_a_vllm_without_torchvision_is_refused_as_a_run_does(
    family: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's Python is one that says what it can import."""
    python = tmp_path / "python"
    answer = {"vllm": True, "xxhash": True, "torchvision": False, "version": [3, 11]}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    python.chmod(0o755)
    model = {"path": str(picture_checkpoint(tmp_path / "model", family))}
    rows = picture_rows(tmp_path / "pictures")
    run = {"model": model, "taskset": {"path": str(rows), "chat": True}, "rewards": [{"name": "exact"}], "steps": 1}
    Path("run.yaml").write_text(json.dumps(run | {"engine": {"name": "vllm", "python": str(python)}}))
    assert main(["check", "run.yaml"]) == code
    said = "has no torchvision, which vLLM needs for qwen2_vl"
    assert (said in capsys.readouterr().err) == (code == 2)
