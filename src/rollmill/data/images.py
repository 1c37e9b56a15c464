"""Images of a task, by reference: a path and the hash of the file when the taskset was loaded.

A task's metadata holds the references under `images`; the images stay in their files. Reading one checks the hash.
Images that a source holds as bytes are written into files of the cache folder, named by their hash.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from rollmill.errors import ConfigError, TasksetError
from rollmill.files import atomic_write, cache_folder, format_size
from rollmill.types import Task

if TYPE_CHECKING:
    from rollmill.config.taskset import TasksetConfig

PILLOW_INSTALL = "pip install 'rollmill[vision]'"
IMAGE_COLUMNS = ("images", "image")
"""Default columns for images, where the run file names none."""

PICTURES_FOLDER = "pictures"
"""Folder of a run directory with the pictures that its rollouts have seen, other than those of tasks."""

_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Reference to an image file. `size` is in bytes, `width` and `height` in pixels; `sha256` is a hex digest."""

    path: str
    sha256: str
    size: int
    media_type: str
    width: int
    height: int
    message: int | None = None  #: of the prompt that shows it; None: the first one of the user, before its text
    offset: int = 0  #: characters of the message before it
    min_pixels: int = 0  #: a smaller image is scaled up for the policy
    max_pixels: int = 0  #: a larger one is scaled down; 0: none is


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image part of a chat message. `source` is its content or path; None for the next one of the row's column."""

    message: int
    offset: int
    source: Any = None


Accept = Callable[[ImageRef], None]
"""Called before an image is stored; raises an error for one that is refused."""


def make_image_ref(path: Path) -> ImageRef:
    """Make the reference of an image file. Raises ValueError if it is not an image, and ConfigError without Pillow."""
    return _reference(_read_file(path), path.absolute(), str(path))


def _read_file(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(
                f"the image {path} has {format_size(path.stat().st_size)}, and {format_size(_MOST_BYTES)} are read at "
                "most; scale it down"
            )
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"the image {path} cannot be read: {error.strerror or error}") from error


def store_image(content: bytes, name: str, folder: Path | None = None, accept: Accept | None = None) -> ImageRef:
    """Write an image into a folder, by default the cache folder, unless it is there; `name` is for messages.

    Raises as `make_image_ref`, and what `accept` raises.
    """
    if len(content) > _MOST_BYTES:
        size, most = format_size(len(content)), format_size(_MOST_BYTES)
        raise ValueError(f"{name} has {size}, and {most} are read at most; scale it down")
    path = (folder or cache_folder("images")).absolute() / hashlib.sha256(content).hexdigest()
    reference = _reference(content, path, name)
    if accept is not None:
        accept(reference)
    if not path.is_file() or path.stat().st_size != len(content):
        atomic_write(path, content, durable=folder is not None)  # a resumed run needs those of its folder
    return reference


def _reference(content: bytes, path: Path, name: str) -> ImageRef:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ConfigError(f"tasks with images need Pillow: {PILLOW_INSTALL}") from error
    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            media_type = image.get_format_mimetype() or "application/octet-stream"
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} is not an image that can be opened: {error}") from error
    return ImageRef(str(path), hashlib.sha256(content).hexdigest(), len(content), media_type, width, height)


def image_refs_of(metadata: Mapping[str, Any]) -> list[ImageRef]:
    """References in a task's metadata; an empty list if its column `images` holds anything else."""
    images = metadata.get("images")
    entries = images if isinstance(images, list) else []
    known = {each.name for each in fields(ImageRef)}
    needed = {each.name for each in fields(ImageRef) if each.default is MISSING}
    return [ImageRef(**each) for each in entries if isinstance(each, Mapping) and needed <= each.keys() <= known]


def require_seen(
    config: TasksetConfig, tasks: Sequence[Task], sees: bool, where: str, *, single_prompt: bool = False
) -> None:
    """Raise ConfigError if tasks have pictures that the policy is to see and cannot, or that it sees and must not.

    Args:
        sees: the policy is a vision-language model.
        where: the section of the run file, for the message.
        single_prompt: the policy needs pictures in every prompt, which may be plain text: see `PictureProcessor`.
    """
    for part in config.parts():
        own = [task for task in tasks if not config.mix or task.taskset == getattr(part, "name", "")]
        blind = next((task for task in own if not image_refs_of(task.metadata)), None) if single_prompt else None
        if blind is not None:
            raise ConfigError(
                f"{where}: task {blind.id} has no picture, and the model's processor takes no prompt without one; give "
                "its tasks pictures, or train another vision-language model"
            )
        task = next((task for task in own if image_refs_of(task.metadata)), None)
        if task is None:
            continue
        if not sees and part.images == "see":
            raise ConfigError(
                f"{where}: task {task.id} has pictures, which a text model cannot see; train a vision-language model, "
                "or write `images: text` in the taskset if only rewards are to see them"
            )
        if sees and isinstance(task.prompt, str) and not single_prompt:
            raise ConfigError(
                f"{where}: task {task.id} has pictures, but its prompt is plain text; write `chat: true` in the taskset"
            )
        if sees and part.images == "text":
            raise ConfigError(f"{where}.images: text is for text models, and the policy sees pictures; remove it")


def read_image(ref: ImageRef) -> bytes:
    """Read the image's bytes. Raises TasksetError if the file is missing or has changed."""
    try:
        content = Path(ref.path).read_bytes()
    except OSError as error:
        raise TasksetError(f"the image {ref.path} cannot be read: {error.strerror or error}; put it back") from error
    found = hashlib.sha256(content).hexdigest()
    if found != ref.sha256:
        raise TasksetError(
            f"the image {ref.path} has changed since it was first read (sha256 {found[:12]}, it was "
            f"{ref.sha256[:12]}); put the old one back, or start a new run"
        )
    return content


def decode_picture(content: bytes, name: str, least: int = 0, most: int = 0) -> Any:
    """Decode a picture as RGB, scaled to at least `least` and at most `most` pixels (0: any number).

    Raises TasksetError with `name` if it cannot be decoded.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            plain = image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise TasksetError(f"{name} cannot be decoded: {error}") from error
    count = plain.width * plain.height
    wanted = max(count, least) if not most else min(max(count, least), most)
    if wanted == count:
        return plain
    scale = (wanted / count) ** 0.5
    rounded = math.floor if wanted < count else math.ceil
    size = (max(1, rounded(plain.width * scale)), max(1, rounded(plain.height * scale)))
    return plain.resize(size, Image.Resampling.BICUBIC)


def scaled_url(ref: ImageRef, media_types: Collection[str]) -> str:
    """The image as the policy sees it, as a `data:` URL: scaled to its limits, and as PNG unless it has one of these
    media types. Raises TasksetError like `read_image`."""
    most = ref.max_pixels or ref.width * ref.height
    if ref.min_pixels <= ref.width * ref.height <= most and ref.media_type in media_types:
        return data_url(ref)
    image = decode_picture(read_image(ref), f"the image {ref.path}", ref.min_pixels, ref.max_pixels)
    return f"data:image/png;base64,{base64.b64encode(encode_png(image, ref.path)).decode()}"


def data_url(ref: ImageRef) -> str:
    """The image as a `data:` URL for endpoints. Raises TasksetError like `read_image`."""
    return f"data:{ref.media_type};base64,{base64.b64encode(read_image(ref)).decode()}"


def metadata_with_images(
    row: Mapping[str, Any],
    column: str | None,
    folder: Path,
    parts: Sequence[ImagePart] = (),
    pixels: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """Replace a row's image column by the references of its images, under `images`.

    Args:
        column: its name; None for `images` or `image`, if it holds images or their paths; empty for none.
        folder: base of relative paths.
        parts: the image parts of the prompt's messages.
        pixels: least and most that the policy sees of an image; 0: as many as it has.

    Raises ValueError if a file is missing or not an image, or if parts and column do not belong together.
    """
    if column is None:
        column = next((each for each in IMAGE_COLUMNS if _holds_images(row.get(each))), "")
    places = [part for part in parts if part.source is None]
    if not column and not parts:
        return dict(row)
    rest = {key: value for key, value in row.items() if key != column or not column}
    own = [] if not column else _references(row.get(column), f"column {column}", folder)
    if places and len(places) != len(own):
        held = f"column {column} holds {len(own)}" if column else "no column holds any (`images` or `image`)"
        raise ValueError(f"the prompt's messages have places for {len(places)} images, and {held}")
    found = [] if places else list(own)
    following = iter(own)
    for part in parts:
        at = f"message {part.message} of the prompt"
        made = next(following) if part.source is None else _references(part.source, at, folder)[0]
        found.append(replace(made, message=part.message, offset=part.offset))
    return rest | {"images": [asdict(replace(each, min_pixels=pixels[0], max_pixels=pixels[1])) for each in found]}


def _references(value: Any, name: str, folder: Path) -> list[ImageRef]:
    entries = value if isinstance(value, list) else [value] if value is not None and value != "" else []
    return [_entry(each, name, folder) for each in entries]


@dataclass
class PictureFolder:
    """Keeps the pictures that programs and clients give, named by their hash. Threads may share it.

    Attributes:
        path: None: the cache folder.
        most_bytes: the oldest ones beyond it are removed; None: all are kept.
    """

    path: Path | None = None
    most_bytes: int | None = None
    _new: int = 0  # bytes since the last look
    _lock: Lock = field(default_factory=Lock)

    def keep(self, value: Any, name: str, accept: Accept | None = None) -> ImageRef:
        """Make the reference of a picture: the path of a file, which is copied, since its owner may change it; a data
        URL, bytes, an image of Pillow, pixels (uint8 [H, W], [H, W, 3] or [H, W, 4]), or another reference as an
        object.

        Raises ValueError if it is no picture, with `name`, ConfigError without Pillow, and what `accept` raises.
        """
        if isinstance(value, Mapping) and (found := image_refs_of({"images": [value]})):
            return found[0]
        if isinstance(value, str) and not value.startswith("data:") and "://" not in value:
            value = _read_file(Path(value))
        if self.path is None or self.most_bytes is None:
            return _entry(value, name, Path(), self.path, accept)
        with self._lock:
            ref = _entry(value, name, Path(), self.path, accept)
            os.utime(ref.path)  # one that is kept again is new
            self._new += ref.size
            if self._new > self.most_bytes // 8:
                self._new = 0
                _remove_oldest(self.path, self.most_bytes)
        return ref


def _remove_oldest(folder: Path, most_bytes: int) -> None:
    """Remove the files of a folder that were written longest ago, until the others fit into `most_bytes`."""
    found = [(file, file.stat()) for file in folder.iterdir()]
    total = 0
    for file, stat in sorted(found, key=lambda each: -each[1].st_mtime_ns):
        total += stat.st_size
        if total > most_bytes:
            file.unlink(missing_ok=True)


def _entry(value: Any, name: str, folder: Path, store: Path | None = None, accept: Accept | None = None) -> ImageRef:
    """The reference of an image: a path, a data URL, bytes, an entry of `datasets`, an image of Pillow, or pixels."""
    if isinstance(value, Mapping) and (value.keys() & {"bytes", "path"}):  # `datasets.Image(decode=False)`
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if type(value).__module__.startswith("PIL.") or hasattr(value, "__array_interface__"):
        value = encode_png(value, name)
    if isinstance(value, bytes):
        return store_image(value, f"the image of {name}", store, accept)
    if not isinstance(value, str):
        raise ValueError(f"{name} holds {type(value).__name__}, not the path of an image, an image, or a list of these")
    if value.startswith("data:"):
        return store_image(_decoded(value, name), f"the image of {name}", store, accept)
    if "://" in value:
        raise ValueError(f"{name} has {value:.80}; rollmill downloads nothing, so give the path of a file")
    return make_image_ref(folder / value)


def encode_png(image: Any, name: str) -> bytes:
    """An image of Pillow, or pixels (uint8 [H, W], [H, W, 3] or [H, W, 4]), as PNG.

    Raises ValueError for an array of another shape or type, with `name`, and ConfigError without Pillow.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ConfigError(f"tasks with images need Pillow: {PILLOW_INSTALL}") from error
    if not isinstance(image, Image.Image):
        shape, kind = getattr(image, "shape", ()), str(getattr(image, "dtype", ""))
        if kind != "uint8" or len(shape) not in (2, 3) or shape[2:] not in ((), (3,), (4,)) or 0 in shape:
            raise ValueError(
                f"{name} has an array of {kind or type(image).__name__} {list(shape)} as picture; give uint8 [height, "
                "width, 3]"
            )
        image = Image.fromarray(image)
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def _decoded(url: str, name: str) -> bytes:
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ValueError(f"{name} has {head:.40}, not an image as data:image/...;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise ValueError(f"{name} has a data URL that is not valid base64: {error}") from error


def _holds_images(value: Any) -> bool:
    """True if a cell holds images, or their paths, and nothing else."""
    entries = value if isinstance(value, list) else [value] if value is not None and value != "" else []
    contents = [(each.get("bytes") or each.get("path")) if isinstance(each, Mapping) else each for each in entries]
    known = [isinstance(each, str | bytes) or type(each).__module__.startswith("PIL.") for each in contents]
    return bool(known) and all(known)
