"""The adapter of Data-Juicer; its own operators run where the package is installed."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
from support.made_up import group, ids, pipeline, process, tokenizer

from rollmill.errors import ConfigError
from rollmill.types import Experience, ExperienceSource

installed = pytest.mark.skipif(
    importlib.util.find_spec("data_juicer") is None, reason="py-data-juicer is not installed"
)


def juicer(*process: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"name": "data_juicer", "process": list(process), **options}


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "data_juicer", None)
    with pytest.raises(ConfigError, match="operator `data_juicer` needs Data-Juicer: pip install py-data-juicer"):
        pipeline(juicer({"words_num_filter": {"min_num": 3}}))


@installed
def test_filters_drop_and_say_which() -> None:
    experiences = group([1.0, 1.0, 0.0], text=["it is twelve, I say", "12", "!!! ??? !!! ###"])
    found, report = process(
        juicer({"words_num_filter": {"min_num": 3}}, {"alphanumeric_filter": {"min_ratio": 0.3}}), experiences
    )
    assert ids(found) == ["g0/0"]
    assert sum(report.reasons.values()) == 2
    assert set(report.reasons) <= {"words_num_filter", "alphanumeric_filter"}


@installed
def test_mappers_make_expert_texts_and_leave_the_completion_alone() -> None:
    mapper = {"whitespace_normalization_mapper": {}}
    with pytest.raises(ConfigError, match=r"`whitespace_normalization_mapper` changes text.*set mapped: expert"):
        pipeline(juicer(mapper))
    experiences = group([1.0, 1.0, 0.0], text=["it\u3000is 12", "it is 12", "it\u3000is 13"])  # a failure is no example
    tokens = [each.token_ids.tolist() for each in experiences]
    found, report = process(juicer(mapper, mapped="expert"), experiences)
    made: list[Experience] = [each for each in found if each.source is ExperienceSource.EXPERT]
    assert [each.token_ids.tolist() for each in found[:3]] == tokens
    assert [(each.id, each.response) for each in made] == [("g0/0/data_juicer", "it is 12")]
    assert tokenizer().decode(made[0].token_ids[made[0].action_mask]) == "it is 12" + tokenizer().eos_token
    assert (report.kept, report.added) == (3, 1)


@installed
@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"words_num_fliter": {}}, "no operator `words_num_fliter` .*did you mean `words_num_filter`"),
        ({"words_num_filter": {"min": 3}}, "`words_num_filter` has no argument `min`"),
        ({"words_num_filter": {"skip_op_error": True}}, "has no argument `skip_op_error`"),
        ({"document_deduplicator": {}}, "`document_deduplicator` needs a whole data set"),
    ],
)
def test_what_cannot_be_used_is_refused(entry: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        pipeline(juicer(entry))
