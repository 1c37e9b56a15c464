"""Thumbnails of the pictures of an experience, with the boxes and points of its answer, for pages and reports."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollmill.data.images import ImageRef, image_refs_of, read_image
from rollmill.data.picture_turns import picture_places
from rollmill.errors import RollmillError
from rollmill.types import Experience

MAX_PICTURES = 4
"""Pictures shown of a prompt, and as many of later turns."""
MAX_SIDE = 192
"""Longest side of a thumbnail in pixels."""
_MOST_BYTES = 64 << 10
_MOST_BOXES = 20
_MOST_PIXELS = 1 << 26  # larger pictures are not decoded for a page


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A box in pixels of the thumbnail; without width and height, a point."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A picture on a page; `note` says why there is none."""

    data: str  #: a data URL
    width: int
    height: int
    boxes: tuple[DrawnBox, ...] = ()
    note: str = ""
    turn: int = 0  #: number of the policy's turns before it


def draw_thumbnails(experience: Experience) -> list[Thumbnail]:
    """Draw the first pictures of an experience's prompt and of its later turns; boxes are in the first one.

    A picture that is gone leaves a note.
    """
    found = list(zip(image_refs_of(experience.info), picture_places(experience), strict=True))
    shown: list[Thumbnail] = []
    for later in (False, True):
        own = [(ref, turn) for ref, turn in found if (turn > 0) is later]
        for ref, turn in own[:MAX_PICTURES]:
            info = {} if shown else experience.info
            shown.append(replace(_drawn(ref, info), turn=turn))
        if more := len(own) - MAX_PICTURES:
            shown += [Thumbnail("", 0, 0, note=f"{more} more", turn=own[-1][1])] if more > 0 else []
    return shown


def _drawn(ref: ImageRef, info: Mapping[str, Any]) -> Thumbnail:
    if ref.width * ref.height > _MOST_PIXELS:
        return Thumbnail("", 0, 0, note=f"a picture of {ref.width} x {ref.height} pixels")
    try:
        from PIL import Image

        with Image.open(io.BytesIO(read_image(ref))) as image:
            small = image.convert("RGB")
        before = small.size
        small.thumbnail((MAX_SIDE, MAX_SIDE))
        content, kind = io.BytesIO(), "png"
        small.save(content, "PNG")
        if len(content.getvalue()) > _MOST_BYTES:
            content, kind = io.BytesIO(), "jpeg"
            small.save(content, "JPEG", quality=75)
    except ModuleNotFoundError:
        return Thumbnail("", 0, 0, note="pictures are drawn with Pillow, which is not installed")
    except (RollmillError, OSError, SyntaxError, ValueError):
        return Thumbnail("", 0, 0, note="the picture is gone, or has changed since")
    data = f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
    return Thumbnail(data, *small.size, _boxes(info, small.width / before[0], small.height / before[1], small.size))


def _boxes(info: Mapping[str, Any], across: float, down: float, size: tuple[int, int]) -> tuple[DrawnBox, ...]:
    """Boxes of the answer as far as they are inside the thumbnail; anything else in a file is left out."""
    listed = info.get("boxes")
    boxes = []
    for box in listed[:_MOST_BOXES] if isinstance(listed, list) else []:
        numbers = box if isinstance(box, list) and len(box) == 4 else []
        if not numbers or not all(isinstance(each, int | float) and math.isfinite(each) for each in numbers):
            continue
        x1, x2 = (min(max(numbers[i] * across, 0.0), size[0]) for i in (0, 2))
        y1, y2 = (min(max(numbers[i] * down, 0.0), size[1]) for i in (1, 3))
        if x1 <= x2 and y1 <= y2:
            boxes.append(DrawnBox(*(round(each, 1) for each in (x1, y1, x2 - x1, y2 - y1))))
    return tuple(boxes)
