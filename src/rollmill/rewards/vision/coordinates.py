"""What coordinates mean: from pixels, fractions, percent or thousandths to those of the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollmill.config.rewards.vision import BoxLayout, Coordinates
from rollmill.data.images import image_refs_of

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2 with x1 < x2 and y1 < y2."""
Point = tuple[float, float]

_LARGEST = 1e7
_PER_UNIT = {"unit": 1.0, "percent": 100.0, "thousand": 1000.0}


def finite_number(value: Any) -> float | None:
    """A finite number of a plausible size, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_LARGEST <= value <= _LARGEST and not math.isnan(value) else None


def finite_numbers(values: Any, count: int) -> list[float] | None:
    """So many finite numbers of a plausible size, else None."""
    if not isinstance(values, list | tuple) or len(values) != count:
        return None
    found = [value for value in map(finite_number, values) if value is not None]
    return found if len(found) == count else None


def parse_point(values: Any) -> Point | None:
    """The point of two numbers, else None."""
    found = finite_numbers(values, 2)
    return None if found is None else (found[0], found[1])


def parse_box(values: Any, layout: BoxLayout) -> Box | None:
    """The box of four numbers; None where they are not four numbers, or the box has no area."""
    found = finite_numbers(values, 4)
    if found is None:
        return None
    one, two, three, four = found
    if layout == "xywh":
        three, four = one + three, two + four
    elif layout == "yxyx":
        one, two, three, four = two, one, four, three
    return (one, two, three, four) if one < three and two < four else None


def scale_factors(made: Coordinates, wanted: Coordinates, metadata: Mapping[str, Any]) -> Point:
    """What x and y are multiplied with. Raises ValueError where the picture's size is needed and not known."""
    if made == wanted:
        return 1.0, 1.0
    size = image_size(metadata) if "pixels" in (made, wanted) else (1.0, 1.0)
    if size is None:
        raise ValueError(
            f"{made} cannot become {wanted} without the picture's size; give the task a column `image`, or "
            "`image_size` with [width, height]"
        )
    ends = [size if each == "pixels" else (_PER_UNIT[each], _PER_UNIT[each]) for each in (made, wanted)]
    return ends[1][0] / ends[0][0], ends[1][1] / ends[0][1]


def image_bounds(coordinates: Coordinates, metadata: Mapping[str, Any]) -> Point | None:
    """The right and lower edge of the picture; None for pixels of a picture of unknown size."""
    if coordinates == "pixels":
        return image_size(metadata)
    return _PER_UNIT[coordinates], _PER_UNIT[coordinates]


def image_size(metadata: Mapping[str, Any]) -> Point | None:
    """Width and height in pixels, of the column `image_size` or of the first picture. Raises ValueError."""
    size = metadata.get("image_size")
    if size is None:
        images = image_refs_of(metadata)
        return (float(images[0].width), float(images[0].height)) if images else None
    sides = parse_point(size)
    if sides is None or min(sides) <= 0:
        raise ValueError(f"the task's column `image_size` is {size!r:.80}; expected [width, height] in pixels")
    return sides
