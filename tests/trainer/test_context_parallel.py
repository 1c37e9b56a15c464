"""Rows whose tokens two ranks share: log-probs and gradients are those of one rank, for every kind of attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.picture_models import load_seeing, noise_picture, picture_prompt
from support.rank_processes import RANKS, computed_by_ranks
from support.toys import toy_model
from torch import Tensor

from bench.tiny_architectures import tiny_model
from rollmill.data.picture_prompts import PicturePrompt
from rollmill.errors import ConfigError
from rollmill.models.routing import routing_shape
from rollmill.models.vision import freeze_parts
from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.distributed.context_parallel import check_context_parallel
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.trainer.logprobs import compute_logprobs, use_packed_attention
from rollmill.trainer.model_setup import evaluation_mode, set_gradient_checkpointing
from rollmill.types import Experience, experience_from_demonstration

CPU = torch.device("cpu")
#: latent attention, softcap and window, sinks, chunks and positions from the cache, experts of attention
ARCHITECTURES = ("deepseek_v3", "gemma2", "gpt_oss", "llama4_text", "jetmoe", "phimoe")
ONE_KEY_HEAD, REPLAYED, CHECKPOINTED, SEEING = "one key head", "replayed", "checkpointed", ("qwen3_vl", "gemma3")
CASES = (*ARCHITECTURES, ONE_KEY_HEAD, REPLAYED, CHECKPOINTED, *SEEING)

Job = tuple[Any, list[Experience], bool]  #: model, batch, gradient checkpointing
Result = tuple[Tensor, dict[str, Tensor]]


def job_of(case: str, folder: Path) -> Job:
    if case in SEEING:
        policy = load_seeing(folder / case, case)
        freeze_parts(policy.model, [])
        pictures = [noise_picture(28, 56, 0), noise_picture(56, 56, 1), noise_picture(40, 28, 2)]
        prompts = [picture_prompt(policy, "what?", *pictures[:count]) for count in (1, 3)]
        return policy.model.double(), experiences_of(case, prompts), False
    return model_of(case), experiences_of(case, [None] * 3), case == CHECKPOINTED


def model_of(case: str) -> Any:
    if case == ONE_KEY_HEAD:
        return toy_model("qwen3", num_key_value_heads=1).double()
    model: Any = tiny_model({REPLAYED: "qwen3_moe", CHECKPOINTED: "qwen3"}.get(case, case)).double()
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"  # the others know no float64
    return model


def experiences_of(case: str, prompts: Sequence[PicturePrompt | None]) -> list[Experience]:
    """Groups that share a prompt, of odd lengths; some completions are shorter than the number of ranks."""
    rng, found = np.random.default_rng(0), []
    for group, prompt in enumerate(prompts):
        first = rng.integers(2, 90, (37, 1, 18)[group]).tolist() if prompt is None else prompt.token_ids
        for index, length in enumerate((21, 1, 40)):
            ids = [*first, *rng.integers(2, 90, length).tolist()]
            name = f"{group}-{index}"
            keys: dict[str, Any] = {"id": name, "task_id": str(group), "group": str(group), "turns": []}
            made = experience_from_demonstration(ids, len(first), prompt="", response="", **keys)
            made.pictures = prompt
            if case == REPLAYED and index < 2:
                shape = routing_shape(tiny_model("qwen3_moe"))
                assert shape is not None
                chosen = np.stack([rng.permutation(8)[: shape[1]] for _ in range(len(ids) * shape[0])])
                made.routing = chosen.reshape(len(ids), *shape).astype(np.uint8)
            found.append(made)
    return found


def computed(job: Job, ranks: RankGroup) -> Result:
    """Log-probs of all action tokens, and the gradient of a weighted sum of them over the ranks."""
    model, experiences, checkpoints = job
    set_gradient_checkpointing(model, checkpoints)
    replayed = any(each.routing is not None for each in experiences)
    table = build_token_table(experiences, CPU)
    weights = torch.randn(len(table.target), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = torch.zeros_like(weights)
    rows = build_micro_batches(
        experiences, table, range(len(experiences)), 150, CPU, routing=routing_shape(model) if replayed else None
    )
    for row in rows:
        micro = row.shared(ranks.rank, ranks.size) if ranks.size > 1 else row
        with evaluation_mode(model.train()), use_packed_attention(model, micro, replay=True):
            logprob, entropy = compute_logprobs(model, micro, table, entropy_gradient=True)
            (weights[micro.tokens] * (logprob + 0.3 * entropy)).sum().backward()
        found[micro.tokens] = logprob.detach()
    ranks.add_gradients(list(model.parameters()))
    return found, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def _of_rank(rank: int, jobs: dict[str, Job]) -> dict[str, Result]:
    return {case: computed(job, RankGroup(rank, RANKS, "context")) for case, job in jobs.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Result], list[dict[str, Result]]]:
    """Of one rank and of each of two, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs = {case: job_of(case, folder) for case in CASES}
    pair = computed_by_ranks(_of_rank, jobs, folder)
    return {case: computed(job, RankGroup()) for case, job in jobs.items()}, pair


@pytest.mark.thorough  # two algorithms and more on shared rows: test_ranks.py
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_what_one_computes(results: Any, case: str) -> None:
    alone, pair = results
    logprobs, gradient = alone[case]
    assert len(gradient) > 5
    for found, by_name in (each[case] for each in pair):
        assert (found - logprobs).abs().max() < 1e-6  # some norms compute in float32
        assert by_name.keys() == gradient.keys()
        total = sum(float(each.norm()) ** 2 for each in gradient.values()) ** 0.5
        for name, each in gradient.items():
            assert (by_name[name] - each).norm() < 1e-6 * total, name


@pytest.mark.parametrize(
    ("architecture", "ranks", "said"),
    [
        ("qwen3_next", 2, r"trainer.sharding: qwen3_next has recurrent layers \(Qwen3NextGatedDeltaNet\)"),
        ("qwen3", 3, "trainer.ranks: 3 cannot share the 4 attention heads of qwen3"),
    ],
)
def test_a_model_whose_rows_cannot_be_shared_is_an_error(architecture: str, ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*use sharding: fsdp or none"):
        check_context_parallel(tiny_model(architecture), ranks)
