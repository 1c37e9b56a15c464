"""Encodes prompts and demonstrations. A task's prompt has the same tokens in a rollout and in a demonstration."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rollmill.data.images import ImageRef, image_refs_of, read_image
from rollmill.data.layouts import RESPONSE_MESSAGE, TOOLS, text_of_message
from rollmill.data.template import PromptTemplate
from rollmill.errors import TasksetError
from rollmill.types import Experience, ExperienceSource, Message, Task, Turn, experience_from_demonstration

if TYPE_CHECKING:
    from rollmill.models.picture_prompts import PictureProcessor, PicturePrompt


def render_prompt(task: Task, tokenizer: Any) -> str:
    """Render the prompt as text: plain text unchanged, chat messages with the tokenizer's chat template.

    For a policy that sees, the text has a place for each picture.

    Raises:
        TasksetError: the tokenizer has no chat template, or the template rejects the messages.
    """
    seen = _pictures(task, tokenizer)
    if isinstance(task.prompt, str):
        return tokenizer.picture_processor.plain(task.prompt, len(seen)) if seen else task.prompt
    if tokenizer.chat_template is None:
        raise TasksetError(
            f"task {task.id} is a chat, but the model's tokenizer has no chat template; remove taskset.chat (or give "
            "text prompts), or use a checkpoint with a chat template"
        )
    try:
        if seen:
            places = [(each.message, each.offset) for each in seen]
            shown: str = tokenizer.picture_processor.render(task.prompt, tokenizer, places)
            return shown
        text = _rendered(task, tokenizer, list(task.prompt), add_generation_prompt=True)
    except TasksetError:
        raise
    except Exception as error:  # templates are programs: they raise Jinja and Python errors
        raise TasksetError(f"task {task.id}: the tokenizer's chat template refuses its messages: {error}") from error
    return text


def _rendered(task: Task, tokenizer: Any, messages: list[Any], *, add_generation_prompt: bool) -> str:
    """Messages as text, with the tools of the task. Raises TasksetError if the template does not show the tools."""
    tools = task.metadata.get(TOOLS)
    options: dict[str, Any] = {} if tools is None else {"tools": tools}
    processor: PictureProcessor | None = getattr(tokenizer, "picture_processor", None)
    text: str
    if processor is not None:  # many templates of such models take no text in place of parts
        parts = [{**each, "content": [{"type": "text", "text": each.get("content") or ""}]} for each in messages]
        text = processor.apply_template(parts, tokenizer, add_generation_prompt=add_generation_prompt, **options)
    else:
        text = tokenizer.apply_chat_template(
            [dict(each) for each in messages], add_generation_prompt=add_generation_prompt, tokenize=False, **options
        )
    names = [each.get("function", each)["name"] for each in tools or []]
    if missing := [name for name in names if name not in text]:
        raise TasksetError(
            f"task {task.id} has the tool `{missing[0]}`, which the tokenizer's chat template does not show; use a "
            'checkpoint whose template knows tools, or leave them out by taskset.fields.tools: ""'
        )
    return text


def _called(task: Task, tokenizer: Any) -> str:
    """Text of a response that calls tools, as the chat template writes it, without what ends the turn.

    Raises TasksetError if the template does not continue its own prompt with the calls.
    """
    message = task.metadata[RESPONSE_MESSAGE]
    assert not isinstance(task.prompt, str)
    before = _rendered(task, tokenizer, list(task.prompt), add_generation_prompt=True)
    whole = _rendered(task, tokenizer, [*task.prompt, message], add_generation_prompt=False)
    names = [each["function"]["name"] for each in message["tool_calls"]]
    text = whole.removeprefix(before)
    if not whole.startswith(before) or any(name not in text for name in names):
        raise TasksetError(
            f"task {task.id}: its response calls the tool `{names[0]}`, which the tokenizer's chat template does not "
            "write after a prompt; use a checkpoint whose template knows tool calls"
        )
    return text.rstrip().removesuffix(str(tokenizer.eos_token))


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
    ids: list[int] = tokenizer.encode(text, add_special_tokens=isinstance(task.prompt, str))
    if ids[-1:] == [tokenizer.eos_token_id] and tokenizer.encode(text, add_special_tokens=False)[-1:] != ids[-1:]:
        return ids[:-1]  # a tokenizer that appends EOS: the completion has to continue the prompt
    return ids


def encode_pictures(task: Task, tokenizer: Any) -> PicturePrompt | None:
    """Prompt of a task with pictures, for a policy that sees; None for other tasks, and for text models.

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
    """Token ids of the prompt with additional context, and its pictures for a policy that sees: `template` filled with
    `prompt` and `context`.

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


def encode_demonstration(task: Task, tokenizer: Any, eos_id: int, solution: str | None = None) -> tuple[list[int], int]:
    """Token ids of prompt, solution (default: the task's worked solution) and EOS, and the length of the prompt.

    Raises TasksetError when the task has no worked solution.
    """
    solution = task.response if solution is None else solution
    if solution is None:
        raise TasksetError(
            f"task {task.id} has no worked solution to imitate; name its column in taskset.fields.response or write "
            "taskset.response_template"
        )
    prompt = encode_prompt(task, tokenizer)
    message = task.metadata.get(RESPONSE_MESSAGE, {})
    if message.get("tool_calls") and solution == text_of_message(message) and not isinstance(task.prompt, str):
        solution = _called(task, tokenizer)
    response: list[int] = tokenizer.encode(solution, add_special_tokens=False)
    return [*prompt, *response, eos_id], len(prompt)


def expert_experience(task: Task, tokenizer: Any, eos_id: int) -> Experience:
    """The demonstration as an experience: its response and EOS count in the loss, log-probs 0 and versions -1."""
    return _demonstrated(
        task, task.response, tokenizer, eos_id, name="expert", group=task.id, source=ExperienceSource.EXPERT
    )


def preference_pair(task: Task, tokenizer: Any, eos_id: int, group: str) -> list[Experience]:
    """The task's two solutions as a group of experiences: the chosen one with reward 1, the rejected one with 0."""
    pair = [
        _demonstrated(task, text, tokenizer, eos_id, name=name, group=group, source=ExperienceSource.PREFERENCE)
        for name, text in (("chosen", task.response), ("rejected", task.rejected))
    ]
    for experience, reward in zip(pair, (1.0, 0.0), strict=True):
        experience.reward = reward
    return pair


def labelled_experience(task: Task, tokenizer: Any, eos_id: int, group: str) -> Experience:
    """The task's only solution as a group of one: reward 1 if it is desirable (`response`), else 0."""
    desirable = task.response is not None
    name, text = ("desirable", task.response) if desirable else ("undesirable", task.rejected)
    made = _demonstrated(task, text, tokenizer, eos_id, name=name, group=group, source=ExperienceSource.PREFERENCE)
    made.reward = float(desirable)
    return made


def _demonstrated(
    task: Task, response: str | None, tokenizer: Any, eos_id: int, *, name: str, group: str, source: ExperienceSource
) -> Experience:
    ids, n_prompt = encode_demonstration(task, tokenizer, eos_id, response)
    prompt = render_prompt(task, tokenizer)
    assert response is not None
    return experience_from_demonstration(
        ids,
        n_prompt,
        id=f"{group}/{name}",
        task_id=task.id,
        group=group,
        turns=[Turn("prompt", 0, n_prompt, prompt), Turn("assistant", n_prompt, len(ids), response)],
        prompt=prompt,
        response=response,
        source=source,
    )
