"""Prompts with pictures, as a checkpoint's processor encodes them, and conversations that consist of several of them.

Processors come from transformers; the models' features and positions of such prompts are in `rollmill.models.vision`.

Shapes: P tokens of a prompt.
"""

from __future__ import annotations

import copyreg
import hashlib
import importlib
import io
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoProcessor
from transformers.utils import output_capturing

from rollmill.config.checks.pictures import BothWays
from rollmill.data.images import decode_picture
from rollmill.errors import TasksetError

# Towers get hooks that refer to a context variable of transformers, which other processes have under the same name.
copyreg.pickle(type(output_capturing._active_collector), lambda _: "_active_collector")

_VIDEO_CONFIG = "video_preprocessor_config.json"
_OF_TEXT = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "labels"}  # of a processor's result
_CACHED_BYTES = 1 << 29  # pixels kept in memory


class Block(NamedTuple):
    """Tokens that attend to each other in both directions."""

    first: int
    last: int  #: index after the last token
    windowed: bool  #: a window of the layer hides tokens within the block, too


@dataclass(frozen=True, eq=False)
class PicturePrompt:
    """A prompt with pictures, as the checkpoint's processor encodes it; or the beginning of a conversation up to its
    last picture, which consists of several of them with other tokens between."""

    key: str  #: hash of text and pictures
    token_ids: list[int]
    inputs: dict[str, Tensor]  #: arguments of the model's `get_image_features`: pixels, grids, sizes; empty if joined
    token_types: Tensor  #: int32 [1, P], 1 for picture tokens; tokens of that id that the policy sampled are text
    joined: tuple[tuple[int, PicturePrompt], ...] = ()  #: prompts that it consists of, with the index of their tokens
    both_ways: BothWays | None = None  #: tokens that attend to each other in both directions
    text: str = ""  #: as rendered, with a place for each picture; empty if joined
    pictures: tuple[bytes, ...] = ()  #: contents of the files; empty if joined
    pixels: tuple[tuple[int, int], ...] = ()  #: least and most of each picture

    @property
    def parts(self) -> tuple[tuple[int, PicturePrompt], ...]:
        """Prompts of one processor call each, with the index of their first token."""
        return self.joined or ((0, self),)

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return sum(each.nbytes for each in self.inputs.values()) + sum(map(len, self.pictures))

    @cached_property
    def blocks(self) -> list[Block]:
        """Runs of tokens that attend in both directions: pictures (Gemma 3), or the whole prompt (PaliGemma).

        Windows and blocks are combined as transformers' masks do: `create_masks_for_vision_model` of Gemma 3 hides
        what is outside the window, `create_sliding_window_causal_mask` with `block_sequence_ids` does not.
        """
        if self.both_ways is None:
            return []
        if self.both_ways == "prompt":
            return [Block(0, len(self.token_ids), windowed=False)]
        edges = torch.nn.functional.pad(self.token_types[0], (1, 1)).diff().nonzero()[:, 0].tolist()
        return [Block(a, b, windowed=True) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def blocks_within(self, first: int, length: int) -> list[Block]:
        """Those of `blocks` that have tokens among `length` ones from `first` on, relative to `first`."""
        return [Block(a - first, b - first, w) for a, b, w in self.blocks if a < first + length and b > first]

    def whole_blocks(self, first: int, length: int) -> int:
        """Number of tokens, near `length` and at least one, that cuts no block if a pass ends after them."""
        for a, b, _ in self.blocks:
            if a < first + length < b:
                return a - first if a > first else b - first
        return length

    def key_before(self, length: int) -> str:
        """Hash of the pictures among the first tokens; empty if there are none."""
        return "".join(part.key for start, part in self.parts if start < length)


def join_prompts(token_ids: Sequence[int], parts: Sequence[tuple[int, PicturePrompt]]) -> PicturePrompt:
    """Join the prompts that stand in the tokens of a conversation at these indices, in order, at least one."""
    if len(parts) == 1 and parts[0][0] == 0:
        return parts[0][1]
    ids = list(token_ids[: parts[-1][0] + len(parts[-1][1].token_ids)])
    types = torch.zeros(1, len(ids), dtype=torch.int32)
    digest = hashlib.sha256(torch.tensor(ids).numpy().tobytes())
    for start, part in parts:
        types[:, start : start + len(part.token_ids)] = part.token_types
        digest.update(f"{start} {part.key}".encode())
    return PicturePrompt(digest.hexdigest(), ids, {}, types, tuple(parts), parts[0][1].both_ways)


class PictureProcessor:
    """The processor of a checkpoint folder, with a bounded cache of encoded prompts.

    Attributes:
        folder: for pictures that environments, workflows and clients give; None: the cache folder.
        folder_bytes: most bytes in it, for `rollmill.data.images.PictureFolder`.
        both_ways: tokens that attend to each other in both directions.
        video: configuration of the part for videos, where it was left out; other programs need it.
    """

    def __init__(
        self, processor: Any, image_token_id: int, folder: Path | None = None, both_ways: BothWays | None = None
    ) -> None:
        self.processor, self.image_token_id, self.folder = processor, image_token_id, folder
        self.both_ways = both_ways
        self.folder_bytes: int | None = None
        self.video: dict[str, Any] | None = None
        self._cache: OrderedDict[str, PicturePrompt] = OrderedDict()
        self._bytes = 0  # of the cache
        self._lock = Lock()  # explorers and the trainer encode in threads of their own

    def __deepcopy__(self, memo: dict[int, Any]) -> PictureProcessor:
        """Copies of a model share the processor."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes get it without the cache, and its class by the one that it was made of.

        They also get what transformers notes when a model is built: which outputs of layers a tower can record.
        """
        kind = type(self.processor)
        whole = getattr(kind, "picture_only_of", None)
        own = {name: getattr(self, name) for name in ("image_token_id", "folder", "both_ways", "video")}
        state = vars(self.processor), own, dict(output_capturing._CAN_RECORD_REGISTRY)
        return _rebuild_processor, (whole or kind, whole is not None, *state)

    @property
    def image_token(self) -> str:
        """Text of the token that stands for a picture."""
        token: str = self.processor.image_token
        return token

    @property
    def single_prompt(self) -> bool:
        """True if the model is shown one prompt, with pictures, and answers it once: it attends in both directions
        within its whole prompt. Such prompts may be plain texts."""
        return self.both_ways == "prompt"

    def plain(self, text: str, count: int) -> str:
        """A plain prompt with places for `count` pictures: those that it has, or else all of them before the text."""
        return text if self.image_token in text else f"{self.image_token * count}{text}"

    def save(self, folder: Path) -> None:
        """Write its files into a checkpoint's folder, with those of a part for videos that was left out."""
        self.processor.save_pretrained(folder)
        if self.video is not None:
            (folder / _VIDEO_CONFIG).write_text(json.dumps(self.video, indent=2), encoding="utf-8")

    def noise_prompt(self, sizes: Sequence[tuple[int, int]], seed: int) -> PicturePrompt:
        """A prompt that shows random pixels, one picture of each width and height."""
        text = "0 1"
        if self.single_prompt:  # such checkpoints have no chat template
            text = self.plain(text, len(sizes))
        else:
            chat = [{"role": "user", "content": text}]
            text = self.render(chat, self.processor.tokenizer, [(None, 0)] * len(sizes))
        noise = torch.Generator().manual_seed(seed)
        return self.encode(text, [_random_picture(*size, noise) for size in sizes], "the check of the model")

    def render(
        self, messages: Sequence[Mapping[str, Any]], tokenizer: Any, places: Sequence[tuple[int | None, int]]
    ) -> str:
        """Render a chat with pictures.

        Args:
            places: message of each picture (None: the first one of the user) and the characters of its text before it,
                in the order of the chat.

        Raises whatever the chat template raises.
        """
        user = next((i for i, each in enumerate(messages) if each["role"] == "user"), 0)
        at = [(user if message is None else message, offset) for message, offset in places]
        parts = [
            {"role": each["role"], "content": _parts(each["content"], [o for m, o in at if m == i])}
            for i, each in enumerate(messages)
        ]
        return self.apply_template(parts, tokenizer)

    def apply_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        tools: Any = None,
        *,
        add_generation_prompt: bool = True,
        **switches: Any,
    ) -> str:
        """Render a chat whose contents are parts of the types `text` and `image`. Raises what the template raises.

        Args:
            switches: variables of the template.
        """
        renderer = self.processor if getattr(self.processor, "chat_template", None) else tokenizer
        text: str = renderer.apply_chat_template(
            [dict(each) for each in messages],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **switches,
        )
        return text

    def encode(
        self, text: str, pictures: Sequence[bytes], name: str, pixels: Sequence[tuple[int, int]] = ()
    ) -> PicturePrompt:
        """Encode a rendered prompt and the contents of its picture files.

        Args:
            pixels: least and most of each picture, which is scaled to have them; 0: as it is.

        Raises:
            TasksetError: a picture cannot be decoded, or the processor refuses text and pictures.
        """
        digest = hashlib.sha256(f"{list(pixels)}{text}".encode())
        for each in pictures:
            digest.update(hashlib.sha256(each).digest())
        key = digest.hexdigest()
        with self._lock:
            if key not in self._cache:
                self._cache[key] = self._encode(key, text, pictures, name, pixels)
                self._bytes += self._cache[key].size
                while self._bytes > _CACHED_BYTES and len(self._cache) > 1:
                    self._bytes -= self._cache.popitem(last=False)[1].size
            self._cache.move_to_end(key)
            return self._cache[key]

    def _encode(
        self, key: str, text: str, pictures: Sequence[bytes], name: str, pixels: Sequence[tuple[int, int]]
    ) -> PicturePrompt:
        limits = list(pixels or [(0, 0)] * len(pictures))
        images = _decoded(pictures, limits, name)
        try:
            found = self.processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
        except Exception as error:  # processors raise errors of many kinds
            raise TasksetError(f"{name}: the model's processor refuses its text and pictures: {error}") from error
        rest = {name: value for name, value in found.items() if name not in _OF_TEXT}
        ids = found["input_ids"][0]
        if not bool((ids == self.image_token_id).any()):
            raise TasksetError(
                f"{name}: its rendered prompt has no place for a picture; the chat template must render content parts "
                "of the type `image`"
            )
        types = (ids == self.image_token_id).to(torch.int32)[None]
        seen = text, tuple(pictures), tuple(limits)
        return PicturePrompt(key, ids.tolist(), rest, types, (), self.both_ways, *seen)


def read_processor(
    folder: Path, options: dict[str, Any], image_token_id: int, both_ways: BothWays | None = None
) -> PictureProcessor:
    """Load the processor of a checkpoint folder, whose pictures are prepared by Pillow. Raises what it raises.

    Processors for pictures and videos need torchvision only for videos; without it, they are loaded without that part.
    """
    kind: Any = _processor_class(folder)
    without_video = kind is not None and "video_processor" in kind.get_attributes() and not _has_torchvision()
    loader: Any = picture_only(kind) if without_video else AutoProcessor
    processor = loader.from_pretrained(folder, use_fast=False, **options)
    found = PictureProcessor(processor, image_token_id, both_ways=both_ways)
    found.video = _video_config(folder) if without_video else None
    return found


def _video_config(folder: Path) -> dict[str, Any] | None:
    """Configuration of a processor's part for videos; None if the folder has none."""
    own, whole = folder / _VIDEO_CONFIG, folder / "processor_config.json"
    if own.is_file():
        return dict(json.loads(own.read_text(encoding="utf-8")))
    found = json.loads(whole.read_text(encoding="utf-8")) if whole.is_file() else {}
    return found.get("video_processor")


def picture_only(kind: Any) -> Any:
    """A processor class without its part for videos, which is saved and loaded under the same name."""

    def get_attributes(_: Any) -> list[str]:
        return [each for each in kind.get_attributes() if each != "video_processor"]

    own = {"get_attributes": classmethod(get_attributes), "__module__": kind.__module__, "picture_only_of": kind}
    return type(kind.__name__, (kind,), own)


def _rebuild_processor(
    kind: Any, without_video: bool, state: dict[str, Any], own: dict[str, Any], recordable: dict[str, Any]
) -> PictureProcessor:
    output_capturing._CAN_RECORD_REGISTRY.update(recordable)
    if without_video:
        kind = picture_only(kind)
    processor = kind.__new__(kind)
    processor.__dict__.update(state)
    made = PictureProcessor(processor, own["image_token_id"], own["folder"], own["both_ways"])
    made.video = own["video"]
    return made


def _processor_class(folder: Path) -> Any:
    """The processor class that a folder names; None if it names none."""
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        file = folder / name
        found = json.loads(file.read_text(encoding="utf-8")).get("processor_class") if file.is_file() else None
        if found is not None:
            return getattr(transformers, found, None)
    return None


def _has_torchvision() -> bool:
    try:
        importlib.import_module("torchvision")
    except Exception:  # absent, or built for another torch: it raises what it likes
        return False
    return True


def _parts(text: str, offsets: Sequence[int]) -> list[dict[str, str]]:
    """Content parts of a message: pictures at these places in its text."""
    parts: list[dict[str, str]] = []
    before = 0
    for offset in offsets:
        if offset > before:
            parts.append({"type": "text", "text": text[before:offset]})
        parts.append({"type": "image"})
        before = max(before, offset)
    return [*parts, {"type": "text", "text": text[before:]}] if before < len(text) or not parts else parts


def unexpanded_prompt(
    processor: PictureProcessor, prompt: PicturePrompt, token_ids: Sequence[int]
) -> tuple[list[int], list[bytes]]:
    """A prompt for an engine that prepares pictures itself: one token for each picture, and pictures as PNG, scaled.

    Args:
        token_ids: of the whole prompt, which begins with that of `prompt`.
    """
    ids: list[int] = []
    images: list[bytes] = []
    end = 0
    for start, part in prompt.parts:
        ids += [*token_ids[end:start], *processor.processor.tokenizer.encode(part.text, add_special_tokens=False)]
        end = start + len(part.token_ids)
        for image in _decoded(part.pictures, part.pixels, "a prompt"):
            content = io.BytesIO()
            image.save(content, "PNG", compress_level=1)
            images.append(content.getvalue())
    return [*ids, *token_ids[end:]], images


def _random_picture(width: int, height: int, noise: torch.Generator) -> bytes:
    from PIL import Image

    pixels = torch.randint(256, (height, width, 3), generator=noise, dtype=torch.uint8)
    content = io.BytesIO()
    Image.frombytes("RGB", (width, height), bytes(pixels.flatten().tolist())).save(content, "PNG")
    return content.getvalue()


def _decoded(pictures: Sequence[bytes], limits: Sequence[tuple[int, int]], name: str) -> list[Any]:
    return [
        decode_picture(each, f"{name}: picture {i}", *limit)
        for i, (each, limit) in enumerate(zip(pictures, limits, strict=True))
    ]
