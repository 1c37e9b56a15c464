"""Encodes prompts and demonstrations. A task's prompt has the same tokens in a rollout and in a demonstration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from rollmill.data.images import ImageRef, image_refs_of, read_image
from rollmill.data.layouts import (
    REJECTED_MESSAGE,
    RESPONSE_MESSAGE,
    RESPONSE_MESSAGES,
    SWITCHES,
    TOOLS,
    text_of_message,
)
from rollmill.data.picture_turns import refer_to
from rollmill.data.renderer import ChatMessage, Renderer, renderer_of
from rollmill.data.renderer.tokens import encode_pieces, encode_start
from rollmill.data.template import PromptTemplate
from rollmill.errors import ChatTemplateError, TasksetError
from rollmill.types import (
    Completion,
    Experience,
    ExperienceSource,
    Message,
    ParsedReply,
    StopReason,
    Task,
    Turn,
    experience_from_demonstration,
    split_reply,
)

if TYPE_CHECKING:
    from rollmill.data.picture_prompts import PictureProcessor, PicturePrompt

LearnedTurns = Literal["last", "all"]
"""Turns of a conversation that are imitated: the last of the assistant's, or all of them."""


def render_prompt(task: Task, tokenizer: Any) -> str:
    """Render the prompt as text: plain text unchanged, chat messages with the tokenizer's chat template.

    For a vision-language policy, the text has a place for each picture.

    Raises:
        TasksetError: the tokenizer has no chat template, or the template refuses or does not show the messages.
    """
    if isinstance(task.prompt, str):
        seen = _pictures(task, tokenizer)
        return tokenizer.picture_processor.plain(task.prompt, len(seen)) if seen else task.prompt
    with _named(task):
        return _renderer(task, tokenizer).text(_messages(task, tokenizer), task.metadata.get(TOOLS))


def _renderer(task: Task, tokenizer: Any) -> Renderer:
    """The renderer of the tokenizer's chats. Raises TasksetError if it has no chat template."""
    switches = task.metadata.get(SWITCHES) or {}
    try:
        renderer = renderer_of(tokenizer)
        known = renderer.template.variables
        if known is not None and (unknown := [each for each in switches if each not in known]):
            raise TasksetError(
                f"task {task.id}: chat_template_kwargs has `{unknown[0]}`, which the model's chat template does not "
                "read; correct or remove it"
            )
        return renderer.bound(switches)
    except ChatTemplateError as error:
        raise TasksetError(
            f"task {task.id} is a chat: {error}, or remove taskset.chat (or give text prompts)"
        ) from error


@contextmanager
def _named(task: Task) -> Iterator[None]:
    """Name the task in errors of the chat template."""
    try:
        yield
    except ChatTemplateError as error:
        raise TasksetError(f"task {task.id}: {error}") from error


def _messages(task: Task, tokenizer: Any) -> list[ChatMessage]:
    """The prompt's messages, with references to its pictures in their texts."""
    assert not isinstance(task.prompt, str)
    messages: list[Any] = [dict(each) for each in task.prompt]
    user = next((i for i, each in enumerate(messages) if each["role"] == "user"), 0)
    for picture in reversed(_pictures(task, tokenizer)):
        message = messages[user if picture.message is None else picture.message]
        text, at = message["content"], picture.offset
        message["content"] = f"{text[:at]}{refer_to(picture)}{text[at:]}"
    return messages


def parse_completion(task: Task, tokenizer: Any, completion: Completion) -> ParsedReply:
    """Take a completion of the task's prompt apart: a chat's by the model's renderer, a text's at its tags.

    Raises TasksetError if the task is a chat, and the tokenizer has no chat template.
    """
    if isinstance(task.prompt, str):
        return split_reply(completion.text, task.prompt)
    ids, prompt_ids = completion.token_ids.tolist(), completion.prompt_ids.tolist()
    return _renderer(task, tokenizer).parse(ids, prompt_ids, task.metadata.get(TOOLS), text=completion.text)


def encode_prompt(task: Task, tokenizer: Any) -> list[int]:
    """Token ids of the prompt, with the special tokens that the tokenizer prepends (a chat template has its own).

    Raises TasksetError, see `render_prompt`.
    """
    pictures = encode_pictures(task, tokenizer)
    if pictures is not None:
        return list(pictures.token_ids)
    processor: PictureProcessor | None = getattr(tokenizer, "picture_processor", None)
    if processor is not None and processor.single_prompt:
        raise TasksetError(f"task {task.id} has no picture, and the policy's prompts have; leave it out")
    text = render_prompt(task, tokenizer)
    if isinstance(task.prompt, str):
        return encode_start(tokenizer, text)
    if TOOLS in task.metadata:
        with _named(task):
            _renderer(task, tokenizer).replies.require_readable_calls()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def encode_pictures(task: Task, tokenizer: Any) -> PicturePrompt | None:
    """Prompt of a task with pictures, for a vision-language policy; None for other tasks, and for text models.

    Raises:
        TasksetError: the prompt is not a chat, a picture has changed or cannot be decoded; see `render_prompt`.
    """
    seen = _pictures(task, tokenizer)
    if not seen:
        return None
    processor: PictureProcessor = tokenizer.picture_processor
    if isinstance(task.prompt, str) and not processor.single_prompt:
        raise TasksetError(f"task {task.id} has pictures, but its prompt is plain text; write taskset.chat: true")
    text = render_prompt(task, tokenizer)
    try:
        contents = [read_image(each) for each in seen]
    except TasksetError as error:
        raise TasksetError(f"task {task.id}: {error}") from error
    return processor.encode(text, contents, f"task {task.id}", [(each.min_pixels, each.max_pixels) for each in seen])


def _pictures(task: Task, tokenizer: Any) -> list[ImageRef]:
    """The task's pictures in the order of their places, if the policy sees."""
    found = image_refs_of(task.metadata) if getattr(tokenizer, "picture_processor", None) is not None else []
    if not found or isinstance(task.prompt, str):
        return found
    user = next((i for i, each in enumerate(task.prompt) if each["role"] == "user"), 0)
    return sorted(found, key=lambda each: (user if each.message is None else each.message, each.offset))


def encode_privileged_prompt(
    task: Task, tokenizer: Any, template: PromptTemplate, context: str
) -> tuple[list[int], PicturePrompt | None]:
    """Token ids of the prompt with additional context, and its pictures for a vision-language policy: `template`
    filled with `prompt` and `context`.

    In a chat, the filled template replaces the last message, whose pictures stay where they are in the text. Raises
    TasksetError, see `render_prompt`.
    """
    metadata = task.metadata
    prompt: str | list[Message]
    if isinstance(task.prompt, str):
        prompt = template.fill({"prompt": task.prompt, "context": context})
    else:
        *before, last = task.prompt
        filled = template.fill({"prompt": last["content"], "context": context})
        prompt = [*before, Message(role=last["role"], content=filled)]
        if images := image_refs_of(metadata):
            added = max(filled.find(last["content"]), 0)
            moved = [replace(i, offset=i.offset + added) if i.message == len(before) else i for i in images]
            metadata = {**metadata, "images": [asdict(each) for each in moved]}
    shown = replace(task, prompt=prompt, metadata=metadata)
    return encode_prompt(shown, tokenizer), encode_pictures(shown, tokenizer)


def encode_demonstration(
    task: Task, tokenizer: Any, eos_id: int, *, rejected: bool = False, learn: LearnedTurns = "last"
) -> tuple[list[int], list[bool]]:
    """Token ids of a prompt and its solution, up to the token that ends it; True for those that are imitated.

    In a chat, the solution is what the chat template continues the prompt with: reasoning, answer, tool calls, and the
    token that ends a turn. A text ends with `eos_id`, unless it does so already.

    Args:
        rejected: the task's rejected solution.
        learn: "all": also the assistant's turns in the prompt. Those of a response of several messages are always
            imitated.

    Raises TasksetError when the task has no such solution, or the chat template cannot show it.
    """
    solution = task.rejected if rejected else task.response
    if solution is None:
        raise TasksetError(
            f"task {task.id} has no worked solution to imitate; name its column in taskset.fields.response or write "
            "taskset.response_template"
        )
    if isinstance(task.prompt, str):
        prompt, response = encode_pieces(tokenizer, [render_prompt(task, tokenizer), solution], add_special_tokens=True)
        if (pictures := encode_pictures(task, tokenizer)) is not None:
            prompt = list(pictures.token_ids)
        response += [eos_id] if response[-1:] != [eos_id] else []
        return [*prompt, *response], [*[False] * len(prompt), *[True] * len(response)]
    if not rejected and not split_reply(solution, "").reasoning_finished:
        raise TasksetError(f"task {task.id}: the response opens reasoning and never closes it; leave the row out")
    own: list[ChatMessage] = [{"role": "assistant", "content": solution}]
    whole = task.metadata.get(REJECTED_MESSAGE if rejected else RESPONSE_MESSAGE)
    if whole is not None and text_of_message(whole) == solution:  # an operator may have changed the text
        own = [whole]
    several = None if rejected else task.metadata.get(RESPONSE_MESSAGES)
    if several and text_of_message(several[-1]) == solution:
        own = several
    first = 0 if learn == "all" else len(task.prompt)
    with _named(task):
        messages, renderer = [*_messages(task, tokenizer), *own], _renderer(task, tokenizer)
        pieces = renderer.demonstration_pieces(messages, first, task.metadata.get(TOOLS))
    pictures = encode_pictures(task, tokenizer)
    if pictures is None:
        encoded = encode_pieces(tokenizer, [text for text, _ in pieces])
    else:  # the processor has encoded the prompt
        if learn == "all" and len(pieces) > 2:
            raise TasksetError(
                f"task {task.id} has pictures: only its last turn can be imitated; set offline_data.learn: last"
            )
        behind = "".join(text for text, _ in pieces).removeprefix(pictures.text or render_prompt(task, tokenizer))
        encoded = [list(pictures.token_ids), tokenizer.encode(behind, add_special_tokens=False)]
    with _named(task):
        renderer.check_learned(encoded, pieces)
    mask = [learned for ids, (_, learned) in zip(encoded, pieces, strict=True) for _ in ids]
    return [token for ids in encoded for token in ids], mask


def end_of_answer(experience: Experience, tokenizer: Any, end_id: int) -> int:
    """Return the id that ends another answer to an experience's prompt.

    It is the one that ended its own answer; if that was cut off, the end of a turn in a chat, and `end_id` in a text.
    """
    if experience.stop_reason is StopReason.EOS and experience.action_mask[-1:].any():
        return int(experience.token_ids[-1])
    if tokenizer.chat_template is None:
        return end_id
    renderer = renderer_of(tokenizer)
    is_chat = any(token in experience.prompt for token in renderer.template.special_tokens)
    return renderer.turn_end_id if is_chat and renderer.turn_end_id is not None else end_id


def encode_answer(text: str, experience: Experience, tokenizer: Any, end_id: int) -> list[int]:
    """Token ids of another answer to an experience's prompt, with its end (`end_of_answer`).

    In a chat, the answer is written as the chat template does: a prompt that opens reasoning has it closed first.
    """
    prompt = tokenizer.decode(experience.token_ids[: int(experience.action_mask.argmax())], skip_special_tokens=False)
    if tokenizer.chat_template is not None:
        with suppress(ChatTemplateError):  # a run of texts, with a template that chats refuse
            text = renderer_of(tokenizer).answer_text(prompt, text)
    return [*tokenizer.encode(text, add_special_tokens=False), end_of_answer(experience, tokenizer, end_id)]


def demonstration_experience(task: Task, tokenizer: Any, eos_id: int, learn: LearnedTurns = "last") -> Experience:
    """The demonstration as an experience: its response and end count in the loss, log-probs 0 and versions -1."""
    return _demonstrated(
        task, tokenizer, eos_id, name="expert", group=task.id, source=ExperienceSource.EXPERT, learn=learn
    )


def preference_pair(task: Task, tokenizer: Any, eos_id: int, group: str) -> list[Experience]:
    """The task's two solutions as a group of experiences: the chosen one with reward 1, the rejected one with 0."""
    pair = [
        _demonstrated(task, tokenizer, eos_id, name=name, group=group, rejected=name == "rejected")
        for name in ("chosen", "rejected")
    ]
    for experience, reward in zip(pair, (1.0, 0.0), strict=True):
        experience.reward = reward
    return pair


def labelled_experience(task: Task, tokenizer: Any, eos_id: int, group: str) -> Experience:
    """The task's only solution as a group of one: reward 1 if it is desirable (`response`), else 0."""
    desirable = task.response is not None
    name = "desirable" if desirable else "undesirable"
    made = _demonstrated(task, tokenizer, eos_id, name=name, group=group, rejected=not desirable)
    made.reward = float(desirable)
    return made


def _demonstrated(
    task: Task,
    tokenizer: Any,
    eos_id: int,
    *,
    name: str,
    group: str,
    rejected: bool = False,
    source: ExperienceSource = ExperienceSource.PREFERENCE,
    learn: LearnedTurns = "last",
) -> Experience:
    ids, mask = encode_demonstration(task, tokenizer, eos_id, rejected=rejected, learn=learn)
    prompt, response = render_prompt(task, tokenizer), task.rejected if rejected else task.response
    assert response is not None
    edges = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    spans = list(pairwise(edges))
    turns = [
        Turn("assistant", start, end, response if end == len(ids) else tokenizer.decode(ids[start:end]))
        if mask[start]
        else Turn("prompt", start, end, prompt if len(spans) == 2 else tokenizer.decode(ids[start:end]))
        for start, end in spans
    ]
    return experience_from_demonstration(
        ids,
        mask,
        id=f"{group}/{name}",
        task_id=task.id,
        group=group,
        turns=turns,
        prompt=prompt,
        response=response,
        source=source,
    )
