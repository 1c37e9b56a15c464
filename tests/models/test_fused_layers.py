"""The fused passes of the native engine: for which models they are used, and that they follow the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.toys import sampled_completions, toy_model
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rollmill.engines.native import NativeEngine
from rollmill.models import fused_layers
from rollmill.models.attention import build_forward_inputs, use_attention_context
from rollmill.models.fused_layers import build_fused_layers
from rollmill.trainer.model_setup import set_gradient_checkpointing
from rollmill.types import Completion

SMALL = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama 3": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama with biases": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=16, head_dim=12)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    ),
    "qwen3": lambda: toy_model("qwen3", vocab_size=90),
}


def random_model(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def require_own_logprobs(model: Any, completions: list[Completion], atol: float = 2e-5) -> None:
    for completion in completions:
        tokens = torch.tensor([[*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[0, len(completion.prompt_ids) - 1 : -1]
        new = torch.tensor(completion.token_ids.astype(np.int64))
        expected = logits.log_softmax(-1).gather(1, new[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(completion.logprobs), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("copied", [0, fused_layers.COPIED_BYTES], ids=["separate", "copied"])
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_the_model(name: str, copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "COPIED_BYTES", copied)
    model = random_model(name)
    assert build_fused_layers(model, 256) is not None
    require_own_logprobs(model, sampled_completions(NativeEngine(model, context=256)))


def test_new_weights_are_used_also_after_their_memory_was_freed() -> None:
    model = random_model("qwen3")
    engine = NativeEngine(model, context=256)
    first = sampled_completions(engine)
    for version, destroy in enumerate((False, True), 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        if destroy:
            engine.core.destroy_weights()
        engine.weights_updated(version)
        later = sampled_completions(engine)
        require_own_logprobs(model, later)
        assert [list(each.token_ids) for each in later] != [list(each.token_ids) for each in first]


def changed_scaling(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, given, output: output * 1.5)


def changed_norm(model: Any) -> None:
    class Other(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * 2

    model.model.norm.__class__ = Other


def changed_layer(model: Any) -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model.model.layers[0].mlp.down_proj.__class__ = Doubled


@pytest.mark.parametrize("change", [changed_scaling, changed_norm, changed_layer])
def test_a_model_that_computes_something_else_is_left_as_it_is(change: Any) -> None:
    model = random_model("qwen3")
    change(model)
    assert build_fused_layers(model, 256) is None
    engine = NativeEngine(model, context=256)
    require_own_logprobs(model, sampled_completions(engine))


@pytest.mark.parametrize("architecture", ["gemma2", "qwen3_moe"])
def test_other_architectures_are_left_as_they_are(architecture: str) -> None:
    assert build_fused_layers(toy_model(architecture, vocab_size=90), 256) is None


def test_bf16_logits_are_as_close_to_fp32_as_those_of_the_model() -> None:
    model = random_model("qwen3")
    tokens, positions = torch.randint(5, 90, (1, 40)), torch.arange(40)[None]

    def logits_of(fused: bool) -> torch.Tensor:
        recorder = fused_layers._Recorder()
        with torch.no_grad():
            if fused:
                layers = build_fused_layers(model, 256)
                assert layers is not None
                return layers.forward(recorder, tokens, positions, 0).float()
            with use_attention_context(model, recorder):
                output: Any = model(**build_forward_inputs(model, tokens, positions))
        return output.logits[0].float()

    exact = logits_of(False)
    model.bfloat16()
    assert (logits_of(True) - exact).abs().mean() < 1.2 * (logits_of(False) - exact).abs().mean()


def test_gradient_checkpointing_leaves_the_passes_of_the_engine_as_they_are() -> None:
    """transformers adds a hook to the embeddings, as a changed model would have one."""
    model = random_model("qwen3")
    set_gradient_checkpointing(model, True)
    assert build_fused_layers(model, 256) is not None
