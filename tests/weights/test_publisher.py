"""Versions for engines in other processes: sent whole, then announced."""

from __future__ import annotations

from pathlib import Path

import torch
from support.toys import toy_model

from rollmill.config.model import LoRAConfig
from rollmill.engines.native import NativeEngine
from rollmill.models.lora import add_lora, merged_model, merged_weights
from rollmill.weights import SharedMemoryReceiver, SharedMemorySender, TransferPublisher


def test_what_is_announced_has_been_sent(tmp_path: Path) -> None:
    model = toy_model("qwen3")
    engine = NativeEngine(model, context=64)
    sender = SharedMemorySender(tmp_path / "w", merged_weights(model))
    publisher, receiver = (
        TransferPublisher(sender, lambda: merged_weights(model), engine),
        SharedMemoryReceiver(tmp_path / "w"),
    )
    for version in (1, 2, 3):
        with torch.no_grad():
            model.lm_head.weight.fill_(float(version))
        publisher.publish(version)
        assert engine.version == version
        found, weights = receiver.hold()
        assert found == version
        assert (weights["lm_head.weight"] == version).all()
        receiver.release()
    receiver.close()
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_adapters_are_sent_merged_under_the_names_of_a_checkpoint() -> None:
    model = toy_model("qwen2")
    names = set(merged_weights(model))
    add_lora(model, LoRAConfig(rank=2), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    found, expected = merged_weights(model), dict(merged_model(model).named_parameters())
    assert set(found) == names == set(expected)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
