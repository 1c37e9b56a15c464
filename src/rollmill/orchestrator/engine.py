"""Builds the rollout engine of a stage, and the publisher that sends it the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rollmill.config.checks.engine import uses_engine
from rollmill.config.engines import NativeEngineConfig, VLLMEngineConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.config.run import StageConfig
from rollmill.engines.base import RolloutEngine
from rollmill.engines.native import NativeEngine
from rollmill.engines.vllm.engine import VLLMEngine
from rollmill.engines.vllm.process import (
    VLLMLaunchConfig,
    current_python,
    make_engine_folder,
    probe_python,
    require_torchvision,
)
from rollmill.errors import ConfigError, ModelError
from rollmill.models.from_scratch import silence_transformers
from rollmill.models.load import PolicyModel
from rollmill.models.lora import merged_weights
from rollmill.models.routing import routing_shape
from rollmill.models.vision import checkpoint_names, picture_processor, text_model
from rollmill.registry import build_component
from rollmill.weights import (
    InPlacePublisher,
    SharedMemorySender,
    TransferPublisher,
    WeightPublisher,
    shared_memory_folder,
)
from rollmill.weights.layout import CRC32, XXH3

_SEEING = {
    "skip_tokenizer_init": False,  # the processor needs one
    "mm_device_do_normalize": False,  # constants in buffers, which vLLM's start with random weights overwrites
    "mm_processor_kwargs": {"use_fast": False},  # pixels as in the trainer: resized by Pillow
}
"""Arguments of vLLM for a vision-language model."""


def build_engine(
    policy: PolicyModel, config: StageConfig, precision: str, weights: Path | None = None, *, trained_on: bool = True
) -> RolloutEngine:
    """Build the engine that `config.engine` names; it computes in `precision` (bf16 or fp32). A stage that generates
    nothing gets the native one.

    Args:
        weights: where vLLM's process finds weights that another process shares; None: `build_publisher` shares them.
        trained_on: its completions are trained on.

    Raises:
        ConfigError: engine.python is no Python with vLLM; sleep mode is configured without a GPU.
        ModelError: vLLM cannot load this model's weights.
    """
    section = config.engine if uses_engine(config) else NativeEngineConfig()
    use = EngineUse(config, weights, trained_on)
    engine: RolloutEngine = build_component(section, policy, config.rollout, precision, use)
    return engine


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The stage that uses an engine. See `build_engine` for the others."""

    stage: StageConfig
    weights: Path | None
    trained_on: bool


def build_native(
    section: NativeEngineConfig, policy: PolicyModel, rollout: RolloutConfig, precision: str, use: EngineUse
) -> NativeEngine:
    """Build the native engine of a stage."""
    replayed = use.trained_on and replays_routing(use.stage, policy.model)
    return build_native_engine(
        policy,
        rollout,
        precision,
        keep=section.after_update == "keep",
        record_routing=replayed,
        prefix_cache_bytes=int(section.prefix_cache_gb * 2**30),
        int8=section.weights == "int8",
    )


def build_vllm(
    section: VLLMEngineConfig, policy: PolicyModel, rollout: RolloutConfig, precision: str, use: EngineUse
) -> VLLMEngine:
    """Build the vLLM engine of a stage."""
    return build_vllm_engine(policy, section, rollout, precision, use.weights)


def replays_routing(config: StageConfig, model: nn.Module) -> bool:
    """True if a stage trains tokens through the experts that their rollouts chose.

    Raises:
        ConfigError: it is configured, and the model is no mixture of experts.
    """
    wanted, recorded = config.trainer.router_replay, "router_replay" not in config.engine.unsupported
    if not wanted or not recorded or not config.algorithm.uses_rollouts:
        return False
    if routing_shape(model) is None and wanted is True:
        raise ConfigError(
            f"stage {config.name}: trainer.router_replay: {type(model).__name__} has no routers that select experts by "
            "topk; remove this key"
        )
    return routing_shape(model) is not None


def build_publisher(policy: PolicyModel, engine: RolloutEngine, precision: str) -> WeightPublisher:
    """Build the publisher of the trainer's weights for an engine from `build_engine`."""
    if not isinstance(engine, VLLMEngine):
        return InPlacePublisher(engine)

    def weights() -> dict[str, torch.Tensor]:
        return merged_weights(policy.model)

    sender = SharedMemorySender(
        engine.weights_path,
        weights(),
        dtype=_torch_dtype(precision),
        checksum=engine.checksum,
    )
    return TransferPublisher(sender, weights, engine)


def build_native_engine(
    policy: PolicyModel,
    rollout: RolloutConfig,
    precision: str,
    *,
    keep: bool = False,
    record_routing: bool = False,
    prefix_cache_bytes: int = 1 << 30,
    int8: bool = False,
) -> NativeEngine:
    """Build the native engine, with the policy's own parameters."""
    return NativeEngine(
        policy.model,
        policy.tokenizer,
        eos_ids=policy.eos_ids,
        context=policy.context,
        dtype=_torch_dtype(precision),
        max_sequences=rollout.max_sequences,
        prefill_tokens=rollout.prefill_tokens,
        keep=keep,
        record_routing=record_routing,
        prefix_cache_bytes=prefix_cache_bytes,
        int8=int8,
    )


def shared_checksum(configs: Iterable[StageConfig]) -> str:
    """The checksum of shared weights that the engines of all these stages can verify."""
    engines = [config.engine for config in configs if uses_engine(config)]
    pythons = {engine.python or current_python() for engine in engines if isinstance(engine, VLLMEngineConfig)}
    return CRC32 if CRC32 in [_checksum(probe_python(python)) for python in pythons] else XXH3


def build_vllm_engine(
    policy: PolicyModel, engine: VLLMEngineConfig, rollout: RolloutConfig, precision: str, weights: Path | None = None
) -> VLLMEngine:
    """Build the vLLM engine, whose process starts with the first request."""
    processor = picture_processor(policy.model)
    if any(weight.ndim > 2 for weight in text_model(policy.model).parameters()):
        raise ModelError(
            "engine `vllm` cannot be given this model's weights: it is a mixture of experts, whose weights have other "
            "names in memory than vLLM reads; use engine `native`"
        )
    gpu = policy.device.type == "cuda"
    if engine.sleep and not gpu:
        raise ConfigError("engine.sleep: vLLM sleeps on GPUs only, and this run is on a CPU; remove it")
    python = engine.python or current_python()
    found = probe_python(python)
    folder, lock = make_engine_folder(shared_memory_folder())
    model = folder / "model"
    settings = policy.model.config.__class__.from_dict(policy.model.config.to_dict())
    settings.architectures = [type(policy.model).__name__]
    settings.save_pretrained(model)
    if processor is not None:
        require_torchvision(policy.model.config.model_type, python, found)
        with silence_transformers():
            processor.save(model)
    at_once = rollout.prefill_tokens + rollout.max_sequences
    arguments = {
        "model": str(model),
        "dtype": "bfloat16" if precision == "bf16" else "float32",
        "max_model_len": policy.context,
        "max_num_seqs": rollout.max_sequences,
        # chunked prompts reset the generator after a discarded token, which fails on CPUs: vLLM dies
        "enable_chunked_prefill": gpu,
        "max_num_batched_tokens": at_once if gpu else max(at_once, policy.context),
        "kv_cache_memory_bytes": int(engine.cache_gb * 2**30),
        "enforce_eager": not (gpu if engine.compile == "auto" else engine.compile),
        **({"enable_sleep_mode": True} if engine.sleep else {}),
        **({} if processor is None else _SEEING),
        **engine.options,
    }
    launch = VLLMLaunchConfig(
        python,
        folder,
        {
            "arguments": arguments,
            "weights": str(weights or folder / "weights"),
            "folder": str(folder),
            "names": {} if processor is None else checkpoint_names(policy.model),
        },
        threads=torch.get_num_threads(),
        deadline_s=engine.deadline_s,
        lock=lock,
    )
    return VLLMEngine(
        launch,
        policy.tokenizer,
        eos_ids=policy.eos_ids,
        context=policy.context,
        restarts=engine.restarts,
        checksum=_checksum(found),
    )


def _checksum(found: dict[str, bool]) -> str:
    return XXH3 if found["xxhash"] else CRC32


def _torch_dtype(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32
