"""Losses of preferences and divergences against TRL's own code."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithm_batches import distance, options_of, trainer_of, watch_gradients

from rollmill.algorithms.kl import forward_kl, generalised_jsd, reverse_kl
from rollmill.algorithms.preference import orpo
from rollmill.types import Experience, ExperienceSource, experience_from_demonstration

pytestmark = [
    pytest.mark.slow,  # TRL alone takes 20 seconds to import
    pytest.mark.filterwarnings("ignore"),
]
LETTERS = "abcdefghijklmnopqrstu"
ROWS = [
    {"prompt": "abc"[: n % 3 + 1] * 2, "completion": "defghijk"[n % 4 : n % 4 + 2 + n % 3], "label": n % 3 != 0}
    for n in range(8)
]


@pytest.fixture(scope="module")
def trl() -> Any:
    return pytest.importorskip("trl", reason="TRL is not installed (extra `dev`)")


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def _experiences(rows: Any) -> list[Experience]:
    """Rows as TRL has encoded them."""
    found = []
    for n, row in enumerate(rows):
        prompt, ids = len(row["prompt_ids"]), [*row["prompt_ids"], *row["completion_ids"]]
        names = {"id": str(n), "task_id": str(n), "group": str(n), "prompt": "", "response": ""}
        made = experience_from_demonstration(ids, prompt, turns=[], source=ExperienceSource.PREFERENCE, **names)
        made.reward = float(row["label"])
        found.append(made)
    return found


def test_kto_is_that_of_trl(trl: Any, toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, z0 and gradient of one batch by KTOTrainer and by ours, where the policy is not the reference."""
    from datasets import Dataset

    model, reference = toy("qwen3"), toy("qwen3")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.02)
    arguments = trl.KTOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=len(ROWS),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        beta=0.3,
        desirable_weight=1.3,
        undesirable_weight=0.8,
    )
    theirs = trl.KTOTrainer(
        model=toy("qwen3"),
        ref_model=reference,
        args=arguments,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=_tokenizer(),
    )
    loss = theirs.compute_loss(theirs.model, next(iter(theirs.get_train_dataloader())))
    parameters = sorted(theirs.model.parameters(), key=lambda p: p.ndim < 2)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    (kl,) = (each["kl"][-1] for each in theirs._metrics.values() if each.get("kl"))

    options = options_of("kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.8)
    gradients = watch_gradients(monkeypatch)
    metrics = trainer_of(model, options, reference=reference).step(_experiences(theirs.train_dataset), 0)
    assert kl > 0.01
    assert metrics["labels/baseline"] == pytest.approx(kl, rel=1e-4)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert distance(gradients["policy"][0], expected) < 1e-5


def test_orpo_has_the_odds_ratio_of_trl(trl: Any) -> None:
    from trl.experimental.orpo import ORPOTrainer

    chosen, rejected = (-torch.rand(50, generator=torch.Generator().manual_seed(n)) * 8 - 1e-3 for n in (0, 1))
    own = SimpleNamespace(beta=0.7, accelerator=SimpleNamespace(device=torch.device("cpu")))
    theirs = ORPOTrainer.odds_ratio_loss(own, chosen, rejected)[0]
    torch.testing.assert_close(0.7 * orpo(chosen, rejected), -theirs)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_divergences_are_those_of_trl(trl: Any, beta: float, temperature: float) -> None:
    """Of GKD, and of the self-distillation trainers."""
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.sdft.loss_utils import compute_divergence

    student, teacher = (torch.randn(1, 6, 11, generator=torch.Generator().manual_seed(n)).double() for n in (0, 1))
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, temperature=temperature, reduction="none")
    log_p, log_q = (torch.log_softmax(each[0], -1) for each in (student, teacher))
    ours = generalised_jsd(log_p, log_q, beta=beta, temperature=temperature)
    torch.testing.assert_close(ours, theirs.reshape(6, -1).sum(-1))
    if temperature == 1:
        torch.testing.assert_close(ours, compute_divergence(log_p, log_q, beta))
        ends = {0.0: forward_kl(log_p, log_q), 1.0: reverse_kl(log_p, log_q)}
        assert beta not in ends or np.allclose(ours, ends[beta])
