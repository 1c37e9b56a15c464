"""`rollmill algorithms`: the table, one algorithm in full, JSON, plugins; what it prints is a section of a run file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmill.cli import main
from rollmill.config import section as parts
from rollmill.config.algorithms import known_algorithms

PLUGIN = '''\
import rollmill


@rollmill.algorithm(base="gspo", kl=0.1)
def mine(logrppob, advantage, *, power: float = 3.0):
    """One of mine."""
    return -advantage * logrppob * power
'''
RUN = """\
model: {new: {hidden_size: 32}}
taskset: {path: tasks.jsonl}
rewards: [{name: math}]
"""
IMITATION = RUN.replace("rewards: [{name: math}]\n", "")


@pytest.fixture(autouse=True)
def _forgotten_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["algorithms", *argv]) == 0
    return capsys.readouterr().out


def entries(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(printed(capsys, *argv, "--json"))
    return found


def test_the_table_has_a_line_for_every_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys).splitlines()
    assert lines[0].split() == ["name", "advantage", "loss", "aggregation", "source"]
    assert [line.split()[0] for line in lines[1:]] == list(known_algorithms())
    assert "gspo grpo gspo sequence-mean arXiv:2507.18071" in [" ".join(line.split()) for line in lines]
    assert max(map(len, lines)) <= 120


def test_one_algorithm_has_formula_source_parts_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    page = printed(capsys, "dapo")
    for part in (
        "-min(rho A_i, clip(rho, .8, 1.28) A_i)",
        "source         arXiv:2503.14476",
        "learns from    rollouts",
        "loss           ppo_clip (clip_low 0.2, clip_high 0.28)",
        "besides        drop_uniform_groups yes",
    ):
        assert part in page
    assert max(map(len, page.splitlines())) <= 120


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    every = entries(capsys)
    assert [entry["name"] for entry in every] == list(known_algorithms())
    assert {entry["name"]: entry["learns_from"] for entry in every if entry["name"] in ("sft", "mix", "dpo")} == {
        "sft": "worked solutions",
        "mix": "rollouts and worked solutions",
        "dpo": "preference pairs",
    }
    (one,) = entries(capsys, "ppo")
    assert one == next(entry for entry in every if entry["name"] == "ppo")
    assert one["options"]["advantage"]["name"] == "gae"
    assert "A_t = sum_k" in one["definition"]


def test_a_plugins_algorithm_is_the_last_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(PLUGIN)
    last = printed(capsys, "--plugin", "mine.py").splitlines()[-1]
    assert last.split() == ["mine", "grpo", "mine", "sequence-mean", "mine.py"]
    page = printed(capsys, "mine", "--plugin", "mine.py")
    assert page.startswith("One of mine.\n")
    assert "loss           mine (power 3)" in page
    (entry,) = entries(capsys, "mine", "--plugin", "mine.py")
    assert (entry["summary"], entry["options"]["kl"]["coefficient"]) == ("One of mine.", 0.1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["grppo"], "no algorithm `grppo`; did you mean `grpo`? known: grpo, dr_grpo"),
        (["zzzz"], "no algorithm `zzzz`; known: grpo, dr_grpo"),
        (["--plugin", "none.py"], "none.py: no such file; correct the path"),
    ],
)
def test_what_does_not_exist_is_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", known_algorithms())
def test_the_printed_section_is_accepted_by_check(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    section = printed(capsys, name).partition("every key that it honours:\n\n")[2]
    assert yaml.safe_load(section)["algorithm"]["name"] == name
    base = RUN if known_algorithms()[name].uses_rollouts else IMITATION
    Path("run.yaml").write_text(base + section.replace("teacher: null", "teacher: there"))
    assert main(["check", "run.yaml", "--no-data"]) == 0, capsys.readouterr().err
