"""Acts become exactly the groups they should, once each, and can be undone."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.feedback_runs import ANSWERS, END, TOKENIZER, completion, everything, groups_of, of_kind

from rollmill.apps.studio.feedback import FeedbackError, FeedbackService, open_feedback, parse_request
from rollmill.apps.studio.feedback.pages import find_neighbours
from rollmill.apps.studio.feedback.rendering import MAX_SHOWN_CHARS, escape_text
from rollmill.buffer import ExperienceKind
from rollmill.buffer.base import FEEDBACK
from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.offline_data import RatingOverrides
from rollmill.config.model import TokenizerConfig
from rollmill.data import demonstration_experience, preference_pair
from rollmill.errors import ConfigError, ModelError, RollmillError, StoreError
from rollmill.models.from_scratch import train_tokenizer
from rollmill.models.run_tokenizer import compute_fingerprint, save_run_tokenizer
from rollmill.orchestrator.buffers import Buffers
from rollmill.trackers.rollout_log import RolloutLog
from rollmill.types import Experience, ExperienceSource, StopReason, Task


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "apples")


@pytest.fixture
def desk(run_dir: Path) -> Iterator[FeedbackService]:
    opened = open_feedback(run_dir)
    yield opened
    opened.acts._store.close()


def say(desk: FeedbackService, author: str = "ann", **row: Any) -> str:
    return desk.submit([parse_request({"author": author, **row})]).ids[0]


def stored(step: int, id: str) -> Experience:
    return next(one for one in groups_of(step) if one.id == id)


def same_tokens(one: Experience, other: Experience) -> bool:
    arrays = ("token_ids", "action_mask", "logprobs", "versions")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)


def test_a_rating_is_the_completion_with_another_reward(desk: FeedbackService) -> None:
    before = time.time()
    id = say(desk, completion="main-000005/1", rating=0.75)
    [group] = of_kind(desk, ExperienceKind.RATED)
    [one] = group.experiences
    original = stored(2, "main-000005/1")
    assert (group.id, group.writer, group.author, one.group) == (id, FEEDBACK, "ann", id)
    assert before <= group.created_at <= time.time()
    assert same_tokens(one, original)
    assert (one.reward, one.source, one.task_id, one.temperature) == (0.75, ExperienceSource.ROLLOUT, "apples/1", 0.9)
    assert (one.prompt, one.response, one.turns) == (original.prompt, original.response, original.turns)
    assert one.advantage is None
    info = group.info
    assert (info["act"], info["of"], info["step"], info["rating"]) == ("rate", ["main-000005/1"], 2, 0.75)
    assert info["tokenizer"] == compute_fingerprint(TOKENIZER)
    assert everything(desk)["expert"] == everything(desk)["preference"] == []


def test_an_edit_keeps_the_prompt_token_for_token(desk: FeedbackService) -> None:
    text = "13 and 3 is 16.\n"
    id = say(desk, completion="main-000005/1", step=2, text=text)
    [group] = of_kind(desk, ExperienceKind.EXPERT)
    [one] = group.experiences
    original = stored(2, "main-000005/1")
    start = int(original.action_mask.argmax())
    assert one.token_ids[:start].tolist() == original.token_ids[:start].tolist()
    assert one.token_ids[start:].tolist() == [*TOKENIZER.encode(text), END]
    assert one.action_mask.tolist() == [False] * start + [True] * (len(one.token_ids) - start)
    assert not one.logprobs.any()
    assert (one.versions == -1).all()
    assert (one.id, one.group, one.source, one.stop_reason) == (f"{id}/0", id, ExperienceSource.EXPERT, StopReason.EOS)
    assert (one.reward, one.response, one.turns[-1].text, one.turns[-1].start) == (None, text, text, start)


def test_a_comparison_is_a_pair_of_exact_completions(desk: FeedbackService) -> None:
    id = say(desk, better="main-000005/2", worse="main-000005/1")
    [group] = of_kind(desk, ExperienceKind.PREFERENCE)
    chosen, rejected = group.experiences
    assert same_tokens(chosen, stored(2, "main-000005/2"))
    assert same_tokens(rejected, stored(2, "main-000005/1"))
    assert (chosen.reward, rejected.reward) == (1.0, 0.0)
    assert {(one.group, one.source) for one in group.experiences} == {(id, ExperienceSource.PREFERENCE)}
    assert [one.id for one in group.experiences] == [f"{id}/chosen", f"{id}/rejected"]


def test_texts_are_encoded_as_those_of_a_taskset(desk: FeedbackService) -> None:
    chat = [{"role": "user", "content": "What is 2 and 2?"}]
    say(desk, messages=chat, response="It is 4.", task="sum")
    say(desk, prompt="What is 2 and 2?\n", chosen="4", rejected="5", task="sum")
    say(desk, prompt="What is 2 and 2?\n", response="5", rating=0.25)
    [expert], [pair], [rated] = everything(desk)["expert"], everything(desk)["preference"], everything(desk)["rated"]
    task = Task("sum", chat, response="It is 4.")  # type: ignore[arg-type]
    assert same_tokens(expert.experiences[0], demonstration_experience(task, TOKENIZER, END))
    task = Task("sum", "What is 2 and 2?\n", response="4", rejected="5")
    for one, other in zip(pair.experiences, preference_pair(task, TOKENIZER, END, "x"), strict=True):
        assert same_tokens(one, other)
        assert (one.reward, one.source, one.task_id) == (other.reward, other.source, "sum")
    [one] = rated.experiences
    assert (one.reward, one.source, one.oldest_version) == (0.25, ExperienceSource.ROLLOUT, -1)
    assert one.token_ids.tolist() == [*TOKENIZER.encode("What is 2 and 2?\n"), *TOKENIZER.encode("5"), END]
    assert (one.action_tokens, bool(one.logprobs.any())) == (2, False)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"completion": "main-000005/1", "rating": 1.5}, "rate: rating: Input should be less than or equal to 1"),
        ({"completion": "main-000005/1", "rating": "1"}, "rate: rating: Input should be a valid number"),
        ({"completion": "main-000005/1", "rating": float("nan")}, "rate: rating: Input should be a finite number"),
        ({"completion": "main-000005/9", "rating": 1.0}, "no stored step of .* has a completion 'main-000005/9'"),
        ({"completion": "main-000005/1", "rating": 1.0, "step": 1}, "not step 1 of .* has a completion"),
        ({"completion": "main-000005/1", "rating": 1.0, "step": 7}, "stores no completions of step 7"),
        ({"completion": "main-000005/1", "text": ""}, "edit: text: String should have at least 1 character"),
        ({"completion": "main-000005/1", "text": "15<eos> "}, "holds the token that ends an answer"),
        ({"completion": "main-000005/1", "text": "\ud800"}, "unable to parse raw data as a unicode string"),
        ({"better": "main-000005/1", "worse": "main-000004/1"}, "answer different prompts .*'apples/1' and 'apples/0'"),
        ({"better": "main-000005/1", "worse": "main-000005/1"}, "have the same tokens; neither is better"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same text"),
        ({"prompt": [], "response": "b"}, "demonstrate: prompt"),
        ({"prompt": [{"role": "user"}], "response": "b"}, "content: Field required"),
        ({"response": "b"}, "demonstrate: prompt: Field required"),
        ({"prompt": "a", "response": "b", "raiting": 1}, "raiting: Extra inputs are not permitted"),
        ({"thumbs": "up"}, "no feedback has these keys .author, thumbs.; expected"),
        ({"author": " ", "prompt": "a", "response": "b"}, "author: a name of visible characters"),
        ({"author": "a\u202eb", "prompt": "a", "response": "b"}, "author: a name of visible characters"),
    ],
)
def test_what_makes_no_sense_is_refused(desk: FeedbackService, row: dict[str, Any], said: str) -> None:
    with pytest.raises(FeedbackError, match=said):
        desk.submit([parse_request({"author": "ann"} | row)])
    assert everything(desk) == {"rated": [], "expert": [], "preference": []}


def test_a_character_that_the_vocabulary_lacks_is_refused(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "tokenizer")
    save_run_tokenizer(run_dir, train_tokenizer(TokenizerConfig(kind="char"), ["abc 123"]), 1)
    desk = open_feedback(run_dir)
    with pytest.raises(FeedbackError, match="no token for 'é', 'ü'; write it in another way"):
        say(desk, prompt="abc", response="aüé")
    with pytest.raises(FeedbackError, match="no token for '4'"):
        say(desk, prompt="4", response="a")
    say(desk, prompt="abc", response="321")
    assert len(everything(desk)["expert"]) == 1


def test_several_are_done_together_or_not_at_all(desk: FeedbackService) -> None:
    good = {"author": "ann", "completion": "main-000005/1", "rating": 1.0}
    bad = good | {"completion": "nothing"}
    with pytest.raises(FeedbackError, match="request 2 of 2: no stored step"):
        desk.submit([parse_request(good), parse_request(bad)])
    assert everything(desk)["rated"] == []
    done = desk.submit([parse_request(good), parse_request(good | {"author": "bob"})])
    assert (done.new, [group.id for group in everything(desk)["rated"]]) == (2, done.ids)


def test_a_repeated_request_is_done_once(desk: FeedbackService) -> None:
    row = {"author": "env", "key": "episode 7", "completion": "main-000005/1", "rating": 1.0}
    first = desk.submit([parse_request(row)])
    again = desk.submit([parse_request(row), parse_request(row)])
    assert (first.new, again.new, set(again.ids)) == (1, 0, set(first.ids))
    with pytest.raises(FeedbackError, match="the key 'episode 7' of 'env' was used for other feedback") as refused:
        desk.submit([parse_request(row | {"rating": 0.0})])
    assert refused.value.status == 409
    assert desk.submit([parse_request(row | {"author": "other"})]).new == 1
    desk.undo(first.ids[0], "ann")
    assert desk.submit([parse_request(row)]).new == 0
    assert [group.author for group in everything(desk)["rated"]] == ["other"]


def test_a_second_rating_takes_the_place_of_the_first(desk: FeedbackService) -> None:
    first = say(desk, completion="main-000005/1", rating=0.25)
    other = say(desk, "bob", completion="main-000005/1", rating=1.0)
    second = say(desk, completion="main-000005/1", rating=0.5)
    assert [group.id for group in of_kind(desk, ExperienceKind.RATED)] == [other, second]
    assert desk.undo(second, "ann")
    assert [group.id for group in of_kind(desk, ExperienceKind.RATED)] == [other, first]
    assert desk.redo(second)
    assert [group.id for group in of_kind(desk, ExperienceKind.RATED)] == [other, second]


def test_a_request_repeated_after_an_error_still_replaces(
    desk: FeedbackService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database fails after the new rating was put and before the old one was removed."""
    say(desk, completion="main-000005/1", rating=0.25)
    row = {"author": "ann", "key": "k", "completion": "main-000005/1", "rating": 1.0}
    with monkeypatch.context() as broken:

        def fail(*_: Any, **__: Any) -> None:
            raise StoreError("gone")

        broken.setattr(desk.acts._store, "remove", fail)
        with pytest.raises(StoreError):
            desk.submit([parse_request(row)])
    assert len(of_kind(desk, ExperienceKind.RATED)) == 2
    assert desk.submit([parse_request(row)]).new == 0
    assert [group.info["rating"] for group in of_kind(desk, ExperienceKind.RATED)] == [1.0]


def test_a_comparison_can_be_turned_round(desk: FeedbackService) -> None:
    say(desk, better="main-000005/2", worse="main-000005/1")
    second = say(desk, better="main-000005/1", worse="main-000005/2")
    assert [group.id for group in of_kind(desk, ExperienceKind.PREFERENCE)] == [second]


def test_undone_twice_and_redone_twice(desk: FeedbackService) -> None:
    id = say(desk, completion="main-000005/1", text="15")
    assert desk.undo(id, "bob") is True
    assert desk.undo(id, "ann") is False
    act = desk.acts.get(id)
    assert act is not None
    assert act.undone_by == "bob"
    assert of_kind(desk, ExperienceKind.EXPERT) == []
    assert (desk.redo(id), desk.redo(id)) == (True, False)
    assert [group.id for group in of_kind(desk, ExperienceKind.EXPERT)] == [id]
    with pytest.raises(FeedbackError, match="no feedback has the id 'main-000005/1'"):
        desk.undo("main-000005/1", "ann")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("rate"), st.sampled_from(["ann", "bob"]), st.integers(0, 1), st.integers(0, 4)),
        st.tuples(st.just("undo"), st.integers(0, 9)),
        st.tuples(st.just("redo"), st.integers(0, 9)),
    ),
    max_size=12,
)


@settings(max_examples=15)
@given(steps=STEPS)
def test_nobody_ever_has_two_ratings_of_a_completion(
    made: Path, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]]
) -> None:
    desk = open_feedback(shutil.copytree(made, tmp_path_factory.mktemp("any") / "apples"))
    ids: list[str] = []
    for act, *about in steps:
        if act == "rate":
            author, index, stars = about
            ids.append(say(desk, author, completion=f"main-000004/{index}", rating=stars / 4))
            act = desk.acts.get(ids[-1])
            assert act is not None
            assert act.undone_by is None
        elif ids:
            chosen = ids[about[0] % len(ids)]
            _ = desk.undo(chosen, "ann") if act == "undo" else desk.redo(chosen)
    there = of_kind(desk, ExperienceKind.RATED)
    places = [(group.author, group.info["of"][0]) for group in there]
    assert len(places) == len(set(places))
    assert {group.id for group in there} == {act.id for act in desk.acts.all() if act.undone_by is None}
    assert {act.id for act in desk.acts.all()} == set(ids)
    desk.acts._store.close()


def test_two_servers_of_one_run_see_each_other(run_dir: Path, desk: FeedbackService) -> None:
    other = open_feedback(run_dir)
    id = say(desk, completion="main-000005/1", rating=0.25)
    assert [act.id for act in other.acts.all()] == [id]
    second = say(other, completion="main-000005/1", rating=1.0)
    assert [act.undone_by for act in desk.acts.all()] == ["ann", None]
    assert [group.id for group in of_kind(desk, ExperienceKind.RATED)] == [second]
    other.acts._store.close()
    again = open_feedback(run_dir)
    assert [(act.id, act.undone_by) for act in again.acts.all()] == [(id, "ann"), (second, None)]
    again.acts._store.close()


def test_other_groups_of_these_kinds_are_no_acts(desk: FeedbackService) -> None:
    say(desk, completion="main-000005/1", text="15")
    [group] = of_kind(desk, ExperienceKind.EXPERT)
    group.id, group.writer, group.info = "made-1", "pipeline", {}
    desk.acts._store.put([group])
    assert len(of_kind(desk, ExperienceKind.EXPERT)) == 2
    group.id, group.writer = "made-2", FEEDBACK
    desk.acts._store.put([group])
    assert len(desk.acts.all()) == 1
    with pytest.raises(FeedbackError, match="no feedback has the id"):
        desk.undo("made-1", "ann")


def test_a_run_that_goes_on_shows_new_steps_and_rewritten_ones(run_dir: Path, desk: FeedbackService) -> None:
    assert desk.stored.steps() == [1, 2]
    assert len(desk.stored.groups(2)) == 2
    RolloutLog(run_dir / "rollouts").write(3, groups_of(3))
    assert desk.stored.find("main-000007/3")[0] == 3
    changed = completion(2, "main-000009", 0, "How many?\n", "seven")
    RolloutLog(run_dir / "rollouts").write(2, [changed])  # as a run does that was resumed before step 2
    assert [group.name for group in desk.stored.groups(2)] == ["main-000009"]
    say(desk, completion="main-000009/0", rating=1.0)
    assert same_tokens(of_kind(desk, ExperienceKind.RATED)[0].experiences[0], changed)
    with pytest.raises(FeedbackError):
        say(desk, completion="main-000005/1", rating=1.0)


def test_names_that_look_like_arrays_are_left_alone(run_dir: Path, desk: FeedbackService) -> None:
    """The index leaves arrays of tokens out by their text."""
    name = '"token_ids": [1, 2], "group": "x" \\'
    one = completion(3, name, 0, "Q\n", "7 is it", float("inf"), task=name)
    one.prompt, one.logprobs[-1] = f"{name} [3]", np.nan
    RolloutLog(run_dir / "rollouts").write(3, [one])
    [group] = desk.stored.groups(3)
    assert (group.name, group.task, group.prompt, group.spread) == (name, name, f"{name} [3]", 0.0)
    [read] = desk.stored.group(3, name)
    assert read.token_ids.tolist() == one.token_ids.tolist()
    assert np.array_equal(read.logprobs, one.logprobs, equal_nan=True)


def test_demonstrations_are_not_shown(run_dir: Path, desk: FeedbackService) -> None:
    expert = demonstration_experience(Task("sum", "2+2=", response="4"), TOKENIZER, END)
    RolloutLog(run_dir / "rollouts").write(3, [*groups_of(3), expert])
    assert [group.name for group in desk.stored.groups(3)] == ["main-000006", "main-000007"]


def test_an_answer_of_several_turns_is_rated_but_not_edited(run_dir: Path, desk: FeedbackService) -> None:
    turns = completion(3, "main-000006", 0, "Guess.\n", "7 is it")
    turns.action_mask[len(turns.token_ids) - 3] = False
    RolloutLog(run_dir / "rollouts").write(3, [turns])
    with pytest.raises(FeedbackError, match="main-000006/0 has several turns"):
        say(desk, completion="main-000006/0", text="8")
    say(desk, completion="main-000006/0", rating=0.0)
    assert same_tokens(of_kind(desk, ExperienceKind.RATED)[0].experiences[0], turns)


def test_errors_of_a_run_directory_say_what_to_do(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        open_feedback(tmp_path / "nowhere")
    damaged = run_dir / "rollouts/step-000002.jsonl"
    damaged.write_text(damaged.read_text() + "{}\n")
    with pytest.raises(RollmillError, match=r"step-000002.jsonl:9 is not a stored experience"):
        open_feedback(run_dir).stored.groups(2)
    (run_dir / "machine.json").write_text(json.dumps({"threads": 1}))
    with pytest.raises(StoreError, match="does not say the run's id"):
        open_feedback(run_dir)
    (run_dir / "machine.json").write_text(json.dumps({"run_id": "x"}))
    shutil.rmtree(run_dir / "tokenizer")
    with pytest.raises(ModelError, match=r"holds no tokenizer/run\.json.*`rollmill resume` writes"):
        open_feedback(run_dir)


def test_the_fixture_tells_stored_tokens_from_encoded_text() -> None:
    """Otherwise a test could not see that tokens were made again from text."""
    one = completion(1, "g", 0, "Q\n", ANSWERS[0])
    assert one.token_ids[~one.action_mask].tolist() == TOKENIZER.encode("Q\n")
    assert one.token_ids[one.action_mask].tolist() != [*TOKENIZER.encode(ANSWERS[0]), END]


def test_very_long_and_odd_texts_are_shown_in_part() -> None:
    shown = escape_text("a\u202e\x1b" * MAX_SHOWN_CHARS)
    assert len(shown) < 30 * MAX_SHOWN_CHARS
    assert shown.endswith(f"and {2 * MAX_SHOWN_CHARS} characters more</span>")
    assert escape_text("\x1b\x1b<") == '<span class="odd">\\x1b\\x1b</span>&lt;'


def test_a_damaged_completion_is_named(run_dir: Path, desk: FeedbackService) -> None:
    path = run_dir / "rollouts/step-000002.jsonl"
    path.write_text(path.read_text().replace('"versions"', '"visions"'))
    with pytest.raises(RollmillError, match=r"step-000002.jsonl: main-000005/0 is not a stored experience"):
        desk.stored.group(2, "main-000005")
    with pytest.raises(FeedbackError, match="step 2 has no group 'gone'"):
        find_neighbours(desk.stored, 2, "gone")


def test_feedback_goes_where_the_run_keeps_its_experiences(run_dir: Path, url: str) -> None:
    """A run whose buffer.url names a database, here with a first stage that keeps its own in memory."""
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"stages": [{}, {"buffer": {"url": url}}]}))
    (run_dir / "machine.json").write_text(json.dumps({"run_id": f"apples at {run_dir}"}))
    desk = open_feedback(run_dir)
    first = say(desk, completion="main-000005/1", rating=0.25)
    second = say(desk, completion="main-000005/1", rating=1.0)
    edit = say(desk, completion="main-000005/2", text="fifteen")
    assert not (run_dir / "buffer.sqlite").exists()
    buffers = Buffers(run_dir, f"apples at {run_dir}")
    ratings = RatingOverrides(buffers.of_run(MemoryStore()))
    completions = desk.stored.group(2, "main-000005")
    assert [one.reward for one in ratings.apply_ratings(completions)] == [1.0, 1.0, 1.0, 0.25]
    desk.undo(second, "ann")
    assert [one.reward for one in ratings.apply_ratings(completions)] == [1.0, 0.25, 1.0, 0.25]
    desk.undo(first, "ann")
    assert [one.reward for one in ratings.apply_ratings(completions)] == [1.0, 0.0, 1.0, 0.25]
    desk.redo(first)
    assert [one.reward for one in ratings.apply_ratings(completions)] == [1.0, 0.25, 1.0, 0.25]
    assert [(act.id, act.undone_by) for act in desk.acts.all()] == [(second, "ann"), (edit, None), (first, None)]
    buffers.close()
    desk.acts._store.close()


def test_a_run_may_look_before_the_tables_of_feedback_are_there(run_dir: Path) -> None:
    (run_dir / "buffer.sqlite").touch()
    buffers = Buffers(run_dir, "apples-1")
    ratings = RatingOverrides(buffers.of_run(MemoryStore()))
    completions = groups_of(2)
    assert [one.reward for one in ratings.apply_ratings(completions)] == [one.reward for one in completions]
    buffers.close()
