"""The client of judges: what is sent, what is tried again, what ends the run, and what is counted."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.chat_server import Answer, chat_server, failing, shown
from support.forks import ForkedPopen
from support.reward_helpers import completion, judged, task
from support.tiny import tiny_run

from rollmill.cli import main
from rollmill.errors import ConfigError, RewardError
from rollmill.launch import run
from rollmill.rewards import RewardManager, RewardResult, build_reward_manager
from rollmill.rewards.builtin.judge import JudgeReward
from rollmill.rewards.judges import endpoint as endpoint_module
from rollmill.rewards.judges.failures import retry_after
from rollmill.trackers.run_views import PlainView

SEVEN = 'It is fine.\n{"score": 7}'


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "MIN_BACKOFF_S", 0.01)


def reward(url: str, **keys: Any) -> JudgeReward:
    return JudgeReward(name="judge", endpoint=url, model="m", **keys)


def many(judge: RewardManager, count: int) -> list[RewardResult]:
    """As many different completions at once."""

    async def all_of_them() -> list[RewardResult]:
        return list(await asyncio.gather(*(judge.score(task("5"), completion(f"r{i}", i)) for i in range(count))))

    return asyncio.run(all_of_them())


def test_a_request_holds_the_question_and_no_key() -> None:
    with (
        chat_server([SEVEN]) as server,
        build_reward_manager([reward(server.url, options={"top_k": 3, "seed": None}, rubric="Be strict.")]) as judge,
    ):
        found = judged(judge, "5", "It is five.")
    assert (found.reward, found.outcomes) == (pytest.approx(0.7), {"judge": "ok"})
    [body] = server.requests
    assert (body["model"], body["temperature"], body["max_tokens"], body["top_k"]) == ("m", 0.0, 1024, 3)
    assert "seed" not in body
    assert "response_format" not in body
    text = shown(body)
    assert all(part in text for part in ("question", "It is five.", "Be strict.", "\n5\n"))
    assert server.keys == ["Bearer none"]


def test_the_key_comes_from_the_environment_and_shows_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    monkeypatch.setenv("MY_KEY", "top-secret")
    with (
        chat_server([SEVEN, failing(401, "wrong key top-secret")]) as server,
        build_reward_manager([reward(server.url, api_key_env="MY_KEY")]) as judge,
    ):
        assert judged(judge, "5", "a").reward == pytest.approx(0.7)
        with pytest.raises(RewardError, match=r"status 401 \(wrong key \*\*\*\), the key is refused; correct the") as e:
            judged(judge, "5", "b")
    assert server.keys == ["Bearer top-secret"] * 2
    assert "top-secret" not in str(e.value)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match=r"environment variable MY_KEY \(api_key_env\) is not set"):
        build_reward_manager([reward("http://localhost/v1", api_key_env="MY_KEY")])


@pytest.mark.parametrize(
    "trouble",
    [
        failing(429, "slow down"),
        failing(500, "oh"),
        failing(503, "later", **{"Retry-After": "0.02"}),
        Answer(drop=True),
        Answer(body=b"<html>hello</html>", headers={"Content-Type": "text/html"}),
        Answer(body=b"{broken"),
        Answer(body=[1, 2]),
        Answer(body={"choices": []}),
        Answer(body={"choices": [{"message": None}]}),
        Answer(body={"choices": {"a": 1}}),
        Answer(body={"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": "many"}}),
    ],
    ids=["429", "500", "503", "drop", "html", "broken", "list", "empty", "null", "mapping", "usage"],
)
def test_what_may_pass_is_tried_again(trouble: Answer) -> None:
    with (
        chat_server([trouble, trouble, SEVEN]) as server,
        build_reward_manager([reward(server.url)]) as judge,
    ):
        assert judged(judge, "5", "a").reward == pytest.approx(0.7)
        counters = judge.counters()
    assert len(server.requests) == 3
    assert (counters["judge/calls"], counters["judge/retries"]) == (1, 2)


def test_an_answer_that_does_not_come_is_asked_for_again() -> None:
    with (
        chat_server([Answer("late", delay_s=60), SEVEN]) as server,
        build_reward_manager([reward(server.url, try_s=1.0)]) as judge,
    ):
        assert judged(judge, "5", "a").reward == pytest.approx(0.7)
        assert judge.counters()["judge/retries"] == len(server.requests) - 1


def test_too_many_requests_are_no_failed_tries() -> None:
    """However often an endpoint says so: only the deadline counts."""
    with (
        chat_server([failing(429, "slow down")] * 5 + [SEVEN]) as server,
        build_reward_manager([reward(server.url, tries=2)]) as judge,
    ):
        assert judged(judge, "5", "a").reward == pytest.approx(0.7)


def test_what_a_server_counts_and_writes_badly_does_no_harm(tmp_path: Path) -> None:
    """No numbers of tokens, and half a surrogate pair, which a cache could not keep."""
    message = {"role": "assistant", "content": 'x \ud800 {"score": 7}'}
    body = {
        "choices": [{"message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": None, "completion_tokens": None},
    }
    with (
        chat_server([Answer(body=body)]) as server,
        build_reward_manager([reward(server.url, cache=tmp_path / "cache")]) as judge,
    ):
        assert [judged(judge, "5", "a").reward for _ in range(2)] == pytest.approx([0.7] * 2)
        assert judge.counters()["judge/cached"] == 1
        assert judge.counters()["judge/prompt_tokens"] == 0


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([failing(500, "oh")], r"status 500 \(oh\); gave up after 3 tries; is the server up"),
        ([Answer(drop=True)], r"no connection \(.+\); gave up after 3 tries"),
        ([failing(429, "no money", "insufficient_quota")], r"status 429 \(no money\); the account has no quota left"),
        ([failing(401, "no")], r"status 401 \(no\), the key is refused; name the key's variable: api_key_env"),
        (
            [failing(403, "no")],
            r"whatever the response: .+ status 403 \(no\); is the key \(api_key_env\) allowed to use",
        ),
        ([failing(404, "no such model")], r"status 404 \(no such model\); correct `model`, or `endpoint`"),
        ([failing(400, "no temperature")], r"status 400 \(no temperature\); it does not take the request; see `opt"),
        ([failing(429, "x", **{"Retry-After": "900"})], r"status 429 \(x\), wait 900 s; gave up after 1 tries"),
        ([failing(418, "tea")], r"status 418 \(tea\); is `endpoint` the base URL"),
    ],
)
def test_an_endpoint_that_does_not_work_ends_the_run(answers: list[Answer], message: str) -> None:
    with (
        chat_server(answers) as server,
        build_reward_manager([reward(server.url, tries=3)]) as judge,
        pytest.raises(RewardError, match=message) as caught,
    ):
        judged(judge, "5", "a")
    assert f"the judge m at {server.url}: " in str(caught.value)


def test_no_server_at_all() -> None:
    with chat_server([SEVEN]) as server:
        url = server.url
    with build_reward_manager([reward(url, tries=2)]) as judge, pytest.raises(RewardError, match="no connection"):
        judged(judge, "5", "a")


def test_one_bad_request_among_good_ones_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    with (
        chat_server(lambda body: failing(500, "this text breaks me") if "r3" in shown(body) else SEVEN) as server,
        build_reward_manager([reward(server.url, tries=4, max_in_flight=2, timeout_reward=-1)]) as judge,
    ):
        found = many(judge, 12)
        assert judge.counters()["judge/failed"] == 1
    assert [each.outcomes["judge"] for each in found] == ["ok"] * 3 + ["timeout"] + ["ok"] * 8
    assert found[3].reward == -1
    assert "this text breaks me" in caplog.text


def test_a_response_that_breaks_the_server_alone_is_no_outage() -> None:
    """Nothing else is under way, so the endpoint is asked for a word."""
    with (
        chat_server(lambda body: Answer(drop=True) if "poison" in shown(body) else SEVEN) as server,
        build_reward_manager([reward(server.url, tries=2, timeout_reward=-1)]) as judge,
    ):
        found = judged(judge, "5", "poison")
    assert (found.reward, found.outcomes) == (-1, {"judge": "timeout"})
    assert [len(body["messages"]) for body in server.requests] == [2, 2, 1]


@pytest.mark.parametrize("status", [400, 403, 422])
def test_an_endpoint_that_refuses_everything_later_ends_the_run(status: int) -> None:
    """An account without money, a filter that refuses the prompt: it is not the response's fault, so it earns no 0."""
    with (
        chat_server([SEVEN, failing(status, "your credit balance is too low")]) as server,
        build_reward_manager([reward(server.url)]) as judge,
    ):
        assert judged(judge, "5", "a").reward == pytest.approx(0.7)
        with pytest.raises(RewardError, match=rf"whatever the response: .+ status {status} \(your credit balance"):
            judged(judge, "5", "b")


@pytest.mark.parametrize("status", [400, 403, 422])
def test_a_refused_response_ends_no_run(status: int) -> None:
    """Not even the first: a filter in front of the model does not like what it holds."""
    with (
        chat_server(lambda body: failing(status, "no") if "<script>" in shown(body) else SEVEN) as server,
        build_reward_manager([reward(server.url, unparsable_reward=-1)]) as judge,
    ):
        assert judged(judge, "5", "<script>alert(1)</script>").outcomes == {"judge": "refused"}
        assert judged(judge, "5", "a").outcomes == {"judge": "ok"}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (failing(400, "This model's maximum context length is 9 tokens"), "too_long"),
        (failing(400, "x", "context_length_exceeded"), "too_long"),
        (failing(400, "x", "content_filter"), "refused"),
        (failing(422, "cannot digest this"), "refused"),
    ],
)
def test_what_lies_in_the_response_earns_a_low_reward(answer: Answer, outcome: str) -> None:
    """422 may be the request's fault, but not after the same one was taken for another response."""
    with (
        chat_server([SEVEN, answer, SEVEN]) as server,
        build_reward_manager([reward(server.url, unparsable_reward=-0.5)]) as judge,
    ):
        judged(judge, "5", "a")
        found = judged(judge, "5", "x" * 200)
    assert (found.reward, found.outcomes) == (-0.5, {"judge": outcome})


def test_a_prompt_that_is_too_long_is_not_the_responses_fault() -> None:
    with (
        chat_server([failing(400, "x", "context_length_exceeded")]) as server,
        build_reward_manager([reward(server.url, rubric="word " * 50)]) as judge,
        pytest.raises(RewardError, match=r"whatever the response: .+ status 400 \(x\); shorten the prompt or `rubric`"),
    ):
        judged(judge, "5", "a")


def test_too_long_responses_are_not_sent() -> None:
    with chat_server([SEVEN]) as server, build_reward_manager([reward(server.url, response_limit=5)]) as judge:
        assert judged(judge, "5", "123456").outcomes == {"judge": "too_long"}
        assert judged(judge, "5", "12345").outcomes == {"judge": "ok"}
    assert len(server.requests) == 1


def test_no_more_requests_at_once_than_allowed() -> None:
    with (
        chat_server(lambda body: Answer(SEVEN, delay_s=0.02)) as server,
        build_reward_manager([reward(server.url, max_in_flight=3)]) as judge,
    ):
        assert [each.reward for each in many(judge, 12)] == pytest.approx([0.7] * 12)
    assert server.most <= 3


def test_rewards_with_the_same_settings_share_connections_and_limits() -> None:
    with (
        chat_server(lambda body: Answer(SEVEN, delay_s=0.02)) as server,
        build_reward_manager(
            [reward(server.url, max_in_flight=1), reward(server.url, max_in_flight=1, weight=2)]
        ) as judge,
    ):
        assert many(judge, 3)[0].parts == {"judge": pytest.approx(0.7), "judge#2": pytest.approx(0.7)}
        assert (judge.counters()["judge/calls"], judge.counters()["judge#2/calls"]) == (3, 3)
    assert server.most == 1


def test_tokens_cost() -> None:
    with (
        chat_server([SEVEN]) as server,
        build_reward_manager([reward(server.url, prompt_price=2.0, completion_price=10.0)]) as judge,
    ):
        many(judge, 4)
        found = judge.counters()
    assert (found["judge/prompt_tokens"], found["judge/completion_tokens"]) == (400, 80)
    assert found["judge/cost"] == pytest.approx((400 * 2 + 80 * 10) / 1e6)


def test_judging_goes_on_while_the_callers_loop_is_blocked() -> None:
    async def main() -> RewardResult:
        with (
            chat_server([Answer(status=500, delay_s=0.2), SEVEN]) as server,
            build_reward_manager([reward(server.url)]) as judge,
        ):
            pending = asyncio.ensure_future(judge.score(task(1), completion("x")))
            while not server.requests:
                await asyncio.sleep(0.01)
            while len(server.requests) < 2:  # nothing of this loop runs now
                time.sleep(0.01)
            return await pending

    assert asyncio.run(main()).reward == pytest.approx(0.7)


def test_a_cancelled_judgement_frees_its_place() -> None:
    async def main(judge: RewardManager) -> float | None:
        first = asyncio.ensure_future(judge.score(task(1), completion("r0")))
        while not server.requests:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return (await judge.score(task(1), completion("r1"))).reward

    with (
        chat_server([Answer(SEVEN, delay_s=60), SEVEN]) as server,
        build_reward_manager([reward(server.url, max_in_flight=1)]) as judge,
    ):
        assert asyncio.run(main(judge)) == pytest.approx(0.7)


def test_closing_fails_what_is_under_way() -> None:
    """With an error, not as if the caller had been cancelled; and closing does not wait for the endpoint."""

    async def main(judge: RewardManager) -> list[BaseException | RewardResult]:
        pending = [asyncio.ensure_future(judge.score(task(1), completion(f"r{i}"))) for i in range(5)]
        while not server.requests:
            await asyncio.sleep(0.01)
        await judge.aclose()
        return await asyncio.gather(*pending, return_exceptions=True)

    with (
        chat_server([Answer(SEVEN, delay_s=60)]) as server,
        build_reward_manager([reward(server.url, max_in_flight=2)]) as judge,
    ):
        found = asyncio.run(main(judge))
    assert all(isinstance(each, RewardError) and "the judge was closed" in str(each) for each in found)


@pytest.mark.slow
def test_an_interrupt_ends_grading(tmp_path: Path) -> None:
    """Ctrl-C while an endpoint does not answer."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"response": "4", "answer": "4"}\n' * 8)
    with chat_server([Answer(SEVEN, delay_s=600)]) as server:
        options = ["--option", f"endpoint={server.url}", "--option", "model=m"]
        argv = [sys.executable, "-m", "rollmill", "grade", "--reward", "judge", "--input", str(rows), *options]
        process = ForkedPopen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while len(server.requests) < 8 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert b"never awaited" not in errors
    assert b"Task was destroyed" not in errors


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("12", 12.0), ("0.5", 0.5), ("-3", 0.0), ("", 0.0), ("soon", 0.0), ("Thu, 01 Jan 1970 00:02:00 GMT", 20.0)],
)
def test_retry_after(text: str, seconds: float) -> None:
    assert retry_after({"retry-after": text}, now=100.0) == seconds


def test_structured_replies_are_asked_for_by_schema() -> None:
    with (
        chat_server(['{"thoughts": "{} {\\"score\\": 1}", "score": 9}']) as server,
        build_reward_manager([reward(server.url, structured=True)]) as judge,
    ):
        assert judged(judge, "5", "a").reward == pytest.approx(0.9)
    form = server.requests[0]["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["schema"]["required"] == ["thoughts", "score"]


def test_grade_asks_an_endpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2+2?", "response": "4", "answer": "4"}\n{"response": "5", "answer": "4"}\n')

    def script(body: dict[str, Any]) -> str:
        return '{"score": 10}' if re.search(r">\n4\n</response", shown(body)) else '{"score": 2}'

    with chat_server(script) as server:
        argv = ["grade", "--reward", "judge", "--input", str(rows), "--output", str(tmp_path / "out.jsonl"), "--json"]
        assert main([*argv, "--option", f"endpoint={server.url}", "--option", "model=m"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["mean"] == pytest.approx(0.6)
    assert summary["counters"]["judge/calls"] == 2
    assert main([*argv, "--option", "endpoint=localhost:80", "--option", "model=m"]) == 2
    assert "expected a URL such as http://localhost:8000/v1" in capsys.readouterr().err


def test_grade_does_not_judge_without_a_picture_that_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    argv = ["grade", "--input", str(rows), "--output", str(tmp_path / "out.jsonl")]
    for column in ("image", "images"):
        rows.write_text(
            json.dumps({"prompt": "What is it?", "response": "5", "answer": "5", column: "gone.png"}) + "\n"
        )
        with chat_server(['{"score": 10}']) as server:
            asked = ["--reward", "judge", "--option", f"endpoint={server.url}", "--option", "model=m"]
            assert main([*argv, *asked]) == 1
            assert server.requests == []
        assert "`images` is 'gone.png', not images that the taskset loaded" in capsys.readouterr().err
        assert main([*argv, "--reward", "exact"]) == 0  # needs no picture


def test_grade_compares_the_lines_of_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "answers.jsonl"
    lines = [("first", "a"), ("first", "bbb"), ("first", "cc"), ("second", "dd"), ("second", "e")]
    rows.write_text("".join(json.dumps({"prompt": g, "response": r, "group": g}) + "\n" for g, r in lines))

    def script(body: dict[str, Any]) -> str:
        """The longest is the best."""
        found = re.findall(r">\n(\w+)\n</response", shown(body))
        return json.dumps({"ranking": sorted(range(1, len(found) + 1), key=lambda number: -len(found[number - 1]))})

    with chat_server(script) as server:
        argv = ["grade", "--reward", "ranking", "--input", str(rows)]
        assert main([*argv, "--option", f"endpoint={server.url}", "--option", "model=m"]) == 0
    graded = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["reward"] for row in graded] == [0, 1, 0.5, 1, 0]


def test_a_judge_that_mostly_gives_no_verdict_is_said(tmp_path: Path) -> None:
    out = io.StringIO()
    with chat_server(["I would rather not."]) as server:
        reward = {"name": "judge", "endpoint": server.url, "model": "m"}
        changes: dict[str, Any] = {"rewards": [reward], "rollout": {"group_size": 2}, "evaluation": None}
        path = tiny_run(tmp_path, **changes, stages=None, algorithm={"name": "grpo"}, steps=2)
        run(path, out=tmp_path / "out", view=PlainView(out))
    said = "8 of 8 judgements of reward `judge` got no verdict from its model and earned its unparsable_reward"
    assert out.getvalue().count(said) == 1


def test_an_endpoint_has_to_fail_before_judging_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or else its completions would all be late, and the run would go on."""
    reward = {"name": "judge", "endpoint": "http://localhost:1/v1", "model": "m"}
    for deadline_s, code in ((240, 2), (241, 0)):
        path = tiny_run(tmp_path, rewards=[reward], reward_settings={"deadline_s": deadline_s})
        assert main(["check", str(path), "--no-data"]) == code
    assert "reward_settings.deadline_s (240) is not above deadline_s + try_s (240)" in capsys.readouterr().err


def test_a_run_with_judges_counts_each_step(tmp_path: Path) -> None:
    def script(body: dict[str, Any]) -> str:
        numbers = re.findall(r"^Response (\d+):$", shown(body), re.M)
        if numbers:
            return f'{{"ranking": [{", ".join(numbers)}]}}'
        return '{"score": 4}'

    with chat_server(script) as server:
        common = {"endpoint": server.url, "model": "m", "prompt_price": 1000.0}
        path = tiny_run(
            tmp_path,
            rewards=[{"name": "judge", **common}, {"name": "ranking", "shuffles": 1, "weight": 0.5, **common}],
            rollout={"batch": 2, "group_size": 3},
            evaluation=None,
            stages=[{"name": "only", "algorithm": {"name": "grpo"}, "steps": 2}],
        )
        assert main(["run", str(path), "--out", str(tmp_path / "out")]) == 0
    assert main(["check", str(tmp_path / "out" / "config.yaml")]) == 0  # with every default written out
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [step["judging/judge/calls"] for step in steps] == [6, 6]
    assert all(0 <= step["judging/ranking/calls"] <= 2 for step in steps)
    assert steps[1]["judging/judge/cost"] == pytest.approx(0.6)
    assert steps[0]["reward/judge"] == pytest.approx(0.4)
    assert steps[0]["reward/ranking"] == pytest.approx(0.5)
