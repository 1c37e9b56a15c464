"""Architectures with sinks, recurrent layers, short convolutions and experts go through the whole loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import metrics, tiny_run

import rollmill
from bench.tiny_architectures import VOCABULARY, tiny_model
from rollmill.config.model import TokenizerConfig
from rollmill.models.from_scratch import save_policy, train_tokenizer


@pytest.mark.parametrize(
    "architecture",
    ["gpt_oss", "qwen3_next", "lfm2", "phimoe", pytest.param("nemotron_h", marks=pytest.mark.slow)],
)
def test_two_steps_of_grpo(architecture: str, tmp_path: Path) -> None:
    """The engine's log-probs are the trainer's, before and after the weights have moved."""
    tokenizer = train_tokenizer(TokenizerConfig(kind="char"), ["".join(map(chr, range(32, 127)))])
    assert len(tokenizer) <= VOCABULARY
    model: Any = tiny_model(architecture)
    model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    save_policy(model, tokenizer, tmp_path / "model")
    run = tiny_run(
        tmp_path,
        model={"path": str(tmp_path / "model"), "new": None},
        rewards=[{"name": "format", "pattern": "^[ -O]"}],  # about half of all first characters
        stages=[{"name": "learn", "algorithm": {"name": "grpo"}, "steps": 2, "trainer": {"lr": 1e-3}}],
        evaluation=None,
    )
    rollmill.run(run, out=tmp_path / "out")
    steps = metrics(tmp_path / "out")
    assert len(steps) == 2
    for step in steps:
        assert step["logprob_gap/max"] < 1e-4
        assert step["grad_norm"] > 0
