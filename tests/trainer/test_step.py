"""The trainer's step: one denominator, ratios, skipped updates, errors, resume."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.algorithms import build_recipe
from rollmill.config.algorithms import DAPO, GRPO, MIX, RLOO, SFT, DrGRPO, Reinforce
from rollmill.config.algorithms.base import KLOptions
from rollmill.config.rollout import SamplingConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.errors import TrainingError
from rollmill.rollout.recorder import Recorder
from rollmill.trainer import Trainer
from rollmill.trainer import update as update_module
from rollmill.trainer.update import PolicyUpdater
from rollmill.types import ExperienceSource, experience_from_completion

LIMIT = 24
ALGORITHMS = {
    "grpo": GRPO(kl=0.1, entropy=0.01),
    "dr_grpo": DrGRPO(name="dr_grpo"),
    "dapo": DAPO(name="dapo", overlong_buffer=10),
    "rloo": RLOO(name="rloo", aggregation="sequence-sum-mean"),
    "reinforce": Reinforce(name="reinforce", corrections=[{"name": "tis", "cap": 2.0}], loss={"dual_clip": 3.0}),
    "sft": SFT(name="sft"),
    "mix": MIX(name="mix", mu=0.3),
}


def _trainer(model: Any, options: Any, *, reference: Any = None, seed: int = 0, **config: Any) -> Trainer:
    settings = {"lr": 1e-2, "precision": "fp32", **config}
    recipe = build_recipe(options, max_new_tokens=LIMIT)
    return Trainer(model, recipe, TrainerConfig(**settings), total_steps=10, seed=seed, reference=reference)


def _flat(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def last_gradient(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The flat gradient of every optimizer step, as it was before clipping."""
    seen: list[torch.Tensor] = []
    original = update_module.clip_gradients

    def spy(grads: list[torch.Tensor], norm: float, max_norm: float) -> None:
        seen.append(torch.cat([g.flatten() for g in grads]).clone())
        original(grads, norm, max_norm)

    monkeypatch.setattr(update_module, "clip_gradients", spy)
    return seen


def _step_with(toy: Any, make_batch: Any, architecture: str, algorithm: str, **config: Any) -> dict[str, float]:
    batch = make_batch(demonstrations=3 if algorithm in ("sft", "mix") else 0)
    if algorithm == "sft":
        batch = [e for e in batch if e.source is ExperienceSource.EXPERT]
    reference = toy(architecture, seed=5) if algorithm == "grpo" else None
    return _trainer(toy(architecture), ALGORITHMS[algorithm], reference=reference, **config).step(batch, 0)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma"])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_loss_and_gradient_do_not_depend_on_micro_batches(
    toy: Any, make_batch: Any, last_gradient: list[torch.Tensor], architecture: str, algorithm: str
) -> None:
    losses = [
        _step_with(toy, make_batch, architecture, algorithm, micro_batch_tokens=budget)["loss"]
        for budget in (1, 45, 100_000)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5, abs=1e-6)
    everything = last_gradient[-1]
    assert everything.norm() > 1e-3
    for gradient in last_gradient[:2]:
        assert (gradient - everything).norm() < 1e-5 * everything.norm()


def test_a_denominator_per_micro_batch_would_be_noticed(
    toy: Any, make_batch: Any, last_gradient: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with the usual mistake the check above fails."""
    original = PolicyUpdater.forward

    def wrong(self: PolicyUpdater, batch: Any, micro: Any, *args: Any, **kwargs: Any) -> Any:
        loss, terms = original(self, batch, micro, *args, **kwargs)
        return loss * len(batch.experiences) / len(micro.experiences), terms

    monkeypatch.setattr(PolicyUpdater, "forward", wrong)
    for budget in (45, 100_000):
        _step_with(toy, make_batch, "qwen3", "dr_grpo", micro_batch_tokens=budget)
    assert (last_gradient[0] - last_gradient[1]).norm() > 1e-2 * last_gradient[1].norm()


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "mix"])
def test_gradient_equals_the_formula_written_out(
    toy: Any, make_batch: Any, last_gradient: list[torch.Tensor], algorithm: str
) -> None:
    batch = make_batch(demonstrations=3 if algorithm == "mix" else 0)
    options = {
        "grpo": GRPO(),
        "dr_grpo": DrGRPO(name="dr_grpo"),
        "mix": MIX(name="mix", mu=0.3),
    }[algorithm]
    model = toy("qwen3")
    by_hand = copy.deepcopy(model)
    _trainer(model, options).step(batch, 0)
    usual = [e for e in batch if e.source is ExperienceSource.ROLLOUT]
    expert_tokens = sum(e.action_tokens for e in batch if e.source is ExperienceSource.EXPERT)
    loss = torch.zeros(())
    for e in batch:
        ids = torch.from_numpy(e.token_ids).long()[None]
        temperature = e.temperature if e.source is ExperienceSource.ROLLOUT else 1.0
        log_p = torch.log_softmax(by_hand(ids, use_cache=False).logits[0] / temperature, -1)
        positions = np.flatnonzero(e.action_mask)
        own = log_p[positions - 1, ids[0, positions]]
        if e.source is ExperienceSource.EXPERT:
            loss = loss - 0.3 * own.sum() / expert_tokens
            continue
        rewards = [o.reward for o in usual if o.group == e.group]
        advantage = e.reward - np.mean(rewards)
        if algorithm == "dr_grpo":
            denominator = LIMIT * len(usual)
        else:
            advantage /= np.std(rewards, ddof=1) + 1e-6 if len(set(rewards)) > 1 else 1
            denominator = len(usual) * len(positions)
        weight = 0.7 if algorithm == "mix" else 1.0
        loss = loss - weight * (torch.exp(own - own.detach()) * advantage).sum() / denominator
    loss.backward()
    matrices_first = sorted(by_hand.parameters(), key=lambda p: p.ndim < 2)
    expected = torch.cat([p.grad.flatten() for p in matrices_first])
    assert (last_gradient[0] - expected).norm() < 1e-5 * expected.norm()


def test_first_step_ratio_is_one_and_kl_to_an_equal_reference_zero(toy: Any, make_batch: Any) -> None:
    metrics = _trainer(toy("qwen3"), GRPO(kl=0.1)).step(make_batch(), 0)
    assert metrics["ratio/mean"] == 1.0
    assert metrics["ratio/clip_fraction"] == 0.0
    assert metrics["kl_ref"] == 0.0
    assert metrics["loss/kl"] == 0.0
    assert metrics["logprob_gap/max"] > 0.1  # the batch's log-probs are made up


def test_equal_rewards_move_nothing_even_with_momentum(toy: Any, make_batch: Any) -> None:
    trainer = _trainer(toy("qwen3"), GRPO())
    trainer.step(make_batch(), 0)
    before = _flat(trainer.model)
    batch = make_batch(seed=1)
    for e in batch:
        e.reward = 0.1
    metrics = trainer.step(batch, 1)
    assert torch.equal(_flat(trainer.model), before)
    assert metrics["skipped"] == 1
    assert metrics["loss"] == metrics["grad_norm"] == 0
    assert metrics["entropy"] > 0
    assert all((e.advantage == 0).all() for e in batch)


@pytest.mark.parametrize("algorithm", ["grpo", "mix", "sft"])
def test_token_details_are_those_of_the_model_before_the_step(toy: Any, make_batch: Any, algorithm: str) -> None:
    """Log-probs and entropies against the full softmax of the same weights; the batch is cut into small rows."""
    batch = make_batch(demonstrations=3 if algorithm != "grpo" else 0)
    if algorithm == "sft":
        batch = [one for one in batch if one.source is ExperienceSource.EXPERT]
    model, expected = toy("qwen3"), []
    for one in batch:
        with torch.no_grad():
            logits = model(torch.tensor(one.token_ids[None].astype(np.int64))).logits[0, :-1].double()
        temperature = 1.0 if one.source is ExperienceSource.EXPERT else one.temperature
        log_p = torch.log_softmax(logits / temperature, -1)
        chosen = log_p[range(len(log_p)), one.token_ids[1:]].numpy()
        entropy = -(log_p.exp() * log_p).sum(-1).numpy()
        expected.append([np.where(one.action_mask, np.append(0, values), 0) for values in (chosen, entropy)])
    _trainer(model, ALGORITHMS[algorithm], reference=toy("qwen3", seed=5), micro_batch_tokens=45).step(batch, 0)
    for one, (logprobs, entropy) in zip(batch, expected, strict=True):
        assert one.trainer_logprobs == pytest.approx(logprobs, abs=1e-4)
        assert one.entropy == pytest.approx(entropy, abs=1e-4)


def test_advantages_are_written_where_the_mask_is(toy: Any, make_batch: Any) -> None:
    batch = make_batch()
    _trainer(toy("qwen3"), RLOO(name="rloo")).step(batch, 0)
    for e in batch:
        others = [o.reward for o in batch if o.group == e.group and o is not e]
        assert e.advantage.dtype == np.float32
        assert (e.advantage[~e.action_mask] == 0).all()
        np.testing.assert_allclose(e.advantage[e.action_mask], e.reward - np.mean(others), atol=1e-6)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo"])
def test_missing_rewards_are_as_if_absent(
    toy: Any, make_batch: Any, last_gradient: list[torch.Tensor], algorithm: str
) -> None:
    options = ALGORITHMS[algorithm].model_copy(update={"kl": KLOptions(), "entropy": 0.0})
    batch = make_batch()
    batch[3].reward = batch[7].reward = None
    _trainer(toy("qwen3"), options).step(batch, 0)
    rest = [e for e in batch if e.reward is not None]
    _trainer(toy("qwen3"), options).step(rest, 0)
    assert (last_gradient[0] - last_gradient[1]).norm() < 1e-5 * last_gradient[1].norm()


def test_dapo_leaves_uniform_groups_out_of_the_denominator(
    toy: Any, make_batch: Any, last_gradient: list[torch.Tensor]
) -> None:
    batch = make_batch()
    for e in batch:
        if e.group == "g1":
            e.reward = 1.0
    for drop in (True, False):
        _trainer(toy("qwen3"), DAPO(name="dapo", drop_uniform_groups=drop)).step(batch, 0)
    counted = sum(e.action_tokens for e in batch if e.group != "g1")
    factor = sum(e.action_tokens for e in batch) / counted
    torch.testing.assert_close(last_gradient[0], last_gradient[1] * factor, rtol=1e-4, atol=1e-7)


def test_several_updates_use_the_recorded_log_probs(toy: Any, make_batch: Any) -> None:
    metrics = _trainer(toy("qwen3"), GRPO(), updates_per_batch=2, epochs_per_batch=2).step(make_batch(), 0)
    assert metrics["updates"] == 4
    assert metrics["ratio/mean"] != 1.0
    assert metrics["ratio/clip_fraction"] > 0


def test_stale_tokens_use_recorded_log_probs_or_the_capped_correction(toy: Any, make_batch: Any) -> None:
    stale = make_batch(version=3)
    recorded = _trainer(toy("qwen3"), GRPO()).step(stale, 4)
    capped = _trainer(toy("qwen3"), GRPO(corrections=[{"name": "tis", "cap": 1.5}])).step(stale, 4)
    assert recorded["ratio/mean"] != 1.0
    assert capped["ratio/mean"] == 1.0
    assert "logprob_gap/mean" not in recorded  # no token is of the current version


def test_decoupled_old_log_probs_are_those_before_the_first_update(toy: Any, make_batch: Any) -> None:
    options = GRPO(corrections=[{"name": "tis", "cap": 1.5}])
    metrics = _trainer(toy("qwen3"), options, lr=1e-12, updates_per_batch=3).step(make_batch(), 0)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-5)


def test_importance_weights_multiply_the_gradient(toy: Any, make_batch: Any, last_gradient: list[torch.Tensor]) -> None:
    batch = make_batch()
    for e in batch:
        e.logprobs = np.where(e.action_mask, -100, 0).astype(np.float32)  # exp(old - rollout) is far over the cap
    for cap in ([], [{"name": "tis", "cap": 1.25}]):
        _trainer(toy("qwen3"), GRPO(corrections=cap)).step(batch, 0)
    torch.testing.assert_close(last_gradient[1], 1.25 * last_gradient[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_not_finite_names_the_step_term_and_tasks_and_changes_nothing(toy: Any, make_batch: Any, where: str) -> None:
    trainer = _trainer(toy("qwen3"), GRPO(), micro_batch_tokens=1)
    batch = make_batch()
    if where == "loss":
        batch[0].temperature = float("nan")
        message = f"training step 0: loss term 'policy' is nan.*{batch[0].task_id}"
    else:
        rows = len(batch[0].token_ids) - 1
        trainer.model.lm_head.weight.register_hook(lambda g: g * float("inf") if trainer.rows == rows else g)
        original = trainer._updates.forward

        def spy(part: Any, micro: Any, *args: Any, **kwargs: Any) -> Any:
            trainer.rows = micro.input_ids.numel()
            return original(part, micro, *args, **kwargs)

        trainer._updates.forward = spy
        message = f"training step 0: the gradient of .* by loss terms policy is not finite.*{batch[0].task_id}"
    before = _flat(trainer.model)
    with pytest.raises(TrainingError, match=message):
        trainer.step(batch, 0)
    assert torch.equal(_flat(trainer.model), before)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_resume_continues_bit_for_bit(toy: Any, make_batch: Any) -> None:
    config: dict[str, Any] = {"updates_per_batch": 2, "epochs_per_batch": 2, "schedule": "cosine", "weight_decay": 0.1}
    trainer = _trainer(toy("qwen3"), GRPO(kl=0.1), **config)
    trainer.step(make_batch(), 0)
    saved = copy.deepcopy((trainer.model.state_dict(), trainer.state_dict()))
    expected = trainer.step(make_batch(seed=1), 1)
    resumed = _trainer(toy("qwen3", seed=9), GRPO(kl=0.1), seed=123, **config)
    resumed.model.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.step(make_batch(seed=1), 1) == expected
    assert torch.equal(_flat(resumed.model), _flat(trainer.model))


def test_gradient_checkpointing_changes_nothing(
    toy: Any, make_batch: Any, last_gradient: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr("transformers.modeling_utils.checkpoint", lambda *a, **k: calls.append(1) or real(*a, **k))
    for on in (False, True):
        _trainer(toy("qwen3"), GRPO(), gradient_checkpointing=on).step(make_batch(), 0)
    assert len(calls) == 2  # one per layer
    torch.testing.assert_close(last_gradient[1], last_gradient[0], rtol=1e-5, atol=1e-7)


def test_an_engine_in_another_thread_changes_nothing(toy: Any, make_batch: Any) -> None:
    """As of a judge with `path`: each step is what it is alone, and so is what the engine generates."""

    def trained() -> torch.Tensor:
        trainer = _trainer(toy("qwen3"), GRPO(kl=0.1), reference=toy("qwen3", seed=5), gradient_checkpointing=True)
        for step in range(4):
            trainer.step(make_batch(seed=step), step)
        return _flat(trainer.model)

    request = GenerationRequest([5, 9, 2], SamplingConfig(max_new_tokens=12), n=3)
    engine = NativeEngine(toy("qwen3", seed=7), context=64)
    generated: list[list[list[int]]] = []
    begun, done = threading.Event(), threading.Event()

    def generate() -> None:
        generated.append([each.token_ids.tolist() for each in asyncio.run(engine.generate(request))])

    def beside() -> None:
        while not done.is_set():
            generate()
            begun.set()

    alone = trained()
    generate()
    thread = threading.Thread(target=beside)
    thread.start()
    try:
        assert begun.wait(60)
        before = len(generated)
        assert torch.equal(trained(), alone)
        assert len(generated) > before
    finally:
        done.set()
        thread.join()
    assert all(each == generated[0] for each in generated)


@pytest.mark.parametrize("recorded", ["by the explorer", "by a workflow"])
@pytest.mark.parametrize("truncation", [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.4}], ids=str)
def test_the_trainer_agrees_with_an_engine_that_leaves_tokens_out(
    toy: Any, recorded: str, truncation: dict[str, Any]
) -> None:
    """Both take log-probs over the whole vocabulary, so that the first ratio is 1 whatever was left out in sampling."""
    sampling = SamplingConfig(temperature=0.8, max_new_tokens=12, **truncation)
    request, batch = GenerationRequest([5, 9, 2], sampling, n=4), []
    for n, each in enumerate(asyncio.run(NativeEngine(toy("qwen3"), context=64).generate(request))):
        assert (each.kept_logmass < -0.01).any()
        name, recorder = f"g/{n}", Recorder()
        recorder.add(each, "", sampling.temperature)
        if recorded == "by a workflow":
            batch += recorder.experiences(id=name, task_id="t", group="g", decode=str)
        else:
            one = {"id": name, "task_id": "t", "group": "g", "prompt": "", "temperature": sampling.temperature}
            batch.append(experience_from_completion(each, **one))
        batch[-1].reward = float(n)
    metrics = _trainer(toy("qwen3"), GRPO(proximal="rollout")).step(batch, 0)
    assert metrics["tokens"] == sum(each.action_tokens for each in batch) > 12
    assert metrics["logprob_gap/max"] < 1e-4
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-4)


def test_reference_copy_only_when_needed(toy: Any) -> None:
    assert _trainer(toy("qwen3"), GRPO())._reference is None
    assert _trainer(toy("qwen3"), GRPO(kl=0.1))._reference is not None


def test_bf16_is_close_to_fp32(toy: Any, make_batch: Any, last_gradient: list[torch.Tensor]) -> None:
    for precision in ("fp32", "bf16"):
        model = toy("qwen3", attn_implementation="sdpa")
        _trainer(model, DrGRPO(name="dr_grpo"), precision=precision).step(make_batch(), 0)
        assert next(model.parameters()).dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(last_gradient[0], last_gradient[1], dim=0) > 0.99
    assert not torch.equal(last_gradient[0], last_gradient[1])


def test_sft_lowers_the_loss(toy: Any, make_batch: Any) -> None:
    batch = [e for e in make_batch(demonstrations=6) if e.source is ExperienceSource.EXPERT]
    trainer = _trainer(toy("qwen3"), SFT(name="sft"))
    losses = [trainer.step(batch, n)["loss"] for n in range(8)]
    assert losses[-1] < 0.7 * losses[0]


def test_clipping_bounds_the_gradient(toy: Any, make_batch: Any) -> None:
    trainer = _trainer(toy("qwen3"), GRPO(), max_grad_norm=1e-3)
    assert trainer.step(make_batch(), 0)["grad_norm"] > 1e-3
    moments = trainer._optimizer.state_dict()["state"].values()
    norm = torch.stack([m["exp_avg"].norm() for m in moments]).norm() / (1 - 0.9)
    assert float(norm) == pytest.approx(1e-3, rel=1e-4)


def test_only_matrices_decay(toy: Any) -> None:
    trainer = _trainer(toy("qwen3"), GRPO(), weight_decay=0.1)
    decays = {p.ndim: g["weight_decay"] for g in trainer._optimizer.param_groups for p in g["params"]}
    assert decays == {2: 0.1, 1: 0.0}


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_a_share_of_the_silent_completions_is_enough_for_metrics(toy: Any, make_batch: Any, share: float) -> None:
    """The update stays the same to the bit; metrics weigh the sampled ones as all."""
    trained, seen, metrics = {}, {}, {}
    for each in (1.0, share):
        batch = make_batch(groups=6)
        for experience in batch:
            if experience.group in ("g0", "g2", "g5"):  # equal rewards: no advantage
                experience.reward = 1.0
        model = toy("qwen3")
        metrics[each] = _trainer(model, GRPO(), metrics_share=each).step(batch, 0)
        trained[each], seen[each] = _flat(model), {one.id: one for one in batch}
    assert torch.equal(trained[1.0], trained[share])
    silent = [name for name, one in seen[1.0].items() if one.group in ("g0", "g2", "g5")]
    shown = [name for name in silent if seen[share][name].entropy is not None]
    assert len(silent) == 12
    assert len(shown) == round(share * 12)
    assert all(one.entropy is not None for name, one in seen[share].items() if name not in silent)
    total = tokens = 0.0
    for name, one in seen[share].items():
        if one.entropy is not None:
            weight = len(silent) / len(shown) if name in silent else 1.0
            total += weight * float(one.entropy[one.action_mask].sum())
            tokens += weight * one.action_tokens
            np.testing.assert_allclose(one.entropy, seen[1.0][name].entropy, atol=1e-5)
    assert metrics[share]["entropy"] == pytest.approx(total / tokens, rel=1e-4)
    assert metrics[share]["entropy"] != pytest.approx(metrics[1.0]["entropy"], rel=1e-6)
