"""Runs the trainer's own step on fake tensors, which have shapes and no memory, and counts their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

from rollmill.algorithms import build_recipe
from rollmill.config.model import ModelConfig
from rollmill.config.run import StageConfig
from rollmill.models.from_scratch import build_new_meta_model
from rollmill.models.lora import add_lora
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.trainer.logprobs import _keeps_casts
from rollmill.trainer.stochastic_adamw import GPU_CHUNK
from rollmill.trainer.trainer import Trainer
from rollmill.types import Experience
from support.live_bytes import LiveBytes


@dataclass(frozen=True)
class FakePeak:
    """Bytes of the second training step, whose optimizer has its moments."""

    weights: int  #: before the first step
    between: int  #: between the steps: weights and moments
    peak: int


class _HostReads(LiveBytes):
    """Also answers what the host reads of a tensor: numbers that are finite, and masks that are true
    everywhere; values that are all different."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten.nonzero.default:
            return torch.arange(len(args[0]))[:, None]
        if func is torch.ops.aten._unique2.default:
            each = torch.arange(len(args[0]))
            return args[0], each, each
        if func is torch.ops.aten.index.Tensor:
            chosen = [
                torch.arange(len(each)) if each is not None and each.dtype == torch.bool else each for each in args[1]
            ]
            args = (args[0], chosen)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _read_list(tensor: Tensor) -> list[Any]:
    """In the place of what the host reads of a row of numbers: of indices all of them."""
    return [1.0] * len(tensor) if tensor.is_floating_point() else list(range(len(tensor)))


def _real_mesh(*arguments: Any) -> DeviceMesh:
    with unset_fake_temporarily():
        return init_device_mesh(*arguments)


def _gather_own(objects: list[Any], own: Any, *_: Any, **__: Any) -> None:
    objects[:] = [own] * len(objects)


def _empty(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """In the place of `to_device`."""
    types = [torch.from_numpy(np.empty(0, each.dtype)).dtype for each in arrays]
    return [torch.empty(each.shape, dtype=dtype, device=device) for each, dtype in zip(arrays, types, strict=True)]


@contextmanager
def _like_a_gpu() -> Iterator[None]:
    """Fake tensors on any device compute as real ones do on a GPU of today."""
    with (
        patch("rollmill.trainer.batch.to_device", _empty),
        patch("rollmill.models.attention.to_device", _empty),
        patch("rollmill.trainer.attention.varlen_available", lambda query, value: True),
        patch.object(FakeTensor, "tolist", _read_list),
        patch("rollmill.models.lora._address", id),
        patch("rollmill.trainer.distributed.fsdp.init_device_mesh", _real_mesh),
        patch("torch.distributed.all_gather_object", _gather_own),
        patch("torch.nn.Module.to", lambda self, *args, **kwargs: self),
        patch("rollmill.trainer.prepared.PreparedBatch.set_token_details", lambda self, details: None),
        patch("rollmill.trainer.loss._annotate", lambda *values: None),
        patch("rollmill.trainer.batch.CPU_ROW", 1 << 30),
        patch("rollmill.trainer.trainer.find_norms", lambda *models: []),
        patch("rollmill.trainer.stochastic_adamw._CHUNK", GPU_CHUNK),
        patch("rollmill.trainer.logprobs._keeps_casts", lambda model, device: _keeps_casts(model, "cuda")),
        patch("rollmill.trainer.model_setup.return_large_blocks", lambda: None),
    ):
        yield


@contextmanager
def _without_initial_values() -> Iterator[None]:
    """Fake weights have none."""
    with (
        patch("transformers.PreTrainedModel.init_weights", lambda self: None),
        patch("torch.nn.Linear.reset_parameters", lambda self: None),
        patch("torch.nn.Embedding.reset_parameters", lambda self: None),
    ):
        yield


def fake_policy(config: ModelConfig, dtype: torch.dtype, device: str) -> nn.Module:
    """A new model of fake weights, with adapters if the section has them; call it in a FakeTensorMode."""
    assert config.new is not None
    shape = build_new_meta_model(config.new).config
    with torch.device(device), _without_initial_values():
        model: nn.Module = AutoModelForCausalLM.from_config(shape, dtype=dtype)
        model.tie_weights()
        if config.lora is not None:
            add_lora(model, config.lora, seed=0)
    return model


def completions(groups: int, size: int, prompt: int, length: int) -> list[Experience]:
    """Groups of completions of one length, half of them with a reward."""
    found = []
    for group in range(groups):
        for number in range(size):
            total = prompt + length
            found.append(
                Experience(
                    id=f"{group}-{number}",
                    task_id=str(group),
                    group=str(group),
                    token_ids=np.concatenate([np.full(prompt, group), np.full(length, 5 + number)]).astype(np.int32),
                    action_mask=np.arange(total) >= prompt,
                    logprobs=np.zeros(total, np.float32),
                    versions=np.where(np.arange(total) >= prompt, 0, -1).astype(np.int32),
                    reward=float(number % 2),
                )
            )
    return found


def fake_steps(model: ModelConfig, stage: StageConfig, experiences: list[Experience], ranks: int = 1) -> FakePeak:
    """Two training steps of a stage; `trainer` has plain values. With several ranks this is rank 0 of a fake process
    group, which has been joined."""
    config = stage.trainer
    dtype = torch.bfloat16 if config.param_dtype == "bf16" else torch.float32
    recipe = build_recipe(stage.algorithm, max_new_tokens=stage.rollout.max_new_tokens)
    group = RankGroup(0, ranks, config.sharding) if ranks > 1 else None
    device = "cpu"  # torch has no guard for another one here
    with FakeTensorMode(allow_non_fake_inputs=True), _like_a_gpu():
        policy = fake_policy(model, dtype, device)
        config = config.model_copy(update={"precision": "bf16"})
        trainer = Trainer(policy, recipe, config, total_steps=10, device=device, ranks=group)
        counter = _HostReads()
        counter.hold(each for each in _own(policy))
        weights = counter.live
        with counter:
            trainer.step(experiences, 0)
            between, counter.peak = counter.live, counter.live
            trainer.step(experiences, 0)
        return FakePeak(weights, between, counter.peak)


def _own(model: nn.Module) -> Iterator[Tensor]:
    """Weights and buffers; of shards this rank's."""
    for each in (*model.parameters(), *model.buffers()):
        local = getattr(each, "_local_tensor", None)
        yield each if local is None else local
