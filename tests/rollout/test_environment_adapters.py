"""Adapters: gymnasium, reasoning-gym and TextArenaSection as environments."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from PIL import Image
from support.environment_pools import in_loop, rollout

from rollmill.config.rows import GeneratorConfig
from rollmill.data.generators import generate_rows
from rollmill.errors import ConfigError
from rollmill.rollout.environments.base import make_environment, validate_observation
from rollmill.rollout.environments.builtin.gymnasium import GymnasiumEnvironment
from rollmill.rollout.environments.builtin.reasoning_gym import ReasoningGymEnvironment
from rollmill.rollout.environments.builtin.textarena import TextArenaEnvironment
from rollmill.rollout.environments.pool import EnvironmentPool
from rollmill.types import Task

MAP = ["SFF", "FHF", "FFG"]


def task(**metadata: Any) -> Task:
    return Task("t:1", "go", metadata=metadata)


def lake(**keys: Any) -> GymnasiumEnvironment:
    made: GymnasiumEnvironment = make_environment(
        GymnasiumEnvironment(options={"is_slippery": False, "desc": MAP}, **keys)
    )
    return made


def test_a_frozen_lake_is_a_map_with_a_player() -> None:
    env = lake()
    assert env.reset(task(), 1) == "PFF\nFHF\nFFG\n"
    found = env.step("I go up... no, right")
    assert (found.observation, found.reward, found.done) == ("SPF\nFHF\nFFG\n", 0.0, False)
    env.step("RIGHT")
    env.step("Down!")
    found = env.step("down")
    assert (found.observation, found.reward, found.done) == ("SFF\nFHF\nFFP\n", 1.0, True)
    assert env.reset(task(options={"desc": ["SH", "FG"]}), 1) == "PH\nFG\n"
    assert env.step("right").done


def test_a_reply_without_an_action_costs_and_changes_nothing() -> None:
    env = lake(invalid_penalty=0.5, max_steps=3)
    env.reset(task(), 1)
    found = env.step("rightly so")
    assert found.observation == "That is no action; there are left, down, right, up.\nPFF\nFHF\nFFG\n"
    assert (found.reward, found.done, found.info) == (-0.5, False, {"invalid": 1.0})
    assert env.step("right").observation == "SPF\nFHF\nFFG\n"
    assert env.step("").done  # the third step


def test_a_seed_of_the_task_decides() -> None:
    env = make_environment(GymnasiumEnvironment(id="Taxi-v4"))
    assert env.reset(task(seed=3), 1) == env.reset(task(seed=3), 2)
    starts = {env.reset(task(), seed) for seed in range(5)}
    assert len(starts) > 1
    assert all("\x1b" not in each and "[" in each for each in starts)
    assert env.step("[pickup]").info["invalid"] == 0.0


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"id": "FrozenPond-v1"}, "gymnasium does not make FrozenPond-v1"),
        ({"actions": ["a"]}, "FrozenLake-v1 has 4 actions, and environment.actions 1 words"),
        ({"id": "Blackjack-v1", "actions": ["hit", "stick"]}, "Blackjack-v1 is not rendered as text"),
        ({"id": "Pendulum-v1"}, "Pendulum-v1"),
        ({"options": {"size": 3}}, "gymnasium does not make FrozenLake-v1"),
    ],
)
def test_what_gymnasium_cannot_do_is_said(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_environment(GymnasiumEnvironment(**keys)).reset(task(), 1)


def test_a_function_may_describe_what_is_not_rendered(tmp_path: Path) -> None:
    (tmp_path / "cards.py").write_text("def cards(environment, observation):\n    return str(observation[0])\n")
    config = GymnasiumEnvironment(id="Blackjack-v1", actions=["stick", "hit"], describe=f"{tmp_path}/cards.py:cards")
    assert 4 <= int(make_environment(config).reset(task(), 1)) <= 21


class Lamp(gymnasium.Env[int, int]):
    """A lamp that is drawn without further libraries."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.on = 0
        return self.on, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.on = action
        return action, float(action), False, False, {}

    def render(self) -> Any:
        return np.full((4, 6, 3), 255 * self.on, np.uint8)


def test_states_may_be_pictures(tmp_path: Path) -> None:
    gymnasium.register("Lamp-v0", Lamp)
    (tmp_path / "lamp.py").write_text("def told(environment, observation):\n    return f'lamp {observation}'\n")
    config = GymnasiumEnvironment(id="Lamp-v0", actions=["off", "on"], render_mode="rgb_array")
    env = make_environment(config)
    [dark] = env.reset(task(), 1)
    assert not dark.any()
    found = env.step("turn it on")
    assert found.observation[0].min() == 255
    text, again = env.step("what?").observation
    assert text.startswith("That is no action")
    assert again.shape == (4, 6, 3)
    shown = make_environment(config.model_copy(update={"describe": f"{tmp_path}/lamp.py:told"}))
    assert shown.reset(task(), 1)[1] == "lamp 0"
    [message] = validate_observation(shown.step("on").observation, "Lamp.step")
    assert message["role"] == "user"
    drawn, words = message["content"]
    assert words == {"type": "text", "text": "lamp 1"}
    with Image.open(io.BytesIO(base64.b64decode(drawn["image"].removeprefix("data:image/png;base64,")))) as image:
        assert (image.size, image.getpixel((0, 0))) == ((6, 4), (255, 255, 255))
    with pytest.raises(ConfigError, match="Blackjack-v1"):
        make_environment(config.model_copy(update={"id": "Blackjack-v1"})).reset(task(), 1)


@pytest.mark.parametrize("found", [[1], 3, None, np.zeros((2, 2)), [np.zeros((2, 2, 5), np.uint8)]])
def test_what_is_no_observation_names_the_method(found: Any) -> None:
    with pytest.raises(TypeError, match=r"Lamp\.step "):
        validate_observation(found, "Lamp.step")


def test_an_answer_may_be_tried_again() -> None:
    [record] = list(generate_rows(GeneratorConfig(name="chain_sum", size=1, seed=1)))
    assert record.metadata is not None
    given = Task("t:1", "q", metadata=record.metadata)
    answer = record.metadata["entry"]["answer"]
    env = make_environment(ReasoningGymEnvironment(attempts=2, after="####", discount=0.5, feedback="No."))
    assert env.reset(given, 1) == ""
    wrong = env.step("I do not know")
    assert (wrong.observation, wrong.reward, wrong.done) == ("No.", 0.0, False)
    right = env.step(f"So #### {answer}")
    assert (right.reward, right.done) == (0.5, True)
    env.reset(given, 1)
    assert env.step(f"#### {answer}").reward == 1.0
    with pytest.raises(ConfigError, match="was made by no generator"):
        env.reset(task(), 1)


def test_a_text_game_is_played_to_its_end() -> None:
    before = random.getstate()
    game = make_environment(TextArenaEnvironment(id="GuessTheNumber-v0", options={"max_number": 8}))
    assert "between 1 and 8" in game.reset(task(), 4)
    other = make_environment(TextArenaEnvironment(id="GuessTheNumber-v0", options={"max_number": 8}))
    other.reset(task(seed=4), 5)
    low, high, turns = 1, 8, 0
    while True:
        guess = (low + high) // 2
        found, same = game.step(f"I say [{guess}]"), other.step(f"[{guess}]")
        assert found == same  # two games do not disturb each other's randomness
        turns += 1
        if found.done:
            break
        low, high = (guess + 1, high) if "higher" in str(found.observation) else (low, guess - 1)
    assert found.reward == 1.0
    assert turns <= 4
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("id", "text"),
    [
        ("GuessTheNumer-v0", "did you mean GuessTheNumber-v0"),
        ("TicTacToe-v0", "does not begin for one player"),
        ("TwentyQuestions-v0", "TextArena does not make TwentyQuestions-v0: ValueError: OpenRouter"),
    ],
)
def test_games_that_cannot_be_played_are_refused(id: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_environment(TextArenaEnvironment(id=id)).reset(task(), 1)


def test_a_game_whose_words_are_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    def missing(*arguments: Any) -> None:
        raise LookupError("Resource words not found.")

    monkeypatch.setattr(nltk, "download", lambda *arguments, **options: False)
    monkeypatch.setattr("nltk.data.find", missing)
    with pytest.raises(ConfigError, match="needs word lists that nltk downloads"):
        make_environment(TextArenaEnvironment(id="Hangman-v0")).reset(task(), 1)


@in_loop
async def test_adapters_live_in_processes_too() -> None:
    found = EnvironmentPool(GymnasiumEnvironment(options={"is_slippery": False, "desc": MAP}, processes=1))
    async with found.one(rollout()) as one:
        assert await one.reset() == "PFF\nFHF\nFFG\n"
        assert (await one.step("down")).observation == "SFF\nPHF\nFFG\n"
    await found.close()


@in_loop
async def test_a_library_s_refusal_comes_through_from_a_process() -> None:
    found = EnvironmentPool(GymnasiumEnvironment(id="FrozenPond-v1", processes=1))
    async with found.one(rollout()) as one:
        with pytest.raises(ConfigError, match="gymnasium does not make FrozenPond-v1"):
            await one.reset()
    await found.close()
