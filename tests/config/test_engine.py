"""The section `engine`: what it may say, and what vLLM cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.cli import main
from rollmill.config.engines import ENGINE_FEATURES
from rollmill.config.loader import load_run

GOOD = """\
model: {new: {hidden_size: 32}}
taskset: {path: tasks.jsonl}
rewards: [{name: math}]
"""
VLLM = GOOD + "engine: {name: vllm}\n"
DRAFTING = GOOD + "engine: {name: vllm, options: {speculative_config: {method: ngram, num_speculative_tokens: 2}}}\n"
EVALUATION = "evaluation: {taskset: {path: tasks.jsonl}, sampling: {%s}}\n"

CASES = {
    "an engine that there is not": (GOOD + "engine: sglang", "run.yaml:4: engine"),
    "a server without tokens": (
        GOOD + "engine: openai",
        "run.yaml:4: engine: a server with OpenAI's API gives neither tokens nor their log-probs, so nothing can be",
    ),
    "a key of another engine": (GOOD + "engine: {name: native, python: python3}", "engine.python"),
    "no update while completions are under way": (
        GOOD + "engine: {name: native, after_update: keep}",
        "run.yaml:4: engine.after_update: not honoured with max_staleness 0: no completion is under way when",
    ),
    "a sleep while completions are under way": (
        GOOD + "engine: {name: vllm, sleep: true}\nmax_staleness: 1",
        "run.yaml:4: engine.sleep: with max_staleness 1 completions are under way while the trainer works; remove",
    ),
    "a sleep of explorers": (
        GOOD + "engine: {name: vllm, sleep: true}\nplacement: ray",
        "run.yaml:5: placement: stage train has engine.sleep, which needs explorers in the trainer's process",
    ),
    "a sleep of explorers of a kind": (
        GOOD + "placement: {name: ray, explorers: [{engine: {name: vllm, sleep: true}}, {}]}",
        "run.yaml:4: placement.explorers.0.engine.sleep: explorers on Ray do not sleep; remove it",
    ),
    "a GPU of vLLM that is the trainer's": (
        GOOD + "engine: {name: vllm, gpus: [0, 2]}",
        "run.yaml:4: engine.gpus: the trainer uses GPU 0; give others, or remove this to share the GPU",
    ),
    "a GPU of vLLM that is a rank's": (
        GOOD + "engine: {name: vllm, gpus: [1, 2]}\ntrainer: {ranks: 2, sharding: fsdp}",
        "run.yaml:4: engine.gpus: the trainer uses GPUs 0 to 1; give others",
    ),
    "a GPU twice": (GOOD + "engine: {name: vllm, gpus: [1, 1]}", "engine.gpus: [1, 1] are no different GPUs"),
    "a sleep on an own GPU": (GOOD + "engine: {name: vllm, gpus: [1], sleep: true}", "engine.gpus: vLLM sleeps to"),
    "GPUs of explorers on Ray": (
        GOOD + "engine: {name: vllm, gpus: [1]}\nplacement: ray",
        "engine.gpus: Ray chooses the GPUs of explorers; say how many each gets by placement.gpus",
    ),
    "GPUs of explorers of a kind": (
        GOOD + "placement: {name: ray, explorers: [{engine: {name: vllm, gpus: [1]}}, {}]}",
        "run.yaml:4: placement.explorers.0.engine.gpus: Ray chooses the GPUs",
    ),
    "an option that is a key": (
        GOOD + "engine: {name: vllm, options: {max_num_seqs: 4}}",
        "max_num_seqs is no option: it is rollout.max_sequences; remove it",
    ),
    "an option that rollmill needs": (
        GOOD + "engine: {name: vllm, options: {logprobs_mode: raw_logits}}",
        "logprobs_mode is no option",
    ),
    "truncation of drafts": (
        DRAFTING + "rollout: {top_p: 0.9}",
        "run.yaml:5: rollout.top_p: with speculative_config vLLM does not say how much probability truncation keeps",
    ),
    "truncation of an evaluation": (
        DRAFTING + EVALUATION % "min_p: 0.1",
        "run.yaml:5: evaluation.sampling.min_p: with speculative_config",
    ),
    "guesses": (VLLM + "rollout: {ngram_draft: {}}", "rollout.ngram_draft: engine `vllm` has speculative decoding"),
    "reuse": (VLLM + "rollout: {reuse: {}}", "rollout.reuse: engine `vllm` takes no drafts"),
    "router replay": (
        VLLM + "trainer: {router_replay: true}",
        "trainer.router_replay: engine `vllm` does not say which experts it chose; use engine `native`, or remove this",
    ),
    "router replay without rollouts": (
        GOOD.replace("rewards: [{name: math}]\n", "") + "algorithm: {name: sft}\ntrainer: {router_replay: true}",
        "trainer.router_replay: not honoured: algorithm `sft` learns from worked solutions and rolls nothing out",
    ),
    "hardly any temperature": (
        VLLM + EVALUATION % "temperature: 0.001",
        "evaluation.sampling.temperature: engine `vllm` raises temperatures below 0.01 to that",
    ),
    "nothing to generate": (
        VLLM.replace("rewards: [{name: math}]\n", "") + "algorithm: {name: sft}",
        "run.yaml:3: engine: not honoured: algorithm `sft` rolls nothing out, and nothing is evaluated; remove it",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_errors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text, message = CASES[name]
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    Path("tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert main(["check", "run.yaml"]) == 2
    assert message in capsys.readouterr().err


def test_a_name_alone_and_a_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    for text, python in (("vllm", None), ("{name: vllm, python: bin/python}", tmp_path / "bin/python")):
        Path("run.yaml").write_text(f"{GOOD}engine: {text}\n")
        [stage] = load_run(Path("run.yaml")).stages
        assert stage.engine.name == "vllm"
        assert stage.engine.python == python
        Path("again.yaml").write_text(load_run(Path("run.yaml")).to_yaml())
        assert load_run(Path("again.yaml")).stages == [stage]
    assert main(["check", "run.yaml"]) == 0
    assert "engine      vllm (python" in capsys.readouterr().out


@pytest.mark.parametrize(
    "keys",
    [
        "max_staleness: 1\nrollout: {token_budget: 100, partial: {learn: newest}}",
        "rollout: {repetition: {penalty: 0.5}}",
        "rollout: {oversample: 0.5}",
    ],
)
def test_how_rollouts_end_is_for_every_engine(keys: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "run.yaml").write_text(VLLM + keys)
    assert load_run(tmp_path / "run.yaml").stages[0].engine.name == "vllm"


def test_a_stage_that_generates_nothing_leaves_the_engine_to_the_others(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "response": "2"}\n')
    stages = "stages: [{name: warm, algorithm: {name: sft}, steps: 2}, {name: learn, steps: 2}]\n"
    (tmp_path / "run.yaml").write_text(VLLM + stages)
    assert load_run(tmp_path / "run.yaml").stages[1].engine.name == "vllm"


ENGINE = """\
import rollmill

@rollmill.engine
class %s:
    supports = %r
    def __init__(self, policy) -> None: ...
    async def generate(self, request): ...
    async def stream(self, request): ...
    def interrupt(self): ...
    async def wait_for_tokens(self): ...
    def pause(self): ...
    def resume(self): ...
    def weights_updated(self, version): ...
    async def drain(self): ...
    async def sleep(self): ...
    def counters(self): ...
    async def close(self): ...
"""


def check_engine(name: str, features: list[str], keys: str) -> int:
    """Check a run with an engine of the project, in the current folder."""
    Path("run.yaml").write_text(GOOD + f"plugins: [{name}.py]\nengine: {name}\n" + keys)
    Path("tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    Path(f"{name}.py").write_text(ENGINE % (name, features))
    return main(["check", "run.yaml"])


@pytest.mark.parametrize(
    ("feature", "keys"),
    [
        ("truncation", "rollout: {top_p: 0.9}"),
        ("truncation", EVALUATION % "top_k: 5"),
        ("stop", 'rollout: {stop: ["END"]}'),
        ("stop", "rollout: {stop_token_ids: [1]}"),
        ("repetition", "rollout: {repetition: {}}"),
        ("ngram_draft", "rollout: {ngram_draft: {}}"),
        ("reuse", "rollout: {reuse: {}}"),
        ("token_budget", "max_staleness: 1\nrollout: {token_budget: 100}"),
        ("router_replay", "trainer: {router_replay: true}"),
    ],
)
def test_an_engine_of_the_project_names_its_features(
    feature: str, keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_engine("able", [feature], keys) == 0
    capsys.readouterr()
    others = [name for name in ENGINE_FEATURES if name != feature]
    assert check_engine("unable", others, keys) == 2
    assert f"engine `unable` does not name `{feature}`" in capsys.readouterr().err


def test_an_engine_for_token_budgets_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"{__name__}.ENGINE", ENGINE.replace("    async def wait_for_tokens(self): ...\n", ""))
    assert check_engine("hasty", ["token_budget"], "") == 2
    assert "hasty: an engine for token budgets needs a method wait_for_tokens" in capsys.readouterr().err
    assert check_engine("plain", [], "") == 0


def test_a_feature_that_there_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_engine("mine", ["trunkation"], "") == 2
    assert (
        "mine.py:3: mine: `supports` names 'trunkation'; the features are truncation, stop," in capsys.readouterr().err
    )
