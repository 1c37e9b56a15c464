"""Tiny random checkpoints of every vision-language family that is trained, with processors that need only Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from rollmill.data.picture_prompts import picture_only

FAMILIES = [
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "llava", "llava_next", "llava_onevision", "internvl",
    "mistral3", "gemma3", "paligemma",
]  # fmt: skip

_SPECIAL = [
    "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<image>", "<fake_token_around_image>",
    "<end_of_utterance>", "<global-img>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<IMG_CONTEXT>", "<img>", "</img>",
    *(f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)),
]  # fmt: skip
_GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_PLACES = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "llava": "<image>",
    "llava_next": "<image>",
    "llava_onevision": "<image>",
    "internvl": "<IMG_CONTEXT>",
    "mistral3": "[IMG]",
    "gemma3": "<start_of_image>",
}


def picture_tokenizer(place: str) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, with the families' special tokens and a chat template."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<pad>", "<eos>", *map(chr, range(32, 127)), "\n"])}
    backend = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    own = _GEMMA if place == _PLACES["gemma3"] else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", extra_special_tokens=own
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*_SPECIAL, *own.values()]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}" + place + "{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endif %}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    return tokenizer


def picture_checkpoint(folder: Path, family: str, seed: int = 0, **text: Any) -> Path:
    """Write a tiny checkpoint of a family with random weights; `text` changes its text config."""
    if family == "paligemma":
        tokenizer = _plain_tokenizer()
        processor = _processor(family, tokenizer)  # adds tokens
    else:
        tokenizer = picture_tokenizer(_PLACES["qwen" if family.startswith("qwen") else family])
        processor = _processor(family, tokenizer)
    config = _config(family, tokenizer, text)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    if family == "gemma3":  # its projector begins with zeros
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _plain_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer as PaliGemma's: with a token for the beginning of a text, and without chat template."""
    tokenizer = picture_tokenizer("<image>")
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    return tokenizer


def _config(family: str, tokenizer: Any, text: dict[str, Any]) -> Any:
    ids = tokenizer.convert_tokens_to_ids
    own: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": len(tokenizer), "max_position_embeddings": 512,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
        "initializer_range": 0.2, **text,
    }  # fmt: skip
    common: dict[str, Any] = {"tie_word_embeddings": False, "initializer_range": 0.2}
    tower: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    if family.startswith("qwen"):
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        common |= {
            "image_token_id": ids("<|image_pad|>"), "video_token_id": ids("<|video_pad|>"),
            "vision_start_token_id": ids("<|vision_start|>"), "vision_end_token_id": ids("<|vision_end|>"),
        }  # fmt: skip
        own["rope_parameters"] = rope
        if family == "qwen2_vl":
            tower = {"embed_dim": 16, "hidden_size": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
        elif family == "qwen2_5_vl":
            tower = {
                "hidden_size": 16, "intermediate_size": 32, "depth": 2, "num_heads": 2, "out_hidden_size": 32,
                "window_size": 28, "fullatt_block_indexes": [1],
            }  # fmt: skip
        else:
            tower = {
                "hidden_size": 16, "intermediate_size": 32, "depth": 2, "num_heads": 2, "out_hidden_size": 32,
                "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64, "patch_size": 14,
            }  # fmt: skip
        return AutoConfig.for_model(family, text_config=own, vision_config=tower | {"initializer_range": 0.2}, **common)
    if family in ("idefics3", "smolvlm"):
        tower |= {"image_size": 28, "patch_size": 7}
        return AutoConfig.for_model(
            family, text_config=own | {"model_type": "llama"}, vision_config=tower, scale_factor=2,
            image_token_id=ids("<image>"), pad_token_id=tokenizer.pad_token_id, **common,
        )  # fmt: skip
    if family == "llava":
        vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7, "projection_dim": 16, **tower}
        return AutoConfig.for_model(
            "llava", text_config=own | {"model_type": "llama"}, vision_config=vision,
            image_token_id=ids("<image>"), vision_feature_layer=-1, **common,
        )  # fmt: skip
    if family in ("llava_next", "llava_onevision"):
        clip = family == "llava_next"
        vision = {
            "model_type": "clip_vision_model" if clip else "siglip_vision_model",
            "image_size": 28,
            "patch_size": 7,
        }
        vision |= tower | ({"projection_dim": 16} if clip else {"vision_use_head": False})
        return AutoConfig.for_model(
            family, text_config=own | {"model_type": "llama" if clip else "qwen2"}, vision_config=vision,
            image_token_id=ids("<image>"), image_token_index=ids("<image>"), vision_feature_layer=-1,
            image_grid_pinpoints=_GRID, **common,
        )  # fmt: skip
    if family == "internvl":
        vision = {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7], **tower}
        return AutoConfig.for_model(
            "internvl", text_config=own | {"model_type": "qwen2"}, vision_config=vision,
            image_token_id=ids("<IMG_CONTEXT>"), downsample_ratio=0.5, **common,
        )  # fmt: skip
    if family == "gemma3":
        vision = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 7, "vision_use_head": False}
        return AutoConfig.for_model(
            "gemma3",
            text_config={**own, "query_pre_attn_scalar": 8, "sliding_window": 24, "sliding_window_pattern": 2},
            vision_config=vision | tower, mm_tokens_per_image=16, image_token_index=ids("<image_soft_token>"),
            boi_token_index=ids("<start_of_image>"), eoi_token_index=ids("<end_of_image>"), initializer_range=0.2,
        )  # fmt: skip
    if family == "paligemma":
        vision = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 7, "vision_use_head": False}
        own = {"model_type": "gemma", **own}
        if own["model_type"] == "gemma2":  # PaliGemma 2
            own = {"query_pre_attn_scalar": 8, "sliding_window": 24, "final_logit_softcapping": 5.0, **own}
        return AutoConfig.for_model(
            "paligemma", text_config=own, vision_config=vision | tower, image_token_index=ids("<image>"),
            projection_dim=32, hidden_size=32, initializer_range=0.2,
        )  # fmt: skip
    vision = {"model_type": "pixtral", "image_size": 56, "patch_size": 7, "head_dim": 8, **tower}
    return AutoConfig.for_model(
        "mistral3", text_config=own | {"model_type": "mistral"}, vision_config=vision,
        image_token_id=ids("[IMG]"), spatial_merge_size=2, **common,
    )  # fmt: skip


_GRID = [[28, 56], [56, 28], [56, 56]]


def _processor(family: str, tokenizer: Any) -> Any:
    template = tokenizer.chat_template
    if family.startswith("qwen"):
        images = Qwen2VLImageProcessorPil(patch_size=14, min_pixels=28 * 28, max_pixels=28 * 28 * 6)
        return _qwen(images, tokenizer, template)
    if family in ("idefics3", "smolvlm"):
        images = Idefics3ImageProcessorPil(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, do_image_splitting=True
        )
        return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    if family == "mistral3":
        images = PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size=7)
        return LlavaProcessor(  # PixtralProcessor needs torchvision; pictures of a prompt have one size here
            images, tokenizer, patch_size=14, vision_feature_select_strategy="full", image_token="[IMG]",
            num_additional_image_tokens=0, chat_template=template,
        )  # fmt: skip
    if family == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
        return Gemma3Processor(images, tokenizer, image_seq_length=16, chat_template=template)
    if family == "paligemma":
        siglip = SiglipImageProcessorPil(size={"height": 28, "width": 28})
        siglip.image_seq_length = 16
        return PaliGemmaProcessor(siglip, tokenizer)
    if family == "llava_next":
        images = LlavaNextImageProcessorPil(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=_GRID
        )
        return LlavaNextProcessor(
            images, tokenizer, patch_size=7, vision_feature_select_strategy="default", image_token="<image>",
            num_additional_image_tokens=1, chat_template=template,
        )  # fmt: skip
    if family == "llava_onevision":
        images = LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, image_grid_pinpoints=_GRID)
        return picture_only(LlavaOnevisionProcessor)(
            images, tokenizer, None, num_image_tokens=16, vision_feature_select_strategy="full", chat_template=template
        )
    images = LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    token = "<image>" if family == "llava" else "<IMG_CONTEXT>"
    extra = 1 if family == "llava" else 0
    if family == "llava":
        return LlavaProcessor(
            images, tokenizer, patch_size=7, vision_feature_select_strategy="default", image_token=token,
            num_additional_image_tokens=extra, chat_template=template,
        )  # fmt: skip
    return LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="full", image_token=token,
        num_additional_image_tokens=0, chat_template=template,
    )  # fmt: skip


def _qwen(images: Any, tokenizer: Any, template: str) -> Any:
    return picture_only(Qwen2VLProcessor)(images, tokenizer, None, chat_template=template)
