"""Programs as rollouts: what they are given, what is recorded, how they fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny import tiny_run

import rollmill
from rollmill.errors import ConfigError, WorkflowError
from rollmill.rollout.workflows import program
from rollmill.rollout.workflows.program import ProgramWorkflow
from rollmill.types import Experience, Task

PLAIN = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
assert task == json.loads(os.environ["ROLLMILL_TASK"]) and "answer" not in task

def post(path, body):
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + path
    head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)))

assert os.environ["OPENAI_BASE_URL"] == os.environ["ANTHROPIC_BASE_URL"] + "/v1"
assert os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_API_KEY"]
prompt = task["prompt"]
for _ in range(2):
    prompt += post("/v1/completions", {"prompt": prompt, "max_tokens": 3, "stop": ["\\n"]})["choices"][0]["text"] + "0"
"""
"""A program without any library: it starts at once."""


BPE = {"new": {"context": 256, "tokenizer": {"kind": "bpe", "vocab_size": 300}}}


def run_with(folder: Path, program: str, **workflow: Any) -> list[Experience]:
    """A tiny run whose second stage rolls out by the program; the experiences of its last step."""
    (folder / "agent.py").write_text(program)
    section = {"name": "program", "command": ["python", "agent.py"], **workflow}
    changes: dict[str, Any] = {"rewards": None} if workflow.get("rewarded_by") == "feedback" else {}
    changes["rollout"] = {"batch": 2, "group_size": 2, "max_new_tokens": 8}
    path = tiny_run(folder, evaluation=None, **changes)
    overrides = ["stages.0.steps=1", "stages.1.steps=1", f"stages.1.workflow={section}"]
    rollmill.run(path, overrides, folder / "run")
    return rollmill.load_experiences(folder / "run", 2)


def test_a_program_is_recorded_and_what_it_prints_is_judged(tmp_path: Path) -> None:
    experiences = run_with(tmp_path, PLAIN + "print('#11111')")
    assert len({(one.episode or one.id) for one in experiences}) == 4
    assert {one.group for one in experiences} == {"repair-000000", "repair-000001"}
    for one in experiences:
        assert one.action_tokens
        assert set(one.versions[one.action_mask].tolist()) == {1}
        assert one.reward_parts["format"] == 1.0


def test_a_program_may_reward_itself(tmp_path: Path) -> None:
    post = 'post("/feedback", {"reward": {"own": 0.25}})'
    experiences = run_with(tmp_path, PLAIN + post, rewarded_by="feedback")
    assert {one.reward for one in experiences} == {0.25}
    assert experiences[0].reward_parts == {"own": 0.25}


@pytest.mark.parametrize(
    ("program", "workflow", "says"),
    [
        ("import sys; sys.exit('no such tool: abacus')", {}, r"task .*: .* exit code 1: no such tool: abacus"),
        ("import time; time.sleep(60)", {"time_limit_s": 0.5}, "took longer than 0.5 s; raise workflow.time_limit_s"),
        (PLAIN + "print('x' * 2_000_000)", {}, "printed more than 1048576 bytes; let it print its answer"),
        ("print('hello')", {}, "never asked the policy; let it use OPENAI_BASE_URL"),
    ],
)
def test_a_program_that_fails_is_named_with_its_task_and_error(
    tmp_path: Path, program: str, workflow: dict[str, Any], says: str
) -> None:
    with pytest.raises(WorkflowError, match=says):
        run_with(tmp_path, program, **workflow)


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match="cannot be started"):
        run_with(tmp_path, "", command=["no-such-program"])


def test_rewards_are_not_honoured_where_feedback_rewards(tmp_path: Path) -> None:
    path = tiny_run(tmp_path, evaluation=None, stages=None, workflow={"name": "program", "command": ["true"]})
    rollmill.config.loader.load_run(path)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="rewards: not honoured by workflow `program`"):
        rollmill.config.loader.load_run(path, ["workflow.rewarded_by=feedback"])  # type: ignore[attr-defined]


def test_a_workflow_may_hand_the_endpoint_to_whatever_takes_a_base_url(tmp_path: Path) -> None:
    code = """
import rollmill, openai

@rollmill.workflow
async def framework(task, policy, endpoint, judge):
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        made = await client.completions.create(model="", prompt=task.prompt, max_tokens=4)
    return {"right": (await judge(made.choices[0].text)).reward, "one": 1.0}
"""
    (tmp_path / "flow.py").write_text(code)
    path = tiny_run(tmp_path, plugins=["flow.py"], evaluation=None, rollout={"batch": 2, "group_size": 2})
    rollmill.run(path, ["stages.0.steps=1", "stages.1.steps=1", "stages.1.workflow=framework"], tmp_path / "run")
    experiences = rollmill.load_experiences(tmp_path / "run", 2)
    assert [one.action_tokens <= 4 and one.reward_parts["one"] for one in experiences] == [1.0] * 4


def test_output_that_nobody_reads_does_not_keep_a_stopped_program(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unread(stream: Any) -> None:
        await asyncio.sleep(60)

    async def stopped() -> None:
        monkeypatch.setattr(program, "_read", unread)
        loud = ProgramWorkflow(command=["python", "-c", "while True: print('x' * 100_000)"])
        access: Any = SimpleNamespace(base_url="", address="", api_key="")
        running = asyncio.ensure_future(loud._run(Task("t", "?"), access, None))
        await asyncio.sleep(0.5)  # it has printed more than is taken in unread
        running.cancel()
        await asyncio.wait([running], timeout=10)
        assert running.cancelled()

    asyncio.run(stopped())


@pytest.mark.slow
def test_programs_use_every_protocol_and_formats_and_each_call_is_trained_on(tmp_path: Path) -> None:
    """Clients of Anthropic, of responses, and one with a format: one step learns from all of their tokens."""
    code = """
import anthropic, openai, rollmill

@rollmill.workflow
async def clients(task, policy, endpoint, judge):
    asked = [{"role": "user", "content": task.prompt}]
    yes_no = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["1", "0"]}}}
    async with anthropic.AsyncAnthropic(base_url=endpoint.address, api_key=endpoint.api_key) as client:
        first = await client.messages.create(model="", max_tokens=4, messages=asked)
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        second = await client.responses.create(model="", input="a", max_output_tokens=4)
        third = await client.responses.create(model="", input="b", previous_response_id=second.id, max_output_tokens=4)
        made = await client.chat.completions.create(
            model="", messages=asked, max_tokens=6, response_format=yes_no, presence_penalty=1.0
        )
    used = [each.usage.output_tokens for each in (first, second, third)] + [made.usage.completion_tokens]
    return {"shape": float(made.choices[0].message.content in ('"1"', '"0"')), "tokens": float(sum(used))}
"""
    (tmp_path / "flow.py").write_text(code)
    path = tiny_run(tmp_path, plugins=["flow.py"], evaluation=None, rollout={"batch": 1, "group_size": 2}, model=BPE)
    rollmill.run(path, ["stages.0.steps=1", "stages.1.steps=1", "stages.1.workflow=clients"], tmp_path / "run")
    experiences = rollmill.load_experiences(tmp_path / "run", 2)
    assert {one.reward_parts["shape"] for one in experiences} == {1.0}
    episodes = {one.episode for one in experiences}
    assert len(episodes) == 2
    for episode in episodes:
        own = [one for one in experiences if one.episode == episode]
        assert len(own) == 3, "the two responses are one trajectory"
        assert {one.reward_parts["tokens"] for one in own} == {float(sum(one.action_tokens for one in own))}
