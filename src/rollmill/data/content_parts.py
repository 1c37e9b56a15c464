"""Content parts of chat messages, in the forms of OpenAI and Hugging Face: texts, and pictures between them.

Data sets, workflows, environments and clients of the endpoint give pictures in this way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rollmill.data.images import ImagePart, ImageRef, image_refs_of, scaled_url
from rollmill.types import Task

_PART_KEYS = {
    "text": {"text"},
    "image": {"image", "path", "url", "base64"},
    "image_url": {"image_url"},
    "video": {"video", "frames"},
}
"""Types of content parts, and what each may hold."""
AUDIO = frozenset({"audio", "audio_url", "input_audio"})
"""Types of parts with sound, which are refused."""
MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
"""Formats of pictures that the endpoint takes, and that are sent to it."""
PictureText = tuple[str, list[ImagePart]]
"""A message's text, and its pictures by the characters before them."""


def split_content(content: Sequence[Any], message: int, where: str) -> PictureText:
    """Text and pictures of a message's content parts. A video is its frames, one picture each.

    Raises ValueError for a part of another type, such as audio, or with other contents; `where` names the message.
    """
    text, images = "", list[ImagePart]()
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in AUDIO:
            raise ValueError(f"{where} has a part of type {kind}: audio is not supported; policies read text and see")
        if not isinstance(part, Mapping) or kind not in _PART_KEYS:
            named = f"of type {kind!r:.40}" if kind is not None else "without a type"
            raise ValueError(f"{where} has a part {named}; text, image, image_url and video are known")
        given = {key: each for key, each in part.items() if key not in ("type", "detail") and each is not None}
        if unknown := given.keys() - _PART_KEYS[kind]:
            raise ValueError(f"{where} has a part of type {kind} with {sorted(unknown)[0]}, which is not known")
        if kind == "text":
            if not isinstance(given.get("text"), str):
                raise ValueError(f"{where} has a part of type text without text")
            text += given["text"]
        elif kind == "video":
            images += [ImagePart(message, len(text), frame) for frame in _frames(given, where)]
        else:
            images.append(ImagePart(message, len(text), _image_source(kind, given, where)))
    return text, images


def _frames(given: Mapping[str, Any], where: str) -> list[Any]:
    frames = next(iter(given.values()), None)
    if len(given) != 1 or not isinstance(frames, list | tuple) or not frames:
        raise ValueError(
            f"{where} has a part of type video that is no list of pictures; give its frames: "
            '{"type": "video", "video": ["1.png", "2.png"]}'
        )
    return list(frames)


def _image_source(kind: str, given: Mapping[str, Any], where: str) -> Any:
    """The picture of a part, or its path; None if it stands for one of the row's column."""
    if kind == "image_url":
        url = given.get("image_url")
        source = url.get("url") if isinstance(url, Mapping) else url
        if not isinstance(source, str):
            raise ValueError(f"{where} has a part of type image_url without url")
        return source
    if len(given) > 1:
        raise ValueError(f"{where} has a part of type image with {' and '.join(sorted(given))}; give one of them")
    if "base64" in given:
        return f"data:image/png;base64,{given['base64']}"  # the content says its format
    return next(iter(given.values()), None)


def content_text(content: Any) -> str:
    """The text of a message's content, without its pictures."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))


def join_contents(first: Any, second: Any, between: str) -> Any:
    """One content of two: a text if both are, else content parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    parts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in (first, between, second)]
    return [part for each in parts for part in (each if isinstance(each, list) else [each])]


def show_pictures(task: Task) -> Task:
    """A task whose messages hold its pictures as content parts, in their places; another task is returned as it is."""
    found = image_refs_of(task.metadata)
    if not found or isinstance(task.prompt, str):
        return task
    user = next((i for i, each in enumerate(task.prompt) if each["role"] == "user"), 0)
    messages: list[Any] = []
    for number, message in enumerate(task.prompt):
        own = [each for each in found if (user if each.message is None else each.message) == number]
        parts: list[dict[str, Any]] = []
        before, text = 0, message["content"]
        for ref in sorted(own, key=lambda each: each.offset):
            if ref.offset > before:
                parts.append({"type": "text", "text": text[before : ref.offset]})
            before = max(before, ref.offset)
            parts.append({"type": "image", "image": asdict(replace(ref, message=None, offset=0))})
        if before < len(text):
            parts.append({"type": "text", "text": text[before:]})
        messages.append({**message, "content": parts} if own else message)
    return replace(task, prompt=messages)


def hide_pictures(task: Task) -> Task:
    """The task with the texts of its messages only, as rewards take it."""
    if isinstance(task.prompt, str) or all(isinstance(each["content"], str) for each in task.prompt):
        return task
    messages: list[Any] = [{**each, "content": content_text(each["content"])} for each in task.prompt]
    return replace(task, prompt=messages)


def sendable_prompt(task: Task) -> Any:
    """A prompt of `show_pictures` in OpenAI's format, with `data:` URLs. Pictures are scaled to their limits.

    Raises TasksetError: see `scaled_url`.
    """
    if isinstance(task.prompt, str):
        return task.prompt
    messages: list[Any] = []
    for message in task.prompt:
        content: Any = message["content"]
        parts = [_sendable(part) for part in content] if isinstance(content, list) else content
        messages.append({**message, "content": parts})
    return messages


def _sendable(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    return {"type": "image_url", "image_url": {"url": scaled_url(ImageRef(**part["image"]), MEDIA_TYPES)}}
