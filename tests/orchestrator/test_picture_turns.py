"""Runs whose policy sees pictures turn by turn: environments, workflows, replay, resume, and what the report shows."""

from __future__ import annotations

import base64
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file
from support.picture_models import picture_run

import rollmill
from rollmill.apps.serve.endpoint.middleware import AccessRules
from rollmill.apps.serve.endpoint.service import ServiceLimits
from rollmill.apps.serve.serving import ServerAddress, serve_training
from rollmill.apps.serve.web import open_listener
from rollmill.apps.serve.web.keys import KeyRing, make_key
from rollmill.launch import resume
from rollmill.trackers import load_experiences
from rollmill.types import Experience

KEY = "sk-online"
COLOURS = """
import numpy as np
import rollmill
from rollmill.rollout.environments import StepResult

@rollmill.environment
class Colours:
    def __init__(self, *, length: int = 3):
        self.length = length

    def _picture(self):
        colour = (37 * self.seed + 101 * self.at) % 256
        return np.full((28, 28 + 14 * (self.at % 3), 3), colour, np.uint8)

    def reset(self, task, seed):
        self.at, self.seed = 0, seed
        return [self._picture(), "colour?"]

    def step(self, action):
        self.at += 1
        parts = [{"type": "text", "text": "next"}, {"type": "image", "image": self._picture()}]
        return StepResult([{"role": "user", "content": parts}], float("1" in action), self.at == self.length)
"""
DOCUMENT = Path(__file__).parents[2] / "docs/guide/vision-language.md"
FLOW = DOCUMENT.read_text().partition("```python\n# zoom.py\n")[2].partition("```")[0]
AGENT = """
import json, sys
from openai import OpenAI

talk = json.load(sys.stdin)["prompt"]
again = [part for message in talk for part in message["content"] if part["type"] == "image_url"][:1]
client = OpenAI()
for asked in (None, again):
    talk += [{"role": "user", "content": asked}] if asked else []
    reply = client.chat.completions.create(model="policy", messages=talk, max_tokens=4).choices[0].message
    talk.append({"role": "assistant", "content": reply.content})
print(reply.content)
"""
GRPO = {"name": "grpo"}
ROLLOUT = {"batch": 2, "group_size": 3, "max_new_tokens": 4}


def turns_run(folder: Path, code: str, family: str = "qwen2_vl", **changes: Any) -> Path:
    """A run of three steps in which the policy sees several pictures, one after the other."""
    folder.mkdir(exist_ok=True)
    (folder / "parts.py").write_text(code)
    (folder / "agent.py").write_text(AGENT)
    own: dict[str, Any] = {"algorithm": GRPO, "steps": 3, "rollout": ROLLOUT, "plugins": ["parts.py"]}
    return picture_run(folder, family, stages=None, **(own | changes))


def gaps(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["logprob_gap/max"] for line in lines if "logprob_gap/max" in line]


def learned(out: Path, step: int = 1) -> list[Experience]:
    return list(load_experiences(out, step))


@pytest.mark.slow
def test_an_environment_shows_pictures_and_the_run_resumes_bit_equal(tmp_path: Path) -> None:
    changes = {
        "environment": {"name": "Colours", "processes": 1},
        "workflow": "environment",
        "rewards": None,
        "buffer": {"replay": {"groups": 1}},
        "steps": 2,
    }
    path = turns_run(tmp_path, COLOURS, **changes)
    rollmill.run(path, out=tmp_path / "whole")
    assert len(gaps(tmp_path / "whole")) == 2
    assert max(gaps(tmp_path / "whole")) < 1e-4
    episode = learned(tmp_path / "whole")[0]
    assert [turn.role for turn in episode.turns] == ["prompt", *["assistant", "observation"] * 2, "assistant"]
    seen = [(Path(each["path"]).parent.name, each["width"]) for each in episode.info["images"]]
    assert seen[-3:] == [("pictures", 28), ("pictures", 42), ("pictures", 56)]  # after those of the task
    rollmill.run(path, out=tmp_path / "parts")
    (tmp_path / "parts/checkpoints/step-000002").rename(tmp_path / "gone")  # as if it had been killed after its first
    resume(tmp_path / "parts")
    whole, parts = (
        load_file(tmp_path / name / "checkpoints/step-000002/model.safetensors") for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    report = (tmp_path / "whole/report.html").read_text()
    assert report.count("data:image/png") >= 3


SHOWN: dict[str, dict[str, Any]] = {
    "window": {"environment": {"name": "Colours"}, "workflow": {"name": "environment", "history": 2}, "rewards": None},
    "own": {"workflow": "look_twice"},
    "reflection": {"workflow": {"name": "reflection", "retries": 1, "threshold": 2}},
    "vote": {"workflow": {"name": "vote", "samples": 2}, "rewards": None},
    "few_shot": {"workflow": {"name": "few_shot", "count": 1}},
    "program": {"workflow": {"name": "program", "command": ["python", "agent.py"]}},
    "ray": {"workflow": "look_twice", "placement": {"name": "ray", "explorers": 1}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flow", [each if each == "own" else pytest.param(each, marks=pytest.mark.thorough) for each in SHOWN]
)
def test_a_workflow_shows_pictures_in(flow: str, tmp_path: Path) -> None:
    code = COLOURS if "environment" in SHOWN[flow] else FLOW
    rollmill.run(turns_run(tmp_path, code, "llava_next", **SHOWN[flow]), out=tmp_path / "out")
    assert len(gaps(tmp_path / "out")) == 3
    assert max(gaps(tmp_path / "out")) < 1e-4
    assert all(each.info["images"] for each in learned(tmp_path / "out"))


@pytest.mark.slow
def test_live_requests_with_pictures_are_trained_on(tmp_path: Path) -> None:
    """Sessions of OpenAI's client; those with equal words and other pictures are not compared with each other."""
    changes = {
        "workflow": {"name": "live_requests", "group": "prompt"},
        "taskset": None,
        "rewards": None,
        "plugins": None,
    }
    path = turns_run(tmp_path, "", max_staleness=2, steps=2, rollout=ROLLOUT | {"group_size": 2}, **changes)
    url = [_url(tmp_path / f"data/{number}.png") for number in range(4)]

    def application(address: str) -> None:
        with suppress(openai.APIConnectionError, openai.InternalServerError, httpx.TransportError):
            for number in range(1000):
                shown = url[number % 4]
                with openai.OpenAI(base_url=f"{address}/v1", api_key=f"{KEY}:s{number}", max_retries=0) as client:
                    talk: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "?"}, shown]}]
                    [said] = client.chat.completions.create(model="", messages=talk).choices
                    if said.finish_reason != "length":  # the template writes no end of turn that a call could continue
                        continue
                    talk += [{"role": "assistant", "content": said.message.content}]
                    talk += [{"role": "user", "content": [url[0]]}]
                    client.chat.completions.create(model="", messages=talk)
                body = {"session": f"s{number}", "reward": number % 3, "commit": True}
                httpx.post(f"{address}/feedback", json=body, headers={"authorization": f"Bearer {KEY}"})

    def serve(source: Path) -> None:
        listener = open_listener("127.0.0.1", 0)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=application, args=(address,))
        rules = AccessRules("127.0.0.1", KeyRing([make_key("owner", KEY)]))
        serve_training(source, ServerAddress(listener, rules, ServiceLimits(), "toy", thread.start), out=out)
        thread.join()

    out = tmp_path / "out"
    serve(path)
    assert len(gaps(out)) == 2
    assert max(gaps(out)) < 1e-4
    groups: dict[str, set[str]] = {}
    for each in load_experiences(out):
        assert [turn.role for turn in each.turns] == ["prompt", "assistant", "observation", "assistant"]
        assert len(each.info["images"]) == 2
        groups.setdefault(each.group, set()).add(each.info["images"][0]["sha256"])
    assert all(len(first) == 1 for first in groups.values())


def _url(path: Path) -> dict[str, Any]:
    code = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{code}"}}
