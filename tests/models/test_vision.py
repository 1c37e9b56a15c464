"""Vision-language models of every family: engine and trainer against transformers' own forward pass with pictures."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.picture_models import FAMILIES, load_seeing, noise_picture, picture_checkpoint, picture_prompt
from transformers import AutoConfig

from rollmill.config.model import ModelConfig
from rollmill.config.rollout import SamplingConfig
from rollmill.data.picture_prompts import PicturePrompt
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native.engine import NativeEngine
from rollmill.errors import ModelError, TasksetError
from rollmill.models.hf_forward import hf_logprobs
from rollmill.models.load import PolicyModel, load_policy
from rollmill.models.vision import freeze_parts
from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.logprobs import compute_logprobs, use_packed_attention
from rollmill.trainer.parity import check_parity
from rollmill.types import Completion, Experience, experience_from_completion

CPU = torch.device("cpu")
QUICK = {"qwen3_vl", "llava", "paligemma"}
BY_FAMILY = [each if each in QUICK else pytest.param(each, marks=pytest.mark.thorough) for each in FAMILIES]


def generate(
    policy: PolicyModel, prompts: list[PicturePrompt], n: int = 3
) -> tuple[NativeEngine, list[list[Completion]]]:
    """Completions without picture tokens, in chunks of 16 prompt tokens."""
    token = policy.model.picture_processor.image_token_id
    for seed in range(50):
        engine = NativeEngine(policy.model, context=policy.context, prefill_tokens=16)
        engine.pause()
        sampling = SamplingConfig(max_new_tokens=6)
        requests = [GenerationRequest(each.token_ids, sampling, n=n, seed=seed, pictures=each) for each in prompts]
        groups = [engine.submit(each) for each in requests]
        while any(group.unfinished for group in groups):
            engine.core.step()
        found = [[group.results.get_nowait() for _ in range(n)] for group in groups]
        if not any(token in each.token_ids for group in found for each in group):
            return engine, found
    raise AssertionError("every seed sampled a picture token")


@pytest.mark.parametrize("family", BY_FAMILY)
def test_the_check_at_load_covers_pictures(family: str, tmp_path: Path) -> None:
    policy = load_seeing(tmp_path, family)
    gaps = check_parity(policy.model, tmp_path)
    assert [gap.path for gap in gaps] == ["engine: prefill and decode", "trainer: log-probs", "trainer: gradient"]
    assert all(gap.value < 2e-5 for gap in gaps), gaps


@pytest.mark.parametrize("family", BY_FAMILY)
def test_pictures_of_different_sizes_in_one_batch(family: str, tmp_path: Path) -> None:
    policy = load_seeing(tmp_path, family)
    second = (28, 56) if family == "mistral3" else (40, 28)  # its processor of the tests takes one size per prompt
    prompts = [
        picture_prompt(policy, "what is this?", noise_picture(28, 56, 0), noise_picture(*second, 1)),
        picture_prompt(policy, "and?", noise_picture(56, 56, 2)),
        picture_prompt(policy, "and?", noise_picture(56, 56, 3)),  # the same tokens, another picture
    ]
    assert prompts[1].token_ids == prompts[2].token_ids
    engine, groups = generate(policy, prompts)
    features = engine.core._runner.features
    assert features is not None
    assert features.computed == 3  # once per prompt, whatever the group and the chunks
    experiences: list[Experience] = []
    for i, (own, seen) in enumerate(zip(groups, prompts, strict=True)):
        for each in own:
            made = experience_from_completion(
                each, id=f"{i}/{each.index}", task_id=str(i), group=str(i), prompt="", temperature=1.0
            )
            made.pictures = seen
            experiences.append(made)
            ids = [*each.prompt_ids.tolist(), *each.token_ids.tolist()]
            with torch.no_grad():
                exact = hf_logprobs(policy.model, [ids], len(each.token_ids), seen)[0]
            assert np.abs(exact.numpy() - each.logprobs).max() < 2e-5
    table = build_token_table(experiences, CPU)
    found = torch.zeros(len(table.target))
    for micro in build_micro_batches(experiences, table, range(len(experiences)), 4096, CPU):
        with torch.no_grad(), use_packed_attention(policy.model, micro):
            found[micro.tokens] = compute_logprobs(policy.model, micro, table)[0]
    assert (found - table.rollout_logprob).abs().max() < 2e-5
    blank = picture_prompt(policy, "and?", noise_picture(56, 56, 4))
    last = experiences[-1]
    with torch.no_grad():
        other = hf_logprobs(policy.model, [last.token_ids.tolist()], 6, blank)[0]
    assert np.abs(other.numpy() - last.logprobs[-6:]).max() > 1e-4  # the picture matters


def test_a_picture_that_attends_in_one_direction_only_is_another_model(tmp_path: Path) -> None:
    policy = load_seeing(tmp_path, "gemma3")
    seen = picture_prompt(policy, "what is this?", noise_picture(28, 56, 0), noise_picture(40, 28, 1))
    first, second = seen.blocks
    assert [block.last - block.first for block in (first, second)] == [16, 16]
    assert seen.whole_blocks(0, first[0]) == first[0]
    assert seen.whole_blocks(0, first[0] + 1) == first[0]  # before the picture
    assert seen.whole_blocks(first[0], 1) == 16  # a picture is never cut
    assert sampled_gap(policy, replace(seen, both_ways=None), seen) > 1e-3


def sampled_gap(policy: PolicyModel, prompt: PicturePrompt, seen: PicturePrompt) -> float:
    """Largest difference between log-probs of the engine, given `prompt`, and of the model's own pass, given `seen`."""
    _, [[completion, *_]] = generate(policy, [prompt])
    ids = [*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]
    with torch.no_grad():
        exact = hf_logprobs(policy.model, [ids], len(completion.token_ids), seen)[0]
    return float(np.abs(exact.numpy() - completion.logprobs).max())


def test_a_whole_prompt_attends_in_both_directions_whatever_the_window(tmp_path: Path) -> None:
    """As PaliGemma 2, whose language part also caps its logits."""
    policy = load_seeing(tmp_path, "paligemma", model_type="gemma2", sliding_window=8)
    gaps = check_parity(policy.model, tmp_path)
    assert all(gap.value < 2e-5 for gap in gaps), gaps
    seen = picture_prompt(policy, "what is this?", noise_picture(28, 56, 0), noise_picture(40, 28, 1))
    assert seen.blocks == [(0, len(seen.token_ids), False)]
    assert seen.whole_blocks(0, 5) == len(seen.token_ids)  # a prompt is never cut
    assert sampled_gap(policy, seen, seen) < 2e-5
    for otherwise in (None, "picture"):
        assert sampled_gap(policy, replace(seen, both_ways=otherwise), seen) > 1e-3


def test_a_prompt_that_attends_in_both_directions_is_not_continued_from_an_earlier_turn(tmp_path: Path) -> None:
    """Its tokens begin with those of a prompt and its completion, which attended to less."""
    policy = load_seeing(tmp_path, "paligemma")
    shown, sampling = noise_picture(28, 28, 0), SamplingConfig(max_new_tokens=6, temperature=0)
    engine = NativeEngine(policy.model, context=policy.context)

    async def turn(text: str) -> Completion:
        seen = picture_prompt(policy, text, shown)
        [found] = await engine.generate(GenerationRequest(seen.token_ids, sampling, pictures=seen, continues=True))
        ids = [*found.prompt_ids.tolist(), *found.token_ids.tolist()]
        with torch.no_grad():
            exact = hf_logprobs(policy.model, [ids], len(found.token_ids), seen)[0]
        assert np.abs(exact.numpy() - found.logprobs).max() < 2e-5
        return found

    async def talk() -> None:
        first = await turn("what?")
        said = "".join(policy.tokenizer.convert_ids_to_tokens(first.token_ids.tolist()))
        second = await turn(f"what?\n{said} and?")
        before = [*first.prompt_ids.tolist(), *first.token_ids.tolist()]
        assert second.prompt_ids.tolist()[: len(before)] == before

    asyncio.run(talk())


def test_parts_are_frozen_by_name(tmp_path: Path) -> None:
    model = load_seeing(tmp_path, "qwen3_vl").model

    def trained() -> set[str]:
        return {name for name, each in model.named_parameters() if each.requires_grad}

    freeze_parts(model, ["vision"])
    assert any("visual.merger" in name for name in trained())
    assert not any("visual.blocks" in name for name in trained())
    freeze_parts(model, ["vision", "projector"])
    assert not any("visual" in name for name in trained())
    freeze_parts(model, [])
    assert any("visual.blocks" in name for name in trained())


def test_what_cannot_be_encoded_names_the_task(tmp_path: Path) -> None:
    policy = load_seeing(tmp_path, "llava")
    with pytest.raises(TasksetError, match="task 1: picture 0 cannot be decoded"):
        picture_prompt(policy, "what?", b"no picture")
    processor = policy.model.picture_processor
    with pytest.raises(TasksetError, match="task 1"):
        processor.encode("u:no place\na:", [noise_picture(28, 28, 0)], "task 1")


def test_families_that_see_otherwise_are_refused(tmp_path: Path) -> None:
    """Idefics 2 resamples its features."""
    AutoConfig.for_model("idefics2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is .*idefics2.*, which sees pictures; of those models, rollmill trains"):
        load_policy(ModelConfig(path=tmp_path), texts=[], seed=0, device=CPU, pictures=True)


def test_a_folder_without_processor_is_refused(tmp_path: Path) -> None:
    picture_checkpoint(tmp_path, "llava")
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(ModelError, match="the processor cannot be read"):
        load_policy(ModelConfig(path=tmp_path), texts=[], seed=0, device=CPU, pictures=True)
