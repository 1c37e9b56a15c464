"""Milliseconds until `rollmill serve` answers /health while clients send too much, too slowly, or a lot."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bench.harness import ROOT, BenchError, Measured, import_path, need, note
from bench.report import Case, finish
from bench.worker import versions

KEY, CONTEXT = "sk-bench", 4096
LOADS = {
    "idle": "nothing else",
    "prompts": "three long prompts at a time",
    "half": "1,500 half-sent requests",
    "chats": "32 conversations",
}
PEER = "plain FastAPI"
_GIVE_UP_S = 60


def main(arguments: list[str], only_json: bool) -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="bench serve", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15, help="of each load")
    parser.add_argument("--megabytes", type=float, default=7, help="of each long prompt")
    args = parser.parse_args(arguments)
    need("httpx", "pip install httpx")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        sides = {
            "ours": ["-m", "rollmill", "serve", str(model), "--port", "0", "--key", KEY, "--body", str(8 * 2**20)],
            PEER: ["-m", "bench.peers.plain_serve", str(model)],
        }
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for number in range(args.rounds):
            for name, command in sides.items():
                with running(command) as address:
                    found = {load: under(address, load, args.seconds, args.megabytes) for load in LOADS}
                rounds[name].append(found)
                note(f"  round {number + 1}: {name} {found}")
    cases = []
    for load, what in LOADS.items():
        ours, peer = ([each[load] for each in rounds[name]] for name in sides)
        extra = {
            "median_ms": [each["median_ms"] for each in ours],
            "peer_median_ms": [each["median_ms"] for each in peer],
            "probes": [each["probes"] for each in ours],
            "load": [each["load"] for each in ours],
            "peer_load": [each["load"] for each in peer],
        }
        worst = ([each["worst_ms"] for each in ours], [each["worst_ms"] for each in peer])
        cases.append(Case(f"slowest answer of /health, {what}", PEER, "ms", *worst, False, extra))
    raw = [Measured(name, {}, each) for name, each in rounds.items()]
    known = versions("fastapi", "uvicorn", "tokenizers", "transformers", "torch")
    finish("serve", cases, headline=cases[1:], versions=known, only_json=only_json, raw=raw)


def make_model(folder: Path) -> Path:
    """A small random model with a trained BPE tokenizer; returns its folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rollmill.config.model import TokenizerConfig
    from rollmill.models.from_scratch import save_policy, train_tokenizer

    texts = ["".join(map(chr, range(32, 127))), *["how many apples are there? the answer is 12\n"] * 4]
    tokenizer = train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), texts)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=256,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_policy(Qwen3ForCausalLM(config), tokenizer, folder)
    return folder


@contextmanager
def running(command: list[str]) -> Iterator[str]:
    """Run a server with one thread, from its printed address on."""
    environment = os.environ | {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if (found := re.search(r"http://[^/\s]+", line)) is None:
            raise BenchError(f"the server {command[1]} did not start: {line}")
        yield found[0]
    finally:
        process.kill()
        process.communicate()


def under(address: str, load: str, seconds: float, megabytes: float = 7) -> dict[str, Any]:
    """Ask for /health, with a new connection each time, while another process makes the load."""
    command = [sys.executable, "-m", "bench.ours.serve_load", address, load, str(seconds), str(megabytes)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as loading:
        assert loading.stdout is not None
        loading.stdout.readline()  # it has begun
        times: list[float] = []
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            try:
                with closing(HTTPConnection(address.removeprefix("http://"), timeout=_GIVE_UP_S)) as connection:
                    connection.request("GET", "/health")
                    if (status := connection.getresponse().status) != 200:
                        raise BenchError(f"/health answered {status}")
            except OSError:
                note(f"    {load}: no answer within {time.perf_counter() - began:.0f} s")
            times.append((time.perf_counter() - began) * 1e3)
            time.sleep(0.02)
        done = loading.stdout.readline().strip()
    times.sort()
    return {
        "median_ms": round(times[len(times) // 2], 2),
        "worst_ms": round(times[-1], 2),
        "probes": len(times),
        "load": done,
    }
