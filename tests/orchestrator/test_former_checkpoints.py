"""A stored run of version 0.1.0, of before manifests (format 0), goes on as that version went on.

data/run-0.1.0 holds a run that was killed after step 3 of 6, with its checkpoint of step 2; steps 3 and 4 are
supervised. data/expected-0.1.0 has the metrics and the weights of step 4 of that version's `rollmill resume`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from forks import Forks
from safetensors.torch import load_file
from torch.testing import assert_close

from rollmill.cli import main

DATA = Path(__file__).parent / "data"


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """A copy of the run."""
    shutil.copytree(DATA / "run-0.1.0", tmp_path / "run")
    return tmp_path / "run"


def test_it_goes_on_to_the_same_weights(server: Forks, former: Path) -> None:
    ended = server.run("resume", former.name, folder=former.parent)
    assert ended.code == 0, ended.err
    assert "the checkpoint of step 2 has format 0, without hashes; it could not be verified" in ended.out
    rows = [json.loads(line) for line in (former / "metrics.jsonl").read_text().splitlines()]
    expected = json.loads((DATA / "expected-0.1.0/metrics.json").read_text())
    assert [(row["step"], row["stage"]) for row in rows] == [(row["step"], row["stage"]) for row in expected]
    for row, known in zip(rows[:4], expected[:4], strict=True):  # later ones depend on sampled tokens
        for key in ("tokens", "lr", "loss", "grad_norm"):
            assert row[key] == pytest.approx(known[key], rel=1e-4, abs=1e-7), (row["step"], key)
    found = load_file(former / "checkpoints/step-000004/model.safetensors")
    wanted = load_file(DATA / "expected-0.1.0/step-000004.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    before = load_file(former / "checkpoints/step-000002/model.safetensors")
    assert max(float((before[name] - wanted[name]).abs().max()) for name in wanted) > 1e-3, "the steps moved them"


def test_it_is_listed_and_cannot_be_verified(former: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(former), "--verify", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (found["step"], found["format"], found["rollmill"], found["state"]) == (2, 0, "", "not verifiable")


@pytest.mark.parametrize("name", ["trainer.pt", "state.json"])
def test_a_damaged_one_is_named_but_left_in_place(server: Forks, former: Path, name: str) -> None:
    (former / "checkpoints/step-000002" / name).write_bytes(b"")
    ended = server.run("resume", former.name, folder=former.parent)
    assert ended.code == 1
    for text in ("cannot read the checkpoint", "step-000002", "Remove that folder"):
        assert text in ended.err
    assert "Traceback" not in ended.err
    assert (former / "checkpoints/step-000002").is_dir()


@pytest.mark.parametrize("name", ["trainer.pt", "state.json", "model.safetensors"])
def test_a_run_goes_on_from_the_one_before_a_damaged_one(server: Forks, former: Path, name: str) -> None:
    newest = former / "checkpoints/step-000003"
    shutil.copytree(former / "checkpoints/step-000002", newest)
    (newest / name).write_bytes(b"")
    ended = server.run("resume", former.name, folder=former.parent)
    assert ended.code == 0, ended.err
    assert "the checkpoint of step 3 is damaged" in ended.out
    assert "the run goes on from the checkpoint of step 2" in ended.out
    assert (former / "checkpoints/damaged-000003").is_dir()


def test_lost_settings_of_the_machine_are_an_error_that_says_what_to_do(server: Forks, former: Path) -> None:
    for damage in (lambda path: path.write_bytes(b""), Path.unlink):
        damage(former / "machine.json")
        ended = server.run("resume", former.name, folder=former.parent)
        assert ended.code == 1
        for text in ("machine.json is ", "put the file back, or start a new run"):
            assert text in ended.err
        assert "Traceback" not in ended.err
