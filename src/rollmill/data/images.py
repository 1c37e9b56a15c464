"""Images of a task, by reference: a path and the hash of the file when the taskset was loaded.

A task's metadata holds the references under `images`; the images stay in their files. Reading one checks the hash.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rollmill.config.taskset import TasksetConfig
from rollmill.errors import ConfigError, TasksetError
from rollmill.types import Task

PILLOW_INSTALL = "pip install 'rollmill[vision]'"
IMAGE_COLUMNS = ("images", "image")
"""Default columns for images, where the run file names none."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Reference to an image file. `size` is in bytes, `width` and `height` in pixels; `sha256` is a hex digest."""

    path: str
    sha256: str
    size: int
    media_type: str
    width: int
    height: int


def make_image_ref(path: Path) -> ImageRef:
    """Make the reference of an image file. Raises ValueError if it is not an image, and ConfigError without Pillow."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ConfigError(f"tasks with images need Pillow: {PILLOW_INSTALL}") from error
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"the image {path} cannot be read: {error.strerror or error}") from error
    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            media_type = image.get_format_mimetype() or "application/octet-stream"
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is not an image that can be opened: {error}") from error
    digest = hashlib.sha256(content).hexdigest()
    return ImageRef(str(path.absolute()), digest, len(content), media_type, width, height)


def image_refs_of(metadata: Mapping[str, Any]) -> list[ImageRef]:
    """References in a task's metadata; an empty list if its column `images` holds anything else."""
    images = metadata.get("images")
    entries = images if isinstance(images, list) else []
    names = {field.name for field in fields(ImageRef)}
    return [ImageRef(**entry) for entry in entries if isinstance(entry, Mapping) and entry.keys() == names]


def require_seen(config: TasksetConfig, tasks: Sequence[Task], sees: bool, where: str) -> None:
    """Raise ConfigError if tasks have pictures that the policy is to see and cannot, or that it sees and must not.

    Args:
        sees: the policy is a vision-language model.
        where: the section of the run file, for the message.
    """
    for part in config.parts():
        own = [task for task in tasks if not config.mix or task.taskset == getattr(part, "name", "")]
        task = next((task for task in own if image_refs_of(task.metadata)), None)
        if task is None:
            continue
        if not sees and part.images == "see":
            raise ConfigError(
                f"{where}: task {task.id} has pictures, which a text model cannot see; train a vision-language model, "
                "or write `images: text` in the taskset if only rewards are to see them"
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
            f"the image {ref.path} has changed since the taskset was loaded (sha256 {found[:12]}, it was "
            f"{ref.sha256[:12]}); put the old one back, or start a new run"
        )
    return content


def data_url(ref: ImageRef) -> str:
    """The image as a `data:` URL for endpoints. Raises TasksetError like `read_image`."""
    return f"data:{ref.media_type};base64,{base64.b64encode(read_image(ref)).decode()}"


def metadata_with_images(row: Mapping[str, Any], column: str | None, folder: Path) -> dict[str, Any]:
    """Replace a row's image column by the references of its images, under `images`.

    Args:
        column: its name; None for `images` or `image`, if it holds paths; empty for none.
        folder: base of relative paths.

    Raises ValueError if a file is missing or not an image.
    """
    if column is None:
        column = next((each for each in IMAGE_COLUMNS if _paths(row.get(each)) or _holds_pictures(row.get(each))), "")
    if not column:
        return dict(row)
    rest = {key: value for key, value in row.items() if key != column}
    return rest | {"images": _references(row.get(column), column, folder)}


def _references(value: Any, name: str, folder: Path) -> list[dict[str, Any]]:
    paths = _paths(value)
    if paths is None and _holds_pictures(value):
        raise ValueError(f"column {name} holds images, not their paths; save them as files and give the paths")
    if paths is None:
        kind = type(value).__name__
        raise ValueError(f"column {name} holds {kind}, not the path of an image, or a list of paths")
    if remote := [path for path in paths if "://" in path or path.startswith("data:")]:
        raise ValueError(f"column {name} has {remote[0]:.80}; rollmill downloads nothing, so give the path of a file")
    return [asdict(make_image_ref(folder / path)) for path in paths]


def _holds_pictures(value: Any) -> bool:
    """True if a cell, or an entry of its list, is an embedded image of `datasets`: decoded, or as bytes."""
    entries = value if isinstance(value, list) else [value]
    contents = [each.get("bytes") if isinstance(each, Mapping) else each for each in entries]
    return any(isinstance(each, bytes) or type(each).__module__.startswith("PIL.") for each in contents)


def _paths(value: Any) -> list[str] | None:
    """Paths in a cell: text, a list of texts, or undecoded images of `datasets`; None for anything else."""
    values = value if isinstance(value, list) else [value] if value is not None and value != "" else []
    paths = [each.get("path") if isinstance(each, Mapping) and each.get("bytes") is None else each for each in values]
    found = [path for path in paths if isinstance(path, str)]
    return found if len(found) == len(paths) else None
