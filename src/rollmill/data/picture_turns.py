"""Pictures in the turns of a conversation: references inside texts, and the exact tokens that were made of them.

Between a message and its tokens, a picture is a reference in the message's text, so that texts may be joined and
wrapped. Once encoded, a piece of the conversation is a `PictureTurn`: enough to make its pixels again, for the next
turn and for the trainer, and small enough to be stored.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rollmill.data.content_parts import split_content
from rollmill.data.images import ImageRef, PictureFolder, image_refs_of, read_image
from rollmill.errors import TasksetError

if TYPE_CHECKING:
    from rollmill.data.picture_prompts import PictureProcessor, PicturePrompt
    from rollmill.types import Experience

PICTURE_TURNS = "picture_turns"
"""Key of `Experience.info`: the pieces of a conversation that have pictures. Its pictures are under `images`."""

_SECRET = secrets.token_hex(8)  # of this process, so that no text of a user is taken for a reference
_REFERENCE = re.compile(rf"\ue000{_SECRET}:([A-Za-z0-9+/=]+)\ue001")


@dataclass(frozen=True, slots=True)
class PictureTurn:
    """A piece of a conversation, encoded in one call of the processor."""

    start: int  #: index of its first token
    text: str  #: as rendered, with a place for each picture
    images: tuple[ImageRef, ...]


def refer_to_pictures(content: Any, where: str, folder: PictureFolder) -> Any:
    """Content parts with pictures as one text, in which each picture is a reference; other contents as they are.

    Args:
        folder: keeps pictures that are no files.

    Raises ValueError for a part that is not known, and a picture that cannot be read; `where` names the message.
    """
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return content
    text, images = split_content(content, 0, where)
    for image in reversed(images):
        try:
            ref = folder.keep(image.source, "a part")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        text = f"{text[: image.offset]}{refer_to(ref)}{text[image.offset :]}"
    return text


def split_references(text: str) -> list[str | ImageRef]:
    """Texts and pictures of a text with references, in order; no empty texts."""
    pieces = _REFERENCE.split(text)
    found = [_referred(each) if number % 2 else each for number, each in enumerate(pieces)]
    return [each for each in found if each != ""]


def referred_pictures(contents: Sequence[Any]) -> list[ImageRef]:
    """Pictures that texts refer to, in order."""
    found = [each for text in contents if isinstance(text, str) for each in split_references(text)]
    return [each for each in found if isinstance(each, ImageRef)]


def refer_to(ref: ImageRef) -> str:
    """The reference to a picture, for a text."""
    return f"\ue000{_SECRET}:{base64.b64encode(json.dumps(asdict(ref)).encode()).decode()}\ue001"


def _referred(code: str) -> ImageRef:
    return ImageRef(**json.loads(base64.b64decode(code)))


def encode_turn(processor: PictureProcessor, turn: PictureTurn, name: str) -> PicturePrompt:
    """Encode a piece of a conversation. Raises TasksetError: see `read_image` and `PictureProcessor.encode`."""
    places = turn.text.count(processor.image_token)
    if places != len(turn.images):
        raise TasksetError(
            f"{name}: the chat template shows {places} places for {len(turn.images)} pictures; texts must not contain "
            f"`{processor.image_token}`, the model's own token for a picture"
        )
    try:
        contents = [read_image(each) for each in turn.images]
    except TasksetError as error:
        raise TasksetError(f"{name}: {error}") from error
    return processor.encode(turn.text, contents, name, [(each.min_pixels, each.max_pixels) for each in turn.images])


def join_turns(
    processor: PictureProcessor, token_ids: Sequence[int], turns: Sequence[PictureTurn], name: str
) -> PicturePrompt | None:
    """The beginning of a conversation up to its last picture; None without pictures.

    Raises TasksetError as `encode_turn`, and if the tokens are not those that the pictures are encoded as now.
    """
    from rollmill.data.picture_prompts import join_prompts

    if not turns:
        return None
    parts = [(turn.start, encode_turn(processor, turn, name)) for turn in turns]
    for start, part in parts:
        if list(token_ids[start : start + len(part.token_ids)]) != part.token_ids:
            raise TasksetError(
                f"{name}: its pictures are prepared otherwise than when it was generated; the checkpoint's processor "
                "has changed, so start a new run"
            )
    return join_prompts(token_ids, parts)


def describe_turns(turns: Sequence[PictureTurn]) -> dict[str, Any]:
    """Entries of `Experience.info` for these pieces."""
    images = [asdict(image) for turn in turns for image in turn.images]
    listed = [{"start": turn.start, "text": turn.text, "images": len(turn.images)} for turn in turns]
    return {PICTURE_TURNS: listed} | ({"images": images} if images else {})


def turns_of(experience: Experience) -> list[PictureTurn] | None:
    """The pieces with pictures of an experience that was recorded call by call; None for another one.

    Raises TasksetError if it has more or fewer pictures than its turns show.
    """
    listed = experience.info.get(PICTURE_TURNS)
    if listed is None:
        return None
    found = image_refs_of(experience.info)
    if len(found) != sum(each["images"] for each in listed):
        raise TasksetError(f"{experience.id}: its turns and its pictures do not belong together; was it edited?")
    images = iter(found)
    return [
        PictureTurn(each["start"], each["text"], tuple(next(images) for _ in range(each["images"]))) for each in listed
    ]


def picture_places(experience: Experience) -> list[int]:
    """For each picture under `images` the number of the policy's turns before it; 0 for those of the prompt.

    What a file holds otherwise counts as the prompt's.
    """
    ends = [turn.end for turn in experience.turns if turn.role == "assistant"]
    listed = experience.info.get(PICTURE_TURNS)
    places: list[int] = []
    for each in listed if isinstance(listed, list) else []:
        start, count = (each.get("start"), each.get("images")) if isinstance(each, dict) else (0, 0)
        if isinstance(start, int) and isinstance(count, int):
            places += [sum(end <= start for end in ends)] * min(max(count, 0), len(experience.token_ids))
    total = len(image_refs_of(experience.info))
    return [*places, *([0] * total)][:total]
