"""Every family of vision-language models learns from pictures in bf16 on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.picture_models import FAMILIES, picture_run
from support.tiny import metrics

import rollmill

pytestmark = pytest.mark.gpu

GAP = 0.05
"""Mean difference of a token's log-prob between engine and trainer, as in test_architectures.py."""


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.thorough] * (each != "qwen2_vl")) for each in FAMILIES]
)
def test_a_family_trains(family: str, tmp_path: Path) -> None:
    """Imitates, then reinforces: two steps each, with a reference model."""
    rollmill.run(picture_run(tmp_path, family, trainer={"lr": 1e-3, "precision": "bf16"}), out=tmp_path / "out")
    updates = metrics(tmp_path / "out")
    assert [each["step"] for each in updates] == [1, 2, 3, 4]
    norms = [each.get("grad_norm", 0.0) for each in updates]
    assert np.isfinite(norms).all()
    assert min(norms[:2]) > 0  # SFT; the rewards of GRPO's groups may be equal
    gaps = [each["logprob_gap/mean"] for each in updates if "logprob_gap/mean" in each]
    assert len(gaps) == 2
    assert max(gaps) < GAP
