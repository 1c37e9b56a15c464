"""Models and data sets of the hub, from a hub on this machine, through huggingface_hub and datasets as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.local_hub import LocalHub, serve_hub
from support.sources import PYTHONPATH
from support.toys import toy_checkpoint

from rollmill.config.hub import HubReference, parse_reference, reference_of, with_references

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(6)]
RUN: dict[str, Any] = {
    "name": "hub",
    "model": {"path": "hf://me/tiny"},
    "taskset": {"path": "hf://me/sums", "split": "train"},
    "rewards": [{"name": "exact"}],
    "rollout": {"batch": 2, "group_size": 2, "max_new_tokens": 4},
    "trainer": {"precision": "fp32"},
    "steps": 1,
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    folder = tmp_path_factory.mktemp("hub")
    toy_checkpoint(folder / "tiny", "qwen3")
    (folder / "tiny" / "pytorch_model.bin").write_bytes(b"not needed")
    sums = folder / "sums"
    sums.mkdir()
    for split in ("train", "test"):
        (sums / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with serve_hub(LocalHub({"me/tiny": folder / "tiny"}, {"me/sums": sums})) as served:
        yield served


def command(tmp_path: Path, hub: LocalHub, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own: the libraries read the environment when they are imported."""
    environment = os.environ | {
        "PYTHONPATH": PYTHONPATH,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **variables,
    }
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
        environment.pop(name, None) if name not in variables else None
    line = [sys.executable, "-m", "rollmill", *words]
    return subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)


def written(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | changes))
    return path


@pytest.mark.slow
def test_a_run_pins_the_commit_and_goes_on_from_the_cache(tmp_path: Path, hub: LocalHub) -> None:
    done = command(tmp_path, hub, "run", str(written(tmp_path)), "--out", "out")
    assert done.returncode == 0, done.stderr
    saved = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert saved["model"]["path"] == f"hf://me/tiny@{hub.commit('me/tiny')}"
    assert saved["taskset"]["path"] == f"hf://me/sums@{hub.commit('me/sums')}"
    assert not any(path.endswith("pytorch_model.bin") for path in hub.requests)
    rows = [json.loads(line) for line in (tmp_path / "out/rollouts/step-000001.jsonl").open()]
    assert {row["task_id"].partition(":")[0] for row in rows} == {"sums/train"}
    asked = len(hub.requests)
    again = command(tmp_path, hub, "resume", "out", "--set", "steps=2", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert len(hub.requests) == asked


@pytest.mark.slow
@pytest.mark.thorough
def test_check_reads_an_id_that_is_no_local_path(tmp_path: Path, hub: LocalHub) -> None:
    path = written(tmp_path, model={"path": "me/tiny"}, taskset={"path": "me/sums", "split": "test"})
    found = command(tmp_path, hub, "check", str(path), "--json")
    assert found.returncode == 0, found.stderr
    checked = json.loads(found.stdout)
    assert checked["config"]["model"]["path"] == f"hf://me/tiny@{hub.commit('me/tiny')}"
    assert checked["tasks"][0]["tasks"] == len(ROWS)


_THOROUGH = pytest.mark.thorough


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "variables", "said"),
    [
        pytest.param(
            {"model": {"path": "hf://me/none"}},
            {},
            "model.path: hf://me/none: http://.* has no such model",
            marks=_THOROUGH,
        ),
        pytest.param(
            {"taskset": {"path": "hf://me/none"}},
            {},
            "taskset.path: hf://me/none: http://.* has no such data set",
            marks=_THOROUGH,
        ),
        pytest.param(
            {"model": {"path": "hf://me/tiny@v9"}},
            {},
            "hf://me/tiny@v9: the model has no revision `v9`",
            marks=_THOROUGH,
        ),
        pytest.param(
            {},
            {"HF_HUB_OFFLINE": "1"},
            "hf://me/tiny: the model is not in the cache .*, and HF_HUB_OFFLINE is set",
            marks=_THOROUGH,
        ),
        ({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached, and the model is not in"),
    ],
)
def test_what_the_hub_does_not_give_is_one_sentence(
    changes: dict[str, Any], variables: dict[str, str], said: str, tmp_path: Path, hub: LocalHub
) -> None:
    found = command(tmp_path, hub, "check", str(written(tmp_path, **changes)), **variables)
    assert found.returncode == 2
    lines = [line for line in found.stderr.splitlines() if re.search(said, line)]
    assert len(lines) == 1, found.stderr
    assert re.match(r".*run\.yaml:\d+: ", lines[0])
    assert "Traceback" not in found.stderr


@pytest.mark.slow
@pytest.mark.thorough
def test_a_plan_reads_the_configuration_alone(tmp_path: Path, hub: LocalHub) -> None:
    path = written(tmp_path)
    before = len(hub.requests)
    found = command(tmp_path, hub, "plan", str(path), "--model", "hf://me/tiny@v1", "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["estimates"][0]["parameters"] > 0
    assert not any("safetensors" in path for path in hub.requests[before:])


def test_references_and_paths_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert parse_reference("hf://Qwen/Qwen3-0.6B@main") == HubReference("Qwen/Qwen3-0.6B", "main")
    assert parse_reference("hf:/Qwen/Qwen3-0.6B") == HubReference("Qwen/Qwen3-0.6B")  # as pathlib writes it
    assert parse_reference("hf://datasets/openai/gsm8k") == HubReference("openai/gsm8k")
    assert parse_reference("Qwen/Qwen3-0.6B", [tmp_path]) == HubReference("Qwen/Qwen3-0.6B")
    for path in ("models/qwen", "data/train.jsonl", "./Qwen/Qwen3", "/Qwen/Qwen3", "new", "a/b/c", "rows.csv"):
        assert parse_reference(path, [tmp_path]) is None
    folder = f"/cache/hub/datasets--openai--gsm8k/snapshots/{COMMIT}"
    assert reference_of(folder) == HubReference("openai/gsm8k", COMMIT)
    assert reference_of("/data/gsm8k") is None
    settings = {"taskset": {"mix": [{"path": folder}]}, "model": {"path": "hf:/me/tiny"}, "steps": 3}
    assert with_references(settings) == {
        "taskset": {"mix": [{"path": f"hf://openai/gsm8k@{COMMIT}"}]},
        "model": {"path": "hf://me/tiny"},
        "steps": 3,
    }
