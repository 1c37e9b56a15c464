"""Self-distillation: the teacher is the policy after another prompt, with weights of now, the start or an average."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithm_batches import batch_for, distance, flat, gradient, options_of, trainer_of, watch_gradients
from support.toys import toy_tokenizer

from rollmill.config.model import LoRAConfig
from rollmill.models.lora import add_lora
from rollmill.orchestrator.privileged_context import PrivilegedContext
from rollmill.rewards.grading import completion_from_text
from rollmill.types import Experience, ParsedReply, Task, experience_from_completion

RATE, LR = 0.3, 3e-3


def _log_probs(model: Any, prompt: list[int], e: Experience) -> torch.Tensor:
    """Of the action tokens' positions over the vocabulary, after a prompt."""
    start = e.action_mask.tolist().index(True)
    ids = torch.tensor([prompt + e.token_ids[start:].tolist()])
    at = torch.from_numpy(e.action_mask[start:]).nonzero()[:, 0] + len(prompt)
    return torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, at - 1], -1)


def _loss(model: Any, teacher: Any, batch: list[Experience]) -> torch.Tensor:
    """The mean reverse KL over all tokens of completions whose teacher sees more."""
    terms = []
    for e in batch:
        if e.teacher_prompt is not None:
            own = _log_probs(model, e.token_ids[: e.action_mask.tolist().index(True)].tolist(), e)
            others = _log_probs(teacher, e.teacher_prompt.tolist(), e).detach()
            terms.append((own.exp() * (own - others)).sum(-1))
    return torch.cat(terms).mean()


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
@pytest.mark.parametrize("weights", ["ema", "initial", "current"])
def test_loss_and_gradient_equal_the_formula_at_every_step(
    toy: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch, weights: str, architecture: str
) -> None:
    options = options_of("self_distill", weights=weights, **({"rate": RATE} if weights == "ema" else {}))
    model = toy(architecture)
    teacher = copy.deepcopy(model)
    trainer = trainer_of(model, options, lr=LR, micro_batch_tokens=60)
    gradients = watch_gradients(monkeypatch)
    for n in range(3):
        batch = batch_for(make_batch, options, seed=n)
        assert {e.teacher_prompt is None for e in batch} == {True, False}
        with torch.no_grad():
            for ours, policys in zip(teacher.parameters(), model.parameters(), strict=True):
                if weights == "current":
                    ours.copy_(policys)
                elif weights == "ema" and n:
                    ours.copy_((1 - RATE) * ours + RATE * policys)
        loss = _loss(model, teacher, batch)
        expected = gradient(loss, model)
        metrics = trainer.step(batch, n)
        assert metrics["loss/distill"] == pytest.approx(loss.item(), rel=1e-4)
        assert distance(gradients["policy"][n], expected) < 1e-4


@pytest.mark.parametrize("context", ["success", "solution"])
def test_the_teacher_sees_answers_without_reasoning(context: str) -> None:
    tokenizer = toy_tokenizer()
    task = Task("t", "6*7?", answer="42", response="<think>why</think>It is 42.")
    tagged = completion_from_text(task, "<think>why</think>It is 42.")
    parsed = replace(tagged, text="analysis why final It is 42.", reply=ParsedReply("It is 42.", "why"))
    group = [
        experience_from_completion(each, id=f"g/{n}", task_id="t", group="g", prompt="6*7?", temperature=1.0)
        for n, each in enumerate([tagged, parsed])
    ]
    for each in group:
        each.reward, each.token_ids, each.action_mask = 1.0, np.array([1, 2], np.int32), np.array([False, True])
    teacher = PrivilegedContext(options_of("self_distill", context=context), {"t": task}, tokenizer, 10_000)
    assert teacher.give(group)["teacher/context"] == 1
    for each in group:
        assert each.teacher_prompt is not None
        shown = tokenizer.decode(each.teacher_prompt.tolist())
        assert "good response:\nIt is 42.\n" in shown
        assert "why" not in shown


@pytest.mark.parametrize("weights", ["ema", "initial", "current"])
def test_a_resumed_trainer_has_the_same_teacher(toy: Any, make_batch: Any, weights: str) -> None:
    options = options_of("self_distill", weights=weights)
    batches = [batch_for(make_batch, options, seed) for seed in range(4)]
    whole = trainer_of(toy("qwen3"), options, lr=LR)
    for n in range(2):
        whole.step(batches[n], n)
    resumed = trainer_of(copy.deepcopy(whole.model), options, lr=LR)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for trainer in (whole, resumed):
        for n in (2, 3):
            trainer.step(batches[n], n)
    assert torch.equal(flat(whole.model), flat(resumed.model))


def test_without_any_context_nothing_is_learned(toy: Any, make_batch: Any) -> None:
    options = options_of("self_distill")
    batch = batch_for(make_batch, options)
    for e in batch:
        e.teacher_prompt = None
    trainer = trainer_of(toy("qwen3"), options)
    before = flat(trainer.model)
    metrics = trainer.step(batch, 0)
    assert metrics["skipped"] == 1
    assert torch.equal(flat(trainer.model), before)


def test_a_teacher_that_sees_the_same_agrees(toy: Any, make_batch: Any) -> None:
    options = options_of("self_distill")
    batch = batch_for(make_batch, options)
    for e in batch:
        e.teacher_prompt = e.token_ids[: int(np.argmax(e.action_mask))]
    metrics = trainer_of(toy("qwen3"), options).step(batch, 0)
    assert abs(metrics["loss"]) < 1e-6


def test_adapters_are_averaged_and_come_back(toy: Any, make_batch: Any) -> None:
    """With LoRA the teacher's adapters take the place of the policy's while it is asked."""
    pytest.importorskip("peft", reason="peft is not installed (extra `lora`)")
    options = options_of("self_distill", rate=RATE)
    model = toy("qwen3")
    add_lora(model, LoRAConfig(rank=4), seed=0)
    trainer = trainer_of(model, options, lr=1e-2)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    average = {name: p.detach().clone() for name, p in adapters.items()}
    for n in range(3):
        before = {name: p.detach().clone() for name, p in adapters.items()}
        trainer.step(batch_for(make_batch, options, seed=n), n)
        assert any(not torch.equal(before[name], p) for name, p in adapters.items())
        average = {name: each + RATE * (adapters[name].detach() - each) for name, each in average.items()}
    state = trainer.state_dict()["teacher"]
    for name, each in average.items():
        torch.testing.assert_close(state[name], each)
        assert not torch.equal(state[name], adapters[name])


def test_teacher_prompts_are_not_sent_to_the_policy(toy: Any, make_batch: Any) -> None:
    """The log-probs and metrics of the policy are those after its own prompt."""
    options = options_of("self_distill")
    batch = batch_for(make_batch, options)
    bare = [replace(e, teacher_prompt=None) for e in batch]
    with_context, without = (trainer_of(toy("qwen3"), options).step(each, 0) for each in (batch, bare))
    for name in ("entropy", "kl", "logprob_gap/mean"):
        assert with_context[name] == pytest.approx(without[name], rel=1e-5)
