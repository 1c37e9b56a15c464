"""The tree of a rollout's calls: every completion is learned from exactly once, with exactly its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.data.picture_turns import PICTURE_TURNS, PictureTurn
from rollmill.progress import Progress, progress_counters
from rollmill.rollout.recorder import REPETITION_KEY, RecordedCall, Recorder
from rollmill.types import DRAFTED_KEY, Completion, DraftUse, Experience, StopReason, drafted_tokens


def call(
    recorder: Recorder,
    prompt: list[int],
    tokens: list[int],
    *,
    learned: bool = True,
    heat: float = 1.0,
    role: str | None = None,
    turns: tuple[PictureTurn, ...] | None = None,
    **of: Any,
) -> RecordedCall:
    """Record a completion whose log-probs tell which token of which call they belong to; `of` it, what differs."""
    number, n = len(recorder.calls), len(tokens)
    completion = Completion(
        np.array(prompt, np.int32),
        np.array(tokens, np.int32),
        -np.arange(1, n + 1, dtype=np.float32) - 100 * number,
        np.array(of.pop("versions", [number] * n), np.int32),
        kept_logmass=np.array(of.pop("kept", [0.0] * n), np.float32),
        text=f"call {number}",
        stop_reason=of.pop("stopped", StopReason.EOS),
        seed=0,
        index=0,
        **of,
    )
    return recorder.add(completion, f"prompt {number}", heat, learned=learned, role=role, turns=turns)


def experiences(recorder: Recorder) -> list[Experience]:
    return recorder.experiences(id="g/0", task_id="task", group="g", decode=lambda ids: " ".join(map(str, ids)))


def test_turns_that_go_on_are_one_experience() -> None:
    recorder = Recorder()
    call(recorder, [1, 2], [3, 4])
    call(recorder, [1, 2, 3, 4, 5], [6])
    [one] = experiences(recorder)
    assert one.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert one.action_mask.tolist() == [False, False, True, True, False, True]
    assert one.logprobs.tolist() == [0, 0, -1, -2, 0, -101]
    assert one.versions.tolist() == [-1, -1, 0, 0, -1, 1]
    assert (one.logprobs.dtype, one.versions.dtype) == (np.float32, np.int32)
    assert [(turn.role, turn.text) for turn in one.turns] == [
        ("prompt", "prompt 0"), ("assistant", "call 0"), ("observation", "5"), ("assistant", "call 1"),
    ]  # fmt: skip
    assert (one.id, one.response, one.episode is not None) == ("g/0", "call 1", False)


def test_every_token_keeps_the_version_that_sampled_it() -> None:
    """Weights may change within a completion; staleness, freshness and interpolated proximal log-probs count on it."""
    recorder = Recorder()
    call(recorder, [1, 2], [3, 4, 5, 6], versions=[4, 4, 5, 7])
    call(recorder, [1, 2, 3, 4, 5, 6, 7], [8, 9], versions=[7, 8])
    [one] = experiences(recorder)
    assert one.versions.tolist() == [-1, -1, 4, 4, 5, 7, -1, 7, 8]


def test_an_experience_says_which_tokens_were_drafted() -> None:
    recorder, drafted = Recorder(), np.array([1, 1, 0, 2, 3], np.uint8)
    call(recorder, [1, 2], [3, 4, 5, 6, 7], drafted=drafted)
    call(recorder, [1, 2, 3, 4, 5, 6, 7, 8], [9], drafted=drafted[:1])
    [one] = experiences(recorder)
    assert one.info[DRAFTED_KEY] == {"earlier": [[2, 4], [8, 9]], "guess": [[5, 6]], "rejected": [[6, 7]]}
    found = drafted_tokens(one)
    assert found is not None
    assert found.tolist() == [0, 0, 1, 1, 0, 2, 3, 0, 1]
    one.info[DRAFTED_KEY] = {"earlier": [[-3, 1], None, ["a", 2], [8, 99]], "guess": 3, "unknown": [[0, 1]]}
    found = drafted_tokens(one)
    assert found is not None
    assert np.flatnonzero(found == DraftUse.EARLIER).tolist() == [0, 8]
    one.info[DRAFTED_KEY] = [1]
    assert drafted_tokens(one) is None


def test_every_completion_counts_as_progress() -> None:
    """A supervisor tells by it that rollouts are made."""
    recorder, before = Recorder(), progress_counters()[Progress.TOKENS]
    for number in (1, 2):
        call(recorder, [1], [2])
        assert progress_counters()[Progress.TOKENS] == before + number


def with_routing(recorder: Recorder, prompt: list[int], tokens: list[int]) -> None:
    """Record a completion whose experts tell which call has fed the token; its last one was never fed."""
    number = len(recorder.calls)
    call(recorder, prompt, tokens)
    routing = [[[10 * number + at]] for at in range(len(prompt) + len(tokens) - 1)]
    recorder.calls[-1].completion.routing = np.array(routing, np.uint8)


def test_a_token_has_the_experts_of_the_first_call_that_fed_it() -> None:
    recorder = Recorder()
    with_routing(recorder, [1, 2], [3, 4])
    with_routing(recorder, [1, 2, 3, 4, 5], [6, 7])
    with_routing(recorder, [1, 2, 3, 9], [8])
    call(recorder, [1, 2, 3, 4, 5, 6, 7, 8], [9])  # of an engine that records none
    one, other = sorted(experiences(recorder), key=lambda each: -len(each.token_ids))
    assert one.routing is not None
    assert one.routing[:, 0, 0].tolist() == [0, 1, 2, 13, 14, 15]
    assert other.routing is not None
    assert other.routing[:, 0, 0].tolist() == [20, 21, 22, 23]
    assert len(one.token_ids) == 9


TOKENS = st.lists(st.integers(0, 1), max_size=4)


@given(st.lists(st.tuples(TOKENS, TOKENS, st.sampled_from([1.0, 0.5])), max_size=8))
def test_a_call_goes_on_from_the_longest_that_it_begins_with(calls: list[tuple[list[int], list[int], float]]) -> None:
    recorder = Recorder()
    for prompt, tokens, heat in calls:
        call(recorder, [7, *prompt], tokens, heat=heat)
    for number, parent in enumerate(recorder._parents()):
        own = recorder.calls[number]
        fits = [n for n in range(number) if recorder._goes_on(own, recorder.calls[n])]
        assert parent == max(fits, key=lambda n: (len(recorder.calls[n].token_ids), n), default=None)


def test_calls_are_not_compared_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, compared = Recorder(), []
    for number in range(300):
        call(recorder, [number] * (number + 2), [300])
    monkeypatch.setattr(Recorder, "_goes_on", lambda self, *both: compared.append(both) or True)
    assert len(experiences(recorder)) == 300
    assert not compared


def test_a_shared_turn_counts_in_the_first_branch_alone() -> None:
    recorder = Recorder()
    call(recorder, [1], [2])
    call(recorder, [1, 2, 3], [4])
    call(recorder, [1, 2, 9], [5])
    first, second = experiences(recorder)
    assert first.action_mask.tolist() == [False, True, False, True]
    assert second.action_mask.tolist() == [False, False, False, True]
    assert second.token_ids.tolist() == [1, 2, 9, 5]
    assert (first.id, second.id) == ("g/0", "g/0.1")
    for one, call_ in ((first, "call 1"), (second, "call 2")):
        assert [turn.text for turn in one.turns] == ["prompt 0", "call 0", str(one.token_ids[2]), call_]
        assert (one.prompt, one.response) == ("prompt 0", call_)
    assert first.episode == second.episode == "g/0"


def test_answers_to_the_same_prompt_are_branches() -> None:
    recorder = Recorder()
    call(recorder, [1], [2])
    call(recorder, [1], [2])
    assert [one.action_mask.sum() for one in experiences(recorder)] == [1, 1]


def test_steps_and_temperatures_are_experiences_of_their_own() -> None:
    recorder = Recorder()
    call(recorder, [1], [2])
    recorder.end_step(0.25, "start")
    call(recorder, [1, 2], [3])
    call(recorder, [1, 2, 3], [4], heat=0.5)
    first, second, third = experiences(recorder)
    assert (first.step_reward, first.anchor) == (0.25, "start")
    assert second.step_reward == 0.0
    assert [one.temperature for one in (second, third)] == [1.0, 0.5]


def test_each_role_has_an_episode_of_its_own() -> None:
    recorder = Recorder()
    call(recorder, [1], [2], role="solver")
    call(recorder, [1, 2], [3], role="critic")
    call(recorder, [1, 2, 3], [4], role="critic")
    call(recorder, [1, 2], [3])
    found = experiences(recorder)
    assert [one.role for one in found] == ["solver", "critic", None]
    assert [one.episode for one in found] == ["g/0@solver", "g/0@critic", "g/0"]


def test_a_call_goes_on_only_with_the_pictures_of_the_one_before() -> None:
    """Pictures may differ where their tokens are the same."""
    recorder = Recorder()
    cat, dog, later = PictureTurn(0, "cat", ()), PictureTurn(0, "dog", ()), PictureTurn(2, "!", ())
    call(recorder, [1], [2], turns=(cat,))
    call(recorder, [1, 2, 3], [4], turns=(cat, later))
    call(recorder, [1, 2, 3], [5], turns=(dog, later))
    seen, other = experiences(recorder)
    assert seen.action_mask.tolist() == [False, True, False, True]
    assert other.action_mask.tolist() == [False, False, False, True]
    assert (seen.prompt, other.prompt) == ("prompt 0", "prompt 2")
    assert [[turn["text"] for turn in one.info[PICTURE_TURNS]] for one in (seen, other)] == [["cat", "!"], ["dog", "!"]]


def test_what_is_not_learned_is_context() -> None:
    recorder = Recorder()
    call(recorder, [1], [2], learned=False)
    call(recorder, [1, 2], [3])
    [one] = experiences(recorder)
    assert one.action_mask.tolist() == [False, False, True]
    assert one.versions.tolist() == [-1, -1, 1]
    assert [turn.role for turn in one.turns] == ["prompt", "assistant", "assistant"]  # nothing came in between


def test_who_never_asked_has_no_experience() -> None:
    assert experiences(Recorder()) == []


def test_log_probs_are_those_before_top_p_top_k_and_min_p_left_tokens_out() -> None:
    recorder = Recorder()
    call(recorder, [1], [2, 3], kept=[-0.5, -0.25])
    [one] = experiences(recorder)
    assert one.logprobs.tolist() == [0, -1.5, -2.25]


def test_an_experience_ends_as_its_last_call_and_begins_as_its_first() -> None:
    recorder = Recorder()
    call(recorder, [1], [2], stopped=StopReason.STOP)
    call(recorder, [1, 2, 3], [4], stopped=StopReason.LENGTH)
    [one] = experiences(recorder)
    assert one.stop_reason is StopReason.LENGTH
    assert (one.prompt, one.response) == ("prompt 0", "call 1")
    assert (one.task_id, one.group, one.reward, one.info) == ("task", "g", None, {})


def test_greedy_calls_are_recorded_at_temperature_1() -> None:
    recorder = Recorder()
    greedy = call(recorder, [1], [2], heat=0.0)
    assert greedy is recorder.calls[0]
    assert experiences(recorder)[0].temperature == 1.0


def test_a_completion_is_learned_from_unless_said_otherwise() -> None:
    recorder = Recorder()
    recorder.add(call(Recorder(), [1], [2]).completion, "prompt", 1.0)
    assert experiences(recorder)[0].action_mask.tolist() == [False, True]


def test_a_branch_has_the_latest_reward_of_its_calls_and_is_then_a_rollout_of_its_own() -> None:
    recorder = Recorder()
    first = call(recorder, [1], [2])
    second = call(recorder, [1, 2], [3])
    call(recorder, [1, 2, 3], [4])
    other = call(recorder, [9], [8])
    call(recorder, [7], [6])
    first.reward, second.reward, other.reward = 0.25, 0.75, 0.0
    found = experiences(recorder)
    assert [one.reward for one in found] == [0.75, 0.0, None]
    assert [one.episode for one in found] == ["g/0.0", "g/0.1", "g/0"]
    assert [one.info["branch"] for one in found] == [0, 1, 2]


@pytest.mark.parametrize("learned", [True, False])
def test_an_experience_says_where_the_policy_repeated_itself(learned: bool) -> None:
    """In any of its calls; what is only context does not count."""
    recorder = Recorder()
    call(recorder, [1], [2], stopped=StopReason.REPETITION, learned=learned)
    call(recorder, [1, 2], [3])
    call(recorder, [9], [3])
    assert [one.info.get(REPETITION_KEY) for one in experiences(recorder)] == [True if learned else None, None]
    assert experiences(Recorder()) == []


def test_times_in_the_queue_in_the_engine_and_elsewhere_add_up() -> None:
    recorder = Recorder()
    call(recorder, [1], [2], submitted_at=10.0, started_at=11.0, finished_at=15.0)
    call(recorder, [1, 2], [3], submitted_at=21.0, started_at=24.0, finished_at=25.0)
    call(recorder, [1, 2, 3], [4], submitted_at=24.5, started_at=25.0, finished_at=27.0)  # before the last one ended
    [one] = experiences(recorder)
    assert one.timings == {"queue": 1 + 3 + 0.5, "generate": 4 + 1 + 2, "between": 6.0}


def test_a_steps_reward_is_its_last_experiences_and_goes_to_the_one_before_where_there_is_none() -> None:
    recorder = Recorder()
    call(recorder, [1], [2])
    call(recorder, [9], [2])  # another branch of the first step
    recorder.end_step(0.5, "a")
    recorder.end_step(0.25, None)  # in which the policy was not asked
    recorder.end_step(None, None)
    call(recorder, [3], [4])
    recorder.end_step(1.0, "b")
    call(recorder, [5], [6])  # of a step that did not end
    found = experiences(recorder)
    assert [one.step_reward for one in found] == [0.0, 0.75, 1.0, 0.0]
    assert [one.anchor for one in found] == ["a", "a", "b", None]
    assert {one.episode for one in found} == {"g/0"}


def test_rewards_before_the_first_experience_are_the_first_ones() -> None:
    recorder = Recorder()
    recorder.end_step(0.5, None)
    recorder.end_step(0.25, None)
    call(recorder, [1], [2])
    call(recorder, [3], [4])
    recorder.end_step(1.0, None)
    first, second = experiences(recorder)
    assert (first.step_reward, second.step_reward) == (0.75, 1.0)


def test_a_branch_with_a_reward_of_its_own_takes_none_of_the_steps_rewards() -> None:
    recorder = Recorder()
    call(recorder, [1], [2])
    call(recorder, [3], [4]).reward = 0.125
    recorder.end_step(0.5, None)
    assert [one.step_reward for one in experiences(recorder)] == [0.5, 0.0]
    alone = Recorder()
    call(alone, [1], [2]).reward = 0.125
    alone.end_step(0.5, None)
    [one] = experiences(alone)
    assert (one.step_reward, one.episode, one.info["branch"]) == (0.0, "g/0.0", 0)


def test_without_steps_there_are_no_rewards_of_steps() -> None:
    recorder = Recorder()
    call(recorder, [1], [2])
    call(recorder, [3], [4])
    assert not any(one.step_reward is not None or one.anchor is not None for one in experiences(recorder))


@st.composite
def trees(draw: st.DrawFn) -> Recorder:
    """Calls whose prompts are fresh, or go on from anything that was said before, also from the middle of it."""
    recorder = Recorder()
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    for _ in range(draw(st.integers(1, 7))):
        start: list[int] = []
        if recorder.calls and draw(st.booleans()):
            before = draw(st.sampled_from(recorder.calls)).token_ids.tolist()
            start = before[: draw(st.integers(0, len(before)))] if draw(st.booleans()) else before
        prompt = [*start, *draw(tokens)] if draw(st.booleans()) or not start else start
        call(recorder, prompt, draw(tokens))
    return recorder


@given(trees())
def test_every_completion_is_learned_from_exactly_once(recorder: Recorder) -> None:
    found = experiences(recorder)
    learned = sorted(
        (int(one.versions[at]), float(one.logprobs[at]), int(one.token_ids[at]))
        for one in found
        for at in np.flatnonzero(one.action_mask)
    )
    made = [
        (number, float(logprob), int(token))
        for number, each in enumerate(recorder.calls)
        for token, logprob in zip(each.completion.token_ids, each.completion.logprobs, strict=True)
    ]
    assert learned == sorted(made)
    assert len({one.id for one in found}) == len(found)
    for one in found:
        assert (one.versions[~one.action_mask] == -1).all()
        assert (one.logprobs[~one.action_mask] == 0).all()
        assert one.turns[0].start == 0
        assert one.turns[-1].end == len(one.token_ids)
        assert all(a.end == b.start for a, b in zip(one.turns, one.turns[1:], strict=False))


@given(trees())
def test_a_call_goes_on_from_the_longest_and_latest_call_that_it_begins_with(recorder: Recorder) -> None:
    made = [call_.token_ids.tolist() for call_ in recorder.calls]
    for number, parent in enumerate(recorder._parents()):
        prompt = recorder.calls[number].completion.prompt_ids.tolist()
        fitting = [earlier for earlier in range(number) if prompt[: len(made[earlier])] == made[earlier]]
        assert parent == max(fitting, key=lambda earlier: (len(made[earlier]), earlier), default=None)


@given(trees())
def test_a_token_is_learned_behind_the_tokens_it_was_sampled_behind(recorder: Recorder) -> None:
    for one in experiences(recorder):
        for at in np.flatnonzero(one.action_mask):
            call_ = recorder.calls[int(one.versions[at])]
            assert one.token_ids[: at + 1].tolist() == call_.token_ids[: at + 1].tolist()
