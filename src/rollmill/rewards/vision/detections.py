"""Parses boxes and points in a completion, in the formats that models use. Linear in the text.

A malformed box or point is None: it still counts as a prediction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rollmill.rewards.base import Box
from rollmill.rewards.text.parsing import find_json_values
from rollmill.rewards.vision.base import BoxLayout
from rollmill.rewards.vision.geometry import Point, parse_box, parse_point

Shape = TypeVar("Shape")

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
_NUMBERS = re.compile(_NUMBER)
_LABEL = r"(?:<(?:ref|\|object_ref_start\|)>([^<]{0,200})<(?:/ref|\|object_ref_end\|)>\s{0,9})?"
_BOX_TAG = re.compile(rf"{_LABEL}<(?:box|\|box_start\|)>(?:([^<]*)<(?:/box|\|box_end\|)>)?")
_POINT_TAG = re.compile(r"<points?\b([^<>]*)>")
_ATTRIBUTE = re.compile(r"""\b(x|y|alt|label)(\d{0,4})\s{0,3}=\s{0,3}(?:"([^"<>]{0,200})"|'([^'<>]{0,200})')""")
_PAIR = rf"\(\s{{0,9}}({_NUMBER})\s{{0,9}},\s{{0,9}}({_NUMBER})\s{{0,9}}\)"
_CORNERS = re.compile(rf"{_PAIR}\s{{0,9}},?\s{{0,9}}{_PAIR}")
_POINT = re.compile(_PAIR)
_BOX_KEYS = ("bbox_2d", "bbox", "box_2d", "box", "boxes", "bboxes")
_POINT_KEYS = ("point_2d", "point", "points")
_LABEL_KEYS = ("label", "class", "name", "category")
_DEEPEST = 4


@dataclass(slots=True)
class Detections(Generic[Shape]):
    """Boxes or points with their labels, in order; `style` is json, tags or text."""

    style: str
    places: list[Shape | None] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)

    def add(self, place: Shape | None, label: str | None) -> None:
        self.places.append(place)
        self.labels.append(label)


def read_boxes(text: str, layout: BoxLayout) -> Detections[Box] | None:
    """Return boxes in tags; else in JSON; else in plain text, as (x1, y1), (x2, y2) or as four numbers alone.

    None if there are none. An empty JSON list is an intentional empty prediction.
    """
    if "<box>" in text or "<|box_start|>" in text:
        return _tagged_boxes(text, layout)
    found = _from_json(find_json_values(text), _BOX_KEYS, lambda values: parse_box(values, layout), 4)
    if found is not None:
        return found
    plain: Detections[Box] = Detections("text")
    for corners in _CORNERS.finditer(text):
        plain.add(parse_box([float(value) for value in corners.groups()], layout), None)
    alone = _NUMBERS.findall(text) if len(text) < 200 else []
    if not plain.places and len(alone) == 4 and not re.search(r"[A-Za-z]", text):
        plain.add(parse_box([float(value) for value in alone], layout), None)
    return plain if plain.places else None


def _tagged_boxes(text: str, layout: BoxLayout) -> Detections[Box]:
    """Parse tagged boxes. A label applies to all boxes directly after it, as in Qwen-VL's format."""
    found: Detections[Box] = Detections("tags")
    label, end = None, 0
    for tag in _BOX_TAG.finditer(text):
        if tag[1] is not None or text[end : tag.start()].strip(" \t\n,;"):
            label = (tag[1] or "").strip() or None
        end = tag.end()
        numbers = [float(value) for value in _NUMBERS.findall(tag[2] or "")]
        whole = numbers and len(numbers) % 4 == 0
        for start in range(0, len(numbers), 4) if whole else [0]:
            found.add(parse_box(numbers[start : start + 4], layout) if whole else None, label)
    return found


def read_points(text: str) -> Detections[Point] | None:
    """Return points in tags; else in JSON; else in plain text, as (x, y).

    Tags are `<point x= y=>` and `<points x1= y1= x2= ...>`.
    """
    if "<point" in text:
        return _tagged_points(text)
    found = _from_json(find_json_values(text), _POINT_KEYS, parse_point, 2)
    if found is not None:
        return found
    plain: Detections[Point] = Detections("text")
    for pair in _POINT.findall(text):
        plain.add(parse_point([float(value) for value in pair]), None)
    return plain if plain.places else None


def _tagged_points(text: str) -> Detections[Point] | None:
    found: Detections[Point] = Detections("tags")
    for attributes in _POINT_TAG.findall(text):
        label, values = None, {}
        for name, index, *quoted in _ATTRIBUTE.findall(attributes):
            value = quoted[0] or quoted[1]
            if name in ("alt", "label"):
                label = value
            else:
                values[index, name] = float(value) if _NUMBERS.fullmatch(value) else None
        for index in dict.fromkeys(index for index, _ in values) or [""]:
            found.add(parse_point([values.get((index, "x")), values.get((index, "y"))]), label)
    return found if found.places else None


def _from_json(
    values: list[Any], keys: tuple[str, ...], read: Callable[[Any], Shape | None], size: int
) -> Detections[Shape] | None:
    found: Detections[Shape] = Detections("json")
    empty = any(value == [] or (isinstance(value, dict) and [] in value.values()) for value in values)
    for value in values:
        for numbers, label in _entries(value, keys, size, None, _DEEPEST):
            found.add(read(numbers), label)
    return found if found.places or empty else None


def _entries(
    value: Any, keys: tuple[str, ...], size: int, label: str | None, depth: int
) -> Iterator[tuple[Any, str | None]]:
    """Yield (numbers, label) of everything in a JSON value that looks like a place: `size` numbers, or a known key."""
    if depth == 0 or not isinstance(value, dict | list):
        return
    if isinstance(value, list):
        if len(value) == size and all(isinstance(part, int | float) for part in value):
            yield value, label
        else:
            for part in value:
                yield from _entries(part, keys, size, label, depth - 1)
        return
    key = next((key for key in keys if key in value), None)
    if key is None:
        for part in value.values():
            yield from _entries(part, keys, size, label, depth - 1)
        return
    inner_label = next((value[name] for name in _LABEL_KEYS if isinstance(value.get(name), str)), label)
    inner = list(_entries(value[key], keys, size, inner_label, depth - 1))
    yield from inner or ([(value[key], inner_label)] if value[key] != [] else [])


def reference_boxes(answer: Any, layout: BoxLayout) -> Detections[Box]:
    """Return the boxes of a task's answer, given as in JSON, or as JSON text.

    Raises ValueError if it has none, or one without an area; the empty list is intentional.
    """
    values = find_json_values(answer) if isinstance(answer, str) else [_listed(answer)]
    found = _from_json(values, _BOX_KEYS, lambda each: parse_box(each, layout), 4)
    if found is None or None in found.places:
        raise ValueError(
            f"the task's answer is {answer!r:.80}; expected [x1, y1, x2, y2], a list of such, or objects with `bbox` "
            "and `label`"
        )
    return found


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _listed(part) for key, part in value.items()}
    return [_listed(part) for part in value] if isinstance(value, list | tuple) else value
