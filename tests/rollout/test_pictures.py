"""Conversations with pictures: a vision-language policy sees them turn by turn, with exact tokens and log-probs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.picture_models import FAMILIES, load_seeing
from support.toys import toy_tokenizer

from rollmill.concurrency import FunctionThreads
from rollmill.config.rollout import SamplingConfig
from rollmill.data.picture_turns import join_turns, turns_of
from rollmill.data.renderer.call_formats import tool_result_message
from rollmill.engines.native.engine import NativeEngine
from rollmill.errors import EngineError, WorkflowError
from rollmill.models.hf_forward import hf_logprobs
from rollmill.models.load import PolicyModel
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.policy import Policy
from rollmill.rollout.recorder import Recorder
from rollmill.rollout.tools.function_tool import FunctionTool
from rollmill.rollout.tools.toolbox import Tool, Toolbox
from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.logprobs import compute_logprobs, use_packed_attention
from rollmill.types import Experience, Task, ToolCall

CPU = torch.device("cpu")
QUICK = {"qwen2_vl", "idefics3"}
BY_FAMILY = [
    each if each in QUICK else pytest.param(each, marks=pytest.mark.thorough)
    for each in FAMILIES
    # pictures of one call of llava_onevision have fewer tokens (no other reference); paligemma has one turn
    if each not in ("llava_onevision", "paligemma")
]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    return load_seeing(tmp_path_factory.mktemp("seeing"), "llava")


def pixels(width: int, height: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def picture(*size: int) -> dict[str, Any]:
    return {"type": "image", "image": pixels(*size)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


async def talk(policy: Policy, turns: list[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for content in turns:
        messages.append({"role": "user", "content": content})
        messages.append((await policy.chat(messages)).message)
    return messages


def rolled_out(model: PolicyModel, turns: list[Any], first: int = 0) -> tuple[list[Experience], NativeEngine]:
    """Experiences of a conversation in which the policy writes no picture token."""
    token = model.model.picture_processor.image_token_id
    chat = ChatRenderer(model.tokenizer, frozenset([model.tokenizer.eos_token_id]))
    for seed in range(first, 100):
        engine = NativeEngine(model.model, model.tokenizer, context=model.context, prefill_tokens=16)
        recorder = Recorder()
        policy = Policy(engine, chat, SamplingConfig(max_new_tokens=5), seed=seed, name="task 1", recorder=recorder)
        asyncio.run(talk(policy, turns))
        if not any(token in each.completion.token_ids for each in recorder.calls):
            return recorder.experiences(id="1/0", task_id="1", group="1", decode=chat.decode), engine
    raise AssertionError("every seed sampled a picture token")


def attach(model: PolicyModel, experience: Experience) -> Experience:
    """As the learner does before a step: pictures are read again."""
    turns = turns_of(experience)
    assert turns is not None
    processor = model.model.picture_processor
    experience.pictures = join_turns(processor, experience.token_ids.tolist(), turns, experience.id)
    return experience


def trainer_logprobs(model: PolicyModel, experiences: list[Experience]) -> np.ndarray:
    table = build_token_table(experiences, CPU)
    found = torch.zeros(len(table.target))
    for micro in build_micro_batches(experiences, table, range(len(experiences)), 4096, CPU):
        with torch.no_grad(), use_packed_attention(model.model, micro):
            found[micro.tokens] = compute_logprobs(model.model, micro, table)[0]
    return found.numpy()


@pytest.mark.parametrize("family", BY_FAMILY)
def test_turns_with_pictures_have_the_model_s_own_logprobs(family: str, tmp_path: Path) -> None:
    """The reference is transformers' own forward on the whole conversation, encoded by the processor in one piece."""
    model = load_seeing(tmp_path, family)
    other = (56, 56) if family == "mistral3" else (42, 28)  # its processor of the tests takes one size
    turns = [
        [picture(56, 56, 0), text("first")],
        "no picture",
        [text("two: "), picture(*other, 1), text(" and "), picture(56, 56, 2)],
        [picture(*other, 3)],
        "the end",
    ]
    [experience], engine = rolled_out(model, turns)
    assert [turn.role for turn in experience.turns] == ["prompt", *["assistant", "observation"] * 4, "assistant"]
    seen = turns_of(experience)
    assert seen is not None
    assert [len(each.images) for each in seen] == [1, 2, 1]
    assert [each["width"] for each in experience.info["images"]] == [56, other[0], 56, other[0]]
    features = engine.core._runner.features
    assert features is not None
    assert features.computed == 3  # once per turn with pictures, however often its prompt came again

    images = [image for each in seen for image in each.images]
    processor = model.model.picture_processor
    place = {each.start: each.text for each in seen}
    whole = ""
    for turn in experience.turns:
        own = model.tokenizer.convert_ids_to_tokens(experience.token_ids[turn.start : turn.end].tolist())
        whole += place.get(turn.start) or "".join(own)
    reference = processor.encode(whole, [Path(each.path).read_bytes() for each in images], "the whole")
    assert reference.token_ids == experience.token_ids.tolist()
    first = int(experience.action_mask.argmax())
    with torch.no_grad():
        exact = hf_logprobs(model.model, [reference.token_ids], len(reference.token_ids) - first, reference)[0].numpy()
    mask = experience.action_mask[first:]
    assert mask.sum() >= 5
    assert np.abs(exact[mask] - experience.logprobs[experience.action_mask]).max() < 1e-4
    assert np.abs(trainer_logprobs(model, [attach(model, experience)]) - exact[mask]).max() < 1e-4


def chatting(model: PolicyModel, seed: int) -> tuple[ChatRenderer, Recorder, Policy]:
    """A policy on an engine of its own, whose calls are recorded."""
    chat = ChatRenderer(model.tokenizer, frozenset([model.tokenizer.eos_token_id]))
    engine, recorder = NativeEngine(model.model, model.tokenizer, context=model.context), Recorder()
    options = SamplingConfig(max_new_tokens=3)
    return chat, recorder, Policy(engine, chat, options, seed=seed, name="task 1", recorder=recorder)


@pytest.mark.parametrize("content", [[picture(28, 28, 1), text("x")], "x"])
def test_a_call_on_other_pictures_is_another_branch(content: Any, tmp_path: Path) -> None:
    model = load_seeing(tmp_path, "qwen2_vl")
    chat, recorder, policy = chatting(model, seed=1)

    async def both() -> None:
        said = await policy.chat([{"role": "user", "content": [picture(28, 28, 0), text("x")]}])
        # tokens of equal ids, with another picture or none behind them
        await policy.chat([{"role": "user", "content": content}, said.message, {"role": "user", "content": "y"}])

    asyncio.run(both())
    made = recorder.experiences(id="1/0", task_id="1", group="1", decode=chat.decode)
    assert len(made) == 2
    assert made[0].info["images"] != made[1].info.get("images")
    found = trainer_logprobs(model, [attach(model, each) for each in made])
    assert np.abs(found - np.concatenate([each.logprobs[each.action_mask] for each in made])).max() < 1e-4


def test_tokens_continue_a_chat_with_its_pictures(tmp_path: Path) -> None:
    model = load_seeing(tmp_path, "qwen3_vl")
    chat, recorder, policy = chatting(model, seed=3)

    async def both() -> None:
        said = await policy.chat([{"role": "user", "content": [picture(56, 28, 0), text("x")]}])
        await policy.complete([*said.token_ids, *policy.encode("so ")])

    asyncio.run(both())
    [made] = recorder.experiences(id="1/0", task_id="1", group="1", decode=chat.decode)
    assert [turn.role for turn in made.turns] == ["prompt", "assistant", "observation", "assistant"]
    found = trainer_logprobs(model, [attach(model, made)])
    assert np.abs(found - made.logprobs[made.action_mask]).max() < 1e-4
    made.pictures = None
    assert np.abs(trainer_logprobs(model, [made]) - found).max() > 1e-3  # the picture matters


def test_prompts_of_the_same_tokens_keep_their_own_pictures(tmp_path: Path) -> None:
    model = load_seeing(tmp_path, "qwen3_vl")
    _, recorder, policy = chatting(model, seed=3)

    async def both() -> None:
        first, second = (
            policy.prompt([{"role": "user", "content": [picture(28, 28, seed), text("x")]}]) for seed in (0, 1)
        )
        assert first == second
        await policy.complete(first)
        await policy.complete(second)
        with pytest.raises(EngineError, match="begin like 2 prompts with different pictures"):
            await policy.complete([*first])

    asyncio.run(both())
    one, other = recorder.calls
    assert one.turns != other.turns


def test_rollouts_that_see_different_turns_share_their_prompt(tmp_path: Path) -> None:
    model = load_seeing(tmp_path, "qwen2_5_vl")
    opening = [picture(56, 28, 0), text("x")]
    made = [
        attach(model, rolled_out(model, [opening, [picture(28 * (1 + i), 28, i)], "end"], 10 * i)[0][0])
        for i in range(3)
    ]
    table = build_token_table(made, CPU)
    [row] = build_micro_batches(made, table, range(3), 4096, CPU)
    apart = sum(
        len(micro.input_ids[0]) for micro in build_micro_batches(made, table, range(3), 4096, CPU, share_prefixes=False)
    )
    prompt = made[0].turns[0].end
    assert len(row.input_ids[0]) == apart - 2 * prompt
    together, alone = trainer_logprobs(model, made), [trainer_logprobs(model, [each]) for each in made]
    assert np.abs(together - np.concatenate(alone)).max() < 1e-5
    assert np.abs(together - np.concatenate([each.logprobs[each.action_mask] for each in made])).max() < 1e-4


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "input_audio", "input_audio": {}}, "audio is not supported"),
        ({"type": "image_url", "image_url": {"url": "http://a/b.png"}}, "downloads nothing"),
        ({"type": "image", "image": "gone.png"}, "cannot be read"),
        ({"type": "image", "image": np.zeros((2, 2))}, "give uint8"),
        ({"type": "hologram"}, "text, image, image_url and video are known"),
        ({"type": "video", "video": "film.mp4"}, "give its frames"),
    ],
)
def test_what_cannot_be_seen_names_the_message(part: dict[str, Any], named: str, seeing: PolicyModel) -> None:
    chat = ChatRenderer(seeing.tokenizer, frozenset())
    policy = Policy(None, chat, SamplingConfig(), seed=0, name="task 7")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=f"task 7: message 1.*{named}"):
        policy.prompt([{"role": "user", "content": "a"}, {"role": "user", "content": [part]}])


def test_a_text_model_is_shown_no_picture() -> None:
    policy = Policy(None, ChatRenderer(toy_tokenizer(), frozenset()), SamplingConfig(), seed=0, name="task 7")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="task 7: a message has a picture, and the model reads text only"):
        policy.prompt([{"role": "user", "content": [picture(28, 28, 0)]}])


def test_a_video_is_its_frames(seeing: PolicyModel) -> None:
    chat = ChatRenderer(seeing.tokenizer, frozenset())
    policy = Policy(None, chat, SamplingConfig(), seed=0, name="task 7")  # type: ignore[arg-type]
    frames = [pixels(28, 28, i) for i in range(3)]
    film = policy.prompt([{"role": "user", "content": [{"type": "video", "video": frames}, text("?")]}])
    apart = [{"type": "image", "image": each} for each in frames]
    assert film == policy.prompt([{"role": "user", "content": [*apart, text("?")]}])
    assert film.count(seeing.model.picture_processor.image_token_id) == 3 * 16


def test_texts_that_name_the_picture_token_are_refused_beside_pictures(seeing: PolicyModel) -> None:
    chat = ChatRenderer(seeing.tokenizer, frozenset())
    policy = Policy(None, chat, SamplingConfig(), seed=0, name="task 7")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="2 places for 1 pictures; texts must not contain `<image>`"):
        policy.prompt([{"role": "user", "content": [picture(28, 28, 0), text("an <image>")]}])
    own = [{"role": "user", "content": [picture(28, 28, 0)]}, {"role": "assistant", "content": "an <image>"}]
    assert len(policy.prompt([*own, {"role": "user", "content": "x"}])) > 16  # the policy's own are left out


def test_tools_show_pictures_to_a_policy_that_sees(seeing: PolicyModel) -> None:
    """Others are told that there is one; a picture that cannot be read is an error of the tool."""

    def look(size: int) -> Any:
        """Look through the window."""
        return ["seen", pixels(size, 28, 0)]

    async def broken(arguments: dict[str, Any]) -> Any:
        return [{"type": "image", "image": "data:image/png;base64,AAAA"}]

    async def called(policy: Any) -> list[Any]:
        tool = FunctionTool(look)
        threads = FunctionThreads("tools", WorkflowError, 2, most_stuck=2)
        call = tool.caller(Task("1", "?"), {}, threads, 10.0)
        tools = [tool.tool("look", None, call), Tool("broken", "", {}, broken)]
        folder = policy.folder if policy is not None else None
        box = Toolbox(tools, {"look": 100, "broken": 100}, {}, folder=folder)
        calls = [ToolCall("a", "look", {"size": 56}), ToolCall("b", "broken", {})]
        found = [tool_result_message(each, (await box.answered(each)).content) for each in calls]
        threads.close()
        return found

    chat = ChatRenderer(seeing.tokenizer, frozenset())
    policy = Policy(None, chat, SamplingConfig(), seed=0, name="task 7")  # type: ignore[arg-type]
    first, second = asyncio.run(called(policy))
    assert second["content"].startswith("Error: its picture cannot be read")
    start: list[Any] = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "a call"}]
    ids = policy.prompt([*start, first, second])
    assert ids.count(seeing.model.picture_processor.image_token_id) == 16
    [first, _] = asyncio.run(called(None))
    assert first["content"] == "seen\n(image, not shown)"
