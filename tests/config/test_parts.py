"""Parts of an algorithm: shorthands, partial overrides, and what includes, stages and `--set` make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmill.cli import main
from rollmill.config.algorithms import known_algorithms
from rollmill.config.algorithms.base import PolicyGradientOptions
from rollmill.config.loader import LoadedRun, load_run

GOOD = """\
model: {new: {hidden_size: 32}}
taskset: {path: tasks.jsonl}
rewards: [{name: math}]
"""
DAPO_LOSS = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str, name: str = "run.yaml") -> LoadedRun:
    Path(name).write_text(text, encoding="utf-8")
    return load_run(Path(name), overrides, require_files=False)


def algorithm(section: str, *overrides: str) -> dict[str, Any]:
    """The resolved section `algorithm`."""
    run = load(GOOD + f"algorithm: {section}\n", *overrides)
    return run.stages[0].algorithm.model_dump(mode="json")


def stages(text: str) -> list[dict[str, Any]]:
    """The resolved section `algorithm` of every stage."""
    return [stage.algorithm.model_dump(mode="json") for stage in load(GOOD + text).stages]


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("{name: grpo, loss: gspo}", "{name: grpo, loss: {name: gspo}}"),
        ("{name: grpo, advantage: rloo}", "{name: grpo, advantage: {name: rloo}}"),
        ("{name: grpo, kl: 0.1}", "{name: grpo, kl: {coefficient: 0.1}}"),
        ("{name: grpo, kl: 1}", "{name: grpo, kl: {coefficient: 1.0}}"),
        ("{name: grpo, corrections: [tis, {name: mis, low: 0.1}]}",) * 2,
        ("{name: grpo, corrections: [tis]}", "{name: grpo, corrections: [{name: tis, cap: 2.0}]}"),
    ],
)
def test_a_name_or_number_stands_for_a_section(short: str, long: str) -> None:
    assert algorithm(short) == algorithm(long)


@pytest.mark.parametrize(
    ("section", "part", "expected"),
    [
        ("{name: dapo, loss: {clip_low: 0.1}}", "loss", DAPO_LOSS | {"clip_low": 0.1}),
        ("{name: dapo, loss: {name: ppo_clip, dual_clip: 3}}", "loss", DAPO_LOSS | {"dual_clip": 3.0}),
        ("{name: dapo, loss: ppo_clip}", "loss", DAPO_LOSS),
        (
            "{name: reinforce_plus_plus, kl: 0.5}",
            "kl",
            {
                "coefficient": 0.5,
                "estimator": "k1",
                "where": "reward",
                "target": None,
                "horizon": 10_000,
                "refresh_every": None,
            },
        ),
        (
            "{name: reinforce_plus_plus_baseline, kl: {target: 0.01}}",
            "kl",
            {
                "coefficient": 0.01,
                "estimator": "k2",
                "where": "loss",
                "target": 0.01,
                "horizon": 10_000,
                "refresh_every": None,
            },
        ),
        (
            "{name: reinforce_plus_plus_baseline, advantage: {ddof: 0}}",
            "advantage",
            {"name": "reinforce_plus_plus", "baseline": "group", "ddof": 0},
        ),
        ("{name: lite_ppo, advantage: grpo}", "advantage", {"name": "grpo", "scale": "batch", "ddof": 1}),
        (
            "{name: ppo, critic: {lr: 1e-3}}",
            "critic",
            {"lr": 1e-3, "network": "own", "value_clip": 0.2, "warmup_steps": 0},
        ),
    ],
)
def test_a_partial_section_keeps_the_algorithms_own_defaults(section: str, part: str, expected: dict[str, Any]) -> None:
    assert algorithm(section)[part] == expected


@pytest.mark.parametrize(
    ("section", "part", "expected"),
    [
        ("{name: dapo, loss: cispo}", "loss", {"name": "cispo", "clip_low": 1.0, "clip_high": 4.0}),
        ("{name: gspo, loss: {name: ppo_clip}}", "loss", DAPO_LOSS | {"clip_high": 0.2}),
        ("{name: rloo, advantage: {name: reinforce}}", "advantage", {"name": "reinforce", "baseline": "batch"}),
    ],
)
def test_another_name_replaces_the_part_with_its_own_defaults(
    section: str, part: str, expected: dict[str, Any]
) -> None:
    assert algorithm(section)[part] == expected


def test_an_algorithm_with_a_gae_advantage_has_a_critic() -> None:
    assert algorithm("{name: grpo, advantage: gae, critic: {lr: 1e-4}}")["critic"]["lr"] == 1e-4


@pytest.mark.parametrize(
    ("above", "below", "part", "expected"),
    [
        ("{name: dapo, loss: {clip_low: 0.1}}", "{loss: {clip_high: 0.3}}", "loss", [0.1, 0.3]),
        ("{name: dapo, loss: {clip_low: 0.1}}", "{name: dapo, loss: {clip_high: 0.3}}", "loss", [0.1, 0.3]),
        ("{name: dapo, loss: {clip_low: 0.1}}", "{loss: ppo_clip}", "loss", [0.2, 0.28]),  # named: replaced
        ("{name: dapo, loss: {clip_low: 0.1}}", "{loss: gspo}", "loss", [3e-4, 4e-4]),
        ("{name: grpo, loss: gspo}", "{loss: {clip_high: 1e-3}}", "loss", [3e-4, 1e-3]),
        ("{name: grpo, loss: gspo}", "{loss: {name: ppo_clip, clip_high: 0.4}}", "loss", [0.2, 0.4]),
        ("{name: grpo, loss: {clip_low: 0.1}}", "{name: dapo, loss: {dual_clip: 3}}", "loss", [0.2, 0.28]),
        ("{name: grpo, kl: 0.1}", "{kl: {target: 0.02}}", "kl", [0.1, 0.02]),
        ("{name: grpo, kl: {coefficient: 0.1, target: 0.02}}", "{kl: 0.3}", "kl", [0.3, 0.02]),
    ],
)
def test_stages_and_includes_overlay_parts_alike(above: str, below: str, part: str, expected: list[float]) -> None:
    run = GOOD + f"algorithm: {above}\nstages: [{{name: a}}, {{name: b, algorithm: {below}}}]\n"
    staged = load(run).stages[1].algorithm.model_dump(mode="json")[part]
    Path("base.yaml").write_text(GOOD + f"algorithm: {above}\n")
    included = load(f"include: base.yaml\nalgorithm: {below}\n").stages[0].algorithm.model_dump(mode="json")[part]
    assert staged == included
    keys = ("clip_low", "clip_high") if part == "loss" else ("coefficient", "target")
    assert [staged[key] for key in keys] == expected


def test_a_key_of_rollouts_beside_pairs_says_what_is_learned_from(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD + "algorithm: {name: dpo}\nrollout: {batch: 3}\n")
    assert main(["check", "run.yaml", "--no-data"]) == 2
    expected = "run.yaml:5: rollout.batch: not honoured: algorithm `dpo` learns from preference pairs and rolls nothing"
    assert expected in capsys.readouterr().err


def test_another_algorithm_takes_over_nothing() -> None:
    first, second = stages(
        "algorithm: {name: grpo, entropy: 0.1, advantage: rloo}\n"
        "stages: [{name: a}, {name: b, algorithm: {name: dapo}}]\n"
    )
    assert (first["advantage"]["name"], first["entropy"]) == ("rloo", 0.1)
    assert (second["advantage"]["name"], second["entropy"]) == ("grpo", 0.0)


def test_set_reaches_into_parts() -> None:
    found = algorithm("{name: dapo}", "algorithm.loss.clip_low=0.1", "algorithm.kl=0.2", "algorithm.advantage=rloo")
    assert found["loss"] == DAPO_LOSS | {"clip_low": 0.1}
    assert (found["kl"]["coefficient"], found["advantage"]) == (0.2, {"name": "rloo"})


def test_set_reaches_into_a_part_that_is_a_name_or_a_number() -> None:
    found = algorithm("{name: grpo, loss: gspo, kl: 0.1}", "algorithm.loss.clip_high=1e-3", "algorithm.kl.target=0.02")
    assert found["loss"] == {"name": "gspo", "clip_low": 3e-4, "clip_high": 1e-3}
    assert (found["kl"]["coefficient"], found["kl"]["target"]) == (0.1, 0.02)
    found = algorithm("{name: grpo}", "algorithm.advantage=asymre", "algorithm.advantage.beta=0.3")
    assert found["advantage"] == {"name": "asymre", "beta": 0.3, "keep_uniform": False}


CHANGED = "{name: %s, kl: 0.2, loss: {name: cispo, clip_high: 2}, entropy: 0.01, corrections: [tis, k3]}"
ROLLING = [name for name, section in known_algorithms().items() if issubclass(section, PolicyGradientOptions)]


@pytest.mark.parametrize("name", known_algorithms())
def test_a_resolved_run_file_loads_to_the_same_run(name: str) -> None:
    needs_rewards = known_algorithms()[name].uses_rollouts
    base = GOOD if needs_rewards else GOOD.replace("rewards: [{name: math}]\n", "")
    changed = CHANGED.replace("corrections: [tis, k3]", "corrections: [off_policy_mask]") if name == "topr" else CHANGED
    sections = ("{name: %s}", changed if name in ROLLING else "{name: %s, batch: 3}")
    sections = {
        "distill": ("{name: %s, teacher: there, divergence: jsd}",),
        "jsd": ("{name: %s, teacher: there, beta: 0.3}",),
        "self_distill": ("{name: %s, context: answer, weights: initial}",),
    }.get(name, sections)
    for section in sections:
        run = load(base + f"algorithm: {section % name}\n")
        again = load(run.to_yaml(), name="again.yaml")
        assert again.stages == run.stages
        assert again.config == run.config
        assert again.to_yaml() == run.to_yaml()


@pytest.mark.slow
def test_a_resolved_run_with_several_stages_loads_to_the_same_run() -> None:
    entries = ", ".join(f"{{name: {name}-stage, algorithm: {{name: {name}}}}}" for name in ROLLING)
    run = load(GOOD + f"stages: [{entries}]\n")
    again = load(run.to_yaml(), name="again.yaml")
    assert again.stages == run.stages
    assert [stage["algorithm"]["name"] for stage in yaml.safe_load(run.to_yaml())["stages"]] == ROLLING


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{name: grpo, critic: {lr: 1}}", "algorithm.critic: advantage `grpo` needs no critic; `gae` (algorithm ppo)"),
        ("{name: grpo, kl: {target: 0.1}}", "algorithm.kl.target: not honoured with coefficient 0; give kl.coeff"),
        ("{name: grpo, kl: {coefficient: 1, horizon: 5}}", "algorithm.kl.horizon: not honoured without kl.target"),
        ("{name: ppo, drop_uniform_groups: true}", "algorithm.drop_uniform_groups: not honoured by advantage `gae`"),
        ("{name: opmd, advantage: {tau: 2}}", "algorithm.advantage.tau: not honoured with baseline `mean`"),
        (
            "{name: gdpo, kl: {coefficient: 0.1, where: reward}}",
            "algorithm.kl.where: advantage `gdpo` sees the parts of the reward, which have no KL in them; use `loss`",
        ),
        ("{name: grpo, kl: true}", "algorithm.kl: expected a section (`key: value` lines), found `true`"),
        ("{name: grpo, loss: 3}", "algorithm.loss: expected a section (`key: value` lines), found `3`"),
        ("{name: grpo, corrections: [tiss]}", "algorithm.corrections.0.name: `tiss` is not known; did you mean `tis`?"),
        (
            "{name: grpo, corrections: [{name: tis, low: 1}]}",
            "algorithm.corrections.0.low: `low` is honoured by correction",
        ),
    ],
)
def test_what_does_not_fit_is_named(section: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD + f"algorithm: {section}\n")
    assert main(["check", "run.yaml", "--no-data"]) == 2
    assert f"run.yaml:4: {message}" in capsys.readouterr().err
