"""`rollmill explain` finds keys, sections and components by the names that people type."""

from __future__ import annotations

import pytest

from rollmill.cli import main
from rollmill.config.validation_errors import COMMON_KEY_ALIASES, section_locations


def explained(capsys: pytest.CaptureFixture[str], *keys: str) -> str:
    assert main(["explain", *keys]) == 0
    return capsys.readouterr().out


def test_a_key_has_its_value_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "trainer.lr")
    assert text.splitlines() == [
        "trainer.lr",
        "  value    number, above 0",
        "  default  1e-05",
        "  Peak learning rate of AdamW.",
    ]
    assert explained(capsys, "learning_rate") == text, "the name in other frameworks"
    foreign = explained(capsys, "max_steps")
    assert "environment.max_steps (name: gymnasium)" in foreign, "a key of that name"
    assert foreign.startswith("steps\n"), "and what other frameworks mean by it"
    assert {"algorithm.kl.coefficient", "algorithm.loss.beta (name: sppo)"} <= set(
        explained(capsys, "beta").splitlines()
    )
    several = explained(capsys, "lr")
    assert "\ntrainer.lr\n" in several
    assert several.startswith("algorithm.critic.lr\n")


def test_sections_and_components_list_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  group_size: integer, at least 1, at most 65536; default 8" in explained(capsys, "rollout")
    assert explained(capsys, "citation") == explained(capsys, "rewards.citation")
    assert explained(capsys, "monitor.trackers.tensorboard").startswith("monitor.trackers (name: tensorboard)")
    both = explained(capsys, "gspo")
    assert "algorithm.loss (name: gspo)" in both
    assert "algorithm (name: gspo)" in both
    assert explained(capsys, "code.credit").startswith("rewards.credit (name: code)")


@pytest.mark.slow
def test_every_section_key_and_foreign_name_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for home in section_locations() for name in (home.tag, home.prefix) if name]
    names += [key for home in section_locations() for key in home.section.model_fields if key != "name"]
    explained(capsys, *dict.fromkeys([*names, *COMMON_KEY_ALIASES]))


def test_what_nothing_is_called_is_an_error_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "rollout.bacth"]) == 2
    assert "no key, section or component `rollout.bacth`; did you mean `rollout.batch`?" in capsys.readouterr().err
    assert main(["explain", "xyzzy"]) == 2
    assert "docs/run-file/README.md lists all" in capsys.readouterr().err
