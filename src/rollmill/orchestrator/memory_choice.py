"""Chooses what `auto` means in the keys that decide on memory: by the shape of the model and the size of the GPU.

The rule knows the whole of a GPU's memory, not what is free, so a resumed run and `rollmill plan` find the same.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from rollmill.config.checks.offload import engines_on_device, explorers_on_device
from rollmill.config.loader import LoadedRun
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.trainer import PLAIN_CHOICES
from rollmill.errors import ConfigError
from rollmill.models.gpu_kinds import MEMORY_USABLE, nominal_memory
from rollmill.models.load import PolicyModel, build_meta_policy
from rollmill.models.storage import narrow_weights
from rollmill.offload.plan import GB
from rollmill.orchestrator.stage_memory import MemoryByPhase, StageModel, StepTokens, too_large

_SMALLER = (4096, 2048, 1024)
"""Micro-batches that are tried after the usual one."""
_ENOUGH_CACHE = 0.25
"""Share that has to fit of the keys and values of all completions, if all were as long as they may be: that is half of
them at half that length. Others wait."""


@dataclass(frozen=True)
class MemoryChoice:
    """The choice for a stage on a GPU."""

    values: Mapping[str, Any]  #: of the keys of `trainer` by name, and `cache_gb`
    stage: StageConfig  #: with these values in place of `auto`
    model: Any  #: the policy on the meta device, with weights of the chosen type
    phases: MemoryByPhase  #: what the stage then takes, with everything offloaded that `offload` may move
    fits: bool
    problems: tuple[str, ...] = ()  #: what does not fit, and which keys would change that

    @property
    def peak(self) -> float:
        return max(each.total for each in self.phases.values())

    @property
    def needed(self) -> float:
        """Bytes without those of keys and values, which are fewer as long as completions are short."""
        return max(each.total - each.parts.get("cache", 0.0) for each in self.phases.values())

    def describe(self) -> str:
        """Returns the values, and the bytes of each phase."""
        phases = ", ".join(f"{phase} {memory.total / GB:.3g}" for phase, memory in self.phases.items())
        return f"{describe_values(self.values)}; GB by phase: {phases}"


def describe_values(values: Mapping[str, Any]) -> str:
    """Returns keys and values, as in a run file."""
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in values.items()).replace('"', "")


AnyStage = TypeVar("AnyStage", bound=StageConfig)
Explorers = Sequence[StageConfig] | None
"""The stage as each explorer sees it that shares the GPU from another process; None: this process rolls out."""


def explorers_beside(config: RunConfig, stages: Sequence[StageConfig]) -> list[Explorers]:
    """Returns the explorers that share the trainer's GPU, of each stage; none where vLLM has GPUs of its own."""
    engines = engines_on_device(config)
    if engines is not None:
        return [explorers_on_device(stage, engines) for stage in stages]
    return [[] if getattr(stage.engine, "gpus", None) else None for stage in stages]


def leaves_choice(stage: StageConfig) -> bool:
    """Returns whether a key of the stage that decides on memory says `auto`."""
    return any(getattr(stage.trainer, key) == "auto" for key in PLAIN_CHOICES) or _open_cache(stage)


def settle_stage(stage: AnyStage, values: Mapping[str, Any]) -> AnyStage:
    """Returns the stage with these values in place of `auto`."""
    engine = stage.engine.settled(values.get("cache_gb"))
    return stage.model_copy(update={"trainer": stage.trainer.settled(values), "engine": engine})


def settle_on_cpu(stage: AnyStage, param_dtype: str = "fp32") -> AnyStage:
    """Returns the stage with the values that `auto` has on a CPU. The native engine's cache then has no limit."""
    engine = stage.engine.settled(stage.engine.cpu_cache_gb)
    trainer = stage.trainer.settled({**PLAIN_CHOICES, "param_dtype": param_dtype})
    return stage.model_copy(update={"trainer": trainer, "engine": engine})


def _open_cache(stage: StageConfig) -> bool:
    return getattr(stage.engine, "cache_gb", None) == "auto"


def choose_memory(
    stages: Sequence[StageConfig],
    model: Any,
    memory: float,
    explorers: Sequence[Explorers],
    keep: str | None = None,
) -> list[MemoryChoice]:
    """Chooses for every stage of a run on GPUs.

    fp32 weights without checkpointing come first, then checkpointing, then smaller micro-batches, then bf16 weights.
    If nothing fits, the last and smallest is chosen. The cache of keys and values gets what is left.

    Args:
        model: the policy on the meta device, with fp32 weights.
        memory: bytes of a GPU by its data sheet.
        explorers: of each stage, see `explorers_beside`.
        keep: type of the weights that the run has already.
    """
    choices: list[MemoryChoice] = []
    for param_dtype in _param_dtypes(stages, keep):
        if param_dtype == "bf16" and model.get_input_embeddings().weight.dtype != torch.bfloat16:
            model = copy.deepcopy(model)
            narrow_weights(model)
        choices = [
            _choose(stage, param_dtype, model, memory, beside) for stage, beside in zip(stages, explorers, strict=True)
        ]
        if all(each.fits for each in choices):
            break
    return choices


def _param_dtypes(stages: Sequence[StageConfig], keep: str | None) -> list[str]:
    """Types of the weights to try; all stages train the same ones."""
    given = [stage.trainer.param_dtype for stage in stages if stage.trainer.param_dtype != "auto"]
    if given or keep is not None:
        return [given[0] if given else str(keep)]
    return ["fp32", "bf16"] if all(map(_may_have_narrow_weights, stages)) else ["fp32"]


def _may_have_narrow_weights(stage: StageConfig) -> bool:
    """Returns whether the stage's other keys go with weights in bf16."""
    algorithm, offload = stage.algorithm, stage.offload
    conflicts = stage.trainer.model_copy(update={"param_dtype": "bf16"}).conflicts()
    moved = offload is not None and (offload.policy, offload.cast) != ("auto", "auto")
    trained = algorithm.trains_policy and algorithm.active_critic is None
    return trained and not moved and not conflicts.keys() & {"param_dtype", "precision"}


def _choose(stage: StageConfig, param_dtype: str, model: Any, memory: float, explorers: Explorers) -> MemoryChoice:
    """Chooses for one stage the first settings that fit, or the last."""
    tokens = StepTokens.at_most(stage, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    choice: MemoryChoice | None = None
    for settings in _settings(stage, tokens.longest):
        values = {"param_dtype": param_dtype, **settings}
        choice = _with_cache(settle_stage(stage, values), values, model, tokens, memory, explorers)
        if choice.fits:
            break
    assert choice is not None
    return choice


def _settings(stage: StageConfig, longest: int) -> Iterator[dict[str, Any]]:
    """Yields what to try, in this order. A micro-batch that is shorter than the longest sequence saves nothing."""
    tokens: Any = stage.trainer.micro_batch_tokens
    checkpointing: Any = stage.trainer.gradient_checkpointing
    usual = PLAIN_CHOICES["micro_batch_tokens"]
    sizes = [usual, *(each for each in _SMALLER if each >= longest)] if tokens == "auto" else [tokens]
    ways = [False, True] if checkpointing == "auto" else [checkpointing]
    for way in ways:
        yield {"gradient_checkpointing": way, "micro_batch_tokens": sizes[0]}
    for size in sizes[1:]:
        yield {"gradient_checkpointing": ways[-1], "micro_batch_tokens": size}


def _with_cache(
    stage: StageConfig,
    values: dict[str, Any],
    model: Any,
    tokens: StepTokens,
    memory: float,
    explorers: Explorers,
) -> MemoryChoice:
    """Finds the room for the cache of a stage whose trainer has plain values, and whether everything fits."""
    trainer, usable = stage.trainer, MEMORY_USABLE * memory
    precision = "bf16" if trainer.param_dtype == "bf16" or trainer.precision != "fp32" else "fp32"

    def of(cache_gb: float, others: Explorers) -> StageModel:
        settled = {"cache_gb": cache_gb}
        beside = None if others is None else [settle_stage(each, settled) for each in others]
        return StageModel(settle_stage(stage, settled), model, "cuda", precision, tokens, beside)

    bare = of(0.0, explorers)
    wanted = bare.cache()
    given = None if _open_cache(stage) else getattr(stage.engine, "cache_gb", wanted / 2**30)
    cache_gb, enough = given, True
    if given is None:
        alone = explorers is not None and not explorers  # engines have GPUs of their own
        room = usable - (of(0.0, [stage]).explorer_bytes() if alone else bare.held_with_cache())
        size = min(wanted, room / max(len(explorers or ()), 1))
        enough = size >= _ENOUGH_CACHE * wanted
        cache_gb = max(math.floor(10 * size / 2**30) / 10, 0.1)
    assert cache_gb is not None
    found = of(cache_gb, explorers)
    everything, least = found.memory(cache_gb * 2**30)
    phases = everything if stage.offload is None else least
    fits = enough and all(each.total <= usable for each in phases.values())
    problems = [] if fits else list(too_large(found.stage, phases, least, usable))
    if not enough:
        problems.append(
            f"stage {stage.name}: {cache_gb:g} GiB are left for keys and values, and all completions at a time need "
            f"{wanted / 2**30:.3g}: lower rollout.max_sequences ({stage.rollout.max_sequences}) or "
            "rollout.max_new_tokens, or some of them wait"
        )
    if hasattr(stage.engine, "cache_gb"):
        values = values | {"cache_gb": cache_gb}
    return MemoryChoice(values, found.stage, model, phases, fits, tuple(problems))


# In a run


def with_kept_choice(loaded: LoadedRun, machine: Mapping[str, Any]) -> LoadedRun:
    """Returns the run with the values that an earlier start has kept in machine.json, if there are any."""
    record = machine.get("memory")
    if record is None or len(record["stages"]) != len(loaded.stages):
        return loaded
    stages = zip(loaded.stages, record["stages"], strict=True)
    return _with_stages(loaded, [settle_stage(stage, values) for stage, values in stages])


def settle_run(
    loaded: LoadedRun, device: torch.device, machine: Mapping[str, Any] | None, *, trains: bool = True
) -> tuple[LoadedRun, dict[str, Any] | None, list[str]]:
    """Returns the run with plain values in place of `auto`; what to keep of the choice for later starts; and messages.

    On a CPU these are fixed values, and nothing is kept. A run that has begun keeps the type of its weights, and on a
    GPU of the same size all values.

    Args:
        machine: contents of machine.json of an earlier start; None: there was none.
        trains: this process does.

    Raises:
        ConfigError: the stages do not fit on the GPU, whatever is chosen.
    """
    if not any(map(leaves_choice, loaded.stages)):
        return loaded, None, []
    record = None if machine is None else machine.get("memory")
    keep = None if machine is None else "fp32" if record is None else str(record["stages"][0]["param_dtype"])
    if device.type != "cuda":
        return _with_stages(loaded, [settle_on_cpu(stage, keep or "fp32") for stage in loaded.stages]), None, []
    properties = torch.cuda.get_device_properties(device)
    memory = nominal_memory(properties.name, properties.total_memory)
    if machine is not None and record is not None and record["gpu"] == memory:
        return with_kept_choice(loaded, machine), None, []
    model = build_meta_policy(loaded.config.model)
    beside = explorers_beside(loaded.config, loaded.stages)
    choices = choose_memory(loaded.stages, model, memory, beside, keep)
    free, messages = float(torch.cuda.mem_get_info(device)[0]), []
    for stage, choice in zip(loaded.stages, choices, strict=True):
        messages.append(f"chosen for {memory / GB:.4g} GB of a GPU, stage {stage.name}: {choice.describe()}")
        if trains and choice.needed > properties.total_memory:
            raise ConfigError("; ".join(choice.problems))
        messages += [f"may not fit: {problem}" for problem in choice.problems]
        if choice.peak > free:
            takes = f"takes about {choice.peak / GB:.3g} GB, and {free / GB:.3g} GB of the GPU are free"
            advice = "end what else uses it, or lower trainer.micro_batch_tokens or engine.cache_gb"
            messages.append(f"stage {stage.name} {takes}: {advice}")
    kept = {"gpu": memory, "stages": [dict(each.values) for each in choices]}
    return _with_stages(loaded, [each.stage for each in choices]), kept, messages


def _with_stages(loaded: LoadedRun, stages: list[StageConfig]) -> LoadedRun:
    first = {key: getattr(stages[0], key) for key in ("trainer", "engine")}
    return replace(loaded, config=loaded.config.model_copy(update=first), stages=stages)


def settle_for(stage: AnyStage, policy: PolicyModel) -> AnyStage:
    """Returns a stage with plain values in place of `auto` for a model that is loaded, in fp32 if nobody says other."""
    if policy.device.type != "cuda":
        return settle_on_cpu(stage)
    properties = torch.cuda.get_device_properties(policy.device)
    memory = nominal_memory(properties.name, properties.total_memory)
    [choice] = choose_memory([stage], policy.model, memory, [None], keep="fp32")
    return settle_stage(stage, choice.values)
