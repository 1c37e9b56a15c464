"""Judging again: verify and check, with real rewards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.made_up import group, ids, process, rewards, rollout

from rollmill.types import Experience, StopReason, Task

EXACT = {"name": "exact", "after": "is"}
SLOW = "import time\ndef slow(task, completion):\n    time.sleep(60)\n    return 0.0\n"


def verify(**options: Any) -> dict[str, Any]:
    return {"name": "verify", "rewards": [EXACT], **options}


def answers(values: list[float | None], texts: list[str], **each: Any) -> list[Experience]:
    return group(values, text=texts, **each)


def test_verify_replaces_what_an_independent_reward_refutes() -> None:
    experiences = answers([1.0, 1.0, 0.0, 0.0], ["it is 12", "it is 13", "it is 12", "it is 14"])
    found, report = process(verify(), experiences)
    assert rewards(found) == [1.0, 0.0, 1.0, 0.0]
    assert [each.reward_parts["pipeline/verify"] for each in found] == [0.0, -1.0, 1.0, 0.0]
    assert [each.info["details"]["pipeline/verify/exact"] for each in found] == [1.0, 0.0, 1.0, 0.0]
    assert [each.info.get("raw_reward") for each in found] == [None, 1.0, 0.0, None]
    assert (report.changed, report.changes) == (2, {"confirmed": 2, "replaced": 2})


def test_verify_drops_or_penalises() -> None:
    texts = ["it is 12", "it is 13"]
    found, report = process(verify(otherwise="drop"), answers([1.0, 1.0], texts))
    assert (ids(found), report.reasons) == (["g0/0"], {"refuted": 1})
    found, _ = process(verify(otherwise="penalty", penalty=0.25), answers([1.0, 1.0], texts))
    assert rewards(found) == [1.0, 0.75]


def test_verify_repairs_one_part_by_its_weight() -> None:
    parts = [{"math": 0.0, "style": 1.0}, {"math": 1.0, "style": 0.0}]
    experiences = answers([0.5, 2.0], ["it is 12", "it is 13"], parts=parts)
    found, _ = process(verify(part="math", weight=2.0), experiences)
    assert rewards(found) == [2.5, 0.0]
    assert [each.reward_parts for each in found] == [{"math": 1.0, "style": 1.0}, {"math": 0.0, "style": 0.0}]
    assert found[0].info["raw_parts"] == {"math": 0.0}


def test_verify_tolerates_small_differences() -> None:
    experiences = answers([0.9, 0.5], ["it is 12"] * 2)
    assert rewards(process(verify(tolerance=0.2), experiences)[0]) == [0.9, 1.0]


def test_verify_only_looks_at_rewards_within_bounds() -> None:
    experiences = answers([1.0, 0.0, None], ["it is 13", "it is 12", "it is 12"])
    found, report = process(verify(at_least=0.5), experiences)
    assert rewards(found) == [0.0, 0.0, None]
    assert sum(report.changes.values()) == 1
    found, _ = process(verify(at_most=0.5), answers([1.0, 0.0], ["it is 13", "it is 12"]))
    assert rewards(found) == [1.0, 1.0]


def test_verify_judges_what_had_no_reward() -> None:
    found, _ = process(verify(), answers([None], ["it is 12"]))
    assert (rewards(found), found[0].info["raw_reward"]) == ([1.0], None)
    assert rewards(process(verify(otherwise="drop"), answers([None], ["it is 13"]))[0]) == [None]


def test_a_part_that_does_not_count_yet_is_repaired_and_still_does_not_count() -> None:
    early = rollout(None, text="it is 13", parts={"exact": 1.0})
    [found], _ = process(verify(part="exact"), [early])
    assert (found.reward, found.reward_parts) == (None, {"exact": 0.0})
    assert rewards(process(verify(part="exact", otherwise="penalty"), [rollout(None, parts={"exact": 0.0})])[0]) == [
        None
    ]
    [judged], _ = process(verify(part="exact"), [rollout(None, parts={"exact": None})])
    assert (judged.reward, judged.reward_parts) == (1.0, {"exact": 1.0})


def test_a_masked_completion_is_still_judged_by_the_policy_that_wrote_it() -> None:
    """Its reward is in the baseline of the group."""
    for after, expected in ((0, 0.0), (3, 0.0), (4, 1.0)):
        cut = rollout(1.0, text="it is 13", stop=StopReason.LENGTH, version=3)
        check = {"name": "verify", "rewards": [{"name": "exact", "after": "is ", "after_steps": after}]}
        found, _ = process(["truncated", check], [cut])
        assert (rewards(found), found[0].action_tokens) == ([expected], 0)


def test_a_program_that_is_too_slow_is_refuted() -> None:
    code = {"name": "verify", "rewards": [{"name": "code", "time_limit_s": 0.3}]}
    task = Task("t0", "Add.", metadata={"tests": [{"stdin": "", "stdout": "12"}]})
    loops = group([1.0, 1.0], text=["while True: pass", "print(12)"])
    found, report = process(code, loops, task=lambda _: task)
    assert rewards(found) == [0.0, 1.0]
    assert report.changes == {"replaced": 1, "confirmed": 1}


def test_verify_does_not_open_a_gate() -> None:
    outcomes = {"format": "ok", "exact": "gated"}
    for options in (verify(), verify(part="exact")):
        closed = rollout(-0.5, text="it is 12", parts={"format": 0.0}, outcomes=outcomes)
        [found], report = process(options, [closed])
        assert (found.reward, report.changed) == (-0.5, 0)


def test_verify_checks_a_share_chosen_by_the_ids() -> None:
    def changed() -> set[str]:
        experiences = [rollout(1.0, index=index, text="it is 13") for index in range(400)]
        return {each.id for each in process(verify(share=0.25), experiences)[0] if each.reward == 0.0}

    first = changed()
    assert 60 < len(first) < 140
    assert first == changed()


def test_what_is_judged_too_late_is_not_verified(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    slow = {"name": "python", "function": f"{tmp_path}/slow.py:slow", "time_limit_s": 0.2}
    found, report = process({"name": "verify", "rewards": [slow]}, answers([1.0], ["it is 12"]))
    assert rewards(found) == [1.0]
    assert report.changes == {"not verified": 1}


def test_verify_repairs_a_reward_that_is_wrong_in_a_fifth_of_the_cases() -> None:
    draw = random.Random(1)
    right = [draw.random() < 0.5 for _ in range(200)]
    noisy = [float(each if draw.random() < 0.8 else not each) for each in right]
    texts = ["it is 12" if each else "it is 13" for each in right]
    assert noisy != [float(each) for each in right]
    found, report = process(verify(), answers(noisy, texts))
    assert rewards(found) == [float(each) for each in right]
    assert report.changes["replaced"] == sum(a != float(b) for a, b in zip(noisy, right, strict=True))


@pytest.mark.parametrize(
    ("reward", "at_least", "texts"),
    [
        ({"name": "format", "tags": ["think", "answer"]}, 1.0, ["<think>a</think><answer>12</answer>", "12"]),
        ({"name": "language", "language": "en"}, 0.8, ["the answer is twelve", "答案是十二"]),
        ({"name": "repetition", "ngram": 2}, -0.5, ["it is 12", "abababababababab"]),
    ],
)
def test_check_lets_any_reward_be_a_filter(reward: dict[str, Any], at_least: float, texts: list[str]) -> None:
    options = {"name": "check", "reward": reward, "at_least": at_least}
    found, report = process(options, answers([1.0, 1.0], texts))
    assert (ids(found), report.reasons) == (["g0/0"], {"refused": 1})
    found, report = process({**options, "otherwise": "penalty", "penalty": 0.5}, answers([1.0, 1.0], texts))
    assert rewards(found) == [1.0, 0.5]
    assert [each.reward_parts["pipeline/check"] for each in found] == [0.0, -0.5]
    assert all("pipeline/check/value" in each.info["details"] for each in found)


def test_check_passes_what_its_reward_does_not_apply_to() -> None:
    schema = {"name": "format", "schema_column": "schema"}
    found, report = process({"name": "check", "reward": schema}, answers([1.0], ["no JSON"]))
    assert (len(found), report.changes) == (1, {"not checked": 1})
