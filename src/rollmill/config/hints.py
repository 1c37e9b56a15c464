"""What to say about an unknown key: the nearest valid one, and which component or section would honour it."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from rollmill.config.run import RunConfig
from rollmill.config.section import Section

COMMON_KEY_ALIASES = {
    "batch_size": "rollout.batch",
    "beta": "algorithm.kl",
    "clip_ratio": "algorithm.loss.clip_low",
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "importance_cap": "algorithm.corrections",
    "kl_coef": "algorithm.kl",
    "learning_rate": "trainer.lr",
    "max_completion_length": "rollout.max_new_tokens",
    "max_steps": "steps",
    "top_entropy_quantile": "algorithm.masks",
    "max_tokens": "rollout.max_new_tokens",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.group_size",
    "total_steps": "steps",
}
"""Names that other tools give to our keys."""

_NOUNS = {
    "rewards": "reward",
    "algorithm": "algorithm",
    "algorithm.advantage": "advantage",
    "algorithm.loss": "loss",
    "algorithm.corrections": "correction",
    "algorithm.masks": "mask",
    "taskset.pipeline": "operator",
    "taskset.order": "order",
    "pipeline": "operator",
    "workflow": "workflow",
    "environment": "environment",
    "tools": "tool",
    "engine": "engine",
    "placement": "placement",
}
_LISTS = (
    "rewards",
    "tools",
    "pipeline",
    "algorithm.corrections",
    "algorithm.masks",
    "taskset.pipeline",
    "taskset.mix",
    "placement.explorers",
)


@dataclass(frozen=True)
class SectionLocation:
    """One section class and where it stands in a run file; `tag` is the `name` that selects it among several."""

    section: type[Section]
    prefix: str
    tag: str | None = None


def unwrap_annotation(annotation: Any) -> Any:
    """The annotation without Annotated and without None."""
    if get_origin(annotation) is Annotated:
        return unwrap_annotation(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not NoneType]
        return unwrap_annotation(members[0]) if len(members) == 1 else Union[tuple(members)]  # noqa: UP007
    return annotation


def section_classes(annotation: Any) -> list[type[Section]]:
    """The section classes an annotation allows, in order; empty for scalars and lists."""
    annotation = unwrap_annotation(annotation)
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [member for member in members if isinstance(member, type) and issubclass(member, Section)]


def section_tag(section: type[Section]) -> str:
    """The `name` that selects a section class."""
    tag: str = get_args(section.model_fields["name"].annotation)[0]
    return tag


@cache
def section_locations() -> tuple[SectionLocation, ...]:
    """Every section class of a run file with its first place in it."""
    found: dict[type[Section], SectionLocation] = {}
    _collect(SectionLocation(RunConfig, ""), found)
    return tuple(found.values())


def _collect(home: SectionLocation, found: dict[type[Section], SectionLocation]) -> None:
    if home.section in found:
        return
    found[home.section] = home
    for key, field in home.section.model_fields.items():
        inner = unwrap_annotation(field.annotation)
        many, named = get_origin(inner) in (list, dict), get_origin(inner) is dict
        members = section_classes(get_args(inner)[-1] if many else inner)
        for member in members:
            prefix = f"{home.prefix}.{key}{'.NAME' if named else ''}".lstrip(".")
            _collect(SectionLocation(member, prefix, section_tag(member) if len(members) > 1 else None), found)


def closest_match(word: str, words: list[str]) -> str | None:
    """The most similar of `words`, or None when none is similar."""
    lower = {candidate.lower(): candidate for candidate in words}
    close = get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return lower[close[0]] if close else None


def suggest_match(word: str, words: list[str]) -> str:
    """`; did you mean X?`, or nothing."""
    near = closest_match(word, words)
    return f"; did you mean `{near}`?" if near else ""


def join_quoted(words: list[str]) -> str:
    """Words as `a`, `b` and `c`."""
    *front, last = [f"`{word}`" for word in words]
    return f"{', '.join(front)} and {last}" if front else last


def explain_unknown_key(key: str, owner: type[Section]) -> str:
    """What is wrong with `key` in section `owner`, and what to do."""
    if getattr(owner, "function", None) is not None:  # a part of a user's file
        known = list(owner.model_fields)
        return f"unknown key{suggest_match(key, known) or f'; valid here: {join_quoted(known)}'}"
    here = next((home for home in section_locations() if home.section is owner), SectionLocation(owner, "a stage"))
    others = [home for home in section_locations() if key in home.section.model_fields and home.section is not owner]
    siblings = [home for home in others if here.tag and home.prefix == here.prefix]
    near = suggest_match(key, list(owner.model_fields))
    if siblings and here.tag:
        noun = _NOUNS[here.prefix]
        tags = join_quoted([str(home.tag) for home in siblings])
        return f"`{key}` is honoured by {noun} {tags}, not by `{here.tag}`{near or '; remove it'}"
    if here.prefix == "a stage" and key in RunConfig.model_fields:
        return f"`{key}` belongs to the whole run, not to a stage; move it to the top level"
    if others and key != "name":
        places = join_quoted(_places(others, key))
        return f"unknown key; it is honoured as {places}{near or '; move it there'}"
    if key in COMMON_KEY_ALIASES:
        return f"unknown key; rollmill calls this `{COMMON_KEY_ALIASES[key]}`"
    if near:
        return f"unknown key{near}"
    return f"unknown key; valid here: {', '.join(owner.model_fields)}"


def _places(homes: list[SectionLocation], key: str) -> list[str]:
    """Where a key stands, once for every section or list of sections."""
    tags: dict[str, list[str]] = {}
    for home in homes:
        tags.setdefault(home.prefix, []).extend([home.tag] if home.tag else [])
    found = []
    for prefix, names in tags.items():
        where = f"{prefix}.N" if prefix in _LISTS else prefix
        found.append(f"{where}.{key}".lstrip(".") + (f" ({_NOUNS[prefix]} {', '.join(names)})" if names else ""))
    return found
