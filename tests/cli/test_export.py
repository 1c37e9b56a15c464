"""`rollmill export`: models and adapters that other programs load, model cards, and uploads to a hub of the test."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.tiny import GRPO, SFT, tiny_run
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollmill
from rollmill.cli import main
from rollmill.cli.model_card import find_starting_model, render_model_card
from rollmill.trackers.run_views import PlainView

IDS = torch.arange(2, 12)[None]
FAILED, USAGE = 1, 2


def trained(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    rollmill.run(tiny_run(folder, **changes), out=folder / "out", view=PlainView(io.StringIO()))
    return folder / "out"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a new model, with checkpoints of steps 1 to 3."""
    checkpoint = {"every": 1, "keep_last": 3}
    stages = [SFT | {"steps": 1}, GRPO | {"steps": 2}]
    return trained(tmp_path_factory.mktemp("new") / "run", checkpoint=checkpoint, stages=stages)


@pytest.fixture(scope="module")
def base(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bf16 with a licence, as the hub's cache holds it."""
    folder = tmp_path_factory.mktemp("hub") / "models--me--tiny/snapshots/0123456789abcdef"
    assert main(["export", str(run), "--dtype", "bf16", "--out", str(folder)]) == 0
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    (folder / "LICENSE").write_text("Do as you like.\n")
    return folder


@pytest.fixture(scope="module")
def lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained adapters on that model."""
    model = {"path": str(base), "new": None, "lora": {"rank": 2}}
    stages = [SFT | {"steps": 2, "trainer": {"lr": 0.05}}]
    without: dict[str, Any] = dict.fromkeys(("rewards", "rollout", "evaluation"))
    return trained(tmp_path_factory.mktemp("lora") / "run", model=model, stages=stages, **without)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def of(folder: Path) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def test_the_export_is_the_checkpoint_for_transformers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, checkpoint = tmp_path / "out", run / "checkpoints/step-000002"
    assert main(["export", str(run), "--step", "2", "--out", str(out), "--json"]) == 0
    weights = load_file(out / "model.safetensors")
    assert json.loads(capsys.readouterr().out) == {
        **{"out": str(out), "run": str(run), "step": 2, "dtype": "fp32", "adapter_only": False},
        "parameters": sum(each.numel() for each in weights.values()),
    }
    assert torch.equal(of(out), of(checkpoint))
    ours, theirs = (AutoTokenizer.from_pretrained(each) for each in (out, checkpoint))
    assert ours("12+34").input_ids == theirs("12+34").input_ids
    names = {path.name for path in checkpoint.iterdir()} - {"state.json", "trainer.pt", "manifest.json"}
    assert {path.name for path in out.iterdir()} == names | {"README.md"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_have_the_asked_type(run: Path, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    assert main(["export", str(run), "--dtype", name, "--out", str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype is dtype
    expected = load_file(run / "checkpoints/step-000003/model.safetensors")
    for key, tensor in load_file(tmp_path / "out/model.safetensors").items():
        assert torch.equal(tensor, expected[key].to(dtype)), key


def test_the_best_checkpoint_and_the_default_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = json.loads((run / "summary.json").read_text())["best_step"]
    assert main(["export", str(run), "--step", "best"]) == 0
    folder = run / f"exports/step-{best:06d}-fp32"
    assert capsys.readouterr().out == f"wrote {folder}: the model of step {best}, 0.01M parameters in fp32\n"
    assert torch.equal(of(folder), of(run / f"checkpoints/step-{best:06d}"))
    assert main(["export", str(run), "--step", "best"]) == USAGE
    assert f"{folder} exists and is not empty; choose another folder with --out" in capsys.readouterr().err


def test_adapters_are_merged_in_the_type_of_the_base(lora: Path, tmp_path: Path) -> None:
    assert main(["export", str(lora), "--out", str(tmp_path / "out")]) == 0
    [checkpoint] = (lora / "checkpoints").glob("step-*")
    expected = load_file(checkpoint / "model.safetensors")
    for key, tensor in load_file(tmp_path / "out/model.safetensors").items():
        assert torch.equal(tensor, expected[key].bfloat16()), key
    assert (tmp_path / "out/LICENSE").read_text() == "Do as you like.\n"
    assert not (tmp_path / "out/adapter").exists()


def test_adapters_alone_are_loaded_by_peft(lora: Path, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    out = tmp_path / "out"
    assert main(["export", str(lora), "--adapter-only", "--dtype", "fp32", "--out", str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(model)
    after = logits(PeftModel.from_pretrained(model, out))
    [checkpoint] = (lora / "checkpoints").glob("step-*")
    torch.testing.assert_close(after, of(checkpoint), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, after, atol=1e-2)
    settings = json.loads((out / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("me/tiny", "0123456789abcdef")
    assert AutoTokenizer.from_pretrained(out)("12").input_ids == AutoTokenizer.from_pretrained(base)("12").input_ids
    card = (out / "README.md").read_text()
    assert 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("me/tiny"), "out")' in card


def test_all_files_have_the_mode_that_the_umask_gives(base: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        model = {"path": str(base), "new": None, "lora": {"rank": 2}}
        without: dict[str, Any] = dict.fromkeys(("rewards", "rollout", "evaluation"))
        run = str(trained(tmp_path / "run", model=model, stages=[SFT | {"steps": 1}], **without))
        assert main(["export", run, "--out", str(tmp_path / "whole")]) == 0
        assert main(["export", run, "--adapter-only", "--out", str(tmp_path / "adapter")]) == 0
        assert main(["merge", run, str(base), "--out", str(tmp_path / "merged")]) == 0
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    assert set(modes.values()) == {0o640}, modes


def test_the_card_says_where_the_model_comes_from(run: Path, lora: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--step", "2", "--out", str(tmp_path / "new")]) == 0
    card = (tmp_path / "new/README.md").read_text()
    assert "A new qwen3 model with random weights after 2 steps of sft then grpo, in the run tiny." in card
    assert f"rollmill {rollmill.__version__}" in card
    assert "## Stage warm: sft" in card
    assert "| data | rollmill.quickstart.addition:rows |" in card
    assert "| rewards | exact, format |" in card
    assert "| trainer.lr | 0.001 |" in card
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert f"| 2 | {rows[2]['reward/mean']:.4g} |" in card
    assert "\n| 3 |" not in card, "later than the export"
    assert f"| held-out | greedy | {rows[0]['eval/greedy']:.3g}, step 0 | " in card

    assert main(["export", str(lora), "--out", str(tmp_path / "lora")]) == 0
    card = (tmp_path / "lora/README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1]) == {
        **{"license": "apache-2.0", "base_model": "me/tiny", "base_model_relation": "finetune"},
        **{"library_name": "transformers", "pipeline_tag": "text-generation"},
        "tags": ["rollmill", "reinforcement-learning", "sft"],
    }
    assert "me/tiny (revision `0123456789abcdef`) after 2 steps of sft with LoRA (rank 2, alpha 32" in card
    assert "The licence of the base model is `apache-2.0`. Files of the base model: LICENSE." in card


def test_texts_of_the_run_are_escaped_and_folders_shortened(run: Path, base: Path) -> None:
    taskset = {"path": "/home/someone/secret/gsm8k/train|1.jsonl", "preset": "a\n## b"}
    settings = {
        **{"name": "<script>*x*\n# y", "model": {"path": "/home/someone/`base`"}, "taskset": taskset},
        **{"algorithm": {"name": "grpo"}, "rewards": [{"name": "/home/someone/mine/r.py:good"}]},
    }
    found = find_starting_model(settings)
    card = render_model_card(run, settings, 3, found, base, dtype="bf16", name='me/"""```\nx')
    assert "in the run &lt;script&gt;\\*x\\* \\# y." in card
    assert "| data | gsm8k/train\\|1.jsonl (preset a \\#\\# b) |" in card
    assert "| rewards | mine/r.py:good |" in card
    assert "someone" not in card
    assert 'from_pretrained("me/_______x")' in card
    assert "The folder of the base model states no licence." in card


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--dtype", "int8"], USAGE, "--dtype is auto, bf16, fp32, fp16, not 'int8'"),
        (["--step", "7"], FAILED, "has no checkpoint of step 7; it has: 1, 2, 3"),
        (["--step", "all"], USAGE, "--step all: one checkpoint of a run is exported"),
        (["--adapter-only"], USAGE, "has no adapters: its run trained all weights, without model.lora"),
        (["--push", "a/b/c"], USAGE, "--push a/b/c: not a repository of the hub"),
    ],
)
def test_wrong_usage(
    run: Path, tmp_path: Path, argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "out"), *argv]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert not list(tmp_path.iterdir())


def test_other_folders_are_left_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("")
    assert main(["export", str(run), "--out", str(tmp_path / "mine")]) == USAGE
    assert "mine exists and is not empty; choose another folder with --out" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    assert main(["export", str(tmp_path / "mine")]) == USAGE
    assert "holds no run" in capsys.readouterr().err


def test_a_damaged_checkpoint_and_a_lost_base_are_refused(
    lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = shutil.copytree(lora, tmp_path / "run")
    config = (copied / "config.yaml").read_text()
    (copied / "config.yaml").write_text(config.replace("models--me--tiny", "gone"))
    assert main(["export", str(copied), "--out", str(tmp_path / "out")]) == USAGE
    assert "give --dtype bf16, fp32 or fp16" in capsys.readouterr().err
    assert main(["export", str(copied), "--dtype", "bf16", "--out", str(tmp_path / "whole")]) == 0
    [weights] = copied.glob("checkpoints/*/model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    capsys.readouterr()
    assert main(["export", str(copied), "--dtype", "bf16", "--out", str(tmp_path / "out")]) == FAILED
    assert "is damaged: model.safetensors has other content than was written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "whole"]


# The hub


class Hub(BaseHTTPRequestHandler):
    """The calls of an upload, for the token `good`; files are kept in `server.files`."""

    server: Any

    def do_GET(self) -> None:
        asked = self.path == "/api/whoami-v2"
        self._answer({"name": "me", "type": "user"} if asked and self._allowed() else None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if not self._allowed() or self.server.broken:
            self._answer(None)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer({"url": f"http://127.0.0.1:{self.server.server_port}/me/out"})
        elif "/preupload/" in self.path:
            names = [each["path"] for each in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self._answer({"files": files})
        elif self.path == "/api/validate-yaml":
            yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            self._answer({"warnings": [], "errors": []})
        else:
            assert "/commit/" in self.path, self.path
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self._answer(
                {
                    "commitOid": "0" * 40,
                    "commitUrl": f"http://127.0.0.1:{self.server.server_port}/me/out/commit/0",
                    "success": True,
                }
            )

    def _allowed(self) -> bool:
        return self.headers["Authorization"] == "Bearer good"

    def _answer(self, content: dict[str, Any] | None) -> None:
        body = json.dumps(content or {"error": "no"}).encode()
        self.send_response(200 if content else 403 if self._allowed() else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.created, server.files, server.broken = [], {}, False
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "good")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


def test_an_upload_is_private_and_whole(
    run: Path, tmp_path: Path, hub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run), "--out", str(out), "--push", "me/out"]) == 0
    assert f"uploaded to http://127.0.0.1:{hub.server_port}/me/out" in capsys.readouterr().out
    [created] = hub.created
    assert created["name"] == "out"
    assert created.get("private") is True or created.get("visibility") == "private"
    assert hub.files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert 'from_pretrained("me/out")' in (out / "README.md").read_text()


def test_a_failed_upload_leaves_the_export(
    run: Path, tmp_path: Path, hub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.broken = True
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--push", "me/out"]) == FAILED
    [line] = capsys.readouterr().err.splitlines()
    assert "refuses your token (403)" in line
    assert f"`hf upload me/out {tmp_path / 'out'}` uploads it later" in line
    assert torch.equal(of(tmp_path / "out"), of(run / "checkpoints/step-000003"))


@pytest.mark.parametrize("case", ["offline", "unreachable", "no token", "wrong token"])
def test_the_hub_is_asked_before_anything_is_written(
    run: Path, tmp_path: Path, hub: Any, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = {
        "offline": "HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it. Nothing was written.",
        "unreachable": "the Hugging Face hub cannot be reached (ConnectError); check the network and HF_ENDPOINT",
        "no token": "you are not logged in to the Hugging Face hub; run `hf auth login`, or set HF_TOKEN",
        "wrong token": "the Hugging Face hub refuses your token (401); run `hf auth login`",
    }[case]
    if case == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    elif case == "unreachable":
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    elif case == "no token":
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none/token"))
    else:
        monkeypatch.setenv("HF_TOKEN", "bad")
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--push", "me/out"]) == FAILED
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("--push me/out: ")
    assert message in line
    assert not list(tmp_path.iterdir())
