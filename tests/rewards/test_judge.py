"""Weights and parts, the built-in rewards, users' functions, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reward_helpers import completion, judged, task

from rollmill import concurrency
from rollmill.concurrency import MAX_STUCK_THREADS, MAX_THREADS
from rollmill.config.rewards import GateConfig, Reward, RewardManagerConfig
from rollmill.errors import ConfigError, RewardError
from rollmill.registry import import_file, reward
from rollmill.rewards import RewardManager, RewardResult, build_reward_manager
from rollmill.rewards.base import Score
from rollmill.rewards.builtin.exact import ExactReward
from rollmill.rewards.builtin.format import FormatReward
from rollmill.rewards.builtin.math import MathReward
from rollmill.rewards.builtin.python import PythonReward
from rollmill.rewards.builtin.reasoning_gym import ReasoningGymReward
from rollmill.rewards.resources import RewardResources
from rollmill.rewards.values import validate_value
from rollmill.types import Completion, Task

Make = Callable[..., RewardManager]
FIRST = "judges0.py"


@pytest.fixture
def judge_of(tmp_path: Path) -> Make:
    """A judge of one Python function, given its source."""

    def make(source: str, name: str = "f", **keys: Any) -> RewardManager:
        path = tmp_path / f"judges{len(list(tmp_path.iterdir()))}.py"
        path.write_text("import asyncio, threading, time\n" + source)
        return build_reward_manager([PythonReward(name="python", function=f"{path}:{name}", **keys)])

    return make


@pytest.mark.slow
def test_the_reward_is_the_weighted_sum_of_the_parts_that_apply(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def parts(task, completion, scale): return {'a': scale, 'b': None, 'c': True}\n"
        "def skip(task, completion): return None\n"
    )
    configs = [
        MathReward(name="math", weight=2.0),
        FormatReward(name="format", pattern=r"\d", weight=0.5),
        FormatReward(name="format", pattern=r"\d+", whole=True),
        PythonReward(name="python", function=f"{tmp_path}/mine.py:parts", options={"scale": 3}, weight=0.1),
        PythonReward(name="python", function=f"{tmp_path}/mine.py:skip", weight=100),
    ]
    with build_reward_manager(configs) as judge:
        found = judged(judge, "5", "It is 5")
    assert found.parts == {
        "math": 1.0,
        "format": 1.0,
        "format#2": 0.0,
        "parts/a": 3.0,
        "parts/b": None,
        "parts/c": 1.0,
        "skip": None,
    }
    assert found.reward == pytest.approx(2 + 0.5 + 0.1 * 4)
    assert found.outcomes == dict.fromkeys(("math", "format", "format#2", "parts"), "ok") | {"skip": "not_applicable"}
    assert found.seconds > 0


@pytest.mark.slow
def test_nothing_applies(judge_of: Make) -> None:
    with judge_of("def f(task, completion): return {'a': None}") as judge:
        found = judged(judge, "5", "5")
    assert (found.reward, found.parts, found.outcomes) == (None, {"f/a": None}, {"f": "not_applicable"})


@pytest.mark.parametrize(
    ("keys", "gold", "text", "reward"),
    [
        ({}, "5", " 5\n", 1.0),
        ({"strip": False}, "5", " 5", 0.0),
        ({}, "Yes", "yes", 0.0),
        ({"ignore_case": True}, "Yes", "yes", 1.0),
        ({"after": "Answer:"}, 5, "Answer: 4. Answer: 5", 1.0),
        ({"after": "Answer:"}, 5, "5", 0.0),
        ({}, None, "5", None),
    ],
)
def test_exact(keys: dict[str, Any], gold: Any, text: str, reward: float | None) -> None:
    with build_reward_manager([ExactReward(name="exact", **keys)]) as judge:
        assert judged(judge, gold, text).reward == reward


@pytest.mark.parametrize(
    ("whole", "text", "reward"), [(False, "so <a>\n</a>.", 1.0), (True, "so <a>\n</a>.", 0.0), (True, "<a>\n</a>", 1.0)]
)
def test_format(whole: bool, text: str, reward: float) -> None:
    with build_reward_manager([FormatReward(name="format", pattern="<a>.*</a>", whole=whole)]) as judge:
        assert judged(judge, None, text).reward == reward


def test_a_pattern_of_exponential_time_ends_at_its_limit() -> None:
    config = FormatReward(name="format", pattern=r"(a|aa)+$", time_limit_s=0.05)
    with build_reward_manager([config]) as judge:
        found = judged(judge, None, "a" * 60 + "b")
        assert (found.reward, found.outcomes) == (0.0, {"format": "timeout"})
        assert judged(judge, None, "aaa").reward == 1.0


def test_async_functions_are_awaited_and_plain_ones_leave_the_loop_alone(judge_of: Make) -> None:
    async def twenty(judge: RewardManager) -> list[float | None]:
        found = await asyncio.gather(*(judge.score(task(i), completion(str(i))) for i in range(20)))
        return [each.reward for each in found]

    with judge_of("async def f(task, completion): await asyncio.sleep(.01); return task.answer") as judge:
        assert asyncio.run(twenty(judge)) == list(range(20))
    with judge_of(
        "def f(task, completion):\n"
        "    return None if threading.current_thread() is threading.main_thread() else task.answer",
        run_in="thread",
    ) as judge:
        assert asyncio.run(twenty(judge)) == list(range(20)) == asyncio.run(twenty(judge))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('gold')", "KeyError: 'gold'"),
        ("return 'yes'", "returned 'yes' (str); expected a number, a mapping of numbers or None"),
        ("return float('nan')", "returned nan; a reward must be a finite number"),
        ("return {'a': float('inf')}", "returned inf for part `a`; a reward must be a finite number"),
        ("return {'a': [1]}", "returned [1] (list) for part `a`"),
        ("return {1: 1}", "returned a part named 1; part names must be strings"),
        ("return {}", "returned an empty mapping"),
        ("raise SystemExit(3)", "RuntimeError: SystemExit: 3"),
        ("raise StopIteration", "StopIteration"),
        ("raise TimeoutError('mine')", "TimeoutError: mine"),
    ],
)
def test_errors_name_reward_task_and_completion(judge_of: Make, body: str, message: str) -> None:
    with judge_of(f"def f(task, completion): {body}") as judge, pytest.raises(RewardError) as caught:
        judged(judge, "5", "word " * 100)
    text = str(caught.value)
    assert text.startswith("reward `f` failed on task `t1`: ")
    assert message in text
    assert "completion 0: 'word word" in text
    assert len(text) < 400
    assert isinstance(caught.value.__cause__, Exception)


@pytest.mark.parametrize("run_in", ["thread", "process"])
@pytest.mark.parametrize("plain", ["", "async "])
def test_errors_name_the_line_of_users_code(tmp_path: Path, run_in: Literal["thread", "process"], plain: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import json\n\n\n{plain}def f(task, completion):\n    return json.loads('[')\n")
    config = PythonReward(name="python", function=f"{file}:f", run_in=run_in)
    with build_reward_manager([config]) as judge, pytest.raises(RewardError) as caught:
        judged(judge, "5", "word")
    assert f" ({file}:5)\n  completion 0: 'word'" in str(caught.value)
    assert str(caught.value).count(str(file)) == 1


def test_what_is_a_value() -> None:
    found = [validate_value(value) for value in (True, 2, 0.5, np.float32(0.5), np.int64(3), Fraction(1, 4), None)]
    assert found == [1.0, 2.0, 0.5, 0.5, 3.0, 0.25, None]
    assert all(type(value) is float for value in found[:-1])


@pytest.mark.parametrize(
    "source",
    [
        "def f(task, completion): time.sleep(30)",
        "async def f(task, completion): await asyncio.sleep(30)",
        "def f(task, completion): return asyncio.sleep(30)",
    ],
)
def test_a_time_out_is_an_outcome_of_its_own(judge_of: Make, source: str) -> None:
    with judge_of(source, time_limit_s=0.05, timeout_reward=-1.0, weight=2.0) as judge:
        found = judged(judge, "5", "5")
    assert (found.reward, found.parts, found.outcomes) == (-2.0, {"f": -1.0}, {"f": "timeout"})


def test_stuck_threads_are_counted_named_and_not_unlimited(judge_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    source = "GATE = threading.Event()\ndef f(task, completion): GATE.wait(60)"

    async def many(judge: RewardManager) -> None:
        for _ in range(MAX_STUCK_THREADS):
            assert (await judge.score(task("5"), completion("5"))).outcomes == {"f": "timeout"}
        await judge.score(task("5"), completion("5"))

    with (
        judge_of(source, time_limit_s=0.02, run_in="thread") as judge,
        pytest.raises(RewardError, match="make the function stop by itself"),
    ):
        asyncio.run(many(judge))
    assert "judges0.py:f` did not return within 0.02 s; its thread cannot be ended (8 are stuck)" in caplog.text


def test_an_async_function_that_blocks_its_event_loop_is_named_with_the_line(
    judge_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "BLOCKED_S", 0.1)
    source = "async def f(task, completion):\n    time.sleep(8)"  # its thread ends soon after the test
    with (
        judge_of(source, time_limit_s=0.05) as judge,
        pytest.raises(
            RewardError, match=r"an async reward blocks the event loop .* for more than 0\.1 s, at .*judges0"
        ),
    ):
        judged(judge, "5", "5")


@pytest.mark.slow
def test_plain_functions_run_in_processes_that_are_ended_at_their_limit(judge_of: Make) -> None:
    source = """
import os
def f(task, completion):
    print("hello")
    while task.answer == "stay":
        pass
    return os.getpid()
"""
    with judge_of(source, time_limit_s=1.0, run_in="process") as judge:
        first, second = judged(judge, "go", "5").reward, judged(judge, "go", "6").reward
        assert first == second != os.getpid()
        assert judged(judge, "stay", "5").outcomes == {"f": "timeout"}
        third = judged(judge, "go", "5").reward
    assert third not in (None, first)
    assert not psutil.pid_exists(int(third or 0))


@pytest.mark.slow
def test_processes_work_at_the_same_time_and_only_as_many_as_are_needed(judge_of: Make) -> None:
    source = "import os\ndef f(task, completion): time.sleep(0.5); return os.getpid()"

    async def three(judge: RewardManager) -> set[float | None]:
        return {each.reward for each in await judge.score_group(task("5"), [completion(text, 0) for text in "abc"])}

    with judge_of(source, processes=3) as judge:
        assert len({judged(judge, "5", "5").reward for _ in range(2)}) == 1
        assert len(asyncio.run(three(judge))) == 3
    with judge_of(source, processes=1) as judge:
        assert len(asyncio.run(three(judge))) == 1


def test_registered_functions_run_in_processes_too(tmp_path: Path) -> None:
    path = tmp_path / "plugin_of_rewards.py"
    path.write_text("import os, rollmill\n@rollmill.reward\ndef pid_of_plugin(task, completion): return os.getpid()\n")
    import_file(path)
    with build_reward_manager([PythonReward(name="python", function="pid_of_plugin", run_in="process")]) as judge:
        assert judged(judge, "5", "5").reward != os.getpid()


def test_the_decorator_marks_functions_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "plugin_of_groups.py"
    path.write_text(
        "import rollmill\n@rollmill.reward(group=True)\ndef ranks_of_plugin(task, completions): return [1, 2]\n"
    )
    import_file(path)
    with build_reward_manager([PythonReward(name="python", function="ranks_of_plugin")]) as judge:
        found = asyncio.run(judge.score_group(task("5"), [completion("a"), completion("b")]))
    assert [each.reward for each in found] == [1.0, 2.0]


def test_a_function_without_a_file_runs_in_a_thread() -> None:
    @reward
    def pid_of_nowhere(task: Any, completion: Any) -> int:
        return os.getpid()

    with build_reward_manager([PythonReward(name="python", function="pid_of_nowhere")]) as judge:
        assert judged(judge, "5", "5").reward == os.getpid()


def test_a_task_that_cannot_travel_says_what_to_do(judge_of: Make) -> None:
    with judge_of("def f(task, completion): return 1") as judge, pytest.raises(RewardError, match="set run_in: thread"):
        judged(judge, lambda: 5, "5")


def test_the_cause_has_the_traceback_of_the_function(judge_of: Make) -> None:
    with judge_of("def f(task, completion):\n    return 1 / 0") as judge, pytest.raises(RewardError) as caught:
        judged(judge, "5", "5")
    cause = caught.value.__cause__
    assert cause is not None
    assert "return 1 / 0" in str(cause.__cause__)


def test_waiting_for_a_thread_is_not_counted_against_the_limit(judge_of: Make) -> None:
    async def many(judge: RewardManager) -> set[str]:
        found = await asyncio.gather(*(judge.score(task("5"), completion("5")) for _ in range(4 * MAX_THREADS)))
        return {each.outcomes["f"] for each in found}

    before = threading.enumerate()
    with judge_of("def f(task, completion): time.sleep(.2); return 1", time_limit_s=0.75, run_in="thread") as judge:
        assert asyncio.run(many(judge)) == {"ok"}
    mine = [thread for thread in threading.enumerate() if thread.name == "rollmill-reward" and thread not in before]
    for thread in mine:
        thread.join(10)
    assert not any(thread.is_alive() for thread in mine)


def test_functions_that_cannot_be_called_are_refused_at_once(judge_of: Make) -> None:
    with pytest.raises(ConfigError, match=r"is called with \(task, completion\) and scale, which it does not take"):
        judge_of("def f(task, completion): return 1", options={"scale": 2})
    with pytest.raises(ConfigError, match=r"defines no `nothing`"):
        judge_of("def f(task, completion): return 1", name="nothing")


def test_the_first_error_cancels_what_else_is_judged(judge_of: Make, tmp_path: Path) -> None:
    source = """
CANCELLED = []
async def f(task, completion):
    if completion.index == 0:
        raise ValueError("first")
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        CANCELLED.append(completion.index)
        raise
"""
    with judge_of(source) as judge:
        with pytest.raises(RewardError, match="ValueError: first"):
            asyncio.run(judge.score_group(task("5"), [completion("a", 0), completion("b", 1), completion("c", 2)]))
        [module] = [each for each in sys.modules.values() if getattr(each, "__file__", None) == str(tmp_path / FIRST)]
    assert sorted(module.CANCELLED) == [1, 2]


RANK = "def f(task, completions): return {body}\nf.group = True"


def test_group_rewards_see_all_completions(judge_of: Make) -> None:
    group = [completion("aaa", 0), completion("b", 1), completion("cc", 2)]
    with judge_of(RANK.format(body="[{'short': -len(c.text)} for c in completions]"), weight=0.5) as judge:
        assert judge.groupwise
        found = asyncio.run(judge.score_group(task("5"), group))
        with pytest.raises(RewardError, match="`f` sees all completions of a task together"):
            judged(judge, "5", "5")
    assert [each.reward for each in found] == [-1.5, -0.5, -1.0]
    assert found[0].parts == {"f/short": -3.0}


@pytest.mark.parametrize(
    ("body", "message"), [("[1.0, 2.0]", "gave 2 values for 3 completions"), ("1.0", "one value per completion")]
)
def test_a_wrong_count_is_an_error(judge_of: Make, body: str, message: str) -> None:
    with judge_of(RANK.format(body=body)) as judge, pytest.raises(RewardError, match=message) as caught:
        asyncio.run(judge.score_group(task("5"), [completion(text) for text in "abc"]))
    assert str(caught.value).startswith("reward `f` failed on task `t1`: ")


@given(st.lists(st.tuples(st.floats(-3, 3), st.one_of(st.none(), st.floats(-3, 3))), max_size=4))
def test_weights_of_group_and_single_rewards_add_up(parts: list[tuple[float, float | None]]) -> None:
    class Single(Reward):
        value: float | None

        async def score(self, task: Any, completion: Any) -> Score:
            return Score(self.value)

    class Together(Reward):
        scope = "group"
        value: float | None

        async def score_group(self, task: Any, completions: Any, judged: Any) -> list[Score]:
            return [Score(self.value)] * len(completions)

    def reward_of(kinds: Any) -> float | None:
        built = {f"p{i}": kinds(i)(weight=weight, value=value) for i, (weight, value) in enumerate(parts)}
        judge = RewardManager(built, RewardManagerConfig(), RewardResources())
        return asyncio.run(judge.score_group(task(1), [completion("a"), completion("b")]))[1].reward

    given = [weight * value for weight, value in parts if value is not None]
    for kinds in (lambda i: Single, lambda i: Together, lambda i: (Single, Together)[i % 2]):
        assert reward_of(kinds) == (pytest.approx(sum(given)) if given else None)


def test_group_functions_may_see_what_single_rewards_said(judge_of: Make, tmp_path: Path) -> None:
    path = tmp_path / "shorter.py"
    path.write_text(
        "def f(task, completions, judged):\n"
        "    return [-len(c.text) * parts['exact'] for c, parts in zip(completions, judged)]\nf.group = True\n"
    )
    group = [completion("5", 0), completion(" 5 ", 1), completion("6", 2)]
    for run_in in ("process", "thread"):
        function = PythonReward(name="python", function=f"{path}:f", run_in=run_in)
        with build_reward_manager([ExactReward(name="exact", weight=10), function]) as judge:
            found = asyncio.run(judge.score_group(task("5"), group))
        assert [each.reward for each in found] == [9.0, 7.0, 0.0]


def gated(**keys: Any) -> FormatReward:
    return FormatReward(name="format", pattern=r"^<a>", gate=GateConfig(at_least=1.0, **keys), weight=0.25)


def test_a_gate_that_is_not_passed_decides_alone(judge_of: Make) -> None:
    refused = PythonReward(name="python", function=f"{__file__}:never_called", run_in="thread")
    with build_reward_manager([refused, gated(otherwise=-0.5)]) as judge:
        found = judged(judge, "5", "5")
    assert found.reward == -0.5
    assert found.parts == {"format": 0.0}
    assert found.outcomes == {"format": "ok", "never_called": "gated"}
    assert found.failed_gate == "format"


def never_called(task: Any, completion: Any) -> float:
    raise AssertionError("a closed gate must keep everything else from judging")


def test_a_gate_that_is_passed_counts_like_any_reward() -> None:
    with build_reward_manager([ExactReward(name="exact", after="<a>"), gated()]) as judge:
        found = judged(judge, "5", "<a>5")
    assert (found.reward, found.failed_gate) == (1.25, None)


def test_a_gate_that_does_not_count_yet_lets_everything_pass() -> None:
    gate = gated(otherwise=-1.0).model_copy(update={"after_steps": 3})
    with build_reward_manager([ExactReward(name="exact"), gate]) as judge:
        for version, reward, closed_by in ((2, 1.0, None), (3, -1.0, "format")):
            written = completion("5")
            written.versions = np.array([version], np.int32)
            found = asyncio.run(judge.score(task("5"), written))
            assert (found.reward, found.failed_gate, found.parts["format"]) == (reward, closed_by, 0.0)


def test_a_gate_compares_what_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "parts.py"
    path.write_text("def f(task, completion): return {'a': 9, 'b': -9}\n")
    gate = PythonReward(name="python", function=f"{path}:f", clip=(0, 1), gate=GateConfig(at_least=1, otherwise=-5))
    with build_reward_manager([gate]) as judge:
        assert judged(judge, "5", "5").reward == 1.0


class Both(Reward):
    scope = "either"

    async def score(self, task: Task, completion: Completion) -> Score:
        raise AssertionError("a closed gate must keep everything else from judging")

    async def score_group(self, task: Task, completions: Any, judged: Any) -> list[Score]:
        raise AssertionError("not asked here")


def test_a_closed_gate_is_the_outcome_of_rewards_of_either_kind() -> None:
    gate = gated(otherwise=-1.0)
    with build_reward_manager([gate]) as closed:
        rewards = {**closed._rewards, "both": Both()}
        judge = RewardManager(rewards, RewardManagerConfig(), RewardResources())
        assert judged(judge, "5", "5").outcomes == {"format": "ok", "both": "gated"}


def test_what_rewards_share_is_made_once_by_many_threads_and_all_of_it_closed() -> None:
    resources, made, closed, ready = RewardResources(), [], [], threading.Barrier(8)

    class Slow:
        def __init__(self) -> None:
            time.sleep(0.05)
            made.append(self)

        def close(self) -> None:
            closed.append(self)
            raise OSError("cannot close")

    def ask() -> None:
        ready.wait()
        resources.shared("slow", Slow)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    resources.shared("other", Slow)
    with pytest.raises(OSError, match="cannot close"):
        resources.close()
    assert len(made) == len(closed) == 2


def test_a_reward_that_compares_completions_cannot_be_a_gate(judge_of: Make) -> None:
    with pytest.raises(ConfigError, match="reward `f` compares completions, so it cannot be a gate"):
        judge_of(RANK.format(body="[1.0 for _ in completions]"), gate=GateConfig(at_least=1))


def test_of_several_gates_the_lowest_counts() -> None:
    other = ExactReward(name="exact", gate=GateConfig(at_least=0.5, otherwise=-2.0))
    with build_reward_manager([gated(otherwise=-1.0), other]) as judge:
        assert judged(judge, "5", "6").reward == -2.0
        assert judged(judge, None, "6").reward == -1.0  # exact does not apply, so it is passed


def test_group_rewards_do_not_count_where_a_gate_is_closed(judge_of: Make, tmp_path: Path) -> None:
    path = tmp_path / "longer.py"
    path.write_text("def f(task, completions): return [len(c.text) for c in completions]\nf.group = True\n")
    with build_reward_manager([gated(), PythonReward(name="python", function=f"{path}:f")]) as judge:
        found = asyncio.run(judge.score_group(task("5"), [completion("<a>", 0), completion("none", 1)]))
    assert [each.reward for each in found] == [3.25, 0.0]
    assert [each.parts["f"] for each in found] == [3.0, 4.0]


@pytest.mark.slow
def test_parts_are_clipped_before_their_weight_and_the_sum_at_the_end(judge_of: Make, tmp_path: Path) -> None:
    path = tmp_path / "many.py"
    path.write_text(
        "def one(task, completion): return {'a': 5, 'b': -5, 'c': None}\n"
        "def group(task, completions): return [100.0 for _ in completions]\ngroup.group = True\n"
    )
    one = PythonReward(name="python", function=f"{path}:one", clip=(-1, 2), weight=10)
    group = PythonReward(name="python", function=f"{path}:group")
    with build_reward_manager([one]) as judge:
        found = judged(judge, "5", "5")
    assert found.parts == {"one/a": 2.0, "one/b": -1.0, "one/c": None}
    assert found.reward == 10.0
    with build_reward_manager(
        [one.model_copy(update={"weight": -9.0}), group], RewardManagerConfig(clip=(0, 95))
    ) as judge:
        [found] = asyncio.run(judge.score_group(task("5"), [completion("5")]))
    assert found.reward == 100 - 9  # the sum is clipped once, at the end


def test_a_reward_may_wait_for_later_weights() -> None:
    late = ExactReward(name="exact", after_steps=3)
    with build_reward_manager([late, FormatReward(name="format", pattern="5", weight=0.5)]) as judge:
        for version, reward in ((2, 0.5), (3, 1.5)):
            written = completion("5")
            written.versions = np.array([version, version - 1], np.int32)
            found = asyncio.run(judge.score(task("5"), written))
            assert (found.reward, found.parts["exact"]) == (reward, 1.0)


def test_what_is_late_has_an_outcome_and_a_reward_of_its_own(judge_of: Make, tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\ndef f(task, completion): time.sleep(1)\n")
    slow = PythonReward(name="python", function=f"{path}:f", timeout_reward=-1, processes=1)

    async def both(judge: RewardManager) -> list[RewardResult]:
        return await asyncio.gather(*(judge.score(task("5"), completion("5")) for _ in range(2)))

    with build_reward_manager([slow, ExactReward(name="exact")], RewardManagerConfig(deadline_s=0.2)) as judge:
        found = asyncio.run(both(judge))
    assert [each.outcomes for each in found] == [{"f": "late", "exact": "ok"}] * 2
    assert [each.reward for each in found] == [0.0, 0.0]


@pytest.mark.slow
def test_spans_tell_waiting_from_work(tmp_path: Path) -> None:
    path = tmp_path / "timed.py"
    path.write_text("import time\ndef f(task, completion):\n    time.sleep(0.2)\n    return 1\n")

    async def three(judge: RewardManager) -> list[RewardResult]:
        return await asyncio.gather(*(judge.score(task("5"), completion("5")) for _ in range(3)))

    with build_reward_manager([PythonReward(name="python", function=f"{path}:f", processes=1)]) as judge:
        judged(judge, "5", "5")  # starts the process
        spans = sorted((each.spans["f"] for each in asyncio.run(three(judge))), key=lambda span: span.ended)
    assert all(span.ended - span.started >= 0.19 for span in spans)
    assert [span.started - span.requested >= least for span, least in zip(spans, (0, 0.19, 0.38), strict=True)] == [
        True
    ] * 3
    assert spans[0].started - spans[0].requested < spans[2].started - spans[2].requested


@pytest.mark.parametrize("section", [Reward, RewardManagerConfig])
def test_bounds_the_wrong_way_round_are_refused(section: type) -> None:
    with pytest.raises(ValueError, match="the lower bound 2 is above the upper 1"):
        section(clip=(2, 1))


@pytest.mark.slow
def test_reasoning_gym_scores_its_own_tasks() -> None:
    gym = pytest.importorskip("reasoning_gym")

    def made(name: str, **options: Any) -> dict[str, Any]:
        entry = gym.create_dataset(name, size=1, seed=3, **options)[0]
        return {"reasoning_gym": {"name": name, "options": options}, "entry": entry}

    chain, factors = made("chain_sum", min_terms=2, max_terms=2), made("prime_factorization")
    countdown = made("countdown")
    with build_reward_manager([ReasoningGymReward(name="reasoning_gym", after="Answer:", time_limit_s=1.0)]) as judge:
        gold = chain["entry"]["answer"]
        assert judged(judge, None, f"Answer: {gold}\n", **chain).reward == 1.0
        assert 0 < (judged(judge, None, f"Answer: it is {gold}", **chain).reward or 0) < 1
        assert judged(judge, None, gold, **chain).outcomes == {"reasoning_gym": "no_answer"}
        assert judged(judge, None, "Answer: abc", **factors).outcomes == {"reasoning_gym": "unscorable"}
        endless = judged(judge, None, "Answer: 9**9**9**9", **countdown)
        assert (endless.reward, endless.outcomes) == (0.0, {"reasoning_gym": "timeout"})
        with pytest.raises(RewardError, match="not made by a reasoning-gym generator"):
            judged(judge, None, "Answer: 5")


def test_async_rewards_are_timed_and_run_while_the_callers_loop_is_blocked(tmp_path: Path) -> None:
    """A training step blocks the event loop for longer than the limit; the reward, quicker than that, is in time."""
    (tmp_path / "slow.py").write_text(
        "import asyncio\nasync def slow(task, completion):\n    await asyncio.sleep(0.05)\n    return 0.5\n"
    )
    config = PythonReward(name="python", function=f"{tmp_path / 'slow.py'}:slow", time_limit_s=0.3)

    async def main() -> RewardResult:
        with build_reward_manager([config]) as judge:
            pending = asyncio.ensure_future(judge.score(task(1), completion("x")))
            await asyncio.sleep(0.01)
            time.sleep(0.6)
            return await pending

    judgement = asyncio.run(main())
    assert (judgement.reward, judgement.outcomes) == (0.5, {"slow": "ok"})


class Detailed(Reward):
    """A reward that logs a number beside its value."""

    async def score(self, task: Task, completion: Completion) -> Score:
        return Score(1.0, details={"physics": 0.25})


def test_details_are_kept_by_name_and_not_counted() -> None:
    gate = GateConfig(at_least=2.0, otherwise=-1.0)
    counted, closed = (
        RewardManager({"mine": Detailed(weight=2.0, gate=each)}, RewardManagerConfig(), RewardResources())
        for each in (None, gate)
    )
    found = judged(counted, "x", "x")
    assert (found.reward, found.parts, found.details) == (2.0, {"mine": 1.0}, {"mine/physics": 0.25})
    assert (judged(closed, "x", "x").reward, judged(closed, "x", "x").details) == (-1.0, {"mine/physics": 0.25})
