"""Runs with domains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from support.tiny import HELD_OUT, NEW_MODEL, TASKS

WORDS = [
    {"prompt": f"up {a}{b}:", "answer": (a + b).upper(), "response": f"{a}{b}#".upper()} for a in "abc" for b in "abc"
]


def domains_of(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "words.jsonl").write_text("\n".join(json.dumps(each) for each in WORDS))
    add = {
        "taskset": TASKS,
        "rewards": [{"name": "exact", "after": "#"}],
        "weight": 2,
        "evaluation": {"taskset": HELD_OUT},
    }
    words: dict[str, Any] = {
        "taskset": {"path": "words.jsonl", "sampler": "sequential"},
        "rewards": [{"name": "format", "pattern": "[0-4A-C]"}, {"name": "repetition", "weight": 0.5}],
        "rollout": {"max_new_tokens": 6, "group_size": 3, "temperature": 0.8},
        "algorithm": {"name": "dr_grpo"},
        "pipeline": [{"name": "length_filter", "at_most": 6}],
    }
    return {"add": add, "words": words | changes}


def run_file(folder: Path, domains: dict[str, Any], **changes: Any) -> Path:
    run: dict[str, Any] = {
        "name": "domains",
        "model": {"path": "new", "new": NEW_MODEL},
        "domains": domains,
        "rollout": {"batch": 6, "group_size": 4, "max_new_tokens": 12},
        "trainer": {"precision": "fp32", "lr": 1e-3},
        "evaluation": {"every": 4},
        "checkpoint": {"every": 2, "keep_last": 5},
        "steps": 6,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run | changes, sort_keys=False))
    return path


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def rollouts(run: Path) -> list[dict[str, Any]]:
    return [row for file in sorted((run / "rollouts").glob("*.jsonl")) for row in rows(run, f"rollouts/{file.name}")]


FLOWS = """
import rollmill


@rollmill.workflow
async def twice(task, policy):
    replies = [await policy.complete(task.prompt, max_new_tokens=2) for _ in range(2)]
    return float(sum(len(reply.text) for reply in replies))
"""
