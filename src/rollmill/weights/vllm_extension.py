"""Loads weights from shared memory into vLLM. Runs in the processes that vLLM starts, one per device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollmill.errors import WeightSyncError
from rollmill.weights.shared_memory import SharedMemoryReceiver


class SharedWeightsExtension:
    """Mixin of vLLM's worker class (`worker_extension_cls`)."""

    model_runner: Any
    _receiver: SharedMemoryReceiver | None = None

    def load_shared_weights(self, path: str, names: dict[str, str]) -> int:
        """Loads the newest version in shared memory into the model; returns its number.

        Args:
            names: of weights in a checkpoint, where those in memory differ.

        Raises:
            WeightSyncError: the weights are damaged.
            DeadlineError: there are none.
        """
        if self._receiver is None:
            self._receiver = SharedMemoryReceiver(Path(path))
        version, weights = self._receiver.hold()
        try:
            with torch.no_grad():
                self.model_runner.reload_weights(
                    weights_iterator=((names.get(name, name), weight) for name, weight in weights.items())
                )
                _repack_tied(self.model_runner.model)
        except (KeyError, ValueError, RuntimeError, AttributeError) as error:
            raise WeightSyncError(f"vLLM cannot load the policy's weights: {type(error).__name__}: {error}") from error
        finally:
            del weights
            self._receiver.release()
        return version


def _repack_tied(model: torch.nn.Module) -> None:
    """Repacks the output layer's weights on CPUs, where vLLM packs them.

    If they are tied to the embedding, reloading does not update the packed copy.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
