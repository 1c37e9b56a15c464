"""Readable validation errors: location in the files, expected value and advice."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rollmill.config.field_docs import document_section
from rollmill.config.rollout import RolloutConfig
from rollmill.config.run import RunConfig
from rollmill.config.section import NamedSection, Section, is_named_section, registered_sections, section_tag
from rollmill.config.tree import ConfigProblem, KeyPath, Node, locate_key, truncate_text

# Unknown keys

COMMON_KEY_ALIASES = {
    "batch_size": "rollout.batch",
    "beta": "algorithm.kl.coefficient",
    "clip_ratio": "algorithm.loss.clip_low",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "entropy_coeff": "algorithm.entropy",
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "importance_cap": "algorithm.corrections",
    "grad_clip": "trainer.max_grad_norm",
    "kl_coef": "algorithm.kl.coefficient",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "kl_loss_type": "algorithm.kl.estimator",
    "learning_rate": "trainer.lr",
    "loss_agg_mode": "algorithm.aggregation",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_steps": "steps",
    "top_entropy_quantile": "algorithm.masks",
    "max_tokens": "rollout.max_new_tokens",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.group_size",
    "num_iterations": "trainer.epochs_per_batch",
    "ppo_epochs": "trainer.epochs_per_batch",
    "scale_rewards": "algorithm.advantage",
    "steps_per_generation": "trainer.updates_per_batch",
    "total_steps": "steps",
    "total_training_steps": "steps",
    "train_batch_size": "rollout.batch",
    "use_kl_in_reward": "algorithm.kl.where",
    "use_kl_loss": "algorithm.kl.coefficient",
}
"""Names of rollmill's keys in other frameworks."""
FORMER_NAMES = {
    "residency": "offload",
    "experts": "offline_data",
    "judging": "reward_settings",
    "order": "sampler",
    "traffic": "live_requests",
}
"""Earlier names of keys and of workflows, with those of today, which `rollmill import-config` writes."""

_NOUNS = {
    "rewards": "reward",
    "algorithm": "algorithm",
    "algorithm.advantage": "advantage",
    "algorithm.loss": "loss",
    "algorithm.corrections": "correction",
    "algorithm.masks": "mask",
    "taskset.pipeline": "operator",
    "taskset.sampler": "sampler",
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
    """A section class and its location in a run file; `tag` is the `name` that selects it among several."""

    section: type[Section]
    prefix: str
    tag: str | None = None


def unwrap_annotation(annotation: Any) -> Any:
    """Returns the annotation without Annotated and None."""
    if get_origin(annotation) is Annotated:
        return unwrap_annotation(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not NoneType]
        return unwrap_annotation(members[0]) if len(members) == 1 else Union[tuple(members)]  # noqa: UP007
    return annotation


def section_classes(annotation: Any) -> list[type[Section]]:
    """Returns the section classes that an annotation allows, in order; empty for scalars and lists."""
    annotation = unwrap_annotation(annotation)
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [member for member in members if isinstance(member, type) and issubclass(member, Section)]


@cache
def section_locations() -> tuple[SectionLocation, ...]:
    """Returns every section class of a run file with its first location."""
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
            chosen = len(members) > 1 or (issubclass(member, NamedSection) and is_named_section(member))
            _collect(SectionLocation(member, prefix, section_tag(member) if chosen else None), found)


def closest_match(word: str, words: list[str]) -> str | None:
    """Returns the most similar of `words`, or None if none is similar."""
    lower = {candidate.lower(): candidate for candidate in words}
    close = get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return lower[close[0]] if close else None


def suggest_match(word: str, words: list[str]) -> str:
    """Returns `; did you mean X?`, or an empty string."""
    near = closest_match(word, words)
    return f"; did you mean `{near}`?" if near else ""


def join_quoted(words: list[str]) -> str:
    """Joins words as `a`, `b` and `c`."""
    *front, last = [f"`{word}`" for word in words]
    return f"{', '.join(front)} and {last}" if front else last


def explain_unknown_key(key: str, owner: type[Section]) -> str:
    """Explains an unknown `key` of section `owner`: the nearest valid key, or the section that accepts it."""
    if FORMER_NAMES.get(key) in owner.model_fields:
        return _explain_former_name(key)
    if getattr(owner, "function", None) is not None:  # a user's component
        known = list(owner.model_fields)
        return f"unknown key{suggest_match(key, known) or f'; valid here: {join_quoted(known)}'}"
    here = next((home for home in section_locations() if home.section is owner), SectionLocation(owner, "a stage"))
    others = [home for home in section_locations() if key in home.section.model_fields and home.section is not owner]
    siblings = [home for home in others if here.tag and home.prefix == here.prefix]
    alias = _explain_alias(key, here)
    near = alias or suggest_match(key, list(owner.model_fields))
    if siblings and here.tag:
        noun = _NOUNS[here.prefix]
        tags = join_quoted([str(home.tag) for home in siblings])
        return f"`{key}` is honoured by {noun} {tags}, not by `{here.tag}`{near or '; remove it'}"
    if here.prefix == "a stage" and key in RunConfig.model_fields:
        return f"`{key}` belongs to the whole run, not to a stage; move it to the top level"
    if here.prefix == "domains.NAME.rollout" and key in RolloutConfig.model_fields and not alias:
        return f"a domain has no `{key}`: `rollout.{key}` of the stage is that of all domains; remove it here"
    if others and key != "name":
        places = join_quoted(_places(others, key))
        return f"unknown key; it is honoured as {places}{near or '; move it there'}"
    if alias:
        return f"unknown key; rollmill calls this `{COMMON_KEY_ALIASES[key]}`"
    if near:
        return f"unknown key{near}"
    return f"unknown key; valid here: {', '.join(owner.model_fields)}"


def _explain_former_name(name: str) -> str:
    return f"`{name}` is called `{FORMER_NAMES[name]}` now; `rollmill import-config FILE --out NEW` rewrites the file"


def _explain_alias(key: str, here: SectionLocation) -> str:
    """Returns the key that a name of other frameworks stands for, unless the section `here` lacks it; else ""."""
    target = COMMON_KEY_ALIASES.get(key)
    if target is None:
        return ""
    inside = target.removeprefix(f"{here.prefix}.") if here.prefix else target
    if inside != target and inside.partition(".")[0] not in here.section.model_fields:
        return ""
    return f"; the `{key}` of TRL and verl is `{target}` here"


def _places(homes: list[SectionLocation], key: str) -> list[str]:
    """Returns the locations of a key, once per section or list of sections."""
    tags: dict[str, list[str]] = {}
    for home in homes:
        tags.setdefault(home.prefix, []).extend([home.tag] if home.tag else [])
    found = []
    for prefix, names in tags.items():
        where = f"{prefix}.N" if prefix in _LISTS else prefix
        found.append(f"{where}.{key}".lstrip(".") + (f" ({_NOUNS[prefix]} {', '.join(names)})" if names else ""))
    return found


_EXPECTED: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("int_", lambda ctx: "a whole number"),
    ("float_", lambda ctx: "a number"),
    ("finite_number", lambda ctx: "a finite number"),
    ("bool_", lambda ctx: "true or false"),
    ("string_", lambda ctx: "text"),
    ("path_", lambda ctx: "a path"),
    ("list_type", lambda ctx: "a list"),
    ("tuple_type", lambda ctx: "a list"),
    ("too_long", lambda ctx: f"at most {ctx['max_length']} entries"),
    ("model_", lambda ctx: "a section (`key: value` lines)"),
    ("dict_type", lambda ctx: "a section (`key: value` lines)"),
    ("greater_than_equal", lambda ctx: f"at least {ctx['ge']:g}"),
    ("greater_than", lambda ctx: f"more than {ctx['gt']:g}"),
    ("less_than_equal", lambda ctx: f"at most {ctx['le']:g}"),
    ("less_than", lambda ctx: f"less than {ctx['lt']:g}"),
]


def explain_validation_error(
    error: ValidationError, model: type[Section], tree: Node, skip: Collection[str] = ()
) -> list[ConfigProblem]:
    """Converts a ValidationError to one problem per wrong value, located in the files.

    `tree` is what `model` was validated with; errors under the top-level keys `skip` are left to another caller.
    """
    by_path: dict[KeyPath, list[tuple[ErrorDetails, type[Section]]]] = {}
    for details in error.errors(include_url=False):
        path, owner = _walk(model, details["loc"])
        if path and path[0] in skip:
            continue
        by_path.setdefault(path, []).append((details, owner))
    problems = []
    for path, found in by_path.items():
        details, owner = found[0]
        if details["type"].startswith("union_tag"):
            path = (*path, "name")
        place, key = locate_key(tree, path)
        text = _text(details, owner, path) if len(found) == 1 else _expected([one for one, _ in found])
        problems.append(ConfigProblem(place, key, text))
    return problems


def _walk(model: type[Section], loc: tuple[int | str, ...]) -> tuple[KeyPath, type[Section]]:
    """Returns the key path without the labels of unions, and the section class of its last key."""
    path: list[int | str] = []
    owner, spot = model, model
    for segment in loc:
        if segment == "[key]":  # pydantic's mark of an entry's name
            break
        sections, inner = section_classes(spot), unwrap_annotation(spot)
        if len(sections) > 1:
            kind = _kind(tuple(path))
            owner = spot = next(
                each for each in [*sections, *registered_sections(kind)] if section_tag(each) == segment
            )
        elif sections:
            owner = sections[0]
            path.append(segment)
            field = owner.model_fields.get(str(segment))
            spot = field.annotation if field else None  # type: ignore[assignment]
        elif get_origin(inner) in (list, tuple, dict):
            path.append(segment)
            spot = get_args(inner)[1 if get_origin(inner) is dict else 0]
    return tuple(path), owner


def _kind(path: KeyPath) -> str:
    """Returns the kind under which users' components at `path` are registered."""
    keys = [key for key in path if isinstance(key, str)]
    return "task_operator" if keys[-1] == "pipeline" and len(keys) > 1 else keys[-1]


def _text(details: ErrorDetails, owner: type[Section], path: KeyPath) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return explain_unknown_key(str(path[-1]), owner)
    if kind == "missing":
        document_section(owner)
        field = owner.model_fields.get(str(path[-1]))
        return f"is required; {field.description or 'add it'}" if field else "is required; the list is too short"
    if kind == "value_error":
        return str(context["error"])
    if kind == "union_tag_not_found":
        return "is required; it says which component the other keys are for"
    if kind == "union_tag_invalid":
        users = [section_tag(each) for each in registered_sections(_kind(path[:-1]))]
        return _unknown_name(str(context["tag"]), str(context["expected_tags"]), users)
    return _expected([details])


def _unknown_name(name: str, expected: str, users: list[str]) -> str:
    names = [*re.findall(r"'([^']*)'", expected), *users]
    if FORMER_NAMES.get(name) in names:
        return _explain_former_name(name)
    return f"`{truncate_text(name)}` is not known{suggest_match(name, names) or ';'} valid: {', '.join(names)}"


def _expected(errors: list[ErrorDetails]) -> str:
    value = errors[0]["input"]
    wanted, near = [], None
    for details in errors:
        if details["type"] == "literal_error":
            choices = re.findall(r"'([^']*)'", details["ctx"]["expected"])
            wanted.append(_either(choices) if choices else details["ctx"]["expected"])
            near = near or (closest_match(value, choices) if isinstance(value, str) else None)
        else:
            wanted.append(_expectation(details))
    return f"expected {' or '.join(wanted)}, found {_found(value)}" + (f"; did you mean `{near}`?" if near else "")


def _either(choices: list[str]) -> str:
    return join_quoted(choices) if len(choices) == 1 else f"one of {', '.join(f'`{choice}`' for choice in choices)}"


def _expectation(details: ErrorDetails) -> str:
    for prefix, words in _EXPECTED:
        if details["type"].startswith(prefix):
            return words(details.get("ctx", {}))
    return details["msg"].removeprefix("Input should be ")


def _found(value: Any) -> str:
    if value is None:
        return "nothing (remove the key to get its default)"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"`{str(value).lower() if isinstance(value, bool) else truncate_text(str(value))}`"
