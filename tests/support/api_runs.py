"""Small runs by the Python interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rollmill

MODEL = {
    "path": "new",
    "new": {
        "hidden_size": 32,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "intermediate_size": 64,
        "context": 64,
        "tokenizer": {"kind": "char"},
    },
}


ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(20)]


SMALL: dict[str, Any] = {
    "model": MODEL,
    "dataset": ROWS,
    "batch": 2,
    "group_size": 4,
    "max_new_tokens": 6,
    "lr": 1e-3,
    "precision": "fp32",
}


def few_letters(task: rollmill.Task, completion: rollmill.Completion) -> float:
    return 1.0 - len(completion.text) / 10


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()
