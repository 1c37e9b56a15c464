"""A hub on this machine with the data sets that recipes of the tinker cookbook load, and models under hub names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from support.local_hub import LocalHub
from support.tinker_servers import ANN

DATASETS = ("openai/gsm8k", "HuggingFaceH4/no_robots", "Anthropic/hh-rlhf", "zwhe99/DeepMath-103K")


def problems(count: int) -> list[dict[str, str]]:
    """Made-up problems in the format of GSM8K."""
    return [
        {"question": f"Tom has {n} apples and buys {n % 7}. How many has he?", "answer": f"Count. #### {n + n % 7}"}
        for n in range(count)
    ]


def make_hub(folder: Path, rows: Sequence[Mapping[str, str]], models: Mapping[str, Path]) -> LocalHub:
    """A hub whose data sets are made of problems, each with a train and a test split."""
    chats = [
        {
            "prompt": row["question"],
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ],
        }
        for row in rows
    ]
    pairs = [
        {
            "chosen": f"\n\nHuman: {row['question']}\n\nAssistant: {row['answer']}",
            "rejected": f"\n\nHuman: {row['question']}\n\nAssistant: I do not know.",
        }
        for row in rows
    ]
    hard = [{"question": row["question"], "final_answer": row["answer"].split("#### ")[-1]} for row in rows]
    contents: list[tuple[str, Sequence[Mapping[str, Any]]]] = [
        ("main", rows),
        ("default", chats),
        ("default", pairs),
        ("default", hard),
    ]
    for name, (config, own) in zip(DATASETS, contents, strict=True):
        place = folder / name
        place.mkdir(parents=True)
        for split in ("train", "test"):
            few = own if split == "train" else own[:8]  # recipes evaluate on all of them
            pq.write_table(pa.Table.from_pylist([dict(row) for row in few]), place / f"{split}.parquet")
        files = [{"split": split, "path": f"{split}.parquet"} for split in ("train", "test")]
        card = {"configs": [{"config_name": config, "data_files": files}]}
        (place / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    return LocalHub(models=dict(models), datasets={name: folder / name for name in DATASETS})


@dataclass(frozen=True, slots=True)
class RecipeRunner:
    """Runs recipes of the cookbook as processes, with the variables that a user sets."""

    hub: str
    server: str
    folder: Path

    def run(self, module: str, *options: str, timeout: float = 300) -> list[dict[str, Any]]:
        """The lines of metrics of a recipe that has ended well."""
        log = self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        environment = os.environ | {
            "HF_ENDPOINT": self.hub,
            "HF_HOME": str(self.folder / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "TINKER_BASE_URL": self.server,
            "TINKER_API_KEY": ANN,
        }
        words = [sys.executable, "-m", f"tinker_cookbook.recipes.{module}", *options, f"log_path={log}"]
        done = subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def curve(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The values of a metric, which are also printed."""
    values = [float(row[name]) for row in rows if name in row]
    print(f"{name}: {', '.join(f'{value:.4f}' for value in values)}")
    return values
