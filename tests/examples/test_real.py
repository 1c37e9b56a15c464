"""The example with a pretrained model: its requests, its reward, and the script on a toy in place of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import write_gguf
from support.toys import toy_model, toy_tokenizer
from transformers import AutoModelForCausalLM

from rollmill.cli import main
from rollmill.user_code import import_object

EXAMPLES = Path(__file__).parents[2] / "examples"
REQUESTS, SCORE = (import_object(f"{EXAMPLES / 'restaurant.py'}:{name}") for name in ("requests", "score"))
BOOKING = {"restaurant": "Sakura", "name": "Diaz", "day": "Friday", "time": "19:00", "people": 4}


def test_requests_hold_what_the_booking_needs() -> None:
    made = list(REQUESTS(300, seed=3))
    for row in made:
        request, booking = row["prompt"][-1]["content"], json.loads(row["answer"])
        assert SCORE(row["answer"], row["response"]) == {"keys": 0.5, "exact": 0.5}
        hour = int(booking["time"].removesuffix(":00")) - 12
        guests = booking["people"] - 1 if "friends" in request else booking["people"]
        assert all(
            str(each) in request for each in (booking["restaurant"], booking["name"], booking["day"], hour, guests)
        )
    assert sum("friends" in row["prompt"][-1]["content"] for row in made) > 30
    assert made == list(REQUESTS(300, seed=3))


def test_held_out_names_and_restaurants_never_occur_in_training() -> None:
    training, held_out = (
        [json.loads(row["answer"]) for row in REQUESTS(500, seed=1, held_out=held_out)] for held_out in (False, True)
    )
    for key in ("name", "restaurant"):
        assert not {each[key] for each in training} & {each[key] for each in held_out}


@pytest.mark.parametrize(
    ("text", "keys", "exact"),
    [
        (json.dumps(BOOKING), 0.5, 0.5),
        (json.dumps(BOOKING, indent=2), 0.5, 0.5),
        (json.dumps(BOOKING | {"time": "7:00"}), 0.4, 0.0),
        (json.dumps(BOOKING | {"people": "4"}), 0.4, 0.0),
        (json.dumps(BOOKING | {"people": 4.0}), 0.4, 0.0),
        (json.dumps(BOOKING | {"note": "none"}), 0.4, 0.0),
        (json.dumps({"name": "Diaz"}), 0.1, 0.0),
        (json.dumps(dict.fromkeys(map(str, range(9)), 0)), 0.0, 0.0),
        ("Booking: " + json.dumps(BOOKING), 0.0, 0.0),
        (json.dumps([BOOKING]), 0.0, 0.0),
        (json.dumps(BOOKING)[:-1], 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_reward_is_half_for_keys_and_half_for_the_whole(text: str, keys: float, exact: float) -> None:
    assert SCORE(json.dumps(BOOKING), text) == pytest.approx({"keys": keys, "exact": exact})


@pytest.mark.slow
def test_the_script_trains_and_ends_with_the_table(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer()
    ids: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = toy_model("llama", len(tokenizer), max_position_embeddings=1024, **ids)
    small = {
        "model.path": write_gguf(tmp_path / "toy.gguf", model, tokenizer),
        **{"stages.0.steps": 1, "stages.1.steps": 1, "stages.0.algorithm.batch": 2, "evaluation.limit": 5},
        **{"rollout.batch": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 4, "threads": 1},
    }
    command = [sys.executable, str(EXAMPLES / "real.py"), "--out", str(tmp_path / "run")]
    settings = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    shown = subprocess.run([*command, *settings], capture_output=True, text=True, check=True).stdout
    table = shown[shown.index("5 held-out requests") :]
    assert [line.split() for line in table.splitlines()[:3]] == [
        ["5", "held-out", "requests,", "greedy", "before", "imitate", "reinforce"],
        ["right", "bookings", "0.0%", "0.0%", "0.0%"],
        ["right", "restaurant", "0.0%", "0.0%", "0.0%"],
    ]
    assert table.count("wrong") == 9  # three requests, before and after each stage
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert again == table
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "exported")]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    assert {parameter.dtype for parameter in exported.parameters()} == {torch.bfloat16}
