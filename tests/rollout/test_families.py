"""The tool agent of every family: trained for two steps through the real template, and calls that cannot be read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from support.tiny import metrics
from support.toys import toy_model
from support.written_templates import written

pytest.importorskip("trl", reason="real chat templates are in the package trl, which is not installed")

from renderers import create_renderer
from renderers.configs import InklingRendererConfig
from safetensors.numpy import load_file

import rollmill
from bench.chat_templates.tokenizers import stand_in
from rollmill.config.components import ToolConfig
from rollmill.config.rewards import RewardManagerConfig
from rollmill.config.rollout import RolloutConfig, SamplingConfig
from rollmill.data.renderer import Renderer
from rollmill.engines.base import GenerationRequest
from rollmill.errors import ChatTemplateError
from rollmill.models.from_scratch import save_policy
from rollmill.rewards import build_reward_manager
from rollmill.rewards.builtin.exact import ExactReward
from rollmill.rollout import Explorer
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.resources import WorkflowResources, build_workflow
from rollmill.rollout.runner import RetryingWorkflow, WorkflowRunner
from rollmill.rollout.tools.function_tool import FunctionTool, tool
from rollmill.rollout.workflows.tools import ToolWorkflow
from rollmill.types import Completion, Experience, Message, StopReason, Task

FAST = ("qwen3", "gptoss", "qwen3_5_think")
FAMILIES = (
    *("qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen2_5", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"),
    *("glm4moe", "GLM-4.6", "GLM-4.7-Flash", "gptoss", "llama3_1", "llama3_2", "nemotron_3_nano", "nemotron_3_super"),
    *("nemotron_3_ultra", "nemotron_3_5_lightning", "moonshotai-Kimi-K2", "MiniMax-M2", "poolside-Laguna-S-2.1"),
    *("poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2", "gemma4", "gemma4_v5", "google-gemma-4-31B-it"),
    *("deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731", "deepseek-v3 with tools", "tencent-Hy3"),
    *("xinference-Kimi-K2.5", "xinference-glm-5.1", "xinference-glm-5.2", "xinference-glm-5.3", "inkling"),
    *("xinference-Qwen3-Coder", "xinference-qwen3.8-max", "xinference-MiniMax-M2.7", "xinference-deepseek-r1-0528"),
    # formats that no family knows, and that are learned from the template
    *("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407", "ibm-granite-granite-4.0"),
    *("llama4", "lfm2_v2", "Cohere2MoE", "exaone4"),
)
FORKS = {"google-gemma-4-31B-it": "the prompt has an empty channel of thoughts, which the history lacks"}
"""Templates that change the history when a result follows."""

OPENED = (
    *("qwen3_5_think", "qwen3_6", "qwen3_8", "glm4moe", "GLM-4.6", "GLM-4.7-Flash", "nemotron_3_nano"),
    *("nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning", "MiniMax-M2", "gemma4_v5"),
)
"""Templates whose prompts open reasoning, or whose reasoning has tags of its own."""
SECTION_ENDS = (
    *("<|tool_calls_section_end|>", "<｜tool▁calls▁end｜>", "\n</｜DSML｜tool_calls>", "\n</tool_calls:opensource>"),
    "<|end_message|>",
)
"""What Kimi, DeepSeek V3 and V4, Hy3 and Inkling write after a turn's last call, which has an end of its own."""

RESULT = "RESULT 391"
ARGUMENTS: dict[str, Any] = {
    "text": 'He said "hi"\nand left \U0001f642',
    "number": 7,
    "nested": {"list": [1, "two", {"three": 3.5}]},
}


def probe(text: str, number: int, nested: dict[str, Any]) -> str:
    """Probes."""
    return f"{text}{number}{nested}"


TOOLS = [
    {
        "type": "function",
        "function": {"name": "probe", "description": "Probes.", "parameters": FunctionTool(probe).schema},
    }
]
QUESTION = {"role": "user", "content": "Probe it."}
PLUGIN = """
import json
from pathlib import Path
from typing import Any

import numpy as np
import rollmill
import torch
from rollmill.types import Completion, StopReason

FOLDER = Path(__file__).parent
SCRIPT = json.loads((FOLDER / "script.json").read_text())


def note(name, **values):
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps(values) + "\\n")


@rollmill.tool
def probe(text: str, number: int, nested: dict[str, Any]) -> str:
    "Probes."
    note("arguments.jsonl", text=text, number=number, nested=nested)
    return SCRIPT["result"]


@rollmill.engine
class Scripted:
    def __init__(self, policy):
        self.policy, self.version, self.tokens_generated, self.answered = policy, 0, 0, 0

    def weights_updated(self, version):
        self.version = version

    def interrupt(self): ...

    def pause(self): ...

    def resume(self): ...

    def counters(self):
        return {}

    async def drain(self): ...

    async def sleep(self): ...

    async def close(self): ...

    async def stream(self, request):
        for completion in await self.generate(request):
            yield completion

    async def generate(self, request):
        prompt, ids = list(request.prompt_ids), SCRIPT["call"]
        if SCRIPT["result"] in self.policy.tokenizer.decode(prompt):
            ids = SCRIPT["answers"][self.answered % 2]
            self.answered += 1
        note("asked.jsonl", prompt=prompt, ids=ids)
        with torch.inference_mode():
            logits = self.policy.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()
        text = self.policy.tokenizer.decode(ids, skip_special_tokens=True)
        tokens = np.array(ids, np.int32)
        versions, mass = np.full_like(tokens, self.version), np.zeros(len(ids), np.float32)
        prompt = np.array(prompt, np.int32)
        return [Completion(prompt, tokens, logprobs, versions, mass, text, StopReason.EOS, request.seed, 0)]
"""


@dataclass(frozen=True)
class FamilyChat:
    """What a model of a family reads and writes: a question, a call, its result and an answer."""

    renderer: Renderer
    ends: frozenset[int]  #: `eos_token_id` of the checkpoint
    end: str  #: of a turn with a call
    call: str  #: the turn with the call, as the template writes it after the prompt, with its end
    reasoning: str | None  #: of the turn with the call

    def history(self) -> list[Any]:
        """The messages up to the result, as the workflow has them."""
        reply = self.renderer.parse(self.renderer.encode(self.call), self.prompt(), TOOLS)
        [call] = reply.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": RESULT}
        return [QUESTION, reply.message, result]

    def prompt(self) -> list[int]:
        """Tokens of the question."""
        return self.renderer.prompt([QUESTION], TOOLS).token_ids

    def answer(self, text: str) -> str:
        """The turn after the result, as the template writes it."""
        question, call, result = self.history()
        call = {key: value for key, value in call.items() if key != "reasoning_content"}  # some drop it from here on
        messages = [question, call, result, {"role": "assistant", "content": text}]
        return self.renderer.demonstration_pieces(messages, 3, TOOLS)[-1][0]


@cache
def family_chat(name: str) -> FamilyChat:
    """The chat of a family. Skips the test if the template is not here."""
    try:
        known = written(name)
    except KeyError:
        pytest.skip(f"the template {name} is not here; `make templates-setup` fetches it")
    tokenizer, ends = stand_in(known)
    renderer = Renderer(tokenizer, ends)
    function = {"name": "probe", "arguments": ARGUMENTS}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }
    for reasoning in ("I probe it.", None) if renderer.template.supports_reasoning else (None,):
        said = turn if reasoning is None else turn | {"reasoning_content": reasoning}
        try:
            pieces = renderer.demonstration_pieces([QUESTION, said], 1, TOOLS)
        except ChatTemplateError:
            if reasoning is None:
                raise
            continue  # thinking is switched off
        call = pieces[-1][0]
        found = [each for each in map(renderer.decode, ([token] for token in renderer.stop_ids)) if call.endswith(each)]
        return FamilyChat(renderer, ends, max(found, key=len), call, reasoning)
    raise AssertionError


def broken_calls(chat: FamilyChat) -> Iterator[str]:
    """The turn with a call, cut off at several places, or damaged; without its end."""
    body = chat.call.removesuffix(chat.end).rstrip()
    for end in SECTION_ENDS:
        body = body.removesuffix(end)
    yield body[: body.index("and left") + 3]
    yield body[: max(body.rindex("7"), body.rindex("3.5"), body.rindex("left")) + 1]
    yield body[:-4]
    yield body[:-1]
    if '"number": 7' in body:
        yield body.replace('"number": 7', '"number": : 7')


class Scripted:
    """An engine that says its turns one after the other."""

    version = 0

    def __init__(self, chat: FamilyChat, turns: Sequence[str]) -> None:
        self._chat, self._turns = chat.renderer, list(turns)
        self.prompts: list[str] = []

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        self.prompts.append(self._chat.decode(list(request.prompt_ids)))
        ids = self._chat.encode(self._turns.pop(0))
        tokens, zeros = np.array(ids, np.int32), np.zeros(len(ids), np.float32)
        reason = StopReason.EOS if ids[-1] in self._chat.stop_ids else StopReason.LENGTH
        text = self._chat.tokenizer.decode(ids, skip_special_tokens=True)
        return [
            Completion(np.array(request.prompt_ids, np.int32), tokens, zeros, tokens * 0, zeros, text, reason, 0, 0)
        ]

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Completion]:
        for each in await self.generate(request):
            yield each


@dataclass(frozen=True)
class Rolled:
    """A rollout of the tool agent."""

    reward: float | None
    answer: str
    prompts: list[str]
    counted: Mapping[str, float]


def rolled(chat: FamilyChat, *says: str, turns: int = 3) -> Rolled:
    """Roll out the workflow `tools` once."""
    tokenizer = chat.renderer.tokenizer
    tool(probe)
    engine = Scripted(chat, says)
    judge = build_reward_manager([ExactReward(name="exact")], RewardManagerConfig(), tokenizer=tokenizer)
    resources = WorkflowResources(judge, tools=[TypeAdapter(ToolConfig).validate_python("probe")])
    workflow = build_workflow(ToolWorkflow(turns=turns), resources)
    assert workflow is not None
    limits: Any = RetryingWorkflow(workflow, RolloutConfig())
    runner = WorkflowRunner(limits, engine, ChatRenderer(tokenizer, chat.ends), judge)  # type: ignore[arg-type]

    async def run() -> Rolled:
        try:
            found = await runner.group(task_of(chat), SamplingConfig(), n=1, seed=1, group="g")
            return Rolled(found[-1].reward, found[-1].parsed_reply.content, engine.prompts, resources.metrics())
        finally:
            await resources.close()

    try:
        return asyncio.run(run())
    finally:
        judge.close()


def task_of(chat: FamilyChat) -> Task:
    return Task("t", [Message(role="user", content=QUESTION["content"])], answer="It is 391.")


def model_folder(path: Path, chat: FamilyChat) -> Path:
    """A tiny model with the family's tokenizer."""
    tokenizer = chat.renderer.tokenizer
    model = toy_model(
        "llama", len(tokenizer), eos_token_id=tokenizer.eos_token_id, hidden_size=32, num_hidden_layers=1,
        max_position_embeddings=4096,
    )  # fmt: skip
    model.generation_config.eos_token_id = sorted(chat.ends)
    save_policy(model, tokenizer, path)
    return path


def trained(folder: Path, chat: FamilyChat) -> Path:
    """The directory of two GRPO steps of the tool agent, whose policy calls the tool and answers."""
    encode = chat.renderer.encode
    answers = [encode(chat.answer(text)) for text in ("It is 391.", "It is 390.")]
    script = {"call": encode(chat.call), "answers": answers, "result": RESULT}
    (folder / "script.json").write_text(json.dumps(script))
    (folder / "scripted.py").write_text(PLUGIN)
    row = {"prompt": [QUESTION], "answer": "It is 391."}
    (folder / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    config = {
        "name": "agent",
        "model": {"path": str(model_folder(folder / "model", chat))},
        "plugins": ["scripted.py"],
        "engine": "Scripted",
        "taskset": {"path": "tasks.jsonl"},
        "workflow": {"name": "tools", "turns": 3},
        "tools": ["probe"],
        "rewards": [{"name": "exact"}],
        "rollout": {"batch": 1, "group_size": 2, "max_new_tokens": 512},
        "algorithm": {"name": "grpo"},
        "trainer": {"precision": "fp32", "lr": 1e-3},
        "steps": 2,
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))
    rollmill.run(path, [], folder / "run")
    return folder / "run"


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in FAMILIES]
)
def test_the_tool_agent_is_trained_for_two_steps(tmp_path: Path, name: str) -> None:
    chat = family_chat(name)
    renderer = chat.renderer
    run = trained(tmp_path, chat)
    assert lines(tmp_path / "arguments.jsonl") == [ARGUMENTS] * 4

    asked = lines(tmp_path / "asked.jsonl")
    first = [each for each in asked if each["ids"] == renderer.encode(chat.call)]
    second = [each for each in asked if each not in first]
    assert (len(first), len(second)) == (4, 4)
    assert {renderer.decode(each["prompt"]) for each in first} == {renderer.text([QUESTION], TOOLS)}
    assert {renderer.decode(each["prompt"]) for each in second} == {renderer.text(chat.history(), TOOLS)}

    found = [each for step in (1, 2) for each in rollmill.load_experiences(run, step)]
    assert len(found) == (8 if name in FORKS else 4)
    for one in found:
        spans = np.flatnonzero(np.diff(one.action_mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
        sampled = [one.token_ids[start:end].tolist() for start, end in spans]
        before = [one.token_ids[:start].tolist() for start, _ in spans]
        turns = [each for each in asked if each["prompt"] in before]
        assert all({"prompt": a, "ids": b} in turns for a, b in zip(before, sampled, strict=True))
        assert len(sampled) == (1 if name in FORKS else 2)
    assert {one.reward for one in found} == {0.0, 1.0}
    assert {one.parsed_reply.content.strip() for one in found if one.reward == 1.0} - {""} == {"It is 391."}

    steps = metrics(run)
    assert len(steps) == 2
    assert all(np.isfinite(each["loss"]) and each["grad_norm"] > 0 for each in steps)
    assert [each["tools/probe/calls"] for each in steps] == [2, 2]
    [last] = sorted((run / "checkpoints").glob("step-*"))[-1:]
    before_, after = (load_file(each / "model.safetensors") for each in (tmp_path / "model", last))
    assert any((before_[key] != after[key]).any() for key in before_)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_cannot_be_read_are_errors_and_no_answer(name: str) -> None:
    chat = family_chat(name)
    answer = chat.answer("It is 391.")
    for broken in broken_calls(chat):
        for end in (chat.end, ""):  # ended by the policy, or at `max_new_tokens`
            found = rolled(chat, broken + end, answer)
            assert (found.counted["tools/malformed"], found.counted["tools/probe/calls"]) == (1, 0), broken
            assert "a call that cannot be read" in found.prompts[1]
            assert found.reward == 1
        last = rolled(chat, broken + chat.end, turns=1)
        assert (last.counted["tools/malformed"], last.reward, last.answer) == (1, 0, "")


@pytest.mark.parametrize("name", ["qwen3", "poolside-Laguna-S-2.1", *OPENED])
def test_calls_within_unfinished_reasoning_are_none(name: str) -> None:
    chat = family_chat(name)
    assert chat.reasoning is not None
    before, _, behind = chat.call.partition(chat.reasoning)
    call = behind.partition(chat.renderer.template.reasoning_tags[1].strip())[2]
    assert "probe" in call
    found = rolled(chat, f"{before}{chat.reasoning}{call}", chat.answer("It is 391."))
    assert (found.counted["tools/malformed"], found.counted["tools/probe/calls"]) == (0, 0)
    assert (found.reward, found.answer, len(found.prompts)) == (0, "", 1)


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "gemma4_v5", "glm4moe"])
def test_the_answer_of_a_single_turn_has_no_reasoning(name: str) -> None:
    chat = family_chat(name)
    renderer = chat.renderer
    said = {"role": "assistant", "content": "It is 391.", "reasoning_content": "It is 390."}
    turn = renderer.demonstration_pieces([QUESTION, said], 1)[-1][0]
    tokenizer = renderer.tokenizer
    with build_reward_manager([ExactReward(name="exact")], RewardManagerConfig(), tokenizer=tokenizer) as judge:
        engine: Any = Scripted(chat, [turn, turn])
        explorer = Explorer(engine, judge, tokenizer)

        async def run() -> list[Experience]:
            found = await explorer.rollout(task_of(chat), SamplingConfig(), n=1, seed=1, group="g")
            part = await explorer.part(task_of(chat), SamplingConfig(), n=1, seed=1, group="g")
            await explorer.score_part(task_of(chat), SamplingConfig(), part)
            return [*found, *part.experiences]

        found = asyncio.run(run())
    assert [each.reward for each in found] == [1.0, 1.0]
    for each in found:
        reply = each.parsed_reply
        assert (reply.content.strip(), (reply.reasoning or "").strip()) == ("It is 391.", "It is 390.")


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("qwen3", "I look it up.\n"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "I look it up."),
        ("Mistral-Small-3.2-24B-Instruct-2506", "I look it up."),
        ("gptoss", "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"),
    ],
)
def test_text_that_the_policy_writes_before_its_call_breaks_no_rollout(name: str, before: str) -> None:
    """Though some templates do not show it in the history."""
    chat = family_chat(name)
    found = rolled(chat, chat.call.replace(CALLS[name], f"{before}{CALLS[name]}", 1), chat.answer("It is 391."))
    assert (found.counted["tools/probe/calls"], found.reward, len(found.prompts)) == (1, 1, 2)


CALLS = {"qwen3": "<tool_call>", "gptoss": " to=functions"} | dict.fromkeys(
    ("mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506"), "[TOOL_CALLS]"
)
"""What a call begins with."""


@pytest.mark.parametrize("switches", [{}, {"reasoning_effort": "low"}, {"reasoning_effort": "none"}])
def test_the_written_template_of_inkling_is_the_librarys_rendering(switches: dict[str, Any]) -> None:
    chat = family_chat("inkling")
    renderer = chat.renderer.bound(switches)
    library = create_renderer(renderer.tokenizer, InklingRendererConfig(**switches))
    answer = {"role": "assistant", "content": "It is 391.", "reasoning_content": "I add."}
    for messages in ([QUESTION], [{"role": "system", "content": "Briefly."}, *chat.history()], [QUESTION, answer]):
        for tools in (None, TOOLS):
            expected = library.render_ids(messages, tools=tools, add_generation_prompt=True)
            assert renderer.decode(expected) == renderer.template.render(messages, tools)
            assert expected == renderer.encode(renderer.template.render(messages, tools))
