"""vLLM as the engine of a vision-language policy: tokens and log-probs are those of the trainer's weights and pictures.

Idefics3 is the family whose implementation in vLLM needs no torchvision, which has no CPU build on PyPI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.picture_models import noise_picture, picture_checkpoint
from support.vllm_service import PYTHON, RunningEngine, needs_vllm

from rollmill.config.engines import VLLMEngineConfig
from rollmill.config.model import ModelConfig
from rollmill.config.rollout import RolloutConfig, SamplingConfig
from rollmill.data.picture_prompts import PicturePrompt, join_prompts
from rollmill.engines.base import GenerationRequest, SampledToken
from rollmill.engines.vllm.build import build_vllm
from rollmill.errors import ConfigError
from rollmill.models.hf_forward import hf_logprobs
from rollmill.models.load import load_policy
from rollmill.types import Completion

pytestmark = [pytest.mark.service, pytest.mark.timeout(900), needs_vllm]


class Running(RunningEngine):
    """An engine of a vision-language model."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig(path=picture_checkpoint(folder / "model", "idefics3", head_dim=32))
        policy = load_policy(config, texts=(), seed=0, device=torch.device("cpu"), pictures=True)
        super().__init__(policy, {"max_sequences": 16})

    def prompt(self, text: str, *pictures: bytes) -> PicturePrompt:
        found: PicturePrompt = self.policy.model.picture_processor.encode(text, pictures, "task 1")
        return found

    async def generate(self, prompt: PicturePrompt, n: int = 2, seed: int = 0, tail: str = "") -> list[Completion]:
        ids = [*prompt.token_ids, *self.policy.tokenizer.encode(tail, add_special_tokens=False)]
        options = SamplingConfig(max_new_tokens=12)
        return await self.engine.generate(GenerationRequest(ids, options, n=n, seed=seed, pictures=prompt))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = Running(tmp_path_factory.mktemp("vllm"))
    yield made
    made.close()


def check(running: Running, completions: list[Completion], whole: PicturePrompt) -> int:
    """Compare with transformers' own forward pass; completions with picture tokens, which it refuses, are left out."""
    token = running.policy.model.picture_processor.image_token_id
    seen = [each for each in completions if token not in [*each.prompt_ids[len(whole.token_ids) :], *each.token_ids]]
    for each in seen:
        ids = [*each.prompt_ids.tolist(), *each.token_ids.tolist()]
        with torch.no_grad():
            exact = hf_logprobs(running.policy.model, [ids], len(each.token_ids), whole)[0]
        assert np.abs(exact.numpy() - each.logprobs).max() < 1e-4
    return len(seen)


def test_pictures_of_different_sizes_have_the_trainers_logprobs_after_every_update(running: Running) -> None:
    prompts = [
        running.prompt("u:<image><image>what?\na:", noise_picture(56, 28, 0), noise_picture(28, 40, 1)),
        running.prompt("u:and <image>?\na:", noise_picture(56, 56, 2)),
        running.prompt("u:and <image>?\na:", noise_picture(56, 56, 3)),  # the same tokens, another picture
    ]

    async def after_update(number: int) -> list[list[Completion]]:
        running.publish(0.02 if number else 0.0)
        return list(await asyncio.gather(*(running.generate(each, seed=number) for each in prompts)))

    checked = 0
    for number in range(3):
        for completions, prompt in zip(running.run(after_update(number)), prompts, strict=True):
            assert all(set(each.versions.tolist()) == {running.version} for each in completions)
            assert all(each.prompt_ids.tolist() == prompt.token_ids for each in completions)
            checked += check(running, completions, prompt)
    assert checked >= 12


def test_weights_change_in_the_middle_of_a_completion_that_sees(running: Running) -> None:
    """Features of its picture are computed anew: later log-probs are those of the new weights."""
    prompt = running.prompt("u:<image>on and on\na:", noise_picture(56, 56, 8))
    for attempt in range(10):  # on a busy machine all tokens may be there before the new weights are
        told: list[SampledToken] = []

        def publish_once(token: SampledToken, told: list[SampledToken] = told) -> None:
            told.append(token)
            if len(told) == 2:
                running.publish(noise=0.02)

        options = SamplingConfig(max_new_tokens=300)
        request = GenerationRequest(
            prompt.token_ids, options, n=4, seed=attempt, pictures=prompt, on_token=publish_once
        )
        completions = running.run(running.engine.generate(request))
        new = [each for each in completions if each.versions[0] < each.versions[-1] == running.version]
        for each in new:
            own = each.versions == running.version
            tail = Completion(
                np.concatenate([each.prompt_ids, each.token_ids[~own]]), each.token_ids[own], each.logprobs[own],
                each.versions[own], each.kept_logmass[own], "", each.stop_reason, 0, 0,
            )  # fmt: skip
            whole = join_prompts(tail.prompt_ids.tolist(), [(0, prompt)])
            if check(running, [tail], whole):
                return
    pytest.fail("no completion has tokens of two versions")


def test_later_turns_show_pictures_between_the_policys_own_tokens(running: Running) -> None:
    first = running.prompt("u:<image>a\na:", noise_picture(28, 28, 4))
    said = running.policy.tokenizer.encode("xyz", add_special_tokens=False)
    second = running.prompt("\nu:<image>b\na:", noise_picture(56, 28, 5))
    ids = [*first.token_ids, *said, *second.token_ids]
    joined = join_prompts(ids, [(0, first), (len(first.token_ids) + len(said), second)])
    whole = running.prompt("u:<image>a\na:xyz\nu:<image>b\na:so", noise_picture(28, 28, 4), noise_picture(56, 28, 5))
    completions = running.run(running.generate(joined, n=3, tail="so"))
    assert completions[0].prompt_ids.tolist() == whole.token_ids
    assert check(running, completions, whole) > 0


def test_a_picture_matters_and_texts_need_none(running: Running) -> None:
    seen, other = (running.prompt("u:<image>\na:", noise_picture(28, 28, seed)) for seed in (6, 7))
    [one] = running.run(running.generate(seen, n=1, seed=3))
    with torch.no_grad():
        ids = [*one.prompt_ids.tolist(), *one.token_ids.tolist()]
        found = hf_logprobs(running.policy.model, [ids], len(one.token_ids), other)[0]
    assert np.abs(found.numpy() - one.logprobs).max() > 1e-2
    ids = running.policy.tokenizer.encode("u:hi\na:", add_special_tokens=False)
    request = GenerationRequest(ids, SamplingConfig(max_new_tokens=6), n=1, seed=1)
    [plain] = running.run(running.engine.generate(request))
    with torch.no_grad():
        exact = hf_logprobs(running.policy.model, [[*ids, *plain.token_ids.tolist()]], len(plain.token_ids))[0]
    assert np.abs(exact.numpy() - plain.logprobs).max() < 1e-4


def test_a_family_that_needs_torchvision_is_refused_without_it(tmp_path: Path) -> None:
    config = ModelConfig(path=picture_checkpoint(tmp_path / "model", "qwen2_vl"))
    policy = load_policy(config, texts=(), seed=0, device=torch.device("cpu"), pictures=True)
    section = VLLMEngineConfig.model_validate({"name": "vllm", "python": without_torchvision(tmp_path)})
    with pytest.raises(ConfigError, match=r"engine\.python: .* has no torchvision, which vLLM needs for qwen2_vl"):
        build_vllm(section, policy, RolloutConfig(), "fp32")


def without_torchvision(folder: Path) -> Path:
    """vLLM's Python with an import system that does not find torchvision."""
    (folder / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'torchvision' else find(name, *more)\n"
    )
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {PYTHON} "$@"\n')
    program.chmod(0o755)
    return program
