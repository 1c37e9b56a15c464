"""Power failures at every file operation of a run: what the disk then holds is enough to go on from its checkpoint."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support import power_loss
from support.forks import Forks
from support.power_loss import Disk, Operation, Tree, disk_states
from support.tiny import outcome, tiny_run

pytestmark = pytest.mark.slow
STEPS = 3
RUN = {
    "stages": None,
    "algorithm": {"name": "grpo"},
    "steps": STEPS,
    "model": {"new": {"hidden_size": 16, "intermediate_size": 16}},
    "buffer": {"store": "memory"},
    "checkpoint": {"every": 1, "keep_last": 2, "keep_best": False},
    "evaluation": {"every": 1},
    "monitor": {"report": False},
}
_STEP = re.compile(r"checkpoints/step-(\d+)/")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Operation]]:
    """The folder of a run, `out`, and its file operations."""
    folder = tmp_path_factory.mktemp("recorded")
    run_file, log = tiny_run(folder, **RUN), folder / "log"
    subprocess.run([sys.executable, power_loss.__file__, run_file, folder / "out", log], check=True, timeout=300)
    operations: list[Operation] = pickle.loads(log.read_bytes())
    return folder, operations


def checkpoint_steps(tree: Tree) -> list[int]:
    """Steps with a folder that has the name of a checkpoint, in order."""
    return sorted({int(match[1]) for path in tree if (match := _STEP.match(path))})


def checkpoint_files(tree: Tree, step: int) -> Tree:
    """The files of a checkpoint."""
    return {path: content for path, content in tree.items() if path.startswith(f"checkpoints/step-{step:06d}/")}


def problems(operations: Sequence[Operation], final: Tree) -> Iterator[str]:
    """Say what is wrong with the disk after a power failure, at any moment."""
    written: dict[int, Tree] = {}  # whole checkpoints, as they were when they got their names
    durable = 0  # newest step whose checkpoint was said to be written
    for number, seen, disks in disk_states(operations):
        for step in checkpoint_steps(seen):
            written.setdefault(step, checkpoint_files(seen, step))
        last = operations[number - 1]
        if last.kind == "sync" and last.path == "checkpoints":
            durable = max([durable, *checkpoint_steps(seen)])
        for disk in disks:
            for text in _problems(disk, written, durable, final):
                yield f"after operation {number}, {last.kind} of {last.path}: {text}"


def _problems(disk: Tree, written: dict[int, Tree], durable: int, final: Tree) -> Iterator[str]:
    steps = checkpoint_steps(disk)
    for step in steps:
        there = checkpoint_files(disk, step)
        for path, content in written[step].items():
            if there.get(path) != content:
                yield f"{path} is not whole"
    newest = max(steps, default=0)
    if newest < durable:
        yield f"the checkpoint of step {durable} is gone"
    if not steps:
        return
    for path in ("config.yaml", "machine.json"):
        if disk.get(path) != final[path]:
            yield f"{path} is not whole"
    for file in ("metrics.jsonl", "timeline.jsonl"):
        rows = [json.loads(line) for line in disk.get(file, b"").split(b"\n")[:-1]]
        wanted = [json.loads(line)["step"] for line in final[file].split(b"\n")[:-1]]
        if missing := {step for step in wanted if 0 < step <= newest} - {row["step"] for row in rows}:
            yield f"{file} has no step {missing}"
    for step in range(1, newest + 1):
        if disk.get(f"rollouts/step-{step:06d}.jsonl") != final[f"rollouts/step-{step:06d}.jsonl"]:
            yield f"the rollouts of step {step} are not whole"
    for step in range(newest):  # that of the step itself is made again
        for kind in ("json", "jsonl"):
            if disk.get(name := f"evaluations/step-{step:06d}.{kind}") != final[name]:
                yield f"{name} is not whole"


def seen_at_the_end(operations: Sequence[Operation]) -> Tree:
    """The files as the process left them."""
    disk = Disk()
    for operation in operations:
        disk.apply(operation)
    return disk.seen()


def test_at_every_operation_a_checkpoint_is_whole_or_absent(recorded: tuple[Path, list[Operation]]) -> None:
    _, operations = recorded
    final = seen_at_the_end(operations)
    assert checkpoint_steps(final) == [STEPS - 1, STEPS]
    in_checkpoints = [each for each in operations if each.path.startswith("checkpoints")]
    assert len(in_checkpoints) > 80
    assert list(problems(operations, final)) == []


def in_checkpoint(operation: Operation) -> bool:
    """True for what is inside of a checkpoint that is being written."""
    return operation.path.startswith("checkpoints/.writing-")


FLUSHES: dict[str, Callable[[Operation], bool]] = {
    "weights": lambda each: in_checkpoint(each) and each.path.endswith("model.safetensors"),
    "trainer": lambda each: in_checkpoint(each) and each.path.endswith("trainer.pt"),
    "manifest": lambda each: in_checkpoint(each) and each.path.endswith("manifest.json"),
    "names in the checkpoint": lambda each: in_checkpoint(each) and each.path.count("/") == 1,
    "names of checkpoints": lambda each: each.path == "checkpoints",
    "metrics": lambda each: each.path == "metrics.jsonl",
    "timeline": lambda each: each.path == "timeline.jsonl",
    "names in the run": lambda each: each.path == "",
    "rollouts": lambda each: each.path.startswith("rollouts/step"),
    "names of rollouts": lambda each: each.path == "rollouts",
    "evaluations": lambda each: each.path.startswith("evaluations/step"),
    "settings": lambda each: each.path.startswith(".machine.json"),
}


@pytest.mark.parametrize("without", FLUSHES)
def test_each_flush_is_needed(recorded: tuple[Path, list[Operation]], without: str) -> None:
    _, operations = recorded
    left = [each for each in operations if not (each.kind == "sync" and FLUSHES[without](each))]
    assert len(left) < len(operations), "the run flushes this"
    assert next(problems(left, seen_at_the_end(operations)), None) is not None


def test_pruning_flushes_new_names_before_it_removes_files(recorded: tuple[Path, list[Operation]]) -> None:
    _, operations = recorded
    renamed = next(n for n, each in enumerate(operations) if any(".removing-" in name for name, _ in each.names))
    flushed = next(n for n, each in enumerate(operations) if n > renamed and each.kind == "sync")
    assert operations[flushed].path == "checkpoints"
    left = [each for n, each in enumerate(operations) if n != flushed]
    assert "is not whole" in next(problems(left, seen_at_the_end(operations)))


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_the_run_goes_on_from_what_the_disk_held(
    server: Forks, recorded: tuple[Path, list[Operation]], tmp_path: Path, share: float
) -> None:
    folder, operations = recorded
    written = [n for n, each in enumerate(operations, start=1) if each.path.startswith("checkpoints")]
    cut = written[int(share * len(written))]
    disks = next(disks for number, _, disks in disk_states(operations) if number == cut)
    worst = min(disks, key=lambda tree: sum(map(len, tree.values())))
    assert checkpoint_steps(worst), "the first checkpoint was written before"
    for path, content in worst.items():
        target = tmp_path / "out" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if not path.endswith("/"):
            target.write_bytes(content)
    ended = server.run("resume", "out", folder=tmp_path)
    assert ended.code == 0, ended.err
    assert outcome(tmp_path / "out") == outcome(folder / "out")
