"""Users' losses, advantages and algorithms: what decorators make of functions, and what run files make of that."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import TypeAdapter
from support.forks import Forks
from support.tiny import GRPO, SFT, outcome, tiny_run
from torch import Tensor

import rollmill
from rollmill.algorithms import AdvantageInputs, LossInputs, build_recipe
from rollmill.cli import main
from rollmill.config import section as parts
from rollmill.config.algorithms import DAPO, AlgorithmConfig, known_algorithms
from rollmill.config.algorithms.base import AlgorithmOptions
from rollmill.errors import ConfigError
from rollmill.registry import import_file

PLUGIN = """\
import torch

import rollmill
from rollmill.algorithms import LossInputs


@rollmill.loss
def tempered(inputs: LossInputs, *, tau: float = 1.0, rounds: int = 2) -> torch.Tensor:
    return -inputs.advantage * inputs.logprob / tau


@rollmill.advantage
def best_of(rewards, groups, *, share: float = 0.5) -> torch.Tensor:
    return (rewards - rewards.nan_to_num().mean() * share).nan_to_num()


@rollmill.algorithm(base="dapo", entropy=0.01)
def sharp(logprob, old_logprob, advantage, *, power: float = 1.0):
    return -advantage * torch.exp(power * (logprob - old_logprob))
"""
RUN = """\
model: {new: {hidden_size: 32}}
plugins: [plugin.py]
taskset: {path: tasks.jsonl}
rewards: [{name: math}]
algorithm:
"""


@pytest.fixture(autouse=True)
def _forgotten_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def options(**section: Any) -> AlgorithmOptions:
    made: AlgorithmOptions = TypeAdapter(AlgorithmConfig).validate_python(section)
    return made


def inputs(n: int = 3) -> LossInputs:
    """Log-probs -1 under the policy and -1.5 under the old one, advantages 2."""
    zeros = torch.zeros(n)
    return LossInputs(
        zeros - 1, zeros - 1.5, zeros - 1.5, zeros + 2, zeros, zeros, None, zeros, zeros.long(), zeros.long()
    )


def rewards(*values: float) -> AdvantageInputs:
    r, n = torch.tensor(values).double(), len(values)
    nothing = torch.full((n,), torch.nan).double()
    return AdvantageInputs(
        r, torch.zeros(n).long(), torch.ones(n).long(), torch.arange(n), torch.arange(n), nothing, r, {}
    )


def test_a_loss_is_found_by_name_and_its_options_are_keys() -> None:
    @rollmill.loss
    def tempered(inputs: LossInputs, *, tau: float = 1.0, form: Literal["plain", "square"] = "plain") -> Tensor:
        """Tempered."""
        value = -inputs.advantage * inputs.logprob / tau
        return value**2 if form == "square" else value

    plain = build_recipe(options(name="grpo", loss="tempered"), max_new_tokens=8).terms[0]
    assert plain.fn(inputs()).tolist() == [2, 2, 2]
    section = {"name": "tempered", "tau": 4, "form": "square"}
    chosen = build_recipe(options(name="grpo", loss=section), max_new_tokens=8).terms[0]
    assert chosen.fn(inputs()).tolist() == [0.25, 0.25, 0.25]
    assert not chosen.uses_advantage, "the trainer must not leave out tokens whose advantage is 0"
    assert tempered(inputs(), tau=2.0).tolist() == [1, 1, 1], "the decorated function stays a function"


def test_parameters_are_found_by_the_names_of_the_inputs() -> None:
    @rollmill.loss
    def by_name(old_logprob: Tensor, logprob: Tensor, *, factor: float = 10.0) -> Tensor:
        return factor * (logprob - old_logprob)

    @rollmill.advantage
    def halved(rewards: Tensor, groups: Tensor, *, over: int = 2) -> Tensor:
        return (rewards / over).nan_to_num()

    section = options(name="grpo", loss="by_name", advantage={"name": "halved", "over": 4})
    recipe = build_recipe(section, max_new_tokens=8)
    assert recipe.terms[0].fn(inputs()).tolist() == [5, 5, 5]
    assert recipe.advantage is not None
    result = recipe.advantage(rewards(1.0, float("nan"), 2.0))
    assert result.values.tolist() == [0.25, 0, 0.5]
    assert result.counted.tolist() == [True, False, True]


def test_an_algorithm_from_a_function_is_its_base_with_another_loss() -> None:
    @rollmill.algorithm(base="dapo", kl=0.1, corrections=["tis"], advantage="rloo")
    def mine(logprob: Tensor, advantage: Tensor, *, power: float = 3.0) -> Tensor:
        """Mine."""
        return -advantage * logprob * power

    found = options(name="mine")
    assert isinstance(found, DAPO)
    assert found.model_dump(include={"kl", "advantage", "loss", "drop_uniform_groups", "aggregation"}) == {
        "kl": {
            "coefficient": 0.1,
            "estimator": "k3",
            "where": "loss",
            "target": None,
            "horizon": 10_000,
            "refresh_every": None,
        },
        "advantage": {"name": "rloo"},
        "loss": {"name": "mine", "power": 3.0},
        "drop_uniform_groups": True,
        "aggregation": "token-mean",
    }
    assert known_algorithms()["mine"].source == __file__
    partial = options(name="mine", loss={"power": 0.5}, kl={"estimator": "k2"}, aggregation="constant")
    assert build_recipe(partial, max_new_tokens=8).terms[0].fn(inputs()).tolist() == [1, 1, 1]
    assert partial.model_dump()["kl"] | {"estimator": "k3"} == found.model_dump()["kl"], "the coefficient stays"
    assert options(name="rloo", loss="mine").model_dump()["loss"] == {"name": "mine", "power": 3.0}


def test_an_algorithm_from_a_class_keeps_its_own_defaults() -> None:
    @rollmill.algorithm
    class Gentle(DAPO):
        """DAPO with a wider bound."""

        name: Literal["gentle"] = "gentle"  # type: ignore[assignment]
        entropy: float = 0.5

    found = options(name="gentle", loss={"clip_low": 0.1})
    assert isinstance(found, Gentle)
    assert (found.loss.model_dump(), found.entropy) == (
        {"name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.28, "dual_clip": None},
        0.5,
    )
    assert [term.name for term in build_recipe(found, max_new_tokens=8).terms] == ["policy", "entropy"]
    assert list(known_algorithms())[-1] == "gentle"


def test_a_later_function_of_the_same_name_replaces_the_earlier_one() -> None:
    for value in (1.0, 2.0):

        @rollmill.loss
        def again(logprob: Tensor, *, value: float = value) -> Tensor:
            return torch.full_like(logprob, value)

    assert build_recipe(options(name="grpo", loss="again"), max_new_tokens=8).terms[0].fn(inputs()).tolist() == [2] * 3


WRONG = {
    "no type": ("@rollmill.loss\ndef f(logprob, *, tau=1.0): ...", r"f: the option `tau` needs a type and a default"),
    "no default": (
        "@rollmill.advantage\ndef f(rewards, *, tau: float): ...",
        r"f: the option `tau` needs a type and a",
    ),
    "default of another type": (
        "@rollmill.loss\ndef f(logprob, *, tau: float = 'hot'): ...",
        r"f: the default of the option `tau` is wrong: Input should be a valid number",
    ),
    "unknown base": (
        "@rollmill.algorithm(base='grppo')\ndef f(logprob): ...",
        r"f: base `grppo` is no algorithm that rolls out; did you mean `grpo`\?",
    ),
    "base without rollouts": (
        "@rollmill.algorithm(base='sft')\ndef f(logprob): ...",
        r"f: base `sft` is no algorithm that rolls out; see",
    ),
    "unknown key": (
        "@rollmill.algorithm(clip_high=0.3)\ndef f(logprob): ...",
        r"f: clip_high: Extra inputs are not permitted; correct the decorator's arguments",
    ),
    "wrong value of a key": (
        "@rollmill.algorithm(kl={'estimator': 'k9'})\ndef f(logprob): ...",
        r"f: kl\.estimator: Input should be 'k1', 'k2', 'k3', 'abs' or 'unbiased'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_decorator_refuses_it_refuses_by_file_and_line(name: str) -> None:
    code, message = WRONG[name]
    Path("wrong.py").write_text(f"import rollmill\n\n\n{code}\n")
    with pytest.raises(ConfigError, match=rf"^\S*wrong\.py:4: {message}"):
        import_file(Path("wrong.py"))


def test_a_parameter_that_is_no_input_is_refused_before_the_first_step() -> None:
    @rollmill.loss
    def odd(logprob: Tensor, adv: Tensor) -> Tensor:
        return -logprob * adv

    message = r"test_user.py:\d+: odd: the parameter `adv` stands for nothing; .*advantage"
    with pytest.raises(ConfigError, match=message):
        build_recipe(options(name="grpo", loss="odd"), max_new_tokens=8)


MISTAKES = {
    "a wrong value": (
        "  name: grpo\n  loss:\n    name: tempered\n    tau: high\n",
        "run.yaml:9: algorithm.loss.tau: expected a number, found `high`",
    ),
    "a fraction": (
        "  {name: grpo, loss: {name: tempered, rounds: 1.5}}",
        "run.yaml:6: algorithm.loss.rounds: expected a whole number, found `1.5`",
    ),
    "an unknown key": (
        "  name: grpo\n  loss: {name: tempered, taw: 2}\n",
        "run.yaml:7: algorithm.loss.taw: unknown key; did you mean `tau`?",
    ),
    "an unknown key of an advantage": (
        "  name: grpo\n  advantage: {name: best_of, shares: 2}\n",
        "run.yaml:7: algorithm.advantage.shares: unknown key; did you mean `share`?",
    ),
    "a wrong option of an algorithm": (
        "  name: sharp\n  loss: {power: [1]}\n",
        "run.yaml:7: algorithm.loss.power: expected a number, found a list of 1",
    ),
    "an unknown key of an algorithm": (
        "  name: sharp\n  entrpy: 1\n",
        "run.yaml:7: algorithm.entrpy: unknown key; did you mean `entropy`?",
    ),
    "an unknown loss": (
        "  name: grpo\n  loss: tempred\n",
        "run.yaml:7: algorithm.loss.name: `tempred` is not known; did you mean `tempered`? valid: ppo_clip",
    ),
    "an unknown algorithm": (
        "  name: shrp\n",
        "run.yaml:6: algorithm.name: `shrp` is not known; did you mean `sharp`? valid: grpo",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_users_option_is_found_in_the_run_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    section, message = MISTAKES[name]
    Path("plugin.py").write_text(PLUGIN)
    Path("run.yaml").write_text(RUN + section)
    assert main(["check", "run.yaml", "--no-data"]) == 2
    assert message in capsys.readouterr().err


def test_check_prints_a_users_algorithm_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plugin.py").write_text(PLUGIN)
    Path("run.yaml").write_text(RUN + "  {name: sharp, loss: {power: 2}, advantage: best_of}")
    assert main(["check", "run.yaml", "--no-data"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "sharp: advantage best_of (share 0.5); loss sharp (power 2); aggregation token-mean" in text


def test_a_run_with_a_plugin_trains_and_resumes(tmp_path: Path, server: Forks) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    section = {"name": "sharp", "loss": {"power": 2.0}, "advantage": "best_of"}
    stage = GRPO | {"algorithm": section, "steps": 4}
    tiny_run(tmp_path, plugins=["plugin.py"], stages=[SFT | {"steps": 2}, stage])
    ended = server.run("run", "run.yaml", "--out", "out", folder=tmp_path)
    assert ended.code == 0, ended.err
    whole = outcome(tmp_path / "out")
    last = whole["metrics"][-1]
    assert (last["stage"], last["step"]) == ("repair", 6)
    assert {"loss/policy", "loss/entropy", "reward/mean"} <= last.keys()
    assert any(row.get("stage") == "repair" and row.get("grad_norm", 0) > 0 for row in whole["metrics"])
    newest = sorted((tmp_path / "out" / "checkpoints").glob("step-*"))[-1]
    shutil.rmtree(newest)
    assert sorted((tmp_path / "out" / "checkpoints").glob("step-*")), "nothing is left to resume from"
    ended = server.run("resume", "out", folder=tmp_path)
    assert ended.code == 0, ended.err
    again = outcome(tmp_path / "out")
    assert again["metrics"] == whole["metrics"]
    assert again["weights"] == whole["weights"]
