"""Settings that are allowed, but with which a run can hardly work. `rollmill check` warns of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollmill.config.algorithms.base import PolicyGradientOptions
from rollmill.config.checks.evaluation import evaluation_set_path
from rollmill.config.engines import NativeEngineConfig
from rollmill.config.loader import LoadedRun
from rollmill.config.model import ModelConfig
from rollmill.config.run import StageConfig
from rollmill.config.tree import KeyPath, format_key_path

_SMALL_WIDTH = 512
"""Hidden size below which a model stands larger steps."""
_LARGEST_LR = {"small": 5e-2, "adapters": 1e-2, "whole": 1e-3}
"""Learning rates of AdamW above which weights, of a size of about 0.02, are overwritten within a few steps."""
_CHARACTERS_PER_TOKEN = 4
"""Of English text under a BPE tokenizer, about."""


def find_warnings(run: LoadedRun, longest_prompts: Mapping[tuple[str, str], int]) -> list[str]:
    """Returns a warning for each doubtful setting: its key, the reason and a remedy. Loads nothing but the
    `config.json` of a checkpoint folder.

    Args:
        longest_prompts: characters of the longest prompt of each taskset that is loaded, by stage and section.
    """
    facts = _checkpoint_facts(run.config.model)
    found = []
    for index, stage in enumerate(run.stages):
        prefix: KeyPath = ("stages", index) if run.config.stages else ()
        warnings = [
            *_context(run.config.model, facts, stage, longest_prompts),
            *_learning_rates(run, facts, stage),
            *_uncorrected(stage),
        ]
        found += [f"{format_key_path((*prefix, *path))}: {text}" for path, text in warnings]
    return list(dict.fromkeys(found))


def _checkpoint_facts(model: ModelConfig) -> dict[str, Any]:
    """Returns the settings of the language model in a checkpoint folder's config.json; none if it cannot be read."""
    if not isinstance(model.path, Path):
        return {}
    try:
        facts = json.loads((model.path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # loading the model says what is wrong
    inner = facts.get("text_config") if isinstance(facts, dict) else None
    return inner if isinstance(inner, dict) else facts if isinstance(facts, dict) else {}


def _whole(facts: Mapping[str, Any], key: str) -> int | None:
    value = facts.get(key)
    return value if isinstance(value, int) and value > 0 else None


def _context(
    model: ModelConfig, facts: Mapping[str, Any], stage: StageConfig, longest_prompts: Mapping[tuple[str, str], int]
) -> Iterator[tuple[KeyPath, str]]:
    """Yields completions that do not fit into the context behind the longest prompt."""
    new = model.new if model.path == "new" else None
    context = new.context if new is not None else _whole(facts, "max_position_embeddings")
    if context is None:
        return
    by_character = new is not None and new.tokenizer.kind == "char"
    for path, section, limit in _completions(stage):
        characters = longest_prompts.get((stage.name, section), 0)
        prompt = characters if by_character else characters // _CHARACTERS_PER_TOKEN
        if max(prompt, 1) + limit <= context:
            continue
        about = "" if by_character else "about "
        behind = f"the longest prompt ({about}{prompt} tokens)" if prompt else "a prompt"
        yield (
            path,
            f"{limit} tokens and {behind} do not fit into the model's context of {context}, where completions end; "
            "lower it, or use shorter prompts or a model with a longer context",
        )


def _completions(stage: StageConfig) -> Iterator[tuple[KeyPath, str, int]]:
    """Yields the key of each completion limit, the section of its taskset, and the limit in tokens."""
    if stage.algorithm.uses_rollouts:
        for name, view in stage.by_domain().items():
            section = f"domains.{name}.taskset" if name else "taskset"
            own = name and stage.domains[name].rollout.max_new_tokens is not None
            path: KeyPath = ("domains", name, "rollout", "max_new_tokens") if own else ("rollout", "max_new_tokens")
            yield path, section, view.rollout.max_new_tokens
    for name, held_out in (stage.evaluation.all_sets() if stage.evaluation else {}).items():
        limit = held_out.sampling.max_new_tokens
        place = evaluation_set_path(name)
        path = ("rollout", "max_new_tokens") if limit is None else (*place, "sampling", "max_new_tokens")
        yield path, ".".join(place), stage.for_evaluation(held_out).rollout.max_new_tokens


def _uncorrected(stage: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yields an engine that samples from a rounded policy, where nothing accounts for it."""
    engine, algorithm = stage.engine, stage.algorithm
    if not isinstance(engine, NativeEngineConfig) or engine.weights is None:
        return
    if isinstance(algorithm, PolicyGradientOptions) and algorithm.uses_rollouts and not algorithm.corrections:
        yield (
            ("engine", "weights"),
            "tokens are sampled from the rounded weights, and learned from as if the trained ones had sampled them; "
            "add algorithm.corrections: [tis]",
        )


def _learning_rates(run: LoadedRun, facts: Mapping[str, Any], stage: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yields learning rates that destroy a model."""
    model, algorithm = run.config.model, stage.algorithm
    width = model.new.hidden_size if model.path == "new" and model.new is not None else _whole(facts, "hidden_size")
    small = width is not None and width < _SMALL_WIDTH
    kind = "small" if small else "adapters" if model.lora is not None else "whole"
    rates: list[tuple[KeyPath, float]] = [(("trainer", "lr"), stage.trainer.lr)]
    if (critic := algorithm.active_critic) is not None:
        rates.append((("algorithm", "critic", "lr"), critic.lr))
    for path, lr in rates:
        if lr > _LARGEST_LR[kind]:
            usual = "1e-3" if small else "1e-5 with adapters" if model.lora is not None else "1e-6"
            yield (
                path,
                f"{lr:g} is far above what a model of this size stands: AdamW changes every weight by about so much in "
                f"each step, and weights are about 0.02 large; a usual value is {usual}",
            )
