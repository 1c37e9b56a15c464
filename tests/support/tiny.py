"""A run of a few seconds with everything in it but a report, which takes a tenth of the time of such a run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml

import rollmill
from rollmill.trackers.run_views import RunView
from rollmill.types import Experience

TASKS = {"function": "rollmill.quickstart.addition:rows", "options": {"size": 300, "seed": 1, "digits": 2}}
HELD_OUT = {"function": "rollmill.quickstart.addition:rows", "options": {"size": 6, "seed": 2, "digits": 2}}
NEW_MODEL = {
    "hidden_size": 32,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "intermediate_size": 64,
    "context": 64,
    "tokenizer": {"kind": "char"},
}
SFT = {"name": "warm", "algorithm": {"name": "sft", "batch": 8}, "steps": 6, "trainer": {"lr": 3e-3}}
GRPO = {"name": "repair", "algorithm": {"name": "grpo"}, "steps": 8, "trainer": {"lr": 1e-3}}
RUN: dict[str, Any] = {
    "name": "tiny",
    "model": {"path": "new", "new": NEW_MODEL},
    "taskset": TASKS,
    "rewards": [{"name": "exact", "after": "#"}, {"name": "format", "pattern": "1.*[0-4]"}],
    "rollout": {"batch": 4, "group_size": 4, "max_new_tokens": 16},
    "trainer": {"precision": "fp32"},
    "evaluation": {"taskset": HELD_OUT, "every": 3},
    "checkpoint": {"every": 2},
    "monitor": {"report": False},
    "stages": [SFT, GRPO],
}


def tiny_run(folder: Path, **changes: Any) -> Path:
    """Write the run file `folder/run.yaml`, with the sections in `changes` merged in; None removes a key."""
    run = merged(RUN, changes)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run, sort_keys=False))
    return path


def ran(base: dict[str, Any], folder: Path, name: str, view: RunView | None = None, **changes: Any) -> Path:
    """The directory of a tiny run with `base` and then `changes` merged in, in `folder/name`."""
    folder = folder / name
    folder.mkdir()
    rollmill.run(tiny_run(folder, **base | changes), out=folder / "out", view=view)
    return folder / "out"


def trainer(run: Path) -> int:
    """Process id of the process that trains; the command is another one, which supervises it."""
    return int(json.loads((run / "processes/trainer.json").read_text())["pid"])


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rolled_out(run: Path) -> list[Any]:
    """Id, response and reward of each stored rollout."""
    rows = [json.loads(line) for file in sorted((run / "rollouts").glob("*.jsonl")) for line in file.open()]
    return [(row["id"], row["response"], row["reward"]) for row in rows]


def require_log_probs(run: Path, experiences: list[Experience], *, atol: float = 2e-4) -> dict[int, int]:
    """Every token has the log-prob of the weights whose version it carries; the number of tokens compared by version.

    Versions without a checkpoint are left out, and so are log-probs at another temperature than 1.
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    compared: dict[int, int] = {}
    for folder in sorted((run / "checkpoints").glob("step-*")):
        version = int(folder.name.rpartition("-")[2])
        model = None
        for each in experiences:
            mine = np.flatnonzero(each.action_mask & (each.versions == version))
            if not len(mine):
                continue
            model = model or AutoModelForCausalLM.from_pretrained(folder)
            ids = torch.tensor(each.token_ids[None].astype(np.int64))
            with torch.no_grad():
                logprobs = model(ids).logits.log_softmax(-1)[0, mine - 1].gather(1, ids[0, mine, None])[:, 0]
            np.testing.assert_allclose(each.logprobs[mine], logprobs.numpy(), atol=atol)
            compared[version] = compared.get(version, 0) + len(mine)
    return compared


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, section by section; None removes a key."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def outcome(run: Path) -> dict[str, Any]:
    """Everything a run leaves behind that must not depend on when it was killed: metrics, weights, experiences."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    state = json.loads((last / "state.json").read_text())
    state["current"].pop("stores")  # numbers of groups that were made again differ
    summary = json.loads((run / "summary.json").read_text())
    return {
        "metrics": [_timeless(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()],
        "weights": (last / "model.safetensors").read_bytes(),
        "state": {key: state[key] for key in ("step", "stage", "current", "evaluations", "best_step", "best_value")},
        "generated": state["generated_tokens"],
        "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir()),
        "rollouts": _experiences(run / "rollouts"),
        "evaluations": _experiences(run / "evaluations"),
        "accuracy": (summary["status"], summary["accuracy_before"], summary["accuracy_after"], summary["steps"]),
    }


def _timeless(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if "second" not in key and not key.startswith("judging/")}


def _experiences(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        path.name: [json.loads(line) | {"timings": None} for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    }
