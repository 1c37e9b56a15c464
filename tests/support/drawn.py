"""Combinations of modes, drawn so that every two settings meet: the pairs that work, and those that check refuses.

`python tests/support/drawn.py` draws them again into `drawn.json`. `test_drawn_combinations.py` runs them, and
`docs/mode_matrix.py` makes a table of them.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from bench.tiny_pictures import picture_checkpoint
from rollmill.config.loader import load_run
from rollmill.errors import RollmillError
from support.picture_models import COLOURS
from support.tiny import merged
from support.toys import toy_checkpoint

STEPS = 3
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "processes": {
        "one process": {},
        "processes": {"mode": "train", "trainer_away_s": 120},
        "Ray": {"placement": {"name": "ray", "explorers": 1, "cpus": 0.5}},
    },
    "engine": {"native": {}, "vLLM": {"engine": {"name": "vllm", "cache_gb": 0.1}}},
    "timing": {"synchronous": {}, "asynchronous": {"max_staleness": 1}},
    "weights": {
        "full": {},
        "LoRA": {"model": {"lora": {"rank": 4}}},
        "bf16": {"trainer": {"precision": "bf16", "param_dtype": "bf16"}},
        "FSDP": {"trainer": {"ranks": 2, "sharding": "fsdp"}},
        "tensor parallel": {"trainer": {"ranks": 2, "sharding": "tensor"}},
        "context parallel": {"trainer": {"ranks": 2, "sharding": "context"}},
    },
    "task": {
        "single turn": {},
        "agent": {"workflow": {"name": "tools", "turns": 2}, "tools": ["calculator"]},
        "environment": {"workflow": {"name": "environment", "turns": 2}, "environment": "Echo", "rewards": None},
    },
    "input": {
        "text": {"model": {"path": "text"}, "taskset": {"path": "text.jsonl"}},
        "pictures": {"model": {"path": "seeing"}, "taskset": {"path": "pictures.jsonl"}},
        "uneven pictures": {"model": {"path": "seeing"}, "taskset": {"path": "uneven.jsonl"}},
    },
    "algorithm": {
        "GRPO": {"algorithm": {"name": "grpo"}},
        "PPO": {"algorithm": {"name": "ppo", "critic": {"lr": 1e-3}}},
        "MIX": {"algorithm": {"name": "mix", "expert_ratio": 0.25}},
        "DPO": {"algorithm": {"name": "dpo", "batch": 4}, "rollout": None, "rewards": None},
    },
}
BASE: dict[str, Any] = {
    "supervise": {"restarts": 0},
    "name": "drawn",
    "plugins": ["echo.py"],
    "taskset": {"chat": True},
    "rewards": [{"name": "format", "pattern": "[a-m0-4]"}],
    "rollout": {"batch": 2, "group_size": 4, "max_new_tokens": 6},
    "trainer": {"precision": "fp32", "lr": 1e-3},
    "checkpoint": {"every": 99},
    "steps": STEPS,
}
ECHO = """
import rollmill
from rollmill.rollout.environments import StepResult


@rollmill.environment
class Echo:
    def reset(self, task, seed):
        return "say " + task.answer

    def step(self, action):
        return StepResult("again", float(sum(map(action.count, "abcdefghijklm01234"))), True)
"""


@dataclass(frozen=True)
class Combination:
    """A setting of every factor."""

    settings: Mapping[str, str]

    @property
    def id(self) -> str:
        """Names those that are not the usual ones."""
        others = [value for factor, value in self.settings.items() if value != next(iter(FACTORS[factor]))]
        return ", ".join(others) or "plain"

    def changed(self, **settings: str) -> Combination:
        return Combination({**self.settings, **settings})

    def pairs(self) -> Iterator[Pair]:
        """Every two settings."""
        for pair in itertools.combinations(self.settings.items(), 2):
            yield frozenset(pair)

    def write(self, folder: Path, **changes: Any) -> Path:
        """Write the run file, with `changes` merged into it."""
        run = BASE
        for factor, value in self.settings.items():
            run = merged(run, FACTORS[factor][value])
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump(merged(run, changes), sort_keys=False))
        return path

    def refusal(self, folder: Path) -> str | None:
        """Why check refuses the run file in a folder with the files; None if it does not."""
        try:
            load_run(self.write(folder))
        except RollmillError as error:
            return str(error)
        return None


Pair = frozenset[tuple[str, str]]
DRAWN = Path(__file__).with_suffix(".json")
PLAIN = Combination({factor: next(iter(values)) for factor, values in FACTORS.items()})


@dataclass
class Design:
    """Combinations that work and have every pair of settings, but those that are refused in every combination."""

    rows: list[Combination] = field(default_factory=list)
    refused: dict[Pair, str] = field(default_factory=dict)  #: pair -> reason

    @classmethod
    def read(cls) -> Design:
        """Read `drawn.json`."""
        stored = json.loads(DRAWN.read_text())
        refused = {frozenset((a, b) for a, b in each["pair"]): each["reason"] for each in stored["refused"]}
        return cls([Combination(row) for row in stored["rows"]], refused)

    def to_json(self) -> str:
        """The text of `drawn.json`."""
        order = list(FACTORS)
        refused = [
            {"pair": sorted(map(list, pair), key=lambda each: order.index(each[0])), "reason": reason}
            for pair, reason in self.refused.items()
        ]
        return json.dumps({"rows": [row.settings for row in self.rows], "refused": refused}, indent=1) + "\n"


def write_files(folder: Path) -> Path:
    """Write the models, tasks and the environment that the run files name."""
    (folder / "echo.py").write_text(ECHO)
    # vLLM has no kernel for heads of less than 32; idefics3 is the family that it has without torchvision
    toy_checkpoint(folder / "text", "llama", max_position_embeddings=2048, hidden_size=128, num_key_value_heads=4)
    picture_checkpoint(folder / "seeing", "idefics3", head_dim=32, max_position_embeddings=2048)
    for i in range(12):
        Image.new("RGB", (28 + 14 * (i % 3), 28), COLOURS[i % 4]).save(folder / f"{i}.png")
    pictures = {
        "text": lambda i: [],
        "pictures": lambda i: ["0.png"],
        "uneven": lambda i: [f"{(i + j) % 12}.png" for j in range(i % 3)],
    }
    for name, of in pictures.items():
        rows = [
            {"prompt": f"q{i}", "answer": str(i % 5), "response": str(i % 5), "rejected": "x", "images": of(i)}
            for i in range(12)
        ]
        lines = [json.dumps(row if row["images"] else {k: v for k, v in row.items() if k != "images"}) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def draw(folder: Path, seed: int = 0, tries: int = 60) -> Design:
    """Draw combinations until every pair of settings is in one, or is refused in as many as were tried.

    Args:
        folder: with the files of `write_files`.
    """
    found, chance = Design(), random.Random(seed)
    every = [(factor, value) for factor, values in FACTORS.items() for value in values]
    wanted = [frozenset(pair) for pair in itertools.combinations(every, 2) if pair[0][0] != pair[1][0]]
    covered = set[Pair]()
    known: dict[str, str | None] = {}

    def refusal(row: Combination) -> str | None:
        if row.id not in known:
            known[row.id] = row.refusal(folder)
        return known[row.id]

    for pair in wanted:
        if pair in covered:
            continue
        plain = PLAIN.changed(**dict(sorted(pair)))
        drawn = [
            Combination({factor: chance.choice(list(values)) for factor, values in FACTORS.items()}).changed(
                **dict(pair)
            )
            for _ in range(tries)
        ]
        drawn.sort(key=lambda row: -len(set(row.pairs()) - covered))
        chosen = next((row for row in [*drawn, plain] if refusal(row) is None), None)
        if chosen is None:
            lines = str(refusal(plain)).splitlines()
            found.refused[pair] = "; ".join(re.sub(r"^\S*run\.yaml:\d+: ", "", line) for line in lines)
            continue
        found.rows.append(chosen)
        covered |= set(chosen.pairs())
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        DRAWN.write_text(draw(write_files(Path(made))).to_json())
