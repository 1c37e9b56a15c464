"""Text description of a run, as printed by `rollmill check`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollmill.config.algorithms.base import AlgorithmOptions, OfflineAlgorithmOptions, PolicyGradientOptions
from rollmill.config.checks.capability import find_unused_keys
from rollmill.config.engines import EngineConfig
from rollmill.config.loader import LoadedRun
from rollmill.config.model import ModelConfig, NewModelConfig
from rollmill.config.operators import OperatorSection
from rollmill.config.placement import RayPlacement
from rollmill.config.rewards import Reward, attainable_maximum, reward_part_names
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.section import NamedSection, Section
from rollmill.config.taskset import TasksetConfig, TasksetSection
from rollmill.config.workflows import RoleConfig


def format_algorithm_parts(algorithm: AlgorithmOptions) -> Iterator[tuple[str, str]]:
    """Yields (part, name and values) of an algorithm, for `rollmill check` and `rollmill algorithms`; disabled parts
    are skipped."""
    if not isinstance(algorithm, PolicyGradientOptions):
        values = algorithm.model_dump(mode="json", exclude={"name", "batch"}, exclude_none=True)
        yield "loss", ", ".join(f"{key} {format_value(value)}" for key, value in values.items())
        return
    yield "advantage", _named(algorithm.advantage)
    yield "loss", _named(algorithm.loss)
    yield "aggregation", algorithm.aggregation
    if algorithm.kl.coefficient:
        kl = algorithm.kl
        refreshed = f", to the policy of every {kl.refresh_every} steps" if kl.refresh_every is not None else ""
        steered = f", towards {kl.target:g} nats per token (horizon {kl.horizon})" if kl.target is not None else ""
        yield "kl", f"{kl.coefficient:g} x {kl.estimator} in the {kl.where}{refreshed}{steered}"
    if algorithm.corrections:
        yield "corrections", " x ".join(_named(each) for each in algorithm.corrections)
    if algorithm.masks:
        yield "masks", ", ".join(_named(each) for each in algorithm.masks)
    if algorithm.entropy_control is not None:
        yield "entropy", f"weight from {algorithm.entropy:g} on ({_values(algorithm.entropy_control)})"
    if algorithm.corrections or algorithm.proximal != "auto":
        chosen = "recompute" if algorithm.proximal == "auto" else algorithm.proximal
        yield "old log-probs", f"{chosen} (where they are not the policy's own)"
    if algorithm.advantage.uses_critic:
        yield "critic", _values(algorithm.critic)
    named = {"name", "advantage", "loss", "aggregation", "kl", "corrections", "masks", "proximal", "critic"}
    named |= {"entropy_control"} if algorithm.entropy_control is None else {"entropy_control", "entropy"}
    rest = algorithm.model_dump(mode="json", exclude=named)
    shown = {key: value for key, value in rest.items() if value not in (0, 0.0, False, None)}
    if shown:
        yield "besides", ", ".join(f"{key} {format_value(value)}" for key, value in shown.items())


def format_value(value: Any) -> str:
    """Formats a scalar or list."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value).replace("\n", "\\n")
    return f"'{text}'" if isinstance(value, str) and (" " in text or not text) else text


def _named(section: Any) -> str:
    values = _values(section)
    return f"{section.name} ({values})" if values else str(section.name)


def _values(section: Section) -> str:
    values = section.model_dump(mode="json", exclude={"name"}, exclude_none=True)
    return ", ".join(f"{key} {format_value(value)}" for key, value in values.items())


CHAR_VOCABULARY = 100  #: assumed before the taskset's characters are counted


@dataclass(frozen=True, slots=True)
class TaskCount:
    """Tasks that a stage uses, and the rows and tasks left out, by reason."""

    tasks: int
    left_out: Mapping[str, int]
    examples: TaskCount | None = None  #: demonstrations or pairs, for an algorithm that also rolls tasks out

    def describe_left_out(self) -> str:
        """Returns how many were left out and why: `3 left out: 2 empty response, 1 bad row`."""
        reasons = ", ".join(f"{number} {reason}" for reason, number in self.left_out.items())
        return f"{sum(self.left_out.values())} left out" + (f": {reasons}" if reasons else "")

    def describe_examples(self) -> str:
        """Returns the same for the examples, to follow the tasks; empty without them."""
        one = self.examples
        return "" if one is None else f"; {one.tasks} of them to imitate, {one.describe_left_out()}"


TaskCounts = Mapping[tuple[str, str], TaskCount]
"""By stage name, and "taskset", "evaluation" or "evaluation.sets.NAME"."""


def describe_run(run: LoadedRun, counts: TaskCounts) -> str:
    """Describes the run as readable lines. Tasksets that are not in `counts` are shown without a number of tasks."""
    config = run.config
    lines = [
        _wrapped("", "run", f"{config.name} ({run.path})"),
        _wrapped("", "writes", f"{run.out}/"),
        _wrapped("", "model", _model(config.model)),
        _wrapped("", "machine", f"device {config.device}, threads {config.threads}, seed {config.seed}{_mode(config)}"),
        _wrapped("", "checkpoint", _options(config.checkpoint)),
        _wrapped("", "supervise", _options(config.supervise)),
    ]
    lines += (
        [_wrapped("", "placement", _on_ray(config.placement))] if isinstance(config.placement, RayPlacement) else []
    )
    lines += [_wrapped("", "plugins", ", ".join(str(path) for path in config.plugins))] if config.plugins else []
    for number, stage in enumerate(run.stages, 1):
        lines += ["", f"stage {number} of {len(run.stages)}: {stage.name}"]
        lines += [_wrapped("  ", label, text) for label, text in _stage(stage, counts)]
    return "\n".join(lines)


def _mode(config: RunConfig) -> str:
    return "" if config.mode == "both" else f", mode {config.mode}"


def _on_ray(placement: RayPlacement) -> str:
    kinds = []
    for kind in placement.explorers:
        engine = "" if kind.engine is None else f"engine {_engine(kind.engine)}"
        words = ", ".join(filter(None, [_options(kind, skip={"count", "engine"}, changed=True), engine]))
        kinds.append(f"{kind.count} x explorer" + (f" ({words})" if words else ""))
    more = _options(placement, skip={"name", "explorers"}, changed=True)
    return f"ray: {', '.join(kinds)}" + (f"; {more}" if more else "")


def estimate_parameters(new: NewModelConfig) -> int:
    """Estimates the parameters of a new model, with the vocabulary at its upper bound."""
    width, head = new.hidden_size, new.head_dim or new.hidden_size // new.heads
    vocabulary = CHAR_VOCABULARY if new.tokenizer.kind == "char" else new.tokenizer.vocab_size
    attention = 2 * width * head * (new.heads + new.kv_heads)
    mlp = 3 * width * (new.intermediate_size or 3 * width)
    embeddings = vocabulary * width * (1 if new.tie_embeddings else 2)
    return embeddings + new.layers * (attention + mlp + 2 * width) + width


def _model(model: ModelConfig) -> str:
    new = model.new
    if model.path != "new" or new is None:
        lora = model.lora
        adapters = "" if lora is None else f", adapters of rank {lora.rank}" + ("" if lora.merge else ", not merged")
        below = "" if model.quantization is None else f", over weights in {model.quantization}"
        return f"{model.path}{adapters}{below}" + (" (model.new is on standby)" if new else "")
    millions = estimate_parameters(new) / 1e6
    words = f"up to {new.tokenizer.vocab_size} tokens" if new.tokenizer.kind == "bpe" else "one token per character"
    return (
        f"new {new.architecture}, about {millions:.{1 if millions >= 1 else 2}f}M parameters: {new.layers} layers x "
        f"{new.hidden_size}, {new.heads} heads ({new.kv_heads} for keys), context {new.context}, "
        f"{new.tokenizer.kind} tokenizer ({words})"
    )


def _stage(stage: StageConfig, counts: TaskCounts) -> Iterator[tuple[str, str]]:
    rollout, evaluation, algorithm = stage.rollout, stage.evaluation, stage.algorithm
    if stage.domains:
        yield from _domains(stage, counts)
    elif stage.taskset is not None:
        yield "tasks", _taskset(stage.taskset, counts.get((stage.name, "taskset")))
    if algorithm.uses_rollouts and stage.domains:
        yield "steps", f"{stage.steps}, each {rollout.batch} tasks of all domains and a group of completions for each"
        yield "rollout", _rollout(stage, skip={"batch"})
    elif algorithm.uses_rollouts:
        total = rollout.batch * rollout.group_size
        yield "steps", f"{stage.steps}, each {rollout.batch} tasks x {rollout.group_size} completions = {total}"
        yield "rollout", _rollout(stage, skip={"batch", "group_size"})
    else:
        assert isinstance(algorithm, OfflineAlgorithmOptions)
        names = {"preference pairs": "pairs", "worked solutions": "demonstrations"}
        learned = names.get(algorithm.examples, algorithm.examples)
        yield "steps", f"{stage.steps}, each {algorithm.batch} {learned}"
    if algorithm.uses_rollouts and not stage.domains and not stage.workflow.single_turn:
        yield "workflow", _own(stage.workflow)
        played = [
            f"{name} ({_options(role, changed=True)})" if role != RoleConfig() else name
            for name, role in stage.roles.items()
        ]
        if played:
            yield "roles", ", ".join(played)
        for name, model in stage.models.items():
            yield "model", f"{name}: {_options(model, changed=True)}"
    if stage.engine.name != "native":
        yield "engine", _engine(stage.engine)
    for index, reward in enumerate([] if stage.domains else stage.rewards):
        yield "rewards" if index == 0 else "", f"{reward.weight:g} x {reward.name}{_bracketed(reward)}"
    if settings := _options(stage.reward_settings, changed=True):
        yield "reward settings", settings
    for index, operator in enumerate(stage.pipeline):
        yield "pipeline" if index == 0 else "", f"{operator.name}{_operator(operator)}"
    for label, section in (("buffer", stage.buffer), ("offline data", stage.offline_data)):
        if options := _options(section, changed=True):
            yield label, options
    words = "; ".join(f"{part} {text}" for part, text in format_algorithm_parts(algorithm))
    yield "algorithm", f"{algorithm.name}: {words}"
    unused = {str(path[-1]) for path in find_unused_keys(stage) if path[0] == "trainer"}
    yield "trainer", _options(stage.trainer, skip=unused)
    if stage.offload is not None:
        yield "offload", _options(stage.offload, changed=True) or "auto"
    if evaluation is None:
        yield "evaluation", "none"
        return
    for name, held_out in evaluation.all_sets().items():
        source = _taskset(held_out.taskset, counts.get((stage.name, evaluation_key(name))))
        yield "evaluation", f"{name}: {source}" if name else source
        parts = {"workflow", "environment", "rewards", "sampling"}
        yield "", _options(held_out, skip={"taskset", "sets", "k", "answer", *parts})
        for key in ("k", "answer", *sorted(parts)):
            value = getattr(held_out, key)
            if value != type(held_out).model_fields[key].default:
                yield "", f"{key} {_own(value)}"
    if not algorithm.uses_rollouts:
        yield "", _options(rollout, skip={"batch", "group_size"})
    if stage.early_stop is not None:
        yield "early stop", _options(stage.early_stop)


def _rollout(stage: StageConfig, skip: set[str]) -> str:
    """Formats the stage's rollout settings, and how late its rollouts may be."""
    words = [_options(stage.rollout, skip=skip), f"max_staleness {stage.max_staleness}"]
    words += [f"sync_interval {stage.sync_interval}"] if stage.sync_interval > 1 else []
    return ", ".join(words)


def _domains(stage: StageConfig, counts: TaskCounts) -> Iterator[tuple[str, str]]:
    """Yields the domains: tasks and shares, the matrix of domains and rewards with the attainable maximum, and what
    else is a domain's own."""
    views = stage.by_domain()
    for index, (name, domain) in enumerate(stage.domains.items()):
        tasks = _taskset(views[name].required_taskset, counts.get((stage.name, f"domains.{name}.taskset")))
        yield "domains" if index == 0 else "", f"{name}: weight {format_value(domain.weight)}, {tasks}"
    mixing = _options(stage.mixing, skip={"by"}, changed=True)
    yield "mixing", f"by {stage.mixing.by}" + (f" ({mixing})" if mixing else "")
    table = {name: reward_weights(view) for name, view in views.items()}
    rewards = list(dict.fromkeys(reward for row in table.values() for reward in row))
    header = ["", *rewards, "at most"]
    rows = [
        [name, *(format_value(row[each]) if each in row else "-" for each in rewards), _attainable(views[name])]
        for name, row in table.items()
    ]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for index, row in enumerate((header, *rows)):
        cells = [row[0].ljust(widths[0]), *(each.rjust(width) for each, width in zip(row[1:], widths[1:], strict=True))]
        yield "rewards" if index == 0 else "", "  ".join(cells)
    for name, domain in stage.domains.items():
        own = {key: value for key, value in domain.overrides().items() if key not in ("rewards", "algorithm")}
        words = [f"{key} {_own(value)}" for key, value in own.items()]
        if rollout := _options(domain.rollout, changed=True):
            words.append(f"rollout {rollout}")
        if domain.algorithm is not None and stage.algorithm.uses_rollouts:
            parts = "; ".join(f"{part} {text}" for part, text in format_algorithm_parts(domain.algorithm))
            words.append(f"algorithm {domain.algorithm.name}: {parts}")
        if words:
            yield name, "; ".join(words)


def reward_weights(stage: StageConfig) -> dict[str, float]:
    """Returns the weight of each reward of a stage, by its name in the results."""
    names = reward_part_names(stage.rewards)
    return {name: each.weight for name, each in zip(names, stage.rewards, strict=True)}


def _attainable(stage: StageConfig) -> str:
    if stage.taskset is not None and stage.taskset.fields.rewards is not None:
        return "that of the rewards that each row names"
    maxima = {role: attainable_maximum(view.rewards, view.reward_settings) for role, view in stage.by_role().items()}
    texts = {role: "not known" if maximum is None else f"{maximum:g}" for role, maximum in maxima.items()}
    return ", ".join(f"{role} {text}" if role else text for role, text in texts.items())


def _engine(engine: EngineConfig) -> str:
    options = _options(engine, skip={"name"}, changed=True)
    return engine.name + (f" ({options})" if options else "")


def evaluation_key(held_out: str) -> str:
    """Returns the key of an evaluation set; the unnamed one has the name ""."""
    return f"evaluation.sets.{held_out}" if held_out else "evaluation"


def _own(value: object) -> str:
    """Formats a setting that an evaluation set overrides."""
    if isinstance(value, list) and all(isinstance(each, Reward) for each in value):
        return ", ".join(f"{each.weight:g} x {each.name}{_bracketed(each)}" for each in value)
    if isinstance(value, list) and all(isinstance(each, OperatorSection) for each in value):
        return ", ".join(f"{each.name}{_operator(each)}" for each in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} ({_own(each)})" for name, each in value.items())
    if isinstance(value, NamedSection):
        options = _options(value, skip={"name"}, changed=True)
        return value.name + (f" ({options})" if options else "")
    if isinstance(value, Section):
        return _options(value, changed=True)
    return format_value(value)


def _taskset(taskset: TasksetConfig, count: TaskCount | None) -> str:
    number = f"{count.tasks} tasks ({count.describe_left_out()}{count.describe_examples()}) from " if count else ""
    mixed = [f"{entry.weight:g} x {entry.name}: {_source(entry)}" for entry in taskset.mix]
    prepared = _source(taskset)
    return number + ("; ".join([f"a mix{prepared}", *mixed]) if mixed else prepared)


def _source(taskset: TasksetSection) -> str:
    generator = taskset.generator
    source = (
        f"reasoning-gym {generator.name}"
        if generator
        else f"{taskset.path or taskset.function or taskset.harbor or ''}"
    )
    apart = {"path", "generator", "function", "harbor", "fields", "pipeline", "sampler", "mix", "name", "weight"}
    details = [_options(taskset, skip=apart, changed=True)]
    if fields := _options(taskset.fields, changed=True):
        details.append(f"fields {fields}")
    if taskset.pipeline:
        details.append(f"pipeline {', '.join(each.name for each in taskset.pipeline)}")
    if taskset.sampler != TasksetSection.model_fields["sampler"].default:
        options = _options(taskset.sampler, skip={"name"}, changed=True)
        details.append(f"sampler {taskset.sampler.name}" + (f" ({options})" if options else ""))
    extra = ", ".join(part for part in details if part)
    return source + (f" ({extra})" if extra else "")


def _bracketed(reward: Reward) -> str:
    common = {key for key, of in Reward.model_fields.items() if getattr(reward, key) == of.default}
    options = _options(reward, skip={"name", "weight", *common})
    return f" ({options})" if options else ""


def _operator(operator: OperatorSection) -> str:
    inside = {key[0] for key, _ in operator.reward_lists}
    own = [reward for _, rewards in operator.reward_lists for reward in rewards]
    rewards = [f"{name}{_bracketed(each)}" for name, each in zip(reward_part_names(own), own, strict=True)]
    options = _options(operator, skip={"name", *map(str, inside)}, changed=True)
    words = ", ".join([*([f"by {' and '.join(rewards)}"] if rewards else []), *([options] if options else [])])
    return f" ({words})" if words else ""


def _options(section: Section, skip: set[str] | None = None, changed: bool = False) -> str:
    """Formats `key value` pairs; unset ones are left out, and with `changed` also defaults."""
    shown = section.model_dump(mode="json", exclude=skip, exclude_none=True, exclude_defaults=changed)
    return _pairs({key: value for key, value in shown.items() if value not in ([], {})}, section)


def _pairs(values: Mapping[str, object], section: Section) -> str:
    words = []
    for key, value in values.items():
        inner = getattr(section, key, None)
        shown = f"({_options(inner)})" if isinstance(inner, Section) else format_value(value)
        words.append(f"{key} {shown}")
    return ", ".join(words)


def _wrapped(indent: str, label: str, text: str) -> str:
    start = f"{indent}{label:<11} "
    return textwrap.fill(
        text,
        120,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
