"""Language, length and repetition."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.reward_helpers import completion, judged
from support.rule_helpers import ADAPTER, group, judge_of, reward, tokens, verdict

from rollmill.cli import main
from rollmill.errors import ConfigError, RewardError
from rollmill.rewards import build_reward_manager
from rollmill.rewards.builtin.exact import ExactReward
from rollmill.rewards.builtin.language import extract_prose, main_scripts, script_words
from rollmill.rewards.builtin.length import LengthReward
from rollmill.rewards.builtin.repetition import loop_length, repeated_ngram_share
from rollmill.types import Message, Task


@pytest.mark.parametrize(
    ("language", "text", "share"),
    [
        ("en", "First we add the numbers.", 1.0),
        ("en", "First 我们 add them", 3 / 5),
        ("zh", "首先 add 我们", 4 / 5),
        ("zh", "首先我们", 1.0),
        ("en", "首先我们", 0.0),
        ("ja", "これは漢字", 1.0),
        ("zh", "これは漢字", 2 / 5),
        ("ru", "Сначала add числа", 2 / 3),
        ("ko", "먼저 두 수를 add", 3 / 4),
        ("hi", "पहले हम जोड़ते हैं", 1.0),
        ("en", "x and y, so α is x", 3 / 3),  # names of variables are no words
        ("en", "don't re-add it", 1.0),
        ("zh", "我们 `foo bar` 和 $x + width$ 和 \\(width\\)", 1.0),  # code and formulas
        ("zh", "```python\nprint(hello)\n``` 我们", 1.0),
        ("en", "So we see: `我们加两个数`", 3 / 9),  # hiding in code does not help
        ("en", "So we see: $$我们$$", 3 / 5),
        ("zh", "<think>我们</think> https://example.org/some/page", 1.0),
    ],
)
def test_share_of_words_in_the_scripts_of_a_language(language: str, text: str, share: float) -> None:
    assert reward("language", None, text, language=language) == pytest.approx(share)


def test_texts_without_words_or_without_the_part_earn_nothing() -> None:
    assert verdict("language", None, "2 + 3 = 5", language="en") == (0.0, "no_words")
    assert verdict("language", None, "", language="en") == (0.0, "no_words")
    assert verdict("language", None, "We add.", language="en", tag="think") == (0.0, "no_answer")
    assert reward("language", None, "<think>We add.</think>我们加", language="en", tag="think") == 1
    assert verdict("language", None, "a" * 300_000, language="en")[1] == "too_long"


@pytest.mark.parametrize(
    ("prompt", "text", "share"),
    [
        ("What is the sum of $x$ and 2?", "we 我", 0.5),
        ("二加二等于多少？", "我 we", 0.5),
        ("2足す2はいくつですか。", "これは二", 1.0),
        ([{"role": "user", "content": "Сколько будет дважды два?"}], "четыре", 1.0),
        ("2 + 2", "four", 1.0),
        ("```python\n" + "print(hello)\n" * 400 + "```\n这段程序写什么？", "我 we", 0.5),  # a question below much code
    ],
)
def test_the_language_of_the_prompt(prompt: str | list[Message], text: str, share: float) -> None:
    with judge_of("language") as judge:
        found = asyncio.run(judge.score(Task("t", prompt), completion(text)))
    assert found.reward == share


ENGLISH = (
    "First I add the two numbers and write down the carry. Then I check that the sum is not larger than the limit, "
    "because the question asks for the smallest value that still works in every case."
)
FRENCH = (
    "Ensuite je multiplie le résultat par deux et je vérifie que la somme ne dépasse pas la limite, parce que la "
    "question demande la plus petite valeur qui convient dans tous les cas possibles."
)


def test_identify_tells_languages_of_one_alphabet() -> None:
    pytest.importorskip("py3langid")
    assert reward("language", None, ENGLISH, language="en", method="identify") == 1
    assert reward("language", None, FRENCH, language="en", method="identify") == 0
    assert reward("language", None, FRENCH, language="en") == 1
    mixed = reward("language", None, f"{ENGLISH} {FRENCH}", language="en", method="identify")
    assert 0.3 < mixed < 0.7
    with_chinese = reward("language", None, ENGLISH + " 我们加两个数", language="en", method="identify")
    assert with_chinese == pytest.approx(35 / 41, abs=0.05)
    with judge_of("language", method="identify") as judge:
        for prompt, expected in ((ENGLISH, 0.0), (FRENCH, 1.0)):
            found = asyncio.run(judge.score(Task("t", prompt), completion(FRENCH)))
            assert found.reward == expected


def test_codes_that_are_no_languages_are_refused() -> None:
    with pytest.raises(ConfigError, match="`jp` is not the code of a language; there are af, am"):
        judge_of("language", language="jp")


@given(st.text(max_size=300))
def test_any_text_has_a_share(text: str) -> None:
    for language in ("en", "ja", "ru", "ko"):
        assert 0 <= reward("language", None, text, language=language) <= 1
    own, others = script_words(extract_prose(text), ("Latin",))
    assert len(own) + others <= len(text)
    assert main_scripts(text)


# -- length ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "expected"), [("553", [0.5, 0.0, -0.5]), ("353", [0.0, 0.0, -0.5]), ("555", [0.5, 0.0, -0.5])]
)
def test_kimi_golden_numbers(texts: str, expected: list[float]) -> None:
    """Lengths 100, 200, 300 (arXiv:2501.12599, 2.3.3)."""
    configs = [ExactReward(name="exact"), LengthReward(name="length", kind="kimi", correct="exact")]
    with build_reward_manager(configs) as judge:
        found = group(judge, "5", [tokens(100 * (i + 1), i, text) for i, text in enumerate(texts)])
    assert [each.parts["length"] for each in found] == pytest.approx(expected)


@pytest.mark.slow
def test_kimi_by_value_of_a_part_and_after_a_warm_up(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(task, completion): return {'a': len(completion.text), 'b': None if completion.text == 'n' else 0}\n"
    )
    python = {"name": "python", "function": f"{tmp_path}/mine.py:score", "weight": 0}
    length = {"name": "length", "kind": "kimi", "after_steps": 5}
    made = [tokens(10, 0, "xx"), tokens(20, 1, "x"), tokens(30, 2, "n")]
    for keys, expected, totals in [
        ({"correct": "score/a", "threshold": 2}, [0.5, 0.0, -0.5], [0.0, 0.0, 0.0]),
        ({"correct": "score/b", "threshold": 0, "after_steps": 0}, [0.5, 0.0, None], [0.5, 0.0, 0.0]),
    ]:
        with build_reward_manager([ADAPTER.validate_python(each) for each in (python, length | keys)]) as judge:
            found = group(judge, "5", made)
        assert [each.parts["length"] for each in found] == expected
        assert [each.reward for each in found] == totals
    with (
        build_reward_manager(
            [ADAPTER.validate_python(each) for each in (python, length | {"correct": "score"})]
        ) as judge,
        pytest.raises(RewardError, match=r"no reward `score` for .* there are score/a, score/b"),
    ):
        group(judge, "5", made)


@given(st.lists(st.tuples(st.integers(1, 500), st.booleans()), min_size=1, max_size=8))
def test_kimi_properties(made: list[tuple[int, bool]]) -> None:
    configs = [ExactReward(name="exact"), LengthReward(name="length", kind="kimi", correct="exact")]
    with build_reward_manager(configs) as judge:
        found = group(judge, "5", [tokens(n, i, "5" if right else "4") for i, (n, right) in enumerate(made)])
    values = [each.parts["length"] for each in found]
    assert all(value is not None and -0.5 <= value <= 0.5 for value in values)
    assert all(value <= 0 for value, (_, right) in zip(values, made, strict=True) if not right)
    if len({n for n, _ in made}) == 1:
        assert set(values) == {0.0}


def test_a_name_that_no_reward_has_is_found_before_the_run(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = "model: {new: {hidden_size: 32}}\ntaskset: {path: t.jsonl}\nrewards: [{name: math}, %s]\n"
    for correct, code in (("math", 0), ("maths", 2), ("length", 2)):
        (tmp_path / "run.yaml").write_text(run % f"{{name: length, kind: kimi, correct: {correct}}}")
        assert main(["check", str(tmp_path / "run.yaml"), "--no-data"]) == code
    assert "rewards.1.correct: no reward `length`; there are math" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0), (20481, -1.0), (40000, -1.0)]
)
def test_dapo_overlong_golden_numbers(length: int, expected: float) -> None:
    """L_max 20480, L_c 4096 (arXiv:2503.14476, eq. 13)."""
    with judge_of("length", kind="overlong", longest=20480, buffer=4096) as judge:
        assert group(judge, None, [tokens(length)])[0].reward == pytest.approx(expected)


def test_a_target_length() -> None:
    with judge_of("length", kind="target", target=100) as judge:
        values = [each.reward for each in group(judge, None, [tokens(n) for n in (100, 50, 150, 200, 500)])]
        assert values == pytest.approx([1, 0.5, 0.5, 0, 0])
        assert group(judge, None, [tokens(50)], target_length=50)[0].reward == 1
        with pytest.raises(RewardError, match="`target_length` is 'short'; expected a number of at least 1"):
            group(judge, None, [tokens(50)], target_length="short")
    assert reward("length", None, "one two, three", kind="target", target=4) == 1  # words and marks
    assert reward("length", None, "one", kind="target") is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "kimi"}, "which reward says that a completion is correct"),
        ({"kind": "overlong"}, "kind overlong needs longest and buffer"),
        ({"kind": "overlong", "longest": 5, "buffer": 6}, r"buffer \(6\) is above longest \(5\)"),
        ({"kind": "target", "longest": 5}, "longest is honoured by kind overlong, not by target"),
        ({"kind": "overlong", "longest": 5, "buffer": 2, "threshold": 0.5}, "threshold is honoured by kind kimi"),
    ],
)
def test_length_keys(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ADAPTER.validate_python({"name": "length", **keys})


# -- repetition ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
def test_repeated_share_by_counting(ids: list[int], n: int) -> None:
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    expected = 1 - len(set(grams)) / len(grams) if grams else 0.0
    assert repeated_ngram_share(np.array(ids, np.int64), n) == pytest.approx(expected)


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(2, 5), st.integers(1, 12))
def test_loops_by_trying_every_end_and_period(ids: list[int], times: int, fewest: int) -> None:
    def loops(end: list[int]) -> bool:
        periods = range(1, len(end) // times + 1)
        return any(all(end[i] == end[i + p] for i in range(len(end) - p)) for p in periods)

    found = max((n for n in range(1, len(ids) + 1) if loops(ids[-n:])), default=0)
    assert loop_length(np.array(ids, np.int64), times, fewest) == (found if found >= fewest else 0)


def test_repetition_golden_cases() -> None:
    story = " ".join(f"word{i}" for i in range(200))
    assert verdict("repetition", None, story) == (0.0, "ok")
    assert verdict("repetition", None, "") == (0.0, "ok")
    assert verdict("repetition", None, "Wait, let me check that again. " * 50)[1] == "loop"
    assert reward("repetition", None, "Wait, let me check that again. " * 50) < -0.95
    value, outcome = verdict("repetition", None, story + " no" * 100)
    assert (outcome, value) == ("loop", pytest.approx(-100 / 300))
    assert reward("repetition", None, story + " no" * 100, free=1 / 3) == pytest.approx(0, abs=1e-9)
    assert reward("repetition", None, story + " " + story) == pytest.approx(-(1 - 200 / 393))
    assert verdict("repetition", None, "好" * 100)[1] == "loop"
    long = " ".join(f"word{i}" for i in range(9000))
    assert reward("repetition", None, long + " no" * 1000) == pytest.approx(-1000 / 10_000)  # of the whole text


def test_repetition_counts_tokens_where_there_are_any() -> None:
    looping, plain = tokens(0, 0, "all different here"), tokens(100, 1, "no " * 100)
    looping.token_ids = np.array([7, 8] * 50, np.int32)
    with judge_of("repetition") as judge:
        values = [each.reward for each in group(judge, None, [looping, plain])]
    assert values == [-1.0, 0.0]


@given(st.text(max_size=200), st.integers(1, 9), st.floats(0, 0.9))
def test_repetition_is_between_minus_one_and_zero(text: str, ngram: int, free: float) -> None:
    assert -1 <= reward("repetition", None, text, ngram=ngram, free=free) <= 0


def test_long_texts_are_judged() -> None:
    """100,000 characters, and the event loop is not held up for long: no timing is asserted, they only have to end."""
    draw = random.Random(0)
    noise = "".join(draw.choice('ab `$\n我<["') for _ in range(100_000))
    for name, keys in (("repetition", {}), ("language", {"language": "en"}), ("format", {"sections": ["a"]})):
        assert reward(name, None, noise, **keys) is not None


def _texts(path: Path, *columns: str) -> list[str]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:150]]
    return [str(next(row[column] for column in columns if column in row)) for row in rows]


def test_people_s_solutions_are_in_their_language_and_do_not_repeat(data_dir: Path) -> None:
    english = _texts(data_dir / "gsm8k/test.jsonl", "answer")
    chinese = _texts(data_dir / "k12/cmath.jsonl", "question")
    for texts, language, other in ((english, "en", "zh"), (chinese, "zh", "en")):
        with judge_of("language", language=language) as right, judge_of("language", language=other) as wrong:
            assert np.mean([judged(right, None, text).reward for text in texts]) > 0.98
            assert np.mean([judged(wrong, None, text).reward for text in texts]) < 0.02
    with judge_of("repetition") as judge:
        assert np.mean([judged(judge, None, text).reward for text in english]) > -0.01
