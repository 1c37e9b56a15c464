"""Clients of the tinker SDK train adapters and sample from them; numbers are those of rollmill's own trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from support.tinker_servers import ANN, BASE, datum, tinker_server
from support.toys import toy_checkpoint
from tinker import types

PROMPT = [5, 9, 20, 7]
TEXT = [5, 9, 20, 7, 33, 41, 12, 8]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_checkpoint(tmp_path_factory.mktemp("models") / "toy", "qwen3")


@pytest.fixture(scope="module")
def service(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tinker_server({BASE: base}, tmp_path_factory.mktemp("checkpoints")) as server:
        yield tinker.ServiceClient(base_url=server.url, api_key=ANN)


def test_a_client_learns_a_text_and_samples_it(service: Any, base: Path) -> None:
    client = service.create_lora_training_client(BASE, rank=8, seed=1).result()
    info = client.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (BASE, 8, True)
    assert info.model_data.tokenizer_id == str(base)
    losses = []
    for _ in range(12):
        gradients = client.forward_backward([datum(TEXT)], "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(gradients.result().metrics["loss:sum"])
        assert step.result().metrics["skipped:max"] == 0
    assert losses[-1] < 0.1 * losses[0]
    sampler = client.save_weights_and_get_sampling_client().result()
    found = sampler.sample(
        types.ModelInput.from_ints(PROMPT), 2, types.SamplingParams(max_tokens=4, temperature=0.0)
    ).result()
    assert [each.tokens for each in found.sequences] == [TEXT[4:]] * 2
    assert {each.stop_reason for each in found.sequences} == {"length"}
    again = client.forward([datum(TEXT)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    assert found.sequences[0].logprobs == pytest.approx(again[3:], abs=1e-5)
