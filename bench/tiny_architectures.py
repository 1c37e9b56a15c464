"""Tiny random models of every causal language model that transformers has, for `bench architectures`.

A configuration is the class's default with small sizes: hidden size 64, two to five layers with one of every kind,
windows and chunks of 16 tokens. Weights are random with a fixed seed; none keeps an initial value that could hide an
error: norms are not 1, biases, sinks and decay rates are not 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

VOCABULARY = 128
WINDOW = 16  #: of sliding and chunked attention, in tokens; far fewer than in the compared sequences
CONTEXT = 512
LARGEST = 3_000_000  #: parameters
HIDDEN, HEADS, KV_HEADS, HEAD = 64, 4, 2, 16

SIZES: dict[str, Any] = {
    # the residual stream
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "embedding_dim", "hidden_size_global"), HIDDEN),
    # layers
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "depth", "num_blocks"), 2),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "attention_heads", "num_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "swa_num_attention_heads", "index_n_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads"), KV_HEADS),
    "num_global_key_value_heads": 1,
    **dict.fromkeys(("head_dim", "kv_channels", "swa_head_dim", "dim_head", "attention_head_size", "d_head"), HEAD),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "index_head_dim"), HEAD),
    "global_head_dim": 2 * HEAD,
    "qk_rope_head_dim": 8,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 24),
    "o_groups": 2,
    "rotary_dim": 8,
    # feed-forward and experts
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "dff"), 96),
    **dict.fromkeys(("n_inner", "d_inner", "intermediate_size_mlp", "dense_intermediate_size", "ffn_hidden_size"), 96),
    **dict.fromkeys(("feed_forward_size", "prefix_dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "shared_experts_intermediate_size"), 48),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "zero_expert_num": 2,
    # which layers are dense, sparse, full, linear
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers"), 1),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period", "interleave_moe_layer_step"), 2),
    **dict.fromkeys(("sliding_window_pattern", "global_attn_every_n_layers", "layer_group_size"), 2),
    "no_rope_layer_interval": 2,
    "attn_layer_offset": 1,
    "use_sliding_window": True,
    # windows and chunks
    **dict.fromkeys(("sliding_window", "sliding_window_size", "local_attention", "window_size"), WINDOW),
    **dict.fromkeys(("attention_window_size", "attention_chunk_size", "keep_window_size"), WINDOW),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "local_attn_chunk_length", "lsh_attn_chunk_length"), WINDOW),
    **dict.fromkeys(("index_topk", "local_attention_window_len", "rel_extent"), WINDOW),
    "block_size": 8,
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "logits_soft_cap"), 5.0),
    "clip_qkv": 2.0,
    "logit_scale": 0.25,
    **dict.fromkeys(("logits_scaling", "embedding_multiplier"), 2.0),
    **dict.fromkeys(("residual_multiplier", "attention_multiplier", "lm_head_multiplier", "key_multiplier"), 0.5),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier", "attention_out_multiplier"), 0.75),
    "attention_in_multiplier": 1.5,
    "routed_scaling_factor": 1.5,
    **dict.fromkeys(("qk_layernorm", "use_qk_norm"), True),
    "floor_scale": 32,  # position-dependent temperatures start within the sequences
    # state spaces, linear attention and short convolutions
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "linear_num_heads"), HEADS),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("linear_num_key_heads",), KV_HEADS),
    **dict.fromkeys(("linear_num_value_heads",), HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), HEAD),
    "mamba_d_ssm": 128,
    "lru_width": HIDDEN,
    # positions and vocabularies
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), CONTEXT),
    **dict.fromkeys(("max_target_positions", "position_bias_max_distance"), CONTEXT),
    **dict.fromkeys(
        ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCABULARY
    ),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 16),
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
    "sep_token_id": None,
    "cls_token_id": None,
    # decoder mode and determinism
    "is_decoder": True,
    "add_cross_attention": False,
    "use_cache": False,
    "initializer_range": 0.1,
    "init_std": 0.1,
    "router_jitter_noise": 0.01,
}
"""By the name of a configuration field; applied to every class with the field, and to its sub-configurations."""

_CONV = ["conv", "full_attention", "conv"]
_HYBRID = ["linear_attention", "full_attention", "linear_attention"]
_SWA = ["sliding_attention", "full_attention", "sliding_attention"]
_ROPES = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")}
_VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "image_size": 32,
    "patch_size": 16,
}
_ZAMBA = {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 4}
_DOTS3 = {
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": HEADS,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 24,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": HEAD,
    "swa_v_head_dim": HEAD,
}
_QWEN4 = {
    "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD,
    "indexer_budget": WINDOW,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 200,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "heads_per_ngram": 4,
    "hc_lowrank": 16,
}
_GEMMA4 = {
    "global_head_dim": 2 * HEAD,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", *_SWA[:2], "full_attention"],
    "num_kv_shared_layers": 2,
    "attention_k_eq_v": True,
}

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "blt": {
        "encoder_hash_byte_group_vocab": 100,
        **{
            f"{part}_config": {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": 2}
            | {"intermediate_size": 96, "vocab_size": VOCABULARY, "hidden_size_global": 2 * HIDDEN}
            for part in ("patcher", "encoder", "decoder")
        },
        "global_config": {"hidden_size": 2 * HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS},
    },
    "cohere_compass_text": {"layer_types": _SWA, "num_hidden_layers": 3, "rope_parameters": _ROPES},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 2.0}},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN, "mlp_layer_types": ["dense"] * 4},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
        "text_config": _DOTS3,
    },
    "dots3_note_text": _DOTS3,
    "fuyu": {"text_config": {"model_type": "persimmon"}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", **_VISION}, "mm_tokens_per_image": 4},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention", *_SWA],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0],
    },
    "gemma4_text": _GEMMA4 | {"enable_moe_block": True},
    "gemma4_unified": {"vision_config": {"patch_size": 2, "mm_embed_dim": HIDDEN, "mm_posemb_size": 16}},
    "gemma4_unified_text": _GEMMA4,
    "git": {"vision_config": _VISION},
    "got_ocr2": {
        "text_config": {"model_type": "qwen2"},
        "vision_config": _VISION | {"output_channels": HIDDEN, "mlp_dim": 96, "global_attn_indexes": [0]},
    },
    "gpt-sw3": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": _HYBRID, "num_hidden_layers": 3},
    "hrm_text": {"num_hidden_layers": 2},
    "laguna": {"layer_types": _SWA, "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "lfm2": {"layer_types": _CONV, "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": _CONV, "num_hidden_layers": 3},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mellum": {"layer_types": _SWA, "num_hidden_layers": 3, "mlp_layer_types": ["sparse"] * 3},
    "ministral": {"layer_types": _SWA, "num_hidden_layers": 3},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "modernbert-decoder": {"cls_token_id": 2, "sep_token_id": 1, "local_attention": 2 * WINDOW},
    "moshi": {"audio_vocab_size": 16},
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3"}},
    "phi4_multimodal": {
        "vision_config": _VISION | {"crop_size": 32},
        "audio_config": {"num_blocks": 1, "ext_pw_out_channel": HIDDEN, "depthwise_separable_out_channel": HIDDEN}
        | {"nemo_conv_channels": HIDDEN},
    },
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 32], "attn_layers": ["local", "lsh"]},
    "roc_bert": {
        "pronunciation_vocab_size": VOCABULARY,
        "pronunciation_embed_dim": 16,
        "shape_vocab_size": VOCABULARY,
        "shape_embed_dim": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA,
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"], "num_hidden_layers": 2},
}
"""By architecture: fields that need another value than in SIZES. Nested dictionaries are for sub-configurations."""

KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "layer_rope_theta")
"""Lists with one entry per layer."""


def architectures() -> list[str]:
    """Every model type that AutoModelForCausalLM knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


UNBUILT = {
    "gemma3n": "its image encoder needs the library timm",
    "gemma4_assistant": "a drafter: it reads the keys and values of the model that it drafts for",
    "gemma4_unified_assistant": "a drafter: it reads the keys and values of the model that it drafts for",
    "musicgen": "AutoModelForCausalLM cannot make its decoder from the whole configuration",
    "musicgen_melody": "AutoModelForCausalLM cannot make its decoder from the whole configuration",
}
"""By architecture: reason why transformers' AutoModelForCausalLM cannot build or run it."""


def tiny_config(architecture: str) -> Any:
    """Build the configuration of a tiny model of this type. Propagates errors of transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[architecture]
    return kind(**_fields(kind, SPECIAL.get(architecture, {})))


def tiny_model(architecture: str, seed: int = 0) -> nn.Module:
    """Build a random model in fp32, in eval mode. Propagates errors of transformers."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(architecture)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"the tiny model would have {size:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        randomise(model)
    spread_logits(model.eval())
    return model


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Move every parameter, and router biases (which are buffers), away from the initial value."""
    saved, buffers = set(model.state_dict()), {name for name, _ in model.named_buffers()}
    for name, tensor in [*model.named_parameters(), *_floating_buffers(model)]:
        if name not in saved or (name in buffers and "bias" not in name):  # other buffers derive from the configuration
            continue
        generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
        noise = torch.randn(tensor.shape, generator=generator)
        if not bool(tensor.isfinite().all()):
            tensor.zero_()
        if tensor.ndim < 2:
            tensor.add_(noise, alpha=0.2)
        elif (spread := float(tensor.std())) < 0.05:
            tensor.add_(noise, alpha=0.1)
        else:
            tensor.add_(noise, alpha=0.1 * spread)


@torch.no_grad()
def spread_logits(model: Any) -> None:
    """Scale the output layer until logits have a standard deviation of about 1.5, so that tokens differ clearly."""
    tokens = torch.randint(8, VOCABULARY, (1, 64), generator=torch.Generator().manual_seed(0))
    head = model.get_output_embeddings()
    for _ in range(0 if head is None else 4):
        logits = model(input_ids=tokens, use_cache=False).logits
        head.weight.mul_(min(8.0, max(0.1, 1.5 / float(logits.std(-1).mean()))))


def _floating_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            yield name, buffer


def _fields(kind: Any, special: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a configuration class: small sizes, no dropout, and one layer of every kind."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = {field.name: field for field in dataclasses.fields(kind)}
    chosen: dict[str, Any] = {}
    for name, field in fields.items():
        if name in SIZES:
            chosen[name] = SIZES[name]
        elif ("dropout" in name or "pdrop" in name or "layerdrop" in name) and field.default not in (None, 0.0):
            chosen[name] = 0.0
    if "kv_lora_rank" in fields:  # multi-head latent attention has as many keys as queries
        chosen["num_key_value_heads"] = HEADS
    for name, part in (kind.sub_configs or {}).items():
        own = special.get(name, {})
        part = CONFIG_MAPPING[own["model_type"]] if "model_type" in own else part
        if dataclasses.is_dataclass(part) and getattr(part, "__name__", "") not in ("AutoConfig", "PreTrainedConfig"):
            chosen[name] = _fields(part, own)
    if "num_hidden_layers" not in special:
        chosen |= _layers(kind, chosen, special)
    chosen |= {name: value for name, value in special.items() if name not in (kind.sub_configs or {})}
    return {
        name: value
        for name, value in chosen.items()
        if name in fields or name in special or name == "attn_implementation"
    }


def _default(kind: Any, chosen: dict[str, Any]) -> Any:
    """The configuration with its default number of layers, if it is valid."""
    try:
        return kind(**{name: value for name, value in chosen.items() if name != "num_hidden_layers"})
    except Exception:  # each class checks in its own way
        return kind()


def _layers(kind: Any, chosen: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
    """Lists with the kind of each layer, reduced to one layer of every combination (at least two in total)."""
    default = _default(kind, {**chosen, **special})
    lists = {name: list(value) for name in KINDS if isinstance(value := getattr(default, name, None), Sequence)}
    lists = {name: value for name, value in lists.items() if value and name not in special}
    if not lists or "num_hidden_layers" not in chosen:
        return {}
    depth = min(len(value) for value in lists.values())
    rows = [tuple(repr(value[i]) for value in lists.values()) for i in range(depth)]
    kept = sorted({row: i for i, row in reversed(list(enumerate(rows)))}.values())
    while len(kept) < 3 and len(kept) < depth:
        kept.append(next(i for i in range(depth) if i not in kept))
    kept = sorted(kept)
    return {name: [value[i] for i in kept] for name, value in lists.items()} | {"num_hidden_layers": len(kept)}
