"""Rank 0 never has the whole model in host memory where ranks hold parts of it: its memory counted in a run."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import merged, tiny_run
from support.toys import toy_checkpoint
from transformers import AutoModelForCausalLM

import rollmill
from rollmill.config.model import ModelConfig, NewModelConfig
from rollmill.launch import resume
from rollmill.models import merged_checkpoint
from rollmill.models.attention import find_cached_layers
from rollmill.models.from_scratch import init_model, save_policy, train_tokenizer
from rollmill.models.load import load_policy
from rollmill.models.merged_checkpoint import save_gathered
from rollmill.models.storage import StoredParameter, is_stored, read_stored, zeros_for_stored
from rollmill.orchestrator.manifest import find_damage
from rollmill.trainer.parity import load_verified_policy
from rollmill.weights.buckets import ShardedWeights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

CPU = torch.device("cpu")
CPU = torch.device("cpu")
MODEL = {"hidden_size": 512, "layers": 10, "heads": 8, "kv_heads": 4, "intermediate_size": 2048, "context": 64}
"""40 million parameters, of which a layer has a tenth: 150 MB in fp32."""
RUN: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "sft", "batch": 2},
    "rewards": None,
    "rollout": None,
    "evaluation": None,
    "steps": 1,
    "threads": 1,
    "checkpoint": {"every": 1},
    "trainer": {"precision": "fp32", "micro_batch_tokens": 32, "gradient_checkpointing": True},
}
PROGRAM = """
import json, sys, threading, time
from pathlib import Path
import rollmill, rollmill.launch
from rollmill.trainer.trainer import Trainer

run, out = sys.argv[1:]
step, peaks, phase = Trainer.step, {"load": 0, "train": 0, "rest": 0}, "load"

def anonymous():
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

def watch():
    while True:
        now = phase
        peaks[now] = max(peaks[now], anonymous())
        time.sleep(0.002)

def stepped(self, *arguments):
    global phase
    phase = "train"
    found = step(self, *arguments)
    phase = "rest"
    return found

Trainer.step = stepped
before = anonymous()
threading.Thread(target=watch, daemon=True).start()
rollmill.run(run, out=out)
print(json.dumps({name: peak - before for name, peak in peaks.items()}))
"""
NOISE = 100 << 20
"""Of the tokenizer, the tasks, the optimizer's code, and what the allocator keeps."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bf16."""
    folder = tmp_path_factory.mktemp("large")
    config = NewModelConfig.model_validate(MODEL | {"tokenizer": {"kind": "char"}})
    tokenizer = train_tokenizer(config.tokenizer, ["0123456789+-=#? abcdefghijklmnopqrstuvwxyz"])
    save_policy(init_model(config, tokenizer, 0).bfloat16(), tokenizer, folder)
    return folder


def measured(folder: Path, checkpoint: Path, **trainer: Any) -> dict[str, int]:
    """The peaks of rank 0's anonymous memory in a run, above that of a process that has only imported everything."""
    folder.mkdir()
    path = tiny_run(folder, **merged(RUN, {"model": {"path": str(checkpoint), "new": None}, "trainer": trainer}))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, str(path), str(folder / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    files = (run / f"out/checkpoints/step-{step:06d}").glob("model*.safetensors")
    return {name: each for file in files for name, each in load_file(file).items()}


@pytest.mark.parametrize("sharding", ["fsdp", pytest.param("tensor", marks=pytest.mark.thorough)])
def test_rank_0_holds_its_shard_and_a_bucket(checkpoint: Path, tmp_path: Path, sharding: str) -> None:
    peaks = measured(tmp_path / "run", checkpoint, ranks=2, sharding=sharding)
    whole = 4 * sum(each.numel() for each in load_file(checkpoint / "model.safetensors").values())
    share = 0.55 * whole  # half of it, and what every rank has whole
    assert peaks["load"] < share + 0.1 * whole + NOISE
    assert peaks["rest"] < 3 * share + 0.1 * whole + NOISE  # weights and two moments


class Parts(ShardedWeights):
    """Weights that are gathered in their order."""

    def __init__(self, model: Any, log: list[str]) -> None:
        def gather(dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
            for name, each in model.named_parameters():
                log.append(name)
                yield name, each.detach()
            log.append("end")

        super().__init__(dict(model.named_parameters()), gather)


def without_weights(model: Any) -> Any:
    """The model as it is on rank 0 while ranks hold its weights."""
    emptied = copy.deepcopy(model)
    for parameter in emptied.parameters():
        parameter.data.untyped_storage().resize_(0)
    return emptied


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_gathered_files_are_those_of_the_whole_model(tmp_path: Path, architecture: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(toy_checkpoint(tmp_path / "toy", architecture), dtype=torch.float32)
    log: list[str] = []
    save_gathered(without_weights(model), Parts(model, log), tmp_path / "parts")
    model.save_pretrained(tmp_path / "whole")
    files = [{each.name: each.read_bytes() for each in (tmp_path / name).iterdir()} for name in ("parts", "whole")]
    assert files[0] == files[1]
    assert log[-1] == "end"


def test_large_weights_are_in_several_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(toy_checkpoint(tmp_path / "toy", "qwen3"), dtype=torch.float32)
    monkeypatch.setattr(merged_checkpoint, "FILE_BYTES", 50_000)
    save_gathered(without_weights(model), Parts(model, []), tmp_path / "parts")
    files = sorted(each.name for each in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "parts", dtype=torch.float32)
    found = dict(again.named_parameters())
    assert all(torch.equal(found[name], each) for name, each in model.named_parameters())
    read = load_policy(ModelConfig(path=toy_checkpoint(tmp_path / "toy", "qwen3")), texts=(), seed=0, device=CPU)
    save_gathered(without_weights(read.model), Parts(read.model, []), tmp_path / "again")
    read.tokenizer.save_pretrained(tmp_path / "again")
    loaded = load_policy(ModelConfig(path=tmp_path / "again"), texts=(), seed=0, device=CPU)
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), read.model.parameters(), strict=True))


def test_a_full_disk_leaves_no_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(toy_checkpoint(tmp_path / "toy", "qwen3"), dtype=torch.float32)
    log: list[str] = []

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merged_checkpoint, "write_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        save_gathered(without_weights(model), Parts(model, log), tmp_path / "parts")
    assert log[-1] == "end"


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
)
def test_weights_that_stay_in_files_are_those_that_are_loaded(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    folder = toy_checkpoint(tmp_path / "toy", "qwen3")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(stored).save_pretrained(folder)
    made = [
        load_verified_policy(
            ModelConfig(path=folder), texts=(), seed=0, device=CPU, dtype=dtype, stays_in_files=stays
        ).model
        for stays in (True, False)
    ]
    assert sum(isinstance(each, StoredParameter) for each in made[0].parameters()) > 5
    assert all(each.untyped_storage().nbytes() == 0 for each in made[0].parameters() if each.ndim > 1)
    assert made[0].config.to_dict() == made[1].config.to_dict()
    for copied in (made[0], copy.deepcopy(made[0])):
        read = dict(read_stored(copied, None))
        assert read.keys() == dict(made[1].named_parameters()).keys()
        for name, each in made[1].named_parameters():
            assert read[name].dtype == each.dtype == dtype
            assert torch.equal(read[name], each)
    with zeros_for_stored(made[0]):
        assert find_cached_layers(made[0].model) == find_cached_layers(made[1].model)
    assert is_stored(made[0])
    assert all(each.untyped_storage().nbytes() == 0 for each in made[0].parameters() if each.ndim > 1)
    for (_, one), (_, other) in zip(made[0].named_buffers(), made[1].named_buffers(), strict=True):
        assert torch.equal(one, other)


def test_a_run_in_parts_goes_on_from_its_files_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    changes = {
        "model": {"path": str(toy_checkpoint(tmp_path / "toy", "qwen3")), "new": None},
        "trainer": {"precision": "fp32", "ranks": 2, "sharding": "fsdp"},
        "algorithm": {"name": "grpo", "kl": 0.01},
        "steps": 3,
        "stages": None,
        "evaluation": None,
        "checkpoint": {"every": 1, "keep_last": 3},
    }
    runs = [tmp_path / "whole", tmp_path / "cut"]
    for run in runs:
        run.mkdir()
    rollmill.run(tiny_run(runs[0], **changes), out=runs[0] / "out")
    shutil.copytree(runs[0] / "out", runs[1] / "out")
    shutil.rmtree(runs[1] / "out/checkpoints/step-000003")
    shutil.rmtree(runs[1] / "out/checkpoints/step-000002")
    resume(runs[1] / "out")
    one, other = (weights(run, 3) for run in runs)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(find_damage(run / f"out/checkpoints/step-{step:06d}") == [] for run in runs for step in (1, 2, 3))
