"""Builds the vLLM engine from its section of the run file: the arguments, the model's configuration, the launch."""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from rollmill.config.engines import VLLMEngineConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.engines.base import EngineUse
from rollmill.engines.vllm.engine import VLLMEngine
from rollmill.engines.vllm.process import VLLMLaunchConfig, make_engine_folder, probe_python, require_torchvision
from rollmill.errors import ConfigError, ModelError
from rollmill.models.from_scratch import silence_transformers
from rollmill.models.load import PolicyModel
from rollmill.models.quantization import count_weights
from rollmill.models.vision import picture_processor
from rollmill.weights import shared_memory_folder
from rollmill.weights.layout import CRC32, XXH3
from rollmill.weights.stored_parts import stored_parts

_SEEING = {
    "skip_tokenizer_init": False,  # the processor needs one
    "mm_device_do_normalize": False,  # constants in buffers, which vLLM's start with random weights overwrites
    "mm_processor_kwargs": {"use_fast": False},  # pixels as in the trainer: resized by Pillow
}
"""Arguments of vLLM for a vision-language model."""
WORK_BYTES = 4 * 2**30
"""Memory for activations, captured graphs and CUDA's context: an estimate."""
_BLOCK = 32  # of vLLM's kernel for experts; it pads other sizes, but not in later versions of the weights
_MOST = 0.92  # vLLM's default


def build_vllm(
    section: VLLMEngineConfig,
    policy: PolicyModel,
    rollout: RolloutConfig,
    precision: str,
    use: EngineUse = EngineUse(),
) -> VLLMEngine:
    """Build the vLLM engine, whose process starts with the first request; it computes in `precision` (bf16 or fp32).

    Raises:
        ConfigError: engine.python is no Python with vLLM; GPUs or sleep mode are configured that are not there.
        ModelError: vLLM cannot load this model's weights.
    """
    section, processor = section.settled(section.cpu_cache_gb), picture_processor(policy.model)
    gpu = policy.device.type == "cuda"
    experts = [weight for module in policy.model.modules() for weight in _experts(module)]
    if not gpu and any(size % _BLOCK for weight in experts for size in weight.shape[1:]):
        raise ModelError(
            f"engine `vllm` computes experts on CPUs in blocks of {_BLOCK}, and this model's have other sizes; use "
            "engine `native`"
        )
    if section.sleep and not gpu:
        raise ConfigError("engine.sleep: vLLM sleeps on GPUs only, and this run is on a CPU; remove it")
    gpus = _own_gpus(section, on_gpu=gpu)
    python = section.reader_python()
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
        "kv_cache_memory_bytes": int(section.cache_gb * 2**30),
        **(_gpu_arguments(policy, section, precision) if gpu else {}),
        "enforce_eager": not (gpu if section.compile == "auto" else section.compile),
        **({"enable_sleep_mode": True} if section.sleep else {}),
        **({} if processor is None else _SEEING),
        **section.options,
    }
    launch = VLLMLaunchConfig(
        python,
        folder,
        {
            "arguments": arguments,
            "weights": str(use.weights or folder / "weights"),
            "folder": str(folder),
            "parts": stored_parts(policy.model),
            "name": use.reader or "vLLM",
        },
        threads=torch.get_num_threads(),
        deadline_s=section.deadline_s,
        lock=lock,
        gpus=gpus,
    )
    return VLLMEngine(
        launch,
        policy.tokenizer,
        eos_ids=policy.eos_ids,
        context=policy.context,
        restarts=section.restarts,
        checksum=XXH3 if found["xxhash"] else CRC32,
    )


def _own_gpus(section: VLLMEngineConfig, *, on_gpu: bool) -> list[str]:
    """The GPUs of `engine.gpus` by the names that CUDA_VISIBLE_DEVICES has for them: numbers, or UUIDs."""
    if section.gpus is None:
        return []
    if not on_gpu:
        raise ConfigError("engine.gpus: this run is on a CPU, and so is its vLLM; remove it")
    count = torch.cuda.device_count()
    if max(section.gpus) >= count:
        raise ConfigError(f"engine.gpus: there is no GPU {max(section.gpus)}; torch finds {count}, counted from 0")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else [str(each) for each in range(count)]
    return [names[each] for each in section.gpus]


def _gpu_arguments(policy: PolicyModel, section: VLLMEngineConfig, precision: str) -> dict[str, Any]:
    """The share of the GPU's memory that has to be free when vLLM starts: its weights, its cache, and room to work; and
    over how many GPUs it splits the model.

    vLLM would ask for 92 %, which a trainer on the same GPU has taken.
    """
    width = 2 if precision == "bf16" else 4
    needed = width * count_weights(policy.model) + section.cache_gb * 2**30 + WORK_BYTES
    share = math.ceil(100 * needed / torch.cuda.get_device_properties(policy.device).total_memory) / 100
    arguments: dict[str, Any] = {"gpu_memory_utilization": min(_MOST, share)}
    if section.gpus is not None and not any(key.endswith("_parallel_size") for key in section.options):
        arguments["tensor_parallel_size"] = len(section.gpus)
    return arguments


def _experts(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Weights of all experts of a layer, each [E, out, in]."""
    own = [weight for weight in module.parameters(recurse=False) if weight.ndim == 3]
    return own if type(module).__name__.endswith("Experts") else []
