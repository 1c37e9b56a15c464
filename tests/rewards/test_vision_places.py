"""Boxes and points: overlap, matching, what models write, and what policies try."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.reward_helpers import judged
from support.rule_helpers import ADAPTER, judge_of, reward, verdict

from rollmill.errors import RewardError
from rollmill.rewards.vision.detections import read_boxes, read_points
from rollmill.rewards.vision.geometry import Box, giou, in_polygon, iou
from rollmill.rewards.vision.matching import max_matching_score, solve_assignment

SIDES = st.floats(0.1, 100)
PLACES = st.floats(-100, 100)
BOXES = st.builds(lambda x, y, w, h: (x, y, x + w, y + h), PLACES, PLACES, SIDES, SIDES)
GOLD = [[0, 0, 10, 10], [20, 20, 30, 30]]


def both(measure: Any, one: Box, other: Box) -> float:
    return float(measure([one], [other])[0, 0])


@pytest.mark.parametrize(
    ("one", "other", "overlap", "generalised"),
    [
        ((0, 0, 2, 2), (0, 0, 2, 2), 1.0, 1.0),
        ((0, 0, 2, 2), (1, 1, 3, 3), 1 / 7, 1 / 7 - 2 / 9),
        ((0, 0, 1, 1), (1, 0, 2, 1), 0.0, 0.0),  # side by side: the hull is their union
        ((0, 0, 1, 1), (2, 0, 3, 1), 0.0, -1 / 3),
        ((0, 0, 4, 4), (1, 1, 2, 2), 1 / 16, 1 / 16),  # one inside the other
    ],
)
def test_overlap_by_hand(one: Box, other: Box, overlap: float, generalised: float) -> None:
    assert both(iou, one, other) == pytest.approx(overlap)
    assert both(giou, one, other) == pytest.approx(generalised)


@given(BOXES, BOXES)
def test_overlap_properties(one: Box, other: Box) -> None:
    """Section 3 of arXiv:1902.09630: symmetric, GIoU <= IoU, within bounds, 1 for the same box, no matter the scale."""
    overlap, generalised = both(iou, one, other), both(giou, one, other)
    assert overlap == both(iou, other, one)
    assert generalised == pytest.approx(both(giou, other, one))
    assert 0 <= overlap <= 1
    assert -1 <= generalised <= overlap + 1e-12
    assert both(iou, one, one) == both(giou, one, one) == 1
    scaled = [tuple(c * f for c, f in zip(box, (3, 7, 3, 7), strict=True)) for box in (one, other)]
    assert both(giou, *scaled) == pytest.approx(generalised, abs=1e-9)  # type: ignore[arg-type]


@given(st.integers(1, 5), st.integers(0, 3), st.data())
def test_assignment_against_all_permutations(rows: int, more: int, data: st.DataObject) -> None:
    numbers = data.draw(
        st.lists(
            st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-5, 5)),
            min_size=rows * (rows + more),
            max_size=rows * (rows + more),
        )
    )
    cost = np.array(numbers).reshape(rows, rows + more)
    columns = solve_assignment(cost)
    assert len(set(columns.tolist())) == rows
    best = min(sum(cost[i, c] for i, c in enumerate(each)) for each in itertools.permutations(range(rows + more), rows))
    assert cost[np.arange(rows), columns].sum() == pytest.approx(best)


@given(st.lists(BOXES, min_size=1, max_size=4), st.lists(BOXES, min_size=1, max_size=4), st.lists(BOXES, max_size=3))
def test_a_matching_is_symmetric_and_grows_only_with_better_boxes(
    golds: list[Box], boxes: list[Box], more: list[Box]
) -> None:
    scores = iou(golds, boxes)
    total = max_matching_score(scores)
    assert total == pytest.approx(max_matching_score(scores.T))
    assert total <= min(len(golds), len(boxes)) + 1e-9
    assert max_matching_score(iou(golds, boxes + more)) >= total - 1e-9


@given(st.lists(BOXES, min_size=1, max_size=3), st.lists(BOXES, max_size=3), st.integers(1, 20))
def test_wrong_boxes_never_help(golds: list[Box], boxes: list[Box], wrong: int) -> None:
    before = reward("boxes", golds, json.dumps(boxes))
    far = [[1000 + 10 * n, 1000, 1005 + 10 * n, 1005] for n in range(wrong)]
    after = reward("boxes", golds, json.dumps([*boxes, *far]))
    again = reward("boxes", golds, json.dumps([*boxes, *golds, *boxes]))
    assert after < before or before == 0 == after
    assert again <= 2 * len(golds) / (2 * len(boxes) + 2 * len(golds)) + 1e-9


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[[0, 0, 10, 10], [20, 20, 30, 30]]", 1.0),
        ("[[20, 20, 30, 30], [0, 0, 10, 10]]", 1.0),
        ('```json\n[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}, {"bbox_2d": [20, 20, 30, 30]}]\n```', 1.0),
        ('{"objects": [{"bbox": [0, 0, 10, 10]}, {"bbox": [20, 20, 30, 30]}]}', 1.0),
        ('{"boxes": [[0, 0, 10, 10], [20, 20, 30, 30]]}', 1.0),
        ("<box>(0,0),(10,10)</box> and <box>(20,20),(30,30)</box>", 1.0),
        ("<box>[[0, 0, 10, 10], [20, 20, 30, 30]]</box>", 1.0),
        ("<|object_ref_start|>cat<|object_ref_end|><|box_start|>(0,0),(10,10)<|box_end|>", 2 / 3),
        ("The boxes are [0, 0, 10, 10] and [20.0, 20, 3e1, 30].", 1.0),
        ("(0, 0), (10, 10) and (20, 20), (30, 30)", 1.0),
        ("0 0 10 10", 2 / 3),
        ("[0, 0, 10, 5]", 1 / 3),
        ("[[0, 0, 10, 10], [20, 20, 30, 30], [0, 0, 10, 10]]", 4 / 5),  # one twice
        ("[[0, 0, 10, 10], [20, 20, 30, 30], [10, 10, 0, 0]]", 4 / 5),  # inverted
        ("[[0, 0, 10, 10], [20, 20, 30, 30], [5, 5, 5, 9]]", 4 / 5),  # without an area
        ("[[0, 0, 10, 10], [20, 20, 30, 30], [0, 0, NaN, Infinity]]", 4 / 5),
        ("[[0, 0, 1e8, 1e8]]", 0.0),
        ("[[0, 0, true, 5]]", 0.0),
        ('[{"bbox_2d": "all of it"}]', 0.0),
        ("<box>1, 2, 3</box>", 0.0),
        ("[[0, 0, 10, " + "9" * 5000 + "]]", 0.0),
        ("[]", 0.0),
    ],
)
def test_boxes_in_every_form(text: str, value: float) -> None:
    assert verdict("boxes", GOLD, text) == (pytest.approx(value), "ok" if "99999" not in text else "no_answer")


def test_spam_earns_nothing() -> None:
    grid = [[x, y, x + 10, y + 10] for x in range(0, 100, 10) for y in range(0, 100, 10)]
    assert reward("boxes", GOLD, json.dumps(grid)) == pytest.approx(4 / 102)
    assert verdict("boxes", GOLD, json.dumps(grid * 10)) == (0.0, "too_many")
    assert verdict("boxes", GOLD, "[[0,0,1,1]]" * 9000) == (0.0, "too_many")
    assert verdict("boxes", GOLD, "nothing here [x] {y}") == (0.0, "no_answer")
    assert verdict("boxes", GOLD, " " * 300_000) == (0.0, "too_long")
    assert reward("boxes", GOLD, "[0, 0, 30, 30]") == pytest.approx(2 * (100 / 900) / 3)  # one box over everything
    for hostile in ("[" * 100_000, "<box>" * 20_000, '{"bbox":' * 12_000, "<ref>" * 20_000, "(1," * 30_000):
        assert reward("boxes", GOLD, hostile) == 0


def test_labels() -> None:
    golds = [{"bbox": [0, 0, 10, 10], "label": "cat"}, {"bbox": [0, 0, 10, 10], "label": "Dog "}, [20, 20, 30, 30]]
    right = '[{"bbox_2d": [0,0,10,10], "label": "dog"}, {"bbox_2d": [0,0,10,10], "label": "CAT"}, [20,20,30,30]]'
    assert reward("boxes", golds, right) == 1
    swapped = right.replace("CAT", "cow")
    assert reward("boxes", golds, swapped) == pytest.approx(2 / 3)
    assert reward("boxes", golds, swapped, labels=False) == 1
    tagged = "<ref>cat</ref><box>(0,0),(10,10)</box>"
    assert reward("boxes", golds[:1], tagged) == 1
    assert reward("boxes", golds[1:2], tagged) == 0
    cats = [golds[0], golds[0] | {"bbox": [20, 20, 30, 30]}]
    assert reward("boxes", cats, tagged + "<box>(20,20),(30,30)</box>") == 1  # one label before several boxes
    assert reward("boxes", cats, tagged + ", <box>(20,20),(30,30)</box>") == 1
    assert reward("boxes", cats, tagged + " and a dog <box>(20,20),(30,30)</box>") == 1 / 2
    assert reward("boxes", cats, tagged + "<ref>dog</ref><box>(20,20),(30,30)</box>") == 1 / 2
    assert reward("boxes", golds[:1], "[0, 0, 10, 10]") == 0


@pytest.mark.parametrize(
    ("keys", "text", "value"),
    [
        ({"measure": "giou"}, "[0, 0, 10, 10]", 1.0),
        ({"measure": "giou"}, "[20, 0, 30, 10]", (1 - 1 / 3) / 2),
        ({"threshold": 0.5}, "[0, 0, 10, 5]", 0.5),
        ({"threshold": 0.51}, "[0, 0, 10, 5]", 0.0),
        ({"threshold": 0.5, "credit": "hit"}, "[0, 0, 10, 5]", 1.0),
        ({"layout": "xywh"}, "[5, 5, 5, 5]", 0.25),
        ({"layout": "yxyx"}, "[0, 5, 10, 10]", 0.5),
        ({"coordinates": "unit", "reference": "pixels"}, "[0, 0, 0.1, 0.2]", 1.0),
        ({"coordinates": "thousand", "reference": "pixels"}, "[0, 0, 100, 200]", 1.0),
        ({"coordinates": "percent", "reference": "pixels"}, "[0, 0, 10, 20]", 1.0),
        ({"tag": "answer"}, "maybe [5, 5, 6, 6] <answer>[0, 0, 10, 10]</answer>", 1.0),
        ({"tag": "answer"}, "<answer>[0, 0, 10, 10]", 0.0),
        ({"after": "Box:"}, "[1, 1, 2, 2] Box: [0, 0, 10, 10]", 1.0),
    ],
)
def test_keys_of_boxes(keys: dict[str, Any], text: str, value: float) -> None:
    assert reward("boxes", [0, 0, 10, 10], text, {"image_size": [100, 50]}, **keys) == pytest.approx(value)


def test_references_of_boxes() -> None:
    assert reward("boxes", '[{"bbox_2d": [0, 0, 1, 1]}]', "[0, 0, 1, 1]") == 1
    assert reward("boxes", [0, 0, 5, 5], "[0, 0, 5, 5]", reference_layout="xywh") == 1
    assert (
        reward("boxes", [], "[]") == reward("boxes", [], '{"boxes": []}') == reward("boxes", [], '{"objects": []}') == 1
    )
    assert verdict("boxes", [], "none") == (0.0, "no_answer")
    assert reward("boxes", [], "[0, 0, 1, 1]") == 0
    assert reward("boxes", None, "[0, 0, 1, 1]") is None
    for gold in ("a cat", [1, 2, 3], [[0, 0, 1, 1], [1, 1, 0, 0]], {"box": "x"}, 5):
        with pytest.raises(RewardError, match=r"the task's answer is .*; expected \[x1, y1, x2, y2\]"):
            reward("boxes", gold, "[0, 0, 1, 1]")
    with pytest.raises(RewardError, match="unit cannot be converted to pixels without the image's size"):
        reward("boxes", [0, 0, 1, 1], "[0, 0, 1, 1]", coordinates="unit", reference="pixels")
    with pytest.raises(RewardError, match=r"`image_size` is \[0, 5\]; expected \[width, height\]"):
        reward("boxes", [0, 0, 1, 1], "[]", {"image_size": [0, 5]}, coordinates="unit", reference="pixels")
    with pytest.raises(ValidationError, match=r"give one, as in threshold: 0\.5"):
        ADAPTER.validate_python({"name": "boxes", "credit": "hit"})


def test_the_column_vision_chooses_and_changes_rewards() -> None:
    with judge_of("boxes") as judge:
        assert judged(judge, [0, 0, 1, 1], "[0, 0, 1, 1]", vision={"boxes": {}}).reward == 1
        assert judged(judge, [0, 0, 1, 1], "[0, 0, 1, 1]", vision={"boxes": {"layout": "xywh"}}).reward == 1
        assert judged(judge, [0, 0, 2, 2], "[1, 1, 1, 1]", vision={"boxes": {"layout": "xywh"}}).reward == 0.25
        assert judged(judge, [0, 0, 1, 1], "[0, 0, 1, 1]", vision={"count": None}).reward is None
        for column, message in [
            ("boxes", "`vision` is 'boxes'; expected a mapping"),
            ({"boxes": {"weight": 2}}, r"has \['weight'\] under boxes"),
            ({"boxes": {"layout": "zigzag"}}, "Input should be"),
            ({"boxs": {}}, r"`vision` names \['boxs'\]; there are boxes, chart, count, grounding"),
        ]:
            with pytest.raises(RewardError, match=message):
                judged(judge, [0, 0, 1, 1], "[0, 0, 1, 1]", vision=column)


# -- points ----------------------------------------------------------------------------------------------------------

TRIANGLE = {"polygon": [[0, 0], [10, 0], [0, 10]], "label": "sail"}


@pytest.mark.parametrize(
    ("gold", "text", "keys", "value"),
    [
        ([0, 0, 10, 10], "(5, 5)", {}, 1.0),
        ([0, 0, 10, 10], "[10, 0]", {}, 1.0),
        ([0, 0, 10, 10], "[11, 0]", {}, 0.0),
        ([0, 0, 10, 10], "(5, 5) (6, 6)", {}, 2 / 3),
        (GOLD, "(5, 5) (6, 6)", {}, 1 / 2),  # both in the same box
        (GOLD, '[{"point_2d": [5, 5]}, {"point_2d": [25, 25]}]', {}, 1.0),
        ([5, 5], "(5, 7)", {"tolerance": 2}, 1.0),
        ([5, 5], "(5, 7.1)", {"tolerance": 2}, 0.0),
        (TRIANGLE, '{"point_2d": [2, 2], "label": "Sail"}', {}, 1.0),
        (TRIANGLE, '{"point_2d": [2, 2], "label": "mast"}', {}, 0.0),
        (TRIANGLE, "(6, 6)", {"labels": False}, 0.0),
        (TRIANGLE, '<point x="2" y="2" alt="sail">sail</point>', {}, 1.0),
        (TRIANGLE | {"label": "boat's sail"}, '<point x="2" y="2" alt="boat\'s sail">', {}, 1.0),
        (TRIANGLE | {"label": "boat"}, '<point x="2" y="2" alt="boat\'s sail">', {}, 0.0),
        (GOLD, '<points x1="5" y1="5" x2="25" y2="25" alt="boxes">', {}, 1.0),
        (
            GOLD,
            '<points x1="50" y1="50" x2="2.5" y2="2.5">',
            {"coordinates": "percent", "reference": "thousand"},
            1 / 2,
        ),
        ([0, 0, 10, 10], '<point x="5">', {}, 0.0),
        ([0, 0, 10, 10], '<point x="5" y="nan">', {}, 0.0),
        ([], "[]", {}, 1.0),
        ([], "<point", {}, 0.0),
        ([0, 0, 10, 10], "in the middle", {}, 0.0),
        ([0, 0, 10, 10], "[0, 0, 10, 10]", {}, 0.0),  # a box is no point
    ],
)
def test_points(gold: Any, text: str, keys: dict[str, Any], value: float) -> None:
    assert reward("points", gold, text, **keys) == pytest.approx(value)


def test_points_on_a_grid_earn_next_to_nothing() -> None:
    grid = " ".join(f"({x}, {y})" for x in range(10) for y in range(10))
    assert reward("points", [3, 3, 3.5, 3.5], grid) == pytest.approx(2 / 101)
    assert verdict("points", [3, 3, 4, 4], grid * 2)[1] == "too_many"
    for gold in (
        "middle",
        [[0, 0], [1]],
        {"polygon": [[0, 0], [1, 1]]},
        {"box": [1, 1, 0, 0]},
        {"point": [1, 1], "label": 3},
    ):
        with pytest.raises(RewardError, match="the task's answer is"):
            reward("points", gold, "(1, 1)", tolerance=1)
    with pytest.raises(RewardError, match="nothing hits with tolerance 0; give `tolerance`"):
        reward("points", [1, 1], "(1, 1)")


@given(st.lists(st.tuples(PLACES, PLACES), min_size=1, max_size=5), BOXES)
def test_a_box_is_a_polygon(points: list[tuple[float, float]], box: Box) -> None:
    x1, y1, x2, y2 = box
    inside = [x1 < x < x2 and y1 < y < y2 for x, y in points]
    edge = [x in (x1, x2) or y in (y1, y2) for x, y in points]
    found = in_polygon([(x1, y1), (x2, y1), (x2, y2), (x1, y2)], points)
    assert all(a == b for a, b, on in zip(found.tolist(), inside, edge, strict=True) if not on)


# -- form ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "keys", "outcome"),
    [
        ('{"bbox_2d": [1, 2, 3, 4], "label": "a"}', {"labels": True, "syntax": "json"}, "ok"),
        ('{"bbox_2d": [1, 2, 3, 4]}', {"labels": True}, "no_label"),
        ("<box>(1,2),(3,4)</box>", {"syntax": "tags"}, "ok"),
        ("<box>(1,2),(3,4)</box>", {"syntax": "json"}, "wrong_syntax"),
        ("<box>(1,2),(3,4)", {}, "malformed"),
        ("<box>(3,4),(1,2)</box>", {}, "malformed"),
        ("[1, 2, 101, 4]", {}, "outside"),
        ("[1, 2, 101, 4]", {"coordinates": "thousand"}, "ok"),
        ("[-1, 2, 3, 4]", {}, "outside"),
        ("[[1, 2, 3, 4]]", {"fewest": 2}, "wrong_number"),
        ("[[1, 2, 3, 4]]" * 21, {}, "wrong_number"),
        ("no box", {}, "no_answer"),
        ("no box", {"fewest": 0}, "ok"),
    ],
)
def test_grounding(text: str, keys: dict[str, Any], outcome: str) -> None:
    found = verdict("grounding", None, text, {"image_size": [100, 100]}, **keys)
    assert found == (float(outcome == "ok"), outcome)


def test_a_number_of_boxes_that_none_can_be_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"fewest \(3\) is above most \(2\); lower it"):
        ADAPTER.validate_python({"name": "grounding", "fewest": 3, "most": 2})


def test_many_points_in_one_tag_and_json_behind_many_formulas_are_read() -> None:
    golds = [[n, 0, n + 1, 1] for n in range(400)]
    crowd = " ".join(f'x{n}="{n}.5" y{n}="0.5"' for n in range(400))
    assert reward("points", golds, f"<points {crowd}>") == 1
    assert reward("boxes", GOLD[:1], "\\frac{1}{2} and {x} " * 3000 + "[0, 0, 10, 10]") == 1


PIECES = [
    "[",
    "]",
    "{",
    "}",
    '"bbox_2d":',
    '"label": "a"',
    "1",
    "-2.5e3",
    ",",
    "NaN",
    "<box>",
    "</box>",
    "(",
    ")",
    " ",
    "<point x='1' y=",
    "<ref>",
    '"',
]


@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_any_text_is_judged(pieces: list[str]) -> None:
    text = "".join(pieces)
    for name, gold in (("boxes", GOLD), ("points", GOLD), ("grounding", None)):
        assert 0 <= reward(name, gold, text) <= 1
    for found in (read_boxes(text, "xyxy"), read_points(text)):
        assert found is None or len(found.places) == len(found.labels)


def test_many_boxes_are_matched() -> None:
    """60 boxes that all overlap: matched in a thread, exactly."""
    golds = [[n, n, n + 100, n + 100] for n in range(60)]
    assert reward("boxes", golds, json.dumps(golds[::-1])) == pytest.approx(1)
