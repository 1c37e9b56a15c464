"""Loops of one's own: the page's GRPO equals the built-in one, states resume bit for bit, mistakes are explained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.toys import toy_checkpoint, toy_model, toy_tokenizer

import rollmill
from rollmill.config.model import ModelConfig, NewModelConfig
from rollmill.errors import CheckpointError, ConfigError, EngineError, RollmillError, TrainingError
from rollmill.models.from_scratch import save_policy
from rollmill.models.load import load_policy

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "python.md"
SMALL: dict[str, Any] = {
    "rollout": {"group_size": 4, "max_new_tokens": 6},
    "trainer": {"lr": 1e-2, "precision": "fp32"},
    "device": "cpu",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_checkpoint(tmp_path_factory.mktemp("models") / "toy", "qwen3")


@pytest.fixture
def policy(checkpoint: Path) -> Iterator[rollmill.TrainablePolicy]:
    with rollmill.TrainablePolicy(checkpoint, **SMALL) as found:
        yield found


def weights(policy: rollmill.TrainablePolicy) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in policy.model.parameters()])


def batch_of(policy: rollmill.TrainablePolicy) -> list[rollmill.Experience]:
    """Two groups, with rewards that differ within them."""
    batch = [each for group in policy.sample(["how many apples", "the answer is"]) for each in group]
    for number, each in enumerate(batch):
        each.reward = float(number % 3)
    return batch


def learn(policy: rollmill.TrainablePolicy, steps: int, **how: Any) -> list[dict[str, float]]:
    return [policy.forward_backward(batch_of(policy), **how) | policy.optim_step() for _ in range(steps)]


@pytest.mark.slow
def test_the_pages_grpo_is_the_built_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    rows = (ROOT / "examples" / "sums.jsonl").read_text()
    (tmp_path / "examples" / "sums.jsonl").write_text(rows)
    new = NewModelConfig(
        hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=64, context=16, tokenizer={"kind": "char"}
    )
    made = load_policy(ModelConfig(new=new), texts=["0123456789+="], seed=3, device=torch.device("cpu"))
    model = tmp_path / "runs" / "minimal" / "checkpoints" / "step-000100"
    save_policy(made.model, made.tokenizer, model)
    code = re.search(r"```python\n(# own_grpo\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line]) <= 41  # with the file's name
    page: dict[str, Any] = {"__name__": "page"}
    exec(compile(code[1], str(PAGE), "exec"), page)

    (tmp_path / "reward.py").write_text(
        "def closeness(task, completion):\n"
        "    text, answer = completion.text, task.answer\n"
        "    return 1 - abs(int(text) - int(answer)) / 9 if len(text) == 1 and text in '0123456789' else 0.0\n"
    )
    run_file = {
        "name": "built-in",
        "steps": 5,
        "device": "cpu",
        "model": {"path": str(model)},
        "taskset": {"path": "examples/sums.jsonl", "sampler": "sequential"},
        "rewards": [{"name": "python", "function": "reward.py:closeness"}],
        "rollout": {"batch": 4, "group_size": 8, "max_new_tokens": 1},
        "algorithm": {"name": "grpo"},
        "trainer": {"lr": 1e-3, "precision": "fp32"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run_file))
    rollmill.run(tmp_path / "run.yaml", out=tmp_path / "built-in")
    lines = [json.loads(line) for line in (tmp_path / "built-in" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    names = ("loss", "grad_norm", "lr", "entropy", "kl", "tokens")
    assert [{name: line[name] for name in names} for line in steps] == [
        {name: line[name] for name in names} for line in page["history"]
    ]
    assert any(line["grad_norm"] > 0 for line in steps)
    built_in = tmp_path / "built-in" / "checkpoints" / "step-000005" / "model.safetensors"
    assert (tmp_path / "runs" / "own" / "state" / "model.safetensors").read_bytes() == built_in.read_bytes()


def test_a_loaded_state_goes_on_bit_for_bit(checkpoint: Path, tmp_path: Path) -> None:
    settings = SMALL | {"algorithm": {"name": "ppo"}, "steps": 6}
    settings["trainer"] = {**SMALL["trainer"], "schedule": "linear"}
    with rollmill.TrainablePolicy(checkpoint, **settings) as whole:
        learn(whole, 2)
        whole.save_state(tmp_path / "state")
        expected = learn(whole, 3)
        final = weights(whole)
    with rollmill.TrainablePolicy(checkpoint, **settings) as again:
        learn(again, 1)
        again.forward_backward(batch_of(again))  # is discarded
        again.load_state(tmp_path / "state")
        assert again.version == 2
        assert learn(again, 3) == expected
        assert torch.equal(weights(again), final)
        assert {int(each) for each in again.sample(["a"])[0][0].versions if each >= 0} == {5}
        again.save_state(tmp_path / "state")  # replaces its own
        assert sorted(each.name for each in tmp_path.iterdir()) == ["state"]


def test_samples_have_the_log_probs_of_their_weights(policy: rollmill.TrainablePolicy) -> None:
    learn(policy, 1)
    [group] = policy.sample(["how many"], n=3)
    assert len(group) == 3
    for each, own in zip(group, policy.logprobs(group), strict=True):
        assert set(each.versions[each.action_mask]) == {1}
        np.testing.assert_allclose(own, each.logprobs, atol=1e-4)
        assert not own[~each.action_mask].any()
    greedy = policy.sample(["how many"] * 2, n=1, temperature=0.0)
    assert greedy[0][0].response == greedy[1][0].response


def test_gradients_of_several_calls_add_up(policy: rollmill.TrainablePolicy) -> None:
    batch = batch_of(policy)
    gradients = []
    for parts in ([batch], [batch, batch]):
        for part in parts:
            policy.forward_backward(part)
        gradients.append(torch.cat([each.grad.flatten() for each in policy.model.parameters()]))
        policy._trainer.discard()
    torch.testing.assert_close(2 * gradients[0], gradients[1])
    assert gradients[0].any()


def test_a_loss_is_a_name_a_section_or_a_function(checkpoint: Path) -> None:
    def clipped(logprob: torch.Tensor, old_logprob: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        ratio = torch.exp(logprob - old_logprob)
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)

    results = []
    for loss in (None, "grpo", {"name": "grpo"}, clipped, "dr_grpo"):
        with rollmill.TrainablePolicy(checkpoint, **SMALL) as policy:
            results.append([line["grad_norm"] for line in learn(policy, 2, loss=loss)])
    default, name, section, function, other = results
    assert default == name == section
    assert function == pytest.approx(default, rel=1e-4)
    assert other != pytest.approx(default, rel=1e-2)


def test_two_policies_do_not_touch_each_other(checkpoint: Path) -> None:
    def alone(seed: int) -> list[dict[str, float]]:
        with rollmill.TrainablePolicy(checkpoint, seed=seed, **SMALL) as policy:
            return learn(policy, 3)

    expected = alone(1), alone(2)
    with (
        rollmill.TrainablePolicy(checkpoint, seed=1, **SMALL) as one,
        rollmill.TrainablePolicy(checkpoint, seed=2, **SMALL) as two,
    ):
        found: tuple[list[Any], list[Any]] = ([], [])
        for _ in range(3):
            found[0].extend(learn(one, 1))
            found[1].extend(learn(two, 1))
    assert found == expected


def test_a_loaded_model_is_trained_in_place() -> None:
    tokenizer = toy_tokenizer()
    model = toy_model("llama", len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    before = model.get_output_embeddings().weight.detach().clone()
    with rollmill.TrainablePolicy(model, tokenizer, **SMALL) as policy:
        learn(policy, 1)
    assert not torch.equal(model.get_output_embeddings().weight, before)


def test_equal_rewards_change_no_weight(policy: rollmill.TrainablePolicy) -> None:
    batch, before = batch_of(policy), weights(policy)
    for each in batch:
        each.reward = 1.0
    assert policy.forward_backward(batch)["loss"] == 0
    assert policy.optim_step()["skipped"] == 1
    assert torch.equal(weights(policy), before)
    assert policy.version == 1


def test_mistakes_in_batches_are_explained(policy: rollmill.TrainablePolicy) -> None:
    batch = batch_of(policy)
    short = replace(batch[1], logprobs=batch[1].logprobs[:-1])
    alien = replace(batch[1], token_ids=batch[1].token_ids + 10_000)
    groups: Any = [batch]
    for wrong, text in (
        ([batch[0], short], r"batch\[1\] .*logprobs .* one entry per token"),
        ([batch[0], alien], r"batch\[1\] .*outside the model's vocabulary"),
        ([], "at least one"),
        (groups, "join the groups"),
        ([replace(each, reward=None) for each in batch], "no experience has a reward"),
    ):
        with pytest.raises(TrainingError, match=text):
            policy.forward_backward(wrong)
    with pytest.raises(TrainingError, match=r"call forward_backward\(batch\) first"):
        policy.optim_step()
    assert policy.version == 0


def test_mistakes_in_settings_are_explained(checkpoint: Path, policy: rollmill.TrainablePolicy) -> None:
    for settings, text in (
        ({"taskset": {}}, "taskset: TrainablePolicy has no such setting"),
        ({"trainer": {"lrr": 1}}, "trainer.lrr"),
        ({"trainer": {"ranks": 2}}, "trainer.ranks"),
        ({"trainer": {"epochs_per_batch": 2}}, "trainer.epochs_per_batch"),
    ):
        with pytest.raises(ConfigError, match=text):
            rollmill.TrainablePolicy(checkpoint, **settings)
    with pytest.raises(RollmillError, match="does not exist"):
        rollmill.TrainablePolicy(checkpoint / "none")
    with pytest.raises(ConfigError, match="needs its tokenizer"):
        rollmill.TrainablePolicy(policy.model)
    batch = batch_of(policy)
    with pytest.raises(ConfigError, match="grppo"):
        policy.forward_backward(batch, loss="grppo")
    with pytest.raises(TrainingError, match="`ppo` needs a critic"):
        policy.forward_backward(batch, loss="ppo")
    with pytest.raises(TrainingError, match="`grpo` needs a reference model"):
        policy.forward_backward(batch, loss={"name": "grpo", "kl": 0.1})
    with pytest.raises(ConfigError, match="temperature"):
        policy.sample(["a"], temperature=-1)
    with pytest.raises(ConfigError, match="list of prompts"):
        policy.sample("a")
    with pytest.raises(EngineError, match="context"):
        policy.sample(["how many apples " * 300])


def test_states_that_cannot_be_used_are_refused(policy: rollmill.TrainablePolicy, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no saved state"):
        policy.load_state(tmp_path)
    with pytest.raises(CheckpointError, match="is no saved state"):
        policy.save_state(tmp_path)
    other = toy_checkpoint(tmp_path / "other", "qwen3", hidden_size=32)
    with rollmill.TrainablePolicy(other, **SMALL) as smaller:
        state = smaller.save_state(tmp_path / "state")
    before = weights(policy)
    with pytest.raises(CheckpointError, match="of another model"):
        policy.load_state(state)
    assert torch.equal(weights(policy), before)
    policy.close()
    with pytest.raises(EngineError, match="closed"):
        policy.sample(["a"])
