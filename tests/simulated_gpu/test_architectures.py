"""Every supported architecture rolls out and trains in bf16 on a CUDA device, its decode steps captured."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.engine_gaps import rolled_out, trained_gaps

from bench.tiny_architectures import VOCABULARY, tiny_model
from rollmill.engines.native.decoder import CAPTURE_AFTER
from rollmill.models.from_scratch import silence_transformers
from rollmill.models.recurrent import recurrent_layers

pytestmark = [pytest.mark.gpu, pytest.mark.thorough]

RESULTS = Path(__file__).parents[2] / "bench/results/architectures.json"
SUPPORTED = [each["name"] for each in json.loads(RESULTS.read_text())["findings"] if each["verdict"] == "right"]
"""Those that compute in fp32 what transformers does, by `bench architectures`; others are refused when loaded."""
NOT_CAPTURED = {
    "dbrx": "its loop over experts asks the device which of them have tokens",
    "gemma3n_text": "its activation makes a threshold of a number on the host, in each pass",
    "jetmoe": "its products for each expert need the numbers of their tokens on the host",
    "longcat_flash": "its loop over experts asks the device which of them have tokens",
    "phimoe": "the frequencies of its rotary embedding lie on the host",
}
"""By architecture: why the host waits inside of transformers' forward pass, so that no decode step can be captured.
Those of recurrent models never are."""
GAP = 0.12
"""Mean difference of a token's log-prob between engine and trainer, in nats. Both round each layer's output to 8 bits.
The largest of these models' means is that of phimoe, 0.08 to 0.1 by the order of sums; that of most of them is 0.02."""


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_an_architecture_on_the_device(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    with silence_transformers():
        model: Any = tiny_model(architecture).cuda()
    with caplog.at_level(logging.WARNING, "rollmill"):
        experiences, counts = rolled_out(model, vocabulary=VOCABULARY, new_tokens=8 + 2 * CAPTURE_AFTER)
    gaps = trained_gaps(model, experiences)
    assert float(gaps.mean()) <= GAP  # NaN is not
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert all(bool(each.isfinite().all()) for each in gradients)
    assert sum(bool(each.any()) for each in gradients) >= 0.9 * len(gradients)
    refused = [each.getMessage() for each in caplog.records if "cannot be captured" in each.getMessage()]
    assert bool(refused) == (architecture in NOT_CAPTURED), refused
    assert (counts["decode_replays"] > 0) == (not refused and not recurrent_layers(model))
