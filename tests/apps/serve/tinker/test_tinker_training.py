"""Clients of the tinker SDK train adapters and sample from them; numbers are those of rollmill's own trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from support.tinker_servers import ANN, BASE, adapter, datum, tinker_server
from tinker import types

from rollmill.algorithms.policy_recipes import build_recipe
from rollmill.algorithms.recipe import Recipe
from rollmill.config.algorithms.baselines import GRPO
from rollmill.config.algorithms.demonstrations import SFT
from rollmill.config.model import LoRAConfig, ModelConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.models.load import load_policy
from rollmill.models.lora import save_adapter
from rollmill.trainer.stepwise import StepwiseTrainer
from rollmill.types import Experience, ExperienceSource

PROMPT = [5, 9, 20, 7]
TEXT = [5, 9, 20, 7, 33, 41, 12, 8]
TEXTS = [TEXT, [5, 9, 20, 7, 2, 2, 90], [61, 3, 17, 45, 100, 4]]
RANK, SEED, LR = 8, 3, 1e-2


@pytest.fixture(scope="module")
def service(base: Path, checkpoints: Path) -> Iterator[Any]:
    with tinker_server({BASE: base}, checkpoints) as server:
        yield tinker.ServiceClient(base_url=server.url, api_key=ANN)


def test_a_client_learns_a_text_and_samples_it(service: Any, base: Path) -> None:
    client = service.create_lora_training_client(BASE, rank=8, seed=1).result()
    info = client.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (BASE, 8, True)
    assert (
        client.get_tokenizer().get_vocab()
        == load_policy(ModelConfig(path=base), texts=(), seed=0, device=torch.device("cpu")).tokenizer.get_vocab()
    )
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


def _own_step(base: Path, folder: Path, recipe: Recipe, experiences: list[Experience]) -> tuple[float, float]:
    """Loss and gradient norm of a step of rollmill's trainer, whose adapter is saved in `folder`."""
    lora = LoRAConfig(rank=RANK, alpha=32, merge=False)
    policy = load_policy(ModelConfig(path=base, lora=lora), texts=(), seed=SEED, device=torch.device("cpu"))
    config = TrainerConfig(lr=LR, betas=(0.9, 0.95), eps=1e-8, max_grad_norm=0.5, precision="fp32")
    trainer = StepwiseTrainer(policy.model, recipe, config, total_steps=1)
    loss = trainer.forward_backward(experiences, 0)["loss"]
    norm = trainer.optim_step()["grad_norm"]
    save_adapter(policy.model, folder)
    return loss, norm


def _experience(number: int, tokens: list[int], prompt: int, **fields: Any) -> Experience:
    size = len(tokens)
    return Experience(
        id=str(number),
        task_id=str(number),
        group="one",
        token_ids=np.array(tokens, np.int32),
        action_mask=np.arange(size) >= prompt,
        logprobs=fields.pop("logprobs", np.zeros(size, np.float32)),
        versions=np.zeros(size, np.int32),
        **fields,
    )


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling"])
def test_a_step_is_that_of_the_own_trainer(
    name: str, service: Any, base: Path, checkpoints: Path, tmp_path: Path
) -> None:
    """SFT is cross-entropy with weights of 1 / tokens, and GRPO importance sampling with advantages / tokens."""
    client = service.create_lora_training_client(BASE, rank=RANK, seed=SEED).result()
    tokens = sum(len(text) - 4 for text in TEXTS)
    if name == "cross_entropy":
        recipe = build_recipe(SFT(), max_new_tokens=64)
        experiences = [_experience(i, text, 4, source=ExperienceSource.EXPERT) for i, text in enumerate(TEXTS)]
        data = [datum(text, weights=[0.0] * 3 + [1 / tokens] * (len(text) - 4)) for text in TEXTS]
    else:
        recipe = build_recipe(GRPO(aggregation="token-mean"), max_new_tokens=64)
        known = client.forward([datum(text) for text in TEXTS], "cross_entropy").result().loss_fn_outputs
        logprobs = [np.array([0.0, *each["logprobs"].tolist()], np.float32) for each in known]
        experiences = [
            _experience(i, text, 4, reward=float(i == 1), logprobs=logprobs[i]) for i, text in enumerate(TEXTS)
        ]
        rewards = np.array([0.0, 1.0, 0.0])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        data = [
            datum(
                text,
                logprobs=logprobs[i][1:].tolist(),
                advantages=[0.0] * 3 + [advantages[i] / tokens] * (len(text) - 4),
            )
            for i, text in enumerate(TEXTS)
        ]
    loss, norm = _own_step(base, tmp_path, recipe, experiences)
    gradients = client.forward_backward(data, name)
    step = client.optim_step(
        types.AdamParams(learning_rate=LR, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=0.5)
    ).result()
    assert gradients.result().metrics["loss:sum"] == pytest.approx(loss, abs=1e-5)
    assert step.metrics["grad_norm:mean"] == pytest.approx(norm, rel=1e-4)
    saved = adapter(checkpoints, client.save_state(f"own-{name}").result().path)
    from safetensors.torch import load_file

    own = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == own.keys()
    for key, weight in own.items():
        torch.testing.assert_close(saved[key], weight, rtol=0, atol=2e-4, msg=key)
        assert float((saved[key] - weight).abs().mean()) < 1e-6, key


Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}


def _clipped(ratio: torch.Tensor) -> torch.Tensor:
    return ratio.clamp(0.9, 1.05)


def _gspo(logprob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    scored = advantage != 0
    ratio = torch.exp((logprob - old)[scored].mean())
    return -torch.minimum(ratio * advantage, _clipped(ratio) * advantage).sum()


FORMULAS: dict[str, tuple[dict[str, float], Formula]] = {
    "importance_sampling": ({}, lambda p, q, a: -((p - q).exp() * a).sum()),
    "ppo": (CLIP, lambda p, q, a: -torch.minimum((p - q).exp() * a, _clipped((p - q).exp()) * a).sum()),
    "cispo": (CLIP, lambda p, q, a: -(_clipped((p - q).exp()).detach() * a * p).sum()),
    "dro": ({"beta": 0.3}, lambda p, q, a: -(a * p - 0.15 * (a != 0) * (p - q) ** 2).sum()),
    "gspo": (CLIP, _gspo),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_is_its_formula_with_gradients(name: str, service: Any, checkpoints: Path) -> None:
    """The SDK computes the same formula as a custom loss on the client, of log-probs and a linear loss."""
    options, formula = FORMULAS[name]
    draws = np.random.default_rng(7)
    old = [[0.0] * 3 + draws.normal(-5, 1, len(text) - 4).tolist() for text in TEXTS]
    advantages = [[0.0] * 3 + draws.normal(0, 1, len(text) - 4).tolist() for text in TEXTS]
    built_in, custom = (service.create_lora_training_client(BASE, rank=4, seed=5).result() for _ in range(2))
    # log-probs of the rollout that are near those of the model, so that ratios are on both sides of the clips
    own = custom.forward([datum(text) for text in TEXTS], "cross_entropy").result().loss_fn_outputs
    for i, each in enumerate(own):
        old[i] = [
            0.0 if a == 0 else p + float(d)
            for p, a, d in zip(
                each["logprobs"].tolist(), advantages[i], draws.normal(0, 0.15, len(old[i])), strict=True
            )
        ]
    data = [datum(t, logprobs=q, advantages=a) for t, q, a in zip(TEXTS, old, advantages, strict=True)]

    def loss(_data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        parts = [
            formula(p, torch.tensor(q), torch.tensor(a)) for p, q, a in zip(logprobs, old, advantages, strict=True)
        ]
        return torch.stack(parts).sum(), {"parts:sum": 3.0}

    expected = custom.forward_backward_custom(data, loss).result().metrics
    found = built_in.forward_backward(data, name, options).result().metrics
    assert found["loss:sum"] == pytest.approx(expected["loss:sum"], abs=1e-4)
    assert expected["parts:sum"] == 3
    forward = built_in.forward(data, name, options).result().metrics
    assert forward["loss:sum"] == pytest.approx(found["loss:sum"], abs=1e-4)
    # a step of plain SGD's direction: Adam's first step hides the gradient's size, its norm does not
    steps = [each.optim_step(types.AdamParams(learning_rate=1e-3, eps=1.0)).result() for each in (built_in, custom)]
    norms = [each.metrics["grad_norm:mean"] for each in steps]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    saved = [adapter(checkpoints, each.save_state(name).result().path) for each in (built_in, custom)]
    changed = 0.0
    for key, weight in saved[0].items():
        torch.testing.assert_close(weight, saved[1][key], rtol=1e-4, atol=1e-6, msg=key)
        changed += float(weight.abs().sum()) if "lora_B" in key else 0.0
    assert changed > 0


def test_targets_need_not_be_the_next_tokens(service: Any, base: Path) -> None:
    client = service.create_lora_training_client(BASE, rank=4, seed=5).result()
    targets = [11, 0, 63, 63, 2, 101, 7]
    found = client.forward(
        [types.Datum(model_input=types.ModelInput.from_ints(TEXT[:-1]), loss_fn_inputs={"target_tokens": targets})],
        "cross_entropy",
    ).result()
    policy = load_policy(ModelConfig(path=base), texts=(), seed=0, device=torch.device("cpu"))
    with torch.no_grad():
        logits = policy.model.eval()(torch.tensor([TEXT[:-1]])).logits[0].float()
    expected = torch.log_softmax(logits, -1)[torch.arange(7), torch.tensor(targets)]
    assert found.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert found.metrics["loss:sum"] == pytest.approx(-float(expected.sum()), abs=1e-3)


def test_several_targets_per_token(service: Any, base: Path) -> None:
    """The loss is that of soft labels, dense or sparse, and its gradient that of one target after the other."""
    data, sizes = [], (2, 3, 3)
    draws = np.random.default_rng(3)
    for text, size in zip(TEXTS, sizes, strict=True):
        shape = (len(text) - 1, size)
        weights = draws.random(shape).astype(np.float32) * (draws.random(shape) < 0.3)
        inputs = {"target_tokens": draws.integers(1, 100, shape) * (weights != 0), "weights": weights}
        data.append((text, {name: torch.from_numpy(value) for name, value in inputs.items()}))

    def made(text: list[int], inputs: dict[str, torch.Tensor], *, sparse: bool) -> Any:
        encode = types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch
        given = {name: encode(value) for name, value in inputs.items()}
        return types.Datum(model_input=types.ModelInput.from_ints(text[:-1]), loss_fn_inputs=given)

    policy = load_policy(ModelConfig(path=base), texts=(), seed=0, device=torch.device("cpu"))
    norms, results = [], []
    for sparse in (False, True):
        client = service.create_lora_training_client(BASE, rank=4, seed=6).result()
        batch = [made(text, inputs, sparse=sparse) for text, inputs in data]
        assert any(each.loss_fn_inputs["weights"].sparse_crow_indices is not None for each in batch) is sparse
        results.append(client.forward_backward(batch, "cross_entropy").result())
        norms.append(client.optim_step(types.AdamParams(eps=1.0)).result().metrics["grad_norm:mean"])
    total = 0.0
    for (text, inputs), *outputs in zip(data, *(each.loss_fn_outputs for each in results), strict=True):
        with torch.no_grad():
            logits = policy.model.eval()(torch.tensor([text[:-1]])).logits[0].float()
        own = torch.log_softmax(logits, -1).gather(1, inputs["target_tokens"])
        for output in outputs:
            assert output["logprobs"].shape == list(own.shape)
            torch.testing.assert_close(output["logprobs"].to_torch().reshape(own.shape), own, rtol=0, atol=1e-4)
        total -= float((own * inputs["weights"]).sum())
    assert [each.metrics["loss:sum"] for each in results] == pytest.approx([total] * 2, abs=1e-3)
    # of one target at a time, the gradients add up to the same
    client = service.create_lora_training_client(BASE, rank=4, seed=6).result()
    for text, inputs in data:
        for k in range(inputs["weights"].shape[1]):
            column = {name: value[:, k].tolist() for name, value in inputs.items()}
            single = types.Datum(model_input=types.ModelInput.from_ints(text[:-1]), loss_fn_inputs=column)
            client.forward_backward([single], "cross_entropy").result()
    norms.append(client.optim_step(types.AdamParams(eps=1.0)).result().metrics["grad_norm:mean"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


def test_gradients_of_several_requests_add_up(service: Any, checkpoints: Path) -> None:
    together, apart = (service.create_lora_training_client(BASE, rank=4, seed=6).result() for _ in range(2))
    together.forward_backward([datum(text) for text in TEXTS], "cross_entropy").result()
    for text in TEXTS:
        apart.forward_backward([datum(text)], "cross_entropy").result()
    norms = [
        each.optim_step(types.AdamParams(eps=1.0)).result().metrics["grad_norm:mean"] for each in (together, apart)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_only_the_chosen_layers_have_an_adapter(service: Any, checkpoints: Path) -> None:
    layers = {}
    for chosen in ("attn", "mlp"):
        client = service.create_lora_training_client(
            BASE, rank=4, train_attn=chosen == "attn", train_mlp=chosen == "mlp"
        ).result()
        saved = adapter(checkpoints, client.save_state("layers").result().path)
        layers[chosen] = {key.split(".")[-3] for key in saved}
    assert layers == {"attn": {"q_proj", "k_proj", "v_proj", "o_proj"}, "mlp": {"gate_proj", "up_proj", "down_proj"}}
