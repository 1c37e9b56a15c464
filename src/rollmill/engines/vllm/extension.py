"""Loads weights from shared memory into vLLM. Runs in the processes that vLLM starts, one per device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollmill.errors import WeightSyncError
from rollmill.weights.buckets import block_tensors
from rollmill.weights.cuda_ipc import IPCReader, IPCUnavailableError, ipc_socket
from rollmill.weights.shared_memory import SharedMemoryReceiver
from rollmill.weights.stored_parts import take_part


class SharedWeightsExtension:
    """Mixin of vLLM's worker class (`worker_extension_cls`)."""

    model_runner: Any
    parallel_config: Any
    _receiver: SharedMemoryReceiver | None = None

    def report_truncation(self) -> bool:
        """Lets vLLM say how much probability truncation keeps. False if its sampler cannot."""
        from rollmill.engines.vllm.sampler import TruncationSampler  # imports vLLM's

        return TruncationSampler.install(self.model_runner)

    def load_shared_weights(
        self, path: str, parts: dict[str, list[Any]], announced: int | None = None, engine: str = "vLLM"
    ) -> tuple[int, str]:
        """Loads the newest version into the model: by CUDA IPC while it is sent, else from shared memory.

        Args:
            parts: of weights that a checkpoint stores in another way: see `stored_parts`.
            announced: the version that is being sent, or was; None: any.
            engine: what the sender knows this engine by.

        Returns:
            Its number, and how it came: "ipc", "" (from shared memory), or why not by IPC.

        Raises:
            WeightSyncError: the weights are damaged.
            DeadlineError: there are none.
        """
        device, why = self.model_runner.device, ""
        if announced is not None and device.type == "cuda" and ipc_socket(Path(path)).exists():
            try:
                reader = IPCReader(Path(path), device, engine, self.parallel_config.world_size, at_least=announced)
                self._load(reader.tensors(), parts)
                return reader.version, "ipc"
            except IPCUnavailableError as error:
                why = str(error)
        if self._receiver is None:
            self._receiver = SharedMemoryReceiver(Path(path))
        version, layout, block = self._receiver.hold_block(announced or 0)
        try:
            self._load(block_tensors(layout, block, device), parts)
        finally:
            del block
            self._receiver.release()
        return version, why

    def _load(self, weights: Iterator[tuple[str, Tensor]], parts: dict[str, list[Any]]) -> None:
        try:
            with torch.no_grad():
                self.model_runner.reload_weights(weights_iterator=_as_stored(weights, parts))
                _repack_tied(self.model_runner.model)
                _repack_experts(self.model_runner.model)
        except (KeyError, ValueError, RuntimeError, AttributeError) as error:
            raise WeightSyncError(f"vLLM cannot load the policy's weights: {type(error).__name__}: {error}") from error


def _as_stored(weights: Iterator[tuple[str, Tensor]], parts: dict[str, list[Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights by the names and in the pieces of a checkpoint."""
    for name, weight in weights:
        if name not in parts:
            yield name, weight
        for part in parts.get(name, []):
            yield part[0], take_part(weight, part)


def _repack_tied(model: torch.nn.Module) -> None:
    """Repacks the output layer's weights on CPUs, where vLLM packs them.

    If they are tied to the embedding, reloading does not update the packed copy.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _repack_experts(model: torch.nn.Module) -> None:
    """Repacks the experts' weights on CPUs, where vLLM packs them only the first time that it loads some."""
    for module in model.modules():
        kernel: Any = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(kernel, "fused_experts", None)
        if hasattr(experts, "isa"):
            experts.process_weights_after_loading(module)
