"""Routing recorded and replayed: nothing changes by a model's own routing, and other experts are really taken."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.toys import toy_model
from torch import Tensor, nn

from rollmill.errors import ModelError
from rollmill.models.routing import capture_routing, find_routers, replay_routing, routing_shape
from rollmill.trainer.model_setup import set_gradient_checkpointing

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "vocab_size": 60,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MLA = {"kv_lora_rank": 12, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8, "num_key_value_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 16, "norm_topk_prob": True, **EXPERTS},
    "Mixtral": {"num_local_experts": 5, **EXPERTS},
    "GptOss": {"num_local_experts": 6, "sliding_window": 8, **EXPERTS},
    "DeepseekV3": MLA
    | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 16}
    | {"first_k_dense_replace": 1, "num_key_value_heads": 4},
    "Phimoe": {"num_local_experts": 6, "router_jitter_noise": 0.01, **EXPERTS},
    "Llama4Text": {"num_local_experts": 6, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 48, **EXPERTS},
}
IDS = torch.randint(60, (1, 24), generator=torch.Generator().manual_seed(0))


def moe(kind: str, **changes: Any) -> Any:
    """A tiny random model; biases and correction terms are not 0."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | KINDS[kind] | changes, attn_implementation="eager")
    name = kind.removesuffix("Text")
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "bias" in name or "norm" in name:
            tensor.data += 0.1 * torch.randn(tensor.shape)
        elif name.endswith(("gate.weight", "router.weight")):
            tensor.data.normal_(std=0.2)
    return model


def outcome(model: Any, ids: Tensor = IDS) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of the tokens and the gradient of their weighted sum."""
    model.zero_grad(set_to_none=True)
    logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    picked = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    (picked * torch.linspace(-1, 1, len(picked))).sum().backward()
    return picked.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def recorded(model: Any) -> Tensor:
    with torch.no_grad(), capture_routing(model) as routing:
        model(input_ids=IDS, use_cache=False)
    return routing.take()


def others(model: Any, seed: int = 0) -> Tensor:
    """Random experts, each at most once per token: [T, L, k]."""
    layers, k = routing_shape(model) or (0, 0)
    scores = torch.rand(
        IDS.shape[1], layers, find_routers(model)[0].experts, generator=torch.Generator().manual_seed(seed)
    )
    return scores.argsort(-1)[..., :k]


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_routing_changes_nothing(kind: str) -> None:
    model = moe(kind)
    plain, gradient = outcome(model)
    routing = recorded(model)
    layers = 2 if kind == "DeepseekV3" else 3
    assert routing_shape(model) == (layers, 3 if kind == "DeepseekV3" else 2)
    assert tuple(routing.shape) == (24, *routing_shape(model))
    assert routing.dtype == torch.uint8
    assert int(routing.max()) < find_routers(model)[0].experts
    with replay_routing(model, routing.int()):
        again, replayed = outcome(model)
    assert torch.equal(again, plain)
    assert all(torch.equal(replayed[name], each) for name, each in gradient.items())
    assert outcome(model)[0].equal(plain), "the model is as before"


@pytest.mark.parametrize("groups", [1, 4])
def test_scoring_groups_of_experts_is_not_a_choice(groups: int) -> None:
    """DeepSeek's router takes the best two experts of each group to score it; with one group, of all."""
    model = moe("DeepseekV3", n_group=groups, topk_group=max(1, groups // 2), num_experts_per_tok=2)
    plain, _ = outcome(model)
    routing = recorded(model)
    with replay_routing(model, routing.int()):
        assert torch.equal(outcome(model)[0], plain)
    with replay_routing(model, others(model)):
        assert not torch.allclose(outcome(model)[0], plain, atol=1e-3)


def softmax_first(logits: Tensor, indices: Tensor, _: Any) -> Tensor:
    chosen = logits.softmax(-1)[torch.arange(len(logits))[:, None], indices]
    return chosen / chosen.sum(-1, keepdim=True)


def softmax_after(logits: Tensor, indices: Tensor, _: Any) -> Tensor:
    return logits[torch.arange(len(logits))[:, None], indices].softmax(-1)


def sigmoid(logits: Tensor, indices: Tensor, router: Any) -> Tensor:
    chosen = logits.sigmoid()[torch.arange(len(logits))[:, None], indices]
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor


BY_HAND: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "Qwen3Moe": softmax_first,
    "Mixtral": softmax_first,
    "GptOss": softmax_after,
    "DeepseekV3": sigmoid,
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_other_experts_are_weighted_by_the_models_own_scores(kind: str) -> None:
    """Replaying any experts equals routers written by hand: logits, then weights of these experts alone."""
    model = moe(kind)
    routing = others(model)
    with replay_routing(model, routing):
        found, gradient = outcome(model)
    for number, router in enumerate(find_routers(model)):

        def by_hand(hidden: Tensor, module: Any = router.module, indices: Tensor = routing[:, number]) -> Any:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ module.weight.T + getattr(module, "bias", 0)
            return logits, BY_HAND[kind](logits, indices, module), indices

        router.module.forward = by_hand
    expected, own = outcome(model)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    for name, each in own.items():
        torch.testing.assert_close(gradient[name], each, atol=1e-5, rtol=1e-4, msg=name)
    gates = [name for name in own if name.endswith(("gate.weight", "router.weight"))]
    assert len(gates) == len(find_routers(model))
    assert all(float(own[name].norm()) > 1e-4 for name in gates), "gradients flow into the routers"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_without_recorded_routing_choose_for_themselves(kind: str) -> None:
    """A prefix of which nothing is known, then other experts: equal to replaying the own choice there."""
    model = moe(kind)
    partly = others(model)
    partly[:10] = -1
    with torch.no_grad(), replay_routing(model, partly), capture_routing(model) as inner:
        model(input_ids=IDS, use_cache=False)  # the innermost context counts: the model's own choice
    assert torch.equal(inner.take(), recorded(model))
    with replay_routing(model, partly):
        mixed, _ = outcome(model)
    whole = others(model)
    whole[:10] = recorded(model)[:10]
    with replay_routing(model, whole):
        expected, _ = outcome(model)
    torch.testing.assert_close(mixed[:9], outcome(model)[0][:9], atol=1e-5, rtol=0)
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=0)


def test_activations_that_are_recomputed_take_the_same_experts() -> None:
    model = moe("Qwen3Moe")
    routing = others(model)
    with replay_routing(model, routing):
        plain, gradient = outcome(model)
        set_gradient_checkpointing(model.train(), True)
        again, recomputed = outcome(model)
    assert torch.equal(plain, again)
    assert all(torch.equal(recomputed[name], each) for name, each in gradient.items())


def test_more_than_256_experts_take_two_bytes() -> None:
    assert recorded(moe("Qwen3Moe", num_experts=256)).dtype == torch.uint8
    routing = recorded(moe("Qwen3Moe", num_experts=300))
    assert routing.dtype == torch.int16
    assert int(routing.max()) > 255


def test_dense_models_have_no_routers() -> None:
    assert find_routers(toy_model("qwen3")) == []
    assert routing_shape(toy_model("gemma2")) is None


def test_a_router_that_runs_twice_in_a_pass_is_refused() -> None:
    model = moe("Mixtral")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(ModelError, match=r"MixtralTopKRouter runs several times in one pass, so .*replay: false"):
        recorded(model)


class Gate(nn.Module):
    """A router of its own size, whose scores may have any axes before that of the experts."""

    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = experts, k
        self.weight = nn.Parameter(torch.randn(experts, 8, generator=torch.Generator().manual_seed(experts)))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.topk(hidden @ self.weight.T, self.top_k, dim=-1)[1]


class Sorting(Gate):
    """Has `topk` in its code, but chooses in another way."""

    def forward(self, hidden: Tensor) -> Tensor:
        scores = hidden @ self.weight.T
        return torch.topk(scores, 1)[1] if scores.isnan().any() else scores.argsort(-1)[..., -self.top_k :]


class ByKeyword(Gate):
    """Names the argument by which a choice is recognised."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.topk(input=hidden @ self.weight.T, k=self.top_k)[1]


class Normalising(Gate):
    """Looks for the best expert before it chooses."""

    def forward(self, hidden: Tensor) -> Tensor:
        scores = hidden @ self.weight.T
        return torch.topk(scores - torch.topk(scores, 1)[0], self.top_k)[1]


HIDDEN = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))


def test_routers_of_different_sizes_share_a_table() -> None:
    """The smaller one's row ends with 0; more than 256 experts of any need two bytes."""
    gates = nn.ModuleList([Gate(4, 1), Gate(257, 3), Gate(6, 2)])
    assert routing_shape(gates) == (3, 3)
    with capture_routing(gates) as recorded:
        chosen = [gate(HIDDEN)[0] for gate in gates]
    routing = recorded.take()
    assert (tuple(routing.shape), routing.dtype) == ((5, 3, 3), torch.int16)
    for row, own in enumerate(chosen):
        assert torch.equal(routing[:, row, : own.shape[1]], own.short())
        assert not routing[:, row, own.shape[1] :].any()
    other = (routing.int() + 1) % 4
    other[:2] = -1
    with replay_routing(gates, other):
        again = [gate(HIDDEN)[0] for gate in gates]
    for row, (own, replayed) in enumerate(zip(chosen, again, strict=True)):
        assert torch.equal(replayed[:2], own[:2])
        assert torch.equal(replayed[2:], other[2:, row, : own.shape[1]].long())
    with replay_routing(gates, torch.full_like(other, -1)):
        assert all(torch.equal(gate(HIDDEN)[0], own) for gate, own in zip(gates, chosen, strict=True))
    assert not any("forward" in vars(gate) for gate in gates)


def test_the_outer_context_applies_again_after_the_inner_one() -> None:
    gates = nn.ModuleList([Gate(6, 2)])
    own = gates[0](HIDDEN)[0]
    other = (own[:, None].int() + 1) % 6
    with replay_routing(gates, other):
        with capture_routing(gates):
            assert torch.equal(gates[0](HIDDEN)[0], own)
        assert torch.equal(gates[0](HIDDEN)[0], other[:, 0].long())
    assert torch.equal(gates[0](HIDDEN)[0], own)


def test_a_router_may_have_its_sizes_in_its_configuration() -> None:
    """As Gemma 4's. Doge's experts and whole models have sizes and use `topk`, too, but choose no experts by it."""
    gates: Any = nn.ModuleList([Gate(6, 2) for _ in range(5)])
    gates[0].config = SimpleNamespace(num_experts=6, top_k_experts=2)
    gates[0].num_experts = gates[0].top_k = gates[1].num_experts = gates[2].top_k = None
    gates[3].num_keys = 3
    gates[4].get_output_embeddings = None
    assert [tuple(each) for each in find_routers(gates)] == [(gates[0], 6, 2, False, 0)]


def test_a_router_that_does_not_run_has_zeros() -> None:
    gates = nn.ModuleList([Gate(4, 1), Gate(6, 2)])
    with capture_routing(gates) as recorded:
        chosen = gates[1](HIDDEN)[0]
    routing = recorded.take()
    assert not routing[:, 0].any()
    assert torch.equal(routing[:, 1], chosen.byte())


@pytest.mark.parametrize("kind", [Sorting, ByKeyword])
def test_a_router_that_selects_in_another_way_is_refused(kind: type[Gate]) -> None:
    gates = nn.ModuleList([kind(6, 2)])
    known = f"{kind.__name__} selects its experts in a way that is not known, so its choice cannot"
    with pytest.raises(ModelError, match=known), capture_routing(gates):
        gates[0](HIDDEN)


def test_a_search_for_fewer_experts_is_no_choice() -> None:
    gates = nn.ModuleList([Normalising(6, 2)])
    with capture_routing(gates) as recorded:
        chosen = gates[0](HIDDEN)[0]
    assert torch.equal(recorded.take()[:, 0], chosen.byte())
