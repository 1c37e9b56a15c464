"""The check at load sees a kernel of the GPU that attends to the wrong tokens, which computing in fp32 does not use."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import toy_checkpoint

from rollmill.config.model import ModelConfig
from rollmill.errors import ModelError
from rollmill.models import attention
from rollmill.trainer.parity import load_verified_policy

pytestmark = pytest.mark.gpu


def load(folder: Path) -> None:
    config = ModelConfig(path=folder)
    load_verified_policy(config, texts=(), seed=0, device=torch.device("cuda"))


def test_a_kernel_that_sees_the_future_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "cache"))
    folder = toy_checkpoint(tmp_path / "model", "qwen3")
    kernel = attention.varlen_attn

    @wraps(kernel)  # whose parameters are looked at
    def sees_all(*args: Any, window_size: tuple[int, int], **options: Any) -> Any:
        return kernel(*args, window_size=(-1, -1), **options)

    with monkeypatch.context() as patched:
        patched.setattr(attention, "varlen_attn", sees_all)
        with pytest.raises(ModelError, match="log-probs in bf16"):
            load(folder)
    load(folder)
